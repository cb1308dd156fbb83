"""Finite languages: a sorted word list to its minimal acyclic automaton, tails shared while it grows (Daciuk et al. 2000)."""

from __future__ import annotations

from collections.abc import Iterable

from radixrt.errors import InvalidRequest
from radixrt.grammar.regular.chardfa import Budget, CharDfa
from radixrt.grammar.regular.charset import SURROGATES, partition
from radixrt.grammar.regular.limits import RegularLimits

_Node = tuple[bool, tuple[tuple[str, int], ...]]


def from_words(words: Iterable[str], limits: RegularLimits) -> CharDfa:
    """The language of exactly these words.

    Raises:
        InvalidRequest: a word holds a lone surrogate.
        UnsupportedConstraint: more characters in all than ``limits.work``.
    """
    ordered = sorted(set(words))
    if not ordered:
        return CharDfa.nothing()
    Budget(limits, f"a list of {len(ordered):,} texts").spend(sum(map(len, ordered)))
    letters = sorted(set().union(*ordered))
    if any(SURROGATES[0] <= ord(c) <= SURROGATES[1] for c in letters):
        raise InvalidRequest("pattern", ": a text holds a lone surrogate")
    known: dict[_Node, int] = {}
    open_nodes: list[tuple[bool, list[tuple[str, int]]]] = [(False, [])]  # along the last word, not yet shared
    path: list[str] = []

    def close(depth: int) -> None:
        while len(open_nodes) > depth + 1:
            final, edges = open_nodes.pop()
            node = known.setdefault((final, tuple(edges)), len(known))
            open_nodes[-1][1].append((path.pop(), node))

    for word in ordered:
        common = 0
        while common < min(len(path), len(word)) and path[common] == word[common]:
            common += 1
        close(common)
        for char in word[common:]:
            path.append(char)
            open_nodes.append((False, []))
        open_nodes[-1] = (True, open_nodes[-1][1])
    close(0)
    nodes = [*known, (open_nodes[0][0], tuple(open_nodes[0][1]))]
    starts, classes, members = partition(tuple(((ord(c), ord(c)),) for c in letters))
    place = {letters[mask.bit_length() - 1]: cls for cls, mask in enumerate(members) if mask}
    order, number = [len(nodes) - 1], {len(nodes) - 1: 0}
    sparse = []
    for at in order:
        row = []
        for char, target in nodes[at][1]:
            if target not in number:
                number[target] = len(order)
                order.append(target)
            row.append((place[char], number[target]))
        sparse.append(row)
    dead = [len(order)] * len(members)
    rows = []
    for row in sparse:
        full = dead.copy()
        for cls, target in row:
            full[cls] = target
        rows.append(full)
    rows.append(dead)
    return CharDfa.make(starts, classes, rows, [nodes[at][0] for at in order] + [False])
