"""What a config.json may say and what not: every value is refused by its name at load, never by a trace or at a request."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from radixrt.config import EngineConfig
from radixrt.errors import InvalidRequest, ModelError, shown
from radixrt.model import runner
from radixrt.model.checkpoint import open_checkpoint
from radixrt.model.config import ModelConfig
from radixrt.model.rope import cos_sin_table, inverse_frequencies, longest_context
from radixrt.model.runner import ModelRunner
from tests.tiny import save_tiny

BASE: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
WRONG = [10**400, 10**5000, -1, math.nan, math.inf, "x", True, [], {}]


def build(changes: dict[str, Any]) -> None:
    config = ModelConfig.from_dict({**BASE, **changes})
    longest_context(config)
    assert bool(torch.isfinite(cos_sin_table(config, 64)).all())


def test_what_is_right_is_taken() -> None:
    for rope in ({}, YARN, LLAMA3, DYNAMIC, {"rope_type": "linear", "factor": 2.0}):
        build({"rope_scaling": rope})
    build({"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}})
    build({"rope_scaling": {**YARN, "attention_factor": 1.2, "mscale": None, "beta_fast": None}})
    build({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0})
    build({"tie_word_embeddings": None, "attention_bias": None})
    build({"rms_norm_eps": 1e-5, "rope_theta": 1})


FIELDS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in BASE if name != "model_type"),
    *((name, {}) for name in ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")),
    *((name, {"use_sliding_window": True, "sliding_window": 8}) for name in ("sliding_window", "max_window_layers")),
]
ROPE: list[tuple[str, dict[str, Any]]] = [
    *((name, YARN) for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")),
    *((name, YARN) for name in ("attention_factor", "mscale", "mscale_all_dim")),
    *((name, LLAMA3) for name in LLAMA3 if name != "rope_type"),
    ("factor", DYNAMIC),
    ("factor", {"rope_type": "linear"}),
]


@pytest.mark.parametrize("value", WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize(("name", "others"), FIELDS)
def test_a_wrong_number_is_refused_by_its_name(name: str, others: dict[str, Any], value: Any) -> None:
    with pytest.raises(ModelError, match=f"{name}=") as error:
        build({**others, name: value})
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("value", [*WRONG, 1e308], ids=range(len(WRONG) + 1))
@pytest.mark.parametrize(("name", "others"), ROPE)
def test_a_wrong_number_of_rope_is_refused_by_its_name(name: str, others: dict[str, Any], value: Any) -> None:
    with pytest.raises(ModelError, match=f"{name}="):
        build({"rope_scaling": {**others, name: value}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {**YARN, "beta_fast": 0}}, "beta_fast=0"),
        ({"rope_scaling": {**YARN, "beta_slow": 0}}, "beta_slow=0"),
        ({"rope_scaling": {**YARN, "attention_factor": 0}}, "attention_factor=0"),
        ({"rope_scaling": {**YARN, "truncate": "no"}}, "truncate='no'"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta=1 must be above 1"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 0}}, "low_freq_factor=0"),
        ({"rope_scaling": DYNAMIC, "head_dim": 2}, "head_dim above 2"),
        ({"rope_scaling": {"rope_type": 10**5000}}, "rope_type=an integer"),
        ({"rope_scaling": [10**5000]}, "rope_scaling="),
        ({"rope_theta": 1e-300}, "rope_theta=1e-300"),
        ({"hidden_act": [10**5000]}, "hidden_act="),
        ({"model_type": 10**5000}, "model_type=an integer"),
        ({"torch_dtype": ["float32"]}, "torch_dtype="),
        ({"dtype": 5}, "dtype=5"),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": [10**5000] * 3}, "layer_types has"),
        *(
            ({name: value}, f"{name}=.*must be true or false")
            for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
            for value in ("no", "false", 0, 1, [], {}, 10**5000)
        ),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(changes)


def test_every_scaling_is_finite_at_the_ends_of_its_ranges() -> None:
    for name, others in ROPE:
        for value in (1e-6, 1, 2, 1000, 2**31 - 1):
            try:
                config = ModelConfig.from_dict({**BASE, "rope_scaling": {**others, name: value}})
                frequencies, factor = inverse_frequencies(config, 512)
            except ModelError:
                continue
            assert bool(torch.isfinite(frequencies).all()), (name, value)
            assert 0 < factor < 1e6


# -- what is in the files and not in the config


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", path)
    return path


def load(path: Path, **settings: Any) -> ModelRunner:
    checkpoint = open_checkpoint(path)
    try:
        checkpoint.tokenizer()
        return ModelRunner(EngineConfig(**{"max_total_tokens": 64, "threads": 1, **settings}), checkpoint)
    finally:
        checkpoint.close()


def edited(source: Path, target: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor) -> Path:
    shutil.copytree(source, target, dirs_exist_ok=True)
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**values, **(config or {})}))
    state = load_file(target / "model.safetensors")
    added = {name.replace("__", "."): value for name, value in tensors.items()}
    save_file({**state, **added}, target / "model.safetensors")
    return target


HIDDEN = torch.zeros(64)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"num_hidden_layers": 2}, {}, r"model.layers.2.*and 8 more.*num_hidden_layers=2 leaves it out"),
        ({}, {"model__layers__0__self_attn__q_proj__bias": HIDDEN}, "layers.0.self_attn.q_proj.bias.* has no place"),
        ({}, {"model__layers__0__mlp__down_proj__bias": HIDDEN}, "mlp.down_proj.bias"),
        ({}, {"model__layers__1__self_attn__q_norm__weight": HIDDEN}, "q_norm.weight.*the llama family"),
        ({}, {"model__layers__1__self_attn__sinks": HIDDEN}, "sinks"),
        ({}, {"score__weight": HIDDEN}, "score.weight"),
        ({}, {"model__rotary_emb__inv_freq": HIDDEN}, None),
        ({}, {"model__layers__0__self_attn__rotary_emb__inv_freq": HIDDEN}, None),
        ({"tie_word_embeddings": True}, {}, None),
        ({"tie_word_embeddings": "no"}, {}, "tie_word_embeddings='no' must be true or false"),
    ],
)
def test_a_tensor_that_nobody_reads(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], message: str | None, tiny: Path, tmp_path: Path
) -> None:
    path = edited(tiny, tmp_path, config, **tensors)
    if message is None:
        load(path)
        return
    with pytest.raises(ModelError, match=message):
        load(path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [320, 400, 2**31, 10**30, 10**4000, [0, 320], -1, True, "x"], ids=shown)
def test_an_end_of_sequence_that_the_model_cannot_give(file: str, value: Any, tiny: Path, tmp_path: Path) -> None:
    path = edited(tiny, tmp_path)
    values = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps({**values, "eos_token_id": value}))
    with pytest.raises(ModelError, match=f"{file}: eos_token_id="):
        load(path)
    (path / file).write_text(json.dumps({**values, "eos_token_id": [0, 319]}))
    load(path)


def test_files_may_begin_with_a_byte_order_mark(tiny: Path, tmp_path: Path) -> None:
    path = edited(tiny, tmp_path)
    for file in path.glob("*.json"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    load(path)


# -- what the machine can hold


def test_a_pool_larger_than_the_machine(tiny: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"max_total_tokens=2147483647: takes .* GB, this machine has"):
        load(tiny, max_total_tokens=2**31 - 1)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate\nmore")])
def test_a_pool_that_cannot_be_had(error: Exception, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(runner, "KVStore", fail)
    with pytest.raises(InvalidRequest, match=r"max_total_tokens=64: .* cannot be had") as info:
        load(tiny)
    assert "\n" not in str(info.value)


def test_threads_that_torch_does_not_take(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("Overflow when unpacking long")

    monkeypatch.setattr(torch, "set_num_threads", fail)
    with pytest.raises(InvalidRequest, match="threads=1: "):
        load(tiny)


def test_numbers_of_numpy_are_settings() -> None:
    config = EngineConfig(page_size=np.int64(4), kv_memory_fraction=np.float32(0.5))  # type: ignore[arg-type]
    assert (type(config.page_size), type(config.kv_memory_fraction)) == (int, float)
