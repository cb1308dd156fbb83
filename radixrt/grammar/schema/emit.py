"""From shapes to grammar rules: one rule for each formula with arrays or objects in it, everything else in place.

Rules are written from a work list, so a schema's nesting never becomes Python recursion. Right recursion is used for what has
to be counted or remembered: the automaton runs it without growing its stack.
"""

from __future__ import annotations

from radixrt.grammar import ir
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.schema import numbers, strings
from radixrt.grammar.schema.array_text import ArrayText
from radixrt.grammar.schema.nodes import Node
from radixrt.grammar.schema.normalize import Normalizer
from radixrt.grammar.schema.object_text import ObjectText
from radixrt.grammar.schema.prune import dead
from radixrt.grammar.schema.shape import Shape

_INDENT = 64  # spaces or tabs that may follow a line break


def alternatives(items: list[ir.Expr]) -> ir.Expr:
    """``Alt``, without a wrapper around one."""
    return items[0] if len(items) == 1 else ir.Alt(tuple(items))


class Whitespace:
    """The texts of JSON's punctuation: bare, or with one space or one line break and an indent where serializers put them."""

    def __init__(self, flexible: bool) -> None:
        gap: ir.Expr = ir.EMPTY
        after: ir.Expr = ir.EMPTY
        if flexible:
            after = ir.Alt((ir.EMPTY, ir.Bytes(b" ")))
            line = ir.Seq((ir.Bytes(b"\n"), ir.Repeat(ir.ByteSet(1 << 32 | 1 << 9), 0, _INDENT)))
            gap = ir.Alt((ir.EMPTY, ir.Bytes(b" "), line))
        self.flexible = flexible
        self.gap = gap
        self.comma: ir.Expr = ir.Seq((ir.Bytes(b","), gap)) if flexible else ir.Bytes(b",")
        self.colon: ir.Expr = ir.Seq((ir.Bytes(b":"), after)) if flexible else ir.Bytes(b":")

    def enclose(self, opening: bytes, inside: ir.Expr | None, closing: bytes, *, may_be_empty: bool) -> ir.Expr:
        """Brackets around members (``None``: there can be none)."""
        if not self.flexible:
            if inside is None:
                return ir.Bytes(opening + closing)
            body = ir.Alt((ir.EMPTY, inside)) if may_be_empty else inside
            return ir.Seq((ir.Bytes(opening), body, ir.Bytes(closing)))
        if inside is None:
            return ir.Seq((ir.Bytes(opening), self.gap, ir.Bytes(closing)))
        filled = ir.Seq((inside, self.gap))
        body = ir.Alt((ir.EMPTY, filled)) if may_be_empty else filled
        return ir.Seq((ir.Bytes(opening), self.gap, body, ir.Bytes(closing)))


class Emitter:
    """Writes the rules of one grammar."""

    def __init__(self, normalizer: Normalizer, *, flexible: bool, any_order: bool) -> None:
        self.normalizer = normalizer
        self.white = Whitespace(flexible)
        self.rules: dict[str, ir.Expr] = {}
        self.array_text = ArrayText(self)
        self.object_text = ObjectText(self, any_order)
        self._made: dict[Node, ir.Expr] = {}
        self._queue: list[tuple[str, Node]] = []
        self._count = 0
        self._named: Node | None = None
        self.clean = True  # nothing dead has been written but rules as a whole

    def grammar(self, root: Node) -> ir.Grammar:
        """All rules, from the formula of the whole schema."""
        root_schema = self.normalizer.documents.root.root
        id_keyword = self.normalizer.documents.root.draft.id_keyword
        self._named = root if isinstance(root_schema, dict) and id_keyword in root_schema else None
        self.rules["start"] = self.value(root)
        while self._queue:
            name, node = self._queue.pop()
            self.rules[name] = self._whole(node)
        return ir.Grammar(self.rules)

    def new_rule(self, stem: str) -> str:
        """A name for one more rule."""
        self._count += 1
        limits = self.normalizer.clock.limits
        if self._count > limits.rules:
            raise UnsupportedConstraint(
                self.normalizer.clock.pointer, f"the grammar needs more than {limits.rules:,} rules (limit `rules`)"
            )
        return f"{stem}{self._count}"

    def value(self, node: Node) -> ir.Expr:
        """The texts of the values that satisfy a formula: in place when small, else a reference to a rule."""
        made = self._made.get(node)
        if made is None:
            shape = self.normalizer.shape(node)
            if shape.scalar:
                made = self._whole(node)
            else:
                name = self.new_rule("any" if shape is self.normalizer.shapes.anything else "v")
                self._queue.append((name, node))
                made = ir.Ref(name)
            self._made[node] = made
        return made

    def _whole(self, node: Node) -> ir.Expr:
        clock = self.normalizer.clock
        clock.check()
        before = clock.pointer
        clock.pointer = _place(node) or before
        self.object_text.named_root = node is self._named
        text = self._shape(self.normalizer.shape(node))
        clock.pointer = before
        return text

    def _shape(self, shape: Shape) -> ir.Expr:
        items: list[ir.Expr] = []
        for given, word in ((shape.null, b"null"), (shape.true, b"true"), (shape.false, b"false")):
            if given:
                items.append(ir.Bytes(word))
        items += [numbers.emit(part) for part in shape.numbers]
        items += [strings.emit(part, self.normalizer.languages) for part in shape.strings]
        self.clean = self.clean and bool(items or not shape.scalar) and not any(dead(item) for item in items)
        for text in (*map(self.array_text.emit, shape.arrays), *map(self.object_text.emit, shape.objects)):
            self.clean = self.clean and text is not ir.NOTHING
            items.append(text)
        return alternatives(items)


def _place(node: Node) -> str | None:
    """Where in the schema a formula comes from: its first leaf with a place."""
    while node.args and node.kind in ("and", "or", "not"):
        node = node.args[0]
    return node.args[0].pointer if node.kind == "schema" else None
