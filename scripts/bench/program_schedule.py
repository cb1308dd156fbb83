"""What program hints buy the scheduler when the pool is too small: a simulation without a model.

Each workload is a batch of programs that arrive together and run on the real scheduler, tree and pool; a step of the "model" only
gives every sampled sequence its next token, the same one whatever else runs. The pool holds a share of all unique tokens. Rows:

    off         policy fcfs, no program information
    lpm         the default policy without program information
    order       + a started program's next step first
    eviction    + what live programs hold is evicted last
    admission   + no more programs are started than fit
    all         the three together

``tokens`` are forward tokens (computed and computed again) as a multiple of the unique ones, ``steps`` forward passes, ``ends`` the mean step
in which a program ends. ``cost A`` is ``A * steps + tokens``: what a run takes where a step costs as much as A tokens whatever is in it
(about 8 for a small model on a CPU, hundreds on a GPU), as a speed-up over ``off``.

Run: python scripts/bench/program_schedule.py [--programs 16] [--pool 0.4] [--chunk 512] [--think 1]
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from radixrt.cache.page_pool import IntArray, PagePool
from radixrt.cache.radix_tree import Hold, RadixTree
from radixrt.scheduler.hints import ProgramHint
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.sequence import Sequence

# one stage of a program: prompts with the tokens to generate, side by side; it is sent what each became
Stage = list[tuple[IntArray, int]]
Steps = Generator[Stage, list[IntArray], None]
COSTS = (8, 64, 256)


def text(size: int, *of: object) -> IntArray:
    """``size`` tokens that belong to ``of``, always the same."""
    return np.random.default_rng(zlib.crc32(repr(of).encode())).integers(0, 49152, size, dtype=np.int32)


def react(program: int) -> Steps:
    state = text(1200, "examples")
    for step in range(5):
        (state,) = yield [(np.concatenate([state, text(80, program, step)]), 40)]


def tree_of_thought(program: int) -> Steps:
    states = [np.concatenate([text(200, "task"), text(80, program)])]
    for stage in range(4):
        states = yield [(np.concatenate([s, text(20, stage, branch)]), 40) for s in states for branch in range(2)]


def chat(program: int) -> Steps:
    state = text(100, "system")
    for turn in range(4):
        (state,) = yield [(np.concatenate([state, text(150, program, turn)]), 100)]


def judge(program: int) -> Steps:
    essay = np.concatenate([text(150, "task"), text(400, program)])
    views = yield [(np.concatenate([essay, text(30, "dimension", branch)]), 60) for branch in range(6)]
    yield [(np.concatenate([essay, *(view[len(essay) :] for view in views)]), 40)]


WORKLOADS: dict[str, tuple[Callable[[int], Steps], int]] = {  # with their number of stages
    "react": (react, 5),
    "tree of thought": (tree_of_thought, 4),
    "chat": (chat, 4),
    "judge": (judge, 2),
}
ABLATIONS: dict[str, dict[str, bool | str]] = {
    "off": {"schedule_policy": "fcfs"},
    "lpm": {"program_order": False, "program_eviction": False, "program_admission": False},
    "order": {"program_eviction": False, "program_admission": False},
    "eviction": {"program_order": False, "program_admission": False},
    "admission": {"program_order": False, "program_eviction": False},
    "all": {},
}


def outcome(prompt: IntArray, new: int) -> IntArray:
    """A prompt and what is generated behind it."""
    return np.concatenate([prompt, text(new, prompt.tobytes())])


@dataclass
class Running:
    """A program under way: its open sequences, what they will become, and what it holds."""

    steps: Steps
    uids: dict[int, int] = field(default_factory=dict)
    stage: list[IntArray] = field(default_factory=list)
    number: int = 0
    done: int = 0
    holds: list[Hold] = field(default_factory=list)


class Result(NamedTuple):
    tokens: int
    steps: int
    ends: float


def run(workload: str, programs: int, pool: int, chunk: int, think: int, **settings: bool | str) -> Result:
    """Run a batch of programs; ``think``: steps that pass before a program's next stage arrives."""
    make, stages = WORKLOADS[workload]
    scheduler = Scheduler(PagePool(pool), RadixTree(), chunk=chunk, max_running=64, max_wait_steps=512, **settings)  # type: ignore[arg-type]
    live = {str(n): Running(make(n)) for n in range(programs)}
    owner: dict[int, str] = {}
    outputs: dict[int, IntArray] = {}
    due: list[tuple[int, str]] = [(0, id) for id in live]
    ends: list[int] = []
    uid = now = 0
    while due or scheduler.has_work:
        for _, id in sorted(item for item in due if item[0] <= now):
            program = live[id]
            try:
                stage = program.steps.send(program.stage) if program.number else next(program.steps)
            except StopIteration:
                for hold in program.holds:
                    scheduler.release(hold, id)
                scheduler.end_program(id)
                ends.append(scheduler.counters.steps)
                continue
            group = f"{id}/{program.number}" if len(stage) > 1 else ""
            for place, (prompt, new) in enumerate(stage):
                hint = ProgramHint(id, workload, int(id), program.done, stages - program.number - 1, group, len(stage))
                sequence = Sequence(uid, prompt, len(prompt) + new, hint=hint)
                owner[uid], outputs[uid], program.uids[uid] = id, outcome(prompt, new), place
                scheduler.add(sequence)
                uid += 1
            program.stage = [prompt for prompt, _ in stage]
            program.number += 1
        due = [item for item in due if item[0] > now]
        now += 1
        batch = scheduler.schedule() if scheduler.has_work else None
        if batch is None:
            continue
        scheduler.commit(batch)
        for sequence in batch.sampled:
            sequence.append(int(outputs[sequence.uid][sequence.size]))
            if sequence.remaining:
                continue
            scheduler.finish(sequence)
            id = owner[sequence.uid]
            program = live[id]
            program.stage[program.uids.pop(sequence.uid)] = outputs[sequence.uid]
            program.done += 1
            if not program.uids:
                held = [scheduler.hold(state, program=id) for state in program.stage]
                for hold in program.holds:
                    scheduler.release(hold, id)
                program.holds = [hold for hold in held if hold is not None]
                due.append((now + think, id))
    scheduler.check_integrity()
    return Result(scheduler.counters.forward_tokens, scheduler.counters.steps, sum(ends) / programs)


def unique_tokens(workload: str, programs: int) -> int:
    tree = RadixTree()
    for number in range(programs):
        steps = WORKLOADS[workload][0](number)
        states: list[IntArray] = []
        with suppress(StopIteration):
            while True:
                states = [outcome(*one) for one in (steps.send(states) if states else next(steps))]
                for state in states:
                    tree.insert(state, np.empty(0, dtype=np.int32))
    return tree.evictable_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=16)
    parser.add_argument("--pool", type=float, default=0.4, help="share of the unique tokens that the pool holds")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of one step")
    parser.add_argument("--think", type=int, default=1, help="steps between the stages of a program")
    args = parser.parse_args()
    for workload in WORKLOADS:
        unique = unique_tokens(workload, args.programs)
        print(f"\n{workload}: {unique:,} unique tokens, pool {int(unique * args.pool):,}")
        print(f"{'':>12}{'tokens':>8}{'steps':>8}{'ends':>8}" + "".join(f"{f'cost {a}':>10}" for a in COSTS))
        base: Result | None = None
        for name, settings in ABLATIONS.items():
            got = run(workload, args.programs, int(unique * args.pool), args.chunk, args.think, **settings)
            base = base or got
            gains = [(a * base.steps + base.tokens) / (a * got.steps + got.tokens) for a in COSTS]
            cells = "".join(f"{gain:>9.2f}x" for gain in gains)
            print(f"{name:>12}{got.tokens / unique:>7.2f}x{got.steps:>8,}{got.ends:>8.0f}{cells}", flush=True)


if __name__ == "__main__":
    main()
