"""Embedding owns what one vector says of a whole prompt: the model's final hidden states (after the last norm), pooled.

Invariants: the vector comes from the states that are stored, so it does not matter which positions were cached; it is summed in one
order, whatever ran beside it; what is not a number is an error, not a vector.
"""

from __future__ import annotations

import numpy as np
import torch

from radixrt.cache.page_pool import IntArray
from radixrt.errors import InvalidRequest, shown

POOLINGS = ("last", "mean")
_ROWS = 1024  # of hidden states held at once


def check_pooling(pooling: object) -> str:
    """Raises InvalidRequest where it is none of ``POOLINGS``."""
    if not isinstance(pooling, str) or pooling not in POOLINGS:
        raise InvalidRequest("pooling", f"={shown(pooling)}: must be one of {', '.join(POOLINGS)}")
    return pooling


@torch.inference_mode()
def pool(hidden: torch.Tensor, slots: IntArray, pooling: str) -> tuple[float, ...]:
    """The pooled hidden states of a computed prompt, float32 values, not normalized.

    Args:
        hidden: of all slots, ``[slots, hidden_size]``. slots: those of the prompt, in its order, at least one.
        pooling: ``last``: the state of the last token; ``mean``: the mean of all.

    Raises:
        ValueError: a value is not finite.
    """
    if pooling == "last":
        slots = slots[-1:]
    total = torch.zeros(hidden.shape[1], dtype=torch.float64)
    for at in range(0, len(slots), _ROWS):
        rows = torch.from_numpy(slots[at : at + _ROWS]).to(hidden.device)
        total += hidden.index_select(0, rows).float().sum(0).double().cpu()
    vector = (total / len(slots)).numpy().astype(np.float32)
    if not np.isfinite(vector).all():
        raise ValueError("the model's hidden states are not finite")
    return tuple(vector.tolist())
