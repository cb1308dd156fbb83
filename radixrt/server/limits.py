"""Limits own what is bounded at the front: bodies, connections, the queue and the time in it. The engine bounds the rest.

Invariants: a refusal names the limit and its value; ``Gate`` knows of every request that is in the engine for this server, and the counts
are right again whichever way a request ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from http import HTTPStatus
from typing import Any, NoReturn

from aiohttp import web

from radixrt.engine.inputs import Prompt
from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.model.tokenizer import Tokenizer
from radixrt.request import OutputDelta, RequestOutput, SamplingParams
from radixrt.server.client import EngineClient, EngineInfo, ProgramLink
from radixrt.server.config import ServerConfig
from radixrt.server.errors import Failure, RequestFailed, UnknownField, answer
from radixrt.server.metrics import Metrics

log = logging.getLogger("radixrt.server")

_PAUSE = "5"  # seconds after which a client that was refused may ask again


class Gate:
    """An ``EngineClient`` that lets in what the limits allow, and measures what goes through."""

    def __init__(self, client: EngineClient, config: ServerConfig, metrics: Metrics) -> None:
        self._client = client
        self._config = config
        self._metrics = metrics
        self.samples = 0  # that run or wait
        self.websockets = 0

    # ---- what may come in

    @property
    def queued(self) -> int:
        """Samples that wait behind those that can run."""
        running: int = self._client.info.settings.get("max_running_requests", 64)
        return max(0, self.samples - running)

    @property
    def full(self) -> Failure | None:
        """Why nothing more is taken now."""
        most = self._config.max_queue
        if self.queued < most or (most == 0 and not self.queued):
            return None
        self._metrics.refused["max_queue"] += 1
        return Failure(429, f"the queue is full: max_queue={most} samples wait already", None, "queue_full")

    # ---- EngineClient

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._client.tokenizer

    @property
    def healthy(self) -> bool:
        return self._client.healthy

    async def start(self) -> None:
        await self._client.start()

    async def close(self) -> None:
        await self._client.close()

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
        """As ``EngineClient.stream``.

        Raises:
            RequestFailed: it has no token after ``queue_timeout``.
        """
        began, metrics = time.perf_counter(), self._metrics
        samples = min(params.n, int(self._client.info.settings.get("max_n", params.n)))  # more are refused
        self.samples += samples
        # how long a request waits is measured by its deltas; with nothing in its way they would only cost
        wanted = deltas or self.queued > 0
        source = self._client.stream(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            deltas=wanted,
        )
        last: dict[int, float] = {}  # when a sample's last tokens came
        done = False
        try:
            delta = await self._first(source)
            while delta is not None:
                now = time.perf_counter()
                if delta.token_ids and wanted:
                    if not last:
                        metrics.first_token.observe(now - began)
                    elif delta.index in last:
                        count = len(delta.token_ids)
                        metrics.inter_token.observe((now - last[delta.index]) / count, count)
                    last[delta.index] = now
                if delta.output is not None:
                    done = True
                    self._ended(delta.output, now - began, measured=wanted)
                if deltas or done:
                    yield delta
                delta = None if done else await anext(source, None)
        except InvalidRequest:
            done = True  # it never began
            raise
        finally:
            self.samples -= samples
            if not done:
                metrics.finished["gone"] += samples
            await source.aclose()

    async def _first(self, source: AsyncGenerator[OutputDelta, None]) -> OutputDelta | None:
        most = self._config.queue_timeout
        try:
            async with asyncio.timeout(most):
                return await anext(source, None)
        except TimeoutError:
            self._metrics.refused["queue_timeout"] += 1
            problem = f"the request had no token after queue_timeout={most:g} seconds"
            raise RequestFailed(Failure(503, problem, None, "queue_timeout")) from None

    def _ended(self, output: RequestOutput, seconds: float, *, measured: bool) -> None:
        metrics = self._metrics
        metrics.end_to_end.observe(seconds)
        for sample in output.samples:
            metrics.finished[str(sample.finish_reason)] += 1
        if not output.samples:
            metrics.finished["error"] += 1
        if not measured and output.completion_tokens:
            metrics.first_token.observe(output.queue_time + output.prefill_time)
            more = max((len(sample.token_ids) for sample in output.samples), default=0) - 1
            if more > 0:
                metrics.inter_token.observe(output.decode_time / more, more * len(output.samples))

    async def score(
        self, prefix: Sequence[int], choices: Sequence[Sequence[int]], *, request_id: str, cache_salt: str = ""
    ) -> RequestOutput:
        self.samples += 1
        try:
            return await self._client.score(prefix, choices, request_id=request_id, cache_salt=cache_salt)
        finally:
            self.samples -= 1

    async def embed(
        self, prompt: Sequence[int], pooling: str, *, request_id: str, cache_salt: str = ""
    ) -> RequestOutput:
        self.samples += 1
        try:
            return await self._client.embed(prompt, pooling, request_id=request_id, cache_salt=cache_salt)
        finally:
            self.samples -= 1

    async def abort(self, request_id: str) -> bool:
        return await self._client.abort(request_id)

    async def stats(self) -> dict[str, Any]:
        return await self._client.stats()

    async def tree(self, most: int) -> dict[str, Any]:
        return await self._client.tree(most)

    async def runs(self, known: Sequence[int]) -> dict[str, Any]:
        return await self._client.runs(known)

    async def flush_cache(self) -> int:
        return await self._client.flush_cache()

    def programs(self, peer: str, receive: Callable[[str], None]) -> ProgramLink:
        return self._client.programs(peer, self._metrics.measuring(receive))


# ---- bodies


async def receive(request: web.Request, seconds: float) -> None:
    """Have a request's whole body here, within ``seconds``.

    Raises:
        RequestFailed: it is not.
        web.RequestPayloadError: it does not come as its headers say.
        web.HTTPRequestEntityTooLarge: it is larger than ``max_body_bytes``.
    """
    if request.content.is_eof():  # it came with its head: nothing of it can be late
        await request.read()
        return
    try:
        async with asyncio.timeout(seconds):
            await request.read()
    except TimeoutError:
        raise RequestFailed(_late(seconds)) from None


def _late(seconds: float) -> Failure:
    problem = f"the request was not all there after receive_timeout={seconds:g} seconds"
    return Failure(408, problem, None, "receive_timeout")


_SMALL = 65_536  # bytes: a larger body is read off the event loop


async def read_object(request: web.Request) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        InvalidRequest: there is none, a name stands twice in it, or it has a number that is none (NaN, Infinity).
        web.HTTPRequestEntityTooLarge: it is larger than ``max_body_bytes``.
    """
    data = await request.read()
    if not data:
        raise InvalidRequest("body", "is empty: a JSON object is expected")
    if request.content_type != "application/json":  # also: a page of another site cannot send this unasked
        problem = f"content-type={shown(request.content_type)}: must be application/json"
        raise RequestFailed(Failure(415, problem, None, "unsupported_media_type"))
    return _parsed(data) if len(data) <= _SMALL else await asyncio.to_thread(_parsed, data)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest("body", f"is not UTF-8 (byte {error.start})") from None
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except InvalidRequest:
        raise
    except RecursionError:
        raise InvalidRequest("body", "is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest("body", f"is not JSON: {shown(str(error))}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("body", f"must be a JSON object, not {shown(value)}")
    return value


def check_fields(owner: str, data: dict[str, Any], valid: Sequence[str]) -> None:
    """Raises UnknownField, with the nearest valid name, where an object has a field that is none of ``valid``."""
    for name in data:
        if name not in valid:
            raise UnknownField(shown(name).strip("'\""), f": {owner} has no such field{nearest(name, valid)}")


def check_model(name: Any, config: ServerConfig, client: EngineClient) -> None:
    """Raises RequestFailed where a request names another model than the one that answers it."""
    if name is None:
        return
    if not isinstance(name, str):
        raise InvalidRequest("model", f"={shown(name)}: must be a string")
    names = config.served_model_names or (client.info.model,)
    if name not in names:
        problem = f"model={shown(name)}: is not served here{nearest(name, names)}"
        raise RequestFailed(Failure(404, problem, "model", "model_not_found"))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise InvalidRequest("body", f" has the field {shown(name)} twice")
            names.add(name)
    return found


def _no_number(text: str) -> NoReturn:
    raise InvalidRequest("body", f" holds {text}, which is no JSON number")


# ---- connections


def doorman(server: web.Server, most: int, seconds: float) -> Callable[[], asyncio.Protocol]:
    """What makes a connection's protocol: where ``most`` are open, one that says so and hangs up.

    Args:
        seconds: in which the head of a connection's first request must have come.
    """

    def accept() -> asyncio.Protocol:
        if len(server._connections) < most:
            return _Connection(server, seconds)
        return _Refusal(Failure(503, f"max_connections={most} connections are open", None, "too_many_connections"))

    return accept


class _Connection(web.RequestHandler):
    """One that waits for its first request only so long, and shows nobody else what is no HTTP: there may be a key in it, or a prompt."""

    __slots__ = ("_first", "_seconds")

    def __init__(self, server: web.Server, seconds: float) -> None:
        super().__init__(server, loop=server._loop, **server._kwargs)
        self._seconds = seconds
        self._first: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._first = self._loop.call_later(self._seconds, self._wait_no_longer)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._first is not None:
            self._first.cancel()
        super().connection_lost(exc)

    def _wait_no_longer(self) -> None:
        if not self._request_count and isinstance(self.transport, asyncio.WriteTransport):
            self.transport.write(_written(_late(self._seconds)))
            self.close()
            self.transport.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        log.debug("%s sent what is no HTTP request", request.remote)
        what = (message or "").strip().partition("\n")[0].rstrip(":")  # and below it, what was sent
        response = answer(Failure(status, f"this is no HTTP request: {shown(what)}", None, "bad_http"))
        response.force_close()
        return response


class _Refusal(asyncio.Protocol):
    """Tells a connection why it is closed."""

    def __init__(self, failure: Failure) -> None:
        self._answer = _written(failure)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._answer)
        transport.close()


def _written(failure: Failure) -> bytes:
    """An answer where there is no request, and the last one of its connection."""
    body = json.dumps(failure.body).encode()  # halves of characters stay escaped
    headers = {"Content-Type": "application/json", **(retry_after(failure) or {})}
    told = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    status = f"{failure.status} {HTTPStatus(failure.status).phrase}"
    return f"HTTP/1.1 {status}\r\n{told}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def retry_after(failure: Failure) -> dict[str, str] | None:
    """The header that tells a client when to come back."""
    return {"Retry-After": _PAUSE} if failure.status in (429, 503) else None
