"""Sampling owns how a computed step becomes tokens: which positions are read, with what masks, on which path of the model.

It has three parts, because the host may be busy with other things while a step is computed: what is wanted (``plan_sampling``, on the host,
when every earlier token is known), the work (``Wanted.run``, in the device's order, from nothing but what the plan holds) and what
came of it (``deliver``, on the host).

Invariants: a position is sampled from nothing but its own logits and the tokens before it, so it does not matter whether these were
drafted or generated one step at a time; full logits are made of a bounded number of rows at a time, and only where they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import torch

from radixrt.cache.page_pool import IntArray
from radixrt.engine.embedding import pool
from radixrt.engine.live import LiveRequest, LiveSample
from radixrt.engine.scoring import prompt_logprobs, score
from radixrt.model.device import upload
from radixrt.model.draw import QueuedDraw
from radixrt.model.runner import ModelRunner
from radixrt.request import PositionLogprobs
from radixrt.sampling.mask import Bitmask
from radixrt.sampling.sampler import Sampled, sample
from radixrt.sampling.spec import Row
from radixrt.scheduler.batch import Batch
from radixrt.scheduler.sequence import Sequence

_FULL_ROWS = 16  # whose logits are held at once, with what the sampler makes of them


@dataclass(slots=True)
class Outcome:
    """What a step found, by the places of its sampled sequences.

    Fields:
        tokens: of each the token that follows its last one, then those that follow each of its drafts. There are fewer where a
            constraint does not allow a draft: what follows that one cannot be wanted. The first one may be an error.
        prompts, scores, embeddings: what was asked for besides; there the token says nothing but whether these are numbers.
    """

    tokens: list[list[Sampled]]
    prompts: dict[int, tuple[PositionLogprobs | None, ...]] = field(default_factory=dict)
    scores: dict[int, tuple[float, ...]] = field(default_factory=dict)
    embeddings: dict[int, tuple[float, ...]] = field(default_factory=dict)
    owners: list[int] = field(default_factory=list)
    queued: QueuedDraw | None = None  # of the rows of ``owners``: their tokens are not in ``tokens`` before ``deliver``

    def ids(self) -> IntArray | torch.Tensor:
        """The first token of each, int32, where it was sampled; any token where there is none: whoever computes it computes for nobody."""
        if self.queued is None:
            return np.array([max(0, found[0].token) for found in self.tokens], dtype=np.int32)
        rows = np.zeros(len(self.tokens), dtype=np.int32)
        rows[self.owners[::-1]] = np.arange(len(self.owners), dtype=np.int32)[::-1]
        ids = self.queued.ids
        return ids[upload(rows, torch.empty(rows.shape, dtype=torch.int32, device=ids.device))]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be found of a step: ``R`` rows to sample, and what else is asked. Changed by nobody, whatever becomes of the requests."""

    count: int  # sampled sequences
    errors: dict[int, str]  # the grammar came to a limit of its own
    owners: list[int]  # [R]: whose rows these are
    rows: list[Row]
    masks: list[Bitmask | None]
    slots: IntArray  # [R]
    prompts: dict[int, tuple[LiveRequest, Sequence]]
    scored: dict[int, tuple[Sequence, int]]
    pooled: dict[int, tuple[IntArray, str]]

    def run(self, runner: ModelRunner) -> Outcome:
        found = Outcome([[] for _ in range(self.count)])
        for at, (request, sequence) in self.prompts.items():
            found.prompts[at] = prompt_logprobs(runner.logits, request, sequence)
        for at, error in self.errors.items():
            found.tokens[at] = [Sampled(-1, error=error)]
        if self.scored:
            for at, scores in zip(self.scored, score(runner.logits, self.scored.values()), strict=True):
                found.scores[at] = scores
                finite = all(map(math.isfinite, scores))
                found.tokens[at] = [Sampled(-1, error=None if finite else "the model's logits are not finite")]
        for at, (slots, pooling) in self.pooled.items():
            try:
                found.embeddings[at] = pool(runner.store.hidden, slots, pooling)
                found.tokens[at] = [Sampled(-1)]
            except ValueError as error:
                found.tokens[at] = [Sampled(-1, error=str(error))]
        found.owners, found.queued = self.owners, runner.queue_draw(self.slots, self.rows, self.masks)
        if found.queued is None:
            for at, drawn in zip(self.owners, _sample(runner, self.slots, self.rows, self.masks), strict=True):
                found.tokens[at].append(drawn)
        return found


def plan_sampling(batch: Batch, items: Seq[LiveSample], vocab: int) -> Wanted:
    """What is wanted of ``batch``, whose sampled sequences are those of ``items``; all of their tokens are known."""
    errors: dict[int, str] = {}
    owners: list[int] = []
    rows: list[Row] = []
    masks: list[Bitmask | None] = []
    slots: list[int] = []  # places in ``batch.sample_slots``
    prompts: dict[int, tuple[LiveRequest, Sequence]] = {}
    scored: dict[int, tuple[Sequence, int]] = {}
    pooled: dict[int, tuple[IntArray, str]] = {}
    asked: set[str] = set()
    first = 0
    for at, item in enumerate(items):
        request, sequence = item.request, item.sequence
        start, first = first, first + 1 + sequence.drafts
        missing = request.params.prompt_logprobs is not None and request.prompt_logprobs is None
        if missing and request.request_id not in asked:
            asked.add(request.request_id)
            prompts[at] = (request, _frozen(sequence))
        if request.scoring:
            scored[at] = (_frozen(sequence), len(request.prompt))
            continue
        if request.pooling is not None:
            pooled[at] = (sequence.slots[: sequence.size].copy(), request.pooling)
            continue
        try:
            allowed = item.masks(vocab)
        except Exception as error:
            errors[at] = str(error)
            continue
        owners += [at] * len(allowed)
        rows += [item.row(ahead) for ahead in range(len(allowed))]
        masks += allowed
        slots += range(start, start + len(allowed))
    return Wanted(len(items), errors, owners, rows, masks, batch.sample_slots[slots], prompts, scored, pooled)


def deliver(items: Seq[LiveSample], found: Outcome) -> None:
    """The step has ended: collect its tokens, and keep what was asked for besides where it is looked for."""
    if found.queued is not None:
        for at, drawn in zip(found.owners, found.queued.collect(), strict=True):
            found.tokens[at].append(drawn)
    for at, prompt in found.prompts.items():
        items[at].request.prompt_logprobs = prompt
    for at, scores in found.scores.items():
        items[at].scores = scores
    for at, embedding in found.embeddings.items():
        items[at].request.embedding = embedding


def _frozen(sequence: Sequence) -> Sequence:
    """As it is now: it may end, and give up its slots, while the step is computed."""
    frozen = copy(sequence)
    frozen.slots = sequence.slots[: sequence.size].copy()
    return frozen


def _sample(runner: ModelRunner, slots: IntArray, rows: Seq[Row], masks: Seq[Bitmask | None]) -> list[Sampled]:
    found: list[Sampled | None] = [None] * len(rows)
    plain = [at for at, row in enumerate(rows) if row.spec.params.logprobs is None]
    for at, drawn in zip(
        plain, runner.draw(slots[plain], [rows[at] for at in plain], [masks[at] for at in plain]), strict=True
    ):
        found[at] = drawn
    full = [at for at, one in enumerate(found) if one is None]
    for first in range(0, len(full), _FULL_ROWS):
        some = full[first : first + _FULL_ROWS]
        allowed = {row: mask for row, at in enumerate(some) if (mask := masks[at]) is not None}
        for at, drawn in zip(some, sample(runner.logits(slots[some]), [rows[at] for at in some], allowed), strict=True):
            found[at] = drawn
    return [one for one in found if one is not None]
