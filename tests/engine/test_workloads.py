"""The bench's workloads on a tiny model: the optimum is reached, and a pool that barely holds one request changes nothing."""

from __future__ import annotations

import pytest

from radixrt.bench.backends import RadixBackend
from radixrt.bench.workloads import WORKLOADS, build, unique_edges

SHARING = ("few-shot", "chat", "tree-of-thought")


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_pool_of_one_request_and_a_fifth_gives_the_same_outputs(name: str, page_size: int, make_engine) -> None:
    engine = make_engine(max_total_tokens=16384, page_size=page_size)
    workload = build(name, lambda text: engine.tokenizer.encode(text), scale=0.15)
    expected = RadixBackend(engine).execute(workload).outputs
    pages = -(-workload.longest * 6 // 5 // page_size)
    for settings in ({}, {"disable_radix_cache": True}, {"chunked_prefill_size": 16, "schedule_policy": "dfs-weight"}):
        tight = make_engine(
            max_total_tokens=pages * page_size, max_model_len=workload.longest, page_size=page_size, **settings
        )
        assert RadixBackend(tight).execute(workload).outputs == expected
        assert tight.stats().waiting == tight.stats().running == 0


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "fcfs"])
@pytest.mark.parametrize("name", SHARING)
def test_a_large_pool_reaches_the_optimum_exactly(name: str, policy: str, make_engine) -> None:
    engine = make_engine(max_total_tokens=16384, schedule_policy=policy, chunked_prefill_size=48)
    workload = build(name, lambda text: engine.tokenizer.encode(text), scale=0.2)
    run = RadixBackend(engine).execute(workload)
    stats = engine.stats()
    assert stats.computed_tokens == stats.unique_tokens == unique_edges(workload, run.prompts, run.outputs)
    assert stats.hit_rate == stats.optimal_hit_rate > 0.3
