"""The backend for OpenAI's API: what is refused, what goes wrong, what is cancelled."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lang.backends.openai import OpenAI
from radixrt.engine.nodes import Done, Node, Role
from radixrt.errors import InvalidRequest, RadixrtError
from radixrt.grammar.constraint import Constraint
from radixrt.request import SamplingParams
from tests.lang.fake_openai import Fake, Program, ask, backend, chat, fake, gen, message, text

__all__ = ["fake"]

# ---- what is refused before a request


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"top_k": 5}, "top_k=5"),
        ({"min_p": 0.5}, "min_p=0.5"),
        ({"repetition_penalty": 1.5}, "repetition_penalty=1.5"),
        ({"min_tokens": 1}, "min_tokens=1"),
        ({"include_stop": True}, "include_stop"),
        ({"stop_token_ids": [1]}, "stop_token_ids"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"prompt_logprobs": 0}, "prompt_logprobs=0"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"stop": list("abcde")}, "at most 4"),
        ({"constraint": Constraint.grammar('start: "a"')}, "type grammar"),
        ({"constraint": Constraint.json_schema({"$ref": "u:x"}, registry={"u:x": True})}, "registry"),
    ],
)
async def test_parameters_without_a_place_are_refused(fake: Fake, params: dict[str, Any], error: str) -> None:
    asked = backend(fake)
    failed = await (await ask(asked, *chat(gen(4, 3, **params)))).failed(4)
    assert (failed.kind, fake.asked) == ("unsupported", [])
    assert error in failed.error
    assert asked.capabilities.params is not None
    (name,) = params
    assert (name in asked.capabilities.params) == (name in ("max_tokens", "stop", "constraint"))


@pytest.mark.parametrize(
    ("nodes", "node", "error"),
    [
        ([gen(0, None)], 0, "outside of a message"),
        ([*message(0, None, "user", "Hi"), gen(3, 2)], 3, "outside of a message"),
        ([Role(id=0, role="user", begin=True), gen(1, 0)], 1, "inside of the user message"),
        ([text(9, None, "Hi"), Role(id=10, parent=9, role="assistant", begin=True), gen(11, 10)], 11, "'Hi' is in no message"),
        ([Role(id=0, role="assistant", begin=True), gen(1, 0)], 1, "no message to answer"),
        (chat(text(4, 3, "So"), gen(5, 4)), 5, "begins with 'So'"),
        (chat(gen(4, 3), gen(5, 4)), 5, "begins with 'Hello world'"),
    ],
)  # fmt: skip
async def test_a_chat_model_answers_in_a_message_of_its_own(
    fake: Fake, nodes: list[Node], node: int, error: str
) -> None:
    failed = await (await ask(backend(fake), *nodes)).failed(node)
    assert failed.kind == "unsupported"
    assert error in failed.error


async def test_a_completion_model_has_no_messages_and_no_open_end(fake: Fake) -> None:
    asked = backend(fake, is_chat_model=False)
    program = await ask(asked, Role(id=0, role="user", begin=True), gen(1, None, max_tokens=None))
    assert "is_chat_model=True" in (await program.failed(0)).error
    assert "ends after 16 tokens" in (await program.failed(1)).error
    assert asked.capabilities.completion
    assert not backend(fake).capabilities.completion


# ---- what goes wrong


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (
            400,
            {"error": {"message": "too long", "type": "invalid_request_error", "code": None}},
            "answered 400: too long",
        ),
        (404, {"detail": "no such model"}, "answered 404: no such model"),
        (401, {"error": {"message": "bad key"}}, "answered 401: bad key"),
    ],
)
async def test_a_servers_error_is_told_in_its_words(fake: Fake, status: int, body: Any, error: str) -> None:
    fake.reply = lambda asked: web.json_response(body, status=status)  # type: ignore[arg-type, return-value]
    program = await ask(backend(fake), *chat(gen(4, 3), gen(5, 4)))
    failed = await program.failed(4)
    assert failed.kind == "error"
    assert error in failed.error
    assert error in (await program.failed(5)).error
    assert len(fake.asked) == 1


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        (["Hel"], "stream ended before the generation did"),
        ([], "stream ended before the generation did"),
        (["a", {"index": 0, "finish_reason": "content_filter"}], "'content_filter'"),
        (["a", {"index": 0, "finish_reason": "tool_calls"}], "'tool_calls'"),
        ([{"index": 0, "delta": {"refusal": "I will not"}, "finish_reason": "stop"}], "refused: 'I will not'"),
        ([{"index": 3, "delta": {"content": "a"}, "finish_reason": "stop"}], "sample 3 of n=1"),
        (["a", {"error": {"message": "out of memory", "code": 500}}], "out of memory"),
    ],
)
async def test_a_reply_that_is_not_whole_is_no_result(fake: Fake, chunks: list[Any], error: str) -> None:
    fake.reply = lambda asked: chunks
    fake.finish = False
    failed = await (await ask(backend(fake), *chat(gen(4, 3)))).failed(4)
    assert failed.kind == "error"
    assert error in failed.error


async def test_a_server_that_is_not_there(fake: Fake) -> None:
    import openai

    client = openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0)
    failed = await (await ask(OpenAI("m", client=client), *chat(gen(4, 3)))).failed(4)
    assert failed.kind == "error"
    assert "Connection error" in failed.error
    assert not client.is_closed()
    await client.close()


async def test_cancelling_closes_the_stream_and_what_waits(fake: Fake) -> None:
    fake.hold = asyncio.Event()
    asked = backend(fake, max_concurrency=1)
    program = Program(asked)
    program.session.add(chat(gen(4, 3, "a"), gen(5, 3, "b"), gen(6, 4, "c")))
    await fake.held.wait()
    program.session.cancel([5])  # waits for its turn
    program.session.cancel([4])  # runs
    for node, name in ((4, "a"), (5, "b"), (6, "a")):
        failed = await program.failed(node)
        assert (failed.kind, f"gen {name!r}" in failed.error) == ("cancelled", True)
    while not fake.gone:  # the server hears of it
        await asyncio.sleep(0)
    assert len(fake.asked) == 1
    fake.hold.set()
    program.session.add([gen(7, 3, "d")])
    assert (await program.done(7)).outputs[0].text == "Hello world"
    await asked.aclose()


@pytest.mark.parametrize("how", ["session", "backend"])
async def test_closing_ends_the_stream(fake: Fake, how: str) -> None:
    fake.hold = asyncio.Event()
    asked = backend(fake)
    program = Program(asked)
    program.session.add(chat(gen(4, 3)))
    await fake.held.wait()
    if how == "session":
        told = len(program.events)
        program.session.close()
        program.session.close()
    else:
        await asked.aclose()
        assert not asked._tasks
        assert "was closed" in (await program.failed(4)).error
    while not fake.gone:
        await asyncio.sleep(0)
    if how == "session":
        assert len(program.events) == told
        await asked.aclose()


async def test_no_more_requests_run_than_allowed(fake: Fake) -> None:
    fake.together, fake.turns = 3, 300  # time enough for a fourth to come
    program = await ask(backend(fake, max_concurrency=3), *chat(*(gen(i, 3, top_p=0.5) for i in range(4, 24))))
    assert len(fake.asked) == 20
    assert fake.most == 3
    assert sum(isinstance(event, Done) for event in program.events) == 23


def test_one_backend_serves_one_event_loop_after_another() -> None:
    asked: list[OpenAI] = []

    async def once() -> str:
        made = Fake()
        app = web.Application()
        app.router.add_post("/v1/chat/completions", made.answer)
        async with TestServer(app, host="127.0.0.1", port=0) as server:
            if not asked:
                asked.append(OpenAI("m", base_url=str(server.make_url("/v1")), api_key="x", max_concurrency=1))
            asked[0]._options["base_url"] = str(server.make_url("/v1"))
            program = Program(asked[0])  # not closed with its loop
            program.session.add(chat(gen(4, 3), gen(5, 3), gen(6, 3)))
            for node in (4, 5, 6):
                await program.done(node)
            await asked[0]._client.close()  # its connections; it is still there
            return (await program.done(6)).outputs[0].text

    assert [asyncio.run(once()) for _ in range(2)] == ["Hello world"] * 2


# ---- making one


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"max_concurrency": True}, "max_concurrency"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"extra_body_constraints": "tgi"}, "extra_body_constraints"),
        ({"is_chat_model": False, "continue_final_message": True}, "continue_final_message"),
        ({"client": object(), "base_url": "http://x"}, "client"),
    ],
)
def test_settings_that_are_wrong_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}"):
        OpenAI(**{"model": "m", **options})


@pytest.mark.parametrize(
    ("model", "is_chat"),
    [("gpt-4o-mini", True), ("Qwen2.5-7B-Instruct", True), ("gpt-3.5-turbo-instruct", False), ("davinci-002", False)],
)
def test_models_chat_unless_they_are_known_not_to(model: str, is_chat: bool) -> None:
    assert OpenAI(model).is_chat_model is is_chat
    assert OpenAI(model, is_chat_model=not is_chat).is_chat_model is not is_chat


async def test_a_key_is_needed_by_openai_only(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(InvalidRequest, match=r"^api_key: is not given, and OPENAI_API_KEY is not set"):
        await OpenAI("m").start()
    program = await ask(backend(fake, api_key=None), *chat(gen(4, 3)))
    assert (await program.done(4)).outputs[0].text == "Hello world"


async def test_the_default_of_openai_itself_is_left_to_it(fake: Fake) -> None:
    asked = OpenAI("gpt-5", api_key="x", base_url="https://api.openai.com/v1")
    await asked.start()
    assert "top_p" not in asked._sampled(SamplingParams())
    assert asked._sampled(SamplingParams(top_p=0.5))["top_p"] == 0.5
    await asked.aclose()


async def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(RadixrtError, match=re.escape("pip install openai")):
        await OpenAI("m", api_key="x").start()


def test_importing_the_backend_imports_no_client() -> None:
    code = "import sys, lang.backends.openai, lang.backends.mock; sys.exit(str({'openai', 'jsonschema', 'torch'} & set(sys.modules) or 0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() in ("", "0"), done.stderr
