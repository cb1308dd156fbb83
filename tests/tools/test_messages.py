"""Chats with calls: what our templates render is what ``transformers`` renders; what is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from radixrt.errors import InvalidRequest
from radixrt.model.chat_template import ChatTemplate
from radixrt.tools import (
    ChatParser,
    Tool,
    answer_of,
    choose_reasoning_format,
    choose_tool_format,
    read_choice,
    read_tools,
    template_chat,
)
from radixrt.tools.formats import HERMES, JSON, LLAMA, MISTRAL, MISTRAL_ARGS, PYTHONIC

QWEN = """{%- if tools %}<|im_start|>system
# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "assistant" and message.tool_calls %}<|im_start|>assistant
{%- if message.content %}
{{ message.content }}
{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- set call = tool_call.function %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SHORT_IDS = """{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have 9 characters") }}{% endif %}
{{- {"name": call.function.name, "arguments": call.function.arguments, "id": call.id} | tojson }}
{%- if not loop.last %}, {% endif %}
{%- endfor %}]</s>
{%- elif message.role == "tool" %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception("ids have 9 characters") }}{% endif %}
{{- "[TOOL_RESULTS] " + ({"content": message.content, "call_id": message.tool_call_id} | tojson) }}[/TOOL_RESULTS]
{%- else %}[{{ message.role }}] {{ message.content }}{% endif %}
{%- endfor %}"""
AS_TEXT = """{% if tools %}{% endif %}{% for message in messages %}{% for call in message.tool_calls or [] %}
{{- call['function']['name'] + ':' + call['function']['arguments'] + ';' }}{% endfor %}{% endfor %}"""
PLAIN = """{% for message in messages %}<{{ message.role }}>{{ message.content }}
{% endfor %}"""

TOOLS = read_tools(
    "tools",
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "Über",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
        for name in ("weather", "time")
    ],
)
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call_{i}",
                "type": "function",
                "function": {"name": name, "arguments": '{"city": "Pâris", "n": 1}'},
            }
            for i, name in enumerate(("weather", "time"))
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
]


@pytest.mark.parametrize(("template", "format"), [(QWEN, HERMES), (SHORT_IDS, MISTRAL)])
def test_rendered_as_transformers_does(template: str, format: Any) -> None:
    assert choose_tool_format(template) is format
    messages, more = template_chat("messages", CHAT, TOOLS, format, template)
    ours = ChatTemplate(template).render(messages, **more)
    known = json.loads(json.dumps(CHAT))
    for call, sent in zip(known[1]["tool_calls"], messages[1]["tool_calls"], strict=True):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        call["id"] = sent["id"]
    for result, sent in zip(known[2:], messages[2:], strict=True):
        result["tool_call_id"] = sent["tool_call_id"]
    known[1]["content"] = ""
    schemas = [tool.to_openai() for tool in TOOLS]
    rendered, _ = render_jinja_template([known], tools=schemas, chat_template=template, add_generation_prompt=True)
    assert ours == rendered[0]
    assert [message["tool_call_id"] for message in messages[2:]] == [call["id"] for call in messages[1]["tool_calls"]]


def test_a_template_that_joins_texts_gets_the_text() -> None:
    messages, more = template_chat("messages", CHAT, TOOLS, HERMES, AS_TEXT)
    assert ChatTemplate(AS_TEXT).render(messages, **more).startswith('weather:{"city": "Pâris", "n": 1};')


def test_in_words_the_history_is_what_the_model_wrote() -> None:
    assert choose_tool_format(PLAIN) is JSON and choose_tool_format(None) is JSON
    messages, more = template_chat("messages", CHAT, TOOLS, JSON, PLAIN)
    assert more == {} and [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert '"name": "weather"' in messages[0]["content"] and "Über" in messages[0]["content"]
    parser = ChatParser(JSON, None, TOOLS)
    text = messages[2]["content"]
    calls = answer_of(parser.push(text) + parser.finish()).calls
    assert [(call.name, call.arguments) for call in calls] == [
        (name, '{"city": "Pâris", "n": 1}') for name in ("weather", "time")
    ]
    assert "sunny" in messages[3]["content"] and "noon" in messages[3]["content"]
    with_system = [{"role": "system", "content": "Be brief."}, *CHAT]
    messages, _ = template_chat("messages", with_system, TOOLS, JSON, PLAIN)
    assert messages[0]["content"].startswith("Be brief.\n\n") and messages[1]["role"] == "user"


def test_reasoning_comes_under_one_name() -> None:
    for name in ("reasoning", "reasoning_content"):
        messages, _ = template_chat("messages", [{"role": "assistant", "content": "x", name: "why"}], (), None, QWEN)
        assert messages == [{"role": "assistant", "content": "x", "reasoning_content": "why"}]


def _with(at: int, **changes: Any) -> list[dict[str, Any]]:
    return [{**message, **changes} if i == at else message for i, message in enumerate(CHAT)]


def _call(**function: Any) -> list[dict[str, Any]]:
    return [{"id": "a", "type": "function", "function": {"name": "time", "arguments": "{}", **function}}]


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (_with(2, tool_call_id="call_7"), "messages[2].tool_call_id"),
        (_with(2, content=None), "messages[2].content"),
        (_with(1, tool_calls="x"), "messages[1].tool_calls"),
        (_with(1, tool_calls=_call(arguments='{"a"')), "messages[1].tool_calls[0].function.arguments"),
        (_with(1, tool_calls=_call(arguments="[1]")), "messages[1].tool_calls[0].function.arguments"),
        (_with(1, tool_calls=_call(name="")), "messages[1].tool_calls[0].function.name"),
        (_with(1, tool_calls=_call() * 2), "messages[1].tool_calls[1].id"),
        (_with(0, tool_calls=_call()), "messages[0].tool_calls"),
    ],
)
def test_what_is_wrong_with_messages(chat: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        template_chat("messages", chat, TOOLS, HERMES, QWEN)
    assert refused.value.field == field


def _tool(name: Any = "f", parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ("x", "tools"),
        ([1], "tools[0]"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([_tool(), _tool()], "tools[1].function.name"),
        ([_tool("a b")], "tools[0].function.name"),
        ([_tool(None)], "tools[0].function.name"),
        ([_tool(parameters=[])], "tools[0].function.parameters"),
        ([_tool(parameters={"type": "string"})], "tools[0].function.parameters.type"),
        ([_tool(), _tool("g", {"properties": {"a": {"$ref": "http://x/y"}}})], "tools[1].function.parameters"),
        ([_tool("g", {"properties": {"a": {"type": "strin"}}})], "tools[0].function.parameters"),
        ([_tool(strict="yes")], "tools[0].function.strict"),
        ([_tool(descriptoin="x")], "tools[0].function.descriptoin"),
    ],
)
def test_what_is_wrong_with_tools(tools: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_tools("tools", tools)
    assert refused.value.field == field


def test_other_forms_of_tools() -> None:
    assert read_tools("tools", [{"type": "function", "name": "f"}], "responses") == (Tool("f"),)
    schema = {"type": "object", "properties": {"a": {}}}
    assert read_tools("tools", [{"name": "f", "input_schema": schema}], "anthropic") == (Tool("f", "", schema),)


@pytest.mark.parametrize(
    ("value", "kind", "name"),
    [
        (None, "auto", None),
        ("none", "none", None),
        ("required", "required", None),
        ({"type": "any"}, "required", None),
        ({"type": "function", "function": {"name": "time"}}, "named", "time"),
        ({"type": "tool", "name": "time"}, "named", "time"),
    ],
)
def test_choices(value: Any, kind: str, name: str | None) -> None:
    choice = read_choice(value, TOOLS)
    assert (choice.kind, choice.name) == (kind, name)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("requird", "tool_choice"),
        (3, "tool_choice"),
        ({"type": "function", "function": {"name": "tine"}}, "tool_choice.function.name"),
        ({"type": "allowed_tools"}, "tool_choice.type"),
    ],
)
def test_what_is_wrong_with_a_choice(value: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_choice(value, TOOLS)
    assert refused.value.field == field
    with pytest.raises(InvalidRequest):
        read_choice("required", ())


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{% if tools %}<|python_tag|>{% endif %}", LLAMA),
        ("{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]{% endif %}", MISTRAL_ARGS),
        ("{% if tools %}[func_name1(params_name1=1)]{% endif %}", PYTHONIC),
        ("{% if tools %}<tool_call><function=x>{% endif %}", JSON),
        ("{# tools #}<tool_call>", JSON),
    ],
)
def test_formats_from_templates(template: str, format: Any) -> None:
    assert choose_tool_format(template) is format
    assert choose_tool_format(template, override="qwen") is HERMES
    assert choose_tool_format(template, override="none") is None
    with pytest.raises(InvalidRequest, match="did you mean 'hermes'"):
        choose_tool_format(template, override="hermse")


def test_reasoning_from_templates() -> None:
    assert choose_reasoning_format(PLAIN) is None
    found = choose_reasoning_format("{{ '<think>' }}{{ x.split('</think>') }}")
    assert found is not None and found.name == "think"
    assert choose_reasoning_format(PLAIN, ["[THINK]", "[/THINK]"]).name == "mistral"  # type: ignore[union-attr]
    assert choose_reasoning_format(PLAIN, override="deepseek_r1") == found
    with pytest.raises(InvalidRequest, match="reasoning_parser"):
        choose_reasoning_format(PLAIN, override="thinkk")
