"""A job's questions to a model in this process: valid and whole answers, the same alone and in a crowd, the shared part computed once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest

from radixrt import Engine
from radixrt.engine.async_engine import AsyncEngine
from radixrt.errors import InvalidRequest
from radixrt.jobs.backends import BackendDown
from radixrt.jobs.confidence import confidences
from radixrt.jobs.engine_backend import EngineBackend
from radixrt.jobs.evidence import find_evidence
from radixrt.jobs.prompt import Layout
from radixrt.jobs.target import load_target
from radixrt.request import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"note": {"type": "string"}, "total": {"type": "number"}, "paid": {"type": "boolean"}},
    "required": ["note", "total", "paid"],
    "additionalProperties": False,
}
TARGET = load_target(SCHEMA)
LAYOUT = Layout(TARGET, examples=[{"text": "5 due.", "value": {"note": "due", "total": 5, "paid": False}}])
DOCUMENTS = [f"Bill {i}. ACME GmbH. Total: {i * 7}.50 EUR. {'Paid.' if i % 2 else 'Due.'}" for i in range(8)]

pytestmark = pytest.mark.model


@pytest.fixture
async def backend(default_engine: Engine) -> AsyncIterator[EngineBackend]:
    default_engine.flush_cache()
    made = EngineBackend(TARGET, engine=default_engine)
    await made.start()
    yield made
    await made.close()


async def test_answers_are_valid_and_whole_however_few_tokens(backend: EngineBackend) -> None:
    found = await asyncio.gather(
        *(backend.answer(LAYOUT.document(text), max_tokens=22, seed=i) for i, text in enumerate(DOCUMENTS))
    )
    for one in found:
        jsonschema.validate(json.loads(one.text), SCHEMA)
        assert one.complete and not one.problem and one.output_tokens <= 22
    # what all begin with was computed by one of them, and nothing twice
    prompt, cached = sum(one.prompt_tokens for one in found), sum(one.cached_tokens for one in found)
    assert await backend.optimum() == pytest.approx(cached / prompt) and cached / prompt > 0.7
    alone = await backend.answer(LAYOUT.document(DOCUMENTS[3]), max_tokens=22, seed=99)
    assert alone.text == found[3].text


async def test_a_retry_finds_everything_before_it_cached(backend: EngineBackend) -> None:
    first = await backend.answer(LAYOUT.document(DOCUMENTS[0]), max_tokens=40, seed=0)
    again = await backend.answer(LAYOUT.retry(DOCUMENTS[0], first, "total: too small"), max_tokens=40, seed=0)
    assert (
        again.cached_tokens >= first.prompt_tokens + first.output_tokens - 2
    )  # the last token has no KV, its end no place


async def test_confidence_and_evidence(backend: EngineBackend) -> None:
    text = DOCUMENTS[1]
    prompt = LAYOUT.document(text)
    first = await backend.answer(prompt, max_tokens=40, seed=0, logprobs=True)
    sure = confidences(first.text, first.tokens)
    assert set(sure) == {"note", "total", "paid"} and all(0 < value <= 1 for value in sure.values())
    found = await find_evidence(backend, prompt, first, text, seed=0)
    assert set(found.quotes) == {"note", "total", "paid"} - {
        name for name, value in json.loads(first.text).items() if value == ""
    }
    assert not any(quote and "error" in quote for quote in found.quotes.values())
    for quote in found.quotes.values():
        assert quote is None or (quote["text"] in text and text[quote["start"] : quote["end"]] == quote["text"])
    assert found.cached_tokens >= found.asked * (first.prompt_tokens + first.output_tokens - 2)


async def test_one_document_too_long_fails_alone(backend: EngineBackend) -> None:
    long = LAYOUT.document("word " * backend.context_length)
    short = LAYOUT.document("Total: 3.")
    found = await asyncio.gather(
        *(backend.answer(prompt, max_tokens=30, seed=0) for prompt in (long, short)), return_exceptions=True
    )
    assert isinstance(found[0], InvalidRequest) and "context_length" in str(found[0])
    assert not isinstance(found[1], BaseException)
    with pytest.raises(InvalidRequest, match="max_tokens=2: the shortest output"):
        await backend.answer(short, max_tokens=2, seed=0)


async def test_sizes(backend: EngineBackend) -> None:
    prompt = LAYOUT.document(DOCUMENTS[0])
    size = await backend.prompt_tokens(prompt)
    assert size == len(backend.engine.tokenizer.encode_chat(prompt.messages))
    assert 2 < backend.min_tokens <= 30
    assert backend.count("") == 0 and backend.count("Total: 3.") == (await backend.counter("x"))("Total: 3.") > 2
    pool = backend.pool_tokens or 0
    assert backend.inflight(pool * 2) == 2 and backend.inflight(size + 10) > backend.inflight(size + 2000) > 2


async def test_a_lent_engine_lives_on(default_engine: Engine) -> None:
    for _ in range(2):
        made = EngineBackend(TARGET, engine=default_engine)
        await made.start()
        await made.answer(LAYOUT.document("Total: 3."), max_tokens=30, seed=0)
        await made.close()
        await made.close()
        with pytest.raises(BackendDown):
            await made.answer(LAYOUT.document("Total: 3."), max_tokens=30, seed=0)
    assert not default_engine.closed
    (output,) = default_engine.generate("A bill", SamplingParams(max_tokens=2, temperature=0))
    assert len(output.token_ids) == 2


async def test_closing_ends_what_is_asked(default_engine: Engine) -> None:
    made = EngineBackend(TARGET, engine=default_engine)
    await made.start()
    task = asyncio.create_task(made.answer(LAYOUT.document("x " * 1500), max_tokens=400, seed=0))
    while not (await made.engine.stats()).running:
        await asyncio.sleep(0)
    await made.close()
    with pytest.raises(BackendDown):
        await task
    assert not default_engine.has_work and not default_engine.closed


async def test_a_lent_async_engine_stays_open(default_engine: Engine) -> None:
    from radixrt.jobs.engine_backend import _Lent

    async with AsyncEngine(engine=_Lent(default_engine)) as engine:
        made = EngineBackend(TARGET, engine=engine)
        await made.start()
        await made.answer(LAYOUT.document("Total: 3."), max_tokens=30, seed=0)
        await made.close()
        (output,) = await engine.generate("A bill", SamplingParams(max_tokens=2, temperature=0))
        assert len(output.token_ids) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": 3}, "engine: must be an AsyncEngine or an Engine, not int"),
        ({"engine": 3, "model": "x"}, "engine: is made already"),
        ({"engine": 3, "threads": 2}, "engine: is made already"),
        ({"temperature": -1}, "temperature=-1"),
    ],
)
def test_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        EngineBackend(TARGET, **options)
