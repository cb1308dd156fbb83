"""The compiled algebra of character automata beside its Python reference: equal values, equal refusals."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.regular import CharDfa, RegularLimits, chardfa, encode, minimize, to_bytes, to_json
from radixrt.grammar.regular.charset import LAST, charset, complement

native = pytest.importorskip("radixrt.grammar._native", reason="built without a compiler")

PATTERNS = (
    r"|a", r"a*", r"\w+", r"[^\W\d]{2,5}", r"(a|b)*abb", r"\d{4}-\d\d", r".{3,17}", r"(foo|foobar|barfoo)s?", r"[\u4e00-\u9fff😀-😎]+",
    r"(ab?c?){2,4}", r"\s*(\S+\s+){1,3}", r"(?=.*\d)[a-z\d]{4,6}", r"[^\"\\\n]*", r"\p{Lu}\p{Ll}*", r"(.*a.{5}|b+)",
)  # fmt: skip
KEEPS: tuple[Callable[[bool, bool], bool], ...] = (
    lambda a, b: a and b,
    lambda a, b: a or b,
    lambda a, b: a and not b,
    lambda a, b: a != b,
    lambda a, b: b,
    lambda a, b: True,
)


@contextmanager
def in_python() -> Iterator[None]:
    """Within, the regular languages do without the compiled part."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (chardfa, encode, minimize):
            patch.setattr(module, "native_module", lambda: None)
        yield


@contextmanager
def watched() -> Iterator[set[str]]:
    """The names of the native functions called within."""
    used: set[str] = set()

    class Spy:
        def __getattr__(self, name: str) -> Any:
            used.add(name)
            return getattr(native, name)

    with pytest.MonkeyPatch.context() as patch:
        for module in (chardfa, encode, minimize):
            patch.setattr(module, "native_module", Spy)
        yield used


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]], list[bool]]:
    """Complete automata over a partition of the alphabet, every state reachable, some of them alike."""
    width = draw(st.integers(1, 4))
    wanted = draw(st.integers(1, 90))
    pick = draw(st.randoms(use_true_random=False))
    near = draw(st.booleans())  # long chains beside wild graphs
    rows = [
        [min(s + pick.randint(0, 2), wanted - 1) if near else pick.randrange(wanted) for _ in range(width)]
        for s in range(wanted)
    ]
    order = [0]
    for s in order:
        order += [t for t in dict.fromkeys(rows[s]) if t not in order]
    place = {s: i for i, s in enumerate(order)}
    rows = [[place[t] for t in rows[s]] for s in order]
    often = draw(st.sampled_from((0.0, 0.05, 0.5, 1.0)))
    cuts = sorted({0, *(draw(st.lists(st.integers(1, 0xD7FF), min_size=width, max_size=2 * width)))})
    classes = [i % width for i in range(len(cuts))]
    return [*cuts, 0xD800, 0xE000], [*classes, -1, pick.choice(classes)], rows, [pick.random() < often for _ in rows]


@given(tables())
@settings(max_examples=400, deadline=None)
def test_canonical_forms_are_equal(table: tuple[list[int], list[int], list[list[int]], list[bool]]) -> None:
    starts, classes, rows, final = table
    small, ends = minimize.minimized(rows, final)
    assert [
        [list(row) for row in part] if isinstance(part, tuple) else part for part in native.minimize(rows, final)
    ] == [small, ends]
    assert minimize.canonical(starts, classes, rows, final) == minimize.merged(starts, classes, small, ends)


@given(tables(), tables(), st.sampled_from(KEEPS))
@settings(max_examples=300, deadline=None)
def test_products_of_random_automata_are_equal(a: Any, b: Any, keep: Callable[[bool, bool], bool]) -> None:
    left, right = CharDfa.make(*a), CharDfa.make(*b)
    made = left.product(right, keep)
    with in_python():
        assert left.product(right, keep) == made


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_their_products_and_their_spellings_are_equal(pattern: str) -> None:
    with watched() as used:
        dfa = CharDfa.from_pattern(pattern, anchored=True)
        made = [
            dfa,
            *(dfa & CharDfa.from_pattern(other, anchored=True) for other in PATTERNS[::3]),
            ~dfa - CharDfa.length(2, 9),
            *(spell(dfa) for spell in (to_bytes, to_json, lambda d: to_json(d, "needed"))),
        ]
    assert used >= {"canonical", "product", "spell"}
    with in_python():
        again = CharDfa.from_pattern(pattern, anchored=True)
        assert made == [
            again,
            *(again & CharDfa.from_pattern(other, anchored=True) for other in PATTERNS[::3]),
            ~again - CharDfa.length(2, 9),
            *(spell(again) for spell in (to_bytes, to_json, lambda d: to_json(d, "needed"))),
        ]


@given(st.lists(st.tuples(st.integers(0, LAST), st.integers(0, 3000)), min_size=1, max_size=6), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_spellings_of_random_sets_are_equal(ranges: list[tuple[int, int]], steps: int) -> None:
    chars = charset((low, min(low + size, LAST)) for low, size in ranges)
    if not chars or not complement(chars):
        return
    dfa = CharDfa.explore(
        0, lambda s, c: s + 1 if c == s % 2 and s < steps else None, lambda s: s == steps, (chars, complement(chars))
    )
    made = [to_bytes(dfa), to_json(dfa), to_json(dfa, "needed"), to_json(~dfa)]
    with in_python():
        assert [to_bytes(dfa), to_json(dfa), to_json(dfa, "needed"), to_json(~dfa)] == made


@pytest.mark.parametrize("field", ["states", "work"])
def test_products_pass_the_same_limits(field: str) -> None:
    left, right = CharDfa.from_pattern("(a|b){0,11}", anchored=True), CharDfa.from_pattern("(ab*){7}", anchored=True)

    def refused(limit: int) -> str | None:
        try:
            left.product(right, lambda a, b: a != b, limits=replace(RegularLimits(), **{field: limit}))
        except UnsupportedConstraint as error:
            return str(error)
        return None

    enough = bisect_left(range(10_000), True, key=lambda limit: refused(limit) is None)
    told = [refused(limit) for limit in (1, enough - 1, enough)]
    assert field in str(told[1]) and told[2] is None
    with in_python():
        assert [refused(limit) for limit in (1, enough - 1, enough)] == told


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("minimize", ([[1]], [True])),
        ("minimize", ([[0], [0, 1]], [True, False])),
        ("minimize", ([], [])),
        ("minimize", ([[0]], [])),
        ("canonical", ([1], [[0]], [True])),
        ("canonical", ([0], [[-1]], [True])),
        ("product", ([[0]], {0}, [[0]], {0}, [1], [0], [0], (False, False, False, True), 9, 9)),
        ("product", ([[0]], {0}, [[0]], {0}, [0], [0], [1], (False, False, False, True), 9, 9)),
        ("spell", ([[0]], {0}, -1, [(0, 1, 2)], [()], [(0,)], [0])),
        ("spell", ([[0]], {0}, -1, [(0, 1, 1)], [(), ((0, 1, 1),)], [(0,), (0,)], [0, 1])),
        ("spell", ([[0]], {0}, -1, [(0, 1, 1)], [(), ((0, 1, 0),)], [(0,), ()], [0, 1])),
    ],
)
def test_broken_tables_are_refused(name: str, arguments: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        getattr(native, name)(*arguments)
