"""AsyncEngine serves an event loop: the engine lives in a thread of its own, and the loop never waits for a step.

Invariants: only the thread touches the engine; calls reach it through one queue and are answered through futures and
per-request queues on the caller's loop; a consumer that goes away aborts its request.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from radixrt.engine.core import Engine
from radixrt.engine.inputs import Prompt, params_for, split_prompts
from radixrt.engine.stats import EngineStats
from radixrt.errors import EngineClosed, InvalidRequest
from radixrt.model.runner import ModelInfo
from radixrt.model.tokenizer import Tokenizer
from radixrt.request import OutputDelta, RequestOutput, SamplingParams

log = logging.getLogger("radixrt")

_STALL = 0.0005  # seconds
T = TypeVar("T")
Listener = Callable[[OutputDelta | BaseException], None]


class AsyncEngine:
    """An ``Engine`` for asyncio. Use ``async with``, or ``await start()`` and ``await close()``.

    Args: those of ``Engine``, or ``engine=`` alone: an engine that nobody else uses.

    Raises:
        InvalidRequest: ``engine`` is given together with settings, or is no ``Engine``.
    """

    def __init__(
        self, model: str | None = None, *, engine: Engine | None = None, progress: bool = False, **settings: Any
    ) -> None:
        if engine is not None and (model is not None or progress or settings):
            raise InvalidRequest("engine", "is made already; give it or settings for a new one, not both")
        if engine is not None and not isinstance(engine, Engine):
            raise InvalidRequest("engine", f"must be an Engine, not {type(engine).__name__}")
        self._make = (lambda: engine) if engine is not None else (lambda: Engine(model, progress=progress, **settings))
        # a call without a future was posted; None: close
        self._calls: queue.SimpleQueue[tuple[Callable[[Engine], Any], Future[Any] | None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, Listener] = {}  # touched by the thread only
        self._ready: Future[Engine] | None = None
        self._thread: threading.Thread | None = None
        self._gate = threading.Lock()  # no call is queued after the last ones were answered
        self._failure: BaseException | None = None

    async def start(self) -> AsyncEngine:
        """Load the model; a second call waits for the same loading.

        Raises:
            ModelError, InvalidRequest: as ``Engine`` does, at every call.
        """
        if self._ready is None:
            self._ready = Future()
            self._ready.set_running_or_notify_cancel()
            self._thread = threading.Thread(target=self._serve, args=(self._ready,), name="radixrt-engine", daemon=True)
            self._thread.start()
            atexit.register(self._stop)  # a thread in the middle of a step would bring the ending process down
        await asyncio.shield(asyncio.wrap_future(self._ready))
        return self

    async def close(self) -> None:
        """Abort what runs and end the thread; waiting callers get EngineClosed."""
        await asyncio.to_thread(self._stop)
        atexit.unregister(self._stop)

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
        each = params_for(items, params)
        most = max((one.n for one in each if isinstance(one, SamplingParams)), default=1)
        places = asyncio.Semaphore(max(1, self._started().config.max_waiting_requests // most))

        async def answer(index: int) -> RequestOutput:
            output = None
            async with places:
                try:
                    async for delta in self.stream(items[index], each[index]):
                        output = delta.output
                except InvalidRequest as error:
                    if len(items) == 1:
                        raise
                    raise InvalidRequest(f"prompts[{index}]", str(error)) from error
            assert output is not None
            return output

        tasks = [asyncio.ensure_future(answer(index)) for index in range(len(items))]
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
    ) -> AsyncGenerator[OutputDelta, None]:
        """Answer one prompt piece by piece; the last delta carries the whole output.

        Closing or cancelling the iterator aborts the request. See ``Engine.add`` for the arguments and errors.
        """
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[OutputDelta | BaseException] = asyncio.Queue()

        def listen(item: OutputDelta | BaseException) -> None:
            loop.call_soon_threadsafe(deltas.put_nowait, item)

        # compiling, tokenizing and checking stay off the thread that runs the steps; a slow compilation holds up nobody else
        if isinstance(params, SamplingParams) and params.constraint is not None:
            await asyncio.wrap_future(self._started().compile(params.constraint))
        ready = await asyncio.to_thread(self._started().prepare, prompt, params)

        def begin(engine: Engine) -> str:
            name = engine.submit(ready, request_id=request_id, priority=priority, cache_salt=cache_salt)
            self.listen(name, listen)
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

    # ---- on the engine's thread

    def post(self, function: Callable[[Engine], object]) -> None:
        """Run ``function(engine)`` between two steps, on the engine's thread, without waiting for it; from any thread.

        What it raises is logged. Where the engine stops before its turn it still runs, on the closed engine, whose methods
        raise ``EngineClosed``.

        Raises:
            EngineClosed: the engine is not running.
        """
        self._started()
        with self._gate:
            if self._failure is not None:
                raise EngineClosed(str(self._failure)) from self._failure
            self._calls.put((function, None))

    def listen(self, request_id: str, listener: Listener | None) -> None:
        """Hand each delta of a request to ``listener``, or the exception when the engine stops before its end; ``None``: nobody
        listens any more. On the engine's thread only, before the step that follows the request's submission. A listener that
        raises is not called again, and its request is aborted."""
        if listener is None:
            self._listeners.pop(request_id, None)
        elif self._failure is not None:
            self._tell(listener, self._failure)
        else:
            self._listeners[request_id] = listener

    # ---- inside

    def _stop(self) -> None:
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()

    def _started(self) -> Engine:
        if self._ready is None or not self._ready.done():
            raise EngineClosed("the engine was not started: use `async with` or `await start()`")
        return self._ready.result()

    def _submit(self, function: Callable[[Engine], Any]) -> Future[Any]:
        self._started()
        future: Future[Any] = Future()
        with self._gate:
            if self._failure is not None:
                raise EngineClosed(str(self._failure)) from self._failure
            self._calls.put((function, future))
        return future

    def _abandon(self, started: Future[Any]) -> None:
        """Nobody reads this request any more: abort it, also where it has not begun yet."""

        def drop(engine: Engine) -> None:
            if not started.cancelled() and started.exception() is None:
                self._listeners.pop(started.result(), None)
                engine.abort(started.result())

        if not started.cancel():
            with self._gate:
                if self._failure is None:
                    self._calls.put((drop, Future()))

    def _serve(self, ready: Future[Engine]) -> None:
        try:
            engine = self._make()
        except BaseException as error:
            self._failure = error
            ready.set_exception(error)
            return
        gc.collect()
        gc.freeze()  # what is loaded stays: no later collection looks through it, which would hold up steps and compilations
        ready.set_result(engine)
        reason = EngineClosed("the engine is closed")
        try:
            while self._take_calls(engine) and not engine.closed:
                for delta in engine.step() if engine.has_work else ():
                    self._hand_out(engine, delta)
                if engine.stalled and self._calls.empty():
                    time.sleep(_STALL)  # the threads that programs think in have the processor meanwhile
        except BaseException as error:
            reason = EngineClosed(f"the engine has stopped: {error!r}")
            reason.__cause__ = error
        with self._gate:
            self._failure = reason
        listeners, self._listeners = list(self._listeners.values()), {}
        for listener in listeners:
            self._tell(listener, reason)
        engine.close()
        while not self._calls.empty():
            call = self._calls.get()
            if call is None:
                continue
            function, future = call
            if future is None:
                self._run_posted(function, engine)
            elif future.set_running_or_notify_cancel():
                future.set_exception(reason)

    def _take_calls(self, engine: Engine) -> bool:
        """Run the calls that wait, or wait for one where there is nothing else to do; False: close."""
        while not engine.closed and (not engine.has_work or not self._calls.empty()):
            call = self._calls.get()
            if call is None:
                return False
            function, future = call
            if future is None:
                self._run_posted(function, engine)
                continue
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(engine)
            except Exception as error:
                # a future cannot carry StopIteration, and a cancelled one would look like its caller's own cancelling
                future.set_exception(error if not isinstance(error, StopIteration) else _wrapped(error))
            except BaseException as error:
                future.set_exception(_wrapped(error))
            else:
                future.set_result(result)
        return True

    def _hand_out(self, engine: Engine, delta: OutputDelta) -> None:
        listener = self._listeners.get(delta.request_id)
        if delta.output is not None:
            self._listeners.pop(delta.request_id, None)
        if listener is not None and not self._tell(listener, delta):
            self._listeners.pop(delta.request_id, None)
            engine.abort(delta.request_id)

    @staticmethod
    def _run_posted(function: Callable[[Engine], object], engine: Engine) -> None:
        try:
            function(engine)
        except EngineClosed:
            log.debug("a posted call found the engine closed", exc_info=True)
        except BaseException:
            log.exception("a posted call failed")

    @staticmethod
    def _tell(listener: Listener, item: OutputDelta | BaseException) -> bool:
        """False: it raised. Where the consumer's event loop is closed, nobody is there to be told, and that is no fault."""
        try:
            listener(item)
        except Exception as error:
            if not (isinstance(error, RuntimeError) and "loop is closed" in str(error)):
                log.exception("a listener failed")
            return False
        return True


def _wrapped(error: BaseException) -> RuntimeError:
    wrapped = RuntimeError(f"the call raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
