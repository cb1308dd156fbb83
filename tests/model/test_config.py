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
from transformers import AutoConfig

from radixrt.config import EngineConfig
from radixrt.errors import InvalidRequest, ModelError, shown
from radixrt.model import runner
from radixrt.model.checkpoint import open_checkpoint
from radixrt.model.config import ModelConfig
from radixrt.model.registry import FAMILIES
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
        ({"rope_scaling": {**YARN, "truncate": None}}, "truncate=None"),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 64}, "original_max_position_embeddings": 32},
            "original_max_position_embeddings=32 must be the same as that of the rope, 64",
        ),
        (
            {"layer_types": ["sliding_attention"] * BASE["num_hidden_layers"], "sliding_window": 8},
            "layer_types has 'sliding_attention', and use_sliding_window is not true",
        ),
        ({"is_causal": False}, "is_causal=False is not supported by the qwen2 family"),
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


# Of each family something that is right, and what is refused: what would change the result and is not honoured is named.
SIZES = {name: value for name, value in BASE.items() if name != "model_type"}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "type": "su"}
LOCAL = {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}
EACH: list[tuple[str, dict[str, Any], str | None]] = [
    ("mixtral", {"num_local_experts": 4}, None),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts=0"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be an integer from 1 to 8"),
    ("qwen2_moe", EXPERTS, None),
    ("qwen2_moe", {**EXPERTS, "sliding_window": 0}, None),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": None}, "shared_expert_intermediate_size="),
    ("qwen2_moe", {**EXPERTS, "qkv_bias": "yes"}, "qkv_bias='yes' must be true or false"),
    ("qwen2_moe", {**EXPERTS, "decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [0, "x"]}, "mlp_only_layers="),
    ("qwen3_moe", {**EXPERTS, "norm_topk_prob": 1}, "norm_topk_prob=1 must be true or false"),
    ("qwen3_moe", {**EXPERTS, "attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0 .* the qwen3_moe family"),
    ("gemma2", {}, None),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}, None),
    ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping=-1"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma2", {"hidden_activation": "relu"}, "hidden_activation='relu' .*gelu_pytorch_tanh"),
    ("gemma2", {"layer_types": ["full_attention"] * 2}, "layer_types must list 3 layers"),
    ("gemma3_text", {"rope_parameters": LOCAL}, None),
    ("gemma3_text", {"rope_local_base_freq": 0}, "rope_local_base_freq=0"),
    ("gemma3_text", {"rope_parameters": {**LOCAL, "sliding_attention": 5}}, "sliding_attention=5 must be an object"),
    ("gemma3_text", {"rope_parameters": {"chunked_attention": {}}}, "'chunked_attention' of its own"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ("gemma3", {"text_config": SIZES}, None),
    ("gemma3", {}, "text_config=None must be an object"),
    ("llama", {"rope_parameters": LOCAL}, "'full_attention' of its own"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ("llama", {"logits_scaling": 8.0}, "logits_scaling=8.0"),
    ("llama", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("phi3", {"partial_rotary_factor": 0.5}, None),
    ("phi3", {"partial_rotary_factor": 0.4}, None),
    ("phi3", {"partial_rotary_factor": 0.1}, "partial_rotary_factor=0.1"),
    ("phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 64}, None),
    ("phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 1}, "original_max_position_embeddings=1"),
    ("phi3", {"rope_scaling": {**LONG, "original_max_position_embeddings": 64, "long_factor": [2.0]}}, "long_factor="),
    (
        "phi3",
        {"rope_scaling": {**LONG, "original_max_position_embeddings": 64, "short_factor": [0] * 8}},
        "short_factor=",
    ),
    ("olmo2", {"clip_qkv": None}, None),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier=0"),
    ("granite", {"logits_scaling": "8"}, "logits_scaling='8'"),
    ("starcoder2", {"norm_epsilon": 2}, "norm_epsilon=2"),
    ("starcoder2", {"use_bias": 1}, "use_bias=1 must be true or false"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers="),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, None),
    ("gpt_oss", {"num_local_experts": 4}, None),
    ("gpt_oss", {"num_local_experts": 4, "swiglu_limit": 5.0}, "swiglu_limit=5.0 must be 7.0"),
    ("gpt_oss", {"num_local_experts": 4, "sliding_window": -1}, "sliding_window=-1"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), EACH)
def test_fields_of_the_families(kind: str, changes: dict[str, Any], message: str | None) -> None:
    changes = {"model_type": kind, **changes}
    if message is None:
        build(changes)
        return
    with pytest.raises(ModelError, match=message):
        build(changes)


def test_what_a_config_leaves_out_is_what_the_family_means_by_it() -> None:
    """Beside transformers' own classes, with a config of sizes only."""
    for kind in (name for name in FAMILIES if name not in ("llama", "qwen2", "qwen3")):
        theirs = AutoConfig.for_model(kind, **SIZES)
        needed = (
            "num_experts",
            "num_local_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
        )
        given = {name: getattr(theirs, name) for name in needed if hasattr(theirs, name)}
        ours = ModelConfig.from_dict({"model_type": kind, **SIZES, **given})
        same = {
            "tie_embeddings": theirs.tie_word_embeddings,
            "head_dim": getattr(theirs, "head_dim", None) or 16,
            "norm_eps": getattr(theirs, "rms_norm_eps", None) or theirs.norm_epsilon,
            "attention_softcap": getattr(theirs, "attn_logit_softcapping", None),
            "logits_softcap": getattr(theirs, "final_logit_softcapping", None),
            "qkv_bias": getattr(
                theirs, "qkv_bias", getattr(theirs, "use_bias", getattr(theirs, "attention_bias", False))
            ),
        }
        assert {name: getattr(ours, name) for name in same} == same, kind
        types = getattr(theirs, "layer_types", None)
        if types is not None:
            assert [window is not None for window in ours.windows] == [one == "sliding_attention" for one in types], (
                kind
            )
        rope = theirs.rope_parameters
        assert ours.ropes[0].theta == rope.get("full_attention", rope)["rope_theta"], kind


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
TIED = torch.rand(320, 64)


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
        ({"tie_word_embeddings": True}, {}, "'lm_head.weight' differs from 'model.embed_tokens.weight'"),
        ({"tie_word_embeddings": True}, {"lm_head__weight": TIED, "model__embed_tokens__weight": TIED.clone()}, None),
        ({"tie_word_embeddings": True}, {"lm_head__weight": TIED[:9]}, "'lm_head.weight' differs from"),
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_total_tokens": None, "kv_memory_fraction": 1e-12}, "kv_memory_fraction=1e-12: .* one page of 1, not 0"),
        ({"max_total_tokens": 3, "page_size": 4}, "max_total_tokens=3: .* one page of 4, not 3"),
    ],
)
def test_a_pool_without_a_page_names_the_setting(settings: dict[str, Any], message: str, tiny: Path) -> None:
    with pytest.raises(InvalidRequest, match=message):
        load(tiny, **settings)
