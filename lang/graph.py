"""ProgramGraph: the request graph of one program run, with what is known about each node: its author's line, its result, its cost.

Invariants: nodes stand in the order in which they were added, parents and references before what names them; a ``Gen``,
``Select`` or ``Role`` node has at most one ``Done`` or ``Failed``. The graph of a function that was compiled and did not run has no results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixrt.engine.nodes import (
    VERSION,
    Arg,
    Done,
    Failed,
    Gen,
    Node,
    Ref,
    Role,
    Select,
    Template,
    Text,
    graph_from_dict,
    graph_to_dict,
    refs,
)


@dataclass(slots=True)
class ProgramGraph:
    """A graph, whole or still growing.

    Fields:
        name: the function that made it.
        seed: what its samples were drawn from.
        nodes: by id, in order.
        lines: where each node was written, ``file:line``, by id.
        names: the variable that a node sets, by id.
        done, failed: results, by id.
        seconds: wall time of the run, once it is over.
    """

    name: str = ""
    seed: int = 0
    nodes: dict[int, Node] = field(default_factory=dict)
    lines: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    done: dict[int, Done] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    seconds: float | None = None

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def __len__(self) -> int:
        return len(self.nodes)

    # ---- what nodes say

    def text_of(self, node: int, sample: int = 0) -> str:
        """What a node appended to its state, as far as it is known; unbound arguments as ``{name}``, unknown outputs as ``""``."""
        item = self.nodes[node]
        if isinstance(item, Text):
            return self.written(item.parts)
        done = self.done.get(node)
        if done is None:
            return ""
        return done.outputs[sample].text if sample < len(done.outputs) else ""

    def written(self, parts: Template) -> str:
        texts: list[str] = []
        for part in parts:
            if isinstance(part, Ref):
                texts.append(self.text_of(part.node, part.sample))
            else:
                texts.append("{" + part.name + "}" if isinstance(part, Arg) else part)
        return "".join(texts)

    def path(self, head: int | None) -> list[int]:
        """The nodes from the beginning to ``head``."""
        nodes: list[int] = []
        while head is not None:
            nodes.append(head)
            head = self.nodes[head].parent
        return nodes[::-1]

    def role_around(self, node: int) -> str | None:
        """The message that a node stands in."""
        at: int | None = node
        while at is not None:
            item = self.nodes[at]
            if isinstance(item, Role):
                return item.role if item.begin else None
            at = item.parent
        return None

    def children(self) -> dict[int | None, list[int]]:
        """The nodes that continue each node; those of ``None`` begin the program."""
        found: dict[int | None, list[int]] = {None: []}
        for node in self.nodes.values():
            found.setdefault(node.parent, []).append(node.id)
        return found

    def needs(self, node: int) -> list[int]:
        """The nodes whose results a node waits for: its parent and those whose output it names."""
        item = self.nodes[node]
        found = [] if item.parent is None else [item.parent]
        return found + [ref.node for ref in refs(item) if ref.node not in found]

    # ---- figures

    def generations(self) -> list[int]:
        """The ``Gen`` and ``Select`` nodes, in order."""
        return [node.id for node in self.nodes.values() if isinstance(node, (Gen, Select))]

    def totals(self) -> dict[str, int]:
        """Sums of the token counts over all nodes that are done."""
        names = ("prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens", "forced_tokens", "tokenized")
        return {name: sum(getattr(done.usage, name) for done in self.done.values()) for name in names}

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that came from the cache."""
        totals = self.totals()
        return totals["cached_tokens"] / totals["prompt_tokens"] if totals["prompt_tokens"] else 0.0

    def critical_path(self) -> list[int]:
        """The chain of nodes that took longest: what a faster run would have to shorten. Longest path by measured seconds."""
        best: dict[int, float] = {}
        before: dict[int, int | None] = {}
        for id in self.nodes:  # parents come first
            done = self.done.get(id)
            cost = done.usage.queue_time + done.usage.prefill_time + done.usage.decode_time if done is not None else 0.0
            needed = max(self.needs(id), key=lambda other: best[other], default=None)
            best[id] = cost + (best[needed] if needed is not None else 0.0)
            before[id] = needed
        chain: list[int] = []
        at = max(best, key=lambda id: best[id], default=None)
        while at is not None:
            chain.append(at)
            at = before[at]
        return chain[::-1]

    # ---- forms

    def to_dict(self) -> dict[str, Any]:
        """The JSON form that a runtime takes: ``version`` and ``nodes`` (see ``radixrt.engine.nodes``)."""
        return graph_to_dict(self.nodes.values())

    @classmethod
    def from_dict(cls, data: Any, *, name: str = "") -> ProgramGraph:
        """Raises InvalidRequest, naming the node and the field, where ``data`` is no graph."""
        nodes = graph_from_dict(data)
        graph = cls(name=name, nodes={node.id: node for node in nodes})
        graph.names = {node.id: node.name for node in nodes if isinstance(node, (Gen, Select)) and node.name}
        return graph

    def bind(self, arguments: Mapping[str, str]) -> Iterable[Node]:
        """The nodes with their arguments filled in, neighbouring texts joined.

        Raises:
            KeyError: an argument is missing.
        """
        from dataclasses import replace

        for node in self.nodes.values():
            if isinstance(node, Text):
                yield replace(node, parts=_bound(node.parts, arguments))
            elif isinstance(node, Select):
                yield replace(node, choices=tuple(_bound(choice, arguments) for choice in node.choices))
            else:
                yield node

    def to_dot(self) -> str:
        """The graph in Graphviz' language."""
        from lang.draw import to_dot

        return to_dot(self)

    def to_html(self, path: str | Path) -> Path:
        """Write the graph with its texts, token counts, times and critical path as one self-contained page; returns its path."""
        from lang.draw import to_html

        target = Path(path)
        target.write_text(to_html(self), encoding="utf-8")
        return target

    def save(self, path: str | Path) -> Path:
        """Write a record of the run, for ``lang.Replay``: one JSON object a line."""
        from lang.record import write

        return write(self, Path(path))


def _bound(parts: Template, arguments: Mapping[str, str]) -> Template:
    joined: list[str | Ref | Arg] = []
    for part in parts:
        value = arguments[part.name] if isinstance(part, Arg) else part
        if isinstance(value, str) and joined and isinstance(joined[-1], str):
            joined[-1] += value
        else:
            joined.append(value)
    return tuple(joined)


__all__ = ["VERSION", "ProgramGraph"]
