"""What must hold of a scheduler, its tree and its pool together, between any two steps. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from radixrt.cache.page_pool import IntArray
from radixrt.scheduler.sequence import Phase

if TYPE_CHECKING:
    from radixrt.scheduler.scheduler import Scheduler


def check_integrity(scheduler: Scheduler) -> None:
    """Raises AssertionError where an invariant of the scheduler, the tree or the pool does not hold. O(pool)."""
    scheduler.programs.check_integrity(scheduler.waiting)
    owned: list[IntArray] = []
    for sequence in scheduler.running.values():
        assert sequence.phase is Phase.RUNNING
        ahead = max((flight.get(sequence.uid, 0) for flight in scheduler.flights), default=0)
        assert sequence.computed <= sequence.owned, "token ranges are out of order"
        assert sequence.in_tree <= max(sequence.computed, ahead), "the tree holds what no step computes"
        assert sequence.source < 0, "a token is awaited beyond the scheduling of a step"
        assert sequence.computed <= sequence.size and not sequence.drafts, "drafts were left behind by a step"
        assert sequence.owned % scheduler.pool.page_size == 0 == sequence.in_tree % scheduler.pool.page_size
        owned.append(sequence.slots[sequence.in_tree : sequence.owned])
    for sequence in scheduler.suspects[:1]:
        assert sequence.phase is not Phase.RUNNING or sequence.uid in scheduler.running
    for sequence in (*scheduler.waiting.values(), *scheduler.preempted, *scheduler.suspects[1:]):
        assert sequence.phase is Phase.WAITING and sequence.node is None and sequence.owned == sequence.drafts == 0
    owned.extend(scheduler.retired)
    if scheduler.tree is not None:
        scheduler.tree.check_integrity()
        assert scheduler.tree.total_locks == len(scheduler.running) + len(scheduler.leases), (
            "locks without a sequence or a lease"
        )
        owned.append(scheduler.tree.slots())
    held = np.concatenate(owned) if owned else np.empty(0, dtype=np.int32)
    assert len(np.unique(held)) == len(held), "a slot is held twice"
    pages = held[:: scheduler.pool.page_size] // scheduler.pool.page_size if scheduler.pool.page_size > 1 else held
    every = np.concatenate([scheduler.pool.free_page_ids(), pages])
    assert len(every) == scheduler.pool.pages and len(np.unique(every)) == scheduler.pool.pages, (
        "pages lost or held twice"
    )
    for sequence in scheduler.running.values():
        if scheduler.tree is not None and sequence.node is not None:
            node, path = sequence.node, []
            while node.parent is not None:
                path.append(node.slots)
                node = node.parent
            mine = np.concatenate(path[::-1]) if path else held[:0]
            assert np.array_equal(mine, sequence.slots[: sequence.in_tree]), "a sequence and the tree disagree"
