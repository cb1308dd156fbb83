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
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.request import FinishReason, OutputDelta, RequestOutput
from radixrt.server.chat import Content, Step, finished, named, off_loop, run_steps, weight
from radixrt.server.client import EngineClient
from radixrt.server.errors import Failure, RequestFailed, answer, error_response, failure_of, warning
from radixrt.server.openai_requests import Job, Rules, read_body, read_chat, read_completion, rules_of, tokens_of
from radixrt.server.openai_responses import Answer, ChatAnswer, event
from radixrt.server.streams import DONE, EventStream, merged

_KEEPALIVE = 15.0  # seconds

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Read = Callable[[Mapping[str, Any], Rules, str], Job]
T = TypeVar("T")


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
    job = await off_loop(weight(data, body), lambda: read(body, rules, prefix + uuid.uuid4().hex))
    headers = warning(job.warnings)
    keepalive: float = getattr(config, "stream_keepalive", _KEEPALIVE)
    if job.ask is not None:
        echoed = str(job.ask.messages[-1]["content"]) if job.echo else ""
        chat = ChatAnswer(job.id, int(time.time()), job, client.tokenizer, echoed)
        steps = run_steps(client, job.ask, config)
        if job.stream:
            return await _streamed(request, headers, keepalive, steps, _chat_teller(chat), {})
        async with aclosing(steps):
            return _json(chat.body([step async for step in steps]), headers)
    prompts = await off_loop(job.characters, lambda: tokens_of(job, client.tokenizer, client.info.context_length))
    made = Answer(job.id, int(time.time()), job, client.tokenizer, _echoed(job, client))
    deltas = _deltas(client, job, prompts)
    if job.stream:
        return await _streamed(request, headers, keepalive, deltas, _teller(made, len(prompts)), job.names)
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
    request: web.Request,
    headers: Mapping[str, str],
    keepalive: float,
    items: AsyncGenerator[T, None],
    told: Callable[[T], bytes],
    names: Mapping[str, str],
) -> web.StreamResponse:
    """Tell the items as they come; what goes wrong before anything is told is raised.

    Args:
        told: the events of an item; they may be none. names: what the body calls the fields that the engine finds fault with.
    """
    async with aclosing(items), EventStream(request, headers, keepalive) as events:
        last = DONE
        try:
            async for item in items:
                data = told(item)
                if data:
                    await events.write(data)
        except ConnectionResetError:
            raise
        except Exception as error:
            problem = named(error, names) if isinstance(error, InvalidRequest) else error
            if not events.begun:
                raise problem from None
            last = event(failure_of(problem).body) + DONE
        return await events.end(last)


def _chat_teller(made: ChatAnswer) -> Callable[[Step], bytes]:
    frames: dict[int, tuple[bytes, bytes]] = {}  # of the choices that were opened

    def told(step: Step) -> bytes:
        frame = frames.get(step.choice)
        if frame is None:
            frames[step.choice] = made.frame(step.choice)
            data = made.opening(step.choice) + made.piece(step)
        elif step.finish is None and len(step.parts) == 1 and isinstance(step.parts[0], Content) and not step.logprobs:
            return frame[0] + msgspec.json.encode(step.parts[0].text) + frame[1]  # nearly all are: as ``piece`` says it
        else:
            data = made.piece(step)
        if step.finish is not None and step.finish.usage is not None:
            data += made.closing(step.finish.usage)
        return data

    return told


def _teller(made: Answer, prompts: int) -> Callable[[tuple[int, OutputDelta]], bytes]:
    n = made.job.params.n
    outputs: list[RequestOutput | None] = [None] * prompts
    offsets = [made.offsets(i // n) for i in range(prompts * n)] if made.job.params.logprobs is not None else []
    opened = [False] * (prompts * n)

    def told(item: tuple[int, OutputDelta]) -> bytes:
        at, delta = item
        if delta.output is not None:
            outputs[at] = finished(delta.output)
        data = b""
        if delta.finish_reason not in (
            FinishReason.ABORT,
            FinishReason.ERROR,
        ):  # the last delta of the request says why
            choice = at * n + delta.index
            data = b"" if opened[choice] else made.opening(choice, at)
            opened[choice] = True
            data += made.piece(choice, delta, offsets[choice] if offsets else None)
        if delta.output is not None and None not in outputs:
            data += made.closing([output for output in outputs if output is not None])
        return data

    return told


def _deltas(
    client: EngineClient, job: Job, prompts: Sequence[Sequence[int]]
) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """The deltas of all prompts as they come, with the prompt's number."""
    return merged(
        [
            client.stream(
                prompt,
                job.params,
                request_id=job.id if len(prompts) == 1 else f"{job.id}-{at}",
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
