"""Owns the search for runs of keys that sequences of a batch share: the part of the radix tree it touches.

Invariant it rests on, which the page pool keeps: a slot holds the key of one token after one prefix. Two sequences with
the same slot at the same index therefore have the same slots everywhere before it, so that one comparison tells
whether they share a prefix of some length, and the length is found by bisection rather than by reading all slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixrt.ops.interface import IntArray


@dataclass(frozen=True, slots=True)
class Run:
    """Keys ``start .. end`` (indices into each sequence), the same slots for all of ``members`` (two or more)."""

    start: int
    end: int
    members: IntArray


def shared_runs(
    starts: IntArray, limits: IntArray, slots: IntArray, least: int, rows: IntArray | None = None
) -> tuple[tuple[Run, ...], IntArray]:
    """The trie of a batch's prefixes, without branches shorter than ``least``; and where each own part begins.

        a  |-------- 0 .. 300 --------|-- 300 .. 500 --|-- own --
        b  |                          |                |-- own --
        c  |                          |-- own -----------

    Sequence ``b`` has its slots from ``slots[starts[b]]`` on and shares none from index ``limits[b]`` on. ``rows``
    are the sequences to look at (all by default). The runs and the own part of a sequence are all its keys, each once.
    """
    cuts = np.zeros(len(starts), dtype=np.int32)
    members = np.arange(len(starts), dtype=np.int32) if rows is None else rows
    order, common = _sorted(members, starts, limits, slots, least)
    runs = []
    # Shortest first: what lies above a branch is cut before it.
    for left, right, depth in sorted(_branches(common), key=lambda branch: branch[2]):
        start = int(cuts[order[left]])  # all below have been cut at the same place
        if depth - start >= least:
            runs.append(Run(start, depth, order[left:right]))
            cuts[order[left:right]] = depth
    return tuple(runs), cuts


def _sorted(
    members: IntArray, starts: IntArray, limits: IntArray, slots: IntArray, least: int
) -> tuple[IntArray, IntArray]:
    """``members`` such that those with a common prefix stand together, and how much each has in common with the next.

    One slot in ``least`` is looked at: any run that long has one of those.
    """
    limits, starts = limits[members], starts[members].astype(np.int64)
    columns = int(limits.max(initial=0)) // least
    if len(members) < 2 or columns == 0:
        return members, np.zeros(max(0, len(members) - 1), dtype=np.int32)
    at = (np.arange(columns) + 1) * least - 1
    inside = at[None, :] < limits[:, None]
    sample = slots[np.where(inside, starts[:, None] + at[None, :], 0)].astype(np.int32)
    sample = np.where(inside, sample, -1 - np.arange(len(members), dtype=np.int32)[:, None])  # absent: like no other
    order = np.ascontiguousarray(sample).view(f"V{4 * columns}").ravel().argsort(kind="stable")
    sample, limits, starts = sample[order], limits[order], starts[order]
    alike = (sample[1:] == sample[:-1]).sum(axis=1)
    low = alike * least  # this many are common; high + 1 are not
    high = np.minimum(np.minimum(limits[1:], limits[:-1]), low + least - 1)
    for _ in range(least.bit_length()):
        middle = (low + high + 1) // 2
        probe = np.maximum(middle - 1, 0)  # where high == low, any slot will do
        one, other = (np.minimum(part + probe, len(slots) - 1) for part in (starts[1:], starts[:-1]))
        same = (slots[one] == slots[other]) | (middle == low)
        low, high = np.where(same, middle, low), np.where(same, high, middle - 1)
    return members[order], low.astype(np.int32)


def _branches(common: IntArray) -> list[tuple[int, int, int]]:
    """``(left, right, depth)``: sequences ``left .. right`` in order have ``depth`` in common, and no neighbour has."""
    found: list[tuple[int, int, int]] = []
    open_at: list[tuple[int, int]] = []  # (depth, left), depths ascending
    for index, depth in enumerate([*common.tolist(), 0]):
        left = index
        while open_at and open_at[-1][0] > depth:
            ended, left = open_at.pop()
            found.append((left, index + 1, ended))
        if depth and (not open_at or open_at[-1][0] < depth):
            open_at.append((depth, left))
    return found
