"""Other people's clients, as they come, against the whole server on a tiny model: a tour of what each is used for.

None of them may reach anything but 127.0.0.1 meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.server.stand import KEY
from tests.server.threaded import on_a_thread

# What these packages say of themselves, and of each other, when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:pydantic", "ignore::DeprecationWarning:litellm")

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
RULE = "(red|green) (cat|dog)"
SAID = {f"{color} {animal}" for color in ("red", "green") for animal in ("cat", "dog")}
QUIET = {
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_MODE": "PRODUCTION",  # reads no .env
    "NO_PROXY": "*",
}


class Animal(pydantic.BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    legs: int = pydantic.Field(ge=2, le=4)


@pytest.fixture(scope="module", autouse=True)
def nothing_but_this_machine() -> Iterator[None]:
    """No telemetry, and whoever connects or looks a name up elsewhere is told off here and at the end."""
    elsewhere: list[str] = []
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def check(host: Any) -> None:
        if host not in ("127.0.0.1", "localhost", None):
            elsewhere.append(str(host))
            raise OSError(f"a client reaches for {host}")

    def connecting(self: socket.socket, address: Any) -> None:
        check(address[0] if isinstance(address, tuple) else None)
        connect(self, address)

    def looking_up(host: Any, *rest: Any, **more: Any) -> Any:
        check(host.decode() if isinstance(host, bytes) else host)
        return look_up(host, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        patch.setattr(socket.socket, "connect", connecting)
        patch.setattr(socket, "getaddrinfo", looking_up)
        yield
    assert elsewhere == []


@pytest.fixture(scope="module")
def address(local_client: Any) -> Iterator[str]:
    with on_a_thread(local_client, served_model_name=("tiny",), api_key=KEY) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def greeted(client: openai.OpenAI) -> str:
    """What the model says to HELLO, greedily."""
    return client.chat.completions.create(model="tiny", messages=HELLO, **GREEDY).choices[0].message.content or ""


# ---- openai, where threads wait for answers (its other half is in test_openai_api.py)


def test_openai(client: openai.OpenAI, greeted: str) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    chunks = list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == greeted
    parsed = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Animal, max_tokens=60)
    assert isinstance(parsed.choices[0].message.parsed, Animal)
    whole = client.completions.create(model="tiny", prompt="hello", **GREEDY).choices[0].text
    pieces = client.completions.create(model="tiny", prompt="hello", stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in pieces) == whole
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=HELLO, extra_headers={"X-Request-Id": "tour"}, **GREEDY
    )
    assert raw.headers["X-Request-Id"] == "tour" and raw.parse().choices[0].message.content == greeted


def test_openai_is_told_what_is_wrong(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        client.with_options(api_key="wrong").models.list()
    assert KEY not in str(refused.value)
    with pytest.raises(openai.NotFoundError, match="tin"):
        client.chat.completions.create(model="tinny", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="top_k"):
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"topk": 3})


def test_a_stream_that_is_left_ends_its_request(client: openai.OpenAI, local_client: Any) -> None:
    with client.chat.completions.create(model="tiny", messages=HELLO, stream=True, max_tokens=200) as stream:
        next(iter(stream))
    end = time.monotonic() + 10
    while asyncio.run(local_client.stats())["running"]:
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- LangChain


@pytest.fixture
def chat(address: str) -> Any:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    return langchain.ChatOpenAI(model="tiny", base_url=f"{address}/v1", api_key=KEY, max_retries=0, **GREEDY)


def test_langchain(chat: Any, greeted: str) -> None:
    answer = chat.invoke("hello")
    assert answer.content == greeted
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert "".join(chunk.content for chunk in chat.stream([("user", "hello")])) == greeted
    answers = chat.batch(["hello", "other", "hello"])
    assert [item.content for item in answers] == [greeted, chat.invoke("other").content, greeted]
    assert chat.bind(seed=3, stop=["\x00"]).invoke("hello").content == greeted


def test_langchain_streams_its_usage(chat: Any) -> None:
    whole = None
    for chunk in chat.stream("hello", stream_usage=True):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.usage_metadata == chat.invoke("hello").usage_metadata


async def test_langchain_awaited(chat: Any, greeted: str) -> None:
    assert (await chat.ainvoke("hello")).content == greeted
    assert "".join([chunk.content async for chunk in chat.astream("hello")]) == greeted
    assert [item.content for item in await chat.abatch(["hello"] * 3)] == [greeted] * 3


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_langchain_structured_output(chat: Any, method: str) -> None:
    chat.max_tokens = 60
    chat.temperature = 1.0
    if method == "json_schema":
        structured = chat.with_structured_output(Animal, method=method)
        assert isinstance(structured.invoke("hello"), Animal)
        *_, last = structured.stream("hello")
        assert isinstance(last, Animal)
        raw = chat.with_structured_output(Animal, method=method, include_raw=True).invoke("hello")
        assert raw["parsing_error"] is None and raw["parsed"] == Animal(**json.loads(raw["raw"].content))
        schema = {"title": "color", "description": "A color.", "type": "object", "additionalProperties": False}
        schema |= {"properties": {"name": {"type": "string", "enum": ["red", "green"]}}, "required": ["name"]}
        answer = chat.with_structured_output(schema, method=method, strict=True).invoke("hello")
        assert answer["name"] in ("red", "green")
    else:
        assert isinstance(chat.with_structured_output(None, method=method).invoke("hello"), dict)


def test_langchain_passes_our_fields(chat: Any) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

    messages = [SystemMessage("be brief"), HumanMessage("hello"), AIMessage("a cat"), HumanMessage("more")]
    assert chat.bind(extra_body={"regex": RULE}, max_tokens=30).invoke(messages).content in SAID
    turn = chat.bind(extra_body={"regex": "[a-z ]{3,9}", "cache_salt": "langchain"}, max_tokens=12)
    first = turn.invoke(messages)
    again = turn.invoke([*messages, first, HumanMessage("more")])
    known = first.usage_metadata["total_tokens"] - 1  # nothing was computed behind the last one
    assert again.usage_metadata["input_token_details"]["cache_read"] == known
    with pytest.raises(openai.BadRequestError, match="regex"):
        chat.bind(extra_body={"regex": "("}).invoke("hello")


# ---- LiteLLM


@pytest.fixture
def litellm() -> Any:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    return litellm


@pytest.fixture
def to(address: str) -> dict[str, Any]:
    return {"model": "openai/tiny", "api_base": f"{address}/v1", "api_key": KEY, "max_retries": 0}


def test_litellm(litellm: Any, to: dict[str, Any], greeted: str) -> None:
    answer = litellm.completion(messages=HELLO, **to, **GREEDY)
    assert answer.choices[0].message.content == greeted
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(
        litellm.completion(messages=HELLO, stream=True, stream_options={"include_usage": True}, **to, **GREEDY)
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == greeted
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content == greeted
    assert built.usage.completion_tokens == answer.usage.completion_tokens


async def test_litellm_awaited(litellm: Any, to: dict[str, Any], greeted: str) -> None:
    answers = await asyncio.gather(*(litellm.acompletion(messages=HELLO, **to, **GREEDY) for _ in range(3)))
    assert [answer.choices[0].message.content for answer in answers] == [greeted] * 3
    stream = await litellm.acompletion(messages=HELLO, stream=True, **to, **GREEDY)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == greeted


def test_litellm_structured_output(litellm: Any, to: dict[str, Any]) -> None:
    answer = litellm.completion(messages=HELLO, response_format=Animal, max_tokens=60, **to)
    Animal.model_validate_json(answer.choices[0].message.content)
    answer = litellm.completion(messages=HELLO, extra_body={"regex": RULE}, max_tokens=30, **to)
    assert answer.choices[0].message.content in SAID


def test_litellm_completions(litellm: Any, to: dict[str, Any], client: openai.OpenAI) -> None:
    expected = client.completions.create(model="tiny", prompt="hello", **GREEDY).choices[0].text
    named = {**to, "model": "text-completion-openai/tiny"}
    assert litellm.text_completion(prompt="hello", **named, **GREEDY).choices[0].text == expected


def test_litellm_is_told_what_is_wrong(litellm: Any, to: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=HELLO, temperature=-1, **to)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=HELLO, **{**to, "api_key": "wrong"})
    with pytest.raises(litellm.NotFoundError, match="tinny"):
        litellm.completion(messages=HELLO, **{**to, "model": "openai/tinny"})
