"""The parser of answers: recorded ones give what is in them however they are cut, and hostile ones cost no more than their length."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.tools import (
    CallArguments,
    CallBegin,
    CallEnd,
    ChatParser,
    Content,
    Part,
    Reasoning,
    ReasoningFormat,
    ToolFormat,
    answer_of,
    joined,
)
from radixrt.tools.formats import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, PYTHONIC, TOOL_FORMATS
from radixrt.tools.parser import MOST_BEGUN
from radixrt.tools.reasoning import THINK
from tests.tools.recorded import OPEN, RECORDED, TOOLS, Recorded


def pieces(text: str, cuts: random.Random) -> Iterator[str]:
    most = cuts.choice((1, 2, 3, 5, 8, 20, 100))
    at = 0
    while at < len(text):
        step = cuts.randint(1, most)
        yield text[at : at + step]
        at += step


def parsed(format: ToolFormat | None, thinks: ReasoningFormat | None, chunks: Iterator[str] | list[str]) -> list[Part]:
    parser = ChatParser(format, thinks, TOOLS, request_id="request")
    parts: list[Part] = []
    for chunk in chunks:
        parts += parser.push(chunk)
    return joined(parts + parser.finish())


def checked(parts: list[Part]) -> None:
    """What every dialect relies on: calls numbered from 0, one at a time, with whole arguments."""
    begun = 0
    for i, part in enumerate(parts):
        if isinstance(part, CallBegin):
            assert part.index == begun
            begun += 1
            arguments = parts[i + 1]
            assert isinstance(arguments, CallArguments) and arguments.index == part.index
            assert isinstance(json.loads(arguments.text), dict)
            assert parts[i + 2] == CallEnd(part.index)
        elif isinstance(part, Content | Reasoning):
            assert part.text


@pytest.mark.parametrize("record", RECORDED, ids=lambda record: record.text[:30])
def test_recorded(record: Recorded) -> None:
    whole = parsed(record.format, record.thinks, [record.text])
    checked(whole)
    answer = answer_of(whole)
    assert answer.content == record.content
    assert answer.reasoning == record.reasoning
    assert tuple((call.name, json.loads(call.arguments)) for call in answer.calls) == record.calls


def test_there_are_fifty() -> None:
    assert len(RECORDED) >= 50
    assert {record.format.name for record in RECORDED if record.format} == set(TOOL_FORMATS)


@pytest.mark.parametrize("record", RECORDED, ids=lambda record: record.text[:30])
def test_a_thousand_ways_to_cut(record: Recorded) -> None:
    whole = parsed(record.format, record.thinks, [record.text])
    for seed in range(1000):
        assert parsed(record.format, record.thinks, pieces(record.text, random.Random(seed))) == whole, seed


FORMATS = st.sampled_from([None, *TOOL_FORMATS.values()])
WORDS = st.sampled_from(
    """<tool_call> </tool_call> [TOOL_CALLS] [ARGS] [add( add( <|python_tag|> <think> </think> {"name": {"name":"add","arguments": \n
    "parameters": { } [ ] ( ) " ' \\ \n ; = a a=1 {"a":1} True é "x" 1 , add""".split(" ")
)


@settings(max_examples=400, deadline=None)
@given(FORMATS, st.sampled_from([None, THINK, OPEN]), st.lists(WORDS, max_size=40), st.integers(0, 2**32))
def test_any_text_is_cut_any_way(
    format: ToolFormat | None, thinks: ReasoningFormat | None, words: list[str], seed: int
) -> None:
    text = "".join(words)
    whole = parsed(format, thinks, [text])
    checked(whole)
    assert parsed(format, thinks, pieces(text, random.Random(seed))) == whole
    assert parsed(format, thinks, list(text)) == whole
    kept = "".join(part.text for part in whole if isinstance(part, Content | Reasoning))
    if not any(
        isinstance(part, CallBegin) for part in whole
    ):  # nothing is lost but white space and the tags of thinking
        tags = "" if thinks is None else text
        for tag in ("<think>", "</think>"):
            tags = tags.replace(tag, "")
        assert "".join(kept.split()) == "".join((tags if thinks else text).split()) or (
            thinks and len(kept) <= len(text)
        )


def test_ids_are_made_from_the_request() -> None:
    text = RECORDED[2].text
    assert RECORDED[2].format is HERMES
    first, second = (answer_of(parsed(HERMES, None, [text])).calls for _ in range(2))
    assert first == second and first[0].id != first[1].id and first[0].id.startswith("call_")
    other = ChatParser(HERMES, None, TOOLS, request_id="other")
    assert answer_of(other.push(text) + other.finish()).calls[0].id != first[0].id


def test_text_is_given_as_soon_as_it_is_no_marker() -> None:
    parser = ChatParser(HERMES, THINK, TOOLS)
    assert parser.push("<thi") == []
    assert parser.push("nk>why") == [Reasoning("why")]
    assert parser.push("? <") == [Reasoning("?")]
    assert parser.push("/think>Well, <too") == [Content("Well,")]
    assert parser.push("l> is") == [Content(" <tool> is")]


HOSTILE: dict[str, tuple[ToolFormat, str, str]] = {
    "begin tags": (HERMES, "", "<tool_call>"),
    "begin tags in lines": (HERMES, "", "<tool_call>\n"),
    "half tags": (HERMES, "", "<tool_cal"),
    "open braces": (HERMES, "<tool_call>", "{"),
    "open lists": (HERMES, '<tool_call>{"name": "add", "arguments": {"a": ', "["),
    "zigzag": (HERMES, '<tool_call>{"name": "add", "arguments": {"a": ', "[[[[[[]]]]]]"),
    "deep zigzag": (HERMES, '<tool_call>{"name": "add", "arguments": {"a": ', "[" * 12 + "]" * 12),
    "flat zigzag": (HERMES, '<tool_call>{"name": "add", "arguments": {"a": ', "[]"),
    "quotes": (HERMES, '<tool_call>{"name": ', '"'),
    "backslashes": (HERMES, '<tool_call>{"name": "', "\\"),
    "escaped quotes": (HERMES, '<tool_call>{"name": "', '\\"'),
    "end tags in a string": (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "', "</tool_call>"),
    "refused calls": (HERMES, "", '<tool_call>{"name": "x", "arguments": {}}</tool_call>'),
    "calls": (HERMES, "", '<tool_call>{"name": "add", "arguments": {}}</tool_call>'),
    "white space": (HERMES, "", " "),
    "white space in a call": (HERMES, "<tool_call>", " "),
    "angles": (HERMES, "", "<"),
    "names": (LLAMA, "", '{"name":'),
    "calls of llama": (LLAMA, "", '{"name": "add", "parameters": {}}; '),
    "lists": (MISTRAL, "", "[TOOL_CALLS]["),
    "headers": (MISTRAL_ARGS, "", "[TOOL_CALLS]add[ARGS]"),
    "headers and braces": (MISTRAL_ARGS, "", "[TOOL_CALLS]add[ARGS]{"),
    "python": (PYTHONIC, "", "[add("),
    "python rounds": (PYTHONIC, "[add(a=", "("),
    "python strings": (PYTHONIC, "[add(a=[", "'','"),
    "python list": (PYTHONIC, "[add(a=1)", ", add(a=1)"),
    "python calls": (PYTHONIC, "", "[add(a=1)]"),
}


def steps(format: ToolFormat, text: str, size: int) -> int:
    """Lines that the interpreter runs, and characters that ``push`` gets or keeps, for a text in pieces of ``size``."""
    count = 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    parser = ChatParser(format, THINK, TOOLS)
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        for chunk in chunks:
            parser.push(chunk)
            count += len(chunk) + len(parser._held)
            assert len(parser._held) <= 400
        parser.finish()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("size", [7, 10**9])
def test_hostile_text_costs_what_its_length_says(name: str, size: int) -> None:
    format, begin, again = HOSTILE[name]
    length = 6_000
    short, long = (
        steps(format, begin + again * (n // len(again)), size if size == 7 else n) for n in (length, 2 * length)
    )
    assert long <= 2.2 * short + 2_000


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_not_lost(name: str) -> None:
    format, begin, again = HOSTILE[name]
    text = begin + again * (20_000 // len(again))
    parts = parsed(format, None, [text])
    checked(parts)
    calls = sum(isinstance(part, CallBegin) for part in parts)
    assert calls <= MOST_BEGUN
    if not calls:
        assert "".join(part.text for part in parts if isinstance(part, Content)) == text
