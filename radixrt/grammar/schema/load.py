"""Owns the documents of one compilation: their drafts, ids and anchors, and what a reference points to.

A schema document is walked once, without recursion: limits are checked, keyword values are checked, and every embedded
resource (``$id``) and anchor is noted. References are resolved against the document and a registry the caller gave; nothing
is ever fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from radixrt.errors import InvalidRequest
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.schema.check import check_keywords
from radixrt.grammar.schema.drafts import DRAFTS, MANY, NAMED, ONE, Draft, draft_of_uri
from radixrt.grammar.schema.limits import SchemaLimits

_MOST_DIGITS = 400  # of a number in a schema: what a double can hold, and some more


class Resource:
    """A schema with an address of its own, and the anchors inside it."""

    __slots__ = ("anchors", "draft", "dynamic", "pointer", "recursive", "root", "uri")

    def __init__(self, uri: str, root: Any, draft: Draft, pointer: str) -> None:
        self.uri = uri
        self.root = root
        self.draft = draft
        self.pointer = pointer
        self.anchors: dict[str, Place] = {}
        self.dynamic: dict[str, Place] = {}
        self.recursive = (
            isinstance(root, dict) and root.get("$recursiveAnchor") is True and "$recursiveRef" in draft.keywords
        )


class Place:
    """A schema (or boolean) inside a resource. Made once for each, so identity is equality."""

    __slots__ = ("pointer", "resource", "schema")

    def __init__(self, schema: Any, resource: Resource, pointer: str) -> None:
        self.schema = schema
        self.resource = resource
        self.pointer = pointer


def parse_text(text: str, limits: SchemaLimits) -> Any:
    """A schema given as JSON text; repeated keys and NaN are refused."""
    if len(text) > limits.text_bytes:
        raise UnsupportedConstraint(
            "json_schema", f"the schema has {len(text):,} characters, the limit (`text_bytes`) is {limits.text_bytes:,}"
        )

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidRequest("json_schema", f"key {twice!r} appears twice in one object")
        return made

    def constant(name: str) -> Any:
        raise InvalidRequest("json_schema", f"{name} is not JSON")

    def real(written: str) -> Decimal:
        value = Decimal(written)
        if abs(value.adjusted()) > _MOST_DIGITS or len(written) > _MOST_DIGITS:
            raise too_large(written)
        return value

    def whole(written: str) -> int:
        if len(written) > _MOST_DIGITS:
            raise too_large(written)
        return int(written)

    def too_large(written: str) -> UnsupportedConstraint:
        return UnsupportedConstraint(
            "json_schema", f"the number {written[:20]} has more than {_MOST_DIGITS} digits or an exponent beyond that"
        )

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_float=real, parse_int=whole)
    except json.JSONDecodeError as error:
        raise InvalidRequest("json_schema", f"is not JSON: {error}") from None
    except RecursionError:
        raise UnsupportedConstraint(
            "json_schema", f"the schema is nested deeper than the limit (`nesting`) of {limits.nesting}"
        ) from None


def escape(token: str) -> str:
    """A name as part of a JSON pointer."""
    return token.replace("~", "~0").replace("/", "~1")


class Documents:
    """All schemas of one compilation, by address."""

    def __init__(
        self, schema: Any, registry: Mapping[str, object] | None, draft: Draft | None, limits: SchemaLimits
    ) -> None:
        self.limits = limits
        self.count = 0
        self.registry = {_plain(uri): value for uri, value in (registry or {}).items()}
        self.resources: dict[str, Resource] = {}
        self._places: dict[tuple[int, int], Place] = {}
        self._resource_of: dict[int, Resource] = {}  # id(schema with an $id) -> its resource
        self._keep: list[Any] = []  # ids above stay valid while their objects live
        self._measured: set[int] = set()
        self.has_dynamic = False
        self.default = draft
        self.root = self._add("", schema, draft or DRAFTS["mixed"], "#")

    # -- loading

    def _add(self, uri: str, schema: Any, default: Draft, pointer: str) -> Resource:
        self._measure(schema, pointer)
        self._keep.append(schema)
        draft = self._draft(schema, default)
        resource = Resource(uri, schema, draft, pointer)
        self.resources.setdefault(uri, resource)
        self._walk(resource)
        return resource

    def _draft(self, schema: Any, default: Draft) -> Draft:
        if isinstance(schema, dict) and isinstance(schema.get("$schema"), str):
            known = draft_of_uri(schema["$schema"])
            if known is not None:
                return known
            meta = self.registry.get(_plain(schema["$schema"]))
            if isinstance(meta, dict):
                return self._custom(meta, default)
        return default

    def _custom(self, meta: dict[str, Any], default: Draft) -> Draft:
        """The draft of a meta-schema of the caller's own: the one it builds on, without the vocabularies it leaves out."""
        base = self._draft(meta, default) if meta.get("$schema") != meta.get("$id") else default
        vocabulary = meta.get("$vocabulary")
        if isinstance(vocabulary, dict) and not any("vocab/validation" in name for name in vocabulary):
            gone = (
                "type enum const minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength maxLength pattern minItems "
                "maxItems uniqueItems minContains maxContains minProperties maxProperties required dependentRequired".split()
            )
            fields = {name: getattr(base, name) for name in base.__dataclass_fields__}
            return Draft(**{**fields, "name": f"{base.name} without validation", "keywords": base.keywords - set(gone)})
        return base

    def _measure(self, schema: Any, pointer: str) -> None:
        """Size and nesting of a document, before anything else looks at it."""
        level: list[Any] = [schema]
        for _ in range(self.limits.nesting + 1):
            below: list[Any] = []
            for value in level:
                if isinstance(value, dict):
                    if not all(isinstance(name, str) for name in value):
                        raise InvalidRequest(pointer, f"has the keys {list(value)[:5]!r}: keys must be strings")
                    below.extend(value.values())
                elif isinstance(value, list):
                    below.extend(value)
            self.count += len(level)
            if self.count > self.limits.nodes:
                raise UnsupportedConstraint(
                    pointer, f"the schema holds over {self.limits.nodes:,} JSON values (limit `nodes`)"
                )
            if not below:
                return
            level = below
        raise UnsupportedConstraint(
            pointer, f"the schema is nested deeper than the limit (`nesting`) of {self.limits.nesting}"
        )

    def _walk(self, start: Resource) -> None:
        todo: list[tuple[Any, Resource, str]] = [(start.root, start, start.pointer)]
        seen: set[tuple[int, int]] = set()
        while todo:
            schema, resource, pointer = todo.pop()
            if not isinstance(schema, dict):
                if not isinstance(schema, bool):
                    raise InvalidRequest(pointer, f"={schema!r}: must be a schema (an object or a boolean)")
                continue
            key = (id(schema), id(resource))
            if key in seen:
                continue
            seen.add(key)
            draft = resource.draft
            alone = draft.ref_alone and isinstance(schema.get("$ref"), str)
            identifier = schema.get(draft.id_keyword)
            if isinstance(identifier, str) and not alone:
                resource = self._identify(schema, identifier, resource, pointer)
                draft = resource.draft
            check_keywords(schema, draft, pointer)
            self._anchors(schema, resource, pointer)
            for keyword, value in schema.items():
                if keyword not in draft.keywords:
                    continue
                if keyword in NAMED and isinstance(value, dict):
                    for name, item in value.items():
                        if not isinstance(item, list):
                            todo.append((item, resource, f"{pointer}/{keyword}/{escape(name)}"))
                elif keyword in MANY and isinstance(value, list):
                    for index, item in enumerate(value):
                        todo.append((item, resource, f"{pointer}/{keyword}/{index}"))
                elif keyword in ONE and isinstance(value, dict | bool):
                    todo.append((value, resource, f"{pointer}/{keyword}"))

    def _identify(self, schema: dict[str, Any], identifier: str, resource: Resource, pointer: str) -> Resource:
        uri, fragment = urldefrag(identifier)
        if fragment and not uri:
            if resource.draft.fragment_ids:
                resource.anchors[fragment] = self.place(schema, resource, pointer)
            return resource
        absolute = _join(resource.uri, uri)
        if schema is resource.root:
            resource.uri = absolute
            self.resources.setdefault(absolute, resource)
            return resource
        inner = Resource(absolute, schema, self._draft(schema, resource.draft), pointer)
        self.resources.setdefault(absolute, inner)
        self._resource_of[id(schema)] = inner
        return inner

    def _anchors(self, schema: dict[str, Any], resource: Resource, pointer: str) -> None:
        if "$anchor" in schema and "$anchor" in resource.draft.keywords:
            resource.anchors[schema["$anchor"]] = self.place(schema, resource, pointer)
        if "$dynamicAnchor" in schema and "$dynamicAnchor" in resource.draft.keywords:
            place = self.place(schema, resource, pointer)
            resource.anchors[schema["$dynamicAnchor"]] = place
            resource.dynamic[schema["$dynamicAnchor"]] = place
        if "$dynamicRef" in schema or "$recursiveRef" in schema:
            self.has_dynamic = True

    # -- places

    def place(self, schema: Any, resource: Resource, pointer: str) -> Place:
        """The place of a subschema; one with an ``$id`` belongs to the resource it opens."""
        resource = self._resource_of.get(id(schema), resource)
        key = (id(schema), id(resource))
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = Place(schema, resource, pointer)
        return place

    def resolve(self, reference: str, place: Place, keyword: str) -> Place:
        """What a reference points to."""
        where = f"{place.pointer}/{keyword}"
        uri, fragment = urldefrag(_join(place.resource.uri, reference))
        resource = self._resource(uri, where, reference)
        fragment = unquote(fragment)
        if not fragment:
            return self.place(resource.root, resource, resource.pointer)
        if not fragment.startswith("/"):
            found = resource.anchors.get(fragment)
            if found is None:
                raise InvalidRequest(where, f"={reference!r}: there is no anchor {fragment!r}")
            return found
        target = self._follow(resource, fragment, where, reference)
        if not isinstance(target.schema, dict | bool):
            raise InvalidRequest(where, f"={reference!r}: does not lead to a schema (an object or a boolean)")
        return target

    def _resource(self, uri: str, where: str, reference: str) -> Resource:
        resource = self.resources.get(uri)
        if resource is None and uri in self.registry:
            given = self.registry[uri]
            resource = self._add(uri, given, self.default or self.root.draft, uri + "#")
        if resource is None:
            raise UnsupportedConstraint(
                where, f"={reference!r}: {uri!r} is not in the registry, and nothing is fetched"
            )
        return resource

    def _follow(self, resource: Resource, fragment: str, where: str, reference: str) -> Place:
        value: Any = resource.root
        pointer = resource.pointer
        for token in fragment[1:].split("/"):
            name = token.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                raise InvalidRequest(where, f"={reference!r}: there is no {escape(name)!r} at {pointer!r}")
            pointer = f"{pointer}/{escape(name)}"
            resource = self._resource_of.get(id(value), resource) if isinstance(value, dict) else resource
        if isinstance(value, dict) and (id(value), id(resource)) not in self._places:
            check_keywords(value, resource.draft, pointer)
        return self.place(value, resource, pointer)


def _plain(uri: str) -> str:
    return uri.removesuffix("#")


def _join(base: str, reference: str) -> str:
    if reference.startswith("#"):
        return base + reference
    if base.startswith("urn:") and reference == "":
        return base
    return urljoin(base, reference) if base else reference
