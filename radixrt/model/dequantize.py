"""Owns the way from ggml blocks to float32: vectorized here for the formats of small models, by the gguf package for the rest.

Invariants: bit for bit what ``gguf.quants.dequantize`` returns (the tests compare), for any number of leading rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_CHUNK = 4096  # blocks worked on at a time: inputs and outputs stay in the L2 cache


def dequantize(blocks: np.ndarray, type_id: int) -> np.ndarray:
    """float32 values of uint8 ``blocks`` of shape (..., bytes per row); type ids as in ``gguf_file.GGML_TYPES``.

    F32 comes back as a view of the input.
    """
    if type_id == 0:
        return blocks.view(np.float32)
    if type_id == 1:
        return blocks.view(np.float16).astype(np.float32)
    if type_id in _FAST:
        return _FAST[type_id](blocks)
    from gguf import GGMLQuantizationType, quants

    values: np.ndarray = quants.dequantize(blocks, GGMLQuantizationType(type_id))
    return values


def _halves(blocks: np.ndarray, begin: int, end: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, begin:end]).view(np.float16).astype(np.float32)


def _q4_0(rows: np.ndarray) -> np.ndarray:
    """d * (q - 8); byte j of a block holds elements j (low four bits) and j + 16."""
    blocks = rows.reshape(-1, 18)
    scale = _halves(blocks, 0, 2)
    out = np.empty((len(blocks), 2, 16), dtype=np.float32)
    for begin in range(0, len(blocks), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        packed = blocks[part, 2:]
        np.multiply((packed & 15).view(np.int8) - np.int8(8), scale[part], out=out[part, 0])
        np.multiply((packed >> 4).view(np.int8) - np.int8(8), scale[part], out=out[part, 1])
    return out.reshape(*rows.shape[:-1], -1)


def _q4_1(rows: np.ndarray) -> np.ndarray:
    """d * q + m, packed like Q4_0."""
    blocks = rows.reshape(-1, 20)
    scale_min = _halves(blocks, 0, 4)
    out = np.empty((len(blocks), 2, 16), dtype=np.float32)
    for begin in range(0, len(blocks), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        packed, scale, target = blocks[part, 4:], scale_min[part, :1], out[part]
        np.multiply(packed & 15, scale, out=target[:, 0])
        np.multiply(packed >> 4, scale, out=target[:, 1])
        target += scale_min[part, 1:, None]
    return out.reshape(*rows.shape[:-1], -1)


def _q8_0(rows: np.ndarray) -> np.ndarray:
    """d * q, 32 signed bytes."""
    blocks = rows.reshape(-1, 34)
    scale = _halves(blocks, 0, 2)
    signed = blocks.view(np.int8)
    out = np.empty((len(blocks), 32), dtype=np.float32)
    for begin in range(0, len(blocks), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        np.multiply(signed[part, 2:], scale[part], out=out[part])
    return out.reshape(*rows.shape[:-1], -1)


_FAST: dict[int, Callable[[np.ndarray], np.ndarray]] = {2: _q4_0, 3: _q4_1, 8: _q8_0}
