"""SafetensorsFile owns one open safetensors file and the rule for which files make up a sharded model.

Invariants: the header is validated by the safetensors library before ours is believed; a shard lies inside its directory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from radixrt.errors import ModelError

if TYPE_CHECKING:
    import torch

FLOATS = ("F32", "F16", "BF16")
_DTYPES = (*FLOATS, "F8_E4M3", "I64", "I32", "U8")  # the others make up quantized matrices


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the file's start
    nbytes: int


def shard_paths(directory: Path) -> list[tuple[Path, list[str] | None]]:
    """(file, tensors the index expects in it) of a model directory; ``None`` where there is no index.

    Raises:
        ModelError: no weights, or an index that names an absent file or one outside the directory.
    """
    index_path = directory / "model.safetensors.index.json"
    if index_path.is_file():
        from radixrt.model.checkpoint import read_json

        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index_path}: weight_map must be an object naming the file of each tensor")
        shards: dict[str, list[str]] = {}
        for tensor, name in weight_map.items():
            if not isinstance(name, str):
                raise ModelError(f"{index_path}: weight_map[{tensor!r}] must be a file name")
            shards.setdefault(name, []).append(tensor)
        for name, tensors in shards.items():
            if Path(name).name != name or name in ("", ".", "..") or "\\" in name or "\0" in name:
                raise ModelError(
                    f"{index_path}: weight_map[{tensors[0]!r}]={name!r}: must be a file of the directory itself"
                )
            if not (directory / name).is_file():
                raise ModelError(f"{index_path}: weight_map[{tensors[0]!r}]={name!r}: there is no such file")
        return [(directory / name, tensors) for name, tensors in sorted(shards.items())]
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(filter(Path.is_file, directory.glob("*.safetensors")))
    if not files:
        raise ModelError(f"{directory}: has no *.safetensors file (weights in other formats are not read)")
    return [(file, None) for file in files]


class SafetensorsFile:
    """An open safetensors file. ``tensors``: name -> SafetensorsEntry."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        self.tensors: dict[str, SafetensorsEntry] = {}
        try:
            with safe_open(path, framework="np"):  # checks header, offsets and length
                pass
            self._read_header()
        except ModelError:
            raise
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path}: not a whole safetensors file ({error})") from None
        self._torch: Any = None

    def _read_header(self) -> None:
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, (begin, end) = entry["dtype"], entry["data_offsets"]
            if dtype not in _DTYPES:
                raise ModelError(f"{self.path}: tensor {name!r} has dtype {dtype}, supported are {', '.join(FLOATS)}")
            self.tensors[name] = SafetensorsEntry(dtype, tuple(entry["shape"]), 8 + length + begin, end - begin)

    def tensor(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        if self._torch is None:
            self._torch = safe_open(self.path, framework="pt").__enter__()
        tensor: torch.Tensor = self._torch.get_tensor(name)
        return tensor

    def blocks(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 of shape (*shape[:-1], bytes per row); a read-only view of the mapped file."""
        entry = self.tensors[name]
        data = np.memmap(self.path, dtype=np.uint8, mode="r", offset=entry.offset, shape=(entry.nbytes,))
        return np.asarray(data).reshape(*entry.shape[:-1], -1)

    def close(self) -> None:
        self._torch = None
