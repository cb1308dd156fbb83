"""Errors a user can act on: each names the field, file or tensor, the value, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Number


class RadixrtError(Exception):
    """Base of every error radixrt raises on purpose."""


class ModelError(RadixrtError):
    """A model, tokenizer or chat template cannot be found, read or run."""


class InvalidRequest(RadixrtError, ValueError):
    """A request asks for something that cannot be done. ``field`` names the parameter at fault."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}{problem}" if problem[:1] in ("=", " ", ":") else f"{field}: {problem}")
        self.field = field
        self._problem = problem

    def __reduce__(self) -> tuple[type[InvalidRequest], tuple[str, str]]:
        return type(self), (self.field, self._problem)


class EngineClosed(RadixrtError):
    """The engine was closed while, or before, the request ran."""


def shown(value: object, most: int = 80) -> str:
    """A value as a message shows it: on one line, at most ``most`` characters, and never an error of its own."""
    try:
        if isinstance(value, int) and value.bit_length() > 2 * most:
            return f"an integer of {value.bit_length()} bits"
        if isinstance(value, (str, bytes)) and len(value) > most:
            value = value[:most]
        elif isinstance(value, (list, tuple, dict, set, frozenset)) and len(value) >= 64:
            return f"a {type(value).__name__} of {len(value)} elements"
        text = str(value) if isinstance(value, Number) else repr(value)  # 3, not np.int64(3)
    except Exception:
        text = f"a value of type {type(value).__name__}"
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= most else text[: most - 3] + "..."


def nearest(name: str, valid: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest valid name, or the list of valid names when none is close."""
    names = sorted(valid)
    close = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; valid names are {', '.join(names)}"


def unknown_field(owner: str, name: str, valid: Iterable[str]) -> InvalidRequest:
    """The error for a field that does not exist, with the nearest one that does."""
    short = name if len(name) <= 80 else name[:77] + "..."
    return InvalidRequest(short, f"{owner} has no such field{nearest(name, valid)}")
