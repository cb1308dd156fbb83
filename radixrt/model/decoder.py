"""Decoder: a transformer over paged KV; families differ only by the rows of ``registry`` and so by what their layers have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from radixrt.model.config import Experts, ModelConfig
from radixrt.model.device import upload
from radixrt.model.kv_store import KVStore
from radixrt.model.layers import Layer, LayerReader, Mlp, Moe, Norm, tensors
from radixrt.model.rope import cos_sin_table
from radixrt.model.weight_reader import TensorSource, WeightReader
from radixrt.ops.interface import IntArray, Ops
from radixrt.ops.weights import Weight

__all__ = ["Decoder", "TensorSource", "WeightReader", "load_decoder"]


class Decoder:
    """The weights of a model, and its forward pass over one flattened batch."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embed: torch.Tensor,
        layers: list[Layer],
        norm: Norm,
        head: Weight,
        max_len: int,
    ) -> None:
        self.config = config
        self.ops = ops
        self.embed = embed
        self.layers = layers
        self.norm = norm
        self.head = head
        self.cos_sin = [
            cos_sin_table(config, max_len, kind).to(device=ops.device, dtype=embed.dtype)
            for kind in range(len(config.ropes))
        ]
        # gemma's factor is a number of the model's dtype
        self.embed_scale = torch.tensor(config.embed_scale).to(embed.dtype).item()

    @property
    def parameters(self) -> int:
        """Weights in all."""
        parts = (self.embed, self.layers, self.norm, self.head)
        found = {
            id(t): t for part in parts for one in (part if isinstance(part, list) else [part]) for t in tensors(one)
        }
        return sum(tensor.numel() for tensor in found.values())

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
        ops, layers = self.ops, self.layers
        slots = write_slots.long()
        rotations = [table.index_select(0, positions) for table in self.cos_sin]
        x = self.embed.index_select(0, tokens)
        if self.embed_scale != 1:
            x = x * self.embed_scale
        first = layers[0].attention_in
        h = x if first is None else self._norm(x, first)
        for index, (layer, k_cache, v_cache) in enumerate(zip(layers, store.k, store.v, strict=True)):
            rotation = None if layer.rope is None else rotations[layer.rope]
            out = self._attend(layer, h, rotation, slots, k_cache, v_cache, plans[layer.window])
            h, x = self._add(out, x, layer.attention_out, layer.mlp_in)
            following = layers[index + 1].attention_in if index + 1 < len(layers) else self.norm
            h, x = self._add(self._feed(layer.mlp, h), x, layer.mlp_out, following)
        ops.store(store.hidden, slots, h)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 ``[R, vocab]``, of final hidden states ``[R, hidden]``."""
        logits = self.ops.linear(hidden, self.head).float()
        if self.config.logits_divisor != 1:
            logits /= self.config.logits_divisor
        cap = self.config.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _attend(
        self,
        layer: Layer,
        x: torch.Tensor,
        rotation: torch.Tensor | None,
        slots: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Any,
    ) -> torch.Tensor:
        ops, config = self.ops, self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        q, k, v = ops.linear(x, layer.qkv, layer.qkv_bias).split((heads * dim, kv_heads * dim, kv_heads * dim), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            if config.family.qk_norm == "head":
                q, k = q.unflatten(1, (heads, dim)), k.unflatten(1, (kv_heads, dim))
            q, k = ops.rms_norm(q, layer.q_norm, config.norm_eps), ops.rms_norm(k, layer.k_norm, config.norm_eps)
        q, k, v = q.reshape(-1, heads, dim), k.reshape(-1, kv_heads, dim), v.view(-1, kv_heads, dim)
        if rotation is None:
            ops.store(k_cache, slots, k)
            ops.store(v_cache, slots, v)
        else:
            q = ops.rope_store(q, k, v, rotation[:, :1], rotation[:, 1:], k_cache, v_cache, slots)
        out = ops.attention(q, k_cache, v_cache, plan, config.attention_scale, config.attention_softcap, layer.sinks)
        return ops.linear(out.reshape(-1, heads * dim), layer.o, layer.o_bias)

    def _feed(self, mlp: Mlp | Moe, x: torch.Tensor) -> torch.Tensor:
        ops, kind = self.ops, self.config.activation
        if isinstance(mlp, Moe):
            return self._experts(mlp, x)
        inner = ops.linear(x, mlp.inner, mlp.inner_bias)
        inner = ops.activate(inner, kind) if self.config.family.mlp == "plain" else ops.gated(inner, kind)
        return ops.linear(inner, mlp.down, mlp.down_bias)

    def _experts(self, moe: Moe, x: torch.Tensor) -> torch.Tensor:
        ops, config = self.ops, self.config
        assert config.experts is not None and config.family.moe is not None
        scores = ops.linear(x, moe.router, moe.router_bias)
        gains, experts = chosen_experts(scores, config.experts, config.family.moe.softmax == "all")
        out = ops.moe(x, experts, gains, moe.gate_up, moe.down, config.activation, moe.gate_up_bias, moe.down_bias)
        if moe.shared is None or moe.shared_gate is None:
            return out
        return out + torch.sigmoid(ops.linear(x, moe.shared_gate)) * self._feed(moe.shared, x)

    def _add(
        self, out: torch.Tensor, x: torch.Tensor, norm: Norm | None, following: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next block reads, and ``x`` with what this one, whose norm is ``norm``, adds to it."""
        if norm is not None:
            out = self._norm(out, norm)
        if self.config.residual_scale != 1:
            out = out * self.config.residual_scale
        if following is not None and following.bias is None and self.config.family.norm == "rms":
            return self.ops.add_rms_norm(out, x, following.weight, self.config.norm_eps)
        x = x + out
        return (x if following is None else self._norm(x, following)), x

    def _norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if self.config.family.norm == "layer":
            return self.ops.layer_norm(x, norm.weight, norm.bias, self.config.norm_eps)
        return self.ops.rms_norm(x, norm.weight, self.config.norm_eps)


def chosen_experts(scores: torch.Tensor, experts: Experts, over_all: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gains, float32, and numbers of the chosen experts, both ``[T, k]``, of the router's ``scores [T, E]``.

    ``over_all``: gains are of a softmax over all experts, else over the chosen ones.
    """
    scores = scores.float()
    if not over_all:
        best, which = torch.topk(scores, experts.chosen, dim=-1)
        return torch.softmax(best, dim=-1), which
    gains, which = torch.topk(torch.softmax(scores, dim=-1), experts.chosen, dim=-1)
    return (gains / gains.sum(dim=-1, keepdim=True) if experts.normalize else gains), which


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
    read = LayerReader(weights, dtype, ops.device)
    layers = []
    for index in range(config.num_layers):
        layers.append(read.layer(index))
        progress(index + 1, config.num_layers)
    embed = read.vector("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    head = embed if config.tie_embeddings else read.matrix([("lm_head", config.vocab_size)], config.hidden_size)
    norm = read.norm("model.norm", config.hidden_size)
    weights.finish()
    return Decoder(config, ops, embed, layers, norm, head, max_len)
