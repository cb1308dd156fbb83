"""Chooses the implementation of ``Ops``, once, when an engine starts."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import psutil
import torch

from radixrt.errors import InvalidRequest, shown
from radixrt.ops.interface import Ops
from radixrt.ops.torch.ops import TorchOps

log = logging.getLogger("radixrt")


def load_ops(dtype: torch.dtype, *, reference: bool = False) -> Ops:
    """The operations for this machine: Triton's kernels where torch has CUDA, else torch. ``reference``: torch everywhere."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and not reference:
        try:
            from radixrt.ops.triton.ops import TritonOps
        except ImportError as error:
            log.warning("Triton kernels: %s; the torch reference computes, which is slower", error)
        else:
            return TritonOps(device, dtype)
    return TorchOps(device, dtype)


def default_dtype() -> torch.dtype | None:
    """The computation dtype where none is asked for; ``None``: the model's own."""
    return None if torch.cuda.is_available() else torch.float32


def cores() -> int:
    """Physical cores this process may use, and no more threads than OMP_NUM_THREADS says where it is set."""
    count = psutil.cpu_count(logical=False) or 1
    if hasattr(os, "sched_getaffinity"):
        count = min(count, len(os.sched_getaffinity(0)))
    try:  # what the control group may use, "max" or microseconds in so many
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        pass
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(count, int(asked)) if asked.isdecimal() and int(asked) > 0 else count


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated on ``device`` now; on a CPU no more than the control group allows."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no control group, or no limit
        return free
    return max(0, min(free, limit - used))


def use_threads(threads: int | None) -> int:
    """Set the CPU threads of this process's forward passes (default: the physical cores); returns how many.

    Raises:
        InvalidRequest: torch does not take that many.
    """
    try:
        torch.set_num_threads(threads or torch.get_num_threads())
    except (RuntimeError, ValueError, OverflowError) as error:
        raise InvalidRequest("threads", f"={shown(threads)}: {shown(str(error), 200)}") from None
    return torch.get_num_threads()
