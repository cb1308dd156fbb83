"""Progress: lines where nobody can see a bar, a bar on a terminal, nothing where it is not wanted."""

from __future__ import annotations

import io

import pytest

import radixrt.progress
from radixrt.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(radixrt.progress.time, "monotonic", clock)
    return clock


def test_lines_are_rare_and_the_last_figure_is_printed_once(clock: Clock) -> None:
    out = io.StringIO()
    with progress("generating", 20, unit="prompts", stream=out) as bar:
        for step in range(20):
            clock.now = step * 1.0
            bar.advance(note=f"{step} running")
        bar.close()
    lines = out.getvalue().splitlines()
    assert lines == [
        "generating: 6/20 prompts in 5.0 s  5 running",
        "generating: 11/20 prompts in 10.0 s  10 running",
        "generating: 16/20 prompts in 15.0 s  15 running",
        "generating: 20/20 prompts in 19.0 s  19 running",
    ]


def test_bytes_and_a_total_that_comes_late(clock: Clock) -> None:
    out = io.StringIO()
    with progress("loading", unit="B", stream=out) as bar:
        bar.update(1_500_000, total=3_000_000)
    assert out.getvalue() == "loading: 1.5 MB/3.0 MB in 0.0 s\n"


def test_not_shown_prints_nothing() -> None:
    for out in (io.StringIO(), Terminal()):
        with progress("x", 3, show=False, stream=out) as bar:
            bar.advance()
            bar.update(3)
        assert out.getvalue() == ""


def test_a_closed_stream_does_not_end_the_work() -> None:
    out = io.StringIO()
    out.close()
    with progress("x", 1, stream=out) as bar:
        bar.advance()


def test_a_terminal_gets_a_bar() -> None:
    out = Terminal()
    with progress("generating", 2, unit="prompts", stream=out) as bar:
        bar.advance(note="half")
        bar.update(2, total=2)
    assert "generating" in out.getvalue()
    assert "\x1b[" in out.getvalue()
