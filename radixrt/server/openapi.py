"""The OpenAPI description of every route, made from the lists of fields that the readers of the bodies use.

Invariants: a field that a route takes is in its description, and no other; the description needs neither an engine nor a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from radixrt import __version__
from radixrt.request import SamplingParams
from radixrt.server import anthropic, embeddings, ollama, page, responses
from radixrt.server.native import DETOKENIZE, GENERATE, SAMPLING, SCORE, TOKENIZE
from radixrt.server.openai_requests import CHAT, COMPLETION, EFFORTS
from radixrt.server.programs import RUN

_ID: dict[str, Any] = {"type": "integer", "minimum": 0}
_IDS: dict[str, Any] = {"type": "array", "items": _ID}
_TEXT: dict[str, Any] = {"type": "string"}
_FLAG: dict[str, Any] = {"type": "boolean"}
_OBJECT: dict[str, Any] = {"type": "object"}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT}
_BIAS: dict[str, Any] = {
    "type": "object",
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
_SCHEMA: dict[str, Any] = {"type": ["object", "string", "boolean"]}
_SUBSTRING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": _TEXT,
        "unit": {"enum": ["words", "characters"]},
        "max_length": {"type": "integer", "minimum": 1},
        "empty": _FLAG,
    },
    "required": ["text"],
    "additionalProperties": False,
}


def _number(low: float, high: float) -> dict[str, Any]:
    return {"type": "number", "minimum": low, "maximum": high}


def _least(low: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low}


# What the fields are, whichever route takes them.
_TYPES: dict[str, dict[str, Any]] = {
    "model": _TEXT,
    "temperature": _number(0, 100),
    "top_p": {**_number(0, 1), "exclusiveMinimum": 0},
    "min_p": _number(0, 1),
    "top_k": _least(-1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.01, 100),
    "logit_bias": _BIAS,
    "seed": {"type": "integer"},
    "sampling_seed": {"type": "integer"},
    "n": _least(1),
    "stop": {"oneOf": [_TEXT, _TEXTS]},
    "stop_token_ids": _IDS,
    "min_tokens": _least(0),
    "min_new_tokens": _least(0),
    "max_tokens": _least(0),
    "max_new_tokens": _least(0),
    "max_completion_tokens": _least(0),
    "top_logprobs": _least(0),
    "stream_options": {"type": "object", "properties": {"include_usage": _FLAG}},
    "priority": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    "cache_salt": {"type": "string", "maxLength": 1024},
    "text": {"oneOf": [_TEXT, _TEXTS]},
    "input_ids": {"oneOf": [_IDS, {"type": "array", "items": _IDS}]},
    "rid": {"oneOf": [_TEXT, _TEXTS]},
    "json_schema": _SCHEMA,
    "guided_json": _SCHEMA,
    "choice": _TEXTS,
    "choices": _TEXTS,
    "guided_choice": _TEXTS,
    "substring": {"oneOf": [_TEXT, _SUBSTRING]},
    "tokens": _IDS,
    "nodes": {"type": "array", "items": _OBJECT},
    "version": {"const": 1},
    "best_of": _least(1),
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": _TEXT,
                "content": {"oneOf": [_TEXT, {"type": "array", "items": _OBJECT}, {"type": "null"}]},
                "name": _TEXT,
                "reasoning_content": _TEXT,
                "tool_calls": {"type": "array", "items": _OBJECT},
                "tool_call_id": _TEXT,
            },
        },
    },
    "tools": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": _TEXT, "description": _TEXT, "parameters": _OBJECT, "strict": _FLAG},
                },
            },
        },
    },
    "tool_choice": {"oneOf": [{"enum": ["auto", "none", "required"]}, _OBJECT]},
    "reasoning_effort": {"enum": list(EFFORTS)},
    "thinking_budget": _least(0),
}  # fmt: skip
_FLAGS = (
    "stream", "echo", "ignore_eos", "skip_special_tokens", "include_stop", "no_stop_trim", "include_stop_str_in_output",
    "return_text_in_logprobs", "spaces_between_special_tokens", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "return_token_strs", "store", "parallel_tool_calls", "separate_reasoning",
)  # fmt: skip
_TEXT_FIELDS = (
    "regex", "ebnf", "grammar", "guided_regex", "guided_grammar", "suffix", "user", "name", "method", "safety_identifier",
    "prompt_cache_key", "prompt_cache_retention", "service_tier",
)  # fmt: skip
_OBJECTS = ("constraint", "chat_template_kwargs", "metadata", "structured_outputs", "response_format", "prompt_cache_options")  # fmt: skip
_TYPES |= dict.fromkeys(_FLAGS, _FLAG) | dict.fromkeys(_TEXT_FIELDS, _TEXT) | dict.fromkeys(_OBJECTS, _OBJECT)


def description() -> dict[str, Any]:
    """The whole description, OpenAPI 3.1."""
    sampling = _object(SAMPLING)
    prompt = {"oneOf": [_TEXT, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}
    many: dict[str, Any] = {"oneOf": [sampling, {"type": "array", "items": sampling}]}
    alike: dict[str, Any] = {"return_logprob": {}, "logprob_start_len": {}, "top_logprobs_num": {}}
    for name, kind in (("return_logprob", _FLAG), ("logprob_start_len", _least(-1)), ("top_logprobs_num", _least(0))):
        alike[name] = {"oneOf": [kind, {"type": "array", "items": kind}]}
    paths = {
        "/health": _get("Whether the engine answers and work is taken; needs no key", 503),
        "/metrics": _get("Figures for Prometheus", kind="text/plain"),
        "/openapi.json": _get("This description"),
        "/v1/models": _get("The names that the model is served as"),
        "/v1/models/{model}": _get("One of them", 404, path="model"),
        "/v1/chat/completions": _post("Answer a chat (OpenAI)", _object(CHAT, ["messages"], logprobs=_FLAG), stream=True),
        "/v1/completions": _post(
            "Continue a text (OpenAI)", _object(COMPLETION, ["prompt"], prompt=prompt, logprobs=_least(0)), stream=True
        ),
        "/generate": _post("Continue a text (SGLang)", _object(GENERATE, sampling_params=many, **alike), stream=True),
        "/tokenize": _post("The tokens of a text or a chat", _object(TOKENIZE, prompt=_TEXT, text=_TEXT)),
        "/detokenize": _post("The text of tokens", _object(DETOKENIZE, ["tokens"])),
        "/score": _post("How likely each of several texts is", _object(SCORE, ["choices"], prompt=_TEXT, input_ids=_IDS)),
        "/v1/programs": _post("Run a graph of a program", _object(RUN, ["version", "nodes"]), stream=True),
        "/v1/programs/ws": _get("A WebSocket for programs that grow as they run", 400, 503, done=101),
        "/flush_cache": _post("Forget what is cached and not in use", None),
        "/server_info": _get("Settings and figures"),
        "/get_server_info": _get("Settings and figures, under SGLang's name"),
        **embeddings.describe(),
        **responses.describe(),
        **anthropic.describe(),
        **ollama.describe(),
        **page.describe(),
    }  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": "radixrt", "version": __version__},
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR},
        },
        "security": [{"key": []}, {}],
    }  # fmt: skip


_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _object(names: Iterable[str], required: Iterable[str] = (), **types: Mapping[str, Any]) -> dict[str, Any]:
    optional = {name for name in SamplingParams.__dataclass_fields__ if name in ("max_tokens", "seed")}
    properties: dict[str, Any] = {}
    for name in names:
        kind = dict(types.get(name, _TYPES.get(name, {})))
        properties[name] = {"anyOf": [kind, {"type": "null"}]} if name in optional else kind
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _answers(statuses: Iterable[int], content: Mapping[str, Any] | None, done: int = 200) -> dict[str, Any]:
    error = {"description": "why not", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}  # fmt: skip
    found: dict[str, Any] = {str(done): {"description": "done"}}
    if content is not None:
        found[str(done)]["content"] = content
    return found | {str(status): error for status in statuses}


def _get(
    summary: str, *statuses: int, kind: str = "application/json", path: str | None = None, done: int = 200
) -> dict[str, Any]:
    content: dict[str, Any] | None = None if done == 101 else {kind: {"schema": {}}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": _answers(sorted({401, 403, 429, 503, *statuses}), content, done),
    }
    if path is not None:
        operation["parameters"] = [{"name": path, "in": "path", "required": True, "schema": _TEXT}]
    return {"get": operation}


def _post(summary: str, body: Mapping[str, Any] | None, *, stream: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {}}}
    if stream:
        content["text/event-stream"] = {"schema": {}}  # some readers check each event, some the whole text
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": _answers((400, 401, 403, 404, 413, 415, 429, 503), content),
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return {"post": operation}
