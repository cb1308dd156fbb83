"""What keywords say that apply other schemas to the same value: references, combinations, conditions, listed values."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.schema.load import Place, escape
from radixrt.grammar.schema.nodes import Node
from radixrt.grammar.schema.objects import Objects, single
from radixrt.grammar.schema.shape import Shape
from radixrt.grammar.schema.values import key_of, values_shape

if TYPE_CHECKING:
    from radixrt.grammar.schema.normalize import Normalizer, Scope

_MOST_BRANCHES_SEEN = 6  # branches of one anyOf below unevaluated*: every subset of them is a case


class Applied:
    """Shapes of the in-place applicators."""

    def __init__(self, normalizer: Normalizer) -> None:
        self.normalizer = normalizer

    def shape(
        self, keyword: str, value: Any, place: Place, scope: Scope, said: dict[str, Any], watch: bool, context: Shape
    ) -> Shape | None:
        """What one keyword says, or ``None`` for keywords that are not applied in place."""
        method = getattr(self, _METHODS.get(keyword, ""), None)
        if method is None:
            return None
        return method(keyword, value, place, scope, said, watch, context)

    def _branches(self, keyword: str, value: list[Any], place: Place, scope: Scope) -> list[Node]:
        at = f"{place.pointer}/{keyword}"
        return [self.normalizer.node(item, place, scope, f"{at}/{n}") for n, item in enumerate(value)]

    def ref(
        self, keyword: str, value: str, place: Place, scope: Scope, said: dict[str, Any], watch: bool, context: Shape
    ) -> Shape:
        """``$ref``."""
        normalizer = self.normalizer
        return normalizer.shape(normalizer.node_at(normalizer.documents.resolve(value, place, keyword), scope), watch)

    def dynamic_ref(
        self, keyword: str, value: str, place: Place, scope: Scope, said: dict[str, Any], watch: bool, context: Shape
    ) -> Shape:
        """``$dynamicRef`` and ``$recursiveRef``: the outermost schema of that anchor on the way here."""
        normalizer = self.normalizer
        target = normalizer.documents.resolve(value, place, keyword)
        if keyword == "$recursiveRef":
            name = "" if target.resource.recursive and target.schema is target.resource.root else None
        else:
            name = value.partition("#")[2]
            if target.resource.dynamic.get(name) is not target:
                name = None
        if name is not None:
            target = dict(scope).get(name, target)
        return normalizer.shape(normalizer.node_at(target, scope), watch)

    def all_of(
        self,
        keyword: str,
        value: list[Any],
        place: Place,
        scope: Scope,
        said: dict[str, Any],
        watch: bool,
        context: Shape,
    ) -> Shape:
        """``allOf``."""
        normalizer = self.normalizer
        result = normalizer.shapes.anything
        for node in self._branches(keyword, value, place, scope):
            result = normalizer.shapes.both(result, normalizer.shape(node, watch))
        return result

    def any_of(
        self,
        keyword: str,
        value: list[Any],
        place: Place,
        scope: Scope,
        said: dict[str, Any],
        watch: bool,
        context: Shape,
    ) -> Shape:
        """``anyOf``; when evaluation is watched, every set of branches that may hold together is a case."""
        normalizer = self.normalizer
        nodes = self._branches(keyword, value, place, scope)
        if not watch or len(nodes) == 1:
            return normalizer.shapes.either([normalizer.shape(node, watch) for node in nodes], watch)
        if len(nodes) > _MOST_BRANCHES_SEEN:
            raise UnsupportedConstraint(
                f"{place.pointer}/anyOf",
                f"has {len(nodes)} branches below an unevaluated* keyword; more than {_MOST_BRANCHES_SEEN} are too many",
            )
        cases: list[Shape] = []
        for size in range(1, len(nodes) + 1):
            for subset in combinations(nodes, size):
                case = normalizer.shapes.anything
                for node in subset:
                    case = normalizer.shapes.both(case, normalizer.shape(node, True))
                if not case.nothing:
                    cases.append(case)
        return normalizer.shapes.either(cases, True) if cases else normalizer.shapes.nothing

    def one_of(
        self,
        keyword: str,
        value: list[Any],
        place: Place,
        scope: Scope,
        said: dict[str, Any],
        watch: bool,
        context: Shape,
    ) -> Shape:
        """``oneOf``: each branch less the others it is not known to be disjoint from."""
        normalizer = self.normalizer
        nodes = self._branches(keyword, value, place, scope)
        if len(nodes) == 1:
            return normalizer.shape(nodes[0], watch)
        overlaps: list[list[Node]] = [[] for _ in nodes]
        for one, two in combinations(range(len(nodes)), 2):
            if not normalizer.emptiness.disjoint(nodes[one], nodes[two], context):
                overlaps[one].append(nodes[two])
                overlaps[two].append(nodes[one])
        cases: list[Shape] = []
        for node, others in zip(nodes, overlaps):
            case = (
                normalizer.shapes.both(context, normalizer.shape(node, watch))
                if others
                else normalizer.shape(node, watch)
            )
            for other in others:
                case = normalizer.shapes.both(case, normalizer.shape(normalizer.nodes.negate(other)))
            if not case.nothing:
                cases.append(case)
        return normalizer.shapes.either(cases, watch) if cases else normalizer.shapes.nothing

    def not_(
        self, keyword: str, value: Any, place: Place, scope: Scope, said: dict[str, Any], watch: bool, context: Shape
    ) -> Shape:
        """``not``."""
        normalizer = self.normalizer
        node = normalizer.node(value, place, scope, f"{place.pointer}/not")
        return normalizer.shape(normalizer.nodes.negate(node))

    def if_(
        self, keyword: str, value: Any, place: Place, scope: Scope, said: dict[str, Any], watch: bool, context: Shape
    ) -> Shape:
        """``if`` with ``then`` and ``else``."""
        normalizer = self.normalizer
        shapes, nodes = normalizer.shapes, normalizer.nodes
        if "then" not in said and "else" not in said and not watch:
            return shapes.anything
        condition = normalizer.node(value, place, scope, f"{place.pointer}/if")
        branches: list[Shape] = []
        for node, keyword_ in ((condition, "then"), (nodes.negate(condition), "else")):
            case = normalizer.shape(node, watch and keyword_ == "then")
            if keyword_ in said:
                then = normalizer.node(said[keyword_], place, scope, f"{place.pointer}/{keyword_}")
                case = shapes.both(case, normalizer.shape(then, watch))
            branches.append(case)
        return shapes.either(branches, watch)

    def dependents(
        self,
        keyword: str,
        value: dict[str, Any],
        place: Place,
        scope: Scope,
        said: dict[str, Any],
        watch: bool,
        context: Shape,
    ) -> Shape:
        """``dependentSchemas`` and the schemas of ``dependencies``."""
        normalizer = self.normalizer
        shapes, nodes = normalizer.shapes, normalizer.nodes
        result = shapes.anything
        everything = shapes.anything
        for name, item in value.items():
            if isinstance(item, list):
                continue
            node = normalizer.node(item, place, scope, f"{place.pointer}/{keyword}/{escape(name)}")
            absent = Shape(
                True,
                True,
                True,
                everything.numbers,
                everything.strings,
                everything.arrays,
                (Objects((single(name, nodes.false, nodes),)),),
            )
            present = shapes.both(Shape(objects=(Objects(required=(name,)),)), normalizer.shape(node, watch))
            result = shapes.both(result, shapes.either((absent, present), watch))
        return result

    def const(
        self, keyword: str, value: Any, place: Place, scope: Scope, said: dict[str, Any], watch: bool, context: Shape
    ) -> Shape:
        """``const``."""
        return values_shape([key_of(value, f"{place.pointer}/const")], self.normalizer.nodes)

    def enum(
        self,
        keyword: str,
        value: list[Any],
        place: Place,
        scope: Scope,
        said: dict[str, Any],
        watch: bool,
        context: Shape,
    ) -> Shape:
        """``enum``."""
        return values_shape([key_of(item, f"{place.pointer}/enum") for item in value], self.normalizer.nodes)


_METHODS = {
    "$ref": "ref",
    "$dynamicRef": "dynamic_ref",
    "$recursiveRef": "dynamic_ref",
    "allOf": "all_of",
    "anyOf": "any_of",
    "oneOf": "one_of",
    "not": "not_",
    "if": "if_",
    "dependentSchemas": "dependents",
    "dependencies": "dependents",
    "const": "const",
    "enum": "enum",
}
