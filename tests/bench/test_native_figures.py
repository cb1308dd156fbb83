"""The documented measurements of the native path run, and say what they should; their figures are nobody's business here."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from radixrt.cli import main
from radixrt.ops.native import native
from tests.tiny import save_tiny

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"

pytestmark = pytest.mark.skipif(native is None, reason="radixrt was installed without a C++ compiler")


def test_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny("llama", tmp_path / "tiny")
    file = tmp_path / "limits.json"
    arguments = (
        f"bench --limits --repeats 1 --threads 1 --model {tmp_path / 'tiny'} --max-total-tokens 4096 --json {file}"
    )
    assert main(arguments.split()) == 0
    found = json.loads(file.read_text())
    assert found["limits"]["variant"] == native.variants()[0] and min(found["limits"][k] for k in ("read", "int8")) > 0
    assert [one["workload"] for one in found["shares"]] == [
        "decode, one sequence",
        "decode, 16 sequences",
        "prefill, 511 tokens",
    ]
    assert all(one["rate"] > 0 and one["arithmetic"] > 0 for one in found["shares"])
    assert "share of reading" in capsys.readouterr().out


def test_limits_of_torch_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny("llama", tmp_path)
    assert main(f"bench --limits --kernels torch --model {tmp_path}".split()) == 2
    assert "--limits" in capsys.readouterr().err


@pytest.mark.model
def test_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(SCRIPTS / "accuracy.py"))
    assert script["main"](["--chunks", "1"]) == 0
    out = capsys.readouterr().out
    mean = re.search(r"256 positions.*radixrt native +mean ([0-9.]+)", out, re.DOTALL)
    assert mean and 0 < float(mean[1]) < 0.02


@pytest.mark.model
@pytest.mark.parametrize("what", ["sharing"])
def test_parts(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(SCRIPTS / "native.py"))
    assert script["main"]([what, "--rounds", "1"]) == 0
    assert "same tokens" in capsys.readouterr().out
