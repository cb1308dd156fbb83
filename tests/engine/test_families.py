"""Every family against transformers' own modelling code: logits and greedy tokens, however the work is cut up."""

from __future__ import annotations

import random

import pytest

from tests.engine.oracle import GREEDY, PROMPT_ONLY, engine_logits, reference_greedy, reference_logits
from tests.tiny import CONFIGS, VOCAB

rng = random.Random(0)
LONG = [rng.randrange(8, VOCAB) for _ in range(150)]
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


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3"])
def test_after_preemption(name: str, tiny, make_engine) -> None:
    engine = make_engine(name, max_total_tokens=110, chunked_prefill_size=24)
    prompts = [LONG[i : i + 12] for i in range(0, 96, 12)]
    expected = [reference_greedy(tiny(name)[1], ids, 40) for ids in prompts]
    outputs = engine.generate(prompts, [type(GREEDY)(temperature=0, max_tokens=40, ignore_eos=True)] * len(prompts))
    assert engine.stats().preemptions > 0 and sum(o.preemptions for o in outputs) > 0
    assert [list(o.token_ids) for o in outputs] == expected


def test_dynamic_rope_beyond_the_trained_length_is_fixed_by_the_longest_allowed(tiny, make_engine) -> None:
    """transformers changes the frequencies as a sequence grows; with cached keys they may not change."""
    import copy

    model = copy.deepcopy(tiny("llama-rope-dynamic")[1])
    engine = make_engine("llama-rope-dynamic", max_model_len=1024)
    ids = [rng.randrange(8, VOCAB) for _ in range(1024)]
    engine.generate(ids[:-1], PROMPT_ONLY)
    expected = reference_logits(model, ids)[:-1]  # one pass of 1,024: the same frequencies
    assert (engine_logits(engine, ids[:-1]) - expected).abs().max() < 2e-3


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_kv_dtype_is_a_setting_of_its_own(kv_dtype: str, tiny, make_engine) -> None:
    engine = make_engine("llama", kv_dtype=kv_dtype)
    engine.generate(LONG, PROMPT_ONLY)
    difference = (engine_logits(engine, LONG) - reference_logits(tiny("llama")[1], LONG)).abs().max()
    assert 1e-5 < difference < 0.5
    assert engine.model_info.kv_dtype == kv_dtype and engine.model_info.dtype == "float32"


def test_computing_in_bfloat16(tiny, make_engine) -> None:
    import copy

    import torch

    engine = make_engine("qwen3", dtype="bfloat16")
    engine.generate(LONG[:80], PROMPT_ONLY)
    expected = reference_logits(copy.deepcopy(tiny("qwen3")[1]).to(torch.bfloat16), LONG[:80]).float()
    assert engine.model_info.dtype == "bfloat16"
    assert (engine_logits(engine, LONG[:80]) - expected).abs().mean() < 0.2


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window"])
def test_masks_too_large_for_one_call_are_cut(name: str, tiny, make_engine, monkeypatch) -> None:
    from radixrt.ops.torch import attention

    monkeypatch.setattr(attention, "_MAX_SCORES", 700)
    engine = make_engine(name)
    others = [LONG, [*LONG[:40], *LONG[45:90]], LONG[100:103]]
    engine.generate(others, PROMPT_ONLY)
    for ids in others:
        assert (engine_logits(engine, ids) - reference_logits(tiny(name)[1], ids)).abs().max() < 1e-4
