"""Rules that begin with themselves, directly or through others, rewritten into rules of the same language that do not.

The left-linear equations of each cycle, ``A = B t | ... | r`` for all pairs A, B of the cycle, are solved as Arden's lemma solves
them ("Delayed-logic and finite-state machines", 1961): ``A`` is an ``r`` of the cycle followed by the ``t`` of a path back to ``A``. For
a rule alone that is ``expr: expr "+" term | term`` to ``expr: term ("+" term)*``. Rules that match the empty string are first
split into that and the rest, so that nothing is hidden behind what may be empty. Grammars without left recursion are returned as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from radixrt.grammar import ir
from radixrt.grammar.errors import UnsupportedConstraint

_MAX_NODES = 500_000  # nodes of the rewritten rules
_MAX_CYCLE = 100  # rules of one cycle: the rewritten grammar has a rule for every pair of them


def without_left_recursion(rules: Mapping[str, ir.Expr], field: str) -> Mapping[str, ir.Expr]:
    """The same languages, rule by rule; new rules have names with ``@``. Every reference must be to a rule.

    Raises:
        UnsupportedConstraint: the rewritten grammar would be too large; names a cycle.
    """
    nullable = nullable_rules(rules)
    graph = {name: _corners(expr, nullable) for name, expr in rules.items()}
    cycles = _cycles(graph)
    if not cycles:
        return rules
    rewriter = _Rewriter(rules, nullable, cycles, field)
    try:
        return rewriter.rewrite()
    except RecursionError:
        raise rewriter.too_large() from None


def nullable_rules(rules: Mapping[str, ir.Expr]) -> frozenset[str]:
    """The rules that match the empty string."""
    known: set[str] = set()
    users: dict[str, list[str]] = {}
    for name, expr in rules.items():
        for used in _references(expr):
            users.setdefault(used, []).append(name)
    todo = list(rules)
    while todo:
        name = todo.pop()
        if name not in known and _nullable(rules[name], known):
            known.add(name)
            todo += users.get(name, ())
    return frozenset(known)


def _nullable(expr: ir.Expr, known: Iterable[str]) -> bool:
    match expr:
        case ir.Bytes(value):
            return not value
        case ir.Seq(items):
            return all(_nullable(item, known) for item in items)
        case ir.Alt(items):
            return any(_nullable(item, known) for item in items)
        case ir.Repeat(item, low, _):
            return low == 0 or _nullable(item, known)
        case ir.Ref(name):
            return name in known
        case ir.Dfa(_, accepting):
            return 0 in accepting
        case ir.JsonChars(low, _):
            return low == 0
        case _:
            return False


def _references(expr: ir.Expr) -> set[str]:
    found: set[str] = set()
    stack = [expr]
    while stack:
        match stack.pop():
            case ir.Ref(name):
                found.add(name)
            case ir.Seq(items) | ir.Alt(items):
                stack += items
            case ir.Repeat(item):
                stack.append(item)
    return found


def _corners(expr: ir.Expr, nullable: frozenset[str]) -> set[str]:
    """The rules that a string of ``expr`` may begin with."""
    found: set[str] = set()
    stack = [expr]
    while stack:
        match stack.pop():
            case ir.Ref(name):
                found.add(name)
            case ir.Alt(items):
                stack += items
            case ir.Repeat(item, _, high) if high != 0:
                stack.append(item)
            case ir.Seq(items):
                for item in items:
                    stack.append(item)
                    if not _nullable(item, nullable):
                        break
    return found


def _cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected components that hold a cycle (Tarjan 1972, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[list[str]] = []
    for root in graph:
        if root in index:
            continue
        work = [(root, iter(sorted(graph[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            name, rest = work[-1]
            for child in rest:
                if child not in index:
                    index[child] = low[child] = len(index)
                    stack.append(child)
                    on_stack.add(child)
                    work.append((child, iter(sorted(graph[child]))))
                    break
                if child in on_stack:
                    low[name] = min(low[name], index[child])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == index[name]:
                    cut = stack.index(name)
                    component = stack[cut:]
                    del stack[cut:]
                    on_stack.difference_update(component)
                    if len(component) > 1 or name in graph[name]:
                        found.append(component)
    return found


class _Rewriter:
    """A rule X that matches the empty string becomes ``X = ("" | X@some)``, where X@some is the rest of its language."""

    def __init__(
        self, rules: Mapping[str, ir.Expr], nullable: frozenset[str], cycles: list[list[str]], field: str
    ) -> None:
        self.rules, self.nullable, self.cycles, self.field = rules, nullable, cycles, field
        self.done: dict[str, ir.Expr] = {}  # the rewritten rules
        self.heads = {self.some_name(name): name for cycle in cycles for name in cycle}
        self.missing: list[str] = []  # rules whose X@some is referred to and not yet made
        self.nodes = 0

    def rewrite(self) -> Mapping[str, ir.Expr]:
        cyclic = {name for cycle in self.cycles for name in cycle}
        self.done = {name: expr for name, expr in self.rules.items() if name not in cyclic}
        for cycle in self.cycles:
            self.solve(cycle)
        while self.missing:
            name = self.missing.pop()
            if self.some_name(name) not in self.done:
                self.done[self.some_name(name)] = self.some(self.rules[name])
        return self.done

    def some_name(self, name: str) -> str:
        """The rule of the non-empty strings of ``name``."""
        return f"{name}@some" if name in self.nullable else name

    def solve(self, cycle: list[str]) -> None:
        if len(cycle) > _MAX_CYCLE:
            raise self.too_large()
        members = sorted(cycle)
        for name in members:
            if name in self.nullable:
                self.done[name] = ir.Alt((ir.EMPTY, ir.Ref(self.some_name(name))))
        own = frozenset(map(self.some_name, members))
        tails: dict[str, dict[str, ir.Expr]] = {}  # A -> B -> t, of A = B t
        bases: dict[str, ir.Expr] = {}  # A -> r, of A = r
        for name in members:
            tails[self.some_name(name)], bases[self.some_name(name)] = self.split(self.some(self.rules[name]), own)
        names = sorted(own)
        if len(names) == 1:
            (name,) = names
            tail = tails[name].get(name, ir.NOTHING)
            self.done[name] = _seq(bases[name], ir.Repeat(self.some(tail), 0, None))
            return
        # A = B t with t = "": A has the language of B as well; ``same[B]``: all A that B is, through any number of such steps.
        same = {name: [name] for name in names}
        for name in names:
            for member in same[name]:
                for other in names:
                    if other not in same[name] and self.null(tails[other].get(member, ir.NOTHING)):
                        same[name].append(other)
        for name in names:
            self.done[f"{name}@base"] = bases[name]
            # What may follow a string of ``name``, and the rule whose string that makes it.
            steps = [
                (self.some(tails[other][member]), other)
                for member in same[name]
                for other in names
                if member in tails[other]
            ]
            for goal in names:
                self.count(len(steps))
                then = [_seq(step, ir.Ref(f"{other}@to@{goal}")) for step, other in steps]
                self.done[f"{name}@to@{goal}"] = _alt([ir.EMPTY, *then] if goal in same[name] else then)
        for goal in names:
            self.done[goal] = _alt(
                [
                    _seq(ir.Ref(f"{name}@base"), ir.Ref(f"{name}@to@{goal}"))
                    for name in names
                    if bases[name] != ir.NOTHING
                ]
            )

    def count(self, nodes: int) -> None:
        """Take ``nodes`` more from what the rewritten rules may hold."""
        self.nodes += nodes
        if self.nodes > _MAX_NODES:
            raise self.too_large()

    def too_large(self) -> UnsupportedConstraint:
        cycle = max(self.cycles, key=len)
        names = ", ".join(cycle[:8]) + (", ..." if len(cycle) > 8 else "")
        return UnsupportedConstraint(self.field, f"left recursion of {names} grows too large when it is rewritten")

    def null(self, expr: ir.Expr) -> bool:
        """Whether ``expr``, which may hold X@some, matches the empty string."""
        return _nullable(expr, self.nullable)

    def some(self, expr: ir.Expr) -> ir.Expr:
        """The non-empty strings of ``expr``."""
        if not self.null(expr):
            return expr
        self.count(len(expr.items) ** 2 if isinstance(expr, ir.Seq) else 1)
        match expr:
            case ir.Ref(name):
                self.missing.append(name)
                return ir.Ref(self.some_name(name))
            case ir.Alt(items):
                return _alt([self.some(item) for item in items])
            case ir.Seq(items):  # all of them may be empty: the first that is not, then the rest
                return _alt([_seq(self.some(item), *items[i + 1 :]) for i, item in enumerate(items)])
            case ir.Repeat(item, _, high):
                inner = self.some(item)
                return ir.NOTHING if inner == ir.NOTHING or high == 0 else ir.Repeat(inner, 1, high)
            case ir.Dfa(edges, accepting):  # a copy of the start, which is not final, as the new start
                shifted = tuple(tuple((low, high, to + 1) for low, high, to in out) for out in edges)
                return ir.Dfa((shifted[0], *shifted), frozenset(state + 1 for state in accepting))
            case ir.JsonChars(_, high):
                return ir.NOTHING if high == 0 else ir.JsonChars(1, high)
            case _:
                return ir.NOTHING  # Bytes(b"")

    def split(self, expr: ir.Expr, own: frozenset[str]) -> tuple[dict[str, ir.Expr], ir.Expr]:
        """``expr`` as ``A t | B u | ... | r`` for the rules of ``own``, where ``r`` does not begin with any of them."""
        self.count(len(expr.items) if isinstance(expr, ir.Seq) else 1)
        match expr:
            case ir.Ref(name):
                if name in own:
                    return {name: ir.EMPTY}, ir.NOTHING
                if self.some_name(name) in own:  # a rule that may be empty
                    return {self.some_name(name): ir.EMPTY}, ir.EMPTY
            case ir.Alt(items):
                tails: dict[str, list[ir.Expr]] = {}
                rest: list[ir.Expr] = []
                for item in items:
                    found, other = self.split(item, own)
                    for name, tail in found.items():
                        tails.setdefault(name, []).append(tail)
                    rest.append(other)
                return {name: _alt(each) for name, each in tails.items()}, _alt(rest)
            case ir.Seq(items) if items:
                after = ir.Seq(items[1:])
                found, other = self.split(items[0], own)
                gathered = {name: [_seq(tail, after)] for name, tail in found.items()}
                if not self.null(other):
                    return {name: _alt(each) for name, each in gathered.items()}, _seq(other, after)
                then, last = self.split(after, own)
                if not found and not then:
                    return {}, expr
                for name, tail in then.items():
                    gathered.setdefault(name, []).append(tail)
                return (
                    {name: _alt(each) for name, each in gathered.items()},
                    _alt([_seq(self.some(other), after), last]),
                )
            case ir.Repeat(item, low, high) if high != 0:
                empty = self.null(expr)
                inner = self.some(item)
                found, other = self.split(inner, own)
                if not found:
                    return {}, expr
                again = ir.Repeat(inner, 0 if empty else low - 1, None if high is None else high - 1)
                rest = [_seq(other, again), *([ir.EMPTY] if empty else [])]
                return {name: _seq(tail, again) for name, tail in found.items()}, _alt(rest)
        return {}, expr


def _seq(*parts: ir.Expr) -> ir.Expr:
    items: list[ir.Expr] = []
    for part in parts:
        if part == ir.NOTHING:
            return ir.NOTHING
        items += part.items if isinstance(part, ir.Seq) else [part]
    return items[0] if len(items) == 1 else ir.Seq(tuple(items))


def _alt(parts: list[ir.Expr]) -> ir.Expr:
    items: list[ir.Expr] = []
    for part in parts:
        items += part.items if isinstance(part, ir.Alt) else [part]
    items = list(dict.fromkeys(items))
    return items[0] if len(items) == 1 else ir.Alt(tuple(items))
