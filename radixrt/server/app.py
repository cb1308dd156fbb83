"""The application: every route behind the same doors (request id, errors, origin, key, queue), and the life of a server.

Invariants: no answer shows a stack trace or the API key, no log line a prompt; every route but ``/health`` and the page asks for the key; after SIGTERM
nothing new begins, and what runs may finish within ``drain_seconds``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import HttpVersion11, web

from radixrt import __version__
from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.server import anthropic, ollama, page
from radixrt.server.client import EngineClient
from radixrt.server.config import ServerConfig
from radixrt.server.errors import Failure, answer, failure_of, reword
from radixrt.server.hosts import Hosts, is_loopback
from radixrt.server.limits import doorman, receive, retry_after
from radixrt.server.metrics import CONTENT_TYPE
from radixrt.server.models import Models, gigabytes
from radixrt.server.openapi import description
from radixrt.server.plans import Named, make_models
from radixrt.server.rooms import Board, Rooms

log = logging.getLogger("radixrt.server")
access = logging.getLogger("radixrt.access")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_OPEN = ("/health", "/")  # routes that ask for no key, and show nothing of anybody
_QUIET = ("/health", "/metrics")  # work while the server shuts down, and are no work
# How the errors of a route read, where not as OpenAI's.
_FORMS = {**anthropic.ERRORS, **ollama.ERRORS}
_BACKLOG = 4096


class Front:
    """What the routes of one server share.

    Fields:
        active: requests that are being answered, but for ``/health`` and ``/metrics``. draining: no new work is taken.
    """

    def __init__(self, served: EngineClient | Models, config: ServerConfig, *, local: bool) -> None:
        self.config = config
        self.rooms = Board(served, config) if isinstance(served, Models) else Rooms(served, config)
        self.metrics, self.gate, self.programs = self.rooms.metrics, self.rooms.gate, self.rooms.programs
        self.active = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._keys = [_digest(key) for key in config.api_key]
        guarded = config.allowed_hosts or (local and not self._keys)
        self._hosts = Hosts([config.host, *config.allowed_hosts]) if guarded else None
        self._openapi = json.dumps(description()).encode()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/metrics", self.figures),
            web.get("/openapi.json", self.openapi),
            *self.rooms.routes(),
        ]

    # ---- routes

    async def health(self, request: web.Request) -> web.Response:
        """200: the engine answers, and work is taken."""
        if self.draining:
            return _status(503, "draining")
        return _status(*await self.rooms.health())

    async def figures(self, request: web.Request) -> web.Response:
        return web.Response(body=await self.rooms.figures(), headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, request: web.Request) -> web.Response:
        return web.Response(body=self._openapi, content_type="application/json")

    # ---- doors

    def refusal(self, request: web.Request) -> Failure | None:
        """Why a request is not handled at all."""
        path, origin = request.path, request.headers.get("Origin")
        called = request.headers.getall("Host", [])
        if self._hosts is not None and not self._hosts.allow(called):
            names = ", ".join(map(shown, called))
            return Failure(403, f"host {names} is not among allowed_hosts", None, "host_not_allowed")
        if origin is not None and not self._allowed(origin, request):
            return Failure(403, f"origin {shown(origin)} is not among cors_origins", None, "origin_not_allowed")
        if self._keys and path not in _OPEN and not self._knows_key(request):
            return Failure(
                401, "the API key is missing or wrong: send Authorization: Bearer KEY", None, "invalid_api_key"
            )
        if self.draining and path not in _QUIET:
            return Failure(503, "the server is shutting down", None, "shutting_down")
        coding = request.headers.get("Content-Encoding", "identity")
        if coding.lower() != "identity":  # what is small here may be anything when it is unpacked
            problem = f"content-encoding={shown(coding)}: bodies are taken as they are, not compressed"
            return Failure(415, problem, None, "unsupported_encoding")
        length, most = request.content_length or 0, self.config.max_body_bytes
        if length > most:
            self.metrics.refused["max_body_bytes"] += 1
            return _too_large(length, most)
        return self.rooms.full(request)

    def _allowed(self, origin: str, request: web.Request) -> bool:
        return (
            origin in self.config.cors_origins
            or "*" in self.config.cors_origins
            or origin.partition("://")[2] == request.headers.get("Host")
        )

    def _knows_key(self, request: web.Request) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = request.headers.get("X-Api-Key", "")
        digest = _digest(given.strip())
        return sum(hmac.compare_digest(digest, key) for key in self._keys) > 0  # all of them are compared

    def cors(self, request: web.Request) -> dict[str, str]:
        origin = request.headers.get("Origin")
        if not origin or not self.config.cors_origins or not self._allowed(origin, request):
            return {}
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin", "Access-Control-Expose-Headers": "X-Request-Id, Warning"}  # fmt: skip

    # ---- work that runs

    def enter(self) -> None:
        self.active += 1

    def leave(self) -> None:
        self.active -= 1
        if not self.active:
            self._idle.set()

    async def drain(self) -> bool:
        """Take nothing new, and wait for what runs; False: some of it did not finish in time."""
        self.draining = True
        self.rooms.drain()
        try:
            async with asyncio.timeout(self.config.drain_seconds):
                while self.active:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True


FRONT: web.AppKey[Front] = web.AppKey("front", Front)
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)


def make_app(
    served: EngineClient | Models, config: ServerConfig | None = None, *, local: bool | None = None
) -> web.Application:
    """The application on an engine that is ready, or on several models. Run it with ``handler_cancellation=True``: a client that is gone ends its request.

    Args:
        local: only this machine reaches it; nothing: where ``host`` is a loopback address.
    """
    config = config or ServerConfig()
    front = Front(served, config, local=is_loopback(config.host.lower()) if local is None else local)
    app = web.Application(middlewares=[_doors(front)], client_max_size=front.config.max_body_bytes)
    app[FRONT] = front
    routes = front.routes()
    app.add_routes(web.RouteDef(r.method, r.path, r.handler, {**r.kwargs, "expect_handler": _expect}) for r in routes)
    app.on_response_prepare.append(_headers(front))
    return app


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Judge an ``Expect`` header: aiohttp asks before the doors, and would answer in plain text."""
    expected = request.headers.get("Expect", "")
    if expected.lower() != "100-continue":
        return _failed(Failure(417, f"expect={shown(expected)}: must be 100-continue", None, "expectation_failed"))
    if request.version == HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the answer was sent yet
    return None


def _doors(front: Front) -> Any:
    @web.middleware
    async def doors(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-Request-Id", "")
        request[REQUEST_ID] = given if _ID.fullmatch(given) else uuid.uuid4().hex
        began, status = time.perf_counter(), 499  # the client went away
        try:
            if (
                request.method == "OPTIONS"
                and "Access-Control-Request-Method" in request.headers
                and front.cors(request)
            ):
                response: web.StreamResponse = _preflight()
            else:
                failure = front.refusal(request)
                response = await _handled(front, request, handler) if failure is None else _failed(failure)
            if request.path in _FORMS:
                reword(response, _FORMS[request.path])
            status = response.status
            return response
        finally:
            route = request.match_info.route.resource
            name = route.canonical if route is not None else "-"
            method = request.method if request.method in ("GET", "POST", "DELETE", "OPTIONS", "HEAD") else "other"
            front.metrics.answers[name, method, status] += 1
            if front.config.access_log and not (
                status == 200 and name in page.POLLED
            ):  # an open page asks all the time
                line = {
                    "id": request[REQUEST_ID],
                    "peer": request.remote,
                    "method": method,
                    "route": name,
                    "status": status,
                    "seconds": round(time.perf_counter() - began, 6),
                }
                access.info("%s", json.dumps(line))

    return doors


async def _handled(front: Front, request: web.Request, handler: Handler) -> web.StreamResponse:
    work, entered = request.path not in _QUIET, False
    try:
        if request.method == "POST" and request.match_info.http_exception is None:
            await receive(request, front.config.receive_timeout)
            failure = front.refusal(request)  # a body may have taken its time
            if failure is not None:
                return _failed(failure)
        if work:
            front.enter()
            entered = True
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        front.metrics.refused["max_body_bytes"] += 1
        return _failed(_too_large(None, front.config.max_body_bytes))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        problem = f"{shown(error.method)} {shown(request.path)}: this route takes {allowed}"
        return _failed(Failure(405, problem, None, "method_not_allowed"), {"Allow": allowed})
    except web.HTTPNotFound:
        known = sorted(
            {route.resource.canonical for route in request.app.router.routes() if route.resource is not None}
        )
        return _failed(Failure(404, f"{shown(request.path)}: there is no such route{nearest(request.path, known)}", None, "not_found"))  # fmt: skip
    except web.HTTPException as error:
        return _failed(Failure(error.status, error.reason, None, None))
    except ConnectionResetError:  # the client went while it was written to: nobody reads this, and nothing failed
        return _failed(Failure(499, "the client closed the connection", None, "client_closed"))
    except asyncio.CancelledError:
        raise
    except Exception as error:
        failure = failure_of(error)
        if failure.status == 500:
            log.error("request %s failed", request[REQUEST_ID])
        return _failed(failure)
    finally:
        if entered:
            front.leave()


def _headers(front: Front) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    async def add(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["X-Request-Id"] = request.get(REQUEST_ID, "-")
        response.headers["Server"] = "radixrt"
        response.headers.update(front.cors(request))

    return add


def _failed(failure: Failure, headers: Mapping[str, str] | None = None) -> web.Response:
    response = answer(failure, headers={**(retry_after(failure) or {}), **(headers or {})})
    if failure.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _too_large(length: int | None, most: int) -> Failure:
    size = "" if length is None else f" of {length} bytes"
    return Failure(413, f"the body{size} is larger than max_body_bytes={most}", None, "body_too_large")


def _preflight() -> web.Response:
    return web.Response(
        status=204,
        headers={
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Api-Key, X-Request-Id",
            "Access-Control-Max-Age": "600",
        },
    )


def _status(status: int, text: str) -> web.Response:
    return web.json_response({"status": text}, status=status)


def _digest(key: str) -> bytes:
    """Keys are compared by these: of one length, whatever was sent."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


# ---- the life of a server


async def serve(
    config: ServerConfig,
    engine_settings: Mapping[str, Any],
    models: Sequence[Named] = (),
    *,
    client: EngineClient | Models | None = None,
    ready: Callable[[str], None] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; the exit code.

    Args:
        models: several models by name, which share the settings of the engine; nothing: the one model of the settings.
        client: an engine to serve, instead of one made from the settings.
        ready: called with the address when requests are taken.

    Raises:
        InvalidRequest: an address that cannot be listened on, or a wrong setting.
        ModelError: the model cannot be loaded.
    """
    logging.getLogger("radixrt").setLevel(config.log_level.upper())
    listening = _bind(config)
    address, local = _address(listening), is_loopback(listening.getsockname()[0])
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    loaded = False

    def stop() -> None:
        if not loaded or stopped.is_set():  # there is nothing to finish, or the second time: now
            task.cancel()
        stopped.set()

    with contextlib.ExitStack() as stack:
        stack.callback(listening.close)
        for name in (signal.SIGTERM, signal.SIGINT):
            # not in the main thread, whoever runs us stops us
            with contextlib.suppress(ValueError, NotImplementedError):
                loop.add_signal_handler(name, stop)
                stack.callback(loop.remove_signal_handler, name)
        runner: web.AppRunner | None = None
        finished = True
        try:
            say(f"radixrt {__version__}: loading the model")
            if client is None and models:  # may fetch one
                client = await asyncio.to_thread(make_models, models, config, engine_settings)
            client = client or _client(config, engine_settings)
            await client.start()
            app = make_app(client, config, local=local)
            runner = web.AppRunner(
                app,
                handler_cancellation=True,
                access_log=None,
                shutdown_timeout=0.2,
                auto_decompress=False,
                keepalive_timeout=config.idle_timeout,
            )
            await runner.setup()
            assert runner.server is not None
            server = await loop.create_server(
                doorman(runner.server, config.max_connections, config.receive_timeout), sock=listening, backlog=_BACKLOG
            )
            stack.callback(server.close)
            for line in lines(client, config, address, local=local):
                say(line)
            loaded = True
            if ready is not None:
                ready(address)
            await stopped.wait()
            say(f"stopping: {app[FRONT].active} requests may finish within {config.drain_seconds:g} seconds")
            finished = await app[FRONT].drain()
        except asyncio.CancelledError:
            if not stopped.is_set():
                raise
            task.uncancel()
            finished = False
        finally:
            if runner is not None:
                await runner.cleanup()
            if client is not None:
                await client.close()
            if not loaded and sys.stderr.isatty():
                say("\x1b[?25h")  # a bar that was cut short has left the cursor hidden
        say("stopped" if finished else "stopped before all requests were finished")
    return 0


def lines(client: EngineClient | Models, config: ServerConfig, address: str, *, local: bool) -> list[str]:
    """What was decided, in plain words."""
    key = "an API key is asked for" if config.api_key else "no API key is asked for"
    found = [
        *(_models(client) if isinstance(client, Models) else _model(client, config)),
        f"  address  {address} (OpenAI's API: {address}/v1); {key}",
    ]
    if not config.api_key and not local:
        found.append("  warning  everybody who reaches this address can use the server: set --api-key")
    return [*found, "ready"]


def _models(models: Models) -> list[str]:
    limit = f"{gigabytes(models.limit)} and {models.most} at once"
    return [
        *(
            f"  model    {one.name}: {one.info.model}, {gigabytes(one.need)} with a pool of {one.info.pool_tokens:,} tokens, "
            f"{'loaded' if one.loaded else 'loaded when a request names it'}"
            for one in models.residents.values()
        ),
        f"  limit    {limit}; a model that a request names is loaded, and for it the least recently used one is unloaded",
    ]


def _model(client: EngineClient, config: ServerConfig) -> list[str]:
    info = client.info
    names = ", ".join(config.served_model_names) or info.model
    return [
        f"  model    {info.model}" + (f", served as {names}" if names != info.model else ""),
        f"  dtype    {info.dtype} on {info.device}, kernels: {info.kernels}",
        f"  context  {info.context_length:,} tokens, prompt and output together",
        f"  pool     {info.pool_tokens:,} tokens of keys and values, for running requests and the cache",
        f"  engine   {'in this process' if config.in_process else 'in a process of its own'}",
    ]


def say(line: str) -> None:
    """A line for the person who started the server."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        print(line, file=sys.stderr, flush=True)


def _client(config: ServerConfig, settings: Mapping[str, Any]) -> EngineClient:
    if config.in_process:
        from radixrt.engine.async_engine import AsyncEngine
        from radixrt.server.local import LocalClient

        return LocalClient(AsyncEngine(**settings, progress=True))
    from radixrt.server.process import ProcessClient

    return ProcessClient(dict(settings), progress=True)


def _bind(config: ServerConfig) -> socket.socket:
    """Take the address before the model is loaded: an error comes at once."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
        except BaseException:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequest("host", f"={config.host} port={config.port}: cannot be listened on ({reason})") from None
    listening.setblocking(False)
    return listening


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
