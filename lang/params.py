"""Sampling parameters: of many generations that differ in their seed only, checked once; and whether a backend honours them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from lang.backends.base import Backend
from lang.errors import UsageError
from radixrt import SamplingParams
from radixrt.engine.nodes import Read
from radixrt.errors import shown


def made_params(values: Mapping[str, Any]) -> SamplingParams:
    """``SamplingParams(**values)``; raises InvalidRequest as it does."""
    try:
        return _made(tuple((name, type(value), _fixed(value)) for name, value in values.items()))
    except TypeError:  # something that cannot be a key
        return SamplingParams(**values)


@lru_cache(maxsize=4096)
def _made(items: tuple[tuple[str, type, Any], ...]) -> SamplingParams:
    return SamplingParams(**{name: value for name, _, value in items})


def check_backend(
    backend: Backend, params: SamplingParams, names: Iterable[str], read: Read | None, role: str | None, line: str
) -> None:
    """Raises UsageError where a backend cannot honour a generation. ``names``: of the parameters that may have been given."""
    able = backend.capabilities
    if able.params is not None:
        plain = made_params({})
        for name in names:
            if name not in able.params and name != "seed" and getattr(params, name) != getattr(plain, name):
                raise UsageError(f"gen: {backend.name} cannot honour {name}={shown(getattr(params, name))}", line)
    if able.constraints is not None and params.constraint is not None:
        kind = params.constraint.to_dict()["type"]
        if kind not in able.constraints:
            raise UsageError(f"gen: {backend.name} cannot enforce a constraint of kind {kind!r}", line)
    if not able.completion and role != "assistant":
        raise UsageError(f"gen: {backend.name} generates only inside of an assistant message", line)
    if read is not None and not able.tools:
        raise UsageError(f"gen: {backend.name} cannot keep thinking apart (separate_reasoning=True)", line)


def _fixed(value: Any) -> Any:
    return tuple(value) if type(value) is list else value
