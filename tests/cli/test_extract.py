"""``radixrt extract``: what reaches the job, and what a person sees of it. The model is a stand-in, everything else is real."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from radixrt.cli.extract import Options
from radixrt.config import EngineConfig
from radixrt.jobs import documents, job
from radixrt.jobs.rows import read_rows
from radixrt.jobs.target import load_target
from tests.jobs.standin import SCHEMA, StandIn

NOT_FLAGS = {"source", "engine", "backend", "progress", "model", "engine_settings"}


class Extract:
    """Runs the command in a folder with ``in.jsonl``; ``backend`` is what it asked."""

    def __init__(self, cli: Any, folder: Path) -> None:
        self.cli, self.folder = cli, folder
        self.wrong: Any = None
        self.backend: StandIn | None = None
        self.settings: dict[str, Any] = {}
        self.write("in.jsonl", *({"id": f"d{i}", "text": f"word{i} and more"} for i in range(6)))
        (folder / "schema.json").write_text(json.dumps(SCHEMA))

    def write(self, name: str, *rows: Any) -> str:
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        return name

    def __call__(self, *arguments: str, source: str = "in.jsonl", stdin: str | None = None) -> Any:
        what = () if {"--schema", "--regex", "--choices"} & set(arguments) else ("--schema", "schema.json")
        return self.cli("extract", source, *what, *arguments, stdin=stdin)

    def rows(self, name: str = "out.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text("utf-8").splitlines()]


@pytest.fixture
def extract(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extract:
    monkeypatch.chdir(tmp_path)
    made = Extract(cli, tmp_path)

    def backend(
        target: Any, model: Any, endpoint: Any, engine: Any, temperature: Any, concurrency: Any, *rest: Any
    ) -> StandIn:
        if endpoint is None:
            EngineConfig.from_kwargs(model=model, **rest[-1])
        made.settings = {"model": model, "endpoint": endpoint, "temperature": temperature, **rest[-1]}
        made.backend = StandIn(wrong=made.wrong)
        return made.backend

    monkeypatch.setattr(job, "_backend", backend)
    return made


def test_every_setting_of_a_job_is_a_flag_with_the_same_default() -> None:
    signature = inspect.signature(job.aextract).parameters
    flags = {field.name: field.default for field in dataclasses.fields(Options)}
    assert flags == {name: each.default for name, each in signature.items() if name not in NOT_FLAGS}
    formats = next(field for field in dataclasses.fields(Options) if field.name == "format")
    assert tuple(formats.metadata["choices"]) == documents.FORMATS


def test_rows_and_figures(extract: Extract) -> None:
    result = extract("--output", "out.jsonl")
    assert result.code == 0, result.err
    assert [row["id"] for row in extract.rows()] == [f"d{i}" for i in range(6)]
    assert [row["value"]["first"] for row in extract.rows()] == [f"word{i}" for i in range(6)]
    assert result.out == ""
    assert "6 rows, 0 failed · " in result.err
    assert "optimal" in result.err
    assert "rows: out.jsonl\n" in result.err
    assert "extracting: 6/6 documents" in result.err


def test_without_output_the_rows_are_printed(extract: Extract) -> None:
    result = extract("--quiet")
    assert (result.code, result.err) == (0, "")
    assert [json.loads(line)["value"]["first"] for line in result.out.splitlines()] == [f"word{i}" for i in range(6)]


def test_settings_reach_the_job(extract: Extract) -> None:
    (extract.folder / "words").write_text("Say what it says.")
    extract.write("shots.jsonl", {"text": "t", "value": {"first": "a", "size": 1, "draw": 2}})
    result = extract(
        *("--prompt", "@words", "--examples", "shots.jsonl", "--temperature", "0.5", "--model", "m.gguf"),
        *("--threads", "3", "--seed", "4", "--no-evidence"),
    )
    assert result.code == 0, result.err
    assert extract.settings == {"model": "m.gguf", "endpoint": None, "temperature": 0.5, "threads": 3}
    assert extract.backend is not None
    said = extract.backend.prompts[0].messages
    assert said[0]["content"].startswith("Say what it says.")
    assert [message["role"] for message in said] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--schema", "nowhere.json"), "nowhere.json"),
        (("--schema", "{}", "--regex", "a"), "exactly one of schema, regex and choices"),
        (("--schema", '{"properties": {"a": {"uniqueItems": 1}}}'), "uniqueItems"),
        (("--max-tokens", "0"), "max_tokens=0: must be at least 1"),
        (("--order", "random"), "--order: invalid choice: 'random'"),
        (("--prompt", "@nowhere"), "--prompt='@nowhere': No such file"),
        (("--gold", "nowhere"), "'nowhere': No such file"),
        (("--gold", "in.jsonl"), "in.jsonl, line 1"),
        (("--report", "no/where.html"), "--report='no/where.html': there is no folder"),
        (("--report", "in.jsonl"), "is a file of the job itself"),
        (("--report", "."), "is a folder"),
        (("--report", "r.html", "--dry-run"), "--report: has nothing to show of a --dry-run"),
        (("--output", "out.txt"), "must end in .jsonl or .csv"),
        (("--field", "body"), "body"),
        (("--page-size", "0"), "page_size=0"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_asked(
    extract: Extract, arguments: tuple[str, ...], problem: str
) -> None:
    result = extract(*arguments)
    assert result.code == 2
    assert problem in result.err
    assert result.err.count("radixrt") == 1 and "Traceback" not in result.err
    assert extract.backend is None or not extract.backend.asked


def test_choices_and_regex(extract: Extract) -> None:
    extract.wrong = lambda text, tries: "b"
    result = extract("--choices", " a, b ", "--quiet")
    assert {json.loads(line)["value"] for line in result.out.splitlines()} == {"b"}
    result = extract("--regex", "[a-c]", "--quiet")
    assert {json.loads(line)["value"] for line in result.out.splitlines()} == {"b"}


def test_what_fails_is_said_and_the_code_is_1(extract: Extract) -> None:
    extract.write("in.jsonl", {"id": "a", "text": "one"}, {"id": "b", "text": ""}, {"id": "a", "text": "two"})
    result = extract("--output", "out.jsonl")
    assert result.code == 1
    assert [row["id"] for row in extract.rows()] == ["a"]
    assert "1 rows, 2 failed" in result.err
    assert "radixrt: b: " in result.err and "empty" in result.err
    assert "errors: out.jsonl.errors.jsonl\n" in result.err
    assert len(extract.rows("out.jsonl.errors.jsonl")) == 2


def test_again_there_is_nothing_to_do(extract: Extract) -> None:
    assert extract("--output", "out.jsonl").code == 0
    before = (extract.folder / "out.jsonl").read_bytes()
    result = extract("--output", "out.jsonl")
    assert (result.code, extract.backend.asked) == (0, [])  # type: ignore[union-attr]
    assert "nothing to do: out.jsonl was finished before (6 rows, 0 failed); --restart makes it anew" in result.err
    assert extract("--output", "out.jsonl", "--seed", "1").code == 2
    assert extract("--output", "out.jsonl", "--seed", "1", "--restart").code == 0
    assert (extract.folder / "out.jsonl").read_bytes() != before


def test_interrupted_it_says_how_to_go_on(extract: Extract) -> None:
    assert extract("--output", "whole.jsonl").code == 0

    def interrupt(text: str, tries: int) -> None:
        if text.startswith("word2"):
            signal.raise_signal(signal.SIGINT)  # on this thread, so before anything else is answered

    extract.write("in.jsonl", *({"id": f"d{i}", "text": f"word{i} and more"} for i in range(6)))
    extract.wrong = interrupt
    result = extract("--output", "out.jsonl")
    assert result.code == 130
    assert "documents are finished; the same command goes on from there\ninterrupted\n" in result.err
    extract.wrong = None
    assert extract("--output", "out.jsonl").code == 0
    assert extract.rows() == extract.rows("whole.jsonl")


def test_a_backend_that_is_down_stops_the_job(extract: Extract) -> None:
    extract.wrong = lambda text, tries: "down" if text.startswith("word3") else None
    result = extract("--output", "out.jsonl")
    assert result.code == 2
    assert "radixrt: stopped at document 4 ('d3')" in result.err
    assert result.err.endswith("; the same command goes on from there\n")
    extract.wrong = None
    result = extract("--output", "out.jsonl")
    assert result.code == 0 and len(extract.rows()) == 6


def test_gold_and_report(extract: Extract) -> None:
    assert extract("--output", "out.jsonl").code == 0
    rows = extract.rows()
    rows[0]["value"]["first"] = "other"
    extract.write("gold.jsonl", *rows[:4])
    for output in ((), ("--output", "out.jsonl"), ("--output", "new.jsonl")):
        result = extract(*output, "--gold", "gold.jsonl", "--report", "r.html")
        assert result.code == 0, result.err
        score = result.out if output else result.err
        assert "first   75.0%" in " ".join(score.split()).replace("first 75.0%", "first   75.0%")
        assert "3 of 4 gold rows right in every field; 2 rows are not in it" in score
        page = (extract.folder / "r.html").read_text("utf-8")
        assert "3 of 4 rows are right in every field." in page
        assert ("Documents per second" in page) == (output != ("--output", "out.jsonl"))  # nothing ran


def test_the_report_shows_settings_but_no_secret(extract: Extract) -> None:
    arguments = ("--endpoint", "http://me:letmein@host:1/v1", "--confidence", "--no-evidence", "--max-tokens", "99")
    result = extract(*arguments, "--report", "r.html")
    assert result.code == 0, result.err
    page = (extract.folder / "r.html").read_text("utf-8")
    assert "letmein" not in page + result.err
    for shown in ("http://host:1/v1", "max tokens <bdi>99</bdi>", "confidence <bdi></bdi>"):
        assert shown in page
    assert "evidence" not in page


def test_csv_rows_are_read_back_for_the_score(extract: Extract) -> None:
    assert extract("--output", "out.jsonl").code == 0
    extract.write("gold.jsonl", *extract.rows())
    result = extract("--output", "out.csv", "--gold", "gold.jsonl")
    assert "6 of 6 gold rows right in every field" in result.out
    with open(extract.folder / "out.csv", encoding="utf-8", newline="") as file:
        assert [row["first"] for row in csv.DictReader(file)] == [f"word{i}" for i in range(6)]


def test_dry_run(extract: Extract) -> None:
    extract.write("in.jsonl", *({"id": f"d{i}", "text": f"word{i} and more" if i != 1 else ""} for i in range(6)))
    result = extract("--dry-run", "--output", "out.jsonl")
    assert result.code == 1  # one cannot be read
    assert "6 documents, 70 characters; 1 cannot be read\n  d1: " in result.out
    assert "[system]\n" in result.out and "word0 and more" in result.out
    assert [json.loads(line)["id"] for line in result.out.splitlines() if line.startswith('{"id"')] == [
        "d0",
        "d2",
        "d3",
    ]
    assert "tokens of a prompt: " in result.out and "time: about " in result.out
    assert not (extract.folder / "out.jsonl").exists()
    assert len(extract.backend.asked) == 3  # type: ignore[union-attr]


def test_dry_run_of_stdin(extract: Extract) -> None:
    result = extract("--dry-run", source="-", stdin="one line\nanother line\n")
    assert result.code == 0, result.err
    assert "2 documents, 20 characters; 0 cannot be read" in result.out


def test_dry_run_of_nothing_usable(extract: Extract) -> None:
    extract.write("in.jsonl", {"id": "a", "text": ""})
    result = extract("--dry-run")
    assert result.code == 2 and "has no document that can be read" in result.err


@pytest.mark.parametrize(
    ("kind", "cell", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, "", None),
        ({"type": "integer"}, "5", 5),
        ({"type": ["number", "null"]}, "2.5", 2.5),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", "null"),
        ({"type": "boolean"}, "true", True),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"$ref": "#/$defs/number"}, "7", 7),
    ],
)
def test_cells_of_csv(tmp_path: Path, kind: Any, cell: str, value: Any) -> None:
    schema = {"type": "object", "properties": {"x": kind}, "required": ["x"], "$defs": {"number": {"type": "integer"}}}
    target = load_target(schema)
    path = tmp_path / "out.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [["id", "x", "parts", "confidence"], ["a", cell, "", '{"x": 0.5}']]
        )
    assert list(read_rows(path, target)) == [{"id": "a", "value": {"x": value}, "confidence": {"x": 0.5}}]
