"""@function: a program. Called with arguments it runs, one by one, in batches, streamed, or compiled ahead of time."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import secrets
import sys
import traceback
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from typing import Any, Literal, overload

from lang.backends.base import Backend, ProgramInfo
from lang.defaults import default_backend
from lang.errors import BackendError, Cancelled, ProgramTimeout, UsageError, author_line
from lang.expr import PARAMS, check_seed, sampling_options
from lang.loop import LOOP, drive, run_body
from lang.run import Run
from lang.state import ProgramState
from lang.trace import Traced, trace
from radixrt.errors import nearest, shown
from radixrt.progress import progress as show_progress

_CONCURRENCY = 256  # programs of a batch that run at once, unless it is said
_FOREVER = 10**9  # seconds
_order = itertools.count()


@dataclass(frozen=True, slots=True)
class Call:
    """One run to make: the body's arguments and how it runs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    defaults: dict[str, Any]
    backend: Backend | None = None
    stream: bool = False
    seed: int | None = None
    timeout: float | None = None
    cache_salt: str = ""
    heal: bool = True


_OPTIONS = ("backend", "stream", "seed", "timeout", "cache_salt", "heal")


class Function:
    """A program. Made by ``@function``; the body's first parameter is the state.

    ``f.run(...)`` runs it and returns its ``ProgramState``. Inside of another program, ``f(s, ...)`` continues that program's state ``s``.
    """

    def __init__(self, fn: Callable[..., Any], compiled: bool = False) -> None:
        if not callable(fn):
            raise UsageError(f"@function is for functions, not {shown(fn)}", author_line())
        self.fn = fn
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        functools.update_wrapper(self, fn)
        try:
            self._signature = inspect.signature(fn)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"@function: the parameters of {shown(fn)} are not known ({error})", author_line()
            ) from None
        self._parameters = tuple(self._signature.parameters.values())
        body = fn if inspect.isroutine(fn) or isinstance(fn, functools.partial) else type(fn).__call__
        if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
            raise UsageError(
                f"{self.name}() yields: a program is an ordinary or an async function, without yield", author_line()
            )
        if not self._parameters or self._parameters[0].kind in (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD):
            raise UsageError(f"{self.name}() needs a first parameter: the state", author_line())
        self.arg_names = tuple(
            p.name for p in self._parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        )
        self._positional = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in self._parameters[1:])
        self._bound: dict[str, Any] = {}
        self._compiled = compiled
        self._traces: dict[Any, Traced] = {}

    def __repr__(self) -> str:
        return f"<function {self.name}({', '.join(self.arg_names)}) of lang>"

    # ---- one run

    def run(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the program and wait for it.

        Args:
            args, kwargs: the body's arguments, and besides (a parameter of the body goes first):
                any field of ``SamplingParams``, for generations that do not say otherwise (``temperature=0``, ``max_tokens=64``, ...);
                ``backend``; ``seed`` (what all samples are drawn from); ``timeout`` (seconds); ``stream=True``: return at once, and read
                ``state.text_iter()``; ``cache_salt``; ``heal=False``: no token healing.

        Returns:
            The state as the body left it; ``ret_value`` is what the body returned.

        Raises:
            What the body raises, with its traceback. GenerationFailed: something that the state appended has no result.
            UsageError: an unknown argument, naming the nearest valid one.
        """
        call = self._call(args, kwargs)
        if call.stream:
            return LOOP.call(lambda: self._begin(call))
        return LOOP.call(lambda: self._whole(call))

    async def arun(self, *args: Any, **kwargs: Any) -> ProgramState:
        """``run`` for any event loop. Cancelling it cancels the program."""
        call = self._call(args, kwargs)
        if call.stream:
            return await LOOP.acall(lambda: self._begin(call))
        return await LOOP.acall(lambda: self._whole(call))

    @overload
    def __call__(self, state: ProgramState, /, *args: Any, **kwargs: Any) -> Any: ...
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inside of a program, with its state first: continue that state. Otherwise the same as ``run``."""
        if args and isinstance(args[0], ProgramState):
            values = {**self._bound, **kwargs}
            self._check_arguments(args, values)
            result = self.fn(*args, **values)
            caller = sys._getframe(1).f_code.co_flags
            if inspect.iscoroutine(result) and not caller & inspect.CO_COROUTINE and not args[0]._run.tracing:
                return drive(result)  # an ordinary body cannot await it
            return result
        return self.run(*args, **kwargs)

    def bind(self, **kwargs: Any) -> Function:
        """The same program with some of its arguments fixed."""
        for name in kwargs:
            if name not in self.arg_names:
                raise UsageError(
                    f"{self.name}() has no parameter {name!r}{nearest(name, self.arg_names)}", author_line()
                )
        bound = Function(self.fn, self._compiled)
        bound._bound = {**self._bound, **kwargs}
        return bound

    # ---- many runs

    @overload
    def run_batch(
        self, batch_kwargs: Iterable[Mapping[str, Any]], *, generator_style: Literal[False] = False, **options: Any
    ) -> list[ProgramState]: ...
    @overload
    def run_batch(
        self, batch_kwargs: Iterable[Mapping[str, Any]], *, generator_style: Literal[True], **options: Any
    ) -> Iterator[ProgramState]: ...
    def run_batch(
        self,
        batch_kwargs: Iterable[Mapping[str, Any]],
        *,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        ordered: bool = True,
        **options: Any,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run the program once for each mapping of arguments.

        One that fails does not stop the others: its state has the error as ``error()``, and reading its results raises it.

        Args:
            num_threads: programs that run at once (no threads: the name is SGLang's); ``"auto"``: 256.
            progress_bar: show one.
            generator_style: return an iterator instead of a list: it takes from ``batch_kwargs`` only as fast as it is read.
            ordered: in the order of ``batch_kwargs``; ``False``: as they end.
            options: as for ``run``, for all.

        What the programs begin with in common is computed once: they share it through the radix tree even within one step.
        """
        most = self._concurrency(num_threads)
        shared = self._shared(options)

        async def wait(make: Any) -> Any:
            return LOOP.call(make)

        states = _read(self._iterate(wait, batch_kwargs, most, progress_bar, ordered, shared))
        return states if generator_style else list(states)

    async def arun_batch(
        self,
        batch_kwargs: Iterable[Mapping[str, Any]],
        *,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        ordered: bool = True,
        **options: Any,
    ) -> AsyncIterator[ProgramState]:
        """``run_batch`` as an asynchronous iterator, for any event loop. Leaving it cancels what runs."""
        most = self._concurrency(num_threads)
        shared = self._shared(options)
        async with aclosing(self._iterate(LOOP.acall, batch_kwargs, most, progress_bar, ordered, shared)) as states:
            async for state in states:
                yield state

    async def _iterate(
        self,
        wait: Callable[[Callable[[], Coroutine[Any, Any, Any]]], Coroutine[Any, Any, Any]],
        batch: Iterable[Mapping[str, Any]],
        most: int,
        progress_bar: bool,
        ordered: bool,
        options: dict[str, Any],
    ) -> AsyncGenerator[ProgramState, None]:
        """At most ``most`` programs run or wait to be read. ``wait``: runs a coroutine on the programs' loop, for whoever reads."""
        total = len(batch) if isinstance(batch, Sequence) else None
        if isinstance(batch, (str, bytes, Mapping)) or not isinstance(batch, Iterable):
            raise UsageError(
                f"{shown(batch)}: a batch is a list (or another iterable) of mappings of arguments", author_line()
            )
        source = iter(batch)
        waiting: dict[asyncio.Future[ProgramState], int] = {}
        ended: dict[int, ProgramState] = {}
        started = given = 0
        exhausted = False

        async def more(calls: list[Call]) -> list[tuple[int, ProgramState]]:
            """Start programs, and wait until one is over."""
            nonlocal started
            for call in calls:
                waiting[asyncio.ensure_future(self._kept(call))] = started
                started += 1
            if not waiting:
                return []
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return [(waiting.pop(task), task.result()) for task in done]

        async def stop() -> None:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

        with show_progress(self.name, total, unit="programs", show=progress_bar) as bar:
            try:
                while True:
                    calls: list[Call] = []
                    while not exhausted and len(waiting) + len(ended) + len(calls) < most:
                        try:
                            item = next(source)
                        except StopIteration:
                            exhausted = True
                            break
                        if not isinstance(item, Mapping):
                            raise UsageError(
                                f"{shown(item)}: each run of a batch is a mapping of arguments", author_line()
                            )
                        calls.append(self._call((), {**options, **item}))
                    if calls or (waiting and not (ended if not ordered else given in ended)):
                        ended.update(await wait(partial(more, calls)))
                    if not ended and not waiting and exhausted:
                        return
                    while ended and (not ordered or given in ended):
                        at = given if ordered else next(iter(ended))
                        given += 1
                        bar.update(given)
                        yield ended.pop(at)
            finally:
                for task in waiting:
                    LOOP.get().call_soon_threadsafe(task.cancel)
                if waiting:
                    await wait(stop)

    # ---- ahead of time

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The request graph, without running anything: exact as far as the body needs no generated value; see ``Traced``.

        Args:
            args, kwargs: arguments that are known; others stay open in the graph.
        """
        call = self._call(args, kwargs, partial=True)
        return self._traced(call, {**self._bound, **call.kwargs}, call.args)

    def compile(self, **kwargs: Any) -> Function:
        """The program such that a run submits as much of its graph as can be known, at once, before its body begins; a body
        that needs no generated value is not run at all.

        Args:
            kwargs: arguments to fix, as ``bind``.
        """
        compiled = self.bind(**kwargs) if kwargs else Function(self.fn)
        compiled._compiled = True
        if not kwargs:
            compiled._bound = dict(self._bound)
        return compiled

    def _traced(self, call: Call, known: dict[str, Any], args: tuple[Any, ...] = ()) -> Traced:
        return trace(self.fn, self.name, args, known, call.defaults, call.heal)

    def _plan(self, call: Call) -> tuple[Traced, dict[str, str]]:
        """The traced graph for a call, and the texts of its open arguments. Arguments that are texts stay open, so one trace serves all."""
        given = {**self._bound, **dict(zip(self.arg_names, call.args, strict=False)), **call.kwargs}
        texts = {name: value for name, value in given.items() if type(value) is str and name not in self._bound}
        fixed = {name: value for name, value in given.items() if name not in texts}
        if not all(map(_plain, fixed.values())):  # what it says may not tell it from others: traced for this run alone
            return self._opened(call, fixed, texts), texts
        key = (repr(sorted(call.defaults.items())), call.heal, tuple(sorted(texts)), repr(sorted(fixed.items())))
        traced = self._traces.get(key)
        if traced is None:
            if len(self._traces) >= 256:
                self._traces.clear()
            traced = self._traces[key] = self._opened(call, fixed, texts)
        return traced, texts

    def _opened(self, call: Call, fixed: dict[str, Any], texts: dict[str, str]) -> Traced:
        from lang.placeholders import Placeholder
        from radixrt.engine.nodes import Arg

        return self._traced(call, {**fixed, **{name: Placeholder(Arg(name)) for name in texts}})

    # ---- inside

    def _concurrency(self, given: int | str) -> int:
        if given == "auto":
            return _CONCURRENCY
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise UsageError(f"num_threads={shown(given)}: must be at least 1, or 'auto'", author_line())
        return given

    def _shared(self, options: Mapping[str, Any]) -> dict[str, Any]:
        self._call((), options, partial=True)  # says what is wrong once, before anything runs
        return dict(options)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], partial: bool = False) -> Call:
        """Sort arguments of the body from those of the run."""
        own: dict[str, Any] = {}
        options: dict[str, Any] = {}
        sampling: dict[str, Any] = {}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self._parameters)
        for name, value in kwargs.items():
            if not isinstance(name, str):
                raise UsageError(f"{self.name}() has no argument {shown(name)}: names are strings", author_line())
            if name in self.arg_names:
                own[name] = value
            elif name in _OPTIONS:
                options[name] = value
            elif name in PARAMS or name in ("max_new_tokens", "return_logprob", "top_logprobs_num"):
                sampling[name] = value
            elif name == "use_thread":
                continue  # SGLang's: there are no threads to choose
            elif takes_any:
                own[name] = value
            else:
                valid = [*self.arg_names, *PARAMS, *_OPTIONS]
                raise UsageError(f"{self.name}() has no argument {name!r}{nearest(name, valid)}", author_line())
        if sampling.pop("return_logprob", None):
            sampling.setdefault("logprobs", sampling.get("top_logprobs_num") or 0)
        sampling.pop("top_logprobs_num", None)
        if len(args) > self._positional and not any(p.kind is p.VAR_POSITIONAL for p in self._parameters):
            raise UsageError(f"{self.name}() takes {self._positional} arguments, {len(args)} were given", author_line())
        if not partial:
            self._check_arguments((None, *args), {**self._bound, **own})
        return Call(args, own, sampling_options(sampling), **_checked(options))

    def _check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"{self.name}(): {error}", author_line()) from None

    async def _open(self, call: Call) -> ProgramState:
        backend = call.backend if call.backend is not None else default_backend()
        await backend.start()
        seed = call.seed if call.seed is not None else secrets.randbits(32)
        info = ProgramInfo(uuid.uuid4().hex[:16], self.name, next(_order), call.cache_salt, call.stream)
        run = Run(backend, info, seed=seed, defaults=call.defaults, stream=call.stream, heal=call.heal)
        return ProgramState(run)

    async def _finish(self, call: Call, state: ProgramState) -> ProgramState:
        """Run the body to its end, and wait for what it appended."""
        run = state._run
        try:
            async with asyncio.timeout(call.timeout) as limit:
                if not (self._compiled and self._named(call) and self._submit_plan(call, state)):
                    state.ret_value = await run_body(self.fn, state, *call.args, **{**self._bound, **call.kwargs})
                await run.settle()
            if limit.expired():  # the body caught the end of its time with a bare ``except``
                raise TimeoutError
            failed = next((n for n in state._own if n in run.graph.failed), None)
            if failed is not None:
                raise run.error_of(failed)
        except TimeoutError as error:
            if not limit.expired():  # the body's own
                state._error = error
                raise
            state._error = ProgramTimeout(
                f"{self.name}() did not end within {call.timeout} seconds", _inner_line(error, self.fn)
            )
            raise state._error from error
        except asyncio.CancelledError as error:
            state._error = Cancelled(f"{self.name}() was cancelled")
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # the body raised it by itself
                raise state._error from error
            raise
        except BaseException as error:
            state._error = error
            raise
        finally:
            run.close()
        return state

    def _named(self, call: Call) -> bool:
        """Whether each argument of a call has a name, under which a graph can hold a place for it."""
        return len(call.args) <= self._positional and not any(p.kind is p.POSITIONAL_ONLY for p in self._parameters[1:])

    def _submit_plan(self, call: Call, state: ProgramState) -> bool:
        """Submit what was traced; True: that is all of the program."""
        traced, texts = self._plan(call)
        run = state._run
        nodes = traced.nodes(texts, run.seed_of)
        if not traced.complete:
            run.submit(nodes)
            return False
        run.adopt(traced.graph, nodes)
        state._take_over(traced.state, texts)
        return True

    async def _whole(self, call: Call) -> ProgramState:
        return await self._finish(call, await self._open(call))

    async def _begin(self, call: Call) -> ProgramState:
        """Start a program that streams."""
        state = await self._open(call)
        state._task = asyncio.ensure_future(self._finish(call, state))
        state._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # read through the state
        return state

    async def _kept(self, call: Call) -> ProgramState:
        """A run of a batch: its error stays with its state."""
        state: ProgramState | None = None
        try:
            state = await self._open(call)
            return await self._finish(call, state)
        except Exception as error:
            if state is None:
                raise
            state._error = error
            return state


def function(fn: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a function whose first parameter is the state; it may be ``async``.

    @function
    def answer(s, question):
        s += user(question)
        s += assistant(gen("answer", max_tokens=64))

    answer.run("Why is the sky blue?")["answer"]
    """
    if num_api_spec_tokens is not None:
        raise UsageError(
            "num_api_spec_tokens: speculative calls of an API are not available; leave it out", author_line()
        )
    if fn is None:
        return function
    return Function(fn)


def _read(states: AsyncGenerator[ProgramState, None]) -> Iterator[ProgramState]:
    """The states of an iterator that waits inside of its calls, and never gives way."""
    try:
        while True:
            try:
                states.__anext__().send(None)
            except StopAsyncIteration:
                return
            except StopIteration as step:
                state = step.value
            yield state
    finally:
        try:
            states.aclose().send(None)
        except (StopIteration, UsageError):  # the latter: collected on the loop's own thread, where nobody can wait
            pass


def _plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is known by how it is written: a text, a number, or lists and dicts of them."""
    if type(value) in (list, tuple):
        return depth < 16 and all(_plain(item, depth + 1) for item in value)
    if type(value) is dict:
        return depth < 16 and all(_plain(item, depth + 1) for pair in value.items() for item in pair)
    return value is None or type(value) in (str, int, float, bool, bytes)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a run; what is ``None`` is left out.

    Raises:
        UsageError: one is of the wrong type.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name == "seed":
            check_seed(value)
        elif name == "timeout":
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not value >= 0 or (isinstance(value, int) and value > _FOREVER):
                raise UsageError(f"timeout={shown(value)}: must be a number of seconds, at least 0", author_line())
        elif name == "cache_salt":
            if not isinstance(value, str):
                raise UsageError(f"cache_salt={shown(value)}: must be a string", author_line())
        elif name in ("stream", "heal"):
            if not isinstance(value, bool):
                raise UsageError(f"{name}={shown(value)}: must be True or False", author_line())
        elif not isinstance(value, Backend):
            raise BackendError(
                f"{shown(value)}: is no backend (Runtime(), RuntimeEndpoint(url), OpenAI(...), MockBackend(...))",
                author_line(),
            )
    return given


def _inner_line(error: BaseException, fn: Callable[..., Any]) -> str:
    code = getattr(fn, "__code__", None)
    lines = [
        f for f in traceback.extract_tb(error.__traceback__) if code is not None and f.filename == code.co_filename
    ]
    return f"{lines[-1].filename}:{lines[-1].lineno}" if lines else ""
