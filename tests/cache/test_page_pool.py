"""PagePool against a set of free pages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.cache.page_pool import PagePool, PoolExhausted


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_every_page_has_one_holder(page_size: int, moves: list[tuple[bool, int]]) -> None:
    pool = PagePool(12, page_size)
    held: list[np.ndarray] = []
    for take, count in moves:
        if take:
            if count > pool.free_pages:
                with pytest.raises(PoolExhausted):
                    pool.alloc(count)
                continue
            slots = pool.alloc(count)
            assert len(slots) == count * page_size
            assert all(slots[i] == slots[i - i % page_size] + i % page_size for i in range(len(slots)))
            held.append(slots)
        elif held:
            pool.free(held.pop(count % len(held)))
        pages = [int(s) // page_size for slots in held for s in slots[::page_size]]
        assert sorted([*pages, *pool.free_page_ids().tolist()]) == list(range(12))


def test_lowest_pages_first_so_that_memory_is_touched_late() -> None:
    pool = PagePool(100)
    assert pool.alloc(3).tolist() == [0, 1, 2]
    pool.free(np.array([0, 1, 2], dtype=np.int32))
    assert pool.alloc(2).tolist() == [0, 1]


def test_freeing_more_than_there_is_raises() -> None:
    pool = PagePool(4)
    with pytest.raises(RuntimeError, match="some twice"):
        pool.free(np.array([0], dtype=np.int32))
