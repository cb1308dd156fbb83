"""What is kept of the rows of a job, so that a page can say what its fields hold: counts and samples of a bounded size.

Invariants: rows are read once, one at a time; the same rows in the same order leave the same survey.
"""

from __future__ import annotations

import datetime
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from radixrt.jobs.leaves import WHOLE, general

MOST_FIELDS = 200
MOST_VALUES = 2_000  # distinct ones of a field that are counted
MOST_NUMBERS = 4_096  # sampled of a field
MOST_REASONS = 500  # kinds of errors that are told apart

_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|(?<![\w-])\d+(?:[.,:-]\d+)*")  # what differs between errors of one kind


@dataclass(slots=True)
class Field:
    """What is kept of all values of one field."""

    owners: str  # the path of the objects or lists that hold it
    filled: int = 0
    numbers: int = 0
    whole: bool = True  # all numbers are integers
    texts: int = 0
    booleans: int = 0
    lists: int = 0
    objects: int = 0
    dates: int = 0
    values: Counter[str] = field(default_factory=Counter)
    more: bool = False  # there were more values than are counted
    sample: list[float] = field(default_factory=list)
    sure: float = 0.0
    judged: int = 0

    def add(self, value: Any, random: Random) -> None:
        if isinstance(value, bool):
            self.booleans += 1
            self._count("true" if value else "false")
        elif isinstance(value, (int, float)):
            self.numbers += 1
            self.whole = self.whole and (isinstance(value, int) or value.is_integer())
            self._sample(value, random)
        elif isinstance(value, list):
            self.lists += 1
            self._sample(len(value), random)
        else:
            self.texts += 1
            day = _day(value)
            if day is not None:
                self.dates += 1
                self._sample(day, random)
            self._count(value)

    def _count(self, value: str) -> None:
        key = value if len(value) <= 200 else value[:200] + "…"
        if key in self.values or len(self.values) < MOST_VALUES:
            self.values[key] += 1
        else:
            self.more = True

    def _sample(self, value: float, random: Random) -> None:
        seen = self.numbers + self.lists + self.dates
        if len(self.sample) < MOST_NUMBERS:
            self.sample.append(_finite(value))
        elif (at := random.randrange(seen)) < MOST_NUMBERS:
            self.sample[at] = _finite(value)


class Survey:
    """Reads rows and error rows, and keeps of them what a page shows."""

    def __init__(self, fields: Sequence[str] = ()) -> None:
        self.rows = self.split = self.quoted = 0
        self.fields: dict[str, Field] = {name: Field("") for name in fields[:MOST_FIELDS]}
        self.owners: Counter[str] = Counter()
        self.cut = len(fields) > MOST_FIELDS
        self.failed = 0
        self.reasons: dict[str, list[str]] = {}  # a reason: ids of the first that failed for it
        self.failures: Counter[str] = Counter()
        self._random = Random(0)

    def row(self, row: Mapping[str, Any]) -> None:
        self.rows += 1
        self.split += row.get("parts", 1) > 1
        self.quoted += "evidence" in row
        value = row.get("value")
        self.owners[""] += not isinstance(value, Mapping)  # those count themselves
        self._walk(value, "", "")
        for path, share in (row.get("confidence") or {}).items():
            found = self.fields.get(general(path))
            if found is not None and isinstance(share, (int, float)):
                found.sure += share
                found.judged += 1

    def error(self, row: Mapping[str, Any]) -> None:
        self.failed += 1
        reason = _PARTICULAR.sub("…", str(row.get("error", "")))[:300]
        if reason not in self.reasons:
            if len(self.reasons) >= MOST_REASONS:
                reason = "for other reasons"
            self.reasons.setdefault(reason, [])
        self.failures[reason] += 1
        if len(self.reasons[reason]) < 3:
            self.reasons[reason].append(f"{row.get('id')}: {row.get('error', '')}")

    def _walk(self, value: Any, path: str, owners: str) -> None:
        """``owners`` is the path whose count is the field's whole."""
        element = path.endswith("[]")
        if isinstance(value, Mapping):
            self.owners[path] += 1
            if path and not element and (known := self._field(path, owners)) is not None:
                known.filled += 1
                known.objects += 1
            for name, inner in value.items():
                self._walk(inner, f"{path}.{name}" if path else str(name), path)
            return
        if not element:
            known = self._field(path or WHOLE, owners)
            if known is not None and value not in (None, ""):
                known.filled += value != []
                known.add(value, self._random)
        elif not isinstance(value, list) and value is not None:  # of a list of scalars
            self.owners[path] += 1
            known = self._field(path, path)
            if known is not None:
                known.filled += 1
                known.add(value, self._random)
        if isinstance(value, list):
            for each in value:
                self._walk(each, f"{path}[]", f"{path}[]")

    def _field(self, path: str, owners: str) -> Field | None:
        known = self.fields.get(path)
        if known is None:
            if len(self.fields) >= MOST_FIELDS:
                self.cut = True
                return None
            known = self.fields[path] = Field(owners)
        return known

    def share(self, path: str) -> float:
        """How often the field was filled where it could be."""
        whole = self.owners[self.fields[path].owners]
        return self.fields[path].filled / whole if whole else 0.0


def _day(text: str) -> int | None:
    if _DATE.fullmatch(text) is None:
        return None
    try:
        return datetime.date.fromisoformat(text).toordinal()
    except ValueError:
        return None


def _finite(value: float) -> float:
    """A number that can be drawn, also where JSON had one too large for a float."""
    try:
        number = float(value)
    except OverflowError:
        return 1e300 if value > 0 else -1e300
    return 0.0 if math.isnan(number) else min(max(number, -1e300), 1e300)
