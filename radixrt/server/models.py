"""Models: which of several models are in memory: each is loaded when a request names it, and unloaded when another needs its room.

Invariants: a model is unloaded only while nobody uses it; what is loaded, being loaded or being unloaded stays within the limits, as far as sizes are
known; whoever waits for a model gets it, or the reason why not within ``wait`` seconds; those that wait together load it once.

    out -- acquire --> waits for room -- loads --> in <--> used (leases)
     ^                                             |
     +------------------ unloads ------------------+   the least recently used first, while nobody uses it
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from radixrt.engine.inputs import Prompt
from radixrt.engine.stats import EngineStats
from radixrt.errors import EngineClosed, InvalidRequest, RadixrtError, shown
from radixrt.request import OutputDelta, RequestOutput, SamplingParams
from radixrt.server.client import EngineClient, EngineDied, EngineInfo, ProgramLink
from radixrt.server.errors import Failure, RequestFailed

if TYPE_CHECKING:
    from radixrt.model.tokenizer import Tokenizer

log = logging.getLogger("radixrt.server")

_PATIENCE = 5.0  # seconds that a request waits for room before those who hold it take no new requests
_SILENT = 0.2  # seconds that a socket has said nothing and does nothing, before it is asked to go
_Seen = TypeVar("_Seen")
_NONE: dict[str, Any] = {field.name: 0 for field in fields(EngineStats)} | {"programs": 0}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a model before it is loaded.

    Fields:
        need: bytes that it takes. make: an engine that was not started. read: its tokenizer, which takes a moment. path: of its files.
    """

    info: EngineInfo
    need: int
    make: Callable[[], EngineClient]
    read: Callable[[], Tokenizer]


class Resident:
    """One model, loaded or not, as an ``EngineClient``. What is asked of a model that is not loaded raises ``EngineClosed``, but for its figures.

    Args:
        keep: seconds that it stays when nobody uses it any more, where no request says otherwise; infinity: until its room is needed.

    Fields:
        leases: who uses it; sockets: those of them that may be asked to let it go. waiting: who waits for it. held: bytes that it takes now.
        need: bytes that it takes when it is loaded, as foretold or as measured. used: a count that grows with each use.
        rest: asks the sockets to go that do nothing and have said nothing for so many seconds, and the others as soon as they do nothing.
    """

    def __init__(self, name: str, plan: Plan, keep: float) -> None:
        self.name, self.plan = name, plan
        self.keep = self.default_keep = keep
        self.leases = self.sockets = self.waiting = self.held = self.used = 0
        self.loads = self.unloads = self.failures = 0
        self.need = plan.need
        self.rest: Callable[[float, bool], None] = lambda silent, soon: None
        self.engine: EngineClient | None = None
        self.closing = False  # it takes no new users: another waits for its room, or it is being unloaded
        self.loading: asyncio.Task[Failure | None] | None = None
        self.begun = False  # the load has its room
        self.leaving: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.expires = math.inf  # on the loop's clock
        self._info = plan.info
        self._tokenizer: Tokenizer | None = None
        self._reading = asyncio.Lock()

    # ---- as an engine

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise EngineClosed(f"the model {self.name} was not loaded yet")
        return self._tokenizer

    @property
    def healthy(self) -> bool:
        return self.engine is not None and self.engine.healthy

    @property
    def loaded(self) -> bool:
        return self.engine is not None

    @property
    def open(self) -> bool:
        """It can be used now."""
        return self.engine is not None and not self.closing

    def learn(self, engine: EngineClient) -> None:
        """It is loaded."""
        self._info, self._tokenizer, self.engine = engine.info, engine.tokenizer, engine
        self.need = engine.info.memory or self.need

    async def read(self) -> None:
        """Have the tokenizer, without the model.

        Raises:
            RequestFailed: it cannot be read.
        """
        async with self._reading:
            if self._tokenizer is None:
                try:
                    found = await asyncio.to_thread(self.plan.read)
                except (RadixrtError, OSError) as error:
                    raise RequestFailed(self.failed(error)) from None
                self._tokenizer = self._tokenizer or found

    def failed(self, error: Exception) -> Failure:
        """Why it is not there, for who asked for it."""
        known = isinstance(error, (RadixrtError, OSError))
        log.error("the model %s could not be loaded: %s", self.name, error, exc_info=not known)
        reason = str(error) if known else "internal error"
        status = 503 if isinstance(error, (EngineDied, EngineClosed)) else 500
        return Failure(status, f"model={shown(self.name)}: cannot be loaded: {reason}", "model", "model_not_loaded")

    async def start(self) -> None: ...

    async def close(self) -> None: ...

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
        source = self._engine().stream(
            prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt, deltas=deltas
        )
        async with aclosing(source):
            async for delta in source:
                yield delta

    async def score(
        self, prefix: Sequence[int], choices: Sequence[Sequence[int]], *, request_id: str, cache_salt: str = ""
    ) -> RequestOutput:
        return await self._engine().score(prefix, choices, request_id=request_id, cache_salt=cache_salt)

    async def embed(
        self, prompt: Sequence[int], pooling: str, *, request_id: str, cache_salt: str = ""
    ) -> RequestOutput:
        return await self._engine().embed(prompt, pooling, request_id=request_id, cache_salt=cache_salt)

    async def abort(self, request_id: str) -> bool:
        return self.engine is not None and await self.engine.abort(request_id)

    async def stats(self) -> dict[str, Any]:
        return await self._look(lambda engine: engine.stats(), _NONE | {"pool_tokens": self._info.pool_tokens})

    async def tree(self, most: int) -> dict[str, Any]:
        stats = _NONE | {"pool_tokens": self._info.pool_tokens}
        nothing = {"nodes": [], "requests": [], "protected": 0, "stats": stats, "loaded": False}
        return await self._look(lambda engine: engine.tree(most), nothing)

    async def runs(self, known: Sequence[int]) -> dict[str, Any]:
        return await self._look(lambda engine: engine.runs(known), {"runs": [], "numbers": []})

    async def flush_cache(self) -> int:
        return await self._look(lambda engine: engine.flush_cache(), 0)

    async def _look(self, ask: Callable[[EngineClient], Awaitable[_Seen]], nothing: _Seen) -> _Seen:
        """What the engine says; ``nothing`` where the model is not loaded, or is unloaded meanwhile."""
        engine = self.engine
        if engine is None:
            return nothing
        try:
            return await ask(engine)
        except EngineClosed:
            if self.engine is engine and self.leaving is None:
                raise
            return nothing

    def programs(self, peer: str, receive: Callable[[str], None]) -> ProgramLink:
        return self._engine().programs(peer, receive)

    def _engine(self) -> EngineClient:
        if self.engine is None:
            raise EngineClosed(f"the model {self.name} is not loaded")
        return self.engine


class Models:
    """Several models within a limit of memory.

    Args:
        residents: the first is the default. limit: bytes for all of them. most: how many may be loaded at once.
        wait: seconds that a request waits for its model.
        preload: what ``start`` loads; nothing: the first. patience: seconds that a request waits for room before those who hold it take no new ones.

    Raises:
        InvalidRequest: a model that does not fit alone, or ``preload`` together.
    """

    def __init__(
        self,
        residents: Sequence[Resident],
        *,
        limit: int,
        most: int | None = None,
        wait: float = 300.0,
        preload: Sequence[str] = (),
        patience: float = _PATIENCE,
    ) -> None:
        self.residents = {one.name: one for one in residents}
        self.limit, self.most, self.wait, self._patience = limit, most or len(residents), wait, patience
        self.default = residents[0]
        self._preload = [self.residents[name] for name in dict.fromkeys(preload)] or [self.default]
        self._turn = asyncio.Lock()  # loads take their room in the order in which they were asked for
        self._changed = asyncio.Event()
        self._clock = 0
        self._closed = False
        for one in residents:
            if one.need > limit:
                raise InvalidRequest("models_memory", f"={gigabytes(limit)}: the model {one.name} alone takes {gigabytes(one.need)}")  # fmt: skip
        if len(self._preload) > self.most:
            raise InvalidRequest("preload", f" names {len(self._preload)} models: max_loaded_models={self.most}")
        if (together := sum(one.need for one in self._preload)) > limit:
            raise InvalidRequest("preload", f": these models take {gigabytes(together)} together, models_memory={gigabytes(limit)}")  # fmt: skip

    # ---- their life

    async def start(self) -> None:
        """Load what is to be there from the start; raises what loading raises."""
        for one in self._preload:
            one.held = one.need
            await self._fill(one)

    async def close(self) -> None:
        self._closed = True
        for one in self.residents.values():
            if one.timer is not None:
                one.timer.cancel()
            if one.loading is not None:
                one.loading.cancel()
        self._tell()
        tasks = [task for one in self.residents.values() for task in (one.loading, one.leaving) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(one.engine.close() for one in self.residents.values() if one.engine is not None))
        for one in self.residents.values():
            one.engine = None

    @property
    def held(self) -> int:
        """Bytes that all of them take now."""
        return sum(one.held for one in self.residents.values())

    # ---- use

    @asynccontextmanager
    async def using(self, one: Resident, *, keep: float | None = None, socket: bool = False) -> AsyncIterator[None]:
        """Have a model loaded, and keep it so meanwhile.

        Args:
            keep: seconds that it stays afterwards, where nobody uses it; nothing: as the server was told.
            socket: the user may be told to go, by ``rest``.

        Raises:
            RequestFailed: it cannot be loaded, or not in time.
        """
        await self._acquire(one)
        try:
            one.sockets += socket
            one.keep = one.default_keep if keep is None else keep
            if socket:
                self._arm(one)
            yield
        finally:
            one.leases -= 1
            one.sockets -= socket
            self._released(one)

    async def _acquire(self, one: Resident) -> None:
        if one.open and not one.healthy and not one.leases:  # its process ended, and may stay down
            self._unload(one)
        if not one.open:
            with self._waiting(one):
                try:
                    async with asyncio.timeout(self.wait):
                        await self._until_open(one)
                except TimeoutError:
                    raise RequestFailed(self._late(one)) from None
            self._tell()
        one.leases += 1
        self._used(one)

    async def _until_open(self, one: Resident) -> None:
        while not one.open:
            if self._closed:
                raise EngineClosed("the server is shutting down")
            if one.engine is not None:
                await self._change()
                continue
            if one.loading is None:
                one.begun = False
                one.loading = asyncio.create_task(self._load(one))
            loading = one.loading
            await asyncio.wait([loading])
            failure = None if loading.cancelled() else loading.result()
            if failure is not None:
                raise RequestFailed(failure)

    @contextmanager
    def _waiting(self, one: Resident) -> Iterator[None]:
        one.waiting += 1
        try:
            yield
        finally:
            one.waiting -= 1
            if not one.waiting and one.loading is not None and not one.begun:  # nobody wants it any more
                one.loading.cancel()
                one.loading = None

    def _used(self, one: Resident) -> None:
        self._clock += 1
        one.used = self._clock
        one.expires = math.inf
        if one.timer is not None:
            one.timer.cancel()
            one.timer = None

    def _released(self, one: Resident) -> None:
        self._used(one)
        self._tell()
        self._arm(one)

    def _arm(self, one: Resident) -> None:
        """Have a model unloaded when nobody has used it for long enough."""
        if one.leases == one.sockets and one.keep < math.inf and one.engine is not None and not self._closed:
            loop = asyncio.get_running_loop()
            one.expires = loop.time() + (max(one.keep, _SILENT) if one.sockets else one.keep)
            one.timer = loop.call_at(one.expires, self._expired, one)

    def _expired(self, one: Resident) -> None:
        one.timer = None
        if one.sockets and one.leases == one.sockets:
            one.rest(max(one.keep, _SILENT), False)  # and the last that goes comes here again
            self._arm(one)
        if self._unused(one) and one.open:
            self._unload(one)

    # ---- loading

    async def _load(self, one: Resident) -> Failure | None:
        """Load a model; the reason where that fails."""
        try:
            async with self._turn:
                await self._room(one)
                one.begun, one.held = True, one.need
            await self._fill(one)
            return None
        except Exception as error:
            one.failures += 1
            return one.failed(error)
        finally:
            if one.loading is asyncio.current_task():
                one.loading = None
            self._tell()

    async def _fill(self, one: Resident) -> None:
        """Start the engine of a model whose room is taken; raises what that raises."""
        engine = one.plan.make()
        try:
            await engine.start()
        except BaseException:
            try:
                with suppress(Exception):
                    await engine.close()
            finally:
                one.held = 0
            raise
        one.closing = False
        one.learn(engine)
        one.held = one.need
        one.loads += 1
        self._released(one)
        if self.held > self.limit:  # it takes more than was foretold
            log.warning("the models in memory take %s, models_memory=%s", gigabytes(self.held), gigabytes(self.limit))
            while self.held > self.limit and (other := self._victim(one)) is not None:
                await self._unloaded(other)

    # ---- room

    async def _room(self, one: Resident) -> None:
        """Wait until a model fits, and unload for it those that nobody uses, the least recently used first."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        asked: list[Resident] = []
        try:
            while not self._fits(one):
                victim = self._victim(one)
                if victim is not None:
                    await self._unloaded(victim)
                    continue
                others = sorted((o for o in self.residents.values() if o is not one and o.engine is not None), key=lambda o: o.used)  # fmt: skip
                left = until - loop.time()
                if left <= 0:  # else those who use them without a pause would keep it out for ever
                    asked += self._ask(one, others)
                for other in others:
                    if other.sockets:
                        other.rest(_SILENT, other.closing)
                pause = _SILENT if any(other.sockets for other in others) else left if left > 0 else None
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._change()
        finally:
            for other in asked:
                if other.leaving is None:
                    other.closing = False
            self._tell()

    def _ask(self, one: Resident, others: Sequence[Resident]) -> list[Resident]:
        """Have as many models take no new users as are in the way of one."""
        asked = []
        closing = [o for o in others if o.closing]
        for other in others:
            room = sum(o.held for o in closing)
            count = self._count() - len(closing)
            if self.held - room + one.need <= self.limit and count + 1 <= self.most:
                break
            if not other.closing and not other.waiting:  # those that have just got it come first
                other.closing = True
                closing.append(other)
                asked.append(other)
        return asked

    def _fits(self, one: Resident) -> bool:
        """A model that is larger than all there is was refused at the start; one that grew is alone."""
        others = self._count()
        return others + 1 <= self.most and (self.held + one.need <= self.limit or not others)

    def _count(self) -> int:
        return sum(one.held > 0 or one.engine is not None for one in self.residents.values())

    def _victim(self, one: Resident) -> Resident | None:
        """The model that was not used for the longest time, of those that nobody uses."""
        found = [other for other in self.residents.values() if other is not one and self._unused(other)]
        return min(found, key=lambda other: other.used, default=None)

    @staticmethod
    def _unused(one: Resident) -> bool:
        return one.engine is not None and not one.leases and (one.closing or not one.waiting)

    async def _unloaded(self, one: Resident) -> None:
        self._unload(one)
        assert one.leaving is not None
        await asyncio.shield(one.leaving)

    def _unload(self, one: Resident) -> None:
        if one.leaving is None:
            one.closing = True
            one.leaving = asyncio.create_task(self._end(one))

    async def _end(self, one: Resident) -> None:
        engine = one.engine
        if one.timer is not None:
            one.timer.cancel()
            one.timer = None
        try:
            if engine is not None:
                await engine.close()
        except Exception:
            log.exception("the model %s did not close as it should", one.name)
        finally:
            one.engine, one.leaving, one.closing = None, None, False
            one.held, one.expires = 0, math.inf
            one.unloads += 1
            self._tell()

    # ---- waiting

    async def _change(self) -> None:
        await self._changed.wait()

    def _tell(self) -> None:
        """Have everyone who waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _late(self, one: Resident) -> Failure:
        if one.loading is None or not one.begun:
            others = [other for other in self.residents.values() if other is not one and other.held]
            users = ", ".join(f"{o.name} ({gigabytes(o.held)}, {o.leases} requests)" for o in others)
            what = f"there was no room for its {gigabytes(one.need)}; in the way: {users or 'nothing any more'}"
        else:
            what = "it is still being loaded"
        return Failure(503, f"model={shown(one.name)}: after model_timeout={self.wait:g} seconds {what}", "model", "model_busy")  # fmt: skip


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
