"""Responses that are kept: in memory, by owner and id, the least used forgotten first.

Invariants: at most ``most`` can be asked for, and what is held for them is at most ``most_bytes``: also what only later responses go on from, which
lives as long as one of them. Nobody sees what another owner keeps.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

_OVERHEAD = 1024  # bytes of a response besides its texts


@dataclass(slots=True, eq=False)
class Kept:
    """A response. ``items``: of its own input, JSON; ``body``: the response, JSON; ``links``: who needs it."""

    owner: bytes
    id: str
    items: bytes
    body: bytes
    previous: Kept | None
    links: int = 0

    @property
    def size(self) -> int:
        return len(self.items) + len(self.body) + _OVERHEAD

    def chain(self) -> list[Kept]:
        """This one and those it goes on from, the first of them first."""
        found, at = [], self
        while at is not None:
            found.append(at)
            at = at.previous  # type: ignore[assignment]
        return found[::-1]

    def read_items(self) -> list[dict[str, Any]]:
        """The items of its own input."""
        items: list[dict[str, Any]] = msgspec.json.decode(self.items)
        return items

    def read_output(self) -> list[dict[str, Any]]:
        output: list[dict[str, Any]] = msgspec.json.decode(self.body)["output"]
        return output


class ResponseStore:
    """Responses of one server."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self.bytes = 0
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[tuple[bytes, str], Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, owner: bytes, id: str, *, used: bool = True) -> Kept | None:
        """One that is kept. ``used``: it is forgotten later for that."""
        found = self._kept.get((owner, id))
        if found is not None and used:
            self._kept.move_to_end((owner, id))
        return found

    def keep(self, kept: Kept) -> None:
        """Keep one, and forget others for it; one that is larger than all there may be is not kept."""
        self._kept[kept.owner, kept.id] = kept
        self._hold(kept)
        while self._kept and (len(self._kept) > self._most or self.bytes > self._most_bytes):
            _, oldest = self._kept.popitem(last=False)
            self._release(oldest)

    def forget(self, owner: bytes, id: str) -> bool:
        """Whether there was one. What goes on from it still can."""
        found = self._kept.pop((owner, id), None)
        if found is not None:
            self._release(found)
        return found is not None

    def _hold(self, kept: Kept | None) -> None:
        while kept is not None:
            kept.links += 1
            if kept.links > 1:
                return
            self.bytes += kept.size
            kept = kept.previous

    def _release(self, kept: Kept | None) -> None:
        while kept is not None:
            kept.links -= 1
            if kept.links:
                return
            self.bytes -= kept.size
            kept = kept.previous
