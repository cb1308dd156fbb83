"""Sets of strings that a schema can describe, closed under intersection and complement, and their JSON texts.

A set is a range of lengths (in code points), conditions (patterns, formats, excluded values) and perhaps a list of values. It
becomes an automaton only when that is needed; ``Languages`` keeps the automata of one compilation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from radixrt.grammar import ir
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.regular import CharDfa, formats, json_regex_to_ir, to_json


@dataclass(frozen=True, slots=True)
class Condition:
    """A string does (or does not) match a pattern, have a format, or be one of some values."""

    kind: str  # "pattern", "format", "values", or "language": one that ``Languages.collapse`` has numbered
    argument: Any
    holds: bool = True


@dataclass(frozen=True, slots=True)
class Strings:
    """All strings that meet every field. ``values`` ``None``: no list of them."""

    low: int = 0
    high: int | None = None
    conditions: frozenset[Condition] = frozenset()
    values: frozenset[str] | None = None


ALL_STRINGS = Strings()
StringSet = tuple[Strings, ...]  # a union
_SMALL_PRODUCT = 20_000  # states of a format's automaton times a length limit
EVERY_STRING: StringSet = (ALL_STRINGS,)


class Languages:
    """The automata of one compilation's patterns, formats and string sets, each built once."""

    def __init__(self) -> None:
        self._conditions: dict[tuple[str, Any], CharDfa] = {}
        self._parts: dict[Strings, CharDfa] = {}
        self._joined: dict[frozenset[Condition], CharDfa] = {}
        self._numbered = 0
        self.texts: dict[Strings, ir.Expr] = {}

    def condition(self, kind: str, argument: Any) -> CharDfa:
        """The strings that meet a condition."""
        key = (kind, argument)
        dfa = self._conditions.get(key)
        if dfa is None:
            if kind == "pattern":
                dfa = CharDfa.from_pattern(argument, syntax="ecma", anchored=False)
            elif kind == "format":
                dfa = format_language(argument)
            else:
                dfa = CharDfa.literals(sorted(argument))
            self._conditions[key] = dfa
        return dfa

    def part(self, part: Strings) -> CharDfa:
        """The automaton of a set, lengths included."""
        dfa = self._parts.get(part)
        if dfa is None:
            if part.values is not None:
                dfa = CharDfa.literals(sorted(part.values))
            else:
                dfa = self._within(self.conditions(part), part.low, part.high)
            self._parts[part] = dfa
        return dfa

    def _within(self, dfa: CharDfa, low: int, high: int | None) -> CharDfa:
        """The words of these lengths; a limit that the automaton keeps anyway costs nothing."""
        if dfa.is_empty:
            return dfa
        shortest, longest = dfa.min_length, dfa.max_length
        if shortest is not None and shortest >= low:
            low = 0
        if longest is not None and high is not None and longest <= high:
            high = None
        return dfa & CharDfa.length(low, high) if low or high is not None else dfa

    def conditions(self, part: Strings) -> CharDfa:
        """The automaton of a set's conditions alone."""
        known = self._joined.get(part.conditions)
        if known is not None:
            return known
        dfa: CharDfa | None = None
        for item in sorted(part.conditions, key=lambda item: (not item.holds, item.kind, str(item.argument))):
            one = self.condition(item.kind, item.argument)
            if dfa is None:
                dfa = one if item.holds else ~one
            else:
                dfa = dfa & one if item.holds else dfa - one
        joined = CharDfa.anything() if dfa is None else dfa
        self._joined[part.conditions] = joined
        return joined

    def union(self, parts: StringSet) -> CharDfa:
        """The automaton of a union of sets."""
        dfa = CharDfa.nothing()
        for part in parts:
            dfa = dfa | self.part(part)
        return dfa

    def collapse(self, parts: StringSet) -> StringSet:
        """The same union as fewer sets: those of the same lengths become one automaton."""
        groups: dict[tuple[int, int | None], list[Strings]] = {}
        listed: list[Strings] = []
        for part in parts:
            if part.values is not None:
                listed.append(part)
            else:
                groups.setdefault((part.low, part.high), []).append(part)
        made: list[Strings] = listed
        for (low, high), members in groups.items():
            if len(members) == 1:
                made += members
                continue
            dfa = CharDfa.nothing()
            for member in members:
                dfa = dfa | self.conditions(member)
            if dfa.is_empty:
                continue
            self._numbered += 1
            self._conditions["language", self._numbered] = dfa
            made.append(Strings(low, high, frozenset((Condition("language", self._numbered),))))
        return tuple(made)

    def accepts(self, part: Strings, text: str) -> bool:
        """Whether the string is in the set."""
        if len(text) < part.low or (part.high is not None and len(text) > part.high):
            return False
        if part.values is not None and text not in part.values:
            return False
        return all(
            (text in item.argument if item.kind == "values" else self.condition(item.kind, item.argument).accepts(text))
            == item.holds
            for item in part.conditions
        )

    def holds(self, parts: StringSet, text: str) -> bool:
        """Whether the string is in any of the sets."""
        return any(self.accepts(part, text) for part in parts)

    def empty(self, part: Strings) -> bool:
        """Whether the set holds nothing. Exact, but for long length limits, where only the automaton's own lengths are compared."""
        if part.values is not None:
            return not part.values
        if part.high is not None and part.low > part.high:
            return True
        rest = frozenset(item for item in part.conditions if item.kind != "values" or item.holds)
        if part.high is None and (not rest or not self.conditions(Strings(conditions=rest)).is_finite):
            return False  # infinitely many strings, of which the excluded values are only finitely many
        if not part.conditions:
            return False
        dfa = self.conditions(part)
        if dfa.is_empty:
            return True
        if max(part.low, part.high or 0) <= 64:
            return self.part(part).is_empty if part.low or part.high is not None else False
        longest = dfa.max_length
        shortest = dfa.min_length
        return (longest is not None and longest < part.low) or (
            part.high is not None and shortest is not None and shortest > part.high
        )


def intersect(a: Strings, b: Strings, languages: Languages) -> Strings | None:
    """What is in both, or ``None`` when that is seen to be nothing."""
    if a is ALL_STRINGS or a == b:
        return b
    if b is ALL_STRINGS:
        return a
    high = a.high if b.high is None else b.high if a.high is None else min(a.high, b.high)
    values = a.values if b.values is None else b.values if a.values is None else a.values & b.values
    part = Strings(max(a.low, b.low), high, a.conditions | b.conditions, values)
    return tidy(part, languages)


def tidy(part: Strings, languages: Languages) -> Strings | None:
    """The same set in its simplest fields, or ``None`` when it is seen to be empty."""
    if part.high is not None and part.low > part.high:
        return None
    if part.values is not None:
        rest = replace(part, values=None)
        kept = frozenset(value for value in part.values if languages.accepts(rest, value))
        return Strings(values=kept) if kept else None
    if len(part.conditions) < 2:
        return part
    if any(Condition(item.kind, item.argument, not item.holds) in part.conditions for item in part.conditions):
        return None
    excluding = [item for item in part.conditions if item.kind == "values" and not item.holds]
    others = part.conditions.difference(excluding)
    if excluding and others:  # only those values need excluding that the other conditions would let in
        rest = Strings(part.low, part.high, others)
        gone = frozenset(value for item in excluding for value in item.argument if languages.accepts(rest, value))
        if len(excluding) > 1 or gone != excluding[0].argument:
            return replace(part, conditions=others | {Condition("values", gone, False)} if gone else others)
    return part


def complement(part: Strings) -> Iterator[Strings]:
    """The strings outside: sets whose union is exactly the rest.

    Raises:
        UnsupportedConstraint: of a format whose automaton leaves out some of its texts: they would count as outside.
    """
    for item in part.conditions:
        if item.kind == "format" and item.holds and (item.argument in formats.SUBSETS or item.argument == "date"):
            raise UnsupportedConstraint(
                "format", f"={item.argument!r}: what is not of this format (`not`, `oneOf`, `if`) cannot be made exact"
            )
    if part.low:
        yield Strings(high=part.low - 1)
    if part.high is not None:
        yield Strings(low=part.high + 1)
    for item in part.conditions:
        if item.kind == "values" and not item.holds:
            yield Strings(values=item.argument)
        else:
            yield Strings(conditions=frozenset((replace(item, holds=not item.holds),)))
    if part.values is not None:
        yield Strings(conditions=frozenset((Condition("values", part.values, False),)))


def common(a: StringSet, b: StringSet, languages: Languages) -> StringSet:
    """The intersection of two unions."""
    made = dict.fromkeys(part for x in a for y in b if (part := intersect(x, y, languages)) is not None)
    return tuple(made)


def outside(parts: StringSet, languages: Languages) -> StringSet:
    """The complement of a union."""
    rest: StringSet = EVERY_STRING
    for part in parts:
        rest = common(rest, tuple(complement(part)), languages)
    return rest


def all_but(names: Iterable[str]) -> StringSet:
    """Every string except these."""
    gone = frozenset(names)
    return (Strings(conditions=frozenset((Condition("values", gone, False),))),) if gone else EVERY_STRING


def quoted_forms(text: str) -> list[bytes]:
    """The ways serializers write a string, with its quotes: raw UTF-8, and with ``\\uXXXX`` for what is not ASCII."""
    forms = dict.fromkeys(json.dumps(text, ensure_ascii=ascii_only) for ascii_only in (False, True))
    return [form.encode() for form in forms if form.isascii() or not any(0xD800 <= ord(char) < 0xE000 for char in form)]


def literals(texts: Iterable[bytes]) -> ir.Expr:
    """Exactly these byte strings: one is ``Bytes``, more are a trie."""
    words = sorted(set(texts))
    if len(words) == 1:
        return ir.Bytes(words[0])
    if not words:
        return ir.NOTHING
    edges: list[dict[int, int]] = [{}]
    accepting: list[int] = []
    for word in words:
        state = 0
        for byte in word:
            following = edges[state].get(byte)
            if following is None:
                following = edges[state][byte] = len(edges)
                edges.append({})
            state = following
        accepting.append(state)
    return ir.Dfa(
        tuple(tuple((byte, byte, to) for byte, to in sorted(out.items())) for out in edges), frozenset(accepting)
    )


_QUOTE = ir.Bytes(b'"')


def emit(part: Strings, languages: Languages) -> ir.Expr:
    """The JSON texts of a set, with their quotes; escapes only where JSON writers put them."""
    made = languages.texts.get(part)
    if made is None:
        if part.values is not None:
            made = literals(form for value in part.values for form in quoted_forms(value))
        else:
            made = ir.Seq((_QUOTE, _body(part, languages), _QUOTE))
        languages.texts[part] = made
    return made


def _body(part: Strings, languages: Languages) -> ir.Expr:
    if not part.conditions:
        return ir.JsonChars(part.low, part.high)
    only = next(iter(part.conditions))
    if len(part.conditions) == 1 and only.holds:
        if only.kind == "pattern":
            return json_regex_to_ir(only.argument, part.low, part.high, escapes="needed")
        if only.kind == "format" and not part.low and part.high is None:
            return _format_text(only.argument)
        if only.kind == "format" and part.high is not None and part.low <= 3 and "email" in only.argument:
            dfa = languages.conditions(part)
            if dfa.states * (part.high + 1) > _SMALL_PRODUCT and part.high >= 70:
                return json_regex_to_ir(short_mail(part.high), escapes="needed")
    return to_json(languages.part(part), escapes="needed")


def short_mail(high: int) -> str:
    """A pattern for mail addresses of at most ``high`` characters, where counting all of them would take too large an automaton.

    It leaves out quoted names and addresses in brackets, names beyond 64 characters (a third of the limit where that is less) or
    three dotted parts, and domains whose labels are longer than an even share of the rest (half of it with hyphens). Smaller
    than the format, never larger.
    """
    before = min(64, high // 3)
    rest = min(253, high - before - 1)
    char = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]"

    def label(size: int) -> str:
        size = min(size, 61)  # four of them are within the format's own limit
        return f"([0-9A-Za-z]{{1,{size}}}|[0-9A-Za-z](-?[0-9A-Za-z]){{0,{(size - 1) // 2}}})"

    part, two, three, four = (before - 2) // 3, label((rest - 1) // 2), label((rest - 2) // 3), label((rest - 3) // 4)
    dot = "\\."
    domain = "|".join((f"{two}({dot}{two})?", dot.join((three,) * 3), dot.join((four,) * 4)))
    name = f"({char}{{1,{before}}}|{char}{{1,{part}}}(\\.{char}{{1,{part}}}){{1,2}})"
    return f"^{name}@({domain})$"


@lru_cache(maxsize=64)
def format_language(name: str) -> CharDfa:
    """The texts of a known format. The year 0000 is left out of dates: RFC 3339 has it, but few readers can hold it."""
    dfa = formats.format_dfa(name)
    assert dfa is not None  # unknown formats never become conditions
    return dfa - CharDfa.from_pattern("^0000", anchored=False) if name in ("date", "date-time") else dfa


@lru_cache(maxsize=64)
def _format_text(name: str) -> ir.Expr:
    return to_json(format_language(name), escapes="needed")
