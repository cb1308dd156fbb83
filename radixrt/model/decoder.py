"""Decoder: a llama-style transformer over paged KV; families differ only by the rows of ``registry``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from radixrt.errors import ModelError
from radixrt.model.config import ModelConfig
from radixrt.model.device import upload
from radixrt.model.kv_store import KVStore
from radixrt.model.rope import cos_sin_table
from radixrt.ops.interface import IntArray, Ops


class TensorSource(Protocol):
    """Where weights come from, by their Hugging Face names."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one block; ``[out, in]``. Query, key and value are one matrix, and so are gate and up."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    window: int | None


class Decoder:
    """The weights of a model, and its forward pass over one flattened batch."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embed: torch.Tensor,
        layers: list[Layer],
        norm: torch.Tensor,
        head: torch.Tensor,
        max_len: int,
    ) -> None:
        self.config = config
        self.ops = ops
        self.embed = embed
        self.layers = layers
        self.norm = norm
        self.head = head
        self.scale = config.head_dim**-0.5
        self.cos_sin = cos_sin_table(config, max_len).to(device=ops.device, dtype=embed.dtype)

    @property
    def parameters(self) -> int:
        """Weights in all."""
        tensors = {id(self.embed): self.embed, id(self.head): self.head, id(self.norm): self.norm}
        for layer in self.layers:
            for value in (getattr(layer, name) for name in layer.__slots__):
                if isinstance(value, torch.Tensor):
                    tensors[id(value)] = value
        return sum(tensor.numel() for tensor in tensors.values())

    def forward(
        self,
        tokens: IntArray | torch.Tensor,
        positions: IntArray,
        write_slots: IntArray,
        q_lens: IntArray,
        kv_lens: IntArray,
        kv_slots: IntArray,
        store: KVStore,
    ) -> None:
        """Compute ``T`` tokens of several sequences and write their KV and final hidden states to their slots.

        The arrays are those of ``ForwardBatch``; ``tokens`` may be on the device already. Within a layer KV is written before any query
        reads it.
        """
        config, device = self.config, self.ops.device
        known = tokens if isinstance(tokens, torch.Tensor) else None
        host = np.stack((positions, write_slots, positions if isinstance(tokens, torch.Tensor) else tokens))
        inputs = upload(host, torch.empty(host.shape, dtype=torch.int32, device=device))
        plans = {
            window: self.ops.plan_attention(q_lens, kv_lens, kv_slots, config.num_heads, config.num_kv_heads, window)
            for window in self.windows
        }
        self.compute(inputs[2] if known is None else known, inputs[0], inputs[1], plans, store)

    @property
    def windows(self) -> set[int | None]:
        """Of its layers: each needs a plan of its own."""
        return {layer.window for layer in self.layers}

    def compute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        write_slots: torch.Tensor,
        plans: Mapping[int | None, Any],
        store: KVStore,
    ) -> None:
        """``forward`` of what is on the device, int32 ``[T]`` each, and planned for each of ``windows``: nothing here looks at a value,
        so that it can be recorded and replayed."""
        ops, config = self.ops, self.config
        slots = write_slots.long()
        cos_sin = self.cos_sin.index_select(0, positions)
        cos, sin = cos_sin[:, :1], cos_sin[:, 1:]
        x = self.embed.index_select(0, tokens)
        for layer, k_cache, v_cache in zip(self.layers, store.k, store.v, strict=True):
            x = x + self._attend(
                layer,
                ops.rms_norm(x, layer.input_norm, config.norm_eps),
                cos,
                sin,
                slots,
                k_cache,
                v_cache,
                plans[layer.window],
            )
            gate_up = ops.linear(ops.rms_norm(x, layer.post_norm, config.norm_eps), layer.gate_up, layer.gate_up_bias)
            x = x + ops.linear(ops.silu_mul(gate_up), layer.down, layer.down_bias)
        ops.store(store.hidden, slots, ops.rms_norm(x, self.norm, config.norm_eps))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 ``[R, vocab]``, of final hidden states ``[R, hidden]``."""
        return self.ops.linear(hidden, self.head).float()

    def _attend(
        self,
        layer: Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Any,
    ) -> torch.Tensor:
        ops, heads, kv_heads, dim = self.ops, self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, dim)
        if layer.q_norm is None or layer.k_norm is None:
            qk = ops.rope(qkv[:, : heads + kv_heads], cos, sin)
        else:
            q = ops.rms_norm(qkv[:, :heads], layer.q_norm, self.config.norm_eps)
            k = ops.rms_norm(qkv[:, heads : heads + kv_heads], layer.k_norm, self.config.norm_eps)
            qk = ops.rope(torch.cat((q, k), dim=1), cos, sin)
        ops.store(k_cache, slots, qk[:, heads:])
        ops.store(v_cache, slots, qkv[:, heads + kv_heads :])
        out = ops.attention(qk[:, :heads], k_cache, v_cache, plan, self.scale)
        return ops.linear(out.reshape(-1, heads * dim), layer.o, layer.o_bias)


class WeightReader:
    """Reads the tensors of ``config`` by name, each checked against the shape the config says; ``finish`` finds those nobody read.

    Raises:
        ModelError: a tensor is missing, has another shape than the config says or no place in it; names it.
    """

    def __init__(self, config: ModelConfig, source: TensorSource) -> None:
        self.config = config
        self.source = source
        self._names = set(source.names())
        self._unread = set(self._names)

    def check(self, name: str, *shape: int) -> str:
        """``name``, if there is such a tensor of this shape; it counts as read."""
        if name not in self._names:
            raise ModelError(f"the model has no tensor {name!r}")
        self._unread.discard(name)
        found = tuple(self.source.shape(name))
        if found != shape:
            raise ModelError(f"tensor {name!r} has shape {list(found)}, the config says {list(shape)}")
        return name

    def tensor(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return self.source.tensor(self.check(name, *shape), dtype)

    def finish(self) -> None:
        _nothing_left(self.config, self._unread)


def load_decoder(
    config: ModelConfig,
    source: TensorSource,
    ops: Ops,
    dtype: torch.dtype,
    max_len: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Decoder:
    """Read the weights of ``config`` from ``source`` in ``dtype``.

    Args:
        max_len: longest sequence in tokens.
        progress: called with layers done and layers in all.

    Raises:
        ModelError: a tensor is missing, has another shape than the config says or no place in it; names it.
    """
    weights = WeightReader(config, source)
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.kv_size

    def read(name: str, *shape: int) -> torch.Tensor:
        return weights.tensor(name, dtype, *shape).to(ops.device)

    def optional(present: bool, name: str, *shape: int) -> torch.Tensor | None:
        return read(name, *shape) if present else None

    def joined(names_and_rows: list[tuple[str, int]], columns: int | None) -> torch.Tensor:
        return torch.cat([read(name, rows, *(() if columns is None else (columns,))) for name, rows in names_and_rows])

    layers = []
    for index, window in enumerate(config.windows):
        at = f"model.layers.{index}."
        attn, mlp = at + "self_attn.", at + "mlp."
        qkv = [(attn + "q_proj", q_size), (attn + "k_proj", kv_size), (attn + "v_proj", kv_size)]
        gate_up = [(mlp + "gate_proj", inner), (mlp + "up_proj", inner)]
        layers.append(
            Layer(
                input_norm=read(at + "input_layernorm.weight", hidden),
                qkv=joined([(name + ".weight", rows) for name, rows in qkv], hidden),
                qkv_bias=joined([(name + ".bias", rows) for name, rows in qkv], None) if config.qkv_bias else None,
                q_norm=optional(config.family.qk_norm, attn + "q_norm.weight", config.head_dim),
                k_norm=optional(config.family.qk_norm, attn + "k_norm.weight", config.head_dim),
                o=read(attn + "o_proj.weight", hidden, q_size),
                o_bias=optional(config.o_bias, attn + "o_proj.bias", hidden),
                post_norm=read(at + "post_attention_layernorm.weight", hidden),
                gate_up=joined([(name + ".weight", rows) for name, rows in gate_up], hidden),
                gate_up_bias=joined([(name + ".bias", rows) for name, rows in gate_up], None)
                if config.mlp_bias
                else None,
                down=read(mlp + "down_proj.weight", hidden, inner),
                down_bias=optional(config.mlp_bias, mlp + "down_proj.bias", hidden),
                window=window,
            )
        )
        progress(index + 1, config.num_layers)
    embed = read("model.embed_tokens.weight", config.vocab_size, hidden)
    head = embed if config.tie_embeddings else read("lm_head.weight", config.vocab_size, hidden)
    norm = read("model.norm.weight", hidden)
    weights.finish()
    return Decoder(config, ops, embed, layers, norm, head, max_len)


def _nothing_left(config: ModelConfig, unread: set[str]) -> None:
    """A tensor that nobody read means that the config describes another model than the one in the files."""
    left = {name for name in unread if not name.endswith("rotary_emb.inv_freq")}  # computed, some files keep it
    if config.tie_embeddings:
        left.discard("lm_head.weight")
    if not left:
        return
    name = min(left)
    layer = re.match(r"model\.layers\.(\d{1,9})\.", name)
    if layer and int(layer[1]) >= config.num_layers:
        reason = f"num_hidden_layers={config.num_layers} leaves it out"
    else:
        reason = f"the config, or the {config.family.name} family, has no place for it"
    others = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
    raise ModelError(f"tensor {name!r}{others} would be ignored: {reason}")
