"""The scoring rules of ``select``: tables, invariants, and a toy language in which every text can be counted."""

from __future__ import annotations

import itertools
import math
import pickle

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from radixrt import InvalidRequest
from radixrt.sampling.choices import (
    METHODS,
    SMALLEST_SHARE,
    ChoicesMethod,
    Scored,
    check_choices,
    decide,
    exclusive_logprobs,
    greedy_token_selection,
    method_of,
    softmax,
    token_length_normalized,
    total_logprob,
    total_logprobs,
    unconditional_likelihood_normalized,
)

INF = math.inf


def scored(*rows: tuple[str, list[int], list[float]], alone: list[list[float]] | None = None) -> Scored:
    unconditional = None if alone is None else tuple(map(tuple, alone))
    return Scored(
        tuple(row[0] for row in rows), tuple(tuple(r[1]) for r in rows), tuple(tuple(r[2]) for r in rows), unconditional
    )


# ---- a language of which every text of a length can be listed: the next token depends on the last one

ALPHABET = 3
TABLE = [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.2, 0.7, 0.1]]  # the last row: at the start


def steps(tokens: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(math.log(TABLE[before][token]) for before, token in zip((ALPHABET, *tokens), tokens))


def made(sets: list[tuple[int, ...]]) -> Scored:
    names = tuple("".join(map(str, tokens)) for tokens in sets)
    return Scored(
        names, tuple(sets), tuple(map(steps, sets)), tuple(tuple(-1.0 - t for t in tokens) for tokens in sets)
    )


sequences = st.lists(st.integers(0, ALPHABET - 1), max_size=4).map(tuple)
choice_sets = st.lists(sequences, min_size=1, max_size=8, unique=True).map(made)


@given(choice_sets)
def test_exclusive_probability_counts_the_texts_whose_longest_choice_it_is(some: Scored) -> None:
    """Brute force: every text of 5 tokens goes to the longest choice it starts with."""
    expected = [0.0] * len(some.choices)
    for text in itertools.product(range(ALPHABET), repeat=5):
        starts = [i for i, tokens in enumerate(some.tokens) if text[: len(tokens)] == tokens]
        if starts:
            expected[max(starts, key=lambda i: len(some.tokens[i]))] += math.exp(sum(steps(text)))
    got = [math.exp(value) for value in exclusive_logprobs(some.tokens, some.logprobs)]
    assert got == pytest.approx(expected, abs=1e-9)
    assert sum(got) <= 1 + 1e-9
    assert total_logprob(some) == exclusive_logprobs(some.tokens, some.logprobs)


@given(choice_sets, st.sampled_from(METHODS), st.floats(0, 5), st.integers(0, 2**32))
def test_every_decision_is_sound(some: Scored, method: ChoicesMethod, temperature: float, seed: int) -> None:
    made_ = decide(some, method, temperature, seed)
    assert made_ == decide(some, method.name, temperature, seed)
    assert sum(made_.probabilities) == pytest.approx(1)
    assert made_.choice == some.choices[made_.index]
    assert made_.confidence == made_.probabilities[made_.index]
    assert made_.logprobs == pytest.approx([math.log(math.prod(map(math.exp, row))) for row in some.logprobs], abs=1e-9)
    if temperature == 0:
        assert made_.index == made_.scores.index(max(made_.scores))
        assert made_.confidence == max(made_.probabilities)


@given(choice_sets, st.randoms())
def test_order_does_not_matter(some: Scored, random: object) -> None:
    order = list(range(len(some.choices)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert some.unconditional is not None
    parts = (some.choices, some.tokens, some.logprobs, some.unconditional)
    other = Scored(*(tuple(part[i] for i in order) for part in parts))  # type: ignore[arg-type]
    for method in METHODS:
        scores = method(some)
        assert method(other) == pytest.approx([scores[i] for i in order])


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=6), st.floats(-100, 100))
def test_softmax_is_the_same_after_a_shift(scores: list[float], shift: float) -> None:
    assert softmax([score + shift for score in scores]) == pytest.approx(softmax(scores), abs=1e-9)


@given(st.lists(st.floats(-30, 0), min_size=1, max_size=6))
def test_single_tokens_are_chosen_alike_by_every_method_that_sees_only_the_prompt(values: list[float]) -> None:
    assume(math.fsum(map(math.exp, values)) <= 1)
    one = scored(*((str(i), [i], [value]) for i, value in enumerate(values)))
    best = values.index(max(values))
    for method in (greedy_token_selection, token_length_normalized, total_logprob):
        got = decide(one, method)
        assert got.index == best
        assert got.probabilities == pytest.approx(softmax(values))


# method, rows, scores
TABLES: list[tuple[ChoicesMethod, Scored, list[float]]] = [
    (token_length_normalized, scored(("a", [1, 2], [-1.0, -3.0]), ("b", [3], [-2.5])), [-2.0, -2.5]),
    (token_length_normalized, scored(("a", [1], [-1.0]), ("ab", [1, 2], [-1.0, -0.5])), [-1.0, -0.75]),
    (token_length_normalized, scored(("", [], []), ("b", [3], [math.log(0.25)])), [math.log(0.75), math.log(0.25)]),
    (total_logprob, scored(("a", [1, 2], [-1.0, -3.0]), ("b", [3], [-2.5])), [-4.0, -2.5]),
    (
        total_logprob,  # 0.5 starts with a; 0.4 of that goes on as ab, half of which as abc, which a has lost already
        scored(
            ("a", [1], [math.log(0.5)]),
            ("ab", [1, 2], [math.log(0.5), math.log(0.4)]),
            ("abc", [1, 2, 3], [math.log(0.5), math.log(0.4), math.log(0.5)]),
        ),
        [math.log(0.3), math.log(0.1), math.log(0.1)],
    ),
    (total_logprob, scored(("", [], [])), [0.0]),
    (total_logprob, scored(("a", [1], [-2.0]), ("ab", [1, 2], [-2.0, 0.0])), [-2.0 + math.log(SMALLEST_SHARE), -2.0]),
    (
        total_logprob,  # what is very unlikely is still shared out exactly
        scored(("a", [1], [-900.0]), ("ab", [1, 2], [-900.0, math.log(0.25)])),
        [-900 + math.log(0.75), -900 + math.log(0.25)],
    ),
    (total_logprob, scored(("a", [1], [-INF]), ("ab", [1, 2], [-INF, -1.0]), ("b", [2], [-1.0])), [-INF, -INF, -1.0]),
    (greedy_token_selection, scored(("a", [1, 2], [-1.0, -9.0]), ("b", [3, 4], [-1.5, -0.1])), [0.0, -0.5]),
    (
        greedy_token_selection,  # the first tokens are one; the second decides
        scored(("ax", [1, 2], [-1.0, -2.0]), ("ay", [1, 3], [-1.0, -0.5]), ("b", [4], [-3.0])),
        [-1.5, 0.0, -2.0],
    ),
    (
        greedy_token_selection,
        scored(("a", [1], [-1.0]), ("ab", [1, 2], [-1.0, -0.5])),
        [-0.5, 0.0],
    ),  # a goes on with -1
    (greedy_token_selection, scored(("a", [1], [-1.0]), ("ab", [1, 2], [-1.0, -1.5])), [0.0, -0.5]),
    (greedy_token_selection, scored(("", [], []), ("b", [3], [math.log(0.25)])), [0.0, math.log(0.25 / 0.75)]),
    (greedy_token_selection, scored(("", [], [])), [0.0]),
    (
        unconditional_likelihood_normalized,
        scored(("a", [1, 2], [-1.0, -3.0]), ("b", [3], [-2.5]), alone=[[-2.0, -4.0], [-2.0]]),
        [2.0, -0.5],
    ),
    (
        unconditional_likelihood_normalized,
        scored(("", [], []), ("b", [3], [math.log(0.25)]), alone=[[], [math.log(0.5)]]),
        [math.log(0.75 / 0.5), math.log(0.5)],
    ),
]


@pytest.mark.parametrize(("method", "some", "scores"), TABLES)
def test_scores(method: ChoicesMethod, some: Scored, scores: list[float]) -> None:
    assert method(some) == pytest.approx(scores)
    assert method_of(method.name) is method is method_of(method)


def test_the_first_of_equals_is_taken() -> None:
    equal = scored(("a", [1], [-1.0]), ("b", [2], [-1.0]), ("c", [3], [-2.0]))
    impossible = scored(("a", [1], [-INF]), ("b", [2], [-INF]))
    for method in (token_length_normalized, greedy_token_selection, total_logprob):
        assert decide(equal, method).index == 0
        assert decide(impossible, method).probabilities == (0.5, 0.5)


def test_what_only_the_prompt_makes_possible_has_a_finite_score() -> None:
    both = scored(("a", [1], [-1.0]), ("b", [2], [-INF]), alone=[[-INF], [-INF]])
    got = decide(both, "unconditional_likelihood_normalized")
    assert (got.index, got.confidence) == (0, 1.0)


def test_a_temperature_draws_in_proportion_and_a_seed_repeats() -> None:
    two = scored(("a", [1], [math.log(0.75)]), ("b", [2], [math.log(0.25)]))
    drawn = [decide(two, "total_logprob", 1.0, seed).index for seed in range(2000)]
    assert 400 < sum(drawn) < 600  # 500 expected; 5 standard deviations are 97
    hot = [decide(two, "total_logprob", 1e6, seed).index for seed in range(2000)]
    assert 890 < sum(hot) < 1110
    assert all(decide(two, "total_logprob", 1e-9, seed).index == 0 for seed in range(50))
    assert drawn == [decide(two, "total_logprob", 1.0, seed).index for seed in range(2000)]
    assert decide(two, "total_logprob", 5.0, 3).probabilities == pytest.approx((0.75, 0.25))


@given(st.lists(st.floats(-3, 0), min_size=2, max_size=2), st.lists(st.floats(-3, 0), min_size=2, max_size=2))
def test_choices_inside_one_another_share_what_starts_with_them(first: list[float], second: list[float]) -> None:
    """P(a) is what a and its longer forms have together."""
    longer = math.exp(second[0])
    other = math.log(max(1e-9, (1 - longer) * math.exp(second[1])))
    rows = scored(("a", [1], first[:1]), ("ab", [1, 2], [first[0], second[0]]), ("ac", [1, 3], [first[0], other]))
    total = sum(map(math.exp, exclusive_logprobs(rows.tokens, rows.logprobs)))
    assert total == pytest.approx(math.exp(total_logprobs(rows.logprobs)[0]), abs=1e-8)


# what was asked, field of the error, what its message says
WRONG_CHOICES = [
    ("abc", "choices", "must be a list of strings, not str"),
    (None, "choices", "must be a list of strings, not NoneType"),
    ({"a": 1}, "choices", "must be a list of strings, not dict"),
    ([], "choices", "at least one"),
    (["a", 1], "choices[1]", "must be a string, not int"),
    (["a", "b", "a"], "choices[2]", "'a': is choices[0] again"),
]


@pytest.mark.parametrize(("choices", "field", "says"), WRONG_CHOICES)
def test_choices_that_are_none(choices: object, field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_choices(choices)
    assert caught.value.field == field and says in str(caught.value)


def test_choices_that_are_some() -> None:
    assert check_choices(["", "a", "ab", "é"]) == ("", "a", "ab", "é")


@pytest.mark.parametrize(
    ("parts", "field", "says"),
    [
        ((("a", "a"), ((1,), (2,)), ((-1.0,), (-1.0,))), "choices[1]", "again"),
        ((("a", "b"), ((1,), (1,)), ((-1.0,), (-1.0,))), "choices", "'a' and 'b' have the same tokens"),
        ((("a", "b"), ((1,),), ((-1.0,),)), "tokens", "1 items for 2"),
        ((("a",), ((1,),), ()), "logprobs", "0 items for 1"),
        ((("a",), ((1,),), ((-1.0, -2.0),)), "logprobs[0]", "2 numbers for 1 tokens"),
        ((("a",), ((1,),), ((math.nan,),)), "logprobs[0]", "nan"),
        ((("a",), ((1,),), ((0.5,),)), "logprobs[0]", "0.5"),
        ((("a",), ((1,),), ((-1.0,),), ((),)), "unconditional[0]", "0 numbers for 1 tokens"),
    ],
)
def test_figures_that_do_not_fit(parts: tuple, field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Scored(*parts)
    assert caught.value.field == field and says in str(caught.value)


ONE = scored(("a", [1], [-1.0]))


@pytest.mark.parametrize(
    ("arguments", "field", "says"),
    [
        (("token_length_normalised",), "choices_method", "did you mean 'token_length_normalized'?"),
        ((3,), "choices_method", "must be one of token_length_normalized, "),
        (("unconditional_likelihood_normalized",), "choices_method", "without the prompt"),
        (("total_logprob", -1.0), "temperature", "at least 0"),
        (("total_logprob", math.nan), "temperature", "at least 0"),
        (("total_logprob", INF), "temperature", "at least 0"),
        (("total_logprob", True), "temperature", "at least 0"),
        (("total_logprob", 1.0, "x"), "seed", "whole number"),
        ((ChoicesMethod("short", lambda some: ()),), "choices_method", "one number"),
        ((ChoicesMethod("nan", lambda some: (math.nan,)),), "choices_method", "one number"),
    ],
)
def test_decisions_that_cannot_be_made(arguments: tuple, field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decide(ONE, *arguments)
    assert caught.value.field == field and says in str(caught.value)


def test_data_travels() -> None:
    assert pickle.loads(pickle.dumps(ONE)) == ONE
    assert [repr(method) for method in METHODS] == [method.name for method in METHODS]
    assert [method.name for method in METHODS if method.needs_unconditional] == ["unconditional_likelihood_normalized"]
