"""Streamed answers: several sources told as one, and signs of life while nothing is said."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import openai
import pytest
from aiohttp.test_utils import make_mocked_request

from radixrt import SamplingParams
from radixrt.request import OutputDelta
from radixrt.server import streams
from radixrt.server.client import EngineDied
from radixrt.server.streams import merged
from tests.server.openai_serving import HELLO, Script, says
from tests.server.stand import Stand, served, until

ALIVE = b": keep-alive\n"


class Source:
    """Gives its items, one whenever it is let, and then ends or fails; it knows whether it was closed."""

    def __init__(self, items: list[Any], error: Exception | None = None) -> None:
        self.items, self.error = items, error
        self.go: asyncio.Queue[None] = asyncio.Queue()
        self.open = False

    async def run(self) -> AsyncGenerator[Any, None]:
        self.open = True
        try:
            for item in self.items:
                await self.go.get()
                yield item
            if self.error is not None:
                await self.go.get()
                raise self.error
        finally:
            self.open = False


@pytest.mark.parametrize("count", [1, 3])
async def test_items_come_in_the_order_they_are_told(count: int) -> None:
    sources = [Source([f"{at}-{i}" for i in range(3)]) for at in range(count)]
    order = [at for _ in range(3) for at in reversed(range(count))]
    stream = merged([source.run() for source in sources])
    found = []
    for at in order:
        sources[at].go.put_nowait(None)
        found.append(await anext(stream))
    assert found == [(at, f"{at}-{i}") for i in range(3) for at in reversed(range(count))]
    assert [item async for item in stream] == [] and not any(source.open for source in sources)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("end", ["error", "close", "cancel"])
async def test_whatever_ends_a_stream_closes_its_sources(count: int, end: str) -> None:
    sources = [Source(["a", "b"]) for _ in range(count - 1)] + [Source(["a"], ValueError("of one"))]
    stream = merged([source.run() for source in sources])
    sources[-1].go.put_nowait(None)
    assert await anext(stream) == (count - 1, "a")
    assert all(source.open for source in sources)
    if end == "close":
        await asyncio.wait_for(stream.aclose(), 20)
    elif end == "error":
        sources[-1].go.put_nowait(None)
        with pytest.raises(ValueError, match="of one"):
            await asyncio.wait_for(anext(stream), 20)
    else:
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert not any(source.open for source in sources)


async def test_sources_do_not_run_ahead_of_a_reader_that_takes_nothing() -> None:
    told = 0

    async def source() -> AsyncGenerator[int, None]:
        nonlocal told
        while told < 10_000:
            told += 1
            yield told

    stream = merged([source() for _ in range(4)])
    await anext(stream)
    for _ in range(100):
        await asyncio.sleep(0)
    assert told < 200
    await stream.aclose()


# ---- signs of life


@pytest.mark.parametrize("error", [None, EngineDied("the process has ended"), ZeroDivisionError("secret")], ids=str)
async def test_a_stream_that_waits_tells_that_it_lives(error: Exception | None) -> None:
    stand = Stand(held=True)
    async with asyncio.timeout(20), served(stand, stream_keepalive=0.01) as client:
        answer = await client.post("/generate", json={"text": "a", "stream": True})
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        assert [await answer.content.readline() for _ in range(4)] == [ALIVE, b"\n"] * 2
        stand.error = error
        stand.go.set()
        events = [line for line in (await answer.text()).split("\n\n") if line and not line.startswith(":")]
        assert events[-1] == "data: [DONE]"
        if error is not None:  # as an event, not as a second answer behind the first
            told = "has ended" if isinstance(error, EngineDied) else "internal error"
            assert events[0].startswith('data: {"error"') and told in events[0] and len(events) == 2
        else:
            assert '"one two three"' in events[-2] and len(events) == 5
        await until(lambda: not stand.running)


async def test_a_program_that_waits_tells_that_it_lives() -> None:
    stand = Stand()
    body = {"version": 1, "nodes": [{"id": 0, "kind": "text", "parts": ["a"]}, {"id": 1, "kind": "gen", "parent": 0}]}
    async with asyncio.timeout(20), served(stand, stream_keepalive=0.01) as client:
        answer = await client.post("/v1/programs", json=body)
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        assert await answer.content.readline() == ALIVE
        (tell,) = stand.links.values()
        tell(json.dumps({"event": "done", "program": "p", "node": 1}))
        assert [line for line in (await answer.text()).splitlines() if line.startswith("data: ")] == [
            'data: {"event": "done", "node": 1}',
            "data: [DONE]",
        ]
        assert not stand.links


async def test_a_stream_that_speaks_adds_nothing() -> None:
    async with served(Stand()) as client:
        answer = await client.post("/generate", json={"text": "a", "stream": True})
        assert all(line.startswith("data: ") for line in (await answer.text()).splitlines() if line)


async def test_a_client_that_leaves_a_stream_that_waits_ends_its_request() -> None:
    stand = Stand(held=True)
    async with asyncio.timeout(20), served(stand, stream_keepalive=0.01) as client:
        answer = await client.post("/generate", json={"text": "a", "stream": True})
        assert stand.running
        answer.close()
        await until(lambda: not stand.running)


@pytest.mark.parametrize("words", [1, 2])
async def test_nothing_comes_behind_the_end(monkeypatch: pytest.MonkeyPatch, words: int) -> None:
    sent: list[bytes | str] = []

    class Slow:
        """An answer whose reader takes its time."""

        def __init__(self, **_: Any) -> None: ...

        async def prepare(self, _: Any) -> None:
            await self.taken()

        async def write(self, data: bytes) -> None:
            sent.append(data)

        async def write_eof(self, data: bytes) -> None:
            sent.extend((data, "end"))
            await self.taken()

        async def taken(self) -> None:
            for _ in range(20):
                await asyncio.sleep(0)

    monkeypatch.setattr(streams.web, "StreamResponse", Slow)
    async with streams.EventStream(make_mocked_request("POST", "/"), {}, 0.0) as events:
        for _ in range(words - 1):
            await events.write(b"a word")
        while words > 1 and sent[-1] != b": keep-alive\n\n":
            await asyncio.sleep(0)
        await events.end(b"the last")
    assert sent[-2:] == [b"the last", "end"]


async def test_a_client_that_takes_nothing_of_its_stream_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Stand):
        async def stream(self, prompt: Any, params: SamplingParams, *, request_id: str, **_: Any) -> AsyncIterator[OutputDelta]:  # fmt: skip
            self.running.add(request_id)
            try:
                while True:
                    yield OutputDelta(request_id, 0, "x" * 100_000, (1,))
                    await asyncio.sleep(0)
            finally:
                self.running.discard(request_id)

    monkeypatch.setattr(streams, "_UNREAD", 0.2)
    stand = Endless()
    async with asyncio.timeout(20), served(stand, stream_keepalive=0.01) as client:
        answer = await client.post("/v1/completions", json={"model": "stand", "prompt": [1], "stream": True})
        assert answer.status == 200 and stand.running
        await until(lambda: not stand.running)


@contextlib.asynccontextmanager
async def waiting_chat(local_client: Any) -> AsyncIterator[tuple[asyncio.Event, openai.AsyncOpenAI]]:
    go = asyncio.Event()

    async def say(prompt: Any, params: SamplingParams) -> AsyncIterator[OutputDelta]:
        await go.wait()
        async for delta in says("one", " two", " three")(prompt, params):
            yield delta

    async with served(Script(local_client, say), served_model_name="tiny", stream_keepalive=0.01) as client:
        url = str(client.make_url("/v1"))
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as user:
            yield go, user


async def test_the_openai_client_takes_no_notice_of_signs_of_life(local_client: Any) -> None:
    async with asyncio.timeout(20), waiting_chat(local_client) as (go, user):
        raw = user.chat.completions.with_streaming_response
        async with raw.create(model="tiny", messages=HELLO, stream=True) as answer:  # type: ignore[call-overload]
            lines = answer.iter_lines()
            assert (await anext(lines)).encode() + b"\n" == ALIVE
        stream = await user.chat.completions.create(model="tiny", messages=HELLO, stream=True)  # type: ignore[call-overload]
        go.set()  # the head of the answer is here, and nothing else but signs of life
        said = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(said) == "one two three"
        whole = await user.completions.create(model="tiny", prompt="hello", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in whole]) == "one two three"
