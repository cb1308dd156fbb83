"""Leases keep the KV of programs that wait for tools: locked, unlike what is merely held, but for a time and never at others' cost.

How long a tool takes is foretold from how long it took: the ``_QUANTILE`` of its last waits, with some slack.

Invariants: a lease is one lock in the tree until it ends, by ``end``, by its time or given up; together leases lock at most ``_SHARE`` of
the pool, so that other work always goes on; what is remembered of tools is bounded in names and in waits.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from radixrt.cache.page_pool import IntArray
from radixrt.cache.radix_tree import Node, RadixTree

_NAMES = 1024  # tools whose waits are remembered
_WAITS = 32  # of each
_QUANTILE = 0.95
_SLACK, _LEAST = 1.25, 0.25  # a wait may take longer than foretold by this factor and by so many seconds
_UNKNOWN = 10.0  # seconds for a tool that was never waited for
_BOUNDS = (0.5, 60.0)  # seconds of a lease
_SHARE = 0.75  # of the pool that leases may lock


@dataclass(slots=True, eq=False)
class Lease:
    """The KV of a program that waits. ``node``: ``None`` once it has ended; ``tokens``: that nobody else locked when it began."""

    node: Node | None
    namespace: str
    tools: tuple[str, ...]
    until: float
    began: float
    tokens: int


@dataclass(slots=True)
class LeaseCounters:
    """Totals. ``resumed``: ended by what they waited for; ``expired``: the tool took longer; ``given_up``: others needed the room, or it was
    never computed; ``refused``: the share of the pool was taken."""

    granted: int = 0
    resumed: int = 0
    expired: int = 0
    given_up: int = 0
    refused: int = 0


@dataclass(slots=True)
class Leases:
    """The leases of one scheduler.

    Fields:
        tree: ``None`` and not ``enabled``: nothing is granted. capacity: tokens of the pool. clock: seconds, ascending.
    """

    tree: RadixTree | None
    capacity: int
    enabled: bool = True
    clock: Callable[[], float] = time.monotonic
    counters: LeaseCounters = field(default_factory=LeaseCounters)
    tokens: int = 0  # locked by leases
    _live: dict[Lease, None] = field(default_factory=dict)
    _waits: OrderedDict[tuple[str, str], deque[float]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._live)

    # ---- how long

    def length(self, tools: Iterable[str], namespace: str = "") -> float:
        """Seconds within which all these tools will most likely have answered."""
        longest = 0.0
        for tool in tools:
            waits = sorted(self._waits.get((namespace, tool), ()))
            foretold = _UNKNOWN
            if waits:
                foretold = waits[math.ceil(_QUANTILE * len(waits)) - 1] * _SLACK + _LEAST
            longest = max(longest, foretold)
        return min(max(longest, _BOUNDS[0]), _BOUNDS[1])

    def learn(self, tool: str, seconds: float, namespace: str = "") -> None:
        """A tool took so long."""
        key = (namespace, tool)
        waits = self._waits.setdefault(key, deque(maxlen=_WAITS))
        self._waits.move_to_end(key)
        waits.append(min(max(seconds, 0.0), _BOUNDS[1]))
        if len(self._waits) > _NAMES:
            self._waits.popitem(last=False)

    # ---- from the call to the result

    def grant(self, tokens: IntArray, namespace: str, tools: Iterable[str]) -> Lease | None:
        """Keep what is cached of ``tokens`` while the tools run; ``None``: nothing is, or there is no room for one more lease."""
        if self.tree is None or not self.enabled:
            return None
        self.expire()
        named = tuple(tools)
        before = self.tree.protected_tokens
        node = self.tree.match(tokens, namespace).node
        gained = self.tree.protected_tokens - before
        if node.parent is None or self.tokens + gained > self.capacity * _SHARE:
            self.tree.unlock(node)
            self.counters.refused += node.parent is not None
            return None
        now = self.clock()
        lease = Lease(node, namespace, named, now + self.length(named, namespace), now, gained)
        self._live[lease] = None
        self.tokens += gained
        self.counters.granted += 1
        return lease

    def extend(self, lease: Lease, *, learn: bool = False) -> None:
        """The results are there, and what continues the program waits to be admitted. ``learn``: how long that took."""
        if learn:
            for tool in lease.tools:
                self.learn(tool, self.clock() - lease.began, lease.namespace)
        if lease.node is not None:
            lease.until = max(lease.until, self.clock() + _UNKNOWN)

    def end(self, lease: Lease, *, resumed: bool = False) -> None:
        """Undo ``grant``; harmless when that happened already. ``resumed``: the program goes on from what was kept."""
        if lease.node is not None:
            self._unlock(lease)
            self.counters.resumed += resumed

    # ---- when time or room is up

    def expire(self) -> None:
        """End the leases whose time is up."""
        if self._live:
            now = self.clock()
            for lease in [lease for lease in self._live if lease.until <= now]:
                self._unlock(lease)
                self.counters.expired += 1

    def give_up(self) -> bool:
        """Others cannot go on: end the lease that would last longest. False: there is none."""
        if not self._live:
            return False
        self._unlock(max(self._live, key=lambda lease: lease.until))
        self.counters.given_up += 1
        return True

    def give_up_fresh(self) -> None:
        """A step failed: end the leases of what it was to compute."""
        for lease in [lease for lease in self._live if self.tree is not None and self.tree.is_fresh(lease.node)]:
            self._unlock(lease)
            self.counters.given_up += 1

    def figures(self) -> dict[str, int]:
        """For the engine's stats."""
        counted = self.counters
        return {
            "leases": len(self._live),
            "leased_tokens": self.tokens,
            "leases_granted": counted.granted,
            "leases_resumed": counted.resumed,
            "leases_expired": counted.expired,
            "leases_given_up": counted.given_up,
            "leases_refused": counted.refused,
        }

    def _unlock(self, lease: Lease) -> None:
        assert self.tree is not None and lease.node is not None
        self.tree.unlock(lease.node)
        lease.node = None
        del self._live[lease]
        self.tokens -= lease.tokens
