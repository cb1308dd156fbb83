"""Programs owns the running request graphs: it starts each node as soon as what it needs is there, without asking its client.

Invariants: used by the engine's thread only. Every ``Gen``, ``Select`` and ``Role`` node of an open program is answered by one ``Done``
or ``Failed``; a node that fails takes with it what needs it, and nothing else. A program that is closed has no request, no hold and no state left.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from radixrt.cache.page_pool import IntArray
from radixrt.engine.core import Engine
from radixrt.engine.healing import healed
from radixrt.engine.node_facts import because, kind, leased, steps_below, told
from radixrt.engine.nodes import (
    MAX_NODES,
    Choosing,
    Delta,
    Done,
    Event,
    Failed,
    Gen,
    Node,
    Output,
    Ref,
    Role,
    Select,
    Template,
    Text,
    Usage,
    Wait,
    check_order,
    refs,
)
from radixrt.engine.program_text import EMPTY, ProgramText, TokenState
from radixrt.engine.runs import Runs
from radixrt.engine.tool_text import Reader
from radixrt.errors import EngineClosed, InvalidRequest
from radixrt.request import FinishReason, OutputDelta, RequestOutput, SamplingParams
from radixrt.sampling.choices import Scored, decide, method_of
from radixrt.scheduler.hints import ProgramHint
from radixrt.scheduler.leases import Lease

Listener = Callable[[OutputDelta | BaseException], None]
Emit = Callable[[Event], None]
_PLAIN = SamplingParams()


@dataclass(slots=True)
class _Live:
    """A node that was added. ``states``: what each of its samples leaves behind, once it is done."""

    node: Node
    missing: int = 0  # nodes it needs that are not done
    dependents: list[_Live] = field(default_factory=list)
    children: list[_Live] = field(default_factory=list)
    cancelled: bool = False  # nothing may continue it, also where it was done before
    states: tuple[TokenState, ...] | None = None
    outputs: tuple[Output, ...] = ()
    usage: Usage | None = None
    failed: str | None = None
    requests: tuple[str, ...] = ()  # that run for it
    holds: dict[int, Any] = field(default_factory=dict)  # of its samples' KV, by sample
    start: TokenState = EMPTY  # the settled state it generates behind
    heal: bytes = b""
    started: float = 0.0
    waiting: Future[Any] | None = None  # for a constraint that is being compiled
    params: SamplingParams = _PLAIN  # of a ``Gen``, as it runs
    reader: Reader | None = None
    lease: Lease | None = None  # while the program waits for the tools that it called

    @property
    def over(self) -> bool:
        return self.states is not None or self.failed is not None


class _Program:
    """An open program."""

    def __init__(self, id: str, name: str, order: int, cache_salt: str, stream: bool, emit: Emit) -> None:
        self.id, self.name, self.order, self.cache_salt, self.stream, self.emit = (
            id,
            name,
            order,
            cache_salt,
            stream,
            emit,
        )
        self.live: dict[int, _Live] = {}
        self.ready: deque[_Live] = deque()
        self.began = time.monotonic()
        self.steps = 0  # generations that are over
        self.number = 0
        self.closed = False


class Programs:
    """The programs of one engine.

    Args:
        listen: ``listen(request_id, listener)``: from now on the listener gets the deltas of a request, and the exception when
            the engine stops; ``None``: nobody does.
        post: run a function on the engine's thread soon; callable from any thread.
    """

    def __init__(
        self,
        engine: Engine,
        listen: Callable[[str, Listener | None], None],
        post: Callable[[Callable[[Engine], Any]], None],
    ) -> None:
        self._engine = engine
        self._listen = listen
        self._post = post
        self._text = ProgramText(engine.tokenizer)
        self._open: dict[str, _Program] = {}
        self._count = 0
        self._runs = Runs()
        self._leases = engine._scheduler.leases

    @property
    def tokenized(self) -> int:
        """Tokens that programs' text was turned into so far; a text found again counts nothing."""
        return self._text.tokenized

    @property
    def running(self) -> int:
        return len(self._open)

    def runs(self, known: Iterable[int] = ()) -> dict[str, Any]:
        """What is remembered of programs; see ``Runs.told``."""
        return self._runs.told(self._open, known)

    # ---- what a client may do

    def open(
        self, id: str, emit: Emit, *, name: str = "", order: int = 0, cache_salt: str = "", stream: bool = False
    ) -> None:
        """Begin a program.

        Args:
            emit: gets its events, on this thread.
            stream: also ``Delta`` events.

        Raises:
            InvalidRequest: the id is taken.
        """
        if id in self._open:
            raise InvalidRequest("program", f"={id!r}: a program of this id is running")
        self._open[id] = program = _Program(id, name, order, cache_salt, stream, emit)
        program.number = self._runs.number()

    def add(self, id: str, nodes: Sequence[Node]) -> None:
        """Add nodes; those that need nothing unfinished begin at once.

        Raises:
            InvalidRequest: no such program, too many nodes, an id that is taken, or a parent or reference that is no earlier node.
        """
        program = self._program(id)
        if len(program.live) + len(nodes) > MAX_NODES:
            raise InvalidRequest("program", f"={id!r}: has more than {MAX_NODES:,} nodes")
        check_order(nodes, program.live)
        for node in nodes:
            live = _Live(node)
            program.live[node.id] = live
            needs = {ref.node for ref in refs(node)}
            if node.parent is not None:
                needs.add(node.parent)
                parent = program.live[node.parent]
                parent.children.append(live)
                if parent.cancelled and parent.failed is None:
                    self._fail(program, live, "cancelled", "continues what was cancelled")
                    continue
            blocked = next((n for n in needs if program.live[n].failed is not None), None)
            if blocked is not None:
                self._fail(program, live, "cancelled", because(program.live[blocked]))
                continue
            for other in needs:
                if not program.live[other].over:
                    program.live[other].dependents.append(live)
                    live.missing += 1
            if not live.missing:
                program.ready.append(live)
        self._run(program)

    def cancel(self, id: str, nodes: Iterable[int]) -> None:
        """End nodes and everything that hangs on them."""
        program = self._open.get(id)
        if program is None:
            return
        stack = [program.live[n] for n in nodes if n in program.live]
        while stack:
            live = stack.pop()
            if live.cancelled:
                continue
            live.cancelled = True
            stack += live.children
            self._let_go(program, live)
            if not live.over:
                self._fail(program, live, "cancelled", "was cancelled")

    def drop(self, id: str, nodes: Iterable[int]) -> None:
        """These nodes will not be continued again: their KV may be evicted like any other."""
        program = self._open.get(id)
        if program is None:
            return
        for n in nodes:
            live = program.live.get(n)
            while live is not None and not live.holds and len(live.children) <= 1 and live.node.parent is not None:
                live = program.live[live.node.parent]
            if live is not None and len(live.children) <= 1:
                self._let_go(program, live)

    def close(self, id: str) -> None:
        """End a program: what still runs is aborted, and nothing is emitted any more."""
        program = self._open.pop(id, None)
        if program is None:
            return
        program.closed = True
        self._runs.keep(program)
        for live in program.live.values():
            self._let_go(program, live)
            self._stop(live)
        program.live.clear()
        program.ready.clear()
        self._engine.end_program(id)

    # ---- running

    def _program(self, id: str) -> _Program:
        program = self._open.get(id)
        if program is None:
            raise InvalidRequest("program", f"={id!r}: no program of this id is running")
        return program

    def _run(self, program: _Program) -> None:
        """Start everything that can start. A loop, not a recursion: chains may be long."""
        while program.ready and not program.closed:
            live = program.ready.popleft()
            if live.over:
                continue
            try:
                self._start(program, live)
            except Exception as error:
                self._fail(program, live, kind(error), told(error))

    def _start(self, program: _Program, live: _Live) -> None:
        node = live.node
        state = EMPTY if node.parent is None else self._state_of(program, node.parent, node.sample)
        live.started = time.monotonic()
        if isinstance(node, Text):
            self._finish(program, live, (self._text.append(state, self._written(program, node.parts)),))
        elif isinstance(node, Role):
            state, text = self._text.role(state, node)
            for result in node.results:
                self._leases.learn(result.name, result.seconds, program.cache_salt)
            self._finish(
                program, live, (state,), Done(node.id, (Output(text),), Usage(started=live.started - program.began))
            )
        elif isinstance(node, (Gen, Select)):
            self._generate(program, live, state)
        else:
            if isinstance(node, Wait):
                live.lease = self._leases.grant(state.tokens(), program.cache_salt, node.tools[:16])
            self._finish(program, live, (state,))

    def _generate(self, program: _Program, live: _Live, state: TokenState) -> None:
        """Start a ``Gen`` or ``Select`` behind ``state``."""
        node = live.node
        start = self._text.settle(state)
        if start.size == 0:
            start = self._text.begin()
        assert isinstance(node, (Gen, Select))
        wanted = not isinstance(node, Gen) or node.params.max_tokens != 0
        if node.heal and wanted and start.size > 1 and state.pending:
            live.heal = self._engine.healable(int(start.own[-1]))
            if live.heal:
                start = self._text.back_up(start)
        live.start = start
        if isinstance(node, Select):
            self._submit_select(program, live, node)
            return
        live.params = node.params
        if node.read is not None:
            prompt = start.tokens()[-64:].tolist()
            live.reader = Reader(self._engine.tokenizer, node.read, start.tools, node.params, prompt, str(node.id))
            live.params = live.reader.params
        above = leased(program, live)
        if above is not None and above.lease is not None:
            self._leases.extend(above.lease, learn=isinstance(above.node, Wait))
        constraint = live.params.constraint
        if constraint is not None:
            if live.heal:
                constraint = healed(constraint, live.heal)
            live.waiting = future = self._engine.compile(constraint)
            if not future.done():
                live.requests = (self._name(program, live),)  # heard from now on, should the engine stop meanwhile
                self._listen(live.requests[0], partial(self._heard, program, live))
                future.add_done_callback(lambda _: self._post_compiled(program, live))
                return
        self._submit_gen(program, live, node)

    def _post_compiled(self, program: _Program, live: _Live) -> None:
        """From any thread."""
        try:
            self._post(lambda _: self._compiled(program, live))
        except EngineClosed:
            pass  # its listener was told

    def _compiled(self, program: _Program, live: _Live) -> None:
        if program.closed or live.over:
            return
        try:
            assert isinstance(live.node, Gen)
            self._submit_gen(program, live, live.node)
        except Exception as error:
            self._fail(program, live, kind(error), told(error))
            self._run(program)

    def _submit_gen(self, program: _Program, live: _Live, node: Gen) -> None:
        live.waiting = None
        ready = self._engine.prepare(_ids(live.start), live.params, heal=live.heal)
        begun, live.requests = live.requests, ()
        self._submit(program, live, ready, partial(self._heard, program, live), *begun)

    def _submit_select(self, program: _Program, live: _Live, node: Select) -> None:
        method = method_of(node.method)
        before = live.heal.decode()
        texts = tuple(self._written(program, choice) for choice in node.choices)
        tokens = [self._text.after(before + text).tolist() if before + text else [] for text in texts]
        jobs = [(_ids(live.start), tokens)]
        if method.needs_unconditional:
            if self._engine.tokenizer.bos_id is None:
                raise InvalidRequest(
                    "choices_method",
                    f"={node.method!r}: needs a beginning-of-sequence token, and the model has none; use another method",
                )
            jobs.append((_ids(self._text.begin()), tokens))  # the same tokens, also where they begin with healed bytes
        outputs: dict[int, RequestOutput] = {}
        for at, (prefix, scored) in enumerate(jobs):
            ready = self._engine.prepare_score(prefix, scored)

            def heard(delta: OutputDelta | BaseException, at: int = at) -> None:
                if live.over or program.closed:
                    return
                if isinstance(delta, BaseException):
                    self._fail(program, live, "error", str(delta))
                elif delta.output is not None:
                    outputs[at] = delta.output
                    if delta.output.error is not None:
                        self._fail(program, live, "error", delta.output.error)
                    elif delta.output.scores is None:
                        self._fail(program, live, "cancelled", "was aborted")
                    elif len(outputs) == len(jobs):
                        self._chosen(program, live, node, texts, tokens, outputs)
                self._run(program)

            self._submit(program, live, ready, heard)

    def _name(self, program: _Program, live: _Live) -> str:
        """An id for a request of a node."""
        self._count += 1
        return f"{program.id}/{live.node.id}/{self._count}"

    def _submit(self, program: _Program, live: _Live, ready: Any, listener: Listener, request: str = "") -> None:
        parent = program.live[live.node.parent] if live.node.parent is not None else None
        hint = ProgramHint(
            program=program.id,
            name=program.name,
            order=program.order,
            step=program.steps,
            remaining=steps_below(live),
            group=f"{program.id}/{live.node.parent}",
            fanout=len(parent.children) if parent is not None else 1,
        )
        request = request or self._name(program, live)
        live.requests += (request,)
        self._engine.submit(ready, request_id=request, cache_salt=program.cache_salt, hint=hint)
        self._listen(request, listener)

    def _heard(self, program: _Program, live: _Live, delta: OutputDelta | BaseException) -> None:
        """A request of a ``Gen`` has something to say."""
        if live.over or program.closed:
            return
        if isinstance(delta, BaseException):
            self._fail(program, live, "error", str(delta))
        else:
            above = leased(program, live)
            if above is not None:
                self._end_lease(above, resumed=True)
            if program.stream and delta.text:
                read = live.reader.push(delta.index, delta.text) if live.reader is not None else ("", "")
                program.emit(Delta(live.node.id, delta.index, delta.text, *read))
            if delta.output is not None:
                if delta.output.error is not None:
                    self._fail(program, live, "error", delta.output.error)
                elif delta.output.finish_reason is FinishReason.ABORT:
                    self._fail(program, live, "cancelled", "was aborted")
                else:
                    self._generated(program, live, delta.output)
        self._run(program)

    def _generated(self, program: _Program, live: _Live, output: RequestOutput) -> None:
        node = live.node
        assert isinstance(node, Gen)
        states: list[TokenState] = []
        for sample in output.samples:
            kept = sample.token_ids
            ended = sample.finish_reason is FinishReason.STOP and not isinstance(sample.stop_reason, str)
            if ended and kept and (kept[-1] == sample.stop_reason or kept[-1] in self._engine.tokenizer.eos_ids):
                kept = kept[:-1]
            rest = ""
            if isinstance(sample.stop_reason, str):
                hidden = self._engine.tokenizer.special_ids if live.params.skip_special_tokens else frozenset()
                count, rest = self._text.kept(kept, live.heal + sample.text.encode(), hidden)
                kept = kept[:count]
            states.append(self._text.extend(live.start, _array(kept), rest))
        read = live.reader.answer if live.reader is not None else lambda sample, text: None
        live.outputs = tuple(
            Output(s.text, s.token_ids, s.finish_reason, s.stop_reason, s.logprobs, read(s.index, s.text))
            for s in output.samples
        )
        self._hold(program, live, states)
        answer = live.outputs[0].answer
        if answer is not None and answer.calls:
            named = [call.name for call in answer.calls]
            live.lease = self._leases.grant(states[0].tokens(), program.cache_salt, named)
        self._finish(program, live, tuple(states), Done(node.id, live.outputs, self._usage(program, live, [output])))

    def _chosen(
        self,
        program: _Program,
        live: _Live,
        node: Select,
        texts: tuple[str, ...],
        tokens: list[list[int]],
        outputs: dict[int, RequestOutput],
    ) -> None:
        try:
            scored = Scored(
                choices=texts,
                tokens=tuple(map(tuple, tokens)),
                logprobs=outputs[0].scores or (),
                unconditional=outputs[1].scores if 1 in outputs else None,
            )
            decision = decide(scored, method_of(node.method), node.temperature, node.seed)
        except Exception as error:
            self._fail(program, live, kind(error), told(error))
            return
        chosen = decision.index
        state = self._text.extend(live.start, _array(tokens[chosen]))
        live.outputs = (Output(texts[chosen], tuple(tokens[chosen])),)
        self._hold(program, live, [state])
        choosing = Choosing(
            chosen,
            decision.scores,
            decision.logprobs,
            decision.probabilities,
            decision.confidence,
            scored.tokens,
            scored.logprobs,
        )
        usage = self._usage(program, live, list(outputs.values()))
        # the engine counts each choice as a prompt; what they share with each other is one prompt here
        distinct = live.start.size + len({tuple(one[:n]) for one in tokens for n in range(1, len(one) + 1)})
        usage = replace(
            usage,
            prompt_tokens=distinct,
            cached_tokens=max(0, distinct - outputs[0].computed_tokens),
            computed_tokens=outputs[0].computed_tokens,
        )
        self._finish(program, live, (state,), Done(node.id, live.outputs, usage, choosing))

    def _usage(self, program: _Program, live: _Live, outputs: list[RequestOutput]) -> Usage:
        first = outputs[0]
        return Usage(
            prompt_tokens=sum(o.cached_tokens + o.computed_tokens for o in outputs),
            cached_tokens=sum(o.cached_tokens for o in outputs),
            computed_tokens=sum(o.computed_tokens for o in outputs),
            generated_tokens=sum(o.completion_tokens for o in outputs),
            forced_tokens=sum(o.forced_tokens for o in outputs),
            tokenized=live.start.tokenized,
            started=live.started - program.began,
            queue_time=first.queue_time,
            prefill_time=first.prefill_time,
            decode_time=first.decode_time,
        )

    # ---- ends

    def _finish(self, program: _Program, live: _Live, states: tuple[TokenState, ...], told: Done | None = None) -> None:
        live.states = states
        if live.requests:
            live.requests = ()
            program.steps += 1
        if told is not None:
            live.usage = told.usage
            program.emit(told)
        for other in live.dependents:
            other.missing -= 1
            if not other.missing and not other.over:
                program.ready.append(other)
        live.dependents = []

    def _fail(self, program: _Program, live: _Live, kind: str, problem: str) -> None:
        """End a node without a result, and all that needs it."""
        stack = [(live, kind, problem)]
        while stack:
            one, kind, problem = stack.pop()
            if one.over:
                continue
            one.failed = problem
            self._stop(one)
            self._let_go(program, one)
            if not program.closed:
                program.emit(Failed(one.node.id, kind, problem))
            stack += [(other, "cancelled", because(one)) for other in one.dependents]
            one.dependents = []

    def _stop(self, live: _Live) -> None:
        for request in live.requests:
            self._listen(request, None)
            self._engine.abort(request)
        live.requests = ()
        live.waiting = None

    # ---- KV that the program may use again

    def _hold(self, program: _Program, live: _Live, states: Sequence[TokenState]) -> None:
        """Hold what the samples left in the cache; what they continue is then held by them."""
        for sample, state in enumerate(states):
            hold = self._engine.hold(_ids(state), cache_salt=program.cache_salt, program=program.id)
            if hold is not None:
                live.holds[sample] = hold
        node = live.node
        while node.parent is not None:
            above = program.live[node.parent]
            if above.holds:
                hold = above.holds.pop(node.sample, None)
                if hold is not None:
                    self._engine.release(hold, program=program.id)
                return
            node = above.node

    def _end_lease(self, live: _Live, resumed: bool = False) -> None:
        if live.lease is not None:
            self._leases.end(live.lease, resumed=resumed)
            live.lease = None

    def _let_go(self, program: _Program, live: _Live) -> None:
        self._end_lease(live)
        for hold in live.holds.values():
            self._engine.release(hold, program=program.id)
        live.holds.clear()

    # ---- small things

    def _state_of(self, program: _Program, id: int, sample: int) -> TokenState:
        states = program.live[id].states
        assert states is not None
        if sample >= len(states):
            raise InvalidRequest("sample", f"={sample}: node {id} has {len(states)} samples")
        return states[sample]

    def _written(self, program: _Program, parts: Template) -> str:
        texts: list[str] = []
        for part in parts:
            if isinstance(part, str):
                texts.append(part)
            elif isinstance(part, Ref):
                outputs = program.live[part.node].outputs
                if part.sample >= len(outputs):
                    raise InvalidRequest("ref", f"={part.node}: has no generated text of sample {part.sample}")
                texts.append(outputs[part.sample].text)
            else:
                raise InvalidRequest("arg", f"={part.name!r}: is not bound")
        return "".join(texts)


def _ids(state: TokenState) -> Any:
    """The tokens of a state as the engine takes them: an array is a sequence."""
    return state.tokens()


def _array(tokens: Iterable[int]) -> IntArray:
    return np.array(tuple(tokens), dtype=np.int32)
