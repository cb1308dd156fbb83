"""What a job asks, and of whom: ``Backend`` is the one interface to a model in this process and to one behind an
endpoint.

Invariants: an answer is whole (``complete``) or says why it is not (``problem``); a row's own fault is an
``InvalidRequest``, a fault of the model's side that outlasts the patience is ``BackendDown``, and nothing else is
raised; what an answer says never depends on what is asked beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from radixrt.errors import RadixrtError
from radixrt.grammar.constraint import Constraint
from radixrt.jobs.prompt import Prompt


class BackendDown(RadixrtError):
    """The model does not answer any more, for nobody: the job has to stop here."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Fields:
        complete: the text is all of what the constraint wants; where not, ``problem`` says why.
        tokens: bytes and log-probability of each token, where asked for: together they spell the text.
        token_ids: as they were generated; none from an endpoint.
    """

    text: str
    complete: bool = True
    problem: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    tokens: tuple[tuple[bytes, float], ...] | None = None
    token_ids: tuple[int, ...] = ()


class Backend(Protocol):
    """A model that answers a job's prompts. ``start`` comes first, ``close`` last.

    Fields:
        name: of the model, as a resumed job compares it.
        context_length: most tokens of a prompt and its answer. pool_tokens: of KV; ``None``: not known.
        min_tokens: of the shortest answer that meets the target; 1 where that is not known.
    """

    name: str
    context_length: int
    pool_tokens: int | None
    min_tokens: int

    async def start(self) -> None:
        """Load or look up the model, and compile what is asked of it.

        Raises:
            ModelError, InvalidRequest: the model, a setting or the target cannot be had.
            BackendDown: an endpoint does not answer.
        """

    async def close(self) -> None:
        """Give up everything; what is still asked ends with ``BackendDown``. Harmless twice."""

    def count(self, text: str) -> int:
        """Tokens of a text, exactly or as an estimate; any thread may ask."""

    async def counter(self, text: str) -> Callable[[str], int]:
        """A ``count`` for pieces of this text, as exact as can be had."""

    async def prompt_tokens(self, prompt: Prompt) -> int:
        """Tokens of a whole prompt, exactly or as an estimate."""

    def inflight(self, longest: int) -> int:
        """How many requests of ``longest`` tokens (prompt and answer) should be asked at a time; at least 1."""

    async def answer(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        seed: int,
        logprobs: bool = False,
        constraint: Constraint | None = None,
    ) -> Answer:
        """Ask.

        Args:
            logprobs: wanted in ``Answer.tokens``.
            constraint: in place of the target's own.

        Raises:
            InvalidRequest: this prompt cannot be answered; others can.
            BackendDown: none can.
        """

    async def optimum(self) -> float | None:
        """The share of all prompt tokens so far that a cache which forgets nothing would have had; ``None``: not known."""
