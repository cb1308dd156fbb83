"""Checks of single values: each gives back the plain Python value, or raises one InvalidRequest that names the field.

Invariants: nothing but InvalidRequest is raised, whatever the value; numbers of other libraries (numpy's, say) count as
numbers, true and false do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from radixrt.errors import InvalidRequest, shown

K = TypeVar("K")
V = TypeVar("V")

MOST_ITEMS = 2**27  # of a list: more is a mistake, not a request


class FrozenMapping(Mapping[K, V]):
    """A mapping that cannot change: equal to a dict of the same items, hashable, copied and pickled by value."""

    __slots__ = ("_items",)
    _items: dict[K, V]

    def __init__(self, items: Mapping[K, V]) -> None:
        object.__setattr__(self, "_items", dict(items))

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a {type(self).__name__} cannot be changed")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self._items),)


def real(value: object) -> float | None:
    """A real number as a float, infinite where it is too large for one; ``None`` for everything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def integer(name: str, value: Any, low: int, high: int, *, optional: bool = False) -> Any:
    """An integer from ``low`` to ``high``, as an ``int``."""
    if (
        type(value) is int and low <= value <= high
    ):  # as nearly all are; a look at the numbers' abstract classes takes longer
        return value
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequest(name, f"={shown(value)}: must be an integer{' or nothing' if optional else ''}")
    number = int(value)
    if number < low:
        raise InvalidRequest(name, f"={shown(number)}: must be at least {low}")
    if number > high:
        raise InvalidRequest(name, f"={shown(number)}: must be at most {high}")
    return number


def number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    """A finite number from ``low`` to ``high``, as a ``float``; ``above``: ``low`` itself is too low."""
    if type(value) is float and low < value <= high:  # as nearly all are
        return value
    found = real(value)
    if found is None or (isinstance(value, float) and not math.isfinite(found)) or math.isnan(found):
        raise InvalidRequest(name, f"={shown(value)}: must be a finite number")
    if found < low or found > high or (above and found == low):
        limit = f"must be {'above' if above else 'at least'} {low:g} and at most {high:g}"
        raise InvalidRequest(name, f"={shown(value)}: {limit}")
    return found


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(name, f"={shown(value)}: must be true or false")
    return value


def items(name: str, value: Any) -> tuple[Any, ...]:
    """The elements of a list, tuple, range or one-dimensional array."""
    array = type(value).__module__ == "numpy" and hasattr(value, "ndim")
    if array and value.ndim != 1:
        raise InvalidRequest(name, f": must be a list, not an array of {value.ndim} dimensions")
    if isinstance(value, (str, bytes, bytearray)) or not (array or isinstance(value, Sequence)):
        raise InvalidRequest(name, f"={shown(value)}: must be a list")
    if length(name, value) > MOST_ITEMS:
        raise InvalidRequest(name, f" has {len(value)} elements: at most {MOST_ITEMS} are taken")
    try:
        return tuple(value.tolist() if array else value)
    except Exception as error:
        raise InvalidRequest(
            name, f": cannot be read as a list ({type(error).__name__}: {shown(str(error))})"
        ) from None


def length(name: str, value: Any) -> int:
    """``len(value)``, for values whose length may be wrong or too large to be one."""
    try:
        return len(value)
    except OverflowError:
        raise InvalidRequest(name, f" has far too many elements: at most {MOST_ITEMS} are taken") from None
    except Exception as error:
        raise InvalidRequest(name, f": has no length ({type(error).__name__}: {shown(str(error))})") from None


def strings(name: str, value: Any) -> tuple[str, ...]:
    """One string or a list of them, none of them empty."""
    values = (value,) if isinstance(value, str) else items(name, value)
    for item in values:
        if not isinstance(item, str) or not item:
            raise InvalidRequest(name, f" has {shown(item)}: each must be a string of at least one character")
    return values
