"""Streams own what all streamed answers do alike: several sources told as one, in server-sent events, with a sign of life where nothing is said.

Invariants: whatever ends a stream has closed its sources; the head of an answer goes out with its first event, or with the first sign of life:
until then a refusal can be an answer of its own. What waits for a slow reader is bounded, and a reader that takes nothing is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Self, TypeVar

from aiohttp import web

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_HEAD = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_ALIVE = b": keep-alive\n\n"  # a comment: clients skip it, proxies see that the answer goes on
_AHEAD = 64  # items of all sources together that wait for the reader, and may each hold a whole text
_UNREAD = 60.0  # seconds after which a client that takes nothing of its stream is gone


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of several sources as they come, each with its source's number; an error of one ends all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    found: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(_AHEAD)

    async def follow(at: int) -> None:
        try:
            async with aclosing(sources[at]) as source:
                async for item in source:
                    await found.put((at, item))
        except Exception as error:
            await found.put(error)
        else:
            await found.put(None)

    tasks = [asyncio.ensure_future(follow(at)) for at in range(len(sources))]
    try:
        running = len(tasks)
        while running:
            told = await found.get()
            if isinstance(told, Exception):
                raise told
            if told is None:
                running -= 1
            else:
                yield told
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream:
    """An answer of server-sent events, ``async with`` it.

    Args:
        headers: may say that it is a stream of another type. keepalive: seconds after which a stream that says nothing sends ``alive``.

    Fields:
        begun: the head of the answer is on its way: what goes wrong now can only be told in an event.
    """

    def __init__(
        self, request: web.Request, headers: Mapping[str, str], keepalive: float, alive: bytes = _ALIVE
    ) -> None:
        self.begun = False
        self._request = request
        self._response = web.StreamResponse(headers={**_HEAD, **headers})
        self._keepalive, self._alive = keepalive, alive
        self._quiet = False
        self._writing: float | None = None  # since when an event is on its way to the client
        self._ready = False
        self._preparing = asyncio.Lock()
        self._sign: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._beat()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._sign is not None:
            self._sign.cancel()
            await asyncio.wait([self._sign])

    async def write(self, data: bytes) -> None:
        """Raises ConnectionResetError: the client is gone."""
        self._quiet = False
        self._writing = time.monotonic()
        if not self._ready:
            await self._begin()
        await self._response.write(data)
        self._writing = None

    async def end(self, data: bytes) -> web.StreamResponse:
        """Write the last of it; the answer, for the handler to return."""
        self._writing = time.monotonic()  # and no sign of life behind the end: it would be taken for the next answer
        if not self._ready:
            await self._begin()
        await self._response.write_eof(data)
        return self._response

    async def _begin(self) -> None:
        async with self._preparing:  # an event and a sign of life may come together
            if not self._ready:
                self.begun = True
                await self._response.prepare(self._request)
                self._ready = True

    def _beat(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._keepalive, self._beat)
        if self._writing is not None and time.monotonic() - self._writing > _UNREAD:
            if self._request.transport is not None:
                self._request.transport.abort()
        elif self._quiet and (self._sign is None or self._sign.done()):
            self._sign = asyncio.ensure_future(self._live())
        self._quiet = True

    async def _live(self) -> None:
        with suppress(ConnectionError):  # whoever writes next is told, or the handler is cancelled
            await self._begin()
            if self._writing is None:
                await self._response.write(self._alive)
