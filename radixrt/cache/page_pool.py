"""PagePool owns the page numbers of the KV store: each is free, or held by exactly one holder (a request or the tree).

A *page* is ``page_size`` consecutive *slots*; a slot is the place of one token's keys and values. Where slots lie together in the
KV store, the pages of such a *cluster* go to one holder as far as that can be had: whoever asks continues the cluster it ends in, then
gets whole clusters, and what is left of clusters that others have only when there is no whole one. Clusters are handed out lowest first
and reused last-in first-out, so memory that was never needed is never touched.

Invariants: ``_whole`` names exactly the clusters all of whose pages are free; ``_count`` is the number of free pages of each cluster.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]


class PoolExhausted(RuntimeError):
    """More pages were asked for than are free: the scheduler did not make room first."""


class PagePool:
    """``pages`` pages of ``page_size`` slots.

    Args:
        pages: number of pages, at least 1.
        page_size: tokens of one page.
        cluster: pages that lie together; with 1 it does not matter who has which.
    """

    def __init__(self, pages: int, page_size: int = 1, cluster: int = 1) -> None:
        self.pages = pages
        self.page_size = page_size
        self.cluster = cluster
        clusters, whole = -(-pages // cluster), pages // cluster
        self._is_free = np.zeros((clusters, cluster), dtype=np.bool_)
        self._is_free.reshape(-1)[:pages] = True
        self._count: IntArray = self._is_free.sum(axis=1, dtype=np.int32)
        self._whole: IntArray = np.zeros(clusters, dtype=np.int32)  # a stack of ``_whole_count``, the lowest on top
        self._whole[:whole] = np.arange(whole - 1, -1, -1)
        self._whole_count = whole
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

    def shortage(self, pages: int) -> int:
        """How many more should be free for ``pages`` to be had: those that are missing, or as many as make them whole clusters while
        no more than an eighth of all pages lie about in pieces of clusters."""
        whole = self._whole_count * self.cluster
        return max(pages - self._free, min(pages - whole, self.pages // 8 - (self._free - whole)))

    def alloc(self, pages: int, behind: int = -1) -> IntArray:
        """Take ``pages`` pages; returns their slots, shape ``[pages * page_size]``.

        Args:
            behind: the slot that they will follow, if any.

        Raises:
            PoolExhausted: fewer are free; nothing is taken.
        """
        if pages > self._free:
            raise PoolExhausted(f"{pages} pages asked for, {self._free} of {self.pages} free")
        parts = []
        if self.cluster > 1 and behind >= 0:
            parts.append(self._take(self._behind(behind // self.page_size, pages)))
            pages -= len(parts[0])
        count = min(self._whole_count, -(-pages // self.cluster))
        if count:
            self._whole_count -= count
            first = self._whole[self._whole_count : self._whole_count + count][::-1] * np.int32(self.cluster)
            every: IntArray = np.add.outer(first, np.arange(self.cluster, dtype=np.int32)).ravel()
            parts.append(self._take(every[:pages]))
            pages -= len(parts[-1])
        if pages:
            parts.append(self._take(self._pieces(pages)))
        taken = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        if self.page_size == 1:
            return taken
        slots = taken[:, None] * np.int32(self.page_size) + np.arange(self.page_size, dtype=np.int32)
        return slots.astype(np.int32).ravel()

    def free(self, slots: IntArray) -> None:
        """Give back whole pages, named by all their slots in order.

        Raises:
            RuntimeError: some are free.
        """
        pages = slots if self.page_size == 1 else slots[:: self.page_size] // self.page_size
        flat = self._is_free.reshape(-1)
        clusters = np.unique(pages // self.cluster)
        more = self._free + len(pages)
        if flat[pages].any():
            raise RuntimeError(f"{len(pages)} pages freed with {self._free} of {self.pages} free: some twice")
        flat[pages] = True
        self._free -= int(self._count[clusters].sum())
        self._count[clusters] = self._is_free[clusters].sum(axis=1)
        self._free += int(self._count[clusters].sum())
        if self._free != more:
            raise RuntimeError(f"{len(pages)} pages freed: some twice")
        whole = clusters[self._count[clusters] == self.cluster]  # none of them was before
        self._whole[self._whole_count : self._whole_count + len(whole)] = whole[::-1]
        self._whole_count += len(whole)

    def free_page_ids(self) -> IntArray:
        """The free pages (for integrity checks)."""
        return np.flatnonzero(self._is_free).astype(np.int32)

    def _take(self, pages: IntArray) -> IntArray:
        self._is_free.reshape(-1)[pages] = False
        clusters = pages // self.cluster
        np.subtract.at(self._count, clusters, 1)
        self._free -= len(pages)
        return pages

    def _behind(self, page: int, most: int) -> IntArray:
        """Free pages right behind ``page`` in its cluster."""
        at = page % self.cluster + 1
        rest = self._is_free[page // self.cluster, at : at + most]
        count = len(rest) if rest.all() else int(rest.argmin())
        return np.arange(page + 1, page + 1 + count, dtype=np.int32)

    def _pieces(self, pages: int) -> IntArray:
        """Free pages of clusters that are not whole, those with many first."""
        clusters = np.flatnonzero(self._count)
        for least in (3 * self.cluster // 4, self.cluster // 2, self.cluster // 4):
            many = np.flatnonzero(self._count >= max(1, least))
            if self._count[many].sum() >= pages:
                clusters = many
                break
        clusters = clusters[: np.searchsorted(self._count[clusters].cumsum(), pages) + 1]
        cells = np.flatnonzero(self._is_free[clusters])[:pages]
        return (clusters[cells // self.cluster] * self.cluster + cells % self.cluster).astype(np.int32)
