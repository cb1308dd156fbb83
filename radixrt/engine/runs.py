"""Runs owns what is remembered of programs for a person who looks: those that run, and the last ones that ended, as graphs with times.

Invariants: used by the engine's thread only; bounded in programs, nodes and characters, whatever the programs are; holds nothing of a program that
ended but plain data.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from radixrt.engine.nodes import Arg, Fork, Gen, Join, Ref, Role, Select, Text, refs

if TYPE_CHECKING:
    from radixrt.engine.programs import _Live, _Program

MOST_RUNS = 24  # that ended
MOST_OPEN = 12
MOST_NODES = 120  # of one program
MOST_OPEN_NODES = 400  # of all that run
MOST_TEXT = 200  # characters


class Runs:
    """The last programs of one engine."""

    def __init__(self) -> None:
        self._ended: deque[dict[str, Any]] = deque(maxlen=MOST_RUNS)
        self._number = 0

    def number(self) -> int:
        """For a program that begins."""
        self._number += 1
        return self._number

    def keep(self, program: _Program) -> None:
        """A program ends, and still has its nodes."""
        if program.live:
            self._ended.append(_run(program, MOST_NODES, over=True))

    def told(self, programs: dict[str, _Program], known: Iterable[int]) -> dict[str, Any]:
        """Plain data: ``runs``, the newest first, without those that ended and are ``known``; ``numbers``: of all there are.

        Args:
            programs: those that are open, by id, in the order in which they began.
        """
        room, found = MOST_OPEN_NODES, []
        for program in islice(reversed(programs.values()), MOST_OPEN):
            run = _run(program, min(MOST_NODES, room), over=False)
            room -= len(run["nodes"])
            found.append(run)
        numbers = [run["number"] for run in found] + [run["number"] for run in reversed(self._ended)]
        seen = frozenset(known)
        found += [run for run in reversed(self._ended) if run["number"] not in seen]
        return {"runs": found, "numbers": numbers}


def _run(program: _Program, most: int, *, over: bool) -> dict[str, Any]:
    now = time.monotonic()
    lives = islice(program.live.values(), most)
    return {
        "number": program.number,
        "name": _cut(program.name, 80),
        "over": over,
        "seconds": round(now - program.began, 4),
        "nodes": [_node(program, live, now) for live in lives],
        "more": max(0, len(program.live) - most),
        "private": bool(program.cache_salt),
    }


def _node(program: _Program, live: _Live, now: float) -> dict[str, Any]:
    node, usage = live.node, live.usage
    data: dict[str, Any] = {"id": node.id, "kind": node.kind, "parent": node.parent, "state": _state(live)}
    needs = [ref.node for ref in refs(node)] + (list(node.branches) if isinstance(node, Join) else [])
    if needs:
        data["needs"] = needs[:64]
    if isinstance(node, Text):
        data["text"] = _written(node)
    elif isinstance(node, Role):
        data["text"] = _cut(node.role, 40) if node.begin else ""
    elif isinstance(node, (Gen, Select)):
        data["name"] = _cut(node.name, 60)
        if live.outputs:
            data["text"] = _cut(live.outputs[0].text, MOST_TEXT)
            data["samples"] = len(live.outputs)
        if usage is not None:
            data["times"] = [
                round(t, 5) for t in (usage.started, usage.queue_time, usage.prefill_time, usage.decode_time)
            ]
            data["tokens"] = [usage.cached_tokens, usage.computed_tokens, usage.generated_tokens]
        elif live.started and not live.over:
            data["times"] = [round(live.started - program.began, 5), 0.0, 0.0, round(now - live.started, 5)]
    elif isinstance(node, Fork):
        data["count"] = node.count
    if live.failed is not None:
        data["error"] = _cut(live.failed, MOST_TEXT)
    return data


def _state(live: _Live) -> str:
    if live.failed is not None:
        return "cancelled" if live.cancelled else "failed"
    if live.states is not None:
        return "done"
    return "running" if live.requests else "waiting"


def _written(node: Text) -> str:
    """The beginning of a text; what it names is put in braces."""
    found, size = [], 0
    for part in node.parts:
        text = part[:MOST_TEXT] if isinstance(part, str) else "{…}" if isinstance(part, (Ref, Arg)) else ""
        found.append(text)
        size += len(text)
        if size > MOST_TEXT:
            break
    return _cut("".join(found), MOST_TEXT)


def _cut(text: str, most: int) -> str:
    """Halves of characters cannot travel."""
    text = text if len(text) <= most else text[: most - 1] + "…"
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
