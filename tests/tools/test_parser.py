"""The parser of answers: recorded ones give what is in them however they are cut, and hostile ones cost no more than their length."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from unittest import mock

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
    scan,
)
from radixrt.tools.formats import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, PYTHONIC, TOOL_FORMATS
from radixrt.tools.objects import is_object, members
from radixrt.tools.parser import MOST_BEGUN, MOST_TEXTS
from radixrt.tools.reasoning import THINK
from radixrt.tools.scan import Brackets
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
    "zigzag of four": (HERMES, '<tool_call>{"name": "add", "arguments": {"a": [', "[[[[]]]],"),
    "zigzag of two kinds": (HERMES, '<tool_call>{"name": "add", "arguments": {"a": [', '[{"a":[{"a":[]}]}],'),
    "zigzag of strings": (HERMES, '<tool_call>{"name": "add", "arguments": {"a": [', '[[[[""]]]],'),
    "steps": (HERMES, '<tool_call>{"name": "add", "arguments": {"a": [', "[1," * 40 + "1" + "]" * 40 + ","),
    "long calls": (
        HERMES,
        "",
        '<tool_call>{"name": "add", "arguments": {"a": [' + "[[[[]]]]," * 99 + "1]}}</tool_call>",
    ),
    "backslashes outside": (HERMES, "", '<tool_call>{"name": "add", "arguments": [\\"x"'),
    "half surrogate pairs": (HERMES, '<tool_call>{"name": "add", "arguments": {"a": ["', "\\ud83d"),
    "python escapes": (PYTHONIC, "", "[add(a=[" + "'\\x41'," * 99 + "1])]"),
    "python escapes that are none": (PYTHONIC, "", "[add(a=[" + "'\\d'," * 99 + "1])]"),
    "python quotes": (PYTHONIC, "[add(a=[", "'\"',"),
    "python both quotes": (PYTHONIC, "[add(a=[", "'a',\"b\","),
    "python tuples": (PYTHONIC, "[add(a=[", "(1,),"),
    "python names": (PYTHONIC, "[add(", "a=1,"),
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


BRACKETS = st.lists(
    st.sampled_from(
        [
            "[",
            "]",
            "{",
            "}",
            "(",
            ")",
            '"',
            "'",
            "\\",
            "x",
            "é",
            "[[[[",
            "]]]]",
            '"x"',
            "'\"'",
            '["',
            '"\\""',
            '"\\\\"',
            "x" * 50,
        ]
    ),
    max_size=120,
)


def followed(python: bool, text: str, size: int, block: int = 0) -> tuple[str, int, int]:
    """The state, where it stopped, and the depth; read in pieces of ``size``, and in blocks from ``block`` characters on, or in none."""
    brackets, at = Brackets(python), 0
    brackets._seen, brackets._size = (10**9, block) if block else (-(10**9), 0)
    with mock.patch.object(scan, "_SHORT", 0):
        for end in [*range(size, len(text), size), len(text)]:
            at = brackets.feed(text[:end], at)
            if brackets.state != "open":
                break
    return brackets.state, at, brackets.depth if brackets.state == "open" else 0


@settings(max_examples=600, deadline=None)
@given(st.booleans(), BRACKETS, st.integers(1, 60), st.integers(1, 60), st.sampled_from([0, 200, 511, 520]))
def test_blocks_find_what_marks_one_by_one_find(
    python: bool, parts: list[str], size: int, block: int, deep: int
) -> None:
    text = "[" + "[" * deep + "".join(parts)
    one = followed(python, text, 10**9)
    assert followed(python, text, 10**9, block) == one == followed(python, text, size, block)
    assert followed(python, text, 10**9, 10**9) == one


JSON_TEXTS = st.lists(
    st.sampled_from(["{", "}", '"a"', ":", ",", "1", "[", "]", "-0.5e1", "NaN", "01", "\\", '"', "\\ud800", "\\u00e9", "\\u12", " ", "null", "\ufdd0"]),
    max_size=12,
)  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(JSON_TEXTS, st.sampled_from(["", '"', '"x']))
def test_objects_are_those_of_json(parts: list[str], string: str) -> None:
    """``json`` is the oracle; the values, put together again, are what was read."""
    text = '{"a":' + string + "".join(parts) + ('"}' if string else "}")
    try:
        value = json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        value = None
    found = members(text)
    assert is_object(text) == (found is not None)
    if "\\ud800" not in text or "\ufdd0" not in text:  # half a pair is known beside all that are characters
        assert (found is not None) == isinstance(value, dict)
    if found is not None:
        assert {name: json.loads(one) for name, one in found.items()} == value


def test_a_call_of_too_many_texts_is_text() -> None:
    for count, calls in ((MOST_TEXTS - 1, 1), (MOST_TEXTS, 0)):
        text = "[add(a=[" + "'x'," * count + "])]"
        parts = parsed(PYTHONIC, None, [text])
        assert sum(isinstance(part, CallBegin) for part in parts) == calls
        assert calls or "".join(part.text for part in parts if isinstance(part, Content)) == text


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}', {"a": 1}),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}, ', {"a": 1}),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}, "id": "x', {"a": 1}),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"', {"a": 1}),
        ('<tool_call>{"name": "add", "arguments": {"a": 1', None),
        ('<tool_call>{"name": "add"', None),
        ('<tool_call>{"name": "add", "arguments": ', None),
    ],
)
def test_a_call_that_lacks_only_its_end(text: str, arguments: dict[str, int] | None) -> None:
    calls = answer_of(parsed(HERMES, None, [text])).calls
    assert [json.loads(call.arguments) for call in calls] == ([] if arguments is None else [arguments])
