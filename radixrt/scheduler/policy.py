"""The order in which waiting sequences are admitted. Pure functions of what waits and what is cached.

``lpm`` (longest prefix match first) and ``dfs-weight`` (depth first through the radix tree, heaviest subtree first; both from
Zheng et al. 2024, SGLang) look at the first ``WINDOW`` arrivals only, so that a step costs the same however
long the queue is. ``order_programs`` puts what programs say on top of them. Whatever the policy, a sequence that waited for ``max_wait_steps`` steps goes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice, zip_longest

from radixrt.cache.radix_tree import Node, RadixTree
from radixrt.scheduler.programs import Programs
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


def order_programs(
    policy: str, programs: Programs, tree: RadixTree | None, step: int, max_wait_steps: int
) -> list[Sequence]:
    """The waiting sequences in order of admission; at most ``WINDOW`` of each kind. ``policy``: not ``priority``.

    First whoever waited too long; then the next steps of started programs; then, in turns, requests that belong to no program, each
    a program of one step, and the first steps of new programs: neither kind holds up the other. What is equal by this is in the order
    of ``policy``, siblings of one fork side by side. Among started programs ``lpm`` computes least: in a pool that holds 40 % of
    all unique tokens (``scripts/bench/program_schedule.py``, no other switch on), the order of arrival and least attained service
    first computed 15 % and 17 % more tokens on ReAct, 13 % and 10 % more on chat: they take up programs whose KV is gone.
    """
    aged: list[Sequence] = []
    kinds: list[list[Sequence]] = []
    for queue in (programs.following, programs.plain, programs.new):
        window = list(islice(queue.values(), WINDOW))
        aged += [s for s in window if step - s.enqueued_step >= max_wait_steps]
        young = [s for s in window if step - s.enqueued_step < max_wait_steps]
        if young:
            young = order(policy, young, tree, step, max_wait_steps)
        kinds.append(young if queue is programs.plain else _together(young))
    aged.sort(key=lambda s: s.uid)
    following, plain, new = kinds
    turns = zip_longest(new, plain) if programs.new_next else zip_longest(plain, new)
    return aged + following + [s for turn in turns for s in turn if s is not None]


def _together(ordered: list[Sequence]) -> list[Sequence]:
    """Siblings of one fork where the first of them stands."""
    first: dict[tuple[str, str], int] = {}
    for place, sequence in enumerate(ordered):
        if sequence.hint is not None and sequence.hint.group:
            first.setdefault((sequence.hint.program, sequence.hint.group), place)
    if not first:
        return ordered
    places = [
        first[s.hint.program, s.hint.group] if s.hint is not None and s.hint.group else place
        for place, s in enumerate(ordered)
    ]
    return [ordered[at] for at in sorted(range(len(ordered)), key=lambda at: (places[at], at))]


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
