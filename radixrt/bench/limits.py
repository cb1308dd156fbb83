"""Owns ``radixrt bench --limits``: what this machine can do at most, and which share of it the native kernels reach.

    decode, one sequence    bytes of weights, keys and values read, of the bandwidth of reading memory
    decode, 16 sequences    operations, of the peaks of the arithmetic they are done in: matrices of quantized weights in 8-bit dot products,
    prefill, 2,048 tokens   attention to int16 keys and values in 16-bit ones, everything else in float32

A share is the time the machine needs at its limits, of the time that was measured.

Invariants: limits and shares are measured in one run, on the threads that the engine computes with; medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from radixrt.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

    from radixrt import Engine

_BUFFER = 96 * 2**20  # bytes each thread reads: more than caches hold
_READS = 20
_PROMPT = 2048
_BATCH = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Of all threads together, a second."""

    variant: str
    threads: int
    read: float  # bytes
    int8: float  # operations: a multiplication and an addition are two
    int16: float
    float32: float

    def __str__(self) -> str:
        return (
            f"{self.variant}, {self.threads} threads: read {self.read / 1e9:.1f} GB/s, dot products in 8 bits "
            f"{self.int8 / 1e9:,.0f} and in 16 {self.int16 / 1e9:,.0f} Gops/s, float32 {self.float32 / 1e9:,.0f} GFLOP/s"
        )


@dataclass(frozen=True, slots=True)
class Share:
    """What a workload reached: tokens a second, and the part of its time that reading and arithmetic need at the limits."""

    workload: str
    rate: float
    reading: float
    arithmetic: float


def measure_limits(threads: int, repeats: int = 3) -> Limits:
    """What ``threads`` threads reach at once, the best of ``repeats``; memory is what they share, so it is read by all at the same time.

    Raises:
        InvalidRequest: the native kernels, which do the measuring, were not built.
    """
    from radixrt.ops.native import native

    if native is None:
        raise InvalidRequest("limits", ": cannot be measured, the native kernels were not built")
    buffers = [np.ones(_BUFFER, dtype=np.uint8) for _ in range(threads)]
    best: dict[str, float] = {"read": 0.0, "int8": 0.0, "int16": 0.0, "float32": 0.0}
    variant = ""
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            found = list(pool.map(native.peaks, buffers))
            variant = found[0]["variant"]
            rates = {name: sum(one[name] for one in found) for name in ("int8", "int16", "float32")}
            started = time.perf_counter()
            list(pool.map(lambda buffer: [native.read(buffer) for _ in range(_READS)], buffers))
            rates["read"] = threads * _READS * _BUFFER / (time.perf_counter() - started)
            best = {name: max(value, rates[name]) for name, value in best.items()}
    return Limits(variant, threads, **best)


def measure_shares(engine: Engine, limits: Limits, repeats: int = 3) -> list[Share]:
    """Run the three workloads on a native engine."""
    from radixrt import SamplingParams

    decoder: Any = engine._runner.decoder
    matrices, head = decoder.matrix_parameters, decoder.head_parameters
    config = decoder.config
    random = np.random.default_rng(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [random.integers(0, config.vocab_size, length).tolist() for _ in range(count)]

    def timed(count: int, length: int, new: int) -> float:
        asked = prompts(count, length)
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        if new > 1:  # so that only decoding is left
            engine.generate(asked, SamplingParams(temperature=0, max_tokens=0), progress=False)
        started = time.perf_counter()
        engine.generate(asked, params, progress=False)
        return time.perf_counter() - started

    def median(run: Callable[[], float]) -> float:
        run()
        return statistics.median(run() for _ in range(repeats))

    def attended(pairs: float) -> float:  # operations of attention for so many pairs of a query and a key
        return 4.0 * config.num_layers * config.num_heads * config.head_dim * pairs

    per_token = engine.model_info.kv_bytes_per_token
    matrix_peak = limits.int8 if decoder.quantized else limits.float32
    attention_peak = limits.int16 if engine.model_info.kv_dtype == "int16" else limits.float32
    shares = []

    def share(name: str, seconds: float, tokens: int, read: float, multiplied: float, positions: float) -> None:
        arithmetic = 2.0 * multiplied / matrix_peak + attended(positions) / attention_peak
        shares.append(Share(name, tokens / seconds, read / limits.read / seconds, arithmetic / seconds))

    new, length = 64, 64
    middle = length + new / 2
    for batch, name in ((1, "decode, one sequence"), (_BATCH, f"decode, {_BATCH} sequences")):
        share(
            name,
            median(lambda batch=batch: timed(batch, length, new)),  # type: ignore[misc]
            batch * new,
            new * (decoder.weight_bytes + batch * per_token * middle),
            batch * new * (matrices + head),
            batch * new * middle,
        )
    prompt = min(_PROMPT, engine.model_info.context_length - 1)
    share(
        f"prefill, {prompt:,} tokens",
        median(lambda: timed(1, prompt, 1)),
        prompt,
        decoder.weight_bytes + per_token * prompt,
        matrices * prompt + head,
        prompt * (prompt + 1) / 2,
    )
    return shares


def show_limits(settings: dict[str, Any], repeats: int, console: Console) -> dict[str, Any]:
    """Measure, print the table, and return it as plain values.

    Raises:
        InvalidRequest: the native kernels do not run here.
    """
    from dataclasses import asdict

    from rich.table import Table

    from radixrt import Engine

    with Engine(**{"disable_radix_cache": False, **settings}) as engine:
        if not engine.model_info.kernels.startswith("native"):
            raise InvalidRequest("--limits", f": the native kernels do not run here, {engine.model_info.kernels} does")
        limits = measure_limits(engine.model_info.threads, repeats)
        shares = measure_shares(engine, limits, repeats)
    table = Table()
    for column in ("workload", "tokens/s", "share of reading", "share of arithmetic"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for one in shares:
        table.add_row(one.workload, f"{one.rate:,.0f}", f"{one.reading:.0%}", f"{one.arithmetic:.0%}")
    console.print(table)
    console.print(str(limits), markup=False, highlight=False)
    return {"limits": asdict(limits), "shares": [asdict(one) for one in shares]}
