"""What a model will take of memory, told from its headers before anything of it is loaded.

Invariants: reads headers only; where the settings leave it open, decides as ``ModelRunner`` will (kernels, computation and KV dtype).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from radixrt.config import EngineConfig
from radixrt.errors import ModelError, shown
from radixrt.model.config import ModelConfig

if TYPE_CHECKING:
    from radixrt.model.checkpoint import Checkpoint

PROCESS = 256 * 2**20  # bytes of an engine's process beside weights and keys and values: Python, torch, tokenizer
MOST_POOL = 262_144  # tokens of a pool that is as large as memory allows; no larger one pays


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model of any family, as its config tells them."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position: int
    dtype: str | None
    native_gap: str  # why the native kernels do not compute it; "": they do


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of a model in memory.

    Fields:
        weights: bytes. per_token: bytes of the KV pool for each of its tokens. dtype: of the computation. native: the CPU kernels compute.
        device: cpu or cuda.
    """

    name: str
    weights: int
    per_token: int
    dtype: str
    native: bool
    device: str
    shape: Shape

    def total(self, tokens: int) -> int:
        """Bytes that an engine with a pool of so many tokens takes, about."""
        return self.weights + tokens * self.per_token + PROCESS


def footprint(path: Path, config: EngineConfig) -> Footprint:
    """The sizes of the model at ``path`` under these settings.

    Raises:
        ModelError: something is wrong with its files, or its family is not supported.
    """
    from radixrt.model.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    try:
        return _measured(checkpoint, config)
    finally:
        checkpoint.close()


def shape_of(checkpoint: Checkpoint) -> Shape:
    """The sizes of an opened model, one that runs through transformers too.

    Raises:
        ModelError: its family is not supported, or its config is wrong.
    """
    from radixrt.model.hooked_decoder import is_hooked, sizes_of

    if is_hooked(checkpoint):
        layers, heads, kv_heads, dim, hidden, vocab, length = sizes_of(checkpoint)
        own = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
        gap = "it runs through transformers"
        return Shape(layers, heads, kv_heads, dim, hidden, vocab, length, str(own) if own else None, gap)
    config = ModelConfig.from_dict(checkpoint.config, checkpoint.name)
    return Shape(
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.hidden_size,
        config.vocab_size,
        config.max_position,
        config.torch_dtype,
        config.native_gap,
    )


def _measured(checkpoint: Checkpoint, config: EngineConfig) -> Footprint:
    import torch

    from radixrt.model.kv_store import bytes_per_token

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    dtypes |= {"int16": torch.int16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
    shape = shape_of(checkpoint)
    cuda = torch.cuda.is_available()
    own = (shape.dtype or "float32") if cuda else "float32"
    computes = own if config.dtype == "auto" else config.dtype
    if computes not in dtypes:
        raise ModelError(f"{checkpoint.name}: dtype={shown(computes)} is not supported")
    native = not shape.native_gap and _native(config, cuda)
    stored = ("int16" if native else computes) if config.kv_dtype == "auto" else config.kv_dtype
    weights = checkpoint.nbytes
    method = _quantization(checkpoint)
    # the native kernels keep a GGUF file's blocks, and those of a GPU what of a quantized checkpoint they can multiply with
    if not (native and not method) and not (cuda and method not in ("", "mxfp4")):
        numbers = sum(_numbers(name, checkpoint.shape(name), method) for name in checkpoint.names())
        weights = numbers * dtypes[computes].itemsize
    per_token = bytes_per_token(shape, dtypes[computes], dtypes[stored])
    return Footprint(checkpoint.name, weights, per_token, computes, native, "cuda" if cuda else "cpu", shape)


def _quantization(checkpoint: Checkpoint) -> str:
    """The method of a quantized checkpoint, which was read with success before; ``""``: it is not quantized."""
    found = checkpoint.config.get("quantization_config", checkpoint.config.get("compression_config"))
    return "" if found is None or checkpoint.format == "gguf" else str(found["quant_method"])


def _numbers(name: str, shape: tuple[int, ...], method: str) -> int:
    """How many a tensor stands for: of mxfp4 a block has two a byte, and its scales are no weights."""
    if method == "mxfp4" and name.endswith(("_blocks", "_scales")):
        return 2 * math.prod(shape) if name.endswith("_blocks") else 0
    return math.prod(shape)


def _native(config: EngineConfig, cuda: bool) -> bool:
    from radixrt.ops.native import native

    if cuda or config.kernels == "torch" or config.dtype not in ("auto", "float32"):
        return False
    return native is not None and native.variants()[0] != "portable"
