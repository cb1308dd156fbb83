"""What the radix tree's operations cost as it grows: CPU time of one thread, medians.

The tree holds stems of 512 tokens, each with many tails of 64. Measured at every size:

    match    8,192 tokens, all of them cached, over a path of 16 nodes
    insert   576 tokens: a cached stem and a new tail of 64
    evict    the least recently used leaf

Run: python scripts/bench/tree_costs.py [--leaves 1000 10000 100000] [--rounds 2000]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from radixrt.bench.machine import watch
from radixrt.cache.radix_tree import RadixTree

STEMS, STEM, TAIL, LONG, PIECE = 50, 512, 64, 8192, 512
LIMITS_US = {"match": 60.0, "insert": 60.0, "evict": 15.0}
MOST_GROWTH = 1.5
VOCABULARY = 49152


def measure(leaves: int, rounds: int, seed: int = 0) -> dict[str, list[float]]:
    """CPU microseconds of every single operation on a tree of ``leaves`` leaves, which stays that size throughout."""
    rng = np.random.default_rng(seed)
    stems = rng.integers(0, VOCABULARY, (STEMS, STEM), dtype=np.int32)
    long_prompts = rng.integers(0, VOCABULARY, (4, LONG), dtype=np.int32)
    slots = np.arange(LONG, dtype=np.int32)
    tree = RadixTree(page_size=1)
    used = [0] * STEMS

    def sequence() -> np.ndarray:
        tail = rng.integers(0, VOCABULARY, TAIL, dtype=np.int32)
        stem = rng.integers(STEMS)
        tail[0] = used[stem] % VOCABULARY  # no two tails of a stem begin alike: every leaf has TAIL tokens
        used[stem] += 1
        return np.concatenate([stems[stem], tail])

    for _ in range(leaves - len(long_prompts)):
        tree.insert(sequence(), slots[: STEM + TAIL])
    for prompt in long_prompts:  # grown a piece at a time, as a chat grows
        for end in range(PIECE, LONG + 1, PIECE):
            tree.insert(prompt[:end], slots[:end])
    took: dict[str, list[float]] = {"match": [], "insert": [], "evict": []}
    clock = time.thread_time_ns
    for turn in range(rounds):
        prompt, fresh = long_prompts[turn % len(long_prompts)], sequence()
        start = clock()
        match = tree.match(prompt)
        took["match"].append((clock() - start) / 1000)
        assert match.length == LONG
        tree.unlock(match.node)

        start = clock()
        known = tree.insert(fresh, slots[: STEM + TAIL])
        took["insert"].append((clock() - start) / 1000)
        assert known >= STEM

        nodes = tree.nodes
        start = clock()
        tree.evict(TAIL)
        took["evict"].append((clock() - start) / 1000)
        assert tree.nodes == nodes - 1, "not exactly one leaf was evicted"
    tree.check_integrity()
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--leaves", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=2_000, help="operations of each kind at each size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the medians to FILE")
    args = parser.parse_args()
    busy = watch()
    if busy:
        print(f"warning: {busy}")
    medians: dict[str, dict[int, float]] = {name: {} for name in LIMITS_US}
    print(f"{'leaves':>10}" + "".join(f"{name + ' us (mean)':>22}" for name in LIMITS_US))
    for leaves in args.leaves:
        took = measure(leaves, args.rounds)
        for name, values in took.items():
            medians[name][leaves] = statistics.median(values)
        cells = "".join(f"{medians[n][leaves]:>13.1f} ({statistics.fmean(took[n]):6.1f})" for n in LIMITS_US)
        print(f"{leaves:>10,}{cells}", flush=True)
    met = True
    for name, limit in LIMITS_US.items():
        worst, growth = max(medians[name].values()), medians[name][args.leaves[-1]] / medians[name][args.leaves[0]]
        good = worst <= limit and growth <= MOST_GROWTH
        met = met and good
        word = "met" if good else "NOT MET"
        print(f"{name}: at most {worst:.1f} us, goal {limit:g}; grew {growth:.2f}x, goal {MOST_GROWTH}x: {word}")
    if args.json:
        args.json.write_text(json.dumps(medians, indent=2) + "\n", encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
