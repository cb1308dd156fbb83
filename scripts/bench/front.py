"""What the HTTP front costs: the whole application on a stand-in engine, beside a bare aiohttp handler of the same answers.

Owns the stand-in, which answers at once, and a load generator that does as little as it can.

Invariants: server and load generator are processes of their own; every answer is a 200 with all its tokens, or the run fails; connections
stay open, so that no connecting is measured.

    goals, whole application: >= 2,000 requests/s not streamed, >= 20,000 streamed tokens/s, first token within 2 ms (median)

Run alone on the machine: python scripts/bench/front.py [--seconds 3] [--rounds 3] [--connections 32]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aiohttp import web

from radixrt.bench.machine import watch
from radixrt.errors import InvalidRequest, RadixrtError
from radixrt.model.tokenizer import Tokenizer, load_tokenizer
from radixrt.request import FinishReason, OutputDelta, RequestOutput, SampleOutput, SamplingParams
from radixrt.server.app import serve
from radixrt.server.client import EngineInfo
from radixrt.server.config import ServerConfig

REQUESTS_PER_S, TOKENS_PER_S, TTFT_MS = 2_000, 20_000, 2.0
WORD = " word"
PROMPT = "The travelling library measured the northern well before sunrise, and the stray goat watched."
CHAT = [{"role": "user", "content": PROMPT}]
WARM_UP_S = 0.3
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A request as it is measured. ``limit``: the name of ``max_tokens`` in this API, as a path into the body."""

    path: str
    body: Mapping[str, Any]
    stream: bool = False

    @property
    def name(self) -> str:
        return f"{self.path}{', streamed' if self.stream else ''}"

    def raw(self, tokens: int) -> bytes:
        """The request as it goes over the wire."""
        limit = {"max_new_tokens": tokens} if self.path == "/generate" else {"max_tokens": tokens}
        body = {**self.body, "stream": self.stream}
        body.update({"sampling_params": limit} if self.path == "/generate" else limit)
        data = json.dumps(body).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        return head.encode() + b"\r\n\r\n" + data


KINDS = tuple(
    Kind(path, body, stream)
    for stream in (False, True)
    for path, body in (
        ("/generate", {"text": PROMPT}),
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": CHAT}),
    )
)

# ---- servers


class StandIn:
    """An engine that gives ``max_tokens`` words, each in a turn of the event loop of its own."""

    healthy = True

    def __init__(self, model: str | None) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(model)
        self.info = EngineInfo("stand-in", 8192, self.tokenizer.vocab_size, 2**20, "float32", "cpu", {})

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def stream(
        self, prompt: Any, params: SamplingParams, *, request_id: str, deltas: bool = True, **_: Any
    ) -> AsyncIterator[OutputDelta]:
        count = params.max_tokens or 1
        if deltas:
            for _at in range(count):
                await asyncio.sleep(0)
                yield OutputDelta(request_id, 0, WORD, (1,))
        sample = SampleOutput(0, WORD * count, (1,) * count, FinishReason.LENGTH)
        ids = tuple(prompt) if not isinstance(prompt, str) else (1,)
        output = RequestOutput(request_id, ids, (sample,), computed_tokens=len(ids))
        yield OutputDelta(request_id, 0, "", (), finish_reason=FinishReason.LENGTH, output=output)

    async def stats(self) -> dict[str, Any]:
        return {}


def serve_app(ready: Connection, model: str | None, access_log: bool) -> None:
    """The whole application, as ``radixrt serve`` runs it; its log is written, and kept by nobody."""
    _quiet()
    client: Any = StandIn(model)
    asyncio.run(serve(ServerConfig(port=0, access_log=access_log), {}, client=client, ready=ready.send))


def serve_bare(ready: Connection, tokens: int) -> None:
    """What aiohttp itself costs: handlers that read the body as JSON, and write an answer made before."""
    _quiet()
    whole = json.dumps({"choices": [{"index": 0, "text": WORD * tokens, "finish_reason": "length"}]}).encode()
    event = b"data: " + json.dumps({"choices": [{"index": 0, "text": WORD}]}).encode() + b"\n\n"

    async def handle(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if not body["stream"]:
            return web.Response(body=whole, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _at in range(tokens):
            await asyncio.sleep(0)
            await response.write(event)
        await response.write_eof()
        return response

    async def run() -> None:
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        app = web.Application()
        app.add_routes([web.post("/{path:.*}", handle)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ready.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await stopped.wait()
        await runner.cleanup()

    asyncio.run(run())


def _quiet() -> None:
    """What is logged and said is formatted and written, to nowhere."""
    nowhere = open(os.devnull, "w")  # noqa: SIM115  the process ends with it
    os.dup2(nowhere.fileno(), 2)
    logging.basicConfig(stream=nowhere, level=logging.INFO)


@contextmanager
def running(target: Callable[..., None], *arguments: Any) -> Iterator[int]:
    """The port of a server in a process of its own, which has ended afterwards."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_S):
            raise RadixrtError(f"{target.__name__}: is not ready after {START_S:g} seconds")
        try:
            address: str = ours.recv()
        except EOFError:
            raise RadixrtError(f"{target.__name__}: the server ended before it was ready") from None
        yield int(address.rpartition(":")[2])
    finally:
        process.terminate()
        process.join(10)
        process.kill()
        process.join()


# ---- load


class Connected(asyncio.Protocol):
    """One connection that sends the same request again as soon as its answer is there."""

    def __init__(self, raw: bytes, stream: bool, failed: asyncio.Future[None]) -> None:
        self.done, self.firsts = 0, list[float]()
        self._raw, self._stream, self._failed = raw, stream, failed
        self._word = WORD.encode()
        self._got, self._begun, self._sent = bytearray(), False, 0.0
        self.words = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._fail("the server closed the connection")

    def stop(self) -> None:
        if self._transport is not None:
            transport, self._transport = self._transport, None
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._got and not data.startswith(b"HTTP/1.1 200"):
            self._fail(data[:300].decode(errors="replace"))
            return
        self._got += data
        if not self._begun and self._word in data:
            self._begun = True
            self.firsts.append(time.perf_counter() - self._sent)
        if self._stream:
            if not self._got.endswith(b"\r\n0\r\n\r\n"):  # a header may end with a 0 too
                return
        else:
            head, marker, rest = self._got.partition(b"\r\n\r\n")
            if not marker or len(rest) < int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
                return
        if not self.done:  # all the words are there, looked at once
            self.words = self._got.count(self._word)
        self.done += 1
        if self._transport is not None:
            self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._got, self._begun, self._sent = bytearray(), False, time.perf_counter()
        self._transport.write(self._raw)

    def _fail(self, problem: str) -> None:
        self.stop()
        if not self._failed.done():
            self._failed.set_exception(RadixrtError(f"the load was not answered: {problem}"))


@dataclass(frozen=True, slots=True)
class Load:
    """What came of one run. ``ttft_ms``: median until the first word, from when its request was sent."""

    requests_per_s: float
    tokens_per_s: float
    ttft_ms: float


async def load(port: int, kind: Kind, *, tokens: int, connections: int, seconds: float) -> Load:
    """Ask for ``kind`` over so many connections for so long.

    Raises:
        RadixrtError: an answer is no 200, or has not all its words.
    """
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()
    raw = kind.raw(tokens)
    clients: list[Connected] = []

    async def wait(most: float) -> None:
        await asyncio.wait([failed], timeout=most)
        if failed.done():
            failed.result()

    try:
        for _at in range(connections):
            _transport, client = await loop.create_connection(
                lambda: Connected(raw, kind.stream, failed), "127.0.0.1", port
            )
            clients.append(client)
        await wait(WARM_UP_S)
        while not all(client.done for client in clients):
            await wait(0.05)
        before = sum(client.done for client in clients)
        for client in clients:
            client.firsts.clear()
        begin = time.perf_counter()
        await wait(seconds)
        took = time.perf_counter() - begin
    finally:
        for client in clients:
            client.stop()
    if any(client.words < tokens for client in clients):  # /generate repeats what it said
        raise RadixrtError(f"{kind.name}: an answer has {clients[0].words} words, not {tokens}")
    done = sum(client.done for client in clients) - before
    firsts = [first for client in clients for first in client.firsts]
    ttft = statistics.median(firsts) if firsts else float("nan")
    return Load(done / took, done * tokens / took, ttft * 1000)


# ---- the report


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one kind of request. ``bare_*``: of aiohttp alone, in the same rounds."""

    kind: str
    stream: bool
    requests_per_s: float
    tokens_per_s: float
    ttft_ms: float
    bare_requests_per_s: float
    bare_ttft_ms: float

    @property
    def met(self) -> bool:
        if self.stream:
            return self.tokens_per_s >= TOKENS_PER_S and self.ttft_ms < TTFT_MS
        return self.requests_per_s >= REQUESTS_PER_S


async def measure(
    port: int, bare: int, kind: Kind, *, tokens: int, connections: int, seconds: float, rounds: int
) -> Row:
    """The application and bare aiohttp in turn; the time to the first word is that of one connection, with nothing in its way."""
    found: dict[int, list[Load]] = {port: [], bare: []}
    alone: dict[int, list[Load]] = {port: [], bare: []}
    for _round in range(rounds):
        for at in (port, bare):
            found[at].append(await load(at, kind, tokens=tokens, connections=connections, seconds=seconds))
            alone[at].append(await load(at, kind, tokens=tokens, connections=1, seconds=seconds / 3))

    def middle(loads: Sequence[Load], name: str) -> float:
        return statistics.median(getattr(one, name) for one in loads)

    return Row(
        kind.name,
        kind.stream,
        middle(found[port], "requests_per_s"),
        middle(found[port], "tokens_per_s"),
        middle(alone[port], "ttft_ms"),
        middle(found[bare], "requests_per_s"),
        middle(alone[bare], "ttft_ms"),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, metavar="X", help="of each run (default 3)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each kind (default 3)")
    parser.add_argument("--connections", type=int, default=32, metavar="N", help="that ask at once (default 32)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of a streamed answer (default 64)")
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="what the front tokenizes with; nothing: the embedded model's"
    )
    parser.add_argument(
        "--no-access-log", action="store_true", help="serve without the access log, which is on by default"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the medians to FILE")
    args = parser.parse_args()
    for name, low in (("seconds", 0.01), ("rounds", 1), ("connections", 1), ("tokens", 1)):
        if getattr(args, name) < low:
            raise InvalidRequest(f"--{name}", f"={getattr(args, name)}: must be at least {low}")
    if busy := watch():
        print(f"warning: {busy}")
    rows: list[Row] = []
    print(f"{'':<32}{'requests/s':>11}{'bare':>9}{'tokens/s':>10}{'TTFT ms':>9}{'bare':>7}")
    with (
        running(serve_app, args.tokenizer, not args.no_access_log) as port,
        running(serve_bare, args.tokens) as bare,
    ):
        for kind in KINDS:
            sizes = {"connections": args.connections, "seconds": args.seconds, "rounds": args.rounds}
            rows.append(row := asyncio.run(measure(port, bare, kind, tokens=args.tokens, **sizes)))
            figures = f"{row.requests_per_s:>11,.0f}{row.bare_requests_per_s:>9,.0f}"
            if row.stream:
                figures += f"{row.tokens_per_s:>10,.0f}{row.ttft_ms:>9.2f}{row.bare_ttft_ms:>7.2f}"
            else:
                figures += f"{'':>26}"
            print(f"{row.kind:<32}{figures}   {'met' if row.met else 'NOT MET'}", flush=True)
    print(
        f"goals: {REQUESTS_PER_S:,} requests/s; streamed {TOKENS_PER_S:,} tokens/s, first token within {TTFT_MS:g} ms"
    )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RadixrtError as error:
        sys.exit(f"error: {error}")
