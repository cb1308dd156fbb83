"""Several models behind one server: each is loaded when it is named, and unloaded for another, and no answer is another than that of one model alone."""

from __future__ import annotations

import asyncio
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import hypothesis
import pytest
import pytest_asyncio
from hypothesis import strategies

from radixrt import AsyncEngine, InvalidRequest, ModelError
from radixrt.errors import EngineClosed
from radixrt.server.client import EngineDied
from radixrt.server.local import LocalClient
from tests.server import several
from tests.server.person import sat, seen
from tests.server.several import (
    GIGABYTE,
    GRAPH,
    Made,
    board,
    engine_settings,
    real,
    say,
    some,
    use,
)
from tests.server.stand import error_of, reachable, served, until

folders = several.folders


# ---- loading and unloading


async def test_each_is_loaded_when_it_is_named_and_those_that_wait_together_load_it_once() -> None:
    made = Made()
    async with board(some(made, "a", "b", "c")) as client:
        assert made.names == ["a"]
        made.started.clear()
        asked = [asyncio.create_task(say(client, name)) for name in "bcbcbc"]
        await until(lambda: sorted(made.names) == ["a", "b", "c"])
        assert (await say(client, None))[1]["model"] == "a"  # those that are loading hold up nobody
        made.started.set()
        answers = await asyncio.gather(*asked)
        assert [(status, body["model"]) for status, body in answers] == [(200, name) for name in "bcbcbc"]
        assert sorted(made.names) == ["a", "b", "c"]


@pytest.mark.parametrize("bound", [{"most": 2}, {"limit": 2 * GIGABYTE}])
async def test_the_least_recently_used_is_unloaded_first(bound: dict[str, int]) -> None:
    made = Made()
    models = some(made, "a", "b", "c", **bound)
    async with board(models) as client:
        await say(client, "b")
        await say(client, "a")
        await say(client, "c")
        assert [engine.closed for _, engine in made.engines] == [False, True, False] and made.names == ["a", "b", "c"]
        await say(client, "b")
        assert made["a"].closed and not made["c"].closed and made.names == ["a", "b", "c", "b"]
        assert models.held <= 2 * GIGABYTE


async def test_a_stream_is_never_cut_and_who_waits_for_its_room_is_told_what_is_in_the_way() -> None:
    made = Made(held=True)
    models = some(made, "a", "b", most=1, wait=0.05, patience=0.0)
    async with board(models) as client:
        stream = asyncio.create_task(say(client, "a"))
        await until(lambda: bool(made["a"].running))
        async with client.post("/v1/completions", json={"prompt": [1], "model": "b"}) as answer:
            assert answer.status == 503 and int(answer.headers["Retry-After"]) > 0
            error = await error_of(answer)
            assert error["code"] == "model_busy" and "in the way: a (1.00 GB, 1 requests)" in error["message"]
        assert made.names == ["a"] and made["a"].running
        models.wait = 20.0
        waits = asyncio.create_task(say(client, "b"))
        await until(lambda: models.residents["b"].waiting == 1)
        made["a"].go.set()
        assert (await stream)[1]["choices"][0]["text"] == "one two three"
        await until(lambda: made.names == ["a", "b"])
        made["b"].go.set()
        assert (await waits)[0] == 200


async def test_who_waits_gets_its_turn_though_the_other_is_used_without_a_pause() -> None:
    made = Made(held=True)
    models = some(made, "a", "b", most=1, patience=0.0)
    async with board(models) as client:
        first = asyncio.create_task(say(client, "a"))
        await until(lambda: bool(made["a"].running))
        other = asyncio.create_task(say(client, "b"))
        await until(lambda: models.residents["a"].closing)
        later = asyncio.create_task(say(client, "a"))  # comes behind, and waits
        await until(lambda: models.residents["a"].waiting == 1)
        made["a"].go.set()
        await until(lambda: made.names == ["a", "b"])
        made["b"].go.set()
        await until(lambda: made.names == ["a", "b", "a"])
        made["a"].go.set()
        assert [status for status, _ in await asyncio.gather(first, other, later)] == [200, 200, 200]


async def test_what_nobody_waits_for_any_more_takes_no_room() -> None:
    made = Made(held=True)
    models = some(made, "a", "b", most=1, patience=0.0)
    async with board(models) as client:
        stream = asyncio.create_task(say(client, "a"))
        await until(lambda: bool(made["a"].running))
        waits = asyncio.create_task(use(models, "b"))
        await until(lambda: models.residents["a"].closing)
        waits.cancel()
        await until(lambda: models.residents["a"].open)
        made["a"].go.set()
        assert (await stream)[0] == 200 and (await say(client, "a"))[0] == 200
        assert made.names == ["a"] and models.residents["b"].loading is None


@pytest.mark.parametrize(
    ("error", "status"), [(ModelError("b.gguf: is broken"), 500), (EngineDied("it was killed"), 503), (KeyError("x"), 500)]
)  # fmt: skip
async def test_a_load_that_fails_is_told_harms_nobody_and_is_tried_again(error: Exception, status: int) -> None:
    made = Made()
    made.broken["b"] = error
    models = some(made, "a", "b", most=2)
    async with board(models) as client:
        for answer in await asyncio.gather(*(say(client, name) for name in "bab")):
            assert answer[0] in (200, status)
            if answer[0] == status:
                told = answer[1]["error"]
                assert told["code"] == "model_not_loaded" and "'x'" not in told["message"]
                assert isinstance(error, KeyError) or str(error) in told["message"]
        assert models.held == GIGABYTE and (await say(client, "a"))[0] == 200
        made.broken.clear()
        assert (await say(client, "b"))[0] == 200


async def test_a_model_that_takes_more_than_foretold_is_counted_with_what_it_takes() -> None:
    made = Made()
    models = some(made, "a", "b", "c", limit=3 * GIGABYTE)
    make = made.make

    def larger(name: str) -> Any:
        engine = make(name)
        engine.info = replace(engine.info, memory=2 * GIGABYTE)
        return engine

    made.make = larger  # type: ignore[method-assign]
    async with board(models) as client:
        assert models.held == 2 * GIGABYTE
        await say(client, "b")
        assert made["a"].closed and models.held == 2 * GIGABYTE


async def test_a_crash_is_that_of_one_model_which_is_loaded_anew() -> None:
    made = Made()
    async with board(some(made, "a", "b")) as client:
        await say(client, "b")
        made["b"].error = EngineDied("it fell over")
        assert (await say(client, "b"))[0] == 503 and (await say(client, "a"))[0] == 200
        made["b"].healthy = False
        async with client.get("/health") as answer:
            assert answer.status == 200 and await answer.json() == {"status": "degraded"}
        made["a"].healthy = False
        assert (await client.get("/health")).status == 503
        for name in "ba":  # a process that stays down would keep its model away for ever
            assert (await say(client, name))[0] == 200
        assert made.names == ["a", "b", "b", "a"] and made.engines[1][1].closed and made.engines[0][1].closed
        async with client.get("/health") as answer:
            assert answer.status == 200 and await answer.json() == {"status": "ok"}


async def test_a_model_that_is_being_unloaded_is_not_taken_for_a_broken_one() -> None:
    made = Made()
    models = some(made, "a", "b")
    async with board(models) as client:
        asked, answers = asyncio.Event(), asyncio.Event()

        async def stats() -> dict[str, Any]:
            asked.set()
            await answers.wait()
            raise EngineClosed("the engine is closed")

        made["a"].stats = stats  # type: ignore[method-assign]
        health = asyncio.create_task(client.get("/health"))
        await asked.wait()
        models.residents["a"].keep = 0.0
        await use(models, "a")
        models._unload(models.residents["a"])
        await until(lambda: not models.residents["a"].loaded)
        answers.set()
        assert (await health).status == 200


async def test_whoever_waits_when_the_server_ends_is_told() -> None:
    made = Made()
    models = some(made, "a", "b")
    async with board(models) as client:
        made.started.clear()
        waits = asyncio.create_task(say(client, "b"))
        await until(lambda: made.names == ["a", "b"])
        await models.close()
        status, body = await waits
        assert (status, body["error"]["code"]) == (503, "engine_closed")


async def test_the_room_of_a_load_that_fails_is_free_when_its_engine_is_gone() -> None:
    made = Made()
    made.broken["b"] = ModelError("it is broken")
    models = some(made, "a", "b", "c", most=2)
    make, gone, asked = made.make, asyncio.Event(), asyncio.Event()

    def lingers(name: str) -> Any:
        engine = make(name)

        async def close() -> None:
            asked.set()
            await gone.wait()

        if name == "b":
            engine.close = close
        return engine

    made.make = lingers  # type: ignore[method-assign]
    async with board(models) as client:
        fails = asyncio.create_task(say(client, "b"))
        await asked.wait()
        assert models.held == 2 * GIGABYTE
        gone.set()
        assert (await fails)[0] == 500 and models.held == GIGABYTE


def test_what_does_not_fit_is_an_error_at_the_start() -> None:
    for settings, says in (
        ({"limit": GIGABYTE - 1}, "the model a alone takes 1.00 GB"),
        ({"limit": GIGABYTE, "preload": ["a", "b"]}, "take 2.00 GB together"),
        ({"most": 1, "preload": ["a", "b"]}, "max_loaded_models=1"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            some(Made.__new__(Made), "a", "b", **settings)


async def test_what_is_preloaded() -> None:
    made = Made()
    models = some(made, "a", "b", "c", preload=["c", "b"])
    async with board(models):
        assert made.names == ["c", "b"]


# ---- every order of events

_STEPS = strategies.lists(
    strategies.tuples(strategies.sampled_from(["use", "end", "cancel", "flip", "look"]), strategies.integers(0, 5)), max_size=40
)  # fmt: skip


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    _STEPS, strategies.integers(1, 3), strategies.sampled_from([0.0, 5.0]), strategies.sampled_from([0.0, math.inf])
)
def test_whatever_happens_the_limits_hold_and_nobody_who_uses_a_model_loses_it(
    steps: list[tuple[str, int]], most: int, patience: float, keep: float
) -> None:
    async def run() -> None:
        made = Made()
        models = some(made, "a", "b", "c", most=most, limit=2 * GIGABYTE, patience=patience, keep=keep)
        await models.start()
        users: list[tuple[asyncio.Task[None], asyncio.Event, str]] = []
        gone: list[asyncio.Task[None]] = []

        def check() -> None:
            assert models.held <= 2 * GIGABYTE
            assert sum(not engine.closed and engine.started for _, engine in made.engines) <= min(most, 2)
            for one in models.residents.values():
                assert not one.leases or (one.engine is not None and not made[one.name].closed)

        for what, number in steps:
            if what == "use":
                held = asyncio.Event()
                users.append((asyncio.create_task(use(models, "abc"[number % 3], held)), held, "abc"[number % 3]))
            elif users and what == "end":
                users[number % len(users)][1].set()
            elif users and what == "cancel":
                gone.append(users.pop(number % len(users))[0])
                gone[-1].cancel()
            elif what == "flip":
                (made.started.clear if made.started.is_set() else made.started.set)()
            for _ in range(number):
                await asyncio.sleep(0)
                check()
        made.started.set()
        for _, held, _ in users:
            held.set()
        async with asyncio.timeout(20):
            await asyncio.gather(*(task for task, _, _ in users))  # everyone gets its turn
            await asyncio.gather(*gone, return_exceptions=True)
        check()
        assert not any(one.leases or one.waiting for one in models.residents.values())
        await models.close()
        assert all(engine.closed for _, engine in made.engines if engine.started)

    asyncio.run(run())


# ---- the same answers


def questions(folders: dict[str, Path]) -> list[tuple[str, str, dict[str, Any]]]:
    """Route, model and body of requests whose answer is always the same."""
    chance = random.Random(7)
    found = []
    for i in range(36):
        model = chance.choice(list(folders))
        text = f"question {chance.randrange(8)} " * chance.randrange(1, 6)
        body: dict[str, Any] = {
            "max_tokens": chance.randrange(1, 12),
            "temperature": chance.choice([0, 1]),
            "seed": i,
            "ignore_eos": True,
        }
        route = chance.choice(["chat/completions", "completions"])
        body |= {"messages": [{"role": "user", "content": text}]} if "chat" in route else {"prompt": text}
        found.append((f"/v1/{route}", model, {**body, "stream": chance.random() < 0.4}))
    return found


async def said(client: Any, route: str, body: dict[str, Any]) -> str:
    """The text of an answer, streamed or not."""
    async with client.post(route, json=body) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        if not body["stream"]:
            choice = json.loads(text)["choices"][0]
            return str(choice["message"]["content"] if "chat" in route else choice["text"])
        lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
        return "".join(
            (choice["delta"].get("content") or "") if "chat" in route else choice["text"] for choice in choices
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(folders: dict[str, Path]) -> list[str]:
    """What each model says on a server of its own."""
    found: dict[int, str] = {}
    asked = list(enumerate(questions(folders)))
    for name in folders:
        engine = LocalClient(AsyncEngine(**engine_settings(folders, name)))
        await engine.start()
        try:
            async with served(engine, served_model_name=(name,)) as client:
                for i, (route, model, body) in asked:
                    if model == name:
                        found[i] = await said(client, route, {**body, "model": name})
        finally:
            await engine.close()
    return [found[i] for i in range(len(found))]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("most", "patience"), [(1, 0.0), (2, 5.0)])
async def test_many_at_once_get_the_answers_of_each_model_alone(
    folders: dict[str, Path], alone: list[str], most: int, patience: float
) -> None:
    models = real(folders, most=most, patience=patience)
    async with board(models) as client:
        asked = [said(client, route, {**body, "model": model}) for route, model, body in questions(folders)]
        assert await asyncio.gather(*asked) == alone
        assert sum(one.loaded for one in models.residents.values()) <= most
        assert sum(one.unloads for one in models.residents.values()) >= 3 - most


@pytest.mark.asyncio(loop_scope="module")
async def test_programs_run_on_the_model_they_name(folders: dict[str, Path]) -> None:
    from lang import RuntimeEndpoint, function, gen
    from lang.errors import BackendError

    @function
    def greet(s: Any) -> None:
        s += "hello"
        s += gen("more", max_tokens=5, temperature=0, ignore_eos=True)

    said: dict[str, set[str]] = {name: set() for name in folders}
    models = real(folders, most=1)
    await models.start()
    try:
        async with reachable(models) as address:
            for _ in range(2):
                for name in folders:
                    backend = RuntimeEndpoint(address, model=name)
                    state = await greet.arun(backend=backend)
                    said[name].add(state["more"])
                    assert models.residents[name].sockets == 1 and models.residents[name].loaded
                    # it stays connected, and still lets the next one have the room
            graph = {"version": 1, "stream": False, "nodes": GRAPH, "model": "qwen3"}
            async with aiohttp.ClientSession() as session, session.post(f"{address}/v1/programs", json=graph) as answer:
                assert answer.status == 200, await answer.text()
            with pytest.raises(BackendError, match="model='qwen4': is not served here; did you mean 'qwen3'"):
                await RuntimeEndpoint(address, model="qwen4").start()
    finally:
        await models.close()
    assert all(len(texts) == 1 for texts in said.values()) and len(set.union(*said.values())) == 3


@seen
@pytest.mark.asyncio(loop_scope="module")
async def test_the_page_shows_the_tree_of_the_model_that_is_chosen(folders: dict[str, Path]) -> None:
    models = real(folders)
    await models.start()
    choose = "models.value = '{}'; models.dispatchEvent(new Event('change'))"
    try:
        async with sat(models) as person:
            await person.sees("!document.getElementById('models').hidden")
            await person.page.run(choose.format("qwen3"))
            await person.sees("document.getElementById('health').textContent === 'not loaded'")
            assert not models.residents["qwen3"].loaded
            await person.says("hello")
            await person.sees("document.querySelectorAll('#tree [role=treeitem]').length > 0")
            assert models.residents["qwen3"].loads == 1
            await person.page.run(choose.format("llama"))
            await person.sees("document.getElementById('tree-says').textContent === 'The cache is empty.'")
    finally:
        await models.close()
