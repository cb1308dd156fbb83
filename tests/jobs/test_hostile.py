"""What a job meets that means it harm, or does not mean anything: no stack trace, no row that is none, no file lost."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import BaseModel, model_validator

from radixrt.cli import main
from radixrt.errors import InvalidRequest
from radixrt.jobs import JobStopped, extract
from radixrt.jobs.confidence import confidences
from radixrt.jobs.endpoint_backend import EndpointBackend
from radixrt.jobs.http import Http, address
from radixrt.jobs.job import _count
from radixrt.jobs.stats import Stats
from radixrt.jobs.target import load_target
from tests.jobs.standin import SCHEMA, StandIn

TEXT: dict[str, Any] = {"type": "object", "properties": {"v": {"type": "string"}, "n": {"type": "number"}}}
LETTERS: dict[str, Any] = {"type": "object", "properties": {"v": {"type": "string", "pattern": r"^\p{L}+$"}}}
HALF = "\ud800"


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


# ---- answers


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ('{"v":"\\ud800","n":1}', "lone surrogate U+D800"),
        ('{"v":"' + HALF + '","n":1}', "lone surrogate U+D800"),
        ('{"\\udfff":"a"}', "lone surrogate U+DFFF"),
        ('{"v":"a","n":1e999}', "a number that is too large"),
        ('{"v":"a","n":-1e400}', "a number that is too large"),
    ],
)
@pytest.mark.parametrize("confidence", [False, True])
def test_an_answer_that_no_row_can_hold_is_no_row(answer: str, reason: str, confidence: bool) -> None:
    backend = StandIn(wrong=lambda text, tries: answer)
    if HALF in answer and confidence:
        pytest.skip("the stand-in spells tokens in UTF-8")
    done = extract(["one"], schema=TEXT, backend=backend, retries=0, confidence=confidence)
    assert not done.rows and reason in done.errors[0]["error"]


def test_a_word_that_no_row_can_hold_is_no_row() -> None:
    done = extract(["one"], regex=".*", backend=StandIn(wrong=lambda text, tries: HALF), retries=0)
    assert not done.rows and "lone surrogate" in done.errors[0]["error"]


@pytest.mark.parametrize(
    "raised", [asyncio.CancelledError("c"), GeneratorExit("g"), SystemExit(3), Unsayable(), StopIteration("s")]
)
def test_a_validator_that_raises_anything_costs_its_own_row_only(raised: BaseException) -> None:
    class Model(BaseModel):
        first: str
        size: int
        draw: int

        @model_validator(mode="after")
        def odd(self) -> Model:
            if self.first == "bad":
                raise raised
            return self

    done = extract(["good 1", "bad 2", "good 3"], schema=Model, backend=StandIn(), retries=0)
    assert [row["id"] for row in done.rows] == ["row-1", "row-3"]
    assert done.errors[0]["error"].startswith(type(raised).__name__)


# ---- endpoints


class _Server:
    """An endpoint that gives the same reply to every chat, and its models as told."""

    def __init__(self, reply: Any, models: Any = None) -> None:
        self._replies = {"/v1/models": models or {"data": [{"id": "m"}]}, "/v1/chat/completions": reply}
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self.address = ""

    def __enter__(self) -> _Server:
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def _serve(self) -> None:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(text=json.dumps(self._replies[request.path]), content_type="application/json")

        async def start() -> web.AppRunner:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", answer)
            runner = web.AppRunner(app, shutdown_timeout=0)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.address = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
            return runner

        runner = self._loop.run_until_complete(start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()


def _chat(content: str, logprob: Any = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"message": {"content": content}, "finish_reason": "stop"}
    if logprob is not None:
        choice["logprobs"] = {"content": [{"token": content, "logprob": logprob}]}
    return {"choices": [choice]}


@pytest.mark.parametrize(
    ("logprob", "sure"),
    [(float("nan"), 0), (float("-inf"), 0), (-(10**400), 0), (10**400, 1), (1e300, 1), (-1e308, 0), (0.5, 1)],
)
def test_log_probabilities_that_are_none_make_no_confidence_that_is_none(logprob: Any, sure: float) -> None:
    with _Server(_chat('{"v":"a","n":1}', logprob)) as server:
        backend = EndpointBackend(load_target(TEXT), server.address, environ={})
        row = extract(["one"], schema=TEXT, backend=backend, confidence=True).rows[0]
    assert row["confidence"] == {"v": sure, "n": sure}


@pytest.mark.parametrize(
    ("content", "problem"), [('{"v":"été"}', ""), ('{"v":"a b"}', "does not match the regex '^\\\\p{L}+$'")]
)
def test_a_pattern_is_judged_as_the_grammar_reads_it(content: str, problem: str) -> None:
    with _Server(_chat(content)) as server:
        backend = EndpointBackend(load_target(LETTERS), server.address, environ={})
        done = extract(["one"], schema=LETTERS, backend=backend, retries=0)
    assert problem in (done.errors[0]["error"] if problem else "") and len(done.rows) == (not problem)


def test_a_pattern_that_takes_for_ever_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixrt.jobs.verify.PATTERN_SECONDS", 0.05)
    schema = {"type": "object", "properties": {"v": {"type": "string", "pattern": "^(a|a)*$"}}}
    with _Server(_chat('{"v":"' + "a" * 60 + '!"}')) as server:
        backend = EndpointBackend(load_target(schema), server.address, environ={})
        done = extract(["one"], schema=schema, backend=backend, retries=0)
    assert "takes too long" in done.errors[0]["error"]


def test_an_error_that_comes_as_a_success_stops_the_job_in_its_own_words(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with _Server({"error": {"message": "quota is used up"}}) as server:
        backend = EndpointBackend(load_target(TEXT), server.address, environ={}, patience=0.0)
        with pytest.raises(JobStopped, match="answered 200 with an error: quota is used up; it was given") as caught:
            extract(["one", "two"], schema=TEXT, backend=backend, output=output)
    assert "asks to wait" not in str(caught.value)
    assert output.read_text() == "" and not (tmp_path / "out.jsonl.errors.jsonl").exists()


@pytest.mark.parametrize("key", ["sk-a\nb", "sk-a\r\nX: y", "sk-\x00b", "sk-\x1bb"])
def test_a_key_that_no_header_can_hold_is_said_and_not_shown(key: str) -> None:
    async def start() -> None:
        await Http(address("http://127.0.0.1:9"), key).start()

    with pytest.raises(InvalidRequest, match="RADIXRT_API_KEY or OPENAI_API_KEY has a line break") as caught:
        asyncio.run(start())
    assert "sk-" not in str(caught.value)


def test_sums_of_very_small_logprobs_are_zero() -> None:
    assert confidences('"a"', [(b'"', -1e6), (b"a", -1e6), (b'"', -1e6)]) == {"value": 0.0}


# ---- files


@pytest.mark.parametrize("link", [None, "symbolic", "hard"])
@pytest.mark.parametrize("read", ["out.jsonl", "out.jsonl.errors.jsonl"])
@pytest.mark.parametrize("what", ["source", "examples"])
def test_restart_never_forgets_what_the_job_reads(tmp_path: Path, link: str | None, read: str, what: str) -> None:
    output, path = tmp_path / "out.jsonl", tmp_path / read
    value = {"first": "a", "size": 1, "draw": 1}
    kept = json.dumps({"text": "one"} | ({"value": value} if what == "examples" else {})) + "\n"
    path.write_text(kept)
    named = path if link is None else tmp_path / "link.jsonl"
    if link == "symbolic":
        named.symlink_to(path)
    elif link == "hard":
        named.hardlink_to(path)
    arguments: dict[str, Any] = {"source": named} if what == "source" else {"source": ["one"], "examples": named}
    with pytest.raises(InvalidRequest, match="^output=.*is read by the job"):
        extract(**arguments, schema=SCHEMA, backend=StandIn(), output=output, restart=True)
    assert path.read_text() == kept


def test_a_folder_is_not_read_and_written_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "in").mkdir()
    for place in ("out.jsonl", "in/out.jsonl"):
        with pytest.raises(InvalidRequest, match="is read by the job"):
            extract(tmp_path, schema=SCHEMA, backend=StandIn(), output=tmp_path / place)
    (tmp_path / ".hidden").mkdir()
    for _ in range(2):
        done = extract(tmp_path, schema=SCHEMA, backend=StandIn(), output=tmp_path / ".hidden/out.jsonl")
        assert done.stats.rows == 1


def test_a_report_overwrites_nothing_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["in.jsonl", "s.json", "p.txt", "e.jsonl", "g.jsonl", "out.jsonl", "out.jsonl.errors.jsonl"]
    for name in names:
        (tmp_path / name).write_text("")
    (tmp_path / "g.jsonl").write_text('{"id": "a", "value": 1}\n')
    (tmp_path / "out.jsonl.job").mkdir()
    at = {name: str(tmp_path / name) for name in [*names, "out.jsonl.job/r.html"]}
    for place in at.values():
        arguments = ["extract", at["in.jsonl"], "--schema", at["s.json"], "--prompt", "@" + at["p.txt"]]
        arguments += ["--examples", at["e.jsonl"], "--gold", at["g.jsonl"], "--output", at["out.jsonl"]]
        assert main([*arguments, "--report", place]) == 2
        assert "is a file of the job itself" in capsys.readouterr().err


def test_counting_ahead_is_silent_about_what_the_job_says_itself(
    recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Any:
        yield from ()
        raise InvalidRequest("source", "is gone")

    before = threading.active_count()
    stats = Stats()
    _count(broken(), stats)
    for thread in threading.enumerate():
        if thread.name == "radixrt-count":
            thread.join(30)
    assert threading.active_count() <= before and stats.total is None
    assert "Traceback" not in capsys.readouterr().err
    assert not [one for one in recwarn if "Thread" in str(one.category)]


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        *(json.dumps({"version": 1, "settings": {}, "finished": x}) for x in ({"x": 1}, [1], {"usage": 3})),
    ],
)
def test_damaged_settings_are_said_to_be_and_restart_mends_them(tmp_path: Path, content: str) -> None:
    output = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.job").mkdir()
    (tmp_path / "out.jsonl.job" / "settings.json").write_text(content)
    with pytest.raises(InvalidRequest, match="or damaged"):
        extract(["one"], schema=SCHEMA, backend=StandIn(), output=output)
    assert extract(["one"], schema=SCHEMA, backend=StandIn(), output=output, restart=True).stats.rows == 1


def test_an_output_that_no_file_can_be_called() -> None:
    with pytest.raises(InvalidRequest, match="^output=.*null byte"):
        extract(["one"], schema=SCHEMA, backend=StandIn(), output="a\0.jsonl")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_id_does_not_command_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "\\u001b[2Jx", "text": ""}\n')
    monkeypatch.setattr("radixrt.jobs.job._backend", lambda *_: StandIn())
    monkeypatch.setattr("sys.stderr", _Terminal())
    assert main(["extract", str(tmp_path / "in.jsonl"), "--choices", "a,b", "--quiet"]) == 1
    said = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "[2Jx: is empty" in said and "\x1b" not in said


# ---- words


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"prompt": f"Extract {HALF}"}, "prompt"),
        ({"schema": {**SCHEMA, "description": HALF}}, "schema"),
        ({"examples": [{"text": HALF, "value": {"first": "a", "size": 1, "draw": 2}}]}, "examples[0].text"),
        ({"examples": [{"text": "a", "value": {"first": HALF, "size": 1, "draw": 2}}]}, "examples[0].value"),
        ({"schema": {}, "examples": [{"text": "a", "value": json.loads("[" * 250 + "]" * 250)}]}, "examples[0].value"),
    ],
)
def test_words_that_are_none_are_refused_by_their_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        extract(["one"], **{"schema": SCHEMA, "backend": StandIn(), **settings})
    assert caught.value.field == field


def test_a_pattern_of_letters_is_no_obstacle_to_examples() -> None:
    done = extract(["one"], schema=LETTERS, backend=StandIn(), examples=[{"text": "a", "value": {"v": "été"}}])
    assert done.stats.rows == 1


@pytest.mark.parametrize("choices", ["", "a,,b", "a, "])
def test_a_choice_of_nothing_is_a_slip(choices: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["extract", "nowhere.jsonl", "--choices", choices]) == 2
    assert "--choices" in capsys.readouterr().err
