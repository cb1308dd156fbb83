"""Owns what a figure was measured on: the processor, torch, threads, and who else was using the machine.

Invariants: reading never raises; what the platform does not tell is ``None``.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

BUSY_SHARE = 0.10  # of one core used by others: from here on, figures are distorted


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the software a run was measured on."""

    cpu: str
    cores: int
    threads: int
    torch: str
    python: str
    memory_bytes: int | None

    def __str__(self) -> str:
        memory = f", {self.memory_bytes / 2**30:.0f} GiB" if self.memory_bytes else ""
        return (
            f"{self.cpu}, {self.cores} cores{memory}; {self.threads} threads, torch {self.torch}, python {self.python}"
        )


def machine() -> Machine:
    """Describe this machine and process."""
    import torch

    return Machine(
        _cpu_model(),
        usable_cores(),
        torch.get_num_threads(),
        str(torch.__version__),
        platform.python_version(),
        _memory_bytes(),
    )


def usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown CPU"


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


@dataclass(frozen=True, slots=True)
class CpuClock:
    """A reading of the wall clock, this process's CPU time and the whole machine's CPU time, in seconds."""

    wall: float
    own: float
    total: float | None

    @classmethod
    def now(cls) -> CpuClock:
        return cls(time.perf_counter(), time.process_time(), _machine_cpu_seconds())

    def since(self, start: CpuClock) -> tuple[float, float, float | None]:
        """(wall seconds, own CPU seconds, CPU seconds used by others) since ``start``."""
        own = self.own - start.own
        others = None if self.total is None or start.total is None else max(0.0, self.total - start.total - own)
        return self.wall - start.wall, own, others


def _machine_cpu_seconds() -> float | None:
    """CPU seconds used by everything on the machine since it started (Linux)."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None


def busy_warning(others_s: float | None, wall_s: float) -> str | None:
    """A warning when others used the machine for more than a tenth of a core, or ``None``.

    Two busy processes slow each other by more than their share of the cores: memory bandwidth is shared too.
    """
    if others_s is None or wall_s <= 0.0 or others_s / wall_s <= BUSY_SHARE:
        return None
    return (
        f"the machine was busy: other processes used {others_s / wall_s:.0%} of a core during the run; "
        "these figures are distorted, run again alone"
    )


def watch(seconds: float = 0.5) -> str | None:
    """Look at the idle machine for ``seconds``; the warning when someone else is busy, or ``None``."""
    start = CpuClock.now()
    time.sleep(seconds)
    wall, _own, others = CpuClock.now().since(start)
    if others is None:
        try:
            load = os.getloadavg()[0]
        except (OSError, AttributeError):
            return None
        return f"load average is {load:.1f}: figures will be distorted" if load > 0.5 else None
    return busy_warning(others, wall)


def peak_memory_bytes() -> int | None:
    """Most memory this process ever held (resident set)."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
