"""Bitmasks of allowed tokens, as the grammar's matchers write them, applied to logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Bitmask: TypeAlias = npt.NDArray[np.int32]


def restrict(logits: torch.Tensor, allowed: Mapping[int, Bitmask]) -> None:
    """Rule out, in place, every token of a row of ``logits [R, V]`` whose bit is not set in its mask, int32 ``[ceil(V / 32)]``."""
    rows = torch.tensor(list(allowed), dtype=torch.int64, device=logits.device)
    words = np.stack(list(allowed.values()))
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
    ruled_out = torch.from_numpy(bits).to(logits.device) == 0
    logits[rows] = logits[rows].masked_fill_(ruled_out, float("-inf"))


def clear(mask: Bitmask, ids: npt.NDArray[np.int64]) -> None:
    """Take ``ids`` out of ``mask``, in place, unless nothing would be left."""
    kept = mask.copy()
    for token in ids.tolist():
        kept[token // 32] &= np.int32(~(1 << token % 32)) if token % 32 < 31 else np.int32(0x7FFFFFFF)
    if kept.any():
        mask[:] = kept
