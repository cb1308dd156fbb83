"""Tiny random models of every family, saved the way Hugging Face saves them, with transformers' own model as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from radixrt.model.registry import FAMILIES

VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,  # far apart logits: an argmax that rounding hardly turns
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
_CAPS = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}  # low enough to bite
_FACTORS = {"short_factor": [1.1, 1.0, 1.3, 1.7, 2.0, 2.4], "long_factor": [1.5, 2.0, 2.5, 3.0, 4.0, 5.0]}

CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-tied-biased": (LlamaConfig, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-mha-wide-head": (LlamaConfig, {"num_key_value_heads": 4, "head_dim": 32}),
    "llama-rope-llama3": (
        LlamaConfig,
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-rope-linear": (LlamaConfig, _rope("linear", factor=4.0)),
    "llama-rope-dynamic": (LlamaConfig, _rope("dynamic", factor=4.0)),
    "llama-rope-yarn": (LlamaConfig, _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "mistral-window": (MistralConfig, {"sliding_window": 17, "head_dim": 16}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-window": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3-biased": (Qwen3Config, {"head_dim": 32, "attention_bias": True}),
    "mixtral": (MixtralConfig, {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": (MixtralConfig, {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 13}),
    "qwen2_moe": (Qwen2MoeConfig, _EXPERTS),
    "qwen2_moe-window": (
        Qwen2MoeConfig,
        {**_EXPERTS, "use_sliding_window": True, "sliding_window": 11, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": (Qwen3MoeConfig, {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen3_moe-window": (Qwen3MoeConfig, {**_EXPERTS, "head_dim": 16, "use_sliding_window": True, "sliding_window": 9}),
    "gemma2": (Gemma2Config, {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 14, **_CAPS}),
    "gemma3_text": (
        Gemma3TextConfig,
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": 14,
            "sliding_window_pattern": 3,
            "final_logit_softcapping": 6.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "phi3": (Phi3Config, {"sliding_window": 19}),
    "phi3-longrope": (
        Phi3Config,
        {"original_max_position_embeddings": 1024, **_rope("longrope", partial_rotary_factor=0.75, **_FACTORS)},
    ),
    "olmo2": (Olmo2Config, {"attention_bias": True}),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 1.7,
        },
    ),
    "starcoder2": (Starcoder2Config, {"sliding_window": 21}),
    "starcoder2-unbiased": (Starcoder2Config, {"use_bias": False, "tie_word_embeddings": False}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
    "smollm3-window": (
        SmolLM3Config,
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 15, "attention_bias": True},
    ),
    "gpt_oss": (
        GptOssConfig,
        {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 12},
    ),
}


NATIVE = sorted(name for name in CONFIGS if FAMILIES[name.partition("-")[0]].native)  # what the native kernels compute
_ORDER = [*NATIVE, *(name for name in CONFIGS if name not in NATIVE)]


def save_tiny(name: str, directory: Path, **more: Any) -> PreTrainedModel:
    """Save the tiny model ``name``, with ``more`` changes, to ``directory`` and return transformers' model of it, float32."""
    kind, changes = CONFIGS[name]
    torch.manual_seed(_ORDER.index(name))
    model = AutoModelForCausalLM.from_config(kind(**{**SIZES, **changes, **more}), attn_implementation="eager")
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if "norm" in key or key.endswith("bias"):  # their initial ones and zeros would hide mistakes
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.eval().save_pretrained(directory)
    save_bytes_tokenizer(directory)
    return model


def save_bytes_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer whose id for byte b is b + 8; ids 0 to 7 are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {f"<s{i}>": i for i in range(8)} | {c: i + 8 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<s{i}>" for i in range(8)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<s0>", "add_bos_token": false}')
