"""Many clients at a whole server for a long time: no wrong answer, no leak, no crash, and what it cost.

    python scripts/bench/soak.py [--seconds 600] [--clients 256] [--model M] [--seed 0] [--json FILE] [-- FLAGS OF radixrt serve]

Starts ``radixrt serve`` (a front and an engine, two processes); chats of several turns, constrained output, completions, scores, programs,
clients that go away and 5 % hostile requests come to it at once, and greedy canaries, whose tokens were taken alone and without a cache before.
Exit status 1: a wrong answer, an answer of 5xx, something that is left when all is done, or memory that grows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table
from soak_rows import Wrong, canaries
from soak_traffic import WEIGHTS, Client, Site, Tally

from radixrt import AsyncEngine
from radixrt.bench.machine import machine
from radixrt.server.local import LocalClient

_ALARMS = ("ERROR", "CRITICAL", "Traceback", "never retrieved", "never awaited", "restarted")
_JUDGED = 240.0  # seconds from which on the slope of the memory says something
COUNTED = ("prompt_tokens", "cached_tokens", "generated_tokens", "evicted_tokens", "preemptions", "steps")


@dataclass(frozen=True, kw_only=True)
class Options:
    """One soak. Ends after ``seconds`` or when ``requests`` have begun, whichever comes first."""

    model: str | None = None
    clients: int = 256
    seconds: float = float("inf")
    requests: float = float("inf")
    seed: int = 0
    pool: int = 24_576  # tokens
    only: Sequence[str] = tuple(WEIGHTS)  # kinds of requests
    flags: Sequence[str] = ()  # of ``radixrt serve``
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the engine that sings the canaries alone
    finish: float = 30.0  # seconds that clients then have to hear their last answers; who has not goes away
    settle: float = 30.0  # most seconds in which everything must have ended
    most_wait: float = 30.0  # seconds, whatever Retry-After says
    most_growth: float = 8.0  # MiB a minute


@dataclass(slots=True)
class Report:
    """What was found. Memory in MiB, times in seconds."""

    tally: Tally
    seconds: float = 0.0
    memory: list[tuple[float, float, float]] = field(default_factory=list)  # time, front, engine
    cut: int = 0  # clients that went away at the end
    stats: dict[str, Any] = field(default_factory=dict)  # differences of ``COUNTED``
    samples: list[dict[str, Any]] = field(default_factory=list)  # of /server_info, every few seconds
    settled: dict[str, float] = field(default_factory=dict)  # seconds until nothing was left of it
    problems: list[str] = field(default_factory=list)

    def slopes(self) -> tuple[float, float]:
        """Least squares over the last two thirds, MiB a minute: of the front, of the engine."""
        rows = np.array(self.memory[len(self.memory) // 3 :] or [(0.0, 0.0, 0.0)])
        if len(rows) < 3:
            return 0.0, 0.0
        front, engine = np.polyfit(rows[:, 0] / 60, rows[:, 1:], 1)[0]
        return float(front), float(engine)


class Server:
    """``radixrt serve`` as it is run."""

    def __init__(self, options: Options, log: TextIO, kernels: str) -> None:
        self._options, self._log, self._kernels = options, log, kernels
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""
        self.files = 0  # that the front has open while nobody is connected

    async def start(self) -> None:
        options = self._options
        model = [options.model] if options.model else []
        limits = ["--max-total-tokens", str(options.pool), "--max-body-bytes", str(2**21)]
        flags = ["--port", "0", "--no-access-log", "--kernels", self._kernels, *limits, *options.flags]
        command = [sys.executable, "-m", "radixrt", "serve", *model, *flags]
        self._process = await asyncio.create_subprocess_exec(*command, stderr=self._log, stdout=self._log)
        async with asyncio.timeout(120):
            while not self.log().endswith("\nready\n"):
                if self._process.returncode is not None:
                    raise RuntimeError(f"the server did not start:\n{self.log()}")
                await asyncio.sleep(0.05)
        self.url = next(word for word in self.log().split() if word.startswith("http://"))
        self.files = self.front.num_fds()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    @property
    def front(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    @property
    def engine(self) -> psutil.Process:
        """Raises RuntimeError where none runs."""
        for child in self.front.children():
            if "radixrt.server.worker" in child.cmdline():
                return child
        raise RuntimeError("no engine runs")

    async def stop(self) -> int:
        """The exit status after SIGTERM."""
        if self._process is None:
            return 0
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), 60)
            except TimeoutError:
                self._process.kill()
        return await self._process.wait()


async def soak(options: Options, say: Callable[[str], None] = lambda text: None) -> Report:
    """Run one. Raises RuntimeError where the server does not even start."""
    say("the canaries sing alone, without a cache")
    engine = AsyncEngine(options.model, disable_radix_cache=True, max_total_tokens=8192, **options.settings)
    alone = LocalClient(engine)
    await alone.start()
    try:
        birds = await canaries(alone, options.seed)
        vocab, context = alone.info.vocab_size, alone.info.context_length
        kernels = engine.model_info.kernels.split()[0]  # those of another kind round otherwise
    finally:
        await alone.close()
    del alone, engine
    report = Report(Tally(left=options.requests))
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        server = Server(options, log, kernels)
        try:
            await server.start()
            site = Site(server.url, vocab, context, options.most_wait)
            say(f"{options.clients} clients at {server.url}")
            await _attack(options, server, site, birds, report, say)
            say("the end is looked at")
            await _look(options, server, site, birds, report)
        except (RuntimeError, psutil.Error, aiohttp.ClientError, OSError) as error:
            report.problems.append(f"the server is gone: {error}\n{server.log()[-3000:]}")
        finally:
            status = await server.stop()
        if status != 0:
            report.problems.append(f"the server ended with {status}")
        lines = server.log().splitlines()
    alarms = [i for i, line in enumerate(lines) if any(word in line for word in _ALARMS)]
    if alarms:
        shown = "\n".join(lines[alarms[0] : alarms[0] + 60])
        report.problems.append(f"the server logged {len(alarms)} alarms; the first:\n{shown}")
    report.problems += judged(options, report)
    return report


def judged(options: Options, report: Report) -> list[str]:
    """What is wrong with the figures."""
    tally, problems = report.tally, []
    if tally.wrong:
        kinds = dict(Counter(kind for kind, _ in tally.wrong))
        shown = "\n".join(f"  {kind}: {what}" for kind, what in tally.wrong[:10])
        problems.append(f"{len(tally.wrong)} wrong answers {kinds}\n{shown}")
    failed = {key: count for key, count in tally.statuses.items() if key[1] >= 500 and key[1] != 503}
    if failed:
        problems.append(f"answers of 5xx: {failed}")
    if not tally.done["canary"] and "canary" in options.only:
        problems.append("no canary sang")
    if report.seconds >= _JUDGED:
        for name, slope in zip(("front", "engine"), report.slopes()):
            if slope > options.most_growth:
                problems.append(f"the {name}'s memory grows by {slope:.1f} MiB a minute")
    return problems


async def _attack(
    options: Options, server: Server, site: Site, birds: Any, report: Report, say: Callable[[str], None]
) -> None:
    tally, seed = report.tally, options.seed
    before, engine = await _info(site), server.engine.pid
    began = time.monotonic()
    tally.until = began + options.seconds
    limit = None if options.seconds == float("inf") else options.seconds + options.finish
    watch = asyncio.create_task(_watch(server, site, report, began, say))
    try:
        async with aiohttp.ClientSession(connector=_connector(), timeout=_NO_TIMEOUT) as session:
            weights = {kind: weight for kind, weight in WEIGHTS.items() if kind in options.only}
            clients = [Client(i, seed, session, site, tally, birds, weights) for i in range(options.clients)]
            tasks = [asyncio.ensure_future(client.run()) for client in clients]
            try:
                await asyncio.wait(tasks, timeout=limit)
                report.cut = sum(not task.done() for task in tasks)
                if report.cut:  # they go away all at once
                    info = await _info(site)
                    if not info["running"] + info["waiting"] + info["programs"]:
                        report.problems.append(f"{report.cut} clients wait for answers, and nothing runs")
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for task in tasks:
                if not task.cancelled() and task.exception() is not None:
                    report.problems.append(f"a client failed: {task.exception()!r}")
    finally:
        watch.cancel()
        await asyncio.wait([watch])
    report.seconds = time.monotonic() - began
    if not watch.cancelled() and watch.exception() is not None:
        report.problems.append(f"the server could not be watched: {watch.exception()}")
    if server.engine.pid != engine:
        report.problems.append("the engine was restarted")

    ended = time.monotonic()
    left = {"work": ("running", "waiting", "programs"), "tasks": ("tasks",)}
    while True:
        info = await _info(site)
        files = server.front.num_fds()
        for name, figures in left.items():
            if name not in report.settled and all(info[figure] <= before[figure] for figure in figures):
                report.settled[name] = time.monotonic() - ended
        if "files" not in report.settled and files <= server.files:
            report.settled["files"] = time.monotonic() - ended
        if len(report.settled) == 3:
            break
        if time.monotonic() - ended > options.settle:
            found = {figure: info[figure] for figures in left.values() for figure in figures}
            report.problems.append(f"{options.settle:g} s after the last answer there is still {found}, {files} files")
            break
        await asyncio.sleep(0.02)
    report.stats = {name: info[name] - before[name] for name in COUNTED}


async def _look(options: Options, server: Server, site: Site, birds: Any, report: Report) -> None:
    """Everything is over: what is left?"""
    async with aiohttp.ClientSession(timeout=_NO_TIMEOUT) as session:
        async with session.post(site.url + "/flush_cache") as answer:
            if answer.status != 200:
                report.problems.append(f"the invariants do not hold: {answer.status} {await answer.text()}")
        info = await _info(site)
        if info["pool_used"]:
            report.problems.append(f"{info['pool_used']} tokens of the pool are held by nobody")
        async with session.get(site.url + "/health") as answer:
            if answer.status != 200:
                report.problems.append(f"/health: {answer.status}")
        client = Client(0, options.seed, session, site, report.tally, birds)
        for bird in birds:
            try:
                await client.sing(bird, stream=False)
            except Wrong as error:
                report.tally.wrong.append(("canary", f"in the end: {error}"))


async def _watch(server: Server, site: Site, report: Report, began: float, say: Callable[[str], None]) -> None:
    engine, front, tick = server.engine, server.front, 0
    while True:
        used = [process.memory_info().rss / 2**20 for process in (front, engine)]
        report.memory.append((time.monotonic() - began, used[0], used[1]))
        if tick % 10 == 0:
            info = await _info(site)
            names = ("running", "waiting", "programs", "tasks", "pool_used", "cache_nodes", *COUNTED)
            report.samples.append({"seconds": time.monotonic() - began, **{name: info[name] for name in names}})
            done, wrong = sum(report.tally.done.values()), len(report.tally.wrong)
            say(
                f"{time.monotonic() - began:5.0f} s: {done} answered, {wrong} wrong, {info['running']} running, "
                f"{info['waiting']} waiting, front {used[0]:.0f} MiB, engine {used[1]:.0f} MiB"
            )
        tick += 1
        await asyncio.sleep(max(0.0, began + tick - time.monotonic()))


async def _info(site: Site) -> dict[str, Any]:
    """``/server_info`` over a connection of its own."""
    async with aiohttp.ClientSession(timeout=_NO_TIMEOUT) as session, session.get(site.url + "/server_info") as answer:
        if answer.status != 200:
            raise RuntimeError(f"/server_info: {answer.status} {await answer.text()}")
        info: dict[str, Any] = await answer.json()
        return info


def _connector() -> aiohttp.TCPConnector:
    return aiohttp.TCPConnector(limit=0)


_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=60)


# ---- the command


def tables(report: Report) -> list[Table]:
    tally = report.tally
    kinds = Table("kind", "requests", "/s", "p50 s", "p95 s", "p99 s", "longest", "wrong", "answers by status")
    wrong = Counter(kind for kind, _ in tally.wrong)
    for kind in [*WEIGHTS, "all"]:
        times = tally.latencies[kind] if kind != "all" else [t for one in tally.latencies.values() for t in one]
        if not times:
            continue
        said = {status: count for (name, status), count in sorted(tally.statuses.items()) if kind in (name, "all")}
        points = [f"{value:.2f}" for value in (*np.percentile(times, (50, 95, 99)), max(times))]
        bad = wrong[kind] if kind != "all" else len(tally.wrong)
        text = "" if kind == "all" else " ".join(f"{status}:{count}" for status, count in said.items())
        kinds.add_row(kind, str(len(times)), f"{len(times) / report.seconds:.2f}", *points, str(bad), text)
    figures = Table("figure", "value")
    for name, value in summary(report).items():
        figures.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    return [kinds, figures]


def summary(report: Report) -> dict[str, Any]:
    tally, stats, seconds = report.tally, report.stats, max(report.seconds, 1e-9)
    front, engine = report.slopes()
    last = report.memory[-1] if report.memory else (0.0, 0.0, 0.0)
    first = tally.first or [0.0]
    return {
        "seconds": seconds,
        "requests/s": sum(tally.done.values()) / seconds,
        "generated tokens/s": stats.get("generated_tokens", 0) / seconds,
        "prompt tokens/s": stats.get("prompt_tokens", 0) / seconds,
        "cached share of prompts": stats.get("cached_tokens", 0) / max(1, stats.get("prompt_tokens", 0)),
        "cached share of chats' prompts": tally.cached_tokens / max(1, tally.prompt_tokens),
        "evicted tokens": stats.get("evicted_tokens", 0),
        "preemptions": stats.get("preemptions", 0),
        "first event of a stream, p50 s": float(np.percentile(first, 50)),
        "first event of a stream, p99 s": float(np.percentile(first, 99)),
        "retried after 429, 503": f"{tally.retried[429]}, {tally.retried[503]}",
        "front MiB at the end": last[1],
        "engine MiB at the end": last[2],
        "front MiB/min over the last two thirds": front,
        "engine MiB/min over the last two thirds": engine,
        **{f"s until all {name} were gone": value for name, value in report.settled.items()},
        "clients that went away in the end": report.cut,
        "wrong answers": len(tally.wrong),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--requests", type=float, default=float("inf"), help="stop when so many have begun")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--model", help="directory, .gguf file or hub id; nothing: the embedded default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool", type=int, default=Options.pool, help="tokens of KV: fewer than all chats need")
    parser.add_argument("--only", nargs="+", choices=list(WEIGHTS), default=list(WEIGHTS), help="kinds of requests")
    parser.add_argument("--most-growth", type=float, default=Options.most_growth, help="MiB a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    parser.add_argument("flags", nargs="*", help="flags of radixrt serve, behind --")
    options = Options(**{name: value for name, value in vars(parser.parse_args()).items() if name != "json"})
    args, console = parser.parse_args(), Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    console.print(str(machine()), highlight=False)
    report = asyncio.run(soak(options, lambda text: console.print(text, markup=False, highlight=False)))
    for table in tables(report):
        console.print(table)
    if args.json:
        found = {
            "options": vars(args) | {"json": str(args.json)},
            "summary": summary(report),
            "memory": report.memory,
            "samples": report.samples,
            "statuses": {f"{kind} {status}": count for (kind, status), count in report.tally.statuses.items()},
            "latencies": {kind: sorted(times) for kind, times in report.tally.latencies.items()},
            "wrong": report.tally.wrong,
            "problems": report.problems,
        }
        args.json.write_text(json.dumps(found, indent=1, default=str) + "\n")
    for problem in report.problems:
        console.print(problem, style="red", markup=False, highlight=False)
    return 1 if report.problems else 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
