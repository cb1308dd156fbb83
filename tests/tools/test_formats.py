"""Constraints of calls: what they allow is read back as calls whose arguments ``jsonschema`` calls valid; what they must refuse, they do."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from radixrt.errors import InvalidRequest
from radixrt.grammar.matcher import CompiledConstraint
from radixrt.model.tokenizer import Tokenizer, load_tokenizer
from radixrt.tools import (
    CallBegin,
    ChatParser,
    Content,
    Tool,
    ToolChoice,
    ToolFormat,
    answer_of,
    definitions,
    read_tools,
)
from radixrt.tools.formats import HERMES, JSON, LLAMA, MISTRAL, MISTRAL_ARGS, PYTHONIC, TOOL_FORMATS
from radixrt.tools.literals import to_json
from radixrt.tools.reasoning import THINK

_POINT = {"type": "object", "properties": {"x": {"type": "number"}, "on": {"type": "boolean"}}, "required": ["x"]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "plain": {
        "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
        "required": ["city"],
    },
    "none": {"type": "object", "properties": {}},
    "words": {
        "type": "object",
        "properties": {
            "flag": {"type": "boolean"},
            "maybe": {"type": ["string", "null"], "maxLength": 4},
            "either": {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
            "one": {"enum": ["a'\"\\", None, True, 3]},
        },
    },
    "nested": {
        "type": "object",
        "properties": {
            "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": 3},
            "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["flags", "points"],
        "$defs": {"point": _POINT},
    },
    "tree": {
        "type": "object",
        "properties": {"node": {"$ref": "#/$defs/node"}},
        "required": ["node"],
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"leaf": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}},
                "required": ["leaf"],
                "additionalProperties": False,
            }
        },
    },
    "odd-names": {"type": "object", "properties": {"a-b": {"type": "boolean"}, "c": {"type": "integer"}}, "required": ["a-b"]},
    "either": {
        "type": "object",
        "anyOf": [
            {"properties": {"a": {"const": True}}, "required": ["a"], "additionalProperties": False},
            {"properties": {"b": {"type": "null"}}, "required": ["b"], "additionalProperties": False},
        ],
    },
    "dates": {
        "type": "object",
        "properties": {"day": {"type": "string", "format": "date"}, "code": {"type": "string", "pattern": "^[A-Z]{2}\\d$"}},
        "required": ["day", "code"],
    },
}  # fmt: skip
TOOLS = tuple(Tool(name, "", schema) for name, schema in SCHEMAS.items())
FORMATS = list(TOOL_FORMATS.values())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer()


def drawn(compiled: CompiledConstraint, tokenizer: Tokenizer, seed: int, most: int = 400) -> str:
    """An output of random tokens that ends within ``most`` tokens."""
    draw = random.Random(seed)
    matcher = compiled.matcher()
    mask = np.zeros((1, (tokenizer.vocab_size + 31) // 32), dtype=np.int32)
    ids: list[int] = []
    while len(ids) < most:
        matcher.fill_mask_within(mask, 0, most - len(ids))
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = int(draw.choice(list(allowed)))
        if token in tokenizer.eos_ids:
            break
        assert matcher.accept(token)
        ids.append(token)
    return b"".join(tokenizer.token_bytes(id) for id in ids).decode()


def read(format: ToolFormat, text: str, thinks: Any = None) -> tuple[str, list[tuple[str, Any]]]:
    parser = ChatParser(format, thinks, TOOLS)
    answer = answer_of(parser.push(text) + parser.finish())
    return answer.content, [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_a_named_call_of_random_tokens(format: ToolFormat, tool: Tool, tokenizer: Tokenizer) -> None:
    constraint = format.constraint(TOOLS, ToolChoice("named", tool.name))
    assert constraint is not None
    compiled = constraint.compile(tokenizer)
    for seed in range(5):
        text = drawn(compiled, tokenizer, seed)
        content, calls = read(format, text)
        assert (content, [name for name, _ in calls]) == ("", [tool.name]), text
        jsonschema.validate(calls[0][1], {"type": "object", **tool.parameters})


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("kind", ["required", "auto"])
def test_free_calls_of_random_tokens(format: ToolFormat, kind: Any, tokenizer: Tokenizer) -> None:
    for parallel in (True, False):
        constraint = format.constraint(TOOLS, ToolChoice(kind), parallel)
        assert constraint is not None
        compiled = constraint.compile(tokenizer)
        for seed in range(4):
            text = drawn(compiled, tokenizer, seed, 200)
            content, calls = read(format, text)
            if kind == "required":
                assert content == "" and calls, text
                assert parallel or len(calls) == 1
            for name, arguments in calls:
                jsonschema.validate(arguments, {"type": "object", **SCHEMAS[name]})


CITY = '{"city": "Rome"}'
TAKEN: list[tuple[ToolFormat, str]] = [
    (HERMES, '<tool_call>\n{"name": "plain", "arguments": ' + CITY + "}\n</tool_call>"),
    (JSON, '<tool_call>\n{"name": "plain", "arguments": ' + CITY + "}\n</tool_call>"),
    (LLAMA, '{"name": "plain", "parameters": ' + CITY + "}"),
    (MISTRAL, '[TOOL_CALLS][{"name": "plain", "arguments": ' + CITY + "}]"),
    (MISTRAL, '[TOOL_CALLS][{"name": "plain", "arguments": ' + CITY + ', "id": "abcDEF123"}]'),
    (MISTRAL_ARGS, "[TOOL_CALLS]plain[ARGS]" + CITY),
    (PYTHONIC, '[plain(city="Rome")]'),
    (PYTHONIC, '[plain(city="Rome", days=3)]'),
    (PYTHONIC, "[words()]"),
    (PYTHONIC, "[words(flag=True, maybe=None, either=False, one=None)]"),
    (PYTHONIC, "[words(either=7)]"),
    (PYTHONIC, '[nested(points=[{"x": 1, "on": True}], flags=[True, False])]'),
]


@pytest.mark.parametrize(("format", "call"), TAKEN)
def test_what_is_taken_and_refused(format: ToolFormat, call: str, tokenizer: Tokenizer) -> None:
    required, auto, one = (
        format.constraint(TOOLS, ToolChoice(kind), parallel).compile(tokenizer)  # type: ignore[arg-type, union-attr]
        for kind, parallel in (("required", True), ("auto", True), ("required", False))
    )
    assert required.accepts(call) and auto.accepts(call) and one.accepts(call)
    assert auto.accepts("Some text.") and not required.accepts("Some text.") and not required.accepts("")
    assert auto.accepts("Well: " + call) and not required.accepts("Well: " + call)
    body = call.removeprefix(format.open).removesuffix(format.close)
    for count in (2, 3, 8):
        several = format.open + format.separator.join([body] * count) + format.close
        assert required.accepts(several) and not one.accepts(several)
        assert len(read(format, several)[1]) == count
    for wrong in (call.replace("plain", "plane"), call.replace("Rome", "Constantinople"), call.replace("city", "town")):
        if wrong != call:
            assert not required.accepts(wrong)
            if format is not PYTHONIC or "plane" not in wrong:  # a list of another name is text
                assert not auto.accepts(wrong)
    assert not required.accepts(call[:-1]) and (format is PYTHONIC or not auto.accepts(call[:-1]))


def test_named_takes_that_tool_alone(tokenizer: Tokenizer) -> None:
    constraint = HERMES.constraint(TOOLS, ToolChoice("named", "none"))
    assert constraint is not None
    compiled = constraint.compile(tokenizer)
    assert compiled.accepts('<tool_call>\n{"name": "none", "arguments": {}}\n</tool_call>')
    assert not compiled.accepts('<tool_call>\n{"name": "plain", "arguments": {"city": "Rome"}}\n</tool_call>')
    assert HERMES.constraint(TOOLS, ToolChoice("none")) is None and HERMES.constraint((), ToolChoice("auto")) is None


def test_a_constraint_begins_after_thinking(tokenizer: Tokenizer) -> None:
    constraint = HERMES.constraint(TOOLS, ToolChoice("required"))
    assert constraint is not None
    call = '<tool_call>\n{"name": "none", "arguments": {}}\n</tool_call>'
    maybe = THINK.before(constraint).compile(tokenizer)
    assert maybe.accepts(call) and maybe.accepts(f"<think>\nHm {{.\n</think>\n\n{call}")
    assert not maybe.accepts("<think>Hm") and not maybe.accepts("Hm </think>" + call)
    opened = THINK.after("<|im_start|>assistant\n<think>\n")
    assert opened is not None and opened.starts_open
    inside = opened.before(constraint).compile(tokenizer)
    assert inside.accepts(f"Hm.</think>{call}") and not inside.accepts(call)
    assert THINK.after("assistant\n<think>\n\n</think>\n\n") is None
    assert THINK.after("assistant\n") == THINK
    for format in FORMATS:  # thinking before it does not make it too deep
        for kind in ("auto", "required"):
            calls = format.constraint(TOOLS, ToolChoice(kind))  # type: ignore[arg-type]
            assert calls is not None and THINK.before(calls).depth <= 20


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ("a=1, b = 'x'", {"a": 1, "b": "x"}),
        ("a=-1.5e3, b=[True, False, None, (1, 2), (3,)]", {"a": -1500.0, "b": [True, False, None, [1, 2], [3]]}),
        ("a={'k': {\"l\": []}, 'm': '\"'}", {"a": {"k": {"l": []}, "m": '"'}}),
        (r"a='\x41\n\'', b=" + r'"\ud83d\ude00"', {"a": "A\n'", "b": "😀"}),
        ("**{'a': 1}", {"a": 1}),
        ("a='(=True,'", {"a": "(=True,"}),
        ("1, 2", None),
        ("a=b", None),
        ("a=f(1)", None),
        ("a=1_000", None),
        ("a=[1", None),
        ("a=[1)]", None),
        ("a=" + "[" * 200 + "]" * 200, {"a": json.loads("[" * 200 + "]" * 200)}),
        ("a=1 b=2", None),
        ("**[1]", None),
        ("a=NaN", None),
        (r'"e\u00e9=None', None),  # the string does not end
    ],
)
def test_python_literals(text: str, value: Any) -> None:
    made = to_json(text)
    assert (None if made is None else json.loads(made)) == value


def test_parts_of_free_text() -> None:
    parser = ChatParser(HERMES, None, TOOLS)
    parts = parser.push("Hello") + parser.finish()
    assert parts == [Content("Hello")] and not any(isinstance(part, CallBegin) for part in parts)


def test_many_schemas_have_together_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"minProperties": 12, "maxProperties": 15, "properties": {f"p{i}": {"type": "integer"} for i in range(40)}}
    tools = [{"type": "function", "function": {"name": f"t{i}", "parameters": slow}} for i in range(40)]
    assert len(read_tools("tools", tools[:1])) == 1
    monkeypatch.setattr(definitions, "SECONDS", 0.2)
    with pytest.raises(InvalidRequest, match=r"tools\[[0-9]+\].function.parameters: .*takes? longer than"):
        read_tools("tools", tools)
