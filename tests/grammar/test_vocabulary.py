"""Vocabularies: what tokens spell, and which are whole characters of a JSON string."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.grammar import ir
from radixrt.grammar.matcher import compile_grammar
from radixrt.grammar.vocabulary import Vocabulary, text_length, vocabulary_of
from tests.grammar.grammars import literal


@given(st.one_of(st.binary(min_size=1, max_size=6), st.text(min_size=1, max_size=4).map(str.encode)))
def test_text_is_what_json_takes_as_it_stands(token: bytes) -> None:
    try:
        whole = json.loads(b'"' + token + b'"')
        expected = len(whole) if whole == token.decode() else None
    except ValueError:
        expected = None
    assert text_length(token) == expected


@given(
    st.lists(st.one_of(st.binary(min_size=1, max_size=4), st.text(min_size=1, max_size=5).map(str.encode)), max_size=30)
)
def test_slices_hold_the_text_tokens_by_length(tokens: list[bytes]) -> None:
    """Between quotes, at most n characters: text tokens of at most n, whatever a token's bytes are; both engines."""
    vocabulary = Vocabulary.of([b"<end>", b'"', *[bytes([b]) for b in range(256)], *tokens], [0])
    for most in (1, 2, 5):
        start = ir.Seq((literal('"'), ir.JsonChars(0, most), literal('"')))
        matcher = compile_grammar(ir.Grammar({"start": start}), None, vocabulary=vocabulary).matcher()
        assert matcher.accept(1)
        mask = np.zeros((1, vocabulary.words), np.int32)
        matcher.fill_mask(mask, 0)
        for id, text in enumerate(vocabulary.spelled):
            length = text_length(text) if text else None
            if length is not None:
                assert bool(mask[0, id >> 5] >> (id & 31) & 1) == (length <= most)


def test_what_is_never_text() -> None:
    vocabulary = Vocabulary.of([b"a", b"<s>", b"</s>", b"", b"a", b"x" * 70_000], ends=[2], special=[1])
    assert vocabulary.spelled == (b"a", b"", b"", b"", b"a", b"")
    assert vocabulary.by_bytes == {b"a": 0}
    assert (vocabulary.size, vocabulary.words, vocabulary.longest, vocabulary.single_bytes) == (6, 1, 1, {97})


@pytest.mark.parametrize("engine", ["reference", "auto"])
def test_tokens_that_spell_the_same_are_allowed_alike(engine: Any) -> None:
    vocabulary = Vocabulary.of([b"ab", b"<end>", b"a", b"b", b"ab", b"ab", b"a"], [1])
    constraint = compile_grammar(ir.Grammar({"start": literal("ab")}), None, vocabulary=vocabulary, engine=engine)
    mask = np.zeros((1, 1), np.int32)
    constraint.matcher().fill_mask(mask, 0)
    assert mask[0, 0] == 0b1110101
    assert constraint.matcher().plan() == [0]


class Words:
    """The part of a tokenizer a vocabulary is made from."""

    vocab_size, eos_ids, special_ids = 3, frozenset([2]), frozenset([1])

    def token_bytes(self, id: int) -> bytes:
        return [b"a", b"<s>", b"</s>"][id]


def test_a_tokenizer_has_one_vocabulary_as_long_as_it_lives() -> None:
    tokenizer: Any = Words()
    made = vocabulary_of(tokenizer)
    assert vocabulary_of(tokenizer) is made and made.spelled == (b"a", b"", b"") and made.ends == (2,)
    alive = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert alive() is None, "what is known of a tokenizer must not keep it"


@pytest.mark.model
def test_the_default_vocabulary_spells_every_byte_of_utf8_but_the_rare_planes() -> None:
    from radixrt.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer()
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary.size == tokenizer.vocab_size and set(vocabulary.ends) == tokenizer.eos_ids
    assert all(vocabulary.spelled[id] == b"" for id in tokenizer.special_ids)
    assert set(range(0x20, 0x7F)) <= vocabulary.single_bytes


def test_shown_in_a_line() -> None:
    vocabulary = Vocabulary.of([b"token"] * 50_000, [1])
    assert repr(vocabulary) == "Vocabulary(50,000 tokens, ends=(1,))"
