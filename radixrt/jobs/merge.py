"""One value out of the values that the parts of a long document gave, by the shape that the schema has.

Invariants: the merged value meets the schema, because each value that is merged does and each step is checked: where a
merged object or array does not, one of the parts' own stands in its place.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from importlib import import_module
from typing import Any

from radixrt.errors import InvalidRequest, RadixrtError, nearest, shown
from radixrt.jobs.target import resolved

HOW = ("vote", "first")
_MAX_DEPTH = 150  # levels merged part by part: deeper ones are voted on as a whole


def merge(values: Sequence[Any], schema: dict[str, Any] | bool | None, how: str = "vote") -> Any:
    """One value of several, each valid under ``schema`` (``None``: texts of a regex or of choices).

    Objects are merged field by field, in the order of the schema; a field that some parts leave out is merged from
    those that have it. Arrays are concatenated, what comes again (as equal JSON) is left out, and the end beyond
    ``maxItems`` is cut; an array of fixed length or with ``prefixItems`` is one value, like a scalar. Scalars: the
    one that most parts have, the first of them on a tie (``vote``), or the first (``first``); null and empty strings
    count only where no part has more. Of several kinds (``anyOf``, ``oneOf``, an array here and an object there)
    the one that most parts have is merged.

    Where a merged object or array does not meet its schema (``minProperties``, ``uniqueItems``, ``contains``, a
    condition), the one that most parts have, or the first, is taken as a whole.

    Raises:
        InvalidRequest: no values, an unknown ``how``. RadixrtError: ``jsonschema`` is not installed.
    """
    if how not in HOW:
        raise InvalidRequest("merge", f"={shown(how)}{nearest(str(how), HOW)}")
    if not values:
        raise InvalidRequest("values", "=[]: there must be at least one value to merge")
    if len(values) == 1 or schema is None or not any(isinstance(value, dict | list) for value in values):
        return _one(values, how)
    return _Merge(schema, how).of(values, schema, 0)


def canonical(value: Any) -> str:
    """A JSON text that equal values share: ``1`` and ``1.0``, objects in any order of keys."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _one(values: Sequence[Any], how: str) -> Any:
    """The value that most have, the first of them on a tie, or the first; of what says something, if any does."""
    said = [value for value in values if value is not None and value != ""] or [v for v in values if v is not None]
    said = said or list(values)
    if how == "first":
        return said[0]
    keys = [canonical(value) for value in said]
    most = Counter(keys).most_common(1)[0][0]  # of equal counts the first met
    return said[keys.index(most)]


class _Merge:
    """One merge: the schema's root, for its references and the checks."""

    def __init__(self, root: dict[str, Any] | bool, how: str) -> None:
        self._root = root
        self._how = how
        self._valid = _checker(root)

    def of(self, values: Sequence[Any], schema: Any, depth: int) -> Any:
        values = [value for value in values if value is not None] or list(values)
        kinds = [type(value) if isinstance(value, dict | list) else str for value in values]
        kind = Counter(kinds).most_common(1)[0][0]
        values = [value for value, its in zip(values, kinds) if its is kind]
        if kind is str or len(values) == 1 or depth > _MAX_DEPTH:
            return _one(values, self._how)
        branch, taken = self._branch(values, schema)
        merged = self._object(taken, branch, depth) if kind is dict else self._array(taken, branch)
        return merged if self._valid(merged, schema) else _one(taken, self._how)

    def _branch(self, values: list[Any], schema: Any) -> tuple[dict[str, Any], list[Any]]:
        """The schema that says what the values look like, and those of them that are of this kind."""
        for _ in range(20):
            schema = resolved(schema, self._root)
            if not isinstance(schema, dict):
                return {}, values
            branches = schema.get("anyOf") or schema.get("oneOf")
            if not branches:
                return self._flattened(schema), values
            fitting = [next((i for i, each in enumerate(branches) if self._valid(v, each)), -1) for v in values]
            most = Counter(fitting).most_common(1)[0][0]
            values = [value for value, at in zip(values, fitting) if at == most]
            if most < 0 or "properties" in schema:  # the branches are conditions on what stands beside them
                return self._flattened(schema), values
            schema = branches[most]
        return {}, values

    def _flattened(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The schema with the properties that its ``allOf`` adds."""
        properties: dict[str, Any] = {}
        for part in schema.get("allOf", ()):
            part = resolved(part, self._root)
            properties |= part.get("properties", {}) if isinstance(part, dict) else {}
            schema = {**(part if isinstance(part, dict) else {}), **schema}
        properties |= schema.get("properties", {})
        return {**schema, "properties": properties} if properties else schema

    def _object(self, values: list[Any], schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        rest = schema.get("additionalProperties", {})
        names = dict.fromkeys(name for name in properties if any(name in value for value in values))
        names |= dict.fromkeys(name for value in values for name in value)
        return {
            name: self.of([value[name] for value in values if name in value], properties.get(name, rest), depth + 1)
            for name in names
        }

    def _array(self, values: list[Any], schema: dict[str, Any]) -> list[Any]:
        most = schema.get("maxItems")
        if (
            "prefixItems" in schema
            or isinstance(schema.get("items"), list)
            or (most and most == schema.get("minItems"))
        ):
            return _one(values, self._how)
        items: dict[str, Any] = {}
        for value in values:
            for item in value:
                items.setdefault(canonical(item), item)
        return list(items.values())[: None if most is None else int(most)]


def _checker(root: dict[str, Any] | bool) -> Callable[[Any, Any], bool]:
    """Whether a value meets a schema inside ``root``, with decimal numbers as they are written."""
    try:
        validators: Any = import_module("jsonschema.validators")
    except ImportError:
        raise RadixrtError("merging the parts of documents needs jsonschema: pip install jsonschema") from None
    exact = _exact(root)
    validator = validators.validator_for(exact, default=validators.Draft202012Validator)(exact)

    def valid(value: Any, schema: Any) -> bool:
        try:
            return validator.evolve(schema=_exact(schema)).is_valid(_exact(value))
        except Exception:  # a pattern or reference that jsonschema does not know: then it cannot be told
            return False

    return valid


def _exact(value: Any) -> Any:
    """The value with decimals in place of binary fractions: 19.99 is a multiple of 0.01."""
    return json.loads(json.dumps(value), parse_float=_number)


def _number(text: str) -> Decimal | int:
    number = Decimal(text)
    return int(number) if number == number.to_integral_value() else number
