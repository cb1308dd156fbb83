"""A mixture of experts: the choices of a batch sorted by expert on the device, and two grouped matrix products over them.

Invariants: the host never waits for the device, as grids depend on shapes alone; every choice's output has a row of its own and
a token's are added in the order of its choices, so that the result is deterministic; experts may be packed like any matrix.

    choices   (t0 e2) (t0 e0) (t1 e2) (t1 e1) (t2 e2) (t2 e0)          in blocks of 2 rows
    sorted     e0: t0 t2 | e1: t1 | e2: t0 t1 | e2: t2                 expert, first and end of each block in a table
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl

from radixrt.ops.interface import GATED
from radixrt.ops.triton.ahead import Ahead
from radixrt.ops.triton.linear import NUMBERS, Tile, form_of, product, step_of
from radixrt.ops.triton.rows import gate_with
from radixrt.ops.weights import FP8, IntWeight, Weight, dequantized

_FEW = 1024  # choices that one program sorts


@triton.jit
def experts_kernel(
    x, w, scales, zeros, columns, bias, gains, out, order, blocks,
    N, K, G, per_token,
    FORM: tl.constexpr, MIDDLE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
    ORDERED: tl.constexpr, WHOLE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's product with the rows of one block.

    With KIND, of ``[2 N, K]``: x has a row a token, and row i of out is ``act(gate) * up`` of the i-th sorted choice. Without, of
    ``[N, K]``: x has a row a sorted choice, and out one a choice as the caller has them, times its gain.
    """
    block = tl.program_id(1)
    first = tl.load(blocks + 3 * block + 1)
    end = tl.load(blocks + 3 * block + 2)
    if first < end:  # the table has room for the worst case; the rest is empty
        expert = tl.load(blocks + 3 * block).to(tl.int64)
        rows = first + tl.arange(0, BM)
        inside = rows < end
        rows = tl.minimum(rows, end - 1).to(tl.int64)
        choice = tl.load(order + rows).to(tl.int64)
        lane = tl.arange(0, BN)
        if KIND != "":
            # rows of gate and up side by side: one product, parted at its end
            n = tl.program_id(0) * (BN // 2) + lane // 2
            w_row = tl.minimum(n, N - 1) + lane % 2 * N
            high, x_at = 2 * N, choice // per_token * K
        else:
            n = tl.program_id(0) * BN + lane
            w_row = tl.minimum(n, N - 1)
            high, x_at = N, rows * K
        per_row = K // 2 if FORM == "int4" else K
        w_row = w_row.to(tl.int64)
        acc = product(
            x, x_at, w, (expert * high + w_row) * per_row,
            scales, (expert * tl.cdiv(high, ROWS) + w_row // ROWS) * G, zeros, x, x_at, columns + expert * K if ORDERED else x,
            K, 0, K, FORM, MIDDLE, GROUP, ORDERED, WHOLE, BN, BM, BK,
        )  # fmt: skip
        if bias is not None:
            acc += tl.load(bias + expert * high + w_row)[:, None].to(tl.float32)
        if KIND != "":
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BN // 2, 2, BM)), (0, 2, 1)))
            n = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
            value, at = gate_with(gate, up, KIND, out.dtype.element_ty), rows[None, :] * N + n[:, None]
        else:
            value = acc * tl.load(gains + choice)[None, :].to(tl.float32)
            at = choice[None, :] * N + n[:, None]
        tl.store(out + at, value.to(out.dtype.element_ty), mask=(n < N)[:, None] & inside[None, :])


@triton.jit
def sort_kernel(
    experts, order, blocks, size, count, most, rows, SIZE: tl.constexpr, COUNT: tl.constexpr, MOST: tl.constexpr
):
    """``blocks_of`` for a few choices in one program, as a step of decoding is a few microseconds long."""
    i = tl.arange(0, SIZE)
    expert = tl.load(experts + i, mask=i < size, other=COUNT - 1).to(tl.int32)
    # the choice's place in the low bits keeps the order of equal ones; those that are none come last
    keys = tl.sort(tl.where(i < size, expert * SIZE + i, COUNT * SIZE + i))
    tl.store(order + i, keys % SIZE, mask=i < size)
    counts = tl.histogram(expert, COUNT)
    e = tl.arange(0, COUNT)
    counts = tl.where(e == COUNT - 1, counts - (SIZE - size), counts)
    number = (counts + rows - 1) // rows
    last = tl.cumsum(number, 0)
    first = tl.cumsum(counts, 0) - counts
    for j in tl.range(0, tl.max(number, 0)):
        at, some = blocks + 3 * (last - number + j), j < number
        tl.store(at, e, mask=some)
        tl.store(at + 1, first + j * rows, mask=some)
        tl.store(at + 2, first + tl.minimum((j + 1) * rows, counts), mask=some)
    index = tl.arange(0, MOST)
    empty = (index >= tl.sum(number, 0)) & (index < most)
    for part in tl.static_range(3):
        tl.store(blocks + 3 * index + part, tl.zeros((MOST,), tl.int32), mask=empty)


def blocks_of(experts: torch.Tensor, count: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The choices ``[T, k]`` sorted by expert, int32 ``[T k]``, and the table of blocks, int32 ``[B, 3]``: expert, first row, end.

    A block has at most ``rows`` rows of one expert. ``B`` is the most there can be; those left over have no rows.
    """
    flat = experts.reshape(-1).contiguous()
    size = flat.numel()
    most = min(count, size) + size // rows
    if size <= _FEW:
        order, blocks = (torch.empty(shape, dtype=torch.int32, device=flat.device) for shape in (size, (most, 3)))
        sizes = {"SIZE": max(_power(size), 16), "COUNT": max(_power(count), 16), "MOST": max(_power(most), 16)}
        sort_kernel[(1,)](flat, order, blocks, size, count, most, rows, **sizes, num_warps=4)
        return order, blocks
    order = torch.argsort(flat, stable=True).to(torch.int32)
    every = torch.arange(count, device=flat.device)
    ends = torch.searchsorted(flat.index_select(0, order), every.to(flat.dtype), right=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    last = torch.cumsum((counts + rows - 1) // rows, 0)  # blocks up to and with an expert's
    index = torch.arange(most, device=flat.device)
    expert = torch.searchsorted(last, index, right=True)
    known = expert.clamp(max=count - 1)
    before = last.index_select(0, known) - (counts.index_select(0, known) + rows - 1) // rows
    end = ends.index_select(0, known)
    first = end - counts.index_select(0, known) + (index - before) * rows
    end = torch.minimum(end, first + rows).where(expert < count, 0)
    return order, torch.stack((known, first, end), 1).to(torch.int32)


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def tile_of(tokens: int, count: int, step: int, dtype: torch.dtype, packed: bool, kind: str) -> Tile:
    """The tile for so many choices among ``count`` experts: about as many rows as an expert has.

    Packed experts sum in twice the registers; the masks of columns that no tile divides (``step`` 0) and the ``kind`` of gate
    that is an error function take many, too.
    """
    each, crowded, step = tokens // count, packed or not step or kind == "gelu", step or 32
    if dtype is torch.float32:
        return Tile(64, 16, min(step, 32), 8, 2)
    if each <= 16:
        return Tile(64, 16, step, 4, 4)
    if each <= 64:
        return Tile(128, 32, min(step, 64), 4, 4)
    if each <= 128 or crowded:
        return Tile(128, 64, min(step, 64), 8 if crowded else 4, 4)
    return Tile(128, 128, min(step, 64), 8, 3)


def moe(
    x: torch.Tensor,
    experts: torch.Tensor,
    gains: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    kind: str,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of each token's experts ``[T, Hd]``; see ``Ops.moe`` for the shapes.

    Sums are float32 up to the gated activation, which is rounded to x's dtype as in the reference, and up to each choice's output times its gain.
    """
    if kind not in GATED:
        raise ValueError(f"kind={kind!r}: must be one of {', '.join(GATED)}")
    tokens, per_token = experts.shape
    count, inner, hidden = down.shape[0], down.shape[2], down.shape[1]
    if not tokens:
        return torch.empty_like(x)
    size = tokens * per_token
    gate_up, down = _tiled(gate_up, x.dtype), _tiled(down, x.dtype)
    tiles = [
        tile_of(size, count, step_of(weight), x.dtype, not isinstance(weight, torch.Tensor), after)
        for weight, after in ((gate_up, kind), (down, ""))
    ]
    rows = min(tile.bm for tile in tiles)  # both products go by one table of blocks
    tiles = [replace(tile, bm=rows) for tile in tiles]
    order, blocks = blocks_of(experts, count, rows)
    middle = x.new_empty((size, inner))
    parts = x.new_empty((size, hidden))
    _launch(x.contiguous(), gate_up, gate_up_bias, None, middle, order, blocks, per_token, kind, tiles[0])
    _launch(middle, down, down_bias, gains.reshape(-1).contiguous(), parts, order, blocks, per_token, "", tiles[1])
    return parts.view(tokens, per_token, hidden).sum(1)


def _tiled(weight: Weight, dtype: torch.dtype) -> Weight:
    """The weight, dense where no tile fits its groups."""
    if isinstance(weight, torch.Tensor):
        return weight.contiguous()
    return weight if step_of(weight) else dequantized(weight, dtype)


def _launch(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    gains: torch.Tensor | None,
    out: torch.Tensor,
    order: torch.Tensor,
    blocks: torch.Tensor,
    per_token: int,
    kind: str,
    tile: Tile,
) -> None:
    (form, middle, group, scale_rows), columns, width = form_of(weight), weight.shape[-1], out.shape[1]
    codes, scales, zeros, shuffle = weight, None, None, None
    if not isinstance(weight, torch.Tensor):
        codes, scales = weight.codes.view(torch.uint8) if weight.codes.dtype is FP8 else weight.codes, weight.scales
    if isinstance(weight, IntWeight):
        zeros, shuffle = weight.zeros, weight.order
    per_program = tile.bn // 2 if kind else tile.bn
    experts_kernel[(triton.cdiv(width, per_program), len(blocks))](
        x, codes, scales, zeros, shuffle, bias, gains, out, order, blocks,
        width, columns, 1 if scales is None else scales.shape[-1], per_token,
        FORM=form, MIDDLE=middle, GROUP=group, ROWS=scale_rows, KIND=kind, ORDERED=shuffle is not None,
        WHOLE=columns % tile.bk == 0, BN=tile.bn, BM=tile.bm, BK=tile.bk, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


_FORMS = (  # FORM, MIDDLE, GROUP, the columns of whole tiles, whether they have an order
    ("dense", 0, 0, 128, False), ("int4", -1, 128, 128, False), ("int4", 8, 32, 32, False),
    ("int8", -1, 128, 128, False), ("fp8", 0, 128, 128, False), ("fp8", 0, 0, 128, False),
    ("int4", -1, 128, 128, True), ("int8", -1, 128, 128, True),
)  # fmt: skip
_RARER = (  # other groups, and numbers of columns that allow no larger tile
    ("dense", 0, 0, 64, False), ("dense", 0, 0, 16, False), ("int4", 8, 128, 128, False), ("int4", 8, 128, 128, True),
    ("int4", -1, 64, 64, True), ("int4", 8, 32, 32, True), ("int4", 8, 0, 128, False), ("int8", 128, 128, 128, False),
    ("int8", 128, 32, 32, True), ("int8", 128, 0, 64, False), ("fp8", 0, 0, 16, False), ("fp8", 0, 0, 64, False),
    ("fp8", 0, 128, 64, False),
)  # fmt: skip


def configurations() -> Iterator[Ahead]:
    """What ``moe`` launches: every form, few rows an expert and many; dense ones with a bias have its kind of gate, or none."""
    for dtype, name in NUMBERS.items():
        for form in _FORMS if dtype is not torch.bfloat16 else (*_FORMS, *_RARER):
            for each in (1,) if dtype is torch.float32 else (1, 64, 128, 256)[: 4 if form[0] == "dense" else 3]:
                for kind in (*GATED, "") if form[0] == "dense" or form == _FORMS[1] else ("silu", ""):
                    tile = tile_of(each, 1, form[3], dtype, form[0] != "dense", kind)
                    for bias in {"": (False, True), "swiglu_oai": (True,)}.get(kind, (False,)):
                        if form[0] == "dense" or not bias:
                            yield _ahead(name, *form, str(each), tile, kind, bias)
    dense = ("bf16", "dense", 0, 0)
    for kind in ("silu", ""):  # columns that no tile divides; and rows in blocks of a packed matrix beside it
        for each in (1, 64, 128):
            tile = tile_of(each, 1, 0, torch.bfloat16, False, kind)
            yield _ahead(*dense, 32, False, f"odd-{each}", tile, kind, False, whole=False)
        beside = replace(tile_of(256, 1, 128, torch.bfloat16, False, kind), bm=64)
        yield _ahead(*dense, 128, False, "beside", beside, kind, False)
    for size, count in ((16, 8), (1024, 128), (1024, 512)):
        yield Ahead(
            f"sort-{size}-{count}",
            sort_kernel,
            {"experts": "*i64", "order": "*i32", "blocks": "*i32"}
            | dict.fromkeys(("size", "count", "most", "rows"), "i32"),
            {"SIZE": size, "COUNT": max(count, 16), "MOST": max(_power(min(count, size) + size // 16), 16)},
            often=count == 128,
        )


def _ahead(
    name: str, form: str, middle: int, group: int, step: int, ordered: bool, rows: str, tile: Tile, kind: str, bias: bool,
    whole: bool = True,
) -> Ahead:  # fmt: skip
    types = {"x": "*" + name, "w": "*" + name if form == "dense" else "*u8", "out": "*" + name}
    types |= {"order": "*i32", "blocks": "*i32"} | dict.fromkeys(("N", "K", "G", "per_token"), "i32")
    absent: dict[str, None] = {}
    for argument, there, what in (
        ("scales", form != "dense", "*fp32" if form == "fp8" else "*fp16" if group == 128 else "*" + name),
        ("zeros", middle < 0, "*u8"), ("gains", not kind, "*fp32"), ("columns", ordered, "*i32"), ("bias", bias, "*" + name),
    ):  # fmt: skip
        if there:
            types[argument] = what
        else:
            absent[argument] = None
    zero, columns = (
        "zeros" if middle < 0 else "middle",
        f"{group or 'row'}{f'by{step}' if step < (group or 128) else ''}",
    )
    order, end = "-order" if ordered else "", f"{kind or 'down'}{'-bias' if bias else ''}"
    return Ahead(
        f"{form}-{name}-{zero}-{columns}{order}-{rows}-{end}",
        experts_kernel,
        types,
        absent
        | {"FORM": form, "MIDDLE": middle, "GROUP": group, "ROWS": 128 if form == "fp8" and group else 1, "KIND": kind}
        | {"ORDERED": ordered, "WHOLE": whole, "BN": tile.bn, "BM": tile.bm, "BK": tile.bk},
        tile.warps,
        tile.stages,
        divisible=("N", "K") if whole else (),
        often=(name, step, ordered, bias) == ("bf16", 128, False, False)
        and kind in ("silu", "")
        and (form, middle, group, rows)
        in {("dense", 0, 0, "1"), ("dense", 0, 0, "256"), ("int4", -1, 128, "128"), ("fp8", 0, 128, "128")},
    )
