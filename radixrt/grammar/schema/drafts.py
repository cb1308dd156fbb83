"""What the drafts of JSON Schema differ in: which keywords exist, where subschemas stand, how ``$ref`` treats its siblings."""

from __future__ import annotations

from dataclasses import dataclass

from radixrt.errors import InvalidRequest, nearest

ONE = frozenset(  # keywords whose value is a schema
    "additionalProperties additionalItems contains propertyNames not if then else unevaluatedProperties unevaluatedItems items".split()
)
MANY = frozenset("allOf anyOf oneOf prefixItems items".split())  # whose value is a list of schemas
NAMED = frozenset(  # whose value maps names to schemas
    "properties patternProperties $defs definitions dependentSchemas dependencies".split()
)

_CORE = frozenset(
    "$ref type enum properties patternProperties additionalProperties required minProperties maxProperties items minItems "
    "maxItems uniqueItems minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf "
    "allOf anyOf oneOf not definitions".split()
)
_6 = _CORE | {"additionalItems", "dependencies", "const", "contains", "propertyNames", "$id"}
_7 = _6 | {"if", "then", "else"}
_2019 = (_7 - {"dependencies"}) | frozenset(
    "$anchor $defs $recursiveRef $recursiveAnchor dependentRequired dependentSchemas minContains maxContains unevaluatedItems "
    "unevaluatedProperties".split()
)
_2020 = (_2019 - {"additionalItems", "$recursiveRef", "$recursiveAnchor"}) | {
    "prefixItems",
    "$dynamicRef",
    "$dynamicAnchor",
}


@dataclass(frozen=True)
class Draft:
    """One draft. ``mixed`` is for schemas that name none: the newest draft, with the older drafts' keywords understood too."""

    name: str
    keywords: frozenset[str]
    id_keyword: str = "$id"
    ref_alone: bool = False  # siblings of $ref are ignored
    fragment_ids: bool = False  # "$id": "#name" is an anchor
    list_items: bool = True  # items may be a list
    boolean_exclusive: bool = False  # exclusiveMinimum may be a boolean
    integral_floats: bool = True  # 1.0 is an integer
    contains_evaluates: bool = False  # what contains matched counts as evaluated
    dynamic_needs_anchor: bool = True
    boolean_schemas: bool = True

    def __hash__(self) -> int:
        return hash(self.name)


DRAFTS: dict[str, Draft] = {
    "4": Draft(
        "4",
        _CORE | {"additionalItems", "dependencies", "id"},
        "id",
        ref_alone=True,
        fragment_ids=True,
        boolean_exclusive=True,
        integral_floats=False,
    ),
    "6": Draft("6", _6, ref_alone=True, fragment_ids=True),
    "7": Draft("7", _7, ref_alone=True, fragment_ids=True),
    "2019-09": Draft("2019-09", _2019),
    "2020-12": Draft("2020-12", _2020, list_items=False, contains_evaluates=True),
    "mixed": Draft("mixed", _2020 | _2019 | _7, boolean_exclusive=True, contains_evaluates=True),
}


def draft_named(name: str) -> Draft:
    """The draft a caller asks for: ``4``, ``6``, ``7``, ``2019-09`` or ``2020-12``."""
    key = name.lower().removeprefix("draft").strip("-_ 0") if name.lower().startswith("draft") else name
    key = {"2019": "2019-09", "2019-9": "2019-09", "202": "2020-12", "2020": "2020-12"}.get(key, key)
    if key not in DRAFTS or key == "mixed":
        raise InvalidRequest("draft", f"={name!r}: no such draft of JSON Schema{nearest(key, set(DRAFTS) - {'mixed'})}")
    return DRAFTS[key]


def draft_of_uri(uri: str) -> Draft | None:
    """The draft a ``$schema`` names, or ``None`` for one we do not know."""
    for part, name in (
        ("draft-04", "4"),
        ("draft-06", "6"),
        ("draft-07", "7"),
        ("2019-09", "2019-09"),
        ("2020-12", "2020-12"),
    ):
        if "json-schema.org/" in uri and part in uri:
            return DRAFTS[name]
    return None
