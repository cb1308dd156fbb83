"""ModelConfig: the shape of a decoder, read from a Hugging Face style config and checked. No tensor is touched here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixrt.checks import real
from radixrt.errors import ModelError, shown
from radixrt.model.registry import Family, family

_MAX_LAYERS = 4096
_MAX_SIZE = 2**24
_MAX_THETA = 1e15


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
            raise ModelError(f"{source}: hidden_act={shown(activation)} is not supported; supported: silu")
        theta, scaling = _rope(read)
        attention_bias = read.flag("attention_bias")
        mlp_bias = read.flag("mlp_bias")
        return cls(
            family=kind,
            vocab_size=read.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.size("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=read.number("rms_norm_eps", 1e-6, high=1.0),
            max_position=read.size("max_position_embeddings", 2048, high=2**31 - 1),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=read.flag("tie_word_embeddings"),
            qkv_bias=attention_bias if kind.qkv_bias is None else kind.qkv_bias,
            o_bias=attention_bias if kind.o_bias is None else kind.o_bias,
            mlp_bias=mlp_bias if kind.mlp_bias is None else kind.mlp_bias,
            windows=_windows(kind, read, layers),
            torch_dtype=read.text("dtype") or read.text("torch_dtype"),
        )

    @property
    def kv_size(self) -> int:
        """Width of the keys (or values) of one token in one layer."""
        return self.num_kv_heads * self.head_dim


class _Reader:
    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def size(self, name: str, default: int | None = None, low: int = 1, high: int = _MAX_SIZE) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, value, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float, high: float) -> float:
        value = self.config.get(name)
        return self.positive(name, default if value is None else value, high)

    def positive(self, name: str, value: Any, high: float) -> float:
        number = real(value)
        if number is None or not 0 < number <= high:
            raise self.wrong(name, value, f"a number above 0 and at most {high:g}")
        return number

    def flag(self, name: str) -> bool:
        """True or false; false where it is absent. No other value counts: ``bool("no")`` is true."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return bool(value)

    def text(self, name: str) -> str | None:
        value = self.config.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def wrong(self, name: str, value: object, wanted: str) -> ModelError:
        return ModelError(f"{self.source}: {name}={shown(value)} must be {wanted}")


def _windows(kind: Family, read: _Reader, layers: int) -> tuple[int | None, ...]:
    config, source, some = read.config, read.source, read.flag("use_sliding_window")
    if kind.window == "none":
        return (None,) * layers
    if config.get("sliding_window", 4096 if kind.window == "all" or some else None) is None:
        return (None,) * layers
    window = read.size("sliding_window", 4096, high=2**31 - 1)
    if kind.window == "all":
        return (window,) * layers
    if not some:
        return (None,) * layers
    types = config.get("layer_types")
    if types is None:
        first = read.size("max_window_layers", 28, low=0)
        return tuple(window if i >= first else None for i in range(layers))
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        raise ModelError(f"{source}: layer_types must list {layers} layers")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise ModelError(f"{source}: layer_types has {shown(name)}; supported: full_attention, sliding_attention")
    return tuple(window if name == "sliding_attention" else None for name in types)


def _rope(read: _Reader) -> tuple[float, dict[str, Any]]:
    """Theta and scaling from ``rope_parameters`` (new style) or ``rope_theta`` + ``rope_scaling`` (old style)."""
    config, source = read.config, read.source
    merged: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name)
        if value is not None:
            if not isinstance(value, Mapping):
                raise read.wrong(name, value, "an object")
            merged.update(value)
    theta = read.positive("rope_theta", merged.pop("rope_theta", config.get("rope_theta", 10000.0)), _MAX_THETA)
    kind = merged.pop("rope_type", None) or merged.pop("type", None) or "default"
    merged.pop("type", None)
    if config.get("partial_rotary_factor", merged.get("partial_rotary_factor", 1.0)) not in (1, 1.0, None):
        raise ModelError(f"{source}: partial_rotary_factor is not supported")
    if kind == "default":
        return theta, {}
    return theta, {"rope_type": kind, **merged}
