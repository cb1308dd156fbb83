"""The parts that an answer is made of, in the order the model wrote them; what every dialect turns into its own events.

Invariants: calls are numbered from 0; between ``CallBegin(i)`` and ``CallEnd(i)`` come only ``CallArguments(i)``, at least one, whose
texts together are a JSON object.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thinks to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of the tool ``name`` begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of the call are complete."""

    index: int


Part: TypeAlias = Reasoning | Content | CallBegin | CallArguments | CallEnd


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call; ``arguments``: the JSON text of an object."""

    id: str
    name: str
    arguments: str

    def to_openai(self) -> dict[str, object]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Answer:
    """All the parts put together."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]


def joined(parts: Iterable[Part]) -> list[Part]:
    """The parts with neighbours of one kind made one: equal for every way the text was cut."""
    made: list[Part] = []
    texts: list[str] = []

    def close() -> None:
        if texts:
            last = made[-1]
            whole = "".join(texts)
            made[-1] = CallArguments(last.index, whole) if isinstance(last, CallArguments) else type(last)(whole)  # type: ignore[call-arg, arg-type]
            texts.clear()

    for part in parts:
        if isinstance(part, CallBegin | CallEnd):
            close()
            made.append(part)
            continue
        same = texts and type(made[-1]) is type(part) and getattr(made[-1], "index", 0) == getattr(part, "index", 0)
        if not same:
            close()
            made.append(part)
        texts.append(part.text)
    close()
    return made


def answer_of(parts: Iterable[Part]) -> Answer:
    """What is not streamed: the whole texts, and the whole calls."""
    content: list[str] = []
    reasoning: list[str] = []
    begun: dict[int, CallBegin] = {}
    arguments: dict[int, list[str]] = {}
    for part in parts:
        match part:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegin(index):
                begun[index], arguments[index] = part, []
            case CallArguments(index, text):
                arguments[index].append(text)
            case CallEnd():
                pass
    calls = tuple(Call(begin.id, begin.name, "".join(arguments[i])) for i, begin in sorted(begun.items()))
    return Answer("".join(content), "".join(reasoning), calls)
