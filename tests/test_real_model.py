"""The embedded default model end to end, against transformers' LlamaForCausalLM on the same dequantized weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixrt import Engine, SamplingParams
from radixrt.bench.backends import load_transformers
from radixrt.model.source import resolve
from tests.engine.oracle import engine_logits, reference_logits

TOPICS = (
    "the sea,a small bakery,prime numbers,the moon,an old library,rain,a chess game,bicycles,coffee,the desert,"
    "a lost key,winter,music,a long train ride,gardens,the number zero,friendship,a robot,maps,the colour blue"
).split(",")
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def reference() -> Any:
    return load_transformers(resolve(None), torch.float32)


@pytest.fixture(scope="module")
def expected(reference: Any, default_engine: Engine) -> list[list[int]]:
    """64 greedy tokens for each of 20 prompts: one batch padded on the left."""
    prompts = prompts_of(default_engine)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = reference.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=64, max_new_tokens=64, pad_token_id=0
        )
    return [row[width:].tolist() for row in out]


def prompts_of(engine: Engine) -> list[list[int]]:
    return [
        engine.tokenizer.encode_chat([{"role": "user", "content": f"Tell me something about {topic}."}])
        if i % 2
        else engine.tokenizer.encode(f"Once upon a time there was a story about {topic}.")
        for i, topic in enumerate(TOPICS)
    ]


def test_logits_over_256_positions(reference: Any, default_engine: Engine) -> None:
    text = " ".join(f"{i}. A sentence about {topic}, and then: é, 漢字, 🙂." for i, topic in enumerate(TOPICS))
    ids = default_engine.tokenizer.encode(text)[:256]
    assert len(ids) == 256
    default_engine.generate(ids, SamplingParams(max_tokens=0))
    assert (engine_logits(default_engine, ids) - reference_logits(reference, ids)).abs().max() < 1e-3


@pytest.mark.parametrize("cached", ["empty", "full"])
def test_greedy_tokens_of_twenty_prompts(cached: str, default_engine: Engine, expected: list[list[int]]) -> None:
    if cached == "empty":
        default_engine.flush_cache()
    outputs = default_engine.generate(prompts_of(default_engine), GREEDY)
    assert [list(o.token_ids) for o in outputs] == expected


def test_greedy_tokens_without_a_cache_in_a_tight_pool(expected: list[list[int]]) -> None:
    with Engine(
        disable_radix_cache=True, max_total_tokens=128, chunked_prefill_size=16, check_integrity=True, kernels="torch"
    ) as engine:
        outputs = engine.generate(prompts_of(engine)[:6], GREEDY)
    assert [list(o.token_ids) for o in outputs] == expected[:6]


def test_64_requests_with_one_prefix_of_1000_tokens(default_engine: Engine) -> None:
    default_engine.flush_cache()
    default_engine.reset_stats()
    prefix = default_engine.tokenizer.encode("A long introduction that everybody shares. " * 200)[:1000]
    prompts = [[*prefix, *default_engine.tokenizer.encode(f" Question {i}: what is {i} plus {i}?")] for i in range(64)]
    default_engine.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
    edges = len({tuple(p[:end]) for p in prompts for end in range(1, len(p) + 1)})
    stats = default_engine.stats()
    assert stats.computed_tokens == stats.unique_tokens == edges
    assert stats.hit_rate == stats.optimal_hit_rate > 0.9


def test_a_chat_remembers_and_computes_only_the_new_turn(default_engine: Engine) -> None:
    messages = [{"role": "user", "content": "My name is Ada. Say hello."}]
    first = default_engine.generate([messages], SamplingParams(temperature=0, max_tokens=24))[0]
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And now goodbye."}]
    second = default_engine.generate([messages], SamplingParams(temperature=0, max_tokens=4))[0]
    assert second.cached_tokens >= first.prompt_tokens + first.completion_tokens - 1
    assert first.text and second.text
