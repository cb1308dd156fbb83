"""Patterns as automata, against Python's ``re`` and the ``regex`` module on texts drawn from and near their languages."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.regular import CharDfa, RegularLimits
from radixrt.grammar.regular.unicode import python_class, unicode_property, with_case_variants

ALPHABET = "ab1 _\nA-é"


def texts_near(dfa: CharDfa, seed: int, count: int = 60) -> list[str]:
    """Texts of the language, mutations of them, and random ones; over a small alphabet so that they hit."""
    rng = random.Random(seed)
    out = ["", *dfa.words(5)]
    for _ in range(count):
        word = rng.choice(out) if rng.random() < 0.5 else "".join(rng.choices(ALPHABET, k=rng.randrange(9)))
        at = rng.randrange(len(word) + 1)
        match rng.randrange(3):
            case 0:
                word = word[:at] + rng.choice(ALPHABET) + word[at:]
            case 1:
                word = word[:at] + word[at + 1 :]
            case _:
                word += "".join(rng.choices(ALPHABET, k=2))
        out.append(word)
    state, walk = 0, ""
    for _ in range(200):  # and a walk through the automaton, along its live states
        choices = [(c, dfa.rows[state][dfa.class_of(c)]) for c in ALPHABET]
        live = [(c, s) for c, s in choices if s != dfa.dead]
        if not live or len(walk) > 12:
            out.append(walk)
            state, walk = 0, ""
            continue
        char, state = rng.choice(live)
        walk += char
        if state in dfa.accepting:
            out.append(walk)
    return out


def atoms() -> st.SearchStrategy[str]:
    plain = st.sampled_from(["a", "b", "1", " ", "_", "-", "é", ".", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"\n"])
    classes = st.sampled_from(["[ab]", "[^a]", "[a-c1]", r"[\w-]", r"[^\s]", r"[\d_]", "[A-Z]", r"[^\n]"])
    return st.one_of(plain, plain, classes)


def patterns(looks: bool) -> st.SearchStrategy[str]:
    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        group = inner.map(lambda p: f"(?:{p})")
        counts = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?"])
        options = [
            st.lists(inner, min_size=1, max_size=3).map("".join),
            st.lists(inner, min_size=2, max_size=3).map("|".join).map(lambda p: f"({p})"),
            st.tuples(group, counts).map("".join),
        ]
        if looks:
            kinds = st.sampled_from(["(?=", "(?!"])
            options += [
                st.tuples(kinds, inner).map(lambda t: f"{t[0]}{t[1]})"),
                st.tuples(st.sampled_from(["(?<=", "(?<!"]), st.sampled_from(["a", "b1", r"\w", "^", "[^a]_"])).map(
                    lambda t: f"{t[0]}{t[1]})"
                ),
                st.sampled_from([r"\b", r"\B", "^", "$"]),
            ]
        return st.one_of(*options)

    return st.recursive(atoms(), grow, max_leaves=7)


@settings(max_examples=200, deadline=None)
@given(patterns(looks=False), st.integers(0, 1000), st.booleans())
def test_python_patterns_are_what_re_matches(pattern: str, seed: int, anchored: bool) -> None:
    dfa = CharDfa.from_pattern(pattern, syntax="python", anchored=anchored)
    match = re.compile(pattern).fullmatch if anchored else re.compile(pattern).search
    for text in texts_near(dfa, seed):
        assert dfa.accepts(text) == bool(match(text)), (pattern, text)


@settings(max_examples=300, deadline=None)
@given(patterns(looks=True), st.integers(0, 1000), st.booleans())
def test_look_arounds_anchors_and_boundaries_hold_wherever_they_stand(pattern: str, seed: int, anchored: bool) -> None:
    try:
        compiled = re.compile(pattern)
    except re.error:  # an anchor repeated
        return
    dfa = CharDfa.from_pattern(pattern, syntax="python", anchored=anchored)
    match = compiled.fullmatch if anchored else compiled.search
    for text in texts_near(dfa, seed, 30):
        if text == "" and r"\B" in pattern:  # before Python 3.14 re has it that \B is not found in an empty text
            continue
        assert dfa.accepts(text) == bool(match(text)), (pattern, text)


@pytest.mark.parametrize("count", [8, 12, 50])
def test_questions_asked_again_under_more_duties_cost_nothing(count: int) -> None:
    pattern = f"(?:(?=a)|(?=b)|(?!c)|.){{{count}}}"
    dfa = CharDfa.from_pattern(pattern, syntax="python", anchored=True, limits=RegularLimits(work=80 * count * count))
    for text in ("", "a", "c", "ca", "cc", "c" * count, "c" * count + "a", "ab" * (count // 2), "abc" * (count // 2)):
        if count > 12:
            break  # re tries every way; that it was compiled within its limit of work is the point
        assert dfa.accepts(text) == bool(re.fullmatch(pattern, text)), text


SEARCHED = [
    # pattern (ECMA, found anywhere), texts it takes, texts it refuses
    ("", ["", "x"], []),
    ("^$", [""], ["a"]),
    ("^a|b$", ["ax", "xb", "b"], ["xa", "bx"]),
    ("^(a|b)$", ["a", "b"], ["ab", ""]),
    ("(^a|b)c", ["acx", "xbc"], ["xac"]),
    ("^(?!admin)[a-z]{3,10}$", ["user", "adm", "xadmin"], ["admin", "administrator", "us"]),
    (r"^(?=.*[A-Z])(?=.*\d)[^ ]{6,}$", ["aA1aaa", "1Zaaaaa"], ["aaaaaa1", "A1", "aA1a aa"]),
    (r"\bfoo\b", ["foo", "a foo b", "foo-"], ["afoo", "foo_", "foo1"]),
    (r"\Bfoo", ["afoo"], ["foo", "a foo"]),
    (r"^((?!foo).)*$", ["", "barfo"], ["foo", "xfoox"]),
    (r"(?<=\$)\d+$", ["$12", "x$1"], ["12", "$"]),
    (r"(?<!\$)\b\d+$", ["12", "x 1"], ["$1", "x"]),
    (r"^(?<!a)b", ["b"], ["ab"]),
    (r"^\d+$", ["12"], ["१२", "", "1a"]),  # ASCII only, unlike Python
    (r"^\w+$", ["a_1"], ["é"]),
    (r"^\s+$", ["\u00a0\ufeff\t\u2003"], ["\u200b", "\x1c"]),
    (r"^\p{L}+$", ["aéΩ木"], ["1", "-"]),
    (r"^\p{Lu}\P{Lu}$", ["Aa", "Ω1"], ["aa", "AA"]),
    (r"^\p{Script=Greek}+$", ["αΩ"], ["a"]),
    (r"^\p{sc=Cyrl}+$", ["ж"], ["a"]),
    (r"^[\p{Nd}\p{ASCII_Hex_Digit}]+$", ["१aF"], ["g"]),
    (r"^\u{1F600}\uD83D\uDE00$", ["😀😀"], ["😀"]),
    (r"^\x41\u0042\cJ\0$", ["AB\n\0"], ["AB\n"]),
    (r"^.$", ["a", "😀", "\x85"], ["\n", "\r", "\u2028", ""]),
    (r"^[^]$", ["\n", "a"], ["", "ab"]),
    (r"^[]$", [], ["", "a"]),
    (r"^[\b]$", ["\b"], ["b"]),
    (r"^[\w-]+$", ["a-b"], ["a b"]),
    (r"^\/\-\_\@$", ["/-_@"], ["/"]),
    (r"^{a}$", ["{a}"], ["a"]),
    (r"^(?<year>\d{4})$", ["1999"], ["199"]),
    (r"^a{2,}?b??$", ["aa", "aaab"], ["a", "ab"]),
    (r"^(a+)+b", ["aab"], ["aaaa"]),
    (r"^(?:a|a)*$", ["", "aaaa"], ["b"]),
    (r"^(a?){3}$", ["", "aaa"], ["aaaa"]),
    (r"^(?:)*$", [""], ["a"]),
    (r"^(?=a)*b$", ["b"], ["a"]),
    ("^(?i:straße|K)$", ["STRAßE", "k", "\u212a"], ["x"]),
    ("^a(?=b)", ["ab"], ["a", "ac"]),
    ("a(?!b)$", ["a", "ba"], ["ab"]),
    ("^^a$$", ["a"], ["aa"]),
    ("$^", [""], ["a", "\n"]),
    ("a^", [], ["a", "a^"]),
]


@pytest.mark.parametrize(("pattern", "taken", "refused"), SEARCHED, ids=[row[0] for row in SEARCHED])
def test_what_a_schema_pattern_finds(pattern: str, taken: list[str], refused: list[str]) -> None:
    dfa = CharDfa.from_pattern(pattern, anchored=False)
    assert [text for text in taken if not dfa.accepts(text)] == []
    assert [text for text in refused if dfa.accepts(text)] == []


PYTHON = [
    r"(?i)straSSe|ſ|İ|ı|K|µ|ǆ|σ",
    r"(?i)[a-k]x",
    r"(?i)[^a-k]x",
    r"(?s).x",
    r"(?m)^a$",
    r"(?x) a b # comment",
    r"(?a)\w\d",
    r"a$",
    r"\Aa\Z",
    r"(?P<n>a)b",
    r"(?i:a)b",
    r"(?#note)ab?",
    r"\N{LATIN SMALL LETTER A}\x62\u0063\U00000064\a",
    r"[]a]x",
    r"a{,2}",
    r"a{,}b",
    r"{a}",
    r"\0\012[\11]",
    r"(?-i:a)",
]


@pytest.mark.parametrize("pattern", PYTHON)
def test_python_syntax_is_read_as_re_reads_it(pattern: str) -> None:
    chars = "aAbBkK\u212aſsSSßİIiıµμΜǆǅσςΣx \n\tX]cd\a\0{}1é"
    texts = [*chars, *(a + b for a in chars for b in chars), "aab", "aaa", "ab\n", "abcd\a", "\0\n\t", "{a}", "a\nb"]
    for anchored in (True, False):
        dfa = CharDfa.from_pattern(pattern, syntax="python", anchored=anchored)
        match = re.compile(pattern).fullmatch if anchored else re.compile(pattern).search
        assert [t for t in texts if dfa.accepts(t) != bool(match(t))] == []


def test_named_sets_hold_exactly_the_characters_they_name() -> None:
    rng = random.Random(1)
    codes = [*range(0x3000), *(rng.randrange(0x3000, 0x110000) for _ in range(5000))]
    texts = [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
    for letter in "dws":
        dfa = CharDfa.from_pattern(rf"\{letter}", syntax="python", anchored=True)
        assert [t for t in texts if dfa.accepts(t) != bool(re.fullmatch(rf"\{letter}", t))] == []
        assert python_class(letter)
    for name in ("L", "Lu", "gc=Nd", "Script=Han", "scx=Greek", "Alphabetic", "Emoji", "Cn", "Any", "White_Space"):
        dfa = CharDfa.from_pattern(rf"\p{{{name}}}", anchored=True)
        assert [t for t in texts if dfa.accepts(t) != bool(regex.fullmatch(rf"\p{{{name}}}", t))] == [], name
    assert unicode_property("letter") is None
    cased = [t for t in texts if t.lower() != t or t.upper() != t]
    for t in rng.sample(cased, 300):
        dfa = CharDfa.from_pattern("(?i)" + t, syntax="python", anchored=True)
        assert [u for u in cased if dfa.accepts(u) != bool(re.fullmatch(t, u, re.IGNORECASE))] == [], t
    assert with_case_variants(((0x30, 0x39),)) == ((0x30, 0x39),)


BAD = [
    # pattern, syntax, part of the message
    ("(", "ecma", "the group is not closed at position 0"),
    ("a)", "ecma", "unmatched ')' at position 1"),
    ("[a", "ecma", "the character class is not closed at position 0"),
    ("[b-a]", "ecma", "the character range is out of order at position 1"),
    ("*a", "ecma", "nothing to repeat at position 0"),
    ("a**", "ecma", "multiple repeat at position 2"),
    ("a{2}{3}", "python", "multiple repeat at position 4"),
    ("^*", "ecma", "nothing to repeat at position 1"),
    (r"\b+", "python", "nothing to repeat at position 2"),
    ("a{3,2}", "ecma", "{3,2} is out of order at position 1"),
    ("a{,2}", "ecma", "no lower bound"),
    ("a{99999999999}", "ecma", "too large"),
    ("\\", "ecma", "ends in a backslash at position 0"),
    (r"\a", "ecma", "bad escape \\a at position 0"),
    (r"a\Z", "ecma", "bad escape \\Z at position 1"),
    (r"\p{letter}", "ecma", "unknown Unicode property \\p{letter}"),
    (r"\p{Script=Elvish}", "ecma", "unknown Unicode property"),
    (r"\pL", "ecma", "unknown Unicode property \\p"),
    (r"\u12", "ecma", "4 hexadecimal digits"),
    (r"\u{110000}", "ecma", "code point"),
    (r"\c1", "ecma", "\\c must be followed by a letter"),
    (r"\01", "ecma", "octal"),
    ("(?<1>a)", "ecma", "a group name is expected"),
    ("(?a", "python", "unknown kind of group"),
    ("a(?i)b", "python", "must come first"),
    ("(?<=a)*", "ecma", "a look-behind cannot be repeated"),
    (r"[a-\d]", "python", "a class cannot bound a range"),
    (r"\N{NO SUCH NAME}", "python", "unknown character name"),
    ("(" * 60_000, "ecma", "nested deeper than 64"),
    ("(?:" * 60_000 + ")" * 60_000, "python", "the limit is 100,000"),
    ("(?=" * 20_000 + ")" * 20_000, "ecma", "nested deeper than 64"),
]


@pytest.mark.parametrize(("pattern", "syntax", "problem"), BAD, ids=[row[0][:20] for row in BAD])
def test_a_syntax_error_names_its_place(pattern: str, syntax: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        CharDfa.from_pattern(pattern, syntax=syntax, anchored=True)  # type: ignore[arg-type]
    assert problem in str(caught.value) and not isinstance(caught.value, UnsupportedConstraint)
    assert len(str(caught.value)) < 300


REFUSED = [
    (r"(a)\1", "ecma", "the back-reference \\1 at position 3"),
    (r"(?<n>a)\k<n>", "ecma", "the back-reference \\k at position 7"),
    (r"(?P<n>a)(?P=n)", "python", "the back-reference to 'n' at position 8"),
    (r"(a)(?(1)b|c)", "python", "the conditional group at position 3"),
    (r"(?>a+)b", "python", "the atomic group at position 0"),
    (r"a++", "python", "the possessive quantifier"),
    (r"(?L)a", "python", "the flag 'L'"),
    (r"\ud800", "ecma", "a lone surrogate at position 0"),
    (r"(?<=a(?=b))c", "ecma", "a look-ahead"),
    (r"(a|b)*a(a|b){30}", "ecma", "states"),
    (r"(x{1,200}){1,200}", "ecma", "positions"),
    (r"((a{0,50}){0,50}){0,50}", "ecma", "positions"),
]


@pytest.mark.parametrize(("pattern", "syntax", "problem"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_no_automaton_can_do_is_refused_by_name(pattern: str, syntax: str, problem: str) -> None:
    with pytest.raises(UnsupportedConstraint) as caught:
        CharDfa.from_pattern(pattern, syntax=syntax, anchored=True)  # type: ignore[arg-type]
    assert problem in str(caught.value) and repr(pattern) in str(caught.value)


def test_limits_are_fields() -> None:
    with pytest.raises(UnsupportedConstraint, match="limit of 10 states"):
        CharDfa.from_pattern("a{20}", anchored=True, limits=RegularLimits(states=10))
    with pytest.raises(UnsupportedConstraint, match="limit of 5 work"):
        CharDfa.from_pattern("a{20}", anchored=True, limits=RegularLimits(work=5))
    with pytest.raises(InvalidRequest, match="syntax='perl': must be 'ecma' or 'python'"):
        CharDfa.from_pattern("a", syntax="perl", anchored=True)  # type: ignore[arg-type]


def test_the_official_suite_of_schema_patterns() -> None:
    """Run where the JSON Schema test suite lies beside the checkout."""
    root = Path(__file__).parents[3] / "shared" / "data" / "json_schema_suite"
    files = sorted(root.glob("draft*/**/*pattern*.json")) + sorted(root.glob("draft*/optional/*regex.json"))
    if not files:
        pytest.skip("no JSON Schema test suite here")
    wrong, count = [], 0
    for file in files:
        for case in json.loads(file.read_text()):
            pattern = case["schema"].get("pattern") if isinstance(case["schema"], dict) else None
            if pattern is None:
                continue
            dfa = CharDfa.from_pattern(pattern, anchored=False)
            for test in case["tests"]:
                if isinstance(test["data"], str):
                    count += 1
                    if dfa.accepts(test["data"]) != test["valid"]:
                        wrong.append((pattern, test["data"]))
    assert wrong == [] and count > 50
