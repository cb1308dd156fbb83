"""Tables of documents: the lines of a stream, JSONL, CSV and parquet, a document for each line or row.

Invariants: a line or row that cannot be used is a document with a problem, and those after it are read as if it were
not there; no line, cell or CSV record larger than the limit is held; columns are chosen once for a table.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from typing import IO, Any

from radixrt.errors import InvalidRequest, nearest, shown

_LOOKED_AT = 100  # JSONL lines without the column before the column is taken to be a mistake
_NOTHING = object()  # what an empty iterable begins with
_PIECE = 2**20  # bytes of an overlong line that are held while it is passed over


@dataclass(frozen=True, slots=True)
class Found:
    """A document as its reader has it: its id (``None``: ``place`` is the id), its text or what is wrong with it."""

    place: str
    id: Any
    text: Any
    problem: str = ""


def too_long(max_bytes: int) -> str:
    return f"is longer than {max_bytes:,} bytes"


def decoded(data: bytes, offset: int) -> tuple[str, str]:
    """The text of UTF-8, and what is wrong; ``offset``: the place of the data in its file."""
    try:
        return data.decode("utf-8"), ""
    except UnicodeDecodeError as error:
        return "", f"is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset + error.start:,}"


@dataclass(slots=True)
class Columns:
    """Which column holds the text and which the id: as asked for, or as the first record that tells has them."""

    field: str | None
    id_field: str | None

    def choose(self, names: Sequence[str], texts: Sequence[str]) -> bool:
        """Choose the column of the text; ``texts``: the columns of strings. ``False``: this record cannot tell.

        Raises:
            InvalidRequest: more than one could be meant.
        """
        if self.field is None and "text" in names:
            self.field = "text"
        if self.field is None:
            others = [name for name in texts if name not in ("id", self.id_field)]
            if len(others) > 1:
                raise InvalidRequest("field", f": none is given, and the columns are {_listed(names)}; name one")
            self.field = others[0] if others else None
        return self.field in names

    def missing(self, names: Sequence[str]) -> InvalidRequest:
        """The error for a source that does not have the column of the text."""
        if self.field is None:
            return InvalidRequest("field", f": no column holds text; the columns are {_listed(names)}")
        return _no_column("field", self.field, names)


def _no_column(name: str, column: str, names: Sequence[str]) -> InvalidRequest:
    close = nearest(column, names) if "did you mean" in nearest(column, names) else ""
    return InvalidRequest(name, f"={shown(column)}: no such column; the columns are {_listed(names)}{close}")


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(shown(name, 40) for name in names[:20])
    return (listed or "none") + (f" and {len(names) - 20} more" if len(names) > 20 else "")


# ---- lines


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file; ``data`` is ``None`` where it is too long, and ``start`` how it begins. ``quotes``: how many."""

    number: int
    offset: int
    data: bytes | None
    start: bytes
    quotes: int = 0

    @property
    def blank(self) -> bool:
        return self.data is not None and not self.data.strip()

    def decoded(self, max_bytes: int) -> tuple[str, str]:
        if self.data is None:
            return "", too_long(max_bytes)
        return decoded(self.data.rstrip(b"\r\n"), self.offset)


def read_lines(file: IO[bytes], max_bytes: int) -> Iterator[Line]:
    """The lines of a file, numbered from 1. The rest of one that is too long is read and forgotten."""
    number = offset = 0
    while data := file.readline(max_bytes + 2):  # the text and its line end
        number += 1
        begin, offset = offset, offset + len(data)
        if len(data.rstrip(b"\r\n")) <= max_bytes and (data.endswith(b"\n") or len(data) < max_bytes + 2):
            if number == 1 and data.startswith(codecs.BOM_UTF8):
                data, begin = data[3:], begin + 3
            yield Line(number, begin, data, data[:64])
            continue
        start, quotes, last = data[:64].removeprefix(codecs.BOM_UTF8), data.count(b'"'), data
        del data
        while not last.endswith(b"\n") and (last := file.readline(_PIECE)):
            offset += len(last)
            quotes += last.count(b'"')
        yield Line(number, begin, None, start, quotes)


# ---- JSONL, and records in memory


def json_records(lines: Iterable[Line], max_bytes: int) -> Iterator[tuple[str, Any, str]]:
    """``(place, record, problem)`` of each line that is not blank."""
    for line in lines:
        if line.blank:
            continue
        text, problem = line.decoded(max_bytes)
        record = None
        if not problem:
            try:
                record = json.loads(text, object_pairs_hook=_unique)
            except RecursionError:
                problem = "is not JSON that can be read: nested too deeply"
            except ValueError as error:
                problem = f"is not JSON: {error}"
            else:
                problem = "" if isinstance(record, dict) else f"must be a JSON object, not {shown(record)}"
        yield f"line-{line.number}", record, problem


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"the key {shown(twice)} stands twice in one object")
    return record


def of_items(items: Iterable[Any], columns: Columns) -> Iterator[Found]:
    def records() -> Iterator[tuple[str, Any, str]]:
        for number, item in enumerate(chain([first], rest), 1):
            wrong = "" if isinstance(item, Mapping) else f"must be a mapping, as the first one is, not {shown(item)}"
            yield f"row-{number}", item, wrong

    rest = iter(items)
    first = next(rest, _NOTHING)
    if isinstance(first, Mapping):
        yield from of_records(records(), columns)
        return
    if (columns.field or columns.id_field) and first is not _NOTHING:
        raise InvalidRequest("field" if columns.field else "id_field", f": {shown(first)} has no columns")
    for number, item in enumerate(() if first is _NOTHING else chain([first], rest), 1):
        if isinstance(item, tuple) and len(item) == 2:
            yield Found(f"row-{number}", item[0], item[1])
        elif isinstance(item, str):
            yield Found(f"row-{number}", None, item)
        else:
            raise InvalidRequest(f"source[{number - 1}]", f"={shown(item)}: must be a text or (id, text)")


def of_records(records: Iterator[tuple[str, Any, str]], columns: Columns) -> Iterator[Found]:
    """The documents of records. Until one of them has the column, those without it are held back: their name may be
    wrong, and then there is nothing to read at all.
    """
    waiting: list[Found] = []
    names: list[str] | None = None  # of the first record
    known = False
    for place, record, problem in records:
        if problem:
            found = Found(place, None, None, problem)
        else:
            texts = () if known else [name for name, value in record.items() if isinstance(value, str)]
            here = columns.field in record if known else columns.choose(list(record), texts)
            known = known or here
            names = list(record) if names is None else names
            found = _record(place, record, columns, here)
        if known:
            yield from waiting
            waiting = []
            yield found
            continue
        waiting.append(found)
        if names is not None and len(waiting) >= _LOOKED_AT:
            raise columns.missing(names)
        if len(waiting) >= _LOOKED_AT:  # nothing is JSON: each says so
            yield from waiting
            waiting = []
    if names is not None and not known:
        raise columns.missing(names)
    yield from waiting


def _record(place: str, record: Mapping[str, Any], columns: Columns, has_text: bool) -> Found:
    name, problem = record.get(columns.id_field or "id"), ""
    if not has_text:
        problem = f"has no column {shown(columns.field or 'text')}; it has {_listed([str(key) for key in record])}"
    elif name is None and columns.id_field is not None:
        problem = f"has no id in the column {shown(columns.id_field)}"
    return Found(place, name, record[str(columns.field)] if has_text else None, problem)


# ---- CSV


class _CsvLines:
    """The decoded lines that ``csv.reader`` reads, and what is wrong with those of the record it is reading."""

    def __init__(self, lines: Iterable[Line], max_bytes: int) -> None:
        self._lines = iter(lines)
        self._max_bytes = max_bytes
        self.problem = ""  # of the record
        self.quotes = 0  # in the record: an odd number of them leaves a field open
        self.held = 0  # bytes of the record

    def begin(self) -> None:
        """The next line begins a record."""
        self.problem, self.quotes, self.held = "", 0, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        if line.data is None:
            self.quotes += line.quotes
            raise csv.Error(too_long(self._max_bytes))
        self.quotes += line.data.count(b'"')
        self.held += len(line.data)
        if self.held > 2 * self._max_bytes:
            raise csv.Error(too_long(self._max_bytes))
        if not self.problem:
            _, self.problem = decoded(line.data, line.offset)
        return line.data.decode("utf-8", "replace")

    def skip(self) -> None:
        """Pass over what is left of a record that cannot be read: up to the line in which its quotes close."""
        while self.quotes % 2 and (line := next(self._lines, None)) is not None:
            self.quotes += line.quotes if line.data is None else line.data.count(b'"')


def _csv_rows(lines: _CsvLines, delimiter: str, max_bytes: int) -> Iterator[tuple[list[str], str]]:
    """The records that are not blank, and what is wrong with each."""
    # The limit is the whole process's: it is raised and never lowered, so that no other reader fails for it.
    csv.field_size_limit(max(csv.field_size_limit(), max_bytes))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        lines.begin()
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            said = str(error)
            if said == "unexpected end of data":
                said = "a quoted field is never closed"
            if "field larger than" in said:
                said = too_long(max_bytes)
            lines.skip()
            yield [], said if said.startswith("is longer") else f"is not CSV: {said}"
            continue
        if row:
            yield row, lines.problem


def of_csv(lines: Iterator[Line], path: str, kind: str, columns: Columns, max_bytes: int) -> Iterator[Found]:
    first = next(lines, None)
    if first is None:
        raise InvalidRequest("source", f"={shown(path)}: is empty; its first line must name the columns")
    head = first.data or b""
    delimiter = "\t" if kind == "tsv" else next((mark for mark in ",;\t" if mark.encode() in head), ",")
    rows = _csv_rows(_CsvLines(chain([first], lines), max_bytes), delimiter, max_bytes)
    names, problem = next(rows, ([], "its first line must name the columns"))
    if problem:
        raise InvalidRequest("source", f"={shown(path)}: the line of the column names {problem}")
    id_field = columns.id_field or ("id" if "id" in names else None)
    if not columns.choose(names, names):
        raise columns.missing(names)
    if id_field is not None and id_field not in names:
        raise _no_column("id_field", id_field, names)
    for name in (columns.field, id_field):
        if names.count(str(name)) > 1:
            raise InvalidRequest("source", f"={shown(path)}: has {names.count(str(name))} columns named {shown(name)}")
    text_at, id_at = names.index(str(columns.field)), None if id_field is None else names.index(id_field)
    for number, (row, problem) in enumerate(rows, 1):
        whole = len(row) == len(names)
        if not problem and not whole:
            problem = f"has {len(row)} cells, and the header {len(names)}"
        name = row[id_at] if id_at is not None and whole else None
        if problem and name and "\ufffd" in name:  # what is not UTF-8 may be the id
            name = None
        yield Found(f"row-{number}", name, None if problem else row[text_at], problem)


# ---- parquet


def of_parquet(path: str, columns: Columns) -> Iterator[Found]:
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise InvalidRequest("source", f"={shown(path)}: parquet needs pyarrow: pip install radixrt[parquet]") from None
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow's own, or the system's
        raise InvalidRequest("source", f"={shown(path)}: is no parquet file: {shown(str(error))}") from None
    with file:
        schema = file.schema_arrow
        names = list(schema.names)
        texts = [
            name for name in dict.fromkeys(names) if names.count(name) == 1 and "string" in str(schema.field(name).type)
        ]
        id_field = columns.id_field or ("id" if "id" in names else None)
        if not columns.choose(names, texts):
            raise columns.missing(names)
        if id_field is not None and id_field not in names:
            raise _no_column("id_field", id_field, names)
        wanted = [str(columns.field)] + ([] if id_field in (None, columns.field) else [str(id_field)])
        number = 0
        try:
            for batch in file.iter_batches(batch_size=64, columns=wanted):
                ids = None if id_field is None else batch.column(batch.schema.get_field_index(id_field))
                cells = batch.column(batch.schema.get_field_index(columns.field))
                for at in range(batch.num_rows):
                    number += 1
                    name = None if ids is None else ids[at].as_py()
                    missing = columns.id_field is not None and name is None
                    problem = f"has no id in the column {shown(columns.id_field)}" if missing else ""
                    yield Found(f"row-{number}", name, cells[at].as_py(), problem)
        except InvalidRequest:
            raise
        except Exception as error:
            raise InvalidRequest(
                "source", f"={shown(path)}: cannot be read after row {number}: {shown(str(error))}"
            ) from None
