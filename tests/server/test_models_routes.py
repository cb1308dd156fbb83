"""The routes of several models: who answers, what looks, how long a model stays, and what the command line names."""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixrt import InvalidRequest, ModelError
from radixrt.errors import EngineClosed
from radixrt.server.config import ServerConfig
from radixrt.server.ollama_requests import keep_alive
from radixrt.server.plans import Named, make_models, read_models, split
from tests.server import several
from tests.server.several import (
    GIGABYTE,
    GRAPH,
    Made,
    board,
    real,
    say,
    some,
)
from tests.server.stand import KEY, served, until

folders = several.folders


# ---- the routes

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"max_tokens": 2, "messages": [{"role": "user", "content": "a"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "a"}]},
    "/api/generate": {"prompt": "a"},
    "/api/show": {},
    "/generate": {"text": "a"},
    "/score": {"prompt": "a", "choices": ["b"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [9]},
    "/v1/programs": {"version": 1, "nodes": []},
}


@pytest.mark.parametrize("route", BODIES)
async def test_an_unknown_model_is_answered_404_with_the_nearest_name(route: str) -> None:
    made = Made()
    async with board(some(made, "alpha", "beta")) as client:
        async with client.post(route, json={**BODIES[route], "model": "betta"}) as answer:
            assert answer.status == 404 and "did you mean 'beta'" in await answer.text()
        async with client.post(
            route, data=b'{"model": "beta", ', headers={"Content-Type": "application/json"}
        ) as answer:
            assert answer.status == 400
        async with client.post(route, json={**BODIES[route], "model": 7}) as answer:
            assert answer.status == 400
        async with client.post(route, data=b"model=beta") as answer:
            assert answer.status == 415
        async with client.post(
            route, json={**BODIES[route], "model": "betta", "user": "\ud800"}
        ) as answer:  # half an emoji
            assert answer.status == 404 and "did you mean 'beta'" in await answer.text()
        assert made.names == ["alpha"]


@pytest.mark.asyncio(loop_scope="module")
async def test_every_route_is_answered_by_the_model_it_names(folders: dict[str, Path]) -> None:
    models = real(folders)
    await models.start()
    try:
        async with served(models) as client:
            for route, plain in BODIES.items():
                body = {**plain, "model": "mistral"}
                if route == "/v1/programs":
                    body |= {"nodes": GRAPH, "stream": False}
                elif route == "/v1/completions":
                    body |= {"max_tokens": 2}
                elif route.startswith("/api/") and route != "/api/show":
                    body |= {"stream": False, "options": {"num_predict": 2}}
                used = models.residents["mistral"].used
                async with client.post(route, json=body) as answer:
                    assert answer.status == 200, (route, await answer.text())
                reads = route in ("/api/show", "/tokenize", "/detokenize", "/v1/messages/count_tokens")
                assert (models.residents["mistral"].used == used) is reads, route
            assert not models.residents["qwen3"].loaded
            previous = (await (await client.post("/v1/responses", json={"model": "mistral", "input": "a"})).json())[
                "id"
            ]
            assert (await client.get(f"/v1/responses/{previous}")).status == 200
            more = {"model": "llama", "input": "b", "previous_response_id": previous, "max_output_tokens": 16}
            assert (await client.post("/v1/responses", json=more)).status == 200
    finally:
        await models.close()


@pytest.mark.parametrize(
    "route", ["/v1/completions", "/v1/chat/completions", "/api/chat", "/api/generate", "/generate"]
)
@pytest.mark.parametrize("more", [{}, {"keep_alive": 0}])
async def test_half_a_character_is_no_reason_to_ask_another_model(route: str, more: dict[str, Any]) -> None:
    more = more if route.startswith("/api/") else {}
    async with board(some(Made(), "a", "b")) as client:
        for model, served_here in (("b", True), ("c", False)):
            body = {**BODIES[route], "model": model, "cache_salt": "\ud800", **more}
            async with client.post(route, json=body) as answer:
                assert ("is not served here" in await answer.text()) != served_here, answer.status
                assert answer.status < 500 and (answer.status == 404) != served_here


async def test_a_tokenizer_that_many_want_is_read_once() -> None:
    read: list[str] = []
    models = some(Made(), "a", "b")
    plan = models.residents["b"].plan

    def reads() -> Any:
        read.append("b")
        return plan.read()

    models.residents["b"].plan = replace(plan, read=reads)
    async with board(models) as client:
        asked = [client.post("/tokenize", json={"model": "b", "prompt": "a"}) for _ in range(8)]
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 8
    assert read == ["b"]


async def test_no_more_wait_for_a_model_than_may_wait() -> None:
    made = Made()
    async with board(models := some(made, "a", "b"), max_queue=2) as client:
        made.started.clear()
        waits = [asyncio.create_task(say(client, "b")) for _ in range(3)]
        await until(lambda: models.residents["b"].waiting == 3)
        handshake = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "MDEyMzQ1Njc4OWFiY2RlZg==",
        }
        for asked in (
            client.post("/v1/completions", json={"prompt": [1], "model": "b"}),
            client.get("/v1/programs/ws?model=b", headers=handshake),
        ):
            async with asked as answer:
                assert answer.status == 429 and "max_queue=2 requests wait for the model b" in await answer.text()
        figures = await (await client.get("/metrics")).text()
        assert 'radixrt_requests_refused_total{limit="max_queue",model_name="b"} 2.0' in figures
        made.started.set()
        assert [status for status, _ in await asyncio.gather(*waits)] == [200] * 3


async def test_what_looks_loads_nothing_and_keeps_nothing() -> None:
    made = Made()
    models = some(made, "a", "b", keep=0.0)
    async with board(models) as client:
        await until(lambda: made["a"].closed)
        for path in ("/v1/tree?model=b", "/v1/runs?model=b", "/server_info?model=b", "/metrics", "/health", "/", "/v1/models", "/api/tags", "/api/ps", "/openapi.json"):  # fmt: skip
            async with client.get(path) as answer:
                assert answer.status == 200, (path, await answer.text())
        assert (await client.post("/flush_cache?model=b")).status == 200
        assert (await client.post("/tokenize", json={"model": "b", "prompt": "a"})).status == 200
        assert made.names == ["a"]
        for path in ("/v1/tree", "/server_info", "/v1/programs/ws"):
            async with client.get(f"{path}?model=a&model=b") as answer:
                assert answer.status == 400 and "model='b': stands twice" in await answer.text()
        assert (await client.post("/flush_cache", json={"model": "\ud800"})).status == 404
        async with client.get("/v1/programs/ws?model=b") as answer:
            assert answer.status == 400 and "ask for an upgrade" in await answer.text()
        assert made.names == ["a"]
        for path in ("/v1/tree?model=x", "/v1/models/x", "/v1/programs/ws?model=x"):
            assert (await client.get(path)).status == 404
        async with client.get("/v1/tree?model=b") as answer:
            seen = await answer.json()
            assert (seen["model"], seen["loaded"], seen["nodes"]) == ("b", False, [])


async def test_who_looks_while_a_model_is_unloaded_sees_one_that_is_not_loaded() -> None:
    made = Made()
    models = some(made, "a", "b")
    async with board(models) as client:
        leaves = asyncio.Event()
        engine, close = made["a"], made["a"].close

        async def closing() -> None:
            engine.error = EngineClosed("the engine is closed")
            await leaves.wait()
            await close()

        engine.close = closing  # type: ignore[method-assign]
        await client.post("/api/generate", json={"model": "a", "keep_alive": 0})
        await until(lambda: engine.error is not None)
        for path in ("/v1/tree?model=a", "/server_info?model=a", "/v1/runs?model=a", "/metrics", "/v1/models"):
            async with client.get(path) as answer:
                assert answer.status == 200, (path, await answer.text())
        leaves.set()
        await until(lambda: not models.residents["a"].loaded)
        assert (await say(client, "a"))[0] == 200


@pytest.mark.parametrize("route", ["/api/show", "/tokenize", "/detokenize", "/v1/messages/count_tokens"])
async def test_a_tokenizer_that_cannot_be_read_is_not_the_fault_of_who_asks(route: str) -> None:
    models = some(Made(), "a", "b")

    def broken() -> Any:
        raise ModelError("b/tokenizer.json: is broken")

    models.residents["b"].plan = replace(models.residents["b"].plan, read=broken)
    async with board(models) as client, client.post(route, json={**BODIES[route], "model": "b"}) as answer:
        assert answer.status == 500
        assert "model='b': cannot be loaded: b/tokenizer.json: is broken" in await answer.text()


async def test_the_lists() -> None:
    made = Made()
    async with board(some(made, "a", "b")) as client:
        data = (await (await client.get("/v1/models")).json())["data"]
        assert [(one["id"], one["loaded"], one["max_model_len"]) for one in data] == [("a", True, 64), ("b", False, 64)]
        assert (await (await client.get("/v1/models/b")).json())["id"] == "b"
        tags = (await (await client.get("/api/tags")).json())["models"]
        assert [one["name"] for one in tags] == ["a", "b"]
        running = (await (await client.get("/api/ps")).json())["models"]
        assert [(one["name"], one["size"]) for one in running] == [("a", GIGABYTE)]


async def test_a_key_is_asked_for_everywhere() -> None:
    async with board(some(Made(), "a", "b"), api_key=(KEY,)) as client:
        assert client.app is not None
        for route in client.app.router.routes():
            path = route.resource.canonical.replace("{", "").replace("}", "") if route.resource else "/"
            if route.method in ("GET", "POST", "DELETE") and path not in ("/health", "/"):
                async with client.request(route.method, path) as answer:
                    assert answer.status == 401, (route.method, path)


async def test_the_figures_of_each_model_stand_beside_each_other() -> None:
    async with board(some(Made(), "a", "b")) as client:
        await say(client, "b")
        families = list(text_string_to_metric_families(await (await client.get("/metrics")).text()))
    assert len({family.name for family in families}) == len(families)
    found = {
        (sample.name, sample.labels.get("model_name")): sample.value for family in families for sample in family.samples
    }
    for name in ("radixrt_engine_up", "radixrt_model_loaded", "vllm:num_requests_running", "radixrt_model_loads_total"):
        assert {("a"), ("b")} == {model for known, model in found if known == name}
    ended = [s for f in families if f.name == "radixrt_requests_finished" for s in f.samples]
    assert [(s.labels["model_name"], s.value) for s in ended] == [("b", 1.0)]


# ---- how long a model stays


@pytest.mark.parametrize(
    ("given", "is_"),
    [(0, 0.0), ("0", 0.0), (-1, math.inf), ("-1m", math.inf), ("5m", 300.0), ("1h30m", 5400.0), (2.5, 2.5), ("1.5s", 1.5), ("90", 90.0),
     ("250ms", 0.25), ("5", 5.0), ("+1.h.5m", 3630.0), ("-0s", 0.0), (1e18, math.inf), ("9" * 100, math.inf), (None, None)],
)  # fmt: skip
def test_keep_alive(given: Any, is_: float | None) -> None:
    assert keep_alive(given) == is_


ODD_TIMES: list[Any] = ["x", "", "+", "5m x", " 5m", "5m\n", "1d", "5M", "1e3", "inf", "nan", "--5m", "1.5.5h", "\u0665m", True, [], {}, 1e300, 10**400, "1" * 3000 + "x", "1h" * 51]  # fmt: skip


@pytest.mark.parametrize("given", ODD_TIMES, ids=range(len(ODD_TIMES)))
def test_a_keep_alive_that_is_no_time_is_refused_at_once(given: Any) -> None:
    """Thousands of digits took minutes, in which nobody else was answered."""
    with pytest.raises(InvalidRequest, match=r"\Akeep_alive="):
        keep_alive(given)


@pytest.mark.parametrize("route", ["chat", "generate", "embed", "embeddings"])
async def test_a_wrong_keep_alive_loads_nothing(route: str) -> None:
    made = Made()
    async with (
        board(some(made, "a", "b")) as client,
        client.post(f"/api/{route}", json={"model": "b", "keep_alive": "soon"}) as answer,
    ):
        assert answer.status == 400 and (await answer.json())["error"].startswith("keep_alive='soon': must be")
        assert made.names == ["a"]


async def test_a_model_goes_when_its_time_is_over_but_not_before_its_requests() -> None:
    made = Made(held=True)
    models = some(made, "a", "b")
    async with board(models) as client:
        stream = asyncio.create_task(say(client, "a"))
        await until(lambda: bool(made["a"].running))
        async with client.post("/api/generate", json={"model": "a", "keep_alive": 0}) as answer:
            assert (await answer.json())["done_reason"] == "unload"
        assert not made["a"].closed
        made["a"].go.set()
        assert (await stream)[0] == 200
        await until(lambda: made["a"].closed and not models.residents["a"].loaded)
        assert (await (await client.get("/api/ps")).json())["models"] == []
        async with client.post("/api/chat", json={"model": "a", "keep_alive": 0}) as answer:
            assert (await answer.json())["done_reason"] == "unload"
        assert made.names == ["a"]  # it is not loaded to be unloaded
        for keep, stays in ((600, True), (-1, True), ("10ms", False)):
            async with client.post("/api/generate", json={"model": "b:latest", "keep_alive": keep}) as answer:
                assert (await answer.json())["done_reason"] == "load"
            (running,) = (await (await client.get("/api/ps")).json())["models"] if stays else [{"expires_at": ""}]
            assert running["expires_at"].startswith("0001" if keep == -1 else "20" if stays else "")
            assert models.residents["b"].loaded or not stays
        await until(lambda: not models.residents["b"].loaded)


async def test_a_connection_that_is_quiet_keeps_no_model() -> None:
    made = Made()
    models = some(made, "a", "b")
    async with board(models) as client, client.ws_connect("/v1/programs/ws?model=b") as quiet:
        assert models.residents["b"].sockets == 1
        busy = await client.ws_connect("/v1/programs/ws?model=a")
        await busy.send_json({"op": "open", "program": "p", "version": 1})
        await until(lambda: bool(made["a"].heard))
        for name in "ba":
            async with client.post("/api/generate", json={"model": name, "keep_alive": 0}) as answer:
                assert (await answer.json())["done_reason"] == "unload"
        assert (await quiet.receive()).type is aiohttp.WSMsgType.CLOSE and quiet.close_code == 1001
        await until(lambda: not models.residents["b"].loaded)
        assert models.residents["a"].loaded and not busy.closed  # it has a program
        await busy.send_json({"op": "close", "program": "p"})
        assert (await busy.receive()).type is aiohttp.WSMsgType.CLOSE
        await until(lambda: not models.residents["a"].loaded)


# ---- what the command line names


def test_names(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert split("x=/m/y") == ("x", "/m/y") and split(str(odd)) == ("", str(odd)) and split("/m/y") == ("", "/m/y")
    assert read_models(["x=/m/y", "org/z", "w="]) == [Named("x", "/m/y"), Named("org/z", "org/z"), Named("w", None)]
    assert read_models([str(odd.parent)], "n") == [Named("n", str(odd.parent))]
    for given, says in ((["x=a", "x=b"], "the name x is taken"), (["my model"], "must be letters, digits")):
        with pytest.raises(InvalidRequest, match=says):
            read_models(given)


def test_the_memory_is_shared_out_evenly(folders: dict[str, Path]) -> None:
    named = [Named(name, str(path)) for name, path in folders.items()]
    config = ServerConfig(models_memory=1.0)
    models = make_models(named, config, {})
    pools = {name: one.info.pool_tokens for name, one in models.residents.items()}
    assert all(0 < one.need < GIGABYTE for one in models.residents.values())
    assert (
        make_models(named[::-1], config, {}).residents["llama"].info.pool_tokens == pools["llama"]
    )  # whatever comes first
    fewer = make_models(named, ServerConfig(models_memory=1.0, max_loaded_models=1), {})
    assert fewer.residents["llama"].info.pool_tokens >= pools["llama"]
    assert make_models(named, config, {"max_total_tokens": 77}).residents["qwen3"].info.pool_tokens == 77
    for settings, says in (
        ({"models_memory": 0.1}, "the model llama alone takes"),
        ({"preload": ("lama",)}, "did you mean 'llama'"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            make_models(named, ServerConfig(**settings), {})
    with pytest.raises(ModelError, match="the model gone: "):
        make_models([Named("gone", "/nowhere/at/all")], config, {})


async def test_in_processes_of_their_own(folders: dict[str, Path]) -> None:
    named = [Named(name, str(path)) for name, path in list(folders.items())[:2]]
    models = make_models(named, ServerConfig(max_loaded_models=1), {"max_total_tokens": 512})
    async with board(models) as client:
        first = models.residents["llama"]
        pid = first.engine.pid  # type: ignore[union-attr]
        assert first.held == first.info.memory > 512 and first.info.settings["max_total_tokens"] == 512
        assert (await say(client, "qwen3"))[0] == 200
        assert first.engine is None and first.held == 0
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        planned = make_models(named, ServerConfig(), {"max_total_tokens": 512}).residents["qwen3"].info
        assert replace(planned, memory=0) == replace(models.residents["qwen3"].info, memory=0, kernels=planned.kernels)
