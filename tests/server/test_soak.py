"""The soak in little: the same clients and the same judgement as in ``scripts/bench/soak.py``, on a tiny model and for a number of requests."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import pytest

from tests.server.stand import Stand, reachable

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    soak, traffic, rows = (importlib.import_module(name) for name in ("soak", "soak_traffic", "soak_rows"))
    return soak, traffic, rows


async def test_many_clients_at_a_whole_server(scripts: Any, server_model: Path) -> None:
    soak, traffic, _rows = scripts
    template = str(server_model / "template.jinja")
    options = soak.Options(
        model=str(server_model),
        clients=32,
        requests=400,
        pool=1200,  # so that what is cached is evicted, and what runs preempted
        flags=(
            "--chat-template",
            template,
            "--check-integrity",
            "--page-size",
            "4",
            "--max-running-requests",
            "16",
            "--max-queue",
            "12",
        ),
        settings={"chat_template": template},
        most_wait=0.1,
        settle=60.0,
    )
    report = await soak.soak(options)
    assert not report.problems, "\n".join(report.problems)
    tally = report.tally
    assert sum(tally.done.values()) == 400 and tally.done.keys() == traffic.WEIGHTS.keys()
    assert report.stats["evicted_tokens"] > 0 and tally.cached_tokens > 0
    assert len(tally.first) > 50 and report.settled.keys() == {"work", "tasks", "files"}
    statuses = {status for kind, status in tally.statuses if kind == "hostile"}
    assert statuses <= {400, 404, 413, 415, 429} and 400 in statuses
    for table in soak.tables(report):
        assert table.row_count > 5


async def test_a_server_that_answers_nonsense_is_found_out(scripts: Any) -> None:
    soak, traffic, rows = scripts
    tally = traffic.Tally(left=60)
    bird = rows.Canary("/generate", {"text": "a", "sampling_params": {"temperature": 0}}, [0, 1, 3])
    weights = {"generate": 1, "constrained": 1, "score": 1, "hostile": 1, "canary": 1}
    async with reachable(Stand()) as url, aiohttp.ClientSession() as session:
        site = traffic.Site(url, 2, 64)
        clients = [traffic.Client(i, 0, session, site, tally, [bird], weights) for i in range(4)]
        await asyncio.gather(*(client.run() for client in clients))
    assert tally.left == 0 and sum(tally.done.values()) == 60
    wrong = [kind for kind, _ in tally.wrong]
    for kind in ("canary", "generate", "score"):
        assert wrong.count(kind) == tally.done[kind] > 0, tally.wrong
    (problem,) = [one for one in soak.judged(soak.Options(), soak.Report(tally)) if "wrong answers" in one]
    assert f"{len(wrong)} wrong answers" in problem


def test_what_is_judged(scripts: Any) -> None:
    soak, traffic, rows = scripts
    good = traffic.Tally()
    good.done["canary"] = 1
    minutes = [(60.0 * i, 100.0, 50.0 + 9 * i) for i in range(10)]
    assert soak.judged(soak.Options(), soak.Report(good, seconds=10.0, memory=minutes)) == []
    front, engine = soak.Report(good, memory=minutes).slopes()
    assert (front, engine) == (pytest.approx(0, abs=1e-6), pytest.approx(9))
    (problem,) = soak.judged(soak.Options(), soak.Report(good, seconds=540.0, memory=minutes))
    assert "the engine's memory grows by 9.0 MiB" in problem
    good.statuses["chat", 500] = 2
    (problem,) = soak.judged(soak.Options(), soak.Report(good))
    assert "5xx" in problem
    assert not soak.judged(soak.Options(), soak.Report(traffic.Tally()))[0].startswith("the")
    assert rows.same([1, [2.0]], [1, [2.0001]]) and not rows.same([1], [2]) and not rows.same([1.0], [1.01])
