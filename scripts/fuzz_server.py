"""Mutated requests at a whole server: bodies of its routes, chats with tools and vectors among them, messages and raw frames of a WebSocket.

    python scripts/fuzz_server.py --model M [--count 100000] [--seed 0] [--clients 8]

Starts a front and an engine in a process of its own (``check_integrity`` after every step). Each case is a right request of which something was
changed: a value, a field, a byte, the order, the end. Every 1,000 cases, and at the end, the server must be healthy and a greedy answer as
before; at the end nothing runs and, the cache flushed, no page is in use. Exit status 1: an answer of 5xx, one that is no JSON error, or any of these.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import copy
import json
import os
import random
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from radixrt.progress import progress
from radixrt.server.app import serve
from radixrt.server.config import ServerConfig

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
GENERATE: tuple[dict[str, Any], ...] = (
    {"text": "hello", "sampling_params": GREEDY},
    {"text": ["a", "b"], "sampling_params": [GREEDY, {"max_new_tokens": 3, "seed": 1, "stop": ["x", "yz"]}]},
    {"input_ids": [40, 50, 60], "sampling_params": {"max_new_tokens": 4, "logit_bias": {"70": 5.0}, "top_k": 3}},
    {"text": "l", "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0, "sampling_params": GREEDY},
    {"text": "s", "stream": True, "sampling_params": {"max_new_tokens": 5, "n": 2, "min_p": 0.1, "temperature": 0.7}},
    {"text": "r", "sampling_params": {"max_new_tokens": 9, "regex": "[a-c]{3}(x|y)", "repetition_penalty": 1.1}},
    {
        "text": "j",
        "sampling_params": {
            "max_new_tokens": 60,
            "json_schema": {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"]},
        },
    },
    {"text": "e", "sampling_params": {"max_new_tokens": 9, "ebnf": 'root ::= "a" b*\nb ::= [x-z]'}},
    {"text": "c", "rid": "r", "priority": 3, "cache_salt": "z", "sampling_params": {**GREEDY, "min_tokens": 2}},
)
_PARAMS = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
NODES: tuple[dict[str, Any], ...] = (
    {"id": 0, "kind": "text", "parts": ["hello "]},
    {"id": 1, "kind": "gen", "parent": 0, "params": _PARAMS},
    {"id": 2, "kind": "gen", "parent": 0, "params": {**_PARAMS, "constraint": {"type": "regex", "pattern": "[ab]{2}"}}},
    {"id": 3, "kind": "text", "parent": 1, "parts": ["so ", {"ref": 2}]},
    {"id": 4, "kind": "select", "parent": 3, "choices": [["yes"], ["no"]]},
    {"id": 5, "kind": "role", "parent": 4, "role": "user", "begin": True},
)
GRAPH: dict[str, Any] = {"version": 1, "nodes": list(NODES)}
MESSAGES: tuple[dict[str, Any], ...] = (
    {"op": "open", "program": "p", "version": 1, "name": "n", "order": 0, "cache_salt": "", "stream": True},
    {"op": "add", "program": "p", "nodes": list(NODES[:3])},
    {"op": "add", "program": "p", "nodes": list(NODES[3:])},
    {"op": "cancel", "program": "p", "nodes": [1]},
    {"op": "drop", "program": "p", "nodes": [0, 2]},
    {"op": "close", "program": "p"},
)
_ASKED = [{"role": "user", "content": "hi"}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"$ref": "#/$defs/b"}},
            "required": ["a"],
            "$defs": {"b": {"type": "string", "maxLength": 3}},
        },
    },
}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CHATS: tuple[dict[str, Any], ...] = (
    {"messages": _ASKED, "max_tokens": 60, "tools": [_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"messages": _ASKED, "max_tokens": 40, "tools": [_TOOL], "stream": True, "thinking_budget": 3, "n": 2},
    {
        "messages": [*_ASKED, {"role": "assistant", "content": None, "tool_calls": [_CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "4"}],
        "max_tokens": 4,
        "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    },
)  # fmt: skip
# Bodies of the other routes.
OTHERS: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": CHATS,
    "/v1/embeddings": (
        {"input": ["a", [40, 50]], "encoding_format": "base64", "pooling": "mean", "normalize": False},
        {"input": "a b", "dimensions": 8, "truncate_dimensions": True, "cache_salt": "z"},
    ),
    "/v1/score": ({"text_1": "a", "text_2": ["b", "c"], "answers": ["y", "n"], "template": "{query} {document}"},),
    "/v1/rerank": ({"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "instruction": "i"},),
    "/v1/schema/check": ({"schema": json.dumps(_TOOL["function"])},),
}
# What a value is changed into; the last ones are written as they stand, for ``json.dumps`` cannot.
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 7, 0.5, -0.0, 1e308, 2**31, 2**53 + 1, 2**63, -(2**63), 2**64, 2**200),
    *("", "x", "\0", "\ud800", "é日\U0001f600", "a" * 300, "{}", "[", "(", "$ref", "__class__", "{{ ''.__class__ }}"),
    *([], [[]], [None], {}, {"": None}, [0] * 700, ["x"] * 70, {"type": "regex"}, {"ref": 0}, {"ref": 9}, {"arg": "q"}),
    *("<raw>NaN", "<raw>-Infinity", "<raw>1e999", "<raw>" + "9" * 5000),
    *("<raw>" + "[" * depth + "]" * depth for depth in (60, 900, 20_000)),
    "<raw>" + '{"a":' * 900 + "1" + "}" * 900,
)


class Mutator:
    """Changes right requests, the same way for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def body(self, right: tuple[dict[str, Any], ...]) -> bytes:
        """One of some bodies, changed."""
        value = copy.deepcopy(self.random.choice(right))
        for _ in range(self.random.choice((0, 1, 1, 1, 2, 3))):
            self._change(value)
        text = _written(value)
        return self._scratch(text.encode("utf-8", "surrogatepass")) if self.random.random() < 0.25 else text.encode()

    def messages(self) -> list[bytes]:
        """Some of the messages to a WebSocket, in the right order or another."""
        right = [message for message in MESSAGES if self.random.random() < 0.8]
        if self.random.random() < 0.4:
            self.random.shuffle(right)
        found = []
        for message in right:
            message = {**message, "program": self.random.choice(("p", "p", "p", "q"))}
            found.append(json.dumps(message).encode() if self.random.random() < 0.5 else self.body((message,)))
        return found

    def frame(self, data: bytes) -> bytes:
        """A client's frame, most of the time a right one."""
        first = 0x81 if self.random.random() < 0.7 else self.random.randrange(256)
        said = len(data) if self.random.random() < 0.9 else self.random.choice((0, 1, 70_000, 2**32, 2**63))
        size = bytes([0x80 | said]) if said < 126 else bytes([0xFF]) + said.to_bytes(8, "big")
        return bytes([first]) + size + bytes(4) + data  # a mask of zeros leaves the data as they are

    def _change(self, value: Any) -> None:
        """Change something in a JSON value, however deep."""
        found: list[tuple[Any, Any]] = []
        todo = [value]
        while todo:
            here = todo.pop()
            for key in list(here) if isinstance(here, dict) else range(len(here)):
                found.append((here, key))
                if isinstance(here[key], (dict, list)):
                    todo.append(here[key])
        if not found:
            return
        here, key = self.random.choice(found)
        kind = self.random.randrange(6)
        if kind == 0:
            del here[key]
        elif kind == 1 and isinstance(here, dict):
            name = self.random.choice((f"{key}s", key[:-1], "", "n", "stop", "seed", "regex", "constraint", "parent"))
            here[name] = self.random.choice(JUNK)
        elif kind == 2:
            here[key] = [here[key]]
        elif kind == 3:
            here[key] = copy.deepcopy(self.random.choice(found)[0])
        else:
            here[key] = copy.deepcopy(self.random.choice(JUNK))

    def _scratch(self, data: bytes) -> bytes:
        """Change bytes."""
        at, end = sorted(self.random.randrange(len(data) + 1) for _ in range(2))
        junk = self.random.choice((b"", b'"', b"}", b"[", b",", b"\xff", b"\x00", b"\xed\xa0\x80", b"\\u", b"\\ud800"))
        part = self.random.choice((b"", data[at : at + 1], data[at:end]))
        return self.random.choice((data[:at] + junk + data[at + 1 :], data[:at], data[:at] + part + data[at:]))


def _written(value: Any) -> str:
    text = json.dumps(value)
    while (at := text.find('"<raw>')) >= 0:
        end = at + 1
        while text[end] != '"' or text[end - 1] == "\\":
            end += 1
        text = text[:at] + text[at + 6 : end].replace('\\"', '"') + text[end + 1 :]
    return text


@dataclass
class Tally:
    """What came of the cases: ``answers`` by route and status, ``wrong``: what should not have come."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def blame(self, what: str, sent: object) -> None:
        self.wrong.append(f"{what}: {str(sent)[:2000]}")


class Fuzz:
    """Cases for the server at ``url``."""

    def __init__(self, url: str, session: aiohttp.ClientSession, seed: int) -> None:
        self._url, self._session, self._mutator = url, session, Mutator(seed)
        self.tally = Tally()
        self.cases = 0

    async def case(self) -> None:
        """One request, or the messages of one WebSocket."""
        kind = self._mutator.random.random()
        if kind < 0.3:
            await self._post("/generate", self._mutator.body(GENERATE))
        elif kind < 0.55:
            path = self._mutator.random.choice(tuple(OTHERS))
            await self._post(path, self._mutator.body(OTHERS[path]))
        elif kind < 0.7:
            await self._post("/v1/programs", self._mutator.body((GRAPH, {**GRAPH, "stream": False})))
        elif kind < 0.85:
            await self._socket(self._mutator.messages())
        else:
            await self._frames([self._mutator.frame(message) for message in self._mutator.messages()])

    async def _post(self, path: str, body: bytes) -> None:
        self.cases += 1
        leaves = self._mutator.random.random() < 0.05
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url + path, data=body, headers=headers) as answer:
            self.tally.answers[f"{path} {answer.status}"] += 1
            if answer.status >= 500:
                self.tally.blame(f"{path} answered {answer.status}: {await answer.text()}", body)
            elif answer.status >= 400:
                try:
                    assert (await answer.json())["error"]["message"]
                except Exception as error:
                    self.tally.blame(f"{path} answered no error of ours ({type(error).__name__})", body)
            elif leaves:
                answer.close()
            else:
                await answer.read()

    async def _socket(self, messages: list[bytes]) -> None:
        async with self._session.ws_connect(f"{self._url}/v1/programs/ws") as socket:
            for message in messages:
                self.cases += 1
                if socket.closed:
                    break
                if self._mutator.random.random() < 0.02:
                    await socket.send_bytes(message)
                else:
                    await socket.send_str(message.decode("utf-8", "replace"))
            if self._mutator.random.random() < 0.5:
                await socket.send_str("the end")  # is answered: all before it was read
                async for told in socket:
                    if told.type is not aiohttp.WSMsgType.TEXT or "is not JSON" in told.data:
                        break
            self.tally.answers[f"socket {socket.close_code}"] += 1

    async def _frames(self, frames: list[bytes]) -> None:
        """What no client would send; the server may hang up at any of it."""
        host, _, port = self._url.rpartition("/")[2].partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        key = base64.b64encode(bytes(16)).decode()
        writer.write(
            f"GET /v1/programs/ws HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
        )
        self.cases += len(frames)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 101"):
                self.tally.blame("no WebSocket was given", head)
            for frame in frames:
                writer.write(frame)
                await writer.drain()
            self.tally.answers["frames"] += 1
        except (ConnectionError, asyncio.IncompleteReadError):
            self.tally.answers["frames, hung up on"] += 1
        finally:
            writer.transport.abort()

    async def canary(self) -> Any:
        """What a server in order always answers."""
        await self._ask("GET", "/health")
        return (await self._ask("POST", "/generate", json=GENERATE[0])).get("output_ids")

    async def settled(self, seconds: float) -> None:
        """Nothing runs any more, and nothing is held."""
        info = await self._ask("GET", "/server_info")
        try:
            async with asyncio.timeout(seconds):
                while info and (info["running"] or info["waiting"] or info["programs"]):
                    info = await self._ask("GET", "/server_info")
        except TimeoutError:
            self.tally.blame(f"something still runs after {seconds:g} seconds", info)
        await self._ask("POST", "/flush_cache")
        info = await self._ask("GET", "/server_info")
        if info.get("pool_used"):
            self.tally.blame(f"{info['pool_used']} tokens of the pool are in use", info)

    async def _ask(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        """The answer to a right request; blame, and nothing, where there is none."""
        try:
            async with self._session.request(method, self._url + path, **how) as answer:
                if answer.status == 200:
                    found: dict[str, Any] = await answer.json()
                    return found
                problem = await answer.text()
        except aiohttp.ClientError as error:
            problem = repr(error)
        self.tally.blame(f"the server is not healthy: {method} {path}", problem)
        return {}


async def fuzz(
    url: str,
    count: int,
    seed: int = 0,
    *,
    clients: int = 8,
    every: int = 1000,
    patience: float = 60,
    show: bool = False,
) -> Tally:
    """At least ``count`` cases from ``clients`` at once; ``every`` so many a look at the server. All must end within ``patience`` seconds."""
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        run = Fuzz(url, session, seed)
        expected = await run.canary()
        if not expected:
            run.tally.blame("no canary", expected)

        async def send(until: int) -> None:
            while run.cases < until:
                try:
                    await run.case()
                except Exception as error:
                    run.tally.blame("a client failed", repr(error))

        with progress("fuzzing", unit="cases", show=show) as bar:
            while run.cases < count and len(run.tally.wrong) < 20:
                until = min(count, run.cases + every)
                await asyncio.gather(*(send(until) for _ in range(clients)))
                bar.update(run.cases, total=count)
                if (found := await run.canary()) != expected:
                    run.tally.blame(f"the canary sang {found}, not {expected}", "")
        await run.settled(patience)
        return run.tally


async def _main(arguments: argparse.Namespace) -> int:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[str] = loop.create_future()
    # a chat that lost its max_tokens goes on to the end of the context, and each of its steps looks at the whole pool
    settings = {"model": arguments.model, "max_model_len": 768, "max_total_tokens": 4096, "check_integrity": True}
    config = ServerConfig(port=0, access_log=False, log_level="error")
    serving = asyncio.ensure_future(serve(config, settings, ready=ready.set_result))
    waited: set[asyncio.Future[Any]] = {serving, ready}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        return serving.result()
    began = loop.time()
    tally = await fuzz(
        ready.result(), arguments.count, arguments.seed, clients=arguments.clients, show=sys.stderr.isatty()
    )
    seconds = loop.time() - began
    if not serving.done():
        os.kill(os.getpid(), signal.SIGTERM)
    (status,) = await asyncio.gather(serving, return_exceptions=True)  # somebody else may have stopped it before
    for name, times in sorted(tally.answers.items()):
        print(f"{times:9,}  {name}")
    print(f"{arguments.count:,} cases in {seconds:.0f} s, {len(tally.wrong)} wrong answers, exit status {status}")
    print("\n".join(tally.wrong[:20]))
    return int(bool(tally.wrong) or status != 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=None, help="model to serve; small is best (default: the embedded one)")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=8)
    return asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
