"""Structural tags: checked against a reader that scans the text from left to right, one character at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest
from radixrt.grammar.compile import to_grammar
from radixrt.grammar.constraint import Constraint, Tag
from tests.grammar.naive import accepts

Tags = Sequence[tuple[str, Sequence[str], str]]  # begin, the texts that may follow, end


def reads(text: str, tags: Tags, triggers: Sequence[str], at_least_one: bool, stop_after_first: bool) -> bool:
    """Whether a reader understands ``text``: at the first trigger to be complete, a tag must stand; then it goes on behind it."""

    def rest(at: int, count: int) -> bool:
        if stop_after_first and count:
            return at == len(text)
        for end in range(at + 1, len(text) + 1):
            complete = [word for word in triggers if text[at:end].endswith(word)]
            if complete:
                return any(
                    rest(end - len(word) + len(whole), count + 1)
                    for word in complete
                    for begin, contents, close in tags
                    for content in contents
                    if begin.startswith(word) and text.startswith(whole := begin + content + close, end - len(word))
                )
        return count > 0 or not at_least_one

    return rest(0, 0)


def constraint(tags: Tags, triggers: Sequence[str] | None, at_least_one: bool, stop_after_first: bool) -> Constraint:
    return Constraint.structural_tags(
        [(begin, Constraint.choice(contents), end) for begin, contents, end in tags],
        triggers=triggers,
        at_least_one=at_least_one,
        stop_after_first=stop_after_first,
    )


CASES: list[tuple[Tags, list[str] | None]] = [
    ([("<a>", ["b", "ab"], "</a>")], None),
    ([("ab", ["a", ""], "b")], None),
    ([("aab", ["b"], "")], None),
    ([("ab", ["b"], "a"), ("b", ["a"], "b")], ["ab", "b"]),
    ([("aba", ["b"], "a"), ("abb", ["", "a"], "b"), ("ba", ["a"], "")], ["ab", "ba"]),
    ([("ab", ["a"], "")], ["a"]),
    ([("aé", ["b"], "é")], ["aé"]),
    ([("a", ["b"], "a"), ("ba", ["b"], "b")], ["a", "ba"]),
]


@pytest.mark.parametrize("at_least_one", [False, True])
@pytest.mark.parametrize("stop_after_first", [False, True])
@pytest.mark.parametrize("tags, triggers", CASES, ids=range(len(CASES)))
def test_every_short_text(tags: Tags, triggers: list[str] | None, at_least_one: bool, stop_after_first: bool) -> None:
    grammar = to_grammar(constraint(tags, triggers, at_least_one, stop_after_first))
    words = triggers or [begin for begin, _, _ in tags]
    seen = set()
    pieces = ["a", "b", "é"] if "<" not in words[0] else ["<a>", "</a>", "b", "a", "<"]
    for n in range(7 if len(pieces) == 3 else 5):
        for chars in itertools.product(pieces, repeat=n):
            text = "".join(chars)
            expected = reads(text, tags, words, at_least_one, stop_after_first)
            assert accepts(grammar, text) == expected, text
            seen.add(expected)
    assert seen == {True, False}


@given(st.data())
def test_random_tags(data: st.DataObject) -> None:
    short = st.text("ab<", min_size=1, max_size=3)
    triggers = data.draw(st.lists(short, min_size=1, max_size=3, unique=True))
    begins = [word + data.draw(st.text("ab<", max_size=2)) for word in triggers]
    tags = [(begin, ["a", "b<"], data.draw(st.sampled_from(["", "<", "b"]))) for begin in begins]
    flags = data.draw(st.tuples(st.booleans(), st.booleans()))
    try:
        made = constraint(tags, triggers, *flags)
    except InvalidRequest as error:
        assert "can never be written" in str(error)
        return
    grammar = to_grammar(made)
    for text in data.draw(st.lists(st.text("ab<", max_size=12), min_size=5, max_size=15)):
        assert accepts(grammar, text) == reads(text, tags, triggers, *flags), text
        whole = text[:2] + tags[0][0] + "a" + tags[0][2] + text[2:]
        assert accepts(grammar, whole) == reads(whole, tags, triggers, *flags), whole


def test_free_text_is_unicode() -> None:
    grammar = to_grammar(constraint([("<", ["x"], ">")], None, False, False))
    for good in ("", "é", "日本 😀", "a<x>é"):
        assert accepts(grammar, good)
    for bad in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf", b"\xc3<x>", b"\xf4\x90\x80\x80"):
        assert not accepts(grammar, bad)


def test_contents_are_whole_constraints() -> None:
    inner = Constraint.structural_tags([("[", Constraint.regex("[0-9]+"), "]")], at_least_one=True)
    grammar = to_grammar(
        Constraint.structural_tags([Tag("<a>", Constraint.regex("a+"), "</a>"), Tag("<n>", inner, "</n>")])
    )
    assert accepts(grammar, "x<a>aa</a>y<n>no [12] yes</n>")
    assert not accepts(grammar, "x<a></a>")
    assert not accepts(grammar, "<n>none</n>")


BAD = [
    (lambda: Constraint.structural_tags([]), "structural_tags=[]: must hold at least one tag"),
    (lambda: Constraint.structural_tags("x"), "must be a list of tags, not str"),  # type: ignore[arg-type]
    (
        lambda: Constraint.structural_tags([("", Constraint.json_object(), "")]),
        "structural_tags[0].begin='': must not be empty",
    ),
    (lambda: Constraint.structural_tags([("a", "b", "c")]), "structural_tags[0].constraint: must be a Constraint"),  # type: ignore[list-item]
    (lambda: Constraint.structural_tags([("a", Constraint.literal(""), "")], triggers=[]), "triggers=[]"),
    (lambda: Constraint.structural_tags([("a", Constraint.literal(""), "")], triggers=[""]), "an empty string"),
    (
        lambda: Constraint.structural_tags([("a", Constraint.literal(""), "")], triggers=["b"]),
        "no trigger is the beginning",
    ),
    (
        lambda: Constraint.structural_tags([("a", Constraint.literal(""), "")], triggers=["a", "c"]),
        "triggers='c': no tag begins",
    ),
    (
        lambda: Constraint.structural_tags([("xab", Constraint.literal(""), ""), ("a", Constraint.literal(""), "")]),
        "structural_tags[0].begin='xab' can never be written: its trigger 'xab' contains the trigger 'a'",
    ),
    (
        lambda: Constraint.structural_tags([{"begin": "a", "schem": {}}]),
        "did you mean 'schema'",
    ),
    (
        lambda: Constraint.structural_tags([("a" * 30_000, Constraint.literal(""), "")]),
        "triggers: hold over 20,000 characters",
    ),
    (
        lambda: Constraint.structural_tags([(f"<{i}>", Constraint.literal(""), "") for i in range(1001)]),
        "structural_tags: holds over 1,000 tags",
    ),
    (lambda: Constraint.structural_tags([{"begin": "a"}]), "must have either constraint or schema"),
]


@pytest.mark.parametrize("make, says", BAD, ids=range(len(BAD)))
def test_bad_tags_are_refused_when_they_are_made(make, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidRequest) as raised:
        make()
    assert says in str(raised.value)
