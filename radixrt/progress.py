"""Progress of long work: a live bar on a terminal, a plain line now and then anywhere else.

Invariants: writes to one stream (stderr by default) and nowhere else; a bar that is not shown costs nothing and prints
nothing; the last figure is always printed, also when the work is cut short.
"""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

_SECONDS_BETWEEN_LINES = 5.0


class Progress(Protocol):
    """A running count. Use it as a context manager, or call :meth:`close`."""

    def advance(self, count: int = 1, note: str | None = None) -> None:
        """Add ``count`` to what is done; ``note`` is a short text shown beside the bar, kept until the next one."""

    def update(self, done: int, note: str | None = None, total: int | None = None) -> None:
        """Set what is done (and the total, once it is known)."""

    def close(self) -> None:
        """End the display. A second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def progress(
    label: str, total: int | None = None, *, unit: str = "", show: bool = True, stream: TextIO | None = None
) -> Progress:
    """Start showing progress.

    Args:
        label: what is being done, as in ``"loading"``.
        total: how much there is to do; ``None``: not known.
        unit: what is counted, as in ``"prompts"``; ``"B"`` counts bytes and prints them as MB.
        show: ``False`` gives an object with the same methods that prints nothing.
        stream: where to write; ``None``: stderr.
    """
    stream = sys.stderr if stream is None else stream
    if not show or stream is None:
        return _Silent()
    if _is_terminal(stream):
        return _Bar(label, total, unit, stream)
    return _Lines(label, total, unit, stream)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # a stand-in without the method, or closed
        return False


def _amount(value: int, unit: str) -> str:
    return f"{value / 1e6:,.1f} MB" if unit == "B" else f"{value:,}"


class _Silent:
    def advance(self, count: int = 1, note: str | None = None) -> None:
        pass

    def update(self, done: int, note: str | None = None, total: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Lines(_Silent):
    """One line at most every few seconds, and one at the end."""

    def __init__(self, label: str, total: int | None, unit: str, stream: TextIO) -> None:
        self._label, self._total, self._unit, self._stream = label, total, unit, stream
        self._done, self._note, self._closed = 0, "", False
        self._started = self._last = time.monotonic()

    def advance(self, count: int = 1, note: str | None = None) -> None:
        self.update(self._done + count, note)

    def update(self, done: int, note: str | None = None, total: int | None = None) -> None:
        self._done = done
        self._note = self._note if note is None else note
        self._total = self._total if total is None else total
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            self._print()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._print()

    def _print(self) -> None:
        done = _amount(self._done, self._unit)
        of = "" if self._total is None else f"/{_amount(self._total, self._unit)}"
        unit = "" if self._unit in ("", "B") else f" {self._unit}"
        note = f"  {self._note}" if self._note else ""
        seconds = time.monotonic() - self._started
        with contextlib.suppress(OSError, ValueError):  # a closed stderr must not end the work
            self._stream.write(f"{self._label}: {done}{of}{unit} in {seconds:.1f} s{note}\n")
            self._stream.flush()


class _Bar(_Silent):
    """rich's live bar."""

    def __init__(self, label: str, total: int | None, unit: str, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        count: ProgressColumn = DownloadColumn() if unit == "B" else MofNCompleteColumn()
        columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), count]
        if unit not in ("", "B"):
            columns.append(TextColumn(unit))
        columns += [TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}", style="dim")]
        self._rich = RichProgress(*columns, console=Console(file=stream), transient=True)
        self._task = self._rich.add_task(label, total=total, note="")
        self._rich.start()

    def advance(self, count: int = 1, note: str | None = None) -> None:
        fields = {} if note is None else {"note": note}
        self._rich.update(self._task, advance=count, **fields)  # type: ignore[arg-type]

    def update(self, done: int, note: str | None = None, total: int | None = None) -> None:
        fields: dict[str, Any] = {} if note is None else {"note": note}
        self._rich.update(self._task, completed=done, total=total, **fields)

    def close(self) -> None:
        self._rich.stop()
