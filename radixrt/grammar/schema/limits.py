"""What one schema may cost to compile, and the clock that watches it. Every bound is a field with a default."""

from __future__ import annotations

import time
from dataclasses import dataclass

from radixrt.grammar.errors import UnsupportedConstraint


@dataclass(frozen=True)
class SchemaLimits:
    """Bounds on a schema and on what it becomes. Crossing one raises ``UnsupportedConstraint`` that names it."""

    text_bytes: int = 4_000_000  # of a schema given as text
    nodes: int = 200_000  # JSON values in a schema
    nesting: int = 200  # depth of JSON values in a schema
    applied: int = 60  # schemas applied to one value through each other ($ref to $ref, allOf in allOf)
    parts: int = 400  # alternatives of one type that a schema is split into
    rules: int = 50_000  # rules of the grammar
    states: int = 4_000  # states of one array or object that has to be counted
    any_order_keys: int = 8  # keys whose order may be free at once, when any order is asked for
    free_keys: int = 5  # optional keys of an object up to which their order among each other is free anyway
    unique_values: int = 10  # distinct values an array with uniqueItems may draw from
    seconds: float = 5.0  # wall time


class Clock:
    """Raises once the compilation has taken longer than its limit allows."""

    __slots__ = ("deadline", "limits", "pointer")

    def __init__(self, limits: SchemaLimits) -> None:
        self.limits = limits
        self.deadline = time.monotonic() + limits.seconds
        self.pointer = "#"

    def check(self) -> None:
        """Called wherever work can pile up."""
        if time.monotonic() > self.deadline:
            raise UnsupportedConstraint(
                self.pointer, f"the schema takes longer than {self.limits.seconds:g} s to compile (limit `seconds`)"
            )
