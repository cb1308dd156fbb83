"""A stand-in for the engine behind the front, and the application on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp.test_utils import TestClient, TestServer

from radixrt import SamplingParams
from radixrt.request import FinishReason, OutputDelta, RequestOutput, SampleOutput
from radixrt.server.app import make_app
from radixrt.server.client import EngineInfo
from radixrt.server.config import ServerConfig

KEY = "a-key-that-nobody-sees"


class Stand:
    """An engine that answers "one two three", a word each time ``go`` lets it."""

    def __init__(self, *, held: bool = False, running: int = 2) -> None:
        self.info = EngineInfo("stand", 64, 320, 1000, "float32", "cpu", {"max_running_requests": running})
        self.healthy = True
        self.go = asyncio.Event()
        self.running: set[str] = set()
        self.asked: list[tuple[Any, SamplingParams, bool]] = []
        self.links: dict[str, Callable[[str], None]] = {}
        self.heard: list[str] = []
        self.error: Exception | None = None
        self.closed = self.started = False
        if not held:
            self.go.set()

    tokenizer: Any = None

    async def start(self) -> None:
        self.started = True

    async def close(self) -> None:
        self.closed = True

    async def stream(
        self, prompt: Any, params: SamplingParams, *, request_id: str, deltas: bool = True, **_: Any
    ) -> AsyncIterator[OutputDelta]:
        self.asked.append((prompt, params, deltas))
        self.running.add(request_id)
        words = ["one", " two", " three"]
        try:
            for i, word in enumerate(words):
                await self.go.wait()
                if self.error is not None:
                    raise self.error
                if deltas:
                    yield OutputDelta(request_id, 0, word, (i,))
            samples = tuple(SampleOutput(i, "one two three", (0, 1, 2), FinishReason.STOP, 0) for i in range(params.n))
            output = RequestOutput(request_id, (5, 6, 7, 8), samples, cached_tokens=3, computed_tokens=1)
            yield OutputDelta(request_id, 0, "", (), finish_reason=FinishReason.STOP, output=output)
        finally:
            self.running.discard(request_id)

    async def score(self, prefix: Sequence[int], choices: Sequence[Sequence[int]], **_: Any) -> RequestOutput:
        raise NotImplementedError

    async def abort(self, request_id: str) -> bool:
        return False

    async def stats(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {
            "running": len(self.running),
            "waiting": 7,
            "pool_tokens": 1000,
            "pool_used": 300,
            "pool_evictable": 50,
            "prompt_tokens": 40,
            "cached_tokens": 30,
            "generated_tokens": 12,
            "preemptions": 2,
            "programs": 0,
        }

    async def tree(self, most: int) -> dict[str, Any]:
        return {"nodes": [], "requests": [], "protected": 0, "stats": await self.stats()}

    async def runs(self, known: Sequence[int]) -> dict[str, Any]:
        return {"runs": [], "numbers": []}

    async def flush_cache(self) -> int:
        return 17

    def programs(self, peer: str, receive: Callable[[str], None]) -> Any:
        self.links[peer] = receive
        stand = self

        class Link:
            def send(self, message: str) -> None:
                if stand.error is not None:
                    raise stand.error
                stand.heard.append(message)

            def close(self) -> None:
                stand.links.pop(peer, None)

        return Link()


@asynccontextmanager
async def served(client: Any, **settings: Any) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(make_app(client, ServerConfig(**settings)))) as found:
        yield found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


async def error_of(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    error: dict[str, Any] = (await answer.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@asynccontextmanager
async def reachable(client: Any, **settings: Any) -> AsyncIterator[str]:
    async with TestServer(make_app(client, ServerConfig(**settings))) as server:
        yield str(server.make_url("")).rstrip("/")
