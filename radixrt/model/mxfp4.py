"""Reads gpt-oss's experts: 4-bit floats (e2m1) in blocks of 32 with one power of two each (OCP Microscaling Formats, 2023)."""

from __future__ import annotations

import torch

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
NAN = 255  # the exponent of a block that is no number


def expand(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[..., groups, 16]`` bytes and ``[..., groups]`` exponents, both uint8, as numbers ``[..., 32 * groups]``.

    The low half of a byte comes first. Exact in bfloat16 and float32.
    """
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32)
    out = torch.empty((*blocks.shape[:-1], 32), dtype=dtype)
    for one in range(len(blocks)):  # an expert at a time: float32 is eight times what is stored
        codes = torch.stack((blocks[one] & 15, blocks[one] >> 4), dim=-1).flatten(-2).long()
        out[one] = torch.ldexp(table[codes], scales[one].int().sub(_BIAS)[..., None]).to(dtype)
    return out.flatten(-2)
