"""KVStore owns the memory behind the page pool: keys and values of every layer, and the final hidden state, of every slot.

The hidden state is kept so that a prompt found whole in the cache needs no computation at all: its next
token's logits, and the logits of all its positions, come from what is stored.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from radixrt.model.config import ModelConfig
from radixrt.ops.native.memory import reserve


class KVShape(Protocol):
    """What the size of a ``KVStore`` follows from; ``ModelConfig`` is one."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...


class KVStore:
    """Buffers for ``slots`` tokens; memory is touched only where it is written.

    Attributes:
        k, v: one tensor a layer, ``[slots, kv_heads, head_dim]``, or ``[kv_heads, slots, head_dim]`` with ``by_head``, in ``kv_dtype``.
            With int8 the codes of a head are followed by the bytes of the float32 each of them is multiplied with.
        hidden: ``[slots, hidden_size]`` after the final norm, in the computation dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        *,
        by_head: bool = False,
    ) -> None:
        outer = (config.num_kv_heads, slots) if by_head else (slots, config.num_kv_heads)
        shape = (*outer, config.head_dim + _scale_bytes(kv_dtype))
        if by_head:
            both = (2 * config.num_layers, *shape)
            memory = torch.frombuffer(reserve(math.prod(both) * kv_dtype.itemsize), dtype=kv_dtype).view(both)
            self.k, self.v = list(memory[: config.num_layers]), list(memory[config.num_layers :])
        else:
            self.k = [torch.empty(shape, dtype=kv_dtype, device=device) for _ in range(config.num_layers)]
            self.v = [torch.empty(shape, dtype=kv_dtype, device=device) for _ in range(config.num_layers)]
        self.hidden = torch.empty((slots, config.hidden_size), dtype=dtype, device=device)


def bytes_per_token(config: KVShape, dtype: torch.dtype, kv_dtype: torch.dtype) -> int:
    """Bytes that one token takes in a ``KVStore``."""
    head = config.head_dim * kv_dtype.itemsize + _scale_bytes(kv_dtype)
    return 2 * config.num_layers * config.num_kv_heads * head + config.hidden_size * dtype.itemsize


def _scale_bytes(kv_dtype: torch.dtype) -> int:
    return 4 if kv_dtype is torch.int8 else 0
