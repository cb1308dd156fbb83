"""Languages as bytes: UTF-8 against Python's codec, JSON strings against Python's ``json``."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest
from radixrt.grammar import ir
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.regular import CharDfa, RegularLimits, json_regex_to_ir, regex_to_ir, to_bytes, to_json

_CHAR = re.compile(
    rb"(?:[\x20\x21\x23-\x5b\x5d-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|\xed[\x80-\x9f][\x80-\xbf]"
    rb"|[\xe1-\xec\xee\xef][\x80-\xbf]{2}|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2}"
    rb'|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})'
)


def accepts(expr: ir.Expr, data: bytes) -> bool:
    """Whether the expression takes all of the bytes: every place it may end, found by recursion."""

    def ends(expr: ir.Expr, at: int) -> set[int]:
        match expr:
            case ir.Bytes(value):
                return {at + len(value)} if data.startswith(value, at) else set()
            case ir.ByteSet(bits):
                return {at + 1} if at < len(data) and bits >> data[at] & 1 else set()
            case ir.Seq(items):
                places = {at}
                for item in items:
                    places = {end for place in places for end in ends(item, place)}
                return places
            case ir.Alt(items):
                return {end for item in items for end in ends(item, at)}
            case ir.Repeat(item, low, high):
                return repeated(lambda place: ends(item, place), at, low, high)
            case ir.JsonChars(low, high):
                return repeated(lambda place: {m.end()} if (m := _CHAR.match(data, place)) else set(), at, low, high)
            case ir.Dfa(edges, accepting):
                state: int | None = 0
                found = {at} if 0 in accepting else set()
                for place in range(at, len(data)):
                    state = next((to for low, high, to in edges[state] if low <= data[place] <= high), None)
                    if state is None:
                        break
                    if state in accepting:
                        found.add(place + 1)
                return found
        raise AssertionError(expr)

    def repeated(step, at: int, low: int, high: int | None) -> set[int]:  # type: ignore[no-untyped-def]
        found, now, count = set(), {at}, 0
        while now and (high is None or count <= high) and count <= len(data) + low:
            if count >= low:
                found |= now
            now, count = {end for place in now for end in step(place)}, count + 1
        return found

    return len(data) in ends(expr, 0)


def check_form(expr: ir.Expr) -> None:
    """Dfa edges are ascending and disjoint, and every state is reachable and leads to an end."""
    for part in getattr(expr, "items", ()):
        check_form(part)
    if isinstance(expr, ir.Repeat):
        check_form(expr.item)
    if isinstance(expr, ir.Dfa):
        reached, back = {0}, {s: set() for s in range(len(expr.edges))}
        for s, edges in enumerate(expr.edges):
            assert all(0 <= low <= high <= 255 for low, high, _ in edges)
            assert all(a[1] < b[0] for a, b in pairwise(edges))
            for _, _, to in edges:
                back[to].add(s)
        queue = [0]
        for s in queue:
            for _, _, to in expr.edges[s]:
                if to not in reached:
                    reached.add(to)
                    queue.append(to)
        alive = set(expr.accepting)
        queue = list(alive)
        for s in queue:
            queue += [b for b in back[s] if b not in alive]
            alive |= back[s]
        assert reached == alive == set(range(len(expr.edges)))


CHARS = st.sampled_from([*'ab"\\/ \n\t\x00\x1f\x7f\x80é߿ࠀ\ud7ff\ue000\uffff😀\U0010ffff\U00010000'])
TEXT = st.text(CHARS, max_size=5)
SETS = st.sampled_from(
    [
        r"[^]",
        "a",
        "[^a]",
        "é",
        '"',
        r"\\",
        r"[\0-\x1f]",
        r"[^\0-\x1f\"\\]",
        r"[\u0080-\u{10FFFF}]",
        "😀",
        r"\W",
        "[a-é]",
        r"[\ud7ff\ue000]",
        r"[\u{10000}-\u{10FFFE}]",
        r"[߿ࠀ]",
        r"\/",
        r"[\uFFFF-\u{10400}]",
        r"\s",
        r"[\u{1F600}\u{103FF}-\u{10400}]",
    ]
)
PATTERNS = st.recursive(
    SETS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map("|".join).map(lambda p: f"(?:{p})"),
        st.tuples(inner, st.sampled_from(["*", "?", "{2}", "{1,3}", "+"])).map(lambda t: f"(?:{t[0]}){t[1]}"),
    ),
    max_leaves=5,
)


def spellings(text: str, rng: random.Random) -> list[str]:
    """JSON spellings of a text's inside, each way a writer might."""
    short = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}

    def escaped(char: str) -> str:
        units = char.encode("utf-16-be")
        hexes = [units[i : i + 2].hex() for i in range(0, len(units), 2)]
        return "".join("\\u" + "".join(rng.choice([h.upper(), h]) for h in digits) for digits in hexes)

    def any_way(char: str) -> str:
        ways = [escaped(char)]
        if char in short:
            ways.append(short[char])
        if char >= " " and char not in '"\\':
            ways.append(char)
        return rng.choice(ways)

    return [json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], "".join(map(any_way, text))]


@settings(max_examples=200, deadline=None)
@given(PATTERNS, st.lists(TEXT, max_size=6), st.binary(max_size=6), st.integers(0, 99))
def test_utf8_and_json_spell_exactly_the_language(pattern: str, texts: list[str], noise: bytes, seed: int) -> None:
    rng = random.Random(seed)
    dfa = CharDfa.from_pattern(pattern, anchored=True)
    raw, inside, needed = to_bytes(dfa), to_json(dfa), to_json(dfa, "needed")
    for expr in (raw, inside, needed):
        check_form(expr)
    for text in [*texts, *dfa.words(3)]:
        holds = dfa.accepts(text)
        assert accepts(raw, text.encode()) == holds
        for n, spelling in enumerate(spellings(text, rng)):
            assert json.loads(f'"{spelling}"') == text
            assert accepts(inside, spelling.encode()) == holds, (pattern, spelling)
            if n < 2 or not holds:  # what json.dumps writes
                assert accepts(needed, spelling.encode()) == holds, (pattern, spelling)
    damaged = bytearray("".join(texts).encode() + noise)
    if damaged:
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    for data in (noise, bytes(damaged)):
        try:
            text = data.decode()
        except UnicodeDecodeError:
            assert not accepts(raw, data)
        else:
            assert accepts(raw, data) == dfa.accepts(text)
        try:
            decoded = json.loads(b'"' + data + b'"')
        except ValueError:
            assert not accepts(inside, data) and not accepts(needed, data)
        else:
            assert accepts(inside, data) == dfa.accepts(decoded)


def test_every_code_point_has_its_spellings() -> None:
    expr, needed, codec = (
        to_json(CharDfa.length(1, 1)),
        to_json(CharDfa.length(1, 1), "needed"),
        to_bytes(CharDfa.length(1, 1)),
    )
    chars = CharDfa.from_pattern(r"[^a]|aa", anchored=True)  # a Dfa rather than JsonChars
    other, rng = to_json(chars), random.Random(0)
    for code in [*range(0x900), *range(0xD700, 0xE100), *range(0xFF00, 0x10500), *range(0x10FF00, 0x110000)]:
        if 0xD800 <= code < 0xE000:
            lone = f"\\u{code:04x}".encode()
            assert not accepts(expr, lone) and not accepts(other, lone)
            assert not accepts(codec, chr(code).encode("utf-8", "surrogatepass"))
            continue
        assert accepts(codec, chr(code).encode())
        for spelling in spellings(chr(code), rng):
            assert accepts(expr, spelling.encode()) and accepts(needed, spelling.encode())
            assert accepts(other, spelling.encode()) == (code != 0x61)


def test_simple_languages_have_simple_expressions() -> None:
    assert to_bytes(CharDfa.literal("é1")) == ir.Bytes("é1".encode())
    assert to_json(CharDfa.literal('a"b'), "needed") == ir.Bytes(b'a\\"b')
    assert to_bytes(CharDfa.from_pattern("[ac]", anchored=True)) == ir.ByteSet(1 << 0x61 | 1 << 0x63)
    assert to_json(CharDfa.anything()) == ir.JsonChars() == json_regex_to_ir("")
    assert to_json(CharDfa.length(3, 8)) == ir.JsonChars(3, 8) and to_json(CharDfa.length(2)) == ir.JsonChars(2, None)
    assert to_json(CharDfa.nothing()) == to_bytes(CharDfa.nothing()) == ir.NOTHING
    assert to_json(CharDfa.literal("")) == ir.JsonChars(0, 0)
    found = json_regex_to_ir("^x", escapes="needed")
    assert found == ir.Seq((ir.Bytes(b"x"), ir.JsonChars()))


BOUNDED = [
    ("^foo", 0, 20),
    ("^foo", 5, None),
    ("foo$", 0, 8),
    ("foo", 4, 6),
    (r"\S", 1, 9),
    ("^[a-z]+$", 3, 7),
    ("^([a-z][0-9])+$", 5, 9),
    ("^([a-z][0-9])+$", 1000, None),
    ("^a{3,5}$", 0, 4),
    ("^a{3,5}$", 6, None),
    ("^(a|bb)*$", 2, 5),
    ("^(a|bb|c{3}|d+)$", 2, 3),
    ("^x[a-z]*y$|^z+$", 2, 4),
    (r"^(?!admin)[a-z]+$", 2, 6),
    (r"\bx\b", 2, 5),
    ("^$", 0, 3),
    ("^$", 1, 3),
    ("", 2, 4),
    ("^(?:[a-z]{0,300}-){2,3}$", 3, 9),
    ("^((?!ab).)*$", 2, 6),
]


@pytest.mark.parametrize(("pattern", "low", "high"), BOUNDED)
@pytest.mark.parametrize("escapes", ["any", "needed"])
def test_patterns_with_lengths(pattern: str, low: int, high: int | None, escapes: str) -> None:
    expr = json_regex_to_ir(pattern, low, high, escapes=escapes)  # type: ignore[arg-type]
    check_form(expr)
    dfa, rng = CharDfa.from_pattern(pattern, anchored=False), random.Random(5)
    texts = ["", *dfa.words(20), *("a1" * n for n in range(6)), "a1" * 501]
    texts += [
        rng.choice(["foo", "x", "admin", "", "-", "ab"]).join(rng.choices([*"ab1x -z", "foo"], k=rng.randrange(9)))
        for _ in range(200)
    ]
    for text in texts:
        holds = dfa.accepts(text) and len(text) >= low and (high is None or len(text) <= high)
        assert accepts(expr, json.dumps(text)[1:-1].encode()) == holds, text


RAW = [
    r"(.|\n){0,500}Answer:",
    r"[a-z]{1,3000}x",
    r"(?:[a-z]{1,400},){0,50}[a-z]",
    r"a{1000}|b{2000}|cd",
    r"(?s).{0,400}(?:yes|no){1,300}",
    r"\d{3}-\d{4}",
    r"(?!foo)[a-z]{2,400}",
]


@pytest.mark.parametrize("pattern", RAW)
def test_big_counters_are_kept(pattern: str) -> None:
    """Such automata would not fit; the expression is small and says the same."""
    expr = regex_to_ir(pattern)
    check_form(expr)
    rng = random.Random(3)
    texts = [
        "",
        "Answer:",
        "x\n" * 20 + "Answer:",
        "a" * 1000,
        "a" * 999,
        "b" * 2000,
        "cd",
        "ab,c,d",
        "abc,d",
        ",a",
        "aax",
        "foox",
    ]
    texts += [
        "555-1234",
        "555-123",
        "x" * 400 + "yesno",
        "x" * 401 + "yes",
        "no" * 300,
        "no" * 301 + "x",
        "é" * 9 + "no",
    ]
    texts += ["".join(rng.choices("ax,\n", k=rng.randrange(8))) for _ in range(100)]
    for text in texts:
        assert accepts(expr, text.encode()) == bool(re.fullmatch(pattern, text)), text[:40]


def test_what_cannot_be_exact_is_refused() -> None:
    with pytest.raises(UnsupportedConstraint, match=r"'\\\\S', with a length of 1 to 50000 characters"):
        json_regex_to_ir(r"\S", 1, 50_000)
    with pytest.raises(UnsupportedConstraint, match="states"):
        regex_to_ir(r"(?=(a|b)*a(a|b){30})[a-c]+")
    with pytest.raises(UnsupportedConstraint, match="the limit is 10|limit of 10 states"):
        json_regex_to_ir(r"^(a|bb)*$", 1, 50, limits=RegularLimits(counted=10))
    with pytest.raises(InvalidRequest, match=r"length=3\.\.1"):
        json_regex_to_ir("a", 3, 1)
    assert isinstance(regex_to_ir(r"(a|b)*a(a|b){300}"), ir.Seq)  # no automaton, but counters
