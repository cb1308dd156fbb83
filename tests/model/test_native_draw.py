"""Tokens drawn by the native head, beside the sampler on the same logits; and that a row's draw depends on nothing but the row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from radixrt.model.native_decoder import UNSETTLED
from radixrt.ops.native import native
from radixrt.request import SamplingParams
from radixrt.sampling.sampler import sample
from radixrt.sampling.spec import Row, SamplingSpec
from radixrt.sampling.wishes import wishes_of
from tests.model.test_native_decoder import Computer, Ints

pytestmark = pytest.mark.skipif(native is None, reason="radixrt was installed without a C++ compiler")

VOCAB = 5003  # more than the candidates of both threads, and no multiple of a block
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 256},
    {"top_k": 300},
    {"top_p": 0.3},
    {"top_p": 0.95, "min_p": 0.02},
    {"min_p": 0.3},
    {"top_p": 0.9999},
]
CHANGES = [
    {},
    {"repetition_penalty": 1.7},
    {"frequency_penalty": 0.6, "presence_penalty": 0.4},
    {"logit_bias": {7: 5.0, 4000: -3.0, 5002: 4.0}},
    {"min_tokens": 9},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids="{} threads".format)
def computer(request: pytest.FixtureRequest, path: Path) -> Computer:
    return Computer(path, threads=request.param)


def fill(computer: Computer, seed: int, scale: float, rows: int) -> Ints:
    """Hidden states whose logits spread by about ``scale``, and their slots."""
    random = torch.Generator().manual_seed(seed)
    slots = np.arange(rows, dtype=np.int32)
    computer.store.hidden[:rows] = torch.randn((rows, 64), generator=random) * scale
    spread = computer.logits(slots).std(dim=-1, keepdim=True)
    computer.store.hidden[:rows] *= scale / spread
    return slots


def row(seed: int, temperature: float, **params: object) -> Row:
    tokens = np.random.default_rng(seed).integers(0, VOCAB, 60).astype(np.int32)
    spec = SamplingSpec.of(SamplingParams(temperature=temperature, **params), seed, {11, 12})
    return Row(spec, tokens[:57] if seed % 2 else tokens, 50)


def masks_for(rows: int, seed: int) -> list[Ints | None]:
    random = np.random.default_rng(seed)
    words = (VOCAB + 31) // 32
    masks: list[Ints | None] = []
    for index in range(rows):
        mask = random.integers(-(2**31), 2**31, words).astype(np.int32)
        if index % 4 == 1:
            mask &= random.integers(-(2**31), 2**31, words).astype(np.int32)
        if index % 4 == 2:  # a few tokens
            mask = np.zeros(words, dtype=np.int32)
            mask[random.integers(0, VOCAB // 32, 3)] = 1 << int(random.integers(0, 31))
        masks.append(None if index % 4 == 3 else mask)
    return masks


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 4.0]), st.sampled_from([0.0, 0.4, 1.0, 3.0]), st.booleans())
def test_draws_are_the_samplers(computer: Computer, seed: int, scale: float, temperature: float, masked: bool) -> None:
    rows = [row(seed + i, temperature, **(f | c)) for i, (f, c) in enumerate((f, c) for f in FILTERS for c in CHANGES)]
    slots = fill(computer, seed, scale, len(rows))
    masks = masks_for(len(rows), seed) if masked else [None] * len(rows)
    ids, values = computer.native.draw(slots, wishes_of(rows, VOCAB), masks)
    expected = sample(computer.logits(slots), rows, {i: mask for i, mask in enumerate(masks) if mask is not None})
    others = []
    for index, (one, token, value) in enumerate(zip(expected, ids, values, strict=True)):
        assert np.isfinite(value) == (one.error is None)
        if token == UNSETTLED:  # only where the filters may keep more than the candidates
            assert temperature > 0 and rows[index].spec.params.top_k in (0, 300)
        elif one.error is None and token != one.token:
            others.append((index, rows[index].spec.params))
    # a chance as near to the border of two tokens as sums are rounded falls on either side of it; once in some thousand rows
    assert len(others) <= (temperature > 0), others
    for order in (slots[::-1], slots[:1], slots[3:20]):
        some = [rows[i] for i in order]
        again, same = computer.native.draw(
            np.ascontiguousarray(order), wishes_of(some, VOCAB), [masks[i] for i in order]
        )
        assert np.array_equal(again, ids[order]) and np.array_equal(same, values[order])


def test_draws_follow_the_distribution(computer: Computer) -> None:
    slots = np.repeat(fill(computer, 3, 3.0, 1), 4000)
    chances = computer.logits(slots[:1]).div(0.8).softmax(-1)[0].double().numpy()
    rows = [row(0, 0.8) for _ in slots]
    wishes = wishes_of(rows, VOCAB)._replace(chance=(np.arange(len(slots)) + 0.5) / len(slots))
    ids, _ = computer.native.draw(slots, wishes, [None] * len(slots))
    assert np.all(np.diff(ids) >= 0)  # the inverse of the cumulated distribution
    counts = np.bincount(ids, minlength=VOCAB) / len(slots)
    assert np.abs(np.cumsum(counts) - np.cumsum(chances)).max() < 1.01 / len(slots)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_row_without_a_usable_logit_fails_alone(computer: Computer, wrong: float) -> None:
    rows = [row(i, 1.0, **filters) for i, filters in enumerate(FILTERS)]
    slots = fill(computer, 1, 2.0, len(rows))
    wishes = wishes_of(rows, VOCAB)
    want, _ = computer.native.draw(slots, wishes, [None] * len(rows))
    computer.store.hidden[2] = wrong
    nothing = np.zeros((VOCAB + 31) // 32, dtype=np.int32)
    ids, values = computer.native.draw(slots, wishes, [None, None, None, nothing] + [None] * (len(rows) - 4))
    good = [i for i in range(len(rows)) if i not in (2, 3)]
    assert np.isfinite(values).tolist() == [i in good for i in range(len(rows))]
    assert np.array_equal(ids[good], want[good])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("edit_ids", np.array([VOCAB], dtype=np.int32), "edit_ids: out of range"),
        ("edit_end", np.array([2, 1], dtype=np.int32), "edit_end"),
        ("chance", np.zeros(3), "chance"),
        ("temperature", np.zeros(2), "temperature"),
    ],
)
def test_bad_wishes_are_refused_by_name(computer: Computer, field: str, value: Ints, message: str) -> None:
    slots = fill(computer, 1, 2.0, 2)
    wishes = wishes_of([row(0, 1.0, logit_bias={3: 1.0}), row(1, 1.0)], VOCAB)
    assert wishes is not None
    with pytest.raises(ValueError, match=message):
        computer.native.draw(slots, wishes._replace(**{field: value}), [None, None])
