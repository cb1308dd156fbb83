"""The limits of regular languages: how much work one pattern or one operation may cost before it is refused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RegularLimits:
    """Limits are counts, not seconds, so that the same pattern is refused on every machine.

    Fields:
        length: characters of a pattern.
        nesting: depth of groups in a pattern.
        positions: character positions of a pattern once its counters are unrolled.
        states: states of any automaton while it is built.
        counted: states of the product of an automaton with a length counter.
        work: elementary steps of one construction; a step is about a microsecond.
    """

    length: int = 100_000
    nesting: int = 64
    positions: int = 20_000
    states: int = 20_000
    counted: int = 4_000
    work: int = 3_000_000


DEFAULT_LIMITS = RegularLimits()
