"""What the soak asks: programs, greedy canaries with the answers of one engine alone and without a cache, and requests that must be refused.

Invariants: everything follows from a seed and from what the model is; nothing here speaks HTTP.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixrt import Constraint, SamplingParams
from radixrt.engine.nodes import VERSION, Fork, Gen, Join, Ref, Select, Text, to_dict
from radixrt.engine.program_text import ProgramText
from radixrt.server.local import LocalClient

WORDS = (
    "river stone market light garden winter copper engine letter bridge window forest paper silver harbor music "
    "circle number summer bottle mirror planet ticket yellow carpet doctor signal orange village history"
).split()
PEOPLE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEXES = (
    r"[A-Z][a-z]{2,6} [0-9]{3}",
    r"(yes|no), because [a-z ]{3,12}\.",
    r"\d{4}-(0[1-9]|1[0-2])-[0-3][0-9]",
)
CHOICES = ("alpha", "beta", "gamma ray", "delta")


class Wrong(Exception):
    """An answer that is not what it must be."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A greedy request, and the tokens, text or scores that it has alone, without a cache."""

    path: str
    body: Mapping[str, Any]
    expected: Any


def check(holds: Any, what: Any) -> None:
    if not holds:
        raise Wrong(str(what)[:600])


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


# ---- programs


def graph(rng: random.Random, tokens: int, temperature: float) -> list[dict[str, Any]]:
    """A text, a generation, two branches from it, and a choice behind a text that names both."""

    def gen(id: int, parent: int) -> Gen:
        return Gen(id=id, parent=parent, params=SamplingParams(max_tokens=tokens, temperature=temperature, seed=id))

    nodes = [
        Text(id=0, parts=(f"About the {words(rng, 4)}: ",)),
        gen(1, 0),
        Fork(id=2, parent=1, count=2),
        Text(id=3, parent=2, parts=(" First, ",)),
        gen(4, 3),
        Text(id=5, parent=2, parts=(" Second, ",)),
        gen(6, 5),
        Join(id=7, parent=2, branches=(4, 6)),
        Text(id=8, parent=7, parts=(" So: ", Ref(4), " / ", Ref(6), " It is ")),
        Select(id=9, parent=8, choices=(("good",), ("bad",), ("quite fine",))),
    ]
    return [to_dict(node) for node in nodes]


ANSWERED = (1, 4, 6, 9)  # nodes of ``graph`` with an output


def outputs_of(events: Sequence[Mapping[str, Any]]) -> dict[int, list[list[int]]]:
    """Token ids by node, of events of a program."""
    for event in events:
        check(event["event"] in ("delta", "done"), f"event {event}")
    return {
        event["node"]: [output["token_ids"] for output in event["outputs"]]
        for event in events
        if event["event"] == "done"
    }


# ---- canaries


async def canaries(client: LocalClient, seed: int) -> list[Canary]:
    """20 greedy requests and their answers, one after the other, from an engine that should have no cache."""
    rng = random.Random(f"canaries {seed}")
    small = client.info.context_length < 1024
    tokens, length = (8, 6) if small else (12, 12)
    shared = words(rng, 2 * length)
    found = []

    async def answer(prompt: Any, **params: Any) -> Any:
        output = None
        sampling = SamplingParams(temperature=0, **params)
        async for delta in client.stream(prompt, sampling, request_id="canary", deltas=False):
            output = delta.output
        assert output is not None and output.error is None, output
        return output

    for i in range(6):
        text = (shared if i % 2 else "") + words(rng, length)
        output = await answer(text, max_tokens=tokens)
        sampling = {"max_new_tokens": tokens, "temperature": 0}
        prompt = {"text": text} if i % 3 else {"input_ids": list(output.prompt_token_ids)}
        found.append(Canary("/generate", {**prompt, "sampling_params": sampling}, list(output.token_ids)))
    for pattern in REGEXES:
        text = shared + words(rng, length)
        output = await answer(text, max_tokens=40, constraint=Constraint.regex(pattern))
        sampling = {"max_new_tokens": 40, "temperature": 0, "regex": pattern}
        found.append(Canary("/generate", {"text": text, "sampling_params": sampling}, list(output.token_ids)))
    output = await answer(shared, max_tokens=90, constraint=Constraint.json_schema(PEOPLE))
    sampling = {"max_new_tokens": 90, "temperature": 0, "json_schema": PEOPLE}
    found.append(Canary("/generate", {"text": shared, "sampling_params": sampling}, list(output.token_ids)))
    for _ in range(4):
        messages = [{"role": "system", "content": shared}, {"role": "user", "content": words(rng, length)}]
        output = await answer(messages, max_tokens=tokens)
        body = {"messages": messages, "temperature": 0, "max_tokens": tokens}
        found.append(Canary("/v1/chat/completions", body, output.text))
    for _ in range(2):
        ids = list((await answer(shared + words(rng, length), max_tokens=1)).prompt_token_ids)
        output = await answer(ids, max_tokens=tokens)
        found.append(Canary("/v1/completions", {"prompt": ids, "temperature": 0, "max_tokens": tokens}, output.text))
    for _ in range(2):
        nodes = graph(rng, tokens, 0.0)
        found.append(Canary("/v1/programs", {"version": VERSION, "nodes": nodes}, await _program(client, nodes)))
    for _ in range(2):
        ids = list((await answer(words(rng, length), max_tokens=0)).prompt_token_ids)
        text = ProgramText(client.tokenizer)
        scored = await client.score(ids, [text.after(choice).tolist() for choice in CHOICES], request_id="canary")
        body = {"input_ids": ids, "choices": list(CHOICES)}
        found.append(Canary("/score", body, [list(one) for one in scored.scores or ()]))
    return found


async def _program(client: LocalClient, nodes: list[dict[str, Any]]) -> dict[int, list[list[int]]]:
    heard: asyncio.Queue[str] = asyncio.Queue()
    link = client.programs("canary", heard.put_nowait)
    try:
        link.send(json.dumps({"op": "open", "program": "p", "version": VERSION}))
        link.send(json.dumps({"op": "add", "program": "p", "nodes": nodes}))
        events: list[dict[str, Any]] = []
        while sum(event["event"] == "done" for event in events) < len(ANSWERED):
            events.append(json.loads(await heard.get()))
            outputs_of(events)
        return outputs_of(events)
    finally:
        link.close()


def said(path: str, answer: Any) -> Any:
    """What a canary's answer is compared by; a stream's is the list of its events."""
    if path == "/generate":
        return (answer[-1] if isinstance(answer, list) else answer)["output_ids"]
    if path == "/score":
        return answer["token_logprobs"]
    if path == "/v1/programs":
        return outputs_of(answer if isinstance(answer, list) else answer["events"])
    if isinstance(answer, list):
        return "".join(text_of(choice) for event in answer for choice in event["choices"])
    return text_of(answer["choices"][0])


def text_of(choice: Mapping[str, Any]) -> str:
    """Of a choice of any of OpenAI's answers or chunks."""
    part = choice.get("message") or choice.get("delta") or choice
    return str(part.get("content") or part.get("text") or "")


def same(a: Any, b: Any) -> bool:
    """Equal, where numbers are not floats; these differ in rounding only."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, (int, float)):
        return abs(a - b) <= 1e-3 * max(1.0, abs(a))
    return bool(a == b)


# ---- what must be refused


def hostile(vocab: int, context: int) -> list[tuple[str, Any, Mapping[str, str]]]:
    """Path, body (an object, or bytes as they are) and headers of requests that are answered with a 4xx."""
    hi = [{"role": "user", "content": "hi"}]
    rows: list[tuple[str, Any, Mapping[str, str]]] = []
    for path, good in (
        ("/v1/chat/completions", {"messages": hi}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/generate", {"text": "hi"}),
        ("/score", {"prompt": "hi", "choices": ["a", "b"]}),
        ("/v1/programs", {"version": VERSION, "nodes": [{"id": 0, "kind": "text", "parts": ["a"]}]}),
    ):
        text = json.dumps(good)
        rows += [
            (path, b"", {}),
            (path, text[:-1].encode(), {}),
            (path, b"[]", {}),
            (path, b"\xff\xfe" + text.encode(), {}),
            (path, (text[:-1] + ', "temperature": NaN}').encode(), {}),
            (path, (text[:-1] + ', "cache_salt": "a", "cache_salt": "b"}').encode(), {}),
            (path, {**good, "temprature": 1}, {}),
            (path, {**good, "cache_salt": 3}, {}),
            (path, b"[" * 50_000, {}),
            (path, json.dumps({**good, "cache_salt": "x" * 2**21}).encode(), {}),
            (path, good, {"Content-Type": "text/plain"}),
            (path, good, {"Content-Encoding": "gzip"}),
            (path + "s", good, {}),
        ]
    for fields in (
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": "x " * (300 * context)}]},
        {"max_tokens": context + 1},
        {"max_tokens": -3},
        {"temperature": "hot"},
        {"top_p": 0},
        {"n": 10**6},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {str(vocab): 1}},
        {"logit_bias": {str(2**63): 1}},
        {"stop_token_ids": [2**63]},
        {"stop": [""]},
        {"regex": "("},
        {"regex": r"(a)\1"},
        {"regex": "a{1000}", "max_tokens": 3},
        {"regex": "a", "choice": ["b"]},
        {"guided_json": {"type": "strin"}},
        {"guided_json": {"not": {}}},
        {"guided_json": _nested(150)},
        {"response_format": {"type": "xml"}},
        {"grammar": "root = 3"},
        {"choice": []},
        {"chat_template": "{{ ''.__class__ }}"},
        {"model": "another"},
    ):
        rows.append(("/v1/chat/completions", {"messages": hi, **fields}, {}))
    for prompt in ([1, -1], [1, vocab], [2**63], [1.5], [], "", ["a", ""], [5] * (context + 1), "\udfff"):
        rows.append(("/v1/completions", {"prompt": prompt}, {}))
        rows.append(
            ("/generate", {"text" if isinstance(prompt, str) or prompt[:1] == ["a"] else "input_ids": prompt}, {})
        )
    for sampling in (
        {"regex": "["},
        {"max_new_tokens": "x"},
        {"json_schema": "{"},
        {"json_schema": {"enum": []}},
        {"tempo": 1},
    ):
        rows.append(("/generate", {"text": "hi", "sampling_params": sampling}, {}))
    rows += [
        ("/score", {"prompt": "hi", "choices": []}, {}),
        ("/score", {"prompt": "hi", "choices": ["a", "\ud800"]}, {}),
        ("/score", {"prompt": "hi", "choices": ["a"], "method": "best"}, {}),
        ("/v1/programs", {"version": 2, "nodes": []}, {}),
        ("/v1/programs", {"version": 1, "nodes": [{"id": 0, "kind": "gen", "parent": 7}]}, {}),
        ("/v1/programs", {"version": 1, "nodes": [{"id": 0, "kind": "gen", "params": {"max_tokens": -1}}]}, {}),
    ]
    return rows


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "strin"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema
