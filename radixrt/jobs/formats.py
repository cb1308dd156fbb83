"""How a row stands in an output file: a header and a function from the row's JSON to its bytes.

Invariants: the bytes are a function of the row alone; what the csv module writes, it reads again.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def csv_format(fields: Sequence[str], extra: Sequence[str] = ()) -> tuple[bytes, Callable[[bytes], bytes]]:
    """Header and row formatter of a CSV output. ``null`` is an empty cell; what is not a string is written as JSON.

    The first column is the document's id; a field that is named like another column is "value.NAME".

    Args:
        fields: the properties of the values; none: a value is one scalar, in the column "value".
        extra: further parts of a row ("parts", "confidence", "evidence"), written as JSON.
    """

    def line(cells: Iterable[str]) -> bytes:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)
        return text.getvalue().encode("utf-8", "backslashreplace")

    def cell(value: Any) -> str:
        return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def row(data: bytes) -> bytes:
        item = json.loads(data)
        value = item["value"]
        values = [value.get(name) for name in fields] if fields else [value]
        return line([item["id"], *map(cell, values), *(cell(item.get(name)) for name in extra)])

    names = [f"value.{name}" if name in ("id", *extra) else name for name in fields] if fields else ["value"]
    return line(["id", *names, *extra]), row


def jsonl_format() -> tuple[bytes, Callable[[bytes], bytes]]:
    return b"", lambda data: data + b"\n"
