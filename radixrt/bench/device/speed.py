"""Section ``speed``: how near the kernels come to what the device can do, with cold caches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from radixrt.bench.device.batches import Paged, packed, paged
from radixrt.bench.device.correct import drawn, random_masks, requests
from radixrt.bench.device.figures import Bench
from radixrt.bench.device.timing import seconds
from radixrt.ops.triton import attention, linear, moe, rows
from radixrt.ops.triton.plan import LEAST_SHARED
from radixrt.ops.triton.sampling import draw
from radixrt.ops.weights import FP8, Fp8Weight, IntWeight, Weight


@torch.inference_mode()
def run(bench: Bench) -> None:
    count, keys = bench.pick((64, 4096), (3, 40))
    name = f"decode attention, {count} x {keys} keys"
    bench.part(name, partial(_decode, bench, name, count, keys, 0.85))
    bench.part(name + ", fp8 cache", partial(_decode, bench, name + ", fp8 cache", count, keys, None, fp8=True))
    for count, keys in bench.pick(((1, 32768), (256, 1024)), ()):
        name = f"decode attention, {count} x {keys} keys"
        bench.part(name, partial(_decode, bench, name, count, keys, None))
    size = bench.pick(4096, 24)
    for cached, goal in ((0, 0.5), (size, None)):
        name = f"extend attention, {size} x {size + cached} keys"
        bench.part(name, partial(_extend, bench, name, size, cached, goal))
    bench.part("prefix-shared decode", lambda: _shared(bench))
    for form in ("dense", "int4", "fp8", "fp8 x fp8"):
        for count in bench.pick((1, 16, 256, 4096), (2,)):
            name = f"linear {form}, {count} tokens"
            bench.part(name, partial(_linear, bench, name, form, count))
    for form in ("dense", "int4"):
        for count in bench.pick((1, 16, 256, 4096), (2,)):
            name = f"moe {form}, {count} tokens"
            bench.part(name, partial(_moe, bench, name, form, count))
    bench.part("rows", lambda: _rows(bench))
    bench.part("sampling", lambda: _sampling(bench))


def _attend(batch: Paged, plan: Any, scales: torch.Tensor | None = None) -> torch.Tensor:
    return attention.attention(batch.q, batch.k, batch.v, plan, batch.q.shape[2] ** -0.5, kv_scales=scales)


def _plan(bench: Bench, batch: Paged, least_shared: int | None = LEAST_SHARED) -> Any:
    heads, kv_heads = batch.q.shape[1], batch.k.shape[1]
    return attention.plan_attention(
        batch.q_lens, batch.kv_lens, batch.slots, heads, kv_heads, None, bench.device, least_shared
    )


def _shape(bench: Bench) -> dict[str, Any]:
    return {"dtype": bench.half, **bench.pick({}, {"heads": 4, "kv_heads": 2, "dim": 64})}


def _decode(bench: Bench, name: str, count: int, keys: int, goal: float | None, fp8: bool = False) -> None:
    batch = paged(bench.device, [1] * count, [keys] * count, **_shape(bench))
    scales = None
    if fp8:
        scales = torch.full((2, 1), 0.5, device=bench.device)
        batch = Paged(batch.q_lens, batch.kv_lens, batch.slots, batch.q, batch.k.to(FP8), batch.v.to(FP8))
    plan = _plan(bench, batch)
    took = seconds(bench, lambda: _attend(batch, plan, scales))
    read = 2 * count * keys * batch.k.shape[1] * batch.k.shape[2] * batch.k.element_size()
    bench.share(name, read, took, "bandwidth", goal=goal)


def _extend(bench: Bench, name: str, new: int, cached: int, goal: float | None) -> None:
    batch = paged(bench.device, [new], [new + cached], **_shape(bench))
    plan = _plan(bench, batch)
    took = seconds(bench, lambda: _attend(batch, plan))
    pairs = new * cached + new * (new + 1) / 2  # what is not masked
    bench.share(name, 4 * pairs * batch.q.shape[1] * batch.q.shape[2], took, "bf16 peak", goal=goal)


def _shared(bench: Bench) -> None:
    count, prefix, own = bench.pick((64, 8192, 64), (3, 140, 5))
    batch = paged(bench.device, [1] * count, [prefix + own] * count, shared=prefix, page=1, **_shape(bench))
    together, apart = _plan(bench, batch), _plan(bench, batch, None)
    quick, slow = (seconds(bench, partial(_attend, batch, plan)) for plan in (together, apart))
    name = f"decode of {count} below a prefix of {prefix}: shared beside plain"
    bench.add(
        name, slow / quick, "x", goal=None if bench.small else 3.0, note=f"{quick * 1e6:.0f} us, {slow * 1e6:.0f} us"
    )
    new = torch.equal(torch.isfinite(_attend(batch, together)), torch.isfinite(_attend(batch, apart)))
    bench.add("both are numbers", float(new), "", goal=1.0, required=True)


def _bytes(weight: Weight) -> int:
    if isinstance(weight, IntWeight | Fp8Weight):
        return weight.codes.nbytes + weight.scales.nbytes
    return int(weight.nbytes)


def _matrix_share(bench: Bench, name: str, count: int, operations: float, read: float, took: float) -> None:
    """Of bandwidth where there are few tokens, of the matrix peak where there are many."""
    if count < 128:
        bench.share(name, read, took, "bandwidth")
    else:
        bench.share(name, operations, took, "bf16 peak")


def _linear(bench: Bench, name: str, form: str, count: int) -> None:
    out, columns = bench.pick((14336, 4096), (40, 128))
    both = form == "fp8 x fp8"
    if both and bench.cuda and torch.cuda.get_device_capability(bench.device) < (8, 9):
        bench.add(name, None, "", note="the device has no fp8 products")
        return
    weight = packed(bench.device, (out, columns), "fp8" if both else form, bench.half)
    x = torch.randn(count, columns, device=bench.device).to(bench.half)
    took = seconds(bench, lambda: linear.linear(x, weight, None, "fp8" if both else "kept"))
    _matrix_share(bench, name, count, 2 * count * out * columns, _bytes(weight), took)


def _moe(bench: Bench, name: str, form: str, count: int) -> None:
    number, chosen, hidden, inner = bench.pick((8, 2, 4096, 14336), (3, 2, 128, 128))
    gate_up = packed(bench.device, (number, 2 * inner, hidden), form, bench.half)
    down = packed(bench.device, (number, hidden, inner), form, bench.half)
    x = torch.randn(count, hidden, device=bench.device).to(bench.half)
    gains, experts = torch.softmax(torch.randn(count, number, device=bench.device), -1).topk(chosen)
    took = seconds(bench, lambda: moe.moe(x, experts, gains, gate_up, down, "silu"))
    used = experts.unique().numel() / number
    read = (_bytes(gate_up) + _bytes(down)) * used
    _matrix_share(bench, name, count, 2 * count * chosen * 3 * inner * hidden, read, took)


def _rows(bench: Bench) -> None:
    count, width = bench.pick((8192, 4096), (3, 64))
    x, residual = (torch.randn(count, width, device=bench.device).to(bench.half) for _ in range(2))
    weight = torch.ones(width, device=bench.device, dtype=bench.half)
    took = seconds(bench, lambda: rows.add_rms_norm(x, residual, weight, 1e-5))
    bench.share(f"add_rms_norm, {count} x {width}", 4 * x.nbytes, took, "bandwidth")
    wide = torch.randn(count, 2 * width, device=bench.device).to(bench.half)
    took = seconds(bench, lambda: rows.gated(wide, "silu"))
    bench.share(f"gated silu, {count} x {2 * width}", 1.5 * wide.nbytes, took, "bandwidth")
    heads, kv_heads, dim = bench.pick((32, 8, 128), (4, 2, 16))
    q, k, v = (torch.randn(count, h, dim, device=bench.device).to(bench.half) for h in (heads, kv_heads, kv_heads))
    cos, sin = (torch.rand(count, 1, dim // 2, device=bench.device).to(bench.half) for _ in range(2))
    caches = [torch.empty(count, kv_heads, dim, device=bench.device, dtype=bench.half) for _ in range(2)]
    slots = torch.randperm(count, device=bench.device)
    took = seconds(bench, lambda: rows.rope_store(q, k, v, cos, sin, caches[0], caches[1], slots))
    bench.share(f"rope and KV write, {count} tokens", 2 * (q.nbytes + k.nbytes + v.nbytes), took, "bandwidth")


def _sampling(bench: Bench) -> None:
    """Wishes are uploaded before: here the kernels alone are timed, with all they are asked for and greedily."""
    count, vocab = bench.pick((64, 128256), (4, 400))
    logits = torch.randn(count, vocab, device=bench.device) * 3
    masks = random_masks(count, vocab, bench.device)
    drawn(logits.clone(), requests(count), masks)  # compiled

    def full(dtype: torch.dtype, value: float) -> torch.Tensor:
        return torch.full((count,), value, device=bench.device, dtype=dtype)

    chances = torch.rand(count, device=bench.device, dtype=torch.float64)
    heat, k, p, least = (
        full(torch.float32, 0.7),
        full(torch.int32, 40),
        full(torch.float32, 0.9),
        full(torch.float32, 0.01),
    )
    none = full(torch.int32, 0), full(torch.float32, 1.0), full(torch.float32, 0.0)
    kinds: dict[str, tuple[Any, ...]] = {
        "greedy": (),
        "by temperature": (heat, *none, chances),
        "by top-k, top-p and min-p": (heat, k, p, least, chances),
        "by top-p alone": (heat, none[0], p, none[2], chances),
    }
    for name, arguments in kinds.items():
        took = seconds(bench, partial(draw, logits, masks, None, *arguments))
        shape = f"{count} x {vocab}, masked"
        bench.add(
            f"sampling {name}, {shape}", took * 1e6, "us", note=f"{logits.nbytes / took / 1e12:.2f} TB/s of logits"
        )
