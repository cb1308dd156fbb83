"""The text of a running program, piece by piece.

Invariants: the pieces of a state, joined, are its text; a reader that leaves early harms nothing; each reader has its own pace.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from lang.errors import UsageError, author_line
from lang.loop import LOOP, body_state
from radixrt.engine.nodes import Gen, Text

if TYPE_CHECKING:
    from lang.state import ProgramState

_END = object()
_OWN_TEXT = "a program's body cannot iterate over its own text: read s[name] instead"


async def pieces(state: ProgramState, name: str | None) -> AsyncIterator[str]:
    """The pieces of a state, or of one of its variables, as they come. Runs on the programs' loop.

    Raises:
        GenerationFailed, Cancelled: what is read has no result; after the pieces that came before.
        UnknownVariable: the program ended and did not set it.
    """
    run = state._run
    if name is not None:
        while name not in state._vars and name not in state._rounds:
            if run.closed or (state._task is not None and state._task.done()):
                state._variable(name)
            await run.changed()
        if name in state._rounds:
            async for piece in _of_rounds(state, name):
                yield piece
            return
        variable = state._vars[name]
        if variable.node is None:
            yield state.text(name) if variable.span is not None else str(variable.value)
            return
        async for piece in _of_node(state, variable.node, 0, named=True):
            yield piece
        return
    at = 0
    while True:
        while at < len(state._own):
            node = state._own[at]
            at += 1
            sample = state._sample if at == len(state._own) else _continued(state, at)
            async for piece in _of_node(state, node, sample):
                yield piece
        if run.closed:
            if state._error is not None:
                raise state._error
            return
        await run.changed()


async def _of_rounds(state: ProgramState, name: str) -> AsyncIterator[str]:
    """What the model says in each round of a generation with tools; the last round's is the variable's value."""
    run, at = state._run, 0
    while True:
        if at < len(state._rounds[name]):
            async for piece in _of_node(state, state._rounds[name][at], 0, named=True):
                yield piece
            at += 1
        elif name in state._vars:
            return
        elif run.closed:
            if state._error is not None:
                raise state._error
            state._variable(name)
        else:
            await run.changed()


async def _of_node(state: ProgramState, node: int, sample: int, named: bool = False) -> AsyncIterator[str]:
    """The pieces of a node; ``named``: of what a variable holds of it, without thinking and calls where these are read."""
    run = state._run
    item = run.graph.nodes[node]
    read = named and isinstance(item, Gen) and item.read is not None
    if isinstance(run.graph.nodes[node], Text):
        yield run.graph.text_of(node)
        return
    shown = ""
    at = 0
    while True:
        got = (run.said if read else run.partial).get((node, sample), ())
        if at < len(got):
            piece = "".join(got[at:])
            at = len(got)
            shown += piece
            yield piece
            continue
        if run.known(node):
            break
        await run.changed()
    if node in run.graph.failed:
        raise run.error_of(node)
    text = run.result(node).outputs[sample].content if read else run.graph.text_of(node, sample)
    if len(text) > len(shown):
        yield text[len(shown) :]


def _continued(state: ProgramState, at: int) -> int:
    """The sample of the node before place ``at`` that the state went on with."""
    return state._run.graph.nodes[state._own[at]].sample


def read_here(make: Callable[[], AsyncIterator[str]]) -> Iterator[str]:
    """Read a stream of the programs' loop from another thread."""
    if LOOP.inside:
        raise UsageError(_OWN_TEXT, author_line())
    got: queue.SimpleQueue[Any] = queue.SimpleQueue()
    pump = LOOP.start(_pump(make, got.put))
    try:
        while (item := got.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        pump.cancel()


def check_reader(state: ProgramState) -> None:
    """Raises UsageError inside of the state's own program, which would wait for its own end."""
    own = body_state()
    if own is not None and own._run is state._run:
        raise UsageError(_OWN_TEXT, author_line())


async def read_elsewhere(make: Callable[[], AsyncIterator[str]]) -> AsyncIterator[str]:
    """Read a stream of the programs' loop on another event loop."""
    loop = asyncio.get_running_loop()
    got: asyncio.Queue[Any] = asyncio.Queue()
    pump = LOOP.start(_pump(make, lambda item: loop.call_soon_threadsafe(got.put_nowait, item)))
    try:
        while (item := await got.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        pump.cancel()


async def _pump(make: Callable[[], AsyncIterator[str]], put: Callable[[Any], Any]) -> None:
    try:
        async for piece in make():
            put(piece)
    except BaseException as error:
        put(error)
        raise
    put(_END)
