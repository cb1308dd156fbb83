"""Anthropic's Messages API: ``/v1/messages`` and ``/v1/messages/count_tokens``, from a turn to its blocks and events.

Invariants: the events of a stream, joined, are the content of the whole answer; ``input_tokens`` and ``cache_read_input_tokens`` together
are the prompt.

    parts of the turn -> blocks: Reasoning thinking, Content text, a call tool_use
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import web

from radixrt.server.anthropic_requests import CHOICES, COUNT, MESSAGES, Asked, read_messages
from radixrt.server.chat import (
    CallArguments,
    CallBegin,
    CallEnd,
    ChatAsk,
    Content,
    Finish,
    Part,
    Reasoning,
    Usage,
    run_steps,
)
from radixrt.server.errors import Failure, warning
from radixrt.server.limits import Gate
from radixrt.server.openai_requests import EFFORTS
from radixrt.server.turns import Witness, body_schema, described, json_answer, prompt_tokens, read, stream

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}


def routes(gate: Gate, config: Any) -> list[web.RouteDef]:
    """The routes. They rely on the application's doors for keys, limits of bodies and for errors, which ``error_body`` puts in Anthropic's form."""
    here = Messages(gate, config)
    return [web.post("/v1/messages", here.messages), web.post("/v1/messages/count_tokens", here.count)]


def error_body(failure: Failure) -> dict[str, Any]:
    """An error as Anthropic's clients read it."""
    kind = _KINDS.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": failure.message}}


ERRORS = {"/v1/messages": error_body, "/v1/messages/count_tokens": error_body}


class Messages:
    """The handlers of one server.

    Args:
        config: has ``served_model_names``, ``default_chat_template_kwargs``, ``unknown_fields``, ``stream_keepalive``, and what ``run_steps`` reads.
    """

    def __init__(self, gate: Gate, config: Any) -> None:
        self._gate, self._config = gate, config

    async def messages(self, request: web.Request) -> web.StreamResponse:
        asked = await read(request, lambda body: self._read(body, MESSAGES))
        asked = replace(asked, ask=replace(asked.ask, request_id=f"msg_{uuid.uuid4().hex}"))
        witness = Witness(self._gate)
        if asked.ask.stream:
            failed = lambda failure: _event("error", error_body(failure))
            events = self._events(asked, witness)
            return await stream(request, events, failed, self._config.stream_keepalive, warning(asked.warnings))
        blocks, told, finish = _Blocks(asked.thinking), [], Finish("stop")
        async with aclosing(run_steps(witness.client, asked.ask, self._config)) as steps:
            async for step in steps:
                told += blocks.push(step.parts)
                finish = step.finish or finish
        told += blocks.close()
        message = _message(asked.ask, _usage(finish.usage or Usage(0, 0)))
        return json_answer({**message, "content": _content(told), **_end(finish, witness)}, asked.warnings)

    async def count(self, request: web.Request) -> web.Response:
        asked = await read(request, lambda body: self._read(body, COUNT))
        return json_answer({"input_tokens": await prompt_tokens(self._gate, asked.ask, self._config)}, asked.warnings)

    async def _events(self, asked: Asked, witness: Witness) -> AsyncGenerator[bytes, None]:
        blocks, finish, begun = _Blocks(asked.thinking), Finish("stop"), False
        async with aclosing(run_steps(witness.client, asked.ask, self._config)) as steps:
            async for step in steps:
                data = b""
                if not begun:
                    message = _message(asked.ask, _usage(Usage(len(witness.prompt), 0)))
                    data, begun = _event("message_start", {"message": message}), True
                data += b"".join(_event(event["type"], event) for event in blocks.push(step.parts))
                finish = step.finish or finish
                if data:
                    yield data
        data = b"".join(_event(event["type"], event) for event in blocks.close())
        usage = _usage(finish.usage or Usage(len(witness.prompt), 0))
        data += _event("message_delta", {"delta": _end(finish, witness), "usage": usage})
        yield data + _event("message_stop", {})

    def _read(self, body: Mapping[str, Any], valid: Sequence[str]) -> Asked:
        config = self._config
        models = tuple(config.served_model_names or (self._gate.info.model,))
        warn = config.unknown_fields == "warn"
        return read_messages(body, valid, models, config.default_chat_template_kwargs, warn=warn)


# ---- what is answered


class _Blocks:
    """The blocks of an answer in the making, as events. ``shows``: with what was thought."""

    def __init__(self, shows: bool) -> None:
        self._shows = shows
        self._at, self._open = -1, ""
        self._thought = hashlib.sha256()

    def push(self, parts: Iterable[Part]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for part in parts:
            match part:
                case Content(said):
                    events += self._begin("text", {"type": "text", "text": ""})
                    events.append(self._delta({"type": "text_delta", "text": said}))
                case Reasoning(said):
                    events += self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                    self._thought.update(said.encode())
                    if self._shows:
                        events.append(self._delta({"type": "thinking_delta", "thinking": said}))
                case CallBegin(_, id, name):
                    events += self.close()
                    events += self._begin("tool_use", {"type": "tool_use", "id": id, "name": name, "input": {}})
                case CallArguments(_, said):
                    events.append(self._delta({"type": "input_json_delta", "partial_json": said}))
                case CallEnd():
                    events += self.close()
        return events

    def close(self) -> list[dict[str, Any]]:
        """The end of the block that is open."""
        events = []
        if self._open == "thinking":  # clients want one to send the block back; nothing here relies on it
            events.append(self._delta({"type": "signature_delta", "signature": self._thought.hexdigest()}))
        if self._open:
            events.append({"type": "content_block_stop", "index": self._at})
        self._open = ""
        return events

    def _begin(self, kind: str, block: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self._open == kind:
            return []
        events = self.close()
        self._at, self._open = self._at + 1, kind
        return [*events, {"type": "content_block_start", "index": self._at, "content_block": block}]

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._at, "delta": delta}


def _content(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that events tell."""
    blocks: list[dict[str, Any]] = []
    pieces: list[str] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
                pieces = []
            case "content_block_delta":
                name = next(name for name in event["delta"] if name != "type")
                if name == "signature":
                    blocks[-1][name] = event["delta"][name]
                else:
                    pieces.append(event["delta"][name])
            case "content_block_stop":
                last, said = blocks[-1], "".join(pieces)
                if last["type"] == "tool_use":
                    last["input"] = json.loads(said)
                else:
                    last[last["type"]] = said
    return blocks


def _message(ask: ChatAsk, usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": ask.request_id,
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _end(finish: Finish, witness: Witness) -> dict[str, Any]:
    """Why it ended."""
    if finish.reason == "length" and witness.cut:
        return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
    if finish.reason == "stop" and isinstance(finish.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop}
    return {"stop_reason": _STOPS.get(finish.reason, "end_turn"), "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode({"type": name, **data}) + b"\n\n"


# ---- what is described


def describe() -> dict[str, Any]:
    """The OpenAPI paths of these routes."""
    words, flags, some = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
    blocks = {"oneOf": [words, {"type": "array", "items": some}]}
    message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant"]}, "content": blocks},
        "additionalProperties": False,
    }
    tool = {
        "type": "object",
        "required": ["name", "input_schema"],
        "properties": {"type": {"const": "custom"}, "name": words, "description": words, "input_schema": some, "strict": flags},
    }  # fmt: skip
    share = {"type": "number", "minimum": 0, "maximum": 1}
    types: dict[str, Any] = {
        "model": words,
        "messages": {"type": "array", "minItems": 1, "items": message},
        "system": blocks,
        "tools": {"type": "array", "items": tool},
        "tool_choice": {"type": "object", "required": ["type"], "properties": {"type": {"enum": list(CHOICES)}}},
        "thinking": {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": ["enabled", "disabled", "adaptive"]},
                "budget_tokens": {"type": "integer", "minimum": 1},
                "display": {"enum": ["summarized", "omitted"]},
            },
        },
        "output_config": {"type": "object", "properties": {"effort": {"enum": list(EFFORTS)}, "format": some}},
        "max_tokens": {"type": "integer", "minimum": 1},
        "stop_sequences": {"type": "array", "items": {"type": "string", "minLength": 1}},
        "stream": flags,
        "temperature": {"type": "number", "minimum": 0, "maximum": 100},
        "top_k": {"type": "integer", "minimum": -1},
        "top_p": {**share, "exclusiveMinimum": 0},
        "min_p": share,
        "seed": {"type": "integer"},
        "priority": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
        "cache_salt": {"type": "string", "maxLength": 1024},
        "metadata": some,
        "service_tier": words,
        "cache_control": some,
    }
    asking = body_schema(MESSAGES, types, "model", "messages", "max_tokens")
    return {
        "/v1/messages": described("Answer a chat (Anthropic)", asking, "text/event-stream"),
        "/v1/messages/count_tokens": described("The tokens of a chat (Anthropic)", body_schema(COUNT, types, "model", "messages")),
    }  # fmt: skip
