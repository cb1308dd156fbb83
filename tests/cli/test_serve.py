"""``radixrt serve``: its flags under every name, and what is refused before a model is loaded."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from radixrt.cli import main, serve
from radixrt.cli.flags import Parser
from radixrt.config import EngineConfig
from radixrt.errors import InvalidRequest
from radixrt.server.config import ServerConfig


def read(*arguments: str) -> tuple[ServerConfig, dict[str, Any]]:
    parser = Parser(prog="radixrt serve")
    serve.add_arguments(parser)
    return serve.read(parser.parse(arguments))


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RADIXRT_API_KEY", raising=False)


def test_every_setting_has_a_flag_and_no_flag_a_default() -> None:
    parser = Parser()
    serve.add_arguments(parser)
    for cls in (ServerConfig, EngineConfig):
        for field in dataclasses.fields(cls):
            assert "--" + field.name.replace("_", "-") in parser._option_string_actions, field.name
    assert read() == (ServerConfig(), {}, [])


ENGINE: list[tuple[str, dict[str, Any]]] = [
    ("--model-path m", {"model": "m"}),
    ("--model m", {"model": "m"}),
    ("m", {"model": "m"}),
    ("m --model m", {"model": "m"}),
    ("--context-length 100", {"max_model_len": 100}),
    ("--max-model-len=auto", {"max_model_len": None}),
    ("--max-model-len=-1", {"max_model_len": None}),
    ("--gpu-memory-utilization 0.5", {"kv_memory_fraction": 0.5}),
    ("--mem-fraction-static 0.5", {"kv_memory_fraction": 0.5}),
    ("--max-num-seqs 3", {"max_running_requests": 3}),
    ("--max-running-requests 3", {"max_running_requests": 3}),
    ("--max-num-batched-tokens 99", {"chunked_prefill_size": 99}),
    ("--block-size 16", {"page_size": 16}),
    ("--kv-cache-dtype float32", {"kv_dtype": "float32"}),
    ("--disable-radix-cache", {"disable_radix_cache": True}),
    ("--enable-prefix-caching", {"disable_radix_cache": False}),
    ("--no-enable-prefix-caching", {"disable_radix_cache": True}),
    ("--scheduling-policy fcfs", {"schedule_policy": "fcfs"}),
    ("--schedule-policy lpm", {"schedule_policy": "lpm"}),
    ("--random-seed 5", {"seed": 5}),
    ("--chat-template f", {"chat_template": "f"}),
    ("--tensor-parallel-size 1", {}),
]


@pytest.mark.parametrize("line, expected", ENGINE, ids=[line for line, _ in ENGINE])
def test_engine_settings_by_the_names_of_other_servers(line: str, expected: dict[str, Any]) -> None:
    assert read(*line.split())[1] == expected


SERVER: list[tuple[str, dict[str, Any]]] = [
    ("--host 0.0.0.0 --port 30000", {"host": "0.0.0.0", "port": 30000}),
    ("--api-key k", {"api_key": ("k",)}),
    ("--served-model-name a --served-model-name b", {"served_model_name": ("a", "b")}),
    ("--cors-origins https://a.example", {"cors_origins": ("https://a.example",)}),
    ("--allowed-origins *", {"cors_origins": ("*",)}),
    ("--max-queued-requests 7", {"max_queue": 7}),
    ("--uvicorn-log-level error --no-access-log", {"log_level": "error", "access_log": False}),
    ('--default-chat-template-kwargs {"a":1}', {"default_chat_template_kwargs": {"a": 1}}),
    ("--in-process", {"in_process": True}),
    ("--tool-call-parser qwen25 --enable-auto-tool-choice", {"tool_call_parser": "qwen25"}),
]


@pytest.mark.parametrize("line, expected", SERVER, ids=[line for line, _ in SERVER])
def test_server_settings(line: str, expected: dict[str, Any]) -> None:
    config = read(*line.split())[0]
    assert {name: getattr(config, name) for name in expected} == expected


MODELS: list[tuple[str, list[tuple[str, str | None]]]] = [
    ("--model a=/m/x", [("a", "/m/x")]),
    (
        "--model a=/m/x --model b=/m/y --preload b --models-memory 4 --max-loaded-models 1",
        [("a", "/m/x"), ("b", "/m/y")],
    ),
    ("--model a= --model org/y", [("a", None), ("org/y", "org/y")]),
    ("--idle-unload 60", [("SmolLM2-135M-Instruct.Q4_1", None)]),
    ("org/y --idle-unload 60 --served-model-name n", [("n", "org/y")]),
    ("--model org/y", []),
]


@pytest.mark.parametrize("line, expected", MODELS, ids=[line for line, _ in MODELS])
def test_models_by_name(line: str, expected: list[tuple[str, str | None]]) -> None:
    _, settings, models = read(*line.split())
    assert [(one.name, one.model) for one in models] == expected
    assert ("model" in settings) == (not models)


REFUSED: list[tuple[str, str]] = [
    ("--modle-path x", "did you mean '--model-path'"),
    ("--max-num-seq 3", "did you mean '--max-num-seqs'"),
    ("--tool-call-parser hermess", "tool_call_parser='hermess'; did you mean 'hermes'?"),
    ("--reasoning-parser x", "reasoning_parser='x'"),
    ("--tp-size 2", "several devices will come"),
    ("--port 70000", "port=70000: must be at most 65535"),
    ("--port x", "'x' is not an integer"),
    ("--host=", "host"),
    ("--log-level loud", "loud"),
    ("--cors-origins a.example", "cors_origins has 'a.example'"),
    ("--chat-template-kwargs [1]", "must be a JSON object"),
    ("--max-model-len 0", "max_model_len=0"),
    ("m --model other", "named already"),
    ("a b", "unexpected argument 'b'"),
    ("--queue-timeout 0", "queue_timeout"),
    ("--model a=x --model a=y", "the name a is taken"),
    ("--model a=x --in-process", "have a process each"),
    ("--model a=x --served-model-name n", "are given as --model NAME=MODEL"),
    ("--model x --models-memory 3", "is for several models"),
    ("--max-loaded-models 2", "is for several models"),
    ("--model a=x --models-memory 0", "models_memory=0"),
    ("--model a=x --max-loaded-models 0", "max_loaded_models=0"),
    ("--model a=x --preload b", "preload='b': is none of the models"),
]


@pytest.mark.parametrize("line, says", REFUSED, ids=[line for line, _ in REFUSED])
def test_what_is_refused(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *line.split(" ")]) == 2
    out, err = capsys.readouterr()
    assert says in err and err.count("\n") == 1 and not out


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXRT_API_KEY", "from-env")
    assert read()[0].api_key == ("from-env",)
    assert read("--api-key", "k", "--api-key", "l")[0].api_key == ("k", "l")
    monkeypatch.setenv("RADIXRT_API_KEY", "one, two")
    assert read()[0].api_key == ("one", "two")
    monkeypatch.setenv("RADIXRT_API_KEY", "one,")
    with pytest.raises(InvalidRequest, match="api_key"):  # an empty key would let everybody in
        read()
    monkeypatch.delenv("RADIXRT_API_KEY")
    assert read()[0].api_key == ()
    with pytest.raises(InvalidRequest) as refused:
        read("--api-key", "secret\nkey")
    assert "secret" not in str(refused.value)


def test_a_server_in_a_process_of_its_own(tmp_path: Path) -> None:
    from tests.tiny import save_tiny

    save_tiny("llama", tmp_path)
    arguments = [str(tmp_path), "--port", "0", "--max-total-tokens", "512", "--in-process", "--max-model-len", "auto"]
    process = subprocess.Popen(
        [sys.executable, "-m", "radixrt.launch_server", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line == "ready\n":
                break
        text = "".join(said)
        assert "512 tokens of keys and values" in text and "float32 on cpu" in text, text
        url = next(word for word in text.split() if word.startswith("http://"))
        with urllib.request.urlopen(f"{url}/health") as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert "stopped" in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()  # type: ignore[union-attr]
