"""Section ``engine``: a model of 8 billion random weights end to end: tokens a second, of what the bandwidth allows, and the device's idle time."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from radixrt import Engine, SamplingParams
from radixrt.bench.device.figures import Bench
from radixrt.bench.device.model import LLAMA_8B, TINY, known, random_engine
from radixrt.bench.device.timing import traced_seconds

_MIDDLE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_OFF = {"cuda_graphs": False, "overlap": False}
_SAME = 0.9  # of the requests: where two tokens are as likely, the last bit decides, and all that follows it
_PROMPT = 128  # tokens


def settings(bench: Bench) -> dict[str, Any]:
    """Of every engine of the check."""
    real = {
        "max_total_tokens": 200_000,
        "max_running_requests": 256,
        "chunked_prefill_size": 8192,
        "max_model_len": 8192,
    }
    small = {"max_total_tokens": 2048, "max_running_requests": 64, "chunked_prefill_size": 512, "max_model_len": 1024}
    return bench.pick(real, small)


def run(bench: Bench) -> None:
    name = "greedy tokens"
    bench.part(name, lambda: _same_tokens(bench, name), required=True)
    variants: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
        ("", {}, bench.pick((1, 8, 64, 256), (1, 3))),
        (", without overlap", {"overlap": False}, bench.pick((1, 64), (2,))),
        (", without graphs and overlap", _OFF, (1, 64)),
    ]
    for name, changes, counts in variants[: bench.pick(3, 2)]:
        if known(changes) != changes:
            bench.add(f"decode{name}", None, "", note="left out: this engine has no such settings")
            continue
        bench.part(f"decode{name}", partial(_variant, bench, name, changes, counts))


def _variant(bench: Bench, name: str, changes: dict[str, Any], counts: tuple[int, ...]) -> None:
    start = time.perf_counter()
    with random_engine(bench, **settings(bench), **changes) as engine:
        if not name:
            bench.add("making the model and the engine", time.perf_counter() - start, "s")
            bench.add("what runs it", None, "", note=parts_of(engine))
        for count in counts:
            bench.part(f"decode, batch {count}{name}", partial(_decode, bench, engine, count, name))


def parts_of(engine: Engine) -> str:
    """Which operations compute it, and what of graphs and overlap it has."""
    runner = getattr(engine, "_runner", None)
    decoder = getattr(runner, "decoder", None)
    graphs = getattr(runner, "_graphs", None)
    sizes = "no graphs" if graphs is None else f"graphs of {len(graphs.sizes)} batch sizes"
    ahead = "with overlap" if getattr(runner, "ahead", False) else "no overlap"
    return f"{type(getattr(decoder, 'ops', decoder)).__name__}, {sizes}, {ahead}"


def _same_tokens(bench: Bench, name: str) -> None:
    """A small model in float32, where rounding hardly turns a token: kernels, graphs and overlap beside the plain reference."""
    sizes = {**TINY, **bench.pick(_MIDDLE, {})}
    count, length = bench.pick((40, 64), (3, 6))
    draw, params = np.random.default_rng(0), SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
    shared = draw.integers(8, 264, bench.pick(300, 9)).tolist()
    prompts = [shared + draw.integers(8, 264, 3 + 5 * (i % 4)).tolist() for i in range(count)]
    variants: dict[str, dict[str, Any]] = {
        "the torch reference": {"reference": True, **_OFF},
        "all of it": {"cuda_graphs": True, "overlap": True},
        "no overlap": {"overlap": False},
        "no graphs, no overlap": _OFF,
    }
    answers: dict[str, list[list[int]]] = {}
    for variant, changes in variants.items():
        with random_engine(bench, sizes, "float32", **settings(bench), **changes) as engine:
            outputs = engine.generate(prompts, params, progress=False)
            failed = [output.error for output in outputs if len(output.token_ids) != length]
            if failed:
                raise RuntimeError(f"{variant}: {len(failed)} of {count} requests failed: {failed[0]}")
            answers[variant] = [list(output.token_ids) for output in outputs]
    expected = answers.pop("the torch reference")
    for variant, found in answers.items():
        equal = sum(a == b for a, b in zip(found, expected, strict=True)) / count
        unit = "of requests have the reference's tokens"
        bench.add(f"{name}: {variant}", equal, unit, goal=_SAME, required=True)


def _decode(bench: Bench, engine: Engine, count: int, name: str) -> None:
    params = SamplingParams(max_tokens=bench.pick(2048, 64), temperature=0.0, ignore_eos=True)
    found = decoding(bench, engine, [params] * count, profiled=bench.cuda)
    if bench.warming:
        return
    step = found.step
    bench.add(
        f"decode, batch {count}{name}", found.tokens / found.seconds, "tokens/s", note=f"{step * 1e3:.3g} ms a step"
    )
    goal = 0.75 if count == 1 and not name and not bench.small else None
    read = read_bytes(bench.pick(LLAMA_8B, TINY), 2 if bench.cuda else 4, count, found.context)
    bench.share(f"decode, batch {count}{name}: of the bandwidth limit", read, step, "bandwidth", goal=goal)
    gap = f"decode, batch {count}{name}: the device is idle"
    if found.busy is None:
        bench.add(gap, None, "of a step", note="needs a GPU" if not bench.cuda else "the profiler saw no kernels")
    else:
        goal = 0.05 if count == 64 and not name else None
        bench.add(gap, max(0.0, 1 - found.busy / step), "of a step", goal=goal, at_most=goal is not None)


def read_bytes(sizes: dict[str, Any], item: int, count: int, context: float) -> float:
    """What a step of ``count`` decodes with ``context`` keys each has to read at least: the matrices, and keys and values."""
    hidden, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
    kv = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * kv * hidden + 3 * hidden * sizes["intermediate_size"]
    return item * (layers * layer + sizes["vocab_size"] * hidden + 2 * layers * kv * count * context)


@dataclass(frozen=True, slots=True)
class Decoding:
    """Steps in which every request decodes. ``busy``: seconds of a step in which the device computes."""

    steps: int
    tokens: int
    seconds: float
    context: float  # tokens a request has, on average
    busy: float | None = None

    @property
    def step(self) -> float:
        return self.seconds / self.steps


def decoding(bench: Bench, engine: Engine, each: list[SamplingParams], *, profiled: bool = False) -> Decoding:
    """Time steps of requests with unlike prompts, from when all of them decode."""
    draw, length = np.random.default_rng(len(each)), bench.pick(_PROMPT, 6)
    vocab = min(engine.model_info.vocab_size, engine.tokenizer.vocab_size)
    ids = [engine.add(draw.integers(8, vocab, length).tolist(), params) for params in each]
    made = dict.fromkeys(ids, 0)

    def step() -> int:
        count = 0
        for delta in engine.step():
            if delta.output is not None and delta.output.error is not None:
                raise RuntimeError(f"a request failed: {delta.output.error}")
            if delta.request_id in made:
                made[delta.request_id] += len(delta.token_ids)
                count += len(delta.token_ids)
        return count

    try:
        for _ in range(2000):
            step()
            if min(made.values()) >= 2:
                break
        else:
            raise RuntimeError(f"{len(each)} requests do not all decode after 2000 steps")
        for _ in range(bench.pick(5, 0)):
            step()
        before = sum(made.values()) / len(made)
        start, steps, tokens = time.perf_counter(), 0, 0
        while steps < bench.pick(30, 2) or (bench.cuda and time.perf_counter() - start < 1.0 and steps < 300):
            tokens += step()
            steps += 1
        took = time.perf_counter() - start
        after = sum(made.values()) / len(made)
        busy = _busy(step, 10) if profiled and not bench.warming else None
    finally:
        for request in ids:
            engine.abort(request)
        while engine.has_work:
            engine.step()
    return Decoding(steps, tokens, took, length + (before + after) / 2, busy)


def _busy(step: Callable[[], object], steps: int) -> float | None:
    """Seconds of a step in which the device computes, as the profiler sees it: that slows the host down, not the kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        watched.export_chrome_trace(str(path))
        return traced_seconds(json.loads(path.read_text()), steps)
