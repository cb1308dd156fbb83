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

_TILE = 16  # slots whose keys and values lie together with int16


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
            With int8 and int16 the codes of a head are followed by the bytes of the float32 each of them is multiplied with;
            int16 lies in tiles of 16 slots, in which each has that much room (``types.hpp``).
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
        places = -(-slots // _TILE) * _TILE if kv_dtype is torch.int16 else slots
        outer = (config.num_kv_heads, places) if by_head else (places, config.num_kv_heads)
        shape = (*outer, _elements(config, kv_dtype))
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
    head = _elements(config, kv_dtype) * kv_dtype.itemsize
    return 2 * config.num_layers * config.num_kv_heads * head + config.hidden_size * dtype.itemsize


def pages_together(kv_dtype: torch.dtype, page_size: int) -> int:
    """Pages whose keys and values lie together, so that one sequence should have them all."""
    return _TILE // page_size if kv_dtype is torch.int16 and _TILE % page_size == 0 else 1


def _elements(config: KVShape, kv_dtype: torch.dtype) -> int:
    """Of one head in one slot."""
    if kv_dtype is torch.int16:
        return -(-config.head_dim // _TILE) * _TILE + 2
    return config.head_dim + (4 if kv_dtype is torch.int8 else 0)
