"""Http owns the talk with an endpoint: one JSON request at a time in, one JSON answer out, tried again as long as
patience lasts.

Invariants: a key goes to the endpoint's own address only (no redirects) and is in no message; an answer is read up to
a bound; a request that is cancelled is closed. What may pass (no connection, 408, 425, 429, 5xx, an answer that is no
JSON) is tried again with growing pauses, at least those that ``Retry-After`` asks for. ``EndpointDown`` where nobody
was answered for ``patience`` seconds, ``Refused`` where only this request is at fault.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from radixrt.errors import InvalidRequest, RadixrtError, shown

MOST_BYTES = 16 * 2**20  # of an answer
_MOST_WORDS = 300  # characters of a server's own words in a message
_FIRST, _LONGEST = 0.5, 30.0  # seconds between tries
_CONNECT = 10.0  # seconds
_TRIES = 5  # after which a request fails that the server cannot answer while it answers others
_BUSY = (429, 503)
_PASSES = (408, 425, 429)
_NEVER = (501, 505)


class EndpointDown(RadixrtError):
    """Nobody is answered any more, or nobody will be."""


class Refused(RadixrtError):
    """The server does not answer this request; it may answer others. ``status``: what it said; 0: it said nothing."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class _Passing:
    """Why a try failed that may be repeated. ``wait``: seconds that the server asks for."""

    problem: str
    busy: bool = False
    wait: float = 0.0


class Http:
    """One endpoint.

    Args:
        base: its address, without a path of the API. key: sent as a bearer token; "": none.
        patience: seconds without any answer after which it counts as down. timeout: seconds of one try.
        sleep, clock: for tests.
    """

    def __init__(
        self,
        base: URL,
        key: str = "",
        *,
        patience: float = 60.0,
        timeout: float = 600.0,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._base, self._key = base, key
        self._patience, self._timeout = patience, timeout
        self._sleep, self._clock = sleep, clock
        self._session: aiohttp.ClientSession | None = None
        self._answered = clock()  # the last time that anything was

    async def start(self) -> None:
        if not self._key.isprintable():
            raise InvalidRequest(
                "endpoint", ": the key in RADIXRT_API_KEY or OPENAI_API_KEY has a line break or control character in it"
            )
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        connector = aiohttp.TCPConnector(limit=0)  # who asks bounds how many are asked
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        self._answered = self._clock()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that the endpoint answers; GET without a body.

        Raises:
            Refused, EndpointDown: see above.
        """
        data = None if body is None else json.dumps(body, ensure_ascii=False).encode(errors="replace")
        failed: float | None = None
        tries = 0
        while True:
            found = await self._once(path, data)
            if not isinstance(found, _Passing):
                self._answered = self._clock()
                return found
            now = self._clock()
            failed = now if failed is None else failed
            tries += 1
            others = self._answered > failed
            if not found.busy and others and tries >= _TRIES:
                raise Refused(0, f"{found.problem}, {tries} times, while it answered others")
            left = self._patience - (now - max(failed, self._answered))
            pause = min(_LONGEST, _FIRST * 2 ** min(tries - 1, 10)) * random.uniform(0.75, 1.0)
            if left <= 0 or found.wait > left:
                asked = f", and asks to wait {found.wait:,.0f} seconds" if found.wait > max(left, 0) else ""
                raise EndpointDown(
                    f"{self.name} {found.problem}{asked}; it was given patience={self._patience:g} seconds"
                )
            await self._sleep(max(found.wait, min(pause, left)))

    @property
    def name(self) -> str:
        return str(self._base)

    # ---- inside

    async def _once(self, path: str, data: bytes | None) -> dict[str, Any] | _Passing:
        if self._session is None:
            raise EndpointDown(f"{self.name}: the connection was closed")
        url = self._base.joinpath(*path.strip("/").split("/"))
        headers = {"Content-Type": "application/json"} if data is not None else {}
        # what takes no work is answered at once, or the endpoint is down
        limit = self._timeout if data is not None else min(self._timeout, max(self._patience, _CONNECT))
        try:
            async with self._session.request(
                "GET" if data is None else "POST",
                url,
                data=data,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=limit, sock_connect=_CONNECT),
            ) as response:
                raw = await self._read(response)
                return self._judged(response, raw)
        except TimeoutError:
            return _Passing(f"did not answer within {limit:g} seconds")
        except (aiohttp.InvalidURL, aiohttp.TooManyRedirects) as error:
            raise EndpointDown(f"{self.name}: {type(error).__name__}") from None
        except (aiohttp.ClientError, OSError) as error:
            return _Passing(f"cannot be reached ({self._words(str(error) or type(error).__name__)})")

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in response.content.iter_chunked(65_536):
            size += len(part)
            if size > MOST_BYTES:
                raise Refused(response.status, f"answered with more than {MOST_BYTES} bytes")
            parts.append(part)
        return b"".join(parts)

    def _judged(self, response: aiohttp.ClientResponse, raw: bytes) -> dict[str, Any] | _Passing:
        status = response.status
        if 300 <= status < 400:
            raise EndpointDown(
                f"{self.name} answered {status} to /{response.url.path.strip('/')}: give the address it moved to"
            )
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            value = None
        if 200 <= status < 300:
            if not isinstance(value, dict):
                return _Passing("answered something that is no JSON object")
            if value.get("error") and not (value.get("choices") or value.get("data")):  # of whom it asked in its turn
                return _Passing(f"answered {status} with an error: {self._words(_told(value, raw))}")
            return value
        problem = f"answered {status}: {self._words(_told(value, raw))}"
        if status in _PASSES or (status >= 500 and status not in _NEVER):
            return _Passing(problem, status in _BUSY, self._wait(response.headers.get("Retry-After", "")))
        if status in (401, 403):
            raise EndpointDown(f"{self.name} {problem}; the key is read from RADIXRT_API_KEY or OPENAI_API_KEY")
        if status == 402:  # nothing is left to pay with
            raise EndpointDown(f"{self.name} {problem}")
        raise Refused(status, problem)

    def _words(self, text: str) -> str:
        """A server's own words: short, on one line, and without the key."""
        text = text.replace(self._key, "***") if self._key else text
        return shown(text, _MOST_WORDS).strip("'\"")

    @staticmethod
    def _wait(value: str) -> float:
        """Seconds of a ``Retry-After`` header: a number, or a date."""
        try:
            seconds = float(value)
            return max(seconds, 0.0) if math.isfinite(seconds) else 0.0
        except ValueError:
            pass
        try:
            at = email.utils.parsedate_to_datetime(value).timestamp()
        except (ValueError, TypeError, OverflowError):
            return 0.0
        return max(0.0, at - time.time())


def _told(value: Any, raw: bytes) -> str:
    """What an error's body says."""
    if isinstance(value, dict):
        inner = value.get("error")
        for message in (
            inner.get("message") if isinstance(inner, dict) else inner,
            value.get("message"),
            value.get("detail"),
        ):
            if isinstance(message, str) and message:
                return message
    return raw[:_MOST_WORDS].decode(errors="replace") or "nothing"


def address(endpoint: str) -> URL:
    """The address of an endpoint as people write it, with or without ``/v1``.

    Raises:
        InvalidRequest: it is none, or has a user or password in it.
    """
    wrong = InvalidRequest("endpoint", f"={shown(endpoint)}: must be like http://127.0.0.1:8000/v1")
    if not isinstance(endpoint, str):
        raise wrong
    try:
        url = URL(endpoint.strip())
    except ValueError:
        raise wrong from None
    if url.user is not None or url.password is not None or url.query_string or url.fragment:
        raise InvalidRequest(
            "endpoint", "has more than an address in it: a key is read from RADIXRT_API_KEY or OPENAI_API_KEY"
        )
    if url.scheme not in ("http", "https") or not url.host:
        raise wrong
    path = url.path.rstrip("/").removesuffix("/v1")
    return url.with_path(path or "/")
