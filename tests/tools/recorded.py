"""Answers as models of each format write them, whole and broken, with what is in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radixrt.tools import ReasoningFormat, Tool, ToolFormat
from radixrt.tools.formats import HERMES, JSON, LLAMA, MISTRAL, MISTRAL_ARGS, PYTHONIC
from radixrt.tools.reasoning import REASONING_FORMATS, THINK

TOOLS = tuple(Tool(name) for name in ("get_weather", "add", "search", "write_file", "noop", "get-time", "db.query"))
OPEN = ReasoningFormat("think", "<think>", "</think>", starts_open=True)
BRACKETED = REASONING_FORMATS["mistral"]


@dataclass(frozen=True)
class Recorded:
    format: ToolFormat | None
    thinks: ReasoningFormat | None
    text: str
    content: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    reasoning: str = ""


def _h(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


_NESTED = '{"filter": {"and": [{"eq": {"a": [1, [2, {"b": "}"}]]}}, {}]}}'
_NESTED_VALUE = {"filter": {"and": [{"eq": {"a": [1, [2, {"b": "}"}]]}}, {}]}}
_PARIS = ("get_weather", {"city": "Paris"})
_ROME = ("get_weather", {"city": "Rome"})

RECORDED: tuple[Recorded, ...] = (
    # hermes and qwen
    Recorded(HERMES, None, "It is sunny today.", "It is sunny today."),
    Recorded(HERMES, None, _h("get_weather", '{"city": "Paris"}'), "", (_PARIS,)),
    Recorded(
        HERMES,
        None,
        _h("get_weather", '{"city": "Paris"}') + "\n" + _h("get_weather", '{"city": "Rome"}'),
        "",
        (_PARIS, _ROME),
    ),
    Recorded(HERMES, None, "Let me look.\n" + _h("search", _NESTED), "Let me look.", (("search", _NESTED_VALUE),)),
    Recorded(
        HERMES,
        THINK,
        "<think>\nThe user wants {x}.\n</think>\n\n" + _h("add", '{"a": 1, "b": 2}'),
        "",
        (("add", {"a": 1, "b": 2}),),
        "The user wants {x}.",
    ),
    Recorded(
        HERMES,
        OPEN,
        "Is <tool_call> right here? Yes.\n</think>\n\n" + _h("noop", "{}") + "\n",
        "",
        (("noop", {}),),
        "Is <tool_call> right here? Yes.",
    ),
    Recorded(
        HERMES,
        None,
        _h("write_file", '{"path": "a.html", "text": "<tool_call>\\n</tool_call> \\"{\\" \\\\"}'),
        "",
        (("write_file", {"path": "a.html", "text": '<tool_call>\n</tool_call> "{" \\'}),),
    ),
    Recorded(
        HERMES,
        None,
        _h("search", '{"q": "caf\\u00e9 \\ud83d\\ude00 \\/ 日本 😀"}'),
        "",
        (("search", {"q": "café 😀 / 日本 😀"}),),
    ),
    Recorded(HERMES, None, "A < b, <tool> is no call, <tool_cal too.", "A < b, <tool> is no call, <tool_cal too."),
    Recorded(HERMES, None, _h("nope", '{"a": 1}') + " after", _h("nope", '{"a": 1}') + " after"),
    Recorded(HERMES, None, '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>', "", (("add", {"a": 1}),)),
    Recorded(
        HERMES, None, '<tool_call>\n{"arguments": {"a": 1}, "name": "add"}\n</tool_call>', "", (("add", {"a": 1}),)
    ),
    Recorded(
        HERMES,
        None,
        '<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1}"}\n</tool_call>',
        "",
        (("add", {"a": 1}),),
    ),
    Recorded(HERMES, None, '<tool_call>\n{"name": "noop"}\n</tool_call>', "", (("noop", {}),)),
    Recorded(HERMES, None, '<tool_call>\n{"name": "noop", "arguments": null}\n</tool_call>\nok', "ok", (("noop", {}),)),
    Recorded(HERMES, None, '<tool_call>\n{"name": "add", "arguments": {"a": 1}', "", (("add", {"a": 1}),)),
    Recorded(
        HERMES,
        None,
        '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2',
        '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2',
    ),
    Recorded(HERMES, None, "text <tool_call>\n", "text <tool_call>\n"),
    Recorded(
        HERMES, None, "<tool_call>\n<tool_call>\n" + _h("noop", "{}"), "<tool_call>\n<tool_call>", (("noop", {}),)
    ),
    Recorded(
        HERMES,
        None,
        '<tool_call>{"name": "add", "arguments": {"a": 1]}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1]}}</tool_call>',
    ),
    Recorded(
        HERMES,
        None,
        "One.\n" + _h("noop", "{}") + "\nTwo.\n" + _h("get-time", '{"zone": "UTC"}'),
        "One.\nTwo.",
        (("noop", {}), ("get-time", {"zone": "UTC"})),
    ),
    Recorded(HERMES, THINK, "<think>never closed " + _h("noop", "{}"), "", (), "never closed " + _h("noop", "{}")),
    Recorded(HERMES, THINK, "  \n No thinking.", "  \n No thinking."),
    Recorded(HERMES, None, _h("search", "[" * 200 + "]" * 200), _h("search", "[" * 200 + "]" * 200)),
    Recorded(
        HERMES,
        None,
        _h("search", '{"q": ' + "[" * 200 + "]" * 200 + "}"),
        "",
        (("search", {"q": __import__("json").loads("[" * 200 + "]" * 200)}),),
    ),
    # llama3 json
    Recorded(LLAMA, None, '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", (_PARIS,)),
    Recorded(LLAMA, None, '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", (_PARIS,)),
    Recorded(
        LLAMA,
        None,
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_weather", "parameters": {"city": "Rome"}}',
        "",
        (_PARIS, _ROME),
    ),
    Recorded(LLAMA, None, '{"name": "search", "parameters": ' + _NESTED + "}", "", (("search", _NESTED_VALUE),)),
    Recorded(LLAMA, None, 'A person: {"name": "Bob", "age": 3}.', 'A person: {"name": "Bob", "age": 3}.'),
    Recorded(LLAMA, None, '<|python_tag|>print("hi")', '<|python_tag|>print("hi")'),
    Recorded(
        LLAMA,
        None,
        '{"name": "add", "parameters": {"a": "x; {\\"name\\": 1}"}};',
        "",
        (("add", {"a": 'x; {"name": 1}'}),),
    ),
    Recorded(LLAMA, None, '{"name": "add", "parameters": {"a": 1}}; and more', "; and more", (("add", {"a": 1}),)),
    Recorded(LLAMA, None, '{"name": "add", "param', '{"name": "add", "param'),
    # mistral
    Recorded(
        MISTRAL,
        None,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1B2c3D4e"}]',
        "",
        (_PARIS,),
    ),
    Recorded(
        MISTRAL,
        None,
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_weather", "arguments": {"city": "Rome"}}]',
        "",
        (_PARIS, _ROME),
    ),
    Recorded(
        MISTRAL,
        None,
        '[TOOL_CALLS] [{"name": "search", "arguments": ' + _NESTED + '}, {"name": "add", "argum',
        ' {"name": "add", "argum'.strip().join((", ", "")),
        (("search", _NESTED_VALUE),),
    ),
    Recorded(MISTRAL, None, "See [TOOL_CALL] and [1, 2].", "See [TOOL_CALL] and [1, 2]."),
    Recorded(
        MISTRAL,
        BRACKETED,
        '[THINK]Add them.[/THINK][TOOL_CALLS][{"name": "add", "arguments": {"a": "]}"}}]',
        "",
        (("add", {"a": "]}"}),),
        "Add them.",
    ),
    Recorded(
        MISTRAL_ARGS,
        None,
        'Sure.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]noop[ARGS]{}',
        "Sure.",
        (("add", {"a": 1}), ("noop", {})),
    ),
    Recorded(
        MISTRAL_ARGS,
        None,
        '[TOOL_CALLS]db.query[CALL_ID]a1B2c3D4e[ARGS]{"sql": "[TOOL_CALLS] {"}',
        "",
        (("db.query", {"sql": "[TOOL_CALLS] {"}),),
    ),
    Recorded(MISTRAL_ARGS, None, "[TOOL_CALLS]what is this {", "[TOOL_CALLS]what is this {"),
    # pythonic
    Recorded(PYTHONIC, None, '[get_weather(city="Paris")]', "", (_PARIS,)),
    Recorded(PYTHONIC, None, "[get_weather(city='Paris'), get_weather(city='Rome')]", "", (_PARIS, _ROME)),
    Recorded(
        PYTHONIC,
        None,
        """[add(a=-1.5e3, b=True, c=None, d=[1, (2, 'x',)], e={"k": False, 'l': "it's )]"}), noop()]""",
        "",
        (
            ("add", {"a": -1500.0, "b": True, "c": None, "d": [1, [2, "x"]], "e": {"k": False, "l": "it's )]"}}),
            ("noop", {}),
        ),
    ),
    Recorded(
        PYTHONIC,
        None,
        "[search(q='caf\\u00e9 \\x41 \\'', r=\"\\ud83d\\ude00\")]",
        "",
        (("search", {"q": "café A '", "r": "😀"}),),
    ),
    Recorded(
        PYTHONIC,
        None,
        "Here: [add(a=1)] done, [1, 2] and [other(a=1)].",
        "Here: done, [1, 2] and [other(a=1)].",
        (("add", {"a": 1}),),
    ),
    Recorded(PYTHONIC, None, "[add(a=1), add(a=open('x'))]", ", add(a=open('x'))]", (("add", {"a": 1}),)),
    Recorded(PYTHONIC, None, '[search(**{"q": true})]', "", (("search", {"q": True}),)),
    Recorded(PYTHONIC, None, "[add(a=1", "[add(a=1"),
    # generic json
    Recorded(
        JSON, None, "I will add.\n" + _h("add", '{"a": 40, "b": 2}'), "I will add.", (("add", {"a": 40, "b": 2}),)
    ),
    Recorded(
        JSON,
        None,
        _h("add", '{"a": 1E400, "b": 10000000000000000000000}'),
        "",
        (("add", {"a": float("inf"), "b": 10**22}),),
    ),
    # no tools
    Recorded(None, THINK, "<think>\na < b </thin\n</think>\nYes.  \n", "Yes.  \n", (), "a < b </thin"),
    Recorded(None, None, " <think> " + _h("add", "{}"), " <think> " + _h("add", "{}")),
)
