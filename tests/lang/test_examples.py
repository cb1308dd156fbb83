"""The examples of ``lang``, each run as it stands on the embedded model: what must hold of any run, and what this model says."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest

from lang import Runtime, set_default_backend
from lang.program import Function
from radixrt.engine.nodes import Fork, Gen, Select

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
pytestmark = pytest.mark.model


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Iterator[Runtime]:
    """One model for all of them."""
    with Runtime(max_total_tokens=16384, check_integrity=True) as runtime:
        set_default_backend(runtime)
        try:
            yield runtime
        finally:
            set_default_backend(None)


class Ran(NamedTuple):
    """What an example printed, its names, and the states of the programs that it ran, in order."""

    out: str
    names: dict[str, Any]
    states: list[Any]


class Example:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def load(self, name: str) -> dict[str, Any]:
        return runpy.run_path(str(EXAMPLES / f"{name}.py"))

    def __call__(self, names: dict[str, Any] | str, *arguments: str) -> Ran:
        names = self.load(names) if isinstance(names, str) else names
        states: list[Any] = []
        run, run_batch = Function.run, Function.run_batch

        def kept(self: Function, *args: Any, **kwargs: Any) -> Any:
            states.append(run(self, *args, **kwargs))
            return states[-1]

        def all_kept(self: Function, *args: Any, **kwargs: Any) -> Any:
            states.extend(run_batch(self, *args, **kwargs))
            return list(states)

        with self.monkeypatch.context() as patch:
            patch.setattr(Function, "run", kept)
            patch.setattr(Function, "run_batch", all_kept)
            patch.setattr(sys, "argv", ["example", *arguments])
            names["main"]()
        for state in states:
            assert state.error() is None
        return Ran(self.capsys.readouterr().out, names, states)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Example:
    return Example(monkeypatch, capsys)


def count(state: Any, *kinds: type) -> int:
    return sum(isinstance(node, kinds) for node in state.graph)


def forks(state: Any) -> list[int]:
    return [node.count for node in state.graph if isinstance(node, Fork)]


def drawn(path: Path, text: str) -> bool:
    page = path.read_text("utf-8")
    return page.lower().startswith("<!doctype html>") and text in page


def test_every_example_of_lang_is_run_here() -> None:
    of_lang = {path.stem for path in EXAMPLES.glob("*.py") if re.search(r"^from lang ", path.read_text(), re.MULTILINE)}
    run_here = re.findall(r"example(?:\.load)?\(\"(\w+)\"", Path(__file__).read_text("utf-8"))
    assert of_lang == set(run_here)
    assert len(of_lang) >= 10


def test_tools(example: Example, runtime: Runtime) -> None:
    for question, pattern in (
        ("How warm is it in Oslo?", r"weather\(city='Oslo'\)"),
        ("What is 17 + 25?", r"add\(a=17, b=25\) -> 42"),
    ):
        assert re.match(pattern, example("tools", question).out)


def test_few_shot(example: Example, runtime: Runtime) -> None:
    ran = example("few_shot")
    shared = len(runtime.tokenizer.encode(ran.names["EXAMPLES"]))
    assert [s["feeling"] for s in ran.states] == [
        "positive",
        "negative",
        "negative",
        "positive",
        "negative",
        "positive",
    ]
    for state in ran.states:
        assert sum(state.meta("feeling")["probabilities"]) == pytest.approx(1)
        assert f"{state['feeling']} (" in ran.out
    assert sum(state.meta("feeling")["computed_tokens"] < shared for state in ran.states) >= len(ran.states) - 1


def test_chat(example: Example) -> None:
    (state,) = example("chat").states
    turns = [state.meta(f"answer{turn}") for turn in range(3)]
    for before, turn in pairwise(turns):
        assert turn["cached_tokens"] >= before["prompt_tokens"] + before["generated_tokens"] - 1
    assert "Paris" in state["answer0"]
    assert [message["content"] for message in state.messages()[1::2]] == example.load("chat")["QUESTIONS"]


def test_react(example: Example, tmp_path: Path) -> None:
    names = example.load("react")
    called: list[tuple[str, str]] = []

    def spied(name: str, tool: Any) -> Any:
        def spy(argument: str) -> str:
            called.append((name, argument))
            return str(tool(argument))

        return spy

    names["TOOLS"].update({name: spied(name, tool) for name, tool in list(names["TOOLS"].items())})
    ran = example(names, "--html", str(tmp_path / "run.html"))
    for state in ran.states:
        actions = [value for name, value in state.variables.items() if name.startswith("action")]
        assert actions and all(re.fullmatch(names["ACTION"], action) for action in actions)
    assert {("calculate", "48 * 7"), ("population", "Japan"), ("calculate", "100 / 0")} <= set(called)
    product, people, impossible, missing = ran.states
    assert (product.ret_value, people.ret_value) == (str(48 * 7), names["POPULATION"]["Japan"])
    assert "Observation: ZeroDivisionError: division by zero\n" in impossible.text()
    assert "Observation: KeyError: 'Spain'\n" in missing.text()
    assert impossible.ret_value == missing.ret_value == "not possible"
    assert drawn(tmp_path / "run.html", "What is 48 times 7?")


def test_tree_of_thought(example: Example, tmp_path: Path) -> None:
    ran = example("tree_of_thought", "--html", str(tmp_path / "run.html"))
    (state,) = ran.states
    assert [len(scores) for scores in state.scores] == [2, 4, 4, 4]
    assert all(0 <= score <= 1 for scores in state.scores for score in scores)
    assert (count(state, Gen), count(state, Select)) == (14, 14)
    assert forks(state).count(2) == 1 + 2 + 2 + 2
    assert [line.partition(":")[0] for line in state.ret_value.split("\n")[:-1]] == ["Story", *ran.names["STAGES"]]
    assert drawn(tmp_path / "run.html", ran.names["STAGES"][3])


def test_skeleton_of_thought(example: Example, tmp_path: Path) -> None:
    ran = example("skeleton_of_thought", "--html", str(tmp_path / "run.html"))
    (state,) = ran.states
    assert json.loads(state.text("outline")) == state["outline"]
    assert len(state["outline"]) == 3 and forks(state) == [3]
    lines = state.ret_value.split("\n")
    for line, point in zip(lines, state["outline"], strict=True):
        assert re.fullmatch(rf"- {re.escape(point)}: \S.+", line)
    assert drawn(tmp_path / "run.html", state["outline"][2])


def test_judge(example: Example, runtime: Runtime, tmp_path: Path) -> None:
    ran = example("judge", "--html", str(tmp_path / "run.html"))
    (state,) = ran.states
    assert forks(state) == [6] and len(state["view"]) == 6
    assert all(1 <= points <= 5 for points in state.ret_value) and len(set(state.ret_value)) > 1
    assert state["verdict"] in ("excellent", "good", "fair", "poor")
    essay = len(runtime.tokenizer.encode(ran.names["ESSAY"]))
    views = [state.graph.done[id].usage for id, name in state.graph.names.items() if name == "view"]
    assert sum(usage.computed_tokens < essay for usage in views) >= 5, "the six judges share it"
    assert drawn(tmp_path / "run.html", "its structure worth")


def test_vote(example: Example) -> None:
    (state,) = example("vote").states
    answers = state["answer"]
    assert len(state["reasoning"]) == len(answers) == 7 and all(type(answer) is int for answer in answers)
    assert len(set(state["reasoning"])) > 1
    ((winner, votes), *_) = Counter(answers).most_common()
    assert state.ret_value == winner and votes >= 2


def test_typed(example: Example) -> None:
    ran = example("typed")
    schema = ran.names["Guest"].model_json_schema()
    for state, document in zip(ran.states, ran.names["DOCUMENTS"], strict=True):
        jsonschema.validate(json.loads(state.text("guest")), schema)
        guest = state["guest"]
        assert isinstance(guest, ran.names["Guest"])
        assert guest.name in document and guest.day in document and str(guest.age) in document


def test_streams(example: Example) -> None:
    ran = example("stream_programs")
    (state,) = ran.states
    assert ran.out.startswith(state["answer"] + "\n")
    for name in ("France", "Japan"):
        pieces = [eval(piece) for piece in re.findall(rf"^{name}: (.+)$", ran.out, re.MULTILINE)]
        whole = ran.names["answer"].run(f"What is the capital of {name}?", temperature=0)
        assert len(pieces) > 1 and "".join(pieces) == whole["answer"]


def test_compiled(example: Example) -> None:
    ran = example("compiled")
    assert "complete: True" in ran.out and "the same tokens as live: True" in ran.out
    live, compiled = ran.states
    assert compiled.text() == live.text() and live.text().endswith("It is a bird")
    assert [type(node) for node in compiled.graph] == [type(node) for node in live.graph]
