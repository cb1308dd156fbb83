"""Figures of an engine: what was computed, what came from the cache, and what a perfect cache would have given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixrt.cache.page_pool import IntArray
from radixrt.cache.radix_tree import RadixTree

_MOST_TOKENS = 8_000_000  # tokens of history the optimum is counted over
_MOST_NODES = 200_000  # and the nodes of its tree: a node takes some 650 bytes beside its tokens


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the engine started or ``reset_stats``; counts are tokens unless the name says otherwise.

    Fields:
        prompt_tokens: of prompts that have been computed, or as far as they were when their request ended; counted once a sample.
        hit_rate: share of them that was not computed but found in the cache.
        optimal_hit_rate: ``1 - unique radix edges / prompt tokens``: what a cache that forgets nothing would reach.
        pool_used: held by running sequences or cached; ``pool_evictable`` of them can be evicted at once.
        leases: programs that wait for a tool and whose KV (``leased_tokens``) is kept meanwhile; those granted since the start ended as
            ``resumed``, ``expired`` (the tool took longer than foretold) or ``given_up`` (others needed the room).
        draft_tokens: guessed and verified (``EngineConfig.speculation``); ``accepted_tokens`` of them were right.
    """

    requests: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    generated_tokens: int
    forced_tokens: int
    hit_rate: float
    optimal_hit_rate: float
    unique_tokens: int
    pool_tokens: int
    pool_used: int
    pool_evictable: int
    cache_nodes: int
    evicted_tokens: int
    preemptions: int
    running: int
    waiting: int
    steps: int
    forward_tokens: int
    draft_tokens: int
    accepted_tokens: int
    leases: int
    leased_tokens: int
    leases_granted: int
    leases_resumed: int
    leases_expired: int
    leases_given_up: int
    leases_refused: int


class OptimalCache:
    """Counts the radix edges that a cache without limit would have computed.

    Holds the token ids of up to ``_MOST_TOKENS`` tokens in up to ``_MOST_NODES`` nodes and no KV; beyond that the least recently
    used prefixes are forgotten and would count again.
    """

    def __init__(self) -> None:
        self._tree = RadixTree()
        self._empty: IntArray = np.empty(0, dtype=np.int32)

    def prompt(self, tokens: IntArray, namespace: str) -> int:
        """A prompt arrived; returns how many of its tokens are new."""
        return len(tokens) - self._insert(tokens, namespace)

    def output(self, tokens: IntArray, namespace: str) -> None:
        """A sample's prompt and output have been computed: a later prompt may begin with them."""
        self._insert(tokens, namespace)

    def _insert(self, tokens: IntArray, namespace: str) -> int:
        known = self._tree.insert(tokens, self._empty, namespace)
        surplus = self._tree.evictable_tokens - _MOST_TOKENS
        if self._tree.nodes > _MOST_NODES:
            surplus = max(surplus, self._tree.evictable_tokens // 64)
        if surplus > 0:
            self._tree.evict(surplus)
        return known
