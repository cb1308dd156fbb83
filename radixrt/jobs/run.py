"""The loop of a job: documents in, requests to a backend, finished documents to a sink.

    documents --read--> known? --no--> split --slots--> answer, check, again with the error --> merge --> sink
                          |                                                                               (row or error)
                          +-- yes: an earlier session finished it

Invariants:
- Every document ends in the sink exactly once, as a row or as an error that says why; what ends the job itself (the backend
  is down, the disk is full, Ctrl-C) ends no document.
- A row depends on the document, the plan and the model: never on what runs beside it, on the order in which documents finish, or
  on interruptions. The seed of a request is made of the job's seed, the document's id, the part and the try.
- Parts and retries of a document that has begun go before new documents. Memory holds the documents in flight and
  ``_AHEAD`` that are read, whatever the length of the input.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol

from radixrt.errors import InvalidRequest, shown
from radixrt.jobs.backends import Answer, Backend, BackendDown
from radixrt.jobs.confidence import confidences, merged_notes
from radixrt.jobs.documents import Document
from radixrt.jobs.evidence import find_evidence
from radixrt.jobs.journal import JobStopped, Row, Usage, digest
from radixrt.jobs.merge import merge
from radixrt.jobs.prompt import Layout, Prompt
from radixrt.jobs.slots import BEGUN, Slots
from radixrt.jobs.split import split_text
from radixrt.jobs.stats import Stats
from radixrt.jobs.target import Target

_AHEAD = 4  # documents read before there is a place for them
_ASIDE = 64  # tokens left for what a chat template adds, and for borders that are cut otherwise
_ERROR_TOKENS = 320  # an error in the prompt of a retry
_LEAST = 32  # tokens of a part
_MOST_ERROR = 2000  # characters of an error in the errors file


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is done with every document."""

    target: Target
    layout: Layout
    max_tokens: int = 512
    seed: int = 0
    retries: int = 1
    merge: str = "vote"
    overlap: int = 64
    confidence: bool = False
    evidence: bool = False
    concurrency: int | None = None


class Sink(Protocol):
    """Where finished documents go; ``Journal`` and ``Memory``."""

    def setting(self, name: str) -> Any: ...

    def settle(self, settings: Mapping[str, Any]) -> object: ...

    def known(self, index: int, fingerprint: str) -> bool: ...

    def add(self, index: int, fingerprint: str, row: Row, usage: Usage, *, failed: bool = False) -> None: ...


class Memory:
    """A sink that keeps the rows; ``rows`` and ``errors`` in input order or as completed."""

    def __init__(self, order: str = "input") -> None:
        self._order = order
        self._rows: list[tuple[int, Row]] = []
        self._errors: list[tuple[int, Row]] = []

    @property
    def rows(self) -> list[Row]:
        return self._sorted(self._rows)

    @property
    def errors(self) -> list[Row]:
        return self._sorted(self._errors)

    def setting(self, name: str) -> Any:
        return None

    def settle(self, settings: Mapping[str, Any]) -> object:
        return settings

    def known(self, index: int, fingerprint: str) -> bool:
        return False

    def add(self, index: int, fingerprint: str, row: Row, usage: Usage, *, failed: bool = False) -> None:
        (self._errors if failed else self._rows).append((index, row))

    def _sorted(self, items: list[tuple[int, Row]]) -> list[Row]:
        return [row for _, row in (sorted(items, key=lambda item: item[0]) if self._order == "input" else items)]


@dataclass(slots=True)
class _Outcome:
    """What became of a part, or of a document."""

    value: Any = None
    error: str = ""
    answer: str | None = None
    usage: Usage = field(default_factory=Usage)
    confidence: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)


def fingerprint(document: Document) -> str:
    """Of everything that a row can depend on."""
    return digest(document.id, document.text, document.problem)


async def run_job(
    documents: AsyncIterator[Document],
    plan: Plan,
    backend: Backend,
    sink: Sink,
    stats: Stats,
    progress: Callable[[Stats], None] | None = None,
) -> None:
    """Put every document that the sink does not know into it. The backend has been started.

    Raises:
        JobStopped: the backend is down, or the sink takes no more.
        InvalidRequest: the source, or what is left of the context, is of no use.
    """
    await _Job(plan, backend, sink, stats, progress).run(documents)


class _Job:
    def __init__(
        self, plan: Plan, backend: Backend, sink: Sink, stats: Stats, progress: Callable[[Stats], None] | None
    ) -> None:
        self._plan, self._backend, self._sink = plan, backend, sink
        self._stats, self._progress = stats, progress
        self._room = 0  # tokens of a part, at most
        self._slots = Slots(1)

    async def run(self, documents: AsyncIterator[Document]) -> None:
        await self._measure()
        self._stats.begin()
        try:
            async with asyncio.TaskGroup() as tasks:
                async for document in documents:
                    self._stats.read += 1
                    mark = fingerprint(document)
                    if self._sink.known(document.index, mark):
                        continue
                    if document.problem:
                        self._finish(document, mark, _Outcome(error=document.problem), 0)
                        continue
                    parts, cost = await self._split(document)
                    await self._slots.take(cost)
                    # no await in between: a task that was made gives the place back
                    tasks.create_task(self._document(document, mark, parts, cost))
        except BaseExceptionGroup as errors:
            first = _first(errors)
            raise JobStopped(str(first)) if isinstance(first, BackendDown) else first from None
        finally:
            self._stats.tick(last=True)
        self._stats.unique_tokens = await self._unique()

    async def _measure(self) -> None:
        """How long a part may be, and how much is in flight."""
        plan, backend = self._plan, self._backend
        shared = self._stats.shared_tokens = await backend.prompt_tokens(plan.layout.document(""))
        spare = backend.context_length - shared - _ASIDE - plan.max_tokens
        again = plan.max_tokens + _ERROR_TOKENS  # an answer to correct, and what is wrong with it
        more = plan.retries or plan.evidence
        room = spare - again if more and spare - again >= spare // 2 else spare
        before = self._sink.setting("part_tokens")
        if plan.max_tokens < backend.min_tokens:
            raise InvalidRequest(
                "max_tokens", f"={plan.max_tokens}: the shortest row that is valid has {backend.min_tokens:,} tokens"
            )
        if room < _LEAST:
            raise InvalidRequest(
                "max_tokens",
                f"={plan.max_tokens}: leaves no room for documents: instructions, schema and examples take {shared:,} of the "
                f"context's {backend.context_length:,} tokens",
            )
        if isinstance(before, int) and before < room:
            room = before  # as documents were split so far
        self._sink.settle({"part_tokens": room})
        self._room = room
        pool = backend.pool_tokens
        count = plan.concurrency or backend.inflight(shared + plan.max_tokens + _ASIDE)
        self._slots = Slots(max(1, count), None if pool is None else max(1, pool - shared))

    async def _split(self, document: Document) -> tuple[list[str], int]:
        """The parts of a document, and the tokens that the first of them takes with its answer."""
        text, most = document.text, self._plan.max_tokens
        if len(text.encode("utf-8", "replace")) <= self._room:  # a token is at least a byte
            return [text], len(text) // 2 + most
        count = await self._backend.counter(text)
        tokens = await asyncio.to_thread(count, text)
        if tokens <= self._room:
            return [text], tokens + most
        parts = await asyncio.to_thread(split_text, text, count, self._room, min(self._plan.overlap, self._room // 4))
        return parts, self._room + most

    async def _document(self, document: Document, mark: str, parts: list[str], cost: int) -> None:
        try:
            outcomes = await self._answers(document, parts, cost)
        except* BackendDown as errors:
            down = _first(errors)
            raise JobStopped(f"stopped at document {document.index + 1} ({shown(document.id)}): {down}") from down
        whole = outcomes[0] if len(parts) == 1 else await asyncio.to_thread(self._merge, document, parts, outcomes)
        self._finish(document, mark, whole, len(parts))

    async def _answers(self, document: Document, parts: list[str], cost: int) -> list[_Outcome]:
        """What became of each part; the first has its place already."""
        outcomes: list[_Outcome] = [_Outcome() for _ in parts]
        numbers: Iterator[int] = iter(range(len(parts)))

        async def work(has_place: bool) -> None:
            if not has_place:
                await self._slots.take(cost, BEGUN)
            try:
                for number in numbers:  # the place is kept for the next part: no new document comes between
                    outcomes[number] = await self._part(document, number, parts[number])
            finally:
                self._slots.give(cost)

        if len(parts) == 1:
            await work(True)
        else:
            async with asyncio.TaskGroup() as tasks:
                for worker in range(min(len(parts), self._slots.count)):
                    tasks.create_task(work(worker == 0))
        return outcomes

    async def _part(self, document: Document, number: int, text: str) -> _Outcome:
        """Ask until the answer is right, or the retries are used up."""
        plan, layout = self._plan, self._plan.layout
        prompt = layout.document(text)
        outcome = _Outcome(usage=Usage(parts=1))
        answer: Answer | None = None
        first = 0  # tokens of the first prompt: each retry begins with them, the first of them also with its answer
        for attempt in range(plan.retries + 1):
            if answer is not None:
                prompt = layout.retry(text, answer, outcome.error)
            known = first + answer.output_tokens if answer is not None and attempt == 1 else first
            try:
                answer = await self._backend.answer(
                    prompt,
                    max_tokens=plan.max_tokens,
                    seed=_seed(plan.seed, document.id, number, attempt),
                    logprobs=plan.confidence,
                )
            except InvalidRequest as error:
                outcome.error = f"{outcome.error}; trying again: {error}" if outcome.error else str(error)
                return outcome
            outcome.usage += Usage(
                prompt=answer.prompt_tokens,
                cached=answer.cached_tokens,
                output=answer.output_tokens,
                requests=1,
                retries=int(attempt > 0),
                unique=max(0, answer.prompt_tokens - (known or self._stats.shared_tokens)),
            )
            first = first or answer.prompt_tokens
            outcome.answer = answer.text
            outcome.error, outcome.value = self._judge(answer)
            if not outcome.error:
                await self._explain(document, number, text, prompt, answer, outcome)
                break
        return outcome

    def _judge(self, answer: Answer) -> tuple[str, Any]:
        """What is wrong with an answer, and its value."""
        if not answer.complete:
            return answer.problem or f"cut off at max_tokens={self._plan.max_tokens}", None
        try:
            value = self._plan.target.parse(answer.text)
        except (ValueError, RecursionError) as error:
            return str(error) or type(error).__name__, None
        return self._plan.target.check(value) or "", value

    async def _explain(
        self, document: Document, number: int, text: str, prompt: Prompt, answer: Answer, outcome: _Outcome
    ) -> None:
        """Confidence and evidence of a value, where they are wanted."""
        plan = self._plan
        is_json = plan.target.schema is not None
        if plan.confidence:
            outcome.confidence = confidences(answer.text, answer.tokens, is_json=is_json)
        if plan.evidence:
            seed = _seed(plan.seed, document.id, number, -1)
            found = await find_evidence(
                self._backend, prompt, answer, text, seed=seed, retries=plan.retries, is_json=is_json
            )
            outcome.evidence = found.quotes
            own = found.prompt_tokens - found.asked * (answer.prompt_tokens + answer.output_tokens)
            outcome.usage += Usage(
                prompt=found.prompt_tokens,
                cached=found.cached_tokens,
                output=found.output_tokens,
                requests=found.asked,
                unique=max(0, own),
            )

    def _merge(self, document: Document, texts: list[str], parts: list[_Outcome]) -> _Outcome:
        """One outcome of those of the parts: the first error, or the merged value."""
        usage = sum((part.usage for part in parts), Usage())
        for number, part in enumerate(parts, 1):
            if part.error:
                return replace(part, error=f"part {number} of {len(parts)}: {part.error}", usage=usage)
        target = self._plan.target
        value = merge([part.value for part in parts], target.schema, self._plan.merge)
        text = value if target.schema is None else json.dumps(value, ensure_ascii=False)
        error = target.check(value)
        if error:
            said = f"each of {len(parts)} parts is right, together they are not: {error}"
            return _Outcome(error=said, answer=text, usage=usage)
        start = 0
        for part_text, part in zip(texts, parts):
            start = document.text.index(part_text, start)  # parts are slices of the document, in order
            part.evidence = {path: _moved(quote, start) for path, quote in part.evidence.items()}
        is_json = target.schema is not None
        notes = [
            merged_notes(text, [(part.answer or "", note) for part, note in zip(parts, each)], is_json=is_json)
            for each in ([part.confidence for part in parts], [part.evidence for part in parts])
        ]
        return _Outcome(value, usage=usage, confidence=notes[0], evidence=notes[1])

    def _finish(self, document: Document, mark: str, outcome: _Outcome, parts: int) -> None:
        row: Row = {"id": document.id}
        if outcome.error:
            row |= {"index": document.index, "error": outcome.error[:_MOST_ERROR]}
            if outcome.answer is not None:
                row["answer"] = outcome.answer
        else:
            row["value"] = outcome.value
            if parts > 1:
                row["parts"] = parts
            if self._plan.confidence:
                row["confidence"] = outcome.confidence
            if self._plan.evidence:
                row["evidence"] = outcome.evidence
        self._sink.add(document.index, mark, row, outcome.usage, failed=bool(outcome.error))
        self._stats.add(outcome.usage, failed=bool(outcome.error))
        if self._progress is not None:
            self._progress(self._stats)

    async def _unique(self) -> int | None:
        share = await self._backend.optimum()
        return None if share is None else round((1 - share) * self._stats.session.prompt)


async def in_thread(documents: Iterable[Document]) -> AsyncGenerator[Document, None]:
    """Read in a thread, ``_AHEAD`` documents at most ahead: the loop never waits for a slow source, nor for one that ended."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Queue[Document | BaseException | None] = asyncio.Queue()
    places = threading.Semaphore(_AHEAD)
    stopped = threading.Event()

    def tell(item: Document | BaseException | None) -> None:
        try:
            loop.call_soon_threadsafe(ready.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody reads
            stopped.set()

    def read() -> None:
        try:
            for document in documents:
                places.acquire()
                if stopped.is_set():
                    return
                tell(document)
            tell(None)
        except BaseException as error:
            tell(error)

    threading.Thread(target=read, name="radixrt-documents", daemon=True).start()
    try:
        while (item := await ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            places.release()
            yield item
    finally:
        stopped.set()
        places.release()


async def inline(documents: Iterable[Document]) -> AsyncGenerator[Document, None]:
    """Read where the loop runs: for objects of the caller's, which may belong to his thread."""
    for document in documents:
        yield document


def _moved(quote: dict[str, Any] | None, start: int) -> dict[str, Any] | None:
    """A quote of a part, as one of the document."""
    return (
        quote
        if quote is None or "error" in quote
        else {**quote, "start": quote["start"] + start, "end": quote["end"] + start}
    )


def _seed(seed: int, name: str, part: int, attempt: int) -> int:
    data = f"{seed}\0{part}\0{attempt}\0{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


def _first(errors: BaseExceptionGroup) -> BaseException:
    """The error to report: the first of a group, and of the groups in it."""
    for error in errors.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    return errors


__all__ = ["Memory", "Plan", "Sink", "fingerprint", "in_thread", "inline", "run_job"]
