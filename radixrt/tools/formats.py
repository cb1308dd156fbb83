"""How models write calls, one ``ToolFormat`` for each way, and the constraint that holds what they write to the tools' schemas.

Invariants: what a format's constraint allows, ``ChatParser`` reads back as the same calls; the name of a tool is spelled by the grammar,
its arguments are valid under its schema. White space around them is what ``json.dumps`` writes, as chat templates repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from radixrt.grammar.constraint import Constraint, Tag
from radixrt.tools.definitions import Tool, ToolChoice
from radixrt.tools.literals import python_arguments

MOST_CALLS = 8  # of one answer that has to call


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls: ``open``, a call, and after ``separator`` another, ..., ``close``.

    Fields:
        name: what it is called. kind: how the parser reads a call: a JSON object, the name before its arguments, or Python.
        markers: texts that begin calls (of Python: made of the tools' names). open, separator, close: around calls.
        head, middle, tail: a call is ``head NAME middle ARGUMENTS tail``. ids: an ``id`` may stand after the arguments.
        end: text that closes one call, where the parser can do without. id_style: see ``call_id``.
        alternatives: heads that mean the same. described: the tools stand in the system message, in our words.
    """

    name: str
    kind: Literal["object", "named", "python"]
    markers: tuple[str, ...]
    head: str
    middle: str
    tail: str
    open: str = ""
    separator: str = ""
    close: str = ""
    end: str = ""
    ids: bool = False
    id_style: str = "call"
    alternatives: tuple[str, ...] = ()
    described: bool = False

    def begins(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """The texts that begin calls of these tools."""
        return self.markers or tuple(f"{self.open}{tool.name}{self.middle}" for tool in tools)

    def constraint(self, tools: Sequence[Tool], choice: ToolChoice, parallel: bool = True) -> Constraint | None:
        """What the answer must be; ``None``: anything.

        ``auto``: free text until the model begins a call, which is then held to the tools; ``required``: from the first token on
        a call, and up to ``MOST_CALLS`` where ``parallel``; ``named``: one call of that tool.
        """
        usable = choice.of(tools)
        if not usable:
            return None
        if choice.forced:
            many = parallel and choice.kind == "required"
            return Constraint.sequence(*_texts(self.open), *self._calls(usable, many), *_texts(self.close))
        return self._free(usable, parallel)

    def _free(self, tools: Sequence[Tool], parallel: bool) -> Constraint:
        """Free text with calls in it."""
        if self.kind == "python":  # ", name(" begins one more call
            begins = (self.open, self.separator) if parallel else (self.open,)
            tags = [
                Tag(
                    begin + tool.name + self.middle,
                    python_arguments(tool),
                    self.tail if parallel else self.tail + self.close,
                )
                for tool in tools
                for begin in begins
            ]
            return Constraint.structural_tags(tags, stop_after_first=not parallel)
        if self.open:  # a list of calls, with which the answer ends
            (marker,) = self.markers
            begin = Constraint.choice([self.open[len(marker) :], " " + self.open[len(marker) :]])
            tags = [Tag(marker, Constraint.sequence(begin, *self._calls(tools, parallel)), self.close)]
            return Constraint.structural_tags(tags, triggers=self.markers, stop_after_first=True)
        tags = [
            Tag(head + tool.name + self.middle, arguments(tool), self.tail)
            for tool in tools
            for head in (self.head, *self.alternatives)
        ]
        return Constraint.structural_tags(tags, triggers=self.markers, stop_after_first=not parallel)

    def _calls(self, tools: Sequence[Tool], many: bool) -> list[Constraint]:
        first = Constraint.alternatives(*(self._call(tool) for tool in tools))
        return [first, *(self._more(tools) if many else [])]

    def _more(self, tools: Sequence[Tool]) -> list[Constraint]:
        """Calls that may follow. (Equal parts share their rules, so that their number costs nothing.)"""
        calls = Constraint.alternatives(*(self._call(tool) for tool in tools))
        another = Constraint.sequence(*_texts(self.separator), calls)
        return [Constraint.alternatives("", another)] * (MOST_CALLS - 1)

    def _call(self, tool: Tool) -> Constraint:
        held = python_arguments(tool) if self.kind == "python" else arguments(tool)
        tail: list[Constraint | str] = [self.tail]
        if self.ids:
            tail = [Constraint.alternatives(self.tail, Constraint.regex(', "id": "[a-zA-Z0-9]{9}"' + "\\" + self.tail))]
        return Constraint.sequence(self.head + tool.name + self.middle, held, *(part for part in tail if part != ""))


def arguments(tool: Tool) -> Constraint:
    """The JSON text of a tool's arguments."""
    return Constraint.json_schema(tool.schema, whitespace="flexible")


def _texts(text: str) -> tuple[str, ...]:
    return (text,) if text else ()


_HEAD = '<tool_call>\n{"name": "'
_MIDDLE = '", "arguments": '
_END = "</tool_call>"
HERMES = ToolFormat(
    "hermes", "object", ("<tool_call>",), _HEAD, _MIDDLE, "}\n" + _END, separator="\n", end=_END
)  # fmt: skip
JSON = ToolFormat(
    "json", "object", ("<tool_call>",), _HEAD, _MIDDLE, "}\n" + _END, separator="\n", end=_END, described=True
)
LLAMA = ToolFormat(
    "llama3_json",
    "object",
    ('{"name":', "<|python_tag|>"),
    '{"name": "',
    '", "parameters": ',
    "}",
    separator="; ",
    alternatives=('<|python_tag|>{"name": "',),
)
MISTRAL = ToolFormat(
    "mistral",
    "object",
    ("[TOOL_CALLS]",),
    '{"name": "',
    _MIDDLE,
    "}",
    open="[TOOL_CALLS][",
    separator=", ",
    close="]",
    ids=True,
    id_style="short",
)
MISTRAL_ARGS = ToolFormat("mistral_args", "named", ("[TOOL_CALLS]",), "[TOOL_CALLS]", "[ARGS]", "", id_style="short")
PYTHONIC = ToolFormat("pythonic", "python", (), "", "(", ")", open="[", separator=", ", close="]")

TOOL_FORMATS: dict[str, ToolFormat] = {
    item.name: item for item in (HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, PYTHONIC, JSON)
}
