"""Anthropic's Messages API, as Anthropic's own client uses it: what reaches the engine, what comes back, whole and in pieces, and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import aiohttp
import jsonschema
import pydantic
import pytest

from radixrt.request import FinishReason, OutputDelta, SampleOutput, SamplingParams
from radixrt.server.client import EngineDied
from tests.server.openai_serving import Script, output, raises, says
from tests.server.stand import KEY, reachable
from tests.server.test_reasoning import Thinker
from tests.server.test_tools import ADD, CALLED, EXPECTED, SCHEMAS, SKY, pieces, scripted

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [
    {"name": "add", "description": "Add.", "input_schema": ADD},
    {"name": "sky", "description": "The sky over a city.", "input_schema": SKY},
]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # this client has no parameter for it any more, the API has
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 16, "messages": HELLO}


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    hungry: bool


@asynccontextmanager
async def connected(client: Any, **settings: Any) -> AsyncIterator[Any]:
    async with (
        reachable(client, served_model_name=("tiny",), **settings) as address,
        anthropic.AsyncAnthropic(base_url=address, api_key=KEY, max_retries=0) as found,
    ):
        yield found


async def both(client: Any, **asked: Any) -> tuple[Any, Any]:
    """The answer, whole and from a stream."""
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        return whole, await stream.get_final_message()


def told(message: Any) -> list[dict[str, Any]]:
    """The blocks of a message, without the ids that are made anew."""
    blocks: list[dict[str, Any]] = [block.model_dump(exclude_none=True) for block in message.content]
    return [{name: item for name, item in block.items() if name not in ("id", "caller")} for block in blocks]


def prompts(script: Script) -> list[str]:
    return [script.tokenizer.decode(asked["prompt"], skip_special_tokens=False) for asked in script.asked]


# ---- on a model


async def test_a_chat_whole_and_streamed(local_client: Any) -> None:
    asked: dict[str, Any] = {**ASK, **GREEDY, "system": "Be brief, the first time."}
    async with connected(local_client) as client:
        whole, streamed = await both(client, **asked)
        counted = await client.messages.count_tokens(**{k: asked[k] for k in ("model", "messages", "system")})
        events = [event async for event in await client.messages.create(stream=True, **asked)]
    assert told(whole) == told(streamed) and whole.content[0].text
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == streamed.usage.output_tokens == 16
    assert whole.usage.cache_read_input_tokens < streamed.usage.cache_read_input_tokens
    for usage in (whole.usage, streamed.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    assert whole.id != streamed.id and whole.id.startswith("msg_") and whole.model == "tiny"
    kinds = [event.type for event in events]
    middle = ["content_block_start", *["content_block_delta"] * (len(events) - 5), "content_block_stop"]
    assert kinds == ["message_start", *middle, "message_delta", "message_stop"]
    assert events[0].message.usage.input_tokens == counted.input_tokens


async def test_calls_that_must_be_made_are_valid(calling_client: Any) -> None:
    asked: dict[str, Any] = {**ASK, "max_tokens": 200, "tools": TOOLS}
    async with connected(calling_client) as client:
        for seed in range(3):
            choice = {"type": "any", "disable_parallel_tool_use": True}
            whole, streamed = await both(client, **asked, tool_choice=choice, extra_body={"seed": seed})
            named = await client.messages.create(**asked, tool_choice={"type": "tool", "name": "sky"})
            assert told(whole) == told(streamed) and len(whole.content) == 1
            for message in (whole, named):
                (call,) = message.content
                jsonschema.validate(call.input, SCHEMAS[call.name])
                assert message.stop_reason == "tool_use"
            assert named.content[0].name == "sky"


async def test_an_answer_of_a_schema(local_client: Any) -> None:
    async with connected(local_client) as client:
        parsed = await client.messages.parse(**{**ASK, "max_tokens": 60}, output_format=Cat)
        assert isinstance(parsed.parsed_output, Cat)
        with pytest.raises(anthropic.BadRequestError, match="output_config.format.schema"):
            schema = {"type": "array", "uniqueItems": 3}
            await client.messages.create(**ASK, output_config={"format": {"type": "json_schema", "schema": schema}})


async def test_a_limit_that_the_context_cannot_hold(local_client: Any) -> None:
    async with connected(local_client) as client:
        asked = {**ASK, **GREEDY, "max_tokens": 10**6, "timeout": 60}
        whole, streamed = await both(client, **asked)
        used = whole.usage.input_tokens + whole.usage.cache_read_input_tokens + whole.usage.output_tokens
        assert whole.stop_reason == streamed.stop_reason == "model_context_window_exceeded"
        assert used == local_client.info.context_length
        with pytest.raises(anthropic.BadRequestError, match="context_length="):
            await client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "x" * 2000}]})


# ---- what comes back


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_calls_whole_and_streamed(local_client: Any, size: int) -> None:
    async with connected(scripted(local_client, says(*pieces(CALLED, size)))) as client:
        whole, streamed = await both(client, **ASK, tools=TOOLS)
    text, *calls = told(whole)
    assert told(streamed) == told(whole) and text["type"] == "text" and text["text"].strip() == "I will."
    assert [(call["name"], call["input"]) for call in calls] == EXPECTED
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert len({block.id for block in whole.content[1:]}) == 2


async def test_why_it_ends(local_client: Any) -> None:
    async def say(prompt: Any, params: SamplingParams) -> AsyncIterator[OutputDelta]:
        (stop,) = params.stop
        whole = output(prompt, SampleOutput(0, "one", (10,), FinishReason.STOP, stop))
        yield OutputDelta("r", 0, "one", (10,), (), FinishReason.STOP, whole)

    async with connected(Script(local_client, say)) as client:
        for message in await both(client, **ASK, stop_sequences=["END"]):
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    async with connected(Script(local_client, says("one"))) as client:
        for message in await both(client, **ASK):
            assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


async def test_thinking(local_client: Any) -> None:
    thinker = Thinker(local_client, "Hm, so.\n</think>\n\nYes.")
    async with connected(thinker) as client:
        whole, streamed = await both(client, **{**ASK, "max_tokens": 100})
        hidden = await both(client, **{**ASK, "max_tokens": 100}, thinking={"type": "adaptive", "display": "omitted"})
    thought, said = told(whole)
    assert told(streamed) == [thought, said] and said == {"type": "text", "text": "Yes."}
    assert thought["type"] == "thinking" and thought["thinking"].strip() == "Hm, so." and thought["signature"]
    for message in hidden:
        assert [block.get("thinking", "") for block in told(message)] == ["", ""]
    assert 0 < whole.usage.output_tokens_details.thinking_tokens < whole.usage.output_tokens


async def test_a_budget_of_thinking(local_client: Any) -> None:
    thinker = Thinker(local_client, "x" * 400 + "</think>Yes.")
    async with connected(thinker) as client:
        thinking = {"type": "enabled", "budget_tokens": 20}
        whole, streamed = await both(client, **{**ASK, "max_tokens": 100}, thinking=thinking)
    for message in (whole, streamed):
        assert [block["type"] for block in told(message)] == ["thinking", "text"]
        assert told(message)[0]["thinking"].strip() == "x" * 20 and told(message)[1]["text"] == "Yes."


async def test_an_error_in_the_middle(local_client: Any) -> None:
    async with connected(Script(local_client, raises(EngineDied("gone"), after=2))) as client:
        with pytest.raises(anthropic.APIStatusError, match="gone"):
            async with client.messages.stream(**ASK) as stream:
                await stream.get_final_message()
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error.*gone"):
            await client.messages.create(**ASK)


# ---- what the engine is asked


async def test_the_template_gets_blocks_and_history(local_client: Any) -> None:
    script = scripted(local_client, says("x"))
    cached = {"cache_control": {"type": "ephemeral"}}
    history: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "hel", **cached}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "redacted_thinking", "data": "s"},
            {"type": "text", "text": "I will."},
            {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": 2}},
            {"type": "tool_use", "id": "toolu_2", "name": "sky", "input": {"city": "Oslo"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "no"}], "is_error": True},
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "3"},
            {"type": "text", "text": "Go on."}]},
    ]  # fmt: skip
    async with connected(script) as client:
        system = [{"type": "text", "text": "Be", **cached}, {"type": "text", "text": "brief."}]
        await client.messages.create(**{**ASK, "messages": history, "system": system}, tools=TOOLS, metadata={"user_id": "u"})  # fmt: skip
        await client.messages.create(**{**ASK, "messages": [*HELLO, {"role": "user", "content": "you"}]})
        await client.messages.create(**{**ASK, "messages": [*HELLO, {"role": "assistant", "content": "I am"}]})
    first, merged, continued = prompts(script)
    assert first == (
        "<s1>system\nCall add sky<s0>\n<s1>system\nBe\nbrief.<s0>\n<s1>user\nhel\nlo<s0>\n<s1>assistant\nI will."
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
        '<tool_call>\n{"name": "sky", "arguments": {"city": "Oslo"}}\n</tool_call><s0>\n'
        "<s1>tool\nError: no<s0>\n<s1>tool\n3<s0>\n<s1>user\nGo on.<s0>\n<s1>assistant\n"
    )
    assert merged == "<s1>user\nhello\nyou<s0>\n<s1>assistant\n"
    assert continued == "<s1>user\nhello<s0>\n<s1>assistant\nI am"


async def test_the_parameters_reach_the_engine(local_client: Any) -> None:
    script = scripted(local_client, says("x"))
    given = {"temperature": 0.5, "top_k": 3, "top_p": 0.25}
    async with connected(script) as client:
        await client.messages.create(**ASK, extra_body=given, stop_sequences=["A", "B"])
        for choice in ("auto", "any", "none"):
            await client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": choice})
    params, auto, any, none = (asked["params"] for asked in script.asked)
    assert {name: getattr(params, name) for name in given} == given
    assert params.max_tokens == 16 and params.stop == ("A", "B")
    assert auto.constraint and any.constraint and auto.constraint != any.constraint and none.constraint is None


# ---- what is refused


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


def result(id: str) -> list[Any]:
    call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}
    return [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id}]}]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens=None"),
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        ({"temprature": 1}, "temprature.*temperature"),
        ({"container": "x"}, "container='x': is not supported here"),
        ({"temperature": -1}, "temperature=-1"),
        ({"messages": []}, "messages=.*at least one"),
        ({"messages": [{"role": "system", "content": "x"}]}, r"messages\[0\].role.*field system"),
        ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\].content"),
        (block(type="image", source={}), r"content\[0\].type='image': the model reads text only"),
        (block(type="document", source={}), "the model reads text only"),
        (block(type="text", txt="x"), r"content\[0\].txt.*text"),
        (block(type="text"), r"content\[0\].text: is missing"),
        (block(type="tool_use", id="a", name="b", input={}), "must be text or tool_result"),
        ({"messages": result("toolu_2")}, r"messages\[2\].content\[0\].tool_use_id='toolu_2'.*toolu_1"),
        ({"messages": result("toolu_1")[:2]}, "the results of the calls must follow"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, r"tools\[0\].name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, r"tools\[2\].name='add'"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "ad"}}, "tool_choice.name='ad'.*add"),
        ({"tools": TOOLS, "tool_choice": {"type": "required"}}, "tool_choice.type='required': must be one of auto"),
        ({"tool_choice": {"type": "any"}}, "needs at least one tool"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 16}}, "must be less than max_tokens=16"),
        ({"thinking": {"type": "on"}}, "thinking.type='on'"),
        ({"output_config": {"format": {"type": "json"}}}, "output_config.format.type='json'"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "output_config.format.schema=3"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"system": [{"type": "image"}]}, r"system\[0\].type"),
    ],
)  # fmt: skip
async def test_what_is_refused(local_client: Any, fields: dict[str, Any], message: str) -> None:
    script = scripted(local_client, says("x"))
    async with connected(script) as client:
        with pytest.raises(anthropic.BadRequestError, match=message) as refused:
            await client.messages.create(**ASK, extra_body=fields)
        assert refused.value.body["type"] == "error"
        assert refused.value.body["error"]["type"] == "invalid_request_error"
        assert set(refused.value.body) == {"type", "error"} and set(refused.value.body["error"]) == {"type", "message"}
    assert not script.asked


async def test_the_doors_speak_the_dialect(local_client: Any) -> None:
    script = scripted(local_client, says("x"))
    async with connected(script, api_key=KEY) as client:
        assert (await client.messages.create(**ASK)).content[0].text == "x"
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await client.with_options(api_key="wrong").messages.create(**ASK)
        with pytest.raises(anthropic.NotFoundError, match="not_found_error.*tinny.*tiny"):
            await client.messages.create(**{**ASK, "model": "tinny"})
        async with aiohttp.ClientSession(headers={"X-Api-Key": KEY}) as session:
            address = str(client.base_url).rstrip("/") + "/v1/messages"
            async with session.post(address, data=b"{", headers={"Content-Type": "text/plain"}) as answer:
                assert answer.status == 415 and (await answer.json())["type"] == "error"
            async with session.get(address) as answer:
                assert answer.status == 405 and (await answer.json())["type"] == "error"
            unread = json.dumps({**ASK, "max_tokens": 1}).encode()[:-1]
            async with session.post(address, data=unread, headers={"Content-Type": "application/json"}) as answer:
                assert answer.status == 400 and (await answer.json())["error"]["type"] == "invalid_request_error"


async def test_unknown_fields_can_be_warned_of(local_client: Any) -> None:
    async with connected(scripted(local_client, says("x")), unknown_fields="warn") as client:
        raw = await client.messages.with_raw_response.create(**ASK, extra_body={"temprature": 1})
        assert "temprature" in raw.headers["Warning"] and (await raw.parse()).content[0].text == "x"
