"""TritonOps under whole models: tiny ones of each kind of family beside the same weights on the torch reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixrt.model.checkpoint import open_checkpoint
from radixrt.model.config import ModelConfig
from radixrt.model.decoder import load_decoder
from radixrt.model.kv_store import KVStore
from radixrt.ops.interface import IntArray, Ops
from radixrt.ops.torch.ops import TorchOps
from radixrt.ops.triton.ops import TritonOps
from radixrt.ops.triton.plan import LEAST_SHARED
from tests.tiny import save_tiny

CPU = torch.device("cpu")
OPERATIONS = {name for name, member in vars(Ops).items() if callable(member) and not name.startswith("_")}

# What each has that those before have not, and so is asked of its operations.
FAMILIES = {
    "llama": {"linear", "rms_norm", "add_rms_norm", "gated", "rope_store", "plan_attention", "attention", "store"},
    "gemma2": {"rms_norm", "attention"},  # soft-cap, windows, norms behind the blocks
    "qwen3_moe": {"moe", "rms_norm"},  # norms of heads
    "gpt_oss": {"moe", "attention"},  # sinks, windows, biases, swiglu_oai
    "starcoder2": {"layer_norm", "activate"},
    "phi3-longrope": {"rope_store"},  # of a part of each head
    "smollm3": {"store"},  # layers without rotation
}


def steps(config: ModelConfig, source: Any, ops: Ops, length: int) -> torch.Tensor:
    """Logits after a step with two prompts, one of ``length``, one of decodes below it, and one with both; slots lie anywhere."""
    decoder = load_decoder(config, source, ops, torch.float32, 256)
    store = KVStore(config, 512, torch.float32, torch.float32, CPU)
    for tensor in (*store.k, *store.v, store.hidden):
        tensor.fill_(float("nan"))  # whoever reads what nobody wrote is found out
    draw = np.random.default_rng(0)
    free = draw.permutation(512).astype(np.int32).tolist()
    sequences: list[list[int]] = []  # slots
    found = []

    def step(*parts: tuple[int, int]) -> None:
        """``parts``: (sequence, how many tokens more)."""
        tokens, positions, writes, slots = [], [], [], []
        for which, count in parts:
            have = sequences[which]
            positions += range(len(have), len(have) + count)
            new = [free.pop() for _ in range(count)]
            have += new
            writes += new
            slots += have
            tokens += draw.integers(1, config.vocab_size, count).tolist()
        q_lens = [count for _, count in parts]
        kv_lens = [len(sequences[which]) for which, _ in parts]
        arrays: list[IntArray] = [
            np.array(a, dtype=np.int32) for a in (tokens, positions, writes, q_lens, kv_lens, slots)
        ]
        decoder.forward(*arrays, store)
        found.append(decoder.logits(store.hidden[arrays[2].tolist()]))

    with torch.inference_mode():
        sequences += [[], []]
        step((0, length), (1, 7))
        sequences += [list(sequences[0]), list(sequences[0])]  # forks
        step((0, 1), (1, 1), (2, 1), (3, 2))
        step((1, 9), (2, 1), (3, 1))
    return torch.cat(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_models_compute_what_the_reference_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(name, tmp_path)
    source = open_checkpoint(tmp_path)
    config = ModelConfig.from_dict(source.config)
    length = LEAST_SHARED + 7 if name == "llama" else 22  # from that on a prefix is computed for its sequences together
    expected = steps(config, source, TorchOps(CPU, torch.float32), length)
    called: set[str] = set()

    def counted(run: Callable[..., Any], operation: str) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            called.add(operation)
            return run(*arguments)

        return counting

    ops = TritonOps(CPU, torch.float32)
    for operation in OPERATIONS:
        monkeypatch.setattr(ops, operation, counted(getattr(ops, operation), operation), raising=False)
    found = steps(config, source, ops, length)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert called >= FAMILIES[name]
    source.close()


def test_every_operation_is_among_those() -> None:
    assert set().union(*FAMILIES.values()) == OPERATIONS
