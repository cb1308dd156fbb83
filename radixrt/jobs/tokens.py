"""Prompts as token ids, for a model in this process: as its chat template writes them, the shared part as the same
tokens for all.

    |-- text that all prompts begin with --|-- document, ... --|-- generated answer --|-- question, ... --|
    tokens made once, up to a place that                        as it was generated    tokenized as one piece
    the tokenizer cuts whatever follows

Invariants: the tokens of a prompt spell what the chat template writes, and are those of the whole text where nothing
was generated; a prompt that continues an answer begins with the tokens of the prompt that was answered, and with that
answer's, unless the template writes them otherwise (white space before an answer does not count). Used by one thread.
"""

from __future__ import annotations

import numpy as np

from radixrt.cache.page_pool import IntArray
from radixrt.engine.program_text import EMPTY, ProgramText, TokenState
from radixrt.errors import InvalidRequest
from radixrt.jobs.prompt import Prompt, Turn
from radixrt.model.tokenizer import Tokenizer

_MARK = "\ue000\ue001"  # private use: in no template


class PromptTokens:
    """Turns prompts into tokens for one tokenizer and one layout."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = ProgramText(tokenizer)
        self._known: tuple[tuple[Turn, ...], str, TokenState] | None = None  # the shared turns, their text, its tokens
        self._folds: bool | None = None  # the template takes no system message

    def tokens(self, prompt: Prompt) -> IntArray:
        """Token ids, int32.

        Raises:
            InvalidRequest: the chat template refuses these roles.
            ModelError: the model has no chat template, or a broken one.
        """
        last = max((i for i, turn in enumerate(prompt.turns) if turn.token_ids), default=0)
        if last:
            state = self._continued(prompt, last)
            if state is not None:
                return state.tokens()
        return self._fresh(prompt, self._render(prompt.turns)).tokens()

    def shared(self, prompt: Prompt) -> IntArray:
        """The tokens that every prompt of its layout begins with, int32."""
        return self._shared(prompt)[1].tokens()

    # ---- inside

    def _fresh(self, prompt: Prompt, text: str) -> TokenState:
        begin, state = self._shared(prompt)
        if not text.startswith(begin):  # a template that writes earlier turns otherwise when later ones follow
            begin, state = "", EMPTY
        return self._text.settle(self._text.append(state, text[len(begin) :]))

    def _continued(self, prompt: Prompt, last: int) -> TokenState | None:
        """The state of a prompt that continues the answer in turn ``last``; ``None``: the template writes that answer otherwise."""
        asked = Prompt(prompt.turns[:last], prompt.shared, prompt.before)
        answer = prompt.turns[last]
        ids = list(answer.token_ids)
        while ids and ids[-1] in self._tokenizer.eos_ids:  # the template writes the end of a message itself
            ids.pop()
        if b"".join(map(self._tokenizer.token_bytes, ids)) != answer.content.encode():
            return None
        begin = self._render(asked.turns)
        whole = self._render(prompt.turns)
        behind = (
            whole[len(begin) :].lstrip() if whole.startswith(begin) else ""
        )  # some write a space, which was not generated
        if not behind.startswith(answer.content):
            return None
        before = self.tokens(asked)
        state = self._text.extend(TokenState(own=before, size=len(before)), np.array(ids, dtype=np.int32))
        return self._text.settle(self._text.append(state, behind[len(answer.content) :]))

    def _shared(self, prompt: Prompt) -> tuple[str, TokenState]:
        """The text that all prompts of a layout begin with, and its tokens as far as no document can change them."""
        turns = (*prompt.turns[: prompt.shared], Turn("user", prompt.before))
        if self._known is None or self._known[0] != turns:
            marked = self._render((*turns[:-1], Turn("user", prompt.before + _MARK)))
            text = marked.partition(_MARK)[0] if marked.count(_MARK) == 1 else ""
            self._known = turns, text, self._text.append(EMPTY, text)
        return self._known[1:]

    def _render(self, turns: tuple[Turn, ...]) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        if self._folds is None:
            self._folds = self._refuses_system()
        if self._folds and len(messages) > 1 and messages[0]["role"] == "system":
            first = messages.pop(0)
            messages[0] = {**messages[0], "content": f"{first['content']}\n\n{messages[0]['content']}"}
        return self._tokenizer.render_chat(messages)

    def _refuses_system(self) -> bool:
        """Whether the template takes no system message, or leaves it out; its text goes before the first user's then."""
        user = {"role": "user", "content": "x"}
        try:
            return _MARK not in self._tokenizer.render_chat([{"role": "system", "content": _MARK}, user])
        except InvalidRequest:
            self._tokenizer.render_chat([user])
            return True
