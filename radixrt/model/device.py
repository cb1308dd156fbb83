"""Device owns the order in which work runs: one line of it, apart from the thread that makes it.

Invariants: work runs in the order in which it was launched, and never two pieces at a time, so a piece may use what earlier ones
wrote; what work reads from the host must not be changed after its launch; an error of one piece stays in its ticket.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy.typing as npt
import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


def upload(array: npt.NDArray[Any], out: torch.Tensor) -> torch.Tensor:
    """Copy ``array`` to ``out``, in the order of the device's work and without waiting for it; ``array`` may change then."""
    host = torch.from_numpy(array)
    return out.copy_(host.pin_memory(), non_blocking=True) if out.is_cuda else out.copy_(host)


class Ticket(Protocol[T_co]):
    """One piece of work that was launched."""

    def value(self) -> T_co:
        """For work that was launched later: what this work returned, or what it raised, raised here. Arrays of the device in it may
        still be computed, before the later work."""

    def result(self) -> T_co:
        """For the host: the same when it is complete. Waits for it."""


class Device(Protocol):
    """Runs work in order. ``kind`` says what it is, for whoever watches: ``"forward"`` or ``"sample"``."""

    def launch(self, kind: str, work: Callable[[], T]) -> Ticket[T]: ...

    def close(self) -> None:
        """Wait for what was launched and give up what is held; nothing is launched any more."""


@dataclass(frozen=True, slots=True)
class Done(Ticket[T_co]):
    """Work that has run."""

    future: Future[T_co]

    def value(self) -> T_co:
        return self.future.result()

    result = value


def ran(work: Callable[[], T]) -> Done[T]:
    """Run ``work`` now; its ticket keeps what it raises."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
    return Done(future)


class InlineDevice(Device):
    """Work runs in its launch: the host waits for everything."""

    def launch(self, kind: str, work: Callable[[], T]) -> Ticket[T]:
        return ran(work)

    def close(self) -> None:
        pass


class ThreadDevice(Device):
    """Work runs in a thread of its own: native kernels do not hold the interpreter's lock."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "radixrt-device")

    def launch(self, kind: str, work: Callable[[], T]) -> Ticket[T]:
        return Done(self._thread.submit(work))

    def close(self) -> None:
        self._thread.shutdown()


class StreamDevice(Device):
    """Work is queued on one CUDA stream: its launch returns when all of it is queued, or earlier where it raises.

    What the host is to read has to be on its way to pinned memory when the work returns; the ticket waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.default_stream(device))  # what was loaded there

    def launch(self, kind: str, work: Callable[[], T]) -> Ticket[T]:
        with torch.cuda.stream(self._stream), torch.cuda.nvtx.range(kind):
            done = ran(work)
            event = torch.cuda.Event()
            event.record()
        return _Queued(done, event)

    def close(self) -> None:
        with suppress(RuntimeError):  # of a device that has failed, whose users have been told
            self._stream.synchronize()


@dataclass(frozen=True, slots=True)
class _Queued(Ticket[T_co]):
    done: Done[T_co]
    event: torch.cuda.Event

    def value(self) -> T_co:
        return self.done.value()

    def result(self) -> T_co:
        self.event.synchronize()
        return self.done.value()
