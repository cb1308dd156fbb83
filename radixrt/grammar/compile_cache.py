"""CompileCache owns compiled constraints and the threads that make them, so that no request waits for another's compilation.

Invariants: for one ``(constraint, tokenizer)`` at most one compilation runs at a time; whatever it raises reaches only the
requests that asked for it; the cache holds at most ``max_bytes`` by its last count, the least recently used go first (the newest
stays even if it alone is larger); threads start at the first ``get``.

Slow ones hold up no quick ones (a multilevel feedback queue): a compilation that takes longer than its turn is interrupted and
begun again later, with a longer turn, behind all that have not had theirs; and one thread takes only what has had no turn::

    level 0   0.1 s each     all threads
    level 1   1 s each       all but one
    level 2   the limit      all but one

The last turn ends at the time limit: those who wait get an error. Where the interpreter cannot interrupt (a long call into
native code), the thread is replaced; if such a compilation ends after all, its result is kept for the next request.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
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


_TURNS = (0.1, 1.0)  # seconds of a compilation's first turns; the last one is as long as the time limit
_AGAIN = 0.1  # seconds after which one that was interrupted and goes on is interrupted again


class Interrupted(BaseException):
    """Raised inside a compilation whose turn is over; not an Exception, so that nothing in it takes it for its own."""


@dataclass(frozen=True, slots=True)
class CompileStats:
    """Counts since the start (``hits``: found; ``joined``: waited for another's compilation; ``turns``: cut short, to go on
    behind quicker ones) and what is held now."""

    hits: int = 0
    joined: int = 0
    misses: int = 0
    failures: int = 0
    timeouts: int = 0
    turns: int = 0
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
    level: int = 0  # turns it has had
    late: float = 0.0  # seconds that this turn has taken, at its last alarm
    stuck: bool = False
    alarm: threading.Timer | None = None
    # under ``aim``, which unlike a Condition is never held by a thread that is interrupted while it takes it:
    aim: threading.Lock = field(default_factory=threading.Lock)
    thread: int | None = None  # that may be interrupted
    interrupted: bool = False

    def interrupt(self) -> None:
        """Have the thread that compiles stop, as soon as it runs Python."""
        with self.aim:
            if self.thread is not None:
                self.interrupted = True
                _raise_in(self.thread, Interrupted)

    def beyond(self) -> None:
        """From here on the thread, which is the caller's, is not interrupted; what was sent and has not come yet comes here."""
        with self.aim:
            thread, self.thread = self.thread, None
        if thread is None or not self.interrupted:
            return
        try:
            _raise_in(thread, Interrupted)  # in place of the one that may be under way, so that one comes for certain
            while True:
                time.sleep(0)
        except Interrupted:
            pass


def _raise_in(thread: int, error: type[BaseException]) -> None:
    # never with NULL, which takes one back but leaves CPython's flag for it up: a profiler would hang the process
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


class CompileCache:
    """Compiled constraints by content and tokenizer.

    Args:
        max_bytes: memory of the compiled constraints kept, as they report it.
        workers: compilations that run at the same time.
        time_limit_s: longest turn of a compilation. turns_s: the shorter ones before it.
        max_waiting: compilations that may wait for a worker. max_stuck: threads past their limit; beyond, new ones are refused.
        compile: how to compile; tests give their own.
    """

    def __init__(
        self,
        *,
        max_bytes: int = 256 << 20,
        workers: int = 2,
        time_limit_s: float = 10.0,
        turns_s: Sequence[float] = _TURNS,
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
        self._turns = (*(turn for turn in turns_s if turn < time_limit_s), time_limit_s)
        self._queues: tuple[deque[_Job], ...] = tuple(deque() for _ in self._turns)  # by the turns they have had
        self._threads = 0  # without the stuck ones
        self._slow = 0  # of them, those on what has had a turn
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
                waiting=self._waiting(),
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
                job.interrupt()
            self._jobs.clear()
            for queue in self._queues:
                queue.clear()
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
        if self._waiting() >= self._max_waiting:
            raise InvalidRequest("constraint", f"not compiled: {self._waiting()} others wait for it; try later")
        self._count(misses=1)
        job = self._jobs[key] = _Job(key, [future])
        self._queues[0].append(job)
        if len(self._queues[0]) > self._idle and self._threads < self._workers:
            self._start_thread()
        self._changed.notify()
        return None

    def _waiting(self) -> int:
        return sum(map(len, self._queues))

    def _next(self) -> _Job | None:
        """What to compile now; of several threads one is kept for what has had no turn."""
        if self._queues[0]:
            return self._queues[0].popleft()
        if self._slow < max(1, self._workers - 1):
            for queue in self._queues:
                if queue:
                    return queue.popleft()
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
        for name in (
            "choices",
            "json_text",
            "matcher",
            "regular",
            "schema",
            "substring",
            "syntax",
            "tags",
        ):  # what a first compilation would import in its turn
            importlib.import_module(f"radixrt.grammar.{name}")
        while True:
            with self._changed:
                self._idle += 1
                while (job := None if self._closed else self._next()) is None and not self._closed:
                    self._changed.wait()
                self._idle -= 1
                if job is None:
                    self._threads -= 1
                    return
                if all(future.cancelled() for future in job.futures):  # nobody wants it any more
                    del self._jobs[job.key]
                    continue
                self._slow += job.level > 0
            if self._run(job):
                return

    def _run(self, job: _Job) -> bool:
        """Compile for a turn; True if the job got stuck in between, and with it this thread its place."""
        level = job.level
        compiled: CompiledConstraint | None = None
        error: BaseException | None = None
        try:
            compiled = self._interruptible(job)
        except BaseException as raised:  # whatever it is belongs to those who asked
            error = raised
        with self._changed:
            if job.alarm is not None:
                job.alarm.cancel()
            job.level += 1  # an alarm that rings now comes too late
            if job.stuck:
                self._stuck -= 1
            else:
                self._slow -= level > 0
            cut = isinstance(error, Interrupted)
            if self._jobs.get(job.key) is job:
                if cut and not job.stuck:
                    self._count(turns=1)
                    self._queues[job.level].append(job)
                else:
                    del self._jobs[job.key]
            self._changed.notify()  # a thread may wait for a slow one's place
            if cut:
                return job.stuck
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

    def _interruptible(self, job: _Job) -> CompiledConstraint:
        """Compile; ``Interrupted`` comes out of here or nowhere."""
        job.late = 0.0
        self._set_alarm(job, self._turns[job.level])
        try:
            job.interrupted, job.thread = False, threading.get_ident()
            try:
                return self._compile(*job.key)
            finally:
                job.beyond()
        finally:  # it may have come within the other one
            job.beyond()

    def _set_alarm(self, job: _Job, seconds: float) -> None:
        job.alarm = threading.Timer(seconds, self._ring, [job, job.level, time.monotonic()])
        job.alarm.daemon = True
        job.alarm.start()

    def _ring(self, job: _Job, level: int, set_at: float) -> None:
        """A turn is over, or has long been: what is compiled is interrupted until it ends."""
        with self._changed:
            if job.level != level:
                return  # it ended in the same moment
            job.interrupt()
            self._set_alarm(job, _AGAIN)
            job.late += time.monotonic() - set_at
            if job.stuck or (level < len(self._turns) - 1 and job.late < self._time_limit_s):
                return
            job.stuck = True
            self._stuck += 1
            self._threads -= 1
            self._slow -= level > 0
            if self._waiting() and not self._closed:
                self._start_thread()
            futures, job.futures = job.futures, []
            self._count(timeouts=len(futures))
        _fail(futures, self._too_slow())


def _fail(futures: list[Future[CompiledConstraint]], error: BaseException) -> None:
    for future in futures:
        if not future.done() and future.set_running_or_notify_cancel():
            future.set_exception(error)
