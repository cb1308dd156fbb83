"""Where work runs: in the order of its launches, with its errors in its tickets; the CUDA stream on a stand-in for torch.cuda."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from radixrt.model.device import Device, InlineDevice, StreamDevice, ThreadDevice, upload


class FakeCuda:
    """Notes what is asked of a stream."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def Stream(self, device: Any) -> Any:
        return SimpleNamespace(
            wait_stream=lambda other: self.notes.append(f"wait for {other}"),
            synchronize=lambda: self.notes.append("synchronize"),
        )

    def default_stream(self, device: Any) -> str:
        return "default"

    def Event(self) -> Any:
        name = f"event {sum(note.startswith('record') for note in self.notes)}"
        return SimpleNamespace(
            record=lambda: self.notes.append(f"record {name}"), synchronize=lambda: self.notes.append(f"await {name}")
        )

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.notes.append("enter")
        yield
        self.notes.append("leave")

    @property
    def nvtx(self) -> Any:
        return SimpleNamespace(range=self._range)

    @contextmanager
    def _range(self, kind: str) -> Iterator[None]:
        self.notes.append(kind)
        yield


@pytest.fixture(params=["inline", "thread", "stream"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(torch, "cuda", FakeCuda())
    made: dict[str, Callable[[], Device]] = {
        "inline": InlineDevice,
        "thread": ThreadDevice,
        "stream": lambda: StreamDevice(torch.device("cuda")),
    }
    one = made[request.param]()
    yield one
    one.close()


def test_work_runs_in_order_and_later_work_has_what_earlier_work_made(device: Device) -> None:
    ran: list[int] = []

    def work(number: int, before: Any) -> int:
        ran.append(number)
        return number + (before.value() if before is not None else 0)

    ticket = None
    for number in range(20):
        ticket = device.launch("forward", lambda number=number, before=ticket: work(number, before))
    assert ticket is not None and ticket.result() == sum(range(20)) and ran == list(range(20))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, StopIteration])
def test_an_error_stays_in_its_ticket(device: Device, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("here")

    bad, good = device.launch("forward", fail), device.launch("sample", lambda: 7)
    after = device.launch("sample", lambda: bad.value())
    assert good.result() == 7
    for ticket in (bad, after):
        with pytest.raises(error):
            ticket.result()


def test_a_thread_leaves_its_launcher_alone() -> None:
    device, gate = ThreadDevice(), threading.Event()
    ticket = device.launch("forward", gate.wait)  # would never come back inline
    gate.set()
    assert ticket.result() is True
    device.close()


def test_a_stream_waits_only_where_the_host_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    device = StreamDevice(torch.device("cuda"))
    ticket = device.launch("forward", lambda: cuda.notes.append("work"))
    ticket.value()
    assert cuda.notes == ["wait for default", "enter", "forward", "work", "record event 0", "leave"]
    ticket.result()
    device.close()
    assert cuda.notes[6:] == ["await event 0", "synchronize"]


def test_what_was_uploaded_may_change() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    out = upload(array, torch.empty((2, 3), dtype=torch.int32))
    array[:] = 0
    assert out.tolist() == [[0, 1, 2], [3, 4, 5]]
