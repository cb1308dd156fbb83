"""When two schemas written in different places say the same: a key of what a small schema says, annotations aside."""

from __future__ import annotations

from typing import Any

from radixrt.grammar.schema.drafts import DRAFTS, MANY, NAMED, ONE, Draft

TELLING: frozenset[str] = frozenset().union(*(draft.keywords for draft in DRAFTS.values())) - {
    "$id",
    "id",
    "$anchor",
    "$dynamicAnchor",
    "$recursiveAnchor",
    "$defs",
    "definitions",
}
_OWN_ADDRESS = ("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$dynamicRef", "$recursiveRef")
_BUDGET = 60  # JSON values of a schema that is worth comparing


class _TooLarge(Exception):
    pass


def content_key(schema: dict[str, Any], draft: Draft) -> Any:
    """A hashable key, equal for schemas of one resource that say the same; ``None`` for large ones and those with addresses."""
    left = [_BUDGET]
    try:
        return _schema(schema, draft, left)
    except _TooLarge:
        return None


def _schema(schema: Any, draft: Draft, left: list[int]) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise _TooLarge
    if not isinstance(schema, dict):
        return schema is True
    key: list[Any] = []
    for keyword, value in schema.items():
        if keyword in _OWN_ADDRESS:
            raise _TooLarge
        if keyword not in TELLING or keyword not in draft.keywords:
            continue
        if keyword in NAMED and isinstance(value, dict):
            key.append(
                (
                    keyword,
                    tuple(
                        (name, _schema(item, draft, left) if not isinstance(item, list) else _value(item, left))
                        for name, item in value.items()
                    ),
                )
            )
        elif keyword in MANY and isinstance(value, list):
            key.append((keyword, tuple([_schema(item, draft, left) for item in value])))
        elif keyword in ONE:
            key.append((keyword, _schema(value, draft, left)))
        else:
            key.append((keyword, _value(value, left)))
    return tuple(key)


def _value(value: Any, left: list[int]) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise _TooLarge
    if isinstance(value, dict):
        return ("object", tuple([(name, _value(item, left)) for name, item in value.items()]))
    if isinstance(value, list):
        return ("array", tuple([_value(item, left) for item in value]))
    return (type(value).__name__, value)
