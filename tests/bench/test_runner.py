"""Running and comparing, on a fake engine whose cache and answers are known."""

from __future__ import annotations

import io
import json
import math
import zlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from rich.console import Console

from radixrt.bench.backends import RadixBackend, _batches
from radixrt.bench.machine import CpuClock, Machine, busy_warning, machine
from radixrt.bench.report import Goal, check, show, to_json
from radixrt.bench.runner import Comparison, Execution, Result, compare, run
from radixrt.bench.workloads import WORKLOADS, Node, Tokens, Workload, build
from radixrt.errors import RadixrtError
from radixrt.request import FinishReason, OutputDelta, RequestOutput, SampleOutput, SamplingParams


def encode(text: str) -> list[int]:
    """A stand-in tokenizer: one id a word."""
    return [zlib.crc32(word.encode()) % 9973 for word in text.split()]


class FakeEngine:
    """One request a step, first come first served; the next token is a sum; a set of prefixes stands for the cache."""

    def __init__(self, *, cache: bool = True, short_by: int = 0, fail: str | None = None, stall: bool = False) -> None:
        self.cache, self.short_by, self.fail, self.stall = cache, short_by, fail, stall
        self.queue: list[tuple[str, Tokens, SamplingParams]] = []
        self.most_at_once = 0
        self.served = 0
        self.closed = False
        self.flush_cache()
        self.reset_stats()

    def flush_cache(self) -> None:
        self.prefixes: set[Tokens] = set()

    def reset_stats(self) -> None:
        self.prompt_tokens = self.computed = 0

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(computed_tokens=self.computed, optimal_hit_rate=1 - self.computed / self.prompt_tokens)

    def close(self) -> None:
        self.closed = True

    @property
    def has_work(self) -> bool:
        return bool(self.queue) and not self.stall

    def add(self, prompt: list[int], params: SamplingParams) -> str:
        assert (params.temperature, params.ignore_eos) == (0.0, True)
        self.queue.append((f"r{self.served + len(self.queue)}", tuple(prompt), params))
        self.most_at_once = max(self.most_at_once, len(self.queue))
        return self.queue[-1][0]

    def step(self) -> list[OutputDelta]:
        name, prompt, params = self.queue.pop(0)
        self.served += 1
        self.prompt_tokens += len(prompt)
        self.computed += sum(prompt[:end] not in self.prefixes for end in range(1, len(prompt) + 1))
        made: list[int] = []
        for _ in range((params.max_tokens or 0) - self.short_by):
            made.append((sum(prompt) + sum(made) * 31) % 9973)
        if self.cache:
            fed = prompt + tuple(made[:-1])
            self.prefixes |= {fed[:end] for end in range(1, len(fed) + 1)}
        sample = SampleOutput(0, "", tuple(made), FinishReason.LENGTH)
        output = RequestOutput(name, prompt, (sample,), error=self.fail)
        return [OutputDelta(name, 0, "", tuple(made[:1])), OutputDelta(name, 0, "", tuple(made[1:]), output=output)]


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_figure_of_a_run(name: str) -> None:
    workload = build(name, encode, scale=0.25)
    engine = FakeEngine()
    result = run(workload, RadixBackend(engine))
    assert result.requests == len(workload.nodes)
    assert result.prompt_tokens == sum(workload.prompt_lengths().values())
    assert result.generated_tokens == sum(len(tokens) for tokens in result.outputs.values())
    assert result.computed_tokens == engine.computed
    assert math.isclose(result.hit_rate, result.optimal_hit_rate)
    assert engine.most_at_once == (workload.concurrency or len(max(workload.stages(), key=len)))
    assert result.ttft_s is not None
    assert 0 < result.ttft_s <= result.wall_s
    again = run(workload, RadixBackend(engine))
    assert (again.computed_tokens, again.outputs) == (result.computed_tokens, result.outputs), "a run left something"


def test_a_cache_that_misses_shows_in_the_hit_rate() -> None:
    result = run(build("few-shot", encode, scale=0.25), RadixBackend(FakeEngine(cache=False)))
    assert result.hit_rate == 0.0
    assert result.optimal_hit_rate > 0.8
    assert any("reports an optimal hit rate" in warning for warning in result.warnings)


WRONG = [
    ({"short_by": 1}, "radixrt: request q0 of few-shot gave 3 tokens, not 4"),
    ({"fail": "no"}, "radixrt: request q0 of few-shot failed: no"),
    ({"stall": True}, "radixrt: few-shot stalled with 5 requests unanswered"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message for _wrong, message in WRONG])
def test_a_wrong_run_is_an_error_not_a_figure(wrong: dict, message: str) -> None:
    with pytest.raises(RadixrtError) as caught:
        run(build("few-shot", encode, scale=0.1), RadixBackend(FakeEngine(**wrong)))
    assert str(caught.value) == message


class Timed:
    """A backend whose runs "take" given times: wall seconds come from the results, not from the clock."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def prepare(self, workload: Workload) -> None:
        self.log.append(f"prepare {self.name}")

    def execute(self, workload: Workload) -> Execution:
        self.log.append(self.name)
        node = workload.nodes[0]
        return Execution({node.id: node.tokens}, {node.id: (len(self.name),)}, len(node.tokens), {})

    def close(self) -> None:
        pass


def test_backends_alternate_after_all_are_prepared() -> None:
    log: list[str] = []
    workload = Workload("w", "", (Node("a", (1, 2), 1),))
    comparison = compare(workload, [Timed("ab", log), Timed("b", log)], repeats=3)
    assert log == ["prepare ab", "prepare b", "ab", "b", "ab", "b", "ab", "b"]
    assert comparison.same_outputs("b") == (0, 1)
    for bad in ({"repeats": 0}, {"backends": [Timed("x", log), Timed("x", log)]}):
        with pytest.raises(RadixrtError):
            compare(**{"workload": workload, "backends": [Timed("a", log)], **bad})


def results(backend: str, walls: list[float], others: float = 0.0) -> list[Result]:
    return [Result("w", backend, wall, wall, others, 1, 10, 10, 5, 0.0, 0.0, None, {"a": (1,)}) for wall in walls]


def comparison(ours: list[float], theirs: list[float], others: float = 0.0) -> Comparison:
    workload = Workload("w", "about w", (Node("a", (1,), 5),))
    return Comparison(workload, {"ours": results("ours", ours, others), "peer": results("peer", theirs)})


def test_medians_and_ratios() -> None:
    found = comparison([1.0, 2.0, 9.0], [4.0, 6.0, 5.0])
    assert (found.median("ours"), found.median("peer")) == (2.0, 5.0)
    assert found.ratio("peer") == 2.5
    assert found.paired_ratio("peer") == 3.0  # of 4/1, 6/2 and 5/9
    assert found.median("ours", "ttft_s") is None


GOALS = [(Goal("w", "wall_s", 3.0), True), (Goal("w", "wall_s", 3.01), False), (Goal("w", "wall_s", 0.99, 1.01), False)]


@pytest.mark.parametrize(("goal", "met"), GOALS, ids=[str(goal) for goal, _met in GOALS])
def test_goals(goal: Goal, met: bool) -> None:
    [(text, judged)] = check([comparison([1.0, 2.0, 9.0], [4.0, 6.0, 5.0])], [goal, Goal("other", "wall_s", 1.0)])
    assert judged is met
    assert ("NOT MET" in text) is not met


def test_report_shows_machine_ratio_and_warning_and_json_reads_back() -> None:
    found = comparison([1.0, 2.0, 3.0], [4.0, 6.0, 5.0], others=1.0)
    here = Machine("Some CPU", 2, 2, "2.0", "3.11", 2**34)
    console = Console(file=io.StringIO(), width=80, soft_wrap=True)
    show(console, [found], here, goals=[Goal("w", "wall_s", 2.0)])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "Some CPU, 2 cores, 16 GiB; 2 threads",
        "2.50x",
        "about w",
        "other processes used 100% of a core",
        "met",
    ):
        assert part in text
    read = json.loads(to_json([found], here, scale=1.0))
    assert read["workloads"][0]["wall_ratio"] == {"peer": 2.5}
    assert [run["wall_s"] for run in read["workloads"][0]["runs"]["peer"]] == [4.0, 6.0, 5.0]


BUSY = [(None, 1.0, False), (0.0, 0.0, False), (0.09, 1.0, False), (0.2, 1.0, True), (0.2, 10.0, False)]


@pytest.mark.parametrize(("others", "wall", "busy"), BUSY)
def test_busy_warning(others: float | None, wall: float, busy: bool) -> None:
    assert (busy_warning(others, wall) is not None) is busy


def test_clock_tells_own_work_from_others() -> None:
    before, after = CpuClock(10.0, 1.0, 100.0), CpuClock(12.0, 2.5, 103.0)
    assert after.since(before) == (2.0, 1.5, 1.5)
    assert CpuClock(12.0, 2.5, None).since(before) == (2.0, 1.5, None)
    assert machine().cores >= 1


def test_batches_keep_the_order_and_one_length() -> None:
    stage = [Node(f"n{i}", (1,), 8 if i % 3 else 4) for i in range(10)]
    made = _batches(stage, 4)
    assert sorted(node.id for batch in made for node in batch) == sorted(node.id for node in stage)
    assert all(len(batch) <= 4 and len({node.max_tokens for node in batch}) == 1 for batch in made)


def test_results_are_shared_by_no_one() -> None:
    """Two backends on two engines do not see each other's cache."""

    def pair() -> Iterator[Result]:
        workload = build("chat", encode, scale=0.25)
        for cache in (True, False):
            yield run(workload, RadixBackend(FakeEngine(cache=cache)))

    on, off = pair()
    assert on.outputs == off.outputs
    assert on.computed_tokens < off.computed_tokens == off.prompt_tokens
