"""Checkpoint owns read access to one model's files: config, tensors by Hugging Face name, tokenizer; safetensors or GGUF.

Invariants: tensors are read when asked for and never kept; names, layout and config keys are the Hugging Face ones
whatever the format; everything wrong with the files is one ModelError naming file and field or tensor; reading tensors
is safe from several threads.
"""

from __future__ import annotations

import json
import logging
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from radixrt.errors import ModelError, nearest
from radixrt.model.dequantize import dequantize
from radixrt.model.gguf_file import GGUFFile
from radixrt.model.gguf_names import FREQ_FACTORS, config_from_gguf, hf_name, interleaved_heads
from radixrt.model.safetensors_file import FLOATS, SafetensorsFile, shard_paths

if TYPE_CHECKING:
    import torch

    from radixrt.model.quantization import Codes, Matrix, Scheme
    from radixrt.model.tokenizer import Tokenizer
    from radixrt.ops.weights import Fp8Weight, PackedWeight

log = logging.getLogger("radixrt")

_MAX_JSON = 64 * 2**20


@dataclass(frozen=True)
class RawTensor:
    """A tensor as it lies in the file.

    ``blocks``: uint8 of shape (*shape[:-1], bytes per row), a read-only view of the memory-mapped file. Where ``rows``
    is set, row i of the Hugging Face layout is ``blocks[rows[i]]`` (llama's Q and K in GGUF).
    """

    name: str
    type_name: str  # ggml's: F32, F16, BF16, Q4_0, ...
    shape: tuple[int, ...]
    blocks: np.ndarray
    rows: np.ndarray | None = None


class Checkpoint(Protocol):
    """One model on disk. ``config`` and ``generation_config`` have config.json's keys; ``nbytes`` counts the weights.

    A quantized matrix is under its dense name: ``tensor`` dequantizes it, ``packed`` has its codes where kernels may use them.
    """

    name: str
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    nbytes: int

    @property
    def format(self) -> Literal["safetensors", "gguf"]: ...
    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...
    def raw(self, name: str) -> RawTensor: ...
    def packed(self, name: str) -> PackedWeight | None: ...
    def tokenizer(self, chat_template: str | None = None) -> Tokenizer: ...
    def close(self) -> None: ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model directory or a ``.gguf`` file; only headers are read.

    Raises:
        ModelError: nothing there, or something is wrong with the files.
    """
    if path.is_dir():
        return HFCheckpoint(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory")
    if path.suffix == ".safetensors":
        raise ModelError(f"{path}: give the directory that also holds its config.json, {path.parent}")
    return GGUFCheckpoint(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, as a ModelError if there is none."""
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):  # a pipe or a device has no end
            raise ModelError(f"{path}: cannot be read (not a regular file)")
        if state.st_size > _MAX_JSON:
            raise ModelError(f"{path}: larger than {_MAX_JSON} bytes")
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must be a JSON object, not {type(value).__name__}")
    return value


def _as_tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    import torch

    if not values.flags.writeable:  # a view of the mapping: torch wants memory of its own
        values = values.copy()
    return torch.from_numpy(values).to(dtype)


class HFCheckpoint:
    """A Hugging Face directory: config.json and one or many safetensors files."""

    format: Literal["safetensors"] = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.resolve().name
        if not (path / "config.json").is_file():
            ggufs = sorted(file.name for file in path.glob("*.gguf"))
            hint = f"; give one of its GGUF files: {', '.join(ggufs)}" if ggufs else ""
            raise ModelError(f"{path}: has no config.json{hint}")
        self.config = read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else {}
        self._files: dict[str, SafetensorsFile] = {}
        for shard, wanted in shard_paths(path):
            file = SafetensorsFile(shard)
            for name in file.tensors if wanted is None else wanted:
                if name not in file.tensors:
                    raise ModelError(
                        f"{shard}: tensor {name!r} is missing, model.safetensors.index.json says it is here"
                    )
                if name in self._files:
                    raise ModelError(f"{shard}: tensor {name!r} is also in {self._files[name].path.name}")
                self._files[name] = file
        self.nbytes = sum(file.tensors[name].nbytes for name, file in self._files.items())
        self._matrices: dict[str, Matrix] = {}  # the quantized ones
        self._scheme: Scheme  # where there are any
        self._note = ""
        self._plain = set(self._files)
        self._find_quantized()

    def _find_quantized(self) -> None:
        if "quantization_config" in self.config or "compression_config" in self.config:
            from radixrt.model.quantization import find_matrices, scheme_of

            scheme = scheme_of(self.config, str(self.path / "config.json"))
            if scheme is not None:
                self._scheme = scheme
                entries = {name: file.tensors[name] for name, file in self._files.items()}
                self._matrices, used = find_matrices(scheme, entries, str(self.path))
                self._plain -= used
                self._note = (
                    f"{self.path}: {len(self._matrices)} {scheme.layout} matrices are dequantized when they are read"
                )
        for name in self._files:
            entry = self._files[name].tensors[name]
            bytes_of_mxfp4 = entry.dtype == "U8" and name.endswith(
                ("_blocks", "_scales")
            )  # for the family that knows them
            if name in self._plain and entry.dtype not in FLOATS and not bytes_of_mxfp4:
                raise ModelError(
                    f"{self._files[name].path}: tensor {name!r} has dtype {entry.dtype}, supported are {', '.join(FLOATS)}"
                )

    def names(self) -> list[str]:
        return [*(name for name in self._files if name in self._plain), *self._matrices]

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._matrices:
            return self._matrices[name].shape
        return self._file(name).tensors[name].shape

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._matrices:
            return self._file(name).tensor(name).to(dtype)
        from radixrt.model.quantization import dense_of

        note, self._note = self._note, ""
        if note:
            log.info(note)
        return dense_of(self._codes(name), dtype)

    def packed(self, name: str) -> PackedWeight | None:
        """The matrix as it is stored, in the layout of ``radixrt.ops.weights``; ``None`` where only a dense one can be had."""
        if name not in self._matrices:
            return None
        from radixrt.model.quantization import packed_of

        return packed_of(self._codes(name))

    def _codes(self, name: str) -> Codes | Fp8Weight:
        from radixrt.model.quantization import read_matrix_codes

        return read_matrix_codes(self._scheme, self._matrices[name], lambda part: self._files[part].tensor(part))

    def raw(self, name: str) -> RawTensor:
        if name in self._matrices:
            return RawTensor(name, "quantized", self.shape(name), np.empty(0, dtype=np.uint8))
        file = self._file(name)
        entry = file.tensors[name]
        return RawTensor(name, entry.dtype, entry.shape, file.blocks(name))

    def tokenizer(self, chat_template: str | None = None) -> Tokenizer:
        from radixrt.model.hf_tokenizer import tokenizer_from_directory

        return tokenizer_from_directory(
            self.path, chat_template, config=self.config, generation_config=self.generation_config
        )

    def close(self) -> None:
        for file in set(self._files.values()):
            file.close()

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._plain:
            raise _missing(self, name)
        return self._files[name]


class GGUFCheckpoint:
    """One GGUF file, under Hugging Face names and layout."""

    format: Literal["gguf"] = "gguf"

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name.removesuffix(".gguf")
        self._file = file = GGUFFile(path)
        self.config = config_from_gguf(file)
        self._names = {hf_name(name): name for name in file.tensors if name != FREQ_FACTORS}
        self.generation_config: dict[str, Any] = {
            key: self.config[key] for key in ("bos_token_id", "eos_token_id") if key in self.config
        }
        self.nbytes = sum(file.tensors[name].nbytes for name in self._names.values())
        self._arch: str = file.fields["general.architecture"]

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._own(name)].shape

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        raw = self.raw(name)
        blocks = raw.blocks if raw.rows is None else raw.blocks[raw.rows]
        values = dequantize(blocks, self._file.tensors[self._own(name)].type_id)
        return _as_tensor(values.reshape(raw.shape), dtype)

    def raw(self, name: str) -> RawTensor:
        own = self._own(name)
        entry = self._file.tensors[own]
        heads = interleaved_heads(self._arch, own, self.config)
        blocks, rows = self._file.blocks(own), None
        if heads is not None:
            if entry.shape[0] % (2 * heads):
                raise self._file.error(f"tensor {own!r} has {entry.shape[0]} rows, not a multiple of 2 x {heads} heads")
            if len(entry.shape) == 1:  # a bias: each element is a row
                blocks = blocks.reshape(entry.shape[0], -1)
            # ggml keeps rotary pairs side by side: head rows 0 1 2 3 are the pairs (0, n/2) (1, n/2 + 1) of ours
            rows = np.arange(entry.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return RawTensor(name, entry.type_name, entry.shape, blocks, rows)

    def packed(self, name: str) -> PackedWeight | None:
        """``None``: ggml's blocks are dequantized."""
        self._own(name)
        return None

    def tokenizer(self, chat_template: str | None = None) -> Tokenizer:
        from radixrt.model.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(self._file, chat_template)

    def close(self) -> None:
        self._file.close()

    def _own(self, name: str) -> str:
        try:
            return self._names[name]
        except KeyError:
            raise _missing(self, name) from None


def _missing(checkpoint: Checkpoint, name: str) -> ModelError:
    names = checkpoint.names()
    hint = nearest(name, names)
    if len(names) > 12 and "did you mean" not in hint:
        hint = ""
    return ModelError(f"{checkpoint.path}: tensor {name!r} is missing{hint}")
