"""Batches of paged sequences and packed weights for the checks: random, on the device, the same for the same shapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixrt.ops.interface import IntArray
from radixrt.ops.weights import FP8, Fp8Weight, IntWeight, Weight, pack_nibbles


@dataclass(frozen=True, slots=True)
class Paged:
    """Sequences over a KV cache: ``q [T, H, D]``, ``k, v [S, K, D]``."""

    q_lens: IntArray
    kv_lens: IntArray
    slots: IntArray
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def paged(
    device: torch.device,
    q_lens: list[int],
    kv_lens: list[int],
    *,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    page: int = 16,
    shared: int = 0,
) -> Paged:
    """Pages lie anywhere. The first ``shared`` keys are those of one prefix, for every sequence that is longer."""
    draw = np.random.default_rng(len(kv_lens))
    prefix = -(-shared // page)
    counts = [-(-max(0, n - prefix * page) // page) for n in kv_lens]
    pages = draw.permutation(prefix + sum(counts)).astype(np.int32)
    common, pages = pages[:prefix], pages[prefix:]
    slots = []
    for n, count in zip(kv_lens, counts, strict=True):
        mine = np.concatenate((common, pages[:count]))
        slots.append((mine[:, None] * page + np.arange(page, dtype=np.int32)).ravel()[:n])
        pages = pages[count:]
    size = (prefix + sum(counts)) * page
    torch.manual_seed(dim)
    q = torch.randn(sum(q_lens), heads, dim, device=device).to(dtype)
    k, v = (torch.randn(max(size, 1), kv_heads, dim, device=device).to(dtype) for _ in range(2))
    queries, keys, flat = (np.array(each, dtype=np.int32) for each in (q_lens, kv_lens, np.concatenate(slots)))
    return Paged(queries, keys, flat, q, k, v)


def packed(device: torch.device, shape: tuple[int, ...], form: str, dtype: torch.dtype) -> Weight:
    """A random matrix (or one for each expert) of ``dense``, ``int4``, ``int8``, ``fp8`` (a scale for 128 x 128) or ``fp8-row``."""
    torch.manual_seed(shape[-1])
    columns = shape[-1]
    if form == "dense":
        return torch.randn(shape, device=device, dtype=dtype) / columns**0.5
    if form in ("int4", "int8"):
        bits, group = int(form[3]), min(128, columns)
        codes = torch.randint(0, 2**bits, shape, device=device, dtype=torch.uint8)
        scales = (
            (torch.rand(*shape[:-1], columns // group, device=device) + 0.5).half() / 2 ** (bits - 2) / columns**0.5
        )
        zeros = torch.randint(0, 2**bits, scales.shape, device=device, dtype=torch.uint8)
        return IntWeight(pack_nibbles(codes) if bits == 4 else codes, scales, zeros, bits, group)
    rows, group = (128, min(128, columns)) if form == "fp8" else (1, columns)
    codes = (torch.randn(shape, device=device) * 60).to(FP8)
    scales = torch.rand(*shape[:-2], -(-shape[-2] // rows), -(-columns // group), device=device) + 0.5
    return Fp8Weight(codes, scales / 60 / columns**0.5, rows, group)
