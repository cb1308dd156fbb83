"""Slots owns how much a job asks of its model at a time.

Invariants: at most ``count`` requests and ``tokens`` tokens are out, but always room for one; who waits is served in order of
priority, then of arrival, and nobody overtakes: a large one waits until it fits.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field

BEGUN, NEW = 0, 1  # priorities: parts of a document that has begun, before the next document


@dataclass(order=True)
class _Waiting:
    priority: int
    number: int
    cost: int = field(compare=False)
    ready: asyncio.Future[None] = field(compare=False)


class Slots:
    """Requests in flight.

    Args:
        count: most requests.
        tokens: most tokens of them all; ``None``: as many as they are.
    """

    def __init__(self, count: int, tokens: int | None = None) -> None:
        self.count, self.tokens = count, tokens
        self.used = self.used_tokens = 0
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()

    async def take(self, cost: int, priority: int = NEW) -> None:
        """Wait for the place of one request of ``cost`` tokens. Cancelled, it takes none."""
        waiting = _Waiting(priority, next(self._numbers), cost, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, waiting)
        self._serve()
        try:
            await waiting.ready
        except asyncio.CancelledError:
            if waiting.ready.done() and not waiting.ready.cancelled():
                self.give(cost)
            else:
                waiting.ready.cancel()
                self._serve()
            raise

    def give(self, cost: int) -> None:
        """The request that took ``cost`` is answered."""
        self.used -= 1
        self.used_tokens -= cost
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            if not first.ready.cancelled():
                full = self.tokens is not None and self.used_tokens + first.cost > self.tokens
                if self.used >= self.count or (self.used and full):
                    return
                self.used += 1
                self.used_tokens += first.cost
                first.ready.set_result(None)
            heapq.heappop(self._waiting)
