"""Command-line flags, generated from the fields of the dataclasses that own the settings.

Invariants: no flag has a default of its own (a flag that was not given is absent from the result, so the dataclass
decides); every field has a flag; an unknown flag is answered with the nearest one.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from radixrt.cli.constraints import add_constraint_flags, constraint_setting
from radixrt.config import EngineConfig
from radixrt.errors import nearest, shown
from radixrt.grammar.constraint import Constraint
from radixrt.request import SamplingParams

_ENGINE, _SAMPLING = "engine.", "sampling."


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, no abbreviations, options and positionals in any order, and "did you mean"."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse everything, or end the process with exit code 2 and one line on stderr."""
        arguments, literal = list(arguments), []
        if "--" in arguments:  # what follows is text, whatever it looks like; argparse would lose this when intermixing
            border = arguments.index("--")
            arguments, literal = arguments[:border], arguments[border + 1 :]
        namespace, extra = self.parse_known_intermixed_args(arguments)
        unknown = [argument for argument in extra if argument.startswith("-") and argument != "-"]
        if unknown:
            flag = unknown[0].split("=", 1)[0]
            self.error(f"unknown option {flag!r}{self._nearest(flag)}")
        rest = [action.dest for action in self._actions if not action.option_strings]
        if literal and rest:
            setattr(namespace, rest[-1], [*(getattr(namespace, rest[-1], None) or []), *literal])
        elif extra or literal:
            self.error(f"unexpected argument {(extra + literal)[0]!r}")
        return namespace

    def positionals(self) -> list[str]:
        """What the positional arguments are called in the usage line."""
        return [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]

    def _nearest(self, flag: str) -> str:
        valid = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        hint = nearest(flag, valid)
        return hint if hint.startswith("; did you mean") else f" ({self.prog} --help lists them)"

    def _print_message(self, message: str, file: Any = None) -> None:
        if message:  # argparse would pass over a file that cannot be written
            (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def add_engine_flags(parser: argparse.ArgumentParser, omit: Iterable[str] = ()) -> None:
    """Add a flag for each field of :class:`EngineConfig` but those in ``omit``. Add sampling flags first: a name they took gets ``--engine-``."""
    group = parser.add_argument_group("engine")
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(EngineConfig)}
    add_flags(parser, group, EngineConfig, _ENGINE, helps, {}, omit)


def add_sampling_flags(
    parser: argparse.ArgumentParser, defaults: Mapping[str, Any] | None = None, omit: Iterable[str] = ()
) -> None:
    """Add a flag for each field of :class:`SamplingParams` but those the command has no use for; ``defaults`` are those
    in which the command differs."""
    add_constraint_flags(parser)  # the field ``constraint`` has several
    group = parser.add_argument_group("sampling")
    helps = documented_fields(SamplingParams)
    add_flags(parser, group, SamplingParams, _SAMPLING, helps, defaults or {}, (*omit, "constraint"))


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The engine settings that were given on the command line."""
    return given_flags(args, _ENGINE)


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given on the command line, and the command's own defaults."""
    return {**given_flags(args, _SAMPLING), **constraint_setting(args)}


def documented_fields(cls: type) -> dict[str, str]:
    """Read ``name: text`` and ``name, name: text`` from the ``Fields:`` section of a docstring."""
    section = re.search(r"^Fields:\n(.*?)(?:\n\n|\Z)", inspect.getdoc(cls) or "", re.DOTALL | re.MULTILINE)
    texts: dict[str, str] = {}
    for entry in re.split(r"\n    (?=\S)", "\n" + section[1] if section else ""):
        names, _, text = entry.partition(": ")
        for name in names.split(","):
            texts[name.strip()] = " ".join(text.split()).replace("``", "")
    return texts


def add_flags(
    parser: argparse.ArgumentParser,
    group: argparse._ArgumentGroup,
    cls: type,
    prefix: str,
    helps: Mapping[str, str],
    defaults: Mapping[str, Any],
    omit: Iterable[str] = (),
) -> None:
    hints = typing.get_type_hints(cls, localns={"Constraint": Constraint})
    for field in dataclasses.fields(cls):
        if field.name in omit:
            continue
        flag = "--" + field.name.replace("_", "-")
        names = [flag] if prefix == _SAMPLING else [f"--engine-{flag[2:]}"] if _taken(parser, flag) else [flag]
        settings, shown = _flag_settings(hints[field.name], field.metadata.get("choices"))
        default = defaults.get(field.name, field.default)
        text = helps.get(field.name, "").rstrip(".")
        if default not in (None, dataclasses.MISSING, ()) and not isinstance(default, Mapping):
            text += f" (default {str(default).lower() if isinstance(default, bool) else default})"
        settings["help"] = text.replace("%", "%%") + shown
        settings["default"] = defaults.get(field.name, argparse.SUPPRESS)
        group.add_argument(*names, dest=prefix + field.name, **settings)


def _taken(parser: argparse.ArgumentParser, flag: str) -> bool:
    return flag in parser._option_string_actions


def given_flags(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}


def _flag_settings(hint: Any, choices: Iterable[str] | None) -> tuple[dict[str, Any], str]:
    """argparse's settings for a field of this type, and what to add to its help."""
    optional = isinstance(hint, types.UnionType) and types.NoneType in typing.get_args(hint)
    if optional:
        hint = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}, ""
    if choices is not None:
        return {"choices": list(choices)}, ""
    if hint is int or hint is float:
        word = "integer" if hint is int else "number"
        return {"type": _number(hint, word, optional), "metavar": "N" if hint is int else "X"}, ""
    if hint is str:
        return {"metavar": "NAME"}, ""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Sequence and inner == (str,):
        return {"action": "append", "metavar": "TEXT"}, "; may be given several times"
    if origin is Sequence and inner == (int,):
        return {"action": _Extend, "type": _integers, "metavar": "N,N"}, "; may be given several times"
    if origin is Mapping and inner == (int, float):
        return {"action": _Extend, "type": _biases, "metavar": "ID=X,ID=X"}, "; may be given several times"
    raise TypeError(f"no flag can be made of the type {hint!r}")


class _Extend(argparse.Action):
    """Adds a list or mapping to those given before."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest, None)
        if isinstance(values, dict):
            twice = [token for token in values if token in (before or {})]
            if twice:
                raise argparse.ArgumentError(self, f"the token {shown(twice[0])} stands twice")
            values = {**(before or {}), **values}
        else:
            values = [*(before or []), *values]
        setattr(namespace, self.dest, values)


def _number(kind: type, word: str, optional: bool) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        if optional and text.lower() == "none":
            return None
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not {'an' if word == 'integer' else 'a'} {word}"
            ) from None

    return convert


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a list of integers such as 2,50256") from None


def _biases(text: str) -> dict[int, float]:
    try:
        pairs = [(int(token), float(value)) for token, value in (part.split("=") for part in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a list of TOKEN_ID=VALUE such as 50=-100,7=2.5"
        ) from None
    biases: dict[int, float] = {}
    for token, value in pairs:
        if token in biases:
            raise argparse.ArgumentTypeError(f"the token {shown(token)} stands twice")
        biases[token] = value
    return biases
