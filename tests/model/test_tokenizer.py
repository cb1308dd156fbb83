"""Tokenizers read from GGUF metadata and from Hugging Face directories, against the tokenizers they were made from."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from radixrt.errors import InvalidRequest, ModelError
from radixrt.model.gguf_file import GGUFFile
from radixrt.model.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from radixrt.model.tokenizer import Tokenizer, load_tokenizer
from tests.model.model_files import (
    MARKUP,
    ORIGINALS,
    TEXTS,
    USER_DEFINED,
    add_byte_level,
    add_sentencepiece,
    trained_bpe,
    trained_sentencepiece,
    with_markup,
    write_gguf,
)


def byte_level_pair(pre: str, path: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Our tokenizer of a GGUF file, and the tokenizers object it was written from."""
    cut, ignore_merges, normalizer = ORIGINALS[pre]
    vocab, merges = trained_bpe(cut)
    original = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    original.pre_tokenizer = cut
    original.decoder = decoders.ByteLevel()
    if normalizer is not None:
        original.normalizer = normalizer
    with_markup(original)
    write_gguf(path, lambda writer: add_byte_level(writer, vocab, merges, pre))
    return tokenizer_from_gguf(GGUFFile(path)), original


@pytest.fixture(scope="module", params=sorted(ORIGINALS))
def byte_level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return byte_level_pair(request.param, tmp_path_factory.mktemp("bpe") / "m.gguf")


@pytest.fixture(scope="module")
def sentencepiece_pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = trained_sentencepiece()
    path = write_gguf(tmp_path_factory.mktemp("spm") / "m.gguf", lambda writer: add_sentencepiece(writer, model))
    return tokenizer_from_gguf(GGUFFile(path)), model


# -- GGUF, byte level


def test_byte_level_encodes_as_the_original(byte_level: Any) -> None:
    ours, original = byte_level
    for text in TEXTS:
        expected = original.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special=False) == expected.ids, text
        assert ours.decode(expected.ids, skip_special_tokens=False) == original.decode(
            expected.ids, skip_special_tokens=False
        )
        assert ours.decode(expected.ids) == original.decode(expected.ids)
    assert ours.vocab_size == original.get_vocab_size()
    assert ours.encode_many(TEXTS, add_special=False) == [ours.encode(text, add_special=False) for text in TEXTS]


@given(st.text(max_size=60))
def test_byte_level_encodes_any_text_as_the_original(byte_level: Any, text: str) -> None:
    ours, original = byte_level
    ids = ours.encode(text, add_special=False)
    assert ids == original.encode(text, add_special_tokens=False).ids


@given(st.data())
def test_byte_level_decodes_any_ids_as_the_original(byte_level: Any, data: st.DataObject) -> None:
    ours, original = byte_level
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=20))
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == original.decode(ids, skip_special_tokens=skip)


def test_qwen2_is_what_transformers_builds(tmp_path: Path) -> None:
    ours, _ = byte_level_pair("qwen2", tmp_path / "m.gguf")
    vocab, merges = trained_bpe(ORIGINALS["qwen2"][0])
    theirs = transformers.Qwen2Tokenizer(
        vocab=vocab, merges=merges, unk_token=None, eos_token=MARKUP[0], pad_token=MARKUP[0]
    )
    theirs.add_special_tokens({"additional_special_tokens": MARKUP})
    theirs.add_tokens(USER_DEFINED)
    for text in TEXTS:
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False), text


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pretokenizer_keeps_the_text(pre: str, tmp_path: Path) -> None:
    vocab, merges = trained_bpe(ORIGINALS["gpt-2"][0])
    path = write_gguf(tmp_path / "m.gguf", lambda writer: add_byte_level(writer, vocab, merges, pre))
    ours = tokenizer_from_gguf(GGUFFile(path))
    for text in TEXTS:
        shown = ours.decode(ours.encode(text, add_special=False), skip_special_tokens=False)
        assert shown == (text if not PRE_TOKENIZERS[pre].nfc else normalizers.NFC().normalize_str(text))


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),  # where a family's cuts differ from its neighbours'
    [
        ("default", "1234567", ["123", "456", "7"]),
        ("default", "a==b", ["a", "==", "b"]),
        ("gpt-2", "1234567 x", ["1234567", "Ġx"]),
        ("smollm", "123 4", ["1", "2", "3", "Ġ", "4"]),
        ("llama3", "1234567", ["123", "456", "7"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("tekken", "HTMLParser FOOBar", ["HTMLParser", "ĠFOOBar"]),
        ("tekken", "fooBar12", ["foo", "Bar", "1", "2"]),
    ],
)
def test_pretokenizers_cut_where_they_should(pre: str, text: str, pieces: list[str], tmp_path: Path) -> None:
    vocab, merges = trained_bpe(ORIGINALS["gpt-2"][0])
    path = write_gguf(tmp_path / "m.gguf", lambda writer: add_byte_level(writer, vocab, merges, pre))
    ours = tokenizer_from_gguf(GGUFFile(path))
    assert [piece for piece, _ in ours._backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)])
def test_a_whole_word_is_a_token_where_merges_do_not_decide(pre: str, whole: bool, tmp_path: Path) -> None:
    """Llama 3 has tokens that its merges never reach."""
    vocab, merges = trained_bpe(ORIGINALS["gpt-2"][0])
    vocab = {**vocab, "Ġzyxwvut": len(vocab)}
    path = write_gguf(tmp_path / "m.gguf", lambda writer: add_byte_level(writer, vocab, merges, pre))
    ids = tokenizer_from_gguf(GGUFFile(path)).encode(" zyxwvut", add_special=False)
    assert (ids == [vocab["Ġzyxwvut"]]) == whole


def test_tekken_is_the_expression_transformers_knows() -> None:
    source = inspect.getsource(transformers.tokenization_utils_tokenizers)
    (expression,) = PRE_TOKENIZERS["tekken"].expressions
    assert f'r"{expression}"' in source


# -- GGUF, SentencePiece


def without_prefix_markup(text: str) -> bool:
    return not any(mark in text for mark in ("<s>", "</s>", "<unk>"))


def test_sentencepiece_encodes_as_the_original(sentencepiece_pair: Any) -> None:
    ours, original = sentencepiece_pair
    checked = 0
    for text in TEXTS:
        if without_prefix_markup(text) and "\0" not in text:  # SentencePiece reads no markup in text, and stops at NUL
            expected = original.encode(text)
            assert ours.encode(text, add_special=False) == expected, text
            assert ours.decode(expected) == original.decode(expected), text
            assert ours.decode(expected) == text.replace("▁", " ")
            checked += 1
    assert checked > 15
    assert ours.vocab_size == original.vocab_size()
    assert ours.adds_bos
    assert ours.encode("a") == [original.bos_id(), *original.encode("a")]


@given(st.text(alphabet=st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=40))
def test_sentencepiece_round_trips_any_text(sentencepiece_pair: Any, text: str) -> None:
    ours, original = sentencepiece_pair
    if without_prefix_markup(text) and "▁" not in text:
        ids = ours.encode(text, add_special=False)
        assert ours.decode(ids) == text
        assert original.decode(ids) == text


def test_sentencepiece_without_prefix(tmp_path: Path) -> None:
    model = trained_sentencepiece(add_dummy_prefix=False)

    def fill(writer: gguf.GGUFWriter) -> None:
        add_sentencepiece(writer, model)
        writer.add_add_space_prefix(False)

    ours = tokenizer_from_gguf(GGUFFile(write_gguf(tmp_path / "m.gguf", fill)))
    for text in ("hello there", " hello", "the dog"):
        assert ours.encode(text, add_special=False) == model.encode(text)
        assert ours.decode(model.encode(text)) == text


def test_sentencepiece_without_byte_fallback(tmp_path: Path) -> None:
    model = trained_sentencepiece(byte_fallback=False, vocab_size=500)
    path = write_gguf(tmp_path / "m.gguf", lambda writer: add_sentencepiece(writer, model))
    ours = tokenizer_from_gguf(GGUFFile(path))
    for text in ("the dog", "ไทย", "the ไทย dog ☃☃ and"):
        assert ours.encode(text, add_special=False) == model.encode(text)
    assert model.unk_id() in model.encode("ไทย")


def test_sentencepiece_markup_in_text_is_markup(sentencepiece_pair: Any) -> None:
    ours, original = sentencepiece_pair
    ids = ours.encode("<s>hello</s>", add_special=True)
    assert ids == [original.bos_id(), *original.encode("hello"), original.eos_id()]  # one BOS, not two
    assert ours.decode(ids) == "hello"
    assert ours.decode(ids, skip_special_tokens=False) == "<s> hello</s>"


# -- bytes of tokens


def test_token_bytes(byte_level: Any, sentencepiece_pair: Any) -> None:
    for ours in (byte_level[0], sentencepiece_pair[0]):
        for text in TEXTS:
            ids = ours.encode(text, add_special=False)
            joined = b"".join(map(ours.token_bytes, ids)).decode()
            shown = ours.decode(ids, skip_special_tokens=False)
            assert joined == (" " + shown if ours.kind == "sentencepiece" and joined.startswith(" ") else shown)
        for id in (-1, ours.vocab_size, 2**40):
            assert ours.token_bytes(id) == b""
            assert ours.token_text(id) == ""
        assert ours.decode([-1, 10**6]) == ""
    spm = sentencepiece_pair[0]
    assert spm.token_bytes(spm.token_id("<0xE6>")) == b"\xe6"
    assert spm.token_bytes(spm.token_id("▁the")) == b" the"
    assert spm.token_bytes(spm.bos_id) == b"<s>"
    assert spm.is_special(spm.bos_id)
    bpe = byte_level[0]
    assert bpe.token_bytes(bpe.token_id("Ġ")) == b" "
    assert bpe.token_bytes(bpe.token_id("<tool>")) == b"<tool>"
    assert not bpe.is_special(bpe.token_id("<tool>"))
    assert {bpe.token_text(id) for id in bpe.special_ids} == set(MARKUP)
    assert {bytes([byte]) for byte in range(256)} <= {bpe.token_bytes(id) for id in range(bpe.vocab_size)}


# -- ids that begin and end sequences


def fields(writer: gguf.GGUFWriter, changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        key = f"tokenizer.ggml.{key}"
        writer.kv_data[0].pop(key, None)
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)


def gguf_tokenizer(
    path: Path, changes: dict[str, Any], pre: str = "smollm", chat_template: str | None = None
) -> Tokenizer:
    vocab, merges = trained_bpe(ORIGINALS["gpt-2"][0])

    def fill(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, vocab, merges, pre)
        fields(writer, changes)

    return tokenizer_from_gguf(GGUFFile(write_gguf(path, fill)), chat_template)


@pytest.mark.parametrize(
    ("pre", "changes", "adds"),
    [
        ("smollm", {}, False),
        ("smollm", {"add_bos_token": True}, True),
        ("smollm", {"add_bos_token": False}, False),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
    ],
)
def test_one_bos_where_the_model_wants_one(pre: str, changes: dict[str, Any], adds: bool, tmp_path: Path) -> None:
    ours = gguf_tokenizer(tmp_path / "m.gguf", changes, pre)
    bos = ours.token_id("<|im_start|>")
    assert ours.bos_id == bos
    plain = ours.encode("hello", add_special=False)
    assert ours.encode("hello") == ([bos, *plain] if adds else plain)
    assert ours.encode("") == ([bos] if adds else [])
    assert ours.encode("<|im_start|>hello") == [bos, *plain]
    assert ours.encode_many(["hello", "<|im_start|>hello"]) == [ours.encode("hello"), [bos, *plain]]


def test_several_ends_of_sequence(tmp_path: Path) -> None:
    ours = gguf_tokenizer(tmp_path / "a.gguf", {"eot_token_id": 9})
    assert ours.eos_ids == {ours.token_id("<|im_end|>"), ours.token_id("<|endoftext|>"), 9}


GGUF_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


def test_chats_from_gguf(tmp_path: Path) -> None:
    ours = gguf_tokenizer(tmp_path / "m.gguf", {"add_bos_token": True}, chat_template=GGUF_TEMPLATE)
    bos, eos = ours.token_id("<|im_start|>"), ours.token_id("<|im_end|>")
    chat = [{"role": "user", "content": "hi"}]
    assert ours.render_chat(chat) == "<|im_start|>[user]hi<|im_end|>"
    ids = ours.encode_chat(chat)
    assert ids == [bos, *ours.encode("[user]hi", add_special=False), eos]
    without = gguf_tokenizer(tmp_path / "n.gguf", {"add_bos_token": True}, chat_template="{{ messages[0].content }}")
    assert without.encode_chat(chat) == [bos, *ours.encode("hi", add_special=False)]
    with pytest.raises(ModelError, match="has no chat template"):
        gguf_tokenizer(tmp_path / "o.gguf", {}).render_chat(chat)


# -- text that is none


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda t: t.encode("a\ud800b"), "prompt"),
        (lambda t: t.encode(3), "prompt"),
        (lambda t: t.encode(b"a"), "prompt"),
        (lambda t: t.encode_many(["a", "\udfff"]), "prompt[1]"),
        (lambda t: t.encode_many("abc"), "prompt"),
        (lambda t: t.encode_many(["a", None]), "prompt[1]"),
    ],
)
def test_what_is_not_text_is_refused(call: Callable[[Tokenizer], Any], field: str, byte_level: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        call(byte_level[0])
    assert error.value.field == field


# -- broken GGUF vocabularies


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pre": "falcon-9"}, "tokenizer.ggml.pre='falcon-9' is not supported; supported are "),
        ({"model": "t5"}, "tokenizer.ggml.model='t5' is not supported; supported are gpt2, llama"),
        ({"model": None}, "'tokenizer.ggml.model' is missing"),
        ({"tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"tokens": [1, 2]}, "'tokenizer.ggml.tokens' must be an array of strings"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "'a' twice (0 and 2)"),
        ({"token_type": [1, 1]}, "'tokenizer.ggml.token_type' must be an array of "),
        ({"merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges[0]='ab'"),
        ({"merges": ["qq zz"]}, "tokenizer.ggml"),
        ({"bos_token_id": 700}, "bos_token_id=700: must be an id from 0 to "),
        ({"add_bos_token": 1}, "add_bos_token=1: must be true or false"),
        ({"model": "llama"}, "'tokenizer.ggml.scores' is missing"),
    ],
)
def test_broken_vocabularies_name_the_key(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        gguf_tokenizer(tmp_path / "m.gguf", changes)
    assert expected in str(error.value)
    assert "m.gguf" in str(error.value)
    assert "\n" not in str(error.value)


def test_unused_tokens_are_never_encoded(tmp_path: Path) -> None:
    vocab, merges = trained_bpe(ORIGINALS["gpt-2"][0])
    the = vocab["Ġthe"]

    def fill(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, vocab, merges, "llama-bpe")
        kinds = np.ones(len(vocab), dtype=np.int32)
        kinds[the] = gguf.TokenType.UNUSED
        fields(writer, {"token_type": kinds.tolist()})

    ours = tokenizer_from_gguf(GGUFFile(write_gguf(tmp_path / "m.gguf", fill)))
    ids = ours.encode(" the theory", add_special=False)
    assert the not in ids
    assert ours.decode(ids) == " the theory"
    assert ours.token_text(the) == "Ġthe"


# -- the default model


def test_the_default_model() -> None:
    ours = load_tokenizer()
    assert ours.vocab_size == 49152
    assert ours.bos_id == 1
    assert not ours.adds_bos
    assert ours.eos_ids >= {2}
    chat = ours.encode_chat([{"role": "user", "content": "Hi"}])
    assert ours.token_text(chat[0]) == "<|im_start|>"
    assert chat.count(1) == 3  # the template's own system turn, the user's, and the assistant's to come
    for text in TEXTS:
        assert ours.decode(ours.encode(text, add_special=False), skip_special_tokens=False) == text
