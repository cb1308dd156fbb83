"""Owns running a workload on a backend and measuring it; ``compare`` alternates backends A B A B.

Invariants: every run starts from an empty cache; a run that did not generate exactly the workload's tokens is an
error, never a figure; the optimal hit rate is counted here by a naive trie, independently of the engine.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from radixrt.bench.machine import CpuClock, busy_warning
from radixrt.bench.workloads import Tokens, Workload, unique_edges
from radixrt.errors import RadixrtError


@dataclass(frozen=True, slots=True)
class Execution:
    """What a backend did with a workload, by node id. ``ttft``: seconds from a request's submission to its first token.

    ``computed_tokens``: prompt tokens the backend computed. ``optimal_hit_rate``: as the backend itself reports it.
    """

    prompts: Mapping[str, Tokens]
    outputs: Mapping[str, Tokens]
    computed_tokens: int
    ttft: Mapping[str, float]
    optimal_hit_rate: float | None = None


class Backend(Protocol):
    """Something that runs a whole workload. ``name`` is what the report calls it."""

    name: str

    def prepare(self, workload: Workload) -> None:
        """Once per workload, not measured: calibrate, warm up."""

    def execute(self, workload: Workload) -> Execution:
        """Run every node, greedily, ``max_tokens`` each, from an empty cache."""

    def close(self) -> None:
        """Give back memory."""


@dataclass(frozen=True)
class Result:
    """One measured run. Times are seconds; rates are shares of the prompt tokens."""

    workload: str
    backend: str
    wall_s: float
    cpu_s: float
    others_cpu_s: float | None
    requests: int
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    hit_rate: float
    optimal_hit_rate: float
    ttft_s: float | None
    outputs: Mapping[str, Tokens]
    reported_optimal_hit_rate: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of wall time."""
        return self.generated_tokens / self.wall_s if self.wall_s else float("inf")

    @property
    def warnings(self) -> list[str]:
        found = []
        busy = busy_warning(self.others_cpu_s, self.wall_s)
        if busy:
            found.append(busy)
        reported = self.reported_optimal_hit_rate
        if reported is not None and abs(reported - self.optimal_hit_rate) > 1e-9:
            found.append(
                f"{self.backend} reports an optimal hit rate of {reported:.6f}, the naive count is "
                f"{self.optimal_hit_rate:.6f}"
            )
        return found


def run(workload: Workload, backend: Backend) -> Result:
    """Run ``workload`` once and measure it."""
    gc.collect()
    start = CpuClock.now()
    done = backend.execute(workload)
    wall, own, others = CpuClock.now().since(start)
    for node in workload.nodes:
        got = len(done.outputs.get(node.id, ()))
        if got != node.max_tokens:
            raise RadixrtError(
                f"{backend.name}: request {node.id} of {workload.name} gave {got} tokens, not {node.max_tokens}"
            )
    prompt_tokens = sum(len(tokens) for tokens in done.prompts.values())
    return Result(
        workload=workload.name,
        backend=backend.name,
        wall_s=wall,
        cpu_s=own,
        others_cpu_s=others,
        requests=len(workload.nodes),
        prompt_tokens=prompt_tokens,
        computed_tokens=done.computed_tokens,
        generated_tokens=workload.generated_tokens,
        hit_rate=1 - done.computed_tokens / prompt_tokens,
        optimal_hit_rate=1 - unique_edges(workload, done.prompts, done.outputs) / prompt_tokens,
        ttft_s=statistics.median(done.ttft.values()) if done.ttft else None,
        outputs=dict(done.outputs),
        reported_optimal_hit_rate=done.optimal_hit_rate,
    )


@dataclass(frozen=True)
class Comparison:
    """The runs of one workload on several backends; the first backend is ours, the others its peers."""

    workload: Workload
    results: Mapping[str, Sequence[Result]]  # by backend name, in the order they ran

    def median(self, backend: str, figure: str = "wall_s") -> float | None:
        """Median of a figure over the runs; ``None`` where the backend does not have it."""
        values = [getattr(result, figure) for result in self.results[backend]]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def ratio(self, peer: str, figure: str = "wall_s") -> float:
        """How many times less time the first backend takes: median(peer) / median(first)."""
        ours, theirs = self.median(self.backends[0], figure), self.median(peer, figure)
        if ours is None or theirs is None:
            raise RadixrtError(f"{figure}: not measured on both {self.backends[0]} and {peer}")
        return theirs / ours if ours else float("inf")

    def paired_ratio(self, peer: str, figure: str = "wall_s") -> float:
        """Median over the rounds of peer / first: each pair ran side by side, so that slow drift cancels out."""
        ours, theirs = self.results[self.backends[0]], self.results[peer]
        return statistics.median(getattr(b, figure) / getattr(a, figure) for a, b in zip(ours, theirs, strict=True))

    def same_outputs(self, peer: str) -> tuple[int, int]:
        """(requests whose tokens equal those of the first backend, all requests), first run of each."""
        ours, theirs = self.results[self.backends[0]][0].outputs, self.results[peer][0].outputs
        return sum(ours[name] == theirs[name] for name in ours), len(ours)

    @property
    def backends(self) -> list[str]:
        return list(self.results)

    @property
    def warnings(self) -> list[str]:
        """Every distinct warning of the runs, the worst busy one only."""
        runs = [result for results in self.results.values() for result in results]
        found = [w for result in runs for w in result.warnings if not w.startswith("the machine was busy")]
        worst = max(runs, key=lambda r: (r.others_cpu_s or 0.0) / r.wall_s if r.wall_s else 0.0)
        busy = busy_warning(worst.others_cpu_s, worst.wall_s)
        return ([f"{worst.workload} on {worst.backend}: {busy}"] if busy else []) + list(dict.fromkeys(found))


def compare(
    workload: Workload,
    backends: Sequence[Backend],
    *,
    repeats: int = 3,
    on_run: Callable[[Result | None, str], None] | None = None,
) -> Comparison:
    """Run ``workload`` on every backend in turn, ``repeats`` rounds (A B A B ...).

    ``on_run`` is called with ``None`` and what is about to happen before each step, and with each result after it.
    """
    if repeats < 1:
        raise RadixrtError(f"repeats={repeats}: must be at least 1")
    names = [backend.name for backend in backends]
    if len(set(names)) != len(names):
        raise RadixrtError(f"backends {names}: two have the same name")
    say = on_run or (lambda _result, _text: None)
    for backend in backends:
        say(None, f"{workload.name}: preparing {backend.name}")
        backend.prepare(workload)
    results: dict[str, list[Result]] = {name: [] for name in names}
    for repeat in range(repeats):
        for backend in backends:
            say(None, f"{workload.name}: {backend.name}, run {repeat + 1} of {repeats}")
            result = run(workload, backend)
            results[backend.name].append(result)
            say(result, "")
    return Comparison(workload, results)
