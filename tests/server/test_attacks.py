"""Attacks on the front: whatever comes is answered with an error of ours or hung up on, and costs and tells nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from radixrt.engine.protocol import MAX_NAME, MAX_OPEN
from radixrt.server import programs
from radixrt.server.app import FRONT, serve
from radixrt.server.config import ServerConfig
from radixrt.server.errors import failure_of
from radixrt.server.ipc import error_event
from tests.server.stand import KEY, Stand, error_of, served, until

BODY = json.dumps({"text": "hello"}).encode()
POSTS = ("/generate", "/v1/chat/completions", "/v1/completions", "/score", "/tokenize", "/v1/programs", "/flush_cache")


@contextlib.asynccontextmanager
async def listening(**settings: Any) -> AsyncIterator[tuple[str, int]]:
    """A whole server, as it is run: its address."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = ServerConfig(port=0, **settings)
    running = asyncio.ensure_future(serve(config, {}, client=Stand(), ready=ready.set_result))
    host, port = (await ready).removeprefix("http://").split(":")
    try:
        yield host, int(port)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 0


def head(path: str = "/generate", method: str = "POST", **headers: str) -> bytes:
    fields = {"Host": "localhost", "Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()


async def said(address: tuple[str, int], *parts: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of the answer to what is sent, part after part."""
    reader, writer = await asyncio.open_connection(*address)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.02)
    async with asyncio.timeout(5):
        status = int((await reader.readline()).split()[1])
        length = 0
        while (line := (await reader.readline()).strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        body = json.loads(await reader.readexactly(length))
    writer.transport.abort()
    return status, body["error"]


@pytest.mark.parametrize("path", POSTS)
async def test_compressed_bodies_are_not_unpacked(path: str) -> None:
    bomb = gzip.compress(bytes(2**22))
    async with listening(max_body_bytes=2**16) as address:
        for coding, data in (("gzip", bomb), ("gzip", b"no gzip"), ("deflate", bomb), ("BR", bomb), ("what", BODY)):
            asked = head(path, Content_Encoding=coding, Content_Length=str(len(data)))
            status, error = await said(address, asked + data)
            assert status == 415 and "compressed" in error["message"]


async def test_what_is_no_http_is_answered_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sent = (
        [b"GARBAGE\r\n\r\n"],
        [head(X_Note="a\x00b")],
        [head("/v1/models", "GET", Authorization=f"Bearer {KEY}\x00")],
        [head(X_Long="a" * 100_000)],
        [head(Content_Length="-1")],
        [head(Content_Length="4", Transfer_Encoding="chunked")],
        [head(Transfer_Encoding="chunked") + b"a private prompt\r\n"],
    )
    async with listening(api_key=KEY) as address:
        for parts in sent:
            status, error = await said(address, *parts)
            assert status == 400 and error["code"] == "bad_http", parts
            assert KEY not in error["message"]
    assert KEY not in caplog.text and "private" not in caplog.text and "Traceback" not in caplog.text


async def test_requests_that_never_end_are_ended() -> None:
    async with listening(receive_timeout=0.3, drain_seconds=0.0, max_body_bytes=2**20) as address:
        slow: list[list[bytes]] = [
            [],
            [b"POST /gen"],
            [head(Content_Length="50"), b'{"te'],
            [head(Transfer_Encoding="chunked"), b"3\r\nabc\r\n"],
            [head(Transfer_Encoding="chunked"), b"3\r\nabc\r\n", b"no chunk\r\n"],
            [head("/flush_cache", Transfer_Encoding="chunked"), b"3\r\nabc\r\n"],
        ]
        for status, error in await asyncio.gather(*(said(address, *parts) for parts in slow)):
            assert status == 408 and "receive_timeout=0.3" in error["message"]
        status, error = await said(
            address, head("/flush_cache", Transfer_Encoding="chunked"), b"200000\r\n" + bytes(2**21)
        )
        assert status == 413 and "max_body_bytes" in error["message"]
        reader, writer = await asyncio.open_connection(*address)  # one that has asked may be silent for longer
        for _ in range(2):
            writer.write(head("/health", "GET"))
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.4)
        writer.close()


async def test_a_body_that_is_still_coming_holds_up_no_shutdown() -> None:
    async with asyncio.timeout(5):
        async with listening(drain_seconds=60.0) as address:
            _, writer = await asyncio.open_connection(*address)
            writer.write(head(Content_Length="50") + b'{"te')
            await asyncio.sleep(0.05)
        writer.close()


async def test_a_body_that_came_too_late_is_no_new_work() -> None:
    stand = Stand()
    async with served(stand) as client:
        front = client.app[FRONT]
        go = asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield BODY[:5]
            await go.wait()
            yield BODY[5:]

        asked = asyncio.ensure_future(
            client.post("/generate", data=slowly(), headers={"Content-Type": "application/json"})
        )
        await asyncio.sleep(0.05)
        assert not front.active
        front.draining = True
        go.set()
        answer = await asked
        assert answer.status == 503 and (await error_of(answer))["code"] == "shutting_down"
        assert not stand.asked


async def test_a_broken_body_is_the_clients_fault() -> None:
    async with served(Stand()) as client:
        server = client.server
        headers = head(Content_Encoding="identity", Transfer_Encoding="chunked")
        status, error = await said((str(server.host), int(server.port or 0)), headers + b"3\r\nabc\r\n0\r\n\r\n")
        assert status == 400 and "not JSON" in error["message"]
    assert failure_of(web.RequestPayloadError("b'private'")).status == 400


async def test_names_of_programs_that_the_engine_refuses_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_NAME < 1000 and MAX_OPEN > 10
    monkeypatch.setattr(programs, "MAX_OPEN", 10)
    stand = Stand()
    async with served(stand) as client, client.ws_connect("/v1/programs/ws") as socket:
        for i in range(40):
            await socket.send_str(json.dumps({"op": "open", "program": f"{i}" + "x" * 1000}))
            await socket.send_str(json.dumps({"op": "open", "program": f"p{i}"}))
        await until(lambda: len(stand.heard) == 80)
        (connection,) = client.app[FRONT].programs._open
        assert connection._programs == {f"p{i}" for i in range(10)}


async def test_a_silent_websocket_ends_with_the_engine() -> None:
    stand = Stand()
    async with served(stand) as client, client.ws_connect("/v1/programs/ws") as socket:
        await until(lambda: len(stand.links) == 1)
        stand.healthy = False
        for tell in stand.links.values():
            tell(error_event("the engine's process ended"))
        assert "process ended" in await socket.receive_str()
        goodbye = await asyncio.wait_for(socket.receive(), 5)
        assert goodbye.type is aiohttp.WSMsgType.CLOSE and goodbye.data == 1011
        await until(lambda: not stand.links)


async def test_frames_of_any_kind_end_at_most_their_own_socket() -> None:
    def frame(first: int, data: bytes, length: int | None = None) -> bytes:
        size = len(data) if length is None else length
        return bytes([first, 0xFF]) + size.to_bytes(8, "big") + bytes(4) + data

    frames = [
        frame(0x82, b"binary"),
        frame(0xC1, b"a reserved bit"),
        frame(0x83, b"no such kind"),
        frame(0x80, b"goes on from nothing"),
        frame(0x81, b"\xff\xfe"),
        frame(0x81, b"x", 2**62),
        frame(0x89, bytes(200)),
        frame(0x01, b"{"),
        frame(0x01, b"x" * 5000) + frame(0x80, b"x" * 5000),
    ]
    stand = Stand()
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    async with served(stand, max_message=1024) as client:
        server = client.server
        for sent in frames:
            reader, writer = await asyncio.open_connection(str(server.host), server.port)
            writer.write(head("/v1/programs/ws", "GET", **upgrade, **{"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}))
            assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(sent)
            if sent[0] != 0x01 or len(sent) > 100:
                async with asyncio.timeout(5):
                    assert (await reader.readexactly(1))[0] == 0x88  # is told goodbye
            writer.transport.abort()
        await until(lambda: not stand.links)
        async with client.ws_connect("/v1/programs/ws") as socket:
            await socket.send_str("{}")
            await until(lambda: stand.heard == ["{}"])
        assert (await client.get("/health")).status == 200
        with contextlib.suppress(aiohttp.ClientError):
            await client.post("/v1/programs/ws")


async def test_texts_that_no_context_holds_are_not_tokenized(local_client: Any) -> None:
    long = "ab " * 2_000_000
    async with served(local_client) as client:
        for path, body in (
            ("/tokenize", {"text": long}),
            ("/tokenize", {"messages": [{"role": "user", "content": long}]}),
            ("/score", {"prompt": "a", "choices": [long, "b"]}),
        ):
            async with asyncio.timeout(5), client.post(path, json=body) as answer:
                assert answer.status == 400
                assert "context_length=" in (await error_of(answer))["message"]
