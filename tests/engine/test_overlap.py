"""Steps that overlap: what the device does when, on a simulated one, and that answers are the same as in single steps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from radixrt import Constraint, Engine, FinishReason, InvalidRequest, SamplingParams
from radixrt.config import EngineConfig
from radixrt.engine.live import LiveSample
from tests.engine.sim_device import Clock, Piece, SimulatedDevice
from tests.tiny import VOCAB

rng = random.Random(5)
IDS = [rng.randrange(8, VOCAB) for _ in range(200)]
SECONDS = {"forward": 1.0, "sample": 0.25, "launch": 0.01}
HOST = 0.02  # seconds that the host takes for the masks of a sample, and for a token that it takes in


def greedy(count: int, **kwargs: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True, **kwargs})


MIX: list[tuple[list[int], SamplingParams]] = [
    (IDS[:30], greedy(20)),
    (IDS[:35], SamplingParams(max_tokens=25, seed=3, top_p=0.9)),
    (IDS[5:30], SamplingParams(max_tokens=18, seed=4, n=3, presence_penalty=0.5, ignore_eos=True)),
    (IDS[40:60], greedy(30, constraint=Constraint.regex(r"[a-f ]{5,20}"))),
    (
        IDS[40:62],
        SamplingParams(max_tokens=40, seed=9, constraint=Constraint.regex(r'\{"name": "[a-z]{1,8}", "on": true\}')),
    ),
    (IDS[60:70], greedy(12, stop=("e", "a"))),
    (IDS[60:75], greedy(9, logprobs=2, prompt_logprobs=1)),
    (IDS[80:120], greedy(1)),
    (IDS[80:121], SamplingParams(max_tokens=0)),
    (IDS[100:140], SamplingParams(max_tokens=30, seed=8, min_tokens=4)),
]


class Watched:
    """An engine on a simulated device, with a host that takes its time."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, late: dict[int, float] | None = None) -> None:
        self.clock = Clock()
        self.device = SimulatedDevice(self.clock, SECONDS)
        self.engine = engine
        engine._flights.device = self.device
        masks, clock, device = LiveSample.masks, self.clock, self.device

        def slow(item: LiveSample, vocab: int) -> Any:
            step = sum(piece.kind == "sample" for piece in device.pieces)
            clock.now += (late or {}).get(step, HOST)
            return masks(item, vocab)

        def push(item: LiveSample, result: Any) -> Any:
            clock.now += HOST
            return taken(item, result)

        taken = LiveSample.push
        monkeypatch.setattr(LiveSample, "masks", slow)
        monkeypatch.setattr(LiveSample, "push", push)

    def of(self, kind: str) -> list[Piece]:
        return [piece for piece in self.device.pieces if piece.kind == kind]

    def idle(self) -> list[float]:
        """Seconds that the device stood still before each piece but the first."""
        pieces = self.device.pieces
        return [round(after.start - before.end, 6) for before, after in pairwise(pieces)]


def run(engine: Engine, work: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    outputs = engine.generate([prompt for prompt, _ in work], [params for _, params in work])
    return [[(s.token_ids, s.text, s.finish_reason, s.stop_reason) for s in output.samples] for output in outputs]


def test_the_device_never_waits_for_a_host_that_is_in_time(
    make_engine: Callable[..., Engine], monkeypatch: Any
) -> None:
    watched = Watched(make_engine(overlap=True), monkeypatch)
    run(watched.engine, [(IDS[at : at + 20], greedy(30)) for at in range(8)])
    assert len(watched.of("forward")) == 30
    assert watched.idle() == [0.0] * (2 * 30 - 1)


def test_without_overlap_it_waits_in_every_step(make_engine: Callable[..., Engine], monkeypatch: Any) -> None:
    watched = Watched(make_engine(overlap=False), monkeypatch)
    run(watched.engine, [(IDS[at : at + 20], greedy(30)) for at in range(8)])
    assert watched.idle() == [0.0, *[pytest.approx(8 * HOST + SECONDS["launch"]), 0.0] * 29]


def test_a_late_mask_delays_its_own_sampling_and_nothing_else(
    make_engine: Callable[..., Engine], monkeypatch: Any
) -> None:
    late = 5.0
    watched = Watched(make_engine(overlap=True), monkeypatch, {12: late})
    run(watched.engine, [(IDS[:20], greedy(30))])
    idle = watched.idle()
    at = watched.device.pieces.index(watched.of("sample")[12]) - 1
    assert idle[at] == pytest.approx(HOST + late + SECONDS["launch"] - SECONDS["forward"])
    assert idle[:at] + idle[at + 1 :] == [0.0] * (len(idle) - 1)


def test_tokens_are_read_one_step_late_and_no_later(make_engine: Callable[..., Engine], monkeypatch: Any) -> None:
    watched = Watched(make_engine(overlap=True), monkeypatch)
    run(watched.engine, [(IDS[:20], greedy(30)), (IDS[:40], greedy(20))])
    forwards, samples = watched.of("forward"), watched.of("sample")
    for step, (sample, following) in enumerate(zip(samples, forwards[1:], strict=False)):
        assert sample.read is not None and following.launched < sample.read, step
        assert sample.read == sample.end, "the host was not there when the tokens came"
    for sample, after in pairwise(samples):
        assert sample.read is not None and after.launched >= sample.read


def test_what_is_computed_as_late_as_possible_is_the_same(make_engine: Callable[..., Engine], monkeypatch: Any) -> None:
    expected = run(make_engine(overlap=False), MIX)
    watched = Watched(make_engine(overlap=True), monkeypatch)
    assert run(watched.engine, MIX) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"page_size": 4},
        {"chunked_prefill_size": 9},
        {"disable_radix_cache": True},
        {"max_total_tokens": 150, "max_model_len": 128},
        {"jump_forward": False},
        {"speculation": 4},
        {"kernels": "torch"},
    ],
    ids=str,
)
def test_answers_are_those_of_single_steps(settings: dict[str, Any], make_engine: Callable[..., Engine]) -> None:
    results = []
    for overlap in (False, True):
        engine = make_engine(overlap=overlap, **settings)
        results.append([run(engine, MIX), run(engine, MIX[::-1])])
        assert not engine.has_work and not engine._flights
    assert results[0] == results[1]


def test_figures_and_cache_are_those_of_single_steps(make_engine: Callable[..., Engine]) -> None:
    figures = []
    for overlap in (False, True):
        engine = make_engine(overlap=overlap)
        run(engine, MIX)
        run(engine, [([*IDS[:30], *IDS[90:99]], greedy(3))])
        stats = engine.stats()
        figures.append(
            (stats.prompt_tokens, stats.computed_tokens, stats.generated_tokens, stats.pool_used, stats.waiting)
        )
    assert figures[0] == figures[1]


@pytest.mark.parametrize("when", range(6))
def test_an_abort_in_flight_frees_everything(when: int, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(overlap=True, page_size=4)
    expected = make_engine(overlap=False).generate(IDS[50:80], greedy(12))[0].token_ids
    engine.add(IDS[:30], greedy(12), request_id="gone")
    engine.add(IDS[50:80], greedy(12), request_id="stays")
    deltas = [delta for _ in range(when) for delta in engine.step()]
    assert engine.abort("gone")
    while engine.has_work:
        deltas += engine.step()
    outputs = {delta.request_id: delta.output for delta in deltas if delta.output is not None}
    assert outputs["gone"].finish_reason is FinishReason.ABORT
    assert outputs["stays"].token_ids == expected
    assert engine._scheduler.retired == [] and engine._tree is not None and engine._tree.total_locks == 0


def test_the_last_one_aborted_in_flight_leaves_work_only_until_the_step_has_ended(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(overlap=True)
    engine.add(IDS[:30], greedy(12), request_id="gone")
    engine.step()
    engine.abort("gone")
    assert engine.has_work and [delta.finish_reason for delta in engine.step()] == [FinishReason.ABORT]
    assert not engine.has_work and engine.stats().pool_used == engine._tree.evictable_tokens  # type: ignore[union-attr]


def test_closing_waits_for_the_step_in_flight(make_engine: Callable[..., Engine]) -> None:
    engine = Engine(make_engine().config.model, overlap=True, max_total_tokens=512)
    engine.add(IDS[:30], greedy(12))
    engine.step()
    engine.close()
    assert not engine.has_work


@pytest.mark.parametrize("value", ["yes", 1, 0])
def test_a_setting_that_is_neither_on_nor_off_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="^overlap="):
        EngineConfig(overlap=value)


@pytest.mark.parametrize("kind", ["forward", "draw"])
@pytest.mark.parametrize("when", range(5))
def test_a_step_that_fails_once_takes_the_next_one_with_it_and_no_answer(
    kind: str, when: int, make_engine: Callable[..., Engine], monkeypatch: Any
) -> None:
    work = [(IDS[at : at + 20], greedy(8)) for at in range(4)]
    engine = make_engine(overlap=True)
    expected = run(make_engine(overlap=False), work)
    calls, real = 0, getattr(engine._runner, kind)

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == when + 1:
            raise RuntimeError("once")
        return real(*args)

    monkeypatch.setattr(engine._runner, kind, failing)
    assert run(engine, work) == expected


def test_what_fails_when_it_is_computed_for_nobody_is_found_by_nobody(
    make_engine: Callable[..., Engine], monkeypatch: Any
) -> None:
    """One choice ends all of its request while a part of another one is in flight, and is already in the tree."""
    engine, prefix, choice = make_engine(overlap=True, chunked_prefill_size=24), IDS[:20], IDS[50:90]
    expected = run(make_engine(), [(prefix + choice, greedy(8))])
    calls, real = 0, engine._runner.forward

    def forward(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("once")
        return real(*args)

    monkeypatch.setattr(engine._runner, "forward", forward)
    monkeypatch.setattr("radixrt.engine.sampling.score", lambda logits, scored: [(math.nan,) for _ in scored])
    engine.submit(engine.prepare_score(prefix, [IDS[40:41], choice]))
    deltas = engine.step()
    assert calls == 2 and not engine.has_work and [d.finish_reason for d in deltas] == [FinishReason.ERROR]
    assert run(engine, [(prefix + choice, greedy(8))]) == expected
