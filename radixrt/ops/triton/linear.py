"""Linear layers whose weights stay packed in memory: 4- and 8-bit integers, and fp8. Dense ones are torch's.

Invariants: codes become numbers exactly (an integer less its zero point, an fp8 code) and are multiplied as such; scales are
applied to float32 sums, so that the result differs from that with ``weights.dequantized`` only by the rounding that saves. A row
of x has the same bits in every batch that takes the same tiles, and nothing waits for the device.

A tile computes ``w @ x^T``: the weights are the operand that tensor cores take from registers, where they are made, and a batch
of one token to sixteen is the narrow one.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from radixrt.ops.triton.ahead import TARGETS, Ahead
from radixrt.ops.triton.plan import units
from radixrt.ops.weights import BLOCK, Fp8Weight, IntWeight, PackedWeight, Weight, dequantized, rounded

_MOST_SPLITS = 16
NUMBERS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@triton.jit
def fp8_number(codes, number: tl.constexpr):
    """fp8 codes, as bytes, as numbers / 256: the bits of e4m3 are those of a float16 with an exponent less by 8. Exact in bfloat16, too."""
    wide = codes.to(tl.uint16)
    half = ((wide & 0x80) << 8 | (wide & 0x7F) << 7).to(tl.float16, bitcast=True)
    return half if number == tl.float16 else half.to(tl.float32).to(number)


@triton.jit
def _int_number(codes, zeros, number: tl.constexpr):
    """``codes - zeros``. An integer becomes a number as the low bits of one whose last place is 1: no slow conversion."""
    if number == tl.float16:
        code = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        return code - (zeros.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    code = (codes.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
    return (code - (zeros.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)).to(number)


@triton.jit
def _columns(order, at, ORDERED: tl.constexpr):
    return tl.load(order + at) if ORDERED else at


@triton.jit
def product(
    x, x_at, w, w_at, scales, s_at, zeros, x_scales, xs_at, order,
    K, first, last,
    FORM: tl.constexpr, MIDDLE: tl.constexpr, GROUP: tl.constexpr, ORDERED: tl.constexpr, WHOLE: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``w @ x^T`` over the columns ``first`` to ``last``, float32 ``[BN, BM]``, scaled.

    ``*_at``: where each row begins. FORM: dense, int4, int8, fp8, or fp8x8 where x is in fp8, too. MIDDLE: the zero point of
    all, -1: there are ``zeros``. GROUP: columns of a scale, a multiple of BK; 0: one a row. WHOLE: BK divides K; it has to
    for 4 bits, and where ``order`` says whose number of x a column is multiplied with.
    """
    tl.static_assert(
        WHOLE or not (ORDERED or FORM == "int4"), "columns in another order, or of 4 bits, must be whole tiles"
    )
    DTYPE: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    zero = tl.full((BN, 1), MIDDLE, dtype=tl.uint8) if MIDDLE >= 0 else tl.load(zeros + s_at)[:, None]
    for k in tl.range(first, last, BK):
        if GROUP > 0 and MIDDLE < 0:
            zero = tl.load(zeros + s_at + k // GROUP)[:, None]
        if FORM == "int4":
            half = tl.arange(0, BK // 2)
            at = k + half // 16 * 32 + half % 16
            codes = tl.load(w + (w_at[:, None] + (k // 2 + half)[None, :]))
            low = tl.load(x + (x_at[:, None] + _columns(order, at, ORDERED)[None, :]))
            high = tl.load(x + (x_at[:, None] + _columns(order, at + 16, ORDERED)[None, :]))
            part = tl.dot(_int_number(codes & 15, zero, DTYPE), tl.trans(low), input_precision="ieee")
            part = tl.dot(_int_number(codes >> 4, zero, DTYPE), tl.trans(high), part, input_precision="ieee")
        else:
            at = k + tl.arange(0, BK)
            if WHOLE:
                codes = tl.load(w + (w_at[:, None] + at[None, :]))
                rows = tl.load(x + (x_at[:, None] + _columns(order, at, ORDERED)[None, :]))
            else:
                codes = tl.load(w + (w_at[:, None] + at[None, :]), mask=(at < K)[None, :], other=0)
                rows = tl.load(x + (x_at[:, None] + at[None, :]), mask=(at < K)[None, :], other=0)
            if FORM == "int8":
                codes = _int_number(codes, zero, DTYPE)
            elif FORM == "fp8":
                codes = fp8_number(codes, DTYPE)
            if FORM == "fp8x8":  # Hopper sums fp8 products in few bits: for one step only
                part = tl.dot(codes, tl.trans(rows), max_num_imprecise_acc=BK)
            else:
                part = tl.dot(codes, tl.trans(rows), input_precision="ieee")
        if GROUP > 0:
            part *= tl.load(scales + s_at + k // GROUP)[:, None].to(tl.float32)
            if FORM == "fp8x8":
                part *= tl.load(x_scales + xs_at + k // GROUP)[None, :]
        acc += part
    if FORM == "fp8":
        acc *= 256
    if GROUP == 0 and FORM != "dense":
        acc *= tl.load(scales + s_at)[:, None].to(tl.float32)
        if FORM == "fp8x8":
            acc *= tl.load(x_scales + xs_at)[None, :]
    return acc


@triton.jit
def linear_kernel(
    x, w, scales, zeros, x_scales, bias, out,
    M, N, K, G, tiles_of_a_split,
    FORM: tl.constexpr, MIDDLE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
    SPLIT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of ``x @ w^T`` (+ bias), or with SPLIT of a part of its columns, float32, into ``out [splits, M, N]``."""
    # neighbours in time share columns of w (the large side) and rows of x: 8 tiles of rows at a time
    row_tiles, tile = tl.cdiv(M, BM), tl.program_id(0)
    band = 8 * tl.cdiv(N, BN)
    start = tile // band * 8
    height = tl.minimum(row_tiles - start, 8)
    m = (start + tile % band % height) * BM + tl.arange(0, BM)
    n = tile % band // height * BN + tl.arange(0, BN)
    # rows beyond the edge compute the last one once more, and are not stored
    x_row, w_row = tl.minimum(m, M - 1).to(tl.int64), tl.minimum(n, N - 1).to(tl.int64)
    first = tl.program_id(1) * tiles_of_a_split * BK
    last = tl.minimum(first + tiles_of_a_split * BK, K)
    per_row = K // 2 if FORM == "int4" else K
    acc = product(
        x, x_row * K, w, w_row * per_row, scales, w_row // ROWS * G, zeros, x_scales, x_row * G, x,
        K, first, last, FORM, MIDDLE, GROUP, False, WHOLE, BN, BM, BK,
    )  # fmt: skip
    inside = (n < N)[:, None] & (m < M)[None, :]
    if bias is not None:
        acc += tl.load(bias + w_row)[:, None].to(tl.float32)
    at = (
        (tl.program_id(1).to(tl.int64) * M + m)[None, :] * N + n[:, None]
        if SPLIT
        else m.to(tl.int64)[None, :] * N + n[:, None]
    )
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(parts, bias, out, size, N, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The splits' sum, in their order, + bias."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(parts + split * size + at, mask=inside, other=0.0)
    if bias is not None:
        acc += tl.load(bias + at % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of the weight, rows of x and columns that a program takes at once, and how it is launched."""

    bn: int
    bm: int
    bk: int
    warps: int
    stages: int


def tile_of(rows: int, step: int, dtype: torch.dtype, form: str) -> Tile:
    """The tile for so many rows of x; ``step``: the columns that one scale and whole tiles allow."""
    if dtype is torch.float32:
        return Tile(64, 16 if rows <= 16 else 32, min(step, 32), 8, 2)
    if rows <= 16:
        return Tile(64, 16, min(step, 64) if form == "int8" else step, 4, 4)
    if rows <= 32:  # 4 bits in groups of 64: what 4 warps spill on Ampere, 8 hold
        return Tile(64, 32, min(step, 64) if form == "int8" else step, 8 if (form, step) == ("int4", 64) else 4, 4)
    if rows <= 64 or form == "fp8x8":  # whose sums of two scales take the registers of the larger tile
        return Tile(128, 64, min(step, 64), 8, 4)
    return Tile(128, 128, min(step, 64), 8, 3)


def step_of(weight: Weight) -> int:
    """The largest of 128, 64, 32 and 16 columns that divides all of them and a group; 0: none does.

    4-bit codes are packed in blocks of 32, which no step may cut.
    """
    columns = weight.shape[-1]
    group = columns if isinstance(weight, torch.Tensor) else min(weight.group, columns)
    steps = (128, 64, BLOCK) if isinstance(weight, IntWeight) and weight.bits == 4 else (128, 64, 32, 16)
    return next((step for step in steps if columns % step == 0 and group % step == 0), 0)


def form_of(weight: Weight) -> tuple[str, int, int, int]:
    """FORM, MIDDLE, GROUP and ROWS of the kernels for a weight."""
    if isinstance(weight, torch.Tensor):
        return "dense", 0, 0, 1
    group = 0 if weight.group >= weight.shape[-1] else weight.group
    if isinstance(weight, Fp8Weight):
        return "fp8", 0, group, weight.rows
    return f"int{weight.bits}", 1 << (weight.bits - 1) if weight.zeros is None else -1, group, 1


def linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    activations: Literal["kept", "fp8"] = "kept",
) -> torch.Tensor:
    """``x [T, in] @ weight [out, in]^T + bias``.

    ``activations="fp8"``: x is rounded as ``weights.rounded`` says and multiplied in fp8, for fp8 weights on devices of compute
    capability 8.9 on; else it is kept as it is, which is nearer to the model before it was quantized, and the default.
    """
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight, bias)
    rows = x.shape[0]
    if isinstance(weight, IntWeight) and weight.order is not None:
        x = x.index_select(1, weight.order)
    step = step_of(weight)
    if step < (32 if activations == "fp8" else 16):  # groups that no tile fits
        plain = weight
        if isinstance(weight, IntWeight):
            plain = IntWeight(weight.codes, weight.scales, weight.zeros, weight.bits, weight.group)
        return F.linear(x, dequantized(plain, x.dtype), bias)
    out = x.new_empty((rows, weight.shape[0]))
    if rows:
        _launch(x.contiguous(), weight, bias, out, activations == "fp8" and isinstance(weight, Fp8Weight), step)
    return out


def _launch(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor, both: bool, step: int
) -> None:
    (rows, columns), count = x.shape, weight.shape[0]
    form, middle, group, scale_rows = form_of(weight)
    tile = tile_of(rows, step, x.dtype, "fp8x8" if both else form)
    codes, x_scales, zeros = weight.codes, None, None
    if isinstance(weight, IntWeight):
        zeros = weight.zeros
    elif both:
        form, (x, x_scales) = "fp8x8", rounded(x, weight)
    else:
        codes = codes.view(torch.uint8)
    programs = triton.cdiv(count, tile.bn) * triton.cdiv(rows, tile.bm)
    tiles = columns // tile.bk
    # a few tokens leave a device idle unless several programs share a row of tiles; four tiles of columns are worth one
    splits = max(1, min(2 * units(x.device) // programs, tiles // 4, _MOST_SPLITS))
    per_split = triton.cdiv(tiles, splits)
    splits = triton.cdiv(tiles, per_split)
    target = out if splits == 1 else torch.empty((splits, rows, count), dtype=torch.float32, device=x.device)
    linear_kernel[(programs, splits)](
        x, codes, weight.scales, zeros, x_scales, bias if splits == 1 else None, target,
        rows, count, columns, weight.scales.shape[-1], per_split,
        FORM=form, MIDDLE=middle, GROUP=group, ROWS=scale_rows, WHOLE=True, SPLIT=splits > 1,
        BN=tile.bn, BM=tile.bm, BK=tile.bk, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        size = rows * count
        sum_kernel[(triton.cdiv(size, 1024),)](target, bias, out, size, count, SPLITS=splits, BLOCK=1024, num_warps=4)


_FORMS = (  # FORM, MIDDLE, GROUP and the columns of whole tiles
    ("int4", -1, 128, 128), ("int4", 8, 128, 128), ("int4", 8, 32, 32), ("int4", -1, 0, 128), ("int8", -1, 128, 128),
    ("int8", 128, 0, 128), ("fp8", 0, 128, 128), ("fp8", 0, 0, 128), ("fp8x8", 0, 128, 128), ("fp8x8", 0, 0, 128),
)  # fmt: skip
_RARER = (  # other groups, and numbers of columns that allow no larger tile
    ("int4", -1, 64, 64), ("int4", -1, 32, 32), ("int4", 8, 64, 64), ("int4", 8, 0, 128), ("int4", 8, 0, 64), ("int4", 8, 0, 32),
    ("int8", 128, 128, 128), ("int8", -1, 0, 128), ("int8", -1, 64, 64), ("int8", -1, 32, 32), ("int8", 128, 32, 32),
    ("int8", 128, 16, 16), ("int8", 128, 0, 32), ("fp8", 0, 128, 64), ("fp8", 0, 64, 32), ("fp8", 0, 0, 64), ("fp8", 0, 0, 32),
    ("fp8", 0, 0, 16), ("fp8x8", 0, 128, 64), ("fp8x8", 0, 64, 32), ("fp8x8", 0, 0, 64), ("fp8x8", 0, 0, 32),
)  # fmt: skip


def configurations() -> Iterator[Ahead]:
    """What ``linear`` launches: every form, few rows and many, the columns split or not; the bias is there where it can be."""
    for dtype, kind in NUMBERS.items():
        for form in _FORMS if dtype is not torch.bfloat16 else (*_FORMS, *_RARER):
            for rows in (16, 32) if dtype is torch.float32 else (16, 32, 64, 128):
                for split in (True, False) if dtype is torch.bfloat16 or rows == 16 else (False,):
                    if form[0] != "fp8x8" or dtype is not torch.float32:
                        yield _ahead(dtype, kind, *form, rows, split)
        yield Ahead(
            f"sum-{kind}",
            sum_kernel,
            {"parts": "*fp32", "out": "*" + kind, "bias": "*" + kind, "size": "i32", "N": "i32"},
            {"SPLITS": _MOST_SPLITS, "BLOCK": 1024},
            divisible=("size", "N"),
            often=kind == "bf16",
        )


def _ahead(
    dtype: torch.dtype, kind: str, form: str, middle: int, group: int, step: int, rows: int, split: bool
) -> Ahead:
    tile = tile_of(rows, step, dtype, form)
    types = {"x": "*" + kind, "w": "*u8", "out": "*fp32" if split else "*" + kind}
    types |= dict.fromkeys(("M", "N", "K", "G", "tiles_of_a_split"), "i32")
    types["scales"] = "*fp32" if form[0] == "f" else "*fp16" if group == 128 else "*" + kind
    absent: dict[str, None] = {}
    if form == "fp8x8":
        types |= {"x": "*fp8e4nv", "w": "*fp8e4nv"}
    for name, there, what in (
        ("x_scales", form == "fp8x8", "*fp32"), ("zeros", middle < 0, "*u8"), ("bias", not split, "*" + kind)
    ):  # fmt: skip
        if there:
            types[name] = what
        else:
            absent[name] = None
    usual = {("int4", -1, 128), ("int8", -1, 128), ("fp8", 0, 128), ("fp8x8", 0, 0)}
    zero, group_name = (
        "zeros" if middle < 0 else "middle",
        f"{group or 'row'}{f'by{step}' if step < (group or 128) else ''}",
    )
    return Ahead(
        f"{form}-{kind}-{zero}-{group_name}-{rows}{'-split' if split else ''}",
        linear_kernel,
        types,
        absent
        | {"FORM": form, "MIDDLE": middle, "GROUP": group, "ROWS": 128 if form[0] == "f" and group else 1}
        | {"WHOLE": True, "SPLIT": split, "BN": tile.bn, "BM": tile.bm, "BK": tile.bk},
        tile.warps,
        tile.stages,
        divisible=("N", "K"),
        targets=(90, 100) if form == "fp8x8" else TARGETS,
        often=dtype is torch.bfloat16
        and (form, middle, group) in usual
        and step == 128
        and (rows, split) in ((16, True), (128, False)),
    )
