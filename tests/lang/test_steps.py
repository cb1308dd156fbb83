"""The contract of sessions, as backends without an engine of their own keep it; the scripted backend stands for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lang.backends.base import ProgramInfo
from lang.backends.mock import MockBackend, MockCall
from radixrt.engine.nodes import (
    Arg,
    Delta,
    Done,
    Event,
    Failed,
    Fork,
    Gen,
    Join,
    Node,
    Ref,
    Role,
    Select,
    Text,
)
from radixrt.grammar.constraint import Constraint
from radixrt.request import SamplingParams
from tests.lang.scripted import ANSWERED, Program, gen, run, text

# ---- the contract of sessions


async def test_a_role_is_answered_and_other_nodes_are_not() -> None:
    program = await run(
        MockBackend(), Role(id=0, role="user", begin=True), text(1, "x", parent=0), Fork(id=2, parent=1, count=1),
        Role(id=3, parent=2, role="user", begin=False),
    )  # fmt: skip
    assert [(event.node, event.outputs[0].text) for event in program.events if isinstance(event, Done)] == [
        (0, "<|im_start|>user\n"),
        (3, "<|im_end|>\n"),
    ]


@pytest.mark.parametrize(
    ("node", "error"),
    [
        (text(9, "x", parent=99), "parent, node 99, is unknown"),
        (text(9, Ref(99)), "node 99, which is unknown"),
        (text(9, Ref(9)), "node 9, which is unknown"),
        (text(9, Ref(0)), "ref to text (node 0), which generates nothing"),
        (text(9, Ref(1, 2)), "ref to sample 2 of gen 'a' (node 1), which has 2"),
        (text(9, Arg("who")), "argument 'who' has no value"),
        (text(9, 3), "must be text, not int"),
        (text(9, "x", parent=1, sample=2), "continues sample 2 of gen 'a' (node 1), which has 2"),
        (text(9, "x", parent=0, sample=1), "continues sample 1 of text (node 0), which has 1"),
        (text(9, "x", sample=1), "continues sample 1 of no parent"),
        (Select(id=9, choices=((Arg("who"),),)), "argument 'who' has no value"),
        (Node(id=9), "unknown kind"),
    ],
)
async def test_a_node_that_is_wrong_fails_and_the_rest_goes_on(node: Node, error: str) -> None:
    program = Program(MockBackend())
    program.add(text(0, "x"), gen(1, "a", n=2), node, gen(10, "b", 9), gen(11, "c", 1))
    await program.all()
    assert program.failed(9).kind == "invalid"
    assert error in program.failed(9).error
    assert program.failed(10).kind == "cancelled"
    assert error in program.failed(10).error
    assert "(node 9) failed" in program.failed(10).error
    assert program.text(11) == "<c>"


async def test_what_needs_a_failed_node_fails_and_names_it() -> None:
    program = Program(MockBackend({"fine": "fine"}))
    program.add(
        text(0, "x"), gen(1, "bad", 0), text(2, "y", parent=1), gen(3, "fine", 2), gen(4, "fine"), text(5, Ref(1), parent=4),
        Select(id=6, parent=5, choices=(("a",), (Ref(3),))), gen(7, "fine", 4), Join(id=8, parent=4, branches=(1,)), gen(9, "fine", 8),
    )  # fmt: skip
    await program.all()
    program.add(gen(10, "fine", 2), text(11, Ref(1)), gen(12, "fine", 11))  # afterwards
    await program.all()
    assert program.failed(1).kind == "invalid"
    for node in (2, 3, 5, 6, 10, 11, 12):
        assert program.failed(node).kind == "cancelled"
        assert "gen 'bad' (node 1) failed" in program.failed(node).error
    assert (program.text(4), program.text(7), program.text(9)) == ("fine", "fine", "fine")
    order = [event.node for event in program.events if isinstance(event, Failed)]
    assert order.index(1) < order.index(2) < order.index(3)


async def test_cancelling_ends_a_node_and_what_hangs_on_it() -> None:
    program = Program(MockBackend(delay=3600.0))
    program.add(
        text(0, "x"), gen(1, "a", 0), text(2, parent=1), gen(3, "b", 2), text(4, Ref(3)), gen(5, "c", 4), gen(6, "d", 0)
    )
    await asyncio.sleep(0)  # they run
    program.cancel(1, 99)
    program.waiting -= {6}
    await program.all()
    for node in (1, 2, 3, 4, 5):
        assert program.failed(node).kind == "cancelled"
    assert program.failed(5).error == "gen 'a' (node 1) was cancelled"
    assert all(event.node != 6 for event in program.events)
    program.cancel(0)  # done: what hangs on it is ended, and nothing may continue it
    program.add(gen(7, "e", 0))
    await program.all()
    assert program.failed(6).kind == program.failed(7).kind == "cancelled"
    program.session.close()


async def test_cancelling_what_is_done_leaves_its_output() -> None:
    program = await run(MockBackend(), gen(0, "a"))
    program.cancel(0)
    program.add(text(1, Ref(0)), gen(2, "b", 1), gen(3, "c", 0))
    await program.all()
    assert (program.text(0), program.text(2)) == ("<a>", "<b>")
    assert program.failed(3).kind == "cancelled"


async def test_cancelling_between_two_pieces_stops_the_stream() -> None:
    program = Program(MockBackend(["a b c d"], tokens_per_delta=1))
    program.add(gen(0))
    while not program.events:
        await asyncio.sleep(0)
    program.cancel(0)
    await program.all()
    assert [type(event) for event in program.events] == [Delta, Failed]


async def test_after_close_nothing_is_told() -> None:
    backend = MockBackend()
    program = Program(backend)
    program.add(gen(0), gen(1, "b", 0))
    program.session.close()
    program.session.close()
    program.session.add([gen(2)])
    program.session.cancel([0])
    program.session.drop([0])
    other = await run(backend, gen(0))
    assert other.text(0) == "<gen>"
    assert program.events == []


async def test_closing_inside_of_an_event_ends_the_program_there() -> None:
    backend = MockBackend()
    seen: list[Event] = []
    raised: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context))

    def hear(event: Event) -> None:
        seen.append(event)
        session.close()

    session = backend.open(ProgramInfo("p", "p", 0), hear)
    session.add([gen(0), gen(1), gen(2)])
    await run(backend, gen(0), gen(1, "", 0))
    assert len(seen) == 1
    assert not raised


async def test_closing_the_backend_fails_what_runs() -> None:
    backend = MockBackend(delay=3600.0)
    await backend.start()
    program = Program(backend)
    program.add(gen(0), text(1, Ref(0)))
    await asyncio.sleep(0)
    await backend.aclose()
    assert (program.failed(0).kind, program.failed(1).kind) == ("error", "cancelled")
    assert program.failed(0).error == "the mock backend was closed"


async def test_long_chains_and_wide_programs_are_no_recursion() -> None:
    count = 10_000
    chain: list[Node] = [gen(0, "g")]
    for i in range(1, count):
        chain.append(text(i, "x", parent=i - 1) if i % 10 else gen(i, "g", i - 1))
    calls: list[int] = []

    def script(call: MockCall) -> str:
        calls.append(call.node)
        return "y"

    backend = MockBackend(script)
    program = await run(backend, *chain)
    assert calls == list(range(0, count, 10))
    assert backend.calls[-1].text == ("y" + "x" * 9) * (len(calls) - 1)
    assert program.done(count - 10).usage.prompt_tokens == 10 * (len(calls) - 1)
    failing = await run(MockBackend({}), *chain)
    assert sum(isinstance(event, Failed) for event in failing.events) == count
    held = Program(MockBackend(delay=3600.0))
    held.add(*chain)
    await asyncio.sleep(0)
    held.cancel(0)
    assert sum(isinstance(event, Failed) for event in await held.all()) == count
    wide = await run(MockBackend(), text(0, "x"), *(gen(i, "g", 0) for i in range(1, count)))
    assert sum(isinstance(event, Done) for event in wide.events) == count - 1


# ---- any program, against a plain account of what must come out


@st.composite
def programs(draw: st.DrawFn) -> list[Node]:
    nodes: list[Node] = []
    for i in range(draw(st.integers(1, 25))):
        parent = draw(st.none() | st.integers(0, i - 1)) if i else None
        kind = draw(st.sampled_from("text gen select role fork bad".split()))
        named = [Ref(draw(st.integers(0, i - 1)))] if i and draw(st.booleans()) else []
        parts = ("t", *[ref for ref in named if isinstance(nodes[ref.node], (Gen, Select))])
        match kind:
            case "text":
                nodes.append(text(i, *parts, parent=parent))
            case "select":
                nodes.append(Select(id=i, parent=parent, choices=(parts, ("other",))))
            case "role":
                nodes.append(Role(id=i, parent=parent, role="user", begin=draw(st.booleans())))
            case "fork":
                nodes.append(Fork(id=i, parent=parent, count=2))
            case _:
                nodes.append(gen(i, "bad" if kind == "bad" else "good", parent, n=draw(st.integers(1, 2))))
    return nodes


def expected(nodes: Sequence[Node]) -> dict[int, str | None]:
    """Each node's own text, ``None`` where it fails."""
    found: dict[int, str | None] = {}
    for node in nodes:
        parts = node.parts if isinstance(node, Text) else node.choices[0] if isinstance(node, Select) else ()
        texts = [found[part.node] if isinstance(part, Ref) else part for part in parts]
        if (node.parent is not None and found[node.parent] is None) or None in texts:
            found[node.id] = None
        elif isinstance(node, Gen):
            found[node.id] = None if node.name == "bad" else "<good>"
        else:
            found[node.id] = "".join(map(str, texts))
    return found


@settings(max_examples=150)
@given(programs(), st.lists(st.integers(0, 24), max_size=6), st.sampled_from([None, 1]))
def test_any_program_however_it_is_handed_over(nodes: list[Node], cuts: list[int], pieces: int | None) -> None:
    def script(call: MockCall) -> str:
        if call.choices:
            return call.choices[0]
        return call.name if call.name != "good" else "<good>"

    async def played() -> Program:
        backend = MockBackend(script, tokens_per_delta=pieces)
        program = Program(backend)
        marks = sorted({0, len(nodes), *(cut for cut in cuts if cut < len(nodes))})
        for begin, end in pairwise(marks):
            program.add(*(_refused(node) for node in nodes[begin:end]))
            await asyncio.sleep(0)
        await program.all()
        return program

    program = asyncio.run(played())
    wanted = expected(nodes)
    for node in nodes:
        told = [event for event in program.events if not isinstance(event, Delta) and event.node == node.id]
        if wanted[node.id] is None:
            assert [type(event) for event in told] == [Failed]
        elif isinstance(node, ANSWERED):
            (done,) = told
            assert isinstance(done, Done)
            if not isinstance(node, Role):
                assert {output.text for output in done.outputs} == {wanted[node.id]}
        else:
            assert told == []


def _refused(node: Node) -> Node:
    """A ``bad`` generation, as one that its constraint refuses."""
    if isinstance(node, Gen) and node.name == "bad":
        params = SamplingParams(n=node.params.n, constraint=Constraint.literal("good"))
        return Gen(id=node.id, parent=node.parent, name=node.name, params=params)
    return node


@settings(max_examples=150)
@given(programs(), st.lists(st.tuples(st.integers(0, 24), st.integers(0, 30)), max_size=8))
def test_whatever_is_cancelled_each_node_ends_once(nodes: list[Node], cancels: list[tuple[int, int]]) -> None:
    async def played() -> Program:
        program = Program(MockBackend(lambda call: call.choices[0] if call.choices else "a b", tokens_per_delta=1))
        for node in nodes:
            program.add(node)
            await asyncio.sleep(0)
            for at, victim in cancels:
                if at == node.id:
                    program.cancel(victim)
        await program.all()
        await asyncio.sleep(0)
        return program

    program = asyncio.run(played())
    ended: dict[int, Event] = {}
    for event in program.events:
        assert event.node not in ended, "an event after the last one"
        if not isinstance(event, Delta):
            ended[event.node] = event
    for node in nodes:
        assert not isinstance(node, ANSWERED) or node.id in ended
        if node.parent is not None and isinstance(ended.get(node.parent), Failed):
            assert isinstance(ended[node.id], Failed)
    if not any(victim < len(nodes) for _, victim in cancels):
        assert not any(isinstance(event, Failed) for event in ended.values())
