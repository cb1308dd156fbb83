"""What the scheduler makes of what requests say about their programs: order, eviction, admission."""

import itertools

import numpy as np
import pytest

from radixrt.cache.page_pool import PagePool
from radixrt.cache.radix_tree import RadixTree
from radixrt.scheduler.hints import ProgramHint
from radixrt.scheduler.policy import order_programs
from radixrt.scheduler.programs import Programs
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.sequence import Sequence
from tests.scheduler.fake_kv import FakeKV


def make(pages: int = 400, **kwargs) -> tuple[Scheduler, FakeKV]:
    settings = {"chunk": 32, "max_running": 16, **kwargs}
    scheduler = Scheduler(PagePool(pages), RadixTree(), **settings)
    return scheduler, FakeKV(scheduler)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def sequence(uid: int, prompt: list[int], new: int, program: str = "", step: int = 0, **kwargs) -> Sequence:
    hint = ProgramHint(program, "f", 0, step, **kwargs) if program else None
    return Sequence(uid, array(prompt), len(prompt) + new, hint=hint)


class Chain:
    """Programs of several steps, each step the last one's text and a little more; the driver keeps their holds."""

    def __init__(self, scheduler: Scheduler, kv: FakeKV, *, steps: int = 4, prompt: int = 10, new: int = 6) -> None:
        self.scheduler, self.kv, self.steps, self.prompt, self.new = scheduler, kv, steps, prompt, new
        self.uids = itertools.count()
        self.at: dict[str, tuple[Sequence, int]] = {}
        self.holds: dict[str, object] = {}
        self.ended: list[str] = []
        self.unique: set[tuple[int, ...]] = set()

    def send(self, id: str, state: list[int], step: int) -> None:
        prompt = [*state, *(100 * (int(id) + 1) + step for _ in range(self.prompt))]
        one = sequence(next(self.uids), prompt, self.new, id, step, remaining=self.steps - step - 1)
        self.at[id] = (one, step)
        self.scheduler.add(one)

    def follow(self) -> None:
        """After a step of the scheduler: what ended is followed by the next step of its program."""
        for id, (one, step) in list(self.at.items()):
            if one.remaining:
                continue
            del self.at[id]
            state = one.tokens[: one.size].tolist()
            self.unique |= {tuple(state[:end]) for end in range(1, len(state))}  # the last token is never computed
            hold = self.scheduler.hold(array(state), "", id)
            if id in self.holds:
                self.scheduler.release(self.holds.pop(id), id)  # type: ignore[arg-type]
            if hold is not None:
                self.holds[id] = hold
            if step + 1 < self.steps:
                self.send(id, state, step + 1)
            else:
                self.scheduler.end_program(id)
                self.ended.append(id)

    def run(self) -> None:
        while self.scheduler.has_work:
            assert self.kv.step() is not None, "work is left but nothing was scheduled"
            self.follow()
            self.scheduler.check_integrity()


def test_what_follows_goes_before_what_starts_and_siblings_stand_together() -> None:
    programs = Programs(100, enabled=True)
    arrivals = [
        sequence(0, [1], 1, "new", group="g"),
        sequence(1, [2], 1, "other"),
        sequence(2, [3], 1),
        sequence(3, [4], 1, "new", group="g"),
        sequence(4, [5], 1, "old", 2, group="g"),
        sequence(5, [6], 1, "older", 1),
        sequence(6, [7], 1, "old", 2, group="g"),
    ]
    for one in arrivals:
        programs.arrive(one)
    tree = RadixTree()
    tree.insert(array([2]), array([0]))
    ordered = [s.uid for s in order_programs("lpm", programs, tree, 0, 10)]
    assert ordered == [4, 6, 5, 2, 1, 0, 3]
    arrivals[3].enqueued_step = -10
    assert order_programs("lpm", programs, tree, 0, 10)[0].uid == 3


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "fcfs", "priority"])
def test_the_order_without_hints_is_that_of_the_policy(policy: str) -> None:
    found = []
    for hints in (True, False):
        scheduler, kv = make(max_running=1, schedule_policy=policy, program_order=hints, program_admission=hints)
        for uid, prompt in enumerate([[1, 1], [2, 2], [1, 1, 3], [2, 2, 3], [1, 1, 4]]):
            scheduler.add(sequence(uid, prompt, 1))
        kv.run()
        found.append(list(kv.outputs))
    assert found[0] == found[1]
    assert (found[0] == [0, 2, 4, 1, 3]) == (policy == "lpm")


def test_a_started_program_is_not_lost_behind_a_long_queue_of_new_ones() -> None:
    scheduler, kv = make(max_running=1)
    for uid in range(300):
        scheduler.add(sequence(uid, [uid, 1], 1, f"new{uid}"))
    scheduler.add(sequence(300, [999, 1], 1, "old", step=1))
    kv.run()
    assert next(iter(kv.outputs)) == 300


def test_a_new_program_does_not_wait_for_a_queue_of_plain_requests_to_end() -> None:
    scheduler, kv = make(max_running=1)
    for uid in range(40):
        scheduler.add(sequence(uid, [uid, 1], 1))
    scheduler.add(sequence(40, [999, 1], 1, "late"))
    scheduler.add(sequence(41, [998, 1], 1, "later"))
    kv.run()
    assert list(kv.outputs)[:5] == [0, 40, 1, 41, 2]


def test_fcfs_uses_no_program_information() -> None:
    scheduler, kv = make(max_running=1, schedule_policy="fcfs")
    for uid in range(5):
        scheduler.add(sequence(uid, [uid, 1], 1, f"p{uid}", step=uid))
    kv.run()
    assert list(kv.outputs) == [0, 1, 2, 3, 4]
    assert scheduler.hold(array([0, 1])) is None


def test_what_a_live_program_holds_outlasts_what_was_used_later() -> None:
    for eviction in (True, False):
        scheduler, kv = make(pages=60, program_eviction=eviction)
        scheduler.add(sequence(0, list(range(20)), 1, "p"))
        kv.run()
        hold = scheduler.hold(array(list(range(20))), "", "p")
        assert (hold is not None) == eviction
        for uid in range(1, 10):
            scheduler.add(sequence(uid, [100 * uid] * 15, 1))
            kv.run()
        before = scheduler.counters.computed_prompt
        scheduler.add(sequence(10, [*range(20), 7], 1, "p", step=1))
        kv.run()
        assert scheduler.counters.computed_prompt - before == (1 if eviction else 21)
        scheduler.end_program("p")
        assert scheduler.tree is not None and scheduler.tree.held_tokens == 0


def test_programs_that_do_not_fit_together_are_computed_once_all_the_same() -> None:
    computed = {}
    for hints in (True, False):
        scheduler, kv = make(
            pages=160, program_order=hints, program_eviction=hints, program_admission=hints, max_wait_steps=10_000
        )
        chain = Chain(scheduler, kv)
        for id in range(8):  # 64 tokens each
            chain.send(str(id), [], 0)
        chain.run()
        assert len(chain.ended) == 8
        computed[hints] = scheduler.counters.forward_tokens - len(chain.unique)
    assert computed[True] == 0 < computed[False]


def test_no_program_waits_longer_than_max_wait_steps() -> None:
    scheduler, kv = make(pages=160, max_wait_steps=30)
    chain = Chain(scheduler, kv, steps=40, prompt=1, new=2)
    for id in range(8):
        chain.send(str(id), [], 0)
    firsts = {id: one for id, (one, _) in chain.at.items()}
    for _ in range(34):
        kv.step()
        chain.follow()
    assert all(one.generated for one in firsts.values())


def test_a_request_without_a_program_is_not_held_up_by_programs() -> None:
    scheduler, kv = make(pages=160, max_wait_steps=10_000)
    chain = Chain(scheduler, kv)
    for id in range(200):
        chain.send(str(id), [], 0)
    kv.step()
    assert len(scheduler.programs.new) > 128  # more than a policy looks at
    scheduler.add(sequence(1000, [1, 2, 3], 1))
    kv.step()
    assert 1000 in kv.outputs


@pytest.mark.parametrize("release", [True, False])
def test_what_is_held_is_no_room_for_a_new_program(release: bool) -> None:
    scheduler, kv = make(pages=100)
    scheduler.add(sequence(0, list(range(60)), 1, "idle", remaining=0))
    kv.run()
    hold = scheduler.hold(array(list(range(60))), "", "idle")
    scheduler.add(sequence(1, [500] * 4, 20, "busy", remaining=0))
    kv.step()
    scheduler.add(sequence(2, [600] * 30, 1, "late", remaining=0))
    if release and hold is not None:
        scheduler.release(hold, "idle")
    kv.step()
    assert (2 in kv.outputs) == release


def test_a_program_that_never_ends_gives_up_its_claims() -> None:
    scheduler, kv = make(pages=100, max_wait_steps=50)
    scheduler.add(sequence(0, list(range(40)), 10, "lost", remaining=9))  # never followed, never ended
    kv.run()
    hold = scheduler.hold(array(list(range(40))), "", "lost")
    scheduler.add(sequence(1, [500] * 4, 4, "a"))
    assert kv.step() is not None and 1 in kv.outputs, "an idle program blocks another one"
    scheduler.add(sequence(2, [600] * 4, 4, "b"))
    kv.step()
    assert 2 not in kv.outputs, "its growth should have been reckoned with"
    kv.run()
    for uid in range(3, 60):
        scheduler.add(sequence(uid, [uid], 1))
        kv.step()
    assert scheduler.tree is not None and scheduler.tree.held_tokens == 0 and scheduler.programs.growth == 0
    assert hold is not None
    scheduler.release(hold, "lost")
    scheduler.check_integrity()


def test_nothing_is_left_of_programs_that_ended() -> None:
    scheduler, kv = make()
    chain = Chain(scheduler, kv, steps=2)
    for id in range(50):
        chain.send(str(id), [], 0)
    chain.run()
    programs = scheduler.programs
    assert not programs._programs and not programs._idle and programs.growth == 0 and not programs.busy
    assert len(programs._names) == 1 and programs._names["f"].own == pytest.approx(32)
    assert scheduler.tree is not None and scheduler.tree.held_tokens == 0


def test_what_a_name_needs_is_learnt_without_what_its_programs_share() -> None:
    scheduler, kv = make(pages=2000)
    shared = list(range(50))
    for uid in range(6):
        scheduler.add(sequence(uid, [*shared, 100 + uid, 7, 7], 5, str(uid)))
    kv.run()
    for uid in range(6):
        scheduler.end_program(str(uid))
    late = sequence(6, [*shared, 106, 7, 7], 5, "6")
    scheduler.add(late)
    assert scheduler.programs.need(late) == 8


def test_an_id_that_is_used_again_names_another_program() -> None:
    """What the ended one still has waiting is nobody's, and starts nothing for the new one."""
    scheduler, kv = make(max_running=1)
    scheduler.add(sequence(0, [1] * 5, 2, "r"))
    scheduler.end_program("r")
    scheduler.add(sequence(1, [2] * 5, 2, "r"))
    kv.step()
    scheduler.check_integrity()
    assert list(scheduler.programs.new) == [1]
    kv.run()
