"""ProgramHint is what a request tells the scheduler about the program that it is a step of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProgramHint:
    """Where a request stands in its program.

    Fields:
        program: id of the running program.
        name: the function it runs; what a program will need is learnt for each name.
        order: arrival number of the program, ascending.
        step: generations of the program that were finished before this one.
        remaining: steps known to follow this one; ``None``: unknown.
        group: id of the fork that this request is a sibling of; empty: none.
        fanout: siblings in that fork.
    """

    program: str
    name: str
    order: int
    step: int
    remaining: int | None = None
    group: str = ""
    fanout: int = 1
