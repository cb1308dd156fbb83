"""The device check: all of it in a rehearsal on the CPU, and by itself what the day with a GPU depends on."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixrt.bench.device.cli import SECTIONS, Section, _processes, _Report
from radixrt.bench.device.figures import Bench, Figure, read_figures, table
from radixrt.bench.device.timing import busy_seconds, traced_seconds

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "device_check"
CPU = torch.device("cpu")
ABSENT = (
    "the device has no fp8 products",
    "needs a GPU",
    "TritonOps",
)  # why a figure of the rehearsal may have no number
needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="the kernels need triton: pip install radixrt[gpu]")


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=300)


@needs_triton
def test_rehearsal(tmp_path: Path) -> None:
    """Every part of every section runs, and its figures are in the JSON and in the table."""
    out = tmp_path / "check.json"
    done = check("--rehearse", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["ok"] is True and "rehearsal" in report["note"]
    assert list(report["sections"]) == [section.name for section in SECTIONS]
    checked = 0
    for name, section in report["sections"].items():
        assert section["seconds"]["unit"] == "s" and section["figures"]
        for figure in section["figures"]:
            checked += figure["required"]
            if figure["value"] is None:
                assert figure["note"].startswith(ABSENT), (name, figure)
            else:
                assert figure["unit"] or figure["required"], (name, figure)
            assert (figure["required"] and figure["reached"]) or figure["name"] in done.stdout
    assert checked > 30
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = check()
    assert done.returncode == 2
    assert "--rehearse" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--only", "sped"), "--only=sped: must be of machine, correct, speed"), (("--collect",), "--wheels DIR")],
)
def test_mistakes(arguments: tuple[str, ...], said: str) -> None:
    done = check("--rehearse", *arguments)
    assert done.returncode == 2
    assert said in done.stderr


STUB = """
import json, sys, os
out = sys.argv[sys.argv.index("--out") + 1]
shard = sys.argv[sys.argv.index("--shard") + 1] if "--shard" in sys.argv else "warm"
figure = {"name": "one of " + shard, "value": 1.0, "unit": "x"}
open(out, "a").write(json.dumps(figure) + "\\n" + '{"name": "cut o')
if shard == "1":
    print("the device broke", file=sys.stderr, flush=True)
    os.abort()
"""


def test_a_process_that_breaks_loses_nothing_of_the_others(tmp_path: Path) -> None:
    shards = [("", 0), ("", 1), ("", 2), ("speed", 0)]
    program = (sys.executable, "-c", STUB)
    figures = _processes(Section("correct", 60, shards=3), shards, 60, {}, tmp_path, program)
    assert [figure.name for figure in figures] == ["one of 0", "one of 1", "correct, process 2 of 3", "one of 2"]
    assert figures[2].required and figures[2].reached is False
    assert "the device broke" in figures[2].note


def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    program = (sys.executable, "-c", "input()")
    figures = _processes(Section("speed", 0), [("", 0)], -10.0, {}, tmp_path, program)
    assert [figure.note for figure in figures] == ["did not end in time"]


@needs_triton
def test_processes(tmp_path: Path) -> None:
    """As on the day: what the first measures, the others' shares are of."""
    out = tmp_path / "check.json"
    done = check("--rehearse", "--processes", "--only", "machine", "speed", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    sections = {name: section["figures"] for name, section in json.loads(out.read_text())["sections"].items()}
    assert list(sections) == ["machine", "speed"]
    peak = next(figure["value"] for figure in sections["machine"] if figure["name"] == "bandwidth")
    shares = [figure for figure in sections["speed"] if figure["unit"] == "of bandwidth"]
    assert len(shares) > 5
    assert all(f" of {peak:.3g} TB/s" in figure["note"] for figure in shares)


def test_parts_are_divided_among_shards() -> None:
    names = [f"part {i}" for i in range(11)]
    ran = []
    for index in range(3):
        bench = Bench(CPU, small=True, shard=(index, 3))
        for name in names:
            bench.part(name, lambda name=name: ran.append(name))  # type: ignore[misc]
    assert sorted(ran) == sorted(names)


def test_a_part_that_fails_or_has_no_time_is_a_figure_without_a_value() -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access\nand more")

    bench = Bench(CPU, small=True)
    bench.part("required", fail, required=True)
    bench.part("wanted", fail)
    bench.deadline = time.monotonic() - 1
    bench.part("late", fail)
    assert [figure.reached for figure in bench.figures] == [False, None, None]
    assert "RuntimeError: an illegal memory access (test_device_check.py:" in bench.figures[0].note
    assert bench.figures[2].note == "left out: no time left"


def test_nothing_is_kept_while_warming() -> None:
    bench = Bench(CPU, small=True, warming=True)
    bench.add("one", 1.0, "s")
    assert not bench.figures


@pytest.mark.parametrize(
    ("figure", "reached"),
    [
        (Figure("a", 0.9, "of bandwidth", goal=0.85), True),
        (Figure("a", 0.8, "of bandwidth", goal=0.85), False),
        (Figure("a", 0.04, "of a step", goal=0.05, at_most=True), True),
        (Figure("a", 0.06, "of a step", goal=0.05, at_most=True), False),
        (Figure("a", 3.0, "s"), None),
        (Figure("a", None, "", goal=1.0), None),
        (Figure("a", None, "", required=True), False),
    ],
)
def test_goals(figure: Figure, reached: bool | None, tmp_path: Path) -> None:
    assert figure.reached is reached
    report = _Report(tmp_path / "check.json", "")
    report.add("speed", [figure], 1.0)
    assert report.ok is not (figure.required and reached is False)
    assert json.loads(report.path.read_text())["sections"]["speed"]["figures"][0]["reached"] is reached
    line = table([("speed", [figure])]).splitlines()[1]
    assert ("reached" in line, "missed" in line or "FAILED" in line) == (reached is True, reached is False)


def test_shares_are_of_what_was_measured(tmp_path: Path) -> None:
    bench = Bench(CPU, small=True, peaks={"bandwidth": 4.0}, out=tmp_path / "lines")
    bench.share("copying", 1e12, 0.5, "bandwidth", goal=0.85)
    bench.share("multiplying", 3e14, 0.5, "bf16 peak")
    bench.add("nothing", math.nan, "s")
    assert [(f.value, f.unit, f.reached) for f in bench.figures] == [
        (0.5, "of bandwidth", False),
        (600.0, "TFLOP/s", None),
        (None, "s", None),
    ]
    assert read_figures(tmp_path / "lines") == bench.figures


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_busy_seconds_are_those_covered(intervals: list[tuple[int, int]]) -> None:
    covered = {second for begin, length in intervals for second in range(begin, begin + length)}
    assert busy_seconds(intervals) == len(covered)


def test_busy_seconds_of_a_trace() -> None:
    events: list[dict[str, Any]] = [
        {"cat": "kernel", "ts": 100.0, "dur": 30.0},
        {"cat": "gpu_memcpy", "ts": 120.0, "dur": 20.0},
        {"cat": "kernel", "ts": 200.0, "dur": 60.0},
        {"cat": "cuda_runtime", "ts": 0.0, "dur": 500.0},
        {"ph": "M"},
    ]
    assert traced_seconds({"traceEvents": events}, 2) == pytest.approx(50e-6)
    assert traced_seconds({"traceEvents": events[3:]}, 2) is None
