"""What the lint names, and what it leaves alone."""

from __future__ import annotations

import pytest

from lang.graph import ProgramGraph
from lang.linting import BLOCK, lint
from radixrt.engine.nodes import Arg, Done, Fork, Gen, Node, Output, Part, Ref, Role, Text, Usage

RULES = " ".join(
    f"Rule {i}: look at the {word} before you say anything." for i, word in enumerate("date unit sum page".split())
)
LONG = RULES + " " + " ".join(f"Example {i}: {i} and {i * i} make {i + i * i}." for i in range(20))
SAID = "a different answer for "


class Writer:
    """Writes a graph by hand; a node's line is ``p.py:`` and its number."""

    def __init__(self) -> None:
        self.graph = ProgramGraph("p")

    def add(self, node: Node, line: int) -> int:
        self.graph.nodes[node.id] = node
        self.graph.lines[node.id] = f"p.py:{line}"
        return node.id

    @property
    def next(self) -> int:
        return len(self.graph)

    def text(self, parent: int | None, *parts: Part, line: int = 0) -> int:
        return self.add(Text(id=self.next, parent=parent, parts=parts), line)

    def gen(self, parent: int | None, said: str, line: int = 0) -> int:
        id = self.add(Gen(id=self.next, parent=parent), line)
        self.graph.done[id] = Done(id, (Output(said),), Usage())
        return id


def chain(*parts: str | None, said: str = "") -> ProgramGraph:
    """A program of texts, ``None`` for a generation; the line is the place in the list."""
    writer, at = Writer(), None
    for line, part in enumerate(parts):
        at = writer.gen(at, f"{said}{line}", line) if part is None else writer.text(at, part, line=line)
    return writer.graph


def forked(*branches: str, before: str = "Begin. ") -> ProgramGraph:
    writer = Writer()
    fork = writer.add(Fork(id=1, parent=writer.text(None, before), count=len(branches)), 5)
    for i, text in enumerate(branches):
        writer.gen(writer.text(fork, text, line=7), f"said {i}", line=8)
    return writer.graph


def compiled(*parts: Part) -> ProgramGraph:
    writer = Writer()
    writer.gen(writer.text(None, *parts, line=3), "")
    return writer.graph


NAMED = {
    "a time ahead of rules": (
        [chain(f"It is 10:{i:02}. ", RULES, f"Question {i}?", None) for i in range(10, 14)],
        ("p.py:0", "differs between programs", "first", 3 * len(RULES)),
    ),
    "in one text": (
        [chain(f"It is 10:{i:02}. {RULES}", f"Question {i}?", None) for i in range(10, 14)],
        ("p.py:0", "'10:10' and '10:11'", "first", 3 * len(RULES)),
    ),
    "a document ahead of the task": (
        [chain("The document: " + f"thing {i} of {i * i}; " * 90, LONG, None) for i in range(5)],
        ("p.py:0", "differs between programs", "first", 4 * len(LONG)),
    ),
    "behind an answer": (
        [chain("Who are you? ", None, RULES, None, said=SAID + str(i)) for i in range(3)],
        ("p.py:2", "outputs that differ", "say it once", 2 * len(RULES)),
    ),
    "white space": (
        [chain("Hello," + " " * (1 + i % 2) + RULES, None) for i in range(4)],
        ("p.py:0", "white space differs", "equal", len(RULES)),
    ),
    "a line's end": (
        [chain("Hello\n" + LONG, None), chain("Hello\r\n" + LONG, None)],
        ("p.py:0", "white space differs", "equal", len(LONG)),
    ),
    "branches of one program": (
        [forked(*(f"As a {who}: {RULES}" for who in ("cook", "pilot", "nurse")))],
        ("p.py:7", "branches begin with different text", "before the fork", 2 * len(RULES)),
    ),
    "branches in every program": (
        [forked(*(f"As a {who}: {RULES}" for who in ("cook", "pilot", "nurse")), before=f"{i} is. ") for i in range(2)],
        ("p.py:7", "('cook' and 'pilot') ahead", "before the fork", 4 * len(RULES)),
    ),
    "said in each turn": (
        [chain(RULES, None, " Go on. " + RULES, None, said="x")],
        ("p.py:2", "again", "say it once", len(RULES)),
    ),
    "an argument ahead, compiled": (
        [compiled("It is ", Arg("now"), ". " + RULES)],
        ("p.py:3", "argument 'now'", "first", len(RULES)),
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_named(case: str) -> None:
    graphs, (line, problem, advice, chars) = NAMED[case]
    findings = {finding.line: finding for finding in lint(graphs)}
    assert line in findings, findings
    found = findings[line]
    assert problem in found.problem
    assert advice in found.advice
    assert found.tokens_lost == pytest.approx(chars / 4, rel=0.1)
    assert found.node in graphs[0].nodes
    told = str(found)
    assert told.startswith(f"{line}: ") and "\n" not in told and f"{found.tokens_lost:,} tokens" in told


SHARED = {
    "rules first": [
        chain(RULES, f"It is 10:{i:02}. Question {i}?", None, "And why?", None, said=SAID + str(i)) for i in range(9)
    ],
    "equal programs": [chain("Hi. ", LONG, None, LONG[:100], None, said="same")] * 5,
    "split elsewhere": [chain(LONG[:100], LONG[100:], f"{i}", None) for i in range(3)] + [chain(LONG, "7", None)],
    "a short end": [
        chain(LONG, f"Question {i}?", " Answer with one letter, and nothing else.\nAnswer:", None) for i in range(9)
    ],
    "fork behind the rules": [forked("one way", "another way", before=LONG)],
    "equal starts of branches": [forked(*(f"{LONG} As a {who}." for who in ("cook", "pilot", "nurse")))],
    "different documents": [chain(RULES, f"Document {i}: " + f"thing {i} of {i * i}; " * 90, None) for i in range(6)],
    "a text that resembles itself": [chain("row of a table; " * 80, None)],
    "two of many documents quote": [
        chain(RULES, f"Document {i}: thing {i}. " + (LONG if i < 2 else f"more of {i}; " * 60), None) for i in range(9)
    ],
    "nothing": [],
    "empty": [ProgramGraph()],
    "one generation": [chain(LONG, None)],
}


@pytest.mark.parametrize("case", SHARED)
def test_left_alone(case: str) -> None:
    assert lint(SHARED[case]) == []


def test_outputs_that_are_merged_are_nobodys_fault() -> None:
    writer = Writer()
    fork = writer.add(Fork(id=1, parent=writer.text(None, RULES), count=2), 5)
    ends = [writer.gen(writer.text(fork, f"way {i}"), LONG, line=8) for i in range(2)]
    writer.gen(writer.text(fork, "All: ", *(Ref(end) for end in ends)), "merged")
    assert lint([writer.graph]) == []


def test_a_compiled_program_with_its_argument_last() -> None:
    assert lint([compiled(RULES, Arg("question"))]) == []


def test_chat() -> None:
    """Role marks stand between the texts: many short messages behind a difference are one long text."""

    def chat(now: str, last: str) -> ProgramGraph:
        writer, at = Writer(), None
        shots = [
            ("system", now),
            *((("user", "assistant")[i % 2], f"Example {i} is short.") for i in range(12)),
            ("user", last),
        ]
        for role, text in shots:
            at = writer.add(Role(id=writer.next, parent=at, role=role, begin=True), 1)
            at = writer.text(at, text, line=2)
            at = writer.add(Role(id=writer.next, parent=at, role=role, begin=False), 1)
        writer.gen(at, "")
        return writer.graph

    assert lint([chat("Be kind.", "one?"), chat("Be kind.", "two?")]) == []
    (found,) = lint([chat("10:01", "one?"), chat("10:02", "two?")])
    assert found.line == "p.py:2" and "'10:01' and '10:02'" in found.problem


def test_most_expensive_first_and_least() -> None:
    graphs = [chain(f"It is {i}. ", LONG, None, RULES, None, said=SAID + str(i)) for i in range(3, 7)]
    both = [*graphs, chain(LONG, None)]
    costs = [finding.tokens_lost for finding in lint(both)]
    assert costs == sorted(costs, reverse=True) and costs
    assert lint(both, least=max(costs) + 1) == []


def test_cost_is_scaled_to_the_whole_batch() -> None:
    graphs = [chain(f"It is {i:04}. ", RULES, None) for i in range(200)]
    (found,) = lint(graphs)
    assert found.tokens_lost == pytest.approx(199 * len(RULES) / 4, rel=0.06)


def test_block_is_the_border() -> None:
    short, long = (f"{'x' * 10} {'word ' * 99}"[:size] for size in (BLOCK - 8, BLOCK + 8))
    assert not lint([chain(f"{i} ", short, f" end {i * 7}", None) for i in range(1, 9)])
    assert lint([chain(f"{i} ", long, f" end {i * 7}", None) for i in range(1, 9)])


def test_deep_chains() -> None:
    parts: list[str | None] = [f"step {i} of it; " if i % 2 else None for i in range(6000)]
    assert lint([chain(*parts, said="x"), chain("other ", *parts, said="y")]) is not None
