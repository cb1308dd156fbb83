"""Checkpoints against transformers' own readers of the same files, and against broken files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from radixrt.errors import ModelError
from radixrt.model.checkpoint import open_checkpoint
from radixrt.model.dequantize import dequantize
from radixrt.model.gguf_file import GGML_TYPES
from tests.model.model_files import write_gguf

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-untied": LlamaConfig(**SIZES, rms_norm_eps=1e-5),
    "llama-biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=8),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
}


def random_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def hf_directory(path: Path, config: Any = FAMILIES["llama"], **options: Any) -> Path:
    random_model(config).save_pretrained(path, **options)
    return path


# -- GGUF: what llama.cpp's converter writes, by the table of names of the gguf package


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The converter's row order for rotary embeddings: pairs side by side instead of halves."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_of(
    path: Path, config: Any, change: Callable[[gguf.GGUFWriter], None] = lambda writer: None
) -> dict[str, torch.Tensor]:
    """Write a random model as GGUF and return its weights under their Hugging Face names."""
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    state = {
        name: value
        for name, value in random_model(config).state_dict().items()
        if not (name == "lm_head.weight" and config.tie_word_embeddings)
    }

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        if getattr(config, "head_dim", None):
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
        if config.model_type == "mistral":
            writer.add_sliding_window(config.sliding_window)
        for name, value in state.items():
            array = value.numpy()
            if arch == "llama" and ".q_proj." in name:
                array = interleave(array, config.num_attention_heads)
            if arch == "llama" and ".k_proj." in name:
                array = interleave(array, config.num_key_value_heads)
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), array)
        change(writer)

    write_gguf(path, fill, arch)
    return state


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_tensors_and_config_are_those_of_the_original(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]
    state = gguf_of(tmp_path / "m.gguf", config)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.format == "gguf"
    assert checkpoint.name == "m"
    assert sorted(checkpoint.names()) == sorted(state)
    for name, expected in state.items():
        assert checkpoint.shape(name) == tuple(expected.shape)
        torch.testing.assert_close(checkpoint.tensor(name, torch.float32), expected, rtol=0, atol=0)
        assert checkpoint.tensor(name, torch.bfloat16).dtype == torch.bfloat16
    for key in (*SIZES, "model_type", "head_dim", "tie_word_embeddings", "hidden_act"):
        if hasattr(config, key):
            assert checkpoint.config[key] == getattr(config, key), key
    assert checkpoint.config["rms_norm_eps"] == pytest.approx(config.rms_norm_eps)
    assert checkpoint.config["rope_theta"] == config.rope_parameters["rope_theta"]
    if family != "qwen2":  # whose biases are not a setting
        assert checkpoint.config["attention_bias"] == getattr(config, "attention_bias", False)
    assert checkpoint.config.get("sliding_window") == (8 if family == "mistral" else None)
    assert checkpoint.nbytes == sum(value.numel() * 4 for value in state.values())


def test_gguf_tensors_are_those_transformers_reads(tmp_path: Path) -> None:
    """The inverse of the rotary row order, by transformers' own GGUF loader."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    gguf_of(tmp_path / "m.gguf", FAMILIES["llama-untied"])
    model = random_model(FAMILIES["llama-untied"])
    theirs = load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=True, model_to_load=model)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert set(checkpoint.names()) == set(theirs["tensors"])
    for name, expected in theirs["tensors"].items():
        np.testing.assert_array_equal(checkpoint.tensor(name, torch.float32).numpy(), np.asarray(expected))
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "max_position_embeddings", "model_type"):
        assert checkpoint.config[key] == theirs["config"][key]


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType(id) for id in GGML_TYPES], ids=lambda kind: kind.name)
def test_raw_blocks_and_rows_give_the_tensor(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "hidden_size": 256})
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    scales = np.random.default_rng(0).integers(0, 60, size=(256, 256 // block * block_bytes), dtype=np.uint8)

    def fill(writer: gguf.GGUFWriter) -> None:
        for add, value in (
            (writer.add_block_count, 1),
            (writer.add_context_length, 256),
            (writer.add_embedding_length, 256),
            (writer.add_feed_forward_length, 256),
            (writer.add_head_count, config.num_attention_heads),
        ):
            add(value)
        writer.add_tensor("token_embd.weight", np.zeros((8, 256), dtype=np.float32))
        writer.add_tensor("blk.0.attn_q.weight", scales, raw_dtype=kind)
        writer.add_tensor("blk.0.attn_v.weight", scales, raw_dtype=kind)

    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", fill))
    queries, values = (checkpoint.raw(f"model.layers.0.self_attn.{name}_proj.weight") for name in "qv")
    assert queries.type_name == values.type_name == kind.name
    assert queries.shape == (256, 256)
    np.testing.assert_array_equal(queries.blocks, scales)
    assert values.rows is None
    assert queries.rows is not None
    plain = checkpoint.tensor(values.name, torch.float32).numpy()
    np.testing.assert_array_equal(plain, dequantize(scales, kind.value))
    ours = checkpoint.tensor(queries.name, torch.float32).numpy()
    np.testing.assert_array_equal(ours, plain[queries.rows])
    np.testing.assert_array_equal(interleave(ours, config.num_attention_heads), plain)


LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def factors(rope: dict[str, Any]) -> np.ndarray:
    """What the converter stores: how much transformers' llama3 rule slows each frequency down."""
    config = LlamaConfig(**{**SIZES, "hidden_size": 512}, rope_parameters={"rope_theta": 500000.0, **rope})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 1.0 / 500000.0 ** (torch.arange(0, 128, 2) / 128)
    return (plain / scaled).numpy().astype(np.float32)


@pytest.mark.parametrize(
    ("original", "stored", "expected"),
    [
        (None, factors({"rope_type": "llama3", **LLAMA3}), {"rope_type": "llama3", **LLAMA3}),
        (
            None,
            factors({"rope_type": "llama3", **LLAMA3, "factor": 8.0}),
            {"rope_type": "llama3", **LLAMA3, "factor": 8.0},
        ),
        (
            4096,
            factors({"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 4096}),
            {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 4096},
        ),
        (None, np.ones(64, dtype=np.float32), None),
    ],
)
def test_llama3_rope_is_recovered_from_its_factors(
    original: int | None, stored: np.ndarray, expected: dict[str, Any] | None, tmp_path: Path
) -> None:
    config = LlamaConfig(
        **{**SIZES, "hidden_size": 512}, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}
    )

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", stored)
        if original is not None:
            writer.add_rope_scaling_orig_ctx_len(original)

    gguf_of(tmp_path / "m.gguf", config, change)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    found = checkpoint.config.get("rope_scaling")
    assert "rope_freqs.weight" not in checkpoint.names()
    if expected is None:
        assert found is None
    else:
        assert found.pop("factor") == pytest.approx(expected.pop("factor"), rel=1e-6)
        assert found == expected


def test_unknown_rope_factors_keep_their_own_name(tmp_path: Path) -> None:
    gguf_of(
        tmp_path / "m.gguf",
        FAMILIES["llama"],
        lambda writer: writer.add_tensor("rope_freqs.weight", np.linspace(1, 3, 8).astype(np.float32)),
    )
    assert open_checkpoint(tmp_path / "m.gguf").config["rope_scaling"]["rope_type"] == "freq_factors"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {"type": "yarn", "factor": 2.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
            {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
        ({"type": "longrope", "factor": 2.0}, {"rope_type": "longrope", "factor": 2.0}),  # refused by its name later
    ],
)
def test_rope_scaling_keys(fields: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in fields.items():
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(f"llama.rope.scaling.{key}", value)

    gguf_of(tmp_path / "m.gguf", FAMILIES["llama"], change)
    assert open_checkpoint(tmp_path / "m.gguf").config.get("rope_scaling") == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda w: w.add_head_count(0), "llama.attention.head_count=0"),
        (lambda w: w.add_string("llama.context_length", "many"), "llama.context_length='many'"),
        (lambda w: w.add_float32("llama.rope.freq_base", float("nan")), "llama.rope.freq_base=nan"),
        (lambda w: w.add_value_length(8), "value_length=8"),
        (lambda w: w.add_array("llama.feed_forward_length", [128, 256]), "llama.feed_forward_length"),
        (lambda w: w.add_string("llama.rope.scaling.type", "yarn"), "rope.scaling.factor=0.0"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.ones(3, dtype=np.float32)), "rope_freqs.weight"),
    ],
)
def test_wrong_gguf_metadata_names_the_key(change: Callable[[Any], None], expected: str, tmp_path: Path) -> None:
    def replace(writer: gguf.GGUFWriter) -> None:
        probe = gguf.GGUFWriter(None, "llama")  # the writer refuses to write a key twice
        change(probe)
        for key in probe.kv_data[0].keys() - {"general.architecture"}:
            writer.kv_data[0].pop(key, None)
        change(writer)

    gguf_of(tmp_path / "m.gguf", FAMILIES["llama"], replace)
    with pytest.raises(ModelError) as error:
        open_checkpoint(tmp_path / "m.gguf")
    assert expected in str(error.value)
    assert "m.gguf" in str(error.value)


def test_an_unknown_architecture_keeps_its_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", lambda writer: None, "mamba")
    assert open_checkpoint(path).config == {"model_type": "mamba"}


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", lambda writer: writer.add_tensor("token_embd.weight", np.zeros((2, 2), dtype=np.float32))
    )
    with pytest.raises(ModelError, match=r"'llama.attention.head_count' is missing"):
        open_checkpoint(path)


def test_rotary_rows_must_divide_into_heads(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.9.attn_q.weight", np.zeros((63, 64), dtype=np.float32))

    gguf_of(tmp_path / "m.gguf", FAMILIES["llama"], change)
    with pytest.raises(ModelError, match=r"blk.9.attn_q.weight.*63 rows"):
        open_checkpoint(tmp_path / "m.gguf").tensor("model.layers.9.self_attn.q_proj.weight", torch.float32)


def test_a_missing_tensor_is_named_with_its_nearest(tmp_path: Path) -> None:
    gguf_of(tmp_path / "m.gguf", FAMILIES["llama"])
    hf_directory(tmp_path / "hf")
    for path in (tmp_path / "m.gguf", tmp_path / "hf"):
        checkpoint = open_checkpoint(path)
        for read in (checkpoint.shape, checkpoint.raw, lambda name, c=checkpoint: c.tensor(name, torch.float32)):
            with pytest.raises(ModelError, match="'model.norm.wait' is missing; did you mean 'model.norm.weight'"):
                read("model.norm.wait")


def test_the_default_model_dequantizes_as_the_gguf_package_does(default_gguf: Path) -> None:
    checkpoint = open_checkpoint(default_gguf)
    assert checkpoint.config["model_type"] == "llama"
    name = "model.layers.3.self_attn.k_proj.weight"
    raw = checkpoint.raw(name)
    theirs = gguf.quants.dequantize(np.array(raw.blocks), gguf.GGMLQuantizationType[raw.type_name])
    np.testing.assert_array_equal(interleave(checkpoint.tensor(name, torch.float32).numpy(), 3), theirs)
    assert "lm_head.weight" not in checkpoint.names()
    assert checkpoint.config["tie_word_embeddings"]


# -- Hugging Face directories


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "50KB"}], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hf_tensors_are_those_transformers_saved(options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    model = random_model(FAMILIES["llama-untied"]).to(dtype)
    model.save_pretrained(tmp_path, **options)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or options
    checkpoint = open_checkpoint(tmp_path)
    state = model.state_dict()
    assert sorted(checkpoint.names()) == sorted(state)
    for name, expected in state.items():
        assert checkpoint.shape(name) == tuple(expected.shape)
        assert torch.equal(checkpoint.tensor(name, dtype), expected)
        raw = checkpoint.raw(name)
        assert raw.rows is None
        assert raw.type_name == {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
        type_id = next(id for id, entry in GGML_TYPES.items() if entry[0] == raw.type_name)
        np.testing.assert_array_equal(dequantize(np.array(raw.blocks), type_id), expected.float().numpy())
    assert checkpoint.nbytes == sum(value.numel() * value.element_size() for value in state.values())
    assert checkpoint.config == json.loads((tmp_path / "config.json").read_text())
    assert checkpoint.generation_config == json.loads((tmp_path / "generation_config.json").read_text())


def test_shards_without_an_index_are_read_together(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    assert sorted(open_checkpoint(tmp_path).names()) == ["a", "b"]
    save_file({"a": torch.zeros(2)}, tmp_path / "two.safetensors")
    with pytest.raises(ModelError, match="'a' is also in one.safetensors"):
        open_checkpoint(tmp_path)


def index(path: Path, weight_map: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), "has no config.json"),
    "config not JSON": (lambda p: (p / "config.json").write_text("{,}"), "config.json: not valid JSON"),
    "config not an object": (lambda p: (p / "config.json").write_text("[]"), "config.json: must be a JSON object"),
    "config not UTF-8": (lambda p: (p / "config.json").write_bytes(b'{"a": "\xff"}'), "config.json: not valid JSON"),
    "config too deep": (lambda p: (p / "config.json").write_text("[" * 10**5), "config.json: not valid JSON"),
    "generation config": (
        lambda p: (p / "generation_config.json").write_text("x"),
        "generation_config.json: not valid",
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "no *.safetensors"),
    "weights cut short": (lambda p: truncate(p / "model.safetensors"), "model.safetensors: not a whole"),
    "weights empty": (lambda p: (p / "model.safetensors").write_bytes(b""), "model.safetensors: not a whole"),
    "weights hostile": (
        lambda p: (p / "model.safetensors").write_bytes(b"\xff" * 64),
        "model.safetensors: not a whole",
    ),
    "integer weights": (
        lambda p: save_file({"t": torch.ones(2, dtype=torch.int8)}, p / "model.safetensors"),
        "tensor 't' has dtype I8",
    ),
    "index without a map": (lambda p: index(p, None), "weight_map must be"),
    "index of numbers": (lambda p: index(p, {"t": 3}), "weight_map['t']"),
    "absent shard": (lambda p: index(p, {"t": "gone.safetensors"}), "gone.safetensors'"),
    "shard outside": (lambda p: index(p, {"t": "../x.safetensors"}), "'../x.safetensors': must be a file of the"),
    "shard absolute": (lambda p: index(p, {"t": "/etc/passwd"}), "'/etc/passwd': must be a file of the"),
    "shard without the tensor": (lambda p: index(p, {"t": "model.safetensors"}), "tensor 't' is missing"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_directories_name_file_and_field(case: str, tmp_path: Path) -> None:
    hf_directory(tmp_path)
    open_checkpoint(tmp_path)
    breakage, expected = BROKEN[case]
    breakage(tmp_path)
    with pytest.raises(ModelError) as error:
        open_checkpoint(tmp_path)
    assert expected in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "q4.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"has no config.json; give one of its GGUF files: q4.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="give the directory"):
        open_checkpoint(tmp_path / "model.safetensors")
