"""TorchOps: the reference implementation of ``Ops``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from radixrt.ops.interface import IntArray
from radixrt.ops.torch import attention as paged

_FEW_ROWS = 64  # up to here a CPU multiplies weight @ x^T instead of x @ weight^T


class TorchOps:
    """``Ops`` in plain torch on ``device``; see the interface for the signatures."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.shape[0]
        if rows > _FEW_ROWS or x.dtype is not torch.float32 or self.device.type != "cpu":
            return F.linear(x, weight, bias)
        # The BLAS behind torch reads a matrix 1.3 to 3 times as fast when the few rows are the columns of the right
        # operand, and is slowest of all for a single one.
        columns = x.t() if rows > 1 else x.repeat(2, 1).t()
        out = (weight @ columns).t()[:rows].contiguous()
        return out if bias is None else out.add_(bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dtype is torch.float32:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def store(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        cache.index_copy_(0, slots, rows.to(cache.dtype))

    def plan_attention(
        self, q_lens: IntArray, kv_lens: IntArray, kv_slots: IntArray, heads: int, kv_heads: int, window: int | None
    ) -> paged.Plan:
        return paged.plan_attention(q_lens, kv_lens, kv_slots, heads, kv_heads, window, self.dtype, self.device)

    def attention(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: paged.Plan, scale: float
    ) -> torch.Tensor:
        return paged.attention(q, k_cache, v_cache, plan, scale)
