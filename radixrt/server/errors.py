"""Errors as OpenAI's clients read them: ``{"error": {"message", "type", "param", "code"}}``, for answers and for streams; ``reword``: as others do.

Invariants: every error that leaves the server is made here; none holds a stack trace or anything about the process.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from radixrt.errors import EngineClosed, InvalidRequest, ModelError, shown
from radixrt.server.client import EngineDied

log = logging.getLogger("radixrt")

_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong, for the one who asked. ``param``: the field at fault."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_FAILURE = web.ResponseKey("failure", Failure)


class RequestFailed(Exception):
    """Ends the handling of a request with a ``Failure``."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class UnknownField(InvalidRequest):
    """A field that the API does not have."""


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    *,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """An error as an answer."""
    return answer(Failure(status, message, param, code), headers=headers)


def answer(failure: Failure, *, headers: Mapping[str, str] | None = None) -> web.Response:
    if failure.status == 429:
        headers = {"Retry-After": "1", **(headers or {})}
    response = web.Response(
        status=failure.status, body=_written(failure.body), content_type="application/json", headers=headers
    )
    response[_FAILURE] = failure
    return response


def reword(response: web.StreamResponse, form: Callable[[Failure], Any]) -> None:
    """Put the failure that an answer tells, if it tells one, into another form."""
    failure = response.get(_FAILURE)
    if failure is not None and isinstance(response, web.Response):
        response.body = _written(form(failure))


def _written(body: Any) -> bytes:
    return json.dumps(body).encode()  # a half character of a name or value comes back escaped


def failure_of(error: BaseException) -> Failure:
    """What an exception tells the one who asked; one that nobody foresaw is logged, and told as an internal error."""
    if isinstance(error, RequestFailed):
        return error.failure
    if isinstance(error, InvalidRequest) and error.field == "max_waiting_requests":
        return Failure(429, str(error), None, "queue_full")
    if isinstance(error, InvalidRequest):
        message = str(error)
        code = "unknown_parameter" if isinstance(error, UnknownField) else "invalid_value"
        if "context_length=" in message:  # the code by which clients know that they must shorten the chat
            code = "context_length_exceeded"
        return Failure(400, message, error.field, code)
    if isinstance(error, ModelError):  # a chat template that is missing, or that fails on these messages
        return Failure(400, str(error), "messages", "chat_template")
    if isinstance(error, EngineDied):
        return Failure(503, str(error) or "the engine has died", None, "engine_died")
    if isinstance(error, EngineClosed):
        return Failure(503, "the engine is not running", None, "engine_closed")
    if isinstance(error, web.RequestPayloadError):
        return Failure(400, "the body cannot be read: it does not come as its headers say", None, "bad_body")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return Failure(413, error.text or "the body is too large", None, "body_too_large")
    log.error("a request failed unforeseen", exc_info=error)
    return Failure(500, "internal error", None, "internal_error")


def warning(warnings: Sequence[str]) -> dict[str, str]:
    """A ``Warning`` header (RFC 7234) of printable ASCII; none where there is nothing to warn of."""

    def plain(text: str) -> str:
        return "".join(c if " " <= c <= "~" and c not in '"\\' else "?" for c in text[:400])

    return {"Warning": ", ".join(f'299 - "{plain(text)}"' for text in warnings)} if warnings else {}


def ignored(fields: Sequence[str]) -> dict[str, str]:
    """The header that warns of unknown fields."""
    return warning(
        [f"unknown fields were ignored: {', '.join(shown(name, 40) for name in fields[:20])}"] if fields else []
    )
