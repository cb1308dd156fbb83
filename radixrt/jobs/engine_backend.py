"""EngineBackend asks a model in this process, through an ``AsyncEngine``.

Invariants: an answer meets its constraint and is complete, by construction; an engine that was lent is not closed;
the KV of what all prompts begin with is computed once, by the first of them, and from then on evicted after
everything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from radixrt.cache.radix_tree import Hold
from radixrt.engine.async_engine import AsyncEngine
from radixrt.engine.core import Engine
from radixrt.errors import EngineClosed, InvalidRequest
from radixrt.grammar.constraint import Constraint
from radixrt.jobs.backends import Answer, BackendDown
from radixrt.jobs.prompt import Prompt
from radixrt.jobs.target import Target
from radixrt.jobs.tokens import PromptTokens
from radixrt.request import FinishReason, RequestOutput, SamplingParams


class EngineBackend:
    """A model in this process; see ``Backend``.

    Args:
        engine: one that is there already, in place of ``model`` and settings; it stays open.
        settings: fields of ``EngineConfig``.

    Raises:
        InvalidRequest: an engine and settings for one.
    """

    def __init__(
        self,
        target: Target,
        *,
        model: str | None = None,
        engine: AsyncEngine | Engine | None = None,
        temperature: float = 0.0,
        progress: bool = False,
        **settings: Any,
    ) -> None:
        if engine is not None and (model is not None or settings):
            raise InvalidRequest("engine", "is made already; give it or settings for a new one, not both")
        SamplingParams(temperature=temperature)
        self._target, self._temperature = target, temperature
        self._lent = isinstance(engine, AsyncEngine)
        if engine is None:
            self._engine = AsyncEngine(model, progress=progress, **settings)
        else:
            self._engine = engine if isinstance(engine, AsyncEngine) else AsyncEngine(engine=_lent(engine))
        self._tokens: PromptTokens
        self._hold: Hold | None = None
        self._held = False
        self._before = (0, 0)
        self.name = ""
        self.context_length = 0
        self.pool_tokens: int | None = None
        self.min_tokens = 1
        self._running = 1
        self._shared = 0

    @property
    def engine(self) -> AsyncEngine:
        return self._engine

    async def start(self) -> None:
        await self._engine.start()
        info = self._engine.model_info
        self.name, self.context_length, self.pool_tokens = info.name, info.context_length, info.pool_tokens
        self._tokens = PromptTokens(self._engine.tokenizer)
        self._running = await self._engine.call(lambda engine: engine.config.max_running_requests)
        stats = await self._engine.stats()
        self._before = (stats.prompt_tokens, stats.unique_tokens)
        compiling = await self._engine.call(lambda engine: engine.compile(self._target.constraint))
        self.min_tokens = (await asyncio.wrap_future(compiling)).min_tokens

    async def close(self) -> None:
        hold, self._hold = self._hold, None
        if self._lent:
            if hold is not None:
                try:
                    await self._engine.call(lambda engine: engine.release(hold))
                except EngineClosed:
                    pass
        else:
            await self._engine.close()

    def count(self, text: str) -> int:
        return len(self._engine.tokenizer.encode(text, add_special=False)) if text else 0

    async def counter(self, text: str) -> Callable[[str], int]:
        return self.count

    async def prompt_tokens(self, prompt: Prompt) -> int:
        return len(self._tokenized(prompt))

    def inflight(self, longest: int) -> int:
        """As many as decode together, the shared part counted once, and some more to choose the next from."""
        pool = self.pool_tokens or self.context_length
        fit = (pool - self._shared) // max(1, longest - self._shared)
        running = max(1, min(self._running, fit))
        return running + max(1, running // 4)

    async def answer(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        seed: int,
        logprobs: bool = False,
        constraint: Constraint | None = None,
    ) -> Answer:
        tokens = self._tokenized(prompt)
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=self._temperature,
            seed=seed,
            logprobs=0 if logprobs else None,
            constraint=self._target.constraint if constraint is None else constraint,
        )
        output: RequestOutput | None = None
        try:
            async for delta in self._engine.stream(tokens, params):
                output = delta.output
            if not self._held:
                await self._keep(prompt)
        except EngineClosed as error:
            raise BackendDown(f"the model in this process has stopped: {error}") from error
        assert output is not None
        if output.error is not None or output.finish_reason is FinishReason.ERROR:
            raise InvalidRequest("document", f"the model failed on it: {output.error}")
        if output.finish_reason is FinishReason.ABORT:
            raise BackendDown("the request was aborted: the model in this process is being closed")
        return Answer(
            text=output.text,
            prompt_tokens=output.prompt_tokens,
            cached_tokens=output.cached_tokens,
            output_tokens=output.completion_tokens,
            tokens=self._spelled(output) if logprobs else None,
            token_ids=output.token_ids,
        )

    async def optimum(self) -> float | None:
        """Of this engine since ``start``: a lent one may have answered others meanwhile."""
        stats = await self._engine.stats()
        prompt, unique = stats.prompt_tokens - self._before[0], stats.unique_tokens - self._before[1]
        return 1 - unique / prompt if prompt else None

    # ---- inside

    def _tokenized(self, prompt: Prompt) -> list[int]:
        if not self._shared:
            self._shared = len(self._tokens.shared(prompt))
        return self._tokens.tokens(prompt).tolist()

    async def _keep(self, prompt: Prompt) -> None:
        """Have the KV that all prompts begin with evicted last, now that it is there."""
        self._held = True
        shared = self._tokens.shared(prompt).tolist()
        if shared:
            self._hold = await self._engine.call(lambda engine: engine.hold(shared))

    def _spelled(self, output: RequestOutput) -> tuple[tuple[bytes, float], ...]:
        spell, ends = self._engine.tokenizer.token_bytes, self._engine.tokenizer.special_ids
        return tuple(
            (b"" if one.chosen.token_id in ends else spell(one.chosen.token_id), one.chosen.logprob)
            for one in output.logprobs or ()
        )


class _Lent(Engine):
    """Somebody's engine, which outlives the thread that drives it for us."""

    def __init__(self, engine: Engine) -> None:
        self.__dict__ = engine.__dict__

    def close(self) -> None:
        """What is still asked ends; the engine stays."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._mailbox.clear()


def _lent(engine: Any) -> Engine:
    if not isinstance(engine, Engine):
        raise InvalidRequest("engine", f"must be an AsyncEngine or an Engine, not {type(engine).__name__}")
    return _Lent(engine)
