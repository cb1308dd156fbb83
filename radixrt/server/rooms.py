"""Rooms: the routes that ask an engine. One model has one set of them; a ``Board`` answers for several, and picks the set by the model's name.

Invariants: a request is answered by the model that it names, or by the first where it names none; its model stays loaded until the answer is
told; what only looks (a page that is open, metrics, the lists of models) neither loads a model nor keeps it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.server import anthropic, embeddings, ollama, openai, page, responses
from radixrt.server.client import EngineClient
from radixrt.server.config import ServerConfig
from radixrt.server.errors import Failure, RequestFailed
from radixrt.server.limits import Gate, read_object
from radixrt.server.metrics import Metrics, exposition
from radixrt.server.models import Models, Resident
from radixrt.server.native import Native
from radixrt.server.ollama_requests import keep_alive
from radixrt.server.programs import Programs
from radixrt.server.responses_store import ResponseStore

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_READERS = (
    "/api/show",
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
)  # no engine is asked
_LISTS = {"/v1/models": "data", "/api/tags": "models"}
_KEPT = ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings")  # take a keep_alive
_WORK = (
    "/v1/chat/completions", "/v1/completions", "/v1/programs", "/generate", "/score", "/v1/responses", "/v1/messages",
    "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank",
)  # fmt: skip


class Rooms:
    """The routes of one model."""

    def __init__(
        self, client: EngineClient, config: ServerConfig, store: ResponseStore | None = None, metrics: Metrics | None = None
    ) -> None:  # fmt: skip
        self.config = config
        self.metrics = metrics or Metrics(client, next(iter(config.served_model_names), None))
        self.gate = Gate(client, config, self.metrics)
        self.native = Native(self.gate, config)
        self.programs = Programs(self.gate, config, self.metrics)
        self._store = store

    def routes(self) -> list[web.RouteDef]:
        gate, config = self.gate, self.config
        return [
            *openai.routes(gate, config),
            *self.native.routes(),
            *self.programs.routes(),
            *embeddings.routes(gate, config),
            *responses.routes(gate, config, self._store),
            *anthropic.routes(gate, config),
            *ollama.routes(gate, config),
            *page.routes(gate, config),
        ]

    def full(self, request: web.Request) -> Failure | None:
        """Why a request is not taken now."""
        return self.gate.full if request.method == "POST" and request.path in _WORK else None

    async def health(self) -> tuple[int, str]:
        """The status and the word of ``/health``."""
        return (200, "ok") if await self.native.answering() else (503, "unhealthy")

    async def figures(self) -> bytes:
        return await self.metrics.text()

    def drain(self) -> None:
        self.programs.drain()


class Board:
    """The routes of several models.

    Fields:
        metrics: of the doors; each model has its own beside them.
    """

    def __init__(self, models: Models, config: ServerConfig) -> None:
        self.models, self.config = models, config
        store = responses.new_store(config)
        self.rooms = {
            name: Rooms(one, replace(config, served_model_name=(name,)), store)
            for name, one in models.residents.items()
        }
        for name, one in models.residents.items():
            one.rest = self.rooms[name].programs.rest
        self._first = self.rooms[models.default.name]
        self.metrics = self._first.metrics  # of which the doors' figures are
        self.gate, self.native, self.programs = self._first.gate, self._first.native, self._first.programs

    def routes(self) -> list[web.RouteDef]:
        tables = {name: rooms.routes() for name, rooms in self.rooms.items()}
        found = []
        for i, route in enumerate(tables[self.models.default.name]):
            handlers: dict[str, Any] = {name: table[i].handler for name, table in tables.items()}
            found.append(web.RouteDef(route.method, route.path, self._door(route.method, route.path, handlers), route.kwargs))  # fmt: skip
        return found

    def full(self, request: web.Request) -> Failure | None:
        """It depends on the model."""
        return None

    async def health(self) -> tuple[int, str]:
        """Unhealthy: no model that is loaded answers; degraded: one of them does not."""
        loaded = [name for name, one in self.models.residents.items() if one.open]
        answers = await asyncio.gather(*(self.rooms[name].native.answering() for name in loaded))
        if all(answers):
            return 200, "ok"
        return (200, "degraded") if any(answers) else (503, "unhealthy")

    async def figures(self) -> bytes:
        await asyncio.gather(*(rooms.metrics.refresh() for rooms in self.rooms.values()))
        return exposition([*(rooms.metrics.collect() for rooms in self.rooms.values()), self._own()])

    def _own(self) -> list[Metric]:
        found: list[Metric] = []
        for kind, name, what, read in _OWN:
            family = kind(name, what, labels=["model_name"])
            for one in self.models.residents.values():
                family.add_metric([one.name], read(one))
            found.append(family)
        return found

    def drain(self) -> None:
        for rooms in self.rooms.values():
            rooms.drain()

    # ---- doors

    def _door(self, method: str, path: str, handlers: Mapping[str, Handler]) -> Handler:
        first = handlers[self.models.default.name]

        async def joined(request: web.Request) -> web.StreamResponse:
            return await self._joined(request, handlers, _LISTS[path])

        async def running(request: web.Request) -> web.StreamResponse:
            return await self._running(request, handlers)

        async def one(request: web.Request) -> web.StreamResponse:
            name = request.match_info["model"]
            if name not in handlers:
                raise RequestFailed(_missing(name, handlers))
            return await handlers[name](request)

        async def look(request: web.Request) -> web.StreamResponse:
            return await handlers[self._named(_queried(request)).name](request)

        async def socket(request: web.Request) -> web.StreamResponse:
            resident = self._named(_queried(request))
            if not web.WebSocketResponse().can_prepare(request):  # it says so, without the model
                return await handlers[resident.name](request)
            self._admit(resident)
            async with self.models.using(resident, socket=True):
                return await handlers[resident.name](request)

        async def ask(request: web.Request) -> web.StreamResponse:
            return await self._ask(request, path, handlers)

        if path in _LISTS:
            return joined
        if path == "/api/ps":
            return running
        if path == "/v1/models/{model:.+}":
            return one
        if path == "/v1/programs/ws":
            return socket
        if path in ("/v1/tree", "/v1/runs", "/server_info", "/get_server_info"):
            return look
        if method == "POST" and "{" not in path and path != "/v1/schema/check":
            return ask
        return first  # of no model: the page, what is stored, the version

    async def _ask(self, request: web.Request, path: str, handlers: Mapping[str, Handler]) -> web.StreamResponse:
        body = await self._body(request)
        given = body.model if body.model is not None else body.name if path == "/api/show" else None
        resident = self._named(given if given is not None else _queried(request), tagged=path.startswith("/api/"))  # fmt: skip
        handler = handlers[resident.name]
        if path in _READERS or path == "/flush_cache":
            if path in _READERS:
                await resident.read()
            return await handler(request)
        full = self.rooms[resident.name].gate.full if path in _WORK else None
        if full is not None:
            raise RequestFailed(full)
        self._admit(resident)
        keep = keep_alive(body.keep_alive) if path in _KEPT else None
        ends = keep == 0 and path in _KEPT[:2] and body.asks_nothing
        if ends and not resident.open:
            return ollama.unloaded(resident.name, chats=path == "/api/chat")
        request[ollama.UNLOADS] = ends
        async with self.models.using(resident, keep=keep):
            return await handler(request)

    def _admit(self, resident: Resident) -> None:
        """Raises RequestFailed: as many wait for the model as may."""
        most = self.config.max_queue
        if resident.waiting > most:
            self.rooms[resident.name].metrics.refused["max_queue"] += 1
            problem = f"the queue is full: max_queue={most} requests wait for the model {resident.name}"
            raise RequestFailed(Failure(429, problem, None, "queue_full"))

    async def _body(self, request: web.Request) -> _Body:
        """What a body says of its model; what is no body that a route would take is refused here, before a model is loaded for it."""
        data = await request.read()
        if not data:
            return _Body()
        if request.content_type != "application/json":
            problem = f"content-type={shown(request.content_type)}: must be application/json"
            raise RequestFailed(Failure(415, problem, None, "unsupported_media_type"))
        try:
            return _DECODER.decode(data)
        except (msgspec.DecodeError, RecursionError):
            found = await read_object(request)  # says what is wrong, but for halves of characters, which it takes
            asks = msgspec.Raw(b"true" if found.get("messages") or found.get("prompt") else b"")
            return _Body(found.get("model"), found.get("name"), found.get("keep_alive"), asks)

    def _named(self, name: Any, *, tagged: bool = False) -> Resident:
        """The model of a name; ``tagged``: a ``:latest`` may stand behind it."""
        residents = self.models.residents
        if name is None:
            return self.models.default
        if tagged and isinstance(name, str) and name not in residents:
            name = name.removesuffix(":latest")
        if not isinstance(name, str):
            raise RequestFailed(Failure(400, f"model={shown(name)}: must be a string", "model", "invalid_value"))
        if name not in residents:
            raise RequestFailed(_missing(name, residents))
        return residents[name]

    # ---- lists

    async def _joined(self, request: web.Request, handlers: Mapping[str, Handler], key: str) -> web.Response:
        found: dict[str, Any] = {}
        for name, handler in handlers.items():
            one = _told(await handler(request))
            for entry in one[key]:
                if key == "data":
                    entry |= {"loaded": self.models.residents[name].loaded}
            found = one if not found else {**found, key: [*found[key], *one[key]]}
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")

    async def _running(self, request: web.Request, handlers: Mapping[str, Handler]) -> web.Response:
        models, now = [], asyncio.get_running_loop().time()
        for name, handler in handlers.items():
            resident = self.models.residents[name]
            if not resident.loaded:
                continue
            for entry in _told(await handler(request))["models"]:
                entry["size_vram"] = resident.held if entry["size_vram"] else 0
                entry["size"] = resident.held
                left = resident.keep if resident.leases else resident.expires - now
                if left != float("inf"):
                    entry["expires_at"] = datetime.fromtimestamp(time.time() + left, UTC).isoformat()
                models.append(entry)
        return web.Response(body=msgspec.json.encode({"models": models}), content_type="application/json")


class _Body(msgspec.Struct):
    """What is read of a body before it is known whose it is."""

    model: Any = None
    name: Any = None
    keep_alive: Any = None
    messages: msgspec.Raw = msgspec.Raw()  # not read here, where everybody waits: it may be large
    prompt: msgspec.Raw = msgspec.Raw()

    @property
    def asks_nothing(self) -> bool:
        return not any(text and msgspec.json.decode(text) for text in (self.messages, self.prompt))


_DECODER = msgspec.json.Decoder(_Body)
_OWN: tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, Callable[[Resident], float]], ...] = (
    (GaugeMetricFamily, "radixrt_model_loaded", "1: the model is loaded", lambda one: float(one.loaded)),
    (GaugeMetricFamily, "radixrt_model_memory_bytes", "Bytes that a model takes now", lambda one: one.held),
    (GaugeMetricFamily, "radixrt_model_waiting", "Requests that wait for their model", lambda one: one.waiting),
    (CounterMetricFamily, "radixrt_model_loads", "Times that a model was loaded", lambda one: one.loads),
    (CounterMetricFamily, "radixrt_model_load_failures", "Times that a model could not be loaded", lambda one: one.failures),
    (CounterMetricFamily, "radixrt_model_unloads", "Times that a model was unloaded", lambda one: one.unloads),
)  # fmt: skip


def _queried(request: web.Request) -> str | None:
    """The model that an address names."""
    names = request.query.getall("model", [None])
    if len(names) > 1:
        raise InvalidRequest("model", f"={shown(names[1])}: stands twice in the address")
    return names[0]


def _missing(name: str, known: Mapping[str, Any]) -> Failure:
    return Failure(404, f"model={shown(name)}: is not served here{nearest(name, known)}", "model", "model_not_found")


def _told(response: web.StreamResponse) -> dict[str, Any]:
    assert isinstance(response, web.Response) and isinstance(response.body, bytes)
    value: dict[str, Any] = json.loads(response.body)
    return value
