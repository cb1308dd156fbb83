"""Grammar texts: lark's own parser judges lark grammars and their twins in the other syntaxes, tables judge the rest."""

from __future__ import annotations

import json
import random
from functools import cache

import lark
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest
from radixrt.grammar import ir
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.syntax import SyntaxLimits, parse_grammar
from radixrt.grammar.syntax.lark import COMMON
from radixrt.grammar.syntax.left_recursion import without_left_recursion
from radixrt.grammar.syntax.source import char_set
from tests.grammar.naive import accepts, language, mutated, sample

LARK = {
    "calculator": r"""
        ?start: sum
        ?sum: product | sum "+" product -> add | sum "-" product -> sub
        ?product: atom | product "*" atom -> mul
                | product "/" atom
        ?atom: NUMBER -> number | "-" atom -> neg | NAME | "(" sum ")"
        %import common.CNAME -> NAME
        %import common.NUMBER
        %import common.WS_INLINE
        %ignore WS_INLINE
        """,
    "json": r"""
        ?start: value
        ?value: object | array | string | SIGNED_NUMBER -> number | "true" | "false" | "null"
        array  : "[" [value ("," value)*] "]"
        object : "{" [pair ("," pair)*] "}"
        pair   : string ":" value
        string : ESCAPED_STRING
        %import common (ESCAPED_STRING, SIGNED_NUMBER)
        %import common.WS
        %ignore WS
        """,
    "operators": """
        start: (a | B)~1..3 c? // a comment
        # another
        a.2: "x"i "y" | /[0-9]{2,3}/ B
        B.5: "b".."d" | "q"
        c: ["z" c] "end"
        """,
    "statements": r"""
        start: statement+
        statement: NAME "=" value ";" | "if" "(" value ")" block
        !block: "{" statement* "}"
        value: NAME | /[0-9]+/ | value "," value
        NAME: LETTER (LETTER | "_")*
        LETTER: "a".."c"
        COMMENT: "#" /[^#\n]/* "#"
        %ignore COMMENT
        %ignore " "
        """,
    "flags": r"""
        start: /a.b/s | /A[x-z]/i | "Stra\u00dfe" | /[a-c] # vowels not
              {2}/x | "tab\t\"quote\"\\" | "\x41"
        """,
    "cycle": """
        start: a
        a: b "x" | "1"
        b: c "y" | a "2" | [a] "3"
        c: a? b "z" | "0"
        """,
    "unicode": """
        start: (GREEK | "é" | "日本")+ EMOJI?
        GREEK: "α".."ω"
        EMOJI: "\\U0001F600".."\\U0001F64F"
        """,
}
ALPHABET = '()[]{}+-*/"=;,:.#xXyYzZbBcCqQaA10239ifend \t\n\\_é日αωß😀'

# The same languages in the other syntaxes.
TWINS = [
    (
        "gbnf",
        r"""
        root ::= ws sum ws   # comment "with quotes"
        sum ::= product (ws [+-] product)*
        product ::= atom ( ws [*/]
            atom )*
        atom ::= ws (number | "-" atom | name | "(" sum ws ")")
        number ::= ([0-9]+ | [0-9]+ "." [0-9]* | "." [0-9]{1,}) ([eE] [+\-]? [0-9]+)?
        name ::= [a-zA-Z_] [a-zA-Z0-9_]*
        ws ::= [ \t]*
        """,
        "calculator",
    ),
    (
        "ebnf",
        """
        root ::= root2 /* the start */
        root2 ::= (a | B){1,3} c?
        a ::= [#x78X] 'y' | [0-9]{2,3} B
        B ::= [b-d] | #x71
        c ::= ("z" c)? "end"
        """,
        "operators",
    ),
    ("ebnf", "a ::= b 'x' | '1'  b ::= c 'y' | a '2' | a? '3'  c ::= a? b 'z' | '0'", "cycle"),
    ("gbnf", r'root ::= ([\u03b1-\u03C9] | "\u00e9" | "日本")+ [\U0001F600-\U0001F64F]?', "unicode"),
]


@cache
def judge(name: str) -> lark.Lark:
    # Every way to cut a text into terminals is tried: the context-free language itself.
    return lark.Lark(LARK[name], parser="earley", lexer="dynamic_complete")


def judged(name: str, text: str) -> bool:
    try:
        judge(name).parse(text)
    except lark.exceptions.LarkError:
        return False
    return True


def compare(grammar: ir.Grammar, name: str, seed: int) -> None:
    rng = random.Random(seed)
    verdicts = [0, 0]
    for _ in range(120):
        data = sample(grammar, rng, steps=30)
        if len(data) > 40:
            continue
        assert accepts(grammar, data)
        assert judged(name, data.decode()), data
        text = mutated_text(data.decode(), rng)
        accepted = accepts(grammar, text)
        assert accepted == judged(name, text), text
        verdicts[accepted] += 1
    assert min(verdicts) >= 3, verdicts


def mutated_text(text: str, rng: random.Random) -> str:
    codes = bytes(range(len(ALPHABET)))
    if not set(text) <= set(ALPHABET):
        at = rng.randint(0, len(text))
        return text[:at] + rng.choice(ALPHABET) + text[at + rng.randint(0, 1) :]
    changed = mutated(bytes(ALPHABET.index(c) for c in text), rng, codes)
    return "".join(ALPHABET[i] for i in changed)


@pytest.mark.parametrize("name", LARK)
def test_lark_grammars_mean_what_lark_says(name: str) -> None:
    compare(parse_grammar(LARK[name], "lark"), name, seed=1)


@pytest.mark.parametrize("syntax, text, name", TWINS, ids=lambda x: x if len(x) < 20 else None)
def test_twins_in_other_syntaxes_mean_the_same(syntax: str, text: str, name: str) -> None:
    grammar = parse_grammar(text, syntax)
    compare(grammar, name, seed=2)
    rng = random.Random(3)
    for _ in range(60):  # nothing of the original is missing
        data = sample(parse_grammar(LARK[name], "lark"), rng, steps=30)
        if len(data) <= 40:
            assert accepts(grammar, data), data


@pytest.mark.parametrize("name", COMMON)
def test_common_terminals_are_those_of_lark(name: str) -> None:
    text = f"start: {name}\n%import common.{name}"
    grammar = parse_grammar(text, "lark")
    other = lark.Lark(text, parser="earley", lexer="dynamic_complete")
    rng = random.Random(4)
    alphabet = '09afAFgz_+-.eE"\\/*#\n\r\t\f -é'
    for i in range(150):
        drawn = sample(grammar, rng, steps=12) if i % 2 else b""
        tried = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 4))) if i % 2 == 0 else drawn.decode()
        if i % 6 == 5 and tried:
            tried = tried[:-1] + rng.choice(alphabet)
        try:
            other.parse(tried)
            taken = True
        except lark.exceptions.LarkError:
            taken = False
        assert accepts(grammar, tried) == taken, tried


# syntax, grammar, accepted, refused
TABLE = [
    ("gbnf", 'root ::= "a" | ""', ["a", ""], ["aa", "b"]),
    ("gbnf", "root ::= [^a-z]", ["A", "\n", "é", "😀", "]"], ["a", "z", "", "AB"]),
    ("gbnf", "root ::= [a-]", ["a", "-"], ["b", ""]),
    ("gbnf", r"root ::= [\]\-\\^]", ["]", "-", "\\", "^"], ["a", "["]),
    ("gbnf", r'root ::= "\x41\u0042\U00000043\n\t\"\\"', ['ABC\n\t"\\'], ["ABC", 'ABCnt"\\']),
    ("gbnf", "root ::= .", ["a", "\n", "é", "😀"], ["", "ab"]),
    ("gbnf", 'root ::= "a"{2}', ["aa"], ["", "a", "aaa"]),
    ("gbnf", 'root ::= "a"{2,}', ["aa", "aaaaa"], ["a"]),
    ("gbnf", 'root ::= "a"{0,2} "b"?', ["", "a", "aab", "b"], ["aaa", "ba"]),
    ("gbnf", 'root ::= ("a" | "b" "c")+ #end', ["a", "bc", "abca"], ["", "b", "ac"]),
    ("gbnf", 'root ::= x-1 "b"\nx-1 ::= "a"', ["ab"], ["a"]),
    ("gbnf", 'root ::= "a"\n  | "b"\nunused ::= root', ["a", "b"], ["ab"]),
    ("gbnf", 'root ::= root "," item | item\nitem ::= [0-9]', ["1", "1,2,3"], ["", ",1", "1,"]),
    ("gbnf", 'root ::= "(" root ")" root | ""', ["", "()", "(())()"], ["(", ")(", "(()"]),
    ("gbnf", "root ::= [é-ü] [日]", ["é日", "ü日"], ["e日", "ý日", "é"]),
    ("ebnf", "root ::= 'a\"' #x62 [#x30-#x32]", ['a"b0', 'a"b2'], ['a"b3', "a"]),
    ("ebnf", "first ::= second 'x'\nsecond ::= [^#x0-#x7F]", ["éx", "😀x"], ["ax", "x"]),
    ("ebnf", "root ::= /* none */ | 'a' # comment", ["", "a"], ["b"]),
    ("lark", 'start: "a" |', ["a", ""], ["aa"]),
    ("lark", 'start:\n  "a"\n  "b"\n\n  | "c"\n', ["ab", "c"], ["a", "abc"]),
    ("lark", 'start: "a"~2 | "b" ~ 1..2', ["aa", "b", "bb"], ["a", "bbb"]),
    ("lark", 'start: "ß"i "k"i', ["ßk", "ßK"], ["ss"]),
    ("lark", r"start: /a\/b/ | /\d+(\.\d+)?/", ["a/b", "1", "1.5"], ["a\\/b", "1."]),
    ("lark", 'start: IF NAME\nIF.2: "if"\nNAME: /[a-z]+/', ["ifif", "ifx"], ["if", "x"]),
    ("lark", 'start: "a" "b"\n%ignore " "\n%ignore /#.*\\n/', ["ab", " a  b ", "a#x\nb"], ["a#xb", "a\nb"]),
    ("lark", 'start: AB\nAB: "a" "b"\n%ignore " "', ["ab", " ab "], ["a b"]),
    ("lark", 'start: x "!"\n!x: "a" -> y\n | x x\n_z: x', ["a!", "aaa!"], ["!", "a"]),
]


@pytest.mark.parametrize("syntax, text, accepted, refused", TABLE, ids=range(len(TABLE)))
def test_what_a_grammar_takes(syntax: str, text: str, accepted: list[str], refused: list[str]) -> None:
    grammar = parse_grammar(text, syntax)
    assert [t for t in accepted if not accepts(grammar, t)] == []
    assert [t for t in refused if accepts(grammar, t)] == []


# syntax, grammar, error, what it says
ERRORS = [
    ("lark", "", InvalidRequest, "line 1, column 1: the grammar has no rules"),
    (
        "lark",
        'a: "a"\nstrat: a',
        InvalidRequest,
        "no rule called 'start', where a grammar starts; did you mean 'strat'",
    ),
    ("lark", 'start: foo\nfo: "a"', InvalidRequest, "line 1, column 8: no rule is called 'foo'; did you mean 'fo'"),
    ("lark", 'start: "a', InvalidRequest, "line 1, column 8: this string has no end"),
    ("lark", 'start: "a"\n  ("b"', InvalidRequest, "a ')' is missing for the '(' of line 2, column 3"),
    ("lark", "start: A\nA: B\nB: A", InvalidRequest, "'A' uses itself (A -> B -> A)"),
    ("lark", "start: A\nA: start", InvalidRequest, "a terminal cannot use the rule 'start'"),
    ("lark", 'root ::= "a"', InvalidRequest, "'::=' is gbnf or ebnf, not lark"),
    ("lark", "start{x}: x", UnsupportedConstraint, "template start{x}"),
    ("lark", "start: a{b}\na: b", UnsupportedConstraint, "template a{...}"),
    ("lark", "start[capture]: A", UnsupportedConstraint, "attributes of the rule 'start'"),
    ("lark", "%import python.X\nstart: X", UnsupportedConstraint, "%import python.X"),
    ("lark", "%import .local.X\nstart: X", UnsupportedConstraint, "%import .local.X"),
    ("lark", "%import common.INTT\nstart: INTT", InvalidRequest, "did you mean 'INT'"),
    ("lark", "%declare A\nstart: A", UnsupportedConstraint, "%declare"),
    ("lark", "%override start: A", UnsupportedConstraint, "%override"),
    ("lark", "%ignored A\nstart: A", UnsupportedConstraint, "did you mean '%ignore'"),
    ("lark", '%ignore\nstart: "a"', InvalidRequest, "%ignore needs a terminal"),
    ("lark", 'start: "a"..', InvalidRequest, "a range has a string on both sides"),
    ("lark", 'start: "b".."a"', InvalidRequest, "runs backwards"),
    ("lark", 'start: "ab".."c"', InvalidRequest, "one character each"),
    ("lark", 'start: "a"~3..1', InvalidRequest, "from 3 to 1 times"),
    ("lark", 'start: "a"~-1', InvalidRequest, "cannot be negative"),
    ("lark", 'start: "a" -> x "b"', InvalidRequest, "ends with its alias"),
    ("lark", 'start: ("a" -> x)', InvalidRequest, "an alias (->)"),
    ("lark", 'A: "a"\nstart: "x"\n  /a(/', InvalidRequest, "line 3, column 3"),
    ("lark", r"start: /(a)\1/", UnsupportedConstraint, r"\1"),
    ("lark", "start: /a/q", InvalidRequest, "unknown regex flag 'q'"),
    ("lark", "start: /a/l", UnsupportedConstraint, "locale"),
    ("lark", 'start: "a"x', InvalidRequest, "only the flag i"),
    ("lark", 'Start: "a"', InvalidRequest, "'Start' must be all lower case"),
    ("lark", '?A: "a"', InvalidRequest, "only rules have such marks"),
    ("lark", r'start: "\xZZ"', InvalidRequest, "column 9: \\x needs 2 hexadecimal digits"),
    ("lark", 'start: "a" "a")', InvalidRequest, "unexpected ')' in 'start'"),
    ("lark", 'start: "a"\nstart: "b"', InvalidRequest, "line 2, column 1: the rule 'start' is defined twice"),
    ("lark", "start: " + "(" * 60_000, UnsupportedConstraint, "deeper than 100 levels"),
    ("lark", "start: %json {}", UnsupportedConstraint, "%json"),
    ("lark", "start: <think>", UnsupportedConstraint, "tokens in a grammar"),
    ("gbnf", " # nothing", InvalidRequest, "the grammar has no rules"),
    (
        "gbnf",
        'root ::= foo\nfo ::= "a"',
        InvalidRequest,
        "line 1, column 10: no rule is called 'foo'; did you mean 'fo'",
    ),
    ("gbnf", 'rot ::= "a"', InvalidRequest, "did you mean 'rot'"),
    ("gbnf", 'root ::= "a', InvalidRequest, "column 10: this string has no end"),
    ("gbnf", "root ::= [a", InvalidRequest, "has no ']'"),
    ("gbnf", "root ::= [b-a]", InvalidRequest, "runs backwards"),
    ("gbnf", "root ::= []", InvalidRequest, "matches nothing"),
    ("gbnf", 'root ::= "a"{3,1}', InvalidRequest, "from 3 to 1 times"),
    ("gbnf", 'root ::= "a"{x}', InvalidRequest, "counts are written"),
    ("gbnf", 'root ::= "a"{9999999}', UnsupportedConstraint, "a count of 9999999"),
    ("gbnf", 'root ::= ("a"', InvalidRequest, "a ')' is missing"),
    ("gbnf", 'root ::= "a")', InvalidRequest, "a rule, name ::= ..., should begin here, not ')'"),
    ("gbnf", r'root ::= "\q"', InvalidRequest, r"unknown escape \q"),
    ("gbnf", r'root ::= "\x4"', InvalidRequest, r"\x needs 2 hexadecimal digits"),
    ("gbnf", r"root ::= [\uD800]", InvalidRequest, "U+D800 is not a character"),
    ("gbnf", "root ::= <think>", UnsupportedConstraint, "tokens in a grammar"),
    ("gbnf", "root ::= 'a'", InvalidRequest, "double quotes"),
    ("gbnf", 'root ::= "a"\nroot ::= "b"', InvalidRequest, "line 2, column 1: the rule 'root' is defined twice"),
    ("gbnf", "root ::= " + "(" * 60_000, UnsupportedConstraint, "deeper than 100 levels"),
    ("ebnf", "root ::= A - B", UnsupportedConstraint, "A - B"),
    ("ebnf", 'root ::= (= "a")', UnsupportedConstraint, "look-ahead"),
    ("ebnf", 'root ::= Token("a")', UnsupportedConstraint, "Token(...)"),
    ("ebnf", 'root ::= "a" /* x', InvalidRequest, "this comment has no end"),
]


@pytest.mark.parametrize("syntax, text, error, says", ERRORS, ids=range(len(ERRORS)))
def test_bad_grammars_get_one_clear_line(syntax: str, text: str, error: type[InvalidRequest], says: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_grammar(text, syntax)
    assert type(raised.value) is error
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.field == "grammar"


def test_limits_are_kept() -> None:
    many = "\n".join(['root ::= "a"', *(f'r{i} ::= "a"' for i in range(20))])
    parse_grammar(many, "gbnf", limits=SyntaxLimits(rules=21))
    for limits in (SyntaxLimits(rules=20), SyntaxLimits(terms=20)):
        for syntax, text in (("gbnf", many), ("lark", many.replace("::=", ":").replace("root", "start"))):
            with pytest.raises(UnsupportedConstraint, match="more than 20"):
                parse_grammar(text, syntax, limits=limits)


def test_left_recursion_that_grows_too_large_is_refused_by_name() -> None:
    names = [f"r{i}" for i in range(150)]
    rule = " | ".join(f'{name} "{i}"' for i, name in enumerate(names))
    text = "\n".join(["root ::= r0", *(f"{name} ::= {rule}" for name in names)])
    with pytest.raises(UnsupportedConstraint, match="left recursion of r"):
        parse_grammar(text, "gbnf", limits=SyntaxLimits(terms=1_000_000))


def test_long_rules_with_left_recursion_are_no_trouble() -> None:
    grammar = parse_grammar('root ::= root "y" | ' + '"x" ' * 3000, "gbnf")
    assert accepts(grammar, "x" * 3000 + "yy")
    assert not accepts(grammar, "x" * 2999 + "y")


def exprs(names: list[str]) -> st.SearchStrategy[ir.Expr]:
    leaves = st.one_of(
        st.sampled_from([b"a", b"b", b"", b"ab"]).map(ir.Bytes), st.sampled_from(names).map(ir.Ref), st.just(ir.NOTHING)
    )

    def grown(inner: st.SearchStrategy[ir.Expr]) -> st.SearchStrategy[ir.Expr]:
        several = st.lists(inner, max_size=3).map(tuple)
        counts = st.tuples(st.integers(0, 2), st.sampled_from([None, 0, 1]))
        return st.one_of(
            several.map(ir.Seq),
            several.map(ir.Alt),
            st.builds(lambda e, c: ir.Repeat(e, c[0], None if c[1] is None else c[0] + c[1]), inner, counts),
        )

    return st.recursive(leaves, grown, max_leaves=8)


@st.composite
def rule_sets(draw: st.DrawFn) -> dict[str, ir.Expr]:
    names = [f"r{i}" for i in range(draw(st.integers(1, 4)))]
    return {name: draw(exprs(names)) for name in names}


X, Y, A, B = ir.Bytes(b"x"), ir.Bytes(b"y"), ir.Ref("a"), ir.Ref("b")


@settings(max_examples=300)
@given(rule_sets())
@example({"a": ir.Alt((B, X)), "b": ir.Alt((ir.Seq((A, Y)), ir.Bytes(b"z")))})
@example({"a": ir.Alt((B, X)), "b": ir.Alt((ir.Ref("c"), Y)), "c": ir.Alt((ir.Seq((A, X)), B))})
@example({"a": ir.Alt((ir.Seq((ir.Repeat(ir.Alt((A, ir.EMPTY, Y)), 2, 3), X)), Y))})
@example({"a": ir.Alt((ir.Seq((ir.Repeat(X, 0, 1), ir.Repeat(Y, 0, 1), A, A)), ir.EMPTY, X))})
def test_rewriting_left_recursion_keeps_every_language(rules: dict[str, ir.Expr]) -> None:
    rewritten = without_left_recursion(rules, "grammar")
    before, after = language(rules, 5), language(rewritten, 5)
    assert {name: after[name] for name in rules} == before
    assert without_left_recursion(rewritten, "grammar") is rewritten  # none is left


EDGES = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x3FFFF, 0xFFFFF, 0x10FFFF]
CODES = st.one_of(st.sampled_from(EDGES), st.integers(0, 0x10FFFF)).filter(lambda c: not 0xD800 <= c <= 0xDFFF)


@given(st.lists(st.tuples(CODES, CODES).map(lambda p: (min(p), max(p))), min_size=1, max_size=3), st.booleans(), CODES)
def test_character_sets_in_utf8(ranges: list[tuple[int, int]], negated: bool, code: int) -> None:
    grammar = ir.Grammar({"start": char_set(ranges, negated=negated)})
    near = {c + d for pair in ranges for c in pair for d in (-1, 0, 1)} | {code, *EDGES}
    for c in near:
        if 0 <= c <= 0x10FFFF and not 0xD800 <= c <= 0xDFFF:
            inside = any(low <= c <= high for low, high in ranges)
            assert accepts(grammar, chr(c)) == (inside != negated), hex(c)
    for bad in (b"\xc0\x80", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xff", b"\x80", b"\xc3"):
        assert not accepts(grammar, bad)


@pytest.mark.model
@pytest.mark.parametrize("name", LARK)
def test_what_the_masks_let_through_parses(name: str) -> None:
    from radixrt.grammar.constraint import Constraint
    from radixrt.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer()
    compiled = Constraint.grammar(LARK[name], "lark").compile(tokenizer)
    rng = random.Random(5)
    mask = np.zeros((1, (tokenizer.vocab_size + 31) // 32), np.int32)
    for _ in range(25):
        matcher, ids, budget = compiled.matcher(), list[int](), rng.randint(compiled.min_tokens, 20)
        while True:
            matcher.fill_mask_within(mask, 0, budget - len(ids))
            allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little"))
            ends = [int(id) for id in allowed if int(id) in tokenizer.eos_ids]
            if not len(allowed) or (ends and (len(allowed) == len(ends) or rng.random() < 0.3)):
                break
            plain = [int(id) for id in allowed if int(id) not in tokenizer.eos_ids]
            short = [id for id in plain if len(tokenizer.token_bytes(id)) < 3]  # or most tokens are a long name
            id = rng.choice(short if short and rng.random() < 0.7 else plain)
            assert matcher.accept(id)
            ids.append(id)
        assert matcher.can_end
        assert len(ids) <= budget
        assert judged(name, tokenizer.decode(ids)), ids


JSON_GBNF = r"""
root ::= ws (object | array) ws
value ::= object | array | string | number | "true" | "false" | "null"
object ::=
  "{" ws (
    string ws ":" ws value ws
    ("," ws string ws ":" ws value ws)*
  )? "}"
array ::= "[" ws ( value ws ("," ws value ws)* )? "]"
string ::= "\"" (
    [^"\\\x00-\x1F] |            # a class with escapes
    "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})
  )* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws ::= | [ \t\n\r] ws
"""


def test_json_in_gbnf_is_the_json_that_python_reads() -> None:
    grammar = parse_grammar(JSON_GBNF, "gbnf")
    rng = random.Random(6)
    verdicts = [0, 0]
    for _ in range(400):
        text = sample(grammar, rng, steps=60).decode()
        json.loads(text)
        changed = mutated(text.encode(), rng, b'{}[]",:0123.eE+-\\utrfalsn \n\x01').decode(errors="replace")
        try:
            readable = isinstance(json.loads(changed), dict | list) and "NaN" not in changed
        except ValueError:
            readable = False
        assert accepts(grammar, changed) == readable, changed
        verdicts[readable] += 1
    assert min(verdicts) >= 50, verdicts
