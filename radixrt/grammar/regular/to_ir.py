"""Patterns to grammar expressions: through an automaton while it stays small, else piece by piece with its counters kept.

``json_regex_to_ir`` adds JSON Schema's ``minLength`` and ``maxLength``, by the cheapest way that is exact: they follow from the
pattern anyway; they only move the bounds of the one part of the pattern that varies; or the automaton's product with a counter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from radixrt.grammar import ir
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.regular.build import from_node, searching, simplified
from radixrt.grammar.regular.chardfa import CharDfa, check_bounds
from radixrt.grammar.regular.charset import ALL
from radixrt.grammar.regular.encode import Escapes, to_bytes, to_json
from radixrt.grammar.regular.limits import DEFAULT_LIMITS, RegularLimits
from radixrt.grammar.regular.nodes import Cat, Chars, Node, Or, Rep, has_look, width
from radixrt.grammar.regular.parse import Syntax, parse, shown

SMALL = 256  # states up to which an automaton beats the pattern's own counters
PIECE = 64  # positions of a piece between counters


def regex_to_ir(
    pattern: str, *, syntax: Syntax = "python", anchored: bool = True, limits: RegularLimits = DEFAULT_LIMITS
) -> ir.Expr:
    """The UTF-8 texts a pattern matches as a whole; not ``anchored``: in which it is found.

    Raises:
        InvalidRequest: a syntax error, with its position.
        UnsupportedConstraint: a feature or size that cannot be exact.
    """
    node = _prepared(pattern, syntax, anchored, limits)
    dfa = _automaton(node, pattern, limits)
    return to_bytes(dfa) if dfa is not None else _translate(node, to_bytes, None, limits)


def json_regex_to_ir(
    pattern: str,
    low: int = 0,
    high: int | None = None,
    *,
    syntax: Syntax = "ecma",
    anchored: bool = False,
    escapes: Escapes = "any",
    limits: RegularLimits = DEFAULT_LIMITS,
) -> ir.Expr:
    """The insides of JSON strings of ``low`` to ``high`` characters in which the pattern is found.

    Raises:
        InvalidRequest: a syntax error, with its position; bounds out of order.
        UnsupportedConstraint: a feature of the pattern, or pattern and length together, cannot be exact within the limits.
    """
    check_bounds("length", low, high)
    name = f"{shown(pattern)}, with a length of {low} to {'any number of' if high is None else high} characters"
    node = _prepared(pattern, syntax, anchored, limits)
    least, most = width(node)
    dfa = _automaton(node, pattern, limits)
    if dfa is not None:
        if dfa.is_empty:
            return ir.NOTHING
        least, most = dfa.min_length or 0, dfa.max_length
    if low > least or (high is not None and (most is None or high < most)):
        bounded = _bound(node, low, high)
        if bounded is None:
            return to_json(_counted(node, dfa, name, low, high, limits), escapes)
        node = bounded
        dfa = from_node(node, limits=replace(limits, states=limits.counted), name=name) if has_look(node) else None
    if dfa is not None:
        return to_json(dfa, escapes)

    return _translate(node, lambda dfa: to_json(dfa, escapes), ir.JsonChars, limits)


def _prepared(pattern: str, syntax: Syntax, anchored: bool, limits: RegularLimits) -> Node:
    node = parse(pattern, syntax, limits)
    return simplified(node) if anchored else searching(node)


def _automaton(node: Node, pattern: str, limits: RegularLimits) -> CharDfa | None:
    """The pattern's automaton, if it is small or there is no other way; ``None``: translate piece by piece."""
    if has_look(node):
        return from_node(node, limits=limits, name=shown(pattern))
    small = replace(
        limits,
        states=min(limits.states, SMALL),
        work=min(limits.work, 40 * SMALL),
        positions=min(limits.positions, 2 * SMALL),
    )
    try:
        return from_node(node, limits=small, name=shown(pattern))
    except UnsupportedConstraint:
        return None


def _counted(node: Node, dfa: CharDfa | None, name: str, low: int, high: int | None, limits: RegularLimits) -> CharDfa:
    """The product with a length counter, if it fits."""
    if dfa is None:  # no counter of the pattern need go beyond the greatest length
        clipped = node if high is None else _clipped(node, high)
        dfa = from_node(clipped, limits=replace(limits, states=min(limits.states, limits.counted)), name=name)
    states = dfa.states * ((low if high is None else high) + 1)
    if states > limits.counted:
        raise UnsupportedConstraint(
            "pattern", f"={name}: its automaton needs {states:,} states; the limit is {limits.counted:,}"
        )
    return dfa & CharDfa.length(low, high)


def _clipped(node: Node, high: int) -> Node:
    """The node with its counters no higher than texts of ``high`` characters can fill."""
    match node:
        case Cat(items):
            return Cat(tuple(_clipped(item, high) for item in items))
        case Or(items):
            return Or(tuple(_clipped(item, high) for item in items))
        case Rep(item, low, most):
            inner = _clipped(item, high)
            if width(item)[0] and most is not None and most > max(low, high):
                return Rep(inner, low, max(low, high))
            return Rep(inner, low, most)
    return node


def _bound(node: Node, low: int, high: int | None) -> Node | None:
    """The node's texts of ``low`` to ``high`` characters, where one counter at most has to move; ``None``: not that simple."""
    least, most = width(node)
    if low <= least and (high is None or (most is not None and most <= high)):
        return node
    if (high is not None and least > high) or (most is not None and most < low):
        return Or(())
    match node:
        case Or(items):
            parts = [_bound(item, low, high) for item in items]
            return None if any(part is None for part in parts) else Or(tuple(p for p in parts if p is not None))
        case Rep(item, at_least, at_most):
            a, b = width(item)
            if a != b or not a:
                return None
            times = max(at_least, -(-low // a))
            limit = at_most if high is None else high // a if at_most is None else min(at_most, high // a)
            if limit is not None and limit < times:
                return Or(())
            return Cat(()) if limit == 0 else Rep(item, times, limit)
        case Cat(items):
            widths = [width(item) for item in items]
            loose = [i for i, (a, b) in enumerate(widths) if a != b]
            if len(loose) != 1:
                return None
            i = loose[0]
            rest = sum(a for k, (a, _) in enumerate(widths) if k != i)
            part = _bound(items[i], max(0, low - rest), None if high is None else high - rest)
            return None if part is None else Cat((*items[:i], part, *items[i + 1 :]))
    return None


def _translate(
    node: Node,
    encode: Callable[[CharDfa], ir.Expr],
    string: Callable[[int, int | None], ir.Expr] | None,
    limits: RegularLimits,
) -> ir.Expr:
    """The tree with its large counters as they stand and automata for what is between them.

    ``string`` makes the expression for a run of any characters at all, where there is a special one.
    """

    def made(node: Node) -> ir.Expr:
        match node:
            case Rep(Chars(members), low, high) if members == ALL and string is not None:
                return string(low, high)
        if _size(node) <= PIECE:
            try:
                return encode(from_node(node, limits=replace(limits, states=SMALL), name="a part of the pattern"))
            except UnsupportedConstraint:
                pass
        match node:
            case Rep(item, low, high):
                return ir.Repeat(made(item), low, high)
            case Or(items):
                return ir.Alt(tuple(made(Or(run) if len(run) > 1 else run[0]) for run in _runs(items, sort=True)))
            case Cat(items):
                return ir.Seq(tuple(made(Cat(run) if len(run) > 1 else run[0]) for run in _runs(items, sort=False)))
        return encode(from_node(node, limits=limits, name="a part of the pattern"))

    return made(node)


def _size(node: Node) -> int:
    """How many positions a tree unrolls to."""
    match node:
        case Chars():
            return 1
        case Cat(items) | Or(items):
            return sum(map(_size, items))
        case Rep(item, low, high):
            return _size(item) * max(low if high is None else high, 1)
    return 0


def _runs(items: tuple[Node, ...], *, sort: bool) -> list[tuple[Node, ...]]:
    """Neighbours gathered while together they stay small; ``sort``: small ones first, for alternatives in any order."""
    out: list[tuple[Node, ...]] = []
    run: list[Node] = []
    total = 0
    ordered = sorted(items, key=_size) if sort else items
    for item in ordered:
        count = _size(item)
        if run and (total + count > PIECE or len(run) + 1 == len(items)):
            out.append(tuple(run))
            run, total = [], 0
        run.append(item)
        total += count
    return [*out, tuple(run)]
