"""TorchOps: the reference implementation of ``Ops``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from radixrt.ops.interface import IntArray
from radixrt.ops.torch import attention as paged
from radixrt.ops.torch.experts import moe
from radixrt.ops.weights import FP8_MAX, Weight, dequantized

_FEW_ROWS = 64  # up to here a CPU multiplies weight @ x^T instead of x @ weight^T
_ALPHA, _LIMIT = 1.702, 7.0  # of swiglu_oai


class TorchOps:
    """``Ops`` in plain torch on ``device``; see the interface for the signatures."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not isinstance(weight, torch.Tensor):
            weight = dequantized(weight, x.dtype)
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
        if weight.dtype is torch.float32:
            return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)
        return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        return F.layer_norm(x.to(weight.dtype), (x.shape[-1],), weight, bias, eps).to(x.dtype)

    def activate(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        if kind == "silu":
            return F.silu(x)
        return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")

    def gated(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if kind != "swiglu_oai":
            return self.activate(gate, kind).mul_(up)
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
        return gate * torch.sigmoid(_ALPHA * gate) * (up + 1)

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
        self.store(k_cache, slots, _rotated(k, cos, sin))
        self.store(v_cache, slots, v)
        return _rotated(q, cos, sin)

    def store(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        if (
            cache.dtype is torch.float8_e4m3fn
        ):  # not every torch saturates: in some, what is beyond its range is no number
            cache, rows = cache.view(torch.uint8), rows.clamp(-FP8_MAX, FP8_MAX).to(cache.dtype).view(torch.uint8)
        cache.index_copy_(0, slots, rows.to(cache.dtype))

    def plan_attention(
        self, q_lens: IntArray, kv_lens: IntArray, kv_slots: IntArray, heads: int, kv_heads: int, window: int | None
    ) -> paged.Plan:
        return paged.plan_attention(q_lens, kv_lens, kv_slots, heads, kv_heads, window, self.dtype, self.device)

    def attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: paged.Plan,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return paged.attention(q, k_cache, v_cache, plan, scale, softcap, sinks)

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
        return moe(self, x, experts, gains, gate_up, down, kind, gate_up_bias, down_bias)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)
