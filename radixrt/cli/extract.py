"""``radixrt extract``: a whole extraction job from the command line, with its figures, its score and its report.

Invariants: every setting of ``radixrt.jobs.extract`` is a flag, and what was not given is left to it; files beside the rows (gold,
report) are looked at before a model is loaded; rows go to ``--output`` or stdout, everything else to stderr, but a score beside
``--output``, which is a result too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from radixrt.cli import figures, flags
from radixrt.config import EngineConfig
from radixrt.errors import InvalidRequest, RadixrtError, shown
from radixrt.progress import progress

if TYPE_CHECKING:
    from radixrt.jobs.documents import Document
    from radixrt.jobs.gold import Gold, Score
    from radixrt.jobs.job import JobResult
    from radixrt.jobs.stats import Stats

_JOB, _ENGINE = "extract.", "engine."
_TRIED = 3  # documents of a dry run
_MOST_PROBLEMS = 5  # that are listed
_USER = re.compile(r"//[^/@]*@")  # a name and password in an address: no page shows them

_FORMATS = ("auto", "jsonl", "csv", "tsv", "parquet", "text", "html", "lines", "folder")
_METAVARS = {
    "schema": "S",
    "regex": "R",
    "choices": "A,B,...",
    "output": "F",
    "prompt": "P",
    "examples": "F",
    "endpoint": "URL",
}


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a job, as flags. Their meaning and their checks are those of ``radixrt.jobs.extract``.

    Fields:
        schema: what a row is: a JSON Schema (a file, or its text), or a pydantic model as package.module:Model
        regex: in place of a schema: rows are texts that this regular expression matches
        choices: in place of a schema: rows are one of these words
        output: write the rows to this .jsonl or .csv file, and continue it if it was begun; without it, they are printed at the end
        prompt: what to do, in your own words, or @FILE with them; the schema is added
        examples: a JSONL file of {"text", "value"}: documents and what is to come out of them, shown to the model
        endpoint: ask this OpenAI-compatible server in place of a model in this process; --model names its model
        field: the column of the text (default text, or the only column of strings)
        id_field: the column of the ids (default id where there is one)
        format: what INPUT is; auto goes by its name
        order: of the rows in --output
        max_tokens: most tokens of an answer; every answer is complete and valid within them
        temperature: 0 always takes the likeliest token
        seed: the same seed, input and settings give the same rows
        retries: how often a document whose row is wrong is asked again, with what is wrong
        merge: how single values of a document's parts become one, where it is longer than the context
        overlap: tokens that a part repeats of the one before
        confidence: add to each field how sure the model was, from 0 to 1
        evidence: add to each field the words of the document that it is taken from
        restart: forget what is in --output, and begin anew
        concurrency: requests at a time (default what the pool takes; 16 for an endpoint that does not say)
        patience: seconds that an endpoint may be down before the job stops
    """

    schema: str | None = None
    regex: str | None = None
    choices: str | None = None
    output: str | None = None
    prompt: str | None = None
    examples: str | None = None
    endpoint: str | None = None
    field: str | None = None
    id_field: str | None = None
    format: str = dataclasses.field(default="auto", metadata={"choices": _FORMATS})
    order: str = dataclasses.field(default="input", metadata={"choices": ("input", "completed")})
    max_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0
    retries: int = 1
    merge: str = dataclasses.field(default="vote", metadata={"choices": ("vote", "first")})
    overlap: int = 64
    confidence: bool = False
    evidence: bool = False
    restart: bool = False
    concurrency: int | None = None
    patience: float = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input",
        metavar="INPUT",
        help="JSONL, CSV, parquet, a text, Markdown or HTML file, a folder of them, or - for stdin",
    )
    group = parser.add_argument_group("job")
    flags.add_flags(parser, group, Options, _JOB, flags.documented_fields(Options), {})
    for name, metavar in _METAVARS.items():
        parser._option_string_actions[f"--{name}"].metavar = metavar
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help=f"write nothing: show the prompt, the tokens, the first {_TRIED} rows and how long the job would take",
    )
    parser.add_argument(
        "--gold", metavar="F", help='score the rows, field by field, against this JSONL file of {"id", "value"}'
    )
    parser.add_argument("--report", metavar="F", help="write a page about the job to this .html file")
    parser.add_argument("--quiet", action="store_true", help="print no progress and no figures on stderr")
    group = parser.add_argument_group("engine")
    helps = {each.name: each.metadata["help"] for each in dataclasses.fields(EngineConfig)}
    flags.add_flags(
        parser, group, EngineConfig, _ENGINE, helps, {}, omit=("seed",)
    )  # every request of a job has its own


def run(args: argparse.Namespace) -> int:
    from radixrt.jobs.gold import Gold
    from radixrt.jobs.journal import JobStopped

    settings = _settings(args)
    output = settings.get("output")
    gold = None if args.gold is None else Gold(args.gold)
    if args.dry_run:
        for name in ("gold", "report"):
            if getattr(args, name) is not None:
                raise InvalidRequest(f"--{name}", "has nothing to show of a --dry-run")
        return _dry_run(args, settings)
    if args.report is not None:
        own = () if output is None else (output, f"{output}.errors.jsonl", f"{output}.job")
        prompt = flags.given_flags(args, _JOB).get("prompt") or ""
        asked = prompt[1:] if prompt.startswith("@") else None
        read = (args.input, args.gold, settings.get("schema"), settings.get("examples"), asked)
        _check_report(args.report, [each for each in (*own, *read) if each])
    try:
        result = _extract(args, settings)
    except JobStopped as error:
        raise RadixrtError(f"{error}{'' if output is None else '; the same command goes on from there'}") from error
    if result.output is None:
        for row in result.rows:
            print(json.dumps(row, ensure_ascii=(sys.stdout.encoding or "").lower().replace("-", "") != "utf8"))
        sys.stdout.flush()
    for failed in islice(_errors(result), _MOST_PROBLEMS):
        said = f"radixrt: {failed['id']}: {failed['error']}".replace("\n", " ")
        print(figures.printable(said, sys.stderr), file=sys.stderr)
    if not args.quiet:
        _say(result, output)
    if gold is not None or args.report is not None:
        _judge(args, settings, result, gold)
    return 1 if result.stats.failed else 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a job that were given."""
    settings = {**flags.given_flags(args, _ENGINE), **flags.given_flags(args, _JOB)}
    if "choices" in settings:
        settings["choices"] = [word.strip() for word in settings["choices"].split(",")]
        if not all(settings["choices"]):
            raise InvalidRequest("--choices", f": there is an empty choice among {shown(settings['choices'])}")
    prompt = settings.get("prompt") or ""
    if prompt.startswith("@"):
        try:
            with open(prompt[1:], encoding="utf-8-sig") as file:
                settings["prompt"] = file.read()
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else "is not UTF-8"
            raise InvalidRequest("--prompt", f"={shown(prompt)}: {problem}") from None
    return settings


def _check_report(path: str, others: Sequence[str]) -> None:
    """Refuse, before any work, a place that cannot be written to."""
    from radixrt.jobs.places import read_there

    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise InvalidRequest("--report", f"={shown(path)}: there is no folder {shown(folder)}")
    if os.path.isdir(path):
        raise InvalidRequest("--report", f"={shown(path)}: is a folder")
    if read_there(path, others) or os.path.realpath(path) in map(os.path.realpath, others):
        raise InvalidRequest("--report", f"={shown(path)}: is a file of the job itself, or in a folder that it reads")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise InvalidRequest("--report", f"={shown(path)}: cannot be written")


# ---- the job


def _extract(args: argparse.Namespace, settings: dict[str, Any]) -> JobResult:
    from radixrt.jobs.job import extract

    finished = 0
    with progress("extracting", unit="documents", show=not args.quiet) as bar:

        def show(stats: Stats) -> None:
            nonlocal finished
            finished = stats.finished
            bar.update(finished, _pace(stats), stats.total)

        try:
            return extract(args.input, progress=show, **settings)
        except KeyboardInterrupt:
            bar.close()
            if settings.get("output") is not None:
                goes_on = f"{finished:,} documents are finished; the same command goes on from there"
                print(f"\n{goes_on}", file=sys.stderr, end="")
            raise


def _documents(args: argparse.Namespace, settings: Mapping[str, Any]) -> Iterator[Document]:
    from radixrt.jobs.documents import read_documents

    return read_documents(
        args.input, **{name: settings[name] for name in ("field", "id_field", "format") if name in settings}
    )


def _pace(stats: Stats) -> str:
    rate = stats.session.output / stats.elapsed if stats.elapsed > 0 else 0.0
    failed = f" · {stats.failed:,} failed" if stats.failed else ""
    return f"{rate:,.0f} tok/s · {figures.percent(stats.cached_share)} cached{failed}"


def _say(result: JobResult, output: str | None) -> None:
    """The last lines of a job."""
    stats = result.stats
    ended = f"{stats.rows:,} rows, {stats.failed:,} failed"
    if result.nothing_to_do:
        print(f"nothing to do: {output} was finished before ({ended}); --restart makes it anew", file=sys.stderr)
        return
    earlier = f" ({stats.resumed:,} of them before)" if stats.resumed else ""
    used, seconds = stats.session, stats.elapsed
    pace = (
        f" ({used.output / seconds:,.1f} tok/s, {stats.documents_per_second:,.2f} documents/s)" if seconds > 0 else ""
    )
    print(
        f"{ended}{earlier} · {used.prompt:,} prompt tokens: {used.cached:,} cached, {figures.percent(stats.cached_share)} "
        f"(optimal {figures.percent(stats.optimal_share)}) · {used.output:,} tokens generated in {seconds:.1f} s{pace}",
        file=sys.stderr,
    )
    for name, path in (("rows", result.output), ("errors", result.errors_output)):
        if path is not None:
            print(f"{name}: {path}", file=sys.stderr)


# ---- the rows, once more


def _judge(args: argparse.Namespace, settings: Mapping[str, Any], result: JobResult, gold: Gold | None) -> None:
    """Score the rows, and write the page about them."""
    from radixrt.jobs.target import load_target

    target = load_target(**{name: settings.get(name) for name in ("schema", "regex", "choices")})
    score: Score | None = None
    if gold is not None:
        score = gold.score(_rows(result, target))
        print(score, file=sys.stderr if result.output is None else sys.stdout)
    if args.report is not None:
        from radixrt.jobs.report import About, report

        # of a switch that is on, its name says it all
        said = [
            (name.replace("_", " "), "" if value is True else _USER.sub("//", str(value)))
            for name, value in settings.items()
            if name not in ("prompt", "output", "restart") and value is not False
        ]
        points = result.stats.series
        best = result.stats.optimal_share if points else None
        about = About(os.path.basename(os.path.abspath(args.input)), said, points, best, target.fields, score)
        text = report(_rows(result, target), _errors(result), about)
        with open(args.report, "w", encoding="utf-8") as file:
            file.write(text)
        if not args.quiet:
            print(f"report: {args.report}", file=sys.stderr)


def _rows(result: JobResult, target: Any) -> Iterator[Mapping[str, Any]]:
    from radixrt.jobs.rows import read_rows

    return iter(result.rows) if result.output is None else read_rows(result.output, target)


def _errors(result: JobResult) -> Iterator[Mapping[str, Any]]:
    if result.errors_output is None:
        yield from result.errors
    else:
        with open(result.errors_output, encoding="utf-8") as file:
            yield from map(json.loads, file)


# ---- the dry run


def _dry_run(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    from radixrt.jobs.job import extract
    from radixrt.jobs.prompt import Layout
    from radixrt.jobs.target import load_target

    target = load_target(**{name: settings.get(name) for name in ("schema", "regex", "choices")})
    layout = Layout(target, prompt=settings.get("prompt"), examples=settings.get("examples"))
    first: list[Document] = []
    count = characters = unreadable = 0
    problems: list[str] = []
    for document in _documents(args, settings):
        count += 1
        characters += len(document.text)
        if document.problem:
            unreadable += 1
            if len(problems) < _MOST_PROBLEMS:
                problems.append(f"{document.id}: {document.problem}")
        elif len(first) < _TRIED:
            first.append(document)
    usable = count - unreadable
    print(f"{count:,} documents, {characters:,} characters; {unreadable:,} cannot be read")
    for problem in problems:
        print(figures.printable(f"  {problem}", sys.stdout))
    if not first:
        raise InvalidRequest("input", f"={shown(args.input)}: has no document that can be read")
    print(figures.printable(f"\nprompt of {first[0].id}:", sys.stdout))
    for message in layout.document(first[0].text).messages:
        print(figures.printable(f"[{message['role']}]\n{_cut(message['content'], 4_000)}\n", sys.stdout))

    tried = {
        name: value
        for name, value in settings.items()
        if name not in ("output", "order", "restart", "field", "id_field", "format")
    }
    with progress("trying", len(first), unit="documents", show=not args.quiet) as bar:
        result = extract(
            [(document.id, document.text) for document in first],
            progress=lambda stats: bar.update(stats.finished),
            **tried,
        )
    stats, sample = result.stats, sum(len(document.text) for document in first)
    used, scale = stats.session, characters / sample
    own = max(0, used.prompt - used.requests * stats.shared_tokens)
    prompts = usable * stats.shared_tokens + own * scale
    print(f"first {len(first)} rows:")
    for row in sorted(
        [*result.rows, *result.errors], key=lambda row: [document.id for document in first].index(row["id"])
    ):
        print(figures.printable(json.dumps(row, ensure_ascii=False), sys.stdout))
    print(
        f"\ntokens of a prompt: {stats.shared_tokens:,} shared by all documents, about {own / max(used.requests, 1):,.0f} of its own\n"
        f"tokens of the job: about {prompts:,.0f} of prompts, of which the cache can hold "
        f"{figures.percent(max(0.0, 1 - (stats.shared_tokens + own * scale) / max(prompts, 1)))}; "
        f"about {used.output / len(first) * usable:,.0f} generated (at most {settings.get('max_tokens', Options().max_tokens):,} for a row)\n"
        f"time: about {_long(stats.elapsed / len(first) * usable)} at the pace of these {len(first)}; "
        "less where more documents run at a time"
    )
    return 1 if result.errors or unreadable else 0


def _cut(text: str, most: int) -> str:
    left = len(text) - most
    return text if left <= 0 else f"{text[: most // 2]}\n[... {left:,} characters left out ...]\n{text[-most // 2 :]}"


def _long(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
