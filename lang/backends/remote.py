"""RuntimeEndpoint: a radixrt server as a backend of programs. Nodes go out as JSON, events come back, over one connection.

Invariants: a program whose connection is lost fails; nothing is sent again by itself.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lang.backends.base import Capabilities, Emit, ProgramInfo
from lang.errors import BackendError
from radixrt.engine.nodes import VERSION, Event, Failed, Gen, Node, Role, Select, to_dict
from radixrt.engine.protocol import MAX_MESSAGE, event_from_dict, written


class JsonSession:
    """A program that is run at the other end of a channel of JSON messages."""

    def __init__(self, info: ProgramInfo, emit: Emit, send: Callable[[str], None], gone: Callable[[str], None]) -> None:
        self._id = info.id
        self._emit = emit
        self._send = send
        self._gone = gone
        self._closed = False
        self._running: set[int] = set()  # nodes that were sent, and not answered as far as they will be
        self._tell(
            op="open",
            version=VERSION,
            name=info.name,
            order=info.order,
            cache_salt=info.cache_salt,
            stream=info.stream,
        )

    def add(self, nodes: Sequence[Node]) -> None:
        message = written({"program": self._id, "op": "add", "nodes": [to_dict(node) for node in nodes]})
        if len(message) > MAX_MESSAGE:
            for node in nodes:
                problem = f"its nodes are a message of {len(message):,} characters: at most {MAX_MESSAGE:,} are taken"
                self._emit(Failed(node.id, "invalid", problem))
            return
        self._running.update(node.id for node in nodes if isinstance(node, (Gen, Select, Role)))
        if not self._closed:
            self._send(message)

    def cancel(self, nodes: Sequence[int]) -> None:
        self._tell(op="cancel", nodes=list(nodes))

    def drop(self, nodes: Sequence[int]) -> None:
        self._tell(op="drop", nodes=list(nodes))

    def close(self) -> None:
        if not self._closed:
            try:
                self._tell(op="close")
            except BackendError:  # nobody is there to be told
                pass
            self._closed = True
            self._gone(self._id)

    def hear(self, data: Mapping[str, Any]) -> None:
        """A message for this program."""
        if self._closed:
            return
        if data.get("event") == "error":
            self.fail(str(data.get("error")), "invalid")
            return
        event: Event = event_from_dict(data)
        if data["event"] != "delta":
            self._running.discard(event.node)
        self._emit(event)

    def fail(self, problem: str, kind: str = "error") -> None:
        """Nothing more will be answered."""
        for node in sorted(self._running):
            if not self._closed:
                self._emit(Failed(node, kind, problem))
        self._running.clear()

    def _tell(self, **message: Any) -> None:
        if not self._closed:
            self._send(written({"program": self._id, **message}))


class JsonBackend(ABC):
    """Programs over a channel of JSON messages: subclasses connect it, and call ``receive`` for each message."""

    name = "runtime endpoint"
    capabilities = Capabilities()

    def __init__(self) -> None:
        self._sessions: dict[str, JsonSession] = {}

    def open(self, info: ProgramInfo, emit: Emit) -> JsonSession:
        session = self._sessions[info.id] = JsonSession(info, emit, self.send, self._forget)
        return session

    @abstractmethod
    def send(self, message: str) -> None:
        """Send a message, in order; never blocks."""

    def receive(self, message: str) -> None:
        """A message has come."""
        data = json.loads(message)
        session = self._sessions.get(data.get("program") or "")
        if session is not None:
            session.hear(data)

    def lost(self, problem: str) -> None:
        """The channel is gone."""
        for session in list(self._sessions.values()):
            session.fail(problem)

    def _forget(self, program: str) -> None:
        self._sessions.pop(program, None)


class RuntimeEndpoint(JsonBackend):
    """A radixrt server.

    Args:
        base_url: of the server, ``http://127.0.0.1:8000``.
        api_key: where the server wants one.
        timeout: seconds to connect; a model that is loaded for this program takes its time of them.
        model: its name, where the server has several; nothing: the first.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout: float = 30.0, model: str | None = None
    ) -> None:
        super().__init__()
        if not base_url.startswith(("http://", "https://")):
            raise BackendError(f"base_url={base_url!r}: must begin with http:// or https://")
        self.base_url = base_url.rstrip("/")
        self.name = f"runtime at {self.base_url}"
        self._api_key = api_key
        self._timeout = timeout
        self._query = {} if model is None else {"model": model}
        self._http: Any = None
        self._socket: Any = None
        self._outgoing: asyncio.Queue[str] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._connecting: asyncio.Lock | None = None

    async def start(self) -> None:
        if self._socket is not None and not self._socket.closed:
            return
        if self._connecting is None:
            self._connecting = asyncio.Lock()
        async with self._connecting:
            if self._socket is not None and not self._socket.closed:
                return
            await self._connect()

    async def _connect(self) -> None:
        import aiohttp

        await self.aclose()
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        self._http = aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=None, connect=self._timeout)
        )
        try:
            async with asyncio.timeout(self._timeout):
                self._socket = await self._http.ws_connect(
                    f"{self.base_url}/v1/programs/ws", params=self._query, max_msg_size=MAX_MESSAGE, heartbeat=30.0
                )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = await self._reason() if getattr(error, "status", 0) == 404 else ""
            await self._http.close()
            problem = reason or f"cannot be reached ({error or type(error).__name__})"
            raise BackendError(f"{self.base_url}: {problem}") from error
        self._outgoing = asyncio.Queue()
        self._tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._write())]

    async def _reason(self) -> str:
        """What the server says of a connection that it refuses; nothing where it says nothing."""
        try:
            async with asyncio.timeout(self._timeout):
                async with self._http.get(f"{self.base_url}/v1/programs/ws", params=self._query) as answer:
                    return str((await answer.json())["error"]["message"])
        except Exception:
            return ""

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self.lost("the connection was closed")
        if self._http is not None:
            await self._http.close()
        self._http = self._socket = None

    async def stats(self) -> dict[str, Any]:
        """The server's ``/server_info``."""
        await self.start()
        async with self._http.get(f"{self.base_url}/server_info", params=self._query) as answer:
            answer.raise_for_status()
            data: dict[str, Any] = await answer.json()
            return data

    def send(self, message: str) -> None:
        if self._outgoing is None or self._socket is None or self._socket.closed:
            raise BackendError(f"{self.base_url}: is not connected")
        self._outgoing.put_nowait(message)

    async def _write(self) -> None:
        assert self._outgoing is not None
        while True:
            await self._socket.send_str(await self._outgoing.get())

    async def _read(self) -> None:
        problem = f"{self.base_url}: the connection was lost"
        try:
            async for message in self._socket:
                self.receive(message.data)
        except (ValueError, KeyError, TypeError) as error:
            problem = f"{self.base_url}: sent what is no event ({error})"
        finally:
            self.lost(problem)
