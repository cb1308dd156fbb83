"""What a job has written survives whatever ends the job: every byte of every file is a place to stop at.

The oracle is the job that nothing interrupted: the same rows added to another journal, in one go.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from radixrt.errors import InvalidRequest
from radixrt.jobs import derived
from radixrt.jobs import journal as journal_module
from radixrt.jobs.formats import csv_format
from radixrt.jobs.journal import JobStopped, Journal, Usage, digest

SETTINGS = {"schema": "a" * 64, "seed": 1, "prompt": "b" * 64}
TEXTS = ["Zürich", "a\nb", "tab\t", "“quoted”", "", "\u2028", "漢字", '{"a": 1}', "x" * 50]


def is_failed(index: int) -> bool:
    return index % 4 == 3


def row(index: int) -> dict[str, Any]:
    if is_failed(index):
        return {"id": f"d{index}", "index": index, "error": f"no {TEXTS[index % len(TEXTS)]}"}
    return {"id": f"d{index}", "value": {"text": TEXTS[index % len(TEXTS)], "n": index}}


def mark(index: int) -> str:
    return digest(f"d{index}", "text")


def usage(index: int) -> Usage:
    return Usage(prompt=10 + index, cached=index, output=3, requests=1, parts=1)


def work(path: Path, documents: int, places: list[int], *, order: str = "input", finish: bool = True) -> list[int]:
    """A job: ask for every document, add those that are not known in the order of ``places``. Returns what was added."""
    added = []
    with Journal(path, SETTINGS, order=order) as journal:
        known = [journal.known(index, mark(index)) for index in range(documents)]
        for index in places:
            if not known[index]:
                journal.add(index, mark(index), row(index), usage(index), failed=is_failed(index))
                added.append(index)
        if finish:
            journal.finish()
    return added


def contents(path: Path) -> tuple[bytes, bytes]:
    errors = path.with_name(path.name + ".errors.jsonl")
    return path.read_bytes(), errors.read_bytes() if errors.exists() else b""


def as_lines(data: tuple[bytes, bytes]) -> tuple[list[bytes], list[bytes]]:
    return sorted(data[0].splitlines(True)), sorted(data[1].splitlines(True))


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder / "out.jsonl"


def reference(tmp_path: Path, documents: int, order: str = "input") -> tuple[bytes, bytes]:
    path = made(tmp_path / "reference")
    work(path, documents, list(range(documents)), order=order)
    return contents(path)


def test_rows_stand_in_input_order_as_json_wrote_them(tmp_path: Path) -> None:
    path = made(tmp_path / "a")
    work(path, 9, [8, 7, 6, 5, 4, 3, 2, 1, 0])
    out, errors = contents(path)
    assert [json.loads(line) for line in out.split(b"\n")[:-1]] == [row(i) for i in range(9) if not is_failed(i)]
    assert [json.loads(line) for line in errors.split(b"\n")[:-1]] == [row(i) for i in range(9) if is_failed(i)]
    assert out == "".join(json.dumps(row(i), ensure_ascii=False) + "\n" for i in range(9) if not is_failed(i)).encode()
    assert sorted(os.listdir(path.parent / "out.jsonl.job")) == ["lock", "settings.json"]


def test_as_completed_order(tmp_path: Path) -> None:
    path = made(tmp_path / "a")
    places = [8, 1, 6, 0, 4, 3, 2, 7, 5]
    work(path, 9, places, order="completed")
    out, errors = contents(path)
    assert [json.loads(line)["id"] for line in out.splitlines()] == [f"d{i}" for i in places if not is_failed(i)]
    assert [json.loads(line)["index"] for line in errors.splitlines()] == [3, 7]


def test_rows_are_written_as_soon_as_their_turn_comes(tmp_path: Path) -> None:
    path = made(tmp_path / "a")
    with Journal(path, SETTINGS) as journal:
        for index, lines in ((1, 0), (0, 2), (2, 3)):
            journal.add(index, mark(index), row(index), usage(index))
            assert len(path.read_bytes().splitlines()) == lines


def cut(folder: Path, to: Path, name: str, size: int) -> Path:
    """A copy of a job's files, one of them cut."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    os.truncate(to / name, size)
    return to / "out.jsonl"


@pytest.mark.parametrize("order", ["input", "completed"])
def test_the_journal_cut_at_every_byte(tmp_path: Path, order: str) -> None:
    places, documents = [2, 0, 1, 5, 3, 8, 4, 6], 9
    work(made(tmp_path / "begun"), documents, places, order=order, finish=False)
    wanted = reference(tmp_path, documents, order)
    name = "out.jsonl.job/journal.jsonl"
    lines = (tmp_path / "begun" / name).read_bytes().splitlines(True)
    ends = [sum(map(len, lines[: i + 1])) for i in range(len(lines))]
    for size in range(ends[-1] + 1):
        path = cut(tmp_path / "begun", tmp_path / "copy", name, size)
        whole = places[: sum(end <= size for end in ends)]
        added = work(path, documents, list(range(documents)), order=order)
        assert added == [i for i in range(documents) if i not in whole], size
        if order == "input":
            assert contents(path) == wanted, size
        assert as_lines(contents(path)) == as_lines(wanted), size


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.errors.jsonl"])
@pytest.mark.parametrize("order", ["input", "completed"])
def test_output_and_errors_cut_at_every_byte(tmp_path: Path, order: str, name: str) -> None:
    places, documents = [2, 0, 1, 5, 3, 8, 4, 6], 9
    work(made(tmp_path / "begun"), documents, places, order=order, finish=False)
    uncut = tmp_path / "uncut"
    shutil.copytree(tmp_path / "begun", uncut)
    work(uncut / "out.jsonl", documents, list(range(documents)), order=order)
    for size in range((tmp_path / "begun" / name).stat().st_size + 1):
        path = cut(tmp_path / "begun", tmp_path / "copy", name, size)
        assert work(path, documents, list(range(documents)), order=order) == [7]
        assert contents(path) == contents(uncut / "out.jsonl"), size


@pytest.mark.parametrize("damage", [b"\0" * 40, b'{"id": "d0"', b"\n", b"garbage\n", b"00000000\t1\t\n"])
def test_what_a_power_cut_leaves_behind_the_end(tmp_path: Path, damage: bytes) -> None:
    wanted = reference(tmp_path, 9)
    for name in ("out.jsonl", "out.jsonl.errors.jsonl", "out.jsonl.job/journal.jsonl"):
        folder = tmp_path / name.replace("/", "-")
        path = made(folder)
        work(path, 9, [0, 1, 3, 4], finish=False)
        with open(folder / name, "ab") as file:
            file.write(damage)
        assert work(path, 9, list(range(9))) == [2, 5, 6, 7, 8]
        assert contents(path) == wanted


def test_every_byte_of_the_journal_damaged(tmp_path: Path) -> None:
    """A changed byte anywhere costs what follows it, and never goes into the output."""
    work(made(tmp_path / "begun"), 5, [1, 0, 2], finish=False)
    wanted = reference(tmp_path, 5)
    name = "out.jsonl.job/journal.jsonl"
    data = (tmp_path / "begun" / name).read_bytes()
    for place in range(len(data)):
        path = cut(tmp_path / "begun", tmp_path / "copy", name, len(data))
        (tmp_path / "copy" / name).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        work(path, 5, list(range(5)))
        assert contents(path) == wanted, place


class Full:
    """A disk that takes so many bytes more, and after that part of one write and nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room, self.met = room, False
        monkeypatch.setattr(derived, "_write", self.write)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        taken = os.write(descriptor, bytes(data[: self.room])) if self.room else 0
        self.room -= taken
        if not taken:
            self.met = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return taken


@pytest.mark.parametrize("order", ["input", "completed"])
def test_a_disk_that_is_full_after_any_byte(tmp_path: Path, order: str) -> None:
    wanted = reference(tmp_path, 6, order)
    room, met = 0, True
    while met:
        with pytest.MonkeyPatch.context() as patch:
            full = Full(patch, room)
            shutil.rmtree(tmp_path / "job", ignore_errors=True)
            path = made(tmp_path / "job")
            finished: list[int] = []
            try:
                with Journal(path, SETTINGS, order=order) as journal:
                    assert not any(journal.known(index, mark(index)) for index in range(6))
                    for index in (2, 0, 1, 5, 3, 4):
                        journal.add(index, mark(index), row(index), usage(index), failed=is_failed(index))
                        finished.append(index)
                    journal.finish()
                assert not full.met
            except (JobStopped, InvalidRequest) as error:
                assert full.met and "No space left on device" in str(error)
                assert not path.exists() or path.read_bytes().endswith(b"\n") or not path.stat().st_size
            met = full.met
        if met:
            again = work(path, 6, list(range(6)), order=order)
            assert not set(again) & set(finished), room
        assert as_lines(contents(path)) == as_lines(wanted), room
        if order == "input":
            assert contents(path) == wanted, room
        room += 2 if order == "input" else 7
    assert room > 500


def test_a_full_device_says_where_it_stopped(tmp_path: Path) -> None:
    """A real device: /dev/full takes nothing."""
    path = made(tmp_path / "a")
    with Journal(path, SETTINGS) as journal:
        journal.add(0, mark(0), row(0), usage(0))
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, journal._journal)
        os.close(full)
        with pytest.raises(
            JobStopped, match=r"out.jsonl: .*No space left on device.*; 1 documents are finished and kept"
        ):
            journal.add(1, mark(1), row(1), usage(1))
    assert work(path, 3, [0, 1, 2]) == [1, 2]


def test_a_finished_job_has_nothing_to_do(tmp_path: Path) -> None:
    path = made(tmp_path / "a")
    work(path, 9, list(range(9)))
    before = contents(path)
    with Journal(path, SETTINGS) as journal:
        assert journal.finished is not None
        assert (journal.finished.documents, journal.rows, journal.failed) == (9, 7, 2)
        assert journal.usage.prompt == sum(10 + i for i in range(9))
        for index in range(9):
            journal.known(index, mark(index))
        assert journal.unchanged()
    with Journal(path, SETTINGS) as journal:
        for index in range(8):
            journal.known(index, mark(index))
        assert not journal.unchanged()
    assert contents(path) == before


def test_killed_between_finished_and_the_end_of_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path / "a")
    real = os.unlink
    monkeypatch.setattr(os, "unlink", lambda name: real(name) if "journal" not in str(name) else None)
    work(path, 4, [0, 1, 2, 3])
    monkeypatch.undo()
    assert (path.parent / "out.jsonl.job/journal.jsonl").exists()
    with Journal(path, SETTINGS) as journal:
        assert journal.finished is not None
    assert not (path.parent / "out.jsonl.job/journal.jsonl").exists()


@pytest.mark.parametrize("order", ["input", "completed"])
def test_a_finished_job_goes_on_with_documents_that_were_added(tmp_path: Path, order: str) -> None:
    wanted = reference(tmp_path, 9, order)
    for name in ("a", "b"):
        path = made(tmp_path / name)
        work(path, 5, list(range(5)), order=order)
        with Journal(path, SETTINGS, order=order) as journal:
            assert [journal.known(index, mark(index)) for index in range(7)] == [True] * 5 + [False] * 2
            assert not journal.unchanged()
            journal.extend()
            for index in (6, 5):
                journal.add(index, mark(index), row(index), usage(index), failed=is_failed(index))
        if name == "a":  # interrupted, and what was written of the added ones lost
            with open(path, "r+b") as file:
                file.truncate(path.stat().st_size - 9)
        with Journal(path, SETTINGS, order=order) as journal:
            assert journal.rows + journal.failed == 7
            assert [journal.known(index, mark(index)) for index in range(9)] == [True] * 7 + [False] * 2
            for index in (7, 8):
                journal.add(index, mark(index), row(index), usage(index), failed=is_failed(index))
            finished = journal.finish()
        assert finished.usage == sum((usage(i) for i in range(9)), Usage())
        if order == "input":
            assert contents(path) == wanted
        assert sorted(contents(path)[0].splitlines()) == sorted(wanted[0].splitlines())
        with Journal(path, SETTINGS, order=order) as journal:
            assert all(journal.known(index, mark(index)) for index in range(9)) and journal.unchanged()


def test_an_extended_job_checks_what_was_finished(tmp_path: Path) -> None:
    path = made(tmp_path / "a")
    work(path, 5, list(range(5)))
    with Journal(path, SETTINGS) as journal:
        known = [journal.known(index, mark(index)) for index in range(4)]
        known.append(journal.known(4, mark(17)))
        assert all(known) and not journal.unchanged()
        with pytest.raises(InvalidRequest, match="source has changed since .*out.jsonl' was finished; restart"):
            journal.known(5, mark(5))
    with Journal(path, SETTINGS) as journal:
        assert [journal.known(index, mark(index)) for index in range(6)] == [True] * 5 + [False]
        journal.extend()
        with pytest.raises(ValueError, match="document 4 is finished already"):
            journal.add(4, mark(4), row(4), usage(4))
        journal.add(5, mark(5), row(5), usage(5), failed=is_failed(5))
    for count, last in ((4, 3), (5, 17), (5, 4)):
        with Journal(path, SETTINGS) as journal:
            for index in range(count - 1):
                journal.known(index, mark(index))
            journal.known(count - 1, mark(last))
            with pytest.raises(InvalidRequest, match="source has changed"):
                journal.finish()
    with open(path, "r+b") as file:
        file.truncate(9)
    with pytest.raises(InvalidRequest, match="its output has changed since"):
        Journal(path, SETTINGS)


def test_a_finished_job_whose_errors_file_is_gone(tmp_path: Path) -> None:
    path = made(tmp_path / "a")
    work(path, 9, list(range(9)))
    os.unlink(tmp_path / "a/out.jsonl.errors.jsonl")
    with pytest.raises(InvalidRequest, match="its errors file is gone since; restart"):
        Journal(path, SETTINGS)


@pytest.mark.parametrize("change", [b"", b"more\n"])
def test_a_finished_output_that_changed(tmp_path: Path, change: bytes) -> None:
    path = made(tmp_path / "a")
    work(path, 4, [0, 1, 2, 3])
    path.write_bytes(path.read_bytes() + change if change else b"")
    with pytest.raises(InvalidRequest, match="its output has changed since; restart"):
        Journal(path, SETTINGS)
    path.unlink()
    with pytest.raises(InvalidRequest, match="its output is gone since; restart"):
        Journal(path, SETTINGS)
    with Journal(path, SETTINGS, restart=True) as journal:
        assert journal.finished is None
        assert not journal.known(0, mark(0))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 2}, r"seed differs: .*seed \(was 1, is 2\); give the same, another output, or restart"),
        ({"schema": "c" * 64}, r"schema differs: .*schema \(changed\)"),
        ({"prompt": "c" * 64, "seed": 3}, r"seed differs: .*seed \(was 1, is 3\), prompt \(changed\)"),
        ({"more": 1}, r"more differs: .*more \(changed\)"),
    ],
)
def test_other_settings_are_refused_unless_restarted(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    path = made(tmp_path / "a")
    work(path, 9, [0, 1, 2], finish=False)
    before = contents(path)
    with pytest.raises(InvalidRequest, match=said) as raised:
        Journal(path, {**SETTINGS, **changed})
    assert raised.value.field == said.split(" ")[0]
    assert contents(path) == before
    with Journal(path, {**SETTINGS, **changed}, restart=True) as journal:
        assert journal.resumed == 0
    assert contents(path) == (b"", b"")
    with pytest.raises(InvalidRequest, match="order differs: .*order \\(was 'input', is 'completed'\\)"):
        Journal(path, {**SETTINGS, **changed}, order="completed")


def test_settings_that_are_known_later(tmp_path: Path) -> None:
    path = made(tmp_path / "a")
    with Journal(path, SETTINGS) as journal:
        journal.settle({"model": "one", "part_tokens": 100})
        journal.add(0, mark(0), row(0), usage(0))
    with Journal(path, SETTINGS) as journal:
        assert journal.setting("part_tokens") == 100
        journal.settle({"model": "one"})
        with pytest.raises(InvalidRequest, match=r"model differs: .*model \(was 'one', is 'two'\)"):
            journal.settle({"model": "two"})
        assert journal.known(0, mark(0))


def test_another_document_in_the_same_place(tmp_path: Path) -> None:
    path = made(tmp_path / "a")
    work(path, 9, [0, 1, 2], finish=False)
    with Journal(path, SETTINGS) as journal:
        assert journal.known(0, mark(0))
        with pytest.raises(InvalidRequest, match="source has changed: document 2 is not the one"):
            journal.known(1, mark(7))
    with Journal(path, SETTINGS) as journal:
        assert journal.known(0, mark(0))
        with pytest.raises(InvalidRequest, match="source has changed: it ends after 1 documents"):
            journal.finish()


def test_one_job_at_a_time(tmp_path: Path) -> None:
    path = made(tmp_path / "a")
    with Journal(path, SETTINGS), pytest.raises(InvalidRequest, match=rf"another job .*\(process {os.getpid()}\)"):
        Journal(path, SETTINGS)
    with Journal(path, SETTINGS):
        pass


def test_a_file_that_no_job_wrote_is_left_alone(tmp_path: Path) -> None:
    for name in ("out.jsonl", "out.jsonl.errors.jsonl"):
        folder = tmp_path / f"of {name}"
        path = made(folder)
        (folder / name).write_text("mine\n")
        with pytest.raises(InvalidRequest, match=f"{name}' exists and no job wrote it"):
            Journal(path, SETTINGS)
        assert (folder / name).read_text() == "mine\n"
        work_after = Journal(path, SETTINGS, restart=True)
        work_after.close()
        assert contents(path) == (b"", b"")


def test_outputs_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path, said in (
        (tmp_path / "none" / "out.jsonl", "there is no folder"),
        (tmp_path / "file" / "out.jsonl", "there is no folder|cannot be written"),
        (tmp_path / "folder", "is not a regular file"),
        (Path("/proc/out.jsonl"), "cannot be written"),
        (tmp_path / ("n" * 300), "cannot be written: File name too long"),
    ):
        with pytest.raises(InvalidRequest, match=said) as raised:
            Journal(path, SETTINGS)
        assert raised.value.field == "output"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o500)
    with pytest.raises(InvalidRequest, match="cannot be written: Permission denied"):
        Journal(tmp_path / "a" / "out.jsonl", SETTINGS)


def test_damaged_settings(tmp_path: Path) -> None:
    path = made(tmp_path / "a")
    work(path, 9, [0], finish=False)
    (path.parent / "out.jsonl.job/settings.json").write_text('{"version": 1')
    with pytest.raises(InvalidRequest, match=r"settings.json' is not of this version, or damaged"):
        Journal(path, SETTINGS)
    with Journal(path, SETTINGS, restart=True) as journal:
        assert journal.resumed == 0


def test_syncs_by_rows_and_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    now = [0.0]
    with Journal(made(tmp_path / "a"), SETTINGS, clock=lambda: now[0]) as journal:
        synced.clear()
        for index in range(journal_module.SYNC_ROWS - 1):
            journal.add(index, mark(index), row(index), usage(index))
        assert synced == []
        journal.add(100, mark(100), row(100), usage(100))
        assert [Path(name).name for name in synced] == ["journal.jsonl", "out.jsonl"]  # in this order
        synced.clear()
        now[0] += journal_module.SYNC_SECONDS
        journal.add(101, mark(101), row(101), usage(101))
        assert [Path(name).name for name in synced] == ["journal.jsonl"]  # 101 waits for its turn


def test_a_document_cannot_finish_twice(tmp_path: Path) -> None:
    with Journal(made(tmp_path / "a"), SETTINGS) as journal:
        journal.add(0, mark(0), row(0), usage(0))
        with pytest.raises(ValueError, match="finished already"):
            journal.add(0, mark(0), row(0), usage(0))
        journal.known(0, mark(0))
        journal.known(1, mark(1))
        with pytest.raises(ValueError, match="not finished"):
            journal.finish()


def test_csv_is_what_the_csv_module_reads(tmp_path: Path) -> None:
    values = [
        {"id": "own", "a": 'say "hi", then\nleave', "n": 1.5, "ok": True},
        {"id": None, "a": "", "n": -7, "ok": None},
        {"id": "é", "a": "x,y", "n": 10**20, "ok": False},
    ]
    path = tmp_path / "out.csv"
    with Journal(path, SETTINGS, format=csv_format(["id", "a", "n", "ok"], ["parts"])) as journal:
        for index in range(3):
            journal.known(index, mark(index))
        for index in (2, 0, 1):
            item = {"id": f"d{index}", "value": values[index]} | ({"parts": 2} if index == 1 else {})
            journal.add(index, mark(index), item, usage(index))
        journal.finish()
    read = list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline="")))
    assert read == [
        {"id": "d0", "value.id": "own", "a": 'say "hi", then\nleave', "n": "1.5", "ok": "true", "parts": ""},
        {"id": "d1", "value.id": "", "a": "", "n": "-7", "ok": "", "parts": "2"},
        {"id": "d2", "value.id": "é", "a": "x,y", "n": str(10**20), "ok": "false", "parts": ""},
    ]


def test_csv_of_single_values_and_of_none(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.csv", SETTINGS, format=csv_format([])) as journal:
        journal.known(0, mark(0))
        journal.add(0, mark(0), {"id": "d0", "value": "spam"}, usage(0))
        journal.finish()
    assert (tmp_path / "out.csv").read_text() == "id,value\nd0,spam\n"
    with Journal(tmp_path / "none.csv", SETTINGS, format=csv_format(["a"])) as journal:
        journal.finish()
    assert (tmp_path / "none.csv").read_text() == "id,a\n"
    with Journal(tmp_path / "none.jsonl", SETTINGS) as journal:
        journal.finish()
    assert (tmp_path / "none.jsonl").read_bytes() == b""


def test_many_documents_in_any_order(tmp_path: Path) -> None:
    places = list(range(500))
    random.Random(1).shuffle(places)
    path = made(tmp_path / "a")
    work(path, 500, places[:300], finish=False)
    assert work(path, 500, places) == places[300:]
    assert contents(path) == reference(tmp_path, 500)
