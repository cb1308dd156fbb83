"""JSON values as hashable keys, equal exactly when JSON Schema calls the values equal, and their shapes."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeAlias

from radixrt.errors import InvalidRequest
from radixrt.grammar.schema.arrays import Arrays
from radixrt.grammar.schema.check import is_number
from radixrt.grammar.schema.nodes import Node, Nodes
from radixrt.grammar.schema.numbers import Numbers, exact
from radixrt.grammar.schema.objects import Layer, Objects
from radixrt.grammar.schema.shape import Shape
from radixrt.grammar.schema.strings import Strings

Key: TypeAlias = tuple[Any, ...]


def key_of(value: Any, pointer: str) -> Key:
    """``1`` and ``1.0`` have one key, ``1`` and ``true`` two; the order of object keys is kept apart from equality."""
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, int | float | Decimal):
        if not is_number(value):
            raise InvalidRequest(pointer, f"={value!r}: is no JSON number")
        return ("number", exact(value))
    if isinstance(value, str):
        return ("string", value)
    if isinstance(value, list | tuple):
        return ("array", tuple(key_of(item, pointer) for item in value))
    if isinstance(value, dict):
        return ("object", Members((name, key_of(item, pointer)) for name, item in value.items()))
    raise InvalidRequest(pointer, f"={value!r}: is no JSON value")


class Members(tuple[tuple[str, Key], ...]):
    """The members of an object: equal whatever their order, iterated in the order they were written."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(frozenset(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Members) and frozenset(self) == frozenset(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def values_shape(keys: list[Key], nodes: Nodes) -> Shape:
    """Exactly these values."""
    numbers: set[Fraction] = set()
    texts: set[str] = set()
    arrays: dict[Arrays, None] = {}
    objects: list[Objects] = []
    seen: set[Key] = set()
    for key in keys:
        if key in seen:
            continue
        seen.add(key)
        kind = key[0]
        if kind == "number":
            numbers.add(key[1])
        elif kind == "string":
            texts.add(key[1])
        elif kind == "array":
            items = tuple(nodes.leaf("value", item) for item in key[1])
            arrays[Arrays(items, nodes.false, len(items), len(items))] = None
        elif kind == "object":
            members: dict[str, Node] = {name: nodes.leaf("value", item) for name, item in key[1]}
            objects.append(Objects((Layer(members, (), nodes.false),), tuple(members)))
    return Shape(
        ("null",) in seen,
        ("boolean", True) in seen,
        ("boolean", False) in seen,
        (Numbers(values=frozenset(numbers)),) if numbers else (),
        (Strings(values=frozenset(texts)),) if texts else (),
        tuple(arrays),
        tuple(objects),
    )
