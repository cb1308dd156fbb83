"""Deterministic automata to their one canonical form: minimal, complete, states numbered breadth first, classes by first character.

``minimize`` and ``canonical`` run natively where the compiled part is there; what stands here is their reference.
"""

from __future__ import annotations

from collections.abc import Sequence

from radixrt.grammar.built import native_module

Rows = Sequence[Sequence[int]]
Canonical = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], ...], frozenset[int]]


def minimize(rows: Rows, accepting: Sequence[bool]) -> tuple[Rows, Sequence[bool]]:
    """The minimal automaton of a complete one whose state 0 is the start and whose states are all reachable."""
    native = native_module()
    if native is None:
        return minimized(rows, accepting)
    made: tuple[Rows, Sequence[bool]] = native.minimize(rows, accepting)
    return made


def canonical(starts: Sequence[int], classes: Sequence[int], rows: Rows, accepting: Sequence[bool]) -> Canonical:
    """Rows over a partition, all reachable -> minimal ones, equal classes merged, classes and states renumbered."""
    native = native_module()
    if native is None:
        return merged(starts, classes, *minimized(rows, accepting))
    return joined(starts, *native.canonical(classes, rows, accepting))


def joined(
    starts: Sequence[int], classes: Sequence[int], rows: tuple[tuple[int, ...], ...], accepting: frozenset[int]
) -> Canonical:
    """The same with neighbouring intervals of one class made one."""
    keep = [i for i in range(len(starts)) if not i or classes[i] != classes[i - 1]]
    return tuple(starts[i] for i in keep), tuple(classes[i] for i in keep), rows, accepting


def minimized(rows: Rows, accepting: Sequence[bool]) -> tuple[list[list[int]], list[bool]]:
    """``minimize`` in Python."""
    n = len(rows)
    group = [int(flag) for flag in accepting]
    if all(group) or not any(group):
        return [[0] * len(rows[0])], [bool(group[0])]
    if n > 64:
        group = _split(rows, accepting)
    count, rounds = len(set(group)), 0
    while True:  # Moore: split by where each class leads, until nothing splits
        get = group.__getitem__
        ids: dict[tuple[int, ...], int] = {}
        new = [ids.setdefault((group[s], *map(get, row)), len(ids)) for s, row in enumerate(rows)]
        group, rounds = new, rounds + 1
        if len(ids) == count:
            break
        count = len(ids)
        if count == n:
            break
        if rounds * n > 20_000:  # long chains: one round a link
            group = _hopcroft(rows, group)
            count = max(group) + 1
            break
    heads: list[int] = [-1] * count
    for s in range(n - 1, -1, -1):
        heads[group[s]] = s
    order, place = [group[0]], {group[0]: 0}  # breadth first from the start
    out: list[list[int]] = []
    for block in order:
        row = []
        for t in rows[heads[block]]:
            target = group[t]
            if target not in place:
                place[target] = len(order)
                order.append(target)
            row.append(place[target])
        out.append(row)
    return out, [accepting[heads[block]] for block in order]


def _split(rows: Rows, accepting: Sequence[bool]) -> list[int]:
    """A first partition that leaves Moore little to do.

    States with a finite language are told apart for good, from the ends back; the others by their shortest text.
    """
    n = len(rows)
    back: list[list[int]] = [[] for _ in range(n)]
    successors = [set(row) for row in rows]
    for s, targets in enumerate(successors):
        for t in targets:
            back[t].append(s)
    least = [-1] * n
    layer = [s for s in range(n) if accepting[s]]
    for s in layer:
        least[s] = 0
    depth = 0
    while layer:
        depth += 1
        following = []
        for t in layer:
            for s in back[t]:
                if least[s] < 0:
                    least[s] = depth
                    following.append(s)
        layer = following
    # Peel off the states all of whose live successors are done; what is never peeled lies on or before a live cycle.
    ids: dict[tuple[object, ...], int] = {("dead",): 0}
    group = [0] * n  # of all that are dead
    waiting = [sum(least[t] >= 0 for t in targets) for targets in successors]
    queue = [s for s in range(n) if least[s] >= 0 and waiting[s] == 0]
    get = group.__getitem__
    for s in queue:
        group[s] = ids.setdefault((accepting[s], *map(get, rows[s])), len(ids))
        for b in back[s]:
            waiting[b] -= 1
            if waiting[b] == 0 and least[b] >= 0:
                queue.append(b)
    for s in range(n):
        if least[s] >= 0 and waiting[s] > 0:
            group[s] = ids.setdefault(("endless", least[s]), len(ids))
    return group


def _hopcroft(rows: Rows, group: list[int]) -> list[int]:
    """Hopcroft's refinement (1971) of a partition that is at least as coarse as the final one."""
    n, width = len(rows), len(rows[0])
    columns = {tuple(row[c] for row in rows): c for c in range(width)}
    back: list[dict[int, list[int]]] = []
    for column in columns:
        inverse: dict[int, list[int]] = {}
        for s, t in enumerate(column):
            inverse.setdefault(t, []).append(s)
        back.append(inverse)
    blocks: list[set[int]] = [set() for _ in range(max(group) + 1)]
    group = list(group)
    for s in range(n):
        blocks[group[s]].add(s)
    waiting = {(b, c) for b in range(len(blocks)) for c in range(len(back))}
    while waiting:
        b, c = waiting.pop()
        inverse = back[c]
        touched: dict[int, list[int]] = {}
        for t in blocks[b]:
            for s in inverse.get(t, ()):
                touched.setdefault(group[s], []).append(s)
        for old, members in touched.items():
            if len(members) == len(blocks[old]):
                continue
            new = len(blocks)
            blocks.append(set(members))
            blocks[old] -= blocks[new]
            for s in members:
                group[s] = new
            for k in range(len(back)):
                if (old, k) in waiting or len(blocks[new]) <= len(blocks[old]):
                    waiting.add((new, k))
                else:
                    waiting.add((old, k))
    return group


def merged(starts: Sequence[int], classes: Sequence[int], small: Rows, final: Sequence[bool]) -> Canonical:
    """Minimal rows over a partition -> the same with equal classes merged, classes and states renumbered."""
    columns = list(zip(*small))
    ids: dict[tuple[int, ...], int] = {}
    renamed = [-1 if cls < 0 else ids.setdefault(columns[cls], len(ids)) for cls in classes]
    table = list(zip(*ids))
    order, place = [0], {0: 0}
    out = []
    for s in order:
        row = []
        for t in table[s]:
            if t not in place:
                place[t] = len(order)
                order.append(t)
            row.append(place[t])
        out.append(tuple(row))
    return joined(starts, renamed, tuple(out), frozenset(i for i, s in enumerate(order) if final[s]))
