"""From formulas over schemas to shapes: what each keyword says, type by type.

``Normalizer.shape`` looks at one value only; what a schema says about the values inside stays a formula (``Node``) until the
grammar gets there. Results are kept, so a recursive schema costs what its distinct formulas cost. Conditions on the same value
that lead back to themselves (``$ref`` to itself without a step into the value) have no meaning and are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from radixrt.errors import InvalidRequest
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.regular.formats import INEXACT, format_dfa
from radixrt.grammar.schema import arrays, numbers, objects, strings
from radixrt.grammar.schema.applied import Applied
from radixrt.grammar.schema.arrays import Arrays, Contains
from radixrt.grammar.schema.content import TELLING, content_key
from radixrt.grammar.schema.emptiness import Emptiness
from radixrt.grammar.schema.limits import Clock
from radixrt.grammar.schema.load import Documents, Place, escape
from radixrt.grammar.schema.nodes import Node, Nodes
from radixrt.grammar.schema.numbers import ALL_NUMBERS, Numbers, exact
from radixrt.grammar.schema.objects import Clause, Layer, Objects
from radixrt.grammar.schema.shape import Shape, Shapes
from radixrt.grammar.schema.strings import ALL_STRINGS, Condition, Languages, Strings
from radixrt.grammar.schema.values import values_shape

Scope = tuple[tuple[str, Place], ...]  # dynamic anchors, each with the outermost place that has it
_LATER = frozenset(("anyOf", "oneOf", "not", "if"))  # looked at in the light of what the other keywords say
FORMATS = ("assert", "annotation", "strict")


class Loop(InvalidRequest):
    """A schema that applies itself to the same value."""


class Normalizer:
    """Shapes of formulas, for one compilation."""

    def __init__(self, documents: Documents, clock: Clock, formats: str) -> None:
        self.documents = documents
        self.clock = clock
        self.formats = formats
        self.nodes = Nodes()
        self.languages = Languages()
        self.emptiness = Emptiness(self)
        self.shapes = Shapes(self.nodes, self.languages, clock, self.emptiness.clash)
        self.applied = Applied(self)
        self._alike: dict[tuple[Any, Any], Place] = {}
        self._formulas: dict[tuple[Place, Scope], Node] = {}
        self._made: dict[tuple[Node, bool], Shape] = {}
        self._active: dict[tuple[Node, bool], None] = {}

    # -- nodes

    def node(self, schema: Any, parent: Place, scope: Scope, pointer: str) -> Node:
        """The formula of a subschema."""
        if schema is True:
            return self.nodes.true
        if schema is False:
            return self.nodes.false
        place = self.documents.place(schema, parent.resource, pointer)
        content = content_key(schema, parent.resource.draft) if place.resource is parent.resource else None
        if content is not None:  # equal schemas are one formula: much is then seen to be equal or contradictory
            place = self._alike.setdefault((content, place.resource), place)
        return self.node_at(place, scope)

    def node_at(self, place: Place, scope: Scope) -> Node:
        """The formula of the schema at a place, entered from a dynamic scope."""
        if place.schema is True:
            return self.nodes.true
        if place.schema is False:
            return self.nodes.false
        telling = [keyword for keyword in place.schema if keyword in TELLING]
        if not telling:
            return self.nodes.true
        if "$ref" in telling and (len(telling) == 1 or place.resource.draft.ref_alone):
            return self._target(place, scope)
        if (
            len(telling) == 1
            and telling[0] in ("not", "allOf", "anyOf")
            and telling[0] in place.resource.draft.keywords
        ):
            made = self._formulas.get((place, scope))
            if (
                made is None
            ):  # read once: where each refers ten times to the next, many would be read ten times more often each
                self.clock.check()
                made = self._formulas[place, scope] = self._formula(telling[0], place, scope)
            return made
        return self.nodes.leaf("schema", place, self._enter(scope, place))

    def _target(self, place: Place, scope: Scope) -> Node:
        """Where a chain of schemas that are nothing but references ends; the first of them when it runs in a circle."""
        first = self._enter(scope, place)
        seen = {place}
        target, entered = place, first
        while True:
            target = self.documents.resolve(target.schema["$ref"], target, "$ref")
            if target in seen:
                return self.nodes.leaf("schema", place, first)
            seen.add(target)
            if not isinstance(target.schema, dict) or "$ref" not in target.schema or len(target.schema) > 1:
                return self.node_at(target, entered)
            entered = self._enter(entered, target)

    def _formula(self, keyword: str, place: Place, scope: Scope) -> Node:
        """A schema that is nothing but a negation, conjunction or disjunction of others."""
        scope = self._enter(scope, place)
        value = place.schema[keyword]
        at = f"{place.pointer}/{keyword}"
        if keyword == "not":
            return self.nodes.negate(self.node(value, place, scope, at))
        items = [self.node(item, place, scope, f"{at}/{n}") for n, item in enumerate(value)]
        return self.nodes.both(items) if keyword == "allOf" else self.nodes.either(items)

    def _enter(self, scope: Scope, place: Place) -> Scope:
        resource = place.resource
        if not resource.dynamic and not resource.recursive:
            return scope
        known = {name for name, _ in scope}
        new = [item for item in resource.dynamic.items() if item[0] not in known]
        if resource.recursive and "" not in known:
            new.append(("", self.documents.place(resource.root, resource, resource.pointer)))
        return tuple(sorted((*scope, *new), key=lambda item: item[0])) if new else scope

    def root(self) -> Node:
        """The formula of the whole schema."""
        resource = self.documents.root
        return self.node_at(self.documents.place(resource.root, resource, resource.pointer), ())

    # -- shapes

    def shape(self, node: Node, annotate: bool = False) -> Shape:
        """What a value may be. ``annotate``: parts also say which keys and items have been evaluated."""
        key = (node, annotate)
        made = self._made.get(key)
        if made is not None:
            return made
        if key in self._active:
            raise Loop(self.clock.pointer, "applies itself to the same value, without a step into the value")
        if len(self._active) >= self.clock.limits.applied:
            raise UnsupportedConstraint(
                self.clock.pointer,
                f"more than {self.clock.limits.applied} schemas apply to one value through each other (limit `applied`)",
            )
        self.clock.check()
        self._active[key] = None
        pointer = self.clock.pointer
        try:
            made = self._expand(node, annotate)
        finally:
            del self._active[key]
        self.clock.pointer = pointer  # not after an error: it is where the error lies
        self._made[key] = made
        return made

    def _expand(self, node: Node, annotate: bool) -> Shape:
        kind = node.kind
        if kind == "schema":
            place, scope = node.args
            self.clock.pointer = place.pointer
            return self._schema(place, scope, annotate)
        if kind == "and":
            return self._all(self.shape(item, annotate) for item in node.args)
        if kind == "or":
            return self.shapes.either([self.shape(item, annotate) for item in node.args], annotate)
        if kind == "not":
            return self.shapes.negate(self.shape(node.args[0]))
        if kind == "value":
            return values_shape([node.args[0]], self.nodes)
        if kind == "shape":
            return node.args[0]
        return self.shapes.anything if kind == "true" else self.shapes.nothing

    def _all(self, items: Iterable[Shape]) -> Shape:
        result = self.shapes.anything
        for item in items:
            result = self.shapes.both(result, item)
        return result

    def _schema(self, place: Place, scope: Scope, annotate: bool) -> Shape:
        schema = place.schema
        keywords = place.resource.draft.keywords
        if place.resource.draft.ref_alone and isinstance(schema.get("$ref"), str):
            return self.shape(self.node_at(self.documents.resolve(schema["$ref"], place, "$ref"), scope), annotate)
        said = {keyword: value for keyword, value in schema.items() if keyword in keywords}
        watch = annotate or "unevaluatedProperties" in said or "unevaluatedItems" in said
        base = self._assertions(place, scope, said, watch)
        pieces: list[Shape | None] = []
        later: list[tuple[int, str]] = []
        own = False
        context = base
        for keyword, value in said.items():
            if keyword in ("properties", "patternProperties") and not own:
                pieces.append(base)
                own = True
            elif keyword in _LATER:
                later.append((len(pieces), keyword))
                pieces.append(None)
            else:
                made = self.applied.shape(keyword, value, place, scope, said, watch, context)
                if made is not None:
                    pieces.append(made)
                    context = self.shapes.both(context, made)
                self.clock.pointer = place.pointer
        if not later and not own:
            return self._unevaluated(context, place, scope, said) if watch else context
        for index, keyword in later:
            pieces[index] = self.applied.shape(keyword, said[keyword], place, scope, said, watch, context)
            self.clock.pointer = place.pointer
        if not own:
            pieces.insert(0, base)
        result = self._all(piece for piece in pieces if piece is not None)
        if watch:
            result = self._unevaluated(result, place, scope, said)
        return result

    # -- assertions and what they say about the values inside

    def _assertions(self, place: Place, scope: Scope, said: dict[str, Any], watch: bool) -> Shape:
        named = said.get("type")
        types = set(named) if isinstance(named, list) else {named} if named is not None else None
        shapes = self.shapes
        number: Numbers | None = None
        if types is None or "number" in types or "integer" in types:
            number = self._numbers(place, said, types is not None and "number" not in types)
        string = self._strings(place, said) if types is None or "string" in types else None
        array = self._arrays(place, scope, said, watch) if types is None or "array" in types else None
        object_ = self._objects(place, scope, said, watch) if types is None or "object" in types else None
        if (
            types is None
            and number is ALL_NUMBERS
            and string is ALL_STRINGS
            and array is shapes.any_array
            and object_ is objects.ALL_OBJECTS
        ):
            return shapes.anything
        boolean = types is None or "boolean" in types
        return Shape(
            types is None or "null" in types,
            boolean,
            boolean,
            () if number is None else (number,),
            () if string is None else (string,),
            () if array is None else (array,),
            () if object_ is None else (object_,),
        )

    def _numbers(self, place: Place, said: dict[str, Any], integer: bool) -> Numbers | None:
        low, high = said.get("minimum"), said.get("maximum")
        low_open, high_open = said.get("exclusiveMinimum"), said.get("exclusiveMaximum")
        step = said.get("multipleOf")
        whole = numbers.WHOLE if place.resource.draft.integral_floats else numbers.WRITTEN_WHOLE
        if low is None and high is None and low_open is None and high_open is None and step is None:
            return whole if integer else ALL_NUMBERS
        part: Numbers | None = whole if integer else ALL_NUMBERS
        bounds = [
            (low, low_open is True, False),
            (None if isinstance(low_open, bool) else low_open, True, False),
            (high, high_open is True, True),
            (None if isinstance(high_open, bool) else high_open, True, True),
        ]
        for value, is_open, upper in bounds:
            if value is not None and part is not None:
                at = exact(value)
                bound = Numbers(high=at, high_open=is_open) if upper else Numbers(low=at, low_open=is_open)
                part = numbers.intersect(part, bound)
        if step is not None and part is not None:
            part = numbers.intersect(part, Numbers(multiples=frozenset((exact(step),))))
        return part

    def _strings(self, place: Place, said: dict[str, Any]) -> Strings | None:
        conditions: list[Condition] = []
        if "pattern" in said:
            conditions.append(Condition("pattern", said["pattern"]))
        name = said.get("format")
        if name is not None and self.formats != "annotation":
            if name in INEXACT:
                raise UnsupportedConstraint(f"{place.pointer}/format", f"={name!r}: this format has no exact automaton")
            if format_dfa(name) is not None:
                conditions.append(Condition("format", name))
            elif self.formats == "strict":
                raise UnsupportedConstraint(f"{place.pointer}/format", f"={name!r}: unknown format")
        low = int(said.get("minLength", 0))
        high = said.get("maxLength")
        if not conditions and not low and high is None:
            return ALL_STRINGS
        return strings.tidy(Strings(low, None if high is None else int(high), frozenset(conditions)), self.languages)

    def _arrays(self, place: Place, scope: Scope, said: dict[str, Any], watch: bool) -> Arrays | None:
        draft = place.resource.draft
        at = place.pointer
        prefix: list[Node] = []
        rest: Node | None = None
        if isinstance(said.get("items"), list):
            prefix = [self.node(item, place, scope, f"{at}/items/{n}") for n, item in enumerate(said["items"])]
            if "additionalItems" in said:
                rest = self.node(said["additionalItems"], place, scope, f"{at}/additionalItems")
        else:
            items = said.get("prefixItems", ())
            prefix = [self.node(item, place, scope, f"{at}/prefixItems/{n}") for n, item in enumerate(items)]
            if "items" in said:
                rest = self.node(said["items"], place, scope, f"{at}/items")
        contains: tuple[Contains, ...] = ()
        seen: tuple[Node, ...] = ()
        if "contains" in said:
            node = self.node(said["contains"], place, scope, f"{at}/contains")
            most = said.get("maxContains")
            contains = (Contains(0, node, int(said.get("minContains", 1)), None if most is None else int(most)),)
            if draft.contains_evaluates:
                seen = (node,)
        low, high = int(said.get("minItems", 0)), said.get("maxItems")
        unique = True if said.get("uniqueItems") is True else None
        if not prefix and rest is None and not contains and not low and high is None and unique is None:
            return self.shapes.any_array
        part = Arrays(
            tuple(prefix),
            self.nodes.true if rest is None else rest,
            low,
            None if high is None else int(high),
            contains,
            unique,
            arrays.Evaluated(len(prefix) if rest is None else None, seen) if watch else arrays.UNSEEN,
        )
        return arrays.tidy(part, self.nodes)

    def _objects(self, place: Place, scope: Scope, said: dict[str, Any], watch: bool) -> Objects | None:
        at = place.pointer
        layers: list[Layer] = []
        evaluated = objects.UNSEEN
        if "properties" in said or "patternProperties" in said or "additionalProperties" in said:
            names = {
                name: self.node(item, place, scope, f"{at}/properties/{escape(name)}")
                for name, item in said.get("properties", {}).items()
            }
            patterns = tuple(
                (
                    (Strings(conditions=frozenset((Condition("pattern", pattern),))),),
                    self.node(item, place, scope, f"{at}/patternProperties/{escape(pattern)}"),
                )
                for pattern, item in said.get("patternProperties", {}).items()
            )
            rest = self.nodes.true
            if "additionalProperties" in said:
                rest = self.node(said["additionalProperties"], place, scope, f"{at}/additionalProperties")
            if names or patterns or rest is not self.nodes.true:
                layers.append(Layer(names, patterns, rest))
            if watch:
                evaluated = objects.Evaluated(
                    frozenset(names), frozenset(keys for keys, _ in patterns), "additionalProperties" in said
                )
        if "propertyNames" in said:
            allowed = self.shape(self.node(said["propertyNames"], place, scope, f"{at}/propertyNames")).strings
            others = strings.outside(allowed, self.languages)
            if others:
                layers.append(Layer({}, ((others, self.nodes.false),), self.nodes.true))
        required = tuple(dict.fromkeys(said.get("required", ())))
        clauses = [
            Clause(frozenset((name,)), (needed,))
            for keyword in ("dependentRequired", "dependencies")
            for name, item in said.get(keyword, {}).items()
            if isinstance(item, list)
            for needed in item
            if needed != name
        ]
        low, high = int(said.get("minProperties", 0)), said.get("maxProperties")
        if not layers and not required and not clauses and not low and high is None and evaluated is objects.UNSEEN:
            return objects.ALL_OBJECTS
        part = Objects(tuple(layers), required, low, None if high is None else int(high), (), tuple(clauses), evaluated)
        return part if objects.possible(part, self.nodes, self.languages) else None

    def _unevaluated(self, shape: Shape, place: Place, scope: Scope, said: dict[str, Any]) -> Shape:
        """Applies ``unevaluatedItems`` and ``unevaluatedProperties`` to what the rest of the schema has not looked at."""
        nodes = self.nodes
        some_arrays, some_objects = shape.arrays, shape.objects
        if "unevaluatedItems" in said:
            item = self.node(said["unevaluatedItems"], place, scope, f"{place.pointer}/unevaluatedItems")
            made: list[Arrays] = []
            for part in some_arrays:
                seen = part.evaluated
                if seen.count is not None:
                    rest = nodes.either((item, *seen.matching))
                    limit = Arrays((*(nodes.true,) * seen.count,), rest, evaluated=arrays.Evaluated(None))
                    met = arrays.intersect(part, limit, nodes)
                    if met is not None:
                        made.append(met)
                else:
                    made.append(part)
            some_arrays = tuple(made)
        if "unevaluatedProperties" in said:
            item = self.node(said["unevaluatedProperties"], place, scope, f"{place.pointer}/unevaluatedProperties")
            kept: list[Objects] = []
            for one in some_objects:
                if one.evaluated.all:
                    kept.append(one)
                    continue
                layer = Layer(
                    dict.fromkeys(sorted(one.evaluated.names), nodes.true),
                    tuple((keys, nodes.true) for keys in sorted(one.evaluated.patterns, key=str)),
                    item,
                )
                both = objects.intersect(
                    one, Objects((layer,), evaluated=objects.Evaluated(all=True)), nodes, self.languages
                )
                if both is not None:
                    kept.append(both)
            some_objects = tuple(kept)
        return Shape(shape.null, shape.true, shape.false, shape.numbers, shape.strings, some_arrays, some_objects)
