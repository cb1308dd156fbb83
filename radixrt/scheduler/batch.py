"""Batch is one step's work as plain arrays: whoever runs the model (one process or many) needs nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from radixrt.cache.page_pool import IntArray
from radixrt.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One flattened forward over ``T`` tokens of ``B`` sequences.

    Sequence ``b`` computes its positions ``kv_lens[b] - q_lens[b] .. kv_lens[b]``; the KV of all its ``kv_lens[b]``
    tokens lies in its part of ``kv_slots``. KV is written before it is read, layer by layer, so a
    sequence may read slots that another one of the same batch writes.

        token_ids, positions, write_slots   int32 [T]
        q_lens, kv_lens                     int32 [B]
        kv_slots                            int32 [sum(kv_lens)]
    """

    token_ids: IntArray
    positions: IntArray
    write_slots: IntArray
    q_lens: IntArray
    kv_lens: IntArray
    kv_slots: IntArray


@dataclass(frozen=True, slots=True)
class Batch:
    """A scheduled step: what is computed, and which sequences have all their tokens afterwards and are sampled.

    ``ends[i]`` is how far ``sequences[i]`` is computed after the step, without its drafts, which ``forward`` computes too. ``forward`` is ``None`` when every prompt was found
    whole in the cache: then there is only sampling to do.
    """

    sequences: tuple[Sequence, ...]
    ends: tuple[int, ...]
    forward: ForwardBatch | None
    sampled: tuple[Sequence, ...]
    sample_slots: IntArray  # int32 [R]: for each sampled sequence the slots of its last token and of each of its drafts

    @property
    def tokens(self) -> int:
        return 0 if self.forward is None else len(self.forward.token_ids)
