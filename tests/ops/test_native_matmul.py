"""The native kernels against numpy on weights that the gguf package dequantizes, and against themselves in other batches."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

native: Any = pytest.importorskip("radixrt.ops._native", reason="built without a compiler")

STORED = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K]
FLOATS = [Type.F32, Type.F16, Type.BF16]
VARIANTS = native.variants()
_HALVES = {  # where the blocks of a type keep float16 numbers
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
}


def blocks(kind: Type, n: int, k: int, seed: int) -> np.ndarray:
    """Rows as stored, of any bits but for scales that are numbers of an ordinary size."""
    rng = np.random.default_rng(seed)
    if kind == Type.F32:
        return rng.standard_normal((n, k), dtype=np.float32).view(np.uint8)
    if kind == Type.F16:
        return rng.standard_normal((n, k), dtype=np.float32).astype(np.float16).view(np.uint8)
    if kind == Type.BF16:
        return (rng.standard_normal((n, k), dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rows = rng.integers(0, 256, (n, k // elements, size), dtype=np.uint8)
    for at in _HALVES[kind]:
        scales = rng.standard_normal((n, k // elements), dtype=np.float32).astype(np.float16)
        rows[:, :, at : at + 2] = scales.view(np.uint8).reshape(n, k // elements, 2)
    return rows.reshape(n, -1)


def values(kind: Type, rows: np.ndarray) -> np.ndarray:
    return gguf.dequantize(rows, kind).astype(np.float32)


def pack(kind: Type, rows: np.ndarray, k: int, order: np.ndarray | None = None, bias: Any = None) -> tuple[Any, ...]:
    order = np.arange(len(rows), dtype=np.int32) if order is None else order.astype(np.int32)
    return native.pack(int(kind), [rows], np.zeros(len(order), np.int32), order, k, bias)


def unpacked(packed: tuple[Any, ...]) -> np.ndarray:
    """The matrix that a packed one stands for, by the layout that types.hpp describes."""
    data, _, n, k, kind, group, offset, mins, wide = packed
    tiles = -(-n // 16)
    if kind >= 2:
        raw = np.frombuffer(data, np.float32 if kind == 2 else np.uint16).reshape(tiles, k, 16)
        if kind == 3:
            raw = raw.view(np.float16).astype(np.float32)
        elif kind == 4:
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.transpose(0, 2, 1).reshape(tiles * 16, k)[:n]
    raw = np.frombuffer(data, np.uint8).reshape(tiles, k // group, -1)
    size = group * 16 // (2 if kind == 0 else 1)
    codes = raw[:, :, :size].reshape(tiles, k // group, -1, 16, 4)
    if kind == 0:
        codes = np.concatenate((codes & 15, codes >> 4), axis=2)
    codes = codes.transpose(0, 3, 1, 2, 4).reshape(tiles * 16, k // group, group)
    scales = np.ascontiguousarray(raw[:, :, size:]).view(np.float32 if wide else np.float16).astype(np.float32)
    scales = scales.reshape(tiles, k // group, -1, 16).transpose(2, 0, 3, 1).reshape(-1, tiles * 16, k // group, 1)
    least = scales[1] if mins else -offset * scales[0]
    return (codes * scales[0] + least).reshape(tiles * 16, k)[:n].astype(np.float32)


def rounded(x: np.ndarray, group: int) -> np.ndarray:
    """Activations as quantized, each group in steps of its largest / 127."""
    parts = x.reshape(len(x), -1, group)
    largest = np.abs(parts).max(-1, keepdims=True)
    codes = np.rint(parts * (np.float32(127) / np.where(largest > 0, largest, 1)).astype(np.float32))
    return (codes * (largest / np.float32(127)).astype(np.float64)).reshape(x.shape)


def product(
    variant: str, packed: tuple[Any, ...], x: np.ndarray, out: np.ndarray | None = None, tiles: Any = None
) -> np.ndarray:
    n = packed[2]
    result = np.zeros((len(x), n), np.float32) if out is None else out.copy()
    begin, end = tiles or (0, -(-n // 16))
    native.matmul(variant, packed, np.ascontiguousarray(x), result, out is not None, begin, end)
    return result


def rows_of(count: int, k: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, k), dtype=np.float32)


@pytest.mark.parametrize("kind", STORED + FLOATS, ids=lambda kind: kind.name)
def test_packed_matrix_is_what_gguf_reads(kind: Type) -> None:
    stored = blocks(kind, 37, 512, 1)
    order = np.random.default_rng(2).permutation(37)
    got, want = unpacked(pack(kind, stored, 512, order)), values(kind, stored)[order]
    if kind in FLOATS:
        np.testing.assert_array_equal(got, want)
    else:  # the sum of two terms, each of which may round
        np.testing.assert_allclose(got, want, rtol=2e-7, atol=1e-5)


def test_rows_of_several_matrices_are_laid_into_one() -> None:
    first, second = blocks(Type.Q4_1, 32, 64, 1), blocks(Type.Q4_1, 32, 64, 2)
    source = np.repeat(np.array([0, 1, 0, 1], np.int32), 16)
    row = np.concatenate((np.arange(16), np.arange(16), np.arange(16, 32), np.arange(16, 32))).astype(np.int32)
    got = unpacked(native.pack(int(Type.Q4_1), [first, second], source, row, 64, None))
    want = np.stack((values(Type.Q4_1, first), values(Type.Q4_1, second)))[source, row]
    np.testing.assert_allclose(got, want, rtol=2e-7, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", STORED + FLOATS, ids=lambda kind: kind.name)
def test_product_is_that_of_the_dequantized_matrix(kind: Type, variant: str) -> None:
    n, k = 85, 512
    stored, x = blocks(kind, n, k, 3), rows_of(13, k, 4)
    bias = np.zeros(96, np.float32)
    bias[:n] = np.arange(n)
    packed = pack(kind, stored, k, bias=bias)
    weights = values(kind, stored).astype(np.float64)
    seen = x.astype(np.float64) if kind in FLOATS else rounded(x, packed[5])
    want, size = seen @ weights.T + bias[:n], np.abs(seen) @ np.abs(weights).T + bias[:n]
    error = np.abs(product(variant, packed, x) - want) / size
    assert error.max() < 3e-6
    before = rows_of(13, n, 5)
    assert (np.abs(product(variant, packed, x, before) - (want + before)) / (size + np.abs(before))).max() < 3e-6
    half = product(variant, packed, x, tiles=(2, 4))  # no other output is written
    np.testing.assert_array_equal(half[:, 32:64], product(variant, packed, x)[:, 32:64])
    assert not half[:, :32].any() and not half[:, 64:].any()


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_row_is_the_same_bits_in_any_batch(variant: str, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(STORED + FLOATS))
    k = 256 * data.draw(st.integers(1, 3)) if kind not in FLOATS else data.draw(st.integers(1, 300))
    n = data.draw(st.integers(1, 150))
    packed = pack(kind, blocks(kind, n, k, 7), k)
    x = rows_of(data.draw(st.integers(2, 40)), k, 8)
    whole = product(variant, packed, x)
    row = data.draw(st.integers(0, len(x) - 1))
    np.testing.assert_array_equal(whole[row], product(variant, packed, x[row : row + 1])[0])
    begin = data.draw(st.integers(0, row))
    np.testing.assert_array_equal(whole[begin : row + 1], product(variant, packed, x[begin : row + 1]))
    tile = data.draw(st.integers(0, (n - 1) // 16))
    part = product(variant, packed, x[begin : row + 1], tiles=(tile, tile + 1))
    outputs = slice(16 * tile, 16 * tile + 16)
    np.testing.assert_array_equal(whole[begin : row + 1, outputs], part[:, outputs])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", STORED, ids=lambda kind: kind.name)
def test_rows_in_batches_of_every_size_are_the_same_bits(kind: Type, variant: str) -> None:
    packed = pack(kind, blocks(kind, 85, 256, 9), 256)  # 6 tiles, the last one not full
    x = rows_of(19, 256, 10)
    alone = np.concatenate([product(variant, packed, row[None]) for row in x])
    for count in range(2, len(x) + 1):
        for tiles in ((0, 6), (1, 6), (2, 5)):
            outputs = slice(16 * tiles[0], min(85, 16 * tiles[1]))
            got = product(variant, packed, x[-count:], tiles=tiles)
            np.testing.assert_array_equal(got[:, outputs], alone[-count:, outputs])
            assert not got[:, : outputs.start].any() and not got[:, outputs.stop :].any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", STORED, ids=lambda kind: kind.name)
def test_the_largest_codes_of_either_sign_do_not_overflow(kind: Type, variant: str) -> None:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    stored = np.repeat(np.array([0, 0x7F, 0x80, 0xFF], np.uint8), size * 512 // elements).reshape(4, -1, size)
    for at in _HALVES[kind]:
        stored[:, :, at : at + 2] = np.ones(1, np.float16).view(np.uint8)
    stored = np.tile(stored.reshape(4, -1), (5, 1))  # in every part of a tile
    x = np.ones((4, 512), np.float32)
    x[1], x[2, ::2], x[3, 256:] = -1, -1, -1
    weights = values(kind, stored).astype(np.float64)
    size_of = np.abs(x) @ np.abs(weights).T
    error = np.abs(product(variant, pack(kind, stored, 512), x) - x @ weights.T)
    assert (error <= 3e-6 * size_of).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("k", [64, 1 << 17])
def test_rows_beyond_a_cache_are_all_computed(variant: str, k: int) -> None:
    packed = pack(Type.Q8_0, blocks(Type.Q8_0, 17, k, 1), k)
    x = rows_of(23 if k > 64 else 9000, k, 2)
    whole = product(variant, packed, x)
    for row in (0, len(x) // 2, len(x) - 1):
        np.testing.assert_array_equal(whole[row], product(variant, packed, x[row : row + 1])[0])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("group", [16, 32])
def test_quantized_rows(variant: str, group: int) -> None:
    x = rows_of(1, 40 * group, 6)[0] * np.repeat(np.logspace(-20, 20, 40, dtype=np.float32), group)
    x[: 2 * group] = 0
    codes, scale, weight, total = (
        np.frombuffer(part, dtype)
        for part, dtype in zip(native.quantize(variant, x, group), (np.int8, np.float32, np.float32, np.int32))
    )
    largest = np.abs(x.reshape(-1, group)).max(-1)
    np.testing.assert_array_equal(scale, largest / np.float32(127))
    np.testing.assert_array_equal(total, codes.reshape(-1, group).sum(-1, dtype=np.int32))
    np.testing.assert_array_equal(weight, scale * total.astype(np.float32))
    assert np.abs(codes.astype(int)).max() == 127
    error = np.abs(codes.reshape(-1, group) * scale[:, None].astype(np.float64) - x.reshape(-1, group))
    assert (error <= largest[:, None] / 127 * 0.5001).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_ties_are_quantized_to_even(variant: str) -> None:
    x = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127] + [0] * 24, np.float32)
    codes = np.frombuffer(native.quantize(variant, x, 32)[0], np.int8)
    assert codes[:8].tolist() == [127, 0, 2, 2, 0, -2, -2, -127]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [Type.Q4_1, Type.Q6_K, Type.Q8_0], ids=lambda kind: kind.name)
def test_what_is_not_finite_stays_in_its_row(kind: Type, bad: float, variant: str) -> None:
    packed = pack(kind, blocks(kind, 20, 256, 1), 256)
    x = rows_of(9, 256, 2)
    clean = product(variant, packed, x)
    for at in (0, 37, 255):
        spoilt = x.copy()
        spoilt[4, at] = bad
        got = product(variant, packed, spoilt)
        assert np.isnan(got[4]).all()
        np.testing.assert_array_equal(np.delete(got, 4, 0), np.delete(clean, 4, 0))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("k", [1, 15, 16, 17, 63, 64, 576, 1000])
def test_rows_kernels_are_those_of_torch(variant: str, k: int) -> None:
    x, y, z = (torch.from_numpy(rows_of(1, k, seed)[0]) * 8 for seed in range(3))
    norm = np.frombuffer(native.rms_norm(variant, x.numpy(), y.numpy(), 1e-5), np.float32)
    want = torch.nn.functional.rms_norm(x.double(), (k,), y.double(), 1e-5).numpy()
    np.testing.assert_allclose(norm, want, rtol=1e-6)

    gated = np.frombuffer(native.silu_mul(variant, x.numpy(), y.numpy()), np.float32)
    want = (torch.nn.functional.silu(x.double()) * y.double()).numpy()
    np.testing.assert_allclose(gated, want, rtol=1e-6)

    head, angle = torch.cat((x, y)).numpy().copy(), z.numpy()
    cos, sin = np.cos(angle), np.sin(angle)
    native.rope(variant, head, cos, sin)
    np.testing.assert_allclose(head[:k], x.numpy() * cos - y.numpy() * sin, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(head[k:], y.numpy() * cos + x.numpy() * sin, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_silu_over_all_floats(variant: str) -> None:
    gate = np.concatenate((np.linspace(-120, 120, 4001), [0.0, 1e30, -1e30, np.inf, np.nan])).astype(np.float32)
    got = np.frombuffer(native.silu_mul(variant, gate, np.ones_like(gate)), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = gate.astype(np.float64)
        want = wide / (1 + np.exp(-wide))
    np.testing.assert_allclose(got[:-1], want[:-1], rtol=5e-7, atol=1e-35)
    assert np.isnan(got[-1])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("kind", "dtype"), [(0, torch.float32), (1, torch.float16), (2, torch.bfloat16)])
def test_stored_keys_and_values_are_torchs(variant: str, kind: int, dtype: torch.dtype) -> None:
    bits = np.random.default_rng(3).integers(0, 1 << 32, 100003, dtype=np.uint32).view(np.float32)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = halves[np.isfinite(halves)] * np.float32(1.00048828125)  # between two numbers of 11 bits
    edges = np.array([0.0, -0.0, np.inf, -np.inf, 65504, 65519.99, 65520, 6e-8, 2.9e-8, 3e-8, 3.39e38], np.float32)
    x = np.concatenate((bits, halves, edges))
    x = x[~np.isnan(x)]
    want = torch.from_numpy(x).to(dtype).view(torch.int32 if kind == 0 else torch.int16).numpy()
    np.testing.assert_array_equal(np.frombuffer(native.store_kv(variant, x, kind), want.dtype), want)
    kept = np.frombuffer(native.store_kv(variant, np.full(5, np.nan, np.float32), kind), want.dtype)
    assert torch.from_numpy(kept.copy()).view(dtype).isnan().all()


def test_what_does_not_fit_is_refused() -> None:
    packed = pack(Type.Q8_0, blocks(Type.Q8_0, 20, 64, 1), 64)
    x, out = rows_of(2, 64, 2), np.zeros((2, 20), np.float32)
    variant = VARIANTS[0]
    one = np.zeros(1, np.int32)
    for problem, call in {
        "unknown": lambda: native.matmul("mmx", packed, x, out, False, 0, 2),
        "rows of 64": lambda: native.matmul(variant, packed, x.ravel()[1:].copy(), out, False, 0, 2),
        "out: 40 items": lambda: native.matmul(variant, packed, x, out[:1], False, 0, 2),
        "tiles 0 .. 2": lambda: native.matmul(variant, packed, x, out, False, 0, 3),
        "data: 1088 items|data: 2176 items": lambda: native.matmul(
            variant, (bytes(3), *packed[1:]), x, out, False, 0, 2
        ),
        "no such kind": lambda: native.matmul(variant, (*packed[:4], 9, *packed[5:]), x, out, False, 0, 2),
        "type=5": lambda: native.pack(5, [b""], one, one, 32, None),
        "k=33": lambda: native.pack(int(Type.Q8_0), [bytes(34)], one, one, 33, None),
        "source 0 has 1 rows": lambda: native.pack(int(Type.Q8_0), [bytes(34)], one, one + 1, 32, None),
        "there are 1 sources": lambda: native.pack(int(Type.Q8_0), [bytes(34)], one - 1, one, 32, None),
        "row: 1 items": lambda: native.pack(int(Type.Q8_0), [bytes(34)], one, np.zeros(2, np.int32), 32, None),
        "bias: 16 items": lambda: native.pack(int(Type.Q8_0), [bytes(34)], one, one, 32, np.zeros(1, np.float32)),
        "group=8": lambda: native.quantize(variant, x, 8),
        "not groups of 32": lambda: native.quantize(variant, x.ravel()[:33].copy(), 32),
        "weight: 64 items": lambda: native.rms_norm(variant, x[0], x.ravel(), 1e-5),
        "head: 128 items": lambda: native.rope(variant, x[0].copy(), x[0], x[0]),
        "up: 64 items": lambda: native.silu_mul(variant, x[0], x.ravel()),
        "kind=4": lambda: native.store_kv(variant, x[0], 4),
        "items of 4 bytes": lambda: native.quantize(variant, x.astype(np.float64), 32),
        "too few": lambda: native.peaks(bytes(100)),
    }.items():
        with pytest.raises(ValueError, match=problem):
            call()
