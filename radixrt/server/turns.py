"""What the dialects beside OpenAI's share: bodies read, a witness of what a turn asked of the engine and got, answers told in pieces.

Invariants: a body is refused before anything runs; a witness changes nothing of a turn but what its dialect allows: tokens that come
before the prompt, and a limit of tokens that is cut to what the context holds.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, TypeVar, cast

import msgspec
from aiohttp import web

from radixrt.checks import integer
from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.request import OutputDelta, RequestOutput, SamplingParams
from radixrt.server.chat import ChatAsk, off_loop, run_steps, weight
from radixrt.server.client import EngineClient
from radixrt.server.errors import Failure, RequestFailed, UnknownField, failure_of, warning
from radixrt.server.openai_requests import MAX_SALT, read_body
from radixrt.server.streams import EventStream

T = TypeVar("T")

_MAX_WARNINGS = 16


class Witness:
    """An ``EngineClient``, as far as a turn needs one, that remembers what passes.

    Args:
        before: token ids that come before the prompt.

    Fields:
        prompt: of the first request. outputs: of every request that ended. cut: a limit was more than the context holds.
    """

    def __init__(self, client: EngineClient, before: Sequence[int] = ()) -> None:
        self.prompt: tuple[int, ...] = ()
        self.outputs: list[RequestOutput] = []
        self.cut = False
        self._client, self._before = client, tuple(before)

    @property
    def client(self) -> EngineClient:
        return cast(EngineClient, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, **how: Any
    ) -> AsyncGenerator[OutputDelta, None]:
        ids = [*self._before, *self._headless(prompt)]
        self.prompt = self.prompt or tuple(ids)
        room = self._client.info.context_length - len(ids)
        if params.max_tokens is not None and 0 < room < params.max_tokens:
            params, self.cut = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room)), True
        async with aclosing(self._client.stream(ids, params, **how)) as deltas:
            async for delta in deltas:
                if delta.output is not None:
                    self.outputs.append(delta.output)
                yield delta

    def _headless(self, prompt: Sequence[int]) -> Sequence[int]:
        """The prompt, without the token that only a beginning has where it is none."""
        bos = self._client.tokenizer.bos_id
        return prompt[1:] if self._before and bos is not None and prompt[0] == bos else prompt


class _Counted(Exception):
    """The prompt is there, and nothing more was wanted."""


class _Counter(Witness):
    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, **how: Any
    ) -> AsyncGenerator[OutputDelta, None]:
        self.prompt = tuple(prompt)
        raise _Counted
        yield  # a generator, as those of other clients


async def prompt_tokens(client: EngineClient, ask: ChatAsk, config: Any) -> int:
    """How many tokens a turn's prompt has; raises what ``run_steps`` raises before its first step."""
    counter = _Counter(client)
    with suppress(_Counted):
        async with aclosing(run_steps(counter.client, ask, config)) as steps:
            async for _ in steps:
                pass
    return len(counter.prompt)


# ---- bodies


async def read(request: web.Request, reader: Callable[[Mapping[str, Any]], T]) -> T:
    """What ``reader`` makes of a request's body.

    Raises:
        InvalidRequest: no JSON object, or what ``reader`` raises. RequestFailed: of another type.
    """
    if request.content_type != "application/json":  # also: a page of another site cannot send this unasked
        problem = f"content-type={shown(request.content_type)}: must be application/json"
        raise RequestFailed(Failure(415, problem, None, "unsupported_media_type"))
    data = await request.read()
    body = await off_loop(len(data), lambda: read_body(data))
    found: T = await off_loop(weight(data, body), lambda: reader(body))
    return found


def known(
    owner: str, body: Mapping[str, Any], valid: Sequence[str], later: Mapping[str, tuple[Any, ...]], warn: bool
) -> tuple[dict[str, Any], list[str]]:
    """The fields of a body that are not null, and warnings about those that nobody knows.

    Args:
        later: fields that are not supported, each with the values that ask for nothing. warn: False: an unknown field is an error.
    """
    fields: dict[str, Any] = {}
    warnings: list[str] = []
    for name, value in body.items():
        if name in later:
            if value is not None and value not in later[name]:
                raise InvalidRequest(name, f"={shown(value)}: is not supported here; leave it out")
        elif name not in valid:
            short = shown(name).strip("'\"")
            problem = f"{owner} has no such field{nearest(name, valid)}"
            if not warn:
                raise UnknownField(short, problem)
            warnings.append(f"{short} was ignored: {problem}")
        elif value is not None:
            fields[name] = value
    return fields, warnings[:_MAX_WARNINGS]


def text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(where, f"{'is missing' if value is None else '=' + shown(value)}: must be a string")
    return value


def way(body: Mapping[str, Any]) -> dict[str, Any]:
    """When a request runs, and what it shares its cache with."""
    salt = body.get("cache_salt", "")
    if not isinstance(salt, str) or len(salt) > MAX_SALT:
        raise InvalidRequest("cache_salt", f"={shown(salt)}: must be a string of at most {MAX_SALT} characters")
    return {"priority": integer("priority", body.get("priority", 0), -(2**31), 2**31 - 1), "cache_salt": salt}


# ---- answers


def json_answer(data: Any, warnings: Sequence[str] = ()) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), content_type="application/json", headers=warning(warnings))


async def stream(
    request: web.Request,
    chunks: AsyncGenerator[bytes, None],
    failed: Callable[[Failure], bytes],
    keepalive: float,
    headers: Mapping[str, str],
    alive: bytes | None = None,
) -> web.StreamResponse:
    """Tell the chunks; what goes wrong before the first is raised, what goes wrong later is told by ``failed``.

    Args:
        alive: what a stream says that has nothing to say; nothing: a comment of server-sent events.
    """
    more = {} if alive is None else {"alive": alive}
    async with aclosing(chunks), EventStream(request, headers, keepalive, **more) as events:
        try:
            async for data in chunks:
                await events.write(data)
        except ConnectionResetError:
            raise
        except Exception as error:
            if not events.begun:
                raise
            return await events.end(failed(failure_of(error)))
        return await events.end(b"")


# ---- descriptions


def described(summary: str, body: Mapping[str, Any] | None, stream: str | None = None) -> dict[str, Any]:
    """An operation as OpenAPI has it; ``stream``: the type of the answer that comes in pieces."""
    done: dict[str, Any] = {kind: {"schema": {}} for kind in ("application/json", stream) if kind is not None}
    error = {"description": "why not", "content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}}}  # fmt: skip
    statuses = (401, 403, 429, 503) if body is None else (400, 401, 403, 404, 413, 415, 429, 503)
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "done", "content": done}} | {str(status): error for status in statuses},
    }
    if body is None:
        return {"get": operation}
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return {"post": operation}


def body_schema(fields: Sequence[str], types: Mapping[str, Any], *required: str) -> dict[str, Any]:
    """The schema of a body of these fields alone."""
    return {
        "type": "object",
        "properties": {name: types.get(name, {}) for name in fields},
        "required": list(required),
        "additionalProperties": False,
    }
