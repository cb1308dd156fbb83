"""PagePool against a set of free pages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.cache.page_pool import PagePool, PoolExhausted


@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 4, 16]),
    st.integers(1, 40),
    st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.booleans()), max_size=60),
)
def test_every_page_has_one_holder(
    page_size: int, cluster: int, pages: int, moves: list[tuple[bool, int, bool]]
) -> None:
    pool = PagePool(pages, page_size, cluster)
    held: list[np.ndarray] = []
    for take, count, onwards in moves:
        if take:
            behind = int(held[-1][-1]) if onwards and held and len(held[-1]) else -1
            if count > pool.free_pages:
                with pytest.raises(PoolExhausted):
                    pool.alloc(count, behind)
                continue
            slots = pool.alloc(count, behind)
            assert slots.dtype == np.int32 and len(slots) == count * page_size
            assert all(slots[i] == slots[i - i % page_size] + i % page_size for i in range(len(slots)))
            held.append(slots)
        elif held:
            gone = held.pop(count % len(held))
            pool.free(gone)
            for again in (gone, np.concatenate((gone, gone))) if len(gone) else ():
                with pytest.raises(RuntimeError, match="some twice"):
                    pool.free(again)
        taken = [int(s) // page_size for slots in held for s in slots[::page_size]]
        free = pool.free_page_ids().tolist()
        assert sorted([*taken, *free]) == list(range(pages)) and pool.free_pages == len(free)
        whole = sum(set(range(c, c + cluster)) <= set(free) for c in range(0, pages, cluster))
        scattered = len(free) - whole * cluster
        for wanted in (1, 7, pages):
            short = pool.shortage(wanted)
            assert short >= wanted - len(free)
            if cluster == 1:
                assert short == wanted - len(free)
            if short > max(0, wanted - len(free)):
                assert whole * cluster < wanted and scattered + short <= pages // 8


def test_lowest_pages_first_so_that_memory_is_touched_late() -> None:
    for cluster in (1, 4):
        pool = PagePool(100, 1, cluster)
        assert pool.alloc(3).tolist() == [0, 1, 2]
        pool.free(np.array([0, 1, 2], dtype=np.int32))
        assert pool.alloc(2).tolist() == [0, 1]


def test_a_cluster_goes_to_one_holder_as_far_as_that_can_be_had() -> None:
    pool = PagePool(20, 1, 4)
    a, b = pool.alloc(3), pool.alloc(5)
    assert (a.tolist(), b.tolist()) == ([0, 1, 2], [4, 5, 6, 7, 8])
    assert pool.alloc(2, behind=2).tolist() == [3, 12]  # on in its cluster, then a whole one
    assert pool.alloc(1, behind=8).tolist() == [9]
    assert pool.alloc(1, behind=3).tolist() == [16]  # the cluster of 3 ends there
    assert pool.alloc(1, behind=16).tolist() == [17]
    pool.free(np.array([5, 6, 7], dtype=np.int32))
    assert pool.alloc(2).tolist() == [5, 6]  # no cluster is whole: of those with many
    pool.free(np.array([0, 1, 2, 3], dtype=np.int32))
    assert pool.alloc(4).tolist() == [0, 1, 2, 3]
    assert sorted(pool.alloc(8).tolist()) == [7, 10, 11, 13, 14, 15, 18, 19]
    assert pool.free_pages == 0
