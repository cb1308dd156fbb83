"""What single parts of the native path are worth, on the embedded model (or ``--model``), A B A B, medians.

    python scripts/bench/native.py sharing       decoding 16 requests below one prefix of 2,000 tokens, with and without reading its KV once
    python scripts/bench/native.py contention    decoding beside none, one and two busy processes
    python scripts/bench/native.py speculation   a copying task, a repeated prompt, stories; speculation 8 against 0

Run alone on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from radixrt import Engine, SamplingParams

STORIES = [
    f"Write a story about {topic}."
    for topic in ("the sea", "a baker", "the moon", "a robot", "rain", "an old map", "a train", "winter")
]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def sharing(model: str | None, rounds: int) -> None:
    random = np.random.default_rng(0)
    with Engine(model, max_total_tokens=8192) as engine:
        prefix = random.integers(100, 40000, 2000).tolist()
        prompts = [[*prefix, *random.integers(100, 40000, 8).tolist()] for _ in range(16)]
        times: dict[bool, list[float]] = {True: [], False: []}
        tokens = {}
        for _ in range(rounds + 1):
            for on, found in times.items():
                engine._runner.decoder.share_prefixes(on)  # type: ignore[union-attr]
                engine.generate(prompts, greedy(1))  # all of the prompt is cached
                started = time.perf_counter()
                outputs = engine.generate(prompts, greedy(33))
                found.append(time.perf_counter() - started)
                tokens[on] = [output.token_ids for output in outputs]
        assert tokens[True] == tokens[False]
    on_s, off_s = (statistics.median(values[1:]) for values in times.values())
    print(
        f"shared {on_s * 1e3 / 33:.1f} ms a step, not shared {off_s * 1e3 / 33:.1f} ms: {off_s / on_s:.2f}x; same tokens"
    )


def contention(model: str | None, rounds: int) -> None:
    busy = "while True: pass"
    with Engine(model, max_total_tokens=8192) as engine:
        for batch in (1, 16):
            prompts = [engine.tokenizer.encode(story) for story in (STORIES * 2)[:batch]]
            engine.generate(prompts, greedy(8))
            alone = statistics.median(seconds(lambda p=prompts: engine.generate(p, greedy(64))) for _ in range(rounds))  # type: ignore[misc]
            print(f"batch {batch}: alone {batch * 64 / alone:.0f} tokens/s", end="")
            for count in (1, 2):
                others = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(count)]
                try:
                    time.sleep(0.5)
                    beside = statistics.median(
                        seconds(lambda p=prompts: engine.generate(p, greedy(64)))
                        for _ in range(rounds)  # type: ignore[misc]
                    )
                finally:
                    for other in others:
                        other.kill()
                        other.wait()
                print(f", beside {count} busy: {batch * 64 / beside:.0f} ({alone / beside:.0%})", end="")
            print()


def speculation(model: str | None, rounds: int) -> None:
    text = "The committee met on Tuesday. Members were Ann Lee, Bob Stone and Carla Diaz. They agreed on the budget of 4,200 euros."
    copying = [{"role": "user", "content": f"Repeat this text exactly, twice:\n{text}"}]
    cases = {
        "copying, greedy": ([copying], greedy(96), True),
        "the same prompt again, greedy": ([STORIES[0]], greedy(96), False),
        "stories one by one, temperature 0.8": (
            STORIES[:4],
            SamplingParams(temperature=0.8, seed=1, max_tokens=96, ignore_eos=True),
            True,
        ),
        "8 stories at once, temperature 0.8": (
            STORIES,
            SamplingParams(temperature=0.8, seed=1, max_tokens=96, ignore_eos=True),
            True,
        ),
    }
    with (
        Engine(model, max_total_tokens=8192) as plain,
        Engine(model, max_total_tokens=8192, speculation=8) as guessing,
    ):
        for name, (prompts, params, fresh) in cases.items():
            times: dict[int, list[float]] = {0: [], 1: []}
            outputs = {}
            for _ in range(rounds + 1):
                for which, engine in enumerate((plain, guessing)):
                    if fresh:
                        engine.flush_cache()
                    started = time.perf_counter()
                    if "one by one" in name:
                        outputs[which] = [engine.generate(prompt, params)[0].token_ids for prompt in prompts]
                    else:
                        outputs[which] = [output.token_ids for output in engine.generate(prompts, params)]
                    times[which].append(time.perf_counter() - started)
            assert outputs[0] == outputs[1], name
            before, after = (statistics.median(values[1:]) for values in times.values())
            print(f"{name}: {before:.2f} s, guessing {after:.2f} s: {before / after:.2f}x; same tokens")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sharing", "contention", "speculation"))
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    {"sharing": sharing, "contention": contention, "speculation": speculation}[options.what](
        options.model, options.rounds
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
