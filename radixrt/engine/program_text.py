"""The token state of a program: what was appended, as tokens that never change and a text that is not cut into tokens yet.

    |--- tokens: fixed ---|--- pending text ---|
                          tokenized as one piece where a generation begins

Invariants: a ``TokenState`` is immutable, and shares what it continues with its siblings, so forking costs nothing. Generated tokens stay
the tokens that were generated. Pending text becomes tokens early only up to a place where the tokenizer cuts whatever follows, so that the
tokens are those of the whole piece; equal texts of many programs are tokenized once.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field, replace

import numpy as np

from radixrt.cache.page_pool import IntArray
from radixrt.engine.nodes import Role
from radixrt.engine.tool_text import Called, ToolSet, chat_of, rendered, results_text, tool_set
from radixrt.errors import InvalidRequest
from radixrt.model.tokenizer import Tokenizer

_EARLY = 128  # characters of pending text from which on a part of it is made tokens
_CACHED_CHARS = 8_000_000  # of texts whose tokens are remembered, with _ENTRY for each
_ENTRY = 100
_WORD_START = re.compile(r"[A-Za-z](?= [A-Za-z])")
_CROSSES = re.compile(rb"[A-Za-z] ")
_LOOK_BACK = 4096  # characters searched for a safe cut
_NO_TOKENS: IntArray = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class TokenState:
    """A state. ``size``: fixed tokens; ``own``: the last of them, those before lie in ``before``; ``roles``: of the messages so far;
    ``open``: the last of these has not ended; ``tokenized``: tokens made of text on the way here since the last generation; ``tools``: of the chat."""

    before: TokenState | None = None
    own: IntArray = field(default_factory=lambda: _NO_TOKENS)
    size: int = 0
    pending: str = ""
    roles: tuple[str | Called, ...] = ()
    open: bool = False
    tokenized: int = 0
    tools: ToolSet | None = None

    def tokens(self) -> IntArray:
        """All fixed tokens, int32 ``[size]``."""
        parts: list[IntArray] = []
        state: TokenState | None = self
        while state is not None:
            if len(state.own):
                parts.append(state.own)
            state = state.before
        return np.concatenate(parts[::-1]) if parts else _NO_TOKENS


EMPTY = TokenState()


class ProgramText:
    """Turns text into token states for one tokenizer. Used by one thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: OrderedDict[tuple[bool, str], IntArray] = OrderedDict()
        self._chars = 0
        self._cuts: re.Pattern[str] | None = None
        self._words = False  # a cut between a letter and the space before another letter is never crossed
        self._roles: dict[tuple[ToolSet | None, tuple[str | Called, ...]], tuple[str, str]] = {}
        self.tokenized = 0  # tokens that text was really turned into, not found again

    # ---- states

    def append(self, state: TokenState, text: str) -> TokenState:
        """``state`` with a text behind it.

        Raises:
            InvalidRequest: the text is not Unicode (lone surrogates).
        """
        if not text:
            return state
        text = self._tokenizer._checked("text", text)
        pending = state.pending + text
        cut = self._safe_cut(pending) if len(pending) >= _EARLY else 0
        return self._fix(state, pending, cut)

    def settle(self, state: TokenState) -> TokenState:
        """``state`` with all its text as tokens."""
        return self._fix(state, state.pending, len(state.pending)) if state.pending else state

    def begin(self) -> TokenState:
        """The state of a program that generates from nothing.

        Raises:
            InvalidRequest: the model has no token that begins a text.
        """
        if self._tokenizer.bos_id is None:
            raise InvalidRequest(
                "prompt", "is empty, and the model has no beginning-of-sequence token: append a text before generating"
            )
        return TokenState(own=np.array([self._tokenizer.bos_id], dtype=np.int32), size=1)

    def extend(self, state: TokenState, tokens: IntArray, pending: str = "") -> TokenState:
        """A settled state with tokens that were generated behind it, and text that is left over of them."""
        return TokenState(state, tokens, state.size + len(tokens), pending, state.roles, state.open, 0, state.tools)

    def back_up(self, state: TokenState) -> TokenState:
        """A settled state without its last token."""
        return replace(state, before=None, own=state.tokens()[:-1], size=state.size - 1, pending="")

    def role(self, state: TokenState, node: Role) -> tuple[TokenState, str]:
        """``state`` with a message begun or ended, and the text that this appends.

        Raises:
            InvalidRequest: roles do not nest, tools come late, or the template refuses this order of roles.
            ModelError: the model has no chat template, or a broken one.
        """
        role, begin, tools = node.role, node.begin, state.tools
        if node.tools:
            if state.roles:
                raise InvalidRequest("tools", "must stand at the first message of a chat")
            tools = tool_set(self._tokenizer, node.tools)
        if node.results:
            return self._results(state, node)
        if begin and state.open:
            raise InvalidRequest("role", f"={role!r}: begins inside of {state.roles[-1]!r}, which has not ended")
        if not begin and not (state.open and state.roles[-1] == role):
            raise InvalidRequest("role", f"={role!r}: ends but has not begun")
        roles = (*state.roles, role) if begin else state.roles
        text = self._around(roles, tools)[0 if begin else 1]
        return replace(self.append(state, text), roles=roles, open=begin, tools=tools), text

    def _results(self, state: TokenState, node: Role) -> tuple[TokenState, str]:
        """The open message ends, the results of its calls follow, and the next one begins."""
        if not (state.open and state.roles[-1] == node.role == "assistant" and node.begin) or state.tools is None:
            raise InvalidRequest(
                "results", "must follow calls in an open message of the assistant, in a chat with tools"
            )
        end = self._around(state.roles, state.tools)[1]
        chat = chat_of(state.roles, _marks(state.roles))
        text = end + results_text(self._tokenizer, state.tools, chat, node.results)
        roles = (*state.roles, Called(tuple(one.name for one in node.results)), "assistant")
        return replace(self.append(state, text), roles=roles), text

    def kept(self, tokens: tuple[int, ...], spelled: bytes, hidden: frozenset[int]) -> tuple[int, str]:
        """How many of the generated ``tokens`` spell only what stays, and the text of ``spelled`` that they lack.

        Args:
            spelled: the bytes that stay; tokens of ``hidden`` spell nothing.
        """
        pieces = [b"" if id in hidden else self._tokenizer.token_bytes(id) for id in tokens]
        total = b"".join(pieces)
        count = len(tokens)
        while count and not spelled.startswith(total):
            count -= 1
            total = total[: len(total) - len(pieces[count])]
        try:
            return count, spelled[len(total) :].decode()
        except UnicodeDecodeError:  # the cut is inside of a character: all of it as text
            return 0, spelled.decode(errors="replace")

    def after(self, text: str) -> IntArray:
        """Tokens of a text that continues other tokens, int32."""
        return self._encode(text, first=False)

    # ---- inside

    def _fix(self, state: TokenState, pending: str, cut: int) -> TokenState:
        if cut == 0:
            return replace(state, pending=pending)
        ids = self._encode(pending[:cut], first=state.size == 0)
        made = state.tokenized + len(ids)
        size = state.size + len(ids)
        return TokenState(state, ids, size, pending[cut:], state.roles, state.open, made, state.tools)

    def _encode(self, text: str, *, first: bool) -> IntArray:
        key = (first, text)
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        ids = np.array(self._tokenizer.encode(text) if first else self._continuing(text), dtype=np.int32)
        self.tokenized += len(ids)
        if len(text) <= _CACHED_CHARS // 8:
            self._known[key] = ids
            self._chars += len(text) + _ENTRY
            while self._chars > _CACHED_CHARS:
                (_, old), _ = self._known.popitem(last=False)
                self._chars -= len(old) + _ENTRY
        return ids

    def _continuing(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special=False)
        spell = self._tokenizer.token_bytes
        wanted = text.encode()
        if b"".join(map(spell, ids)) == wanted:
            return ids
        # a SentencePiece tokenizer writes a space before a text of its own: as it goes on behind a line
        behind = self._tokenizer.encode("\n" + text, add_special=False)
        at, left = len(behind), len(wanted)
        while at and left > 0:
            at -= 1
            left -= len(spell(behind[at]))
        if left == 0 and b"".join(map(spell, behind[at:])) == wanted:
            return behind[at:]
        line = self._tokenizer.encode("\n", add_special=False)  # spaces behind control tokens stay, as in a whole text
        return behind[len(line) :] if line and behind[: len(line)] == line else ids

    def _safe_cut(self, text: str) -> int:
        """The last place where the tokenizer cuts ``text`` whatever follows it; 0: none is known."""
        if self._cuts is None:
            self._learn()
        assert self._cuts is not None
        low = max(0, len(text) - _LOOK_BACK)
        cut = 0
        for match in self._cuts.finditer(text, low):
            cut = match.end()
        if self._words:
            for match in _WORD_START.finditer(text, max(low, cut)):
                cut = match.end()
        return cut

    def _learn(self) -> None:
        """Find out where this tokenizer always cuts: behind control tokens that take no neighbouring space with them, and, where
        no token has a letter and a space behind it, before a word that follows a word. (Merges never cross such a place, so both
        sides are cut up independently; regular expressions that split words beforehand all end a run of letters there.)"""
        backend = self._tokenizer._backend
        added = backend.get_added_tokens_decoder()
        probe = self._continuing("x y")  # some tokenizers write a space behind each control token
        marks = [
            t.content
            for id, t in added.items()
            if t.special
            and not (t.lstrip or t.rstrip or t.single_word)
            and self._tokenizer.encode(t.content + "x y", add_special=False) == [id, *probe]
        ]
        self._cuts = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")
        plain = backend.normalizer is None or self._tokenizer.kind == "sentencepiece"
        spell = self._tokenizer.token_bytes
        self._words = plain and not any(
            _CROSSES.search(spell(id)) for id in range(self._tokenizer.vocab_size) if id not in added
        )

    def _around(self, roles: tuple[str | Called, ...], tools: ToolSet | None = None) -> tuple[str, str]:
        """What the template writes before and behind the content of the last of these messages.

        Found by rendering the chat with marks in place of the contents.
        """
        known = self._roles.get((tools, roles))
        if known is not None:
            return known
        marks = _marks(roles)
        messages = chat_of(roles, marks)
        whole = rendered(self._tokenizer, tools, messages, False)
        before, found, end = whole.partition(marks[-1])
        if not found:
            raise InvalidRequest("role", f"={roles[-1]!r}: the chat template does not write messages of this role")
        if roles[-1] == "assistant" and len(roles) > 1:
            before = rendered(self._tokenizer, tools, messages[:-1], True)
        if len(roles) > 1 and isinstance(roles[-2], Called):
            before = ""  # was written with the results
        elif len(roles) > 1:
            earlier = self._roles.get((tools, roles[:-1]))
            if earlier is not None:
                ended = earlier[1]
            else:  # no recursion: chats may be long
                ended = rendered(self._tokenizer, tools, messages[:-1], False).partition(marks[-2])[2]
            before, found, begin = before.rpartition(marks[-2])
            if not found or not begin.startswith(ended):
                raise InvalidRequest(
                    "role",
                    f"={roles[-1]!r}: after it the chat template writes the messages before differently, so they cannot be continued",
                )
            before = begin[len(ended) :]
        if len(self._roles) >= 4096:
            self._roles.clear()
        self._roles[tools, roles] = (before, end)
        return before, end


def _marks(roles: tuple[str | Called, ...]) -> list[str]:
    return [f"\ue000{i}\ue001" for i in range(len(roles))]
