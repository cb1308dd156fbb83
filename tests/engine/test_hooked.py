"""Models that run through transformers' attention interface: their logits and tokens are transformers' own, and what cannot run is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.models.phi import modeling_phi

from radixrt.errors import InvalidRequest, ModelError
from radixrt.model.registry import HOOKED
from tests.engine.oracle import GREEDY, PROMPT_ONLY, engine_logits, reference_greedy, reference_logits
from tests.tiny import SIZES, VOCAB, save_bytes_tokenizer

rng = random.Random(1)
LONG = [rng.randrange(8, VOCAB) for _ in range(90)]

# What a family's config needs beside the sizes.
MORE: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 11, "head_dim": 16, "sliding_window_pattern": 2, "layer_types": None},
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "exaone4": {"sliding_window": 11, "sliding_window_pattern": 2},
    "gemma": {"head_dim": 16},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "gpt_neox": {"num_key_value_heads": None},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo3": {"sliding_window": 11},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 1},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "seed_oss": {"head_dim": 16},
}


def save(kind: str, directory: Path, auto: Any = AutoModelForCausalLM, **more: Any) -> PreTrainedModel:
    torch.manual_seed(len(kind))
    config = AutoConfig.for_model(kind, **{**SIZES, **MORE.get(kind, {}), **more})
    model = auto.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.eval().save_pretrained(directory)
    save_bytes_tokenizer(directory)
    return model


@pytest.mark.parametrize("kind", HOOKED)
def test_logits_and_tokens_are_those_of_transformers(kind: str, tmp_path: Path, make_engine) -> None:
    model = save(kind, tmp_path)
    engine = make_engine(str(tmp_path), chunked_prefill_size=24)
    assert engine.model_info.kernels == "transformers" and engine.model_info.family == kind
    engine.generate(LONG, PROMPT_ONLY)  # in chunks
    stream = engine.stream(LONG[60:80], GREEDY)  # decodes while the others are prefilled
    decoded = [*next(stream).token_ids]
    others = [[*LONG[:n], *LONG[n + 5 : 80]] for n in (0, 20, 60)]  # after cached prefixes, in one batch
    engine.generate(others, PROMPT_ONLY)
    for ids in (LONG, *others):
        assert (engine_logits(engine, ids) - reference_logits(model, ids)).abs().max() < 1e-4
    for output in stream:
        decoded += output.token_ids
    assert decoded == reference_greedy(model, LONG[60:80], len(decoded)) and len(decoded) == GREEDY.max_tokens


def test_windows_are_read_from_the_masks(tmp_path: Path, make_engine) -> None:
    save("cohere2", tmp_path)
    assert make_engine(str(tmp_path))._runner.model.windows == (11, None, 11)


def shift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Feed-forwards that look at the token before, as a convolution does."""
    forward = modeling_phi.PhiMLP.forward
    monkeypatch.setattr(modeling_phi.PhiMLP, "forward", lambda self, x: forward(self, x) + x.roll(1, dims=-2))


def look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention with one more argument."""
    forward = modeling_phi.PhiAttention.forward

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs, position_bias=torch.zeros(1))

    monkeypatch.setattr(modeling_phi.PhiAttention, "forward", changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shift, "computed in pieces it differs from transformers' own result .* keep more than keys and values"),
        (look, "its attention has position_bias, which paged attention does not"),
    ],
)
def test_a_model_that_only_running_tells(change: Any, message: str, tmp_path: Path, make_engine, monkeypatch) -> None:
    save("phi", tmp_path)
    change(monkeypatch)
    with pytest.raises(ModelError, match=message):
        make_engine(str(tmp_path))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bert", {}, "its attention sees later tokens"),
    ("bloom", {"n_layer": 2, "n_head": 4}, "do not use the attention interface"),
    (
        "falcon_h1",
        {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16},
        "layers of 'hybrid'",
    ),
    ("mamba", {"state_size": 4}, "layers of 'linear_attention', which keep more"),
    (
        "phi",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type=dynamic changes",
    ),
]


@pytest.mark.parametrize(("kind", "more", "message"), REFUSED, ids=[kind for kind, *_ in REFUSED])
def test_refused_by_name_with_the_reason(
    kind: str, more: dict[str, Any], message: str, tmp_path: Path, make_engine
) -> None:
    save(kind, tmp_path, **more)
    with pytest.raises(ModelError, match=message):
        make_engine(str(tmp_path))


def test_an_encoder_and_a_decoder(tmp_path: Path, make_engine) -> None:
    save("t5", tmp_path, AutoModel, d_model=64, d_ff=96, d_kv=16, num_layers=1, num_heads=4)
    with pytest.raises(ModelError, match="model_type='t5' is not supported: it is an encoder and a decoder"):
        make_engine(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "model_type='own' .*code of its own"),
        ({"model_type": "phi4"}, r"model_type='phi4' is not supported; supported are llama.*did you mean"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantized weights are read for the families"),
        ({"vision_config": {}}, "parts beside a text model"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000: there are only 47 tensors"),
        ({"vocab_size": 10**9}, "of a model of .* numbers, its tensors have .*: vocab_size, hidden_size or"),
        ({"vocab_size": 321}, r"tensor .* has shape \[320\], the config says \[321\]"),
        ({"hidden_size": "x"}, "Field 'hidden_size' expected int, got str"),
        ({"n_layer": 1e9}, "n_layer=1000000000.0: there are only"),
        ({"text_config": {"num_hidden_layers": 10**12}}, "num_hidden_layers=1000000000000: there are only"),
    ],
)
def test_what_a_config_tells(changes: dict[str, Any], message: str, tmp_path: Path, make_engine) -> None:
    save("phi", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=message):
        make_engine(str(tmp_path))


def test_an_adapter_is_of_another_model(tmp_path: Path, make_engine) -> None:
    save("phi", tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/other"}')
    with pytest.raises(ModelError, match=r"adapter_config.json: adapters of a phi model are not supported"):
        make_engine(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("model.final_layernorm.weight"), "final_layernorm.weight' is missing"),
        (lambda state: state.update({"model.more.weight": torch.zeros(2)}), "model.more.weight' would be ignored"),
    ],
)
def test_tensors_that_are_missing_or_not_read(change: Any, message: str, tmp_path: Path, make_engine) -> None:
    save("phi", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        make_engine(str(tmp_path))


def test_native_kernels_are_not_for_them(tmp_path: Path, make_engine) -> None:
    save("phi", tmp_path)
    with pytest.raises(InvalidRequest, match="kernels=native: they compute llama.* not the phi family"):
        make_engine(str(tmp_path), kernels="native")
