"""A snapshot of the tree: bounded, whole above every node, and what it says of a node is so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.cache.radix_tree import Node, RadixTree
from radixrt.engine.snapshot import HEAD, TAIL, snapshot

PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=12)


def array(tokens: list[int]) -> Any:
    return np.array(tokens, dtype=np.int32)


def asked(tree: RadixTree | None, most: int, *running: Any, waiting: tuple[Any, ...] = ()) -> dict[str, Any]:
    scheduler: Any = SimpleNamespace(
        running={one.uid: one for one in running},
        waiting={one.uid: one for one in waiting},
        preempted=[],
        suspects=[],
    )
    samples: Any = {
        one.uid: SimpleNamespace(request=SimpleNamespace(request_id=f"r{one.uid}"), index=0)
        for one in (*running, *waiting)
    }
    return snapshot(tree, scheduler, samples, most)


def sequence(uid: int, node: Any) -> Any:
    return SimpleNamespace(uid=uid, node=node, prompt_len=3, computed=2, size=5, hint=None, namespace="")


@given(PROMPTS, PROMPTS, st.integers(1, 30), st.integers(1, 3))
@settings(max_examples=200)
def test_it_is_a_part_of_the_tree_that_is_whole_above_every_node(
    cached: list[list[int]], running: list[list[int]], most: int, page: int
) -> None:
    tree = RadixTree(page)
    for tokens in cached:
        tree.insert(array(tokens), array(list(range(len(tokens)))))
    matches = [tree.match(array(tokens)) for tokens in running]
    found = asked(tree, most, *(sequence(i, match.node) for i, match in enumerate(matches)))
    nodes = found["nodes"]
    assert len(nodes) <= most
    if tree.nodes <= most:
        assert len(nodes) == tree.nodes and sum(node[1] for node in nodes) == sum(n.tokens for n in tree.walk())
        assert sum(node[1] for node in nodes if node[2]) == found["protected"]
    paths: list[list[int]] = []
    for at, (parent, tokens, locks, _, age, _, space, head, tail) in enumerate(nodes):
        assert -1 <= parent < at and space == 0
        own = np.frombuffer(head + tail, dtype="<i4").tolist()
        assert len(own) == tokens  # short ones are whole
        paths.append((paths[parent] if parent >= 0 else []) + own)
        assert tree.peek(array(paths[-1]))[0] == len(paths[-1])
        assert locks > 0 or age >= 0
    assert len({tuple(path) for path in paths}) == len(paths)
    for i, match in enumerate(matches):
        id, _, place, prompt, computed, size, name, runs = found["requests"][i]
        assert (id, prompt, computed, size, name, runs) == (f"r{i}", 3, 2, 5, "", True)
        held = running[i][: match.length]
        assert (paths[place] == held[: len(paths[place])]) if place >= 0 else True
        if tree.nodes <= most:
            assert (paths[place] if place >= 0 else []) == held
    tree.check_integrity()


def test_the_last_used_come_first_and_long_nodes_are_cut() -> None:
    tree = RadixTree()
    for first in range(50):
        tree.insert(array([first, *range(100, 300)]), array(list(range(201))))
    nodes = asked(tree, 3)["nodes"]
    assert [np.frombuffer(node[7], dtype="<i4")[0] for node in nodes] == [49, 48, 47]
    for node in nodes:
        assert node[1] == 201 and len(node[7]) == 4 * HEAD and len(node[8]) == 4 * TAIL
        assert np.frombuffer(node[8], dtype="<i4").tolist() == list(range(284, 300))


def test_a_chain_deeper_than_the_snapshot_is_shown_from_its_root() -> None:
    tree, tokens = RadixTree(), list(range(60))
    for size in range(1, 61):
        tree.insert(array(tokens[:size]), array(tokens[:size]))
    found = asked(tree, 10, sequence(7, tree.match(array(tokens)).node))
    assert [node[0] for node in found["nodes"]] == list(range(-1, 9))
    assert found["requests"][0][2] == 9  # the deepest of them


def test_the_work_is_bounded_however_deep_the_tree_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of thousands of nodes: each step upwards is counted by who reads ``parent``."""
    size, chains = 2_500, 12
    tree, tokens = RadixTree(), list(range(size))
    for length in range(1, size + 1):
        tree.insert(array(tokens[:length]), array(tokens[:length]))
    deepest = tree.match(array(tokens)).node
    steps = 0

    class Counted:
        def __get__(self, node: Any, owner: Any) -> Any:
            nonlocal steps
            steps += 1
            return inner.__get__(node, owner)

        def __set__(self, node: Any, value: Any) -> None:
            inner.__set__(node, value)

    inner = Node.__dict__["parent"]
    monkeypatch.setattr(Node, "parent", Counted())
    found = asked(tree, 200, *(sequence(i, deepest) for i in range(chains)))
    assert len(found["nodes"]) == 200 and [request[2] for request in found["requests"]] == [199] * chains
    assert steps <= 6 * size


def test_what_waits_stands_nowhere_and_is_bounded() -> None:
    found = asked(None, 10, waiting=tuple(sequence(i, None) for i in range(500)))
    assert found["nodes"] == [] and len(found["requests"]) == 128
    assert all(request[2] == -1 and not request[7] for request in found["requests"])


def test_namespaces_are_numbered() -> None:
    tree = RadixTree()
    for salt in ("", "secret-a", "secret-b", ""):
        tree.insert(array([1, 2]), array([1, 2]), salt)
    found = asked(tree, 10)
    assert sorted(node[6] for node in found["nodes"]) == [0, 1, 2] and "secret" not in str(found)


def test_the_name_of_a_salted_program_is_not_shown() -> None:
    named = SimpleNamespace(name="secret")
    open_one, salted = sequence(1, None), sequence(2, None)
    open_one.hint = salted.hint = named
    salted.namespace = "s"
    assert [request[6] for request in asked(None, 3, waiting=(open_one, salted))["requests"]] == ["secret", ""]
