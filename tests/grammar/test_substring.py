"""Substrings: exactly the spans of whole words or characters that are there, by brute force; native and reference alike."""

from __future__ import annotations

import itertools
import random
from array import array

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest
from radixrt.grammar import ir
from radixrt.grammar.built import native_module
from radixrt.grammar.compile import to_grammar
from radixrt.grammar.constraint import DEFAULT_LIMITS, Constraint, Unit
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.matcher import CompiledConstraint, Engine, compile_grammar
from radixrt.grammar.substring import substring_to_ir
from radixrt.grammar.vocabulary import Vocabulary

native = pytest.mark.skipif(native_module() is None, reason="the compiled part was not built")
ENGINES: list[Engine] = ["reference"] if native_module() is None else ["native", "reference"]

_WORD = regex.compile(r"[\p{L}\p{N}_]")
_MARK = regex.compile(r"[\p{M}\u200c\u200d]")
_ALONE = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Myanmar}\p{Khmer}]")

TEXTS = st.one_of(
    st.text("ab ", max_size=24),
    st.text("ab1_.,- \n", max_size=20),
    st.text("aé×\u0301\u00a0漢字กั🙂\u200d ", max_size=14),
    st.lists(st.sampled_from(["the", "cat", "concatenate", "he", "at", ",", ".", "ate"]), max_size=9).map(" ".join),
    st.text(st.characters(max_codepoint=0x24F, exclude_categories=["Cs"]), max_size=12),
)
OPTIONS = st.tuples(st.sampled_from(["words", "characters"]), st.none() | st.integers(1, 5), st.booleans())


def border(before: str, after: str) -> bool:
    """Whether a word may begin or end between two characters neither of which is white space."""

    def in_word(char: str) -> bool:
        return bool(_MARK.match(char)) or (bool(_WORD.match(char)) and not _ALONE.match(char))

    return not _MARK.match(after) and not (in_word(before) and in_word(after))


def units(text: str, unit: Unit) -> list[tuple[int, int]]:
    if unit == "characters":
        return [(i, i + 1) for i in range(len(text))]
    edges = [0, *(i for i in range(1, len(text)) if _edge(text[i - 1], text[i])), len(text)]
    return [(a, b) for a, b in itertools.pairwise(edges) if text[a:b].strip()]


def _edge(before: str, after: str) -> bool:
    return before.isspace() or after.isspace() or border(before, after)


def outputs(text: str, unit: Unit, most: int | None, empty: bool) -> set[str]:
    """All of them, span by span."""
    spans = units(text, unit)
    found = {
        text[spans[i][0] : spans[j][1]]
        for i in range(len(spans))
        for j in range(i, len(spans))
        if most is None or j - i < most
    }
    return found | ({""} if empty else set())


def language(grammar: ir.Grammar) -> set[str]:
    """Every string of the automaton, by walking all of its ways."""
    packed = grammar.rules["start"]
    assert isinstance(packed, ir.PackedDfa)
    words, states, at = array("i", packed.words), [], 0
    for _ in range(packed.states):
        end = at + 2 + 3 * words[at + 1]
        states.append((words[at], [tuple(words[i : i + 3]) for i in range(at + 2, end, 3)]))
        at = end
    assert at == len(words)
    found, todo, used = set(), [(0, b"")], set()
    while todo:
        state, text = todo.pop()
        used.add(state)
        last, edges = states[state]
        if last:
            assert text not in found  # one way each: deterministic
            found.add(text)
        assert last or edges or len(states) == 1  # no dead end
        assert [e[0] for e in edges] == sorted({e[0] for e in edges})
        todo += [(to, text + bytes((low,))) for low, high, to in edges if low == high]
    assert len(used) == len(states)
    return {text.decode() for text in found}


@settings(max_examples=400, deadline=None)
@given(TEXTS, OPTIONS)
def test_the_language_is_every_span(text: str, options: tuple[Unit, int | None, bool]) -> None:
    expected = outputs(text, *options)
    made = substring_to_ir(text, *options, native=False)
    assert language(made) == expected
    assert all(word in text for word in expected)
    if native_module() is not None:
        assert substring_to_ir(text, *options) == made


@pytest.mark.parametrize(
    ("text", "taken", "refused"),
    [
        ("the concatenated cat", ["cat", "the", "concatenated cat"], ["con", "he", "at", "catenated", " cat", "the "]),
        ("Total: $12.50 (net)", ["$12.50", "12", "Total: $", "(net)", "(net"], ["2.50", "Tot", "et)", "$ 12"]),
        ("don't  stop\nnow", ["don't", "don't  stop", "stop\nnow"], ["don't stop", "stop now", "do"]),
        ("東京タワーです", ["東京", "タワー", "京タ"], ["東タ", ""]),
        ("cafe\u0301 au", ["cafe\u0301", "au"], ["cafe", "\u0301 au"]),
        ("서울에서 만나요", ["서울에서", "만나요"], ["서울", "에서"]),
        ("a_b x-y", ["a_b", "x", "-y"], ["a", "_b"]),
    ],
)
def test_what_a_word_is(text: str, taken: list[str], refused: list[str]) -> None:
    made = language(to_grammar(Constraint.substring(text)))
    assert [word for word in taken if word not in made] == []
    assert [word for word in refused if word in made] == []


def vocabulary(text: str, rng: random.Random) -> Vocabulary:
    """Single bytes, pieces of the text that are cut anywhere, pieces that are near it, and an end."""
    data = text.encode()
    pieces = set()
    for _ in range(60):
        at = rng.randrange(len(data) + 1)
        pieces.add(data[at : at + rng.randint(2, 7)] + rng.choice([b"", b"", b"x", b" "]))
    tokens = [bytes((byte,)) for byte in range(256)] + sorted(pieces - {b""})
    return Vocabulary((*tokens, b""), (len(tokens),))


def mask_of(matcher: object, size: int, remaining: int | None = None) -> set[int]:
    mask = np.zeros((1, (size + 31) // 32), dtype=np.int32)
    if remaining is None:
        matcher.fill_mask(mask, 0)  # type: ignore[attr-defined]
    else:
        matcher.fill_mask_within(mask, 0, remaining)  # type: ignore[attr-defined]
    return {int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))}


def compiled(
    text: str, options: tuple[Unit, int | None, bool], words: Vocabulary, engine: Engine
) -> CompiledConstraint:
    return compile_grammar(substring_to_ir(text, *options), None, vocabulary=words, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=60, deadline=None)
@given(TEXTS.filter(lambda text: bool(text.strip())), OPTIONS, st.integers(0, 2**32))
def test_masks_allow_exactly_what_goes_on(
    engine: Engine, text: str, options: tuple[Unit, int | None, bool], seed: int
) -> None:
    rng = random.Random(seed)
    words = vocabulary(text, rng)
    allowed = {word.encode() for word in outputs(text, *options)}
    begun = {word[:n] for word in allowed for n in range(len(word) + 1)}
    matcher, said = compiled(text, options, words, engine).matcher(), b""
    while True:
        mask = mask_of(matcher, words.size)
        expected = {token for token, spelled in enumerate(words.spelled) if spelled and said + spelled in begun}
        assert mask == expected | (set(words.ends) if said in allowed else set())
        assert matcher.can_end == (said in allowed)
        if not expected:
            return
        token = rng.choice(sorted(expected))
        assert matcher.accept(token)
        said += words.spelled[token]


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=60, deadline=None)
@given(TEXTS.filter(lambda text: bool(text.strip())), OPTIONS, st.integers(0, 2**32))
def test_every_budget_that_is_enough_ends_in_a_whole_output(
    engine: Engine, text: str, options: tuple[Unit, int | None, bool], seed: int
) -> None:
    rng = random.Random(seed)
    words = vocabulary(text, rng)
    constraint = compiled(text, options, words, engine)
    matcher, left, said = constraint.matcher(), constraint.min_tokens + rng.randint(0, 4), b""
    while left or not matcher.can_end:
        assert left > 0
        mask = mask_of(matcher, words.size, left) - set(words.ends)
        if not mask:
            assert matcher.can_end
            break
        token = rng.choice(sorted(mask))
        assert matcher.accept(token)
        said, left = said + words.spelled[token], left - 1
    assert said.decode() in outputs(text, *options)


def document(words: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    known = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 9))) for _ in range(3000)]
    drawn = rng.choices(known, [1 / (i + 1) for i in range(len(known))], k=words)
    return " ".join(word + rng.choice(["", "", "", ",", "."]) for word in drawn)


@native
@pytest.mark.parametrize("unit", ["words", "characters"])
def test_the_automaton_is_linear_in_the_text(unit: Unit) -> None:
    repetitive = ["ab " * 4000, "a" * 12000, "a" * 6000 + " " + "a" * 6000, "ab" * 3000 + "b" * 6000]
    for text in [document(2000), document(20_000), *repetitive]:
        packed = substring_to_ir(text, unit).rules["start"]
        assert isinstance(packed, ir.PackedDfa)
        assert packed.states <= 2 * len(text) + 1


@native
def test_a_large_text_has_its_spans_and_no_others() -> None:
    text = document(20_000)
    rng = random.Random(1)
    constraint = compile_grammar(
        to_grammar(Constraint.substring(text)), None, vocabulary=Vocabulary(tuple(bytes((b,)) for b in range(256)), ())
    )
    spans = units(text, "words")
    for _ in range(300):
        first = rng.randrange(len(spans))
        last = min(len(spans) - 1, first + rng.choice([0, 1, 3, 40, 400]))
        quoted = text[spans[first][0] : spans[last][1]]
        assert constraint.accepts(quoted.encode())
        at = rng.randrange(len(quoted))
        other = quoted[:at] + rng.choice("abz ") + quoted[at + 1 :]
        inside = any(
            _edge(text[i - 1], text[i]) if i else True
            for i in (m.start() for m in regex.finditer(regex.escape(other), text, overlapped=True))
            if i + len(other) == len(text) or _edge(text[i + len(other) - 1], text[i + len(other)])
        ) and bool(other.strip() == other)
        assert constraint.accepts(other.encode()) == inside


REFUSED = [
    (lambda: Constraint.substring(5), "substring: must be a string, not int"),  # type: ignore[arg-type]
    (lambda: Constraint.substring(""), "substring: has nothing in it: no output is possible"),
    (lambda: Constraint.substring(" \n\t"), "substring: has nothing in it"),
    (lambda: Constraint.substring("a\ud800"), "substring: is not Unicode text: lone surrogate U+D800 at character 1"),
    (lambda: Constraint.substring("a" * (DEFAULT_LIMITS.substring + 1)), "at most 400,000 are taken"),
    (lambda: Constraint.substring("a", unit="word"), "unit='word'; did you mean 'words'?"),  # type: ignore[arg-type]
    (lambda: Constraint.substring("a", max_length=0), "max_length=0: must be an integer of at least 1"),
    (lambda: Constraint.substring("a", max_length=True), "max_length=True: must be"),
    (lambda: Constraint.substring("a", empty=1), "empty=1: must be true or false"),  # type: ignore[arg-type]
    (lambda: Constraint.from_dict({"type": "substring"}), "constraint.text: is missing"),
    (lambda: Constraint.from_dict({"type": "substring", "text": "a", "units": "words"}), "did you mean 'unit'"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(make: object, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make()  # type: ignore[operator]
    assert message in str(refused.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_too_many_states_are_refused_by_name(engine: Engine) -> None:
    own = engine == "native"
    assert substring_to_ir("abcdef", "characters", native=own, max_states=7).rules["start"].states == 7  # type: ignore[union-attr]
    with pytest.raises(UnsupportedConstraint, match="6 characters takes an automaton of more than 6 states"):
        substring_to_ir("abcdef", "characters", native=own, max_states=6)
    with pytest.raises(UnsupportedConstraint, match="and max_length=2 .* leave max_length to max_tokens"):
        substring_to_ir("abcdef", "characters", 2, native=own, max_states=6)


def test_nothing_at_all_only_where_that_was_asked_for() -> None:
    for text, unit in ((" ", "words"), ("", "characters"), ("", "words")):
        for own in (True, False):
            assert language(substring_to_ir(text, unit, None, True, native=own)) == {""}  # type: ignore[arg-type]
    assert language(to_grammar(Constraint.substring("a b", empty=True))) == {"", "a", "b", "a b"}


def test_it_stands_inside_of_others() -> None:
    quote = Constraint.sequence("<q>", Constraint.substring("the cat"), "</q>")
    both = Constraint.alternatives(quote, Constraint.substring("it is, I think", max_length=2))
    made = compile_grammar(to_grammar(both), None, vocabulary=Vocabulary(tuple(bytes((b,)) for b in range(256)), ()))
    for text, good in (("<q>cat</q>", True), ("<q>ca</q>", False), ("is,", True), ("is, I", False), ("the", False)):
        assert made.accepts(text.encode()) == good
    assert Constraint.from_dict(both.to_dict()) == both
