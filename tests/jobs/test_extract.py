"""extract as people call it: what is wrong is said before a model is loaded, and a job goes on where it was interrupted."""

from __future__ import annotations

import csv
import inspect
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from radixrt import Engine
from radixrt.errors import InvalidRequest
from radixrt.jobs import JobStopped, Stats, aextract, extract
from radixrt.jobs import job as job_module
from radixrt.jobs.documents import read_documents
from radixrt.jobs.engine_backend import EngineBackend
from radixrt.jobs.target import load_target
from tests.jobs.standin import SCHEMA, StandIn, documents, job, wrong

ITEMS = [("a", "one two"), ("b", ""), ("c", "three four")]
DEEP = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}, "required": ["a"]}


def test_rows_and_errors_come_back_without_an_output() -> None:
    result = extract(ITEMS, schema=SCHEMA, backend=StandIn())
    assert [(row["id"], row["value"]["first"]) for row in result.rows] == [("a", "one"), ("c", "three")]
    assert result.errors == [{"id": "b", "index": 1, "error": "is empty"}]
    assert (result.output, result.errors_output, result.nothing_to_do) == (None, None, False)
    assert (result.stats.rows, result.stats.failed, result.stats.read, result.stats.total) == (2, 1, 3, 3)


def test_the_seed_is_of_the_document_and_not_of_its_place() -> None:
    rows = [extract(items, schema=SCHEMA, backend=StandIn(), seed=seed).rows for items, seed in (
        (ITEMS, 1), (ITEMS[::-1], 1), (ITEMS, 2),
    )]  # fmt: skip
    assert rows[0] == rows[1][::-1] != rows[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"order": "random"}, "order='random': must be one of input, completed"),
        ({"merge": "last"}, "merge='last': must be one of vote, first"),
        ({"max_tokens": 0}, "max_tokens=0: must be"),
        ({"retries": -1}, "retries=-1: must be"),
        ({"seed": 1.5}, "seed=1.5: must be"),
        ({"overlap": -1}, "overlap=-1: must be"),
        ({"concurrency": 0}, "concurrency=0: must be"),
        ({"temperature": -1}, "temperature=-1: must be"),
        ({"patience": -1}, "patience=-1: must be"),
        ({"confidence": "yes"}, "confidence='yes'"),
        ({"schema": None}, "schema: give exactly one of schema, regex and choices"),
        ({"schema": {"type": "object", "properties": {"a": {"type": "srting"}}}}, "schema"),
        ({"prompt": " "}, "prompt=' ': must be"),
        ({"examples": [{"text": "a"}]}, r"examples\[0\].value: is missing"),
        ({"output": "out.txt"}, "output='out.txt': must end in .jsonl or .csv"),
        ({"output": "out.csv", "schema": DEEP}, "output='out.csv': CSV holds values without lists and objects"),
        ({"output": "none/out.jsonl"}, "output='none/out.jsonl': there is no folder 'none'"),
        ({"source": "none.jsonl"}, "source='none.jsonl': No such file"),
        ({"source": 7}, "source=7"),
        ({"source": [("a", "b"), 7]}, "source"),
        ({"field": "x"}, "field"),
        ({"format": "xml"}, "format"),
        ({"endpoint": "http://127.0.0.1:1"}, "endpoint: in one job there is one of endpoint, engine and backend"),
    ],
)
def test_what_is_wrong_is_said_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    backend = StandIn()
    with pytest.raises(InvalidRequest, match=said):
        extract(**{"source": "in.jsonl", "schema": SCHEMA, "backend": backend, **arguments})
    if arguments.get("source") != [("a", "b"), 7]:  # found when its turn comes
        assert backend.started == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_totl_tokens": 7}, "max_totl_tokens: EngineConfig has no such field; did you mean 'max_total_tokens'"),
        ({"page_size": 0}, "page_size=0"),
        ({"endpoint": "http://127.0.0.1:1", "page_size": 1}, "page_size: is a setting of an engine in this process"),
        ({"endpoint": "ftp://x"}, "endpoint"),
        ({"engine": "gpt"}, "engine: must be"),
    ],
)
def test_settings_of_a_model_are_looked_at_before_it_is_loaded(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        extract(["a"], schema=SCHEMA, **arguments)


async def test_in_an_event_loop_there_is_aextract() -> None:
    with pytest.raises(InvalidRequest, match="use `await aextract"):
        extract(ITEMS, schema=SCHEMA, backend=StandIn())
    assert len((await aextract(ITEMS, schema=SCHEMA, backend=StandIn())).rows) == 2


def test_both_have_the_same_signature() -> None:
    assert list(inspect.signature(extract).parameters) == list(inspect.signature(aextract).parameters)
    assert not inspect.iscoroutinefunction(extract)


def test_a_file_in_and_a_csv_file_out(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text('id,body\n1,"a, b"\n2,\n3,c\n')
    result = extract(source, schema=SCHEMA, backend=StandIn(), output=tmp_path / "out.csv", field="body")
    with open(tmp_path / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["first"], row["size"]) for row in rows] == [("1", "a,", "4"), ("3", "c", "1")]
    assert result.errors_output == tmp_path / "out.csv.errors.jsonl"
    assert [json.loads(line)["id"] for line in result.errors_output.read_text().splitlines()] == ["2"]


def test_no_documents(tmp_path: Path) -> None:
    result = extract([], schema=SCHEMA, backend=StandIn(), output=tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == b"" and result.stats.read == 0
    assert extract([], schema=SCHEMA, backend=StandIn(), output=tmp_path / "out.jsonl").nothing_to_do


def test_documents_are_counted_beside_the_job(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for _, text in documents(20)))
    stats: list[Stats] = []
    extract(source, schema=SCHEMA, backend=StandIn(), progress=stats.append)
    assert len(stats) == 20 and len({id(one) for one in stats}) == 1
    for thread in threading.enumerate():
        if thread.name == "radixrt-count":
            thread.join(10)
    assert stats[0].total in (20, None)  # None: the job was faster
    stats[0].total = None
    job_module._count(iter(documents(7)), stats[0])  # type: ignore[arg-type]
    for thread in threading.enumerate():
        if thread.name == "radixrt-count":
            thread.join(10)
    assert stats[0].total == 7


# ---- going on


class Interrupted(Exception):
    pass


def interrupt_after(count: int) -> Any:
    def progress(stats: Stats) -> None:
        if stats.finished >= count:
            raise Interrupted

    return progress


@pytest.mark.parametrize("order", ["input", "completed"])
def test_interrupted_after_every_document(tmp_path: Path, order: str) -> None:
    job(tmp_path / "whole.jsonl", 16, order=order)
    for count in range(1, 16):
        backend = StandIn(wrong=wrong, shuffle=count)
        output = tmp_path / f"{count}.jsonl"
        with pytest.raises(Interrupted):
            job(output, 16, backend, order=order, progress=interrupt_after(count))
        assert (backend.started, backend.closed, backend.running) == (1, 1, 0)
        result = job(output, 16, order=order)
        assert count <= result.stats.resumed <= 16 and result.stats.finished == 16  # others may end in the same moment
        for end in ("", ".errors.jsonl"):
            lines = [(tmp_path / f"{name}.jsonl{end}").read_bytes().splitlines() for name in ("whole", count)]
            assert lines[0] == lines[1] if order == "input" else sorted(lines[0]) == sorted(lines[1])


def test_the_model_being_down_and_back(tmp_path: Path) -> None:
    down = StandIn(wrong=lambda text, tries: "down" if "number 9" in text else wrong(text, tries))
    with pytest.raises(JobStopped, match=r"stopped at document 10 \('doc 9'\)"):
        job(tmp_path / "out.jsonl", 16, down)
    job(tmp_path / "out.jsonl", 16)
    job(tmp_path / "whole.jsonl", 16)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_finished_job_asks_nothing(tmp_path: Path) -> None:
    job(tmp_path / "out.jsonl", 16)
    backend = StandIn()
    again = job(tmp_path / "out.jsonl", 16, backend)
    assert again.nothing_to_do and (backend.started, backend.asked) == (0, [])
    assert (again.stats.rows, again.stats.failed) == (13, 3)
    with pytest.raises(InvalidRequest, match="source has changed since .*out.jsonl' was finished; restart"):
        job(tmp_path / "out.jsonl", 15, backend)
    changed = [*documents(15), ("doc 15", "other text"), ("doc 16", "new")]
    with pytest.raises(InvalidRequest, match="source has changed since .*out.jsonl' was finished; restart"):
        extract(changed, schema=SCHEMA, backend=backend, output=tmp_path / "out.jsonl")
    assert (backend.started, backend.asked) == (0, [])
    assert not job(tmp_path / "out.jsonl", 15, restart=True).nothing_to_do


@pytest.mark.parametrize("end", ["jsonl", "csv"])
def test_a_finished_job_goes_on_with_what_was_added(tmp_path: Path, end: str) -> None:
    job(tmp_path / f"whole.{end}", 30)
    for count in (16, 17, 23, 30):
        backend = StandIn(wrong=wrong)
        if count == 30:  # interrupted among those that were added
            with pytest.raises(Interrupted):
                job(tmp_path / f"out.{end}", count, progress=interrupt_after(26))
        result = job(tmp_path / f"out.{end}", count, backend)
        assert result.stats.finished == result.stats.read == count and not result.nothing_to_do
        assert len(backend.asked) < 2 * (count - result.stats.resumed) + 1
        assert job(tmp_path / f"out.{end}", count, backend).nothing_to_do
    for name in ("", ".errors.jsonl"):
        assert (tmp_path / f"out.{end}{name}").read_bytes() == (tmp_path / f"whole.{end}{name}").read_bytes()


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    lines = [json.dumps({"id": name, "text": text or "-"}) + "\n" for name, text in documents(2000)]
    writer = threading.Thread(target=lambda: pipe.write_text("".join(lines)), daemon=True)
    writer.start()
    result = extract(str(pipe), schema=SCHEMA, backend=StandIn(), progress=lambda stats: None)
    assert [row["id"] for row in result.rows] == [name for name, _ in documents(2000)]


def test_a_source_that_cannot_be_counted_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n' * 200)
    with pytest.raises(InvalidRequest, match="no column holds text"):
        extract(tmp_path / "in.jsonl", schema=SCHEMA, backend=StandIn(), progress=lambda stats: None)
    job_module._count(read_documents(tmp_path / "in.jsonl"), Stats())
    for thread in threading.enumerate():
        if thread.name == "radixrt-count":
            thread.join(10)
    assert said == []


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"seed": 1}, "seed"),
        ({"max_tokens": 99}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"prompt": "Do something else."}, "prompt"),
        ({"examples": [{"text": "a", "value": {"first": "a", "size": 1, "draw": 2}}]}, "prompt"),
        ({"schema": {**SCHEMA, "title": "other"}}, "schema"),
        ({"merge": "first"}, "merge"),
        ({"retries": 2}, "retries"),
        ({"confidence": True}, "confidence"),
        ({"evidence": True}, "evidence"),
        ({"order": "completed"}, "order"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, changed: dict[str, Any], name: str) -> None:
    output = tmp_path / "out.jsonl"
    call: dict[str, Any] = {"schema": SCHEMA, "output": output, "backend": StandIn(wrong=wrong)}
    with pytest.raises(Interrupted):
        extract(documents(16), **call, progress=interrupt_after(5))
    call |= {"backend": StandIn(wrong=wrong)}
    with pytest.raises(InvalidRequest, match=f"^{name} differs: .*restart") as raised:
        extract(documents(16), **{**call, **changed})
    assert raised.value.field == name and call["backend"].started == 0
    assert extract(documents(16), **{**call, **changed}, restart=True).stats.resumed == 0


def test_settings_that_are_no_longer_given_are_compared_too() -> None:
    backend = EngineBackend(load_target(regex="a"))
    before = job_module._answering(backend, None, {"dtype": "float32"})
    now = job_module._answering(backend, None, {})
    assert {**now, "dtype": "float32"} == before != now
    assert job_module._answering(StandIn(), None, {}) == {}


def test_another_model_and_another_context(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        job(tmp_path / "out.jsonl", 16, StandIn(context_length=2000), progress=interrupt_after(5))
    other = StandIn()
    other.name = "other"
    with pytest.raises(
        InvalidRequest, match="^model differs: .*model \\(was 'endpoint: stand-in', is 'endpoint: other'\\)"
    ):
        job(tmp_path / "out.jsonl", 16, other)
    with pytest.raises(InvalidRequest, match="^part_tokens differs"):
        job(tmp_path / "out.jsonl", 16, StandIn(context_length=1500))
    assert other.closed == 1
    job(tmp_path / "out.jsonl", 16, StandIn(wrong=wrong, context_length=3000))  # documents are split as before


def test_what_identifies_a_model_is_what_it_is_and_not_where(tmp_path: Path) -> None:
    def model(name: str, weights: bytes, config: str = "{}") -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        (tmp_path / name / "config.json").write_text(config)
        return job_module.model_identity(str(tmp_path / name))

    weights = bytes(300_000)
    same = model("a", weights)
    assert model("b", weights) == same
    for name, place in (("c", 0), ("d", 150_001), ("e", 299_999)):
        assert model(name, weights[:place] + b"\1" + weights[place + 1 :]) != same
    assert model("f", weights + b"\0") != same
    assert model("g", weights, '{"a": 1}') != same


# ---- a real model


@pytest.mark.model
def test_a_job_on_the_embedded_model_computes_what_is_unique_and_goes_on_to_the_same_rows(tmp_path: Path) -> None:
    items = [
        (f"inv-{i}", f"Invoice {1000 + i}\nFrom: Company {chr(65 + i)} Ltd\nTotal due: {17 * i + 5}.50 EUR\n")
        for i in range(10)
    ]
    schema = {
        "type": "object",
        "properties": {"seller": {"type": "string", "maxLength": 20}, "total": {"type": "number"}},
        "required": ["seller", "total"],
        "additionalProperties": False,
    }
    with Engine() as engine:
        whole = extract(items, schema=schema, engine=engine, output=tmp_path / "whole.jsonl", max_tokens=32)
        assert whole.stats.rows == 10
        assert whole.stats.cached_share == pytest.approx(whole.stats.optimal_share, abs=1e-9)
        assert whole.stats.unique_tokens == whole.stats.session.prompt - whole.stats.session.cached > 0
        with pytest.raises(Interrupted):
            extract(
                items, schema=schema, engine=engine, output=tmp_path / "out.jsonl", max_tokens=32, concurrency=3,
                progress=interrupt_after(4),
            )  # fmt: skip
        rest = extract(items, schema=schema, engine=engine, output=tmp_path / "out.jsonl", max_tokens=32)
        assert rest.stats.resumed == 4 and rest.stats.session.requests == 6
        assert engine.generate("still open")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
