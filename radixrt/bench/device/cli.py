"""Owns the run of a device check: each section in processes of its own with a time limit, one JSON file, a table.

    scripts/device_check                        all of it, within 8 minutes, to device_check.json
    scripts/device_check --rehearse             the same code on a CPU, with tiny shapes, in one process
    scripts/device_check --wheels DIR --collect download to DIR what a machine without network may lack
    scripts/device_check --wheels DIR           and use what is there

The first processes check the kernels and compile what is measured later, side by side; whatever is measured runs alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from radixrt.bench.device.figures import Bench, Figure, read_figures, table

_ROOT = Path(__file__).resolve().parents[3]
_PEAKS = ("bandwidth", "bf16 peak", "fp8 peak")
_REHEARSED = {"bandwidth": 0.01, "bf16 peak": 0.01, "fp8 peak": 0.01}
_BUILT = ("engine", "programs")  # sections that use the native matchers
_PROGRAM = (sys.executable, "-m", "radixrt.bench.device.cli")
_MARGIN = 10.0  # seconds that a process has to end by itself, after its time


@dataclass(frozen=True, slots=True)
class Section:
    """A module of this folder with ``run(bench)``. ``seconds``: its time; ``shards``: processes that share its parts."""

    name: str
    seconds: float
    shards: int = 1


SECTIONS = (
    Section("machine", 40),
    Section("correct", 150, shards=8),
    Section("speed", 110),
    Section("engine", 130),
    Section("programs", 90),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where a kernel does not compute what its reference does (or does not run), else 0."""
    options = _options(arguments)
    if options.section:
        return _child(options)
    unknown = set(options.only) - {section.name for section in SECTIONS}
    if unknown:
        names = ", ".join(section.name for section in SECTIONS)
        print(f"--only={' '.join(sorted(unknown))}: must be of {names}", file=sys.stderr)
        return 2
    if not options.rehearse and not torch.cuda.is_available():
        print("no GPU that torch can use: --rehearse runs the same code on the CPU", file=sys.stderr)
        return 2
    report = _Report(options.out, "a rehearsal: no figure means anything" if options.rehearse else "")
    wanted = [section for section in SECTIONS if not options.only or section.name in options.only]
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported
    if options.rehearse and not options.processes:
        _rehearse(report, wanted)
    else:
        _check(report, wanted, time.monotonic() + options.seconds, ["--rehearse"] if options.rehearse else [])
    print(table(report.sections.items()))
    if report.note:
        print(report.note)
    print(f"{report.path}: {'ok' if report.ok else 'FAILED'} in {report.seconds():.0f} s")
    return 0 if report.ok else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="device_check", description="Checks and measures the kernels and the engine on a GPU."
    )
    parser.add_argument("--out", type=Path, default=Path("device_check.json"), help="where the JSON goes")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, interpreted, with tiny shapes")
    parser.add_argument("--seconds", type=float, default=465.0, help="for all of it")
    parser.add_argument("--only", nargs="+", default=[], metavar="SECTION", help=" ".join(s.name for s in SECTIONS))
    parser.add_argument("--processes", action="store_true", help="rehearse in processes, too")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--shard", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peaks", type=json.loads, default={}, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


class _Report:
    """The sections so far; written whenever one is added."""

    def __init__(self, path: Path, note: str) -> None:
        self.path, self.note, self._start = path, note, time.monotonic()
        self.machine: dict[str, Any] = {}
        self.sections: dict[str, list[Figure]] = {}
        self._took: dict[str, float] = {}
        self._begun = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def ok(self) -> bool:
        """Whether all that is required is as it should be, as far as it was looked at."""
        return not any(f.required and f.reached is False for figures in self.sections.values() for f in figures)

    def add(self, section: str, figures: list[Figure], took: float) -> None:
        self.sections[section] = figures
        self._took[section] = took
        whole = {
            "begun": self._begun,
            "note": self.note,
            "ok": self.ok,
            "machine": self.machine,
            "seconds": {"value": round(self.seconds(), 1), "unit": "s"},
            "sections": {
                name: {
                    "seconds": {"value": round(self._took[name], 1), "unit": "s"},
                    "figures": [{**asdict(figure), "reached": figure.reached} for figure in found],
                }
                for name, found in self.sections.items()
            },
        }
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(json.dumps(whole, indent=1) + "\n")
        beside.replace(self.path)


def _bench(options: argparse.Namespace) -> Bench:
    device = torch.device("cpu" if options.rehearse else "cuda")
    return Bench(
        device,
        small=options.rehearse,
        deadline=time.monotonic() + options.seconds,
        out=options.out,
        warming=options.warm,
        peaks=options.peaks,
        shard=tuple(options.shard),
    )


def _child(options: argparse.Namespace) -> int:
    """One section, or a shard of one, in a process of its own."""
    bench = _bench(options)
    _run(options.section, bench)
    return 0


def _run(name: str, bench: Bench) -> None:
    try:
        importlib.import_module(f"radixrt.bench.device.{name}").run(bench)
    except Exception as error:
        bench.add(name, None, "", required=name == "correct", note=f"{type(error).__name__}: {str(error)[:300]}")


def _rehearse(report: _Report, wanted: Iterable[Section]) -> None:
    """All sections here, on the CPU; what is unfit to be timed is timed all the same."""
    device = torch.device("cpu")
    for section in wanted:
        start = time.monotonic()
        bench = Bench(device, small=True, peaks=_REHEARSED)
        if section.name == "machine":
            from radixrt.bench.device.machine import describe

            report.machine = describe(bench)
        _run(section.name, bench)
        report.add(section.name, bench.figures, time.monotonic() - start)


def _check(report: _Report, wanted: list[Section], end: float, more: list[str]) -> None:
    """``more``: options of every process."""
    from radixrt.bench.device.machine import describe

    build = _build() if any(section.name in _BUILT for section in wanted) else None
    report.machine = describe(Bench(torch.device("cpu" if more else "cuda"), small=bool(more)))
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for section in wanted:
            start = time.monotonic()
            limit = min(section.seconds, end - start - _MARGIN)
            if section.name in _BUILT and build is not None:
                _wait(build, start + limit / 2)
            shards = [("", i) for i in range(section.shards)]
            if section.name == "correct":  # what comes later is compiled beside it
                shards += [(name, 0) for name in ("speed",)]
            figures = [] if limit > 0 else [Figure(section.name, None, "", note="left out: no time left")]
            if limit > 0:
                figures = _processes(section, shards, limit, peaks, Path(folder), (*_PROGRAM, *more))
            if section.name == "machine":
                peaks = {f.name: f.value for f in figures if f.name in _PEAKS and f.value is not None}
            report.add(section.name, figures, time.monotonic() - start)


def _processes(
    section: Section,
    shards: list[tuple[str, int]],
    limit: float,
    peaks: dict[str, float],
    folder: Path,
    program: Sequence[str],
) -> list[Figure]:
    """Run a section's shards side by side (one that has a name: that section, only to be compiled); their figures."""
    started = []
    for other, index in shards:
        out = folder / f"{section.name}-{other}-{index}"
        command = [
            *program,
            "--section",
            other or section.name,
            "--out",
            str(out),
        ]
        command += ["--seconds", f"{limit:.0f}", "--peaks", json.dumps(peaks)]
        command += ["--warm"] if other else ["--shard", str(index), str(section.shards)]
        log = out.with_suffix(".log").open("w+")
        started.append((other, index, out, log, subprocess.Popen(command, stdout=log, stderr=log, cwd=_ROOT)))
    end = time.monotonic() + limit + _MARGIN
    figures: list[Figure] = []
    for other, index, out, log, process in started:
        status = _wait(process, end)
        log.seek(0)
        last = next((line for line in reversed(log.read().splitlines()) if line.strip()), "")
        log.close()
        if other:
            continue
        figures += read_figures(out)
        if status != 0:
            name = section.name + (f", process {index + 1} of {section.shards}" if section.shards > 1 else "")
            reason = "did not end in time" if status is None else f"ended with {status}: {last[:300]}"
            figures.append(Figure(name, None, "", required=section.name == "correct", note=reason))
    return figures


def _wait(process: subprocess.Popen[Any], end: float) -> int | None:
    """The exit status; ``None``: it did not end, and was killed."""
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def _build() -> subprocess.Popen[Any] | None:
    """Build the native matchers beside the first sections, where they are missing; without a compiler the others are measured."""
    from radixrt.grammar.built import native_module

    if native_module() is not None:
        return None
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--parallel", str(os.cpu_count() or 1)]
    return subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
