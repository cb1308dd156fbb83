"""Which boxes a graph is drawn as, and where they stand.

Invariants: a ``Box`` is a generation with the texts and role marks that lead to it, or a text on which branches stand; every node of a graph is in
one box, and boxes stand behind those they need. The layout is layered (Sugiyama, Tagawa & Toda 1981): layers by longest path, order by
barycentres, and in each layer the places closest to the neighbours (least squares with minimal distances, by pooling adjacent violators).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lang.graph import ProgramGraph
from radixrt.engine.nodes import Fork, Gen, Join, Role, Select, Wait, refs

WIDTH, HEIGHT = 236, 94  # of a box
_GAP, _LAYER, _DUMMY = 18, 138, 20


@dataclass(slots=True)
class Box:
    """``nodes``: those folded together, in order; ``main``: the one that names it; ``parent``: index of the box it continues."""

    nodes: list[int]
    main: int
    parent: int | None = None
    named: list[int] = field(default_factory=list)  # boxes whose output it names
    children: list[int] = field(default_factory=list)


def fold(graph: ProgramGraph) -> list[Box]:
    """The boxes of a graph, those that others need first."""
    children = graph.children()
    boxes: list[Box] = []
    box_of: dict[int, int] = {}
    chain: dict[int, list[int]] = {}  # folded so far, by its last node
    for node in graph:
        before = chain.pop(node.parent, []) if node.parent is not None else []
        nodes = [*before, node.id] if before else [node.id]
        follow = children.get(node.id, [])
        if not isinstance(node, (Gen, Select)) and len(follow) == 1:
            chain[node.id] = nodes
            continue
        parent = graph.nodes[nodes[0]].parent
        over = None if parent is None else box_of[parent]
        if over is not None and all(isinstance(graph.nodes[id], (Role, Fork, Wait)) for id in nodes):
            boxes[over].nodes += nodes  # marks behind a generation: they say nothing of their own
            box_of.update(dict.fromkeys(nodes, over))
            continue
        box_of.update(dict.fromkeys(nodes, len(boxes)))
        if over is not None:
            boxes[over].children.append(len(boxes))
        boxes.append(Box(nodes, node.id, over))
    for at, box in enumerate(boxes):
        for id in box.nodes:
            item = graph.nodes[id]
            needed = [ref.node for ref in refs(item)] + (list(item.branches) if isinstance(item, Join) else [])
            for other in needed:
                if box_of[other] not in (at, box.parent, *box.named):
                    box.named.append(box_of[other])
    return boxes


Route = dict[tuple[int, int, bool], list[tuple[float, float]]]


def layout(boxes: Sequence[Box]) -> tuple[list[tuple[float, float]], Route, float, float]:
    """Places (centre x, top y) of boxes, the points of their edges by (from, to, dashed), width and height.

    Edges that pass layers get a place in each of them (a dummy), so that they run between boxes; when that takes thousands, the rest run straight.
    """
    rank: list[int] = []
    for at, box in enumerate(boxes):
        above = [other for other in (box.parent, *box.named) if other is not None and other < at]
        rank.append(max((rank[other] + 1 for other in above), default=0))
    edges = [(box.parent, at, False) for at, box in enumerate(boxes) if box.parent is not None]
    edges += [(other, at, True) for at, box in enumerate(boxes) for other in box.named if other < len(boxes)]
    layers: list[list[int]] = [[] for _ in range(max(rank) + 1)]
    for at in _preorder(boxes):
        layers[rank[at]].append(at)
    up: list[list[int]] = [[] for _ in boxes]
    down: list[list[int]] = [[] for _ in boxes]
    level = list(rank)
    through: dict[tuple[int, int, bool], list[int]] = {}
    for source, target, dashed in edges:
        steps = [source]
        if rank[source] < rank[target] and len(up) + rank[target] - rank[source] < len(boxes) + 3000:
            for passed in range(rank[source] + 1, rank[target]):
                steps.append(len(up))
                layers[passed].append(len(up))
                level.append(passed)
                up.append([])
                down.append([])
        steps.append(target)
        through[source, target, dashed] = steps
        if rank[source] < rank[target]:
            for one, other in pairwise(steps):
                if level[other] == level[one] + 1:
                    down[one].append(other)
                    up[other].append(one)
    _order(layers, up, down)
    half = [WIDTH / 2 if item < len(boxes) else _DUMMY / 2 for item in range(len(up))]
    x = [0.0] * len(up)
    for layer in layers:
        for before, item in zip([None, *layer], layer):
            x[item] = half[item] if before is None else x[before] + half[before] + _GAP + half[item]
    for sweep in range(24):
        near = up if sweep % 2 == 0 else down
        for layer in layers if sweep % 2 == 0 else layers[::-1]:
            wanted = [_mean((x[other] for other in near[item]), x[item]) for item in layer]
            for item, place in zip(layer, _spaced(wanted, [half[item] for item in layer])):
                x[item] = place
    shift = _GAP - min((x[item] - half[item] for item in range(len(up))), default=0)
    x = [place + shift for place in x]
    places = [(x[at], rank[at] * _LAYER + 6.0) for at in range(len(boxes))]
    routes: Route = {}
    for edge, steps in through.items():
        points = [(x[edge[0]], places[edge[0]][1] + HEIGHT)]
        for item in steps[1:-1]:
            points += [(x[item], level[item] * _LAYER + 6.0), (x[item], level[item] * _LAYER + 6.0 + HEIGHT)]
        routes[edge] = [*points, (x[edge[1]] + (8.0 if edge[2] else 0.0), places[edge[1]][1])]
    width = max(place + half[item] for item, place in enumerate(x)) + _GAP
    return places, routes, width, len(layers) * _LAYER - (_LAYER - HEIGHT) + 14.0


def _order(layers: list[list[int]], up: Sequence[Sequence[int]], down: Sequence[Sequence[int]]) -> None:
    """Sort each layer so that few edges cross: the best of some sweeps by barycentres, beginning with the order of the program."""
    best, fewest = [list(layer) for layer in layers], _crossings(layers, down)
    index = {item: i for layer in layers for i, item in enumerate(layer)}
    for sweep in range(12):
        if not fewest:
            break
        near = up if sweep % 2 == 0 else down
        for layer in layers if sweep % 2 == 0 else layers[::-1]:
            layer.sort(key=lambda item: _mean((index[other] for other in near[item]), index[item]))
            index.update((item, i) for i, item in enumerate(layer))
        count = _crossings(layers, down)
        if count < fewest:
            best, fewest = [list(layer) for layer in layers], count
    layers[:] = best


def _crossings(layers: Sequence[Sequence[int]], down: Sequence[Sequence[int]]) -> int:
    """Pairs of edges between neighbouring layers that cross."""
    count = 0
    for upper, lower in pairwise(layers):
        index = {item: i for i, item in enumerate(lower)}
        seen: list[int] = []
        for item in upper:
            ends = sorted(index[other] for other in down[item])
            count += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return count


def _preorder(boxes: Sequence[Box]) -> list[int]:
    stack = [at for at, box in enumerate(boxes) if box.parent is None][::-1]
    order: list[int] = []
    while stack:
        at = stack.pop()
        order.append(at)
        stack += [child for child in boxes[at].children if child < len(boxes)][::-1]
    return order


def _mean(values: Iterable[float], otherwise: float) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else otherwise


def _spaced(wanted: Sequence[float], half: Sequence[float]) -> list[float]:
    """The places nearest to those wanted at which neighbours do not touch."""
    offset = [0.0]
    for one, other in pairwise(half):
        offset.append(offset[-1] + one + _GAP + other)
    pools: list[tuple[float, int]] = []  # mean and size of runs that stand as close as they can
    for want, shift in zip(wanted, offset):
        mean, size = want - shift, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, size = (mean * size + before * count) / (size + count), size + count
        pools.append((mean, size))
    flat = [mean for mean, size in pools for _ in range(size)]
    return [mean + shift for mean, shift in zip(flat, offset)]
