"""Reads back the rows that a job wrote, from JSONL or CSV.

Invariants: one row is held at a time; a row of CSV comes back as the value that was written, except for what CSV
cannot tell apart: an empty text is null, and where a field may be a text or a number it is a text.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from radixrt.jobs.target import Target, resolved

_ASIDE = ("parts", "confidence", "evidence")


def read_rows(path: str | Path, target: Target) -> Iterator[dict[str, Any]]:
    """The rows of a job's output: ``{"id", "value", ...}``."""
    if Path(path).suffix.lower() != ".csv":
        with open(path, encoding="utf-8") as file:
            yield from map(json.loads, file)
        return
    schema = target.schema or {"type": "string"}
    properties: Mapping[str, Any] = {}
    if target.fields:
        properties = resolved(schema, schema).get("properties", {})
    with open(path, encoding="utf-8", newline="") as file:
        csv.field_size_limit(max(csv.field_size_limit(), 2**31 - 1))
        rows = csv.reader(file)
        head = next(rows)
        aside = [name for name in _ASIDE if name in head[1 + max(len(target.fields), 1) :]]
        for cells in rows:
            values = cells[1 : len(cells) - len(aside)]
            row: dict[str, Any] = {"id": cells[0]}
            if target.fields:
                row["value"] = {
                    name: _value(cell, properties.get(name, True), schema) for name, cell in zip(target.fields, values)
                }
            else:
                row["value"] = _value(values[0], schema, schema)
            row |= {name: json.loads(cell) for name, cell in zip(aside, cells[len(cells) - len(aside) :]) if cell}
            yield row


def _value(cell: str, schema: Any, root: Mapping[str, Any]) -> Any:
    if cell == "":
        return None
    try:
        value = json.loads(cell)
    except ValueError:
        return cell
    return cell if _takes_text(schema, root) else value


def _takes_text(schema: Any, root: Mapping[str, Any], depth: int = 0) -> bool:
    """Whether a value of this schema can be a text."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > 16:
        return schema is not False
    inner = [one for name in ("anyOf", "oneOf") for one in schema.get(name, ())]
    if inner:
        return any(_takes_text(one, root, depth + 1) for one in inner)
    if "enum" in schema or "const" in schema:
        return any(isinstance(one, str) for one in schema.get("enum", [schema.get("const")]))
    kinds = schema.get("type", "string")
    return "string" in ([kinds] if isinstance(kinds, str) else kinds)
