"""Numbers as they are written: texts of equal or almost equal value, judged by ``jsonschema`` under combinations of keywords."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.schema.numbers import Numbers, complement, intersect, tidy, value_texts
from tests.grammar.schema_text import accepts, matcher_of

VALIDATORS: dict[str, Any] = {
    "4": jsonschema.Draft4Validator,
    "7": jsonschema.Draft7Validator,
    "2020-12": jsonschema.Draft202012Validator,
}


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas of schemas, side by side with a keyword or alone."""
    some = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda v: {"not": v}, inner),
        st.builds(lambda k, v: {k: v}, st.sampled_from(["allOf", "anyOf", "oneOf"]), some),
        st.builds(lambda a, b: {**a, "not": b}, inner, inner),
        st.builds(lambda a, b: {**a, "oneOf": b}, inner, some),
        st.builds(lambda a, b: {**a, "anyOf": b}, inner, some),
    )


def verdict(schema: Any, draft: str, texts: list[str]) -> list[tuple[str, bool, bool]] | None:
    """Each text with what we and ``jsonschema`` say of it; ``None`` where the schema is refused by name."""
    validator = VALIDATORS[draft](schema)
    valid = [validator.is_valid(json.loads(text)) for text in texts]
    try:
        compiled = matcher_of(schema, draft=draft)
    except UnsupportedConstraint:
        return None
    except InvalidRequest as error:
        assert "accepts nothing" in str(error)
        return [(text, False, says) for text, says in zip(texts, valid)]
    return [(text, accepts(compiled, text), says) for text, says in zip(texts, valid)]


TEXTS = ["0", "0.0", "1", "1.0", "1.5", "-0.0", '"a"', "null"]
_values = st.lists(st.sampled_from([0, 0.0, 1, 1.5, -0.0, "a", None]), min_size=1, max_size=3)
_types = st.lists(st.sampled_from(["integer", "number", "string", "null"]), min_size=1, max_size=2, unique=True)
_kinds = st.one_of(
    st.sampled_from([{"type": "integer"}, {"type": "number"}, {"type": "string"}, {}]),
    st.builds(lambda v: {"type": v}, _types),
    st.builds(lambda v: {"enum": v}, _values),
    st.builds(lambda v, t: {"enum": v, "type": t}, _values, _types),
)


@pytest.mark.parametrize("draft", VALIDATORS)
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(schema=st.recursive(_kinds, combined, max_leaves=5))
@example(schema={"oneOf": [{"type": "number"}, {"enum": [0.0], "not": {"type": "integer"}}]})
@example(schema={"type": "number", "not": {"type": "integer"}})
@example(schema={"enum": [0, 1.5, "a"], "not": {"type": "integer"}})
@example(schema={"not": {"enum": [0.0], "not": {"type": "integer"}}})
@example(schema={"type": "integer", "not": {"enum": [1, 1.5]}})
def test_integers_and_listed_values(draft: str, schema: Any) -> None:
    said = verdict(schema, draft, TEXTS)
    assert said is not None, "refused"
    for text, accepted, valid in said:
        if text == "-0.0" and not accepted:
            continue  # valid where zero is listed, but a listed value is only written as serializers write it
        assert accepted == valid, text


# texts that readers make one of: 2**53 and its neighbours, doubles at both ends, more digits than a double has
NEAR = [
    *("0", "-0", "-0.0", "0.0", "0e0", "1", "1.0", "1e0", "1.00000000000000000001", "0.99999999999999999999", "-1", "-1.0"),
    *("2", "2.0", "1.5", "0.5", "2.5", "3", "3.0", "10", "1e1", "1E+1", "100e-1", "0.1", "1e-1", "0.30000000000000004"),
    *("0.3", "0.10000000000000001", "9007199254740992", "9007199254740993", "9007199254740992.0", "9007199254740993.0"),
    *("9007199254740994.0", "9.007199254740993e15", "9007199254740991.9", "1e300", "1.0e300", "1" + "0" * 300),
    *("1" + "0" * 300 + ".0", "1e307", "1e308", "1e-300", "1e-320", "1e-400", "0." + "0" * 330 + "1", "123456789012345678"),
    *("123456789012345678.0", "1.23456789012345678e17", "-9007199254740993.0", "-9007199254740993", "-1e300", "5e-324"),
]  # fmt: skip
_amounts = st.sampled_from(
    [0, 1, -1, 2, 1.5, 0.5, 0.1, 0.3, 10, 2**53, 2**53 + 1, -(2**53) - 1, 10**300, 1e300, 1e-300, 1e-320, 10**17 + 1]
)
_bounds = st.one_of(
    st.builds(lambda k, v: {k: v}, st.sampled_from(["minimum", "maximum"]), _amounts),
    st.builds(lambda v: {"enum": v}, st.lists(_amounts, min_size=1, max_size=3)),
    st.builds(lambda v: {"multipleOf": v}, st.sampled_from([1, 2, 3, 10])),
    st.sampled_from([{"type": "integer"}, {"type": "number"}]),
    st.builds(lambda a, b: {"minimum": min(a, b), "maximum": max(a, b)}, _amounts, _amounts),
)
_exclusive = st.builds(lambda k, v: {k: v}, st.sampled_from(["exclusiveMinimum", "exclusiveMaximum"]), _amounts)
_exclusive_4 = st.builds(
    lambda k, v: {k: v, "exclusive" + k.title(): True}, st.sampled_from(["minimum", "maximum"]), _amounts
)


@pytest.mark.parametrize("draft", VALIDATORS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_what_is_accepted_validates_however_it_is_written(draft: str, data: st.DataObject) -> None:
    leaves = st.one_of(_bounds, _exclusive_4 if draft == "4" else _exclusive)
    schema = data.draw(st.recursive(leaves, combined, max_leaves=4))
    said = verdict({"type": "number", "allOf": [schema]}, draft, NEAR)
    for text, accepted, valid in said or ():
        assert valid or not accepted, text


@pytest.mark.parametrize(
    ("schema", "draft", "good", "bad"),
    [
        ({"type": "integer"}, "4", ["1", "-0"], ["1.0", "1e0", "0.0"]),
        ({"type": "integer"}, "7", ["1", "1.0"], ["1.5"]),
        ({"enum": [1]}, "4", ["1", "1.0"], ["2", "1.5"]),
        ({"enum": [1], "type": "integer"}, "4", ["1"], ["1.0"]),
        ({"enum": [1], "type": "number", "not": {"type": "integer"}}, "4", ["1.0"], ["1"]),
        ({"type": "number", "not": {"type": "integer"}, "minimum": 1}, "4", ["1.0", "2.5", "3.00"], ["1", "2", "0.5"]),
        ({"type": "number", "not": {"type": "integer"}}, "7", ["1.5"], ["1.0", "1"]),
        ({"minimum": 3, "type": "integer", "not": {"multipleOf": 2}}, "4", ["3", "5"], ["3.0", "4"]),
        (
            {"type": "array", "uniqueItems": True, "items": {"type": "integer", "minimum": 0, "maximum": 3}},
            "4",
            ["[0,3]"],
            ["[0.0]", "[1,1]", "[1,1.0]"],
        ),
        ({"type": "integer", "minimum": 2**53 + 1}, "7", ["9007199254740993"], ["9007199254740993.0"]),
        ({"type": "number", "minimum": 2**53 + 1}, "7", ["9007199254740993"], ["9007199254740993.0"]),
        (
            {"type": "integer", "oneOf": [{"type": "integer"}, {"maximum": 2**53}, {"enum": [0]}]},
            "4",
            ["9007199254740993"],
            ["9007199254740992", "0", "-1"],
        ),
        (
            {"not": {"anyOf": [{"multipleOf": 2}, {"maximum": 2**53}]}},
            "2020-12",
            ["9007199254740993"],
            ["9007199254740994", "9007199254740991", "3", "9007199254740993.0"],
        ),
        ({"type": "integer", "not": {"enum": [3]}}, "7", ["12345678901234567890", "4.0"], ["3", "3.0"]),
        ({"type": "integer", "not": {"enum": [2**53]}}, "7", ["3", "3.0"], ["9007199254740992", "9007199254740992.0"]),
        ({"const": 10**300}, "7", ["1" + "0" * 300], ["1" + "0" * 300 + ".0", "1e300", "1e+300"]),
        ({"const": 1e300}, "7", ["1e+300"], ["1" + "0" * 300]),
    ],
)  # fmt: skip
def test_table(schema: Any, draft: str, good: list[str], bad: list[str]) -> None:
    said = verdict(schema, draft, good + bad)
    assert said == [(text, True, True) for text in good] + [(text, False, False) for text in bad]


def test_a_schema_of_draft_4_inside_another() -> None:
    inner = {"$id": "http://e.x/4", "id": "http://e.x/4", "$schema": "http://json-schema.org/draft-04/schema#"}
    inner["type"] = "integer"
    schema = {"prefixItems": [{"type": "integer"}, {"$ref": "http://e.x/4"}], "type": "array"}
    compiled = matcher_of(schema, registry={"http://e.x/4": inner})
    assert accepts(compiled, "[1.0,1]")
    assert not accepts(compiled, "[1.0,1.0]")


# -- the algebra, on pairs of a value and whether it is written without a fraction

_halves = st.integers(-3, 3).map(lambda n: Fraction(n, 2))
_sets = st.builds(
    lambda integer, low, low_open, high, multiples, others, values, excluded, written: Numbers(
        True if written else integer, low, low_open, high, False, multiples, others, values, excluded, written
    ),
    st.sampled_from([None, True, False]),
    st.none() | _halves,
    st.booleans(),
    st.none() | _halves,
    st.frozensets(st.sampled_from([Fraction(1), Fraction(3, 2)]), max_size=1),
    st.frozensets(st.sampled_from([Fraction(1), Fraction(3, 2)]), max_size=1),
    st.none() | st.frozensets(_halves, max_size=3),
    st.frozensets(_halves, max_size=2),
    st.sampled_from([None, True, False]),
)
_WRITTEN = [(Fraction(n, 2), whole) for n in range(-8, 9) for whole in ((True, False) if n % 2 == 0 else (False,))]


def _written_in(part: Numbers | None) -> set[tuple[Fraction, bool]]:
    if part is None:
        return set()
    return {(v, w) for v, w in _WRITTEN if part.holds(v) and part.written in (None, w)}


@settings(max_examples=600, deadline=None, derandomize=True)
@given(a=_sets, b=_sets)
def test_intersection_and_complement_are_exact(a: Numbers, b: Numbers) -> None:
    assert _written_in(tidy(a)) == _written_in(a)
    assert _written_in(intersect(a, b)) == _written_in(a) & _written_in(b)
    outside = set().union(*(_written_in(part) for part in complement(a)))
    assert outside == set(_WRITTEN) - _written_in(a)


@given(value=st.one_of(st.integers(), st.decimals(allow_nan=False, allow_infinity=False, places=6)))
def test_listed_values_are_read_back_as_themselves(value: int | Decimal) -> None:
    exact = Fraction(value)
    for written in (None, True, False):
        for form in value_texts(exact, written):
            read = json.loads(form)
            assert isinstance(read, float) or written is not False
            assert isinstance(read, int) or written is not True or exact.denominator > 1
            assert read == (float(value) if exact.denominator > 1 else value)
