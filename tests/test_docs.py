"""Whatever the documentation says is run: Python blocks, commands, examples; and its tables are made from the code.

``python tests/test_docs.py`` renews the tables of README.md.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib.util
import itertools
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from radixrt import Constraint
from radixrt.cli import COMMANDS, main
from radixrt.cli.flags import documented_fields
from radixrt.config import EngineConfig
from radixrt.request import SamplingParams
from radixrt.server.config import ServerConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")

# Commands that this test cannot run itself, each with what runs them instead.
RUN_ELSEWHERE = {
    "scripts/test": "runs this test",
    "scripts/demo": "examples/demo.py, which test_examples runs",
    "scripts/device_check --rehearse": "tests/bench/test_device_check.py",
}
# Examples of ``lang`` are run by tests/lang/test_examples.py, all on one runtime.
EXAMPLES = [
    path for path in sorted((ROOT / "examples").glob("*.py")) if "from lang import" not in path.read_text("utf-8")
]
TYPED_INTO_CHAT = "What is 2 + 2?\n/stats\nAnd 3 + 3?\n/exit\n"


SERVED = "http://127.0.0.1:8000"  # where the README's server is


class Block(NamedTuple):
    line: int
    language: str
    text: str

    @property
    def served(self) -> bool:
        """It is a client of the server."""
        return SERVED in self.text


def blocks(language: str) -> list[Block]:
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    every = [Block(README[: match.start()].count("\n") + 1, match[1], match[2]) for match in found]
    return [block for block in every if block.language == language]


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.text.splitlines() if line]


def ids(block: Block) -> str:
    return f"line {block.line}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the files that the README shows."""
    monkeypatch.chdir(tmp_path)
    for language in ("jsonl", "json"):
        for block in blocks(language):
            before = "\n".join(README.splitlines()[: block.line])
            name = re.findall(rf"`([\w.]+\.{language})`", before)[-1]
            (tmp_path / name).write_text(block.text, "utf-8")
    return tmp_path


def test_the_readme_has_blocks_of_known_kinds_only() -> None:
    languages = set(re.findall(r"^```(\w+)$", README, re.MULTILINE))
    assert languages == {"sh", "bash", "python", "jsonl", "json", "text"}
    assert len(commands()) >= 8
    assert len(blocks("python")) >= 4


@pytest.fixture(scope="module")
def runtime() -> Iterator[Any]:
    """The default backend of the README's programs, shut down behind them."""
    from lang import Runtime, set_default_backend  # here: run as a script, this file would find tests/lang

    with Runtime(max_total_tokens=16_000) as made:
        set_default_backend(made)
        yield made
        set_default_backend(None)


@pytest.mark.model
@pytest.mark.parametrize("block", [block for block in blocks("python") if not block.served], ids=ids)
def test_python_block(block: Block, here: Path, runtime: Any) -> None:
    code = compile(block.text, f"README.md, line {block.line}", "exec", dont_inherit=True)
    exec(code, {"__name__": "__main__"})


@pytest.mark.model
@pytest.mark.parametrize("command", [line for line in commands() if "radixrt " in line])
def test_command(command: str, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    data = TYPED_INTO_CHAT.encode()
    if " | " in command:
        before, command = command.split(" | ")
        data = subprocess.run(before, shell=True, check=True, capture_output=True).stdout
    program, *arguments = shlex.split(command)
    assert program == "radixrt"
    with feed(data, monkeypatch):
        assert main(arguments) == 0
    out, err = capfd.readouterr()
    if arguments[0] == "chat":
        assert err.count("prompt tokens:") == 2
        assert "optimal hit rate" in err
    elif "--output" not in arguments:
        assert out.strip()
    for option, rows in (
        ("--output", {"generate": 3, "extract": 2}[arguments[0]] if "--output" in arguments else 0),
        ("--report", 1),
    ):
        if option in arguments:
            assert len((here / arguments[arguments.index(option) + 1]).read_text("utf-8").splitlines()) >= rows


# -- the server --------------------------------------------------------------------------------------------------------

STARTS = [line for block in blocks("bash") if not block.served for line in block.text.splitlines()]


@contextlib.contextmanager
def started(command: str, folder: Path) -> Iterator[str]:
    """Run a command of the README on a port of its own; gives the address, and sees that SIGTERM ends it well."""
    from radixrt.model.source import resolve

    (folder / "model.gguf").symlink_to(resolve())
    program, *arguments = shlex.split(command)
    launch = ["-m", "radixrt"] if program == "radixrt" else []
    assert program in ("radixrt", "python")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RADIXRT_API_KEY": ""}
    line = [sys.executable, *launch, *arguments, "--port", "0", "--max-total-tokens", "8192"]
    with subprocess.Popen(line, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = ""
            while said[-6:] != "ready\n":
                text = process.stderr.readline()
                said += text
                assert text, said
            address = re.search(r"address +(\S+)", said)
            assert address is not None, said
            with urllib.request.urlopen(f"{address[1]}/health") as answer:
                assert answer.status == 200
            yield address[1]
            process.send_signal(signal.SIGTERM)
            assert process.stderr.read().endswith("stopped\n")
        finally:
            process.kill()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with started(STARTS[0], tmp_path_factory.mktemp("served")) as address:
        yield address


@pytest.mark.model
@pytest.mark.parametrize("command", STARTS[1:])
def test_server_starts(command: str, tmp_path: Path) -> None:
    with started(command, tmp_path):
        pass


@pytest.mark.model
@pytest.mark.parametrize("block", [block for block in blocks("bash") if block.served], ids=ids)
def test_curl(block: Block, server: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = block.text.replace(SERVED, server).replace("curl ", "curl -sS --fail-with-body ", 1)
    ran = subprocess.run(["bash", "-euc", command], check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    if "/metrics" in block.text:
        named = set(re.findall(r"`(radixrt_\w+)`", README))
        assert len(named) > 12 and named <= set(re.findall(r"^# TYPE (\w+)", ran.stdout, re.MULTILINE))
    else:
        assert '"finish_reason":"stop"' in ran.stdout or '"finish_reason":"length"' in ran.stdout


@pytest.mark.model
@pytest.mark.parametrize("block", [block for block in blocks("python") if block.served], ids=ids)
def test_client(block: Block, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    from lang import default_backend, set_default_backend
    from lang.loop import LOOP

    for node in ast.parse(block.text).body:
        if isinstance(node, ast.ImportFrom) and importlib.util.find_spec(str(node.module)) is None:
            pytest.skip(f"{node.module} is not installed")
    code = compile(block.text.replace(SERVED, server), f"README.md, line {block.line}", "exec", dont_inherit=True)
    exec(code, {"__name__": "__main__"})
    out = capsys.readouterr().out
    assert out.strip()
    cached = [[int(figure) for figure in figures] for figures in re.findall(r"(\d+) of (\d+) prompt tokens", out)]
    for before, after in itertools.pairwise(cached):
        assert after[0] >= before[1]  # a turn finds all of the one before
    if "set_default_backend(" in block.text:
        LOOP.call(default_backend().aclose)
        set_default_backend(None)


def test_the_server_is_shown_with_every_kind_of_client() -> None:
    text = "".join(block.text for language in ("bash", "python") for block in blocks(language) if block.served)
    for what in (
        "curl",
        "from openai",
        "from langchain_openai",
        "from lang ",
        "json_schema",
        "/metrics",
        "cached_tokens",
    ):
        assert what in text, what
    assert [shlex.split(line)[:3] for line in STARTS[:1]] == [["radixrt", "serve"]] and len(STARTS) >= 3


class feed:
    """Standard input that holds these bytes, through a pipe as in a shell."""

    def __init__(self, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data, self.monkeypatch = data, monkeypatch

    def __enter__(self) -> None:
        reader, writer = os.pipe()
        self.stream = open(reader, encoding="utf-8")
        self.monkeypatch.setattr(sys, "stdin", self.stream)
        threading.Thread(target=self._write, args=(writer,), daemon=True).start()

    def _write(self, writer: int) -> None:
        with contextlib.suppress(BrokenPipeError), open(writer, "wb") as stream:  # not every command reads it
            stream.write(self.data)

    def __exit__(self, *_: object) -> None:
        self.stream.close()


def test_every_command_line_is_run_here_or_known_to_be_run_elsewhere() -> None:
    for command in commands():
        assert "radixrt " in command or command in RUN_ELSEWHERE, command
    for command in RUN_ELSEWHERE:
        assert command in commands()


def test_every_radixrt_command_is_documented() -> None:
    for command in COMMANDS:
        assert any(f"radixrt {command.name}" in line for line in commands()), command.name


@pytest.mark.parametrize("name", ["scripts/setup", "scripts/test", "scripts/demo", ".ci/run"])
def test_scripts_are_executable_bash(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / name], check=True)


def test_what_scripts_run_exists() -> None:
    assert "exec .venv/bin/python examples/demo.py" in (ROOT / "scripts/demo").read_text("utf-8")
    for script in re.findall(r"`(scripts/[\w/]+)", README):
        assert (ROOT / script).exists(), script


@pytest.mark.model
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples(path: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    out = capsys.readouterr().out
    if path.name == "demo.py":
        figures = dict(re.findall(r"^  ([a-z ]+?)  +([\d.,]+)", out, re.MULTILINE))
        assert figures["hit rate"] == figures["optimal hit rate"]
        assert float(figures["hit rate"]) > 80
        assert int(re.search(r"(\d+) of 16 as a person", out)[1]) >= 12  # type: ignore[index]
        assert "Paris" in out
    else:
        assert out.strip()


# -- tables ------------------------------------------------------------------------------------------------------------


def table(cls: type) -> str:
    """The settings of a dataclass as a Markdown table."""
    lines = ["| name | default | meaning |", "|---|---|---|"]
    documented = documented_fields(cls)
    for field in dataclasses.fields(cls):
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default  # type: ignore[misc]
        text = field.metadata.get("help") or documented[field.name]
        if "choices" in field.metadata:
            text += ": " + ", ".join(f"`{choice}`" for choice in field.metadata["choices"])
        lines.append(f"| `{field.name}` | `{default!r}` | {text.rstrip('.').replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def with_tables(readme: str) -> str:
    for cls in (EngineConfig, ServerConfig, SamplingParams):
        mark = f"<!-- table: {cls.__name__} -->\n"
        assert mark in readme
        head, rest = readme.split(mark)
        readme = head + mark + table(cls) + "\n<!-- end -->" + rest.split("<!-- end -->", 1)[1]
    return readme


def test_the_tables_of_the_readme_are_those_of_the_code() -> None:
    assert with_tables(README) == README, "run 'python tests/test_docs.py' to renew the tables"


def test_what_the_readme_links_to_exists() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(targets) >= 4
    for target in targets:
        assert (ROOT / target).exists(), target


def test_every_constraint_is_documented() -> None:
    kinds = [name for name, value in vars(Constraint).items() if isinstance(value, classmethod) and name != "from_dict"]
    assert len(kinds) >= 9
    for kind in kinds:
        assert f"`Constraint.{kind}(" in README, kind


def options() -> Iterator[str]:
    import importlib

    for command in COMMANDS:
        parser = argparse.ArgumentParser(add_help=True)
        importlib.import_module(command.module).add_arguments(parser)
        for action in parser._actions:
            yield from action.option_strings
    for path in ("scripts/device_check", "radixrt/bench/device/cli.py"):
        yield from re.findall(r'add_argument\("(--[a-z]+)"', (ROOT / path).read_text("utf-8"))


def test_every_option_named_in_the_readme_exists() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert named <= set(options()), named - set(options())


def test_every_figure_named_in_the_readme_exists(default_engine: Any) -> None:
    from radixrt.request import RequestOutput

    output, stats = set(dir(RequestOutput)), default_engine.stats()
    for names, owners in re.findall(r"^\| (`[\w`, ]+`) \| ((?:request|engine)[\w, ]*) \|", README, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            assert "request" not in owners or name in output, name
            assert "engine" not in owners or hasattr(stats, name), name


if __name__ == "__main__":
    (ROOT / "README.md").write_text(with_tables(README), "utf-8")
