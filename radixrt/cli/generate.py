"""``radixrt generate``: reads prompts, answers them all in one engine, and writes text or JSON rows in input order.

Invariants: everything on the command line is checked before a model is loaded; a bad prompt costs only its own row;
rows are written as soon as all before them are, so an interruption loses no finished row that could be written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, TextIO

from radixrt.cli import figures, flags
from radixrt.cli.records import Job, Template, error_row, failed_job, json_job, output_row, read_lines, text_job
from radixrt.config import EngineConfig
from radixrt.errors import InvalidRequest, RadixrtError
from radixrt.progress import progress
from radixrt.request import OutputDelta, RequestOutput, SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts; without any, --file or stdin is read")
    parser.add_argument(
        "--file", metavar="F", help="read prompts from this file, '-' for stdin: one per line, or JSONL"
    )
    parser.add_argument(
        "--format",
        choices=("auto", "text", "jsonl"),
        default="auto",
        help="what --file or stdin holds; auto: JSONL for *.jsonl or a first line that begins with '{'. A JSONL line has "
        "prompt, messages or token_ids, and may have id, any sampling parameter, and json_schema, regex, choices or substring",
    )
    parser.add_argument("--output", metavar="F", help="write one JSON row per prompt to this file")
    parser.add_argument("--jsonl", action="store_true", help="print JSON rows with all figures instead of text")
    parser.add_argument("--chat", action="store_true", help="wrap each plain prompt in the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="the system message of --chat")
    parser.add_argument("--quiet", action="store_true", help="print no progress and no figures on stderr")
    flags.add_sampling_flags(parser)
    flags.add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = EngineConfig.from_kwargs(**flags.engine_settings(args))
    template = Template(flags.sampling_settings(args), chat=args.chat, system=args.system)
    SamplingParams(**template.params)  # an error in a flag is the user's now, not the row's later
    if args.system is not None and not args.chat:
        raise InvalidRequest("--system", "needs --chat")
    _check_output(args.output, args.file)
    jobs = list(_jobs(args, template))
    if not jobs:
        raise InvalidRequest("prompts", "there are none")

    with ExitStack() as stack:
        usable = [job for job in jobs if job.error is None]
        engine: Any = None
        if usable:
            from radixrt import Engine

            engine = stack.enter_context(Engine(progress=not args.quiet, **flags.engine_settings(args)))
        file = None if args.output is None else stack.enter_context(_open_output(args.output))
        streaming = len(jobs) == 1 and not args.jsonl and all(job.params.n == 1 for job in usable if job.params)
        writer = _Writer(jobs, file, rows=args.jsonl, live=streaming)
        started = time.perf_counter()
        if engine is not None:
            show = len(usable) > 1 and not args.quiet
            bar = stack.enter_context(progress("generating", len(usable), unit="prompts", show=show))
            for job, delta, error in _answers(engine, usable, config.max_waiting_requests):
                if delta is None:
                    writer.failed(job, error)
                    bar.advance()
                elif delta.output is None:
                    writer.part(delta)
                else:
                    writer.part(delta)
                    writer.done(job, delta.output)
                    bar.advance()
            bar.close()
            if not args.quiet:
                print(figures.summary(engine.stats(), time.perf_counter() - started), file=sys.stderr)
    return 1 if writer.failures else 0


def _answers(engine: Any, jobs: list[Job], limit: int) -> Iterator[tuple[Job, OutputDelta | None, str]]:
    """Run the jobs: a delta of a job, or why it was refused. At most ``limit`` samples wait in the engine at a time."""
    waiting, held = deque(jobs), 0
    running: dict[str, Job] = {}
    while waiting or running:
        while waiting and (not running or held + _samples(waiting[0]) <= limit):
            job = waiting.popleft()
            try:
                running[engine.add(job.prompt, job.params)] = job
                held += _samples(job)
            except RadixrtError as error:
                yield job, None, str(error)
        if not running:
            continue
        for delta in engine.step():
            job = running[delta.request_id]
            if delta.output is not None:
                held -= _samples(running.pop(delta.request_id))
            yield job, delta, ""


def _samples(job: Job) -> int:
    return 1 if job.params is None else job.params.n


class _Writer:
    """Writes rows in input order; those that finish early wait for those before them."""

    def __init__(self, jobs: list[Job], file: TextIO | None, *, rows: bool, live: bool) -> None:
        self._jobs, self._file, self._rows, self._live = jobs, file, rows, live
        self._ready: dict[int, tuple[dict[str, Any], RequestOutput | None]] = {}
        self._next = 0
        self._ascii = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
        self.failures = 0
        for job in jobs:
            if job.error is not None:
                self.failed(job, job.error)

    def part(self, delta: OutputDelta) -> None:
        """A piece of an answer, shown at once when it is the only one."""
        if self._live:
            sys.stdout.write(figures.printable(delta.text, sys.stdout))
            sys.stdout.flush()

    def done(self, job: Job, output: RequestOutput) -> None:
        if output.error is not None:
            self._report(job, output.error)
        self._ready[job.index] = output_row(job, output), output
        self._flush()

    def failed(self, job: Job, error: str) -> None:
        self._report(job, error)
        self._ready[job.index] = error_row(job, error), None
        self._flush()

    def _report(self, job: Job, error: str) -> None:
        self.failures += 1
        print(f"radixrt: {job.where}: {error}".replace("\n", " "), file=sys.stderr)

    def _flush(self) -> None:
        while self._next in self._ready:
            row, output = self._ready.pop(self._next)
            if self._file is not None:
                self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
                self._file.flush()
            if self._rows:
                print(json.dumps(row, ensure_ascii=self._ascii), flush=True)
            elif output is not None:
                self._print(self._jobs[self._next], output)
            self._next += 1

    def _print(self, job: Job, output: RequestOutput) -> None:
        if self._live:
            print(flush=True)
            return
        lines = []
        for sample in output.samples:
            number = f"{job.index + 1}" if len(output.samples) == 1 else f"{job.index + 1}.{sample.index + 1}"
            if len(self._jobs) > 1 or len(output.samples) > 1:
                lines.append(f"[{number}] {_title(job)}")
            lines += [sample.text, ""]
        print(figures.printable("\n".join(lines), sys.stdout), flush=True)


def _title(job: Job) -> str:
    """The prompt, short enough for a heading."""
    if job.id is not None:
        return str(job.id)
    prompt = job.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        prompt = str(prompt[-1].get("content", ""))
    elif not isinstance(prompt, str):
        prompt = f"{len(prompt or [])} token ids"
    line = " ".join(prompt.split())
    return line if len(line) <= 100 else line[:97] + "..."


def _jobs(args: argparse.Namespace, template: Template) -> Iterator[Job]:
    index = 0
    for number, text in enumerate(args.prompts, 1):
        yield text_job(index, f"prompt {number}", None, text, template)
        index += 1
    if args.file is None and args.prompts:
        return
    if args.file in (None, "-"):
        if args.file is None and sys.stdin.isatty():
            raise InvalidRequest("prompts", "give one as an argument, name a file with --file, or pipe them in")
        yield from _lines(sys.stdin.buffer, "stdin", args.format, index, template)
    else:
        with open(args.file, "rb") as file:
            yield from _lines(file, args.file, args.format, index, template)


def _lines(file: Any, name: str, form: str, index: int, template: Template) -> Iterator[Job]:
    if form == "auto" and name.endswith((".jsonl", ".ndjson")):
        form = "jsonl"
    for line, text, problem in read_lines(file):
        where = f"{name}, line {line}"
        if form == "auto":
            form = "jsonl" if text.lstrip().startswith("{") else "text"
        if problem is not None:
            yield failed_job(index, where, line, problem)
        elif form == "jsonl":
            yield json_job(index, where, line, text, template)
        else:
            yield text_job(index, where, line, text, template)
        index += 1


def _open_output(path: str) -> TextIO:
    """What UTF-8 cannot hold (half a surrogate pair) is written as JSON's own escape."""
    return open(path, "w", encoding="utf-8", errors="backslashreplace")


def _check_output(output: str | None, source: str | None) -> None:
    """Refuse, before any work, a place that cannot be written to; nothing is opened yet, so nothing is emptied."""
    if output is None:
        return
    folder = os.path.dirname(os.path.abspath(output))
    if not os.path.isdir(folder):
        raise InvalidRequest("--output", f"={output!r}: there is no folder {folder!r}")
    if os.path.isdir(output):
        raise InvalidRequest("--output", f"={output!r}: is a folder")
    if (
        source not in (None, "-")
        and os.path.exists(output)
        and os.path.exists(source)
        and os.path.samefile(output, source)
    ):
        raise InvalidRequest("--output", f"={output!r}: is the file the prompts come from")
