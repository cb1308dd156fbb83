"""Owns a model of random weights that are made on the device, and an engine of it: nothing is read but shapes, and nothing lies on a disk."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import string
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from radixrt import Engine
from radixrt.bench.device.figures import Bench
from radixrt.config import EngineConfig
from radixrt.errors import ModelError
from radixrt.model.checkpoint import RawTensor
from radixrt.model.tokenizer import Tokenizer, byte_level_alphabet
from radixrt.ops.interface import Ops
from radixrt.ops.load import load_ops
from radixrt.ops.torch.ops import TorchOps
from radixrt.ops.triton.ops import TritonOps
from radixrt.ops.weights import PackedWeight

_SPECIAL = 8

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 320,
}


class RandomCheckpoint:
    """A llama of these sizes: ``radixrt.model.checkpoint.Checkpoint`` without a file. A tensor is the same whenever it is asked for."""

    format: Literal["safetensors", "gguf"] = "safetensors"

    def __init__(self, sizes: dict[str, Any], device: torch.device, dtype: str) -> None:
        self.name, self.path = "random-llama", Path("random-llama")
        self.generation_config: dict[str, Any] = {}
        self.config: dict[str, Any] = {
            "model_type": "llama",
            "max_position_embeddings": 16384,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
            **sizes,
        }
        self._device = device
        hidden, inner, vocab = (sizes[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
        kv = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
        layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        self._shapes: dict[str, tuple[int, ...]] = {
            f"model.layers.{i}.{part}.weight": shape
            for i in range(sizes["num_hidden_layers"])
            for part, shape in layer.items()
        }
        self._shapes |= {
            "model.embed_tokens.weight": (vocab, hidden),
            "model.norm.weight": (hidden,),
            "lm_head.weight": (vocab, hidden),
        }
        self._seeds = {name: seed for seed, name in enumerate(self._shapes)}
        self.nbytes = 2 * sum(torch.Size(shape).numel() for shape in self._shapes.values())

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=self._device)
        draw = torch.Generator(self._device).manual_seed(self._seeds[name])
        return torch.randn(shape, generator=draw, dtype=dtype, device=self._device) / shape[-1] ** 0.5

    def raw(self, name: str) -> RawTensor:
        raise ModelError(f"{name}: random weights are not stored, so there are no blocks of them")

    def packed(self, name: str) -> PackedWeight | None:
        return None

    def tokenizer(self, chat_template: str | None = None) -> Tokenizer:
        return words_tokenizer(self.config["vocab_size"])

    def close(self) -> None:
        pass


def words_tokenizer(size: int) -> Tokenizer:
    """Special tokens, the 256 bytes, and as many made-up words as fit into ``size``: a vocabulary as wide as a real one, for masks.

    A text is encoded as its bytes.
    """
    vocab = {f"<s{i}>": i for i in range(_SPECIAL)}
    vocab |= {piece: _SPECIAL + i for i, piece in enumerate(sorted(byte_level_alphabet()))}
    letters = string.ascii_lowercase
    words = itertools.chain.from_iterable(itertools.product(letters, repeat=n) for n in (2, 3, 4))
    starts = ("", "\u0120")  # the latter stands for a space
    for start, word in itertools.product(starts, itertools.islice(words, max(0, size - len(vocab)) // 2)):
        vocab[start + "".join(word)] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([f"<s{i}>" for i in range(_SPECIAL)])
    return Tokenizer(backend, name="words", kind="byte-level", bos_id=None, adds_bos=False, eos_ids={0})


def known(settings: dict[str, Any]) -> dict[str, Any]:
    """Those settings that this engine has."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    return {name: value for name, value in settings.items() if name in names}


@contextmanager
def random_engine(
    bench: Bench,
    sizes: dict[str, Any] | None = None,
    dtype: str | None = None,
    *,
    reference: bool = False,
    **settings: Any,
) -> Iterator[Engine]:
    """An engine of the random model (settings it does not have are left out), computed by the Triton kernels, or torch's ``reference``.

    An engine opens a path: for as long as it is made, opening gives the random model, and the operations are chosen here. Those that
    the engine would choose by itself are kept if they are Triton's.
    """
    dtype = dtype or ("bfloat16" if bench.cuda else "float32")
    checkpoint = RandomCheckpoint(sizes or bench.pick(LLAMA_8B, TINY), bench.device, dtype)

    def ops(dtype: torch.dtype, *more: Any, **named: Any) -> Ops:
        if reference:
            return TorchOps(bench.device, dtype)
        chosen = load_ops(dtype, *more, **named)
        return TritonOps(bench.device, dtype) if isinstance(chosen, TorchOps) else chosen

    with ExitStack() as stack:
        stack.enter_context(patch("radixrt.engine.core.resolve", lambda model, **_: checkpoint.path))
        stack.enter_context(patch("radixrt.engine.core.open_checkpoint", lambda path: checkpoint))
        stack.enter_context(patch("radixrt.model.runner.load_ops", ops))
        if not bench.cuda:
            settings = {"kernels": "torch", **settings}
        engine = Engine(None, **known({"dtype": dtype, **settings}))
    try:
        yield engine
    finally:
        engine.close()
        if bench.cuda:
            gc.collect()
            torch.cuda.empty_cache()
