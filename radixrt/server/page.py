"""The page at ``/``: a chat, and beside it what the radix tree does for it; and the routes that it reads.

Invariants: the page itself holds no data and loads nothing from anywhere else; what it shows comes from routes that ask for the key; however many look,
the engine is asked one thing at a time, the same at most a few times a second, for a bounded picture; prompts are shown only where one party uses the server, and never those
that carry a salt.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from radixrt import __version__
from radixrt.errors import InvalidRequest, shown
from radixrt.grammar.compile import to_grammar
from radixrt.grammar.constraint import Constraint
from radixrt.server.config import ServerConfig
from radixrt.server.hosts import is_loopback
from radixrt.server.limits import Gate, check_fields, read_object

OPEN = ("/",)  # the page asks for the key itself
POLLED = ("/v1/tree", "/v1/runs")  # asked for a few times a second: no lines for the access log
NODES = 200  # of the tree, unless the request says otherwise
MOST_NODES = 500
_FRESH = 0.2  # seconds that an answer of the engine is good for
_MOST_SCHEMA = 65_536  # characters
_MOST_TEXTS = 8_192  # nodes of which it is kept what stays the same
_KNOWN = 64
_ENCODE = msgspec.json.Encoder().encode


def routes(gate: Gate, config: ServerConfig) -> list[web.RouteDef]:
    """The page and what it reads."""
    page = Page(gate, config)
    return [
        web.get("/", page.show),
        web.get("/v1/tree", page.tree),
        web.get("/v1/runs", page.runs),
        web.post("/v1/schema/check", page.check),
    ]


def describe() -> dict[str, Any]:
    """The routes for the OpenAPI description."""
    error = {"description": "why not", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}  # fmt: skip
    plain = {"description": "done", "content": {"application/json": {"schema": {}}}}

    def route(summary: str, *statuses: int, done: dict[str, Any] = plain, **more: Any) -> dict[str, Any]:
        refused = {str(status): error for status in sorted({403, 429, 503, *statuses})}
        return {"summary": summary, "responses": {"200": done, **refused}, **more}

    nodes = {"name": "nodes", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MOST_NODES}}
    known = {"name": "known", "in": "query", "schema": {"type": "string", "pattern": "^([0-9]{1,15}(,[0-9]{1,15})*)?$"}}
    body = {
        "type": "object",
        "properties": {"schema": {"type": "string", "maxLength": _MOST_SCHEMA}},
        "required": ["schema"],
        "additionalProperties": False,
    }
    html = {"description": "the page", "content": {"text/html": {"schema": {"type": "string"}}}}
    return {
        "/": {"get": route("A page with a chat and the cache; needs no key, and holds no data", done=html)},
        "/v1/tree": {
            "get": route("What stands in the cache, and which requests stand where", 400, 401, parameters=[nodes])
        },
        "/v1/runs": {
            "get": route("Programs that run, and the last that ended, as graphs", 400, 401, parameters=[known])
        },
        "/v1/schema/check": {
            "post": route(
                "Whether a JSON Schema can be enforced",
                *(400, 401, 404, 413, 415),
                requestBody={"required": True, "content": {"application/json": {"schema": body}}},
            )
        },
    }


def document() -> tuple[bytes, str]:
    """The page, and the policy that lets only its own style and script in."""
    static = files("radixrt.server") / "static"
    html = (static / "page.html").read_text("utf-8")
    style = (static / "page.css").read_text("utf-8")
    script = "".join((static / name).read_text("utf-8") for name in ("base.js", "tree.js", "runs.js", "chat.js"))
    html = html.replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html.encode(), policy


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class Page:
    """The page of one server."""

    def __init__(self, gate: Gate, config: ServerConfig) -> None:
        self._gate = gate
        self._model = next(iter(config.served_model_names), None)
        keys = len(config.api_key)
        # With several keys, or without one where others reach the server, it would show them each other's prompts.
        self.texts = keys == 1 or (not keys and is_loopback(config.host.lower()))
        self._body, policy = document()
        self._etag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        self._headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
            "ETag": self._etag,
        }
        self._secret = secrets.token_bytes(16)  # so that a node's name tells nothing of its text
        self._told: dict[tuple[str | int, int, bytes, bytes], dict[str, Any]] = {}
        self._checks, self._turn = asyncio.Semaphore(1), asyncio.Semaphore(1)
        self._asked: dict[Any, tuple[float, asyncio.Future[bytes]]] = {}

    async def show(self, request: web.Request) -> web.Response:
        if request.headers.get("If-None-Match") == self._etag:
            return web.Response(status=304, headers=self._headers)
        return web.Response(body=self._body, content_type="text/html", charset="utf-8", headers=self._headers)

    # ---- what it reads

    async def tree(self, request: web.Request) -> web.Response:
        """A picture of the radix tree, the requests in it, and the engine's figures."""
        text = request.query.get("nodes", str(NODES))
        if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= MOST_NODES):
            raise InvalidRequest("nodes", f"={shown(text)}: must be an integer from 1 to {MOST_NODES}")
        most = int(text)
        return _json(await self._once(most, lambda: self._tree(most)))

    async def runs(self, request: web.Request) -> web.Response:
        """Programs, without those that the page has already: ``known=3,4``."""
        text = request.query.get("known", "")
        parts = text.split(",") if text else []
        if len(parts) > _KNOWN or not all(part.isascii() and part.isdigit() and len(part) < 16 for part in parts):
            raise InvalidRequest("known", f"={shown(text)}: must be at most {_KNOWN} numbers with commas between them")
        known = tuple(sorted(map(int, parts)))
        return _json(await self._once(known, lambda: self._runs(known)))

    async def check(self, request: web.Request) -> web.Response:
        """Whether a JSON Schema, given as text, can be enforced, and if not, why."""
        data = await read_object(request)
        check_fields("a check", data, ("schema",))
        text = data.get("schema")
        if not isinstance(text, str):
            raise InvalidRequest("schema", f"={shown(text)}: must be the text of a JSON Schema")
        if len(text) > _MOST_SCHEMA:
            raise InvalidRequest("schema", f"has {len(text)} characters: at most {_MOST_SCHEMA} are checked")
        await self._checks.acquire()  # one at a time: many would take the processor from the engine
        checking = asyncio.get_running_loop().run_in_executor(None, _problem, text)
        checking.add_done_callback(lambda _: self._checks.release())  # not before: it goes on when its client is gone
        problem = await asyncio.shield(checking)
        return web.json_response({"valid": problem is None, "problem": problem})

    async def _once(self, key: Any, ask: Callable[[], Awaitable[bytes]]) -> bytes:
        """What ``ask`` gives; who asks for the same within a moment shares the answer."""
        now = time.monotonic()
        asked = self._asked.get(key)
        if asked is None or (asked[1].done() and now - asked[0] > _FRESH):
            for old in [n for n, (when, made) in self._asked.items() if made.done() and now - when > _FRESH]:
                del self._asked[old]
            asked = self._asked[key] = now, asyncio.ensure_future(self._in_turn(ask))
            asked[1].add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # nobody may be there to see it
        return await asyncio.shield(asked[1])

    async def _in_turn(self, ask: Callable[[], Awaitable[bytes]]) -> bytes:
        """One question after the other: many different ones do not crowd the engine."""
        async with self._turn:
            return await ask()

    async def _tree(self, most: int) -> bytes:
        found = await self._gate.tree(most)
        names: list[str] = []
        nodes: list[dict[str, Any]] = []
        told = self._told
        if len(told) > _MOST_TEXTS:
            told.clear()
        for parent, tokens, locks, holds, age, children, space, head, tail in found["nodes"]:
            above = names[parent] if parent >= 0 else None
            key = (above or space, tokens, head, tail)
            same = told.get(key)
            if same is None:
                same = told[key] = self._same(above, tokens, space, head, tail)
            names.append(same["id"])
            nodes.append({**same, "locks": locks, "holds": holds, "age": age, "children": children})
        requests = [
            {
                "id": id if self.texts else "",
                "sample": sample,
                "node": names[place] if place >= 0 else None,
                "prompt": prompt,
                "computed": computed,
                "size": size,
                "program": name if self.texts else "",
                "running": running,
            }
            for id, sample, place, prompt, computed, size, name, running in found["requests"]
        ]
        info = self._gate.info
        return _ENCODE(
            {
                "model": self._model or info.model,
                "version": __version__,
                "context_length": info.context_length,
                "device": info.device,
                "dtype": info.dtype,
                "texts": self.texts,
                "loaded": found.get("loaded", True),
                "cached_tokens": found["protected"] + found["stats"].get("pool_evictable", 0),
                "stats": found["stats"],
                "nodes": nodes,
                "requests": requests,
            }
        )

    def _same(self, above: str | None, tokens: int, space: int, head: bytes, tail: bytes) -> dict[str, Any]:
        """What stays the same of a node, however often it is shown."""
        name = (above or f"space {space}").encode() + head
        same: dict[str, Any] = {
            "id": hashlib.blake2b(name, digest_size=6, key=self._secret).hexdigest(),
            "parent": above,
            "tokens": tokens,
            "space": space,
        }
        if self.texts and not space:
            same["text"], same["end"] = self._text(head), self._text(tail)
            same["cut"] = tokens > (len(head) + len(tail)) // 4
        return same

    def _text(self, data: bytes) -> str:
        ids = np.frombuffer(data, dtype="<i4").tolist()
        return self._gate.tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    async def _runs(self, known: Sequence[int]) -> bytes:
        found = await self._gate.runs(known)
        runs = [run if self.texts and not run["private"] else _bare(run) for run in found["runs"]]
        return _ENCODE({"runs": runs, "numbers": found["numbers"]})


def _bare(run: dict[str, Any]) -> dict[str, Any]:
    """A run without what anybody wrote."""
    texts = ("text", "name", "error")
    nodes = [{name: value for name, value in node.items() if name not in texts} for node in run["nodes"]]
    return {**run, "name": "", "nodes": nodes}


def _problem(text: str) -> str | None:
    try:
        to_grammar(Constraint.json_schema(text))
    except InvalidRequest as error:
        return str(error)
    return None


def _json(data: bytes) -> web.Response:
    return web.Response(body=data, content_type="application/json", headers={"Cache-Control": "no-store"})
