"""What rows wish of their draw, as the arrays that the kernels read: parameters, and the few logits of a row that are changed before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixrt.sampling.spec import IntArray, Row, uniform

FloatArray = npt.NDArray[np.float32]


class Wishes(NamedTuple):
    """Of ``R`` rows and ``E`` edits. A changed logit is ``(logit / factor if logit > 0 else logit * factor) + add``."""

    temperature: FloatArray  # [R]; 0: the likeliest token
    chance: npt.NDArray[np.float64]  # [R]
    top_k: IntArray  # [R]; 0: all
    top_p: FloatArray
    min_p: FloatArray
    edit_end: IntArray  # [R]: where the row's edits end and those of the next begin
    edit_ids: IntArray  # [E], ascending within a row
    edit_factor: FloatArray
    edit_add: FloatArray


def wishes_of(rows: Sequence[Row], vocab: int) -> Wishes | None:
    """``None``: the likeliest token of each row, and no logit changed. Ids from ``vocab`` on have no logit, so nothing of theirs is changed."""
    if all(row.greedy for row in rows):
        return None
    params = [row.spec.params for row in rows]
    edits = [_edits(row, vocab) for row in rows]
    return Wishes(
        temperature=np.array([p.temperature for p in params], dtype=np.float32),
        chance=np.array([uniform(row.spec.seed, row.generated) for row in rows], dtype=np.float64),
        top_k=np.array([min(max(p.top_k, 0), vocab) for p in params], dtype=np.int32),
        top_p=np.array([p.top_p for p in params], dtype=np.float32),
        min_p=np.array([p.min_p for p in params], dtype=np.float32),
        edit_end=np.cumsum([len(ids) for ids, _, _ in edits], dtype=np.int32),
        edit_ids=np.concatenate([ids for ids, _, _ in edits]).astype(np.int32),
        edit_factor=np.concatenate([factor for _, factor, _ in edits]),
        edit_add=np.concatenate([add for _, _, add in edits]),
    )


_NO_IDS: IntArray = np.empty(0, dtype=np.int32)
_NO_NUMBERS: FloatArray = np.empty(0, dtype=np.float32)


def _edits(row: Row, vocab: int) -> tuple[IntArray, FloatArray, FloatArray]:
    """The ids of the logits that are changed, ascending, with the factor and the addend of each."""
    spec, params = row.spec, row.spec.params
    early = spec.banned_early if row.generated < params.min_tokens else _NO_IDS
    if not spec.penalized and not len(spec.bias_ids) and not len(early):
        return _NO_IDS, _NO_NUMBERS, _NO_NUMBERS
    seen = output = _NO_IDS
    counts: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = np.unique(row.tokens)
    if params.presence_penalty or params.frequency_penalty:
        output, counts = np.unique(row.tokens[row.prompt_len :], return_counts=True)
    ids = np.unique(np.concatenate((seen, output, spec.bias_ids, early)))
    factor, add = np.ones(len(ids), dtype=np.float32), np.zeros(len(ids), dtype=np.float32)
    factor[np.searchsorted(ids, seen)] = params.repetition_penalty
    add[np.searchsorted(ids, output)] -= counts * np.float32(params.frequency_penalty) + np.float32(
        params.presence_penalty
    )
    add[np.searchsorted(ids, spec.bias_ids)] += spec.bias_values
    add[np.searchsorted(ids, early)] = -np.inf
    known = int(np.searchsorted(ids, vocab))
    return ids[:known].astype(np.int32), factor[:known], add[:known]
