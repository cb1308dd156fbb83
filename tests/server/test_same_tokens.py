"""What is asked over HTTP makes the tokens that it makes in process: requests, choices, constraints and whole programs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from lang import Runtime, RuntimeEndpoint, assistant, function, gen, select, user
from lang.loop import LOOP
from radixrt import AsyncEngine, Constraint, SamplingParams
from radixrt.engine.nodes import Gen, Select
from radixrt.engine.program_text import ProgramText
from radixrt.sampling.choices import METHODS
from radixrt.server.local import LocalClient
from tests.server.stand import reachable, served

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
}
EBNF = 'root ::= item ("," item)*\nitem ::= [a-c] [0-9]'
# as SGLang's clients write them, and the same for an engine
CONSTRAINTS: dict[str, tuple[dict[str, Any], Constraint | None]] = {
    "free": ({}, None),
    "regex": ({"regex": "[a-f]{2,5}(-[0-9]{2})?"}, Constraint.regex("[a-f]{2,5}(-[0-9]{2})?")),
    "schema": ({"json_schema": SCHEMA}, Constraint.json_schema(SCHEMA)),
    "ebnf": ({"ebnf": EBNF}, Constraint.grammar(EBNF, "ebnf")),
    "substring": (
        {"substring": {"text": "red and green, reddish", "max_length": 3}},
        Constraint.substring("red and green, reddish", max_length=3),
    ),
    "choice": (
        {"constraint": {"type": "choice", "choices": ["red", "green", "reddish"]}},
        Constraint.choice(["red", "green", "reddish"]),
    ),
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 11},
    "filtered": {"temperature": 0.8, "seed": 2**63, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "n": 3},
    "penalized": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
}


NAMES = [method.name for method in METHODS]


@function
def chosen(s: Any, method: str, temperature: float) -> None:
    s += "The sky is " + select("colour", ["blue", "green", "bluish"], temperature, method, seed=5)
    s += ", and grass is" + select("other", [" green", " blue", ""], temperature, method, seed=6)


@function
def constrained(s: Any, temperature: float, seed: int | None) -> None:
    sampling: dict[str, Any] = {"temperature": temperature, "seed": seed}
    s += "Name: " + gen("regex", 20, regex="[A-Z][a-z]{2,6}", **sampling)
    s += "\nJSON: " + gen("json", 60, json_schema=SCHEMA, **sampling)
    s += "\nItems: " + gen("ebnf", 20, grammar=EBNF, grammar_syntax="ebnf", **sampling)
    s += "\nOne of: " + gen("choice", 8, constraint=Constraint.choice(["red", "green"]), **sampling)
    s += "\nQuote: " + gen("quote", 12, substring="Name the items: one of red, green.", **sampling)
    s += "\nFree: " + gen("free", 6, ignore_eos=True, **sampling)


@function
def branched(s: Any, temperature: float, seed: int | None) -> None:
    sampling: dict[str, Any] = {"temperature": temperature, "seed": seed}
    s += user("Two points about the sea.") + assistant(gen("plan", 6, ignore_eos=True, **sampling))
    branches = s.fork(3)
    for i, branch in enumerate(branches):
        branch += user(f"Point {i}?") + assistant(gen("point", 9, regex="[a-z ]{3,12}", **sampling))
        branch += "\nIt is " + select("verdict", ["good", "bad", "fine"])
    branches.join()
    s += user("So: " + s["point"][0] + s["verdict"][2])
    s += assistant(gen("end", 50, json_schema=SCHEMA, **sampling))


PROGRAMS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"select {name}": (chosen, {"method": name, "temperature": 0.0}) for name in NAMES},
    **{f"select {name}, sampled": (chosen, {"method": name, "temperature": 1.5}) for name in NAMES},
    "constrained, greedy": (constrained, {"temperature": 0.0, "seed": None}),
    "constrained, seeded": (constrained, {"temperature": 1.0, "seed": 9}),
    "branched, greedy": (branched, {"temperature": 0.0, "seed": None}),
    "branched, seeded": (branched, {"temperature": 1.0, "seed": 9}),
}


async def _requests(client: LocalClient) -> None:
    engine = client._engine
    async with served(client) as http:
        for kind, (field, constraint) in CONSTRAINTS.items():
            for name, sampling in SAMPLINGS.items():
                params = SamplingParams(max_tokens=60, constraint=constraint, **sampling)
                (expected,) = await engine.generate("Here it is: ", params)
                body = {"text": "Here it is: ", "sampling_params": {"max_new_tokens": 60, **sampling, **field}}
                answer = await http.post("/generate", json=body)
                found = await answer.json()
                samples = found if isinstance(found, list) else [found]
                assert [(one["output_ids"], one["text"]) for one in samples] == [
                    (list(one.token_ids), one.text) for one in expected.samples
                ], (kind, name)
                if constraint is not None:
                    assert all(constraint.compile(client.tokenizer).accepts(one["text"]) for one in samples)


async def _scores(client: LocalClient) -> None:
    """``/score`` and the engine's own scores."""
    choices = [" good", " bad", ""]
    text = ProgramText(client.tokenizer)
    tokens = [text.after(choice).tolist() if choice else [] for choice in choices]
    prefix = client.tokenizer.encode("It is")
    expected = (await client.score(prefix, tokens, request_id=os.urandom(8).hex())).scores
    async with served(client) as http:
        for method in NAMES:
            answer = await http.post("/score", json={"input_ids": prefix, "choices": choices, "method": method})
            found = await answer.json()
            if answer.status == 400:
                assert client.tokenizer.bos_id is None and "unconditional" in method
                continue
            assert found["tokens"] == tokens
            assert [tuple(one) for one in found["token_logprobs"]] == list(expected or ())


def _made(state: Any) -> tuple[Any, ...]:
    """Everything that a program generated and chose; or why it could not."""
    if state.error() is not None:
        return (str(state.error()).partition(": ")[2],)
    graph = state.graph
    nodes = [node for node in graph if isinstance(node, (Gen, Select))]
    return tuple((node.id, [(one.text, one.token_ids) for one in graph.done[node.id].outputs]) for node in nodes)


async def _programs(client: LocalClient, runtime: Runtime) -> dict[str, tuple[Any, ...]]:
    """Run each program here and there; gives what they made."""

    def run(backend: Any) -> dict[str, tuple[Any, ...]]:
        return {
            name: _made(*program.run_batch([arguments], backend=backend))
            for name, (program, arguments) in PROGRAMS.items()
        }

    async with reachable(client) as url:
        backend = RuntimeEndpoint(url)

        def over_http() -> dict[str, tuple[Any, ...]]:
            try:
                return run(backend)
            finally:
                LOOP.call(backend.aclose)

        found = await asyncio.to_thread(over_http)
    expected = await asyncio.to_thread(run, runtime)
    for name in PROGRAMS:
        assert found[name] == expected[name], name
    return found


@pytest.fixture
def runtime(server_settings: dict[str, Any]) -> Iterator[Runtime]:
    with Runtime(**{"model_path" if name == "model" else name: value for name, value in server_settings.items()}) as it:
        yield it


async def test_requests(local_client: LocalClient) -> None:
    await _requests(local_client)


async def test_scores(local_client: LocalClient) -> None:
    await _scores(local_client)


async def test_programs(local_client: LocalClient, runtime: Runtime) -> None:
    made = await _programs(local_client, runtime)
    failed = [name for name, one in made.items() if len(one) == 1 and isinstance(one[0], str)]
    assert failed == [name for name in PROGRAMS if "unconditional" in name]  # the tiny model has no token to begin with


@pytest.mark.model
async def test_the_embedded_model() -> None:
    client = LocalClient(AsyncEngine(max_total_tokens=8192, check_integrity=True))
    await client.start()
    try:
        await _requests(client)
        await _scores(client)
        runtime = await asyncio.to_thread(Runtime(max_total_tokens=8192).load)
        try:
            made = await _programs(client, runtime)
        finally:
            await asyncio.to_thread(runtime.shutdown)
        assert {name: one for name, one in made.items() if isinstance(one[0], str)} == {}
    finally:
        await client.close()
