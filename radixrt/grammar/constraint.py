"""Constraint owns what a user asked for: which outputs are allowed, as immutable data that can be hashed, stored and sent.

Invariants: a ``Constraint`` is checked for type and size when it is made, equal when its content is equal, and survives
``from_dict(json.loads(json.dumps(c.to_dict())))`` unchanged; whether it can be enforced is found by ``compile``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from radixrt.errors import InvalidRequest, nearest, unknown_field
from radixrt.grammar.json_text import read_json, squeeze_json, write_json

if TYPE_CHECKING:
    from radixrt.grammar.matcher import CompiledConstraint
    from radixrt.model.tokenizer import Tokenizer

Whitespace = Literal["compact", "flexible"]
KeyOrder = Literal["declared", "any"]
Syntax = Literal["lark", "gbnf", "ebnf"]
Unit = Literal["words", "characters"]


@dataclass(frozen=True, slots=True)
class ConstraintLimits:
    """What one constraint may hold, checked when it is made; more is an ``InvalidRequest``.

    Fields:
        pattern: characters of a regex. text: characters of a grammar, or bytes of a literal. schema: characters of a JSON Schema with
        its registry. nesting: levels of JSON brackets. choices: number of choices; choice_bytes: bytes of all together.
        substring: characters of the text of a substring. tags: number of structural tags and of triggers; trigger_text: characters of all triggers together. parts: constraints inside one constraint, at all levels;
        depth: levels of constraints inside constraints.
    """

    pattern: int = 100_000
    text: int = 1_000_000
    schema: int = 4_000_000
    nesting: int = 200
    choices: int = 100_000
    choice_bytes: int = 8_000_000
    substring: int = 400_000
    tags: int = 1_000
    trigger_text: int = 20_000
    parts: int = 10_000
    depth: int = 20


DEFAULT_LIMITS = ConstraintLimits()


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole output matches ``pattern``, as Python's ``re.fullmatch`` would."""

    pattern: str


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """A JSON text that is valid under ``schema``, itself a JSON text. ``registry`` holds ``(uri, JSON text)``."""

    schema: str
    whitespace: Whitespace = "compact"
    key_order: KeyOrder = "declared"
    strict_formats: bool = False
    registry: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""

    whitespace: Whitespace = "compact"


@dataclass(frozen=True, slots=True)
class Choice:
    """Exactly one of these strings."""

    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A string of the language of a grammar."""

    text: str
    syntax: Syntax


@dataclass(frozen=True, slots=True)
class LiteralText:
    """Exactly this string."""

    text: str


@dataclass(frozen=True, slots=True)
class Substring:
    """See ``Constraint.substring``."""

    text: str
    unit: Unit = "words"
    max_length: int | None = None
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Sequence:
    """One part directly after the other."""

    parts: tuple[Constraint, ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Any one of the parts."""

    parts: tuple[Constraint, ...]


@dataclass(frozen=True, slots=True)
class Tag:
    """``begin``, then what ``constraint`` allows, then ``end``."""

    begin: str
    constraint: Constraint
    end: str


@dataclass(frozen=True, slots=True)
class StructuralTags:
    """Free text in which a trigger may only be the start of a tag; ``triggers`` is sorted. See ``Constraint.structural_tags``."""

    tags: tuple[Tag, ...]
    triggers: tuple[str, ...]
    at_least_one: bool = False
    stop_after_first: bool = False


Spec: TypeAlias = (
    Regex | JsonSchema | JsonObject | Choice | GrammarText | LiteralText | Substring | Sequence | Alternatives | StructuralTags
)  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class Constraint:
    """What the whole output of a generation must be. Made by the class methods, given as ``SamplingParams(constraint=...)``."""

    spec: Spec
    depth: int = field(default=1, compare=False)
    size: int = field(default=1, compare=False)

    # -- one kind of text

    @classmethod
    def regex(cls, pattern: str, *, limits: ConstraintLimits = DEFAULT_LIMITS) -> Constraint:
        """The whole output matches ``pattern``, as with Python's ``re.fullmatch``: ``.`` excludes newlines unless ``(?s)``.

        Raises:
            InvalidRequest: not a string, too long. (What the pattern says is judged by ``compile``.)
        """
        return cls(Regex(_text("regex", pattern, limits.pattern)))

    @classmethod
    def choice(cls, choices: Iterable[str], *, limits: ConstraintLimits = DEFAULT_LIMITS) -> Constraint:
        """The output is exactly one of these strings. Duplicates are fine; one may be the beginning of another.

        Raises:
            InvalidRequest: an empty list, something that is no string, too many or too long.
        """
        if isinstance(choices, str | bytes | Mapping) or not isinstance(choices, Iterable):
            raise InvalidRequest("choice", f"must be a list of strings, not {type(choices).__name__}")
        taken = tuple(choices)
        if not taken:
            raise InvalidRequest("choice", "=[]: must hold at least one string, or no output is possible")
        if len(taken) > limits.choices:
            raise InvalidRequest("choice", f"holds {len(taken):,} strings; at most {limits.choices:,} are taken")
        total = 0
        for i, text in enumerate(taken):
            total += len(_text(f"choice[{i}]", text, limits.choice_bytes))
        if total > limits.choice_bytes:
            raise InvalidRequest("choice", f"holds {total:,} characters; at most {limits.choice_bytes:,} are taken")
        return cls(Choice(tuple(dict.fromkeys(taken))))

    @classmethod
    def literal(cls, text: str, *, limits: ConstraintLimits = DEFAULT_LIMITS) -> Constraint:
        """Exactly this text: useful in a ``sequence``. Raises InvalidRequest: not a string, not Unicode text, too long."""
        return cls(LiteralText(_text("literal", text, limits.text)))

    @classmethod
    def substring(
        cls,
        text: str,
        *,
        unit: Unit = "words",
        max_length: int | None = None,
        empty: bool = False,
        limits: ConstraintLimits = DEFAULT_LIMITS,
    ) -> Constraint:
        """A part of ``text``, letter for letter: a quotation that cannot be made up.

        Args:
            unit: ``"words"``: runs of letters, digits and underscores, none cut; any other sign (and any character of a script
                written without spaces) is a word by itself. ``"characters"``: it begins and ends anywhere.
            max_length: most units; memory grows with it, so where ``max_tokens`` will do, leave it out. empty: or no text at all.

        Raises:
            InvalidRequest: not a string, too long, nothing in it though ``empty`` is false, an option out of range.
        """
        _one_of("unit", unit, ("words", "characters"))
        _flag("empty", empty)
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            raise InvalidRequest("max_length", f"={max_length!r}: must be an integer of at least 1")
        _text("substring", text, limits.substring)
        if not empty and not (text.strip() if unit == "words" else text):
            raise InvalidRequest(
                "substring", "has nothing in it: no output is possible (empty=true allows an empty one)"
            )
        return cls(Substring(text, unit, max_length, empty))

    @classmethod
    def json_schema(
        cls,
        schema: Mapping[str, Any] | bool | str | type,
        *,
        whitespace: Whitespace = "compact",
        key_order: KeyOrder = "declared",
        strict_formats: bool = False,
        registry: Mapping[str, object] | None = None,
        limits: ConstraintLimits = DEFAULT_LIMITS,
    ) -> Constraint:
        """A JSON text that is valid under a JSON Schema (drafts 4 to 2020-12).

        Args:
            schema: a dict, a JSON text, or a pydantic model class (whatever has ``model_json_schema()``).
            whitespace: ``"compact"``: no white space between tokens; ``"flexible"``: also as ``json.dumps`` writes it and indented.
            key_order: ``"declared"``: properties in the order of the schema; ``"any"``: in any order.
            strict_formats: refuse a ``format`` that is not known; otherwise an unknown one is an annotation. Known ones are enforced.
            registry: schemas for remote ``$ref``, by URI. The network is never asked.

        Raises:
            InvalidRequest: not JSON, duplicate keys, NaN, too large or too deeply nested, an unknown option.
        """
        put = {"max_bytes": limits.schema, "max_nesting": limits.nesting}
        text = _schema_text("json_schema", schema, put)
        remote: list[tuple[str, str]] = []
        if registry is not None:
            if not isinstance(registry, Mapping):
                raise InvalidRequest("registry", f"must map URIs to schemas, not be {type(registry).__name__}")
            for uri, value in registry.items():
                name = _text("registry", uri, limits.pattern)
                remote.append((name, _schema_text(f"registry[{name!r}]", cast(Any, value), put)))
        if sum(len(t) for _, t in remote) + len(text) > limits.schema:
            raise InvalidRequest("registry", f"and schema hold more than {limits.schema:,} characters")
        _one_of("whitespace", whitespace, ("compact", "flexible"))
        _one_of("key_order", key_order, ("declared", "any"))
        _flag("strict_formats", strict_formats)
        return cls(JsonSchema(text, whitespace, key_order, strict_formats, tuple(sorted(remote))))

    @classmethod
    def json_object(cls, *, whitespace: Whitespace = "compact") -> Constraint:
        """Any JSON object (what other servers call JSON mode).

        Raises:
            InvalidRequest: an unknown option.
        """
        _one_of("whitespace", whitespace, ("compact", "flexible"))
        return cls(JsonObject(whitespace))

    @classmethod
    def grammar(cls, text: str, syntax: Syntax = "lark", *, limits: ConstraintLimits = DEFAULT_LIMITS) -> Constraint:
        """The output is in the language of a context-free grammar.

        ``"lark"`` starts at ``start``, ``"gbnf"`` (llama.cpp) and ``"ebnf"`` at ``root``. There is no lexer: a terminal stands
        for every string it matches, wherever the grammar has it. See ``radixrt.grammar.syntax`` for what each syntax takes.

        Raises:
            InvalidRequest: not a string, too long, an unknown syntax. (What the grammar says is judged by ``compile``.)
        """
        _one_of("syntax", syntax, ("lark", "gbnf", "ebnf"))
        return cls(GrammarText(_text("grammar", text, limits.text), syntax))

    # -- composition

    @classmethod
    def sequence(cls, *parts: Constraint | str, limits: ConstraintLimits = DEFAULT_LIMITS) -> Constraint:
        """One part directly after the other; a plain string stands for ``literal``.

        Raises:
            InvalidRequest: no parts, something that is no constraint, too many or too deeply nested.
        """
        return _composed(cls, "sequence", parts, Sequence, limits)

    @classmethod
    def alternatives(cls, *parts: Constraint | str, limits: ConstraintLimits = DEFAULT_LIMITS) -> Constraint:
        """Any one of the parts; a plain string stands for ``literal``.

        Raises:
            InvalidRequest: no parts, something that is no constraint, too many or too deeply nested.
        """
        return _composed(cls, "alternatives", parts, Alternatives, limits)

    @classmethod
    def structural_tags(
        cls,
        tags: Iterable[Tag | tuple[str, Constraint, str] | Mapping[str, Any]],
        *,
        triggers: Iterable[str] | None = None,
        at_least_one: bool = False,
        stop_after_first: bool = False,
        limits: ConstraintLimits = DEFAULT_LIMITS,
    ) -> Constraint:
        """Free text until a trigger, then a tag, then free text again: tool calls inside prose.

        Free text holds no trigger. Where one is complete, the text goes on as a tag whose ``begin`` starts with that trigger; after
        the tag's ``end`` free text follows, and so on.

        Args:
            tags: ``Tag(begin, constraint, end)``, such a tuple, or a mapping with these keys (``schema`` in place of
                ``constraint``: a JSON Schema).
            triggers: texts that begin tags; by default each tag's whole ``begin``.
            at_least_one: the output may not end before a tag is complete.
            stop_after_first: the output ends with the first tag.

        Raises:
            InvalidRequest: no tags, an empty ``begin`` or trigger, a trigger that no tag begins with, a tag that no
                trigger can reach.
        """
        if isinstance(tags, str | Mapping) or not isinstance(tags, Iterable):
            raise InvalidRequest("structural_tags", f"must be a list of tags, not {type(tags).__name__}")
        made = tuple(_tag(f"structural_tags[{i}]", tag, limits) for i, tag in enumerate(tags))
        if not made:
            raise InvalidRequest("structural_tags", "=[]: must hold at least one tag")
        _flag("at_least_one", at_least_one)
        _flag("stop_after_first", stop_after_first)
        if triggers is None:
            words = {tag.begin for tag in made}
        else:
            if isinstance(triggers, str) or not isinstance(triggers, Iterable):
                raise InvalidRequest("triggers", f"must be a list of strings, not {type(triggers).__name__}")
            words = {_text(f"triggers[{i}]", word, limits.pattern) for i, word in enumerate(triggers)}
            if not words:
                raise InvalidRequest("triggers", "=[]: must hold at least one string")
            if "" in words:
                raise InvalidRequest("triggers", "holds an empty string, which would be everywhere")
        if max(len(made), len(words)) > limits.tags:
            raise InvalidRequest("structural_tags", f"holds over {limits.tags:,} tags or triggers")
        if sum(map(len, words)) > limits.trigger_text:
            raise InvalidRequest(
                "triggers", f"hold over {limits.trigger_text:,} characters; give shorter triggers=[...]"
            )
        from radixrt.grammar.tags import check_tags

        check_tags([tag.begin for tag in made], sorted(words))
        spec = StructuralTags(made, tuple(sorted(words)), at_least_one, stop_after_first)
        return _bounded(cls, "structural_tags", spec, [tag.constraint for tag in made], limits)

    # -- to JSON and back

    def to_dict(self) -> dict[str, Any]:
        """A JSON object that ``from_dict`` reads back to an equal constraint."""
        match self.spec:
            case Regex(pattern):
                return {"type": "regex", "pattern": pattern}
            case JsonObject(whitespace):
                return {"type": "json_object", "whitespace": whitespace}
            case Choice(choices):
                return {"type": "choice", "choices": list(choices)}
            case GrammarText(text, syntax):
                return {"type": "grammar", "text": text, "syntax": syntax}
            case LiteralText(text):
                return {"type": "literal", "text": text}
            case Substring(text, unit, most, empty):
                return {"type": "substring", "text": text, "unit": unit, "max_length": most, "empty": empty}
            case Sequence(parts):
                return {"type": "sequence", "parts": [part.to_dict() for part in parts]}
            case Alternatives(parts):
                return {"type": "alternatives", "parts": [part.to_dict() for part in parts]}
            case JsonSchema():
                return {
                    "type": "json_schema",
                    "schema": _readable(self.spec.schema),
                    "whitespace": self.spec.whitespace,
                    "key_order": self.spec.key_order,
                    "strict_formats": self.spec.strict_formats,
                    "registry": {uri: _readable(text) for uri, text in self.spec.registry},
                }
            case StructuralTags():
                return {
                    "type": "structural_tags",
                    "tags": [
                        {"begin": tag.begin, "constraint": tag.constraint.to_dict(), "end": tag.end}
                        for tag in self.spec.tags
                    ],
                    "triggers": list(self.spec.triggers),
                    "at_least_one": self.spec.at_least_one,
                    "stop_after_first": self.spec.stop_after_first,
                }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, limits: ConstraintLimits = DEFAULT_LIMITS) -> Constraint:
        """Read what ``to_dict`` wrote. Options left out have their defaults.

        Raises:
            InvalidRequest: an unknown type or field (naming the nearest valid one), or whatever the class method refuses.
        """
        return _from_dict(values, limits, limits.depth)

    # -- use

    def compile(self, tokenizer: Tokenizer) -> CompiledConstraint:
        """Build the automaton that masks this tokenizer's vocabulary. Takes milliseconds to seconds: see ``CompileCache``.

        Raises:
            InvalidRequest: a syntax error, or a constraint that no output can meet.
            UnsupportedConstraint: a constraint that cannot be enforced exactly, naming the part at fault.
        """
        from radixrt.grammar.compile import compile_constraint

        return compile_constraint(self, tokenizer)

    def __repr__(self) -> str:
        text = json.dumps(self.to_dict(), ensure_ascii=False)
        return f"Constraint({text if len(text) <= 200 else text[:197] + '...'})"


def _text(name: str, value: object, limit: int) -> str:
    """``value`` if it is Unicode text of at most ``limit`` characters."""
    if not isinstance(value, str):
        raise InvalidRequest(name, f"must be a string, not {type(value).__name__}")
    if len(value) > limit:
        raise InvalidRequest(name, f"is {len(value):,} characters long; at most {limit:,} are taken")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        bad = ord(value[error.start])
        raise InvalidRequest(
            name, f"is not Unicode text: lone surrogate U+{bad:04X} at character {error.start}"
        ) from None
    return value


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(name, f"={value!r}: must be true or false")


def _one_of(name: str, value: object, valid: tuple[str, ...]) -> None:
    if value not in valid:
        hint = nearest(value, valid) if isinstance(value, str) else f"; valid values are {', '.join(valid)}"
        raise InvalidRequest(name, f"={value!r}{hint}")


def _schema_text(name: str, schema: Mapping[str, Any] | bool | str | type, limits: dict[str, int]) -> str:
    """The schema as compact JSON text, numbers exactly as they were written."""
    if isinstance(schema, str):
        value = read_json(name, schema, **limits)
        if not isinstance(value, Mapping | bool):
            raise InvalidRequest(name, f"must be a JSON object or boolean, not {type(value).__name__}")
        return squeeze_json(schema)
    if isinstance(schema, type):
        make = getattr(schema, "model_json_schema", None)
        if make is None:
            raise InvalidRequest(
                name, f"={schema.__name__}: a class must be a pydantic model (have a model_json_schema method)"
            )
        try:
            return write_json(name, make(), **limits)
        except InvalidRequest:
            raise
        except Exception as error:
            raise InvalidRequest(name, f"={schema.__name__}: pydantic has no JSON Schema for it: {error}") from error
    if isinstance(schema, Mapping | bool):
        return write_json(name, schema, **limits)
    if hasattr(schema, "model_json_schema"):
        raise InvalidRequest(name, f"must be the model class, not an instance of {type(schema).__name__}")
    raise InvalidRequest(name, f"must be a dict, a JSON text or a pydantic model class, not {type(schema).__name__}")


def _readable(text: str) -> Any:
    """The value of a JSON text where writing it again gives the same text, and the text itself where not."""
    value = json.loads(text)
    return value if json.dumps(value, separators=(",", ":")) == text else text


def _composed(
    cls: type[Constraint],
    name: str,
    parts: tuple[Constraint | str, ...],
    make: Callable[[tuple[Constraint, ...]], Spec],
    limits: ConstraintLimits,
) -> Constraint:
    if not parts:
        raise InvalidRequest(name, "must have at least one part")
    made: list[Constraint] = []
    for i, part in enumerate(parts):
        if isinstance(part, str):
            part = Constraint(LiteralText(_text(f"{name}[{i}]", part, limits.text)))
        if not isinstance(part, Constraint):
            raise InvalidRequest(f"{name}[{i}]", f"must be a Constraint or a string, not {type(part).__name__}")
        made.append(part)
    return _bounded(cls, name, make(tuple(made)), made, limits)


def _bounded(
    cls: type[Constraint], name: str, spec: Spec, parts: Sequence_[Constraint], limits: ConstraintLimits
) -> Constraint:
    depth = 1 + max(part.depth for part in parts)
    size = 1 + sum(part.size for part in parts)
    if depth > limits.depth:
        raise InvalidRequest(name, f"nests constraints {depth} levels deep; at most {limits.depth} are taken")
    if size > limits.parts:
        raise InvalidRequest(name, f"holds {size:,} constraints; at most {limits.parts:,} are taken")
    return cls(spec, depth, size)


def _tag(name: str, tag: object, limits: ConstraintLimits) -> Tag:
    if isinstance(tag, Mapping):
        for key in tag:
            if key not in ("begin", "constraint", "schema", "end"):
                raise unknown_field(name, str(key), ("begin", "constraint", "schema", "end"))
        if ("schema" in tag) == ("constraint" in tag):
            raise InvalidRequest(name, "must have either constraint or schema")
        content = tag["constraint"] if "constraint" in tag else Constraint.json_schema(tag["schema"], limits=limits)
        tag = Tag(tag.get("begin", ""), content, tag.get("end", ""))
    elif isinstance(tag, tuple) and len(tag) == 3:
        tag = Tag(*tag)
    if not isinstance(tag, Tag):
        raise InvalidRequest(name, f"must be a Tag(begin, constraint, end), not {type(tag).__name__}")
    if not _text(f"{name}.begin", tag.begin, limits.text):
        raise InvalidRequest(f"{name}.begin", "='': must not be empty, or every place would begin the tag")
    _text(f"{name}.end", tag.end, limits.text)
    if not isinstance(tag.constraint, Constraint):
        raise InvalidRequest(f"{name}.constraint", f"must be a Constraint, not {type(tag.constraint).__name__}")
    return tag


# What ``from_dict`` takes: type -> fields that must be there, fields that may.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "regex": (("pattern",), ()),
    "json_schema": (("schema",), ("whitespace", "key_order", "strict_formats", "registry")),
    "json_object": ((), ("whitespace",)),
    "choice": (("choices",), ()),
    "grammar": (("text",), ("syntax",)),
    "literal": (("text",), ()),
    "substring": (("text",), ("unit", "max_length", "empty")),
    "sequence": (("parts",), ()),
    "alternatives": (("parts",), ()),
    "structural_tags": (("tags",), ("triggers", "at_least_one", "stop_after_first")),
}


def _from_dict(values: object, limits: ConstraintLimits, depth: int) -> Constraint:
    if isinstance(values, Constraint):
        return values
    if not isinstance(values, Mapping):
        raise InvalidRequest("constraint", f"must be a JSON object, not {type(values).__name__}")
    if depth == 0:
        raise InvalidRequest("constraint", f"nests constraints more than {limits.depth} levels deep")
    kind = values.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        hint = nearest(kind, _FIELDS) if isinstance(kind, str) else f"; valid types are {', '.join(sorted(_FIELDS))}"
        raise InvalidRequest("constraint.type", f"={kind!r}{hint}")
    needed, optional = _FIELDS[kind]
    for name in values:
        if name != "type" and name not in needed + optional:
            raise unknown_field(f"constraint of type {kind}", str(name), needed + optional or ("type",))
    for name in needed:
        if name not in values:
            raise InvalidRequest(f"constraint.{name}", f"is missing; a constraint of type {kind} needs it")
    given = {name: values[name] for name in optional if name in values}
    first = values[needed[0]] if needed else None
    if kind in ("sequence", "alternatives"):
        if not isinstance(first, list | tuple):
            raise InvalidRequest("constraint.parts", f"must be a list, not {type(first).__name__}")
        parts = [part if isinstance(part, str) else _from_dict(part, limits, depth - 1) for part in first]
        return getattr(Constraint, kind)(*parts, limits=limits)
    if kind == "structural_tags":
        if not isinstance(first, list | tuple):
            raise InvalidRequest("constraint.tags", f"must be a list, not {type(first).__name__}")
        tags = [
            {**tag, "constraint": _from_dict(tag["constraint"], limits, depth - 1)}
            if isinstance(tag, Mapping) and "constraint" in tag
            else tag
            for tag in first
        ]
        return Constraint.structural_tags(tags, **given, limits=limits)
    if kind == "json_object":
        return Constraint.json_object(**given)
    return getattr(Constraint, kind)(first, **given, limits=limits)
