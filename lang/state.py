"""ProgramState: what the body of a program appends to and reads from.

Invariants: appending never waits (but for tools, which the body runs), reading waits for what is read; a branch sees what its parent had when it was forked and nothing of
its siblings; a failure stays with the branch where it happened until it is read.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lang.errors import GenerationFailed, ProgramError, UnknownVariable, UsageError, author_line
from lang.expr import Expr, ExprList, GenExpr, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, SelectExpr, check_name
from lang.graph import ProgramGraph
from lang.group import Rated, StateGroup, checked_size, majority, mean_logprob, with_logprobs
from lang.loop import LOOP, called, wait
from lang.meta import described
from lang.params import check_backend, made_params
from lang.placeholders import NeedsValue, filled, is_placeholder, parts_of
from lang.run import Run
from lang.streams import check_reader, pieces, read_elsewhere, read_here
from lang.tools import ToolSteps, answer
from lang.variable import Sample, Variable, sample_of
from radixrt import InvalidRequest
from radixrt.engine.nodes import Fork, Gen, Read, Ref, Role, Select, Text
from radixrt.errors import nearest, shown


class ProgramState(ToolSteps):
    """A state of a running program. Made by ``run`` and ``fork``.

    ``s += text | gen(...) | select(...) | user(...) ...`` appends; ``s[name]`` reads.
    """

    def __init__(self, run: Run, place: str = "0") -> None:
        self._run = run
        self._place = place  # names this state among those of the program, the same way in every run
        self._head: int | None = None
        self._sample = 0
        self._own: list[int] = []  # nodes this state appended itself
        self._made = 0  # generations and forks of this state so far
        self._role: str | None = None
        self._vars: dict[str, Variable] = {}
        self._lines: dict[str, str] = {}  # where each variable was set
        self._scopes: list[tuple[str, int]] = []
        self._rounds: dict[str, list[int]] = {}  # generations with tools that have begun
        self.ret_value: Any = None
        self._error: BaseException | None = None
        self._task: asyncio.Future[Any] | None = None  # of a run that streams

    def __repr__(self) -> str:
        return f"<ProgramState of {self._run.info.name!r}, set: {', '.join(self._vars) or 'nothing'}>"

    def __getattr__(self, name: str) -> Any:
        known = self.__dict__.get("_vars", {})
        hint = f": variables are read as s[{name!r}]" if name in known else ""
        raise AttributeError(f"a state has no attribute {name!r}{hint}")

    def __setitem__(self, name: str, value: Any) -> None:
        raise UsageError(
            f"s[{shown(name)}] = ...: variables are set by gen and select; your own by s.set_var", author_line()
        )

    # ---- appending

    def __iadd__(self, other: Any) -> ProgramState:
        self._append(other, author_line())
        return self

    def append(self, other: Any) -> ProgramState:
        """The same as ``+=``."""
        self._append(other, author_line())
        return self

    def _append(self, item: Any, line: str) -> None:
        if isinstance(item, str) or is_placeholder(item):
            parts = parts_of(item)
            if parts:
                self._add(lambda id: Text(id=id, parent=self._head, sample=self._sample, parts=parts), line)
        elif isinstance(item, GenExpr):
            self._append_gen(item, line)
        elif isinstance(item, SelectExpr):
            self._append_select(item, line)
        elif isinstance(item, ExprList):
            for one in item.items:
                self._append(one, line)
        elif isinstance(item, RoleBegin):
            if self._role is not None:
                raise UsageError(f"{item.role} begins inside of {self._role}, which has not ended", line)
            self._role = item.role
            self._add(lambda id: Role(id=id, parent=self._head, sample=self._sample, role=item.role, begin=True), line)
        elif isinstance(item, RoleEnd):
            if self._role != item.role:
                raise UsageError(f"{item.role} ends here but {self._role or 'no message'} was begun", line)
            self._role = None
            self._add(lambda id: Role(id=id, parent=self._head, sample=self._sample, role=item.role, begin=False), line)
        elif isinstance(item, ScopeBegin):
            self._scopes.append((item.name, len(self._own)))
        elif isinstance(item, ScopeEnd):
            self._end_scope(item.name, line)
        elif item is None:
            raise UsageError(
                "None was appended: a text or gen(...) is expected (does a function return nothing?)", line
            )
        elif isinstance(item, Expr):
            raise UsageError(f"{type(item).__name__} cannot be appended", line)
        else:
            raise UsageError(
                f"{shown(item)} of type {type(item).__name__} was appended: make it text with str(...)", line
            )

    def _append_gen(self, expr: GenExpr, line: str) -> None:
        self._check_new(expr.name, line)
        if expr.tools:
            answer(self, expr, line)
            return
        node, samples = self._generate(expr, line, expr.read)
        if expr.name:
            plain = None if expr.read is None else str
            self._set(expr.name, Variable(node, samples, expr.type.parse if expr.type is not None else plain), line)

    def _generate(self, expr: GenExpr, line: str, read: Read | None) -> tuple[int, int]:
        """Append the node of a generation; returns its id and how many samples it has."""
        run = self._run
        values: dict[str, Any] = {**run.defaults, **expr.options}
        if expr.constraint is not None:
            values["constraint"] = expr.constraint
        self._made += 1
        seed = values.pop("seed", None)
        if seed is None:
            seed = run.seed_of(f"{self._place}/{self._made}")
        try:
            params = made_params(values).with_seed(seed)
        except InvalidRequest as error:
            raise UsageError(f"gen({shown(expr.name) if expr.name else ''}): {error}", line) from error
        check_backend(run.backend, params, run.param_names, read, self._role, line)
        heal = run.heal if expr.heal is None else expr.heal
        node = self._add(
            lambda id: Gen(
                id=id, parent=self._head, sample=self._sample, params=params, name=expr.name or "", heal=heal, read=read
            ),
            line,
            expr.name,
        )
        return node, params.n

    def _append_select(self, expr: SelectExpr, line: str) -> None:
        run = self._run
        self._check_new(expr.name, line)
        able = run.backend.capabilities
        if able.select_methods is not None and expr.method.name not in able.select_methods:
            known = ", ".join(sorted(able.select_methods)) or "none"
            raise UsageError(f"select: {run.backend.name} cannot score by {expr.method.name} (it can: {known})", line)
        if expr.temperature and not able.select_sampling:
            raise UsageError(f"select: {run.backend.name} cannot sample among choices: use temperature=0", line)
        self._made += 1
        seed = expr.seed if expr.seed is not None else run.seed_of(f"{self._place}/{self._made}")
        node = self._add(
            lambda id: Select(
                id=id,
                parent=self._head,
                sample=self._sample,
                choices=tuple(parts_of(choice) for choice in expr.choices),
                method=expr.method.name,
                temperature=expr.temperature,
                seed=seed,
                name=expr.name or "",
                heal=run.heal,
            ),
            line,
            expr.name,
        )
        if expr.name:
            self._set(expr.name, Variable(node), line)

    def _add(self, make: Callable[[int], Any], line: str, name: str | None = None) -> int:
        id = self._run.add(make, line, name)
        self._head, self._sample = id, 0
        self._own.append(id)
        return id

    def _check_new(self, name: str | None, line: str) -> None:
        if name is not None and name in self._vars:
            raise UsageError(
                f"{name!r} is set already, at {self._lines.get(name) or 'its fork'}: choose another name", line
            )

    # ---- variables

    def _set(self, name: str, variable: Variable, line: str) -> None:
        self._vars[name] = variable
        self._lines[name] = line

    def _variable(self, name: str) -> Variable:
        found = self._vars.get(name) if isinstance(name, str) else None
        if found is None:
            listed = ", ".join(map(repr, self._vars)) or "none"
            hint = nearest(name, self._vars).partition(";")[2] if isinstance(name, str) and self._vars else ""
            hint = f";{hint}" if "did you mean" in hint else ""
            raise UnknownVariable(f"{shown(name)} was never set (set: {listed}){hint}", author_line())
        return found

    def __getitem__(self, name: str) -> Any:
        """The value of a variable; waits until it is there.

        Raises:
            UnknownVariable: it was never set; names those that are.
            GenerationFailed, Cancelled: there is no value; with the line of its ``gen``.
        """
        return self._run.reads(self._value(name))

    def _value(self, name: str) -> Any:
        variable = self._variable(name)
        if variable.span is not None:
            return self._written(variable.span)
        if variable.node is None:
            return variable.value if variable.make is None else variable.make()
        placeholder = self._run.placeholder(variable.node)
        if placeholder is not None:
            if variable.samples > 1 or variable.parse is not None:
                raise NeedsValue
            return placeholder
        done = self._run.done(variable.node)
        values = [self._parsed(variable, output.content) for output in done.outputs]
        return values if variable.samples > 1 else values[0]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._vars

    def get_var(self, name: str) -> Any:
        """The same as ``s[name]``."""
        return self[name]

    def set_var(self, name: str, value: Any) -> None:
        """Set a variable to a value of the author's."""
        line = author_line()
        check_name(name, needed=True)
        self._check_new(name, line)
        self._set(name, Variable(value=value), line)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables that are set, by name; waits for them."""
        return {name: self[name] for name in self._vars}

    async def get(self, name: str) -> Any:
        """``s[name]`` for ``async`` bodies."""
        variable = self._variable(name)
        if variable.node is not None and self._run.placeholder(variable.node) is None:
            await LOOP.acall(lambda: self._run.until(variable.node))  # type: ignore[arg-type]
        return self[name]

    def meta(self, name: str) -> dict[str, Any]:
        """What is known about a generation: ``text``, ``token_ids``, ``finish_reason``, ``stop_reason``, ``logprobs``, token counts and seconds; all samples
        in ``samples``; for ``select`` also ``choices``, ``scores``, ``logprobs`` (total, by choice), ``probabilities``, ``confidence``. Waits."""
        variable = self._variable(name)
        if variable.node is None:
            raise UsageError(f"{name!r} was not generated: it has no metadata", author_line())
        return described(self._run.graph, self._run.done(variable.node), sample_of(variable))

    get_meta_info = meta

    def _parsed(self, variable: Variable, text: str) -> Any:
        if variable.parse is None:
            return text
        try:
            return variable.parse(text)
        except ValueError as error:
            assert variable.node is not None
            name = self._run.graph.names.get(variable.node, "")
            raise GenerationFailed(
                f"{name!r}: {error}", self._run.graph.lines.get(variable.node, ""), "invalid"
            ) from error

    # ---- text and messages

    def text(self, name: str | None = None) -> str:
        """The whole text of the state, markup of roles included; or the text of one variable. Waits for it."""
        if name is not None:
            variable = self._variable(name)
            if variable.node is not None:
                self._await((variable.node,))
                return self._run.graph.text_of(variable.node, sample_of(variable))
            return str(self._value(name))
        return self._written(self._run.graph.path(self._head))

    def messages(self) -> list[dict[str, str]]:
        """The chat so far: ``{"role", "content"}`` of each message. Text outside of messages is not in it. Waits."""
        graph = self._run.graph
        found: list[dict[str, str]] = []
        inside: list[int] | None = None
        path = graph.path(self._head)
        self._await(path)
        samples = self._samples(path)
        for id in path:
            node = graph.nodes[id]
            if isinstance(node, Role):
                if node.begin:
                    inside = []
                    found += [{"role": "tool", "content": one.content} for one in node.results]
                    found.append({"role": node.role, "content": ""})
                else:
                    inside = None
            elif inside is not None:
                found[-1]["content"] += graph.text_of(id, samples[id])
        return found

    def sync(self) -> ProgramState:
        """Wait for everything this state appended; raises what went wrong."""
        self._await(self._own)
        return self

    def error(self) -> BaseException | None:
        """What ended the program or this branch without a result; waits for it. ``None``: nothing."""
        if self._error is not None:
            return self._error
        try:
            self._await(self._run.graph.path(self._head))
        except ProgramError as error:
            return error
        return None

    def _written(self, path: Iterable[int]) -> str:
        path = list(path)
        self._await(path)
        samples = self._samples(path)
        return "".join(self._run.graph.text_of(id, samples[id]) for id in path)

    def _samples(self, path: Sequence[int]) -> dict[int, int]:
        """Which sample of each node of a path this state continues."""
        nodes = self._run.graph.nodes
        last = nodes[path[-1]] if path else None
        if isinstance(last, Gen) and last.params.n > 1 and last.id != self._head:  # what went on from it says which
            following = self._run.graph.path(self._head)
        else:
            following = list(path)
        taken: dict[int | None, int] = {self._head: self._sample}
        for id in following[1:]:
            parent = nodes[id].parent
            if parent is not None:
                taken[parent] = nodes[id].sample
        return {id: taken.get(id, 0) for id in path}

    def _await(self, nodes: Iterable[int]) -> None:
        run = self._run
        for id in nodes:
            if run.placeholder(id) is not None:
                raise NeedsValue
            if not run.known(id):
                run.done(id)
            elif id in run.graph.failed:
                raise run.error_of(id)

    # ---- streams

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """The text piece by piece as it comes, of the whole state or of one variable (a program started with ``stream=True``)."""
        return read_here(lambda: pieces(self, name))

    def text_async_iter(self, name: str | None = None) -> AsyncIterator[str]:
        """``text_iter`` for any event loop."""
        if name is None:
            check_reader(self)
        return read_elsewhere(lambda: pieces(self, name))

    # ---- roles and scopes

    @contextmanager
    def _role_block(self, role: str) -> Iterator[ProgramState]:
        line = author_line()
        self._append(RoleBegin(role), line)
        try:
            yield self
        except Exception:
            if self._role == role and not self._run.closed:  # whoever catches it finds the message ended
                self._append(RoleEnd(role), line)
            raise
        self._append(RoleEnd(role), line)

    def system(self, expr: Any = None) -> Any:
        """``with s.system():``, or ``s.system(expr)``."""
        return self._message("system", expr)

    def user(self, expr: Any = None) -> Any:
        """``with s.user():``, or ``s.user(expr)``."""
        return self._message("user", expr)

    def assistant(self, expr: Any = None) -> Any:
        """``with s.assistant():``, or ``s.assistant(expr)``."""
        return self._message("assistant", expr)

    def _message(self, role: str, expr: Any) -> Any:
        if expr is None:
            return self._role_block(role)
        self._append(ExprList((RoleBegin(role), expr, RoleEnd(role))), author_line())
        return None

    @contextmanager
    def var_scope(self, name: str) -> Iterator[ProgramState]:
        """What is appended inside becomes the variable ``name``, as text."""
        line = author_line()
        check_name(name, needed=True)
        self._check_new(name, line)
        depth = len(self._scopes)
        self._append(ScopeBegin(name), line)
        try:
            yield self
        except Exception:
            del self._scopes[depth:]
            raise
        self._append(ScopeEnd(name), line)

    def _end_scope(self, name: str, line: str) -> None:
        if not self._scopes or self._scopes[-1][0] != name:
            raise UsageError(f"the scope {name!r} ends here but has not begun", line)
        _, begin = self._scopes.pop()
        self._set(name, Variable(span=tuple(self._own[begin:])), line)

    # ---- branches

    def fork(self, size: int = 1) -> StateGroup:
        """Branches that continue this state, each on its own. Costs nothing: they share its tokens and KV."""
        line = author_line()
        return self._fork(checked_size("fork", size, line), line)

    def _fork(self, size: int, line: str, at: Sequence[tuple[int, int]] | None = None) -> StateGroup:
        self._made += 1
        if at is None:
            if self._head is not None:
                self._add(lambda id: Fork(id=id, parent=self._head, sample=self._sample, count=size), line)
            at = [(self._head, self._sample)] * size  # type: ignore[list-item]
        branches = []
        for i, (head, sample) in enumerate(at):
            branch = ProgramState(self._run, f"{self._place}/{self._made}.{i}")
            branch._head, branch._sample, branch._role = head, sample, self._role
            branch._vars, branch._lines = dict(self._vars), dict(self._lines)
            branches.append(branch)
        return StateGroup(branches, self)

    def copy(self) -> ProgramState:
        """One branch."""
        return self._fork(1, author_line())[0]

    def fork_samples(self, name: str) -> StateGroup:
        """A branch for each sample of ``gen(name, n=...)``, which continues it; in the branch ``s[name]`` is that sample. Where
        the message around it has ended, it has in the branches."""
        line = author_line()
        variable = self._variable(name)
        if variable.node is None:
            raise UsageError(f"{name!r} was not generated: it has no samples", line)
        first = sample_of(variable)
        samples = range(first, first + variable.samples)
        group = self._fork(variable.samples, line, [(variable.node, i) for i in samples])
        graph = self._run.graph
        role = graph.role_around(variable.node)
        since = itertools.takewhile(lambda id: id != variable.node, reversed(graph.path(self._head)))
        ended = any(isinstance(graph.nodes[id], Role) for id in since)
        for branch, sample in zip(group, samples, strict=True):
            if not isinstance(variable.parse, Sample):
                branch._set(name, Variable(variable.node, 1, Sample(sample, self, variable)), line)
            branch._role = role
            if role is not None and ended:
                branch._append(RoleEnd(role), line)
        return group

    def __enter__(self) -> ProgramState:
        return self

    def __exit__(self, *_: object) -> None:
        """The end of ``with s.copy() as branch:``."""

    def map(self, items: Iterable[Any], fn: Callable[[ProgramState, Any], Any], *, on_error: str = "keep") -> list[Any]:
        """Run ``fn(branch, item)`` for each item side by side, each in a branch of its own; ``fn`` may be ``async``.

        Args:
            on_error: ``"keep"``: the error of a branch stands in its place in the list; ``"raise"``: the first one is raised, when all are over.

        Returns:
            What each call returned, in order; where that is ``None``, its branch.
        """
        line = author_line()
        if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
            raise UsageError(f"map({shown(items)}, ...): must be a list of items", line)
        listed = list(items)
        if not listed:
            return []
        group = self._fork(len(listed), line)
        return group._each(fn, listed, on_error)

    def best_of(self, n: int, expr: Any, *, score: str | Callable[[ProgramState], Any] = "logprob") -> ProgramState:
        """Append ``expr`` in ``n`` branches and go on with the best; what it set is set here then.

        Args:
            score: a function of a branch (the highest wins), or ``"logprob"``: mean log-probability of what ``expr`` generated.

        Returns:
            This state. ``s.scores`` holds the scores by branch (``None`` where a branch failed).

        Raises:
            UsageError: nothing was generated that could be scored. The error of the first branch, where all failed.
        """
        line = author_line()
        by_logprob = isinstance(score, str) and score == "logprob"
        if not by_logprob and not callable(score):
            raise UsageError(f"best_of(score={shown(score)}): must be a function of a branch, or 'logprob'", line)
        group = self._fork(checked_size("best_of", n, line), line)
        for branch in group:
            branch._append(with_logprobs(expr) if by_logprob else expr, line)
        rate: Any = mean_logprob if by_logprob else score
        rated = group._each(lambda branch, _: Rated(rate(branch)), [None] * n, "keep")
        scores = [one.value if isinstance(one, Rated) else None for one in rated]
        order = [i for i, value in enumerate(scores) if value is not None]
        if not order:
            errors = (one for one in rated if isinstance(one, BaseException))
            raise next(errors, UsageError("best_of: score gave no branch a value", line))
        odd = next((scores[i] for i in order if scores[i] != scores[i]), None)
        if odd is not None:
            raise UsageError(f"best_of: score gave {shown(odd)}, which is neither more nor less than others", line)
        try:
            best = max(order, key=lambda i: scores[i])  # type: ignore[arg-type, return-value]
        except TypeError as error:
            raise UsageError(f"best_of: score gave values that have no order ({error})", line) from error
        for i, branch in enumerate(group):
            if i != best:
                branch._abandon()
        self._adopt(group[best])
        self.scores = scores
        return self

    def vote(self, name: str) -> Any:
        """The commonest of several values of a variable (of ``gen(n=...)`` or gathered by ``join``); the first of equals. Errors have no vote."""
        return majority(self[name], name)

    def _take_over(self, traced: ProgramState, arguments: Mapping[str, Any]) -> None:
        """Become what a traced body left, for a run of its whole graph."""
        self._head, self._sample, self._role, self._own = traced._head, traced._sample, traced._role, list(traced._own)
        self._lines = dict(traced._lines)

        def read(ref: Ref) -> Any:
            try:
                return self._run.done(ref.node).outputs[ref.sample].text
            except ProgramError as error:  # as join leaves it
                return error

        for name, variable in traced._vars.items():
            if variable.node is None and variable.span is None:
                variable = Variable(make=partial(filled, variable.value, read, arguments))
            self._vars[name] = variable

    def _adopt(self, branch: ProgramState) -> None:
        self._head, self._sample, self._role = branch._head, branch._sample, branch._role
        self._own += branch._own
        for name, variable in branch._vars.items():
            if name not in self._vars:
                self._set(name, variable, branch._lines.get(name, ""))

    def _abandon(self) -> None:
        """Cancel what this branch still runs, and let its KV go."""
        if self._own:
            self._run.cancel(self._own[:1])

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function that blocks (a tool, a request over the network) in a worker thread, so that other programs go on meanwhile."""
        if self._run.tracing:
            raise NeedsValue
        if not LOOP.inside:
            return fn(*args, **kwargs)
        return wait(asyncio.ensure_future(asyncio.to_thread(called, fn, args, kwargs)))

    # ---- the run

    @property
    def graph(self) -> ProgramGraph:
        """The request graph so far: ``to_html``, ``to_dot``, ``save``, ``totals``, ``critical_path``."""
        return self._run.graph

    @property
    def seed(self) -> int:
        """What the run's samples are drawn from: the same program with the same seed makes the same samples."""
        return self._run.seed

    def cancel(self) -> None:
        """End what this state still runs; for the state that ``run(stream=True)`` returned, the whole program."""
        if self._task is not None:
            LOOP.get().call_soon_threadsafe(self._task.cancel)
        else:
            self._abandon()
