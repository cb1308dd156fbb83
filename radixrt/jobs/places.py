"""Whether a file that a job writes is one that it reads: it would be lost, or be a document of the next run.

Invariant: nothing is opened or made; what does not exist is where it would be.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any


def read_there(path: str | os.PathLike[str], sources: Iterable[Any]) -> str | None:
    """The first of ``sources`` that is ``path``, or a folder in which ``path`` is found; those that are no paths do not
    count.
    """
    real = os.path.realpath(path)
    for source in sources:
        if not isinstance(source, (str, os.PathLike)) or not os.path.exists(source):
            continue
        name = os.fspath(source)
        if os.path.exists(real) and os.path.samefile(real, name):
            return name
        folder = os.path.join(os.path.realpath(name), "")
        hidden = f"{os.sep}." in os.sep + real[len(folder) :]
        if os.path.isdir(folder) and real.startswith(folder) and not hidden:
            return name
    return None
