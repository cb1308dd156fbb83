"""Speculation changes how many steps an answer takes, and nothing else of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt import Constraint, Engine, FinishReason, RequestOutput, SamplingParams
from radixrt.engine.live import LiveSample
from radixrt.scheduler.drafts import Drafter
from tests.engine.oracle import reference_greedy
from tests.tiny import VOCAB

rng = random.Random(3)
IDS = [rng.randrange(8, VOCAB) for _ in range(300)]
LOOP = [20, 30, 40, 50, 60, 70] * 6
PROMPTS = [IDS[:40], LOOP, [*IDS[:40], 9], IDS[10:14], [7], LOOP[:20], [*LOOP, *IDS[:9]], "abcabcabcabcab"]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True, **values})


def check_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Everything of the answers but their times and what they cost; log-probabilities as far as rounding leaves them alone."""
    assert len(outputs) == len(expected)
    for output, wanted in zip(outputs, expected, strict=True):
        assert [replace(s, logprobs=None) for s in output.samples] == [
            replace(s, logprobs=None) for s in wanted.samples
        ]
        for sample, other in zip(output.samples, wanted.samples, strict=True):
            if other.logprobs is not None:
                assert sample.logprobs is not None
                assert [p.chosen.token_id for p in sample.logprobs] == list(sample.token_ids)
                assert [len(p.top) for p in sample.logprobs] == [len(p.top) for p in other.logprobs]
                found = [p.chosen.logprob for p in sample.logprobs]
                assert found == pytest.approx([p.chosen.logprob for p in other.logprobs], abs=2e-3)


class Faulty(Drafter):
    """Proposes what it knows will come, with a token that is wrong at changing places."""

    def __init__(self, most: int, known: list[list[int]]) -> None:
        super().__init__(most)
        self.known = known

    def propose(self, tokens: Any, accepted: int, most: int, *_: Any) -> Any:
        size = len(tokens)
        whole = next((one for one in self.known if one[:size] == tokens.tolist()), [])
        guess = np.array(whole[size : size + max(0, min(self.most, most))], dtype=np.int32)
        wrong = size * 7 % 11
        guess[wrong : wrong + 1] = 8 + size * 5 % 200
        return guess


CASES: list[dict[str, Any]] = [
    {},
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"max_tokens": 0},
    {"ignore_eos": False},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.2, "seed": 6, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.3, "seed": 7, "n": 3},
    {"temperature": 0.0, "n": 2},
    {"repetition_penalty": 1.3},
    {"temperature": 0.2, "seed": 8, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"logit_bias": {20: 3.0, 30: 3.0}},
    {"logprobs": 3},
    {"temperature": 0.5, "seed": 9, "logprobs": 0, "prompt_logprobs": 1},
    {"stop": ["\x0c", "ab"], "include_stop": True},
    {"stop_token_ids": [20, 60], "min_tokens": 7},
    {"stop_token_ids": list(range(8, VOCAB, 3)), "min_tokens": 12, "logit_bias": {20: 2.0}},
    {"constraint": Constraint.regex(r"(ab){3,40}c"), "max_tokens": 60},
    {"constraint": Constraint.regex(r"([a-c]{2}, ){2,12}end"), "temperature": 0.5, "seed": 2},
    {"constraint": Constraint.regex(r"[a-z ]{0,30}"), "min_tokens": 9, "logprobs": 1},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ",".join(case) or "greedy")
@pytest.mark.parametrize("name", ["llama", "qwen2-window"])
def test_the_output_is_the_same(
    name: str, case: dict[str, Any], make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, drafting = make_engine(name), make_engine(name, speculation=8)
    asked = params(**case)
    answers = plain.generate(PROMPTS, asked)
    for _ in range(2):  # the second time the tree knows what followed
        check_same(drafting.generate(PROMPTS, asked), answers)
    check_same([drafting.generate(prompt, asked)[0] for prompt in PROMPTS[:3]], answers[:3])
    if case.get("max_tokens", 9) > 2 and "stop" not in case:
        assert 0 < drafting.stats().accepted_tokens <= drafting.stats().draft_tokens
    # and with guesses that are wrong here and there
    known = [[*answer.prompt_token_ids, *sample.token_ids] for answer in answers for sample in answer.samples]
    monkeypatch.setattr("radixrt.engine.live.Drafter", lambda most: Faulty(most, known))
    faulty = make_engine(name, speculation=8)
    for at in (0, 4):  # few enough at a time for drafts
        check_same(faulty.generate(PROMPTS[at : at + 4], asked), answers[at : at + 4])
    stats = faulty.stats()
    assert case.get("max_tokens", 9) < 5 or "stop" in case or 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize("temperature", [0.0, 0.4])
@pytest.mark.parametrize(
    "config",
    [
        {"max_total_tokens": 110, "max_model_len": 100},
        {"max_total_tokens": 112, "max_model_len": 100, "page_size": 4},
        {"max_total_tokens": 105, "max_model_len": 100, "disable_radix_cache": True},
        {"page_size": 4},
        {"page_size": 16, "chunked_prefill_size": 9},
        {"chunked_prefill_size": 5},
        {"disable_radix_cache": True},
        {"max_running_requests": 1},
        {"schedule_policy": "fcfs"},
    ],
    ids=str,
)
def test_the_output_is_the_same_however_it_is_scheduled(
    config: dict[str, Any], temperature: float, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [params(temperature=temperature, seed=at, max_tokens=20 + 3 * at) for at in range(len(PROMPTS))]
    answers = make_engine().generate(PROMPTS, asked)
    known = [[*answer.prompt_token_ids, *answer.token_ids] for answer in answers]
    drafting = make_engine(speculation=8, **config)
    for _ in range(2):
        check_same(drafting.generate(PROMPTS, asked), answers)
    monkeypatch.setattr("radixrt.engine.live.Drafter", lambda most: Faulty(most, known))
    faulty = make_engine(speculation=8, **config)
    for _ in range(2):
        check_same(faulty.generate(PROMPTS, asked), answers)
    stats = faulty.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert (stats.preemptions > 0) == (faulty.config.max_total_tokens in (105, 110, 112))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("most", "steps"), [(1, 31), (3, 18), (8, 11)])
def test_an_answer_known_to_the_tree_takes_few_steps(
    most: int, steps: int, page_size: int, tiny: Any, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(speculation=most, page_size=page_size)
    prompt, asked = IDS[:32], params(max_tokens=60, repetition_penalty=1.5)  # nothing repeats: only the tree knows
    engine.generate(prompt, asked)
    engine.generate([*IDS[:32], 9], asked)
    engine.reset_stats()
    first = make_engine().generate(prompt, asked)[0]
    again = engine.generate(prompt, asked)[0]
    assert again.token_ids == first.token_ids
    stats = engine.stats()
    assert stats.steps <= steps + 2 * (page_size > 1)  # a page that was not full is not in the tree
    assert stats.accepted_tokens == 60 - stats.steps
    assert stats.draft_tokens <= stats.accepted_tokens + most * (page_size > 1)
    # what was verified is cached for the next turn, and nothing else
    tree = engine._tree
    assert tree is not None
    known = np.array([*prompt, *first.token_ids], dtype=np.int32)
    assert tree.peek(known)[0] in range(91 // page_size * page_size, 93)


def test_a_tree_that_is_wrong_costs_one_proposal(make_engine: Callable[..., Engine]) -> None:
    prompt, asked = IDS[:30], params(max_tokens=40, repetition_penalty=1.5)
    expected = make_engine().generate(prompt, asked)[0].token_ids
    engine = make_engine(speculation=8)
    engine.generate([*prompt, expected[0], *IDS[100:120]], params(max_tokens=1))
    engine.reset_stats()
    assert engine.generate(prompt, asked)[0].token_ids == expected
    stats = engine.stats()
    assert (stats.draft_tokens, stats.accepted_tokens, stats.steps, stats.forward_tokens) == (2, 0, 40, 41)


def test_a_greedy_loop_takes_few_steps_and_is_transformers(tiny: Any, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(speculation=8, disable_radix_cache=True)
    output = engine.generate(LOOP, params(max_tokens=100, logit_bias={}))[0]
    assert list(output.token_ids) == reference_greedy(tiny("llama")[1], LOOP, 100)
    stats = engine.stats()
    assert stats.steps < 100 and stats.accepted_tokens == 100 - stats.steps


def test_namespaces_do_not_guess_for_each_other(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(speculation=8)
    asked = params(max_tokens=30, repetition_penalty=1.5)

    def run(salt: str) -> int:
        engine.reset_stats()
        engine.add(IDS[:30], asked, cache_salt=salt)
        while engine.has_work:
            engine.step()
        return engine.stats().accepted_tokens

    assert run("a") == run("b") == 0 < run("a")


def test_deltas_carry_what_a_step_accepted(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(speculation=8)
    asked = params(max_tokens=50, logprobs=1)
    whole = make_engine().generate(LOOP, asked)[0]
    for _ in range(2):
        deltas = list(engine.stream(LOOP, asked))
        assert tuple(t for d in deltas for t in d.token_ids) == whole.token_ids
        assert [len(d.token_ids) for d in deltas] == [len(d.logprobs) for d in deltas]
        assert "".join(d.text for d in deltas) == whole.text
    assert len(deltas) < 15 and deltas[-1].finish_reason is FinishReason.LENGTH


def test_a_failing_step_blames_no_guess(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(speculation=8)
    expected = engine.generate(LOOP, params())[0].token_ids
    forward = engine._runner.forward

    def refuse(token_ids: Any, *rest: Any) -> None:
        if len(rest[2]) == 1 and 1 < rest[2][0] <= 9:
            raise RuntimeError("no drafts today")
        forward(token_ids, *rest)

    monkeypatch.setattr(engine._runner, "forward", refuse)
    output = engine.generate(LOOP, params())[0]
    assert output.error is None and output.token_ids == expected


def test_a_limit_met_behind_a_guess_waits_for_its_turn(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = params(constraint=Constraint.regex(r"[a-c ]{20,60}"))
    answer = make_engine().generate(IDS[:9], asked)[0]
    mask = LiveSample._mask

    def limited(sample: LiveSample, matcher: Any, ahead: int, size: int) -> Any:
        if ahead == 2:
            raise RuntimeError("a limit")
        return mask(sample, matcher, ahead, size)

    monkeypatch.setattr(LiveSample, "_mask", limited)
    known = [[*answer.prompt_token_ids, *answer.token_ids]]
    monkeypatch.setattr("radixrt.engine.live.Drafter", lambda most: Faulty(most, known))
    engine = make_engine(speculation=8)
    check_same(engine.generate(IDS[:9], asked), [answer])
    assert engine.stats().accepted_tokens > 0


# ---- what is proposed


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 6), st.data())
@settings(max_examples=200, deadline=None)
def test_lookup_finds_the_latest_occurrence_of_the_longest_end(
    tokens: list[int], most: int, data: st.DataObject
) -> None:
    """Whatever was looked at before: the index is the same as one made at once."""
    drafter = Drafter(most)
    looks = sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=5)) | {len(tokens)})
    for size in looks:
        found = drafter._from_text(np.array(tokens[:size], dtype=np.int32), most)
    expected: list[int] = []
    for length in (2, 3, 4):
        ends = [at for at in range(length, len(tokens)) if tokens[at - length : at] == tokens[-length:]]
        if ends:
            expected = (tokens[ends[-1] :] * most)[:most]
    assert found.tolist() == expected


@pytest.mark.parametrize(("share", "least", "most"), [(0.3, 30, 40), (0.6, 0, 12)])
def test_what_is_half_right_goes_on_where_half_is_enough(share: float, least: int, most: int) -> None:
    tokens = np.array([1, 2, 3, 4] * 10, dtype=np.int32)
    drafter, accepted, proposals = Drafter(4), 0, 0
    for _ in range(40):
        size = len(drafter.propose(tokens, accepted, 99, share, None, None, 0))
        accepted += size // 2
        proposals += size > 0
    assert least <= proposals <= most


def test_guesses_grow_while_they_are_right_and_rest_when_they_are_wrong() -> None:
    tokens = np.array([1, 2, 3, 4] * 10, dtype=np.int32)
    drafter, accepted, sizes = Drafter(8), 0, []
    for _ in range(4):
        sizes.append(len(drafter.propose(tokens, accepted, 99, 0.4, None, None, 0)))
        accepted += sizes[-1]
    assert sizes == [2, 4, 8, 8]
    sizes = [len(drafter.propose(tokens, accepted, 99, 0.4, None, None, 0)) for _ in range(1000)]
    assert sum(sizes[:4]) < 16 and 10 < sum(sizes[4:]) < 1000 * 0.06
    for _ in range(64):
        sizes.append(len(drafter.propose(tokens, accepted, 99, 0.4, None, None, 0)))
        accepted += sizes[-1]
    assert sizes[-1] == 8, "a probe that is right brings it back"
