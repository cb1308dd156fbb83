"""What is extracted: a JSON Schema, a pydantic type, a regex or choices, as the constraint on an answer and back to its value.

Invariants: what cannot be enforced is refused when the target is made, by its path in the schema, before any model is
loaded; an object that declares its fields and says nothing of others holds those alone, so that an answer ends; every
value that ``schema`` takes, the schema that was given takes too.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.grammar.compile import to_grammar
from radixrt.grammar.constraint import DEFAULT_LIMITS, Constraint, JsonSchema
from radixrt.grammar.json_text import read_json

_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})
_MAX_ANSWER = 2**26  # characters of an answer: far more than any context holds
_MAX_ERROR = 600  # characters of what a validator says


@dataclass(frozen=True, slots=True)
class Target:
    """What the answer for each document is. Made by ``load_target``.

    Fields:
        constraint: the texts it allows. schema: the JSON Schema of the values, for the prompt; ``None`` for a regex or choices, whose value is the text.
        name: for a person. digest: the same for the same texts in another process; validators are code, and no part of it.
        flat: a row of a table can hold a value: an object of scalars, by ``fields``, or a lone scalar, with no fields.
        fields: the names an object declares, in order.
    """

    constraint: Constraint
    schema: dict[str, Any] | None
    name: str
    digest: str
    flat: bool
    fields: tuple[str, ...]
    _adapter: TypeAdapter[Any] | None = field(default=None, repr=False, compare=False)

    def parse(self, text: str) -> Any:
        """The value of an answer: of JSON, or the text itself.

        Raises:
            InvalidRequest: field ``answer``: not JSON (cut short, a key twice, nested too deeply), or nothing that a row
                of JSON in UTF-8 can hold (half a surrogate pair, a number beyond every float).
        """
        value = text
        if self.schema is not None:
            value = read_json("answer", text, max_bytes=_MAX_ANSWER, max_nesting=DEFAULT_LIMITS.nesting)
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            half = f"U+{ord(error.object[error.start]):04X}"
            raise InvalidRequest("answer", f"is not Unicode text: it has the lone surrogate {half}") from None
        except ValueError:
            raise InvalidRequest("answer", "has a number that is too large") from None
        return value

    def check(self, value: Any) -> str | None:
        """What the validators of a pydantic type, which no schema tells, have against a value; ``None``: nothing."""
        if self._adapter is None:
            return None
        try:
            self._adapter.validate_json(json.dumps(value))
        except ValidationError as error:
            return _problems(error)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a validator that raises something else than pydantic asks for, or leaves
            return _short(f"{type(error).__name__}: {_said(error)}")
        return None


def load_target(schema: Any = None, regex: str | None = None, choices: Iterable[str] | None = None) -> Target:
    """The target of a job; exactly one of the three is given.

    Args:
        schema: a JSON Schema as a dict, a JSON text or the path of a file; a pydantic model (or any type that pydantic
            reads) as such or as ``"package.module:Model"``, looked for in the current folder too.
        regex: the answer matches it as a whole. choices: the answer is one of these.

    Raises:
        InvalidRequest: none or several are given, nothing is found there, or it is no schema; the message has the path.
        UnsupportedConstraint: a keyword that cannot be enforced exactly; the message has its path in the schema.
    """
    given = {"schema": schema, "regex": regex, "choices": choices}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        found = " and ".join(named) or "none"
        raise InvalidRequest("schema", f": give exactly one of schema, regex and choices; {found} is given")
    if regex is not None:
        return _bare("regex", partial(Constraint.regex, regex))
    if choices is not None:
        return _bare("choices", partial(Constraint.choice, choices))
    if isinstance(schema, os.PathLike):
        return _of_file(Path(schema))
    if isinstance(schema, str):
        return _of_text(schema)
    if isinstance(schema, Mapping):
        return _of_schema(schema, "", _title(schema, "object"))
    if isinstance(schema, bool | int | float | list | tuple):
        wanted = "a JSON Schema, a path, or a pydantic model"
        raise InvalidRequest("schema", f"={shown(schema)}: must be {wanted}, not {type(schema).__name__}")
    return _of_type(schema, "")


def _bare(name: str, make: Any) -> Target:
    try:
        constraint = make()
        to_grammar(constraint)
    except InvalidRequest as error:
        raise _from(error, name, "") from None
    return Target(constraint, None, name, _digest(constraint, name), True, ())


def _of_text(text: str) -> Target:
    """A schema named by a string: JSON, a file, or a type in a module."""
    if text.lstrip().startswith("{"):
        schema = _json(text, "")
        return _of_schema(text, "", _title(schema, "object"))
    if ":" in text and not os.path.exists(text):
        return _of_type(_imported(text), f"={shown(text)}")
    return _of_file(Path(text))


def _of_file(path: Path) -> Target:
    source = f"={shown(str(path))}"
    most = 4 * DEFAULT_LIMITS.schema
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        hint = "" if os.path.splitext(path)[1] else "; a type is named as package.module:Model"
        raise InvalidRequest("schema", f"{source}: {reason}{hint}") from None
    if len(data) > most:
        raise InvalidRequest("schema", f"{source}: is larger than {most:,} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest("schema", f"{source}: is not UTF-8 (byte {error.start})") from None
    return _of_schema(text, source, _title(_json(text, source), path.stem))


def _json(text: str, source: str) -> Any:
    try:
        value = read_json("schema", text, max_bytes=DEFAULT_LIMITS.schema, max_nesting=DEFAULT_LIMITS.nesting)
    except InvalidRequest as error:
        raise _from(error, "schema", source) from None
    if not isinstance(value, dict):
        raise InvalidRequest("schema", f"{source}: must be a JSON object, not {type(value).__name__}")
    return value


def _imported(name: str) -> Any:
    """What ``package.module:Model`` names; the current folder is searched first."""
    source = f"={shown(name)}"
    module_name, _, path = name.partition(":")
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", name) or module_name.endswith(".py"):
        raise InvalidRequest("schema", f"{source}: is neither a file nor a type named as package.module:Model")
    try:
        with _searched_first(os.getcwd()):
            found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            problem = f"there is no module {error.name!r}, neither installed nor in the current folder"
            raise InvalidRequest("schema", f"{source}: {problem}") from None
        raise InvalidRequest("schema", f"{source}: the module cannot be imported: {error}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {shown(str(error), 200)}"
        raise InvalidRequest("schema", f"{source}: the module cannot be imported: {reason}") from error
    for part in path.split("."):
        names = [each for each, value in vars(found).items() if isinstance(value, type)]
        found = getattr(found, part, None)
        if found is None:
            raise InvalidRequest("schema", f"{source}: {module_name} has no {path}{nearest(part, names)}")
    return found


@contextlib.contextmanager
def _searched_first(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module took it away itself
            sys.path.remove(folder)


def _of_type(type_: Any, source: str) -> Target:
    if not isinstance(type_, type) and hasattr(type_, "model_json_schema"):
        raise InvalidRequest("schema", f"{source}: must be the model, not an instance of {type(type_).__name__}")
    name = type_.__name__ if isinstance(type_, type) else shown(type_)
    if isinstance(type_, FunctionType | BuiltinFunctionType | MethodType):
        raise InvalidRequest("schema", f"{source or '=' + name}: is a function, not a type")
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(type_)
        schema = adapter.json_schema(schema_generator=_SchemaWriter, mode="validation")
    except Exception as error:
        reason = str(error).split("\n")[0].split(". Set `arbitrary_types_allowed")[0].rstrip(".")
        raise InvalidRequest("schema", f"{source or '=' + name}: is no type with a JSON Schema: {reason}") from error
    return _of_schema(schema, source, name, adapter)


def _of_schema(
    given: Mapping[str, Any] | str, source: str, name: str, adapter: TypeAdapter[Any] | None = None
) -> Target:
    """The target of a schema, with its objects closed where that leaves anything, and its numbers finite."""
    try:
        constraint = Constraint.json_schema(given)
        schema = _schema_of(constraint)
        narrow = closed(schema)
        if narrow is not None:
            try:
                constraint = _enforced(Constraint.json_schema(finite(narrow)))
                schema = narrow
            except InvalidRequest:
                narrow = None
        if narrow is None:
            _enforced(constraint)
    except InvalidRequest as error:
        raise _from(error, "schema", source) from None
    flat, fields = _table(schema)
    return Target(constraint, schema, name, _digest(constraint, name if adapter else ""), flat, fields, adapter)


def _enforced(constraint: Constraint) -> Constraint:
    to_grammar(constraint)
    return constraint


def _schema_of(constraint: Constraint) -> dict[str, Any]:
    assert isinstance(constraint.spec, JsonSchema)
    return json.loads(constraint.spec.schema)


def _from(error: InvalidRequest, name: str, source: str) -> InvalidRequest:
    """The error by the argument and the file that the person gave, with the path in the schema that it has."""
    message = str(error)
    if error.field in (name, "json_schema", "choice", "pattern"):
        message = message[len(error.field) :].removeprefix(":").strip()
        joined = f"{source}: {message}" if source or not message.startswith("=") else message
    else:
        joined = f"{source}: {message}"
    return type(error)(name, joined)


def _title(schema: Any, otherwise: str) -> str:
    title = schema.get("title") if isinstance(schema, Mapping) else None
    return title if isinstance(title, str) and title.strip() else otherwise


def _digest(constraint: Constraint, name: str) -> str:
    content = json.dumps([name, constraint.to_dict()], separators=(",", ":"))
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _problems(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    texts = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" if each["loc"] else each["msg"] for each in found[:5]]
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    return _short("; ".join(texts)) + more


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # its own words are broken too
        return "it cannot be shown"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_ERROR else text[: _MAX_ERROR - 3] + "..."


# ---- schemas


class _SchemaWriter(GenerateJsonSchema):
    """pydantic's schemas without the titles it makes of names, with closed objects, and without what only ``check``
    can tell: that a decimal has so many digits, that the members of a set differ.
    """

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        return _close(super().model_schema(schema))

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        return _close(super().dataclass_schema(schema))

    def typed_dict_schema(self, schema: Any) -> JsonSchemaValue:
        return _close(super().typed_dict_schema(schema))

    def set_schema(self, schema: Any) -> JsonSchemaValue:
        return _without(super().set_schema(schema), "uniqueItems")

    def frozenset_schema(self, schema: Any) -> JsonSchemaValue:
        return _without(super().frozenset_schema(schema), "uniqueItems")

    def url_schema(self, schema: Any) -> JsonSchemaValue:
        return {"type": "string", "format": "uri"}

    def decimal_schema(self, schema: Any) -> JsonSchemaValue:
        bounds = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}
        given = {keyword: schema[key] for key, keyword in bounds.items() if schema.get(key) is not None}
        exact = {word: int(value) if value == int(value) else float(value) for word, value in given.items()}
        return {"type": "number", **exact}


def _without(schema: JsonSchemaValue, keyword: str) -> JsonSchemaValue:
    schema.pop(keyword, None)
    return schema


def _close(schema: JsonSchemaValue) -> JsonSchemaValue:
    if schema.get("type") == "object" and "properties" in schema:
        schema.setdefault("additionalProperties", False)
    return schema


# Beside these, what one schema allows is not all that counts: a narrower one might leave nothing, or allow more.
_TOGETHER = frozenset(
    "allOf oneOf not if contains dependentSchemas dependencies patternProperties unevaluatedProperties"
    " unevaluatedItems $dynamicRef $recursiveRef extends disallow".split()
)
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems")


def closed(schema: dict[str, Any]) -> dict[str, Any] | None:
    """The schema with every object that has ``properties`` and says nothing of other keys closed to them; ``None``
    where that is not surely a narrower schema with values.
    """
    copy = json.loads(json.dumps(schema))
    for part in _parts(copy):
        if _TOGETHER & set(part) or ("properties" in part and {"$ref", "anyOf"} & set(part)):
            return None
        names = part.get("properties")
        if isinstance(names, dict) and "additionalProperties" not in part:
            required = part.get("required", [])
            if isinstance(required, list) and all(name in names for name in required):
                part["additionalProperties"] = False
    return copy


def finite(schema: dict[str, Any]) -> dict[str, Any]:
    """A closed schema whose numbers are bounded by what a float holds: a model that loses itself in an exponent would write a number that
    no row can have. It is no part of what the prompt shows."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for part in _parts(copy):
        kinds = part.get("type")
        if kinds == "number" or (isinstance(kinds, list) and "number" in kinds):
            if not {"maximum", "exclusiveMaximum"} & set(part):
                part["maximum"] = sys.float_info.max
            if not {"minimum", "exclusiveMinimum"} & set(part):
                part["minimum"] = -sys.float_info.max
    return copy


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas inside a schema, itself first."""
    stack: list[Any] = [schema]
    while stack:
        part = stack.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for keyword in _MAPS:
            inner = part.get(keyword)
            stack += inner.values() if isinstance(inner, dict) else ()
        for keyword in (*_LISTS, *_SINGLE):
            inner = part.get(keyword)
            stack += inner if isinstance(inner, list) else [inner]


def resolved(schema: Any, root: Any) -> Any:
    """A schema with its ``$ref`` followed, for as long as that is one inside ``root``."""
    for _ in range(100):
        ref = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(ref, str) or not ref.startswith("#"):
            break
        found = root
        for step in ref[1:].split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, dict) else None
        if not isinstance(found, dict | bool):
            break
        schema = found
    return schema


def _table(schema: dict[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Whether a row of a table can hold a value, and the columns."""
    top = resolved(schema, schema)
    if _scalar(top, schema):
        return True, ()
    names = top.get("properties") if isinstance(top, dict) else None
    if not isinstance(names, dict):
        return False, ()
    alone = top.get("additionalProperties") is False and top.get("type") == "object"
    return alone and all(_scalar(each, schema) for each in names.values()), tuple(names)


def _scalar(schema: Any, root: Any, depth: int = 0) -> bool:
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or depth > 20:
        return False
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return not any(isinstance(value, dict | list) for value in values)
    types = schema.get("type")
    if types is not None:
        return set([types] if isinstance(types, str) else types) <= _SCALARS
    branches = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or ()
    return bool(branches) and all(_scalar(branch, root, depth + 1) for branch in branches)
