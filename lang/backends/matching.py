"""Whether a text that someone else wrote meets a constraint, as far as that can be told without a tokenizer.

Invariants: nothing is compiled for masks; what cannot be told is taken. White space in JSON is not judged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

from radixrt.errors import shown
from radixrt.grammar.constraint import (
    Alternatives,
    Choice,
    Constraint,
    JsonObject,
    JsonSchema,
    LiteralText,
    Regex,
    Sequence,
    Substring,
)

Check = Callable[[str], str]
PATTERN_SECONDS = 1.0  # a pattern that takes longer on one text is not judged


def checker(constraint: Constraint) -> Check:
    """A function that says what is wrong with a text: ``""`` where nothing is, or where it cannot be told."""
    match constraint.spec:
        case Choice(choices):
            allowed = frozenset(choices)
            return lambda text: "" if text in allowed else f"is none of the choices {shown(list(choices))}"
        case LiteralText(wanted):
            return lambda text: "" if text == wanted else f"is not {shown(wanted)}"
        case Substring():
            return _substring(constraint.spec)
        case Regex(pattern):
            return _pattern(pattern)
        case JsonObject():
            return _json_object
        case JsonSchema():
            return _schema(constraint.spec)
        case Alternatives(parts):
            checks = [checker(part) for part in parts]

            def any_of(text: str) -> str:
                problems = [check(text) for check in checks]
                return "" if "" in problems else "; ".join(problems)

            return any_of
    return lambda text: ""


def example(constraint: Constraint) -> str | None:
    """A text that meets the constraint where one is plain to see, else ``None``."""
    match constraint.spec:
        case Choice(choices):
            return choices[0]
        case LiteralText(text):
            return text
        case Substring(text, "words", max_length, _):
            return text.strip() if max_length is None else None
        case Substring(text, _, max_length, _):
            return text[:max_length]
        case JsonObject():
            return "{}"
        case Alternatives(parts):
            return next((text for text in map(example, parts) if text is not None), None)
        case Sequence(parts):
            texts = [example(part) for part in parts]
            return None if None in texts else "".join(text for text in texts if text is not None)
    return None


def _pattern(pattern: str) -> Check:
    regex: Any = import_module("regex")
    try:
        compiled = regex.compile(pattern)
    except regex.error:
        return lambda text: ""

    def check(text: str) -> str:
        try:
            matched = compiled.fullmatch(text, timeout=PATTERN_SECONDS)
        except TimeoutError:
            return ""
        return "" if matched else f"does not match the regex {shown(pattern)}"

    return check


def _substring(spec: Substring) -> Check:
    def check(text: str) -> str:
        if not text:
            return "" if spec.empty else "is empty"
        return "" if text in spec.text else f"is no part of the text {shown(spec.text)}"

    return check


def _json_object(text: str) -> str:
    value, problem = _loaded(text)
    if problem:
        return problem
    return "" if isinstance(value, dict) else f"is not a JSON object, but {shown(value)}"


def _schema(spec: JsonSchema) -> Check:
    try:
        jsonschema: Any = import_module("jsonschema")
    except ImportError:
        jsonschema = None
    if jsonschema is None or spec.registry:
        return lambda text: _loaded(text)[1]
    schema = json.loads(spec.schema)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = kind(schema)

    def check(text: str) -> str:
        value, problem = _loaded(text)
        if problem:
            return problem
        try:
            error = next(validator.iter_errors(value), None)
        except Exception:  # a schema that it cannot follow: a reference it lacks, say
            return ""
        return "" if error is None else f"does not meet the JSON schema: {shown(error.message)} at {error.json_path}"

    return check


def _loaded(text: str) -> tuple[Any, str]:
    try:
        return json.loads(text), ""
    except ValueError as error:
        return None, f"is not JSON: {error}"
