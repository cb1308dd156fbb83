"""Removes from a grammar what can never be completed: a mask must not lead into an alternative that has no end."""

from __future__ import annotations

from radixrt.grammar import ir


def pruned(grammar: ir.Grammar, clean: bool = False) -> ir.Grammar | None:
    """The same language without dead alternatives and unused rules; ``None`` when the language is empty.

    ``clean``: no expression is dead but through a rule that is.
    """
    alive = _alive(grammar)
    if grammar.start not in alive:
        return None
    if clean and len(alive) == len(grammar.rules):
        return grammar
    cut = _Cut(alive)
    rules: dict[str, ir.Expr] = {}
    todo = [grammar.start]
    while todo:
        name = todo.pop()
        if name in rules:
            continue
        rule = cut.expression(grammar.rules[name])
        assert rule is not None
        rules[name] = rule
        todo += cut.used
        cut.used.clear()
    return ir.Grammar(rules, grammar.start)


def dead(expr: ir.Expr) -> bool:
    """Whether an expression describes nothing although every rule describes something."""
    if isinstance(expr, ir.Seq):
        return any(dead(item) for item in expr.items)
    if isinstance(expr, ir.Alt):
        return all(dead(item) for item in expr.items)
    if isinstance(expr, ir.Repeat):
        return (expr.high is not None and expr.low > expr.high) or (expr.low > 0 and dead(expr.item))
    return not isinstance(expr, ir.Ref) and not _leaf_alive(expr)


def _leaf_alive(expr: ir.Expr) -> bool:
    if isinstance(expr, ir.ByteSet):
        return expr.bits != 0
    if isinstance(expr, ir.Dfa):
        return bool(expr.accepting)
    if isinstance(expr, ir.JsonChars):
        return expr.high is None or expr.low <= expr.high
    return True


def _alive(grammar: ir.Grammar) -> set[str]:
    """The rules that describe at least one string, by iteration to the fixed point over the rules that wait for others."""
    alive: set[str] = set()
    waiting: dict[str, list[str]] = {}
    todo = list(grammar.rules)
    while todo:
        name = todo.pop()
        if name in alive:
            continue
        missing: list[str] = []
        if _lives(grammar.rules[name], alive, missing):
            alive.add(name)
            todo += waiting.pop(name, [])
        else:
            for other in missing:
                waiting.setdefault(other, []).append(name)
    return alive


def _lives(expr: ir.Expr, alive: set[str], missing: list[str]) -> bool:
    if isinstance(expr, ir.Ref):
        if expr.name in alive:
            return True
        missing.append(expr.name)
        return False
    if isinstance(expr, ir.Seq):
        return all(_lives(item, alive, missing) for item in expr.items)
    if isinstance(expr, ir.Alt):
        return any(_lives(item, alive, missing) for item in expr.items)
    if isinstance(expr, ir.Repeat):
        if expr.high is not None and expr.low > expr.high:
            return False
        return expr.low == 0 or _lives(expr.item, alive, missing)
    return _leaf_alive(expr)


class _Cut:
    """Expressions without their dead alternatives. What stays whole stays the same object, so that sharing is kept."""

    def __init__(self, alive: set[str]) -> None:
        self.alive = alive
        self.used: list[str] = []
        self._done: dict[int, ir.Expr | None] = {}  # by identity; the grammar keeps the expressions alive

    def expression(self, expr: ir.Expr) -> ir.Expr | None:
        """``None`` when all of it is dead."""
        kind = type(expr)
        if kind is ir.Bytes:
            return expr
        if isinstance(expr, ir.Ref):
            if expr.name not in self.alive:
                return None
            self.used.append(expr.name)
            return expr
        if kind is not ir.Seq and kind is not ir.Alt and kind is not ir.Repeat:
            return expr if _leaf_alive(expr) else None
        key = id(expr)
        if key in self._done:
            return self._done[key]
        made = self._done[key] = self._inner(expr)
        return made

    def _inner(self, expr: ir.Expr) -> ir.Expr | None:
        if isinstance(expr, ir.Repeat):
            if expr.high is not None and expr.low > expr.high:
                return None
            body = self.expression(expr.item)
            if body is None:
                return ir.EMPTY if expr.low == 0 else None
            return expr if body is expr.item else ir.Repeat(body, expr.low, expr.high)
        assert isinstance(expr, ir.Seq | ir.Alt)
        items = [self.expression(item) for item in expr.items]
        if isinstance(expr, ir.Seq):
            kept = tuple([item for item in items if item is not None])
            if len(kept) < len(items):
                return None
        else:
            kept = tuple([item for item in items if item is not None])
            if not kept:
                return None
            if len(kept) == 1:
                return kept[0]
        if len(kept) == len(items) and all(a is b for a, b in zip(kept, expr.items)):
            return expr
        return ir.Seq(kept) if isinstance(expr, ir.Seq) else ir.Alt(kept)
