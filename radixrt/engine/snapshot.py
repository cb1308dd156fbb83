"""What stands in the cache now, and which requests stand where: a bounded picture for a person who looks.

Invariants: on the engine's thread; changes nothing; costs O(nodes and requests shown), and at most ``_STEPS`` more however deep the tree is; a
node is shown only with everything above it, and parents come first.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from radixrt.cache.radix_tree import Node, RadixTree
from radixrt.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from radixrt.engine.live import LiveSample

HEAD, TAIL = 48, 16  # tokens of a node that are shown: its first ones and, of a longer one, its last ones
MOST_REQUESTS = 128
_STEPS = 20_000  # from a node to the one above it, that one snapshot takes for either purpose
_ITEM = 4  # bytes of a token in a key


def snapshot(
    tree: RadixTree | None, scheduler: Scheduler, samples: Mapping[int, LiveSample], most: int
) -> dict[str, Any]:
    """Plain data: the running sequences' prefixes first, then what was used last, at most ``most`` nodes.

    ``nodes``: lists of parent (its place in this list, -1: none), tokens, locks, holds, seconds since the last use (-1: never unlocked), children,
    number of the namespace (0: the one without a salt), and token ids as bytes (little-endian int32): the first ones, and the last ones of a long node.
    ``requests``: lists of request id, sample, place of the deepest node shown that it holds (-1: none), prompt tokens, computed tokens, tokens,
    program's name (not where it has a salt), and whether it runs.
    """
    running = list(islice(scheduler.running.values(), MOST_REQUESTS))
    waiting = islice(chain(scheduler.suspects, scheduler.preempted, scheduler.waiting.values()), MOST_REQUESTS)
    places: dict[Node, int] = {}
    if tree is not None:
        _place(places, (s.node for s in running if s.node is not None), most)
        _place(places, islice(tree.recent(), 4 * most), most)
    now, spaces = time.monotonic(), {"": 0}
    start = max(HEAD, tree.page_size if tree is not None else 1) * _ITEM  # what tells siblings apart is in it
    requests: list[list[Any]] = []
    stands: dict[Node, int] = {}  # below the nodes shown: where the walk up from here ends
    steps = 0
    for sequence in chain(running, (s for s in waiting if s.node is None)):
        if len(requests) == MOST_REQUESTS:
            break
        sample = samples.get(sequence.uid)
        if sample is None:
            continue
        node, walked, place = sequence.node, list[Node](), -1
        while node is not None and (place := places.get(node, stands.get(node, -1))) < 0 and steps < _STEPS:
            walked.append(node)
            node, steps = node.parent, steps + 1
        stands.update(dict.fromkeys(walked, place))
        requests.append(
            [
                sample.request.request_id,
                sample.index,
                place,
                sequence.prompt_len,
                sequence.computed,
                sequence.size,
                sequence.hint.name if sequence.hint is not None and not sequence.namespace else "",
                sequence.node is not None,
            ]
        )
    nodes: list[list[Any]] = []
    for node in places:
        key, parent = node.key, node.parent
        size = len(key)
        nodes.append(
            [
                places.get(parent, -1) if parent is not None else -1,
                size // _ITEM,
                node.locks,
                node.holds,
                int((now - node.used) * 1000) / 1000 if node.used else -1.0,
                len(node.children),
                spaces.setdefault(node.namespace, len(spaces)),
                key[:start],
                key[max(start, size - TAIL * _ITEM) :] if size > start else b"",
            ]
        )
    return {"nodes": nodes, "requests": requests, "protected": tree.protected_tokens if tree is not None else 0}


def _place(places: dict[Node, int], wanted: Iterable[Node], most: int) -> None:
    """Give a place to nodes and to what is above them, while there is room. (A walk longer than the room that is left is the last.)"""
    steps = 0
    for node in wanted:
        if node in places:
            continue
        above: list[Node] = []
        walk: Node | None = node
        while walk is not None and walk.parent is not None and walk not in places:
            above.append(walk)
            walk, steps = walk.parent, steps + 1
            if steps > _STEPS:
                return
        for one in reversed(above[max(0, len(above) - (most - len(places))) :]):
            places[one] = len(places)
        if len(places) >= most:
            return
