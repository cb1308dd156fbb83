"""The automaton in plain Python: the reference for the native one, and what runs where no compiler was there.

A configuration is a set of stacks of *parts* still to be matched; a byte replaces the part on top by what is left of it. Nothing
is merged or abbreviated, so it is slow and easy to believe.

Invariants: stacks and configurations are numbered, equal ones alike; every stack kept has some way to its end. Same names and
results as ``radixrt.grammar._native``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from radixrt.grammar.program import Op
from radixrt.grammar.vocabulary import Vocabulary as _Vocabulary

NEVER = 1 << 40  # no way to the end, or none of a length anyone could write
FORCED_BYTES = 4096
DEAD = 0  # the configuration without stacks
FINISHED = -1
Part: TypeAlias = tuple[Any, ...]  # what it is, then its node or bytes, then how far it is


class TooLarge(RuntimeError):
    """A grammar beyond its limits."""


def Vocabulary(spelled: Sequence[bytes], ends: Sequence[int]) -> _Vocabulary:
    """The form of a vocabulary this engine wants: as it is."""
    return _Vocabulary(tuple(spelled), tuple(ends))


def _sequence(text: str) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Byte sets in hexadecimal, one after the other: ``C2-DF 80-BF``; ``,`` joins ranges of one set."""
    return tuple(tuple((int(r[:2], 16), int(r[-2:], 16)) for r in byte_set.split(",")) for byte_set in text.split())


_HEX = "30-39,41-46,61-66"
# Every way to write one character inside a JSON string: raw UTF-8 (Unicode 16, table 3-7), escapes, surrogate pairs.
JSON_CHARACTER = tuple(
    map(
        _sequence,
        (
            "20-21,23-5B,5D-7F",
            "C2-DF 80-BF",
            "E0 A0-BF 80-BF",
            "E1-EC,EE-EF 80-BF 80-BF",
            "ED 80-9F 80-BF",
            "F0 90-BF 80-BF 80-BF",
            "F1-F3 80-BF 80-BF 80-BF",
            "F4 80-8F 80-BF 80-BF",
            "5C 22,5C,2F,62,66,6E,72,74",
            f"5C 75 30-39,41-43,45-46,61-63,65-66 {_HEX} {_HEX} {_HEX}",
            f"5C 75 44,64 30-37 {_HEX} {_HEX}",
            f"5C 75 44,64 38-39,41-42,61-62 {_HEX} {_HEX} 5C 75 44,64 43-46,63-66 {_HEX} {_HEX}",
        ),
    )
)


def _plus(a: int, b: int) -> int:
    return min(a + b, NEVER)


class Automaton:
    """One grammar over one vocabulary."""

    def __init__(
        self,
        vocabulary: _Vocabulary,
        code: Sequence[int],
        at: Sequence[int],
        roots: Sequence[int],
        blob: bytes,
        nullable: bytes,
        start: int,
        max_states: int,
        items: int,
        depth: int,
        memory: int,
    ) -> None:
        self.vocabulary, self.blob, self.roots = vocabulary, blob, list(roots)
        self.items, self.depth, self.memory = items, depth, memory
        self.nodes = [(code[i], code[i + 1], code[i + 2], tuple(code[i + 4 : i + 4 + code[i + 3]])) for i in at]
        self.dfas = {i: self._dfa(words) for i, (op, _, _, words) in enumerate(self.nodes) if op == Op.DFA}
        self.bits = {
            i: int.from_bytes(blob[a : a + 32], "little") for i, (op, a, _, _) in enumerate(self.nodes) if op == Op.SET
        }
        self.spelled = sum(1 << byte for byte in vocabulary.single_bytes)
        self._costs = {any_byte: self._fixpoint(any_byte) for any_byte in (False, True)}
        self.stacks: list[tuple[Part, int] | None] = [None]  # stack 0 is empty: the output may end
        self.lengths: list[tuple[int, int, int]] = [(0, 0, 0)]  # shortest way with spelled bytes, with any; depth
        self._stack_ids: dict[tuple[Part, int], int] = {}
        self.configurations: list[frozenset[int]] = [frozenset()]
        self._configuration_ids: dict[frozenset[int], int] = {frozenset(): DEAD}
        self._rows: list[dict[int, int]] = [{}]
        self._masks: dict[int, list[int]] = {}
        self._plans: dict[int, tuple[int, ...]] = {}
        self.start = self._close([self._push(("node", self.roots[start]), 0)])

    @staticmethod
    def _dfa(words: tuple[int, ...]) -> list[tuple[bool, list[tuple[int, int, int]]]]:
        states, i = [], 0
        while i < len(words):
            count = words[i + 1]
            edges = [(words[j], words[j + 1], words[j + 2]) for j in range(i + 2, i + 2 + 3 * count, 3)]
            states.append((bool(words[i]), edges))
            i += 2 + 3 * count
        return states

    # -- the shortest way through a part, in bytes

    def _usable(self, bits: int, any_byte: bool) -> bool:
        return bool(bits if any_byte else bits & self.spelled)

    def _fixpoint(self, any_byte: bool) -> dict[Part, int]:
        """Shortest lengths of all nodes and DFA states: improved until nothing improves."""
        cost: dict[Part, int] = {}
        for node, states in self.dfas.items():
            for state, (accepting, _) in enumerate(states):
                cost["dfa", node, state] = 0 if accepting else NEVER
            changed = True
            while changed:
                changed = False
                for state, (_, edges) in enumerate(states):
                    for low, high, to in edges:
                        usable = self._usable(((1 << (high + 1)) - 1) >> low << low, any_byte)
                        new = _plus(1, cost["dfa", node, to]) if usable else NEVER
                        if new < cost["dfa", node, state]:
                            cost["dfa", node, state], changed = new, True
        character = min(self._sequence_cost(sequence, any_byte) for sequence in JSON_CHARACTER)
        cost["character",] = character
        for node in range(len(self.nodes)):
            cost["node", node] = NEVER
        changed = True
        while changed:
            changed = False
            for node, (op, a, b, kids) in enumerate(self.nodes):
                if op == Op.LITERAL:
                    new = self._literal_cost(self.blob[a : a + b], any_byte)
                elif op == Op.SET:
                    new = 1 if self._usable(self.bits[node], any_byte) else NEVER
                elif op == Op.SEQ:
                    new = min(sum(cost["node", kid] for kid in kids), NEVER)
                elif op == Op.ALT:
                    new = min((cost["node", kid] for kid in kids), default=NEVER)
                elif op == Op.REPEAT:
                    new = min(a * cost["node", kids[0]], NEVER)
                elif op == Op.REF:
                    new = cost["node", self.roots[a]]
                elif op == Op.DFA:
                    new = cost["dfa", node, 0]
                else:
                    new = min(a * character, NEVER)
                if new < cost["node", node]:
                    cost["node", node], changed = new, True
        return cost

    def _literal_cost(self, text: bytes, any_byte: bool) -> int:
        return len(text) if all(self._usable(1 << byte, any_byte) for byte in text) else NEVER

    def _sequence_cost(self, sequence: Sequence[Sequence[tuple[int, int]]], any_byte: bool) -> int:
        usable = (
            any(self._usable(((1 << (high + 1)) - 1) >> low << low, any_byte) for low, high in byte_set)
            for byte_set in sequence
        )
        return len(sequence) if all(usable) else NEVER

    def _cost(self, part: Part, any_byte: bool) -> int:
        kind, cost = part[0], self._costs[any_byte]
        if kind == "literal":
            return self._literal_cost(part[1], any_byte)
        if kind == "sequence":
            return self._sequence_cost(part[1], any_byte)
        if kind == "repeat":
            _, low, _, kids = self.nodes[part[1]]
            return min(max(low - part[2], 0) * cost["node", kids[0]], NEVER)
        if kind == "json":
            return min(max(self.nodes[part[1]][1] - part[2], 0) * cost["character",], NEVER)
        return cost[part]

    # -- stacks and configurations

    def _push(self, part: Part, below: int) -> int:
        key = (part, below)
        known = self._stack_ids.get(key)
        if known is None:
            spelled, reach, depth = self.lengths[below]
            known = self._stack_ids[key] = len(self.stacks)
            self.stacks.append(key)
            self.lengths.append(
                (_plus(self._cost(part, False), spelled), _plus(self._cost(part, True), reach), depth + 1)
            )
            if depth >= self.depth:
                raise TooLarge(f"is nested more than {self.depth} deep")
            if 200 * len(self.stacks) > 4 * self.memory:
                raise TooLarge(f"needs more memory than its limit of {self.memory} bytes")
        return known

    def _open(self, part: Part, below: int) -> Iterator[int]:
        """The stacks a part stands for, without a byte. A part that only takes bytes stands for itself: nothing."""
        kind = part[0]
        if kind == "dfa":
            if self.dfas[part[1]][part[2]][0]:
                yield below
        elif kind == "repeat" or kind == "json":
            _, low, high, kids = self.nodes[part[1]]
            count = part[2]
            if count >= low:
                yield below
            if high < 0 or count < high:
                after = self._push((kind, part[1], min(count + 1, low) if high < 0 else count + 1), below)
                if kind == "repeat":
                    yield self._push(("node", kids[0]), after)
                else:
                    for sequence in JSON_CHARACTER:
                        yield self._push(("sequence", sequence), after)
        elif kind == "node":
            node = part[1]
            op, a, b, kids = self.nodes[node]
            if op == Op.LITERAL:
                yield self._push(("literal", self.blob[a : a + b]), below)
            elif op == Op.SEQ:
                for kid in reversed(kids):
                    below = self._push(("node", kid), below)
                yield below
            elif op == Op.ALT:
                for kid in kids:
                    yield self._push(("node", kid), below)
            elif op == Op.REF:
                yield self._push(("node", self.roots[a]), below)
            elif op == Op.DFA:
                yield self._push(("dfa", node, 0), below)
            elif op == Op.REPEAT:
                yield self._push(("repeat", node, 0), below)
            elif op == Op.JSON:
                yield self._push(("json", node, 0), below)

    def _takes_bytes(self, stack: int) -> bool:
        top = self.stacks[stack]
        if top is None:
            return True  # the end: kept, to be seen
        kind = top[0][0]
        return kind in ("literal", "sequence", "dfa") or (kind == "node" and self.nodes[top[0][1]][0] == Op.SET)

    def _close(self, stacks: Sequence[int]) -> int:
        todo, seen = list(stacks), set()
        while todo:
            stack = todo.pop()
            if stack in seen or self.lengths[stack][1] >= NEVER:
                continue
            seen.add(stack)
            if len(seen) > 20 * self.items:
                raise TooLarge(f"is too ambiguous: more than {self.items} places at once")
            top = self.stacks[stack]
            if top is not None:
                todo += self._open(*top)
        kept = frozenset(filter(self._takes_bytes, seen))
        known = self._configuration_ids.get(kept)
        if known is None:
            known = self._configuration_ids[kept] = len(self.configurations)
            self.configurations.append(kept)
            self._rows.append({})
        return known

    def _after(self, part: Part, byte: int, below: int) -> int | None:
        """The stack after one byte of a part, or None."""
        kind = part[0]
        if kind == "literal":
            text = part[1]
            if text[0] != byte:
                return None
            return self._push(("literal", text[1:]), below) if len(text) > 1 else below
        if kind == "sequence":
            byte_set, rest = part[1][0], part[1][1:]
            if not any(low <= byte <= high for low, high in byte_set):
                return None
            return self._push(("sequence", rest), below) if rest else below
        if kind == "dfa":
            for low, high, to in self.dfas[part[1]][part[2]][1]:
                if low <= byte <= high:
                    return self._push(("dfa", part[1], to), below)
            return None
        return below if self.bits[part[1]] >> byte & 1 else None

    def next(self, configuration: int, byte: int) -> int:
        row = self._rows[configuration]
        known = row.get(byte)
        if known is None:
            tops = (self.stacks[stack] for stack in self.configurations[configuration])
            moved = (self._after(top[0], byte, top[1]) for top in tops if top is not None)
            known = row[byte] = self._close([stack for stack in moved if stack is not None])
        return known

    def walk(self, configuration: int, data: bytes) -> int:
        for byte in data:
            if configuration == DEAD:
                break
            configuration = self.next(configuration, byte)
        return configuration

    # -- what a configuration allows

    def accepts(self, configuration: int) -> bool:
        return 0 in self.configurations[configuration]

    def cost(self, configuration: int) -> int:
        return min((self.lengths[stack][0] for stack in self.configurations[configuration]), default=NEVER)

    def live(self, configuration: int) -> list[int]:
        """The bytes that may come next."""
        return [byte for byte in range(256) if self.next(configuration, byte) != DEAD]

    def targets(self, configuration: int) -> Iterator[tuple[int, int]]:
        """The tokens a configuration allows, and where each leads."""
        path, last = [configuration], b""
        for text, token in self.vocabulary.sorted_tokens:
            shared = 0
            while shared < min(len(text), len(last), len(path) - 1) and text[shared] == last[shared]:
                shared += 1
            del path[shared + 1 :]
            for byte in text[shared:]:
                path.append(self.next(path[-1], byte))
                if path[-1] == DEAD:
                    break
            last = text[: len(path) - 1]
            if len(path) == len(text) + 1 and path[-1] != DEAD and self.cost(path[-1]) < NEVER:
                yield token, path[-1]

    def allowed(self, configuration: int) -> list[int]:
        known = self._masks.get(configuration)
        if known is None:
            known = self._masks[configuration] = [token for token, _ in self.targets(configuration)]
        return known

    def best_byte(self, configuration: int) -> int | None:
        cost = self.cost(configuration)
        if not 0 < cost < NEVER:
            return None
        good = (b for b in sorted(self.vocabulary.single_bytes) if self.cost(self.next(configuration, b)) == cost - 1)
        return next(good)

    def shortest(self, configuration: int) -> bytes:
        out = bytearray()
        while (byte := self.best_byte(configuration)) is not None:
            out.append(byte)
            configuration = self.next(configuration, byte)
        return bytes(out)

    def plan(self, configuration: int) -> tuple[int, ...]:
        known = self._plans.get(configuration)
        if known is None:
            rest, tokens, ids = self.shortest(configuration), [], self.vocabulary.by_bytes
            while rest:
                size = next(n for n in range(min(len(rest), self.vocabulary.longest), 0, -1) if rest[:n] in ids)
                tokens.append(ids[rest[:size]])
                rest = rest[size:]
            known = self._plans[configuration] = tuple(tokens)
        return known

    # -- what the outside sees

    def matcher(self) -> Matcher:
        return Matcher(self, [self.start])

    def figures(self) -> dict[str, int]:
        return {
            "memory_bytes": 200 * len(self.stacks) + 8 * sum(map(len, self._masks.values())),
            "states": len(self.nodes),
            "configurations": len(self.configurations),
            "masks": len(self._masks),
            "classes": 256,
        }

    def empty(self) -> bool:
        return self.start == DEAD

    def unspelled(self) -> bytes:
        """The bytes some place of the grammar asks for that are no token by themselves."""
        asked = 0
        for node, (op, a, b, _) in enumerate(self.nodes):
            if op == Op.LITERAL:
                for byte in self.blob[a : a + b]:
                    asked |= 1 << byte if not self.spelled >> byte & 1 else 0
            elif op == Op.SET and not self.bits[node] & self.spelled:
                asked |= self.bits[node]
            elif op == Op.DFA:
                for _, edges in self.dfas[node]:
                    for low, high, _ in edges:
                        bits = ((1 << (high + 1)) - 1) >> low << low
                        asked |= 0 if bits & self.spelled else bits
        return bytes(byte for byte in range(256) if asked >> byte & 1)


class Matcher:
    """Where one sequence stands."""

    def __init__(self, owner: Automaton, states: list[int]) -> None:
        self.owner, self.states = owner, states

    @property
    def _here(self) -> int:
        return max(self.states[-1], DEAD)

    def fill_mask(self, mask: Any, row: int, remaining: int | None = None) -> None:
        owner, here = self.owner, self._here
        out = mask[row].view("uint32")
        if len(out) < owner.vocabulary.words:
            raise ValueError(f"mask: {len(out)} words a row are too few, the vocabulary needs {owner.vocabulary.words}")
        out[:] = 0
        if remaining is None:
            allowed = owner.allowed(here)
        elif remaining <= 0:
            allowed = []
        else:
            allowed = [token for token, to in owner.targets(here) if len(owner.plan(to)) <= remaining - 1]
        if owner.accepts(here):
            allowed = [*allowed, *owner.vocabulary.ends]
        for token in allowed:
            out[token >> 5] |= 1 << (token & 31)

    def accept(self, token: int) -> bool:
        here, vocabulary = self._here, self.owner.vocabulary
        if token in vocabulary.ends:
            if not self.owner.accepts(here):
                return False
            self.states.append(FINISHED)
            return True
        text = vocabulary.spelled[token] if 0 <= token < vocabulary.size else b""
        to = self.owner.walk(here, text) if text else DEAD
        if self.owner.cost(to) >= NEVER:
            return False
        self.states.append(to)
        return True

    def advance_bytes(self, data: bytes) -> bool:
        to = self.owner.walk(self._here, data)
        if to != DEAD:
            self.states.append(to)
        return to != DEAD

    def rollback(self, count: int) -> None:
        if not 0 <= count < len(self.states):
            raise ValueError(f"n={count}: must be 0 to {len(self.states) - 1}, the tokens accepted")
        if count:
            del self.states[-count:]

    def copy(self) -> Matcher:
        return Matcher(self.owner, list(self.states))

    def forced_bytes(self) -> bytes:
        out, here = bytearray(), self._here
        while len(out) < FORCED_BYTES and not self.owner.accepts(here):
            live = self.owner.live(here)
            if len(live) != 1:
                break
            out.append(live[0])
            here = self.owner.next(here, live[0])
        return bytes(out)

    def shortest_completion(self) -> bytes:
        return self.owner.shortest(self._here)

    def plan(self) -> list[int]:
        return list(self.owner.plan(self._here))

    def allows_within(self, token: int, remaining: int) -> bool:
        after = self.copy()
        if remaining < 0 or not after.accept(token):
            return False
        return after.finished or after.min_tokens_to_end <= remaining

    @property
    def can_end(self) -> bool:
        return self.owner.accepts(self._here)

    @property
    def can_continue(self) -> bool:
        return bool(self.owner.live(self._here))

    @property
    def finished(self) -> bool:
        return self.states[-1] == FINISHED

    @property
    def length(self) -> int:
        return len(self.states) - 1

    @property
    def min_bytes_to_end(self) -> int:
        return 0 if self.finished else self.owner.cost(self._here)

    @property
    def min_tokens_to_end(self) -> int:
        return len(self.owner.plan(self._here))
