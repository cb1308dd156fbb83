"""``/v1/responses`` (OpenAI): answers in items and events, kept in memory so that the next one can go on from them.

Invariants: a request that is refused is answered with its error before anything is streamed; a response is kept when it is whole, and before its last
event; who sends another key than it was made with does not find it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import web

from radixrt.errors import InvalidRequest, ModelError, shown
from radixrt.server.chat import Step, off_loop, run_steps, weight
from radixrt.server.client import EngineClient
from radixrt.server.errors import Failure, RequestFailed, failure_of, warning
from radixrt.server.openai_requests import Rules, read_body, rules_of
from radixrt.server.responses_events import Writing, encoded
from radixrt.server.responses_requests import RESPONSE, Item, Turn, own_name, read_response
from radixrt.server.responses_store import Kept, ResponseStore
from radixrt.server.streams import EventStream
from radixrt.server.turns import prompt_tokens

MOST_KEPT = 4096
MOST_KEPT_BYTES = 256 * 2**20
_KEEPALIVE = 15.0  # seconds
_ITEM = re.compile(r"[a-z]+_([0-9a-f]{32})i?[0-9]{1,9}")
_PAGE = 20


def new_store(config: Any) -> ResponseStore:
    """The store of a server, of whichever models the responses are."""
    return ResponseStore(
        getattr(config, "max_stored_responses", MOST_KEPT), getattr(config, "max_stored_bytes", MOST_KEPT_BYTES)
    )


def routes(gate: EngineClient, config: Any, store: ResponseStore | None = None) -> list[web.RouteDef]:
    """The routes. They rely on the application's doors for keys, limits of bodies and for errors.

    Args:
        config: as ``openai.routes`` takes it, and ``max_stored_responses``, ``max_stored_bytes``.
    """
    here = Responses(gate, config, store)
    return [
        web.post("/v1/responses", here.create),
        web.post("/v1/responses/input_tokens", here.input_tokens),
        web.post("/v1/responses/{id}/cancel", here.cancel),
        web.get("/v1/responses/{id}", here.one),
        web.delete("/v1/responses/{id}", here.delete),
        web.get("/v1/responses/{id}/input_items", here.input_items),
    ]


class Responses:
    """The responses of one server."""

    def __init__(self, gate: EngineClient, config: Any, store: ResponseStore | None = None) -> None:
        self._gate, self._config = gate, config
        self.store = new_store(config) if store is None else store

    # ---- routes

    async def create(self, request: web.Request) -> web.StreamResponse:
        turn, key, owner, previous = await self._turn(request)
        turn = replace(turn, ask=replace(turn.ask, request_id=f"resp_{key}"))
        writing = Writing(key, int(time.time()), turn.head, self._gate.tokenizer, logprobs=turn.logprobs)
        headers = warning(turn.warnings)
        steps = _located(run_steps(self._gate, turn.ask, self._config), turn.origins)

        def finished() -> bytes:
            body = msgspec.json.encode(writing.body(writing.status))
            if turn.store:
                self.store.keep(Kept(owner, writing.id, msgspec.json.encode(turn.items), body, previous))
            return body

        async with aclosing(steps):
            if not turn.ask.stream:
                async for step in steps:
                    writing.push(step)
                return web.Response(body=finished(), content_type="application/json", headers=headers)
            keepalive: float = getattr(self._config, "stream_keepalive", _KEEPALIVE)
            async with EventStream(request, headers, keepalive) as events:
                try:
                    async for step in steps:
                        told = [] if writing.begun else writing.opening()
                        told += writing.push(step)
                        if told:
                            await events.write(encoded(told))
                    finished()
                    last = encoded(writing.closing())
                except (asyncio.CancelledError, ConnectionResetError):
                    raise
                except Exception as error:
                    if not events.begun:
                        raise
                    last = encoded(writing.failed(failure_of(error)))
                return await events.end(last)

    async def _turn(self, request: web.Request) -> tuple[Turn, str, bytes, Kept | None]:
        """What a body asks, the key of what will answer it, whose that is, and what it goes on from."""
        if request.content_type != "application/json":  # also: a page of another site cannot send this unasked
            problem = f"content-type={shown(request.content_type)}: must be application/json"
            raise RequestFailed(Failure(415, problem, None, "unsupported_media_type"))
        data, owner = await request.read(), self._owner(request)
        body = await off_loop(len(data), lambda: read_body(data))
        previous = self._previous(owner, body.get("previous_response_id"))
        chain = previous.chain() if previous is not None else []
        key = uuid.uuid4().hex
        turn: Turn = await off_loop(
            weight(data, body) + sum(kept.size for kept in chain),
            lambda: read_response(body, self._rules(), key, _items(chain), lambda id: self._item(owner, id)),
        )
        return turn, key, owner, previous

    async def input_tokens(self, request: web.Request) -> web.Response:
        """How many tokens the prompt of such a response has; nothing runs."""
        turn, *_ = await self._turn(request)
        try:
            count = await prompt_tokens(self._gate, turn.ask, self._config)
        except InvalidRequest as error:
            raise own_name(error, turn.origins) from None
        except ModelError as error:
            raise RequestFailed(Failure(400, str(error), "input", "chat_template")) from None
        return web.json_response({"object": "response.input_tokens", "input_tokens": count})

    async def cancel(self, request: web.Request) -> web.Response:
        """Only what runs in the background can be cancelled so, and nothing does."""
        kept = self._found(request)
        problem = (
            f"response {shown(kept.id)} cannot be cancelled: responses do not run in the background here; one that runs "
            "ends when its connection is closed"
        )
        raise RequestFailed(Failure(400, problem, "id", "response_not_cancellable"))

    async def one(self, request: web.Request) -> web.Response:
        for name in ("stream", "starting_after"):
            if request.query.get(name, "false") != "false":
                problem = f"={shown(request.query[name])}: a response that is kept is not streamed again; leave it out"
                raise InvalidRequest(name, problem)
        return web.Response(body=self._found(request).body, content_type="application/json")

    async def delete(self, request: web.Request) -> web.Response:
        kept = self._found(request)
        self.store.forget(kept.owner, kept.id)
        return web.json_response({"id": kept.id, "object": "response", "deleted": True})

    async def input_items(self, request: web.Request) -> web.Response:
        """What a response was made from, with the items of those before it; by default the last first."""
        kept, query = self._found(request), request.query
        limit, order, after = query.get("limit", str(_PAGE)), query.get("order", "desc"), query.get("after")
        if not limit.isascii() or not limit.isdigit() or len(limit) > 3 or not 1 <= int(limit) <= 100:
            raise InvalidRequest("limit", f"={shown(limit)}: must be a number from 1 to 100")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order", f"={shown(order)}: must be asc or desc")
        chain = kept.chain()
        items: list[Item] = await off_loop(
            sum(one.size for one in chain), lambda: [*_items(chain[:-1]), *kept.read_items()]
        )
        if order == "desc":
            items = items[::-1]
        if after is not None:
            at = next((i for i, item in enumerate(items) if item["id"] == after), None)
            if at is None:
                raise InvalidRequest("after", f"={shown(after)}: is none of these items")
            items = items[at + 1 :]
        page = items[: int(limit)]
        ids = [item["id"] for item in page] or [""]
        answer = {
            "object": "list",
            "data": page,
            "first_id": ids[0],
            "last_id": ids[-1],
            "has_more": len(items) > len(page),
        }
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    # ---- what is kept

    def _owner(self, request: web.Request) -> bytes:
        """Whose responses are meant: those of the key, where there are keys."""
        if not getattr(self._config, "api_key", ()):
            return b""
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = request.headers.get("X-Api-Key", "")
        return hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()

    def _found(self, request: web.Request) -> Kept:
        id = request.match_info["id"]
        kept = self.store.find(self._owner(request), id)
        if kept is None:
            raise RequestFailed(Failure(404, f"response {shown(id)} {_ABSENT}", "id", "response_not_found"))
        return kept

    def _previous(self, owner: bytes, id: Any) -> Kept | None:
        if id is None:
            return None
        if not isinstance(id, str):
            raise InvalidRequest("previous_response_id", f"={shown(id)}: must be a string")
        kept = self.store.find(owner, id)
        if kept is None:
            problem = f"previous_response_id={shown(id)}: it {_ABSENT}"
            raise RequestFailed(Failure(404, problem, "previous_response_id", "previous_response_not_found"))
        return kept

    def _item(self, owner: bytes, id: str) -> Item | None:
        """An item of a response that is kept; called on other threads too."""
        found = _ITEM.fullmatch(id)
        kept = self.store.find(owner, f"resp_{found[1]}", used=False) if found is not None else None
        if kept is None:
            return None
        return next((item for item in (*kept.read_output(), *kept.read_items()) if item["id"] == id), None)

    def _rules(self) -> Rules:
        return rules_of(self._gate.info.model, self._config)


_ABSENT = "is not kept here: made with store=false or another key, deleted, or the server has forgotten or never had it"


def _items(chain: Sequence[Kept]) -> list[Item]:
    """All items of responses that go on from each other."""
    return [item for kept in chain for item in (*kept.read_items(), *kept.read_output())]


async def _located(steps: AsyncGenerator[Step, None], origins: Sequence[str]) -> AsyncGenerator[Step, None]:
    """The steps; errors with the names that the body has."""
    async with aclosing(steps):
        try:
            async for step in steps:
                yield step
        except InvalidRequest as error:
            raise own_name(error, origins) from None
        except ModelError as error:  # the chat template is missing, or fails on these messages
            raise RequestFailed(Failure(400, str(error), "input", "chat_template")) from None


def describe() -> dict[str, Any]:
    """The OpenAPI paths of these routes."""
    text: dict[str, Any] = {"type": "string"}
    boolean, some, listed = {"type": "boolean"}, {"type": "object"}, {"type": "array", "items": {"type": "object"}}
    types: dict[str, dict[str, Any]] = {
        "input": {"oneOf": [text, listed]},
        "tools": listed,
        "tool_choice": {"oneOf": [{"enum": ["auto", "none", "required"]}, some]},
        "include": {"type": "array", "items": text},
        "max_output_tokens": {"type": "integer", "minimum": 1},
        "top_logprobs": {"type": "integer", "minimum": 0},
        "temperature": {"type": "number", "minimum": 0, "maximum": 100},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "truncation": {"const": "disabled"},
        "background": {"const": False},
        "metadata": {"type": "object", "additionalProperties": text, "maxProperties": 16},
    }
    types |= dict.fromkeys(("stream", "store", "parallel_tool_calls"), boolean)
    types |= dict.fromkeys(("text", "reasoning", "stream_options", "chat_template_kwargs"), some)
    types |= dict.fromkeys(("model", "instructions", "previous_response_id", "user"), text)
    body = {
        "type": "object",
        "properties": {name: types.get(name, {}) for name in RESPONSE},
        "required": ["input"],
        "additionalProperties": False,
    }
    error = {"description": "why not", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}  # fmt: skip
    done = {"description": "done", "content": {"application/json": {"schema": {}}}}
    streamed = {"description": "done", "content": {**done["content"], "text/event-stream": {"schema": {}}}}  # type: ignore[dict-item]
    id = {"name": "id", "in": "path", "required": True, "schema": text}
    page = [
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
        {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
        {"name": "after", "in": "query", "schema": text},
    ]

    def operation(summary: str, *statuses: int, answer: dict[str, Any] = done, **more: Any) -> dict[str, Any]:
        refused = {str(status): error for status in sorted({400, 401, 403, 404, 429, 503, *statuses})}
        return {"summary": summary, "responses": {"200": answer, **refused}, **more}

    asked = {"required": True, "content": {"application/json": {"schema": body}}}
    return {
        "/v1/responses": {
            "post": operation("Answer items (OpenAI)", 413, 415, answer=streamed, requestBody=asked),
        },
        "/v1/responses/input_tokens": {
            "post": operation("How many tokens the input has", 413, 415, requestBody=asked),
        },
        "/v1/responses/{id}/cancel": {
            "post": operation("Refused: no response runs in the background", parameters=[id]),
        },
        "/v1/responses/{id}": {
            "get": operation("A response that is kept", parameters=[id]),
            "delete": operation("Forget a response", parameters=[id]),
        },
        "/v1/responses/{id}/input_items": {
            "get": operation("What a response was made from", parameters=[id, *page]),
        },
    }
