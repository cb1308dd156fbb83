"""Replay: answers a program from the record of a run, without a model.

Invariants: a node is answered from the record only where everything before it is equal, character by character, and so is what it asks for (seeds
decide between equals, and nothing else); each recorded node answers at most once in a program; the rest fails, or goes to another backend.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lang.backends.base import Backend, Capabilities, Counters, Emit, ProgramInfo, Session
from lang.backends.steps import Stage, Step, StepSession, before, label
from lang.graph import ProgramGraph
from radixrt.engine.nodes import Delta, Done, Event, Fork, Gen, Join, Node, Role, Select, Text, Wait, params_to_dict
from radixrt.errors import nearest, shown

_OTHER_IDS = 2**52  # of nodes that only the other backend sees
_CANDIDATES = 50  # recorded nodes that are looked at to say what changed
_Hash = Any  # hashlib's objects have no public type


@dataclass(frozen=True, slots=True)
class _Entry:
    graph: int
    node: int


class Replay:
    """A ``Backend`` that answers from records.

    Args:
        record: a file that ``ProgramGraph.save`` wrote, or a graph that has run.
        more: records of further programs, of a batch for example.
        otherwise: runs what the records do not have. It is given generations of the record as text. Without it such a node fails,
            with kind ``error`` and what has changed.

    Raises:
        InvalidRequest: a file that is no whole record, naming the line.
    """

    name = "replay"

    def __init__(
        self, record: str | Path | ProgramGraph, *more: str | Path | ProgramGraph, otherwise: Backend | None = None
    ) -> None:
        from lang.record import read

        self.graphs = tuple(item if isinstance(item, ProgramGraph) else read(item) for item in (record, *more))
        self.otherwise = otherwise
        self.capabilities = otherwise.capabilities if otherwise is not None else Capabilities()
        self.replayed = 0
        self.missed = 0
        self._counters = Counters()
        self._entries: dict[bytes, list[_Entry]] = defaultdict(list)
        for at, graph in enumerate(self.graphs):
            for node, key in _keys(graph):
                self._entries[key].append(_Entry(at, node))
        self._open: set[_Playing] = set()

    async def start(self) -> None:
        if self.otherwise is not None:
            await self.otherwise.start()

    async def aclose(self) -> None:
        for session in list(self._open):
            session.fail_all("the backend was closed")
        if self.otherwise is not None:
            await self.otherwise.aclose()

    def open(self, info: ProgramInfo, emit: Emit) -> Session:
        session = _Playing(self, info, emit)
        self._open.add(session)
        return session

    async def stats(self) -> dict[str, Any]:
        """As recorded, for what was replayed; ``otherwise`` holds the other backend's figures."""
        counted = self._counters
        figures: dict[str, Any] = {
            "replayed": self.replayed,
            "missed": self.missed,
            "prompt_tokens": counted.prompt_tokens,
            "cached_tokens": counted.cached_tokens,
            "generated_tokens": counted.generated_tokens,
        }
        if self.otherwise is not None:
            figures["otherwise"] = other = await self.otherwise.stats()
            for name in ("prompt_tokens", "cached_tokens", "generated_tokens"):
                figures[name] += other.get(name, 0)
        return figures

    def _changed(self, session: StepSession, step: Step) -> str:
        """What to tell of a node that the record does not have."""
        node = step.node
        same = [
            (graph, item)
            for graph in self.graphs
            for item in graph
            if item.kind == node.kind and _name(item) == _name(node)
        ]
        if not same:
            names = {_name(item) for graph in self.graphs for item in graph if item.kind == node.kind and _name(item)}
            hint = nearest(_name(node), names) if names else ": it has none of this kind"
            return f"{_label(node)} is not in the record{hint}"
        now = _shown_path(before(step))
        best: tuple[int, int, ProgramGraph, Node, str] | None = None
        for order, (graph, item) in enumerate(same[:_CANDIDATES]):
            then = _shown_path(_recorded_path(graph, item))
            common = _common(then, now)
            rank = common + (len(now) + 1 if then == now else 0)
            if best is None or rank > best[0]:
                best = (rank, order, graph, item, then)
        assert best is not None
        _, _, graph, item, then = best
        line = graph.lines.get(item.id)
        where = f" (recorded at {line})" if line else ""
        if then != now:
            old, new = first_difference(then, now)
            return f"{_label(node)} is not in the record{where}: the text before it changed: was {old}, is {new}"
        for name, old_value, new_value in _fields(graph, item, session, node):
            if old_value != new_value:
                old, new = old_value, new_value
                if max(len(old), len(new)) > 40:
                    old, new = first_difference(old, new)
                return f"{_label(node)} is not in the record{where}: {name} changed: was {old}, is {new}"
        results = item.id in graph.done or item.id in graph.failed
        if not results:
            return f"{_label(node)} has no result in the record{where}: the run ended before it"
        return f"{_label(node)} is not in the record once more: all that are recorded{where} are used up"


class _Playing(StepSession):
    """A program that is replayed."""

    def __init__(self, replay: Replay, info: ProgramInfo, emit: Emit) -> None:
        super().__init__(info, emit, self._begin_step, self._closed)
        self._replay = replay
        self._marks: dict[int, _Hash] = {}
        self._taken: set[_Entry] = set()
        self._home: int | None = None  # the record that answered last
        self._other: Session | None = None
        self._ran: dict[int, Step] = {}  # by the other backend
        self._there: dict[tuple[int, int], int] = {}  # ids at the other backend, by node and sample
        self._made = 0

    def drop(self, nodes: Sequence[int]) -> None:
        if self._other is not None:
            self._other.drop([there for (node, _), there in self._there.items() if node in set(nodes)])

    # ---- from the record

    def _begin_step(self, _: StepSession, step: Step) -> None:
        mark = self._mark(step)
        entry = self._pick(mark.digest(), step.node)
        if entry is None:
            self._miss(step)
            return
        replay = self._replay
        graph = replay.graphs[entry.graph]
        self._taken.add(entry)
        self._home = entry.graph
        replay.replayed += 1
        if (failed := graph.failed.get(entry.node)) is not None:
            self.fail(step, failed.kind, failed.error)
            return
        done = graph.done[entry.node]
        counted = replay._counters
        counted.prompt_tokens += done.usage.prompt_tokens
        counted.cached_tokens += done.usage.cached_tokens
        counted.generated_tokens += done.usage.generated_tokens
        if isinstance(step.node, Gen):
            for sample, output in enumerate(done.outputs):
                self.delta(step, sample, output.text)
        self.finish(step, done.outputs, done.usage, done.choosing)

    def _pick(self, key: bytes, node: Node) -> _Entry | None:
        graphs = self._replay.graphs
        free = [
            entry
            for entry in self._replay._entries.get(key, ())
            if entry not in self._taken
            and (entry.node in graphs[entry.graph].done or entry.node in graphs[entry.graph].failed)
        ]
        return min(
            free,
            key=lambda entry: (
                _seed(graphs[entry.graph].nodes[entry.node]) != _seed(node),
                entry.graph != self._home,
                entry.graph,
            ),
            default=None,
        )

    def _mark(self, step: Step) -> _Hash:
        """The hash of all that stands before a step and of the step itself."""
        path: list[Step] = []
        at: Step | None = step
        while at is not None and at.node.id not in self._marks:
            path.append(at)
            at = at.parent
        for one in reversed(path):
            parent = one.parent
            if parent is None:
                mark = _hash()
            else:
                mark = self._marks[parent.node.id].copy()
                _continue(mark, parent.node, one.node.sample, _output_text(parent, one.node.sample))
            if isinstance(one.node, Text):
                mark.update(_bytes(one.text))
            elif isinstance(one.node, Select):
                _ask(mark, one.node, [self.bound(choice) for choice in one.node.choices])
            else:
                _ask(mark, one.node, [])
            self._marks[one.node.id] = mark
        return self._marks[step.node.id]

    # ---- from the other backend

    def _miss(self, step: Step) -> None:
        self._replay.missed += 1
        other = self._replay.otherwise
        if other is None:
            self.fail(step, "error", self._replay._changed(self, step))
            return
        if self._other is None:
            self._other = other.open(self.info, self._heard)
        nodes, parent, sample = self._moved(step.parent, step.node.sample)
        node = replace(step.node, parent=parent, sample=sample)
        if isinstance(node, Select):
            node = replace(node, choices=tuple((self.bound(choice),) for choice in node.choices))
        self._ran[node.id] = step
        self._there[node.id, 0] = node.id
        step.job = _Elsewhere(self._other, node.id)
        self._other.add([*nodes, node])

    def _moved(self, last: Step | None, sample: int) -> tuple[list[Node], int | None, int]:
        """What the other backend must be given first, and the node and sample it continues: the record's outputs are texts to it."""
        path: list[tuple[Step, int]] = []
        step = last
        parent: int | None = None
        at = 0
        while step is not None:
            which = sample if isinstance(step.node, Gen) else 0
            if step.node.id in self._ran:
                parent, at = step.node.id, sample
                break
            if (step.node.id, which) in self._there:
                parent = self._there[step.node.id, which]
                break
            path.append((step, which))
            sample = step.node.sample
            step = step.parent
        nodes: list[Node] = []
        for one, which in reversed(path):
            id = one.node.id
            if which:
                self._made += 1
                id = _OTHER_IDS + self._made
            if isinstance(one.node, (Role, Fork, Wait)):
                nodes.append(replace(one.node, parent=parent, sample=at))
            elif isinstance(one.node, Join):
                nodes.append(Text(id=id, parent=parent, sample=at, parts=("",)))
            else:
                text = one.text if isinstance(one.node, Text) else one.outputs[which].text
                nodes.append(Text(id=id, parent=parent, sample=at, parts=(text,)))
            self._there[one.node.id, which] = id
            parent, at = id, 0
        return nodes, parent, at

    def _heard(self, event: Event) -> None:
        step = self._ran.get(event.node)
        if step is None or step.stage is not Stage.RUNNING:
            return  # a role mark, or a step that was cancelled here
        if isinstance(event, Delta):
            self.delta(step, event.sample, event.text)
        elif isinstance(event, Done):
            self.finish(step, event.outputs, event.usage, event.choosing)
        else:
            step.job = None
            self.fail(step, event.kind, event.error)

    def _closed(self, _: StepSession) -> None:
        self._replay._open.discard(self)
        if self._other is not None:
            self._other.close()


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """A step that runs at another backend."""

    session: Session
    node: int

    def cancel(self) -> None:
        self.session.cancel([self.node])


# ---- what makes nodes equal


def _hash() -> _Hash:
    return hashlib.blake2b(digest_size=16)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # holds neither 0xFE nor 0xFF


def _ask(mark: _Hash, node: Node, choices: Sequence[str]) -> None:
    """Adds what a node asks for. Forks and joins append nothing, so they make no difference."""
    if isinstance(node, (Fork, Join)):
        return
    mark.update(b"\xff" + _bytes(json.dumps(_request(node, choices), sort_keys=True)) + b"\xfe")


def _request(node: Node, choices: Sequence[str]) -> list[Any]:
    if isinstance(node, Gen):
        params = params_to_dict(node.params)
        params.pop("seed", None)
        return ["gen", node.name, node.heal, params, *([asdict(node.read)] if node.read is not None else ())]
    if isinstance(node, Select):
        return ["select", node.name, node.heal, node.method, node.temperature, list(choices)]
    assert isinstance(node, Role), node
    told = [[one.name, one.arguments, one.content] for one in node.results]
    return ["role", node.role, node.begin, *([node.tools, told] if node.tools or told else ())]


def _continue(mark: _Hash, parent: Node, sample: int, text: str) -> None:
    """Adds what a parent's sample appended, where a node continues it."""
    if isinstance(parent, (Gen, Select)):
        mark.update(b"\xff%d\xfe" % sample)
        mark.update(_bytes(text))


def _output_text(step: Step, sample: int) -> str:
    return step.outputs[sample].text if sample < len(step.outputs) else ""


def _keys(graph: ProgramGraph) -> Iterable[tuple[int, bytes]]:
    """The nodes of a record that answer, and their keys."""
    marks: dict[int, _Hash] = {}
    for node in graph:
        if node.parent is None:
            mark = _hash()
        else:
            mark = marks[node.parent].copy()
            _continue(mark, graph.nodes[node.parent], node.sample, graph.text_of(node.parent, node.sample))
        if isinstance(node, Text):
            mark.update(_bytes(graph.text_of(node.id)))
        else:
            _ask(mark, node, [graph.written(choice) for choice in node.choices] if isinstance(node, Select) else [])
        marks[node.id] = mark
        if isinstance(node, (Gen, Select, Role)):
            yield node.id, mark.digest()


# ---- what changed


def first_difference(old: str, new: str, around: int = 24, most: int = 60) -> tuple[str, str]:
    """The places where two texts begin to differ, as a message shows them."""
    at = _common(old, new)
    begin = max(0, at - around) if at > around + 8 else 0
    return tuple(_window(text, begin, at + most) for text in (old, new))  # type: ignore[return-value]


def _window(text: str, begin: int, end: int) -> str:
    part = text[begin:end]
    return f"{'…' if begin else ''}{shown(part, 200)}{'…' if end < len(text) else ''}"


def _common(one: str, other: str) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _name(node: Node) -> str:
    if isinstance(node, Role):
        return f"{'begin' if node.begin else 'end'} {node.role}"
    return node.name if isinstance(node, (Gen, Select)) else ""


def _label(node: Node) -> str:
    return f"role {_name(node)!r} (node {node.id})" if isinstance(node, Role) else label(node)


def _seed(node: Node) -> int | None:
    if isinstance(node, Gen):
        return node.params.seed
    return node.seed if isinstance(node, Select) else None


def _recorded_path(graph: ProgramGraph, node: Node) -> list[tuple[Node, str]]:
    found: list[tuple[Node, str]] = []
    at: int | None = node.parent
    sample = node.sample
    while at is not None:
        item = graph.nodes[at]
        found.append((item, graph.text_of(at, sample)))
        at, sample = item.parent, item.sample
    return found[::-1]


def _shown_path(path: Iterable[tuple[Node, str]]) -> str:
    """The text of a path; marks of roles by their names, for templates need not be the same."""
    said: list[str] = []
    for node, text in path:
        said.append(f"<{'' if node.begin else '/'}{node.role}>" if isinstance(node, Role) else text)
    return "".join(said)


def _fields(graph: ProgramGraph, old: Node, session: StepSession, new: Node) -> Iterable[tuple[str, str, str]]:
    if old.sample != new.sample:
        yield "the sample that it continues", str(old.sample), str(new.sample)
    if isinstance(old, Gen) and isinstance(new, Gen):
        was, now = params_to_dict(old.params), params_to_dict(new.params)
        for name in [*was, *(name for name in now if name not in was)]:
            if name != "seed":
                defaults = {name: getattr(type(old.params)(), name)}
                yield name, repr(was.get(name, defaults[name])), repr(now.get(name, defaults[name]))
        yield "heal", str(old.heal), str(new.heal)
    if isinstance(old, Select) and isinstance(new, Select):
        was_said, now_said = (
            [graph.written(choice) for choice in old.choices],
            [session.bound(choice) for choice in new.choices],
        )
        yield "choices", json.dumps(was_said, ensure_ascii=False), json.dumps(now_said, ensure_ascii=False)
        yield "method", repr(old.method), repr(new.method)
        yield "temperature", repr(old.temperature), repr(new.temperature)
