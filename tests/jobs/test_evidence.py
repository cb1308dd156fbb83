"""Quotes for the values of an answer, from models that obey their constraint and from some that do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from radixrt.errors import InvalidRequest
from radixrt.grammar.constraint import Constraint
from radixrt.jobs.backends import Answer, BackendDown
from radixrt.jobs.evidence import MOST_VALUES, find_evidence
from radixrt.jobs.prompt import Prompt, Turn

TEXT = "ACME GmbH, total: 12.50 EUR. Paid."
PROMPT = Prompt((Turn("system", "s"), Turn("user", TEXT)), 1)


class Model:
    """Answers each question with what ``say`` makes of its words; keeps what it was asked."""

    def __init__(self, say: Callable[[str], str]) -> None:
        self.say = say
        self.asked: list[tuple[Prompt, int, Constraint | None]] = []

    async def answer(
        self, prompt: Prompt, *, max_tokens: int, seed: int, logprobs: bool = False, constraint: Any = None
    ) -> Answer:
        self.asked.append((prompt, seed, constraint))
        return Answer(self.say(prompt.turns[-1].content), prompt_tokens=10, cached_tokens=8, output_tokens=2)


async def asked(model: Model, value: Any, **options: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value)
    answer = Answer(text, token_ids=(1, 2))
    return await find_evidence(model, PROMPT, answer, TEXT, seed=7, **options)  # type: ignore[arg-type]


async def test_each_value_has_its_words() -> None:
    model = Model(lambda question: "total: 12.50" if "total" in question else "ACME GmbH")
    found = await asked(model, {"total": 12.5, "who": "ACME", "note": None, "more": ""})
    assert found.quotes == {
        "total": {"text": "total: 12.50", "start": 11, "end": 23},
        "who": {"text": "ACME GmbH", "start": 0, "end": 9},
    }
    assert all(TEXT[quote["start"] : quote["end"]] == quote["text"] for quote in found.quotes.values())
    assert (found.asked, found.prompt_tokens, found.cached_tokens, found.output_tokens) == (
        2,
        20,
        16,
        4,
    )
    for prompt, _, constraint in model.asked:  # everything before the question is shared, the answer's tokens with it
        assert prompt.turns[:2] == PROMPT.turns and prompt.turns[2].token_ids == (1, 2)
        assert constraint == Constraint.substring(TEXT, empty=True)


async def test_nothing_fits() -> None:
    found = await asked(Model(lambda question: " "), {"a": True})
    assert found.quotes == {"a": None}


async def test_quotation_marks_of_the_model_are_taken_off() -> None:
    found = await asked(Model(lambda question: '"ACME GmbH"'), {"a": "ACME"})
    assert found.quotes["a"]["text"] == "ACME GmbH"


@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_what_is_not_in_the_document_is_asked_again_and_given_up(retries: int) -> None:
    model = Model(lambda question: "ACME Ltd")
    found = await asked(model, {"a": "ACME"}, retries=retries)
    assert found.quotes == {"a": {"error": "the quote 'ACME Ltd' is not in the document"}}
    assert len(model.asked) == found.asked == retries + 1


async def test_the_second_answer_may_be_right() -> None:
    model = Model(lambda question: "ACME GmbH" if "not in the document" in question else "ACME Ltd")
    found = await asked(model, {"a": "ACME"})
    assert found.quotes["a"]["text"] == "ACME GmbH"


async def test_questions_are_bounded() -> None:
    model = Model(lambda question: "ACME")
    found = await asked(model, list(range(1, 200)))
    assert len(found.quotes) == 199 and len(model.asked) == MOST_VALUES
    told = [path for path, quote in found.quotes.items() if quote and "error" in quote]
    assert told == list(found.quotes)[MOST_VALUES:]


async def test_an_answer_that_is_no_json_is_one_value() -> None:
    found = await asked(Model(lambda question: "Paid"), "invoice", is_json=False)
    assert found.quotes == {"value": {"text": "Paid", "start": 29, "end": 33}}


async def test_faults() -> None:
    def refuse(question: str) -> str:
        raise InvalidRequest("document", "too long") if "b" in question.split()[7] else BackendDown("down")

    found = await asked(Model(refuse), {"b": 1})
    assert found.quotes == {"b": {"error": "document: too long"}}
    with pytest.raises(BackendDown, match="down"):
        await asked(Model(refuse), {"a": 1})
