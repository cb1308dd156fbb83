"""The weights of one decoder block, as data, and how they are read: families differ by which of the fields they have.

Matrices are ``[out, in]``, dense or packed. Query, key and value are one matrix, and so are gate and up; experts have a leading dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch

from radixrt.errors import ModelError
from radixrt.model.config import Experts, ModelConfig
from radixrt.model.linear_weights import read_matrix
from radixrt.model.mxfp4 import NAN, expand
from radixrt.model.registry import MoeFamily
from radixrt.model.weight_reader import WeightReader
from radixrt.ops.weights import Weight, stacked


@dataclass(frozen=True, slots=True)
class Norm:
    """The weight of an RMS norm, or of a layer norm, which has a bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Mlp:
    """A feed-forward; ``inner`` is gate and up, or the one matrix of a plain one."""

    inner: Weight
    inner_bias: torch.Tensor | None
    down: Weight
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Moe:
    """A mixture of experts, their matrices ``[E, out, in]``, and the one for all tokens where there is one, with its gate ``[1, in]``."""

    router: Weight
    router_bias: torch.Tensor | None
    gate_up: Weight
    gate_up_bias: torch.Tensor | None
    down: Weight
    down_bias: torch.Tensor | None
    shared: Mlp | None
    shared_gate: Weight | None


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: ``x += attention_out(attend(attention_in(x)))``, then the same with the feed-forward; norms that are ``None`` are not there.

    ``rope``: which of the config's rotary positions, ``None``: none.
    """

    attention_in: Norm | None
    qkv: Weight
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    o: Weight
    o_bias: torch.Tensor | None
    attention_out: Norm | None
    mlp_in: Norm | None
    mlp: Mlp | Moe
    mlp_out: Norm | None
    window: int | None
    rope: int | None


# Where the norms of a block are, by ``Family.norms``: attention_in, attention_out, mlp_in, mlp_out
_NORMS: dict[str, tuple[str | None, str | None, str | None, str | None]] = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


class LayerReader:
    """Reads the weights of ``weights.config`` in ``dtype`` to ``device``.

    Raises:
        ModelError: a tensor is missing or has another shape than the config says; names it.
    """

    def __init__(self, weights: WeightReader, dtype: torch.dtype, device: torch.device) -> None:
        self._weights = weights
        self._config: ModelConfig = weights.config
        self._dtype = dtype
        self._device = device

    def vector(self, name: str, *shape: int) -> torch.Tensor:
        return self._weights.tensor(name, self._dtype, *shape).to(self._device)

    def matrix(self, parts: list[tuple[str, int]], columns: int) -> Weight:
        return read_matrix(self._weights, parts, columns, self._dtype, self._device)

    def norm(self, name: str, size: int) -> Norm:
        bias = self.vector(name + ".bias", size) if self._config.family.norm == "layer" else None
        return Norm(self.scale(name + ".weight", size), bias)

    def scale(self, name: str, size: int) -> torch.Tensor:
        """What a norm is multiplied with; one more than stored stays float32, as its families compute it."""
        if not self._config.family.one_plus:
            return self.vector(name, size)
        return self._weights.tensor(name, torch.float32, size).to(self._device) + 1

    def layer(self, index: int) -> Layer:
        config, family = self._config, self._config.family
        at, attn = f"model.layers.{index}.", f"model.layers.{index}.self_attn."
        hidden, q_size, kv_size = config.hidden_size, config.num_heads * config.head_dim, config.kv_size
        qkv = [(attn + "q_proj", q_size), (attn + "k_proj", kv_size), (attn + "v_proj", kv_size)]
        if family.fused:
            qkv = [(attn + "qkv_proj", q_size + 2 * kv_size)]
        whole = family.qk_norm == "whole"
        attention_in, attention_out, mlp_in, mlp_out = (
            None if name is None else self.norm(at + name, hidden) for name in _NORMS[family.norms]
        )
        return Layer(
            attention_in=attention_in,
            qkv=self.matrix(qkv, hidden),
            qkv_bias=self._biases(config.qkv_bias, qkv),
            q_norm=self.scale(attn + "q_norm.weight", q_size if whole else config.head_dim) if family.qk_norm else None,
            k_norm=self.scale(attn + "k_norm.weight", kv_size if whole else config.head_dim)
            if family.qk_norm
            else None,
            sinks=self.vector(attn + "sinks", config.num_heads) if family.sinks else None,
            o=self.matrix([(attn + "o_proj", hidden)], q_size),
            o_bias=self._biases(config.o_bias, [(attn + "o_proj", hidden)]),
            attention_out=attention_out,
            mlp_in=mlp_in,
            mlp=self._feed_forward(index, at),
            mlp_out=mlp_out,
            window=config.windows[index],
            rope=config.rope_of[index],
        )

    def _feed_forward(self, index: int, at: str) -> Mlp | Moe:
        config, family = self._config, self._config.family
        if family.moe is not None and config.experts is not None and config.experts.layers[index]:
            return self._experts(at + family.moe.at, family.moe, config.experts)
        mlp, inner = at + "mlp.", config.intermediate_size
        if family.mlp == "plain":
            return self._mlp([(mlp + "c_fc", inner)], mlp + "c_proj", inner)
        if family.fused:
            return self._mlp([(mlp + "gate_up_proj", 2 * inner)], mlp + "down_proj", inner)
        return self._mlp([(mlp + "gate_proj", inner), (mlp + "up_proj", inner)], mlp + "down_proj", inner)

    def _mlp(self, parts: list[tuple[str, int]], down: str, inner: int) -> Mlp:
        hidden, bias = self._config.hidden_size, self._config.mlp_bias
        return Mlp(
            self.matrix(parts, hidden),
            self._biases(bias, parts),
            self.matrix([(down, hidden)], inner),
            self._biases(bias, [(down, hidden)]),
        )

    def _experts(self, at: str, family: MoeFamily, experts: Experts) -> Moe:
        hidden, inner = self._config.hidden_size, experts.inner
        router = [(at + family.router, experts.count)]
        gate, up, down = family.names
        if family.stacked:
            gate_up, gate_up_bias = self._stacked(at + "experts.gate_up_proj", experts.count, hidden, 2 * inner)
            downs, down_bias = self._stacked(at + "experts.down_proj", experts.count, inner, hidden)
            gate_up, gate_up_bias = _in_halves(gate_up), _in_halves(gate_up_bias)
            return Moe(self.matrix(router, hidden), self._biases(True, router), gate_up, gate_up_bias, downs, down_bias, None, None)  # fmt: skip
        each = [f"{at}experts.{expert}." for expert in range(experts.count)]
        shared, shared_gate = None, None
        if experts.shared:
            one = at + "shared_expert."
            parts = [(one + "gate_proj", experts.shared), (one + "up_proj", experts.shared)]
            shared = self._mlp(parts, one + "down_proj", experts.shared)
            shared_gate = self.matrix([(at + "shared_expert_gate", 1)], hidden)
        return Moe(
            router=self.matrix(router, hidden),
            router_bias=None,
            gate_up=stacked(
                [self.matrix([(one + gate, inner), (one + up, inner)], hidden) for one in each], self._dtype
            ),
            gate_up_bias=None,
            down=stacked([self.matrix([(one + down, hidden)], inner) for one in each], self._dtype),
            down_bias=None,
            shared=shared,
            shared_gate=shared_gate,
        )

    def _stacked(self, name: str, experts: int, columns: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All experts ``[E, rows, columns]`` and biases from one tensor ``[E, columns, rows]``, or from its mxfp4 blocks."""
        bias = self.vector(name + "_bias", experts, rows)
        if not self._weights.has(name + "_blocks"):
            return self.vector(name, experts, columns, rows).transpose(1, 2).contiguous(), bias
        groups, rest = divmod(columns, 32)
        if rest:
            raise ModelError(f"tensor {name + '_blocks'!r} is in blocks of 32, which do not fill rows of {columns}")
        blocks = self._weights.tensor(name + "_blocks", torch.uint8, experts, rows, groups, 16)
        scales = self._weights.tensor(name + "_scales", torch.uint8, experts, rows, groups)
        if bool((scales == NAN).any()):
            raise ModelError(f"tensor {name + '_scales'!r} has {NAN}, which is no number")
        return expand(blocks, scales, self._dtype).to(self._device), bias

    def _biases(self, present: bool, parts: list[tuple[str, int]]) -> torch.Tensor | None:
        return torch.cat([self.vector(name + ".bias", rows) for name, rows in parts]) if present else None


def _in_halves(x: torch.Tensor) -> torch.Tensor:
    """Rows gate, up, gate, up, ... of ``[E, 2 I, ...]`` as all gates, then all ups."""
    return torch.cat((x[:, ::2], x[:, 1::2]), dim=1)


def tensors(part: object) -> Iterator[torch.Tensor]:
    """The tensors of a layer or of a part of it."""
    if isinstance(part, torch.Tensor):
        yield part
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            yield from tensors(getattr(part, field.name))
