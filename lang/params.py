"""Sampling parameters of many generations that differ in their seed only, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from radixrt import SamplingParams


def made_params(values: Mapping[str, Any]) -> SamplingParams:
    """``SamplingParams(**values)``; raises InvalidRequest as it does."""
    try:
        return _made(tuple((name, type(value), _fixed(value)) for name, value in values.items()))
    except TypeError:  # something that cannot be a key
        return SamplingParams(**values)


@lru_cache(maxsize=4096)
def _made(items: tuple[tuple[str, type, Any], ...]) -> SamplingParams:
    return SamplingParams(**{name: value for name, _, value in items})


def _fixed(value: Any) -> Any:
    return tuple(value) if type(value) is list else value
