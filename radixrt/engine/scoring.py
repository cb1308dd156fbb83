"""Scoring owns how likely given tokens are: for ``select``, and with nothing sampled.

Invariants: the log-probabilities are the model's own (before bias, penalties and temperature); the model's head runs once for
each distinct position among the sequences it is given, however many of them share it, and on a bounded number of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from radixrt.cache.page_pool import IntArray
from radixrt.engine.live import LiveRequest
from radixrt.request import PositionLogprobs
from radixrt.sampling.logprobs import pair_logprobs, position_logprobs
from radixrt.scheduler.sequence import Sequence

_ROWS = 64  # of logits held at once
_FULL_ROWS = 16  # where the likeliest tokens of each are wanted
_NO_SLOTS: IntArray = np.empty(0, dtype=np.int32)


def score(
    logits: Callable[[IntArray], torch.Tensor], sequences: Iterable[tuple[Sequence, int]]
) -> list[tuple[float, ...]]:
    """The log-probabilities of the last tokens of computed sequences.

        tokens  |---- prefix ----|-- choice --|
                0              start         size
        slots           start - 1 .. size - 2: the position before each token of the choice

    Args:
        logits: of the positions in given slots, float32 ``[R, vocab]``.
        sequences: each with its ``start``, at least 1.

    Returns:
        For each sequence a natural log-probability for each token from ``start`` on.
    """
    parts = [(s.slots[start - 1 : s.size - 1], s.tokens[start : s.size]) for s, start in sequences]
    slots = np.concatenate([_NO_SLOTS, *(slots for slots, _ in parts)])
    tokens = np.concatenate([_NO_SLOTS, *(tokens for _, tokens in parts)]).astype(np.int64)
    distinct, row = np.unique(slots, return_inverse=True)
    by_row = np.argsort(row, kind="stable")
    values: npt.NDArray[np.float64] = np.empty(len(slots), dtype=np.float64)
    for at in range(0, len(distinct), _ROWS):
        first, last = np.searchsorted(row[by_row], (at, at + _ROWS))
        wanted = by_row[first:last]
        values[wanted] = pair_logprobs(logits(distinct[at : at + _ROWS]), row[wanted] - at, tokens[wanted])
    ends = np.cumsum([len(tokens) for _, tokens in parts])
    return [tuple(one.tolist()) for one in np.split(values, ends)[: len(parts)]]


def joined(prefix: IntArray, choices: Seq[IntArray]) -> list[IntArray]:
    """The prompts of a scoring request: the prefix with each choice behind it."""
    return [np.concatenate((prefix, choice)) for choice in choices]


def prompt_logprobs(
    logits: Callable[[IntArray], torch.Tensor], request: LiveRequest, sequence: Sequence
) -> tuple[PositionLogprobs | None, ...]:
    """Of each token of a computed prompt: from the stored hidden states, so it does not matter which positions were cached."""
    tokens = request.prompt.tolist()
    top = request.params.prompt_logprobs or 0
    slots = sequence.slots[: len(tokens) - 1]
    found: list[PositionLogprobs | None] = [None]
    for at in range(0, len(slots), _FULL_ROWS):
        rows = logits(slots[at : at + _FULL_ROWS])
        found.extend(position_logprobs(rows, tokens[at + 1 : at + 1 + len(rows)], [top] * len(rows)))
    return tuple(found)
