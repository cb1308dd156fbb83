"""Where slots lie together in the KV store, a sequence has whole clusters of them, however long the pool has been in use."""

import numpy as np
import pytest

from radixrt.cache.page_pool import PagePool
from radixrt.cache.radix_tree import RadixTree
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.sequence import Phase, Sequence


def touched(slots: np.ndarray) -> int:
    return len(np.unique(slots // 16))


def after_many(cluster: int, shared: int, requests: int = 150) -> tuple[float, int]:
    """(clusters of 16 slots that the last sequences have slots of, for each 16 of theirs; tokens that stay cached)"""
    random = np.random.default_rng(0)
    tree = RadixTree()
    scheduler = Scheduler(PagePool(4096, 1, cluster), tree, chunk=512, max_running=8)
    prefix = random.integers(0, 30000, shared)
    running: set[int] = set()
    added = 0
    last: list[tuple[int, int]] = []
    while len(last) < requests:
        while len(running) < 8:
            prompt = np.concatenate((prefix, random.integers(0, 30000, int(random.integers(20, 300)))))
            limit = len(prompt) + int(random.integers(10, 200))
            scheduler.add(Sequence(added, prompt.astype(np.int32), limit))
            running.add(added)
            added += 1
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.commit(batch)
        for sequence in batch.sampled:
            if sequence.phase is Phase.RUNNING and sequence.remaining and sequence.computed == sequence.size:
                sequence.append(int(random.integers(0, 30000)))
            if sequence.phase is Phase.RUNNING and not sequence.remaining:
                last.append((touched(sequence.slots[: sequence.computed]), sequence.computed))
                scheduler.finish(sequence)
                running.remove(sequence.uid)
        if added % 50 == 0:
            scheduler.check_integrity()
    clusters, slots = map(sum, zip(*last[-60:], strict=True))
    return 16 * clusters / slots, tree.evictable_tokens


@pytest.mark.parametrize("shared", [0, 100])
def test_a_sequence_has_whole_clusters_after_many_requests(shared: int) -> None:
    together, cached = after_many(16, shared)
    scattered, most = after_many(1, shared)
    assert together < 1.3 and scattered > 2
    assert cached > 0.8 * most
