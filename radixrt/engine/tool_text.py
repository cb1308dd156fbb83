"""Tools in the text of a program: how a chat template writes them and their results, and how what a model writes is read.

Invariants: what a message appends does not depend on what was generated, only on the roles before it, the tools and the calls' names and
results; a template that cannot be continued so is refused, never guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from radixrt.engine.nodes import Read, ToolResult
from radixrt.errors import InvalidRequest
from radixrt.grammar.constraint import Constraint
from radixrt.model.tokenizer import Tokenizer
from radixrt.request import SamplingParams
from radixrt.tools import (
    Answer,
    ChatParser,
    Content,
    Reasoning,
    ReasoningFormat,
    Tool,
    ToolChoice,
    ToolFormat,
    answer_of,
    call_id,
    choose_reasoning_format,
    choose_tool_format,
    read_choice,
    read_tools,
    template_chat,
)
from radixrt.tools.reasoning import REASONING_FORMATS

_TAIL = 64  # tokens of the prompt that may hold the tag which opens the thinking


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of a chat, and how its model writes calls (``None``: it cannot)."""

    tools: tuple[Tool, ...]
    format: ToolFormat | None


@dataclass(frozen=True, slots=True)
class Called:
    """In a chat's roles: the results of calls of these tools, which the assistant's message before it has made."""

    names: tuple[str, ...]


def tool_set(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> ToolSet | None:
    """The tools of a ``Role`` node; raises InvalidRequest for what they are not."""
    if not tools:
        return None
    taken = read_tools("tools", [{"type": "function", "function": tool} for tool in tools])
    return ToolSet(taken, choose_tool_format(tokenizer.chat_template, _specials(tokenizer)))


def rendered(
    tokenizer: Tokenizer, tools: ToolSet | None, messages: Sequence[Mapping[str, Any]], generation_prompt: bool
) -> str:
    """The text of a chat."""
    if tools is None:
        return tokenizer.render_chat(messages, add_generation_prompt=generation_prompt)
    made, more = template_chat("messages", messages, tools.tools, tools.format, tokenizer.chat_template)
    return tokenizer.render_chat(made, add_generation_prompt=generation_prompt, **more)


def chat_of(roles: Sequence[str | Called], marks: Sequence[str]) -> list[dict[str, Any]]:
    """Messages of these roles with marks for contents; calls and their results stand in for those that were."""
    messages: list[dict[str, Any]] = []
    for role, mark in zip(roles, marks, strict=True):
        if isinstance(role, Called):
            calls = [(call_id("", len(messages) + i), name, "{}") for i, name in enumerate(role.names)]
            messages[-1]["tool_calls"] = [_call(*call) for call in calls]
            messages += [{"role": "tool", "tool_call_id": id, "content": mark} for id, _, _ in calls]
        else:
            messages.append({"role": role, "content": mark})
    return messages


def results_text(
    tokenizer: Tokenizer, tools: ToolSet, chat: Sequence[Mapping[str, Any]], results: Sequence[ToolResult]
) -> str:
    """What follows the assistant's last message in ``chat``, which called: the results, and the beginning of its next message.

    Raises:
        InvalidRequest: the template writes the messages before differently once results follow.
    """
    last = {**chat[-1], "tool_calls": [_call(one.id, one.name, one.arguments) for one in results]}
    before = rendered(tokenizer, tools, [*chat[:-1], last], False)
    told = [{"role": "tool", "tool_call_id": one.id, "content": one.content} for one in results]
    after = rendered(tokenizer, tools, [*chat[:-1], last, *told], True)
    if not after.startswith(before):
        raise InvalidRequest(
            "results",
            "with them the chat template writes the messages before differently, so these cannot be continued",
        )
    return after[len(before) :]


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _specials(tokenizer: Tokenizer) -> list[str]:
    ends = (item.end for item in REASONING_FORMATS.values())
    return [end for end in ends if tokenizer.token_id(end) in tokenizer.special_ids]


class Reader:
    """Reads the samples of one generation.

    Args:
        tools: of the chat. prompt: the tokens that it continues. seed: what the calls' ids are made from.

    Raises:
        InvalidRequest: a call is asked for where there are no tools, or of one that is not there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        read: Read,
        tools: ToolSet | None,
        params: SamplingParams,
        prompt: Sequence[int],
        seed: str,
    ) -> None:
        known = tools.tools if tools is not None else ()
        choice = read_choice(
            {"type": "function", "name": read.tool} if read.choice == "named" else read.choice, known, "tool_choice"
        )
        self._tools, self._seed = choice.of(known), seed
        self._format = tools.format if tools is not None and self._tools else None
        found = choose_reasoning_format(tokenizer.chat_template, _specials(tokenizer))
        if found is not None:
            found = found.after(tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False))
        self._reasoning: ReasoningFormat | None = found if read.reasoning else None
        self.params = self._held(tokenizer, choice, read.parallel, found, params)
        self._parsers: dict[int, ChatParser] = {}

    def push(self, sample: int, text: str) -> tuple[str, str]:
        """The content and the thinking that more text makes certain."""
        parser = self._parsers.get(sample)
        if parser is None:
            parser = self._parsers[sample] = self._parser(sample)
        parts = parser.push(text)
        content = "".join(part.text for part in parts if isinstance(part, Content))
        return content, "".join(part.text for part in parts if isinstance(part, Reasoning))

    def answer(self, sample: int, text: str) -> Answer:
        """The parts of a whole text."""
        parser = self._parser(sample)
        return answer_of(parser.push(text) + parser.finish())

    def _parser(self, sample: int) -> ChatParser:
        return ChatParser(self._format, self._reasoning, self._tools, request_id=f"{self._seed}/{sample}")

    def _held(
        self,
        tokenizer: Tokenizer,
        choice: ToolChoice,
        parallel: bool,
        reasoning: ReasoningFormat | None,
        params: SamplingParams,
    ) -> SamplingParams:
        """The parameters with what the text is held to: calls by the tools, or what was asked for; behind the thinking."""
        own, constraint = params.constraint, params.constraint
        if self._format is not None:
            if own is None or choice.forced:
                constraint = self._format.constraint(self._tools, choice, parallel)
            else:
                called = self._format.constraint(self._tools, ToolChoice("required"), parallel)
                constraint = own if called is None else Constraint.alternatives(called, own)
        if constraint is not None and reasoning is not None:
            constraint = reasoning.before(constraint)
        marks = [*(self._format.markers if self._format else ())]
        marks += [reasoning.start, reasoning.end] if reasoning is not None else []
        if any(tokenizer.token_id(mark) in tokenizer.special_ids for mark in marks):
            params = replace(params, skip_special_tokens=False)  # the markers are needed
        return params if constraint == own else replace(params, constraint=constraint)
