"""Reads the bodies of ``/api/chat`` and ``/api/generate`` (Ollama): fields and options in, a turn out, or one error that names the field.

Invariants: an option is honoured, refused, or one of ``IGNORED``, which say how Ollama's own engine is to run. ``keep_alive`` is
judged here, and heeded where there are several models.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixrt.checks import flag, integer, number
from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.grammar.constraint import Constraint
from radixrt.request import SamplingParams
from radixrt.server.chat import ChatAsk, ReasoningAsk
from radixrt.server.dialects import object_of, renamed
from radixrt.server.errors import Failure, RequestFailed, UnknownField
from radixrt.server.openai_requests import EFFORTS
from radixrt.server.turns import known, text, way
from radixrt.tools import read_choice, read_tools
from radixrt.tools.definitions import NAME

_COMMON = ("model", "stream", "format", "options", "keep_alive", "think", "logprobs", "top_logprobs", "priority", "cache_salt")  # fmt: skip
CHAT = ("messages", "tools", *_COMMON)
GENERATE = ("prompt", "system", "raw", "context", "images", *_COMMON)
SHOW = ("model", "name", "verbose")
EMBED = ("model", "input", "dimensions", "truncate", "options", "keep_alive", "cache_salt")
EMBEDDINGS = ("model", "prompt", "options", "keep_alive", "cache_salt")
# Fields that models served here cannot do, and the values that ask for nothing.
LATER: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "template": ("",),
    "truncate": (True, False),  # a chat that is too long is always refused
    "shift": (True, False),
    "width": (0,),
    "height": (0,),
    "steps": (0,),
}
# Option -> field of SamplingParams.
_OPTIONS = {
    "num_predict": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # Ollama's
# Samplers that there are none of here, and the values by which they are off.
_OFF: dict[str, Any] = {
    "typical_p": 1,
    "tfs_z": 1,
    "mirostat": 0,
    "penalize_newline": True,
    "embedding_only": False,
    "vocab_only": False,
}
# How Ollama's engine is to run; and what has a meaning only with what is off.
IGNORED = (
    "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "use_mmap", "use_mlock", "num_thread",
    "num_keep", "mirostat_tau", "mirostat_eta",
)  # fmt: skip
OPTIONS = (*_OPTIONS, "num_ctx", "repeat_last_n", *_OFF, *IGNORED)
_MESSAGE = ("role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id")
ROLES = ("system", "user", "assistant", "tool")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_DURATION = re.compile(rf"[+-]?(?:(?:{_PART.pattern})+|[0-9]+(?:\.[0-9]+)?)")
_LONGEST = 100  # characters of a duration
_FOR_GOOD = 1e9  # seconds


@dataclass(frozen=True, slots=True)
class Rules:
    """What a server takes, whatever is asked.

    Fields:
        models: names it answers to. template: defaults of what the chat template is given. context, vocabulary: sizes, in tokens.
        thinks: the model does. warn: an unknown field is answered with a warning in place of an error.
    """

    models: tuple[str, ...]
    context: int
    vocabulary: int
    template: Mapping[str, Any] = field(default_factory=dict)
    thinks: bool = False
    warn: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read.

    Fields:
        chats: of ``/api/chat``. raw: the last message is the prompt. context: ids that come before it. idle: nothing is to be said.
    """

    ask: ChatAsk
    chats: bool
    raw: bool = False
    context: tuple[int, ...] = ()
    idle: bool = False
    warnings: Sequence[str] = ()


def read_turn(body: Mapping[str, Any], valid: Sequence[str], rules: Rules) -> Asked:
    """The turn that a body asks for. ``valid``: ``CHAT`` or ``GENERATE``.

    Raises:
        InvalidRequest, RequestFailed: names the field and its value, and says what would be right.
    """
    chats = valid is CHAT
    body, warnings = known("api/chat" if chats else "api/generate", body, valid, LATER, rules.warn)
    model = named_model(body.get("model"), rules.models)
    keep_alive(body.get("keep_alive"))
    names = {"prompt": "messages" if chats else "prompt", "constraint": "format"}
    params = _params(body, names, rules.context)
    tools = read_tools("tools", body.get("tools"))
    if tools and params.constraint is None:
        names["constraint"] = "tools"
    kwargs = dict(rules.template)
    raw, context = flag("raw", body.get("raw", False)), _context(body.get("context"), rules.vocabulary)
    messages = _messages(body.get("messages", [])) if chats else _texts(body)
    if raw and (context or body.get("system")):
        name = "context" if context else "system"
        raise InvalidRequest(name, f"={shown(body[name])}: has no meaning with raw=true")
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    if continues and ("tool_calls" in messages[-1] or not messages[-1]["content"]):
        problem = "is an assistant's: must have a content to go on with, and no calls"
        raise InvalidRequest(f"messages[{len(messages) - 1}]", problem)
    ask = ChatAsk(
        messages=tuple(messages),
        params=params,
        request_id=f"ollama-{uuid.uuid4().hex}",
        tools=tools,
        choice=read_choice(None, tools),
        reasoning=_reasoning(body.get("think"), kwargs, rules),
        template=kwargs,
        generation_prompt=not continues,
        continues=continues,
        stream=flag("stream", body.get("stream", True)),
        model=model,
        names=names,
        **way(body),
    )
    idle = not messages if chats else not body.get("prompt")
    return Asked(ask, chats, raw, tuple(context), idle, warnings)


def named_model(given: Any, models: Sequence[str]) -> str:
    """The name of a model that is served; clients write ``:latest`` behind it."""
    name = text("model", given)
    for valid in (name, name.removesuffix(":latest")):
        if valid in models:
            return valid
    problem = f"model={shown(name)}: is not served here{nearest(name, models)}"
    raise RequestFailed(Failure(404, problem, "model", "model_not_found"))


def _texts(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of ``/api/generate``."""
    _no_images("images", body.get("images"))
    roles = (("system", "system"), ("user", "prompt"))
    return [
        {"role": role, "content": text(name, body[name])} for role, name in roles if body.get(name) not in (None, "")
    ]


def _reasoning(think: Any, kwargs: dict[str, Any], rules: Rules) -> ReasoningAsk:
    """How the model is to think; ``kwargs`` learns how hard, for the templates that know of it."""
    if think is None:
        return ReasoningAsk()
    if not isinstance(think, bool) and (not isinstance(think, str) or think not in EFFORTS):
        raise InvalidRequest("think", f"={shown(think)}: must be true, false or one of {', '.join(EFFORTS)}")
    on = think not in (False, "none")
    if on and not rules.thinks:
        raise InvalidRequest("think", f"={shown(think)}: {rules.models[0]} does not think")
    if isinstance(think, bool):
        return ReasoningAsk(on)
    if on:
        kwargs.setdefault("reasoning_effort", think)
    return ReasoningAsk(on, EFFORTS[think] if on else None)


def _context(value: Any, vocabulary: int) -> list[int]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequest(
            "context", f"={shown(value)}: must be a list of token ids, the context of an answer before"
        )
    return [integer(f"context[{i}]", id, 0, vocabulary - 1) for i, id in enumerate(value)]


def _params(body: Mapping[str, Any], names: dict[str, str], context: int) -> SamplingParams:
    """Sampling parameters of a body; ``names`` learns what the body calls them."""
    given = body.get("options", {})
    if not isinstance(given, Mapping):
        raise InvalidRequest("options", f"={shown(given)}: must be an object")
    values: dict[str, Any] = dict(_DEFAULTS)
    for name, value in given.items():
        if name not in OPTIONS:
            problem = f"there is no such option{nearest(name, OPTIONS)}"
            raise UnknownField(f"options.{shown(name).strip(chr(39))}", problem)
        if value is None or name in IGNORED:
            continue
        if name in _OFF and value != _OFF[name]:
            problem = f"={shown(value)}: is not supported; must be {shown(_OFF[name])}, which is off, or left out"
            raise InvalidRequest(f"options.{name}", problem)
        if name in _OPTIONS:
            values[_OPTIONS[name]] = value
    if given.get("num_ctx") is not None:
        integer("options.num_ctx", given["num_ctx"], 1, context)
    last = given.get("repeat_last_n")
    if last not in (None, -1) and values.get("repetition_penalty", 1) != 1:
        problem = f"={shown(last)}: repeat_penalty counts the whole text here; must be -1 or left out"
        raise InvalidRequest("options.repeat_last_n", problem)
    names |= {own: f"options.{name}" for name, own in _OPTIONS.items()}
    names["logprobs"] = "top_logprobs"
    most = integer("options.num_predict", values.pop("max_tokens", -1), -2, 2**63 - 1)
    try:
        return SamplingParams(
            **values,
            max_tokens=None if most < 0 else most,
            constraint=_format(body.get("format")),
            logprobs=_logprobs(body.get("logprobs"), body.get("top_logprobs")),
        )
    except InvalidRequest as error:
        raise renamed(error, {**names, "json_schema": "format"}) from None


def _format(value: Any) -> Constraint | None:
    if value is None or value == "":
        return None
    if value == "json":
        return Constraint.json_object()
    if not isinstance(value, Mapping):
        raise InvalidRequest("format", f"={shown(value)}: must be json or a JSON Schema")
    return Constraint.json_schema(value)


def _logprobs(wanted: Any, top: Any) -> int | None:
    on = wanted is not None and flag("logprobs", wanted)
    if top is None:
        return 0 if on else None
    top = integer("top_logprobs", top, 0, 2**31 - 1)
    if not on and top:
        raise InvalidRequest("top_logprobs", f"={top}: needs logprobs=true")
    return top if on else None


def keep_alive(value: Any) -> float | None:
    """Seconds that a model is to stay; infinity: for good, as Ollama says it by what is below zero. ``None``: it is not said."""
    if value is None:
        return None
    if isinstance(value, str):
        if len(value) > _LONGEST or not _DURATION.fullmatch(value):
            raise InvalidRequest("keep_alive", f"={shown(value)}: must be a number of seconds or a duration such as 5m")
        parts = _PART.findall(value) or [(value.lstrip("+-"), "")]
        found = sum(float(count) * _SECONDS[unit] for count, unit in parts) * (-1 if value.startswith("-") else 1)
    else:
        found = number("keep_alive", value, -1e18, 1e18)
    return found if 0 <= found <= _FOR_GOOD else math.inf


# ---- messages


@dataclass(slots=True)
class _Waiting:
    """Calls of the assistant's last message that have no result yet: id -> name."""

    calls: dict[str, str] = field(default_factory=dict)
    count: int = 0


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages in OpenAI's form; those of Ollama's clients name their calls by order or by the tool."""
    if not isinstance(value, list):
        raise InvalidRequest("messages", f"={shown(value)}: must be a list of messages")
    waiting = _Waiting()
    return [_message(f"messages[{i}]", message, waiting) for i, message in enumerate(value)]


def _message(where: str, message: Any, waiting: _Waiting) -> dict[str, Any]:
    given = object_of(where, message, _MESSAGE)
    role = given.get("role")
    if role not in ROLES:
        problem = "is missing" if role is None else f"={shown(role)}"
        raise InvalidRequest(f"{where}.role", f"{problem}: must be one of {', '.join(ROLES)}")
    for name, owner in (("thinking", "assistant"), ("tool_calls", "assistant"), ("tool_name", "tool"), ("tool_call_id", "tool")):  # fmt: skip
        if given.get(name) and role != owner:
            raise InvalidRequest(f"{where}.{name}", f"={shown(given[name])}: belongs to a message of role {owner}")
    _no_images(f"{where}.images", given.get("images"))
    found: dict[str, Any] = {"role": role, "content": text(f"{where}.content", given.get("content", ""))}
    if given.get("thinking"):
        found["reasoning_content"] = text(f"{where}.thinking", given["thinking"])
    calls = given.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise InvalidRequest(f"{where}.tool_calls", f"={shown(calls)}: must be a list of calls")
        waiting.calls = {}
        found["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", call, waiting) for i, call in enumerate(calls)]
    if role == "tool":
        found["tool_call_id"] = _answered(where, given, waiting)
    return found


def _call(where: str, call: Any, waiting: _Waiting) -> dict[str, Any]:
    given = object_of(where, call, ("id", "type", "function"))
    if given.get("type", "function") != "function":
        raise InvalidRequest(f"{where}.type", f"={shown(given['type'])}: must be function")
    function = object_of(f"{where}.function", given.get("function"), ("index", "name", "description", "arguments"))
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str) or not NAME.fullmatch(name):
        problem = "is missing" if name is None else f"={shown(name)}"
        raise InvalidRequest(f"{where}.function.name", f"{problem}: must be a tool's name")
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{where}.function.arguments", f"={shown(arguments)}: must be an object")
    id = given.get("id") or f"call_{waiting.count}"
    if not isinstance(id, str) or id in waiting.calls:
        raise InvalidRequest(f"{where}.id", f"={shown(id)}: must be a text that no other call of the message has")
    waiting.calls[id] = name
    waiting.count += 1
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}  # fmt: skip


def _answered(where: str, given: Mapping[str, Any], waiting: _Waiting) -> str:
    """The id of the call that a result is of: the one it names, else the first of its tool, else the first."""
    id, name, calls = given.get("tool_call_id"), given.get("tool_name"), waiting.calls
    if id:
        found = [one for one in calls if one == id]
    elif name:
        found = [one for one, own in calls.items() if own == name]
    else:
        found = list(calls)
    if not found:
        field = "tool_call_id" if id else "tool_name" if name else "role"
        problem = f"={shown(id or name or 'tool')}: no call of the assistant's message before waits for it"
        raise InvalidRequest(
            f"{where}.{field}", problem + (nearest(str(name), calls.values()) if name and calls else "")
        )
    del calls[found[0]]
    return found[0]


def _no_images(where: str, value: Any) -> None:
    if value not in (None, []):
        raise InvalidRequest(where, " are given: the model reads text only")
