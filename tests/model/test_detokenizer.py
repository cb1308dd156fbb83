"""Text that comes token by token is the text that comes at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.model.detokenizer import Detokenizer
from radixrt.model.gguf_file import GGUFFile
from radixrt.model.gguf_tokenizer import tokenizer_from_gguf
from radixrt.model.tokenizer import Tokenizer
from tests.model.model_files import (
    TEXTS,
    add_byte_level,
    add_sentencepiece,
    trained_bpe,
    trained_sentencepiece,
    write_gguf,
)


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("detok") / "m.gguf"
    if request.param == "byte-level":
        from tokenizers import pre_tokenizers

        vocab, merges = trained_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
        write_gguf(path, lambda writer: add_byte_level(writer, vocab, merges, "gpt-2"))
    else:
        model = trained_sentencepiece()
        write_gguf(path, lambda writer: add_sentencepiece(writer, model))
    return tokenizer_from_gguf(GGUFFile(path))


@given(data=st.data(), skip=st.booleans(), prompt=st.sampled_from(["x", "Hello", "日本", "dog"]))
def test_pushes_and_flush_are_the_rest_of_decode(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool, prompt: str
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=len(ids), max_size=len(ids)))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(detokenizer.push(ids[at : at + size]))
        at += size
    pieces.append(detokenizer.flush())
    before = tokenizer.encode(prompt, add_special=False)
    whole = tokenizer.decode([*before, *ids], skip_special_tokens=skip)
    assert "".join(pieces) == whole[len(tokenizer.decode(before)) :]


@given(data=st.data())
def test_text_comes_out_as_soon_as_it_is_certain(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(TEXTS))
    ids = tokenizer.encode(text, add_special=False)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    shown, known = "", b""
    for id in ids:
        shown += detokenizer.push([id])
        known += tokenizer.token_bytes(id)
        complete = known.decode(errors="ignore")  # an unfinished character at the end is not there yet
        assert shown == complete
        assert "\ufffd" not in shown
    assert detokenizer.flush() == ""


def bytes_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    spelled = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size) if id not in tokenizer.special_ids}
    return [spelled[bytes([byte])] for byte in data]


def test_half_characters_are_kept_back(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([id]) for id in bytes_ids(tokenizer, "é👍".encode())] == ["", "é", "", "", "", "👍"]
    assert detokenizer.flush() == ""
    assert [detokenizer.push([id]) for id in bytes_ids(tokenizer, b"\xe6\x97a\xff\xe6")] == [
        "",
        "",
        "\ufffda",
        "\ufffd",
        "",
    ]
    assert detokenizer.flush() == "\ufffd"


def test_a_leading_space_is_kept_because_text_continues(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the dog", add_special=False)
    text = Detokenizer(tokenizer).push(ids)
    assert text == (" the dog" if tokenizer.kind == "sentencepiece" else "the dog")
    assert tokenizer.decode(ids) == "the dog"


def test_special_tokens_are_left_out_or_not(tokenizer: Tokenizer) -> None:
    special = min(tokenizer.special_ids)
    assert Detokenizer(tokenizer).push([special]) == ""
    assert Detokenizer(tokenizer, skip_special_tokens=False).push([special]) == tokenizer.token_text(special)
