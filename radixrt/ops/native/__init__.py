"""The native CPU kernels (C++, ``_native``): matrices as stored, paged attention, and a whole forward in one call.

Without a compiler at installation there is no ``_native``: ``native`` is ``None`` and the torch reference computes.
"""

from __future__ import annotations

import importlib
from typing import Any, TypeAlias

import torch

native: Any = None
try:
    native = importlib.import_module("radixrt.ops._native")
except ImportError:
    pass

# data, bias or None, outputs, inputs, kind, group, offset, minimums, wide scales: see types.hpp
Packed: TypeAlias = tuple[Any, Any, int, int, int, int, int, bool, bool]

KV_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3, torch.int16: 4}

QUANTIZED = (0, 1)  # kinds of packed matrices that 8-bit activations are multiplied with

# Types of matrices that are computed as stored, by the names and numbers of GGUF.
TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
}
