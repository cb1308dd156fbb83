"""Jobs: a value of one form out of each of many documents; ``extract`` is a whole job in one call."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixrt.jobs.backends import BackendDown
    from radixrt.jobs.job import JobResult, aextract, extract
    from radixrt.jobs.journal import JobStopped
    from radixrt.jobs.stats import Stats

_HOME = {
    "BackendDown": "radixrt.jobs.backends",
    "JobResult": "radixrt.jobs.job",
    "JobStopped": "radixrt.jobs.journal",
    "Stats": "radixrt.jobs.stats",
    "aextract": "radixrt.jobs.job",
    "extract": "radixrt.jobs.job",
}

__all__ = ["BackendDown", "JobResult", "JobStopped", "Stats", "aextract", "extract"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: a command's help loads neither torch nor a model."""
    if name not in _HOME:
        raise AttributeError(f"module 'radixrt.jobs' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
