"""Matchers and compiled constraints on real tokenizers: end tokens, steps back, forced tokens as the tokenizer cuts them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.grammar import built, ir
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.forced import ForcedTokens
from radixrt.grammar.matcher import CompiledConstraint, Engine, Matcher, compile_grammar
from radixrt.grammar.vocabulary import Vocabulary, vocabulary_of
from radixrt.model.tokenizer import Tokenizer, load_tokenizer
from tests.grammar.grammars import literal

ENGINES: tuple[Engine, ...] = ("reference", "auto")
SMALL = Vocabulary.of([b"a", b"b", b"ab", b"<end>", b"<eot>", b"<s>", b"c"], ends=[3, 4], special=[5])


def string(low: int = 0, high: int | None = None) -> ir.Expr:
    return ir.Seq((literal('"'), ir.JsonChars(low, high), literal('"')))


def record(*fields: tuple[str, ir.Expr]) -> ir.Grammar:
    """A compact JSON object with these keys in this order."""
    parts: list[ir.Expr] = []
    for index, (name, value) in enumerate(fields):
        parts += [literal(f'{"," if index else "{"}"{name}":'), value]
    return ir.Grammar({"start": ir.Seq((*parts, literal("}")))})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer()


def allowed(matcher: Matcher) -> set[int]:
    mask = np.zeros((1, matcher.constraint.vocabulary.words), np.int32)
    matcher.fill_mask(mask, 0)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sequence_from_start_to_end(engine: Engine) -> None:
    grammar = ir.Grammar({"start": ir.Seq((literal("a"), ir.Repeat(literal("b"), 0, 2)))})
    constraint = compile_grammar(grammar, None, vocabulary=SMALL, engine=engine)
    one = constraint.matcher()
    assert allowed(one) == {0, 2} and not one.can_end and one.min_tokens_to_end == 1
    assert not one.accept(3) and not one.accept(5) and not one.accept(99) and not one.accept(-1)
    assert one.accept(2) and one.can_end and allowed(one) == {1, 3, 4}
    other = one.copy()
    assert one.accept(1) and allowed(one) == {3, 4} and not one.accept(1)
    assert one.accept(4) and one.finished and not one.can_end and allowed(one) == set()
    assert not one.accept(4) and not one.advance_bytes(b"b") and one.plan() == [] and one.min_tokens_to_end == 0
    one.rollback(2)
    assert not one.finished and allowed(one) == {1, 3, 4} == allowed(other)
    one.rollback(0)
    one.rollback(1)
    assert allowed(one) == {0, 2}
    with pytest.raises(ValueError, match="n=1"):
        one.rollback(1)
    with pytest.raises(ValueError, match="n=-1"):
        one.rollback(-1)
    assert other.allows_within(3, 0) and other.allows_within(1, 0) and not other.allows_within(1, -1)


@pytest.mark.parametrize("engine", ENGINES)
def test_accepts_text_bytes_and_tokens(engine: Engine, tokenizer: Tokenizer) -> None:
    constraint = compile_grammar(record(("name", string(1, 5)), ("n", literal("1"))), tokenizer, engine=engine)
    good = '{"name":"Zoë","n":1}'
    assert constraint.accepts(good) and constraint.accepts(good.encode())
    ids = tokenizer.encode(good, add_special=False)
    end = min(tokenizer.eos_ids)
    assert constraint.accepts(ids) and constraint.accepts([*ids, end]) and not constraint.accepts([*ids, end, end])
    assert not constraint.accepts(ids[:-1]) and not constraint.accepts(good[:-1]) and not constraint.accepts(good + " ")
    assert not constraint.accepts('{"name":"","n":1}') and not constraint.accepts('{"name":"\ud800","n":1}')
    assert constraint.accepts('{"name":"<s>","n":1}'), "special tokens written out are text here"
    assert constraint.min_tokens == len(constraint.matcher().plan()) <= len(tokenizer.encode('{"name":" ","n":1}'))
    assert constraint.memory_bytes > 0 and constraint.engine in repr(constraint)


def test_what_every_wrapper_of_a_limit_says() -> None:
    with pytest.raises(TypeError, match="tokenizer or a vocabulary"):
        compile_grammar(ir.Grammar({"start": literal("a")}), None)
    rules = {"start": ir.Alt((literal("b"), ir.Seq((ir.Ref("start2"), literal("b"))))), "start2": ir.Ref("start")}
    with pytest.raises(UnsupportedConstraint, match="left-recursive: start -> start2 -> start"):
        compile_grammar(ir.Grammar(rules), None, vocabulary=SMALL)
    hidden = {"start": ir.Seq((ir.Repeat(literal("a"), 0, None), ir.Alt((ir.Ref("start"), literal("b")))))}
    with pytest.raises(UnsupportedConstraint, match="left-recursive: start -> start"):
        compile_grammar(ir.Grammar(hidden), None, vocabulary=SMALL)


def test_without_its_compiled_part_it_says_so_once_and_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> Any:
        raise ImportError("No module named '_native'")

    built.native_module.cache_clear()
    monkeypatch.setattr(built.importlib, "import_module", missing)
    try:
        grammar = ir.Grammar({"start": literal("ab")})
        made = [compile_grammar(grammar, None, vocabulary=SMALL) for _ in range(2)]
        assert [constraint.engine for constraint in made] == ["reference"] * 2
        assert len(caplog.records) == 1 and "slowly" in caplog.text
        assert allowed(made[0].matcher()) == {0, 2}
        with pytest.raises(UnsupportedConstraint, match="not built"):
            compile_grammar(grammar, None, vocabulary=SMALL, engine="native")
    finally:
        built.native_module.cache_clear()


# -- forced tokens


def forced_share(constraint: CompiledConstraint, tokenizer: Tokenizer, text: str) -> tuple[int, int]:
    """Write a text as its canonical tokens, taking forced ones as offered; (forced, all). Fails if one is not canonical."""
    ids, one, at, taken = tokenizer.encode(text, add_special=False), constraint.matcher(), 0, 0
    while at < len(ids):
        forced = one.forced_tokens()
        assert forced == ids[at : at + len(forced)], (tokenizer.decode(ids[:at]), forced)
        for token in forced or [ids[at]]:
            assert one.accept(token)
        taken += len(forced)
        at += max(len(forced), 1)
    assert one.can_end
    return taken, len(ids)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.text(st.sampled_from("abc _-$é1 '.\u4e2d\U0001f600"), min_size=1, max_size=9)),
        min_size=1,
        max_size=4,
        unique=True,
    ),
    st.data(),
)
def test_forced_tokens_are_the_tokenizers_own(keys: list[tuple[str]], data: st.DataObject) -> None:
    tokenizer = load_tokenizer()
    names = [key for (key,) in keys]
    kinds = [data.draw(st.sampled_from(["string", "number", "constant"])) for _ in names]
    values = {
        "string": string(),
        "number": ir.Repeat(ir.byte_range(48, 57), 1, 6),
        "constant": literal('["it\'s", true, null]'),
    }
    text = "{"
    for index, (name, kind) in enumerate(zip(names, kinds)):
        value = {
            "string": st.text(st.sampled_from("ab '.,:]}{é\u4e2d0"), max_size=8).map(lambda s: f'"{s}"'),
            "number": st.integers(0, 999999).map(str),
            "constant": st.just('["it\'s", true, null]'),
        }[kind]
        text += f'{"," if index else ""}"{name}":{data.draw(value)}'
    grammar = record(*((name, values[kind]) for name, kind in zip(names, kinds)))
    forced_share(compile_grammar(grammar, tokenizer), tokenizer, text + "}")


def test_much_of_compact_json_is_forced(tokenizer: Tokenizer) -> None:
    names = ["identifier", "first_name", "last_name", "email_address", "date_of_birth"]
    constraint = compile_grammar(record(*((name, string()) for name in names)), tokenizer)
    text = "{" + ",".join(f'"{name}":"some value {i}"' for i, name in enumerate(names)) + "}"
    taken, count = forced_share(constraint, tokenizer, text)
    assert taken >= 0.21 * count


def test_text_that_nothing_can_follow_is_forced_whole(tokenizer: Tokenizer) -> None:
    constraint = compile_grammar(ir.Grammar({"start": literal("The answer is 42.")}), tokenizer)
    one = constraint.matcher()
    assert one.forced_tokens() == tokenizer.encode("The answer is 42.", add_special=False)
    optional = compile_grammar(
        ir.Grammar({"start": ir.Seq((literal("The answer"), ir.Repeat(literal("s"), 0, 1)))}), tokenizer
    )
    assert optional.matcher().forced_tokens() == tokenizer.encode("The", add_special=False)


def test_forced_text_inside_a_character_waits(tokenizer: Tokenizer) -> None:
    start = ir.Seq((literal("x"), ir.Alt((ir.Bytes("é".encode()), ir.Bytes("ê".encode())))))
    one = compile_grammar(ir.Grammar({"start": start}), tokenizer).matcher()
    assert one.forced_bytes() == b"x\xc3" and one.forced_tokens() == []
    assert one.advance_bytes(b"x\xc3") and one.forced_tokens() == []


def test_without_a_tokenizer_nothing_is_known_of_its_cuts() -> None:
    one = compile_grammar(ir.Grammar({"start": literal("ab")}), None, vocabulary=SMALL).matcher()
    assert one.forced_bytes() == b"ab" and one.forced_tokens() == []


def test_what_follows_cannot_move_a_kept_cut(tokenizer: Tokenizer) -> None:
    before, text = '{"a":1,"', 'name of it": "some value here '
    kept = ForcedTokens(tokenizer).cut([before.encode()], text.encode(), False)
    first = len(tokenizer.encode(before, add_special=False))
    assert len(kept) >= 7
    for tail in ("x", " x", "  ", "\n", '"', "'s", "0", "é", "here", " here", "."):
        whole = tokenizer.encode(before + text + tail, add_special=False)
        assert whole[first : first + len(kept)] == kept, tail


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    pytest.importorskip("sentencepiece")
    from radixrt.model.gguf_file import GGUFFile
    from radixrt.model.gguf_tokenizer import tokenizer_from_gguf
    from tests.model.model_files import add_sentencepiece, trained_sentencepiece, write_gguf

    model = trained_sentencepiece()
    path = write_gguf(tmp_path_factory.mktemp("spm") / "m.gguf", lambda writer: add_sentencepiece(writer, model))
    return tokenizer_from_gguf(GGUFFile(path))


@settings(max_examples=100)
@given(
    before=st.text("ab ,0", min_size=1, max_size=6),
    text=st.text("abe th,.0é", min_size=1, max_size=25),
    tail=st.text("ab the,é", max_size=4),
)
def test_sentencepiece_forced_tokens_are_its_own(sentencepiece: Tokenizer, before: str, text: str, tail: str) -> None:
    kept = ForcedTokens(sentencepiece).cut([before.encode()], text.encode(), False)
    whole = sentencepiece.encode(before + text + tail, add_special=False)
    spelled, at = 0, 0
    target = (
        len((" " + before).encode()) if sentencepiece.token_bytes(whole[0]).startswith(b" ") else len(before.encode())
    )
    while kept and spelled < target:
        spelled += len(sentencepiece.token_bytes(whole[at]))
        at += 1
    assert whole[at : at + len(kept)] == kept


def test_sentencepiece_text_as_its_own_tokens(sentencepiece: Tokenizer) -> None:
    text = 'the answer is "the"'
    constraint = compile_grammar(ir.Grammar({"start": literal(text)}), sentencepiece)
    assert constraint.accepts(text) and not constraint.accepts(text + "x")
    ids = ForcedTokens(sentencepiece).tokens(text)
    assert ids and b"".join(map(sentencepiece.token_bytes, ids)) == text.encode()
    assert ForcedTokens(sentencepiece).cut([b"so"], b" the answer is here", False), "something is kept"


def test_the_vocabulary_is_the_tokenizers(tokenizer: Tokenizer) -> None:
    constraint = compile_grammar(ir.Grammar({"start": literal("a")}), tokenizer)
    assert constraint.vocabulary is vocabulary_of(tokenizer)
    assert allowed(constraint.matcher()) == {tokenizer.token_id("a")}
