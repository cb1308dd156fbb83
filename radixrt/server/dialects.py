"""Constraints in every dialect people come with: fields of a request body become at most one ``Constraint``.

Invariants: two constraints at once are refused, naming both; an error names the field of the body, not the room that found it; nothing that
constrains is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.grammar.constraint import Constraint
from radixrt.server.errors import UnknownField

Make = Callable[[Any], Constraint]

_RULE = re.compile(r"^[ \t]*[\w.-]+[ \t]*::=", re.MULTILINE)
_FORMATS = ("text", "json_object", "json_schema")
# What the makers call what they are given: in their errors, it is the body's field that is meant.
_OWN = ("regex", "json_schema", "choice", "grammar", "substring", "constraint")


@dataclass(frozen=True, slots=True)
class Asked:
    """A constraint, and the field of the body that asked for it (``response_format.json_schema.schema``, say)."""

    field: str
    constraint: Constraint


def _grammar(text: Any) -> Constraint:
    """A grammar of unknown syntax: rules written ``name ::= ...`` are EBNF, everything else is Lark."""
    return Constraint.grammar(text, "ebnf" if isinstance(text, str) and _RULE.search(text) else "lark")


def _ebnf(text: Any) -> Constraint:
    return Constraint.grammar(text, "ebnf")


def _gbnf(text: Any) -> Constraint:
    return Constraint.grammar(text, "gbnf")


def _schema(schema: Any) -> Constraint:
    if not isinstance(schema, Mapping | bool | str):
        raise InvalidRequest(
            "json_schema", f"={shown(schema)}: must be a JSON Schema: an object, true, false or its text"
        )
    return Constraint.json_schema(schema)


def _any_object(value: Any) -> Constraint:
    return Constraint.json_object()


def substring_of(value: Any) -> Constraint:
    """``substring`` of any route: a text, or an object that has one and options."""
    if isinstance(value, str):
        return Constraint.substring(value)
    if not isinstance(value, Mapping):
        raise InvalidRequest("substring", f"={shown(value)}: must be a text, or an object with the field text")
    given = object_of("substring", value, ("text", "unit", "max_length", "empty"))
    if "text" not in given:
        raise InvalidRequest("substring.text", "is missing")
    try:
        return Constraint.substring(given["text"], **{name: item for name, item in given.items() if name != "text"})
    except InvalidRequest as error:
        field = "substring.text" if error.field == "substring" else f"substring.{error.field}"
        raise InvalidRequest(field, str(error)[len(error.field) :].removeprefix(": ")) from None


# Fields at the top of a body.
FIELDS: dict[str, Make] = {
    "regex": Constraint.regex,
    "json_schema": _schema,
    "ebnf": _ebnf,
    "choice": Constraint.choice,
    "grammar": _gbnf,  # llama.cpp's
    "substring": substring_of,
    "guided_regex": Constraint.regex,
    "guided_json": _schema,
    "guided_choice": Constraint.choice,
    "guided_grammar": _grammar,
    "constraint": Constraint.from_dict,
}
# Fields of ``structured_outputs``.
_STRUCTURED: dict[str, Make] = {
    "regex": Constraint.regex,
    "json": _schema,
    "choice": Constraint.choice,
    "grammar": _grammar,
    "substring": substring_of,
    "json_object": _any_object,
}
NAMES = (*FIELDS, "structured_outputs", "response_format")


def constraint_of(body: Mapping[str, Any]) -> Asked | None:
    """The constraint that a body asks for.

    Raises:
        InvalidRequest: two of them, or one that is malformed; names the field.
    """
    asked: list[tuple[str, Make, Any]] = [
        (name, make, body[name]) for name, make in FIELDS.items() if body.get(name) is not None
    ]
    structured = body.get("structured_outputs")
    if structured is not None:
        asked += _from_structured(structured)
    format = body.get("response_format")
    if format is not None:
        asked += _from_format(format)
    if not asked:
        return None
    if len(asked) > 1:
        first, second = asked[0][0], asked[1][0]
        raise InvalidRequest(second, f" and {first} are both given: at most one constraint is taken")
    ((field, make, value),) = asked
    try:
        return Asked(field, make(value))
    except InvalidRequest as error:
        raise renamed(error, dict.fromkeys(_OWN, field)) from None


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The error with the name that the body has for the field, where it has another one."""
    head = re.split(r"[.\[]", error.field, maxsplit=1)[0]
    name = names.get(head)
    if name is None or name == head:
        return error
    return InvalidRequest(name + error.field[len(head) :], str(error)[len(error.field) :].removeprefix(": "))


def object_of(field: str, value: Any, valid: tuple[str, ...]) -> Mapping[str, Any]:
    """``value``, if it is an object of no other fields than these; those that are null are left out."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(field, f"={shown(value)}: must be an object")
    for name in value:
        if name not in valid:
            raise UnknownField(f"{field}.{shown(name).strip(chr(39))}", f"there is no such field{nearest(name, valid)}")
    return {name: item for name, item in value.items() if item is not None}


def _from_structured(value: Any) -> list[tuple[str, Make, Any]]:
    given = object_of("structured_outputs", value, tuple(_STRUCTURED))
    if "json_object" in given and not isinstance(given["json_object"], bool):
        raise InvalidRequest("structured_outputs.json_object", f"={shown(given['json_object'])}: must be true or false")
    asked = [
        (f"structured_outputs.{name}", _STRUCTURED[name], item)
        for name, item in given.items()
        if not (name == "json_object" and item is False)
    ]
    if not given:
        valid = ", ".join(_STRUCTURED)
        raise InvalidRequest("structured_outputs", f"={{}}: must hold one of {valid}")
    return asked


def _from_format(value: Any) -> list[tuple[str, Make, Any]]:
    field = "response_format"
    given = object_of(field, value, ("type", "json_schema", "schema"))
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        problem = "is missing" if kind is None else f"={shown(kind)}"
        raise InvalidRequest(f"{field}.type", f"{problem}: must be one of {', '.join(_FORMATS)}")
    for name in ("json_schema", "schema"):
        if name in given and kind != ("json_schema" if name == "json_schema" else "json_object"):
            raise InvalidRequest(f"{field}.{name}", f"has no meaning with type={kind}")
    if kind == "text":
        return []
    if kind == "json_object":  # llama.cpp's clients put a schema beside it
        if "schema" in given:
            return [(f"{field}.schema", _schema, given["schema"])]
        return [(field, _any_object, None)]
    if "json_schema" not in given:
        raise InvalidRequest(f"{field}.json_schema", "is missing")
    field = f"{field}.json_schema"
    named = object_of(field, given["json_schema"], ("name", "description", "schema", "strict"))
    for name, kind_of in (("name", str), ("description", str), ("strict", bool)):
        if name in named and not isinstance(named[name], kind_of):
            what = "a string" if kind_of is str else "true or false"
            raise InvalidRequest(f"{field}.{name}", f"={shown(named[name])}: must be {what}")
    if "schema" not in named:
        raise InvalidRequest(f"{field}.schema", "is missing")
    return [(f"{field}.schema", _schema, named["schema"])]
