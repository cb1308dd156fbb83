"""Tiles, their parts and their merge against a softmax in float64, and against the torch reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from radixrt.ops.interface import IntArray
from radixrt.ops.torch.ops import TorchOps
from radixrt.ops.triton.attention import PaddedPlan, attention, plan_attention

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
FORMS = [torch.float32, torch.float16]  # the former has low tiles throughout, with one loop over the keys


@dataclass(frozen=True)
class Batch:
    """Sequences over a cache in which every slot that none of their queries sees is not a number."""

    q_lens: IntArray
    kv_lens: IntArray
    slots: IntArray
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor


def batch(
    slots: list[IntArray],
    q_lens: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
) -> Batch:
    """Random queries, keys and values for sequences with these slots."""
    random = torch.Generator().manual_seed(1)
    kv_lens = np.array([len(s) for s in slots], dtype=np.int32)
    size = 1 + max((int(s.max()) for s in slots if len(s)), default=0)
    tensors = [
        torch.randn(n, h, dim, generator=random).to(dtype) for n, h in ((sum(q_lens), heads), *[(size, kv_heads)] * 2)
    ]
    seen = torch.zeros(size, dtype=torch.bool)
    for sequence, queries in zip(slots, q_lens):
        first = 0 if window is None else max(0, len(sequence) - queries - window + 1)
        seen[sequence[first:].astype(np.int64)] = queries > 0
    for cache in tensors[1:]:
        cache[~seen] = float("nan")
    flat = np.concatenate(slots).astype(np.int32)
    return Batch(np.array(q_lens, dtype=np.int32), kv_lens, flat, *tensors, torch.randn(heads, generator=random))


def paged(lens: list[int], page: int, seed: int = 0) -> list[IntArray]:
    """Slots of sequences whose pages lie anywhere."""
    counts = [-(-n // page) for n in lens]
    pages = np.random.default_rng(seed).permutation(sum(counts) + 3).astype(np.int32)
    slots = []
    for n, count in zip(lens, counts):
        slots.append((pages[:count, None] * page + np.arange(page, dtype=np.int32)).ravel()[:n])
        pages = pages[count:]
    return slots


def tree(sizes: dict[str, int], *paths: str) -> list[IntArray]:
    """Slots of sequences that are paths through a tree: ``ab`` has those of node a, then those of node b."""
    places = paged(list(sizes.values()), 1)
    nodes = dict(zip(sizes, places))
    return [np.concatenate([nodes[name] for name in path]) for path in paths]


def expected(
    b: Batch, scale: float, window: int | None = None, softcap: float | None = None, sinks: bool = False
) -> torch.Tensor:
    """Softmax by its definition, in float64, one sequence at a time."""
    out = torch.zeros(b.q.shape, dtype=torch.float64)
    share = b.q.shape[1] // b.k.shape[1]
    row = at = 0
    for queries, keys in zip(b.q_lens.tolist(), b.kv_lens.tolist()):
        slots = torch.from_numpy(b.slots[at : at + keys].astype(np.int64))
        position = torch.arange(keys - queries, keys)[:, None]
        key = torch.arange(keys)[None, :]
        hidden = key > position
        if window is not None:
            hidden |= key <= position - window
        k, v = (c[slots].double().nan_to_num().repeat_interleave(share, 1) for c in (b.k, b.v))
        score = torch.einsum("qhd,khd->hqk", b.q[row : row + queries].double(), k) * scale
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        score.masked_fill_(hidden, -torch.inf)
        if sinks:
            score = torch.cat((score, b.sinks.double()[:, None, None].expand(-1, queries, 1)), dim=2)
        weight = torch.softmax(score, dim=2)[:, :, :keys]
        out[row : row + queries] = torch.einsum("hqk,khd->qhd", weight, v)
        row, at = row + queries, at + keys
    return out


def compare(
    b: Batch, window: int | None = None, softcap: float | None = None, sinks: bool = False, rounding: int = 1
) -> None:
    """The kernels' result, against the definition."""
    scale = b.q.shape[2] ** -0.5
    plan = plan_attention(b.q_lens, b.kv_lens, b.slots, b.q.shape[1], b.k.shape[1], window, CPU)
    out = attention(b.q, b.k, b.v, plan, scale, softcap, b.sinks if sinks else None)
    assert out.dtype is b.q.dtype
    tolerance = TOLERANCE[b.q.dtype] * rounding
    exact = expected(b, scale, window, softcap, sinks)
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dim", [8, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_head_sizes_and_types(dim: int, dtype: torch.dtype) -> None:
    compare(batch(paged([200, 1, 70, 0], 16), [1, 1, 20, 0], 8, 2, dim, dtype), sinks=True)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("dtype", FORMS, ids=str)
def test_ends_at_the_borders_of_pages_and_blocks(page: int, dtype: torch.dtype) -> None:
    lens = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129]
    compare(batch(paged(lens, page), [1] * len(lens), 4, 2, 64, dtype))
    lens = [64, 65, 80]
    compare(batch(paged(lens, page), [64, 33, 17], 4, 2, 64, dtype))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (7, 1), (12, 1), (40, 2), (71, 1), (142, 2)])
def test_any_number_of_heads_shares_a_key_head(heads: int, kv_heads: int) -> None:
    compare(batch(paged([150, 40, 3], 1), [1, 9, 3], heads, kv_heads, 64))


@pytest.mark.parametrize(
    ("share", "dim", "dtype"),
    [(71, 64, torch.float16), (150, 64, torch.float16), (20, 256, torch.float32), (40, 256, torch.float32)],
)
def test_the_heads_of_a_key_head_are_those_of_several_programs(share: int, dim: int, dtype: torch.dtype) -> None:
    compare(batch(paged([150, 40], 1), [1, 9], 2 * share, 2, dim, dtype), sinks=True)


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 100, 1000])
@pytest.mark.parametrize("dtype", FORMS, ids=str)
def test_windows_and_nothing_outside_them_is_read(window: int, dtype: torch.dtype) -> None:
    """Prefills over several tiles and behind a prefix, a few queries at once, decodes; some shorter than the window."""
    lens, q_lens = [130, 200, 90, 300, 1, 64], [130, 40, 3, 1, 1, 1]
    compare(batch(paged(lens, 16), q_lens, 4, 2, 64, dtype, window), window, sinks=True)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_soft_cap_and_sinks(softcap: float, sinks: bool) -> None:
    compare(batch(paged([300, 70, 20], 1), [1, 33, 1], 4, 2, 64), softcap=softcap, sinks=sinks)


def test_large_scores() -> None:
    b = batch(paged([300, 70], 1), [1, 33], 4, 2, 64)
    b.q.mul_(300)
    compare(b, sinks=True, rounding=100)
    compare(b, softcap=5.0, rounding=100)


def test_one_decode_is_split_into_parts_that_are_merged() -> None:
    b = batch(paged([6000], 16), [1], 4, 2, 64)
    plan = plan_attention(b.q_lens, b.kv_lens, b.slots, 4, 2, None, CPU)
    assert len(plan.parts) == len(plan.tiles[0]) > 16  # more than a merge reads at a time
    compare(b, sinks=True)


def test_a_sequence_without_keys_gives_zeros() -> None:
    b = batch(paged([0, 5], 1), [1, 1], 4, 2, 64)
    plan = plan_attention(b.q_lens, b.kv_lens, b.slots, 4, 2, None, CPU)
    for sinks in (None, b.sinks):
        out = attention(b.q, b.k, b.v, plan, 0.125, None, sinks)
        assert (out[0] == 0).all()
        assert out.isfinite().all()


SHARED = [
    # a prefix, with an own part of one key, of several; another sequence that shares nothing
    (({"a": 300, "b": 1, "c": 70, "d": 200}, "ab", "ac", "d"), [1, 1, 1]),
    # tree of thought: branches below branches, one of them too short to be worth it
    (({"a": 140, "b": 150, "c": 20, **dict.fromkeys("uvwxyz", 3)}, "abu", "abv", "acw", "acx", "ay", "z"), [1] * 6),
    # two sequences with all but the query's key in common; the same twice
    (({"a": 256, "x": 1, "y": 1}, "ax", "ay", "ax"), [1, 1, 1]),
    # a prefix of another sequence; more queries than one each; prefills and decodes
    (({"a": 129, "b": 150, "x": 4, "y": 2, "z": 80}, "ax", "aby", "abx", "az"), [3, 2, 1, 70]),
]


@pytest.mark.parametrize(("nodes", "q_lens"), SHARED)
@pytest.mark.parametrize("window", [None, 40, 250])
def test_shared_prefixes(nodes: tuple[dict[str, int], str], q_lens: list[int], window: int | None) -> None:
    b = batch(tree(*nodes), q_lens, 8, 2, 64, torch.float16, window)
    plan = plan_attention(b.q_lens, b.kv_lens, b.slots, 8, 2, None, CPU)
    assert len(plan.listed) > len(plan.positions)  # something is shared
    compare(b, window, sinks=True)


@pytest.mark.parametrize("share", [1, 4, 8])
def test_a_prefix_of_many_sequences_is_a_few_tall_tiles(share: int) -> None:
    own = [chr(ord("A") + i) for i in range(24)]
    dtype = torch.float32 if share == 4 else torch.float16
    b = batch(
        tree({"a": 200} | dict.fromkeys(own, 2), *("a" + name for name in own)), [1] * 24, 2 * share, 2, 64, dtype
    )
    plan = plan_attention(b.q_lens, b.kv_lens, b.slots, 2 * share, 2, None, CPU)
    height = {1: 1, 4: 2, 8: 2}[share]
    assert set(plan.tiles[height][:, 1].tolist()) <= {24, 16, 8}
    keys = sum(int((tiles[:, 4]).sum()) for tiles in plan.tiles)
    assert keys <= 2 * 200 + 24 * 2  # and not 24 times 200
    compare(b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(None, None, False), (50, 20.0, True)])
def test_agrees_with_the_torch_reference(
    dtype: torch.dtype, window: int | None, softcap: float | None, sinks: bool
) -> None:
    slots = [*tree({"a": 150, "x": 9, "y": 30}, "ax", "ay"), *(s + 200 for s in paged([90, 1, 40], 16))]
    b = batch(slots, [1, 1, 33, 1, 2], 6, 3, 96, dtype)
    b.k.nan_to_num_()
    b.v.nan_to_num_()
    sink = b.sinks if sinks else None
    plan = plan_attention(b.q_lens, b.kv_lens, b.slots, 6, 3, window, CPU)
    torch_ops = TorchOps(CPU, dtype)
    torch_plan = torch_ops.plan_attention(b.q_lens, b.kv_lens, b.slots, 6, 3, window)
    torch.testing.assert_close(
        attention(b.q, b.k, b.v, plan, 0.1, softcap, sink),
        torch_ops.attention(b.q, b.k, b.v, torch_plan, 0.1, softcap, sink),
        atol=TOLERANCE[dtype],
        rtol=TOLERANCE[dtype],
    )


def test_queries_and_caches_may_be_parts_of_larger_tensors() -> None:
    b = batch(paged([90, 40], 1), [1, 20], 4, 2, 64)
    fused = torch.randn(21, 8, 64)
    fused[:, 2:6] = b.q
    both = torch.stack((b.k, b.v), dim=1)
    plan = plan_attention(b.q_lens, b.kv_lens, b.slots, 4, 2, None, CPU)
    out = attention(fused[:, 2:6], both[:, 0], both[:, 1], plan, 0.125)
    torch.testing.assert_close(out.double(), expected(b, 0.125), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("scales", [None, [[0.5], [2.0]], [[0.5, 0.25], [2.0, 0.125]]], ids=["none", "one", "per-head"])
@pytest.mark.parametrize("capability", [80, 90])  # without and with numbers in fp8
@pytest.mark.parametrize(("dim", "softcap"), [(64, None), (80, 5.0)])
def test_a_cache_in_fp8(
    dim: int, softcap: float | None, capability: int, scales: list[list[float]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixrt.ops.triton.attention._capability", lambda device: capability)
    b = batch(paged([300, 60], 16), [1, 20], 4, 2, dim, torch.float16)
    b.k.nan_to_num_()
    b.v.nan_to_num_()
    factors = torch.tensor(scales or [[1.0], [1.0]])
    k8, v8 = ((c / s[:, None]).to(torch.float8_e4m3fn) for c, s in zip((b.k, b.v), factors))
    wide = [c.float() * s[:, None] for c, s in zip((k8, v8), factors)]
    plan = plan_attention(b.q_lens, b.kv_lens, b.slots, 4, 2, None, CPU)
    out = attention(b.q, k8, v8, plan, 0.125, softcap, kv_scales=factors if scales else None)
    reference = Batch(b.q_lens, b.kv_lens, b.slots, b.q, *wide, b.sinks)
    torch.testing.assert_close(out.double(), expected(reference, 0.125, softcap=softcap), atol=4e-3, rtol=4e-3)


def test_plans_of_several_windows_have_the_slots_in_common() -> None:
    b = batch(paged([300, 70], 16), [1, 33], 4, 2, 64)
    wide = plan_attention(b.q_lens, b.kv_lens, b.slots, 4, 2, None, CPU)
    narrow = plan_attention(b.q_lens, b.kv_lens, b.slots, 4, 2, 40, CPU, beside=wide)
    ones = np.ones(2, dtype=np.int32)
    padded = PaddedPlan(2, 300, 4, 2, None, CPU)
    beside = PaddedPlan(2, 300, 4, 2, 40, CPU, beside=padded)
    padded.update(ones, b.kv_lens, b.slots)
    beside.update(ones, b.kv_lens, b.slots)
    last = Batch(ones, b.kv_lens, b.slots, b.q[[0, -1]], b.k, b.v, b.sinks)
    for all_of, plan in ((b, narrow), (last, beside.plan)):
        out = attention(all_of.q, b.k, b.v, plan, 0.125)
        torch.testing.assert_close(out.double(), expected(all_of, 0.125, 40), atol=2e-5, rtol=2e-5)
    assert narrow.slots is wide.slots
    assert beside.plan.slots is padded.plan.slots


def test_a_padded_plan_serves_batch_after_batch_at_the_same_addresses() -> None:
    padded = PaddedPlan(6, 400, 8, 2, None, CPU)
    address = padded.plan.slots.data_ptr()
    for slots, q_lens in [
        (paged([300, 1, 7, 90, 400, 2], 16), [1] * 6),
        (tree({"a": 300, "x": 3, "y": 4, "z": 5}, "ax", "ay", "az"), [1] * 3),
        (paged([5, 0, 70, 0], 16), [1, 0, 1, 0]),
        (paged([0], 16), [0]),
    ]:
        b = batch(slots, q_lens, 8, 2, 64)
        rows = torch.full((6, 8, 64), float("nan"))
        rows[: len(b.q)] = b.q
        padded.update(b.q_lens, b.kv_lens, b.slots)
        out = attention(rows, b.k, b.v, padded.plan, 0.125)
        torch.testing.assert_close(out[: len(b.q)].double(), expected(b, 0.125), atol=2e-5, rtol=2e-5)
    assert padded.plan.slots.data_ptr() == address
    with pytest.raises(ValueError, match="401 keys: this plan holds 6 with one query and 400 keys"):
        padded.update(*(np.array(x, dtype=np.int32) for x in ([1], [401], range(401))))
