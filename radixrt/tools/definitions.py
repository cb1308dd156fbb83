"""Tools as people define them, and which of them the model may or must call: read from a request, checked, named in every error.

Invariants: names are unique and of ``NAME``; ``parameters`` is a JSON Schema of objects that the grammar can enforce; ``schema`` of a
tool allows no argument that it does not know, unless its own schema says so.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.grammar.constraint import Constraint

Form = Literal["chat", "responses", "anthropic"]
MOST_TOOLS = 512
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
SECONDS = 10.0  # that the schemas of one request may take to be checked, all tools together
_TEXT = 100_000  # characters of a description
# Keywords that speak about the same object from elsewhere: with one of them, closing the object would refuse what they allow.
_OPENING = frozenset(
    "additionalProperties unevaluatedProperties patternProperties allOf anyOf oneOf not if then else dependentSchemas dependencies "
    "$ref $dynamicRef".split()
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. ``parameters``: the JSON Schema of its arguments, as given; ``strict``: as given."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}}, hash=False)
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """What the arguments are held to: an object, with no other members than the known ones unless the schema allows them."""
        schema = {"type": "object", **self.parameters}
        if not _OPENING & schema.keys():
            schema["additionalProperties"] = False
        return schema

    def to_openai(self) -> dict[str, Any]:
        """The tool as chat templates and ``/v1/chat/completions`` have it."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``auto``: text or calls; ``none``: no call; ``required``: at least one call; ``named``: exactly one call, of ``name``."""

    kind: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None

    @property
    def forced(self) -> bool:
        return self.kind in ("required", "named")

    def of(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.kind == "none":
            return ()
        return tuple(tool for tool in tools if self.name is None or tool.name == self.name)


def call_id(request_id: str, index: int, style: str = "call") -> str:
    """The id of a request's ``index``-th call: the same for the same request. ``style`` "short": nine letters and digits (Mistral's)."""
    digest = hashlib.sha256(f"{request_id}\0{index}".encode()).hexdigest()
    return digest[:9] if style == "short" else f"call_{digest[:24]}"


def read_tools(field: str, value: Any, form: Form = "chat") -> tuple[Tool, ...]:
    """The tools of a request: ``None`` is none.

    Args:
        field: what the request calls the list. form: ``{"type": "function", "function": {...}}`` (chat), the function's fields
            beside ``type`` (responses), or ``name``, ``description`` and ``input_schema`` (anthropic).

    Raises:
        InvalidRequest: names the tool's field and its value; also for a schema that the grammar cannot enforce.
    """
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise InvalidRequest(field, f"={shown(value)}: must be a list of tools")
    if len(value) > MOST_TOOLS:
        raise InvalidRequest(field, f"holds {len(value):,} tools; at most {MOST_TOOLS} are taken")
    tools: list[Tool] = []
    places: dict[str, str] = {}
    until = time.monotonic() + SECONDS
    for i, item in enumerate(value):
        place, given, schema_key = _function(f"{field}[{i}]", item, form)
        tool = read_tool(place, given, schema_key, until - time.monotonic())
        if tool.name in places:
            raise InvalidRequest(
                f"{place}.name", f"={tool.name!r}: {places[tool.name]} has the same name; names must differ"
            )
        places[tool.name] = place
        tools.append(tool)
    return tuple(tools)


def read_tool(place: str, given: Mapping[str, Any], schema_key: str = "parameters", seconds: float = SECONDS) -> Tool:
    """One tool from an object with ``name`` and perhaps ``description``, a schema and ``strict``; raises what ``read_tools`` raises."""
    for key in given:
        if key not in ("type", "name", "description", "strict", schema_key, "cache_control"):
            valid = ("name", "description", "strict", schema_key)
            raise InvalidRequest(
                f"{place}.{shown(key).strip(chr(39))}", f"there is no such field{nearest(str(key), valid)}"
            )
    name, description, strict = given.get("name"), given.get("description"), given.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        problem = "is missing" if name is None else f"={shown(name)}"
        raise InvalidRequest(
            f"{place}.name", f"{problem}: must be 1 to 128 letters, digits, underscores, dashes and dots"
        )
    if description is not None and (not isinstance(description, str) or len(description) > _TEXT):
        what = shown(description) if not isinstance(description, str) else f"a text of {len(description):,} characters"
        raise InvalidRequest(f"{place}.description", f"={what}: must be a string of at most {_TEXT:,} characters")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{place}.strict", f"={shown(strict)}: must be true or false")
    schema = given.get(schema_key)
    where = f"{place}.{schema_key}"
    if schema is None:
        schema = {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping):
        raise InvalidRequest(where, f"={shown(schema)}: must be a JSON Schema of an object")
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"{where}.type", f"={shown(schema['type'])}: arguments are an object; must be 'object'")
    tool = Tool(name, description or "", dict(schema), bool(strict))
    check_schema(where, tool, seconds)
    return tool


def check_schema(where: str, tool: Tool, seconds: float = SECONDS) -> None:
    """Raises InvalidRequest, naming ``where``, for a schema that the grammar cannot enforce (or that nothing can meet), or not in time."""
    from radixrt.grammar.constraint import JsonSchema
    from radixrt.grammar.schema import SchemaLimits, compile_schema

    if seconds <= 0:
        raise InvalidRequest(where, f": the schemas of the tools before it take longer than {SECONDS:g} s to check")
    limits = SchemaLimits()
    try:
        spec = Constraint.json_schema(tool.schema).spec
        assert isinstance(spec, JsonSchema)
        compile_schema(spec.schema, limits=replace(limits, seconds=min(limits.seconds, seconds)))
    except InvalidRequest as error:
        raise InvalidRequest(where, str(error)) from None


def read_choice(value: Any, tools: Sequence[Tool], field: str = "tool_choice") -> ToolChoice:
    """The choice of a request, in the words of any of the dialects; ``None``: auto where there are tools, else none.

    Raises:
        InvalidRequest: an unknown word, a call that is required without tools, a tool that does not exist.
    """
    words = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
    if value is None:
        return ToolChoice("auto" if tools else "none")
    name: Any = None
    kind = value
    if isinstance(value, Mapping):
        kind = value.get("type")
        if kind in ("function", "tool", "custom"):
            inner, path = value, f"{field}.name"
            if isinstance(value.get("function"), Mapping):
                inner, path = value["function"], f"{field}.function.name"
            name = inner.get("name")
            if not isinstance(name, str):
                raise InvalidRequest(
                    path, f"{'is missing' if name is None else '=' + shown(name)}: must be a tool's name"
                )
            if not any(tool.name == name for tool in tools):
                hint = nearest(name, [tool.name for tool in tools]) if tools else "; the request has no tools"
                raise InvalidRequest(path, f"={shown(name)}: is not one of the tools{hint}")
            return ToolChoice("named", name)
        if not isinstance(kind, str) or kind not in words:
            problem = "is missing" if kind is None else f"={shown(kind)}"
            raise InvalidRequest(f"{field}.type", f"{problem}: must be function, or one of {', '.join(words)}")
    if not isinstance(kind, str) or kind not in words:
        hint = nearest(kind, words) if isinstance(kind, str) else "; must be a word or an object that names a tool"
        raise InvalidRequest(field, f"={shown(value)}{hint}")
    if words[kind] == "required" and not tools:
        raise InvalidRequest(field, f"={shown(value)}: needs at least one tool")
    if not tools:
        return ToolChoice("none")
    return ToolChoice(words[kind])  # type: ignore[arg-type]


def _function(place: str, item: Any, form: Form) -> tuple[str, Mapping[str, Any], str]:
    """Where the fields of a tool are, they themselves, and what the schema is called among them."""
    if not isinstance(item, Mapping):
        raise InvalidRequest(place, f"={shown(item)}: must be an object")
    kind = item.get("type")
    valid = ("custom", None) if form == "anthropic" else ("function",)
    if kind not in valid and not (form == "chat" and kind is None and "function" in item):
        problem = "is missing" if kind is None else f"={shown(kind)}"
        raise InvalidRequest(f"{place}.type", f"{problem}: only {valid[0]!r} is supported")
    if form == "anthropic":
        return place, item, "input_schema"
    if form == "responses":
        return place, item, "parameters"
    given = item.get("function")
    if not isinstance(given, Mapping):
        problem = "is missing" if given is None else f"={shown(given)}"
        raise InvalidRequest(f"{place}.function", f"{problem}: must be an object with name and parameters")
    for key in item:
        if key not in ("type", "function"):
            raise InvalidRequest(f"{place}.{key}", f"there is no such field{nearest(str(key), ('type', 'function'))}")
    return f"{place}.function", given, "parameters"
