"""Scheduler, pool and tree together, on a stand-in for the model that notices every wrong slot."""

import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from radixrt.cache.page_pool import PagePool
from radixrt.cache.radix_tree import Hold, RadixTree
from radixrt.scheduler.drafts import Drafter
from radixrt.scheduler.hints import ProgramHint
from radixrt.scheduler.policy import order
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.sequence import Phase, Sequence
from tests.scheduler.fake_kv import FakeKV, Guesses

POLICIES = ["lpm", "dfs-weight", "fcfs", "priority"]


def make(
    pages: int = 100, page_size: int = 1, chunk: int = 8, cache: bool = True, **kwargs
) -> tuple[Scheduler, FakeKV]:
    tree = RadixTree(page_size) if cache else None
    scheduler = Scheduler(
        PagePool(pages, page_size), tree, chunk=chunk, max_running=kwargs.pop("max_running", 8), **kwargs
    )
    return scheduler, FakeKV(scheduler)


def sequence(uid: int, prompt: list[int], new: int, **kwargs) -> Sequence:
    return Sequence(uid, np.array(prompt, dtype=np.int32), len(prompt) + new, **kwargs)


def unique_edges(prompts: list[list[int]]) -> int:
    return len({tuple(p[:end]) for p in prompts for end in range(1, len(p) + 1)})


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, failing steps, flushes, programs and their holds in pools from tight to wide, with steps ahead."""

    @initialize(
        page_size=st.sampled_from([1, 1, 2, 3]),
        spare=st.sampled_from([0, 2, 40]),
        chunk=st.sampled_from([1, 3, 7, 64]),
        policy=st.sampled_from(POLICIES),
        cache=st.booleans(),
        max_running=st.sampled_from([1, 3, 8]),
        switches=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        stop=st.sampled_from([-1, 4]),
        forced=st.sampled_from([{}, {3: [1]}, {3: [2, 2, 0], 1: [0]}]),
    )
    def start(
        self,
        page_size: int,
        spare: int,
        chunk: int,
        policy: str,
        cache: bool,
        max_running: int,
        switches: tuple[bool, bool, bool],
        stop: int,
        forced: dict[int, list[int]],
    ) -> None:
        self.scheduler, self.kv = make(
            pages=-(-24 // page_size) + spare,
            page_size=page_size,
            chunk=chunk,
            cache=cache,
            schedule_policy=policy,
            max_wait_steps=20,
            max_running=max_running,
            program_order=switches[0],
            program_eviction=switches[1],
            program_admission=switches[2],
        )
        self.kv.stop, self.kv.forced = stop, forced
        self.holds: list[tuple[Hold, str]] = []
        self.live: dict[int, Sequence] = {}
        self.prompts: dict[int, tuple[list[int], int]] = {}
        self.uids = itertools.count()

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=16),
        new=st.integers(0, 8),
        namespace=st.sampled_from(["", "", "a"]),
        priority=st.integers(0, 2),
        program=st.sampled_from(["", "", "p", "q", "r"]),
        step=st.sampled_from([0, 0, 1]),
        remaining=st.sampled_from([None, 0, 2]),
        group=st.sampled_from(["", "g"]),
        drafts=st.sampled_from([None, None, "own", (1, 9), (3, 9), (3, 0), (4, 2), (40, 9)]),
    )
    def add(
        self,
        prompt: list[int],
        new: int,
        namespace: str,
        priority: int,
        program: str,
        step: int,
        remaining: int | None,
        group: str,
        drafts: str | tuple[int, int] | None,
    ) -> None:
        uid = next(self.uids)
        name = "odd" if program == "r" else "even"
        hint = ProgramHint(program, name, 0, step, remaining, group) if program else None
        self.live[uid] = sequence(uid, prompt, new, namespace=namespace, priority=priority, hint=hint)
        if drafts is not None:
            self.live[uid].drafter = Guesses(self.kv, *drafts) if isinstance(drafts, tuple) else Drafter(3)
        self.prompts[uid] = (prompt, new)
        self.scheduler.add(self.live[uid])

    @rule(fail=st.integers(0, 5), ahead=st.booleans())
    def step(self, fail: int, ahead: bool) -> None:
        batch = self.kv.step(fail=fail == 0, ahead=ahead)
        if batch is not None and fail == 0 and len(batch.sequences) == 1:
            failed = batch.sequences[0]
            if failed.phase is Phase.FINISHED:  # otherwise drafts may be to blame
                self.prompts.pop(failed.uid, None)
        self.scheduler.check_integrity()

    @precondition(lambda self: getattr(self, "live", None))
    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        uid = sorted(self.live)[which % len(self.live)]
        self.scheduler.finish(self.live.pop(uid))
        self.prompts.pop(uid, None)
        self.scheduler.check_integrity()

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=16),
        namespace=st.sampled_from(["", "a"]),
        program=st.sampled_from(["", "p", "q", "x"]),
    )
    def hold(self, tokens: list[int], namespace: str, program: str) -> None:
        hold = self.scheduler.hold(np.array(tokens, dtype=np.int32), namespace, program)
        if hold is not None:
            self.holds.append((hold, program))
        self.scheduler.check_integrity()

    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        if self.holds:
            self.scheduler.release(*self.holds.pop(which % len(self.holds)))
            self.scheduler.check_integrity()

    @rule(program=st.sampled_from(["p", "q", "r", "x"]))
    def end_program(self, program: str) -> None:
        self.scheduler.end_program(program)
        self.scheduler.check_integrity()

    @rule()
    def flush(self) -> None:
        if getattr(self, "scheduler", None) and self.scheduler.tree is not None:
            for slots in self.scheduler.tree.flush():
                self.scheduler.pool.free(slots)
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.kv.run(ahead=len(self.prompts) % 2 == 0)
        for uid, (prompt, new) in self.prompts.items():
            if uid in self.live:
                assert self.kv.outputs.get(uid, []) == self.kv.expected(prompt, new)
        for hold, program in self.holds:
            self.scheduler.release(hold, program)
        if self.scheduler.tree is not None:
            assert self.scheduler.tree.held_tokens == 0
        if self.scheduler.tree is not None:
            assert self.scheduler.tree.total_locks == 0 and self.scheduler.tree.protected_tokens == 0
        self.scheduler.check_integrity()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [5, 16, 1000])
def test_what_arrives_together_is_computed_once(policy: str, chunk: int) -> None:
    scheduler, kv = make(pages=4000, chunk=chunk, schedule_policy=policy, max_running=64)
    shared = list(range(10, 110))
    prompts = [[*shared, *[200 + i % 7] * (i % 5 + 1)] for i in range(40)]  # many equal ones, some inside others
    for uid, prompt in enumerate(prompts):
        scheduler.add(sequence(uid, prompt, 3))
    kv.run()
    assert scheduler.counters.computed_prompt == unique_edges(prompts)


def test_one_step_computes_a_shared_prefix_for_all_that_need_it() -> None:
    scheduler, kv = make(chunk=64)
    for uid in range(6):
        scheduler.add(sequence(uid, [1, 2, 3, 4, 5 + uid], 1))
    batch = kv.step()
    assert batch is not None and batch.tokens == 4 + 6 and len(batch.sampled) == 6


def test_a_whole_hit_computes_nothing() -> None:
    scheduler, kv = make()
    for uid in range(2):
        scheduler.add(sequence(uid, [1, 2, 3], 1))
        batch = kv.step()
        assert batch is not None and batch.tokens == (3 if uid == 0 else 0) and len(batch.sampled) == 1


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_tight_pool_gives_the_same_outputs(cache: bool, page_size: int) -> None:
    prompts = [[i % 3, *range(i % 4, 10)] for i in range(12)]
    outputs = []
    for pages in (-(-36 // page_size), 1000):
        scheduler, kv = make(pages=pages, page_size=page_size, chunk=8, cache=cache)
        for uid, prompt in enumerate(prompts):
            scheduler.add(sequence(uid, prompt, 25))
        kv.run()
        outputs.append(kv.outputs)
        if pages < 1000:
            assert scheduler.counters.preemptions > 0
    assert outputs[0] == outputs[1] == {uid: kv.expected(p, 25) for uid, p in enumerate(prompts)}


def test_preemption_costs_no_prompt_token_twice_in_the_books() -> None:
    scheduler, kv = make(pages=34, chunk=8)
    for uid in range(4):
        scheduler.add(sequence(uid, [uid, *range(9)], 14))
    kv.run()
    assert scheduler.counters.preemptions > 0
    assert scheduler.counters.computed_prompt == 40


def test_nobody_starves_behind_better_matches() -> None:
    scheduler, kv = make(pages=60, chunk=4, max_running=1, max_wait_steps=30)
    lonely = sequence(0, [9, 9, 9, 9, 9], 1)
    scheduler.add(sequence(1, [1, 2, 3, 4], 1))
    kv.step()
    scheduler.add(lonely)
    for uid in range(2, 200):
        scheduler.add(sequence(uid, [1, 2, 3, 4], 1))  # always a longer match than the lonely one
        kv.step()
        if not lonely.remaining:
            break
    assert not lonely.remaining and 25 < uid < 60


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("count", "wrong", "steps"), [(4, 9, 9), (4, 0, 41), (4, 2, 15), (7, 9, 6)])
def test_drafts_change_nothing_but_the_steps(count: int, wrong: int, steps: int, page_size: int, cache: bool) -> None:
    scheduler, kv = make(pages=60, page_size=page_size, cache=cache)
    one = sequence(0, [1, 2, 3], 41)
    one.drafter = Guesses(kv, count, wrong)
    scheduler.add(one)
    kv.run()
    assert kv.outputs[0] == kv.expected([1, 2, 3], 41)
    # the prompt's step gives one token, each other one a token beyond the drafts that were right
    assert scheduler.counters.steps in (steps, steps + 1)
    assert one.accepted == 41 - scheduler.counters.steps
    if scheduler.tree is not None:  # only what was verified is there
        cached = scheduler.tree.peek(one.tokens[: one.size])[0]
        assert scheduler.tree.evictable_tokens == cached >= 43 // page_size * page_size - page_size


def test_drafts_take_nobodys_place() -> None:
    """In a pool that is just large enough for what must run, and in a step that is full."""
    scheduler, kv = make(pages=27, chunk=64, cache=False)
    for uid, new in enumerate([14, 10]):  # 26 pages when the second one ends
        one = sequence(uid, [uid] * 4, new)
        if not uid:
            one.drafter = Guesses(kv, 8, 0)
        scheduler.add(one)
    kv.run()
    assert scheduler.counters.preemptions == 0 and scheduler.counters.drafted > 0
    scheduler, kv = make(pages=4000, chunk=640, max_running=64)
    for uid in range(40):
        one = sequence(uid, [uid] * 4, 6 + uid)
        one.drafter = Guesses(kv, 8, 9)
        scheduler.add(one)
    batch = None
    while scheduler.has_work:
        before = len(scheduler.running)
        batch = kv.step()
        assert batch is not None and (not before or batch.tokens <= max(16, before))
    assert scheduler.counters.drafted > 0
    assert kv.outputs == {uid: kv.expected([uid] * 4, 6 + uid) for uid in range(40)}


def test_a_step_that_failed_with_drafts_is_tried_without() -> None:
    scheduler, kv = make()
    one = sequence(0, [1, 2, 3], 9)
    one.drafter = Guesses(kv, 3, 1)
    scheduler.add(one)
    kv.step()
    batch = kv.step(fail=True)
    assert batch is not None and one.phase is Phase.WAITING and not one.drafts
    scheduler.check_integrity()
    batch = kv.step()
    assert batch is not None and batch.tokens == 1
    kv.run()
    assert kv.outputs[0] == kv.expected([1, 2, 3], 9)
    one = sequence(1, [3, 2, 1], 9)
    scheduler.add(one)
    kv.step(fail=True)
    assert one.phase is Phase.FINISHED


def test_priority_runs_smaller_numbers_first() -> None:
    scheduler, kv = make(max_running=1, chunk=4, schedule_policy="priority")
    order = [3, 1, 2, 0]
    for uid, priority in enumerate(order):
        scheduler.add(sequence(uid, [uid, uid], 1, priority=priority))
    kv.run()
    assert list(kv.outputs) == sorted(range(4), key=lambda uid: order[uid])


def test_dfs_weight_goes_down_the_heaviest_branch_first() -> None:
    scheduler, kv = make(pages=60, max_running=1, chunk=50, schedule_policy="dfs-weight")
    for uid, prompt in enumerate([[1, 1, 1], [2, 2, 2], [2, 2, 3]]):  # what is cached
        scheduler.add(sequence(uid, prompt, 0))
    kv.run()
    prompts = [[1, 1, 1, 5], [2, 2, 2, 5], [2, 2, 3, 5], [2, 2, 2, 6]]
    waiting = [sequence(uid, prompt, 1) for uid, prompt in enumerate(prompts)]
    ordered = order("dfs-weight", waiting, scheduler.tree, step=0, max_wait_steps=10)
    assert [s.uid for s in ordered] == [1, 3, 2, 0]


def test_ten_thousand_random_aborts_leave_every_lock_at_zero() -> None:
    rng = np.random.default_rng(0)
    scheduler, kv = make(pages=120, chunk=16, max_running=12)
    live: dict[int, Sequence] = {}
    aborted, uid = 0, 0
    while aborted < 10_000:
        while len(live) < 20:
            live[uid] = sequence(
                uid, [int(t) for t in rng.integers(0, 3, rng.integers(1, 30))], int(rng.integers(0, 20))
            )
            scheduler.add(live[uid])
            uid += 1
        if rng.random() < 0.3:
            kv.step()
        for _ in range(int(rng.integers(1, 8))):
            victim = live.pop(int(rng.choice(list(live))))
            aborted += 1
            scheduler.finish(victim)
        if aborted % 50 == 0:
            scheduler.check_integrity()
        for done in [u for u, s in live.items() if not s.remaining and s.phase.value == "finished"]:
            del live[done]
    for victim in live.values():
        scheduler.finish(victim)
    scheduler.check_integrity()
    assert scheduler.tree is not None and scheduler.tree.total_locks == 0 and scheduler.tree.protected_tokens == 0
    assert scheduler.pool.free_pages + scheduler.tree.evictable_tokens == 120


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("chunk", [4, 16])
def test_a_sequence_that_always_fails_late_ends_alone_and_the_others_finish(cache: bool, chunk: int) -> None:
    scheduler, kv = make(pages=400, chunk=chunk, cache=cache)
    culprit = [*range(100, 140), 99, *range(50)]
    prompts = {0: culprit, 1: [1, 2, 3], 2: [100, 101, 7], 3: [4] * 30}
    for uid, prompt in prompts.items():
        scheduler.add(sequence(uid, prompt, 8))
    for _ in range(400):
        if not scheduler.has_work:
            break
        batch = kv.step(poison=99)
        assert batch is not None, "work is left but nothing was scheduled"
        scheduler.check_integrity()
    assert not scheduler.has_work
    assert kv.outputs == {uid: kv.expected(prompts[uid], 8) for uid in (1, 2, 3)}


def test_a_failed_step_keeps_the_kv_that_was_there_before() -> None:
    scheduler, kv = make(pages=400, chunk=64)
    for uid in range(3):
        scheduler.add(sequence(uid, [uid] * 10, 30))
    for _ in range(20):
        kv.step()
    kv.step(fail=True)
    kv.run()
    assert scheduler.counters.recomputed == 0
    assert kv.outputs == {uid: kv.expected([uid] * 10, 30) for uid in range(3)}


def test_nobody_starves_behind_higher_priorities() -> None:
    scheduler, kv = make(pages=60, chunk=4, max_running=1, schedule_policy="priority", max_wait_steps=30)
    low = sequence(0, [9, 9, 9], 1, priority=5)
    scheduler.add(low)
    for uid in range(1, 400):
        scheduler.add(sequence(uid, [uid, 2], 1, priority=0))
        scheduler.add(sequence(1000 + uid, [uid, 3], 1, priority=0))
        kv.step()
        if not low.remaining:
            break
    assert not low.remaining and uid < 60


def test_a_prefill_under_way_takes_what_another_one_computes_meanwhile() -> None:
    scheduler, kv = make(pages=200, chunk=8, max_running=4)
    history = list(range(30))
    scheduler.add(sequence(0, history, 20))
    for _ in range(22):
        kv.step()
    first = [*history, *kv.expected(history, 20)]
    scheduler.add(sequence(1, [*first[:49], 7, 7], 1))  # begins with what sequence 0 is still generating
    kv.run()
    assert kv.outputs[1] == kv.expected([*first[:49], 7, 7], 1)
    assert scheduler.counters.computed_prompt < 30 + 51 - 30


def test_a_step_with_no_budget_left_still_admits_what_is_cached_whole() -> None:
    scheduler, kv = make(pages=400, chunk=8, max_running=8)
    scheduler.add(sequence(0, [5, 6, 7], 0))
    kv.run()
    scheduler.add(sequence(1, list(range(20, 90)), 1))
    kv.step()
    scheduler.add(sequence(2, [5, 6, 7], 1))
    batch = kv.step()
    assert batch is not None and [s.uid for s in batch.sampled] == [2]
