"""The loop: every document ends as one row or one error, whatever the order of answers, and what is in flight is bounded."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest
from radixrt.jobs.backends import BackendDown
from radixrt.jobs.documents import Document, given_documents
from radixrt.jobs.journal import JobStopped, Usage
from radixrt.jobs.prompt import Layout
from radixrt.jobs.run import Memory, Plan, in_thread, inline, run_job
from radixrt.jobs.slots import BEGUN, NEW, Slots
from radixrt.jobs.stats import MOST_POINTS, Stats
from radixrt.jobs.target import load_target
from tests.jobs.standin import SCHEMA, StandIn, documents, text_of, wrong


def plan(**changes: Any) -> Plan:
    target = load_target(schema=changes.pop("schema", SCHEMA))
    return Plan(target=target, layout=Layout(target), **{"max_tokens": 100, **changes})


async def run(source: Any, backend: StandIn, **changes: Any) -> tuple[Memory, Stats]:
    sink, stats = Memory(), Stats()
    await run_job(inline(given_documents(source)), plan(**changes), backend, sink, stats)
    assert stats.rows == len(sink.rows) and stats.failed == len(sink.errors)
    return sink, stats


@given(count=st.integers(0, 40), most=st.integers(1, 20), shuffle=st.integers(0, 1000), pool=st.integers(600, 5000))
@settings(max_examples=30, deadline=None)
def test_rows_depend_on_nothing_that_runs_beside_them(count: int, most: int, shuffle: int, pool: int) -> None:
    alone, _ = asyncio.run(run(documents(count), StandIn(wrong=wrong, most=1)))
    backend = StandIn(wrong=wrong, most=most, shuffle=shuffle, pool_tokens=pool)
    beside, stats = asyncio.run(run(documents(count), backend))
    assert (beside.rows, beside.errors) == (alone.rows, alone.errors)
    assert stats.rows + stats.failed == stats.read == count
    assert backend.most_running <= most


async def test_as_many_are_in_flight_as_may() -> None:
    backend = StandIn(most=7)
    await run([f"text {i}" for i in range(50)], backend)
    assert backend.most_running == 7
    backend = StandIn(most=7)
    await run([f"text {i}" for i in range(50)], backend, concurrency=3)
    assert backend.most_running == 3


async def test_the_pool_bounds_what_is_in_flight() -> None:
    shared = await StandIn().prompt_tokens(plan().layout.document(""))
    backend = StandIn(most=100, pool_tokens=shared + 1000)
    await run([f"number {i} " + "x" * 290 for i in range(50)], backend)
    assert 2 <= backend.most_running_tokens // 400 <= 4


async def test_an_answer_that_is_wrong_is_asked_for_again_with_what_is_wrong() -> None:
    def reply(text: str, tries: int) -> str | None:
        return ['{"first":1', "cut", None][tries]

    backend = StandIn(wrong=reply)
    sink, stats = await run(["spam"], backend, retries=2)
    assert [row["value"]["first"] for row in sink.rows] == ["spam"]
    assert stats.usage == Usage(
        prompt=stats.usage.prompt, output=stats.usage.output, cached=stats.usage.cached,
        requests=3, parts=1, retries=2, unique=stats.usage.unique,
    )  # fmt: skip
    second, third = (backend.prompts[i].turns[-2:] for i in (1, 2))
    assert (second[0].role, second[0].content) == ("assistant", '{"first":1')
    assert "is not JSON" in second[1].content
    assert (third[0].content, "cut off" in third[1].content) == ("cut", True)
    assert len(set(backend.seeds)) == 3


async def test_a_row_that_stays_wrong_is_an_error_with_its_last_answer() -> None:
    sink, _ = await run([("a", "x"), ("b", "y")], StandIn(wrong=lambda text, tries: "cut" if text == "x" else None))
    assert sink.errors == [{"id": "a", "index": 0, "error": "cut off", "answer": "cut"}]
    assert [row["id"] for row in sink.rows] == ["b"]
    sink, _ = await run([("a", "x")], StandIn(wrong=lambda text, tries: "refuse"))
    assert sink.errors == [{"id": "a", "index": 0, "error": "document: is refused"}]
    sink, _ = await run([("a", "x")], StandIn(wrong=lambda text, tries: "refuse" if tries else "cut"))
    assert sink.errors == [
        {"id": "a", "index": 0, "error": "cut off; trying again: document: is refused", "answer": "cut"}
    ]


async def test_a_validator_beyond_the_schema() -> None:
    from pydantic import BaseModel, field_validator

    class Sized(BaseModel):
        first: str
        size: int
        draw: int

        @field_validator("size")
        @classmethod
        def even(cls, size: int) -> int:
            if size % 2:
                raise ValueError("must be even")
            return size

    backend = StandIn(
        wrong=lambda text, tries: '{"first":"mended","size":2,"draw":0}' if tries and text == "abc" else None
    )
    sink, _ = await run(["ab", "abc", "abcde"], backend, schema=Sized)
    assert [(row["id"], row["value"]["size"]) for row in sink.rows] == [("row-1", 2), ("row-2", 2)]
    assert [(row["id"], row["error"]) for row in sink.errors] == [("row-3", "size: Value error, must be even")]
    assert any("size: Value error, must be even" in prompt.turns[-1].content for prompt in backend.prompts)


async def test_documents_that_are_none_are_errors_and_ask_nothing() -> None:
    backend = StandIn()
    sink, _ = await run([("a", ""), ("b", "x\0"), ("c", "fine"), ("c", "again"), ("d", "\ud800")], backend)
    assert [(row["id"], row["index"]) for row in sink.errors] == [("a", 0), ("b", 1), ("c", 3), ("d", 4)]
    assert sink.errors[0]["error"] == "is empty" and "id 'c'" in sink.errors[2]["error"]
    assert backend.asked == ["fine"]


LISTS = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string"}}, "title": {"type": "string"}},
    "required": ["names", "title"],
    "additionalProperties": False,
}


def listed(text: str, tries: int) -> str:
    words = text.split()
    return json.dumps({"names": words[:2], "title": words[0]})


async def test_a_document_in_parts() -> None:
    shared = await StandIn().prompt_tokens(plan(schema=LISTS).layout.document(""))
    long = " ".join(f"Word{i} is here." for i in range(100))
    backend = StandIn(wrong=listed, context_length=shared + 100 + 64 + 400)
    sink, stats = await run(
        [("short", "a b"), ("long", long), ("after", "c d")], backend, schema=LISTS, retries=0, overlap=0,
        confidence=True, evidence=True,
    )  # fmt: skip
    assert [row["id"] for row in sink.rows] == ["short", "long", "after"]
    row = sink.rows[1]
    parts = list(dict.fromkeys(text for text in backend.asked if "Word" in text))
    assert row["parts"] == len(parts) > 3 and "parts" not in sink.rows[0]
    assert "".join(parts) == long
    assert row["value"]["names"] == list(dict.fromkeys(word for part in parts for word in part.split()[:2]))
    assert row["value"]["title"] == parts[0].split()[0]
    for path, quote in row["evidence"].items():
        assert long[quote["start"] : quote["end"]] == quote["text"], path
    assert (
        set(row["confidence"])
        == set(row["evidence"])
        == {"title", *(f"names[{i}]" for i in range(len(row["value"]["names"])))}
    )
    assert set(row["confidence"].values()) == {0.6065}  # exp(-0.5)
    assert stats.usage.parts == len(parts) + 2


async def test_a_part_that_fails_fails_its_document() -> None:
    shared = await StandIn().prompt_tokens(plan(schema=LISTS).layout.document(""))
    long = " ".join(f"Word{i} is here." for i in range(100))
    backend = StandIn(
        wrong=lambda text, tries: "cut" if "Word40 " in text else listed(text, tries), context_length=shared + 564
    )
    sink, _ = await run([("long", long)], backend, schema=LISTS, retries=0, overlap=0)
    assert sink.rows == []
    assert sink.errors[0]["error"].startswith("part 2 of ") and sink.errors[0]["error"].endswith(": cut off")


async def test_parts_go_before_new_documents() -> None:
    shared = await StandIn().prompt_tokens(plan(schema=LISTS).layout.document(""))
    long = " ".join(f"Word{i} is here." for i in range(100))
    backend = StandIn(wrong=listed, context_length=shared + 564, most=1)
    await run([("long", long), ("after", "c d")], backend, schema=LISTS, retries=0)
    assert backend.asked[-1] == "c d"


async def test_no_room_for_documents() -> None:
    with pytest.raises(
        InvalidRequest, match=r"max_tokens=100: leaves no room for documents: .* take \d+ of the context's 600"
    ):
        await run(["a"], StandIn(context_length=600))


async def test_a_row_cannot_be_so_short() -> None:
    backend = StandIn()
    backend.min_tokens = 101
    with pytest.raises(InvalidRequest, match=r"max_tokens=100: the shortest row that is valid has 101 tokens"):
        await run(["a"], backend)
    assert backend.asked == []


async def test_a_backend_that_is_down_while_it_counts_stops_the_job() -> None:
    class Down(StandIn):
        async def counter(self, text: str) -> Any:
            raise BackendDown("nobody counts")

    with pytest.raises(JobStopped, match="nobody counts"):
        await run(["a " * 100_000], Down())


async def test_a_backend_that_is_down_ends_the_job_and_no_document() -> None:
    backend = StandIn(wrong=lambda text, tries: "down" if text == "text 20" else None, most=4)
    sink, stats = Memory(), Stats()
    with pytest.raises(JobStopped, match=r"stopped at document 21 \('row-21'\): nobody answers any more"):
        await run_job(inline(given_documents([f"text {i}" for i in range(50)])), plan(), backend, sink, stats)
    assert backend.running == 0
    assert sink.errors == [] and 10 <= len(sink.rows) <= 24


async def test_a_sink_that_takes_no_more_ends_the_job() -> None:
    class Full(Memory):
        def add(self, *values: Any, **more: Any) -> None:
            if len(self.rows) == 5:
                raise JobStopped("full")
            super().add(*values, **more)

    backend, sink = StandIn(most=4), Full()
    with pytest.raises(JobStopped, match="^full$"):
        await run_job(inline(given_documents([f"text {i}" for i in range(50)])), plan(), backend, sink, Stats())
    assert backend.running == 0 and len(sink.rows) == 5


async def test_cancelled_it_leaves_nothing_running() -> None:
    backend = StandIn(most=4)

    def stop(stats: Stats) -> None:
        if stats.finished == 10:
            task.cancel()

    async def endless() -> AsyncIterator[Document]:
        index = 0
        while True:
            yield Document(index, f"d{index}", "text")
            index += 1

    sink = Memory()
    task = asyncio.ensure_future(run_job(endless(), plan(), backend, sink, Stats(), stop))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.running == 0 and 10 <= len(sink.rows) <= 14


async def test_reading_in_a_thread_stays_a_few_documents_ahead() -> None:
    read = 0
    closed = threading.Event()

    def source() -> Iterator[Document]:
        nonlocal read
        try:
            while True:
                read += 1
                yield Document(read - 1, str(read), "text")
        finally:
            closed.set()

    taken = 0
    stream = in_thread(source())
    async for _ in stream:
        taken += 1
        assert read <= taken + 5
        if taken == 20:
            break
    await stream.aclose()
    assert await asyncio.to_thread(closed.wait, 10)

    def broken() -> Iterator[Document]:
        yield Document(0, "a", "b")
        raise InvalidRequest("source", "is broken")

    with pytest.raises(InvalidRequest, match="is broken"):
        async for _ in in_thread(broken()):
            pass


@given(data=st.data(), count=st.integers(1, 4), tokens=st.one_of(st.none(), st.integers(1, 100)))
@settings(max_examples=60, deadline=None)
def test_slots_are_bounded_and_served_in_order(data: st.DataObject, count: int, tokens: int | None) -> None:
    costs = data.draw(
        st.lists(st.tuples(st.integers(1, 120), st.sampled_from([BEGUN, NEW]), st.booleans()), max_size=20)
    )

    async def play() -> None:
        slots = Slots(count, tokens)
        served: list[int] = []

        async def one(number: int, cost: int, priority: int) -> None:
            await slots.take(cost, priority)
            served.append(number)
            try:
                assert slots.used <= count
                assert tokens is None or slots.used == 1 or slots.used_tokens <= tokens
                await asyncio.sleep(0)
            finally:
                slots.give(cost)

        await slots.take(1, BEGUN)
        tasks = [asyncio.ensure_future(one(i, cost, priority)) for i, (cost, priority, _) in enumerate(costs)]
        await asyncio.sleep(0)
        first = list(served)
        for task, (_, _, cancelled) in zip(tasks, costs):
            if cancelled:
                task.cancel()
        slots.give(1)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (slots.used, slots.used_tokens) == (0, 0)
        later = served[len(first) :]
        if count == 1:
            assert first == []
            assert later == sorted(later, key=lambda i: (costs[i][1], i))
        assert set(served) >= {i for i, (_, _, cancelled) in enumerate(costs) if not cancelled}

    asyncio.run(play())


def test_the_series_is_bounded_and_even() -> None:
    now = [0.0]
    stats = Stats(clock=lambda: now[0])
    stats.begin()
    for second in range(5000):
        now[0] = float(second)
        stats.add(Usage(prompt=10, cached=9, output=1), failed=second % 10 == 0)
    stats.tick(last=True)
    assert len(stats.series) <= MOST_POINTS + 1
    seconds = [point.seconds for point in stats.series]
    gaps = {b - a for a, b in itertools.pairwise(seconds[:-1])}
    assert len(gaps) <= 2 and seconds[0] == 0 and seconds[-1] == 4999
    assert stats.series[-1].prompt_tokens == 50_000 and stats.series[-1].failed == 500
    assert stats.cached_share == 0.9 and stats.finished == 5000


async def test_the_optimum_where_a_backend_cannot_tell() -> None:
    """The stand-in computes what every prompt shares once, and of each document what is its own."""
    backend = StandIn(most=1)
    _, stats = await run([f"text {i}" for i in range(20)], backend)
    assert stats.cached_share == pytest.approx(stats.optimal_share, abs=0.01)
    assert text_of(backend.prompts[0]) == "text 0"
