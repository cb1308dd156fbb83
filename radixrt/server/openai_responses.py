"""Writes what ``/v1/chat/completions`` and ``/v1/completions`` answer: whole bodies, and the chunks of streams.

Invariants: the joined chunks of a stream say what the whole body says; the id that ends a sample is counted in ``usage`` and shown nowhere, so that
the tokens listed with log-probabilities spell the text (and what ``skip_special_tokens`` and a stop string hide of it); offsets are characters of the choice's own text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from radixrt.model.detokenizer import Detokenizer
from radixrt.model.tokenizer import Tokenizer
from radixrt.request import OutputDelta, PositionLogprobs, RequestOutput, TokenLogprob
from radixrt.server.chat import (
    CallArguments,
    CallBegin,
    Content,
    Finish,
    Part,
    Reasoning,
    Step,
    Usage,
    shown_positions,
)
from radixrt.server.openai_requests import Job

_LEAST = -9999.0  # JSON has no infinity


def event(data: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer to a chat in the making. ``echoed``: what comes before the text of each choice."""

    id: str
    created: int
    job: Job
    tokenizer: Tokenizer
    echoed: str = ""

    def opening(self, choice: int) -> bytes:
        """The first chunk of a choice."""
        return self._chunk(choice, {"role": "assistant", "content": self.echoed}, None, None)

    def piece(self, step: Step) -> bytes:
        """The chunk of a step."""
        delta = _delta(step.parts)
        logprobs = self._logprobs(step.logprobs)
        return self._chunk(step.choice, delta or {"content": ""}, logprobs, step.finish)

    def frame(self, choice: int) -> tuple[bytes, bytes]:
        """What stands before and behind the text of a choice's chunk that has nothing else."""
        before, _, behind = self._chunk(choice, {"content": 0}, self._logprobs(()), None).partition(b'{"content":0}')
        return before + b'{"content":', b"}" + behind

    def closing(self, usage: Usage) -> bytes:
        """The chunk of the usage, if it was asked for."""
        if not self.job.include_usage:
            return b""
        return event({**self._head("chat.completion.chunk"), "choices": [], "usage": chat_usage(usage)})

    def body(self, steps: Iterable[Step]) -> dict[str, Any]:
        """The whole answer."""
        choices: dict[int, _Whole] = {}
        usage = Usage(0, 0)
        for step in steps:
            whole = choices.setdefault(step.choice, _Whole())
            whole.parts += step.parts
            whole.positions += step.logprobs
            if step.finish is not None:
                whole.reason, usage = step.finish.reason, step.finish.usage or usage
        found = [
            {
                "index": index,
                "message": self._message(choices[index].parts),
                "logprobs": self._logprobs(choices[index].positions),
                "finish_reason": choices[index].reason,
            }
            for index in sorted(choices)
        ]
        return {**self._head("chat.completion"), "choices": found, "usage": chat_usage(usage)}

    def _message(self, parts: Sequence[Part]) -> dict[str, Any]:
        said = _delta(parts)
        content = self.echoed + said.get("content", "")
        message = {"role": "assistant", "content": content, "refusal": None}
        if "reasoning_content" in said:
            message["reasoning_content"] = said["reasoning_content"]
        if "tool_calls" in said:
            calls = [{name: item for name, item in call.items() if name != "index"} for call in said["tool_calls"]]
            message |= {"content": content or None, "tool_calls": calls}
        return message

    def _logprobs(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
        if self.job.params.logprobs is None:
            return None
        return {"content": chat_logprobs(positions, self.tokenizer), "refusal": None}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.job.model}

    def _chunk(
        self, choice: int, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None, finish: Finish | None
    ) -> bytes:
        data = self._head("chat.completion.chunk")
        reason = finish.reason if finish is not None else None
        data["choices"] = [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]
        if self.job.include_usage:
            data["usage"] = None
        return event(data)


@dataclass(slots=True)
class _Whole:
    """What has come of one choice."""

    parts: list[Part] = field(default_factory=list)
    positions: list[PositionLogprobs] = field(default_factory=list)
    reason: str = "stop"


def _delta(parts: Sequence[Part]) -> dict[str, Any]:
    """Parts as a delta, those that follow each other joined; a message is the delta of all its parts."""
    if len(parts) == 1 and isinstance(parts[0], Content):  # as nearly all are
        return {"content": parts[0].text}
    texts: dict[str, list[str]] = {}
    calls: dict[int, dict[str, Any]] = {}
    arguments: dict[int, list[str]] = {}
    for part in parts:
        match part:
            case Content(text):
                texts.setdefault("content", []).append(text)
            case Reasoning(text):
                texts.setdefault("reasoning_content", []).append(text)
            case CallBegin(index, id, name):
                calls[index] = {"index": index, "id": id, "type": "function", "function": {"name": name}}
                arguments[index] = [""]
            case CallArguments(index, text):
                calls.setdefault(index, {"index": index, "function": {}})
                arguments.setdefault(index, []).append(text)
    delta: dict[str, Any] = {name: "".join(pieces) for name, pieces in texts.items()}
    for index, pieces in arguments.items():
        calls[index]["function"]["arguments"] = "".join(pieces)
    return {**delta, "tool_calls": list(calls.values())} if calls else delta


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of completions in the making. ``prompt_texts``: what echo shows before each prompt's samples."""

    id: str
    created: int
    job: Job
    tokenizer: Tokenizer
    prompt_texts: tuple[str, ...] = ()

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer; ``outputs`` by prompt."""
        choices = [
            self._choice(at, output, sample)
            for at, output in enumerate(outputs)
            for sample in range(len(output.samples))
        ]
        return {**self._head(), "choices": choices, "usage": usage(outputs)}

    def opening(self, choice: int, at: int) -> bytes:
        """The first chunk of a choice of prompt ``at``; none where there is nothing to open with."""
        text = self._echoed(at)
        return self._chunk(choice, text, None, None) if text else b""

    def piece(self, choice: int, delta: OutputDelta, offsets: Offsets | None) -> bytes:
        """The chunk of a delta; nothing where it shows nothing. ``offsets``: where log-probabilities were asked for."""
        positions = shown_positions(delta.logprobs, delta.finish_reason, self._ends) if offsets is not None else ()
        if not delta.text and not positions and delta.finish_reason is None:
            return b""
        logprobs = None if offsets is None else completion_logprobs(positions, self.tokenizer, offsets)
        return self._chunk(choice, delta.text, logprobs, delta.finish_reason)

    def closing(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The chunk of the usage, if it was asked for."""
        if not self.job.include_usage:
            return b""
        return event({**self._head(), "choices": [], "usage": usage(outputs)})

    def offsets(self, at: int) -> Offsets:
        """Where the tokens of a sample of prompt ``at`` begin."""
        skip = self.job.params.skip_special_tokens
        return Offsets(self.tokenizer, len(self._echoed(at)), skip_special_tokens=skip)

    def _echoed(self, at: int) -> str:
        return self.prompt_texts[at] if self.prompt_texts else ""

    @property
    def _ends(self) -> frozenset[int]:
        return self.tokenizer.eos_ids | frozenset(self.job.params.stop_token_ids)

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.job.model}

    def _chunk(self, choice: int, text: str, logprobs: Any, reason: str | None) -> bytes:
        data = self._head()
        data["choices"] = [{"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}]
        if self.job.include_usage:
            data["usage"] = None
        return event(data)

    def _choice(self, at: int, output: RequestOutput, sample: int) -> dict[str, Any]:
        found = output.samples[sample]
        logprobs = None
        if self.job.params.logprobs is not None:
            positions = shown_positions(found.logprobs or (), found.finish_reason, self._ends)
            before = self._before(at, output) if self.job.echo else None
            logprobs = completion_logprobs(positions, self.tokenizer, self.offsets(at), before)
        index, text = at * self.job.params.n + sample, self._echoed(at) + found.text
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": found.finish_reason}

    def _before(self, at: int, output: RequestOutput) -> dict[str, Any]:
        """Log-probabilities of the prompt's tokens; the first has none."""
        offsets, text = Offsets(self.tokenizer, 0), self._echoed(at)
        ids = output.prompt_token_ids
        positions = output.prompt_logprobs or (None,) * len(ids)
        bos = self.tokenizer.bos_id
        added = self.tokenizer.adds_bos and ids[:1] == (bos,) and not text.startswith(spelled(ids[0], self.tokenizer))
        skipped = int(added)  # not in the text
        found = completion_logprobs([p for p in positions[skipped:] if p is not None], self.tokenizer, offsets)
        if skipped < len(ids) and positions[skipped] is None:
            first = Offsets(self.tokenizer, 0)
            first.next(ids[skipped])
            shift = first.at
            found = {
                "tokens": [spelled(ids[skipped], self.tokenizer), *found["tokens"]],
                "token_logprobs": [None, *found["token_logprobs"]],
                "top_logprobs": [None, *found["top_logprobs"]],
                "text_offset": [0, *(offset + shift for offset in found["text_offset"])],
            }
        return found


class Offsets:
    """Where each token of a text begins, in characters."""

    def __init__(self, tokenizer: Tokenizer, start: int, *, skip_special_tokens: bool = False) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self.at = start

    def next(self, token: int) -> int:
        """The offset of the next token."""
        begins = self.at
        self.at += len(self._detokenizer.push((token,)))
        return begins


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Tokens of all prompts and samples. ``cached_tokens``: of the prompts, those whose KV was there."""
    prompt = completion = cached = 0
    for output in outputs:
        prompt += output.prompt_tokens
        completion += output.completion_tokens
        cached += output.cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_usage(found: Usage) -> dict[str, Any]:
    """As ``usage``, of a chat. ``reasoning_tokens``: of the completion, those of the thinking."""
    return {
        "prompt_tokens": found.prompt_tokens,
        "completion_tokens": found.completion_tokens,
        "total_tokens": found.prompt_tokens + found.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": found.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": found.reasoning_tokens},
    }


def spelled(token: int, tokenizer: Tokenizer) -> str:
    """A token as text; one that is a part of a character as ``bytes:\\xe4``."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(positions: Iterable[PositionLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The form of chats: ``bytes`` tells tokens apart that are parts of characters."""

    def entry(item: TokenLogprob) -> dict[str, Any]:
        data = tokenizer.token_bytes(item.token_id)
        text = data.decode(errors="replace")
        return {"token": text, "logprob": max(item.logprob, _LEAST), "bytes": list(data)}

    return [
        {**entry(position.chosen), "top_logprobs": [entry(item) for item in position.top]} for position in positions
    ]


def completion_logprobs(
    positions: Iterable[PositionLogprobs], tokenizer: Tokenizer, offsets: Offsets, before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The form of completions: lists by position, behind those of ``before``; ``top_logprobs`` has the token itself too."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for position in positions:
        own = max(position.chosen.logprob, _LEAST)
        text = spelled(position.chosen.token_id, tokenizer)
        top: dict[str, float] = {}
        for item in position.top:  # of tokens that are spelled the same, the likeliest
            top.setdefault(spelled(item.token_id, tokenizer), max(item.logprob, _LEAST))
        top.setdefault(text, own)
        found["tokens"].append(text)
        found["token_logprobs"].append(own)
        found["top_logprobs"].append(top)
        found["text_offset"].append(offsets.next(position.chosen.token_id))
    return found if before is None else {name: before[name] + found[name] for name in found}
