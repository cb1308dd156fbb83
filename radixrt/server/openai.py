"""The OpenAI API: ``/v1/models``, ``/v1/chat/completions`` and ``/v1/completions``, over an ``EngineClient``.

Invariants: a request that is refused is answered with its error before anything is streamed; whatever ends a handler (an error, a client that
is gone: handlers must be cancelled then, ``AppRunner(handler_cancellation=True)``) ends its requests in the engine.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.request import FinishReason, OutputDelta, RequestOutput
from radixrt.server.chat import Step, finished, named, off_loop, run_steps, weight
from radixrt.server.client import EngineClient
from radixrt.server.errors import Failure, RequestFailed, answer, error_response, failure_of, warning
from radixrt.server.openai_requests import Job, Rules, read_body, read_chat, read_completion, rules_of, tokens_of
from radixrt.server.openai_responses import Answer, ChatAnswer, event
from radixrt.server.streams import DONE, EventStream, merged

_KEEPALIVE = 15.0  # seconds

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Read = Callable[[Mapping[str, Any], Rules], Job]


def routes(client: EngineClient, config: Any) -> list[web.RouteDef]:
    """The routes of the API.

    Args:
        config: has ``served_model_names`` (none: the model's own), ``default_chat_template_kwargs``, ``max_batch`` (most prompts in
            one request), ``unknown_fields``: ``"refuse"`` or ``"warn"``, ``stream_keepalive``, and what ``run_turn`` reads; what is not there has its default.
    """
    created = int(time.time())

    def rules() -> Rules:
        return rules_of(client.info.model, config)

    def model(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "radixrt",
            "max_model_len": client.info.context_length,
        }

    async def models(request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [model(name) for name in rules().models]})

    async def one_model(request: web.Request) -> web.Response:
        name, known = request.match_info["model"], rules().models
        if name not in known:
            problem = f"model={shown(name)}: is not served here{nearest(name, known)}"
            return error_response(404, problem, "model", "model_not_found")
        return _json(model(name))

    async def handle(read: Read, prefix: str, request: web.Request) -> web.StreamResponse:
        try:
            return await _answer(client, config, rules(), read, prefix, request)
        except (asyncio.CancelledError, ConnectionResetError):
            raise
        except web.HTTPException as error:
            if not isinstance(error, web.HTTPRequestEntityTooLarge):
                raise
            return answer(failure_of(error))
        except Exception as error:
            return answer(failure_of(error))

    return [
        web.get("/v1/models", models),
        web.get("/v1/models/{model:.+}", one_model),
        web.post("/v1/chat/completions", partial(handle, read_chat, "chatcmpl-")),
        web.post("/v1/completions", partial(handle, read_completion, "cmpl-")),
    ]


async def _answer(
    client: EngineClient, config: Any, rules: Rules, read: Read, prefix: str, request: web.Request
) -> web.StreamResponse:
    if request.content_type != "application/json":
        # also what keeps pages of other sites from asking a server on this machine: a browser would have to ask first
        problem = f"content-type={shown(request.content_type)}: must be application/json"
        raise RequestFailed(Failure(415, problem, None, "unsupported_media_type"))
    data = await request.read()
    body = await off_loop(len(data), lambda: read_body(data))
    job = await off_loop(weight(data, body), lambda: read(body, rules))
    name = prefix + uuid.uuid4().hex
    headers = warning(job.warnings)
    keepalive: float = getattr(config, "stream_keepalive", _KEEPALIVE)
    if job.ask is not None:
        ask = replace(job.ask, request_id=name)
        echoed = str(ask.messages[-1]["content"]) if job.echo else ""
        chat = ChatAnswer(name, int(time.time()), job, client.tokenizer, echoed)
        steps = run_steps(client, ask, config)
        if job.stream:
            return await _streamed(request, headers, keepalive, _chat_chunks(chat, steps))
        async with aclosing(steps):
            return _json(chat.body([step async for step in steps]), headers)
    prompts = await off_loop(job.characters, lambda: tokens_of(job, client.tokenizer, client.info.context_length))
    made = Answer(name, int(time.time()), job, client.tokenizer, _echoed(job, client))
    deltas = _deltas(client, job, prompts, name)
    if job.stream:
        return await _streamed(request, headers, keepalive, _chunks(made, deltas, len(prompts)))
    outputs: list[RequestOutput | None] = [None] * len(prompts)
    async with aclosing(deltas):
        try:
            async for at, delta in deltas:
                if delta.output is not None:
                    outputs[at] = finished(delta.output)
        except InvalidRequest as error:
            raise named(error, job.names) from None
    return _json(made.body([output for output in outputs if output is not None]), headers)


async def _streamed(
    request: web.Request, headers: Mapping[str, str], keepalive: float, chunks: AsyncGenerator[bytes, None]
) -> web.StreamResponse:
    """Tell the chunks; what goes wrong before the first is raised."""
    async with aclosing(chunks), EventStream(request, headers, keepalive) as events:
        last = DONE
        try:
            async for data in chunks:
                await events.write(data)
        except ConnectionResetError:
            raise
        except Exception as error:
            if not events.begun:
                raise
            last = event(failure_of(error).body) + DONE
        return await events.end(last)


async def _chat_chunks(made: ChatAnswer, steps: AsyncGenerator[Step, None]) -> AsyncGenerator[bytes, None]:
    opened: set[int] = set()
    async with aclosing(steps):
        async for step in steps:
            opening = b"" if step.choice in opened else made.opening(step.choice)
            opened.add(step.choice)
            yield opening + made.piece(step)
            if step.finish is not None and step.finish.usage is not None:
                closing = made.closing(step.finish.usage)
                if closing:
                    yield closing


async def _chunks(
    made: Answer, deltas: AsyncGenerator[tuple[int, OutputDelta], None], prompts: int
) -> AsyncGenerator[bytes, None]:
    n = made.job.params.n
    outputs: list[RequestOutput | None] = [None] * prompts
    offsets = [made.offsets(i // n) for i in range(prompts * n)] if made.job.params.logprobs is not None else []
    opened = [False] * (prompts * n)
    async with aclosing(deltas):
        try:
            async for at, delta in deltas:
                if delta.output is not None:
                    outputs[at] = finished(delta.output)
                if delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                    continue  # the last delta of the request says why
                choice = at * n + delta.index
                data = b"" if opened[choice] else made.opening(choice, at)
                opened[choice] = True
                data += made.piece(choice, delta, offsets[choice] if offsets else None)
                if data:
                    yield data
        except InvalidRequest as error:
            raise named(error, made.job.names) from None
    closing = made.closing([output for output in outputs if output is not None])
    if closing:
        yield closing


def _deltas(
    client: EngineClient, job: Job, prompts: Sequence[Sequence[int]], name: str
) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """The deltas of all prompts as they come, with the prompt's number."""
    return merged(
        [
            client.stream(
                prompt,
                job.params,
                request_id=name if len(prompts) == 1 else f"{name}-{at}",
                priority=job.priority,
                cache_salt=job.cache_salt,
                deltas=job.stream,
            )
            for at, prompt in enumerate(prompts)
        ]
    )


def _echoed(job: Job, client: EngineClient) -> tuple[str, ...]:
    """What comes before the text of each prompt's samples."""
    if not job.echo:
        return ()
    decode = partial(client.tokenizer.decode, skip_special_tokens=False)
    return tuple(prompt if isinstance(prompt, str) else decode(prompt) for prompt in job.prompts)


def _json(data: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), content_type="application/json", headers=headers)
