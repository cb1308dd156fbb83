"""What an author appends to a state: plain values made by ``gen``, ``select``, ``user`` and the like. Nothing runs here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

from lang.choices import ChoicesMethod, method_of, token_length_normalized
from lang.errors import UsageError, author_line
from lang.tools import ToolFunction, first_read, tool_list
from lang.types import TypeSpec, spec_of
from radixrt import Constraint, InvalidRequest, SamplingParams
from radixrt.engine.nodes import Read
from radixrt.errors import nearest, shown

PARAMS = tuple(item.name for item in fields(SamplingParams) if item.name != "constraint")
ROLES = ("system", "user", "assistant")
_ALSO = (
    "max_new_tokens",
    "regex",
    "json_schema",
    "grammar",
    "substring",
    "choices",
    "type",
    "constraint",
    "heal",
    "return_logprob",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_rounds",
    "separate_reasoning",
)


class Expr:
    """Something that can be appended; ``+`` puts one after the other."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        _refuse(
            f"{_called(self)} was formatted into a text, where it cannot run: put it behind with +, as in 'Q: ' + gen('a')"
        )

    def __add__(self, other: Any) -> ExprList:
        return ExprList((*_items(self), *_items(other)))

    def __radd__(self, other: Any) -> ExprList:
        return ExprList((*_items(other), *_items(self)))


@dataclass(frozen=True, slots=True)
class ExprList(Expr):
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class GenExpr(Expr):
    """See ``gen``. ``options``: the ``SamplingParams`` fields that were given."""

    name: str | None
    options: Mapping[str, Any]
    constraint: Constraint | None = None
    type: TypeSpec | None = None
    heal: bool | None = None
    tools: tuple[ToolFunction, ...] = ()
    max_rounds: int = 8
    read: Read | None = None  # of the first round, where there are tools


@dataclass(frozen=True, slots=True, eq=False)
class SelectExpr(Expr):
    """See ``select``."""

    name: str | None
    choices: tuple[Any, ...]
    method: ChoicesMethod = token_length_normalized
    temperature: float = 0.0
    seed: int | None = None
    values: Mapping[str, Any] | None = field(default=None)  # what each choice stands for, where that is not its text


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    role: str


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expr):
    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expr):
    name: str


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    regex: str | None = None,
    json_schema: Mapping[str, Any] | str | type | None = None,
    grammar: str | None = None,
    grammar_syntax: str = "lark",
    substring: str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | str | None = None,
    type: Any = None,
    constraint: Constraint | None = None,
    heal: bool | None = None,
    return_logprob: bool | None = None,
    top_logprobs_num: int | None = None,
    dtype: Any = None,
    tools: Sequence[Any] | None = None,
    tool_choice: Any = None,
    parallel_tool_calls: bool = True,
    max_rounds: int | None = None,
    separate_reasoning: bool | None = None,
    **options: Any,
) -> GenExpr | SelectExpr:
    """Generate; the text becomes part of the state, and ``s[name]`` is its value.

    Args:
        name: of the variable; ``None`` keeps none.
        max_tokens: most tokens (alias ``max_new_tokens``); by default 128, or what ``run`` was given.
        n: samples; ``s[name]`` is then the list of all, the state goes on with the first, ``s.fork_samples(name)`` with each.
        stop: strings that end the text, and are not part of it.
        regex, json_schema, grammar, substring, type, constraint: what the text must be, at most one of them. ``substring``: a quotation of
            whole words from this text (``Constraint.substring`` has options). ``type``: a pydantic model, dataclass, TypedDict,
            Literal, Enum, ``int``, ``float``, ``bool``, ``str`` or ``list[...]`` and the like; the value comes back as that type.
        choices: the same as ``select(name, choices)``.
        heal: token healing where the text before ends inside a word; by default on.
        return_logprob, top_logprobs_num: SGLang's names of ``logprobs``; ``dtype``: of ``type``.
        tools: typed functions that the model may call, in an assistant message: their results are appended and generation goes on until an
            answer without calls, which is the value; ``s.calls(name)`` has the calls. The body waits for it.
        tool_choice: of the first round: ``"auto"``, ``"required"``, ``"none"`` or a tool. parallel_tool_calls: several calls in one round.
            max_rounds: most rounds with calls (8); then the model has to answer.
        separate_reasoning: the value is without what the model thinks to itself, which ``s.reasoning(name)`` has; always so with tools.
        options: every other field of ``SamplingParams``: ``temperature``, ``top_p``, ``seed``, ``logprobs``, ...

    Raises:
        UsageError: an unknown parameter (with the nearest valid name), two constraints, or a type that cannot be enforced.
    """
    check_name(name)
    if heal is not None and not isinstance(heal, bool):
        _refuse(f"heal={shown(heal)}: must be True or False")
    if type is not None and dtype is not None:
        _refuse("type and dtype are the same: give one")
    given = {
        "regex": regex, "json_schema": json_schema, "grammar": grammar, "substring": substring,
        "choices": choices, "type": type if type is not None else dtype, "constraint": constraint,
    }  # fmt: skip
    kinds = [key for key, value in given.items() if value is not None]
    if len(kinds) > 1:
        _refuse(f"{' and '.join(kinds)} cannot both say what the text must be: give one")
    values = sampling_options(options)
    for key, value in (("max_tokens", max_tokens), ("n", n), ("stop", stop)):
        if value is not None:
            values[key] = value
    if return_logprob and "logprobs" not in values:
        values["logprobs"] = top_logprobs_num or 0
    elif top_logprobs_num is not None and return_logprob is None:
        _refuse("top_logprobs_num needs return_logprob=True (or give logprobs=...)")
    if choices is not None:
        unused = [key for key in values if key not in ("temperature", "seed", "max_tokens", "logprobs")]
        if unused:
            _refuse(f"{unused[0]} has no meaning with choices")
        return select(name, choices, values.get("temperature", 0.0), choices_method, seed=values.get("seed"))
    if choices_method is not None:
        _refuse("choices_method needs choices")
    if constraint is not None and not isinstance(constraint, Constraint):
        _refuse(f"constraint={shown(constraint)}: must be a Constraint")
    if tools is None and (tool_choice is not None or max_rounds is not None):
        _refuse(f"{'tool_choice' if tool_choice is not None else 'max_rounds'} needs tools")
    if separate_reasoning is not None and not isinstance(separate_reasoning, bool):
        _refuse(f"separate_reasoning={shown(separate_reasoning)}: must be True or False")
    taken: tuple[ToolFunction, ...] = ()
    read = Read() if separate_reasoning else None
    if tools is not None:
        taken = tool_list(tools)
        if n not in (None, 1):
            _refuse(f"n={shown(n)}: with tools there is one sample; use s.fork")
        if max_rounds is not None and (
            isinstance(max_rounds, bool) or not isinstance(max_rounds, int) or max_rounds < 1
        ):
            _refuse(f"max_rounds={shown(max_rounds)}: must be at least 1")
        read = first_read(
            taken, "auto" if tool_choice is None and taken else tool_choice or "none", parallel_tool_calls
        )
        read = replace(read, reasoning=separate_reasoning is not False)
    spec = None
    try:
        if regex is not None:
            constraint = Constraint.regex(regex)
        elif json_schema is not None:
            constraint = Constraint.json_schema(json_schema)
        elif grammar is not None:
            constraint = Constraint.grammar(grammar, grammar_syntax)  # type: ignore[arg-type]
        elif substring is not None:
            constraint = Constraint.substring(substring)
        elif given["type"] is not None:
            spec = spec_of(given["type"])
            constraint = spec.constraint
    except InvalidRequest as error:
        raise UsageError(str(error), author_line()) from error
    return GenExpr(name, values, constraint, spec, heal, taken, max_rounds or 8, read)


def gen_int(name: str | None = None, max_tokens: int | None = None, **options: Any) -> GenExpr | SelectExpr:
    """``gen(type=int)``."""
    return gen(name, max_tokens, type=int, **options)


def gen_string(name: str | None = None, max_tokens: int | None = None, **options: Any) -> GenExpr | SelectExpr:
    """``gen(type=str)``: a string in quotes; the value is what stands between them."""
    return gen(name, max_tokens, type=str, **options)


def select(
    name: str | None = None,
    choices: Sequence[Any] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | str | None = None,
    *,
    seed: int | None = None,
) -> SelectExpr:
    """Append one of several texts: the one the model finds likeliest.

    Args:
        choices: the texts; one may begin another, and one may be empty.
        temperature: above 0: sampled by the scores.
        choices_method: ``token_length_normalized`` (the default), ``greedy_token_selection``,
            ``unconditional_likelihood_normalized`` or ``total_logprob``; or its name.

    ``s.meta(name)`` has the scores, log-probabilities, probabilities and the confidence.

    Raises:
        UsageError: no choices, two that are equal, something that is no text, an unknown method.
    """
    check_name(name)
    if temperature is None:
        temperature = 0.0
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 <= temperature <= 100:
        _refuse(f"temperature={shown(temperature)}: must be a number from 0 to 100")
    if seed is not None:
        check_seed(seed)
    if isinstance(choices, (str, bytes)) or not isinstance(choices, Iterable):
        _refuse(f"choices={shown(choices)}: must be a list of texts")
    taken = tuple(choices)
    if not taken:
        _refuse("choices=[]: must hold at least one text")
    for i, choice in enumerate(taken):
        if not isinstance(choice, str) and not hasattr(choice, "as_parts"):
            _refuse(f"choices[{i}]={shown(choice)}: must be a text")
    if len(set(map(str, taken))) < len(taken):
        twice = Counter(map(str, taken)).most_common(1)[0][0]
        _refuse(f"choices has {shown(str(twice))} twice")
    try:
        method = token_length_normalized if choices_method is None else method_of(choices_method)
    except InvalidRequest as error:
        raise UsageError(str(error), author_line()) from error
    return SelectExpr(name, taken, method, temperature, seed)


def system(expr: Any = None) -> ExprList:
    """A system message."""
    return _message("system", expr)


def user(expr: Any = None) -> ExprList:
    """A user's message."""
    return _message("user", expr)


def assistant(expr: Any = None) -> ExprList:
    """A message of the model, written by the author or generated: ``assistant(gen("answer"))``."""
    return _message("assistant", expr)


def system_begin() -> RoleBegin:
    return RoleBegin("system")


def system_end() -> RoleEnd:
    return RoleEnd("system")


def user_begin() -> RoleBegin:
    return RoleBegin("user")


def user_end() -> RoleEnd:
    return RoleEnd("user")


def assistant_begin() -> RoleBegin:
    return RoleBegin("assistant")


def assistant_end() -> RoleEnd:
    return RoleEnd("assistant")


def image(*_: Any, **__: Any) -> NoReturn:
    """Not available: the models of this runtime read text only."""
    _refuse("image: the models of this runtime are text-only; leave the image out or describe it in words")


def video(*_: Any, **__: Any) -> NoReturn:
    """Not available: the models of this runtime read text only."""
    _refuse("video: the models of this runtime are text-only; leave the video out or describe it in words")


def sampling_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options under the names of ``SamplingParams``; what is ``None`` is left out.

    Raises:
        UsageError: an unknown name, with the nearest valid one.
    """
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name == "max_new_tokens":
            name = "max_tokens"
        elif name in ("stop_regex", "logprob_start_len", "return_text_in_logprobs"):
            if value in (None, False):
                continue
            _refuse(f"{name}: is not available here; see the differences to SGLang in the documentation")
        elif name not in PARAMS:
            _refuse(f"{name}: no such parameter{nearest(name, [*PARAMS, *_ALSO])}")
        if value is not None:
            values[name] = value
    return values


def _message(role: str, expr: Any) -> ExprList:
    if expr is None:
        _refuse(f"{role}() needs what the message says; or use {role}_begin() and {role}_end(), or `with s.{role}():`")
    return ExprList((RoleBegin(role), *_items(expr), RoleEnd(role)))


def _items(value: Any) -> tuple[Any, ...]:
    return value.items if isinstance(value, ExprList) else (value,)


def check_name(name: Any, needed: bool = False) -> None:
    """Raises UsageError: this is no name of a variable."""
    if (name is not None or needed) and (not isinstance(name, str) or not name):
        _refuse(f"name={shown(name)}: must be a non-empty string")


def check_seed(seed: Any) -> None:
    """Raises UsageError: nothing can be drawn from this."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        _refuse(f"seed={shown(seed)}: must be an integer of at most 64 bits")


def _called(expr: Expr) -> str:
    """How an expression was written, about."""
    if isinstance(expr, ExprList):
        return " + ".join(_called(item) if isinstance(item, Expr) else shown(item) for item in expr.items[:5])
    kind = {GenExpr: "gen", SelectExpr: "select"}.get(type(expr), type(expr).__name__)
    name = getattr(expr, "name", None)
    return f"{kind}({shown(name) if name else ''})"


def _refuse(problem: str) -> NoReturn:
    raise UsageError(problem, author_line())
