"""AsyncEngine serves an event loop: the engine lives in a thread of its own, and the loop never waits for a step.

Invariants: only the thread touches the engine; calls reach it through one queue and are answered through futures and
per-request queues on the caller's loop; a consumer that goes away aborts its request.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from radixrt.engine.core import Engine, Prompt, _params_for
from radixrt.engine.inputs import split_prompts
from radixrt.engine.stats import EngineStats
from radixrt.errors import EngineClosed
from radixrt.model.runner import ModelInfo
from radixrt.model.tokenizer import Tokenizer
from radixrt.request import OutputDelta, RequestOutput, SamplingParams

T = TypeVar("T")
Listener = Callable[[OutputDelta | BaseException], None]


class AsyncEngine:
    """An ``Engine`` for asyncio. Use ``async with``, or ``await start()`` and ``await close()``.

    Args: those of ``Engine``, or ``engine=`` an engine that nobody else uses.
    """

    def __init__(
        self, model: str | None = None, *, engine: Engine | None = None, progress: bool = False, **settings: Any
    ) -> None:
        self._make = (lambda: engine) if engine is not None else (lambda: Engine(model, progress=progress, **settings))
        self._calls: queue.SimpleQueue[tuple[Callable[[Engine], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._listeners: dict[str, Listener] = {}  # touched by the thread only
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    async def start(self) -> AsyncEngine:
        """Load the model. A second call does nothing.

        Raises:
            ModelError, InvalidRequest: as ``Engine`` does.
        """
        if self._thread is None:
            ready: Future[Engine] = Future()
            self._thread = threading.Thread(target=self._serve, args=(ready,), name="radixrt-engine", daemon=True)
            self._thread.start()
            self._engine = await asyncio.wrap_future(ready)
        return self

    async def close(self) -> None:
        """Abort what runs and end the thread; waiting callers get EngineClosed."""
        if self._thread is not None and self._failure is None:
            self._calls.put(None)
            await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._started().tokenizer

    @property
    def model_info(self) -> ModelInfo:
        return self._started().model_info

    async def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer one prompt or many, in order; see ``Engine.generate``. Cancelling aborts all of them."""
        items = split_prompts(prompts)
        each = _params_for(items, params)
        tasks = [asyncio.ensure_future(self._answer(item, one)) for item, one in zip(items, each, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:  # the first error, or being cancelled, ends the others too
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[OutputDelta]:
        """Answer one prompt piece by piece; the last delta carries the whole output.

        Closing or cancelling the iterator aborts the request. See ``Engine.add`` for the arguments and errors.
        """
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[OutputDelta | BaseException] = asyncio.Queue()

        def listen(item: OutputDelta | BaseException) -> None:
            loop.call_soon_threadsafe(deltas.put_nowait, item)

        def begin(engine: Engine) -> str:
            name = engine.add(prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt)
            self._listeners[name] = listen
            return name

        started = self._submit(begin)
        done = False
        try:
            await asyncio.wrap_future(started)
            while not done:
                item = await deltas.get()
                if isinstance(item, BaseException):
                    done = True
                    raise item
                done = item.output is not None
                yield item
        finally:
            if not done:
                self._abandon(started)

    async def abort(self, request_id: str) -> bool:
        """End a request; its stream gets its last delta. False: no such request."""
        return await asyncio.wrap_future(self._submit(lambda engine: engine.abort(request_id)))

    async def stats(self) -> EngineStats:
        return await asyncio.wrap_future(self._submit(lambda engine: engine.stats()))

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run ``function(engine)`` between two steps, on the engine's thread."""
        return await asyncio.wrap_future(self._submit(function))

    # ---- inside

    async def _answer(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        output = None
        async for delta in self.stream(prompt, params):
            output = delta.output
        assert output is not None
        return output

    def _started(self) -> Engine:
        if self._engine is None:
            raise EngineClosed("the engine was not started: use `async with` or `await start()`")
        return self._engine

    def _submit(self, function: Callable[[Engine], Any]) -> Future[Any]:
        self._started()
        if self._failure is not None:
            raise EngineClosed(f"the engine has stopped: {self._failure}") from self._failure
        future: Future[Any] = Future()
        self._calls.put((function, future))
        return future

    def _abandon(self, started: Future[Any]) -> None:
        """Nobody reads this request any more: abort it, also where it has not begun yet."""

        def drop(engine: Engine) -> None:
            if not started.cancelled() and started.exception() is None:
                self._listeners.pop(started.result(), None)
                engine.abort(started.result())

        if not started.cancel() and self._failure is None:
            self._calls.put((drop, Future()))

    def _serve(self, ready: Future[Engine]) -> None:
        try:
            engine = self._make()
        except BaseException as error:
            self._failure = error
            ready.set_exception(error)
            return
        ready.set_result(engine)
        reason: BaseException = EngineClosed("the engine is closed")
        try:
            while self._take_calls(engine):
                for delta in engine.step() if engine.has_work else ():
                    listener = self._listeners.get(delta.request_id)
                    if delta.output is not None:
                        self._listeners.pop(delta.request_id, None)
                    if listener is not None:
                        self._tell(listener, delta)
        except BaseException as error:
            reason = EngineClosed(f"the engine has stopped: {error!r}")
            reason.__cause__ = error
        self._failure = reason
        for listener in self._listeners.values():
            self._tell(listener, reason)
        self._listeners.clear()
        while not self._calls.empty():
            call = self._calls.get()
            if call is not None and call[1].set_running_or_notify_cancel():
                call[1].set_exception(reason)
        engine.close()

    def _take_calls(self, engine: Engine) -> bool:
        """Run the calls that wait, or wait for one where there is nothing else to do; False: close."""
        while not engine.has_work or not self._calls.empty():
            call = self._calls.get()
            if call is None:
                return False
            function, future = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(engine)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        return True

    @staticmethod
    def _tell(listener: Listener, item: OutputDelta | BaseException) -> None:
        try:
            listener(item)
        except RuntimeError:  # the consumer's event loop is closed: nobody is there to be told
            pass
