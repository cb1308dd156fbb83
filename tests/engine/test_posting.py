"""Whoever drives requests from the engine's own thread: ``AsyncEngine.post`` and ``listen``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from radixrt import AsyncEngine, Engine, EngineClosed, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def run(make_engine: Any, body: Callable[[AsyncEngine], Any]) -> Any:
    async def main() -> Any:
        async with AsyncEngine(engine=make_engine()) as engine:
            return await asyncio.wait_for(body(engine), timeout=60)

    return asyncio.run(main())


def test_a_chain_of_requests_runs_on_the_engines_thread(make_engine: Any) -> None:
    """Each is submitted by the listener of the one before, with no caller in between."""
    expected = make_engine().generate(list("abcde"), PARAMS)

    async def body(engine: AsyncEngine) -> list[Any]:
        done: Future[list[Any]] = Future()
        outputs: list[Any] = []
        threads: set[str] = set()

        def start(inner: Engine, left: str) -> None:
            threads.add(threading.current_thread().name)

            def listen(item: Any) -> None:
                if item.output is not None:
                    outputs.append(item.output)
                    start(inner, left[1:]) if left[1:] else done.set_result(outputs)

            engine.listen(inner.submit(inner.prepare(left[0], PARAMS)), listen)

        engine.post(lambda inner: start(inner, "abcde"))  # the engine has nothing to do and waits
        found = await asyncio.wrap_future(done)
        assert threads == {"radixrt-engine"}
        return found

    assert [o.token_ids for o in run(make_engine, body)] == [o.token_ids for o in expected]


def test_posts_run_in_order_from_any_thread_and_their_errors_are_logged(make_engine: Any, caplog: Any) -> None:
    async def body(engine: AsyncEngine) -> list[int]:
        seen: list[int] = []

        def failing(_: Engine) -> None:
            raise KeyboardInterrupt("mine")

        def many() -> None:
            for at in range(50):
                engine.post(lambda _, at=at: seen.append(at))
                engine.post(failing)

        await asyncio.to_thread(many)
        assert await engine.call(lambda inner: inner.has_work) is False  # it lives
        return seen

    assert run(make_engine, body) == list(range(50))
    assert [record.message for record in caplog.records].count("a posted call failed") == 50


def test_a_listener_that_raises_loses_its_request_and_hurts_no_other(make_engine: Any, caplog: Any) -> None:
    expected = make_engine().generate("b", PARAMS)[0].token_ids

    async def body(engine: AsyncEngine) -> Any:
        calls: list[Any] = []

        def bad(item: Any) -> None:
            calls.append(item)
            raise RuntimeError("mine")

        engine.post(lambda inner: engine.listen(inner.submit(inner.prepare("a", PARAMS)), bad))
        output = (await engine.generate("b", PARAMS))[0]
        assert not await engine.call(lambda inner: inner.has_work and bool(inner.step() and inner.has_work))
        assert len(calls) == 1
        return output.token_ids

    assert run(make_engine, body) == expected
    assert "a listener failed" in caplog.text


def test_when_the_engine_stops_everyone_is_told(make_engine: Any) -> None:
    async def main() -> list[Any]:
        told: list[Any] = []
        engine = await AsyncEngine(engine=make_engine()).start()
        long = SamplingParams(max_tokens=400, ignore_eos=True)

        def listen(item: Any) -> None:
            if isinstance(item, BaseException):
                told.append(item)
                engine.listen("another", told.append)  # not heard of before: told at once
                with pytest.raises(EngineClosed):
                    engine.post(lambda _: None)

        def late(inner: Engine) -> None:
            with pytest.raises(EngineClosed):
                inner.submit(ready)
            told.append("late")

        ready = await engine.call(lambda inner: inner.prepare("a", long))

        def begin(inner: Engine) -> None:
            engine.listen(inner.submit(ready), listen)
            engine._calls.put(None)  # as close() does
            engine.post(late)

        engine.post(begin)
        await engine.close()
        return told

    told = asyncio.run(main())
    assert [type(item) for item in told] == [EngineClosed, EngineClosed, str]


def test_post_needs_a_running_engine(make_engine: Any) -> None:
    async def main() -> None:
        engine = AsyncEngine(engine=make_engine())
        with pytest.raises(EngineClosed, match="not started"):
            engine.post(lambda _: None)
        async with engine:
            pass
        with pytest.raises(EngineClosed, match="closed"):
            engine.post(lambda _: None)

    asyncio.run(main())
