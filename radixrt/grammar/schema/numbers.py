"""Sets of numbers that a schema can describe, closed under intersection and complement, and their texts.

Values are exact fractions; no float is ever rounded. ``1``, ``1.0`` and ``1e0`` are one value. Draft 4 alone looks at how a
number is written: its integers are the texts without fraction and exponent, so ``1`` is one and ``1.0`` is not, although they
are equal. What a set says about texts (``written``) is kept apart from what it says about values, through every operation.

Invariants: ``written`` is False or None where no whole number is in the set as far as ``integer`` shows; a set with
``written=True`` has ``integer=True``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from radixrt.grammar import ir
from radixrt.grammar.regular import CharDfa, to_bytes
from radixrt.grammar.regular import numbers as texts


def exact(value: float | Decimal) -> Fraction:
    """The number as it is written in JSON: ``0.1`` is one tenth. ``1e300`` and ``1e-400`` are the doubles they are read as."""
    if isinstance(value, int):
        return Fraction(value)
    size = abs(float(value))
    if 2.0**53 <= size < _LARGEST or not size:
        return Fraction(float(value))
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


_LARGEST = 1.7e308


@dataclass(frozen=True, slots=True)
class Numbers:
    """All numbers that meet every field.

    Fields:
        integer: only whole numbers (True), only others (False), both (None).
        written: only texts without fraction and exponent (True), only texts with one (False), both (None).
    """

    integer: bool | None = None
    low: Fraction | None = None
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False
    multiples: frozenset[Fraction] = frozenset()
    not_multiples: frozenset[Fraction] = frozenset()
    values: frozenset[Fraction] | None = None
    excluded: frozenset[Fraction] = frozenset()
    written: bool | None = None

    def holds(self, value: Fraction) -> bool:
        """Whether the number is in the set, in some writing."""
        if self.integer is not None and self.integer != (value.denominator == 1):
            return False
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            return False
        if self.high is not None and (value > self.high or (self.high_open and value == self.high)):
            return False
        if any((value / step).denominator != 1 for step in self.multiples):
            return False
        if any((value / step).denominator == 1 for step in self.not_multiples):
            return False
        return value not in self.excluded and (self.values is None or value in self.values)


ALL_NUMBERS = Numbers()
WHOLE = Numbers(integer=True)
WRITTEN_WHOLE = Numbers(integer=True, written=True)  # the integers of draft 4


def intersect(a: Numbers, b: Numbers) -> Numbers | None:
    """What is in both, or ``None`` when that is nothing."""
    if a is ALL_NUMBERS or a == b:
        return b
    if b is ALL_NUMBERS:
        return a
    if _opposed(a.integer, b.integer) or _opposed(a.written, b.written):
        return None
    low, low_open = _tighter(a.low, a.low_open, b.low, b.low_open, highest=True)
    high, high_open = _tighter(a.high, a.high_open, b.high, b.high_open, highest=False)
    values = a.values if b.values is None else b.values if a.values is None else a.values & b.values
    return tidy(
        Numbers(
            a.integer if b.integer is None else b.integer,
            low,
            low_open,
            high,
            high_open,
            a.multiples | b.multiples,
            a.not_multiples | b.not_multiples,
            values,
            a.excluded | b.excluded,
            a.written if b.written is None else b.written,
        )
    )


def _opposed(a: bool | None, b: bool | None) -> bool:
    return a is not None and b is not None and a != b


def _tighter(
    a: Fraction | None, a_open: bool, b: Fraction | None, b_open: bool, *, highest: bool
) -> tuple[Fraction | None, bool]:
    if a is None or b is None:
        return (b, b_open) if a is None else (a, a_open)
    if a == b:
        return a, a_open or b_open
    return (a, a_open) if (a > b) == highest else (b, b_open)


def tidy(part: Numbers) -> Numbers | None:
    """The same set in its simplest fields, or ``None`` when it is seen to be empty."""
    if part.values is not None:
        return _listed((value for value in part.values if part.holds(value)), part.written)
    if part.multiples & part.not_multiples or (
        part.integer is False and any(m.denominator == 1 for m in part.multiples)
    ):
        return None
    low, high, low_open, high_open = part.low, part.high, part.low_open, part.high_open
    if part.integer:
        if low is not None:
            low, low_open = Fraction(math.floor(low) + 1 if low_open else math.ceil(low)), False
        if high is not None:
            high, high_open = Fraction(math.ceil(high) - 1 if high_open else math.floor(high)), False
    if low is not None and high is not None:
        if low > high or (low == high and (low_open or high_open)):
            return None
        if low == high:
            return _listed((low,) if part.holds(low) else (), part.written)
    whole = Fraction(1)
    multiples = part.multiples
    if part.integer and multiples:
        multiples = frozenset(m for m in multiples if (whole / m).denominator != 1)
    if part.integer and any((whole / m).denominator == 1 for m in part.not_multiples):
        return None
    written = None if part.integer is False else part.written  # others cannot be written without a fraction
    made = replace(
        part, low=low, low_open=low_open, high=high, high_open=high_open, multiples=multiples, written=written
    )
    if not part.excluded:
        return made
    rest = replace(made, excluded=frozenset())
    return replace(rest, excluded=frozenset(value for value in part.excluded if rest.holds(value)))


def _listed(values: Iterable[Fraction], written: bool | None) -> Numbers | None:
    """A set of few values."""
    kept = frozenset(values)
    if written is False and all(value.denominator != 1 for value in kept):
        written = None
    return Numbers(values=kept, written=written, integer=written or None) if kept else None


def complement(part: Numbers) -> Iterator[Numbers]:
    """The numbers outside: sets whose union is exactly the rest."""
    if part.written is not None:
        yield Numbers(written=False) if part.written else WRITTEN_WHOLE
    if part.integer is not None and not part.written:  # what is no whole number is written with a fraction: see above
        yield Numbers(integer=not part.integer)
    if part.low is not None:
        yield Numbers(high=part.low, high_open=not part.low_open)
    if part.high is not None:
        yield Numbers(low=part.high, low_open=not part.high_open)
    for step in part.multiples:
        yield Numbers(not_multiples=frozenset((step,)))
    for step in part.not_multiples:
        yield Numbers(multiples=frozenset((step,)))
    if part.values is not None:
        yield Numbers(excluded=part.values)
    if part.excluded:
        yield Numbers(values=part.excluded)


def finite(part: Numbers, most: int) -> list[Fraction] | None:
    """The values of a set with at most ``most`` of them, ascending; ``None`` for larger sets."""
    if part.values is not None:
        return sorted(part.values) if len(part.values) <= most else None
    if part.integer and part.low is not None and part.high is not None and part.high - part.low < most:
        return [value for n in range(int(part.low), int(part.high) + 1) if part.holds(value := Fraction(n))]
    return None


_DIGITS = ir.Repeat(ir.byte_range(48, 57), 0, None)
_WHOLE = ir.Seq(
    (
        ir.Alt((ir.EMPTY, ir.Bytes(b"-"))),
        ir.Alt((ir.Bytes(b"0"), ir.Seq((ir.byte_range(49, 57), _DIGITS)))),
    )
)
_SOME_DIGITS = ir.Repeat(ir.byte_range(48, 57), 1, None)
_NUMBER = ir.Seq(
    (
        _WHOLE,
        ir.Alt((ir.EMPTY, ir.Seq((ir.Bytes(b"."), _SOME_DIGITS)))),
        ir.Alt(
            (
                ir.EMPTY,
                ir.Seq(
                    (ir.ByteSet(1 << 69 | 1 << 101), ir.Alt((ir.EMPTY, ir.ByteSet(1 << 43 | 1 << 45))), _SOME_DIGITS)
                ),
            )
        ),
    )
)
_ZERO_FRACTION = ir.Alt((ir.EMPTY, ir.Bytes(b".0")))
_LONG = 2**53  # from here on whole numbers are not all doubles


def _is_double(value: Fraction) -> bool:
    """Whether readers that make a double of every text with a fraction or exponent get the whole number itself."""
    return abs(value) < _LONG or (abs(value) < _LARGEST and Fraction(float(value)) == value)


def value_texts(value: Fraction, written: bool | None) -> list[bytes]:
    """The ways a number is commonly written: plainly, and as Python and JavaScript print it. ``written``: see ``Numbers``."""
    forms: dict[str, None] = {}
    if value.denominator == 1:
        plain = str(value.numerator)
        if len(plain) <= 400:
            if written is not False:
                forms[plain] = None
            if written is not True and _is_double(value):
                forms[plain + ".0"] = None
        if not _is_double(value):
            return [form.encode() for form in forms]
    else:
        places = 0
        rest = value.denominator
        while rest % 10 == 0:
            rest //= 10
            places += 1
        while rest % 2 == 0:
            rest //= 2
            places += 1
        while rest % 5 == 0:
            rest //= 5
            places += 1
        if rest == 1 and places <= 400:
            scaled = value * 10**places
            digits = str(abs(scaled.numerator)).rjust(places + 1, "0")
            text = f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
            forms[text.rstrip("0")] = None
    try:
        printed = repr(float(value))
        if (
            "inf" not in printed
            and value in (Fraction(printed), Fraction(float(value)))
            and (written is not True or value.denominator != 1)
        ):
            forms[printed] = None
    except OverflowError:
        pass
    return [form.encode() for form in forms]


def emit(part: Numbers) -> ir.Expr:
    """The texts of the numbers in a set."""
    if part.values is not None:
        forms = [ir.Bytes(form) for value in sorted(part.values) for form in value_texts(value, part.written)]
        return forms[0] if len(forms) == 1 else ir.Alt(tuple(forms))
    if part == ALL_NUMBERS:
        return _NUMBER
    if part == WHOLE:
        return ir.Seq((_WHOLE, _ZERO_FRACTION))
    if part == WRITTEN_WHOLE:
        return _WHOLE
    if part.integer:
        dfa = language(part)
        whole = to_bytes(dfa)
        if part.written:
            return whole
        if part.multiples or part.not_multiples or part.excluded or _between_doubles(part):
            dotted: ir.Expr = ir.Seq((to_bytes(dfa & _plain()), ir.Bytes(b".0")))  # a reader may round longer ones
        else:
            dotted = ir.Seq((whole, ir.Bytes(b".0")))
            if part.written is None:
                return ir.Seq((whole, _ZERO_FRACTION))
        return dotted if part.written is False else ir.Alt((whole, dotted))
    dfa = language(part)
    return to_bytes(dfa - texts.integer_range() if part.written is False else dfa)


def _between_doubles(part: Numbers) -> bool:
    """Whether a bound is a whole number that is no double: a reader may round a number that is in to one that is out."""
    return any(
        bound is not None and bound.denominator == 1 and not _is_double(bound) for bound in (part.low, part.high)
    )


def language(part: Numbers) -> CharDfa:
    """The texts of a set without a simple form, as an automaton; whole numbers without a fraction."""
    if part.integer:
        dfa = texts.integer_range(part.low, part.high)
    else:
        low, low_open = _inward(part.low, part.low_open, math.inf)
        high, high_open = _inward(part.high, part.high_open, -math.inf)
        dfa = texts.number_range(low, high, exclusive_low=low_open, exclusive_high=high_open)
        if low_open or high_open:
            dfa = dfa & _precise()
        if low != part.low or high != part.high:  # whole numbers are read as they are
            dfa = dfa | texts.integer_range(
                part.low, part.high, exclusive_low=part.low_open, exclusive_high=part.high_open
            )
    if part.integer is False or ((part.not_multiples or part.excluded) and not part.integer):
        dfa = dfa & (_plain() | texts.integer_range())  # what is taken away is known in plain notation only
    if part.integer is False:
        dfa = dfa - texts.multiple_of(Fraction(1))
    for step in sorted(part.multiples):
        dfa = dfa & texts.multiple_of(step)
    if part.multiples and not part.integer:  # a reader may round a long fraction to another number
        dfa = dfa & (_plain() | texts.integer_range())
    for step in sorted(part.not_multiples):
        dfa = dfa - texts.multiple_of(step)
    for value in sorted(part.excluded):
        dfa = dfa - texts.number_range(value, value)
    return dfa


def _inward(bound: Fraction | None, is_open: bool, side: float) -> tuple[Fraction | None, bool]:
    """A bound so large that texts are rounded to it, as the nearest double whose texts all stay inside."""
    if bound is None or bound.denominator != 1 or not _LONG <= abs(bound) < _LARGEST:
        return bound, is_open
    double = float(bound)
    inside = Fraction(double) > bound if side > 0 else Fraction(double) < bound
    if not inside and (is_open or double != bound):
        double = math.nextafter(double, side)
    return Fraction(double), False


_FEW = "|".join(
    [r"(0|[1-9][0-9]{0,14})", *(rf"(0|[1-9][0-9]{{0,{n}}})\.[0-9]{{1,{14 - n}}}" for n in range(14))]
)  # at most 15 digits: different decimals are then different doubles


@lru_cache(maxsize=1)
def _plain() -> CharDfa:
    """Numbers without an exponent that no reader rounds to another one of them."""
    return CharDfa.from_pattern(f"-?({_FEW})", syntax="ecma", anchored=True)


@lru_cache(maxsize=1)
def _precise() -> CharDfa:
    """Numbers that no reader rounds to another one of them."""
    pattern = rf"-?({_FEW}|[1-9](\.[0-9]{{1,14}})?[eE][+-]?[0-9]{{1,3}})"
    return CharDfa.from_pattern(pattern, syntax="ecma", anchored=True)
