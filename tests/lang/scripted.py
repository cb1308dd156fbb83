"""A session that keeps what it is told, and short ways to write nodes."""

from __future__ import annotations

import asyncio
from typing import Any

from lang.backends.base import Backend, ProgramInfo, Session
from radixrt.engine.nodes import (
    Delta,
    Done,
    Event,
    Failed,
    Gen,
    Node,
    Role,
    Select,
    Text,
    check_order,
)
from radixrt.request import SamplingParams

ANSWERED = (Gen, Select, Role)


class Program:
    """A session and what it told."""

    def __init__(self, backend: Backend, name: str = "program") -> None:
        self.events: list[Event] = []
        self.inside = False
        self.session: Session = backend.open(ProgramInfo(name, name, 0), self._hear)
        self.waiting: set[int] = set()
        self.settled = asyncio.Event()

    def _hear(self, event: Event) -> None:
        assert not self.inside, "an event in the middle of a call"
        self.events.append(event)
        if not isinstance(event, Delta):
            self.waiting.discard(event.node)
            if not self.waiting:
                self.settled.set()

    def add(self, *nodes: Node) -> None:
        self.waiting |= {node.id for node in nodes if isinstance(node, ANSWERED)}
        self.settled.clear()
        self.inside = True
        self.session.add(nodes)
        self.inside = False

    def cancel(self, *nodes: int) -> None:
        self.inside = True
        self.session.cancel(nodes)
        self.inside = False

    async def all(self) -> list[Event]:
        if self.waiting:
            await self.settled.wait()
        return self.events

    def done(self, node: int) -> Done:
        found = [event for event in self.events if isinstance(event, (Done, Failed)) and event.node == node]
        assert len(found) == 1, found
        assert isinstance(found[0], Done), found[0]
        return found[0]

    def failed(self, node: int) -> Failed:
        found = [event for event in self.events if isinstance(event, (Done, Failed)) and event.node == node]
        assert len(found) == 1, found
        assert isinstance(found[0], Failed), found[0]
        return found[0]

    def text(self, node: int, sample: int = 0) -> str:
        return self.done(node).outputs[sample].text


async def run(backend: Backend, *nodes: Node) -> Program:
    check_order(nodes, {})
    program = Program(backend)
    program.add(*nodes)
    await program.all()
    return program


def gen(id: int, name: str = "", parent: int | None = None, *, sample: int = 0, **params: Any) -> Gen:
    return Gen(id=id, parent=parent, sample=sample, name=name, params=SamplingParams(**params))


def text(id: int, *parts: Any, parent: int | None = None, sample: int = 0) -> Text:
    return Text(id=id, parent=parent, sample=sample, parts=parts)
