"""Nodes of one program for backends without an engine that knows programs: who waits for whom, who fails with whom, what text came before.

Invariants: a step begins once all it needs is done, and never twice; every step ends once, as done or failed; ``add``, ``cancel`` and ``drop`` emit nothing
themselves (events go out on the loop's next turns, parents before children); nothing recurses, so chains may be long; a step costs O(1) besides its own text.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from lang.backends.base import Emit, ProgramInfo
from radixrt.engine.nodes import (
    Arg,
    Choosing,
    Delta,
    Done,
    Failed,
    Fork,
    Gen,
    Join,
    Node,
    Output,
    Ref,
    Role,
    Select,
    Template,
    Text,
    Usage,
    Wait,
    refs,
)
from radixrt.errors import InvalidRequest

TURN = 1000  # steps and events handled in one turn of the loop, at most


class Stage(IntEnum):
    """Where a step is. It only ever moves down this list."""

    WAITING = 0
    READY = 1
    RUNNING = 2
    DONE = 3
    FAILED = 4


class Cancellable(Protocol):
    """What runs for a step: a task, a timer."""

    def cancel(self) -> Any: ...


class Step:
    """A node and where it is.

    ``text``: what a ``Text`` appended; ``outputs``: of ``Gen``, ``Select`` and ``Role``, once done; ``job``: ended with the step; ``reason``: why steps that
    need it fail; ``closed``: why nothing may continue it; ``tokens`` and ``seen`` belong to the backend.
    """

    __slots__ = (
        "children",
        "closed",
        "job",
        "node",
        "outputs",
        "parent",
        "reason",
        "seen",
        "stage",
        "text",
        "tokens",
        "waits",
    )

    def __init__(self, node: Node, parent: Step | None) -> None:
        self.node = node
        self.parent = parent
        self.children: list[Step] = []
        self.waits = 0
        self.stage = Stage.WAITING
        self.text = ""
        self.outputs: tuple[Output, ...] = ()
        self.job: Cancellable | None = None
        self.reason = ""
        self.closed = ""
        self.tokens = 0
        self.seen = 0


@dataclass(frozen=True, slots=True)
class Transcript:
    """The chat before a step. ``messages``: role and text; ``unfinished``: the last one has not ended; ``outside``: text in no message."""

    messages: tuple[tuple[str, str], ...]
    unfinished: bool
    outside: str


class StepSession:
    """A ``Session``. ``begin`` is called with each ``Gen``, ``Select`` and ``Role`` step whose needs are done, and answers with ``finish`` or ``fail``."""

    def __init__(
        self,
        info: ProgramInfo,
        emit: Emit,
        begin: Callable[[StepSession, Step], None],
        on_close: Callable[[StepSession], None],
    ) -> None:
        self.info = info
        self.loop = asyncio.get_running_loop()
        self._emit = emit
        self._begin = begin
        self._on_close = on_close
        self._steps: dict[int, Step] = {}
        self._queue: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._scheduled = False
        self._over = False

    # ---- what the program asks

    def add(self, nodes: Sequence[Node]) -> None:
        if self._over:
            return
        steps = self._steps
        for node in nodes:
            if node.id in steps:
                self.soon(self._emit, Failed(node.id, "invalid", f"node {node.id}: its id is taken"))
                continue
            parent = None if node.parent is None else steps.get(node.parent)
            step = steps[node.id] = Step(node, parent)
            if parent is None and node.parent is not None:
                self.fail(step, "invalid", f"{label(node)}: its parent, node {node.parent}, is unknown")
            elif parent is not None and parent.closed:
                self.fail(step, "cancelled", parent.closed)
            else:
                self._wire(step)

    def cancel(self, nodes: Sequence[int]) -> None:
        work = [step for step in map(self._steps.get, nodes) if step is not None]
        for step in work:  # grows
            if step.stage is Stage.FAILED:
                continue
            why = f"{label(step.node)} was cancelled"
            if step.stage is not Stage.DONE:
                self.fail(step, "cancelled", why, reason=why)
            elif not step.closed:
                step.closed = why
                work += [child for child in step.children if child.parent is step]

    def drop(self, nodes: Sequence[int]) -> None:
        """Nothing is kept for it."""

    def close(self) -> None:
        if self._over:
            return
        self._over = True
        for step in self._steps.values():
            if step.job is not None:
                step.job.cancel()
                step.job = None
            step.children = []
        self._steps = {}
        self._queue.clear()
        self._on_close(self)

    # ---- what the backend answers

    def fail_all(self, error: str) -> None:
        """Fails what is not done, at once: the loop may be about to stop."""
        for step in list(self._steps.values()):
            if step.stage < Stage.DONE:
                self.fail(step, "error", error)
        while self._queue:
            call, argument = self._queue.popleft()
            if call is self._emit and not self._over:
                self._emit(argument)

    def delta(self, step: Step, sample: int, text: str) -> None:
        if step.stage is Stage.RUNNING and text and not self._over:
            self._emit(Delta(step.node.id, sample, text))

    def finish(self, step: Step, outputs: tuple[Output, ...], usage: Usage, choosing: Choosing | None = None) -> None:
        if step.stage is not Stage.RUNNING or self._over:
            return
        step.outputs = outputs
        step.job = None
        self._emit(Done(step.node.id, outputs, usage, choosing))
        self._settle(step)

    def fail(self, step: Step, kind: str, error: str, reason: str = "") -> None:
        """Ends a step and all that needs it, which names ``reason``: by default, that this step failed with this error."""
        if self._over:
            return
        work = [step]
        for one in work:  # grows
            if one.stage >= Stage.DONE:
                continue
            one.stage = Stage.FAILED
            if one is step:
                one.reason = reason or (error if kind == "cancelled" else f"{label(one.node)} failed: {error}")
            else:
                one.reason, kind, error = step.reason, "cancelled", step.reason
            one.closed = one.reason
            if one.job is not None:
                one.job.cancel()
                one.job = None
            self.soon(self._emit, Failed(one.node.id, kind, error))
            work += one.children

    def soon(self, call: Callable[[Any], None], argument: Any) -> None:
        """Calls it on the next turn of the loop, after what was put there before."""
        self._queue.append((call, argument))
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._turn)

    # ---- how it goes on

    def _turn(self) -> None:
        queue = self._queue
        try:
            for _ in range(min(len(queue), TURN)):
                call, argument = queue.popleft()
                call(argument)
                if self._over:
                    return
        finally:
            if queue and not self._over:
                self.loop.call_soon(self._turn)
            else:
                self._scheduled = False

    def _wire(self, step: Step) -> None:
        """Makes a new step wait for what it needs, or go on where it need not."""
        parent = step.parent
        if parent is not None:
            parent.children.append(step)
            if parent.stage < Stage.DONE:
                step.waits = 1
        if isinstance(step.node, (Text, Select)):
            for ref in refs(step.node):
                other = self._steps.get(ref.node)
                if other is None or other is step:
                    self.fail(step, "invalid", f"{label(step.node)}: refers to node {ref.node}, which is unknown")
                    return
                if other.stage is Stage.FAILED:
                    self.fail(step, "cancelled", other.reason)
                    return
                if other.stage < Stage.DONE:
                    other.children.append(step)
                    step.waits += 1
        if not step.waits:
            self._settle(step)

    def _settle(self, step: Step) -> None:
        """A step has all it needs, or is done if it runs: what appends no output is done at once, and what waited for it goes on."""
        work = [step]
        for one in work:  # grows
            if one.stage is Stage.WAITING:
                problem = _misfit(one)
                if problem:
                    self.fail(one, "invalid", problem)
                    continue
                if isinstance(one.node, (Gen, Select, Role)):
                    one.stage = Stage.READY
                    self.soon(self._start, one)
                    continue
                if isinstance(one.node, Text):
                    try:
                        one.text = self.bound(one.node.parts)
                    except InvalidRequest as error:
                        self.fail(one, "invalid", f"{label(one.node)}: {error}")
                        continue
                elif not isinstance(one.node, (Fork, Join, Wait)):
                    self.fail(one, "invalid", f"{label(one.node)}: is of an unknown kind")
                    continue
                if one.parent is not None:
                    one.tokens, one.seen = one.parent.tokens, one.parent.seen
                if one.text:
                    one.tokens += len(one.text.split())
            one.stage = Stage.DONE
            for child in one.children:
                if child.stage is Stage.WAITING:
                    child.waits -= 1
                    if not child.waits:
                        work.append(child)

    def _start(self, step: Step) -> None:
        if step.stage is Stage.READY:
            step.stage = Stage.RUNNING
            try:
                self._begin(self, step)
            except BaseException as error:
                self.fail(step, "error", f"{type(error).__name__}: {error}")

    # ---- texts

    def bound(self, parts: Template) -> str:
        """A template's text. Raises InvalidRequest: an argument without a value, a reference to no output."""
        if len(parts) == 1 and isinstance(parts[0], str):
            return parts[0]
        out: list[str] = []
        for part in parts:
            if isinstance(part, str):
                out.append(part)
            elif isinstance(part, Ref):
                other = self._steps[part.node]
                if not isinstance(other.node, (Gen, Select)):
                    raise InvalidRequest("ref", f" to {label(other.node)}, which generates nothing")
                if part.sample >= len(other.outputs):
                    many = len(other.outputs)
                    raise InvalidRequest("ref", f" to sample {part.sample} of {label(other.node)}, which has {many}")
                out.append(other.outputs[part.sample].text)
            elif isinstance(part, Arg):
                raise InvalidRequest(f"argument {part.name!r}", " has no value")
            else:
                raise InvalidRequest("part", f"must be text, not {type(part).__name__}")
        return "".join(out)


def label(node: Node) -> str:
    """A node as errors name it: ``gen 'city' (node 4)``."""
    name = getattr(node, "name", "")
    return f"{node.kind} {name!r} (node {node.id})" if name else f"{node.kind or 'node'} (node {node.id})"


def before(step: Step) -> list[tuple[Node, str]]:
    """The nodes that a step continues, first to last, with what each appended."""
    found: list[tuple[Node, str]] = []
    at, sample = step.parent, step.node.sample
    while at is not None:
        found.append((at.node, at.outputs[sample].text if at.outputs else at.text))
        sample = at.node.sample
        at = at.parent
    found.reverse()
    return found


def transcript(nodes: Iterable[tuple[Node, str]]) -> Transcript:
    """The messages of a chat from its nodes: what stands between a role's begin and end."""
    messages: list[tuple[str, str]] = []
    outside: list[str] = []
    content: list[str] | None = None
    role = ""
    for node, text in nodes:
        if not isinstance(node, Role):
            (outside if content is None else content).append(text)
            continue
        if content is not None:
            messages.append((role, "".join(content)))
        messages += [("tool", one.content) for one in node.results]
        role, content = node.role, [] if node.begin else None
    if content is not None:
        messages.append((role, "".join(content)))
    return Transcript(tuple(messages), content is not None, "".join(outside))


def chatml(role: Role) -> str:
    """How a message begins or ends where the model's own template is not known."""
    told = "".join(f"<|im_end|>\n<|im_start|>tool\n{one.content}" for one in role.results)
    begin = f"<|im_start|>{role.role}\n"
    return f"{told}<|im_end|>\n{begin}" if told else begin if role.begin else "<|im_end|>\n"


def _misfit(step: Step) -> str:
    """What is wrong with the sample of its parent that a step continues."""
    parent, sample = step.parent, step.node.sample
    if not sample:
        return ""
    if parent is None:
        return f"{label(step.node)}: continues sample {sample} of no parent"
    have = len(parent.outputs) if isinstance(parent.node, Gen) else 1
    if sample < have:
        return ""
    return f"{label(step.node)}: continues sample {sample} of {label(parent.node)}, which has {have}"
