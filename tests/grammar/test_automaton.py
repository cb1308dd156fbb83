"""The Python reference against a naive recursive matcher, and the inside of JSON strings against ``json`` itself."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from radixrt.grammar import automaton, ir
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.matcher import AutomatonLimits, CompiledConstraint, Engine, compile_grammar
from radixrt.grammar.program import ProgramLimits, program
from radixrt.grammar.vocabulary import Vocabulary
from tests.grammar import naive
from tests.grammar.grammars import ALPHABET, grammars, literal, plain, strings, vocabularies

BYTES = Vocabulary.of([*[bytes([b]) for b in range(256)], b"<end>"], [256])
ENGINES: tuple[Engine, ...] = ("reference", "auto")


def compiled(grammar: ir.Grammar, engine: Engine = "reference", vocabulary: Vocabulary = BYTES) -> CompiledConstraint:
    return compile_grammar(grammar, None, vocabulary=vocabulary, engine=engine)


@settings(max_examples=250)
@given(grammars(), st.lists(st.lists(st.sampled_from(ALPHABET), max_size=9).map(bytes), max_size=12))
@example(ir.Grammar({"start": ir.Repeat(ir.Repeat(ir.ByteSet(1 << 97), 0, 2), 3, 4)}), [])
@example(ir.Grammar({"start": ir.Alt((ir.Seq((literal("a"), ir.Ref("start"), literal("b"))), ir.EMPTY))}), [b"aaabbb"])
def test_accepts_what_the_naive_matcher_accepts(grammar: ir.Grammar, more: list[bytes]) -> None:
    simple = plain(grammar)
    try:
        constraint = compiled(grammar)
    except UnsupportedConstraint as error:
        assume("left-recursive" not in str(error))
        assert not any(naive.accepts(simple, text) for text in [*strings(3), *more])
        return
    rng = random.Random(repr(grammar))
    matcher = constraint.matcher()
    shortest = matcher.shortest_completion()
    texts = [*strings(2), *more, shortest, *(naive.mutated(shortest, rng, ALPHABET) for _ in range(10))]
    for text in texts:
        expected = naive.accepts(simple, text)
        assert constraint.accepts(text) == expected, text
        assert not expected or len(text) >= len(shortest)
        assert not expected or text.startswith(matcher.forced_bytes())
    assert naive.accepts(simple, shortest)


@settings(max_examples=100)
@given(grammars(simple=True), vocabularies(), st.integers())
def test_masks_allow_what_can_be_completed(grammar: ir.Grammar, vocabulary: Vocabulary, seed: int) -> None:
    """Every allowed token has a completion; a token that begins some short string of the language is allowed."""
    try:
        constraint = compiled(grammar, "auto", vocabulary)
    except UnsupportedConstraint:
        assume(False)
    rng, matcher, said = random.Random(seed), constraint.matcher(), b""
    known = naive.language(grammar.rules, 4)["start"]
    spelled = {text for text in known if all(byte in vocabulary.single_bytes for byte in text)}
    for _ in range(4):
        allowed = []
        for token, text in enumerate(vocabulary.spelled):
            after = matcher.copy()
            if after.accept(token):
                allowed += [token] if text else []
                ending = b"".join(vocabulary.spelled[id] for id in after.plan())
                assert naive.accepts(grammar, said + text + ending)
                assert ending == after.shortest_completion()
            elif text:
                assert not any(whole.startswith(said + text) for whole in spelled), text
        if not allowed:
            break
        token = rng.choice(allowed)
        matcher.accept(token)
        said += vocabulary.spelled[token]


@settings(max_examples=100)
@given(grammars(), vocabularies(), st.integers())
def test_following_the_plan_counts_down(grammar: ir.Grammar, vocabulary: Vocabulary, seed: int) -> None:
    try:
        matcher = compiled(grammar, "auto", vocabulary).matcher()
    except UnsupportedConstraint:
        assume(False)
    rng = random.Random(seed)
    tokens = [token for token in range(vocabulary.size) if vocabulary.spelled[token]]
    for _ in range(3 if tokens else 0):
        matcher.accept(rng.choice(tokens))
    left = matcher.min_tokens_to_end
    for token in matcher.plan():
        assert matcher.allows_within(token, left - 1) and (left == 1 or not matcher.allows_within(token, left - 2))
        assert matcher.accept(token)
        left -= 1
        assert matcher.min_tokens_to_end == left
    assert left == 0 and matcher.can_end and matcher.plan() == []


def valid_inside(text: bytes) -> int | None:
    """How many characters a JSON string's inside is, by ``json``; None if it is not one."""
    try:
        whole = json.loads(b'"' + text + b'"')
        whole.encode("utf-8")
    except (ValueError, UnicodeEncodeError):
        return None
    return len(whole) if isinstance(whole, str) else None


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.characters(exclude_categories=["Cs"]).map(str.encode),
            st.sampled_from(
                [b"\\n", b'\\"', b"\\\\", b"\\u0041", b"\\uD83D\\uDE00", b"\\ud800", b"\\udc00", b"\\x", b"\n"]
            ),
            st.sampled_from(
                [b"\\uD83D", b"\\uDE00", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"\xe0\x80\x80"]
            ),
            st.binary(max_size=2),
        ),
        max_size=6,
    ).map(b"".join),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_the_inside_of_json_strings(engine: Engine, text: bytes, low: int, more: int) -> None:
    length = valid_inside(text)
    start = ir.Seq((literal('"'), ir.JsonChars(low, low + more), literal('"')))
    for inside, expected in [
        (ir.JsonChars(), length is not None),
        (ir.JsonChars(low), length is not None and low <= length),
        (ir.JsonChars(low, low + more), length is not None and low <= length <= low + more),
    ]:
        start = ir.Seq((literal('"'), inside, literal('"')))
        assert compiled(ir.Grammar({"start": start}), engine).accepts(b'"' + text + b'"') == expected


def test_every_short_inside() -> None:
    constraints = [compiled(ir.Grammar({"start": ir.JsonChars()}), engine) for engine in ENGINES]
    texts = [
        bytes([a, b]) for a in range(256) for b in (*range(0x18, 0x24), 0x5B, 0x5C, 0x6E, 0x75, *range(0x7E, 0xC2))
    ]
    for text in texts:
        for constraint in constraints:
            assert constraint.accepts(text) == (valid_inside(text) is not None), text


REFUSED = [
    ({"start": ir.NOTHING}, "accepts nothing"),
    ({"start": ir.ByteSet(0)}, "accepts nothing"),
    ({"start": ir.Seq((literal("a"), ir.Ref("start")))}, "accepts nothing"),
    ({"start": ir.Repeat(ir.NOTHING, 1, 3)}, "accepts nothing"),
    ({"start": ir.Dfa((((97, 97, 0),),), frozenset())}, "accepts nothing"),
    ({"start": ir.JsonChars(3, 2)}, "accepts nothing"),
    ({"start": ir.Ref("item")}, "no rule 'item'"),
    ({"start": ir.Ref("valeu"), "value": ir.EMPTY}, "did you mean 'value'"),
    ({"other": ir.EMPTY}, "no rule 'start'"),
    ({"start": ir.Repeat(literal("a"), -1, 3)}, "at least 0"),
    ({"start": ir.ByteSet(1 << 256)}, "256 bytes"),
    ({"start": ir.Dfa((((97, 98, 1),),), frozenset([0]))}, "bad edge"),
    ({"start": ir.Dfa((((97, 98, 0), (98, 99, 0)),), frozenset([0]))}, "bad edge"),
    ({"start": ir.Dfa((), frozenset())}, "without states"),
    (
        {"start": ir.Repeat(ir.Repeat(ir.Repeat(literal("a"), 1 << 20, None), 1 << 20, None), 1 << 20, None)},
        "2\\*\\*40",
    ),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("rules", "problem"), REFUSED, ids=[problem for _, problem in REFUSED])
def test_refused_with_the_reason(engine: Engine, rules: dict[str, ir.Expr], problem: str) -> None:
    with pytest.raises(UnsupportedConstraint, match=problem):
        compiled(ir.Grammar(rules), engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_bytes_that_no_token_is(engine: Engine) -> None:
    ascii_only = Vocabulary.of([*[bytes([b]) for b in range(128)], "é".encode(), b"<end>"], [129])
    with pytest.raises(UnsupportedConstraint, match="0xC3"):
        compiled(ir.Grammar({"start": literal("né")}), engine, ascii_only)
    constraint = compiled(ir.Grammar({"start": ir.Alt((literal("né"), literal("nee")))}), engine, ascii_only)
    matcher = constraint.matcher()
    assert matcher.plan() == [ord("n"), ord("e"), ord("e")]
    assert matcher.accept(ord("n")) and matcher.accept(128) and matcher.can_end, "a longer token may spell it"


@pytest.mark.parametrize("engine", ENGINES)
def test_limits_are_errors(engine: Engine) -> None:
    deep: ir.Expr = literal("a")
    for _ in range(60_000):
        deep = ir.Seq((deep, literal("b")))
    with pytest.raises(UnsupportedConstraint, match=r"nested more than 1,000 deep"):
        compiled(ir.Grammar({"start": deep}), engine)
    wide = ir.Alt(tuple(ir.Seq((literal(str(i)), literal("x"))) for i in range(100)))
    with pytest.raises(UnsupportedConstraint, match="more than 50 parts"):
        program(ir.Grammar({"start": wide}), ProgramLimits(max_nodes=50))
    with pytest.raises(UnsupportedConstraint, match="more than 10 bytes"):
        program(ir.Grammar({"start": ir.Bytes(b"x" * 11)}), ProgramLimits(max_bytes=10))


@pytest.mark.parametrize("engine", [*ENGINES, "auto"])
def test_outputs_that_are_long_at_the_least_are_refused_by_that_length(engine: Engine) -> None:
    grammar = ir.Grammar({"start": ir.Repeat(ir.Alt((literal("ab"), literal("c"))), 1000, None)})
    with pytest.raises(UnsupportedConstraint, match="at least 1,000 bytes; the limit is 999"):
        compile_grammar(grammar, None, vocabulary=BYTES, limits=AutomatonLimits(max_shortest=999), engine=engine)
    compile_grammar(grammar, None, vocabulary=BYTES, limits=AutomatonLimits(max_shortest=1000), engine=engine)


def test_shared_parts_are_not_multiplied() -> None:
    """An expression used twice at each of 60 levels: 2**60 if it were written out."""
    expr: ir.Expr = literal("a")
    for _ in range(30):
        expr = ir.Alt((ir.Seq((expr, literal("b"))), ir.Seq((expr, literal("c")))))
    constraint = compiled(ir.Grammar({"start": expr}), "auto")
    assert constraint.accepts(b"a" + b"bc" * 15) and not constraint.accepts(b"a" + b"bc" * 16)


@pytest.mark.parametrize("engine", ENGINES)
def test_right_recursion_stays_flat(engine: Engine) -> None:
    rules = {"start": ir.Alt((literal("."), ir.Seq((literal("ab"), ir.Ref("start")))))}
    constraint = compiled(ir.Grammar(rules), engine)
    assert constraint.accepts(b"ab" * 2000 + b".")
    assert constraint.figures()["configurations"] < 20


def test_one_engine_is_not_silently_the_other() -> None:
    assert compiled(ir.Grammar({"start": literal("a")})).engine == "reference"
    assert automaton.NEVER == 1 << 40
