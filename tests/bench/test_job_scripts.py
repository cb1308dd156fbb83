"""The measurements of jobs and tools run, in a small form, and say what they should; their figures are not judged here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"

pytestmark = pytest.mark.model


def said(script: str, *arguments: str) -> str:
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_an_extraction_job_is_killed_and_resumed() -> None:
    out = said("extract.py", "whole", "--count", "3", "--kills", "1", "--max-tokens", "90", "--threads", "1")
    assert "3 rows, 0 things wrong" in out and "the same bytes: True" in out


def test_an_extraction_job_beside_a_server() -> None:
    out = said("extract.py", "peers", "--count", "2", "--max-tokens", "90", "--threads", "1")
    assert len(re.findall(r"documents/s .*, 2 of 2 valid", out)) == 2


def test_constrained_calls_parse_and_validate() -> None:
    found = json.loads(said("tool_calls.py", "--calls", "4"))
    assert found["calls"] == found["parse"] == found["valid"] == 4


def test_leases_on_and_off() -> None:
    out = said("tool_lease.py", "--programs", "2", "--at-once", "2", "--wait", "0.05", "--load", "1", "--repeats", "1")
    rows = [json.loads(line) for line in out.splitlines()]
    assert "programs_per_second_on_over_off" in rows[-1] and len(rows) == 4
