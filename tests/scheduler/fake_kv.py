"""A stand-in for the model: a slot holds the whole prefix it was computed for, so that any wrong slot shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from radixrt.cache.page_pool import IntArray
from radixrt.scheduler.batch import Batch
from radixrt.scheduler.drafts import Drafter
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.sequence import Sequence


class Guesses(Drafter):
    """Proposes what will come, but for the token at place ``wrong``."""

    def __init__(self, kv: FakeKV, count: int, wrong: int) -> None:
        super().__init__(count)
        self.kv, self.wrong = kv, wrong

    def propose(self, tokens: IntArray, accepted: int, most: int, *_: Any) -> IntArray:
        guess = self.kv.expected(tokens.tolist(), max(0, min(self.most, most)))
        return np.array([t + (at == self.wrong) for at, t in enumerate(guess)], dtype=np.int32)


class FakeKV:
    """Runs batches on a ``Scheduler`` and checks every slot that a forward pass would read."""

    def __init__(self, scheduler: Scheduler, next_token: Callable[[tuple[int, ...]], int] | None = None) -> None:
        self.scheduler = scheduler
        self.slots: dict[int, tuple[int, ...]] = {}
        self.next_token = next_token or (lambda prefix: (sum(prefix) * 7 + len(prefix)) % 5)
        self.outputs: dict[int, list[int]] = {}

    def step(self, fail: bool = False, poison: int | None = None) -> Batch | None:
        """One step; ``fail`` makes its forward raise after spoiling all it writes, and so does a token ``poison`` in it."""
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        flat = batch.forward
        if flat is not None:
            fail = fail or poison in flat.token_ids.tolist()
            at = 0
            work = [s for s, end in zip(batch.sequences, batch.ends, strict=True) if end > s.computed]
            assert all(kv_len <= s.limit for s, kv_len in zip(work, flat.kv_lens, strict=True))
            for sequence, q_len, kv_len in zip(work, flat.q_lens, flat.kv_lens, strict=True):
                tokens = sequence.tokens.tolist()
                for position in range(kv_len - q_len, kv_len):
                    assert flat.token_ids[at] == tokens[position] and flat.positions[at] == position
                    self.slots[int(flat.write_slots[at])] = (
                        ("garbage",) if fail else (sequence.namespace, *tokens[: position + 1])
                    )
                    at += 1
            if fail:
                for sequence in self.scheduler.fail(batch):
                    self.outputs.pop(sequence.uid, None)
                return batch
            at = 0
            for sequence, kv_len in zip(work, flat.kv_lens, strict=True):
                self._check(sequence, flat.kv_slots[at : at + kv_len].tolist())
                at += kv_len
        slots = batch.sample_slots.tolist()
        sampled: list[list[int]] = []
        for sequence in batch.sampled:
            tokens = sequence.tokens[: sequence.size + sequence.drafts].tolist()
            sampled.append([])
            for end in range(sequence.size, len(tokens) + 1):
                assert self.slots[slots.pop(0)] == (sequence.namespace, *tokens[:end])
                sampled[-1].append(self.next_token(tuple(tokens[:end])))
        assert not slots
        self.scheduler.commit(batch)
        for sequence, found in zip(batch.sampled, sampled, strict=True):
            for token in found if sequence.remaining else ():
                sequence.append(token)
                self.outputs.setdefault(sequence.uid, []).append(token)
                if sequence.computed < sequence.size:
                    break
            if not sequence.remaining:
                self.scheduler.finish(sequence)
        return batch

    def run(self) -> None:
        """Until nothing is left, checking integrity after every step."""
        while self.scheduler.has_work:
            assert self.step() is not None, "work is left but nothing was scheduled"
            self.scheduler.check_integrity()

    def expected(self, prompt: list[int], count: int) -> list[int]:
        """What a sequence must generate whatever else runs."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.next_token(tuple(tokens)))
        return tokens[len(prompt) :]

    def _check(self, sequence: Sequence, slots: list[int]) -> None:
        tokens = sequence.tokens.tolist()
        for position, slot in enumerate(slots):
            assert self.slots.get(slot) == (sequence.namespace, *tokens[: position + 1]), f"wrong KV at {position}"
