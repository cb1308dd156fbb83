"""GGUFFile owns one memory-mapped GGUF file: its metadata and where each tensor's blocks lie.

Invariants: every count, length, type and offset is checked against the file before it is used, so that a hostile header
costs no more than its own bytes and ends in one ModelError naming the file and the key or tensor; tensor data is never
copied; string arrays are decoded when first read. Layout: github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from radixrt.errors import ModelError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME = 1024
_MAX_ELEMENTS = 2**48

# ggml type id -> (name, elements per block, bytes per block): what we can read
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
# named in the refusal; see ggml.h
_OTHER_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, tuple[struct.Struct, Any]] = {
    0: (struct.Struct("<B"), np.dtype("<u1")),
    1: (struct.Struct("<b"), np.dtype("<i1")),
    2: (struct.Struct("<H"), np.dtype("<u2")),
    3: (struct.Struct("<h"), np.dtype("<i2")),
    4: (struct.Struct("<I"), np.dtype("<u4")),
    5: (struct.Struct("<i"), np.dtype("<i4")),
    6: (struct.Struct("<f"), np.dtype("<f4")),
    7: (struct.Struct("<?"), np.dtype("?")),
    10: (struct.Struct("<Q"), np.dtype("<u8")),
    11: (struct.Struct("<q"), np.dtype("<i8")),
    12: (struct.Struct("<d"), np.dtype("<f8")),
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. ``shape`` is row-major (GGUF stores it innermost first); ``offset`` is from the file's start."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def type_name(self) -> str:
        return GGML_TYPES[self.type_id][0]


class StringArray(Sequence[str]):
    """A GGUF array of strings, decoded when first read."""

    def __init__(self, file: GGUFFile, key: str, start: int, ends: list[int]) -> None:
        self._file, self._key, self._start, self._ends = file, key, start, ends
        self._decoded: list[str] | None = None

    def __len__(self) -> int:
        return len(self._ends)

    def list(self) -> list[str]:
        if self._decoded is None:
            ends = self._ends
            base = self._start
            data = self._file.slice(base, ends[-1] if ends else base)
            begin, decoded = 8, []
            try:
                for end in ends:
                    decoded.append(data[begin : end - base].decode("utf-8"))
                    begin = end - base + 8
            except UnicodeDecodeError as error:
                raise self._file.error(f"{self._key}[{len(decoded)}] is not UTF-8 ({error.reason})") from None
            self._decoded = decoded
        return self._decoded

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return self.list()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.list())


class GGUFFile:
    """An open GGUF file.

    ``fields``: key -> int, float, bool, str, numpy array or StringArray. ``tensors``: name -> GGUFTensor, in file order.

    Raises:
        ModelError: the file is missing, truncated or its header does not hold together.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise ModelError(f"{path}: cannot be read (not a regular file)")
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from None
        self._where = "header"
        self._pos = 0
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self._parse()
        self.data: np.ndarray = np.frombuffer(self._map, dtype=np.uint8)

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}")

    def slice(self, start: int, end: int) -> bytes:
        return bytes(self._map[start:end])

    def close(self) -> None:
        """Drop the mapping; it lives on only in arrays that were handed out."""
        self.data = np.empty(0, dtype=np.uint8)
        self._map = b""

    # -- reading, bounds checked

    def _take(self, count: int) -> int:
        """Advance over ``count`` bytes and return where they begin."""
        begin = self._pos
        if count > self.size - begin:
            raise self.error(
                f"{self._where} needs {count} bytes at offset {begin}, the file ends after {self.size - begin}"
                " (truncated, or not a GGUF file)"
            )
        self._pos = begin + count
        return begin

    def _u32(self) -> int:
        return int(_U32.unpack_from(self._map, self._take(4))[0])

    def _u64(self) -> int:
        return int(_U64.unpack_from(self._map, self._take(8))[0])

    def _string(self, limit: int | None = None) -> str:
        length = self._u64()
        if limit is not None and length > limit:
            raise self.error(f"{self._where} has a name of {length} bytes, at most {limit} are allowed")
        begin = self._take(length)
        try:
            return self.slice(begin, begin + length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{self._where} is not UTF-8 ({error.reason})") from None

    def _check_count(self, what: str, count: int, least_bytes: int) -> None:
        if count > (self.size - self._pos) // least_bytes:
            raise self.error(f"header claims {count} {what}, more than the file's {self.size} bytes can hold")

    # -- parsing

    def _parse(self) -> None:
        magic = bytes(self._map[:4])
        if magic != MAGIC:
            raise self.error(f"not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
        self._take(4)
        version = self._u32()
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = " (a big-endian file)" if swapped in (2, 3) else ""
            raise self.error(f"GGUF version {version}{hint} is not supported, 2 and 3 are")
        n_tensors, n_fields = self._u64(), self._u64()
        self._check_count("metadata keys", n_fields, 8 + 4 + 1)
        self._check_count("tensors", n_tensors, 8 + 4 + 8 + 4 + 8)
        for index in range(n_fields):
            self._where = f"metadata key {index}"
            key = self._string(65535)
            self._where = f"metadata key {key!r}"
            if key in self.fields:
                raise self.error(f"metadata key {key!r} occurs twice")
            self.fields[key] = self._value(key, self._u32())
        alignment = self.fields.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise self.error(f"general.alignment={alignment!r}: must be a power of two of at most 2^20")
        for index in range(n_tensors):
            self._where = f"tensor {index}"
            self._tensor()
        self._place(-(-self._pos // alignment) * alignment, alignment)

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            form = _SCALARS[kind][0]
            return form.unpack_from(self._map, self._take(form.size))[0]
        if kind != _ARRAY:
            raise self.error(f"metadata key {key!r} has unknown value type {kind}")
        element, count = self._u32(), self._u64()
        if element == _STRING:
            self._check_count(f"strings in {key!r}", count, 8)
            return self._strings(key, count)
        if element not in _SCALARS:
            problem = "nested arrays are not supported" if element == _ARRAY else f"unknown element type {element}"
            raise self.error(f"metadata key {key!r}: {problem}")
        dtype = _SCALARS[element][1]
        begin = self._take(count * dtype.itemsize)
        return np.frombuffer(self._map, dtype=dtype, count=count, offset=begin)

    def _strings(self, key: str, count: int) -> StringArray:
        """Walk over the strings' lengths without decoding: a vocabulary and its merges are some 10^5 strings."""
        pos = start = self._pos
        buffer, unpack, ends = self._map, _U64.unpack_from, []
        try:
            for _ in range(count):
                pos += 8 + unpack(buffer, pos)[0]
                ends.append(pos)
        except (struct.error, OverflowError):
            pos = self.size + 1
        if pos > self.size:
            raise self.error(
                f"string {max(len(ends) - 1, 0)} of metadata key {key!r} ends beyond the file's {self.size} bytes"
            )
        self._pos = pos
        return StringArray(self, key, start, ends)

    def _tensor(self) -> None:
        name = self._string(MAX_NAME)
        self._where = f"tensor {name!r}"
        if name in self.tensors:
            raise self.error(f"tensor {name!r} occurs twice")
        n_dims = self._u32()
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.error(f"tensor {name!r} has {n_dims} dimensions, must have 1 to {MAX_DIMS}")
        dims = [self._u64() for _ in range(n_dims)]
        type_id, offset = self._u32(), self._u64()
        elements = 1
        for dim in dims:
            elements *= dim
        if not 1 <= elements <= _MAX_ELEMENTS:
            raise self.error(f"tensor {name!r} has impossible dimensions {dims}")
        if type_id not in GGML_TYPES:
            known = ", ".join(entry[0] for entry in GGML_TYPES.values())
            what = _OTHER_TYPES.get(type_id, f"with number {type_id}")
            raise self.error(f"tensor {name!r} has ggml type {what}, supported are {known}")
        _, block, block_bytes = GGML_TYPES[type_id]
        if dims[0] % block:
            raise self.error(
                f"tensor {name!r} has rows of {dims[0]} elements, not a multiple of the block size {block}"
            )
        self.tensors[name] = GGUFTensor(name, type_id, tuple(reversed(dims)), offset, elements // block * block_bytes)

    def _place(self, data_start: int, alignment: int) -> None:
        for name, tensor in self.tensors.items():
            if tensor.offset % alignment:
                raise self.error(f"tensor {name!r} has offset {tensor.offset}, not a multiple of {alignment}")
            begin = data_start + tensor.offset
            if begin + tensor.nbytes > self.size:
                raise self.error(
                    f"tensor {name!r} needs bytes {begin} to {begin + tensor.nbytes}, the file has {self.size} (truncated?)"
                )
            self.tensors[name] = GGUFTensor(name, tensor.type_id, tensor.shape, begin, tensor.nbytes)

    def blocks(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 of shape (*shape[:-1], bytes per row); a read-only view of the mapping."""
        tensor = self.tensors[name]
        rows = tensor.shape[:-1]
        return self.data[tensor.offset : tensor.offset + tensor.nbytes].reshape(*rows, -1)
