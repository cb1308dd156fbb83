"""A journal that is interrupted, damaged and taken up again at random."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixrt.jobs.journal import Journal, Usage
from tests.jobs.test_journal import SETTINGS, contents, is_failed, mark, row, usage


class Jobs(RuleBasedStateMachine):
    """A job that is interrupted, damaged and taken up again at random, beside a model: the rows that must still be there."""

    DOCUMENTS = 8

    def __init__(self) -> None:
        super().__init__()
        self.folder: Path | None = None

    @initialize(order=st.sampled_from(["input", "completed"]))
    def begin(self, order: str) -> None:

        self.folder = Path(tempfile.mkdtemp())
        self.path, self.order = self.folder / "out.jsonl", order
        self.completed: list[int] = []
        self.open()

    def open(self) -> None:
        self.journal = Journal(self.path, SETTINGS, order=self.order)
        known = [index for index in range(self.DOCUMENTS) if self.journal.known(index, mark(index))]
        assert known == sorted(self.completed)

    def teardown(self) -> None:
        if self.folder is not None:
            self.journal.close()
            shutil.rmtree(self.folder)

    @precondition(lambda self: len(self.completed) < self.DOCUMENTS)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from([i for i in range(self.DOCUMENTS) if i not in self.completed]))
        self.journal.add(index, mark(index), row(index), usage(index), failed=is_failed(index))
        self.completed.append(index)

    @rule()
    def killed(self) -> None:
        """Nothing is closed in order: only the lock goes, as it does when a process ends."""
        os.close(self.journal._lock)
        self.journal._lock = -1
        self.open()

    @rule(share=st.floats(0, 1))
    def journal_cut(self, share: float) -> None:
        self.journal.close()
        name = self.folder / "out.jsonl.job/journal.jsonl"  # type: ignore[operator]
        lines = name.read_bytes().splitlines(True)
        size = int(share * sum(map(len, lines)))
        os.truncate(name, size)
        ends = [sum(map(len, lines[: i + 1])) for i in range(len(lines))]
        self.completed = self.completed[: sum(end <= size for end in ends)]
        self.open()

    @rule(share=st.floats(0, 1), more=st.binary(max_size=20), errors=st.booleans())
    def output_damaged(self, share: float, more: bytes, errors: bool) -> None:
        self.journal.close()
        name = self.journal.errors if errors else self.path
        data = name.read_bytes() if name.exists() else b""
        name.write_bytes(data[: int(share * len(data))] + more)
        self.open()

    @rule()
    def restarted(self) -> None:
        self.journal.close()
        Journal(self.path, SETTINGS, order=self.order, restart=True).close()
        self.completed = []
        self.open()

    @invariant()
    def files_are_what_the_journal_says(self) -> None:
        if self.folder is None:
            return
        if self.order == "completed":
            shown = list(self.completed)
        else:
            shown = list(self.upto())
        wanted = [
            "".join(json.dumps(row(i), ensure_ascii=False) + "\n" for i in shown if is_failed(i) is kind)
            for kind in (False, True)
        ]
        assert contents(self.path) == (wanted[0].encode(), wanted[1].encode())
        assert self.journal.rows + self.journal.failed == len(self.completed)
        assert self.journal.usage == sum((usage(i) for i in self.completed), Usage())

    def upto(self) -> Iterator[int]:
        index = 0
        while index in self.completed:
            yield index
            index += 1


TestJobs = Jobs.TestCase
TestJobs.settings = hypothesis_settings(max_examples=40, stateful_step_count=20, deadline=None)
