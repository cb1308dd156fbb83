"""The GGUF header reader against the gguf package's writer and reader, and against hostile headers."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.errors import ModelError
from radixrt.model.dequantize import dequantize
from radixrt.model.gguf_file import GGML_TYPES, GGUFFile, StringArray
from tests.model.model_files import write_gguf

U8, I32, STRING, ARRAY = 0, 5, 8, 9


def sample(path: Path) -> Path:
    rng = np.random.default_rng(0)

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_uint8("k.u8", 200)
        writer.add_int8("k.i8", -100)
        writer.add_uint16("k.u16", 60000)
        writer.add_int16("k.i16", -30000)
        writer.add_uint32("k.u32", 2**32 - 1)
        writer.add_int32("k.i32", -(2**31))
        writer.add_uint64("k.u64", 2**64 - 1)
        writer.add_int64("k.i64", -(2**63))
        writer.add_float32("k.f32", 0.1)
        writer.add_float64("k.f64", 0.1)
        writer.add_bool("k.true", True)
        writer.add_string("k.text", "grüße 日本")
        writer.add_array("k.ints", [1, -2, 3])
        writer.add_array("k.floats", [0.5, 1.5])
        writer.add_array("k.texts", ["", "a", "ééé", "x" * 300])
        writer.add_tensor("a.f32", rng.normal(size=(3, 5)).astype(np.float32))
        writer.add_tensor("b.f16", rng.normal(size=(2, 7)).astype(np.float16))
        for kind in (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0):
            blocks = gguf.quants.quantize(rng.normal(size=(4, 64)).astype(np.float32), kind)
            writer.add_tensor(f"c.{kind.name}", blocks, raw_dtype=kind)
        writer.add_tensor("d.cube", rng.normal(size=(2, 3, 4)).astype(np.float32))

    return write_gguf(path, fill)


@pytest.fixture(scope="module")
def sample_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample(tmp_path_factory.mktemp("gguf") / "sample.gguf")


def test_reads_what_the_gguf_package_reads(sample_path: Path) -> None:
    ours, theirs = GGUFFile(sample_path), gguf.GGUFReader(sample_path)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.fields) == list(expected)
    for key, value in ours.fields.items():
        value = list(value) if isinstance(value, (StringArray, np.ndarray)) else value
        assert value == expected[key], key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert entry.offset == tensor.data_offset
        assert entry.type_name == tensor.tensor_type.name
        np.testing.assert_array_equal(ours.blocks(tensor.name), tensor.data.view(np.uint8))
        assert not ours.blocks(tensor.name).flags.writeable


def test_reads_the_default_model_as_the_gguf_package_does(default_gguf: Path) -> None:
    ours, theirs = GGUFFile(default_gguf), gguf.GGUFReader(default_gguf)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        assert ours.fields[key].list() == theirs.fields[key].contents()
    assert {name: entry.offset for name, entry in ours.tensors.items()} == {
        tensor.name: tensor.data_offset for tensor in theirs.tensors
    }


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType(id) for id in GGML_TYPES], ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_dequantizes_bit_for_bit_as_the_gguf_package(kind: gguf.GGMLQuantizationType, rows: int) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    assert GGML_TYPES[kind][1:] == (block, block_bytes)
    rng = np.random.default_rng(rows)
    values = rng.integers(0, 256, size=(rows, 1024 // block * block_bytes), dtype=np.uint8)
    theirs_input = values
    if kind == gguf.GGMLQuantizationType.F32:
        theirs_input = values.view(np.float32)
    elif kind == gguf.GGMLQuantizationType.F16:
        theirs_input = values.view(np.float16)
    with np.errstate(all="ignore"):
        ours, theirs = dequantize(values, kind.value), gguf.quants.dequantize(theirs_input, kind)
    assert ours.shape == theirs.shape == (rows, 1024)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, theirs.astype(np.float32))


def test_every_truncation_is_one_clear_error(sample_path: Path, tmp_path: Path) -> None:
    whole = sample_path.read_bytes()
    cut = tmp_path / "cut.gguf"
    used = max(entry.offset + entry.nbytes for entry in GGUFFile(sample_path).tensors.values())
    for length in range(used):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError) as error:
            GGUFFile(cut)
        assert str(cut) in str(error.value)
        assert "\n" not in str(error.value)


@given(st.data())
def test_any_damage_to_the_header_is_a_model_error_or_harmless(sample_path: Path, data: st.DataObject) -> None:
    content = bytearray(sample_path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(content), 1200) - 8))
        content[at : at + 8] = data.draw(
            st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 2**60)])
        )
    path = sample_path.with_suffix(".damaged")
    path.write_bytes(content)
    try:
        file = GGUFFile(path)
        for value in file.fields.values():
            if isinstance(value, StringArray):
                value.list()
        for name in file.tensors:
            file.blocks(name)
    except ModelError:
        pass


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(
    *, fields: bytes = b"", n_fields: int = 0, tensors: bytes = b"", n_tensors: int = 0, version: int = 3
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_fields) + fields + tensors


def tensor(
    name: str = "t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, n_dims: int | None = None
) -> bytes:
    packed = struct.pack(f"<{len(dims)}Q", *dims)
    return (
        text(name)
        + struct.pack("<I", len(dims) if n_dims is None else n_dims)
        + packed
        + struct.pack("<IQ", kind, offset)
    )


def padded(head: bytes, data: int = 4096) -> bytes:
    return head + bytes(-len(head) % 32) + bytes(data)


HOSTILE = {
    "empty file": (b"", "not a GGUF file"),
    "another format": (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
    "version 1": (header(version=1) + bytes(64), "version 1 "),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "big-endian"),
    "2^60 tensors": (header(n_tensors=2**60) + bytes(64), f"{2**60} tensors"),
    "2^60 keys": (header(n_fields=2**60) + bytes(64), f"{2**60} metadata keys"),
    "key longer than the file": (header(n_fields=1, fields=struct.pack("<Q", 60000)) + bytes(64), "metadata key 0"),
    "string longer than the file": (
        header(n_fields=1, fields=text("k") + struct.pack("<IQ", STRING, 2**63)) + bytes(64),
        "'k'",
    ),
    "array longer than the file": (
        header(n_fields=1, fields=text("k") + struct.pack("<IIQ", ARRAY, I32, 2**62)) + bytes(64),
        "'k'",
    ),
    "2^61 strings": (
        header(n_fields=1, fields=text("k") + struct.pack("<IIQ", ARRAY, STRING, 2**61)) + bytes(64),
        "'k'",
    ),
    "string of an array beyond the end": (
        header(
            n_fields=1, fields=text("k") + struct.pack("<IIQ", ARRAY, STRING, 2) + text("a") + struct.pack("<Q", 2**63)
        )
        + bytes(64),
        "string 1 of metadata key 'k'",
    ),
    "nested arrays": (
        header(n_fields=1, fields=text("k") + struct.pack("<IIQIIQ", ARRAY, ARRAY, 1, ARRAY, ARRAY, 1)) + bytes(64),
        "nested arrays",
    ),
    "unknown value type": (header(n_fields=1, fields=text("k") + struct.pack("<I", 99)) + bytes(64), "value type 99"),
    "key twice": (
        header(n_fields=2, fields=2 * (text("k") + struct.pack("<IB", U8, 1))) + bytes(64),
        "'k' occurs twice",
    ),
    "key that is not UTF-8": (header(n_fields=1, fields=struct.pack("<Q", 2) + b"\xff\xfe") + bytes(64), "not UTF-8"),
    "alignment of zero": (
        header(n_fields=1, fields=text("general.alignment") + struct.pack("<II", 4, 0)) + bytes(64),
        "general.alignment=0",
    ),
    "alignment of 24": (
        header(n_fields=1, fields=text("general.alignment") + struct.pack("<II", 4, 24)) + bytes(64),
        "general.alignment=24",
    ),
    "tensor twice": (padded(header(n_tensors=2, tensors=2 * tensor())), "'t' occurs twice"),
    "no dimensions": (padded(header(n_tensors=1, tensors=tensor(dims=()))), "0 dimensions"),
    "2^32 dimensions": (padded(header(n_tensors=1, tensors=tensor(n_dims=2**32 - 1))), "dimensions"),
    "dimension of zero": (padded(header(n_tensors=1, tensors=tensor(dims=(32, 0)))), "impossible dimensions"),
    "dimensions that overflow": (
        padded(header(n_tensors=1, tensors=tensor(dims=(2**32, 2**32, 2**32, 2**32)))),
        "impossible dimensions",
    ),
    "unknown ggml type": (padded(header(n_tensors=1, tensors=tensor(kind=77))), "type with number 77"),
    "ggml type we lack": (padded(header(n_tensors=1, tensors=tensor(dims=(256,), kind=16))), "IQ2_XXS"),
    "row not of whole blocks": (padded(header(n_tensors=1, tensors=tensor(dims=(33,), kind=2))), "block size 32"),
    "offset out of range": (padded(header(n_tensors=1, tensors=tensor(offset=2**62))), "'t' needs bytes"),
    "offset misaligned": (padded(header(n_tensors=1, tensors=tensor(offset=8))), "offset 8"),
    "name without end": (padded(header(n_tensors=1, tensors=struct.pack("<Q", 2**62) + bytes(40))), "tensor 0"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_name_what_is_wrong(case: str, tmp_path: Path) -> None:
    content, expected = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as error:
        GGUFFile(path)
    assert str(path) in str(error.value)
    assert expected in str(error.value)


def test_the_headers_above_are_hostile_only_where_they_say(tmp_path: Path) -> None:
    path = tmp_path / "fine.gguf"
    path.write_bytes(
        padded(header(n_fields=1, fields=text("k") + struct.pack("<IB", U8, 1), n_tensors=1, tensors=tensor()))
    )
    file = GGUFFile(path)
    assert file.fields == {"k": 1}
    assert file.tensors["t"].shape == (32,)


def test_strings_that_are_not_utf8_are_named_when_read(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    strings = struct.pack("<IIQ", ARRAY, STRING, 2) + text("fine") + struct.pack("<Q", 1) + b"\xff"
    path.write_bytes(header(n_fields=1, fields=text("k") + strings) + bytes(64))
    with pytest.raises(ModelError, match=r"k\[1\] is not UTF-8"):
        GGUFFile(path).fields["k"].list()


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="absent.gguf: cannot be read"):
        GGUFFile(tmp_path / "absent.gguf")
