"""PagePool owns the page numbers of the KV store: each is free, or held by exactly one holder (a request or the tree).

A *page* is ``page_size`` consecutive *slots*; a slot is the place of one token's keys and values. Pages are
handed out lowest first and reused last-in first-out, so memory that was never needed is never touched.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]


class PoolExhausted(RuntimeError):
    """More pages were asked for than are free: the scheduler did not make room first."""


class PagePool:
    """Free list of ``pages`` pages of ``page_size`` slots.

    Args:
        pages: number of pages, at least 1.
        page_size: tokens of one page.
    """

    def __init__(self, pages: int, page_size: int = 1) -> None:
        self.pages = pages
        self.page_size = page_size
        self._stack: IntArray = np.arange(pages - 1, -1, -1, dtype=np.int32)  # the top is the end
        self._free = pages

    @property
    def free_pages(self) -> int:
        return self._free

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return self.pages * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.page_size)

    def alloc(self, pages: int) -> IntArray:
        """Take ``pages`` pages; returns their slots, shape ``[pages * page_size]``.

        Raises:
            PoolExhausted: fewer are free; nothing is taken.
        """
        if pages > self._free:
            raise PoolExhausted(f"{pages} pages asked for, {self._free} of {self.pages} free")
        taken = self._stack[self._free - pages : self._free][::-1]
        self._free -= pages
        if self.page_size == 1:
            return taken.copy()
        first = taken[:, None] * np.int32(self.page_size)
        return (first + np.arange(self.page_size, dtype=np.int32)).astype(np.int32).ravel()

    def free(self, slots: IntArray) -> None:
        """Give back whole pages, named by all their slots in order."""
        pages = slots if self.page_size == 1 else slots[:: self.page_size] // self.page_size
        count = len(pages)
        if self._free + count > self.pages:
            raise RuntimeError(f"{count} pages freed with {self._free} of {self.pages} free: some twice")
        self._stack[self._free : self._free + count] = pages[::-1]
        self._free += count

    def free_page_ids(self) -> IntArray:
        """The free pages (for integrity checks)."""
        return self._stack[: self._free].copy()
