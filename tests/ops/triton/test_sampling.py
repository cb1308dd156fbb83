"""The draw beside ``sampler.sample``, token for token, and beside a stable sort where values are tied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from radixrt.ops.triton import sampling
from radixrt.ops.triton.sampling import Edits, draw
from radixrt.request import SamplingParams
from radixrt.sampling.penalties import adjust
from radixrt.sampling.sampler import sample
from radixrt.sampling.spec import Row, SamplingSpec, uniform
from radixrt.sampling.wishes import wishes_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of inf - inf and the like

VOCAB = 5003  # more than one part, no multiple of anything
FILTERS: list[dict] = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 300},
    {"top_k": VOCAB},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"top_p": 1e-9},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"min_p": 0.001},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 400, "top_p": 0.99, "min_p": 0.01},
    {"top_p": 0.95, "min_p": 0.02},
]
SHAPES = {
    "random": lambda r: r.standard_normal(VOCAB) * 3,
    "peaked": lambda r: r.standard_normal(VOCAB) * 3 + 25 * (np.arange(VOCAB) == r.integers(VOCAB)),
    "flat": lambda r: r.standard_normal(VOCAB) * 0.02,
    "wide": lambda r: r.standard_normal(VOCAB) * 60,
    "few": lambda r: np.where(r.random(VOCAB) < 0.002, r.standard_normal(VOCAB), -np.inf),
}


def row(
    params: SamplingParams, seed: int, tokens: Sequence[int] = (1, 2, 3), prompt_len: int = 2, end: Sequence[int] = ()
) -> Row:
    return Row(SamplingSpec.of(params, seed, end), np.array(tokens, dtype=np.int32), prompt_len)


def drawn(logits: torch.Tensor, rows: list[Row], masks: torch.Tensor | None = None, mask_rows: torch.Tensor | None = None) -> tuple[list[int], torch.Tensor]:  # fmt: skip
    """What the kernels choose, given what the engine would give them."""
    wishes = wishes_of(rows, logits.shape[1])
    logits = logits.clone()
    if wishes is None:
        tokens, best = draw(logits, masks, mask_rows)
    else:
        array = torch.from_numpy
        edits = Edits(*map(array, (wishes.edit_end, wishes.edit_ids, wishes.edit_factor, wishes.edit_add)))
        tokens, best = draw(
            logits,
            masks,
            mask_rows,
            array(wishes.temperature),
            array(wishes.top_k),
            array(wishes.top_p),
            array(wishes.min_p),
            array(wishes.chance),
            edits,
        )
    return tokens.tolist(), best


def expected(logits: torch.Tensor, rows: list[Row], masks: dict[int, np.ndarray] | None = None) -> list[int]:
    return [s.token for s in sample(logits.clone(), rows, masks)]


def by_sorting(logits: np.ndarray, temperature: float, chance: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> int:  # fmt: skip
    """The draw by a stable sort: of equal logits the lowest id first, where ``torch.topk`` leaves the order open."""
    order = np.arange(len(logits))
    filtered = top_k > 0 or top_p < 1 or min_p > 0
    if filtered:
        order = np.lexsort((order, -logits))[: top_k or None]
    weights = np.exp((logits[order] - logits.max()) / np.float32(temperature), dtype=np.float32).astype(np.float64)
    before = np.cumsum(weights) - weights
    if filtered:
        enough = np.float32(top_p) * np.float32(weights.sum()) if top_p < 1 else np.inf
        keep = (np.arange(len(order)) == 0) | ((before < enough) & (weights >= np.float32(min_p)))
        weights = weights * keep
    until = np.cumsum(weights)
    return int(order[min(np.searchsorted(until, chance * until[-1], side="right"), np.flatnonzero(weights)[-1])])


def with_filters(logits: np.ndarray, temperature: float, chances: np.ndarray, filters: list[dict]) -> list[int]:
    """What the kernels draw from rows with these filters."""
    wishes = [
        torch.tensor([f.get(key, none) for f in filters])
        for key, none in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    ]
    heat = torch.full((len(filters),), temperature)
    arrays = (heat, wishes[0].int(), *wishes[1:], torch.from_numpy(chances))
    return draw(torch.from_numpy(logits), None, None, *arrays)[0].tolist()


@pytest.fixture(params=[8192, 48], ids=["collected", "whole"])
def candidates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many tokens of a row are collected; where the filters may keep more, the whole row is searched."""
    monkeypatch.setattr(sampling, "_CANDIDATES", request.param)
    return request.param


@pytest.mark.parametrize(
    ("shape", "candidates"),
    [("random", 8192), ("random", 48), ("flat", 8192), ("peaked", 48), ("wide", 48), ("few", 8192)],
    indirect=["candidates"],
)
def test_tokens_are_those_of_the_sampler(shape: str, candidates: int) -> None:
    random = np.random.default_rng(3)
    rows = [
        row(SamplingParams(temperature=(0.7, 1.0, 1.8)[i % 3], **filters), seed=7 * i)
        for i, filters in enumerate(FILTERS)
    ]
    logits = torch.from_numpy(np.stack([SHAPES[shape](random) for _ in rows])).float()
    tokens, best = drawn(logits, rows)
    assert tokens == expected(logits, rows)
    assert torch.equal(best, logits.max(dim=-1).values)


@pytest.mark.usefixtures("candidates")
@pytest.mark.parametrize("step", [0.5, 100.0])
def test_of_tied_tokens_the_lowest_ids_are_kept_and_drawn_first(step: float) -> None:
    random = np.random.default_rng(5)
    filters = [f for f in FILTERS if f]
    logits = np.float32(np.round(random.standard_normal((len(filters), 300)) / step) * step)  # all equal for 100
    chances = random.random(len(filters))
    assert with_filters(logits, 0.8, chances, filters) == [
        by_sorting(*row, **f) for *row, f in zip(logits, [0.8] * len(filters), chances, filters)
    ]


@pytest.mark.parametrize("chance", [0.0, 0.25, 0.5, 1 - 2.0**-53])
def test_the_ends_of_the_distribution(chance: float) -> None:
    logits = torch.tensor([-1e30, 0.0, 0.0, 0.0, 0.0, -float("inf")]).expand(5, -1).contiguous()
    heat, chances = torch.ones(5), torch.full((5,), chance, dtype=torch.float64)
    top_k, top_p, min_p = (
        torch.tensor([0, 3, 0, 0, 9]).int(),
        torch.tensor([1.0, 1.0, 0.5, 1.0, 0.8]),
        torch.tensor([0, 0, 0, 1.0, 0.1]),
    )
    tokens, _ = draw(logits, None, None, heat, top_k, top_p, min_p, chances)
    assert tokens.tolist() == [1 + int(chance * kept) for kept in (4, 3, 2, 4, 4)]
    assert draw(logits, None, None, heat, chances=chances)[0].tolist() == [1 + int(chance * 4)] * 5


def test_every_cut_is_where_the_sorted_one_is() -> None:
    logits = np.float32(np.random.default_rng(7).permutation(24) * -0.3)  # each in a bin of its own, or nearly
    filters: list[dict] = [{"top_k": k} for k in (1, 2, 3, 4, 6, 9, 24, 30)]
    filters += [{"top_p": p} for p in (0.1, 0.3, 0.5, 0.7, 0.9, 0.99)] + [{"min_p": p} for p in (0.9, 0.5, 0.1, 0.01)]
    filters += [{"top_k": 5, "top_p": 0.7}, {"top_k": 9, "min_p": 0.3}]
    tokens = with_filters(np.tile(logits, (len(filters), 1)), 1.0, np.full(len(filters), 1 - 2.0**-53), filters)
    assert tokens == [by_sorting(logits, 1.0, 1 - 2.0**-53, **f) for f in filters]  # the last one that is kept
    # two values of the same weight, inverted where the second begins
    assert with_filters(np.float32([[0.99999994, 1.0]]), 10.0, np.array([0.5]), [{"top_k": 2}]) == [0]


def test_greedy_rows_go_with_drawn_ones() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((4, VOCAB))).float()
    logits[0, [4200, 77]] = 9.0  # the lowest of tied ones
    rows = [
        row(SamplingParams(temperature=t, top_p=p), seed=5) for t, p in ((0, 1.0), (0, 0.5), (1e-9, 0.9), (1.0, 1.0))
    ]
    tokens, _ = drawn(logits, rows)
    assert tokens == expected(logits, rows) and tokens[0] == 77
    assert drawn(logits, rows[:1] * 4)[0] == logits.argmax(dim=-1).tolist()


def bits(allowed: np.ndarray) -> np.ndarray:
    """``[V]`` of bool as a mask's words."""
    packed = np.packbits(allowed, bitorder="little")
    return np.pad(packed, (0, -len(packed) % 4)).view(np.int32)


@pytest.mark.usefixtures("candidates")
def test_masked_tokens_never_come() -> None:
    random = np.random.default_rng(1)
    shares = [0.5, 0.001, 0.9, 0.02]
    masks = np.stack([bits(random.random(VOCAB) < share) for share in shares] + [bits(np.arange(VOCAB) == VOCAB - 1)])
    chosen = [0, 2, -1, 1, 3, 4, 0, -1, 1]
    filters = [
        {"top_p": 0.9},
        {},
        {"top_k": 30},
        {"min_p": 0.01},
        {"top_k": 200, "top_p": 0.8},
        {"top_p": 0.5},
        {},
        {},
        {"top_k": 20},
    ]
    rows = [row(SamplingParams(temperature=0.0 if i == 6 else 1.3, **f), seed=i) for i, f in enumerate(filters)]
    logits = torch.from_numpy(random.standard_normal((len(rows), VOCAB + 9)) * 2).float()[:, :VOCAB]  # rows lie apart
    allowed = {i: masks[m] for i, m in enumerate(chosen) if m >= 0}
    tokens, best = drawn(logits, rows, torch.from_numpy(masks), torch.tensor(chosen).int())
    assert tokens == expected(logits, rows, allowed) and tokens[5] == VOCAB - 1
    assert best[5] == logits[5, -1] and best[2] == logits[2].max()
    own = np.stack([allowed.get(i, bits(np.ones(VOCAB, dtype=bool))) for i in range(len(rows))])
    assert drawn(logits, rows, torch.from_numpy(own))[0] == tokens


def test_rows_without_a_usable_logit_have_none_and_hurt_no_other() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.from_numpy(np.random.default_rng(2).standard_normal((6, VOCAB))).float()
    logits[0, 4500], logits[1, 3], logits[2], logits[4, 8] = nan, inf, -inf, nan
    masks = np.stack([bits(np.zeros(VOCAB, dtype=bool)), bits(np.arange(VOCAB) != 8)])
    for params in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 4}):
        rows = [row(SamplingParams(**params), seed=i) for i in range(6)]
        tokens, best = drawn(logits, rows, torch.from_numpy(masks), torch.tensor([-1, -1, -1, 0, 1, -1]).int())
        assert best.isfinite().tolist() == [False, False, False, False, True, True]
        found = sample(logits.clone(), rows, {3: masks[0], 4: masks[1]})
        assert [s.error is None for s in found] == best.isfinite().tolist()
        assert tokens == [0] * 4 + [s.token for s in found[4:]]


def test_penalties_bias_and_banned_ends_are_those_of_the_sampler() -> None:
    random = np.random.default_rng(4)
    changes: list[dict] = [
        {"repetition_penalty": 1.7},
        {"frequency_penalty": 0.5, "presence_penalty": 0.25},
        {"logit_bias": {7: 5.0, 4000: -3.0, VOCAB - 1: 4.0}},
        {"min_tokens": 900, "max_tokens": 999},
        {"repetition_penalty": 0.5, "frequency_penalty": 1.0, "logit_bias": {3: 1.0}, "top_p": 0.9},
        {},
    ]
    tokens = random.integers(0, 3000, 2500)  # more edits than one program takes at once
    logits = torch.from_numpy(random.standard_normal((2 * len(changes), VOCAB))).float()
    logits[:, :700] += 2
    logits[:, 11] += 20.0
    rows = [
        row(SamplingParams(temperature=temperature, **change), 3 * i, tokens, 2000, end=(11, 12))
        for temperature in (0.0, 1.0)
        for i, change in enumerate(changes)
    ]
    changed = logits.clone()
    adjust(changed, rows)
    found = drawn(logits, rows)[0]
    assert found == expected(logits, rows)
    assert found[5] == 11 and found[3] != 11
    wishes = wishes_of(rows, VOCAB)
    assert wishes is not None
    draw(logits, edits=Edits(*map(torch.from_numpy, wishes[-4:])))
    torch.testing.assert_close(logits, changed, rtol=1e-6, atol=1e-6)


def test_a_row_is_drawn_alike_alone_and_in_half_precision() -> None:
    logits = torch.from_numpy(np.random.default_rng(6).standard_normal((6, VOCAB)) * 3).half()
    heat, chances = torch.full((6,), 0.9), torch.tensor([uniform(i, 0) for i in range(6)], dtype=torch.float64)
    top_k, top_p, min_p = (
        torch.tensor([0, 0, 20, 0, 50, 0]).int(),
        torch.tensor([1, 0.9, 1, 1, 0.9, 0.2]),
        torch.tensor([0, 0, 0, 0.1, 0, 0]),
    )
    wishes = (heat, top_k, top_p, min_p, chances)
    together = draw(logits, None, None, *wishes)[0]
    assert torch.equal(together, draw(logits.float(), None, None, *wishes)[0])
    for i in (0, 1, 4):
        assert draw(logits[i : i + 1], None, None, *(w[i : i + 1] for w in wishes))[0] == together[i]


def test_small_shapes_and_wrong_calls() -> None:
    none = torch.empty(0, 5)
    assert draw(none)[0].shape == draw(none)[1].shape == (0,)
    one = torch.tensor([[0.5]])
    single = [torch.tensor([v]) for v in (1.0, 0.5, 0.0)]
    assert draw(one, None, None, single[0], torch.tensor([3]).int(), *single[1:], torch.tensor([0.9]).double())[0] == 0
    with pytest.raises(ValueError, match="temperature, chances"):
        draw(one, temperature=single[0])
    with pytest.raises(ValueError, match="top_k, top_p, min_p"):
        draw(one, temperature=single[0], chances=single[0].double(), top_p=single[1])
    with pytest.raises(ValueError, match="edits need float32"):
        draw(one.half(), edits=Edits(*([torch.zeros(1).int()] * 2), *([torch.zeros(1)] * 2)))
