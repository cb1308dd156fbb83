"""Programs over HTTP: a WebSocket for programs that grow as they run, and a route for a graph that is whole.

Invariants: the messages are those of ``radixrt.engine.protocol``, handed on as they are; a connection that is gone has closed its link, and
with it all its programs; what waits for a slow reader is bounded, and so is what waits for a busy engine: its sender waits, too.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import deque
from contextlib import nullcontext
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from radixrt.engine.nodes import VERSION, Gen, Role, Select, graph_from_dict, to_dict
from radixrt.engine.protocol import MAX_MESSAGE, MAX_NAME, MAX_OPEN, written
from radixrt.errors import EngineClosed, InvalidRequest, shown
from radixrt.server.client import EngineDied
from radixrt.server.config import ServerConfig
from radixrt.server.errors import Failure, RequestFailed
from radixrt.server.limits import Gate, check_fields, check_model, read_object
from radixrt.server.metrics import Metrics
from radixrt.server.streams import DONE, EventStream

RUN = ("version", "nodes", "name", "cache_salt", "stream", "model")  # fields of POST /v1/programs
_SMALL = 65_536  # characters: a message that opens or closes a program is no longer
_FAREWELL = 5.0  # seconds that a connection which ends may take over its last messages
_OVERHEAD = 100  # what a message costs beside its characters
_AHEAD = 1 << 20  # characters that a connection may say before the engine has taken them
_RESTS = "the model is unloaded; connect again"
_BEAT = 30.0  # seconds between pings; a peer that does not answer is gone


class Programs:
    """The routes of programs, and the WebSockets that are open."""

    def __init__(self, gate: Gate, config: ServerConfig, metrics: Metrics) -> None:
        self._gate, self._config, self._metrics = gate, config, metrics
        self._open: set[_Connection] = set()
        self._draining = False

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/programs/ws", self.connect), web.post("/v1/programs", self.run)]

    def drain(self) -> None:
        """No new programs: a connection ends as soon as it has none."""
        self._draining = True
        for connection in self._open:
            connection.drain()

    def rest(self, silent: float, soon: bool) -> None:
        """The engine is wanted for another model: a connection ends that has no programs and has said nothing for so many seconds.

        Args:
            soon: the others end as soon as they have no programs.
        """
        for connection in self._open:
            connection.rest(silent, soon)

    async def connect(self, request: web.Request) -> web.WebSocketResponse:
        check_model(request.query.get("model"), self._config, self._gate)
        most = self._config.max_websockets
        if len(self._open) >= most:
            self._metrics.refused["max_websockets"] += 1
            problem = f"max_websockets={most} WebSockets are open"
            raise RequestFailed(Failure(503, problem, None, "too_many_websockets"))
        socket = web.WebSocketResponse(max_msg_size=4 * self._config.max_message, heartbeat=_BEAT, compress=False)
        if not socket.can_prepare(request).ok:
            raise RequestFailed(
                Failure(400, "/v1/programs/ws is a WebSocket: ask for an upgrade", None, "no_websocket")
            )
        await socket.prepare(request)
        connection = _Connection(socket, request.transport, self._gate, self._config)
        self._open.add(connection)
        try:
            await connection.run()
        finally:
            self._open.discard(connection)
        return socket

    async def run(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/programs``: the events of a graph as they come or, with ``"stream": false``, together."""
        data = await read_object(request)
        check_fields("a program", data, RUN)
        check_model(data.pop("model", None), self._config, self._gate)
        stream = data.pop("stream", True)
        if not isinstance(stream, bool):
            raise InvalidRequest("stream", f"={shown(stream)}: must be true or false")
        opening: dict[str, Any] = {"op": "open", "program": "p", "version": VERSION, "stream": stream}
        for name in ("name", "cache_salt"):
            value = data.pop(name, "")
            if not isinstance(value, str):
                raise InvalidRequest(name, f"={shown(value)}: must be a string")
            opening[name] = value
        nodes = await asyncio.to_thread(graph_from_dict, data)
        waiting = {node.id for node in nodes if isinstance(node, (Gen, Select, Role))}
        adding = written({"op": "add", "program": "p", "nodes": [to_dict(node) for node in nodes]})
        if len(adding) > MAX_MESSAGE:
            raise InvalidRequest("nodes", f"are {len(adding):,} characters: at most {MAX_MESSAGE:,} are taken")
        heard: asyncio.Queue[str] = asyncio.Queue()
        link = self._gate.programs(uuid.uuid4().hex, heard.put_nowait)
        events: list[dict[str, Any]] = []
        try:
            async with EventStream(request, {}, self._config.stream_keepalive) if stream else nullcontext() as answer:
                link.send(written(opening))
                link.send(adding)
                while waiting:
                    event = json.loads(await heard.get())
                    event.pop("program", None)
                    if event["event"] in ("done", "failed"):
                        waiting.discard(event["node"])
                    elif event["event"] == "error":
                        if answer is None:
                            status = 400 if self._gate.healthy else 503
                            raise RequestFailed(Failure(status, str(event["error"]), None, "program_failed"))
                        waiting.clear()
                    if answer is None:
                        events.append(event)
                    else:
                        await answer.write(f"data: {written(event)}\n\n".encode())
                if answer is not None:
                    return await answer.end(DONE)
        finally:
            link.close()
        return web.json_response({"version": VERSION, "events": events}, dumps=written)


class _Connection:
    """One WebSocket and its link to the engine."""

    def __init__(
        self, socket: web.WebSocketResponse, transport: asyncio.Transport | None, gate: Gate, config: ServerConfig
    ) -> None:
        self._socket, self._transport, self._gate, self._config = socket, transport, gate, config
        self._unsent: deque[str] = deque()
        self._characters = 0
        self._ahead = 0  # characters that the engine was sent since it last answered
        self._wake = asyncio.Event()
        self._programs: set[str] = set()  # that the client has opened and not closed
        self._heard = time.monotonic()  # when the last message came or went
        self._closing: tuple[int, str] | None = None
        self._draining = self._resting = False

    async def run(self) -> None:
        link = self._gate.programs(uuid.uuid4().hex, self._hear)
        sender = asyncio.ensure_future(self._send())
        try:
            await self._receive(link)
        finally:
            link.close()
            try:
                if self._closing is not None:  # what it was told, and why this is the end
                    await asyncio.wait([sender], timeout=_FAREWELL)
            finally:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)

    def drain(self) -> None:
        self._draining = True
        if not self._programs:
            self._end(WSCloseCode.GOING_AWAY, "the server is shutting down")

    def rest(self, silent: float, soon: bool) -> None:
        self._resting = self._resting or soon
        if not self._programs and time.monotonic() - self._heard >= silent:
            self._end(WSCloseCode.GOING_AWAY, _RESTS)

    async def _receive(self, link: Any) -> None:
        while self._closing is None:
            wait = self._config.websocket_idle - (time.monotonic() - self._heard)
            if wait <= 0 and not self._programs:
                problem = f"nothing was said for websocket_idle={self._config.websocket_idle:g} seconds"
                self._end(WSCloseCode.GOING_AWAY, problem)
                return
            try:
                message = await self._socket.receive(timeout=wait if wait > 0 else self._config.websocket_idle)
            except TimeoutError:
                continue
            if message.type is not WSMsgType.TEXT:
                if message.type is WSMsgType.BINARY:
                    await self._socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"messages must be text")
                return
            self._heard = time.monotonic()
            if len(message.data) > self._config.max_message:
                reason = f"a message has more than max_message={self._config.max_message} characters"
                await self._socket.close(code=WSCloseCode.MESSAGE_TOO_BIG, message=reason.encode())
                return
            if self._admits(message.data):
                try:
                    link.send(message.data)
                    self._ahead += len(message.data) + _OVERHEAD
                    if self._ahead > _AHEAD:
                        await self._gate.stats()  # is answered when all before it was taken
                        self._ahead = 0
                except (EngineDied, EngineClosed) as error:
                    self._tell(written({"event": "error", "program": None, "error": str(error)}))
                    self._end(WSCloseCode.INTERNAL_ERROR, "the engine has died")

    def _admits(self, message: str) -> bool:
        """Keep count of the client's programs; False: a new one, and the server is shutting down."""
        if len(message) > _SMALL:
            return True
        try:
            data = json.loads(message)
            op, program = data["op"], data["program"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return True  # the engine says what is wrong with it
        if not isinstance(program, str):
            return True
        if op == "open":
            if self._draining:
                self._tell(written({"event": "error", "program": program, "error": "the server is shutting down"}))
                return False
            if 0 < len(program) <= MAX_NAME and len(self._programs) < MAX_OPEN:  # the engine opens no other
                self._programs.add(program)
        elif op == "close":
            self._programs.discard(program)
            if self._draining and not self._programs:
                self._end(WSCloseCode.GOING_AWAY, "the server is shutting down")
            elif self._resting and not self._programs:
                self._end(WSCloseCode.GOING_AWAY, _RESTS)
        return True

    def _hear(self, message: str) -> None:
        """What the link says; its last words are that the engine has died, and with it all programs."""
        self._tell(message)
        if not self._gate.healthy:
            self._end(WSCloseCode.INTERNAL_ERROR, "the engine has died")

    def _tell(self, message: str) -> None:
        """A message for the client."""
        if self._closing is not None:
            return
        self._characters += len(message)
        if self._characters > self._config.max_unsent:  # its reader would not read why, either
            self._end(WSCloseCode.TRY_AGAIN_LATER, f"more than max_unsent={self._config.max_unsent} characters wait")
            if self._transport is not None:
                self._transport.abort()
            return
        self._unsent.append(message)
        self._wake.set()

    def _end(self, code: int, reason: str) -> None:
        if self._closing is None:
            self._closing = (code, reason)
            self._wake.set()

    async def _send(self) -> None:
        while True:
            while self._unsent:
                message = self._unsent.popleft()
                await self._socket.send_str(message)
                self._characters -= len(message)
                self._heard = time.monotonic()
            if self._closing is not None:
                await self._hang_up()
                return
            self._wake.clear()
            await self._wake.wait()

    async def _hang_up(self) -> None:
        assert self._closing is not None
        code, reason = self._closing
        await self._socket.close(code=code, message=reason.encode()[:120])
