"""Runtime: an engine in this process as a backend of programs.

Invariants: the engine's thread runs the programs' nodes; what they tell crosses to the programs' loop in batches, in order.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from lang.backends.base import Capabilities, Emit, ProgramInfo
from lang.errors import BackendError
from lang.loop import LOOP
from radixrt import AsyncEngine, EngineClosed, RequestOutput, SamplingParams
from radixrt.engine.core import Engine as CoreEngine
from radixrt.engine.nodes import Event, Failed, Node
from radixrt.engine.programs import Programs


class Runtime:
    """An engine in this process.

    Args:
        model_path: directory, ``.gguf`` file or hub id; ``None``: the embedded default model.
        progress: show loading on the terminal.
        settings: every other field of ``EngineConfig``.

    The model is loaded when the first program starts, or by ``load``.
    """

    name = "runtime"
    capabilities = Capabilities()

    def __init__(
        self, model_path: str | None = None, *, model: str | None = None, progress: bool = False, **settings: Any
    ) -> None:
        if model_path is not None and model is not None:
            raise BackendError("model_path and model are the same: give one")
        self._engine = AsyncEngine(model_path or model, progress=progress, **settings)
        self._programs: Programs | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: deque[tuple[Emit, Event]] = deque()
        self._told = False
        self._pid: int | None = None  # of the process where it started
        self._starting: asyncio.Lock | None = None

    # ---- what a backend does

    async def start(self) -> None:
        if self._programs is not None and self._loop is asyncio.get_running_loop():
            return
        if self._pid not in (None, os.getpid()):
            raise BackendError(
                "the runtime was started in the process that this one was forked from, and its engine runs there: "
                "start it behind the fork, or start processes with the method 'spawn'"
            )
        self._pid = os.getpid()
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._programs is not None:
                return
            self._loop = asyncio.get_running_loop()
            await self._engine.start()
            self._programs = await self._engine.call(
                lambda engine: Programs(engine, self._engine.listen, self._engine.post)
            )

    async def aclose(self) -> None:
        await self._engine.close()

    def open(self, info: ProgramInfo, emit: Emit) -> RuntimeSession:
        if self._programs is None:
            raise BackendError("the runtime was not started")
        return RuntimeSession(self, info, emit)

    async def stats(self) -> dict[str, Any]:
        """The engine's ``EngineStats`` as a mapping, and ``tokenized``: tokens that programs' texts were turned into."""
        await self.start()

        def read(engine: CoreEngine) -> dict[str, Any]:
            assert self._programs is not None
            return {**asdict(engine.stats()), "tokenized": self._programs.tokenized, "programs": self._programs.running}

        return await self._engine.call(read)

    # ---- for people

    def load(self) -> Runtime:
        """Load the model now."""
        LOOP.call(self.start)
        return self

    def shutdown(self) -> None:
        """Give the model up; running programs fail."""
        if self._programs is not None:
            LOOP.call(self.aclose)

    def __enter__(self) -> Runtime:
        return self.load()

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def generate(
        self, prompt: Any, sampling_params: SamplingParams | dict[str, Any] | None = None
    ) -> RequestOutput | list[RequestOutput]:
        """Answer a prompt without a program (text, token ids, messages), or a list of them; see ``radixrt.Engine.generate``."""
        if isinstance(sampling_params, dict):
            values = dict(sampling_params)
            if "max_new_tokens" in values:
                values["max_tokens"] = values.pop("max_new_tokens")
            sampling_params = SamplingParams.from_dict(values)

        async def answer() -> list[RequestOutput]:
            await self.start()
            return await self._engine.generate(prompt, sampling_params)

        outputs = LOOP.call(answer)
        return outputs if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else outputs[0]

    def get_server_info(self) -> dict[str, Any]:
        """The figures of ``stats``."""
        return LOOP.call(self.stats)

    def flush_cache(self) -> int:
        """Forget all KV that nothing running holds; returns how many tokens."""

        async def flush() -> int:
            await self.start()
            return await self._engine.call(lambda engine: engine.flush_cache())

        return LOOP.call(flush)

    @property
    def tokenizer(self) -> Any:
        self.load()
        return self._engine.tokenizer

    @property
    def engine(self) -> AsyncEngine:
        return self._engine

    # ---- between the threads

    def _post(self, function: Callable[[Programs], None]) -> None:
        programs = self._programs
        assert programs is not None
        self._engine.post(lambda _: function(programs))

    def _emit(self, emit: Emit, event: Event) -> None:
        """From the engine's thread: one call of the loop takes over all that was told meanwhile."""
        self._events.append((emit, event))
        if not self._told:
            self._told = True
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody listens
                self._events.clear()

    def _deliver(self) -> None:
        self._told = False
        while self._events:
            emit, event = self._events.popleft()
            emit(event)


class RuntimeSession:
    """A program on the engine's thread."""

    def __init__(self, runtime: Runtime, info: ProgramInfo, emit: Emit) -> None:
        self._runtime = runtime
        self._id = info.id
        self._emit = emit
        self._closed = False

        def tell(event: Event) -> None:
            runtime._emit(self._hear, event)

        self._post(
            lambda programs: programs.open(
                info.id, tell, name=info.name, order=info.order, cache_salt=info.cache_salt, stream=info.stream
            )
        )

    def add(self, nodes: Sequence[Node]) -> None:
        taken = tuple(nodes)

        def add(programs: Programs) -> None:
            try:
                programs.add(self._id, taken)
            except Exception as error:
                for node in taken:
                    self._runtime._emit(self._hear, Failed(node.id, "invalid", str(error)))

        self._post(add)

    def cancel(self, nodes: Sequence[int]) -> None:
        self._post(lambda programs: programs.cancel(self._id, nodes))

    def drop(self, nodes: Sequence[int]) -> None:
        self._post(lambda programs: programs.drop(self._id, nodes))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                self._post(lambda programs: programs.close(self._id))
            except EngineClosed:
                pass

    def _post(self, function: Callable[[Programs], None]) -> None:
        try:
            self._runtime._post(function)
        except EngineClosed as error:
            if not self._closed:
                raise BackendError(f"the runtime has stopped: {error}") from error

    def _hear(self, event: Event) -> None:
        if not self._closed:
            self._emit(event)
