"""Stats owns the figures of a job while it runs: counters, and how they grew over time.

Invariants: the counters cover every session of a resumed job, ``elapsed`` and ``series`` this one; the series has at most
``MOST_POINTS`` points, at even distances.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from radixrt.jobs.journal import Usage

MOST_POINTS = 600


@dataclass(frozen=True, slots=True)
class Point:
    """The counters of this session at one moment."""

    seconds: float
    finished: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Stats:
    """Figures of a job. One object lives as long as the job: ``progress`` is called with it whenever a document finishes.

    Fields:
        total: documents of the input, where that is known.
        read: documents read so far; ``resumed`` of the finished ones are of earlier sessions.
        rows, failed: documents with a row, and those in the errors file.
        usage: tokens and requests of all finished documents; ``session`` of those that this session finished.
        shared_tokens: tokens of the prompt that are the same for every document.
        unique_tokens: prompt tokens of this session that a cache that forgets nothing has to compute; ``None``: not known.
    """

    total: int | None = None
    read: int = 0
    resumed: int = 0
    rows: int = 0
    failed: int = 0
    usage: Usage = field(default_factory=Usage)
    session: Usage = field(default_factory=Usage)
    shared_tokens: int = 0
    unique_tokens: int | None = None
    elapsed: float = 0.0
    series: list[Point] = field(default_factory=list)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    _begun: float | None = field(default=None, repr=False)
    _failed_before: int = field(default=0, repr=False)
    _distance: float = field(default=1.0, repr=False)  # seconds between two points

    @property
    def finished(self) -> int:
        return self.rows + self.failed

    @property
    def cached_share(self) -> float:
        """Share of this session's prompt tokens that came from the cache."""
        return self.session.cached / self.session.prompt if self.session.prompt else 0.0

    @property
    def optimal_share(self) -> float:
        """The largest share possible: ``1 - unique tokens / prompt tokens``.

        Where the backend cannot tell what is unique, documents are taken to have only the shared part in common.
        """
        if not self.session.prompt:
            return 0.0
        unique = self.shared_tokens + self.session.unique if self.unique_tokens is None else self.unique_tokens
        return max(0.0, 1 - unique / self.session.prompt)

    @property
    def documents_per_second(self) -> float:
        return (self.finished - self.resumed) / self.elapsed if self.elapsed > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimate from this session's pace; ``None``: nothing to base it on."""
        if self.total is None or self.documents_per_second == 0:
            return None
        return max(0, self.total - self.finished) / self.documents_per_second

    def begin(self) -> None:
        self._begun = self.clock()
        self._failed_before = self.failed

    def add(self, usage: Usage, *, failed: bool) -> None:
        """A document has finished in this session."""
        self.rows += not failed
        self.failed += failed
        self.usage += usage
        self.session += usage
        self.tick()

    def tick(self, *, last: bool = False) -> None:
        """Take the time, and a point of the series where one is due."""
        if self._begun is None:
            self.begin()
        assert self._begun is not None
        self.elapsed = self.clock() - self._begun
        if not last and self.series and self.elapsed - self.series[-1].seconds < self._distance:
            return
        used = self.session
        finished, failed = self.finished - self.resumed, self.failed - self._failed_before
        self.series.append(Point(self.elapsed, finished, failed, used.prompt, used.cached, used.output))
        if len(self.series) > MOST_POINTS:
            del self.series[1::2]
            self._distance *= 2
