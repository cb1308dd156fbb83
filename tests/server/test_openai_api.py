"""The OpenAI API, as OpenAI's own client sees it: on a tiny model, and on an engine that says exactly what a test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Literal, cast

import aiohttp
import hypothesis
import openai
import pydantic
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import strategies as st

from radixrt.errors import EngineClosed, InvalidRequest
from radixrt.model.tokenizer import Tokenizer
from radixrt.request import (
    FinishReason,
    OutputDelta,
    SampleOutput,
    SamplingParams,
)
from radixrt.server.chat import Content, Step
from radixrt.server.client import EngineDied
from radixrt.server.openai import _chat_teller, routes
from radixrt.server.openai_requests import Rules, read_chat
from radixrt.server.openai_responses import ChatAnswer
from tests.server.openai_serving import (
    CHAT,
    COMPLETIONS,
    HELLO,
    Script,
    connected,
    output,
    position,
    post,
    raises,
    says,
    serving,
)


@pytest.fixture
async def server(local_client: Any) -> AsyncIterator[TestServer]:
    async with serving(local_client) as server:
        yield server


@pytest.fixture
async def client(server: TestServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with connected(server) as client:
        yield client


# ---- chats


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "radixrt"
    with pytest.raises(openai.NotFoundError, match="tiny"):
        await client.models.retrieve("tinny")


async def test_chat_gives_the_engines_own_tokens(client: openai.AsyncOpenAI, local_client: Any) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=8, temperature=0)
    params = SamplingParams(max_tokens=8, temperature=0)
    async for delta in local_client.stream(HELLO, params, request_id="direct"):
        expected = delta.output
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.usage.completion_tokens == expected.completion_tokens
    assert answer.usage.total_tokens == expected.prompt_tokens + expected.completion_tokens
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "tiny"


@pytest.mark.parametrize("n", [1, 3])
async def test_a_streamed_chat_says_what_the_whole_says(client: openai.AsyncOpenAI, n: int) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "seed": 5, "n": n}
    asked |= {"logprobs": True, "top_logprobs": 2, "extra_body": {"skip_special_tokens": False}}
    whole = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    texts, tokens, reasons, roles = [""] * n, [[] for _ in range(n)], [None] * n, [0] * n
    usage = None
    async for chunk in stream:
        assert chunk.object == "chat.completion.chunk" and chunk.id.startswith("chatcmpl-")
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert chunk.usage is None
            roles[choice.index] += choice.delta.role == "assistant"
            texts[choice.index] += choice.delta.content
            tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert roles == [1] * n
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert tokens == [choice.logprobs.content for choice in whole.choices]
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    for text, listed in zip(texts, tokens):
        assert b"".join(bytes(token.bytes) for token in listed).decode(errors="replace") == text
        assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in listed)
    assert len(set(texts)) == n


async def test_structured_outputs_are_parsed_by_the_client(client: openai.AsyncOpenAI) -> None:
    class Animal(pydantic.BaseModel):
        kind: Literal["cat", "dog"]
        legs: int = pydantic.Field(ge=2, le=4)

    answer = await client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Animal, max_tokens=60)
    assert isinstance(answer.choices[0].message.parsed, Animal)
    async with client.chat.completions.stream(
        model="tiny", messages=HELLO, response_format=Animal, max_tokens=60
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Animal)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}
RULES = 'root ::= "yes" | "no"'
DIALECTS: list[tuple[dict[str, Any], set[str]]] = [
    ({"regex": "ab|ba"}, {"ab", "ba"}),
    ({"choice": ["red", "green"]}, {"red", "green"}),
    ({"json_schema": SCHEMA}, {'{"a":"x"}', '{"a":"yy"}'}),
    ({"json_schema": json.dumps(SCHEMA)}, {'{"a":"x"}', '{"a":"yy"}'}),
    ({"ebnf": RULES}, {"yes", "no"}),
    ({"grammar": RULES}, {"yes", "no"}),
    ({"guided_regex": "a|b"}, {"a", "b"}),
    ({"guided_json": SCHEMA}, {'{"a":"x"}', '{"a":"yy"}'}),
    ({"guided_choice": ["x", "y"]}, {"x", "y"}),
    ({"guided_grammar": RULES}, {"yes", "no"}),
    ({"guided_grammar": 'start: "yes" | "no"'}, {"yes", "no"}),
    ({"structured_outputs": {"regex": "a|b", "json_object": False}}, {"a", "b"}),
    ({"structured_outputs": {"json": SCHEMA}}, {'{"a":"x"}', '{"a":"yy"}'}),
    ({"structured_outputs": {"choice": ["x", "y"]}}, {"x", "y"}),
    ({"structured_outputs": {"grammar": RULES}}, {"yes", "no"}),
    ({"constraint": {"type": "literal", "text": "exactly"}}, {"exactly"}),
    ({"substring": "to be"}, {"to be", "to", "be"}),
    ({"substring": {"text": "ab", "unit": "characters", "max_length": 1}}, {"a", "b"}),
    ({"structured_outputs": {"substring": {"text": "to be", "empty": True}}}, {"to be", "to", "be", ""}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
     {'{"a":"x"}', '{"a":"yy"}'}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {'{"a":"x"}', '{"a":"yy"}'}),
    ({"response_format": {"type": "text"}, "regex": "a|b"}, {"a", "b"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "allowed"), DIALECTS, ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else ""
)
async def test_constraints_in_every_dialect(server: TestServer, asked: dict[str, Any], allowed: set[str]) -> None:
    for path, prompt in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "hello"})):
        status, body, _ = await post(server, path, {**prompt, **asked, "max_tokens": 40})
        assert status == 200, body
        choice = body["choices"][0]
        assert (choice["text"] if "text" in choice else choice["message"]["content"]) in allowed
        assert choice["finish_reason"] == "stop"


async def test_json_mode(server: TestServer) -> None:
    _, body, _ = await post(
        server, CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}, "max_tokens": 30}
    )
    assert isinstance(json.loads(body["choices"][0]["message"]["content"]), dict)


async def test_the_last_message_is_continued(local_client: Any) -> None:
    script = Script(local_client, says("!"))
    messages = [*HELLO, {"role": "assistant", "content": " I am "}]
    async with serving(script) as server:
        asked = {"messages": messages, "continue_final_message": True, "echo": True}
        _, body, _ = await post(server, CHAT, asked)
        assert body["choices"][0]["message"]["content"] == " I am !"
        await post(server, CHAT, {"messages": messages, "add_generation_prompt": False})
        developer = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        await post(server, CHAT, {"messages": developer, "cache_salt": "s", "priority": -3})
    decode = [local_client.tokenizer.decode(asked["prompt"], skip_special_tokens=False) for asked in script.asked]
    assert decode == [
        "<s1>user\nhello<s0>\n<s1>assistant\n I am ",
        "<s1>user\nhello<s0>\n<s1>assistant\n I am <s0>\n",
        "<s1>system\na\nb<s0>\n<s1>assistant\n",
    ]
    assert (script.asked[2]["cache_salt"], script.asked[2]["priority"]) == ("s", -3)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_computes_what_is_new(client: openai.AsyncOpenAI, stream: bool) -> None:
    """All but the id that ended the last turn is cached, when the client resends what it was told."""
    messages: list[Any] = [{"role": "system", "content": f"stream {stream}"}]
    reached = 0
    for turn in range(3):
        messages.append({"role": "user", "content": f"turn {turn}"})
        asked: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
        asked["extra_body"] = {"regex": "[a-z ]{3,9}", "cache_salt": f"turns {stream}"}
        if stream:
            text, usage = "", None
            async for chunk in await client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            ):
                usage = chunk.usage or usage
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        else:
            answer = await client.chat.completions.create(**asked)
            text, usage = answer.choices[0].message.content or "", answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == reached
        messages.append({"role": "assistant", "content": text})
        reached = usage.prompt_tokens + usage.completion_tokens - 1  # nothing was computed behind the last one


# ---- completions


async def test_completions_of_texts_and_tokens(client: openai.AsyncOpenAI, local_client: Any) -> None:
    texts = ["one", "two"]
    ids = [local_client.tokenizer.encode(text) for text in texts]
    shared: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "temperature": 0}
    alone = [(await client.completions.create(prompt=text, **shared)).choices[0].text for text in texts]
    assert (await client.completions.create(prompt=ids[0], **shared)).choices[0].text == alone[0]
    for prompt in (texts, ids):
        answer = await client.completions.create(prompt=prompt, n=2, **shared)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices] == [alone[0]] * 2 + [alone[1]] * 2
        assert answer.usage.prompt_tokens == sum(map(len, ids)) and answer.object == "text_completion"
    streamed = ["", ""]
    async for chunk in await client.completions.create(prompt=texts, echo=True, stream=True, **shared):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [text + rest for text, rest in zip(texts, alone)]


async def test_sixteen_tokens_unless_asked(local_client: Any) -> None:
    script = Script(local_client, says("x"))
    async with serving(script) as server:
        await post(server, COMPLETIONS, {"prompt": "a"})
        await post(server, CHAT, {"messages": HELLO, "max_tokens": None, "stop": None})
    assert [asked["params"].max_tokens for asked in script.asked] == [16, None]


async def test_logprobs_of_an_echoed_prompt(client: openai.AsyncOpenAI, local_client: Any) -> None:
    answer = await client.completions.create(
        model="tiny", prompt="abc", echo=True, logprobs=2, max_tokens=3, temperature=0, seed=1
    )
    choice = answer.choices[0]
    found = choice.logprobs
    assert found.tokens[:3] == ["a", "b", "c"] and found.text_offset[:4] == [0, 1, 2, 3]
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=2, prompt_logprobs=2)
    async for delta in local_client.stream("abc", params, request_id="direct"):
        expected = delta.output
    listed = [*expected.prompt_logprobs[1:], *expected.logprobs]
    assert found.token_logprobs[1:] == pytest.approx(
        [p.chosen.logprob for p in listed[: len(found.tokens) - 1]], abs=1e-4
    )
    assert all(text in top for text, top in zip(found.tokens[1:], found.top_logprobs[1:]))
    alone = await client.completions.create(model="tiny", prompt="abc", echo=True, logprobs=0, max_tokens=0)
    assert alone.choices[0].text == "abc" and alone.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert alone.choices[0].finish_reason == "length"


async def test_tokens_that_are_parts_of_characters(local_client: Any) -> None:
    euro = local_client.tokenizer.encode("€!")  # four bytes, four tokens
    eos = min(local_client.tokenizer.eos_ids)
    positions = tuple(position(token, top=(token,)) for token in (*euro, eos))

    async def say(prompt: Any, params: SamplingParams) -> AsyncIterator[OutputDelta]:
        whole = output(prompt, SampleOutput(0, "€!", (*euro, eos), FinishReason.STOP, logprobs=positions))
        yield OutputDelta("r", 0, "", (euro[0],), positions[:1])
        yield OutputDelta("r", 0, "€!", (*euro[1:], eos), positions[1:], FinishReason.STOP, whole)

    async with serving(Script(local_client, say)) as server, connected(server) as client:
        answer = await client.completions.create(model="tiny", prompt="x", logprobs=1)
        found = answer.choices[0].logprobs
        assert found.tokens == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "!"]
        assert found.text_offset == [0, 0, 0, 1]
        streamed: list[Any] = [[], []]
        async for chunk in await client.completions.create(model="tiny", prompt="x", logprobs=1, stream=True):
            streamed[0] += chunk.choices[0].logprobs.tokens
            streamed[1] += chunk.choices[0].logprobs.text_offset
        assert streamed == [found.tokens, found.text_offset]
        chat = await client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=1)
        listed = chat.choices[0].logprobs.content
        assert b"".join(bytes(token.bytes) for token in listed).decode() == "€!"
        assert [token.top_logprobs[0].bytes for token in listed] == [token.bytes for token in listed]


async def test_streams_that_show_nothing_for_a_while(local_client: Any) -> None:
    async with serving(Script(local_client, says("", "", "ab", "", "c"))) as server:
        _, text, headers = await post(server, CHAT, {"messages": HELLO, "stream": True})
    assert headers["Content-Type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(item)["choices"][0] for item in events[:-1]]
    assert [chunk["delta"].get("content") for chunk in chunks] == ["", "ab", "c"]
    assert [chunk["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert chunks[0]["delta"]["role"] == "assistant"


async def test_every_parameter_reaches_the_engine(local_client: Any) -> None:
    script = Script(local_client, says("x"))
    asked = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": -0.3,
        "repetition_penalty": 1.1, "seed": 3, "n": 2, "stop": ["a", "b"], "stop_token_ids": [4], "ignore_eos": True,
        "min_tokens": 2, "skip_special_tokens": False, "logit_bias": {"5": 1.5}, "max_tokens": 9,
    }  # fmt: skip
    expected = SamplingParams.from_dict({**asked, "logit_bias": {5: 1.5}, "include_stop": True, "logprobs": 3})
    asked["include_stop_str_in_output"] = True
    ignored = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "none",
    }
    async with serving(script) as server:
        for path, more in (
            (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 3}),
            (COMPLETIONS, {"prompt": "a", "logprobs": 3, "best_of": 2}),
        ):
            status, body, _ = await post(server, path, {**asked, **more, **ignored})
            assert status == 200, body
    assert [item["params"] for item in script.asked] == [expected, expected]


# ---- faults

FAULTS: list[tuple[Exception, int, str]] = [
    (InvalidRequest("max_waiting_requests", "=8: the queue is full"), 429, "queue is full"),
    (InvalidRequest("prompt", "has 9 tokens; context_length=8"), 400, "messages: has 9"),
    (EngineDied("the engine's process ended"), 503, "process ended"),
    (EngineClosed("closed"), 503, "not running"),
    (ZeroDivisionError("secret"), 500, "internal error"),
]


@pytest.mark.parametrize(("error", "status", "said"), FAULTS, ids=lambda value: type(value).__name__)
async def test_faults_before_and_in_a_stream(local_client: Any, error: Exception, status: int, said: str) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO}
    async with serving(Script(local_client, raises(error))) as server:
        for stream in (False, True):
            found, body, headers = await post(server, CHAT, {**asked, "stream": stream})
            assert found == status and said in body["error"]["message"] and "secret" not in str(body)
            assert ("Retry-After" in headers) == (status == 429)
    async with serving(Script(local_client, raises(error, after=2))) as server, connected(server) as client:
        texts = []
        with pytest.raises(openai.APIError, match=said):
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                texts.append(chunk.choices[0].delta.content)
        assert texts == ["", "x", "x"]
        _, text, _ = await post(server, CHAT, {**asked, "stream": True})
        assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("reason", "status"), [(FinishReason.ERROR, 500), (FinishReason.ABORT, 503)])
async def test_a_request_that_the_engine_ends(local_client: Any, reason: FinishReason, status: int) -> None:
    script = Script(local_client, says("a", "b", reason=reason, error="broken" if status == 500 else None))
    async with serving(script) as server:
        found, body, _ = await post(server, CHAT, {"messages": HELLO})
        assert found == status and body["error"]["type"] == "server_error"
        _, text, _ = await post(server, CHAT, {"messages": HELLO, "stream": True})
        assert '"server_error"' in text and text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"' not in text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
async def test_a_client_that_goes_away_ends_its_requests(local_client: Any, stream: bool, prompts: int) -> None:
    begun = asyncio.Event()

    async def say(prompt: Any, params: SamplingParams) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("r", 0, "x", (10,))
        begun.set()
        await asyncio.Event().wait()

    script = Script(local_client, say)
    async with serving(script) as server, aiohttp.ClientSession() as session:
        body = {"prompt": ["a"] * prompts, "stream": stream}
        asking = asyncio.ensure_future(session.post(server.make_url(COMPLETIONS), json=body))
        await begun.wait()
        if stream:
            (await asking).close()
        else:
            asking.cancel()
        async with asyncio.timeout(10):
            await script.ended.wait()


async def test_a_client_that_does_not_read_and_goes_away(local_client: Any) -> None:
    async def say(prompt: Any, params: SamplingParams) -> AsyncIterator[OutputDelta]:
        while True:
            yield OutputDelta("r", 0, "x" * 2**16, (10,))

    script = Script(local_client, say)
    async with serving(script) as server, aiohttp.ClientSession() as session:
        answer = await session.post(server.make_url(COMPLETIONS), json={"prompt": "a", "stream": True})
        assert not script.ended.is_set()
        answer.close()
        async with asyncio.timeout(10):
            await script.ended.wait()


async def test_one_bad_prompt_ends_the_others(local_client: Any) -> None:
    ended = []

    async def say(prompt: Any, params: SamplingParams) -> AsyncIterator[OutputDelta]:
        if len(prompt) == 2:
            raise InvalidRequest("prompt", "is bad")
        try:
            await asyncio.Event().wait()
            yield OutputDelta("r", 0, "x", (10,))
        finally:
            ended.append(1)

    async with serving(Script(local_client, say)) as server:
        status, body, _ = await post(server, COMPLETIONS, {"prompt": ["a", "b", "cd"]})
    assert status == 400 and "is bad" in body["error"]["message"] and ended == [1, 1]


async def test_nothing_is_asked_of_the_settings_but_what_is_there(local_client: Any) -> None:
    app = web.Application()
    app.add_routes(routes(local_client, SimpleNamespace()))
    async with TestServer(app) as server, connected(server) as client:
        assert [model.id async for model in client.models.list()] == [local_client.info.model]


@hypothesis.given(st.text(), st.text(min_size=1), st.booleans(), st.booleans())
def test_a_chunk_of_text_alone_is_the_chunk_of_any_step(text: str, model: str, logprobs: bool, usage: bool) -> None:
    body = {"messages": HELLO, "model": model, "logprobs": logprobs, "stream": True}
    job = read_chat({**body, "stream_options": {"include_usage": usage}}, Rules((model,)))
    made, step = ChatAnswer("chatcmpl-1", 1, job, cast(Tokenizer, None)), Step(3, (Content(text),))
    told = _chat_teller(made)
    assert told(step) == made.opening(3) + made.piece(step)
    assert told(step) == made.piece(step)
