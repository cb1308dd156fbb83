"""The one interface to the numerical operations: every implementation has these signatures and is tested against ``ops.torch``."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

IntArray: TypeAlias = npt.NDArray[np.int32]


class Ops(Protocol):
    """Operations of a decoder. ``T`` tokens, ``H`` query heads, ``K`` key/value heads, ``D`` head size, ``S`` slots."""

    device: torch.device

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [T, in] @ weight [out, in]^T + bias``."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019)."""

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate ``x [T, heads, D]`` by ``cos, sin [T, 1, D / 2]``; the halves of D are the pairs' two parts."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` for ``gate_up [T, 2 I]``."""

    def store(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """``cache[slots] = rows``, converted to the cache's dtype."""

    def plan_attention(
        self, q_lens: IntArray, kv_lens: IntArray, kv_slots: IntArray, heads: int, kv_heads: int, window: int | None
    ) -> Any:
        """Prepare attention over one batch, once for all layers with the same ``window``.

        Sequence ``b`` has queries at its last ``q_lens[b]`` positions and keys at all ``kv_lens[b]``, whose slots are its part of
        ``kv_slots``. A query sees the keys up to its own position, and no further back than ``window - 1`` before it.
        """

    def attention(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: Any, scale: float
    ) -> torch.Tensor:
        """Attention of ``q [T, H, D]`` (the batch's queries, flat) over ``k_cache, v_cache [S, K, D]``; returns ``[T, H, D]``."""
