"""Owns how measured runs are shown: a table a workload for people, JSON for machines.

Invariants: every figure is a median over the runs, the machine stands above the table, every warning below it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from radixrt.bench.machine import Machine
from radixrt.bench.runner import Comparison, Result

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Goal:
    """``figure`` of ``workload`` must be at least ``low`` and at most ``high``."""

    workload: str
    figure: str
    low: float
    high: float = float("inf")

    def __str__(self) -> str:
        if self.high == float("inf"):
            return f"at least {self.low:g}x"
        return f"{self.low:g}x to {self.high:g}x"

    def met(self, value: float) -> bool:
        return self.low <= value <= self.high


def show(console: Console, comparisons: Sequence[Comparison], machine: Machine, *, goals: Sequence[Goal] = ()) -> None:
    """A table of medians for each workload; ``ratio`` says how many times faster the first backend is (wall time)."""
    console.print(str(machine), markup=False, highlight=False)
    for comparison in comparisons:
        console.print()
        console.print(
            f"{comparison.workload.name}: {comparison.workload.about}", style="bold", markup=False, highlight=False
        )
        console.print(_table(comparison))
        for warning in comparison.warnings:
            console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)
    for text, met in check(comparisons, goals):
        console.print(text, style="green" if met else "red", markup=False, highlight=False)


def _table(comparison: Comparison) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))  # fits 80 columns
    table.add_column("engine", no_wrap=True)
    titles = ["wall s", "tokens/s", "TTFT ms", "computed", "hit", "optimal"]
    peers = comparison.backends[1:]
    for title in titles + (["ratio", "same"] if peers else []):
        table.add_column(title, justify="right", no_wrap=True)
    for backend in comparison.backends:
        cells = [backend, *_figures(comparison, backend)]
        if backend in peers:
            same, of = comparison.same_outputs(backend)
            cells += [f"{comparison.ratio(backend):.2f}x", f"{same}/{of}"]
        table.add_row(*cells)
    return table


def check(comparisons: Sequence[Comparison], goals: Sequence[Goal]) -> list[tuple[str, bool]]:
    """Each goal that can be judged from these runs, in words, and whether it is met."""
    judged = []
    for goal in goals:
        for comparison in comparisons:
            if comparison.workload.name == goal.workload:
                for peer in comparison.backends[1:]:
                    value = comparison.paired_ratio(peer, goal.figure)
                    met = goal.met(value)
                    word = "met" if met else "NOT MET"
                    judged.append((f"{goal.workload} against {peer}: {value:.3f}x, goal {goal}: {word}", met))
    return judged


def to_json(comparisons: Sequence[Comparison], machine: Machine, **extra: Any) -> str:
    """Everything but the generated tokens, as JSON."""
    found = {
        "machine": asdict(machine),
        **extra,
        "workloads": [
            {
                "name": comparison.workload.name,
                "about": comparison.workload.about,
                "runs": {name: [result_dict(run) for run in runs] for name, runs in comparison.results.items()},
                "wall_ratio": {peer: comparison.ratio(peer) for peer in comparison.backends[1:]},
                "paired_wall_ratio": {peer: comparison.paired_ratio(peer) for peer in comparison.backends[1:]},
                "same_outputs": {peer: comparison.same_outputs(peer)[0] for peer in comparison.backends[1:]},
                "warnings": comparison.warnings,
            }
            for comparison in comparisons
        ],
    }
    return json.dumps(found, indent=2)


def result_dict(result: Result) -> dict[str, Any]:
    """A run as plain values, without its generated tokens."""
    values = {name: value for name, value in vars(result).items() if name != "outputs"}
    return {**values, "tokens_per_s": result.tokens_per_s}


def line(result: Result) -> str:
    """One run in one line, for progress."""
    ttft = "" if result.ttft_s is None else f", first token after {result.ttft_s * 1000:.0f} ms"
    return (
        f"{result.workload} on {result.backend}: {result.wall_s:.2f} s, {result.tokens_per_s:.1f} tokens/s{ttft}, "
        f"hit rate {result.hit_rate:.4f} of {result.optimal_hit_rate:.4f}"
    )


def _figures(comparison: Comparison, backend: str) -> list[str]:
    runs = comparison.results[backend]
    ttft = comparison.median(backend, "ttft_s")
    computed, prompt = (
        int(statistics.median(getattr(run, name) for run in runs)) for name in ("computed_tokens", "prompt_tokens")
    )
    return [
        f"{comparison.median(backend):.2f}",
        f"{comparison.median(backend, 'tokens_per_s'):.1f}",
        "" if ttft is None else f"{ttft * 1000:.0f}",
        f"{computed}/{prompt}",
        f"{comparison.median(backend, 'hit_rate'):.4f}",
        f"{comparison.median(backend, 'optimal_hit_rate'):.4f}",
    ]
