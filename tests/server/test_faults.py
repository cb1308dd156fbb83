"""Faults that a server outlives: each ends in an error that says what it is, and an engine that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from radixrt import AsyncEngine
from radixrt.server import programs
from radixrt.server.app import make_app
from radixrt.server.config import ServerConfig
from radixrt.server.limits import doorman
from radixrt.server.local import LocalClient
from radixrt.server.process import ProcessClient
from tests.server.stand import Stand, error_of, served, until

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz_server.py"
LONG = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0}
SHORT = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0}


@contextlib.asynccontextmanager
async def at_the_door(client: Any, **settings: Any) -> AsyncIterator[str]:
    """The application as ``serve`` runs it, on an engine that is left open: its address."""
    config = ServerConfig(**settings)
    runner = web.AppRunner(make_app(client, config), handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    assert runner.server is not None
    accept = doorman(runner.server, config.max_connections, config.receive_timeout)
    server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0, backlog=4096)
    try:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())
    finally:
        server.close()
        await runner.cleanup()


async def idle(client: Any) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while (stats := await client.stats())["running"] or stats["waiting"] or stats["programs"]:
            pass
    found: dict[str, Any] = stats
    return found


@contextlib.asynccontextmanager
async def engine(settings: dict[str, Any], **changes: Any) -> AsyncIterator[LocalClient]:
    client = LocalClient(AsyncEngine(**{**settings, **changes}))
    await client.start()
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_server", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fuzz_server", module)
    spec.loader.exec_module(module)
    return module


async def test_mutated_requests_leave_an_engine_of_this_process_in_order(script: Any, local_client: Any) -> None:
    async with at_the_door(local_client) as url:
        tally = await script.fuzz(url, 400, 7, every=200)
    assert not tally.wrong
    assert tally.answers["/generate 200"] and tally.answers["/generate 400"] and tally.answers["frames"]


async def test_a_server_that_is_not_in_order_is_found_out(script: Any) -> None:
    stand = Stand()
    async with at_the_door(stand) as url:
        assert any("in use" in one for one in (await script.fuzz(url, 0, patience=0.1)).wrong)
        stand.healthy = False
        assert any("not healthy" in one for one in (await script.fuzz(url, 0, patience=0.1)).wrong)
    tally = await script.fuzz(url, 10, patience=0.1)  # nobody is there any more
    assert any("not healthy" in one for one in tally.wrong) and any("a client failed" in one for one in tally.wrong)


async def test_a_request_larger_than_the_pool_is_refused_and_one_as_large_is_answered(
    server_settings: dict[str, Any],
) -> None:
    async with engine(server_settings, max_total_tokens=64) as client, served(client) as http:
        most = client.info.context_length
        for tokens, status in ((most - 1, 200), (most, 200), (most + 1, 400), (100_000, 400)):
            params = {"max_new_tokens": tokens - 4, "ignore_eos": True}
            answer = await http.post("/generate", json={"input_ids": [40, 50, 60, 70], "sampling_params": params})
            assert answer.status == status, await answer.text()
            if status == 400:
                assert f"context_length={most}" in (await error_of(answer))["message"]
        for n in (8, 64):
            body = {"text": "abcd", "sampling_params": {**SHORT, "max_new_tokens": most - 4, "n": n}}
            found = await (await http.post("/generate", json=body)).json()
            assert len(found) == n and len({tuple(one["output_ids"]) for one in found}) == 1
        assert (await idle(client))["pool_tokens"] == most


@pytest.mark.parametrize("field", ["chat_template", "template", "chat_template_path"])
async def test_a_template_from_a_request_is_refused(local_client: Any, field: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, field: "{{ 7 * 7 }}"}
    async with served(local_client) as http:
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status == 400 and field in (await error_of(answer))["message"]
        del body[field]
        plain = await (await http.post("/v1/chat/completions", json=body)).json()
        for name in (field, "messages", "tokenize"):
            answer = await http.post("/v1/chat/completions", json={**body, "chat_template_kwargs": {name: "{{ 7 }}"}})
            assert (
                answer.status == 400
                or (await answer.json())["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
            )


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append.__globals__ }}",
        "{% for i in range(10**10) %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
    ],
)
async def test_a_hostile_template_of_a_model_ends_its_chats_and_nothing_else(
    server_settings: dict[str, Any], tmp_path: Path, template: str
) -> None:
    path = tmp_path / "hostile.jinja"
    path.write_text(template)
    async with engine(server_settings, chat_template=str(path)) as client, served(client) as http:
        expected = await (await http.post("/generate", json={"text": "a", "sampling_params": SHORT})).json()
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        for _ in range(2):
            async with asyncio.timeout(30):
                answer = await http.post("/v1/chat/completions", json=body)
                text = await answer.text()
            assert answer.status in (400, 500), text
            assert "class '" not in text and "uid=" not in text and "root:" not in text and "Traceback" not in text
            assert "template" in json.loads(text)["error"]["message"]
        again = await (await http.post("/generate", json={"text": "a", "sampling_params": SHORT})).json()
        assert again["output_ids"] == expected["output_ids"]
        assert (await http.get("/health")).status == 200


async def test_a_flood_of_messages_waits_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client says faster than the engine takes it is not kept for it: the client has to wait."""
    monkeypatch.setattr(programs, "_AHEAD", 20_000)
    stand, go, asked = Stand(), asyncio.Event(), asyncio.Event()

    async def stats() -> dict[str, Any]:
        asked.set()
        await go.wait()
        return {}

    monkeypatch.setattr(stand, "stats", stats)
    message = json.dumps({"op": "cancel", "program": "p", "nodes": list(range(100))})
    async with served(stand) as http, http.ws_connect("/v1/programs/ws") as socket:

        async def flood() -> None:
            for _ in range(20_000):
                await socket.send_str(message)

        flooding = asyncio.ensure_future(flood())
        await asyncio.wait_for(asked.wait(), 20)
        taken = len(stand.heard)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(stand.heard) == taken < 100 and not flooding.done()
        go.set()
        await flooding
        await until(lambda: len(stand.heard) == 20_000)


async def test_a_flood_that_nobody_reads_the_answers_to_is_hung_up_on(local_client: Any) -> None:
    async with at_the_door(local_client, max_unsent=100_000) as url, aiohttp.ClientSession() as session:
        socket = await session.ws_connect(f"{url}/v1/programs/ws")
        assert socket._conn is not None and socket._conn.protocol is not None
        socket._conn.protocol.pause_reading()
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            for _ in range(1_000_000):
                await socket.send_str('{"op": "no such operation that could be carried out"}')
        await socket.close()
        async with session.get(f"{url}/health") as answer:
            assert answer.status == 200
    assert (await idle(local_client))["programs"] == 0


async def test_idle_connections_take_nothing_from_who_asks(local_client: Any) -> None:
    count = int(os.environ.get("RADIXRT_IDLE_CONNECTIONS", "300"))
    async with at_the_door(local_client, max_connections=count + 2) as url:
        host, port = url.removeprefix("http://").split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(count)]
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/generate", json={"text": "a", "sampling_params": SHORT}) as answer:
                assert answer.status == 200 and (await answer.json())["output_ids"]
            more = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
            refused = await more[1][0].read()
            assert b"503" in refused and f"max_connections={count + 2}".encode() in refused
        for _, writer in silent + more:
            writer.transport.abort()
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as answer:
            assert answer.status == 200


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("when", ["before", "running", "mid"])
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/programs"])
async def test_what_a_client_that_is_gone_asked_for_runs_no_longer(
    local_client: Any, path: str, stream: bool, when: str
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": "abc", "sampling_params": {**LONG, "n": 2}},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 400,
            "ignore_eos": True,
        },
        "/v1/programs": {
            "version": 1,
            "nodes": [
                {"id": 0, "kind": "text", "parts": ["abc"]},
                {"id": 1, "kind": "gen", "parent": 0, "params": {"max_tokens": 400, "ignore_eos": True}},
            ],
        },
    }
    data = json.dumps({**bodies[path], "stream": stream}).encode()
    before = (await local_client.stats())["generated_tokens"]
    async with at_the_door(local_client) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        async with asyncio.timeout(60):
            if when != "before":
                while not (await local_client.stats())["running"]:
                    pass
            if when == "mid":
                if stream:
                    await reader.readuntil(b"data: ")
                else:
                    while (await local_client.stats())["generated_tokens"] < before + 5:
                        pass
        writer.transport.abort()
        if when == "before":  # it has surely been read when another connection is answered
            async with aiohttp.ClientSession() as session, session.get(f"{url}/server_info") as answer:
                assert answer.status == 200
        stats = await idle(local_client)
        assert stats["generated_tokens"] - before < 390
        async with aiohttp.ClientSession() as session, session.post(f"{url}/flush_cache") as answer:
            assert answer.status == 200
    assert (await local_client.stats())["pool_used"] == 0


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BAD: dict[str, dict[str, Any]] = {
    "syntax": {"regex": "("},
    "huge repeat": {"regex": "(a{1,1000}){1,1000}b{1,1000}"},
    "states": {"regex": "(?:" + "|".join(f"(?=.*{c}.{{9}}){c}" for c in "abcdefgh") + ").{5,300}"},
    "deep": {"json_schema": _deep(200)},
    "huge": {"json_schema": {"enum": ["x" * 100 + str(i) for i in range(60_000)]}},
    "wrong": {"json_schema": {"type": "objekt"}},
    "slow": {
        "json_schema": {
            "type": "object",
            "properties": {
                f"p{i}": {"type": "string", "pattern": f"^(?=.*a.*b.*c)(?=.*d.*e.*g)(?=.*g.*h.*k).{{8,{150 + i}}}$"}
                for i in range(8)
            },
        }
    },
    "left recursion": {"ebnf": "root ::= root root | root"},
    "no rule": {"ebnf": "root ::= nothing"},
}


async def test_eight_good_requests_beside_bad_constraints(local_client: Any) -> None:
    good = [
        {**SHORT, **constraint, "max_new_tokens": 40, "ignore_eos": False}
        for constraint in (
            {},
            {"regex": "[ab]{3}c"},
            {"json_schema": {"enum": [1, 2, "three"]}},
            {"ebnf": 'root ::= "x" [0-9] "y"'},
        )
    ] * 2
    async with at_the_door(local_client) as url, aiohttp.ClientSession() as session:

        async def ask(params: dict[str, Any], text: str) -> tuple[int, Any]:
            async with session.post(f"{url}/generate", json={"text": text, "sampling_params": params}) as answer:
                return answer.status, await answer.json()

        expected = [(await ask(params, f"good {i}"))[1]["output_ids"] for i, params in enumerate(good)]
        bad = [asyncio.ensure_future(ask({**SHORT, **one}, "bad")) for one in BAD.values()]
        await asyncio.sleep(0)
        async with asyncio.timeout(100):
            found = await asyncio.gather(*(ask(params, f"good {i}") for i, params in enumerate(good)))
            assert [(status, one["output_ids"]) for status, one in found] == [(200, one) for one in expected]
            for name, (status, said) in zip(BAD, await asyncio.gather(*bad), strict=True):
                assert status in (200, 400), (name, said)
                assert status == 200 or said["error"]["message"], name
        assert (await ask(good[1], "good 1"))[1]["output_ids"] == expected[1]
    await idle(local_client)


async def test_an_expectation_of_no_server_is_refused_in_our_words(local_client: Any) -> None:
    async with served(local_client) as http:
        answer = await http.post("/generate", json={"text": "a"}, headers={"Expect": "nonsense"})
        assert answer.status == 417
        assert "expect" in (await error_of(answer))["message"].lower()


async def test_an_engine_killed_in_the_middle_of_streams(server_settings: dict[str, Any]) -> None:
    client = ProcessClient(server_settings, restart_delay=0)
    await client.start()
    try:
        async with at_the_door(client) as url, aiohttp.ClientSession() as session:
            short = {"text": "again", "sampling_params": SHORT}
            async with session.post(f"{url}/generate", json=short) as answer:
                expected = (await answer.json())["output_ids"]
            node = {"id": 0, "kind": "text", "parts": ["a"]}
            gen = {"id": 1, "kind": "gen", "parent": 0, "params": {"max_tokens": 400, "ignore_eos": True}}
            chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "ignore_eos": True}
            bodies: list[tuple[str, dict[str, Any]]] = [
                ("/generate", {"text": "a", "sampling_params": LONG, "stream": True}),
                ("/v1/chat/completions", {**chat, "stream": True}),
                ("/v1/programs", {"version": 1, "nodes": [node, gen]}),
            ]
            streams = [await session.post(url + path, json=body) for path, body in bodies]
            for stream in streams:
                assert (await stream.content.readuntil(b"\n\n")).startswith(b"data: ")
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            for stream in streams:
                events = [event for event in (await stream.text()).split("\n\n") if event]
                assert "error" in json.loads(events[-2].removeprefix("data: ")), events[-2:]
                assert events[-1] == "data: [DONE]"
            assert await asyncio.wait_for(client.settled(), 60)
            async with session.post(f"{url}/generate", json=short) as answer:
                assert (await answer.json())["output_ids"] == expected
    finally:
        await client.close()


@pytest.mark.parametrize("path", ["/generate", "/v1/programs", "/v1/chat/completions"])
async def test_half_a_character_in_a_name_is_refused_in_our_words(local_client: Any, path: str) -> None:
    node = {"id": 0, "kind": "gen", "params": {"igno\ud800e_eos": True}}
    for body in ({"te\ud800xt": "a"}, {"version": 1, "nodes": [node]}, {"text": "a", "sampling_params": {"\udfff": 1}}):
        async with served(local_client) as http:
            answer = await http.post(path, json=body)
            assert answer.status == 400
            assert await error_of(answer)
