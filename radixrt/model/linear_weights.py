"""Owns how a projection's matrix is read: dense, or packed as the checkpoint stores it where the device computes with that."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from radixrt.model.weight_reader import WeightReader
from radixrt.ops.weights import PackedWeight, Weight, joined, to_device


@runtime_checkable
class PackedSource(Protocol):
    """A source of tensors that may also give a matrix as it is stored."""

    def packed(self, name: str) -> PackedWeight | None: ...


def read_matrix(
    weights: WeightReader, parts: list[tuple[str, int]], columns: int, dtype: torch.dtype, device: torch.device
) -> Weight:
    """The matrices ``name + ".weight"`` of ``parts``, (name, rows), joined by rows into one ``[rows in all, columns]``.

    On a CPU, and where the parts are not all stored in one form, it is dense: dequantized, exactly.

    Raises:
        ModelError: a tensor is missing or has another shape; names it.
    """
    names = [weights.check(name + ".weight", rows, columns) for name, rows in parts]
    source = weights.source
    if device.type != "cpu" and isinstance(source, PackedSource):
        packed = [source.packed(name) for name in names]
        whole = joined([part for part in packed if part is not None]) if all(packed) else None
        if whole is not None:
            return to_device(whole, device)
    dense = [source.tensor(name, dtype).to(device) for name in names]
    return dense[0] if len(dense) == 1 else torch.cat(dense)
