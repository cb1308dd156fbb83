"""Paged attention in torch: sequences of like lengths are padded together, so that a batch of decodes is a few calls, not one a sequence.

The queries that share a key head are laid side by side as if they were further positions, so that grouped heads
never copy keys:

    q [b, Q, K*G, D] -> [b, K, Q*G, D]      keys, values [b, K, L, D]      mask [b, 1, Q*G, L]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from radixrt.ops.interface import IntArray

_PADDING = 1.25  # a group may do this many times the work of its sequences one by one
_SMALL = 4096  # score elements a head below which padding does not matter
_MAX_SCORES = 1 << 24  # elements of the mask of one group


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences computed in one call. ``rows [b * Q]`` are their flat queries (``None``: all of them, in order)."""

    rows: torch.Tensor | None
    kept: torch.Tensor | None  # which of the b * Q padded queries are real; None: all
    slots: torch.Tensor  # [b * L]
    batch: int
    queries: int  # Q
    keys: int  # L
    mask: torch.Tensor | None  # float [b, 1, Q * G, L], 0 or -inf


@dataclass(slots=True)
class Plan:
    """The groups of one batch, and room for their gathered keys and values, shared by all layers."""

    groups: tuple[Group, ...]
    scratch: tuple[torch.Tensor, torch.Tensor] | None = None

    def gathered(self, cache: torch.Tensor, group: Group, which: int) -> torch.Tensor:
        """``cache [S, K, D]`` at the slots of ``group``, as ``[b, K, L, D]``; overwritten by the next group or layer."""
        if self.scratch is None:
            most = max(g.batch * g.keys for g in self.groups)
            self.scratch = (cache.new_empty((most, *cache.shape[1:])), cache.new_empty((most, *cache.shape[1:])))
        out = self.scratch[which][: group.batch * group.keys]
        torch.index_select(_movable(cache), 0, group.slots, out=_movable(out))
        return out.view(group.batch, group.keys, *cache.shape[1:]).transpose(1, 2)


def _movable(cache: torch.Tensor) -> torch.Tensor:
    """A float8 cache as its bytes, which torch can gather; another as it is."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


def plan_attention(
    q_lens: IntArray,
    kv_lens: IntArray,
    kv_slots: IntArray,
    heads: int,
    kv_heads: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    """See ``Ops.plan_attention``."""
    ends = np.cumsum(kv_lens)
    rows_before = np.cumsum(q_lens) - q_lens
    starts = ends - kv_lens
    if window is not None:  # keys that no query of the sequence sees are not read
        skipped = np.maximum(0, kv_lens - q_lens - window + 1).astype(np.int32)
        starts, kv_lens = starts + skipped, kv_lens - skipped
    q_lens, kv_lens, starts, rows_before = _bounded(q_lens, kv_lens, starts, rows_before, heads // kv_heads)
    groups = [
        _group(
            members,
            q_lens,
            kv_lens,
            kv_slots,
            starts,
            rows_before,
            heads // kv_heads,
            window,
            dtype,
            device,
            len(q_lens),
        )
        for members in _partition(q_lens, kv_lens, heads // kv_heads)
    ]
    return Plan(tuple(groups))


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: Plan,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``Ops.attention``."""
    heads, dim = q.shape[1], q.shape[2]
    kv_heads = k_cache.shape[1]
    share = heads // kv_heads
    out = None
    for group in plan.groups:
        b, n = group.batch, group.queries
        rows = q if group.rows is None else q.index_select(0, group.rows)
        part = rows.view(b, n, kv_heads, share, dim).transpose(1, 2).reshape(b, kv_heads, n * share, dim)
        k, v = plan.gathered(k_cache, group, 0), plan.gathered(v_cache, group, 1)
        if k.dtype != q.dtype:
            k, v = k.to(q.dtype), v.to(q.dtype)
        if softcap is None and sinks is None:
            result = F.scaled_dot_product_attention(part, k, v, attn_mask=group.mask, scale=scale)
        else:
            one_more = None if sinks is None else sinks.float().view(kv_heads, 1, share).expand(-1, n, -1)
            result = _capped(part, k, v, group.mask, scale, softcap, one_more)
        result = result.view(b, kv_heads, n, share, dim).transpose(1, 2).reshape(b * n, heads, dim)
        if group.rows is None:
            return result
        if out is None:
            out = torch.empty_like(q)
        if group.kept is None:
            out.index_copy_(0, group.rows, result)
        else:
            out.index_copy_(0, group.rows.index_select(0, group.kept), result.index_select(0, group.kept))
    return q if out is None else out


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with capped scores and ``sinks [K, n, G]``, as many key heads at once as memory is meant for."""
    batch, kv_heads, rows, _ = q.shape
    step = max(1, _MAX_SCORES // (batch * rows * k.shape[2]))
    out = torch.empty_like(q)
    for first in range(0, kv_heads, step):
        some = slice(first, first + step)
        scores = (q[:, some] @ k[:, some].transpose(2, 3)).float() * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores + mask
        if sinks is not None:
            column = sinks[some].reshape(1, -1, rows, 1).expand(batch, -1, -1, -1)
            scores = torch.cat((scores, column), dim=-1)
        shares = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
        out[:, some] = shares.to(v.dtype) @ v[:, some]
    return out


def _bounded(
    q_lens: IntArray, kv_lens: IntArray, starts: IntArray, rows_before: IntArray, share: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cut sequences whose mask alone would be too large into runs of queries.

    queries  |--- first ---|--- second ---|--- last ---|
    keys     |--------- of the first ----|
             |--------- of the second ------------|    ...
    """
    if (q_lens.astype(np.int64) * kv_lens * share).max() <= _MAX_SCORES:
        return q_lens, kv_lens, starts, rows_before
    rows = []
    for q, kv, start, row in zip(q_lens.tolist(), kv_lens.tolist(), starts.tolist(), rows_before.tolist()):
        step = max(1, _MAX_SCORES // (kv * share))
        rows += [(min(step, q - at), kv - q + min(at + step, q), start, row + at) for at in range(0, q, step)]
    columns = np.array(rows, dtype=np.int32).T
    return columns[0], columns[1], columns[2], columns[3]


def _partition(q_lens: IntArray, kv_lens: IntArray, share: int) -> list[IntArray]:
    """Split the sequences into groups whose padding costs little."""
    order: IntArray = np.lexsort((kv_lens, q_lens)).astype(np.int32)
    groups: list[IntArray] = []
    first, work = 0, 0
    for at, index in enumerate(order):
        q, kv = int(q_lens[index]), int(kv_lens[index])
        count = at - first
        most = max(kv, int(kv_lens[order[first:at]].max()) if count else 0)
        padded = (count + 1) * q * most  # q_lens ascend
        single = q_lens[order[first]] == 1 and q > 1  # decodes and longer chunks stay apart
        if count and (single or padded > _PADDING * (work + q * kv) + _SMALL or padded * share > _MAX_SCORES):
            groups.append(order[first:at])
            first, work = at, 0
        work += q * kv
    groups.append(order[first:])
    return groups


def _group(
    members: IntArray,
    q_lens: IntArray,
    kv_lens: IntArray,
    kv_slots: IntArray,
    starts: IntArray,
    rows_before: IntArray,
    share: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    sequences: int,
) -> Group:
    q, kv = q_lens[members], kv_lens[members]
    n, length = int(q.max()), int(kv.max())
    key = np.arange(length)
    real_key = key[None, :] < kv[:, None]
    slots = kv_slots[np.where(real_key, starts[members][:, None] + key[None, :], starts[members][:, None])]
    query = np.arange(n)
    real_query = query[None, :] < q[:, None]
    rows = np.where(real_query, rows_before[members][:, None] + query[None, :], rows_before[members][:, None])
    position = (kv - q)[:, None] + query[None, :]  # [b, n], as an index into the sequence's keys
    mask = None
    if n > 1 or not real_key.all():
        visible = key[None, None, :] <= np.minimum(position, (kv - 1)[:, None])[:, :, None]
        if window is not None:
            visible &= key[None, None, :] > np.minimum(position, (kv - 1)[:, None])[:, :, None] - window
        bias = torch.zeros(visible.shape, dtype=dtype)
        bias.masked_fill_(torch.from_numpy(~visible), float("-inf"))
        mask = bias.repeat_interleave(share, dim=1)[:, None].to(device)
    everything = len(members) == sequences and real_query.all() and bool(np.all(np.diff(rows.ravel()) == 1))
    return Group(
        rows=None if everything else torch.from_numpy(rows.ravel().astype(np.int64)).to(device),
        kept=None if real_query.all() else torch.from_numpy(np.flatnonzero(real_query)).to(device),
        slots=torch.from_numpy(slots.ravel().astype(np.int64)).to(device),
        batch=len(members),
        queries=n,
        keys=length,
        mask=mask,
    )
