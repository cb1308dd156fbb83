"""Embeddings, scores and ranks over HTTP: what transformers computes, as OpenAI's client and others read it."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio
import torch
from aiohttp.test_utils import TestClient
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from radixrt.errors import InvalidRequest
from radixrt.request import RequestOutput
from radixrt.server.embeddings import ANSWERS, EMBEDDINGS, INSTRUCTION, TEMPLATE, Question, describe
from radixrt.server.process import ProcessClient
from tests.server.stand import Stand, error_of, reachable, served, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
WITHIN = 1e-3
ODDS = 1e-2  # in their logarithm, with the float16 keys and values that a server has
TEXTS = ["A radix tree shares prefixes.", "A radix tree shares the prefixes of many prompts.", "ü" * 30]


@pytest.fixture(scope="module")
def model(server_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(server_model, attn_implementation="eager").eval()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(local_client: Any) -> AsyncIterator[TestClient[Any, Any]]:
    async with served(local_client, served_model_name=("tiny",)) as found:
        yield found


@pytest.fixture(scope="module")
def ids_of(server_model: Path) -> Any:
    """The tokenizers library's own ids of a text."""
    tokenizer = Tokenizer.from_file(str(server_model / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def reference(model: Any, ids: Sequence[int], pooling: str = "last", size: int | None = None) -> torch.Tensor:
    with torch.inference_mode():
        states = model.base_model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]
    vector = (states[-1] if pooling == "last" else states.mean(0))[:size]
    return vector / vector.norm()


def off(vector: Sequence[float], expected: torch.Tensor) -> float:
    assert len(vector) == len(expected)
    return float((torch.as_tensor(vector) - expected).abs().max())


async def posted(client: TestClient[Any, Any], path: str, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status == 200, await answer.text()
    return await answer.json()


# ---- /v1/embeddings


async def test_openais_client_reads_both_encodings(local_client: Any, model: Any, ids_of: Any) -> None:
    async with (
        reachable(local_client, served_model_name=("tiny",)) as address,
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as api,
    ):
        await local_client.flush_cache()
        for more in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            found: Any = await api.embeddings.create(model="tiny", input=TEXTS, **more)  # left out: base64, decoded
            assert [item.index for item in found.data] == [0, 1, 2] and found.model == "tiny"
            for item, text in zip(found.data, TEXTS, strict=True):
                numbers = item.embedding
                if isinstance(numbers, str):
                    numbers = struct.unpack(f"<{64}f", base64.b64decode(numbers))
                assert off(numbers, reference(model, ids_of(text))) < WITHIN
            assert found.usage.prompt_tokens == found.usage.total_tokens == sum(len(ids_of(text)) for text in TEXTS)
        assert found.usage.prompt_tokens_details["cached_tokens"] == found.usage.prompt_tokens
        with pytest.raises(openai.BadRequestError, match="truncate_dimensions"):
            await api.embeddings.create(model="tiny", input="a", dimensions=8)
        with pytest.raises(openai.NotFoundError, match="tiny"):
            await api.embeddings.create(model="text-embedding-3-small", input="a")


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_every_form_of_input_gives_the_same_vector(
    client: TestClient[Any, Any], model: Any, pooling: str, ids_of: Any
) -> None:
    text, ids = TEXTS[0], ids_of(TEXTS[0])
    expected = reference(model, ids, pooling)
    for given, count in ((text, 1), ([text], 1), (ids, 1), ([ids], 1), ([ids, ids, ids[:5]], 3)):
        found = await posted(client, "/v1/embeddings", input=given, pooling=pooling)
        assert len(found["data"]) == count and off(found["data"][0]["embedding"], expected) < WITHIN
    other = await posted(client, "/v1/embeddings", input=[text, TEXTS[1]], pooling=pooling)
    alone = await posted(client, "/v1/embeddings", input=TEXTS[1], pooling=pooling)
    assert other["data"][1]["embedding"] == pytest.approx(alone["data"][0]["embedding"], abs=1e-5)


async def test_lengths_and_directions(client: TestClient[Any, Any], model: Any, ids_of: Any) -> None:
    ids = ids_of(TEXTS[0])
    whole = (await posted(client, "/v1/embeddings", input=TEXTS[0], normalize=False))["data"][0]["embedding"]
    one = (await posted(client, "/v1/embeddings", input=TEXTS[0]))["data"][0]["embedding"]
    assert torch.tensor(one).norm() == pytest.approx(1, abs=1e-5)
    assert off(torch.tensor(whole) / torch.tensor(whole).norm(), torch.tensor(one)) < 1e-5
    assert torch.tensor(whole).norm() != pytest.approx(1, abs=0.1)
    all_of_it = await posted(client, "/v1/embeddings", input=TEXTS[0], dimensions=64)
    assert all_of_it["data"][0]["embedding"] == one
    cut = (await posted(client, "/v1/embeddings", input=TEXTS[0], dimensions=16, truncate_dimensions=True))["data"][0]
    assert off(cut["embedding"], reference(model, ids, size=16)) < WITHIN  # of length 1 again


async def test_an_engine_in_a_process_of_its_own_gives_the_same(
    server_settings: dict[str, Any], local_client: Any, ids_of: Any
) -> None:
    engine = ProcessClient(server_settings)
    await engine.start()
    try:
        assert engine.info.embedding_size == 64
        ids = ids_of(TEXTS[0])
        for pooling in ("last", "mean"):
            here = await local_client.embed(ids, pooling, request_id=f"here-{pooling}")
            there = await engine.embed(ids, pooling, request_id=f"there-{pooling}")
            assert there.embedding == pytest.approx(here.embedding, abs=1e-6) and len(there.embedding) == 64
        for wrong, pooling, field in (([1, -1], "last", "prompt[1]"), ([1], "most", "pooling"), ([], "last", "prompt")):
            for one in (engine, local_client):
                with pytest.raises(InvalidRequest) as caught:
                    await one.embed(wrong, pooling, request_id="wrong")
                assert caught.value.field == field
        gone = asyncio.ensure_future(engine.embed(ids * 10, "last", request_id="gone"))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        async with asyncio.timeout(60):
            while (await engine.stats())["running"]:
                pass
    finally:
        await engine.close()


async def test_a_salt_keeps_caches_apart(client: TestClient[Any, Any], local_client: Any, ids_of: Any) -> None:
    await local_client.flush_cache()

    async def cached(**more: Any) -> int:
        found = await posted(client, "/v1/embeddings", input=TEXTS[0], **more)
        return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached(cache_salt="a") == 0
    assert await cached(cache_salt="b") == 0
    assert await cached(cache_salt="a") == len(ids_of(TEXTS[0]))


# ---- /v1/score and /v1/rerank

QUERY = "Which tree?"
DOCUMENTS = ["A radix tree.", "Bread is baked.", "An oak {query} <s0> {no}.", "A radix tree."]


@pytest.fixture(scope="module")
def odds(model: Any, ids_of: Any) -> Any:
    """The log of how much likelier the first answer is, from transformers' logits and the template written out."""

    def odds(text: str, answers: Sequence[str] = ANSWERS, *, chat: bool = True) -> float:
        prompt = ids_of(f"<s1>user\n{text}<s0>\n<s1>assistant\n" if chat else text)
        totals = []
        for answer in answers:
            ids = [*prompt, *ids_of(answer)]
            with torch.inference_mode():
                logprobs = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
            totals.append(sum(float(logprobs[at - 1, ids[at]]) for at in range(len(prompt), len(ids))))
        return totals[0] - totals[1]

    return odds


def of(score: float) -> float:
    """The log of the odds that a probability stands for."""
    return math.log(score) - math.log1p(-score)


def asked(query: str, document: str) -> str:
    """The documented question."""
    return (
        f"Judge whether the document answers the query.\n\nQuery: {query}\n\nDocument: {document}\n\n"
        "Does the document answer the query? Reply with Yes or No only."
    )


async def test_scores_are_the_probability_of_yes_against_no(
    client: TestClient[Any, Any], odds: Any, ids_of: Any
) -> None:
    found = await posted(client, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    expected = [odds(asked(QUERY, one)) for one in DOCUMENTS]
    assert [item["index"] for item in found["data"]] == [0, 1, 2, 3] and found["object"] == "list"
    assert [of(item["score"]) for item in found["data"]] == pytest.approx(expected, abs=ODDS)
    assert len({round(one, 2) for one in expected}) == 3  # the test can tell them apart
    lengths = [len(ids_of(f"<s1>user\n{asked(QUERY, one)}<s0>\n<s1>assistant\n")) for one in DOCUMENTS]
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] == sum(lengths)
    again = await posted(client, "/v1/score", text_1=[QUERY] * 4, text_2=DOCUMENTS)
    assert [of(one["score"]) for one in again["data"]] == pytest.approx(expected, abs=ODDS)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(lengths)
    single = await posted(client, "/v1/score", text_1=QUERY, text_2=DOCUMENTS[1])
    assert of(single["data"][0]["score"]) == pytest.approx(expected[1], abs=ODDS)


async def test_what_queries_and_documents_share_is_computed_once(
    client: TestClient[Any, Any], local_client: Any, ids_of: Any
) -> None:
    await local_client.flush_cache()
    documents = ["x" * 20, "y" * 20, "z" * 20]
    found = await posted(client, "/v1/score", text_1=QUERY, text_2=documents)
    shared = len(ids_of(f"<s1>user\n{asked(QUERY, 'x').partition('Document: ')[0]}Document: "))
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 2 * shared
    again = await posted(client, "/v1/score", text_1=QUERY, text_2=documents)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"]


async def test_ranks_are_the_scores_in_order(client: TestClient[Any, Any]) -> None:
    scores = [
        item["score"] for item in (await posted(client, "/v1/score", text_1=QUERY, text_2=DOCUMENTS))["data"]
    ]  # fmt: skip
    for path in ("/v1/rerank", "/v2/rerank"):
        found = await posted(client, path, query=QUERY, documents=DOCUMENTS, model="tiny")
        order = [item["index"] for item in found["results"]]
        values = [item["relevance_score"] for item in found["results"]]
        assert sorted(order) == [0, 1, 2, 3] and values == sorted(values, reverse=True)
        assert order.index(0) + 1 == order.index(3)  # of equal ones the first
        assert values == pytest.approx([scores[i] for i in order], abs=1e-5)
        assert [item["document"]["text"] for item in found["results"]] == [DOCUMENTS[i] for i in order]
        top = await posted(
            client, path, query=QUERY, documents=[{"text": one} for one in DOCUMENTS], top_n=2, return_documents=False
        )
        assert [item["index"] for item in top["results"]] == order[:2]
        assert all("document" not in item for item in top["results"])
    many = await posted(client, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=100)
    assert len(many["results"]) == 4


async def test_the_question_can_be_another_one(client: TestClient[Any, Any], odds: Any) -> None:
    document = "An {instruction} oak."
    for body, expected in (
        ({"instruction": "Be brief."}, odds(asked(QUERY, document).replace(INSTRUCTION, "Be brief."))),
        ({"answers": ["true", "false"]},
         odds(asked(QUERY, document).replace("Yes or No", "true or false"), ("true", "false"))),
        ({"template": "{document}? {query}! {query}"}, odds(f"{document}? {QUERY}! {QUERY}")),
        ({"template": "{query}|{document}|", "apply_chat_template": False},
         odds(f"{QUERY}|{document}|", chat=False)),
    ):  # fmt: skip
        found = await posted(client, "/v1/score", text_1=QUERY, text_2=document, **body)
        assert of(found["data"][0]["score"]) == pytest.approx(expected, abs=ODDS)


async def test_a_text_is_never_taken_for_a_place() -> None:
    question = Question("{query}/{document}/{yes}/{other}")
    assert question.text("{document}{yes}", "{query}\\1") == "{document}{yes}/{query}\\1/Yes/{other}"
    assert Question().text("q", "d") == asked("q", "d") and "{no}" in TEMPLATE


# ---- what is refused


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/embeddings", {}, "input", "is missing"),
    ("/v1/embeddings", {"input": []}, "input", "must be a text"),
    ("/v1/embeddings", {"input": ""}, "input", "is empty"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input[1]", "is empty"),
    ("/v1/embeddings", {"input": [[]]}, "input[0]", "is empty"),
    ("/v1/embeddings", {"input": {"text": "a"}}, "input", "must be a text"),
    ("/v1/embeddings", {"input": [{"role": "user", "content": "a"}]}, "input[0]", "must be a text"),
    ("/v1/embeddings", {"input": [[{"role": "user", "content": "a"}]]}, "input[0]", "must be a text"),
    ("/v1/embeddings", {"input": [1, -2]}, "input[1]", "vocabulary"),
    ("/v1/embeddings", {"input": [[1], [1, 320]]}, "input[1][1]", "ids 0 to 319"),
    ("/v1/embeddings", {"input": [1, 2**80]}, "input[1]", "vocabulary"),
    ("/v1/embeddings", {"input": [True]}, "input[0]", "token id"),
    ("/v1/embeddings", {"input": [1.5]}, "input[0]", "token id"),
    ("/v1/embeddings", {"input": "\ud800"}, "input", "not Unicode"),
    ("/v1/embeddings", {"input": "a" * 513}, "input", "context_length=512"),
    ("/v1/embeddings", {"input": ["a", "a" * 10**6]}, "input[1]", "context_length=512"),
    ("/v1/embeddings", {"input": [9] * 513}, "input", "context_length=512"),
    ("/v1/embeddings", {"input": ["a"] * 5}, "input", "max_batch=4"),
    ("/v1/embeddings", {"input": "a", "pooling": "cls"}, "pooling", "one of last, mean"),
    ("/v1/embeddings", {"input": "a", "pooling": ["last"]}, "pooling", "one of last, mean"),
    ("/v1/embeddings", {"input": "a", "normalize": 1}, "normalize", "true or false"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "float or base64"),
    ("/v1/embeddings", {"input": "a", "encoding_format": ["float"]}, "encoding_format", "float or base64"),
    ("/v1/embeddings", {"input": "a", "dimensions": 32}, "dimensions", "truncate_dimensions=true"),
    ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions", "have 64"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
    ("/v1/embeddings", {"input": "a", "truncate_dimensions": True}, "truncate_dimensions", "needs dimensions"),
    ("/v1/embeddings", {"input": "a", "inputs": "b"}, "inputs", "did you mean 'input'"),
    ("/v1/embeddings", {"input": "a", "user": 5}, "user", "must be a string"),
    ("/v1/embeddings", {"input": "a", "cache_salt": 5}, "cache_salt", "must be a string"),
    ("/v1/embeddings", {"input": "a", "model": 5}, "model", "must be a string"),
    ("/v1/score", {"text_2": "a"}, "text_1", "is missing"),
    ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "must be a text"),
    ("/v1/score", {"text_1": "a", "text_2": ["a", 5]}, "text_2[1]", "must be a text"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "as many"),
    ("/v1/score", {"text_1": "a", "text_2": ["b"] * 5}, "text_2", "max_batch=4"),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "b" * 400]}, "text_2[1]", "context_length=512"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "template": "{query}"}, "template", "{document}"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "template": 5}, "template", "must be a text"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "template": "{query}{document}", "instruction": "x"}, "instruction",
     "has no {instruction}"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "answers": ["yes"]}, "answers", "two texts"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "answers": ["yes", "yes"]}, "answers", "tells them apart"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "answers": ["yes", "\udc00"]}, "answers", "not Unicode"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "chat_template_kwargs": {"messages": []}},
     "chat_template_kwargs.messages", "not for a request"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "answers": ["yes", "n" * 10**6]}, "answers", "at most 1024"),
    ("/v1/score", {"text_1": [""] * 5, "text_2": "b"}, "text_1", "max_batch=4"),
    ("/v1/rerank", {"query": "a", "documents": [""] * 5}, "documents", "max_batch=4"),  # counted, not looked at
    ("/v1/rerank", {"documents": ["a"]}, "query", "must be a text"),
    ("/v1/rerank", {"query": "", "documents": ["a"]}, "query", "not empty"),
    ("/v1/rerank", {"query": "a"}, "documents", "is missing"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents", "must be a text"),
    ("/v1/rerank", {"query": "a", "documents": "b"}, "", ""),  # one is a list of one
    ("/v1/rerank", {"query": "a", "documents": [{"text": "a", "image": "b"}]}, "documents[0]", "must be a text"),
    ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "at least 1"),
    ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": "1"}, "top_n", "an integer"),
    ("/v1/rerank", {"query": "a" * 513, "documents": ["a"]}, "documents[0]", "context_length=512"),
    ("/v1/rerank", {"query": "a", "documents": ["a"], "return_document": True}, "return_document",
     "did you mean 'return_documents'"),
]  # fmt: skip


async def test_bad_input_names_the_field(local_client: Any) -> None:
    async with served(local_client, max_batch=4) as client:
        for path, body, field, message in WRONG:
            answer = await client.post(path, data=json.dumps(body), headers={"Content-Type": "application/json"})
            if not field:
                assert answer.status == 200, (body, await answer.text())
                continue
            error = await error_of(answer)
            assert answer.status == 400, (body, error)
            assert error["param"] == field and message in error["message"], (body, error)
        assert (await client.post("/v1/embeddings", data="input=a")).status == 415
        stats = await local_client.stats()
        assert not stats["running"] and not stats["waiting"]


async def test_unknown_fields_may_be_warned_about(local_client: Any) -> None:
    async with served(local_client, unknown_fields="warn") as client:
        answer = await client.post("/v1/embeddings", json={"input": "a", "truncate": "END", "ü": 1})
        assert answer.status == 200 and "truncate" in answer.headers["Warning"]


async def test_a_model_without_chat_template_takes_whole_prompts(server_settings: dict[str, Any], odds: Any) -> None:
    from radixrt import AsyncEngine
    from radixrt.server.local import LocalClient

    engine = LocalClient(AsyncEngine(**{**server_settings, "chat_template": None}))
    await engine.start()
    try:
        async with served(engine) as client:
            body = {"query": "a", "documents": ["b"]}
            error = await error_of(await client.post("/v1/rerank", json=body))
            assert error["param"] == "apply_chat_template" and "no chat template" in error["message"]
            plain = {"template": "{query}:{document}:", "apply_chat_template": False}
            found = await posted(client, "/v1/rerank", **body, **plain)
            expected = odds("a:b:", chat=False)
            assert of(found["results"][0]["relevance_score"]) == pytest.approx(expected, abs=ODDS)
    finally:
        await engine.close()


# ---- limits


class Embedder(Stand):
    """An engine whose vectors wait for ``go``."""

    embeds = 0
    vector: tuple[float, ...] | None = (3.0, 4.0)
    failure: str | None = None

    class tokenizer:
        @staticmethod
        def encode(text: str) -> list[int]:
            return [ord(letter) for letter in text]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        from dataclasses import replace

        self.info = replace(self.info, embedding_size=2)

    async def embed(self, prompt: Sequence[int], pooling: str, *, request_id: str, **_: Any) -> RequestOutput:
        self.running.add(request_id)
        try:
            await self.go.wait()
            if self.error is not None:
                raise self.error
            return RequestOutput(request_id, tuple(prompt), (), embedding=self.vector, error=self.failure)
        finally:
            self.running.discard(request_id)


async def test_a_full_queue_is_told() -> None:
    stand = Embedder(held=True, running=1)
    async with served(stand, max_queue=1) as client:
        first = asyncio.ensure_future(client.post("/v1/embeddings", json={"input": ["a", "b"]}))
        await until(lambda: len(stand.running) == 2)
        for path, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
            ("/v2/rerank", {"query": "a", "documents": ["b"]}),
        ):
            refused = await client.post(path, json=body)
            assert refused.status == 429 and (await error_of(refused))["code"] == "queue_full"
        stand.go.set()
        answer = await first
        found = await answer.json()
        assert [item["embedding"] for item in found["data"]] == [pytest.approx([0.6, 0.8])] * 2


async def test_a_client_that_goes_ends_all_of_its_prompts() -> None:
    stand = Embedder(held=True)
    async with served(stand) as client:
        gone = asyncio.ensure_future(client.post("/v1/embeddings", json={"input": ["a", "b", "c"]}))
        await until(lambda: len(stand.running) == 3)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert client.app is not None
        await until(lambda: not stand.running)


async def test_what_fails_in_the_engine_is_the_servers_fault() -> None:
    stand = Embedder()
    async with served(stand) as client:
        for vector, failure, status in (((0.0, 0.0), None, 500), (None, "ValueError: x", 500), (None, None, 503)):
            stand.vector, stand.failure = vector, failure
            answer = await client.post("/v1/embeddings", json={"input": "a"})
            assert answer.status == status and (await error_of(answer))["type"] == "server_error"
        stand.vector = (0.0, 0.0)
        plain = await posted(client, "/v1/embeddings", input="a", normalize=False)
        assert plain["data"][0]["embedding"] == [0, 0]
        stand.error = InvalidRequest("max_waiting_requests", "=1: the queue is full")
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status == 429


async def test_a_model_that_is_not_fit_says_so(local_client: Any, monkeypatch: Any) -> None:
    from radixrt.server.config import ServerConfig

    monkeypatch.setattr(ServerConfig, "embeddings", False, raising=False)
    if "embeddings" in ServerConfig.__dataclass_fields__:
        settings: dict[str, Any] = {"embeddings": False}
    else:
        settings = {}
    async with served(local_client, **settings) as client:
        answer = await client.post("/v1/embeddings", json={"input": "a"})
        error = await error_of(answer)
        assert answer.status == 400 and error["code"] == "model_unfit" and "not fit" in error["message"]
        assert (await client.post("/v1/score", json={"text_1": "a", "text_2": "b"})).status == 200


# ---- the description


async def test_the_description_takes_what_the_routes_take() -> None:
    paths = describe()
    schemas = {path: one["post"]["requestBody"]["content"]["application/json"]["schema"] for path, one in paths.items()}
    assert set(schemas["/v1/embeddings"]["properties"]) == set(EMBEDDINGS)
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({"input": [[1, 2], [3]], "encoding_format": "base64"}, schemas["/v1/embeddings"])
    jsonschema.validate({"query": "a", "documents": ["a", {"text": "b"}], "top_n": 1}, schemas["/v1/rerank"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"input": "a", "pool": "last"}, schemas["/v1/embeddings"])
