"""Owns the forms of a weight matrix: dense, integer codes with group scales, and fp8 codes with scales.

Invariants: whatever the checkpoint's layout, integer codes are in the one layout of ``IntWeight`` and fp8 ones in that of
``Fp8Weight``; every function here keeps leading dimensions (one of experts); ``dequantized`` is the meaning of a form, to which
the kernels are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import torch

BLOCK = 32  # columns whose 4-bit codes are packed together
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True, eq=False)
class IntWeight:
    """``weight[n, order[k]] = scales[n, k // group] * (code[n, k] - zeros[n, k // group])``.

    Fields:
        codes: uint8. 8 bits: ``[..., N, K]``. 4 bits: ``[..., N, K / 2]``; of each 32 columns, byte j has column j in its low
            half and column j + 16 in its high one, so that a kernel needs no shuffle to multiply the halves.
        scales: float ``[..., N, K / group]``.
        zeros: uint8, like ``scales``; ``None``: the middle, ``2 ** (bits - 1)``.
        order: int64 ``[..., K]``, the column of x that column k of the codes belongs to; ``None``: k. int32 where ``stacked``, which
            is what the kernels read.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int
    order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.bits)

    @property
    def device(self) -> torch.device:
        return self.codes.device


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """``weight[n, k] = scales[n // rows, k // group] * codes[n, k]``.

    Fields:
        codes: float8_e4m3fn ``[..., N, K]``.
        scales: float32 ``[..., ceil(N / rows), ceil(K / group)]``; ``group`` is K where a row has one.
        input_scale: float32 ``[...]``, the static scale of the activations where the checkpoint has one. Only ``rounded`` and
            the kernel for fp8 activations use it; activations are kept as they are unless a caller asks for fp8 ones.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    rows: int
    group: int
    input_scale: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def device(self) -> torch.device:
        return self.codes.device


PackedWeight: TypeAlias = IntWeight | Fp8Weight
Weight: TypeAlias = torch.Tensor | PackedWeight


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 ``[..., K]`` of 0 to 15 -> ``[..., K / 2]``, as ``IntWeight`` has them."""
    low, high = codes.unflatten(-1, (-1, 2, BLOCK // 2)).unbind(-2)
    return (low | high << 4).flatten(-2)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_nibbles``."""
    blocks = packed.unflatten(-1, (-1, BLOCK // 2))
    return torch.stack((blocks & 15, blocks >> 4), dim=-2).flatten(-3)


def dequantized(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The matrix a weight stands for, dense ``[..., N, K]``: computed in float32, rounded once to ``dtype``."""
    if isinstance(weight, torch.Tensor):
        return weight.to(dtype)
    if isinstance(weight, Fp8Weight):
        codes = weight.codes.float()
        rows, columns = codes.shape[-2:]
        scales = weight.scales.repeat_interleave(weight.rows, -2)[..., :rows, :]
        return (codes * scales.repeat_interleave(weight.group, -1)[..., :columns]).to(dtype)
    codes = (weight.codes if weight.bits == 8 else unpack_nibbles(weight.codes)).float()
    groups = codes.unflatten(-1, (-1, weight.group))
    zeros = 2.0 ** (weight.bits - 1) if weight.zeros is None else weight.zeros.float().unsqueeze(-1)
    values = ((groups - zeros) * weight.scales.float().unsqueeze(-1)).flatten(-2).to(dtype)
    if weight.order is None:
        return values
    back = torch.argsort(weight.order, dim=-1)
    return values.gather(-1, back.unsqueeze(-2).expand(values.shape))


def rounded(x: torch.Tensor, weight: Fp8Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations ``[T, K]`` in fp8 and their scales, float32 ``[T, G]``: x is about ``codes * scales``, group by group.

    Static where the weight has an input scale: every scale is that one. Dynamic: the largest magnitude of the token's
    group (a group of the weight's) becomes 448, and a group of zeros has the scale 1. Values beyond saturate.
    """
    count = x.shape[0]
    columns = -(-x.shape[1] // weight.group) * weight.group
    groups = torch.nn.functional.pad(x.float(), (0, columns - x.shape[1])).view(count, -1, weight.group)
    if weight.input_scale is None:
        scales = groups.abs().amax(-1) / FP8_MAX
        scales = torch.where(scales > 0, scales, 1.0)
    else:
        scales = weight.input_scale.float().expand(count, groups.shape[1])
    codes = (groups / scales.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return codes.view(count, columns)[:, : x.shape[1]].to(FP8).contiguous(), scales.contiguous()


def to_device(weight: Weight, device: torch.device) -> Weight:
    if isinstance(weight, torch.Tensor):
        return weight.to(device)
    tensors = {f.name: getattr(weight, f.name) for f in fields(weight)}
    return replace(weight, **{name: t.to(device) for name, t in tensors.items() if isinstance(t, torch.Tensor)})


def _explicit(weight: IntWeight) -> torch.Tensor:
    middle = torch.full_like(weight.scales, 1 << (weight.bits - 1), dtype=torch.uint8)
    return middle if weight.zeros is None else weight.zeros


def joined(parts: Sequence[PackedWeight]) -> PackedWeight | None:
    """The rows of several matrices of one input as one; ``None`` where their forms differ and they can only be joined dense."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, IntWeight):
        ints = [part for part in parts if isinstance(part, IntWeight)]
        form = (first.bits, first.group, first.scales.dtype)
        alike = all((p.bits, p.group, p.scales.dtype) == form and _same(p.order, first.order) for p in ints)
        if len(ints) < len(parts) or not alike:
            return None
        zeros = None if all(p.zeros is None for p in ints) else torch.cat([_explicit(p) for p in ints], -2)
        codes, scales = torch.cat([p.codes for p in ints], -2), torch.cat([p.scales for p in ints], -2)
        return IntWeight(codes, scales, zeros, first.bits, first.group, first.order)
    floats = [part for part in parts if isinstance(part, Fp8Weight)]
    alike = all(p.group == first.group and (p.input_scale is None) == (first.input_scale is None) for p in floats)
    if len(floats) < len(parts) or not alike:
        return None
    scales, rows = [p.scales for p in floats], first.rows
    if any(p.rows != rows for p in floats) or any(p.shape[-2] % rows for p in floats[:-1]):
        scales, rows = [p.scales.repeat_interleave(p.rows, -2)[..., : p.shape[-2], :] for p in floats], 1
    # one input has one scale: the largest, which saturates nothing that the others would not
    inputs = [p.input_scale for p in floats if p.input_scale is not None]
    return Fp8Weight(
        torch.cat([p.codes.view(torch.uint8) for p in floats], -2).view(FP8),
        torch.cat(scales, -2),
        rows,
        first.group,
        torch.stack(inputs).amax(0) if inputs else None,
    )


def stacked(weights: Sequence[Weight], dtype: torch.dtype | None = None) -> Weight:
    """Matrices of one shape as one with a leading dimension, as ``Ops.moe`` wants the experts.

    Where they are not all packed in one form they are dense: in ``dtype``, or in that of the first dense one, or in float32.
    """
    ints = [weight for weight in weights if isinstance(weight, IntWeight)]
    if len(ints) == len(weights):
        if any(weight.zeros is not None for weight in ints):
            ints = [replace(weight, zeros=_explicit(weight)) for weight in ints]
        if any(weight.order is not None for weight in ints):  # where columns are in order none is kept
            plain = torch.arange(ints[0].shape[-1], device=ints[0].device)
            orders = [plain if weight.order is None else weight.order for weight in ints]
            ints = [replace(weight, order=order.to(torch.int32)) for weight, order in zip(ints, orders)]
        weights = ints
    first = weights[0]
    if isinstance(first, torch.Tensor) or any(_form(weight) != _form(first) for weight in weights):
        dense = (weight.dtype for weight in weights if isinstance(weight, torch.Tensor))
        to = dtype or next(dense, torch.float32)
        return torch.stack([dequantized(weight, to) for weight in weights])
    tensors: dict[str, Any] = {}
    for name in (field.name for field in fields(first)):
        each = [getattr(weight, name) for weight in weights]
        if isinstance(each[0], torch.Tensor):  # torch stacks no fp8
            bytes_ = [t.view(torch.uint8) if t.dtype is FP8 else t for t in each]
            tensors[name] = torch.stack(bytes_).view(each[0].dtype)
    return replace(first, **tensors)


def _form(weight: Weight) -> tuple[object, ...]:
    """All there is to a packed weight but its numbers."""
    if isinstance(weight, torch.Tensor):
        return ()
    values = (getattr(weight, field.name) for field in fields(weight))
    return (type(weight), *((v.dtype, v.shape) if isinstance(v, torch.Tensor) else v for v in values))


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))
