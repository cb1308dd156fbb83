"""Adjusts logits in place before the draw: logit bias, penalties, and ids not allowed yet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from radixrt.sampling.spec import Row


def adjust(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Apply penalties, bias and ``min_tokens`` to ``logits [R, V]``, in place."""
    _penalize(logits, rows)
    biased = [(i, row.spec) for i, row in enumerate(rows) if len(row.spec.bias_ids)]
    if biased:
        at = torch.from_numpy(np.repeat([i for i, _ in biased], [len(s.bias_ids) for _, s in biased]))
        ids = torch.from_numpy(np.concatenate([s.bias_ids for _, s in biased]))
        values = torch.from_numpy(np.concatenate([s.bias_values for _, s in biased]))
        device = logits.device
        logits.index_put_((at.to(device), ids.to(device)), values.to(device), accumulate=True)
    early = [(i, row.spec.banned_early) for i, row in enumerate(rows) if row.generated < row.spec.params.min_tokens]
    early = [(i, ids) for i, ids in early if len(ids)]
    if early:
        at = torch.from_numpy(np.repeat([i for i, _ in early], [len(ids) for _, ids in early]))
        ids = torch.from_numpy(np.concatenate([ids for _, ids in early]))
        logits[at.to(logits.device), ids.to(logits.device)] = float("-inf")


def _penalize(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    chosen = [i for i, row in enumerate(rows) if row.spec.penalized]
    if not chosen:
        return
    device, vocab = logits.device, logits.shape[1]
    part = logits[chosen]
    params = [rows[i].spec.params for i in chosen]

    def counts(token_lists: list[np.ndarray]) -> torch.Tensor:
        at = torch.from_numpy(np.repeat(np.arange(len(token_lists)), [len(t) for t in token_lists])).to(device)
        ids = torch.from_numpy(np.concatenate(token_lists).astype(np.int64)).to(device)
        table = torch.zeros((len(token_lists), vocab), dtype=torch.float32, device=device)
        return table.index_put_((at, ids), torch.ones((), device=device), accumulate=True)

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    if any(p.repetition_penalty != 1.0 for p in params):
        seen = counts([rows[i].tokens for i in chosen]) > 0
        factor = column([p.repetition_penalty for p in params])
        part = torch.where(seen, torch.where(part > 0, part / factor, part * factor), part)
    if any(p.presence_penalty or p.frequency_penalty for p in params):
        output = counts([rows[i].tokens[rows[i].prompt_len :] for i in chosen])
        part -= output * column([p.frequency_penalty for p in params])
        part -= (output > 0) * column([p.presence_penalty for p in params])
    logits[chosen] = part
