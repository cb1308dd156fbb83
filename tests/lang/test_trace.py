"""Tracing and compiling: the graph ahead of time is the graph of the run, as far as the body needs no generated value."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lang import GenerationFailed, MockBackend, ProgramGraph, assistant, function, gen, select, user
from lang.trace import Traced
from radixrt.engine.nodes import Arg, Gen, Node, Ref, Text, to_dict


@function
def static(s: Any, topic: str, style: str = "short") -> None:
    s += user(f"Tell me about {topic}, {style}.")
    with s.assistant():
        s += gen("a", temperature=0.8)
    branches = s.fork(2)
    for i, branch in enumerate(branches):
        branch += f"Point {i} of " + topic + ": "
        branch += gen("point", stop="\n")
    branches.join()
    s += "Points: " + s["point"][0] + ", " + f"{s['point'][1]}"
    s += select("verdict", ["good " + topic, "bad"])


@function
def branching(s: Any, topic: str) -> None:
    s += f"About {topic}: "
    s += gen("a")
    s += " more: " + gen("b")
    if "yes" in s["a"]:
        s += "agreed" + gen("c")
    else:
        s += "why?" + gen("d")


@function
async def waiting(s: Any, topic: str) -> None:
    s += topic + gen("a")
    s += await s.get("a") + gen("b")


@function
def returning(s: Any, topic: str) -> str:
    s += topic + gen("a")
    return f"<{s['a']}>"


def echo(call: Any) -> str:
    return f"{call.name}({call.text[-6:]})"


def content(nodes: Any) -> list[Any]:
    return [to_dict(node) for node in nodes]


def written(graph: ProgramGraph, nodes: Any) -> list[Any]:
    """Nodes with their references read, as a live body adds them."""
    found = []
    for node in nodes:
        data = to_dict(node)
        if isinstance(node, Text):
            data["parts"] = [graph.written(node.parts)]
        found.append(data)
    return found


def test_a_static_body_is_traced_whole() -> None:
    traced = static.trace()
    assert isinstance(traced, Traced) and traced.complete and not traced.stopped
    texts = [node for node in traced.graph if isinstance(node, Text)]
    assert texts[0].parts == ("Tell me about ", Arg("topic"), ", short.")
    assert any(isinstance(part, Ref) for text in texts for part in text.parts)
    assert ProgramGraph.from_dict(json.loads(json.dumps(traced.graph.to_dict()))).nodes == traced.graph.nodes
    known = static.trace(topic="cats")
    assert not any(isinstance(p, Arg) for node in known.graph if isinstance(node, Text) for p in node.parts)


@pytest.mark.parametrize("program", [static, branching, waiting, returning], ids=lambda p: p.name)
@pytest.mark.parametrize("way", ["yes", "no"])
def test_compiled_and_live_runs_are_the_same(program: Any, way: str) -> None:
    def script(call: Any) -> str:
        return way if call.name == "a" else "bad" if call.name == "verdict" else echo(call)

    live = program.run("cats", seed=3, backend=MockBackend(script))
    compiled = program.compile()
    for _ in range(2):
        early = compiled.run("cats", seed=3, backend=MockBackend(script))
        assert early.text() == live.text()
        assert early.variables == live.variables
        assert early.ret_value == live.ret_value
        assert written(early.graph, early.graph) == written(live.graph, live.graph)


def test_a_complete_graph_runs_without_python() -> None:
    calls = []

    @function
    def body(s: Any, topic: str) -> None:
        calls.append(topic)
        s += topic + gen("a")

    compiled = body.compile()
    states = compiled.run_batch([{"topic": f"t{i}"} for i in range(50)], backend=MockBackend(lambda c: c.text))
    assert [s["a"] for s in states] == [f"t{i}" for i in range(50)]
    assert len(calls) == 1  # the trace


def test_another_way_than_foreseen_is_taken_live() -> None:
    asked: list[str] = []

    @function
    def body(s: Any, topic: str) -> None:
        s += topic + gen("a")
        s += "first" if not asked else "second"  # the outside decides
        asked.append(topic)
        s += gen("b")

    compiled = body.compile()
    state = compiled.run("x", backend=MockBackend(lambda c: c.name))
    assert state.text() in ("xafirstb", "xasecondb")
    assert body.compile().run("x", backend=MockBackend(lambda c: c.name)).text() == "xasecondb"


@pytest.mark.parametrize(
    "use",
    [
        lambda s: len(s["a"]),
        lambda s: s["a"] == "x",
        lambda s: bool(s["a"]),
        lambda s: s["a"].strip(),
        lambda s: int(s["a"]),
        lambda s: s["a"][0],
        lambda s: "x" in s["a"],
        lambda s: f"{s['a']:>10}",
        lambda s: list(s["a"]),
        lambda s: s["n"],
        lambda s: re.search("x", s["a"]),
        lambda s: "".join([s["a"]]),
        lambda s: s["many"],
        lambda s: s.meta("a"),
        lambda s: s.text(),
        lambda s: s.messages(),
        lambda s: s.sync(),
        lambda s: s.call(lambda: 1 / 0),
        lambda s: s.map([1], lambda branch, item: None),
        lambda s: s.fork(2).race(1),
        lambda s: s.best_of(2, gen("z")),
        lambda s: s.append(f"{s['a']}"[:20]),
        lambda s: s.append(gen("q", regex=f"{s['a']}")),
        lambda s: s.append(gen("q", stop=[f"{s['a']}"])),
    ],
)  # fmt: skip
def test_what_needs_a_value_ends_the_trace(use: Any) -> None:
    @function
    def body(s: Any) -> None:
        s += "x" + gen("a") + gen("n", type=int) + gen("many", n=2)
        try:
            use(s)
        except Exception:
            s += "or reached in vain"
        s += "not reached"

    traced = body.trace()
    assert not traced.complete and "test_trace.py:" in traced.stopped
    assert "reached" not in json.dumps(traced.graph.to_dict())


def test_a_failing_node_fails_compiled_as_live() -> None:
    @function
    def body(s: Any) -> None:
        s += "x" + gen("a", regex="[0-9]") + gen("b")

    for program in (body, body.compile()):
        with pytest.raises(GenerationFailed, match=r"test_trace.py:\d+: 'a'"):
            program.run(backend=MockBackend({"a": "x", "b": "y"}))


def test_seeds_and_defaults_are_those_of_the_run() -> None:
    def params(state: Any) -> list[Any]:
        return [node.params for node in state.graph if isinstance(node, Gen)]

    compiled = static.compile(topic="cats")
    for seed in (1, 2):
        for options in ({}, {"temperature": 0.5, "max_tokens": 7}):
            live = static.run("cats", seed=seed, backend=MockBackend(), **options)
            assert params(compiled.run(seed=seed, backend=MockBackend(), **options)) == params(live)


def test_ids_are_in_order() -> None:
    nodes: list[Node] = list(static.trace().graph)
    assert [node.id for node in nodes] == list(range(len(nodes)))
    assert content(nodes)[0]["kind"] == "role"
    assert assistant and True
