"""Owns the operations on rows: norms, activations, rotary embedding with the KV write, and stores into a cache.

Invariants: all arithmetic is float32 and results are rounded where the reference rounds them; inputs may be slices (only the last
dimension has to be dense), so nothing is copied before a kernel; a negative slot is padding and is never written. A cache may be
float8 e4m3: what is stored is ``value / scale``, rounded to nearest even and kept within +-448, by integer arithmetic that every
device has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from radixrt.ops.interface import ACTIVATIONS, GATED
from radixrt.ops.triton.ahead import Ahead

_TILE = 1024  # elements that a program of many short rows takes
_COLUMNS = 1024  # of an elementwise program
_HEADS = 8  # that one program rotates


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension of ``x [T, N]`` or ``[T, H, N]``."""
    return _normed(x, None, weight, None, eps, center=False)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rms_norm(x + residual)``, and ``x + residual``; neither input is changed."""
    normed, total = _normed(x, residual, weight, None, eps, center=False)
    return normed, total


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Layer norm over the last dimension of ``x [T, N]`` or ``[T, H, N]``."""
    return _normed(x, None, weight, bias, eps, center=True)[0]


def activate(x: torch.Tensor, kind: str) -> torch.Tensor:
    """One of ``ACTIVATIONS`` on every element of ``x [T, N]``."""
    if kind not in ACTIVATIONS:
        raise ValueError(f"kind={kind!r}: must be one of {', '.join(ACTIVATIONS)}")
    return _activated(x, x.shape[-1], kind, halves=False)


def gated(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """``act(gate) * up`` for ``gate_up [T, 2 I]``, its halves gate and up."""
    if kind not in GATED:
        raise ValueError(f"kind={kind!r}: must be one of {', '.join(GATED)}")
    return _activated(gate_up, gate_up.shape[-1] // 2, kind, halves=True)


def rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate ``q [T, H, D]`` and ``k [T, K, D]``, write keys and values to ``slots``; one kernel. Returns the rotated queries.

    Args:
        cos, sin: ``[T, 1, R / 2]``; the first ``R`` of ``D`` dimensions are rotated, the halves of R being the pairs' two parts.
        k_cache, v_cache: ``[S, K, D]`` in any float dtype.
        slots: int ``[T]``; those below zero are not written.
        q_norm, k_norm: ``[D]``; with them (both) queries and keys are RMS-normed head by head before they are rotated.
        k_scale, v_scale: float32 ``[1]`` or ``[K]``; what is stored is divided by it.
    """
    tokens, heads, dim = q.shape
    kv_heads, half = k.shape[1], cos.shape[-1]
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    keys, values = _writable(k_cache), _writable(v_cache)
    grid = (tokens, triton.cdiv(heads, _HEADS) + triton.cdiv(kv_heads, _HEADS))
    _rope_store[grid](
        q, k, v, out, cos, sin, keys, values, slots, q_norm, k_norm, k_scale, v_scale, eps, heads, kv_heads,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.stride(0), keys.stride(1),
        values.stride(0), values.stride(1), cos.stride(0), sin.stride(0), _step(k_scale), _step(v_scale),
        DIM=dim, HALF=half, **_rope_blocks(dim, half), num_warps=4,
    )  # fmt: skip
    return out


def store(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """``cache[slots] = rows``, converted to the cache's dtype; slots below zero are not written."""
    tokens = rows.shape[0]
    if not tokens:
        return
    flat, target = rows.reshape(tokens, -1), _writable(cache).view(cache.shape[0], -1)
    grid = (tokens, triton.cdiv(flat.shape[1], _COLUMNS))
    _store[grid](
        target, slots, flat, flat.shape[1], target.stride(0), flat.stride(0), BLOCK=_COLUMNS, num_warps=4
    )  # fmt: skip


def configurations() -> Iterator[Ahead]:
    """What the functions above launch."""
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for name in kinds:
        # the hidden sizes that there are end at 16384; of 32768 in fp32 ptxas spills 56 bytes for sm_90
        for width in (128, 576, 2880, 4096, 8192, 16384, *((32768,) if name != "fp32" else ())):
            often = name == "bf16" and width in (128, 4096, 16384)
            yield _ahead_norm(f"rms-{name}-{width}", name, width, often)
            if width > 128:
                yield _ahead_norm(f"add-rms-{name}-{width}", name, width, often, residual=True)
                yield _ahead_norm(f"layer-{name}-{width}", name, width, often and width == 4096, center=True)
        for width in (256, 3584) if name != "fp32" else ():  # weights that are one more than stored
            yield _ahead_norm(f"rms-{name}-{width}-one-plus", name, width, False, weight="fp32")
            yield _ahead_norm(f"add-rms-{name}-{width}-one-plus", name, width, False, residual=True, weight="fp32")
        for kind in GATED:
            for halves in (True, False):
                if kind == "swiglu_oai" and not halves:
                    continue
                yield Ahead(
                    name=f"{'gated' if halves else 'activate'}-{kind}-{name}",
                    kernel=_activation,
                    types={"x": f"*{name}", "out": f"*{name}", "columns": "i32", "x_row": "i32"},
                    constants={"KIND": kind, "HALVES": halves, "BLOCK": _COLUMNS},
                    divisible=("columns", "x_row"),
                    often=name == "bf16" and halves,
                )
        for dim, half in ((64, 32), (80, 16), (80, 40), (96, 48), (128, 64), (256, 128)):
            for cache, scaled in ((name, False), ("u8", False), ("u8", True)):
                for normed in (False, True):
                    often = name == "bf16" and dim in (80, 128, 256) and half != 40
                    often &= normed == scaled == (cache == "u8")
                    yield _ahead_rope(name, cache, dim, half, normed, scaled, often)
        for cache in (*kinds, "u8"):
            if cache not in (name, "u8"):
                yield _ahead_rope(name, cache, 128, 64, False, False, False)
            yield Ahead(
                name=f"store-{name}{'' if cache == name else '-to-' + _shown(cache)}",
                kernel=_store,
                types={
                    "cache": f"*{cache}", "slots": "*i64", "rows": f"*{name}", "width": "i32", "cache_row": "i32",
                    "rows_row": "i32",
                },
                constants={"BLOCK": _COLUMNS},
                divisible=("width", "cache_row", "rows_row"),
                often=cache == name == "bf16",
            )  # fmt: skip


def _ahead_norm(
    name: str, dtype: str, width: int, often: bool, residual: bool = False, center: bool = False, weight: str = ""
) -> Ahead:
    block, rows, warps = _norm_blocks(width, center and dtype == "fp32")
    types = {"x": f"*{dtype}", "weight": f"*{weight or dtype}", "out": f"*{dtype}", "eps": "fp32"}
    constants: dict[str, Any] = {"CENTER": center, "BLOCK": block, "ROWS": rows}
    for key, given in (("residual", residual), ("total", residual), ("bias", center)):
        if given:
            types[key] = f"*{dtype}"
        else:
            constants[key] = None
    sizes = ("rows", "inner", "x_outer", "x_inner", "r_outer", "r_inner", "width")
    types |= dict.fromkeys(sizes, "i32")
    return Ahead(name, _norm, types, constants, warps, divisible=sizes[2:], often=often)


def _ahead_rope(dtype: str, cache: str, dim: int, half: int, normed: bool, scaled: bool, often: bool) -> Ahead:
    strides = (
        "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "keys_slot", "keys_head", "values_slot",
        "values_head", "cos_token", "sin_token",
    )  # fmt: skip
    types = dict.fromkeys(("q", "k", "v", "out", "cos", "sin"), f"*{dtype}")
    types |= {"k_cache": f"*{cache}", "v_cache": f"*{cache}", "slots": "*i64", "eps": "fp32"}
    types |= dict.fromkeys(("heads", "kv_heads", *strides, "k_scale_step", "v_scale_step"), "i32")
    constants: dict[str, Any] = {"DIM": dim, "HALF": half, **_rope_blocks(dim, half)}
    for key, kind, given in (
        ("q_norm", dtype, normed), ("k_norm", dtype, normed), ("k_scale", "fp32", scaled), ("v_scale", "fp32", scaled),
    ):  # fmt: skip
        if given:
            types[key] = f"*{kind}"
        else:
            constants[key] = None
    name = f"rope-{dtype}-{dim}-{2 * half}{'' if cache == dtype else '-to-' + _shown(cache)}"
    name += f"{'-scales' if scaled else ''}{'-normed' if normed else ''}"
    return Ahead(name, _rope_store, types, constants, divisible=strides[:10], often=often)


def _shown(cache: str) -> str:
    return "fp8" if cache == "u8" else cache


def _normed(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    center: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    width = x.shape[-1]
    rows, inner = x.shape[:-1].numel(), x.shape[-2] if x.dim() > 2 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    if not rows:
        return out, total
    block, tile, warps = _norm_blocks(width, center and x.dtype is torch.float32)
    added = x if residual is None else residual
    _norm[(triton.cdiv(rows, tile),)](
        x, residual, weight, bias, out, None if residual is None else total, rows, inner, x.stride(0), x.stride(-2),
        added.stride(0), added.stride(-2), width, eps, CENTER=center, BLOCK=block, ROWS=tile, num_warps=warps,
    )  # fmt: skip
    return out, total


def _norm_blocks(width: int, centered: bool) -> tuple[int, int, int]:
    """Columns, rows and warps of a program: 16 elements a thread, up to 32 so that a row of 16384 stays in registers.

    ``centered``: a layer norm of float32, of which ptxas spills a little at 8192 with 16 elements a thread, and none with 32.
    """
    block = triton.next_power_of_2(width)
    rows = max(1, _TILE // block)
    if centered and block == 8192:
        return block, rows, 8
    return block, rows, min(16 if block <= 16384 else 32, max(4, block // 512))


def _activated(x: torch.Tensor, columns: int, kind: str, halves: bool) -> torch.Tensor:
    rows = x.shape[0]
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if rows:
        grid = (rows, triton.cdiv(columns, _COLUMNS))
        _activation[grid](x, out, columns, x.stride(0), KIND=kind, HALVES=halves, BLOCK=_COLUMNS, num_warps=4)
    return out


def _rope_blocks(dim: int, half: int) -> dict[str, int]:
    rest = dim - 2 * half
    return {
        "HALF_BLOCK": triton.next_power_of_2(half),
        "REST_BLOCK": triton.next_power_of_2(rest) if rest else 0,
        "DIM_BLOCK": triton.next_power_of_2(dim),
        "HEADS": _HEADS,
    }


def _writable(cache: torch.Tensor) -> torch.Tensor:
    """A float8 cache as its bytes, which the kernels make themselves; another as it is."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


def _step(scale: torch.Tensor | None) -> int:
    return int(scale is not None and scale.numel() > 1)


@triton.jit
def _norm(
    x, residual, weight, bias, out, total, rows, inner, x_outer, x_inner, r_outer, r_inner, width, eps,
    CENTER: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < width)
    here = row * width + column
    dtype = out.dtype.element_ty
    value = tl.load(x + row // inner * x_outer + row % inner * x_inner + column, mask, other=0.0).to(tl.float32)
    if residual is not None:
        added = tl.load(residual + row // inner * r_outer + row % inner * r_inner + column, mask, other=0.0)
        value = (value + added.to(tl.float32)).to(dtype)
        tl.store(total + here, value, mask)
        value = value.to(tl.float32)
    if CENTER:
        value = tl.where(mask, value - tl.sum(value, axis=1)[:, None] / width, 0.0)
    spread = tl.sum(value * value, axis=1)[:, None] / width
    value = value * tl.rsqrt(spread + eps)
    factor = tl.load(weight + column, column < width, other=0.0)
    if not CENTER and weight.dtype.element_ty == dtype:  # as the reference, which multiplies in the dtype of x
        value = value.to(dtype).to(tl.float32)
    value = value * factor.to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, column < width, other=0.0).to(tl.float32)
    tl.store(out + here, value.to(dtype), mask)


@triton.jit
def _activation(
    x, out, columns, x_row, KIND: tl.constexpr, HALVES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    dtype = out.dtype.element_ty
    gate = tl.load(x + row * x_row + column, mask, other=0.0).to(tl.float32)
    if HALVES:
        up = tl.load(x + row * x_row + columns + column, mask, other=0.0).to(tl.float32)
        result = gate_with(gate, up, KIND, dtype)
    else:
        result = activation(gate, KIND)
    tl.store(out + row * columns + column, result.to(dtype), mask)


@triton.jit
def activation(x, KIND: tl.constexpr):
    """An elementwise function of float32, by name; for other kernels too."""
    if KIND == "silu":
        result = x * tl.sigmoid(x)
    elif KIND == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_tanh")
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        result = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return result


@triton.jit
def gate_with(gate, up, KIND: tl.constexpr, dtype: tl.constexpr):
    """``act(gate) * up`` of float32, with ``act(gate)`` rounded to ``dtype`` as the reference does; for other kernels too."""
    if KIND == "swiglu_oai":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        result = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    else:
        result = activation(gate, KIND).to(dtype).to(tl.float32) * up
    return result


@triton.jit
def _rope_store(
    q, k, v, out, cos, sin, k_cache, v_cache, slots, q_norm, k_norm, k_scale, v_scale, eps, heads, kv_heads,
    q_token, q_head, k_token, k_head, v_token, v_head, keys_slot, keys_head, values_slot, values_head,
    cos_token, sin_token, k_scale_step, v_scale_step,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    # programs: (token, group of query heads), then (token, group of key and value heads)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    groups = tl.cdiv(heads, HEADS)
    place = tl.arange(0, HALF_BLOCK)
    c = tl.load(cos + token * cos_token + place, place < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * sin_token + place, place < HALF, other=0.0).to(tl.float32)[None, :]
    if group < groups:
        head = (group * HEADS + tl.arange(0, HEADS))[:, None]
        to = out + (token * heads + head) * DIM
        _rotate(
            q + token * q_token + head * q_head, to, head < heads, c, s, q_norm, eps, None,
            DIM, HALF, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            head = ((group - groups) * HEADS + tl.arange(0, HEADS))[:, None]
            valid = head < kv_heads
            factor = None if k_scale is None else 1.0 / tl.load(k_scale + head * k_scale_step, valid, other=1.0)
            _rotate(
                k + token * k_token + head * k_head, k_cache + slot * keys_slot + head * keys_head, valid, c, s, k_norm,
                eps, factor, DIM, HALF, HALF_BLOCK, REST_BLOCK,
            )  # fmt: skip
            column = tl.arange(0, DIM_BLOCK)[None, :]
            mask = valid & (column < DIM)
            value = tl.load(v + token * v_token + head * v_head + column, mask, other=0.0).to(tl.float32)
            if v_scale is not None:
                value = value / tl.load(v_scale + head * v_scale_step, valid, other=1.0)
            _put(v_cache + slot * values_slot + head * values_head + column, value, mask)


@triton.jit
def _rotate(
    source, target, valid, cos, sin, weight, eps, factor,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """From ``source`` to ``target``, pointers to heads ``[HEADS, 1]``: norm, if ``weight`` is given, rotation, scale."""
    dtype = source.dtype.element_ty
    place = tl.arange(0, HALF_BLOCK)[None, :]
    mask = valid & (place < HALF)
    low = tl.load(source + place, mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + place, mask, other=0.0).to(tl.float32)
    if REST_BLOCK:
        after = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        rest = tl.load(source + after, valid & (after < DIM), other=0.0).to(tl.float32)
    if weight is not None:
        square = tl.sum(low * low + high * high, axis=1)
        if REST_BLOCK:
            square += tl.sum(rest * rest, axis=1)
        shrink = tl.rsqrt(square / DIM + eps)[:, None]
        low = _weighted(low * shrink, weight, place, place < HALF, dtype)
        high = _weighted(high * shrink, weight, HALF + place, place < HALF, dtype)
        if REST_BLOCK:
            rest = _weighted(rest * shrink, weight, after, after < DIM, dtype)
    turned_low = low * cos - high * sin
    turned_high = high * cos + low * sin
    if factor is not None:
        turned_low *= factor
        turned_high *= factor
    _put(target + place, turned_low, mask)
    _put(target + HALF + place, turned_high, mask)
    if REST_BLOCK:
        if factor is not None:
            rest *= factor
        _put(target + after, rest, valid & (after < DIM))


@triton.jit
def _weighted(value, weight, place, mask, dtype: tl.constexpr):
    """A normed value times its weight, rounded as ``rms_norm`` does."""
    if weight.dtype.element_ty == dtype:
        value = value.to(dtype).to(tl.float32)
    return (value * tl.load(weight + place, mask, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _store(cache, slots, rows, width, cache_row, rows_row, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < width
        value = tl.load(rows + token * rows_row + column, mask, other=0.0).to(tl.float32)
        _put(cache + slot * cache_row + column, value, mask)


@triton.jit
def _put(target, value, mask):
    """Store float32 in the dtype of ``target``; bytes are float8 e4m3."""
    if target.dtype.element_ty == tl.uint8:
        tl.store(target, _e4m3(value), mask)
    else:
        tl.store(target, value.to(target.dtype.element_ty), mask)


@triton.jit
def _e4m3(value):
    size = tl.minimum(tl.abs(value), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # 3 bits of mantissa, the exponent's bias 7
    tiny = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # multiples of 2^-9, which is 16384's last bit
    code = tl.where(size < 0.015625, tiny, normal)
    whole = value.to(tl.int32, bitcast=True)
    code = tl.where((whole & 0x7FFFFFFF) > 0x7F800000, 0x7F, code)  # not a number
    return (code | ((whole >> 24) & 0x80)).to(tl.uint8)
