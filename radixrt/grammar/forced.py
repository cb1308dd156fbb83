"""Forced text as tokens: cut where the tokenizer itself would cut it, as far as nothing that follows can move a cut.

A tokenizer first splits a text into pieces (words, runs of punctuation), then each piece into tokens by itself; what follows a
text can change its last piece only. So the tokens of the last piece are kept back, unless nothing follows or whatever the grammar
allows next begins a piece of its own (a digit behind punctuation, say). For SentencePiece a piece is a run of spaces and what stands behind it, if no token of the model says otherwise; elsewhere all is kept back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixrt.model.tokenizer import Tokenizer

_CONTEXT_STEPS = 12
# Tried first: after a piece of punctuation these join it, and where they may follow nothing else needs to be tried.
_NEXT = bytes(sorted(range(128), key=lambda b: (chr(b).isalnum() or chr(b).isspace(), b)))


class ForcedTokens:
    """Cuts text for one tokenizer. ``markers``: special tokens that are text."""

    def __init__(self, tokenizer: Tokenizer, markers: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids - markers
        texts = [tokenizer.token_bytes(id).decode() for id in markers]
        self._begun = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest = max(map(len, self._begun), default=0)
        backend = tokenizer._backend
        self._split = None
        if tokenizer.kind == "byte-level" and backend.normalizer is None and backend.pre_tokenizer is not None:
            self._split = backend.pre_tokenizer.pre_tokenize_str

    def tokens(self, text: str) -> list[int] | None:
        """The tokenizer's own tokens of a text; None where they do not spell it (a normalizing tokenizer, special tokens)."""
        try:
            ids = self._tokenizer.encode(text, add_special=False)
        except ValueError:
            return None
        if self._special.intersection(ids):
            return None
        if b"".join(map(self._tokenizer.token_bytes, ids)) == text.encode():
            return ids
        # The tokenizer wrote a space of its own before the text: as it would go on after a line.
        return self._after("\n", text)

    def _after(self, before: str, text: str) -> list[int] | None:
        """The tokens of ``text`` where it follows ``before``; None if the tokenizer makes no cut between the two."""
        ids = self._tokenizer.encode(before + text, add_special=False)
        if self._special.intersection(ids):
            return None
        spelled = [self._tokenizer.token_bytes(id) for id in ids]
        if not b"".join(spelled).endswith((before + text).encode()):
            return None
        begin, left = len(ids), len(text.encode())
        while begin and left > 0:
            begin -= 1
            left -= len(spelled[begin])
        return None if left else ids[begin:]

    def cut(
        self, steps: Sequence[bytes], forced: bytes, last: bool, follows: Callable[[bytes], bool] = lambda _: True
    ) -> list[int]:
        """The tokens of ``forced`` after the steps so far.

        Args:
            last: nothing can follow it.
            follows: whether a byte may come next.
        """
        try:
            text = forced.decode("utf-8")
        except UnicodeDecodeError as error:  # half a character at the end waits for its other half
            if error.end < len(forced) or not error.start:
                return []
            text, last = forced[: error.start].decode("utf-8"), False
        for size in range(min(self._longest, len(text)), 0, -1):  # it may become a marker, which is one token
            if text[-size:] in self._begun and not last:
                text = text[:-size]
                break
        before = self._before(steps)
        ids = self._after(before, text) if text else None
        if ids is None:  # the model decides
            return []
        if last or self._cut_off(before + text, follows):
            return ids
        room = len((before + text)[: self._stable(before + text)].encode()) - len(before.encode())
        keep = 0
        while keep < len(ids) and (room := room - len(self._tokenizer.token_bytes(ids[keep]))) >= 0:
            keep += 1
        return ids[:keep]

    def _cut_off(self, text: str, follows: Callable[[bytes], bool]) -> bool:
        """Whether the tokenizer cuts right behind ``text`` whatever may follow it."""
        # behind white space or an apostrophe a cut can depend on more than one following character
        if self._split is None or text[-1:].isspace() or text[-1:] == "'":
            return False
        for number in _NEXT:
            if follows(bytes((number,))) and all(
                start != len(text) for _, (start, _) in self._split(text + chr(number))
            ):
                return False
        return not any(follows(bytes((number,))) for number in range(128, 256))

    @cached_property
    def _spaces_lead(self) -> bool:
        """No token has a space after anything else, so every run of spaces begins a piece of its own."""
        tokenizer = self._tokenizer
        return tokenizer.kind == "sentencepiece" and not any(
            b" " in tokenizer.token_bytes(id).lstrip(b" ")
            for id in range(tokenizer.vocab_size)
            if id not in tokenizer.special_ids
        )

    @staticmethod
    def _before(steps: Sequence[bytes]) -> str:
        for first in range(max(0, len(steps) - _CONTEXT_STEPS), len(steps)):
            try:
                return b"".join(steps[first:]).decode("utf-8")
            except UnicodeDecodeError:
                continue
        return ""

    def _stable(self, text: str) -> int:
        """Characters whose cuts nothing that follows can move."""
        if self._split is not None:
            pieces = self._split(text)
            return int(pieces[-1][1][0]) if pieces else 0
        if not self._spaces_lead:
            return 0
        space = text.rfind(" ")
        while space > 0 and text[space - 1] == " ":
            space -= 1
        return max(space, 0)
