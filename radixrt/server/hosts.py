"""Hosts own whom a request may call the server: a page of another site whose name was made to point to this machine calls it by that name.

Invariants: nothing is looked up; names and addresses are compared without port, in lower case.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s/@:\[\]]+)\.?(?::\d*)?", re.IGNORECASE)


def named(header: str) -> str | None:
    """The name or address in a ``Host`` header; None: it holds none."""
    if ":" in header and is_address(header):  # IPv6 without brackets
        return header.lower()
    found = _HOST.fullmatch(header)
    return None if found is None else found[1].strip("[]").rstrip(".").lower()


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Only this machine can be meant."""
    if host == "localhost" or host.endswith(".localhost"):  # RFC 6761
        return True
    return is_address(host) and ipaddress.ip_address(host).is_loopback


class Hosts:
    """Who may be called: names and addresses, ``*`` for any, and always those of this machine alone."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(host.lower() for host in allowed)

    def allow(self, headers: Sequence[str]) -> bool:
        """Whether a request with these ``Host`` headers is answered; a browser always sends one."""
        return "*" in self._allowed or all(map(self._allows, headers))

    def _allows(self, header: str) -> bool:
        host = named(header)
        return host is not None and (host in self._allowed or is_loopback(host))
