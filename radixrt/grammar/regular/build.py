"""Syntax trees to automata: Glushkov's positions (1961), made deterministic by the subset construction.

Sets of positions are the bits of an integer. A look-around is a position that takes no character: entering it asks a question.
About what precedes, an automaton that runs along from the start of the text knows the answer at once. About what follows, the
branch goes on under an *obligation*: the state of an automaton for the rest of the text, which must accept at the end. So a
state is a set of (obligations, positions), a disjunction of conjunctions; that is exact wherever the look-around stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.regular.chardfa import Budget, CharDfa, grow
from radixrt.grammar.regular.charset import CharSet, partition
from radixrt.grammar.regular.limits import RegularLimits
from radixrt.grammar.regular.minimize import Rows, minimize
from radixrt.grammar.regular.nodes import (
    ANY_STAR,
    AT_END,
    AT_START,
    Cat,
    Chars,
    Look,
    Node,
    Or,
    Rep,
    cat,
    either,
    has_look,
)

TRUE, FALSE = 0, 1  # obligations already met, or never to be
_Threads = frozenset[tuple[frozenset[int], int]]
_State = tuple[tuple[int, ...], _Threads]


def from_node(node: Node, *, limits: RegularLimits, name: str) -> CharDfa:
    """The language of a syntax tree, matched as a whole."""
    budget = Budget(limits, name)
    sets = tuple(dict.fromkeys(_sets_of(node)))
    if len(sets) > limits.positions:
        budget.over("positions")
    starts, classes, members = partition(sets)
    compiler = _Compiler({chars: bit for bit, chars in enumerate(sets)}, members, budget)
    rows, final = compiler.general(node, None) if has_look(node) else compiler.plain(node)
    return CharDfa.make(starts, classes, rows, final)


def simplified(node: Node) -> Node:
    """The tree without outermost ``^`` and ``$``, which say nothing when the whole text is matched."""
    return _strip(_strip(node, 0), -1)


def searching(node: Node) -> Node:
    """The tree of all texts in which ``node`` is found, with outermost ``^`` and ``$`` taken at their word."""
    groups: dict[tuple[bool, bool], list[Node]] = {}
    for branch in node.items if isinstance(node, Or) else (node,):
        shorter = _strip(branch, 0)
        both = _strip(shorter, -1)
        groups.setdefault((shorter is not branch, both is not shorter), []).append(both)
    out: list[Node] = []
    for (at_start, at_end), branches in groups.items():
        before = [] if at_start else [ANY_STAR]
        after = [] if at_end else [ANY_STAR]
        out.append(cat([*before, either(branches), *after]))
    return either(out)


def _strip(node: Node, index: int) -> Node:
    """The node without the anchors all its texts have at the start (0) or end (-1); the very same node if there are none."""
    anchor = AT_END if index else AT_START
    if node == anchor:
        return Cat(())
    if isinstance(node, Cat) and node.items:
        inner = _strip(node.items[index], index)
        if inner is not node.items[index]:
            rest = node.items[:-1] if index else node.items[1:]
            return _strip(cat([*rest, inner] if index else [inner, *rest]), index)
    if isinstance(node, Or) and node.items:
        stripped = [_strip(item, index) for item in node.items]
        if all(new is not old for new, old in zip(stripped, node.items)):
            return Or(tuple(stripped))
    return node


def _sets_of(node: Node) -> Iterator[CharSet]:
    match node:
        case Chars(chars):
            yield chars
        case Cat(items) | Or(items):
            for item in items:
                yield from _sets_of(item)
        case Rep(item) | Look(item):
            yield from _sets_of(item)
            if isinstance(node, Look):
                yield from _sets_of(ANY_STAR)


class _Positions:
    """The position automaton of one tree: what may come first, and what after each position."""

    def __init__(self, node: Node, bits: dict[CharSet, int], budget: Budget) -> None:
        self.bits, self.budget = bits, budget
        self.sets: list[int] = []  # set index of each position; -1: the end, or a look-around
        self.follow: list[int] = []
        self.looks: dict[int, Look] = {}
        self.open_ends: int = (
            0  # positions that take anything for ever; a state with one of them and the end takes all texts
        )
        first, last, nullable = self.visit(node)
        self.end = 1 << self.new(-1)
        self.link(last, self.end)
        self.start = first | (self.end if nullable else 0)
        every = bits.get(ANY_STAR.item.set) if isinstance(ANY_STAR.item, Chars) else None
        for p, follow in enumerate(self.follow):
            if self.sets[p] == every and every is not None and follow & (1 << p) and follow & self.end:
                self.open_ends |= 1 << p

    def new(self, set_index: int) -> int:
        self.sets.append(set_index)
        self.follow.append(0)
        if len(self.sets) > self.budget.limits.positions:
            self.budget.over("positions")
        return len(self.sets) - 1

    def link(self, last: int, first: int) -> None:
        follow = self.follow
        while last:
            low = last & -last
            follow[low.bit_length() - 1] |= first
            last ^= low

    def visit(self, node: Node) -> tuple[int, int, bool]:
        """Positions that may come first, those that may come last, and whether the empty text will do."""
        match node:
            case Chars(chars):
                one = 1 << self.new(self.bits[chars])
                return one, one, False
            case Look():
                position = self.new(-1)
                self.looks[position] = node
                return 1 << position, 1 << position, False
            case Cat(items):
                first, last, nullable = 0, 0, True
                for item in items:
                    a, b, empty = self.visit(item)
                    self.link(last, a)
                    first = first | a if nullable else first
                    last = last | b if empty else b
                    nullable = nullable and empty
                return first, last, nullable
            case Or(items):
                parts = [self.visit(item) for item in items]
                first = last = 0
                for a, b, _ in parts:
                    first, last = first | a, last | b
                return first, last, any(empty for _, _, empty in parts)
            case Rep(item, low, high):
                return self.repeat(item, low, high)
        raise TypeError(node)

    def repeat(self, item: Node, low: int, high: int | None) -> tuple[int, int, bool]:
        # Copies 1..low are needed, those up to high may each be the last. An item that may be empty is taken without its
        # empty text (same positions), and then any number of copies up to high will do.
        if high == 0:
            return 0, 0, True
        first, last, empty = self.visit(item)
        if not first:  # nothing, or the empty text alone: copies of it would never end
            return 0, 0, empty or low == 0
        nullable = low == 0 or empty
        needed = 1 if nullable else low
        copies = max(needed, 1) if high is None else high
        previous, ends = last, last if needed <= 1 else 0
        for k in range(2, copies + 1):
            a, b, _ = self.visit(item)
            self.link(previous, a)
            previous = b
            if k >= needed:
                ends |= b
            if k == copies:
                first_of_last = a
        if high is None:
            self.link(previous, first if copies == 1 else first_of_last)
        return first, ends, nullable


class _Compiler:
    """Makes trees over one shared partition of the alphabet deterministic."""

    def __init__(self, bits: dict[CharSet, int], members: Sequence[int], budget: Budget) -> None:
        self.bits, self.members, self.budget = bits, members, budget
        self.behind: dict[Node, int] = {}  # tree of a look-behind -> index into the vector
        self.behind_tables: list[tuple[Rows, Sequence[bool]]] = []
        every = [TRUE] * len(members), [FALSE] * len(members)
        self.duties: list[list[int]] = [every[0], every[1]]  # rows of obligations, all numbered together
        self.duty_ends: list[bool] = [True, False]
        self.ahead: dict[tuple[Look, tuple[int, ...]], int] = {}

    def classes_of(self, positions: _Positions) -> list[int]:
        """For each class the positions that take it."""
        by_set: dict[int, int] = {}
        for p, set_index in enumerate(positions.sets):
            by_set[set_index] = by_set.get(set_index, 0) | 1 << p
        out = []
        for mask in self.members:
            hits = 0
            for set_index, at in by_set.items():
                if set_index >= 0 and mask >> set_index & 1:
                    hits |= at
            out.append(hits)
        return out

    def plain(self, node: Node) -> tuple[list[list[int]], list[bool]]:
        """The usual case: no look-arounds."""
        positions = _Positions(node, self.bits, self.budget)
        takes, follow, end, open_ends = self.classes_of(positions), positions.follow, positions.end, positions.open_ends
        settled = open_ends & -open_ends | end
        first = settled if positions.start & open_ends and positions.start & end else positions.start
        ids, order, rows = {first: 0}, [first], []
        moves: dict[int, int] = {0: 0}
        budget, width, cost = self.budget, len(takes), 1 + len(follow) // 500  # long integers are slower
        for state in order:
            row = []
            for take in takes:
                hits = state & take
                target = moves.get(hits)
                if target is None:
                    target, left, steps = 0, hits, 0
                    while left:
                        low = left & -left
                        target |= follow[low.bit_length() - 1]
                        left ^= low
                        steps += 1
                    if target & open_ends and target & end:
                        target = settled
                    moves[hits] = target
                    budget.spend(steps * cost)
                found = ids.get(target)
                if found is None:
                    found = ids[target] = len(order)
                    order.append(target)
                row.append(found)
            rows.append(row)
            budget.spend(width)
            if len(order) > budget.limits.states:
                budget.over("states")
        return rows, [state & end != 0 for state in order]

    # ---- look-arounds

    def general(self, node: Node, vector: tuple[int, ...] | None) -> tuple[list[list[int]], list[bool]]:
        """With look-arounds; ``vector``: the look-behinds' states where the text begins (``None``: at its very start)."""
        positions = _Positions(node, self.bits, self.budget)
        self.register(positions)
        if vector is None:
            vector = (0,) * len(self.behind_tables)
        takes = self.classes_of(positions)
        looks = 0
        for p in positions.looks:
            looks |= 1 << p
        free: frozenset[int] = frozenset()
        settled = positions.open_ends & -positions.open_ends | positions.end
        # Reached once anything may follow. Without such an end: no state at all.
        everything: _Threads = frozenset({(free, settled if positions.open_ends else 0)})
        budget = self.budget

        closures: dict[tuple[int, tuple[int, ...]], list[tuple[frozenset[int], int]]] = {}

        def closure(mask: int, at: tuple[int, ...]) -> list[tuple[frozenset[int], int]]:
            """What positions come to with every question on the way answered or noted down: duties, and characters to take.

            Fewest duties first: what was asked under fewer is not asked again, as ``fewest`` would drop all that came of it.
            """
            known = closures.get((mask, at))
            if known is not None:
                return known
            found: dict[frozenset[int], int] = {}
            asked: dict[int, list[frozenset[int]]] = {}
            waiting: dict[int, list[tuple[frozenset[int], int]]] = {0: [(free, mask)]}
            while waiting:
                fewest = min(waiting)
                duties, mask_here = waiting[fewest].pop()
                if not waiting[fewest]:
                    del waiting[fewest]
                plain = mask_here & ~looks
                if plain:
                    found[duties] = found.get(duties, 0) | plain
                questions = mask_here & looks
                while questions:
                    low = questions & -questions
                    questions ^= low
                    before = asked.setdefault(low, [])
                    budget.spend(1 + len(before) // 4)
                    if any(weaker <= duties for weaker in before):
                        continue
                    before.append(duties)
                    budget.spend(4)
                    p = low.bit_length() - 1
                    duty = self.answer(positions.looks[p], at)
                    if duty != FALSE:
                        more = duties if duty == TRUE else duties | {duty}
                        waiting.setdefault(len(more), []).append((more, positions.follow[p]))
            result = closures[mask, at] = list(self.fewest(found))
            return result

        def close(seeds: list[tuple[frozenset[int], int]], at: tuple[int, ...]) -> _Threads:
            """Answer or note down the questions of look-around positions until only characters are left to take."""
            found: dict[frozenset[int], int] = {}
            for duties, mask in seeds:
                reached = closure(mask, at)
                budget.spend(len(reached))
                for more, plain in reached:
                    both = duties | more
                    found[both] = found.get(both, 0) | plain
            plainly = found.get(free, 0)
            if plainly & positions.open_ends and plainly & positions.end:
                return everything
            return self.fewest(found)

        def row(state: _State) -> list[_State]:
            at, threads = state
            out: list[_State] = []
            if threads == everything:
                return [state] * len(takes)
            for cls, take in enumerate(takes):
                then = tuple(table[0][s][cls] for table, s in zip(self.behind_tables, at))
                seeds = []
                for duties, mask in threads:
                    hits = mask & take
                    if not hits:
                        continue
                    left = frozenset(self.duties[d][cls] for d in duties) - {TRUE}
                    if FALSE in left:
                        continue
                    target = 0
                    while hits:
                        low = hits & -hits
                        target |= positions.follow[low.bit_length() - 1]
                        hits ^= low
                    seeds.append((left, target))
                budget.spend(4 * len(threads) + 1)
                closed = close(seeds, then)
                out.append((then if closed and closed != everything else (), closed))
            return out

        def final(state: _State) -> bool:
            return any(mask & positions.end and all(self.duty_ends[d] for d in duties) for duties, mask in state[1])

        first: _State = (vector, close([(free, positions.start)], vector))
        ids, order, rows = {first: 0}, [first], []
        for state in order:
            numbers = []
            for target in row(state):
                if target not in ids:
                    ids[target] = len(order)
                    order.append(target)
                numbers.append(ids[target])
            rows.append(numbers)
            budget.spend(len(numbers))
            if len(order) > budget.limits.states:
                budget.over("states")
        return rows, [final(state) for state in order]

    def fewest(self, found: dict[frozenset[int], int]) -> _Threads:
        """Without the branches that another one with fewer obligations makes superfluous."""
        if len(found) > 1:
            by_size = sorted(found, key=len)
            self.budget.spend(len(by_size) ** 2)
            for i, duties in enumerate(by_size):
                for weaker in by_size[:i]:
                    if weaker < duties:
                        found[duties] &= ~found[weaker]
        return frozenset((duties, mask) for duties, mask in found.items() if mask)

    def register(self, positions: _Positions) -> None:
        """Number every look-behind in the tree, those inside look-aheads too, before the vector's length is fixed."""
        for look in positions.looks.values():
            self.register_look(look)

    def register_look(self, look: Look) -> None:
        if look.ahead:
            for inner in _looks_in(look.item):
                self.register_look(inner)
        elif look.item not in self.behind:
            if any(inner.ahead for inner in _looks_in(look.item)):
                raise UnsupportedConstraint(
                    "pattern", f"={self.budget.name}: a look-ahead or $ or \\b inside a look-behind is not supported"
                )
            self.behind[look.item] = len(self.behind_tables)
            self.behind_tables.append(([], []))
            tree = cat([ANY_STAR, look.item])
            compiler = _Compiler(self.bits, self.members, self.budget)
            table = compiler.general(tree, None) if has_look(tree) else compiler.plain(tree)
            self.behind_tables[self.behind[look.item]] = minimize(*table)

    def answer(self, look: Look, at: tuple[int, ...]) -> int:
        """The obligation that stands for a look-around, given the look-behinds' states here."""
        if not look.ahead:
            index = self.behind[look.item]
            return FALSE if self.behind_tables[index][1][at[index]] == look.negative else TRUE
        if not any(not inner.ahead for inner in _looks_in(look.item)):
            at = (0,) * len(at)
        found = self.ahead.get((look, at))
        if found is None:
            tree = cat([look.item, ANY_STAR])
            table = self.general(tree, at) if has_look(tree) else self.plain(tree)
            found = self.ahead[look, at] = self.oblige(*minimize(*table), look.negative)
        return found

    def oblige(self, rows: Rows, ends: Sequence[bool], negative: bool) -> int:
        """Number an automaton's states among the obligations; its start's number."""
        numbers = []
        for s, row in enumerate(rows):
            if all(t == s for t in row):
                numbers.append(TRUE if ends[s] != negative else FALSE)
            else:
                numbers.append(len(self.duties))
                self.duties.append([])
                self.duty_ends.append(ends[s] != negative)
        for s, row in enumerate(rows):
            if numbers[s] not in (TRUE, FALSE):
                self.duties[numbers[s]] = [numbers[t] for t in row]
        return numbers[0]


def _looks_in(node: Node) -> Iterator[Look]:
    match node:
        case Cat(items) | Or(items):
            for item in items:
                yield from _looks_in(item)
        case Rep(item):
            yield from _looks_in(item)
        case Look(item):
            yield node
            yield from _looks_in(item)


# ---- automata in a row


def chain(parts: Sequence[CharDfa], *, accept_from: int, loop: bool, limits: RegularLimits) -> CharDfa:
    """Texts of ``parts`` one after the other, ending in any part from ``accept_from`` on; ``loop``: the last any number of times."""
    shared = parts[0]
    uniform = all((p.starts, p.classes) == (shared.starts, shared.classes) for p in parts)
    if uniform:
        starts, classes = shared.starts, shared.classes
        columns = [list(range(len(shared.rows[0])))] * len(parts)
    else:
        sets = tuple(dict.fromkeys(chars for p in parts for chars in p.sets))
        starts, classes, members = partition(sets)
        place = {chars: bit for bit, chars in enumerate(sets)}
        columns = []
        for p in parts:
            bits = [place[chars] for chars in p.sets]
            columns.append([next(i for i, bit in enumerate(bits) if mask >> bit & 1) for mask in members])
    budget = Budget(limits, f"{len(parts)} automata in a row")
    # All states in one numbering; a set of them is the bits of an integer. Entering a final state enters the next part too.
    offsets, total = [], 0
    for part in parts:
        offsets.append(total)
        total += len(part.rows)
    entry: list[int] = [0] * len(parts)
    for k in range(len(parts) - 1, -1, -1):
        entry[k] = 1 << offsets[k]
        if 0 in parts[k].accepting and k + 1 < len(parts):
            entry[k] |= entry[k + 1]
    width = len(columns[0])
    moves: list[list[int]] = []
    final = 0
    for k, part in enumerate(parts):
        onward = entry[k + 1] if k + 1 < len(parts) else entry[k] if loop else 0
        arrive = []
        for s in range(len(part.rows)):
            bit = 0 if s == part.dead else 1 << (offsets[k] + s)
            if s in part.accepting:
                bit |= onward
                if k >= accept_from:
                    final |= 1 << (offsets[k] + s)
            arrive.append(bit)
        for targets in part.rows:
            moves.append([arrive[targets[c]] for c in columns[k]])
        budget.spend(len(part.rows) * width)

    def row(state: int) -> list[int]:
        out, left = [0] * width, state
        while left:
            low = left & -left
            left ^= low
            for c, target in enumerate(moves[low.bit_length() - 1]):
                out[c] |= target
            budget.spend(width)
        return out

    return grow(entry[0], row, lambda state: state & final != 0, starts, classes, budget)


__all__ = ["chain", "from_node", "searching", "simplified"]
