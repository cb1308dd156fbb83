"""What a name in a state stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lang.state import ProgramState


@dataclass(frozen=True, slots=True)
class Variable:
    """Where a value comes from: a node (with all its samples where it has several), a span of a state's text, a value that is there, or one made when it is read."""

    node: int | None = None
    samples: int = 1
    parse: Callable[[str], Any] | None = None
    span: tuple[int, ...] | None = None  # nodes, of a scope
    value: Any = None
    make: Callable[[], Any] | None = None
    rounds: tuple[int, ...] = ()  # of a generation with tools: all its nodes
    calls: tuple[Any, ...] = ()


class Sample:
    """Reads one sample of a generation, where a branch continues it."""

    def __init__(self, index: int, state: ProgramState, variable: Variable) -> None:
        self.index, self.state, self.variable = index, state, variable

    def __call__(self, _: str) -> Any:
        assert self.variable.node is not None
        text = self.state._run.done(self.variable.node).outputs[self.index].content
        return self.state._parsed(self.variable, text)


def sample_of(variable: Variable) -> int:
    """The sample that a variable stands for; the first of several."""
    return variable.parse.index if isinstance(variable.parse, Sample) else 0
