"""Embeddings are transformers' last hidden states, pooled the same way, whatever was cached and whatever ran beside them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt import Engine, FinishReason, InvalidRequest, RequestOutput
from radixrt.bench.backends import load_transformers
from radixrt.engine.embedding import POOLINGS, pool
from radixrt.errors import EngineClosed
from radixrt.model.source import resolve
from tests.engine.oracle import GREEDY
from tests.tiny import CONFIGS, VOCAB

rng = random.Random(5)
IDS = [rng.randrange(8, VOCAB) for _ in range(400)]
# one token, one inside another, a shared beginning, one twice, one alone
PROMPTS = [IDS[:1], IDS[:40], IDS[:70], [*IDS[:30], *IDS[200:230]], IDS[:40], IDS[300:390]]
WITHIN = 1e-3


def embedded(engine: Engine, prompts: Sequence[Any], pooling: str = "last") -> list[RequestOutput]:
    """The outputs of prompts that run together."""
    names = [engine.submit(engine.prepare_embed(prompt, pooling)) for prompt in prompts]
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {delta.request_id: delta.output for delta in engine.step() if delta.output is not None}
    return [outputs[name] for name in names]


def expected(model: Any, ids: Sequence[int], pooling: str) -> torch.Tensor:
    """transformers' own: its base model's last hidden state, which is the one after the last norm."""
    with torch.inference_mode():
        states = model.base_model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]
    return states[-1] if pooling == "last" else states.mean(0)


def off(output: RequestOutput, reference: torch.Tensor) -> float:
    """The largest difference of two vectors of length 1."""
    assert output.embedding is not None, output.error
    found = torch.tensor(output.embedding)
    assert found.shape == reference.shape
    return float((found / found.norm() - reference / reference.norm()).abs().max())


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_family_is_as_transformers_has_it(
    name: str, kernels: str, pooling: str, make_engine: Any, tiny: Any
) -> None:
    engine, model = make_engine(name, kernels=kernels, chunked_prefill_size=32), tiny(name)[1]
    references = [expected(model, ids, pooling) for ids in PROMPTS]
    for _ in range(2):  # computed, then found whole in the cache
        outputs = embedded(engine, PROMPTS, pooling)
        assert max(map(off, outputs, references)) < WITHIN
    assert sum(output.computed_tokens for output in outputs) == 0
    raw = max(float((torch.tensor(o.embedding) - r).abs().max()) for o, r in zip(outputs, references))
    assert raw < 10 * WITHIN  # also before it is normalized


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_default_model_is_as_transformers_has_it(pooling: str) -> None:
    model = load_transformers(resolve(None), torch.float32)
    texts = [
        "A radix tree shares prefixes.",
        "A radix tree shares the prefixes of many prompts.",
        "Bread is baked. " * 20,
    ]
    with Engine(kernels="torch", max_total_tokens=2048, dtype="float32", kv_dtype="float32") as engine:
        prompts = [engine.tokenizer.encode(text) for text in texts]
        references = [expected(model, ids, pooling) for ids in prompts]
        assert max(map(off, embedded(engine, texts, pooling), references)) < WITHIN


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_what_is_cached_or_runs_beside_changes_nothing(data: Any, shared_engine: tuple[Engine, Any]) -> None:
    engine, model = shared_engine
    engine.flush_cache()
    pooling = data.draw(st.sampled_from(POOLINGS))
    prompts = data.draw(
        st.lists(
            st.builds(lambda a, b, c: [*IDS[:a], *IDS[b : b + c]], *(st.integers(0, 60), st.integers(0, 300), st.integers(1, 40))),
            min_size=1,
            max_size=6,
        )
    )  # fmt: skip
    for _ in range(data.draw(st.integers(0, 2))):  # something of it is cached already
        engine.generate([data.draw(st.sampled_from(prompts))], GREEDY)
    together = embedded(engine, prompts, pooling)
    again = [embedded(engine, [ids], pooling)[0] for ids in prompts]
    for ids, one, alone in zip(prompts, together, again):
        assert alone.computed_tokens == 0 and alone.cached_tokens == len(ids) == one.prompt_tokens
        engine.flush_cache()
        fresh = embedded(engine, [ids], pooling)[0]
        assert fresh.computed_tokens == len(ids)
        reference = expected(model, ids, pooling)
        for output in (one, alone, fresh):
            assert off(output, reference) < WITHIN
            assert (
                max(abs(a - b) for a, b in zip(output.embedding or (), fresh.embedding or (), strict=True))
                < WITHIN / 10
            )


@pytest.fixture(scope="module")
def shared_engine(tiny: Any) -> Any:
    directory, model = tiny("llama")
    with Engine(
        str(directory),
        kernels="torch",
        kv_dtype="float32",
        check_integrity=True,
        max_total_tokens=1024,
        chunked_prefill_size=24,
    ) as engine:
        yield engine, model
        engine.check_integrity()


def test_native_rows_are_the_same_bits_however_they_are_computed(make_engine: Any) -> None:
    engine = make_engine(chunked_prefill_size=16)
    if not engine.model_info.kernels.startswith("native"):
        pytest.skip("no native kernels here")
    together = [output.embedding for output in embedded(engine, PROMPTS, "mean")]
    for ids, vector in zip(PROMPTS, together):
        engine.flush_cache()
        assert embedded(engine, [ids], "mean")[0].embedding == vector


def test_long_prompts_are_pooled_in_parts() -> None:
    hidden = torch.randn(5000, 8, generator=torch.Generator().manual_seed(1))
    slots = torch.randperm(5000, generator=torch.Generator().manual_seed(2))[:3001].to(torch.int32)
    reference = hidden[slots.long()]
    assert torch.allclose(torch.tensor(pool(hidden, slots.numpy(), "mean")), reference.mean(0), atol=1e-6)
    assert pool(hidden, slots.numpy(), "last") == tuple(reference[-1].tolist())
    hidden[int(slots[1500])] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        pool(hidden, slots.numpy(), "mean")


def test_nothing_is_generated_and_what_was_computed_is_kept(make_engine: Any) -> None:
    engine = make_engine()
    output = embedded(engine, [IDS[:40]])[0]
    assert output.completion_tokens == 0 and output.text == "" and output.finish_reason is FinishReason.LENGTH
    assert output.prompt_token_ids == tuple(IDS[:40]) and output.scores is None
    after = engine.generate([IDS[:40] + IDS[90:92]], GREEDY)[0]
    assert after.cached_tokens == 40 and after.embedding is None
    other = engine.submit(engine.prepare_embed(IDS[:40]), cache_salt="other")
    deltas = [delta for _ in range(3) for delta in engine.step() if delta.request_id == other]
    assert deltas[-1].output is not None and deltas[-1].output.cached_tokens == 0
    assert engine.stats().generated_tokens == len(after.token_ids)


def test_under_pressure_vectors_stay_right(make_engine: Any, tiny: Any) -> None:
    engine, model = make_engine(max_total_tokens=256, max_model_len=128, chunked_prefill_size=16, kernels="torch"), tiny("llama")[1]  # fmt: skip
    prompts = [IDS[at : at + 100] for at in range(0, 300, 20)]
    outputs = embedded(engine, prompts, "mean")
    assert engine.stats().evicted_tokens > 0
    assert max(off(o, expected(model, ids, "mean")) for o, ids in zip(outputs, prompts)) < WITHIN


def test_states_that_are_not_finite_are_an_error_of_their_own_request(make_engine: Any, monkeypatch: Any) -> None:
    engine = make_engine(kernels="torch")
    good = embedded(engine, [IDS[:40]])[0].embedding
    assert engine._tree is not None
    slots = embedded(engine, [IDS[50:60]])[0] and engine._tree.match(
        torch.tensor(IDS[50:60], dtype=torch.int32).numpy()
    )
    engine._tree.unlock(slots.node)
    engine._runner.store.hidden[torch.from_numpy(slots.slots).long()] = torch.inf
    bad, fine = embedded(engine, [IDS[50:60], IDS[:40]])
    assert bad.embedding is None and "not finite" in (bad.error or "") and bad.finish_reason is FinishReason.ERROR
    assert fine.embedding == good and fine.error is None


def test_an_aborted_one_has_no_vector(make_engine: Any) -> None:
    engine = make_engine(chunked_prefill_size=16)
    name = engine.submit(engine.prepare_embed(IDS[:100]))
    engine.step()
    assert engine.abort(name)
    (last,) = engine.step()
    assert last.output is not None and last.output.embedding is None
    assert last.output.finish_reason is FinishReason.ABORT


def test_bad_input_names_the_field_and_starts_nothing(make_engine: Any) -> None:
    engine = make_engine(max_model_len=64)
    for prompt, pooling, message in [
        ([], "last", "prompt: is empty"),
        ("", "last", "prompt: is empty"),
        ([9, -1], "last", "prompt[1]=-1"),
        ([VOCAB], "last", f"prompt[0]={VOCAB}"),
        ([9] * 65, "mean", "prompt: has 65 tokens"),
        ("a" * 65, "mean", "prompt: has 65 tokens"),
        ([9], "max", "pooling='max': must be one of last, mean"),
        ([9], None, "pooling=None"),
        ([9], ["last"], "pooling=['last']"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            engine.prepare_embed(prompt, pooling)
        assert str(caught.value).startswith(message)
    assert not engine.has_work
    assert embedded(engine, [[9] * 64])[0].embedding is not None  # the whole context: there is nothing to follow
    ready = engine.prepare_embed([9])
    engine.close()
    with pytest.raises(EngineClosed):
        engine.submit(ready)
    with pytest.raises(EngineClosed):
        engine.prepare_embed([9])
