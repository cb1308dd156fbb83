"""LocalClient: an engine in a thread of this process behind the front's contract.

Invariants: the loop never waits for a step; what programs tell crosses to the loop in batches, in order; an engine that stopped without
being closed raises ``EngineDied``.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from os import fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from radixrt.engine.inputs import Prompt
from radixrt.engine.protocol import ProgramChannel
from radixrt.errors import EngineClosed
from radixrt.request import OutputDelta, RequestOutput, SamplingParams
from radixrt.server.client import EngineDied, EngineInfo
from radixrt.server.ipc import error_event

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixrt.engine.async_engine import AsyncEngine
    from radixrt.engine.core import Engine
    from radixrt.engine.intake import Ready
    from radixrt.engine.programs import Programs
    from radixrt.model.tokenizer import Tokenizer

T = TypeVar("T")
_PATIENCE = 30.0  # seconds a running step may take before the engine counts as stuck


def info_of(engine: Engine) -> EngineInfo:
    """What the front wants to know of an engine."""
    model = engine.model_info
    settings = {
        name: value if value is None or isinstance(value, (bool, int, float, str)) else fspath(value)
        for name, value in asdict(engine.config).items()
    }
    return EngineInfo(
        model=model.name,
        context_length=model.context_length,
        vocab_size=model.vocab_size,
        pool_tokens=model.pool_tokens,
        dtype=model.dtype,
        device=model.device,
        settings=settings,
        kernels=model.kernels,
        embedding_size=engine.embedding_size,
        memory=_taken(model.device, model.pool_tokens * model.kv_bytes_per_token),
    )


def _taken(device: str, pool: int) -> int:
    """Bytes that this process has taken or will take; the pool's memory counts whole, though it is touched only as it is used."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.memory_reserved())
    try:  # not the files that are mapped: the system takes those pages back when it wants to
        lines = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
        sizes = dict(line.split(":", 1) for line in lines if line.startswith(("RssAnon", "RssShmem")))
        return sum(int(size.split()[0]) * 1024 for size in sizes.values()) + pool if sizes else 0
    except (OSError, ValueError):  # another system
        return 0


def stats_of(engine: Engine, programs: Programs) -> dict[str, Any]:
    """``EngineStats`` as a mapping, and ``programs``: how many run. On the engine's thread."""
    return {**asdict(engine.stats()), "programs": programs.running}


def tree_of(engine: Engine, programs: Programs, most: int) -> dict[str, Any]:
    """``Engine.snapshot``, and ``stats``. On the engine's thread."""
    return {**engine.snapshot(most), "stats": stats_of(engine, programs)}


class LocalClient:
    """An ``AsyncEngine`` as an ``EngineClient``; ``start`` starts it and ``close`` closes it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._core: Engine | None = None
        self._programs: Programs | None = None
        self._info: EngineInfo | None = None
        self._closed = False
        self._asked: float | None = None  # when the engine's thread was asked for a sign of life that has not come yet

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineClosed("the engine was not started: `await start()`")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def healthy(self) -> bool:
        """The engine's thread runs, and took its calls within the last 30 seconds."""
        if self._info is None or self._closed:
            return False
        now, asked = time.monotonic(), self._asked
        if asked is not None:
            return now - asked < _PATIENCE
        self._asked = now
        try:
            self._engine.post(self._sign)
        except EngineClosed:
            return False
        return True

    def _sign(self, _: Engine) -> None:
        self._asked = None

    async def start(self) -> None:
        if self._info is not None:
            return
        await self._engine.start()
        from radixrt.engine.programs import Programs

        def begin(engine: Engine) -> tuple[Engine, Programs]:
            return engine, Programs(engine, self._engine.listen, self._engine.post)

        core, self._programs = await self._engine.call(begin)
        self._core, self._info = core, info_of(core)

    async def close(self) -> None:
        self._closed = True
        await self._engine.close()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        deltas: bool = True,
    ) -> AsyncGenerator[OutputDelta, None]:
        items = self._engine.stream(prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt)
        waits = True
        try:
            with self._told():
                async for delta in items:
                    if deltas or waits or delta.output is not None:
                        waits = False
                        yield delta
        finally:
            await items.aclose()

    async def score(
        self, prefix: Sequence[int], choices: Sequence[Sequence[int]], *, request_id: str, cache_salt: str = ""
    ) -> RequestOutput:
        core = self._begun(self._core)
        return await self._whole(lambda: core.prepare_score(prefix, choices), request_id, cache_salt)

    async def embed(
        self, prompt: Sequence[int], pooling: str, *, request_id: str, cache_salt: str = ""
    ) -> RequestOutput:
        core = self._begun(self._core)
        return await self._whole(lambda: core.prepare_embed(prompt, pooling), request_id, cache_salt)

    async def _whole(self, prepare: Callable[[], Ready], request_id: str, cache_salt: str) -> RequestOutput:
        """The output of a request that generates nothing."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[RequestOutput] = loop.create_future()
        begun: list[str] = []

        def settle(item: OutputDelta | BaseException) -> None:
            if done.done():
                return
            if isinstance(item, BaseException):
                done.set_exception(item)
            elif item.output is not None:
                done.set_result(item.output)

        def hear(item: OutputDelta | BaseException) -> None:
            loop.call_soon_threadsafe(settle, item)

        def begin(engine: Engine) -> None:
            begun.append(engine.submit(ready, request_id=request_id, cache_salt=cache_salt))
            self._engine.listen(request_id, hear)

        def drop(engine: Engine) -> None:
            if begun:
                self._engine.listen(request_id, None)
                engine.abort(request_id)

        with self._told():
            ready = await asyncio.to_thread(prepare)
            try:
                await self._engine.call(begin)
                return await done
            finally:
                if not done.done() or done.cancelled():
                    with suppress(EngineClosed):
                        self._engine.post(drop)

    async def abort(self, request_id: str) -> bool:
        return await self._asking(self._engine.abort(request_id))

    async def stats(self) -> dict[str, Any]:
        programs = self._begun(self._programs)
        return await self._asking(self._engine.call(lambda engine: stats_of(engine, programs)))

    async def tree(self, most: int) -> dict[str, Any]:
        programs = self._begun(self._programs)
        return await self._asking(self._engine.call(lambda engine: tree_of(engine, programs, most)))

    async def runs(self, known: Sequence[int]) -> dict[str, Any]:
        programs = self._begun(self._programs)
        return await self._asking(self._engine.call(lambda _: programs.runs(known)))

    async def flush_cache(self) -> int:
        return await self._asking(self._engine.call(lambda engine: engine.flush_cache()))

    def programs(self, peer: str, receive: Callable[[str], None]) -> LocalLink:
        link = LocalLink(self._engine, self._begun(self._programs), peer, receive)
        with self._told():
            link.open()
        return link

    @staticmethod
    def _begun(what: T | None) -> T:
        if what is None:
            raise EngineClosed("the engine was not started: `await start()`")
        return what

    async def _asking(self, call: Awaitable[T]) -> T:
        with self._told():
            return await call

    @contextmanager
    def _told(self) -> Iterator[None]:
        """An engine that stopped by itself died."""
        try:
            yield
        except EngineClosed as error:
            if self._closed or self._info is None:
                raise
            raise EngineDied(str(error)) from error


class LocalLink:
    """A channel of program messages to an engine in this process."""

    def __init__(self, engine: AsyncEngine, programs: Programs, peer: str, receive: Callable[[str], None]) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._channel = ProgramChannel(programs, self._tell, peer)
        self._name = f"channel-{uuid.uuid4().hex}"
        self._messages: deque[str] = deque()
        self._told = False
        self._closed = False

    def open(self) -> None:
        """Have the engine's thread tell when it stops."""
        self._engine.post(lambda _: self._engine.listen(self._name, self._stopped))

    def send(self, message: str) -> None:
        if self._closed:
            return
        try:
            self._engine.post(lambda _: self._channel.receive(message))
        except EngineClosed as error:
            raise EngineDied(str(error)) from error

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with suppress(EngineClosed):
                self._engine.post(self._end)

    # ---- on the engine's thread

    def _end(self, _: Engine) -> None:
        self._engine.listen(self._name, None)
        self._channel.close()

    def _stopped(self, item: OutputDelta | BaseException) -> None:
        self._tell(error_event(str(item)))

    def _tell(self, message: str) -> None:
        """One call of the loop takes over all that was told meanwhile."""
        self._messages.append(message)
        if not self._told:
            self._told = True
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._deliver)

    # ---- on the loop

    def _deliver(self) -> None:
        self._told = False
        while self._messages:
            message = self._messages.popleft()
            if not self._closed:
                self._receive(message)
