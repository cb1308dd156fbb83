"""NativeDecoder: the decoder on the native CPU kernels, with weights as they are stored.

Invariants: the same rows in give the same bits out, whatever batch they are in; one thread calls at a time, and the interpreter's lock is free
meanwhile; weights, KV and hidden states are owned here or by the ``KVStore`` and live as long as the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from radixrt.errors import InvalidRequest
from radixrt.model.checkpoint import Checkpoint, RawTensor
from radixrt.model.config import ModelConfig
from radixrt.model.kv_store import KVStore
from radixrt.model.rope import cos_sin_table
from radixrt.model.weight_reader import WeightReader
from radixrt.ops.interface import IntArray
from radixrt.ops.native import KV_KINDS, QUANTIZED, TYPES, Packed, native
from radixrt.ops.native.memory import Arena
from radixrt.sampling.mask import Bitmask
from radixrt.sampling.wishes import Wishes

UNSETTLED = -2


class NativeDecoder:
    """The weights of a model in the kernels' layout, and its forward over one flattened batch.

    Args:
        store: where KV and hidden states go, ``by_head``; hidden states are float32.
        threads: CPU threads of a forward.
        kernels: a variant of the kernels by name; ``""``: the best of this machine.
        progress: called with layers done and layers in all.

    Raises:
        ModelError: a tensor is missing, has another shape than the config says or no place in it; names it.
        InvalidRequest: the system does not give so many threads.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        store: KVStore,
        max_len: int,
        threads: int,
        kernels: str = "",
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.config = config
        self._store = store  # its memory is used by address
        self._weights = weights = WeightReader(config, checkpoint)
        self._checkpoint = checkpoint
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.kv_size
        self.parameters = 0
        self._arena = Arena()
        self.weight_bytes = 0  # that a step reads
        embed = self._matrix("model.embed_tokens.weight", None, config.vocab_size, hidden)
        head = embed if config.tie_embeddings else self._matrix("lm_head.weight", None, config.vocab_size, hidden)
        self.weight_bytes = len(head[0])  # a step looks up a few rows of the embedding
        norm = self._vector("model.norm.weight", hidden)
        try:
            self._model = native.Model(
                kernels,
                threads,
                (
                    *(hidden, config.num_heads, config.num_kv_heads, dim, inner, config.vocab_size),
                    *(config.norm_eps, dim**-0.5, KV_KINDS[store.k[0].dtype]),
                ),
                embed,
                head,
                norm,
                cos_sin_table(config, max_len).numpy(),
                max_len,
                store.hidden.data_ptr(),
                len(store.hidden),
            )
        except OSError as error:
            raise InvalidRequest("threads", f"={threads}: cannot be had ({error})") from None
        self.kernels: str = self._model.kernels()
        self.head_parameters = config.vocab_size * hidden
        self.quantized = head[4] in QUANTIZED
        norms = config.family.qk_norm
        for index, (window, k, v) in enumerate(zip(config.windows, store.k, store.v, strict=True)):
            at = f"model.layers.{index}."
            attn, mlp = at + "self_attn.", at + "mlp."
            self._model.add_layer(
                self._vector(at + "input_layernorm.weight", hidden),
                self._matrix(attn + "q_proj", config.qkv_bias, q_size, hidden),
                self._matrix(attn + "k_proj", config.qkv_bias, kv_size, hidden),
                self._matrix(attn + "v_proj", config.qkv_bias, kv_size, hidden),
                self._vector(attn + "q_norm.weight", dim) if norms else None,
                self._vector(attn + "k_norm.weight", dim) if norms else None,
                self._matrix(attn + "o_proj", config.o_bias, hidden, q_size),
                self._vector(at + "post_attention_layernorm.weight", hidden),
                self._matrix(mlp + "gate_proj", config.mlp_bias, inner, hidden),
                self._matrix(mlp + "up_proj", config.mlp_bias, inner, hidden),
                self._matrix(mlp + "down_proj", config.mlp_bias, hidden, inner),
                window or 0,
                k.data_ptr(),
                v.data_ptr(),
            )
            progress(index + 1, config.num_layers)
        self.matrix_parameters = (
            sum(
                n * k
                for n, k in (
                    (q_size + 2 * kv_size, hidden),
                    (hidden, q_size),
                    (2 * inner, hidden),
                    (hidden, inner),
                )
            )
            * config.num_layers
        )
        weights.finish()

    def forward(
        self,
        tokens: IntArray,
        positions: IntArray,
        write_slots: IntArray,
        q_lens: IntArray,
        kv_lens: IntArray,
        kv_slots: IntArray,
    ) -> None:
        """See ``Decoder.forward``."""
        self._model.forward(tokens, positions, write_slots, q_lens, kv_lens, kv_slots)

    def logits(self, slots: IntArray) -> torch.Tensor:
        """Logits, float32 ``[R, vocab]``, of the hidden states in ``slots``."""
        out = torch.empty((len(slots), self.config.vocab_size), dtype=torch.float32)
        self._model.logits(slots, out.view(-1).numpy())
        return out

    def draw(
        self, slots: IntArray, wishes: Wishes | None, allowed: Sequence[Bitmask | None]
    ) -> tuple[IntArray, np.ndarray[Any, np.dtype[np.float32]]]:
        """A token of each row as it wishes, among the allowed ones, and the row's largest logit, which is not finite where no token can
        be had (no token is allowed, or a logit is no number). ``UNSETTLED`` in place of a token: the row wants its full logits.

        Of equally likely tokens the likeliest is the one of the lowest id.
        """
        masks = list(allowed) if any(mask is not None for mask in allowed) else None
        ids, values = self._model.draw(slots, masks, wishes)
        return np.frombuffer(ids, dtype=np.int32), np.frombuffer(values, dtype=np.float32)

    def share_prefixes(self, on: bool) -> None:
        """Whether attention reads KV that several sequences have in common once (the result is the same)."""
        self._model.share(on)

    def _vector(self, name: str, size: int) -> np.ndarray[Any, Any]:
        self.parameters += size
        return np.ascontiguousarray(self._weights.tensor(name, torch.float32, size).numpy())

    def _matrix(self, name: str, bias: bool | None, n: int, k: int) -> Packed:
        """A matrix as stored, packed; ``bias=None``: ``name`` is the tensor's own, and there is none."""
        weight = name if bias is None else name + ".weight"
        raw = self._checkpoint.raw(self._weights.check(weight, n, k))
        if raw.type_name not in TYPES:  # not as stored, but exactly
            raw = RawTensor(
                weight, "F32", (n, k), self._checkpoint.tensor(weight, torch.float32).numpy().view(np.uint8)
            )
        self.parameters += n * k
        padded = None
        if bias:
            padded = np.zeros((n + 15) // 16 * 16, dtype=np.float32)
            padded[:n] = self._vector(name + ".bias", n)
        rows = np.arange(n) if raw.rows is None else raw.rows
        packed: Packed = native.pack(
            TYPES[raw.type_name], [raw.blocks], np.zeros(n, dtype=np.int32), rows.astype(np.int32), k, padded
        )
        data = self._arena.take(len(packed[0]))
        data[:] = packed[0]
        self.weight_bytes += len(data)
        return (data, *packed[1:])
