"""RadixTree owns which token prefixes have their KV in the pool, who uses them, and what is evicted next.

Invariants:
- A node's key is a whole number of pages; two children of a node differ in their first page.
- ``locks`` of a node counts the live sequences whose prefix ends at or below it, so a node is locked at
  least as often as any of its children.
- ``holds`` of a node counts the holds at or below it, so a node is held at least as often as any of its children.
- Two recency lists hold exactly the unlocked nodes below the roots, least recently used first: one those without
  a hold, the other the held ones. In both, every node stands after its children. The head of the first is therefore
  always a leaf, and when the first is empty so is the head of the second: the least recently used one.
- One root for each namespace; nothing is shared between namespaces.

Matching locks, so that nothing can be evicted between finding a prefix and using it. A *hold* is softer: it says that a
live program is going to use a prefix again, so that what nobody wants is evicted before it. To hold and to release count
as use: the nodes concerned become the most recently used of their list.

Keys are kept as bytes (little-endian int32), so that comparing a node is one ``memcmp`` and the first page of
a key is a dictionary key. Matching and inserting cost O(tokens / memcmp speed + nodes passed), locking
and holding O(nodes passed), evicting a leaf O(1).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from radixrt.cache.page_pool import IntArray

_ITEM = 4  # bytes of one token in a key
_CHILDREN = 16  # children looked at for one that begins with a part of a page
_NONE: IntArray = np.empty(0, dtype=np.int32)


class Node:
    """One edge of the tree: ``key`` (token bytes) and the ``slots`` that hold its KV, one a token."""

    __slots__ = ("children", "gone", "holds", "key", "latest", "locks", "namespace", "parent", "slots", "used")

    def __init__(self, parent: Node | None, key: bytes, slots: IntArray, namespace: str) -> None:
        self.parent = parent
        self.key = key
        self.slots = slots
        self.children: dict[bytes, Node] = {}
        self.latest: Node | None = None  # the child that was locked last, while it is one
        self.locks = 0
        self.holds = 0
        self.gone = False  # evicted; ``parent`` is then the node that its holds moved to
        self.namespace = namespace
        self.used = 0.0  # when it was unlocked, held or released last, monotonic seconds; 0: not yet

    @property
    def tokens(self) -> int:
        return len(self.key) // _ITEM


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: its last node, its length in tokens and its slots, shape ``[length]``."""

    node: Node
    length: int
    slots: IntArray


class Hold:
    """A claim of a live program on a cached prefix, from ``RadixTree.hold`` until ``release``."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node: Node | None = node  # or one below it that was evicted since; None: released


class RadixTree:
    """Radix tree of cached token prefixes.

    Args:
        page_size: keys and matches are whole numbers of this many tokens.
    """

    def __init__(self, page_size: int = 1) -> None:
        self.page_size = page_size
        self.evictable_tokens = 0  # in unlocked nodes
        self.protected_tokens = 0  # in locked nodes
        self.held_tokens = 0  # of the evictable ones: in nodes that a live program wants
        self.evicted_tokens = 0  # ever
        self.nodes = 0
        self.version = 0  # changes whenever a match could come out differently
        self._page_bytes = page_size * _ITEM
        self._roots: dict[str, Node] = {}
        self._recency: OrderedDict[Node, None] = (
            OrderedDict()
        )  # unlocked nodes without a hold, least recently used first
        self._held: OrderedDict[Node, None] = OrderedDict()  # unlocked nodes with one
        self._fresh: dict[Node, None] = {}  # nodes whose KV the newest step writes
        self._fresh_before: dict[Node, None] = {}  # and those of the step before, where that has not ended either

    # ---- looking

    def peek(self, tokens: IntArray, namespace: str = "") -> tuple[int, Node | None]:
        """Length in tokens of the longest cached prefix and the node it ends in; changes nothing."""
        node = self._roots.get(namespace)
        if node is None:
            return 0, None
        data, end = self._data(tokens)
        at = 0
        while at < end:
            child = node.children.get(data[at : at + self._page_bytes])
            if child is None:
                break
            if data.startswith(child.key, at):
                at += len(child.key)
                node = child
            else:
                at += self._common(data, at, end, child.key)
                node = child
                break
        return at // _ITEM, node

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """The longest cached prefix of ``tokens`` (int32, shape ``[n]``), locked for the caller until ``unlock``.

        The node in which it ends is split there, so that exactly the prefix is locked.
        """
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, b"", _NONE, namespace)
        root.locks += 1
        return self.match_from(root, tokens)

    def match_from(self, node: Node, tokens: IntArray) -> Match:
        """Like ``match``, for ``tokens`` that continue the prefix ending at ``node``; the caller's lock moves along."""
        data, end = self._data(tokens)
        last, at, found = self._descend(node, data, end)
        self._lock(last, node)
        slots = found[0] if len(found) == 1 else np.concatenate(found) if found else _NONE
        return Match(last, at // _ITEM, slots)

    # ---- guessing

    def follow(self, place: tuple[Node, int], tokens: IntArray) -> tuple[Node, int] | None:
        """Go on from a place in the tree by ``tokens``; ``None``: they are not cached there. Changes and locks nothing.

        A place is a node and how many tokens of its key lie behind the place. One that was kept while the tree changed may be
        found wrong (``None``) or lead astray: it is good for a guess only.
        """
        node, left = place[0], place[1] * _ITEM
        if node.gone or left > len(node.key):
            return None
        data, at = tokens.tobytes(), 0
        while at < len(data):
            if not left:
                child = self._child(node, data[at : at + self._page_bytes])
                if child is None:
                    return None
                node, left = child, len(child.key)
            start = len(node.key) - left
            size = min(left, len(data) - at)
            if node.key[start : start + size] != data[at : at + size]:
                return None
            at += size
            left -= size
        return node, left // _ITEM

    def continuation(self, place: tuple[Node, int], count: int) -> IntArray:
        """Up to ``count`` cached tokens that follow a place: down the children that were used last."""
        node, left = place
        found = [node.key[len(node.key) - left * _ITEM :]]
        missing = count - left
        while missing > 0 and node.children:
            node = node.latest or next(reversed(node.children.values()))
            found.append(node.key)
            missing -= node.tokens
        return np.frombuffer(b"".join(found)[: count * _ITEM], dtype=np.int32)

    def _child(self, node: Node, start: bytes) -> Node | None:
        """The child that begins with ``start``, at most a page; of several with a part of one, the one used last."""
        if len(start) == self._page_bytes:
            return node.children.get(start)
        some = islice(reversed(node.children.values()), _CHILDREN)
        newest = some if node.latest is None else (node.latest, *some)
        return next((child for child in newest if child.key.startswith(start)), None)

    # ---- growing

    def extend(self, node: Node, tokens: IntArray, slots: IntArray, *, fresh: bool = False) -> Match:
        """Add ``tokens`` (a whole number of pages) with their ``slots`` below the prefix ending at ``node``.

        The caller's lock moves to the end of the longer prefix. Returns that node, and how many of the tokens
        were there already, with the tree's slots for them: the caller still owns the first that many of ``slots``.

            tokens   |-- there already --|-------- new --------|
            slots    |  caller's still   |  now the tree's     |

        ``fresh``: the KV of the new tokens is not written yet, see ``drop_fresh``.
        """
        data, end = self._data(tokens)
        if end != len(data):
            raise ValueError(f"{len(tokens)} tokens are not a whole number of pages of {self.page_size}")
        last, at, found = self._descend(node, data, end)
        self._lock(last, node)
        if at < end:
            leaf = Node(last, data[at:], slots[at // _ITEM :].copy(), node.namespace)
            leaf.locks = 1
            last.children[data[at : at + self._page_bytes]] = last.latest = leaf
            if fresh:
                self._fresh[leaf] = None
            self.protected_tokens += leaf.tokens
            self.nodes += 1
            self.version += 1
            last = leaf
        return Match(last, at // _ITEM, np.concatenate(found) if found else _NONE)

    def insert(self, tokens: IntArray, slots: IntArray, namespace: str = "") -> int:
        """``match`` and ``extend`` without keeping the lock; returns how many tokens were there already."""
        whole = len(tokens) // self.page_size * self.page_size
        match = self.match(tokens[:whole], namespace)
        self.unlock(self.extend(match.node, tokens[match.length : whole], slots[match.length : whole]).node)
        return match.length

    # ---- locking

    def unlock(self, node: Node) -> None:
        """Release one lock of ``node``; what nobody else holds becomes evictable, as just used."""
        walk: Node | None = node
        last, now = node, time.monotonic()
        while walk is not None:
            if walk.locks <= 0:
                raise RuntimeError("a node was unlocked more often than locked")
            walk.locks -= 1
            if walk.locks == 0 and walk.parent is not None:
                size = len(walk.key) // _ITEM
                walk.used = now
                if walk.holds:
                    self._held[walk] = None
                    self.held_tokens += size
                else:
                    self._recency[walk] = None  # from the leaf upwards: children stand before parents
                self.evictable_tokens += size
                self.protected_tokens -= size
            last, walk = walk, walk.parent
        self._drop_empty_root(last)

    def _lock(self, node: Node, held: Node) -> None:
        """Move the lock on ``held`` down to its descendant ``node``."""
        while node is not held:
            node.locks += 1
            if node.locks == 1:
                size = len(node.key) // _ITEM
                if node.holds:
                    del self._held[node]
                    self.held_tokens -= size
                else:
                    del self._recency[node]
                self.evictable_tokens -= size
                self.protected_tokens += size
            assert node.parent is not None
            node.parent.latest = node
            node = node.parent

    # ---- holding

    def hold(self, tokens: IntArray, namespace: str = "") -> Hold | None:
        """Mark the cached prefix of ``tokens`` as wanted by a live program; ``None`` where nothing of it is cached.

        The node in which it ends is split there. A hold that is evicted moves to what is left of its prefix.
        """
        root = self._roots.get(namespace)
        if root is None:
            return None
        data, end = self._data(tokens)
        last = self._descend(root, data, end)[0]
        if last is root:
            return None
        walk: Node | None = last
        now = time.monotonic()
        while walk is not None:
            walk.holds += 1
            if walk.locks == 0 and walk.parent is not None:
                walk.used = now
                if walk.holds == 1:
                    del self._recency[walk]
                    self._held[walk] = None
                    self.held_tokens += len(walk.key) // _ITEM
                else:
                    self._held.move_to_end(walk)
            walk = walk.parent
        return Hold(last)

    def release(self, hold: Hold) -> None:
        """Undo ``hold``; doing it again does nothing."""
        walk, hold.node = hold.node, None
        now = time.monotonic()
        while walk is not None and walk.gone:
            walk = walk.parent
        while walk is not None:
            walk.holds -= 1
            if walk.holds == 0 and walk.locks == 0 and walk.parent is not None:
                del self._held[walk]
                self._recency[walk] = None
                walk.used = now
                self.held_tokens -= len(walk.key) // _ITEM
            walk = walk.parent

    # ---- shrinking

    def evict(self, tokens: int) -> list[IntArray]:
        """Free at least ``tokens`` tokens where that many are evictable: leaves without a hold first, and of equals the
        least recently used one first.

        The last leaf is cut from its end, by no more pages than needed. Returns the freed slots.
        """
        freed: list[IntArray] = []
        left = tokens
        while left > 0 and (self._recency or self._held):
            leaf = next(iter(self._recency or self._held))
            size = leaf.tokens
            keep = (size - left) // self.page_size * self.page_size
            if keep > 0:
                freed.append(leaf.slots[keep:])
                leaf.key = leaf.key[: keep * _ITEM]
                leaf.slots = leaf.slots[:keep].copy()
                self.evictable_tokens -= size - keep
                if leaf.holds:
                    self.held_tokens -= size - keep
                self.version += 1
                left -= size - keep
            else:
                freed.append(self._remove(leaf))
                left -= size
        self.evicted_tokens += tokens - left
        return freed

    def flush(self) -> list[IntArray]:
        """Evict everything that is not locked, whether a program wants it or not."""
        freed = []
        while self._recency or self._held:
            freed.append(self._remove(next(iter(self._recency or self._held))))
        return freed

    def begin_step(self, ahead: bool = False) -> None:
        """What was fresh until now has its KV; ``ahead``: but for that of the last step, which has not ended."""
        self._fresh_before = self._fresh if ahead else {}
        self._fresh = {}

    def end_step(self) -> None:
        """The oldest step has ended: where two were in flight, what it was to write has its KV."""
        self._fresh_before.clear()

    def is_fresh(self, node: Node | None) -> bool:
        """Whether KV of the prefix that ends at ``node`` is not written yet."""
        while node is not None and node not in self._fresh and node not in self._fresh_before:
            node = node.parent
        return node is not None

    def drop_fresh(self) -> list[IntArray]:
        """Remove what is fresh, and what hangs below it: its KV was never written. None of it may be locked."""
        freed = []
        while self._fresh or self._fresh_before:
            stack = [(self._fresh or self._fresh_before).popitem()[0]]
            while stack:
                node = stack[-1]
                if node.locks:
                    raise RuntimeError("a fresh node is still in use")
                if node.children:
                    stack.extend(node.children.values())
                else:
                    freed.append(self._remove(stack.pop()))
        return freed

    # ---- checking

    def walk(self) -> Iterator[Node]:
        """Every node below the roots, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def recent(self) -> Iterator[Node]:
        """The unlocked nodes, most recently used first, the held ones before the others. Takes only as long as it is followed."""
        yield from reversed(self._held)
        yield from reversed(self._recency)

    def slots(self) -> IntArray:
        """Slots of the whole tree."""
        parts = [node.slots for node in self.walk()]
        return np.concatenate(parts) if parts else _NONE

    def check_integrity(self) -> None:
        """Raises AssertionError where an invariant of this module does not hold. O(tree)."""
        order = {node: place for place, node in enumerate((*self._recency, *self._held))}
        assert len(order) == len(self._recency) + len(self._held), "a node stands in both recency lists"
        evictable = protected = held = count = 0
        for namespace, root in self._roots.items():
            assert root.parent is None and root.namespace == namespace and not root.key
            assert root.children or root.locks, f"empty root of namespace {namespace!r} was kept"
            assert root.latest is None or (root.latest.parent is root and not root.latest.gone)
            assert root.locks >= sum(child.locks for child in root.children.values())
            assert root.holds >= sum(child.holds for child in root.children.values())
        for node in self.walk():
            count += 1
            assert node.key and len(node.key) % self._page_bytes == 0, "a key is not a whole number of pages"
            assert node.parent is not None and node.parent.children[node.key[: self._page_bytes]] is node
            assert len(node.slots) in (0, node.tokens), "a node's slots and key differ in length"
            assert node.locks >= sum(child.locks for child in node.children.values()), "a child is locked more"
            assert node.holds >= sum(child.holds for child in node.children.values()), "a child is held more"
            assert node.namespace == node.parent.namespace and not node.gone
            assert node.latest is None or (node.latest.parent is node and not node.latest.gone)
            assert (node in self._recency) == (node.locks == 0 == node.holds), "wrong nodes in the list without holds"
            assert (node in self._held) == (node.locks == 0 < node.holds), "wrong nodes in the list of the held"
            if node.locks == 0:
                evictable += node.tokens
                held += node.tokens if node.holds else 0
                for child in node.children.values():
                    assert order[child] < order[node], "a node stands before its child in the recency list"
            else:
                protected += node.tokens
        assert (count, evictable, protected) == (self.nodes, self.evictable_tokens, self.protected_tokens)
        assert held == self.held_tokens
        assert len(order) <= count, "the recency lists hold nodes that left the tree"

    @property
    def total_locks(self) -> int:
        """Locks held on any root: the number of live sequences."""
        return sum(root.locks for root in self._roots.values())

    # ---- inside

    def _data(self, tokens: IntArray) -> tuple[bytes, int]:
        data = tokens.tobytes()
        return data, len(data) // self._page_bytes * self._page_bytes

    def _descend(self, node: Node, data: bytes, end: int) -> tuple[Node, int, list[IntArray]]:
        """Follow ``data`` down from ``node``, splitting where it leaves a key; bytes matched and their slots."""
        at = 0
        found: list[IntArray] = []
        page = self._page_bytes
        while at < end:
            child = node.children.get(data[at : at + page])
            if child is None:
                break
            if not data.startswith(child.key, at):
                child = self._split(child, self._common(data, at, end, child.key))
            at += len(child.key)
            found.append(child.slots)
            node = child
        return node, at, found

    def _common(self, data: bytes, at: int, end: int, key: bytes) -> int:
        """Bytes that ``data[at:end]`` and ``key`` have in common, in whole pages."""
        size = min(end - at, len(key))
        low = np.frombuffer(data, dtype=np.int32, count=size // _ITEM, offset=at)
        high = np.frombuffer(key, dtype=np.int32, count=size // _ITEM)
        differ = (low != high).nonzero()[0]
        common = int(differ[0]) * _ITEM if len(differ) else size
        return common // self._page_bytes * self._page_bytes

    def _split(self, node: Node, at: int) -> Node:
        """Cut ``node`` after ``at`` bytes. Returns the new upper part; ``node`` itself stays the lower one, so that
        whoever holds it still holds the same prefix.

            parent --[ key[:at] ]--> upper --[ key[at:] ]--> node
        """
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.key[:at], node.slots[: at // _ITEM].copy(), node.namespace)
        upper.locks, upper.holds, upper.used = node.locks, node.holds, node.used
        upper.children[node.key[at : at + self._page_bytes]] = upper.latest = node
        parent.children[node.key[: self._page_bytes]] = upper
        if parent.latest is node:
            parent.latest = upper
        node.parent = upper
        node.key = node.key[at:]
        node.slots = node.slots[at // _ITEM :].copy()
        self.nodes += 1
        if (
            upper.locks == 0
        ):  # its caller locks or holds it next, and with it the ancestors that have to stand behind it
            (self._held if upper.holds else self._recency)[upper] = None
        for fresh in (self._fresh, self._fresh_before):
            if node in fresh:
                fresh[upper] = None
        return upper

    def _remove(self, leaf: Node) -> IntArray:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[: self._page_bytes]]
        if parent.latest is leaf:
            parent.latest = None
        if leaf.holds:  # they count for the parent already
            del self._held[leaf]
            self.held_tokens -= leaf.tokens
        else:
            del self._recency[leaf]
        self._fresh.pop(leaf, None)
        self._fresh_before.pop(leaf, None)
        self.evictable_tokens -= leaf.tokens
        self.nodes -= 1
        self.version += 1
        freed, leaf.gone, leaf.slots, leaf.key = leaf.slots, True, _NONE, b""
        self._drop_empty_root(parent)
        return freed

    def _drop_empty_root(self, node: Node) -> None:
        if node.parent is None and not node.children and node.locks == 0 and self._roots.get(node.namespace) is node:
            del self._roots[node.namespace]
