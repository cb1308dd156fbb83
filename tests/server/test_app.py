"""The application: its doors on every route, its limits, and how a server ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from radixrt import SamplingParams
from radixrt.errors import InvalidRequest
from radixrt.request import OutputDelta
from radixrt.server.app import FRONT, serve
from radixrt.server.client import EngineDied
from radixrt.server.config import ServerConfig
from radixrt.server.limits import Gate
from radixrt.server.metrics import Metrics
from tests.server.stand import KEY, Stand, error_of, served, until

# ---- doors


async def test_every_route_but_health_asks_for_the_key() -> None:
    async with served(Stand(), api_key=KEY) as client:
        assert client.app is not None
        routes = [(r.method, r.resource.canonical) for r in client.app.router.routes() if r.resource is not None]
        assert len(routes) > 15
        for method, path in routes:
            path = path.replace("{model}", "stand")
            for headers in ({}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": KEY}, {"X-Api-Key": "ü"}):
                answer = await client.request(method, path, headers=headers)
                assert answer.status == (200 if path in ("/health", "/") else 401), (method, path)
                assert KEY not in await answer.text()
            for headers in ({"Authorization": f"Bearer {KEY}"}, {"Authorization": f"bearer {KEY}"}, {"X-Api-Key": KEY}):
                assert (await client.request(method, path, headers=headers)).status not in (401, 500), (method, path)
        missing = await client.get("/nothing")
        assert missing.status == 401 and missing.headers["WWW-Authenticate"] == "Bearer"


async def test_the_key_is_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    config = ServerConfig(api_key=KEY)
    assert KEY not in repr(config) and config.shown()["api_key"] is True
    async with served(Stand(), api_key=KEY) as client:
        headers = {"Authorization": f"Bearer {KEY}"}
        for path in ("/server_info", "/metrics", "/openapi.json", "/nothing"):
            assert KEY not in await (await client.get(path, headers=headers)).text()
    assert KEY not in caplog.text


async def test_each_of_several_keys_is_a_key() -> None:
    keys = ["first-key", "second-key", "third,key", " spaced-key "]
    async with served(Stand(), api_key=keys) as client:
        for key in keys:
            assert (await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status == 200
        for wrong in ("", "first", "first-keysecond-key", "first-key,second-key", "FIRST-KEY"):
            answer = await client.get("/v1/models", headers={"Authorization": f"Bearer {wrong}"})
            assert answer.status == 401 and "-key" not in await answer.text()


@pytest.mark.parametrize("keys", ["", " ", ["a-secret", ""], ["a-secret", None], ["a-secret", "ü"], [b"a-secret"], 3, {"a-secret": 1}])  # fmt: skip
def test_what_is_no_key_is_refused_and_not_shown(keys: Any) -> None:
    with pytest.raises(InvalidRequest, match="^api_key must be") as refused:
        ServerConfig(api_key=keys)
    assert "secret" not in str(refused.value)


HOSTS: list[tuple[dict[str, Any], str, bool]] = [
    ({}, "127.0.0.1:8000", True),
    ({}, "127.8.9.1", True),
    ({}, "localhost", True),
    ({}, "LocalHost.:8000", True),
    ({}, "a.localhost:80", True),
    ({}, "[::1]:8000", True),
    ({}, "evil.example", False),
    ({}, "evil.example:8000", False),
    ({}, "localhost.evil.example", False),
    ({}, "evil-localhost", False),
    ({}, "127.0.0.1.evil.example", False),
    ({}, "localhost@evil.example", False),
    ({}, "evil.example/localhost", False),
    ({}, "0.0.0.0:8000", False),
    ({}, "192.168.1.2", False),
    ({}, "[::2]", False),
    ({}, "", False),
    ({"host": "::1"}, "evil.example", False),
    ({"host": "localhost"}, "evil.example", False),
    ({"allowed_hosts": ["box.example", "fe80::1"]}, "Box.Example:80", True),
    ({"allowed_hosts": ["box.example", "fe80::1"]}, "[fe80::1]:80", True),
    ({"allowed_hosts": ["box.example"]}, "127.0.0.1", True),
    ({"allowed_hosts": ["box.example"]}, "evil.example", False),
    ({"allowed_hosts": ["box.example"], "host": "0.0.0.0", "api_key": KEY}, "evil.example", False),
    ({"allowed_hosts": "*"}, "evil.example", True),
    ({"host": "0.0.0.0"}, "box.example", True),  # it is everybody's
    ({"api_key": KEY}, "box.example", True),  # a page does not know the key
]


@pytest.mark.parametrize("settings, host, answered", HOSTS, ids=[f"{s} {h}" for s, h, _ in HOSTS])
async def test_who_a_server_of_this_machine_alone_may_be_called(
    settings: dict[str, Any], host: str, answered: bool
) -> None:
    headers = {"Host": host, "Origin": f"http://{host}", "X-Api-Key": KEY}  # as of a page that the server gave
    async with served(Stand(), **settings) as client:
        for answer in (
            await client.get("/health", headers=headers),
            await client.post("/generate", json={"text": "a"}, headers=headers),
        ):
            assert answer.status == (200 if answered else 403)
            if not answered:
                assert "allowed_hosts" in (await error_of(answer))["message"]


@pytest.mark.parametrize("host", ["", "a b", "box.example:80", "http://box.example", "box.example/x", "[::1"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(InvalidRequest, match="allowed_hosts"):
        ServerConfig(allowed_hosts=[host])


async def test_request_ids_and_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="radixrt.access")
    async with served(Stand()) as client:
        answer = await client.post(
            "/generate?secret=1", json={"text": "my secret prompt"}, headers={"X-Request-Id": "abc-1"}
        )
        assert answer.headers["X-Request-Id"] == "abc-1"
        own = [(await client.get("/health", headers={"X-Request-Id": bad})).headers["X-Request-Id"] for bad in ("", "a b", "x" * 129)]  # fmt: skip
        assert len({*own}) == 3 and all(re.fullmatch("[0-9a-f]{32}", one) for one in own)
        stream = await client.post("/generate", json={"text": "a", "stream": True}, headers={"X-Request-Id": "abc-2"})
        assert stream.headers["X-Request-Id"] == "abc-2"
        await stream.read()
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "radixrt.access"]
    assert [line["status"] for line in lines] == [200] * 5
    assert lines[0]["id"] == "abc-1" and lines[0]["route"] == "/generate" and lines[0]["seconds"] >= 0
    assert "secret" not in caplog.text


async def test_nothing_of_an_unforeseen_error_is_told() -> None:
    stand = Stand()
    stand.error = ZeroDivisionError("inner secret")
    async with served(stand) as client:
        answer = await client.post("/generate", json={"text": "a"})
        assert answer.status == 500 and (await error_of(answer))["message"] == "internal error"
        stand.error = EngineDied("the engine's process has ended")
        answer = await client.post("/generate", json={"text": "a"})
        assert answer.status == 503 and "process has ended" in (await error_of(answer))["message"]


async def test_wrong_routes_and_methods() -> None:
    async with served(Stand()) as client:
        answer = await client.get("/v1/chat/completion")
        assert answer.status == 404 and "did you mean '/v1/chat/completions'" in (await error_of(answer))["message"]
        answer = await client.get("/generate")
        assert answer.status == 405 and answer.headers["Allow"] == "POST"


async def test_origins() -> None:
    page = {"Origin": "https://page.example"}
    ask = {**page, "Access-Control-Request-Method": "POST"}
    async with served(Stand()) as client:  # off: no page may call, and none learns why
        assert (await client.options("/generate", headers=ask)).status == 403
        answer = await client.post("/flush_cache", headers=page)
        assert answer.status == 403 and "Access-Control-Allow-Origin" not in answer.headers
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await client.ws_connect("/v1/programs/ws", headers=page)
        assert refused.value.status == 403
        own = {"Origin": f"http://{client.host}:{client.port}"}
        assert (await client.post("/flush_cache", headers=own)).status == 200
    async with served(Stand(), cors_origins=["https://page.example"], api_key=KEY) as client:
        answer = await client.options("/generate", headers=ask)
        assert answer.status == 204 and answer.headers["Access-Control-Allow-Origin"] == "https://page.example"
        assert (await client.post("/generate", json={"text": "a"}, headers=page)).status == 401
        answer = await client.post("/generate", json={"text": "a"}, headers={**page, "X-Api-Key": KEY})
        assert answer.status == 200 and answer.headers["Access-Control-Allow-Origin"] == "https://page.example"
        assert (await client.post("/flush_cache", headers={"Origin": "https://other.example", "X-Api-Key": KEY})).status == 403  # fmt: skip


async def test_health_is_the_engines() -> None:
    stand = Stand()
    async with served(stand, health_timeout=0.05) as client:
        assert (await client.get("/health")).status == 200
        stand.healthy = False
        assert (await client.get("/health")).status == 503
        stand.healthy, asked = True, 0

        async def stuck() -> dict[str, Any]:
            nonlocal asked
            asked += 1
            await asyncio.Event().wait()
            raise AssertionError

        stand.stats = stuck  # type: ignore[method-assign]
        answers = await asyncio.gather(*(client.get("/health") for _ in range(8)))
        assert [answer.status for answer in answers] == [503] * 8 and asked == 1


# ---- limits

BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "empty"),
    (b"{", 400, "not JSON"),
    (b"[]", 400, "must be a JSON object"),
    (b"\xff", 400, "not UTF-8"),
    (b'{"text": "a", "text": "b"}', 400, "twice"),
    (b'{"text": "a", "sampling_params": {"temperature": NaN}}', 400, "NaN"),
    (b'{"text": "a", "sampling_params": {"temperature": 1e999}}', 400, "temperature"),
    (b'{"text": "a", "sampling_params": {"max_new_tokens": -3}}', 400, "max_tokens=-3"),
    (b'{"text": "a", "sampling_params": {"max_new_token": 3}}', 400, "did you mean 'max_new_tokens'"),
    (b'{"text": "a", "sampling_params": {"max_new_tokens": 3, "max_tokens": 3}}', 400, "again"),
    (b'{"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}', 400, "one constraint"),
    (b'{"text": "a", "sampling_params": {"json_schema": "{"}}', 400, "schema"),
    (b'{"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}', 400, "logit_bias"),
    (b'{"text": "a", "sampling_params": {"logit_bias": {"-1": 1}}}', 400, "logit_bias"),
    (b'{"text": "a", "sampling_params": {"seed": 100000000000000000000000}}', 400, "seed"),
    (b'{"text": "a", "sampling_params": 3}', 400, "sampling_params"),
    (b'{"text": "a", "sampling_params": [{}, {}]}', 400, "2 entries for 1"),
    (b'{"texts": "a"}', 400, "did you mean 'text'"),
    (b'{"text": "a", "input_ids": [1]}', 400, "not both"),
    (b"{}", 400, "one of them"),
    (b'{"text": ""}', 400, "empty"),
    (b'{"text": [1]}', 400, "text[0]"),
    (b'{"text": 1}', 400, "text=1"),
    (b'{"input_ids": []}', 400, "empty"),
    (b'{"input_ids": [-1]}', 400, "input_ids[0]"),
    (b'{"input_ids": [9, 320]}', 400, "input_ids[1]"),
    (b'{"input_ids": [9223372036854775808]}', 400, "input_ids[0]"),
    (b'{"input_ids": [true]}', 400, "input_ids[0]"),
    (b'{"input_ids": [[1], []]}', 400, "input_ids[1]"),
    (b'{"text": "a", "stream": 1}', 400, "stream"),
    (b'{"text": "a", "rid": 1}', 400, "rid"),
    (b'{"text": "a", "priority": 1e3}', 400, "priority"),
    (b'{"text": "a", "return_logprob": "yes"}', 400, "return_logprob"),
    (b'{"text": "a", "return_logprob": true, "top_logprobs_num": -1}', 400, "top_logprobs_num"),
    (b'{"text": "a", "logprob_start_len": 2}', 400, "logprob_start_len"),
    (b'{"text": ["a", "b", "c", "d", "e"]}', 400, "max_batch=4"),
    (b"[" * 100_000, 400, "nested"),
    (b'{"text": "' + b"a" * 2**18 + b'"}', 413, "max_body_bytes=200000"),
    (b'{"text": ' + b"9" * 10_000 + b"}", 400, "JSON"),
]


@pytest.mark.parametrize("body, status, says", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("chunked", [False, True])
async def test_hostile_bodies(body: bytes, status: int, says: str, chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 65_536):
            yield body[at : at + 65_536]

    async with served(Stand(), max_body_bytes=200_000, max_batch=4) as client:
        data: Any = pieces() if chunked else body
        answer = await client.post("/generate", data=data, headers={"Content-Type": "application/json"})
        assert answer.status == status
        assert says in (await error_of(answer))["message"]
        assert (await client.post("/generate", json={"text": "a"})).status == 200


async def test_a_body_that_is_no_json_by_its_type_is_refused() -> None:
    async with served(Stand()) as client:
        answer = await client.post("/generate", data=b'{"text": "a"}', headers={"Content-Type": "text/plain"})
        assert answer.status == 415


async def test_the_queue_is_bounded() -> None:
    stand = Stand(held=True, running=2)
    async with served(stand, max_queue=1) as client:
        asked = [asyncio.ensure_future(client.post("/generate", json={"text": "a"})) for _ in range(3)]
        await until(lambda: len(stand.running) == 3)
        for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/score", "/v1/programs"):
            answer = await client.post(path, json={})
            assert answer.status == 429 and int(answer.headers["Retry-After"]) > 0
            assert "max_queue=1" in (await error_of(answer))["message"]
        assert (await client.get("/health")).status == 200
        stand.go.set()
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 3
        assert (await client.post("/generate", json={"text": "a"})).status == 200
        assert 'radixrt_requests_refused_total{limit="max_queue",model_name="stand"} 5.0' in await (await client.get("/metrics")).text()  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("running", [1, 2])  # 2: the pool is what has no room
async def test_time_in_the_queue_is_bounded(running: int, stream: bool) -> None:
    class OneRuns(Stand):
        async def stream(self, prompt: Any, *args: Any, request_id: str, **options: Any) -> AsyncIterator[OutputDelta]:
            if prompt == "a":
                yield OutputDelta(request_id, 0, "", (0,))
            async for delta in super().stream(prompt, *args, request_id=request_id, **options):
                yield delta

    stand = OneRuns(held=True, running=running)
    async with asyncio.timeout(20), served(stand, queue_timeout=0.05) as client:
        first = asyncio.ensure_future(client.post("/generate", json={"text": "a"}))
        await until(lambda: len(stand.running) == 1)
        answer = await client.post("/generate", json={"text": "b", "stream": stream})
        assert answer.status == 503 and "queue_timeout=0.05" in (await error_of(answer))["message"]
        await until(lambda: len(stand.running) == 1)
        stand.go.set()
        assert (await first).status == 200
        assert [deltas for _, _, deltas in stand.asked] == [False, stream or running == 1]


async def test_connections_are_bounded() -> None:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = ServerConfig(port=0, max_connections=3)
    running = asyncio.ensure_future(serve(config, {}, client=Stand(), ready=ready.set_result))
    host, port = (await ready).removeprefix("http://").split(":")
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
    for reader, writer in connections:  # each is really the server's before the next one comes
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"200"
    reader, _ = await asyncio.open_connection(host, int(port))
    said = await reader.read()
    assert said.startswith(b"HTTP/1.1 503") and b"max_connections=3" in said
    for _, writer in connections:
        writer.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


async def test_connections_without_requests_are_closed() -> None:
    stand = Stand()
    running, url = await started(stand, idle_timeout=0.1)
    host, port = url.removeprefix("http://").split(":")
    async with aiohttp.ClientSession(url) as http, http.ws_connect("/v1/programs/ws") as socket:
        for more in (b"", b"GET /hea", b"POST /generate HTTP/1.1\r\nHost: localhost\r\nX-A: "):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            writer.write(more)
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        await socket.send_str("{}")  # has been silent for longer, and is none of these
        await until(lambda: stand.heard == ["{}"])
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


async def test_a_client_that_is_gone_ends_its_request() -> None:
    stand = Stand(held=True)
    async with served(stand) as client:
        asked = asyncio.ensure_future(client.post("/generate", json={"text": "a"}))
        await until(lambda: bool(stand.running))
        asked.cancel()
        await until(lambda: not stand.running)
        stand.go.set()
        stream = await client.post("/generate", json={"text": "a", "stream": True})
        await stream.content.readline()
        stream.close()
        await until(lambda: not stand.running and client.app is not None and client.app[FRONT].active == 0)
        assert client.app is not None and client.app[FRONT].gate.samples == 0


async def test_a_stream_that_is_closed_has_closed_the_engines() -> None:
    stand = Stand()
    config = ServerConfig()
    gate = Gate(stand, config, Metrics(stand))
    stream = gate.stream("a", SamplingParams(n=3), request_id="r")
    await anext(stream)
    assert stand.running == {"r"} and gate.samples == 3
    await stream.aclose()
    assert not stand.running and gate.samples == 0


# ---- the end


async def started(stand: Stand, **settings: Any) -> tuple[asyncio.Task[int], str]:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = ServerConfig(port=0, **settings)
    running = asyncio.ensure_future(serve(config, {}, client=stand, ready=ready.set_result))
    return running, await ready


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
async def test_what_runs_is_finished_and_nothing_new_begins(
    name: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    stand = Stand(held=True)
    running, url = await started(stand)
    async with aiohttp.ClientSession(url) as http:
        idle = await http.ws_connect("/v1/programs/ws")
        busy = await http.ws_connect("/v1/programs/ws")
        await busy.send_str('{"op": "open", "program": "p", "version": 1}')
        asked = asyncio.ensure_future(http.post("/generate", json={"text": "a"}))
        await until(lambda: bool(stand.running) and bool(stand.heard))
        os.kill(os.getpid(), name)
        assert (await idle.receive()).type is aiohttp.WSMsgType.CLOSE
        for path, status in (("/generate", 503), ("/v1/models", 503)):
            answer = await http.request("POST" if path == "/generate" else "GET", path)
            assert answer.status == status and "shutting down" in (await error_of(answer))["message"]
        assert (await http.get("/health")).status == 503 and (await http.get("/metrics")).status == 200
        await busy.send_str('{"op": "open", "program": "q", "version": 1}')
        assert "shutting down" in await busy.receive_str()
        assert not running.done()
        stand.go.set()
        assert (await (await asked).json())["text"] == "one two three"
        await busy.send_str('{"op": "close", "program": "p"}')
        assert (await busy.receive()).type is aiohttp.WSMsgType.CLOSE
        assert await running == 0 and stand.closed
    err = capsys.readouterr().err
    assert "stand" in err and "64 tokens" in err and url in err and "stopped\n" in err


@pytest.mark.parametrize("twice", [False, True])
async def test_what_does_not_finish_is_ended(twice: bool, capsys: pytest.CaptureFixture[str]) -> None:
    stand = Stand(held=True)
    running, url = await started(stand, drain_seconds=1000.0 if twice else 0.0)
    async with aiohttp.ClientSession(url) as http:
        asked = asyncio.ensure_future(http.post("/generate", json={"text": "a"}))
        await until(lambda: bool(stand.running))
        os.kill(os.getpid(), signal.SIGTERM)
        if twice:
            await until(lambda: "stopping" in capsys.readouterr().err)
            os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 0
        assert stand.closed and not stand.running
        with pytest.raises(aiohttp.ClientError):
            await asked


async def test_an_address_that_is_taken_is_known_before_the_model_is_loaded() -> None:
    running, url = await started(Stand())
    other = Stand()
    with pytest.raises(InvalidRequest, match="cannot be listened on"):
        await serve(ServerConfig(port=int(url.rsplit(":")[-1])), {}, client=other)
    assert not other.started
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


async def test_a_write_to_a_client_that_has_just_gone_is_no_failure_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Gone(Stand):
        async def flush_cache(self) -> int:
            raise ConnectionResetError("Cannot write to closing transport")

    async with served(Gone()) as client:
        answer = await client.post("/flush_cache")
        assert answer.status == 499
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_refused_request_takes_no_place_and_does_not_count_as_gone() -> None:
    class Refusing(Stand):
        async def stream(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            assert front.gate.samples == 4  # and not a million, which would leave no place to the others
            raise InvalidRequest("n", "=1000000: must be at most 4")
            yield

    stand = Refusing()
    stand.info = replace(stand.info, settings={"max_running_requests": 2, "max_n": 4})
    async with served(stand) as client:
        assert client.app is not None
        front = client.app[FRONT]
        answer = await client.post("/generate", json={"text": "a", "sampling_params": {"n": 10**6}})
        assert answer.status == 400
        assert front.gate.samples == 0 and front.metrics.finished["gone"] == 0
