"""Detokenizer owns the text of one growing sequence: it hands out what is complete and keeps back at most half a character.

Invariant: the pushes and the flush, joined, are the UTF-8 reading of the pushed tokens' bytes, invalid bytes being
U+FFFD as in ``Tokenizer.decode``. It continues a text: a leading SentencePiece space, which ``decode`` of a whole text
drops, is kept.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from radixrt.model.tokenizer import Tokenizer


class Detokenizer:
    """Turns one sequence's token ids into text as they come. The state is at most three bytes."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        """``shown``: special tokens that are not skipped."""
        self._token_bytes = tokenizer.token_bytes
        self._skipped: frozenset[int] = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text these tokens complete."""
        skipped, token_bytes = self._skipped, self._token_bytes
        return self._utf8.decode(b"".join([token_bytes(id) for id in token_ids if id not in skipped]))

    def flush(self) -> str:
        """What is left of a character that never came to its end, as U+FFFD."""
        return self._utf8.decode(b"", final=True)
