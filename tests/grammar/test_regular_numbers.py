"""Number texts against rational arithmetic: every short text over a small alphabet, and what ``json.dumps`` writes."""

from __future__ import annotations

import itertools
import json
import re
from decimal import Decimal
from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.regular.numbers import integer_range, multiple_of, not_equal, not_multiple_of, number_range

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NORMAL = re.compile(r"-?(?:[1-9](\.[0-9]+)?|0(\.0+)?)([eE][+-]?[0-9]+)")


@cache
def every_text() -> tuple[tuple[str, Fraction], ...]:
    """All JSON numbers of up to five characters of a few, with their values."""
    texts = ("".join(t) for n in range(1, 6) for t in itertools.product("0157-.e+", repeat=n))
    return tuple((t, Fraction(Decimal(t))) for t in texts if _NUMBER.fullmatch(t))


@cache
def every_other_text() -> tuple[str, ...]:
    return tuple("".join(t) for n in range(4) for t in itertools.product("01-.e+x ", repeat=n))


def canonical(text: str) -> bool:
    """Whether a text must be taken if its value is in range: no exponent, or a normalized one."""
    match = _NORMAL.fullmatch(text)
    return "e" not in text or (match is not None and abs(int(match[3][1:])) <= 307)


def inside(value: Fraction, low: Decimal | None, high: Decimal | None, open_low: bool, open_high: bool) -> bool:
    above = low is None or (value > Fraction(low) if open_low else value >= Fraction(low))
    return above and (high is None or (value < Fraction(high) if open_high else value <= Fraction(high)))


BOUNDS = [
    ("0", "1"),
    ("0.5", "1.5"),
    ("-1", "9.9"),
    (None, "0.05"),
    ("1", None),
    ("-0.3", "0.7"),
    ("15", "150"),
    ("7e-7", "1e5"),
    ("0", None),
    (None, "0"),
    ("-57", "-5"),
    ("1.05", "1.15"),
    ("10", "1000000"),
    ("-1e-5", "5e-1"),
    (None, None),
    ("3", "3"),
    ("5", "4"),
    (None, "-10.50"),
    ("101", "1e22"),
]


@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize("opens", [(False, False), (True, False), (False, True), (True, True)])
def test_ranges_hold_exactly_the_texts_in_range(low: str | None, high: str | None, opens: tuple[bool, bool]) -> None:
    a, b = (None if bound is None else Decimal(bound) for bound in (low, high))
    numbers = number_range(a, b, exclusive_low=opens[0], exclusive_high=opens[1])
    integers = integer_range(a, b, exclusive_low=opens[0], exclusive_high=opens[1])
    integral = integer_range(a, b, exclusive_low=opens[0], exclusive_high=opens[1], allow_zero_fraction=True)
    for text, value in every_text():
        holds = inside(value, a, b, *opens)
        taken = numbers.accepts(text)
        assert taken == holds or (holds and not canonical(text)), text
        assert integers.accepts(text) == (holds and bool(_INTEGER.fullmatch(text))), text
        taken = integral.accepts(text)
        assert not taken or (holds and value.denominator == 1), text
        if holds and canonical(text) and re.fullmatch(r"-?\d+(\.0+)?(e\+?\d+)?", text):
            assert taken, text
    for text in every_other_text():
        assert not numbers.accepts(text) or _NUMBER.fullmatch(text), text
    assert integers <= integral <= numbers


DOUBLES = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False).filter(
    lambda x: x == 0 or 1e-306 < abs(x) < 1e307
)


@settings(max_examples=100, deadline=None)
@given(DOUBLES, DOUBLES, DOUBLES)
def test_what_json_dumps_writes_is_taken_just_when_it_is_in_range(x: float, low: float, high: float) -> None:
    dfa = number_range(low, high)
    text = json.dumps(x)
    value = Fraction(Decimal(text))
    assert dfa.accepts(text) == (Fraction(Decimal(repr(low))) <= value <= Fraction(Decimal(repr(high))))
    for bound, edge in ((low, number_range(low, None)), (high, number_range(None, high))):
        assert edge.accepts(json.dumps(bound)) and edge.accepts(format(Decimal(repr(bound)), "f"))


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**20), 10**20), st.integers(-(10**20), 10**20), st.integers(-(10**20), 10**20))
def test_large_integers(low: int, high: int, n: int) -> None:
    assert integer_range(low, high).accepts(str(n)) == (low <= n <= high)
    near = [low - 1, low, low + 1, high - 1, high, high + 1]
    assert [integer_range(low, high).accepts(str(k)) for k in near] == [low <= k <= high for k in near]
    if 0 <= high - low < 10**6:
        assert integer_range(low, high).count == high - low + 1 + (low <= 0 <= high)


def test_small_integer_ranges_have_as_many_texts() -> None:
    assert integer_range(1, 65535).count == 65535
    assert integer_range(-3, 3).count == 8  # -0 is 0
    assert list(integer_range(8, 12).words()) == ["8", "9", "10", "11", "12"]
    assert integer_range(Decimal("0.5"), Decimal("0.9")).is_empty and integer_range(1, 1, exclusive_low=True).is_empty
    assert not number_range(0, 1).accepts("1e-308") and number_range(0, 1).accepts("1e-307")
    assert not number_range(0, None, exclusive_low=True).accepts("-0.0e5")


@pytest.mark.parametrize(
    "step", ["1", "2", "3", "7", "10", "12", "100", "1500", "0.5", "0.01", "2.5", "0.25", "1e-8", "0.003"]
)
def test_multiples_in_plain_notation(step: str) -> None:
    dfa = multiple_of(Decimal(step))
    for text, value in every_text():
        assert dfa.accepts(text) == ("e" not in text and (value / Fraction(Decimal(step))).denominator == 1), text
    for k in (0, 1, 7, 123456789, -5):
        product = format(Decimal(step) * k, "f")
        assert dfa.accepts(product) and not dfa.accepts(
            product + "1" if "." in product else product + ".1" + "0" * 9 + "1"
        )
    both = dfa & number_range(Decimal("-2.5"), Decimal("2.5"))
    for text, value in every_text():
        if "e" not in text:
            assert both.accepts(text) == (abs(value) <= Fraction(5, 2) and dfa.accepts(text))


@pytest.mark.parametrize("value", ["0", "1", "-0.5", "15", "0.07", "1e3"])
def test_what_is_excluded_by_value_cannot_be_spelled_otherwise(value: str) -> None:
    other, rest = not_equal(Decimal(value)), not_multiple_of(abs(Decimal(value)) or 1)
    step = Fraction(abs(Decimal(value)) or 1)
    for text, number in every_text():
        assert not other.accepts(text) or number != Fraction(Decimal(value)), text
        assert other.accepts(text) or number == Fraction(Decimal(value)) or not canonical(text), text
        assert rest.accepts(text) == ("e" not in text and (number / step).denominator != 1), text


def test_bad_bounds_are_named() -> None:
    with pytest.raises(InvalidRequest, match="multipleOf=0: must be above zero"):
        multiple_of(0)
    with pytest.raises(UnsupportedConstraint, match="multipleOf=1000003: needs more than 20,000 states"):
        multiple_of(1_000_003)
    with pytest.raises(UnsupportedConstraint, match="is no decimal number"):
        number_range(Fraction(1, 3), None)
    with pytest.raises(UnsupportedConstraint, match="minimum=1E.5000: has more than 700 digits"):
        number_range(Decimal("1e5000"), None)
    with pytest.raises(InvalidRequest, match="maximum=NaN: must be finite"):
        integer_range(None, Decimal("nan"))
    with pytest.raises(InvalidRequest, match="minimum=True: must be a number"):
        integer_range(True, None)
    assert number_range(0.1, 0.3).accepts("0.1") and not number_range(0.1, 0.3).accepts("0.30000000000000000001")
