"""What a user may ask for, what it is refused for, its way to JSON and back, and the cache of what was compiled."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.errors import EngineClosed, InvalidRequest
from radixrt.grammar.compile import to_grammar
from radixrt.grammar.compile_cache import CompileCache
from radixrt.grammar.constraint import DEFAULT_LIMITS, Constraint, ConstraintLimits, Tag
from tests.grammar.naive import accepts


class Person(pydantic.BaseModel):
    name: str
    age: int


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

# constraint, accepted, refused
KINDS: list[tuple[Constraint, list[str], list[str]]] = [
    (Constraint.regex(r"\d+(\.\d+)?"), ["1", "1.5"], ["1.", "", "x1"]),
    (Constraint.literal("a.b"), ["a.b"], ["axb", ""]),
    (Constraint.substring("the cat, the dog"), ["the", "cat, the", "dog"], ["", "he", "the cat dog", "cat "]),
    (Constraint.substring("ab", unit="characters", max_length=1, empty=True), ["", "a", "b"], ["ab", "ba"]),
    (Constraint.choice(["yes", "no", "yes", "not"]), ["yes", "no", "not"], ["ye", "noo", ""]),
    (Constraint.json_schema(SCHEMA), ['{"a":1}'], ['{"a":"1"}', "{}", "1", '{"a": 1}']),
    (Constraint.json_schema(SCHEMA, whitespace="flexible"), ['{"a":1}', '{"a": 1}'], ['{"a":"1"}']),
    (Constraint.json_schema(json.dumps(SCHEMA)), ['{"a":1}'], ["{}"]),
    (Constraint.json_schema(Person), ['{"name":"x","age":3}'], ['{"name":"x"}', '{"name":1,"age":3}']),
    (Constraint.json_schema({"$ref": "urn:x"}, registry={"urn:x": {"const": 1}}), ["1"], ["2"]),
    (
        Constraint.json_schema(
            {
                "properties": {"b": {"const": 1}, "a": {"const": 2}},
                "additionalProperties": False,
                "required": ["a", "b"],
                "type": "object",
            },
            key_order="any",
        ),
        ['{"a":2,"b":1}', '{"b":1,"a":2}'],
        ['{"a":2}', '{"a":1,"b":1}'],
    ),
    (
        Constraint.json_schema({"type": "string", "format": "date"}, strict_formats=True),
        ['"2024-02-29"'],
        ['"2023-02-29"', '"x"'],
    ),
    (Constraint.json_schema({"type": "string", "format": "date"}), ['"2024-02-29"'], ['"x"', "1"]),
    (Constraint.json_schema({"type": "string", "format": "colour"}), ['"x"'], ["1"]),
    (Constraint.json_schema(True), ["1", "[]", '"x"'], ["", "x"]),
    (Constraint.json_object(), ["{}", '{"a":[1,null]}'], ["[]", "1", ""]),
    (Constraint.grammar('start: "a" start | "b"'), ["b", "aab"], ["a", ""]),
    (Constraint.grammar('root ::= [0-9]+ "."', "gbnf"), ["12."], ["."]),
    (Constraint.grammar("root ::= #x41", "ebnf"), ["A"], ["a"]),
    (Constraint.sequence("A: ", Constraint.regex("[a-z]+"), "!"), ["A: abc!"], ["A: !", "abc", "A: abc"]),
    (Constraint.alternatives(Constraint.regex("a+"), "b", Constraint.json_object()), ["aa", "b", "{}"], ["", "ab"]),
    (
        Constraint.sequence(Constraint.grammar('start: "x" start | "."'), Constraint.grammar('start: "y" start | ";"')),
        ["xx.yy;", ".;"],
        ["x;y.", "xx."],
    ),
    (
        Constraint.structural_tags([Tag("<f>", Constraint.json_object(), "</f>")], at_least_one=True),
        ['let me see <f>{"a":1}</f> done', "<f>{}</f>"],
        ["no call", "<f>1</f>", "<f>{}"],
    ),
    (
        Constraint.structural_tags(
            [
                {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"},
                {"begin": "<f=b>", "constraint": Constraint.regex("b*"), "end": "</f>"},
            ],
            triggers=["<f="],
            stop_after_first=True,
        ),
        ["text", 'x<f=a>{"a":1}</f>', "<f=b>bb</f>", "< f <f"],
        ["<f=c>", "<f=b></f>more", "<f=a>{}</f>"],
    ),
]


@pytest.mark.parametrize(
    "constraint, accepted, refused", KINDS, ids=lambda x: repr(x)[:50] if isinstance(x, Constraint) else ""
)
def test_every_kind(constraint: Constraint, accepted: list[str], refused: list[str]) -> None:
    grammar = to_grammar(constraint)
    if "JsonChars" not in repr(grammar.rules):  # which the naive matcher does not know
        assert [t for t in accepted if not accepts(grammar, t)] == []
        assert [t for t in refused if accepts(grammar, t)] == []
    again = Constraint.from_dict(json.loads(json.dumps(constraint.to_dict())))
    assert again == constraint
    assert hash(again) == hash(constraint)
    assert again.to_dict() == constraint.to_dict()
    assert (again.depth, again.size) == (constraint.depth, constraint.size)


@pytest.mark.model
@pytest.mark.parametrize(
    "constraint, accepted, refused", KINDS, ids=lambda x: repr(x)[:50] if isinstance(x, Constraint) else ""
)
def test_every_kind_compiled(constraint: Constraint, accepted: list[str], refused: list[str], tokenizer: Any) -> None:
    compiled = constraint.compile(tokenizer)
    assert [t for t in accepted if not compiled.accepts(t)] == []
    assert [t for t in refused if compiled.accepts(t)] == []


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from radixrt.model.tokenizer import load_tokenizer

    return load_tokenizer()


def test_all_kinds_differ() -> None:
    assert len({constraint for constraint, _, _ in KINDS}) == len(KINDS) - 1  # a dict and its JSON text are the same
    assert Constraint.literal("a") != Constraint.regex("a")
    assert Constraint.json_schema({"a": 1, "b": 2}) != Constraint.json_schema({"b": 2, "a": 1})  # the order is meant
    assert Constraint.json_schema('{ "a" : "x y" }') == Constraint.json_schema({"a": "x y"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        Constraint.literal("a").spec = None  # type: ignore[misc]


@pytest.mark.parametrize(
    "text", ['{"const":1.0}', '{"const":0.10000000000000000001}', '{"const":"\\u00e9"}', '{"const":1E400}']
)
def test_numbers_and_strings_of_a_schema_are_kept_as_written(text: str) -> None:
    constraint = Constraint.json_schema(text)
    assert constraint.spec.schema == text  # type: ignore[union-attr]
    assert Constraint.from_dict(json.loads(json.dumps(constraint.to_dict()))) == constraint


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_any_json_object_survives(schema: dict[str, Any]) -> None:
    constraint = Constraint.json_schema(schema)
    assert json.loads(constraint.spec.schema) == schema  # type: ignore[union-attr]
    assert Constraint.json_schema(json.dumps(schema, indent=1)) == constraint
    assert Constraint.from_dict(json.loads(json.dumps(constraint.to_dict()))) == constraint


def deep(n: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(n):
        value = {"not": value}
    return value


def circular() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["not"] = value
    return value


def nested(n: int) -> Constraint:
    constraint = Constraint.literal("a")
    for _ in range(n):
        constraint = Constraint.sequence(constraint)
    return constraint


def shared(n: int) -> Constraint:
    constraint = Constraint.literal("a")
    for _ in range(n):
        constraint = Constraint.alternatives(constraint, constraint)
    return constraint


# what is made, what the error says
BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: Constraint.regex(3), "regex: must be a string, not int"),  # type: ignore[arg-type]
    (lambda: Constraint.regex("a" * 200_000), "regex: is 200,000 characters long; at most 100,000"),
    (lambda: Constraint.regex("\ud800"), "regex: is not Unicode text: lone surrogate U+D800 at character 0"),
    (lambda: Constraint.literal(b"x"), "literal: must be a string, not bytes"),  # type: ignore[arg-type]
    (lambda: Constraint.choice([]), "choice=[]: must hold at least one string"),
    (lambda: Constraint.choice("ab"), "choice: must be a list of strings, not str"),
    (lambda: Constraint.choice(7), "choice: must be a list of strings, not int"),  # type: ignore[arg-type]
    (lambda: Constraint.choice(["a", 1]), "choice[1]: must be a string, not int"),  # type: ignore[list-item]
    (lambda: Constraint.choice(["a"] * 100_001), "choice: holds 100,001 strings; at most 100,000"),
    (lambda: Constraint.choice(["a" * 5_000_000] * 2), "choice: holds 10,000,000 characters"),
    (lambda: Constraint.grammar("x", "larck"), "syntax='larck'; did you mean 'lark'"),  # type: ignore[arg-type]
    (lambda: Constraint.grammar("x" * 2_000_000), "grammar: is 2,000,000 characters long"),
    (lambda: Constraint.json_schema(3), "json_schema: must be a dict, a JSON text or a pydantic model class, not int"),  # type: ignore[arg-type]
    (lambda: Constraint.json_schema("[]"), "json_schema: must be a JSON object or boolean, not list"),
    (lambda: Constraint.json_schema('{"a": }'), "json_schema: is not JSON: Expecting value at line 1, column 7"),
    (lambda: Constraint.json_schema('{"a": 1, "a": 2}'), "json_schema: has the key 'a' twice"),
    (lambda: Constraint.json_schema('{"a": NaN}'), "json_schema: contains NaN"),
    (lambda: Constraint.json_schema('{"a": ' + "9" * 5000 + "}"), "json_schema: is not JSON that can be read"),
    (lambda: Constraint.json_schema({"a": float("inf")}), "json_schema: has inf at '/a'"),
    (lambda: Constraint.json_schema({"a": {"b/c": {1, 2}}}), "json_schema: has a set at '/a/b~1c'"),
    (lambda: Constraint.json_schema({"a": {3: 1}}), "json_schema: has the key 3 at '/a'; keys must be strings"),
    (lambda: Constraint.json_schema('{"a":' * 60_000), "json_schema: is nested deeper than 200 levels"),
    (lambda: Constraint.json_schema(deep(60_000)), "json_schema: is nested deeper than 200 levels"),
    (lambda: Constraint.json_schema(circular()), "json_schema: is nested deeper than 200 levels"),
    (
        lambda: Constraint.json_schema('{"a":"' + "x" * 50_000_000 + '"}'),
        "json_schema: is 50,000,008 characters of JSON",
    ),
    (lambda: Constraint.json_schema({"a": "x" * 50_000_000}), "json_schema: is more than 4,000,000 characters"),
    (lambda: Constraint.json_schema({"a": [0] * 5_000_000}), "json_schema: is more than 4,000,000 characters"),
    (lambda: Constraint.json_schema(int), "json_schema=int: a class must be a pydantic model"),
    (lambda: Constraint.json_schema(Person(name="x", age=1)), "must be the model class, not an instance of Person"),  # type: ignore[arg-type]
    (lambda: Constraint.json_schema({}, whitespace="compct"), "whitespace='compct'; did you mean 'compact'"),  # type: ignore[arg-type]
    (lambda: Constraint.json_schema({}, key_order=None), "key_order=None"),  # type: ignore[arg-type]
    (lambda: Constraint.json_schema({}, strict_formats=1), "strict_formats=1: must be true or false"),  # type: ignore[arg-type]
    (lambda: Constraint.json_schema({}, registry=[]), "registry: must map URIs to schemas, not be list"),  # type: ignore[arg-type]
    (lambda: Constraint.json_schema({}, registry={"urn:x": "{"}), "registry['urn:x']: is not JSON"),
    (lambda: Constraint.json_object(whitespace="no"), "whitespace='no'"),  # type: ignore[arg-type]
    (lambda: Constraint.sequence(), "sequence: must have at least one part"),
    (lambda: Constraint.alternatives("a", 3), "alternatives[1]: must be a Constraint or a string, not int"),  # type: ignore[arg-type]
    (lambda: nested(30), "sequence: nests constraints 21 levels deep; at most 20"),
    (lambda: shared(18), "alternatives: holds 16,383 constraints; at most 10,000"),
    (lambda: Constraint.from_dict([]), "constraint: must be a JSON object, not list"),  # type: ignore[arg-type]
    (lambda: Constraint.from_dict({}), "constraint.type=None; valid types are"),
    (lambda: Constraint.from_dict({"type": "regexp"}), "constraint.type='regexp'; did you mean 'regex'"),
    (
        lambda: Constraint.from_dict({"type": "regex", "patern": "a"}),
        "patern: constraint of type regex has no such field; did you mean 'pattern'",
    ),
    (lambda: Constraint.from_dict({"type": "regex"}), "constraint.pattern: is missing"),
    (lambda: Constraint.from_dict({"type": "sequence", "parts": "ab"}), "constraint.parts: must be a list, not str"),
    (
        lambda: Constraint.from_dict({"type": "sequence", "parts": [{"type": "regex"}]}),
        "constraint.pattern: is missing",
    ),
    (lambda: Constraint.from_dict(deep_constraint(50_000)), "constraint: nests constraints more than 20 levels deep"),
]


def deep_constraint(n: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "literal", "text": "a"}
    for _ in range(n):
        value = {"type": "sequence", "parts": [value]}
    return value


@pytest.mark.parametrize("make, says", BAD, ids=[says[:45] for _, says in BAD])
def test_bad_input_is_refused_when_it_is_made(make: Callable[[], object], says: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        make()
    assert says in str(raised.value)
    assert len(str(raised.value)) < 400
    assert "\n" not in str(raised.value)


# What can only be judged when it is compiled.
UNCOMPILABLE = [
    (Constraint.regex("(a"), "position"),
    (Constraint.regex(r"(a)\1"), "back-reference"),
    (Constraint.grammar("start: a"), "no rule is called 'a'"),
    (Constraint.json_schema({"type": "strin"}), "strin"),
    (Constraint.json_schema({"type": "string", "format": "colour"}, strict_formats=True), "colour"),
    (Constraint.json_schema({"type": "string", "enum": [1]}), "accepts nothing"),
    (Constraint.json_schema({"$ref": "https://example.com/x"}), "https://example.com/x"),
    (Constraint.sequence("a", Constraint.regex("[")), "position"),
]


@pytest.mark.parametrize("constraint, says", UNCOMPILABLE, ids=range(len(UNCOMPILABLE)))
def test_what_cannot_be_compiled_is_refused(constraint: Constraint, says: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        to_grammar(constraint)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_limits_are_fields() -> None:
    Constraint.choice(["a", "b"], limits=ConstraintLimits(choices=2))
    with pytest.raises(InvalidRequest, match="at most 1 are taken"):
        Constraint.choice(["a", "b"], limits=ConstraintLimits(choices=1))
    assert ConstraintLimits() == DEFAULT_LIMITS


# -- the cache


class Compiled:
    def __init__(self, size: int = 100) -> None:
        self.memory_bytes = size


class Compiler:
    """Compiles on command: ``hold`` keeps a text from being finished until it is released."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.begun: dict[str, threading.Event] = {}
        self.fail: dict[str, BaseException] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.size = 100

    def hold(self, text: str) -> None:
        self.gates[text], self.begun[text] = threading.Event(), threading.Event()

    def __call__(self, constraint: Constraint, tokenizer: Any) -> Any:
        text = constraint.spec.text  # type: ignore[union-attr]
        self.seen.append(text)
        self.threads[text] = threading.current_thread()
        if text in self.gates:
            self.begun[text].set()
            assert self.gates[text].wait(60)
        if text in self.fail:
            raise self.fail[text]
        return Compiled(self.size)


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


def lit(text: str) -> Constraint:
    return Constraint.literal(text)


T: Any = "a tokenizer"


def result(future: Future[Any]) -> Any:
    return future.result(timeout=60)


def test_the_same_content_is_compiled_once(compiler: Compiler) -> None:
    cache = CompileCache(compile=compiler)
    compiler.hold("a")
    futures = [cache.get(lit("a"), T) for _ in range(5)]
    compiler.gates["a"].set()
    assert len({id(result(future)) for future in futures}) == 1
    assert cache.get(lit("a"), T).done()
    assert cache.get(lit("a"), T).result() is result(futures[0])
    assert result(cache.get(lit("a"), "another tokenizer")) is not result(futures[0])  # type: ignore[arg-type]
    assert compiler.seen == ["a", "a"]
    stats = cache.stats()
    assert (stats.misses, stats.joined, stats.hits) == (2, 4, 2)
    assert (stats.entries, stats.bytes, stats.waiting, stats.failures) == (2, 200, 0, 0)
    cache.close()


def test_a_failure_reaches_those_who_asked_and_no_one_else(compiler: Compiler) -> None:
    cache = CompileCache(compile=compiler, workers=1)
    compiler.hold("bad")
    compiler.fail["bad"] = InvalidRequest("regex", "is bad")
    bad = [cache.get(lit("bad"), T) for _ in range(2)]
    good = [cache.get(lit(f"good {i}"), T) for i in range(8)]
    compiler.gates["bad"].set()
    for future in bad:
        with pytest.raises(InvalidRequest, match="is bad"):
            result(future)
    assert all(isinstance(result(future), Compiled) for future in good)
    compiler.fail["worse"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        result(cache.get(lit("worse"), T))
    assert isinstance(result(cache.get(lit("after"), T)), Compiled)  # the thread is still there
    assert (cache.stats().failures, cache.stats().entries) == (2, 9)
    cache.close()


def test_the_least_recently_used_go_first(compiler: Compiler) -> None:
    cache = CompileCache(compile=compiler, max_bytes=300)
    for text in "abc":
        result(cache.get(lit(text), T))
    assert cache.get(lit("a"), T).done()  # used again: b is now the oldest
    result(cache.get(lit("d"), T))
    assert (cache.stats().entries, cache.stats().bytes, cache.stats().evictions) == (3, 300, 1)
    assert [cache.get(lit(text), T).done() for text in "acd"] == [True] * 3
    result(cache.get(lit("b"), T))
    assert compiler.seen == list("abcdb")
    compiler.size = 1000  # alone larger than all that may be kept: it stays, for those who come next
    result(cache.get(lit("huge"), T))
    assert (cache.stats().entries, cache.stats().bytes) == (1, 1000)
    cache.close()


def test_tables_that_grow_are_counted_again(compiler: Compiler) -> None:
    cache = CompileCache(compile=compiler, max_bytes=300)
    first = result(cache.get(lit("a"), T))
    result(cache.get(lit("b"), T))
    first.memory_bytes = 250
    result(cache.get(lit("a"), T))
    assert (cache.stats().entries, cache.stats().bytes) == (1, 250)
    cache.close()


def test_too_slow_is_an_error_for_that_request_only(compiler: Compiler) -> None:
    cache = CompileCache(compile=compiler, workers=1, time_limit_s=0.01, max_stuck=2)
    for text in ("slow", "slower"):
        compiler.hold(text)
        future, waiting = cache.get(lit(text), T), cache.get(lit(text + "!"), T)
        with pytest.raises(InvalidRequest, match=r"takes longer than 0\.01 s to compile"):
            result(future)
        assert isinstance(result(waiting), Compiled)  # behind it, with one worker: the stuck one was replaced
    with pytest.raises(InvalidRequest, match="takes longer"):
        result(cache.get(lit("slow"), T))  # still running: not started again
    with pytest.raises(InvalidRequest, match="2 others are past their time limit"):
        result(cache.get(lit("more"), T))
    assert cache.get(lit("slow!"), T).done()
    assert (cache.stats().stuck, cache.stats().timeouts) == (2, 3)
    assert compiler.seen.count("slow") == 1
    for gate in compiler.gates.values():
        gate.set()
    for text in ("slow", "slower"):
        compiler.threads[text].join(60)
    assert cache.stats().stuck == 0
    assert isinstance(result(cache.get(lit("more"), T)), Compiled)
    cache.close()


def test_a_result_that_comes_late_is_kept(compiler: Compiler) -> None:
    def compile(constraint: Constraint, tokenizer: Any) -> Any:
        try:
            return compiler(constraint, tokenizer)
        except BaseException:  # as native code does, it hears of its interruption too late
            return Compiled()

    cache = CompileCache(compile=compile, workers=1, time_limit_s=0.01)
    compiler.hold("slow")
    with pytest.raises(InvalidRequest, match="takes longer"):
        result(cache.get(lit("slow"), T))
    compiler.gates["slow"].set()
    compiler.threads["slow"].join(60)
    assert cache.get(lit("slow"), T).done()
    assert compiler.seen == ["slow"]
    cache.close()


def test_cancelling_harms_no_one_else(compiler: Compiler) -> None:
    cache = CompileCache(compile=compiler, workers=1)
    compiler.hold("first")
    first = cache.get(lit("first"), T)
    assert compiler.begun["first"].wait(60)
    alone, one, other = cache.get(lit("alone"), T), cache.get(lit("both"), T), cache.get(lit("both"), T)
    assert alone.cancel()
    assert one.cancel()
    compiler.gates["first"].set()
    assert isinstance(result(other), Compiled)
    assert isinstance(result(first), Compiled)
    assert isinstance(result(cache.get(lit("last"), T)), Compiled)
    assert compiler.seen == ["first", "both", "last"]  # what nobody wanted was not compiled
    cache.close()


def test_the_queue_is_bounded(compiler: Compiler) -> None:
    cache = CompileCache(compile=compiler, workers=1, max_waiting=2)
    compiler.hold("first")
    first = cache.get(lit("first"), T)
    assert compiler.begun["first"].wait(60)
    queued = [cache.get(lit(text), T) for text in "ab"]
    with pytest.raises(InvalidRequest, match="2 others wait"):
        result(cache.get(lit("c"), T))
    compiler.gates["first"].set()
    assert all(isinstance(result(future), Compiled) for future in [first, *queued])
    cache.close()


def test_a_closed_cache_says_so(compiler: Compiler) -> None:
    cache = CompileCache(compile=compiler, workers=1)
    compiler.hold("first")
    first, second = cache.get(lit("first"), T), cache.get(lit("second"), T)
    assert compiler.begun["first"].wait(60)
    cache.close()
    cache.close()
    compiler.gates["first"].set()
    for future in (first, second, cache.get(lit("third"), T)):
        with pytest.raises(EngineClosed):
            result(future)
    assert cache.stats().entries == 0


def test_many_threads_ask_at_once() -> None:
    compiler = Compiler()
    cache = CompileCache(compile=compiler, workers=3, max_bytes=1000)
    wrong: list[object] = []

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(200):
            found = result(cache.get(lit(str(rng.randrange(20))), T))
            if not isinstance(found, Compiled):
                wrong.append(found)

    threads = [threading.Thread(target=ask, args=[seed]) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = cache.stats()
    assert not wrong
    assert stats.hits + stats.joined + stats.misses == 1200
    assert stats.misses == len(compiler.seen)
    assert stats.bytes == 100 * stats.entries <= 1000
    cache.close()


@pytest.mark.model
def test_real_constraints_through_the_cache(tokenizer: Any) -> None:
    cache = CompileCache()
    futures = [cache.get(constraint, tokenizer) for constraint, _, _ in KINDS]
    bad = cache.get(Constraint.regex("("), tokenizer)
    for future, (_, accepted, refused) in zip(futures, KINDS):
        assert result(future).accepts(accepted[0])
        assert not result(future).accepts(refused[0])
    with pytest.raises(InvalidRequest, match="position"):
        result(bad)
    assert cache.stats().bytes > 0
    cache.close()


def test_a_string_that_does_not_end_is_read_once() -> None:
    """Linear in the text: with a scan starting over at every quote this one would take hours."""
    with pytest.raises(InvalidRequest, match="json_schema"):
        Constraint.json_schema('"\\' * 1_000_000)
