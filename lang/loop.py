"""The event loop on which programs run: one thread for all of them, whatever their number.

A program's body runs in a greenlet on that thread. Where it needs a value that is not there yet it hands the future to the task that drives it
and goes on when that is done, so an ordinary function waits without a thread of its own, and without being written as a coroutine.

Invariants: nothing starts before the first program; bodies, states and sessions are touched on this thread only; a thread that is not
the loop's waits for it through ``call``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import greenlet

from lang.errors import UsageError, author_line

T = TypeVar("T")


def body_state() -> Any:
    """The state that the running body continues; ``None`` outside of one."""
    return getattr(greenlet.getcurrent(), "state", None)


class ProgramLoop:
    """An event loop in a thread, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    def get(self) -> asyncio.AbstractEventLoop:
        """The running loop."""
        with self._lock:
            if self._loop is None or self._pid != os.getpid():  # a forked process has no thread
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name="lang-programs", daemon=True)
                self._thread.start()
            return self._loop

    @property
    def inside(self) -> bool:
        """Whether this is the loop's own thread."""
        return self._thread is not None and self._thread is threading.current_thread()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop; from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self.get())

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop and wait for it: from another thread, or from a program's body.

        An interrupt of the waiting thread cancels the work.
        """
        if self.inside:
            return wait(asyncio.ensure_future(make()))
        future = self.start(make())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def acall(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop and await it, from any event loop. Cancelling the wait cancels the work."""
        if self.inside and asyncio.get_running_loop() is self._loop:
            return await make()
        return await asyncio.wrap_future(self.start(make()))


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop for good. What ends a process where it is raised (``SystemExit`` and the like) belongs to the program that raised it: its
    task has it, asyncio raises it out of the loop besides, and the other programs go on."""
    while True:
        try:
            loop.run_forever()
            return
        except (KeyboardInterrupt, SystemExit):
            continue


LOOP = ProgramLoop()


def wait(future: asyncio.Future[T]) -> T:
    """Wait for a future inside of a program's body.

    Raises:
        UsageError: this is no program's body, so waiting would stop the loop.
    """
    current = greenlet.getcurrent()
    if current.parent is None or not getattr(current, "is_body", False):
        future.cancel()
        raise UsageError(
            "a value is waited for outside of a program's body, in a task or a callback of its event loop: use `await s.get(name)` there",
            author_line(),
        )
    return current.parent.switch(future)


def called(function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    """Call a function in a thread: what it raises must be something that a future can carry."""
    try:
        return function(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError(f"{getattr(function, '__name__', function)} raised StopIteration") from error


class _Body(greenlet.greenlet):
    is_body = True
    state: Any = None  # that its function continues


async def run_body(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a program's body, an ordinary or an ``async`` function; raises what it raises."""
    body = _Body(_steps)
    body.state = args[0] if args else None
    body.gr_context = contextvars.copy_context()
    awaited = body.switch(function, args, kwargs)
    while not body.dead:
        try:
            value = await awaited
        except GeneratorExit:
            body.throw(GeneratorExit)
            raise
        except BaseException as error:
            awaited = body.throw(error)
        else:
            awaited = body.switch(value)
    return awaited


def _steps(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = function(*args, **kwargs)
    return drive(result) if inspect.isawaitable(result) else result


def drive(work: Awaitable[Any]) -> Any:
    """Run a coroutine inside of a body: what it awaits, the driving task awaits."""
    steps = work.__await__()
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            awaited = steps.send(value) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value
        value, error = None, None
        parent = greenlet.getcurrent().parent
        assert parent is not None
        try:
            if awaited is None:  # asyncio.sleep(0)
                awaited = asyncio.get_running_loop().create_future()
                asyncio.get_running_loop().call_soon(_settle, awaited)
            else:
                awaited._asyncio_future_blocking = False  # we await it in the coroutine's place
            value = parent.switch(awaited)
        except BaseException as raised:
            error = raised


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
