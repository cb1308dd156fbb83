"""Scores of rows against gold: what counts as equal, and the counts beside those of a naive reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest
from radixrt.jobs.gold import MOST_UNLIKE, Gold, Score, compare, equal, matches


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Müller GmbH", "  müller\tGMBH ", True),
        ("Mu\u0308ller", "M\u00fcller", True),
        ("ﬁne", "FINE", True),
        ("fine", "fin", False),
        ("", " ", True),
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (1e9, 1e9 + 1, True),
        (1e9, 1.1e9, False),
        (5.0, 5.01, False),
        (0.0, 1e-7, True),
        (5, "5", False),
        (True, 1, False),
        (True, "true", False),
        (False, None, False),
        (None, None, True),
        (None, "", False),
        ([1, 2], [2, 1.0000000001], True),
        ([1, 1, 2], [1, 2, 2], False),
        ([], None, False),
        ({"a": 1, "b": None}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ([{"a": "X"}, {"a": "y"}], [{"a": "Y"}, {"a": "x"}], True),
        (float("inf"), float("inf"), True),
        (float("nan"), float("nan"), False),
    ],
)
def test_equal(one: Any, other: Any, same: bool) -> None:
    assert equal(one, other) == equal(other, one) == same


def test_one_element_is_paired_once_also_within_the_tolerance() -> None:
    assert matches([1 + 1e-9, 1 - 1e-9], [1.0, 2.0]) == 1


def test_text_that_looks_like_a_number_is_not_one() -> None:
    assert matches(["5", "true", "null"], [5, True, None]) == 0


@given(st.lists(st.integers(0, 5) | st.sampled_from(["a", "A ", "b"])), st.lists(st.integers(0, 5)))
def test_pairs_as_many_as_a_multiset_has_in_common(have: list[Any], want: list[int]) -> None:
    left = list(want)
    for value in have:
        if value in left:
            left.remove(value)
    assert matches(have, want) == len(want) - len(left)
    assert matches(have, list(reversed(have))) == len(have)


def test_long_lists_do_not_take_for_ever() -> None:
    many = [float(i) for i in range(40_000)]
    assert matches(many, many[::-1]) == len(many)
    assert matches(many, [value + 0.5 for value in many]) == 0
    assert matches(many[:MOST_UNLIKE], [value + 1e-9 for value in many[:MOST_UNLIKE]]) == MOST_UNLIKE


def score(*pairs: tuple[Any, Any]) -> Score:
    result = Score()
    for predicted, expected in pairs:
        compare(result, predicted, expected)
    return result


def test_fields_of_rows() -> None:
    result = score(
        ({"name": "A", "sum": 2.5, "tags": ["x", "y"]}, {"name": "a", "sum": 2.5, "tags": ["y", "z", "x"]}),
        ({"name": "B", "sum": None, "tags": []}, {"name": "C", "sum": 1.0, "tags": []}),
        ({"name": None, "sum": 3.0}, {"name": None, "sum": None, "tags": None}),
        (None, {"name": "d", "sum": None, "tags": ["q"]}),
    )
    name, total, tags = result.fields["name"], result.fields["sum"], result.fields["tags[]"]
    assert (name.documents, name.right, name.matched, name.predicted, name.expected) == (4, 2, 1, 2, 3)
    assert (total.right, total.matched, total.predicted, total.expected) == (2, 1, 2, 2)
    assert (tags.right, tags.matched, tags.predicted, tags.expected) == (2, 2, 2, 4)
    assert (tags.precision, tags.recall, tags.f1, tags.accuracy) == (1.0, 0.5, pytest.approx(2 / 3), 0.5)
    assert result.right == 0


def test_elements_of_lists_are_scored_whole_and_by_field() -> None:
    gold = {"items": [{"what": "bolt", "n": 3}, {"what": "nut", "n": 1}]}
    result = score(({"items": [{"what": "Nut", "n": 1}, {"what": "bolt", "n": 4}]}, gold), (gold, gold))
    assert {path: (s.right, s.matched, s.expected) for path, s in result.fields.items()} == {
        "items[]": (1, 3, 4),
        "items[].what": (2, 4, 4),
        "items[].n": (1, 3, 4),
    }
    assert result.right == 1


def test_a_field_that_comes_late_was_right_before() -> None:
    result = score(({"a": 1}, {"a": 1}), ({"a": 1, "b": 2}, {"a": 1}))
    assert (result.fields["b"].right, result.fields["b"].documents) == (1, 2)


def test_values_that_are_no_objects() -> None:
    result = score(("yes", "YES"), ("no", "yes"))
    assert (result.fields["value"].right, result.right) == (1, 1)


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return str(path)


def test_a_gold_file(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "gold",
        {"id": "é", "value": {"a": 1}},
        "",
        {"id": 2, "value": {"a": 2}},
        {"id": "c", "value": {"a": 3}},
    )
    gold = Gold(path)
    found = gold.score(
        iter([{"id": "x", "value": {"a": 1}}, {"id": "2", "value": {"a": 2}}, {"id": "é", "value": {"a": 9}}])
    )
    assert (len(gold), found.documents, found.right, found.missing, found.extra) == (3, 3, 1, 1, 1)
    assert (found.fields["a"].matched, found.fields["a"].predicted, found.fields["a"].expected) == (1, 2, 3)
    assert "1 of 3 gold rows right in every field, 1 without a row; 1 rows are not in it" in str(found)
    assert "a        33.3%      50.0%   33.3%   40.0%" in str(found)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: must be"),
        ({"id": "b"}, "line 2: must be"),
        ({"id": "a", "value": 2}, "line 2: its id stands on an earlier line too"),
    ],
)
def test_a_bad_gold_file(tmp_path: Path, row: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        Gold(lines(tmp_path / "gold", {"id": "a", "value": 1}, row))


def test_an_empty_gold_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="has no rows"):
        Gold(lines(tmp_path / "gold"))
