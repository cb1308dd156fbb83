"""Flights owns the steps that were launched and have not ended: one, or two where a step is computed while the one before it is taken in.

    host    | schedule N+1, launch its forward | wait for N, take it in, masks of N+1 | launch sampling N+1 | schedule N+2 ...
    device  | ... sampling N  | forward N+1 .......................................| sampling N+1 | forward N+2 ...

The forward of N+1 reads the tokens that N samples where they are made. Its sampling needs the masks that follow them, so it is launched
when the host has taken N in: a late mask delays its own step's sampling, and nothing before it.

Invariants: steps run, and are taken in, in the order in which they were scheduled; outside of a call at most one is in flight, with its
forward and its sampling launched; a sequence that has ended, or got more tokens than the one that was awaited, is not sampled by a step that
was launched before; what a step raises is raised by ``wait``, once the device has come to its end, unless nobody waits for that step.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from radixrt.engine.live import LiveSample
from radixrt.engine.sampling import Outcome, Wanted, deliver, plan_sampling
from radixrt.model.device import Device, Done, Ticket
from radixrt.model.runner import ModelRunner
from radixrt.sampling.sampler import Sampled
from radixrt.scheduler.batch import Batch
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.sequence import Phase, Sequence


@dataclass(slots=True)
class Flight:
    """One step. ``sampling``: ``None`` until the tokens before it are known."""

    batch: Batch
    forward: Ticket[None]
    sampling: Ticket[Outcome] | None = None
    items: list[LiveSample] = field(default_factory=list)


class Flights:
    """Launches steps on ``device``.

    Args:
        samples: by the uid of their sequences, of all that run.
        ahead: launch a step before the one before it was taken in, where that is possible.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        device: Device,
        samples: Mapping[int, LiveSample],
        *,
        ahead: bool,
    ) -> None:
        self.ahead = ahead
        self.device = device
        self._scheduler, self._runner, self._samples = scheduler, runner, samples
        self._current: Flight | None = None
        self._next: Flight | None = None

    def __bool__(self) -> bool:
        return self._current is not None

    def launch(self) -> bool:
        """Launch what can be; whether a step is in flight, to be waited for. Then ``wait`` and ``follow``, or ``fail``."""
        if self._current is None:
            batch = self._scheduler.schedule()
            if batch is None:
                return False
            self._current = self._launch_forward(batch)
            self._launch_sampling(self._current)
        if self.ahead:
            following = self._scheduler.schedule_ahead(self._current.batch)
            if following is not None:
                self._next = self._launch_forward(following, self._current)
        return True

    def wait(self) -> list[tuple[LiveSample, list[Sampled]]]:
        """The tokens of the oldest step, which has ended; of those that ended meanwhile too.

        Raises:
            BaseException: what the step raised.
        """
        flight = self._current
        assert flight is not None and flight.sampling is not None
        found = flight.sampling.result()
        self._scheduler.commit(flight.batch)
        deliver(flight.items, found)
        return list(zip(flight.items, found.tokens, strict=True))

    def fail(self) -> list[Sequence]:
        """``wait`` raised; no step is in flight any more. Returns the sequences that are to blame, ended."""
        flight, following = self._current, self._next
        assert flight is not None
        self._current = self._next = None
        if following is not None:
            _settle(following)
        return self._scheduler.fail(flight.batch)

    def follow(self) -> None:
        """The oldest step was taken in: the next one's sampling can be launched."""
        self._current, self._next = self._next, None
        flight = self._current
        if flight is None:
            return
        batch = flight.batch
        if all(sequence.phase is not Phase.RUNNING for sequence in batch.sequences):  # computed for nobody
            self._current = None
            try:
                flight.forward.result()
            except BaseException as error:  # but what it put into the tree was not written
                self._scheduler.fail(batch)
                if not isinstance(error, Exception):
                    raise
            else:
                self._scheduler.commit(batch)
            return
        ends = dict(zip(batch.sequences, batch.ends, strict=True))
        flight.batch = batch.sampling(
            row for row, s in enumerate(batch.sampled) if s.phase is Phase.RUNNING and s.size == ends[s]
        )
        self._launch_sampling(flight)

    def close(self) -> None:
        """Wait for what is in flight; nothing is launched any more."""
        self.device.close()
        self._current = self._next = None
        del self._runner

    def _launch_forward(self, batch: Batch, before: Flight | None = None) -> Flight:
        forward, runner = batch.forward, self._runner
        sampling = before.sampling if before is not None else None

        def work() -> None:
            if forward is None:
                return
            token_ids = forward.token_ids
            if forward.sources is not None and sampling is not None:
                token_ids = runner.fill_in(token_ids, forward.sources, sampling.value().ids())
            runner.forward(
                token_ids,
                forward.positions,
                forward.write_slots,
                forward.q_lens,
                forward.kv_lens,
                forward.kv_slots,
            )

        return Flight(batch, self.device.launch("forward", work))

    def _launch_sampling(self, flight: Flight) -> None:
        flight.items = [self._samples[sequence.uid] for sequence in flight.batch.sampled]
        runner, forward = self._runner, flight.forward
        wanted: Wanted
        try:
            wanted = plan_sampling(flight.batch, flight.items, runner.info.vocab_size)
        except BaseException as error:
            failed: Future[Outcome] = Future()
            failed.set_exception(error)
            flight.sampling = Done(failed)
            return

        def work() -> Outcome:
            forward.value()  # what it raised
            return wanted.run(runner)

        flight.sampling = self.device.launch("sample", work)


def _settle(flight: Flight) -> None:
    """Wait for the end of a step whose results nobody wants, nor what it raises."""
    with suppress(BaseException):
        flight.forward.result()
