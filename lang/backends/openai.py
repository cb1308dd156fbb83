"""A backend that asks any server which speaks OpenAI's API, through the ``openai`` package: one streamed request for each generation.

Invariants: what the API cannot express is refused before a request is sent, never left out of it; a reply that ended early, was filtered or does not
meet its constraint is an error, not a shorter answer; at most ``max_concurrency`` requests run; a cancelled step's stream is closed. The server's
tokens are not known: ``token_ids`` are empty, and text between generations is sent again with each request.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from lang.backends.base import Capabilities, Counters, Emit, ProgramInfo
from lang.backends.matching import checker
from lang.backends.steps import Step, StepSession, before, chatml, label, transcript
from radixrt.engine.nodes import Gen, Node, Output, Role, Select, Usage
from radixrt.errors import InvalidRequest, RadixrtError, shown
from radixrt.grammar.constraint import Choice, Constraint, GrammarText, JsonObject, JsonSchema, LiteralText, Regex
from radixrt.request import FinishReason, PositionLogprobs, SamplingParams, TokenLogprob

Dialect = Literal["vllm", "sglang"]

COMPLETION_MODELS = frozenset({"gpt-3.5-turbo-instruct", "babbage-002", "davinci-002"})
MOST_STOPS = 4
GREEDY = "greedy_token_selection"
_PARAMS = frozenset(
    "max_tokens temperature top_p presence_penalty frequency_penalty logit_bias seed n stop logprobs constraint".split()
)
_PLAIN = SamplingParams()
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_HOST = "api.openai.com"


class Unsupported(RadixrtError):
    """The API has no way to ask for this."""


class OpenAI:
    """A model behind OpenAI's API.

    Args:
        model: as the server names it.
        base_url: the server's ``/v1``; ``None``: OpenAI, or what the environment says.
        api_key: ``None``: what the environment says; a server of your own may need none.
        is_chat_model: chat messages or plain completion; ``None``: chat, except for the few models that are known to complete.
        client: an ``openai.AsyncOpenAI`` of your own, used on one event loop and not closed here.
        max_concurrency: requests at a time; more wait here.
        timeout: seconds for one request; ``None``: what the ``openai`` package sets.
        extra_body_constraints: the server is vLLM or SGLang, so that regexes, choices and grammars can be sent in its own fields. Without it chat models
            take ``json_schema`` (strict) and ``json_object``, and completion models no constraint.
        continue_final_message: the server can continue a message that has begun (vLLM and SGLang can, OpenAI cannot).

    ``select`` needs log-probabilities of texts that the model did not write, which this API does not give: there is only ``greedy_token_selection``, as a
    greedy generation that the server constrains to the choices (``extra_body_constraints``), without scores. In a chat model a ``gen``
    stands inside of an assistant message. Entries of ``logprobs`` have ``token_id`` -1, and rank 0 where a token is not among the listed ones.
    """

    name = "openai"

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        is_chat_model: bool | None = None,
        client: Any = None,
        max_concurrency: int = 64,
        timeout: float | None = None,
        extra_body_constraints: Dialect | None = None,
        continue_final_message: bool = False,
    ) -> None:
        if not isinstance(model, str) or not model:
            raise InvalidRequest("model", f"={shown(model)}: must be the name of a model")
        if isinstance(max_concurrency, bool) or not isinstance(max_concurrency, int) or max_concurrency < 1:
            raise InvalidRequest("max_concurrency", f"={shown(max_concurrency)}: must be at least 1")
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0
        ):
            raise InvalidRequest("timeout", f"={shown(timeout)}: must be a number of seconds above 0")
        if extra_body_constraints not in (None, "vllm", "sglang"):
            raise InvalidRequest(
                "extra_body_constraints", f"={shown(extra_body_constraints)}: must be 'vllm', 'sglang' or None"
            )
        if client is not None and (base_url is not None or api_key is not None or timeout is not None):
            raise InvalidRequest("client", "has a base_url, an api_key and a timeout of its own: give it alone")
        self.model = model
        self.is_chat_model = model not in COMPLETION_MODELS if is_chat_model is None else bool(is_chat_model)
        if continue_final_message and not self.is_chat_model:
            raise InvalidRequest("continue_final_message", "=True: is for chat models; a completion continues anyway")
        self._dialect = extra_body_constraints
        self._continue = continue_final_message
        self._options: dict[str, Any] = {"base_url": base_url, "api_key": api_key}
        if timeout is not None:
            self._options["timeout"] = timeout
        self._given = client
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places: asyncio.Semaphore
        self._max_concurrency = max_concurrency
        self._counters = Counters()
        self._sessions: dict[StepSession, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.capabilities = Capabilities(
            params=_PARAMS,
            constraints=_kinds(self.is_chat_model, self._dialect),
            select_methods=frozenset({GREEDY} if self._dialect else ()),
            select_sampling=False,
            healing=False,
            completion=not self.is_chat_model,
            tools=False,
        )

    async def start(self) -> None:
        """Makes the client. Nothing is sent.

        Raises:
            RadixrtError: the ``openai`` package is not installed.
            InvalidRequest: no API key is given or found in the environment.
        """
        self._connect()

    async def aclose(self) -> None:
        for session in list(self._sessions):
            session.fail_all("the OpenAI backend was closed")
        if self._tasks:
            await asyncio.wait(self._tasks)  # their streams are closed before their connections are
        client, self._client, self._loop = self._client, None, None
        if client is not None and client is not self._given:
            await client.close()

    def open(self, info: ProgramInfo, emit: Emit) -> StepSession:
        session = StepSession(info, emit, self._begin, self._forget)
        self._sessions[session] = time.monotonic()
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

    def _forget(self, session: StepSession) -> None:
        self._sessions.pop(session, None)

    def _begin(self, session: StepSession, step: Step) -> None:
        node = step.node
        try:
            if isinstance(node, Role):
                if not self.is_chat_model:
                    raise Unsupported(
                        f"{self.model!r} completes text and has no {node.role} messages; for a chat model set is_chat_model=True"
                    )
                session.finish(step, (Output(chatml(node)),), Usage())
                return
            asked = self._asked(session, step)
        except Unsupported as error:
            session.fail(step, "unsupported", f"{label(node)}: {error}")
        except InvalidRequest as error:
            session.fail(step, "invalid", f"{label(node)}: {error}")
        else:
            step.job = task = session.loop.create_task(self._run(session, step, asked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _asked(self, session: StepSession, step: Step) -> _Asked:
        """The request of a step. Raises Unsupported or InvalidRequest where there is none."""
        node = step.node
        if isinstance(node, Select):
            if self._dialect is None:
                raise Unsupported(
                    "select needs scores of the choices, which this API does not give; for a vLLM or SGLang server set "
                    f"extra_body_constraints and use {GREEDY}"
                )
            if node.method != GREEDY:
                raise Unsupported(f"method={node.method!r}: scores are not to be had, so only {GREEDY!r} is possible")
            if node.temperature:
                raise Unsupported(
                    f"temperature={node.temperature}: scores are not to be had, so nothing is sampled by them"
                )
            choices = tuple(session.bound(parts) for parts in node.choices)
            if "" in choices:
                raise Unsupported("an empty choice: a server answers with at least one token")
            params = SamplingParams(
                temperature=0.0,
                max_tokens=max((len(choice.encode()) for choice in choices), default=1) + 8,
                constraint=Constraint.choice(choices),
            )
        else:
            assert isinstance(node, Gen), node
            params = node.params
        body = self._sampled(params)
        extra: dict[str, Any] = {}
        if self.is_chat_model:
            body["messages"], unfinished = _messages(before(step), self._continue)
            if unfinished:
                extra |= {"add_generation_prompt": False, "continue_final_message": True}
        else:
            body["prompt"] = "".join([text for _, text in before(step)])
        if params.constraint is not None:
            fields = _constrained(params.constraint, self.is_chat_model, self._dialect, getattr(node, "name", ""))
            if "response_format" in fields:
                body["response_format"] = fields.pop("response_format")
            extra |= fields
        if extra:
            body["extra_body"] = extra
        return _Asked(body, params)

    def _sampled(self, params: SamplingParams) -> dict[str, Any]:
        """The fields of a request that say how it is sampled."""
        for name in SamplingParams.__dataclass_fields__:
            if name not in _PARAMS and getattr(params, name) != getattr(_PLAIN, name):
                raise Unsupported(f"{name}={shown(getattr(params, name))}: OpenAI's API has no such parameter")
        if len(params.stop) > MOST_STOPS:
            raise Unsupported(f"stop holds {len(params.stop)} strings: OpenAI's API takes at most {MOST_STOPS}")
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": params.temperature,
        }
        if params.max_tokens == 0:
            raise Unsupported("max_tokens=0: OpenAI's API generates at least 1 token")
        if params.max_tokens is not None:
            body["max_completion_tokens" if self.is_chat_model else "max_tokens"] = params.max_tokens
        elif not self.is_chat_model:
            raise Unsupported("max_tokens=None: a completion that is not told ends after 16 tokens; give a number")
        # A server of one's own may have other defaults than OpenAI, whose newer models take only the default.
        if params.top_p != 1.0 or self._foreign:
            body["top_p"] = params.top_p
        for name in ("presence_penalty", "frequency_penalty", "seed", "n"):
            if getattr(params, name) != getattr(_PLAIN, name):
                body[name] = getattr(params, name)
        if params.stop:
            body["stop"] = list(params.stop)
        if params.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        if params.logprobs is not None:
            body |= (
                {"logprobs": True, "top_logprobs": params.logprobs}
                if self.is_chat_model
                else {"logprobs": params.logprobs}
            )
        return body

    @property
    def _foreign(self) -> bool:
        return getattr(self._connect().base_url, "host", "") != _HOST

    async def _run(self, session: StepSession, step: Step, asked: _Asked) -> None:
        try:
            began = time.monotonic()
            client = self._connect()  # before the places, which are the loop's as well
            async with self._places:
                reply = await self._reply(client, session, step, asked)
            problem = _problem(reply, asked.params)
            if problem:
                raise RadixrtError(problem)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            step.job = None
            session.fail(step, "error", f"{label(step.node)}: {_told(error)}")
            return
        started = max(0.0, began - self._sessions.get(session, began))
        usage = reply.usage(started, began)
        counted = self._counters
        counted.requests += 1
        counted.prompt_tokens += usage.prompt_tokens
        counted.cached_tokens += usage.cached_tokens
        counted.generated_tokens += usage.generated_tokens
        session.finish(step, tuple(sample.output(asked.params.stop) for sample in reply.samples), usage)

    async def _reply(self, client: Any, session: StepSession, step: Step, asked: _Asked) -> _Reply:
        api = client.chat.completions if self.is_chat_model else client.completions
        reply = _Reply([_Sample() for _ in range(asked.params.n)], sent=time.monotonic())
        # A select is chosen when it is whole: its text is not streamed.
        streamed = isinstance(step.node, Gen)
        async with await api.create(**asked.body) as stream:
            async for chunk in stream:
                if chunk.usage is not None:
                    reply.counted = chunk.usage
                for choice in chunk.choices:
                    if not 0 <= choice.index < len(reply.samples):
                        raise RadixrtError(f"the server sent sample {choice.index} of n={len(reply.samples)}")
                    sample = reply.samples[choice.index]
                    text = _add(sample, choice, self.is_chat_model)
                    if text and not reply.first:
                        reply.first = time.monotonic()
                    if text and streamed:
                        session.delta(step, choice.index, text)
        reply.ended = time.monotonic()
        return reply

    def _connect(self) -> Any:
        """The client of the running loop: connections cannot be shared among loops."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client = self._given if self._given is not None else self._made()
            self._loop, self._places = loop, asyncio.Semaphore(self._max_concurrency)
        return self._client

    def _made(self) -> Any:
        try:
            openai: Any = import_module("openai")
        except ImportError:
            raise RadixrtError("OpenAI needs the openai package: pip install openai") from None
        try:
            return openai.AsyncOpenAI(**self._options)
        except openai.OpenAIError as error:
            if self._options["api_key"] is not None:
                raise RadixrtError(f"OpenAI: {error}") from None
            if self._options["base_url"] is not None:
                return openai.AsyncOpenAI(**{**self._options, "api_key": "none"})
            raise InvalidRequest(
                "api_key", ": is not given, and OPENAI_API_KEY is not set; base_url= names a server of your own"
            ) from None


# ---- what is asked


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request's fields, and the parameters they were made from."""

    body: dict[str, Any]
    params: SamplingParams


def _messages(nodes: list[tuple[Node, str]], continued: bool) -> tuple[list[dict[str, str]], bool]:
    """The messages of a request, and whether its last one has begun and is to be continued."""
    chat = transcript(nodes)
    if chat.outside.strip():
        raise Unsupported(
            f"the text {shown(chat.outside.strip(), 40)} is in no message, and a chat model takes messages only: "
            "put it into system(...) or user(...)"
        )
    if not chat.unfinished or chat.messages[-1][0] != "assistant":
        where = f"inside of the {chat.messages[-1][0]} message" if chat.unfinished else "outside of a message"
        raise Unsupported(f"stands {where}: a chat model answers in assistant(...)")
    prefix = chat.messages[-1][1]
    if prefix and not continued:
        raise Unsupported(
            f"the assistant message begins with {shown(prefix, 40)}, which OpenAI's API cannot continue: begin the message with "
            "the generation, or set continue_final_message=True where the server is vLLM or SGLang"
        )
    kept = chat.messages if prefix else chat.messages[:-1]
    if not kept:
        raise Unsupported("there is no message to answer: begin with system(...) or user(...)")
    return [{"role": role, "content": content} for role, content in kept], bool(prefix)


def _kinds(chat: bool, dialect: Dialect | None) -> frozenset[str]:
    """Kinds of constraints that can be asked for."""
    if dialect is not None:
        return frozenset({"json_schema", "json_object", "regex", "choice", "literal", "grammar"})
    return frozenset({"json_schema", "json_object"} if chat else ())


def _constrained(constraint: Constraint, chat: bool, dialect: Dialect | None, name: str) -> dict[str, Any]:
    """The fields that ask for a constraint. Raises Unsupported."""
    spec = constraint.spec
    kind = constraint.to_dict()["type"]
    if kind not in _kinds(chat, dialect):
        hint = "" if dialect else "; where the server is vLLM or SGLang, set extra_body_constraints"
        raise Unsupported(f"a constraint of type {kind} cannot be asked for{hint}")
    if isinstance(spec, JsonSchema):
        if spec.registry:
            raise Unsupported("a json_schema with a registry cannot be asked for: put the schemas into its $defs")
        schema = json.loads(spec.schema)
        if chat:
            title = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64] or "output"
            return {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": title, "schema": schema, "strict": True},
                }
            }
        return {"structured_outputs": {"json": schema}} if dialect == "vllm" else {"json_schema": spec.schema}
    if isinstance(spec, JsonObject):
        if chat:
            return {"response_format": {"type": "json_object"}}
        return (
            {"structured_outputs": {"json_object": True}} if dialect == "vllm" else {"json_schema": '{"type":"object"}'}
        )
    if isinstance(spec, GrammarText):
        if dialect == "vllm":
            return {"structured_outputs": {"grammar": spec.text}}
        if spec.syntax == "lark":
            raise Unsupported("SGLang reads ebnf grammars, not lark")
        return {"ebnf": spec.text}
    if isinstance(spec, Regex):
        return {"structured_outputs": {"regex": spec.pattern}} if dialect == "vllm" else {"regex": spec.pattern}
    assert isinstance(spec, (Choice, LiteralText)), spec
    choices = spec.choices if isinstance(spec, Choice) else (spec.text,)
    if dialect == "vllm":
        return {"structured_outputs": {"choice": list(choices)}}
    return {"regex": "(" + "|".join(map(re.escape, choices)) + ")"}


# ---- what is answered


@dataclass(slots=True)
class _Sample:
    """One sample as it arrives."""

    pieces: list[str] = field(default_factory=list)
    reason: str | None = None
    stop_reason: str | int | None = None
    refusal: str = ""
    logprobs: list[PositionLogprobs] = field(default_factory=list)

    def output(self, stops: Any) -> Output:
        stop = self.stop_reason if self.stop_reason in stops or isinstance(self.stop_reason, int) else None
        return Output(
            "".join(self.pieces),
            finish_reason=_REASONS[self.reason or ""],
            stop_reason=stop,
            logprobs=tuple(self.logprobs) or None,
        )


@dataclass(slots=True)
class _Reply:
    """A reply as it arrives; times are of the monotonic clock."""

    samples: list[_Sample]
    sent: float
    first: float = 0.0
    ended: float = 0.0
    counted: Any = None

    def usage(self, started: float, began: float) -> Usage:
        prompt = getattr(self.counted, "prompt_tokens", None) or 0
        details = getattr(self.counted, "prompt_tokens_details", None)
        cached = min(prompt, getattr(details, "cached_tokens", None) or 0)
        first = self.first or self.ended
        return Usage(
            prompt_tokens=prompt,
            cached_tokens=cached,
            computed_tokens=prompt - cached,
            generated_tokens=getattr(self.counted, "completion_tokens", None) or 0,
            tokenized=prompt,
            started=started,
            queue_time=self.sent - began,
            prefill_time=first - self.sent,
            decode_time=self.ended - first,
        )


def _add(sample: _Sample, choice: Any, chat: bool) -> str:
    """Takes what a chunk says about a sample; the text it adds."""
    if choice.finish_reason:
        sample.reason = choice.finish_reason
        sample.stop_reason = getattr(choice, "stop_reason", None) or getattr(choice, "matched_stop", None)
    logprobs = choice.logprobs
    if chat:
        text = choice.delta.content or ""
        sample.refusal += getattr(choice.delta, "refusal", None) or ""
        for entry in (logprobs.content or ()) if logprobs is not None else ():
            top = {other.token: other.logprob for other in entry.top_logprobs or ()}
            sample.logprobs.append(_position(entry.token, entry.logprob, top))
    else:
        text = choice.text or ""
        if logprobs is not None and logprobs.tokens and logprobs.token_logprobs:
            tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
            for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, tops):
                sample.logprobs.append(_position(token, value, top or {}))
    if text:
        sample.pieces.append(text)
    return text


def _position(token: str, value: float, top: dict[str, float]) -> PositionLogprobs:
    ranked = sorted(top, key=lambda other: -top[other])
    rank = ranked.index(token) + 1 if token in top else 0
    return PositionLogprobs(
        TokenLogprob(-1, value, rank), tuple(TokenLogprob(-1, top[other], i + 1) for i, other in enumerate(ranked))
    )


def _problem(reply: _Reply, params: SamplingParams) -> str:
    """Why a reply that arrived is none."""
    check = checker(params.constraint) if params.constraint is not None else None
    for i, sample in enumerate(reply.samples):
        which = f"sample {i}: " if len(reply.samples) > 1 else ""
        if sample.refusal:
            return f"{which}the model refused: {shown(sample.refusal, 200)}"
        if sample.reason is None:
            return f"{which}the server's stream ended before the generation did"
        if sample.reason not in _REASONS:
            return f"{which}the server ended the generation with {sample.reason!r}"
        text = "".join(sample.pieces)
        if check is not None and sample.reason == "length":
            return f"{which}max_tokens={params.max_tokens} was reached before its constraint was met: {shown(text)}"
        if check is not None and (problem := check(text)):
            return f"{which}the server did not enforce the constraint: {shown(text)} {problem}"
    return ""


def _told(error: Exception) -> str:
    """An error in the server's words."""
    body = getattr(error, "body", None)
    if isinstance(body, dict):
        inner = body.get("error")
        message = (
            (inner.get("message") if isinstance(inner, dict) else None) or body.get("message") or body.get("detail")
        )
        if message:
            status = getattr(error, "status_code", None)
            return f"the server answered {status}: {message}" if status else f"the server answered: {message}"
    cause = error.__cause__
    text = str(error) or type(error).__name__
    return f"{text} ({type(cause).__name__}: {cause})" if cause is not None and str(cause) else text
