"""The texts of arrays: plain ones as counted repetition, ``contains`` and ``uniqueItems`` as small machines of rules."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from radixrt.grammar import ir
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.schema import numbers
from radixrt.grammar.schema.arrays import Arrays
from radixrt.grammar.schema.nodes import Node
from radixrt.grammar.schema.values import Key

if TYPE_CHECKING:
    from radixrt.grammar.schema.emit import Emitter

_NEST = 40  # optional items inside each other before a rule of their own begins


class ArrayText:
    """Writes arrays."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter

    def emit(self, part: Arrays) -> ir.Expr:
        """The texts of a set of arrays."""
        if part.unique is not None:
            return self._unique(part)
        if part.contains:
            return self._contains(part)
        white = self.emitter.white
        if part.high == 0:
            return white.enclose(b"[", None, b"]", may_be_empty=True)
        return white.enclose(b"[", self._items(part), b"]", may_be_empty=part.low == 0)

    def _items(self, part: Arrays) -> ir.Expr:
        """One item or more."""
        emitter = self.emitter
        comma = emitter.white.comma
        size = len(part.prefix)
        nodes = emitter.normalizer.nodes
        tail: list[ir.Expr] = []
        if part.rest is not nodes.false and (part.high is None or part.high > size):
            item = emitter.value(part.rest)
            fixed = max(size, 1)
            more = ir.Repeat(
                ir.Seq((comma, item)), max(part.low - fixed, 0), None if part.high is None else part.high - fixed
            )
            tail = [more] if size else [item, more]
        depth = 0
        for index in range(size - 1, -1, -1):
            tail.insert(0, emitter.value(part.prefix[index]))
            if index == 0:
                break
            tail.insert(0, comma)
            if index >= part.low:
                depth += 1
                tail = [ir.Alt((ir.EMPTY, ir.Seq(tuple(tail))))]
                if depth % _NEST == 0:
                    name = emitter.new_rule("items")
                    emitter.rules[name] = tail[0]
                    tail = [ir.Ref(name)]
        return ir.Seq(tuple(tail))

    # -- machines

    def _states(self, states: dict[Hashable, str], state: Hashable, keyword: str) -> tuple[str, bool]:
        """The rule of a state, and whether it is new."""
        name = states.get(state)
        if name is not None:
            return name, False
        clock = self.emitter.normalizer.clock
        if len(states) >= clock.limits.states:
            raise UnsupportedConstraint(
                f"{clock.pointer}/{keyword}",
                f"counting needs more than {clock.limits.states:,} states (limit `states`)",
            )
        name = states[state] = self.emitter.new_rule("items")
        return name, True

    def _contains(self, part: Arrays) -> ir.Expr:
        """State: how many items there are, and how many of them matched each ``contains``; both saturate."""
        emitter = self.emitter
        nodes = emitter.normalizer.nodes
        comma = emitter.white.comma
        fixed = max((item.offset for item in part.contains), default=0)
        most = max(len(part.prefix), part.low, fixed, 1) if part.high is None else part.high
        states: dict[Hashable, str] = {}
        start = (0, (0,) * len(part.contains))
        todo = [start]
        self._states(states, start, "contains")
        while todo:
            index, counts = todo.pop()
            loops: list[ir.Expr] = []
            exits: list[ir.Expr] = []
            if index >= part.low and all(count >= item.low for count, item in zip(counts, part.contains)):
                exits.append(ir.EMPTY)
            if part.high is None or index < part.high:
                for node, after in self._choices(part, index, counts):
                    following = (min(index + 1, most), after)
                    name, new = self._states(states, following, "contains")
                    if new:
                        todo.append(following)
                    if node is nodes.false:
                        continue
                    item = emitter.value(node)
                    step = ir.Seq((comma, item)) if index else item
                    if following == (index, counts):
                        loops.append(step)
                    else:
                        exits.append(ir.Seq((step, ir.Ref(name))))
            rule: ir.Expr = ir.Alt(tuple(exits))
            if loops:
                rule = ir.Seq((ir.Repeat(ir.Alt(tuple(loops)), 0, None), rule))
            emitter.rules[states[index, counts]] = rule
        return self._enclose(part, states[start])

    def _enclose(self, part: Arrays, start: str) -> ir.Expr:
        white = self.emitter.white
        if not white.flexible:
            return ir.Seq((ir.Bytes(b"["), ir.Ref(start), ir.Bytes(b"]")))
        return ir.Seq((ir.Bytes(b"["), white.gap, ir.Ref(start), white.gap, ir.Bytes(b"]")))

    def _choices(self, part: Arrays, index: int, counts: tuple[int, ...]) -> list[tuple[Node, tuple[int, ...]]]:
        """What the next item may be, and the counts after it."""
        nodes = self.emitter.normalizer.nodes
        choices: list[tuple[Node, tuple[int, ...]]] = [(part.item(index), ())]
        for item, count in zip(part.contains, counts):
            made: list[tuple[Node, tuple[int, ...]]] = []
            for node, after in choices:
                if index < item.offset or (item.high is None and count >= item.low):
                    made.append((node, (*after, count)))
                    continue
                if item.high is None or count < item.high:
                    made.append((nodes.both((node, item.node)), (*after, count + 1)))
                misses = node if item.high is None else nodes.both((node, nodes.negate(item.node)))
                made.append((misses, (*after, count)))
            choices = made
        return [choice for choice in choices if choice[0] is not nodes.false]

    def _unique(self, part: Arrays) -> ir.Expr:
        """State: how many items there are, and which values are taken. Only for items drawn from a few values."""
        emitter = self.emitter
        clock = emitter.normalizer.clock
        limit = clock.limits.unique_values
        where = f"{clock.pointer}/uniqueItems"
        if part.unique is False:
            raise UnsupportedConstraint(where, "negated: two equal items cannot be demanded exactly")
        if part.contains:
            raise UnsupportedConstraint(where, "together with `contains` cannot be exact")
        options = [self._values(part.item(index)) for index in range(len(part.prefix) + 1)]
        if part.high is not None and part.high <= len(part.prefix):
            options = options[: part.high]
        known = [option for option in options if option is not None]
        if len(known) != len(options):
            raise UnsupportedConstraint(where, "is exact only where items are drawn from a finite set of values")
        values = list(dict.fromkeys(value for option in known for value in option))
        if len(values) > limit:
            raise UnsupportedConstraint(
                where, f"items may have {len(values)} values, the limit (`unique_values`) is {limit}"
            )
        nodes = emitter.normalizer.nodes
        comma = emitter.white.comma
        states: dict[Hashable, str] = {}
        start: tuple[int, frozenset[Key]] = (0, frozenset())
        todo = [start]
        self._states(states, start, "uniqueItems")
        while todo:
            index, taken = todo.pop()
            exits: list[ir.Expr] = [ir.EMPTY] if index >= part.low else []
            if part.high is None or index < part.high:
                for value in known[min(index, len(known) - 1)]:
                    if value in taken:
                        continue
                    following = (index + 1, taken | {value})
                    name, new = self._states(states, following, "uniqueItems")
                    if new:
                        todo.append(following)
                    item = emitter.value(nodes.both((nodes.leaf("value", value), part.item(index))))
                    exits.append(ir.Seq((comma, item, ir.Ref(name)) if index else (item, ir.Ref(name))))
            emitter.rules[states[index, taken]] = ir.Alt(tuple(exits))
        return self._enclose(part, states[start])

    def _values(self, node: Node) -> list[Key] | None:
        """The values that satisfy a formula, when they are few scalars."""
        shape = self.emitter.normalizer.shape(node)
        if node.kind == "value":
            return [node.args[0]]
        if not shape.scalar:
            return None
        values: list[Key] = []
        for given, key in ((shape.null, ("null",)), (shape.true, ("boolean", True)), (shape.false, ("boolean", False))):
            if given:
                values.append(key)
        for number in shape.numbers:
            found = numbers.finite(number, 64)
            if found is None:
                return None
            values += [("number", value) for value in found]
        for string in shape.strings:
            if string.values is None:
                return None
            values += [("string", value) for value in sorted(string.values)]
        return list(dict.fromkeys(values))
