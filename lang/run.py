"""Run owns one program while it runs: its graph, its session with the backend, and who waits for what.

Invariants: used on the programs' loop only, except for ``value_of``, which any thread may call. Node ids are given in the order in which nodes are
added; nodes reach the session in that order, in batches: when the body waits, and at the latest when the loop turns. After ``close``
the session is closed and everything that waits is answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from lang.backends.base import Backend, ProgramInfo, Session
from lang.errors import BackendError, Cancelled, GenerationFailed, UsageError
from lang.expr import PARAMS
from lang.graph import ProgramGraph
from lang.loop import LOOP, wait
from lang.placeholders import Placeholder
from lang.trace import same
from radixrt.engine.nodes import Delta, Done, Event, Failed, Gen, Node, Role, Select

ANSWERED = (Gen, Select, Role)


class Run:
    """A running program.

    Args:
        defaults: ``SamplingParams`` fields for generations that do not say otherwise.
    """

    tracing = False
    param_names = PARAMS

    __slots__ = (
        "_ahead",
        "_changed",
        "_next",
        "_outbox",
        "_planned",
        "_scheduled",
        "_session",
        "_waiting",
        "backend",
        "began",
        "closed",
        "defaults",
        "graph",
        "heal",
        "info",
        "open_nodes",
        "partial",
        "said",
        "seed",
        "stream",
    )

    def __init__(
        self,
        backend: Backend,
        info: ProgramInfo,
        *,
        seed: int,
        defaults: dict[str, Any],
        stream: bool = False,
        heal: bool = True,
    ) -> None:
        self.backend = backend
        self.info = info
        self.seed = seed
        self.defaults = defaults
        self.stream = stream
        self.heal = heal and backend.capabilities.healing
        self.graph = ProgramGraph(info.name, seed)
        self.partial: dict[tuple[int, int], list[str]] = {}  # pieces of running samples, where they are streamed
        self.said: dict[tuple[int, int], list[str]] = {}  # of these, where they are read: without thinking and calls
        self.open_nodes: set[int] = set()  # not answered yet
        self._next = 0
        self._planned: dict[int, Node] = {}  # submitted, not added by the body yet
        self._ahead: dict[int, Done | Failed] = {}  # their results
        self.closed = False
        self.began = time.monotonic()
        self._session: Session = backend.open(info, self._hear)
        self._outbox: list[Node] = []
        self._scheduled = False
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._changed: list[asyncio.Future[None]] = []

    # ---- nodes

    def add(self, make: Callable[[int], Node], line: str, name: str | None = None) -> int:
        """Add the node that ``make`` returns for an id; returns that id."""
        if self.closed:
            raise UsageError("the program is over: nothing can be appended to its states any more", line)
        if not LOOP.inside:
            raise UsageError("states are appended to by the program's body only, not by another thread", line)
        id = self._next
        self._next += 1
        node = make(id)
        known = False
        if self._planned:
            known = same(self.graph, self._planned.pop(id), node)
            if not known:  # the body takes another way than was foreseen: its nodes get ids of their own
                self._session.cancel((id, *self._planned))
                self._next = max((id, *self._planned)) + 1
                self._planned = {}
                return self.add(make, line, name)
        self.graph.nodes[id] = node
        self.graph.lines[id] = line
        if name:
            self.graph.names[id] = name
        early = self._ahead.pop(id, None) if known else None
        if early is not None:
            self._answer(early)
        elif isinstance(node, ANSWERED):
            self.open_nodes.add(id)
        if not known:
            self._outbox.append(node)
            if not self._scheduled:
                self._scheduled = True
                asyncio.get_running_loop().call_soon(self.flush)
        if self._changed:
            self._tell_change()
        return id

    def submit(self, nodes: Iterable[Node]) -> None:
        """Give the session nodes ahead of the body, which is expected to add the same ones."""
        planned = tuple(nodes)
        self._planned = {node.id: node for node in planned}
        self._session.add(planned)

    def flush(self) -> None:
        """Hand what was added to the session."""
        self._scheduled = False
        if self._outbox and not self.closed:
            nodes, self._outbox = self._outbox, []
            try:
                self._session.add(nodes)
            except BackendError as error:  # it is gone: nothing will be answered
                for node in nodes:
                    self._answer(Failed(node.id, "error", error.problem))

    def cancel(self, nodes: Iterable[int]) -> None:
        self.flush()
        self._session.cancel(tuple(nodes))

    def drop(self, nodes: Iterable[int]) -> None:
        self.flush()
        self._session.drop(tuple(nodes))

    def seed_of(self, place: str) -> int:
        """The seed of the generation at a place of the program: the same in every run of this seed, whatever runs beside it."""
        return int.from_bytes(hashlib.blake2b(f"{self.seed}/{place}".encode(), digest_size=8).digest(), "little")

    def close(self) -> None:
        """End the session; what is not answered is cancelled."""
        if self.closed:
            return
        self.closed = True
        self.graph.seconds = time.monotonic() - self.began
        self._session.close()
        for node in list(self.open_nodes):
            self._answer(Failed(node, "cancelled", "the program ended before it was done"))
        for waiting in self._waiting.values():
            _settle(waiting)
        self._waiting.clear()
        self._tell_change()

    def adopt(self, graph: ProgramGraph, nodes: Iterable[Node]) -> None:
        """Take over and submit a whole graph that was traced; its nodes as they are for this run."""
        whole = tuple(nodes)
        self.graph.nodes = {node.id: node for node in whole}
        self.graph.lines, self.graph.names = dict(graph.lines), dict(graph.names)
        self.open_nodes = {node.id for node in whole if isinstance(node, ANSWERED)}
        self._next = len(whole)
        self._session.add(whole)

    # ---- results

    def placeholder(self, node: int) -> Placeholder | None:
        """While tracing: what stands for the text of a node."""
        return None

    def reads(self, value: Any) -> Any:
        """What a body gets for a value: the value."""
        return value

    def known(self, node: int) -> bool:
        """Whether the result of a node is there, or will never come."""
        return node not in self.open_nodes

    def done(self, node: int) -> Done:
        """The result of a ``Gen``, ``Select`` or ``Role`` node; waits for it.

        Raises:
            Cancelled, GenerationFailed: there is none, with the line where the node was added.
        """
        if node in self.open_nodes:
            if not LOOP.inside:
                LOOP.call(lambda: self.until(node))
            else:
                self.flush()
                wait(self._future(node))
        return self.result(node)

    def result(self, node: int) -> Done:
        """The result of a node that is known; raises as ``done`` does."""
        done = self.graph.done.get(node)
        if done is not None:
            return done
        raise self.error_of(node)

    def error_of(self, node: int) -> GenerationFailed:
        failed = self.graph.failed.get(node)
        line = self.graph.lines.get(node, "")
        name = self.graph.names.get(node)
        what = f"{name!r}: " if name else ""
        if failed is None:
            return GenerationFailed(f"{what}has no result", line)
        if failed.kind == "cancelled":
            return Cancelled(f"{what}{failed.error}", line)
        return GenerationFailed(f"{what}{failed.error}", line, failed.kind)

    async def until(self, node: int) -> None:
        """Wait until the result of a node is known."""
        if node in self.open_nodes:
            self.flush()
            await self._future(node)

    async def settle(self) -> None:
        """Wait until every node is known."""
        while self.open_nodes:
            self.flush()
            await self._future(next(iter(self.open_nodes)))
        self.flush()

    def changed(self) -> asyncio.Future[None]:
        """A future that is done when something new is known or was added."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.closed:
            future.set_result(None)
        else:
            self._changed.append(future)
        return future

    # ---- inside

    def _future(self, node: int) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(node, []).append(future)
        return future

    def _hear(self, event: Event) -> None:
        if self.closed:
            return
        if isinstance(event, Delta):
            self.partial.setdefault((event.node, event.sample), []).append(event.text)
            if event.content:
                self.said.setdefault((event.node, event.sample), []).append(event.content)
            self._tell_change()
        elif event.node in self._planned:
            self._ahead[event.node] = event
        elif event.node in self.graph.nodes:
            self._answer(event)

    def _answer(self, event: Done | Failed) -> None:
        if isinstance(event, Done):
            self.graph.done[event.node] = event
        else:
            self.graph.failed[event.node] = event
        self.open_nodes.discard(event.node)
        waiting = self._waiting.pop(event.node, None)
        if waiting:
            _settle(waiting)
        if self._changed:
            self._tell_change()

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, []
        _settle(changed)


def _settle(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
