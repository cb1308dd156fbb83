"""An engine in a process of its own: the answers are those of one in this process, and its end is noticed."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError, Future
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from radixrt import Constraint, EngineClosed, InvalidRequest, ModelError, SamplingParams, UnsupportedConstraint
from radixrt.engine.core import Engine
from radixrt.server import worker
from radixrt.server.client import EngineClient, EngineDied
from radixrt.server.ipc import Abort, Fatal, FrameReader, Generate, Ready, Start, frame, pack, params_out
from radixrt.server.local import LocalClient
from radixrt.server.process import ProcessClient
from radixrt.server.worker import Worker, serve

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server_settings: dict[str, Any]) -> AsyncIterator[ProcessClient]:
    client = ProcessClient(server_settings)
    await client.start()
    yield client
    await client.close()


async def deltas(client: EngineClient, prompt: Any, params: SamplingParams, **options: Any) -> list[Any]:
    async with asyncio.timeout(60):
        return [item async for item in client.stream(prompt, params, request_id=os.urandom(8).hex(), **options)]


async def answer(client: EngineClient, prompt: Any, params: SamplingParams, **options: Any) -> Any:
    return (await deltas(client, prompt, params, **options))[-1].output


async def until(client: EngineClient, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first figures of which this is true."""
    async with asyncio.timeout(60):
        while not holds(stats := await client.stats()):
            pass
        return stats


def idle(stats: dict[str, Any]) -> bool:
    return stats["running"] == stats["waiting"] == stats["programs"] == 0


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("hello", GREEDY),
        ([40, 50, 60], GREEDY),
        (np.array([40, 50, 60], dtype=np.int32), GREEDY),
        ([{"role": "user", "content": "hé 你 \U0001f600"}], GREEDY),
        ("n", SamplingParams(temperature=1, max_tokens=6, n=3, seed=2**64 - 1)),
        ("l", SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2)),
        ("b", SamplingParams(temperature=0, max_tokens=4, logit_bias={70: 100.0}, stop=["ff"], stop_token_ids=[9])),
        ("c", SamplingParams(temperature=0, max_tokens=20, constraint=Constraint.regex("[a-c]{3}(x|y)"))),
        (
            "j",
            SamplingParams(
                temperature=0, max_tokens=60, constraint=Constraint.json_schema({"enum": [2**70, "\ud800"]})
            ),
        ),
    ],
    ids=["text", "ids", "array", "chat", "samples", "logprobs", "bias", "regex", "schema"],
)
async def test_the_answer_is_that_of_an_engine_in_this_process(
    client: ProcessClient, local_client: LocalClient, prompt: Any, params: SamplingParams
) -> None:
    there, here = await deltas(client, prompt, params), await answer(local_client, prompt, params)
    output = there[-1].output
    for name in ("samples", "prompt_token_ids", "prompt_logprobs", "error", "scores"):
        assert getattr(output, name) == getattr(here, name)
    assert type(output.finish_reason) is type(here.finish_reason)
    for sample in output.samples:
        assert "".join(item.text for item in there if item.index == sample.index) == sample.text
        assert sum((item.token_ids for item in there if item.index == sample.index), ()) == sample.token_ids
    assert [item.output is not None for item in there] == [False] * (len(there) - 1) + [True]


async def test_only_the_first_and_the_last_delta_where_no_others_are_wanted(client: ProcessClient) -> None:
    first, last = await deltas(client, "x", GREEDY, deltas=False)
    assert first.token_ids and first.output is None and last.output is not None
    assert len(await deltas(client, "x", GREEDY)) > 2


async def test_scores(client: ProcessClient, local_client: LocalClient) -> None:
    asked = ([40, 50], [[60], [61, 62], []])
    there, here = [await one.score(*asked, request_id="s", cache_salt="z") for one in (client, local_client)]
    assert there.scores == here.scores
    assert there.scores is not None and [len(one) for one in there.scores] == [1, 2, 0]


@pytest.mark.parametrize(
    ("prompt", "params", "kind"),
    [
        ("", GREEDY, InvalidRequest),
        ("\ud800", GREEDY, InvalidRequest),
        ([-1], GREEDY, InvalidRequest),
        ([2**63], GREEDY, InvalidRequest),
        ([2**200], GREEDY, InvalidRequest),
        ([1.5], GREEDY, InvalidRequest),
        ([9] * 513, GREEDY, InvalidRequest),
        ([{"role": "user"}], GREEDY, InvalidRequest),
        ("n", SamplingParams(n=10_000), InvalidRequest),
        ("b", SamplingParams(logit_bias={99_999: 1.0}), InvalidRequest),
        ("r", SamplingParams(constraint=Constraint.regex("(")), InvalidRequest),
        ("r", SamplingParams(constraint=Constraint.regex(r"(a|b)\1")), UnsupportedConstraint),
    ],
)
async def test_what_is_refused_is_refused_in_the_same_words(
    client: ProcessClient, local_client: LocalClient, prompt: Any, params: SamplingParams, kind: type[InvalidRequest]
) -> None:
    errors = []
    for one in (client, local_client):
        with pytest.raises(InvalidRequest) as caught:
            await answer(one, prompt, params)
        errors.append((type(caught.value), caught.value.field, str(caught.value)))
    assert errors[0] == errors[1]
    assert errors[0][0] is kind
    assert await answer(client, "still", GREEDY)


async def test_what_cannot_travel_is_refused_here(client: ProcessClient) -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    for prompt in (nested, [{"role": "user", "content": object()}]):
        with pytest.raises(InvalidRequest, match="^prompt") as caught:
            await answer(client, prompt, GREEDY)
        assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequest, match="choices"):
        await client.score([40], [], request_id="none")


async def test_one_id_twice_is_refused_and_leaves_the_first_alone(client: ProcessClient) -> None:
    async with aclosing(client.stream("a", LONG, request_id="twice")) as first:
        await anext(first)
        with pytest.raises(InvalidRequest, match="request_id"):
            await anext(client.stream("b", LONG, request_id="twice"))
        assert len([item async for item in first]) > 100


async def test_a_stream_that_is_closed_or_cancelled_runs_no_longer(client: ProcessClient) -> None:
    slow = SamplingParams(max_tokens=9, constraint=Constraint.regex("(a|b|c|d){40}e{1,90}"))
    for params, mid in ((LONG, True), (LONG, False), (slow, False)):
        started = asyncio.Event()

        async def read(params: SamplingParams = params, started: asyncio.Event = started) -> None:
            started.set()
            async for _ in client.stream("abort me", params, request_id=os.urandom(8).hex()):
                started.set()

        before = (await until(client, idle))["generated_tokens"]
        task = asyncio.create_task(read())
        await started.wait()
        if mid:
            await until(client, lambda stats: stats["running"] == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stats = await until(client, idle)
        assert stats["generated_tokens"] < before + 400
    assert client._link is not None and not client._link._receivers


async def test_abort_flush_and_figures(client: ProcessClient, local_client: LocalClient) -> None:
    stream = client.stream("to be aborted", LONG, request_id="victim")
    await anext(stream)
    assert await client.abort("victim")
    rest = [item async for item in stream]
    assert rest[-1].output is not None and rest[-1].output.finish_reason == "abort"
    assert not await client.abort("victim")
    assert await client.flush_cache() > 0
    assert (await client.stats())["pool_used"] == 0
    assert client.healthy
    assert client.info.context_length == 512
    assert client.tokenizer.encode("a") == local_client.tokenizer.encode("a")


def program(*nodes: dict[str, Any], id: str = "p") -> list[str]:
    messages = [{"op": "open", "program": id, "version": 1}, {"op": "add", "program": id, "nodes": list(nodes)}]
    return [json.dumps(message) for message in messages]


TEXT = {"id": 0, "kind": "text", "parts": ["hello"]}


def gen(tokens: int) -> dict[str, Any]:
    params = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    return {"id": 1, "kind": "gen", "parent": 0, "params": params}


async def test_programs_run_and_end_with_their_channel(client: ProcessClient, local_client: LocalClient) -> None:
    found = []
    for one in (client, local_client):
        heard: asyncio.Queue[str] = asyncio.Queue()
        link = one.programs("peer", heard.put_nowait)
        for message in [*program(TEXT, gen(5)), "{", '{"op": "\ud800"}']:
            link.send(message)
        events = [json.loads(await asyncio.wait_for(heard.get(), 60)) for _ in range(3)]
        assert sorted(event["event"] for event in events) == ["done", "error", "error"]
        found.append(next(event["outputs"] for event in events if event["event"] == "done"))
        for message in program(TEXT, gen(400), id="long"):
            link.send(message)
        await until(one, lambda stats: stats["running"] == 1)
        link.close()
        await until(one, idle)
        link.send("ignored")
        assert heard.empty()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("change", "error"),
    [({"model": "/nowhere"}, ModelError), ({"max_total_tokens": 2**31 - 1, "kv_dtype": "float32"}, InvalidRequest)],
)
async def test_what_loading_raises_comes_back_as_it_was(
    server_settings: dict[str, Any], change: dict[str, Any], error: type[Exception]
) -> None:
    client = ProcessClient({**server_settings, **change})
    with pytest.raises(error) as there:
        await client.start()
    with pytest.raises(error) as here:
        await LocalClient(_engine({**server_settings, **change})).start()
    assert str(there.value) == str(here.value)
    assert not client.healthy and client.pid is None
    await client.close()


def _engine(settings: dict[str, Any]) -> Any:
    from radixrt import AsyncEngine

    return AsyncEngine(**settings)


async def test_an_unknown_setting_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest, match="max_total_tokens"):
        ProcessClient({"max_total_token": 3})


async def test_a_process_that_ends_is_replaced_once(server_settings: dict[str, Any]) -> None:
    client = ProcessClient(server_settings, restart_delay=0, ping_interval=0.01)
    with pytest.raises(EngineClosed, match="start"):
        await answer(client, "early", GREEDY)
    await client.start()
    expected = (await answer(client, "again", GREEDY)).token_ids
    for end, watchdog in ((signal.SIGKILL, 30.0), (signal.SIGSTOP, 0.2)):
        heard: asyncio.Queue[str] = asyncio.Queue()
        link = client.programs("peer", heard.put_nowait)
        stream = client.stream("cut off", LONG, request_id="cut")
        await anext(stream)
        pid = client.pid
        assert client.healthy and pid is not None
        os.kill(pid, end)
        client.watchdog_seconds = watchdog
        with pytest.raises(EngineDied):
            async with asyncio.timeout(60):
                async for _ in stream:
                    pass
        assert not client.healthy
        assert json.loads(heard.get_nowait())["event"] == "error"
        with pytest.raises(EngineDied):
            link.send("{}")
        with pytest.raises(EngineDied):
            client.programs("other", heard.put_nowait)
        with pytest.raises(EngineDied):
            await answer(client, "meanwhile", GREEDY)
        if end == signal.SIGKILL:
            assert await asyncio.wait_for(client.settled(), 60)
            assert client.pid != pid
            assert (await answer(client, "again", GREEDY)).token_ids == expected
    assert not await client.settled()  # the second end came soon after the restart
    assert client.pid is None
    with pytest.raises(EngineDied, match="stays down"):
        await client.stats()
    await client.close()
    with pytest.raises(EngineClosed):
        await answer(client, "late", GREEDY)


async def test_closing_ends_the_process_and_tells_who_waits(server_settings: dict[str, Any]) -> None:
    client = ProcessClient(server_settings)
    await client.start()
    stream = client.stream("cut off", LONG, request_id="cut")
    await anext(stream)
    process = client._process
    await client.close()
    with pytest.raises(EngineClosed):
        async with asyncio.timeout(60):
            async for _ in stream:
                pass
    assert process is not None and process.returncode == 0  # by itself: it was not killed
    assert not client.healthy


async def test_an_engine_of_this_process_that_stops_by_itself_has_died(server_settings: dict[str, Any]) -> None:
    client = LocalClient(_engine(server_settings))
    assert not client.healthy
    await client.start()
    heard: asyncio.Queue[str] = asyncio.Queue()
    link = client.programs("peer", heard.put_nowait)
    stream = client.stream("cut off", LONG, request_id="cut")
    await anext(stream)
    assert client.healthy
    await client._engine.call(lambda engine: engine.close())
    with pytest.raises(EngineDied):
        async with asyncio.timeout(60):
            async for _ in stream:
                pass
    assert json.loads(await asyncio.wait_for(heard.get(), 60))["event"] == "error"
    for asked in (client.stats(), client.abort("x"), client.score([40], [[50]], request_id="s")):
        with pytest.raises(EngineDied):
            await asked
    with pytest.raises(EngineDied):
        link.send("{}")
    assert not client.healthy
    await client.close()
    with pytest.raises(EngineClosed):
        await client.stats()


async def test_a_score_that_is_cancelled_runs_no_longer(client: ProcessClient, local_client: LocalClient) -> None:
    for one in (client, local_client):
        task = asyncio.create_task(one.score([40], [[50 + at] * 300 for at in range(8)], request_id="cancelled"))
        await until(one, lambda stats: stats["running"] + stats["waiting"] > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(one, idle)
        assert (await one.score([40], [[50]], request_id="next")).scores


async def test_an_engine_that_stops_by_itself_ends_its_process(
    server_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    front, back = socket.socketpair()
    serving = asyncio.create_task(asyncio.to_thread(serve, back))
    reader, writer = await asyncio.open_unix_connection(sock=front)
    frames = FrameReader()
    found: list[Any] = []

    async def hear(until: type) -> Any:
        async with asyncio.timeout(60):
            while not any(isinstance(one, until) for one in found):
                data = await reader.read(65536)
                assert data
                found.extend(frames.feed(data))
            return next(one for one in found if isinstance(one, until))

    writer.write(frame(Start(server_settings, False)))
    assert (await hear(Ready)).info.vocab_size == 320

    def broken(_: Engine) -> list[Any]:
        raise MemoryError("none left")

    monkeypatch.setattr(Engine, "step", broken)
    writer.write(frame(Generate(1, "r", True, pack("prompt", "x", params_out(GREEDY), 0, ""))))
    assert "none left" in (await hear(Fatal)).message
    await asyncio.wait_for(serving, 60)
    assert "none left" in caplog.text
    writer.close()
    back.close()


async def test_nothing_is_compiled_for_a_client_that_is_gone() -> None:
    class Core:
        """Compiles for ever."""

        def __init__(self) -> None:
            self.asked: queue.Queue[Future[Any]] = queue.Queue()

        def compile(self, constraint: Constraint) -> Future[Any]:
            self.asked.put(Future())
            return self.asked.queue[-1]

        def post(self, function: Callable[[Core], None]) -> None:
            function(self)

    core, told = Core(), queue.SimpleQueue[Any]()
    front = Worker(None, told, core, core, None)  # type: ignore[arg-type]
    body = pack("prompt", "a", params_out(SamplingParams(constraint=Constraint.regex("a+"))), 0, "")
    front.take(Generate(1, "r", True, body))
    future = await asyncio.to_thread(core.asked.get, timeout=20)
    front.take(Abort(1))
    if not future.cancelled():  # the client went before the job knew what it waits for
        with pytest.raises(CancelledError):
            await asyncio.to_thread(future.result, 20)
    async with asyncio.timeout(20):
        while front._jobs:
            await asyncio.sleep(0)
    assert told.empty()


async def test_memory_is_given_back_as_long_as_the_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, trimmed = threading.Event(), queue.Queue[int]()

    class Library:
        def malloc_trim(self, pad: int) -> None:
            trimmed.put(pad)
            if trimmed.qsize() == 3:
                stopped.set()

    monkeypatch.setattr(worker.ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(worker, "_TIDY", 0.0)
    await asyncio.wait_for(asyncio.to_thread(worker.tidy, stopped), 20)
    assert trimmed.qsize() == 3
    monkeypatch.setattr(worker.ctypes, "CDLL", lambda name: object())  # another C library
    await asyncio.wait_for(asyncio.to_thread(worker.tidy, threading.Event()), 20)
