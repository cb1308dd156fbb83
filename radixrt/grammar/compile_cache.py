"""CompileCache owns compiled constraints and the threads that make them, so that no request waits for another's compilation.

Invariants: for one ``(constraint, tokenizer)`` at most one compilation runs at a time; whatever it raises reaches only the
requests that asked for it; the cache holds at most ``max_bytes`` by its last count, the least recently used go first (the newest
stays even if it alone is larger); threads start at the first ``get``. A compilation past its time limit fails those who wait, and
its thread, which cannot be stopped, is replaced; if it ends after all, its result is kept for the next request.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from radixrt.errors import EngineClosed, InvalidRequest
from radixrt.grammar.compile import compile_constraint
from radixrt.grammar.constraint import Constraint

if TYPE_CHECKING:
    from radixrt.grammar.matcher import CompiledConstraint
    from radixrt.model.tokenizer import Tokenizer

    _Key = tuple[Constraint, Tokenizer]


@dataclass(frozen=True, slots=True)
class CompileStats:
    """Counts since the start (``hits``: found; ``joined``: waited for another's compilation) and what is held now."""

    hits: int = 0
    joined: int = 0
    misses: int = 0
    failures: int = 0
    timeouts: int = 0
    evictions: int = 0
    entries: int = 0
    bytes: int = 0
    waiting: int = 0
    running: int = 0
    stuck: int = 0


@dataclass(eq=False)
class _Job:
    key: _Key
    futures: list[Future[CompiledConstraint]] = field(default_factory=list)
    stuck: bool = False


class CompileCache:
    """Compiled constraints by content and tokenizer.

    Args:
        max_bytes: memory of the compiled constraints kept, as they report it.
        workers: compilations that run at the same time.
        time_limit_s: longest compilation, counted from its start.
        max_waiting: compilations that may wait for a worker. max_stuck: threads past their limit; beyond, new ones are refused.
        compile: how to compile; tests give their own.
    """

    def __init__(
        self,
        *,
        max_bytes: int = 256 << 20,
        workers: int = 2,
        time_limit_s: float = 10.0,
        max_waiting: int = 1024,
        max_stuck: int = 8,
        compile: Callable[[Constraint, Tokenizer], CompiledConstraint] = compile_constraint,
    ) -> None:
        self._max_bytes, self._workers, self._time_limit_s = max_bytes, workers, time_limit_s
        self._max_waiting, self._max_stuck, self._compile = max_waiting, max_stuck, compile
        self._changed = threading.Condition()
        self._entries: OrderedDict[_Key, tuple[CompiledConstraint, int]] = OrderedDict()
        self._bytes = 0
        self._jobs: dict[_Key, _Job] = {}  # waiting, running and stuck
        self._queue: deque[_Job] = deque()
        self._threads = 0  # without the stuck ones
        self._idle = 0
        self._stuck = 0
        self._closed = False
        self._counts = CompileStats()

    def get(self, constraint: Constraint, tokenizer: Tokenizer) -> Future[CompiledConstraint]:
        """The compiled constraint, at once where it is known. The future is the caller's own: cancelling it harms no one else.

        The future raises what ``Constraint.compile`` raises, or InvalidRequest for one that took longer than the time limit;
        EngineClosed if the cache is closed.
        """
        future: Future[CompiledConstraint] = Future()
        key = (constraint, tokenizer)
        try:
            with self._changed:
                compiled = self._find(key, future)
        except Exception as error:
            future.set_exception(error)
        else:
            if compiled is not None:
                future.set_result(compiled)
        return future

    def stats(self) -> CompileStats:
        """A snapshot of the counts."""
        with self._changed:
            return replace(
                self._counts,
                entries=len(self._entries),
                bytes=self._bytes,
                waiting=len(self._queue),
                running=self._threads - self._idle,
                stuck=self._stuck,
            )

    def close(self) -> None:
        """Let the threads end and forget everything; what waits fails with EngineClosed. Safe to call twice."""
        with self._changed:
            self._closed = True
            waiting = [future for job in self._jobs.values() for future in job.futures]
            for job in self._jobs.values():
                job.futures = []
            self._jobs.clear()
            self._queue.clear()
            self._entries.clear()
            self._bytes = 0
            self._changed.notify_all()
        _fail(waiting, EngineClosed("the cache of compiled constraints was closed"))

    # -- under the lock

    def _find(self, key: _Key, future: Future[CompiledConstraint]) -> CompiledConstraint | None:
        """The compiled constraint, or ``None`` after leaving ``future`` with the job that makes it."""
        if self._closed:
            raise EngineClosed("the cache of compiled constraints was closed")
        entry = self._entries.get(key)
        if entry is not None:
            self._count(hits=1)
            self._put(key, entry[0])  # its lazy tables may have grown
            return entry[0]
        job = self._jobs.get(key)
        if job is not None:
            if job.stuck:
                self._count(timeouts=1)
                raise self._too_slow()
            self._count(joined=1)
            job.futures.append(future)
            return None
        if self._stuck >= self._max_stuck:
            raise InvalidRequest(
                "constraint", f"not compiled: {self._stuck} others are past their time limit; try later"
            )
        if len(self._queue) >= self._max_waiting:
            raise InvalidRequest("constraint", f"not compiled: {len(self._queue)} others wait for it; try later")
        self._count(misses=1)
        job = self._jobs[key] = _Job(key, [future])
        self._queue.append(job)
        if len(self._queue) > self._idle and self._threads < self._workers:
            self._start_thread()
        self._changed.notify()
        return None

    def _start_thread(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name="radixrt-compile", daemon=True).start()

    def _count(self, **more: int) -> None:
        self._counts = replace(self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()})

    def _put(self, key: _Key, compiled: CompiledConstraint) -> None:
        """Make ``key`` the most recently used, count its bytes again, evict what is too much."""
        _, old = self._entries.pop(key, (None, 0))
        size = int(compiled.memory_bytes)
        self._entries[key] = (compiled, size)
        self._bytes += size - old
        while self._bytes > self._max_bytes and len(self._entries) > 1:
            _, (_, freed) = self._entries.popitem(last=False)
            self._bytes -= freed
            self._count(evictions=1)

    def _too_slow(self) -> InvalidRequest:
        return InvalidRequest("constraint", f"takes longer than {self._time_limit_s:g} s to compile; make it smaller")

    # -- in a worker

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._queue and not self._closed:
                    self._changed.wait()
                self._idle -= 1
                if self._closed:
                    self._threads -= 1
                    return
                job = self._queue.popleft()
                if all(future.cancelled() for future in job.futures):  # nobody wants it any more
                    del self._jobs[job.key]
                    continue
            if self._run(job):
                return

    def _run(self, job: _Job) -> bool:
        """Compile; True if the job got stuck in between, and with it this thread its place."""
        alarm = threading.Timer(self._time_limit_s, self._expire, [job])
        alarm.daemon = True
        alarm.start()
        compiled: CompiledConstraint | None = None
        error: BaseException | None = None
        try:
            compiled = self._compile(*job.key)
        except BaseException as raised:  # whatever it is belongs to those who asked
            error = raised
        alarm.cancel()
        with self._changed:
            if self._jobs.get(job.key) is job:
                del self._jobs[job.key]
            if job.stuck:
                self._stuck -= 1
            if error is not None:
                self._count(failures=1)
            elif compiled is not None and not self._closed:
                self._put(job.key, compiled)
            futures, job.futures = job.futures, []
        if error is not None:
            _fail(futures, error)
        else:
            for future in futures:
                if future.set_running_or_notify_cancel():
                    future.set_result(compiled)  # type: ignore[arg-type]
        return job.stuck

    def _expire(self, job: _Job) -> None:
        with self._changed:
            if self._jobs.get(job.key) is not job:
                return  # done in the same moment
            job.stuck = True
            self._stuck += 1
            self._threads -= 1
            if self._queue and not self._closed:
                self._start_thread()
            futures, job.futures = job.futures, []
            self._count(timeouts=len(futures))
            error = self._too_slow()
        _fail(futures, error)


def _fail(futures: list[Future[CompiledConstraint]], error: BaseException) -> None:
    for future in futures:
        if not future.done() and future.set_running_or_notify_cancel():
            future.set_exception(error)
