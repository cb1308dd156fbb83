"""Owns what a check found: figures with their units and goals, as lines of JSON while it runs, as a table at its end."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Figure:
    """One number. ``goal``: what it should reach, or stay below with ``at_most``. ``required``: else the check has failed.

    ``value`` is ``None`` where there is none, and ``note`` says why.
    """

    name: str
    value: float | None
    unit: str
    goal: float | None = None
    at_most: bool = False
    required: bool = False
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """``None``: there is nothing to reach."""
        if self.value is None:
            return False if self.required else None
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


@dataclass(slots=True)
class Bench:
    """Where a section's parts are run and its figures go.

    Args:
        small: tiny shapes, for a rehearsal.
        deadline: on the clock of ``time.monotonic``; parts that would begin later are left out, by name.
        out: a line of JSON for each figure, at once.
        warming: parts are run so that what they need is compiled; nothing is measured and no figure is kept.
        peaks: what shares are shares of, by name: of figures of the section ``machine``.
        shard: of how many processes that divide the parts among them this is which.
    """

    device: torch.device
    small: bool
    deadline: float = math.inf
    out: Path | None = None
    warming: bool = False
    peaks: dict[str, float] = field(default_factory=dict)
    shard: tuple[int, int] = (0, 1)
    figures: list[Figure] = field(default_factory=list)
    _parts: int = 0

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def half(self) -> torch.dtype:
        """The dtype that models have; the interpreter cannot multiply bfloat16."""
        return torch.bfloat16 if self.cuda else torch.float16

    def pick(self, real: Any, small: Any) -> Any:
        return small if self.small else real

    def add(self, name: str, value: float | None, unit: str, **more: Any) -> None:
        if self.warming:
            return
        if value is not None and not math.isfinite(value):
            value, more["note"] = None, f"not finite: {value}"
        figure = Figure(name, value, unit, **more)
        self.figures.append(figure)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(json.dumps(asdict(figure)) + "\n")

    def share(self, name: str, amount: float, seconds: float, peak: str, **more: Any) -> None:
        """``amount`` in ``seconds`` as a share of ``peaks[peak]``, which is in units of 1e12 a second."""
        rate, most = amount / seconds / 1e12, self.peaks.get(peak)
        unit = "TB/s" if peak == "bandwidth" else "TFLOP/s"
        if most is None:
            self.add(name, rate, unit, note=f"no share: {peak} was not measured")
        else:
            self.add(name, rate / most, f"of {peak}", note=f"{rate:.3g} of {most:.3g} {unit}", **more)

    def part(self, name: str, run: Callable[[], None], *, required: bool = False) -> None:
        """Run one part; what it raises, and that there was no time for it, is a figure without a value."""
        self._parts += 1
        if (self._parts - 1) % self.shard[1] != self.shard[0]:
            return
        if time.monotonic() > self.deadline:
            self.add(name, None, "", note="left out: no time left")
            return
        try:
            run()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = (str(error).strip().splitlines() or [""])[0][:300]
            note = f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"
            self.add(name, None, "", required=required, note=note)


def read_figures(path: Path) -> list[Figure]:
    """What was written to ``Bench.out``, as far as it got."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(Figure(**json.loads(line)))
        except (ValueError, TypeError):  # cut off in the middle
            continue
    return found


def table(sections: Iterable[tuple[str, Iterable[Figure]]]) -> str:
    """What was reached, beside its goal. Of the required figures that are as they should be there is one line a section."""
    lines = [f"{'':9} {'figure':58} {'reached':>24}  {'goal':>9}"]
    for section, figures in sections:
        right = 0
        for figure in figures:
            if figure.required and figure.reached:
                right += 1
                continue
            value = "-" if figure.value is None else f"{_number(figure.value, figure.unit)} {_unit(figure.unit)}"
            sign = "" if figure.goal is None else ("<= " if figure.at_most else ">= ")
            goal = "" if figure.goal is None else sign + _number(figure.goal, figure.unit)
            verdict = {None: "", True: "reached", False: "FAILED" if figure.required else "missed"}[figure.reached]
            lines.append(f"{section:9} {figure.name:58} {value:>24}  {goal:>9}  {verdict:8} {figure.note}".rstrip())
        if right:
            lines.append(f"{section:9} {f'{right} checks agree with their reference':58}")
    return "\n".join(lines)


def _number(value: float, unit: str) -> str:
    return f"{100 * value:.1f} %" if unit.startswith("of ") else f"{value:.4g}"


def _unit(unit: str) -> str:
    return "" if unit.startswith("of ") else unit
