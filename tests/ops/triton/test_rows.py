"""Row kernels beside the torch reference and torch's own functions: widths that are no power of two, slices, float8 caches, padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from radixrt.ops.interface import ACTIVATIONS, GATED
from radixrt.ops.torch.ops import TorchOps
from radixrt.ops.triton import rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of inf - inf and the like

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
REFERENCE = TorchOps(torch.device("cpu"), torch.float32)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of sums and a rounding or two; the interpreter cuts bfloat16 off instead of rounding it."""
    assert found.dtype is expected.dtype and found.shape == expected.shape
    tolerance = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (5, 80), (3, 1024), (2, 2880)], ids=str)
def test_norms_are_those_of_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = random(*shape, dtype=dtype, scale=3), random(*shape, dtype=dtype, seed=1)
    weight, bias = random(shape[1], dtype=dtype, seed=2), random(shape[1], dtype=dtype, seed=3)
    near(rows.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    near(rows.rms_norm(x, weight.float(), 1e-5), REFERENCE.rms_norm(x, weight.float(), 1e-5))
    normed, total = rows.add_rms_norm(x, residual, weight, 1e-6)
    near(total, x + residual)
    near(normed, REFERENCE.rms_norm(total, weight, 1e-6))
    near(rows.layer_norm(x, weight, bias, 1e-5), F.layer_norm(x, shape[1:], weight, bias, 1e-5))
    near(rows.layer_norm(x, weight, None, 1e-2), F.layer_norm(x, shape[1:], weight, None, 1e-2))


def test_a_norm_is_rounded_where_the_reference_rounds() -> None:
    x, weight = random(7, 96, dtype=torch.float16), random(96, dtype=torch.float16, seed=1)
    same = (rows.rms_norm(x, weight, 1e-6) == REFERENCE.rms_norm(x, weight, 1e-6)).float().mean()
    once = (rows.rms_norm(x, weight.float(), 1e-6) == REFERENCE.rms_norm(x, weight.float(), 1e-6)).float().mean()
    assert same > 0.99 and once > 0.99


def test_norms_of_constant_and_large_rows_stay_finite() -> None:
    x = torch.stack([torch.zeros(100), torch.full((100,), 1e4), random(100, scale=1e4)])
    weight = torch.ones(100)
    near(rows.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
    near(rows.layer_norm(x, weight, None, 1e-6), F.layer_norm(x, (100,), weight, None, 1e-6))


def test_heads_of_a_slice_are_normed_in_place_of_it() -> None:
    qkv = random(4, 9, 80)
    weight = random(80, seed=1)
    near(rows.rms_norm(qkv[:, 2:7], weight, 1e-6), REFERENCE.rms_norm(qkv[:, 2:7], weight, 1e-6))
    wide = random(4, 200, seed=2)
    near(rows.rms_norm(wide[:, 60:140], weight, 1e-6), REFERENCE.rms_norm(wide[:, 60:140], weight, 1e-6))
    normed, total = rows.add_rms_norm(wide[:, 60:140], wide[:, :80], weight, 1e-6)
    near(normed, REFERENCE.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", GATED)
def test_activations_are_those_of_the_reference(kind: str, dtype: torch.dtype) -> None:
    for shape in ((0, 6), (1, 2), (3, 2 * 1030)):
        x = random(*shape, dtype=dtype, scale=4)
        near(rows.gated(x, kind), REFERENCE.gated(x, kind))
        near(rows.gated(x.repeat(1, 2)[:, 1 : 1 + shape[1]], kind), REFERENCE.gated(x.repeat(1, 2)[:, 1 : 1 + shape[1]], kind))  # fmt: skip
        if kind in ACTIVATIONS:
            near(rows.activate(x, kind), REFERENCE.activate(x, kind))


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match="kind='relu': must be one of silu, gelu"):
        rows.gated(random(1, 4), "relu")
    with pytest.raises(ValueError, match="kind='swiglu_oai'"):
        rows.activate(random(1, 4), "swiglu_oai")


ROPE = [  # heads, kv heads, head size, rotated dimensions
    (4, 2, 64, 64),
    (9, 3, 80, 80),  # more heads than one program takes
    (2, 1, 80, 32),  # partly rotated
    (3, 3, 96, 96),
    (2, 1, 6, 4),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotated"), ROPE)
def test_rotation_and_write_are_those_of_the_reference(
    heads: int, kv_heads: int, dim: int, rotated: int, dtype: torch.dtype
) -> None:
    tokens, slots = 5, torch.tensor([7, 0, 3, 8, 1])
    qkv = random(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    table = random(tokens, 2, rotated // 2, seed=1, dtype=dtype)  # cos and sin as the decoder slices them
    caches = [torch.full((9, kv_heads, dim), 5.0, dtype=dtype) for _ in range(4)]
    expected = REFERENCE.rope_store(q, k, v, table[:, :1], table[:, 1:], caches[0], caches[1], slots)
    found = rows.rope_store(q, k, v, table[:, :1], table[:, 1:], caches[2], caches[3], slots.int())
    near(found, expected)
    near(caches[2], caches[0])
    assert torch.equal(caches[3], caches[1])


@pytest.mark.parametrize("rotated", [80, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_norms_before_the_rotation(rotated: int, dtype: torch.dtype) -> None:
    q, k, v = random(3, 8, 80, dtype=dtype).split([4, 2, 2], dim=1)
    q_norm, k_norm = random(80, seed=1, dtype=dtype), random(80, seed=2, dtype=dtype)
    cos, sin = random(3, 1, rotated // 2, seed=3, dtype=dtype), random(3, 1, rotated // 2, seed=4, dtype=dtype)
    slots = torch.arange(3)
    caches = [torch.zeros((3, 2, 80), dtype=dtype) for _ in range(4)]
    normed_q, normed_k = REFERENCE.rms_norm(q, q_norm, 1e-2), REFERENCE.rms_norm(k, k_norm, 1e-2)
    expected = REFERENCE.rope_store(normed_q, normed_k, v, cos, sin, caches[0], caches[1], slots)
    near(rows.rope_store(q, k, v, cos, sin, caches[2], caches[3], slots, q_norm, k_norm, 1e-2), expected)
    near(caches[2], caches[0])


def test_padding_writes_nothing() -> None:
    q, k, v = random(4, 4, 64).split([2, 1, 1], dim=1)
    cos, sin = random(4, 1, 32, seed=1), random(4, 1, 32, seed=2)
    memory = torch.full((2, 4, 1, 64), 9.0)
    caches = memory[:, 1:]  # what slot -1 would be is there to be looked at
    rows.rope_store(q, k, v, cos, sin, caches[0], caches[1], torch.tensor([-1, 2, -1, -1]))
    assert (memory[:, :3] == 9.0).all() and (caches[:, 2] != 9.0).all()
    rows.store(caches[0], torch.tensor([1, -1]), torch.zeros((2, 1, 64)))
    assert (memory[0, :2] == 9.0).all() and (caches[0, 1] == 0.0).all() and (caches[0, 2] != 9.0).all()
    assert rows.rope_store(q[:0], k[:0], v[:0], cos[:0], sin[:0], *caches, torch.tensor([]).int()).shape == (0, 2, 64)


def test_store_converts() -> None:
    for dtype in DTYPES:
        cache = torch.zeros((6, 2, 600), dtype=dtype)
        values = random(3, 4, 600)[:, 1:3]
        rows.store(cache, torch.tensor([5, 0, 2]), values)
        expected = torch.zeros_like(cache)
        REFERENCE.store(expected, torch.tensor([5, 0, 2]), values)
        near(cache, expected)


def test_float8_is_rounded_as_torch_does_and_saturates() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = numbers[numbers.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2  # ties
    values = torch.cat([numbers, middles, middles * (1 + 1e-6), random(3000, scale=60).clamp(-448, 448), random(3000, scale=0.02)])  # fmt: skip
    cache = torch.zeros((1, len(values)), dtype=torch.float8_e4m3fn)
    rows.store(cache, torch.tensor([0]), values[None])
    expected = values.to(torch.float8_e4m3fn).float()
    assert torch.equal(cache[0].float().nan_to_num(7e7), expected.nan_to_num(7e7))
    rows.store(cache[:, :4], torch.tensor([0]), torch.tensor([[1e9, -500.0, float("inf"), 464.0]]))
    assert cache[0, :4].float().tolist() == [448.0, -448.0, 448.0, 448.0]


@pytest.mark.parametrize("per_head", [False, True])
def test_float8_caches_hold_values_over_their_scale(per_head: bool) -> None:
    q, k, v = random(3, 12, 64, scale=30).split([4, 4, 4], dim=1)
    cos, sin = random(3, 1, 32, seed=1), random(3, 1, 32, seed=2)
    slots = torch.tensor([2, 0, 3])
    k_scale, v_scale = (random(4 if per_head else 1, seed=s).abs() + 0.5 for s in (3, 4))
    keys, values = (torch.zeros((4, 4, 64), dtype=torch.float8_e4m3fn) for _ in range(2))
    plain = torch.zeros((2, 4, 4, 64))
    expected = REFERENCE.rope_store(q, k, v, cos, sin, plain[0], plain[1], slots)
    near(rows.rope_store(q, k, v, cos, sin, keys, values, slots, k_scale=k_scale, v_scale=v_scale), expected)
    for cache, whole, scale in ((keys, plain[0], k_scale), (values, plain[1], v_scale)):
        again = cache.float() * scale[None, :, None]
        assert (
            (again - whole).abs() <= whole.abs() / 16 + scale.max() * 2**-9
        ).all()  # half of a 3-bit mantissa's last place
        assert (again[1] == 0).all()
