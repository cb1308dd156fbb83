"""Recorded decode steps: sizes and padding, and that a replay computes what the step itself computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixrt.model.checkpoint import open_checkpoint
from radixrt.model.config import ModelConfig
from radixrt.model.decoder import Decoder, load_decoder
from radixrt.model.graphs import DecodeGraphs, graph_sizes, keys_for, padded
from radixrt.model.kv_store import KVStore
from radixrt.ops.torch.ops import TorchOps
from tests.tiny import save_tiny

SLOTS = 100  # the one behind them is nobody's


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (12, (1, 2, 4, 8, 12)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
        (33, (1, 2, 4, 8, 16, 24, 32, 33)),
    ],
)
def test_sizes(most: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(most) == sizes


@given(st.integers(1, 300), st.integers(1, 400))
def test_a_batch_is_padded_to_the_smallest_size_that_holds_it(most: int, count: int) -> None:
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == most
    found = padded(count, sizes)
    assert found == min((size for size in sizes if size >= count), default=None)
    assert found is None or found < 2 * count or found - count < 8


@pytest.mark.parametrize(
    ("size", "longest", "keys"),
    [
        (1, 131072, 131072),
        (16, 131072, 131072),
        (64, 131072, 32768),
        (256, 131072, 8192),
        (4096, 131072, 4096),
        (9, 50, 50),
    ],
)
def test_long_sequences_are_recorded_in_small_batches(size: int, longest: int, keys: int) -> None:
    assert keys_for(size, longest) == keys


class FixedPlan:
    """Stands in for a plan at fixed addresses: padding attends to the scratch slot."""

    def __init__(self, decoder: Decoder, window: int | None) -> None:
        self.decoder, self.window = decoder, window
        self.plan: Any = self

    def update(self, q_lens: np.ndarray, kv_lens: np.ndarray, kv_slots: np.ndarray) -> None:
        config, spare = self.decoder.config, int((q_lens == 0).sum())
        assert kv_lens.sum() == len(kv_slots) and not kv_lens[q_lens == 0].any()
        self.made = self.decoder.ops.plan_attention(
            np.ones_like(q_lens),
            np.maximum(kv_lens, 1),
            np.concatenate((kv_slots, np.full(spare, SLOTS))).astype(np.int32),
            config.num_heads,
            config.num_kv_heads,
            self.window,
        )


class Stand:
    """A tiny decoder, its KV, and its recorded steps; ``record`` replays by running the step on what its inputs hold then."""

    def __init__(self, directory: Path, sizes: tuple[int, ...], longest: int = 50) -> None:
        checkpoint = open_checkpoint(directory)
        config = ModelConfig.from_dict(checkpoint.config, "tiny")
        device = torch.device("cpu")
        self.decoder = load_decoder(config, checkpoint, TorchOps(device, torch.float32), torch.float32, 128)
        self.store = KVStore(config, SLOTS + 1, torch.float32, torch.float32, device)
        for tensor in (*self.store.k, *self.store.v, self.store.hidden):
            tensor.zero_()
        self.recorded: list[int] = []
        self.replays: list[int] = []
        self.graphs = DecodeGraphs(
            sizes,
            longest,
            SLOTS,
            device,
            lambda size, keys: {window: FixedPlan(self.decoder, window) for window in self.decoder.windows},
            self.step,
            self.record,
        )

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, plans: Any) -> None:
        made = {window: plan.made for window, plan in plans.items()}
        self.decoder.compute(tokens, positions, slots, made, self.store)
        self.last = len(tokens)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        self.recorded.append(self.last)

        def replay() -> None:
            step()
            self.replays.append(self.last)

        return replay


def ints(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.fixture(scope="module", params=["llama", "mistral-window"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, path)
    return path


def batch(rng: np.random.Generator, count: int) -> tuple[np.ndarray, ...]:
    """Decodes of ``count`` sequences of 1 to 9 tokens, each in slots of its own."""
    kv_lens = ints(rng.integers(1, 10, count))
    slots = ints(rng.permutation(SLOTS)[: kv_lens.sum()])
    last = np.cumsum(kv_lens) - 1
    return ints(rng.integers(8, 300, count)), ints(kv_lens - 1), slots[last], ints([1] * count), kv_lens, slots


def test_a_replay_computes_what_the_step_computes(directory: Path) -> None:
    rng = np.random.default_rng(0)
    stand, plain = Stand(directory, graph_sizes(8)), Stand(directory, (1,))
    assert stand.recorded == [8, 4, 2, 1]
    for count in (1, 3, 8, 2, 5, 8, 1):  # a smaller batch after a larger one must not see what is left of it
        arrays = batch(rng, count)
        tokens = torch.from_numpy(arrays[0]) if count % 2 else arrays[0]
        assert stand.graphs.run(tokens, *arrays[1:])
        plain.decoder.forward(*arrays, plain.store)  # type: ignore[arg-type]
        for mine, expected in zip((*stand.store.k, *stand.store.v), (*plain.store.k, *plain.store.v), strict=True):
            torch.testing.assert_close(mine[:SLOTS], expected[:SLOTS])
        torch.testing.assert_close(stand.store.hidden[:SLOTS], plain.store.hidden[:SLOTS])
    assert stand.replays == [1, 4, 8, 2, 8, 8, 1]


def test_what_does_not_fit_is_left_alone(directory: Path) -> None:
    rng = np.random.default_rng(1)
    stand = Stand(directory, graph_sizes(4), longest=9)
    before = stand.store.hidden.clone()
    tokens, positions, write_slots, q_lens, kv_lens, slots = batch(rng, 5)
    assert not stand.graphs.run(tokens, positions, write_slots, q_lens, kv_lens, slots)  # too many
    assert not stand.graphs.run(  # a chunk of a prefill among them
        tokens[:3], positions[:3], write_slots[:3], ints([1, 2]), ints([4, 5]), slots[:9]
    )
    assert not stand.graphs.run(tokens[:1], ints([9]), write_slots[:1], ints([1]), ints([10]), slots[:10])  # too long
    assert stand.replays == [] and torch.equal(stand.store.hidden, before)
