"""Engine owns the requests: it checks them, turns them into sequences, runs steps and turns sampled tokens into output.

Invariants: a request is answered exactly once, whatever happens to it; whatever one request raises ends that request alone;
one thread uses an engine at a time (``AsyncEngine`` gives it a thread of its own).
"""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from functools import partial
from typing import Any

from radixrt.cache.page_pool import PagePool
from radixrt.cache.radix_tree import Hold, RadixTree
from radixrt.config import EngineConfig
from radixrt.engine.exclusive import Exclusive
from radixrt.engine.inputs import Message, Prompt, params_for, read_template, split_prompts, to_ids
from radixrt.engine.intake import Intake, Ready
from radixrt.engine.live import LiveRequest, LiveSample
from radixrt.engine.overlap import Flights
from radixrt.engine.snapshot import snapshot
from radixrt.engine.stats import EngineStats, OptimalCache
from radixrt.errors import EngineClosed, InvalidRequest, RadixrtError
from radixrt.grammar.compile import compile_constraint
from radixrt.grammar.compile_cache import CompileCache
from radixrt.grammar.constraint import Constraint
from radixrt.grammar.matcher import CompiledConstraint
from radixrt.model.checkpoint import open_checkpoint
from radixrt.model.runner import ModelInfo, ModelRunner
from radixrt.model.source import resolve
from radixrt.model.tokenizer import Tokenizer
from radixrt.progress import progress as show_progress
from radixrt.request import FinishReason, OutputDelta, RequestOutput, SamplingParams
from radixrt.sampling.sampler import Sampled
from radixrt.sampling.spec import mix
from radixrt.scheduler.counters import SchedulerCounters
from radixrt.scheduler.hints import ProgramHint
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.sequence import Phase, Sequence

log = logging.getLogger("radixrt")

_PAUSE = 0.02  # seconds for a program's Python between two steps, before other programs take its place
_FLOOR = 8  # running sequences below which a step costs about the same with one more
_SHOW_FROM = 8  # prompts above which generate shows progress on a terminal


class Engine:
    """A model with a radix cache, in this process.

    Args:
        model: directory, ``.gguf`` file, hub id, or ``None`` for the embedded default.
        progress: show loading on the terminal.
        settings: every other field of ``EngineConfig``.

    Raises:
        ModelError: the model cannot be found or read.
        InvalidRequest: a setting is unknown, out of range, or cannot be honoured.
    """

    def __init__(self, model: str | None = None, *, progress: bool = False, **settings: Any) -> None:
        self.config = EngineConfig.from_kwargs(model=model, **settings)
        template = read_template(self.config.chat_template)
        checkpoint = open_checkpoint(resolve(model, progress=progress))
        with show_progress(f"loading {checkpoint.name}", unit="layers", show=progress) as bar:
            self.tokenizer: Tokenizer = checkpoint.tokenizer(template)
            self._runner = ModelRunner(self.config, checkpoint, lambda done, total: bar.update(done, total=total))
        self._info = self._runner.info
        self._pool = PagePool(self._runner.pages, self.config.page_size, self._runner.cluster)
        self._tree = None if self.config.disable_radix_cache else RadixTree(self.config.page_size)
        self._scheduler = Scheduler(
            self._pool,
            self._tree,
            chunk=self.config.chunked_prefill_size,
            max_running=self.config.max_running_requests,
            schedule_policy=self.config.schedule_policy,
            max_wait_steps=self.config.max_wait_steps,
            program_order=self.config.program_order,
            program_eviction=self.config.program_eviction,
            program_admission=self.config.program_admission,
            program_leases=self.config.program_leases,
            program_pause=_PAUSE,
            program_floor=_FLOOR,
        )
        self._compiler = CompileCache(compile=partial(compile_constraint, backend=self.config.grammar_backend))
        self._intake = Intake(self.config, self._info, self.tokenizer, self.compile)
        self._requests: dict[str, LiveRequest] = {}
        self._samples: dict[int, LiveSample] = {}  # by the uid of their sequence
        self._flights = Flights(
            self._scheduler, self._runner, self._runner.device, self._samples, ahead=self._runner.ahead
        )
        self._mailbox: deque[OutputDelta] = deque()  # made outside of a step, or read by someone else's loop
        self._next_uid = 0
        self._arrivals = 0
        self._closed = False
        self.stalled = False  # the last step found only what has to wait for a program's next step
        self._alone = Exclusive()
        self.reset_stats()

    # ---- whole answers

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or many, in order.

        Args:
            prompts: a string, token ids, or chat messages (``{"role": ..., "content": ...}``); or a list of these.
            params: for all, or a list of one for each.
            progress: show a progress bar; by default for more than 8 prompts on a terminal.

        Returns:
            One output for each prompt, also for a single one.

        Raises:
            InvalidRequest: an invalid prompt or parameter, before anything is started.
        """
        items = split_prompts(prompts)
        each = params_for(items, params)
        ready: list[Ready] = []
        asked = {one.constraint for one in each if isinstance(one, SamplingParams)}
        for constraint in asked:
            if constraint is not None:
                self.compile(constraint)  # all at once, in the workers; prepare waits for its own
        for index, (item, one) in enumerate(zip(items, each, strict=True)):
            try:
                ready.append(self.prepare(item, one))
            except InvalidRequest as error:
                if len(items) == 1:
                    raise
                raise InvalidRequest(f"prompts[{index}]", str(error)) from error
        results: dict[str, RequestOutput] = {}
        ids: list[str] = []
        running: set[str] = set()
        room = max(1, self.config.max_waiting_requests // max((p.n for p in each), default=1))
        show = progress if progress is not None else len(ready) > _SHOW_FROM and sys.stderr.isatty()
        started = time.monotonic()
        made = 0
        with show_progress("generating", len(ready), unit="prompts", show=show) as bar:
            try:
                while len(results) < len(ready):
                    while len(ids) < len(ready) and len(running) < room:
                        following = ready[len(ids)]
                        ids.append(uuid.uuid4().hex)
                        running.add(ids[-1])
                        self.submit(following, request_id=ids[-1])
                    for delta in self._step_for(running):
                        made += len(delta.token_ids)
                        if delta.output is not None:
                            results[delta.request_id] = delta.output
                            running.discard(delta.request_id)
                    rate = made / max(time.monotonic() - started, 1e-9)
                    bar.update(len(results), f"{rate:,.0f} tokens/s")
            except BaseException:
                self._forget(ids)
                raise
        return [results[request_id] for request_id in ids]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[OutputDelta]:
        """Answer one prompt piece by piece; the last delta carries the whole output.

        Other requests of this engine go on meanwhile. Leaving the iterator early aborts the request.
        """
        request_id = uuid.uuid4().hex
        try:
            self.add(prompt, params, request_id=request_id)
            while True:
                for delta in self._step_for({request_id}):
                    yield delta
                    if delta.output is not None:
                        return
        finally:
            self._forget([request_id])

    # ---- step by step

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> str:
        """Let a request wait; ``step`` works on it. Returns its id.

        Args:
            priority: smaller runs earlier, with ``schedule_policy="priority"``.
            cache_salt: KV is shared only between requests of the same salt.

        Raises:
            InvalidRequest: names the field, its value and what would be right.
            EngineClosed: after ``close``.
        """
        return self.submit(
            self.prepare(prompt, params), request_id=request_id, priority=priority, cache_salt=cache_salt
        )

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None, *, heal: bytes = b"") -> Ready:
        """The first half of ``add``, which any thread may do: tokenize and check; raises what ``add`` raises.

        Args:
            heal: bytes cut off the end of the prompt, which the output begins with but does not show: stop strings do not match
                in them, and the request gets one token more for them. See ``radixrt.engine.healing``.
        """
        self._check_open()
        return self._intake.generation(prompt, SamplingParams() if params is None else params, heal)

    def prepare_score(self, prefix: Seq[int], choices: Seq[Seq[int]]) -> Ready:
        """A request that generates nothing: its output's ``scores`` are the log-probabilities of each choice's tokens behind
        ``prefix``. What choices have in common is computed once. Any thread may do this.

        Raises:
            InvalidRequest: an empty prefix, no choices or too many, one that does not fit, ids that the model does not know.
        """
        self._check_open()
        return self._intake.scoring(prefix, choices)

    def prepare_embed(self, prompt: Prompt, pooling: str = "last") -> Ready:
        """A request that generates nothing: its output's ``embedding`` is the prompt's final hidden states, pooled (``last`` or
        ``mean``) and not normalized. Any thread may do this.

        Raises:
            InvalidRequest: an empty prompt, one that does not fit, ids that the model does not know, another pooling.
        """
        self._check_open()
        return self._intake.embedding(prompt, pooling)

    def healable(self, token_id: int) -> bytes:
        """The bytes of a token that ``heal`` should take off the end of a prompt, see ``TokenTable.healable``; else ``b""``."""
        return self._intake.table.healable(token_id)

    def submit(
        self,
        ready: Ready,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        hint: ProgramHint | None = None,
    ) -> str:
        """The second half of ``add``.

        Args:
            hint: where the request stands in a program, for the scheduler.
        """
        return self._add(ready, uuid.uuid4().hex if request_id is None else request_id, priority, cache_salt, hint)

    def hold(self, tokens: Seq[int], *, cache_salt: str = "", program: str = "") -> Hold | None:
        """Have what is cached of ``tokens`` evicted last; see ``Scheduler.hold``."""
        self._check_open()
        ids = to_ids("tokens", tokens, self._info.context_length)
        with self._alone:
            return self._scheduler.hold(ids, cache_salt, program)

    def release(self, hold: Hold, *, program: str = "") -> None:
        """Undo ``hold``."""
        with self._alone:
            self._scheduler.release(hold, program)

    def end_program(self, program: str) -> None:
        """No request of this program (``ProgramHint.program``) will follow."""
        with self._alone:
            self._scheduler.end_program(program)

    def compile(self, constraint: Constraint) -> Future[CompiledConstraint]:
        """Compile a constraint in a worker, or find it compiled; may be called from any thread.

        The future raises what ``Constraint.compile`` raises, or ``InvalidRequest`` where compiling took too long.
        """
        return self._compiler.get(constraint, self.tokenizer)

    def abort(self, request_id: str) -> bool:
        """End a request at once; its KV stays cached and its last delta comes with the next ``step``. False: no such request."""
        with self._alone:
            request = self._requests.get(request_id) if isinstance(request_id, str) else None
            if request is None:
                return False
            for item in request.samples:
                if item.finish_reason is None:
                    self._finish(item, FinishReason.ABORT)
                    self._post(item)
            return True

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do or to hand out."""
        return bool(self._requests or self._mailbox or self._flights)

    def step(self) -> list[OutputDelta]:
        """Take in one step; returns what it added to each sampled sequence. With ``overlap`` the next one is computed meanwhile."""
        self._check_open()
        with self._alone:
            launched = self._flights.launch()
            self.stalled = not launched and self._scheduler.has_work
            if launched:
                self._take_in()
            if self.config.check_integrity:
                self.check_integrity()
        deltas, self._mailbox = list(self._mailbox), deque()
        return deltas

    # ---- figures and care

    @property
    def model_info(self) -> ModelInfo:
        return self._info

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding: the model's hidden size."""
        return self._runner.model.hidden_size

    @property
    def closed(self) -> bool:
        return self._closed

    def stats(self) -> EngineStats:
        """Figures since the start or ``reset_stats``."""
        counters = self._scheduler.counters
        prompt = self._prompt_tokens
        pool = self._pool
        return EngineStats(
            requests=self._request_count,
            prompt_tokens=prompt,
            cached_tokens=prompt - self._computed_tokens,
            computed_tokens=self._computed_tokens,
            recomputed_tokens=counters.recomputed,
            generated_tokens=self._generated_tokens,
            forced_tokens=self._forced_tokens,
            hit_rate=1 - self._computed_tokens / prompt if prompt else 0.0,
            optimal_hit_rate=1 - self._unique_tokens / prompt if prompt else 0.0,
            unique_tokens=self._unique_tokens,
            pool_tokens=pool.capacity,
            pool_used=pool.capacity - pool.free_pages * pool.page_size,
            pool_evictable=self._tree.evictable_tokens if self._tree is not None else 0,
            cache_nodes=self._tree.nodes if self._tree is not None else 0,
            evicted_tokens=self._tree.evicted_tokens if self._tree is not None else 0,
            preemptions=counters.preemptions,
            **self._scheduler.figures(),
            steps=counters.steps,
            forward_tokens=counters.forward_tokens,
            draft_tokens=counters.drafted,
            accepted_tokens=self._accepted_tokens,
        )

    def snapshot(self, most: int) -> dict[str, Any]:
        """The cache and who stands in it, as plain data: at most ``most`` nodes; see ``radixrt.engine.snapshot``."""
        return snapshot(self._tree, self._scheduler, self._samples, most)

    def reset_stats(self) -> None:
        """Start counting anew; the cache stays, so a prompt cached before counts as cached and not as optimal."""
        self._scheduler.counters = SchedulerCounters()
        if self._tree is not None:
            self._tree.evicted_tokens = 0
        self._optimal = OptimalCache()
        self._request_count = self._prompt_tokens = self._computed_tokens = self._unique_tokens = 0
        self._generated_tokens = self._forced_tokens = self._accepted_tokens = 0

    def flush_cache(self) -> int:
        """Forget all KV that no running request holds; returns how many tokens."""
        freed = self._tree.flush() if self._tree is not None else []
        for slots in freed:
            self._pool.free(slots)
        return sum(len(slots) for slots in freed)

    def check_integrity(self) -> None:
        """Raises AssertionError where tree, pool, locks or requests contradict each other."""
        self._scheduler.check_integrity()
        live = {item.sequence.uid for r in self._requests.values() for item in r.samples if item.finish_reason is None}
        scheduled = {*self._scheduler.running, *self._scheduler.waiting}
        scheduled |= {s.uid for s in (*self._scheduler.preempted, *self._scheduler.suspects)}
        assert live == scheduled == set(self._samples), "requests and sequences differ"

    def close(self) -> None:
        """End every request and give up the memory."""
        with self._alone:
            if self._closed:
                return
            for request_id in list(self._requests):
                self.abort(request_id)
            self._closed = True
            self._mailbox.clear()
            self._compiler.close()
            self._flights.close()
            del self._runner

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside: requests

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed")

    def _add(self, ready: Ready, request_id: str, priority: int, cache_salt: str, hint: ProgramHint | None) -> str:
        params = ready.params
        with self._alone:
            self._check_open()
            # one that was aborted is taken until its last delta was handed out
            taken = isinstance(request_id, str) and (
                request_id in self._requests or any(delta.request_id == request_id for delta in self._mailbox)
            )
            if taken or not isinstance(request_id, str):
                raise InvalidRequest("request_id", f"={request_id!r}: must be a string that no running request has")
            if isinstance(priority, bool) or not isinstance(priority, int):
                raise InvalidRequest("priority", f"={priority!r}: must be an integer")
            if not isinstance(cache_salt, str):
                raise InvalidRequest("cache_salt", f"={cache_salt!r}: must be a string")
            prompts = ready.prompts()
            if self._scheduler.waiting_count + len(prompts) > self.config.max_waiting_requests:
                raise InvalidRequest("max_waiting_requests", f"={self.config.max_waiting_requests}: the queue is full")
            seed = params.seed if params.seed is not None else mix(self.config.seed, self._arrivals)
            self._arrivals += 1
            scoring = ready.choices is not None
            arrived, pooling = time.monotonic(), ready.pooling
            request = LiveRequest(
                request_id, ready.tokens, params, cache_salt, arrived, scoring=scoring, pooling=pooling
            )
            self._requests[request_id] = request
            self._request_count += 1
            for index, prompt in enumerate(prompts):
                limit = ready.limit(prompt, self._info.context_length)
                sequence = Sequence(self._next_uid, prompt, limit, cache_salt, priority, hint=hint)
                self._next_uid += 1
                own_seed = mix(seed, index) if index else seed
                item = LiveSample(
                    request,
                    index,
                    sequence,
                    self.tokenizer,
                    own_seed,
                    ready.constraint,
                    ready.healing,
                    self.config.speculation,
                )
                request.samples.append(item)
                self._samples[sequence.uid] = item
                self._scheduler.add(sequence)
            for item in request.samples:  # what is forced from the start is computed with the prompt
                try:
                    reason = self._jump(item)
                except Exception as error:
                    self._fail(item.sequence, error)
                else:
                    if reason is not None:
                        self._finish(item, reason)
                        self._post(item)
            return request_id

    def _forget(self, ids: list[str]) -> None:
        """Abort requests whose output nobody will read."""
        gone = set(ids)
        for request_id in gone:
            self.abort(request_id)
        with self._alone:
            self._mailbox = deque(delta for delta in self._mailbox if delta.request_id not in gone)

    def _step_for(self, ids: set[str]) -> list[OutputDelta]:
        """One step; keeps the deltas of other requests for whoever calls ``step`` next."""
        deltas = self.step()
        self._mailbox.extend(delta for delta in deltas if delta.request_id not in ids)
        ours = [delta for delta in deltas if delta.request_id in ids]
        if not ours and self._requests.keys().isdisjoint(ids):
            raise RadixrtError("the end of this request was taken by another call of step()")
        return ours

    # ---- inside: one step

    def _take_in(self) -> None:
        """Wait for the oldest step; what came of it goes to the mailbox."""
        try:
            results = self._flights.wait()
        except BaseException as error:
            for sequence in self._flights.fail():
                self._fail(sequence, error)
            if not isinstance(error, Exception):
                raise
            log.exception("a step failed")
            return
        now = time.monotonic()
        for item, sampled in results:
            if item.finish_reason is not None:  # its request failed just now, or was aborted meanwhile
                continue
            try:
                self._accept(item, sampled, now)
            except Exception as error:
                log.exception("request %s failed", item.request.request_id)
                self._fail(item.sequence, error)
        self._flights.follow()

    def _accept(self, item: LiveSample, sampled: list[Sampled], now: float) -> None:
        """Add what was sampled to its sample, and end it where it ends.

        ``sampled[i]`` follows ``i`` drafts, so it counts as long as what was appended before it, sampled or forced, is those drafts.
        """
        request, sequence = item.request, item.sequence
        request.begun(sequence, now)
        self._book(sequence)
        start, accepted = sequence.size, sequence.accepted
        reason: FinishReason | None = None
        error: str | None = None
        while reason is None and error is None and sequence.computed == sequence.size < start + len(sampled):
            result = sampled[sequence.size - start]
            error = result.error
            if error is None and not sequence.remaining:  # max_tokens = 0, only the prompt was wanted
                reason = FinishReason.LENGTH
            elif error is None:
                reason = self._append(item, result) or self._jump(item)
        sequence.drafts = 0
        self._accepted_tokens += sequence.accepted - accepted
        if error is not None:
            self._fail(sequence, RuntimeError(error))
            return
        if reason is not None:
            self._finish(item, reason)
        self._post(item)

    def _jump(self, item: LiveSample) -> FinishReason | None:
        """Append what the constraint forces, to be computed together with the next token; why the sample ends there, if it does.

        Not where log-probabilities are wanted: nothing is sampled here, so there are none.
        """
        params = item.request.params
        if not self.config.jump_forward or params.logprobs is not None or params.prompt_logprobs is not None:
            return None
        for token in item.forced():
            if token >= self._info.vocab_size:  # the tokenizer knows it, the model does not
                break
            item.forced_tokens += 1
            self._forced_tokens += 1
            reason = self._append(item, Sampled(token))
            if reason is not None:
                return reason
        return None

    def _append(self, item: LiveSample, result: Sampled) -> FinishReason | None:
        """Add one token to its sample; why the sample ends with it, if it does."""
        item.sequence.append(result.token)
        self._generated_tokens += 1
        reason = item.push(result)
        return FinishReason.LENGTH if reason is None and item.sequence.remaining == 0 else reason

    def _finish(self, item: LiveSample, reason: FinishReason) -> None:
        """End a sample; when it is the last of its request, make the request's output."""
        item.finish(reason)
        sequence = item.sequence
        self._book(sequence)
        computed = sequence.computed if sequence.phase is Phase.RUNNING else sequence.high_water
        self._optimal.output(sequence.tokens[: min(computed, sequence.size)], sequence.namespace)
        self._scheduler.finish(sequence)
        del self._samples[sequence.uid]
        request = item.request
        if all(other.finish_reason is not None for other in request.samples):
            request.complete(time.monotonic())
            del self._requests[request.request_id]

    def _book(self, sequence: Sequence) -> None:
        """Count a prompt once: when it has been computed, or as far as it was when its sequence ended."""
        if not sequence.booked:
            sequence.booked = True
            reached = min(sequence.high_water, sequence.prompt_len)
            self._prompt_tokens += reached
            self._computed_tokens += sequence.computed_prompt
            self._unique_tokens += self._optimal.prompt(sequence.tokens[:reached], sequence.namespace)

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        """End a sample with an error, and where choices are scored those beside it: some scores are no answer."""
        failed = self._samples[sequence.uid]
        failed.request.error = f"{type(error).__name__}: {error}"
        for item in failed.request.samples if failed.request.scoring else [failed]:
            if item.finish_reason is None:
                self._finish(item, FinishReason.ERROR)
                self._post(item)

    def _post(self, item: LiveSample) -> None:
        """Put what is new of a sample into the mailbox; of scored choices only what ends the request."""
        delta = item.delta()
        if delta.output is not None or not item.request.scoring:
            self._mailbox.append(delta)


__all__ = ["Engine", "Message", "Prompt"]
