"""Programs that wait for a tool while other requests want the pool: what the lease of their KV saves, on and off in one run.

python scripts/bench/tool_lease.py [--programs 16] [--at-once 4] [--wait 2.0] [--pool 3200] [--load 8]

Each program has a text of its own, calls a tool that takes ``--wait`` seconds and answers from its result; ``--load`` plain requests of other
texts run beside them all the time. A program *resumes without recomputing* where everything up to its call was still cached, but for the
call's last tokens, which the grammar forced and nobody computed. Prints a line of JSON for each arm, and the ratio of their means.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from itertools import pairwise
from typing import Any

from lang import Runtime, function, gen, user
from radixrt.bench.machine import machine

TAIL = 8  # tokens of "}\n</tool_call>", and the one that ends the text
WORDS = (
    "river stone market light garden winter copper engine letter bridge window forest paper silver harbor music".split()
)


def words(seed: str, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


def arm(leases: bool, settings: argparse.Namespace) -> dict[str, Any]:
    def lookup(word: str) -> str:
        """Look a word up.

        Args:
            word: one of the text.
        """
        time.sleep(settings.wait)
        return f"{word} stands there once."

    @function
    def ask(s: Any, n: int) -> None:
        s += user(f"{words(f'program{n}', 300)}\nLook one of these words up.")
        with s.assistant():
            s += gen(
                "answer",
                tools=[lookup],
                tool_choice="required",
                parallel_tool_calls=False,
                max_rounds=1,
                max_tokens=40,
                temperature=0,
            )

    over, served = threading.Event(), [0]
    with Runtime(max_total_tokens=settings.pool, program_leases=leases) as runtime:

        def load(worker: int) -> None:
            turn = 0
            while not over.is_set():
                turn += 1
                runtime.generate(
                    words(f"load{worker}.{turn}", 250), {"max_tokens": 48, "ignore_eos": True, "temperature": 0}
                )
                served[0] += not over.is_set()

        ask.run(n=-1, backend=runtime)  # compiles, and learns how long the tool takes
        began_stats = runtime.get_server_info()
        workers = [threading.Thread(target=load, args=(i,)) for i in range(settings.load)]
        for worker in workers:
            worker.start()
        began = time.perf_counter()
        batch = [{"n": n} for n in range(settings.programs)]
        states = ask.run_batch(batch, num_threads=settings.at_once, backend=runtime)
        seconds = time.perf_counter() - began
        over.set()
        for worker in workers:
            worker.join()
        stats = runtime.get_server_info()
    kept = again = steps = 0
    for state in states:
        assert state.error() is None, state.error()
        rounds = [state.graph.done[node.id] for node in state.graph if node.kind == "gen"]
        for before, after in pairwise(rounds):
            steps += 1
            had = before.usage.prompt_tokens + before.usage.generated_tokens - TAIL
            kept += after.usage.cached_tokens >= had
            again += max(0, had - after.usage.cached_tokens)
    figures = {name: stats[name] - began_stats[name] for name in stats if name.startswith("leases_")}
    return {
        "leases": leases,
        "resumed_without_recomputing": f"{kept}/{steps}",
        "share": round(kept / max(1, steps), 3),
        "tokens_computed_again": again,
        "programs_per_second": round(len(states) / seconds, 3),
        "load_requests_per_second": round(served[0] / seconds, 2),
        "seconds": round(seconds, 1),
        "preemptions": stats["preemptions"],
        **figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--wait", type=float, default=2.0)
    parser.add_argument("--pool", type=int, default=3200)
    parser.add_argument("--load", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    settings = parser.parse_args()
    print(json.dumps({"machine": machine(), "settings": vars(settings)}, default=str))
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(settings.repeats):
        for leases in (True, False):
            one = arm(leases, settings)
            speeds[leases].append(one["programs_per_second"])
            print(json.dumps(one), flush=True)
    print(json.dumps({"programs_per_second_on_over_off": round(sum(speeds[True]) / sum(speeds[False]), 3)}))


if __name__ == "__main__":
    main()
