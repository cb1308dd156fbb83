"""Jobs that are killed with SIGKILL, in a process of their own, while they write; and taken up again here.

The oracle is the same job in a process that nobody kills.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from radixrt.errors import InvalidRequest
from radixrt.jobs import journal as journal_module
from tests.jobs.standin import StandIn, documents, job, wrong

ROOT = Path(__file__).parents[2]
COUNT = 24


def killed(folder: Path, mode: str, after: str) -> list[int]:
    """How the processes ended."""
    command = [sys.executable, "-m", "tests.jobs.standin", str(folder), str(COUNT), mode, after]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def files(output: Path) -> tuple[bytes, bytes]:
    return output.read_bytes(), output.with_name(output.name + ".errors.jsonl").read_bytes()


def finished(output: Path) -> set[int]:
    """Documents whose line stands whole in the journal."""
    name = output.with_name(output.name + ".job") / "journal.jsonl"
    lines = name.read_bytes().split(b"\n")[:-1] if name.exists() else []
    return {int(line.split(b"\t")[1]) for line in lines}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    output = tmp_path_factory.mktemp("reference") / "out.jsonl"
    result = job(output, COUNT)
    assert (result.stats.rows, result.stats.failed) == (19, 5)
    return files(output)


def test_killed_between_any_two_bytes(tmp_path: Path, reference: tuple[bytes, bytes]) -> None:
    step = 61
    endings = killed(tmp_path, "each", f"0:8000:{step}")
    assert endings.count(-9) > 100
    assert set(endings) <= {-9, 0}
    asked = {text: index for index, (_, text) in enumerate(documents(COUNT))}
    left = 0
    for number, ending in enumerate(endings):
        output = tmp_path / str(number * step) / "out.jsonl"
        before = finished(output)
        backend = StandIn(wrong=wrong, shuffle=number)
        result = job(output, COUNT, backend)
        assert files(output) == reference, number * step
        again = {asked[text] for text in backend.asked}
        assert not again & before
        assert result.nothing_to_do == (ending == 0)
        if before and again:
            left += 1
            assert result.stats.resumed == len(before)
    assert left > 40  # killed in the middle


def test_killed_again_and_again(tmp_path: Path, reference: tuple[bytes, bytes]) -> None:
    endings = killed(tmp_path, "same", "350:900:1")
    assert endings[-1] == 0
    assert endings.count(-9) >= 10
    assert files(tmp_path / "same" / "out.jsonl") == reference
    assert json.loads((tmp_path / "same" / "out.jsonl.job" / "settings.json").read_text())["finished"]["rows"] == 19


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    """A process that holds the lock names itself; killed, it holds nothing."""
    program = "import sys; from radixrt.jobs.journal import Journal; j = Journal(sys.argv[1], {}); print('open', flush=True); sys.stdin.read()"
    output = tmp_path / "out.jsonl"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(output)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "open\n"
        with pytest.raises(InvalidRequest, match=rf"another job is writing it \(process {holder.pid}\)"):
            journal_module.Journal(output, {})
    finally:
        holder.kill()
        holder.communicate()
    journal_module.Journal(output, {}).close()
