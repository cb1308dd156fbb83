"""A grammar as flat tables: what both automata, the native one and the Python one, are built from.

Invariants: nodes are in postorder (children before parents, shared expressions once); every ``Ref`` is a rule number; no
rule can reach itself without consuming a byte; everything is within ``ProgramLimits``. Normal forms: no empty ``Bytes``, no
``Seq`` or ``Alt`` of one, no ``Repeat`` of exactly one.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from radixrt.errors import nearest
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.ir import Alt, Bytes, ByteSet, Dfa, Expr, Grammar, JsonChars, PackedDfa, Ref, Repeat, Seq

FIELD = "constraint"
_MAX_COUNT = 1 << 30


class Op(IntEnum):
    """What a node is. Its words in ``Program.code``: op, a, b, n, then n further words."""

    LITERAL = 0  # a: offset in blob, b: length (at least 1)
    SET = 1  # a: offset in blob of 32 bytes, bit b % 8 of byte b // 8 allows byte b
    SEQ = 2  # n children
    ALT = 3  # n children
    REPEAT = 4  # a: low, b: high or -1, one child
    REF = 5  # a: rule number
    DFA = 6  # a: number of states; words: for each state: accepting, number of edges, (low, high, next)...
    JSON = 7  # a: low, b: high or -1


@dataclass(frozen=True)
class ProgramLimits:
    """How large a grammar may be. Beyond: ``UnsupportedConstraint``, before anything runs."""

    max_nodes: int = 500_000
    max_depth: int = 1_000
    max_bytes: int = 16 << 20


@dataclass(frozen=True)
class Program:
    """A checked grammar.

    Fields:
        code: the nodes' words, one node after the other (int32); at: where each node begins (int32).
        blob: literals and byte sets; roots: each rule's node (int32); names: each rule's name; start: rule number.
        nullable: for each node, 1 if it matches the empty string.
    """

    code: array[int]
    at: array[int]
    blob: bytes
    roots: array[int]
    names: tuple[str, ...]
    start: int
    nullable: bytes


_KINDS = (Bytes, ByteSet, Seq, Alt, Repeat, Ref, Dfa, JsonChars, PackedDfa)


def program(grammar: Grammar, limits: ProgramLimits | None = None, engine: Any = None) -> Program:
    """The tables of a grammar. ``engine``: the native module makes the same ones faster; what it refuses is judged here.

    Raises:
        UnsupportedConstraint: an unknown rule, a count or byte out of range, left recursion, or a grammar
            beyond the limits.
    """
    limits = limits or ProgramLimits()
    flatten = getattr(engine, "flatten", None)
    if flatten is not None and isinstance(grammar.start, str):
        made = flatten(dict(grammar.rules), grammar.start, _KINDS, limits.max_nodes, limits.max_depth, limits.max_bytes)
        if made is not None:
            code, at, blob, roots, names, nullable = made
            return Program(_ints(code), _ints(at), blob, _ints(roots), names, 0, nullable)
    builder = _Builder(grammar, limits)
    builder.build()
    cycle = builder.left_cycle()
    if cycle:
        raise UnsupportedConstraint(FIELD, f"is left-recursive: {' -> '.join(cycle)}")
    return builder.finish()


def _ints(data: bytes) -> array[int]:
    made = array("i")
    made.frombytes(data)
    return made


def unpacked(packed: PackedDfa) -> Dfa:
    """The same automaton in tuples. Raises UnsupportedConstraint: the words end too early."""
    words, edges, accepting, at = _ints(packed.words), [], set[int](), 0
    for state in range(packed.states):
        if at + 2 > len(words) or not 0 <= words[at + 1] <= (len(words) - at - 2) // 3:
            raise UnsupportedConstraint(FIELD, f"has an automaton that ends within state {state}")
        begin, end = at + 2, at + 2 + 3 * words[at + 1]
        edges.append(tuple((words[i], words[i + 1], words[i + 2]) for i in range(begin, end, 3)))
        if words[at]:
            accepting.add(state)
        at = end
    return Dfa(tuple(edges), frozenset(accepting))


class _Builder:
    """Walks the rules reachable from the start, with a stack of its own: nesting is data, not Python frames."""

    def __init__(self, grammar: Grammar, limits: ProgramLimits) -> None:
        self.grammar, self.limits = grammar, limits
        self.code: list[int] = []
        self.at: list[int] = []
        self.depth: list[int] = []
        self.blob = bytearray()
        self.rule: dict[str, int] = {}
        self.pending: list[str] = []
        self.names: list[str] = []
        self.roots: list[int] = []
        self.seen: dict[int, int] = {}  # id of an expression -> its node; the grammar keeps the expression alive
        self.known: dict[object, int] = {}  # leaves by content
        self.nullable = bytearray()

    def build(self) -> None:
        self.number(self.grammar.start)
        done = 0
        while done < len(self.pending):
            name = self.pending[done]
            self.roots.append(self.expression(self.grammar.rules[name]))
            done += 1
        self.names = self.pending
        self.find_nullable()

    def number(self, name: str) -> int:
        known = self.rule.get(name)
        if known is None:
            if name not in self.grammar.rules:
                raise UnsupportedConstraint(
                    FIELD, f"names no rule {name!r}{nearest(name, list(self.grammar.rules)[:500])}"
                )
            known = self.rule[name] = len(self.pending)
            self.pending.append(name)
        return known

    def node(self, op: int, a: int, b: int, words: list[int], depth: int) -> int:
        index = len(self.at)
        if index >= self.limits.max_nodes or len(self.code) > 8 * self.limits.max_nodes:
            raise UnsupportedConstraint(FIELD, f"is too large: more than {self.limits.max_nodes:,} parts")
        if depth > self.limits.max_depth:
            raise UnsupportedConstraint(FIELD, f"is nested more than {self.limits.max_depth:,} deep")
        self.at.append(len(self.code))
        self.depth.append(depth)
        self.code += (op, a, b, len(words))
        self.code += words
        return index

    def leaf(self, expr: Expr) -> int:
        kind = type(expr)
        if kind is Bytes:
            value = expr.value  # type: ignore[union-attr]
            if not value:
                return self.content("empty", Op.SEQ, 0, 0, [])
            known = self.known.get(value)
            return self.content(value, Op.LITERAL, self.store(value), len(value), []) if known is None else known
        if kind is ByteSet:
            bits = expr.bits  # type: ignore[union-attr]
            if not bits:
                return self.content("nothing", Op.ALT, 0, 0, [])
            if bits < 0 or bits >> 256:
                raise UnsupportedConstraint(FIELD, "has a byte set beyond the 256 bytes")
            known = self.known.get(bits)
            return (
                self.content(bits, Op.SET, self.store(bits.to_bytes(32, "little")), 0, []) if known is None else known
            )
        if kind is Ref:
            return self.node(Op.REF, self.number(expr.name), 0, [], 0)  # type: ignore[union-attr]
        if kind is JsonChars:
            low, high = self.counts(expr.low, expr.high)  # type: ignore[union-attr]
            if high >= 0 and low > high:
                return self.content("nothing", Op.ALT, 0, 0, [])
            return self.content((low, high), Op.JSON, low, high, [])
        if kind is Dfa:
            return self.node(Op.DFA, len(expr.edges), 0, self.dfa_words(expr), 0)  # type: ignore
        if kind is PackedDfa:
            return self.node(Op.DFA, expr.states, 0, self.dfa_words(unpacked(expr)), 0)  # type: ignore
        raise TypeError(f"not an expression of a grammar: {expr!r}")

    def content(self, key: object, op: int, a: int, b: int, words: list[int]) -> int:
        known = self.known.get(key)
        if known is None:
            known = self.known[key] = self.node(op, a, b, words, 0)
        return known

    def store(self, value: bytes) -> int:
        offset = len(self.blob)
        if offset + len(value) > self.limits.max_bytes:
            raise UnsupportedConstraint(FIELD, f"is too large: literals of more than {self.limits.max_bytes:,} bytes")
        self.blob += value
        return offset

    def counts(self, low: int, high: int | None) -> tuple[int, int]:
        if low < 0 or (high is not None and high < 0):
            raise UnsupportedConstraint(FIELD, f"repeats {low} to {high} times: must be at least 0")
        if low > _MAX_COUNT:
            raise UnsupportedConstraint(FIELD, f"repeats at least {low} times: more than {_MAX_COUNT:,}")
        return low, -1 if high is None else min(high, 2 * _MAX_COUNT - 1)

    def dfa_words(self, dfa: Dfa) -> list[int]:
        words: list[int] = []
        states = len(dfa.edges)
        if not states:
            raise UnsupportedConstraint(FIELD, "has an automaton without states")
        for state, edges in enumerate(dfa.edges):
            words += (int(state in dfa.accepting), len(edges))
            last = -1
            for low, high, target in edges:
                if not last < low <= high < 256 or not 0 <= target < states:
                    raise UnsupportedConstraint(
                        FIELD, f"has an automaton with a bad edge {(low, high, target)} at state {state}"
                    )
                words += (low, high, target)
                last = high
        return words

    def expression(self, root: Expr) -> int:
        """The node of an expression; inner ones first."""
        seen, stack = self.seen, [root]
        while stack:
            expr = stack[-1]
            if id(expr) in seen:
                stack.pop()
                continue
            kind = type(expr)
            if kind is Seq or kind is Alt:
                inner = expr.items  # type: ignore[union-attr]
            elif kind is Repeat:
                inner = (expr.item,)  # type: ignore[union-attr]
            else:
                seen[id(expr)] = self.leaf(expr)
                stack.pop()
                continue
            missing = [item for item in inner if id(item) not in seen]
            if missing:
                if len(stack) > 4 * self.limits.max_nodes:
                    raise UnsupportedConstraint(FIELD, f"is too large: more than {self.limits.max_nodes:,} parts")
                stack += reversed(missing)
                continue
            stack.pop()
            nodes = [seen[id(item)] for item in inner]
            seen[id(expr)] = self.inner(expr, nodes)
        return seen[id(root)]

    def inner(self, expr: Expr, nodes: list[int]) -> int:
        depth = 1 + max((self.depth[node] for node in nodes), default=0)
        if type(expr) is Repeat:
            low, high = self.counts(expr.low, expr.high)
            if high >= 0 and low > high:
                return self.content("nothing", Op.ALT, 0, 0, [])
            if high == 0:
                return self.content("empty", Op.SEQ, 0, 0, [])
            return nodes[0] if low == high == 1 else self.node(Op.REPEAT, low, high, nodes, depth)
        if len(nodes) == 1:
            return nodes[0]
        if type(expr) is Seq:
            return self.node(Op.SEQ, 0, 0, nodes, depth) if nodes else self.content("empty", Op.SEQ, 0, 0, [])
        return self.node(Op.ALT, 0, 0, nodes, depth) if nodes else self.content("nothing", Op.ALT, 0, 0, [])

    # -- what can be empty, and what begins with what

    def find_nullable(self) -> None:
        """Least fixpoint; rules are rarely empty, so one or two passes."""
        code, rules = self.code, [0] * len(self.roots)
        while True:
            nullable = self.nullable = bytearray(len(self.at))
            for node, at in enumerate(self.at):
                op = code[at]
                if op == Op.SEQ:
                    nullable[node] = all(nullable[kid] for kid in code[at + 4 : at + 4 + code[at + 3]])
                elif op == Op.ALT:
                    nullable[node] = any(nullable[kid] for kid in code[at + 4 : at + 4 + code[at + 3]])
                elif op == Op.REPEAT:
                    nullable[node] = code[at + 1] == 0 or nullable[code[at + 4]]
                elif op == Op.REF:
                    nullable[node] = rules[code[at + 1]]
                elif op == Op.DFA:
                    nullable[node] = code[at + 4]
                elif op == Op.JSON:
                    nullable[node] = code[at + 1] == 0
            found = [nullable[root] for root in self.roots]
            if found == rules:
                return
            rules = found

    def first_rules(self, root: int) -> list[int]:
        """The rules a rule may begin with before any byte."""
        code, nullable = self.code, self.nullable
        found: dict[int, None] = {}
        seen: set[int] = set()
        stack = [root]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            at = self.at[node]
            op = code[at]
            if op == Op.REF:
                found[code[at + 1]] = None
            elif op == Op.ALT or op == Op.REPEAT:
                stack += code[at + 4 : at + 4 + code[at + 3]]
            elif op == Op.SEQ:
                for kid in code[at + 4 : at + 4 + code[at + 3]]:
                    stack.append(kid)
                    if not nullable[kid]:
                        break
        return list(found)

    def left_cycle(self) -> list[str]:
        """The names along one cycle of rules that begin with each other; empty: there is none."""
        first = [self.first_rules(root) for root in self.roots]
        state = [0] * len(first)  # 0 new, 1 on the path, 2 done
        for rule in range(len(first)):
            path, todo = [rule], [iter(first[rule])]
            if state[rule]:
                continue
            state[rule] = 1
            while path:
                after = next(todo[-1], None)
                if after is None:
                    state[path.pop()] = 2
                    todo.pop()
                elif state[after] == 1:
                    return [self.names[r] for r in [*path[path.index(after) :], after]]
                elif state[after] == 0:
                    state[after] = 1
                    path.append(after)
                    todo.append(iter(first[after]))
        return []

    def finish(self) -> Program:
        return Program(
            code=array("i", self.code),
            at=array("i", self.at),
            blob=bytes(self.blob),
            roots=array("i", self.roots),
            names=tuple(self.names),
            start=0,
            nullable=bytes(self.nullable),
        )
