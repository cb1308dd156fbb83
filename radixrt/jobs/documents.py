"""Documents: the texts of a JSONL, CSV or parquet file, of text, Markdown and HTML files, or of standard input.

Invariants: documents come in the order of the source, numbered from 0, and the same source gives the same ones; what
is wrong with one of them is its ``problem``, never an exception; no more than about ``max_bytes`` of a source is held
at any time, and of the documents gone by only a digest of each id.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

from radixrt.checks import integer
from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.jobs.html_text import html_to_text
from radixrt.jobs.tables import (
    Columns,
    Found,
    decoded,
    json_records,
    of_csv,
    of_items,
    of_parquet,
    of_records,
    read_lines,
    too_long,
)

FORMATS = ("auto", "jsonl", "csv", "tsv", "parquet", "text", "html", "lines", "folder")
_ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
}
_TABLES = ("jsonl", "csv", "tsv", "parquet")
_MAX_ID = 1_000  # characters
_MAX_BYTES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Document:
    """One document of the input.

    Fields:
        index: its place, from 0. id: from its ``id`` column, its relative path, or its place in the source.
        text: what to read, never empty unless there is a problem. problem: why it cannot be used; ``""``: it can.
    """

    index: int
    id: str
    text: str
    problem: str = ""


def read_documents(
    source: str | os.PathLike[str],
    *,
    format: str = "auto",
    field: str | None = None,
    id_field: str | None = None,
    max_bytes: int = 16 << 20,
) -> Iterator[Document]:
    """The documents of a file, of a folder (all files in it that are not hidden, by relative path) or of ``"-"``.

    Args:
        source: a path, or ``"-"`` for standard input: JSONL if its first line begins with ``{``, else one text a line.
        format: one of ``FORMATS``; ``auto`` goes by the ending of the name, and takes other files for one text.
        field: the column of the text. By default ``text``, or the only column of strings.
        id_field: the column of the ids. By default ``id`` where there is one, else ids are ``line-7`` (a line of
            JSONL or text) or ``row-7`` (a row of CSV or parquet), from 1; in a folder: the relative path.
        max_bytes: a longer file, line or cell is a document with a problem, and passed over without being held.

    Raises:
        InvalidRequest: the source as a whole cannot be read: no such file, no such column, not CSV from its first line.
    """
    path = os.fspath(source)
    if format not in FORMATS:
        raise InvalidRequest("format", f"={shown(format)}{nearest(str(format), FORMATS)}")
    integer("max_bytes", max_bytes, 1, _MAX_BYTES)
    kind = _kind(path, format)
    if kind in ("text", "html", "folder") and (field or id_field):
        name = "field" if field else "id_field"
        raise InvalidRequest(name, f"={shown(field or id_field)}: {_called(path)} has no columns")
    return _numbered(_read(path, kind, field, id_field, max_bytes), max_bytes)


def given_documents(
    items: Iterable[str | Mapping[str, Any] | tuple[str, str]],
    *,
    field: str | None = None,
    id_field: str | None = None,
    max_bytes: int = 16 << 20,
) -> Iterator[Document]:
    """The documents of a Python iterable: texts, ``(id, text)`` or records with columns as in JSONL.

    Raises:
        InvalidRequest: not an iterable of such, or no such column.
    """
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        raise InvalidRequest("source", f"={shown(items)}: must be a path or a list of texts")
    integer("max_bytes", max_bytes, 1, _MAX_BYTES)
    return _numbered(of_items(items, Columns(field, id_field)), max_bytes)


# ---- what all sources have in common


def _numbered(found: Iterator[Found], max_bytes: int) -> Iterator[Document]:
    """Number the documents and check what is wrong with a text or an id wherever they come from."""
    seen: set[bytes] = set()
    for index, each in enumerate(found):
        problem = each.problem
        name, wrong = each.place, ""
        if each.id is not None:
            name, wrong = _id_of(each)
            problem = problem or wrong
        digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
        if digest in seen:
            problem = f"has the id {shown(name)} of an earlier document"
        seen.add(digest)
        problem = problem or _text_problem(each.text, max_bytes)
        yield Document(index, name, "" if problem else each.text, problem)


def _id_of(found: Found) -> tuple[str, str]:
    """The id of a document and what is wrong with it; its place stands for an id that cannot be used."""
    name = found.id
    if isinstance(name, int) and not isinstance(name, bool) and name.bit_length() <= 64:
        return str(name), ""
    if not isinstance(name, str):
        return found.place, f"has the id {shown(name)}, which is neither a string nor an integer of 64 bits"
    if not name or name.isspace():
        return found.place, "has an empty id"
    if len(name) > _MAX_ID:
        return found.place, f"has an id of {len(name):,} characters; at most {_MAX_ID:,} are taken"
    wrong = _surrogate(name)
    return (found.place, f"has an id that {wrong}") if wrong else (name, "")


def _text_problem(text: Any, max_bytes: int) -> str:
    if text is None:
        return "has no text (null)"
    if not isinstance(text, str):
        return f"has {shown(text)} where its text should be"
    wrong = _surrogate(text)
    if wrong:
        return wrong
    if len(text) > max_bytes or (4 * len(text) > max_bytes and len(text.encode()) > max_bytes):
        return too_long(max_bytes)
    place = text.find("\0")
    if place >= 0:
        return f"is binary: it has a zero byte at character {place}"
    return "" if text and not text.isspace() else "is empty"


def _surrogate(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"is not Unicode text: lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
    return ""


# ---- which reader


def _kind(path: str, format: str) -> str:
    """How to read a source, checked as far as it can be without opening it."""
    if path == "-":
        if format in ("parquet", "folder"):
            raise InvalidRequest("format", f"={format}: cannot be read from standard input")
        return "stream" if format == "auto" else format
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InvalidRequest("source", f"={shown(path)}: {_reason(error)}") from None
    if stat.S_ISDIR(mode):
        if format not in ("auto", "folder"):
            raise InvalidRequest("format", f"={format}: {shown(path)} is a folder")
        return "folder"
    if format == "folder":
        raise InvalidRequest("format", f"=folder: {shown(path)} is a file")
    if format != "auto":
        return format
    if not stat.S_ISREG(mode):  # a pipe
        return "stream"
    ending = os.path.splitext(path)[1].lower()
    if ending == ".json":
        either = "format='jsonl' (one object a line) or format='text' (the file is one document)"
        raise InvalidRequest("source", f"={shown(path)}: what is in a .json file? give {either}")
    return _ENDINGS.get(ending, "text")


def _read(path: str, kind: str, field: str | None, id_field: str | None, max_bytes: int) -> Iterator[Found]:
    if kind == "folder":
        yield from _of_folder(path, max_bytes)
    elif kind in ("text", "html") and path != "-":
        yield _of_file(path, Path(path).name, kind, max_bytes)
    elif kind == "parquet":
        yield from of_parquet(path, Columns(field, id_field))
    else:
        with _opened(path) as file:
            yield from _of_stream(file, path, kind, field, id_field, max_bytes)


def _of_stream(
    file: IO[bytes], path: str, kind: str, field: str | None, id_field: str | None, max_bytes: int
) -> Iterator[Found]:
    if kind in ("text", "html"):
        yield _of_bytes(file.read(max_bytes + 1), "document", kind, max_bytes)
        return
    lines = read_lines(file, max_bytes)
    if kind == "stream":
        head = next((line for line in lines if not line.blank), None)
        if head is None:
            return
        lines = chain([head], lines)
        kind = "jsonl" if head.start.lstrip().startswith(b"{") else "lines"
    if kind == "lines" and (field or id_field):
        name = "field" if field else "id_field"
        raise InvalidRequest(name, f"={shown(field or id_field)}: {_called(path)} has no columns")
    if kind == "lines":
        for line in lines:
            if not line.blank:
                text, problem = line.decoded(max_bytes)
                yield Found(f"line-{line.number}", None, text, problem)
    elif kind == "jsonl":
        yield from of_records(json_records(lines, max_bytes), Columns(field, id_field))
    else:
        yield from of_csv(lines, path, kind, Columns(field, id_field), max_bytes)


def _opened(path: str) -> AbstractContextManager[IO[bytes]]:
    if path == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return open(path, "rb")
    except OSError as error:
        raise InvalidRequest("source", f"={shown(path)}: {_reason(error)}") from None


def _called(path: str) -> str:
    return "text from standard input" if path == "-" else shown(path)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# ---- files


def _of_folder(root: str, max_bytes: int) -> Iterator[Found]:
    """Every file of a folder and of those in it, in the order of their path's parts; hidden ones are left out."""
    stack: list[Iterator[str]] = [iter(_entries(root))]
    parts: list[str] = []
    any_file = False
    while stack:
        name = next(stack[-1], None)
        if name is None:
            stack.pop()
            if parts:
                parts.pop()
            continue
        relative = "/".join([*parts, name])
        path = os.path.join(root, *parts, name)
        if os.path.isdir(path) and not os.path.islink(path):
            try:
                stack.append(iter(_entries(path)))
                parts.append(name)
                continue
            except InvalidRequest as error:
                found = Found(_printable(relative), None, None, f"is a folder that cannot be read: {error}")
        else:
            kind = _ENDINGS.get(os.path.splitext(name)[1].lower(), "text")
            found = _of_file(path, relative, kind, max_bytes)
        any_file = True
        yield found
    if not any_file:
        raise InvalidRequest("source", f"={shown(root)}: there are no files in this folder")


def _entries(path: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(path) if not name.startswith("."))
    except OSError as error:
        raise InvalidRequest("source", f"={shown(path)}: {_reason(error)}") from None


def _of_file(path: str, name: str, kind: str, max_bytes: int) -> Found:
    place = _printable(name)
    if kind in _TABLES:
        return Found(place, None, None, f"is a table ({kind}): give it as an input of its own")
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would wait for ever
            return Found(place, None, None, "is not a regular file")
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        return Found(place, None, None, f"cannot be read: {_reason(error)}")
    return _of_bytes(data, place, kind, max_bytes)


def _of_bytes(data: bytes, place: str, kind: str, max_bytes: int) -> Found:
    if len(data) > max_bytes:
        return Found(place, None, None, too_long(max_bytes))
    zero = data.find(b"\0")
    if zero >= 0:
        return Found(place, None, None, f"is binary: it has a zero byte at offset {zero:,}")
    bom = 3 if data.startswith(codecs.BOM_UTF8) else 0
    text, problem = decoded(data[bom:], bom)
    if kind == "html" and not problem:
        text = html_to_text(text)
        problem = "" if text else "is empty: the page has no text"
    return Found(place, None, text, problem)


def _printable(name: str) -> str:
    """A path as text that UTF-8 can hold, whatever bytes its name is made of."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
