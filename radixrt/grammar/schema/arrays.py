"""Sets of arrays that a schema can describe, closed under intersection and complement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from radixrt.grammar.schema.nodes import Node, Nodes


@dataclass(frozen=True, slots=True)
class Contains:
    """From ``low`` to ``high`` of the items from index ``offset`` on satisfy ``node``."""

    offset: int
    node: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Which items the schemas behind a set have looked at: the first ``count`` (``None``: all), and any that match."""

    count: int | None = 0
    matching: tuple[Node, ...] = ()

    def __or__(self, other: Evaluated) -> Evaluated:
        count = None if self.count is None or other.count is None else max(self.count, other.count)
        return Evaluated(count, tuple(dict.fromkeys(self.matching + other.matching)))


UNSEEN = Evaluated()


@dataclass(frozen=True, slots=True)
class Arrays:
    """All arrays that meet every field. ``unique``: no two items equal (True), some two equal (False), no matter (None)."""

    prefix: tuple[Node, ...]
    rest: Node
    low: int = 0
    high: int | None = None
    contains: tuple[Contains, ...] = ()
    unique: bool | None = None
    evaluated: Evaluated = UNSEEN

    def item(self, index: int) -> Node:
        """What the item at an index has to satisfy."""
        return self.prefix[index] if index < len(self.prefix) else self.rest


def any_array(nodes: Nodes) -> Arrays:
    """Every array."""
    return Arrays((), nodes.true)


def intersect(a: Arrays, b: Arrays, nodes: Nodes) -> Arrays | None:
    """What is in both, or ``None`` when that is seen to be nothing."""
    if a.unique is not None and b.unique is not None and a.unique != b.unique:
        return None
    size = max(len(a.prefix), len(b.prefix))
    return tidy(
        Arrays(
            tuple(nodes.both((a.item(index), b.item(index))) for index in range(size)),
            nodes.both((a.rest, b.rest)),
            max(a.low, b.low),
            a.high if b.high is None else b.high if a.high is None else min(a.high, b.high),
            tuple(dict.fromkeys(a.contains + b.contains)),
            a.unique if b.unique is None else b.unique,
            a.evaluated | b.evaluated,
        ),
        nodes,
    )


def tidy(part: Arrays, nodes: Nodes) -> Arrays | None:
    """The same set in its simplest fields, or ``None`` when it is seen to be empty."""
    low, high, prefix, rest = part.low, part.high, part.prefix, part.rest
    kept: list[Contains] = []
    for item in part.contains:
        if item.node is nodes.false:
            if item.low > 0:
                return None
        elif item.node is nodes.true:
            low = max(low, item.offset + item.low) if item.low else low
            if item.high is not None:
                high = item.offset + item.high if high is None else min(high, item.offset + item.high)
        elif item.low or item.high is not None:
            if item.high is not None and item.low > item.high:
                return None
            kept.append(item)
            if item.low:
                low = max(low, item.offset + item.low)
    stop = next((index for index, node in enumerate(prefix) if node is nodes.false), None)
    if stop is None and rest is nodes.false:
        stop = len(prefix)
    if stop is not None:
        high = stop if high is None else min(high, stop)
    if high is not None and high <= len(prefix):
        prefix, rest = prefix[:high], nodes.false
    while prefix and prefix[-1] is rest:
        prefix = prefix[:-1]
    if high is not None and low > high:
        return None
    unique = part.unique
    if high is not None and high <= 1:
        if unique is False:
            return None
        unique = None
    elif unique is False:
        low = max(low, 2)
    return replace(part, prefix=prefix, rest=rest, low=low, high=high, contains=tuple(kept), unique=unique)


def complement(part: Arrays, nodes: Nodes) -> Iterator[Arrays]:
    """The arrays outside: sets whose union is exactly the rest."""
    if part.low:
        yield Arrays((), nodes.true, high=part.low - 1)
    if part.high is not None:
        yield Arrays((), nodes.true, low=part.high + 1)
    for index, node in enumerate(part.prefix):
        if node is not nodes.true:
            yield Arrays((*(nodes.true,) * index, nodes.negate(node)), nodes.true, low=index + 1)
    if part.rest is not nodes.true and (part.high is None or part.high > len(part.prefix)):
        wrong = Contains(len(part.prefix), nodes.negate(part.rest), 1, None)
        made = tidy(Arrays((), nodes.true, contains=(wrong,)), nodes)
        if made is not None:
            yield made
    for item in part.contains:
        if item.low:
            yield Arrays((), nodes.true, contains=(replace(item, low=0, high=item.low - 1),))
        if item.high is not None:
            yield Arrays((), nodes.true, contains=(replace(item, low=item.high + 1, high=None),))
    if part.unique is not None:
        made = tidy(Arrays((), nodes.true, unique=not part.unique), nodes)
        if made is not None:
            yield made
