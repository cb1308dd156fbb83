"""The single values inside of a JSON text, and where they stand in it.

Invariants: linear in the text, without recursion; a text that is no JSON (a regex's or a choice's answer) is one
single value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_scanned: Any = json.decoder.scanstring  # type: ignore[attr-defined]
WHOLE = "value"  # the path of a value that is in nothing
_SCALAR = re.compile(r"-?\d[-+.0-9eE]*|true|false|null")
_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A string, number, true, false or null. ``path``: ``total``, ``items[0].price``, ``["odd name"]``; ``start``, ``end``: characters of its text."""

    path: str
    value: Any
    start: int
    end: int


def leaves(text: str, *, is_json: bool = True) -> Iterator[Leaf]:
    """The single values of a JSON text, in its order. What follows a mistake is left out.

    Args:
        is_json: else the whole text is the one value.
    """
    if not is_json:
        yield Leaf(WHOLE, text, 0, len(text))
        return
    path: list[str | int] = []  # of the containers that are open: the key or index that is being read
    at = _SPACE.match(text, 0).end()  # type: ignore[union-attr]
    while at < len(text):
        char = text[at]
        if char == "{":
            path.append("")
            at = _key(text, at + 1, path)
        elif char == "[":
            path.append(0)
            at += 1
        elif char in "}]":
            if path:
                path.pop()
            at += 1
        elif char == ",":
            if path and isinstance(path[-1], int):
                path[-1] += 1
                at += 1
            elif path:
                at = _key(text, at + 1, path)
            else:
                return
        else:
            end, value = _scalar(text, at)
            if end < 0:
                return
            yield Leaf(_spelled(path), value, at, end)
            at = end
        if at < 0:
            return
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]


def general(path: str) -> str:
    """A path without indexes: the same for all items of an array."""
    return _INDEX.sub("[]", path)


def _key(text: str, at: int, path: list[str | int]) -> int:
    """Read ``"key":`` into the path; where it ends, or -1. An object that ends here has none."""
    at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
    if text[at : at + 1] != '"':
        return at if text[at : at + 1] == "}" else -1
    try:
        path[-1], at = _scanned(text, at + 1, True)
    except ValueError:
        return -1
    at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
    return at + 1 if text[at : at + 1] == ":" else -1


def _scalar(text: str, at: int) -> tuple[int, Any]:
    try:
        if text[at] == '"':
            value, end = _scanned(text, at + 1, True)
            return end, value
        found = _SCALAR.match(text, at)
        return (found.end(), json.loads(found[0])) if found else (-1, None)
    except ValueError:
        return -1, None


def _spelled(path: list[str | int]) -> str:
    if not path:
        return WHOLE
    parts: list[str] = []
    for step in path:
        if isinstance(step, int):
            parts.append(f"[{step}]")
        elif _PLAIN.fullmatch(step):
            parts.append(f".{step}" if parts else step)
        else:
            parts.append(f"[{json.dumps(step, ensure_ascii=False)}]")
    return "".join(parts)
