"""Records of runs: written as JSON lines, read back equal, compared.

Form, version 1: a header ``{"radixrt_record": 1, "name", "seed", "seconds", "nodes": how many}``, then for each node a line ``{"node": its JSON form,
"line", "name", "done" or "failed"}``; what is empty is left out.

Invariants: every line is strict JSON (a number that JSON has not is the string ``"nan"``, ``"inf"`` or ``"-inf"``); ``read(write(graph))`` equals the
graph, to the last bit of its floats; a file is written whole or not at all, and a file that is not whole is not read.
"""

from __future__ import annotations

import difflib
import json
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from lang.graph import ProgramGraph
from lang.layout import Box, fold
from lang.replay import Replay, first_difference
from radixrt.engine.nodes import (
    Choosing,
    Done,
    Failed,
    Gen,
    Output,
    Role,
    Select,
    Text,
    Usage,
    check_order,
    from_dict,
    params_to_dict,
    to_dict,
)
from radixrt.engine.protocol import read_answer
from radixrt.errors import InvalidRequest, shown
from radixrt.request import FinishReason, PositionLogprobs, TokenLogprob
from radixrt.tools.parts import Answer

VERSION = 1
T = TypeVar("T")


def write(graph: ProgramGraph, path: str | Path) -> Path:
    """Write the record of a run; returns its path.

    Raises:
        InvalidRequest: a value in the graph that JSON cannot hold, naming the node.
        OSError: the file cannot be written. What was there before is left as it was.
    """
    target = Path(path)
    head = {
        "radixrt_record": VERSION,
        "name": graph.name,
        "seed": graph.seed,
        "seconds": _number_out(graph.seconds),
        "nodes": len(graph),
    }
    lines = [_line("header", head)]
    for node in graph:
        entry: dict[str, Any] = {"node": to_dict(node)}
        if node.id in graph.lines:
            entry["line"] = graph.lines[node.id]
        if node.id in graph.names:
            entry["name"] = graph.names[node.id]
        if node.id in graph.done:
            entry["done"] = _done_out(graph.done[node.id])
        if node.id in graph.failed:
            entry["failed"] = {"kind": graph.failed[node.id].kind, "error": graph.failed[node.id].error}
        lines.append(_line(f"node {node.id}", entry))
    part = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}")
    try:
        with part.open("xb") as file:
            file.writelines(lines)
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return target


def read(path: str | Path) -> ProgramGraph:
    """The graph of a record, with its results.

    Raises:
        InvalidRequest: not a record, another version, cut off or malformed; names the file and the line.
        OSError: the file cannot be read.
    """
    source = Path(path)
    lines = source.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise InvalidRequest(str(source), ": is empty: must be a record of a run")
    where = f"{source}, line 1"
    head = _object(where, _parsed(where, lines[0]), ("radixrt_record", "name", "seed", "seconds", "nodes"), "header")
    if "radixrt_record" not in head:
        raise InvalidRequest(where, ': is no header of a record: must be {"radixrt_record": 1, ...}')
    if head["radixrt_record"] != VERSION:
        raise InvalidRequest(where, f": has version {shown(head['radixrt_record'])}: version {VERSION} is read here")
    graph = ProgramGraph(
        name=_typed(where, "name", head.get("name", ""), str),
        seed=_typed(where, "seed", head.get("seed", 0), int),
        seconds=None if head.get("seconds") is None else _number(where, "seconds", head["seconds"]),
    )
    count = _typed(where, "nodes", head.get("nodes"), int)
    for at, line in enumerate(lines[1:], 2):
        where = f"{source}, line {at}"
        if at > count + 1:
            raise InvalidRequest(where, f": stands behind the last of {count:,} nodes that the header names")
        try:
            _add(graph, where, _parsed(where, line))
        except InvalidRequest as error:
            raise error if error.field == where else InvalidRequest(where, f": {error}") from None
    if len(graph) < count:
        raise InvalidRequest(
            f"{source}, line {len(lines)}", f": ends the file after {len(graph):,} of {count:,} nodes: it was cut off"
        )
    return graph


def _add(graph: ProgramGraph, where: str, data: Any) -> None:
    entry = _object(where, data, ("node", "line", "name", "done", "failed"), "line of a node")
    node = from_dict(entry.get("node"))
    check_order([node], graph.nodes)
    graph.nodes[node.id] = node
    if "line" in entry:
        graph.lines[node.id] = _typed(where, "line", entry["line"], str)
    if "name" in entry:
        graph.names[node.id] = _typed(where, "name", entry["name"], str)
    if "done" in entry:
        graph.done[node.id] = _done(where, node.id, entry["done"])
    if "failed" in entry:
        failed = _object(where, entry["failed"], ("kind", "error"), "failed")
        told = (_typed(where, f"failed.{name}", failed.get(name), str) for name in ("kind", "error"))
        graph.failed[node.id] = Failed(node.id, *told)


# ---- to JSON


def _line(where: str, value: Any) -> bytes:
    try:
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            return text.encode() + b"\n"
        except UnicodeEncodeError:  # halves of characters: JSON can name them, UTF-8 cannot
            return json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(where, f": cannot be written as JSON: {error}") from None


def _number_out(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(float(value))


def _numbers_out(values: Sequence[float]) -> list[float | str | None]:
    return [_number_out(value) for value in values]


def _done_out(done: Done) -> dict[str, Any]:
    plain = Usage()
    data: dict[str, Any] = {"outputs": [_output_out(output) for output in done.outputs]}
    usage = {item.name: getattr(done.usage, item.name) for item in fields(Usage)}
    if spent := {
        name: _number_out(value) for name, value in usage.items() if repr(value) != repr(getattr(plain, name))
    }:
        data["usage"] = spent
    if done.choosing is not None:
        chosen = done.choosing
        data["choosing"] = {
            "index": chosen.index,
            "scores": _numbers_out(chosen.scores),
            "logprobs": _numbers_out(chosen.logprobs),
            "probabilities": _numbers_out(chosen.probabilities),
            "confidence": _number_out(chosen.confidence),
            "tokens": [list(tokens) for tokens in chosen.tokens],
            "token_logprobs": [_numbers_out(values) for values in chosen.token_logprobs],
        }
    return data


def _output_out(output: Output) -> dict[str, Any]:
    data: dict[str, Any] = {"text": output.text}
    if output.token_ids:
        data["token_ids"] = list(output.token_ids)
    if output.finish_reason is not FinishReason.STOP:
        data["finish_reason"] = str(output.finish_reason)
    if output.stop_reason is not None:
        data["stop_reason"] = output.stop_reason
    if output.logprobs is not None:
        data["logprobs"] = [[_token_out(item) for item in (at.chosen, *at.top)] for at in output.logprobs]
    if output.answer is not None:
        data["answer"] = asdict(output.answer)
    return data


def _token_out(token: TokenLogprob) -> list[Any]:
    return [token.token_id, _number_out(token.logprob), token.rank]


# ---- from JSON


def _parsed(where: str, line: bytes) -> Any:
    def constant(name: str) -> NoReturn:
        raise InvalidRequest(where, f": contains {name}, which is not JSON")

    try:
        return json.loads(line.decode(), parse_constant=constant)
    except UnicodeDecodeError as error:
        raise InvalidRequest(where, f": is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(where, f": is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(where, f": is not JSON that can be read: {error}") from None


def _object(where: str, value: Any, names: Sequence[str], what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(where, f": the {what} is {shown(value, 40)}: must be an object")
    for name in value:
        if name not in names:
            raise InvalidRequest(where, f": the {what} has no field {shown(name, 40)}: it has {', '.join(names)}")
    return value


def _typed(where: str, name: str, value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = {str: "a string", int: "an integer", list: "a list"}[kind]
        raise InvalidRequest(where, f": {name}={shown(value, 40)}: must be {wanted}")
    return value


def _number(where: str, name: str, value: Any) -> float:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(where, f": {name}={shown(value, 40)}: must be a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequest(where, f": {name}={shown(value, 40)}: is too large") from None


def _items(where: str, name: str, value: Any, one: Callable[[str, str, Any], T]) -> tuple[T, ...]:
    return tuple(one(where, name, item) for item in _typed(where, name, value, list))


def _whole(where: str, name: str, value: Any) -> int:
    return _typed(where, name, value, int)


def _done(where: str, node: int, data: Any) -> Done:
    entry = _object(where, data, ("outputs", "usage", "choosing"), "done")
    spent = _object(where, entry.get("usage", {}), [item.name for item in fields(Usage)], "usage")
    plain = Usage()
    values: dict[str, Any] = {}
    for name, value in spent.items():
        values[name] = (_number if isinstance(getattr(plain, name), float) else _whole)(where, name, value)
    choosing = _choosing(where, entry["choosing"]) if "choosing" in entry else None
    return Done(node, _items(where, "outputs", entry.get("outputs"), _output), Usage(**values), choosing)


def _choosing(where: str, data: Any) -> Choosing:
    names = [item.name for item in fields(Choosing)]
    entry = _object(where, data, names, "choosing")
    for name in names:
        if name not in entry:
            raise InvalidRequest(where, f": choosing lacks {name}")
    return Choosing(
        index=_whole(where, "index", entry["index"]),
        scores=_items(where, "scores", entry["scores"], _number),
        logprobs=_items(where, "logprobs", entry["logprobs"], _number),
        probabilities=_items(where, "probabilities", entry["probabilities"], _number),
        confidence=_number(where, "confidence", entry["confidence"]),
        tokens=_items(where, "tokens", entry["tokens"], lambda at, name, row: _items(at, name, row, _whole)),
        token_logprobs=_items(
            where, "token_logprobs", entry["token_logprobs"], lambda at, name, row: _items(at, name, row, _number)
        ),
    )


def _output(where: str, name: str, data: Any) -> Output:
    entry = _object(where, data, [item.name for item in fields(Output)], "output")
    reason = entry.get("finish_reason", "stop")
    if reason not in [str(known) for known in FinishReason]:
        known = ", ".join(FinishReason)
        raise InvalidRequest(where, f": finish_reason={shown(reason, 40)}: must be one of {known}")
    stop = entry.get("stop_reason")
    if isinstance(stop, bool) or not isinstance(stop, (str, int, type(None))):
        raise InvalidRequest(where, f": stop_reason={shown(stop, 40)}: must be a string, an integer or null")
    return Output(
        text=_typed(where, "text", entry.get("text"), str),
        token_ids=_items(where, "token_ids", entry.get("token_ids", []), _whole),
        finish_reason=FinishReason(reason),
        stop_reason=stop,
        logprobs=_items(where, "logprobs", entry["logprobs"], _position) if "logprobs" in entry else None,
        answer=_answer(where, entry.get("answer")),
    )


def _answer(where: str, data: Any) -> Answer | None:
    try:
        return read_answer(data)
    except (TypeError, KeyError, AttributeError):
        raise InvalidRequest(where, f": answer={shown(data, 40)}: must have content, reasoning and calls") from None


def _position(where: str, name: str, data: Any) -> PositionLogprobs:
    tokens = _items(where, name, data, _token)
    if not tokens:
        raise InvalidRequest(where, ": logprobs of a position are []: must begin with the token that stands there")
    return PositionLogprobs(tokens[0], tokens[1:])


def _token(where: str, name: str, data: Any) -> TokenLogprob:
    if len(_typed(where, name, data, list)) != 3:
        raise InvalidRequest(where, f": {name} has {shown(data, 40)}: must be [token id, log-probability, rank]")
    return TokenLogprob(_whole(where, name, data[0]), _number(where, name, data[1]), _whole(where, name, data[2]))


# ---- two runs


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between two runs at a step. ``node``: its id in the new run, in the old one where it was removed."""

    node: int
    line: str
    step: str
    what: str
    old: str
    new: str

    def __str__(self) -> str:
        place = f"{self.line}: " if self.line else ""
        if self.what in ("added", "removed"):
            return f"{place}{self.step} was {self.what}"
        old, new = self.old, self.new
        if self.what.startswith(("text", "output", "error", "name")) or max(len(old), len(new)) > 40:
            old, new = first_difference(old, new)
        return f"{place}{self.what} of {self.step}: was {old or 'not set'}, is {new or 'not set'}"


def compare(old: ProgramGraph, new: ProgramGraph) -> list[Difference]:
    """What differs between two runs of a program: texts, parameters, choices, outputs, failures, and steps that are new or gone.

    Steps are paired in the order of the program, branch by branch, by kind and name. Times, and seeds that follow from the run's, are no difference.
    """
    before, after = _steps(old), _steps(new)
    signs = [[(step.kind, step.name) for step in steps] for steps in (before, after)]
    found: list[Difference] = []
    blocks: Sequence[tuple[str, int, int, int, int]] = [("equal", 0, len(before), 0, len(after))]
    if signs[0] != signs[1]:
        blocks = difflib.SequenceMatcher(None, signs[0], signs[1], autojunk=False).get_opcodes()
    for _, low, high, start, stop in blocks:
        paired = min(high - low, stop - start)
        while paired and any(before[low + i].kind != after[start + i].kind for i in range(paired)):
            paired -= 1
        for i in range(paired):
            found += _differences(before[low + i], after[start + i])
        found += [
            Difference(step.node, step.line, step.label, "removed", step.label, "")
            for step in before[low + paired : high]
        ]
        found += [
            Difference(step.node, step.line, step.label, "added", "", step.label)
            for step in after[start + paired : stop]
        ]
    return found


@dataclass(frozen=True, slots=True)
class _Step:
    node: int
    line: str
    kind: str
    name: str
    values: dict[str, str]

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name!r} (node {self.node})" if self.name else f"{self.kind} (node {self.node})"


def _steps(graph: ProgramGraph) -> list[_Step]:
    boxes = fold(graph)
    found: list[_Step] = []
    stack = [at for at, box in enumerate(boxes) if box.parent is None][::-1]
    while stack:
        box = boxes[stack.pop()]
        stack += box.children[::-1]
        node = graph.nodes[box.main]
        kind, name = (
            (node.kind, graph.names.get(node.id) or node.name) if isinstance(node, (Gen, Select)) else ("text", "")
        )
        found.append(_Step(node.id, graph.lines.get(node.id, ""), kind, name, dict(_values(graph, box))))
    return found


def _values(graph: ProgramGraph, box: Box) -> Iterator[tuple[str, str]]:
    """What can differ at a step, by what it is called."""
    said: list[str] = []
    node = graph.nodes[box.main]
    for id in box.nodes:
        item = graph.nodes[id]
        if isinstance(item, Role):
            said.append(f"<{item.role}>" if item.begin else f"</{item.role}>")
        elif isinstance(item, Text):
            said.append(graph.text_of(id))
    yield "text", "".join(said)
    if graph.nodes[box.nodes[0]].sample:
        yield "sample", str(graph.nodes[box.nodes[0]].sample)
    if isinstance(node, Gen):
        yield from ((name, repr(value)) for name, value in params_to_dict(node.params).items() if name != "seed")
    if isinstance(node, Select):
        yield "choices", json.dumps([graph.written(choice) for choice in node.choices], ensure_ascii=False)
        yield "method", node.method
        yield "temperature", repr(node.temperature)
    if node.id in graph.failed:
        yield "error", graph.failed[node.id].error
    for i, output in enumerate(
        graph.done[node.id].outputs if isinstance(node, (Gen, Select)) and node.id in graph.done else ()
    ):
        which = f"[{i}]" if i else ""
        yield f"output{which}", output.text
        yield f"finish_reason{which}", str(output.finish_reason)
        yield f"tokens{which}", " ".join(map(str, output.token_ids))


def _differences(old: _Step, new: _Step) -> Iterator[Difference]:
    if old.name != new.name:
        yield Difference(new.node, new.line, new.label, "name", old.name, new.name)
    for what in dict.fromkeys([*old.values, *new.values]):
        one, other = old.values.get(what, ""), new.values.get(what, "")
        text = what.replace("tokens", "output")
        if one != other and not (what.startswith("tokens") and old.values.get(text) != new.values.get(text)):
            yield Difference(new.node, new.line, new.label, what, one, other)


__all__ = ["Difference", "Replay", "compare", "read", "write"]
