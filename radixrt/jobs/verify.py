"""Whether a text that someone else wrote is what a constraint asks for: of answers from an endpoint, and of examples.

Invariants: nothing is compiled for masks; what cannot be told (a grammar) is taken. ``jsonschema`` is needed for
schemas only, and looked for when one is judged.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from radixrt.errors import InvalidRequest, RadixrtError, shown
from radixrt.grammar.constraint import Choice, Constraint, JsonObject, JsonSchema, LiteralText, Regex

PATTERN_SECONDS = 2.0  # a pattern that takes longer on one text has not matched
_MOST = 200  # characters of a message


def problem_of(constraint: Constraint, text: str) -> str:
    """What is wrong with a text; ``""`` where nothing is.

    Raises:
        RadixrtError: ``jsonschema`` is not installed.
    """
    match constraint.spec:
        case Choice(choices):
            return "" if text in choices else f"{shown(text)} is none of the choices"
        case LiteralText(wanted):
            return "" if text == wanted else f"{shown(text)} is not {shown(wanted)}"
        case Regex(pattern):
            return _matched(pattern, text)
        case JsonObject():
            value, problem = loaded(text)
            return problem or ("" if isinstance(value, dict) else f"is not a JSON object, but {shown(value)}")
        case JsonSchema():
            return _valid(constraint.spec.schema, text)
        case spec if type(spec).__name__ == "Substring":
            return "" if text in spec.text else f"{shown(text)} is not in the document"  # type: ignore[union-attr]
    return ""


def loaded(text: str) -> tuple[Any, str]:
    """The value of a JSON text, and what is wrong with the text."""
    try:
        return json.loads(text, parse_constant=_refused), ""
    except (ValueError, RecursionError) as error:
        reason = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON ({error})"
        return None, reason


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _matched(pattern: str, text: str, *, whole: bool = True) -> str:
    regex: Any = import_module("regex")
    try:
        match = regex.fullmatch if whole else regex.search
        found = match(pattern, text, timeout=PATTERN_SECONDS)
    except regex.error as error:
        raise InvalidRequest("regex", f"={shown(pattern)}: {error}") from None
    except TimeoutError:
        return f"takes too long to match against the regex {shown(pattern)}"
    return "" if found else f"{shown(text)} does not match the regex {shown(pattern)}"


def _valid(schema: str, text: str) -> str:
    value, problem = loaded(text)
    if problem:
        return problem
    validator = _validator(schema)
    try:
        error = next(validator.iter_errors(value), None)
    except RecursionError:
        return "is nested too deeply"
    except re.error:  # of a name's pattern, which re does not know: it cannot be told
        return ""
    return "" if error is None else f"{error.json_path}: {' '.join(error.message.split())[:_MOST]}"


@functools.lru_cache(maxsize=8)
def _validator(schema: str) -> Any:
    try:
        validators: Any = import_module("jsonschema.validators")
    except ImportError:
        raise RadixrtError(
            "checking JSON that was written elsewhere needs the jsonschema package: pip install jsonschema"
        ) from None
    given = json.loads(schema)
    kind = validators.validator_for(given, default=validators.Draft202012Validator)
    return validators.extend(kind, {"pattern": _pattern})(given)


def _pattern(validator: Any, pattern: str, value: Any, _: Any) -> Iterator[Exception]:
    """``pattern`` with what ``re`` does not know (``\\p{L}``), and for no longer than a regex may take."""
    if not isinstance(value, str):
        return
    try:
        problem = _matched(pattern, value, whole=False)
    except InvalidRequest:  # of another dialect: it cannot be told
        return
    if problem:
        yield import_module("jsonschema").ValidationError(problem)
