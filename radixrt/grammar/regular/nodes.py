"""The syntax tree of a pattern. Anchors and word boundaries are look-arounds here; there is nothing else to know about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from radixrt.grammar.regular.charset import ALL, CharSet


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    set: CharSet


@dataclass(frozen=True, slots=True)
class Cat:
    """One after the other; empty is the empty string."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """Any one of them; empty is the empty language."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Rep:
    """``item`` from ``low`` to ``high`` times (``None``: without end)."""

    item: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Look:
    """Nothing, where what follows starts with (``ahead``) or what precedes ends with ``item``; or does not (``negative``)."""

    item: Node
    ahead: bool
    negative: bool


Node: TypeAlias = Chars | Cat | Or | Rep | Look

EPSILON = Cat(())
VOID = Or(())
ANY = Chars(ALL)
ANY_STAR = Rep(ANY, 0, None)
AT_START = Look(ANY, ahead=False, negative=True)  # no character precedes
AT_END = Look(ANY, ahead=True, negative=True)  # no character follows


def cat(items: list[Node]) -> Node:
    """Concatenation with nested ones spliced in."""
    flat: list[Node] = []
    for item in items:
        flat.extend(item.items if isinstance(item, Cat) else (item,))
    return flat[0] if len(flat) == 1 else Cat(tuple(flat))


def either(items: list[Node]) -> Node:
    """Alternation; of one branch, that branch."""
    return items[0] if len(items) == 1 else Or(tuple(items))


def has_look(node: Node) -> bool:
    """Whether a look-around stands anywhere in the tree."""
    match node:
        case Look():
            return True
        case Cat(items) | Or(items):
            return any(has_look(item) for item in items)
        case Rep(item):
            return has_look(item)
    return False


def width(node: Node) -> tuple[int, int | None]:
    """The least and greatest number of characters a node takes (look-arounds are taken to hold); ``None``: without end."""
    match node:
        case Chars():
            return 1, 1
        case Cat(items):
            widths = [width(item) for item in items]
            highs = [b for _, b in widths if b is not None]
            return sum(a for a, _ in widths), sum(highs) if len(highs) == len(widths) else None
        case Or(items):
            widths = [width(item) for item in items] or [(0, 0)]
            highs = [b for _, b in widths if b is not None]
            return min(a for a, _ in widths), max(highs) if len(highs) == len(widths) else None
        case Rep(item, low, high):
            a, b = width(item)
            return a * low, 0 if b == 0 else None if b is None or high is None else b * high
    return 0, 0
