"""Ollama's API: ``/api/chat``, ``/api/generate``, and what its clients ask of the models: ``/api/tags``, ``show``, ``ps``, ``version``.

Invariants: lines of a stream, joined, say what the whole answer says; a call is told once, when it is whole.

    messages, or system and prompt  ->  a turn            ->  message.content, message.thinking, message.tool_calls
    context (ids of turns before)   ->  before its prompt ->  context: all ids of this one
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from radixrt import __version__
from radixrt.checks import flag
from radixrt.engine.inputs import to_tokens
from radixrt.errors import InvalidRequest, ModelError, shown
from radixrt.request import FinishReason, PositionLogprobs
from radixrt.server.chat import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Finish,
    Part,
    Reasoning,
    Step,
    Usage,
    finished,
    named,
    off_loop,
    run_steps,
    shown_positions,
)
from radixrt.server.embeddings import Embeddings
from radixrt.server.errors import Failure, warning
from radixrt.server.limits import Gate
from radixrt.server.ollama_requests import (
    CHAT,
    EMBED,
    EMBEDDINGS,
    GENERATE,
    OPTIONS,
    ROLES,
    SHOW,
    Asked,
    Rules,
    keep_alive,
    named_model,
    read_turn,
)
from radixrt.server.openai_requests import EFFORTS
from radixrt.server.openai_responses import chat_logprobs
from radixrt.server.turns import Witness, body_schema, described, json_answer, known, read, stream, text
from radixrt.tools import choose_reasoning_format, choose_tool_format

_NEVER = "0001-01-01T00:00:00Z"  # as Go writes no time
UNLOADS: web.RequestKey[bool] = web.RequestKey("unloads", bool)  # the model is unloaded behind the request
_NDJSON = {"Content-Type": "application/x-ndjson"}


def routes(gate: Gate, config: Any) -> list[web.RouteDef]:
    """The routes. They rely on the application's doors for keys, limits of bodies and for errors, which ``error_body`` puts in Ollama's form."""
    here = Ollama(gate, config)
    return [
        web.post("/api/chat", here.chat),
        web.post("/api/generate", here.generate),
        web.post("/api/embed", here.embed),
        web.post("/api/embeddings", here.embeddings),
        web.post("/api/show", here.show),
        web.get("/api/tags", here.tags),
        web.get("/api/ps", here.ps),
        web.get("/api/version", here.version),
    ]


def error_body(failure: Failure) -> dict[str, Any]:
    """An error as Ollama's clients read it."""
    return {"error": failure.message}


def unloaded(model: str, *, chats: bool) -> web.Response:
    """The answer to a request that unloads a model which is not loaded."""
    said = {"message": {"role": "assistant", "content": ""}} if chats else {"response": ""}
    return json_answer({"model": model, "created_at": _moment(), **said, "done": True, "done_reason": "unload"})


_PATHS = ("chat", "generate", "embed", "embeddings", "show", "tags", "ps", "version")
ERRORS = dict.fromkeys((f"/api/{name}" for name in _PATHS), error_body)


class Ollama:
    """The handlers of one server.

    Args:
        config: has ``served_model_names``, ``default_chat_template_kwargs``, ``unknown_fields``, ``stream_keepalive``, and what ``run_steps`` reads.
    """

    def __init__(self, gate: Gate, config: Any) -> None:
        self._gate, self._config = gate, config
        self._vectors = Embeddings(gate, config)
        self._began = _moment()
        self._file: dict[str, Any] | None = None

    # ---- answers

    async def chat(self, request: web.Request) -> web.StreamResponse:
        asked = await read(request, lambda body: read_turn(body, CHAT, self._rules()))
        return await self._answer(request, asked, time.perf_counter())

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = await read(request, lambda body: read_turn(body, GENERATE, self._rules()))
        return await self._answer(request, asked, time.perf_counter())

    async def _answer(self, request: web.Request, asked: Asked, began: float) -> web.StreamResponse:
        if asked.idle:
            reason = "unload" if request.get(UNLOADS) else "load"
            return json_answer({**_line(asked, []), "done": True, "done_reason": reason}, asked.warnings)
        witness = Witness(self._gate, asked.context)
        steps = self._raw(asked, witness) if asked.raw else run_steps(witness.client, asked.ask, self._config)
        told = _Told(asked, witness, self._gate.tokenizer, began)
        if asked.ask.stream:
            head = {**_NDJSON, **warning(asked.warnings)}
            # a sign of life between two lines: white space before the next
            keepalive, failed = self._config.stream_keepalive, lambda failure: _ended(error_body(failure))
            return await stream(request, _lines(told, steps), failed, keepalive, head, b" ")
        all: list[Step] = []
        async with aclosing(steps):
            async for step in steps:
                all.append(step)
        return json_answer(told.whole(all), asked.warnings)

    async def _raw(self, asked: Asked, witness: Witness) -> AsyncGenerator[Step, None]:
        """The steps of a prompt as it is."""
        ask, gate = asked.ask, self._gate
        prompt = str(ask.messages[-1]["content"])
        try:
            ids = await off_loop(
                len(prompt), lambda: to_tokens(prompt, gate.tokenizer, gate.info.context_length).tolist()
            )
            deltas = witness.stream(
                ids,
                ask.params,
                request_id=ask.request_id,
                priority=ask.priority,
                cache_salt=ask.cache_salt,
                deltas=ask.stream,
            )
            async with aclosing(deltas):
                async for delta in deltas:
                    told, positions, finish = delta.text, delta.logprobs, None
                    if delta.output is not None:
                        output = finished(delta.output)
                        usage = Usage(output.prompt_tokens, output.completion_tokens, output.cached_tokens)
                        finish = Finish(str(output.finish_reason), output.stop_reason, usage)
                        if not ask.stream:
                            told, positions = output.text, output.logprobs or ()
                    elif not ask.stream:
                        continue
                    reason = delta.finish_reason if finish is None else FinishReason(finish.reason)
                    shown = shown_positions(positions, reason, gate.tokenizer.eos_ids)
                    if told or shown or finish is not None:
                        yield Step(0, (Content(told),) if told else (), tuple(shown), finish)
        except InvalidRequest as error:
            raise named(error, ask.names) from None

    # ---- vectors

    async def embed(self, request: web.Request) -> web.Response:
        """A vector of length 1 for each text; a text that is too long is refused, whatever ``truncate`` says."""
        began = time.perf_counter()
        name, fields, warnings = await self._embedded(request, EMBED)
        flag("truncate", fields.pop("truncate", True))
        if "dimensions" in fields:
            fields["truncate_dimensions"] = True
        vectors, tokens = await self._vectors_of(name, fields, True)
        return json_answer(
            {
                "model": name,
                "embeddings": vectors,
                "total_duration": _nanoseconds(time.perf_counter() - began),
                "load_duration": 0,
                "prompt_eval_count": tokens,
            },
            warnings,
        )

    async def embeddings(self, request: web.Request) -> web.Response:
        """The vector of one text as it is; the way of older clients."""
        name, fields, warnings = await self._embedded(request, EMBEDDINGS)
        fields["input"] = "" if "prompt" not in fields else text("prompt", fields.pop("prompt"))
        try:
            vectors, _ = await self._vectors_of(name, fields, False)
        except InvalidRequest as error:
            own = error.field.startswith("input")
            raise InvalidRequest("prompt", str(error)[len(error.field) :]) if own else error from None
        return json_answer({"embedding": vectors[0] if vectors else []}, warnings)

    async def _embedded(self, request: web.Request, valid: Sequence[str]) -> tuple[str, dict[str, Any], list[str]]:
        """The model's name, the fields that a vector depends on, and warnings."""

        def reader(body: Mapping[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
            fields, warnings = known("an embedding", body, valid, {}, self._config.unknown_fields == "warn")
            name = named_model(fields.pop("model", None), self._names)
            options = fields.pop("options", {})
            if not isinstance(options, Mapping):
                raise InvalidRequest("options", f"={shown(options)}: must be an object")
            warnings += [f"options.{shown(key)} was ignored: it says nothing of a vector" for key in list(options)[:16]]
            keep_alive(fields.pop("keep_alive", None))
            return name, fields, warnings

        return await read(request, reader)

    async def _vectors_of(self, name: str, fields: Mapping[str, Any], normalize: bool) -> tuple[list[list[float]], int]:
        """The vectors; none for no text, which only loads the model."""
        if fields.get("input", "") in ("", []):
            return [], 0
        vectors, tokens, _ = await self._vectors.vectors(fields, name, normalize=normalize)
        return [vector.tolist() for vector in vectors], tokens

    # ---- models

    async def tags(self, request: web.Request) -> web.Response:
        return json_answer({"models": [await self._model(name) for name in self._names]})

    async def ps(self, request: web.Request) -> web.Response:
        """What is loaded: the model, for good."""
        more = {"expires_at": _NEVER, "context_length": self._gate.info.context_length}
        found = [await self._model(name) for name in self._names]
        cuda = self._gate.info.device.startswith("cuda")
        return json_answer({"models": [{**one, **more, "size_vram": one["size"] if cuda else 0} for one in found]})

    async def version(self, request: web.Request) -> web.Response:
        return json_answer({"version": __version__})

    async def show(self, request: web.Request) -> web.Response:
        def reader(body: Mapping[str, Any]) -> list[str]:
            fields, warnings = known("show", body, SHOW, {}, self._config.unknown_fields == "warn")
            flag("verbose", fields.get("verbose", False))
            named_model(fields.get("model", fields.get("name")), self._names)
            return warnings

        warnings = await read(request, reader)
        info, tokenizer = self._gate.info, self._gate.tokenizer
        file = await self._described()
        family = file["details"]["family"] or "model"
        figures: dict[str, Any] = {
            "general.architecture": family,
            f"{family}.context_length": info.context_length,
            f"{family}.embedding_length": info.embedding_size,
            f"{family}.vocab_size": info.vocab_size,
        }
        capabilities = ["completion"]
        if choose_tool_format(tokenizer.chat_template, (), self._config.tool_call_parser) is not None:
            capabilities.append("tools")
        if self._thinks():
            capabilities.append("thinking")
        return json_answer(
            {
                "modelfile": "",
                "parameters": "",
                "template": tokenizer.chat_template or "",
                "details": file["details"],
                "model_info": figures,
                "capabilities": capabilities,
                "modified_at": file["modified_at"],
            },
            warnings,
        )

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(self._config.served_model_names or (self._gate.info.model,))

    def _thinks(self) -> bool:
        template = self._gate.tokenizer.chat_template
        return choose_reasoning_format(template, (), self._config.reasoning_parser) is not None

    def _rules(self) -> Rules:
        info, config = self._gate.info, self._config
        return Rules(
            models=self._names,
            context=info.context_length,
            vocabulary=info.vocab_size,
            template=config.default_chat_template_kwargs,
            thinks=self._thinks(),
            warn=config.unknown_fields == "warn",
        )

    async def _model(self, name: str) -> dict[str, Any]:
        info, file = self._gate.info, await self._described()
        mark = json.dumps([info.model, info.dtype, info.vocab_size, file["size"], file["modified_at"]])
        return {"name": name, "model": name, "digest": hashlib.sha256(mark.encode()).hexdigest(), **file}

    async def _described(self) -> dict[str, Any]:
        """What the model's files say, read once."""
        if self._file is None:
            self._file = await asyncio.to_thread(describe_files, self._gate.info.settings.get("model"), self._gate.info.dtype, self._began)  # fmt: skip
        return self._file


# ---- what is answered


class _Told:
    """The lines of an answer in the making."""

    def __init__(self, asked: Asked, witness: Witness, tokenizer: Any, began: float) -> None:
        self._asked, self._witness, self._tokenizer, self._began = asked, witness, tokenizer, began
        self._calls: dict[int, tuple[str, str, list[str]]] = {}

    def line(self, step: Step) -> dict[str, Any] | None:
        """What a step tells; nothing where that is nothing yet."""
        parts = self._whole(step.parts)
        if not parts and not step.logprobs:
            return None
        return {**_line(self._asked, parts), **self._positions(step.logprobs), "done": False}

    def end(self, finish: Finish) -> dict[str, Any]:
        return {**_line(self._asked, []), **self._figures(finish)}

    def whole(self, steps: Sequence[Step]) -> dict[str, Any]:
        """All of it at once."""
        parts = self._whole([part for step in steps for part in step.parts])
        positions = [position for step in steps for position in step.logprobs]
        finish = next((step.finish for step in reversed(steps) if step.finish is not None), Finish("stop"))
        return {**_line(self._asked, parts), **self._positions(positions), **self._figures(finish)}

    def _whole(self, parts: Sequence[Part]) -> list[Content | Reasoning | dict[str, Any]]:
        """Texts as they are, and the calls that are whole."""
        found: list[Content | Reasoning | dict[str, Any]] = []
        for part in parts:
            match part:
                case Content() | Reasoning():
                    found.append(part)
                case CallBegin(index, id, name):
                    self._calls[index] = (id, name, [])
                case CallArguments(index, said):
                    self._calls[index][2].append(said)
                case CallEnd(index):
                    id, name, pieces = self._calls.pop(index)
                    function = {"index": index, "name": name, "arguments": json.loads("".join(pieces))}
                    found.append({"id": id, "function": function})
        return found

    def _positions(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
        if self._asked.ask.params.logprobs is None:
            return {}
        return {"logprobs": chat_logprobs(positions, self._tokenizer)}

    def _figures(self, finish: Finish) -> dict[str, Any]:
        """Durations are nanoseconds."""
        outputs, usage = self._witness.outputs, finish.usage or Usage(0, 0)
        figures: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if finish.reason == "length" else "stop",
            "total_duration": _nanoseconds(time.perf_counter() - self._began),
            "load_duration": 0,
            "prompt_eval_count": len(self._witness.prompt),
            "prompt_eval_duration": _nanoseconds(sum(output.prefill_time for output in outputs)),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(sum(output.decode_time for output in outputs)),
        }
        if not self._asked.chats and not self._asked.raw and outputs:
            figures["context"] = [*outputs[-1].prompt_token_ids, *outputs[-1].token_ids]
        return figures


async def _lines(told: _Told, steps: AsyncGenerator[Step, None]) -> AsyncGenerator[bytes, None]:
    finish = Finish("stop")
    async with aclosing(steps):
        async for step in steps:
            line, finish = told.line(step), step.finish or finish
            if line is not None:
                yield _ended(line)
    yield _ended(told.end(finish))


def _ended(line: Mapping[str, Any]) -> bytes:
    """A line of a stream. (Clients end lines at every character at which Unicode does.)"""
    data = msgspec.json.encode(line)
    for end in ("\x85", "\u2028", "\u2029"):
        data = data.replace(end.encode(), f"\\u{ord(end):04x}".encode())
    return data + b"\n"


def _line(asked: Asked, parts: Sequence[Content | Reasoning | dict[str, Any]]) -> dict[str, Any]:
    """A line of parts; what it says of the end comes behind."""
    content = "".join(part.text for part in parts if isinstance(part, Content))
    thinking = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls = [part for part in parts if isinstance(part, dict)]
    head = {"model": asked.ask.model, "created_at": _moment()}
    more: dict[str, Any] = {"thinking": thinking} if thinking else {}
    if not asked.chats:
        return {**head, "response": content, **more}
    if calls:
        more["tool_calls"] = calls
    return {**head, "message": {"role": "assistant", "content": content, **more}}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _moment(seconds: float | None = None) -> str:
    when = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return when.isoformat().replace("+00:00", "Z")


# ---- models


def describe_files(model: str | None, dtype: str, began: str) -> dict[str, Any]:
    """Size, date and details of a model's files, as far as they can be read; ``began``: the date of a model that has none."""
    from radixrt.model.checkpoint import read_json
    from radixrt.model.gguf_file import GGUFFile
    from radixrt.model.gguf_names import FILE_TYPES
    from radixrt.model.source import installed_default

    form, family, level, files = "", "", dtype, []
    try:
        path = installed_default() if model is None else Path(model).expanduser()
        if path is not None and path.is_file():
            form, files = "gguf", [path]
            file = GGUFFile(path)
            family = str(file.fields.get("general.architecture") or "")
            kind = file.fields.get("general.file_type")
            level = FILE_TYPES.get(kind, dtype) if isinstance(kind, int) else dtype
            file.close()
        elif path is not None and path.is_dir():
            form, files = "safetensors", sorted(path.glob("*.safetensors"))
            family = str(read_json(path / "config.json").get("model_type") or "")
        size = sum(one.stat().st_size for one in files)
        changed = max((one.stat().st_mtime for one in files), default=None)
    except (OSError, ModelError, RuntimeError):
        size, changed = 0, None
    details = {
        "parent_model": "",
        "format": form,
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": level,
    }
    return {"modified_at": began if changed is None else _moment(changed), "size": size, "details": details}


# ---- what is described


def describe() -> dict[str, Any]:
    """The OpenAPI paths of these routes."""
    words, flags, some = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
    message = {
        "type": "object",
        "required": ["role"],
        "properties": {"role": {"enum": list(ROLES)}, "content": words, "thinking": words, "tool_calls": {"type": "array", "items": some}},
    }  # fmt: skip
    function = {
        "type": "object",
        "required": ["name"],
        "properties": {"name": words, "description": words, "parameters": some},
    }
    tool = {
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": function},
    }
    types: dict[str, Any] = {
        "model": words,
        "name": words,
        "verbose": flags,
        "stream": flags,
        "raw": flags,
        "logprobs": flags,
        "top_logprobs": {"type": "integer", "minimum": 0},
        "format": {"anyOf": [{"enum": ["", "json"]}, some]},
        "options": {"type": "object", "properties": {name: {} for name in OPTIONS}, "additionalProperties": False},
        "keep_alive": {"type": ["string", "number"]},
        "think": {"anyOf": [flags, {"enum": list(EFFORTS)}]},
        "messages": {"type": "array", "items": message},
        "tools": {"type": "array", "items": tool},
        "prompt": words,
        "system": words,
        "context": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "images": {"type": "array", "maxItems": 0},
        "priority": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
        "cache_salt": {"type": "string", "maxLength": 1024},
    }
    lines = "application/x-ndjson"
    embedded = types | {
        "input": {"anyOf": [words, {"type": "array", "items": words}]},
        "dimensions": {"type": "integer", "minimum": 1},
        "truncate": flags,
        "options": some,
    }
    return {
        "/api/chat": described("Answer a chat (Ollama)", body_schema(CHAT, types, "model"), lines),
        "/api/embed": described("A vector for each text (Ollama)", body_schema(EMBED, embedded, "model")),
        "/api/embeddings": described("A vector for a text (Ollama)", body_schema(EMBEDDINGS, embedded, "model")),
        "/api/generate": described("Answer or continue a text (Ollama)", body_schema(GENERATE, types, "model"), lines),
        "/api/show": described("What a model is (Ollama)", body_schema(SHOW, types)),
        "/api/tags": described("The names that the model is served as (Ollama)", None),
        "/api/ps": described("What is loaded (Ollama)", None),
        "/api/version": described("The version of this server (Ollama)", None),
    }
