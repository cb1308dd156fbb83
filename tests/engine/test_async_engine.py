"""AsyncEngine gives what Engine gives, to many consumers at once, and outlives every one that goes away."""

from __future__ import annotations

import asyncio
import random

import pytest

from radixrt import AsyncEngine, EngineClosed, FinishReason, InvalidRequest, SamplingParams
from tests.tiny import VOCAB

rng = random.Random(2)
IDS = [rng.randrange(8, VOCAB) for _ in range(200)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def run(make_engine, body, **settings):
    async def main():
        async with AsyncEngine(engine=make_engine(**settings)) as engine:
            return await asyncio.wait_for(body(engine), timeout=60)

    return asyncio.run(main())


def test_same_answers_as_the_synchronous_engine(make_engine) -> None:
    prompts = [IDS[i : i + 20] for i in range(10)]
    expected = [o.token_ids for o in make_engine().generate(prompts, PARAMS)]

    async def body(engine: AsyncEngine):
        async def one(ids):
            deltas = [delta async for delta in engine.stream(ids, PARAMS)]
            assert deltas[-1].output is not None
            assert tuple(t for d in deltas for t in d.token_ids) == deltas[-1].output.token_ids
            return deltas[-1].output.token_ids

        streamed = await asyncio.gather(*(one(ids) for ids in prompts))
        whole = await engine.generate(prompts, PARAMS)
        return list(streamed), [o.token_ids for o in whole]

    assert run(make_engine, body) == (expected, expected)


def test_a_consumer_that_goes_away_frees_everything(make_engine) -> None:
    async def body(engine: AsyncEngine):
        async def impatient(after: int):
            seen = 0
            stream = engine.stream(IDS[after : after + 30], SamplingParams(max_tokens=200, ignore_eos=True))
            try:
                async for _ in stream:
                    seen += 1
                    if seen > after % 5:
                        return
            finally:
                await stream.aclose()

        tasks = [asyncio.ensure_future(impatient(i)) for i in range(20)]
        doomed = [asyncio.ensure_future(engine.generate(IDS[i : i + 9], PARAMS)) for i in range(20)]
        await asyncio.sleep(0)
        for task in doomed:
            task.cancel()
        await asyncio.gather(*tasks, *doomed, return_exceptions=True)
        answer = (await engine.generate(IDS[:9], PARAMS))[0]
        stats = await engine.stats()
        await engine.call(lambda e: e.check_integrity())
        assert not engine._listeners
        return answer.finish_reason, stats.running, stats.waiting

    assert run(make_engine, body) == (FinishReason.LENGTH, 0, 0)


def test_errors_reach_their_caller_and_nobody_else(make_engine) -> None:
    async def body(engine: AsyncEngine):
        good = asyncio.ensure_future(engine.generate(IDS[:20], PARAMS))
        with pytest.raises(InvalidRequest, match="prompt: is empty"):
            await engine.generate(["x", ""], PARAMS)
        with pytest.raises(InvalidRequest, match="vocabulary"):
            async for _ in engine.stream([VOCAB + 5]):
                pass
        return len((await good)[0].token_ids)

    assert run(make_engine, body) == 12


def test_abort_by_id(make_engine) -> None:
    async def body(engine: AsyncEngine):
        reasons = []
        async for delta in engine.stream(IDS[:20], SamplingParams(max_tokens=400, ignore_eos=True), request_id="r"):
            if len(delta.token_ids):
                await engine.abort("r")
            if delta.output is not None:
                reasons.append(delta.output.finish_reason)
        return reasons, await engine.abort("r")

    assert run(make_engine, body) == ([FinishReason.ABORT], False)


def test_closing_ends_waiting_streams_with_an_error(make_engine) -> None:
    async def main():
        engine = await AsyncEngine(engine=make_engine()).start()
        waiting = asyncio.ensure_future(engine.generate(IDS[:9], SamplingParams(max_tokens=450, ignore_eos=True)))
        while not (await engine.stats()).running:
            pass
        await engine.close()
        with pytest.raises(EngineClosed):
            await waiting
        with pytest.raises(EngineClosed):
            await engine.generate("x")

    asyncio.run(main())


def test_an_engine_that_dies_tells_everyone(make_engine, monkeypatch) -> None:
    engine = make_engine()

    async def main():
        front = await AsyncEngine(engine=engine).start()
        monkeypatch.setattr(engine, "step", lambda: 1 / 0)
        with pytest.raises(EngineClosed, match="ZeroDivisionError"):
            await front.generate("x")
        with pytest.raises(EngineClosed):
            await front.stats()
        await front.close()

    asyncio.run(main())


def test_a_model_that_cannot_be_loaded_is_an_error_of_start() -> None:
    from radixrt import ModelError

    async def main():
        with pytest.raises(ModelError):
            await AsyncEngine("/no/such/model").start()

    asyncio.run(main())


@pytest.mark.parametrize("error", [StopIteration, SystemExit, KeyboardInterrupt, asyncio.CancelledError, ValueError])
def test_a_call_that_raises_anything_is_answered(error: type[BaseException], make_engine) -> None:
    def failing(_):
        raise error("no")

    async def body(engine: AsyncEngine):
        with pytest.raises((RuntimeError, ValueError), match="no"):
            await engine.call(failing)
        return len((await engine.generate(IDS[:5], PARAMS))[0].token_ids)

    assert run(make_engine, body) == 12


def test_an_engine_closed_under_the_front_tells_everyone(make_engine) -> None:
    async def body(engine: AsyncEngine):
        waiting = asyncio.ensure_future(engine.generate(IDS[:9], SamplingParams(max_tokens=450, ignore_eos=True)))
        while not (await engine.stats()).running:
            pass
        await engine.call(lambda e: e.close())
        with pytest.raises(EngineClosed):
            await waiting

    engine = make_engine
    made = []

    def keep(**settings):
        made.append(engine(**settings))
        made[-1].check_integrity = lambda: None
        return made[-1]

    run(keep, body)


def test_settings_beside_a_made_engine_are_refused(make_engine) -> None:
    with pytest.raises(InvalidRequest, match="engine: is made already"):
        AsyncEngine(engine=make_engine(), max_running_requests=1)
    with pytest.raises(InvalidRequest, match="must be an Engine, not str"):
        AsyncEngine(engine="x")  # type: ignore[arg-type]


def test_starting_twice_loads_once_and_a_failure_stays_one(make_engine) -> None:
    from radixrt import ModelError

    async def main():
        front = AsyncEngine(engine=make_engine())
        await asyncio.gather(front.start(), front.start())
        assert len((await front.generate(IDS[:5], PARAMS))[0].token_ids) == 12
        await front.close()
        broken = AsyncEngine("/no/such/model")
        for _ in range(2):
            with pytest.raises(ModelError):
                await broken.start()
        await broken.close()

    asyncio.run(main())


def test_a_closed_event_loop_ends_its_requests(make_engine) -> None:
    engine = make_engine()
    front = AsyncEngine(engine=engine)

    async def begin():
        await front.start()
        stream = front.stream(IDS[:9], SamplingParams(max_tokens=450, ignore_eos=True))
        await anext(stream)
        keep.append(stream)

    keep: list = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()

    async def later():
        while (await front.stats()).running:
            pass
        return await front.stats()

    stats = asyncio.run(later())
    assert stats.generated_tokens < 450
    asyncio.run(front.close())


def test_more_prompts_than_the_queue_holds_and_errors_name_their_prompt(make_engine) -> None:
    async def body(engine: AsyncEngine):
        outputs = await engine.generate([IDS[i : i + 5] for i in range(30)], PARAMS)
        with pytest.raises(InvalidRequest, match=r"prompts\[1\]: prompt: is empty"):
            await engine.generate(["a", ""], PARAMS)
        return len(outputs)

    assert run(make_engine, body, max_waiting_requests=4) == 30
