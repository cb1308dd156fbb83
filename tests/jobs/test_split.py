"""Parts of long documents: slices that cover the text, within the limit, cut where people would cut."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest
from radixrt.jobs.split import split_text


def words(text: str) -> int:
    return len(text.split())


def size(text: str) -> int:
    return len(text.encode())


TEXTS = st.lists(
    st.sampled_from(
        ["one", "Two", "three.", "Four!", "5.", "Dr.", "é", "漢字。", "\n", "\n\n", "\r\n", "  ", "👩‍👩‍👧", "a" * 40]
    ),
    max_size=60,
).map(" ".join)


@given(TEXTS, st.integers(25, 120), st.data())
def test_parts_are_slices_in_order_that_cover_the_text(text: str, limit: int, data: st.DataObject) -> None:
    # numbered, so that every slice of a few characters is found once
    text = "".join(f"{i}{word} " if word.strip() else word for i, word in enumerate(text.split(" ")))
    overlap = data.draw(st.integers(0, limit - 1))
    parts = split_text(text, size, limit, overlap)
    reached = 0
    for part in parts:
        at = text.rfind(part, 0, reached + len(part)) if reached else 0
        assert at >= 0
        assert text.startswith(part, at)
        assert at <= reached < at + len(part) or text == part == ""
        assert size(text[at:reached]) <= overlap
        reached = at + len(part)
    assert reached == len(text)
    assert all(size(part) <= limit for part in parts)


@given(TEXTS, st.integers(4, 60))
def test_without_overlap_the_parts_are_the_text_and_each_character_is_counted_twice(text: str, limit: int) -> None:
    counted: list[str] = []

    def count(piece: str) -> int:
        counted.append(piece)
        return size(piece)

    parts = split_text(text, count, limit, 0)
    assert "".join(parts) == text
    assert all(size(part) <= limit for part in parts)
    # in its sentence and in its part; what is too large for a part is counted again in its halves
    assert sum(len(piece) for piece in counted if size(piece) <= limit) <= 2 * len(text)


@pytest.mark.parametrize("limit", [40, 200, 1000])
def test_a_part_is_counted_as_it_is(limit: int) -> None:
    """Of a tokenizer to which the whole is more than its sentences."""
    text = "A sentence of some words. " * 400

    def count(piece: str) -> int:
        return len(piece.split()) + piece.count(". ")

    parts = split_text(text, count, limit, limit // 4)
    assert max(map(count, parts)) <= limit
    assert text.endswith(parts[-1])


@pytest.mark.parametrize(
    ("text", "limit", "overlap", "parts"),
    [
        ("A short text.", 100, 10, ["A short text."]),
        ("", 5, 0, [""]),
        # sentences
        (
            "This is the first sentence. Here is the second one. And this is the third.",
            10,
            0,
            ["This is the first sentence. Here is the second one.", " And this is the third."],
        ),
        # an overlap of whole sentences
        (
            "This is the first sentence. Here is the second one. And this is the third.",
            11,
            5,
            ["This is the first sentence. Here is the second one.", " Here is the second one. And this is the third."],
        ),
        # a paragraph that fills at least half of the part goes before a sentence
        (
            "One two three four five six.\n\nSeven eight nine ten eleven. Twelve thirteen fourteen.\n\nFifteen sixteen.",
            12,
            0,
            [
                "One two three four five six.\n\n",
                "Seven eight nine ten eleven. Twelve thirteen fourteen.\n\nFifteen sixteen.",
            ],
        ),
        # abbreviations, initials, numbers and words inside a sentence are no borders
        (
            "We met Dr. Smith and J. Doe about No. 5 (approx. 3.5 kg. of it). They all left.",
            16,
            0,
            ["We met Dr. Smith and J. Doe about No. 5 (approx. 3.5 kg. of it).", " They all left."],
        ),
        # lines of a table are borders; a wrapped line is none
        (
            "Item number 1   12.00\nItem number 2   13.00\n",
            5,
            0,
            ["Item number 1   12.00\n", "Item number 2   13.00\n"],
        ),
        (
            "A sentence that is\nwrapped goes on here. The second one is here.",
            8,
            0,
            ["A sentence that is\nwrapped goes on here.", " The second one is here."],
        ),
    ],
)
def test_where_it_is_cut(text: str, limit: int, overlap: int, parts: list[str]) -> None:
    assert split_text(text, words, limit, overlap) == parts


@pytest.mark.parametrize("quotes", ['"', "”", ")", "'"])
def test_closing_marks_stay_with_their_sentence(quotes: str) -> None:
    parts = split_text(f"He said it was over.{quotes} Then she left the room.", words, 6, 0)
    assert parts == [f"He said it was over.{quotes}", " Then she left the room."]


def test_a_sentence_without_blanks_ends_at_its_full_stop() -> None:
    sentence = "これはとても長い文章の例であり続く。"
    assert split_text(sentence * 3, len, 40, 0) == [sentence * 2, sentence]


def test_a_sentence_too_large_is_cut_between_words() -> None:
    text = "word " * 1000
    parts = split_text(text, words, 100, 0)
    assert "".join(parts) == text
    assert all(re.fullmatch(r" ?word( word)*( )?", part) for part in parts)


@pytest.mark.parametrize("unit", ["e\u0301", "👩‍👩", "👍🏽", "\r\n", "ą\u0323"])
def test_a_character_of_several_code_points_is_not_cut(unit: str) -> None:
    parts = split_text(unit * 500, len, 10, 0)
    assert "".join(parts) == unit * 500
    assert len(parts) > 1
    for part in parts:
        assert len(part) % len(unit) == 0 or part.count("👩") == 1 + part.count("\u200d"), part


def test_a_text_of_marks_alone_still_ends() -> None:
    assert "".join(split_text("\u0301" * 1000, len, 10, 3)) >= "\u0301" * 1000


@pytest.mark.parametrize(
    "text",
    ["a", ".", "\n", " ", "\n ", '."" ', ". ", "漢", "\u0301", "word ", "(((", "A. "],
    ids=lambda text: repr(text),
)
def test_a_megabyte_on_one_line_is_counted_twice(text: str) -> None:
    text *= 1_000_000 // len(text)
    counted = 0

    def count(piece: str) -> int:
        nonlocal counted
        counted += len(piece)
        return (len(piece) + 3) // 4

    parts = split_text(text, count, 1000, 64)
    assert counted <= 2.2 * len(text)
    assert all((len(part) + 3) // 4 <= 1000 for part in parts)


@pytest.mark.parametrize(
    ("limit", "overlap", "field"), [(0, 0, "limit"), (10, 10, "overlap"), (10, -1, "overlap"), (-5, 0, "limit")]
)
def test_what_cannot_be_is_refused(limit: int, overlap: int, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        split_text("text", words, limit, overlap)
    assert caught.value.field == field
