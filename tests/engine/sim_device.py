"""A device with a clock of its own: it computes nothing before somebody may read it, and notes when it would have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from radixrt.model.device import Device, Ticket, ran


@dataclass
class Clock:
    """The host's time."""

    now: float = 0.0


@dataclass
class Piece:
    """Work in the line of the device. ``read``: when the host had its result."""

    kind: str
    work: Callable[[], Any]
    launched: float
    start: float
    end: float
    done: Ticket[Any] | None = None
    read: float | None = None


class SimulatedDevice(Device):
    """Runs each piece as late as it may: when the host waits for it or for a later one.

    So work that reads what the host changed after the launch, or a result that is read before it is there, shows.

    Args:
        seconds: that a piece of each kind takes, and under ``"launch"`` that the host takes to launch one.
    """

    def __init__(self, clock: Clock, seconds: dict[str, float]) -> None:
        self.clock, self.seconds = clock, seconds
        self.pieces: list[Piece] = []
        self.waits: list[float] = []
        self._inside = False

    def launch(self, kind: str, work: Callable[[], Any]) -> Ticket[Any]:
        assert not self._inside, "work launches work"
        self.clock.now += self.seconds["launch"]
        start = max(self.clock.now, self.pieces[-1].end if self.pieces else 0.0)
        self.pieces.append(Piece(kind, work, self.clock.now, start, start + self.seconds[kind]))
        return SimulatedTicket(self, len(self.pieces) - 1)

    def run(self, upto: int) -> None:
        for piece in self.pieces[: upto + 1]:
            if piece.done is None:
                self._inside = True
                piece.done = ran(piece.work)
                self._inside = False

    def close(self) -> None:
        self.run(len(self.pieces))


@dataclass
class SimulatedTicket(Ticket[Any]):
    device: SimulatedDevice
    at: int

    def value(self) -> Any:
        piece = self.device.pieces[self.at]
        assert self.device._inside, "the host reads what may not be there yet"
        assert piece.done is not None, "work reads what later work computes"
        return piece.done.value()

    def result(self) -> Any:
        assert not self.device._inside, "work waits for the host's clock"
        device, piece = self.device, self.device.pieces[self.at]
        device.run(self.at)
        device.clock.now = max(device.clock.now, piece.end)
        piece.read = device.clock.now
        assert piece.done is not None
        return piece.done.value()
