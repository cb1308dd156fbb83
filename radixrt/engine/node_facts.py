"""What is known of a program's node from those around it: why it failed, what follows it, which lease it continues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixrt.engine.nodes import Gen, Select, Wait
from radixrt.errors import RadixrtError
from radixrt.grammar.errors import UnsupportedConstraint

if TYPE_CHECKING:
    from radixrt.engine.programs import _Live, _Program


def steps_below(live: _Live) -> int | None:
    """Generations that are known to follow, along the longest path of what waits; ``None``: nothing is known."""
    if not live.dependents:
        return None
    steps, stack = 0, [(live, 0)]
    seen = 0
    while stack and seen < 256:  # an estimate: a large graph is not walked whole at each step
        one, depth = stack.pop()
        seen += 1
        steps = max(steps, depth)
        stack += [(other, depth + isinstance(other.node, (Gen, Select))) for other in one.dependents]
    return steps


def because(live: _Live) -> str:
    name = getattr(live.node, "name", "")
    return (
        f"needs {f'{name!r} (node {live.node.id})' if name else f'node {live.node.id}'}, which failed: {live.failed}"[
            :2000
        ]
    )


def kind(error: Exception) -> str:
    if isinstance(error, UnsupportedConstraint):
        return "unsupported"
    return "invalid" if isinstance(error, RadixrtError) else "error"


def told(error: Exception) -> str:
    return str(error) if isinstance(error, RadixrtError) else f"{type(error).__name__}: {error}"


def leased(program: _Program, live: _Live) -> _Live | None:
    """The generation that ``live`` continues, where its KV is leased."""
    at = live
    while at.node.parent is not None:
        at = program.live[at.node.parent]
        if isinstance(at.node, (Gen, Select, Wait)):
            return at if at.lease is not None else None
    return None
