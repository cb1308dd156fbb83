"""Owns ``radixrt bench --limits``: what this machine can do at most, and which share of it the native kernels reach.

    decode, one sequence    bytes of weights, keys and values read a second, of the bandwidth of reading memory
    decode, 16 sequences    operations of the matrices a second, of the peak of 8-bit dot products (float32 where weights are floats)
    prefill, 2,048 tokens   the same

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
_PROMPT = 2048
_BATCH = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Of all threads together, a second."""

    variant: str
    threads: int
    read: float  # bytes
    int8: float  # operations: a multiplication and an addition are two
    float32: float


@dataclass(frozen=True, slots=True)
class Share:
    """What a workload reached of a limit."""

    workload: str
    rate: float  # tokens a second
    reached: float
    limit: float
    unit: str

    @property
    def share(self) -> float:
        return self.reached / self.limit


def measure_limits(threads: int, repeats: int = 3) -> Limits:
    """What ``threads`` threads reach at once, the best of ``repeats``."""
    from radixrt.ops.native import native

    buffers = [np.ones(_BUFFER, dtype=np.uint8) for _ in range(threads)]
    best: dict[str, float] = {"read": 0.0, "int8": 0.0, "float32": 0.0}
    variant = ""
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            found = list(pool.map(native.peaks, buffers))
            variant = found[0]["variant"]
            best = {name: max(value, sum(one[name] for one in found)) for name, value in best.items()}
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

    def attended(positions: range) -> float:  # operations of attention for one token at each of these positions
        return 4.0 * config.num_layers * config.num_heads * config.head_dim * sum(positions)

    peak, unit = (limits.int8, "int8") if decoder.quantized else (limits.float32, "float32")
    shares = []
    new, length = 64, 64
    seconds = median(lambda: timed(1, length, new)) / new
    kv = engine.model_info.kv_bytes_per_token * (length + new / 2)
    shares.append(
        Share("decode, one sequence", 1 / seconds, (decoder.weight_bytes + kv) / seconds, limits.read, "bytes/s")
    )
    seconds = median(lambda: timed(_BATCH, length, new))
    operations = _BATCH * (new * 2.0 * (matrices + head) + attended(range(length, length + new)))
    shares.append(
        Share(f"decode, {_BATCH} sequences", _BATCH * new / seconds, operations / seconds, peak, f"{unit} ops/s")
    )
    seconds = median(lambda: timed(1, _PROMPT, 1))
    operations = 2.0 * (matrices * _PROMPT + head) + attended(range(1, _PROMPT + 1))
    shares.append(Share(f"prefill, {_PROMPT:,} tokens", _PROMPT / seconds, operations / seconds, peak, f"{unit} ops/s"))
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
    table = Table(title=f"{limits.variant}, {limits.threads} threads")
    for column in ("workload", "tokens/s", "reached", "limit", "share"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for one in shares:
        table.add_row(
            one.workload,
            f"{one.rate:,.0f}",
            f"{one.reached / 1e9:,.1f} G{one.unit}",
            f"{one.limit / 1e9:,.1f}",
            f"{one.share:.0%}",
        )
    console.print(table)
    console.print(
        f"limits: reads {limits.read / 1e9:.1f} GB/s, 8-bit dot products {limits.int8 / 1e9:,.0f} Gops/s, "
        f"float32 {limits.float32 / 1e9:,.0f} GFLOP/s",
        markup=False,
        highlight=False,
    )
    return {"limits": asdict(limits), "shares": [{**asdict(one), "share": one.share} for one in shares]}
