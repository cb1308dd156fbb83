"""Journal owns what a job has written: the output, the errors file and the folder ``OUTPUT.job`` beside them.

    OUTPUT               rows                          OUTPUT.job/lock           flock, with the pid of who holds it
    OUTPUT.errors.jsonl  documents without a row       OUTPUT.job/settings.json  what the rows depend on, and "finished"
                                                       OUTPUT.job/journal.jsonl  every finished document, as it finished

Invariants:
- A document is finished when its line stands whole in the journal; a line is one ``write`` and carries a checksum.
- Output and errors file are functions of the journal (and of the order): opening compares them with it, cuts what is more
  or differs, and writes what is missing. So a process may end after any byte, of any of the files.
- The journal is synced before the output, and both at least every ``SYNC_ROWS`` rows or ``SYNC_SECONDS``; a power cut
  costs at most what came after, and the first line of the journal that is not whole ends it.
- ``settings.json`` is replaced as a whole, and says "finished" before the journal is removed. A finished job may go on
  with documents that were added behind its last one (``extend``): the journal is of those alone.
- In memory: 8 bytes a document (where its line begins).
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from radixrt.errors import InvalidRequest, RadixrtError, shown
from radixrt.jobs.derived import Derived, write_all
from radixrt.jobs.formats import jsonl_format

SYNC_ROWS = 64
SYNC_SECONDS = 1.0
_VERSION = 1
_DIGEST = 16  # bytes
_ROW, _ERROR = b"r", b"e"

Row = dict[str, Any]


class JobStopped(RadixrtError):
    """A job ended before its last document. What is finished is kept: the same call goes on from there."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and requests that one document took."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    requests: int = 0
    parts: int = 0
    retries: int = 0
    unique: int = 0  # prompt tokens that no earlier request of the job could have computed

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(a + b for a, b in zip(_counts(self), _counts(other))))


@dataclass(frozen=True, slots=True)
class Finished:
    """What a finished job leaves in ``settings.json``."""

    documents: int
    rows: int
    errors: int
    usage: Usage
    input: str  # digest of all documents, in order
    output_bytes: int
    errors_bytes: int = 0


def digest(*parts: str | bytes) -> str:
    """A stable digest of strings, whatever stands in them."""
    total = blake2b(digest_size=_DIGEST)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


def dump(row: Row) -> bytes:
    """A row as it stands in a JSONL file, without the newline."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace")


class Journal:
    """The files of one job. Use it as a context manager, or call :meth:`close`.

    Args:
        output: where the rows go. Beside it stand ``OUTPUT.errors.jsonl`` (where there are errors) and ``OUTPUT.job/``.
        settings: what the rows depend on, name -> value (text, number or digest).
        order: "input" or "completed".
        format: header and row formatter of the output.
        restart: forget what an earlier job wrote to this output.

    Raises:
        InvalidRequest: the output cannot be written, is held by another job, was not written by a job, or was begun with
            other settings.
    """

    def __init__(
        self,
        output: str | os.PathLike[str],
        settings: Mapping[str, Any],
        *,
        order: str = "input",
        format: tuple[bytes, Callable[[bytes], bytes]] | None = None,
        restart: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.output = Path(output)
        self.errors = self.output.with_name(self.output.name + ".errors.jsonl")
        self.folder = self.output.with_name(self.output.name + ".job")
        self.finished: Finished | None = None
        self.rows = self.failed = self.resumed = 0
        self.usage = Usage()
        self._journal_path, self._settings_path = self.folder / "journal.jsonl", self.folder / "settings.json"
        self._settings = {"order": order, **settings}
        self._order, self._clock = order, clock
        self._header, self._format = jsonl_format() if format is None else format
        self._offsets: array[int] = array("q")
        self._frontier = 0  # input order: offsets before it are of documents in output or errors file
        self._end = 0  # of the journal
        self._unsynced, self._synced_at = 0, clock()
        self._input = blake2b(digest_size=_DIGEST)
        self._seen = 0
        self._before: Finished | None = None  # the job that was finished, and is extended
        self._lock = self._journal = -1
        self._out = Derived(self.output, keep=True)
        self._err = Derived(self.errors, keep=False)
        try:
            self._open(restart)
        except OSError as error:
            self.close()
            raise InvalidRequest("output", f"={shown(str(output))}: cannot be written: {_reason(error)}") from None
        except BaseException:
            self.close()
            raise

    # ---- while the job runs

    def settle(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that are known only once the model is there. Returns what the job was begun with, for names it knew.

        Raises:
            InvalidRequest: one of them differs.
        """
        with self._stops():
            known = self._read_settings() or {"settings": {}}
            before = known["settings"]
            self._compare(before, {name: settings[name] for name in settings if name in before})
            self._settings = {**before, **settings}
            if self._settings != before:
                self._write_settings()
        return self._settings

    def setting(self, name: str) -> Any:
        """A setting the job was begun with; ``None``: it is not known yet."""
        return self._settings.get(name)

    def known(self, index: int, fingerprint: str) -> bool:
        """Whether the document is finished. To be asked for every document, in order; twice is harmless.

        Raises:
            InvalidRequest: another document stood at this place when it was finished.
        """
        if index >= self._seen:
            if index == self._first:
                self._check_before()
            self._input.update(bytes.fromhex(fingerprint))
            self._seen += 1
        offset = self._offset(index)
        if index < self._first or offset < 0:
            return index < self._first
        if self._line(offset)[1] != fingerprint:
            raise InvalidRequest(
                "source",
                f" has changed: document {index + 1} is not the one that {str(self.output)!r} was begun with; "
                "give the same documents, another output, or restart to do all of them again",
            )
        return True

    def add(self, index: int, fingerprint: str, row: Row, usage: Usage, *, failed: bool = False) -> None:
        """A document is finished: its row, or its row of the errors file where it ``failed``.

        Raises:
            JobStopped: the file system takes no more; what was finished before is safe.
        """
        if index < self._first or self._offset(index) >= 0:
            raise ValueError(f"document {index} is finished already")
        kind = _ERROR if failed else _ROW
        data = dump(row)
        counts = ",".join(map(str, _counts(usage))).encode()
        body = b"\t".join((str(index).encode(), fingerprint.encode(), kind, counts, data))
        line = b"%08x\t%s\n" % (zlib.crc32(body), body)
        with self._stops():
            try:
                write_all(self._journal, line)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._journal, self._end)
                raise
            self._mark(index, self._end, kind, usage)
            self._end += len(line)
            self._emit(index, kind, data)
            self._unsynced += 1
            if self._unsynced >= SYNC_ROWS or self._clock() - self._synced_at >= SYNC_SECONDS:
                self._sync()

    def finish(self) -> Finished:
        """Every document of the input was asked for with :meth:`known`, and is finished.

        Raises:
            InvalidRequest: the input has fewer documents than were finished before.
        """
        documents, ended = self._seen, self._first + len(self._offsets)
        if documents == self._first:
            self._check_before()
        if ended > documents:
            raise InvalidRequest(
                "source",
                f" has changed: it ends after {documents:,} documents, and {str(self.output)!r} was begun with more; "
                "give the same documents, another output, or restart to do all of them again",
            )
        if ended < documents or any(offset < 0 for offset in self._offsets):
            raise ValueError("a document is not finished")
        with self._stops():
            self._sync()
            self.finished = Finished(
                documents,
                self.rows,
                self.failed,
                self.usage,
                self._input.hexdigest(),
                self._out.size,
                self._err.size,
            )
            self._write_settings()
            os.close(self._journal)
            self._journal = -1
            os.unlink(self._journal_path)
        return self.finished

    def unchanged(self) -> bool:
        """After asking :meth:`known` for every document: whether they are the ones of the finished job."""
        return self.finished is not None and self._input.hexdigest() == self.finished.input

    def extend(self) -> None:
        """Go on with a finished job: :meth:`known` has met a document behind its last one."""
        with self._stops():
            self.finished = None
            self._write_settings()
            self._go_on()

    def close(self) -> None:
        """Release the files and the lock; a second call does nothing, and nothing it meets is an error."""
        if self._journal >= 0 and self._unsynced:
            with suppress(OSError):
                self._sync()
        self._out.close()
        self._err.close()
        for descriptor in (self._journal, self._lock):
            if descriptor >= 0:
                with suppress(OSError):
                    os.close(descriptor)
        self._journal = self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- opening

    def _open(self, restart: bool) -> None:
        for path in (self.output, self.errors):
            if path.exists() and not path.is_file():
                raise InvalidRequest("output", f"={shown(str(path))}: is not a regular file")
        if not self.output.parent.is_dir():
            raise InvalidRequest(
                "output", f"={shown(str(self.output))}: there is no folder {str(self.output.parent)!r}"
            )
        self.folder.mkdir(exist_ok=True)
        self._take_lock()
        known = None
        try:
            known = self._read_settings()
        except InvalidRequest:
            if not restart:
                raise
        if restart:
            self._forget()
            known = None
        if known is None:
            self._begin()
        else:
            self._compare(known["settings"], self._settings)
            self._settings = known["settings"]
            if known.get("finished"):
                self._reopen_finished(known["finished"])
                return
            if known.get("before"):
                self._take_over(known["before"])
        self._go_on()

    def _go_on(self) -> None:
        self._journal = os.open(self._journal_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._recover()
        _sync_folder(self.folder)
        _sync_folder(self.output.parent)

    def _take_lock(self) -> None:
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise InvalidRequest(
                "output", f"={shown(str(self.output))}: another job is writing it (process {pid})"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _begin(self) -> None:
        for path in (self.output, self.errors):
            if path.exists() and path.stat().st_size > 0:
                raise InvalidRequest(
                    "output",
                    f"={shown(str(self.output))}: {path.name!r} exists and no job wrote it; "
                    "name another output, or restart to overwrite it",
                )
        with suppress(FileNotFoundError):  # of a job whose settings are gone
            os.unlink(self._journal_path)
        self._write_settings()

    def _forget(self) -> None:
        """In this order: killed in between, what is left is the old job, with less of it written out."""
        with suppress(FileNotFoundError):
            os.truncate(self.output, 0)
        for path in (self.errors, self._journal_path, self._settings_path):
            with suppress(FileNotFoundError):
                os.unlink(path)

    def _reopen_finished(self, values: dict[str, Any]) -> None:
        self.finished = finished = self._take_over(values)
        for path, size in ((self.output, finished.output_bytes), (self.errors, finished.errors_bytes)):
            if _size(path) != size:
                self._refuse_changed(path)
        with suppress(FileNotFoundError):  # killed between saying "finished" and removing it
            os.unlink(self._journal_path)

    def _take_over(self, values: dict[str, Any]) -> Finished:
        """What a finished job left, which no journal has any more."""
        before = self._before = _finished(values)
        self.rows, self.failed, self.usage = before.rows, before.errors, before.usage
        for path, size in ((self.output, before.output_bytes), (self.errors, before.errors_bytes)):
            if _size(path) < size or not self.output.exists():
                self._refuse_changed(path)
        return before

    def _refuse_changed(self, path: Path) -> None:
        what = "output" if path == self.output else "errors file"
        was = "has changed" if path.exists() else "is gone"
        raise InvalidRequest(
            "output",
            f"={shown(str(self.output))}: the job was finished, and its {what} {was} since; restart to do it again",
        )

    def _recover(self) -> None:
        """Read the journal up to its first line that is not whole, and make output and errors file what it says."""
        with open(self._journal_path, "rb") as journal:
            for line in journal:
                parsed = _parse(line)
                if parsed is None or parsed[0] < self._first or self._offset(parsed[0]) >= 0:
                    break
                self._mark(parsed[0], self._end, parsed[2], parsed[3])
                self._end += len(line)
        os.ftruncate(self._journal, self._end)
        os.lseek(self._journal, self._end, os.SEEK_SET)
        if self._before is None:
            self._out.put(self._header)
        else:
            self._out.skip(self._before.output_bytes)
            self._err.skip(self._before.errors_bytes)
        for _, kind, data in self._emitted():
            self._put(kind, data)
        self._out.settle()
        self._err.settle()
        self.resumed = self.rows + self.failed

    def _emitted(self) -> Iterator[tuple[int, bytes, bytes]]:
        """What stands in output and errors file, in their order; leaves the frontier behind it."""
        if self._order == "input":
            while self._frontier < len(self._offsets) and self._offsets[self._frontier] >= 0:
                index, _, kind, _, data = self._line(self._offsets[self._frontier])
                self._frontier += 1
                yield index, kind, data
            return
        position = 0
        while position < self._end:
            index, _, kind, _, data, length = self._line_and_length(position)
            position += length
            yield index, kind, data

    # ---- inside

    @property
    def _first(self) -> int:
        """Documents before it are in no journal: the place of the first offset."""
        return 0 if self._before is None else self._before.documents

    def _offset(self, index: int) -> int:
        """Where the line of a document begins; -1: there is none."""
        at = index - self._first
        return self._offsets[at] if 0 <= at < len(self._offsets) else -1

    def _check_before(self) -> None:
        """The documents seen so far are those of the job that is extended."""
        if self._before is not None and self._input.hexdigest() != self._before.input:
            raise InvalidRequest(
                "source", f" has changed since {str(self.output)!r} was finished; restart to do all documents again"
            )

    def _mark(self, index: int, offset: int, kind: bytes, usage: Usage) -> None:
        at = index - self._first
        missing = at + 1 - len(self._offsets)
        if missing > 0:
            self._offsets.extend([-1] * missing)
        self._offsets[at] = offset
        self.rows += kind == _ROW
        self.failed += kind == _ERROR
        self.usage += usage

    def _emit(self, index: int, kind: bytes, data: bytes) -> None:
        if self._order != "input":
            self._put(kind, data)
        elif index == self._first + self._frontier:
            self._put(kind, data)
            self._frontier += 1
            for _, other, row in self._emitted():
                self._put(other, row)

    def _put(self, kind: bytes, data: bytes) -> None:
        if kind == _ROW:
            self._out.put(self._format(data))
        else:
            self._err.put(data + b"\n")

    def _line(self, offset: int) -> tuple[int, str, bytes, Usage, bytes]:
        return self._line_and_length(offset)[:5]

    def _line_and_length(self, offset: int) -> tuple[int, str, bytes, Usage, bytes, int]:
        line, size = b"", 4096
        while not line.endswith(b"\n"):
            piece = os.pread(self._journal, size, offset + len(line))
            if not piece:
                break
            end = piece.find(b"\n")
            line += piece if end < 0 else piece[: end + 1]
            size *= 2
        parsed = _parse(line)
        if parsed is None:
            raise JobStopped(f"{self._journal_path}: was changed while the job runs")
        return *parsed, len(line)

    def _sync(self) -> None:
        os.fsync(self._journal)
        self._out.sync()
        self._err.sync()
        self._unsynced, self._synced_at = 0, self._clock()

    def _read_settings(self) -> dict[str, Any] | None:
        try:
            values = json.loads(self._settings_path.read_bytes())
            if values["version"] != _VERSION or not isinstance(values["settings"], dict):
                raise ValueError
            for name in ("finished", "before"):
                if values.get(name):
                    _finished(values[name])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InvalidRequest(
                "output",
                f"={shown(str(self.output))}: {str(self._settings_path)!r} is not of this version, or damaged; "
                "name another output, or restart to do all documents again",
            ) from None
        return values

    def _write_settings(self) -> None:
        values = {
            "version": _VERSION,
            "settings": self._settings,
            "finished": None if self.finished is None else asdict(self.finished),
        }
        if self.finished is None and self._before is not None:
            values["before"] = asdict(self._before)
        beside = self._settings_path.with_suffix(".new")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_all(descriptor, json.dumps(values, ensure_ascii=False, indent=1).encode("utf-8", "backslashreplace"))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(beside, self._settings_path)
        _sync_folder(self.folder)

    def _compare(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """``before`` may have more: settings that are settled later."""
        now = json.loads(json.dumps(now))
        names = [name for name in now if name not in before or before[name] != now[name]]
        if not names:
            return
        what = ", ".join(f"{name} ({_change(before.get(name), now.get(name))})" for name in names)
        raise InvalidRequest(
            names[0],
            f" differs: {str(self.output)!r} was begun with other settings: {what}; "
            "give the same, another output, or restart to do all documents again",
        )

    @contextmanager
    def _stops(self) -> Iterator[None]:
        """Turns an error of the file system into JobStopped."""
        try:
            yield
        except OSError as error:
            raise JobStopped(
                f"{self.output}: cannot be written any more: {_reason(error)}; {self.rows + self.failed:,} documents are finished and kept"
            ) from error


def _parse(line: bytes) -> tuple[int, str, bytes, Usage, bytes] | None:
    """A line of the journal: index, fingerprint, kind, usage, row; ``None``: it is not whole."""
    checksum, _, body = line.partition(b"\t")
    if not body.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(body[:-1]):
        return None
    index, fingerprint, kind, counts, data = body[:-1].split(b"\t")
    return int(index), fingerprint.decode(), kind, Usage(*map(int, counts.split(b","))), data


def _finished(values: Mapping[str, Any]) -> Finished:
    return Finished(**{**values, "usage": Usage(**values["usage"])})


def _counts(usage: Usage) -> tuple[int, ...]:
    return (usage.prompt, usage.cached, usage.output, usage.requests, usage.parts, usage.retries, usage.unique)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError:  # some file systems sync no folders
        pass
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return (error.strerror or str(error)) + where


def _change(before: Any, now: Any) -> str:
    if any(isinstance(value, str) and len(value) > 40 for value in (before, now)) or before is None or now is None:
        return "changed"
    return f"was {shown(before)}, is {shown(now)}"
