"""Arguments as Python writes them, both ways: a constraint from a schema, and the JSON text of what was written.

Invariants: what the constraint allows is valid under the schema when it is read back; ``to_json`` runs no code, is linear in the text and
gives ``None`` for what is no literal. Where a part of a schema is beyond this form, its JSON text stands in the call, which is read too.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from radixrt.grammar.constraint import Constraint
from radixrt.grammar.constraint import Sequence as Parts
from radixrt.tools.definitions import Tool
from radixrt.tools.objects import is_object

_MOST_ITEMS = 8  # of a list without a longer least length
_MOST_FIRST = 12  # optional arguments that may be the first
_DEEP = 8  # levels of constraints for one argument
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly")
)
_ROOT = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"))
_PART = re.compile(
    r"""("(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|[^\W\d]\w*+\s*+=)""", re.DOTALL
)  # a string, or the name of an argument
_NO_ESCAPE = re.compile(r"""\\(?![\n\\'"abfnrtvxuUN0-7])""")  # a backslash that stays one
_SLASHES = "\ufdd0"  # is no character: stands in for two backslashes
_STRING = msgspec.json.Decoder(str)
_PLAIN = re.compile(r'[^\\"\x00-\x1f]*+')
_LAST_COMMA = re.compile(r",(?=\s*+(?:[\])}]|\Z))")
_LITERALS = (("True", "true"), ("False", "false"), ("None", "null"), ("(", "["), (")", "]"))


def python_arguments(tool: Tool) -> Constraint:
    """What stands between the parentheses of a call: keyword arguments, or ``**{...}`` where the schema needs more than these."""
    return _Literals(tool.schema).arguments()


class _Literals:
    """The constraints of one schema; ``_open``: references that are being followed."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._shared = {key: schema[key] for key in ("$defs", "definitions", "$schema") if key in schema}
        self._following: list[str] = []

    def arguments(self) -> Constraint:
        schema = self._schema
        members = self._members(schema, _ROOT)
        if members is None or not all(name.isidentifier() for name, _, _ in members) or not _local(schema):
            return _sequence("**", Constraint.json_schema(schema, whitespace="flexible"))
        return self._listed(members, lambda name: f"{name}=", "", "")

    def _members(self, schema: Mapping[str, Any], known: frozenset[str]) -> list[tuple[str, Any, bool]] | None:
        """Name, schema and whether it must be there, those first that must; ``None``: the object is more than its properties."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if (
            not schema.keys() <= known | _ANNOTATIONS
            or not isinstance(properties, Mapping)
            or not isinstance(required, list)
        ):
            return None
        if any(name not in properties for name in required):
            return None
        members = [(name, value, name in required) for name, value in properties.items() if value is not False]
        return sorted(members, key=lambda member: not member[2])

    def _listed(self, members: list[tuple[str, Any, bool]], key: Any, begin: str, end: str) -> Constraint:
        """The members, with commas between them."""
        values = [_sequence(key(name), self.value(value)) for name, value, _ in members]
        must = sum(1 for member in members if member[2])
        rest = [Constraint.alternatives("", _sequence(", ", value)) for value in values]
        closing = [end] if end else []
        opening = [begin] if begin else []
        if not members:
            return Constraint.literal(begin + end)
        if must:
            needed = [part for value in values[1:must] for part in (", ", value)]
            return _sequence(*opening, values[0], *needed, *rest[must:], *closing)
        starts = [_sequence(values[i], *rest[i + 1 :]) for i in range(min(len(values), _MOST_FIRST))]
        return _sequence(*opening, Constraint.alternatives("", *starts), *closing)

    def value(self, schema: Any) -> Constraint:
        """The literals of a schema."""
        made = self._value(schema) if isinstance(schema, Mapping) and self._words_in(schema, ()) else None
        return self._json(schema) if made is None or made.depth > _DEEP else made

    def _json(self, schema: Any) -> Constraint:
        whole = {**self._shared, **schema} if isinstance(schema, Mapping) else schema
        return Constraint.json_schema(whole, whitespace="flexible")

    def _value(self, schema: Mapping[str, Any]) -> Constraint | None:
        keys = schema.keys() - _ANNOTATIONS
        kind = schema.get("type")
        if keys and keys <= {"enum", "const", "type"} and keys & {"enum", "const"}:
            values = schema["enum"] if "enum" in keys else [schema["const"]]
            plain = all(item is None or isinstance(item, bool | str | int) for item in values)
            fits = [_python(item) for item in values if kind is None or _is(item, kind)] if plain else []
            return Constraint.choice(fits) if fits else None
        if keys == {"$ref"}:
            return self._followed(schema["$ref"])
        if keys == {"anyOf"} and isinstance(schema["anyOf"], list) and schema["anyOf"]:
            return Constraint.alternatives(*(self.value(item) for item in schema["anyOf"]))
        if isinstance(kind, list) and kind:
            return Constraint.alternatives(*(self.value(_of_type(schema, item)) for item in kind))
        if kind == "boolean" and keys == {"type"}:
            return Constraint.choice(["True", "False"])
        if kind == "null" and keys == {"type"}:
            return Constraint.literal("None")
        if kind == "array" and keys <= {"type", "items", "minItems", "maxItems"} and "items" in keys:
            return self._array(schema)
        if kind == "object" and schema.get("additionalProperties", False) is False:
            members = self._members(schema, frozenset(("type", "properties", "required", "additionalProperties")))
            if members is not None:
                return self._listed(members, lambda name: json.dumps(name) + ": ", "{", "}")
        return None

    def _array(self, schema: Mapping[str, Any]) -> Constraint | None:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(low, int) or low > 64 or (high is not None and (not isinstance(high, int) or high < low)):
            return None
        most = min(max(low, _MOST_ITEMS), _MOST_ITEMS + low if high is None else high)
        if most == 0:
            return Constraint.literal("[]")
        item = self.value(schema["items"])
        another = _sequence(", ", item)
        needed = [another] * (low - 1)
        maybe = [Constraint.alternatives("", another)] * (most - max(low, 1))
        filled = _sequence("[", item, *needed, *maybe, "]")
        return filled if low else Constraint.alternatives("[]", filled)

    def _followed(self, ref: Any) -> Constraint | None:
        target = self._target(ref)
        if target is None or ref in self._following:
            return None
        self._following.append(ref)
        made = self.value(target)
        self._following.pop()
        return made

    def _target(self, ref: Any) -> Any:
        if not isinstance(ref, str):
            return None
        for key in ("$defs", "definitions"):
            begin, _, name = ref.partition(f"#/{key}/")
            if not begin and name and not set("/~%") & set(name):
                return self._shared.get(key, {}).get(name)
        return None

    def _words_in(self, schema: Any, seen: tuple[str, ...]) -> bool:
        """Whether a value may hold true, false or null, which Python spells otherwise. (Where in doubt: yes.)"""
        if not isinstance(schema, Mapping):
            return schema is not False
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            return not isinstance(values, list) or any(
                not isinstance(item, str | int) or isinstance(item, bool) for item in values
            )
        if "$ref" in schema:
            target = self._target(schema["$ref"])
            return target is None or schema["$ref"] in seen or self._words_in(target, (*seen, schema["$ref"]))
        kind = schema.get("type")
        if kind in ("string", "number", "integer"):
            return False
        if kind == "array" and "prefixItems" not in schema:
            return self._words_in(schema.get("items", True), seen)
        if kind == "object" and schema.get("additionalProperties") is False and "patternProperties" not in schema:
            return any(self._words_in(item, seen) for item in schema.get("properties", {}).values())
        return True


def _sequence(*parts: Constraint | str) -> Constraint:
    """The parts after each other, those that are sequences opened: levels of constraints are limited."""
    flat: list[Constraint | str] = []
    for part in parts:
        if isinstance(part, Constraint) and isinstance(part.spec, Parts):
            flat += part.spec.parts
        else:
            flat.append(part)
    return Constraint.sequence(*flat)


def _local(schema: Any) -> bool:
    """Whether every reference leads into the shared definitions, so that a part of the schema can stand alone."""
    if isinstance(schema, Mapping):
        ref = schema.get("$ref", "#/$defs/")
        here = not isinstance(ref, str) or ref.startswith(("#/$defs/", "#/definitions/"))
        return here and "$id" not in schema and all(map(_local, schema.values()))
    return all(map(_local, schema)) if isinstance(schema, list) else True


def _of_type(schema: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """The schema for values of one type, without the keywords that say nothing about it."""
    if kind in ("boolean", "null"):
        return {"type": kind}
    return {**schema, "type": kind}


def _is(value: Any, kind: Any) -> bool:
    kinds = kind if isinstance(kind, list) else [kind]
    own = (
        "null"
        if value is None
        else "boolean"
        if isinstance(value, bool)
        else "string"
        if isinstance(value, str)
        else "integer"
    )
    return own in kinds or (own == "integer" and "number" in kinds)


def _python(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def to_json(text: str, most: int = 100_000) -> str | None:
    """The JSON object of keyword arguments (or of ``**{...}``) written as Python literals; ``None``: they are none, or see ``read_arguments``."""
    return read_arguments(text, most)[0]


def read_arguments(text: str, most: int) -> tuple[str | None, int]:
    """As ``to_json``, and how many strings and names were read; with more than ``most`` it is no call.

    What stands between strings and names is translated as a whole: what is no literal is no JSON then either.
    """
    body = text.strip()
    starred = body.startswith("**")
    if starred:
        body = body[2:].strip()
        if is_object(body):
            return body, 0
    if "\0" in body or most < 1:
        return None, 0
    parts = _PART.split(body, most + 1)
    between, texts = parts[::2], len(parts) // 2
    if texts > most:
        return None, most
    outside = "\0".join(between)
    if '"' in outside or "\\" in outside:  # of a string that does not end: it would be one with what is put in
        return None, texts
    for python, json_ in _LITERALS:
        outside = outside.replace(python, json_)
    parts[::2] = _LAST_COMMA.sub("", outside).split("\0")
    read = _texts_read(parts[1::2])
    if read is None:
        return None, texts
    parts[1::2] = read
    made = "".join(parts)
    made = made if starred else "{" + made + "}"
    return made if is_object(made) else None, texts


def _texts_read(texts: list[str]) -> list[str] | None:
    """Strings and names of arguments as JSON: read as JSON where they are that too, otherwise as Python, all at once."""
    hard: list[int] = []
    read: list[str] = []
    for text in texts:
        if text[-1] == "=":
            read.append(json.dumps(text[:-1].rstrip()) + ":")
        elif _PLAIN.fullmatch(text, 1, len(text) - 1):
            read.append(f'"{text[1:-1]}"')
        else:
            if text[0] == "'" or not _is_string(text):
                hard.append(len(read))
            read.append(text)
    if hard:
        written = ",".join([read[i] for i in hard]).replace("\r", "\\r").replace("\n", "\\n")
        if _SLASHES in written:
            return None
        written = _NO_ESCAPE.sub(r"\\\\", written.replace("\\\\", _SLASHES)).replace(_SLASHES, "\\\\")
        try:
            values = ast.literal_eval(f"[{written}]")
        except (SyntaxError, ValueError, MemoryError):
            return None
        for i, one in zip(hard, _dumped(values), strict=True):
            read[i] = one
    return read


def _is_string(text: str) -> bool:
    try:
        return isinstance(_STRING.decode(text), str)
    except (msgspec.DecodeError, ValueError):
        return False


def _dumped(values: list[str]) -> list[str]:
    text = json.dumps(values, ensure_ascii=False, separators=("\0", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair: stays an escape
        text = json.dumps(values, separators=("\0", ":"))
    return text[1:-1].split("\0")
