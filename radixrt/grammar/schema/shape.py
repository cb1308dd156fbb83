"""What a value may be, type by type: for each JSON type a union of sets. Closed under and, or, not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.schema import arrays, numbers, objects, strings
from radixrt.grammar.schema.arrays import Arrays
from radixrt.grammar.schema.limits import Clock
from radixrt.grammar.schema.nodes import Nodes
from radixrt.grammar.schema.numbers import ALL_NUMBERS, Numbers
from radixrt.grammar.schema.objects import ALL_OBJECTS, Objects
from radixrt.grammar.schema.strings import ALL_STRINGS, Languages, Strings, StringSet

Part = TypeVar("Part")
_MANY_STRINGS = 12  # sets of strings in one union before they are joined into one automaton


@dataclass(frozen=True, eq=False, slots=True)
class Shape:
    """A union, by type. An empty tuple: no value of that type."""

    null: bool = False
    true: bool = False
    false: bool = False
    numbers: tuple[Numbers, ...] = ()
    strings: tuple[Strings, ...] = ()
    arrays: tuple[Arrays, ...] = ()
    objects: tuple[Objects, ...] = ()

    @property
    def scalar(self) -> bool:
        """No arrays and no objects."""
        return not self.arrays and not self.objects

    @property
    def nothing(self) -> bool:
        """No value at all, as far as the surface shows."""
        return not (self.null or self.true or self.false or self.numbers or self.strings or self.arrays or self.objects)


class Shapes:
    """The operations on shapes, with the limits of one compilation."""

    def __init__(
        self, nodes: Nodes, languages: Languages, clock: Clock, clash: Callable[[Objects, Objects], bool]
    ) -> None:
        self.nodes = nodes
        self.languages = languages
        self.clock = clock
        self._clash = clash  # whether two sets of objects are disjoint by the value of a required key
        self.any_array = arrays.any_array(nodes)
        self.anything = Shape(True, True, True, (ALL_NUMBERS,), (ALL_STRINGS,), (self.any_array,), (ALL_OBJECTS,))
        self.nothing = Shape()

    def both(self, a: Shape, b: Shape) -> Shape:
        """The intersection."""
        if a is self.anything:
            return b
        if b is self.anything:
            return a
        return Shape(
            a.null and b.null,
            a.true and b.true,
            a.false and b.false,
            self._product(a.numbers, b.numbers, numbers.intersect),
            self._strings(a.strings, b.strings),
            self._product(a.arrays, b.arrays, lambda x, y: arrays.intersect(x, y, self.nodes)),
            self._objects(a.objects, b.objects),
        )

    def either(self, shapes: Iterable[Shape], keep: bool = False) -> Shape:
        """The union. ``keep``: a part that another covers stays, for what it says about evaluated keys and items."""
        items = list(shapes)
        if len(items) == 1:
            return items[0]
        if not keep and any(item is self.anything for item in items):
            return self.anything
        return Shape(
            any(item.null for item in items),
            any(item.true for item in items),
            any(item.false for item in items),
            self._union([item.numbers for item in items], ALL_NUMBERS),
            self._join(_merge_values(self._union([item.strings for item in items], ALL_STRINGS))),
            self._union([item.arrays for item in items], None if keep else self.any_array),
            self._union([item.objects for item in items], None if keep else ALL_OBJECTS),
        )

    def negate(self, shape: Shape) -> Shape:
        """The complement. What the schemas have evaluated is forgotten, as ``not`` demands."""
        return Shape(
            not shape.null,
            not shape.true,
            not shape.false,
            self._outside(shape.numbers, ALL_NUMBERS, lambda x: _tidied(numbers.complement(x)), numbers.intersect),
            self._not_strings(shape.strings),
            self._outside(
                shape.arrays,
                self.any_array,
                lambda x: arrays.complement(x, self.nodes),
                lambda x, y: arrays.intersect(x, y, self.nodes),
            ),
            self._not_objects(shape.objects),
        )

    # -- parts

    def _product(
        self, a: tuple[Part, ...], b: tuple[Part, ...], meet: Callable[[Part, Part], Part | None]
    ) -> tuple[Part, ...]:
        if not a or not b:
            return ()
        made: dict[Part, None] = {}
        for x in a:
            for y in b:
                part = meet(x, y)
                if part is not None:
                    made[part] = None
            self._bound(made)
        return tuple(made)

    def _strings(self, a: StringSet, b: StringSet) -> StringSet:
        return self._join(self._product(a, b, lambda x, y: strings.intersect(x, y, self.languages)))

    def _join(self, parts: StringSet) -> StringSet:
        return self.languages.collapse(parts) if len(parts) > _MANY_STRINGS else parts

    def _not_strings(self, parts: StringSet) -> StringSet:
        rest = strings.EVERY_STRING
        for part in parts:
            rest = self._strings(rest, tuple(strings.complement(part)))
        return rest

    def _objects(self, a: tuple[Objects, ...], b: tuple[Objects, ...]) -> tuple[Objects, ...]:
        look = len(a) * len(b) > 1

        def meet(x: Objects, y: Objects) -> Objects | None:
            part = objects.intersect(x, y, self.nodes, self.languages)
            if part is None or part is x or part is y or not look:
                return part
            return None if self._clash(x, y) else part

        return self._product(a, b, meet)

    def _outside(
        self,
        parts: tuple[Part, ...],
        everything: Part,
        complement: Callable[[Part], Iterable[Part]],
        meet: Callable[[Part, Part], Part | None],
    ) -> tuple[Part, ...]:
        rest: tuple[Part, ...] = (everything,)
        for part in parts:
            rest = self._product(rest, tuple(complement(part)), meet)
        return rest

    def _not_objects(self, parts: tuple[Objects, ...]) -> tuple[Objects, ...]:
        rest: tuple[Objects, ...] = (ALL_OBJECTS,)
        for part in parts:
            rest = self._objects(rest, tuple(objects.complement(part, self.nodes, self.languages)))
        return rest

    def _union(self, groups: list[tuple[Part, ...]], everything: Part | None) -> tuple[Part, ...]:
        made: dict[Part, None] = {}
        for group in groups:
            made.update(dict.fromkeys(group))
        if everything is not None and everything in made:
            return (everything,)
        self._bound(made)
        return tuple(made)

    def _bound(self, made: dict[Part, None]) -> None:
        self.clock.check()
        most = self.clock.limits.parts
        if len(made) > most:
            raise UnsupportedConstraint(
                self.clock.pointer, f"splits into more than {most} alternatives (limit `parts`), too many to be exact"
            )


def _tidied(parts: Iterator[Numbers]) -> Iterator[Numbers]:
    for part in parts:
        made = numbers.tidy(part)
        if made is not None:
            yield made


def _merge_values(parts: tuple[Strings, ...]) -> tuple[Strings, ...]:
    listed = [part for part in parts if part.values is not None]
    if len(listed) < 2:
        return parts
    values = frozenset(value for part in listed for value in part.values or ())
    return (Strings(values=values), *(part for part in parts if part.values is None))
