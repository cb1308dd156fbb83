"""Sets of characters: sorted, disjoint, non-touching ranges of Unicode scalar values (surrogates are never members)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeAlias

CharSet: TypeAlias = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
ALL: CharSet = ((0, 0xD7FF), (0xE000, LAST))
NONE: CharSet = ()


def charset(ranges: Iterable[tuple[int, int]]) -> CharSet:
    """The set of all characters of the given ranges, in any order, overlapping or not."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            if high > merged[-1][1]:
                merged[-1] = (merged[-1][0], high)
        elif low <= high:
            merged.append((low, high))
    if all(high < SURROGATES[0] or low > SURROGATES[1] for low, high in merged):
        return tuple(merged)
    out = []
    for low, high in merged:
        if low < SURROGATES[0]:
            out.append((low, min(high, SURROGATES[0] - 1)))
        if high > SURROGATES[1]:
            out.append((max(low, SURROGATES[1] + 1), high))
    return tuple(out)


def chars(text: str) -> CharSet:
    """The set of a text's characters."""
    return charset((ord(c), ord(c)) for c in text)


def union(*sets: CharSet) -> CharSet:
    return charset(r for s in sets for r in s)


def complement(chars: CharSet) -> CharSet:
    out, at = [], 0
    for low, high in chars:
        if at < low:
            out.append((at, low - 1))
        at = high + 1
    if at <= LAST:
        out.append((at, LAST))
    return charset(out)


def intersect(a: CharSet, b: CharSet) -> CharSet:
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low <= high:
            out.append((low, high))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(out)


def minus(a: CharSet, b: CharSet) -> CharSet:
    return intersect(a, complement(b))


def contains(chars: CharSet, code: int) -> bool:
    return any(low <= code <= high for low, high in chars)


def size(chars: CharSet) -> int:
    return sum(high - low + 1 for low, high in chars)


Partition: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def partition(sets: tuple[CharSet, ...]) -> Partition:
    """Cut the alphabet into classes whose characters no set tells apart.

    Returns ``(starts, classes, members)``: interval ``i`` runs from ``starts[i]`` to before ``starts[i + 1]`` and is of class
    ``classes[i]`` (-1: surrogates, no characters); bit ``j`` of ``members[c]`` says that class ``c`` lies in ``sets[j]``.
    """
    return _recent(sets) if len(sets) <= 32 else _partition(sets)


def _partition(sets: tuple[CharSet, ...]) -> Partition:
    toggles: dict[int, int] = {0: 0, SURROGATES[0]: 0, SURROGATES[1] + 1: 0}
    for bit, ranges in enumerate(sets):
        flag = 1 << bit
        for low, high in ranges:
            toggles[low] = toggles.get(low, 0) ^ flag
            toggles[high + 1] = toggles.get(high + 1, 0) ^ flag
    toggles.pop(LAST + 1, None)
    starts: list[int] = []
    classes: list[int] = []
    ids: dict[int, int] = {}
    inside = 0
    for at in sorted(toggles):
        inside ^= toggles[at]
        cls = -1 if at == SURROGATES[0] else ids.setdefault(inside, len(ids))
        if not classes or classes[-1] != cls:
            starts.append(at)
            classes.append(cls)
    return tuple(starts), tuple(classes), tuple(ids)


_recent = lru_cache(maxsize=128)(_partition)


def class_sets(starts: Sequence[int], classes: Sequence[int]) -> list[CharSet]:
    """The characters of each class of a partition."""
    out: list[list[tuple[int, int]]] = [[] for _ in range(max(classes) + 1)]
    for i, cls in enumerate(classes):
        if cls >= 0:
            out[cls].append((starts[i], (starts[i + 1] if i + 1 < len(starts) else LAST + 1) - 1))
    return [tuple(ranges) for ranges in out]
