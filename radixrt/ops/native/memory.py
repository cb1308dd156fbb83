"""Memory for weights and KV: anonymous pages, large ones where the system has them, each block at a cache line.

Large pages are asked for because a processor fetches ahead no further than a page: 98 MB of weights are 24,000 small ones a step.
"""

from __future__ import annotations

import mmap

_ALIGN = 64
_PIECE = 2 * 2**20


def reserve(size: int) -> mmap.mmap:
    """``size`` bytes of zeros, at least one; they take memory where they are written.

    Raises:
        MemoryError: the system does not promise so many.
    """
    try:
        memory = mmap.mmap(-1, max(size, 1))
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error.strerror}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            pass
    return memory


class Arena:
    """Blocks out of a few large reservations, which live as long as any of their blocks."""

    def __init__(self, piece: int = 16 * _PIECE) -> None:
        self._piece = piece
        self._left = memoryview(b"")

    def take(self, size: int) -> memoryview:
        """A writable block of ``size`` bytes."""
        padded = -(-size // _ALIGN) * _ALIGN
        if padded > len(self._left):
            self._left = memoryview(reserve(max(self._piece, -(-padded // _PIECE) * _PIECE)))
        block, self._left = self._left[:size], self._left[padded:]
        return block
