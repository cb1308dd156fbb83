"""What is extracted: every way to give it, what is refused and how, and that closing a schema only narrows it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, HttpUrl, field_validator, model_validator

from radixrt.errors import InvalidRequest
from radixrt.grammar.compile import to_grammar
from radixrt.grammar.constraint import Choice, Regex
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.jobs.target import Target, closed, load_target
from tests.grammar.naive import accepts


class Currency(Enum):
    EUR = "EUR"
    USD = "USD"


class Line(BaseModel):
    what: str
    price: Annotated[Decimal, Field(ge=0, max_digits=8, decimal_places=2)]


class Invoice(BaseModel):
    """An invoice."""

    number: str
    day: date
    currency: Currency | None = None
    lines: list[Line]
    total: float

    @model_validator(mode="after")
    def adds_up(self) -> Invoice:
        if abs(sum(float(line.price) for line in self.lines) - self.total) > 0.005:
            raise ValueError("the lines do not add up\nto the total")
        return self


class Ticket(BaseModel):
    kind: Literal["bug", "wish"]
    urgent: bool
    note: str | None = Field(default=None, description="What else is said")
    weight: Decimal = Decimal(1)


INVOICE = {
    "number": "A1",
    "day": "2024-02-29",
    "currency": "EUR",
    "lines": [{"what": "tea", "price": 1.1}, {"what": "tea", "price": 2}],
    "total": 3.1,
}


def refused(problem: str, **given: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        load_target(**given)
    assert problem in str(caught.value)
    return caught.value


# ---- ways to give it


def test_a_schema_by_dict_text_and_file_is_one_target(tmp_path: Path) -> None:
    schema = {"title": "T", "type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
    path = tmp_path / "schema.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(schema, indent=2).encode())
    targets = [load_target(given) for given in (schema, json.dumps(schema), f" {json.dumps(schema)}", str(path), path)]
    assert len(set(map(repr, targets))) == 1
    assert targets[0].name == "T"
    assert targets[0].fields == ("b", "a")
    assert targets[0].schema == {**schema, "additionalProperties": False}
    del schema["title"]
    path.write_text(json.dumps(schema))
    assert load_target(path).name == "schema"


def test_a_model_by_class_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shapes_of_mine.py").write_text(
        "import pydantic\nclass Outer:\n  class Inner(pydantic.BaseModel):\n    x: int\nclass M(pydantic.BaseModel):\n  y: str\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    target = load_target("shapes_of_mine:M")
    assert (target.name, target.fields) == ("M", ("y",))
    assert load_target("shapes_of_mine:Outer.Inner").fields == ("x",)
    assert target == load_target(sys.modules["shapes_of_mine"].M)
    assert sys.path == before
    del sys.modules["shapes_of_mine"]


def test_other_types_that_pydantic_reads() -> None:
    @dataclass
    class Point:
        x: int
        y: float

    assert load_target(Point).schema == {
        "type": "object",
        "title": "Point",
        "properties": {"x": {"type": "integer"}, "y": {"type": "number"}},
        "required": ["x", "y"],
        "additionalProperties": False,
    }
    assert (
        load_target(list[Line]).check([{"what": "a", "price": -1}])
        == "0.price: Input should be greater than or equal to 0"
    )


def test_regex_and_choices() -> None:
    target = load_target(regex="[0-9]+")
    assert target.constraint.spec == Regex("[0-9]+")
    assert (target.schema, target.name, target.flat, target.fields) == (None, "regex", True, ())
    assert target.parse("17") == "17"
    target = load_target(choices=iter(["yes", "no"]))
    assert target.constraint.spec == Choice(("yes", "no"))
    assert (target.parse("yes"), target.check("yes")) == ("yes", None)


def test_the_digest_is_that_of_the_texts_in_every_process() -> None:
    ticket = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
    turned = {"type": "object", "properties": dict(reversed(ticket["properties"].items()))}  # type: ignore[attr-defined]
    described = {**ticket, "description": "x"}
    given: list[dict[str, Any]] = [
        {"schema": ticket},
        {"schema": turned},
        {"schema": described},
        {"schema": Invoice},
        {"schema": Ticket},
        {"regex": "a"},
        {"choices": ["a"]},
        {"choices": ["a", "b"]},
        {"choices": ["b", "a"]},
    ]
    digests = [load_target(**each).digest for each in given]
    assert len(set(digests)) == len(digests)
    code = f"from radixrt.jobs.target import load_target; print(load_target({ticket!r}).digest)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digests[0]


# ---- what is refused


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "strin"}, "schema: #/type='strin': 'strin' is no type; did you mean 'string'?"),
        ('{"type": "strin"}', "schema: #/type='strin'"),
        ({"properties": {"a": {"$ref": "other.json"}}}, "schema: #/properties/a/$ref='other.json'"),
        ('{"a": 1, "a": 2}', "schema: has the key 'a' twice in one object"),
        ('{"a": ', "schema: is not JSON: Expecting value at line 1, column 7"),
        ({"not": {}}, "schema: accepts nothing: no value satisfies the schema"),
        ({1: 2}, "keys must be strings"),
        ("nowhere.json", "schema='nowhere.json': No such file or directory"),
        ("Invoice", "a type is named as package.module:Model"),
        ("tests", "Is a directory"),
        ("pyproject.toml", "schema='pyproject.toml': is not JSON: "),
        ("no_module_here:M", "there is no module 'no_module_here', neither installed nor in the current folder"),
        ("json.nothing:M", "there is no module 'json.nothing'"),
        ("json:JSONDecodr", "json has no JSONDecodr; did you mean 'JSONDecoder'?"),
        ("json:JSONDecoder", "schema='json:JSONDecoder': is no type with a JSON Schema"),
        ("json:dumps", "is a function, not a type"),
        ("models.py:Invoice", "is neither a file nor a type named as package.module:Model"),
        ("a b:c", "is neither a file nor a type"),
        ("a\0b", "null byte"),
        (True, "schema=True: must be a JSON Schema, a path, or a pydantic model, not bool"),
        (["a"], "not list"),
        (Line(what="a", price=Decimal(1)), "must be the model, not an instance of Line"),
        (Callable, "is no type with a JSON Schema"),
        (object(), "is no type with a JSON Schema"),
    ],
    ids=range(24),
)
def test_a_schema_that_is_none(schema: Any, problem: str) -> None:
    assert refused(problem, schema=schema).field == "schema"


def test_a_keyword_that_cannot_be_enforced_is_named_by_its_path() -> None:
    inner = {"type": "array", "items": {"type": "object"}, "uniqueItems": True}
    error = refused("schema: #/properties/a~1b/uniqueItems", schema={"type": "object", "properties": {"a/b": inner}})
    assert isinstance(error, UnsupportedConstraint)


def test_a_module_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_shapes.py").write_text("1 / 0")
    (tmp_path / "lacking_shapes.py").write_text("import not_a_module_of_ours")
    monkeypatch.chdir(tmp_path)
    refused("='broken_shapes:M': the module cannot be imported: ZeroDivisionError", schema="broken_shapes:M")
    refused("cannot be imported: No module named 'not_a_module_of_ours'", schema="lacking_shapes:M")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "give exactly one of schema, regex and choices; none is given"),
        ({"regex": "a", "choices": ["a"]}, "regex and choices is given"),
        ({"regex": "a("}, "regex='a(': the group is not closed"),
        ({"regex": 5}, "regex: must be a string, not int"),
        ({"choices": []}, "choices=[]: must hold at least one string"),
        ({"choices": "ab"}, "choices: must be a list of strings, not str"),
        ({"choices": ["a", 5]}, "choice[1]: must be a string, not int"),
    ],
)
def test_what_is_no_target(given: dict[str, Any], problem: str) -> None:
    assert refused(problem, **given).field in ("schema", *given)


# ---- answers


def test_an_answer_becomes_a_value_or_says_why_not() -> None:
    target = load_target(Invoice)
    assert target.parse(json.dumps(INVOICE)) == INVOICE
    for text in ('{"a": 1', '{"a": 1, "a": 2}', '{"a": NaN}', "", "[" * 1000):
        with pytest.raises(InvalidRequest, match="^answer"):
            target.parse(text)


def test_validators_say_what_is_wrong_without_addresses() -> None:
    target = load_target(Invoice)
    assert target.check(INVOICE) is None
    assert target.check({**INVOICE, "total": 4}) == "Value error, the lines do not add up to the total"
    assert target.check({**INVOICE, "lines": [{"what": "x", "price": 0.001}], "total": 0}) == (
        "lines.0.price: Decimal input should have no more than 2 decimal places"
    )

    class Odd(BaseModel):
        x: list[int]

        @field_validator("x")
        @classmethod
        def raises(cls, x: list[int]) -> list[int]:
            raise RuntimeError("a" * 5000)

    said = load_target(Odd).check({"x": [1]})
    assert said
    assert said.startswith("RuntimeError: aaa")
    assert len(said) <= 600
    many = load_target(list[int]).check(["x"] * 9)
    assert many
    assert many.endswith("; and 4 more")
    assert "http" not in many


# ---- schemas of models


def test_the_schema_of_a_model_is_short_closed_and_enforceable() -> None:
    class Everything(BaseModel):
        link: HttpUrl
        tags: set[str]
        amount: Annotated[Decimal, Field(gt=0, lt=Decimal("9.5"), max_digits=4)]
        other: dict[str, int]

    target = load_target(Everything)
    assert target.schema == {
        "title": "Everything",
        "type": "object",
        "properties": {
            "link": {"type": "string", "format": "uri"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "amount": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 9.5},
            "other": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
        "required": ["link", "tags", "amount", "other"],
        "additionalProperties": False,
    }


def test_a_model_that_allows_more_keeps_allowing_it() -> None:
    class Open(BaseModel):
        model_config = ConfigDict(extra="allow")
        x: int

    schema = load_target(Open).schema
    assert schema
    assert schema["additionalProperties"] is True


# ---- closing

TEXT = {"type": "string"}
AB = {"type": "object", "properties": {"a": TEXT, "b": {"type": "integer"}}}
SCHEMAS: list[tuple[dict[str, Any], bool]] = [
    (AB, True),
    ({**AB, "required": ["a"]}, True),
    ({"type": "array", "items": AB}, True),
    ({"type": "object", "properties": {"a": AB, "not": TEXT, "allOf": TEXT}}, True),
    ({"$ref": "#/$defs/x", "$defs": {"x": AB}}, True),
    ({"anyOf": [AB, {"type": "null"}]}, True),
    ({"type": "object", "additionalProperties": AB}, True),
    ({"type": "array", "prefixItems": [AB], "items": {"type": "null"}}, True),
    # where a narrower part may allow more, or nothing
    ({"oneOf": [AB, {"type": "object", "properties": {"a": TEXT}}]}, False),
    ({"allOf": [AB, {"properties": {"c": TEXT}}]}, False),
    ({"not": AB}, False),
    ({"type": "array", "contains": AB, "maxContains": 1}, False),
    ({"if": AB, "then": {"required": ["b"]}}, False),
    ({**AB, "anyOf": [{"required": ["a"]}, {"properties": {"c": TEXT}}]}, False),
    ({**AB, "$ref": "#/$defs/x", "$defs": {"x": {"properties": {"c": TEXT}}}}, False),
    ({**AB, "patternProperties": {"^x": TEXT}}, False),
    ({"type": "object", "properties": {"a": {"oneOf": [AB]}}}, False),
]
VALUES = st.recursive(
    st.sampled_from([None, "x", 5, 1.5]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "c", "not", "allOf"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(("schema", "can"), SCHEMAS, ids=range(len(SCHEMAS)))
def test_which_schemas_are_closed(schema: dict[str, Any], can: bool) -> None:
    before = json.dumps(schema)
    narrow = closed(schema)
    assert json.dumps(schema) == before
    assert (narrow is not None and "additionalProperties" in json.dumps(narrow)) == can
    if narrow is not None and schema is AB:
        assert not jsonschema.Draft202012Validator(narrow).is_valid({"a": "x", "c": 1})


@given(st.sampled_from([schema for schema, _ in SCHEMAS]), VALUES)
def test_closing_only_narrows(schema: dict[str, Any], value: Any) -> None:
    narrow = closed(schema)
    if narrow is not None and jsonschema.Draft202012Validator(narrow).is_valid(value):
        assert jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize(
    "schema",
    [
        {**AB, "required": ["c"]},
        {"type": "object", "additionalProperties": True, "properties": {}},
        {"type": "object", "properties": {"x": {"type": "object"}}, "additionalProperties": TEXT},
    ],
)
def test_a_schema_that_closing_would_empty_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert load_target(schema).schema == schema


# ---- tables


@pytest.mark.parametrize(
    ("given", "flat", "fields"),
    [
        (Ticket, True, ("kind", "urgent", "note", "weight")),
        (Invoice, False, ("number", "day", "currency", "lines", "total")),
        (AB, True, ("a", "b")),
        ({**AB, "additionalProperties": True}, False, ("a", "b")),
        ({"type": "object"}, False, ()),
        ({"type": "array", "items": TEXT}, False, ()),
        ({"type": ["string", "null"]}, True, ()),
        ({"type": ["string", "array"]}, False, ()),
        ({"enum": ["a", 5, None]}, True, ()),
        ({"const": [1]}, False, ()),
        ({}, False, ()),
        ({"$ref": "#/$defs/x", "$defs": {"x": AB}}, True, ("a", "b")),
        (Currency, True, ()),
        (int, True, ()),
    ],
)
def test_what_a_row_of_a_table_can_hold(given: Any, flat: bool, fields: tuple[str, ...]) -> None:
    target = load_target(given)
    assert isinstance(target, Target)
    assert (target.flat, target.fields) == (flat, fields)


def test_numbers_are_those_that_a_row_can_hold() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": ["number", "null"]}, "top": {"type": "number", "maximum": 5}},
    }
    target = load_target(schema=schema)
    assert target.schema == {**schema, "additionalProperties": False}  # the prompt shows nothing of it
    for text, fits in (
        ('{"n":1234567.25}', True),
        ('{"n":null,"top":-1.5}', True),
        ('{"top":6}', False),
        ('{"n":1e309}', False),
        ('{"top":-1e309}', False),
    ):
        assert accepts(to_grammar(target.constraint), text) is fits, text
