"""Exclusive: one thread at a time inside the engine, and no Ctrl-C in the middle of what must be whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from radixrt.errors import RadixrtError


class EngineBusy(RadixrtError):
    """Two threads used one engine at the same moment."""


class Exclusive:
    """A context manager that the same thread may enter again.

    On the main thread an interrupt that arrives inside is raised on the way out, so that a step, or the adding or ending of a
    request, happens wholly or not at all.

    Raises:
        EngineBusy: another thread is inside.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._handler: Any = None
        self._interrupt: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise EngineBusy("the engine is used by two threads at once; AsyncEngine serves many callers")
        try:
            if self._depth == 0 and threading.current_thread() is threading.main_thread():
                handler = signal.getsignal(signal.SIGINT)
                if callable(handler):
                    self._handler = handler
                    signal.signal(signal.SIGINT, self._note)
        except BaseException:  # an interrupt that came just before
            self._handler = None
            self._lock.release()
            raise
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        handler, self._handler = (self._handler, None) if self._depth == 0 else (None, self._handler)
        try:
            if handler is not None:
                signal.signal(signal.SIGINT, handler)
        finally:
            self._lock.release()
            if handler is not None:
                interrupt, self._interrupt = self._interrupt, None
                if interrupt is not None:
                    handler(*interrupt)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupt = (number, frame)
