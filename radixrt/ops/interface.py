"""The one interface to the numerical operations: every implementation has these signatures and is tested against ``ops.torch``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from radixrt.ops.weights import Weight

IntArray: TypeAlias = npt.NDArray[np.int32]

# Elementwise functions of ``activate`` and ``gated``, by name. swiglu_oai, of gated alone, is gpt-oss's: with gate <= 7 and -7 <= up <= 7,
# gate * sigmoid(1.702 gate) * (up + 1).
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
GATED = (*ACTIVATIONS, "swiglu_oai")


class Ops(Protocol):
    """Operations of a decoder. ``T`` tokens, ``H`` query heads, ``K`` key/value heads, ``D`` head size, ``S`` slots, ``E`` experts.

    What a norm is multiplied with has the dtype of ``x``, or is float32: then the product is rounded once, at its end.
    """

    device: torch.device

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [T, in] @ weight [out, in]^T + bias``."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019)."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``rms_norm(x + residual)``, and ``x + residual``. Either input may be overwritten."""

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """Layer norm over the last dimension (Ba et al. 2016)."""

    def activate(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """One of ``ACTIVATIONS`` on every element."""

    def gated(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        """``act(gate) * up`` for ``gate_up [T, 2 I]``, its halves gate and up; ``kind`` is one of ``GATED``."""

    def rope_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Rotate the first ``R`` of ``D`` of ``q [T, H, D]`` and ``k [T, K, D]`` by ``cos, sin [T, 1, R / 2]``; store keys and values.

        The halves of R are the pairs' two parts. ``k_cache[slots] = k`` and ``v_cache[slots] = v``, converted to the caches' dtype.
        The inputs may be slices of one tensor. Returns the rotated queries ``[T, H, D]``.
        """

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
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Any,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of ``q [T, H, D]`` (the batch's queries, flat) over ``k_cache, v_cache [S, K, D]``; returns ``[T, H, D]``.

        A score is ``q . k * scale``, then ``softcap * tanh(score / softcap)`` where there is one. ``sinks [H]``: one more score
        of each head, whose value is zero.
        """

    def moe(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        gains: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        kind: str,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The experts' sum for each token: ``x [T, Hd]``, ``experts`` int and ``gains`` ``[T, k]``; returns ``[T, Hd]``.

        Expert ``e`` is ``down[e] @ gated(gate_up[e] @ x, kind)`` with ``gate_up [E, 2 I, Hd]``, ``down [E, Hd, I]`` and their
        biases ``[E, 2 I]``, ``[E, Hd]``. The same tokens give the same bits, whatever batch they are in, as far as the matrix
        products do.
        """
