"""The values of parts become one value that meets the schema, as ``jsonschema`` sees it."""

from __future__ import annotations

import json
import sys
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest, RadixrtError
from radixrt.jobs.merge import canonical, merge

TEXT = {"type": "string"}
NAMES: dict[str, Any] = {"type": "array", "items": TEXT}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": TEXT, "age": {"type": ["integer", "null"]}, "tags": NAMES},
    "required": ["name"],
}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "tricks": NAMES}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("values", "schema", "vote", "first"),
    [
        # scalars
        (["a", "b", "b"], TEXT, "b", "a"),
        (["a", "b"], TEXT, "a", "a"),
        ([None, None, "a"], {}, "a", "a"),
        (["", "", "a"], TEXT, "a", "a"),
        ([None, ""], {}, "", ""),
        ([None, None], {}, None, None),
        ([1, 2.0, 2], {"type": "number"}, 2.0, 1),
        ([True, 1, 1.0], {}, 1, True),
        ([False, 0], {}, False, False),
        (["no", "yes", "yes"], None, "yes", "no"),
        # arrays
        ([["a", "b"], ["b", "c"], ["a"]], NAMES, ["a", "b", "c"], ...),
        ([[], ["a"]], NAMES, ["a"], ...),
        ([["a", "b"], ["c", "d"]], {**NAMES, "maxItems": 3}, ["a", "b", "c"], ...),
        ([[], []], {**NAMES, "maxItems": 0}, [], ...),
        ([[{"x": 1, "y": 2}], [{"y": 2.0, "x": 1}]], {"type": "array"}, [{"x": 1, "y": 2}], ...),
        ([[1, 2], [3, 4], [3, 4]], {"type": "array", "minItems": 2, "maxItems": 2}, [3, 4], [1, 2]),
        ([["a", 1], ["b", 2], ["b", 2]], {"type": "array", "prefixItems": [TEXT]}, ["b", 2], ["a", 1]),
        # a merged array that the schema refuses: one of the parts' own
        ([["x", "x"], ["x", "x"]], {**NAMES, "minItems": 2}, ["x", "x"], ...),
        (
            [["x"], ["y"], ["y"]],
            {**NAMES, "contains": {"const": "x"}, "minContains": 0, "maxContains": 0},
            ["y"],
            ["x"],
        ),
        # objects
        (
            [{"name": "A", "age": None}, {"name": "B", "tags": ["x"]}, {"name": "B", "age": 5, "tags": ["y", "x"]}],
            PERSON,
            {"name": "B", "age": 5, "tags": ["x", "y"]},
            {"name": "A", "age": 5, "tags": ["x", "y"]},
        ),
        ([{"z": 1, "a": 1}, {"b": 2, "z": 1}], {}, {"z": 1, "a": 1, "b": 2}, ...),
        ([{"name": "", "age": 3}, {"name": "B", "age": None}], PERSON, {"name": "B", "age": 3}, ...),
        ([{"a": {"x": 1}}, {"a": {"y": 2}}], {"type": "object"}, {"a": {"x": 1, "y": 2}}, ...),
        ([{"a": 1}, {"b": 1}, {"b": 1}], {"type": "object", "maxProperties": 1}, {"b": 1}, {"a": 1}),
        # a bad part of an object is its own matter
        (
            [{"n": "a", "o": {"x": 1}}, {"n": "b", "o": {"y": 1}}, {"n": "b", "o": {"y": 1}}],
            {"type": "object", "properties": {"n": TEXT, "o": {"type": "object", "maxProperties": 1}}},
            {"n": "b", "o": {"y": 1}},
            {"n": "a", "o": {"x": 1}},
        ),
        # kinds: the one that most parts have
        (
            [{"kind": "cat", "lives": 9}, {"kind": "dog", "tricks": ["sit"]}, {"kind": "dog", "tricks": ["roll"]}],
            {"anyOf": [CAT, DOG]},
            {"kind": "dog", "tricks": ["sit", "roll"]},
            ...,
        ),
        (
            [{"kind": "cat"}, {"kind": "cat", "lives": 9}, {"kind": "dog"}],
            {"oneOf": [{"$ref": "#/$defs/dog"}, {"$ref": "#/$defs/cat"}], "$defs": {"cat": CAT, "dog": DOG}},
            {"kind": "cat", "lives": 9},
            ...,
        ),
        ([["a"], "b", ["c"]], {"anyOf": [NAMES, TEXT]}, ["a", "c"], ...),
        (["b", ["a"], "c", "c"], {"anyOf": [NAMES, TEXT]}, "c", "b"),
        ([None, ["a"], None, ["b"]], {"anyOf": [NAMES, {"type": "null"}]}, ["a", "b"], ...),
        ([{"a": ["x"]}, {"a": ["y"]}], {"allOf": [{"properties": {"a": {**NAMES, "maxItems": 1}}}]}, {"a": ["x"]}, ...),
        # decimals as they are written
        ([{"p": 19.99}, {"p": 19.99, "q": 1}], {"properties": {"p": {"multipleOf": 0.01}}}, {"p": 19.99, "q": 1}, ...),
    ],
    ids=range(32),
)
def test_merged(values: list[Any], schema: dict[str, Any] | None, vote: Any, first: Any) -> None:
    before = json.dumps(values)
    for how, wanted in (("vote", vote), ("first", vote if first is ... else first)):
        merged = merge(values, schema, how)
        assert json.dumps(merged) == json.dumps(wanted), how
    assert json.dumps(values) == before


def test_the_keys_of_a_schema_come_in_its_order() -> None:
    values = [{"tags": ["x"], "name": "A"}, {"more": 1, "name": "A"}]
    assert list(merge(values, PERSON)) == ["name", "tags", "more"]


def test_a_schema_that_refers_to_itself() -> None:
    schema = {"type": "object", "properties": {"name": TEXT, "inner": {"$ref": "#"}}}
    values = [{"inner": {"inner": {"name": "a"}}}, {"inner": {"inner": {"inner": {}}}}]
    assert merge(values, schema) == {"inner": {"inner": {"name": "a", "inner": {}}}}
    assert merge([{"a": 1}, {"a": 2}], {"$ref": "#"}) == {"a": 1}


def test_a_very_deep_value_is_merged() -> None:
    deep: Any = 1
    for _ in range(190):
        deep = {"a": deep}
    assert (
        merge([deep, deep], {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {"$ref": "#/$defs/x"}}}}}) == deep
    )


SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {**PERSON, "maxProperties": 2},
    {**PERSON, "minProperties": 2, "additionalProperties": False},
    {"anyOf": [PERSON, NAMES, TEXT, {"type": "null"}]},
    {"oneOf": [{**PERSON, "additionalProperties": False}, {**NAMES, "minItems": 1}]},
    {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 3, "uniqueItems": True},
    {"type": "array", "contains": {"type": "string"}, "maxContains": 1},
    {"type": "object", "additionalProperties": {**NAMES, "maxItems": 2}},
    {
        "type": "object",
        "properties": {"name": TEXT},
        "dependentRequired": {"name": ["tags"]},
        "dependentSchemas": {"age": {"maxProperties": 1}},
    },
    {"type": "object", "if": {"required": ["name"]}, "then": {"properties": {"tags": {"maxItems": 1}}}},
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {"type": "object", "properties": {"tags": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
        },
    },
    {"not": {"required": ["name", "age"]}},
]
LEAVES = st.sampled_from([None, "", "a", "b", 1, 2, 1.0, True])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "age", "tags"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.sampled_from(SCHEMAS), st.lists(VALUES, min_size=5, max_size=30), st.sampled_from(["vote", "first"]))
def test_a_merge_of_valid_values_is_valid(schema: dict[str, Any], drawn: list[Any], how: str) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    values = [value for value in drawn if validator.is_valid(value)]
    assume(len(values) > 1)
    merged = merge(values, schema, how)
    assert validator.is_valid(merged)
    assert merge([*values], schema, how) == merged
    assert merge([merged], schema, how) == merged


@given(st.lists(st.lists(LEAVES, max_size=5), min_size=1, max_size=5).filter(lambda each: len(each) > 1))
def test_arrays_hold_each_item_once_in_order(values: list[list[Any]]) -> None:
    merged = merge(values, {"type": "array"})
    wanted = list(dict.fromkeys(canonical(item) for value in values for item in value))
    assert [canonical(item) for item in merged] == wanted


def test_what_cannot_be_merged() -> None:
    with pytest.raises(InvalidRequest, match="merge='votes'; did you mean 'vote'?"):
        merge(["a"], TEXT, "votes")
    with pytest.raises(InvalidRequest, match="at least one value"):
        merge([], TEXT)


def test_without_jsonschema_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema.validators", None)
    assert merge(["a", "b", "b"], TEXT) == "b"
    with pytest.raises(RadixrtError, match="pip install jsonschema"):
        merge([["a"], ["b"]], NAMES)
