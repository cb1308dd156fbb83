"""The native API: ``/generate`` as SGLang's clients write it, tokens and text, scoring of choices, and what the server tells about itself.

Invariants: a field that is not known is refused with the nearest one, or warned about where the settings say so; log-probabilities are the
model's own; nothing here knows how a request runs.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from aiohttp import web

from radixrt import __version__
from radixrt.checks import flag, integer, number
from radixrt.engine.inputs import Prompt, check_ids, to_ids, to_tokens
from radixrt.engine.program_text import ProgramText
from radixrt.errors import InvalidRequest, RadixrtError, nearest, shown
from radixrt.grammar.constraint import Constraint
from radixrt.request import FinishReason, OutputDelta, PositionLogprobs, RequestOutput, SampleOutput, SamplingParams
from radixrt.sampling.choices import Scored, check_choices, decide, method_of
from radixrt.server.chat import CHARS_PER_TOKEN
from radixrt.server.config import ServerConfig
from radixrt.server.dialects import substring_of
from radixrt.server.errors import Failure, RequestFailed, UnknownField, failure_of, ignored
from radixrt.server.limits import Gate, check_fields, check_model, read_object
from radixrt.server.streams import DONE, EventStream, merged

T = TypeVar("T")

GENERATE = (
    "text",
    "input_ids",
    "sampling_params",
    "stream",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
    "rid",
    "priority",
    "cache_salt",
    "model",
)
TOKENIZE = ("prompt", "text", "messages", "add_special_tokens", "add_generation_prompt", "return_token_strs", "model")  # fmt: skip
DETOKENIZE = ("tokens", "skip_special_tokens", "model")  # fmt: skip
SCORE = ("prompt", "input_ids", "choices", "method", "temperature", "seed", "cache_salt", "model")  # fmt: skip
# SGLang's names of sampling parameters, and ours; our own names are taken as well.
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop",
    "sampling_seed": "seed",
}
_CONSTRAINTS = ("json_schema", "regex", "ebnf", "substring", "constraint")
_PLAIN = tuple(
    name for name in SamplingParams.__dataclass_fields__ if name not in ("constraint", "logprobs", "prompt_logprobs")
)
SAMPLING = (*_PLAIN, *_RENAMED, *_CONSTRAINTS, "spaces_between_special_tokens")
_LEAST = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt of a ``/generate``, and how it is answered."""

    prompt: Prompt
    params: SamplingParams
    rid: str
    input_logprobs: bool
    top: int
    texts: bool


class Native:
    """The routes of the native API."""

    def __init__(self, gate: Gate, config: ServerConfig) -> None:
        self._gate, self._config = gate, config
        self._probe: asyncio.Task[None] | None = None
        self._text: ProgramText | None = None

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self.generate),
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
            web.post("/score", self.score),
            web.post("/flush_cache", self.flush_cache),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
        ]

    # ---- /generate

    async def generate(self, request: web.Request) -> web.StreamResponse:
        data = await read_object(request)
        headers = self._unknown("/generate", data, GENERATE)
        single, asked = self._asked(data, headers)
        priority = integer("priority", data.get("priority", 0), -(2**31), 2**31 - 1)
        salt = data.get("cache_salt", "")
        if not isinstance(salt, str) or len(salt) > 1024:
            raise InvalidRequest("cache_salt", f"={shown(salt)}: must be a string of at most 1024 characters")
        if flag("stream", data.get("stream", False)):
            sources = [self._events(one, priority, salt) for one in asked]
            async with EventStream(request, headers, self._config.stream_keepalive) as events:
                return await self._stream(events, asked, single, sources)
        answers = await _together([self._answer(one, priority, salt) for one in asked])
        flat = [one for answer in answers for one in answer]
        return _json(flat[0] if single and len(flat) == 1 else flat, headers)

    def _unknown(self, owner: str, data: dict[str, Any], valid: Sequence[str]) -> dict[str, str]:
        """Refuse unknown fields, or take them out and say so in a header."""
        check_model(data.get("model"), self._config, self._gate)
        if self._config.unknown_fields == "refuse":
            check_fields(owner, data, valid)
            return {}
        unknown = [name for name in data if name not in valid]
        for name in unknown:
            del data[name]
        return ignored(unknown)

    def _asked(self, data: Mapping[str, Any], headers: dict[str, str]) -> tuple[bool, list[Asked]]:
        given = [name for name in ("text", "input_ids") if data.get(name) is not None]
        if len(given) != 1:
            raise InvalidRequest("text", f": give text or input_ids, {'not both' if given else 'one of them'}")
        field = given[0]
        value = data[field]
        if not isinstance(value, str if field == "text" else list) and not isinstance(value, list):
            raise InvalidRequest(field, f"={shown(value)}: must be {'a string' if field == 'text' else 'token ids'}, or a list of these")  # fmt: skip
        if not value:
            raise InvalidRequest(field, "is empty")
        single = isinstance(value, str) or (field == "input_ids" and not isinstance(value[0], list))
        prompts = [value] if single else value
        most = self._config.max_batch
        if len(prompts) > most:
            raise InvalidRequest(field, f" has {len(prompts)} prompts: at most max_batch={most} are taken")
        for i, prompt in enumerate(prompts):
            if not isinstance(prompt, str if field == "text" else list) or not prompt:
                kind = "a string" if field == "text" else "a list of token ids"
                raise InvalidRequest(field if single else f"{field}[{i}]", f"={shown(prompt)}: must be {kind}, and not empty")  # fmt: skip
            if field == "input_ids":
                ids = to_ids(field if single else f"{field}[{i}]", prompt, self._gate.info.context_length)
                check_ids(field if single else f"{field}[{i}]", ids, self._gate.info.vocab_size)

        def each(name: str, default: Any, *, lists: bool = False) -> list[Any]:
            found = data.get(name)
            found = default if found is None else found
            if isinstance(found, list) and not lists:
                if len(found) != len(prompts):
                    raise InvalidRequest(name, f" has {len(found)} entries for {len(prompts)} prompts")
                return found
            return [found] * len(prompts)

        rids = each("rid", "")
        logprobs, tops = each("return_logprob", False), each("top_logprobs_num", 0)
        starts = each("logprob_start_len", -1)
        texts = flag("return_text_in_logprobs", data.get("return_text_in_logprobs", False))
        made: dict[int, dict[str, Any]] = {}  # one for all is read once
        asked = []
        for i, sampling in enumerate(each("sampling_params", {})):
            key = id(sampling)
            if key not in made:
                made[key] = self._sampling(sampling, headers)
            values = dict(made[key])
            top = integer("top_logprobs_num", tops[i], 0, 2**31 - 1)
            wanted = flag("return_logprob", logprobs[i])
            start = integer("logprob_start_len", starts[i], -1, 2**31 - 1)
            if start > 0:
                raise InvalidRequest("logprob_start_len", f"={start}: must be -1 (the output) or 0 (the prompt too)")
            if wanted:
                values["logprobs"] = top
                if start == 0:
                    values["prompt_logprobs"] = top
            if not isinstance(rids[i], str) or len(rids[i]) > 200:
                raise InvalidRequest("rid", f"={shown(rids[i])}: must be a string of at most 200 characters")
            asked.append(Asked(prompts[i], SamplingParams(**values), rids[i] or uuid.uuid4().hex, start == 0, top, texts))  # fmt: skip
        return single, asked

    def _sampling(self, given: Any, headers: dict[str, str]) -> dict[str, Any]:
        """Our sampling parameters from SGLang's."""
        if not isinstance(given, Mapping):
            raise InvalidRequest("sampling_params", f"={shown(given)}: must be an object")
        values: dict[str, Any] = {}
        unknown = []
        for name, value in given.items():
            if name not in SAMPLING:
                if self._config.unknown_fields == "refuse":
                    problem = f": sampling_params has no such field{nearest(name, SAMPLING)}"
                    raise UnknownField(shown(name).strip("'\""), problem)
                unknown.append(name)
            elif name == "spaces_between_special_tokens":
                if flag(name, value) is not True:
                    raise InvalidRequest(name, "=False: is not supported")
            elif name not in _CONSTRAINTS:
                ours = _RENAMED.get(name) or str(name)
                if ours in values:
                    raise InvalidRequest(name, f": is {ours} again; give one of them")
                if value is None and ours not in ("max_tokens", "seed"):
                    continue
                values[ours] = value
        headers.update(ignored(unknown))
        if isinstance(values.get("logit_bias"), Mapping):
            values["logit_bias"] = {_token(key): bias for key, bias in values["logit_bias"].items()}
        constraints = [name for name in _CONSTRAINTS if given.get(name) is not None]
        if len(constraints) > 1:
            raise InvalidRequest(constraints[1], f": {constraints[0]} is given too; an output has one constraint")
        if constraints:
            values["constraint"] = _constraint(constraints[0], given[constraints[0]])
        return values

    async def _answer(self, one: Asked, priority: int, salt: str) -> list[dict[str, Any]]:
        began = time.perf_counter()
        output: RequestOutput | None = None
        stream = self._gate.stream(one.prompt, one.params, request_id=uuid.uuid4().hex, priority=priority, cache_salt=salt, deltas=False)  # fmt: skip
        async with aclosing(stream):
            async for delta in stream:
                output = delta.output or output
        if output is None or (output.error is not None):
            problem = "the request ended without an answer" if output is None else str(output.error)
            raise RequestFailed(Failure(500, problem, None, "request_failed"))
        return [self._sample(one, output, sample, time.perf_counter() - began) for sample in output.samples]

    async def _stream(
        self, events: EventStream, asked: list[Asked], single: bool, sources: list[AsyncGenerator[dict[str, Any], None]]
    ) -> web.StreamResponse:
        """Each event holds the whole text so far, as SGLang's do; what goes wrong before the first one is raised."""
        last = DONE
        first = list(accumulate((one.params.n for one in asked), initial=0))  # the number of a prompt's first sample
        async with aclosing(merged(sources)) as told:
            try:
                async for which, event in told:
                    if not single or asked[which].params.n > 1:
                        event["index"] += first[which]
                    else:
                        del event["index"]
                    await events.write(_event(event))
            except ConnectionResetError:
                raise
            except Exception as error:
                if not events.begun:
                    raise
                last = _event(failure_of(error).body) + DONE
        return await events.end(last)

    async def _events(self, one: Asked, priority: int, salt: str) -> AsyncGenerator[dict[str, Any], None]:
        began = time.perf_counter()
        so_far: dict[int, _SoFar] = {}
        stream = self._gate.stream(one.prompt, one.params, request_id=uuid.uuid4().hex, priority=priority, cache_salt=salt)  # fmt: skip
        async with aclosing(stream):
            async for delta in stream:
                if delta.output is not None:
                    if delta.output.error is not None:
                        raise RequestFailed(Failure(500, delta.output.error, None, "request_failed"))
                    seconds = time.perf_counter() - began
                    for sample in delta.output.samples:
                        yield {**self._sample(one, delta.output, sample, seconds), "index": sample.index}
                elif delta.text or delta.token_ids:
                    told = so_far.setdefault(delta.index, _SoFar())
                    told.add(delta)
                    meta: dict[str, Any] = {
                        "id": one.rid,
                        "finish_reason": None,
                        "completion_tokens": len(told.token_ids),
                    }
                    if one.params.logprobs is not None:
                        meta |= self._output_logprobs(one, told.logprobs)
                    yield {
                        "text": told.text,
                        "output_ids": list(told.token_ids),
                        "meta_info": meta,
                        "index": delta.index,
                    }

    def _sample(self, one: Asked, output: RequestOutput, sample: SampleOutput, seconds: float) -> dict[str, Any]:
        reason: dict[str, Any] = {"type": str(sample.finish_reason)}
        if sample.finish_reason is FinishReason.STOP:
            reason["matched"] = sample.stop_reason
        elif sample.finish_reason is FinishReason.LENGTH:
            reason["length"] = len(sample.token_ids)
        meta: dict[str, Any] = {
            "id": one.rid,
            "finish_reason": reason,
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": len(sample.token_ids),
            "cached_tokens": output.cached_tokens,
            "e2e_latency": seconds,
            "queue_time": output.queue_time,
            "prefill_time": output.prefill_time,
            "decode_time": output.decode_time,
        }
        if one.params.logprobs is not None:
            meta |= self._output_logprobs(one, sample.logprobs or ())
            if one.input_logprobs:
                entries = output.prompt_logprobs or ()
                first = [[None, output.prompt_token_ids[0], self._spelled(one, output.prompt_token_ids[0])]]
                meta["input_token_logprobs"] = first + [self._entry(one, at.chosen) for at in entries if at is not None]
                if one.top:
                    meta["input_top_logprobs"] = [
                        None if at is None else [self._entry(one, t) for t in at.top] for at in entries
                    ]
        return {"text": sample.text, "output_ids": list(sample.token_ids), "meta_info": meta}

    def _output_logprobs(self, one: Asked, positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
        found: dict[str, Any] = {"output_token_logprobs": [self._entry(one, at.chosen) for at in positions]}
        if one.top:
            found["output_top_logprobs"] = [[self._entry(one, token) for token in at.top] for at in positions]
        return found

    def _entry(self, one: Asked, token: Any) -> list[Any]:
        return [max(token.logprob, _LEAST), token.token_id, self._spelled(one, token.token_id)]

    def _spelled(self, one: Asked, token: int) -> str | None:
        return self._gate.tokenizer.decode([token], skip_special_tokens=False) if one.texts else None

    # ---- tokens and text

    async def tokenize(self, request: web.Request) -> web.Response:
        """Token ids of ``prompt`` (or ``text``), or of ``messages`` as the model's chat template writes them."""
        data = await read_object(request)
        headers = self._unknown("/tokenize", data, TOKENIZE)
        given = [name for name in ("prompt", "text", "messages") if data.get(name) is not None]
        if len(given) != 1:
            raise InvalidRequest("prompt", ": give prompt or messages, " + ("not both" if given else "one of them"))
        field, tokenizer = given[0], self._gate.tokenizer
        special = flag("add_special_tokens", data.get("add_special_tokens", True))
        generation = flag("add_generation_prompt", data.get("add_generation_prompt", True))
        if field == "messages":
            messages = data["messages"]
            if not isinstance(messages, list) or not messages:
                raise InvalidRequest("messages", f"={shown(messages)}: must be a list of messages")
            kwargs = self._config.default_chat_template_kwargs
            text = await asyncio.to_thread(tokenizer.render_chat, messages, add_generation_prompt=generation, **kwargs)
            special = True
        else:
            text = data[field]
        self._bounded(field, text)
        ids = await asyncio.to_thread(tokenizer.encode, text, add_special=special)
        found = {"tokens": ids, "count": len(ids), "max_model_len": self._gate.info.context_length}
        if flag("return_token_strs", data.get("return_token_strs", False)):
            found["token_strs"] = [tokenizer.token_text(token) for token in ids]
        return _json(found, headers)

    def _bounded(self, field: str, text: Any) -> None:
        """Tokenizing holds up everybody, and nothing that runs here is longer."""
        context = self._gate.info.context_length
        if isinstance(text, str) and len(text) > context * CHARS_PER_TOKEN:
            raise InvalidRequest(field, f"has {len(text)} characters; context_length={context} tokens cannot hold it")

    async def detokenize(self, request: web.Request) -> web.Response:
        """The text of ``tokens``."""
        data = await read_object(request)
        headers = self._unknown("/detokenize", data, DETOKENIZE)
        tokens = data.get("tokens")
        if not isinstance(tokens, list):
            raise InvalidRequest("tokens", f"={shown(tokens)}: must be a list of token ids")
        skip = flag("skip_special_tokens", data.get("skip_special_tokens", False))
        ids = to_ids("tokens", tokens, 2**31 - 1)
        check_ids("tokens", ids, self._gate.info.vocab_size)
        text = await asyncio.to_thread(self._gate.tokenizer.decode, ids.tolist(), skip_special_tokens=skip)
        return _json({"prompt": text, "text": text}, headers)

    # ---- /score

    async def score(self, request: web.Request) -> web.Response:
        """How likely each of ``choices`` is behind a prompt, and which of them ``method`` takes."""
        data = await read_object(request)
        headers = self._unknown("/score", data, SCORE)
        choices = check_choices(data.get("choices"))
        self._bounded("choices", "".join(choices))
        for i, choice in enumerate(choices):
            if not choice.isascii() and any("\ud800" <= letter <= "\udfff" for letter in choice):
                raise InvalidRequest(f"choices[{i}]", f"={shown(choice)}: is not Unicode text")
        most = self._gate.info.settings.get("max_choices", 4096)
        if len(choices) > most:
            raise InvalidRequest("choices", f" has {len(choices)}: at most max_choices={most} are taken")
        method = method_of(data.get("method", "token_length_normalized"))
        temperature = number("temperature", data.get("temperature", 0.0), 0.0, 100.0)
        seed = integer("seed", data.get("seed"), -(2**63), 2**64 - 1, optional=True)
        salt = data.get("cache_salt", "")
        if not isinstance(salt, str) or len(salt) > 1024:
            raise InvalidRequest("cache_salt", f"={shown(salt)}: must be a string of at most 1024 characters")
        given = [name for name in ("prompt", "input_ids") if data.get(name) is not None]
        if len(given) != 1:
            raise InvalidRequest("prompt", ": give prompt or input_ids, " + ("not both" if given else "one of them"))
        prompt, context = data[given[0]], self._gate.info.context_length
        if given[0] == "input_ids":
            prefix = to_ids("input_ids", prompt, context)
            check_ids("input_ids", prefix, self._gate.info.vocab_size)
        else:
            if not isinstance(prompt, str):
                raise InvalidRequest("prompt", f"={shown(prompt)}: must be a string")
            prefix = await asyncio.to_thread(to_tokens, prompt, self._gate.tokenizer, context)
        if self._text is None:
            self._text = ProgramText(self._gate.tokenizer)
        text = self._text
        tokens = tuple(tuple(text.after(choice).tolist()) if choice else () for choice in choices)
        prefixes = [prefix.tolist()]
        if method.needs_unconditional:
            prefixes.append(text.begin().tokens().tolist())
        outputs = await _together(
            [self._gate.score(one, tokens, request_id=uuid.uuid4().hex, cache_salt=salt) for one in prefixes]
        )
        for output in outputs:
            if output.scores is None:
                raise RequestFailed(Failure(500, output.error or "was aborted", None, "request_failed"))
        alone = outputs[1].scores if method.needs_unconditional else None
        decision = decide(Scored(choices, tokens, outputs[0].scores or (), alone), method, temperature, seed)
        return _json(
            {
                "index": decision.index,
                "choice": decision.choice,
                "scores": _finite(decision.scores),
                "logprobs": _finite(decision.logprobs),
                "probabilities": list(decision.probabilities),
                "confidence": decision.confidence,
                "tokens": [list(one) for one in tokens],
                "token_logprobs": [_finite(one) for one in outputs[0].scores or ()],
                "usage": {
                    "prompt_tokens": sum(one.cached_tokens + one.computed_tokens for one in outputs),
                    "cached_tokens": sum(one.cached_tokens for one in outputs),
                },
            },
            headers,
        )

    # ---- the server itself

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Forget all KV that nothing running holds."""
        return _json({"flushed_tokens": await self._gate.flush_cache()})

    async def server_info(self, request: web.Request) -> web.Response:
        """Settings and figures; ``lang`` reads the figures at the top level."""
        info = self._gate.info
        return _json(
            {
                "version": __version__,
                "model": info.model,
                "context_length": info.context_length,
                "vocab_size": info.vocab_size,
                "dtype": info.dtype,
                "device": info.device,
                "kernels": info.kernels,
                **await self._gate.stats(),
                "tasks": len(asyncio.all_tasks()),  # of the front
                "engine": {name: _shown(value) for name, value in info.settings.items()},
                "server": self._config.shown(),
            }
        )

    async def answering(self) -> bool:
        """The engine really answers. However many ask, it is asked once at a time."""
        if not self._gate.healthy:
            return False
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._ask())
        try:
            async with asyncio.timeout(self._config.health_timeout):
                await asyncio.shield(self._probe)
        except (TimeoutError, RadixrtError):
            return False
        return True

    async def _ask(self) -> None:
        await self._gate.stats()


class _SoFar:
    """What a sample has said until now."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []

    def add(self, delta: OutputDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs


async def _together(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them give; whatever ends one of them ends all."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _constraint(name: str, value: Any) -> Constraint:
    if name == "constraint":
        if not isinstance(value, Mapping):
            raise InvalidRequest("constraint", f"={shown(value)}: must be an object")
        return Constraint.from_dict(value)
    if name == "json_schema":
        if not isinstance(value, (str, Mapping, bool)):
            raise InvalidRequest("json_schema", f"={shown(value)}: must be a JSON Schema, as an object or as text")
        return Constraint.json_schema(value)
    if name == "substring":
        return substring_of(value)
    if not isinstance(value, str):
        raise InvalidRequest(name, f"={shown(value)}: must be a string")
    return Constraint.regex(value) if name == "regex" else Constraint.grammar(value, "ebnf")


def _token(key: Any) -> int:
    try:
        return int(key)
    except (TypeError, ValueError):
        raise InvalidRequest("logit_bias", f" has the key {shown(key)}: must be a token id") from None


def _shown(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def _finite(values: Sequence[float]) -> list[float | None]:
    """JSON has no infinity: what is impossible is ``null``."""
    return [value if math.isfinite(value) else None for value in values]


def _bytes(value: Any) -> bytes:
    """JSON that any client can read: halves of characters stay escaped."""
    return json.dumps(value, separators=(",", ":")).encode()


def _event(value: Any) -> bytes:
    return b"data: " + _bytes(value) + b"\n\n"


def _json(value: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=_bytes(value), content_type="application/json", headers=headers)
