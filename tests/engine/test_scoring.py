"""Choices are scored exactly, and what they share is computed once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt import Engine, FinishReason, InvalidRequest, RequestOutput, SamplingParams
from radixrt.bench.backends import load_transformers
from radixrt.engine import scoring
from radixrt.errors import EngineClosed
from radixrt.model.source import resolve
from tests.engine.oracle import GREEDY, reference_logits
from tests.tiny import VOCAB

rng = random.Random(3)
IDS = [rng.randrange(8, VOCAB) for _ in range(200)]
PREFIX = IDS[:40]
# one inside another, an empty one, one twice, a shared beginning, one alone
CHOICES = [IDS[50:53], IDS[50:55], [], IDS[60:61], IDS[50:53], [*IDS[50:52], *IDS[70:74]], IDS[80:90]]

Prompts = Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]


def scored(engine: Engine, prompts: Prompts) -> list[RequestOutput]:
    """The outputs of scoring requests that run together."""
    names = [engine.submit(engine.prepare_score(prefix, choices)) for prefix, choices in prompts]
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {delta.request_id: delta.output for delta in engine.step() if delta.output is not None}
    return [outputs[name] for name in names]


def reference_scores(model: Any, prefix: Sequence[int], choices: Sequence[Sequence[int]]) -> list[list[float]]:
    found = []
    for choice in choices:
        ids = [*prefix, *choice]
        logprobs = reference_logits(model, ids).log_softmax(-1)
        found.append([float(logprobs[at - 1, ids[at]]) for at in range(len(prefix), len(ids))])
    return found


def edges(prefix: Sequence[int], choices: Sequence[Sequence[int]]) -> int:
    """Tokens of the trie of all prompts."""
    whole = [(*prefix, *choice) for choice in choices]
    return len({ids[:end] for ids in whole for end in range(1, len(ids) + 1)})


def close(scores: Any, expected: Sequence[Sequence[float]], within: float = 1e-3) -> bool:
    return [len(one) for one in scores] == [len(one) for one in expected] and all(
        abs(a - b) < within
        for one, other in zip(scores, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    )


# ---- the oracle


def test_hundred_random_prompts_score_like_transformers(default_engine: Engine) -> None:
    words = (
        "Paris,London,the sea,the seal,a,an,ant,東京,東,naïve,naïveté,🙂,🙂🙃, ,\n,3,3.14,yes,yes!,no,maybe not".split(
            ","
        )
    )
    starts = "The capital is,My answer:,Once,日本の首都は,Emoji:,I,Ça va bien,0 1 2,def f(x),Who? She".split(",")
    draw = random.Random(4)
    encode = default_engine.tokenizer.encode
    prompts = []
    for at in range(100):
        start = " ".join(draw.sample(starts, 1 + at % 2))
        picked = draw.sample(words, 1 + at % 8)
        prompts.append((encode(start), [encode(draw.choice(("", " ")) + word) for word in picked]))
    outputs = scored(default_engine, prompts)
    sequences = [[*prefix, *choice] for prefix, choices in prompts for choice in choices]
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    model = load_transformers(resolve(None), torch.float32)
    logprobs: dict[int, torch.Tensor] = {}
    with torch.inference_mode():
        for at in range(0, len(order), 16):  # padded on the right, where nothing looks
            some = order[at : at + 16]
            width = max(len(sequences[i]) for i in some)
            ids = torch.tensor([sequences[i] + [0] * (width - len(sequences[i])) for i in some])
            mask = torch.tensor([[1] * len(sequences[i]) + [0] * (width - len(sequences[i])) for i in some])
            logits = model(ids, attention_mask=mask, use_cache=False).logits
            own = logits[:, :-1].gather(2, ids[:, 1:, None])[..., 0] - logits[:, :-1].logsumexp(-1)
            logprobs |= dict(zip(some, own, strict=True))
    at = 0
    for (prefix, choices), output in zip(prompts, outputs, strict=True):
        expected = [
            logprobs[at + i][len(prefix) - 1 : len(prefix) + len(choice) - 1].tolist()
            for i, choice in enumerate(choices)
        ]
        at += len(choices)
        assert output.error is None and close(output.scores, expected)


@given(data=st.data())
@settings(max_examples=25)
def test_any_trie_of_choices(data: Any, tiny_engine: tuple[Engine, Any]) -> None:
    engine, model = tiny_engine
    token = st.integers(8, 12)
    prefix = data.draw(st.lists(token, min_size=1, max_size=12))
    choices = data.draw(st.lists(st.lists(token, max_size=4), min_size=1, max_size=8))
    engine.flush_cache()
    output = scored(engine, [(prefix, choices)])[0]
    assert close(output.scores, reference_scores(model, prefix, choices))
    assert output.computed_tokens == edges(prefix, choices)


@pytest.fixture(scope="module")
def tiny_engine(tiny: Any) -> Any:
    directory, model = tiny("llama")
    with Engine(
        str(directory), max_total_tokens=512, chunked_prefill_size=11, kv_dtype="float32", check_integrity=True
    ) as engine:
        yield engine, model


# ---- what is computed


def test_the_prefix_and_each_edge_are_computed_once(make_engine: Any) -> None:
    engine = make_engine()
    output = scored(engine, [(PREFIX, CHOICES)])[0]
    total = sum(len(PREFIX) + len(choice) for choice in CHOICES)
    assert output.computed_tokens == edges(PREFIX, CHOICES)
    assert output.cached_tokens == total - output.computed_tokens
    assert output.prompt_token_ids == tuple(PREFIX) and output.completion_tokens == 0 and output.text == ""
    assert len(output.samples) == len(CHOICES) and output.finish_reason is FinishReason.LENGTH
    stats = engine.stats()
    assert (stats.requests, stats.prompt_tokens, stats.generated_tokens) == (1, total, 0)
    assert stats.computed_tokens == stats.unique_tokens == stats.forward_tokens == output.computed_tokens
    assert stats.hit_rate == stats.optimal_hit_rate
    again = scored(engine, [(PREFIX, CHOICES)])[0]
    assert (again.computed_tokens, again.cached_tokens) == (0, total) and close(again.scores, output.scores, 1e-6)
    engine.generate([[*PREFIX, *CHOICES[1]]], GREEDY)
    assert engine.stats().computed_tokens == output.computed_tokens  # what was chosen goes on from its KV


def test_requests_side_by_side_share_too(make_engine: Any, tiny: Any) -> None:
    engine, model = make_engine(), tiny("llama")[1]
    prompts = [(PREFIX[:30], CHOICES), (PREFIX, CHOICES[:2]), (PREFIX, [[5]])]
    expected = engine.generate([PREFIX], GREEDY)[0].token_ids
    engine.flush_cache()
    engine.reset_stats()
    beside = engine.add(PREFIX, GREEDY)
    names = [engine.submit(engine.prepare_score(*prompt)) for prompt in prompts]
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.request_id == beside or delta.output is not None  # one delta ends it: no news of each choice
            outputs |= {delta.request_id: delta.output} if delta.output is not None else {}
    assert outputs[beside].token_ids == expected
    for name, prompt in zip(names, prompts, strict=True):
        assert close(outputs[name].scores, reference_scores(model, *prompt))
    assert engine.stats().hit_rate == engine.stats().optimal_hit_rate


def test_the_head_runs_once_for_each_position_a_few_rows_at_a_time(make_engine: Any, monkeypatch: Any) -> None:
    engine = make_engine()
    plain = scored(engine, [(PREFIX, CHOICES)])[0].scores
    rows: list[int] = []
    logits = engine._runner.logits

    def counting(slots: Any) -> torch.Tensor:
        rows.append(len(slots))
        return logits(slots)

    monkeypatch.setattr(engine._runner, "logits", counting)
    monkeypatch.setattr(scoring, "_ROWS", 4)
    assert close(scored(engine, [(PREFIX, CHOICES)])[0].scores, plain, 1e-5)
    inner = {tuple(choice[:end]) for choice in CHOICES for end in range(len(choice))}  # positions a token follows
    assert sum(rows) == len(inner) and max(rows) == 4


@pytest.mark.parametrize(
    "config",
    [
        {"disable_radix_cache": True},
        {"page_size": 4},
        {"chunked_prefill_size": 7},
        {"max_running_requests": 2},
        {"max_total_tokens": 64, "max_model_len": 64},
        {"max_total_tokens": 64, "max_model_len": 64, "disable_radix_cache": True, "chunked_prefill_size": 9},
        {"schedule_policy": "fcfs"},
        {"schedule_policy": "dfs-weight"},
        {"schedule_policy": "priority"},
    ],
    ids=str,
)
def test_scores_are_the_same_however_they_are_computed(config: dict[str, Any], make_engine: Any, tiny: Any) -> None:
    engine, model = make_engine(**config), tiny("llama")[1]
    for at in range(3):  # they fight for room with it
        engine.add(IDS[100 + at : 110 + at], SamplingParams(max_tokens=40, ignore_eos=True, temperature=0))
    outputs = scored(engine, [(PREFIX, CHOICES), (IDS[5:25], CHOICES[3:])])
    assert close(outputs[0].scores, reference_scores(model, PREFIX, CHOICES))
    assert close(outputs[1].scores, reference_scores(model, IDS[5:25], CHOICES[3:]))
    if config.get("max_total_tokens") and not config.get("disable_radix_cache"):
        assert engine.stats().preemptions + engine.stats().evicted_tokens > 0
    if config.get("disable_radix_cache"):
        assert outputs[0].computed_tokens == sum(len(PREFIX) + len(choice) for choice in CHOICES)


def test_the_salt_separates(make_engine: Any) -> None:
    engine = make_engine()
    computed = []
    for salt in ("", "a", "a", ""):
        engine.submit(engine.prepare_score(PREFIX, CHOICES[:1]), cache_salt=salt)
        while engine.has_work:
            computed += [delta.output.computed_tokens for delta in engine.step() if delta.output]
    assert computed == [43, 43, 0, 0]


# ---- endings


def test_an_abort_gives_no_scores_and_frees_everything(make_engine: Any) -> None:
    for steps in range(4):
        engine = make_engine(chunked_prefill_size=15)
        name = engine.submit(engine.prepare_score(PREFIX, CHOICES))
        for _ in range(steps):
            engine.step()
        assert engine.abort(name)
        (delta,) = [delta for delta in engine.step() if delta.request_id == name]
        assert delta.output is not None and delta.output.scores is None
        assert FinishReason.ABORT in {sample.finish_reason for sample in delta.output.samples}
        assert not engine.has_work and engine._tree.total_locks == 0
        assert close(
            scored(engine, [(PREFIX, CHOICES)])[0].scores, scored(make_engine(), [(PREFIX, CHOICES)])[0].scores
        )


def test_one_choice_that_fails_ends_its_request_and_no_other(make_engine: Any, monkeypatch: Any, tiny: Any) -> None:
    engine, model = make_engine(), tiny("llama")[1]
    forward, poison = engine._runner.forward, 7

    def failing(token_ids: Any, *args: Any) -> None:
        if poison in token_ids.tolist():
            raise RuntimeError("no memory for this one")
        forward(token_ids, *args)

    monkeypatch.setattr(engine._runner, "forward", failing)
    bad, good = scored(engine, [(PREFIX, [[poison], *CHOICES]), (PREFIX, CHOICES)])
    assert bad.scores is None and "no memory for this one" in (bad.error or "")
    assert {sample.finish_reason for sample in bad.samples} == {FinishReason.ERROR}  # nothing more was done for it
    assert close(good.scores, reference_scores(model, PREFIX, CHOICES))


def test_a_step_that_fails_once_costs_nothing_but_time(make_engine: Any, monkeypatch: Any, tiny: Any) -> None:
    engine, model = make_engine(chunked_prefill_size=20), tiny("llama")[1]
    expected = reference_scores(model, PREFIX, CHOICES)
    for part in ("forward", "logits"):
        for when in range(4):
            engine.flush_cache()
            calls = 0

            def failing(*args: Any, part: str = part, when: int = when) -> Any:
                nonlocal calls
                calls += 1
                if calls == when + 1:
                    raise RuntimeError("once")
                return getattr(type(engine._runner), part)(engine._runner, *args)

            with monkeypatch.context() as patch:
                patch.setattr(engine._runner, part, failing)
                output = scored(engine, [(PREFIX, CHOICES)])[0]
            # where a sequence ran alone it was to blame
            assert output.error == "RuntimeError: once" if output.scores is None else close(output.scores, expected)


def test_logits_that_are_not_finite_are_an_error(make_engine: Any, monkeypatch: Any) -> None:
    engine = make_engine()
    logits = engine._runner.logits
    monkeypatch.setattr(engine._runner, "logits", lambda slots: logits(slots) * torch.nan)
    output = scored(engine, [(PREFIX, CHOICES)])[0]
    assert output.scores is None and "not finite" in (output.error or "")
    assert scored(engine, [(PREFIX, [[]])])[0].scores == ((),)  # nothing to be known


def test_bad_input_names_the_field_and_starts_nothing(make_engine: Any) -> None:
    engine = make_engine(max_model_len=64, max_choices=4, max_waiting_requests=3)
    for prefix, choices, message in [
        ([], [[9]], "prefix: is empty"),
        ("text", [[9]], "prefix: must be a list of token ids, not str"),
        ([9, -1], [[9]], "prefix[1]=-1"),
        ([9, True], [[9]], "prefix[1]=True"),
        ([9, 2**40], [[9]], "prefix[1]="),
        ([VOCAB], [[9]], f"prefix[0]={VOCAB}"),
        ([9] * 65, [[9]], "prefix: has 65 tokens"),
        ([9], [], "choices: is empty"),
        ([9], "ab", "choices: must be a list of lists of token ids, not str"),
        ([9], [9], "choices[0]: must be a list of token ids, not int"),
        ([9], [[9], [VOCAB]], f"choices[1][0]={VOCAB}"),
        ([9], [[9], [1.5]], "choices[1][0]=1.5"),
        ([9] * 60, [[9] * 4, [9] * 5], "choices[1] has 5 tokens"),
        ([9], [[9]] * 5, "choices has 5: at most 4"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            engine.prepare_score(prefix, choices)
        assert str(caught.value).startswith(message)
    with pytest.raises(InvalidRequest, match="the queue is full"):
        engine.submit(engine.prepare_score([9], [[9]] * 4))
    assert not engine.has_work
    ready = engine.prepare_score([9], [[9]])
    engine.close()
    with pytest.raises(EngineClosed):
        engine.submit(ready)
    with pytest.raises(EngineClosed):
        engine.prepare_score([9], [[9]])
