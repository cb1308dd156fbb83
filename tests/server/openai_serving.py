"""A served OpenAI API, and an engine behind it that says exactly what a test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import openai
from aiohttp import web
from aiohttp.test_utils import TestServer

from radixrt.request import (
    FinishReason,
    OutputDelta,
    PositionLogprobs,
    RequestOutput,
    SampleOutput,
    SamplingParams,
    TokenLogprob,
)
from radixrt.server.openai import routes

HELLO = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass
class Settings:
    served_model_names: tuple[str, ...] = ("tiny",)
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    unknown_fields: Literal["refuse", "warn"] = "refuse"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"


@asynccontextmanager
async def serving(client: Any, **settings: Any) -> AsyncIterator[TestServer]:
    app = web.Application(client_max_size=2**20)
    app.add_routes(routes(client, Settings(**settings)))
    async with TestServer(app) as server:
        yield server


def connected(server: TestServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=str(server.make_url("/v1")), api_key="none", max_retries=0)


async def post(server: TestServer, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
    """Status, JSON and headers of an answer; ``body``: bytes as they are, or anything that JSON can write."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            server.make_url(path), data=data, headers={"Content-Type": "application/json", **headers}
        ) as answer,
    ):
        text = await answer.text()
        return answer.status, json.loads(text) if answer.content_type == "application/json" else text, answer.headers


# ---- an engine that says what it is told to


def position(token: int, logprob: float = -0.5, top: Sequence[int] = ()) -> PositionLogprobs:
    return PositionLogprobs(
        TokenLogprob(token, logprob, 1), tuple(TokenLogprob(other, logprob, i + 1) for i, other in enumerate(top))
    )


class Script:
    """An engine client whose ``stream`` gives what ``say`` makes of a prompt; it remembers what it was asked."""

    def __init__(self, real: Any, say: Callable[[Any, SamplingParams], AsyncIterator[OutputDelta]]) -> None:
        self.tokenizer, self.info = real.tokenizer, real.info
        self.asked: list[dict[str, Any]] = []
        self.kept: list[AsyncIterator[OutputDelta]] = []
        self.aborted: list[str] = []
        self.ended = asyncio.Event()
        self._say = say

    def stream(self, prompt: Any, params: SamplingParams, **more: Any) -> AsyncIterator[OutputDelta]:
        self.kept.append(self._run(prompt, params, **more))  # so that it ends only when it is closed
        return self.kept[-1]

    async def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return True

    async def _run(self, prompt: Any, params: SamplingParams, **more: Any) -> AsyncIterator[OutputDelta]:
        self.asked.append({"prompt": list(prompt), "params": params, **more})
        try:
            async for delta in self._say(prompt, params):
                if more["deltas"] or delta.output is not None:
                    yield delta
        finally:
            self.ended.set()


def output(prompt: Sequence[int], *samples: SampleOutput, **more: Any) -> RequestOutput:
    return RequestOutput("r", tuple(prompt), samples, **more)


def says(
    *texts: str, reason: FinishReason = FinishReason.STOP, **more: Any
) -> Callable[..., AsyncIterator[OutputDelta]]:
    """One sample in pieces, a token each."""

    async def say(prompt: Any, params: SamplingParams) -> AsyncIterator[OutputDelta]:
        ids = tuple(range(10, 10 + len(texts)))
        whole = output(prompt, SampleOutput(0, "".join(texts), ids, reason), **more)
        for i, text in enumerate(texts):
            last = i == len(texts) - 1
            yield OutputDelta("r", 0, text, (ids[i],), (), reason if last else None, whole if last else None)

    return say


def raises(error: Exception, after: int = 0) -> Callable[..., AsyncIterator[OutputDelta]]:
    async def say(prompt: Any, params: SamplingParams) -> AsyncIterator[OutputDelta]:
        for _ in range(after):
            yield OutputDelta("r", 0, "x", (10,))
        raise error

    return say
