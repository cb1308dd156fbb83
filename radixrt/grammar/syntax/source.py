"""The text of a grammar while it is read: where we are, errors with line and column, and what both parsers share.

Invariant: every error names the place; every recursion of a parser goes through ``Source.deeper``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from radixrt.errors import InvalidRequest, nearest
from radixrt.grammar import ir
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.syntax.left_recursion import without_left_recursion

FIELD = "grammar"


@dataclass(frozen=True, slots=True)
class SyntaxLimits:
    """How large a grammar text may be. Fields: rules, terms (literals, classes, references), levels of nesting, highest repeat count."""

    rules: int = 20_000
    terms: int = 200_000
    nesting: int = 100
    count: int = 1_000_000


class Source:
    """A cursor in a text."""

    def __init__(self, text: str, limits: SyntaxLimits) -> None:
        self.text, self.at, self.limits = text, 0, limits
        self._depth = 0
        self._terms = 0

    @property
    def done(self) -> bool:
        return self.at >= len(self.text)

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        """Step over ``text`` if it is here."""
        if self.peek(text):
            self.at += len(text)
            return True
        return False

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Step over what ``pattern`` matches here."""
        match = pattern.match(self.text, self.at)
        if match:
            self.at = match.end()
        return match

    def place(self, at: int | None = None) -> str:
        at = self.at if at is None else at
        line = self.text.count("\n", 0, at) + 1
        return f"line {line}, column {at - (self.text.rfind(chr(10), 0, at) + 1) + 1}"

    def error(self, problem: str, at: int | None = None) -> InvalidRequest:
        return InvalidRequest(FIELD, f"{self.place(at)}: {problem}")

    def unsupported(self, problem: str, at: int | None = None) -> UnsupportedConstraint:
        return UnsupportedConstraint(FIELD, f"{self.place(at)}: {problem}")

    def found(self) -> str:
        """What is here, for an error."""
        if self.done:
            return "the end of the grammar"
        word = re.compile(r"\w+|[^\w\s]|\s").match(self.text, self.at)
        return repr(word[0][:40] if word else self.text[self.at])

    @contextmanager
    def deeper(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > self.limits.nesting:
            raise self.unsupported(f"groups are nested deeper than {self.limits.nesting} levels")
        try:
            yield
        finally:
            self._depth -= 1

    def count_term(self) -> None:
        self._terms += 1
        if self._terms > self.limits.terms:
            raise self.unsupported(f"the grammar has more than {self.limits.terms:,} terms")

    def repeat(self, item: ir.Expr, low: int, high: int | None, at: int) -> ir.Expr:
        """``item`` repeated, with the counts checked. ``at``: where they are written."""
        if max(low, high or 0) > self.limits.count:
            raise self.unsupported(f"a count of {max(low, high or 0)}; at most {self.limits.count:,} is taken", at)
        if high is not None and high < low:
            raise self.error(f"repeats from {low} to {high} times: the second must not be smaller", at)
        return ir.Repeat(item, low, high)


def string_escape(source: Source, kinds: Mapping[str, str], hexes: Mapping[str, int], at: int) -> str:
    """The character of an escape; the cursor stands after the backslash, which is at ``at``."""
    if source.done:
        raise source.error("the grammar ends after a backslash", at)
    kind = source.text[source.at]
    source.at += 1
    if kind in kinds:
        return kinds[kind]
    if kind in hexes:
        digits = source.text[source.at : source.at + hexes[kind]]
        if not re.fullmatch(rf"[0-9A-Fa-f]{{{hexes[kind]}}}", digits):
            raise source.error(f"\\{kind} needs {hexes[kind]} hexadecimal digits, not {digits!r}", at)
        source.at += hexes[kind]
        return scalar(source, int(digits, 16), at)
    raise source.error(f"unknown escape \\{kind}; known are {' '.join(chr(92) + k for k in [*kinds, *hexes])}", at)


def scalar(source: Source, code: int, at: int) -> str:
    """The character of a code point that is one."""
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise source.error(f"U+{code:04X} is not a character", at)
    return chr(code)


def char_set(ranges: Iterable[tuple[int, int]], *, negated: bool = False) -> ir.Expr:
    """One character of the given code point ranges (both ends included), or with ``negated`` any other, as UTF-8."""
    from radixrt.grammar.regular.charset import charset, complement

    chars = charset(ranges)
    return utf8(complement(chars) if negated else chars)


def utf8(ranges: Iterable[tuple[int, int]]) -> ir.Expr:
    """One character of ascending, disjoint code point ranges without surrogates, as UTF-8."""
    single = 0  # one byte
    longer: dict[ir.Expr, int] = {}  # by what follows: bits of the first byte
    for low, high in ranges:
        for end in (0x7F, 0x7FF, 0xFFFF, 0x10FFFF):
            if low > high:
                break
            if low <= end:
                _split(chr(low).encode(), chr(min(high, end)).encode(), longer)
                low = end + 1
    single = longer.pop(ir.EMPTY, 0)
    items: list[ir.Expr] = [ir.ByteSet(single)] if single else []
    items += [ir.Seq((ir.ByteSet(bits), *_items(rest))) for rest, bits in longer.items()]
    return items[0] if len(items) == 1 else ir.Alt(tuple(items))


def _items(expr: ir.Expr) -> tuple[ir.Expr, ...]:
    return expr.items if isinstance(expr, ir.Seq) else (expr,)


_FOLLOW = ir.byte_range(0x80, 0xBF)


def _split(low: bytes, high: bytes, into: dict[ir.Expr, int]) -> None:
    """Byte strings from ``low`` to ``high``, UTF-8 of one length, as first bytes by what follows them."""

    def put(first: int, last: int, rest: ir.Expr) -> None:
        into[rest] = into.get(rest, 0) | ir.byte_range(first, last).bits

    n = len(low)
    if n == 1:
        put(low[0], high[0], ir.EMPTY)
    elif low[0] == high[0]:
        put(low[0], low[0], _rest(low[1:], high[1:]))
    else:
        first, last = low[0], high[0]
        bottom, top = b"\x80" * (n - 1), b"\xbf" * (n - 1)
        if low[1:] != bottom:
            put(first, first, _rest(low[1:], top))
            first += 1
        if high[1:] != top:
            put(last, last, _rest(bottom, high[1:]))
            last -= 1
        if first <= last:
            put(first, last, ir.Seq((_FOLLOW,) * (n - 1)))


def _rest(low: bytes, high: bytes) -> ir.Expr:
    into: dict[ir.Expr, int] = {}
    _split(low, high, into)
    items = [
        ir.ByteSet(bits) if rest == ir.EMPTY else ir.Seq((ir.ByteSet(bits), *_items(rest)))
        for rest, bits in into.items()
    ]
    return items[0] if len(items) == 1 else ir.Alt(tuple(items))


def check_names(source: Source, used: Mapping[str, int], known: Iterable[str]) -> None:
    """Every name that is used is known. ``used``: name -> where it is first used."""
    names = set(known)
    for name, at in used.items():
        if name not in names:
            raise source.error(f"no rule is called {name!r}{nearest(name, names)}", at)


def finish(rules: Mapping[str, ir.Expr], start: str) -> ir.Grammar:
    """The grammar of the rules that ``start`` reaches, without left recursion."""
    return _only_used(without_left_recursion(_only_used(rules, start).rules, FIELD), start)


def _only_used(rules: Mapping[str, ir.Expr], start: str) -> ir.Grammar:
    kept = {start: rules[start]}
    todo = [rules[start]]
    seen: set[int] = set()
    while todo:
        match todo.pop():
            case ir.Ref(name):
                if name not in kept:
                    kept[name] = rules[name]
                    todo.append(rules[name])
            case (ir.Seq(items) | ir.Alt(items)) as expr if id(expr) not in seen:
                seen.add(id(expr))
                todo.extend(items)
            case ir.Repeat(item):
                todo.append(item)
    return ir.Grammar(kept, start)
