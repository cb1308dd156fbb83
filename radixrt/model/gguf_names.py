"""Owns the translation of GGUF names and metadata into the names and config.json keys of the Hugging Face families.

Invariants: tensor names map one to one; an unknown tensor keeps its GGUF name and an unknown architecture becomes
``model_type`` unchanged, so that whoever reads the config refuses it by name; a wrong metadata type is one ModelError.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from radixrt.model.gguf_file import GGUFFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")

FREQ_FACTORS = "rope_freqs.weight"  # divides the rotary frequencies; part of the config, not a weight

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(\w+)\.(weight|bias)")

# general.file_type -> what people call the file (ggml's llama_ftype)
FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    21: "Q2_K_S",
    32: "BF16",
}


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor, or the name itself where we know none."""
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return name


def interleaved_heads(arch: str, name: str, config: dict[str, Any]) -> int | None:
    """How many heads' rows the tensor interleaves for ggml's rotary layout, or nothing if it does not."""
    if arch == "llama" and re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name):
        return int(config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"])
    return None


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """config.json as the original model would have had it, from the file's metadata and tensor shapes."""
    read = _Reader(file)
    arch = read.text("general.architecture")
    if arch not in ARCHITECTURES:
        return {"model_type": arch}
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise file.error("tensor 'token_embd.weight' is missing or not a matrix")
    heads = read.count(f"{arch}.attention.head_count")
    hidden = read.count(f"{arch}.embedding_length")
    head_dim = read.count(f"{arch}.attention.key_length", hidden // heads)
    value_dim = read.count(f"{arch}.attention.value_length", head_dim)
    if value_dim != head_dim:
        raise file.error(f"{arch}.attention.value_length={value_dim}: must equal the key length {head_dim}")
    rotary = read.count(f"{arch}.rope.dimension_count", head_dim)
    config: dict[str, Any] = {
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": read.count(f"{arch}.feed_forward_length"),
        "num_hidden_layers": read.count(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.count(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": read.number(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": read.number(f"{arch}.rope.freq_base", 10000.0),
        "max_position_embeddings": read.count(f"{arch}.context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "torch_dtype": "float16" if embedding.type_name == "F16" else "bfloat16",
    }
    if embedding.type_name == "F32":
        config["torch_dtype"] = "float32"
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    window = read.count(f"{arch}.attention.sliding_window", None)
    if window is not None:
        config["sliding_window"] = window
        config["use_sliding_window"] = True
        if arch == "llama":  # Mistral shares llama's architecture in GGUF; only the window tells them apart
            config["model_type"] = "mistral"
    scaling = _rope_scaling(file, read, arch, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    for key in ("bos", "eos"):
        token = read.count(f"tokenizer.ggml.{key}_token_id", None, low=0)
        if token is not None:
            config[f"{key}_token_id"] = token
    return config


def _rope_scaling(file: GGUFFile, read: _Reader, arch: str, config: dict[str, Any]) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling"
    kind = read.text(f"{prefix}.type", "none")
    original = read.count(f"{prefix}.original_context_length", None)
    if FREQ_FACTORS in file.tensors:
        return _frequency_factors(file, config, original)
    factor = read.number(f"{prefix}.factor", 0.0) or read.number(f"{arch}.rope.scale_linear", 0.0)
    if kind == "none" and factor and f"{prefix}.type" not in file.fields:
        kind = "linear"  # what a file without the type means
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if not math.isfinite(factor) or factor <= 0:
        raise file.error(f"{prefix}.factor={factor}: must be above 0 for rope scaling {kind!r}")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if f"{prefix}.{theirs}" in file.fields:
                scaling[ours] = read.number(f"{prefix}.{theirs}", 0.0)
        for key in (f"{prefix}.attn_factor", f"{prefix}.yarn_attn_factor"):
            share = read.number(key, 1.0)
            if share != 1.0:  # ggml multiplies yarn's own factor, Hugging Face replaces it
                scaling["attention_factor"] = share * (0.1 * math.log(factor) + 1.0)
    return scaling


def _frequency_factors(file: GGUFFile, config: dict[str, Any], original: int | None) -> dict[str, Any] | None:
    """Name the tensor's factors: Llama-3's formula where it gives them, the factors themselves otherwise.

    The converter evaluates transformers' ``llama3`` rule, whose four parameters are not stored; the factor is the
    largest value, and the published ones share the other three.
    """
    tensor = file.tensors[FREQ_FACTORS]
    half = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0)) // 2
    if tensor.type_name != "F32" or tensor.shape != (half,):
        raise file.error(f"tensor {FREQ_FACTORS!r} is {tensor.type_name} {list(tensor.shape)}, must be F32 [{half}]")
    factors = file.blocks(FREQ_FACTORS).view(np.float32).astype(np.float64)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise file.error(f"tensor {FREQ_FACTORS!r} has a factor that is not a positive number")
    if (factors == 1).all():
        return None
    factor, low, high = float(factors.max()), 1.0, 4.0
    wavelengths = 2 * math.pi * config["rope_theta"] ** (np.arange(half) / half)
    for context in (original, 8192):
        if context is None:
            continue
        smooth = (context / wavelengths - low) / (high - low)
        middle = 1 / ((1 - smooth) / factor + smooth)
        expected = np.where(wavelengths < context / high, 1.0, np.where(wavelengths > context / low, factor, middle))
        if np.allclose(factors, expected, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    return {"rope_type": "freq_factors", "factors": factors.tolist()}


class _Reader:
    """Typed access to metadata; what is missing or of the wrong type is an error naming the key."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def text(self, key: str, default: str | None = None) -> str:
        value = self._file.fields.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._file.fields.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._wrong(key, "a finite number")
        return float(value)

    def count(self, key: str, default: Any = ..., *, low: int = 1) -> Any:
        """An integer; a per-layer array counts where all layers agree."""
        value = self._file.fields.get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if value is None and default is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
            raise self._wrong(key, f"one integer of at least {low}")
        return value

    def _wrong(self, key: str, wanted: str) -> Exception:
        if key not in self._file.fields:
            return self._file.error(f"metadata key {key!r} is missing")
        shown = repr(self._file.fields[key])
        return self._file.error(f"{key}={shown[:80]}: must be {wanted}")
