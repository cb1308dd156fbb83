"""Tokenizer owns the way between text, token ids and the bytes each token stands for, for one model.

Invariants: ids are those of the model's own vocabulary; ``decode(ids)`` is the UTF-8 reading of the joined
``token_bytes`` (invalid bytes become U+FFFD), so that text may be produced piece by piece; a prompt begins with one BOS
where the model wants one and with none otherwise; special tokens written out in a text are encoded as such.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from radixrt.errors import InvalidRequest, ModelError, RadixrtError, shown
from radixrt.model.chat_template import MAX_SOURCE, ChatTemplate

if TYPE_CHECKING:
    import tokenizers

Kind = Literal["byte-level", "sentencepiece"]
SPACE = "\u2581"  # SentencePiece's visible space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_tokenizer(model: str | None = None, *, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model directory, ``.gguf`` file or hub id; nothing: of the embedded default model.

    Raises:
        ModelError: no such model, or its tokenizer cannot be read.
    """
    from radixrt.model.checkpoint import open_checkpoint
    from radixrt.model.source import resolve

    path = resolve(model)
    if path.is_dir():  # a tokenizer alone will do: no weights needed
        from radixrt.model.hf_tokenizer import tokenizer_from_directory

        return tokenizer_from_directory(path, chat_template)
    checkpoint = open_checkpoint(path)
    try:
        return checkpoint.tokenizer(chat_template)
    finally:
        checkpoint.close()


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: the character that stands for each byte in a byte-level vocabulary (Radford et al. 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


class Tokenizer:
    """Text <-> ids <-> bytes.

    Fields:
        vocab_size: highest id + 1 (the model's output may be wider; such ids stand for no text).
        bos_id: id of the beginning-of-sequence token; ``adds_bos``: prompts begin with it.
        eos_ids: every id that ends a sequence; special_ids: ids that are markup rather than text.
        kind: how pieces spell bytes. For sentencepiece ``decode`` drops one leading space, the one ``encode`` put there.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str,
        kind: Kind,
        bos_id: int | None,
        adds_bos: bool,
        eos_ids: Iterable[int],
        pieces: Sequence[str] | None = None,
        strips_space: bool = False,
        templates: Mapping[str, str] | None = None,
        template_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.kind, self.bos_id, self.adds_bos = name, kind, bos_id, adds_bos and bos_id is not None
        self.eos_ids = frozenset(eos_ids)
        self._backend = backend
        self._pieces = pieces
        self._strips_space = strips_space
        added = backend.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._templates = dict(templates or {})
        self._template_tokens = dict(template_tokens or {})
        self._compiled: dict[str, ChatTemplate] = {}

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, {self.kind}, vocab_size={self.vocab_size})"

    @cached_property
    def vocab_size(self) -> int:
        base = len(self._pieces) if self._pieces is not None else self._highest_id() + 1
        return max([base, *(id + 1 for id in self._added)])

    def _highest_id(self) -> int:
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    # -- text to ids

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; ``add_special``: with the BOS the model wants, unless the text itself begins with it.

        Raises:
            InvalidRequest: not a string, or a string that is not Unicode text (lone surrogates).
        """
        return self._with_bos(self._encode(self._checked("prompt", text)), add_special)

    def encode_many(self, texts: Sequence[str], *, add_special: bool = True) -> list[list[int]]:
        """``encode`` of each text, in one parallel batch."""
        if isinstance(texts, str):
            raise InvalidRequest("prompt", "must be a list of strings here, not one string")
        checked = [self._checked(f"prompt[{i}]", text) for i, text in enumerate(texts)]
        with library_errors(lambda reason: InvalidRequest("prompt", f"cannot be tokenized ({reason})")):
            encodings = self._backend.encode_batch_fast(checked, add_special_tokens=False)
        return [self._with_bos(encoding.ids, add_special) for encoding in encodings]

    def _encode(self, text: str, field: str = "prompt") -> list[int]:
        with library_errors(lambda reason: InvalidRequest(field, f"cannot be tokenized ({reason})")):
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _with_bos(self, ids: list[int], add_special: bool) -> list[int]:
        if add_special and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    @staticmethod
    def _checked(field: str, text: str) -> str:
        if not isinstance(text, str):
            raise InvalidRequest(field, f"must be a string, not {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            bad = text[error.start]
            raise InvalidRequest(
                field, f"is not Unicode text: lone surrogate U+{ord(bad):04X} at character {error.start}"
            ) from None
        return text

    # -- ids to text

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. An id that stands for no token adds nothing."""
        if skip_special_tokens:
            special = self.special_ids
            ids = [id for id in ids if id not in special]
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")
        return text[1:] if self._strips_space and text.startswith(" ") else text

    def token_bytes(self, id: int) -> bytes:
        """What a token adds to the text, in bytes; special tokens: their literal text; an unknown id: nothing."""
        known = self._bytes.get(id)
        if known is None:
            known = self._bytes[id] = self._spell(id)
        return known

    def token_text(self, id: int) -> str:
        """The token as the vocabulary writes it; ``""`` for an unknown id."""
        if id in self._added:
            return self._added[id]
        if not 0 <= id < self.vocab_size:
            return ""
        if self._pieces is not None:
            return self._pieces[id]
        return self._backend.id_to_token(id) or ""

    def is_special(self, id: int) -> bool:
        return id in self.special_ids

    def token_id(self, text: str) -> int | None:
        """The id of a token as the vocabulary writes it."""
        id: int | None = self._backend.token_to_id(text)
        return id

    @cached_property
    def _spell(self) -> Callable[[int], bytes]:
        alphabet = byte_level_alphabet()

        def spell(id: int) -> bytes:
            piece = self.token_text(id)
            if id in self._added:
                return piece.encode()
            if self.kind == "byte-level":
                try:
                    return bytes([alphabet[char] for char in piece])
                except KeyError:  # a piece outside the alphabet stands for itself
                    return piece.encode()
            match = _BYTE_TOKEN.fullmatch(piece)
            return bytes([int(match[1], 16)]) if match else piece.replace(SPACE, " ").encode()

        return spell

    # -- chats

    @property
    def chat_template(self) -> str | None:
        """The source of the model's chat template, if it has one."""
        return self._templates.get("default") or next(iter(self._templates.values()), None)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The text of a chat, by the model's template. ``kwargs`` reach the template (``tools``, ``enable_thinking``...).

        Raises:
            InvalidRequest: a message is malformed, or the template refuses the chat.
            ModelError: the model has no template, or a broken one.
        """
        source = self._templates.get("tool_use") if kwargs.get("tools") else None
        source = source or self.chat_template
        if source is None:
            raise ModelError(
                f"{self.name}: has no chat template; give one with chat_template=, or send a plain prompt instead of messages"
            )
        template = self._compiled.get(source)
        if template is None:
            template = self._compiled[source] = ChatTemplate(source, name=self.name)
        return template.render(
            messages, add_generation_prompt=add_generation_prompt, **{**self._template_tokens, **kwargs}
        )

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Token ids of ``render_chat``, with the BOS the model wants unless the template wrote it."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **kwargs)
        return self._with_bos(self._encode(self._checked("messages", text), "messages"), True)


def template_source(given: str) -> str:
    """A chat template given by a caller: Jinja source, or the path of a file that holds it."""
    if "{" in given or "\n" in given:
        return given
    try:
        with Path(given).expanduser().open("rb") as file:
            return file.read(4 * MAX_SOURCE + 1).decode("utf-8-sig")  # no more, whatever the file is
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"chat_template={shown(given)}: cannot be read ({error})") from None


@contextmanager
def library_errors(make: Callable[[str], Exception]) -> Iterator[None]:
    """Turn whatever the tokenizers library raises into ``make(reason)``; a panic of its is not even an ``Exception``."""
    try:
        yield
    except (RadixrtError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise make(shown(str(error), 300).strip("'\"") or type(error).__name__) from None
