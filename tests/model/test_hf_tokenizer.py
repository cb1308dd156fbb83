"""Tokenizers of Hugging Face directories, against transformers on the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

from radixrt.errors import InvalidRequest, ModelError
from radixrt.model.gguf_file import GGUFFile
from radixrt.model.gguf_tokenizer import tokenizer_from_gguf
from radixrt.model.hf_tokenizer import tokenizer_from_directory
from radixrt.model.tokenizer import library_errors, load_tokenizer
from tests.model.model_files import (
    MARKUP,
    ORIGINALS,
    TEXTS,
    add_sentencepiece,
    trained_bpe,
    trained_sentencepiece,
    with_markup,
    write_gguf,
)

# -- Hugging Face directories


def save(path: Path, tokenizer: tokenizers.Tokenizer, settings: dict[str, Any], **others: dict[str, Any]) -> Path:
    tokenizer.save(str(path / "tokenizer.json"))
    for name, value in {"tokenizer_config": settings, **others}.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def original_bpe(pre: str = "llama-bpe") -> tokenizers.Tokenizer:
    cut, ignore_merges, _ = ORIGINALS[pre]
    vocab, merges = trained_bpe(cut)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = cut, decoders.ByteLevel()
    return with_markup(tokenizer)


def with_bos_template(tokenizer: tokenizers.Tokenizer, bos: str = "<|im_start|>") -> tokenizers.Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def test_hf_encodes_as_transformers(tmp_path: Path) -> None:
    save(tmp_path, with_bos_template(original_bpe()), {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    ours = tokenizer_from_directory(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False)
        if not text.startswith("<|im_start|>"):
            assert ours.encode(text) == theirs.encode(text)
        ids = theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == {theirs.convert_tokens_to_ids(mark) for mark in MARKUP}


@pytest.mark.parametrize("legacy", [True, False])
def test_hf_sentencepiece_style_decodes_as_transformers(legacy: bool, tmp_path: Path) -> None:
    """Llama's two generations of tokenizer.json: a Prepend normalizer, then a Metaspace pre-tokenizer."""
    model = trained_sentencepiece()
    path = write_gguf(tmp_path / "m.gguf", lambda writer: add_sentencepiece(writer, model))
    backend = tokenizer_from_gguf(GGUFFile(path))._backend
    if not legacy:
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    save(tmp_path, backend, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})
    ours = tokenizer_from_directory(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.kind == "sentencepiece"
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special=False) == ids
        if "\0" not in text:
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
    assert ours.encode("a")[0] == ours.bos_id


@pytest.mark.parametrize(
    ("template", "settings", "adds"),
    [
        (False, {"bos_token": "<|im_start|>"}, False),
        (True, {"bos_token": "<|im_start|>"}, True),
        (True, {"bos_token": {"content": "<|im_start|>"}}, True),
        (True, {}, True),
        (True, {"bos_token": "<|im_start|>", "add_bos_token": False}, False),
        (False, {"bos_token": "<|im_start|>", "add_bos_token": True}, True),
        (False, {"add_bos_token": True}, False),
        (False, {"bos_token": None, "add_bos_token": True}, False),
    ],
)
def test_hf_bos(template: bool, settings: dict[str, Any], adds: bool, tmp_path: Path) -> None:
    original = original_bpe()
    save(tmp_path, with_bos_template(original) if template else original, settings)
    ours = tokenizer_from_directory(tmp_path)
    bos = original.token_to_id("<|im_start|>")
    plain = ours.encode("hello", add_special=False)
    assert ours.encode("hello") == ([bos, *plain] if adds else plain)
    assert ours.encode("<|im_start|>hello") == [bos, *plain]


def test_hf_several_ends_of_sequence(tmp_path: Path) -> None:
    save(
        tmp_path,
        original_bpe(),
        {"eos_token": "<|im_end|>"},
        config={"eos_token_id": 5},
        generation_config={"eos_token_id": [6, 7]},
    )
    ours = tokenizer_from_directory(tmp_path)
    assert ours.eos_ids == {5, 6, 7, ours.token_id("<|im_end|>")}


@pytest.mark.parametrize("place", ["jinja", "config", "named", "given", "file"])
def test_hf_chat_templates(place: str, tmp_path: Path) -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    settings: dict[str, Any] = {"bos_token": "<|im_start|>"}
    given_template = None
    if place == "jinja":
        (tmp_path / "chat_template.jinja").write_text(source)
        settings["chat_template"] = "not this one"
    elif place == "config":
        settings["chat_template"] = source
    elif place == "named":
        tools = {"name": "tool_use", "template": "tools!"}
        settings["chat_template"] = [tools, {"name": "default", "template": source}]
    elif place == "given":
        given_template = source
    else:
        (tmp_path / "mine.jinja").write_text(source)
        given_template = str(tmp_path / "mine.jinja")
    ours = tokenizer_from_directory(save(tmp_path, original_bpe(), settings), given_template)
    assert ours.chat_template == source
    assert ours.render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>user:hi\n"
    if place == "named":
        assert ours.render_chat([{"role": "user", "content": "hi"}], tools=[{"name": "f"}]) == "tools!"


def test_hf_tokens_only_the_config_knows(tmp_path: Path) -> None:
    original = original_bpe()
    size = original.get_vocab_size()
    listed = {
        str(size): {"content": "<|new|>", "special": True},
        str(size + 1): {"content": "<plâin>", "special": False},
    }
    ours = tokenizer_from_directory(save(tmp_path, original, {"added_tokens_decoder": listed}))
    assert ours.encode("<|new|><plâin>", add_special=False) == [size, size + 1]
    assert ours.decode([size, size + 1]) == "<plâin>"  # written out, not in the byte alphabet
    assert ours.token_bytes(size + 1) == "<plâin>".encode()
    assert ours.special_ids >= {size}
    assert ours.vocab_size == size + 2


def test_hf_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    original = original_bpe()
    original.enable_truncation(3)
    original.enable_padding(length=50)
    ours = tokenizer_from_directory(save(tmp_path, original, {}))
    assert ours.decode(ours.encode("a long enough text")) == "a long enough text"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer.json", "{}", "tokenizer.json: not a tokenizer"),
        ("tokenizer.json", "nonsense", "tokenizer.json: not a tokenizer"),
        ("tokenizer_config.json", "nonsense", "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}', "added_tokens_decoder is malformed"),
        ("generation_config.json", '{"eos_token_id": "x"}', "generation_config.json: eos_token_id='x'"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "added_tokens_decoder=[1]: must be an object"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"9": {"content": 5}}}',
            "added_tokens_decoder is malformed",
        ),
        ("tokenizer_config.json", '{"add_bos_token": "no"}', "add_bos_token='no': must be true or false"),
        ("tokenizer_config.json", '{"chat_template": 5}', "tokenizer_config.json: chat_template=5"),
        ("tokenizer_config.json", '{"chat_template": {"default": "x"}}', "chat_template={'default': 'x'}"),
        ("tokenizer_config.json", '{"chat_template": [5]}', "chat_template[0]=5: must have a name and a template"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "chat_template[0]={'name': 'x'}"),
        ("chat_template.json", '{"chat_template": true}', "chat_template.json: chat_template=True"),
        ("config.json", '{"eos_token_id": [1, -1]}', "config.json: eos_token_id=[1, -1]"),
        ("config.json", '{"eos_token_id": 99999}', "config.json: eos_token_id=99999: the vocabulary has ids 0 to"),
        ("config.json", '{"eos_token_id": 1, "vocab_size": 1}', "eos_token_id=1: the vocabulary has ids 0 to 0"),
    ],
)
def test_hf_broken_files_are_named(name: str, content: str, expected: str, tmp_path: Path) -> None:
    save(tmp_path, original_bpe(), {})
    tokenizer_from_directory(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError) as error:
        tokenizer_from_directory(tmp_path)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


SPECIAL = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [SPECIAL, TEXT],
                    "pair": [TEXT, {"Sequence": {"id": "B", "type_id": 1}}],
                    "special_tokens": {},
                }
            },
            "its tokenizer does not work",
        ),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "tokenizer.json: not a tokenizer"),
    ],
)
def test_hf_files_the_library_panics_on(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    save(tmp_path, original_bpe(), {})
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(ModelError, match=expected) as error:
        tokenizer_from_directory(tmp_path)
    assert "\n" not in str(error.value)


def test_hf_text_the_tokenizer_has_no_token_for(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.Unigram([("b", -1.0), ("c", -2.0)], None, False))
    tokenizer.decoder = decoders.Metaspace()
    ours = tokenizer_from_directory(save(tmp_path, tokenizer, {"chat_template": "{{ messages[0].content }}"}))
    assert ours.encode("bc") == [0, 1]
    for call, field in (
        (lambda: ours.encode("bad"), "prompt"),
        (lambda: ours.encode_many(["b", "bad"]), "prompt"),
        (lambda: ours.encode_chat([{"role": "user", "content": "bad"}]), "messages"),
    ):
        with pytest.raises(InvalidRequest, match="cannot be tokenized .*unk_id") as error:
            call()
        assert error.value.field == field


def test_only_the_library_s_panics_are_caught() -> None:
    for kind in (KeyboardInterrupt, SystemExit, MemoryError):
        with pytest.raises(kind), library_errors(ModelError):
            raise kind


def test_files_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    save(tmp_path, original_bpe(), {"eos_token": "<|im_end|>"})
    (tmp_path / "chat_template.jinja").write_text("x{{ messages }}")
    before = tokenizer_from_directory(tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    after = tokenizer_from_directory(tmp_path)
    assert (after.eos_ids, after.chat_template) == (before.eos_ids, "x{{ messages }}")


def test_hf_without_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        tokenizer_from_directory(tmp_path)
    vocab, merges = trained_bpe(ORIGINALS["gpt-2"][0])
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}'
    )
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    ours = load_tokenizer(str(tmp_path))
    assert ours.encode("the dog", add_special=False) == original_bpe("gpt-2").encode("the dog").ids
