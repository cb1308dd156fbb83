"""Linear layers on packed weights: the kernels beside torch on the dequantized matrix."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.ops.triton import linear as kernels
from radixrt.ops.weights import FP8, Fp8Weight, IntWeight, Weight, dequantized, pack_nibbles, rounded

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def int_weight(
    n: int, k: int, bits: int, group: int, *, zeros: bool = True, order: bool = False, seed: int = 0
) -> IntWeight:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (n, k), generator=draw, dtype=torch.uint8)
    codes[:, 0], codes[:, 1] = 0, 2**bits - 1
    scales = (torch.rand(n, k // group, generator=draw) + 0.5).half() / 2**bits
    points = torch.randint(0, 2**bits, scales.shape, generator=draw, dtype=torch.uint8) if zeros else None
    permutation = torch.randperm(k, generator=draw) if order else None
    return IntWeight(pack_nibbles(codes) if bits == 4 else codes, scales, points, bits, group, permutation)


def fp8_weight(n: int, k: int, rows: int, group: int, *, static: bool = False, seed: int = 0) -> Fp8Weight:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randn(n, k, generator=draw).mul(60).clamp(-448, 448).to(FP8)
    codes.view(torch.uint8)[0, :16] = torch.arange(16, dtype=torch.uint8)  # zero, those without an exponent, small ones
    codes.view(torch.uint8)[0, 16:20] = torch.tensor([0x80, 0x81, 0x7E, 0xFE], dtype=torch.uint8)  # -0, least, +-448
    scales = (torch.rand(-(-n // rows), -(-k // group), generator=draw) + 0.5) / 100
    return Fp8Weight(codes, scales, rows, group, torch.tensor(0.013) if static else None)


FORMS: dict[str, Weight] = {
    "int4": int_weight(72, 128, 4, 64),
    "int4-middle-row": int_weight(72, 96, 4, 96, zeros=False),
    "int4-32-order": int_weight(40, 64, 4, 32, order=True),
    "int8": int_weight(72, 128, 8, 64),
    "int8-middle-row-order": int_weight(72, 96, 8, 96, zeros=False, order=True),
    "fp8-tensor": fp8_weight(72, 128, 72, 128),
    "fp8-rows": fp8_weight(72, 96, 1, 96),
    "fp8-blocks": fp8_weight(72, 160, 32, 64),
    "fp8-no-tile": fp8_weight(24, 40, 24, 20),
}


def check(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> None:
    """The kernel is as near to the exact product as rounding x's dtype once at the end allows."""
    found = kernels.linear(x, weight, bias)
    expected = F.linear(
        x.double(), dequantized(weight, torch.float32).double(), None if bias is None else bias.double()
    )
    assert found.dtype is x.dtype and found.shape == expected.shape
    step = torch.finfo(x.dtype).eps
    size = x.double().abs() @ dequantized(weight, torch.float32).double().abs().T + 1
    assert ((found.double() - expected).abs() <= step * expected.abs() + 3e-6 * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 19])
def test_every_form(form: str, dtype: str, rows: int) -> None:
    weight = FORMS[form]
    if form == "fp8-no-tile" and dtype != "fp32":
        pytest.skip("torch multiplies, with the matrix rounded to the dtype")
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(rows, weight.shape[1], generator=draw).to(DTYPES[dtype])
    bias = torch.randn(weight.shape[0], generator=draw).to(DTYPES[dtype]) if rows == 1 else None
    check(x, weight, bias)


@pytest.mark.parametrize("rows", [16, 17, 33, 65, 129])
def test_tiles_for_more_rows(rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    check(torch.randn(rows, 64, generator=draw).bfloat16(), int_weight(130, 64, 4, 64), torch.ones(130).bfloat16())
    check(torch.randn(rows, 64, generator=draw).bfloat16(), fp8_weight(130, 64, 128, 64))


@pytest.mark.parametrize("processors", [1, 12, 1000])
def test_columns_are_split_among_programs(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "units", lambda device: processors)
    launched: list[tuple[int, int]] = []
    kernel = kernels.linear_kernel

    class Recorded:
        def __getitem__(self, grid: tuple[int, int]):
            launched.append(grid)
            return kernel[grid]

    monkeypatch.setattr(kernels, "linear_kernel", Recorded())
    draw = torch.Generator().manual_seed(processors)
    x, bias = torch.randn(3, 32 * 44, generator=draw).half(), torch.randn(70, generator=draw).half()
    check(x, int_weight(70, 32 * 44, 4, 32), bias)
    check(x, fp8_weight(70, 32 * 44, 1, 32 * 44), bias)
    assert launched == {1: [(2, 1)] * 2, 12: [(2, 11), (2, 2)], 1000: [(2, 11), (2, 2)]}[processors]


def test_no_rows() -> None:
    assert kernels.linear(torch.empty(0, 128), FORMS["int4"]).shape == (0, 72)


def test_dense_is_torch() -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(3, 8, generator=draw),
        torch.randn(5, 8, generator=draw),
        torch.randn(5, generator=draw),
    )
    assert torch.equal(kernels.linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("rows", "group"), [(1, 128), (32, 64), (72, 128)])
def test_fp8_activations(rows: int, group: int, static: bool) -> None:
    weight = fp8_weight(72, 128, rows, group, static=static)
    x = torch.randn(18, 128, generator=torch.Generator().manual_seed(0))
    codes, scales = rounded(x, weight)
    near = codes.double() * scales.double().repeat_interleave(group, 1)
    expected = near @ dequantized(weight, torch.float32).double().T
    found = kernels.linear(x, weight, None, activations="fp8").double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    kept = kernels.linear(x, weight).double()
    assert (found - kept).abs().max() > 1e-3  # they are rounded indeed


@settings(max_examples=16, deadline=None)
@given(
    st.integers(1, 20), st.integers(1, 70), st.integers(1, 3), st.sampled_from([16, 32, 48]), st.sampled_from([4, 8]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_any_shape(rows: int, n: int, pairs: int, group: int, bits: int, zeros: bool, order: bool) -> None:
    """Groups that cut a block of 4-bit codes in two are multiplied dense."""
    columns = 2 * pairs * group
    weight = int_weight(n, columns, bits, group, zeros=zeros, order=order, seed=n)
    check(torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)), weight)
