"""A mixture of experts in torch: the tokens of one expert after the other, so that each matrix is read once."""

from __future__ import annotations

import torch

from radixrt.ops.interface import Ops
from radixrt.ops.weights import Weight, dequantized


def moe(
    ops: Ops,
    x: torch.Tensor,
    experts: torch.Tensor,
    gains: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    kind: str,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    """See ``Ops.moe``. Each choice's output has a row of its own, so that their sum has one order."""
    if not isinstance(gate_up, torch.Tensor):
        gate_up = dequantized(gate_up, x.dtype)
    if not isinstance(down, torch.Tensor):
        down = dequantized(down, x.dtype)
    tokens, chosen = experts.shape
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True)  # choices of expert 0, of expert 1, ...
    counts = torch.bincount(flat, minlength=gate_up.shape[0]).tolist()
    parts = x.new_empty((tokens * chosen, down.shape[1]))
    first = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        rows = order[first : first + count]
        first += count
        inner = ops.linear(
            x.index_select(0, rows // chosen), gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert]
        )
        out = ops.linear(ops.gated(inner, kind), down[expert], None if down_bias is None else down_bias[expert])
        parts.index_copy_(0, rows, out)
    return (parts.view(tokens, chosen, -1) * gains.to(x.dtype)[..., None]).sum(dim=1)
