"""Writes small model files with other people's writers: gguf.GGUFWriter, tokenizers' and sentencepiece's trainers."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2_REGEX

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind: it's been asleep since 1998.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Größenwahn, naïveté, façade; Ελληνικά, русский текст, 日本語のテキスト, 한국어, العربية.",
    "I'll say we're done; they'd said they've HAD enough. It'S WE'RE 12345 67 890 3.14159",
    'for (int i = 0; i < 100; i++) { printf("%d\\n", i); }\t\ttabs   and    spaces\r\n\r\nlines\n\n\n',
    "the theory then there these those this that than thank think thing through throughout",
] * 8

TEXTS = [
    "",
    " ",
    "a",
    "Hello world",
    " leading and trailing ",
    "double  triple   quadruple    spaces",
    "tabs\tand\nnewlines\r\n\r\n  indented\n\n\n\n",
    "don't won't I'll we're they've HE'S SHE'D it'M",
    "1 12 123 1234 12345 3.14 1,000,000 ½ Ⅷ ٣٤٥ 10⁹",
    "émigré e\u0301migre\u0301 A\u030a \u212b \ufb01 \u1100\u1161 Größe ÀÉÎ",
    "日本語のテキスト 한국어 русский العربية עברית ไทย",
    "👍🏽 👩‍👩‍👧‍👦 🇫🇷 ☺️ \U0001f9d1\u200d\U0001f680",
    "def f(x):\n    return x**2  # square\n\tif (a != b) { c += 1; }",
    "https://example.com/a?b=c&d=%20#frag <html> $price$ ~tilde~ ^caret^ |pipe|",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|><|im_start|>  <|im_end|> x<tool>y</tool>z",
    "\u00a0nbsp\u2003em\u3000ideographic\u200bzero\ufeffbom",
    "\u0000null\u0001control\x7f",
    "▁underscores▁▁ and ▁",
    "<0x41> <s> </s> <unk>",
    "word" * 50,
    " " * 40 + "x" + "\n" * 20,
    "CamelCaseWords ALLCAPSwords mixedUPPERlower XMLHttpRequest",
]

MARKUP = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<tool>", "</tool>"]


def trained_bpe(pre: Any, **options: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE trained on CORPUS behind the given pre-tokenizer; markup comes first."""
    import json

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*MARKUP, *USER_DEFINED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        **options,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def with_markup(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MARKUP])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in USER_DEFINED])
    return tokenizer


def trained_sentencepiece(**options: Any) -> sentencepiece.SentencePieceProcessor:
    """SentencePiece BPE as Llama's: identity normalization, byte fallback, spaces kept."""
    model = io.BytesIO()
    settings: dict[str, Any] = {
        "vocab_size": 600,
        "character_coverage": 0.98,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "minloglevel": 2,
        **options,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, model_type="bpe", **settings
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_gguf(path: Path, fill: Callable[[gguf.GGUFWriter], None], arch: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_byte_level(
    writer: gguf.GGUFWriter, vocab: dict[str, int], merges: list[tuple[str, str]], pre: str | None
) -> None:
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = {
        **dict.fromkeys(MARKUP, gguf.TokenType.CONTROL),
        **dict.fromkeys(USER_DEFINED, gguf.TokenType.USER_DEFINED),
    }
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(vocab["<|im_start|>"])
    writer.add_eos_token_id(vocab["<|im_end|>"])


def add_sentencepiece(writer: gguf.GGUFWriter, model: sentencepiece.SentencePieceProcessor) -> None:
    """What the converter writes for a SentencePiece vocabulary."""
    ids = range(model.vocab_size())

    def kind(id: int) -> gguf.TokenType:
        for test, result in (
            (model.is_unknown, gguf.TokenType.UNKNOWN),
            (model.is_control, gguf.TokenType.CONTROL),
            (model.is_unused, gguf.TokenType.UNUSED),
            (model.is_byte, gguf.TokenType.BYTE),
        ):
            if test(id):
                return result
        return gguf.TokenType.NORMAL

    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.id_to_piece(id) for id in ids])
    writer.add_token_scores([model.get_score(id) for id in ids])
    writer.add_token_types([kind(id) for id in ids])
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.add_unk_token_id(model.unk_id())


LLAMA3_REGEX: str = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default


def split(regex: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# The pre-tokenizers as the models' own tokenizer.json or transformers' classes write them.
ORIGINALS: dict[str, tuple[Any, bool, Any]] = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False, None),
    "smollm": (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        False,
        None,
    ),
    "llama-bpe": (split(LLAMA3_REGEX), True, None),
    "qwen2": (split(QWEN2_REGEX), False, normalizers.NFC()),
}
