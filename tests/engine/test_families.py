"""Every family against transformers' own modelling code: logits and greedy tokens, however the work is cut up."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Gemma3Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from radixrt.config import EngineConfig
from radixrt.errors import InvalidRequest, ModelError
from radixrt.model.footprint import footprint
from radixrt.ops.native import native
from radixrt.ops.torch.ops import TorchOps
from radixrt.request import SamplingParams
from tests.engine.oracle import GREEDY, PROMPT_ONLY, engine_logits, reference_greedy, reference_logits
from tests.tiny import CONFIGS, SIZES, VOCAB, save_bytes_tokenizer, save_tiny

rng = random.Random(0)
LONG = [rng.randrange(8, VOCAB) for _ in range(150)]
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
}
PROMPTS = [LONG[:n] for n in (1, 2, 17, 40, 64)] + [[*LONG[:30], *LONG[90:99]], LONG[100:123]]


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, chunk: int, tiny, make_engine) -> None:
    engine = make_engine(name, chunked_prefill_size=chunk)
    engine.generate(LONG, PROMPT_ONLY)
    expected = reference_logits(tiny(name)[1], LONG)
    assert (engine_logits(engine, LONG) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_after_a_cached_prefix_in_a_mixed_batch(name: str, tiny, make_engine) -> None:
    engine = make_engine(name, chunked_prefill_size=32)
    engine.generate(LONG[:60], PROMPT_ONLY)
    stream = engine.stream(LONG[120:140], GREEDY)  # decodes while the others are prefilled
    next(stream)
    others = [[*LONG[:n], *LONG[n + 5 : 130]] for n in (0, 20, 60)]
    engine.generate(others, PROMPT_ONLY)
    stream.close()
    for ids in others:
        assert (engine_logits(engine, ids) - reference_logits(tiny(name)[1], ids)).abs().max() < 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_however_they_are_computed(name: str, tiny, make_engine) -> None:
    model = tiny(name)[1]
    expected = [reference_greedy(model, ids, GREEDY.max_tokens or 0) for ids in PROMPTS]
    longest = max(map(len, PROMPTS)) + (GREEDY.max_tokens or 0)
    for settings in (
        {},
        {"disable_radix_cache": True},
        {"chunked_prefill_size": 1},
        {"chunked_prefill_size": 7},
        {"page_size": 4},
        {"page_size": 16, "disable_radix_cache": True},
        {"max_running_requests": 1},
        {"schedule_policy": "dfs-weight", "chunked_prefill_size": 64},
        {"max_total_tokens": longest + 2},
        {"max_total_tokens": longest + 6, "page_size": 3},
        {"max_total_tokens": longest + 2, "disable_radix_cache": True},
    ):
        engine = make_engine(name, **settings)
        for _ in range(2):  # the second time from the cache
            outputs = engine.generate(PROMPTS, GREEDY)
            assert [list(o.token_ids) for o in outputs] == expected, settings


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3", "gemma3_text", "gpt_oss"])
def test_after_preemption(name: str, tiny, make_engine) -> None:
    engine = make_engine(name, max_total_tokens=110, chunked_prefill_size=24)
    prompts = [LONG[i : i + 12] for i in range(0, 96, 12)]
    expected = [reference_greedy(tiny(name)[1], ids, 40) for ids in prompts]
    outputs = engine.generate(prompts, [type(GREEDY)(temperature=0, max_tokens=40, ignore_eos=True)] * len(prompts))
    assert engine.stats().preemptions > 0 and sum(o.preemptions for o in outputs) > 0
    assert [list(o.token_ids) for o in outputs] == expected


def test_dynamic_rope_beyond_the_trained_length_is_fixed_by_the_longest_allowed(tiny, make_engine) -> None:
    """transformers changes the frequencies as a sequence grows; with cached keys they may not change."""
    model = copy.deepcopy(tiny("llama-rope-dynamic")[1])
    engine = make_engine("llama-rope-dynamic", max_model_len=1024)
    ids = [rng.randrange(8, VOCAB) for _ in range(1024)]
    engine.generate(ids[:-1], PROMPT_ONLY)
    expected = reference_logits(model, ids)[:-1]  # one pass of 1,024: the same frequencies
    assert (engine_logits(engine, ids[:-1]) - expected).abs().max() < 2e-3


@pytest.mark.parametrize(("longest", "original"), [(512, 64), (64, 64)])
def test_longrope_is_long_or_short_for_all_sequences_of_an_engine(
    longest: int, original: int, tmp_path, make_engine
) -> None:
    """transformers takes the long factors for long sequences only; with cached keys they may not change."""
    model = save_tiny("phi3-longrope", tmp_path, original_max_position_embeddings=original)
    engine = make_engine(str(tmp_path), max_model_len=longest)
    ids = LONG[: min(longest - 1, 150)]
    engine.generate(ids, PROMPT_ONLY)
    assert (engine_logits(engine, ids) - reference_logits(model, ids)).abs().max() < 1e-4


MOE = [name for name in CONFIGS if "moe" in name or name in ("mixtral", "gpt_oss")]


@pytest.mark.parametrize("name", MOE)
def test_every_expert_has_been_at_work(name: str, tiny, make_engine, monkeypatch) -> None:
    seen: set[int] = set()
    moe = TorchOps.moe

    def spy(self, x, experts, *others):
        seen.update(experts.flatten().tolist())
        return moe(self, x, experts, *others)

    monkeypatch.setattr(TorchOps, "moe", spy)
    engine = make_engine(name)
    engine.generate(LONG, PROMPT_ONLY)
    assert engine._runner.model.experts is not None
    assert seen == set(range(engine._runner.model.experts.count))


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gpt_oss"])
def test_where_caps_and_clamps_bite(name: str, tmp_path, make_engine) -> None:
    """Weights large enough that scores, logits and gates go far beyond them."""
    model = save_tiny(name, tmp_path, initializer_range=0.5)
    engine = make_engine(str(tmp_path))
    engine.generate(LONG, PROMPT_ONLY)
    expected = reference_logits(model, LONG)
    assert (engine_logits(engine, LONG) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_text_model_among_others(tmp_path, make_engine) -> None:
    """gemma3 with its vision part, which is not read; text goes the way it goes in the text model."""
    text = {**CONFIGS["gemma3_text"][1], **SIZES, "final_logit_softcapping": None}
    parts = {"text_config": text, "vision_config": VISION, "mm_tokens_per_image": 4}
    model = AutoModelForImageTextToText.from_config(Gemma3Config(**parts), attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    save_bytes_tokenizer(tmp_path)
    engine = make_engine(str(tmp_path), chunked_prefill_size=40)
    engine.generate(LONG, PROMPT_ONLY)
    assert (engine_logits(engine, LONG) - reference_logits(model, LONG)).abs().max() < 1e-4
    assert engine.model_info.family == "gemma3_text"


def test_experts_in_mxfp4(tiny, tmp_path, make_engine) -> None:
    """The blocks of gpt-oss, beside what transformers makes of them."""
    model = copy.deepcopy(tiny("gpt_oss")[1])
    shutil.copytree(tiny("gpt_oss")[0], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    state = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for layer, block in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            dense = getattr(block.mlp.experts, name)
            at = f"model.layers.{layer}.mlp.experts.{name}"
            shape = (dense.shape[0], dense.shape[2], dense.shape[1] // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(122, 125, shape, dtype=torch.uint8, generator=generator)
            dense.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            del state[at]
            state.update({at + "_blocks": blocks, at + "_scales": scales})
    save_file(state, tmp_path / "model.safetensors")
    engine = make_engine(str(tmp_path))
    engine.generate(LONG, PROMPT_ONLY)
    expected = reference_logits(model, LONG)
    assert (engine_logits(engine, LONG) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert told(tmp_path) == engine.model_info.parameters


@pytest.mark.parametrize(
    ("hidden", "scale", "message"),
    [
        (72, 122, "gate_up_proj_blocks' is in blocks of 32, which do not fill rows of 72"),
        (64, 255, "gate_up_proj_scales' has 255, which is no number"),
    ],
)
def test_blocks_of_mxfp4_that_are_no_matrix(hidden: int, scale: int, message: str, tmp_path, make_engine) -> None:
    save_tiny("gpt_oss", tmp_path, hidden_size=hidden)
    state = load_file(tmp_path / "model.safetensors")
    for name in [name for name in state if name.endswith("experts.gate_up_proj")]:
        experts, columns, rows = state.pop(name).shape
        state[name + "_blocks"] = torch.zeros(experts, rows, columns // 32, 16, dtype=torch.uint8)
        state[name + "_scales"] = torch.full((experts, rows, columns // 32), 122, dtype=torch.uint8)
        state[name + "_scales"][-1, -1, -1] = scale
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        make_engine(str(tmp_path))


def told(path: Path) -> float:
    """The weights that the headers tell of, in numbers."""
    return footprint(path, EngineConfig(model=str(path), kernels="torch")).weights / 4


@pytest.mark.parametrize("name", CONFIGS)
def test_its_weights_are_told_before_it_is_loaded(name: str, tiny, make_engine) -> None:
    assert told(tiny(name)[0]) == make_engine(name, kernels="torch").model_info.parameters


def test_native_kernels_say_which_families_they_compute(make_engine) -> None:
    with pytest.raises(
        InvalidRequest, match="kernels=native: they compute llama, mistral, qwen2, qwen3, not the gemma2"
    ):
        make_engine("gemma2", kernels="native")


def test_kv_in_fp8_gives_the_same_tokens_however_it_is_computed(make_engine) -> None:
    prompts = [[*range(5, 60)], [*range(5, 40), 9, 3], [7, 8]]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    settings = {"kernels": "torch", "kv_dtype": "fp8"}
    engine = make_engine("qwen3", **settings)
    assert engine.model_info.kv_dtype == "float8_e4m3fn"
    whole = [out.samples[0].token_ids for out in engine.generate(prompts, params)]
    again = [engine.generate(prompt, params)[0] for prompt in prompts]
    assert [out.samples[0].token_ids for out in again] == whole and again[0].cached_tokens > 50
    others = make_engine("qwen3", chunked_prefill_size=7, disable_radix_cache=True, **settings)
    assert [others.generate(prompt, params)[0].samples[0].token_ids for prompt in prompts] == whole


def test_kv_beyond_the_range_of_fp8_saturates() -> None:
    ops, cache = TorchOps(torch.device("cpu"), torch.float32), torch.zeros((2, 1, 4), dtype=torch.float8_e4m3fn)
    ops.store(cache, torch.tensor([1]), torch.tensor([[[1e9, -1e9, 448.0, 0.5]]]))
    assert cache.float().tolist() == [[[0.0] * 4], [[448.0, -448.0, 448.0, 0.5]]]


def test_kv_in_fp8_is_refused_where_nothing_computes_with_it(make_engine) -> None:
    if native is None:
        pytest.skip("radixrt was installed without a C++ compiler")
    with pytest.raises(InvalidRequest, match="kv_dtype=fp8"):
        make_engine("llama", kernels="native", kv_dtype="fp8")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_kv_dtype_is_a_setting_of_its_own(kv_dtype: str, tiny, make_engine) -> None:
    engine = make_engine("llama", kv_dtype=kv_dtype)
    engine.generate(LONG, PROMPT_ONLY)
    difference = (engine_logits(engine, LONG) - reference_logits(tiny("llama")[1], LONG)).abs().max()
    assert 1e-5 < difference < 0.5
    assert engine.model_info.kv_dtype == kv_dtype and engine.model_info.dtype == "float32"


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "olmo2", "starcoder2", "gpt_oss", "qwen2_moe"])
def test_computing_in_bfloat16(name: str, tiny, make_engine) -> None:
    engine = make_engine(name, dtype="bfloat16")
    engine.generate(LONG[:80], PROMPT_ONLY)
    expected = reference_logits(copy.deepcopy(tiny(name)[1]).to(torch.bfloat16), LONG[:80]).float()
    assert engine.model_info.dtype == "bfloat16"
    assert (engine_logits(engine, LONG[:80]) - expected).abs().mean() < 0.2


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window", "gemma2", "gpt_oss"])
def test_masks_too_large_for_one_call_are_cut(name: str, tiny, make_engine, monkeypatch) -> None:
    from radixrt.ops.torch import attention

    monkeypatch.setattr(attention, "_MAX_SCORES", 700)
    engine = make_engine(name)
    others = [LONG, [*LONG[:40], *LONG[45:90]], LONG[100:103]]
    engine.generate(others, PROMPT_ONLY)
    for ids in others:
        assert (engine_logits(engine, ids) - reference_logits(tiny(name)[1], ids)).abs().max() < 1e-4
