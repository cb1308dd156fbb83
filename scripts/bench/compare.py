"""Our engine beside ``transformers.generate``: same weights, same prompts, one process, A B A B.

    few-shot >= 5x, tree of thought >= 3x, unshared >= 1x, single stream >= 1x, and with nothing to share
    the cache costs at most 1 %.

Run alone on the machine: python scripts/bench/compare.py [--repeats 3] [--scale 1.0] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from radixrt.bench.cli import CACHE_GOAL, bench
from radixrt.bench.report import Goal
from radixrt.bench.workloads import WORKLOADS
from radixrt.errors import RadixrtError

GOALS = (
    Goal("few-shot", "wall_s", 5.0),
    Goal("tree-of-thought", "wall_s", 3.0),
    Goal("unshared", "wall_s", 1.0),
    Goal("single-stream", "wall_s", 1.0),
)
CACHE_REPEATS = 7  # a difference of 1 % needs more pairs than one of 500 %


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workload", nargs="*", choices=[*WORKLOADS, "cache-ab", []], help="default: all with a goal")
    parser.add_argument("--model", help="directory or .gguf; nothing: the embedded default")
    parser.add_argument("--threads", type=int, help="torch threads of both engines; nothing: the physical cores")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache-repeats", type=int, default=CACHE_REPEATS)
    parser.add_argument("--peer-batch", type=int, help="the peer's batch size; nothing: the best, measured")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every run to FILE")
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in ("model", "threads") if getattr(args, name) is not None}
    names = args.workload or [goal.workload for goal in GOALS] + ["cache-ab"]
    console = Console(soft_wrap=True)
    judged: list[tuple[str, bool]] = []
    parts: list[Path] = []
    for name in names:
        part = None
        if args.json:
            part = args.json.with_suffix(f".{name}.json")
            parts.append(part)
        ab = name == "cache-ab"
        _comparisons, found = bench(
            ["unshared" if ab else name],
            settings,
            peers=() if ab else ("transformers",),
            peer_batch=args.peer_batch,
            repeats=args.cache_repeats if ab else args.repeats,
            scale=args.scale,
            cache_ab=ab,
            goals=(CACHE_GOAL,) if ab else GOALS,
            console=console,
            json_file=part,
        )
        judged += found
    if args.json:
        args.json.write_text(json.dumps([json.loads(part.read_text()) for part in parts], indent=2) + "\n")
        for part in parts:
            part.unlink()
    console.rule("goals")
    for text, met in judged:
        console.print(text, style="green" if met else "red", markup=False, highlight=False)
    return 0 if all(met for _text, met in judged) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RadixrtError as error:
        sys.exit(f"error: {error}")
