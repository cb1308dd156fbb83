"""Writes what ``/v1/chat/completions`` and ``/v1/completions`` answer: whole bodies, and the chunks of streams.

Invariants: the joined chunks of a stream say what the whole body says; the id that ends a sample is counted in ``usage`` and shown nowhere, so that
the tokens listed with log-probabilities spell the text (and what ``skip_special_tokens`` and a stop string hide of it); offsets are characters of the choice's own text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from radixrt.model.detokenizer import Detokenizer
from radixrt.model.tokenizer import Tokenizer
from radixrt.request import FinishReason, OutputDelta, PositionLogprobs, RequestOutput, TokenLogprob
from radixrt.server.openai_requests import Job

_LEAST = -9999.0  # JSON has no infinity


def event(data: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer in the making. ``prompt_texts``: what echo shows before each prompt's samples."""

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
        return {**self._head(stream=False), "choices": choices, "usage": usage(outputs)}

    def opening(self, choice: int, at: int) -> bytes:
        """The first chunk of a choice of prompt ``at``; none where there is nothing to open with."""
        text = self._echoed(at)
        if self.job.kind == "chat":
            return self._chunk(choice, {"delta": {"role": "assistant", "content": text}, "logprobs": None}, None)
        return self._chunk(choice, {"text": text, "logprobs": None}, None) if text else b""

    def piece(self, choice: int, delta: OutputDelta, offsets: Offsets | None) -> bytes:
        """The chunk of a delta; nothing where it shows nothing. ``offsets``: where log-probabilities were asked for."""
        asked = offsets is not None
        positions = shown_positions(delta.logprobs, delta.finish_reason, self._ends) if asked else ()
        if not delta.text and not positions and delta.finish_reason is None:
            return b""
        logprobs: Any = None
        if asked and self.job.kind == "chat":
            logprobs = {"content": chat_logprobs(positions, self.tokenizer), "refusal": None}
        elif offsets is not None:
            logprobs = completion_logprobs(positions, self.tokenizer, offsets)
        content = {"delta": {"content": delta.text}} if self.job.kind == "chat" else {"text": delta.text}
        return self._chunk(choice, {**content, "logprobs": logprobs}, delta.finish_reason)

    def closing(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The chunk of the usage, if it was asked for."""
        if not self.job.include_usage:
            return b""
        return event({**self._head(stream=True), "choices": [], "usage": usage(outputs)})

    def offsets(self, at: int) -> Offsets:
        """Where the tokens of a sample of prompt ``at`` begin."""
        skip = self.job.params.skip_special_tokens
        return Offsets(self.tokenizer, len(self._echoed(at)), skip_special_tokens=skip)

    def _echoed(self, at: int) -> str:
        return self.prompt_texts[at] if self.prompt_texts else ""

    @property
    def _ends(self) -> frozenset[int]:
        return self.tokenizer.eos_ids | frozenset(self.job.params.stop_token_ids)

    def _head(self, *, stream: bool) -> dict[str, Any]:
        kind = "text_completion" if self.job.kind == "completion" else "chat.completion"
        if stream and self.job.kind == "chat":
            kind = "chat.completion.chunk"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.job.model}

    def _chunk(self, choice: int, content: dict[str, Any], reason: FinishReason | None) -> bytes:
        data = self._head(stream=True)
        data["choices"] = [{"index": choice, **content, "finish_reason": reason}]
        if self.job.include_usage:
            data["usage"] = None
        return event(data)

    def _choice(self, at: int, output: RequestOutput, sample: int) -> dict[str, Any]:
        found = output.samples[sample]
        index, text = at * self.job.params.n + sample, self._echoed(at) + found.text
        asked, logprobs = self.job.params.logprobs is not None, None
        positions = shown_positions(found.logprobs or (), found.finish_reason, self._ends)
        if self.job.kind == "chat":
            if asked:
                logprobs = {"content": chat_logprobs(positions, self.tokenizer), "refusal": None}
            content: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}}
        else:
            if asked:
                before = self._before(at, output) if self.job.echo else None
                logprobs = completion_logprobs(positions, self.tokenizer, self.offsets(at), before)
            content = {"text": text}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": found.finish_reason}

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


def shown_positions(
    positions: Sequence[PositionLogprobs], reason: FinishReason | None, ends: frozenset[int]
) -> Sequence[PositionLogprobs]:
    """Without the id that ended the sample."""
    if reason is FinishReason.STOP and positions and positions[-1].chosen.token_id in ends:
        return positions[:-1]
    return positions


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
