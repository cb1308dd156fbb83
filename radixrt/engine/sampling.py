"""Sampling owns how a computed step becomes tokens: which positions are read, with what masks, on which path of the model.

Invariants: a position is sampled from nothing but its own logits and the tokens before it, so it does not matter whether these were
drafted or generated one step at a time; full logits are made of a bounded number of rows at a time, and only where they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from radixrt.cache.page_pool import IntArray
from radixrt.engine.embedding import pool
from radixrt.engine.live import LiveSample
from radixrt.engine.scoring import prompt_logprobs, score
from radixrt.model.runner import ModelRunner
from radixrt.sampling.mask import Bitmask
from radixrt.sampling.sampler import Sampled, sample
from radixrt.sampling.spec import Row
from radixrt.scheduler.batch import Batch

_FULL_ROWS = 16  # whose logits are held at once, with what the sampler makes of them


def sample_step(runner: ModelRunner, batch: Batch, items: Seq[LiveSample]) -> list[list[Sampled]]:
    """For each sampled sequence the token that follows its last one, then those that follow each of its drafts.

    There are fewer where a constraint does not allow a draft: what follows that one cannot be wanted. The first one may be an
    error. Of scored choices the scores are kept in the item, of a prompt to embed the vector in its request, and their token says
    nothing but whether these are numbers.
    """
    for item in items:
        request = item.request
        if request.params.prompt_logprobs is not None and request.prompt_logprobs is None:
            request.prompt_logprobs = prompt_logprobs(runner.logits, request, item.sequence)
    results: list[list[Sampled]] = [[] for _ in items]
    scored = [i for i, item in enumerate(items) if item.request.scoring]
    if scored:
        wanted = [(items[i].sequence, len(items[i].request.prompt)) for i in scored]
        for i, scores in zip(scored, score(runner.logits, wanted), strict=True):
            items[i].scores = scores
            finite = all(map(math.isfinite, scores))
            results[i] = [Sampled(-1, error=None if finite else "the model's logits are not finite")]
    for i, item in enumerate(items):
        if item.request.pooling is not None:
            results[i] = [_embedded(runner, item)]
    owners: list[int] = []
    rows: list[Row] = []
    masks: list[Bitmask | None] = []
    slots: list[int] = []  # places in ``batch.sample_slots``
    first = 0
    for i, item in enumerate(items):
        start, first = first, first + 1 + item.sequence.drafts
        if results[i]:
            continue
        try:
            allowed = item.masks(runner.info.vocab_size)
        except Exception as error:  # the grammar came to a limit of its own
            results[i] = [Sampled(-1, error=str(error))]
            continue
        owners += [i] * len(allowed)
        rows += [item.row(ahead) for ahead in range(len(allowed))]
        masks += allowed
        slots += range(start, start + len(allowed))
    for i, result in zip(owners, _sample(runner, batch.sample_slots[slots], rows, masks), strict=True):
        results[i].append(result)
    return results


def _embedded(runner: ModelRunner, item: LiveSample) -> Sampled:
    request, sequence = item.request, item.sequence
    try:
        request.embedding = pool(runner.store.hidden, sequence.slots[: sequence.size], request.pooling or "last")
    except ValueError as error:
        return Sampled(-1, error=str(error))
    return Sampled(-1)


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
