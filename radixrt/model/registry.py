"""The model families the decoder runs, each a row of differences; nothing else in the code knows a family by name."""

from __future__ import annotations

from dataclasses import dataclass

from radixrt.errors import ModelError, nearest, shown


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from a plain llama-style decoder.

    Fields:
        qkv_bias, o_bias, mlp_bias: projections with a bias; ``None``: as the config says.
        qk_norm: RMSNorm on each head of queries and keys before RoPE.
        window: ``all`` layers use the config's sliding window, ``config`` as its layer types say, ``none``.
    """

    name: str
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    window: str = "none"


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama"),
        Family("mistral", qkv_bias=False, o_bias=False, mlp_bias=False, window="all"),
        Family("qwen2", qkv_bias=True, o_bias=False, mlp_bias=False, window="config"),
        Family("qwen3", o_bias=None, mlp_bias=False, qk_norm=True, window="config"),
    )
}


def family(model_type: object) -> Family:
    """The family of a config's ``model_type``.

    Raises:
        ModelError: none by that name; lists those there are.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        hint = nearest(model_type, FAMILIES) if isinstance(model_type, str) else ""
        raise ModelError(
            f"model_type={shown(model_type)} is not supported; supported are {', '.join(FAMILIES)}"
            + (hint if "did you mean" in hint else "")
        )
    return FAMILIES[model_type]
