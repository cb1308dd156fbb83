"""A response in the making: steps of a turn become output items, and the events that tell of them.

    created, in_progress | item added, part added, deltas, text done, part done, item done | ... | completed, incomplete or failed

Invariants: events are numbered without a gap; the deltas of an item, joined, are its text, and the items that the events tell of are those of
the whole response, which has at least one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from radixrt.model.tokenizer import Tokenizer
from radixrt.request import PositionLogprobs
from radixrt.server.chat import CallArguments, CallBegin, CallEnd, Content, Finish, Part, Reasoning, Step, Usage
from radixrt.server.errors import Failure
from radixrt.server.openai_responses import chat_logprobs

Event = dict[str, Any]
_CODES = {400: "invalid_prompt", 413: "invalid_prompt", 429: "rate_limit_exceeded"}


def encoded(events: list[Event]) -> bytes:
    """Server-sent events."""
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n" for event in events
    )


@dataclass(slots=True)
class _Open:
    """An item that is being written. ``kind``: ``"message"``, ``"reasoning"`` or ``"function_call"``."""

    kind: str
    at: int
    id: str
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def item(self, status: str, text: str | None = None) -> dict[str, Any]:
        """As the events have it; ``text``: nothing where it only begins."""
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**item, "call_id": self.call_id, "name": self.name, "arguments": text or ""}
        content = [] if text is None else [self.part(text)]
        if self.kind == "reasoning":
            return {**item, "summary": [], "content": content}
        return {**item, "role": "assistant", "content": content}

    def part(self, text: str) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}

    @property
    def place(self) -> dict[str, Any]:
        where = {"item_id": self.id, "output_index": self.at}
        return where if self.kind == "function_call" else {**where, "content_index": 0}


class Writing:
    """One response.

    Args:
        key: what its id and those of its items are made from. head: what it says of what was asked. logprobs: its texts have them.
    """

    def __init__(
        self, key: str, created: int, head: Mapping[str, Any], tokenizer: Tokenizer, *, logprobs: bool = False
    ) -> None:
        self.id = f"resp_{key}"
        self.begun = False
        self._key, self._created, self._head, self._tokenizer, self._logprobs = key, created, head, tokenizer, logprobs
        self._output: list[dict[str, Any]] = []
        self._open: _Open | None = None
        self._positions: list[PositionLogprobs] = []
        self._finish: Finish | None = None
        self._number = 0

    # ---- the whole

    def body(self, status: str = "in_progress", error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The response as it stands."""
        usage = self._finish.usage if self._finish is not None else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **self._head,
            "output": list(self._output),
            "usage": None if usage is None else told_usage(usage),
        }

    @property
    def status(self) -> str:
        """What became of it, when its last step is written."""
        return "incomplete" if self._finish is not None and self._finish.reason == "length" else "completed"

    # ---- events

    def opening(self) -> list[Event]:
        self.begun = True
        return [self._event(f"response.{name}", response=self.body()) for name in ("created", "in_progress")]

    def push(self, step: Step) -> list[Event]:
        """The events of a step."""
        events: list[Event] = []
        self._positions += step.logprobs
        for part in step.parts:
            events += self._part(part)
        if step.finish is not None:
            self._finish = step.finish
            events += self._end()
        return events

    def closing(self) -> list[Event]:
        """The last event, when all steps are written."""
        status = self.status
        return [self._event(f"response.{status}", response=self.body(status))]

    def failed(self, failure: Failure) -> list[Event]:
        """The last event of one that failed, with those that must come before it."""
        error = {"code": _CODES.get(failure.status, "server_error"), "message": failure.message}
        return [
            *([] if self.begun else self.opening()),
            self._event("response.failed", response=self.body("failed", error)),
        ]

    def _event(self, kind: str, **more: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return event

    # ---- items

    def _part(self, part: Part) -> list[Event]:
        match part:
            case Content(text) | Reasoning(text):
                return self._text(part, text)
            case CallBegin(_, id, name):
                events = self._close()
                return events + self._begin("function_call", "fc", id, name)
            case CallArguments(_, text):
                return self._delta(text)
            case CallEnd():
                return self._close()
        return []

    def _text(self, part: Part, text: str) -> list[Event]:
        if not text:
            return []
        kind = "message" if isinstance(part, Content) else "reasoning"
        events: list[Event] = []
        if self._open is None or self._open.kind != kind:
            events = self._close()
            events += self._begin(kind, "msg" if kind == "message" else "rs")
        return events + self._delta(text)

    def _begin(self, kind: str, prefix: str, call_id: str = "", name: str = "") -> list[Event]:
        at = len(self._output)
        found = self._open = _Open(kind, at, f"{prefix}_{self._key}{at}", call_id, name)
        events = [self._event("response.output_item.added", output_index=at, item=found.item("in_progress"))]
        if kind != "function_call":
            events.append(self._event("response.content_part.added", **found.place, part=found.part("")))
        return events

    def _delta(self, text: str) -> list[Event]:
        found, positions = self._open, self._positions
        self._positions = []
        if found is None or not text:
            return []
        found.pieces.append(text)
        if found.kind != "message":
            name = "function_call_arguments" if found.kind == "function_call" else "reasoning_text"
            return [self._event(f"response.{name}.delta", **found.place, delta=text)]
        logprobs = chat_logprobs(positions, self._tokenizer) if self._logprobs else []
        found.logprobs += logprobs
        return [self._event("response.output_text.delta", **found.place, delta=text, logprobs=logprobs)]

    def _close(self, status: str = "completed") -> list[Event]:
        found, self._open = self._open, None
        if found is None:
            return []
        text = "".join(found.pieces)
        if found.kind == "function_call":
            done = self._event("response.function_call_arguments.done", **found.place, name=found.name, arguments=text)
            events = [done]
        else:
            if found.kind == "message":
                more = {"text": text, "logprobs": list(found.logprobs)}
                events = [self._event("response.output_text.done", **found.place, **more)]
            else:
                events = [self._event("response.reasoning_text.done", **found.place, text=text)]
            events.append(self._event("response.content_part.done", **found.place, part=found.part(text)))
        item = found.item(status, text)
        self._output.append(item)
        return [*events, self._event("response.output_item.done", output_index=found.at, item=item)]

    def _end(self) -> list[Event]:
        """Close what is open; an answer of nothing is an empty message."""
        events = [] if self._open is not None or self._output else self._begin("message", "msg")
        return events + self._close("incomplete" if self.status == "incomplete" else "completed")


def told_usage(usage: Usage) -> dict[str, Any]:
    """Tokens as responses tell them; all of a prompt that was computed is in the cache now."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
