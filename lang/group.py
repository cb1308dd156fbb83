"""StateGroup: the branches of a fork, and what is done with all of them: append, join, map, race, vote.

Invariants: branches stay in their order; a failure stays with its branch until it is read, and a branch that is not wanted any more is cancelled
and its KV given up at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lang.errors import Cancelled, GenerationFailed, ProgramError, UnknownVariable, UsageError, author_line
from lang.expr import Expr, ExprList, GenExpr
from lang.loop import LOOP, run_body
from lang.placeholders import NeedsValue, is_placeholder
from lang.variable import Variable
from radixrt.engine.nodes import MAX_NODES, Gen, Join
from radixrt.errors import shown

if TYPE_CHECKING:
    from lang.state import ProgramState


class StateGroup:
    """The branches of a fork, in order.

    ``group += expr`` appends to each, a list appends its entries one to each, a function of the index what it returns.
    """

    def __init__(self, states: Sequence[ProgramState], source: ProgramState) -> None:
        self._states = tuple(states)
        self._source = source

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._states)

    def __getitem__(self, index: int) -> ProgramState:
        return self._states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        """For ``group[i] += expr``; another state cannot take the place of a branch."""
        if state is not self._states[index]:
            raise UsageError("a branch cannot be replaced by another state", author_line())

    def __iadd__(self, other: Any) -> StateGroup:
        line = author_line()
        if isinstance(other, (list, tuple)):
            if len(other) != len(self._states):
                raise UsageError(f"{len(other)} entries were appended to {len(self._states)} branches", line)
            each: Sequence[Any] = other
        elif callable(other) and not isinstance(other, Expr) and not is_placeholder(other):
            each = [other(i) for i in range(len(self._states))]
        else:
            each = [other] * len(self._states)
        for state, item in zip(self._states, each, strict=True):
            state._append(item, line)
        return self

    def join(self, mode: str = "gather_variable") -> list[Any]:
        """Wait for all branches, and gather what they set: in the state that forked, ``s[name]`` is then the list of the branches' values, in order.

        Args:
            mode: ``gather_variable``; or ``concate_and_append``: also append to the state that forked what each branch appended, in order.

        Returns:
            For each branch its new variables, ``{name: value}``; or its error. The error of a branch stands in its place in the lists too.
        """
        line = author_line()
        if mode not in ("gather_variable", "concate_and_append"):
            raise UsageError(f"join(mode={shown(mode)}): must be 'gather_variable' or 'concate_and_append'", line)
        source = self._source
        names = list(dict.fromkeys(n for s in self._states for n in s._vars if n not in source._vars))
        results: list[Any] = []
        gathered: dict[str, list[Any]] = {name: [] for name in names}
        for state in self._states:
            found: dict[str, Any] = {}
            error: BaseException | None = state._error
            if not source._run.tracing:
                try:
                    state.sync()
                except ProgramError as raised:
                    error = error or raised
            for name in names:
                value: Any = None
                if name in state._vars:
                    try:
                        value = found[name] = state._value(name)
                    except ProgramError as raised:
                        value, error = raised, error or raised
                gathered[name].append(value)
            results.append(found if error is None else error)
        for name, values in gathered.items():
            source._set(name, Variable(value=values), line)
        heads = tuple(state._head for state in self._states if state._own and state._head is not None)
        if heads:
            source._add(lambda id: Join(id=id, parent=source._head, sample=source._sample, branches=heads), line)
        if mode == "concate_and_append":
            for state, result in zip(self._states, results, strict=True):
                if isinstance(result, BaseException):
                    raise result
                source._append(state._written(state._own), line)
        source._run.drop(heads)
        return results

    def map(self, fn: Callable[[ProgramState, int], Any], *, on_error: str = "keep") -> list[Any]:
        """Run ``fn(branch, index)`` for each branch side by side; see ``ProgramState.map``."""
        return self._each(fn, list(range(len(self._states))), on_error)

    def race(self, k: int = 1, fn: Callable[[ProgramState, int], Any] | None = None) -> list[ProgramState]:
        """Wait until ``k`` branches are done; the rest is cancelled at once and its KV may go.

        Args:
            fn: the rest of each branch, ``fn(branch, index)``, run side by side; without it a branch is done when what was appended to it is.

        Returns:
            The winners, the first to end first.

        Raises:
            GenerationFailed: fewer than ``k`` branches came to an end; names the first error.
        """
        line = author_line()
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= len(self._states):
            raise UsageError(
                f"race({shown(k)}): must be an integer from 1 to the number of branches, {len(self._states)}", line
            )
        if fn is not None and not callable(fn):
            raise UsageError(f"race(fn={shown(fn)}): must be a function of a branch and its index", line)
        if self._source._run.tracing:
            raise NeedsValue
        return LOOP.call(lambda: self._race(k, fn, line))

    async def _race(self, k: int, fn: Callable[[ProgramState, int], Any] | None, line: str) -> list[ProgramState]:
        async def finish(state: ProgramState, index: int) -> ProgramState:
            if fn is not None:
                state.ret_value = await run_body(fn, state, index)
            for node in list(state._own):
                await state._run.until(node)
                if node in state._run.graph.failed:
                    raise state._run.error_of(node)
            return state

        tasks = {asyncio.ensure_future(finish(state, i)): state for i, state in enumerate(self._states)}
        winners: list[ProgramState] = []
        first: BaseException | None = None
        waiting = set(tasks)
        try:
            while waiting and len(winners) < k:
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(ended, key=lambda t: self._states.index(tasks[t])):
                    error = Cancelled("was cancelled", line) if task.cancelled() else task.exception()
                    if error is not None:
                        tasks[task]._error = error
                        first = first or error
                    elif len(winners) < k:
                        winners.append(task.result())
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            for state in self._states:
                if state not in winners:
                    state._error = state._error or Cancelled("lost the race", line)
                    state._abandon()
        if len(winners) < k:
            raise GenerationFailed(
                f"race({k}): only {len(winners)} branches came to an end; the first error: {first}", line
            ) from first
        return winners

    def vote(self, name: str) -> Any:
        """The commonest value of a variable among the branches; the first of equals. Branches that failed have no vote."""
        values: list[Any] = []
        for state in self._states:
            try:
                values.append(state[name])
            except GenerationFailed as error:
                values.append(error)
            except UnknownVariable:
                if state._error is None:
                    raise
                values.append(state._error)
        return majority(values, name)

    def _each(self, fn: Callable[[ProgramState, Any], Any], items: Sequence[Any], on_error: str) -> list[Any]:
        if on_error not in ("keep", "raise"):
            raise UsageError(f"on_error={shown(on_error)}: must be 'keep' or 'raise'", author_line())
        if not callable(fn):
            raise UsageError(f"map(fn={shown(fn)}): must be a function of a branch and an item", author_line())
        if self._source._run.tracing:
            raise NeedsValue
        line = author_line()

        async def one(state: ProgramState, item: Any) -> Any:
            value = await run_body(fn, state, item)
            for node in list(state._own):
                await state._run.until(node)
                if node in state._run.graph.failed:
                    raise state._run.error_of(node)
            state.ret_value = value
            return state if value is None else value

        async def every() -> list[Any]:
            tasks = [asyncio.ensure_future(one(s, item)) for s, item in zip(self._states, items, strict=True)]
            try:
                return await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                for task in tasks:
                    task.cancel()

        results = LOOP.call(every)
        for i, (state, result) in enumerate(zip(self._states, results, strict=True)):
            if isinstance(result, asyncio.CancelledError):  # of the branch alone: this call was not cancelled
                result = results[i] = Cancelled("was cancelled", line)
            if isinstance(result, BaseException):
                state._error = result
                if not isinstance(result, Exception) or on_error == "raise":
                    raise result
        return results


def checked_size(what: str, count: Any, line: str) -> int:
    """A number of branches.

    Raises:
        UsageError: it is none.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_NODES:
        raise UsageError(
            f"{what}({shown(count)}): the number of branches must be an integer, at least 1 and at most {MAX_NODES:,}",
            line,
        )
    return count


@dataclass(frozen=True, slots=True)
class Rated:
    """A score, told apart from an error."""

    value: Any


def majority(values: Any, name: str) -> Any:
    line = author_line()
    if not isinstance(values, list):
        raise UsageError(f"{name!r} has one value: a vote needs several (gen(..., n=5), or fork and join)", line)
    valid = [value for value in values if not isinstance(value, BaseException) and value is not None]
    if not valid:
        raise GenerationFailed(f"{name!r}: no branch came to a value to vote with", line)
    keys = [repr(value) for value in valid]
    return valid[keys.index(Counter(keys).most_common(1)[0][0])]


def with_logprobs(expr: Any) -> Any:
    if isinstance(expr, GenExpr):
        return GenExpr(expr.name, {"logprobs": 0, **expr.options}, expr.constraint, expr.type, expr.heal)
    if isinstance(expr, ExprList):
        return ExprList(tuple(with_logprobs(item) for item in expr.items))
    return expr


def mean_logprob(branch: ProgramState) -> float:
    total, count = 0.0, 0
    for id in branch._own:
        if not isinstance(branch._run.graph.nodes[id], Gen):
            continue
        for position in branch._run.done(id).outputs[0].logprobs or ():
            total += position.chosen.logprob
            count += 1
    if not count:
        raise UsageError("best_of(score='logprob'): nothing was generated, or without log-probabilities", author_line())
    return total / count
