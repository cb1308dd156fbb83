"""The sampler against transformers' logits processors, and against itself in other batches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from radixrt.request import SamplingParams
from radixrt.sampling.sampler import sample
from radixrt.sampling.spec import Row, SamplingSpec, uniform

VOCAB = 1000


def row(params: SamplingParams, tokens: list[int] = (1, 2, 3), prompt_len: int = 2, seed: int = 0, end=()) -> Row:
    return Row(SamplingSpec.of(params, seed, end), np.array(tokens, dtype=np.int32), prompt_len)


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * scale


def allowed(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers leaves with a probability, and which."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k > 0:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps(None, logits.clone()).softmax(-1)


FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 300},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.2},
    {"min_p": 0.0001},
    {"top_k": 50, "top_p": 0.7},
    {"top_k": 40, "min_p": 0.05},
    {"top_k": 400, "top_p": 0.99, "min_p": 0.01},
    {},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution_that_transformers_leaves(filters: dict, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, **filters)
    logits = logits_of(1)
    expected = allowed(logits, params)[0].double()
    draws = 4000
    rows = [row(params, seed=seed) for seed in range(draws)]
    chosen = torch.tensor([s.token for s in sample(logits.expand(draws, -1).clone(), rows)])
    counts = torch.bincount(chosen, minlength=VOCAB).double()
    assert counts[expected == 0].sum() == 0
    # total variation of an empirical distribution of n draws over k cells is about sqrt(k / (2 pi n))
    cells = float((expected.sqrt().sum()) ** 2)
    assert 0.5 * (counts / draws - expected).abs().sum() < 2.5 * (cells / (6.28 * draws)) ** 0.5 + 0.01


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.permutations(range(len(FILTERS))), st.integers(0, 2**63))
def test_a_row_is_drawn_alike_alone_and_in_any_batch(seed: int, order: list[int], own_seed: int) -> None:
    logits = logits_of(seed, len(FILTERS))
    rows = [
        row(
            SamplingParams(temperature=0.2 * i, presence_penalty=0.1 * (i % 3), logit_bias={i: 2.0}, **f),
            seed=own_seed + i,
        )
        for i, f in enumerate(FILTERS)
    ]
    alone = [sample(logits[i : i + 1].clone(), [rows[i]])[0].token for i in range(len(rows))]
    together = sample(logits[list(order)].clone(), [rows[i] for i in order])
    assert [s.token for s in together] == [alone[i] for i in order]


@pytest.mark.parametrize("filters", [{"top_k": 900}, {"top_p": 0.95}, {"min_p": 0.5}], ids=str)
def test_flat_distributions_are_not_cut_at_the_candidates(filters: dict) -> None:
    params = SamplingParams(**filters)
    logits = logits_of(8, scale=0.05)
    kept = int((allowed(logits, params) > 0).sum())
    chosen = {s.token for s in sample(logits.expand(6000, -1).clone(), [row(params, seed=i) for i in range(6000)])}
    assert kept > 800 and len(chosen) > 0.95 * kept


def test_greedy_is_argmax_and_temperature_near_zero_goes_there() -> None:
    logits = logits_of(3, 4)
    for temperature in (0.0, 1e-9, 1e-320):
        rows = [row(SamplingParams(temperature=temperature)) for _ in range(4)]
        assert [s.token for s in sample(logits.clone(), rows)] == logits.argmax(-1).tolist()


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = logits_of(4)
    tokens = [5, 5, 9, 100]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), logits.clone())
    boosted = dict.fromkeys((5, 9, 100, 7), 40.0)
    for token in boosted:
        ours = logits.clone()
        params = SamplingParams(temperature=0, repetition_penalty=1.7, logit_bias={token: 40.0})
        assert sample(ours, [row(params, tokens, 2)])[0].token == token
        assert torch.isclose(ours[0, token] - 40.0, expected[0, token], atol=1e-5)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.zeros((1, 8))
    params = SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.25)
    sample(logits, [row(params, [1, 1, 1, 2, 3, 3, 3], prompt_len=3)])
    assert logits[0].tolist() == [0, 0, -0.75, -1.25, 0, 0, 0, 0]


def test_min_tokens_holds_back_every_end() -> None:
    params = SamplingParams(temperature=0, min_tokens=3)
    for tokens, end in (([1, 2, 4], False), ([1, 2, 4, 4, 4], True)):
        logits = torch.zeros((1, 8))
        logits[0, 6] = 9.0
        logits[0, 5] = 5.0
        token = sample(logits, [row(params, tokens, 2, end={6})])[0].token
        assert (token == 6) is end


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = logits_of(5)
    expected = logits[0].log_softmax(-1)
    params = SamplingParams(temperature=1.5, top_k=3, logit_bias={7: 100.0}, logprobs=4)
    result = sample(logits.clone(), [row(params)])[0]
    assert result.token == 7 and result.logprobs is not None
    assert result.logprobs.chosen.logprob == pytest.approx(float(expected[7]), abs=1e-5)
    assert result.logprobs.chosen.rank == int((expected > expected[7]).sum()) + 1
    assert [t.token_id for t in result.logprobs.top] == expected.topk(4).indices.tolist()
    assert [t.logprob for t in result.logprobs.top] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-5)


def test_a_row_without_a_usable_logit_fails_alone() -> None:
    logits = logits_of(6, 4)
    logits[1, 3] = float("nan")
    logits[2] = float("-inf")
    results = sample(logits.clone(), [row(SamplingParams(temperature=1.0, top_p=0.9), seed=i) for i in range(4)])
    assert [r.error is None for r in results] == [True, False, False, True]


def test_uniform_is_uniform_and_differs_by_seed_and_place() -> None:
    draws = np.array([[uniform(seed, index) for index in range(200)] for seed in range(100)])
    assert draws.min() >= 0 and draws.max() < 1
    assert len(np.unique(draws)) == draws.size
    histogram = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert abs(histogram - draws.size / 20).max() < 5 * (draws.size / 20) ** 0.5
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.03
