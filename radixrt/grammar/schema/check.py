"""Checks that the values of a schema's keywords are what the drafts allow. One function call for each schema, no recursion."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

from radixrt.errors import InvalidRequest, nearest
from radixrt.grammar.schema.drafts import Draft

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def is_number(value: object) -> bool:
    """A JSON number: no boolean, no infinity."""
    if isinstance(value, bool):
        return False
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) or (isinstance(value, Decimal) and value.is_finite())


def _count(value: object) -> str | None:
    whole = is_number(value) and value == int(value) and value >= 0  # type: ignore[call-overload, operator]
    return None if whole else "must be a whole number that is not negative"


def _number(value: object) -> str | None:
    return None if is_number(value) else "must be a number"


def _positive(value: object) -> str | None:
    return None if is_number(value) and value > 0 else "must be a number above 0"  # type: ignore[operator]


def _boolean(value: object) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _string(value: object) -> str | None:
    return None if isinstance(value, str) else "must be a string"


def _names(value: object) -> str | None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return "must be a list of strings"
    return _unicode(value)


def _unicode(names: Iterable[str]) -> str | None:
    """Keys that no UTF-8 text can hold could only be written as escapes, and most readers refuse them."""
    for name in names:
        if not name.isascii() and any("\ud800" <= char <= "\udfff" for char in name):
            return f"must hold Unicode text: {name[:40]!r} has a lone surrogate"
    return None


def _required(value: object) -> str | None:
    if isinstance(value, bool):
        return "must be a list of strings (a boolean here is draft 3)"
    return _names(value)


def _schema(value: object) -> str | None:
    return None if isinstance(value, dict | bool) else "must be a schema (an object or a boolean)"


def _schemas(value: object) -> str | None:
    if not isinstance(value, list) or not value:
        return "must be a list of at least one schema"
    return (
        None if all(isinstance(item, dict | bool) for item in value) else "must hold only schemas (objects or booleans)"
    )


def _schema_map(value: object) -> str | None:
    if not isinstance(value, dict):
        return "must be an object of schemas"
    if not all(isinstance(item, dict | bool) for item in value.values()):
        return "must hold only schemas"
    return _unicode(value)


def _type(value: object) -> str | None:
    names = value if isinstance(value, list) else [value]
    for name in names:
        if not isinstance(name, str):
            return "must be the name of a type, or a list of them"
        if name not in TYPES:
            return f"{name!r} is no type{nearest(name, TYPES)}"
    return None if names else "must name at least one type"


def _enum(value: object) -> str | None:
    return None if isinstance(value, list) else "must be a list of values"


def _required_map(value: object) -> str | None:
    if not isinstance(value, dict):
        return "must be an object of lists of strings"
    listed = next((f"{name!r} {problem}" for name, item in value.items() if (problem := _names(item))), None)
    return listed or _unicode(value)


def _dependencies(value: object) -> str | None:
    if not isinstance(value, dict):
        return "must be an object"
    for name, item in value.items():
        if not isinstance(item, dict | bool) and _names(item):
            return f"{name!r} must be a schema or a list of strings"
    return _unicode(value)


def _items(value: object) -> str | None:
    if isinstance(value, list):
        return None if all(isinstance(item, dict | bool) for item in value) else "must hold only schemas"
    return _schema(value)


def _exclusive(value: object) -> str | None:
    return None if isinstance(value, bool) or is_number(value) else "must be a number"


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _count),
    **dict.fromkeys(("minContains", "maxContains"), _count),
    **dict.fromkeys(("minimum", "maximum"), _number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _exclusive),
    "multipleOf": _positive,
    **dict.fromkeys(("uniqueItems", "$recursiveAnchor"), _boolean),
    **dict.fromkeys(
        ("pattern", "format", "$ref", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor"), _string
    ),
    **dict.fromkeys(("$id", "id", "$schema"), _string),
    "required": _required,
    "type": _type,
    "enum": _enum,
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _schemas),
    **dict.fromkeys(("not", "if", "then", "else", "contains", "propertyNames"), _schema),
    **dict.fromkeys(("additionalProperties", "additionalItems", "unevaluatedItems", "unevaluatedProperties"), _schema),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), _schema_map),
    "dependentRequired": _required_map,
    "dependencies": _dependencies,
    "items": _items,
}


def check_keywords(schema: dict[str, Any], draft: Draft, pointer: str) -> None:
    """Raises ``InvalidRequest`` at the keyword whose value no draft allows."""
    for keyword, value in schema.items():
        check = _CHECKS.get(keyword)
        if check is None or (keyword not in draft.keywords and keyword != "$schema"):
            continue
        problem = check(value)
        if problem is None:
            if keyword == "items" and isinstance(value, list) and not draft.list_items:
                problem = "must be a schema in draft 2020-12 (a list of schemas is `prefixItems`)"
            elif keyword.startswith("exclusive") and isinstance(value, bool) and not draft.boolean_exclusive:
                problem = "must be a number"
        if problem is not None:
            shown = repr(value)
            raise InvalidRequest(
                f"{pointer}/{keyword}", f"={shown if len(shown) < 80 else shown[:77] + '...'}: {problem}"
            )
