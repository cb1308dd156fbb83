"""A finite set of strings as a grammar: a byte trie with unbranched runs written as one literal.

Invariants: every ``Alt`` holds items that begin with different bytes (and at most one empty item), so that the automaton is
in one place at a time; expressions stay shallow however long the chain of choices inside one another is.
"""

from __future__ import annotations

from collections.abc import Iterable

from radixrt.grammar import ir

_HEIGHT = 24  # levels of branching in one rule; what lies below is a rule of its own


class _Node:
    """A place in the trie that is still open: how many bytes lead to it, what may follow, how high that is."""

    __slots__ = ("height", "items", "offset")

    def __init__(self, offset: int, items: list[ir.Expr]) -> None:
        self.offset, self.items, self.height = offset, items, 0


def choices_to_ir(choices: Iterable[str]) -> ir.Grammar:
    """The grammar of exactly these strings, which may be prefixes of one another. O(total length) after sorting."""
    words = sorted({choice.encode() for choice in choices})
    rules: dict[str, ir.Expr] = {}
    path = [_Node(0, [])]  # from the root to the last word
    last = b""

    def close(offset: int) -> None:
        """Close the nodes of the path below ``offset``, each into an item of its parent; the last one left is at ``offset``."""
        while path[-1].offset > offset:
            node = path.pop()
            if path[-1].offset < offset:  # the run above the node is cut in two
                path.append(_Node(offset, []))
            parent = path[-1]
            expr = node.items[0] if len(node.items) == 1 else ir.Alt(tuple(node.items))
            height = node.height + (len(node.items) > 1)
            if height >= _HEIGHT:
                rules[f"below{len(rules)}"] = expr
                expr, height = ir.Ref(f"below{len(rules) - 1}"), 0
            parent.items.append(_step(last[parent.offset : node.offset], expr))
            parent.height = max(parent.height, height)

    for word in words:
        close(_common(last, word))
        last = word
        if word:
            path.append(_Node(len(word), [ir.EMPTY]))
        else:
            path[0].items.append(ir.EMPTY)
    close(0)
    return ir.Grammar({**rules, "start": ir.Alt(tuple(path[0].items))})


def _step(run: bytes, node: ir.Expr) -> ir.Expr:
    if node == ir.EMPTY:
        return ir.Bytes(run)
    if isinstance(node, ir.Seq) and isinstance(node.items[0], ir.Bytes):
        return ir.Seq((ir.Bytes(run + node.items[0].value), *node.items[1:]))
    return ir.Seq((ir.Bytes(run), node))


def _common(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix."""
    if b.startswith(a):
        return len(a)
    low, high = 0, min(len(a), len(b))
    while low < high:  # the longest length at which both slices agree
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
