"""How a model marks what it thinks to itself: the tags, who opens them, and constraints that begin behind them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from radixrt.grammar.constraint import Constraint


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Thinking stands between ``start`` and ``end``; ``starts_open``: the prompt has opened it, so that the text begins inside."""

    name: str
    start: str
    end: str
    starts_open: bool = False

    def after(self, prompt: str) -> ReasoningFormat | None:
        """The format of what follows a rendered prompt: inside where the prompt opened the tag, ``None`` where it also closed it.

        (Templates switch thinking off by writing an empty one.)
        """
        tail = prompt[-256:].rstrip()
        if tail.endswith(self.start):
            return replace(self, starts_open=True)
        if tail.endswith(self.end):
            return None
        return replace(self, starts_open=False)

    def before(self, constraint: Constraint) -> Constraint:
        """Free thinking, its end tag, up to two newlines, then what ``constraint`` allows; where thinking is not open, it may be left out."""
        then = Constraint.sequence(Constraint.regex(r"\n{0,2}"), constraint)
        open = Constraint.structural_tags([(self.end, then, "")], at_least_one=True, stop_after_first=True)
        if self.starts_open:
            return open
        return Constraint.alternatives(Constraint.sequence(self.start, open), constraint)


THINK = ReasoningFormat("think", "<think>", "</think>")
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    item.name: item
    for item in (
        THINK,
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
        ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
        ReasoningFormat("reasoning", "<reasoning>", "</reasoning>"),
        ReasoningFormat("thinking", "<thinking>", "</thinking>"),
        ReasoningFormat("thought", "<thought>", "</thought>"),
    )
}
