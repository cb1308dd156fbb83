"""The JSON messages between a client of programs and the engine that runs them, one JSON object each, over any channel that keeps their order.

To the engine::

    {"op": "open", "program": "p1", "version": 1, "name": "qa", "order": 0, "cache_salt": "", "stream": false}
    {"op": "add", "program": "p1", "nodes": [...]}                  nodes as in ``radixrt.engine.nodes``
    {"op": "cancel" | "drop", "program": "p1", "nodes": [3, 4]}
    {"op": "close", "program": "p1"}

From the engine::

    {"event": "delta", "program": "p1", "node": 2, "sample": 0, "text": "...", "content": "...", "reasoning": "..."}
    {"event": "done", "program": "p1", "node": 2, "outputs": [...], "usage": {...}, "choosing": {...} | null}
    {"event": "failed", "program": "p1", "node": 2, "kind": "invalid", "error": "..."}
    {"event": "error", "program": "p1" | null, "error": "..."}      a message could not be carried out

Invariants: a channel's programs are its own; when it is gone, so are they. A message that is malformed is answered, and harms no other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from radixrt.engine.nodes import VERSION, Choosing, Delta, Done, Event, Failed, Output, Usage, from_dict
from radixrt.engine.programs import Programs
from radixrt.errors import InvalidRequest, RadixrtError, shown, unknown_field
from radixrt.request import FinishReason, PositionLogprobs, TokenLogprob
from radixrt.tools.parts import Answer, Call

MAX_MESSAGE = 64 * 2**20  # characters
_HALVES = re.compile("[\ud800-\udfff]")
MAX_OPEN = 65_536  # programs of one channel
MAX_NAME = 200  # characters of what a program is called
_FIELDS = {
    "open": ("op", "program", "version", "name", "order", "cache_salt", "stream"),
    "add": ("op", "program", "nodes"),
    "cancel": ("op", "program", "nodes"),
    "drop": ("op", "program", "nodes"),
    "close": ("op", "program"),
}


class ProgramChannel:
    """One client's channel, on the engine's thread.

    Args:
        send: takes a message for the client.
        peer: unique among the engine's channels.
    """

    def __init__(self, programs: Programs, send: Callable[[str], None], peer: str) -> None:
        self._programs = programs
        self._send = send
        self._peer = peer
        self._open: set[str] = set()
        self._closed = False

    def receive(self, message: str | bytes) -> None:
        """Carry out a message; never raises for what it says."""
        program: Any = None
        try:
            if len(message) > MAX_MESSAGE:
                raise InvalidRequest("message", f"has {len(message):,} characters: at most {MAX_MESSAGE:,} are taken")
            try:
                data = json.loads(message)
            except (ValueError, RecursionError) as error:
                raise InvalidRequest("message", f": is not JSON ({error})") from None
            if not isinstance(data, Mapping):
                raise InvalidRequest("message", "must be an object")
            program = data.get("program")
            self._carry_out(data)
        except RadixrtError as error:
            self._tell(
                {"event": "error", "program": program if isinstance(program, str) else None, "error": str(error)}
            )

    def close(self) -> None:
        """The client is gone: its programs end."""
        self._closed = True
        for program in list(self._open):
            self._programs.close(self._name(program))
        self._open.clear()

    def _carry_out(self, data: Mapping[str, Any]) -> None:
        op = data.get("op")
        if not isinstance(op, str) or op not in _FIELDS:
            raise InvalidRequest("op", f"={shown(op)}: must be one of {', '.join(_FIELDS)}")
        for name in data:
            if name not in _FIELDS[op]:
                raise unknown_field(op, str(name), _FIELDS[op])
        program = data.get("program")
        if not isinstance(program, str) or not 0 < len(program) <= MAX_NAME:
            raise InvalidRequest("program", f"={shown(program)}: must be a string of 1 to {MAX_NAME} characters")
        if op == "open":
            self._begin(program, data)
            return
        if program not in self._open:
            raise InvalidRequest("program", f"={shown(program)}: is not open on this channel")
        if op == "close":
            self._open.discard(program)
            self._programs.close(self._name(program))
            return
        nodes = data.get("nodes")
        if isinstance(nodes, str) or not isinstance(nodes, Sequence):
            raise InvalidRequest("nodes", f"={shown(nodes)}: must be a list")
        if op == "add":
            self._programs.add(self._name(program), [from_dict(node, f"nodes[{i}]") for i, node in enumerate(nodes)])
            return
        for node in nodes:
            if isinstance(node, bool) or not isinstance(node, int):
                raise InvalidRequest("nodes", f" has {shown(node)}: must be ids")
        (self._programs.cancel if op == "cancel" else self._programs.drop)(self._name(program), nodes)

    def _begin(self, program: str, data: Mapping[str, Any]) -> None:
        if data.get("version") != VERSION:
            raise InvalidRequest("version", f"={shown(data.get('version'))}: this runtime speaks version {VERSION}")
        values: dict[str, Any] = {}
        for name, kind in (("name", str), ("order", int), ("cache_salt", str), ("stream", bool)):
            if name in data:
                if not isinstance(data[name], kind) or (kind is int and isinstance(data[name], bool)):
                    raise InvalidRequest(name, f"={shown(data[name])}: must be of type {kind.__name__}")
                values[name] = data[name]

        def emit(event: Event) -> None:
            self._tell({"program": program, **event_to_dict(event)})

        if len(self._open) >= MAX_OPEN:
            raise InvalidRequest("program", f": {MAX_OPEN:,} are open on this channel, which is the most")
        self._programs.open(self._name(program), emit, **values)
        self._open.add(program)

    def _name(self, program: str) -> str:
        return f"{self._peer}:{program}"

    def _tell(self, data: Mapping[str, Any]) -> None:
        if not self._closed:
            self._send(written(data))


def written(data: Mapping[str, Any]) -> str:
    """A message as text that any channel can encode: halves of characters are escaped, everything else stands as it is."""
    text = json.dumps(data, ensure_ascii=False)
    return text if text.isascii() else _HALVES.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


# ---- events as JSON


def event_to_dict(event: Event) -> dict[str, Any]:
    """The JSON form of an event, without its program."""
    if isinstance(event, Delta):
        data = {"event": "delta", "node": event.node, "sample": event.sample, "text": event.text}
        return data | {name: getattr(event, name) for name in ("content", "reasoning") if getattr(event, name)}
    if isinstance(event, Failed):
        return {"event": "failed", "node": event.node, "kind": event.kind, "error": event.error}
    choosing = event.choosing
    return {
        "event": "done",
        "node": event.node,
        "outputs": [_output(output) for output in event.outputs],
        "usage": {name: getattr(event.usage, name) for name in _names(Usage)},
        "choosing": {name: getattr(choosing, name) for name in _names(Choosing)} if choosing is not None else None,
    }


def event_from_dict(data: Mapping[str, Any]) -> Event:
    """The event of a JSON form.

    Raises:
        ValueError, KeyError, TypeError: it is none.
    """
    kind = data["event"]
    if kind == "delta":
        read = (str(data.get("content", "")), str(data.get("reasoning", "")))
        return Delta(int(data["node"]), int(data["sample"]), str(data["text"]), *read)
    if kind == "failed":
        return Failed(int(data["node"]), str(data["kind"]), str(data["error"]))
    if kind != "done":
        raise ValueError(f"event={kind!r}: is not known")
    choosing = data.get("choosing")
    return Done(
        int(data["node"]),
        tuple(_read_output(output) for output in data["outputs"]),
        Usage(**data["usage"]),
        Choosing(**{name: _tuples(value) for name, value in choosing.items()}) if choosing is not None else None,
    )


def _names(cls: Any) -> tuple[str, ...]:
    return tuple(item.name for item in fields(cls))


def _output(output: Output) -> dict[str, Any]:
    data: dict[str, Any] = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": str(output.finish_reason),
        "stop_reason": output.stop_reason,
    }
    if output.logprobs is not None:
        data["logprobs"] = [[_entry(one.chosen), [_entry(t) for t in one.top]] for one in output.logprobs]
    if output.answer is not None:
        data["answer"] = asdict(output.answer)
    return data


def _entry(one: TokenLogprob) -> list[Any]:
    return [one.token_id, one.logprob, one.rank]


def _read_output(data: Mapping[str, Any]) -> Output:
    logprobs = data.get("logprobs")
    return Output(
        text=str(data["text"]),
        token_ids=tuple(data["token_ids"]),
        finish_reason=FinishReason(data["finish_reason"]),
        stop_reason=data.get("stop_reason"),
        logprobs=None
        if logprobs is None
        else tuple(
            PositionLogprobs(TokenLogprob(*chosen), tuple(TokenLogprob(*entry) for entry in top))
            for chosen, top in logprobs
        ),
        answer=read_answer(data.get("answer")),
    )


def read_answer(data: Any) -> Answer | None:
    """The JSON form of an answer; raises as ``event_from_dict`` does."""
    if data is None:
        return None
    calls = tuple(Call(str(one["id"]), str(one["name"]), str(one["arguments"])) for one in data["calls"])
    return Answer(str(data["content"]), str(data["reasoning"]), calls)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
