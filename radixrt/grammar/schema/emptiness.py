"""Whether formulas can hold at all. The answers err on one side: "empty" is certain, "not empty" may be a guess.

Used to drop alternatives that cannot hold and to see that branches exclude each other; nothing becomes wrong without it, only
larger. The depth of looking is bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixrt.errors import InvalidRequest
from radixrt.grammar.schema import objects
from radixrt.grammar.schema.arrays import Arrays
from radixrt.grammar.schema.nodes import Node
from radixrt.grammar.schema.objects import Objects
from radixrt.grammar.schema.shape import Shape

if TYPE_CHECKING:
    from radixrt.grammar.schema.normalize import Normalizer

_DEPTH = 3  # levels of values inside values that are looked at


class Emptiness:
    """Bounded emptiness tests on the formulas of one compilation."""

    def __init__(self, normalizer: Normalizer) -> None:
        self.normalizer = normalizer
        self._depth = 0
        self._empty: dict[Node, bool] = {}

    def empty(self, node: Node) -> bool:
        """True only if no value satisfies the formula."""
        if node.kind in ("true", "false"):
            return node.kind == "false"
        known = self._empty.get(node)
        if known is not None:
            return known
        if self._depth >= _DEPTH:
            return False
        self._depth += 1
        pointer = self.normalizer.clock.pointer
        try:
            result = self.shape_empty(self.normalizer.shape(node))
        except InvalidRequest:  # found again, and reported, when the grammar gets there; or never needed
            self.normalizer.clock.pointer = pointer
            return False
        finally:
            self._depth -= 1
        if result or self._depth == 0:
            self._empty[node] = result
        return result

    def shape_empty(self, shape: Shape) -> bool:
        """True only if the shape holds no value."""
        if shape.null or shape.true or shape.false or shape.numbers:
            return False
        languages = self.normalizer.languages
        return (
            all(languages.empty(part) for part in shape.strings)
            and all(self._array_empty(part) for part in shape.arrays)
            and all(self._object_empty(part) for part in shape.objects)
        )

    def disjoint(self, a: Node, b: Node, context: Shape) -> bool:
        """True only if no value of the context satisfies both."""
        normalizer = self.normalizer
        if normalizer.nodes.both((a, b)) is normalizer.nodes.false:
            return True
        if self._depth >= _DEPTH:
            return False
        one = normalizer.shapes.both(context, normalizer.shape(a))
        two = normalizer.shape(b)
        self._depth += 1
        try:
            return self.shape_empty(normalizer.shapes.both(one, two))
        finally:
            self._depth -= 1

    def clash(self, a: Objects, b: Objects) -> bool:
        """True only if a key that is required has no value that both allow."""
        if self._depth >= _DEPTH:
            return False
        return any(
            self.empty(node) for node in objects.contested(a, b, self.normalizer.nodes, self.normalizer.languages)
        )

    def _array_empty(self, part: Arrays) -> bool:
        return any(self.empty(part.item(index)) for index in range(min(part.low, len(part.prefix) + 1)))

    def _object_empty(self, part: Objects) -> bool:
        normalizer = self.normalizer
        for name in part.required:
            if self.empty(part.value(name, normalizer.nodes, normalizer.languages)):
                return True
        required = frozenset(part.required)
        for clause in part.clauses:
            if clause.present <= required and all(
                self.empty(part.value(name, normalizer.nodes, normalizer.languages)) for name in clause.then
            ):
                return True
        return False
