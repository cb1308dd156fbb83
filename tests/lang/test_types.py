"""Types as constraints: tables of texts, values to text and back, random texts of each constraint read as values."""

from __future__ import annotations

import datetime as dt
import enum
import pickle
import random
import re
import typing
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, Optional, TypedDict, TypeVar, Union

import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from lang.types import TypeMismatch, TypeSpec, spec_of, whole_numbers
from radixrt import Constraint, InvalidRequest, Tokenizer, load_tokenizer


class Color(enum.Enum):
    RED = "red"
    DARK_RED = "red dark"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 10


class Mixed(enum.Enum):
    ONE = 1
    TWO = "two"


class Place(BaseModel):
    name: str
    zip_code: int | None = Field(default=None, alias="zip")


class Person(BaseModel):
    name: str
    age: Annotated[int, Field(ge=0, le=150)]
    color: Color = Color.RED
    places: list[Place] = []


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []  # noqa: UP037


class Open(BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int


class Even(BaseModel):
    n: int

    @pydantic.field_validator("n")
    @classmethod
    def even(cls, value: int) -> int:
        if value % 2:
            raise ValueError(f"{value} is odd")
        return value


class Numbers(pydantic.RootModel[list[int]]):
    pass


@dataclass
class Point:
    x: int
    y: float = 0.0


class Movie(TypedDict):
    title: str
    year: int


class Cast(TypedDict, total=False):
    movies: typing.Required[list[Movie]]
    note: Annotated[str, Field(max_length=3)]


class Pair(NamedTuple):
    left: int
    right: str


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]


T = TypeVar("T")


class Box(BaseModel, Generic[T]):
    item: T


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
UserId = NewType("UserId", int)
Percent = Annotated[int, Field(ge=0, le=100)]
UTC = dt.timezone.utc  # noqa: UP017
MIDNIGHT = dt.datetime(2024, 2, 29, tzinfo=UTC)


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return load_tokenizer()


@lru_cache(maxsize=200)
def compiled(constraint: Constraint) -> Any:
    return constraint.compile(tokenizer())


# type, bare text?, texts and their values, texts that are refused
KINDS: list[tuple[Any, bool, dict[str, Any], list[str]]] = [
    (
        int,
        True,
        {"0": 0, "-7": -7, "123456789012345678": 123456789012345678},
        ["", "-", "-0", "07", "1.0", "1e3", "9" * 19],
    ),
    (float, True, {"0": 0.0, "-1.25": -1.25, "3.0": 3.0}, ["", ".5", "1.", "01", "1e3", "NaN", "inf", "1" * 19]),
    (bool, True, {"true": True, "false": False}, ["True", "1", "yes", ""]),
    (str, False, {'"a"': "a", '""': "", '"\\n\\"é"': '\n"é'}, ["a", '"a', '"a"b', "1"]),
    (Literal["yes", "no", "not"], True, {"yes": "yes", "no": "no", "not": "not"}, ["n", '"yes"', "yesno", ""]),
    (Literal["only"], True, {"only": "only"}, ["on", '"only"']),
    (Literal["a\nb", ""], True, {"a\nb": "a\nb", "": ""}, ["a"]),
    (Literal[1, 2, 10], True, {"1": 1, "2": 2, "10": 10}, ["3", "0", "1.0"]),
    (Literal[1, "a"], False, {"1": 1, '"a"': "a"}, ["a", "2"]),
    (Color, True, {"red": Color.RED, "red dark": Color.DARK_RED}, ["RED", "dark", '"red"']),
    (Level, True, {"1": Level.LOW, "10": Level.HIGH}, ["LOW", "2"]),
    (Mixed, False, {"1": Mixed.ONE, '"two"': Mixed.TWO}, ["two", "2"]),
    (Percent, True, {"0": 0, "7": 7, "99": 99, "100": 100}, ["101", "-1", "007", "1000", "5.0"]),
    (Annotated[int, Field(gt=-3, lt=3)], True, {"-2": -2, "2": 2, "0": 0}, ["-3", "3", "-0", "-1.0"]),
    (Annotated[int, Field(ge=18)], True, {"18": 18, "99999": 99999}, ["17", "-18", "9"]),
    (Annotated[int, Field(ge=10**30)], True, {"1" + "0" * 30: 10**30}, ["9" * 30]),
    (Annotated[int, Field(ge=0, le=20, multiple_of=5)], True, {"0": 0, "5": 5, "20": 20}, ["1", "25"]),
    (Annotated[int, Field(multiple_of=7)], True, {"14": 14, "-7": -7}, ["15"]),
    (Annotated[float, Field(ge=0, lt=1)], True, {"0": 0.0, "0.5": 0.5, "0.999": 0.999}, ["1", "1.0", "-0.1"]),
    (UserId, True, {"3": 3}, ["x"]),
    (Optional[int], False, {"3": 3, "null": None}, ["None", '"3"']),  # noqa: UP045
    (Union[int, str], False, {"3": 3, '"3"': "3"}, ["x"]),  # noqa: UP007
    (list[int], False, {"[]": [], "[1,-2]": [1, -2]}, ["[1,]", "[1, 2]", '["1"]', "[1"]),
    (Annotated[list[int], Field(min_length=1, max_length=2)], False, {"[1]": [1], "[1,1]": [1, 1]}, ["[]", "[1,2,3]"]),
    (list[Color], False, {'["red"]': [Color.RED]}, ["[red]", '["blue"]']),
    (set[int], False, {"[1,2,1]": {1, 2}}, ["{1}"]),
    (Annotated[set[Literal["a", "b"]], Field(min_length=2)], False, {'["b","a"]': {"a", "b"}}, ['["a","a"]', '["a"]']),
    (tuple[int, str], False, {'[1,"a"]': (1, "a")}, ["[1]", '["a",1]', '[1,"a",2]']),
    (tuple[int, ...], False, {"[1,2,3]": (1, 2, 3)}, ['["a"]']),
    (Pair, False, {'[1,"a"]': Pair(1, "a")}, ["[1]"]),
    (dict[str, int], False, {"{}": {}, '{"a":1}': {"a": 1}}, ['{"a":"b"}', "{a:1}"]),
    (dict[int, str], False, {'{"-3":"x"}': {-3: "x"}}, ['{"x":"x"}', '{"03":"x"}', '{3:"x"}']),
    (dict[Color, int], False, {'{"red":1}': {Color.RED: 1}}, ['{"blue":1}']),
    (dict[Percent, bool], False, {'{"100":true}': {100: True}}, ['{"101":true}']),
    (
        Person,
        False,
        {'{"name":"A","age":3}': Person(name="A", age=3)},
        ['{"name":"A","age":151}', '{"name":"A"}', "{}"],
    ),
    (
        Person,
        False,
        {},
        ['{"name":"A","age":3,"extra":1}', '{"name": "A","age":3}', '{"name":"A","age":3,"color":"blue"}'],
    ),
    (Place, False, {'{"name":"A","zip":1}': Place(name="A", zip=1)}, ['{"name":"A","zip_code":1}']),
    (Open, False, {'{"a":1,"b":[2]}': Open(a=1, b=[2])}, ['{"b":1}']),  # type: ignore[call-arg]
    (
        Tree,
        False,
        {'{"value":1,"children":[{"value":2}]}': Tree(value=1, children=[Tree(value=2)])},
        ['{"children":[]}'],
    ),
    (Numbers, False, {"[1]": Numbers([1])}, ["1"]),
    (Point, False, {'{"x":1,"y":2.5}': Point(1, 2.5), '{"x":1}': Point(1)}, ['{"y":1}', '{"x":1,"z":1}']),
    (
        Movie,
        False,
        {'{"title":"x","year":3}': {"title": "x", "year": 3}},
        ['{"title":"x"}', '{"title":"x","year":3,"z":1}'],
    ),
    (
        dict[str, Cast | None],
        False,
        {
            '{"a":{"movies":[{"title":"x","year":3}]},"b":null}': {
                "a": {"movies": [{"title": "x", "year": 3}]},
                "b": None,
            }
        },
        ['{"a":{}}', '{"a":{"movies":[],"note":"long"}}', '{"a":{"movies":[{}]}}'],
    ),
    (Annotated[list[Movie], Field(max_length=1)], False, {"[]": []}, ["[{}]"]),
    (Box[int], False, {'{"item":1}': Box[int](item=1)}, ['{"item":"1"}']),
    (Pet, False, {'{"kind":"dog"}': Dog(kind="dog")}, ['{"kind":"cat"}', '{"kind":"dog","lives":3}', '{"kind":"x"}']),
    (
        dt.date,
        False,
        {'"2024-02-29"': dt.date(2024, 2, 29)},
        ['"2023-02-29"', '"0000-01-01"', '"2024-04-31"', "2024-02-29"],
    ),
    (dt.date, False, {'"2000-02-29"': dt.date(2000, 2, 29)}, ['"1900-02-29"', '"2024-13-01"', '"2024-01-00"', "1"]),
    (dt.datetime, False, {'"2024-02-29T00:00:00Z"': MIDNIGHT}, ['"2024-02-29T24:00:00Z"', '"2024-02-29"']),
    (dt.datetime, False, {'"2024-02-29T00:00:00"': MIDNIGHT.replace(tzinfo=None)}, ['"2023-02-29T00:00:00"']),
    (pydantic.AwareDatetime, False, {'"2024-02-29T00:00:00+00:00"': MIDNIGHT}, ['"2024-02-29T00:00:00"']),
    (
        pydantic.NaiveDatetime,
        False,
        {'"2024-02-29T00:00:00"': MIDNIGHT.replace(tzinfo=None)},
        ['"2024-02-29T00:00:00Z"'],
    ),
    (dt.time, False, {'"23:59:59.5"': dt.time(23, 59, 59, 500000)}, ['"24:00:00"', '"23:59:60"']),
    (
        dt.timedelta,
        False,
        {'"-P1DT2H"': -dt.timedelta(days=1, hours=2), '"PT0S"': dt.timedelta()},
        ['"P"', '"PT"', '"P1DT"'],
    ),
    (uuid.UUID, False, {f'"{uuid.UUID(int=5)}"': uuid.UUID(int=5)}, ['"5"']),
    (
        pydantic.UUID4,
        False,
        {f'"{uuid.UUID(int=5, version=4)}"': uuid.UUID(int=5, version=4)},
        [f'"{uuid.UUID(int=5)}"'],
    ),
    (Decimal, False, {'"0.10"': Decimal("0.1"), "1.5": Decimal("1.5")}, ['"x"', '"."', "1e400", "0.12345678901234567"]),
    (
        Annotated[Decimal, Field(max_digits=3, decimal_places=2)],
        False,
        {'"1.25"': Decimal("1.25")},
        ['"12.3"', '"1.255"'],
    ),
    (Annotated[Decimal, Field(max_digits=3)], False, {'"0.125"': Decimal("0.125"), '"125"': Decimal(125)}, ['"1.255"']),
    (
        Annotated[Decimal, Field(ge=0, max_digits=4, decimal_places=1)],
        False,
        {"0.5": Decimal("0.5"), "999.9": Decimal("999.9")},
        ["-0.5", "0.55", "1000", '"1"'],
    ),
    (Annotated[str, Field(pattern="^[a-c]+$", max_length=2)], False, {'"ab"': "ab"}, ['"abc"', '"d"', '""']),
]
IDS = [f"{i}-{getattr(kind[0], '__name__', kind[0])}"[:40] for i, kind in enumerate(KINDS)]


@pytest.mark.parametrize(("type_", "text", "accepted", "refused"), KINDS, ids=IDS)
def test_texts_of_a_type(type_: Any, text: bool, accepted: dict[str, Any], refused: list[str]) -> None:
    spec = spec_of(type_)
    assert spec.text is text
    for line, value in accepted.items():
        assert compiled(spec.constraint).accepts(line), line
        read = spec.parse(line)
        assert read == value and type(read) is type(value)
    for line in refused:
        assert not compiled(spec.constraint).accepts(line), line


@lru_cache(maxsize=1)
def spelled() -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which tokens have bytes, as far as the words of a mask go."""
    texts = compiled(Constraint.literal("x")).vocabulary.spelled
    usable = np.zeros((len(texts) + 31) // 32 * 32, dtype=bool)
    usable[: len(texts)] = [bool(text) for text in texts]
    return usable


def random_text(spec: TypeSpec, rng: random.Random, budget: int = 40) -> str:
    """A text of the constraint: random tokens that it allows, the shortest ending when the budget runs out."""
    matcher = compiled(spec.constraint).matcher()
    vocabulary = compiled(spec.constraint).vocabulary
    mask = np.zeros((1, len(spelled()) // 32), dtype=np.int32)
    text = b""
    budget += matcher.min_tokens_to_end
    while not (matcher.can_end and (budget <= 1 or rng.random() < 0.2)):
        matcher.fill_mask_within(mask, 0, budget)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little").astype(bool) & spelled())
        if not len(allowed):
            break
        token = int(rng.choice(allowed))
        assert matcher.accept(token)
        text += vocabulary.spelled[token]
        budget -= 1
    assert matcher.can_end
    return text.decode()


@pytest.mark.parametrize("type_", [kind[0] for kind in KINDS], ids=IDS)
def test_whatever_a_constraint_allows_is_a_value(type_: Any) -> None:
    spec = spec_of(type_)
    rng = random.Random(7)
    for _ in range(25):
        text = random_text(spec, rng)
        assert compiled(spec.constraint).accepts(text)
        spec.parse(text)


zones = st.integers(-1439, 1439).map(lambda minutes: dt.timezone(dt.timedelta(minutes=minutes)))
places = st.builds(Place, name=st.text(), zip=st.none() | st.integers(-(10**9), 10**9))
people = st.builds(
    Person, name=st.text(), age=st.integers(0, 150), color=st.sampled_from(Color), places=st.lists(places, max_size=3)
)
whole = st.integers(-(10**18) + 1, 10**18 - 1)
VALUES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, whole),
    (float, st.decimals(-(10**9), 10**9, places=5).map(float)),
    (bool, st.booleans()),
    (str, st.text()),
    (Color, st.sampled_from(Color)),
    (Level, st.sampled_from(Level)),
    (Mixed, st.sampled_from(Mixed)),
    (Literal["a", "b c", "é"], st.sampled_from(["a", "b c", "é"])),
    (Percent, st.integers(0, 100)),
    (Annotated[float, Field(ge=0, le=1)], st.decimals(0, 1, places=6).map(float)),
    (list[float], st.lists(st.floats(-(10**15), 10**15), max_size=4)),
    (set[int], st.sets(whole, max_size=4)),
    (dict[str, list[str]], st.dictionaries(st.text(), st.lists(st.text(), max_size=2), max_size=3)),
    (dict[int, bool], st.dictionaries(whole, st.booleans(), max_size=3)),
    (Person, people),
    (list[Person], st.lists(people, max_size=2)),
    (Point, st.builds(Point, whole, st.floats(-1e9, 1e9))),
    (Movie, st.tuples(st.text(), whole).map(lambda row: {"title": row[0], "year": row[1]})),
    (Pair, st.builds(Pair, whole, st.text())),
    (Pet, st.builds(Cat, kind=st.just("cat"), lives=whole) | st.builds(Dog, kind=st.just("dog"))),
    (
        Tree,
        st.recursive(
            st.builds(Tree, value=whole), lambda sub: st.builds(Tree, value=whole, children=st.lists(sub, max_size=2))
        ),
    ),
    (int | str | None, st.none() | whole | st.text()),
    (dt.date, st.dates()),
    (dt.datetime, st.datetimes(timezones=st.none() | zones)),
    (dt.time, st.times()),
    (dt.timedelta, st.timedeltas(dt.timedelta(days=-(10**7)), dt.timedelta(days=10**7))),
    (uuid.UUID, st.uuids()),
    (pydantic.UUID4, st.uuids(version=4)),
    (Decimal, st.decimals(-(10**15), 10**15, places=5)),
    (Annotated[Decimal, Field(max_digits=6, decimal_places=2)], st.decimals(-9999, 9999, places=2)),
]


@pytest.mark.parametrize(("type_", "values"), VALUES, ids=[str(row[0])[:40] for row in VALUES])
@settings(max_examples=40)
@given(data=st.data())
def test_a_value_is_written_accepted_and_read_back(
    type_: Any, values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    spec, value = spec_of(type_), data.draw(values)
    text = spec.write(value)
    assert compiled(spec.constraint).accepts(text), text
    read = spec.parse(text)
    assert read == value and type(read) is type(value)


@given(st.integers(-2000, 2000) | whole, st.integers(0, 3000) | st.integers(0, 10**18), st.data())
def test_whole_numbers_are_those_between(low: int, width: int, data: st.DataObject) -> None:
    high = low + width
    pattern = re.compile(whole_numbers(low, high))
    near = st.sampled_from([low - 1, low, low + 1, high - 1, high, high + 1, 0, -low, -high, low // 10, high * 10])
    for value in data.draw(st.lists(near | st.integers(low - 50, high + 50), min_size=5, max_size=20)):
        assert bool(pattern.fullmatch(str(value))) == (low <= value <= high)
        assert not pattern.fullmatch(f"0{value}") and not pattern.fullmatch("-0") and not pattern.fullmatch("")


class Thing:
    pass


class WithThing(BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    things: list[Thing]


class WithAny(BaseModel):
    inner: dict[str, list[Any]]


class WithCall(BaseModel):
    call: Callable[[int], int]


class WithUntyped(BaseModel):
    pair: tuple[int, Any]


class Chain(BaseModel):
    after: Optional["Chain"] = None  # noqa: UP037, UP045
    data: dict  # type: ignore[type-arg]


# type, what the message says
OPEN: list[tuple[Any, str]] = [
    (Any, "type=Any: it may be anything"),
    (object, "it may be anything"),
    (T, "it may be anything"),
    (list, "its part [] may be anything"),
    (dict, "its part [key] may be anything"),
    (tuple, "its part [] may be anything"),
    (dict[str, Any], "its part [key] may be anything"),
    (WithAny, "type=WithAny: its part inner[key][] may be anything"),
    (WithThing, "type=WithThing: its part things[] is of class"),
    (WithCall, "type=WithCall: its part call is a callable"),
    (WithUntyped, "its part pair[1] may be anything"),
    (Chain, "its part data[key] may be anything"),
    (Box, "its part item may be anything"),
    (list[int | Callable[[], int]], "its part [] is a callable"),
    (Thing, "use a model"),
    (set[Thing], "use a model"),
    (complex, "it is a complex number"),
    (type, "it is of class"),
    (Annotated[int, Field(ge=5, le=4)], "no whole number is within these bounds"),
    (5, "type=5: must be a type, such as int"),
    ("int", "must be a type"),
    (None, "must be a type"),
    ([int], "must be a type"),
    ({"type": "integer"}, "must be a type"),
    (Color.RED, "must be a type"),
    (lambda: 1, "must be a type"),
    (len, "must be a type"),
]


@pytest.mark.parametrize(("type_", "says"), OPEN)
def test_what_no_constraint_describes_is_named(type_: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        spec_of(type_)
    assert caught.value.field == "type" and says in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


MISMATCHES: list[tuple[Any, str, str]] = [
    (Even, '{"n":3}', "n: Value error, 3 is odd"),
    (int, "12x", "Invalid JSON"),
    (bool, "maybe", ""),
    (Color, "blue", "'red'"),
    (str, '"cut', "Invalid JSON"),
    (Person, '{"name":"A","age":300}', "age: Input should be less than or equal to 150"),
    (list[int], "[" + ",".join(['"x"'] * 9) + "]", "and 4 more"),
    (Annotated[int, pydantic.AfterValidator(lambda value: 1 // value)], "0", "ZeroDivisionError"),
]


@pytest.mark.parametrize(("type_", "text", "says"), MISMATCHES)
def test_a_text_that_is_no_value(type_: Any, text: str, says: str) -> None:
    with pytest.raises(TypeMismatch) as caught:
        spec_of(type_).parse(text)
    error = caught.value
    assert error.text == text and says in error.problem and text[:20] in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.text, again.problem) == (str(error), error.text, error.problem)


@pytest.mark.parametrize(("type_", "value"), [(int, "x"), (Percent, "x"), (Person, 3), (Color, 7)])
def test_a_value_of_another_type_is_not_written(type_: Any, value: Any) -> None:
    with pytest.raises(TypeMismatch):
        spec_of(type_).write(value)


def test_booleans_are_read_in_pythons_spelling_too() -> None:
    assert spec_of(bool).parse("True") is True and spec_of(bool).parse("False") is False


def test_specs_are_kept_and_types_that_cannot_be_hashed_are_not() -> None:
    assert spec_of(Person) is spec_of(Person)
    bounded = Annotated[int, Field(ge=1, json_schema_extra={"x": [1]})]
    assert spec_of(bounded).parse("3") == 3
    assert spec_of(Literal[1]).parse("1") == 1
    assert spec_of(typing.List[int]).constraint == spec_of(list[int]).constraint  # noqa: UP006
