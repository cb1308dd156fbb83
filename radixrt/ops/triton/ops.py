"""TritonOps: ``Ops`` on a CUDA device, by the kernels of this folder; matrices of plain numbers are the vendor's library's."""

from __future__ import annotations

from typing import Any

import torch

from radixrt.ops.interface import IntArray
from radixrt.ops.triton import attention as paged
from radixrt.ops.triton import linear as matrices
from radixrt.ops.triton import rows, sampling
from radixrt.ops.triton.moe import moe
from radixrt.ops.triton.plan import PaddedPlan, Plan, plan_attention
from radixrt.ops.weights import Weight


class TritonOps:
    """``Ops`` on ``device``; see the interface for the signatures."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return matrices.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rows.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.add_rms_norm(x, residual, weight, eps)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        return rows.layer_norm(x, weight, bias, eps)

    def activate(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        return rows.activate(x, kind)

    def gated(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        return rows.gated(gate_up, kind)

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
        return rows.rope_store(q, k, v, cos, sin, k_cache, v_cache, slots)

    def store(self, cache: torch.Tensor, slots: torch.Tensor, rows_: torch.Tensor) -> None:
        rows.store(cache, slots, rows_)

    def plan_attention(
        self, q_lens: IntArray, kv_lens: IntArray, kv_slots: IntArray, heads: int, kv_heads: int, window: int | None
    ) -> Plan:
        return plan_attention(q_lens, kv_lens, kv_slots, heads, kv_heads, window, self.device)

    def attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Plan,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return paged.attention(q, k_cache, v_cache, plan, scale, softcap, sinks)

    def fixed_plan(
        self, batch: int, max_kv: int, heads: int, kv_heads: int, window: int | None, beside: PaddedPlan | None
    ) -> PaddedPlan:
        """See ``radixrt.model.graphs.FixedPlans``."""
        return PaddedPlan(batch, max_kv, heads, kv_heads, window, self.device, beside=beside)

    def draw(
        self, logits: torch.Tensor, masks: torch.Tensor | None, mask_rows: torch.Tensor | None, wishes: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``radixrt.model.draw.Drawer``: tokens int32 ``[R]``, and the largest allowed logit of each row."""
        if wishes is None:
            return sampling.draw(logits, masks, mask_rows)
        edits = None
        if wishes.edit_ids.numel():
            edits = sampling.Edits(wishes.edit_end, wishes.edit_ids, wishes.edit_factor, wishes.edit_add)
        filters = (wishes.top_k, wishes.top_p, wishes.min_p)
        return sampling.draw(logits, masks, mask_rows, wishes.temperature, *filters, wishes.chance, edits)

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
        return moe(x, experts, gains, gate_up, down, kind, gate_up_bias, down_bias)
