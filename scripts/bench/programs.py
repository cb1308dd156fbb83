"""Agent programs on the default model: what is computed, what the scheduler's knowledge of the graph buys, and what handles save.

python scripts/bench/programs.py hits      hit rate with a large pool beside the best possible one
python scripts/bench/programs.py pool      programs per second with a pool of 40 % of the unique tokens: hints on, off, and each alone
python scripts/bench/programs.py calls     the same programs written against the engine, the whole text at each step
python scripts/bench/programs.py overhead  CPU time of lang itself, on a scripted backend

Programs are batches of 16, greedy, of fixed lengths; ``--programs tree judge`` picks some.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lang import MockBackend, Runtime, assistant, function, gen, system, user
from radixrt.bench.machine import machine

WORDS = (
    "river stone market light garden winter copper engine letter bridge window forest paper silver harbor music "
    "circle number summer bottle mirror planet ticket yellow carpet doctor signal orange village history"
).split()
BATCH = 16
ON: dict[str, Any] = {}
OFF: dict[str, Any] = {
    "schedule_policy": "fcfs",
    "program_order": False,
    "program_eviction": False,
    "program_admission": False,
}


def words(seed: int | str, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


def fixed(name: str, tokens: int) -> Any:
    """A generation of exactly so many tokens."""
    return gen(name, max_tokens=tokens, ignore_eos=True, temperature=0)


SHOTS = "".join(
    f"Question: {words(f'q{i}', 20)}\nThought: {words(f't{i}', 40)}\nAnswer: {words(f'a{i}', 10)}\n\n" for i in range(6)
)
RULES = words("rules", 120)


@function
def react(s: Any, n: int) -> None:
    """6 shots, 5 steps of thought and observation."""
    s += SHOTS
    s += f"Question: {words(f'react{n}', 25)}\n"
    for step in range(5):
        s += f"Thought {step}:" + fixed(f"thought{step}", 24)
        s += f"\nObservation {step}: {words(f'{n}{step}', 30)}\n" if s[f"thought{step}"] else ""


@function
def tree(s: Any, n: int) -> None:
    """Tree of thought: 2 branches at each of 4 stages."""
    s += f"{RULES}\nProblem: {words(f'tree{n}', 80)}\n"

    def grow(state: Any, stage: int) -> None:
        if stage == 4:
            return
        branches = state.fork(2)
        for i, branch in enumerate(branches):
            branch += f"\nStage {stage}, idea {i}:" + fixed(f"stage{stage}", 12)
            if stage < 3:
                branch[f"stage{stage}"]
            grow(branch, stage + 1)

    grow(s, 0)


@function
def judge(s: Any, n: int) -> None:
    """6 judges, each of another side of an essay; merged."""
    s += f"{RULES}\nEssay: {words(f'essay{n}', 250)}\n"
    branches = s.fork(6)
    for i, branch in enumerate(branches):
        branch += f"Judge the essay by {WORDS[i]}:" + fixed("view", 24)
    branches.join()
    s += "".join(f"View {i}: {view}\n" for i, view in enumerate(s["view"]))
    s += "In summary:" + fixed("summary", 24)


@function
def skeleton(s: Any, n: int) -> None:
    """An outline, its 5 points expanded side by side, and a conclusion."""
    s += f"{RULES}\nTopic: {words(f'topic{n}', 60)}\nOutline:" + fixed("outline", 24)
    assert s["outline"]
    branches = s.fork(5)
    for i, branch in enumerate(branches):
        branch += f"\nPoint {i} in full:" + fixed("point", 24)
    branches.join()
    s += "\n".join(s["point"]) + "\nConclusion:" + fixed("end", 16)


@function
def chat(s: Any, n: int) -> None:
    """4 turns."""
    s += system(RULES)
    for turn in range(4):
        s += user(words(f"chat{n}.{turn}", 70))
        s += assistant(fixed(f"answer{turn}", 24))
        assert s[f"answer{turn}"] is not None


PROGRAMS = {one.name: one for one in (react, tree, judge, skeleton, chat)}


def batch(program: Any, runtime: Runtime, **options: Any) -> tuple[float, float, list[Any]]:
    """Wall seconds, CPU seconds and states of a batch."""
    started, worked = time.monotonic(), time.process_time()
    states = program.run_batch([{"n": n} for n in range(BATCH)], backend=runtime, seed=1, **options)
    seconds, cpu = time.monotonic() - started, time.process_time() - worked
    for state in states:
        if state.error() is not None:
            raise state.error()
    return seconds, cpu, states


def said(states: list[Any]) -> list[str]:
    return ["|".join(state.graph.text_of(id) for id in state.graph.generations()) for state in states]


def hits(names: list[str], threads: int) -> None:
    print(f"{'program':10} {'prompt':>8} {'computed':>9} {'hit rate':>9} {'optimal':>9} {'ratio':>6} {'seconds':>8}")
    for name in names:
        with Runtime(threads=threads, max_total_tokens=60_000) as runtime:
            seconds, _, _ = batch(PROGRAMS[name], runtime)
            stats = runtime.get_server_info()
        ratio = stats["hit_rate"] / stats["optimal_hit_rate"]
        print(
            f"{name:10} {stats['prompt_tokens']:8} {stats['computed_tokens']:9} {stats['hit_rate']:9.4f} "
            f"{stats['optimal_hit_rate']:9.4f} {ratio:6.3f} {seconds:8.1f}",
            flush=True,
        )


def pool(names: list[str], threads: int, runs: int, ablation: bool) -> None:
    """Rounds of every way after each other; the median of each."""
    ways = {"on": ON, "off": OFF}
    if ablation:
        for switch in ("program_order", "program_eviction", "program_admission"):
            ways[f"without {switch.removeprefix('program_')}"] = {switch: False}
    for name in names:
        with Runtime(threads=threads, max_total_tokens=60_000) as runtime:
            _, _, states = batch(PROGRAMS[name], runtime)
            stats = runtime.get_server_info()
        unique = stats["pool_used"]
        reference = said(states)
        longest = max(done.usage.prompt_tokens for state in states for done in state.graph.done.values()) + 200
        size = max(int(unique * 0.4), longest)
        rate = f"hit rate {stats['hit_rate']:.4f} of {stats['optimal_hit_rate']:.4f} at best"
        print(f"\n{name}: {unique} unique tokens, {rate} with a large pool; now a pool of {size}", flush=True)
        times: dict[str, list[float]] = {way: [] for way in ways}
        work_time: dict[str, list[float]] = {way: [] for way in ways}
        work: dict[str, tuple[int, int, int]] = {}
        for _ in range(runs):
            for way, settings in ways.items():
                with Runtime(threads=threads, max_total_tokens=size, **settings) as runtime:
                    seconds, cpu, states = batch(PROGRAMS[name], runtime)
                    stats = runtime.get_server_info()
                if said(states) != reference:
                    print(f"  {way}: OUTPUTS DIFFER")
                times[way].append(seconds)
                work_time[way].append(cpu)
                work[way] = (stats["forward_tokens"], stats["recomputed_tokens"], stats["preemptions"])
        for way, seconds_of in times.items():
            middle = statistics.median(seconds_of)
            forward, again, preempted = work[way]
            print(
                f"  {way:18} {BATCH / middle:6.2f} programs/s  x{statistics.median(times['off']) / middle:5.2f} of off "
                f"(CPU time x{statistics.median(work_time['off']) / statistics.median(work_time[way]):5.2f})   "
                f"{forward} tokens through the model, {again} recomputed, {preempted} preemptions",
                flush=True,
            )


def calls(names: list[str], threads: int) -> None:
    """Tokens that had to be made of text: by programs, and by a client that sends the whole text at each step."""
    print(f"{'program':10} {'whole text':>11} {'lang':>9} {'ratio':>7}   tokens of a program computed twice")
    for name in names:
        with Runtime(threads=threads, max_total_tokens=60_000) as runtime:
            _, _, states = batch(PROGRAMS[name], runtime)
            stats = runtime.get_server_info()
            twice = stats["recomputed_tokens"] + sum(recomputed(state) for state in states)
        whole = sum(done.usage.prompt_tokens for state in states for done in state.graph.done.values())
        print(f"{name:10} {whole:11} {stats['tokenized']:9} {whole / stats['tokenized']:7.1f}   {twice}", flush=True)


def recomputed(state: Any) -> int:
    """Tokens that a step computed although an earlier step on its path had computed them."""
    graph, twice = state.graph, 0
    for id in graph.generations():
        above = next(
            (n for n in reversed(graph.path(id)[:-1]) if n in graph.done and graph.done[n].usage.prompt_tokens), None
        )
        if above is not None:
            before = graph.done[above].usage.prompt_tokens
            twice += max(0, before - graph.done[id].usage.cached_tokens)
    return twice


def overhead() -> None:
    @function
    def steps(s: Any, n: int) -> None:
        s += f"program {n}: "
        for step in range(10):
            s += f"step {step}: "
            s += gen(f"x{step}", max_tokens=16)
            assert s[f"x{step}"]

    threads: set[int] = set()
    for programs in (1_000, 10_000):
        started = time.process_time()
        steps.run_batch([{"n": n} for n in range(programs)], backend=MockBackend(), num_threads=programs)
        cost = (time.process_time() - started) / programs / 10
        threads.add(threading.active_count())
        print(f"{programs} programs at once x 10 steps: {cost * 1e6:.0f} us of CPU a step, {threads} threads")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("hits", "pool", "calls", "overhead"))
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ablation", action="store_true", help="also each switch off alone")
    options = parser.parse_args()
    print(machine())
    ways: dict[str, Callable[[], None]] = {
        "hits": lambda: hits(options.programs, options.threads),
        "pool": lambda: pool(options.programs, options.threads, options.runs, options.ablation),
        "calls": lambda: calls(options.programs, options.threads),
        "overhead": overhead,
    }
    ways[options.what]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
