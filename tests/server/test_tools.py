"""Tools in ``/v1/chat/completions``: what reaches the engine, what comes back, whole and in pieces, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from radixrt.model.tokenizer import load_tokenizer
from radixrt.request import FinishReason, OutputDelta, SampleOutput, SamplingParams
from radixrt.server import chat
from radixrt.tools import definitions
from radixrt.tools.formats import HERMES, MISTRAL
from tests.server.openai_serving import CHAT, HELLO, Script, connected, output, post, says, serving
from tests.server.stand import served

# As Hermes and Qwen write calls, and short: a token of the tiny model is a byte.
TEMPLATE = """{% if tools %}<s1>system
Call{% for tool in tools %} {{ tool.function.name }}{% endfor %}<s0>
{% endif %}{% for m in messages %}<s1>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<s0>
{% endfor %}{% if add_generation_prompt %}<s1>assistant
{% endif %}"""

ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [1, 2]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SKY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": ADD}},
    {"type": "function", "function": {"name": "sky", "description": "The sky over a city.", "parameters": SKY}},
]
SCHEMAS = {"add": ADD, "sky": SKY}
CALLED = """I will.
<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call>
<tool_call>
{"name": "sky", "arguments": {"city": "Oslo"}}
</tool_call>"""
EXPECTED = [("add", {"a": 1, "b": 2}), ("sky", {"city": "Oslo"})]


def scripted(local_client: Any, say: Any, template: str = TEMPLATE) -> Script:
    """An engine that says what it is told to, of a model with a template of its own."""
    script = Script(local_client, say)
    script.tokenizer = load_tokenizer(local_client.info.settings["model"], chat_template=template)
    return script


def pieces(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


# ---- what comes back


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_calls_whole_and_streamed(local_client: Any, size: int) -> None:
    script = scripted(local_client, says(*pieces(CALLED, size)))
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": TOOLS}
    async with serving(script) as server, connected(server) as client:
        whole = (await client.chat.completions.create(**asked)).choices[0]
        async with client.chat.completions.stream(**asked) as stream:
            events = [event.type async for event in stream]
            streamed = (await stream.get_final_completion()).choices[0]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    assert calls_of(whole.message) == calls_of(streamed.message) == EXPECTED
    assert (whole.message.content or "").strip() == (streamed.message.content or "").strip() == "I will."
    assert whole.message.content == streamed.message.content
    ids = [call.id for call in whole.message.tool_calls]
    assert len(set(ids)) == 2 and all(id.startswith("call_") for id in ids)
    assert "tool_calls.function.arguments.done" in events


async def test_every_chunk_is_one_that_clients_can_join(local_client: Any) -> None:
    """A call begins once, with its id and name; arguments alone follow; what is joined is the whole."""
    script = scripted(local_client, says(*CALLED))
    async with serving(script) as server:
        _, text, _ = await post(server, CHAT, {"messages": HELLO, "tools": TOOLS, "stream": True})
    chunks = [json.loads(line[6:])["choices"][0] for line in text.split("\n\n") if line.startswith("data: {")]
    begun: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for call in chunk["delta"].get("tool_calls", []):
            if call["index"] not in begun:
                assert set(call) == {"index", "id", "type", "function"} and call["function"]["name"]
                begun[call["index"]] = call["function"]
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                begun[call["index"]]["arguments"] += call["function"]["arguments"]
    assert [(call["name"], json.loads(call["arguments"])) for call in begun.values()] == EXPECTED
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]
    assert "<tool_call>" not in "".join(chunk["delta"].get("content") or "" for chunk in chunks)


async def test_choices_call_each_for_itself(local_client: Any) -> None:
    texts = [CALLED, "No.", '<tool_call>\n{"name": "sky", "arguments": {"city": "Rome"}}\n</tool_call>']

    async def say(prompt: Any, params: SamplingParams) -> AsyncIterator[OutputDelta]:
        samples = [SampleOutput(i, text, (10, 11), FinishReason.STOP) for i, text in enumerate(texts)]
        whole = output(prompt, *samples)
        for i, text in enumerate(texts):
            for piece in pieces(text, 5):
                yield OutputDelta("r", i, piece, (10,))
        for i in range(3):
            yield OutputDelta("r", i, "", (11,), (), FinishReason.STOP, whole if i == 2 else None)

    async with serving(scripted(local_client, say)) as server, connected(server) as client:
        asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "n": 3}
        whole = (await client.chat.completions.create(**asked)).choices
        async with client.chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            streamed = (await stream.get_final_completion()).choices
    for choices in (whole, streamed):
        assert [choice.finish_reason for choice in choices] == ["tool_calls", "stop", "tool_calls"]
        assert [calls_of(choice.message) for choice in choices] == [EXPECTED, [], [("sky", {"city": "Rome"})]]
    ids = {call.id for choice in whole for call in choice.message.tool_calls or []}
    assert len(ids) == 3


async def test_a_call_that_is_cut_off_is_no_call_without_arguments(local_client: Any) -> None:
    cut = CALLED[: CALLED.index('"b"')]
    script = scripted(local_client, says(*pieces(cut, 3), reason=FinishReason.LENGTH))
    async with serving(script) as server, connected(server) as client:
        choice = (await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)).choices[0]
    assert choice.finish_reason == "length"
    for call in choice.message.tool_calls or []:
        assert call.function.arguments
    assert '"a"' in (choice.message.content or "") + str(choice.message.tool_calls)


@pytest.mark.parametrize(
    ("more", "parsed"),
    [({"tool_choice": "none"}, False), ({"tools": []}, False), ({}, True)],
    ids=["none", "no tools", "tools"],
)
async def test_calls_are_read_only_where_there_are_tools(local_client: Any, more: dict[str, Any], parsed: bool) -> None:
    async with serving(scripted(local_client, says(CALLED))) as server:
        _, body, _ = await post(server, CHAT, {"messages": HELLO, "tools": TOOLS, **more})
    message = body["choices"][0]["message"]
    assert ("tool_calls" in message) == parsed
    if not parsed:
        assert message["content"] == CALLED and body["choices"][0]["finish_reason"] == "stop"


async def test_a_parser_that_is_switched_off(local_client: Any) -> None:
    async with serving(scripted(local_client, says(CALLED)), tool_call_parser="none") as server:
        _, body, _ = await post(server, CHAT, {"messages": HELLO, "tools": TOOLS})
    assert body["choices"][0]["message"]["content"] == CALLED


# ---- what the engine is asked


async def test_the_template_gets_tools_and_history(local_client: Any) -> None:
    script = scripted(local_client, says("x"))
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]},
    ]  # fmt: skip
    async with serving(script) as server:
        for body in ({"messages": history, "tools": TOOLS}, {"messages": history}, {"messages": HELLO}):
            status, answer, _ = await post(server, CHAT, body)
            assert status == 200, answer
    first, second, plain = (
        script.tokenizer.decode(asked["prompt"], skip_special_tokens=False) for asked in script.asked
    )
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><s0>\n<s1>tool\n3<s0>\n'
    assert first.startswith("<s1>system\nCall add sky<s0>\n") and first.endswith(call + "<s1>assistant\n")
    assert "sky" not in second and second.endswith(call + "<s1>assistant\n")
    assert plain == "<s1>user\nhello<s0>\n<s1>assistant\n"


async def test_no_call_is_asked_of_the_same_prompt(local_client: Any) -> None:
    """A choice of none leaves the tools where the cache has them; the mark of a call is not drawn where it is a token."""
    script = scripted(local_client, says(CALLED))
    mark = script.tokenizer.token_id("<tool_call>")
    async with serving(script) as server:
        for choice in ("auto", "none"):
            bias = {"logit_bias": {"5": 1.0}}
            _, body, _ = await post(server, CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, **bias})
    first, second = script.asked
    assert first["prompt"] == second["prompt"] and "Call add sky" in script.tokenizer.decode(first["prompt"])
    assert body["choices"][0]["message"]["content"] == CALLED
    barred = {} if mark is None else {mark: -100.0}
    assert dict(second["params"].logit_bias) == {5: 1.0, **barred} and dict(first["params"].logit_bias) == {5: 1.0}
    tokenizer: Any = SimpleNamespace(token_id={"[TOOL_CALLS]": 7}.get)
    assert chat._barred(MISTRAL, tokenizer) == {7: -100.0} and chat._barred(HERMES, tokenizer) == {}


async def test_who_must_call_is_constrained(local_client: Any) -> None:
    script = scripted(local_client, says("x"))
    named = {"type": "function", "function": {"name": "sky"}}
    async with serving(script) as server:
        for choice in ("auto", "required", named, "none"):
            await post(server, CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": choice})
        await post(server, CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": "none", "regex": "a+"})
    auto, required, one, none, own = (asked["params"].constraint for asked in script.asked)
    assert len({auto, required, one}) == 3 and None not in (auto, required, one)
    assert none is None and own.to_dict() == {"type": "regex", "pattern": "a+"}
    accepts = {
        "x": (auto,),
        CALLED[CALLED.index("<") : CALLED.index("</")] + "</tool_call>": (auto, required),
        '<tool_call>\n{"name": "sky", "arguments": {"city": "Rome"}}\n</tool_call>': (auto, required, one),
        '<tool_call>\n{"name": "sky", "arguments": {"city": "Bonn"}}\n</tool_call>': (),
    }
    for text, takers in accepts.items():
        for constraint in (auto, required, one):
            assert constraint.compile(script.tokenizer).accepts(text) == (constraint in takers), (text, constraint)


# ---- on a model


@pytest.fixture(scope="module")
def tooled(server_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine on the tiny model with a template that knows tools."""
    import asyncio

    from radixrt import AsyncEngine
    from radixrt.server.local import LocalClient

    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    client = LocalClient(AsyncEngine(**{**server_settings, "chat_template": str(template), "max_total_tokens": 8192}))
    asyncio.run(client.start())
    yield client
    asyncio.run(client.close())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_required_is_made(tooled: Any, stream: bool) -> None:
    async with serving(tooled) as server, connected(server) as client:
        for seed, choice in enumerate(["required", {"type": "function", "function": {"name": "sky"}}] * 3):
            asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "tool_choice": choice}
            asked |= {"max_tokens": 150, "seed": seed, "parallel_tool_calls": False}
            if stream:
                async with client.chat.completions.stream(**asked) as events:
                    async for _ in events:
                        pass
                    answer = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(**asked)
            assert answer.choices[0].finish_reason == "tool_calls"
            ((name, arguments),) = calls_of(answer.choices[0].message)
            jsonschema.validate(arguments, SCHEMAS[name])
            assert name == "sky" or choice == "required"


async def test_a_schema_for_what_is_no_call(tooled: Any) -> None:
    """With tools and a format the answer is a call, or of the format."""

    class Mood(pydantic.BaseModel):
        mood: pydantic.constr(pattern="^[a-z]{1,5}$")  # type: ignore[valid-type]

    form = {"type": "json_schema", "json_schema": {"name": "mood", "schema": Mood.model_json_schema()}}
    kinds = set()
    async with serving(tooled) as server, connected(server) as client:
        for seed in range(8):
            answer = await client.chat.completions.create(
                model="tiny", messages=HELLO, tools=TOOLS, response_format=form, max_tokens=200, seed=seed
            )
            message = answer.choices[0].message
            if message.tool_calls:
                assert all(jsonschema.Draft202012Validator(SCHEMAS[n]).is_valid(a) for n, a in calls_of(message))
            else:
                Mood.model_validate_json(message.content)
            kinds.add(bool(message.tool_calls))
    assert kinds


async def test_history_with_results_is_cached(tooled: Any) -> None:
    """Of a turn behind a tool's result, only what is new is computed: the id that ended the call, and the result."""
    messages: list[Any] = [{"role": "user", "content": "what is the sky over Rome?"}]
    asked: dict[str, Any] = {
        "model": "tiny",
        "tools": TOOLS,
        "max_tokens": 150,
        "extra_body": {"cache_salt": "history"},
    }
    reached = 0
    async with serving(tooled) as server, connected(server) as client:
        for turn in range(3):
            named = {"type": "function", "function": {"name": "sky"}}
            answer = await client.chat.completions.create(messages=messages, tool_choice=named, seed=turn, **asked)
            assert answer.usage.prompt_tokens_details.cached_tokens >= reached
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "blue"} for call in message.tool_calls]
            reached = answer.usage.prompt_tokens
    assert reached > 250


# ---- what is refused

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def told(**message: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, message]}


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}]}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": 3}, "tools", "list"),
    ({"tools": [3]}, "tools[0]", "object"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    (tool(), "tools[0].function.name", "missing"),
    (tool(name="a b"), "tools[0].function.name", "'a b'"),
    (tool(name="f", parameters=3), "tools[0].function.parameters", "3"),
    (tool(name="f", parameters={"type": "array"}), "tools[0].function.parameters.type", "object"),
    (tool(name="f", parameters={"properties": {"x": {"uniqueItems": True}}}), "tools[0].function.parameters", "uniqueItems"),
    (tool(name="f", parameters={"properties": {"x": {"type": "strin"}}}), "tools[0].function.parameters", "'string'"),
    (tool(name="f", strict="yes"), "tools[0].function.strict", "true or false"),
    ({"tools": [TOOLS[0], TOOLS[1], TOOLS[0]]}, "tools[2].function.name", "'add'"),
    ({"tool_choice": "required"}, "tool_choice", "required"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "'always'"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "ad"}}}, "tool_choice.function.name", "'add'"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "1"),
    ({"tools": TOOLS, "tool_choice": "required", "max_tokens": 3}, "max_tokens", "shortest"),
    ({"functions": [{}]}, "functions", "use tools"),
    ({"function_call": "auto"}, "function_call", "use tool_choice"),
    (told(role="function", name="f", content="x"), "messages[1].role", "tool"),
    (told(role="tool", content="x"), "messages[1].tool_call_id", "missing"),
    (told(role="tool", content="x", tool_call_id=3), "messages[1].tool_call_id", "3"),
    (told(role="tool", tool_call_id="c"), "messages[1].content", "missing"),
    (told(role="user", content="x", tool_call_id="c"), "messages[1].tool_call_id", "role tool"),
    (told(role="user", content="x", tool_calls=[CALL]), "messages[1].tool_calls", "role assistant"),
    (told(role="assistant", tool_calls=3), "messages[1].tool_calls", "list"),
    (told(role="assistant", tool_calls=[3]), "messages[1].tool_calls[0]", "object"),
    (told(role="assistant", tool_calls=[{**CALL, "type": "x"}]), "messages[1].tool_calls[0].type", "'x'"),
    (told(role="assistant", tool_calls=[{**CALL, "id": None}]), "messages[1].tool_calls[0].id", "missing"),
    (told(role="assistant", tool_calls=[{**CALL, "function": None}]), "messages[1].tool_calls[0].function", "missing"),
    (told(role="assistant", tool_calls=[{**CALL, "function": {"arguments": "{}"}}]), "messages[1].tool_calls[0].function.name", "missing"),
    (told(role="assistant", tool_calls=[{**CALL, "function": {"name": "f", "arguments": {}}}]), "messages[1].tool_calls[0].function.arguments", "string"),
    (told(role="assistant", content=None, tool_calls=[]), "messages[1].content", "missing"),
    (told(role="assistant", content="x", function_call={"name": "f"}), "messages[1].function_call", "tool_calls"),
    (told(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[1].content[0].type", "text only"),
]  # fmt: skip


async def test_what_is_refused(tooled: Any) -> None:
    wrong = []
    async with serving(tooled) as server:
        for fields, param, said in REFUSED:
            for stream in (False, True):
                status, body, _ = await post(
                    server, CHAT, {"messages": HELLO, "max_tokens": 60, "stream": stream, **fields}
                )
                error = body.get("error", {}) if isinstance(body, dict) else {}
                if (status, error.get("param")) != (400, param) or said not in error.get("message", ""):
                    wrong.append((fields, param, said, status, body))
    assert not wrong
    assert (await tooled.stats())["running"] == 0


async def test_openai_hands_out_typed_arguments(tooled: Any) -> None:
    """The client's own tools: pydantic models in, parsed arguments out."""

    class Sum(pydantic.BaseModel):
        """Add two numbers."""

        a: int = pydantic.Field(ge=0, le=9)
        b: int = pydantic.Field(ge=0, le=9)

    async with serving(tooled) as server, connected(server) as client:
        answer = await client.chat.completions.parse(
            model="tiny",
            messages=HELLO,
            tools=[openai.pydantic_function_tool(Sum)],
            tool_choice="required",
            max_tokens=200,
        )
    for call in answer.choices[0].message.tool_calls or []:
        assert isinstance(call.function.parsed_arguments, Sum)
    assert answer.choices[0].message.tool_calls


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
async def test_schemas_are_compiled_beside_the_event_loop(local_client: Any, monkeypatch: Any, path: str) -> None:
    """A small schema may take seconds: meanwhile the others are served."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(definitions, "check_schema", lambda *_: threads.append(threading.current_thread()))
    tool: dict[str, Any] = {"name": "a", "input_schema": {}} if path == "/v1/messages" else {"type": "function", "function": {"name": "a"}}  # fmt: skip
    async with served(local_client) as client:
        body = {"model": local_client.info.model, "messages": HELLO, "max_tokens": 1, "stream": False, "tools": [tool]}
        if path == "/api/chat":
            body["options"] = {"num_predict": body.pop("max_tokens")}
        await client.post(path, json=body)
    assert threads and threading.main_thread() not in threads


async def test_more_tools_than_can_be_called_in_a_row(local_client: Any) -> None:
    tools = [{"type": "function", "function": {"name": f"t{i}"}} for i in range(500)]
    async with serving(Script(local_client, says("x"))) as server:
        status, body, _ = await post(server, CHAT, {"messages": HELLO, "tools": tools, "tool_choice": "required"})
    assert status == 400 and body["error"]["param"] == "tools"
