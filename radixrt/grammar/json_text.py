"""JSON that people hand in, read with care: bounded in size and nesting before any recursion, no duplicate keys, no NaN.

Invariant: what ``read_json`` and ``write_json`` let through can be walked recursively without a depth check of one's own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from radixrt.errors import InvalidRequest

# a string, or the rest of the text where it does not end: a scan never starts over inside it
_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)'
_BRACKET_OR_STRING = re.compile(rf"[\[\]{{}}]|{_STRING}", re.DOTALL)
_SPACE_OR_STRING = re.compile(rf"[ \t\r\n]+|{_STRING}", re.DOTALL)


def read_json(field: str, text: str, *, max_bytes: int, max_nesting: int) -> Any:
    """The value of a JSON text.

    Raises:
        InvalidRequest: too large, too deeply nested, malformed (with line and column), a duplicate key, NaN or Infinity.
    """
    if len(text) > max_bytes:
        raise InvalidRequest(field, f"is {len(text):,} characters of JSON; at most {max_bytes:,} are taken")
    depth = 0
    for match in _BRACKET_OR_STRING.finditer(text):
        char = match[0][0]
        if char in "[{":
            depth += 1
            if depth > max_nesting:
                raise _too_deep(field, max_nesting)
        elif char in "]}":
            depth -= 1

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(items)
        if len(value) < len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    raise InvalidRequest(field, f"has the key {_short(key)} twice in one object")
                seen.add(key)
        return value

    def constant(name: str) -> NoReturn:
        raise InvalidRequest(field, f"contains {name}, which is not JSON")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise InvalidRequest(field, f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except InvalidRequest:
        raise
    except ValueError as error:  # an integer of more digits than Python reads
        raise InvalidRequest(field, f"is not JSON that can be read: {error}") from None


def squeeze_json(text: str) -> str:
    """The same JSON text without the white space between its tokens."""
    return _SPACE_OR_STRING.sub(lambda match: match[0] if match[0][0] == '"' else "", text)


def write_json(field: str, value: object, *, max_bytes: int, max_nesting: int) -> str:
    """The compact JSON text of a value made of dicts, lists, strings, numbers, booleans and ``None``; key order is kept.

    Raises:
        InvalidRequest: another type, NaN or Infinity (naming the JSON pointer), too deeply nested, too large.
    """
    stack: list[tuple[object, str, int]] = [(value, "", 0)]
    budget = max_bytes
    while stack:
        item, pointer, depth = stack.pop()
        budget -= 1 + (len(item) if isinstance(item, str | list | tuple | Mapping) else 0)
        if budget < 0:
            raise InvalidRequest(field, f"is more than {max_bytes:,} characters of JSON; at most so many are taken")
        if item is None or isinstance(item, str | int):
            continue
        if isinstance(item, float):
            if not math.isfinite(item):
                raise InvalidRequest(field, f"has {item} at {pointer or '/'!r}, which is not JSON")
            continue
        if depth >= max_nesting:
            raise _too_deep(field, max_nesting)
        if isinstance(item, Mapping):
            for key, child in item.items():
                if not isinstance(key, str):
                    raise InvalidRequest(
                        field, f"has the key {_short(key)} at {pointer or '/'!r}; keys must be strings"
                    )
                escaped = key.replace("~", "~0").replace("/", "~1")
                budget -= len(key)
                stack.append((child, f"{pointer}/{escaped[:40]}", depth + 1))
        elif isinstance(item, list | tuple):
            stack += [(child, f"{pointer}/{i}", depth + 1) for i, child in enumerate(item)]
        else:
            raise InvalidRequest(field, f"has a {type(item).__name__} at {pointer or '/'!r}, which is not JSON")
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False, default=dict)
    except ValueError as error:
        raise InvalidRequest(field, f"cannot be written as JSON: {error}") from None
    if len(text) > max_bytes:
        raise InvalidRequest(field, f"is {len(text):,} characters of JSON; at most {max_bytes:,} are taken")
    return text


def _too_deep(field: str, max_nesting: int) -> InvalidRequest:
    return InvalidRequest(field, f"is nested deeper than {max_nesting} levels")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
