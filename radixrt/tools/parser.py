"""Splits what a model writes into reasoning, content and calls, as it comes.

Invariants: the parts joined are the same however the text is cut; every character is looked at a bounded number of times; at most a
marker's length of text is held back, besides white space that may turn out to surround a call, and a call until it is whole. What begins
like a call and is none comes back as content, letter for letter. A call's arguments are always the text of a JSON object.

    start -> (thinking) -> text -> before -> call -> after -> text ...
                             ^________|_______|    (no call after all: the raw text is content)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from radixrt.tools.definitions import NAME, Tool, call_id
from radixrt.tools.formats import ToolFormat
from radixrt.tools.literals import read_arguments
from radixrt.tools.objects import is_object, members
from radixrt.tools.parts import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning
from radixrt.tools.reasoning import ReasoningFormat
from radixrt.tools.scan import Brackets

_SPACE = re.compile(r"\s*+")
_TRAILING = re.compile(r"\s++\Z")
MOST_FAILED = 64  # texts in one answer that begin like a call and are none; what comes after so many is text
MOST_TEXTS = 8_192  # strings and names in the Python calls of one answer; a call with more is text
MOST_BEGUN = 256  # markers of calls in one answer that are looked at; what comes after so many is text
_HEADER = 300  # characters between a marker and the bracket of the arguments
_NAMED = re.compile(rf"\s*({NAME.pattern})(?:\[CALL_ID\](\w{{1,64}}))?(?:\[ARGS\])?\s*")
_GIVEN = re.compile('"(?:arguments|parameters)"')
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


class _Markers:
    """Finds the first of some texts, and how much of the end of a text may be the beginning of one."""

    def __init__(self, texts: Iterable[str]) -> None:
        texts = sorted(set(texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._prefixes = {text[:i] for text in texts for i in range(1, len(text))}
        self._firsts = {text[0] for text in texts}
        self._longest = max(map(len, texts), default=1) - 1

    def find(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at) if self._pattern else None

    def held(self, text: str, at: int) -> int:
        """Where the part begins that must wait for what follows."""
        for i in range(max(at, len(text) - self._longest), len(text)):
            if text[i] in self._firsts and text[i:] in self._prefixes:
                return i
        return len(text)


class ChatParser:
    """The parts of one answer.

    Args:
        format: how calls are written; ``None``: no calls are looked for. reasoning: how thinking is marked; ``None``: not at all.
        tools: those that may be called; a call of another one is content. Empty: any name is taken.
        request_id: what the ids of calls are made from; differs between the choices of one request.
    """

    def __init__(
        self,
        format: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        tools: Sequence[Tool] = (),
        *,
        request_id: str = "",
    ) -> None:
        self._format, self._reasoning, self._request_id = format, reasoning, request_id
        self._tools = frozenset(tool.name for tool in tools)
        self._calls = _Markers(format.begins(tools) if format else ())
        self._think_end = _Markers([reasoning.end] if reasoning else [])
        self._held = ""  # not read yet: it may be the beginning of a marker
        self._space: list[str] = []  # white space read and not given: what follows says whether it counts
        self._raw: list[str] = []  # of the call that is being read: what is content if it is none
        self._unit: list[str] = []  # of it: the call itself
        self._brackets = Brackets()
        self._listed = False  # inside a list of calls
        self._name: tuple[str, str | None] | None = None  # and id, where they come before the arguments
        self._count = 0
        self._begun = self._failed = self._texts = 0
        self._wrote = False  # content that is no white space
        self._drop_space = False  # white space next in the text says nothing
        self._parts: list[Part] = []
        self._state = self._text
        if reasoning:
            self._state = self._start
        self._started = False

    # -- what people call

    def push(self, text: str) -> list[Part]:
        """The parts that ``text``, which follows all that was pushed before, makes certain."""
        data, at = self._held + text, 0
        self._held = ""
        while at < len(data):
            state, before = self._state, at
            at = state(data, at)
            if at == before and self._state == state:
                break  # it waits for more
        self._held = data[at:]
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """The last parts: there is no more text. A call that lacks only its end is one; otherwise its text is content."""
        held, self._held = self._held, ""
        if self._state == self._start:
            self._begin_text()
        if self._state == self._think:
            if held:
                self._give(Reasoning, held)
        elif self._state in (self._before, self._call):
            if self._state == self._call:
                self._unit.append(held)
                if not self._made(partial=True):
                    self._raw += self._unit
                    self._fail()
            else:
                self._raw.append(held)
                if self._count == 0 or "".join(self._raw).strip(" \n,"):
                    self._fail()
        elif self._state == self._text and held:
            self._write(held)
        if self._state == self._text and not self._drop_space:
            self._write("")
        parts, self._parts = self._parts, []
        return parts

    # -- states: each reads from ``at`` and gives how far it got

    def _start(self, data: str, at: int) -> int:
        """Before thinking; a text that does not begin with it has none."""
        assert self._reasoning is not None
        begin = _SPACE.match(data, at).end()  # type: ignore[union-attr]
        if begin > at:
            self._space.append(data[at:begin])
            return begin
        start = self._reasoning.start
        if data.startswith(start, at):
            self._space.clear()
            self._state, self._drop_space = self._think, True
            return at + len(start)
        if start.startswith(data[at:]):
            return at
        self._begin_text()
        return at

    def _begin_text(self) -> None:
        """No start tag: the prompt has opened the thinking, or there is none."""
        if self._reasoning is not None and self._reasoning.starts_open:
            self._space.clear()
            self._state, self._drop_space = self._think, True
        else:
            self._state = self._text

    def _think(self, data: str, at: int) -> int:
        found = self._think_end.find(data, at)
        end = found.start() if found else self._think_end.held(data, at)
        self._give(Reasoning, data[at:end])
        if not found:
            return end
        self._space.clear()
        self._state, self._drop_space = self._text, True
        return found.end()

    def _text(self, data: str, at: int) -> int:
        """Content, up to what begins a call."""
        found = self._calls.find(data, at)
        end = found.start() if found else self._calls.held(data, at)
        if end > at:
            self._write(data[at:end])
        if not found:
            return end
        assert self._format is not None
        self._raw = [*self._space]
        self._space.clear()
        self._listed, self._name = False, None
        self._begun += 1
        if self._begun == MOST_BEGUN:
            self._calls = _Markers(())
        if self._format.kind == "python":  # the marker is "[name("
            self._listed = True
            self._raw.append("[")
            return self._open_call(found.start() + 1, found[0][1:-1], found.end() - 1, data)
        if found[0][0] == "{":  # the marker is part of the call
            return self._open_call(found.start(), None, found.start(), data)
        self._raw.append(found[0])
        self._state = self._before
        return found.end()

    def _before(self, data: str, at: int) -> int:
        """After a marker or a comma: white space, perhaps a bracket that begins a list, and what names the call."""
        assert self._format is not None
        begin = _SPACE.match(data, at).end()  # type: ignore[union-attr]
        if begin > at:
            self._raw.append(data[at:begin])
            return begin
        if self._format.kind == "object" or data[at] == "{":
            if data[at] == "[" and self._format.open and not self._listed:
                self._listed = True
                self._raw.append("[")
                return at + 1
            if data[at] == "{" and self._format.kind != "python":
                return self._open_call(at, None, at, data)
        if self._format.kind == "object" and not self._format.open:
            return self._fail(at)
        if self._listed and self._format.kind != "python":
            return self._fail(at)
        return self._header(data, at)

    def _header(self, data: str, at: int) -> int:
        """The name of a call, which stands before its arguments."""
        assert self._format is not None
        bracket = "(" if self._format.kind == "python" else "{"
        end = data.find(bracket, at, at + _HEADER)
        if end < 0:
            return at if len(data) - at < _HEADER else self._fail(at)
        found = _NAMED.fullmatch(data, at, end)
        if not found:
            return self._fail(at)
        if bracket == "{":
            self._raw.append(data[at:end])
            return self._open_call(end, found[1], end, data, found[2])
        return self._open_call(at, found[1], end, data)

    def _open_call(self, at: int, name: str | None, bracket: int, data: str, id: str | None = None) -> int:
        """A call begins at ``at``; the bracket that its end closes is at ``bracket``."""
        assert self._format is not None
        self._state = self._call
        self._name = None if name is None else (name, id)
        self._brackets = Brackets(self._format.kind == "python")
        self._unit = [data[at : bracket + 1]]
        self._brackets.feed(data[bracket], 0)
        return bracket + 1

    def _call(self, data: str, at: int) -> int:
        end = self._brackets.feed(data, at)
        self._unit.append(data[at:end])
        if self._brackets.state == "open":
            return end
        if self._brackets.state == "wrong" or not self._made():
            self._raw += self._unit
            return self._fail(end)
        return end

    def _after(self, data: str, at: int) -> int:
        """After a call: its end tag, a comma and another one, or the end of the list."""
        assert self._format is not None
        begin = _SPACE.match(data, at).end()  # type: ignore[union-attr]
        if begin > at:
            self._raw.append(data[at:begin])
            return begin
        if self._listed:
            if data[at] == "," and self._count < MOST_BEGUN:
                self._raw.append(",")
                self._state = self._before
                return at + 1
            if data[at] == "]":
                self._raw.clear()
                return self._to_text(at + 1)
        elif self._format.end:
            if data.startswith(self._format.end, at):
                self._raw.clear()
                return self._to_text(at + len(self._format.end))
            if self._format.end.startswith(data[at:]):
                return at
        elif self._format.separator and data[at] == self._format.separator[0]:
            self._raw.append(data[at])
            return self._to_text(at + 1)
        return self._to_text(at)

    # -- what the states share

    def _to_text(self, at: int) -> int:
        """Text follows a call; what stands between them is given only if text does follow."""
        self._state, self._drop_space = self._text, True
        self._space, self._raw = self._raw, []
        return at

    def _fail(self, at: int = 0) -> int:
        """No call after all: its text is content, and what follows is looked at as such."""
        self._state, self._drop_space = self._text, False
        raw, self._raw, self._unit = "".join(self._raw), [], []
        self._write(raw)
        self._failed += 1
        if self._failed == MOST_FAILED:
            self._calls = _Markers(())
        return at

    def _give(self, kind: type[Reasoning | Content], text: str) -> None:
        """Text without the white space around it; inside, white space comes with what follows it."""
        if not text:
            return
        if self._drop_space:
            text = text[_SPACE.match(text).end() :]  # type: ignore[union-attr]
            if not text:
                return
            self._drop_space = False
        tail = _TRAILING.search(text, max(0, len(text.rstrip())))
        body = text[: tail.start()] if tail else text
        if body:
            self._parts.append(kind("".join(self._space) + body))
            self._space.clear()
        if tail:
            self._space.append(tail[0])

    def _write(self, text: str) -> None:
        """Content. White space at its end waits where a call may follow; that after a call counts only between texts."""
        if self._format is None and not self._drop_space:
            if text or self._space:
                self._parts.append(Content("".join(self._space) + text))
                self._space.clear()
            return
        if text and self._drop_space:
            body = text.lstrip()
            if not body:
                self._space.append(text)
                return
            between = "".join(self._space) + text[: len(text) - len(body)]
            self._space.clear()
            if (self._wrote and self._count) or between.strip():
                self._space.append(between)
            text, self._drop_space = body, False
        body = text.rstrip()
        if body or (not text and self._space):
            self._wrote = self._wrote or bool(body)
            self._parts.append(Content("".join(self._space) + body))
            self._space.clear()
        if len(text) > len(body):
            self._space.append(text[len(body) :])

    def _made(self, partial: bool = False) -> bool:
        """Whether what was read is a call, which is then given. ``partial``: its last brackets may be missing."""
        assert self._format is not None
        text = "".join(self._unit)
        read = self._read(text, partial)
        if read is None:
            return False
        name, arguments, id = read
        if not (name in self._tools if self._tools else NAME.fullmatch(name)):
            return False
        index = self._count
        if id is None or self._format.id_style != "short" or not _SHORT_ID.fullmatch(id):
            id = call_id(self._request_id, index, self._format.id_style)
        self._parts += [CallBegin(index, id, name), CallArguments(index, arguments), CallEnd(index)]
        self._count += 1
        self._raw, self._unit = [], []
        self._state = self._after if self._format.kind != "named" or self._name is None else self._text
        if self._state == self._text:
            self._to_text(0)
        return True

    def _read(self, text: str, partial: bool) -> tuple[str, str, str | None] | None:
        """Name, arguments and id of a call."""
        if self._name is None:
            return _read_object(text, partial) if self._brackets.depth <= 1 else None
        if partial:
            return None
        name, id = self._name
        if self._format is not None and self._format.kind == "python":
            made, texts = read_arguments(text[text.index("(") + 1 : -1], MOST_TEXTS - self._texts)
            self._texts += texts
            return None if made is None else (name, made, id)
        return (name, text, id) if is_object(text) else None


def _read_object(text: str, partial: bool) -> tuple[str, str, str | None] | None:
    """A call that is one object; its arguments letter for letter, or unpacked from a string. ``partial``: all but its end is there."""
    if partial:
        for whole in (text + "}", text[: text.rfind("}") + 1] + "}"):
            found = _read_object(whole, False) if members(whole) is not None else None
            if found is not None and _GIVEN.search(whole):
                return found
        return None
    value = members(text)
    if value is None:
        return None
    name = _text(value.get("name", value.get("function")))
    made = _arguments(value.get("arguments", value.get("parameters", "null")))
    return None if made is None or name is None else (name, made, _text(value.get("id")))


def _text(value: str | None) -> str | None:
    """The string whose JSON text this is; ``None``: it is none."""
    return json.loads(value) if value is not None and value[0] == '"' else None


def _arguments(value: str) -> str | None:
    """The text of an object, from the JSON text of a value: as written, or unpacked from a string."""
    if value == "null":
        return "{}"
    text = _text(value)
    if text is None:
        return value if is_object(value) else None
    text = text.strip()
    return (text if is_object(text) else None) if text else "{}"
