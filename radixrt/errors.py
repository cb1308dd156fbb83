"""Errors a user can act on: each names the field, file or tensor, the value, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RadixrtError(Exception):
    """Base of every error radixrt raises on purpose."""


class ModelError(RadixrtError):
    """A model, tokenizer or chat template cannot be found, read or run."""


class InvalidRequest(RadixrtError, ValueError):
    """A request asks for something that cannot be done. ``field`` names the parameter at fault."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}{problem}" if problem[:1] in ("=", " ") else f"{field}: {problem}")
        self.field = field


class EngineClosed(RadixrtError):
    """The engine was closed while, or before, the request ran."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest valid name, or the list of valid names when none is close."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; valid names are {', '.join(names)}"


def unknown_field(owner: str, name: str, valid: Iterable[str]) -> InvalidRequest:
    """The error for a field that does not exist, with the nearest one that does."""
    return InvalidRequest(name, f"{owner} has no such field{nearest(name, valid)}")
