"""The OpenAI API: ``/v1/models``, ``/v1/chat/completions`` and ``/v1/completions``, over an ``EngineClient``.

Invariants: a request that is refused is answered with its error before anything is streamed; whatever ends a handler (an error, a client that
is gone: handlers must be cancelled then, ``AppRunner(handler_cancellation=True)``) ends its requests in the engine.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.request import FinishReason, OutputDelta, RequestOutput
from radixrt.server.client import EngineClient
from radixrt.server.errors import Failure, RequestFailed, answer, error_response, failure_of
from radixrt.server.openai_requests import Job, Rules, read_body, read_chat, read_completion, tokens_of
from radixrt.server.openai_responses import DONE, Answer, event

_SMALL = 16_384  # bytes or characters: more is read and tokenized off the event loop
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Read = Callable[[Mapping[str, Any], Rules], Job]


def routes(client: EngineClient, config: Any) -> list[web.RouteDef]:
    """The routes of the API.

    Args:
        config: has ``served_model_names`` (none: the model's own), ``default_chat_template_kwargs``, ``max_batch`` (most prompts in
            one request) and ``unknown_fields``: ``"refuse"`` or ``"warn"``; what is not there has its default.
    """
    created = int(time.time())

    def rules() -> Rules:
        return Rules(
            models=tuple(getattr(config, "served_model_names", None) or (client.info.model,)),
            template=getattr(config, "default_chat_template_kwargs", None) or {},
            warn=getattr(config, "unknown_fields", "refuse") == "warn",
            prompts=getattr(config, "max_batch", 2048),
        )

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
            return await _answer(client, rules(), read, prefix, request)
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
    client: EngineClient, rules: Rules, read: Read, prefix: str, request: web.Request
) -> web.StreamResponse:
    if request.content_type != "application/json":
        # also what keeps pages of other sites from asking a server on this machine: a browser would have to ask first
        problem = f"content-type={shown(request.content_type)}: must be application/json"
        raise RequestFailed(Failure(415, problem, None, "unsupported_media_type"))
    data = await request.read()
    job = await _call(len(data), lambda: read(read_body(data), rules))
    prompts = await _call(job.characters, lambda: tokens_of(job, client.tokenizer, client.info.context_length))
    made = Answer(prefix + uuid.uuid4().hex, int(time.time()), job, client.tokenizer, _echoed(job, client))
    headers = {"Warning": _warning(job.warnings)} if job.warnings else {}
    deltas = _deltas(client, job, prompts, made.id)
    try:
        async with aclosing(deltas):
            if job.stream:
                return await _stream(request, made, deltas, len(prompts), headers)
            outputs: list[RequestOutput | None] = [None] * len(prompts)
            async for at, delta in deltas:
                if delta.output is not None:
                    outputs[at] = _finished(delta.output)
            return _json(made.body([output for output in outputs if output is not None]), headers)
    except InvalidRequest as error:
        raise job.renamed(error) from None


async def _stream(
    request: web.Request,
    made: Answer,
    deltas: AsyncIterator[tuple[int, OutputDelta]],
    prompts: int,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Server-sent events; the headers go out with the first delta, so that a refusal can still be an answer of its own."""
    n = made.job.params.n
    response: web.StreamResponse | None = None
    outputs: list[RequestOutput | None] = [None] * prompts
    offsets = [made.offsets(i // n) for i in range(prompts * n)] if made.job.params.logprobs is not None else []
    opened = [False] * (prompts * n)
    try:
        async for at, delta in deltas:
            choice = at * n + delta.index
            if delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                if delta.output is not None:
                    _finished(delta.output)
                continue  # the last delta of the request says why
            data = b""
            if not opened[choice]:
                opened[choice] = True
                data = made.opening(choice, at)
            data += made.piece(choice, delta, offsets[choice] if offsets else None)
            if response is None:
                response = web.StreamResponse(headers={**_HEADERS, **headers})
                await response.prepare(request)
            if data:
                await response.write(data)
            if delta.output is not None:
                outputs[at] = _finished(delta.output)
        last = made.closing([output for output in outputs if output is not None]) + DONE
    except ConnectionResetError:
        raise
    except Exception as error:
        if response is None:
            raise
        problem = made.job.renamed(error) if isinstance(error, InvalidRequest) else error
        last = event(failure_of(problem).body) + DONE
    assert response is not None  # a request has at least one delta
    await response.write(last)
    await response.write_eof()
    return response


async def _deltas(
    client: EngineClient, job: Job, prompts: Sequence[Sequence[int]], name: str
) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """The deltas of all prompts as they come, with the prompt's number."""

    def begin(at: int) -> AsyncIterator[OutputDelta]:
        return client.stream(
            prompts[at],
            job.params,
            request_id=name if len(prompts) == 1 else f"{name}-{at}",
            priority=job.priority,
            cache_salt=job.cache_salt,
            deltas=job.stream,
        )

    if len(prompts) == 1:
        async with _closing(begin(0)) as only:
            async for delta in only:
                yield 0, delta
        return
    found: asyncio.Queue[tuple[int, OutputDelta | Exception | None]] = asyncio.Queue()

    async def follow(at: int) -> None:
        try:
            async with _closing(begin(at)) as deltas:
                async for delta in deltas:
                    found.put_nowait((at, delta))
            found.put_nowait((at, None))
        except Exception as error:
            found.put_nowait((at, error))

    tasks = [asyncio.ensure_future(follow(at)) for at in range(len(prompts))]
    try:
        running = len(tasks)
        while running:
            at, item = await found.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield at, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _closing:
    """Closes an iterator at the end, where it can be closed."""

    def __init__(self, deltas: AsyncIterator[OutputDelta]) -> None:
        self._deltas = deltas

    async def __aenter__(self) -> AsyncIterator[OutputDelta]:
        return self._deltas

    async def __aexit__(self, *_: object) -> None:
        close = getattr(self._deltas, "aclose", None)
        if close is not None:
            await close()


def _finished(output: RequestOutput) -> RequestOutput:
    """The output, if all of it is there."""
    reasons = {sample.finish_reason for sample in output.samples}
    if output.error is not None or FinishReason.ERROR in reasons or not reasons:
        raise RequestFailed(Failure(500, f"the request failed: {output.error}", None, "request_failed"))
    if FinishReason.ABORT in reasons:
        raise RequestFailed(Failure(503, "the request was aborted by the server", None, "request_aborted"))
    return output


def _echoed(job: Job, client: EngineClient) -> tuple[str, ...]:
    """What comes before the text of each prompt's samples."""
    if not job.echo:
        return ()
    if job.kind == "chat":
        return (job.messages[-1]["content"],)
    decode = partial(client.tokenizer.decode, skip_special_tokens=False)
    return tuple(prompt if isinstance(prompt, str) else decode(prompt) for prompt in job.prompts)


async def _call(size: int, function: Callable[[], Any]) -> Any:
    """Run a function here, or in a thread where its work is large."""
    return function() if size <= _SMALL else await asyncio.to_thread(function)


def _json(data: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), content_type="application/json", headers=headers)


def _warning(warnings: Sequence[str]) -> str:
    """A ``Warning`` header (RFC 7234) of printable ASCII."""

    def plain(text: str) -> str:
        return "".join(c if " " <= c <= "~" and c not in '"\\' else "?" for c in text[:400])

    return ", ".join(f'299 - "{plain(text)}"' for text in warnings)
