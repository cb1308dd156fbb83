"""Native attention: right by torch's, and the same bits whatever is computed beside a row, however it is cut, shared and ordered."""

from __future__ import annotations

import itertools
import math
import platform
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

native = pytest.importorskip("radixrt.ops._native", reason="the native kernels are not built")

KINDS = {0: torch.float32, 1: torch.float16, 2: torch.bfloat16, 3: torch.int8, 4: torch.int16}
VALUE_CODE, WEIGHT_CODE = 2047, 8191  # the largest codes of values and of weights beside int16 keys and values


VARIANTS = native.variants()


@dataclass(frozen=True)
class Batch:
    """Sequences with queries at their last positions, over caches of which the sequences may share slots."""

    q: torch.Tensor  # [T, heads, dim]
    k: torch.Tensor  # [slots, kv_heads, dim]; int8, int16: codes, and behind them the bytes of a float32, their scale
    v: torch.Tensor
    q_lens: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]  # of each sequence
    window: int = 0

    def alone(self, sequence: int, queries: slice) -> Batch:
        """Only some queries of one sequence, which then ends behind them."""
        q = self.q[sum(self.q_lens[:sequence]) :][: self.q_lens[sequence]][queries]
        stop = queries.indices(self.q_lens[sequence])[1]
        kept = len(self.slots[sequence]) - self.q_lens[sequence] + stop
        return replace(self, q=q, q_lens=(len(q),), slots=(self.slots[sequence][:kept],))


def quantized(x: torch.Tensor, most: int, dtype: torch.dtype) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / most
    codes = (x / torch.where(scale > 0, scale, 1)).round().nan_to_num().to(dtype)
    return torch.cat([codes, scale.contiguous().view(dtype)], -1)


def key_code(dim: int) -> int:
    """The largest code of keys and queries: products of a whole head have to fit into 32 bits."""
    return min(32767, math.isqrt((2**31 - 1) // (-(-dim // 16) * 16)))


def numbers(cache: torch.Tensor) -> torch.Tensor:
    """What a cache holds, in float64."""
    if cache.dtype.is_floating_point:
        return cache.double()
    bytes_behind = 4 // cache.dtype.itemsize
    scales = cache[..., -bytes_behind:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return cache[..., :-bytes_behind].double() * scales.double()


def tiles(cache: torch.Tensor, key: bool) -> torch.Tensor:
    """An int16 cache ``[slots, kv_heads, dim + 2]`` as the kernels have it: see types.hpp."""
    slots, heads, _ = cache.shape
    codes, scales = cache[..., :-2], cache[..., -2:]
    padded = -(-codes.shape[-1] // 16) * 16
    codes = torch.nn.functional.pad(codes, (0, padded - codes.shape[-1], 0, 0, 0, -slots % 16))
    scales = torch.nn.functional.pad(scales, (0, 0, 0, 0, 0, -slots % 16))
    codes = codes.reshape(-1, 16, heads, padded).permute(2, 0, 1, 3)  # [heads, tiles, 16, padded]
    scales = scales.reshape(-1, 16, heads, 2).permute(2, 0, 1, 3)
    if key:
        codes = codes.unflatten(3, (-1, 2)).transpose(2, 3)
    else:
        codes = codes.unflatten(2, (8, 2)).transpose(3, 4)
    return torch.cat([codes.flatten(2), scales.flatten(2)], -1).contiguous()


def run(
    batch: Batch, variant: str, *, threads: int = 1, share: bool = True, seed: int = 0, most_parts: int = 1 << 24
) -> torch.Tensor:
    out = torch.full_like(batch.q, float("nan"))
    kind = next(kind for kind, dtype in KINDS.items() if dtype is batch.k.dtype)
    k, v = (
        tiles(cache, cache is batch.k).numpy()
        if kind == 4
        else cache.transpose(0, 1).contiguous().view(torch.int8).numpy()
        for cache in (batch.k, batch.v)
    )
    native.attention(
        variant,
        batch.q.contiguous().numpy(),
        k,
        v,
        kind,
        np.array(batch.q_lens, np.int32),
        np.array([len(slots) for slots in batch.slots], np.int32),
        np.array(list(itertools.chain(*batch.slots)), np.int32),
        batch.q.shape[1],
        batch.k.shape[1],
        batch.q.shape[2],
        batch.window,
        batch.q.shape[2] ** -0.5,
        out.numpy(),
        threads,
        share,
        seed,
        most_parts,
    )
    return out


def expected(batch: Batch) -> torch.Tensor:
    """By torch, in float64, one sequence after the other."""
    parts, row = [], 0
    queries = batch.q
    if batch.k.dtype is torch.int16:
        queries = numbers(quantized(batch.q, key_code(batch.q.shape[2]), torch.int16))
    for count, slots in zip(batch.q_lens, batch.slots):
        q = queries[row : row + count].double().transpose(0, 1)
        row += count
        k, v = (numbers(cache[list(slots)]).transpose(0, 1) for cache in (batch.k, batch.v))
        position = torch.arange(len(slots) - count, len(slots))[:, None]
        key = torch.arange(len(slots))[None, :]
        seen = key <= position
        if batch.window:
            seen &= key > position - batch.window
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts).float()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def make(
    q_lens: tuple[int, ...],
    slots: tuple[tuple[int, ...], ...],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 16,
    window: int = 0,
    kind: int = 0,
    seed: int = 0,
    spread: float = 1.0,
) -> Batch:
    """Random numbers; what no sequence owns is NaN."""
    g = torch.Generator().manual_seed(seed)
    count = max(map(max, slots)) + 2
    k, v = (torch.randn(count, kv_heads, dim, generator=g) * spread for _ in range(2))
    free = sorted(set(range(count)) - set(itertools.chain(*slots)))
    k[free], v[free] = float("nan"), float("nan")
    q = torch.randn(sum(q_lens), heads, dim, generator=g) * spread
    codes = {3: (127, 127), 4: (key_code(dim), VALUE_CODE)}.get(kind)
    if codes:
        stored = [quantized(x, most, KINDS[kind]) for x, most in zip((k, v), codes)]
    else:
        stored = [x.to(KINDS[kind]) for x in (k, v)]
    return Batch(q, *stored, q_lens, slots, window)


def close(batch: Batch, got: torch.Tensor, tolerance: float = 2e-5) -> None:
    """By torch, except for what the codes of int16 weights leave: at most half a code a position, here of 128 alike."""
    want = expected(batch)
    if batch.k.dtype is torch.int16:
        tolerance = max(tolerance, 64 / WEIGHT_CODE / 4)
    seen = [slot for slots in batch.slots for slot in slots]
    atol = tolerance * float(numbers(batch.v[seen]).abs().max())
    torch.testing.assert_close(got, want, rtol=tolerance, atol=atol)


def line(first: int, length: int) -> tuple[int, ...]:
    return tuple(range(first, first + length))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Sequences off a tree of slots, in runs in random order: branches at any position, decodes, short extensions and prefills."""
    run_length = draw(st.sampled_from([1, 2, 5, 16, 37, 400]))
    starts = np.random.default_rng(draw(st.integers(0, 99))).permutation(4000 // run_length) * run_length
    order = [int(start) + i for start in starts for i in reversed(range(run_length))]
    sequences: list[tuple[int, ...]] = []
    q_lens = []
    for _ in range(draw(st.integers(1, 5))):
        prefix: tuple[int, ...] = ()
        if sequences and draw(st.booleans()):
            parent = draw(st.sampled_from(sequences))
            prefix = parent[: draw(st.sampled_from([0, 1, 70, 100, 128, 129, 240, 256, 300, len(parent)]))]
        q_len = draw(st.sampled_from([1, 1, 1, 2, 8, 16, 17, 49, 130]))
        own = max(draw(st.sampled_from([0, 1, 9, 30, 127, 128, 200, 500])), q_len - len(prefix), 1 - len(prefix))
        sequences.append(prefix + tuple(order.pop() for _ in range(own)))
        q_lens.append(q_len)
    kv_heads, share = draw(st.sampled_from([(1, 1), (2, 3), (3, 1), (1, 8), (2, 4)]))
    return make(
        tuple(q_lens),
        tuple(sequences),
        heads=kv_heads * share,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([8, 16, 24, 32, 64, 80, 96, 128])),
        window=draw(st.sampled_from([0, 0, 1, 5, 64, 128, 150])),
        kind=draw(st.sampled_from([0, 1, 2, 3, 4, 4])),
        seed=draw(st.integers(0, 99)),
        spread=draw(st.sampled_from([0.01, 1.0, 6.0])),
    )


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=15, deadline=None)
@given(batch=batches())
def test_it_is_attention(variant: str, batch: Batch) -> None:
    close(batch, run(batch, variant), 5e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=15, deadline=None)
@given(batch=batches(), data=st.data())
def test_a_row_has_the_same_bits_whatever_is_beside_it(variant: str, batch: Batch, data: st.DataObject) -> None:
    whole = run(batch, variant)
    assert same_bits(whole, run(batch, variant, share=False))
    assert same_bits(whole, run(batch, variant, most_parts=0))  # every sequence goes as a prefill does
    assert same_bits(whole, run(batch, variant, threads=3, seed=data.draw(st.integers(1, 9))))
    sequence = data.draw(st.integers(0, len(batch.q_lens) - 1))
    count = batch.q_lens[sequence]
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.sampled_from(sorted({first + 1, min(first + 7, count), count})))
    row = sum(batch.q_lens[:sequence])
    assert same_bits(whole[row + first : row + last], run(batch.alone(sequence, slice(first, last)), variant))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [0, 1, 100, 300])
@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4])
def test_long_sequences_have_the_same_bits_alone(variant: str, window: int, kind: int) -> None:
    """Many spans, windows that begin anywhere in them; one that takes its spans in order beside one whose parts are merged."""
    slots = (line(0, 700), line(0, 650), line(0, 520) + line(800, 41), line(0, 300) + line(900, 330))
    batch = make((1, 3, 16, 130), slots, dim=24, window=window, kind=kind)
    whole = run(batch, variant)
    close(batch, whole)
    assert same_bits(whole, run(batch, variant, share=False, most_parts=0))
    for sequence, query in ((0, 0), (1, 1), (2, 15), (3, 0), (3, 77), (3, 128)):
        row = sum(batch.q_lens[:sequence]) + query
        assert same_bits(whole[row : row + 1], run(batch.alone(sequence, slice(query, query + 1)), variant))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dim", [8, 16, 40, 64, 112, 128, 256])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (9, 3), (100, 1), (200, 2)])
@pytest.mark.parametrize("kind", [0, 4])
def test_shapes(variant: str, dim: int, heads: int, kv_heads: int, kind: int) -> None:
    slots = (line(0, 200), line(100, 131), line(5, 64))
    batch = make((1, 3, 20), slots, heads=heads, kv_heads=kv_heads, dim=dim, kind=kind)
    whole = run(batch, variant)
    close(batch, whole)
    assert same_bits(whole[3:4], run(batch.alone(1, slice(2, 3)), variant))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dim", [2, 16, 40, 64])
def test_int8_is_stored_with_a_scale(variant: str, dim: int) -> None:
    for x in (torch.randn(dim) * 9, torch.linspace(-3, 1, dim), torch.zeros(dim)):
        stored = torch.frombuffer(native.store_kv(variant, x.numpy(), 3), dtype=torch.int8)
        scale = stored[dim:].clone().view(torch.float32)
        torch.testing.assert_close(scale, x.abs().amax()[None] / 127)
        assert ((x - stored[:dim] * scale).abs() <= scale * 0.5001).all()
    for wrong in (float("nan"), float("inf")):
        x[dim // 2] = wrong
        assert numbers(torch.frombuffer(native.store_kv(variant, x.numpy(), 3), dtype=torch.int8)).isnan().all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dim", [1, 16, 40, 64, 256])
@pytest.mark.parametrize("key", [True, False])
def test_int16_is_stored_in_tiles(variant: str, dim: int, key: bool) -> None:
    x = torch.randn(32, dim, generator=torch.Generator().manual_seed(dim)) * torch.logspace(-20, 20, 32)[:, None]
    x[3] = 0
    stored = torch.frombuffer(native.store_tiles(variant, x.numpy(), dim, key), dtype=torch.int16)
    most = key_code(dim) if key else VALUE_CODE
    want = tiles(quantized(x[:, None], most, torch.int16), key)
    padded = -(-dim // 16) * 16
    codes, scales = stored.view(2, -1).split([16 * padded, 32], 1)
    want_codes, want_scales = want[0].split([16 * padded, 32], 1)
    assert (codes - want_codes).abs().max() <= 1  # a half may fall on either side
    assert (codes != want_codes).float().mean() < 0.02
    torch.testing.assert_close(
        scales.contiguous().view(torch.float32), want_scales.contiguous().view(torch.float32), rtol=1e-6, atol=0
    )
    for wrong in (float("nan"), float("inf")):
        x[5, dim // 2] = wrong
        scales = torch.frombuffer(native.store_tiles(variant, x.numpy(), dim, key), dtype=torch.int16).view(2, -1)[
            :, -32:
        ]
        assert scales.contiguous().view(torch.float32).isnan().nonzero().tolist() == [[0, 5]]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", [0, 1, 3, 4])
def test_a_branch_within_a_span_has_the_same_bits(variant: str, kind: int) -> None:
    """Pieces that end anywhere in vectors of positions, and branches of branches."""
    base = line(0, 200)
    slots = [
        base[:cut] + line(300 + 100 * i, own) for i, (cut, own) in enumerate([(200, 9), (200, 1), (197, 20), (180, 40)])
    ]
    slots += [base, base[:199] + line(800, 57), base[:110] + line(900, 30), line(1000, 150)]
    batch = make((1, 2, 1, 1, 1, 3, 1, 1), tuple(slots), dim=24, kind=kind)
    whole = run(batch, variant)
    close(batch, whole)
    assert same_bits(whole, run(batch, variant, share=False))
    assert same_bits(whole, run(batch, variant, most_parts=0))
    for sequence in range(len(slots)):
        row = sum(batch.q_lens[: sequence + 1]) - 1
        last = batch.q_lens[sequence]
        assert same_bits(whole[row : row + 1], run(batch.alone(sequence, slice(last - 1, last)), variant))


def test_what_is_shared_is_read_once() -> None:
    """By the number of pieces of KV, each of which is read once: what is alike in several sequences, at any depth, is one."""
    prefix, other = line(0, 384), line(1000, 210)
    slots = (
        *(prefix + line(400, 10), prefix + line(500, 20), prefix[:256] + line(600, 128)),
        *(other, other + line(700, 1), other[:190] + line(800, 20)),
    )
    batch = make((1,) * 6, slots)
    arguments = (np.array(batch.q_lens, np.int32), np.array([len(s) for s in slots], np.int32))
    flat = np.array(list(itertools.chain(*slots)), np.int32)
    pieces = []
    for share in (True, False):
        k, v = batch.k.numpy(), batch.v.numpy()
        out = np.empty(batch.q.shape, np.float32)
        tail = (6, 2, 16, 0, 1.0, out, 1, share, 0, 1 << 24)
        pieces.append(native.attention(VARIANTS[0], batch.q.numpy(), k, v, 0, *arguments, flat, *tail)[1])
    # of `other` one span, then up to 190 for three, up to 210 for two, and what two have for themselves
    assert pieces == [1 + 1 + 2 + 2 + 1 + 1 + 1 + 2, 4 + 4 + 3 + 2 + 2 + 2]


@pytest.mark.parametrize("variant", VARIANTS)
def test_extremes(variant: str) -> None:
    """One key; many sequences; a long one; scores far apart; an infinite value that a query does not see is not its matter."""
    one = make((1,), ((7,),), heads=2, kv_heads=1, dim=8)
    assert torch.equal(run(one, variant)[0, 0], one.v[7, 0])
    many = make((1,) * 1000, tuple((*line(0, 128), i + 128) for i in range(1000)), heads=2, kv_heads=1, dim=8)
    assert same_bits(run(many, variant, threads=2)[500:501], run(many.alone(500, slice(0, 1)), variant))
    long = make((1, 2), (line(0, 100_000), line(0, 99_000)), heads=1, kv_heads=1, dim=8)
    torch.testing.assert_close(run(long, variant), expected(long), rtol=1e-4, atol=1e-5)
    apart = make((1,), (line(0, 300),), heads=1, kv_heads=1, dim=8, spread=1.0)
    apart.q.mul_(1e4)
    best = (apart.k[list(apart.slots[0]), 0] @ apart.q[0, 0]).argmax()
    assert torch.equal(run(apart, variant)[0, 0], apart.v[best, 0])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("kind", [0, 1, 3, 4])
@pytest.mark.parametrize("other", [310, 400])
def test_nan_stays_with_its_sequence(variant: str, where: str, kind: int, other: int) -> None:
    """Also where the other one's slots lie beside it in a tile."""
    batch = make((1, 1), (line(0, 150) + line(300, 9), line(0, 150) + line(other, 9)), kind=kind)
    clean = run(batch, variant)
    bad = getattr(batch, where)
    if where == "q":
        bad[0] = float("nan")
    elif bad.is_floating_point():
        bad[305] = float("nan")
    else:
        bad[305, :, -4 // bad.itemsize :] = torch.tensor([float("nan")]).view(bad.dtype)  # its scale
    out = run(batch, variant)
    assert out[0].isnan().all()
    assert same_bits(out[1:], clean[1:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_value_that_is_no_number_is_not_the_matter_of_queries_before_it(variant: str) -> None:
    batch = make((20,), (line(0, 60),), kind=4)
    clean = run(batch, variant)
    batch.v[55, :, -2:] = torch.tensor([float("nan")]).view(torch.int16)
    out = run(batch, variant)
    assert same_bits(out[:15], clean[:15]) and out[15:].isnan().all()


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"variant": "sse9"}, "variant=sse9"),
        ({"kind": 5}, "kind: must be 0"),
        ({"kind": 4}, "int16 needs a multiple of 16 slots"),
        ({"kind": 3, "k": b"\0" * 13}, "k: must be"),
        ({"kv_heads": 4}, "heads: must be a multiple of kv_heads"),
        ({"dim": 0}, "dim: must be 1"),
        ({"window": -1}, "window: must be"),
        ({"threads": 0}, "threads: must be"),
        ({"q": b"\0" * 4}, "q: must be float32"),
        ({"out": bytearray(4)}, "out: must be as large as q"),
        ({"k": b"\0" * 5}, "k: must be"),
        ({"v": b"\0" * 128}, "v: must be as large"),
        ({"q_lens": np.array([3], np.int32)}, "q_lens: 0 <= "),
        ({"q_lens": np.array([1, 1], np.int32)}, "kv_lens: must have as many"),
        ({"kv_slots": np.array([0], np.int32)}, "kv_slots: must have"),
        ({"kv_slots": np.array([0, 9], np.int32)}, "kv_slots: a slot outside"),
        ({"kv_slots": np.array([-1, 0], np.int32)}, "kv_slots: a slot outside"),
    ],
)
def test_refusals(change: dict[str, object], problem: str) -> None:
    arguments: dict[str, object] = {
        "variant": VARIANTS[0],
        "q": np.zeros((1, 2, 8), np.float32),
        "k": np.zeros((9, 1, 8), np.float32),
        "v": np.zeros((9, 1, 8), np.float32),
        "kind": 0,
        "q_lens": np.array([1], np.int32),
        "kv_lens": np.array([2], np.int32),
        "kv_slots": np.array([0, 1], np.int32),
        "heads": 2,
        "kv_heads": 1,
        "dim": 8,
        "window": 0,
        "scale": 1.0,
        "out": np.zeros((1, 2, 8), np.float32),
        "threads": 1,
        "share": True,
        "seed": 0,
        "most_parts": 0,
    }
    if change.get("kv_heads") == 4:
        change = {**change, "k": np.zeros((9, 4, 8), np.float32), "v": np.zeros((9, 4, 8), np.float32)}
    native.attention(*arguments.values())
    with pytest.raises(ValueError, match=problem):
        native.attention(*(arguments | change).values())


def test_this_machine_has_variants() -> None:
    assert "portable" in VARIANTS
    if platform.machine() in ("aarch64", "arm64"):
        assert "neon" in VARIANTS
