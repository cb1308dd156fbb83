"""Token healing owns what may come first where a generation starts inside a word: tokens that spell the bytes cut off its prompt.

Invariants: a table never changes; only ordinary tokens (neither special nor ending a sequence, and known to the model) are in
it; what a ``Healing`` allows leaves the rest of its bytes spellable within the tokens that are left, so it never allows nothing.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from radixrt.errors import InvalidRequest, shown
from radixrt.grammar.constraint import DEFAULT_LIMITS, Constraint
from radixrt.grammar.vocabulary import Vocabulary, vocabulary_of
from radixrt.model.tokenizer import Tokenizer
from radixrt.sampling.mask import Bitmask

MOST_BYTES = 4096  # of the bytes to heal
_NEVER = 1 << 40
_WORD = re.compile(r"[\w ]")
_Ids = npt.NDArray[np.int64]


class TokenTable:
    """The ordinary tokens of a vocabulary in the order of their bytes.

    Args:
        vocabulary: what each token spells.
        size: ids from here on are unknown to the model.
    """

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        pairs = [(text, id) for text, id in vocabulary.sorted_tokens if id < size]
        self._texts = [text for text, _ in pairs]
        self._ids: _Ids = np.array([id for _, id in pairs], dtype=np.int64)
        self._spelled = vocabulary.spelled[:size]
        self.longest = max(map(len, self._texts), default=0)

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int) -> TokenTable:
        return cls(vocabulary_of(tokenizer), size)

    def spells(self, token_id: int) -> bytes:
        """The bytes of an ordinary token; ``b""`` for any other id."""
        return self._spelled[token_id] if 0 <= token_id < len(self._spelled) else b""

    def exactly(self, text: bytes) -> _Ids:
        """The tokens that are ``text``."""
        return self._ids[bisect_left(self._texts, text) : bisect_right(self._texts, text)]

    def starting_with(self, text: bytes) -> _Ids:
        """The tokens that are or begin with ``text``."""
        return self._ids[bisect_left(self._texts, text) : self._behind(text)]

    def healable(self, token_id: int) -> bytes:
        """The bytes of a token behind which a text may go on inside a word: an ordinary token whose text ends in a word
        character or a space, where some other token strictly extends its bytes. ``b""`` for any other."""
        text = self.spells(token_id)
        if not text or self._behind(text) == bisect_right(self._texts, text):
            return b""
        try:
            return text if _WORD.match(text.decode("utf-8")[-1]) else b""
        except UnicodeDecodeError:
            return b""

    def _behind(self, text: bytes) -> int:
        """Where the tokens that begin with ``text`` end."""
        stem = text.rstrip(b"\xff")  # the first text behind all of them: its last byte that can be, one higher
        return bisect_left(self._texts, stem[:-1] + bytes((stem[-1] + 1,))) if stem else len(self._texts)


class Healing:
    """The bytes that an output must begin with, and the tokens that may spell them.

    Args:
        table: the vocabulary.
        text: the bytes, at least one.
        banned: ids not to use.

    Raises:
        InvalidRequest: no tokens spell the bytes, or there are too many.
    """

    def __init__(self, table: TokenTable, text: bytes, banned: Iterable[int] = ()) -> None:
        if len(text) > MOST_BYTES:
            raise InvalidRequest("heal", f"has {len(text)} bytes: at most {MOST_BYTES} are taken")
        self.text = text
        self._table = table
        self._banned: _Ids = np.array(sorted(banned), dtype=np.int64)
        self._masks: dict[tuple[int, int, int], Bitmask] = {}
        # tokens needed for text[at:]; the last one may spell more than that
        self._needs = [0] * (len(text) + 1)
        for at in range(len(text) - 1, -1, -1):
            if len(self._usable(table.starting_with(text[at:]))):
                self._needs[at] = 1
            else:
                self._needs[at] = min((1 + self._needs[end] for end, _ in self._parts(at)), default=_NEVER)
        if self._needs[0] >= _NEVER:
            beside = " without stop_token_ids" if len(self._banned) else ""
            raise InvalidRequest("heal", f"={shown(text)}: no tokens of the vocabulary spell it{beside}")

    @property
    def min_tokens(self) -> int:
        """The fewest tokens that spell it."""
        return self._needs[0]

    @property
    def characters(self) -> int:
        """Its whole characters, as a text read piece by piece has them; half a one at its end does not count."""
        return len(codecs.getincrementaldecoder("utf-8")(errors="replace").decode(self.text))

    def allowed(self, at: int, room: int) -> _Ids:
        """The tokens that may come where ``at`` bytes are spelled and ``room`` tokens are left: those that begin with the rest,
        and those that are a part of it with room for what they leave."""
        parts = [ids for end, ids in self._parts(at) if 1 + self._needs[end] <= room]
        return self._usable(np.concatenate([self._table.starting_with(self.text[at:]), *parts]))

    def mask(self, at: int, room: int, size: int) -> Bitmask:
        """``allowed`` as int32 ``[ceil(size / 32)]``, see ``radixrt.sampling.mask``; not to be written to."""
        key = (at, min(room, len(self.text)), size)
        mask = self._masks.get(key)
        if mask is None:
            bits = np.zeros(-(-size // 32) * 32, dtype=np.bool_)
            bits[self.allowed(at, room)] = True
            mask = self._masks[key] = np.packbits(bits, bitorder="little").view(np.int32)
        return mask

    def _parts(self, at: int) -> Iterable[tuple[int, _Ids]]:
        """The tokens that are a proper prefix of ``text[at:]`` and do not end in a dead end, with where each ends."""
        for end in range(at + 1, min(len(self.text), at + self._table.longest + 1)):
            if self._needs[end] < _NEVER:
                ids = self._usable(self._table.exactly(self.text[at:end]))
                if len(ids):
                    yield end, ids

    def _usable(self, ids: _Ids) -> _Ids:
        return ids[~np.isin(ids, self._banned)] if len(self._banned) else ids


def healed(constraint: Constraint, text: bytes) -> Constraint:
    """``constraint`` for an output that begins with ``text``: what ``Engine.prepare(..., heal=text)`` compiles.

    Raises:
        InvalidRequest: ``text`` is not whole UTF-8 characters, which is all that a constraint can say.
    """
    try:
        literal = text.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(
            "heal", f"={shown(text)}: must be whole UTF-8 characters where there is a constraint"
        ) from None
    limits = replace(DEFAULT_LIMITS, depth=constraint.depth + 1, parts=constraint.size + 2)
    return Constraint.sequence(literal, constraint, limits=limits)
