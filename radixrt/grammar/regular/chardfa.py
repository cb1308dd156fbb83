"""CharDfa owns regular languages over Unicode scalar values, with their whole algebra.

Invariants: a CharDfa is complete and minimal in one canonical form (states breadth first, classes by first character, no two
classes alike), so that equal languages are equal values. Surrogates belong to no text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn, TypeVar

from radixrt.errors import InvalidRequest
from radixrt.grammar.built import native_module
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.regular.charset import LAST, CharSet, class_sets, partition
from radixrt.grammar.regular.limits import DEFAULT_LIMITS, RegularLimits
from radixrt.grammar.regular.minimize import canonical, joined
from radixrt.grammar.regular.parse import Syntax, parse, shown

S = TypeVar("S", bound=Hashable)
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, eq=True)
class CharDfa:
    """A minimal deterministic automaton over characters. State 0 is the start.

    Fields:
        starts, classes: interval ``i`` of the alphabet runs from code point ``starts[i]`` to before ``starts[i + 1]`` and is of
            class ``classes[i]``; -1 is the hole of the surrogates.
        rows: ``rows[state][class]`` is the next state.
        accepting: the final states.
    """

    starts: tuple[int, ...]
    classes: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    accepting: frozenset[int]

    # ---- making them

    @staticmethod
    def from_pattern(
        pattern: str, *, syntax: Syntax = "ecma", anchored: bool, limits: RegularLimits = DEFAULT_LIMITS
    ) -> CharDfa:
        """The texts a pattern matches as a whole (``anchored``), or in which it is found somewhere (JSON Schema's ``pattern``).

        Raises:
            InvalidRequest: a syntax error, with its position.
            UnsupportedConstraint: a back-reference or the like, or a limit is passed.
        """
        from radixrt.grammar.regular.build import from_node, searching, simplified

        node = parse(pattern, syntax, limits)
        return from_node(simplified(node) if anchored else searching(node), limits=limits, name=shown(pattern))

    @staticmethod
    def make(
        starts: Sequence[int], classes: Sequence[int], rows: Sequence[Sequence[int]], accepting: Sequence[bool]
    ) -> CharDfa:
        """From any complete automaton whose states can all be reached."""
        return CharDfa(*canonical(starts, classes, rows, accepting))

    @staticmethod
    def explore(
        start: S,
        step: Callable[[S, int], S | None],
        accepts: Callable[[S], bool],
        alphabet: Sequence[CharSet],
        *,
        limits: RegularLimits = DEFAULT_LIMITS,
        name: str = "the language",
    ) -> CharDfa:
        """From states of any kind: ``step(state, i)`` after a character of ``alphabet[i]`` (disjoint sets); ``None`` is dead."""
        starts, classes, members = partition(tuple(alphabet))
        symbols = [mask.bit_length() - 1 for mask in members]
        budget = Budget(limits, name)

        def row(state: S | None) -> list[S | None]:
            return [None if state is None or symbol < 0 else step(state, symbol) for symbol in symbols]

        def final(state: S | None) -> bool:
            return state is not None and accepts(state)

        first: S | None = start
        return grow(first, row, final, starts, classes, budget)

    @staticmethod
    def anything() -> CharDfa:
        return CharDfa((0, 0xD800, 0xE000), (0, -1, 0), ((0,),), frozenset({0}))

    @staticmethod
    def nothing() -> CharDfa:
        return CharDfa((0, 0xD800, 0xE000), (0, -1, 0), ((0,),), frozenset())

    @staticmethod
    def literal(text: str) -> CharDfa:
        return CharDfa.literals([text])

    @staticmethod
    def literals(words: Iterable[str], *, limits: RegularLimits = DEFAULT_LIMITS) -> CharDfa:
        """A finite set of texts: a trie, its tails shared."""
        from radixrt.grammar.regular.words import from_words

        return from_words(words, limits)

    @staticmethod
    def length(low: int, high: int | None = None, *, limits: RegularLimits = DEFAULT_LIMITS) -> CharDfa:
        """All texts of ``low`` to ``high`` characters."""
        check_bounds("length", low, high)
        count = low if high is None else high
        if count + 2 > limits.states:
            Budget(limits, f"a length of {count:,}").over("states")
        rows = [[s + 1] for s in range(count)] + ([[count]] if high is None else [[count + 1], [count + 1]])
        final = [s >= low and (high is None or s <= high) for s in range(len(rows))]
        return CharDfa.make((0, 0xD800, 0xE000), (0, -1, 0), rows, final)

    # ---- asking

    @property
    def states(self) -> int:
        """How many states, the dead one included."""
        return len(self.rows)

    @cached_property
    def sets(self) -> tuple[CharSet, ...]:
        """The characters of each class."""
        return tuple(class_sets(self.starts, self.classes))

    @property
    def is_empty(self) -> bool:
        return not self.accepting

    @property
    def is_universal(self) -> bool:
        return len(self.rows) == 1 and bool(self.accepting)

    @cached_property
    def dead(self) -> int:
        """The state no text leads out of; -1: there is none."""
        for s, row in enumerate(self.rows):
            if s not in self.accepting and all(t == s for t in row):
                return s
        return -1

    @cached_property
    def _topological(self) -> list[int] | None:
        """Live states, each before those it leads to; ``None``: there is a cycle among them."""
        incoming = [0] * len(self.rows)
        for s, row in enumerate(self.rows):
            if s != self.dead:
                for t in set(row):
                    incoming[t] += 1
        if self.dead == 0:
            return []
        if incoming[0]:
            return None
        order = [0]
        for s in order:
            for t in set(self.rows[s]):
                incoming[t] -= 1
                if not incoming[t] and t != self.dead:
                    order.append(t)
        return order if len(order) == len(self.rows) - (self.dead >= 0) else None

    @property
    def is_finite(self) -> bool:
        return self._topological is not None

    @cached_property
    def count(self) -> int | None:
        """How many texts; ``None``: without end."""
        order = self._topological
        if order is None:
            return None
        sizes = [sum(high - low + 1 for low, high in chars) for chars in self.sets]
        totals = [0] * len(self.rows)
        for s in reversed(order):
            totals[s] = (s in self.accepting) + sum(
                k * totals[t] for k, t in zip(sizes, self.rows[s]) if t != self.dead
            )
        return totals[0]

    @cached_property
    def distances(self) -> tuple[int | None, ...]:
        """For each state the length of the shortest text from it to the end; ``None``: no way."""
        back: list[list[int]] = [[] for _ in self.rows]
        for s, row in enumerate(self.rows):
            for t in set(row):
                back[t].append(s)
        out: list[int | None] = [None] * len(self.rows)
        layer, depth = list(self.accepting), 0
        while layer:
            for s in layer:
                out[s] = depth
            depth += 1
            layer = list({b for t in layer for b in back[t] if out[b] is None})
        return tuple(out)

    @property
    def min_length(self) -> int | None:
        """Characters of the shortest text; ``None``: there is no text."""
        return self.distances[0]

    @cached_property
    def max_length(self) -> int | None:
        """Characters of the longest text; ``None``: without end."""
        order = self._topological
        if order is None:
            return None
        most = [0] * len(self.rows)
        for s in reversed(order):
            most[s] = max((most[t] + 1 for t in self.rows[s] if t != self.dead), default=0)
        return most[0]

    def class_of(self, char: str) -> int:
        return self.classes[bisect_right(self.starts, ord(char)) - 1]

    def accepts(self, text: str) -> bool:
        state = 0
        for char in text:
            cls = self.class_of(char)
            if cls < 0:
                return False
            state = self.rows[state][cls]
        return state in self.accepting

    def shortest(self) -> str | None:
        """A shortest text, the first by code point; ``None``: there is none."""
        return next(self.words(1), None)

    def words(self, limit: int | None = None) -> Iterator[str]:
        """The texts by length, then code point; at most ``limit`` of them."""
        if self.is_empty:
            return
        given = 0
        longest = self.max_length
        length = self.min_length or 0
        reach = self._reach(length)
        while limit is None or given < limit:
            if longest is not None and length > longest:
                return
            for word in self._words_of(length, reach):
                yield word
                given += 1
                if given == limit:
                    return
            length += 1
            reach = [*reach, self._before(reach[-1])]

    def _before(self, targets: frozenset[int]) -> frozenset[int]:
        return frozenset(s for s, row in enumerate(self.rows) if any(t in targets for t in row))

    def _reach(self, length: int) -> list[frozenset[int]]:
        """Entry ``k``: the states from which some text of exactly ``k`` characters is accepted."""
        out = [self.accepting]
        for _ in range(length):
            out.append(self._before(out[-1]))
        return out

    def _words_of(self, length: int, reach: list[frozenset[int]]) -> Iterator[str]:
        if 0 not in reach[length]:
            return
        path: list[Iterator[tuple[str, int]]] = [iter([("", 0)])]
        text: list[str] = []
        while path:
            step = next(path[-1], None)
            del text[len(path) - 1 :]
            if step is None:
                path.pop()
                continue
            text.append(step[0])
            if len(path) == length + 1:
                yield "".join(text)
            else:
                path.append(self._choices(step[1], reach[length - len(path)]))

    def _choices(self, state: int, targets: frozenset[int]) -> Iterator[tuple[str, int]]:
        for i, cls in enumerate(self.classes):
            if cls >= 0 and self.rows[state][cls] in targets:
                end = self.starts[i + 1] if i + 1 < len(self.starts) else LAST + 1
                for code in range(self.starts[i], end):
                    yield chr(code), self.rows[state][cls]

    # ---- combining

    def __and__(self, other: CharDfa) -> CharDfa:
        return self.product(other, lambda a, b: a and b)

    def __or__(self, other: CharDfa) -> CharDfa:
        return self.product(other, lambda a, b: a or b)

    def __sub__(self, other: CharDfa) -> CharDfa:
        return self.product(other, lambda a, b: a and not b)

    def __invert__(self) -> CharDfa:
        final = [s not in self.accepting for s in range(len(self.rows))]
        return CharDfa.make(self.starts, self.classes, self.rows, final)

    def __le__(self, other: CharDfa) -> bool:
        return (self - other).is_empty

    def disjoint(self, other: CharDfa) -> bool:
        """Whether no text is in both."""
        return (self & other).is_empty

    def product(
        self, other: CharDfa, keep: Callable[[bool, bool], bool], *, limits: RegularLimits = DEFAULT_LIMITS
    ) -> CharDfa:
        """The texts ``t`` for which ``keep(t in self, t in other)``."""
        starts, classes, pairs = _common(self, other)
        budget = Budget(limits, f"a combination of automata of {self.states} and {other.states} states")
        native = native_module()
        if native is None:
            return self._product(other, keep, starts, classes, pairs, budget)
        keeps = tuple(bool(keep(a, b)) for a in (False, True) for b in (False, True))
        lefts, rights = zip(*pairs)
        made = native.product(
            self.rows,
            self.accepting,
            other.rows,
            other.accepting,
            lefts,
            rights,
            classes,
            keeps,
            limits.states,
            limits.work,
        )
        if isinstance(made, str):
            budget.over(made)
        return CharDfa(*joined(starts, *made))

    def _product(
        self,
        other: CharDfa,
        keep: Callable[[bool, bool], bool],
        starts: list[int],
        classes: list[int],
        pairs: list[tuple[int, int]],
        budget: Budget,
    ) -> CharDfa:
        """``product`` in Python, the reference of the native one."""
        # A pair one side of which can decide alone stands for all of them: product states stay few.
        left, right = _sinks(self), _sinks(other)
        settled: dict[tuple[int, int], tuple[int, int] | bool] = {}

        def settle(a: int, b: int) -> tuple[int, int] | bool:
            found = settled.get((a, b))
            if found is None:
                found = (a, b)
                if a in left and keep(left[a], True) == keep(left[a], False):
                    found = keep(left[a], True)
                elif b in right and keep(True, right[b]) == keep(False, right[b]):
                    found = keep(True, right[b])
                settled[a, b] = found
            return found

        def row(state: tuple[int, int] | bool) -> list[tuple[int, int] | bool]:
            if isinstance(state, bool):
                return [state] * len(pairs)
            a, b = self.rows[state[0]], other.rows[state[1]]
            return [settle(a[i], b[j]) for i, j in pairs]

        def final(state: tuple[int, int] | bool) -> bool:
            if isinstance(state, bool):
                return state
            return keep(state[0] in self.accepting, state[1] in other.accepting)

        return grow(settle(0, 0), row, final, starts, classes, budget)

    def concat(self, other: CharDfa, *, limits: RegularLimits = DEFAULT_LIMITS) -> CharDfa:
        """A text of this language, then one of the other."""
        from radixrt.grammar.regular.build import chain

        return chain([self, other], accept_from=1, loop=False, limits=limits)

    def repeat(self, low: int, high: int | None = None, *, limits: RegularLimits = DEFAULT_LIMITS) -> CharDfa:
        """``low`` to ``high`` (``None``: any number of) texts of this language in a row."""
        from radixrt.grammar.regular.build import chain

        check_bounds("repeat", low, high)
        copies = max(low, 1) if high is None else high
        if copies * self.states > limits.positions:
            Budget(limits, f"a repetition of {copies:,} times").over("positions")
        empty = CharDfa.literal("")
        if copies == 0:
            return empty
        some = chain([self] * copies, accept_from=max(low, 1) - 1, loop=high is None, limits=limits)
        return some | empty if low == 0 else some


class Budget:
    """Counts the work of one construction against its limits."""

    __slots__ = ("left", "limits", "name")

    def __init__(self, limits: RegularLimits, name: str) -> None:
        self.limits, self.name, self.left = limits, name, limits.work

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            self.over("work")

    def over(self, field: str) -> NoReturn:
        limit = getattr(self.limits, field)
        raise UnsupportedConstraint("pattern", f"={self.name}: its automaton passes the limit of {limit:,} {field}")


def check_bounds(field: str, low: int, high: int | None) -> None:
    if low < 0 or (high is not None and high < low):
        raise InvalidRequest(field, f"={low}..{high}: must not be negative nor out of order")


def grow(
    start: T,
    row: Callable[[T], Sequence[T]],
    final: Callable[[T], bool],
    starts: Sequence[int],
    classes: Sequence[int],
    budget: Budget,
) -> CharDfa:
    """Every state reachable from ``start``, then the canonical form."""
    ids: dict[T, int] = {start: 0}
    order, rows = [start], []
    for state in order:
        out = []
        for target in row(state):
            found = ids.get(target)
            if found is None:
                found = ids[target] = len(order)
                order.append(target)
            out.append(found)
        rows.append(out)
        budget.spend(len(out))
        if len(order) > budget.limits.states:
            budget.over("states")
    return CharDfa.make(starts, classes, rows, [final(s) for s in order])


def _common(a: CharDfa, b: CharDfa) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """The coarsest partition finer than both, and for each of its classes those of either side."""
    starts: list[int] = []
    classes: list[int] = []
    ids: dict[tuple[int, int], int] = {}
    i = j = 0
    at = 0
    while at <= LAST:
        pair = (a.classes[i], b.classes[j])
        cls = -1 if pair[0] < 0 else ids.setdefault(pair, len(ids))
        if not classes or classes[-1] != cls:
            starts.append(at)
            classes.append(cls)
        next_a = a.starts[i + 1] if i + 1 < len(a.starts) else LAST + 1
        next_b = b.starts[j + 1] if j + 1 < len(b.starts) else LAST + 1
        at = min(next_a, next_b)
        i += next_a == at
        j += next_b == at
    return starts, classes, list(ids)


def _sinks(dfa: CharDfa) -> dict[int, bool]:
    """States that lead only to themselves, and whether they accept."""
    return {s: s in dfa.accepting for s, row in enumerate(dfa.rows) if all(t == s for t in row)}
