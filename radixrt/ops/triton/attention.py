"""Owns attention over the paged KV as Triton kernels: one for the tiles of ``plan``, one to merge their partials.

A program computes one tile for one key head. Its rows are the tile's queries, each with the ``share`` query heads that
have this key head, so that a key is read once for all of them:

    row = query * share + head        keys in blocks of N, gathered through the slots

Softmax is online and in powers of two (Milakov & Gimelshein 2018; Dao 2023); split keys are merged by their
log-sum-exp (Dao et al. 2023, flash decoding). Scores and sums are float32. Rows that see no key are zeros.

A cache in fp8 is read as bytes on devices without fp8 numbers (before compute capability 8.9): as ``value / 256``, which the scales undo.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from radixrt.ops.triton.ahead import TARGETS, Ahead
from radixrt.ops.triton.linear import NUMBERS, fp8_number
from radixrt.ops.triton.plan import FIELDS, HEIGHTS, PaddedPlan, Plan, heights, plan_attention
from radixrt.ops.weights import FP8

__all__ = ["PaddedPlan", "Plan", "attention", "configurations", "plan_attention"]

_LOG2E = tl.constexpr(1.4426950408889634)
_FIELDS = tl.constexpr(FIELDS)
_HAS_FP8 = 89  # compute capability
_MERGED = 16  # partials a merge reads at a time
_LOWEST = tl.constexpr(-1.0e38)  # below every score; finite, so that the difference of two is a number


@triton.jit
def _keys(
    acc, top, total, q, k, v, slots, at, end, last, low, high, depth, inside, key_scale, softcap,
    slot_stride, N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Go over keys ``at .. end`` of a tile. Row ``r`` sees ``low[r] .. high[r]``; all if not ``MASKED``."""
    for begin in range(at, end, N):
        key = begin + tl.arange(0, N)
        # Behind the last key its slot is read again: what lies in another might not even be a number.
        slot = tl.load(slots + tl.minimum(key, last)).to(tl.int64) * slot_stride
        if EVEN:
            keys = tl.load(k + slot[None, :] + depth[:, None])
            values = tl.load(v + slot[:, None] + depth[None, :])
        else:
            keys = tl.load(k + slot[None, :] + depth[:, None], mask=inside[:, None], other=0.0)
            values = tl.load(v + slot[:, None] + depth[None, :], mask=inside[None, :], other=0.0)
        if k.dtype.element_ty == tl.uint8:
            keys, values = fp8_number(keys, q.dtype), fp8_number(values, q.dtype)
        score = tl.dot(q, keys.to(q.dtype), input_precision="ieee" if PRECISE else "tf32")
        if SOFTCAP:  # tanh; an infinite power gives 1
            score = softcap - 2.0 * softcap / (tl.exp2(score * key_scale) + 1.0)
        if MASKED:
            seen = key[None, :] < high[:, None]
            if WINDOW:
                seen = seen & (key[None, :] >= low[:, None])
            score = tl.where(seen, score, float("-inf"))
        if SOFTCAP:
            new_top = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - new_top[:, None])
        else:  # scaled last: one instruction with the difference
            new_top = tl.maximum(top, tl.max(score, 1) * key_scale)
            weight = tl.exp2(score * key_scale - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weight, 1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weight.to(q.dtype), values.to(q.dtype), acc, input_precision="ieee" if PRECISE else "tf32")
        top = new_top
    return acc, top, total


@triton.jit
def _tile(
    q, k, v, out, partial, sums, tiles, listed, positions, slots, sinks, kv_scales,
    scale, softcap, q_stride, q_head_stride, slot_stride, kv_head_stride, scale_stride, values_scale, heads, window,
    SHARE: tl.constexpr, HELD: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SCALES: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Some queries of one tile, for HELD of the query heads of one key head. A tile without queries is padding."""
    groups: tl.constexpr = (SHARE + HELD - 1) // HELD
    kv_head = tl.program_id(0) // groups
    tile = tiles + tl.program_id(1) * _FIELDS
    above = tl.program_id(2) * (M // HELD)  # queries of the tile that other programs have
    count = tl.load(tile + 1)
    if count > above:
        first = tl.load(tile)
        first_slot = tl.load(tile + 2)
        start = tl.load(tile + 3)
        length = tl.load(tile + 4)
        where = tl.load(tile + 5)
        least = tl.load(tile + 6) - start
        most = tl.load(tile + 7) - start

        row = tl.arange(0, M)
        index = above + row // HELD
        live = (index < count) & (row < M // HELD * HELD)
        head = row % HELD
        if groups > 1:
            head += tl.program_id(0) % groups * HELD
            live = live & (head < SHARE)
        head += kv_head * SHARE
        query = tl.load(listed + first + index, mask=live, other=0)
        position = tl.load(positions + query, mask=live, other=0) - start  # as an index into the tile's keys
        high = tl.minimum(position + 1, length)
        low = position - window + 1
        depth = tl.arange(0, PADDED_D)
        inside = depth < D
        place = query.to(tl.int64) * q_stride + head * q_head_stride
        queries = tl.load(q + place[:, None] + depth[None, :], mask=live[:, None] & inside[None, :], other=0.0)

        key_scale = scale
        if SCALES:
            key_scale = scale * tl.load(kv_scales + kv_head * scale_stride)
        if k.dtype.element_ty == tl.uint8:
            key_scale = key_scale * 256.0
        if SOFTCAP:
            key_scale = key_scale * 2.0 * _LOG2E / softcap
        else:
            key_scale = key_scale * _LOG2E
        cap = softcap * _LOG2E
        k += kv_head * kv_head_stride
        v += kv_head * kv_head_stride
        slots += first_slot
        last = length - 1

        acc = tl.zeros([M, PADDED_D], dtype=tl.float32)
        total = tl.zeros([M], dtype=tl.float32)
        top = tl.full([M], _LOWEST, dtype=tl.float32)
        if M <= 32:
            # A few rows are masked for less than a second loop costs.
            acc, top, total = _keys(
                acc, top, total, queries, k, v, slots, 0, length, last, low, high, depth, inside, key_scale, cap,
                slot_stride, N, WINDOW, SOFTCAP, True, D == PADDED_D, PRECISE,
            )  # fmt: skip
        else:
            # |-- window's border --|---- seen by all rows ----|-- causal border, end --|
            clear = 0
            if WINDOW:
                clear = tl.minimum(tl.maximum((most - window + N) // N, 0), (length + N - 1) // N) * N
                acc, top, total = _keys(
                    acc, top, total, queries, k, v, slots, 0, clear, last, low, high, depth, inside, key_scale, cap,
                    slot_stride, N, WINDOW, SOFTCAP, True, D == PADDED_D, PRECISE,
                )  # fmt: skip
            border = tl.maximum(tl.minimum(least + 1, length) // N * N, clear)
            acc, top, total = _keys(
                acc, top, total, queries, k, v, slots, clear, border, last, low, high, depth, inside, key_scale, cap,
                slot_stride, N, WINDOW, SOFTCAP, False, D == PADDED_D, PRECISE,
            )  # fmt: skip
            acc, top, total = _keys(
                acc, top, total, queries, k, v, slots, border, length, last, low, high, depth, inside, key_scale, cap,
                slot_stride, N, WINDOW, SOFTCAP, True, D == PADDED_D, PRECISE,
            )  # fmt: skip

        value_scale = 1.0
        if SCALES:
            value_scale = tl.load(kv_scales + values_scale + kv_head * scale_stride)
        if k.dtype.element_ty == tl.uint8:
            value_scale = value_scale * 256.0
        kept = live[:, None] & inside[None, :]
        if where < 0:
            if SINKS:
                sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * _LOG2E
                new_top = tl.maximum(top, sink)
                total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
                acc = acc * tl.exp2(top - new_top)[:, None]
            result = acc * (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]
            place = (query.to(tl.int64) * heads + head) * D
            tl.store(out + place[:, None] + depth[None, :], result.to(out.dtype.element_ty), mask=kept)
        else:
            result = acc * (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]
            place = (where + index).to(tl.int64) * heads + head
            tl.store(partial + place[:, None] * D + depth[None, :], result, mask=kept)
            tl.store(sums + place, tl.where(total > 0.0, top + tl.log2(total), float("-inf")), mask=live)


@triton.jit
def _merge(
    out, partial, sums, merges, parts, sinks,
    heads, D: tl.constexpr, PADDED_D: tl.constexpr, N: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One query and head: the mean of its partials, each weighted by its share of the softmax's sum."""
    head = tl.program_id(0)
    merge = merges + tl.program_id(1) * 4
    count = tl.load(merge + 2)
    if count > 0:
        query = tl.load(merge)
        parts += tl.load(merge + 1)
        depth = tl.arange(0, PADDED_D)
        inside = depth < D
        acc = tl.zeros([PADDED_D], dtype=tl.float32)
        total = 0.0
        top = -1.0e38
        if SINKS:
            top = tl.load(sinks + head).to(tl.float32) * _LOG2E
            total = 1.0
        for begin in range(0, count, N):
            index = begin + tl.arange(0, N)
            real = index < count
            place = tl.load(parts + index, mask=real, other=0).to(tl.int64) * heads + head
            share = tl.load(sums + place, mask=real, other=float("-inf"))
            rows = tl.load(
                partial + place[:, None] * D + depth[None, :], mask=real[:, None] & inside[None, :], other=0.0
            )
            new_top = tl.maximum(top, tl.max(share, 0))
            weight = tl.exp2(share - new_top)
            rescale = tl.exp2(top - new_top)
            acc = acc * rescale + tl.sum(rows * weight[:, None], 0)
            total = total * rescale + tl.sum(weight, 0)
            top = new_top
        result = acc / tl.where(total > 0.0, total, 1.0)
        place = (query.to(tl.int64) * heads + head) * D
        tl.store(out + place + depth, result.to(out.dtype.element_ty), mask=inside)


class Shape(NamedTuple):
    """How a tile is launched."""

    rows: int  # of a program, M: a tile is as many programs as it takes
    held: int  # query heads of a program
    keys: int  # in a block, N
    warps: int
    stages: int  # the slots' loads take half of them


def tile_shape(
    height: int, share: int, dim: int, plain: bool, types: tuple[torch.dtype, torch.dtype], capability: int
) -> Shape:
    """The launch of tiles ``height`` rows high with heads of ``dim``, ``share`` of them to a key head.

    ``plain``: without window and soft-cap, which take registers, as does a cache in another type than the queries';
    ``types``: of the queries and of the cache. Queries in float32 are for exactness and not for speed.
    """
    padded, (of_queries, of_cache) = triton.next_power_of_2(dim), (type_.itemsize for type_ in types)
    converted = types[0] is not types[1]
    swapped = converted and of_cache == of_queries  # bfloat16 made of float16, or the reverse, by way of float32
    plain = plain and not converted
    if of_queries == 4:
        # 128 numbers a head: ptxas spills a little to run more programs, with 8 warps for Hopper, with 4 for the others.
        warps = 4 if padded == 128 and 90 <= capability < 100 else 8
        rows, keys, stages = min(height, 32 if padded <= 64 else 16), 16, 1
    elif height <= 32:
        # Two blocks of keys and values are on their way, of 32 KiB each, and three programs run on a multiprocessor.
        keys = min(32 if height == 32 and converted else 128, 8192 // padded)
        rows, warps, stages = height, 8 if swapped and padded > 128 else 4, 5
    elif height <= 64:
        crowded = padded > 128 or (capability >= 100 and not (plain and dim == padded))
        keys = (32 if crowded else 64) // (2 if swapped else 1)
        rows, warps, stages = height, 8, 3 if of_cache <= of_queries else 2
    elif not 90 <= capability < 120:  # no wgmma or tcgen05, or 100 KiB of shared memory
        rows, keys, warps, stages = (128, 32, 8, 5) if padded <= 128 else (64, 32, 8, 3)
    elif padded > 128:
        crowded = of_cache > of_queries or (converted and capability >= 100)
        rows, keys, warps, stages = 64 if crowded else 128, 32, 8, 3
    else:  # the more keys a step, the fewer times all warps wait for each other
        rows, keys, warps, stages = 128, 128 if plain else 32 if padded <= 64 and capability >= 100 else 64, 8, 3
    return Shape(rows, min(share, rows), keys, warps, stages)


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: Plan,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``Ops.attention``.

    ``kv_scales [2, K]`` or ``[2, 1]`` (keys, values) is what a cache in float8_e4m3fn, or any other, is multiplied by.
    """
    heads, dim = q.shape[1], q.shape[2]
    kv_heads = k_cache.shape[1]
    if k_cache.stride() != v_cache.stride() or k_cache.stride(2) != 1:
        raise ValueError(f"k_cache, v_cache: strides {k_cache.stride()}, {v_cache.stride()} must be equal and end in 1")
    if q.stride(2) != 1:
        q = q.contiguous()
    out = torch.empty((q.shape[0], heads, dim), dtype=q.dtype, device=q.device)
    padded = max(16, triton.next_power_of_2(dim))
    split = plan.parts.shape[0]
    partial = torch.empty((split, heads, dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((split, heads), dtype=torch.float32, device=q.device)
    capability = _capability(q.device)
    if k_cache.dtype is FP8 and capability < _HAS_FP8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    plain, types = plan.window is None and softcap is None, (q.dtype, k_cache.dtype)
    for height, tiles in zip(plan.heights, plan.tiles):
        if len(tiles):
            shape = tile_shape(height, plan.share, dim, plain, types, capability)
            groups, queries = triton.cdiv(plan.share, shape.held), shape.rows // shape.held
            _tile[(kv_heads * groups, len(tiles), triton.cdiv(height // plan.share, queries))](
                q, k_cache, v_cache, out, partial, sums, tiles, plan.listed, plan.positions, plan.slots,
                sinks, kv_scales,
                scale, softcap or 0.0, q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1),
                0 if kv_scales is None or kv_scales.shape[1] == 1 else 1,
                0 if kv_scales is None else kv_scales.stride(0),
                heads, plan.window or 0,
                SHARE=plan.share, HELD=shape.held, D=dim, PADDED_D=padded, M=shape.rows, N=shape.keys,
                WINDOW=plan.window is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None,
                SCALES=kv_scales is not None, PRECISE=q.dtype is torch.float32,
                num_warps=shape.warps, num_stages=shape.stages,
            )  # fmt: skip
    if split:
        _merge[(heads, len(plan.merges))](
            out, partial, sums, plan.merges, plan.parts, sinks, heads,
            D=dim, PADDED_D=padded, N=_MERGED, SINKS=sinks is not None,
            num_warps=1 if padded <= 128 else 2, num_stages=1,
        )  # fmt: skip
    return out


def _capability(device: torch.device) -> int:
    """80, 90, 100, ...; the interpreter passes for the first."""
    if device.type != "cuda":
        return TARGETS[0]
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


_DIMS = (64, 80, 96, 128, 256)
_EVERYTHING = "window-cap-sinks"
_KINDS = {  # of the queries, and of the cache
    "bf16": ("bf16", "bf16"),
    "fp16": ("fp16", "fp16"),
    "fp32": ("fp32", "fp32"),
    "fp8": ("bf16", "fp8e4nv"),
    "fp16-fp8": ("fp16", "fp8e4nv"),
    "fp32-fp8": ("fp32", "fp8e4nv"),
    "bf16-fp16": ("bf16", "fp16"),
    "bf16-fp32": ("bf16", "fp32"),
    "fp16-bf16": ("fp16", "bf16"),
    "fp16-fp32": ("fp16", "fp32"),
    "fp32-bf16": ("fp32", "bf16"),
    "fp32-fp16": ("fp32", "fp16"),
}
_TYPES = {name: dtype for dtype, name in NUMBERS.items()} | {"fp8e4nv": FP8}
_OFTEN = (  # of the configurations: kind, head size, query heads a key head, what there is besides, height
    *(("bf16", 128, 4, "", height) for height in HEIGHTS),
    ("bf16", 256, 4, _EVERYTHING, 128),
    ("fp16", 96, 4, "", 16),
    ("fp8", 128, 4, "", 16),
    ("fp8", 128, 4, "", 128),
)


def _launched() -> Iterator[tuple[str, int, int, str]]:
    """Kinds, head sizes, query heads a key head and what there is besides, as models have them."""
    for features in ("", _EVERYTHING):
        scaled = f"{features}-scales".lstrip("-")  # a cache in fp8 has scales or not
        yield from ((kind, dim, 4, features) for kind in list(_KINDS)[:4] for dim in _DIMS)
        yield from (("fp8", dim, 4, scaled) for dim in _DIMS)
        yield from (("bf16", dim, 7, features) for dim in _DIMS)  # no power of two
        yield from (("fp8", dim, 7, scaled) for dim in (64, 128))
        for dim in (64, 128, 256):  # many to one
            yield from ((kind, dim, share, features) for kind in ("bf16", "fp32") for share in (48, 71))
            yield ("fp8", dim, 48, scaled)
        for dim in (128, 256):  # 32 rows at least
            yield from ((kind, dim, 24, features) for kind in ("bf16", "fp8"))
        for kind in list(_KINDS)[4:]:
            yield from ((kind, dim, 4, scaled if "fp8" in kind else features) for dim in (128, 256))
    yield from (("bf16", 64, 8, features) for features in ("sinks", "window-sinks"))  # gpt-oss
    yield from (("bf16", 256, 2, features) for features in ("cap", "window-cap", "window"))  # gemma
    yield from (
        ("bf16", dim, share, "window") for dim, share in ((96, 1), (128, 4), (128, 12))
    )  # phi3, mistral, starcoder2
    yield from (("bf16", dim, share, "") for dim, share in ((128, 1), (128, 8), (32, 4), (192, 4)))


def configurations() -> Iterator[Ahead]:
    """What ``attention`` launches."""
    for kind, dim, share, features in _launched():
        for height in dict.fromkeys(heights(share)):
            yield from _tiles(kind, dim, share, features, height)
    for dim in _DIMS:
        for sinks in (False, True):
            yield _merges(dim, sinks)


def _tiles(kind: str, dim: int, share: int, features: str, height: int) -> Iterator[Ahead]:
    (q, cache), padded = _KINDS[kind], triton.next_power_of_2(dim)
    pointers = "partial sums tiles listed positions slots sinks kv_scales"
    types = dict(zip(pointers.split(), ("*fp32", "*fp32", *["*i32"] * 4, "*" + q, "*fp32")))
    numbers = "q_stride q_head_stride slot_stride kv_head_stride scale_stride values_scale heads window"
    types |= {"q": "*" + q, "out": "*" + q, "scale": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(numbers.split(), "i32")
    has = {name: name.lower() in features for name in ("WINDOW", "SINKS", "SCALES")}
    has |= {"SOFTCAP": "cap" in features, "PRECISE": q == "fp32"}
    plain = not (has["WINDOW"] or has["SOFTCAP"])
    absent = [*([] if has["SINKS"] else ["sinks"]), *([] if has["SCALES"] else ["kv_scales"])]
    for target in TARGETS:
        shape = tile_shape(height, share, dim, plain, (_TYPES[q], _TYPES[cache]), target)
        stored = "*u8" if "fp8" in kind and target < _HAS_FP8 else "*" + cache
        yield Ahead(
            name="-".join(filter(None, ("tile", kind, str(dim), str(height), f"{share}to1", features, str(target)))),
            kernel=_tile,
            types={name: type_ for name, type_ in types.items() if name not in absent} | {"k": stored, "v": stored},
            constants={
                "SHARE": share,
                "HELD": shape.held,
                "D": dim,
                "PADDED_D": padded,
                "M": shape.rows,
                "N": shape.keys,
            }
            | has
            | dict.fromkeys(absent),
            num_warps=shape.warps,
            num_stages=shape.stages,
            divisible=("q_stride", "q_head_stride", "slot_stride", "kv_head_stride"),
            targets=(target,),
            often=(kind, dim, share, features, height) in _OFTEN,
        )


def _merges(dim: int, sinks: bool) -> Ahead:
    types = {"out": "*bf16", "partial": "*fp32", "sums": "*fp32", "merges": "*i32", "parts": "*i32", "heads": "i32"}
    constants = {"D": dim, "PADDED_D": triton.next_power_of_2(dim), "N": _MERGED, "SINKS": sinks}
    return Ahead(
        name=f"merge-{dim}{'-sinks' if sinks else ''}",
        kernel=_merge,
        types=types | ({"sinks": "*bf16"} if sinks else {}),
        constants=constants if sinks else constants | {"sinks": None},
        num_warps=1 if dim <= 128 else 2,
        num_stages=1,
        often=sinks and dim in (96, 256),
    )
