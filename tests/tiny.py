"""Tiny random models of every family, saved the way Hugging Face saves them, with transformers' own model as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 320
_SIZES: dict[str, Any] = {
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
}


def save_tiny(name: str, directory: Path) -> PreTrainedModel:
    """Save the tiny model ``name`` to ``directory`` and return transformers' model of it, float32."""
    kind, changes = CONFIGS[name]
    torch.manual_seed(sorted(CONFIGS).index(name))
    model = AutoModelForCausalLM.from_config(kind(**{**_SIZES, **changes}), attn_implementation="eager")
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
