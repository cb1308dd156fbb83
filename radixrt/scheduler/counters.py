"""What a scheduler counts of its steps, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start or the last reset, in tokens unless the name says otherwise."""

    computed_prompt: int = 0
    recomputed: int = 0
    preemptions: int = 0
    steps: int = 0
    forward_tokens: int = 0
    drafted: int = 0
