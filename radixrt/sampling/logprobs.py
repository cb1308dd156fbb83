"""Log-probabilities of the model's own distribution: of the token that stands at a position, and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from radixrt.request import PositionLogprobs, TokenLogprob


@torch.inference_mode()
def position_logprobs(
    logits: torch.Tensor, chosen: Sequence[int], top: Sequence[int], normalizer: torch.Tensor | None = None
) -> list[PositionLogprobs]:
    """One ``PositionLogprobs`` for each row of raw ``logits [R, V]``.

    Args:
        chosen: the token at each position.
        top: how many of the likeliest tokens to list at each position, ``0 .. V``.
        normalizer: ``logsumexp`` of the rows, where it is known.
    """
    if normalizer is None:
        normalizer = logits.logsumexp(dim=-1)
    ids = torch.tensor(chosen, dtype=torch.int64, device=logits.device)[:, None]
    values = logits.gather(1, ids)
    ranks = ((logits > values).sum(dim=-1) + 1).tolist()
    own = (values[:, 0] - normalizer).tolist()
    most = min(max(top, default=0), logits.shape[1])
    best_values, best_ids = logits.topk(most, dim=-1)
    best = (best_values - normalizer[:, None]).tolist()
    best_id = best_ids.tolist()
    return [
        PositionLogprobs(
            chosen=TokenLogprob(int(chosen[i]), own[i], ranks[i]),
            top=tuple(TokenLogprob(best_id[i][j], best[i][j], j + 1) for j in range(min(top[i], most))),
        )
        for i in range(len(chosen))
    ]


@torch.inference_mode()
def pair_logprobs(
    logits: torch.Tensor, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """The log-probability of ``tokens[i]`` in row ``rows[i]`` of raw ``logits [R, V]``, for each ``i``."""
    at = torch.from_numpy(rows).to(logits.device)
    values = logits[at, torch.from_numpy(tokens).to(logits.device)] - logits.logsumexp(dim=-1)[at]
    return values.float().cpu().numpy()
