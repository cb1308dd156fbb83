"""Records: what is written is read back equal, what is not whole is refused, and a program runs from one without a model."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lang.backends.base import Backend, ProgramInfo
from lang.backends.mock import MockBackend
from lang.graph import ProgramGraph
from lang.record import Replay, compare, read, write
from radixrt import Constraint
from radixrt.engine.nodes import (
    Arg,
    Choosing,
    Delta,
    Done,
    Event,
    Failed,
    Fork,
    Gen,
    Join,
    Node,
    Output,
    Ref,
    Role,
    Select,
    Text,
    Usage,
)
from radixrt.errors import InvalidRequest
from radixrt.request import FinishReason, PositionLogprobs, SamplingParams, TokenLogprob

# ---- round trip

texts = st.text(max_size=20) | st.sampled_from(["\u2028\x85\x0b\x1e\r\n", "\ud800", "</script>", "\x00\x7f", "é🎉", ""])
floats = st.floats(width=64)
counts = st.integers(0, 2**40)
params = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 99),
    temperature=st.floats(0, 100),
    top_p=st.floats(0.01, 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=2).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, 9), st.floats(-100, 100), max_size=2),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    constraint=st.none() | st.sampled_from([Constraint.regex("[ab]+"), Constraint.json_schema({"type": "object"})]),
)
tokens = st.builds(TokenLogprob, counts, floats, counts)
outputs = st.builds(
    Output,
    texts,
    st.lists(counts, max_size=3).map(tuple),
    st.sampled_from(FinishReason),
    st.none() | texts | counts,
    st.none()
    | st.lists(st.builds(PositionLogprobs, tokens, st.lists(tokens, max_size=2).map(tuple)), max_size=2).map(tuple),
)
rows = st.lists(floats, max_size=3).map(tuple)
choosings = st.builds(
    Choosing, counts, rows, rows, rows, floats, st.just(((1, 2), (3,))), st.lists(rows, max_size=2).map(tuple)
)
usages = st.builds(Usage, *[counts] * 6, *[floats] * 4)


@st.composite
def graphs(draw: st.DrawFn) -> ProgramGraph:
    graph = ProgramGraph(draw(texts), draw(st.integers(0, 2**64)), seconds=draw(st.none() | floats))
    for id in sorted(draw(st.sets(st.integers(0, 2**40), max_size=6))):
        earlier = list(graph.nodes)
        parent = draw(st.none() | st.sampled_from(earlier)) if earlier else None
        part = texts | st.builds(Arg, texts)
        if earlier:
            part |= st.builds(Ref, st.sampled_from(earlier), st.integers(0, 3))
        parts = st.lists(part, max_size=3).map(tuple)
        common: dict[str, Any] = {"id": id, "parent": parent, "sample": draw(st.integers(0, 3))}
        kind = draw(st.sampled_from(["text", "role", "gen", "select", "fork", "join"]))
        if kind == "text":
            node: Node = Text(**common, parts=draw(parts))
        elif kind == "role":
            node = Role(**common, role=draw(texts), begin=draw(st.booleans()))
        elif kind == "gen":
            node = Gen(**common, params=draw(params), name=draw(texts), heal=draw(st.booleans()))
        elif kind == "select":
            choices = tuple(draw(st.lists(parts, max_size=3)))
            seed, heat = draw(st.none() | st.integers(0, 9)), draw(st.floats(0, 100))
            node = Select(**common, choices=choices, method=draw(texts), temperature=heat, seed=seed)
        elif kind == "fork":
            node = Fork(**common, count=draw(st.integers(0, 9)))
        else:
            node = Join(**common, branches=tuple(earlier[:2]))
        graph.nodes[id] = node
        for table, value in ((graph.lines, texts), (graph.names, texts)):
            if draw(st.booleans()):
                table[id] = draw(value)
        if draw(st.booleans()):
            listed = tuple(draw(st.lists(outputs, max_size=2)))
            graph.done[id] = Done(id, listed, draw(usages), draw(st.none() | choosings))
        elif draw(st.booleans()):
            graph.failed[id] = Failed(id, draw(texts), draw(texts))
    return graph


@given(graphs())
@settings(max_examples=150, deadline=None)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, graph: ProgramGraph) -> None:
    path = tmp_path_factory.mktemp("records") / "run.jsonl"
    assert write(graph, path) == path
    assert repr(read(path)) == repr(graph)  # nan is not equal to itself, and -0.0 is equal to 0.0: their texts say it
    for line in path.read_bytes().removesuffix(b"\n").split(b"\n"):
        json.loads(line, parse_constant=pytest.fail)


def small() -> ProgramGraph:
    graph = ProgramGraph("small", 3, seconds=1.5)
    graph.nodes = {
        0: Text(id=0, parts=("Who?\n",)),
        1: Gen(id=1, parent=0, name="who", params=SamplingParams(max_tokens=9)),
        2: Text(id=2, parent=1, parts=("Sure?",)),
    }
    graph.lines = {0: "a.py:1", 1: "a.py:2", 2: "a.py:3"}
    graph.names = {1: "who"}
    graph.done[1] = Done(1, (Output("me", (4, 5)),), Usage(5, 0, 5, 2, queue_time=math.inf))
    return graph


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = write(small(), tmp_path / "run.jsonl")
    before = path.read_bytes()
    graph = small()
    graph.done[1] = Done(1, (Output("me", stop_reason=b"x"),), Usage())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="node 1: cannot be written as JSON"):
        write(graph, path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["run.jsonl"]


def changed(at: int, old: str, new: str) -> Callable[[list[str]], list[str]]:
    def change(lines: list[str]) -> list[str]:
        assert old in lines[at], lines[at]
        return [*lines[:at], lines[at].replace(old, new), *lines[at + 1 :]]

    return change


BROKEN: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "empty": (lambda lines: [], "is empty"),
    "foreign": (lambda lines: ['{"a": 1}'], "line 1: the header has no field 'a'"),
    "not json": (lambda lines: ["hello"], "line 1: is not JSON: Expecting value at column 1"),
    "a list": (lambda lines: ["[1]"], "line 1: the header is .* must be an object"),
    "no version": (lambda lines: ["{}"], "line 1: is no header"),
    "version": (changed(0, '_record":1', '_record":2'), "line 1: has version 2: version 1 is read"),
    "cut between lines": (lambda lines: lines[:3], "line 3: ends the file after 2 of 3 nodes"),
    "cut in a line": (lambda lines: [*lines[:3], lines[3][:20]], "line 4: is not JSON"),
    "more lines": (lambda lines: [*lines, lines[-1]], "line 5: stands behind the last of 3"),
    "kind": (changed(2, '"gen"', '"gne"'), "line 3: node.kind='gne': must be one of text"),
    "parent": (changed(2, '"parent":0', '"parent":7'), "line 3: node 1: needs node 7"),
    "order": (lambda lines: [lines[0], lines[2], lines[1], lines[3]], "line 2: node 1: needs node 0"),
    "twice": (lambda lines: [*lines[:3], lines[2]], "line 4: node 1: its id is taken"),
    "params": (changed(2, '"max_tokens":9', '"max_tokens":-9'), "line 3: max_tokens=-9: must be at least"),
    "NaN": (changed(0, "1.5", "NaN"), "line 1: contains NaN"),
    "inf": (changed(2, '"inf"', '"infinite"'), "line 3: queue_time='infinite': must be a number"),
    "usage": (changed(2, "queue_time", "queue_tim"), "line 3: the usage has no field 'queue_tim'"),
    "a float count": (changed(2, '"prompt_tokens":5', '"prompt_tokens":5.5'), "prompt_tokens=5.5: must be an integer"),
    "text": (changed(2, '"text":"me"', '"text":7'), "line 3: text=7: must be a string"),
    "no outputs": (changed(2, '"outputs"', '"out"'), "line 3: the done has no field 'out'"),
    "seed": (changed(0, '"seed":3', '"seed":true'), "line 1: seed=True: must be an integer"),
    "deep": (lambda lines: [lines[0], "[" * 200_000], "line 2: is not JSON"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files(tmp_path: Path, case: str) -> None:
    change, problem = BROKEN[case]
    path = write(small(), tmp_path / "run.jsonl")
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))
    with pytest.raises(InvalidRequest, match=problem) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))


def test_not_utf8(tmp_path: Path) -> None:
    path = write(small(), tmp_path / "run.jsonl")
    path.write_bytes(path.read_bytes().replace(b"Who", b"\xffho"))
    with pytest.raises(InvalidRequest, match="line 2: is not UTF-8 at byte"):
        read(path)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_cut_is_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = write(small(), tmp_path_factory.mktemp("cut") / "run.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 2))])
    with pytest.raises(InvalidRequest):
        read(path)


def test_line_ends_and_a_mark_of_other_systems(tmp_path: Path) -> None:
    path = write(small(), tmp_path / "run.jsonl")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read(path) == small()


# ---- replay


def play(backend: Backend, nodes: Sequence[Node], steps: Sequence[Callable[[Any], None]] = ()) -> list[Event]:
    """The events of a program whose nodes are added at once, then of each step."""

    async def run() -> list[Event]:
        events: list[Event] = []
        await backend.start()
        session = backend.open(ProgramInfo("1", "p", 1), events.append)
        session.add(nodes)
        for step in (None, *steps):
            if step is not None:
                step(session)
            for _ in range(20):
                await asyncio.sleep(0)
        session.close()
        session.close()
        await backend.aclose()
        return events

    return asyncio.run(run())


def recorded(nodes: Sequence[Node], backend: Backend) -> ProgramGraph:
    graph = ProgramGraph("p", nodes={node.id: node for node in nodes})
    graph.lines = {node.id: f"p.py:{node.id}" for node in nodes}
    for event in play(backend, nodes):
        if isinstance(event, Done):
            graph.done[event.node] = event
        elif isinstance(event, Failed):
            graph.failed[event.node] = event
    return graph


def results(events: Sequence[Event]) -> dict[int, Done | Failed]:
    found: dict[int, Done | Failed] = {}
    for event in events:
        if not isinstance(event, Delta):
            assert event.node not in found, "answered twice"
            found[event.node] = event
    return found


def program(question: str = "What is 2+2?", **changes: Any) -> list[Node]:
    """Roles, two branches that ask the same, samples, references, a choice."""
    return [
        Role(id=0, role="user", begin=True),
        Text(id=1, parent=0, parts=("Sum. ", question)),
        Role(id=2, parent=1, role="user", begin=False),
        Fork(id=3, parent=2, count=2),
        Gen(id=4, parent=3, name="way", params=SamplingParams(seed=1, n=2)),
        Gen(id=5, parent=3, name="way", params=SamplingParams(seed=2, n=2)),
        Join(id=6, parent=3, branches=(4, 5)),
        Text(id=7, parent=6, parts=("Both: ", Ref(4, 1), " and ", Ref(5))),
        Select(id=8, parent=7, name="best", choices=(("one",), (Ref(4),)), **changes.get("select", {})),
        Text(id=9, parent=5, sample=1, parts=(" more",)),
        Gen(id=10, parent=9, name="more", params=SamplingParams(**changes.get("more", {"max_tokens": 7}))),
    ]


def numbered() -> MockBackend:
    """Says something else each time."""
    said = iter(range(1000))
    return MockBackend(lambda call: call.choices[-1] if call.choices else f"said {next(said)}")


def test_replays_all_of_a_run(tmp_path: Path) -> None:
    graph = recorded(program(), numbered())
    assert len(graph.done) == 6
    replay = Replay(write(graph, tmp_path / "run.jsonl"))
    for _ in range(2):  # each program begins anew
        events = play(replay, program())
        assert results(events) == {**graph.done, **graph.failed}
    streamed: dict[tuple[int, int], str] = {}
    for event in events:
        if isinstance(event, Delta):
            key = (event.node, event.sample)
            streamed[key] = streamed.get(key, "") + event.text
    assert streamed == {(id, i): out.text for id in (4, 5, 10) for i, out in enumerate(graph.done[id].outputs)}
    stats = asyncio.run(replay.stats())
    assert (stats["replayed"], stats["missed"]) == (12, 0)
    assert stats["generated_tokens"] == 2 * graph.totals()["generated_tokens"]


def test_other_ids_other_cuts_other_seeds() -> None:
    """What is equal is what the model saw: neither ids nor how a text was cut, nor forks that appended nothing, nor seeds."""
    graph = recorded(program(), numbered())
    way, other = graph.done[4].outputs, graph.done[5].outputs
    nodes: list[Node] = [
        Role(id=10, role="user", begin=True),
        Text(id=11, parent=10, parts=("Su",)),
        Text(id=12, parent=11, parts=("m. What is ", "2+2?")),
        Role(id=13, parent=12, role="user", begin=False),
        Gen(id=15, parent=13, name="way", params=SamplingParams(seed=2, n=2)),
        Gen(id=14, parent=13, name="way", params=SamplingParams(seed=99, n=2)),
        Text(id=16, parent=13, parts=(f"Both: {way[1].text} and {other[0].text}",)),
        Select(id=17, parent=16, name="best", choices=(("one",), (way[0].text,)), seed=5),
    ]
    found = results(play(Replay(graph), nodes))
    assert found[15].outputs == other and found[14].outputs == way  # type: ignore[union-attr]
    assert found[17].outputs == graph.done[8].outputs  # type: ignore[union-attr]


CHANGES: dict[str, tuple[list[Node], int, str]] = {
    "text": (program("What is 3+3?"), 2, r"end user.* before it changed: was .*What is 2\+2\?.*is .*What is 3\+3\?"),
    "params": (program(more={"max_tokens": 8}), 10, r"recorded at p.py:10.*: max_tokens changed: was 7, is 8"),
    "default": (program(more={}), 10, "max_tokens changed: was 7, is 128"),
    "choices": (
        [*program()[:8], Select(id=8, parent=7, name="best", choices=(("one",), ("two",)))],
        8,
        r"choices changed: was .*said 0.*is .*two",
    ),
    "method": (program(select={"method": "total_logprob"}), 8, "method changed: was 'token_length"),
    "name": ([*program()[:4], Gen(id=4, parent=3, name="wya")], 4, "is not in the record; did you mean 'way'"),
    "once more": (
        [*program()[:6], Gen(id=6, parent=3, name="way", params=SamplingParams(n=2))],
        6,
        "not in the record once more",
    ),
    "sample": (
        [
            *program()[:6],
            Text(id=9, parent=5, parts=(" more",)),
            Gen(id=10, parent=9, name="more", params=SamplingParams(max_tokens=7)),
        ],
        10,
        "text before it changed: was .*said 3 more.*is .*said 2 more",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_says_what_changed(case: str) -> None:
    nodes, at, problem = CHANGES[case]
    found = results(play(Replay(recorded(program(), numbered())), nodes))
    failed = found[at]
    assert isinstance(failed, Failed) and failed.kind == "error"
    with pytest.raises(ValueError, match=problem):
        raise ValueError(failed.error)
    asks = [node.id for node in nodes if isinstance(node, (Gen, Select, Role))]
    assert found.keys() >= set(asks)


def test_a_run_that_was_cut() -> None:
    graph = recorded(program(), numbered())
    del graph.done[10]
    failed = results(play(Replay(graph), program()))[10]
    assert isinstance(failed, Failed) and "has no result in the record" in failed.error


def test_failures_are_replayed() -> None:
    graph = recorded(program(), numbered())
    del graph.done[5]
    graph.failed[5] = Failed(5, "error", "the lights went out")
    found = results(play(Replay(graph), program()))
    assert found[5] == graph.failed[5]
    assert isinstance(found[4], Done)
    for id in (8, 10):
        assert isinstance(found[id], Failed) and "lights went out" in found[id].error  # type: ignore[union-attr]


def test_the_rest_goes_to_another_backend() -> None:
    graph = recorded(program(), numbered())
    seen: list[tuple[str, str]] = []

    def script(call: Any) -> str:
        seen.append((call.name, call.text))
        return "live"

    nodes = [
        *program(more={"max_tokens": 8}),
        Text(id=11, parent=10, parts=(" then ",)),
        Gen(id=12, parent=11, name="last"),
        Text(id=13, parent=4, sample=1, parts=(" too ", Ref(10))),
        Gen(id=14, parent=13, name="side"),
        Gen(id=15, parent=4, name="direct", sample=0),
    ]
    mock = MockBackend(script)
    replay = Replay(graph, otherwise=mock)
    found = results(play(replay, nodes))
    assert {id: found[id] for id in graph.done if id != 10} == {id: done for id, done in graph.done.items() if id != 10}
    chat = "<|im_start|>user\nSum. What is 2+2?<|im_end|>\n"
    way, other = ([out.text for out in graph.done[id].outputs] for id in (4, 5))
    assert sorted(seen) == sorted(
        [
            ("more", f"{chat}{other[1]} more"),
            ("last", f"{chat}{other[1]} morelive then "),
            ("side", f"{chat}{way[1]} too live"),
            ("direct", f"{chat}{way[0]}"),
        ]
    )
    assert all(found[id].outputs[0].text == "live" for id in (10, 12, 14, 15))  # type: ignore[union-attr]
    assert asyncio.run(replay.stats())["missed"] == 4


def test_cancel_reaches_the_other_backend() -> None:
    slow = MockBackend(delay=1000.0)
    heard: list[list[int]] = []
    plain = slow.open

    def open(info: ProgramInfo, emit: Callable[[Event], None]) -> Any:
        session = plain(info, emit)
        cancel = session.cancel
        session.cancel = lambda nodes: (heard.append(list(nodes)), cancel(nodes))[1]  # type: ignore[method-assign]
        return session

    slow.open = open  # type: ignore[method-assign]
    nodes: list[Node] = [Text(id=0, parts=("new",)), Gen(id=1, parent=0, name="a"), Gen(id=2, parent=1, name="b")]
    found = results(play(Replay(small(), otherwise=slow), nodes, [lambda session: session.cancel([1])]))
    assert [found[id].kind for id in (1, 2)] == ["cancelled", "cancelled"]  # type: ignore[union-attr]
    assert heard == [[1]]


def test_what_follows_an_output_stays_with_it() -> None:
    """Branches that ask the same in the same words: each goes on from what it was told."""

    def branches(order: Sequence[int]) -> list[Node]:
        nodes: list[Node] = [Text(id=0, parts=("Go. ",))]
        for seed in order:
            gen = len(nodes)
            nodes.append(Gen(id=gen, parent=0, name="way", params=SamplingParams(seed=seed)))
            nodes.append(Gen(id=gen + 1, parent=gen, name="next"))
        return nodes

    graph = recorded(branches([1, 2, 3]), numbered())
    pairs = {(graph.text_of(i), graph.text_of(i + 1)) for i in (1, 3, 5)}
    found = results(play(Replay(graph), branches([3, 1, 2])))
    assert {(found[i].outputs[0].text, found[i + 1].outputs[0].text) for i in (1, 3, 5)} == pairs  # type: ignore[union-attr]


def test_a_program_keeps_to_the_record_that_has_its_seed() -> None:
    def asked(seed: int) -> list[Node]:
        return [Gen(id=0, name="a", params=SamplingParams(seed=seed)), Gen(id=1, name="b")]

    runs = [recorded([Text(id=9, parts=()), *asked(seed)], numbered()) for seed in (1, 2)]
    for run in runs:
        run.done[1] = Done(1, (Output(f"b of {run.nodes[0]}"),), Usage())
    assert results(play(Replay(*runs), asked(2))) == {id: runs[1].done[id] for id in (0, 1)}


def test_a_batch_of_records() -> None:
    runs = [recorded(program(f"What is {i}?"), numbered()) for i in range(3)]
    replay = Replay(runs[0], *runs[1:])
    for i in (2, 0, 1):
        assert results(play(replay, program(f"What is {i}?"))) == runs[i].done


def test_long_chains() -> None:
    nodes: list[Node] = [Text(id=0, parts=("begin",))]
    for i in range(1, 3001):
        nodes.append(Gen(id=i, parent=i - 1, name="x"))
    graph = ProgramGraph("p", nodes={node.id: node for node in nodes})
    graph.done = {i: Done(i, (Output(f"{i},"),), Usage()) for i in range(1, 3001)}

    async def run() -> int:
        events: list[Event] = []
        session = Replay(graph).open(ProgramInfo("1", "p", 1), events.append)
        session.add(nodes)
        while sum(isinstance(event, Done) for event in events) < 3000:
            await asyncio.sleep(0)
        return len(events)

    assert asyncio.run(run()) == 6000


# ---- compare


def told(old: ProgramGraph, new: ProgramGraph) -> list[tuple[int, str]]:
    return [(item.node, item.what) for item in compare(old, new)]


def test_equal_runs_have_no_differences() -> None:
    graph = recorded(program(), numbered())
    assert compare(graph, graph) == []
    again = recorded(program(), numbered())
    again.seed, again.seconds = 99, 3.0
    assert compare(graph, again) == []


def test_compares_texts_params_and_outputs() -> None:
    old, new = recorded(program(), numbered()), recorded(program("What is 3+3?", more={"max_tokens": 8}), numbered())
    new.done[5] = Done(5, (Output("else", (7,)), *new.done[5].outputs[1:]), Usage())
    assert told(old, new) == [(3, "text"), (5, "output"), (10, "max_tokens"), (8, "text")]
    (item,) = [item for item in compare(old, new) if item.what == "max_tokens"]
    assert str(item) == "p.py:10: max_tokens of gen 'more' (node 10): was 7, is 8"
    assert any("2+2" in item.old and "3+3" in item.new for item in compare(old, new))


def test_compares_steps_that_come_and_go() -> None:
    nodes: list[Node] = [Text(id=0, parts=("a",)), Gen(id=1, parent=0, name="x"), Gen(id=2, parent=1, name="z")]
    more: list[Node] = [*nodes[:2], Gen(id=2, parent=1, name="y"), Gen(id=3, parent=2, name="z")]
    old, new = recorded(nodes, MockBackend()), recorded(more, MockBackend())
    assert told(old, new) == [(2, "added")]
    assert told(new, old) == [(2, "removed")]
    assert [str(item) for item in compare(old, new)] == ["p.py:2: gen 'y' (node 2) was added"]


def test_compares_failures() -> None:
    old, new = small(), small()
    del new.done[1]
    new.failed[1] = Failed(1, "error", "no")
    assert {("error", "no"), ("output", "")} <= {(item.what, item.new) for item in compare(old, new)}
