"""An endpoint that is slow, busy, broken, lying or down, and what a job is told of it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from radixrt.errors import InvalidRequest
from radixrt.grammar.constraint import Constraint
from radixrt.jobs import http
from radixrt.jobs.backends import Answer, BackendDown
from radixrt.jobs.confidence import confidences
from radixrt.jobs.endpoint_backend import CONCURRENCY, CONTEXT, EndpointBackend
from radixrt.jobs.prompt import Layout
from radixrt.jobs.target import Target, load_target

SCHEMA = {
    "type": "object",
    "properties": {"total": {"type": "number", "minimum": 0}},
    "required": ["total"],
    "additionalProperties": False,
}
TARGET = load_target(SCHEMA)
LAYOUT = Layout(TARGET)
KEY = "sk-secret-7"


def reply(text: str = '{"total":1}', reason: str = "stop", **more: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
    return {"choices": [{"message": {"content": text}, "finish_reason": reason, **more}], "usage": usage}


@dataclass
class Fake:
    """Answers each chat request with what ``say`` makes of it: a value as JSON, bytes, or a response."""

    say: Callable[[dict[str, Any]], Any] = lambda body: reply()
    models: Any = field(default_factory=lambda: {"data": [{"id": "m", "owned_by": "someone"}]})
    info: Any = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        self.keys.append(request.headers.get("Authorization", ""))
        if request.method == "GET":
            found = self.models if request.path == "/v1/models" else self.info
            return made(found if found is not None else error(404))
        body = await request.json()
        self.asked.append(body)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(5):
                await asyncio.sleep(0)
            return made(self.say(body))
        finally:
            self.running -= 1


def made(value: Any) -> web.StreamResponse:
    if isinstance(value, web.StreamResponse):
        return value
    return web.Response(body=value if isinstance(value, bytes) else json.dumps(value).encode())


def error(status: int, message: str = "no", **headers: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    one = Fake()
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", one.handle)
    server = TestServer(app, host="127.0.0.1", port=0)
    await server.start_server()
    one.url = str(server.make_url("/v1"))
    try:
        yield one
    finally:
        await server.close()


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


async def backend(
    fake: Fake | str, clock: Clock | None = None, target: Target = TARGET, **options: Any
) -> EndpointBackend:
    clock = clock or Clock()
    options = {"environ": {"OPENAI_API_KEY": KEY}, "timeout": 20, **options}
    made = EndpointBackend(
        target, fake if isinstance(fake, str) else fake.url, sleep=clock.sleep, clock=clock, **options
    )
    try:
        await made.start()
    except BaseException:
        await made.close()
        raise
    return made


async def answer(fake: Fake, clock: Clock | None = None, **options: Any) -> Answer:
    asked = {name: options.pop(name) for name in ("constraint", "logprobs") if name in options}
    one = await backend(fake, clock, **options)
    try:
        return await one.answer(LAYOUT.document("Pay 1."), max_tokens=20, seed=3, **asked)
    finally:
        await one.close()


# ---- what is asked


async def test_only_what_every_server_knows_is_sent(fake: Fake) -> None:
    found = await answer(fake)
    assert found == Answer('{"total":1}', prompt_tokens=7, cached_tokens=5, output_tokens=3)
    (asked,) = fake.asked
    assert set(asked) == {"model", "messages", "temperature", "seed", "max_tokens", "response_format"}
    assert asked["response_format"]["json_schema"] == {"name": "answer", "schema": SCHEMA, "strict": True}
    assert [message["role"] for message in asked["messages"]] == ["system", "user"]
    assert fake.paths == ["/v1/models", "/v1/chat/completions"] and set(fake.keys) == {f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("constraint", "text", "fields"),
    [
        (Constraint.regex(r"\d+"), "12", {"structured_outputs": {"regex": r"\d+"}}),
        (Constraint.choice(["a", "b"]), "b", {"structured_outputs": {"choice": ["a", "b"]}}),
        (Constraint.substring("to be or not", empty=True), "or not", {}),
    ],
)
async def test_other_constraints(fake: Fake, constraint: Constraint, text: str, fields: dict[str, Any]) -> None:
    fake.say = lambda body: reply(text)
    found = await answer(fake, constraint=constraint)
    assert found.complete and found.text == text
    assert {
        name: item for name, item in fake.asked[0].items() if name in ("structured_outputs", "constraint")
    } == fields
    fake.say = lambda body: reply("none of it")
    assert not (await answer(fake, constraint=constraint)).complete


async def test_a_server_of_ours_enforces_quotes_and_tells_its_pool(fake: Fake) -> None:
    fake.models = {"data": [{"id": "m", "owned_by": "radixrt", "max_model_len": 900}]}
    fake.info = {"pool_tokens": 4000, "engine": {"max_running_requests": 8}}
    fake.say = lambda body: (
        {"count": 10} if "prompt" in body else {"count": 77} if "max_tokens" not in body else reply("be")
    )
    quote = Constraint.substring("to be", empty=True)
    assert (await answer(fake, constraint=quote)).text == "be"
    assert fake.asked[0]["constraint"] == quote.to_dict()
    one = await backend(fake)
    assert (one.context_length, one.pool_tokens) == (900, 4000)
    assert one.inflight(1000) == 5 and one.inflight(10) == 10 and one.inflight(10**6) == 2
    assert await one.prompt_tokens(LAYOUT.document("x")) == 77
    count = await one.counter("a" * 100)
    assert (count("a" * 100), count("a" * 10), one.count("\u00e4" * 3)) == (10, 2, 2)
    await one.close()


async def test_what_no_server_tells(fake: Fake) -> None:
    one = await backend(fake)
    assert (one.name, one.context_length, one.pool_tokens, one.inflight(10)) == ("m", CONTEXT, None, CONCURRENCY)
    assert (await one.counter("abcdef"))("abcdef") == 2 and await one.optimum() is None
    await one.close()


async def test_at_most_concurrency_at_a_time(fake: Fake) -> None:
    one = await backend(fake, concurrency=3)
    await asyncio.gather(*(one.answer(LAYOUT.document(str(i)), max_tokens=9, seed=0) for i in range(20)))
    await one.close()
    assert fake.most == 3 and len(fake.asked) == 20


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ([], None, "model: is missing: .* has none"),
        ([{"id": "a"}, {"id": "b"}], None, "model: is missing: .* has a, b"),
        ([{"id": "llama"}, {"id": "b"}], "lama", "model='lama': is not served there; did you mean 'llama'"),
    ],
)
async def test_models(fake: Fake, data: Any, model: str | None, message: str) -> None:
    fake.models = {"data": data}
    with pytest.raises(InvalidRequest, match=message):
        await backend(fake, model=model)


async def test_a_server_without_a_list_of_models(fake: Fake) -> None:
    fake.models = None
    with pytest.raises(InvalidRequest, match="model: is missing, and"):
        await backend(fake)
    assert (await answer(fake, model="mine")).complete and fake.asked[0]["model"] == "mine"


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://x/v1", "http://", "http://u:p@x/v1", "http://x/v1?key=1", "http://x:99999", 3]
)
def test_addresses_that_are_none(url: Any) -> None:
    with pytest.raises(InvalidRequest, match="endpoint"):
        EndpointBackend(TARGET, url)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_addresses(url: str) -> None:
    assert str(http.address(url)) == "http://h:1/"
    assert str(http.address(url.replace("h:1", "h:1/deep"))).rstrip("/") == "http://h:1/deep"


# ---- what is answered


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (reply('{"total":1'), "is not JSON"),
        (reply('{"total":-1}'), r"\$\.total: -1 is less than the minimum"),
        (reply('{"total":NaN}'), "NaN is no JSON number"),
        (reply('{"total":1', "length"), "max_tokens=20 was reached before the answer was complete"),
        (reply("[" * 100_000), "is nested too deeply"),
        (reply("", "content_filter"), "ended the answer with 'content_filter'"),
        ({"choices": [{"message": {"content": None, "refusal": "I will not"}}]}, "the model refused: 'I will not'"),
        ({"choices": []}, "without a choice"),
        ({"choices": [{"message": 3}]}, "ended the answer with None"),
    ],
)
async def test_answers_that_are_none(fake: Fake, said: Any, problem: str) -> None:
    fake.say = lambda body: said
    found = await answer(fake)
    assert not found.complete
    assert re.search(problem, found.problem), found.problem


async def test_a_whole_answer_of_exactly_max_tokens_counts(fake: Fake) -> None:
    fake.say = lambda body: reply(reason="length")
    assert (await answer(fake)).complete


async def test_counts_that_are_none(fake: Fake) -> None:
    fake.say = lambda body: {
        **reply(),
        "usage": {"prompt_tokens": -1, "completion_tokens": "3", "prompt_tokens_details": 1},
    }
    found = await answer(fake)
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (0, 0, 0)


async def test_log_probabilities(fake: Fake) -> None:
    content = [
        {"token": '{"total":', "logprob": -1.0, "bytes": None},
        {"token": "1", "logprob": 0.0, "bytes": [49]},
        {"token": "}", "logprob": -1.0},
    ]
    fake.say = lambda body: reply(logprobs={"content": content})
    found = await answer(fake, logprobs=True)
    assert fake.asked[0]["logprobs"] is True
    assert confidences(found.text, found.tokens) == {"total": 1.0}
    for wrong in ({"content": [{"token": "1", "logprob": None}]}, {"content": None}, None, {"content": [3]}):
        fake.say = lambda body, wrong=wrong: reply(logprobs=wrong)
        assert (await answer(fake, logprobs=True)).tokens is None


# ---- faults


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_what_passes_is_tried_again(fake: Fake, status: int) -> None:
    fake.say = lambda body: error(status) if len(fake.asked) < 4 else reply()
    clock = Clock()
    assert (await answer(fake, clock)).complete
    assert len(clock.slept) == 3 and clock.slept == sorted(clock.slept)
    assert all(0.75 * 0.5 * 2**i <= pause <= 0.5 * 2**i for i, pause in enumerate(clock.slept))


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"\xff", b"[" * 100_000])
async def test_an_answer_of_something_else_is_tried_again(fake: Fake, body: bytes) -> None:
    fake.say = lambda asked: body if len(fake.asked) < 2 else reply()
    assert (await answer(fake)).complete


@pytest.mark.parametrize(("value", "wait"), [("7", 7.0), ("0", 0.0), ("-3", 0.0), ("soon", 0.0), ("nan", 0.0)])
async def test_retry_after(fake: Fake, value: str, wait: float) -> None:
    fake.say = lambda body: error(429, **{"Retry-After": value}) if len(fake.asked) < 2 else reply()
    clock = Clock()
    assert (await answer(fake, clock)).complete
    assert clock.slept[0] >= wait and clock.slept[0] <= max(wait, 0.5)


async def test_retry_after_as_a_date(fake: Fake) -> None:
    late = "Fri, 01 Jan 2100 00:00:00 GMT"
    fake.say = lambda body: error(503, **{"Retry-After": late})
    with pytest.raises(BackendDown, match="asks to wait"):
        await answer(fake)
    assert len(fake.asked) == 1


async def test_patience_ends(fake: Fake) -> None:
    fake.say = lambda body: error(503, "starting up")
    clock = Clock()
    with pytest.raises(BackendDown, match=r"answered 503: starting up; it was given patience=20 seconds"):
        await answer(fake, clock, patience=20)
    assert clock.now == pytest.approx(20)


async def test_nobody_there() -> None:
    clock = Clock()
    with pytest.raises(BackendDown, match="cannot be reached"):
        await backend(f"http://127.0.0.1:{unused_port()}", clock, patience=5)
    assert clock.now == pytest.approx(5)


async def test_a_server_that_dies_and_comes_back(fake: Fake) -> None:
    class Dropped(web.StreamResponse):
        async def prepare(self, request: Any) -> None:
            request.transport.close()

    fake.say = lambda body: Dropped() if len(fake.asked) < 4 else reply()
    assert (await answer(fake)).complete and len(fake.asked) == 4


async def test_a_document_that_a_server_cannot_answer_fails_alone(fake: Fake) -> None:
    fake.say = lambda body: error(500, "bang") if "poison" in json.dumps(body["messages"]) else reply()
    clock = Clock()
    one = await backend(fake, clock, patience=1000)
    poisoned = asyncio.create_task(one.answer(LAYOUT.document("poison"), max_tokens=9, seed=0))
    while not poisoned.done():  # others are answered meanwhile
        assert (await one.answer(LAYOUT.document("x"), max_tokens=9, seed=0)).complete
    with pytest.raises(InvalidRequest, match="answered 500: bang, 5 times, while it answered others"):
        await poisoned
    await one.close()


async def test_patience_counts_from_the_last_answer_to_anybody(fake: Fake) -> None:
    class Meanwhile(Clock):
        async def sleep(self, seconds: float) -> None:
            await super().sleep(seconds)
            await one.answer(LAYOUT.document("x"), max_tokens=9, seed=0)  # another is answered

    clock = Meanwhile()
    one = await backend(fake, clock, patience=100)
    left = 12

    def say(body: dict[str, Any]) -> Any:
        nonlocal left
        if "busy" not in json.dumps(body["messages"]):
            return reply()
        left -= 1
        return error(429) if left else reply()

    fake.say = say
    assert (await one.answer(LAYOUT.document("busy"), max_tokens=9, seed=0)).complete and clock.now > 100
    await one.close()


@pytest.mark.parametrize("status", [400, 413, 422, 501])
async def test_a_document_that_is_refused(fake: Fake, status: int) -> None:
    fake.say = lambda body: error(status, "too long") if "Pay 1." in json.dumps(body["messages"]) else reply()
    one = await backend(fake)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=f"endpoint: answered {status}: too long"):
            await one.answer(LAYOUT.document("Pay 1."), max_tokens=20, seed=3)
    await one.close()
    assert len(fake.asked) == 2 + (status < 500)  # once it was asked whether all are refused


@pytest.mark.parametrize("status", [400, 405, 422])
async def test_where_every_document_is_refused_the_job_stops(fake: Fake, status: int) -> None:
    fake.say = lambda body: error(status, "no such schema")
    one = await backend(fake)
    with pytest.raises(BackendDown, match=f"answered {status}: no such schema"):
        await one.answer(LAYOUT.document("Pay 1."), max_tokens=20, seed=3)
    asked = fake.asked
    assert [body["messages"][:-1] for body in asked] == [asked[0]["messages"][:-1]] * 2
    fake.say = lambda body: reply()
    await one.answer(LAYOUT.document("Pay 1."), max_tokens=20, seed=3)
    fake.say = lambda body: error(status, "no such schema")
    with pytest.raises(InvalidRequest, match=f"answered {status}"):  # others were answered: it is this document
        await one.answer(LAYOUT.document("Pay 1."), max_tokens=20, seed=3)
    await one.close()


@pytest.mark.parametrize("status", [401, 402, 403, 404, 307])
async def test_what_every_document_would_meet_stops_the_job(fake: Fake, status: int) -> None:
    fake.say = lambda body: error(status, f"the key {KEY} is wrong", Location="http://127.0.0.2/")
    with pytest.raises(BackendDown, match=f"answered {status}") as raised:
        await answer(fake)
    assert KEY not in str(raised.value) and len(fake.asked) == 1


async def test_no_message_has_the_key(fake: Fake) -> None:
    for status in (400, 500):
        fake.say = lambda body, status=status: error(status, f"Bearer {KEY}")
        with pytest.raises((InvalidRequest, BackendDown)) as raised:
            await answer(fake, patience=1)
        assert KEY not in str(raised.value) and "***" in str(raised.value)
    one = await backend(fake)
    assert KEY not in repr(one) + repr(vars(one)["_http"])
    await one.close()


@pytest.mark.parametrize(
    ("environ", "sent"),
    [({}, ""), ({"OPENAI_API_KEY": "b", "RADIXRT_API_KEY": "a"}, "Bearer a"), ({"RADIXRT_API_KEY": "a\n"}, "Bearer a")],
)
async def test_where_the_key_is_read(fake: Fake, environ: dict[str, str], sent: str) -> None:
    await answer(fake, environ=environ)
    assert set(fake.keys) == {sent}


async def test_an_answer_without_end(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MOST_BYTES", 1000)
    fake.say = lambda body: reply("x" * 2000)
    with pytest.raises(InvalidRequest, match="answered with more than 1000 bytes"):
        await answer(fake)


async def test_cancelled_and_closed(fake: Fake) -> None:
    one = await backend(fake, concurrency=1)
    task = asyncio.create_task(one.answer(LAYOUT.document("x"), max_tokens=9, seed=0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await one.answer(LAYOUT.document("x"), max_tokens=9, seed=0)).complete  # its place was given back
    await one.close()
    await one.close()
    with pytest.raises(BackendDown, match="closed"):
        await one.answer(LAYOUT.document("x"), max_tokens=9, seed=0)


@pytest.mark.parametrize("concurrency", [0, -1, True, 1.5, "2"])
def test_concurrency(concurrency: Any) -> None:
    with pytest.raises(InvalidRequest, match="concurrency"):
        EndpointBackend(TARGET, "http://x", concurrency=concurrency)
