"""The engine's process: it serves one front over an inherited socket, ``python -m radixrt.server.worker FD``, and ends with it.

Invariants: only the engine's thread touches requests and programs; one thread reads the socket, one writes it, a few prepare requests; all that
a step has to say goes out as one frame. Bad input is answered; an engine that stopped ends the process.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, assert_never

from radixrt.errors import EngineClosed
from radixrt.server.ipc import (
    Abort,
    Call,
    ChannelClose,
    ChannelOpen,
    ChannelSend,
    ChannelTexts,
    Deltas,
    Embed,
    Fatal,
    Generate,
    Ready,
    Refused,
    Reply,
    Score,
    Start,
    ToFront,
    ToWorker,
    frame,
    params_in,
    read_frames,
    refusal,
    unpack,
)

if TYPE_CHECKING:
    from radixrt.engine.async_engine import AsyncEngine
    from radixrt.engine.core import Engine
    from radixrt.engine.programs import Programs
    from radixrt.engine.protocol import ProgramChannel
    from radixrt.request import OutputDelta, SamplingParams

log = logging.getLogger("radixrt")

_PREPARERS = 4
_GOODBYE = 2.0  # seconds for the last frames to leave
_TIDY = 30.0  # seconds between two looks for memory that can be given back


@dataclass(slots=True, eq=False)
class _Job:
    """A request, from its message to its last delta."""

    number: int
    request_id: str
    deltas: bool
    cancelled: bool = False
    begun: bool = False
    waits: bool = True  # it has had no delta
    compiling: Future[Any] | None = None


class Outbox:
    """The writing thread: frames leave in the order they were put, those that wait together in one go."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._queue: queue.SimpleQueue[ToFront | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="radixrt-outbox", daemon=True)
        self._thread.start()

    def put(self, message: ToFront) -> None:
        self._queue.put(message)

    def close(self) -> None:
        """Send what waits, for a moment."""
        self._queue.put(None)
        self._thread.join(_GOODBYE)

    def _run(self) -> None:
        message = self._queue.get()
        try:
            while message is not None:
                data = b"".join(frames(message))
                self._sock.sendall(data)
                message = self._queue.get()
        except OSError:  # the front is gone; the reading thread sees the same
            log.debug("the front is gone", exc_info=True)


def frames(message: ToFront) -> list[bytearray]:
    """The frames of a message: more than one where a step said more than fits, and a refusal for what cannot be sent at all."""
    try:
        return [frame(message)]
    except Exception as error:
        if isinstance(message, Deltas) and len(message.items) > 1:
            return [data for item in message.items for data in frames(Deltas([item]))]
        if isinstance(message, ChannelTexts) and len(message.messages) > 1:
            return [data for text in message.messages for data in frames(ChannelTexts(message.number, [text]))]
        number = message.items[0][0] if isinstance(message, Deltas) else getattr(message, "number", 0)
        return [frame(Refused(number, "", "", f"the answer cannot be sent ({type(error).__name__}: {error})"))]


class Worker:
    """Answers a front's messages with an engine that runs."""

    def __init__(
        self, sock: socket.socket, outbox: Outbox, engine: AsyncEngine, core: Engine, programs: Programs
    ) -> None:
        self._sock = sock
        self._outbox = outbox
        self._engine = engine
        self._core = core
        self._programs = programs
        self._pool = ThreadPoolExecutor(_PREPARERS, "radixrt-prepare")
        self._jobs: dict[int, _Job] = {}
        self._dead = threading.Event()
        # on the engine's thread:
        self._channels: dict[int, ProgramChannel] = {}
        self._deltas: list[tuple[int, OutputDelta]] = []
        self._texts: dict[int, list[str]] = {}
        self._flushing = False

    def take(self, message: ToWorker) -> None:
        """Carry out a message."""
        if isinstance(message, Generate):
            self._begin(_Job(message.number, message.request_id, message.deltas), self._generate, message.body)
        elif isinstance(message, Score):
            self._begin(_Job(message.number, message.request_id, False), self._score, message.body)
        elif isinstance(message, Embed):
            self._begin(_Job(message.number, message.request_id, False), self._embed, message.body)
        elif isinstance(message, Abort):
            self._post(partial(self._drop, message.number))
        elif isinstance(message, Call):
            self._post(partial(self._call, message))
        elif isinstance(message, ChannelOpen):
            self._post(partial(self._open, message))
        elif isinstance(message, ChannelSend):
            self._post(partial(self._hear, message))
        elif isinstance(message, ChannelClose):
            self._post(partial(self._close, message.number))
        elif isinstance(message, Start):
            log.error("the engine was told to start twice")
        else:
            assert_never(message)

    # ---- preparing, in the pool: slow input holds up nobody else

    def _begin(self, job: _Job, prepare: Callable[[_Job, bytes], None], body: bytes) -> None:
        self._jobs[job.number] = job
        self._pool.submit(self._guarded, job, prepare, job, body)

    def _guarded(self, job: _Job, function: Callable[..., None], *args: Any) -> None:
        try:
            if not job.cancelled:
                function(*args)
            else:
                self._jobs.pop(job.number, None)
        except BaseException as error:
            self._refuse(job, error)

    def _refuse(self, job: _Job, error: BaseException) -> None:
        self._jobs.pop(job.number, None)
        self._outbox.put(refusal(job.number, error))

    def _generate(self, job: _Job, body: bytes) -> None:
        prompt, values, priority, cache_salt = unpack(body)
        params = params_in(values)
        if params is None or params.constraint is None:
            self._prepare(job, prompt, params, priority, cache_salt, None)
            return
        future = job.compiling = self._core.compile(params.constraint)
        if job.cancelled:  # in this moment
            future.cancel()
        future.add_done_callback(  # no thread of the pool waits for a compilation
            lambda done: self._pool.submit(
                self._guarded, job, self._prepare, job, prompt, params, priority, cache_salt, done
            )
        )

    def _prepare(
        self,
        job: _Job,
        prompt: Any,
        params: SamplingParams | None,
        priority: int,
        cache_salt: str,
        compiled: Future[Any] | None,
    ) -> None:
        if compiled is not None:
            compiled.result()  # raises what compiling raised
        self._submit(job, self._core.prepare(prompt, params), priority=priority, cache_salt=cache_salt)

    def _score(self, job: _Job, body: bytes) -> None:
        prefix, choices, cache_salt = unpack(body)
        self._submit(job, self._core.prepare_score(prefix, choices), cache_salt=cache_salt)

    def _embed(self, job: _Job, body: bytes) -> None:
        prompt, pooling, cache_salt = unpack(body)
        self._submit(job, self._core.prepare_embed(prompt, pooling), cache_salt=cache_salt)

    def _submit(self, job: _Job, ready: Any, **where: Any) -> None:
        def begin(engine: Engine) -> None:
            if job.cancelled:
                self._jobs.pop(job.number, None)
                return
            try:
                engine.submit(ready, request_id=job.request_id, **where)
                job.begun = True
                self._engine.listen(job.request_id, partial(self._heard, job))
            except Exception as error:
                self._refuse(job, error)

        self._post(begin)

    # ---- on the engine's thread

    def _drop(self, number: int, engine: Engine) -> None:
        job = self._jobs.get(number)
        if job is None:
            return
        job.cancelled = True
        if job.compiling is not None:  # what nobody waits for any more is not compiled before what somebody does
            job.compiling.cancel()
        if job.begun:
            del self._jobs[number]
            self._engine.listen(job.request_id, None)
            engine.abort(job.request_id)

    def _heard(self, job: _Job, item: OutputDelta | BaseException) -> None:
        if isinstance(item, BaseException):
            self._fatal(item)
            return
        last = item.output is not None
        if last:
            self._jobs.pop(job.number, None)
        if last or job.deltas or job.waits:
            job.waits = False
            self._deltas.append((job.number, item))
            self._flush_soon()

    def _call(self, call: Call, engine: Engine) -> None:
        from radixrt.server.local import stats_of, tree_of

        value: Any = None
        try:
            if call.what == "stats":
                value = stats_of(engine, self._programs)
            elif call.what == "tree":
                value = tree_of(engine, self._programs, int(call.argument))
            elif call.what == "runs":
                value = self._programs.runs(map(int, call.argument.split()))
            elif call.what == "flush":
                engine.check_integrity()  # rarely asked, and the figures alone do not show a page that is held twice
                value = engine.flush_cache()
            elif call.what == "abort":
                value = engine.abort(call.argument)
            elif call.what != "ping":
                raise ValueError(f"what={call.what!r}: is not known")
        except Exception as error:
            self._outbox.put(refusal(call.number, error))
        else:
            self._outbox.put(Reply(call.number, value))

    def _open(self, message: ChannelOpen, _: Engine) -> None:
        from radixrt.engine.protocol import ProgramChannel

        number = message.number

        def tell(text: str) -> None:
            self._texts.setdefault(number, []).append(text)
            self._flush_soon()

        self._channels[number] = ProgramChannel(self._programs, tell, message.peer)

    def _hear(self, message: ChannelSend, _: Engine) -> None:
        channel = self._channels.get(message.number)
        if channel is not None:
            channel.receive(message.raw or message.message)

    def _close(self, number: int, _: Engine) -> None:
        channel = self._channels.pop(number, None)
        if channel is not None:
            channel.close()

    def _flush_soon(self) -> None:
        """A posted call runs when the step has handed out all it has."""
        if not self._flushing:
            self._flushing = True
            try:
                self._engine.post(self._flush)
            except EngineClosed:
                self._flush(None)

    def _flush(self, _: Engine | None) -> None:
        self._flushing = False
        if self._deltas:
            self._outbox.put(Deltas(self._deltas))
            self._deltas = []
        for number, texts in self._texts.items():
            self._outbox.put(ChannelTexts(number, texts))
        self._texts = {}

    # ---- the end

    def _post(self, function: Callable[[Engine], None]) -> None:
        try:
            self._engine.post(function)
        except EngineClosed as error:
            self._fatal(error)

    def _fatal(self, error: BaseException) -> None:
        """The engine has stopped; have the reading thread end."""
        if not self._dead.is_set():
            self._dead.set()
            log.error("the engine has stopped", exc_info=error)
            self._outbox.put(Fatal(str(error)))
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RD)

    def finish(self) -> None:
        """The socket is closed: nobody is told anything any more."""
        self._dead.set()


def tidy(stopped: threading.Event) -> None:
    """Give back to the system what the C library keeps, until ``stopped``: large arrays of logits leave holes between small blocks.

    It would keep hundreds of MiB. Never to keep arrays that large (``M_MMAP_THRESHOLD``) costs half again the CPU time of a step
    with log-probabilities: each is then made of new pages.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    while trim is not None and not stopped.wait(_TIDY):
        trim(0)


def serve(sock: socket.socket) -> int:
    """Serve the front at the other end until it closes; returns the exit status."""
    from radixrt.engine.async_engine import AsyncEngine
    from radixrt.engine.programs import Programs
    from radixrt.server.local import info_of

    outbox = Outbox(sock)
    messages = read_frames(sock.makefile("rb"))
    with asyncio.Runner() as runner:
        engine: AsyncEngine | None = None
        try:
            start = next(messages, None)
            if not isinstance(start, Start):
                return 1
            engine = AsyncEngine(**start.settings, progress=start.progress)
            runner.run(_started(engine))
        except BaseException as error:
            outbox.put(refusal(0, error))
            outbox.close()
            return 1

        def begin(core: Engine) -> tuple[Engine, Programs]:
            return core, Programs(core, engine.listen, engine.post)

        core, programs = runner.run(engine.call(begin))
        worker = Worker(sock, outbox, engine, core, programs)
        outbox.put(Ready(info_of(core)))
        stopped = threading.Event()
        threading.Thread(target=tidy, args=(stopped,), name="radixrt-tidy", daemon=True).start()
        try:
            for message in messages:
                worker.take(message)
        except (OSError, ValueError) as error:
            log.error("the front sent what is no message (%s)", error)
        stopped.set()
        worker.finish()
        runner.run(engine.close())
    outbox.close()
    return 0


async def _started(engine: AsyncEngine) -> None:
    await engine.start()


def _unraisable(unraisable: Any) -> None:
    """Python's own hook, but for the end of a compilation's turn: where that comes within a callback it is lost, and sent again."""
    from radixrt.grammar.compile_cache import Interrupted

    if unraisable.exc_type is not Interrupted:
        sys.__unraisablehook__(unraisable)


def main() -> None:
    # Ctrl-C and a service manager's SIGTERM reach every process of the group; the front drains, and then closes the socket.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s engine: %(message)s")
    sys.unraisablehook = _unraisable
    status = 1
    try:
        status = serve(socket.socket(fileno=int(sys.argv[1])))
    except BaseException:
        log.exception("the engine's process failed")
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(status)  # a compilation that runs holds up nobody


if __name__ == "__main__":
    main()
