"""Jobs in and rows out: what a line of an input file asks for, and the JSON object that answers it.

Invariants: a line that cannot be used becomes a job with an error that says why, never an exception; rows hold only
what JSON can hold.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, AnyStr

from radixrt.cli.constraints import SHORTHANDS, take_constraint
from radixrt.errors import InvalidRequest, shown, unknown_field
from radixrt.request import RequestOutput, SamplingParams

Prompt = str | list[int] | list[dict[str, Any]]
MAX_LINE = 2**26  # bytes: more than any context holds
_MAX_SKIPPED = 16  # times MAX_LINE
_MAX_DIGITS = 1000
_PROMPTS = ("prompt", "messages", "token_ids")
_FIELDS = (*(field.name for field in dataclasses.fields(SamplingParams)), *SHORTHANDS)


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to answer, or the reason why it cannot be answered. ``where`` names its place for a person."""

    index: int
    where: str
    line: int | None
    id: str | int | None
    prompt: Prompt | None
    params: SamplingParams | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Template:
    """What the command line says about every prompt: sampling parameters, and whether plain text becomes a chat."""

    params: Mapping[str, Any]
    chat: bool = False
    system: str | None = None

    def wrap(self, text: str) -> Prompt:
        if not self.chat:
            return text
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": text}]


def text_job(index: int, where: str, line: int | None, text: str, template: Template) -> Job:
    """A job of plain text. The template's parameters are valid: they were checked before anything was read."""
    return Job(index, where, line, None, template.wrap(text), SamplingParams(**template.params))


def json_job(index: int, where: str, line: int, text: str, template: Template) -> Job:
    """A job of one JSON object: ``prompt``, ``messages`` or ``token_ids``; ``id``; any sampling parameter;
    ``json_schema``, ``regex``, ``choices`` and ``substring`` in place of ``constraint``."""
    name: str | int | None = None
    try:
        record = _parse(text)
        identity = record.pop("id", None)
        if isinstance(identity, bool) or not isinstance(identity, (str, int, type(None))):
            raise InvalidRequest("id", f"={shown(identity)}: must be a string or an integer")
        name = identity
        prompt = _prompt(record, template)
        for field in record:
            if field not in _FIELDS:
                raise unknown_field("the line", field, (*_PROMPTS, "id", *_FIELDS))
        if isinstance(record.get("logit_bias"), dict):
            record["logit_bias"] = _token_keys(record["logit_bias"])
        constraint = take_constraint(record)
        return Job(index, where, line, name, prompt, SamplingParams(**{**template.params, **record, **constraint}))
    except InvalidRequest as error:
        return Job(index, where, line, name, None, None, str(error))


def failed_job(index: int, where: str, line: int | None, error: str) -> Job:
    return Job(index, where, line, None, None, None, error)


def bounded_lines(file: IO[AnyStr], most: int = MAX_LINE) -> Iterator[tuple[int, AnyStr | None]]:
    """The lines of a file, numbered from 1; ``None`` for one longer than ``most``, of which no more is ever held.

    The rest of such a line is passed over; after ``_MAX_SKIPPED`` such pieces there is no end in sight, and reading ends.
    """
    number = 0
    while line := file.readline(most):
        number += 1
        if len(line) < most or line[-1:] in ("\n", b"\n"):
            yield number, line
            continue
        yield number, None
        for _ in range(_MAX_SKIPPED):
            rest = file.readline(most)
            if len(rest) < most or rest[-1:] in ("\n", b"\n"):
                break
        else:
            return


def read_lines(file: IO[bytes]) -> Iterator[tuple[int, str, str | None]]:
    """Number the lines from 1 and decode them; blank lines are left out. The last element: why a line cannot be used."""
    for number, raw in bounded_lines(file):
        if raw is None:
            yield number, "", f"is longer than {MAX_LINE} bytes"
            continue
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        try:
            text = raw.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            yield number, "", "is not UTF-8"
            continue
        if text.strip():
            yield number, text, None


def output_row(job: Job, output: RequestOutput) -> dict[str, Any]:
    """The JSON object of a finished request: text, token ids, why it ended, and every figure. Times are seconds."""
    row = _head(job)
    row.update(
        text=output.text,
        token_ids=list(output.token_ids),
        finish_reason=str(output.finish_reason),
        stop_reason=output.stop_reason,
    )
    if output.logprobs is not None:
        row["logprobs"] = [dataclasses.asdict(position) for position in output.logprobs]
    if len(output.samples) > 1:
        row["samples"] = [
            {**dataclasses.asdict(sample), "finish_reason": str(sample.finish_reason)} for sample in output.samples
        ]
    if output.prompt_logprobs is not None:
        row["prompt_logprobs"] = [
            None if position is None else dataclasses.asdict(position) for position in output.prompt_logprobs
        ]
    row.update(
        prompt_tokens=output.prompt_tokens,
        cached_tokens=output.cached_tokens,
        computed_tokens=output.computed_tokens,
        recomputed_tokens=output.recomputed_tokens,
        completion_tokens=output.completion_tokens,
        forced_tokens=output.forced_tokens,
        preemptions=output.preemptions,
        queue_time=round(output.queue_time, 6),
        prefill_time=round(output.prefill_time, 6),
        decode_time=round(output.decode_time, 6),
        error=output.error,
    )
    return row


def error_row(job: Job, error: str) -> dict[str, Any]:
    """The JSON object of a request that could not be made."""
    return {**_head(job), "finish_reason": "error", "error": error}


def _head(job: Job) -> dict[str, Any]:
    line = {} if job.line is None else {"line": job.line}
    return {"index": job.index, **line, "id": job.id}


def _parse(text: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise InvalidRequest(twice, "stands twice in one object")
        return record

    try:
        record = json.loads(text, object_pairs_hook=unique, parse_int=_integer)
    except InvalidRequest:
        raise
    except RecursionError:
        raise InvalidRequest("line", "nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest("line", f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise InvalidRequest("line", f"must be a JSON object, not {type(record).__name__}")
    return record


def _prompt(record: dict[str, Any], template: Template) -> Prompt:
    """Take the prompt out of the record."""
    given = [name for name in _PROMPTS if name in record]
    if len(given) != 1:
        found = f"has {' and '.join(given)}" if given else "has none"
        close = "" if given else next((f" ({hint})" for hint in map(_misspelt, record) if hint), "")
        raise InvalidRequest("line", f"needs exactly one of prompt, messages, token_ids; it {found}{close}")
    value = record.pop(given[0])
    if given[0] == "prompt":
        if not isinstance(value, str):
            raise InvalidRequest("prompt", f"must be a string, not {type(value).__name__}")
        return template.wrap(value)
    if not isinstance(value, list) or not value:
        raise InvalidRequest(given[0], "must be a list of at least one element")
    kind, what = (int, "integers") if given[0] == "token_ids" else (dict, "objects with role and content")
    for position, element in enumerate(value):
        if isinstance(element, bool) or not isinstance(element, kind):
            raise InvalidRequest(f"{given[0]}[{position}]", f"must hold {what}, not {type(element).__name__}")
    return value


def _misspelt(name: str) -> str:
    if name in _FIELDS:
        return ""
    message = str(unknown_field("", name, (*_PROMPTS, *_FIELDS)))
    return f"{name}?{message.split(';', 1)[1]}" if "did you mean" in message else ""


def _integer(digits: str) -> int | float:
    """An integer as JSON writes it; one that Python would not read is infinite, and so refused by the field's name."""
    return int(digits) if len(digits) <= _MAX_DIGITS else math.copysign(math.inf, -1 if digits.startswith("-") else 1)


def _token_keys(bias: Mapping[str, Any]) -> dict[int, Any]:
    """JSON's keys are strings; those of ``logit_bias`` are token ids."""
    biases: dict[int, Any] = {}
    for key, value in bias.items():
        if not re.fullmatch(r"-?[0-9]{1,20}", key):
            raise InvalidRequest(f"logit_bias[{shown(key)}]", "the key must be a token id")
        if int(key) in biases:  # "5" and "05"
            raise InvalidRequest("logit_bias", f" has the token {int(key)} twice")
        biases[int(key)] = value
    return biases
