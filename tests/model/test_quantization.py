"""Quantized checkpoints: packed here as their layouts are published, read as the matrices that were packed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from radixrt import Engine, SamplingParams
from radixrt.errors import ModelError
from radixrt.model.checkpoint import open_checkpoint
from radixrt.model.config import ModelConfig
from radixrt.model.linear_weights import read_matrix
from radixrt.model.weight_reader import WeightReader
from radixrt.ops.native import native
from radixrt.ops.weights import (
    FP8,
    Fp8Weight,
    IntWeight,
    dequantized,
    joined,
    pack_nibbles,
    rounded,
    stacked,
    unpack_nibbles,
)
from tests.tiny import save_tiny

Tensors = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor, torch.Generator], tuple[Tensors, torch.Tensor]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: np.ndarray, bits: int) -> torch.Tensor:
    """``[R, C]`` codes, the ``32 / bits`` of a word beside one another, lowest first -> int32 ``[R, C * bits / 32]``."""
    per = 32 // bits
    out = np.zeros((codes.shape[0], codes.shape[1] // per), dtype=np.uint64)
    for i in range(per):
        out |= codes[:, i::per].astype(np.uint64) << np.uint64(bits * i)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32).copy())


def integers(
    weight: torch.Tensor, bits: int, group: int, index: np.ndarray, draw: torch.Generator, sym: bool
) -> tuple[np.ndarray, np.ndarray, torch.Tensor, torch.Tensor]:
    """Codes ``[N, K]``, zeros and scales ``[N, G]`` near a matrix, and the matrix that they stand for."""
    rows, count, top = len(weight), index.max() + 1, 2**bits - 1
    scales = (torch.rand(rows, count, generator=draw) * 0.5 + 0.75) * float(weight.abs().max()) * 2 / top
    scales = scales.half().float()
    zeros = torch.randint(0, top + 1, (rows, count), generator=draw).float()
    zeros = torch.full_like(zeros, 2 ** (bits - 1)) if sym else (zeros * 0.2 + top * 0.4).round()
    codes = (weight / scales[:, index] + zeros[:, index]).round().clamp(0, top)
    return codes.byte().numpy(), zeros.byte().numpy(), scales, (codes - zeros[:, index]) * scales[:, index]


def plain(columns: int, group: int) -> np.ndarray:
    return np.arange(columns) // (columns if group < 0 else group)


def awq(group: int) -> Pack:
    def pack(weight: torch.Tensor, draw: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes, zeros, scales, dense = integers(weight, 4, group, plain(weight.shape[1], group), draw, False)

        def shuffled(values: np.ndarray) -> torch.Tensor:  # [*, N]: bits 4 i of a word hold output ORDER[i]
            return words(values.reshape(len(values), -1, 8)[:, :, AWQ_ORDER].reshape(values.shape), 4)

        tensors = {"qweight": shuffled(codes.T), "qzeros": shuffled(zeros.T), "scales": scales.T.half().contiguous()}
        return tensors, dense

    return pack


def gptq(
    bits: int, group: int, *, order: bool = False, sym: bool = False, version: int = 1, g_idx: bool = True
) -> Pack:
    def pack(weight: torch.Tensor, draw: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        index = plain(weight.shape[1], group)
        if order:
            # of one order for all matrices of one input, as calibration on that input gives
            index = index[np.random.default_rng(weight.shape[1]).permutation(len(index))]
        codes, zeros, scales, dense = integers(weight, bits, group, index, draw, sym)
        stored = words(zeros.T, bits)
        if version == 1:
            less = stored.numpy().view(np.uint32).astype(np.int64) - sum(1 << i for i in range(0, 32, bits))
            stored = torch.from_numpy((less % 2**32).astype(np.uint32).view(np.int32).copy())
        tensors = {
            "qweight": words(codes, bits).T.contiguous(),
            "qzeros": stored,
            "scales": scales.T.half().contiguous(),
        }
        if g_idx:
            tensors["g_idx"] = torch.from_numpy(index.astype(np.int32))
        return tensors, dense

    return pack


def packed(bits: int, group: int, *, sym: bool = True) -> Pack:
    def pack(weight: torch.Tensor, draw: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        index = plain(weight.shape[1], group)
        codes, zeros, scales, dense = integers(weight, bits, group, index, draw, sym)
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not sym:
            tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        return tensors, dense

    return pack


def fp8(scale: str, *, block: tuple[int, int] = (1, 1), static: str = "") -> Pack:
    def pack(weight: torch.Tensor, draw: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        block_rows, block_columns = block if scale.endswith("inv") and block != (1, 1) else (rows, columns)
        if scale == "channel":
            block_rows = 1
        scales = torch.empty(-(-rows // block_rows), -(-columns // block_columns))
        codes, dense = torch.empty(rows, columns, dtype=FP8), torch.empty(rows, columns)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = (slice(i * block_rows, (i + 1) * block_rows), slice(j * block_columns, (j + 1) * block_columns))
                scales[i, j] = weight[at].abs().max() / 448 * (1 + torch.rand((), generator=draw))
                codes[at] = (weight[at] / scales[i, j]).to(FP8)
                dense[at] = codes[at].float() * scales[i, j]
        whole = scales.numel() == 1
        tensors = {
            "weight": codes,
            "weight_scale_inv" if scale.endswith("inv") else "weight_scale": scales.reshape(()) if whole else scales,
        }
        if static:
            tensors[static] = torch.rand(1, generator=draw) + 0.01
        return tensors, dense

    return pack


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    inputs = weights.pop("input_activations", None)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


CASES: dict[str, tuple[Pack, dict[str, Any]]] = {
    "awq-32": (awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "awq-row": (awq(-1), {"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "version": "GEMM"}),
    "gptq-4": (gptq(4, 32), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
    "gptq-4-sym": (gptq(4, -1, sym=True, g_idx=False), {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True}),
    "gptq-4-order": (gptq(4, 32, order=True), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}),
    "gptq-4-v2": (
        gptq(4, 32, version=2),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-8-order": (gptq(8, 32, order=True), {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True}),
    "gptq-2": (gptq(2, 32), {"quant_method": "gptq", "bits": 2, "group_size": 32, "meta": {"quantizer": ["x"]}}),
    "gptq-4-odd-group": (gptq(4, 24, order=True), {"quant_method": "gptq", "bits": 4, "group_size": 24}),
    "packed-4": (packed(4, 32), compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)),
    "packed-4-asym": (
        packed(4, 32, sym=False),
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
    ),
    "packed-8-channel": (packed(8, -1), compressed("pack-quantized", num_bits=8, type="int", strategy="channel")),
    "fp8-tensor": (fp8("tensor"), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8-tensor-static": (fp8("tensor", static="input_scale"), {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-inv-static": (fp8("inv", static="activation_scale"), {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-block": (fp8("inv", block=(16, 32)), {"quant_method": "fp8", "weight_block_size": [16, 32], "fmt": "e4m3"}),
    "fp8-ragged-block": (fp8("inv", block=(40, 40)), {"quant_method": "fp8", "weight_block_size": [40, 40]}),
    "float-channel": (
        fp8("channel"),
        compressed(
            "float-quantized", num_bits=8, type="float", strategy="channel", input_activations={"dynamic": True}
        ),
    ),
    "float-static": (
        fp8("tensor", static="input_scale"),
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor", input_activations={"dynamic": False}),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    save_tiny("llama", path)
    return path


def quantize(source: Path, target: Path, case: str) -> Tensors:
    """A checkpoint quantized as ``case`` says; returns the dense tensors that it stands for."""
    pack, options = CASES[case]
    draw = torch.Generator().manual_seed(3)
    dense, stored = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj." in name:
            parts, dense[name] = pack(tensor.float(), draw)
            stored |= {name.removesuffix("weight") + role: part.contiguous() for role, part in parts.items()}
        else:
            stored[name] = dense[name] = tensor
    write(source, target, stored, options)
    return dense


def write(source: Path, target: Path, tensors: Tensors, options: object) -> Path:
    target.mkdir(exist_ok=True)
    for file in source.glob("*.json"):
        (target / file.name).write_text(file.read_text())
    config = json.loads((source / "config.json").read_text())
    if options is not None:
        config["quantization_config"] = options
    (target / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_the_matrices_that_were_packed(case: str, tiny: Path, tmp_path: Path) -> None:
    dense = quantize(tiny, tmp_path, case)
    checkpoint = open_checkpoint(tmp_path)
    assert sorted(checkpoint.names()) == sorted(dense)
    for name, expected in dense.items():
        assert checkpoint.shape(name) == tuple(expected.shape)
        found = checkpoint.tensor(name, torch.float32)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert checkpoint.tensor(name, torch.bfloat16).dtype is torch.bfloat16
        weight = checkpoint.packed(name)
        assert (weight is not None) == ("_proj" in name and "odd" not in case), name
        if weight is not None:
            assert weight.shape == tuple(expected.shape)
            assert torch.equal(dequantized(weight, torch.float32), found)
            assert isinstance(weight, Fp8Weight) == case.startswith("f")
            assert not isinstance(weight, Fp8Weight) or (weight.input_scale is not None) == ("static" in case)
    checkpoint.close()


@pytest.mark.parametrize("case", ["awq-32", "gptq-4-order", "gptq-4-odd-group", "fp8-block", "float-static"])
def test_joined_matrices_are_packed_on_a_device_and_dense_on_a_cpu(case: str, tiny: Path, tmp_path: Path) -> None:
    dense = quantize(tiny, tmp_path, case)
    checkpoint = open_checkpoint(tmp_path)
    at = "model.layers.1.self_attn."
    parts = [(at + "q_proj", 64), (at + "k_proj", 32), (at + "v_proj", 32)]
    expected = torch.cat([dense[name + ".weight"] for name, _ in parts])
    weights = WeightReader(ModelConfig.from_dict(checkpoint.config), checkpoint)
    found = read_matrix(weights, parts, 64, torch.float32, torch.device("cpu"))
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert not weights._unread & {name + ".weight" for name, _ in parts}
    other = read_matrix(weights, parts, 64, torch.float32, torch.device("meta"))
    assert isinstance(other, torch.Tensor if "odd" in case else (IntWeight, Fp8Weight))
    assert tuple(other.shape) == (128, 64)
    if "odd" not in case:
        whole = joined([weight for name, _ in parts if (weight := checkpoint.packed(name + ".weight"))])
        assert whole is not None
        assert torch.equal(dequantized(whole, torch.float32), found)
    checkpoint.close()


@pytest.mark.parametrize("kernels", ["torch", *(["native"] if native else [])])
@pytest.mark.parametrize(
    "case", ["awq-32", "gptq-4-order", "gptq-8-order", "packed-4-asym", "fp8-block", "fp8-inv-static"]
)
def test_an_engine_answers_as_on_the_dequantized_model(
    case: str, kernels: str, tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dense = quantize(tiny, tmp_path / "quantized", case)
    write(tiny, tmp_path / "dense", dense, None)
    answers = []
    for name in ("quantized", "dense"):
        caplog.set_level(logging.INFO, "radixrt")
        with Engine(str(tmp_path / name), kernels=kernels, max_total_tokens=256, threads=1) as engine:
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
            outputs = engine.generate([list(range(8, 30)), list(range(90, 100))], params)
            answers.append([(out.token_ids, [p.chosen.logprob for p in out.logprobs or ()]) for out in outputs])
    for (ids, logprobs), (expected, right) in zip(*answers):
        assert ids == expected and len(ids) == 12
        assert logprobs == pytest.approx(right, abs=1e-5)
    assert sum("dequantized when they are read" in record.message for record in caplog.records) == 1


def changed(options: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**options, **changes}


AWQ, GPTQ, FP8_OPTIONS = CASES["awq-32"][1], CASES["gptq-4"][1], CASES["fp8-tensor"][1]
PACKED = CASES["packed-4"][1]
REFUSED: list[tuple[object, str]] = [
    ([], "quantization_config must be an object"),
    ({}, "quant_method=None is not supported; supported: awq, gptq, fp8, compressed-tensors, mxfp4"),
    ({"quant_method": "gptqq"}, "did you mean 'gptq'?"),
    ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not supported"),
    (changed(AWQ, bits=8), "bits=8 is not supported; supported: 4"),
    (changed(AWQ, version="gemv"), "version='gemv' is not supported; supported: gemm"),
    (changed(AWQ, zero_point=False), "zero_point=False is not supported"),
    (changed(AWQ, group_size=0), "group_size=0 must be a positive integer, or -1"),
    (changed(AWQ, group_size=True), "group_size=True must be"),
    (changed(AWQ, modules_to_not_convert="lm_head"), "must be a list of module names"),
    (changed(GPTQ, bits=3), "bits=3 is not supported; supported: 4, 8, 2"),
    (changed(GPTQ, checkpoint_format="marlin"), "checkpoint_format='marlin' is not supported"),
    (changed(GPTQ, dynamic={"-:.*": {}}), "dynamic={'-:.*': {}} is not supported"),
    (changed(GPTQ, group_sized=64), "group_sized=64 is no option of gptq that is supported; did you mean 'group_size'?"),
    (changed(GPTQ, rotation="hadamard"), "rotation='hadamard' is no option of gptq that is supported"),
    (changed(GPTQ, desc_act="yes"), "desc_act='yes' is not supported; supported: True, False"),
    (compressed("pack-quantized", num_bits=4, type="int", symmetric=0), "symmetric=0 is not supported"),
    (changed(FP8_OPTIONS, activation_scheme="none"), "activation_scheme='none' is not supported"),
    (changed(FP8_OPTIONS, weight_block_size=[128]), "weight_block_size=[128] must be two positive integers"),
    (changed(FP8_OPTIONS, scale_fmt="ue8m0"), "scale_fmt='ue8m0' is not supported"),
    (changed(PACKED, format="marlin-24"), "format='marlin-24' is not supported"),
    (changed(PACKED, config_groups={}), "config_groups={} must be an object with one scheme or more"),
    (changed(PACKED, sparsity_config={"format": "dense"}), "sparsity_config={'format': 'dense'} is not supported"),
    (changed(PACKED, ignore=["re:("]), "ignore has 're:(', which is no pattern that can be used"),
    (compressed("pack-quantized", num_bits=3, type="int"), "num_bits=3 is not supported; supported: 4, 8"),
    (compressed("float-quantized", num_bits=8, type="int"), "type='int' is not supported; supported: float"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_not_supported_is_refused_by_name(options: object, message: str, tiny: Path, tmp_path: Path) -> None:
    quantize(tiny, tmp_path, "packed-4" if "ignore has" in message else "gptq-4")
    write(tiny, tmp_path, load_file(tmp_path / "model.safetensors"), options)
    with pytest.raises(ModelError) as error:
        open_checkpoint(tmp_path)
    assert message in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("options", "role"),
    [
        (changed(GPTQ, desc_act=True), "g_idx"),
        (compressed("pack-quantized", num_bits=4, type="int", group_size=32, symmetric=False), "weight_zero_point"),
        (compressed("pack-quantized", num_bits=4, type="int", group_size=32, actorder="group"), "weight_g_idx"),
    ],
)
def test_what_the_config_says_there_is_must_be_there(
    options: dict[str, Any], role: str, tiny: Path, tmp_path: Path
) -> None:
    case = "gptq-4" if role == "g_idx" else "packed-4"
    quantize(tiny, tmp_path, case)
    tensors = {n: t for n, t in load_file(tmp_path / "model.safetensors").items() if not n.endswith(role)}
    open_checkpoint(write(tiny, tmp_path, tensors, CASES[case][1])).close()
    with pytest.raises(ModelError, match=rf"proj.{role}' is missing"):
        open_checkpoint(write(tiny, tmp_path, tensors, options))


def broken() -> Iterator[tuple[str, str, Callable[[Tensors], Any], str]]:
    at = "model.layers.0.mlp.up_proj."
    yield "gptq-4", "a part is missing", lambda t: t.pop(at + "scales"), f"tensor '{at}scales' is missing"
    yield (
        "gptq-4",
        "too few groups",
        lambda t: t.update({at + "qzeros": t[at + "qzeros"][:1]}),
        f"'{at}qzeros' has shape [1, 12], not [2, 12]",
    )
    yield (
        "gptq-4",
        "another type",
        lambda t: t.update({at + "scales": t[at + "scales"].int()}),
        "has dtype I32, not F16",
    )
    yield "gptq-4", "both forms", lambda t: t.update({at + "weight": torch.ones(96, 64)}), f"'{at}weight' is there both"
    yield (
        "gptq-4",
        "a stray type",
        lambda t: t.update({at + "extra": torch.ones(2, dtype=torch.int32)}),
        f"'{at}extra' has dtype I32",
    )
    yield "awq-32", "a flat matrix", lambda t: t.update({at + "qweight": t[at + "qweight"][0]}), "not two dimensions"
    yield (
        "fp8-block",
        "too few blocks",
        lambda t: t.update({at + "weight_scale_inv": torch.ones(1, 1)}),
        "has shape [1, 1], not [6, 2]",
    )
    yield "fp8-tensor-static", "no input scale", lambda t: t.pop(at + "input_scale"), f"'{at}input_scale' is missing"
    yield "packed-4", "another shape", lambda t: t.update({at + "weight_shape": torch.ones(3, dtype=torch.int64)}), "has shape [3], not [2]"  # fmt: skip


@pytest.mark.parametrize(
    ("case", "kind", "change", "message"), list(broken()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_broken_checkpoint_names_the_tensor(
    case: str, kind: str, change: Callable[[Tensors], Any], message: str, tiny: Path, tmp_path: Path
) -> None:
    quantize(tiny, tmp_path, case)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    write(tiny, tmp_path, tensors, CASES[case][1])
    with pytest.raises(ModelError) as error:
        open_checkpoint(tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("case", "role", "change", "message"),
    [
        ("gptq-4", "g_idx", lambda t: t + 1, "names a group that does not exist"),
        ("gptq-4", "scales", lambda t: t * torch.inf, "are not all finite"),
        ("fp8-tensor", "weight_scale", lambda t: t * torch.nan, "are not all finite"),
        ("fp8-tensor-static", "input_scale", lambda t: t * 0, "is 0, it must be positive"),
        ("packed-4", "weight_shape", lambda t: t - 1, "do not fill whole words"),
    ],
)
def test_broken_values_name_the_matrix(
    case: str, role: str, change: Callable[[torch.Tensor], torch.Tensor], message: str, tiny: Path, tmp_path: Path
) -> None:
    quantize(tiny, tmp_path, case)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj."
    tensors[name + role] = change(tensors[name + role])
    checkpoint = open_checkpoint(write(tiny, tmp_path, tensors, CASES[case][1]))
    with pytest.raises(ModelError, match=message) as error:
        checkpoint.tensor(name + "weight", torch.float32)
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("kept", "refused"),
    [
        (["lm_head", "mlp.gate"], False),  # whole parts of a path: gate is not gate_proj
        (["up_proj"], True),
        (["model.layers.2.mlp"], True),
        (["re:.*lm_head", "re:.*router$"], False),
        (["re:.*down_proj"], True),
    ],
)
def test_a_module_that_is_excluded_must_not_be_quantized(
    kept: list[str], refused: bool, tiny: Path, tmp_path: Path
) -> None:
    quantize(tiny, tmp_path, "packed-4")
    write(tiny, tmp_path, load_file(tmp_path / "model.safetensors"), changed(PACKED, ignore=kept))
    if not refused:
        open_checkpoint(tmp_path).close()
        return
    with pytest.raises(ModelError, match="is quantized, and quantization_config excludes"):
        open_checkpoint(tmp_path)


def test_modules_left_dense_are_read_as_they_are(tiny: Path, tmp_path: Path) -> None:
    dense = quantize(tiny, tmp_path, "awq-32")
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: value for name, value in dense.items() if ".layers.0." in name and "_proj" in name}
    tensors = {n: t for n, t in tensors.items() if n.rpartition(".")[0] + ".weight" not in kept} | kept
    options = changed(AWQ, modules_to_not_convert=["layers.0"])
    checkpoint = open_checkpoint(write(tiny, tmp_path, tensors, options))
    assert sorted(checkpoint.names()) == sorted(dense)
    for name, expected in kept.items():
        assert torch.equal(checkpoint.tensor(name, torch.float32), expected)
        assert checkpoint.packed(name) is None


def test_the_bytes_of_mxfp4_are_given_as_they_are(tiny: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    blocks = torch.arange(2 * 6 * 4 * 16).to(torch.uint8).view(2, 6, 4, 16)
    options = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    checkpoint = open_checkpoint(write(tiny, tmp_path, {**tensors, "model.x_blocks": blocks}, options))
    assert torch.equal(checkpoint.tensor("model.x_blocks", torch.uint8), blocks)
    with pytest.raises(ModelError, match="tensor 'model.x' has dtype U8"):
        open_checkpoint(write(tiny, tmp_path, {**tensors, "model.x": blocks}, options))


def test_an_fp8_tensor_without_a_config_is_refused(tiny: Path, tmp_path: Path) -> None:
    quantize(tiny, tmp_path, "fp8-tensor")
    write(tiny, tmp_path, load_file(tmp_path / "model.safetensors"), None)
    with pytest.raises(ModelError, match="has dtype F8_E4M3, supported are F32, F16, BF16"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("bits", "group", "sym"), [(4, 32, True), (4, 32, False), (8, None, True)])
def test_what_compressed_tensors_packs_is_read(
    bits: int, group: int | None, sym: bool, tiny: Path, tmp_path: Path
) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    strategy = "group" if group else "channel"
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group, "symmetric": sym}
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**weights))
    tensors, draw = load_file(tiny / "model.safetensors"), torch.Generator().manual_seed(0)
    dense = {}
    for name in [name for name in tensors if "_proj" in name]:
        weight = tensors.pop(name).float()
        groups = weight.shape[1] // (group or weight.shape[1])
        scale = weight.unflatten(1, (groups, -1)).abs().amax(-1) / 2 ** (bits - 1)
        state = {"weight": weight, "weight_scale": scale}
        if not sym:
            state["weight_zero_point"] = torch.randint(-8, 8, scale.shape, generator=draw, dtype=torch.int8)
        state = compressors.PackedQuantizationCompressor.compress(state, scheme)
        tensors |= {name.removesuffix("weight") + role: value for role, value in state.items()}
        dense[name] = compressors.PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    checkpoint = open_checkpoint(write(tiny, tmp_path, tensors, compressed("pack-quantized", **weights)))
    for name, expected in dense.items():
        torch.testing.assert_close(checkpoint.tensor(name, torch.float32), expected, rtol=1e-6, atol=0)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**30))
def test_nibbles_come_back(rows: int, blocks: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, 32 * blocks), generator=draw, dtype=torch.uint8)
    packed_codes = pack_nibbles(codes)
    assert torch.equal(unpack_nibbles(packed_codes), codes)
    assert all(int(packed_codes[0, j]) == int(codes[0, j]) + 16 * int(codes[0, j + 16]) for j in range(16))


def test_experts_are_stacked() -> None:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (3, 8, 32), generator=draw, dtype=torch.uint8)
    scales = torch.rand(3, 8, 2, generator=draw)
    zeros = [None, torch.full((8, 2), 7, dtype=torch.uint8), None]
    orders = [None, None, torch.randperm(64, generator=draw)]
    each = [IntWeight(codes[i], scales[i], zeros[i], 4, 32, orders[i]) for i in range(3)]
    whole = stacked(each)
    assert whole.shape == (3, 8, 64)
    assert torch.equal(dequantized(whole, torch.float32), torch.stack([dequantized(w, torch.float32) for w in each]))
    floats = [Fp8Weight(torch.randn(8, 64, generator=draw).to(FP8), torch.rand(8, 1), 1, 64) for _ in range(2)]
    expected = torch.stack([dequantized(w, torch.float32) for w in floats])
    assert torch.equal(dequantized(stacked(floats), torch.float32), expected)
    mixed = [each[0], IntWeight(codes[1], torch.rand(8, 4, generator=draw), None, 4, 16)]
    assert torch.equal(stacked(mixed, torch.float16), torch.stack([dequantized(w, torch.float16) for w in mixed]))


@pytest.mark.parametrize("group", [16, 24, 48])
def test_activations_are_rounded_as_documented(group: int) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(5, 48, generator=draw) * 3
    x[2] = 0
    weight = Fp8Weight(torch.zeros(4, 48, dtype=FP8), torch.ones(4, -(-48 // group)), 1, group)
    codes, scales = rounded(x, weight)
    near = codes.float() * scales.repeat_interleave(group, 1)[:, :48]
    assert (near[2] == 0).all() and scales.isfinite().all()
    largest = x.unflatten(1, (-1, group)).abs().amax(-1)
    torch.testing.assert_close(
        codes.float().unflatten(1, (-1, group)).abs().amax(-1), torch.where(largest > 0, 448.0, 0.0)
    )
    # half a step of three bits, and half the smallest of those without an exponent
    assert ((near - x).abs() <= x.abs() / 16 + scales.repeat_interleave(group, 1)[:, :48] * 2**-10).all()
    fixed = Fp8Weight(weight.codes, weight.scales, 1, group, torch.tensor(0.01))
    codes, scales = rounded(x, fixed)
    assert (scales == 0.01).all()
    expected = (x / 0.01).clamp(-448, 448).to(FP8)
    assert torch.equal(codes.float(), expected.float()) and codes.float().abs().max() == 448
