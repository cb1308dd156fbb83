"""Owns how a Tokenizer is built from GGUF metadata, in the fraction of a second the tokenizers library needs.

Invariants: ids are positions in ``tokenizer.ggml.tokens``; a vocabulary model or pre-tokenizer we do not know is refused
by name, never approximated. What the keys mean: github.com/ggml-org/ggml/blob/master/docs/gguf.md and, for the names of
pre-tokenizers, llama.cpp's vocabulary loader; the regular expressions are those of the models' own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from radixrt.errors import ModelError
from radixrt.model.gguf_file import GGUFFile, StringArray
from radixrt.model.tokenizer import SPACE, Tokenizer, library_errors, template_source

if TYPE_CHECKING:
    import tokenizers

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_MARKUP = (_UNKNOWN, _CONTROL)

# control tokens that end a turn whatever the file declares
_TURN_ENDS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _PreTokenizer:
    """How a family cuts text before byte-pair merging: each expression cuts the pieces the one before left."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is that token, whatever the merges say
    adds_bos: bool = False
    nfc: bool = False


_LLAMA3 = _PreTokenizer((rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), ignore_merges=True, adds_bos=True)
_PLAIN = _PreTokenizer((_GPT2,))
PRE_TOKENIZERS: dict[str, _PreTokenizer] = {
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN,
    "gpt2": _PLAIN,
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _PreTokenizer((rf"{_WORDS}|\p{{N}}|{_REST}",), nfc=True),
    "deepseek-r1-qwen": _PreTokenizer((rf"{_WORDS}|\p{{N}}|{_REST}",), nfc=True),
    "tekken": _PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
}


def tokenizer_from_gguf(file: GGUFFile, chat_template: str | None = None) -> Tokenizer:
    """Build the tokenizer a GGUF file describes.

    Raises:
        ModelError: no vocabulary, one that does not hold together, or a kind that is not supported.
    """
    vocabulary = _Vocabulary(file)
    if vocabulary.model == "gpt2":
        backend, adds_bos = _byte_level(vocabulary)
    elif vocabulary.model == "llama":
        backend, adds_bos = _sentencepiece(vocabulary), True
    else:
        raise file.error(f"tokenizer.ggml.model={vocabulary.model!r} is not supported; supported are gpt2, llama")
    backend.add_special_tokens(vocabulary.added(_MARKUP, special=True))
    backend.add_tokens(vocabulary.added((_USER,), special=False))
    bos_id = vocabulary.id("bos")
    eos_ids = {id for id in map(vocabulary.id, ("eos", "eot", "eom")) if id is not None}
    for text in _TURN_ENDS:
        id = backend.token_to_id(text)
        if id is not None and vocabulary.types[id] == _CONTROL:
            eos_ids.add(id)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and max(eos_ids, default=-1) >= embedding.shape[0]:
        raise file.error(
            f"the end of a sequence is the token {max(eos_ids)}, 'token_embd.weight' has ids 0 to {embedding.shape[0] - 1}"
        )
    templates = vocabulary.templates() if chat_template is None else {"default": template_source(chat_template)}
    named = {"bos_token": bos_id, "eos_token": vocabulary.id("eos"), "unk_token": vocabulary.id("unknown")}
    named["pad_token"] = vocabulary.id("padding")
    return Tokenizer(
        backend,
        name=file.path.name.removesuffix(".gguf"),
        kind="byte-level" if vocabulary.model == "gpt2" else "sentencepiece",
        bos_id=bos_id,
        adds_bos=vocabulary.flag("add_bos_token", adds_bos),
        eos_ids=eos_ids,
        pieces=vocabulary.tokens,
        strips_space=vocabulary.model == "llama" and vocabulary.flag("add_space_prefix", True),
        templates=templates,
        template_tokens={name: vocabulary.tokens[id] for name, id in named.items() if id is not None},
    )


class _Vocabulary:
    """The checked ``tokenizer.ggml.*`` metadata."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.model = self._text("model")
        self.tokens = self._strings("tokens")
        size = len(self.tokens)
        if not size:
            raise file.error("tokenizer.ggml.tokens is empty")
        self.ids: dict[str, int] = dict(zip(self.tokens, range(size), strict=True))
        if len(self.ids) != size:
            twice = next(i for i, token in enumerate(self.tokens) if self.ids[token] != i)
            raise file.error(
                f"tokenizer.ggml.tokens has {self.tokens[twice]!r} twice ({twice} and {self.ids[self.tokens[twice]]})"
            )
        types = self._array("token_type", size)
        self.types = np.full(size, _NORMAL) if types is None else types
        for name in ("bos", "eos", "unknown"):  # markup by what they are for, whatever the types say
            id = self.id(name)
            if id is not None and self.types[id] == _NORMAL and types is None:
                self.types[id] = _CONTROL
        for id in np.flatnonzero(self.types == _UNUSED).tolist():
            del self.ids[self.tokens[id]]

    def id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._file.fields.get(key)
        if value is None or value == 2**32 - 1:  # how some writers say "none"
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self._file.error(f"{key}={value!r}: must be an id from 0 to {len(self.tokens) - 1}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._file.fields.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise self._file.error(f"tokenizer.ggml.{name}={value!r}: must be true or false")
        return value

    def scores(self) -> np.ndarray:
        scores = self._array("scores", len(self.tokens))
        if scores is None:
            raise self._file.error("metadata key 'tokenizer.ggml.scores' is missing")
        if not np.isfinite(scores).all():
            raise self._file.error("tokenizer.ggml.scores has a value that is not a number")
        return scores

    def merges(self) -> list[tuple[str, str]]:
        lines, pairs = self._strings("merges"), []
        for number, line in enumerate(lines):
            left, space, right = line.partition(" ")
            if not (left and space and right) or " " in right:
                raise self._file.error(f"tokenizer.ggml.merges[{number}]={line!r}: must be two tokens")
            pairs.append((left, right))
        if len(self.ids) != len(self.tokens):  # unused tokens are out of reach
            pairs = [(a, b) for a, b in pairs if a in self.ids and b in self.ids and a + b in self.ids]
        return pairs

    def pre(self) -> _PreTokenizer:
        name = self._text("pre", "default")
        if name not in PRE_TOKENIZERS:
            supported = ", ".join(sorted(PRE_TOKENIZERS))
            raise self._file.error(f"tokenizer.ggml.pre={name!r} is not supported; supported are {supported}")
        return PRE_TOKENIZERS[name]

    def added(self, types: Sequence[int], *, special: bool) -> list[Any]:
        from tokenizers import AddedToken

        ids = np.flatnonzero(np.isin(self.types, types)).tolist()
        return [AddedToken(self.tokens[id], special=special, normalized=False) for id in ids if self.tokens[id]]

    def templates(self) -> dict[str, str]:
        prefix, found = "tokenizer.chat_template", {}
        for key, value in self._file.fields.items():
            if (key == prefix or key.startswith(prefix + ".")) and isinstance(value, str):
                found[key[len(prefix) + 1 :] or "default"] = value
        return found

    def backend(self, model: Any) -> tokenizers.Tokenizer:
        import tokenizers

        return tokenizers.Tokenizer(model)

    def error(self, problem: object) -> ModelError:
        return self._file.error(f"tokenizer.ggml: {problem}")

    def _text(self, name: str, default: str | None = None) -> str:
        key = f"tokenizer.ggml.{name}"
        value = self._file.fields.get(key, default)
        if not isinstance(value, str):
            missing = key not in self._file.fields
            raise self._file.error(
                f"metadata key {key!r} is missing" if missing else f"{key}={value!r}: must be a string"
            )
        return value

    def _strings(self, name: str) -> list[str]:
        key = f"tokenizer.ggml.{name}"
        value = self._file.fields.get(key)
        if not isinstance(value, StringArray):
            problem = "is missing" if value is None else "must be an array of strings"
            raise self._file.error(f"metadata key {key!r} {problem}")
        return value.list()

    def _array(self, name: str, size: int) -> np.ndarray | None:
        key = f"tokenizer.ggml.{name}"
        value = self._file.fields.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf" or len(value) != size:
            raise self._file.error(f"metadata key {key!r} must be an array of {size} numbers, one for each token")
        return value


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

    pre = vocabulary.pre()
    with library_errors(vocabulary.error):
        model = models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges(), ignore_merges=pre.ignore_merges)
    backend = vocabulary.backend(model)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in pre.expressions]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: merge the pair whose union scores highest, which byte-pair ranks express exactly."""
    from tokenizers import decoders, models, normalizers

    tokens, types, scores = vocabulary.tokens, vocabulary.types, vocabulary.scores()
    pieces = {token: id for token, id in vocabulary.ids.items() if types[id] == _NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, id in pieces.items():
        score = -float(scores[id])
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((score, pieces[left], pieces[right], left, right))
    ranked.sort()
    unknown = np.flatnonzero(types == _UNKNOWN).tolist()
    unk_id = vocabulary.id("unknown")
    if unk_id is None and unknown:
        unk_id = unknown[0]
    with library_errors(vocabulary.error):
        model = models.BPE(
            vocab=vocabulary.ids,
            merges=[(left, right) for *_, left, right in ranked],
            unk_token=None if unk_id is None else tokens[unk_id],
            fuse_unk=True,
            byte_fallback=bool((types == _BYTE).any()),
        )
    backend = vocabulary.backend(model)
    prefix = vocabulary.flag("add_space_prefix", True)
    steps = [normalizers.Prepend(SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    tail = [decoders.Strip(content=" ", left=1)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *tail])
    return backend
