"""What the figures of an engine and of a request look like to a person.

Invariants: pure functions from figures to text; the meaning of a figure is the engine's.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Protocol, TextIO

from radixrt.request import RequestOutput

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Stats(Protocol):
    """The part of the engine's statistics shown here."""

    @property
    def hit_rate(self) -> float: ...
    @property
    def optimal_hit_rate(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def computed_tokens(self) -> int: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def forced_tokens(self) -> int: ...


def summary(stats: Stats, seconds: float) -> str:
    """One line about everything an engine did."""
    rate = f" ({stats.generated_tokens / seconds:,.1f} tok/s)" if seconds > 0 else ""
    return (
        f"{stats.prompt_tokens:,} prompt tokens: {stats.cached_tokens:,} cached, {stats.computed_tokens:,} computed · "
        f"hit rate {percent(stats.hit_rate)} (optimal {percent(stats.optimal_hit_rate)}) · "
        f"{stats.generated_tokens:,} tokens generated{_forced(stats.forced_tokens)} in {seconds:.1f} s{rate}"
    )


def turn(output: RequestOutput) -> str:
    """One line about one request."""
    seconds = output.decode_time
    rate = f", {output.completion_tokens / seconds:,.1f} tok/s" if seconds > 0 else ""
    return (
        f"[{output.prompt_tokens:,} prompt tokens: {output.cached_tokens:,} cached, {output.computed_tokens:,} computed · "
        f"{output.completion_tokens:,} generated{_forced(output.forced_tokens)}{rate} · {output.finish_reason}]"
    )


def _forced(tokens: int) -> str:
    return f" ({tokens:,} forced)" if tokens else ""


def table(stats: Any) -> str:
    """Every statistic on a line of its own."""
    names = list(getattr(stats, "__dataclass_fields__", {}) or vars(stats))
    names += [name for name in ("hit_rate", "optimal_hit_rate") if name not in names and hasattr(stats, name)]
    width = max(map(len, names), default=0)
    return "\n".join(f"{name.replace('_', ' '):<{width}}  {_value(name, getattr(stats, name))}" for name in names)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def printable(text: str, stream: TextIO) -> str:
    """Text for a stream: on a terminal, control characters that a model made up are shown and not obeyed."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if stream.isatty() else text


def peak_memory() -> float:
    """The most memory this process has held, in MB; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


def _value(name: str, value: Any) -> str:
    if isinstance(value, float):
        return percent(value) if name.endswith("rate") else f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
