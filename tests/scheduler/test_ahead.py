"""Steps that are scheduled while the one before them has not ended, on a device that computes everything as late as it may."""

from __future__ import annotations

import numpy as np
import pytest

from radixrt.cache.page_pool import PagePool
from radixrt.cache.radix_tree import RadixTree
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.sequence import Phase, Sequence
from tests.scheduler.fake_kv import FakeKV, Guesses


def make(pages: int = 400, page_size: int = 1, chunk: int = 16, cache: bool = True, **kv) -> tuple[Scheduler, FakeKV]:
    tree = RadixTree(page_size) if cache else None
    scheduler = Scheduler(PagePool(pages, page_size), tree, chunk=chunk, max_running=8)
    return scheduler, FakeKV(scheduler, **kv)


def sequence(uid: int, prompt: list[int], new: int) -> Sequence:
    return Sequence(uid, np.array(prompt, dtype=np.int32), len(prompt) + new)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("stop", [-1, 4])
def test_a_decode_is_launched_before_its_token_is_known(page_size: int, cache: bool, stop: int) -> None:
    scheduler, kv = make(page_size=page_size, chunk=64, cache=cache, stop=stop)
    prompts = {uid: [uid, 2, 3, *range(uid)] for uid in range(5)}
    for uid, prompt in prompts.items():
        scheduler.add(sequence(uid, prompt, 10 + uid))
    kv.step(ahead=True)
    assert kv.flight is not None
    assert kv.flight.batch.forward is not None and (kv.flight.batch.forward.sources == np.arange(5)).all()
    kv.run(ahead=True)
    assert kv.outputs == {uid: kv.expected(prompt, 10 + uid) for uid, prompt in prompts.items()}
    assert scheduler.flights == scheduler.retired == []


def test_no_step_is_added_where_the_end_is_known() -> None:
    """A sequence at its limit is not computed once too often, and one without output is not at all."""
    steps = []
    for ahead in (False, True):
        scheduler, kv = make()
        for uid, new in enumerate([0, 1, 5, 9]):
            scheduler.add(sequence(uid, [uid, 7], new))
        kv.run(ahead)
        steps.append((scheduler.counters.forward_tokens, scheduler.counters.steps, len(kv.outputs)))
    assert steps[0] == steps[1]


def test_what_ended_unforeseen_was_computed_once_too_often_and_leaves_no_trace() -> None:
    left = []
    for ahead in (False, True):
        scheduler, kv = make(stop=4)
        for uid in range(4):
            scheduler.add(sequence(uid, [uid, 7, 7], 30))
        kv.run(ahead)
        assert scheduler.tree is not None
        left.append(
            (scheduler.tree.evictable_tokens, scheduler.pool.free_pages, kv.outputs, scheduler.counters.recomputed)
        )
    assert left[0] == left[1]


def test_what_ended_is_found_by_the_next_one_at_once() -> None:
    """Though the step that computes it once too often is still in flight."""
    scheduler, kv = make(stop=4, next_token=lambda prefix: 4 if prefix[0] == 1 and len(prefix) == 9 else 5)
    scheduler.add(sequence(0, [1, 7, 7], 30))
    scheduler.add(sequence(1, [2, 7], 60))
    while kv.outputs.get(0, [0])[-1] != 4:
        kv.step(ahead=True)
    assert kv.flight is not None and any(s.uid == 0 for s in kv.flight.batch.sequences)
    history = [1, 7, 7, *kv.outputs[0]]
    scheduler.add(sequence(2, [*history, 3], 1))
    before = scheduler.counters.computed_prompt
    kv.run(ahead=True)
    assert scheduler.counters.computed_prompt == before + 2  # the token that ended it, and the new one


def test_guesses_are_verified_in_steps_of_their_own() -> None:
    scheduler, kv = make()
    one = sequence(0, [1, 2, 3], 41)
    one.drafter = Guesses(kv, 4, 9)
    scheduler.add(one)
    kv.run(ahead=True)
    assert kv.outputs[0] == kv.expected([1, 2, 3], 41) and one.accepted == 41 - scheduler.counters.steps


def test_no_room_means_no_step_ahead_and_nobody_is_preempted_for_it() -> None:
    counts = []
    for ahead in (False, True):
        scheduler, kv = make(pages=40, cache=False)
        for uid in range(4):
            scheduler.add(sequence(uid, [uid] * 5, 22))
        kv.run(ahead)
        assert kv.outputs == {uid: kv.expected([uid] * 5, 22) for uid in range(4)}
        counts.append(scheduler.counters.preemptions)
    assert 0 < counts[1] <= counts[0] + 1


def test_a_failure_ends_both_steps_and_only_the_one_to_blame() -> None:
    for when in range(1, 12):
        scheduler, kv = make(chunk=8)
        for uid in range(3):
            scheduler.add(sequence(uid, [uid] * 10, 12))
        for _ in range(when):
            kv.step(ahead=True)
        kv.step(fail=True, ahead=True)
        assert not kv.flight and not scheduler.running and not scheduler.flights
        scheduler.check_integrity()
        kv.run(ahead=True)
        assert kv.outputs == {uid: kv.expected([uid] * 10, 12) for uid in range(3)}


def test_the_step_before_a_failed_one_keeps_its_kv() -> None:
    scheduler, kv = make(chunk=64)
    for uid in range(3):
        scheduler.add(sequence(uid, [uid] * 10, 30))
    for _ in range(20):
        kv.step(ahead=True)
    kv.step(fail=True, ahead=True)
    kv.run(ahead=True)
    assert scheduler.counters.recomputed == 0


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("steps", range(5))
def test_a_failure_ends_the_leases_of_what_was_not_computed_and_no_other(steps: int, ahead: bool) -> None:
    """What is leased between steps may be what the step in flight is to write, or what the one before it wrote."""
    scheduler, kv = make(chunk=64)
    for uid, (prompt, new) in enumerate([([1], 20), ([0] * 10, 20)]):
        scheduler.add(sequence(uid, prompt, new))
        kv.step(ahead=True)
    for _ in range(steps):
        kv.step(ahead=True)
    assert scheduler.leases.grant(np.zeros(10, dtype=np.int32), "", ["tool"]) is not None
    kv.step(fail=True, ahead=ahead)
    scheduler.check_integrity()
    kv.run(ahead=True)
    assert kv.outputs == {0: kv.expected([1], 20), 1: kv.expected([0] * 10, 20)}
    assert len(scheduler.leases) == (steps > 0) and scheduler.counters.recomputed == 0


@pytest.mark.parametrize("seed", range(12))
def test_anything_at_any_moment(seed: int) -> None:
    """Arrivals that share prefixes, ends that nobody foresees, forced tokens, aborts, failures and synchronous steps in between."""
    rng = np.random.default_rng(seed)
    page_size = (1, 2, 3)[seed % 3]
    scheduler, kv = make(
        pages=-(-30 // page_size) + int(rng.integers(0, 40)),
        page_size=page_size,
        chunk=int(rng.choice([2, 5, 20])),
        cache=seed % 4 != 3,
        stop=int(rng.choice([-1, 4])),
        forced=[{}, {3: [1]}, {3: [2, 2, 0], 1: [0]}][seed % 3],
    )
    live: dict[int, Sequence] = {}
    prompts: dict[int, tuple[list[int], int]] = {}
    for uid in range(150):
        prompt = [int(t) for t in rng.integers(0, 2, rng.integers(1, 16))]
        prompts[uid] = (prompt, int(rng.integers(0, 12)))
        live[uid] = sequence(uid, *prompts[uid])
        if rng.random() < 0.1:
            live[uid].drafter = Guesses(kv, 3, int(rng.integers(0, 5)))
        scheduler.add(live[uid])
        while scheduler.waiting_count > 4 or rng.random() < 0.5:
            fail = rng.random() < 0.05
            batch = kv.step(fail=fail, ahead=rng.random() < 0.9)
            if fail and batch is not None and len(batch.sequences) == 1 and batch.sequences[0].phase is Phase.FINISHED:
                prompts.pop(batch.sequences[0].uid, None)
            scheduler.check_integrity()
        if rng.random() < 0.3:
            victim = int(rng.choice(list(live)))
            scheduler.finish(live.pop(victim))
            prompts.pop(victim, None)
            scheduler.check_integrity()
        if rng.random() < 0.05 and scheduler.tree is not None:
            for slots in scheduler.tree.flush():
                scheduler.pool.free(slots)
    kv.run(ahead=True)
    for uid, (prompt, new) in prompts.items():
        assert kv.outputs.get(uid, []) == kv.expected(prompt, new)
    assert scheduler.tree is None or scheduler.tree.total_locks == 0
