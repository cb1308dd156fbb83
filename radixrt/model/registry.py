"""The model families the decoder runs, each a row of differences; nothing else in the code knows a family by name.

Invariant: what a config may say and a family does not honour is named here (``RESULT_FIELDS``), so that it is refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from radixrt.errors import ModelError, nearest, shown

# Fields of a config.json that change the result, and the values with which they do not; a family that honours one has it in ``fields``.
RESULT_FIELDS: dict[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "partial_rotary_factor": (None, 1),
    "rope_local_base_freq": (None,),
    "no_rope_layers": (None,),
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
    "swiglu_limit": (None,),
    "swiglu_alpha": (None,),
    "clip_qkv": (None,),
}


@dataclass(frozen=True, slots=True)
class MoeFamily:
    """How a family's layers choose among experts.

    Fields:
        at, router, names: where its tensors are: ``at + router + ".weight"``, ``at + "experts.7." + name + ".weight"`` for the gate,
            the up and the down projection of expert 7.
        inner: the config's field for their width.
        normalize: the gains of the chosen experts sum to one: true, or as that field of the config says.
        softmax: over ``all`` experts or the ``chosen`` ones.
        shared: one more expert for all tokens, with a gate of its own.
        stacked: all experts are one tensor, ``[E, in, out]``, with biases, gate and up in turns; the router has a bias.
    """

    at: str = "mlp."
    router: str = "gate"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    inner: str = "moe_intermediate_size"
    normalize: bool | str = "norm_topk_prob"
    softmax: Literal["all", "chosen"] = "all"
    shared: bool = False
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from a plain llama-style decoder.

    Fields:
        native: the native kernels compute it.
        qkv_bias, o_bias, mlp_bias: projections with a bias: yes, no, or as that field of the config says.
        qk_norm: an RMSNorm before RoPE on each ``head`` of queries and keys, or on the ``whole`` of them.
        window: ``all`` layers use the config's sliding window, or do with its ``flag``; ``config``: with its flag, as its layer types say;
            ``pattern``: as its layer types say, else all but every n-th layer.
        norm, norm_eps: RMS or layer norm (with a bias), and the config's field for its epsilon. one_plus: the weight is one more than stored.
        norms: ``pre``: before attention and feed-forward; ``post``: after them; ``both``.
        activation: the config's field.
        mlp: a gated feed-forward, or a ``plain`` one of two matrices. fused: query, key and value are stored as one, and so are gate and up.
        scaled_embedding: embeddings are multiplied with the root of their size.
        sinks: each head has one more score, without a value.
        moe: the experts, where there are any.
        fields: those of ``RESULT_FIELDS`` that the family honours.
        defaults: what a config means that leaves a field out.
    """

    name: str
    native: bool = False
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    qk_norm: Literal["", "head", "whole"] = ""
    window: Literal["none", "all", "flag", "config", "pattern"] = "none"
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: str = "rms_norm_eps"
    one_plus: bool = False
    norms: Literal["pre", "post", "both"] = "pre"
    activation: str = "hidden_act"
    mlp: Literal["gated", "plain"] = "gated"
    fused: bool = False
    scaled_embedding: bool = False
    sinks: bool = False
    moe: MoeFamily | None = None
    fields: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


_NO_BIAS: dict[str, Any] = {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
_QWEN_MOE = {"decoder_sparse_step": 1, "norm_topk_prob": False}
_GEMMA: dict[str, Any] = {
    "mlp_bias": False,
    "window": "pattern",
    "one_plus": True,
    "norms": "both",
    "activation": "hidden_activation",
    "scaled_embedding": True,
}
_GEMMA_DEFAULTS: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", native=True),
        Family("mistral", native=True, **_NO_BIAS, window="all", defaults={"sliding_window": 4096}),
        Family(
            "mixtral",
            **_NO_BIAS,
            window="all",
            moe=MoeFamily("block_sparse_moe.", names=("w1", "w3", "w2"), inner="intermediate_size", normalize=True),
            defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
        ),
        Family("qwen2", native=True, qkv_bias=True, o_bias=False, mlp_bias=False, window="config"),
        Family(
            "qwen2_moe",
            qkv_bias="qkv_bias",
            o_bias=False,
            mlp_bias=False,
            window="config",
            moe=MoeFamily(shared=True),
            defaults={**_QWEN_MOE, "qkv_bias": True},
        ),
        Family("qwen3", native=True, mlp_bias=False, qk_norm="head", window="config"),
        Family("qwen3_moe", mlp_bias=False, qk_norm="head", window="flag", moe=MoeFamily(), defaults=_QWEN_MOE),
        Family(
            "gemma2",
            **_GEMMA,
            fields=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
            defaults={
                **_GEMMA_DEFAULTS,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "sliding_window_pattern": 2,
            },
        ),
        Family(
            "gemma3_text",
            **_GEMMA,
            qk_norm="head",
            fields=("query_pre_attn_scalar", "final_logit_softcapping", "rope_local_base_freq"),
            defaults={
                **_GEMMA_DEFAULTS,
                "sliding_window_pattern": 6,
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "vocab_size": 262208,
                "max_position_embeddings": 131072,
            },
        ),
        Family(
            "phi3",
            **_NO_BIAS,
            window="all",
            fused=True,
            fields=("partial_rotary_factor",),
            defaults={
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
            },
        ),
        Family("olmo2", mlp_bias=False, qk_norm="whole", norms="post", defaults={"rms_norm_eps": 1e-5}),
        Family(
            "granite",
            fields=("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
            defaults={"attention_multiplier": 1.0},
        ),
        Family(
            "starcoder2",
            qkv_bias="use_bias",
            o_bias="use_bias",
            mlp_bias="use_bias",
            window="all",
            norm="layer",
            norm_eps="norm_epsilon",
            mlp="plain",
            defaults={
                "use_bias": True,
                "hidden_act": "gelu_pytorch_tanh",
                "norm_epsilon": 1e-5,
                "tie_word_embeddings": True,
            },
        ),
        Family(
            "smollm3",
            window="config",
            fields=("no_rope_layers",),
            defaults={"rope_theta": 2e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
        ),
        Family(
            "gpt_oss",
            window="pattern",
            sinks=True,
            moe=MoeFamily(router="router", inner="intermediate_size", normalize=True, softmax="chosen", stacked=True),
            fields=("swiglu_limit", "swiglu_alpha"),
            defaults={
                "attention_bias": True,
                "rms_norm_eps": 1e-5,
                "head_dim": 64,
                "num_experts_per_tok": 4,
                "rope_scaling": _YARN,
                "rope_theta": 150000.0,
                "sliding_window": 128,
                "sliding_window_pattern": 2,
            },
        ),
    )
}

PARTS = {"gemma3": "gemma3_text"}  # of a model of several, the text model, which is described in its text_config

# What is tested through transformers and its attention interface, see ``hooked_decoder``; others are tried.
HOOKED = (
    *("arcee", "cohere", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "glm", "glm4", "gpt2", "gpt_neox"),
    *("granitemoe", "nemotron", "olmo", "olmo3", "olmoe", "opt", "phi", "phimoe", "seed_oss", "stablelm"),
)


def supported() -> str:
    """What there is, for an error."""
    return f"{', '.join((*FAMILIES, *PARTS))}; through transformers {', '.join(HOOKED)} and others with its attention interface"


def family(model_type: object) -> Family:
    """The family of a config's ``model_type``.

    Raises:
        ModelError: none by that name; lists those there are.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        hint = nearest(model_type, (*FAMILIES, *HOOKED)) if isinstance(model_type, str) else ""
        raise ModelError(
            f"model_type={shown(model_type)} is not supported; supported are {supported()}"
            + (hint if "did you mean" in hint else "")
        )
    return FAMILIES[model_type]
