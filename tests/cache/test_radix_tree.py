"""RadixTree against a naive model that keeps every page of every prefix on its own."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from radixrt.cache.page_pool import PagePool
from radixrt.cache.radix_tree import Hold, Node, RadixTree

TOKENS = st.lists(st.integers(0, 2), max_size=14)
NAMESPACE = st.sampled_from(["", "a"])


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


class NaivePage:
    """One cached page: its slots, how many lock and how many hold it, and when it was last put into its list."""

    def __init__(self, slots: list[int]) -> None:
        self.slots = slots
        self.locks = 0
        self.holds = 0
        self.released = 0


class TreeMachine(RuleBasedStateMachine):
    """Drives a tree and its pool; the model maps each (namespace, prefix in whole pages) to its last page."""

    @initialize(page_size=st.sampled_from([1, 2, 3]), pages=st.integers(4, 30))
    def start(self, page_size: int, pages: int) -> None:
        self.size = page_size
        self.pool = PagePool(pages, page_size)
        self.tree = RadixTree(page_size)
        self.model: dict[tuple[str, tuple[int, ...]], NaivePage] = {}
        self.held: list[tuple[str, tuple[int, ...], Node]] = []
        self.holds: list[tuple[str, tuple[int, ...], Hold]] = []
        self.clock = 0

    def path(self, namespace: str, tokens: tuple[int, ...]) -> list[NaivePage]:
        return [self.model[namespace, tokens[:end]] for end in range(self.size, len(tokens) + 1, self.size)]

    def longest(self, namespace: str, tokens: list[int]) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        for end in range(self.size, len(tokens) + 1, self.size):
            if (namespace, tuple(tokens[:end])) not in self.model:
                break
            found = tuple(tokens[:end])
        return found

    @rule(tokens=TOKENS, namespace=NAMESPACE)
    def peek(self, tokens: list[int], namespace: str) -> None:
        assert self.tree.peek(array(tokens), namespace)[0] == len(self.longest(namespace, tokens))

    @rule(tokens=TOKENS, namespace=NAMESPACE)
    def match(self, tokens: list[int], namespace: str) -> None:
        expected = self.longest(namespace, tokens)
        match = self.tree.match(array(tokens), namespace)
        assert match.length == len(expected)
        assert match.slots.tolist() == [s for page in self.path(namespace, expected) for s in page.slots]
        for page in self.path(namespace, expected):
            page.locks += 1
        self.held.append((namespace, expected, match.node))

    @rule(tokens=TOKENS, which=st.integers(0, 9))
    def extend(self, tokens: list[int], which: int) -> None:
        if not self.held:
            return
        index = which % len(self.held)
        namespace, prefix, node = self.held[index]
        tokens = tokens[: min(len(tokens) // self.size, self.pool.free_pages) * self.size]
        slots = self.pool.alloc(len(tokens) // self.size)
        whole = [*prefix, *tokens]
        known = len(self.longest(namespace, whole)) - len(prefix)
        match = self.tree.extend(node, array(tokens), slots)
        assert match.length == known
        self.pool.free(slots[:known])
        for at in range(0, len(tokens), self.size):
            key = (namespace, tuple(whole[: len(prefix) + at + self.size]))
            if at >= known:
                self.model[key] = NaivePage(slots[at : at + self.size].tolist())
            self.model[key].locks += 1
        self.held[index] = (namespace, tuple(whole), match.node)

    @rule(which=st.integers(0, 9))
    def unlock(self, which: int) -> None:
        if not self.held:
            return
        namespace, prefix, node = self.held.pop(which % len(self.held))
        self.tree.unlock(node)
        self.clock += 1
        for page in self.path(namespace, prefix):
            page.locks -= 1
            if page.locks == 0:
                page.released = self.clock

    @rule(tokens=TOKENS, namespace=NAMESPACE)
    def insert(self, tokens: list[int], namespace: str) -> None:
        self.match(tokens, namespace)
        self.extend(tokens, len(self.held) - 1)
        self.unlock(len(self.held) - 1)

    @rule(which=st.integers(0, 99), tokens=st.lists(st.integers(0, 2), max_size=2))
    def hold(self, which: int, tokens: list[int]) -> None:
        """Of what is cached, and a little more."""
        known = sorted(self.model)
        namespace, start = known[which % len(known)] if known else ("", ())
        tokens = [*start, *tokens]
        prefix = self.longest(namespace, tokens)
        hold = self.tree.hold(array(tokens), namespace)
        assert (hold is None) == (not prefix)
        if hold is None:
            return
        self.clock += 1
        for page in self.path(namespace, prefix):
            page.holds += 1
            if page.locks == 0:
                page.released = self.clock
        self.holds.append((namespace, prefix, hold))

    @rule(which=st.integers(0, 9), again=st.booleans())
    def release(self, which: int, again: bool) -> None:
        if not self.holds:
            return
        namespace, prefix, hold = self.holds.pop(which % len(self.holds))
        self.tree.release(hold)
        if again:
            self.tree.release(hold)
        self.clock += 1
        for page in self.path(namespace, prefix):
            page.holds -= 1
            if page.holds == 0 and page.locks == 0:
                page.released = self.clock

    def remove(self, key: tuple[str, tuple[int, ...]]) -> list[int]:
        """Take a page that nothing continues out of the model; what held it holds the page before it."""
        namespace, gone = key
        self.holds = [
            (name, prefix[: -self.size] if (name, prefix) == (namespace, gone) else prefix, hold)
            for name, prefix, hold in self.holds
        ]
        return self.model.pop(key).slots

    @rule()
    def flush(self) -> None:
        expected: list[int] = []
        for key in sorted(self.model, key=lambda key: -len(key[1])):
            if self.model[key].locks == 0:
                expected.extend(self.remove(key))
        freed = self.tree.flush()
        assert sorted(s for slots in freed for s in slots.tolist()) == sorted(expected)
        for slots in freed:
            self.pool.free(slots)

    @rule(pages=st.integers(1, 6))
    def evict(self, pages: int) -> None:
        """Page by page, of those that nothing cached continues one that nobody holds; of equals the one released first."""
        expected: list[int] = []
        for _ in range(pages):
            parents = {(namespace, tokens[: -self.size]) for namespace, tokens in self.model}
            leaves = [key for key, page in self.model.items() if key not in parents and page.locks == 0]
            if not leaves:
                break
            oldest = min(leaves, key=lambda key: (self.model[key].holds > 0, self.model[key].released))
            expected.extend(self.remove(oldest))
        freed = self.tree.evict(pages * self.size)
        assert sorted(s for slots in freed for s in slots.tolist()) == sorted(expected)
        for slots in freed:
            self.pool.free(slots)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check_integrity()
        pages = list(self.model.values())
        assert self.tree.evictable_tokens == self.size * sum(page.locks == 0 for page in pages)
        assert self.tree.protected_tokens == self.size * sum(page.locks > 0 for page in pages)
        held = self.size * sum(page.locks == 0 < page.holds for page in pages)
        assert self.tree.held_tokens == held
        assert sorted(self.tree.slots().tolist()) == sorted(s for page in pages for s in page.slots)
        assert self.tree.total_locks == len(self.held)
        assert self.pool.free_pages + len(pages) == self.pool.pages


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_an_edge_is_cut_from_its_end() -> None:
    tree = RadixTree()
    tree.insert(array([1, 2, 3, 4, 5]), array([10, 11, 12, 13, 14]))
    assert [s.tolist() for s in tree.evict(2)] == [[13, 14]]
    assert tree.peek(array([1, 2, 3, 4, 5]))[0] == 3


def test_namespaces_share_nothing_and_leave_nothing_behind() -> None:
    tree = RadixTree()
    tree.insert(array([1, 2, 3]), array([0, 1, 2]), "a")
    assert tree.peek(array([1, 2, 3]), "b")[0] == 0
    for name in "bcdefg":
        tree.unlock(tree.match(array([1, 2, 3]), name).node)
    tree.evict(3)
    assert not tree._roots


def test_drop_fresh_removes_what_this_step_added_and_no_more() -> None:
    tree = RadixTree()
    tree.insert(array([1, 2, 3, 4]), array([0, 1, 2, 3]))
    tree.begin_step()
    first = tree.match(array([1, 2, 9, 9, 8]))
    first = tree.extend(first.node, array([9, 9, 8]), array([4, 5, 6]), fresh=True)
    second = tree.match(array([1, 2, 9, 9, 7]))  # splits a fresh node
    second = tree.extend(second.node, array([7]), array([7]))  # computed before, but below what was not
    tree.unlock(first.node)
    tree.unlock(second.node)
    assert sorted(s for slots in tree.drop_fresh() for s in slots.tolist()) == [4, 5, 6, 7]
    tree.check_integrity()
    assert tree.peek(array([1, 2, 3, 4]))[0] == 4
    assert tree.peek(array([1, 2, 9, 9, 8]))[0] == 2


def test_what_a_live_program_wants_is_evicted_last() -> None:
    tree = RadixTree()
    tree.insert(array([1, 2, 3]), array([0, 1, 2]))
    hold = tree.hold(array([1, 2, 9]))
    assert hold is not None and tree.held_tokens == 2
    tree.insert(array([4, 5]), array([3, 4]))  # used later, and wanted by nobody
    assert [s.tolist() for s in tree.evict(3)] == [[2], [3, 4]]
    assert [s.tolist() for s in tree.evict(1)] == [[1]]
    tree.insert(array([7]), array([5]))
    tree.release(hold)
    assert tree.held_tokens == 0
    assert [s.tolist() for s in tree.evict(2)] == [[5], [0]]


def test_a_hold_whose_prefix_is_all_gone_is_released_without_harm() -> None:
    tree = RadixTree()
    tree.insert(array([1, 2]), array([0, 1]))
    tree.insert(array([1, 2, 3, 4]), array([0, 1, 2, 3]))
    hold = tree.hold(array([1, 2, 3, 4]))
    tree.flush()
    assert hold is not None and not tree._roots
    tree.insert(array([1, 2, 3, 4]), array([4, 5, 6, 7]))
    tree.release(hold)
    tree.check_integrity()
    assert tree.held_tokens == 0 and tree.evictable_tokens == 4
