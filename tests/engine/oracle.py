"""What transformers computes, and a way to read the engine's logits at every position of a prompt."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from radixrt import Engine, SamplingParams


def reference_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """``[len(ids), V]``, from one pass without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def reference_greedy(model: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """Greedy tokens, each from a pass over the whole sequence: no cache, no generation code."""
    tokens = list(ids)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(ids) :]


def engine_logits(engine: Engine, ids: list[int]) -> torch.Tensor:
    """``[len(ids), V]`` of the KV and hidden states that the engine holds for ``ids`` (all cached)."""
    import numpy as np

    assert engine._tree is not None
    match = engine._tree.match(np.array(ids, dtype=np.int32))
    assert match.length == len(ids) // engine.config.page_size * engine.config.page_size
    logits = engine._runner.logits(match.slots)
    engine._tree.unlock(match.node)
    return logits


GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPT_ONLY = SamplingParams(max_tokens=0)
