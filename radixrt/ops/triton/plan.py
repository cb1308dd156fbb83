"""Owns the division of one batch's attention into tiles, and its one copy to the device.

A **tile** is a few queries over a range of keys of one sequence. Decodes, prefills and prefixes shared by several
sequences are all tiles, of different heights (rows = queries x heads that share a key head), each height one launch:

    16 rows   the queries of one decoding sequence, over a part of its keys
    64, 128   a chunk of a prefill over its keys; or the queries of all sequences below a radix node over its keys

A query whose keys lie in one tile gets its output from it. Otherwise each of its tiles leaves a *partial* (output and
log-sum-exp), and its partials are merged. Every key a query may see is in exactly one of its tiles.

Everything is int32 in one buffer. The first part of it has a fixed size for a given ``Sizes``, so that a CUDA graph
may hold on to its addresses: launches are as large as the sizes, and a tile without queries ends at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from radixrt.ops.interface import IntArray
from radixrt.ops.triton.shared import Run, shared_runs

HEIGHTS = (16, 64, 128)  # rows of a tile
FIELDS = 8  # integers that describe a tile, below
LEAST_SHARED = 128  # keys from which a common prefix is computed for its sequences together
_LEAST_SPLIT = (256, 256, 512)  # keys of a part, by height: below, the merge costs more than the device gains
_RESIDENT = (3, 1, 1)  # programs that a multiprocessor runs at a time, by height
_WAVES = (8, 3, 3)  # programs each of those places should get, one after another, to be done at about the same time
_GRAIN = 64  # parts of a sequence are multiples of this many keys


class Sizes(NamedTuple):
    """How many of each there is, or there is room for."""

    tiles: tuple[int, ...]  # by height; a height without tiles is not launched
    queries: int
    listed: int
    partials: int
    merges: int

    def fits(self, room: Sizes) -> bool:
        """Whether this much can be held by ``room``."""
        pairs = zip((*self.tiles, *self[1:]), (*room.tiles, *room[1:]))
        return all(need <= has for need, has in pairs)

    def sections(self) -> list[int]:
        """Integers of the buffer's sections: tiles by height, positions, listed, parts, merges."""
        return [*(n * FIELDS for n in self.tiles), self.queries, self.listed, self.partials, self.merges * 4]


@dataclass(frozen=True, slots=True)
class Layout:
    """A batch's tiles, on the host.

    ``tiles[height] [n, 8]``: first of its queries in ``listed``, their number, first of its keys in the slots, that
    key's position, number of keys, first partial (-1: write the output), least and greatest position of its queries.
    """

    tiles: tuple[IntArray, ...]
    positions: IntArray  # [T] of each query in its sequence
    listed: IntArray  # queries of tiles; the first T are all of them in order
    parts: IntArray  # [P] partials, by query
    merges: IntArray  # [M, 4]: query, its first in parts, how many, 0

    def sizes(self) -> Sizes:
        """What it takes to hold this."""
        return Sizes(
            tuple(map(len, self.tiles)), len(self.positions), len(self.listed), len(self.parts), len(self.merges)
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch's tiles on the device, as ``attention`` takes them. All tensors are parts of one int32 buffer."""

    tiles: tuple[torch.Tensor, ...]  # by height
    heights: tuple[int, ...]
    positions: torch.Tensor
    listed: torch.Tensor
    parts: torch.Tensor
    merges: torch.Tensor
    slots: torch.Tensor
    window: int | None
    share: int  # query heads a key head


class _Groups(NamedTuple):
    """Queries that stay together, and the keys they look at: columns of equal length."""

    height: IntArray  # index into HEIGHTS
    first: IntArray  # in listed
    queries: IntArray
    slot: IntArray  # index of their sequence's first key in the slots
    start: IntArray  # keys start .. end of that sequence
    end: IntArray
    low: IntArray  # least and greatest position of the queries
    high: IntArray


def heights(share: int) -> tuple[int, ...]:
    """Rows of the tiles where ``share`` query heads have one key head: one query has to fit in the lowest."""
    lowest = max(HEIGHTS[0], 1 << (share - 1).bit_length())
    return tuple(max(lowest, height) for height in HEIGHTS)


def units(device: torch.device) -> int:
    """Multiprocessors of the device; the interpreter passes for a small one."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


def _wanted(height: int, units: int, kv_heads: int) -> int:
    """How many tiles of a height, each a program for every key head, keep the device busy to the end."""
    return max(1, _WAVES[height] * _RESIDENT[height] * units // kv_heads)


def lay_out(
    q_lens: IntArray,
    kv_lens: IntArray,
    kv_slots: IntArray,
    share: int,
    kv_heads: int,
    window: int | None,
    units: int,
    least_shared: int | None = LEAST_SHARED,
) -> Layout:
    """Divide a batch (see ``Ops.plan_attention``); a ``least_shared`` of ``None`` looks for no common prefixes."""
    q_lens, kv_lens = q_lens.astype(np.int32), kv_lens.astype(np.int32)
    slot = _before(kv_lens)
    first = _before(q_lens)
    total = int(q_lens.sum())
    sequence = np.repeat(np.arange(len(q_lens), dtype=np.int32), q_lens)
    positions = np.arange(total, dtype=np.int32) - first[sequence] + (kv_lens - q_lens)[sequence]
    rows = np.array(heights(share), dtype=np.int32)
    height = np.searchsorted(rows[:-1], q_lens * share).astype(np.int32)

    runs: tuple[Run, ...] = ()
    cuts = np.zeros(len(q_lens), dtype=np.int32)
    few = np.flatnonzero((height == 0) & (q_lens > 0)).astype(np.int32)
    if least_shared is not None and len(few) > 1:
        runs, cuts = shared_runs(slot, kv_lens - q_lens, kv_slots, least_shared, few)

    # Each sequence's own part, in chunks of queries that fit a tile.
    step = rows[height] // share
    chunks = _ceil(q_lens, step)
    of = np.repeat(np.arange(len(q_lens), dtype=np.int32), chunks)
    offset = (np.arange(len(of), dtype=np.int32) - _before(chunks)[of]) * step[of]
    count = np.minimum(step[of], q_lens[of] - offset)
    low = (kv_lens - q_lens)[of] + offset
    own = _Groups(height[of], first[of] + offset, count, slot[of], cuts[of], low + count, low, low + count - 1)
    listed = [np.arange(total, dtype=np.int32)]
    groups, listed = _with_runs(own, runs, rows // share, q_lens, first, slot, positions, listed)
    start, end = groups.start, groups.end
    if window is not None:
        start = np.minimum(np.maximum(start, groups.low - window + 1), end)
    lone = np.concatenate((cuts[of] == 0, np.zeros(len(groups.first) - len(of), dtype=bool)))  # in no run
    tiles = _split(groups._replace(start=start), lone, units, kv_heads)
    return _layout(tiles, lone, np.concatenate(listed), positions, len(rows))


def _with_runs(
    own: _Groups,
    runs: tuple[Run, ...],
    steps: IntArray,
    q_lens: IntArray,
    first: IntArray,
    slot: IntArray,
    positions: IntArray,
    listed: list[IntArray],
) -> tuple[_Groups, list[IntArray]]:
    """Add to ``own`` the groups of ``runs``: their queries are listed behind ``listed``."""
    columns: list[tuple[int, ...]] = []
    at = len(listed[0])
    for run in runs:
        members = np.sort(run.members)
        lens = q_lens[members]
        queries = np.repeat(first[members] - _before(lens), lens) + np.arange(int(lens.sum()), dtype=np.int32)
        listed.append(queries)
        height = int(np.searchsorted(steps[:-1], len(queries)))
        step = int(steps[height])
        for begin in range(0, len(queries), step):
            part = positions[queries[begin : begin + step]]
            place = (int(slot[members[0]]), run.start, run.end, int(part.min()), int(part.max()))
            columns.append((height, at + begin, len(part), *place))
        at += len(queries)
    if not columns:
        return own, listed
    more = np.array(columns, dtype=np.int32).T
    return _Groups(*(np.concatenate((a, b)) for a, b in zip(own, more))), listed


class _Tiles(NamedTuple):
    """Parts of groups: ``group`` and keys ``start .. end``."""

    groups: _Groups
    parts: IntArray  # of each group
    group: IntArray
    start: IntArray
    end: IntArray


def _split(groups: _Groups, lone: npt.NDArray[np.bool_], units: int, kv_heads: int) -> _Tiles:
    """Cut the keys of groups so that there are as many tiles of each height as are wanted.

    A group without keys is left out, unless it is all there is of its queries: then it writes zeros.
    """
    keys = groups.end - groups.start
    parts = np.ones(len(keys), dtype=np.int32)
    for height, least in enumerate(_LEAST_SPLIT):
        mine = groups.height == height
        if mine.any():
            size = max(least, _ceil(int(keys[mine].sum(dtype=np.int64)), _wanted(height, units, kv_heads)))
            # A quarter more than a part is no part of its own.
            parts[mine] = np.maximum(1, _ceil(4 * keys[mine].astype(np.int64) - size, 4 * size))
    size = _ceil(_ceil(keys, parts), _GRAIN) * _GRAIN
    parts = np.maximum(lone, _ceil(keys, np.maximum(size, 1)))
    group = np.repeat(np.arange(len(keys), dtype=np.int32), parts)
    start = groups.start[group] + (np.arange(len(group), dtype=np.int32) - _before(parts)[group]) * size[group]
    return _Tiles(groups, parts, group, start, np.minimum(start + size[group], groups.end[group]))


def _layout(tiles: _Tiles, lone: npt.NDArray[np.bool_], listed: IntArray, positions: IntArray, heights: int) -> Layout:
    groups, group = tiles.groups, tiles.group
    partial = ~(lone & (tiles.parts == 1))[group]
    count = groups.queries[group]
    needed = np.where(partial, count, 0)
    where = np.where(partial, _before(needed), -1)
    columns = (groups.first[group], count, groups.slot[group] + tiles.start, tiles.start, tiles.end - tiles.start)
    fields = np.stack((*columns, where, groups.low[group], groups.high[group]), axis=1).astype(np.int32)
    # Which query each partial is of.
    of = np.repeat(np.arange(len(group), dtype=np.int32), needed)
    queries = listed[groups.first[group][of] + np.arange(len(of), dtype=np.int32) - where[of]]
    parts = np.argsort(queries, kind="stable").astype(np.int32)
    many = np.bincount(queries, minlength=len(positions)).astype(np.int32)
    merged = np.flatnonzero(many).astype(np.int32)
    merges = np.stack((merged, _before(many)[merged], many[merged], np.zeros_like(merged)), axis=1).astype(np.int32)
    longest = np.argsort(-fields[:, 4], kind="stable")  # they start first
    ordered, height = fields[longest], groups.height[group][longest]
    return Layout(tuple(ordered[height == h] for h in range(heights)), positions, listed, parts, merges)


def _ceil(number: Any, by: Any) -> Any:
    """``number / by``, rounded up."""
    return -(-number // by)


def _before(lengths: IntArray) -> IntArray:
    """Where each part of a ragged array begins."""
    return (np.cumsum(lengths) - lengths).astype(np.int32)


def upload(layout: Layout, kv_slots: IntArray | None, room: Sizes, buffer: torch.Tensor) -> None:
    """Write a batch to ``buffer`` (int32, as large as ``room`` and the slots need) in one copy."""
    begins, header = _sections(room)
    length = header + (0 if kv_slots is None else len(kv_slots))
    cuda = buffer.device.type == "cuda"
    # The allocator of pinned memory gives this room to nobody before the copy has run.
    staged = torch.empty(length, dtype=torch.int32, pin_memory=True) if cuda else buffer[:length]
    host = staged.numpy()
    host[:header] = 0
    if kv_slots is not None:
        host[header:] = kv_slots
    parts = (*layout.tiles, layout.positions, layout.listed, layout.parts, layout.merges)
    for begin, part in zip(begins, parts):
        host[begin : begin + part.size] = part.reshape(-1)
    if cuda:
        buffer[:length].copy_(staged, non_blocking=True)


def view(room: Sizes, buffer: torch.Tensor, slots: torch.Tensor | None, window: int | None, share: int) -> Plan:
    """The plan that lies in ``buffer``, with its slots behind it if they are nowhere else."""
    begins, header = _sections(room)
    parts = [buffer[begin : begin + size] for begin, size in zip(begins, room.sections())]
    count = len(room.tiles)
    tiles = tuple(part.view(-1, FIELDS) for part in parts[:count])
    positions, listed, partials, merges = parts[count:]
    slots = buffer[header:] if slots is None else slots
    return Plan(tiles, heights(share), positions, listed, partials, merges.view(-1, 4), slots, window, share)


def _sections(room: Sizes) -> tuple[list[int], int]:
    """Where the buffer's sections begin (at multiples of 16 bytes), and where the slots do."""
    ends = np.cumsum([_ceil(size, 4) * 4 for size in room.sections()]).tolist()
    return [0, *ends[:-1]], ends[-1]


def plan_attention(
    q_lens: IntArray,
    kv_lens: IntArray,
    kv_slots: IntArray,
    heads: int,
    kv_heads: int,
    window: int | None,
    device: torch.device,
    least_shared: int | None = LEAST_SHARED,
    beside: Plan | None = None,
) -> Plan:
    """See ``Ops.plan_attention``; prefixes common to ``least_shared`` keys are read once for their sequences together.

    ``beside`` is a plan of the same batch for another window: the slots are not copied again.
    """
    share = heads // kv_heads
    layout = lay_out(q_lens, kv_lens, kv_slots, share, kv_heads, window, units(device), least_shared)
    room = layout.sizes()
    size = _sections(room)[1] + (0 if beside else len(kv_slots))
    buffer = torch.empty(size, dtype=torch.int32, device=device)
    upload(layout, None if beside else kv_slots, room, buffer)
    return view(room, buffer, beside.slots if beside else None, window, share)


class PaddedPlan:
    """A plan at fixed addresses for decodes of up to ``batch`` sequences with ``max_kv`` keys each, for CUDA graphs.

    ``plan`` is captured once. Before each replay ``update`` writes a batch to it, in one copy; a batch may have fewer
    sequences, and sequences without queries: nothing is computed or written for those. One that is made ``beside``
    another, for a different window, is updated after it, with the same batches, and copies no slots.
    """

    def __init__(
        self,
        batch: int,
        max_kv: int,
        heads: int,
        kv_heads: int,
        window: int | None,
        device: torch.device,
        least_shared: int | None = LEAST_SHARED,
        beside: PaddedPlan | None = None,
    ) -> None:
        self.batch = batch
        self.max_kv = max_kv
        self.kv_heads = kv_heads
        self.least_shared = least_shared
        self.units = units(device)
        share = heads // kv_heads
        # Parts are no smaller than what the waves need, so that there are no more than these and one a sequence.
        parts = [_wanted(height, self.units, kv_heads) + 2 * batch for height in range(len(HEIGHTS))]
        tiles = (parts[0], parts[1], parts[2]) if least_shared is not None else (parts[0], 0, 0)
        partials = parts[0] + (16 * batch if least_shared is not None else 0)
        listed = batch * (9 if least_shared is not None else 1)
        self.room = Sizes(tiles, batch, listed, partials, batch)
        self.beside = beside
        size = _sections(self.room)[1] + (0 if beside else batch * max_kv)
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self.plan: Plan = view(self.room, self.buffer, beside.plan.slots if beside else None, window, share)

    def update(self, q_lens: IntArray, kv_lens: IntArray, kv_slots: IntArray) -> None:
        """Make ``plan`` the plan of this batch; every sequence has one query or none."""
        if len(q_lens) > self.batch or (q_lens > 1).any() or (kv_lens > self.max_kv).any():
            raise ValueError(
                f"{len(q_lens)} sequences with up to {q_lens.max()} queries and {kv_lens.max()} keys: this plan holds"
                f" {self.batch} with one query and {self.max_kv} keys"
            )
        least = self.least_shared
        while True:
            share, window = self.plan.share, self.plan.window
            layout = lay_out(q_lens, kv_lens, kv_slots, share, self.kv_heads, window, self.units, least)
            if layout.sizes().fits(self.room):
                break
            # Less sharing needs fewer tiles; without any there always is room.
            least = None if least is None or least > self.max_kv else 2 * least
        upload(layout, None if self.beside else kv_slots, self.room, self.buffer)
