"""How much memory of a GPU the KV pool gets: what is left when the weights are there and the largest step has its room."""

from __future__ import annotations

from collections.abc import Callable

import torch

from radixrt.errors import InvalidRequest


def pool_tokens(free: int, step: int, fraction: float, per_token: int, most: int) -> int:
    """Tokens of the pool.

    Args:
        free: bytes that are free once the weights are loaded. step: bytes that the largest step needs beyond its KV.
        fraction: share of what is left that the pool may take. per_token: bytes.

    Raises:
        InvalidRequest: there is not room for one token.
    """
    tokens = min(most, int(max(0, free - step) * fraction) // per_token)
    if tokens < 1:
        raise InvalidRequest(
            "kv_memory_fraction",
            f"={fraction}: of {free / 1e9:,.1f} GB that the weights leave free a step takes {step / 1e9:,.1f} GB, "
            f"and no token of {per_token} bytes fits into its share of the rest",
        )
    return tokens


def step_bytes(device: torch.device, step: Callable[[], None]) -> int:
    """Bytes that ``step`` has allocated on a GPU at most, beyond what was there before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    peak = int(torch.cuda.max_memory_allocated(device)) - before
    torch.cuda.empty_cache()
    return peak
