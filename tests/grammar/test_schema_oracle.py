"""Random texts of compiled schemas, and random changes to valid values: whatever is accepted, ``jsonschema`` must accept."""

from __future__ import annotations

import json
import random
import warnings
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest
from tests.grammar.schema_tables import ROWS
from tests.grammar.schema_text import accepts, matcher_of, sample


def validator_of(schema: Any) -> Any:
    """The oracle for a schema; formats are not its strength and are left out."""
    if isinstance(schema, dict) and ("additionalItems" in schema or "dependencies" in schema):
        schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return kind(schema)


def decimal(text: str) -> Any:
    """A number as it is written."""
    value = Decimal(text)
    return int(value) if value == int(value) else value


def changed(value: Any, random_: random.Random) -> Any:
    """A value a little different."""
    if isinstance(value, dict) and value and random_.random() < 0.8:
        name = random_.choice(list(value))
        copy = dict(value)
        if random_.random() < 0.3:
            del copy[name]
        elif random_.random() < 0.3:
            copy[random_.choice(["a", "b", "zz", name + "x"])] = random_.choice([1, "x", None])
        else:
            copy[name] = changed(value[name], random_)
        return copy
    if isinstance(value, list) and value and random_.random() < 0.8:
        copy_ = list(value)
        at = random_.randrange(len(value))
        copy_[at : at + random_.randrange(2)] = [changed(value[at], random_)] * random_.randrange(3)
        return copy_
    return random_.choice(
        [None, True, 0, 1, 2.5, -1, 7, "", "a", "ab", "abc", [], {}, [1], {"a": 1}, {"b": "x"}, value]
    )


@pytest.mark.parametrize("schema", [row[1] for row in ROWS], ids=[row[0] for row in ROWS])
def test_what_is_accepted_validates(schema: Any) -> None:
    random_ = random.Random(1)
    compiled = matcher_of(schema)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = decimal if isinstance(schema, dict) and "multipleOf" in schema else float  # its floats are not exact
        validator = validator_of(json.loads(json.dumps(schema), parse_float=exact))
        for _ in range(25):
            text = sample(compiled, random_, random_.randrange(40))
            value = json.loads(text, parse_float=exact)
            assert accepts(compiled, text)
            assert validator.is_valid(value), text
            for _ in range(5 if exact is float else 0):
                other = changed(value, random_)
                if accepts(compiled, json.dumps(other, separators=(",", ":"))):
                    assert validator.is_valid(other), other


LEAVES: list[Any] = [
    {"type": "integer"},
    {"type": "string"},
    {"type": ["null", "boolean"]},
    {"minimum": 1},
    {"maximum": 2, "type": "number"},
    {"multipleOf": 2},
    {"enum": [1, "a", None]},
    {"const": "ab"},
    {"maxLength": 1},
    {"pattern": "^a"},
    {"minItems": 1},
    {"maxItems": 1},
    {"required": ["a"]},
    {"maxProperties": 1},
    True,
    False,
]


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas made of schemas."""
    some = st.lists(inner, min_size=1, max_size=3)
    name = st.sampled_from(["a", "b"])
    return st.one_of(
        st.builds(lambda k, v: {k: v}, st.sampled_from(["allOf", "anyOf", "oneOf"]), some),
        st.builds(lambda v: {"not": v}, inner),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
        st.builds(
            lambda v, r: {"properties": v, "additionalProperties": r}, st.dictionaries(name, inner, max_size=2), inner
        ),
        st.builds(lambda v: {"type": "object", "patternProperties": {"^a": v}}, inner),
        st.builds(lambda p, r: {"prefixItems": p, "items": r}, some, inner),
        st.builds(lambda v: {"type": "array", "contains": v}, inner),
        st.builds(lambda v: {"dependentSchemas": {"a": v}}, inner),
        st.builds(lambda v, w: {"allOf": [v], "unevaluatedProperties": w}, inner, inner),
        st.builds(lambda v, w: {"anyOf": [v], "unevaluatedItems": w}, inner, inner),
    )


VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 1.5, "", "a", "ab", "b", [], [1], ["a"], [1, 2], [None, "a"], [[1]], {}),
    *({"a": 1}, {"a": "a"}, {"b": 2}, {"a": 1, "b": 2}, {"a": None, "b": "ab"}, {"c": 1}, {"a": {"a": 1}}, {"ab": 1}),
]


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(schema=st.recursive(st.sampled_from(LEAVES), combined, max_leaves=6), seed=st.integers(0, 9))
def test_combinations_agree_with_jsonschema(schema: Any, seed: int) -> None:
    """Exact on a list of values (whose keys are in declared order), and every random text validates."""
    validator = validator_of(schema)
    try:
        compiled = matcher_of(schema)
    except InvalidRequest as error:
        if "accepts nothing" in str(error):
            assert not any(validator.is_valid(value) for value in VALUES)
        return
    for value in VALUES:
        text = json.dumps(value, separators=(",", ":"))
        if accepts(compiled, text):
            assert validator.is_valid(value), text
        elif not isinstance(value, dict) or len(value) < 2:  # keys of merged schemas may stand in another order
            assert not validator.is_valid(value), text
    random_ = random.Random(seed)
    for _ in range(3):
        text = sample(compiled, random_, random_.randrange(30))
        assert validator.is_valid(json.loads(text)), text
