"""Random small grammars and vocabularies, and the plain form of ``JsonChars`` for the naive matcher."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from radixrt.grammar import ir
from radixrt.grammar.vocabulary import Vocabulary

ALPHABET = b'ab"\\u0\xc3\xa9'


def literal(text: str) -> ir.Bytes:
    return ir.Bytes(text.encode())


def _set(*ranges: str) -> ir.ByteSet:
    bits = 0
    for low, high in ranges:
        bits |= ir.byte_range(ord(low), ord(high)).bits
    return ir.ByteSet(bits)


_HEX = _set("09", "af", "AF")
_TAIL = ir.byte_range(0x80, 0xBF)
JSON_CHARACTER = ir.Alt(
    (
        ir.ByteSet(ir.byte_range(0x20, 0x7F).bits & ~(1 << 0x22 | 1 << 0x5C)),
        ir.Seq((ir.byte_range(0xC2, 0xDF), _TAIL)),
        *(
            ir.Seq((ir.Bytes(bytes([first])), ir.byte_range(low, high), *([_TAIL] * more)))
            for first, low, high, more in [
                (0xE0, 0xA0, 0xBF, 1),
                *[(b, 0x80, 0xBF, 1) for b in range(0xE1, 0xF0) if b != 0xED],
                (0xED, 0x80, 0x9F, 1),
                (0xF0, 0x90, 0xBF, 2),
                *[(b, 0x80, 0xBF, 2) for b in range(0xF1, 0xF4)],
                (0xF4, 0x80, 0x8F, 2),
            ]
        ),
        ir.Seq((literal("\\"), ir.ByteSet(sum(1 << ord(c) for c in '"\\/bfnrt')))),
        ir.Seq((literal("\\u"), _set("09", "ac", "ef", "AC", "EF"), _HEX, _HEX, _HEX)),
        ir.Seq((literal("\\u"), _set("dd", "DD"), _set("07"), _HEX, _HEX)),
        ir.Seq(
            (
                literal("\\u"),
                _set("dd", "DD"),
                _set("89", "ab", "AB"),
                _HEX,
                _HEX,
                literal("\\u"),
                _set("dd", "DD"),
                _set("cf", "CF"),
                _HEX,
                _HEX,
            )
        ),
    )
)


def text_but(word: bytes) -> ir.Dfa:
    """Any plain characters of a JSON string, but not exactly this word (ASCII)."""
    size = len(word)
    free, one, two, three, e0, ed, f0, f4 = range(size + 1, size + 9)
    leads = [(0xC2, 0xDF, one), (0xE0, 0xE0, e0), (0xE1, 0xEC, two), (0xED, 0xED, ed), (0xEE, 0xEF, two)]
    leads += [(0xF0, 0xF0, f0), (0xF1, 0xF3, three), (0xF4, 0xF4, f4)]
    edges = []
    for state in [*range(size), size, free]:
        to = {byte: free for byte in range(0x20, 0x80) if byte not in b'"\\'}
        if state < size:
            to[word[state]] = state + 1
        edges.append((*((byte, byte, target) for byte, target in sorted(to.items())), *leads))
    edges += [
        ((0x80, 0xBF, free),),
        ((0x80, 0xBF, one),),
        ((0x80, 0xBF, two),),
        ((0xA0, 0xBF, one),),
        ((0x80, 0x9F, one),),
    ]
    edges += [((0x90, 0xBF, two),), ((0x80, 0x8F, two),)]
    return ir.Dfa(tuple(edges), frozenset([*range(size), free]))


def plain(grammar: ir.Grammar) -> ir.Grammar:
    """The same language without ``JsonChars``."""

    def rewrite(expr: ir.Expr) -> ir.Expr:
        match expr:
            case ir.Seq(items) | ir.Alt(items):
                return type(expr)(tuple(map(rewrite, items)))
            case ir.Repeat(item, low, high):
                return ir.Repeat(rewrite(item), low, high)
            case ir.JsonChars(low, high):
                return ir.Repeat(JSON_CHARACTER, low, high)
        return expr

    return ir.Grammar({name: rewrite(expr) for name, expr in grammar.rules.items()}, grammar.start)


_counts = st.tuples(st.integers(0, 3), st.one_of(st.none(), st.integers(0, 4))).map(
    lambda pair: (pair[0], None if pair[1] is None else pair[0] + pair[1])
)
_byte_sets = st.sets(st.sampled_from(ALPHABET), min_size=1, max_size=4).map(
    lambda found: ir.ByteSet(sum(1 << byte for byte in found))
)


@st.composite
def _dfas(draw: st.DrawFn) -> ir.Dfa:
    states = draw(st.integers(1, 3))
    edges = []
    for _ in range(states):
        taken = sorted(draw(st.sets(st.sampled_from(sorted(ALPHABET)), max_size=3)))
        edges.append(tuple((byte, byte, draw(st.integers(0, states - 1))) for byte in taken))
    return ir.Dfa(tuple(edges), frozenset(draw(st.sets(st.integers(0, states - 1), max_size=states))))


def expressions(names: tuple[str, ...], simple: bool = False) -> st.SearchStrategy[ir.Expr]:
    leaves: list[st.SearchStrategy[ir.Expr]] = [
        st.binary(max_size=3).map(lambda b: ir.Bytes(bytes(ALPHABET[i % len(ALPHABET)] for i in b))),
        _byte_sets,
        st.sampled_from(names).map(ir.Ref),
    ]
    if not simple:
        leaves += [
            st.sampled_from([ir.byte_range(0, 255), ir.byte_range(0x61, 0x7A)]),
            _dfas(),
            _counts.map(lambda pair: ir.JsonChars(*pair)),
            st.sampled_from([text_but(b"ab"), text_but(b"a")]),
        ]
    return st.recursive(
        st.one_of(leaves),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda items: ir.Seq(tuple(items))),
            st.lists(inner, max_size=3).map(lambda items: ir.Alt(tuple(items))),
            st.builds(lambda item, pair: ir.Repeat(item, *pair), inner, _counts),
        ),
        max_leaves=6,
    )


def grammars(simple: bool = False) -> st.SearchStrategy[ir.Grammar]:
    """``simple``: only what a naive enumeration of the language can take."""
    names = ("start", "x", "y")
    return st.fixed_dictionaries({name: expressions(names, simple) for name in names}).map(ir.Grammar)


@st.composite
def vocabularies(draw: st.DrawFn) -> Vocabulary:
    """A few tokens; often every byte of the alphabet is one, or every byte there is, without which no slice is used."""
    texts = draw(st.lists(st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=4).map(bytes), max_size=12))
    texts += [bytes([byte]) for byte in draw(st.sampled_from([b"", ALPHABET, bytes(range(256)), bytes(range(256))]))]
    texts = draw(st.permutations([b"", b"<end>", b"<s>", *texts]))
    ends = [texts.index(b"<end>")]
    return Vocabulary.of(texts, ends, [texts.index(b"<s>")])


def strings(length: int, alphabet: bytes = ALPHABET) -> list[bytes]:
    """All strings over the alphabet of at most ``length`` bytes."""
    return [bytes(s) for n in range(length + 1) for s in itertools.product(alphabet, repeat=n)]
