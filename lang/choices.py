"""How ``select`` scores its choices. The rules live with the engine, which decides without asking the program."""

from __future__ import annotations

from radixrt.sampling.choices import (
    METHODS,
    ChoicesMethod,
    Decision,
    Scored,
    decide,
    greedy_token_selection,
    method_of,
    token_length_normalized,
    total_logprob,
    unconditional_likelihood_normalized,
)

__all__ = [
    "METHODS",
    "ChoicesMethod",
    "Decision",
    "Scored",
    "decide",
    "greedy_token_selection",
    "method_of",
    "token_length_normalized",
    "total_logprob",
    "unconditional_likelihood_normalized",
]
