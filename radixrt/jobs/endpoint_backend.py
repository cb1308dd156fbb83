"""EndpointBackend asks any server that speaks OpenAI's chat API: one request for each answer, judged when it is there.

Invariants: fields that only some servers know are sent only where needed, or where the server says that it is ours;
an answer that is cut off, refused or does not meet the constraint comes back with its ``problem``, never as complete;
at most ``concurrency`` requests are asked at a time.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.grammar.constraint import Choice, Constraint, JsonObject, JsonSchema, Regex
from radixrt.jobs.backends import Answer, BackendDown
from radixrt.jobs.http import EndpointDown, Http, Refused, address
from radixrt.jobs.prompt import Prompt
from radixrt.jobs.target import Target
from radixrt.jobs.verify import problem_of

CONCURRENCY = 16
BYTES_PER_TOKEN = 3  # of an estimate: English has 4 and more, so a document seldom has more tokens than estimated
CONTEXT = 131_072  # tokens, where a server does not tell
_MESSAGE = 8  # tokens around a message, in an estimate
_OPENAI = "api.openai.com"
_MARGIN = 1.1
_IMPOSSIBLE = -1e6  # a log-probability
_COUNTS = ("radixrt", "vllm")  # owners of models that have a /tokenize beside /v1


class EndpointBackend:
    """A server that speaks OpenAI's API; see ``Backend``.

    Args:
        endpoint: its address, with or without ``/v1``. model: as it names it; ``None``: the only one it has.
        concurrency: requests at a time; ``None``: what the pool of a radixrt server takes, else 16.
        context_length: tokens; ``None``: what the server tells, else 131072.
        http: further arguments of ``Http``: ``patience``, ``timeout``.
        environ: where the key is read from: RADIXRT_API_KEY, else OPENAI_API_KEY.

    Raises:
        InvalidRequest: no address, or a setting out of its range.
    """

    def __init__(
        self,
        target: Target,
        endpoint: str,
        *,
        model: str | None = None,
        temperature: float = 0.0,
        concurrency: int | None = None,
        context_length: int | None = None,
        environ: Mapping[str, str] = os.environ,
        **http: Any,
    ) -> None:
        if concurrency is not None and (
            isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1
        ):
            raise InvalidRequest("concurrency", f"={shown(concurrency)}: must be at least 1")
        self._target, self._temperature, self._model = target, temperature, model
        base = address(endpoint)
        key = environ.get("RADIXRT_API_KEY") or environ.get("OPENAI_API_KEY") or ""
        self._openai = base.host == _OPENAI
        self._http = Http(base, key.strip(), **http)
        self._concurrency = concurrency
        self._places = asyncio.Semaphore(concurrency or CONCURRENCY)
        self._owner = ""
        self._running: int | None = None
        self.name = ""
        self.context_length = context_length or 0
        self.pool_tokens: int | None = None
        self.min_tokens = 1
        self._answered = False  # a prompt, ever
        self._asking = asyncio.Lock()

    async def start(self) -> None:
        problem_of(self._target.constraint, "")  # what it takes to judge an answer is there
        await self._http.start()
        try:
            found = await self._look_up()
            if self._owner == "radixrt":
                await self._look_inside()
        except EndpointDown as error:
            raise BackendDown(str(error)) from None
        self.context_length = self.context_length or found or CONTEXT
        self._places = asyncio.Semaphore(self._concurrency or max(CONCURRENCY, self._running or 0))

    async def close(self) -> None:
        await self._http.close()

    def count(self, text: str) -> int:
        """An estimate: a token for every 3 bytes."""
        return -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN)

    async def counter(self, text: str) -> Callable[[str], int]:
        """Where the server counts tokens: by the tokens a byte that this text has, with a margin of a tenth for its pieces."""
        size = len(text.encode(errors="replace"))
        if self._owner not in _COUNTS or not size:
            return self.count
        total = await self._tokenized({"prompt": text, "add_special_tokens": False})
        if total is None:
            return self.count
        rate = _MARGIN * total / size
        return lambda piece: total if piece == text else math.ceil(len(piece.encode(errors="replace")) * rate)

    async def prompt_tokens(self, prompt: Prompt) -> int:
        if self._owner in _COUNTS:
            counted = await self._tokenized({"messages": prompt.messages})
            if counted is not None:
                return counted
        return sum(self.count(turn.content) + _MESSAGE for turn in prompt.turns)

    def inflight(self, longest: int) -> int:
        if self._concurrency is not None:
            return self._concurrency
        if self.pool_tokens is None:
            return CONCURRENCY
        fit = max(1, min(self._running or CONCURRENCY, self.pool_tokens // max(1, longest)))
        return fit + max(1, fit // 4)

    async def optimum(self) -> float | None:
        return None

    async def answer(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        seed: int,
        logprobs: bool = False,
        constraint: Constraint | None = None,
    ) -> Answer:
        asked = self._target.constraint if constraint is None else constraint
        body: dict[str, Any] = {
            "model": self.name,
            "messages": prompt.messages,
            "temperature": self._temperature,
            "seed": seed,
            "max_completion_tokens" if self._openai else "max_tokens": max_tokens,
            **self._constrained(asked),
        }
        if logprobs:
            body["logprobs"] = True
        try:
            async with self._places:
                reply = await self._http.ask("v1/chat/completions", body)
        except EndpointDown as error:
            raise BackendDown(str(error)) from None
        except Refused as error:
            every = error if error.status == 404 else await self._refuses_every(body, prompt, error)
            if every is not None:
                raise BackendDown(f"{self._http.name} {every}") from None
            raise InvalidRequest("endpoint", str(error)) from None
        self._answered = True
        return await asyncio.to_thread(_answer, reply, asked, max_tokens, logprobs)

    # ---- inside

    async def _refuses_every(self, body: Mapping[str, Any], prompt: Prompt, error: Refused) -> Refused | None:
        """Why a document of one letter is refused too, if it is: then it is not the document that is refused, but the
        model's name, the schema or a setting. Not asked once anything was answered.
        """
        if not 400 <= error.status < 500:
            return None
        async with self._asking:
            if not self._answered:
                short = [*prompt.messages[: prompt.shared], {"role": "user", "content": "x"}]
                try:
                    async with self._places:
                        await self._http.ask("v1/chat/completions", {**body, "messages": short})
                except EndpointDown as down:
                    raise BackendDown(str(down)) from None
                except Refused as again:
                    return again
                self._answered = True
        return None

    async def _look_up(self) -> int | None:
        """Choose the model; its context, where the server tells."""
        try:
            listed = (await self._http.ask("v1/models")).get("data")
        except Refused as error:
            if self._model is None:
                raise InvalidRequest("model", f"is missing, and {self._http.name}/v1/models {error}") from None
            listed = []
        models = {
            one["id"]: one
            for one in (listed if isinstance(listed, list) else [])
            if isinstance(one, dict) and isinstance(one.get("id"), str)
        }
        if self._model is None:
            if len(models) != 1:
                names = ", ".join(sorted(models)[:20]) or "none"
                raise InvalidRequest("model", f"is missing: {self._http.name} has {names}")
            self._model = next(iter(models))
        elif models and self._model not in models and not self._openai:
            raise InvalidRequest("model", f"={shown(self._model)}: is not served there{nearest(self._model, models)}")
        self.name = self._model
        chosen = models.get(self._model, {})
        self._owner = str(chosen.get("owned_by", ""))
        return _number(chosen.get("max_model_len")) or None

    async def _look_inside(self) -> None:
        """The pool of a radixrt server."""
        try:
            info = await self._http.ask("server_info")
        except Refused:  # it may be kept from those who only generate
            return
        self.pool_tokens = _number(info.get("pool_tokens")) or None
        engine = info.get("engine")
        self._running = _number(engine.get("max_running_requests")) or None if isinstance(engine, dict) else None

    async def _tokenized(self, body: dict[str, Any]) -> int | None:
        try:
            async with self._places:
                return _number((await self._http.ask("tokenize", {"model": self.name, **body})).get("count")) or None
        except Refused:
            return None
        except EndpointDown as error:
            raise BackendDown(str(error)) from None

    def _constrained(self, constraint: Constraint) -> dict[str, Any]:
        """The fields that ask for a constraint; none where this server has no way to enforce it, and the answer is only judged."""
        match constraint.spec:
            case JsonSchema():
                schema = json.loads(constraint.spec.schema)
                if self._owner != "radixrt" and constraint == self._target.constraint:
                    schema = self._target.schema  # without bounds that some servers refuse
                form = {"name": "answer", "schema": schema, "strict": True}
                return {"response_format": {"type": "json_schema", "json_schema": form}}
            case JsonObject():
                return {"response_format": {"type": "json_object"}}
            case Regex(pattern):
                return {"structured_outputs": {"regex": pattern}}
            case Choice(choices):
                return {"structured_outputs": {"choice": list(choices)}}
        return {"constraint": constraint.to_dict()} if self._owner == "radixrt" else {}


def _answer(reply: Mapping[str, Any], constraint: Constraint, max_tokens: int, logprobs: bool) -> Answer:
    """What a server's reply says."""
    choices = reply.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = choice.get("message")
    message = message if isinstance(message, dict) else {}
    text = message.get("content")
    text = text if isinstance(text, str) else ""
    usage = reply.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    prompt = _number(usage.get("prompt_tokens"))
    problem = problem_of(constraint, text)
    reason = choice.get("finish_reason")
    if not choice:
        problem = "the server answered without a choice"
    elif message.get("refusal"):
        problem = f"the model refused: {shown(message['refusal'], 200)}"
    elif reason == "length" and problem:
        problem = f"max_tokens={max_tokens} was reached before the answer was complete"
    elif problem and reason not in ("stop", "length"):
        problem = f"the server ended the answer with {shown(reason)}"
    return Answer(
        text=text,
        complete=not problem,
        problem=problem,
        prompt_tokens=prompt,
        cached_tokens=min(prompt, _number(details.get("cached_tokens")) if isinstance(details, dict) else 0),
        output_tokens=_number(usage.get("completion_tokens")),
        tokens=_tokens(choice.get("logprobs")) if logprobs else None,
    )


def _tokens(given: Any) -> tuple[tuple[bytes, float], ...] | None:
    entries = given.get("content") if isinstance(given, dict) else None
    if not isinstance(entries, list):
        return None
    found: list[tuple[bytes, float]] = []
    for entry in entries:
        if not isinstance(entry, dict):
            return None
        given_value, spelled = entry.get("logprob"), entry.get("bytes")
        if isinstance(given_value, bool) or not isinstance(given_value, (int, float)):
            return None
        value = min(0.0, max(_IMPOSSIBLE, given_value))  # also what is no float, or no number
        if isinstance(spelled, list) and all(type(byte) is int and 0 <= byte < 256 for byte in spelled):
            found.append((bytes(spelled), float(value)))
        elif isinstance(entry.get("token"), str):
            found.append((entry["token"].encode(errors="replace"), float(value)))
        else:
            return None
    return tuple(found)


def _number(value: Any) -> int:
    """A count; 0 where it is none."""
    return value if type(value) is int and 0 <= value < 2**53 else 0
