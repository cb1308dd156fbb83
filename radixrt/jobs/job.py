"""extract: a whole job in one call. Checks everything that can be checked, then loads the model, runs, and leaves files that are complete.

Invariants: whatever is wrong with the arguments, the source, or an output begun with other settings is said before the model is loaded, as
far as it can be known without it; the backend, the journal and its lock are released whatever happens.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from radixrt.checks import flag, integer, number
from radixrt.config import EngineConfig
from radixrt.errors import InvalidRequest, RadixrtError, shown
from radixrt.jobs.backends import Backend
from radixrt.jobs.documents import Document, given_documents, read_documents
from radixrt.jobs.endpoint_backend import EndpointBackend
from radixrt.jobs.engine_backend import EngineBackend
from radixrt.jobs.formats import csv_format, jsonl_format
from radixrt.jobs.journal import Journal, Row
from radixrt.jobs.merge import HOW
from radixrt.jobs.places import read_there
from radixrt.jobs.prompt import Layout
from radixrt.jobs.run import Memory, Plan, fingerprint, in_thread, inline, run_job
from radixrt.jobs.stats import Stats
from radixrt.jobs.target import Target, load_target
from radixrt.model.source import resolve

if TYPE_CHECKING:
    from radixrt.engine.async_engine import AsyncEngine
    from radixrt.engine.core import Engine

ORDERS = ("input", "completed")
_SAMPLE = 1 << 16  # bytes looked at, at three places of a file of weights
_ANSWERING = ("dtype", "kv_dtype", "kernels", "chat_template")  # settings of an engine that can change an answer
Source = str | os.PathLike[str] | Iterable[Any]


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a job did.

    Fields:
        output, errors_output: the files; ``None``: rows and errors are in ``rows`` and ``errors`` instead (or there are no errors).
        stats: figures of the job, over all its sessions.
        nothing_to_do: it was finished before, with the same documents.
    """

    output: Path | None
    errors_output: Path | None
    stats: Stats
    rows: list[Row] = field(default_factory=list)
    errors: list[Row] = field(default_factory=list)
    nothing_to_do: bool = False


async def aextract(
    source: Source,
    *,
    schema: Any = None,
    regex: str | None = None,
    choices: Any = None,
    output: str | os.PathLike[str] | None = None,
    prompt: str | None = None,
    examples: Any = None,
    model: str | None = None,
    endpoint: str | None = None,
    engine: AsyncEngine | Engine | None = None,
    field: str | None = None,
    id_field: str | None = None,
    format: str = "auto",
    order: str = "input",
    max_tokens: int = 512,
    temperature: float = 0.0,
    seed: int = 0,
    retries: int = 1,
    merge: str = "vote",
    overlap: int = 64,
    confidence: bool = False,
    evidence: bool = False,
    restart: bool = False,
    concurrency: int | None = None,
    patience: float = 60.0,
    progress: Callable[[Stats], None] | None = None,
    backend: Backend | None = None,
    **engine_settings: Any,
) -> JobResult:
    """Extract a row from every document of ``source``. ``extract`` is the same for where no event loop runs.

    Args:
        source: a path (JSONL, CSV, parquet, a text, Markdown or HTML file, a folder of them, "-" for stdin), or an iterable of texts,
            ``(id, text)`` or mappings.
        schema, regex, choices: what a row is; one of them. ``schema``: a JSON Schema (a mapping, its text, a file) or a pydantic model
            (the class, or "package.module:Model").
        output: a .jsonl or .csv file; beside it stand OUTPUT.errors.jsonl and OUTPUT.job. Called again after whatever interrupted it,
            the job goes on; ``None``: rows are returned.
        prompt: what to do, in place of the default words. examples: a JSONL file of ``{"text", "value"}``, or such mappings.
        model, engine_settings: as ``Engine`` takes them; or ``engine``: one that is there; or ``endpoint``: the address of an OpenAI
            server, whose model ``model`` then names; or ``backend``: any other.
        field, id_field, format: the property or column of the text and of the id, and what the source is, where that must be told.
        order: of the rows: "input", or "completed".
        max_tokens: of an answer. temperature, seed: of sampling; 0 is greedy.
        retries: how often a document is asked again, with what was wrong.
        merge: of scalars of a document in parts: "vote" or "first". overlap: tokens that a part repeats of the one before.
        confidence: of each field, from its tokens' log-probabilities. evidence: of each field, a quotation of the document.
        restart: forget what an earlier job wrote to ``output``.
        concurrency: requests at a time; ``None``: what the pool takes, 16 for an endpoint that does not say.
        patience: seconds that an endpoint may be down before the job stops.
        progress: called with the job's ``Stats`` whenever a document has finished.

    Raises:
        InvalidRequest: names the argument at fault, or what is not as it was when ``output`` was begun.
        ModelError: the model cannot be had.
        JobStopped: the backend is down, or the file system takes no more; what is finished is kept.
    """
    if order not in ORDERS:
        raise InvalidRequest("order", f"={shown(order)}: must be one of {', '.join(ORDERS)}")
    if merge not in HOW:
        raise InvalidRequest("merge", f"={shown(merge)}: must be one of {', '.join(HOW)}")
    for name, value in (("confidence", confidence), ("evidence", evidence), ("restart", restart)):
        flag(name, value)
    target = load_target(schema=schema, regex=regex, choices=choices)
    plan = Plan(
        target=target,
        layout=Layout(target, prompt=prompt, examples=examples),
        max_tokens=integer("max_tokens", max_tokens, 1, 2**31 - 1) or 1,
        seed=integer("seed", seed, -(2**63), 2**64 - 1) or 0,
        retries=integer("retries", retries, 0, 100) or 0,
        merge=merge,
        overlap=integer("overlap", overlap, 0, 2**31 - 1) or 0,
        confidence=confidence,
        evidence=evidence,
        concurrency=integer("concurrency", concurrency, 1, 65536, optional=True),
    )
    number("temperature", temperature, 0.0, 100.0)
    number("patience", patience, 0.0, 1e9)
    if sum(one is not None for one in (endpoint, engine, backend)) > 1:
        raise InvalidRequest("endpoint", "in one job there is one of endpoint, engine and backend")
    if backend is None:
        backend = _backend(target, model, endpoint, engine, temperature, concurrency, patience, engine_settings)
    settings = {
        "schema" if schema is not None else "regex" if regex is not None else "choices": target.digest,
        "prompt": plan.layout.digest,
        "max_tokens": plan.max_tokens,
        "temperature": temperature,
        "seed": plan.seed,
        "retries": plan.retries,
        "merge": merge,
        "overlap": plan.overlap,
        "confidence": confidence,
        "evidence": evidence,
        **_answering(backend, engine, engine_settings),
    }
    rows = jsonl_format() if output is None else _row_format(Path(output), target, confidence, evidence)
    if output is not None:
        _refuse_what_is_read(Path(output), (source, examples, schema))
    if endpoint is None and engine is None and isinstance(backend, EngineBackend):
        settings["model"] = await asyncio.to_thread(model_identity, model)
    stats = Stats(total=len(source) if isinstance(source, Sized) and not isinstance(source, str) else None)
    async with AsyncExitStack() as stack:
        documents = await _opened(source, field, id_field, format, stack)
        if progress is not None and _can_be_read_twice(source):
            counting = read_documents(source, format=format, field=field, id_field=id_field)
            stack.callback(_count(counting, stats).set)
        if output is None:
            memory = Memory(order)
            await _run(documents, plan, backend, memory, stats, progress, {}, stack)
            return JobResult(None, None, stats, memory.rows, memory.errors)
        journal = stack.enter_context(Journal(output, settings, order=order, format=rows, restart=restart))
        stats.rows, stats.failed, stats.usage = journal.rows, journal.failed, journal.usage
        stats.resumed = journal.rows + journal.failed
        if journal.finished is not None:
            async for document in documents:
                if not journal.known(document.index, fingerprint(document)):  # it was added since
                    documents = _led_by(document, documents)
                    journal.extend()
                    break
                stats.read += 1
            else:
                if not journal.unchanged():
                    raise InvalidRequest(
                        "source",
                        f" has changed since {os.fspath(output)!r} was finished; restart to do all documents again",
                    )
        done = journal.finished is not None
        if not done:
            await _run(documents, plan, backend, journal, stats, progress, settings, stack)
            journal.finish()
        errors = journal.errors if journal.failed else None
        return JobResult(journal.output, errors, stats, nothing_to_do=done)


@functools.wraps(aextract)
def extract(*arguments: Any, **settings: Any) -> JobResult:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(aextract(*arguments, **settings))
    raise InvalidRequest("extract", "cannot be called where an event loop runs: use `await aextract(...)`")


def _answering(backend: Backend, engine: object, settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings of our own engine that can change an answer: also those that were not given."""
    if engine is not None or not isinstance(backend, EngineBackend):
        return {}
    config = EngineConfig.from_kwargs(**settings)
    return {name: str(getattr(config, name)) for name in _ANSWERING}


async def _run(
    documents: AsyncIterator[Document],
    plan: Plan,
    backend: Backend,
    sink: Journal | Memory,
    stats: Stats,
    progress: Callable[[Stats], None] | None,
    settings: Mapping[str, Any],
    stack: AsyncExitStack,
) -> None:
    stack.push_async_callback(backend.close)
    await backend.start()
    if "model" not in settings:
        sink.settle({"model": await _identity(backend)})
    await run_job(documents, plan, backend, sink, stats, progress)


def _backend(
    target: Target,
    model: str | None,
    endpoint: str | None,
    engine: AsyncEngine | Engine | None,
    temperature: float,
    concurrency: int | None,
    patience: float,
    settings: Mapping[str, Any],
) -> Backend:
    if endpoint is None:
        if engine is None:
            EngineConfig.from_kwargs(model=model, **settings)  # says what is wrong with them before anything is loaded
        return EngineBackend(target, model=model, engine=engine, temperature=temperature, **settings)
    for name in settings:
        raise InvalidRequest(name, "is a setting of an engine in this process, not of an endpoint")
    return EndpointBackend(
        target, endpoint, model=model, temperature=temperature, concurrency=concurrency, patience=patience
    )


async def _opened(
    source: Source, field: str | None, id_field: str | None, format: str, stack: AsyncExitStack
) -> AsyncIterator[Document]:
    """The documents, the first of them read already: what is wrong with the whole source is said now."""
    if isinstance(source, (str, os.PathLike)):
        stream = in_thread(read_documents(source, format=format, field=field, id_field=id_field))
    else:
        stream = inline(given_documents(source, field=field, id_field=id_field))
    await stack.enter_async_context(aclosing(stream))
    first = await anext(stream, None)
    return stream if first is None else _led_by(first, stream)


async def _led_by(first: Document, documents: AsyncIterator[Document]) -> AsyncIterator[Document]:
    yield first
    async for document in documents:
        yield document


def _can_be_read_twice(source: Source) -> TypeGuard[str | os.PathLike[str]]:
    """A file or a folder: of a pipe, each document goes to one reader."""
    return (
        isinstance(source, (str, os.PathLike))
        and os.fspath(source) != "-"
        and (os.path.isfile(source) or os.path.isdir(source))
    )


def _count(documents: Iterator[Document], stats: Stats) -> threading.Event:
    """Count the documents beside the job, for an estimate of what is left; the event ends it."""
    stop = threading.Event()

    def count() -> None:
        total = 0
        with suppress(RadixrtError):  # the job says it, where it meets it
            for _ in documents:
                total += 1
                if stop.is_set():
                    return
            stats.total = total

    threading.Thread(target=count, name="radixrt-count", daemon=True).start()
    return stop


def _refuse_what_is_read(output: Path, sources: Iterable[Any]) -> None:
    for own in (output, output.with_name(output.name + ".errors.jsonl")):
        read = read_there(own, sources)
        if read is not None:
            raise InvalidRequest(
                "output",
                f"={shown(str(output))}: {own.name!r} would be written, and {shown(read)} is read by the job; name another place",
            )


def _row_format(
    output: Path, target: Target, confidence: bool, evidence: bool
) -> tuple[bytes, Callable[[bytes], bytes]]:
    if "\0" in str(output):
        raise InvalidRequest("output", f"={shown(str(output))}: has a null byte in it")
    ending = output.suffix.lower()
    if ending not in (".jsonl", ".ndjson", ".csv"):
        raise InvalidRequest("output", f"={shown(str(output))}: must end in .jsonl or .csv")
    if ending != ".csv":
        return jsonl_format()
    if not target.flat:
        raise InvalidRequest(
            "output",
            f"={shown(str(output))}: CSV holds values without lists and objects in them; name a .jsonl file for this schema",
        )
    extra = ["parts", *["confidence"] * confidence, *["evidence"] * evidence]
    return csv_format(target.fields, extra)


async def _identity(backend: Backend) -> str:
    if isinstance(backend, EngineBackend):
        model = await backend.engine.call(lambda engine: engine.config.model)
        return await asyncio.to_thread(model_identity, model)
    return f"endpoint: {backend.name}"


def model_identity(model: str | None) -> str:
    """What tells one model on this machine from another, without reading all of it: a digest of its configuration, its tokenizer, and of
    the size and three samples of each file of weights. Where it lies and what it is called do not count.

    Raises:
        ModelError: there is no such model.
    """
    path = resolve(model)
    weights = (".gguf", ".safetensors")
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    total = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        if file.suffix in weights:
            starts = sorted({0, max(0, size // 2), max(0, size - _SAMPLE)})
        elif file.suffix in (".json", ".jinja", ".model", ".txt"):
            starts = list(range(0, size, _SAMPLE))
        else:
            continue
        name = "" if path.is_file() else file.name
        total.update(f"{name}\0{size}\0".encode())
        with open(file, "rb") as data:
            for start in starts:
                data.seek(start)
                total.update(data.read(_SAMPLE))
    return total.hexdigest()
