"""The texts of objects.

Required keys come in the order in which the schemas name them. Optional keys come where they are named, or, when there are few
of them, in any order among each other, and those left out may follow after the last required key. Then come other keys, in any
order. Where the schema has an ``$id``, the outermost object may begin with ``$schema``. With ``any_order`` all keys may come anywhere. A plain object is one flat expression. What has to be counted or remembered
(``minProperties`` beyond what is required, keys that depend on keys, a key that must exist, free order) is a machine of rules.

JSON readers keep the last of two equal keys. A named key is written once (with ``any_order``: at most once while it is tracked).
Other keys could repeat, which can do no harm to what each value must satisfy, but would to counting: ``minProperties`` above 1 is
refused where other keys may count, and what follows the key that must exist may not undo it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from radixrt.grammar import ir
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.schema import strings
from radixrt.grammar.schema.keys import declared_key, other_key, split
from radixrt.grammar.schema.nodes import Node
from radixrt.grammar.schema.objects import Clause, Exists, Objects
from radixrt.grammar.schema.strings import StringSet

if TYPE_CHECKING:
    from radixrt.grammar.schema.emit import Emitter

_PATTERNS = 8  # patterns that may apply to one object's other keys


@dataclass(frozen=True)
class _Member:
    """A key the schemas name."""

    name: str
    node: Node
    required: bool
    witness: tuple[int, ...]  # which of the plan's ``exists`` it may be


@dataclass(frozen=True)
class _Cell:
    """Other keys whose values must satisfy one formula."""

    keys: StringSet
    node: Node
    witness: tuple[int, ...]


@dataclass(frozen=True)
class _Plan:
    """An object set, ready to be written."""

    members: tuple[_Member, ...]
    cells: tuple[_Cell, ...]
    low: int
    high: int | None
    exists: tuple[Exists, ...]
    clauses: tuple[Clause, ...]


class _State(NamedTuple):
    """Where a machine is: the next member or, in free order, required member; whether a comma is due; how many members there
    are; which ``exists`` are met; which of the tracked keys are taken."""

    at: int
    started: bool
    members: int
    met: frozenset[int]
    taken: frozenset[str]


class ObjectText:
    """Writes objects."""

    def __init__(self, emitter: Emitter, any_order: bool) -> None:
        self.emitter = emitter
        self.any_order = any_order
        self._keys: dict[str, ir.Expr] = {}
        self._others: dict[StringSet, ir.Expr] = {}
        self.named_root = False  # the objects written now are the whole output, and the schema has an address to name

    def key(self, name: str) -> ir.Expr:
        """The text of a key the schemas name."""
        made = self._keys.get(name)
        if made is None:
            made = self._keys[name] = declared_key(name)
        return made

    def others(self, keys: StringSet) -> ir.Expr:
        """The texts of other keys."""
        made = self._others.get(keys)
        if made is None:
            made = self._others[keys] = other_key(keys, self.emitter.normalizer.languages)
        return made

    def emit(self, part: Objects) -> ir.Expr:
        """The texts of a set of objects."""
        plan = self._plan(part)
        if plan is None:
            return ir.NOTHING
        white = self.emitter.white
        if plan.high == 0 or not (plan.members or plan.cells):
            unmet = plan.low or plan.exists or any(not clause.present for clause in plan.clauses)
            return ir.NOTHING if unmet else white.enclose(b"{", None, b"}", may_be_empty=True)
        required = sum(member.required for member in plan.members)
        counts = plan.low > max(required, 1) or (plan.high is not None and bool(plan.members))
        any_order = self.any_order and (len(plan.members) + bool(plan.cells)) > 1
        free = not any_order and self._is_free(plan)
        if counts or plan.exists or plan.clauses or any_order or free:
            return self._machine(plan, free)
        empty = required == 0 and plan.low == 0
        return white.enclose(b"{", self._flat(plan), b"}", may_be_empty=empty)

    def _is_free(self, plan: _Plan) -> bool:
        """Whether the order of the optional members is left free: there are few, and the order could differ at all."""
        limits = self.emitter.normalizer.clock.limits
        optional = [index for index, member in enumerate(plan.members) if not member.required]
        if not optional or len(optional) > limits.free_keys:
            return False
        if len(optional) == 1 and optional[0] == len(plan.members) - 1 and not plan.cells:
            return False
        return (len(plan.members) - len(optional) + 1) << len(optional) <= limits.states

    # -- what has to be written

    def _settled(self, node: Node) -> Node:
        """The formula, or ``false`` where its shape shows that nothing satisfies it."""
        normalizer = self.emitter.normalizer
        return normalizer.nodes.false if normalizer.shape(node).nothing else node

    def _plan(self, part: Objects) -> _Plan | None:
        emitter = self.emitter
        normalizer = emitter.normalizer
        nodes, languages = normalizer.nodes, normalizer.languages
        declared = part.names()
        names = ["$schema", *declared] if self.named_root and "$schema" not in declared else declared
        values = {name: self._settled(part.value(name, nodes, languages)) for name in names}
        clauses, required = self._clauses(part, values)
        if any(values[name] is nodes.false for name in required) or any(
            not clause.then and clause.present <= required.keys() for clause in clauses
        ):
            return None
        members = tuple(
            _Member(
                name,
                values[name],
                name in required,
                tuple(n for n, item in enumerate(part.exists) if languages.holds(item.keys, name)),
            )
            for name in names
            if values[name] is not nodes.false
        )
        cells = self._cells(part, declared)  # may well hold a $schema that comes late
        if not cells and len(names) > len(declared):
            members = members[1:] if members and members[0].name == "$schema" else members
        low, high = part.low, part.high
        if not cells:
            if low > len(members):
                return None
            if high is not None and high >= len(members):
                high = None
        if high is not None and max(low, len(required)) > high:
            return None
        if low > max(1, len(required)) and cells:
            raise UnsupportedConstraint(
                f"{normalizer.clock.pointer}/minProperties",
                f"={low}: keys that the schema does not name cannot be counted exactly; name them or use `required`",
            )
        return _Plan(members, cells, low if low > len(required) else 0, high, part.exists, tuple(clauses))

    def _clauses(self, part: Objects, values: dict[str, Node]) -> tuple[list[Clause], dict[str, None]]:
        """The clauses that stay open, and every key that is required after all."""
        false = self.emitter.normalizer.nodes.false
        required = dict.fromkeys(part.required)
        left = list(part.clauses)
        changed = True
        while changed:
            changed = False
            kept: list[Clause] = []
            for clause in left:
                then = tuple(name for name in clause.then if values[name] is not false)
                if any(name in required for name in then) or any(values[name] is false for name in clause.present):
                    continue
                present = clause.present - required.keys()
                if not present and len(then) == 1:
                    required[then[0]] = None
                    changed = True
                else:
                    kept.append(Clause(present, then))
            left = kept
        return left, required

    def _cells(self, part: Objects, names: list[str]) -> tuple[_Cell, ...]:
        """The keys beyond the named ones, split by what the layers say about them."""
        normalizer = self.emitter.normalizer
        nodes, languages = normalizer.nodes, normalizer.languages
        base = strings.all_but(names)
        patterns = list(dict.fromkeys(keys for layer in part.layers for keys, _ in layer.patterns))
        sets = list(dict.fromkeys((*patterns, *(item.keys for item in part.exists))))
        if not patterns and any(layer.rest is nodes.false for layer in part.layers):
            return ()
        if len(sets) > _PATTERNS:
            raise UnsupportedConstraint(
                f"{normalizer.clock.pointer}/patternProperties",
                f"{len(sets)} patterns apply to the keys of one object; more than {_PATTERNS} are too many",
            )
        cells: list[tuple[StringSet, frozenset[StringSet]]] = [(base, frozenset())]
        for keys in sets:
            made: list[tuple[StringSet, frozenset[StringSet]]] = []
            for cell, matched in cells:
                normalizer.clock.check()
                inside, beyond = split(cell, keys, languages)
                if inside:
                    made.append((inside, matched | {keys}))
                if beyond:
                    made.append((beyond, matched))
            cells = made
        merged: dict[tuple[Node, tuple[int, ...]], StringSet] = {}
        for cell, matched in cells:
            said: list[Node] = []
            for layer in part.layers:
                own = [node for keys, node in layer.patterns if keys in matched]
                said += own or [layer.rest]
            node = self._settled(nodes.both(said))
            if node is nodes.false:
                continue
            witness = tuple(n for n, item in enumerate(part.exists) if item.keys in matched)
            merged[node, witness] = merged.get((node, witness), ()) + cell
        return tuple(_Cell(keys, node, witness) for (node, witness), keys in merged.items())

    # -- plain objects

    def _pair(self, key: ir.Expr, node: Node) -> ir.Expr:
        return ir.Seq((key, self.emitter.white.colon, self.emitter.value(node)))

    def _flat(self, plan: _Plan) -> ir.Expr:
        """One member or more, each at most once and in order: see ``_some`` and ``_rest``."""
        pairs: list[tuple[ir.Expr, bool]] = [
            (self._pair(self.key(member.name), member.node), member.required) for member in plan.members
        ]
        first = next((n for n, (_, required) in enumerate(pairs) if required), None)
        comma = self.emitter.white.comma
        extra = self._extra(plan.cells)
        if first is None:
            most = None if plan.high is None else plan.high - 1
            return self._some([pair for pair, _ in pairs], extra, most)
        items: list[ir.Expr] = [ir.Alt((ir.EMPTY, ir.Seq((pair, comma)))) for pair, _ in pairs[:first]]
        items.append(pairs[first][0])
        for pair, required in pairs[first + 1 :]:
            step = ir.Seq((comma, pair))
            items.append(step if required else ir.Alt((ir.EMPTY, step)))
        if extra is not None:
            items.append(ir.Repeat(ir.Seq((comma, extra)), 0, None))
        return ir.Seq(tuple(items))

    def _extra(self, cells: tuple[_Cell, ...]) -> ir.Expr | None:
        pairs = [self._pair(self.others(cell.keys), cell.node) for cell in cells]
        if not pairs:
            return None
        return pairs[0] if len(pairs) == 1 else ir.Alt(tuple(pairs))

    def _some(self, pairs: list[ir.Expr], extra: ir.Expr | None, most: int | None) -> ir.Expr:
        """At least one of optional members, by halves: some of the left and any of the right, or some of the right."""
        comma = self.emitter.white.comma
        if not pairs:
            assert extra is not None
            return ir.Seq((extra, ir.Repeat(ir.Seq((comma, extra)), 0, most)))
        if len(pairs) == 1 and extra is None:
            return pairs[0]
        half = (len(pairs) + 1) // 2
        left = self._some(pairs[:half], None, None)
        rest: list[ir.Expr] = [ir.Alt((ir.EMPTY, ir.Seq((comma, pair)))) for pair in pairs[half:]]
        if extra is not None:
            rest.append(ir.Repeat(ir.Seq((comma, extra)), 0, None))
        return ir.Alt((ir.Seq((left, *rest)), self._some(pairs[half:], extra, None)))

    # -- machines

    def _machine(self, plan: _Plan, free: bool) -> ir.Expr:
        white = self.emitter.white
        start = _Machine(self.emitter, plan, self.any_order, free).run()
        if not white.flexible:
            return ir.Seq((ir.Bytes(b"{"), ir.Ref(start), ir.Bytes(b"}")))
        return ir.Seq((ir.Bytes(b"{"), white.gap, ir.Ref(start), white.gap, ir.Bytes(b"}")))


class _Machine:
    """Rules for one object, a rule for each state."""

    def __init__(self, emitter: Emitter, plan: _Plan, any_order: bool, free: bool) -> None:
        self.emitter = emitter
        self.plan = plan
        self.any_order = any_order
        self.free = free
        self.required = sum(member.required for member in plan.members)
        self.always = frozenset(member.name for member in plan.members if member.required)
        before = [0, *accumulate(int(member.required) for member in plan.members)]
        self.segment = before[:-1]  # of each member: how many required ones are named before it
        limits = emitter.normalizer.clock.limits
        relevant = {name for clause in plan.clauses for name in (*clause.present, *clause.then)}
        if any_order:
            members = plan.members
            if len(members) <= limits.any_order_keys:
                relevant |= {member.name for member in members}
            else:
                relevant |= {member.name for member in members if member.required}
                if len(relevant) > limits.any_order_keys or plan.low or plan.high is not None or plan.exists:
                    raise UnsupportedConstraint(
                        emitter.normalizer.clock.pointer,
                        f"{len(members)} keys in any order; more than {limits.any_order_keys} (limit `any_order_keys`) cannot be exact",
                    )
        if free:
            relevant |= {member.name for member in plan.members if not member.required}
        self.tracked = frozenset(relevant)
        self.cap = plan.high if plan.high is not None else plan.low
        self.states: dict[_State, str] = {}
        self.keys = [emitter.object_text.key(member.name) for member in plan.members]
        self.cell_keys = [emitter.object_text.others(cell.keys) for cell in plan.cells]

    def run(self) -> str:
        """Writes all rules; the name of the first."""
        start = _State(0, False, 0, frozenset(), frozenset())
        name = self._name(start)[0]
        todo = [start]
        while todo:
            state = todo.pop()
            loops: list[ir.Expr] = []
            exits: list[ir.Expr] = [ir.EMPTY] if self._may_end(state) else []
            for key, node, after in self._steps(state):
                if node is self.emitter.normalizer.nodes.false:
                    continue
                pair = ir.Seq((key, self.emitter.white.colon, self.emitter.value(node)))
                step = ir.Seq((self.emitter.white.comma, pair)) if state.started else pair
                if after == state:
                    loops.append(step)
                    continue
                target, new = self._name(after)
                if new:
                    todo.append(after)
                exits.append(ir.Seq((step, ir.Ref(target))))
            rule: ir.Expr = ir.Alt(tuple(exits))
            if loops:
                rule = ir.Seq((ir.Repeat(ir.Alt(tuple(loops)), 0, None), rule))
            self.emitter.rules[self.states[state]] = rule
        return name

    def _name(self, state: _State) -> tuple[str, bool]:
        name = self.states.get(state)
        if name is not None:
            return name, False
        clock = self.emitter.normalizer.clock
        if len(self.states) >= clock.limits.states:
            raise UnsupportedConstraint(
                clock.pointer,
                f"counting the keys of this object needs more than {clock.limits.states:,} states (limit `states`)",
            )
        name = self.states[state] = self.emitter.new_rule("keys")
        return name, True

    def _may_end(self, state: _State) -> bool:
        plan = self.plan
        if state.members < min(plan.low, self.cap) or len(state.met) < len(plan.exists):
            return False
        if self.any_order:
            if any(member.required and member.name not in state.taken for member in plan.members):
                return False
        elif self.free:
            if state.at < self.required:
                return False
        elif any(member.required for member in plan.members[state.at :]):
            return False
        return all(
            not clause.present <= (state.taken | self.always) or any(name in state.taken for name in clause.then)
            for clause in plan.clauses
        )

    def _steps(self, state: _State) -> list[tuple[ir.Expr, Node, _State]]:
        """Every way to add a member: its key, what its value must satisfy, and the state after it."""
        plan = self.plan
        steps: list[tuple[ir.Expr, Node, _State]] = []
        if plan.high is not None and state.members >= plan.high:
            return steps
        count = min(state.members + 1, self.cap)
        for index, following in self._next(state):
            member = plan.members[index]
            taken = state.taken | {member.name} if member.name in self.tracked else state.taken
            for node, met in self._witness(member.node, member.witness, state.met):
                steps.append((self.keys[index], node, _State(following, True, count, met, taken)))
        last = self._after_others(state)
        if last is not None:
            for cell, key in zip(plan.cells, self.cell_keys):
                # a later key of a witness's set may be the same key: its value has to bear witness as well
                bound = [plan.exists[n].node for n in cell.witness if n in state.met]
                node = self.emitter.normalizer.nodes.both((cell.node, *bound))
                for value, met in self._witness(node, cell.witness, state.met):
                    steps.append((key, value, _State(last, True, count, met, state.taken)))
        return steps

    def _next(self, state: _State) -> list[tuple[int, int]]:
        """The members that may come now, each with the index of the state after it."""
        members = self.plan.members
        if self.any_order:
            return [(n, 0) for n, member in enumerate(members) if member.name not in state.taken]
        if self.free:
            return [
                (n, state.at + member.required)
                for n, member in enumerate(members)
                if (
                    self.segment[n] == state.at
                    if member.required
                    else member.name not in state.taken and state.at in (self.segment[n], self.required)
                )
            ]
        last = next((n for n in range(state.at, len(members)) if members[n].required), len(members) - 1)
        return [(n, n + 1) for n in range(state.at, last + 1)]

    def _after_others(self, state: _State) -> int | None:
        """The index of the state after a key that no schema names; ``None`` where none may come."""
        if self.any_order:
            return 0
        if self.free:
            return state.at if state.at == self.required else None
        members = self.plan.members
        return None if any(member.required for member in members[state.at :]) else len(members)

    def _witness(self, node: Node, may: tuple[int, ...], met: frozenset[int]) -> list[tuple[Node, frozenset[int]]]:
        """The value without being a witness, and as a witness of each thing still missing."""
        choices = [(node, met)]
        for n in may:
            if n not in met:
                nodes = self.emitter.normalizer.nodes
                choices += [(nodes.both((value, self.plan.exists[n].node)), got | {n}) for value, got in choices]
        return choices
