"""Constraints inside the engine: every output is complete and valid, whatever else a request asks for or runs beside it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import regex
import torch
from transformers import PreTrainedModel

from radixrt import AsyncEngine, Constraint, Engine, FinishReason, InvalidRequest, RequestOutput, SamplingParams
from radixrt.engine.live import LiveSample
from radixrt.grammar.compile import compile_constraint, to_grammar
from radixrt.grammar.compile_cache import CompileCache
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.matcher import AutomatonLimits, compile_grammar
from tests.engine.constraint_cases import (
    CASES,
    EXACT,
    GRAMMARS,
    PATTERNS,
    PROMPTS,
    QUESTIONS,
    answer,
    assert_valid,
    essence,
    reference_constrained,
    reference_constrained_batch,
    work,
)
from tests.engine.oracle import reference_logits

Make = Callable[..., Engine]

# ---- valid and complete


@pytest.mark.parametrize("jump_forward", [True, False])
def test_every_output_is_valid_and_complete(jump_forward: bool, make_engine: Make) -> None:
    engine = make_engine(jump_forward=jump_forward)
    items = work(engine, 20 * len(CASES), seed=int(jump_forward))
    outputs = answer(engine, items)
    assert_valid(engine, items, outputs)
    stats = engine.stats()
    assert stats.forced_tokens == sum(o.forced_tokens for o in outputs) and (stats.forced_tokens > 0) == jump_forward
    assert stats.generated_tokens == sum(o.completion_tokens for o in outputs)


@pytest.mark.parametrize("name", CASES)
def test_the_smallest_budget_is_enough_and_less_is_refused_with_the_number(name: str, make_engine: Make) -> None:
    engine = make_engine()
    constraint = CASES[name][0]
    least = engine.compile(constraint).result().min_tokens
    tight = SamplingParams(constraint=constraint, max_tokens=least, temperature=4.0, n=8)
    assert_valid(engine, [(name, "x", tight)], engine.generate("x", tight))
    with pytest.raises(InvalidRequest, match=f"max_tokens={least - 1}: .* has {least} tokens"):
        engine.generate("x", SamplingParams(constraint=constraint, max_tokens=least - 1))
    assert not engine.has_work


def test_the_context_is_a_budget_too(make_engine: Make) -> None:
    engine = make_engine()
    constraint = CASES["person"][0]
    least = engine.compile(constraint).result().min_tokens
    context = engine.model_info.context_length
    open_end = SamplingParams(constraint=constraint, max_tokens=None, temperature=4.0)
    output = engine.generate([9] * (context - least), open_end)[0]
    assert_valid(engine, [("person", "", SamplingParams(max_tokens=least))], [output])
    with pytest.raises(InvalidRequest, match=f"max_tokens={least - 1}: .* has {least} tokens"):
        engine.generate([9] * (context - least + 1), open_end)


def test_no_output_at_all_where_that_is_valid(make_engine: Make) -> None:
    engine = make_engine()
    constraint = Constraint.regex("(abc)?")
    for most in (0, 1, 2):
        output = engine.generate("x", SamplingParams(constraint=constraint, max_tokens=most))[0]
        assert (output.text, output.error) == ("", None)
    assert engine.generate("x", SamplingParams(constraint=constraint, max_tokens=3, min_tokens=1))[0].text == "abc"
    assert engine.generate("x", SamplingParams(constraint=Constraint.literal("")))[0].text == ""
    assert engine.generate("x", SamplingParams(constraint=Constraint.substring(" ", empty=True)))[0].text == ""


def test_a_complete_output_ends_with_stop(make_engine: Make) -> None:
    """Where nothing may follow no end token is needed; where something may, an end token or the budget ends it."""
    engine = make_engine()
    literal = engine.generate("x", SamplingParams(constraint=CASES["literal"][0], max_tokens=17))[0]
    text = "Exactly this, é."
    assert literal.finish_reason is FinishReason.STOP and literal.token_ids == tuple(engine.tokenizer.encode(text))
    [eos] = engine.tokenizer.eos_ids
    word = SamplingParams(constraint=Constraint.regex("[a-z]+"), max_tokens=5, logit_bias={eos: 100})
    ended = engine.generate("x", word)[0]
    assert ended.finish_reason is FinishReason.STOP and ended.token_ids[1:] == (eos,)
    word = SamplingParams(constraint=Constraint.regex("[a-z]+"), max_tokens=5, logit_bias={eos: -100})
    assert engine.generate("x", word)[0].finish_reason is FinishReason.LENGTH


def test_what_is_forced_from_the_start_needs_no_sampling(make_engine: Make) -> None:
    engine = make_engine()
    whole = SamplingParams(constraint=CASES["literal"][0], n=3)
    pieces = list(engine.stream("x", whole))
    output = pieces[-1].output
    assert output is not None and output.forced_tokens == engine.stats().forced_tokens == 3 * 17
    assert_valid(engine, [("literal", "x", whole)], [output])
    assert "".join(delta.text for delta in pieces) == 3 * "Exactly this, é."
    request = engine.add("x", SamplingParams(constraint=CASES["literal"][0], stop=["this"]))
    [last] = [delta.output for delta in engine.step() if delta.output is not None]
    assert (last.request_id, last.text, last.stop_reason) == (request, "Exactly ", "this")
    assert not engine.has_work


def test_as_a_dict_and_in_every_form(make_engine: Make) -> None:
    engine = make_engine()
    for name, (constraint, _) in CASES.items():
        values = {"constraint": json.loads(json.dumps(constraint.to_dict())), "max_tokens": 50, "seed": 5}
        params = SamplingParams.from_dict(values)
        assert params.constraint == constraint
        output = engine.generate("x", params)
        assert_valid(engine, [(name, "x", params)], output)
    with pytest.raises(InvalidRequest, match=r"constraint\.type='regexp'; did you mean 'regex'"):
        SamplingParams.from_dict({"constraint": {"type": "regexp"}})


# ---- the same whatever runs beside it


@pytest.mark.parametrize(
    "settings",
    [
        {"max_running_requests": 1},
        {"disable_radix_cache": True},
        {"chunked_prefill_size": 1},
        {"chunked_prefill_size": 5, "page_size": 4},
        {"page_size": 4, "disable_radix_cache": True},
        {"max_total_tokens": 104},
        {"max_total_tokens": 104, "page_size": 4, "disable_radix_cache": True},
    ],
    ids=str,
)
def test_seeded_outputs_depend_on_nothing_else(settings: dict[str, Any], make_engine: Make) -> None:
    plain = make_engine()
    items = work(plain, 2 * len(CASES), seed=7, n=2)
    expected = essence(answer(plain, items))
    engine = make_engine(**settings)
    for _ in range(2):  # the second time from the cache
        assert essence(answer(engine, items)) == expected
    if settings.get("max_total_tokens"):
        assert engine.stats().preemptions > 0
    few = range(0, len(items), 7)
    alone = [essence(answer(engine, [items[i]]))[0] for i in few]
    assert alone == [expected[i] for i in few]


def test_samples_of_one_prompt_differ_and_share_it(make_engine: Make) -> None:
    engine = make_engine()
    params = SamplingParams(constraint=CASES["person"][0], max_tokens=60, n=16, seed=3)
    prompt = "a prompt of some length"
    output = engine.generate(prompt, params)[0]
    assert_valid(engine, [("person", prompt, params)], [output])
    assert len({s.text for s in output.samples}) > 8
    assert output.forced_tokens == engine.stats().forced_tokens > 0
    again = engine.generate(prompt, params)[0]
    assert essence([again]) == essence([output]) and again.cached_tokens == len(prompt)
    follow = [*output.prompt_token_ids, *output.token_ids]  # what was forced is in the cache like what was sampled
    assert engine.generate(follow, SamplingParams(max_tokens=1))[0].cached_tokens >= len(follow) - 2


# ---- the reference


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_greedy_is_the_masked_reference(family: str, tiny: Callable[[str], Any], make_engine: Make) -> None:
    model = tiny(family)[1]
    cases = [(p, pattern) for pattern in PATTERNS for p in PROMPTS[:3]]
    engines = [
        make_engine(family, jump_forward=False),
        make_engine(family, jump_forward=False, disable_radix_cache=True, chunked_prefill_size=7),
        make_engine(family, jump_forward=False, max_total_tokens=100),
    ]
    expected = [
        reference_constrained(engines[0], model, engines[0].tokenizer.encode(p), pattern) for p, pattern in cases
    ]
    params = [SamplingParams(temperature=0, max_tokens=42, constraint=Constraint.regex(c)) for _, c in cases]
    for engine in engines:
        outputs = engine.generate([p for p, _ in cases], params)
        assert [list(o.token_ids) for o in outputs] == expected
        assert all(o.forced_tokens == 0 for o in outputs)
    long = engines[-1].generate([p for p, _ in cases[-3:]] * 3, params[-3:] * 3)
    assert [list(o.token_ids) for o in long] == expected[-3:] * 3
    assert sum(o.preemptions for o in long) > 0
    # byte tokens: what is forced is what would have been sampled
    jumping = make_engine(family).generate([p for p, _ in cases], params)
    assert [list(o.token_ids) for o in jumping] == expected and sum(o.forced_tokens for o in jumping) > 0


# ---- interplay


def test_log_probabilities_are_of_the_raw_distribution_and_of_every_token(
    tiny: Callable[[str], Any], make_engine: Make
) -> None:
    engine = make_engine()
    params = SamplingParams(constraint=CASES["person"][0], max_tokens=50, logprobs=3, prompt_logprobs=1, seed=1)
    output = engine.generate("hello", params)[0]
    assert_valid(engine, [("person", "hello", params)], [output])
    assert output.forced_tokens == 0 and output.logprobs is not None and output.prompt_logprobs is not None
    assert [p.chosen.token_id for p in output.logprobs] == list(output.token_ids)
    every = [*output.prompt_token_ids, *output.token_ids]
    raw = reference_logits(tiny("llama")[1], every).log_softmax(-1)[len(output.prompt_token_ids) - 1 :]
    for position, row, token in zip(output.logprobs, raw, output.token_ids):
        assert position.chosen.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert position.top[0].logprob == pytest.approx(float(row.max()), abs=1e-3)
    assert any(p.chosen.rank > 3 for p in output.logprobs)  # tokens outside of the constraint are listed
    params = SamplingParams(constraint=CASES["literal"][0], logprobs=0)
    output = engine.generate("hello", params)[0]
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids) == 17
    assert output.forced_tokens == 0


def test_penalties_and_bias_choose_within_the_constraint(make_engine: Make) -> None:
    engine = make_engine()
    letters = {c: engine.tokenizer.encode(c)[0] for c in "abcd("}
    word = Constraint.regex("[a-c]{12}")
    biased = SamplingParams(constraint=word, temperature=0, logit_bias={letters["b"]: 50, letters["d"]: 100})
    assert engine.generate("x", biased)[0].text == "b" * 12
    banned = SamplingParams(constraint=word, logit_bias={letters[c]: -100 for c in "abc"}, n=4)
    assert_all = [s.text for s in engine.generate("x", banned)[0].samples]
    assert all(regex.fullmatch("[a-c]{12}", text) for text in assert_all)
    spread = SamplingParams(
        constraint=word, temperature=0, frequency_penalty=2, presence_penalty=2, repetition_penalty=100
    )
    assert len(set(engine.generate("x", spread)[0].text)) == 3
    for seed in range(5):
        items = work(engine, len(CASES), seed, logit_bias={9: 100, 70: -100}, frequency_penalty=2, min_p=0.2)
        items = [(n, p, params) for n, p, params in items]
        assert_valid(engine, items, answer(engine, items))


def test_min_tokens_holds_the_end_back_while_the_grammar_can_go_on(make_engine: Make) -> None:
    engine = make_engine()
    [eos] = engine.tokenizer.eos_ids
    eager: dict[str, Any] = {"logit_bias": {eos: 100}, "max_tokens": 30}
    word = Constraint.regex("[a-z]{1,9}")
    for least in (0, 1, 4, 9, 20):
        output = engine.generate("x", SamplingParams(constraint=word, min_tokens=least, **eager))[0]
        assert len(output.text) == min(max(least, 1), 9) and output.finish_reason is FinishReason.STOP
    choice = Constraint.choice(["no", "nobody"])
    assert engine.generate("x", SamplingParams(constraint=choice, min_tokens=3, **eager))[0].text == "nobody"
    assert engine.generate("x", SamplingParams(constraint=choice, min_tokens=0, **eager))[0].text == "no"
    # going on must not cost the way to the end
    short = SamplingParams(constraint=choice, min_tokens=3, max_tokens=4, logit_bias={eos: 100})
    assert engine.generate("x", short)[0].text == "no"
    for seed in range(4):
        items = [
            (name, prompt, SamplingParams(constraint=p.constraint, max_tokens=p.max_tokens, min_tokens=p.max_tokens))
            for name, prompt, p in work(engine, len(CASES), seed)
            if p.max_tokens is not None
        ]
        assert_valid(engine, items, answer(engine, items))


@pytest.mark.parametrize("jump_forward", [True, False])
def test_stop_strings_inside_a_constraint(jump_forward: bool, make_engine: Make) -> None:
    engine = make_engine(jump_forward=jump_forward)
    constraint = Constraint.sequence("key: ", Constraint.regex("[a-z]{4}"), "; end of it; end")
    for stop, include, shown in (("; end", False, ""), ("; end", True, "; end"), ("f it", False, "; end o")):
        output = engine.generate("x", SamplingParams(constraint=constraint, stop=[stop], include_stop=include))[0]
        assert regex.fullmatch(f"key: [a-z]{{4}}{shown}", output.text)
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
    late = SamplingParams(constraint=constraint, stop=["; end"], min_tokens=15)
    assert regex.fullmatch("key: [a-z]{4}; end of it", engine.generate("x", late)[0].text)
    never = engine.generate("x", SamplingParams(constraint=constraint, stop=["; end."]))[0]
    assert never.text.endswith("of it; end") and never.stop_reason is None


def test_stop_ids_inside_a_constraint(make_engine: Make) -> None:
    engine = make_engine()
    [x], [b] = engine.tokenizer.encode("x"), engine.tokenizer.encode("b")
    params = SamplingParams(constraint=Constraint.regex("[a-c]{12}x?"), stop_token_ids=[b, x, 3], logit_bias={b: 100})
    output = engine.generate("x", params)[0]
    assert (output.token_ids, output.stop_reason, output.finish_reason) == ((b,), b, FinishReason.STOP)
    params = SamplingParams(
        constraint=Constraint.regex("[a-c]{12}x?"), stop_token_ids=[b, 3], logit_bias={b: 100, 3: 100}, min_tokens=5
    )
    output = engine.generate("x", params)[0]
    assert b not in output.token_ids[:5] and output.token_ids[5] == b and output.stop_reason == b
    forced = SamplingParams(constraint=Constraint.literal("aaabaa"), stop_token_ids=[b])
    output = engine.generate("x", forced)[0]
    assert output.stop_reason == b and len(output.token_ids) == 4 and output.text == "aaa"


def test_ignoring_the_end_token_does_not_break_a_constraint(make_engine: Make) -> None:
    engine = make_engine()
    items = work(engine, 2 * len(CASES), 5, ignore_eos=True)
    assert_valid(engine, items, answer(engine, items))


def test_pieces_are_the_whole_and_others_go_on(make_engine: Make) -> None:
    engine = make_engine()
    items = work(engine, 2 * len(CASES), 11)
    expected = essence(answer(engine, items))
    names = {engine.add(prompt, params): i for i, (_, prompt, params) in enumerate(items)}
    text = [""] * len(items)
    tokens: list[tuple[int, ...]] = [()] * len(items)
    found: dict[int, RequestOutput] = {}
    while engine.has_work:
        for delta in engine.step():
            i = names[delta.request_id]
            text[i] += delta.text
            tokens[i] += delta.token_ids
            if delta.output is not None:
                found[i] = delta.output
                assert (text[i], tokens[i]) == (delta.output.text, delta.output.token_ids)
    assert essence([found[i] for i in range(len(items))]) == expected


def test_abort_in_the_middle(make_engine: Make) -> None:
    engine = make_engine()
    items = work(engine, len(CASES), 13)
    expected = essence(answer(engine, items))
    for after in (1, 2, 5):
        params = SamplingParams(constraint=CASES["person"][0], max_tokens=60, n=3)
        doomed = engine.add("hello", params)
        names = {engine.add(prompt, p): i for i, (_, prompt, p) in enumerate(items)}
        found: dict[str, RequestOutput] = {}
        steps = 0
        while engine.has_work:
            steps += 1
            if steps == after:
                assert engine.abort(doomed)
            found |= {d.request_id: d.output for d in engine.step() if d.output is not None}
        assert {s.finish_reason for s in found[doomed].samples} == {FinishReason.ABORT}
        assert essence([found[name] for name in names]) == expected


# ---- bad constraints

BAD: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "syntax": ({"type": "regex", "pattern": "(a"}, InvalidRequest),
    "back-reference": ({"type": "regex", "pattern": r"(a|b)\1"}, UnsupportedConstraint),
    "nothing": ({"type": "json_schema", "schema": {"enum": []}}, InvalidRequest),
    "contradiction": (
        {"type": "json_schema", "schema": {"type": "integer", "minimum": 3, "maximum": 2}},
        InvalidRequest,
    ),
    "remote": ({"type": "json_schema", "schema": {"$ref": "https://example.com/x"}}, InvalidRequest),
    "endless": ({"type": "grammar", "text": 'start: "a" start'}, InvalidRequest),
    "unknown rule": ({"type": "grammar", "text": 'start: "a" nowhere'}, InvalidRequest),
    "deep": ({"type": "regex", "pattern": "(" * 40_000 + "a" + ")" * 40_000}, InvalidRequest),
    "exponential": (
        {
            "type": "grammar",
            "text": "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(60)) + 'a60: "x"',
        },
        InvalidRequest,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_constraint_is_refused_before_anything_starts(name: str, make_engine: Make) -> None:
    engine = make_engine()
    values, kind = BAD[name]
    params = SamplingParams(constraint=Constraint.from_dict(values))
    with pytest.raises(kind):
        engine.generate("x", params)
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]"):
        engine.generate(["x", "y"], [SamplingParams(), params])
    assert not engine.has_work


def test_a_grammar_that_goes_wrong_while_it_runs_fails_alone(make_engine: Make, caplog: Any) -> None:
    engine = make_engine()
    engine._compiler = CompileCache(
        compile=lambda c, tokenizer: compile_grammar(to_grammar(c), tokenizer, limits=AutomatonLimits(max_depth=20))
    )
    [deeper] = engine.tokenizer.encode("(")
    deep = SamplingParams(constraint=CASES["nested"][0], max_tokens=100, logit_bias={deeper: 100})
    items = [item for item in work(engine, len(CASES), 17) if item[0] != "nested"]
    for _ in range(2):
        outputs = engine.generate(["x", *(p for _, p, _ in items)], [deep, *(p for _, _, p in items)])
        assert outputs[0].finish_reason is FinishReason.ERROR and "nested more than 20" in (outputs[0].error or "")
        assert_valid(engine, items, outputs[1:])


# ---- AsyncEngine


def serve(engine: Engine, body: Callable[[AsyncEngine], Any]) -> Any:
    async def main() -> Any:
        async with AsyncEngine(engine=engine) as front:
            return await asyncio.wait_for(body(front), timeout=60)

    return asyncio.run(main())


def test_eight_good_requests_beside_bad_ones(make_engine: Make) -> None:
    engine = make_engine()
    good = work(engine, 8, 19)
    expected = essence(answer(engine, good))
    bad = [SamplingParams(constraint=Constraint.from_dict(values)) for values, _ in BAD.values()]

    async def body(front: AsyncEngine) -> list[Any]:
        tasks = [front.generate(prompt, params) for _, prompt, params in good] + [front.generate("x", p) for p in bad]
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = serve(engine, body)
    assert essence([r[0] for r in results[:8]]) == expected
    assert [type(r) for r in results[8:]].count(list) == 0 and all(isinstance(r, InvalidRequest) for r in results[8:])


def test_compiling_does_not_hold_up_the_steps(make_engine: Make) -> None:
    """A constraint whose compilation waits until eight others have been answered; and one that never ends."""
    engine = make_engine()
    good = work(engine, 8, 23)
    expected = essence(answer(engine, good))
    answered, never = threading.Event(), threading.Event()
    slow, stuck = Constraint.regex("slow|low"), Constraint.regex("stuck")

    def compile(constraint: Constraint, tokenizer: Any) -> Any:
        if constraint == slow:
            assert answered.wait(30)
        if constraint == stuck:
            never.wait(30)
        return compile_constraint(constraint, tokenizer)

    engine._compiler = CompileCache(compile=compile, workers=3, time_limit_s=20)

    async def body(front: AsyncEngine) -> Any:
        waiting = asyncio.ensure_future(front.generate("x", SamplingParams(constraint=slow)))
        first = await front.generate([p for _, p, _ in good], [p for _, _, p in good])
        assert not waiting.done()
        answered.set()
        assert (await waiting)[0].text in ("slow", "low")
        engine._compiler._time_limit_s = 0.05
        late = asyncio.ensure_future(front.generate("x", SamplingParams(constraint=stuck)))
        second = await front.generate([p for _, p, _ in good], [p for _, _, p in good])
        with pytest.raises(InvalidRequest, match="takes longer than"):
            await late
        never.set()
        return essence(first), essence(second)

    assert serve(engine, body) == (expected, expected)


def test_streams_of_constraints_in_an_event_loop(make_engine: Make) -> None:
    engine = make_engine()
    items = work(engine, 2 * len(CASES), 29)
    expected = essence(answer(engine, items))

    async def body(front: AsyncEngine) -> list[RequestOutput]:
        async def one(prompt: str, params: SamplingParams) -> RequestOutput:
            deltas = [delta async for delta in front.stream(prompt, params)]
            whole = deltas[-1].output
            assert whole is not None and "".join(d.text for d in deltas) == whole.text
            return whole

        return await asyncio.gather(*(one(prompt, params) for _, prompt, params in items))

    assert essence(serve(engine, body)) == expected


# ---- the embedded model


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    from radixrt.bench.backends import load_transformers
    from radixrt.model.source import resolve

    return load_transformers(resolve(None), torch.float32)


def test_greedy_of_the_embedded_model_is_the_masked_reference(
    reference: PreTrainedModel, default_engine: Engine
) -> None:
    """A hundred prompts: cached or not, in a batch or alone, preempted or not."""
    names = [list(EXACT)[i % len(EXACT)] for i in range(len(QUESTIONS))]
    prompts = [default_engine.tokenizer.encode(question) for question in QUESTIONS]
    expected = reference_constrained_batch(
        default_engine.tokenizer, reference, list(zip(prompts, [EXACT[name][1] for name in names]))
    )
    assert len(expected) == 100 and len(set(map(tuple, expected))) > 50
    # what is forced need not be what would have been sampled, and is off where log-probabilities are asked for
    params = [SamplingParams(temperature=0, max_tokens=48, constraint=EXACT[name][0], logprobs=0) for name in names]
    outputs = default_engine.generate(QUESTIONS, params)
    assert [list(o.token_ids) for o in outputs] == expected
    assert all(o.finish_reason is FinishReason.STOP for o in outputs)
    assert all(regex.fullmatch(EXACT[name][1], o.text) for name, o in zip(names, outputs))
    some = list(range(0, len(QUESTIONS), 11))
    alone = [default_engine.generate(QUESTIONS[i], params[i])[0] for i in some]  # the prompt is cached by now
    assert [list(o.token_ids) for o in alone] == [expected[i] for i in some]
    assert all(o.cached_tokens >= len(prompts[i]) - 1 for i, o in zip(some, alone))
    some = sorted(range(len(QUESTIONS)), key=lambda i: len(expected[i]))[-10:]
    with Engine(max_total_tokens=64, disable_radix_cache=True, check_integrity=True, kernels="torch") as small:
        cold = small.generate(
            [QUESTIONS[i] for i in some], [replace(params[i], max_tokens=len(expected[i]) + 8) for i in some]
        )
        assert [list(o.token_ids) for o in cold] == [expected[i] for i in some]
        assert sum(o.preemptions for o in cold) > 0 == sum(o.cached_tokens for o in cold)


@pytest.mark.parametrize("name", GRAMMARS)
def test_outputs_of_grammars_are_read_by_their_own_parser(name: str, default_engine: Engine) -> None:
    constraint, parse = GRAMMARS[name]
    least = default_engine.compile(constraint).result().min_tokens
    budgets = [least, least + 25]
    params = [SamplingParams(max_tokens=n, temperature=1, seed=n, constraint=constraint) for n in budgets]
    for output in default_engine.generate([f"Here is {name}:\n"] * 2, params):
        assert output.error is None
        parse(output.text)


def spans(engine: Engine, tokens: list[int]) -> list[tuple[int, int]]:
    """Where in the text each token lies, in bytes."""
    found, at = [], 0
    for token in tokens:
        found.append((at, at := at + len(engine.tokenizer.token_bytes(token))))
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_are_the_tokenizers_own(
    temperature: float, default_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every forced token lies where the tokenizer itself, given the whole output, would put one; and the output is valid."""
    forced: dict[LiveSample, set[int]] = {}
    plain = LiveSample.forced

    def spy(self: LiveSample) -> list[int]:
        tokens = plain(self)
        start = self.sequence.size - self.sequence.prompt_len
        forced.setdefault(self, set()).update(range(start, start + len(tokens)))
        return tokens

    monkeypatch.setattr(LiveSample, "forced", spy)
    names = ["person", "tree", "literal", "sequence", "tags", "prices", "date"]
    items = [
        (name, q, SamplingParams(constraint=CASES[name][0], max_tokens=60, temperature=temperature, seed=i))
        for i, q in enumerate(QUESTIONS[:3])
        for name in names
    ]
    outputs = answer(default_engine, items)
    assert_valid(default_engine, items, outputs)
    assert sum(o.forced_tokens for o in outputs) > sum(o.completion_tokens for o in outputs) / 10
    counted = 0
    for live, places in forced.items():
        ids = live.sequence.tokens[live.sequence.prompt_len : live.sequence.size].tolist()
        text = b"".join(
            map(default_engine.tokenizer.token_bytes, (t for t in ids if t not in default_engine.tokenizer.eos_ids))
        ).decode()
        own = set(spans(default_engine, default_engine.tokenizer.encode(text, add_special=False)))
        found = spans(default_engine, ids)
        for place in places & set(range(len(ids))):
            assert found[place] in own, (text, place)
            counted += 1
    assert counted == sum(o.forced_tokens for o in outputs)


def test_forcing_leaves_room_to_the_end(default_engine: Engine) -> None:
    """The tokenizer's own tokens of this text are more than the fewest that spell it: within the fewest it still fits."""
    text = "Knowntunis reformertossing chensmosaic unsafedefec toddtect"
    constraint = Constraint.literal(text)
    least = default_engine.compile(constraint).result().min_tokens
    own = default_engine.tokenizer.encode(text, add_special=False)
    assert least < len(own)
    for most in range(least, len(own) + 2):
        output = default_engine.generate("x", SamplingParams(constraint=constraint, max_tokens=most))[0]
        assert (output.text, output.error) == (text, None) and len(output.token_ids) <= most


def test_embedded_model_outputs_are_valid(default_engine: Engine) -> None:
    items = work(default_engine, 2 * len(CASES), 31)
    assert_valid(default_engine, items, answer(default_engine, items))
