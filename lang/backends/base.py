"""What runs programs: a ``Backend`` opens a ``Session`` for each program, which is given nodes and answers with events.

Invariants: everything here happens on one event loop's thread, the one that runs the programs; ``Session.add``, ``cancel`` and ``drop`` never block
and never raise for what a node asks (that node fails, by an event); every ``Gen``, ``Select`` and ``Role`` node is answered by exactly one
``Done`` or ``Failed``, other nodes by at most one ``Failed``; nothing is emitted after ``close``. ``Delta`` events come for ``Gen`` nodes where a
program streams, and may be left out: what ``Done`` says is the whole text. A ``Done`` of a backend that has no scores has no ``choosing``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from radixrt.engine.nodes import Event, Node

Emit = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """A program that begins. ``name``: its function; ``order``: ascending over the programs of this process; ``cache_salt``: see ``Engine.add``;
    ``stream``: ``Delta`` events are wanted."""

    id: str
    name: str
    order: int
    cache_salt: str = ""
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can honour; ``lang`` refuses the rest before it is sent.

    Fields:
        params: names of ``SamplingParams`` fields; ``None``: all.
        constraints: kinds of ``Constraint`` (``type`` of its ``to_dict`` form); ``None``: all.
        select_methods: names of scoring methods; ``None``: all.
        select_sampling: ``select`` with a temperature above 0.
        healing: token healing; where it is missing, text ends as it ends.
        completion: generation outside of an ``assistant`` role.
        tools: tools and their results in chats, and outputs read into thinking, content and calls.
    """

    params: frozenset[str] | None = None
    constraints: frozenset[str] | None = None
    select_methods: frozenset[str] | None = None
    select_sampling: bool = True
    healing: bool = True
    completion: bool = True
    tools: bool = True


class Session(Protocol):
    """One running program."""

    def add(self, nodes: Sequence[Node]) -> None:
        """Nodes to run as soon as their parents and references are done; parents come before children."""

    def cancel(self, nodes: Sequence[int]) -> None:
        """End these nodes and everything that hangs on them; those not done yet fail with kind ``cancelled``."""

    def drop(self, nodes: Sequence[int]) -> None:
        """The program will not continue these nodes again: what is kept for that may go."""

    def close(self) -> None:
        """The program is over: end what runs, free everything. May be called twice."""


@runtime_checkable
class Backend(Protocol):
    """Runs programs."""

    name: str
    capabilities: Capabilities

    async def start(self) -> None:
        """Make ready (load a model, connect); called before the first ``open``, again at no cost."""

    async def aclose(self) -> None:
        """Give everything up; running programs fail."""

    def open(self, info: ProgramInfo, emit: Emit) -> Session:
        """Begin a program; its events go to ``emit``, on the thread of the running event loop."""

    async def stats(self) -> dict[str, Any]:
        """Figures as the backend counts them: at least ``prompt_tokens`` and ``generated_tokens``."""


@dataclass(slots=True)
class Counters:
    """Figures that backends without an engine of their own count."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
