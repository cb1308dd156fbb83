"""The words of the document that each value of an answer rests on: one question a value, answered with a verbatim piece
of the document.

    |-- prompt of the row --|-- its answer --|-- question about value 1 --|-- quote --|
                                             |-- question about value 2 --|-- quote --|

Invariants: a quote is a piece of the document, whatever the model does: in this process and behind a radixrt server
it cannot be another text, elsewhere one that is not is asked for again and then given up, with a problem that says
so. All questions share everything before them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from radixrt.errors import InvalidRequest, shown
from radixrt.grammar.constraint import Constraint
from radixrt.jobs.backends import Answer, Backend
from radixrt.jobs.leaves import Leaf, leaves
from radixrt.jobs.prompt import Prompt

MOST_VALUES = 64  # of one answer that are asked about; those that follow have no quote
MAX_TOKENS = 96  # of a quote


@dataclass(frozen=True, slots=True)
class Evidence:
    """Fields:
    quotes: path of a value -> ``{"text", "start", "end"}``: characters of the document; ``None``: nothing in it fits;
        ``{"error"}``: why there is none.
    asked, prompt_tokens, cached_tokens, output_tokens: what it took.
    """

    quotes: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    asked: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


async def find_evidence(
    backend: Backend,
    prompt: Prompt,
    answer: Answer,
    document: str,
    *,
    seed: int,
    retries: int = 1,
    max_tokens: int = MAX_TOKENS,
    is_json: bool = True,
) -> Evidence:
    """Quotes for the values of ``answer`` (those that are null or "" have none).

    Args:
        prompt: what ``answer`` is the answer to. document: the text in it.
        is_json: else the whole answer is one value.

    Raises:
        BackendDown: as ``Backend.answer``.
    """
    wanted = [leaf for leaf in leaves(answer.text, is_json=is_json) if leaf.value not in (None, "")]
    asked = wanted[:MOST_VALUES]
    if not asked or not document.strip():
        return Evidence()
    constraint = Constraint.substring(document, empty=True)
    found = await asyncio.gather(
        *(
            _quote(backend, prompt.then(answer, _question(leaf)), document, constraint, seed, retries, max_tokens)
            for leaf in asked
        )
    )
    quotes: dict[str, dict[str, Any] | None] = {}
    for leaf, (quote, problem, _) in zip(asked, found, strict=True):
        start = document.find(quote)
        place = {"text": quote, "start": start, "end": start + len(quote)} if quote else None
        quotes[leaf.path] = {"error": problem} if problem else place
    quotes |= {
        leaf.path: {"error": f"only the first {MOST_VALUES} values are asked for"} for leaf in wanted[MOST_VALUES:]
    }
    tries = [one for _, _, all_tries in found for one in all_tries]
    return Evidence(
        quotes,
        asked=len(tries),
        prompt_tokens=sum(one.prompt_tokens for one in tries),
        cached_tokens=sum(one.cached_tokens for one in tries),
        output_tokens=sum(one.output_tokens for one in tries),
    )


async def _quote(
    backend: Backend, prompt: Prompt, document: str, constraint: Constraint, seed: int, retries: int, max_tokens: int
) -> tuple[str, str, list[Answer]]:
    """A quote, what is wrong with it, and all answers that it took."""
    tries: list[Answer] = []
    problem = ""
    for number in range(retries + 1):
        try:
            answer = await backend.answer(prompt, max_tokens=max_tokens, seed=seed + number, constraint=constraint)
        except InvalidRequest as error:
            return "", str(error), tries
        tries.append(answer)
        text = answer.text.strip()
        for quote in (text, _unquoted(text)):
            if quote in document:
                return quote, "", tries
        problem = f"the quote {shown(text)} is not in the document"
        prompt = prompt.then(
            answer, "These words are not in the document. Answer with words that are, or with nothing."
        )
    return "", problem, tries


def _question(leaf: Leaf) -> str:
    return (
        f"Which words of the document show that {leaf.path} is {shown(leaf.value, 200)}? "
        "Answer with these words, copied exactly from the document, and nothing else; with nothing where none show it."
    )


def _unquoted(text: str) -> str:
    """Without the quotation marks that models put around a quote."""
    return text[1:-1] if len(text) >= 2 and text[0] in "\"'“«" and text[-1] in "\"'”»" else text
