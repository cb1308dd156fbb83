"""From process start to the first token of the default model, and the memory it takes.

Each run is a fresh process. Its clock starts before it is spawned and stops when it reports its first token, so that
the interpreter, the imports, the loading and the prefill all count. The first run only warms the page cache.

Run alone on the machine: python scripts/bench/startup.py [--runs 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from radixrt.bench.machine import watch

GOAL_S = 4.0
CHILD = """
import json, sys, time
begin = time.time()
from radixrt import Engine, SamplingParams
imported = time.time()
engine = Engine(model=sys.argv[1] or None)
loaded = time.time()
for delta in engine.stream("The capital of France is", SamplingParams(max_tokens=4, temperature=0.0)):
    break
first = time.time()
from radixrt.bench.machine import peak_memory_bytes
print(json.dumps({"python": begin, "import": imported, "load": loaded, "first": first, "peak": peak_memory_bytes()}))
"""


def once(model: str | None) -> dict[str, float]:
    """Seconds since the spawn at which each phase was done, and peak memory in bytes."""
    start = time.time()
    command = [sys.executable, "-c", CHILD, model or ""]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    seen = json.loads(done.stdout.splitlines()[-1])
    return {name: value if name == "peak" else value - start for name, value in seen.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="directory or .gguf; nothing: the embedded default")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the runs to FILE")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error(f"--runs={args.runs}: must be at least 1")
    once(args.model)
    busy = watch()
    if busy:
        print(f"warning: {busy}")
    runs = [once(args.model) for _ in range(args.runs)]
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    print(f"{'phase':<28}{'done after':>12}   median of {args.runs} processes")
    for name, title in (
        ("python", "interpreter"),
        ("import", "import radixrt"),
        ("load", "Engine()"),
        ("first", "first token"),
    ):
        print(f"{title:<28}{middle[name]:>10.2f} s")
    spread = f"{min(run['first'] for run in runs):.2f} to {max(run['first'] for run in runs):.2f} s"
    met = middle["first"] < GOAL_S
    print(f"first token {spread}, goal under {GOAL_S:g} s: {'met' if met else 'NOT MET'}")
    print(f"peak memory {middle['peak'] / 2**20:.0f} MiB")
    if args.json:
        args.json.write_text(json.dumps(runs, indent=2) + "\n", encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
