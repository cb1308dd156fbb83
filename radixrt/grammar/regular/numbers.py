"""The texts of JSON numbers whose value lies in a range or is a multiple, exactly, as automata.

A text is compared with a bound while it is read, digit by digit, in rational arithmetic: no text whose value is out of range is
in a language. Plain decimal notation is complete. With an exponent a text is in the language of a bounded range if it is
normalized (one digit before the point, not zero: what ``json.dumps`` and JavaScript write) or zero, and its exponent is within
-307..307, where doubles neither overflow nor vanish; the value of other texts cannot be compared by a finite automaton.
``-0`` is zero and allowed where zero is.

So a language here is a *subset* of all texts whose value qualifies, and to subtract one is not to exclude its values: ``15e0`` is
no text of ``number_range(15, 15)``. Exclude with ``not_multiple_of`` and ``not_equal``, which hold only texts they can judge.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor
from typing import Literal, TypeAlias

from radixrt.errors import InvalidRequest
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.regular.chardfa import CharDfa
from radixrt.grammar.regular.charset import CharSet, chars
from radixrt.grammar.regular.limits import DEFAULT_LIMITS, RegularLimits

Number: TypeAlias = int | Decimal | Fraction | float
Kind = Literal["integer", "integral", "number"]  # integral: integers that may be written 1.0 or 1e2

MAX_DIGITS = 700  # of a bound, as many as the smallest and largest doubles need
MAX_EXPONENT = 307
_KINDS: dict[Kind, str] = {
    "integer": r"-?(0|[1-9][0-9]*)",
    "integral": r"-?(0|[1-9][0-9]*)(\.0+)?([eE]\+?[0-9]+)?|-?0(\.0+)?[eE][+-]?[0-9]+",
    "number": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
}


def exact(value: Number, field: str = "number") -> Fraction:
    """The rational number meant; a float is taken as it is written (``0.1`` is one tenth)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal, Fraction)):
        raise InvalidRequest(field, f"={value!r}: must be a number")
    if isinstance(value, float):
        value = Decimal(repr(value))
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise InvalidRequest(field, f"={value}: must be finite")
        if abs(value.adjusted()) > MAX_DIGITS or len(value.as_tuple().digits) > MAX_DIGITS:
            raise UnsupportedConstraint(field, f"={value}: has more than {MAX_DIGITS} digits")
    return Fraction(value)


def integer_range(
    low: Number | None = None,
    high: Number | None = None,
    *,
    exclusive_low: bool = False,
    exclusive_high: bool = False,
    allow_zero_fraction: bool = False,
) -> CharDfa:
    """Integers between two bounds (``None``: without bound), without leading zeros.

    Args:
        allow_zero_fraction: also those written with a fraction of zeros (``1.0``), or as ``1e2``: JSON Schema's integers.
    """
    kind: Kind = "integral" if allow_zero_fraction else "integer"
    first = last = None
    if low is not None:
        bound = exact(low, "minimum")
        first = floor(bound) + 1 if exclusive_low else ceil(bound)
    if high is not None:
        bound = exact(high, "maximum")
        last = ceil(bound) - 1 if exclusive_high else floor(bound)
    return _between(
        None if first is None else Fraction(first), None if last is None else Fraction(last), False, False, kind
    )


def number_range(
    low: Number | None = None,
    high: Number | None = None,
    *,
    exclusive_low: bool = False,
    exclusive_high: bool = False,
) -> CharDfa:
    """JSON numbers between two bounds (``None``: without bound)."""
    return _between(
        None if low is None else exact(low, "minimum"),
        None if high is None else exact(high, "maximum"),
        exclusive_low,
        exclusive_high,
        "number",
    )


@lru_cache(maxsize=256)
def multiple_of(divisor: Number, *, limits: RegularLimits = DEFAULT_LIMITS) -> CharDfa:
    """Numbers in plain decimal notation that are whole multiples of a decimal.

    Raises:
        InvalidRequest: the divisor is not above zero.
        UnsupportedConstraint: it needs too many states (one for each remainder).
    """
    value = exact(divisor, "multipleOf")
    if value <= 0:
        raise InvalidRequest("multipleOf", f"={divisor}: must be above zero")
    whole, places = value, 0
    while whole.denominator > 1:
        whole, places = whole * 10, places + 1
        if places > MAX_DIGITS:
            raise UnsupportedConstraint("multipleOf", f"={divisor}: is no decimal number")
    # value = whole / 10**places, and whole = rest * 10**zeros. Counting trailing zeros keeps the remainders of rest only.
    rest, zeros = whole.numerator, 0
    while rest % 10 == 0:
        rest, zeros = rest // 10, zeros + 1
    if rest * (zeros + places + 2) > limits.states:
        raise UnsupportedConstraint("multipleOf", f"={divisor}: needs more than {limits.states:,} states")
    shift = [pow(10, k, rest) for k in range(zeros + 2)]
    # A state: where the text is, remainder of the digits but the last trailing zeros, how many of those (to ``zeros``), and
    # how many places of the fraction are read (to ``places``).
    start = ("start", 0, 0, 0)

    def digit(remainder: int, trailing: int, d: int) -> tuple[int, int]:
        if d == 0:
            return (remainder, trailing + 1) if trailing < zeros else (remainder * 10 % rest, trailing)
        return (remainder * shift[trailing + 1] + d) % rest, 0

    def step(state: tuple[str, int, int, int], symbol: int) -> tuple[str, int, int, int] | None:
        where, remainder, trailing, read = state
        if symbol == 10:
            return ("sign", 0, 0, 0) if where == "start" else None
        if symbol == 11:
            return ("point", remainder, trailing, 0) if where in ("zero", "whole") else None
        if where == "zero":
            return None
        if where in ("start", "sign"):
            if symbol == 0:
                return "zero", 0, zeros, 0
            return "whole", symbol % rest, 0, 0
        if where == "whole":
            return "whole", *digit(remainder, trailing, symbol), 0
        if read < places:
            return "fraction", *digit(remainder, trailing, symbol), read + 1
        return ("fraction", remainder, trailing, read) if symbol == 0 else None

    def accepts(state: tuple[str, int, int, int]) -> bool:
        where, remainder, trailing, read = state
        if where not in ("zero", "whole", "fraction"):
            return False
        for _ in range(places - read):
            remainder, trailing = digit(remainder, trailing, 0)
        return remainder == 0 and trailing == zeros

    alphabet = [chars(c) for c in "0123456789-."]
    return CharDfa.explore(start, step, accepts, alphabet, limits=limits, name=f"multipleOf {divisor}")


def not_multiple_of(divisor: Number, *, limits: RegularLimits = DEFAULT_LIMITS) -> CharDfa:
    """Numbers in plain decimal notation that are no whole multiples of a decimal; of 1: those that are no integers."""
    plain = CharDfa.from_pattern(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?", anchored=True)
    return plain - multiple_of(divisor, limits=limits)


def not_equal(value: Number) -> CharDfa:
    """Numbers of any other value: in plain notation, or with a normalized exponent."""
    return number_range(None, value, exclusive_high=True) | number_range(value, None, exclusive_low=True)


@lru_cache(maxsize=512)
def _between(low: Fraction | None, high: Fraction | None, open_low: bool, open_high: bool, kind: Kind) -> CharDfa:
    """Signed numbers of a kind within bounds."""
    if low is not None and high is not None and (low > high or (low == high and (open_low or open_high))):
        return CharDfa.nothing()
    if low is None and high is None:
        return CharDfa.from_pattern(_KINDS[kind], anchored=True)
    above = _magnitudes(low, high, open_low, open_high, kind)
    below = _magnitudes(None if high is None else -high, None if low is None else -low, open_high, open_low, kind)
    return above | CharDfa.literal("-").concat(below)


@lru_cache(maxsize=512)
def _magnitudes(low: Fraction | None, high: Fraction | None, open_low: bool, open_high: bool, kind: Kind) -> CharDfa:
    """Unsigned numbers of a kind whose value is within bounds (which may be negative)."""
    if high is not None and (high < 0 or (high == 0 and open_high)):
        return CharDfa.nothing()
    if high is not None:
        least = _compared(high, (-1,) if open_high else (-1, 0), kind)
        if low is None or low < 0 or (low == 0 and not open_low):
            return least
        return least & _compared(low, (1,) if open_low else (0, 1), kind)
    if low is not None and (low > 0 or (open_low and low == 0)):
        return _compared(low, (1,) if open_low else (0, 1), kind)
    return CharDfa.from_pattern(_KINDS[kind].replace("-?(", "(").replace("|-?", "|"), anchored=True)


@lru_cache(maxsize=512)
def _compared(bound: Fraction, keep: tuple[int, ...], kind: Kind) -> CharDfa:
    """Unsigned numbers of a kind that are below (-1), at (0) or above (1) a bound that is not negative."""
    machine = _Comparison(bound, kind)
    return CharDfa.explore(
        machine.start, machine.step, lambda s: machine.verdict(s) in keep, machine.alphabet, name=f"the bound {bound}"
    )


# Where the text is, then what is known of it: see _Comparison.
_At: TypeAlias = tuple[str, int, int, int, int, bool]


class _Comparison:
    """Reads an unsigned number and compares it with a bound.

    A state is ``(where, order, count, mantissa, taken, normal)``: ``order`` compares the digits so far with the bound's in plain
    notation, of which ``count`` are read (0 once ``order`` is decided in the fraction); ``mantissa`` compares them with the
    bound's significant digits, ``taken`` of them read, which is what counts if an exponent follows; ``normal`` says that
    an exponent may follow. In the exponent, ``order`` and ``count`` compare its digits with the bound's exponent, ``taken``
    packs the comparison with the greatest exponent allowed, and ``mantissa`` keeps what the mantissa said (2: it is zero).
    """

    def __init__(self, bound: Fraction, kind: Kind) -> None:
        self.kind = kind
        places, scaled = 0, bound
        while scaled.denominator > 1:
            scaled, places = scaled * 10, places + 1
            if places > MAX_DIGITS:
                raise UnsupportedConstraint("number", f"={bound}: is no decimal number")
        text = str(scaled.numerator).rjust(places + 1, "0")
        cut = len(text) - places
        self.whole = text[:cut].lstrip("0")
        self.fraction = text[cut:].rstrip("0")
        self.mantissa = text.strip("0")
        leading = len(text) - len(text.lstrip("0"))
        self.exponent = cut - 1 - leading if self.mantissa else 0
        self.power = str(abs(self.exponent)) if self.exponent else ""
        self.largest = str(MAX_EXPONENT)
        used = sorted({0, *map(int, self.whole + self.fraction + self.mantissa + self.power + self.largest)})
        self.alphabet: list[CharSet] = [chars(c) for c in ".+-"] + [chars("eE")]
        self.digits: list[int] = []
        for i, d in enumerate(used):
            self.alphabet.append(chars(str(d)))
            self.digits.append(d)
            after = used[i + 1] if i + 1 < len(used) else 10
            if d + 1 < after:  # digits no comparison tells apart
                self.alphabet.append(((0x30 + d + 1, 0x30 + after - 1),))
                self.digits.append(d + 1)
        self.start: _At = ("start", 0, 0, 0, 0, True)

    @staticmethod
    def _against(text: str, at: int, order: int, digit: int) -> tuple[int, int]:
        """One more digit compared with ``text[at]`` (zero past its end): the new order and position."""
        if order:
            return order, 0
        other = int(text[at]) if at < len(text) else 0
        if digit == other:
            return 0, min(at + 1, len(text))
        return (1 if digit > other else -1), 0

    def step(self, state: _At, symbol: int) -> _At | None:
        where, order, count, mantissa, taken, normal = state
        if symbol >= 4:
            return self.digit(state, self.digits[symbol - 4])
        if symbol == 0:
            if where not in ("zero", "whole") or self.kind == "integer":
                return None
            if where == "whole":
                order = self.whole_order(order, count)
            else:
                order = -1 if self.whole else 0
            return "point", order, 0, mantissa, taken, normal
        if symbol == 3:
            if where not in ("zero", "whole", "fraction") or not normal or self.kind == "integer":
                return None
            verdict = 2
            if where == "whole" or (where == "fraction" and mantissa != 2):
                verdict = mantissa if mantissa or taken >= len(self.mantissa) else -1
            return "e", 0, 0, verdict, 0, True
        if where != "e":
            return None
        if symbol == 2 and self.kind == "integral" and mantissa != 2:
            return None
        return ("e+" if symbol == 1 else "e-"), 0, 0, mantissa, 0, True

    def whole_order(self, order: int, count: int) -> int:
        """The digits before the point, all read, against the bound's."""
        if count != len(self.whole):
            return 1 if count > len(self.whole) else -1
        return order

    def digit(self, state: _At, d: int) -> _At | None:
        where, order, count, mantissa, taken, normal = state
        if where == "start":
            if d == 0:
                return "zero", 0, 0, 2, 0, True
            order = 0
            if self.whole:
                order = (d > int(self.whole[0])) - (d < int(self.whole[0]))
            mantissa, taken = self._against(self.mantissa, 0, 0, d)
            return "whole", order, 1, mantissa, taken, True
        if where == "whole":
            if count > len(self.whole):
                return "whole", 0, count, 0, 0, False
            if count < len(self.whole) and not order:
                order = (d > int(self.whole[count])) - (d < int(self.whole[count]))
            count += 1
            return "whole", order if count <= len(self.whole) else 0, count, 0, 0, False
        if where in ("point", "fraction"):
            if self.kind == "integral" and d:
                return None
            order, count = self._against(self.fraction, count, order, d)
            if mantissa == 2 and d:  # 0.05: no exponent may follow
                return "fraction", order, count, 0, 0, False
            if normal and mantissa != 2:
                mantissa, taken = self._against(self.mantissa, taken, mantissa, d)
            return "fraction", order, count, mantissa, taken, normal
        if where in ("e", "e+", "e-", "x+", "x-"):
            sign = "x-" if where in ("e-", "x-") else "x+"
            return self.exponent_digit(sign, state if where[0] == "x" else (sign, 0, 0, mantissa, 0, True), d)
        return None

    def exponent_digit(self, sign: str, state: _At, d: int) -> _At | None:
        """``count`` digits are read, leading zeros aside; ``order`` and ``taken`` compare them with power and limit."""
        _, order, count, mantissa, limit, _ = state
        if mantissa == 2:  # zero, whatever the exponent
            return sign, 0, 0, 2, 0, True
        if count == 0 and d == 0:
            return sign, 0, 0, mantissa, 0, True
        if count >= len(self.largest):
            return None
        if not order and count < len(self.power):
            order = (d > int(self.power[count])) - (d < int(self.power[count]))
        if not limit:
            limit = (d > int(self.largest[count])) - (d < int(self.largest[count]))
        if count + 1 == len(self.largest) and limit > 0:
            return None
        return sign, order, count + 1, mantissa, limit, True

    def verdict(self, state: _At) -> int | None:
        """-1, 0 or 1 for a whole number's text; ``None``: more must follow."""
        where, order, count, mantissa, _, _ = state
        bound_positive = bool(self.mantissa)
        if where == "zero":
            return -1 if bound_positive else 0
        if where == "whole":
            order = self.whole_order(order, count)
            return order or (-1 if self.fraction else 0)
        if where == "fraction":
            return order or (-1 if count < len(self.fraction) else 0)
        if where not in ("x+", "x-"):
            return None
        if mantissa == 2:
            return -1 if bound_positive else 0
        if not bound_positive:
            return 1
        size = (count > len(self.power)) - (count < len(self.power)) or order  # |exponent| against the bound's
        if count == 0:
            against = -(self.exponent > 0) + (self.exponent < 0)
        elif (sign := 1 if where == "x+" else -1) != (1 if self.exponent > 0 else -1) or not self.exponent:
            against = sign
        else:
            against = size * sign
        return against or mantissa
