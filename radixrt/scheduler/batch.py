"""Batch is one step's work as plain arrays: whoever runs the model (one process or many) needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from radixrt.cache.page_pool import IntArray
from radixrt.scheduler.sequence import Sequence

_NO_SLOTS: IntArray = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One flattened forward over ``T`` tokens of ``B`` sequences.

    Sequence ``b`` computes its positions ``kv_lens[b] - q_lens[b] .. kv_lens[b]``; the KV of all its ``kv_lens[b]``
    tokens lies in its part of ``kv_slots``. KV is written before it is read, layer by layer, so a
    sequence may read slots that another one of the same batch writes.

        token_ids, positions, write_slots   int32 [T]
        q_lens, kv_lens                     int32 [B]
        kv_slots                            int32 [sum(kv_lens)]
        sources                             int32 [T]: the sampled sequence of the step before whose token it is, in place of
                                            ``token_ids``; -1: the token is known. ``None``: all are
    """

    token_ids: IntArray
    positions: IntArray
    write_slots: IntArray
    q_lens: IntArray
    kv_lens: IntArray
    kv_slots: IntArray
    sources: IntArray | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A scheduled step: what is computed, and which sequences have all their tokens afterwards and are sampled.

    ``starts[i]`` and ``ends[i]`` are how far ``sequences[i]`` is computed before and after the step, without its drafts, which
    ``forward`` computes too. ``forward`` is ``None`` when every prompt was found whole in the cache: then there is only sampling to do.
    """

    sequences: tuple[Sequence, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    forward: ForwardBatch | None
    sampled: tuple[Sequence, ...]
    sample_slots: IntArray  # int32 [R]: for each sampled sequence the slots of its last token and of each of its drafts

    @property
    def tokens(self) -> int:
        return 0 if self.forward is None else len(self.forward.token_ids)

    def sampling(self, rows: Iterable[int]) -> Batch:
        """The same step with some of its sampled sequences, where none has drafts."""
        kept = list(rows)
        return replace(self, sampled=tuple(self.sampled[row] for row in kept), sample_slots=self.sample_slots[kept])


def flatten(work: Seq[tuple[Sequence, int]]) -> Batch:
    """The step that computes each sequence up to a position, and its drafts."""
    forward = [(s, end + s.drafts) for s, end in work if end > s.computed]
    sampled = tuple(s for s, end in work if end == s.end)
    flat = None
    if forward:
        sources = None
        if any(s.source >= 0 for s, _ in forward):  # what is pending is computed alone
            sources = np.concatenate([np.full(end - s.computed, s.source, dtype=np.int32) for s, end in forward])
        flat = ForwardBatch(
            token_ids=np.concatenate([s.tokens[s.computed : end] for s, end in forward]),
            positions=np.concatenate([np.arange(s.computed, end, dtype=np.int32) for s, end in forward]),
            write_slots=np.concatenate([s.slots[s.computed : end] for s, end in forward]),
            q_lens=np.array([end - s.computed for s, end in forward], dtype=np.int32),
            kv_lens=np.array([end for _, end in forward], dtype=np.int32),
            kv_slots=np.concatenate([s.slots[:end] for s, end in forward]),
            sources=sources,
        )
    return Batch(
        sequences=tuple(s for s, _ in work),
        starts=tuple(s.computed for s, _ in work),
        ends=tuple(end for _, end in work),
        forward=flat,
        sampled=sampled,
        sample_slots=np.concatenate([_NO_SLOTS, *(s.slots[s.end - 1 : s.end + s.drafts] for s in sampled)]),
    )
