"""Sampler: one token for each row of logits. A row's result depends on nothing but its own logits, parameters and seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from radixrt.request import PositionLogprobs
from radixrt.sampling.logprobs import position_logprobs
from radixrt.sampling.mask import Bitmask, restrict
from radixrt.sampling.penalties import adjust
from radixrt.sampling.spec import Row, uniform

_CANDIDATES = 256  # tokens that top-k, top-p and min-p look at before a full sort is needed


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token of one row, or why there is none."""

    token: int
    logprobs: PositionLogprobs | None = None
    error: str | None = None


_NOTHING = Sampled(-1, error="the model's logits are not finite, or no token is allowed")


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[Row], allowed: Mapping[int, Bitmask] | None = None) -> list[Sampled]:
    """Choose a token for each row.

    Args:
        logits: float32 ``[R, V]``; overwritten.
        rows: ``R`` rows.
        allowed: for some rows, the tokens that may come, int32 ``[ceil(V / 32)]``: bit ``t % 32`` of word ``t // 32``.

    Order: repetition penalty, frequency and presence penalties, bias, ``min_tokens``, allowed tokens, temperature, top-k, top-p (of
    what top-k left), min-p. Log-probabilities are of the logits as given, before all of these.
    """
    wanted = [i for i, row in enumerate(rows) if row.spec.params.logprobs is not None]
    raw = logits[wanted] if wanted else None
    adjust(logits, rows)
    if allowed:
        restrict(logits, allowed)
    best, tokens = logits.max(dim=-1)
    usable = best.isfinite().tolist()
    picked = tokens.tolist()
    drawn = [i for i, row in enumerate(rows) if row.spec.params.temperature > 0 and usable[i]]
    if drawn:
        for i, token in zip(drawn, _draw(logits[drawn], best[drawn], [rows[i] for i in drawn]), strict=True):
            picked[i] = token
    logprobs: dict[int, PositionLogprobs] = {}
    if raw is not None:
        tops = [rows[i].spec.params.logprobs or 0 for i in wanted]
        logprobs = dict(zip(wanted, position_logprobs(raw, [picked[i] for i in wanted], tops), strict=True))
    return [Sampled(picked[i], logprobs.get(i)) if usable[i] else _NOTHING for i in range(len(rows))]


def chosen(tokens: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> list[Sampled]:
    """The likeliest token of each row, as it is where nothing else is asked for; ``logits``: theirs."""
    usable = np.isfinite(logits).tolist()
    return [Sampled(token) if ok else _NOTHING for token, ok in zip(tokens.tolist(), usable, strict=True)]


def _draw(logits: torch.Tensor, best: torch.Tensor, rows: list[Row]) -> list[int]:
    device = logits.device
    params = [row.spec.params for row in rows]
    temperature = torch.tensor([max(p.temperature, 1e-6) for p in params], dtype=torch.float32, device=device)
    scores = (logits - best[:, None]) / temperature[:, None]
    chances = torch.tensor([uniform(row.spec.seed, row.generated) for row in rows], dtype=torch.float64, device=device)
    chosen = [-1] * len(rows)
    plain = [i for i, p in enumerate(params) if p.top_k <= 0 and p.top_p == 1.0 and p.min_p == 0.0]
    if plain:
        for i, token in zip(plain, _invert(scores[plain].exp().double(), chances[plain]).tolist(), strict=True):
            chosen[i] = token
    filtered = [i for i in range(len(rows)) if i not in set(plain)]
    size = min(_CANDIDATES, scores.shape[1])
    while filtered:
        done, tokens = _filtered(scores[filtered], chances[filtered], [params[i] for i in filtered], size)
        for i, ok, token in zip(filtered, done, tokens, strict=True):
            if ok:
                chosen[i] = token
        filtered = [i for i, ok in zip(filtered, done, strict=True) if not ok]
        size = scores.shape[1]
    return chosen


def _filtered(scores: torch.Tensor, chances: torch.Tensor, params: list, size: int) -> tuple[list[bool], list[int]]:
    """Draw among the ``size`` likeliest tokens; False for a row whose filters might keep more than those."""
    device, vocab = scores.device, scores.shape[1]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    values, ids = scores.topk(size, dim=-1)
    keep_first = column([p.top_k if p.top_k > 0 else vocab for p in params])
    place = torch.arange(size, device=device)[None, :]
    weights = values.exp() * (place < keep_first)
    in_top_k = keep_first[:, 0] <= size
    total = torch.where(in_top_k, weights.sum(dim=-1), scores.exp().sum(dim=-1))[:, None]
    before = weights.cumsum(dim=-1) - weights
    top_p, min_p = column([p.top_p for p in params]), column([p.min_p for p in params])
    keep = (place == 0) | ((before < top_p * total) & (weights >= min_p * weights[:, :1]) & (weights > 0))
    settled = in_top_k | ~keep[:, -1] | (size == vocab)
    picked = _invert((weights * keep).double(), chances)
    return settled.tolist(), ids.gather(1, picked[:, None])[:, 0].tolist()


def _invert(weights: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """Index drawn from each row of unnormalized ``weights [R, N]`` (float64) by inverting its distribution at ``chances [R]``."""
    cumulative = weights.cumsum(dim=-1)
    target = (chances * cumulative[:, -1])[:, None]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    last = (weights > 0).int().cumsum(dim=-1).argmax(dim=-1)  # rounding must not pick a token of weight 0
    return torch.minimum(index, last)
