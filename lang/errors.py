"""The errors of programs. Each names the author's line; ``str(error)`` begins with it."""

from __future__ import annotations

import sys
from types import FrameType

_HERE = __name__.rpartition(".")[0] + "."
_NOT_OURS = (_HERE, "contextlib", "asyncio.", "concurrent.futures", "threading")


class ProgramError(Exception):
    """Something in a program cannot be done. ``location``: the author's ``file:line``, ``""`` where it is not known."""

    def __init__(self, problem: str, location: str = "") -> None:
        super().__init__(f"{location}: {problem}" if location else problem)
        self.problem = problem
        self.location = location


class UsageError(ProgramError, ValueError):
    """The program's text is wrong: a role inside a role, ``None`` appended, a name used twice."""


class UnknownVariable(ProgramError, KeyError):
    """A variable is read that was never set."""

    __str__ = Exception.__str__  # a KeyError would show its message in quotes


class GenerationFailed(ProgramError):
    """A generation or selection ended without a result. ``kind``: ``invalid``, ``unsupported`` or ``error``."""

    def __init__(self, problem: str, location: str = "", kind: str = "error") -> None:
        super().__init__(problem, location)
        self.kind = kind


class Cancelled(GenerationFailed):
    """What is read was cancelled, or needed something that was."""

    def __init__(self, problem: str, location: str = "") -> None:
        super().__init__(problem, location, "cancelled")


class BackendError(ProgramError):
    """The backend cannot be used, or cannot do what is asked."""


class ProgramTimeout(ProgramError, TimeoutError):
    """The program did not end in time."""


def author_frame() -> FrameType | None:
    """The innermost frame outside of this package, and of what runs its ``with`` blocks, tasks and threads."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_NOT_OURS):
        frame = frame.f_back
    return frame


def author_line() -> str:
    """``file:line`` of the innermost frame outside of this package."""
    frame = author_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
