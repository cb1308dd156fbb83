"""Formulas over schemas: what a value has to satisfy, before it is looked at.

A ``Node`` is a schema at a place, a fixed value, a ready shape, or a conjunction, disjunction or negation of nodes. Nodes are
interned, so that equal formulas are one object and recursion through merged schemas comes back to where it was: the formulas
that can arise from one schema are finitely many. Negation is pushed inward, so ``not`` only ever stands before a leaf.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Node:
    """One formula. Identity is equality."""

    __slots__ = ("args", "attached", "kind")

    def __init__(self, kind: str, args: tuple[Any, ...]) -> None:
        self.kind = kind
        self.args = args
        self.attached: list[Any] = []  # what is made from the formula once

    def __repr__(self) -> str:
        return f"{self.kind}{self.args!r}"


class Nodes:
    """Makes nodes, each once."""

    def __init__(self) -> None:
        self._made: dict[Any, Node] = {}
        self.true = Node("true", ())
        self.false = Node("false", ())

    def leaf(self, kind: str, *args: Any) -> Node:
        """A schema at a place (``schema``), a JSON value (``value``) or a ready shape (``shape``)."""
        key = (kind, args)
        node = self._made.get(key)
        if node is None:
            node = self._made[key] = Node(kind, args)
        return node

    def both(self, items: Iterable[Node]) -> Node:
        """The conjunction, flattened; the order of first mention is kept, as it decides the order of keys."""
        return self._join("and", items, self.true, self.false)

    def either(self, items: Iterable[Node]) -> Node:
        """The disjunction, flattened."""
        return self._join("or", items, self.false, self.true)

    def _join(self, kind: str, items: Iterable[Node], neutral: Node, absorbing: Node) -> Node:
        flat: dict[Node, None] = {}
        for item in items:
            if item is absorbing:
                return absorbing
            if item.kind == kind:
                flat.update(dict.fromkeys(item.args))
            elif item is not neutral:
                flat[item] = None
        if len(flat) < 2:
            return next(iter(flat), neutral)
        if any(item.kind == "not" and item.args[0] in flat for item in flat):
            return absorbing
        key = (kind, frozenset(flat))
        node = self._made.get(key)
        if node is None:
            node = self._made[key] = Node(kind, tuple(flat))
        return node

    def negate(self, node: Node) -> Node:
        """The complement, by de Morgan down to the leaves."""
        if node is self.true:
            return self.false
        if node is self.false:
            return self.true
        if node.kind == "not":
            return node.args[0]
        if node.kind == "and":
            return self.either([self.negate(item) for item in node.args])
        if node.kind == "or":
            return self.both([self.negate(item) for item in node.args])
        return self.leaf("not", node)
