"""Sets of objects that a schema can describe, closed under intersection and complement.

A set is a stack of layers, one for each schema that speaks about properties; a value has to satisfy what every layer says
about its key. Layers stay apart because ``additionalProperties`` of one schema does not see the ``properties`` of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from radixrt.grammar.schema import strings
from radixrt.grammar.schema.nodes import Node, Nodes
from radixrt.grammar.schema.strings import Languages, StringSet


class Layer:
    """What one schema says about the values of keys: by name, by pattern, and for all other keys. Identity is equality."""

    __slots__ = ("_memo", "names", "patterns", "rest")

    def __init__(self, names: dict[str, Node], patterns: tuple[tuple[StringSet, Node], ...], rest: Node) -> None:
        self.names = names
        self.patterns = patterns
        self.rest = rest
        self._memo: dict[str, Node] = {}

    def value(self, name: str, nodes: Nodes, languages: Languages) -> Node:
        """What the value of a key has to satisfy."""
        if not self.patterns:
            return self.names.get(name, self.rest)
        found = self._memo.get(name)
        if found is None:
            said = [node for keys, node in self.patterns if languages.holds(keys, name)]
            if name in self.names:
                said.insert(0, self.names[name])
            found = self._memo[name] = nodes.both(said) if said else self.rest
        return found

    def others(self, languages: Languages) -> StringSet:
        """The keys that only ``rest`` speaks about."""
        keys = strings.all_but(self.names)
        for pattern, _ in self.patterns:
            keys = strings.common(keys, strings.outside(pattern, languages), languages)
        return keys


@dataclass(frozen=True, slots=True)
class Exists:
    """Some key of a set has a value that satisfies ``node``."""

    keys: StringSet
    node: Node


@dataclass(frozen=True, slots=True)
class Clause:
    """If all of ``present`` are keys, then one of ``then`` is."""

    present: frozenset[str]
    then: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Which keys the schemas behind a set have looked at."""

    names: frozenset[str] = frozenset()
    patterns: frozenset[StringSet] = frozenset()
    all: bool = False

    def __or__(self, other: Evaluated) -> Evaluated:
        return Evaluated(self.names | other.names, self.patterns | other.patterns, self.all or other.all)


UNSEEN = Evaluated()


@dataclass(frozen=True, slots=True)
class Objects:
    """All objects that meet every field; ``required`` keeps the order in which the schemas mention its names."""

    layers: tuple[Layer, ...] = ()
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None
    exists: tuple[Exists, ...] = ()
    clauses: tuple[Clause, ...] = ()
    evaluated: Evaluated = UNSEEN

    def value(self, name: str, nodes: Nodes, languages: Languages) -> Node:
        """What the value of a key has to satisfy."""
        return nodes.both([layer.value(name, nodes, languages) for layer in self.layers])

    def names(self) -> list[str]:
        """Every name a field mentions, in an order that keeps each layer's own, as far as the layers agree."""
        order: list[str] = []
        known: set[str] = set()
        for layer in self.layers:
            _weave(order, known, list(layer.names))
        found = dict.fromkeys(order)
        found.update(dict.fromkeys(self.required))
        for clause in self.clauses:
            found.update(dict.fromkeys(clause.then))
            found.update(dict.fromkeys(sorted(clause.present)))
        return list(found)


def _weave(order: list[str], known: set[str], names: list[str]) -> None:
    """Adds names to an order: before the known name that follows them, or else at the end."""
    if not order or known.isdisjoint(names):
        order += [name for name in names if name not in known]
        known.update(names)
        return
    waiting: list[str] = []
    for name in names:
        if name not in known:
            waiting.append(name)
        elif waiting:
            at = order.index(name)
            order[at:at] = waiting
            waiting = []
    order += waiting
    known.update(names)


ALL_OBJECTS = Objects()


def intersect(a: Objects, b: Objects, nodes: Nodes, languages: Languages) -> Objects | None:
    """What is in both, or ``None`` when that is seen to be nothing."""
    if a is ALL_OBJECTS:
        return b
    if b is ALL_OBJECTS:
        return a
    part = Objects(
        tuple(dict.fromkeys(a.layers + b.layers)),
        tuple(dict.fromkeys(a.required + b.required)),
        max(a.low, b.low),
        a.high if b.high is None else b.high if a.high is None else min(a.high, b.high),
        tuple(dict.fromkeys(a.exists + b.exists)),
        tuple(dict.fromkeys(a.clauses + b.clauses)),
        a.evaluated | b.evaluated,
    )
    return part if possible(part, nodes, languages) else None


def possible(part: Objects, nodes: Nodes, languages: Languages) -> bool:
    """False when the set is seen to be empty at the surface: counts, and required keys that no value may have."""
    if part.high is not None and max(part.low, len(part.required)) > part.high:
        return False
    return all(part.value(name, nodes, languages) is not nodes.false for name in part.required)


def contested(a: Objects, b: Objects, nodes: Nodes, languages: Languages) -> Iterator[Node]:
    """The values that a key of both needs, for every required key on which both sets have something to say."""
    for name in dict.fromkeys(a.required + b.required):
        one = a.value(name, nodes, languages)
        two = b.value(name, nodes, languages)
        if one is not two and one is not nodes.true and two is not nodes.true:
            yield nodes.both((one, two))


def single(name: str, node: Node, nodes: Nodes) -> Layer:
    """What one key's value must satisfy; each such layer is made once."""
    made = nodes.leaf("layer", name, node)
    if not made.attached:
        made.attached.append(Layer({name: node}, (), nodes.true))
    layer: Layer = made.attached[0]
    return layer


def complement(part: Objects, nodes: Nodes, languages: Languages) -> Iterator[Objects]:
    """The objects outside: sets whose union is exactly the rest, and that do not overlap.

    Each condition's violation is joined with all conditions before it, keys that tell kinds of objects apart first: what
    such sets have in common with others is then mostly seen to be empty.
    """
    met = ALL_OBJECTS

    def violated(wrong: Objects) -> Iterator[Objects]:
        both = intersect(met, wrong, nodes, languages)
        if both is not None:
            yield both

    def holds(right: Objects) -> Iterator[None]:
        nonlocal met
        both = intersect(met, right, nodes, languages)
        if both is not None:
            met = both
            yield

    required = frozenset(part.required)
    names = [*part.required, *(name for name in part.names() if name not in required)]
    names.sort(key=lambda name: not _tells(part.value(name, nodes, languages)))
    for name in names:
        node = part.value(name, nodes, languages)
        if name in required:
            yield from violated(Objects((single(name, nodes.negate(node), nodes),)))  # absent, or with a wrong value
            right = Objects((single(name, node, nodes),) if node is not nodes.true else (), (name,))
        elif node is nodes.true:
            continue
        else:
            wrong = nodes.negate(node)
            layers: tuple[Layer, ...] = (single(name, wrong, nodes),) if wrong is not nodes.true else ()
            yield from violated(Objects(layers, (name,)))
            right = Objects((single(name, node, nodes),))
        if not list(holds(right)):
            return
    rest: list[tuple[Objects, Objects]] = []
    if part.low:
        rest.append((Objects(high=part.low - 1), Objects(low=part.low)))
    if part.high is not None:
        rest.append((Objects(low=part.high + 1), Objects(high=part.high)))
    for clause in part.clauses:
        layers = tuple(single(name, nodes.false, nodes) for name in clause.then)
        rest.append((Objects(layers, tuple(sorted(clause.present))), Objects(clauses=(clause,))))
    for item in part.exists:
        every = Layer({}, ((item.keys, nodes.negate(item.node)),), nodes.true)
        rest.append((Objects((every,)), Objects(exists=(item,))))
    for layer in part.layers:
        sets = list(layer.patterns)
        if layer.rest is not nodes.true:
            sets.append((layer.others(languages), layer.rest))
        for keys, node in sets:
            if node is not nodes.true:
                rest.append(
                    (
                        Objects(exists=(Exists(keys, nodes.negate(node)),)),
                        Objects((Layer({}, ((keys, node),), nodes.true),)),
                    )
                )
    for wrong_, right_ in rest:
        yield from violated(wrong_)
        if not list(holds(right_)):
            return


def _tells(node: Node) -> bool:
    """Whether the value's schema lists the values it may have."""
    if node.kind == "and":
        return any(_tells(item) for item in node.args)
    if node.kind == "schema":
        schema = node.args[0].schema
        return "const" in schema or "enum" in schema
    return node.kind in ("value", "false")
