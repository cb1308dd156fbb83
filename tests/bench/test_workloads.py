"""Workloads: the same everywhere, of the published shapes, each prompt made of what it continues."""

from __future__ import annotations

import itertools
import subprocess
import sys
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.bench.workloads import WORKLOADS, Encode, Node, Tokens, Workload, build, unique_edges
from radixrt.errors import InvalidRequest


def encode(text: str) -> list[int]:
    """A stand-in tokenizer: one id a word, the same in every process."""
    return [zlib.crc32(word.encode()) % 9973 for word in text.split()]


def spell(text: str) -> list[int]:
    """One id a character: short pieces come out alike, as with a small vocabulary."""
    return [ord(letter) for letter in text]


def play(workload: Workload) -> tuple[dict[str, Tokens], dict[str, Tokens]]:
    """Prompts and outputs where the "model" answers with ids no prompt contains."""
    prompts: dict[str, Tokens] = {}
    outputs: dict[str, Tokens] = {}
    for number, node in enumerate(workload.nodes):
        prompts[node.id] = workload.prompt(node, prompts, outputs)
        outputs[node.id] = tuple(100_000 + number * 1000 + i for i in range(node.max_tokens))
    return prompts, outputs


SHAPES = {  # name: (requests, stages, prompt tokens of the first request, of the last, generated tokens, at once)
    "few-shot": (48, 1, 820, 820, 48 * 16, None),
    "chat": (32, 4, 250, 250 + 3 * (64 + 50), 32 * 64, None),
    "tree-of-thought": (108, 4, 360, 360 + 3 * (24 + 24), 108 * 24, None),
    "unshared": (16, 1, 200, 200, 16 * 48, 8),
    "single-stream": (1, 1, 32, 32, 128, 1),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_published_shape(name: str) -> None:
    workload = build(name, encode)
    lengths = workload.prompt_lengths()
    first, last = workload.nodes[0], workload.nodes[-1]
    shape = (
        len(workload.nodes),
        len(workload.stages()),
        lengths[first.id],
        lengths[last.id],
        workload.generated_tokens,
        workload.concurrency,
    )
    assert shape == SHAPES[name]
    prompts, _outputs = play(workload)
    assert {name: len(tokens) for name, tokens in prompts.items()} == lengths
    assert workload.longest == max(len(prompts[node.id]) + node.max_tokens for node in workload.nodes)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(WORKLOADS)), st.floats(0.01, 0.4), st.integers(0, 2**32), st.sampled_from([encode, spell])
)
def test_deterministic_and_distinct(name: str, scale: float, seed: int, tokens_of: Encode) -> None:
    workload = build(name, tokens_of, scale=scale, seed=seed)
    assert workload == build(name, tokens_of, scale=scale, seed=seed)
    prompts, _outputs = play(workload)
    assert len(set(prompts.values())) == len(prompts), "two requests have the same prompt"
    if len(workload.nodes[0].tokens) > 50:
        assert workload != build(name, tokens_of, scale=scale, seed=seed + 1)


def test_pieces_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="too short to be told apart"):
        build("few-shot", lambda text: [7] * len(text.split()), scale=0.1)


def test_the_same_in_another_process() -> None:
    script = (
        "import zlib\nfrom radixrt.bench.workloads import WORKLOADS, build\n"
        "encode = lambda text: [zlib.crc32(word.encode()) % 9973 for word in text.split()]\n"
        "print(zlib.crc32(repr([build(name, encode, scale=0.2) for name in WORKLOADS]).encode()))"
    )
    there = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True).stdout
    here = zlib.crc32(repr([build(name, encode, scale=0.2) for name in WORKLOADS]).encode())
    assert int(there) == here


@pytest.mark.parametrize("name", ["chat", "tree-of-thought"])
def test_prompts_of_a_stage_hold_the_outputs_of_the_one_before(name: str) -> None:
    workload = build(name, encode, scale=0.25)
    prompts, outputs = play(workload)
    stages = workload.stages()
    assert len(stages) > 2
    for before, stage in itertools.pairwise(stages):
        earlier = {node.id for node in before}
        for node in stage:
            assert node.parent in earlier
            assert prompts[node.id] == prompts[node.parent] + outputs[node.parent] + node.tokens


def test_few_shot_shares_and_unshared_does_not() -> None:
    prompts, outputs = play(few := build("few-shot", encode))
    assert len({tokens[:800] for tokens in prompts.values()}) == 1
    assert 800 + 48 < unique_edges(few, prompts, outputs) <= 800 + 48 * 20
    prompts, outputs = play(apart := build("unshared", encode))
    assert len({tokens[0] for tokens in prompts.values()}) == 16
    assert unique_edges(apart, prompts, outputs) == 16 * 200


# sequences of prompts and outputs, one request a stage or all in one; edges counted by hand
EDGES = [
    ("nothing shared", [Node("a", (1, 2), 1), Node("b", (3, 4), 1)], {"a": (9,), "b": (9,)}, 4),
    ("a shared head", [Node("a", (1, 2), 1), Node("b", (1, 3), 1)], {"a": (9,), "b": (9,)}, 3),
    ("the same prompt twice", [Node("a", (1, 2), 1), Node("b", (1, 2), 1)], {"a": (9,), "b": (9,)}, 2),
    # the last output token was never fed back: it and the new text are computed, the rest is there
    ("a second turn", [Node("a", (1, 2), 3), Node("b", (5,), 1, "a")], {"a": (7, 8, 9), "b": (9,)}, 2 + 2),
    (
        "two branches share the last output token",
        [Node("a", (1, 2), 2), Node("b", (5,), 1, "a"), Node("c", (6,), 1, "a")],
        {"a": (7, 8), "b": (9,), "c": (9,)},
        2 + 1 + 2,
    ),
]


@pytest.mark.parametrize(("nodes", "outputs", "edges"), [row[1:] for row in EDGES], ids=[row[0] for row in EDGES])
def test_unique_edges_table(nodes: list[Node], outputs: dict[str, Tokens], edges: int) -> None:
    workload = Workload("table", "", tuple(nodes))
    prompts: dict[str, Tokens] = {}
    for node in nodes:
        prompts[node.id] = workload.prompt(node, prompts, outputs)
    assert unique_edges(workload, prompts, outputs) == edges


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), min_size=1, max_size=12))
def test_unique_edges_are_the_distinct_prefixes(prompts: list[Tokens]) -> None:
    nodes = tuple(Node(f"n{i}", tokens, 0) for i, tokens in enumerate(prompts))
    given_prompts = {node.id: node.tokens for node in nodes}
    distinct = {tokens[:end] for tokens in prompts for end in range(1, len(tokens) + 1)}
    assert unique_edges(Workload("w", "", nodes), given_prompts, {node.id: () for node in nodes}) == len(distinct)


BAD = [
    (lambda: build("fewshot", encode), "workload='fewshot': no such workload; did you mean 'few-shot'?"),
    (lambda: build("chat", encode, scale=0.0), "scale=0.0: must be above 0 and at most 100"),
    (lambda: build("chat", encode, scale=float("nan")), "scale=nan: must be above 0 and at most 100"),
    (
        lambda: Workload("w", "", (Node("b", (1,), 1, "a"), Node("a", (1,), 1))),
        "parent='a' of node 'b': must come before its child",
    ),
    (lambda: Workload("w", "", (Node("a", (1,), 1), Node("a", (2,), 1))), "id='a': two nodes of w have this id"),
    (lambda: Workload("w", "", (Node("a", (), 1),)), "tokens: node 'a' must have at least one"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _make, message in BAD])
def test_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert str(caught.value) == message
