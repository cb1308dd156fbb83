"""Leases: what waits for a tool outlasts everything that could do without its room, for as long as the tool takes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.cache.page_pool import IntArray, PagePool
from radixrt.cache.radix_tree import RadixTree
from radixrt.scheduler.hints import ProgramHint
from radixrt.scheduler.leases import Leases
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.sequence import Sequence
from tests.scheduler.fake_kv import FakeKV


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ids(*tokens: int) -> IntArray:
    return np.array(tokens, dtype=np.int32)


def run(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


class Stand:
    """A scheduler with a clock."""

    def __init__(self, pages: int = 64, page_size: int = 1, leases: bool = True) -> None:
        tree = RadixTree(page_size)
        self.scheduler = Scheduler(PagePool(pages, page_size), tree, chunk=16, max_running=8, program_leases=leases)
        self.tree, self.leases, self.clock = tree, self.scheduler.leases, Clock()
        self.leases.clock = self.clock
        self.kv = FakeKV(self.scheduler)
        self.uid = 0

    def add(self, tokens: list[int], output: int = 1, program: str = "") -> Sequence:
        self.uid += 1
        hint = ProgramHint(program, program, 0, 0) if program else None
        sequence = Sequence(self.uid, ids(*tokens), len(tokens) + output, "", 0, hint=hint)
        self.scheduler.add(sequence)
        return sequence

    def cached(self, tokens: list[int]) -> int:
        return self.tree.peek(ids(*tokens), "")[0]


# ---- how long


@pytest.mark.parametrize(
    "waits, least, most",
    [
        ([], 10, 10),
        ([2.0], 2.0, 3.0),
        ([2.0] * 40, 2.0, 3.0),
        ([1.0] * 10 + [3.0], 3.0, 5.0),
        ([0.0], 0.5, 0.5),
        ([1e9], 60, 60),
        ([9.0] * 40 + [1.0] * 32, 1.0, 2.0),
    ],
    ids=["unknown", "once", "always", "the slow one counts", "at least", "at most", "what is long past is forgotten"],
)
def test_a_lease_is_a_little_longer_than_most_waits(waits: list[float], least: float, most: float) -> None:
    leases = Leases(RadixTree(), 100)
    for wait in waits:
        leases.learn("tool", wait)
    assert least <= leases.length(["tool"]) <= most


def test_the_slowest_of_several_tools_counts_and_namespaces_are_apart() -> None:
    leases = Leases(RadixTree(), 100)
    leases.learn("fast", 0.1)
    leases.learn("slow", 7.0)
    leases.learn("slow", 1.0, "other")
    assert leases.length(["fast", "slow"]) == leases.length(["slow"]) > leases.length(["fast"])
    assert leases.length(["slow"], "other") < 7.0


def test_what_is_remembered_is_bounded() -> None:
    leases = Leases(RadixTree(), 100)
    for i in range(3000):
        leases.learn(f"tool{i}", 1.0)
    assert len(leases._waits) <= 1024
    assert leases.length(["tool2999"]) < 2 < leases.length(["tool0"])


# ---- what is kept


@pytest.mark.parametrize("leases", [True, False])
def test_running_requests_take_what_is_held_and_not_what_is_leased(leases: bool) -> None:
    stand = Stand(leases=leases)
    own = run(1000, 24)
    stand.add(own, program="p")
    stand.kv.run()
    hold = stand.scheduler.hold(ids(*own), "", "p")
    lease = stand.leases.grant(ids(*own), "", ["tool"])
    assert hold is not None and (lease is not None) == leases
    for i in range(4):  # together more than the pool
        stand.add(run(2000 + 100 * i, 16), output=8)
    stand.kv.run()
    assert (stand.cached(own) == 24) == leases
    if lease is not None:
        stand.leases.end(lease, resumed=True)
        assert stand.leases.figures()["leases_resumed"] == 1 and stand.tree.total_locks == 0


def test_it_ends_with_its_time() -> None:
    stand = Stand()
    stand.add(run(1, 20))
    stand.kv.run()
    stand.leases.learn("tool", 2.0)
    lease = stand.leases.grant(ids(*run(1, 20)), "", ["tool"])
    assert lease is not None and 2.0 < lease.until < 4.0
    stand.clock.now = 2.0
    stand.scheduler.schedule()
    assert lease.node is not None
    stand.leases.extend(lease)  # the result came, and its request waits
    stand.clock.now = 4.0
    stand.scheduler.schedule()
    assert lease.node is not None
    stand.clock.now = 60.0
    stand.scheduler.schedule()
    assert lease.node is None and stand.leases.figures()["leases_expired"] == 1
    stand.leases.end(lease, resumed=True)
    assert stand.leases.figures()["leases_resumed"] == 0 and stand.tree.total_locks == 0


def test_it_is_given_up_where_nothing_else_could_go_on() -> None:
    stand = Stand()
    kept = [run(1000 * i, 20) for i in (1, 2)]
    for tokens in kept:
        stand.add(tokens)
        stand.kv.run()
        assert stand.leases.grant(ids(*tokens), "", ["tool"]) is not None
    one = stand.add(run(9000, 40), output=4)  # one of them must go, and not both
    stand.kv.run()
    assert stand.kv.outputs[one.uid] == stand.kv.expected(run(9000, 40), 4)
    assert stand.leases.figures()["leases_given_up"] == 1 and len(stand.leases) == 1
    whole = stand.add(run(7000, 60), output=4)
    stand.kv.run()
    assert len(stand.kv.outputs[whole.uid]) == 4 and len(stand.leases) == 0


def test_a_sequence_that_grows_gets_the_room_in_the_end() -> None:
    stand = Stand()
    stand.add(run(1000, 20))
    stand.kv.run()
    assert stand.leases.grant(ids(*run(1000, 20)), "", ["tool"]) is not None
    grown = stand.add(run(2000, 4), output=60)
    stand.kv.run()
    assert len(stand.kv.outputs[grown.uid]) == 60


def test_leases_that_fill_the_pool_block_nobody() -> None:
    stand = Stand(32)
    for tokens in (run(1000, 16), run(2000, 15), run(3000, 1)):
        one = stand.add(tokens, output=2)
        while not one.decoding:
            stand.kv.step()
        assert stand.leases.grant(ids(*tokens), "", ["tool"]) is not None  # while it runs, it costs nothing
        stand.scheduler.finish(one)
    assert stand.scheduler._available() == 0
    last = stand.add(run(4000, 1))
    stand.kv.run()
    assert len(stand.kv.outputs[last.uid]) == 1 and stand.leases.figures()["leases_given_up"] == 1


def test_leases_leave_room_for_others() -> None:
    stand = Stand()
    granted = []
    for i in range(3):
        stand.add(run(1000 * (i + 1), 20))
        stand.kv.run()
        granted.append(stand.leases.grant(ids(*run(1000 * (i + 1), 20)), "", ["tool"]))
    assert [lease is not None for lease in granted] == [True, True, False]
    figures = stand.leases.figures()
    assert figures["leased_tokens"] == 40 and figures["leases_refused"] == 1 and figures["leases"] == 2
    assert stand.leases.grant(ids(1, 2, 3), "nobody", ["tool"]) is None
    assert stand.leases.figures()["leases_refused"] == 1


def test_shared_prefixes_are_counted_once() -> None:
    stand = Stand()
    for i in range(4):
        tokens = run(1, 30) + run(100 * (i + 1), 4)
        stand.add(tokens)
        stand.kv.run()
        assert stand.leases.grant(ids(*tokens), "", ["tool"]) is not None
    assert stand.leases.figures()["leased_tokens"] == 46


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 4]))
def test_whatever_is_leased_everything_is_answered(seed: int, page_size: int) -> None:
    rng = random.Random(seed)
    stand = Stand(64 // page_size, page_size)
    live, prompts = [], []
    for _ in range(40):
        what = rng.random()
        if what < 0.4:
            prefix = rng.choice(prompts) if prompts and rng.random() < 0.6 else []
            tokens = (prefix + [rng.randrange(50) for _ in range(rng.randrange(1, 30))])[:40]
            prompts.append(tokens)
            stand.add(tokens, rng.randrange(1, 20))
        elif what < 0.6 and prompts:
            lease = stand.leases.grant(ids(*rng.choice(prompts)), "", [rng.choice("ab")])
            if lease is not None:
                live.append(lease)
        elif what < 0.7 and live:
            stand.leases.end(live.pop(rng.randrange(len(live))), resumed=rng.random() < 0.5)
        elif what < 0.8:
            stand.clock.now += rng.random() * 4
            stand.leases.learn(rng.choice("ab"), rng.random() * 3)
        else:
            stand.kv.step(fail=rng.random() < 0.1)
        stand.scheduler.check_integrity()
    stand.kv.run()
    for lease in live:
        stand.leases.end(lease)
    figures = stand.leases.figures()
    assert figures["leases"] == figures["leased_tokens"] == stand.tree.total_locks == 0
