"""Common prefixes against a trie of dictionaries; and tiles: every key a query sees is in exactly one of its tiles."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.ops.interface import IntArray
from radixrt.ops.triton.plan import FIELDS, HEIGHTS, Layout, PaddedPlan, Sizes, heights, lay_out
from radixrt.ops.triton.shared import shared_runs

CPU = torch.device("cpu")


@st.composite
def forests(draw: st.DrawFn, sizes: st.SearchStrategy[int], most: int = 8) -> list[IntArray]:
    """Slots of sequences, each of which leaves another one, or the root, somewhere."""
    sequences: list[list[int]] = []
    free = 0
    for _ in range(draw(st.integers(1, most))):
        above = draw(st.sampled_from(sequences)) if sequences and draw(st.booleans()) else []
        kept = draw(st.integers(0, len(above)))
        own = draw(sizes)
        sequences.append([*above[:kept], *range(free, free + own)])
        free += own
    order = np.random.default_rng(draw(st.integers(0, 9))).permutation(max(free, 1)).astype(np.int32)
    return [order[np.array(s, dtype=np.int64)] for s in draw(st.permutations(sequences))]


def flat(slots: list[IntArray]) -> tuple[IntArray, IntArray, IntArray]:
    """Where each begins, how long each is, and all."""
    lens = np.array([len(s) for s in slots], dtype=np.int32)
    return (np.cumsum(lens) - lens).astype(np.int32), lens, np.concatenate(slots).astype(np.int32)


@settings(max_examples=150, deadline=None)
@given(forests(st.integers(0, 12)), st.integers(1, 6))
def test_runs_are_the_branches_of_the_trie(slots: list[IntArray], least: int) -> None:
    starts, limits, everything = flat(slots)
    runs, cuts = shared_runs(starts, limits, everything, least)
    covered = [Counter(range(cuts[i], len(s))) for i, s in enumerate(slots)]
    for run in runs:
        assert run.end - run.start >= least
        assert len(run.members) >= 2
        assert len({tuple(slots[i][: run.end]) for i in run.members}) == 1
        for i in run.members:
            covered[i].update(range(run.start, run.end))
    assert covered == [Counter(range(len(s))) for s in slots]
    # A node that all of its sequences could share is never left to them.
    computed = sum(run.end - run.start for run in runs) + sum(len(s) - int(c) for s, c in zip(slots, cuts))
    assert computed <= sum(cost for cost in _trie_costs(slots, least))


def _trie_costs(slots: list[IntArray], least: int, depth: int = 0) -> list[int]:
    """Keys to compute below a node, where branches are shared if they are ``least`` long or one sequence's own."""
    costs, ended = [], [s for s in slots if len(s) == depth]
    for first in {int(s[depth]) for s in slots if len(s) > depth}:
        below = [s for s in slots if len(s) > depth and s[depth] == first]
        end = depth
        while all(len(s) > end for s in below) and len({int(s[end]) for s in below}) == 1:
            end += 1
        if len(below) == 1:
            costs.append(end - depth)
        else:
            costs += [(end - depth) * (1 if end - depth >= least else len(below)), *_trie_costs(below, least, end)]
    return costs if ended or costs else [0]


@pytest.mark.parametrize("least", [1, 7, 128])
def test_a_prefix_is_found_to_the_key(least: int) -> None:
    for common in (least - 1, least, least + 1, 2 * least, 2 * least + 1, 3 * least - 1):
        a = np.arange(500, dtype=np.int32)
        b = np.concatenate((a[:common], np.arange(500, 800, dtype=np.int32)))
        c = a[:common]  # all of it
        starts, limits, everything = flat([b, a, c])
        runs, cuts = shared_runs(starts, limits, everything, least)
        assert [(run.start, run.end, sorted(run.members)) for run in runs] == (
            [(0, common, [0, 1, 2])] if common >= least else []
        )
        assert cuts.tolist() == [common if common >= least else 0] * 3


def test_what_lies_behind_the_limit_is_not_shared() -> None:
    a = np.arange(300, dtype=np.int32)
    starts, lens, everything = flat([a, a, a])
    runs, cuts = shared_runs(starts, lens - np.array([1, 1, 70], dtype=np.int32), everything, 20)
    assert [(run.start, run.end, len(run.members)) for run in runs] == [(0, 230, 3), (230, 299, 2)]
    assert cuts.tolist() == [299, 299, 230]


def seen(layout: Layout, slots: IntArray, window: int | None) -> tuple[list[Counter[int]], list[list[int]]]:
    """What the kernels would read: of each query the slots it sees, and the partials it leaves (-1: its output)."""
    read: list[Counter[int]] = [Counter() for _ in layout.positions]
    left: list[list[int]] = [[] for _ in layout.positions]
    for tiles in layout.tiles:
        for first, count, at, start, length, where, low, high in tiles.tolist():
            queries = layout.listed[first : first + count]
            positions = layout.positions[queries]
            assert (positions.min(), positions.max()) == (low, high)
            for i, (query, position) in enumerate(zip(queries.tolist(), positions.tolist())):
                begin = 0 if window is None else max(0, position - window + 1 - start)
                read[query].update(slots[at + begin : at + min(length, position + 1 - start)].tolist())
                left[query].append(where + i if where >= 0 else -1)
    return read, left


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[IntArray], list[int]]:
    """Sequences, and how many of the last keys have queries; no query's key is another sequence's too."""
    slots = draw(forests(st.sampled_from([0, 1, 5, 40, 130, 300]), 6))
    top = 1 + max((int(s.max()) for s in slots if len(s)), default=0)
    q_lens, out = [], []
    for s in slots:
        queries = draw(st.sampled_from([0, 1, 1, 1, 3, 20, 70]))
        out.append(np.concatenate((s, np.arange(top, top + queries, dtype=np.int32))))
        q_lens.append(queries)
        top += queries
    return out, q_lens


@settings(max_examples=150, deadline=None)
@given(
    batches(),
    st.sampled_from([1, 3, 4, 8, 24]),
    st.sampled_from([None, 1, 50, 200]),
    st.sampled_from([1, 4, 132]),
    st.sampled_from([None, 1, 32, 128]),
)
def test_a_query_reads_each_key_it_sees_once(
    batch: tuple[list[IntArray], list[int]], share: int, window: int | None, units: int, least: int | None
) -> None:
    slots, q_lens = batch
    _, kv_lens, everything = flat(slots)
    layout = lay_out(np.array(q_lens, dtype=np.int32), kv_lens, everything, share, 1, window, units, least)
    read, left = seen(layout, everything, window)
    wanted = []
    for s, queries in zip(slots, q_lens):
        for position in range(len(s) - queries, len(s)):
            begin = 0 if window is None else max(0, position - window + 1)
            wanted.append(Counter(s[begin : position + 1].tolist()))
    assert read == wanted
    # A query either has its output from one tile, or all of its partials are merged.
    merged: dict[int, list[int]] = {}
    for query, first, count, _ in layout.merges.tolist():
        merged[query] = layout.parts[first : first + count].tolist()
    assert [left[q] if left[q] != [-1] else [] for q in range(len(left))] == [
        sorted(merged.get(q, []), key=left[q].index) for q in range(len(left))
    ]
    assert sorted(p for parts in merged.values() for p in parts) == list(range(len(layout.parts)))
    for tiles, height in zip(layout.tiles, heights(share)):
        assert tiles.shape[1] == FIELDS
        assert (tiles[:, 1] * share <= height).all()
        assert (np.diff(tiles[:, 4]) <= 0).all()  # the longest start first


@settings(max_examples=60, deadline=None)
@given(forests(st.sampled_from([0, 1, 5, 130, 300]), 12), st.sampled_from([1, 4, 8]), st.data())
def test_what_a_padded_plan_may_get_has_room(slots: list[IntArray], share: int, data: st.DataObject) -> None:
    top = 1 + max((int(s.max()) for s in slots if len(s)), default=0)
    slots = [np.append(s, np.int32(top + i)) for i, s in enumerate(slots)]
    q_lens = np.array(data.draw(st.lists(st.sampled_from([0, 1, 1]), min_size=len(slots), max_size=len(slots))))
    longest = max(len(s) for s in slots)
    for least in (None, 128):
        padded = PaddedPlan(len(slots), longest, 2 * share, 2, None, CPU, least)
        _, kv_lens, everything = flat(slots)
        padded.update(q_lens.astype(np.int32), kv_lens, everything)
        total = sum(int((tiles[:, 1] > 0).sum()) for tiles in padded.plan.tiles)
        assert total >= q_lens.sum()


def test_a_padded_plan_shares_less_where_sharing_needs_too_much_room() -> None:
    """Each sequence leaves the trunk 130 keys behind the one before: 23 branches with 24, 23, ... sequences below."""
    trunk = np.arange(24 * 130, dtype=np.int32)
    slots = [np.append(trunk[: 130 * (i + 1)], np.int32(len(trunk) + i)) for i in range(24)]
    _, kv_lens, everything = flat(slots)
    ones = np.ones(24, dtype=np.int32)
    padded = PaddedPlan(24, len(trunk) + 1, 8, 2, None, CPU)
    full = lay_out(ones, kv_lens, everything, 4, 2, None, padded.units)
    assert not full.sizes().fits(padded.room)
    padded.update(ones, kv_lens, everything)
    keys = sum(int(tiles[:, 4].sum()) for tiles in padded.plan.tiles)
    assert full.tiles[0][:, 4].sum() < keys < kv_lens.sum() / 2


def test_a_long_sequence_among_short_ones_is_split_and_they_are_not() -> None:
    lens = np.array([100] * 60 + [30000], dtype=np.int32)
    layout = lay_out(np.ones(61, dtype=np.int32), lens, np.arange(lens.sum(), dtype=np.int32), 4, 8, None, 132)
    assert len(layout.tiles[0]) - 60 >= 90
    assert layout.tiles[0][:, 4].max() <= 320
    assert len(layout.merges) == 1


def test_enough_tiles_for_the_device_and_not_many_more() -> None:
    for sequences, keys in ((1, 4096), (8, 4096), (64, 4096), (256, 1024), (1, 100_000)):
        lens = np.full(sequences, keys, dtype=np.int32)
        slots = np.arange(sequences * keys, dtype=np.int32)
        layout = lay_out(np.ones(sequences, dtype=np.int32), lens, slots, 4, 8, None, 132)
        programs = 8 * len(layout.tiles[0])
        assert programs >= min(132 * 8, sequences * keys // 256 * 8)
        assert len(layout.tiles[0]) <= sequences + 8 * 3 * 132 // 8


def test_room() -> None:
    room = Sizes((4, 0, 0), 4, 4, 8, 4)
    assert Sizes((4, 0, 0), 4, 4, 8, 4).fits(room)
    assert not Sizes((4, 1, 0), 4, 4, 8, 4).fits(room)
    assert not Sizes((4, 0, 0), 4, 5, 8, 4).fits(room)
    assert heights(1) == HEIGHTS
    assert heights(48) == (64, 64, 128)
