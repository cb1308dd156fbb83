"""Section ``machine``: what the device is, and the peaks that shares are shares of, as torch reaches them."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time

import torch
import triton

from radixrt.bench.device.figures import Bench
from radixrt.bench.device.timing import seconds


def describe(bench: Bench) -> dict[str, object]:
    """The device and the software, in words."""
    found: dict[str, object] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "cpu_cores": os.cpu_count(),
        "device": "cpu, interpreted",
    }
    if bench.cuda:
        has = torch.cuda.get_device_properties(bench.device)
        found |= {
            "device": has.name,
            "capability": f"{has.major}.{has.minor}",
            "multiprocessors": has.multi_processor_count,
            "memory_bytes": has.total_memory,
            "l2_bytes": getattr(has, "L2_cache_size", None),
            "clock_khz": getattr(has, "clock_rate", None),
            "memory_clock_khz": getattr(has, "memory_clock_rate", None),
            "memory_bus_bits": getattr(has, "memory_bus_width", None),
            "cuda": torch.version.cuda,
        }
    return found


@torch.inference_mode()
def run(bench: Bench) -> None:
    """Adds ``bandwidth``, ``bf16 peak`` and ``fp8 peak`` to the figures; the parent makes peaks of them."""
    bench.part("bandwidth", lambda: _bandwidth(bench))
    bench.part("bf16 peak", lambda: _bf16(bench))
    bench.part("fp8 peak", lambda: _fp8(bench))
    bench.part("launch", lambda: _launch(bench))


def _bandwidth(bench: Bench) -> None:
    count = bench.pick(2**31, 2**16)  # bytes
    source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy = 2 * count / seconds(bench, lambda: target.copy_(source), cold=False) / 1e12
    numbers = source.view(torch.float32).nan_to_num_()
    read = count / seconds(bench, lambda: numbers.amax(), cold=False) / 1e12
    bench.add("copying memory (read and written)", copy, "TB/s")
    bench.add("reading memory", read, "TB/s")
    bench.add("bandwidth", max(copy, read), "TB/s", note="the greater of the two: 100 % below")


def _bf16(bench: Bench) -> None:
    size = bench.pick(8192, 64)
    a, b = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    took = seconds(bench, lambda: a @ b, cold=False)
    bench.add(
        "bf16 peak", 2 * size**3 / took / 1e12, "TFLOP/s", note=f"torch, {size} x {size} x {size}, random numbers"
    )
    if bench.cuda:
        clock, memory = _smi("clocks.sm"), _smi("clocks.mem")
        bench.add("clock of the multiprocessors just after it", clock, "MHz")
        bench.add("clock of the memory just after it", memory, "MHz")


def _smi(field: str) -> float | None:
    """A number that the driver's tool tells; ``None``: it does not."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        return float(
            subprocess.run(command, check=False, capture_output=True, text=True, timeout=10).stdout.splitlines()[0]
        )
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None


def _fp8(bench: Bench) -> None:
    if not bench.cuda or torch.cuda.get_device_capability(bench.device) < (8, 9):
        bench.add("fp8 peak", None, "TFLOP/s", note="the device has no fp8 products")
        return
    size = 8192
    a, b = (torch.randn(size, size, device=bench.device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=bench.device)
    took = seconds(
        bench,
        lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True),
        cold=False,
    )
    bench.add("fp8 peak", 2 * size**3 / took / 1e12, "TFLOP/s", note=f"torch, {size} x {size} x {size}")


def _launch(bench: Bench) -> None:
    """One small kernel: how long the host takes to queue it, and until its end is known."""
    x = torch.zeros(16, device=bench.device)

    def wait() -> None:
        if bench.cuda:
            torch.cuda.synchronize()

    queued, ended = [], []
    for _ in range(200):
        wait()
        start = time.perf_counter()
        x.add_(1)
        queued.append(time.perf_counter() - start)
        wait()
        ended.append(time.perf_counter() - start)
    bench.add("a launch by torch, queued", statistics.median(queued) * 1e6, "us")
    bench.add("a launch by torch, until its end is known", statistics.median(ended) * 1e6, "us")
