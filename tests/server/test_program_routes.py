"""Programs over HTTP: the same tokens as in process, and nothing left of a connection that is gone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from lang import RuntimeEndpoint, assistant, function, gen, select, user
from lang.loop import LOOP
from radixrt import SamplingParams
from radixrt.engine.nodes import Gen, Select, Text, graph_to_dict
from radixrt.server.app import FRONT
from radixrt.server.client import EngineDied
from tests.server.stand import KEY, Stand, error_of, reachable, served, until


def fixed(name: str, tokens: int = 6, **options: Any) -> Any:
    return gen(name, max_tokens=tokens, ignore_eos=True, **options)


@function
def talk(s: Any, topic: str) -> None:
    s += user(f"Tell me about {topic}.") + assistant(fixed("a"))
    branches = s.fork(2)
    for i, branch in enumerate(branches):
        branch += user(f"Point {i}?") + assistant(fixed("point", 4 + i))
    branches.join()
    s += user("So: " + s["point"][0])
    with s.assistant():
        s += "It is " + select("verdict", ["good", "bad", "fine"])
        s += gen("word", regex="[a-z]{4}") + fixed("samples", 5, n=2, temperature=0.9)


def tokens(state: Any) -> list[Any]:
    graph = state.graph
    return [[o.token_ids for o in graph.done[node.id].outputs] for node in graph if isinstance(node, (Gen, Select))]


async def test_programs_over_the_wire_make_the_same_tokens(local_client: Any, server_settings: dict[str, Any]) -> None:
    from lang import Runtime

    settings = {"model_path" if name == "model" else name: value for name, value in server_settings.items()}
    batch = [{"topic": topic} for topic in ("cats", "the sea", "日本")]

    def run(backend: Any) -> list[Any]:
        states = talk.run_batch(batch, seed=7, temperature=0, backend=backend)
        for state in states:
            assert state.error() is None
        return [tokens(state) for state in states]

    def in_process() -> list[Any]:
        with Runtime(**settings) as runtime:
            return run(runtime)

    async with reachable(local_client, api_key=KEY) as url:
        backend = RuntimeEndpoint(url, api_key=KEY)

        def over_the_wire() -> tuple[list[Any], Any]:
            try:
                return run(backend), LOOP.call(backend.stats)
            finally:
                LOOP.call(backend.aclose)

        (found, stats), expected = await asyncio.gather(asyncio.to_thread(over_the_wire), asyncio.to_thread(in_process))
        assert found == expected
        assert stats["running"] == 0 and stats["context_length"] == 512
        for _ in range(1000):
            if (await local_client.stats())["programs"] == 0:
                break
        assert (await local_client.stats())["programs"] == 0


async def test_a_graph_in_one_request(local_client: Any) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    nodes = [Text(id=0, parts=("Hello",)), Gen(id=1, parent=0, params=params), Gen(id=2, parent=1, params=params)]
    graph = graph_to_dict(nodes)
    async with served(local_client) as client:
        whole = await (await client.post("/v1/programs", json={**graph, "stream": False})).json()
        assert [(event["event"], event["node"]) for event in whole["events"]] == [("done", 1), ("done", 2)]
        text = await (await client.post("/v1/programs", json=graph)).text()
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        told = [json.loads(event) for event in events[:-1]]
        done = [event for event in told if event["event"] == "done"]
        assert [event["outputs"] for event in done] == [event["outputs"] for event in whole["events"]]
        assert (
            "".join(e["text"] for e in told if e["event"] == "delta" and e["node"] == 1)
            == done[0]["outputs"][0]["text"]
        )
        for wrong, says in (
            ({"version": 2, "nodes": []}, "version"),
            ({"version": 1}, "nodes"),
            ({"version": 1, "nodes": [{"id": 0, "kind": "txt"}]}, "kind"),
            ({"version": 1, "nodes": [{"id": 0, "kind": "text", "parts": "a", "parent": 5}]}, "earlier node"),
            ({"version": 1, "nodes": [{"id": 0, "kind": "gen", "params": {"temprature": 1}}]}, "temperature"),
            ({"version": 1, "nodes": [], "nam": ""}, "did you mean 'name'"),
            ({"version": 1, "nodes": [], "stream": 1}, "stream"),
        ):
            answer = await client.post("/v1/programs", json=wrong)
            assert answer.status == 400 and says in (await error_of(answer))["message"], wrong
        wrong_gen = graph_to_dict([Gen(id=0, params=params)])
        answer = await (await client.post("/v1/programs", json={**wrong_gen, "stream": False})).json()
        assert answer["events"][0]["event"] == "failed"


async def test_a_websocket_ends_with_its_link() -> None:
    stand = Stand()
    async with served(stand, max_websockets=1, max_message=1024, max_unsent=2000) as client:
        assert (await client.get("/v1/programs/ws")).status == 400
        socket = await client.ws_connect("/v1/programs/ws")
        await until(lambda: len(stand.links) == 1)
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await client.ws_connect("/v1/programs/ws")
        assert refused.value.status == 503
        await socket.send_str("no json")
        await until(lambda: stand.heard == ["no json"])
        next(iter(stand.links.values()))("an event")
        assert await socket.receive_str() == "an event"
        await socket.close()
        await until(lambda: not stand.links)

        for send, code in (
            (lambda ws: ws.send_str("x" * 1025), aiohttp.WSCloseCode.MESSAGE_TOO_BIG),
            (lambda ws: ws.send_str("x" * 10_000), aiohttp.WSCloseCode.MESSAGE_TOO_BIG),
            (lambda ws: ws.send_bytes(b"x"), aiohttp.WSCloseCode.UNSUPPORTED_DATA),
        ):
            socket = await client.ws_connect("/v1/programs/ws")
            await send(socket)
            while (message := await socket.receive()).type is not aiohttp.WSMsgType.CLOSE and not socket.closed:
                pass
            assert socket.close_code == code, message
            await until(lambda: not stand.links and client.app is not None and client.app[FRONT].active == 0)

        socket = await client.ws_connect("/v1/programs/ws")
        await until(lambda: len(stand.links) == 1)
        tell = next(iter(stand.links.values()))
        for _ in range(3):  # more than may wait, before the loop could send any
            tell("x" * 900)
        await until(lambda: not stand.links)
        await socket.close()

        socket = await client.ws_connect("/v1/programs/ws")
        stand.error = EngineDied("the engine is gone")
        await socket.send_str("{}")
        assert "the engine is gone" in await socket.receive_str()
        assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
        await until(lambda: not stand.links)


async def test_an_idle_websocket_is_closed_but_not_one_with_programs() -> None:
    stand = Stand()
    async with served(stand, websocket_idle=0.02) as client:
        busy = await client.ws_connect("/v1/programs/ws")
        await busy.send_str('{"op": "open", "program": "p", "version": 1}')
        idle = await client.ws_connect("/v1/programs/ws")
        message = await idle.receive()
        assert message.type is aiohttp.WSMsgType.CLOSE and "websocket_idle" in message.extra
        await until(lambda: len(stand.links) == 1)
        await busy.send_str('{"op": "close", "program": "p"}')
        assert (await busy.receive()).type is aiohttp.WSMsgType.CLOSE
