"""A small server that speaks OpenAI's API and records what it is asked, and programs that ask it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lang.backends.base import ProgramInfo
from lang.backends.openai import OpenAI
from radixrt.engine.nodes import Delta, Done, Event, Failed, Gen, Node, Role, Text
from radixrt.request import SamplingParams

Reply = Callable[[dict[str, Any]], Sequence[Any]]


@dataclass
class Fake:
    """A server that speaks both APIs. ``reply`` makes the chunks of a request: texts, ``choices`` objects, or whole chunks."""

    reply: Reply = lambda asked: ["Hello", " world"]
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0
    gone: int = 0
    hold: asyncio.Event | None = None
    held: asyncio.Event = field(default_factory=asyncio.Event)
    finish: bool = True
    together: int = 0  # a request is answered once this many have run at a time
    turns: int = 0  # of the loop that a request takes at least
    met: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.asked.append(asked)
        self.paths.append(request.path)
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running >= self.together:
            self.met.set()
        try:
            await self.met.wait()
            for _ in range(self.turns):
                await asyncio.sleep(0)
            made = self.reply(asked)
            if isinstance(made, web.Response):
                return made
            return await self.stream(request, asked, made)
        finally:
            self.running -= 1

    async def stream(self, request: web.Request, asked: dict[str, Any], made: Sequence[Any]) -> web.StreamResponse:
        chat = request.path.endswith("chat/completions")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        common = {
            "id": "x",
            "created": 1,
            "model": asked["model"],
            "object": "chat.completion.chunk" if chat else "text_completion",
        }
        n = asked.get("n", 1)
        pieces: list[Any] = list(made)
        if self.finish:
            pieces += [{"index": i, "finish_reason": "stop"} for i in range(n)]
            prompt = {
                "prompt_tokens": 7,
                "completion_tokens": 2,
                "total_tokens": 9,
                "prompt_tokens_details": {"cached_tokens": 4},
            }
            pieces.append({"choices": [], "usage": prompt})
        for piece in pieces:
            chunk = piece
            if isinstance(piece, str):
                text = {"delta": {"content": piece}} if chat else {"text": piece}
                chunk = {"choices": [{"index": i, "finish_reason": None, **text} for i in range(n)]}
            elif "index" in piece:
                chunk = {"choices": [{**({"delta": {}} if chat else {"text": ""}), "finish_reason": None, **piece}]}
            await response.write(f"data: {json.dumps({**common, **chunk})}\n\n".encode())
            if self.hold is not None:
                self.held.set()
                try:
                    await self.hold.wait()
                except asyncio.CancelledError:
                    self.gone += 1
                    raise
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    made = Fake()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", made.answer)
    app.router.add_post("/v1/completions", made.answer)
    server = TestServer(app, host="127.0.0.1", port=0)
    await server.start_server()
    made.url = str(server.make_url("/v1"))
    try:
        yield made
    finally:
        if made.hold is not None:
            made.hold.set()
        await server.close()


class Program:
    """A session and what it told."""

    def __init__(self, backend: OpenAI) -> None:
        self.events: list[Event] = []
        self.changed = asyncio.Event()
        self.session = backend.open(ProgramInfo("p", "p", 0), self._hear)

    def _hear(self, event: Event) -> None:
        self.events.append(event)
        self.changed.set()

    async def outcome(self, node: int) -> Done | Failed:
        while True:
            for event in self.events:
                if event.node == node and not isinstance(event, Delta):
                    return event
            self.changed.clear()
            await self.changed.wait()

    async def done(self, node: int) -> Done:
        event = await self.outcome(node)
        assert isinstance(event, Done), event
        return event

    async def failed(self, node: int) -> Failed:
        event = await self.outcome(node)
        assert isinstance(event, Failed), event
        return event

    def deltas(self, node: int, sample: int = 0) -> list[str]:
        return [e.text for e in self.events if isinstance(e, Delta) and (e.node, e.sample) == (node, sample)]


def backend(fake: Fake, **options: Any) -> OpenAI:
    return OpenAI("m", **{"base_url": fake.url, "api_key": "key", **options})


async def ask(backend: OpenAI, *nodes: Node) -> Program:
    """Runs nodes to the end of each that is answered."""
    await backend.start()
    program = Program(backend)
    program.session.add(nodes)
    for node in nodes:
        if not isinstance(node, Text):
            await program.outcome(node.id)
    await backend.aclose()
    return program


def gen(id: int, parent: int | None, name: str = "x", **params: Any) -> Gen:
    return Gen(id=id, parent=parent, name=name, params=SamplingParams(**params))


def text(id: int, parent: int | None, *parts: Any) -> Text:
    return Text(id=id, parent=parent, parts=parts)


def message(id: int, parent: int | None, role: str, *parts: Any) -> list[Node]:
    return [
        Role(id=id, parent=parent, role=role, begin=True),
        text(id + 1, id, *parts),
        Role(id=id + 2, parent=id + 1, role=role, begin=False),
    ]


def chat(*after: Node) -> list[Node]:
    """A question (nodes 0 to 3); the answer's message is open."""
    return [*message(0, None, "user", "Hi"), Role(id=3, parent=2, role="assistant", begin=True), *after]
