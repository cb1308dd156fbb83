"""Tools in programs: typed Python functions that a model may call, and the rounds of ``gen(tools=...)``.

A round is a generation; where it ends with calls their functions run side by side (``async`` ones on the programs' loop, others in
threads), the results are appended as the model's template writes them, and the next round goes on behind them.

Invariants: what a function raises, and arguments that its types refuse, are the result of its call, never the program's error; results
stand in the order of the calls; after ``max_rounds`` rounds with calls the last one may not call.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typing_extensions
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import to_json

from lang.errors import UsageError, author_line
from lang.loop import called, wait
from lang.placeholders import NeedsValue
from lang.types import schema_of
from lang.variable import Variable, sample_of
from radixrt.engine.nodes import Fork, Gen, Join, Read, Role, Text, ToolResult, Wait
from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.tools import Call, Tool, read_choice, read_tools

if TYPE_CHECKING:
    from lang.expr import GenExpr
    from lang.state import ProgramState

_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Returns?|Raises|Yields?|Examples?|Notes?):?\s*$|^:(?:param|returns?|raises)\b",
    re.MULTILINE,
)
_ARGS = re.compile(r"^(?:Args|Arguments|Parameters):\s*$\n((?:(?:[ \t]+.*)?\n?)*)", re.MULTILINE)
_ITEM = re.compile(r"^(\w+)\s*(?:\([^)\n]*\))?\s*:\s*(.*(?:\n[ \t]+.*)*)", re.MULTILINE)
_SPHINX = re.compile(r"^:param\s+(?:[\w\[\], .|]+\s)?(\w+):\s*(.*(?:\n[ \t]+.*)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True, eq=False)
class ToolFunction:
    """A function as the model knows it. Made by ``tool``; called, it is the function."""

    fn: Callable[..., Any]
    tool: Tool
    _adapter: TypeAdapter[Any] = field(repr=False)

    @property
    def name(self) -> str:
        return self.tool.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def arguments(self, text: str) -> dict[str, Any]:
        """The arguments of a call, as the function's types; raises ValueError, for the model to read."""
        try:
            values: dict[str, Any] = self._adapter.validate_json(text)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            texts = [f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}" for each in found[:5]]
            raise ValueError("; ".join(texts)) from None
        return values


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that was made.

    Fields:
        arguments: as the function got them; as text where it did not. result: the text that the model is given. value: what the function returned.
        error: what it raised instead. started: seconds after the program began. seconds: that it took.
    """

    id: str
    name: str
    arguments: Any
    result: str
    value: Any = None
    error: Exception | None = None
    started: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        return self.result


def tool(fn: Any = None, *, name: str | None = None, description: str | None = None) -> Any:
    """A function as a tool, from its signature and docstring (also as a decorator); ``gen(tools=[...])`` does this by itself.

    Args:
        name, description: in place of the function's own.

    Every parameter needs a type, as ``gen(type=...)`` takes it; ``Annotated[int, "what it is"]`` and an ``Args:`` section describe it.

    Raises:
        UsageError: a parameter without a type, or one that the model cannot give; names it.
    """
    if fn is None:
        return functools.partial(tool, name=name, description=description)
    if isinstance(fn, ToolFunction):
        about = fn.tool.description if description is None else description
        return _checked(replace(fn, tool=replace(fn.tool, name=name or fn.name, description=about)))
    if not callable(fn) or isinstance(fn, type):
        raise UsageError(f"{shown(fn)}: a tool is a function with typed parameters", author_line())
    inner = fn.func if isinstance(fn, functools.partial) else fn
    named = str(name or getattr(inner, "__name__", type(inner).__name__))
    doc = inspect.getdoc(inner if hasattr(inner, "__name__") else type(inner).__call__) or ""
    fields = _parameters(named, fn, inner, doc)
    try:
        adapter, schema = schema_of(typing_extensions.TypedDict(named, fields))  # type: ignore[operator]
    except InvalidRequest as error:
        raise UsageError(f"tool {named!r}: {error}", author_line()) from error
    schema.pop("title", None)
    for part in schema.get("properties", {}).values():
        part.pop("title", None)
    text = doc[: found.start()] if (found := _SECTION.search(doc)) else doc
    return _checked(
        ToolFunction(fn, Tool(named, text.strip() if description is None else description, schema), adapter)
    )


def _checked(made: ToolFunction) -> ToolFunction:
    try:
        read_tools("tools", [made.tool.to_openai()])
    except InvalidRequest as error:
        raise UsageError(f"tool {shown(made.name)}: {error}", author_line()) from error
    return made


def _parameters(name: str, fn: Any, inner: Any, doc: str) -> dict[str, Any]:
    """The types of a function's parameters, with what is said of them."""
    try:
        signature = inspect.signature(fn)
        hints = typing.get_type_hints(
            inner if hasattr(inner, "__name__") else type(inner).__call__, include_extras=True
        )
    except (TypeError, ValueError, NameError) as error:
        raise UsageError(f"tool {name!r}: its parameters are not known ({error})", author_line()) from error
    section = _ARGS.search(doc)
    said = dict(_ITEM.findall(inspect.cleandoc("\n" + section[1]))) if section else {}
    said |= dict(_SPHINX.findall(doc))
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    fields: dict[str, Any] = {}
    for key, parameter in signature.parameters.items():
        if key in bound:  # was given by the author
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UsageError(
                f"tool {name!r}: {parameter} cannot be given by name, as a model gives arguments", author_line()
            )
        if key not in hints:
            raise UsageError(
                f"tool {name!r}: parameter {key!r} has no type; write {key}: str, or what it is", author_line()
            )
        hint = hints[key]
        about = " ".join(said.get(key, "").split())
        notes = hint.__metadata__ if typing.get_origin(hint) is Annotated else ()
        about = next((note for note in notes if isinstance(note, str)), about)
        if about:
            hint = Annotated[hint, Field(description=about)]
        fields[key] = hint if parameter.default is parameter.empty else typing_extensions.NotRequired[hint]
    return fields


def tool_list(tools: Any) -> tuple[ToolFunction, ...]:
    """The tools of a ``gen``.

    Raises:
        UsageError: no list, something that is no tool, two of one name.
    """
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise UsageError(f"tools={shown(tools)}: must be a list of functions", author_line())
    made = tuple(tool(one) for one in tools)
    for i, one in enumerate(made):
        if any(other.name == one.name for other in made[:i]):
            raise UsageError(f"tools[{i}]: there is another tool of the name {one.name!r}", author_line())
    return made


def first_read(tools: Sequence[ToolFunction], choice: Any, parallel: bool) -> Read:
    """How the first round is read; raises UsageError for a choice that there is not."""
    named = {one.name for one in tools}
    if isinstance(choice, ToolFunction) or (callable(choice) and hasattr(choice, "__name__")):
        choice = choice.name if isinstance(choice, ToolFunction) else choice.__name__
    if isinstance(choice, str) and choice in named:
        return Read("named", choice, parallel)
    if choice not in ("auto", "none", "required"):
        words = ("auto", "none", "required", *named)
        hint = nearest(choice, words) if isinstance(choice, str) else f": must be one of {', '.join(words)}"
        raise UsageError(f"tool_choice={shown(choice)}{hint}", author_line())
    try:
        return Read(read_choice(choice, [one.tool for one in tools]).kind, None, parallel)
    except InvalidRequest as error:
        raise UsageError(str(error), author_line()) from error


# ---- running functions


def written(value: Any) -> str:
    """What a function returned, as the model is told: a text as it is, everything else as JSON."""
    if isinstance(value, str):
        return value
    try:
        return to_json(value, fallback=str, inf_nan_mode="strings").decode()
    except Exception:
        return str(value)


async def _made(call: Call, tools: Mapping[str, ToolFunction], began: float) -> ToolCall:
    """Run the function of a call; never raises what that raises."""
    started = time.monotonic()
    arguments: Any = call.arguments
    value, error = None, None
    try:
        function = tools[call.name]
        arguments = function.arguments(call.arguments)
        value = await _ran(function.fn, (), arguments)
        result = written(value)
    except Exception as raised:
        value, error, result = None, raised, told(raised)
    return ToolCall(call.id, call.name, arguments, result, value, error, started - began, time.monotonic() - started)


async def _ran(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inner = fn.func if isinstance(fn, functools.partial) else fn
    inner = inner.fn if isinstance(inner, ToolFunction) else inner
    if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None)):  # noqa: B004
        return await fn(*args, **kwargs)
    value = await asyncio.to_thread(called, fn, args, kwargs)
    return await value if inspect.isawaitable(value) else value


def told(error: Exception) -> str:
    """An exception as a result."""
    return f"error: {type(error).__name__}: {error}" if str(error) else f"error: {type(error).__name__}"


# ---- rounds


def answer(state: ProgramState, expr: GenExpr, line: str) -> None:
    """Append the rounds of a ``gen`` with tools, and set its variable."""
    run = state._run
    if run.tracing:
        raise NeedsValue
    if not run.backend.capabilities.tools:
        raise UsageError(f"gen(tools=...): {run.backend.name} cannot run tools", line)
    if state._role != "assistant":
        raise UsageError("gen(tools=...) must stand in an assistant message", line)
    assert expr.read is not None
    _describe(state, expr.tools, line)
    known = {one.name: one for one in expr.tools}
    rounds: list[int] = state._rounds.setdefault(expr.name or "", []) if expr.name else []
    calls: list[ToolCall] = []
    read = expr.read
    for left in range(expr.max_rounds, -1, -1):
        read = read if left else replace(read, choice="none", tool=None)
        node, _ = state._generate(expr, line, read)
        rounds.append(node)
        found = run.done(node).outputs[0].answer
        if found is None or not found.calls:
            break
        made = _wait(asyncio.gather(*(_made(call, known, run.began) for call in found.calls)))
        calls += made
        results = tuple(
            ToolResult(one.id, one.name, call.arguments, one.result, one.seconds)
            for one, call in zip(made, found.calls)
        )
        state._add(
            lambda id, results=results: Role(  # type: ignore[misc]
                id=id, parent=state._head, sample=state._sample, role="assistant", begin=True, results=results
            ),
            line,
        )
        read = replace(read, choice="auto", tool=None)
    if expr.name:
        parse = expr.type.parse if expr.type is not None else str
        state._set(expr.name, Variable(node, 1, parse, rounds=tuple(rounds), calls=tuple(calls)), line)
        run._tell_change()


def _wait(future: asyncio.Future[Any]) -> Any:
    """Wait in a body; what runs is cancelled with it."""
    try:
        return wait(future)
    finally:
        future.cancel()


def _describe(state: ProgramState, tools: Sequence[ToolFunction], line: str) -> None:
    """Have the chat's first message describe these tools: where it does not, the chat is written anew with them.

    Nothing of it was computed yet where the model has not spoken; what it said stays the text that it was.
    """
    run = state._run
    graph = run.graph
    wanted = tuple({"name": t.name, "description": t.tool.description, "parameters": t.tool.parameters} for t in tools)
    path = graph.path(state._head)
    first = next((id for id in path if isinstance(graph.nodes[id], Role)), None)
    begin = graph.nodes[first] if first is not None else None
    if isinstance(begin, Role) and begin.tools == wanted:
        return
    state._await(path)
    samples = state._samples(path)
    state._head, state._sample = None, 0
    new: dict[int, int] = {}
    own = list(state._own)
    for old in path:
        node = graph.nodes[old]
        if isinstance(node, Fork | Join | Wait):
            continue
        text = graph.text_of(old, samples[old])

        def make(id: int, node: Any = node, old: int = old, text: str = text) -> Any:
            if isinstance(node, Role):
                told = wanted if old == first else ()
                return replace(node, id=id, parent=state._head, sample=0, tools=told)
            return Text(id=id, parent=state._head, parts=(text,) if text else ())

        new[old] = state._add(make, graph.lines.get(old, line))
    state._own[:] = [new.get(id, id) for id in own]  # the state is what it was, node by node


class ToolSteps:
    """What a state knows of tools and thinking."""

    _rounds: dict[str, list[int]]

    def tool(self: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> ToolCall:
        """Run a function as a tool step: in a thread (``async`` ones on the programs' loop), the state's KV kept meanwhile. Appends nothing;
        what it raises is its ``error`` and ``result``."""
        run = self._run
        if run.tracing:
            raise NeedsValue
        inner = fn.func if isinstance(fn, functools.partial) else fn
        name = getattr(inner, "name" if isinstance(inner, ToolFunction) else "__name__", type(inner).__name__)
        line = author_line()
        if run.backend.capabilities.tools and self._head is not None:
            self._add(lambda id: Wait(id=id, parent=self._head, sample=self._sample, tools=(name,)), line)
            run.flush()
        started = time.monotonic()
        value, error = None, None
        try:
            value = _wait(asyncio.ensure_future(_ran(fn, args, kwargs)))
            result = written(value)
        except Exception as raised:
            if isinstance(raised, UsageError) and raised.location == line:
                raise
            value, error, result = None, raised, told(raised)
        seconds = time.monotonic() - started
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        return ToolCall("", name, given, result, value, error, started - run.began, seconds)

    def calls(self: Any, name: str) -> list[ToolCall]:
        """The calls that ``gen(name, tools=...)`` made, in order: arguments, results, seconds. Waits."""
        variable = self._variable(name)
        if variable.node is None:
            raise UsageError(f"{name!r} was not generated: it has no calls", author_line())
        return list(variable.calls)

    def reasoning(self: Any, name: str) -> str:
        """What the model thought on its way to ``gen(name, separate_reasoning=True)`` (or ``tools=...``). Waits."""
        variable = self._variable(name)
        node = self._run.graph.nodes.get(variable.node)
        if not isinstance(node, Gen) or node.read is None or not node.read.reasoning:
            raise UsageError(
                f"{name!r}: its thinking is not kept apart; use gen(..., separate_reasoning=True)", author_line()
            )
        which = sample_of(variable)
        answers = [self._run.done(id).outputs[which].answer for id in variable.rounds or (variable.node,)]
        return "\n\n".join(one.reasoning for one in answers if one is not None and one.reasoning)


__all__ = ["ToolCall", "ToolFunction", "ToolSteps", "answer", "first_read", "tool", "tool_list", "written"]
