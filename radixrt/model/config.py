"""ModelConfig: the shape of a decoder, read from a Hugging Face style config and checked. No tensor is touched here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixrt.errors import ModelError
from radixrt.model.registry import Family, family

_MAX_LAYERS = 4096
_MAX_SIZE = 2**24


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder-only transformer. ``windows[i]``: sliding window of layer ``i`` in tokens, ``None`` for all."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    rope_theta: float
    rope_scaling: Mapping[str, Any]  # {} or {"rope_type": ..., ...}
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    torch_dtype: str | None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Read a ``config.json``-style mapping.

        Raises:
            ModelError: an unknown ``model_type``, activation or RoPE kind, or a size that cannot be; names the field.
        """
        kind = family(config.get("model_type"))
        read = _Reader(config, source)
        heads = read.size("num_attention_heads")
        hidden = read.size("hidden_size")
        kv_heads = read.size("num_key_value_heads", heads)
        head_dim = read.size("head_dim", hidden // heads or 1)
        layers = read.size("num_hidden_layers", high=_MAX_LAYERS)
        if heads % kv_heads:
            raise ModelError(
                f"{source}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
            )
        if head_dim % 2:
            raise ModelError(f"{source}: head_dim={head_dim} must be even")
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ModelError(f"{source}: hidden_act={activation!r} is not supported; supported: silu")
        theta, scaling = _rope(config, source)
        attention_bias = bool(config.get("attention_bias", False))
        mlp_bias = bool(config.get("mlp_bias", False))
        return cls(
            family=kind,
            vocab_size=read.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.size("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=read.number("rms_norm_eps", 1e-6),
            max_position=read.size("max_position_embeddings", 2048, high=2**31 - 1),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias if kind.qkv_bias is None else kind.qkv_bias,
            o_bias=attention_bias if kind.o_bias is None else kind.o_bias,
            mlp_bias=mlp_bias if kind.mlp_bias is None else kind.mlp_bias,
            windows=_windows(kind, config, layers, source),
            torch_dtype=config.get("dtype") or config.get("torch_dtype"),
        )

    @property
    def kv_size(self) -> int:
        """Width of the keys (or values) of one token in one layer."""
        return self.num_kv_heads * self.head_dim


class _Reader:
    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def size(self, name: str, default: int | None = None, high: int = _MAX_SIZE) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise ModelError(f"{self.source}: {name}={value!r} must be an integer from 1 to {high}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise ModelError(f"{self.source}: {name}={value!r} must be a number above 0")
        return float(value)


def _windows(kind: Family, config: Mapping[str, Any], layers: int, source: str) -> tuple[int | None, ...]:
    window = config.get("sliding_window", 4096 if kind.window == "all" or config.get("use_sliding_window") else None)
    if kind.window == "none" or window is None:
        return (None,) * layers
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ModelError(f"{source}: sliding_window={window!r} must be an integer of at least 1")
    if kind.window == "all":
        return (window,) * layers
    if not config.get("use_sliding_window", False):
        return (None,) * layers
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if i >= first else None for i in range(layers))
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        raise ModelError(f"{source}: layer_types must list {layers} layers")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise ModelError(f"{source}: layer_types has {name!r}; supported: full_attention, sliding_attention")
    return tuple(window if name == "sliding_attention" else None for name in types)


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, dict[str, Any]]:
    """Theta and scaling from ``rope_parameters`` (new style) or ``rope_theta`` + ``rope_scaling`` (old style)."""
    merged: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name)
        if value is not None:
            if not isinstance(value, Mapping):
                raise ModelError(f"{source}: {name}={value!r} must be an object")
            merged.update(value)
    theta = merged.pop("rope_theta", config.get("rope_theta", 10000.0))
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not math.isfinite(theta) or theta <= 0:
        raise ModelError(f"{source}: rope_theta={theta!r} must be a number above 0")
    kind = merged.pop("rope_type", None) or merged.pop("type", None) or "default"
    merged.pop("type", None)
    if config.get("partial_rotary_factor", merged.get("partial_rotary_factor", 1.0)) not in (1, 1.0, None):
        raise ModelError(f"{source}: partial_rotary_factor is not supported")
    if kind == "default":
        return float(theta), {}
    return float(theta), {"rope_type": kind, **merged}
