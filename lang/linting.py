"""A lint for prompts: where programs put text in an order that keeps them from sharing its KV.

All texts of the programs go into one radix tree, as a runtime's cache would see them, but of characters: each edge is a text that is computed once.
A long text that stands on two edges is computed twice, and what was different ahead of it is why.

Invariants: only texts of programs are blamed, never what models generated; what is reported is longer than ``BLOCK`` characters each time it occurs;
nothing is reported that the programs already share.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lang.graph import ProgramGraph
from radixrt.engine.nodes import Arg, Gen, Ref, Role, Select, Text
from radixrt.errors import shown

BLOCK = 160  # characters: an equal text that is shorter is not worth a word
MAX_GRAPHS = 64  # looked at; the cost is scaled to all
MAX_CHARS = 8_000_000  # of all texts that are looked at
_PER_TOKEN = 4
_WINDOW = BLOCK // 2
_STARTS = re.compile(r"\w+|[^\w\s]+")


@dataclass(frozen=True, slots=True)
class Finding:
    """A place that keeps programs from sharing.

    Fields:
        line: where the author wrote it, ``file:line``, or empty.
        node: its id, in the first graph in which it was found.
        problem, advice: for people.
        tokens_lost: tokens computed again for it over all programs, by four characters a token.
    """

    line: str
    node: int
    problem: str
    advice: str
    tokens_lost: int

    def __str__(self) -> str:
        return f"{self.line or f'node {self.node}'}: {self.problem} (about {self.tokens_lost:,} tokens computed again): {self.advice}"


def lint(graphs: Sequence[ProgramGraph], *, least: int = 50) -> list[Finding]:
    """What keeps the programs of a batch, or the branches of one, from sharing prefixes; the most expensive first.

    Args:
        graphs: one for each run. A graph that was compiled and has arguments stands for two runs with different ones.
        least: tokens below which a place is not worth a finding.
    """
    looked = list(graphs[:MAX_GRAPHS])
    runs = [(graph, 0) for graph in looked]
    if len(graphs) == 1 and any(
        isinstance(part, Arg) for node in looked[0] if isinstance(node, Text) for part in node.parts
    ):
        runs.append((looked[0], 1))
    tree = _Tree()
    for run, (graph, twin) in enumerate(runs):
        tree.insert(run, graph, twin)
        if tree.chars > MAX_CHARS:
            break
    seen = tree.runs
    places: dict[tuple[str, str | int], _Place] = {}
    for group in _groups(tree.stretches()):
        again = {run for spot in group[1:] for run in spot.stretch.users}
        if 2 * (len(again) + 1) < seen:
            continue  # some programs' data happens to be equal
        for i, spot in enumerate(group[1:], 1):
            # the copy that shares most with this one: among branches of one program, the branch beside it
            other = max((group[0], *group[max(0, i - 8) : i]), key=lambda other: _meet(spot.node, other.node)[0].depth)
            place = _place(spot, other)
            key = (place.kind, place.line or place.node)
            known = places.setdefault(key, place)
            known.chars += spot.end - spot.begin
            known.longest = max(known.longest, (spot.end - spot.begin, spot.text))
            known.runs |= {*spot.stretch.users, *other.stretch.users}
    found: list[Finding] = []
    for place in places.values():
        between_runs = place.kind in ("batch", "space", "argument", "history") and len(place.runs) > 1
        scale = len(graphs) / seen if between_runs and len(graphs) > seen else 1.0
        lost = round(place.chars * scale / _PER_TOKEN)
        if lost >= least:
            found.append(Finding(place.line, place.node, place.problem(seen), place.advice, lost))
    return sorted(found, key=lambda finding: -finding.tokens_lost)


# ---- the tree of all texts


@dataclass(slots=True, eq=False)
class _Edge:
    """A text that follows ``parent``, with what it came from. ``written``: by a program, not by a model."""

    parent: _Edge | None
    text: str
    written: bool
    run: int
    node: int
    line: str
    depth: int = 0
    argument: str = ""
    children: dict[str, _Edge] = field(default_factory=dict)
    users: set[int] = field(default_factory=set)


class _Tree:
    def __init__(self) -> None:
        self.root = _Edge(None, "", False, -1, -1, "")
        self.chars = 0
        self.runs = 0

    def insert(self, run: int, graph: ProgramGraph, twin: int) -> None:
        """Adds the texts of a program. ``twin`` 1: with other arguments than ``twin`` 0."""
        ends: dict[tuple[int, int], _Edge] = {}
        self.runs += 1
        last: dict[int, _Edge] = {}  # where a node's own text ended
        for node in graph:
            at = self.root
            if node.parent is not None:
                at = last[node.parent]
                if isinstance(graph.nodes[node.parent], (Gen, Select)):
                    key = (node.parent, node.sample)
                    if key not in ends:
                        ends[key] = self._add(at, graph.text_of(*key), False, run, graph, node.parent)
                    at = ends[key]
            if isinstance(node, Text):
                for part in node.parts:
                    if isinstance(part, Ref):
                        at = self._add(at, graph.text_of(part.node, part.sample), False, run, graph, node.id)
                    elif isinstance(part, Arg):
                        at = self._add(at, f"{{{part.name}{twin or ''}}}", False, run, graph, node.id, part.name)
                    else:
                        at = self._add(at, part, True, run, graph, node.id)
            elif isinstance(node, Role):
                text = graph.text_of(node.id) or f"\n<{'' if node.begin else '/'}{node.role}>\n"
                at = self._add(at, text, True, run, graph, node.id)
            last[node.id] = at

    def _add(
        self, at: _Edge, text: str, written: bool, run: int, graph: ProgramGraph, node: int, argument: str = ""
    ) -> _Edge:
        """The edge that ends where ``text`` behind ``at`` ends. Edges are split so that one does, and stay what they end."""
        self.chars += len(text)
        while text:
            found = at.children.get(text[0])
            if found is None:
                made = _Edge(at, text, written, run, node, graph.lines.get(node, ""), at.depth + 1, argument)
                made.users.add(run)
                at.children[text[0]] = made
                return made
            common = _common(found.text, text)
            if common < len(found.text):
                found = self._split(found, common)
            found.users.add(run)
            text = text[common:]
            at = found
        return at

    def _split(self, edge: _Edge, at: int) -> _Edge:
        """Cuts an edge in two; returns the new upper half."""
        parent = edge.parent
        assert parent is not None
        upper = _Edge(parent, edge.text[:at], edge.written, edge.run, edge.node, edge.line, edge.depth, edge.argument)
        upper.users |= edge.users
        parent.children[upper.text[0]] = upper
        edge.parent, edge.text = upper, edge.text[at:]
        upper.children[edge.text[0]] = edge
        return upper

    def stretches(self) -> Iterator[_Stretch]:
        """The written texts of the tree in order; edges between which nothing branches are one."""
        order: list[list[_Edge]] = []
        todo: list[tuple[_Edge, list[_Edge]]] = [(child, []) for child in reversed(list(self.root.children.values()))]
        self.root.depth = 0
        while todo:
            edge, run = todo.pop()
            assert edge.parent is not None
            edge.depth = edge.parent.depth + 1
            if edge.written and not run:
                run = []
                order.append(run)
            if edge.written:
                run.append(edge)
            follow = list(edge.children.values())
            alone = len(follow) == 1 and edge.written  # whoever stops here computes nothing more
            todo += [(child, run if alone and child.written else []) for child in reversed(follow)]
        for edges in order:
            yield _Stretch(edges)


class _Stretch:
    """A text that is computed once."""

    __slots__ = ("edges", "starts", "text", "users")

    def __init__(self, edges: list[_Edge]) -> None:
        self.edges = edges
        self.text = "".join(edge.text for edge in edges)
        self.users = edges[0].users
        self.starts: list[int] = []
        at = 0
        for edge in edges:
            self.starts.append(at)
            at += len(edge.text)

    def at(self, place: int) -> _Edge:
        """The edge on which a character stands."""
        low = 0
        for i, start in enumerate(self.starts):
            if start <= place:
                low = i
        return self.edges[low]


@dataclass(frozen=True, slots=True, eq=False)
class _Spot:
    """Where an equal text stands: characters ``begin`` to ``end`` of a stretch; ``shift`` later they stand in the first of the group."""

    stretch: _Stretch
    begin: int
    end: int
    shift: int = 0

    @property
    def node(self) -> _Edge:
        return self.stretch.at(self.begin)

    @property
    def text(self) -> str:
        return self.stretch.text[self.begin : self.end]


def _groups(stretches: Iterator[_Stretch]) -> list[list[_Spot]]:
    """Long texts that occur more than once, and where; the first of each is the one that has to be computed anyway."""
    first: dict[str, tuple[_Stretch, int]] = {}
    groups: list[list[_Spot]] = []
    found: dict[_Stretch, list[tuple[_Spot, list[_Spot]]]] = defaultdict(list)  # spots of a stretch, with their groups
    for stretch in stretches:
        text, done = stretch.text, 0
        for match in _STARTS.finditer(text):
            place = match.start()
            if place < done or place + _WINDOW > len(text):
                continue
            source, start = first.setdefault(text[place : place + _WINDOW], (stretch, place))
            if source is stretch:
                continue  # a text that resembles itself: nothing that another order would change
            length = _common(source.text[start:], text[place:])
            back = _common_back(source.text[:start], text[done:place])
            if length + back < BLOCK:
                continue
            done = place + length
            spot = _join(found[source], stretch, (start - back, start + length), place - start)
            if spot is None:
                begun = _Spot(source, start - back, start + length)
                spot = _Spot(stretch, place - back, done, start - place), [begun]
                groups.append(spot[1])
                found[source].append((begun, spot[1]))
            spot[1].append(spot[0])
            found[stretch].append(spot)
    return groups


def _join(
    known: Sequence[tuple[_Spot, list[_Spot]]], stretch: _Stretch, where: tuple[int, int], later: int
) -> tuple[_Spot, list[_Spot]] | None:
    """The spot of a stretch whose text is that of ``where`` in another, ``later`` there, as a part of the group to which that belongs."""
    for spot, group in known:
        begin, end = where
        if spot is not group[0]:  # what lies outside of it is equal here, but not in the rest of the group
            begin, end = max(begin, spot.begin), min(end, spot.end)
        if end - begin >= BLOCK and begin < spot.end and spot.begin < end:
            return _Spot(stretch, begin + later, end + later, spot.shift - later), group
    return None


# ---- what is to blame


@dataclass(slots=True)
class _Place:
    kind: str
    line: str
    node: int
    ahead: tuple[str, str]
    argument: str = ""
    generated: bool = False
    chars: int = 0
    longest: tuple[int, str] = (0, "")
    runs: set[int] = field(default_factory=set)

    def problem(self, runs: int) -> str:
        text = f"a text of {self.longest[0]:,} characters ({shown(self.longest[1].strip(), 50)})"
        one, other = (shown(part, 30) for part in self.ahead)
        if self.kind == "again":
            return f"{text} is appended again to what has it already"
        if self.kind == "history":
            return f"{text} is appended behind outputs that differ"
        if self.kind == "space":
            return f"white space differs ({one} and {other}) ahead of {text} that is equal"
        if self.kind == "argument":
            return f"the argument {self.argument!r} stands ahead of {text} that is equal in every call"
        if self.kind == "fork":
            return f"branches begin with different text ({one} and {other}) ahead of {text} that is equal"
        return f"text that differs between programs ({one} and {other}) stands ahead of {text} that is equal"

    @property
    def advice(self) -> str:
        if self.kind == "again":
            return "say it once, at the beginning, and refer to it"
        if self.kind == "history" or self.generated:
            return "say it once, ahead of what differs (in the system message, say), and refer to it"
        if self.kind == "space":
            return "make the white space equal"
        if self.kind == "fork":
            return "append the equal text before the fork, and what differs behind it"
        return "append the equal text first, and what differs behind it"


def _place(spot: _Spot, other: _Spot) -> _Place:
    """Why the text at ``spot`` is not the KV of the same text at ``other``."""
    meet, mine, theirs = _meet(spot.node, other.node)
    if not mine or not theirs:  # one stands behind the other
        edge = spot.node
        return _Place("again", edge.line, edge.node, ("", ""))
    begun = re.search(r"\S{0,20}$", meet.text)
    word = begun[0] if begun is not None else ""  # in which they part
    begin = max(spot.begin + spot.shift, other.begin + other.shift)
    ahead = tuple(_ahead(path, at, begin - at.shift) for path, at in ((theirs, other), (mine, spot)))
    told = (word + ahead[0], word + ahead[1])
    culprit = mine[0]
    if culprit.argument:
        return _Place("argument", culprit.line, culprit.node, told, culprit.argument)
    same_run = not mine[0].users.isdisjoint(theirs[0].users)
    generated = any(not edge.written and not edge.argument for edge in (*mine, *theirs))
    if not mine[0].written or not theirs[0].written:
        edge = spot.node
        return _Place("history", edge.line, edge.node, told)
    if ahead[0].split() == ahead[1].split():
        kind = "space"
    else:
        kind = "fork" if same_run else "batch"
    return _Place(kind, culprit.line, culprit.node, told, generated=generated)


def _meet(one: _Edge, other: _Edge) -> tuple[_Edge, list[_Edge], list[_Edge]]:
    """The last edge that two have in common, and the edges from there to each."""
    mine: list[_Edge] = []
    theirs: list[_Edge] = []
    a, b = one, other
    while a is not b:
        if a.depth >= b.depth:
            mine.append(a)
            assert a.parent is not None
            a = a.parent
        else:
            theirs.append(b)
            assert b.parent is not None
            b = b.parent
    return a, mine[::-1], theirs[::-1]


def _ahead(path: Sequence[_Edge], spot: _Spot, begin: int) -> str:
    """What stands between the place where two paths part and character ``begin`` of the spot's stretch."""
    text = "".join(edge.text for edge in path[:-1])
    return text + spot.stretch.text[spot.stretch.starts[spot.stretch.edges.index(path[-1])] : begin]


def _common(one: str, other: str) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_back(one: str, other: str) -> int:
    """Length of the common end."""
    return _common(one[:-1001:-1], other[:-1001:-1])
