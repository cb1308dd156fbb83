"""ProcessClient: an engine in a process of its own, started, watched and restarted from the front's event loop.

Invariants: the loop never waits for the process; whoever waits for an answer gets it, or the reason why there is none; a process that ended or does
not answer is replaced once, and stays down when its successor fails soon after.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil

from radixrt.config import EngineConfig
from radixrt.engine.inputs import Prompt, read_template
from radixrt.errors import EngineClosed, InvalidRequest
from radixrt.model.source import resolve
from radixrt.model.tokenizer import load_tokenizer
from radixrt.request import OutputDelta, RequestOutput, SamplingParams
from radixrt.server.client import EngineDied, EngineInfo
from radixrt.server.ipc import (
    MAX_FRAME,
    Abort,
    Call,
    ChannelClose,
    ChannelOpen,
    ChannelSend,
    ChannelTexts,
    Deltas,
    Embed,
    Fatal,
    FrameReader,
    Generate,
    Ready,
    Refused,
    Reply,
    Score,
    Start,
    ToFront,
    ToWorker,
    error_event,
    error_of,
    frame,
    pack,
    params_out,
)

if TYPE_CHECKING:
    from radixrt.model.tokenizer import Tokenizer

log = logging.getLogger("radixrt")

# What a receiver hears: a delta or a message about its number, or the error that ends everything.
Receiver = Callable[["OutputDelta | Refused | Reply | ChannelTexts | Exception"], None]
_COMPUTES, _MOST_STEP = 0.5, 10.0  # of a processor; watchdog_seconds
_GRACE = 1.0  # seconds in which an answer that has come is read, where this loop itself was held up
_MAX_MESSAGE = MAX_FRAME // 4 - 2**14  # characters


class WorkerLink(asyncio.Protocol):
    """The socket to one engine process, and who waits for what from it."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[EngineInfo] = loop.create_future()
        self.lost: asyncio.Future[Exception] = loop.create_future()  # why nothing more will come
        self._on_lost = on_lost
        self._reader = FrameReader()
        self._receivers: dict[int, Receiver] = {}
        self._numbers = 0
        self._transport: asyncio.Transport | None = None

    # ---- asking

    def number(self, receiver: Receiver) -> int:
        """A new number, whose answers go to ``receiver``.

        Raises:
            EngineDied, EngineClosed: there will be none.
        """
        if self.lost.done():
            raise self.lost.result()
        self._numbers += 1
        self._receivers[self._numbers] = receiver
        return self._numbers

    def forget(self, number: int) -> None:
        """Nobody waits for this number any more."""
        self._receivers.pop(number, None)

    def send(self, message: ToWorker) -> None:
        if self._transport is not None and not self.lost.done():
            self._transport.write(frame(message))

    async def call(self, what: str, argument: str = "") -> Any:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def receive(item: Any) -> None:
            if done.done():
                return
            if isinstance(item, Reply):
                done.set_result(item.value)
            else:
                done.set_exception(error_of(item) if isinstance(item, Refused) else item)

        number = self.number(receive)
        try:
            self.send(Call(number, what, argument))
            return await done
        finally:
            self.forget(number)

    # ---- hearing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._take(message)
        except ValueError as error:
            self.end(EngineDied(f"the engine's process sent what is no message ({error})"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(EngineDied("the engine's process ended"))

    def _take(self, message: ToFront) -> None:
        if isinstance(message, Deltas):
            for number, delta in message.items:
                self._tell(number, delta)
        elif isinstance(message, Ready):
            if not self.ready.done():
                self.ready.set_result(message.info)
        elif isinstance(message, Fatal):
            self.end(EngineDied(message.message))
        elif message.number == 0 and isinstance(message, Refused):
            if not self.ready.done():
                self.ready.set_exception(error_of(message))
        else:
            self._tell(message.number, message)

    def _tell(self, number: int, item: OutputDelta | Refused | Reply | ChannelTexts | Exception) -> None:
        receiver = self._receivers.get(number)
        if receiver is not None:
            try:
                receiver(item)
            except Exception:  # the others hear theirs
                log.exception("a receiver failed")

    def end(self, reason: Exception) -> None:
        """Nothing more will come: tell everyone who waits. The first reason counts."""
        if self.lost.done():
            return
        self.lost.set_result(reason)
        if not self.ready.done():
            self.ready.set_exception(reason)
            self.ready.exception()  # it is no loss where nobody waits
        if self._transport is not None:
            self._transport.close()
        self._on_lost()
        for number in list(self._receivers):
            self._tell(number, reason)
        self._receivers.clear()


class ProcessClient:
    """An ``EngineClient`` whose engine has a process of its own.

    Args:
        settings: of the engine, an ``EngineConfig`` or its fields.
        progress: show loading on stderr.
        watchdog_seconds: an engine that takes no call for this long is taken to be stuck; where its process computes meanwhile (a large
            model's step on a small machine), ten times as long.
        restart_delay: seconds before a process that ended is replaced.
        restart_window: a replacement that ends within this many seconds is the last.

    Raises:
        InvalidRequest: a setting that ``EngineConfig`` refuses.
    """

    def __init__(
        self,
        settings: EngineConfig | Mapping[str, Any],
        *,
        progress: bool = False,
        watchdog_seconds: float = 30.0,
        restart_delay: float = 1.0,
        restart_window: float = 60.0,
        ping_interval: float = 1.0,
    ) -> None:
        config = settings if isinstance(settings, EngineConfig) else EngineConfig.from_kwargs(**settings)
        self._settings = {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value
            for name, value in asdict(config).items()
        }
        self._progress = progress
        self.watchdog_seconds = watchdog_seconds
        self._restart_delay, self._restart_window, self._ping_interval = restart_delay, restart_window, ping_interval
        self._link: WorkerLink | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._info: EngineInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._steady = asyncio.Event()  # it runs, or will not run again
        self._starting: asyncio.Task[None] | None = None
        self._guard: asyncio.Task[None] | None = None
        self._closed = False
        self._down = False

    # ---- what is known

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineClosed("the engine was not started: `await start()`")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise EngineClosed("the engine was not started: `await start()`")
        return self._tokenizer

    @property
    def healthy(self) -> bool:
        link = self._link
        return link is not None and link.ready.done() and not link.lost.done()

    @property
    def pid(self) -> int | None:
        """Of the engine's process, while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def settled(self) -> bool:
        """Wait for a restart that is under way; returns ``healthy``."""
        await self._steady.wait()
        return self.healthy

    # ---- its life

    async def start(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed")
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        template = await asyncio.to_thread(read_template, self._settings["chat_template"])
        model = self._settings["model"]
        await asyncio.to_thread(resolve, model, progress=self._progress)  # fetched once, before two want it
        tokenizer = asyncio.create_task(asyncio.to_thread(load_tokenizer, model, chat_template=template))
        try:
            link = await self._connect()  # its error is the better one: it has seen the whole model
            self._tokenizer = await tokenizer
        finally:
            tokenizer.cancel()
            await asyncio.wait([tokenizer])
            if not tokenizer.cancelled():
                tokenizer.exception()
        self._guard = asyncio.create_task(self._watch(link))

    async def close(self) -> None:
        """End the process; whoever waits for an answer gets EngineClosed."""
        self._closed = self._down = True
        for task in (self._starting, self._guard):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
        if self._link is not None:
            self._link.end(EngineClosed("the engine is closed"))
        await self._stop(patience=5.0)
        self._steady.set()

    async def _connect(self) -> WorkerLink:
        """Start a process and wait until its engine is ready; raises what loading raises."""
        loop = asyncio.get_running_loop()
        front, back = socket.socketpair()
        with front, back:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "radixrt.server.worker", str(back.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(back.fileno(),),
                env=_environment(),
            )
            self._process = process
            _, link = await loop.create_unix_connection(lambda: WorkerLink(self._steady.clear), sock=front.dup())
        self._link = link
        try:
            link.send(Start(self._settings, self._progress))
            self._info = await link.ready
        except BaseException as error:
            link.end(error if isinstance(error, Exception) else EngineClosed("the engine is closed"))
            await self._stop(patience=0.0)
            raise
        self._steady.set()
        return link

    async def _stop(self, patience: float) -> None:
        """Wait for the process to end, and end it where it does not."""
        process = self._process
        if process is None:
            return
        if process.returncode is None and patience:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), patience)
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        await process.wait()

    # ---- the watchdog

    async def _watch(self, link: WorkerLink) -> None:
        """Replace a process that ended or is stuck."""
        loop = asyncio.get_running_loop()
        since: float | None = None  # when it was replaced
        try:
            while True:
                reason = await self._until_lost(link)
                stuck = not link.lost.done()
                link.end(reason)
                self._steady.clear()
                now = loop.time()
                await self._stop(patience=0.0 if stuck else _GRACE)
                log.error("%s (%s)", reason, _how(self._process))
                if since is not None and now - since < self._restart_window:
                    log.error("it was restarted %.0f s before, and stays down", now - since)
                    return
                await asyncio.sleep(self._restart_delay)
                link = await self._connect()
                since = loop.time()
                log.warning("the engine was restarted, its cache is empty")
        except Exception:
            log.exception("the engine could not be restarted, and stays down")
        finally:
            self._down = True
            self._steady.set()

    async def _until_lost(self, link: WorkerLink) -> Exception:
        """Why the engine behind ``link`` is lost, once it is."""
        while True:
            ping = asyncio.ensure_future(link.call("ping"))
            began, used = asyncio.get_running_loop().time(), self._cpu_seconds()
            try:
                while not ping.done():
                    for patience in (self.watchdog_seconds, _GRACE):
                        await asyncio.wait((ping, link.lost), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                        if ping.done() or link.lost.done():
                            break
                    if link.lost.done():
                        return link.lost.result()
                    waited = asyncio.get_running_loop().time() - began
                    computing = self._cpu_seconds() - used >= _COMPUTES * waited
                    if not ping.done() and not (computing and waited < _MOST_STEP * self.watchdog_seconds):
                        return EngineDied(f"the engine has not answered for {waited:.1f} seconds")
            finally:
                ping.cancel()
                await asyncio.wait([ping])
                if not ping.cancelled():
                    ping.exception()
            await asyncio.wait((link.lost,), timeout=self._ping_interval)

    def _cpu_seconds(self) -> float:
        """Processor time that the process has used; 0 where it is gone."""
        if self._process is None:
            return 0.0
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    # ---- requests

    def _running(self) -> WorkerLink:
        link = self._link
        if self._closed:
            raise EngineClosed("the engine is closed")
        if link is None or self._info is None:
            raise EngineClosed("the engine was not started: `await start()`")
        if link.lost.done():
            raise EngineDied(f"{link.lost.result()}; {'it stays down' if self._down else 'it is being restarted'}")
        if not link.ready.done():
            raise EngineDied("the engine is being restarted")
        return link

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
        link = self._running()
        body = pack("prompt", prompt, params_out(params), priority, cache_salt)
        items: asyncio.Queue[Any] = asyncio.Queue()
        number = link.number(items.put_nowait)
        done = False
        try:
            self._send(link, Generate(number, request_id, deltas, body))
            while not done:
                item = await items.get()
                if not isinstance(item, OutputDelta):
                    done = True
                    raise _error(item)
                done = item.output is not None
                yield item
        finally:
            link.forget(number)
            if not done:
                link.send(Abort(number))

    async def score(
        self, prefix: Sequence[int], choices: Sequence[Sequence[int]], *, request_id: str, cache_salt: str = ""
    ) -> RequestOutput:
        return await self._whole(Score, request_id, pack("choices", prefix, choices, cache_salt))

    async def embed(
        self, prompt: Sequence[int], pooling: str, *, request_id: str, cache_salt: str = ""
    ) -> RequestOutput:
        return await self._whole(Embed, request_id, pack("prompt", prompt, pooling, cache_salt))

    async def _whole(self, kind: type[Score | Embed], request_id: str, body: bytes) -> RequestOutput:
        """The output of a request that generates nothing."""
        link = self._running()
        items: asyncio.Queue[Any] = asyncio.Queue()
        number = link.number(items.put_nowait)
        item: Any = None
        try:
            self._send(link, kind(number, request_id, body))
            item = await items.get()
        finally:
            link.forget(number)
            if item is None:
                link.send(Abort(number))
        if not isinstance(item, OutputDelta) or item.output is None:
            raise _error(item)
        return item.output

    @staticmethod
    def _send(link: WorkerLink, message: Generate | Score | Embed) -> None:
        try:
            link.send(message)
        except UnicodeEncodeError:
            raise InvalidRequest("request_id", "is not Unicode text") from None

    async def abort(self, request_id: str) -> bool:
        return bool(await self._running().call("abort", request_id))

    async def stats(self) -> dict[str, Any]:
        values: dict[str, Any] = await self._running().call("stats")
        return values

    async def tree(self, most: int) -> dict[str, Any]:
        values: dict[str, Any] = await self._running().call("tree", str(most))
        return values

    async def runs(self, known: Sequence[int]) -> dict[str, Any]:
        values: dict[str, Any] = await self._running().call("runs", " ".join(map(str, known)))
        return values

    async def flush_cache(self) -> int:
        return int(await self._running().call("flush"))

    def programs(self, peer: str, receive: Callable[[str], None]) -> ProcessChannel:
        return ProcessChannel(self._running(), peer, receive)


class ProcessChannel:
    """A channel of program messages to an engine's process."""

    def __init__(self, link: WorkerLink, peer: str, receive: Callable[[str], None]) -> None:
        self._link = link
        self._receive = receive
        self._closed = False
        self._number = link.number(self._hear)
        link.send(ChannelOpen(self._number, peer))

    def send(self, message: str) -> None:
        if self._closed:
            return
        if self._link.lost.done():
            raise EngineDied(str(self._link.lost.result()))
        if len(message) > _MAX_MESSAGE:
            problem = f"message has {len(message):,} characters: at most {_MAX_MESSAGE:,} are taken"
            asyncio.get_running_loop().call_soon(self._hear, ChannelTexts(self._number, [error_event(problem)]))
            return
        try:
            self._link.send(ChannelSend(self._number, message))
        except UnicodeEncodeError:
            self._link.send(ChannelSend(self._number, "", message.encode("utf-8", "surrogatepass")))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._link.forget(self._number)
            self._link.send(ChannelClose(self._number))

    def _hear(self, item: Any) -> None:
        for message in item.messages if isinstance(item, ChannelTexts) else [error_event(str(item))]:
            if not self._closed:
                self._receive(message)


def _error(item: Any) -> Exception:
    """What a request that got no delta is told."""
    return error_of(item) if isinstance(item, Refused) else type(item)(*item.args)  # each gets a traceback of its own


def _environment() -> dict[str, str]:
    """The worker finds this package where it is, and nothing in the directory it happens to be started in."""
    import radixrt

    root = Path(radixrt.__file__).parents[1]
    environment = dict(os.environ)
    if root.name not in ("site-packages", "dist-packages"):
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{known}{os.pathsep}{root}" if known else str(root)
    return environment


def _how(process: asyncio.subprocess.Process | None) -> str:
    code = process.returncode if process is not None else None
    if code is None or code >= 0:
        return f"exit status {code}"
    with suppress(ValueError):
        return f"ended by {signal.Signals(-code).name}"
    return f"ended by signal {-code}"
