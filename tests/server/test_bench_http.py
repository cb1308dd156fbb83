"""The measuring scripts of the server run from their command lines; what they measured is not judged here."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from radixrt.errors import InvalidRequest, RadixrtError
from radixrt.model.tokenizer import load_tokenizer
from tests.server.threaded import on_a_thread

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"


def script(name: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)


@pytest.fixture(scope="module")
def addresses(local_client: Any) -> Iterator[tuple[str, str]]:
    with on_a_thread(local_client) as one, on_a_thread(local_client) as other:
        yield one, other


def test_every_workload_runs_on_two_servers_in_turn(
    addresses: tuple[str, str], server_model: Path, tmp_path: Path
) -> None:
    sizes = ["--scale", 0.02, "--rounds", 2, "--tokenizer", server_model, "--json", tmp_path / "runs.json"]
    done = script("over_http", "--base-url", addresses[0], "--base-url", addresses[1] + "/v1", *sizes)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "runs.json").read_text())
    names = ["few-shot", "chat", "tree-of-thought", "unshared", "single-stream", "extraction", "first-token"]
    assert [workload["name"] for workload in found["workloads"]] == names
    for workload in found["workloads"]:
        assert f"{workload['name']}: {workload['about']}" in done.stdout
        assert len(workload["runs"]) == len(workload["ratios"]) == 2
        for runs in workload["runs"].values():
            assert len(runs) == 2
            for run in runs:
                assert 0 < run["ttft_p50_s"] <= run["ttft_p99_s"] <= run["wall_s"]
                assert 0 <= run["cached_tokens"] <= run["prompt_tokens"]  # the two have one engine
                if workload["name"] == "extraction":
                    assert run["valid"] == run["requests"], "our own server keeps to the schema"
                else:
                    assert run["generated_tokens"] == run["asked_tokens"]


@pytest.fixture(scope="module")
def over_http() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("over_http")


def test_a_round_shares_no_prompt_with_the_one_before(over_http: Any, server_model: Path) -> None:
    tokenizer = load_tokenizer(str(server_model))
    for name in over_http.NAMES:
        one, again, other = (over_http.task(name, tokenizer, seed=seed) for seed in (0, 0, 1))
        assert one == again
        roots = [{job.texts[node.id] for node in job.workload.nodes if node.parent is None} for job in (one, other)]
        assert not roots[0] & roots[1]


def test_the_schema_of_the_extraction_tells_rows_apart(over_http: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(over_http.SCHEMA)
    row = {"vendor": "A", "city": "B", "date": "", "total": 1.5, "currency": "EUR", "paid": True, "items": []}
    assert over_http.valid(json.dumps(row), over_http.SCHEMA)
    for broken in (json.dumps(row)[:-1], "", "[]", json.dumps({**row, "paid": 1}), json.dumps({**row, "more": 1})):
        assert not over_http.valid(broken, over_http.SCHEMA)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1), (0.5, 3), (0.61, 4), (0.99, 5), (1.0, 5)]
)  # by hand, nearest rank
def test_percentiles_are_values_that_were_measured(over_http: Any, share: float, expected: float) -> None:
    assert over_http.percentile([5, 3, 1, 4, 2], share) == expected
    assert over_http.percentile([], share) is None


def test_a_chat_goes_on_with_what_was_said(over_http: Any, server_model: Path) -> None:
    job = over_http.task("chat", load_tokenizer(str(server_model)))
    first, second = (next(node for node in job.workload.nodes if node.id == name) for name in ("c0t0", "c0t1"))
    opened = over_http.continued(job, first)
    assert [message["role"] for message in opened] == ["system", "user"]
    went_on = over_http.continued(job, second, opened, "An answer.")
    assert went_on[:2] == opened
    assert went_on[2] == {"role": "assistant", "content": "An answer."}
    assert went_on[3] == {"role": "user", "content": job.texts["c0t1"]}


async def _run_on(over_http: Any, model: Path, handle: Any, *arguments: str) -> int:
    """The smallest workload on a server of which only ``handle`` is known."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "strange"}]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", handle)])
    async with TestServer(app) as server:
        smallest = ["single-stream", "--scale", "0.02", "--rounds", "1", "--tokenizer", str(model)]
        url = str(server.make_url(""))
        status: int = await asyncio.to_thread(over_http.main, [*smallest, "--base-url", url, *arguments])
        return status


def _events(*texts: str, usage: bool = False) -> web.Response:
    events: list[Any] = [{"choices": [{"index": 0, "text": text}]} for text in texts]
    if usage:
        events.append({"choices": [], "usage": {"completion_tokens": 8, "prompt_tokens": 5}})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return web.Response(text=body, content_type="text/event-stream")


async def test_a_server_that_refuses_a_field_by_name_is_asked_without_it(
    over_http: Any, server_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[set[str]] = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append(set(body))
        if "ignore_eos" in body:
            return web.json_response({"error": "ignore_eos: extra fields not permitted"}, status=422)
        return _events("one", " two", usage=True)

    file = tmp_path / "runs.json"
    assert await _run_on(over_http, server_model, handle, "--json", str(file)) == 0
    assert ["ignore_eos" in names for names in seen] == [True, False, False]
    (run,) = next(iter(json.loads(file.read_text())["workloads"][0]["runs"].values()))
    assert (run["generated_tokens"], run["prompt_tokens"], run["cached_tokens"]) == (8, 5, None)
    assert "tokens: its wall time" not in capsys.readouterr().out


async def test_fewer_tokens_than_asked_for_are_said(
    over_http: Any, server_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def handle(request: web.Request) -> web.Response:
        return _events("one", " two")  # counts nothing: the events are the tokens

    assert await _run_on(over_http, server_model, handle) == 0
    assert "made 2 of 8 tokens: its wall time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda: web.Response(status=500, text="out of everything"), "answers 500: out of everything"),
        (lambda: web.Response(text='data: {"error": {"message": "broke"}}\n\n'), "broke"),
        (lambda: web.Response(text='data: {"choices": [{"text": "a"}]}\n\n'), r"ended without \[DONE\]"),
    ],
)
async def test_a_failed_request_is_no_figure(over_http: Any, server_model: Path, answer: Any, problem: str) -> None:
    async def handle(request: web.Request) -> web.Response:
        found: web.Response = answer()
        return found

    with pytest.raises(RadixrtError, match=problem):
        await _run_on(over_http, server_model, handle)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["few-shots", "--base-url", "http://127.0.0.1:1"], "did you mean"),
        (["--rounds", "0", "--base-url", "http://127.0.0.1:1"], "--rounds=0: must be at least 1"),
        (["--scale", "0", "--base-url", "http://127.0.0.1:1"], "--scale=0.0: must be above 0"),
        (["--base-url", "127.0.0.1:8000"], "must be like http://127.0.0.1:8000"),
        (["--base-url", "http://127.0.0.1:1", "--base-url", "http://127.0.0.1:1/"], "named twice"),
    ],
)
def test_bad_arguments_are_named(over_http: Any, arguments: list[str], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        over_http.main(arguments)


def test_peers_starts_measures_and_stops_our_own_server(server_model: Path, tmp_path: Path) -> None:
    sizes = ["--rounds", 1, "--scale", 0.02, "--only", "radixrt", "--threads", 1, "--json", tmp_path / "runs.json"]
    log = tmp_path / "log"
    more = ["--model", server_model, "--serve", "--max-total-tokens 4096", "--log", log]
    done = script("peers", "single-stream", "first-token", *sizes, *more)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "runs.json").read_text())
    assert [list(workload["runs"]) for workload in found["workloads"]] == [["radixrt"], ["radixrt"]]
    assert found["limits"]["read"] > 0
    assert found["limits"]["int8"] > 0
    assert log.read_text().rstrip().endswith("stopped"), "the server ended in order"


def test_peers_says_what_is_not_there_and_why_a_server_did_not_start(server_model: Path) -> None:
    sizes = ["single-stream", "--rounds", 1, "--threads", 1, "--model", server_model]
    absent = script("peers", *sizes, "--only", "llama.cpp", "--llama-bin", "/no/such/llama-server")
    assert absent.returncode == 1
    assert "--llama-bin=/no/such/llama-server: there is no llama.cpp to start" in absent.stderr
    broken = script("peers", *sizes, "--only", "radixrt", "--serve", "--max-total-tokens 0")
    assert broken.returncode == 1
    assert "radixrt ended with" in broken.stderr
    assert "max_total_tokens" in broken.stderr


def test_front_measures_every_kind_of_request(server_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(server_model, model)
    (model / "template.jinja").rename(model / "chat_template.jinja")
    sizes = ["--seconds", 0.05, "--rounds", 1, "--connections", 2, "--tokens", 3, "--tokenizer", model]
    done = script("front", *sizes, "--json", tmp_path / "rows.json")
    assert done.returncode in (0, 1), done.stderr
    assert done.stderr == ""
    rows = json.loads((tmp_path / "rows.json").read_text())
    paths = ["/generate", "/v1/completions", "/v1/chat/completions"]
    assert [row["kind"] for row in rows] == paths + [f"{path}, streamed" for path in paths]
    assert all(row["requests_per_s"] > 0 and row["bare_requests_per_s"] > 0 and row["ttft_ms"] > 0 for row in rows)
