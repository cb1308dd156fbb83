"""A stand-in for the model: a slot holds the whole prefix it was computed for, so that any wrong slot shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from radixrt.cache.page_pool import IntArray
from radixrt.scheduler.batch import Batch
from radixrt.scheduler.drafts import Drafter
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.sequence import Phase, Sequence


class Guesses(Drafter):
    """Proposes what will come, but for the token at place ``wrong``."""

    def __init__(self, kv: FakeKV, count: int, wrong: int) -> None:
        super().__init__(count)
        self.kv, self.wrong = kv, wrong

    def propose(self, tokens: IntArray, accepted: int, most: int, *_: Any) -> IntArray:
        guess = self.kv.expected(tokens.tolist(), max(0, min(self.most, most)))
        return np.array([t + (at == self.wrong) for at, t in enumerate(guess)], dtype=np.int32)


@dataclass
class Flight:
    """A step that was launched: what it computes, as it stood then. ``work``: sequence, tokens computed, tokens, row of a pending one.
    ``own``: pages that it writes and that only their sequences know."""

    batch: Batch
    work: list[tuple[Sequence, int, list[int], int]]
    own: set[int]


class FakeKV:
    """Runs batches on a ``Scheduler`` and checks every slot that a forward pass would read.

    Args:
        next_token: what follows a prefix.
        stop: a token that ends its sequence.
        forced: what follows a token without being sampled.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        next_token: Callable[[tuple[int, ...]], int] | None = None,
        stop: int = -1,
        forced: dict[int, list[int]] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.slots: dict[int, tuple[int, ...]] = {}
        self.next_token = next_token or (lambda prefix: (sum(prefix) * 7 + len(prefix)) % 5)
        self.stop, self.forced = stop, forced or {}
        self.outputs: dict[int, list[int]] = {}
        self.flight: Flight | None = None
        self.ids: list[int] = []  # what the last step sampled first for each of its sequences

    def step(self, fail: bool = False, poison: int | None = None, ahead: bool = False) -> Batch | None:
        """Take in one step; ``fail`` makes its forward raise after spoiling all it writes, and so does a token ``poison`` in it.

        ``ahead``: the next one is scheduled before. Everything is computed as late as a device may be with it.
        """
        if self.flight is None:
            batch = self.scheduler.schedule()
            if batch is None:
                return None
            self.flight = self._launch(batch)
        flight, self.flight = self.flight, None
        following = self.scheduler.schedule_ahead(flight.batch) if ahead else None
        launched = self._launch(following) if following is not None else None
        if self._compute(flight, fail, poison):
            for sequence in self.scheduler.fail(flight.batch):
                self.outputs.pop(sequence.uid, None)
            return flight.batch
        sampled = self._sample(flight.batch)
        self.ids = [found[0] for found in sampled]
        self.scheduler.commit(flight.batch)
        for sequence, found in zip(flight.batch.sampled, sampled, strict=True):
            if sequence.phase is Phase.RUNNING:
                self._accept(sequence, found)
        if launched is not None:
            self._follow(launched)
        return flight.batch

    def _launch(self, batch: Batch) -> Flight:
        flat, work, size = batch.forward, [], self.scheduler.pool.page_size
        own: set[int] = set()
        if flat is not None:
            sequences = [
                s for s, start, end in zip(batch.sequences, batch.starts, batch.ends, strict=True) if end > start
            ]
            sources = flat.sources if flat.sources is not None else np.full(batch.tokens, -1)
            at = 0
            for sequence, q_len, kv_len in zip(sequences, flat.q_lens.tolist(), flat.kv_lens.tolist(), strict=True):
                assert kv_len <= sequence.limit
                tokens, last = sequence.tokens[:kv_len].tolist(), at + q_len - 1
                for position in range(kv_len - q_len, kv_len):
                    assert flat.token_ids[at] == tokens[position] and flat.positions[at] == position
                    assert sources[at] < 0 or at == last
                    if position >= sequence.in_tree:
                        own.add(int(flat.write_slots[at]) // size)
                    at += 1
                work.append((sequence, q_len, tokens, int(sources[last])))
        return Flight(batch, work, own)

    def _compute(self, flight: Flight, fail: bool, poison: int | None) -> bool:
        """Write and read the slots; whether it fails."""
        flat, at = flight.batch.forward, 0
        if flat is None:
            return False
        for _, _, tokens, source in flight.work:
            if source >= 0:
                tokens[-1] = self.ids[source]
        assert not flight.own & set(self.scheduler.pool.free_page_ids().tolist()), "a page was freed too early"
        fail = fail or any(poison in tokens[-q_len:] for _, q_len, tokens, _ in flight.work)
        for sequence, q_len, tokens, _ in flight.work:
            for position in range(len(tokens) - q_len, len(tokens)):
                value = ("garbage",) if fail else (sequence.namespace, *tokens[: position + 1])
                self.slots[int(flat.write_slots[at])] = value  # type: ignore[assignment]
                at += 1
        at = 0
        for sequence, _, tokens, _ in flight.work:
            if not fail:
                self._check(sequence, tokens, flat.kv_slots[at : at + len(tokens)].tolist())
            at += len(tokens)
        return fail

    def _sample(self, batch: Batch) -> list[list[int]]:
        slots = batch.sample_slots.tolist()
        sampled: list[list[int]] = []
        for sequence in batch.sampled:
            tokens = sequence.tokens[: sequence.size + sequence.drafts].tolist()
            sampled.append([])
            for end in range(sequence.size, len(tokens) + 1):
                assert self.slots[slots.pop(0)] == (sequence.namespace, *tokens[:end])
                sampled[-1].append(self.next_token(tuple(tokens[:end])))
        assert not slots
        return sampled

    def _accept(self, sequence: Sequence, found: list[int]) -> None:
        start, over = sequence.size, not sequence.remaining
        while not over and sequence.computed == sequence.size < start + len(found):
            token = found[sequence.size - start]
            for one in (token, *self.forced.get(token, [])):
                if not over:
                    sequence.append(one)
                    self.outputs.setdefault(sequence.uid, []).append(one)
                    over = not sequence.remaining or one == self.stop
        sequence.drafts = 0
        if over:
            self.scheduler.finish(sequence)

    def _follow(self, flight: Flight) -> None:
        batch = flight.batch
        if all(s.phase is not Phase.RUNNING for s in batch.sequences):
            self._compute(flight, False, None)
            self.scheduler.commit(batch)
            return
        ends = dict(zip(batch.sequences, batch.ends, strict=True))
        rows = [row for row, s in enumerate(batch.sampled) if s.phase is Phase.RUNNING and s.size == ends[s]]
        self.flight = Flight(batch.sampling(rows), flight.work, flight.own)

    def run(self, ahead: bool = False) -> None:
        """Until nothing is left, checking integrity after every step."""
        while self.scheduler.has_work or self.flight is not None:
            assert self.step(ahead=ahead) is not None, "work is left but nothing was scheduled"
            self.scheduler.check_integrity()

    def expected(self, prompt: list[int], count: int) -> list[int]:
        """What a sequence must generate whatever else runs."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count and (len(tokens) == len(prompt) or tokens[-1] != self.stop):
            token = self.next_token(tuple(tokens))
            for one in (token, *self.forced.get(token, [])):
                tokens.append(one)
                if one == self.stop:
                    break
        return tokens[len(prompt) : len(prompt) + count]

    def _check(self, sequence: Sequence, tokens: list[int], slots: list[int]) -> None:
        for position, slot in enumerate(slots):
            assert self.slots.get(slot) == (sequence.namespace, *tokens[: position + 1]), f"wrong KV at {position}"
