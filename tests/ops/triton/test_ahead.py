"""Every kernel as it is shipped compiles for each kind of device, without spills and within its shared memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import radixrt.ops.triton
from tests.ops.triton.ahead import ROOT, Report, compiled

_FOLDER = Path(radixrt.ops.triton.__file__).parent
MODULES = sorted(p.stem for p in _FOLDER.glob("*.py") if "def configurations(" in p.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_what_is_shipped_compiles_without_spills(module: str) -> None:
    found = compiled(module)
    assert {report.target for report in found} == {80, 90, 100}
    assert [report.problem() for report in found if report.problem()] == []
    assert all(0 < report.registers <= 255 for report in found)
    if module == "attention":
        assert [report.name for report in found if report.serial] == []


def test_a_report_names_what_is_wrong() -> None:
    fine = Report("attention", "decode", 80, 4, registers=100, shared=163 * 1024)
    assert fine.problem() == ""
    assert "spills" in Report("attention", "decode", 80, 4, registers=255, stack=8).problem()
    assert "shared memory" in Report("attention", "decode", 80, 4, registers=100, shared=163 * 1024 + 1).problem()
    assert "no such" in Report("attention", "decode", 80, 4, error="no such").problem()


def test_spills_are_found() -> None:
    """A tile of heads of 256 is too much for one warp."""
    code = """if True:
        from dataclasses import replace
        from radixrt.ops.triton import attention
        from tests.ops.triton import ahead
        entry = next(e for e in attention.configurations() if e.name == "tile-bf16-256-16-4to1-90")
        print(ahead.report("attention", replace(entry, num_warps=1), 90).problem())
        print(ahead.report("attention", replace(entry, types=entry.types | {"scale": "fp99"}), 90).problem())
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    spills, error = done.stdout.splitlines()[:2]
    assert "spills" in spills
    assert "fp99" in error
