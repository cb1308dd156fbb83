"""Scores rows against a gold file, field by field.

Invariants: rows are read one at a time, and of the gold file only where each row stands is kept; a field that is absent
counts as null; the order of a list does not count, how often an element stands in it does.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from radixrt.errors import InvalidRequest, shown

TOLERANCE = 1e-6  # of numbers: of the gold one, or absolute below 1
MOST_FIELDS = 1_000
MOST_UNLIKE = 1_000  # elements of one list that are compared one by one


@dataclass(slots=True)
class FieldScore:
    """Of one field; ``items[].price`` are the prices of all elements of ``items``, ``items[]`` whole elements.

    Fields:
        documents: rows that were compared.
        right: rows in which the field is right as a whole; null where gold has null is right.
        matched: values that are in both; predicted, expected: values that are in the row, in the gold row.
    """

    path: str
    documents: int = 0
    right: int = 0
    matched: int = 0
    predicted: int = 0
    expected: int = 0

    @property
    def accuracy(self) -> float:
        return self.right / self.documents if self.documents else 1.0

    @property
    def precision(self) -> float:
        return self.matched / self.predicted if self.predicted else 1.0

    @property
    def recall(self) -> float:
        return self.matched / self.expected if self.expected else 1.0

    @property
    def f1(self) -> float:
        both = self.predicted + self.expected
        return 2 * self.matched / both if both else 1.0


@dataclass(slots=True)
class Score:
    """What a comparison found.

    Fields:
        documents: rows of the gold file; right: those whose row is right in every field.
        missing: gold rows without a row, each of which counts as a row of nulls; extra: rows that gold does not have.
    """

    documents: int = 0
    right: int = 0
    missing: int = 0
    extra: int = 0
    fields: dict[str, FieldScore] = field(default_factory=dict)

    def __str__(self) -> str:
        """A table for a terminal."""
        wide = max([len(path) for path in self.fields] + [5])
        lines = [f"{'field':<{wide}}  right     precision  recall  F1"]
        for path, found in self.fields.items():
            lines.append(
                f"{path:<{wide}}  {found.accuracy:7.1%}    {found.precision:7.1%} {found.recall:7.1%} {found.f1:7.1%}"
            )
        left = f", {self.missing:,} without a row" if self.missing else ""
        more = f"; {self.extra:,} rows are not in it" if self.extra else ""
        return "\n".join([*lines, f"{self.right:,} of {self.documents:,} gold rows right in every field{left}{more}"])


class Gold:
    """A gold file: JSONL rows ``{"id", "value"}``.

    Raises:
        InvalidRequest: a line is no such row, or an id stands twice; names the line.
        OSError: the file cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._places: dict[bytes, int] = {}
        with open(path, "rb") as file:
            place = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    key = _key(self._row(line, number)["id"])
                    if key in self._places:
                        raise InvalidRequest("gold", f": {path}, line {number}: its id stands on an earlier line too")
                    self._places[key] = place
                place += len(line)
        if not self._places:
            raise InvalidRequest("gold", f"={shown(path)}: has no rows")

    def __len__(self) -> int:
        return len(self._places)

    def score(self, rows: Iterable[Mapping[str, Any]]) -> Score:
        """Compare rows (``{"id", "value", ...}``) with the gold ones of the same id."""
        result = Score(documents=len(self))
        left = dict(self._places)
        with open(self._path, "rb") as file:
            for row in rows:
                place = left.pop(_key(row["id"]), None)
                if place is None:
                    result.extra += 1
                else:
                    compare(result, row["value"], self._at(file, place))
            result.missing = len(left)
            for place in left.values():
                compare(result, None, self._at(file, place))
        result.fields = dict(sorted(result.fields.items(), key=lambda item: _order(list(result.fields), item[0])))
        return result

    def _at(self, file: BinaryIO, place: int) -> Any:
        file.seek(place)
        return self._row(file.readline(), 0)["value"]

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        where = f": {self._path}, line {number}:"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # not UTF-8 is one too
            raise InvalidRequest("gold", f"{where} not JSON: {shown(str(error))}") from None
        if not isinstance(row, dict) or "id" not in row or "value" not in row:
            raise InvalidRequest("gold", f'{where} must be {{"id": ..., "value": ...}}, not {shown(row)}')
        return row


def compare(result: Score, predicted: Any, expected: Any) -> None:
    """Add one row to ``result``."""
    found, wanted = dict(leaves(predicted)), dict(leaves(expected))
    whole = True
    for path in {**wanted, **found}:
        if path not in result.fields:
            if len(result.fields) >= MOST_FIELDS:
                continue
            # a field that first stands here was null, and rightly so, in all rows before
            result.fields[path] = FieldScore(path, _compared(result), _compared(result))
        score = result.fields[path]
        have, want = found.get(path, []), wanted.get(path, [])
        same = matches(have, want)
        score.matched += same
        score.predicted += len(have)
        score.expected += len(want)
        right = same == len(have) == len(want)
        score.right += right
        whole = whole and right
    for path, score in result.fields.items():
        score.documents += 1
        score.right += path not in found and path not in wanted
    result.right += whole


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """The values of each field: of a scalar one or, where it is null, none; of a list its elements, and of objects in it
    their fields too."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, (list, tuple)):
        path += "[]"
        yield path, list(value)
        inside: dict[str, list[Any]] = {}
        for element in value:
            if isinstance(element, (Mapping, list, tuple)):
                for name, values in leaves(element, path):
                    if name != path:
                        inside.setdefault(name, []).extend(values)
        yield from inside.items()
    elif path or value is not None:  # a row that is missing has no fields
        yield path or "value", [] if value is None else [value]


def equal(one: Any, other: Any) -> bool:
    """Text by its letters and digits (case, spaces and forms of Unicode do not count), numbers within 1e-6, lists in any order."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return one == other or abs(one - other) <= TOLERANCE * max(1.0, abs(other))
    if isinstance(one, str) and isinstance(other, str):
        return normal(one) == normal(other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(equal(one.get(name), other.get(name)) for name in {**one, **other})
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return matches(one, other) == len(one) == len(other)
    return one is None and other is None


def matches(have: Sequence[Any], want: Sequence[Any]) -> int:
    """How many elements of two lists can be paired, each with an equal one."""
    # those that are the same when written down first, in linear time; what tolerance there is, is for the rest
    keys, wanted = [_written(value) for value in have], [_written(value) for value in want]
    shared = Counter(keys) & Counter(wanted)
    count = sum(shared.values())
    others = _without(want, wanted, shared)[:MOST_UNLIKE]
    for value in _without(have, keys, shared)[:MOST_UNLIKE]:
        for at, other in enumerate(others):
            if equal(value, other):
                del others[at]
                count += 1
                break
    return count


def normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _without(values: Sequence[Any], keys: Sequence[str], shared: Counter[str]) -> list[Any]:
    left, rest = Counter(shared), []
    for value, key in zip(values, keys):
        if left[key] > 0:
            left[key] -= 1
        else:
            rest.append(value)
    return rest


def _written(value: Any) -> str:
    return json.dumps(normal(value) if isinstance(value, str) else value, sort_keys=True, ensure_ascii=False)


def _compared(result: Score) -> int:
    return max((score.documents for score in result.fields.values()), default=0)


def _order(paths: list[str], path: str) -> tuple[int, str]:
    """Fields as they first came, those inside of a list behind it."""
    top = path.split("[]")[0]
    return next(at for at, other in enumerate(paths) if other.split("[]")[0] == top), path


def _key(id: Any) -> bytes:
    return hashlib.blake2b(str(id).encode("utf-8", "surrogatepass"), digest_size=16).digest()
