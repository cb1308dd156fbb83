"""Languages over characters to languages over bytes: as UTF-8 text, and as the inside of a JSON string that decodes to them.

Every character edge becomes a small tree of byte edges whose inner nodes are shared wherever they read alike, so that a minimal
character automaton gives a minimal byte automaton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from radixrt.grammar import ir
from radixrt.grammar.built import native_module
from radixrt.grammar.regular.chardfa import CharDfa
from radixrt.grammar.regular.charset import LAST, CharSet

Escapes = Literal["any", "needed"]
Span = tuple[int, int, int]  # values from..to lead to that node
Edges = tuple[Span, ...]  # bytes from..to lead to that node

_SHORT = {'"': '"', "\\": "\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_BLOCKS = ((0x80, 0x7FF, 0xC0, 1), (0x800, 0xFFFF, 0xE0, 2), (0x10000, LAST, 0xF0, 3))


def to_bytes(dfa: CharDfa) -> ir.Expr:
    """The UTF-8 texts of the language."""
    return _encode(dfa, _Nodes.utf8)


def to_json(dfa: CharDfa, escapes: Escapes = "any") -> ir.Expr:
    """The insides of JSON strings (no quotes) whose decoded value is in the language.

    Args:
        escapes: ``any``: every spelling JSON has (raw, short escape, ``\\uXXXX`` in either case, surrogate pairs). ``needed``:
            only what JSON writers produce: no escape for printable ASCII but ``"`` and ``\\``; so that fixed text is forced.
            (Runs of any characters at all are ``JsonChars`` in both.)
    """
    ends = _unary(dfa)
    if ends is not None:
        return ir.JsonChars(*ends)
    spell = _Nodes.json if escapes == "any" else _Nodes.json_needed
    goal = next((s for s in dfa.accepting if all(t == s for t in dfa.rows[s])), None)
    if goal is None or goal == 0:
        return _encode(dfa, spell)
    # Once everything is allowed the rest is any string: the automaton has a fast path for that.
    begun: ir.Expr = ir.Seq((_encode(dfa, spell, accepting=frozenset({goal}), leaf=goal), ir.JsonChars()))
    others = dfa.accepting - {goal}
    return ir.Alt((begun, _encode(dfa, spell, accepting=others, without=goal))) if others else begun


def chars_to_bytes(chars: CharSet) -> ir.Expr:
    """One character of a set, as UTF-8."""
    return _one(chars, _Nodes.utf8)


def chars_to_json(chars: CharSet, escapes: Escapes = "any") -> ir.Expr:
    """One character of a set, inside a JSON string."""
    return _one(chars, _Nodes.json if escapes == "any" else _Nodes.json_needed)


def _one(chars: CharSet, spell: Callable[[_Nodes, list[Span]], Edges]) -> ir.Expr:
    if not chars:
        return ir.NOTHING
    nodes = _Nodes(2)
    nodes.edges[0] = spell(nodes, [(low, high, 1) for low, high in chars])
    return _tidy(nodes.edges, frozenset({1}))


def _unary(dfa: CharDfa) -> tuple[int, int | None] | None:
    """The bounds of a language that only counts characters; ``None``: another one, or one with gaps."""
    if len(dfa.rows[0]) != 1 or not dfa.accepting:
        return None
    ends = sorted(dfa.accepting)
    if ends[-1] - ends[0] + 1 != len(ends):
        return None
    after = dfa.rows[ends[-1]][0]
    if after == ends[-1]:
        return ends[0], None
    return (ends[0], ends[-1]) if after == dfa.dead else None


def _encode(
    dfa: CharDfa,
    spell: Callable[[_Nodes, list[Span]], Edges],
    *,
    accepting: frozenset[int] | None = None,
    leaf: int = -1,
    without: int = -1,
) -> ir.Expr:
    """Byte automaton of ``dfa`` with other final states, one state made a ``leaf`` or left out."""
    accepting = dfa.accepting if accepting is None else accepting
    if not accepting:
        return ir.NOTHING
    live = _live(dfa, accepting, without)
    if 0 not in live:
        return ir.NOTHING
    ends = [*dfa.starts[1:], LAST + 1]
    spans = [(start, end - 1, cls) for start, end, cls in zip(dfa.starts, ends, dfa.classes) if cls >= 0]
    template = _Template(spell, spans, len(dfa.rows[0]))
    native = native_module()
    if native is not None:
        table, order = native.spell(dfa.rows, live, leaf, template.root, template.edges, template.used, template.forms)
        final = accepting & live
        return _simplest(table, frozenset(i for i, s in enumerate(order) if s in final))
    nodes = _Nodes(len(dfa.rows))
    for s, row in enumerate(dfa.rows):
        if s in live and s != leaf:
            nodes.edges[s] = template.fill(nodes, tuple([t if t in live else -1 for t in row]))
    return _tidy(nodes.edges, accepting & live)


class _Template:
    """The byte edges of one state with classes for leaves, worked out once; ``fill`` puts the states in their place.

    Subtrees all of whose classes lead to one state are told apart by their form alone (``forms``), so that the many ranges of
    a class like ``\\w`` cost nothing where a state does not tell them from the rest.
    """

    def __init__(self, spell: Callable[[_Nodes, list[Span]], Edges], spans: list[Span], classes: int) -> None:
        tree = _Nodes(classes)
        self.root = spell(tree, spans)
        self.classes, self.edges = classes, tree.edges
        self.used: list[tuple[int, ...]] = [(c,) for c in range(classes)]
        forms = _Nodes(1)
        self.forms = [0] * classes
        for edges in tree.edges[classes:]:  # inner nodes come after those they lead to
            self.used.append(tuple(sorted({c for _, _, t in edges for c in self.used[t]})))
            self.forms.append(forms.node(_merged([(low, high, self.forms[t]) for low, high, t in edges])))
        self.known: dict[tuple[int, ...], int] = {}
        self.rows: dict[tuple[int, ...], Edges] = {}

    def fill(self, nodes: _Nodes, row: tuple[int, ...]) -> Edges:
        """The edges of a state whose classes lead to ``row`` (-1: nowhere)."""
        found = self.rows.get(row)
        if found is None:
            found = self.rows[row] = self.instance(nodes, row, self.root)
        return found

    def instance(self, nodes: _Nodes, row: tuple[int, ...], edges: Edges) -> Edges:
        out: list[Span] = []
        for low, high, inner in edges:
            if inner < self.classes:
                target = row[inner]
            else:
                used = self.used[inner]
                targets = [row[c] for c in used]
                first = targets[0]
                if targets.count(first) == len(targets):
                    key: tuple[int, ...] = (-1, self.forms[inner], first)
                else:
                    key = (inner, *targets)
                known = self.known.get(key)
                if known is None:
                    made = self.instance(nodes, row, self.edges[inner]) if first >= 0 or key[0] >= 0 else ()
                    known = self.known[key] = nodes.node(made) if made else -1
                target = known
            if target < 0:
                continue
            if out and out[-1][2] == target and out[-1][1] == low - 1:
                out[-1] = (out[-1][0], high, target)
            else:
                out.append((low, high, target))
        return tuple(out)


def _live(dfa: CharDfa, accepting: frozenset[int], without: int) -> frozenset[int]:
    """States from which a final one can be reached."""
    if accepting == dfa.accepting and without < 0:
        return frozenset(range(len(dfa.rows))) - {dfa.dead}
    back: list[list[int]] = [[] for _ in dfa.rows]
    for s, row in enumerate(dfa.rows):
        for t in set(row):
            back[t].append(s)
    found = set(accepting) - {without}
    queue = list(found)
    for t in queue:
        for s in back[t]:
            if s not in found and s != without:
                found.add(s)
                queue.append(s)
    return frozenset(found)


def _tidy(edges: list[Edges], accepting: frozenset[int]) -> ir.Expr:
    """Only the reachable states, the start first."""
    order, place = [0], {0: 0}
    for s in order:
        for _, _, t in edges[s]:
            if t not in place:
                place[t] = len(order)
                order.append(t)
    table = tuple(tuple((low, high, place[t]) for low, high, t in edges[s]) for s in order)
    return _simplest(table, frozenset(place[s] for s in accepting if s in place))


def _simplest(table: tuple[Edges, ...], final: frozenset[int]) -> ir.Expr:
    """The automaton; a single path becomes plain bytes and a single step a set."""
    last = len(table) - 1
    if final == {last} and all(
        len(row) == 1 and row[0][0] == row[0][1] and row[0][2] == s + 1 for s, row in enumerate(table[:-1])
    ):
        if not table[last]:
            return ir.Bytes(bytes(row[0][0] for row in table[:-1]))
    elif len(table) == 2 and final == {1} and not table[1] and all(t == 1 for _, _, t in table[0]):
        return ir.ByteSet(sum(ir.byte_range(low, high).bits for low, high, _ in table[0]))
    return ir.Dfa(table, final)


def _hex_bytes(low: int, high: int) -> Iterable[tuple[int, int]]:
    if low <= 9:
        yield 0x30 + low, 0x30 + min(high, 9)
    if high >= 10:
        a, b = max(low, 10) - 10, high - 10
        yield 0x41 + a, 0x41 + b
        yield 0x61 + a, 0x61 + b


def _continuation(low: int, high: int) -> Iterable[tuple[int, int]]:
    yield 0x80 + low, 0x80 + high


def _slots(spans: list[Span], bits: int) -> list[tuple[int, int, int | list[Span]]]:
    """Spans cut along blocks of ``1 << bits`` values: block from..to with its one node, or with the spans inside it."""
    mask = (1 << bits) - 1
    out: list[tuple[int, int, int | list[Span]]] = []
    part: list[Span] = []
    at = -1
    for low, high, node in spans:
        a, b = low >> bits, high >> bits
        if low & mask or (a == b and high & mask != mask):
            if a != at:
                part = []
                out.append((a, a, part))
                at = a
            part.append((low & mask, high & mask if a == b else mask, node))
            a += 1
        if a <= b and high & mask != mask:
            if a <= b - 1:
                out.append((a, b - 1, node))
            part = [(0, high & mask, node)]
            out.append((b, b, part))
            at = b
        elif a <= b:
            out.append((a, b, node))
    return out


class _Nodes:
    """Byte automaton under construction: the first nodes are the character states, the rest is shared inner nodes."""

    def __init__(self, states: int) -> None:
        self.edges: list[Edges] = [()] * states
        self.known: dict[Edges, int] = {}

    def node(self, edges: Edges) -> int:
        found = self.known.get(edges)
        if found is None:
            found = self.known[edges] = len(self.edges)
            self.edges.append(edges)
        return found

    def digits(
        self, spans: list[Span], count: int, bits: int, spell: Callable[[int, int], Iterable[tuple[int, int]]]
    ) -> Edges:
        """Edges that read a number of ``count`` digits of ``bits`` bits each, most significant first."""
        out: list[Span] = []
        for low, high, inside in _slots(spans, bits * (count - 1)) if count > 1 else spans:
            if isinstance(inside, int):
                node = inside
                for _level in range(1, count):
                    node = self.node(_merged([(a, b, node) for a, b in spell(0, (1 << bits) - 1)]))
            else:
                node = self.node(self.digits(inside, count - 1, bits, spell))
            out += [(a, b, node) for a, b in spell(low, high)]
        return _merged(out)

    def utf8(self, spans: list[Span]) -> Edges:
        out = [(low, min(high, 0x7F), node) for low, high, node in spans if low <= 0x7F]
        if spans and spans[-1][1] > 0x7F:
            for first, last, lead, count in _BLOCKS:
                block = [(max(a, first), min(b, last), t) for a, b, t in spans if a <= last and b >= first]
                if not block:
                    continue
                for low, high, inside in _slots(block, 6 * count):
                    if isinstance(inside, int):
                        node = inside
                        for _ in range(count):
                            node = self.node(((0x80, 0xBF, node),))
                    else:
                        node = self.node(self.digits(inside, count, 6, _continuation))
                    out.append((lead + low, lead + high, node))
        return _merged(out)

    def json(self, spans: list[Span]) -> Edges:
        return self.string(spans, spans, _SHORT)

    def json_needed(self, spans: list[Span]) -> Edges:
        escaped = _cut(spans, ((0, 0x1F), (0x7F, LAST)))
        return self.string(spans, escaped, {char: name for char, name in _SHORT.items() if char != "/"})

    def string(self, spans: list[Span], escaped: list[Span], short: dict[str, str]) -> Edges:
        """One character of a JSON string: ``spans`` raw where that is legal, ``escaped`` as hexadecimal, ``short`` as letters."""
        raw = list(self.utf8(_cut(spans, ((0x20, 0x21), (0x23, 0x5B), (0x5D, LAST)))))
        letters: list[Span] = []
        for char, name in short.items():
            code = ord(char)
            letters += [(ord(name), ord(name), t) for low, high, t in spans if low <= code <= high]
        if escaped:
            units = _cut(escaped, ((0, 0xD7FF),))
            astral = [(max(a, 0x10000) - 0x10000, b - 0x10000, t) for a, b, t in escaped if b >= 0x10000]
            for low, high, inside in _slots(astral, 10):
                half = [(0, 0x3FF, inside)] if isinstance(inside, int) else inside
                tail = self.node(self.digits([(0xDC00 + a, 0xDC00 + b, t) for a, b, t in half], 4, 4, _hex_bytes))
                pair = self.node(((0x5C, 0x5C, self.node(((0x75, 0x75, tail),))),))
                units.append((0xD800 + low, 0xD800 + high, pair))
            units += _cut(escaped, ((0xE000, 0xFFFF),))
            if units:
                letters.append((0x75, 0x75, self.node(self.digits(units, 4, 4, _hex_bytes))))
        if letters:
            raw.append((0x5C, 0x5C, self.node(_merged(letters))))
        return _merged(raw)


def _cut(spans: list[Span], allowed: tuple[tuple[int, int], ...]) -> list[Span]:
    return [(max(a, low), min(b, high), t) for low, high in allowed for a, b, t in spans if a <= high and b >= low]


def _merged(edges: list[Span]) -> Edges:
    """Ascending, neighbours with the same target joined."""
    edges.sort()
    out: list[Span] = []
    for low, high, node in edges:
        if out and out[-1][2] == node and out[-1][1] == low - 1:
            out[-1] = (out[-1][0], high, node)
        else:
            out.append((low, high, node))
    return tuple(out)
