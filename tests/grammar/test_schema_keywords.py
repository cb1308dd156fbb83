"""Every keyword by table; ``jsonschema`` is asked about each row too, so that a wrong row cannot pass."""

from __future__ import annotations

import json
import warnings
from decimal import Decimal
from typing import Any

import jsonschema
import pytest

from radixrt.errors import InvalidRequest
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.regular import CharDfa
from radixrt.grammar.regular.formats import format_dfa
from radixrt.grammar.schema import SchemaLimits, compile_schema
from radixrt.grammar.schema.strings import short_mail
from tests.grammar.schema_tables import ROWS
from tests.grammar.schema_text import accepts, matcher_of


@pytest.mark.parametrize(("schema", "good", "bad"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_table(schema: Any, good: list[str], bad: list[str]) -> None:
    compiled = matcher_of(schema)
    for text in good:
        assert accepts(compiled, text), f"refuses {text}"
    for text in bad:
        assert not accepts(compiled, text), f"accepts {text}"


@pytest.mark.parametrize(("schema", "good", "bad"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_table_agrees_with_jsonschema(schema: Any, good: list[str], bad: list[str]) -> None:
    if isinstance(schema, dict) and ("additionalItems" in schema or "dependencies" in schema):
        schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    exact = Decimal if isinstance(schema, dict) and "multipleOf" in schema else float  # its floats are not exact
    schema = json.loads(json.dumps(schema), parse_float=exact)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        validator = kind(schema, format_checker=jsonschema.FormatChecker())
        for text in good:
            assert validator.is_valid(json.loads(text, parse_float=exact)), text
        for text in bad:
            try:
                value = json.loads(text, parse_float=exact)
            except json.JSONDecodeError:
                continue
            assert not validator.is_valid(value), text


@pytest.mark.parametrize(
    ("schema", "field", "says"),
    [
        ({"type": "objet"}, "#/type", "did you mean 'object'"),
        ({"properties": {"a": {"minimum": "3"}}}, "#/properties/a/minimum", "must be a number"),
        ({"properties": {"a/b": 3}}, "#/properties", "must hold only schemas"),
        ({"required": "a"}, "#/required", "list of strings"),
        ({"allOf": []}, "#/allOf", "at least one"),
        ({"multipleOf": 0}, "#/multipleOf", "above 0"),
        ({"minLength": -1}, "#/minLength", "not negative"),
        ({"$ref": "#/$defs/nope"}, "#/$ref", "nope"),
        ({"$ref": "#nope"}, "#/$ref", "no anchor"),
        ({"items": [{}], "$schema": "https://json-schema.org/draft/2020-12/schema"}, "#/items", "prefixItems"),
        ({"$ref": "#"}, "#", "applies itself"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}], "type": "null"}, "#", "applies itself"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "json_schema", "accepts nothing"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "json_schema", "accepts nothing"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "json_schema", "accepts nothing"),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            "json_schema",
            "accepts nothing",
        ),
        ({"properties": {"a": {"items": {"pattern": "a("}}}}, "#/properties/a/items", "pattern"),
        (False, "json_schema", "accepts nothing"),
        ([], "json_schema", "not an object"),
        ({"properties": {3: {}}}, "#", "keys must be strings"),
        ({"enum": [{1, 2}]}, "#/enum", "no JSON value"),
        ({"const": float("inf")}, "#/const", "no JSON number"),
        ({"enum": []}, "json_schema", "accepts nothing"),
        ({"$schema": 5}, "#/$schema", "=5: must be a string"),
        ({"items": {"$schema": ["draft-07"]}}, "#/items/$schema", "must be a string"),
        ({"properties": {"a": {"required": ["\ud800"]}}}, "#/properties/a/required", "lone surrogate"),
        ({"properties": {"x\udfff": {}}}, "#/properties", "lone surrogate"),
        ({"dependentRequired": {"a": ["\ud800"]}}, "#/dependentRequired", "lone surrogate"),
        ({"dependencies": {"\ud800": ["a"]}}, "#/dependencies", "lone surrogate"),
    ],
)
def test_invalid(schema: Any, field: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        compile_schema(schema)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "field", "says"),
    [
        ({"properties": {"a": {"$ref": "http://x.y/z"}}}, "#/properties/a/$ref", "nothing is fetched"),
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems", "finite set"),
        ({"type": "object", "minProperties": 2}, "#/minProperties", "cannot be counted"),
        ({"properties": {"x": {"type": "string", "pattern": "(a)\\1"}}}, "#/properties/x", r"\(a\)"),
        (
            {"properties": {"x": {"properties": {"y": {"type": "string"}}, "minProperties": 3}}},
            "#/properties/x/minProperties",
            "counted",
        ),
        ({"items": {"type": "number", "multipleOf": 1.0000000007}}, "#/items", "states"),
        ({"type": "string", "format": "regex"}, "#/format", "regex"),
        ({"type": "string", "format": "nonesuch"}, "#/format", "unknown format"),
    ],
)
def test_refused_by_name(schema: Any, field: str, says: str) -> None:
    with pytest.raises(UnsupportedConstraint, match=says) as caught:
        compile_schema(schema, formats="strict")
    assert caught.value.field == field


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (_nested(60_000), "nesting"),
        ('{"items":' * 60_000 + "{}" + "}" * 60_000, "nesting"),
        ('{"description":"' + "x" * 5_000_000 + '"}', "text_bytes"),
        ({"enum": list(range(300_000))}, "nodes"),
        (
            {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(4)]} for i in range(8)], "type": "object"},
            "parts",
        ),
        (
            {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 1}, "maxContains": 90, "maxItems": 9000},
            "states",
        ),
        (
            {
                "$ref": "#/$defs/0",
                "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}", "minLength": 1} for i in range(99)} | {"99": {}},
            },
            "applied",
        ),
    ],
    ids=["deep", "deep text", "long", "wide", "alternatives", "counting", "chain"],
)
def test_limits(schema: Any, says: str) -> None:
    with pytest.raises(UnsupportedConstraint, match=says):
        compile_schema(schema)


def test_time_limit() -> None:
    with pytest.raises(UnsupportedConstraint, match="seconds"):
        compile_schema({"type": "object", "properties": {"a": {"type": "integer"}}}, limits=SchemaLimits(seconds=-1.0))


@pytest.mark.parametrize("text", ["{", '{"a":1,"a":2}', '{"minimum":NaN}', "nul"])
def test_text_that_is_no_schema(text: str) -> None:
    with pytest.raises(InvalidRequest, match="json_schema"):
        compile_schema(text)


def test_registry() -> None:
    registry = {
        "http://x.y/z": {"$id": "http://x.y/z", "type": "integer", "$defs": {"s": {"$ref": "other"}}},
        "http://x.y/other": {"type": "null"},
    }
    compiled = matcher_of({"items": {"$ref": "http://x.y/z#/$defs/s"}, "type": "array"}, registry=registry)
    assert accepts(compiled, "[null]")
    assert not accepts(compiled, "[1]")


def test_whitespace() -> None:
    value = {"a": [1, {"b": []}], "c": {}}
    schema = {"type": "object", "properties": {"a": {"type": "array"}, "c": {"type": "object"}}}
    flexible = matcher_of(schema, whitespace="flexible")
    for text in (json.dumps(value), json.dumps(value, indent=4), json.dumps(value, separators=(",", ":"))):
        assert accepts(flexible, text)
    assert not accepts(flexible, '{"a" : []}')
    compact = matcher_of(schema)
    assert accepts(compact, json.dumps(value, separators=(",", ":")))
    assert not accepts(compact, json.dumps(value))


def test_key_order() -> None:
    names = [f"k{i}" for i in range(7)]
    schema = {"type": "object", "properties": {n: {"type": "integer"} for n in names}, "required": names[:3]}
    declared = matcher_of(schema)
    free = matcher_of(schema, key_order="any")
    turned = '{"z":0,"k6":1,"k2":1,"k0":1,"k1":1}'
    assert accepts(free, turned)
    assert not accepts(declared, turned)
    assert accepts(declared, '{"k0":1,"k1":1,"k2":1,"k6":1,"z":0}')
    assert not accepts(free, '{"k6":1,"k2":1,"k0":1}')
    assert not accepts(free, '{"k0":1,"k0":1,"k1":1,"k2":1}')
    with pytest.raises(UnsupportedConstraint, match="any_order_keys"):
        compile_schema(
            {"properties": {str(n): {} for n in range(30)}, "required": [str(n) for n in range(30)]}, key_order="any"
        )


def test_few_optional_keys_are_free_among_each_other() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {}, "b": {}, "r": {}, "c": {}},
        "required": ["r"],
        "additionalProperties": False,
    }
    compiled = matcher_of(schema)
    for good in ('{"b":1,"a":1,"r":1}', '{"r":1,"c":1,"a":1}', '{"r":1}'):
        assert accepts(compiled, good)
    for bad in ('{"c":1,"r":1}', '{"a":1,"a":1,"r":1}', '{"a":1}'):
        assert not accepts(compiled, bad)


def test_schema_key_first_where_the_schema_has_an_id() -> None:
    body = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert accepts(matcher_of({"$id": "http://e.x/s", **body}), '{"$schema":"http://e.x/s","a":1}')
    assert not accepts(matcher_of(body), '{"$schema":"http://e.x/s","a":1}')


@pytest.mark.parametrize(
    ("name", "given"), [("whitespace", "wide"), ("key_order", "declare"), ("formats", "yes"), ("draft", "8")]
)
def test_options(name: str, given: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        compile_schema(True, **{name: given})


@pytest.mark.parametrize("high", [70, 100, 254, 255, 320, 1000])
def test_mail_addresses_of_limited_length_are_mail_addresses(high: int) -> None:
    short = CharDfa.from_pattern(short_mail(high), anchored=True)
    mail = format_dfa("email")
    assert mail is not None
    assert short <= mail
    assert short.max_length is not None
    assert short.max_length <= high
    assert short.accepts("f.last@example.com" if high < 100 else "first.last@my-company.example.com")


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        ({"not": {"type": "object", "additionalProperties": False}, "const": {}}, "{}"),
        ({"oneOf": [{"enum": [{}, 1.5]}, {"type": "object", "maxProperties": 0}]}, "{}"),
        ({"enum": [{}, 1], "not": {"enum": [{}, 2]}}, "{}"),
        ({"type": "string", "pattern": "b$", "maxLength": 1}, '"ab"'),
        ({"type": "string", "pattern": "bc$", "maxLength": 2}, '"abc"'),
        ({"type": "object", "propertyNames": {"pattern": "b$", "maxLength": 1}}, '{"ab":1}'),
    ],
)
def test_what_a_shortcut_once_let_in(schema: dict, refused: str) -> None:
    from radixrt.grammar.matcher import compile_grammar
    from radixrt.grammar.vocabulary import Vocabulary

    try:
        grammar = compile_schema(schema)
    except InvalidRequest as error:
        assert "accepts nothing" in str(error)
        return
    vocabulary = Vocabulary.of([bytes((b,)) for b in range(256)], frozenset(), frozenset())
    assert not compile_grammar(grammar, None, vocabulary=vocabulary).accepts(refused.encode())


@pytest.mark.parametrize("number", ["1e20000", "1e999999999", "1e-999999999", "9" * 5000, "1" + "0" * 500])
@pytest.mark.parametrize("keyword", ["maximum", "minimum", "multipleOf", "const", "minLength"])
def test_numbers_beyond_any_use_are_refused_at_once(keyword: str, number: str) -> None:
    with pytest.raises(UnsupportedConstraint, match="more than 400 digits or an exponent beyond that"):
        compile_schema(f'{{"{keyword}": {number}}}')


@pytest.mark.parametrize("keyword", ["allOf", "anyOf"])
def test_references_that_multiply_are_read_once(keyword: str) -> None:
    """Twenty levels, each ten times the one below it: read anew each time, they would take for ever."""
    levels: dict[str, Any] = {"0": {"type": "integer", "minimum": 1, "maximum": 2}}
    for i in range(1, 20):
        levels[str(i)] = {keyword: [{"$ref": f"#/$defs/{i - 1}"}] * 10}
    assert compile_schema({"$ref": "#/$defs/19", "$defs": levels}) == compile_schema(levels["0"])
