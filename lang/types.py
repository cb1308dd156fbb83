"""Python types as constraints on a generation, and the way back from its text to a value.

What is clearest as bare text is generated so: whole numbers, decimal numbers, ``true`` / ``false``, and the strings of
a Literal or Enum. Everything else is compact JSON, ``str`` included, whose quotes say where it ends.

Invariants: a type that leaves any part open (``Any``, a bare ``list``, a callable) is refused here, not when its value
is read; nothing is dropped silently from a type; a text that the constraint lets through is refused by ``parse`` only
for what no schema says (an author's validators, a number out of a machine type's range), and then as a
``TypeMismatch``.
"""

from __future__ import annotations

import json
import math
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType, UnionType
from typing import Any, ClassVar, cast

import typing_extensions
from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, JsonSchemaWarningKind

from radixrt import Constraint, InvalidRequest
from radixrt.errors import shown

DIGITS = 18  # of a whole number with no bound of its own, and on each side of a decimal point: the text must end
_LISTED = 1_000  # multiples that are written out rather than described


class TypeMismatch(ValueError):
    """A text that is no value of the type: cut short, or refused by the type's own validators.

    Fields:
        text: what was generated. type_name: the type it should be. problem: what pydantic says.
    """

    def __init__(self, text: str, type_name: str, problem: str) -> None:
        super().__init__(f"{shown(text, 200)} is no {type_name}: {problem}")
        self.text, self.type_name, self.problem = text, type_name, problem

    def __reduce__(self) -> tuple[type[TypeMismatch], tuple[str, str, str]]:
        return type(self), (self.text, self.type_name, self.problem)


@dataclass(frozen=True, slots=True)
class TypeSpec:
    """What ``gen(type=...)`` needs to know of a type. Made by ``spec_of``.

    Fields:
        type_name: the type as a message names it. constraint: the texts it allows.
        text: a value is bare text (``yes``), not JSON (``"yes"``).
    """

    type_name: str
    constraint: Constraint
    text: bool
    _adapter: TypeAdapter[Any] = field(repr=False, compare=False)
    _to_json: Callable[[str], str] = field(repr=False, compare=False)

    def parse(self, text: str) -> Any:
        """The value of a generated text.

        Raises:
            TypeMismatch: no value of the type: a text cut short, or one that a validator refuses.
        """
        try:
            return self._adapter.validate_json(self._to_json(text))
        except ValidationError as error:
            raise TypeMismatch(text, self.type_name, _problems(error)) from error
        except Exception as error:  # a validator that raises something else than pydantic asks for
            raise TypeMismatch(text, self.type_name, f"{type(error).__name__}: {error}") from error

    def write(self, value: Any) -> str:
        """The text of a value, as the constraint has it: what ``parse`` reads back. A TypedDict is written in its own
        key order.

        Raises:
            TypeMismatch: not a value that the type can write.
        """
        try:
            written = self._adapter.dump_json(value, by_alias=True, warnings="error").decode()
            if not self.text:
                return written
            plain = json.loads(written, parse_float=Decimal)
        except Exception as error:
            raise TypeMismatch(shown(value), self.type_name, str(error).splitlines()[0]) from error
        return written if isinstance(plain, bool) else f"{plain:f}" if isinstance(plain, Decimal) else str(plain)


def spec_of(type_: Any) -> TypeSpec:
    """The constraint of a type and the parser of its values; kept for types that can be hashed.

    Takes what pydantic takes: models, dataclasses, TypedDicts, NamedTuples, ``Literal``, ``Enum``, ``int``, ``float``,
    ``bool``, ``str``, ``list[...]``, ``set[...]``, ``tuple[...]``, ``dict[str, ...]``, unions, dates and times,
    ``UUID``, ``Decimal``, ``Annotated`` with ``Field(...)``. Bounds, lengths, patterns and formats are part of the
    constraint; objects hold the fields they declare and no others, unless a model says ``extra="allow"``.

    Raises:
        InvalidRequest: field ``type``: no type, or one with a part that no text describes; the message names the part.
    """
    try:
        hash(type_)
    except TypeError:
        return _spec(type_)
    return _kept(type_)


_FUNCTIONS = FunctionType | BuiltinFunctionType | MethodType


@lru_cache(maxsize=256)
def _kept(type_: Any) -> TypeSpec:
    return _spec(type_)


def _spec(type_: Any) -> TypeSpec:
    name = _name(type_)
    if type_ is None or isinstance(type_, str | int | float | Mapping | list | tuple | Enum | _FUNCTIONS):
        wanted = "must be a type, such as int, list[str] or a pydantic model"
        raise InvalidRequest("type", f"={shown(type_)}: {wanted}, not a value of type {type(type_).__name__}")
    adapter, schema = _described(name, type_)
    bare = _bare(name, schema)
    if bare is not None:
        constraint, to_json = bare
        return TypeSpec(name, constraint, True, adapter, to_json)
    return TypeSpec(name, Constraint.json_schema(schema), False, adapter, str)


def schema_of(type_: Any) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    """pydantic's adapter of a type and its JSON Schema, as narrow as what pydantic reads; raises what ``spec_of`` raises."""
    return _described(_name(type_), type_)


def _described(name: str, type_: Any) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(_readable(type_))
        schema = adapter.json_schema(schema_generator=_SchemaWriter, mode="validation")
    except Exception as error:
        reason = str(error).split("\n")[0].split(". Set `arbitrary_types_allowed")[0].rstrip(".")
        wanted = "use a model, dataclass, TypedDict, Literal, Enum, int, float, bool, str, list[...] or dict[str, ...]"
        raise InvalidRequest("type", f"={name}: {reason}; {wanted}") from error
    for where, problem in _open_parts(schema, schema.get("$defs", {}), "", set()):
        part = f"its part {where}" if where else "it"
        raise InvalidRequest("type", f"={name}: {part} {problem}")
    _versioned_uuids(schema)
    return adapter, schema


def _readable(type_: Any, above: tuple[Any, ...] = ()) -> Any:
    """The type with ``typing.TypedDict`` made anew as that of ``typing_extensions``, the only one pydantic reads before
    Python 3.12.
    """
    if sys.version_info >= (3, 12) or type_ in above:
        return type_
    if typing.is_typeddict(type_) and type(type_).__module__ == "typing":
        fields: dict[str, Any] = {}
        for name, hint in typing.get_type_hints(type_, include_extras=True).items():
            wrap: Any = typing.Required if name in type_.__required_keys__ else typing.NotRequired
            while typing.get_origin(hint) in (
                typing.Required,
                typing.NotRequired,
            ):  # said by the field itself: that counts
                wrap, hint = typing.get_origin(hint), typing.get_args(hint)[0]
            fields[name] = wrap[_readable(hint, (*above, type_))]
        made: Any = typing_extensions.TypedDict
        return made(type_.__name__, fields)
    origin, args = typing.get_origin(type_), typing.get_args(type_)
    if not args or origin in (typing.Literal, Callable):
        return type_
    if origin is typing.Annotated:
        origin, changed = typing.Annotated, (_readable(args[0], above), *args[1:])
    else:
        changed = tuple(_readable(arg, above) for arg in args)
    if all(new is old for new, old in zip(changed, args)):
        return type_
    return typing.Union[changed] if origin in (typing.Union, UnionType) else origin[changed]  # noqa: UP007


# ---- bare text

_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$defs", "$comment"}
)
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})


def _bare(name: str, schema: Mapping[str, Any]) -> tuple[Constraint, Callable[[str], str]] | None:
    """The constraint of a type whose values are bare text, and how such a text becomes JSON; ``None``: it is not one of
    these.
    """
    ref = schema.get("$ref", "")
    if ref.startswith("#/$defs/"):
        schema = schema["$defs"].get(ref.removeprefix("#/$defs/"), {})
    said = set(schema) - _NOTES
    if said <= {"enum", "const", "type"} and said & {"enum", "const"}:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if values and all(isinstance(value, str) for value in values):
            return Constraint.choice(values), json.dumps
        if values and all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            return Constraint.choice([str(value) for value in values]), str
        return None
    kind = schema.get("type")
    if kind == "boolean" and said == {"type"}:
        return Constraint.choice(["true", "false"]), str.lower
    if kind not in ("integer", "number") or not said <= _BOUNDS | {"type"}:
        return None
    if kind == "integer":
        return _whole(name, schema), str
    if said == {"type"}:
        return Constraint.regex(_DECIMAL), str
    return Constraint.json_schema({key: schema[key] for key in said}), str


_DECIMAL = rf"-?(?:0|[1-9][0-9]{{0,{DIGITS - 1}}})(?:\.[0-9]{{1,{DIGITS}}})?"


def _whole(name: str, schema: Mapping[str, Any]) -> Constraint:
    """The whole numbers between the schema's bounds, as digits: no ``-0``, no ``1.0``."""
    lows = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    highs = [math.floor(schema["maximum"])] if "maximum" in schema else []
    if "exclusiveMinimum" in schema:
        lows.append(math.floor(schema["exclusiveMinimum"]) + 1)
    if "exclusiveMaximum" in schema:
        highs.append(math.ceil(schema["exclusiveMaximum"]) - 1)
    widest = 10 ** max([DIGITS, *(len(str(abs(bound))) + 3 for bound in lows + highs)]) - 1
    low, high = max(lows, default=-widest), min(highs, default=widest)
    step = schema.get("multipleOf", 1)
    if isinstance(step, int) and step > 1:
        low, high = -(-low // step) * step, high // step * step
    if low > high:
        raise InvalidRequest("type", f"={name}: no whole number is within these bounds")
    if step == 1:
        return Constraint.regex(whole_numbers(low, high))
    if isinstance(step, int) and (high - low) // step < _LISTED:
        return Constraint.choice([str(value) for value in range(low, high + 1, step)])
    return Constraint.json_schema({key: value for key, value in schema.items() if key not in _NOTES})


def whole_numbers(low: int, high: int) -> str:
    """A regex of the whole numbers from ``low`` to ``high`` as plain digits."""
    parts = []
    if low < 0:
        parts.append(f"-(?:{_positive(max(1, -high), -low)})")
    if high >= 0:
        parts.append(_positive(max(0, low), high))
    return "|".join(parts)


def _positive(low: int, high: int) -> str:
    """One part for each number of digits; neighbours of which every number is in are one."""
    parts: list[str] = []
    full: list[int] = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        least, most = 10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1
        if digits > 1 and low <= least and high >= most:
            full.append(digits - 1)
        else:
            parts.append(_same_length(str(max(low, least)), str(min(high, most))))
    if full:
        parts.append(f"[1-9][0-9]{{{full[0]},{full[-1]}}}")
    return "|".join(parts)


def _same_length(low: str, high: str) -> str:
    """The digit strings between two of one length: those that begin as ``low`` does, those between, those that begin as
    ``high``.
    """
    if not low:
        return ""
    rest = len(low) - 1
    if low[0] == high[0]:
        return low[0] + _grouped(_same_length(low[1:], high[1:]))
    first, last = int(low[0]), int(high[0])
    parts = []
    if low[1:].strip("0"):
        parts.append(low[0] + _grouped(_same_length(low[1:], "9" * rest)))
        first += 1
    if high[1:].strip("9"):
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + ("[0-9]" if rest == 1 else f"[0-9]{{{rest}}}" if rest else ""))
    if high[1:].strip("9"):
        parts.append(high[0] + _grouped(_same_length("0" * rest, high[1:])))
    return "|".join(parts)


def _grouped(pattern: str) -> str:
    return f"(?:{pattern})" if "|" in pattern else pattern


# ---- JSON

_NO_TEXT = "x-no-text"  # what stands in a schema for a part that has none

# Python's calendar: years 0001 to 9999, no leap seconds, microseconds.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    f"|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_ZONE = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_ZONES = {None: f"{_ZONE}?", "aware": _ZONE, "naive": ""}
_SECONDS = r"[0-9]{1,4}(?:\.[0-9]{1,6})?S"
_MINUTES = f"(?:[0-9]{{1,4}}M(?:{_SECONDS})?|{_SECONDS})"
_HOURS = f"T(?:[0-9]{{1,4}}H{_MINUTES}?|{_MINUTES})"
_DURATION = f"-?P(?:(?:[0-9]{{1,6}}Y(?:[0-9]{{1,8}}D)?|[0-9]{{1,8}}D)(?:{_HOURS})?|{_HOURS})"


class _SchemaWriter(GenerateJsonSchema):
    """pydantic's schemas, made as narrow as the values that pydantic reads from JSON."""

    ignored_warning_kinds: ClassVar[set[JsonSchemaWarningKind]] = {  # type: ignore[misc]
        "skipped-choice",
        "non-serializable-default",
    }

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        if "Callable" in error_info:
            return {_NO_TEXT: "a callable"}
        found = re.search(r"\((<class '(.+?)'>)\)", error_info)
        return {_NO_TEXT: f"of class {found[2]}" if found else "read by code alone (a plain validator)"}

    def complex_schema(self, schema: Any) -> JsonSchemaValue:
        return {_NO_TEXT: "a complex number"}

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        return _closed(super().model_schema(schema))

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        return _closed(super().dataclass_schema(schema))

    def typed_dict_schema(self, schema: Any) -> JsonSchemaValue:
        return _closed(super().typed_dict_schema(schema))

    def set_schema(self, schema: Any) -> JsonSchemaValue:
        return _unordered(super().set_schema(schema))

    def frozenset_schema(self, schema: Any) -> JsonSchemaValue:
        return _unordered(super().frozenset_schema(schema))

    def dict_schema(self, schema: Any) -> JsonSchemaValue:
        made = super().dict_schema(schema)
        keys = self.generate_inner(schema["keys_schema"]) if "keys_schema" in schema else {}
        if keys.get("type") in (
            "integer",
            "number",
            "boolean",
        ):  # a key is always a string: one that reads as such a value
            if _BOUNDS & set(keys) - {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}:
                return {_NO_TEXT: "a dict whose keys are multiples of a number"}
            pattern = {"number": _DECIMAL, "boolean": "true|false"}.get(keys["type"]) or cast(
                Any, _whole("dict", {**keys, "multipleOf": 1}).spec
            ).pattern
            made["propertyNames"] = {"type": "string", "pattern": f"^(?:{pattern})$"}
        elif keys.get("type") in ("array", "object", "null") or _NO_TEXT in keys:
            return {_NO_TEXT: "a dict whose keys are no strings"}
        return made

    def date_schema(self, schema: Any) -> JsonSchemaValue:
        return {"type": "string", "pattern": f"^{_DATE}$"}

    def time_schema(self, schema: Any) -> JsonSchemaValue:
        return {"type": "string", "pattern": f"^{_CLOCK}{_zone(schema)}$"}

    def datetime_schema(self, schema: Any) -> JsonSchemaValue:
        return {"type": "string", "pattern": f"^{_DATE}T{_CLOCK}{_zone(schema)}$"}

    def timedelta_schema(self, schema: Any) -> JsonSchemaValue:
        made = super().timedelta_schema(schema)
        return {"type": "string", "pattern": f"^{_DURATION}$"} if made.get("type") == "string" else made

    def decimal_schema(self, schema: Any) -> JsonSchemaValue:
        """pydantic reads a JSON number as a double: numbers are kept to 15 digits, which that holds exactly; strings
        may have more.
        """
        number: JsonSchemaValue = {"type": "number"}
        asked = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}
        for key, keyword in {**asked, "multiple_of": "multipleOf"}.items():
            bound = cast(Any, schema).get(key)
            if bound is not None:
                number[keyword] = int(bound) if bound == int(bound) else float(bound)
        digits, places = schema.get("max_digits"), schema.get("decimal_places")
        if len(number) == 1:
            text: JsonSchemaValue = {"type": "string", "pattern": f"^(?:{_decimals(digits, places)})$"}
            plain = {"type": "number", "multipleOf": 1e-6, "exclusiveMinimum": -1e9, "exclusiveMaximum": 1e9}
            return text if digits is not None or places is not None else {"anyOf": [plain, text]}
        if places is not None and "multipleOf" not in number:
            number["multipleOf"] = 10.0**-places if places else 1
        if digits is not None:  # what is larger has too many digits before the point
            most = 10 ** (digits - (places or 0))
            lower = {"type": "number", "exclusiveMinimum": -most, "exclusiveMaximum": most}
            return {"allOf": [number, lower]}
        return number


def _zone(schema: Any) -> str:
    return _ZONES.get(schema.get("tz_constraint"), _ZONE)


def _decimals(digits: int | None, places: int | None) -> str:
    """A regex of decimals with so many digits in all (a lone 0 before the point is none) and behind the point."""
    if digits is None:
        behind = "" if places == 0 else rf"(?:\.[0-9]{{1,{places or DIGITS}}})?"
        return f"-?(?:0|[1-9][0-9]{{0,{DIGITS - 1}}}){behind}"
    parts = []
    for before in range(digits - (places or 0) + 1):
        after = digits - before if places is None else places
        whole = "0" if before == 0 else f"[1-9][0-9]{{{before - 1}}}"
        parts.append(whole + (rf"(?:\.[0-9]{{1,{after}}})?" if after else ""))
    return f"-?(?:{'|'.join(parts)})"


def _closed(schema: JsonSchemaValue) -> JsonSchemaValue:
    """The fields that are declared and no others, where the type says nothing else."""
    if schema.get("type") == "object" and "properties" in schema:
        schema.setdefault("additionalProperties", False)
    return schema


def _unordered(schema: JsonSchemaValue) -> JsonSchemaValue:
    """Items that come twice are one in the set; only where a length is asked for must they differ in the text."""
    if schema.get("minItems", 0) < 2:
        schema.pop("uniqueItems", None)
    return schema


def _open_parts(schema: Any, defs: Mapping[str, Any], where: str, seen: set[str]) -> Iterator[tuple[str, str]]:
    """The parts of a schema that no text describes or that may be anything, as ``(where, what is wrong)``."""
    anything = "may be anything, and no constraint says so; give it a type, such as str, list[str] or a model"
    if isinstance(schema, bool):
        if schema:
            yield where, anything
        return
    if _NO_TEXT in schema:
        yield (
            where,
            f"is {schema[_NO_TEXT]}, which no text describes; use str, a number, list[...], a model or leave it out",
        )
        return
    ref = schema.get("$ref")
    if ref is not None and ref not in seen:
        seen.add(ref)  # once is enough: whether a part is open does not depend on where it is used
        yield from _open_parts(defs.get(ref.removeprefix("#/$defs/"), {}), defs, where, seen)
    if not set(schema) - _NOTES:
        yield where, anything
    if schema.get("type") == "array" and not {"items", "prefixItems"} & set(schema):
        yield f"{where}[]", anything
    if schema.get("type") == "object":
        extra = schema.get("additionalProperties", not {"properties", "patternProperties"} & set(schema))
        if isinstance(extra, dict) or (extra and "properties" not in schema):
            yield from _open_parts(extra, defs, f"{where}[key]", seen)
    for name, part in schema.get("properties", {}).items():
        yield from _open_parts(part, defs, f"{where}.{name}".lstrip("."), seen)
    for part in schema.get("patternProperties", {}).values():
        yield from _open_parts(part, defs, f"{where}[key]", seen)
    if isinstance(schema.get("items"), dict | bool) and "prefixItems" not in schema:
        yield from _open_parts(schema["items"], defs, f"{where}[]", seen)
    for i, part in enumerate(schema.get("prefixItems", [])):
        yield from _open_parts(part, defs, f"{where}[{i}]", seen)
    for keyword in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(keyword, []):
            yield from _open_parts(part, defs, where, seen)


def _versioned_uuids(schema: Any) -> None:
    """``uuid4`` and its like are no formats of JSON Schema: say them as a pattern."""
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        elif isinstance(part, dict):
            said = part.get("format") if part.get("type") == "string" else None
            found = re.fullmatch("uuid([1-8])", said) if isinstance(said, str) else None
            if found:
                part["format"], part["pattern"] = "uuid", f"^.{{14}}{found[1]}.{{4}}[89abAB]"
            stack += part.values()


def _problems(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    texts = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" if each["loc"] else each["msg"] for each in found[:5]]
    return "; ".join(texts) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")


def _name(type_: Any) -> str:
    return type_.__name__ if isinstance(type_, type) and not hasattr(type_, "__args__") else shown(type_)
