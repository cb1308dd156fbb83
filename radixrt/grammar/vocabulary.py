"""The vocabulary as the automata see it: what each token spells, and which ids end a sequence.

Invariants: special tokens, end tokens and ids without text spell nothing, so no grammar ever matches them; two ids may spell
the same; a vocabulary never changes, and one tokenizer has one, and a second one for constraints that name one of ``MARKERS``, in which
special tokens that are such a marker spell it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixrt.model.tokenizer import Tokenizer

MAX_TOKEN_BYTES = 65_000
# What models mark calls and thinking with: often special tokens, and then the only way in which they write it.
MARKERS = frozenset(
    "[TOOL_CALLS] [ARGS] <tool_call> </tool_call> <|python_tag|> [THINK] [/THINK] <think> </think> <seed:think> </seed:think> "
    "◁think▷ ◁/think▷ <|START_THINKING|> <|END_THINKING|> <reasoning> </reasoning> <thinking> </thinking> <thought> </thought>".split()
)
_SPELLED = frozenset(marker.encode() for marker in MARKERS)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Token ids and their bytes.

    Fields:
        spelled: by id, the bytes a token adds to the text; empty: never matched.
        ends: the ids that end a sequence.
    """

    spelled: tuple[bytes, ...]
    ends: tuple[int, ...]
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, spelled: Iterable[bytes], ends: Iterable[int] = (), special: Iterable[int] = ()) -> Vocabulary:
        ends = tuple(sorted(ends))
        silent = {*special, *ends}
        return cls(
            tuple(
                b"" if id in silent or len(text) > MAX_TOKEN_BYTES else bytes(text) for id, text in enumerate(spelled)
            ),
            ends,
        )

    def __repr__(self) -> str:
        return f"Vocabulary({self.size:,} tokens, ends={self.ends})"

    @property
    def size(self) -> int:
        return len(self.spelled)

    @property
    def words(self) -> int:
        """int32 words of one row of a mask."""
        return (self.size + 31) // 32

    @cached_property
    def single_bytes(self) -> frozenset[int]:
        """The bytes that are a token by themselves: what any completion can be spelled with."""
        return frozenset(text[0] for text in self.spelled if len(text) == 1)

    @cached_property
    def sorted_tokens(self) -> list[tuple[bytes, int]]:
        """Every token that spells something, by its bytes; of those that spell the same, by id."""
        return sorted((text, id) for id, text in enumerate(self.spelled) if text)

    @cached_property
    def by_bytes(self) -> Mapping[bytes, int]:
        """The lowest id for each spelling."""
        ids: dict[bytes, int] = {}
        for text, id in self.sorted_tokens:
            ids.setdefault(text, id)
        return ids

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.spelled), default=0)

    def for_engine(self, module: Any) -> Any:
        """The form an engine wants, made once."""
        if module.__name__ not in self._cache:
            self._cache[module.__name__] = module.Vocabulary(self.spelled, self.ends)
        return self._cache[module.__name__]


# Not configuration: what was worked out once for a tokenizer that is still alive.
_known: weakref.WeakKeyDictionary[Any, dict[frozenset[int], Vocabulary]] = weakref.WeakKeyDictionary()


def vocabulary_of(tokenizer: Tokenizer, *, markers: bool = False) -> Vocabulary:
    """The vocabulary of a tokenizer: made at the first call, then the same as long as the tokenizer lives.

    Args:
        markers: special tokens that are one of ``MARKERS`` spell it.
    """
    spelled = (id for id in tokenizer.special_ids - tokenizer.eos_ids if tokenizer.token_bytes(id) in _SPELLED)
    special = tokenizer.special_ids.difference(spelled if markers else ())
    known = _known.setdefault(tokenizer, {})
    if special not in known:
        known[special] = Vocabulary.of(
            map(tokenizer.token_bytes, range(tokenizer.vocab_size)), tokenizer.eos_ids, special
        )
    return known[special]


def text_length(token: bytes) -> int | None:
    """How many whole characters a token is, if all are plain inside a JSON string: no quote, backslash or control byte."""
    try:
        text = token.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if any(char in '"\\' or char < " " for char in text) else len(text)
