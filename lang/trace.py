"""Tracing: a function's body is run with placeholders for what is not known, and what it appends becomes a graph ahead of time.

Where the body needs a value (an ``if`` on what was generated, a tool, ``int(s["n"])``) the trace ends there. The graph so far is exact; a run submits it whole
and the body adds the rest live. Nothing is generated while tracing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NoReturn

from lang.backends.base import Capabilities
from lang.errors import author_line
from lang.graph import ProgramGraph
from lang.placeholders import NeedsValue, Placeholder, is_placeholder, marked
from radixrt.engine.nodes import Arg, Gen, Node, Ref, Select, Template, Text

if TYPE_CHECKING:
    from lang.state import ProgramState


@dataclass(slots=True)
class Traced:
    """What tracing found.

    Fields:
        graph: its nodes may have ``Arg`` parts.
        complete: the whole body is in the graph: a run needs no Python.
        stopped: the author's line at which the trace ended, ``""`` where it is complete.
        places: where a generation's seed comes from, by node.
        state: as the body left it.
    """

    graph: ProgramGraph
    complete: bool
    stopped: str
    places: dict[int, str]
    state: ProgramState

    def nodes(self, arguments: Mapping[str, str], seed_of: Callable[[str], int]) -> list[Node]:
        """The nodes of one run: arguments and seeds filled in."""
        found: list[Node] = []
        for node in self.graph.bind(arguments):
            place = self.places.get(node.id)
            if place is not None and isinstance(node, Gen):
                found.append(replace(node, params=node.params.with_seed(seed_of(place))))
            elif place is not None and isinstance(node, Select):
                found.append(replace(node, seed=seed_of(place)))
            else:
                found.append(node)
        return found


@dataclass(slots=True)
class _Info:
    name: str


@dataclass(slots=True)
class _NoBackend:
    name: str = "the trace"
    capabilities: Capabilities = field(default_factory=Capabilities)


class _Values(list[Any]):
    """Gathered values: an entry counts as read when it is taken out."""

    def __init__(self, values: list[Any], read: Callable[[Any], Any]) -> None:
        super().__init__(values)
        self._read = read

    def __getitem__(self, index: Any) -> Any:
        return self._read(super().__getitem__(index))

    def __iter__(self) -> Iterator[Any]:
        return map(self._read, super().__iter__())


class TraceRun:
    """Stands in for ``Run`` while a body is traced: it keeps what is added, and knows no result."""

    tracing = True
    closed = False
    stream = False

    def __init__(self, name: str, defaults: dict[str, Any], heal: bool) -> None:
        self.heal = heal
        self.graph = ProgramGraph(name)
        self.defaults = defaults
        self.backend = _NoBackend()
        self.info = _Info(name)
        self.places: dict[int, str] = {}
        self.param_names: tuple[str, ...] = ()
        self.seed = 0
        self.read: list[tuple[Placeholder, int, str]] = []  # what the body read, after how many nodes, and where
        self._place: str | None = None

    def add(self, make: Callable[[int], Node], line: str, name: str | None = None) -> int:
        id = len(self.graph.nodes)
        node = make(id)
        if isinstance(node, Gen) and any(_has_mark(getattr(node.params, f.name)) for f in fields(node.params)):
            raise NeedsValue
        if isinstance(node, (Gen, Select)) and self._place is not None:
            self.places[id] = self._place
        self._place = None
        self.graph.nodes[id] = node
        self.graph.lines[id] = line
        if name:
            self.graph.names[id] = name
        return id

    def seed_of(self, place: str) -> int:
        self._place = place
        return 0

    def placeholder(self, node: int) -> Placeholder | None:
        return Placeholder(Ref(node))

    def reads(self, value: Any) -> Any:
        """What a body gets for a value: placeholders of its own, so that it is known what became of them."""
        if type(value) is list:
            return _Values(value, self.reads)
        if is_placeholder(value):
            value = Placeholder(value.as_parts()[0])
            self.read.append((value, len(self.graph.nodes), author_line()))
        return value

    def known(self, node: int) -> bool:
        return True

    def drop(self, nodes: Any) -> None:
        """Nothing runs."""

    def done(self, node: int) -> NoReturn:
        raise NeedsValue

    error_of = result = cancel = changed = until = done


def trace(
    fn: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    defaults: dict[str, Any],
    heal: bool = True,
) -> Traced:
    """Trace a body.

    Args:
        args, kwargs: arguments that are known; a parameter without a default that is not among them becomes an ``Arg``.
    """
    from lang.state import ProgramState

    run = TraceRun(name, defaults, heal)
    state = ProgramState(run)  # type: ignore[arg-type]
    stopped, result = "", None
    try:
        given = inspect.signature(fn).bind_partial(state, *args, **kwargs)
        for parameter in given.signature.parameters.values():
            rest = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if parameter.name not in given.arguments and parameter.default is parameter.empty and not rest:
                given.arguments[parameter.name] = Placeholder(Arg(parameter.name))
        result = fn(*given.args, **given.kwargs)
        if inspect.iscoroutine(result):
            coroutine, result = result, None
            try:
                coroutine.send(None)
                stopped = "its first await"
                coroutine.close()
            except StopIteration as end:
                result = end.value
    except NeedsValue as error:
        stopped = _line_of(error, fn)
    except (
        Exception,
        SystemExit,
    ) as error:  # what a function makes of a placeholder, or a mistake that the run will show
        stopped = f"{_line_of(error, fn)} ({type(error).__name__})"
    if result is not None and not stopped:
        stopped = "its return value"
    unseen = next(((count, line) for value, count, line in run.read if not value.used_as_text), None)
    if unseen is not None:  # something other than a text was made of it, and what followed may depend on that
        count, stopped = unseen
        for id in [id for id in run.graph.nodes if id >= count]:
            del run.graph.nodes[id]
    return Traced(run.graph, not stopped, stopped, run.places, state)


def same(graph: ProgramGraph, planned: Node, node: Node) -> bool:
    """Whether a body added the node that was planned; a reference in the plan equals the text that the body read."""
    if type(planned) is not type(node) or (planned.parent, planned.sample) != (node.parent, node.sample):
        return False
    if isinstance(planned, Text) and isinstance(node, Text):
        return _written(graph, planned.parts) == _written(graph, node.parts)
    if isinstance(planned, Select) and isinstance(node, Select):
        texts = [_written(graph, c) for c in planned.choices] == [_written(graph, c) for c in node.choices]
        return texts and replace(planned, choices=()) == replace(node, choices=())
    return planned == node


def _written(graph: ProgramGraph, parts: Template) -> str | None:
    for part in parts:
        if isinstance(part, Arg) or (isinstance(part, Ref) and part.node not in graph.done):
            return None
    return graph.written(parts)


def _has_mark(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_mark, value))
    if hasattr(value, "to_dict"):
        return _has_mark(list(_leaves(value.to_dict())))
    return marked(value)


def _leaves(value: Any) -> Any:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _line_of(error: BaseException, fn: Callable[..., Any]) -> str:
    """The innermost line of the body's file on the way to the error."""
    found, frame = "", error.__traceback__
    filename = fn.__code__.co_filename if hasattr(fn, "__code__") else ""
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == filename:
            found = f"{filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found or author_line()
