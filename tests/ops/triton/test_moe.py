"""The mixture of experts: sorting and blocks beside plain Python, the result beside each token's experts one by one in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.ops.interface import GATED
from radixrt.ops.triton import moe as kernels
from radixrt.ops.weights import FP8, Fp8Weight, IntWeight, Weight, dequantized, pack_nibbles, stacked


def one_by_one(x, experts, gains, gate_up, down, kind, gate_up_bias=None, down_bias=None) -> torch.Tensor:
    gate_up, down = dequantized(gate_up, torch.float32).double(), dequantized(down, torch.float32).double()
    out = torch.zeros_like(x, dtype=torch.float64)
    for t, (row, chosen, gain) in enumerate(zip(x.double(), experts.tolist(), gains.double())):
        for e, g in zip(chosen, gain):
            gate, up = (gate_up[e] @ row + (0 if gate_up_bias is None else gate_up_bias[e].double())).chunk(2)
            if kind == "swiglu_oai":
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            else:
                act = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda v: F.gelu(v, approximate="tanh")}[kind]
                inner = act(gate) * up
            out[t] += g * (down[e] @ inner + (0 if down_bias is None else down_bias[e].double()))
    return out


def case(tokens: int, chosen: int, count: int, hidden: int, inner: int, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=draw)
    experts = torch.rand(tokens, count, generator=draw).argsort(1)[:, :chosen]
    gains = torch.rand(tokens, chosen, generator=draw)
    gate_up = torch.randn(count, 2 * inner, hidden, generator=draw) / hidden**0.5
    return x, experts, gains, gate_up, torch.randn(count, hidden, inner, generator=draw) / inner**0.5


def packed(shape: tuple[int, ...], form: str, seed: int) -> Weight:
    draw = torch.Generator().manual_seed(seed)
    *lead, n, k = shape
    if form.startswith("int"):
        bits, group = int(form[3]), 16 if "narrow" in form else 32
        codes = torch.randint(0, 2**bits, shape, generator=draw, dtype=torch.uint8)
        scales = (torch.rand(*lead, n, k // group, generator=draw).half() + 0.5) / 2**bits / k**0.5
        zeros = torch.randint(0, 2**bits, scales.shape, generator=draw, dtype=torch.uint8) if "zeros" in form else None
        order = torch.stack([torch.randperm(k, generator=draw) for _ in range(lead[0])]) if "order" in form else None
        return IntWeight(pack_nibbles(codes) if bits == 4 else codes, scales, zeros, bits, group, order)
    rows, group = (32, 32) if "block" in form else (1, k)
    scales = (torch.rand(*lead, -(-n // rows), -(-k // group), generator=draw) + 0.5) / 60 / k**0.5
    return Fp8Weight((torch.randn(shape, generator=draw) * 60).to(FP8), scales, rows, group)


@pytest.mark.parametrize("kind", GATED)
def test_each_activation_with_biases(kind: str) -> None:
    x, experts, gains, gate_up, down = case(5, 2, 4, 32, 48)
    draw = torch.Generator().manual_seed(5)
    biases = torch.randn(4, 96, generator=draw) * 3, torch.randn(4, 32, generator=draw)
    found = kernels.moe(x, experts, gains, gate_up, down, kind, *biases)
    torch.testing.assert_close(
        found.double(), one_by_one(x, experts, gains, gate_up, down, kind, *biases), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "form", ["int4", "int4-narrow", "int4-zeros-order", "int8-zeros", "int8-narrow", "fp8", "fp8-block"]
)
def test_packed_experts(form: str) -> None:
    x, experts, gains, gate_up, down = case(6, 2, 3, 64, 96)
    gate_up, down = packed(tuple(gate_up.shape), form, 1), packed(tuple(down.shape), form, 2)
    found = kernels.moe(x, experts, gains, gate_up, down, "silu")
    torch.testing.assert_close(
        found.double(), one_by_one(x, experts, gains, gate_up, down, "silu"), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "chosen", "count"), [(1, 1, 1), (40, 2, 2), (130, 1, 1)])
def test_halves_and_larger_blocks(tokens: int, chosen: int, count: int, dtype: torch.dtype) -> None:
    x, experts, gains, gate_up, down = case(tokens, chosen, count, 32, 16)
    x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    found = kernels.moe(x, experts, gains, gate_up, down, "silu")
    assert found.dtype is dtype
    expected = one_by_one(x, experts, gains, gate_up, down, "silu")
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)


@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 9), st.integers(1, 3), st.integers(3, 6), st.integers(1, 5), st.integers(1, 40), st.integers(0, 99)
)
def test_any_shape(tokens: int, chosen: int, count: int, hidden: int, inner: int, seed: int) -> None:
    args = (*case(tokens, chosen, count, hidden * 7, inner, seed), "silu")
    torch.testing.assert_close(kernels.moe(*args).double(), one_by_one(*args), rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=60), st.sampled_from([1, 2, 16]), st.integers(6, 17), st.booleans()
)
def test_blocks_cover_the_choices_in_order(choices: list[int], rows: int, count: int, few: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_FEW", 1024 if few else 0)  # one program, or torch
        order, blocks = kernels.blocks_of(torch.tensor(choices)[:, None], count, rows)
    assert order.tolist() == sorted(range(len(choices)), key=lambda i: choices[i])  # stable
    seen = []
    for expert, first, end in blocks.tolist():
        assert end - first <= rows
        for row in range(first, end):
            assert choices[order[row]] == expert
            seen.append(row)
    assert seen == list(range(len(choices)))
    assert (order.dtype, blocks.dtype) == (torch.int32, torch.int32)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="kind='relu': must be one of"):
        kernels.moe(*case(1, 1, 1, 16, 16), "relu")


def test_the_order_of_columns_is_handed_on_as_the_experts_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is converted where they are stacked, once."""
    x, experts, gains, gate_up, down = case(6, 2, 3, 64, 96)
    whole = packed(tuple(gate_up.shape), "int4-order", 1)
    assert isinstance(whole, IntWeight) and whole.order is not None
    each = [IntWeight(c, s, None, 4, 32, o) for c, s, o in zip(whole.codes, whole.scales, whole.order)]
    weight = stacked([*each[:2], IntWeight(each[2].codes, each[2].scales, None, 4, 32)])
    assert isinstance(weight, IntWeight) and weight.order is not None
    assert weight.order.dtype is torch.int32
    assert weight.order[2].tolist() == list(range(64))
    handed: list[object] = []
    kernel = kernels.experts_kernel

    class Recorded:
        def __getitem__(self, grid: tuple[int, int]):
            def launch(*args, **more):
                handed.extend(args)
                return kernel[grid](*args, **more)

            return launch

    monkeypatch.setattr(kernels, "experts_kernel", Recorded())
    found = kernels.moe(x, experts, gains, weight, down, "silu")
    assert any(argument is weight.order for argument in handed)
    torch.testing.assert_close(
        found.double(), one_by_one(x, experts, gains, weight, down, "silu"), rtol=1e-5, atol=1e-5
    )


def test_columns_in_another_order_that_are_no_whole_tiles_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """``moe`` makes such a matrix dense; nothing may hand it to the kernel, which would read its columns in order."""
    x, experts, gains, gate_up, down = case(2, 1, 2, 40, 16)
    codes = torch.randint(0, 256, gate_up.shape, dtype=torch.uint8)
    order = torch.stack([torch.randperm(40) for _ in range(2)])
    weight = IntWeight(codes, torch.rand(2, 32, 1), None, 8, 40, order)
    expected = one_by_one(x, experts, gains, weight, down, "silu")
    torch.testing.assert_close(
        kernels.moe(x, experts, gains, weight, down, "silu").double(), expected, rtol=1e-5, atol=1e-2
    )
    monkeypatch.setattr(kernels, "_tiled", lambda weight, dtype: weight)
    with pytest.raises(Exception, match="columns in another order, or of 4 bits, must be whole tiles"):
        kernels.moe(x, experts, gains, weight, down, "silu")


DENSE = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
STATIC = Fp8Weight(DENSE.to(FP8), torch.ones(32, 1), 1, 64, torch.tensor(0.5))
MIXTURES: dict[str, list[Weight]] = {
    "a dense one first": [DENSE, packed((32, 64), "int4", 1), packed((32, 64), "fp8", 2)],
    "a dense one last": [packed((32, 64), "int4", 1), packed((32, 64), "int4", 2), DENSE],
    "4 and 8 bits": [packed((32, 64), "int4", 1), packed((32, 64), "int8", 2)],
    "integers and fp8": [packed((32, 64), "int8", 1), packed((32, 64), "fp8", 2)],
    "several groups": [packed((32, 64), "int4", 1), packed((32, 64), "int4-narrow-zeros", 2)],
    "rows and blocks": [packed((32, 64), "fp8", 1), packed((32, 64), "fp8-block", 2)],
    "static and dynamic": [packed((32, 64), "fp8", 1), STATIC],
}


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_experts_of_several_forms_are_dense(mixture: str, dtype: torch.dtype | None) -> None:
    each = MIXTURES[mixture]
    whole = stacked(each, dtype)
    assert isinstance(whole, torch.Tensor)
    assert torch.equal(whole, torch.stack([dequantized(weight, dtype or torch.float32) for weight in each]))
    halves = stacked([weight.bfloat16() if isinstance(weight, torch.Tensor) else weight for weight in each])
    assert isinstance(halves, torch.Tensor)
    assert halves.dtype is (torch.bfloat16 if "dense" in mixture else torch.float32)


@pytest.mark.parametrize("form", ["int4", "int4-zeros", "int8", "fp8", "fp8-block"])
def test_experts_of_one_form_stay_packed(form: str) -> None:
    each = [packed((32, 64), form, seed) for seed in range(3)]
    whole = stacked(each)
    assert type(whole) is type(each[0]) and whole.shape == (3, 32, 64)
    assert torch.equal(dequantized(whole, torch.float32), torch.stack([dequantized(w, torch.float32) for w in each]))
