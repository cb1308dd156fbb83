"""What a name in a state stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Variable:
    """Where a value comes from: a node (with all its samples where it has several), a span of a state's text, a value that is there, or one made when it is read."""

    node: int | None = None
    samples: int = 1
    parse: Callable[[str], Any] | None = None
    span: tuple[int, ...] | None = None  # nodes, of a scope
    value: Any = None
    make: Callable[[], Any] | None = None
