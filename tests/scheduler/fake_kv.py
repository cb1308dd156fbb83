"""A stand-in for the model: a slot holds the whole prefix it was computed for, so that any wrong slot shows."""

from __future__ import annotations

from collections.abc import Callable

from radixrt.scheduler.batch import Batch
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.sequence import Sequence


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
        for sequence, slot in zip(batch.sampled, batch.sample_slots.tolist(), strict=True):
            assert self.slots[slot] == (sequence.namespace, *sequence.tokens[: sequence.size].tolist())
        self.scheduler.commit(batch)
        for sequence in batch.sampled:
            if sequence.remaining:
                token = self.next_token(tuple(sequence.tokens[: sequence.size].tolist()))
                sequence.append(token)
                self.outputs.setdefault(sequence.uid, []).append(token)
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
