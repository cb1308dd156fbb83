"""The seeded workloads over HTTP, against any OpenAI-compatible servers, A B A B.

Owns how a workload of ``radixrt.bench.workloads`` becomes requests of the OpenAI API, and what is measured of the answers.

Invariants: all servers get the same text, greedily; every round has a seed of its own, so no server finds an earlier round in its cache; a
request that fails ends the run with its error, and never becomes a figure; tokens are those the server counts, not those that were asked for.

    python scripts/bench/over_http.py few-shot chat --base-url http://127.0.0.1:8000 --base-url http://127.0.0.1:8080 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from radixrt.bench.machine import watch
from radixrt.bench.workloads import WORKLOADS, Encode, Node, Workload, build, sentences
from radixrt.errors import InvalidRequest, RadixrtError, nearest
from radixrt.model.tokenizer import load_tokenizer

OPTIONAL = ("ignore_eos", "stream_options")  # left out for a server that refuses them by name
TIMEOUT_S = 1800.0  # of one request: a queue of 48 on a slow machine takes minutes
WARM_UP_TOKENS = 4

# ---- workloads


@dataclass(frozen=True)
class Task:
    """A workload as it goes over HTTP.

    Fields:
        texts: what each node adds to its parent's, as text. chat: as messages to ``/chat/completions``; else as text to
        ``/completions``. schema: what each answer must be; where there is none, the end of sequence is ignored.
    """

    workload: Workload
    texts: Mapping[str, str]
    chat: bool = False
    schema: Mapping[str, Any] | None = None


SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "vendor": {"type": "string"},
        "city": {"type": "string"},
        "date": {"type": "string"},
        "total": {"type": "number"},
        "currency": {"enum": ["EUR", "USD", "GBP"]},
        "paid": {"type": "boolean"},
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "quantity": {"type": "integer"}},
                "required": ["name", "quantity"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["vendor", "city", "date", "total", "currency", "paid", "items"],
    "additionalProperties": False,
}
_ORDER = (
    "Read the document and give the order it describes as JSON with the fields vendor, city, date, total, currency, paid and items; each item "
    "has a name and a quantity. Take names as they are written, and leave out what is not an order.\n\n"
)


def extraction(encode: Encode, *, scale: float, seed: int) -> Workload:
    """24 documents of 160 tokens behind the same instruction, each to be one JSON object of ``SCHEMA`` in at most 160 tokens."""
    count, own, out = (_scaled(n, scale, low) for n, low in ((24, 2), (160, 40), (160, 128)))
    rng = random.Random(f"radixrt/extraction/{seed}")
    rules = tuple(encode(_ORDER))[: _scaled(200, scale, 12)]
    nodes = []
    for i in range(count):
        things = ("kettles", "chairs", "lemons", "bicycles", "maps", "boots")
        items = ", ".join(f"{rng.randint(1, 40)} {thing}" for thing in rng.sample(things, 3))
        order = (
            f"Document {i + 1}: On {rng.randint(1, 28)} March {rng.randint(1990, 2025)} "
            f"{rng.choice('Adler Bruun Castell Dorn Eliasen Fabre'.split())} & Sons of {rng.choice('Ghent Oslo Porto Turin York'.split())} "
            f"sold {items} for {rng.randint(20, 900)}.{rng.randint(10, 99)} {rng.choice(('EUR', 'USD', 'GBP'))}."
        )
        text, more = tuple(encode(order)), sentences(rng)
        while len(text) < own:
            text += tuple(encode(next(more)))
        nodes.append(Node(f"d{i}", rules + text[:own], out))
    about = f"{count} documents of {own} tokens, JSON of one schema, at most {out} out"
    return Workload("extraction", about, tuple(nodes))


def first_token(encode: Encode, *, scale: float, seed: int) -> Workload:
    """5 unshared prompts of 500 tokens, one after the other, 2 tokens out: the time to the first is what it is for."""
    count, own = _scaled(5, scale, 2), _scaled(500, scale, 16)
    nodes = []
    for i in range(count):
        made: list[int] = list(encode(f"{'ABCDE'[i % 5]}{seed}:"))
        more = sentences(random.Random(f"radixrt/first-token/{seed}/{i}"))
        while len(made) < own:
            made += encode(next(more))
        nodes.append(Node(f"f{i}", tuple(made[:own]), 2))
    return Workload("first-token", f"{count} requests of {own} tokens, 2 out, one at a time", tuple(nodes), 1)


OVER_HTTP: Mapping[str, Callable[..., Workload]] = {"extraction": extraction, "first-token": first_token}
NAMES = (*WORKLOADS, *OVER_HTTP)


def task(name: str, tokenizer: Any, *, scale: float = 1.0, seed: int = 0) -> Task:
    """The workload ``name`` for one round; ``tokenizer`` gives its lengths in tokens."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False)

    if name in OVER_HTTP:
        workload = OVER_HTTP[name](encode, scale=scale, seed=seed)
    elif name in WORKLOADS:
        workload = build(name, encode, scale=scale, seed=seed)
    else:
        raise InvalidRequest("workload", f"={name!r}: no such workload{nearest(name, NAMES)}")
    texts = {node.id: tokenizer.decode(node.tokens) for node in workload.nodes}
    extracts = name == "extraction"
    return Task(workload, texts, chat=extracts or name == "chat", schema=SCHEMA if extracts else None)


def _scaled(value: int, scale: float, low: int) -> int:
    return max(low, round(value * scale))


# ---- one server


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. ``times``: when each event with text came, in seconds after the request was sent."""

    text: str
    times: tuple[float, ...]
    tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None


class Server:
    """An OpenAI-compatible server as a client sees it. Open it with ``async with``."""

    def __init__(self, url: str, *, name: str = "", api_key: str | None = None, keep_alive: bool = False) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidRequest("--base-url", f"={url!r}: must be like http://127.0.0.1:8000")
        self.name = name or parts.netloc
        self._url = url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._keep_alive = keep_alive
        self._left_out: set[str] = set()
        self.model = ""

    async def __aenter__(self) -> Server:
        # some servers close idle connections just when the next request goes out, so each has one of its own
        connector = aiohttp.TCPConnector(limit=0, force_close=not self._keep_alive)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        try:
            async with self._session.get(f"{self._url}/models") as answer:
                if answer.status != 200:
                    raise RadixrtError(f"{self.name}: {self._url}/models answers {answer.status}")
                self.model = (await answer.json(content_type=None))["data"][0]["id"]
        except BaseException as error:
            await self._session.close()
            if isinstance(error, aiohttp.ClientError):
                raise RadixrtError(f"{self.name}: cannot reach {self._url}/models: {error}") from None
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Send a request and read its stream to the end.

        Raises:
            RadixrtError: the server refuses it, or the stream carries an error or ends before its time.
        """
        while True:
            sent = {
                "model": self.model,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **body,
            }
            for name in self._left_out:
                sent.pop(name, None)
            begin = time.perf_counter()
            try:
                async with self._session.post(self._url + path, json=sent) as answer:
                    if answer.status == 200:
                        return await self._read(answer, begin)
                    problem = await answer.text()
            except (aiohttp.ClientError, TimeoutError) as error:
                raise RadixrtError(f"{self.name}: {path}: {error!r}") from None
            named = {name for name in OPTIONAL if name in sent and name in problem}
            if answer.status not in (400, 422) or not named:
                raise RadixrtError(f"{self.name}: {path} answers {answer.status}: {problem[:400]}")
            self._left_out |= named

    async def _read(self, answer: aiohttp.ClientResponse, begin: float) -> Answer:
        texts: list[str] = []
        times: list[float] = []
        usage: dict[str, Any] = {}
        events, done = 0, False
        async for line in answer.content:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
                continue
            event = msgspec.json.decode(data)
            if "error" in event:
                raise RadixrtError(f"{self.name}: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
                events += 1
                if text:
                    texts.append(text)
                    times.append(time.perf_counter() - begin)
        if not done:
            raise RadixrtError(f"{self.name}: the stream ended without [DONE]")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        tokens = usage.get("completion_tokens", events)
        return Answer("".join(texts), tuple(times), tokens, usage.get("prompt_tokens"), cached)


# ---- one run


def continued(job: Task, node: Node, before: Any = None, said: str = "") -> Any:
    """The prompt of ``node``: text or messages, after its parent's prompt and what the server said to it."""
    text = job.texts[node.id]
    if not job.chat:
        return (before or "") + said + text
    if before is not None:
        return [*before, {"role": "assistant", "content": said}, {"role": "user", "content": text}]
    system, marker, own = text.partition("\nUser:")
    head = [{"role": "system", "content": system}] if marker else []
    return [*head, {"role": "user", "content": own if marker else text}]


def request(job: Task, prompt: Any, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a request."""
    body: dict[str, Any] = {"max_tokens": max_tokens, "messages" if job.chat else "prompt": prompt}
    if job.schema is None:
        body["ignore_eos"] = True
    else:
        form = {"name": job.workload.name, "schema": job.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    return ("/chat/completions" if job.chat else "/completions"), body


async def warm_up(job: Task, server: Server) -> None:
    """One request of the workload's form: it finds out which fields the server takes, and compiles its schema."""
    prompt = "Once upon a time"
    most = WARM_UP_TOKENS if job.schema is None else job.workload.nodes[0].max_tokens  # what the schema needs
    await server.ask(*request(job, [{"role": "user", "content": prompt}] if job.chat else prompt, most))


@dataclass(frozen=True)
class Run:
    """One measured run of a workload on a server. Times are seconds; ``None``: the server does not say."""

    workload: str
    server: str
    wall_s: float
    requests: int
    asked_tokens: int
    generated_tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    valid: int | None
    outputs: Mapping[str, str] = field(repr=False)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of wall time."""
        return self.generated_tokens / self.wall_s


async def run(job: Task, server: Server) -> Run:
    """Run every request of the workload on the server, each when its parent is done, and measure."""
    workload = job.workload
    children = workload.children()
    room = asyncio.Semaphore(workload.concurrency or len(workload.nodes))
    answers: dict[str, Answer] = {}
    before: dict[str, Any] = {}

    async def follow(node: Node) -> None:
        async with room:
            parent = node.parent
            said = () if parent is None else (before[parent], answers[parent].text)
            before[node.id] = continued(job, node, *said)
            answers[node.id] = await server.ask(*request(job, before[node.id], node.max_tokens))
        async with asyncio.TaskGroup() as group:
            for child in children.get(node.id, ()):
                group.create_task(follow(child))

    begin = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for node in children[None]:
                group.create_task(follow(node))
    except BaseExceptionGroup as errors:
        raise _first_of(errors) from None
    wall = time.perf_counter() - begin
    found = [answers[node.id] for node in workload.nodes]
    ttft = [answer.times[0] for answer in found if answer.times]
    gaps = [b - a for answer in found for a, b in zip(answer.times, answer.times[1:])]
    return Run(
        workload=workload.name,
        server=server.name,
        wall_s=wall,
        requests=len(found),
        asked_tokens=workload.generated_tokens,
        generated_tokens=sum(answer.tokens for answer in found),
        prompt_tokens=_sum(answer.prompt_tokens for answer in found),
        cached_tokens=_sum(answer.cached_tokens for answer in found),
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p99_s=percentile(ttft, 0.99),
        itl_p50_s=percentile(gaps, 0.5),
        itl_p99_s=percentile(gaps, 0.99),
        valid=None if job.schema is None else sum(valid(answer.text, job.schema) for answer in found),
        outputs={node.id: answers[node.id].text for node in workload.nodes},
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that ``share`` of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def valid(text: str, schema: Mapping[str, Any]) -> bool:
    """``text`` is JSON, and ``jsonschema`` finds that it is of the schema."""
    import jsonschema  # type: ignore[import-untyped]

    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, RecursionError, jsonschema.ValidationError):
        return False
    return True


def _sum(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


# ---- many runs, and how they are shown


@dataclass(frozen=True)
class Figure:
    """A column: its title, what a run gives (one value, or two with a stroke between), and how each is written."""

    title: str
    of: Sequence[Callable[[Run], float | None]]
    form: str = "{:.0f}"


def _ms(value: float | None) -> float | None:
    return None if value is None else value * 1000


FIGURES = (
    Figure("wall s", [lambda run: run.wall_s], "{:.2f}"),
    Figure("tokens/s", [lambda run: run.tokens_per_s], "{:.1f}"),
    Figure("TTFT ms p50/p99", [lambda run: _ms(run.ttft_p50_s), lambda run: _ms(run.ttft_p99_s)], "{:.1f}"),
    Figure("ITL p50/p99", [lambda run: _ms(run.itl_p50_s), lambda run: _ms(run.itl_p99_s)], "{:.1f}"),
    Figure("prompt", [lambda run: run.prompt_tokens]),
    Figure("cached", [lambda run: run.cached_tokens]),
    Figure("out", [lambda run: run.generated_tokens]),
    Figure("valid", [lambda run: run.valid]),
)


def median(runs: Sequence[Run], of: Callable[[Run], float | None]) -> float | None:
    known = [value for value in map(of, runs) if value is not None]
    return statistics.median(known) if known else None


def ratio(first: Sequence[Run], other: Sequence[Run]) -> float:
    """How many times less time the first server takes: the median over the rounds, whose two runs were side by side."""
    return statistics.median(b.wall_s / a.wall_s for a, b in zip(first, other))


def wide() -> Console:
    """A console with room for the tables, also where the output is no terminal."""
    return Console(soft_wrap=True, width=max(100, Console().width))


def show(console: Console, abouts: Mapping[str, str], runs: Sequence[Run]) -> None:
    """A table of medians for each workload of ``runs``; ``ratio``: how many times faster the first server is (wall time);
    ``same``: requests with the same text as the first server's, in the first round."""
    for name, about in abouts.items():
        by_server = grouped([run for run in runs if run.workload == name])
        if not by_server:
            continue
        table = Table(box=None, padding=(0, 1, 0, 0))
        table.add_column("server", no_wrap=True)
        groups, first = list(by_server.values()), next(iter(by_server.values()))
        shown = [figure for figure in FIGURES if any(median(group, figure.of[0]) is not None for group in groups)]
        for title in [figure.title for figure in shown] + (["ratio", "same"] if len(groups) > 1 else []):
            table.add_column(title, justify="right", no_wrap=True)
        for server, group in by_server.items():
            cells = [written(group, figure) for figure in shown]
            if len(groups) > 1:
                same = sum(first[0].outputs[node] == text for node, text in group[0].outputs.items())
                cells += [f"{ratio(first, group):.2f}x", f"{same}/{group[0].requests}"]
            table.add_row(server, *cells)
        console.print(f"\n{name}: {about}", style="bold", markup=False, highlight=False)
        console.print(table)
        for warning in dict.fromkeys(warning for group in by_server.values() for warning in warnings(group)):
            console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)


def written(group: Sequence[Run], figure: Figure) -> str:
    values = [median(group, of) for of in figure.of]
    return "/".join("-" if value is None else figure.form.format(value) for value in values)


def warnings(group: Sequence[Run]) -> list[str]:
    """Runs that made fewer tokens than the workload's shape."""
    return [
        f"{run.server} made {run.generated_tokens} of {run.asked_tokens} tokens: its wall time is of less work"
        for run in group
        if run.valid is None and run.generated_tokens != run.asked_tokens
    ]


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by server, in the order they first ran."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.server, []).append(run)
    return found


def as_json(abouts: Mapping[str, str], runs: Sequence[Run], **more: Any) -> str:
    """All runs but for what was generated, their medians and ratios."""
    workloads = []
    for name, about in abouts.items():
        by_server = grouped([run for run in runs if run.workload == name])
        first = next(iter(by_server.values()), [])
        plain = {
            server: [
                {**{k: v for k, v in vars(run).items() if k != "outputs"}, "tokens_per_s": run.tokens_per_s}
                for run in group
            ]
            for server, group in by_server.items()
        }
        medians = {server: median(group, lambda run: run.wall_s) for server, group in by_server.items()}
        ratios = {server: ratio(first, group) for server, group in by_server.items()}
        workloads.append({"name": name, "about": about, "runs": plain, "median_wall_s": medians, "ratios": ratios})
    return json.dumps({**more, "workloads": workloads}, indent=2) + "\n"


def line(run: Run) -> str:
    """One run in one line, for progress."""
    rows = "" if run.valid is None else f", {run.valid} of {run.requests} rows valid"
    return f"{run.workload} on {run.server}: {run.wall_s:.2f} s, {run.tokens_per_s:.1f} tokens/s{rows}"


async def alternate(
    servers: Sequence[Server],
    names: Sequence[str],
    tokenizer: Any,
    *,
    rounds: int,
    scale: float,
    seed: int,
    say: Callable[[str], None],
) -> list[Run]:
    """Every workload on every server in turn, ``rounds`` times (A B A B ...)."""
    runs: list[Run] = []
    for name in names:
        for at in range(rounds):
            job = task(name, tokenizer, scale=scale, seed=seed + at)
            for server in servers:
                async with server:
                    await warm_up(job, server)
                    runs.append(await run(job, server))
                say(line(runs[-1]))
    return runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this runner and the one that starts the servers itself both take."""
    parser.add_argument("workload", nargs="*", help=f"{', '.join(NAMES)}; nothing: all of them")
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="runs of each workload on each server (default 3)"
    )
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="size of the workloads (default 1.0)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the first round; each has its own")
    parser.add_argument("--keep-alive", action="store_true", help="keep connections open; default: one a request")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every run to FILE")


def checked(args: argparse.Namespace) -> list[str]:
    """The names of the workloads.

    Raises:
        InvalidRequest: an argument is out of range, or names no workload.
    """
    if args.rounds < 1:
        raise InvalidRequest("--rounds", f"={args.rounds}: must be at least 1")
    if not 0.0 < args.scale <= 100.0:
        raise InvalidRequest("--scale", f"={args.scale}: must be above 0 and at most 100")
    for name in args.workload:
        if name not in NAMES:
            raise InvalidRequest("workload", f"={name!r}: no such workload{nearest(name, NAMES)}")
    return list(dict.fromkeys(args.workload)) or list(NAMES)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_arguments(parser)
    parser.add_argument(
        "--base-url", action="append", required=True, metavar="URL", help="a server, may be given several times"
    )
    parser.add_argument("--api-key", metavar="KEY", help="sent to every server")
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="what counts the prompts' tokens; nothing: the embedded model's"
    )
    args = parser.parse_args(arguments)
    names = checked(args)
    servers = [Server(url, api_key=args.api_key, keep_alive=args.keep_alive) for url in args.base_url]
    if len({server.name for server in servers}) < len(servers):
        raise InvalidRequest("--base-url", "the same server is named twice")
    console = wide()
    if busy := watch():
        console.print(f"warning: {busy}", style="yellow", markup=False, highlight=False)
    tokenizer = load_tokenizer(args.tokenizer)

    def say(text: str) -> None:
        console.print(text, style="dim", markup=False, highlight=False)

    runs = asyncio.run(
        alternate(servers, names, tokenizer, rounds=args.rounds, scale=args.scale, seed=args.seed, say=say)
    )
    abouts = {name: task(name, tokenizer, scale=args.scale).workload.about for name in names}
    show(console, abouts, runs)
    if args.json:
        args.json.write_text(as_json(abouts, runs, scale=args.scale, seed=args.seed), encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RadixrtError as error:
        sys.exit(f"error: {error}")
