"""The project's frame: what is declared, what is pinned and what is packaged agree."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
LOCK = dict(re.findall(r"^([\w.-]+)==(\S+)(?: ; .+)?$", (ROOT / "requirements.lock").read_text("utf-8"), re.MULTILINE))
PINNED = {canonicalize_name(name): Version(version) for name, version in LOCK.items()}

# Import names that differ from the distribution's.
DISTRIBUTIONS = {"google": "protobuf"}


def declared() -> list[str]:
    project = PROJECT["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["test"], *PROJECT["build-system"]["requires"]]


@pytest.mark.parametrize("line", declared())
def test_the_lock_pins_what_is_declared_within_its_range(line: str) -> None:
    requirement = Requirement(line)
    assert PINNED[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_lock_holds_pins_and_comments_only() -> None:
    for line in (ROOT / "requirements.lock").read_text("utf-8").splitlines():
        assert line.startswith("#") or re.fullmatch(r"[\w.-]+==[\w.!]+( ; sys_platform == '\w+')?", line), line


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_whatever_the_packages_import_is_declared() -> None:
    allowed = {canonicalize_name(Requirement(line).name) for line in PROJECT["project"]["dependencies"]}
    allowed |= {
        canonicalize_name(Requirement(line).name) for line in PROJECT["project"]["optional-dependencies"]["gpu"]
    }
    for package in ("radixrt", "lang"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in imports(path) - set(sys.stdlib_module_names) - {"radixrt", "lang"}:
                assert canonicalize_name(DISTRIBUTIONS.get(name, name)) in allowed, f"{path.name} imports {name}"


def test_imports_point_down_only() -> None:
    order = ["ops", "model", "cache", "grammar", "sampling", "scheduler", "engine", "bench", "server", "cli"]
    forbidden = {
        "ops": order[1:],
        "model": order[5:],
        "cache": order[5:],
        "sampling": order[5:],
        "scheduler": order[6:],
    }
    forbidden |= {"engine": order[7:], "bench": order[8:], "server": order[9:]}
    for room, above in forbidden.items():
        for path in sorted((ROOT / "radixrt" / room).rglob("*.py")):
            for name in re.findall(r"^\s*(?:from|import) radixrt\.(\w+)", path.read_text("utf-8"), re.MULTILINE):
                assert name not in above, f"{path.relative_to(ROOT)} imports radixrt.{name}"


def test_no_file_is_two_rooms() -> None:
    for folder in ("radixrt", "lang", "examples", "tests", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text("utf-8").splitlines()) < 600, path


def test_importing_the_packages_loads_nothing_heavy() -> None:
    code = "import sys, radixrt, lang; sys.exit(str({'torch', 'numpy', 'transformers'} & set(sys.modules) or 0))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() in ("", "0"), done.stderr


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "radixrt", "--version"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
