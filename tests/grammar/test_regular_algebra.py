"""The algebra of automata against Python sets: over a two-letter alphabet every language is a set of short texts."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.regular import CharDfa, RegularLimits
from radixrt.grammar.regular.minimize import _hopcroft, minimize

SHORT = ["".join(t) for n in range(6) for t in itertools.product("ab", repeat=n)]
AB = CharDfa.from_pattern("[ab]*", anchored=True)


def patterns() -> st.SearchStrategy[str]:
    return st.recursive(
        st.sampled_from(["a", "b", "[ab]", "", "ab", "a*", "(?:ab|b)"]),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda t: f"(?:{t[0]})(?:{t[1]})"),
            st.tuples(inner, inner).map(lambda t: f"(?:{t[0]}|{t[1]})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}"])).map(
                lambda t: f"(?:{t[0]}){t[1]}"
            ),
        ),
        max_leaves=5,
    )


def made(pattern: str) -> CharDfa:
    return CharDfa.from_pattern(pattern, anchored=True)


def texts(dfa: CharDfa) -> set[str]:
    return {t for t in SHORT if dfa.accepts(t)}


def matched(pattern: str) -> set[str]:
    return {t for t in SHORT if re.fullmatch(pattern, t)}


@settings(max_examples=200, deadline=None)
@given(patterns(), patterns())
def test_operations_are_those_of_sets(p: str, q: str) -> None:
    a, b = made(p), made(q)
    assert texts(a) == matched(p)
    assert texts(a & b) == matched(p) & matched(q)
    assert texts(a | b) == matched(p) | matched(q)
    assert texts(a - b) == matched(p) - matched(q)
    assert texts(~a) == set(SHORT) - matched(p)
    assert texts(a.concat(b)) == matched(f"(?:{p})(?:{q})")
    assert (a <= b) == (a - b).is_empty == ((a & b) == a)
    assert a.disjoint(b) == (a & b).is_empty
    assert ~~a == a and a | ~a == CharDfa.anything() and (a & ~a) == CharDfa.nothing()
    assert ~(a | b) == ~a & ~b and a - b == a & ~b


def repeated(once: set[str], low: int, high: int | None) -> set[str]:
    """By sets of short texts: ``re`` takes for ever for some."""
    found: set[str] = set()
    turn, seen = {""}, set[frozenset[str]]()
    for count in itertools.count():
        if count >= low:
            found |= turn
        if count == high or (count >= low and frozenset(turn) in seen):
            return found & set(SHORT)
        seen |= {frozenset(turn)} if count >= low else set()
        turn = {a + b for a in turn for b in once if len(a + b) <= len(SHORT[-1])}
    raise AssertionError


@settings(max_examples=100, deadline=None)
@given(patterns(), st.integers(0, 3), st.one_of(st.none(), st.integers(0, 3)))
def test_repetition(p: str, low: int, more: int | None) -> None:
    high = None if more is None else low + more
    counter = f"{{{low},{'' if high is None else high}}}"
    assert made(p).repeat(low, high) == made(f"(?:{p}){counter}")
    assert texts(made(p).repeat(low, high)) == repeated(matched(p), low, high)


@settings(max_examples=100, deadline=None)
@given(patterns(), patterns())
def test_equal_languages_are_equal_values(p: str, q: str) -> None:
    """Minimal in one canonical form: spelled otherwise, split and joined, it is the same value."""
    a = made(p)
    assert a == made(f"(?:{p})|(?:{p})") == (a & made(q)) | (a - made(q)) and hash(a) == hash(made(f"(?:(?:{p}))"))
    assert told_apart(a) == a.states * (a.states - 1) // 2


def told_apart(dfa: CharDfa) -> int:
    """How many pairs of states some text tells apart, by filling the table of pairs."""
    pairs = list(itertools.combinations(range(dfa.states), 2))
    marked = {(s, t) for s, t in pairs if (s in dfa.accepting) != (t in dfa.accepting)}
    while True:
        more = {
            (s, t)
            for s, t in pairs
            if (s, t) not in marked and any((min(p), max(p)) in marked for p in zip(dfa.rows[s], dfa.rows[t]))
        }
        if not more:
            return len(marked)
        marked |= more


@settings(max_examples=200, deadline=None)
@given(patterns())
def test_questions(p: str) -> None:
    a, found = made(p), matched(p)
    longest = a.max_length
    assert a.is_finite == (longest is not None)
    if longest is not None and longest <= 5:
        assert a.count == len(found) and list(a.words()) == sorted(found, key=lambda t: (len(t), t))
        assert longest == max(map(len, found))
    ordered = sorted(found, key=lambda t: (len(t), t))
    assert list(a.words(len(ordered)))[: len(ordered)] == ordered
    if ordered:
        assert a.shortest() == ordered[0] and a.min_length == len(ordered[0])


def test_the_constants() -> None:
    nothing, anything = CharDfa.nothing(), CharDfa.anything()
    assert nothing.is_empty and nothing.is_finite and nothing.count == 0 and nothing.shortest() is None
    assert list(nothing.words()) == [] and nothing.max_length == 0 and nothing.min_length is None
    assert anything.is_universal and not anything.is_finite and anything.count is None and anything.max_length is None
    assert anything == CharDfa.from_pattern("", anchored=False) == CharDfa.from_pattern(r"[\s\S]*", anchored=True)
    assert anything.accepts("\U0010ffff\0") and not anything.accepts("\ud800")
    one = CharDfa.length(1, 1)
    assert one.count == 0x110000 - 0x800 and one == CharDfa.from_pattern("[^]", anchored=True)
    assert CharDfa.length(2) == CharDfa.from_pattern("[^]{2,}", anchored=True)
    assert CharDfa.length(2, 5) - CharDfa.length(3) == CharDfa.length(2, 2)
    assert CharDfa.length(0) == anything and CharDfa.literal("") == CharDfa.length(0, 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.sampled_from("abé😀"), max_size=4), max_size=8))
def test_word_lists(words: list[str]) -> None:
    dfa = CharDfa.literals(words)
    assert list(dfa.words()) == sorted(set(words), key=lambda w: (len(w), w)) and dfa.count == len(set(words))
    union = CharDfa.nothing()
    for word in words:
        union = union | CharDfa.literal(word)
    assert union == dfa


def test_ten_thousand_words() -> None:
    words = [f"item-{n * 7919 % 100_003:05}" for n in range(10_000)]
    dfa = CharDfa.literals(words)
    assert dfa.count == 10_000 and all(dfa.accepts(w) for w in words[:100]) and not dfa.accepts("item-99999x")


def test_long_chains_are_minimized_too() -> None:
    assert CharDfa.from_pattern("(?:abc){0,300}x*", anchored=True).states == 902
    assert CharDfa.from_pattern("(?:a|a){500}[ab]*", anchored=True).states == 502
    chain = CharDfa.from_pattern("(?:[ab]{30}x)*", anchored=True)
    assert chain.states == 32


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 12), st.data())
def test_hopcroft_splits_as_moore_does(n: int, data: st.DataObject) -> None:
    rows = [[data.draw(st.integers(0, n - 1)) for _ in range(2)] for _ in range(n)]
    order = [0]
    for s in order:
        order += [t for t in dict.fromkeys(rows[s]) if t not in order]
    place = {s: i for i, s in enumerate(order)}
    rows = [[place[t] for t in rows[s]] for s in order]
    final = [data.draw(st.booleans()) for _ in order]
    if len(set(final)) == 2:
        groups = _hopcroft(rows, [int(flag) for flag in final])
        assert len(set(groups)) == len(minimize(rows, final)[0])


def test_what_does_not_fit_is_refused() -> None:
    big = CharDfa.length(0, 5000)
    with pytest.raises(UnsupportedConstraint, match="limit of 100 states"):
        big.product(CharDfa.length(10), lambda x, y: x and y, limits=RegularLimits(states=100))
    with pytest.raises(UnsupportedConstraint, match="limit of 20,000 states"):
        CharDfa.length(0, 100_000)
    with pytest.raises(UnsupportedConstraint, match="positions"):
        AB.repeat(0, 100_000)
    with pytest.raises(UnsupportedConstraint, match="work"):
        CharDfa.literals([str(n) * 1000 for n in range(10, 2000)])
    with pytest.raises(InvalidRequest, match=r"length=3\.\.2: must not be negative nor out of order"):
        CharDfa.length(3, 2)
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        CharDfa.literal("\ud800")
