"""Drafter owns what is guessed of one sequence's next tokens, and for how long guessing pays.

Guesses come from what followed this very prefix before (the radix tree), else from what followed the last tokens earlier in the
sequence itself (prompt lookup: Saxena 2023). No guess is ever taken for a result: the step that computes them samples every position
as it would without them, see ``Scheduler``. So a wrong one costs its row of the step, and nothing here needs to be right:
a place in the tree may be stale.

Invariants: a proposal costs O(new tokens + proposed tokens), whatever the length of the sequence, but for the first one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixrt.cache.page_pool import IntArray
from radixrt.cache.radix_tree import Node, RadixTree

_GRAMS = (4, 3, 2)  # lengths of what is looked up in the sequence itself, the first that is found counts
_WINDOW = 8192  # tokens of a prompt, its last ones, that are looked through
_FEW = 2  # tokens of the first proposal, and of one after a pause
_WEIGHT = 0.3  # of the newest proposal in the running share
_PAUSES = (16, 64)  # steps without a proposal after some that did not pay: at first, and at most
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_NONE: IntArray = np.empty(0, dtype=np.int32)


class Drafter:
    """Proposes the next tokens of one sequence.

    Args:
        most: tokens of a proposal at most, at least 1.
    """

    __slots__ = (
        "_accepted",
        "_count",
        "_grams",
        "_indexed",
        "_pause",
        "_pauses",
        "_place",
        "_proposed",
        "_seen",
        "_share",
        "most",
        "rate",
    )

    def __init__(self, most: int) -> None:
        self.most = most
        self.rate = 0.5  # of the proposed tokens, how many were right lately
        self._count = min(_FEW, most)
        self._pause = 0  # steps still to come without a proposal
        self._pauses = _PAUSES[0]
        self._share = 0.0  # of the last proposal that had to be right
        self._proposed = self._accepted = 0  # tokens of the last proposal; accepted ones of the sequence before it
        self._grams: tuple[dict[int, int], ...] = tuple(
            {} for _ in _GRAMS
        )  # n tokens -> where what follows them begins
        self._indexed = 0  # positions whose preceding tokens are in ``_grams``
        self._place: tuple[Node, int] | None = None  # in the tree, see ``RadixTree.follow``
        self._seen = -1  # tokens up to that place; -1: not looked yet

    def propose(
        self,
        tokens: IntArray,
        accepted: int,
        most: int,
        share: float,
        tree: RadixTree | None,
        node: Node | None,
        in_tree: int,
    ) -> IntArray:
        """What may follow ``tokens``, at most ``most`` tokens; empty: nothing is known, or it does not pay now.

        Args:
            tokens: all of the sequence so far.
            accepted: how many proposed tokens of this sequence were right, ever.
            share: of the proposed tokens that must be right for it to pay.
            node, in_tree: where the first ``in_tree`` of its tokens end in ``tree``.
        """
        if self._proposed:
            self._learn(accepted - self._accepted)
        self._accepted, self._proposed, self._share = accepted, 0, share
        if self._pause:
            self._pause -= 1
            return _NONE
        count = min(self._count, most)
        if count <= 0:
            return _NONE
        found = self._from_tree(tokens, count, tree, node, in_tree) if tree is not None and node is not None else _NONE
        if not len(found):
            found = self._from_text(tokens, count)
        self._proposed = len(found)
        return found

    def _learn(self, accepted: int) -> None:
        """Twice as many next time while all are right; none for a while when too few are."""
        self.rate += _WEIGHT * (accepted / self._proposed - self.rate)
        if accepted == self._proposed:
            self._count = min(self.most, 2 * self._count)
            self._pauses = _PAUSES[0]
        elif self.rate >= self._share:
            self._count = min(self.most, max(_FEW, accepted + 1))
        else:
            self._count = min(self.most, _FEW)
            self._pause, self._pauses = self._pauses, min(2 * self._pauses, _PAUSES[1])

    def _from_tree(self, tokens: IntArray, count: int, tree: RadixTree, node: Node, in_tree: int) -> IntArray:
        if self._seen < 0:
            self._place = tree.follow((node, 0), tokens[in_tree:])
        elif self._place is not None:
            self._place = tree.follow(self._place, tokens[self._seen :])
        self._seen = len(tokens)
        return tree.continuation(self._place, count) if self._place is not None else _NONE

    def _from_text(self, tokens: IntArray, count: int) -> IntArray:
        size = len(tokens)
        if not self._indexed:
            self._indexed = max(0, size - _WINDOW)
        start = -1
        for length, grams in zip(_GRAMS, self._grams, strict=True):
            first = max(length, self._indexed)
            if first > size:
                continue
            keys: npt.NDArray[np.uint64] = np.zeros(size - first + 1, dtype=np.uint64)  # of what precedes first..size
            for at in range(length):
                keys = keys * _FACTOR + tokens[first - length + at : size - length + at + 1].astype(np.uint64)
            *known, last = keys.tolist()
            grams.update(zip(known, range(first, size), strict=True))
            if start < 0:
                start = grams.get(last, -1)
        self._indexed = size
        if start < 0:
            return _NONE
        return np.resize(tokens[start:], count)  # what repeats is taken to go on repeating
