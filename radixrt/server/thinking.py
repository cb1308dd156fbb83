"""The thinking of one choice, as far as a budget allows it.

Invariants: what is kept is what the budget allows; a delta costs what it brings, however long the thinking before it.
"""

from __future__ import annotations

from radixrt.model.detokenizer import Detokenizer
from radixrt.request import OutputDelta
from radixrt.tools import ReasoningFormat


class Thinking:
    """The tokens of one choice's thinking, up to a budget."""

    def __init__(self, format: ReasoningFormat, detokenizer: Detokenizer, budget: int) -> None:
        self.ids: list[int] = []
        self.last = 0  # tokens of the last delta that were within the budget
        self._format, self._detokenizer, self._budget = format, detokenizer, budget
        self._over = False
        self._texts: list[str] = []
        self._said = self._tail = ""  # of the text: what the start tag may be, and what may begin the end tag

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def push(self, delta: OutputDelta) -> bool:
        """Whether the budget is spent, and the thinking goes on."""
        if self._over:
            return False
        start, end = self._format.start, self._format.end
        within = delta.token_ids[: self._budget - len(self.ids)]
        self.last = len(within)
        self.ids += within
        text = self._detokenizer.push(within)
        self._texts.append(text)
        if len(self._said) < len(start):
            self._said = (self._said + text).lstrip()[: len(start)]
        talks = not self._format.starts_open and not start.startswith(self._said)
        ended = end in self._tail + text
        self._tail = (self._tail + text)[-len(end) :]
        self._over = talks or ended or delta.finish_reason is not None
        return not self._over and len(self.ids) >= self._budget
