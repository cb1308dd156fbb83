"""Ollama's API, as Ollama's own client uses it: what reaches the engine, what comes back, whole and in lines, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import aiohttp
import jsonschema
import openai
import pytest

from radixrt import __version__
from radixrt.request import FinishReason, OutputDelta, SampleOutput, SamplingParams
from radixrt.server.client import EngineDied
from radixrt.server.ollama_requests import IGNORED
from tests.server.openai_serving import Script, output, raises, says
from tests.server.stand import KEY, reachable
from tests.server.test_clients import Animal
from tests.server.test_reasoning import Thinker
from tests.server.test_tools import CALLED, EXPECTED, TOOLS, pieces, scripted

ollama = pytest.importorskip("ollama", reason="ollama is not installed")

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 8}
CHAT: dict[str, Any] = {"model": "tiny", "messages": HELLO}


@asynccontextmanager
async def connected(client: Any, **settings: Any) -> AsyncIterator[Any]:
    async with reachable(client, served_model_name=("tiny",), **settings) as address:
        yield ollama.AsyncClient(address, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False)


async def both(ask: Any, **asked: Any) -> tuple[Any, list[Any]]:
    """The answer, and the parts of a stream."""
    return await ask(**asked), [part async for part in await ask(stream=True, **asked)]


def prompts(script: Script) -> list[str]:
    return [script.tokenizer.decode(asked["prompt"], skip_special_tokens=False) for asked in script.asked]


def text_of(parts: list[Any]) -> str:
    return "".join(part.message.content for part in parts)


# ---- on a model


async def test_a_chat_whole_and_streamed(local_client: Any) -> None:
    async with connected(local_client) as client:
        whole, parts = await both(client.chat, **CHAT, options=GREEDY)
        again, _ = await both(client.chat, **{**CHAT, "model": "tiny:latest"}, options=GREEDY, keep_alive="5m")
    assert text_of(parts) == whole.message.content == again.message.content != ""
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True] and len(parts) > 2
    for last in (whole, parts[-1]):
        assert (last.model, last.done, last.done_reason) == ("tiny", True, "length")
        assert last.eval_count == 8 and last.prompt_eval_count > 8
        assert last.total_duration >= last.prompt_eval_duration + last.eval_duration > 0 == last.load_duration
        datetime.fromisoformat(last.created_at)


async def test_a_text_whole_streamed_and_raw(local_client: Any) -> None:
    async with connected(local_client) as client:
        asked: dict[str, Any] = {"model": "tiny", "prompt": "hello", "options": GREEDY}
        whole, parts = await both(client.generate, **asked)
        chat = await client.chat(**CHAT, options=GREEDY)
        raw, raws = await both(client.generate, **asked, raw=True)
    assert "".join(part.response for part in parts) == whole.response == chat.message.content
    assert "".join(part.response for part in raws) == raw.response != whole.response
    assert len(whole.context) == whole.prompt_eval_count + whole.eval_count and parts[-1].context == whole.context
    assert raw.context is None and raw.prompt_eval_count == len(local_client.tokenizer.encode("hello"))
    assert (raw.done_reason, raw.eval_count) == ("length", 8) == (raws[-1].done_reason, raws[-1].eval_count)


async def test_the_context_of_a_turn_comes_before_the_next(local_client: Any) -> None:
    script = Script(local_client, says("yes"))
    async with connected(script) as client:
        first = await client.generate(model="tiny", prompt="hello", system="Be brief.")
        await client.generate(model="tiny", prompt="more", context=first.context)
        with pytest.raises(ollama.ResponseError, match=r"context\[1\]=-3"):
            await client.generate(model="tiny", prompt="more", context=[1, -3])
    one, two = prompts(script)
    assert one == "<s1>system\nBe brief.<s0>\n<s1>user\nhello<s0>\n<s1>assistant\n"
    assert list(script.asked[1]["prompt"][: len(first.context)]) == list(first.context)
    assert two.endswith("<s1>user\nmore<s0>\n<s1>assistant\n") and two.count("<s1>user") == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_of_a_format(local_client: Any, streamed: bool) -> None:
    async with connected(local_client) as client:
        for seed in range(3):
            asked: dict[str, Any] = {"options": {"num_predict": 60, "seed": seed}, "format": Animal.model_json_schema()}
            whole, parts = await both(client.chat, **CHAT, **asked)
            Animal.model_validate_json(text_of(parts) if streamed else whole.message.content)
            made, more = await both(client.generate, model="tiny", prompt="hello", raw=True, **asked)
            Animal.model_validate_json("".join(part.response for part in more) if streamed else made.response)
        any = await client.chat(**CHAT, format="json", options={"num_predict": 60, "seed": 1})
        assert isinstance(json.loads(any.message.content), dict)
        with pytest.raises(ollama.ResponseError, match="format"):
            await client.chat(**CHAT, format={"type": "array", "uniqueItems": 3})


async def test_logprobs(local_client: Any) -> None:
    async with connected(local_client) as client:
        whole, parts = await both(client.chat, **CHAT, options=GREEDY, logprobs=True, top_logprobs=2)
    entries = [entry for part in parts for entry in part.logprobs or []]
    assert [entry.token for entry in entries] == [entry.token for entry in whole.logprobs] and len(entries) == 8
    for entry in entries:
        assert len(entry.top_logprobs) == 2 and entry.logprob == max(top.logprob for top in entry.top_logprobs)


async def test_vectors(local_client: Any) -> None:
    """As ``/v1/embeddings`` gives them, which are compared with the model's hidden states."""
    texts = ["hello", "the cat sat on the mat"]
    async with reachable(local_client, served_model_name=("tiny",)) as address:
        client = ollama.AsyncClient(address, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False)
        openai_way = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
        expected = await openai_way.embeddings.create(model="tiny", input=texts)
        raw = await openai_way.embeddings.create(model="tiny", input=texts[0], extra_body={"normalize": False})
        cut = await openai_way.embeddings.create(
            model="tiny", input=texts[0], dimensions=8, extra_body={"truncate_dimensions": True}
        )
        many = await client.embed(model="tiny:latest", input=texts, keep_alive="5m", truncate=True)
        one = await client.embed(model="tiny", input=texts[0])
        short = await client.embed(model="tiny", input=texts[0], dimensions=8)
        old = await client.embeddings(model="tiny", prompt=texts[0])
        nothing = [await client.embed(model="tiny", input=given) for given in ("", [])]
        with pytest.raises(ollama.ResponseError, match="dimensions=999") as refused:
            await client.embed(model="tiny", input="a", dimensions=999)
        assert refused.value.status_code == 400
        with pytest.raises(ollama.ResponseError, match="prompt has .* characters"):
            await client.embeddings(model="tiny", prompt="a" * 2**20)
        with pytest.raises(ollama.ResponseError, match="served") as unknown:
            await client.embed(model="other", input="a")
        assert unknown.value.status_code == 404
        await openai_way.close()
    for found, wanted in ((many.embeddings, expected), (one.embeddings, expected), (short.embeddings, cut), ([old.embedding], raw)):  # fmt: skip
        for vector, item in zip(found, wanted.data, strict=len(found) == len(wanted.data)):
            assert list(vector) == pytest.approx(item.embedding, abs=1e-6)
    assert many.prompt_eval_count == expected.usage.prompt_tokens and many.total_duration > 0 and many.model == "tiny"
    assert [list(empty.embeddings) for empty in nothing] == [[], []]


async def test_the_model_is_described(local_client: Any) -> None:
    async with connected(local_client) as client:
        (listed,) = (await client.list()).models
        (loaded,) = (await client.ps()).models
        shown = await client.show("tiny")
        with pytest.raises(ollama.ResponseError, match="tinny.*tiny") as refused:
            await client.show("tinny")
        version = json.loads((await client._client.get("/api/version")).text)
    assert refused.value.status_code == 404 and version == {"version": __version__}
    assert listed.model == loaded.model == "tiny" and listed.size == loaded.size > 1000
    assert listed.details.format == "safetensors" and listed.details.family == shown.details.family == "llama"
    assert listed.digest == loaded.digest and loaded.context_length == local_client.info.context_length
    assert shown.template == local_client.tokenizer.chat_template
    assert shown.modelinfo["llama.context_length"] == local_client.info.context_length
    assert shown.capabilities == ["completion", "tools"]


async def test_what_only_loads(local_client: Any) -> None:
    script = Script(local_client, says("x"))
    async with connected(script) as client:
        for answer in (await client.generate(model="tiny"), await client.generate(model="tiny", keep_alive=-1)):
            assert (answer.done, answer.done_reason, answer.response) == (True, "load", "")
        chat, parts = await both(client.chat, model="tiny", messages=[], keep_alive=0)
        assert (chat.done_reason, chat.message.content, parts) == ("load", "", [parts[0]])
    assert not script.asked


# ---- what comes back


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_calls_whole_and_streamed(local_client: Any, size: int) -> None:
    async with connected(scripted(local_client, says(*pieces(CALLED, size)))) as client:
        whole, parts = await both(client.chat, **CHAT, tools=TOOLS)
    assert text_of(parts).strip() == whole.message.content.strip() == "I will."
    streamed = [call for part in parts for call in part.message.tool_calls or []]
    for calls in (streamed, whole.message.tool_calls):
        assert [(call.function.name, call.function.arguments) for call in calls] == EXPECTED
    assert whole.done_reason == parts[-1].done_reason == "stop"


async def test_a_function_of_python_is_a_tool(local_client: Any) -> None:
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one
            b: the other
        """
        return a + b

    script = scripted(local_client, says(CALLED))
    async with connected(script) as client:
        answer = await client.chat(**CHAT, tools=[add])
    (call,) = answer.message.tool_calls  # the other is of a tool that the request has not
    assert add(**call.function.arguments) == 3
    assert prompts(script)[0].startswith("<s1>system\nCall add<s0>\n")


async def test_calls_on_a_model_are_valid(calling_client: Any) -> None:
    async with connected(calling_client) as client:
        answer = await client.chat(**CHAT, tools=TOOLS[1:], options={"num_predict": 100, "seed": 1})
    for call in answer.message.tool_calls or []:
        jsonschema.validate(dict(call.function.arguments), TOOLS[1]["function"]["parameters"])


async def test_thinking(local_client: Any) -> None:
    thinker = Thinker(local_client, "Hm, so.\n</think>\n\nYes.")
    async with connected(thinker) as client:
        whole, parts = await both(client.chat, **CHAT, think=True, options={"num_predict": 100})
        low = await client.generate(model="tiny", prompt="hello", think="low", options={"num_predict": 100})
        assert "thinking" in (await client.show("tiny")).capabilities
    assert whole.message.content == text_of(parts) == low.response == "Yes."
    assert "".join(part.message.thinking or "" for part in parts) == whole.message.thinking == low.thinking
    assert whole.message.thinking.strip() == "Hm, so."


async def test_why_it_ends(local_client: Any) -> None:
    async def say(prompt: Any, params: SamplingParams) -> AsyncIterator[OutputDelta]:
        whole = output(prompt, SampleOutput(0, "one", (10,), FinishReason.STOP, "END"))
        yield OutputDelta("r", 0, "one", (10,), (), FinishReason.STOP, whole)

    async with connected(Script(local_client, say)) as client:
        whole, parts = await both(client.chat, **CHAT, options={"stop": "END"})
    assert whole.done_reason == parts[-1].done_reason == "stop" and whole.eval_count == 1


async def test_an_error_in_the_middle(local_client: Any) -> None:
    async with connected(Script(local_client, raises(EngineDied("gone"), after=2))) as client:
        said = []
        with pytest.raises(ollama.ResponseError, match="gone"):
            async for part in await client.chat(**CHAT, stream=True):
                said.append(part.message.content)
        assert said == ["x", "x"]
        with pytest.raises(ollama.ResponseError, match="gone") as refused:
            await client.chat(**CHAT)
        assert refused.value.status_code == 503


async def test_lines_by_default(local_client: Any) -> None:
    async with (
        reachable(Script(local_client, says("a", "b")), served_model_name=("tiny",)) as address,
        aiohttp.ClientSession() as session,
        session.post(f"{address}/api/chat", json=CHAT) as answer,
    ):
        assert answer.content_type == "application/x-ndjson"
        lines = (await answer.text()).splitlines()
    assert [json.loads(line)["message"]["content"] for line in lines] == ["a", "b", ""]


async def test_a_line_ends_at_its_end_alone(local_client: Any) -> None:
    """Wherever Unicode, and with it the client, would end it."""
    said = "a" + "b".join("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
    async with connected(Script(local_client, says(*said))) as client:
        whole, parts = await both(client.chat, **CHAT)
    assert whole.message.content == text_of(parts) == said


async def test_a_sign_of_life_is_no_line(local_client: Any) -> None:
    alive = asyncio.Event()

    async def say(prompt: Any, params: SamplingParams) -> AsyncIterator[OutputDelta]:
        await alive.wait()
        async for delta in says("a", "b")(prompt, params):
            yield delta

    async with (
        reachable(Script(local_client, say), served_model_name=("tiny",), stream_keepalive=0.01) as address,
        aiohttp.ClientSession() as session,
        session.post(f"{address}/api/chat", json=CHAT) as answer,
    ):
        assert await answer.content.readexactly(1) == b" "
        alive.set()
        assert [json.loads(line)["message"]["content"] async for line in answer.content] == ["a", "b", ""]


# ---- what the engine is asked


async def test_the_template_gets_calls_and_results(local_client: Any) -> None:
    script = scripted(local_client, says("x"))
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in EXPECTED]
    history = [
        *HELLO,
        {"role": "assistant", "content": "I will.", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_name": "sky", "content": "clear"},
        {"role": "tool", "content": "3"},
    ]
    async with connected(script) as client:
        await client.chat(model="tiny", messages=history, tools=TOOLS)
        await client.chat(model="tiny", messages=[*HELLO, {"role": "assistant", "content": "I am"}])
    first, continued = prompts(script)
    assert first == (
        "<s1>system\nCall add sky<s0>\n<s1>user\nhello<s0>\n<s1>assistant\nI will."
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
        '<tool_call>\n{"name": "sky", "arguments": {"city": "Oslo"}}\n</tool_call><s0>\n'
        "<s1>tool\nclear<s0>\n<s1>tool\n3<s0>\n<s1>assistant\n"
    )
    assert continued == "<s1>user\nhello<s0>\n<s1>assistant\nI am"


async def test_the_options_reach_the_engine(local_client: Any) -> None:
    script = Script(local_client, says("x"))
    same = {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 1.0}  # fmt: skip
    ignored = dict.fromkeys(IGNORED, 1) | {"typical_p": 1.0, "mirostat": 0, "num_ctx": 512, "repeat_last_n": -1}
    options = {**same, "repeat_penalty": 1.25, "num_predict": 9, "stop": ["A"], **ignored}
    async with connected(script) as client:
        await client.chat(**CHAT, options=options)
        await client.chat(**CHAT)
        await client.chat(**CHAT, options={"num_predict": -2})
        await client.chat(**CHAT, options={"num_predict": 10**6})
    given, default, endless, most = (asked["params"] for asked in script.asked)
    assert {name: getattr(given, name) for name in same} == same
    assert (given.repetition_penalty, given.max_tokens, given.stop) == (1.25, 9, ("A",))
    assert (default.temperature, default.top_k, default.top_p, default.max_tokens) == (0.8, 40, 0.9, None)
    assert endless.max_tokens is None
    assert most.max_tokens + len(script.asked[3]["prompt"]) == local_client.info.context_length


# ---- what is refused

CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "sky", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("chat", {"modle": "x"}, "modle: api/chat has no such field.*model"),
        ("chat", {"model": None}, "model: is missing"),
        ("chat", {"messages": "x"}, "messages='x'"),
        ("chat", {"messages": [{"role": "bot"}]}, "messages[0].role='bot'"),
        ("chat", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content=3"),
        ("chat", {"messages": [{"role": "user", "images": ["aGk="]}]}, "messages[0].images are given: the model reads text only"),
        ("chat", {"messages": [{"role": "user", "txt": "x"}]}, "messages[0].txt"),
        ("chat", {"messages": [{"role": "user", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ("chat", {"messages": [*HELLO, CALL]}, "messages[1]"),
        ("chat", {"messages": [CALL, {"role": "tool", "tool_name": "ski", "content": "x"}]}, "messages[1].tool_name='ski'"),
        ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role='tool': no call"),
        ("chat", {"tools": [{"type": "function"}]}, "tools[0].function"),
        ("chat", {"format": "yaml"}, "format='yaml': must be json or a JSON Schema"),
        ("chat", {"think": True}, "think=True"),
        ("chat", {"think": "lots"}, "think='lots': must be true, false or one of"),
        ("chat", {"keep_alive": "soon"}, "keep_alive='soon'"),
        ("chat", {"top_logprobs": 2}, "top_logprobs=2: needs logprobs=true"),
        ("chat", {"options": {"temperatur": 1}}, "options.temperatur: there is no such option"),
        ("chat", {"options": {"temperature": -1}}, "options.temperature=-1"),
        ("chat", {"options": {"repeat_penalty": 0}}, "options.repeat_penalty=0"),
        ("chat", {"options": {"num_predict": -3}}, "options.num_predict=-3"),
        ("chat", {"options": {"num_ctx": 513}}, "options.num_ctx=513: must be at most 512"),
        ("chat", {"options": {"mirostat": 2}}, "options.mirostat=2: is not supported; must be 0"),
        ("chat", {"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options.repeat_last_n=64"),
        ("chat", {"options": []}, "options=[]"),
        ("generate", {"suffix": "x"}, "suffix='x': is not supported here"),
        ("generate", {"template": "x"}, "template='x': is not supported here"),
        ("generate", {"images": ["aGk="]}, "images are given"),
        ("generate", {"prompt": 3}, "prompt=3"),
        ("generate", {"context": [320]}, "context[0]=320"),
        ("generate", {"raw": True, "context": [1]}, "context=[1]: has no meaning with raw=true"),
        ("generate", {"messages": HELLO}, "messages: api/generate has no such field"),
        ("show", {"modle": "tiny"}, "modle: show has no such field.*model"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_is_refused(
    local_client: Any, path: str, fields: dict[str, Any], message: str, streamed: bool
) -> None:
    script = Script(local_client, says("x"))
    body: dict[str, Any] = {"chat": CHAT, "generate": {"model": "tiny", "prompt": "x"}, "show": {}}[path]
    if path != "show":
        body = {**body, "stream": streamed}
    async with (
        reachable(script, served_model_name=("tiny",)) as address,
        aiohttp.ClientSession() as session,
        session.post(f"{address}/api/{path}", json={**body, **fields}) as answer,
    ):
        told = await answer.json()
    assert answer.status == 400 and set(told) == {"error"}, told
    head, _, tail = message.partition(".*")
    assert told["error"].startswith(head) and tail in told["error"], told
    assert not script.asked


async def test_the_doors_speak_the_dialect(local_client: Any) -> None:
    async with connected(Script(local_client, says("x")), api_key=KEY) as client:
        assert (await client.chat(**CHAT)).message.content == "x"
        stranger = ollama.AsyncClient(str(client._client.base_url), trust_env=False)
        with pytest.raises(ollama.ResponseError, match="the API key is missing or wrong") as refused:
            await stranger.list()
        assert refused.value.status_code == 401 and refused.value.error.startswith("the API key")
        with pytest.raises(ollama.ResponseError, match="tinny.*tiny") as unknown:
            await client.chat(model="tinny", messages=HELLO)
        assert unknown.value.status_code == 404
