"""The keys of objects: how a declared one is written, and what a key may be that is none of the declared ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from radixrt.grammar import ir
from radixrt.grammar.schema import strings
from radixrt.grammar.schema.strings import Languages, Strings, StringSet


def declared_key(name: str) -> ir.Expr:
    """A key as serializers write it."""
    return strings.literals(strings.quoted_forms(name))


def other_key(keys: StringSet, languages: Languages) -> ir.Expr:
    """The JSON texts of a set of keys, with their quotes. The set is of decoded keys: no escape can spell a key outside it."""
    items: list[ir.Expr] = []
    for part in keys:
        names = _only_excludes(part)
        if names is not None and all(_plain(name) for name in names):
            items.append(_all_but(sorted(names)))
        else:
            items.append(strings.emit(part, languages))
    return items[0] if len(items) == 1 else ir.Alt(tuple(items))


def _only_excludes(part: Strings) -> frozenset[str] | None:
    """The excluded names of a set that is nothing but "all keys except these"."""
    if part.low or part.high is not None or part.values is not None or not part.conditions:
        return None
    names: set[str] = set()
    for item in part.conditions:
        if item.kind != "values" or item.holds:
            return None
        names |= item.argument
    return frozenset(names)


def _plain(name: str) -> bool:
    """Every character stands for itself in JSON and is ASCII."""
    return name.isascii() and name.isprintable() and '"' not in name and "\\" not in name


def _all_but(names: Sequence[str]) -> ir.Expr:
    """Every key but these plain ones.

    A trie of the names, read byte by byte: a key either leaves it (and is then free), or ends inside it at no name. As long
    as a key runs along the trie it may not use an escape for a printable ASCII character, so that the trie always knows where it is.
    """
    free, leads, tail = _escapes_and_utf8()
    first = len(tail) + 1  # trie nodes are 0 (the root) and from here on
    children: list[dict[int, int]] = [{}]
    ends: set[int] = set()
    for name in names:
        node = 0
        for byte in name.encode():
            following = children[node].get(byte)
            if following is None:
                following = children[node][byte] = len(children)
                children.append({})
            node = following
        ends.add(node)
    size = len(children)
    edges: list[tuple[tuple[int, int, int], ...]] = []
    alone = _leaf_edges()
    for out in children:
        if not out:
            edges.append(alone)
            continue
        if len(out) == 1:
            ((byte, child),) = out.items()
            before, after = _around(byte)
            edges.append((*before, (byte, byte, first + child - 1), *after))
            continue
        made: list[tuple[int, int, int]] = []
        low = 0x20
        for byte in (*sorted({*out, 0x22, 0x5C}), 0x80):
            if byte > low:
                made.append((low, byte - 1, free))
            if byte in out:
                made.append((byte, byte, first + out[byte] - 1))
            elif byte == 0x5C:
                made.append((byte, byte, _ESCAPE))
            low = byte + 1
        edges.append((*made, *leads))
    leaving = ir.Seq((ir.Dfa((edges[0], *tail, *edges[1:]), frozenset((free,))), _ANY))
    alive = [False] * size
    for node in range(size - 1, -1, -1):
        alive[node] = node not in ends or any(alive[child] for child in children[node].values())
    if not alive[0]:
        return ir.Seq((_QUOTE, leaving, _QUOTE))
    inside = ir.Dfa(
        tuple(
            [
                tuple([(byte, byte, child) for byte, child in sorted(out.items()) if alive[child]]) if out else ()
                for out in children
            ]
        ),
        frozenset(node for node in range(size) if node not in ends),
    )
    return ir.Seq((_QUOTE, ir.Alt((leaving, inside)), _QUOTE))


_QUOTE = ir.Bytes(b'"')
_ANY = ir.JsonChars()
_ESCAPE = 2  # the state behind a backslash


@lru_cache(maxsize=1)
def _leaf_edges() -> tuple[tuple[int, int, int], ...]:
    """From a trie node without children."""
    free, leads, _ = _escapes_and_utf8()
    return ((0x20, 0x21, free), (0x23, 0x5B, free), (0x5C, 0x5C, _ESCAPE), (0x5D, 0x7F, free), *leads)


@lru_cache(maxsize=128)
def _around(byte: int) -> tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]]:
    """The edges before and after that of a trie node's only child."""
    free = _escapes_and_utf8()[0]
    before: list[tuple[int, int, int]] = []
    after: list[tuple[int, int, int]] = []
    for low, high, to in _leaf_edges():
        if to == free and low <= byte <= high:
            before += [(low, byte - 1, free)] if low < byte else []
            after += [(byte + 1, high, free)] if byte < high else []
        else:
            (before if high < byte else after).append((low, high, to))
    return tuple(before), tuple(after)


@lru_cache(maxsize=1)
def _escapes_and_utf8() -> tuple[int, tuple[tuple[int, int, int], ...], tuple[tuple[tuple[int, int, int], ...], ...]]:
    """The states every such automaton shares, numbered from 1: which is the free one, the edges of UTF-8 lead bytes, all edges."""
    names = ("free escape u u0 u00 u007 ud high high1 high2 pair pairu paird h3 h2 h1 c1 c2 c3 e0 ed f0 f4").split()
    at = {name: index + 1 for index, name in enumerate(names)}
    at[""] = at["free"]

    def hexes(digits: str, to: str) -> list[tuple[int, int, int]]:
        codes = sorted({ord(char) for digit in digits for char in (digit, digit.upper())})
        return [(code, code, at[to]) for code in codes]

    def keep(low: int, high: int, to: str) -> list[tuple[int, int, int]]:
        return [(low, high, at[to])]

    every = "0123456789abcdef"
    table: dict[str, list[tuple[int, int, int]]] = {
        "free": [],
        "escape": [(ord(char), ord(char), at["free"]) for char in '"\\bfnrt'] + keep(117, 117, "u"),
        "u": hexes("0", "u0") + hexes("123456789abcef", "h3") + hexes("d", "ud"),
        "u0": hexes("0", "u00") + hexes("123456789abcdef", "h2"),
        "u00": hexes("0189abcdef", "h1") + hexes("7", "u007"),
        "u007": hexes("f", ""),
        "ud": hexes("01234567", "h2") + hexes("89ab", "high"),
        "high": hexes(every, "high1"),
        "high1": hexes(every, "high2"),
        "high2": keep(0x5C, 0x5C, "pair"),
        "pair": keep(117, 117, "pairu"),
        "pairu": hexes("d", "paird"),
        "paird": hexes("cdef", "h2"),
        "h3": hexes(every, "h2"),
        "h2": hexes(every, "h1"),
        "h1": hexes(every, ""),
        "c1": keep(0x80, 0xBF, ""),
        "c2": keep(0x80, 0xBF, "c1"),
        "c3": keep(0x80, 0xBF, "c2"),
        "e0": keep(0xA0, 0xBF, "c1"),
        "ed": keep(0x80, 0x9F, "c1"),
        "f0": keep(0x90, 0xBF, "c2"),
        "f4": keep(0x80, 0x8F, "c2"),
    }
    leads = (
        (0xC2, 0xDF, at["c1"]),
        (0xE0, 0xE0, at["e0"]),
        (0xE1, 0xEC, at["c2"]),
        (0xED, 0xED, at["ed"]),
        (0xEE, 0xEF, at["c2"]),
        (0xF0, 0xF0, at["f0"]),
        (0xF1, 0xF3, at["c3"]),
        (0xF4, 0xF4, at["f4"]),
    )
    return at["free"], leads, tuple(tuple(sorted(table[name])) for name in names)


def split(cell: StringSet, keys: StringSet, languages: Languages) -> tuple[StringSet, StringSet]:
    """A set of keys in two: those in another set, and the rest. What is empty is dropped."""
    inside = strings.common(cell, keys, languages)
    beyond = strings.common(cell, strings.outside(keys, languages), languages)
    return _alive(inside, languages), _alive(beyond, languages)


def _alive(parts: Iterable[Strings], languages: Languages) -> StringSet:
    return tuple(part for part in parts if not languages.empty(part))
