"""Chooses the implementation of ``Ops``, once, when an engine starts."""

from __future__ import annotations

import torch

from radixrt.ops.interface import Ops
from radixrt.ops.torch.ops import TorchOps


def load_ops(dtype: torch.dtype) -> Ops:
    """The operations for this machine: CUDA where torch has it, else the CPU."""
    return TorchOps(torch.device("cuda" if torch.cuda.is_available() else "cpu"), dtype)


def default_dtype() -> torch.dtype | None:
    """The computation dtype where none is asked for; ``None``: the model's own."""
    return None if torch.cuda.is_available() else torch.float32


def use_threads(threads: int | None) -> int:
    """Set the CPU threads of this process's forward passes (default: the physical cores); returns how many."""
    torch.set_num_threads(threads or torch.get_num_threads())
    return torch.get_num_threads()
