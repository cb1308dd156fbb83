"""What a caller sees: outputs, streams, samples, log-probabilities, stops, aborts, figures."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixrt import FinishReason, InvalidRequest, SamplingParams
from radixrt.errors import EngineClosed
from tests.engine.oracle import GREEDY, reference_greedy, reference_logits
from tests.tiny import VOCAB

rng = random.Random(1)
IDS = [rng.randrange(8, VOCAB) for _ in range(200)]


def greedy(count: int, **kwargs) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True, **kwargs})


# ---- prompts and outputs


def test_text_ids_and_messages(make_engine) -> None:
    engine = make_engine()
    text = engine.generate("hello", greedy(3))
    ids = engine.generate([engine.tokenizer.encode("hello")], greedy(3))
    single = engine.generate(engine.tokenizer.encode("hello"), greedy(3))
    many = engine.generate(["hello", "world"], [greedy(3), greedy(5)])
    assert text[0].token_ids == ids[0].token_ids == single[0].token_ids == many[0].token_ids
    assert [len(many[0].token_ids), len(many[1].token_ids)] == [3, 5]
    assert engine.generate([]) == []


def test_counts_and_times(make_engine) -> None:
    engine = make_engine()
    first, second = engine.generate(IDS[:50], GREEDY)[0], engine.generate(IDS[:60], GREEDY)[0]
    assert (first.prompt_tokens, first.cached_tokens, first.computed_tokens) == (50, 0, 50)
    assert (second.prompt_tokens, second.cached_tokens, second.computed_tokens) == (60, 50, 10)
    assert second.completion_tokens == 16 and second.finish_reason is FinishReason.LENGTH
    assert min(second.queue_time, second.prefill_time, second.decode_time) >= 0
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.computed_tokens, stats.generated_tokens) == (110, 60, 32)
    assert stats.hit_rate == stats.optimal_hit_rate == pytest.approx(50 / 110)
    assert (stats.running, stats.waiting) == (0, 0)


def test_the_next_turn_computes_only_what_is_new(make_engine) -> None:
    engine = make_engine()
    first = engine.generate(IDS[:40], greedy(20))[0]
    history = [*IDS[:40], *first.token_ids]
    second = engine.generate([*history, *IDS[50:60]], greedy(4))[0]
    # the last generated token was never fed back, so its KV does not exist yet
    assert second.computed_tokens == 11 and second.cached_tokens == 59
    assert engine.stats().hit_rate == engine.stats().optimal_hit_rate


def test_many_with_one_prefix_hit_the_optimum(make_engine) -> None:
    engine = make_engine(max_total_tokens=8192, max_model_len=512)
    prompts = [[*IDS, *[rng.randrange(8, VOCAB) for _ in range(1 + i % 9)]] for i in range(64)]
    engine.generate([*prompts, *prompts[:8]], greedy(2))
    unique = len({tuple(p[:end]) for p in prompts for end in range(1, len(p) + 1)})
    assert engine.stats().computed_tokens == engine.stats().unique_tokens == unique


def test_cache_salt_separates(make_engine) -> None:
    engine = make_engine()
    cached = []
    for salt in ("", "a", "b", "a", ""):
        engine.add(IDS[:30], greedy(1), cache_salt=salt)
        while engine.has_work:
            cached += [d.output.cached_tokens for d in engine.step() if d.output]
    assert cached == [0, 0, 0, 30, 30]


def test_flush_forgets_and_answers_stay_the_same(make_engine) -> None:
    engine = make_engine()
    before = engine.generate(IDS[:30], GREEDY)[0]
    assert engine.flush_cache() == 45
    after = engine.generate(IDS[:30], GREEDY)[0]
    assert after.cached_tokens == 0 and after.token_ids == before.token_ids
    assert engine.stats().pool_used == 45


# ---- samples and seeds


def test_samples_share_one_prompt_computation(make_engine) -> None:
    engine = make_engine()
    output = engine.generate(IDS[:40], SamplingParams(n=6, max_tokens=12, ignore_eos=True, seed=5))[0]
    assert len(output.samples) == 6 and [s.index for s in output.samples] == list(range(6))
    assert len({s.token_ids for s in output.samples}) == 6
    assert engine.stats().computed_tokens == 40
    assert output.completion_tokens == 72 and output.text == output.samples[0].text


@pytest.mark.parametrize(
    "settings", [{}, {"disable_radix_cache": True}, {"max_total_tokens": 90}, {"chunked_prefill_size": 7}]
)
def test_a_seed_fixes_the_samples_whatever_runs_beside(settings: dict, make_engine) -> None:
    params = SamplingParams(n=2, max_tokens=15, ignore_eos=True, seed=11, top_p=0.9, presence_penalty=0.3)
    alone = make_engine().generate(IDS[:20], params)[0]
    busy = make_engine(**settings)
    others = [SamplingParams(max_tokens=i + 1, ignore_eos=True, temperature=0.3 * i) for i in range(6)]
    outputs = busy.generate([*[IDS[i : i + 18] for i in range(6)], IDS[:20]], [*others, params])
    assert [s.token_ids for s in outputs[-1].samples] == [s.token_ids for s in alone.samples]


def test_without_a_seed_the_engines_seed_reproduces_a_run(make_engine) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    runs = [[o.token_ids for o in make_engine(seed=seed).generate([IDS[:9], IDS[:9]], params)] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2] and runs[0][0] != runs[0][1]


# ---- log-probabilities


@pytest.mark.parametrize("cached", [0, 30, 60])
def test_logprobs_are_those_of_transformers(cached: int, tiny, make_engine) -> None:
    engine = make_engine("qwen2", chunked_prefill_size=16)
    if cached:
        engine.generate(IDS[:cached], SamplingParams(max_tokens=0))
    output = engine.generate(IDS[:60], greedy(8, logprobs=3, prompt_logprobs=2, logit_bias={9: -50.0}))[0]
    assert output.cached_tokens == cached
    tokens = [*IDS[:60], *output.token_ids]
    expected = reference_logits(tiny("qwen2")[1], tokens).log_softmax(-1)
    assert output.prompt_logprobs is not None and output.logprobs is not None
    positions = [*output.prompt_logprobs, *output.logprobs]
    assert positions[0] is None and len(positions) == 68
    for at, found in enumerate(positions[1:], start=1):
        assert found is not None
        row = expected[at - 1]
        assert found.chosen.token_id == tokens[at]
        assert found.chosen.logprob == pytest.approx(float(row[tokens[at]]), abs=1e-4)
        assert found.chosen.rank == int((row > row[tokens[at]]).sum()) + 1
        k = 2 if at < 60 else 3
        assert [t.logprob for t in found.top] == pytest.approx(row.topk(k).values.tolist(), abs=1e-4)


# ---- ends


def test_end_of_sequence_stop_ids_and_min_tokens(tiny, make_engine) -> None:
    engine = make_engine()
    tokens = reference_greedy(tiny("llama")[1], IDS[:20], 12)
    wanted = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    output = engine.generate(IDS[:20], greedy(12, stop_token_ids=[tokens[wanted]]))[0]
    assert list(output.token_ids) == tokens[: wanted + 1]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, tokens[wanted])
    later = engine.generate(IDS[:20], greedy(12, stop_token_ids=[tokens[wanted]], min_tokens=wanted + 2))[0]
    assert len(later.token_ids) >= wanted + 2 and tokens[wanted] not in later.token_ids[: wanted + 1]
    forced = engine.generate(IDS[:20], SamplingParams(max_tokens=9, logit_bias={0: 100.0}))[0]  # 0 is end of sequence
    assert (forced.token_ids, forced.text, forced.finish_reason) == ((0,), "", FinishReason.STOP)
    ignored = engine.generate(IDS[:20], SamplingParams(max_tokens=4, logit_bias={0: 100.0}, ignore_eos=True))[0]
    assert ignored.token_ids == (0, 0, 0, 0) and ignored.finish_reason is FinishReason.LENGTH


def test_stop_strings_cut_the_text_and_never_show_in_part(make_engine) -> None:
    engine = make_engine()
    bias = {ord("a") + 20: 0.0}
    plain = engine.generate(IDS[:20], greedy(40, logit_bias=bias))[0].text
    for start in range(0, len(plain) - 3, 4):
        stop = plain[start : start + 3]
        first = plain.find(stop)
        for include in (False, True):
            params = greedy(40, stop=[stop, "never this"], include_stop=include, logit_bias=bias)
            deltas = list(engine.stream(IDS[:20], params))
            text = "".join(d.text for d in deltas)
            output = deltas[-1].output
            assert output is not None and text == output.text == plain[: first + (3 if include else 0)]
            assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)


def test_max_tokens_none_goes_to_the_end_of_the_context(make_engine) -> None:
    engine = make_engine(max_model_len=64)
    output = engine.generate(IDS[:50], greedy(1, max_tokens=None))[0]
    assert output.completion_tokens == 14 and output.finish_reason is FinishReason.LENGTH


# ---- streams, steps, aborts


def test_stream_is_generate_in_pieces(make_engine) -> None:
    engine = make_engine()
    whole = engine.generate("abc", greedy(20))[0]
    deltas = list(engine.stream("abc", greedy(20)))
    assert "".join(d.text for d in deltas) == whole.text
    assert tuple(t for d in deltas for t in d.token_ids) == whole.token_ids
    assert [d.output is not None for d in deltas] == [False] * (len(deltas) - 1) + [True]


def test_leaving_a_stream_aborts_it_and_keeps_its_kv(make_engine) -> None:
    engine = make_engine()
    stream = engine.stream(IDS[:30], greedy(100))
    for _ in range(5):
        next(stream)
    stream.close()
    assert not engine.has_work and engine.stats().running == 0
    assert engine.generate(IDS[:30], greedy(1))[0].cached_tokens == 30


def test_streams_and_steps_beside_each_other_lose_nothing(make_engine) -> None:
    engine = make_engine()
    expected = [engine.generate(IDS[i : i + 10], greedy(10))[0].token_ids for i in range(3)]
    first, second = engine.stream(IDS[0:10], greedy(10)), engine.stream(IDS[1:11], greedy(10))
    got: list[list[int]] = [[], [], []]
    got[0] += next(first).token_ids
    got[1] += next(second).token_ids
    got[2] += engine.generate(IDS[2:12], greedy(10))[0].token_ids
    got[1] += [t for d in second for t in d.token_ids]
    got[0] += [t for d in first for t in d.token_ids]
    assert [tuple(g) for g in got] == expected


def test_abort_at_any_moment(make_engine) -> None:
    engine = make_engine(chunked_prefill_size=16)
    for steps in range(8):
        keep = engine.add(IDS[:30], greedy(6))
        gone = engine.add(IDS[100:160], greedy(50, n=2))
        deltas = [d for _ in range(steps) for d in engine.step()]
        assert engine.abort(gone) and not engine.abort(gone) and not engine.abort("nobody")
        while engine.has_work:
            deltas += engine.step()
        outputs = {d.output.request_id: d.output for d in deltas if d.output}
        assert [s.finish_reason for s in outputs[gone].samples] == [FinishReason.ABORT] * 2
        assert outputs[keep].finish_reason is FinishReason.LENGTH
        engine.flush_cache()
        assert engine.stats().pool_used == 0


def test_random_aborts_leave_no_lock_and_no_page(make_engine) -> None:
    engine = make_engine(max_total_tokens=300, chunked_prefill_size=24)
    live: list[str] = []
    for _ in range(400):
        if rng.random() < 0.6:
            start = rng.randrange(100)
            params = SamplingParams(n=rng.choice([1, 1, 3]), max_tokens=rng.randrange(20), ignore_eos=True)
            live.append(engine.add(IDS[start : start + rng.randrange(1, 60)], params))
        if live and rng.random() < 0.5:
            engine.abort(live.pop(rng.randrange(len(live))))
        engine.step()
    for request_id in live:
        engine.abort(request_id)
    engine.step()
    assert engine._tree is not None and engine._tree.total_locks == 0
    assert engine.stats().pool_used == engine.stats().pool_evictable


def test_closing(make_engine) -> None:
    engine = make_engine()
    engine.add(IDS[:5])
    engine.close()
    engine.close()
    with pytest.raises(EngineClosed):
        engine.generate("x")
    with pytest.raises(EngineClosed):
        engine.step()


# ---- one request never hurts another


def test_a_forward_that_always_fails_for_one_request_ends_that_one_alone(make_engine, monkeypatch) -> None:
    engine = make_engine()
    prompts = [IDS[i : i + 30] for i in range(6)]
    expected = [o.token_ids for o in engine.generate(prompts, greedy(8))]
    engine.flush_cache()
    poison = 7
    forward = engine._runner.forward

    def failing(token_ids, *args):
        if poison in token_ids.tolist():
            raise RuntimeError("no memory for this one")
        forward(token_ids, *args)

    monkeypatch.setattr(engine._runner, "forward", failing)
    outputs = engine.generate([*prompts[:3], [*IDS[:10], poison], *prompts[3:]], greedy(8))
    bad = outputs.pop(3)
    assert bad.finish_reason is FinishReason.ERROR and "no memory for this one" in (bad.error or "")
    assert [o.token_ids for o in outputs] == expected
    assert engine.generate(prompts, greedy(8))[0].token_ids == expected[0]


def test_a_forward_that_fails_once_costs_nothing_but_time(make_engine, monkeypatch) -> None:
    engine = make_engine(chunked_prefill_size=20)
    prompts = [IDS[i : i + 30] for i in range(6)]
    expected = [o.token_ids for o in engine.generate(prompts, greedy(8))]
    for when in range(12):
        engine.flush_cache()
        calls = 0

        def failing(*args, when=when):
            nonlocal calls
            calls += 1
            if calls == when + 1:
                raise RuntimeError("once")
            type(engine._runner).forward(engine._runner, *args)

        monkeypatch.setattr(engine._runner, "forward", failing)
        outputs = engine.generate(prompts, greedy(8))
        failed = [o for o in outputs if o.finish_reason is FinishReason.ERROR]
        assert len(failed) <= 1  # only where it ran alone
        assert all(o.token_ids == e for o, e in zip(outputs, expected, strict=True) if o not in failed)


def test_logits_that_are_not_finite_end_that_request_alone(make_engine, monkeypatch) -> None:
    engine = make_engine()
    good = engine.generate(IDS[:20], greedy(6))[0].token_ids
    draw = engine._runner.draw

    def broken(slots, rows, allowed):
        if len(slots) > 1:
            engine._runner.store.hidden[int(slots[1])] = float("nan")
        return draw(slots, rows, allowed)

    monkeypatch.setattr(engine._runner, "draw", broken)
    outputs = engine.generate([IDS[:20], IDS[30:50], IDS[60:80]], greedy(6))
    assert [o.finish_reason for o in outputs].count(FinishReason.ERROR) == 2  # the second, then the third in its place
    assert outputs[0].token_ids == good


# ---- bad input


def test_bad_input_names_the_field_and_starts_nothing(make_engine) -> None:
    engine = make_engine(max_model_len=64, max_waiting_requests=8)
    refused = [
        ("", {}, "prompt: is empty"),
        ([[]], {}, "prompt: is empty"),
        ([VOCAB], {}, rf"prompt\[0\]=320: the vocabulary has ids 0 to {VOCAB - 1}"),
        ([5, -1], {}, r"prompt\[1\]=-1"),
        ([5, 2**63], {}, r"prompt\[1\]"),
        ([5, 1.5], {}, r"prompt\[1\]=1.5"),
        ([5, True], {}, r"prompt\[1\]=True"),
        ([8] * 65, {}, "prompt: has 65 tokens; context_length=64"),
        ([8] * 64, {"max_tokens": 1}, "max_tokens=1: with a prompt of 64 tokens that is 65"),
        ([8] * 64, {"max_tokens": None}, "prompt: has 64 tokens"),
        ([8] * 10, {"max_tokens": 10**9}, "max_tokens=1000000000"),
        ("a" * 10**6, {}, "prompt: has 1000000 characters"),
        (b"bytes", {}, "prompts: must be text"),
        ({"role": "user"}, {}, "prompts: must be text"),
        (7, {}, "prompts: must be text"),
        ("a", {"stop_token_ids": [VOCAB]}, "stop_token_ids has 320"),
        ("a", {"logit_bias": {VOCAB: 1}}, "logit_bias has 320"),
        ("a", {"stop": ["x"] * 10**6}, "stop asks for 1000000: at most 128"),
        ("a", {"stop": ["x" * 10**6]}, "stop has a string of 1000000 characters: at most 1024"),
        ("a", {"n": 10**6}, "n asks for 1000000: at most 128"),
        ("a", {"n": 9}, "max_waiting_requests=8: the queue is full"),
        ("a", {"logprobs": 1000}, "logprobs asks for 1000: at most 64"),
        ("a", {"prompt_logprobs": 1000}, "prompt_logprobs asks for 1000"),
        ("\ud800", {}, "prompt"),
    ]
    for prompt, params, message in refused:
        with pytest.raises(InvalidRequest, match=message) as info:
            engine.generate(prompt, SamplingParams(**{"max_tokens": 4, **params}))
        assert len(str(info.value)) < 300
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]: prompt: is empty"):
        engine.generate(["fine", ""], GREEDY)
    with pytest.raises(InvalidRequest, match="params: has 1 entries for 2 prompts"):
        engine.generate(["a", "b"], [GREEDY])
    with pytest.raises(InvalidRequest, match="params: must be SamplingParams"):
        engine.generate("a", {"max_tokens": 3})
    with pytest.raises(InvalidRequest, match="request_id"):
        engine.add("a", GREEDY, request_id=engine.add("b", GREEDY, request_id="same"))
    engine.abort("same")
    engine.step()
    assert not engine.has_work
    assert len(engine.generate([8] * 60, greedy(4))[0].token_ids) == 4


def test_more_prompts_than_the_queue_holds_are_fed_in(make_engine) -> None:
    engine = make_engine(max_waiting_requests=4)
    outputs = engine.generate([IDS[i : i + 5] for i in range(30)], greedy(2))
    assert len(outputs) == 30 and all(len(o.token_ids) == 2 for o in outputs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 513}, "max_model_len=513: the model's positions end at 512"),
        ({"max_total_tokens": 100, "max_model_len": 101}, "max_model_len=101: the pool holds max_total_tokens=100"),
        ({"max_total_tokens": 3, "page_size": 4}, "max_total_tokens=3: the pool must hold at least one page of 4"),
        ({"page_sise": 4}, "did you mean 'page_size'"),
        ({"chat_template": "/nowhere.jinja"}, "chat_template='/nowhere.jinja'"),
    ],
)
def test_settings_that_cannot_be(settings: dict, message: str, make_engine) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make_engine(**settings)


def test_figures_count_what_was_done_and_no_more(make_engine) -> None:
    engine = make_engine(chunked_prefill_size=16)
    ids = [engine.add(IDS[i : i + 30], greedy(3)) for i in range(5)]
    assert engine.stats().hit_rate == engine.stats().prompt_tokens == 0
    for request_id in ids:
        engine.abort(request_id)
    outputs = [d.output for d in engine.step() if d.output]
    assert [(o.cached_tokens, o.computed_tokens) for o in outputs] == [(0, 0)] * 5
    assert engine.stats().prompt_tokens == 0
    late = engine.add(IDS[:100], greedy(3))
    engine.step()
    engine.reset_stats()
    while engine.has_work:
        for delta in engine.step():
            if delta.output:
                assert (delta.output.cached_tokens, delta.output.computed_tokens) == (0, 100)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.computed_tokens, stats.hit_rate, stats.optimal_hit_rate) == (100, 100, 0, 0)
    assert late and stats.requests == 0


def test_times_add_up_in_order(make_engine, monkeypatch) -> None:
    from radixrt.engine import core
    from radixrt.scheduler import scheduler

    clock = iter(range(10**6))

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return float(next(clock))

    monkeypatch.setattr(core, "time", Clock)
    monkeypatch.setattr(scheduler, "time", Clock)
    engine = make_engine(max_running_requests=1)
    first, second = engine.generate([IDS[:20], IDS[50:70]], greedy(5))
    assert first.queue_time < second.queue_time and second.queue_time > first.prefill_time + first.decode_time
    assert min(first.prefill_time, first.decode_time, second.prefill_time, second.decode_time) > 0


def test_a_stream_whose_end_someone_else_took_says_so(make_engine) -> None:
    from radixrt import RadixrtError

    engine = make_engine()
    stream = engine.stream(IDS[:9], greedy(3))
    next(stream)
    while engine.has_work:
        engine.step()
    with pytest.raises(RadixrtError, match="taken by another call of step"):
        list(stream)


def test_an_error_while_ending_ends_that_request_alone(make_engine, monkeypatch) -> None:
    from radixrt.engine.live import LiveSample

    engine = make_engine()
    finish = LiveSample.finish

    def failing(self, reason):
        if len(self.sequence.tokens) and int(self.sequence.tokens[0]) == IDS[0] and reason is FinishReason.LENGTH:
            raise ValueError("cannot end")
        finish(self, reason)

    monkeypatch.setattr(LiveSample, "finish", failing)
    bad, good = engine.generate([IDS[:9], IDS[1:10]], greedy(3))
    assert bad.finish_reason is FinishReason.ERROR and "cannot end" in (bad.error or "")
    assert good.finish_reason is FinishReason.LENGTH


def test_stop_strings_wait_for_min_tokens(make_engine) -> None:
    engine = make_engine()
    always = {engine.tokenizer.encode("a")[0]: 100.0}
    plain = engine.generate(IDS[:20], greedy(30, logit_bias=always))[0]
    assert plain.text == "a" * 30
    output = engine.generate(IDS[:20], greedy(30, logit_bias=always, stop=["aa"], min_tokens=7))[0]
    assert 7 <= len(output.token_ids) <= 9 and output.stop_reason == "aa"


def test_the_optimum_is_counted_over_a_bounded_history(monkeypatch) -> None:

    from radixrt.engine import stats

    monkeypatch.setattr(stats, "_MOST_TOKENS", 50)
    optimal = stats.OptimalCache()
    for start in range(0, 1000, 20):
        assert optimal.prompt(np.arange(start, start + 20, dtype=np.int32), "") == 20
        assert optimal._tree.evictable_tokens <= 50
    assert optimal.prompt(np.arange(980, 1000, dtype=np.int32), "") == 0


# ---- interrupts


def test_an_interrupt_anywhere_in_a_step_leaves_the_engine_whole(make_engine, monkeypatch) -> None:
    """Ctrl-C arrives while the k-th function of the engine is entered; afterwards everything is as if it had come later."""
    import signal
    import sys

    engine = make_engine(chunked_prefill_size=24, check_integrity=False)
    prompts = [IDS[i : i + 40] for i in range(4)]
    expected = [o.token_ids for o in engine.generate(prompts, greedy(6))]
    for place in range(1, 4000, 61):
        engine.flush_cache()
        calls = 0

        def trace(frame, event, arg, place=place):
            nonlocal calls
            if "radixrt" in frame.f_code.co_filename:
                calls += 1
                if calls == place:
                    signal.raise_signal(signal.SIGINT)

        sys.setprofile(trace)
        try:
            engine.generate(prompts, greedy(6))
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        engine.check_integrity()
        while engine.has_work:
            engine.step()
        assert [o.token_ids for o in engine.generate(prompts, greedy(6))] == expected, place


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_whatever_a_forward_raises_unwritten_kv_leaves_the_tree(
    error: type[BaseException], make_engine, monkeypatch
) -> None:
    engine = make_engine()
    expected = engine.generate(IDS[:40], greedy(5))[0].token_ids
    engine.flush_cache()

    def failing(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "forward", failing)
        if issubclass(error, Exception):
            assert engine.generate(IDS[:40], greedy(5))[0].finish_reason is FinishReason.ERROR
        else:
            with pytest.raises(error):
                engine.generate(IDS[:40], greedy(5))
    output = engine.generate(IDS[:40], greedy(5))[0]
    assert output.cached_tokens == 0 and output.token_ids == expected


def test_a_second_thread_is_refused(make_engine, monkeypatch) -> None:
    import threading

    from radixrt.engine.exclusive import EngineBusy

    engine = make_engine()
    forward, found = engine._runner.forward, []

    def slow(*args):
        def intrude():
            for call in (lambda: engine.add("x", GREEDY), engine.step, lambda: engine.abort("x"), engine.close):
                try:
                    call()
                except EngineBusy as error:
                    found.append(error)

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        forward(*args)

    monkeypatch.setattr(engine._runner, "forward", slow)
    assert len(engine.generate(IDS[:9], greedy(2))[0].token_ids) == 2
    assert len(found) == 8


def test_a_prompt_is_copied(make_engine) -> None:

    engine = make_engine()
    buffer = np.array(IDS[:20], dtype=np.int32)
    engine.add(buffer, greedy(2))
    buffer[:] = 9
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert deltas[-1].output.prompt_token_ids == tuple(IDS[:20])


def test_an_id_is_free_again_only_when_its_last_delta_was_handed_out(make_engine) -> None:
    engine = make_engine()
    engine.add([9, 10], SamplingParams(max_tokens=4), request_id="one")
    engine.step()
    assert engine.abort("one")
    with pytest.raises(InvalidRequest, match="request_id"):
        engine.add([9, 11], request_id="one")
    while engine.has_work:
        engine.step()
    engine.add([9, 11], SamplingParams(max_tokens=1), request_id="one")
