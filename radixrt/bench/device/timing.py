"""Owns how a device is timed: medians of runs with cold caches, between events on the device, replayed as CUDA graphs where that can be."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from radixrt.bench.device.figures import Bench

_FLUSH = 256 * 2**20  # bytes: more than any cache between the memory and the multiprocessors
_LEAST, _MOST, _SECONDS = 7, 60, 0.4  # runs, and how long all may take


def seconds(bench: Bench, run: Callable[[], object], *, cold: bool = True) -> float:
    """Median seconds of ``run``; ``cold``: with the caches emptied before each. On a CPU the wall clock, once."""
    if not bench.cuda:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    if bench.warming:
        run()
        torch.cuda.synchronize()
        return 1.0
    replay = recorded(run)
    flush = torch.empty(_FLUSH, dtype=torch.uint8, device=bench.device) if cold else None
    replay()
    torch.cuda.synchronize()
    times: list[float] = []
    until = time.monotonic() + _SECONDS
    while len(times) < _LEAST or (len(times) < _MOST and time.monotonic() < until):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if flush is not None:
            flush.zero_()
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def recorded(run: Callable[[], object]) -> Callable[[], object]:
    """``run`` as a CUDA graph, so that the host's part of it is not measured; as it is where it waits for the host."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and allocates
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return run
    return graph.replay


def busy_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the intervals (begin, duration) lasts."""
    busy, end = 0.0, float("-inf")
    for begin, duration in sorted(intervals):
        busy += max(0.0, begin + duration - max(end, begin))
        end = max(end, begin + duration)
    return busy


def traced_seconds(trace: dict[str, Any], steps: int) -> float | None:
    """Of a Chrome trace (microseconds): the device's busy seconds a step; ``None``: it saw none."""
    on_device = [
        (float(event["ts"]), float(event["dur"]))
        for event in trace.get("traceEvents", [])
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event
    ]
    return busy_seconds(on_device) / 1e6 / steps if on_device else None
