"""Choices: exactly the given strings, whatever they share, and cheap in the large."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.grammar import ir
from radixrt.grammar.choices import choices_to_ir
from tests.grammar.naive import accepts, language


def words(grammar: ir.Grammar, length: int = 60) -> list[str]:
    return sorted(word.decode() for word in language(grammar.rules, length)[grammar.start])


def expressions(grammar: ir.Grammar) -> Iterable[tuple[ir.Expr, int]]:
    """Every expression with its depth inside its rule."""
    stack = [(expr, 1) for expr in grammar.rules.values()]
    while stack:
        expr, depth = stack.pop()
        yield expr, depth
        if isinstance(expr, ir.Seq | ir.Alt):
            stack += [(item, depth + 1) for item in expr.items]


def first_bytes(expr: ir.Expr) -> set[int]:
    match expr:
        case ir.Bytes(value):
            return {value[0]}
        case ir.Seq(items) if items:
            return first_bytes(items[0])
        case ir.Alt(items):
            return set().union(*map(first_bytes, items))
    return set()


@given(st.lists(st.text("abé", max_size=6), min_size=1, max_size=12))
def test_the_language_is_the_list(choices: list[str]) -> None:
    assert words(choices_to_ir(choices)) == sorted(set(choices))


@given(st.lists(st.text(max_size=4), min_size=1, max_size=6), st.text(max_size=4))
def test_any_text(choices: list[str], other: str) -> None:
    grammar = choices_to_ir(choices)
    assert all(accepts(grammar, choice) for choice in choices)
    assert accepts(grammar, other) == (other in choices)


@given(st.lists(st.text("ab", max_size=8), min_size=2, max_size=30))
def test_branches_begin_with_different_bytes(choices: list[str]) -> None:
    for expr, _ in expressions(choices_to_ir(choices)):
        if isinstance(expr, ir.Alt):
            firsts = [first_bytes(item) for item in expr.items]
            assert sum(map(len, firsts)) == len(set().union(*firsts))
            assert [item for item in expr.items if item == ir.EMPTY] == [ir.EMPTY] * (firsts.count(set()))
            assert firsts.count(set()) <= 1


@pytest.mark.parametrize(
    "choices",
    [["a" * i for i in range(3000)], ["ab" * i + "c" for i in range(1000)], [f"item {i}" for i in range(10_000)]],
    ids=["inside one another", "one long chain", "many"],
)
def test_large_lists_stay_shallow_and_small(choices: list[str]) -> None:
    grammar = choices_to_ir(choices)
    found = list(expressions(grammar))
    assert max(depth for _, depth in found) <= 60
    assert len(found) <= 8 * len(choices)
    written = sum(len(expr.value) for expr, _ in found if isinstance(expr, ir.Bytes))
    trie = 0  # its edges: what each word adds to the one before it
    for before, word in itertools.pairwise(["", *sorted(choices)]):
        trie += len(word) - sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, word)))
    assert written == trie  # every edge is written once


def test_no_choice_is_the_empty_language() -> None:
    assert words(choices_to_ir([])) == []
    assert words(choices_to_ir([""])) == [""]
