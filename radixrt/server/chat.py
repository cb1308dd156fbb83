"""The neutral turn: what a chat asks in any dialect (``ChatAsk``), and the parts of its answer as they come (``run_turn``).

Invariants: a turn that is refused raises before its first event; the parts of a stream, joined, are those of the whole answer; whatever
ends the generator ends its requests in the engine; a constraint holds for what follows the thinking, and thinking ends within its budget.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, fields, replace
from typing import Any

from radixrt.errors import InvalidRequest
from radixrt.grammar.constraint import Constraint
from radixrt.model.detokenizer import Detokenizer
from radixrt.model.tokenizer import Tokenizer
from radixrt.request import FinishReason, OutputDelta, PositionLogprobs, RequestOutput, SampleOutput, SamplingParams
from radixrt.sampling.spec import mix
from radixrt.server.client import EngineClient
from radixrt.server.dialects import renamed
from radixrt.server.errors import Failure, RequestFailed
from radixrt.server.streams import merged
from radixrt.server.thinking import Thinking
from radixrt.tools import (
    CallArguments,
    CallBegin,
    CallEnd,
    ChatParser,
    Content,
    Part,
    Reasoning,
    ReasoningFormat,
    Tool,
    ToolChoice,
    ToolFormat,
    choose_reasoning_format,
    choose_tool_format,
    template_chat,
)
from radixrt.tools.reasoning import REASONING_FORMATS

__all__ = [
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "ChatAsk",
    "Content",
    "Event",
    "Finish",
    "Logprobs",
    "Part",
    "Reasoning",
    "ReasoningAsk",
    "Step",
    "Usage",
    "run_steps",
    "run_turn",
]

SMALL = 16_384  # bytes or characters: more is read and tokenized off the event loop
CHARS_PER_TOKEN = 256  # no chat of a context's length is longer than this a token
# What switches thinking in the templates that know a switch.
_SWITCHES = ("enable_thinking", "thinking")
# What the engine finds fault with, that is no part of a constraint.
_PARAMS = frozenset(
    {"prompt", "max_waiting_requests", *(item.name for item in fields(SamplingParams))} - {"constraint"}
)
_AUTO = ToolChoice("auto")


# ---- what is asked


@dataclass(frozen=True, slots=True)
class ReasoningAsk:
    """How a model that thinks is to think.

    Fields:
        on: nothing: as its template does. budget: most tokens of thinking; then it is ended. separate: False: the thinking stays in the text.
    """

    on: bool | None = None
    budget: int | None = None
    separate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAsk:
    """A turn that was read.

    Fields:
        messages: in OpenAI's form (``tool_calls``, role ``tool``, ``reasoning_content``), checked.
        params: of every choice, with the constraint of the asker's own. template: what else the template is given.
        continues: the last message is gone on with. stream: parts are wanted as they come; else all at the end.
        names: fields of ``SamplingParams`` that the body has other names for; ``prompt``: the messages, ``constraint``: the asker's own.
    """

    messages: tuple[Mapping[str, Any], ...]
    params: SamplingParams
    request_id: str = ""
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = _AUTO
    parallel: bool = True
    reasoning: ReasoningAsk = ReasoningAsk()
    template: Mapping[str, Any] = field(default_factory=dict)
    generation_prompt: bool = True
    continues: bool = False
    stream: bool = False
    model: str = ""
    priority: int = 0
    cache_salt: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return () if self.choice.kind == "none" else self.tools

    @property
    def talks_of_tools(self) -> bool:
        """There are tools, or calls in what was said. (With a choice of none too: the prompt is the one that the cache holds.)"""
        return bool(self.tools) or any(
            message.get("tool_calls") or message["role"] == "tool" for message in self.messages
        )

    @property
    def characters(self) -> int:
        """How much there is to render and tokenize, roughly."""
        return sum(_size(message) for message in self.messages) + sum(_size(tool.parameters) for tool in self.tools)


# ---- what comes


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a turn, all its choices together. ``cached_tokens``: of the prompt; ``reasoning_tokens``: of the completion."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the tokens of the parts that follow; those of markup too, but for the id that ended the choice."""

    positions: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a choice.

    Fields:
        reason: ``"stop"``, ``"length"`` or ``"tool_calls"``. stop: the stop string or id, where it is known: at the turn's last choice.
        usage: of the turn, on its very last event.
    """

    reason: str
    stop: str | int | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What one delta of the engine adds to one choice."""

    choice: int
    parts: tuple[Part, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish: Finish | None = None


Event = tuple[int, Part | Logprobs | Finish]


async def run_turn(client: EngineClient, ask: ChatAsk, config: Any = None) -> AsyncGenerator[Event, None]:
    """The events of a turn, each with its choice's number: parts, ``Logprobs`` before theirs where asked for, and a ``Finish`` for every choice.

    Args:
        config: has ``tool_call_parser`` and ``reasoning_parser``, names of formats; ``"auto"``, or not there: by the model's template.

    Raises:
        InvalidRequest: named by ``ask.names``. ModelError: the template fails. RequestFailed: the engine ended the request.
    """
    async with aclosing(run_steps(client, ask, config)) as steps:
        async for step in steps:
            if step.logprobs:
                yield step.choice, Logprobs(step.logprobs)
            for part in step.parts:
                yield step.choice, part
            if step.finish is not None:
                yield step.choice, step.finish


async def run_steps(client: EngineClient, ask: ChatAsk, config: Any = None) -> AsyncGenerator[Step, None]:
    """As ``run_turn``, a step of the engine at a time."""
    try:
        turn = await off_loop(ask.characters, lambda: _prepared(client, ask, config))
    except InvalidRequest as error:
        raise renamed(error, ask.names) from None
    try:
        if turn.reasoning is not None and ask.reasoning.budget is not None:
            async with aclosing(_each(client, ask, turn)) as steps:
                async for step in steps:
                    if _tells(step):
                        yield step
            return
        choices: dict[int, _Choice] = {}  # all of them in one request
        async with aclosing(_request(client, ask, turn.prompt, turn.params, ask.request_id, ask.stream)) as deltas:
            async for delta in deltas:
                for step in _steps(turn, ask, choices, delta):
                    if _tells(step):
                        yield step
    except InvalidRequest as error:
        raise named(error, ask.names) from None


def named(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """An error of the engine, with the name that the body has for the field; what is none of them is in the constraint."""
    constraint = names.get("constraint")
    if constraint is None or error.field.partition("[")[0] in _PARAMS:
        return renamed(error, names)
    return InvalidRequest(constraint, str(error))


def weight(data: bytes, body: Mapping[str, Any]) -> int:
    """What reading a body costs, in ``off_loop``'s measure: a schema of a tool is compiled, which takes long however small it is."""
    return SMALL + 1 if body.get("tools") else len(data)


async def off_loop(size: int, function: Callable[[], Any]) -> Any:
    """Run a function here, or in a thread where its work is large."""
    return function() if size <= SMALL else await asyncio.to_thread(function)


def finished(output: RequestOutput) -> RequestOutput:
    """The output, if all of it is there."""
    reasons = {sample.finish_reason for sample in output.samples}
    if output.error is not None or FinishReason.ERROR in reasons or not reasons:
        raise RequestFailed(Failure(500, f"the request failed: {output.error}", None, "request_failed"))
    if FinishReason.ABORT in reasons:
        raise RequestFailed(Failure(503, "the request was aborted by the server", None, "request_aborted"))
    return output


# ---- from an ask to a request


@dataclass(frozen=True, slots=True)
class _Turn:
    """What the engine is asked, and how its text is read.

    Fields:
        format: nothing: no calls are looked for. reasoning: nothing: the model does not think, or not any more.
        after: what must follow the thinking. ends: ids that end a choice.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    format: ToolFormat | None
    reasoning: ReasoningFormat | None
    after: Constraint | None
    ends: frozenset[int]
    tokenizer: Tokenizer


def _prepared(client: EngineClient, ask: ChatAsk, config: Any) -> _Turn:
    tokenizer = client.tokenizer
    tools = ask.callable
    template = tokenizer.chat_template or ""
    specials = [
        item.end for item in REASONING_FORMATS.values() if tokenizer.token_id(item.end) in tokenizer.special_ids
    ]
    format = None
    if ask.talks_of_tools:
        format = choose_tool_format(template, specials, getattr(config, "tool_call_parser", None))
    reasoning = choose_reasoning_format(template, specials, getattr(config, "reasoning_parser", None))
    text = _rendered(client, ask, format, _switched(ask, reasoning, template))
    if reasoning is not None:
        text, reasoning = _opened(ask, text, reasoning, template)
    ids = tokenizer.encode(text) if text else []
    if not ids:
        raise InvalidRequest("prompt", "are rendered to an empty prompt by the chat template")
    params = ask.params
    if not tools:
        if ask.tools and format is not None:
            params = replace(params, logit_bias={**params.logit_bias, **_barred(format, tokenizer)})
        format = None
    after = _wanted(ask, format)
    if after is not None:
        params = replace(params, constraint=after if reasoning is None else reasoning.before(after))
    marks = [*(format.markers if format else ()), *((reasoning.start, reasoning.end) if reasoning else ())]
    if any(tokenizer.token_id(mark) in tokenizer.special_ids for mark in marks):
        params = replace(params, skip_special_tokens=False)  # the markers are needed
    ends = tokenizer.eos_ids | frozenset(params.stop_token_ids)
    return _Turn(tuple(ids), params, format, reasoning, after, ends, tokenizer)


def _barred(format: ToolFormat, tokenizer: Tokenizer) -> dict[int, float]:
    """Where the choice is none, the tools stand in the prompt all the same, as in the turns before, which the cache holds.

    A mark of a call that is a token of its own is never drawn; what is written like a call without one is content.
    """
    ids = {tokenizer.token_id(mark) for mark in format.markers}
    return {id: -100.0 for id in ids if id is not None}


def _switched(ask: ChatAsk, reasoning: ReasoningFormat | None, template: str) -> dict[str, Any]:
    """What the template is given, with the switch of thinking that it knows."""
    kwargs = dict(ask.template)
    if reasoning is not None and ask.reasoning.on is not None:
        for name in _SWITCHES:
            if name in template:
                kwargs.setdefault(name, ask.reasoning.on)
    return kwargs


def _rendered(client: EngineClient, ask: ChatAsk, format: ToolFormat | None, kwargs: dict[str, Any]) -> str:
    tokenizer, context = client.tokenizer, client.info.context_length
    messages, more = [dict(message) for message in ask.messages], dict[str, Any]()
    if ask.talks_of_tools:
        field = ask.names.get("prompt", "messages")
        messages, more = template_chat(field, ask.messages, ask.tools, format, tokenizer.chat_template)
    mark = ""
    if ask.continues:  # a mark that no chat holds shows where the rendering of the last message's text ends
        mark = secrets.token_hex(16)
        messages[-1] = {**messages[-1], "content": messages[-1]["content"] + mark}
    text = tokenizer.render_chat(messages, add_generation_prompt=ask.generation_prompt, **kwargs, **more)
    if mark:
        if text.count(mark) != 1:
            raise InvalidRequest("continue_final_message", "=true: the chat template has no place to go on from")
        text = text[: text.index(mark)]
    if len(text) > context * CHARS_PER_TOKEN:
        raise InvalidRequest("prompt", f"have {len(text)} characters; context_length={context} tokens cannot hold them")
    return text


def _opened(ask: ChatAsk, text: str, reasoning: ReasoningFormat, template: str) -> tuple[str, ReasoningFormat | None]:
    """The prompt's text, and the thinking that follows it: none where it is over, or is not to begin."""
    if ask.continues:
        said = str(ask.messages[-1]["content"])
        inside = said.rfind(reasoning.start) > said.rfind(reasoning.end)
        return text, replace(reasoning, starts_open=True) if inside else None
    found = reasoning.after(text) if ask.generation_prompt else None
    if found is None or (ask.reasoning.on is not False and ask.reasoning.budget != 0):
        return text, found
    if not found.starts_open and ask.reasoning.on is False and any(name in template for name in _SWITCHES):
        return text, None  # the template has switched it off, without a mark
    return f"{text if found.starts_open else text + reasoning.start}\n\n{reasoning.end}\n\n", None


def _wanted(ask: ChatAsk, format: ToolFormat | None) -> Constraint | None:
    """What the answer must be, thinking aside."""
    own = ask.params.constraint
    if format is None:
        if ask.choice.forced:
            raise InvalidRequest(
                "tool_choice", f"={ask.choice.kind}: this server reads no calls (tool_call_parser=none)"
            )
        return own
    try:
        if own is None or ask.choice.forced:
            return format.constraint(ask.tools, ask.choice, ask.parallel)
        called = format.constraint(ask.tools, ToolChoice("required"), ask.parallel)
        return own if called is None else Constraint.alternatives(called, own)
    except InvalidRequest as error:  # too many tools to call one after the other
        raise InvalidRequest("tools", f": {error}") from None


# ---- requests and their text


def _tells(step: Step) -> bool:
    return bool(step.parts or step.logprobs) or step.finish is not None


def _steps(turn: _Turn, ask: ChatAsk, choices: dict[int, _Choice], delta: OutputDelta) -> list[Step]:
    """What a delta adds to its choice; where no stream is wanted, the last one has all of all choices."""
    if ask.stream:
        choice = choices.get(delta.index)
        if choice is None:
            choice = choices[delta.index] = _Choice(turn, ask, delta.index)
        step = _step(turn, choice, delta)
        return [] if step is None else [step]
    if delta.output is None:
        return []
    steps: list[Step] = []
    for sample in finished(delta.output).samples:
        choice = _Choice(turn, ask, sample.index)
        parts = choice.push(sample.text) + choice.finish()
        usage = _usage(turn, delta.output) if sample is delta.output.samples[-1] else None
        finish = Finish(choice.reason(sample.finish_reason), sample.stop_reason, usage)
        positions = shown_positions(sample.logprobs or (), sample.finish_reason, turn.ends)
        steps.append(Step(choice.index, parts, tuple(positions), finish))
    return steps


async def _each(client: EngineClient, ask: ChatAsk, turn: _Turn) -> AsyncGenerator[Step, None]:
    """A request for each choice, whose thinking is ended when its budget is spent."""
    n, params = turn.params.n, replace(turn.params, n=1)
    seed = params.seed
    own = [params if seed is None or not i else params.with_seed(mix(seed, i)) for i in range(n)]  # as the engine's
    sources = [_bounded(client, ask, turn, i, params) for i, params in enumerate(own)]
    usages: list[Usage] = []
    async with aclosing(merged(sources)) as steps:
        async for _, step in steps:
            if step.finish is not None and step.finish.usage is not None:
                usages.append(step.finish.usage)
                usage = None
                if len(usages) == n:
                    usage = Usage(
                        usages[0].prompt_tokens,
                        sum(item.completion_tokens for item in usages),
                        min(item.cached_tokens for item in usages),
                        sum(item.reasoning_tokens for item in usages),
                    )
                step = replace(step, finish=replace(step.finish, usage=usage))
            yield step


async def _bounded(
    client: EngineClient, ask: ChatAsk, turn: _Turn, at: int, params: SamplingParams
) -> AsyncGenerator[Step, None]:
    """One choice: the request as it is, and where it thinks for too long another one, which goes on behind the end of the thinking."""
    name = ask.request_id if turn.params.n == 1 else f"{ask.request_id}-{at}"
    assert turn.reasoning is not None
    detokenizer = Detokenizer(turn.tokenizer, skip_special_tokens=turn.params.skip_special_tokens)
    choice, thinking = _Choice(turn, ask, at), Thinking(turn.reasoning, detokenizer, ask.reasoning.budget or 0)
    told, cut = 0, False  # characters of the text
    first: RequestOutput | None = None
    async with aclosing(_request(client, ask, turn.prompt, params, name, True)) as deltas:
        async for delta in deltas:
            if cut or thinking.push(delta):
                if not cut:
                    cut = True
                    parts = choice.push(thinking.text[told:])
                    yield Step(at, parts, delta.logprobs[: thinking.last])
                    await client.abort(name)
                first = delta.output or first
                continue
            told += len(delta.text)
            step = _step(turn, choice, delta)
            if step is not None:
                yield step
    if not cut:
        return
    cached = first.cached_tokens if first is not None else 0
    room = client.info.context_length - len(turn.prompt) if params.max_tokens is None else params.max_tokens
    seed = None if params.seed is None else mix(params.seed, -1)  # other draws than those of the thinking
    used = room
    ways = (f"\n{turn.reasoning.end}\n\n", turn.reasoning.end)  # the short one where a constraint needs every token
    for i, forced in enumerate(ways[: 1 if turn.after is None else 2]):
        ids = turn.tokenizer.encode(forced, add_special=False)
        before = len(thinking.ids) + len(ids)
        if before >= room:
            continue
        least = max(0, params.min_tokens - before)
        then = replace(params, max_tokens=room - before, min_tokens=least, constraint=turn.after, seed=seed)
        prompt, own = (*turn.prompt, *thinking.ids, *ids), f"{name}-answer{i or ''}"
        begun = False
        try:
            async with aclosing(_request(client, ask, prompt, then, own, True)) as deltas:
                async for delta in deltas:
                    if not begun:
                        begun = True
                        yield Step(at, choice.push(forced))
                    step = _step(turn, choice, delta)
                    if step is not None and step.finish is not None and delta.output is not None:
                        usage = Usage(len(turn.prompt), before + delta.output.completion_tokens, cached, before)
                        step = replace(step, finish=replace(step.finish, usage=usage))
                    if step is not None:
                        yield step
                return
        except InvalidRequest:
            if begun or turn.after is None:
                raise
            used = min(used, before)  # too few tokens are left for the constraint: a shorter end may leave enough
    # the end was never asked for: no more of it counts than there was room for
    usage = Usage(len(turn.prompt), used, cached, used)
    parts = choice.push(turn.reasoning.end) + choice.finish()
    yield Step(at, parts, (), Finish(choice.reason(FinishReason.LENGTH), None, usage))


def _step(turn: _Turn, choice: _Choice, delta: OutputDelta) -> Step | None:
    """What a delta tells; nothing where that is nothing."""
    if delta.output is not None:
        finished(delta.output)
    if delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        return None  # the last delta of the request says why
    parts, finish = choice.push(delta.text), None
    if delta.finish_reason is not None:
        parts += choice.finish()
        finish = Finish(choice.reason(delta.finish_reason))
        if delta.output is not None:
            stops = [sample.stop_reason for sample in delta.output.samples if sample.index == delta.index]
            finish = replace(finish, stop=next(iter(stops), None), usage=_usage(turn, delta.output))
    positions = shown_positions(delta.logprobs, delta.finish_reason, turn.ends)
    return Step(choice.index, parts, tuple(positions), finish)


def _request(
    client: EngineClient, ask: ChatAsk, prompt: Sequence[int], params: SamplingParams, name: str, deltas: bool
) -> AsyncGenerator[OutputDelta, None]:
    return client.stream(
        list(prompt), params, request_id=name, priority=ask.priority, cache_salt=ask.cache_salt, deltas=deltas
    )


class _Choice:
    """One choice's text as it is read."""

    def __init__(self, turn: _Turn, ask: ChatAsk, index: int) -> None:
        self.index = index
        self._called = False
        reasoning = turn.reasoning if ask.reasoning.separate else None
        self._parser: ChatParser | None = None
        if turn.format is not None or reasoning is not None:
            self._parser = ChatParser(turn.format, reasoning, ask.callable, request_id=f"{ask.request_id}-{index}")

    def push(self, text: str) -> tuple[Part, ...]:
        if self._parser is None:
            return (Content(text),) if text else ()
        return self._noted(self._parser.push(text))

    def finish(self) -> tuple[Part, ...]:
        return () if self._parser is None else self._noted(self._parser.finish())

    def reason(self, reason: FinishReason) -> str:
        return "tool_calls" if self._called and reason is FinishReason.STOP else str(reason)

    def _noted(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        self._called = self._called or any(isinstance(part, CallBegin) for part in parts)
        return tuple(parts)


def _usage(turn: _Turn, output: RequestOutput) -> Usage:
    thought = sum(_thought(turn, sample) for sample in output.samples) if turn.reasoning is not None else 0
    return Usage(output.prompt_tokens, output.completion_tokens, output.cached_tokens, thought)


def _thought(turn: _Turn, sample: SampleOutput) -> int:
    """How many of a sample's tokens are thinking, its marks included."""
    assert turn.reasoning is not None
    start, end = turn.reasoning.start, turn.reasoning.end
    if not turn.reasoning.starts_open and not sample.text.lstrip().startswith(start):
        return 0
    at = sample.text.find(end)
    if at < 0:
        return len(sample.token_ids)
    detokenizer = Detokenizer(turn.tokenizer, skip_special_tokens=turn.params.skip_special_tokens)
    length = 0
    for count, id in enumerate(sample.token_ids, 1):
        length += len(detokenizer.push((id,)))
        if length >= at + len(end):
            return count
    return len(sample.token_ids)


def shown_positions(
    positions: Sequence[PositionLogprobs], reason: FinishReason | None, ends: frozenset[int]
) -> Sequence[PositionLogprobs]:
    """Without the id that ended the sample."""
    if reason is FinishReason.STOP and positions and positions[-1].chosen.token_id in ends:
        return positions[:-1]
    return positions


def _size(value: Any) -> int:
    """The characters of all texts in a value; bounded, since a body's nesting is."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _size(item) for key, item in value.items())
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 0
