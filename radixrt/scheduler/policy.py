"""The order in which waiting sequences are admitted. Pure functions of what waits and what is cached.

``lpm`` (longest prefix match first) and ``dfs-weight`` (depth first through the radix tree, heaviest subtree first; both from
Zheng et al. 2024, SGLang) look at the first ``WINDOW`` arrivals only, so that a step costs the same however
long the queue is. Whatever the policy, a sequence that waited for ``max_wait_steps`` steps goes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from radixrt.cache.radix_tree import Node, RadixTree
from radixrt.scheduler.sequence import Sequence

WINDOW = 128


def order(
    policy: str, waiting: Iterable[Sequence], tree: RadixTree | None, step: int, max_wait_steps: int
) -> list[Sequence]:
    """The waiting sequences (given in order of arrival) in order of admission; at most ``WINDOW`` but for ``priority``."""
    if policy == "priority":
        return sorted(
            waiting, key=lambda s: (1, s.priority, s.uid) if step - s.enqueued_step < max_wait_steps else (0, 0, s.uid)
        )
    window = list(islice(waiting, WINDOW))
    if tree is None or policy == "fcfs" or len(window) == 1:
        return window
    aged = [s for s in window if step - s.enqueued_step >= max_wait_steps]
    young = [s for s in window if step - s.enqueued_step < max_wait_steps]
    if policy == "lpm":
        for sequence in young:
            if sequence.matched_version != tree.version:
                sequence.matched = tree.peek(sequence.tokens[: sequence.size], sequence.namespace)[0]
                sequence.matched_version = tree.version
        return aged + sorted(young, key=lambda s: (-s.matched, s.uid))
    return aged + _dfs_weight(young, tree)


def _dfs_weight(waiting: list[Sequence], tree: RadixTree) -> list[Sequence]:
    at: dict[Node | None, list[Sequence]] = {}
    weight: dict[Node, int] = {}
    first: dict[Node, int] = {}  # the earliest arrival at or below
    below: dict[Node | None, set[Node]] = {}
    for sequence in waiting:  # in order of arrival
        node = tree.peek(sequence.tokens[: sequence.size], sequence.namespace)[1]
        at.setdefault(node, []).append(sequence)
        while node is not None:
            weight[node] = weight.get(node, 0) + 1
            first.setdefault(node, sequence.uid)
            below.setdefault(node.parent, set()).add(node)
            node = node.parent
    ordered: list[Sequence] = []
    stack: list[Node | None] = [None]
    while stack:
        node = stack.pop()
        ordered.extend(at.get(node, ()))
        # the heaviest child is popped first; among equals the one whose first request came first
        stack.extend(sorted(below.get(node, ()), key=lambda n: (weight[n], -first[n])))
    return ordered
