"""What a generation must be, as command-line flags and as fields of a JSONL line: both become one ``Constraint``.

Invariants: at most one constraint is given in one place; an error names the flag or the field that it came from, and what is wrong
with a flag is found before a model is loaded.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from radixrt.errors import InvalidRequest, shown
from radixrt.grammar.constraint import DEFAULT_LIMITS, Constraint

_PREFIX = "constraint."
_SYNTAXES = ("lark", "gbnf", "ebnf")
_MAX_BYTES = 4 * max(DEFAULT_LIMITS.schema, DEFAULT_LIMITS.text)  # UTF-8 has at most four for a character

# A JSONL line's short forms of "constraint"; the name that the class method gives its argument, and the class method.
SHORTHANDS: dict[str, tuple[str, Callable[[Any], Constraint]]] = {
    "json_schema": ("json_schema", Constraint.json_schema),
    "regex": ("regex", Constraint.regex),
    "choices": ("choice", Constraint.choice),
    "substring": ("substring", Constraint.substring),
}


def add_constraint_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the field ``constraint``. Of all but ``--grammar-syntax``, one may be given."""
    group = parser.add_argument_group("constraint", "What the whole output must be; at most one of these.")
    one = group.add_mutually_exclusive_group()

    def add(flag: str, **settings: Any) -> None:
        one.add_argument(flag, dest=_PREFIX + flag[2:], default=argparse.SUPPRESS, **settings)

    add("--json-schema", metavar="FILE", help="a JSON text that is valid under the JSON Schema in this file")
    add("--json-object", action="store_true", help="any JSON object")
    add("--regex", metavar="R", help="a full match of this regular expression, as Python's re reads it")
    add("--choices", metavar="A,B,...", help="one of these words; spaces around them are dropped")
    add(
        "--choice", metavar="TEXT", action="append", help="one of these texts, whatever is in them; given several times"
    )
    add("--grammar", metavar="FILE", help="a string of the grammar in this file")
    add("--substring", metavar="FILE", help="a part of the text in this file, letter for letter, of whole words")
    add("--constraint", metavar="JSON", help='any constraint as Constraint.to_dict() writes it: {"type": ...}')
    group.add_argument(
        "--grammar-syntax",
        dest=_PREFIX + "grammar-syntax",
        choices=_SYNTAXES,
        default=argparse.SUPPRESS,
        help="how --grammar is written (default: what the name of the file ends with, or else lark)",
    )


def constraint_setting(args: argparse.Namespace) -> dict[str, Any]:
    """``{"constraint": ...}`` if one was given on the command line.

    Raises:
        InvalidRequest: what is given is no constraint, or cannot be enforced; names the flag.
    """
    given = {name.removeprefix(_PREFIX): value for name, value in vars(args).items() if name.startswith(_PREFIX)}
    syntax = given.pop("grammar-syntax", None)
    if syntax is not None and "grammar" not in given:
        raise InvalidRequest("--grammar-syntax", "needs --grammar")
    if not given:
        return {}
    ((name, value),) = given.items()
    source = f"={shown(value)}" if name in ("json-schema", "grammar", "substring") else ""
    try:
        constraint = _from_flag(name, value, syntax)
        _check(constraint)
    except InvalidRequest as error:
        raise _renamed(error, name.replace("-", "_"), f"--{name}", source) from None
    return {"constraint": constraint}


def take_constraint(record: dict[str, Any]) -> dict[str, Any]:
    """Take a JSONL line's constraint out of it: ``{"constraint": ...}`` if it has one, ``None`` where it asks for none.

    Raises:
        InvalidRequest: more than one, or no constraint; names the field.
    """
    names = [name for name in ("constraint", *SHORTHANDS) if name in record]
    if not names:
        return {}
    if len(names) > 1:
        raise InvalidRequest("constraint", f"may be given once in a line; it has {' and '.join(names)}")
    value = record.pop(names[0])
    if value is None:
        return {"constraint": None}
    if names[0] == "constraint":
        return {"constraint": Constraint.from_dict(value)}
    own, make = SHORTHANDS[names[0]]
    try:
        return {"constraint": make(value)}
    except InvalidRequest as error:
        raise _renamed(error, own, names[0], "") from None


def _from_flag(name: str, value: Any, syntax: str | None) -> Constraint:
    match name:
        case "json-schema":
            return Constraint.json_schema(_read(name, value))
        case "json-object":
            return Constraint.json_object()
        case "regex":
            return Constraint.regex(value)
        case "choices":
            words = [word.strip() for word in value.split(",")]
            if "" in words:
                raise InvalidRequest(name, f"={shown(value)}: holds an empty word (--choice takes any text)")
            return Constraint.choice(words)
        case "choice":
            return Constraint.choice(value)
        case "substring":
            return Constraint.substring(_read(name, value))
        case "grammar":
            ending = os.path.splitext(value)[1].removeprefix(".").lower()
            return Constraint.from_dict(
                {
                    "type": "grammar",
                    "text": _read(name, value),
                    "syntax": syntax or (ending if ending in _SYNTAXES else "lark"),
                }
            )
        case _:
            return Constraint.from_dict(_json(value))


def _check(constraint: Constraint) -> None:
    """Whether it can be enforced at all: what no tokenizer is needed for."""
    from radixrt.grammar.compile import to_grammar

    to_grammar(constraint)


def _read(name: str, path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(name, f"={shown(path)}: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the name
        raise InvalidRequest(name, f"={shown(path)}: {error}") from None
    if len(data) > _MAX_BYTES:
        raise InvalidRequest(name, f"={shown(path)}: is larger than {_MAX_BYTES:,} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, f"={shown(path)}: is not UTF-8 (byte {error.start})") from None


def _json(text: str) -> Any:
    from radixrt.grammar.json_text import read_json

    return read_json("constraint", text, max_bytes=_MAX_BYTES, max_nesting=DEFAULT_LIMITS.nesting)


def _renamed(error: InvalidRequest, own: str, name: str, source: str) -> InvalidRequest:
    """The error with the name that the person used, and where the text came from, in place of the class method's."""
    message = str(error)
    if error.field in (own, own.replace("_", "-")):
        problem = message[len(error.field) :]
        return InvalidRequest(name, problem if problem.startswith(source) else f"{source}{problem}")
    return type(error)(name, f"{source}: {message}")
