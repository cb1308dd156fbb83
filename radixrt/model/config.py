"""ModelConfig: the shape of a decoder, read from a Hugging Face style config and checked. No tensor is touched here.

Invariant: a field that would change the result is honoured or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixrt.checks import real
from radixrt.errors import ModelError, shown
from radixrt.model.registry import FAMILIES, PARTS, RESULT_FIELDS, Family, MoeFamily, family

_MAX_LAYERS = 4096
_MAX_SIZE = 2**24
_MAX_THETA = 1e15
_MAX_SCALE = 1e6
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_KINDS = ("full_attention", "sliding_attention")
_SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # what swiglu_oai computes with


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of some layers: ``scaling`` is ``{}`` or ``{"rope_type": ..., ...}``."""

    theta: float
    scaling: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: ``chosen`` of ``count``, each ``inner`` wide, and one for all tokens of ``shared`` (0: none).

    Fields:
        normalize: the gains of the chosen ones sum to one.
        layers: which layers have it.
    """

    count: int
    chosen: int
    inner: int
    shared: int
    normalize: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder-only transformer.

    Fields:
        rotary_dim: how much of a head is rotated.
        ropes, rope_of: the kinds of rotary positions, and which one layer i has (``None``: no positions).
        windows: the sliding window of layer i in tokens, ``None`` for all.
        activation: of ``ops.interface.GATED``.
        attention_scale: of the scores; attention_softcap and logits_softcap: ``c tanh(x / c)``, where there is one.
        embed_scale, residual_scale: factors on embeddings and on what a block adds; logits_divisor: of the logits.
    """

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
    rotary_dim: int
    ropes: tuple[Rope, ...]
    rope_of: tuple[int | None, ...]
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    torch_dtype: str | None
    activation: str
    attention_scale: float
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    experts: Experts | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Read a ``config.json``-style mapping.

        Raises:
            ModelError: an unknown ``model_type``, activation or RoPE kind, or a size that cannot be; names the field.
        """
        config, source = _text_model(config, source)
        kind = family(config.get("model_type"))
        given = {name: value for name, value in kind.defaults.items() if name not in config}
        if any(config.get(name) is not None for name in ("rope_scaling", "rope_parameters")):
            given.pop("rope_scaling", None)
        read = _Reader({**config, **given}, source)
        read.refuse_others(kind)
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
        has_rope = _rope_layers(kind, read, layers)
        windows = _windows(kind, read, layers, has_rope)
        ropes, share = _ropes(kind, read)
        return cls(
            family=kind,
            vocab_size=read.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.size("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=read.number(kind.norm_eps, 1e-6, high=1.0),
            max_position=read.size("max_position_embeddings", 2048, high=2**31 - 1),
            rotary_dim=_rotary_dim(read, head_dim, share),
            ropes=ropes,
            rope_of=tuple(
                (int(len(ropes) > 1 and window is not None) if rotated else None)
                for rotated, window in zip(has_rope, windows, strict=True)
            ),
            tie_embeddings=read.flag("tie_word_embeddings"),
            qkv_bias=read.flag_of(kind.qkv_bias),
            o_bias=read.flag_of(kind.o_bias),
            mlp_bias=read.flag_of(kind.mlp_bias),
            windows=windows,
            torch_dtype=read.text("dtype") or read.text("torch_dtype"),
            activation=_activation(kind, read),
            attention_scale=_attention_scale(kind, read, head_dim),
            attention_softcap=read.optional("attn_logit_softcapping"),
            logits_softcap=read.optional("final_logit_softcapping"),
            embed_scale=hidden**0.5 if kind.scaled_embedding else read.number("embedding_multiplier", 1.0, _MAX_SCALE),
            residual_scale=read.number("residual_multiplier", 1.0, _MAX_SCALE),
            logits_divisor=read.number("logits_scaling", 1.0, _MAX_SCALE),
            experts=None if kind.moe is None else _experts(kind.moe, read, layers),
        )

    @property
    def kv_size(self) -> int:
        """Width of the keys (or values) of one token in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def native_gap(self) -> str:
        """Why the native kernels do not compute this model; ``""``: they do."""
        if not self.family.native:
            native = ", ".join(name for name, row in FAMILIES.items() if row.native)
            return f"they compute {native}, not the {self.family.name} family"
        return "" if self.activation == "silu" else f"they compute hidden_act=silu, not {self.activation}"


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

    def flag_of(self, rule: bool | str) -> bool:
        """A rule of a family: yes, no, or as that field says."""
        return rule if isinstance(rule, bool) else self.flag(rule)

    def optional(self, name: str) -> float | None:
        """A number above 0, or none."""
        value = self.config.get(name)
        return self.positive(name, value, _MAX_SCALE) if value not in (None, 0) or isinstance(value, bool) else None

    def refuse_others(self, kind: Family) -> None:
        """An error for a field that would change the result and that the family does not honour."""
        for name in ("attention_bias", "mlp_bias"):  # whether or not the family asks
            self.flag(name)
        for name, neutral in RESULT_FIELDS.items():
            value = self.config.get(name)
            same = any(value is one or (type(value) in (int, float) and value == one) for one in neutral)
            if name in kind.fields or same:
                continue
            raise ModelError(f"{self.source}: {name}={shown(value)} is not supported by the {kind.name} family")

    def text(self, name: str) -> str | None:
        value = self.config.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def wrong(self, name: str, value: object, wanted: str) -> ModelError:
        return ModelError(f"{self.source}: {name}={shown(value)} must be {wanted}")


def _text_model(config: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any], str]:
    """The text model's own config, where a model has other parts too."""
    kind = config.get("model_type")
    text = config.get("text_config")
    if not isinstance(kind, str) or kind not in PARTS:
        return config, source
    if not isinstance(text, Mapping):
        raise ModelError(f"{source}: text_config={shown(text)} must be an object for model_type={kind}")
    above = {name: config[name] for name in ("dtype", "torch_dtype", "tie_word_embeddings") if name in config}
    return {**above, **text, "model_type": PARTS[kind]}, f"{source}, text_config"


def _activation(kind: Family, read: _Reader) -> str:
    for field, value in _SWIGLU.items():
        if field in kind.fields and read.config.get(field, value) != value:
            raise read.wrong(field, read.config[field], f"{value}, the only one supported")
    if "swiglu_limit" in kind.fields:
        return "swiglu_oai"
    name = read.config.get(kind.activation)
    name = "silu" if name is None else name
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelError(
            f"{read.source}: {kind.activation}={shown(name)} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _attention_scale(kind: Family, read: _Reader, head_dim: int) -> float:
    if "attention_multiplier" in kind.fields:
        return read.number("attention_multiplier", 1.0, _MAX_SCALE)
    if "query_pre_attn_scalar" in kind.fields:
        return float(read.number("query_pre_attn_scalar", 1.0, _MAX_SCALE) ** -0.5)
    return float(head_dim**-0.5)


def _experts(kind: MoeFamily, read: _Reader, layers: int) -> Experts:
    names = ("num_experts", "num_local_experts")  # one or the other, as the version of what wrote it has it
    count = read.size(next((name for name in names if read.config.get(name) is not None), names[0]))
    chosen = read.size("num_experts_per_tok", high=count)
    step = read.size("decoder_sparse_step", 1)
    dense = read.config.get("mlp_only_layers") or ()
    if not isinstance(dense, (list, tuple)) or not all(type(i) is int for i in dense):
        raise read.wrong("mlp_only_layers", dense, "a list of layers")
    return Experts(
        count=count,
        chosen=chosen,
        inner=read.size(kind.inner),
        shared=read.size("shared_expert_intermediate_size") if kind.shared else 0,
        normalize=read.flag_of(kind.normalize),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )


def _rope_layers(kind: Family, read: _Reader, layers: int) -> tuple[bool, ...]:
    """Which layers rotate queries and keys."""
    if "no_rope_layers" not in kind.fields:
        return (True,) * layers
    listed = read.config.get("no_rope_layers")
    if listed is None:
        step = read.size("no_rope_layer_interval", 4)
        return tuple((i + 1) % step != 0 for i in range(layers))
    if not isinstance(listed, (list, tuple)) or len(listed) < layers or not all(type(i) is int for i in listed):
        raise read.wrong(
            "no_rope_layers", listed, f"a list of {layers} numbers, 1 for a layer with RoPE, 0 for one without"
        )
    return tuple(bool(value) for value in listed[:layers])


def _windows(kind: Family, read: _Reader, layers: int, has_rope: tuple[bool, ...]) -> tuple[int | None, ...]:
    config, some = read.config, read.flag("use_sliding_window")
    missing = 4096 if some else None
    unused = kind.window in ("flag", "config") and not some
    if (
        kind.window == "none"
        or config.get("sliding_window", missing) is None
        or (unused and config["sliding_window"] == 0)
    ):
        return (None,) * layers
    window = read.size("sliding_window", 4096, high=2**31 - 1)
    if kind.window == "all" or (kind.window == "flag" and some):
        return (window,) * layers
    types = config.get("layer_types")
    if unused:
        if kind.window == "config" and isinstance(types, (list, tuple)) and "sliding_attention" in types:
            raise ModelError(f"{read.source}: layer_types has 'sliding_attention', and use_sliding_window is not true")
        return (None,) * layers
    if types is None:
        return _default_windows(kind, read, layers, has_rope, window)
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        raise ModelError(f"{read.source}: layer_types must list {layers} layers")
    for name in types:
        if name not in _KINDS:
            raise ModelError(f"{read.source}: layer_types has {shown(name)}; supported: {', '.join(_KINDS)}")
    return tuple(window if name == "sliding_attention" else None for name in types)


def _default_windows(
    kind: Family, read: _Reader, layers: int, has_rope: tuple[bool, ...], window: int
) -> tuple[int | None, ...]:
    """Where the config does not say which layers have the window."""
    if kind.window == "pattern":
        every = read.size("sliding_window_pattern")
        return tuple(window if (i + 1) % every else None for i in range(layers))
    if "no_rope_layers" in kind.fields:
        return tuple(None if rotated else window for rotated in has_rope)
    first = read.size("max_window_layers", 28, low=0)
    if kind.moe is not None:  # what transformers makes of it
        return tuple(window if i < first and i % 2 == 0 else None for i in range(layers))
    return tuple(window if i >= first else None for i in range(layers))


def _ropes(kind: Family, read: _Reader) -> tuple[tuple[Rope, ...], Any]:
    """The kinds of rotary positions, full layers' first and windowed layers' second, and the share of a head that is rotated."""
    local = "rope_local_base_freq" in kind.fields
    merged: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = read.config.get(name)
        if value is not None:
            if not isinstance(value, Mapping):
                raise read.wrong(name, value, "an object")
            merged.update(value)
    nested = [name for name in merged if name.endswith("_attention")]
    if nested and not (local and set(nested) <= set(_KINDS)):
        raise ModelError(f"{read.source}: rope_parameters has {shown(nested[0])} of its own, which is not supported")
    for name in nested:
        if not isinstance(merged[name], Mapping):
            raise read.wrong(f"rope_parameters.{name}", merged[name], "an object")
    parts = {name: dict(merged.pop(name)) for name in nested}
    share = merged.pop("partial_rotary_factor", None)
    if share not in (None, 1) and "partial_rotary_factor" not in kind.fields:
        raise ModelError(
            f"{read.source}: partial_rotary_factor={shown(share)} is not supported by the {kind.name} family"
        )
    full = _rope(read, {**merged, **parts.get("full_attention", {})}, "rope_theta")
    if not local:
        return (full,), share
    return (full, _rope(read, parts.get("sliding_attention", {}), "rope_local_base_freq")), share


def _rope(read: _Reader, values: dict[str, Any], theta: str) -> Rope:
    """One kind, from ``rope_parameters`` (new style) or ``theta`` + ``rope_scaling`` (old style)."""
    config = read.config
    base = read.positive(theta, values.pop("rope_theta", config.get(theta, 10000.0)), _MAX_THETA)
    kind = values.pop("rope_type", None) or values.pop("type", None) or "default"
    values.pop("type", None)
    share = values.pop("partial_rotary_factor", None)
    if share not in (None, 1):
        raise read.wrong("partial_rotary_factor", share, "the same for all layers")
    if kind == "default":
        return Rope(base, {})
    if "short_factor" in values or kind == "longrope":  # whose other names are su and yarn
        trained = config.get("original_max_position_embeddings", values.get("original_max_position_embeddings"))
        return Rope(base, {**values, "rope_type": "longrope", "original_max_position_embeddings": trained})
    trained, own = (where.get("original_max_position_embeddings") for where in (config, values))
    if trained is not None:
        if own not in (None, trained):
            raise read.wrong("original_max_position_embeddings", trained, f"the same as that of the rope, {shown(own)}")
        values["original_max_position_embeddings"] = trained
    return Rope(base, {"rope_type": kind, **values})


def _rotary_dim(read: _Reader, head_dim: int, share: Any) -> int:
    value = read.config.get("partial_rotary_factor", share)
    factor = real(1.0 if value is None else value)
    dim = int(head_dim * factor) if factor is not None and 0 < factor <= 1 else 0
    if dim < 2 or dim % 2:
        raise read.wrong("partial_rotary_factor", value, "a number up to 1 that leaves an even part of head_dim")
    return dim
