"""Section ``correct``: every kernel on shapes as models have them, beside the torch reference in a higher precision, on the same device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from radixrt.bench.device.batches import Paged, packed, paged
from radixrt.bench.device.figures import Bench
from radixrt.ops.interface import ACTIVATIONS, GATED
from radixrt.ops.torch import attention as reference_attention
from radixrt.ops.torch.ops import TorchOps
from radixrt.ops.triton import attention, linear, moe, rows, sampling
from radixrt.ops.weights import FP8, Fp8Weight, IntWeight, dequantized, rounded
from radixrt.request import SamplingParams
from radixrt.sampling.sampler import sample
from radixrt.sampling.spec import Row, SamplingSpec
from radixrt.sampling.wishes import wishes_of

_TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_EQUAL = 0.995  # of the draws: the two compute exp with other last bits, so that a border between two tokens may move


@torch.inference_mode()
def run(bench: Bench) -> None:
    for name, options in _attention_cases(bench):
        bench.part(f"attention {name}", partial(_attention, bench, f"attention {name}", **options), required=True)
    bench.part("attention in a CUDA graph", lambda: _graph(bench), required=True)
    dtypes = bench.pick((torch.bfloat16, torch.float16, torch.float32), (torch.float32,))
    for dtype in dtypes:
        bench.part(f"rows {_NAMES[dtype]}", partial(_rows, bench, dtype), required=True)
        for dim, turned in bench.pick(((64, 64), (80, 32), (96, 96), (128, 128), (256, 256)), ((16, 8),)):
            name = f"rope_store {_NAMES[dtype]}, head {dim}, {turned} rotated"
            bench.part(name, partial(_rope, bench, name, dtype, dim, turned), required=True)
    for form in ("int4", "int8", "fp8", "fp8-row"):
        for count in bench.pick((1, 16, 33, 256), (3,)):
            name = f"linear {form}, {count} tokens"
            bench.part(name, partial(_linear, bench, name, form, count), required=True)
    bench.part("linear fp8 x fp8", lambda: _both_fp8(bench), required=True)
    for form in ("dense", "int4", "fp8"):
        for count in bench.pick((1, 16, 700), (3,)):
            name = f"moe {form}, {count} tokens"
            bench.part(name, partial(_moe, bench, name, form, count), required=True)
    bench.part("sampling", lambda: _sampling(bench), required=True)


def _agrees(bench: Bench, name: str, found: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    """The worst deviation of an element, of what it may be: ``tolerance``, absolute and relative."""
    found, exact = found.double(), exact.double()
    worst = ((found - exact).abs() / (tolerance * (1 + exact.abs()))).amax().item() if found.numel() else 0.0
    if not torch.isfinite(found).all():
        worst = 1e9
    bench.add(name, worst, f"x {tolerance:g}", goal=1.0, at_most=True, required=True)


# ---- attention


def _attention_cases(bench: Bench) -> Iterator[tuple[str, dict[str, Any]]]:
    """Decodes, short and long prefills and prefills behind cached keys in one batch, so that tiles of all heights are launched."""
    if bench.small:
        mixed: dict[str, Any] = {"q_lens": [1, 1, 20], "kv_lens": [70, 1, 33], "heads": 4, "kv_heads": 2}
        yield "fp32, head 64", {**mixed, "dim": 64, "dtype": torch.float32}
        yield "fp16, head 64, window, cap, sinks", {**mixed, "dim": 64, "window": 9, "softcap": 5.0, "sinks": True}
        yield "fp8 cache", {**mixed, "dim": 64, "fp8": True}
        yield "a shared prefix", {**mixed, "q_lens": [1] * 3, "kv_lens": [150] * 3, "dim": 64, "shared": 140}
        return
    mixed = {"q_lens": [1, 1, 1, 1, 5, 40, 300, 1000], "kv_lens": [1, 77, 1025, 6000, 900, 40, 812, 1500]}
    for dim in (64, 80, 96, 128, 256):
        yield f"bf16, head {dim}", {**mixed, "dim": dim}
        yield (
            f"bf16, head {dim}, window, cap, sinks",
            {**mixed, "dim": dim, "window": 100, "softcap": 30.0, "sinks": True},
        )
    for dtype in (torch.float16, torch.float32):
        for dim in (64, 128):
            yield f"{_NAMES[dtype]}, head {dim}", {**mixed, "dim": dim, "dtype": dtype}
    yield "bf16, fp8 cache", {**mixed, "fp8": True}
    for page in (1, 64):
        yield f"bf16, pages of {page}", {**mixed, "page": page}
    for window in (1, 64, 1000, 4096):
        yield f"bf16, window of {window}", {**mixed, "window": window}
    for heads, kv_heads in ((32, 32), (28, 4), (71, 1)):
        yield f"bf16, {heads} heads, {kv_heads} of keys", {**mixed, "heads": heads, "kv_heads": kv_heads}
    lens = [2048 + 13 * i for i in range(64)]
    yield "bf16, 64 decodes", {"q_lens": [1] * 64, "kv_lens": lens}
    yield "bf16, 64 decodes below one prefix", {"q_lens": [1] * 64, "kv_lens": lens, "shared": 2000, "page": 1}
    prefills = {"q_lens": [4096, 513], "kv_lens": [4096, 3000]}
    yield "bf16, long prefills", prefills


def _attention(
    bench: Bench,
    name: str,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    fp8: bool = False,
    dtype: torch.dtype | None = None,
    **shape: Any,
) -> None:
    dtype = dtype or bench.half
    batch = paged(bench.device, **shape, dtype=dtype)
    heads, scale = batch.q.shape[1], batch.q.shape[2] ** -0.5
    sink = torch.randn(heads, device=bench.device).to(dtype) if sinks else None
    k, v, scales = batch.k, batch.v, None
    if fp8:
        scales = torch.tensor([[0.5], [0.25]], device=bench.device)
        k, v = ((cache / factor).to(FP8) for cache, factor in zip((k, v), (0.5, 0.25), strict=True))
    plan = attention.plan_attention(batch.q_lens, batch.kv_lens, batch.slots, heads, k.shape[1], window, bench.device)
    found = attention.attention(batch.q, k, v, plan, scale, softcap, sink, scales)
    if fp8:
        k, v = k.float() * 0.5, v.float() * 0.25
    exact = _exact(batch, k, v, scale, window, softcap, sink)
    _agrees(bench, name, found, exact, _TOLERANCE[dtype])


def _exact(
    batch: Paged,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reference in float32."""
    plan = reference_attention.plan_attention(
        batch.q_lens, batch.kv_lens, batch.slots, batch.q.shape[1], k.shape[1], window, torch.float32, k.device
    )
    return reference_attention.attention(batch.q.float(), k.float(), v.float(), plan, scale, softcap, sinks)


def _graph(bench: Bench) -> None:
    """A plan at fixed addresses, recorded with one batch and replayed with another, smaller one."""
    first, lens = bench.pick(([3000, 700, 4000, 128] * 4, [2000] * 11), ([40, 20], [33]))
    shape = bench.pick({}, {"heads": 4, "kv_heads": 2, "dim": 64})
    batch = paged(bench.device, [1] * len(first), first, dtype=bench.half, **shape)
    heads, kv_heads, scale = batch.q.shape[1], batch.k.shape[1], batch.q.shape[2] ** -0.5
    fixed = attention.PaddedPlan(len(first), max(first), heads, kv_heads, None, bench.device)
    fixed.update(batch.q_lens, batch.kv_lens, batch.slots)
    out = torch.zeros_like(batch.q)

    def step() -> None:
        out.copy_(attention.attention(batch.q, batch.k, batch.v, fixed.plan, scale))

    replay: Any = step
    if bench.cuda:
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay
    replay()
    name = "attention in a CUDA graph"
    _agrees(bench, name + ", as recorded", out, _exact(batch, batch.k, batch.v, scale), _TOLERANCE[bench.half])
    slots = np.random.default_rng(0).permutation(batch.k.shape[0]).astype(np.int32)
    taken = slots[np.arange(sum(lens)) % len(slots)]
    count = len(lens)
    other = Paged(
        np.ones(count, dtype=np.int32), np.array(lens, dtype=np.int32), taken, batch.q[:count], batch.k, batch.v
    )
    fixed.update(other.q_lens, other.kv_lens, other.slots)
    replay()
    exact = _exact(other, batch.k, batch.v, scale)
    _agrees(bench, name + ", another batch", out[:count], exact, _TOLERANCE[bench.half])


# ---- rows


def _rows(bench: Bench, dtype: torch.dtype) -> None:
    ops, tolerance, kind = TorchOps(bench.device, torch.float32), _TOLERANCE[dtype], _NAMES[dtype]
    for shape in bench.pick(((300, 4096), (7, 2880), (3, 16384), (64, 32, 128)), ((3, 48), (2, 3, 16))):
        x, residual = (torch.randn(shape, device=bench.device).to(dtype) for _ in range(2))
        weight, bias = (torch.randn(shape[-1], device=bench.device).to(dtype) for _ in range(2))
        width = f"{kind}, {' x '.join(map(str, shape))}"
        exact = ops.rms_norm(x.float(), weight.float(), 1e-5)
        _agrees(bench, f"rms_norm {width}", rows.rms_norm(x, weight, 1e-5), exact, tolerance)
        exact = ops.layer_norm(x.float(), weight.float(), bias.float(), 1e-5)
        _agrees(bench, f"layer_norm {width}", rows.layer_norm(x, weight, bias, 1e-5), exact, tolerance)
        if len(shape) == 2:
            normed, total = rows.add_rms_norm(x, residual, weight, 1e-5)
            exact = ops.rms_norm((x + residual).float(), weight.float(), 1e-5)
            _agrees(bench, f"add_rms_norm {width}", normed, exact, tolerance)
            _agrees(bench, f"add_rms_norm's sum {width}", total, x + residual, tolerance)
    x = torch.randn(bench.pick((100, 2 * 14336), (3, 32)), device=bench.device).to(dtype) * 4
    for name in ACTIVATIONS:
        _agrees(bench, f"{name} {kind}", rows.activate(x, name), ops.activate(x.float(), name), tolerance)
    for name in GATED:
        _agrees(bench, f"gated {name} {kind}", rows.gated(x, name), ops.gated(x.float(), name), tolerance)


def _rope(bench: Bench, name: str, dtype: torch.dtype, dim: int, turned: int) -> None:
    ops, (count, heads, kv_heads) = TorchOps(bench.device, torch.float32), bench.pick((200, 32, 8), (3, 4, 2))
    q, k, v = (torch.randn(count, h, dim, device=bench.device).to(dtype) for h in (heads, kv_heads, kv_heads))
    angle = torch.rand(count, 1, turned // 2, device=bench.device) * 100
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    slots = torch.randperm(3 * count, device=bench.device)[:count]
    caches = [torch.zeros(3 * count, kv_heads, dim, device=bench.device, dtype=dtype) for _ in range(2)]
    wide = [cache.clone().float() for cache in caches]
    found = rows.rope_store(q, k, v, cos, sin, caches[0], caches[1], slots)
    exact = ops.rope_store(q.float(), k.float(), v.float(), cos.float(), sin.float(), wide[0], wide[1], slots)
    for what, one, other in zip(("queries", "keys", "values"), (found, *caches), (exact, *wide), strict=True):
        _agrees(bench, f"{name}: {what}", one, other, _TOLERANCE[dtype])


# ---- matrices


def _linear(bench: Bench, name: str, form: str, count: int) -> None:
    out, columns = bench.pick((4096, 4096), (40, 128))
    weight = packed(bench.device, (out, columns), form, bench.half)
    x = torch.randn(count, columns, device=bench.device).to(bench.half)
    exact = x.double() @ dequantized(weight, torch.float32).double().T
    _agrees(bench, name, linear.linear(x, weight), exact, _TOLERANCE[bench.half])
    if isinstance(weight, IntWeight):
        order = torch.randperm(columns, device=bench.device)
        turned = IntWeight(weight.codes, weight.scales, weight.zeros, weight.bits, weight.group, order)
        exact = x.double() @ dequantized(turned, torch.float32).double().T
        _agrees(bench, name + ", ordered", linear.linear(x, turned), exact, _TOLERANCE[bench.half])


def _both_fp8(bench: Bench) -> None:
    name = "linear fp8 x fp8"
    if bench.cuda and torch.cuda.get_device_capability(bench.device) < (8, 9):
        bench.add(name, None, "", note="the device has no fp8 products")
        return
    out, columns = bench.pick((4096, 4096), (40, 128))
    for form in ("fp8", "fp8-row"):
        weight = packed(bench.device, (out, columns), form, bench.half)
        assert isinstance(weight, Fp8Weight)
        x = torch.randn(bench.pick(40, 3), columns, device=bench.device).to(bench.half)
        codes, scales = rounded(x, weight)
        near = codes.double() * scales.double().repeat_interleave(weight.group, 1)
        exact = near @ dequantized(weight, torch.float32).double().T
        found = linear.linear(x, weight, None, activations="fp8")
        _agrees(bench, f"{name}, {form}", found, exact, _TOLERANCE[bench.half])


def _moe(bench: Bench, name: str, form: str, count: int) -> None:
    number, chosen, hidden, inner = bench.pick((8, 2, 2048, 1792), (3, 2, 128, 128))
    gate_up = packed(bench.device, (number, 2 * inner, hidden), form, bench.half)
    down = packed(bench.device, (number, hidden, inner), form, bench.half)
    x = torch.randn(count, hidden, device=bench.device).to(bench.half)
    gains, experts = torch.softmax(torch.randn(count, number, device=bench.device), -1).topk(chosen)
    found = moe.moe(x, experts, gains, gate_up, down, "silu")
    wide = [dequantized(matrix, torch.float32) for matrix in (gate_up, down)]
    exact = TorchOps(bench.device, torch.float32).moe(x.float(), experts, gains, wide[0], wide[1], "silu")
    _agrees(bench, name, found, exact, 2 * _TOLERANCE[bench.half])


# ---- sampling


def requests(count: int) -> list[Row]:
    """Rows with all kinds of filters, penalties and biases; one in eight greedy."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 40},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
        {"temperature": 1.0, "repetition_penalty": 1.1, "presence_penalty": 0.5},
        {"temperature": 1.0, "top_p": 0.99, "min_p": 0.01, "logit_bias": {7: 2.0}},
    )
    tokens = np.arange(3, 23, dtype=np.int32)
    return [Row(SamplingSpec.of(SamplingParams(**kinds[i % len(kinds)]), 11 * i, ()), tokens, 10) for i in range(count)]


def drawn(logits: torch.Tensor, these: list[Row], masks: torch.Tensor | None) -> torch.Tensor:
    """What the kernels draw; ``logits`` may be changed."""
    wishes = wishes_of(these, logits.shape[1])
    if wishes is None:
        return sampling.draw(logits, masks)[0]
    moved = [torch.from_numpy(np.ascontiguousarray(array)).to(logits.device) for array in wishes]
    temperature, chance, top_k, top_p, min_p, *edits = moved
    return sampling.draw(logits, masks, None, temperature, top_k, top_p, min_p, chance, sampling.Edits(*edits))[0]


def random_masks(count: int, vocab: int, device: torch.device) -> torch.Tensor:
    """Bits of allowed tokens, int32 ``[count, ceil(vocab / 32)]``."""
    words = torch.randint(-(2**31), 2**31 - 1, (count, -(-vocab // 32)), dtype=torch.int64)
    return words.to(torch.int32).to(device)


def _sampling(bench: Bench) -> None:
    count, vocab = bench.pick((512, 128256), (16, 400))
    these = requests(count)
    torch.manual_seed(0)
    logits = torch.randn(count, vocab, device=bench.device) * 3
    masks = random_masks(count, vocab, bench.device)
    for name, used in (("sampling", None), ("sampling, masked", masks)):
        found = drawn(logits.clone(), these, used).tolist()
        allowed = None if used is None else dict(enumerate(used.cpu().numpy()))
        exact = [one.token for one in sample(logits.cpu().clone(), these, allowed)]
        equal = sum(a == b for a, b in zip(found, exact, strict=True)) / count
        bench.add(name, equal, f"of {count} tokens are the sampler's", goal=_EQUAL, required=True)
