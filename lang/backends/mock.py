"""A backend without a model: replies come from a script, and the same program and script give the same events, for tests of programs.

Invariants: nothing is random and no time is read; what a reply cannot be (longer than its constraint allows, none of the choices) is an error, not a
different reply; a step costs a few microseconds, whatever came before it. A token is a word with the white space before it.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from lang.backends.base import Capabilities, Counters, Emit, ProgramInfo
from lang.backends.matching import Check, checker, example
from lang.backends.steps import Step, StepSession, before, chatml, label, transcript
from radixrt.engine.nodes import Choosing, Gen, Output, Role, Select, Usage
from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.grammar.constraint import Constraint
from radixrt.request import FinishReason, SamplingParams
from radixrt.tools import Answer, ChatParser, answer_of
from radixrt.tools.formats import HERMES
from radixrt.tools.reasoning import THINK

_WORD = re.compile(r"\s*\S+|\s+\Z")
_UNKNOWN = ("logprobs", "prompt_logprobs")


@dataclass(frozen=True, slots=True)
class MockCall:
    """One reply that was asked for.

    Fields:
        node: its id. name: of the ``gen`` or ``select``. params: of a ``gen``. choices: of a ``select``. sample: which of ``n`` samples.
    """

    node: int
    name: str
    params: SamplingParams | None
    choices: tuple[str, ...]
    sample: int
    program: str
    _step: Step

    @property
    def text(self) -> str:
        """Everything that a model would see before the reply, messages marked as ChatML does. Joined anew each time."""
        return "".join([text for _, text in before(self._step)])

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        """The chat so far as ``role`` and ``content``; the last message is the one being written. Text outside of messages is in ``text`` only."""
        found = transcript(before(self._step)).messages
        return tuple({"role": role, "content": content} for role, content in found)

    def __repr__(self) -> str:
        what = f"choices={shown(self.choices)}" if self.choices else f"sample={self.sample}"
        return f"MockCall({self.program!r}, node={self.node}, name={self.name!r}, {what})"


Replies: TypeAlias = "Sequence[str] | Mapping[str, str | Sequence[str]] | Callable[[MockCall], str] | None"


class MockBackend:
    """Answers from a script.

    Args:
        replies: a list, consumed in the order in which steps begin; a mapping from the names of ``gen`` and ``select`` to a reply (always the same) or to a list
            (consumed in order, each sample takes one); a function of a ``MockCall``; ``None``: a ``gen`` named "x" is answered ``<x>`` (its
            second sample ``<x:1>``; under a constraint, the plainest text that meets it) and a ``select`` by its first choice.
        delay: seconds that every ``gen`` and ``select`` takes.
        tokens_per_delta: words in each piece of a stream; ``None``: a reply comes in one piece.

    A reply with ``<think>...</think>`` and ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` is read so where tools or thinking are looked for.
    Stop strings cut a reply, ``max_tokens`` counts its words, and a reply must meet its constraint. ``calls`` holds every reply asked for, in order.
    """

    name = "mock"

    def __init__(self, replies: Replies = None, *, delay: float = 0.0, tokens_per_delta: int | None = None) -> None:
        if isinstance(delay, bool) or not isinstance(delay, (int, float)) or not 0 <= delay < math.inf:
            raise InvalidRequest("delay", f"={shown(delay)}: must be a number of seconds, at least 0")
        if tokens_per_delta is not None and (
            isinstance(tokens_per_delta, bool) or not isinstance(tokens_per_delta, int) or tokens_per_delta < 1
        ):
            raise InvalidRequest("tokens_per_delta", f"={shown(tokens_per_delta)}: must be at least 1, or None")
        params = frozenset(item.name for item in fields(SamplingParams)) - set(_UNKNOWN)
        self.capabilities = Capabilities(params=params)
        self.calls: list[MockCall] = []
        self.delay = float(delay)
        self._script = _script(replies)
        self._unscripted = replies is None
        self._per_delta = tokens_per_delta
        self._counters = Counters()
        self._checks: dict[Constraint, Check] = {}
        self._sessions: set[StepSession] = set()

    async def start(self) -> None:
        """Nothing to do."""

    async def aclose(self) -> None:
        for session in list(self._sessions):
            session.fail_all("the mock backend was closed")

    def open(self, info: ProgramInfo, emit: Emit) -> StepSession:
        session = StepSession(info, emit, self._begin, self._sessions.discard)
        self._sessions.add(session)
        return session

    async def stats(self) -> dict[str, Any]:
        counted = self._counters
        return {
            "requests": counted.requests,
            "prompt_tokens": counted.prompt_tokens,
            "cached_tokens": counted.cached_tokens,
            "generated_tokens": counted.generated_tokens,
        }

    # ---- one step

    def _begin(self, session: StepSession, step: Step) -> None:
        node, parent = step.node, step.parent
        if parent is not None:
            step.tokens, step.seen = parent.tokens, parent.seen
        if isinstance(node, Role):
            step.tokens += 1
            session.finish(step, (Output(chatml(node)),), Usage())
            return
        choosing = None
        try:
            if isinstance(node, Select):
                outputs, words, choosing = self._select(session, step, node)
            else:
                assert isinstance(node, Gen), node
                outputs, words = self._gen(session, step, node)
        except InvalidRequest as error:
            session.fail(step, "unsupported" if error.field in _UNKNOWN else "invalid", f"{label(node)}: {error}")
            return
        except BaseException as error:  # the author's function, whatever it raises: this step alone ends by it
            session.fail(step, "error", f"{label(node)}: the script raised {type(error).__name__}: {error}")
            return
        finished = _Finished(session, step, outputs, self._usage(step, words), choosing)
        pieces: list[tuple[int, str]] = []
        if choosing is None:
            for i, output in enumerate(outputs):
                pieces += [(i, piece) for piece in _pieces(output.text, self._per_delta)]
        if not self.delay and self._per_delta is None:
            for i, piece in pieces:
                session.delta(step, i, piece)
            self._end(finished)
        else:
            self._stream(finished, pieces, 0)

    def _stream(self, finished: _Finished, pieces: list[tuple[int, str]], at: int) -> None:
        """The pieces from ``at`` on: one now, the next after its share of the delay, or a turn of the loop."""
        session, step = finished.session, finished.step

        def go_on(_: object = None) -> None:
            step.job = None
            if at < len(pieces):
                session.delta(step, *pieces[at])
                self._stream(finished, pieces, at + 1)
            else:
                self._end(finished)

        if not self.delay:
            session.soon(go_on, None)
        elif at == len(pieces) > 0:
            go_on()
        else:
            step.job = session.loop.call_later(self.delay / max(1, len(pieces)), go_on)

    def _end(self, finished: _Finished) -> None:
        usage, counted = finished.usage, self._counters
        counted.requests += 1
        counted.prompt_tokens += usage.prompt_tokens
        counted.cached_tokens += usage.cached_tokens
        counted.generated_tokens += usage.generated_tokens
        finished.session.finish(finished.step, finished.outputs, usage, finished.choosing)

    def _gen(self, session: StepSession, step: Step, node: Gen) -> tuple[tuple[Output, ...], int]:
        params = node.params
        for name in _UNKNOWN:
            if getattr(params, name) is not None:
                raise InvalidRequest(name, f"={getattr(params, name)}: the mock backend has no probabilities")
        outputs, total = [], 0
        for i in range(params.n):
            reply = self._reply(MockCall(node.id, node.name, params, (), i, session.info.name, step))
            constraint = params.constraint
            if reply is None:
                reply = self._default(node.name or "gen", i, constraint)
            elif constraint is not None and node.read is None:
                problem = self._check(constraint)(reply)
                if problem:
                    raise InvalidRequest("reply", f"={shown(reply)} {problem}, as its constraint {constraint!r} wants")
            output, words = _cut(reply, params)
            if node.read is not None:
                answer = _answer(node, i, output.text)
                output = replace(output, answer=answer)
                if constraint is not None and not answer.calls and (problem := self._check(constraint)(answer.content)):
                    raise InvalidRequest("reply", f"={shown(answer.content)} {problem}, as its constraint wants")
            outputs.append(output)
            total += words
        return tuple(outputs), total

    def _select(self, session: StepSession, step: Step, node: Select) -> tuple[tuple[Output, ...], int, Choosing]:
        choices = tuple(session.bound(parts) for parts in node.choices)
        if not choices:
            raise InvalidRequest("choices", "=[]: must hold at least one")
        reply = self._reply(MockCall(node.id, node.name, None, choices, 0, session.info.name, step))
        if reply is not None and reply not in choices:
            raise InvalidRequest("reply", f"={shown(reply)}: must be one of the choices{nearest(reply, choices)}")
        index = 0 if reply is None else choices.index(reply)
        choosing = _choosing(choices, index, node.method)
        return (Output(choices[index]),), len(choosing.tokens[index]), choosing

    # ---- replies

    def _reply(self, call: MockCall) -> str | None:
        self.calls.append(call)
        if self._unscripted:
            return None
        reply = self._script(call)
        if not isinstance(reply, str):
            if inspect.iscoroutine(reply):
                reply.close()
            raise InvalidRequest("reply", f"={shown(reply)}: must be a string, not {type(reply).__name__}")
        return reply

    def _default(self, name: str, sample: int, constraint: Constraint | None) -> str:
        if constraint is None:
            return f"<{name}:{sample}>" if sample else f"<{name}>"
        text = example(constraint)
        if text is None:
            raise InvalidRequest(
                "replies",
                f": without a script no text is known that meets {constraint!r}; give replies={{{name!r}: ...}}",
            )
        return text

    def _check(self, constraint: Constraint) -> Check:
        check = self._checks.get(constraint)
        if check is None:
            check = self._checks[constraint] = checker(constraint)
        return check

    def _usage(self, step: Step, words: int) -> Usage:
        """As if what one step computed were cached for all that continue the same step."""
        prompt, cached = step.tokens, step.seen
        if step.parent is not None:
            step.parent.seen = prompt
        step.tokens = step.seen = prompt + words
        return Usage(
            prompt_tokens=prompt,
            cached_tokens=cached,
            computed_tokens=prompt - cached,
            generated_tokens=words,
            tokenized=prompt - cached,
            decode_time=self.delay,
        )


@dataclass(frozen=True, slots=True)
class _Finished:
    """What a step will be answered with."""

    session: StepSession
    step: Step
    outputs: tuple[Output, ...]
    usage: Usage
    choosing: Choosing | None


def _script(replies: Replies) -> Callable[[MockCall], Any]:
    """The replies as a function of a call."""
    if callable(replies):
        return replies
    taken: Counter[str] = Counter()

    def next_of(listed: tuple[str, ...], whose: str) -> str:
        at = taken[whose]
        if at >= len(listed):
            owner = f" for {whose!r}" if whose else ""
            raise InvalidRequest("replies", f": all {len(listed)} replies{owner} are used up; give one more")
        taken[whose] = at + 1
        return listed[at]

    if isinstance(replies, Mapping):
        table = {
            name: value if isinstance(value, str) else _texts(f"replies[{name!r}]", value)
            for name, value in replies.items()
        }

        def named(call: MockCall) -> str:
            if call.name not in table:
                if not call.name:
                    raise InvalidRequest("replies", ": go by name, and this step has none")
                hint = nearest(call.name, table) if table else "; there are none"
                raise InvalidRequest("replies", f": has none for {call.name!r}{hint}")
            value = table[call.name]
            return value if isinstance(value, str) else next_of(value, call.name)

        return named
    listed = () if replies is None else _texts("replies", replies)
    return lambda call: next_of(listed, "")


def _texts(where: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidRequest(where, f"={shown(value)}: must be a list of texts, a mapping by name, or a function")
    for i, text in enumerate(value):
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}[{i}]", f"={shown(text)}: must be a string")
    return tuple(value)


def _answer(node: Gen, sample: int, text: str) -> Answer:
    """A reply as the engine would read it: calls of any name, in Hermes' form."""
    read = node.read
    calls = read is not None and read.choice != "none"
    thinking = read is not None and read.reasoning
    parser = ChatParser(HERMES if calls else None, THINK if thinking else None, request_id=f"{node.id}/{sample}")
    return answer_of(parser.push(text) + parser.finish())


def _cut(reply: str, params: SamplingParams) -> tuple[Output, int]:
    """The reply as the parameters let it be, and its words."""
    text, reason, stop_reason = reply, FinishReason.STOP, None
    words = _WORD.findall(reply)
    if params.stop:
        begin = sum(map(len, words[: params.min_tokens]))
        found = [(at, -len(stop), stop) for stop in params.stop if (at := reply.find(stop, begin)) >= 0]
        if found:
            at, _, stop_reason = min(found)
            text = reply[: at + len(stop_reason) if params.include_stop else at]
            words = _WORD.findall(text)
    most = params.max_tokens
    if most is not None and len(words) > most:
        if params.constraint is not None:
            raise InvalidRequest("max_tokens", f"={most}: the reply {shown(reply)} has {len(words)} words")
        words = words[:most]
        text, reason, stop_reason = "".join(words), FinishReason.LENGTH, None
    return Output(text, finish_reason=reason, stop_reason=stop_reason), len(words)


def _pieces(text: str, words: int | None) -> list[str]:
    if words is None:
        return [text] if text else []
    found = _WORD.findall(text)
    return ["".join(found[i : i + words]) for i in range(0, len(found), words)]


def _choosing(choices: tuple[str, ...], index: int, method: str) -> Choosing:
    """Made-up figures in which the chosen one is the best by mean and by total: its tokens share -0.1, others have -2 and less each."""
    tokens = tuple(tuple(range(max(1, len(_WORD.findall(choice))))) for choice in choices)
    each = [-0.1 / len(ids) if i == index else -2.0 - i for i, ids in enumerate(tokens)]
    totals = tuple(value * len(ids) for value, ids in zip(each, tokens))
    scores = tuple(each) if method == "token_length_normalized" else totals
    weights = [math.exp(score) for score in scores]
    all_weights = sum(weights)
    probabilities = tuple(weight / all_weights for weight in weights)
    return Choosing(
        index=index,
        scores=scores,
        logprobs=totals,
        probabilities=probabilities,
        confidence=probabilities[index],
        tokens=tokens,
        token_logprobs=tuple((value,) * len(ids) for value, ids in zip(each, tokens)),
    )
