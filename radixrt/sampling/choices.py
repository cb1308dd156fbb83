"""The scoring rules of ``select``: pure functions from the log-probabilities of the choices' tokens to a decision.

Here P(c) is the product of the probabilities of c's tokens: that the text *starts with* c. Where c is the beginning of
another choice, P(c) holds that one's share too. The *exclusive* probability of c is what is left: that the text starts
with c and goes on as none of the choices which extend it, ``P(c) - sum of P(d)`` over the shortest choices d that
extend c. The empty choice starts every text: P is 1, and what is left is that none of the others comes.

Invariants: nothing here knows a model; a score is a number or minus infinity, never NaN; the best score is the choice,
of equal ones the first; exclusive probabilities of one set sum to at most 1.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixrt.errors import InvalidRequest, nearest, shown

# What is left of P(c) is a difference of measured numbers: below this share of P(c) it is rounding, not probability.
SMALLEST_SHARE = 1e-12


@dataclass(frozen=True, slots=True)
class Scored:
    """Choices and what a model gave each of their tokens.

    Fields:
        choices: the texts. tokens: the tokens of each. logprobs: natural log-probability of each token after the prompt
        and the choice's tokens before it. unconditional: the same without the prompt; ``None``: not measured.

    Raises:
        InvalidRequest: choices that are none (see ``check_choices``), two with the same tokens, lengths that differ, a
            log-probability that is NaN or above 0.
    """

    choices: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    unconditional: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        check_choices(self.choices)
        first: dict[tuple[int, ...], int] = {}
        if len(self.tokens) != len(self.choices):
            raise InvalidRequest("tokens", f"holds {len(self.tokens)} items for {len(self.choices)} choices")
        for i, tokens in enumerate(self.tokens):
            other = first.setdefault(tuple(tokens), i)
            if other != i:
                both = f"{shown(self.choices[other])} and {shown(self.choices[i])}"
                raise InvalidRequest("choices", f"{both} have the same tokens: nothing tells them apart")
        _check_logprobs("logprobs", self.logprobs, self.tokens)
        if self.unconditional is not None:
            _check_logprobs("unconditional", self.unconditional, self.tokens)


@dataclass(frozen=True, slots=True)
class Decision:
    """Which choice it is, and why.

    Fields:
        index, choice: the one taken. scores: of each choice, by the method. logprobs: of each choice, the sum over its
        tokens. probabilities: softmax of the scores, whatever the temperature. confidence: the probability of the
        choice taken.
    """

    index: int
    choice: str
    scores: tuple[float, ...]
    logprobs: tuple[float, ...]
    probabilities: tuple[float, ...]
    confidence: float


@dataclass(frozen=True, slots=True)
class ChoicesMethod:
    """A way to score choices. Calling it gives one score for each choice; the highest wins.

    Fields:
        name: what ``select(choices_method=...)`` may be given instead. rule: what computes the scores.
        needs_unconditional: ``Scored.unconditional`` must be there.
    """

    name: str
    rule: Callable[[Scored], tuple[float, ...]]
    needs_unconditional: bool = False

    def __call__(self, scored: Scored) -> tuple[float, ...]:
        """The score of each choice.

        Raises:
            InvalidRequest: the method needs unconditional log-probabilities and there are none.
        """
        if self.needs_unconditional and scored.unconditional is None:
            raise InvalidRequest(
                "choices_method", f"={self.name}: needs the choices' log-probabilities without the prompt"
            )
        return self.rule(scored)

    def __repr__(self) -> str:
        return self.name


def check_choices(choices: object) -> tuple[str, ...]:
    """The choices, if they can be chosen among. One may be empty, or the beginning of another.

    Raises:
        InvalidRequest: not a list or tuple of strings, none at all, one of them twice.
    """
    if not isinstance(choices, list | tuple):
        raise InvalidRequest("choices", f"={shown(choices)}: must be a list of strings, not {type(choices).__name__}")
    if not choices:
        raise InvalidRequest("choices", f"={choices!r}: must hold at least one string")
    seen: dict[str, int] = {}
    for i, choice in enumerate(choices):
        if not isinstance(choice, str):
            raise InvalidRequest(f"choices[{i}]", f"={shown(choice)}: must be a string, not {type(choice).__name__}")
        if seen.setdefault(choice, i) != i:
            raise InvalidRequest(
                f"choices[{i}]", f"={shown(choice)}: is choices[{seen[choice]}] again; give each one once"
            )
    return tuple(choices)


def total_logprobs(logprobs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """log P of each choice: that the text starts with it. 0 for the empty one."""
    return tuple(math.fsum(steps) if steps and min(steps) > -math.inf else _sum(steps) for steps in logprobs)


def exclusive_logprobs(tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Log of each choice's exclusive probability, at least ``log(SMALLEST_SHARE)`` below its log P. O(n log n) for n
    choices.
    """
    totals = total_logprobs(logprobs)
    taken = [0.0] * len(tokens)  # the share of P(c) that goes to the choices which extend c
    longer: list[
        int
    ] = []  # choices each of which begins the next; in sorted order what begins a sequence comes before it
    for i in sorted(range(len(tokens)), key=lambda i: tuple(tokens[i])):
        while longer and tuple(tokens[i][: len(tokens[longer[-1]])]) != tuple(tokens[longer[-1]]):
            longer.pop()
        if longer and totals[i] > -math.inf:
            # Only the steps behind the shorter one: what both share cancels exactly, however unlikely it is.
            taken[longer[-1]] += math.exp(_sum(logprobs[i][len(tokens[longer[-1]]) :]))
        longer.append(i)
    return tuple(total + math.log(max(1.0 - share, SMALLEST_SHARE)) for total, share in zip(totals, taken))


def method_of(method: str | ChoicesMethod) -> ChoicesMethod:
    """The method of that name, or the method itself.

    Raises:
        InvalidRequest: no such method (naming the nearest), or neither a name nor a method.
    """
    if isinstance(method, ChoicesMethod):
        return method
    if not isinstance(method, str):
        names = ", ".join(known.name for known in METHODS)
        raise InvalidRequest("choices_method", f"={shown(method)}: must be one of {names}, not {type(method).__name__}")
    known = {each.name: each for each in METHODS}
    if method not in known:
        raise InvalidRequest("choices_method", f"={shown(method)}: no such method{nearest(method, known)}")
    return known[method]


def decide(
    scored: Scored,
    method: str | ChoicesMethod = "token_length_normalized",
    temperature: float = 0.0,
    seed: int | None = None,
) -> Decision:
    """Take the best choice by ``method``; of equal ones the first.

    Args:
        temperature: above 0, the choice is drawn from ``softmax(scores / temperature)`` instead.
        seed: draws with one seed are the same; ``None``: a new draw each time.

    Raises:
        InvalidRequest: an unknown method or one that lacks its data, a temperature that is negative or not finite.
    """
    rule = method_of(method)
    bad_type = isinstance(temperature, bool) or not isinstance(temperature, int | float)
    if bad_type or not 0 <= temperature < math.inf:
        raise InvalidRequest("temperature", f"={shown(temperature)}: must be a number of at least 0")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise InvalidRequest("seed", f"={shown(seed)}: must be a whole number or None")
    scores = tuple(rule(scored))
    if len(scores) != len(scored.choices) or any(not score < math.inf for score in scores):
        raise InvalidRequest("choices_method", f"={rule.name}: must give one number below infinity for each choice")
    probabilities = softmax(scores)
    if temperature > 0:
        index = random.Random(seed).choices(range(len(scores)), weights=softmax(scores, temperature))[0]
    else:
        index = scores.index(max(scores))
    logprobs = total_logprobs(scored.logprobs)
    return Decision(index, scored.choices[index], scores, logprobs, probabilities, probabilities[index])


def softmax(scores: Sequence[float], temperature: float = 1.0) -> tuple[float, ...]:
    """Numbers that sum to 1, in the ratio ``exp(score / temperature)``; alike where every score is minus infinity."""
    best = max(scores)
    if best == -math.inf:
        return (1 / len(scores),) * len(scores)
    weights = [math.exp((score - best) / temperature) for score in scores]
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


# ---- the rules


def _length_normalized(scored: Scored) -> tuple[float, ...]:
    return _means(scored)


def _greedy(scored: Scored) -> tuple[float, ...]:
    means = _means(scored)
    left = list(range(len(scored.choices)))
    scores = [0.0] * len(left)
    for step in range(max(map(len, scored.logprobs), default=0) or 1):
        row = {i: scored.logprobs[i][step] if step < len(scored.logprobs[i]) else means[i] for i in left}
        best = max(row.values())
        for i in left:
            if row[i] < best:
                scores[i] = row[i] - best
        left = [i for i in left if row[i] == best]
        if len(left) == 1:
            break
    return tuple(scores)


def _against_unconditional(scored: Scored) -> tuple[float, ...]:
    assert scored.unconditional is not None
    given, alone = _ended(scored.tokens, scored.logprobs), _ended(scored.tokens, scored.unconditional)
    return tuple(a if a == -math.inf else min(a - b, _MOST) for a, b in zip(given, alone))


def _total(scored: Scored) -> tuple[float, ...]:
    return exclusive_logprobs(scored.tokens, scored.logprobs)


_MOST = 1e9  # the score of what is impossible without the prompt and possible with it


def _means(scored: Scored) -> tuple[float, ...]:
    totals = _ended(scored.tokens, scored.logprobs)
    return tuple(total / max(1, len(steps)) for total, steps in zip(totals, scored.logprobs))


def _ended(tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """log P of each choice, and of the empty one its exclusive log-probability: that none of the others comes."""
    totals = total_logprobs(logprobs)
    if all(tokens):
        return totals
    exclusive = exclusive_logprobs(tokens, logprobs)
    return tuple(total if ids else alone for total, ids, alone in zip(totals, tokens, exclusive))


def _sum(steps: Sequence[float]) -> float:
    return -math.inf if -math.inf in steps else math.fsum(steps)


def _check_logprobs(field: str, logprobs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]) -> None:
    if len(logprobs) != len(tokens):
        raise InvalidRequest(field, f"holds {len(logprobs)} items for {len(tokens)} choices")
    for i, (steps, ids) in enumerate(zip(logprobs, tokens)):
        if len(steps) != len(ids):
            raise InvalidRequest(f"{field}[{i}]", f"holds {len(steps)} numbers for {len(ids)} tokens")
        for step in steps:
            if not step <= _ROUNDING:
                raise InvalidRequest(f"{field}[{i}]", f"holds {shown(step)}: a log-probability is at most 0")


_ROUNDING = 1e-3  # how far above 0 a log-probability may come out of float32

token_length_normalized = ChoicesMethod("token_length_normalized", _length_normalized)
"""The mean log-probability of a choice's tokens: long choices are not at a loss. What is the beginning of another
choice is scored as it stands. The empty choice has no tokens to take the mean of: its score is the log of its exclusive
probability."""

greedy_token_selection = ChoicesMethod("greedy_token_selection", _greedy)
"""Token by token: only the choices whose next token is the likeliest stay, until one is left. A choice that has ended
goes on with the mean of its log-probabilities (the empty one: with the log of its exclusive probability). What stays to
the end scores 0; the others score how far their token was behind, in log-probability, where they fell out."""

unconditional_likelihood_normalized = ChoicesMethod(
    "unconditional_likelihood_normalized", _against_unconditional, needs_unconditional=True
)
"""log P of a choice after the prompt less its log P without: what the prompt adds. Common words are at no advantage.
The empty choice takes part with its exclusive probability, with and without the prompt."""

total_logprob = ChoicesMethod("total_logprob", _total)
"""The log of each choice's exclusive probability: exactly how likely the model is to write this choice and none that
extends it. For choices none of which begins another, that is the sum of the tokens' log-probabilities. What the
extensions leave counts as at least ``SMALLEST_SHARE`` of the choice's own P."""

METHODS = (token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized, total_logprob)
