"""What the sampler needs to know of each row of a batch, in a form ready for arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixrt.request import SamplingParams

IntArray = npt.NDArray[np.int32]
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """One sample's parameters. ``banned_early``: ids not allowed before ``params.min_tokens`` tokens."""

    params: SamplingParams
    seed: int
    bias_ids: npt.NDArray[np.int64]
    bias_values: npt.NDArray[np.float32]
    banned_early: npt.NDArray[np.int64]

    @classmethod
    def of(cls, params: SamplingParams, seed: int, end_ids: Iterable[int]) -> SamplingSpec:
        """``end_ids``: every id that ends the sample."""
        return cls(
            params=params,
            seed=seed & _MASK,
            bias_ids=np.fromiter(params.logit_bias.keys(), dtype=np.int64, count=len(params.logit_bias)),
            bias_values=np.fromiter(params.logit_bias.values(), dtype=np.float32, count=len(params.logit_bias)),
            banned_early=np.array(sorted(end_ids), dtype=np.int64)
            if params.min_tokens
            else np.empty(0, dtype=np.int64),
        )

    @property
    def penalized(self) -> bool:
        p = self.params
        return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One row to sample: its parameters, the tokens so far (prompt and output) and how many are the prompt."""

    spec: SamplingSpec
    tokens: IntArray
    prompt_len: int

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def greedy(self) -> bool:
        """The token is the likeliest of the allowed ones, and nothing else of the logits is wanted."""
        spec = self.spec
        return (
            spec.params.temperature == 0
            and spec.params.logprobs is None
            and not spec.penalized
            and not len(spec.bias_ids)
            and not (len(spec.banned_early) and self.generated < spec.params.min_tokens)
        )


def mix(a: int, b: int) -> int:
    """A 64-bit hash of two numbers: the finalizer of SplitMix64 (Steele, Lea & Flood 2014)."""
    z = (a + (b + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, index: int) -> float:
    """The ``index``-th draw of ``seed``: uniform in [0, 1), 53 bits, whatever else is drawn."""
    return (mix(mix(seed, 0), index) >> 11) * 2.0**-53
