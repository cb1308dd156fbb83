"""What the clients of the soak say to a server, and how each answer is judged.

Invariants: what a client asks follows from its seed and number alone; every answer is checked by what other people wrote (``jsonschema``, ``re``)
or against what one engine without a cache said alone; a client never waits for ever.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import jsonschema
from soak_rows import (
    ANSWERED,
    CHOICES,
    PEOPLE,
    REGEXES,
    WORDS,
    Canary,
    Wrong,
    check,
    graph,
    hostile,
    outputs_of,
    said,
    same,
    text_of,
    words,
)

from radixrt.engine.nodes import VERSION

WEIGHTS: Mapping[str, float] = {
    "chat": 30,
    "constrained": 17,
    "generate": 10,
    "completion": 10,
    "score": 5,
    "program": 6,
    "socket": 4,
    "abort": 8,
    "hostile": 5,
    "canary": 5,
}
_TRIES = 30  # answers of 429 or 503 to one request
_PATIENCE = 600.0  # seconds for one answer
_REFUSED = ("message", "type", "param", "code")


@dataclass(slots=True)
class Tally:
    """What happened so far. Times are seconds."""

    left: float = math.inf  # requests that may still begin
    until: float = math.inf  # of the monotonic clock: none begins later
    done: Counter[str] = field(default_factory=Counter)  # by kind
    latencies: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    first: list[float] = field(default_factory=list)  # to the first event of a stream
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    retried: Counter[int] = field(default_factory=Counter)
    wrong: list[tuple[str, str]] = field(default_factory=list)  # kind, what
    prompt_tokens: int = 0  # of chats
    cached_tokens: int = 0

    def more(self) -> bool:
        if self.left <= 0 or time.monotonic() >= self.until:
            return False
        self.left -= 1
        return True


@dataclass(frozen=True, slots=True)
class Site:
    """The server. ``small``: its context is of a test's model, whose tokens are bytes."""

    url: str
    vocab: int
    context: int
    most_wait: float = 30.0  # seconds, whatever Retry-After says

    @property
    def small(self) -> bool:
        return self.context < 1024


# ---- a client


class Client:
    """One of many: asks, and judges what it is answered, until the tally says that it is enough."""

    def __init__(
        self,
        number: int,
        seed: int,
        session: aiohttp.ClientSession,
        site: Site,
        tally: Tally,
        birds: Sequence[Canary],
        weights: Mapping[str, float] = WEIGHTS,
    ) -> None:
        self._rng = random.Random(f"{seed} {number}")
        self._session, self._site, self._tally, self._birds = session, site, tally, birds
        self._kinds, self._weights = list(weights), list(weights.values())
        self._messages: list[dict[str, str]] = []
        self._attacks = hostile(site.vocab, site.context)
        self._length, self._tokens = (5, 10) if site.small else (8, 12)
        shared = random.Random(seed)  # all clients have these in common
        self._systems = [words(shared, 12 if site.small else 40) for _ in range(4)]

    async def run(self) -> None:
        while self._tally.more():
            await self.act(self._rng.choices(self._kinds, self._weights)[0])

    async def act(self, kind: str) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(_PATIENCE):
                await getattr(self, f"_{kind}")()
        except (Wrong, aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            self._tally.wrong.append((kind, f"{type(error).__name__}: {error}"[:800]))
        self._tally.done[kind] += 1
        self._tally.latencies[kind].append(time.monotonic() - began)

    # ---- asking

    async def _ask(self, kind: str, path: str, body: Mapping[str, Any], *, stream: bool | None = None) -> Any:
        """The answer to a request that is right: an object or, of a stream, the list of its events."""
        for _ in range(_TRIES):
            began = time.monotonic()
            sent = body if stream is None else {**body, "stream": stream}
            async with self._session.post(self._site.url + path, json=sent) as answer:
                self._tally.statuses[kind, answer.status] += 1
                if answer.status in (429, 503):
                    self._tally.retried[answer.status] += 1
                    await asyncio.sleep(min(float(answer.headers["Retry-After"]), self._site.most_wait))
                    continue
                if answer.status != 200:
                    raise Wrong(f"{path}: {answer.status} {await answer.text()} to {sent}"[:600])
                if not stream:
                    return await answer.json()
                check(answer.content_type == "text/event-stream", f"{path}: {answer.content_type}")
                events = []
                async for event in _events(answer):
                    if not events:
                        self._tally.first.append(time.monotonic() - began)
                    events.append(event)
                check(events and events.pop() == "[DONE]", f"{path}: the stream has no end")
                for event in events:
                    check("error" not in event, event)
                return events
        raise Wrong(f"{path}: refused {_TRIES} times")

    # ---- what it does

    async def _chat(self) -> None:
        rng = self._rng
        if len(self._messages) >= (5 if self._site.small else 9) or rng.random() < 0.1:
            self._messages = []
        if not self._messages:
            self._messages = [{"role": "system", "content": rng.choice(self._systems)}]
        asked = [*self._messages, {"role": "user", "content": words(rng, self._length)}]
        body: dict[str, Any] = {
            "messages": asked,
            "max_tokens": rng.randint(2, self._tokens),
            "seed": rng.randrange(99),
        }
        body |= {"temperature": rng.choice((0, 0.8))}
        if stream := rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        self._messages = []
        answer = await self._ask("chat", "/v1/chat/completions", body, stream=stream)
        content, reason, usage = _chat_answer(answer)
        check(reason in ("stop", "length"), answer)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        check(0 <= cached < usage["prompt_tokens"], usage)
        check(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], usage)
        check(0 < usage["completion_tokens"] <= body["max_tokens"], (usage, body["max_tokens"]))
        check(reason == "stop" or usage["completion_tokens"] == body["max_tokens"], (usage, body["max_tokens"]))
        self._tally.prompt_tokens += usage["prompt_tokens"]
        self._tally.cached_tokens += cached
        self._messages = [*asked, {"role": "assistant", "content": content}]

    async def _constrained(self) -> None:
        rng = self._rng
        kind = rng.choice(("json", "new json", "object", "regex", "choice"))
        holds: Callable[[str], Any]
        if kind == "regex":
            value: Any = rng.choice(REGEXES)
            holds = re.compile(value).fullmatch
        elif kind == "choice":
            value = list(CHOICES)
            holds = value.__contains__
        else:
            value = PEOPLE
            if kind == "new json":  # one that nobody has asked for before
                names = [f"k{rng.randrange(10**6)}", "b"]
                value = {"type": "object", "properties": {name: {"type": "boolean"} for name in names}, "required": names, "additionalProperties": False}  # fmt: skip
            elif kind == "object":
                value = {"type": "object"}
            holds = lambda text: _valid(text, value)
        plain = {"json": "json_schema", "new json": "json_schema", "object": "json_schema"}.get(kind, kind)
        stream, temperature = rng.random() < 0.3, rng.choice((0, 1))
        common = {"temperature": temperature, "max_tokens": 90, "seed": rng.randrange(10**6)}
        way = rng.randrange(4)
        if way == 0 and kind != "choice":
            sampling = {plain: value, "max_new_tokens": 90, "temperature": temperature}
            body = {"text": words(rng, self._length), "sampling_params": sampling}
            answer = await self._ask("constrained", "/generate", body, stream=stream)
            text = (answer[-1] if stream else answer)["text"]
        elif way == 1:
            field = {"json_schema": "guided_json", "regex": "guided_regex", "choice": "guided_choice"}[plain]
            body = {"prompt": words(rng, self._length), field: value, **common}
            text = said("/v1/completions", await self._ask("constrained", "/v1/completions", body, stream=stream))
        else:
            form: dict[str, Any] = {plain: value}
            if kind == "object" and way == 2:
                form = {"response_format": {"type": "json_object"}}
            elif plain == "json_schema" and way == 2:
                form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}
            elif way == 2:
                form = {"structured_outputs": form}
            messages = [{"role": "user", "content": words(rng, self._length)}]
            body = {"messages": messages, **form, **common}
            text = _chat_answer(await self._ask("constrained", "/v1/chat/completions", body, stream=stream))[0]
        check(holds(text), f"{text!r} is not {value}")

    async def _generate(self) -> None:
        rng = self._rng
        n, most, stream = rng.choice((1, 1, 3)), rng.randint(1, self._tokens), rng.random() < 0.5
        sampling = {
            "max_new_tokens": most,
            "temperature": rng.choice((0, 0.7)),
            "n": n,
            "ignore_eos": rng.random() < 0.5,
        }
        top = rng.randrange(3)
        body: dict[str, Any] = {"text": words(rng, self._length), "sampling_params": sampling}
        if logprobs := rng.random() < 0.3:
            body |= {"return_logprob": True, "top_logprobs_num": top}
        answer = await self._ask("generate", "/generate", body, stream=stream)
        answers = answer if isinstance(answer, list) else [answer]
        ended = [one for one in answers if one["meta_info"]["finish_reason"] is not None]
        check(len(ended) == n, f"{len(ended)} of {n} samples")
        for one in ended:
            ids, meta = one["output_ids"], one["meta_info"]
            check(0 < len(ids) <= most and len(ids) == meta["completion_tokens"], one)
            check(all(0 <= id < self._site.vocab for id in ids), ids)
            if sampling["ignore_eos"]:
                check(len(ids) == most, one)
            if logprobs:
                entries = meta["output_token_logprobs"]
                check([entry[1] for entry in entries] == ids and all(entry[0] <= 0 for entry in entries), entries)

    async def _completion(self) -> None:
        rng = self._rng
        prompts: list[Any] = [words(rng, self._length) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.3:
            prompts = [[rng.randrange(8, self._site.vocab) for _ in range(self._length)] for _ in prompts]
        n, most = rng.choice((1, 2)), rng.randint(1, self._tokens)
        stream, logprobs = rng.random() < 0.4, rng.choice((None, 0, 3))
        echo = not stream and rng.random() < 0.3
        body = {"prompt": prompts, "n": n, "max_tokens": most, "temperature": 0.7, "logprobs": logprobs, "echo": echo}
        answer = await self._ask("completion", "/v1/completions", body, stream=stream)
        choices = [choice for event in (answer if stream else [answer]) for choice in event["choices"]]
        ended = [choice for choice in choices if choice["finish_reason"]]
        check(sorted(choice["index"] for choice in ended) == list(range(n * len(prompts))), choices)
        for choice in choices:
            found = choice["logprobs"]
            if logprobs is None or found is None:
                check(found is None or stream, choice)
                continue
            check(len({len(entries) for entries in found.values()}) == 1, choice)
            check(all(value is None or value <= 0 for value in found["token_logprobs"]), choice)
            if not stream and not echo:
                check(len(found["tokens"]) <= most, choice)
        if echo and isinstance(prompts[0], str):
            for choice in choices:
                check(choice["text"].startswith(prompts[choice["index"] // n]), choice)

    async def _score(self) -> None:
        rng = self._rng
        choices = rng.sample(WORDS, rng.randint(1, 6))
        method = rng.choice(("token_length_normalized", "greedy_token_selection"))
        body = {"prompt": words(rng, self._length), "choices": choices, "method": method}
        answer = await self._ask("score", "/score", body)
        check(answer["choice"] == choices[answer["index"]], answer)
        check(all(value <= 0 for one in answer["token_logprobs"] for value in one), answer)
        check(abs(sum(answer["probabilities"]) - 1) < 1e-6, answer)

    async def _program(self) -> None:
        nodes = graph(self._rng, self._rng.randint(1, self._tokens), 0.8)
        body = {"version": VERSION, "nodes": nodes, "name": "soak"}
        stream = self._rng.random() < 0.5
        answer = await self._ask("program", "/v1/programs", body, stream=stream)
        found = outputs_of(answer if stream else answer["events"])
        check(sorted(found) == list(ANSWERED), found)

    async def _socket(self) -> None:
        """A program that grows as it is answered; then one that is closed while it runs; then nonsense."""
        rng = self._rng
        async with self._session.ws_connect(self._site.url + "/v1/programs/ws") as socket:
            nodes = graph(rng, rng.randint(1, self._tokens), 0.8)
            await socket.send_json({"op": "open", "program": "p", "version": VERSION, "stream": rng.random() < 0.5})
            events: list[dict[str, Any]] = []
            for part, last in ((nodes[:2], 1), (nodes[2:5], 4), (nodes[5:], 9)):
                await socket.send_json({"op": "add", "program": "p", "nodes": part})
                while last not in outputs_of(events):
                    events.append(await socket.receive_json())
            check(sorted(outputs_of(events)) == list(ANSWERED), events)
            await socket.send_json({"op": "close", "program": "p"})
            await socket.send_json({"op": "open", "program": "q", "version": VERSION})
            await socket.send_json({"op": "add", "program": "q", "nodes": nodes})
            await socket.send_json({"op": "cancel", "program": "q", "nodes": [1]})
            await socket.send_json({"op": "close", "program": "q"})
            await socket.send_str(rng.choice(("no json", "[]", '{"op": "opn"}', '{"op": "add", "program": "x"}')))
            while (event := await socket.receive_json())["event"] != "error":
                check(event["program"] == "q", event)

    async def _abort(self) -> None:
        """The client goes away: before the first token, in the middle of a stream, or while it waits for a whole answer."""
        rng = self._rng
        long = 60 if self._site.small else 100
        messages = [
            {"role": "system", "content": self._systems[0]},
            {"role": "user", "content": words(rng, self._length)},
        ]
        path, body = rng.choice(
            (
                ("/v1/chat/completions", {"messages": messages, "max_tokens": long, "n": 2}),
                ("/v1/completions", {"prompt": ["a", "b c"], "max_tokens": long}),
                (
                    "/generate",
                    {"text": words(rng, 3), "sampling_params": {"max_new_tokens": long, "regex": "[a-z ]{60,}"}},
                ),
                ("/v1/programs", {"version": VERSION, "nodes": graph(rng, long, 1.0)}),
                ("/v1/programs/ws", {}),
            )
        )
        if path.endswith("/ws"):
            async with self._session.ws_connect(self._site.url + path) as socket:
                await socket.send_json({"op": "open", "program": "p", "version": VERSION, "stream": True})
                await socket.send_json({"op": "add", "program": "p", "nodes": graph(rng, long, 1.0)})
                for _ in range(rng.randrange(5)):
                    await socket.receive_json()
                if rng.random() < 0.5:  # and without goodbye
                    socket._response.close()
            return
        stream = rng.random() < 0.7
        events = rng.randrange(1, 8) if stream and rng.random() < 0.6 else None
        try:
            async with asyncio.timeout(None if events else rng.uniform(0, 0.5)):
                async with self._session.post(self._site.url + path, json={**body, "stream": stream}) as answer:
                    self._tally.statuses["abort", answer.status] += 1
                    check(answer.status in (200, 429, 503), f"{path}: {answer.status} {body}")
                    if events is None:
                        await answer.read()
                    elif answer.status == 200:
                        async for _ in _events(answer):
                            events -= 1
                            if not events:
                                break
                    answer.close()
        except TimeoutError:
            self._tally.statuses["abort", 0] += 1

    async def _hostile(self) -> None:
        path, body, headers = self._rng.choice(self._attacks)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url, headers = self._site.url + path, {"Content-Type": "application/json", **headers}
        for _ in range(_TRIES):
            async with self._session.post(url, data=data, headers=headers) as answer:
                self._tally.statuses["hostile", answer.status] += 1
                if answer.status in (429, 503):  # nobody has looked at it yet
                    self._tally.retried[answer.status] += 1
                    await asyncio.sleep(min(float(answer.headers["Retry-After"]), self._site.most_wait))
                    continue
                text = await answer.text()
                check(400 <= answer.status < 500, f"{path}: {answer.status} {text[:300]} to {data[:200]!r} {headers}")
                check(set(json.loads(text)["error"]) == set(_REFUSED), f"{path}: {text[:300]}")
                return

    async def _canary(self) -> None:
        await self.sing(self._rng.choice(self._birds), stream=self._rng.random() < 0.5)

    async def sing(self, bird: Canary, *, stream: bool) -> None:
        """Raises Wrong where a canary's answer is another than it was alone."""
        can_stream = bird.path != "/score"
        answer = await self._ask("canary", bird.path, bird.body, stream=stream if can_stream else None)
        found = said(bird.path, answer)
        check(same(bird.expected, found), f"{bird.path} {dict(bird.body)}: {found} and alone {bird.expected}")


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    async for line in answer.content:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            yield "[DONE]" if data == b"[DONE]" else json.loads(data)


def _chat_answer(answer: Any) -> tuple[str, str, dict[str, Any]]:
    """Text, finish reason and usage of a chat's answer or events."""
    events = answer if isinstance(answer, list) else [answer]
    choices = [choice for event in events for choice in event["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    check(len(reasons) == 1, events)
    return "".join(map(text_of, choices)), reasons[0], events[-1].get("usage") or {}


def _valid(text: str, schema: Any) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
