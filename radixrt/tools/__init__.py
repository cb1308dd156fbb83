"""Tools and thinking in what a model writes: definitions, the formats of calls, constraints, the parser of answers, and messages.

Nothing here knows a server or a program: both use it.
"""

from radixrt.tools.choose import choose_reasoning_format, choose_tool_format
from radixrt.tools.definitions import Tool, ToolChoice, call_id, read_choice, read_tool, read_tools
from radixrt.tools.formats import ToolFormat
from radixrt.tools.messages import template_chat
from radixrt.tools.parser import ChatParser
from radixrt.tools.parts import (
    Answer,
    Call,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Reasoning,
    answer_of,
    joined,
)
from radixrt.tools.reasoning import ReasoningFormat

__all__ = [
    "Answer",
    "Call",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "ChatParser",
    "Content",
    "Part",
    "Reasoning",
    "ReasoningFormat",
    "Tool",
    "ToolChoice",
    "ToolFormat",
    "answer_of",
    "call_id",
    "choose_reasoning_format",
    "choose_tool_format",
    "joined",
    "read_choice",
    "read_tool",
    "read_tools",
    "template_chat",
]
