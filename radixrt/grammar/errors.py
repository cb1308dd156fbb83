"""Errors of constrained decoding."""

from __future__ import annotations

from radixrt.errors import InvalidRequest


class UnsupportedConstraint(InvalidRequest):
    """A constraint that cannot be enforced exactly. ``field`` is the keyword, with its JSON pointer where there is one."""
