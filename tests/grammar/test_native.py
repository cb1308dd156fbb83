"""The native automaton gives what the Python reference gives: masks, moves, forced text, plans, on grammars of every kind."""

from __future__ import annotations

import os
import random
import re
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from radixrt.grammar import ir
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.matcher import AutomatonLimits, CompiledConstraint, Matcher, compile_grammar, fill_masks
from radixrt.grammar.program import _KINDS, program
from radixrt.grammar.vocabulary import Vocabulary, vocabulary_of
from tests.grammar.grammars import ALPHABET, expressions, grammars, literal, text_but, vocabularies

_native = pytest.importorskip("radixrt.grammar._native", reason="built without a compiler")

BYTES = Vocabulary.of([*[bytes([b]) for b in range(256)], b"<end>"], [256])


def both(
    grammar: ir.Grammar, vocabulary: Vocabulary, **limits: Any
) -> tuple[CompiledConstraint, CompiledConstraint] | None:
    """The grammar on both engines; None if both refuse it."""
    made, problems = [], []
    for engine in ("native", "reference"):
        try:
            made.append(
                compile_grammar(grammar, None, vocabulary=vocabulary, engine=engine, limits=AutomatonLimits(**limits))
            )
        except UnsupportedConstraint as error:
            problems.append(str(error))
    assert len(made) in (0, 2), problems
    return (made[0], made[1]) if made else None


def row(matcher: Matcher, remaining: int | None = None) -> list[int]:
    mask = np.full((2, matcher.constraint.vocabulary.words + 1), -1, np.int32)
    if remaining is None:
        matcher.fill_mask(mask, 1)
    else:
        matcher.fill_mask_within(mask, 1, remaining)
    assert (mask[0] == -1).all(), "another row was written"
    return np.flatnonzero(np.unpackbits(mask[1].view(np.uint8), bitorder="little")).tolist()


def compare(native: Matcher, reference: Matcher, rng: random.Random) -> list[int]:
    """Everything the two say about where they stand; the allowed tokens."""
    for name in ("can_end", "finished", "min_tokens_to_end", "min_bytes_to_end"):
        assert getattr(native, name) == getattr(reference, name), name
    for name in ("forced_bytes", "shortest_completion", "plan"):
        assert getattr(native, name)() == getattr(reference, name)(), name
    assert native._raw.can_continue == reference._raw.can_continue
    budgets = [0, 1, 2, 3, native.min_tokens_to_end, native.min_tokens_to_end + 1, 50]
    rng.shuffle(budgets)  # what is known from one call serves the next
    for remaining in budgets:
        assert row(native, remaining) == row(reference, remaining), remaining
        token = rng.randrange(native.constraint.vocabulary.size)
        assert native.allows_within(token, remaining) == reference.allows_within(token, remaining)
    allowed = row(native)
    assert allowed == row(reference)
    return allowed


def walk(made: tuple[CompiledConstraint, CompiledConstraint], seed: int, steps: int) -> None:
    """A random walk on both, with wrong tokens, steps back and copies."""
    rng = random.Random(seed)
    native, reference = (constraint.matcher() for constraint in made)
    depth = 0
    for _ in range(steps):
        allowed = compare(native, reference, rng)
        wrong = rng.randrange(-2, native.constraint.vocabulary.size + 2)
        if wrong not in allowed:
            assert not native.accept(wrong) and not reference.accept(wrong)
        action = rng.random()
        if action < 0.15 and depth:
            back = rng.randint(1, depth)
            native.rollback(back)
            reference.rollback(back)
            depth -= back
        elif action < 0.25:
            native, old = native.copy(), native
            if allowed:
                old.accept(allowed[0])  # moving the one does not move the other
        elif allowed:
            token = rng.choice(allowed)
            assert native.accept(token) and reference.accept(token)
            depth += 1
        elif depth:
            native.rollback(1)
            reference.rollback(1)
            depth -= 1


@settings(max_examples=30 if "CI" in os.environ else 300)  # the reference takes minutes for some ambiguous grammars
@given(grammars(), vocabularies(), st.integers())
def test_random_grammars(grammar: ir.Grammar, vocabulary: Vocabulary, seed: int) -> None:
    made = both(grammar, vocabulary)
    assume(made)
    assert made
    walk(made, seed, 8)


@settings(max_examples=300)
@given(grammars())
def test_the_tables_are_those_of_python(grammar: ir.Grammar) -> None:
    """Also for a grammar whose parts are shared; and what the native side refuses Python refuses with a reason."""
    shared = {
        name: ir.Alt((expr, grammar.rules["start"], ir.Seq((expr, expr)))) for name, expr in grammar.rules.items()
    }
    for rules in (dict(grammar.rules), shared):
        try:
            expected = program(ir.Grammar(rules))
        except UnsupportedConstraint as error:
            with pytest.raises(UnsupportedConstraint, match=re.escape(str(error))):
                program(ir.Grammar(rules), engine=_native)
            continue
        assert program(ir.Grammar(rules), engine=_native) == expected
        flat = _native.flatten(rules, "start", _KINDS, 500_000, 1000, 1 << 24)
        assert flat is not None and flat[0] == expected.code.tobytes(), "it was not the native one"


@settings(max_examples=60)
@given(expressions(("start",)), st.integers(0, 40), st.integers(0, 60), vocabularies(), st.integers())
def test_counts_beyond_a_token(item: ir.Expr, low: int, more: int, vocabulary: Vocabulary, seed: int) -> None:
    """Counts further from their bounds than a token is long share masks; near them they do not."""
    start = ir.Seq((ir.Repeat(ir.Alt((literal("a"), ir.Seq((literal("b"), item)))), low, low + more), literal('"')))
    made = both(ir.Grammar({"start": start}), vocabulary)
    assume(made)
    assert made
    walk(made, seed, 10)


@settings(max_examples=150)
@given(
    st.one_of(st.integers(0, 2), st.integers(0, 30)),
    st.one_of(st.integers(0, 3), st.integers(0, 30), st.none()),
    st.sampled_from(
        [literal('"'), ir.Alt((literal('"'), literal("ab\\"))), ir.Seq((literal('"'), ir.JsonChars(1, 2)))]
    ),
    vocabularies(),
    st.integers(),
)
def test_json_strings_take_slices(low: int, more: int | None, end: ir.Expr, vocabulary: Vocabulary, seed: int) -> None:
    inside = ir.JsonChars(low, None if more is None else low + more)
    made = both(ir.Grammar({"start": ir.Seq((literal('"'), ir.Ref("x"), end)), "x": inside}), vocabulary)
    assume(made)
    assert made
    walk(made, seed, 15)


@settings(max_examples=150)
@given(st.text("abu", min_size=1, max_size=4), expressions(("start",)), st.booleans(), vocabularies(), st.integers())
def test_states_that_take_any_text(word: str, other: ir.Expr, counted: bool, vocabulary: Vocabulary, seed: int) -> None:
    key: ir.Expr = ir.Alt(
        (ir.Seq((text_but(word.encode()), literal('"'))), ir.Seq((literal(word), literal('"'), other)))
    )
    if counted:
        key = ir.Repeat(ir.Seq((literal('"'), key)), 1, 3)
    made = both(ir.Grammar({"start": ir.Seq((literal('"'), key))}), vocabulary)
    assume(made)
    assert made
    walk(made, seed, 12)


@settings(max_examples=60)
@given(grammars(), vocabularies(), st.integers())
def test_dropping_caches_changes_nothing(grammar: ir.Grammar, vocabulary: Vocabulary, seed: int) -> None:
    made = both(grammar, vocabulary)
    assume(made)
    small = compile_grammar(
        grammar, None, vocabulary=vocabulary, engine="native", limits=AutomatonLimits(memory_bytes=1)
    )
    assert made
    walk((small, made[1]), seed, 12)


@given(st.text("([<", max_size=12), st.integers())
def test_stacks_survive_dropping(opened: str, seed: int) -> None:
    inner = [ir.Seq((literal(a), ir.Ref("start"), literal(b))) for a, b in ("()", "[]", "<>")]
    grammar = ir.Grammar(
        {"start": ir.Alt((literal("x"), *inner, ir.Seq((literal("("), ir.Ref("start"), literal("]")))))}
    )
    limits = AutomatonLimits(memory_bytes=1)
    matcher = compile_grammar(grammar, None, vocabulary=BYTES, engine="native", limits=limits).matcher()
    expected = compile_grammar(grammar, None, vocabulary=BYTES, engine="reference").matcher()
    for byte in opened.encode() + b"x":
        assert matcher.accept(byte) and expected.accept(byte)
        assert row(matcher) == row(expected)
    for _ in opened:
        token = random.Random(seed).choice(row(expected))
        assert matcher.accept(token) and expected.accept(token)
        assert row(matcher) == row(expected) and matcher.plan() == expected.plan()
    matcher.rollback(len(opened))
    assert matcher.min_tokens_to_end == len(opened)


def test_caches_stay_within_their_memory() -> None:
    grammar = ir.Grammar({"start": ir.Repeat(ir.byte_range(97, 122), 0, 106_000)})
    constraint = compile_grammar(
        grammar, None, vocabulary=BYTES, engine="native", limits=AutomatonLimits(memory_bytes=200_000)
    )
    matcher, other = constraint.matcher(), constraint.matcher()
    mask = np.zeros((1, BYTES.words), np.int32)
    assert other.advance_bytes(b"ab")
    for i in range(6000):
        assert matcher.accept(97 + i % 3)
        matcher.fill_mask(mask, 0)
        matcher._raw.copy()
    matcher.rollback(3000)
    assert matcher.advance_bytes(b"q" * 3000)
    assert matcher.advance_bytes(b"q" * 100_000) and matcher.can_end and not matcher.accept(97)
    assert other.advance_bytes(b"q" * 105_998) and other.can_end and not other.accept(97)
    assert constraint.memory_bytes < 4 * 200_000 + (1 << 20) + constraint.figures()["states"] * 200


@pytest.mark.model
@pytest.mark.parametrize(
    "start",
    [
        ir.Seq((literal('{"name":"'), ir.JsonChars(), literal('"}'))),
        ir.Seq((literal('{"'), ir.Alt((text_but(b"name"), literal('name":"x'))), literal('"}'))),
        ir.Seq((literal('["'), ir.JsonChars(2, 30), literal('",true]'))),
        ir.Seq((literal('"'), ir.JsonChars(0, 400), literal('"'))),
        ir.Seq((ir.Repeat(ir.byte_range(0x20, 0x7E), 0, 500), literal("\nAnswer: yes"))),
        ir.Alt(
            (
                ir.Seq((literal('"'), ir.JsonChars(), literal('"'))),
                literal('"null"'),
                ir.Repeat(ir.byte_range(48, 57), 1, 5),
            )
        ),
    ],
)
def test_the_default_vocabulary(start: ir.Expr) -> None:
    from radixrt.model.tokenizer import load_tokenizer

    vocabulary = vocabulary_of(load_tokenizer())
    made = both(ir.Grammar({"start": start}), vocabulary)
    assert made
    for seed in range(3):
        rng = random.Random(seed)
        native, reference = (constraint.matcher() for constraint in made)
        for _ in range(6):
            allowed = row(native)
            assert allowed == row(reference)
            assert native.plan() == reference.plan()
            assert native.forced_bytes() == reference.forced_bytes()
            if rng.random() < 0.5:
                least = native.min_tokens_to_end
                assert row(native, least + 1) == row(reference, least + 1)
            if not allowed:
                break
            token = rng.choice(allowed)
            assert native.accept(token) and reference.accept(token)


_ANY, _TEXT = ir.byte_range(0, 255), ["a", "aé", "é", "éa", "€", "𝄞"]


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (ir.Seq((_ANY, ir.JsonChars())), ["a", "aé"]),
        (ir.Seq((_ANY, ir.JsonChars(2, 9))), ["a", "aé"]),
        (ir.Seq((_ANY, text_but(b"ab"))), ["a", "aé"]),
        (ir.Seq((_ANY, _ANY, ir.JsonChars())), ["a", "é", "éa"]),
        (ir.Seq((_ANY, _ANY, _ANY, ir.JsonChars())), ["a", "aé", "é", "éa", "€"]),
        (ir.Seq((ir.Repeat(_ANY, 0, 3), ir.JsonChars())), _TEXT),
        (ir.Seq((ir.Bytes(b"\xc3"), ir.JsonChars())), []),
        (ir.Seq((ir.Bytes(b"\xf0\x9d"), text_but(b"ab"))), []),
        (ir.Alt((ir.Seq((_ANY, ir.JsonChars(3, 3))), literal("é"))), ["a", "aé", "é"]),
        (ir.Seq((_ANY, ir.Repeat(_ANY, 0, None))), _TEXT),
    ],
)
def test_any_text_behind_half_a_character_is_not_its_other_half(
    engine: Any, start: ir.Expr, expected: list[str]
) -> None:
    vocabulary = Vocabulary.of([*BYTES.spelled[:256], b"<end>", *(text.encode() for text in _TEXT[1:])], [256])
    matcher = compile_grammar(ir.Grammar({"start": start}), None, vocabulary=vocabulary, engine=engine).matcher()
    for remaining in (None, 9):
        allowed = row(matcher, remaining)
        assert [text for text in _TEXT if vocabulary.spelled.index(text.encode()) in allowed] == expected
        assert all(matcher.copy().accept(token) for token in allowed)


def test_one_call_fills_many_rows() -> None:
    constraints = [
        compile_grammar(ir.Grammar({"start": literal(text)}), None, vocabulary=BYTES) for text in ("ab", "cd")
    ]
    matchers = [constraint.matcher() for constraint in constraints for _ in range(3)]
    matchers[1].accept(ord("a"))
    mask = np.full((7, BYTES.words), -1, np.int32)
    fill_masks(matchers, mask, [6, 5, 4, 3, 2, 1])
    for matcher, index in zip(matchers, [6, 5, 4, 3, 2, 1]):
        one = np.zeros((1, BYTES.words), np.int32)
        matcher.fill_mask(one, 0)
        assert (mask[index] == one[0]).all() and one.any()
    assert (mask[0] == -1).all()
    with pytest.raises(ValueError, match="as many"):
        fill_masks(matchers, mask, [0])


def test_threads_share_one_constraint() -> None:
    grammar = ir.Grammar({"start": ir.Repeat(ir.Alt((literal("ab"), literal("ba"), ir.JsonChars(1, 3))), 0, 3000)})
    constraint = compile_grammar(
        grammar, None, vocabulary=BYTES, engine="native", limits=AutomatonLimits(memory_bytes=300_000)
    )
    problems: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        matcher, mask = constraint.matcher(), np.zeros((1, BYTES.words), np.int32)
        for _ in range(400):
            byte = rng.choice(b"ab")
            matcher.fill_mask(mask, 0)
            if not mask[0, byte >> 5] >> (byte & 31) & 1 or not matcher.copy().accept(byte) or not matcher.accept(byte):
                problems.append(f"{seed}: {byte}")
            _ = matcher.min_tokens_to_end

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_beyond_its_limits_a_matcher_says_so_and_the_others_go_on() -> None:
    many = ir.Alt(tuple(ir.Seq((ir.byte_range(97, 122), literal(f"{i:02}"))) for i in range(20)))
    constraint = compile_grammar(
        ir.Grammar({"start": ir.Alt((many, literal("!!")))}),
        None,
        vocabulary=BYTES,
        engine="native",
        limits=AutomatonLimits(max_items=10),
    )
    other = constraint.matcher()
    assert other.accept(33)
    one = constraint.matcher()
    for _ in range(2):
        with pytest.raises(UnsupportedConstraint, match="too ambiguous: more than 10 places"):
            one.accept(97)
    assert one.accept(33) and one.accept(33) and one.can_end and other.accept(33)


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_nesting_is_bounded(engine: Any) -> None:
    brackets = ir.Alt((literal("x"), ir.Seq((literal("["), ir.Ref("start"), literal("]")))))
    constraint = compile_grammar(
        ir.Grammar({"start": brackets}), None, vocabulary=BYTES, engine=engine, limits=AutomatonLimits(max_depth=50)
    )
    assert constraint.accepts(b"[" * 40 + b"x" + b"]" * 40)
    with pytest.raises(UnsupportedConstraint, match="nested more than 50 deep"):
        constraint.accepts(b"[" * 60)


@pytest.mark.parametrize(
    ("mask", "index", "problem"),
    [
        (np.zeros((1, 3), np.int32), 0, "too few"),
        (np.zeros((1, 9), np.int64), 0, "int32"),
        (np.zeros(9, np.int32), 0, "int32"),
        (np.zeros((1, 9), np.int32), 1, "1 rows"),
    ],
)
def test_masks_of_the_wrong_shape(mask: np.ndarray, index: int, problem: str) -> None:
    matcher = compile_grammar(ir.Grammar({"start": literal("a")}), None, vocabulary=BYTES, engine="native").matcher()
    with pytest.raises((ValueError, IndexError), match=problem):
        matcher.fill_mask(mask, index)


def test_alphabet_is_what_the_strategies_use() -> None:
    assert set(b'ab"\\') <= set(ALPHABET)
