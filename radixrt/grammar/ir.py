"""The one language between the front ends and the engine: grammars whose terminals are bytes.

Front ends (regex, JSON Schema, lark/gbnf/ebnf, choices) produce a ``Grammar``; the automaton runs it. Everything is immutable
and hashable. A grammar describes exactly the allowed byte strings of the whole output; there is no skipping and no lexer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Bytes:
    """Exactly these bytes; empty matches nothing at all (the empty string)."""

    value: bytes


@dataclass(frozen=True, slots=True)
class ByteSet:
    """One byte of a set: bit ``b`` of ``bits`` (0 <= bits < 2**256) allows byte ``b``. ``bits == 0`` is the empty language."""

    bits: int


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other; empty is the empty string."""

    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """Any one of them; empty is the empty language."""

    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """``item`` from ``low`` to ``high`` times (``None``: without end). Never unrolled: the automaton counts."""

    item: Expr
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Ref:
    """The rule of that name; rules may be recursive, but not left-recursive."""

    name: str


@dataclass(frozen=True, slots=True)
class Dfa:
    """A deterministic byte automaton. State 0 is the start.

    ``edges[s]`` lists ``(low byte, high byte, next state)``, disjoint and ascending; ``accepting`` are the final states.
    """

    edges: tuple[tuple[tuple[int, int, int], ...], ...]
    accepting: frozenset[int]


@dataclass(frozen=True, slots=True)
class PackedDfa:
    """A ``Dfa`` too large for tuples. ``words``: int32 of this machine; for each state: accepting, number of edges, the edges."""

    states: int
    words: bytes


@dataclass(frozen=True, slots=True)
class JsonChars:
    """The inside of a JSON string, without its quotes: ``low`` to ``high`` code points, each raw UTF-8 or escaped.

    A character is any Unicode scalar value from U+0020 on but ``"`` and ``\\``, as UTF-8; or ``\\"  \\\\  \\/  \\b  \\f  \\n  \\r  \\t``; or
    ``\\uXXXX`` that is no surrogate; or a pair of ``\\uD8..`` and ``\\uDC..`` escapes (one code point). A node of its own because most
    text a model writes is inside strings, and the automaton has a fast path for it.
    """

    low: int = 0
    high: int | None = None


Expr: TypeAlias = Bytes | ByteSet | Seq | Alt | Repeat | Ref | Dfa | PackedDfa | JsonChars

EMPTY = Seq(())  # the empty string
NOTHING = Alt(())  # the empty language


@dataclass(frozen=True)
class Grammar:
    """Rules by name, and the one that describes the whole output."""

    rules: Mapping[str, Expr]
    start: str = "start"


def byte_range(low: int, high: int) -> ByteSet:
    """Any byte from ``low`` to ``high``, both included."""
    return ByteSet(((1 << (high + 1)) - 1) & ~((1 << low) - 1))
