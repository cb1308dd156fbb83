"""The language in which agent programs are written; it sits on top of an engine or a server.

    from lang import function, gen, user, assistant

    @function
    def answer(s, question):
        s += user(question)
        s += assistant(gen("answer", max_tokens=64))

    print(answer.run("Why is the sky blue?")["answer"])

Programs written for SGLang's documented API run with ``import lang as sgl``.

Invariants: knows nothing of tensors; nothing happens at import: names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lang.backends.mock import MockBackend, MockCall
    from lang.backends.openai import OpenAI
    from lang.backends.remote import RuntimeEndpoint
    from lang.backends.runtime import Runtime
    from lang.backends.runtime import Runtime as Engine
    from lang.choices import (
        greedy_token_selection,
        token_length_normalized,
        total_logprob,
        unconditional_likelihood_normalized,
    )
    from lang.defaults import default_backend, flush_cache, get_server_info, set_default_backend
    from lang.errors import (
        BackendError,
        Cancelled,
        GenerationFailed,
        ProgramError,
        ProgramTimeout,
        UnknownVariable,
        UsageError,
    )
    from lang.expr import (
        assistant,
        assistant_begin,
        assistant_end,
        gen,
        gen_int,
        gen_string,
        image,
        select,
        system,
        system_begin,
        system_end,
        user,
        user_begin,
        user_end,
        video,
    )
    from lang.graph import ProgramGraph
    from lang.group import StateGroup
    from lang.linting import Finding, lint
    from lang.program import Function, function
    from lang.record import Replay, compare
    from lang.state import ProgramState
    from lang.tools import ToolCall, tool
    from radixrt import Constraint

_PLACES = {
    "lang.backends.mock": ("MockBackend", "MockCall"),
    "lang.backends.openai": ("OpenAI",),
    "lang.backends.remote": ("RuntimeEndpoint",),
    "lang.backends.runtime": ("Runtime", "Engine"),
    "lang.choices": (
        "greedy_token_selection",
        "token_length_normalized",
        "total_logprob",
        "unconditional_likelihood_normalized",
    ),
    "lang.defaults": ("default_backend", "flush_cache", "get_server_info", "set_default_backend"),
    "lang.errors": (
        "BackendError",
        "Cancelled",
        "GenerationFailed",
        "ProgramError",
        "ProgramTimeout",
        "UnknownVariable",
        "UsageError",
    ),
    "lang.expr": (
        "assistant",
        "assistant_begin",
        "assistant_end",
        "gen",
        "gen_int",
        "gen_string",
        "image",
        "select",
        "system",
        "system_begin",
        "system_end",
        "user",
        "user_begin",
        "user_end",
        "video",
    ),
    "lang.graph": ("ProgramGraph",),
    "lang.group": ("StateGroup",),
    "lang.linting": ("Finding", "lint"),
    "lang.program": ("Function", "function"),
    "lang.record": ("Replay", "compare"),
    "lang.state": ("ProgramState",),
    "lang.tools": ("ToolCall", "tool"),
    "radixrt": ("Constraint",),
}
_NAMES = {name: place for place, names in _PLACES.items() for name in names}
_ELSEWHERE = {
    "Anthropic": "use OpenAI(model, base_url=...) with a server that speaks OpenAI's API",
    "LiteLLM": "use OpenAI(model, base_url=...) with LiteLLM's proxy",
    "VertexAI": "use OpenAI(model, base_url=...) with a server that speaks OpenAI's API",
    "Shortfin": "use OpenAI(model, base_url=...) with a server that speaks OpenAI's API",
    "separate_reasoning": "use gen(..., separate_reasoning=True)",
}


def __getattr__(name: str) -> Any:
    place = _NAMES.get(name)
    if place is None:
        if name in _ELSEWHERE:
            raise AttributeError(f"lang.{name} is not available: {_ELSEWHERE[name]}")
        raise AttributeError(f"module 'lang' has no attribute {name!r}")
    module = importlib.import_module(place)
    value = getattr(module, "Runtime" if name == "Engine" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_NAMES, *globals()])


__all__ = [
    "BackendError",
    "Cancelled",
    "Constraint",
    "Engine",
    "Finding",
    "Function",
    "GenerationFailed",
    "MockBackend",
    "MockCall",
    "OpenAI",
    "ProgramError",
    "ProgramGraph",
    "ProgramState",
    "ProgramTimeout",
    "Replay",
    "Runtime",
    "RuntimeEndpoint",
    "StateGroup",
    "ToolCall",
    "UnknownVariable",
    "UsageError",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "compare",
    "default_backend",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "greedy_token_selection",
    "image",
    "lint",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "tool",
    "total_logprob",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]
