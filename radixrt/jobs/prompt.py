"""Layout owns what a job says to the model: everything that is the same for all documents first, then the document.

    |-- system: task, schema --|-- examples: user, assistant, ... --|-- user: document --|-- answer --|-- its error --|
    same for every document                                                   its own                retry

Invariants: prompts of one layout differ only behind ``Layout.shared()`` and the words before the document; a retry
begins with all of the prompt and the answer it is about. A document stands between words of ours, so that no template
trims it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.grammar.constraint import Choice, Regex
from radixrt.jobs.target import Target, resolved
from radixrt.jobs.verify import problem_of

if TYPE_CHECKING:
    from radixrt.jobs.backends import Answer

MOST_EXAMPLES = 1000
MOST_BYTES = 16 * 2**20  # of a file of examples
_MOST_ERROR = 1000  # characters of an error that a retry shows

_JSON = (
    "Extract what the JSON Schema below describes from the document that the user gives. Answer with one JSON value that "
    "is valid under the schema, and nothing else. Copy values as the document writes them; where it does not tell a "
    "value, use null if the schema allows it."
)
_REGEX = (
    "Find what is asked for in the document that the user gives. Answer with a text that matches the regular expression "
    "below, and nothing else."
)
_CHOICE = (
    "Classify the document that the user gives. Answer with one of the choices below, exactly as written, and nothing "
    "else."
)
_BEFORE = "Document:\n\n"
_AFTER = "\n\nEnd of the document. Answer now."


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. ``token_ids``: of an answer, as the model generated it."""

    role: str
    content: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat that the model is to continue. ``shared``: how many of its first turns are those of every other prompt
    of the job;
    ``before``: the words that the next turn begins with in all of them."""

    turns: tuple[Turn, ...]
    shared: int = 0
    before: str = ""

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": turn.role, "content": turn.content} for turn in self.turns]

    def then(self, answer: Answer | str, question: str) -> Prompt:
        """The chat with an answer, and what the user says to it."""
        given = (
            Turn("assistant", answer) if isinstance(answer, str) else Turn("assistant", answer.text, answer.token_ids)
        )
        return Prompt((*self.turns, given, Turn("user", question)), self.shared, self.before)


@dataclass(frozen=True, slots=True)
class Example:
    """A document and what is extracted from it, as the model should write it."""

    text: str
    answer: str


class Layout:
    """The prompts of one job.

    Args:
        prompt: what to do, in place of our own words; the schema, regex or choices follow it.
        examples: a JSONL file of ``{"text", "value"}``, or such mappings.

    Raises:
        InvalidRequest: an example that is none, or that does not meet the target; names it.
    """

    def __init__(
        self,
        target: Target,
        *,
        prompt: str | None = None,
        examples: str | Path | Iterable[Mapping[str, Any]] | None = None,
    ) -> None:
        if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
            raise InvalidRequest("prompt", f"={shown(prompt)}: must be a text that says what to extract")
        spec = target.constraint.spec
        if isinstance(spec, Choice):
            task, form = _CHOICE, "Choices:\n" + "\n".join(f"- {choice}" for choice in spec.choices)
        elif isinstance(spec, Regex):
            task, form = _REGEX, f"Regular expression: {spec.pattern}"
        else:
            task, form = _JSON, "JSON Schema: " + _written(target.schema)
        _check_text("prompt", prompt or "")
        if target.schema is not None:  # choices and regexes are checked where they are made
            _check_text("schema", form)
        self.examples = () if examples is None else read_examples(examples, target)
        turns = [Turn("system", f"{(prompt or task).strip()}\n\n{form}")]
        for example in self.examples:
            turns += [Turn("user", _framed(example.text)), Turn("assistant", example.answer)]
        self._shared = tuple(turns)

    @property
    def digest(self) -> str:
        """Stable, and another one wherever the prompts of equal documents are others."""
        said = [[turn.role, turn.content] for turn in (*self._shared, Turn("user", _framed("")))]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def shared(self) -> tuple[Turn, ...]:
        """The turns that every prompt begins with."""
        return self._shared

    def document(self, text: str) -> Prompt:
        """The prompt of a document."""
        return Prompt((*self._shared, Turn("user", _framed(text))), len(self._shared), _BEFORE)

    def retry(self, text: str, answer: Answer | str, error: str) -> Prompt:
        """The prompt of a document whose answer was wrong: the last one, the answer and what is wrong with it."""
        told = f"This answer is not right: {error[:_MOST_ERROR]}"
        order = "Correct it. Answer in the same form as before, and with nothing else."
        return self.document(text).then(answer, f"{told}\n\n{order}")


def read_examples(source: str | Path | Iterable[Mapping[str, Any]], target: Target) -> tuple[Example, ...]:
    """The examples of a JSONL file, or of mappings, each checked against the target.

    Raises:
        InvalidRequest: names the example at fault.
    """
    examples: list[Example] = []
    for where, item in _from_file(source) if isinstance(source, (str, Path)) else _from_items(source):
        if len(examples) == MOST_EXAMPLES:
            raise InvalidRequest("examples", f"are more than {MOST_EXAMPLES}")
        examples.append(_example(where, item, target))
    return tuple(examples)


def _from_items(items: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, Any]]:
    if isinstance(items, Mapping) or not isinstance(items, Iterable):
        raise InvalidRequest("examples", f"={shown(items)}: must be a file, or a list of {{'text', 'value'}}")
    return ((f"examples[{i}]", item) for i, item in enumerate(items))


def _from_file(path: str | Path) -> Iterable[tuple[str, Any]]:
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest("examples", f"={shown(str(path))}: is not UTF-8 (byte {error.start})") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequest("examples", f"={shown(str(path))}: cannot be read ({reason})") from None
    if len(data) > MOST_BYTES:
        raise InvalidRequest("examples", f"={shown(str(path))}: is larger than {MOST_BYTES} bytes")
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"examples line {number}"
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(where, f"is not JSON ({shown(str(error))})") from None


def _example(where: str, item: Any, target: Target) -> Example:
    if not isinstance(item, Mapping):
        raise InvalidRequest(where, f"={shown(item)}: must be an object with text and value")
    for name in item:
        if name not in ("text", "value"):
            raise InvalidRequest(f"{where}.{name}", f"there is no such field{nearest(str(name), ('text', 'value'))}")
    for name in ("text", "value"):
        if name not in item:
            raise InvalidRequest(f"{where}.{name}", "is missing")
    if not isinstance(item["text"], str) or not item["text"].strip():
        raise InvalidRequest(f"{where}.text", f"={shown(item['text'])}: must be the text of a document")
    _check_text(f"{where}.text", item["text"])
    value = item["value"]
    if target.schema is None:
        if not isinstance(value, str):
            raise InvalidRequest(f"{where}.value", f"={shown(value)}: must be a string")
        answer = value
    else:
        try:
            answer = _written(_ordered(value, target.schema, target.schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{where}.value", f"is no JSON ({shown(str(error))})") from None
    try:
        problem = problem_of(target.constraint, answer) or target.check(target.parse(answer))
    except InvalidRequest as error:
        problem = str(error).removeprefix("answer: ")
    if problem:
        raise InvalidRequest(f"{where}.value", problem)
    return Example(item["text"], answer)


def _check_text(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise InvalidRequest(where, f"is not Unicode text: lone surrogate {half} at character {error.start}") from None


def _ordered(value: Any, schema: Any, root: Any) -> Any:
    """A value with its keys in the order in which the schema declares them, which is that of constrained outputs."""
    schema = resolved(schema, root)
    given = schema if isinstance(schema, dict) else {}
    if isinstance(value, Mapping):
        parts = given.get("properties")
        parts = parts if isinstance(parts, dict) else {}
        names = [*(name for name in parts if name in value), *(name for name in value if name not in parts)]
        return {name: _ordered(value[name], parts.get(name), root) for name in names}
    if isinstance(value, list):
        return [_ordered(item, given.get("items"), root) for item in value]
    return value


def _framed(text: str) -> str:
    return f"{_BEFORE}{text}{_AFTER}"


def _written(value: Any) -> str:
    """JSON as constrained outputs write it: without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
