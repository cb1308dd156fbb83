"""KVStore owns the memory behind the page pool: keys and values of every layer, and the final hidden state, of every slot.

The hidden state is kept so that a prompt found whole in the cache needs no computation at all: its next
token's logits, and the logits of all its positions, come from what is stored.
"""

from __future__ import annotations

import torch

from radixrt.model.config import ModelConfig


class KVStore:
    """Buffers for ``slots`` tokens; memory is touched only where it is written.

    Attributes:
        k, v: one tensor a layer, ``[slots, kv_heads, head_dim]``, in ``kv_dtype``.
        hidden: ``[slots, hidden_size]`` after the final norm, in the computation dtype.
    """

    def __init__(
        self, config: ModelConfig, slots: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (slots, config.num_kv_heads, config.head_dim)
        self.k = [torch.empty(shape, dtype=kv_dtype, device=device) for _ in range(config.num_layers)]
        self.v = [torch.empty(shape, dtype=kv_dtype, device=device) for _ in range(config.num_layers)]
        self.hidden = torch.empty((slots, config.hidden_size), dtype=dtype, device=device)


def bytes_per_token(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> int:
    """Bytes that one token takes in a ``KVStore``."""
    return 2 * config.num_layers * config.kv_size * kv_dtype.itemsize + config.hidden_size * dtype.itemsize
