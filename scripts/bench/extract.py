"""``radixrt extract`` on made-up invoices: whole, killed again and again, and beside other ways to do the same job.

    python scripts/bench/extract.py whole [--count 2000] [--max-tokens 350] [--kills 20] [--folder F]
    python scripts/bench/extract.py peers [--count 48] [--outlines-python PATH] [--rounds 1]

``whole`` runs the job once to its end and once with as many kills -9 at random moments, and compares the bytes; every row is judged by
``jsonschema``. ``peers`` measures documents a second beside (a) transformers with outlines in one process, whose python is given (its
environment has ``outlines[transformers]``), one after another, as its batches fail where one row ends before others, and (b) our own HTTP server, asked by 16 clients with the document first, so
that prompts share nothing. Run alone on the machine. Exit status 1: a row is lost, doubled or not valid, or the outputs differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "extract"

# Runs in the other environment: prompts and schema in, answers out, one JSON line each.
OUTLINES = """
import json, sys, time
import outlines, torch
from outlines.types import JsonSchema
from transformers import AutoModelForCausalLM, AutoTokenizer
job = json.load(open(sys.argv[1]))
torch.set_num_threads(job["threads"])
tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
tokenizer.pad_token = tokenizer.eos_token
model = outlines.from_transformers(AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32), tokenizer)
generator = outlines.Generator(model, JsonSchema(json.dumps(job["schema"])))
generator(job["prompts"][0], max_new_tokens=2, do_sample=False)
start = time.perf_counter()
for prompt in job["prompts"]:
    print(json.dumps({"text": generator(prompt, max_new_tokens=job["max_tokens"], do_sample=False)}), flush=True)
print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
"""


def documents(folder: Path, count: int) -> Path:
    """``count`` invoices as JSONL."""
    subprocess.run(
        [sys.executable, EXAMPLES / "make_documents.py", "invoices", "--count", str(count), "--output", folder],
        check=True,
    )
    return folder / "invoices.jsonl"


def command(source: Path, output: Path, max_tokens: int, threads: int) -> list[str]:
    return [
        *(
            sys.executable,
            "-m",
            "radixrt",
            "extract",
            str(source),
            "--schema",
            "models:Invoice",
            "--output",
            str(output),
        ),
        *("--max-tokens", str(max_tokens), "--threads", str(threads)),
    ]


def job(arguments: Sequence[str], seconds: float | None = None) -> tuple[bool, str]:
    """Run it, or kill it after some seconds; whether it ended, and the last lines it said."""
    process = subprocess.Popen(
        arguments, cwd=EXAMPLES, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        said = process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return False, ""
    if process.returncode not in (0, 1):
        raise SystemExit(f"the job ended with {process.returncode}: {said[-2000:]}")
    return True, said.strip()


def schema() -> dict[str, Any]:
    sys.path.insert(0, str(EXAMPLES))
    from models import Invoice

    from radixrt.jobs.target import load_target

    found = load_target(schema=Invoice).schema
    assert found is not None
    return found


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def judge(output: Path, count: int) -> list[str]:
    """What is wrong with a finished output of documents ``invoice-0001`` ... in order."""
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    validator = Draft202012Validator(schema(), format_checker=Draft202012Validator.FORMAT_CHECKER)
    rows, errors = rows_of(output), rows_of(Path(f"{output}.errors.jsonl"))
    ids = [row["id"] for row in rows]
    wrong = [f"{row['id']} is not valid" for row in rows if not validator.is_valid(row["value"])]
    if len(set(ids)) != len(ids):
        wrong.append("an id stands twice")
    if len(rows) + len(errors) != count:
        wrong.append(f"{len(rows)} rows and {len(errors)} errors of {count} documents")
    return wrong


def whole(args: argparse.Namespace, folder: Path) -> int:
    source = documents(folder, args.count)
    plain, killed = folder / "plain.jsonl", folder / "killed.jsonl"
    start = time.perf_counter()
    _, said = job(command(source, plain, args.max_tokens, args.threads))
    took = time.perf_counter() - start
    print(said)
    wrong = judge(plain, args.count)
    print(
        f"{args.count} documents in {took:.1f} s; {len(rows_of(plain))} rows, {len(wrong)} things wrong",
        *wrong[:5],
        sep="\n",
    )
    rng, kills, starts = random.Random(args.seed), 0, 0
    start = time.perf_counter()
    while True:
        starts += 1
        ended, said = job(
            command(source, killed, args.max_tokens, args.threads),
            rng.uniform(0.5, 2.2 * took / args.kills) if kills < args.kills else None,
        )
        if ended:
            break
        kills += 1
    same = [
        one.read_bytes() == other.read_bytes()
        for one, other in ((plain, killed), (Path(f"{plain}.errors.jsonl"), Path(f"{killed}.errors.jsonl")))
        if one.exists() or other.exists()
    ]
    print(f"killed {kills} times, {starts} starts, {time.perf_counter() - start:.1f} s: the same bytes: {all(same)}")
    return 0 if all(same) and not wrong else 1


# -- beside others


def with_outlines(python: str, texts: Sequence[str], args: argparse.Namespace, folder: Path) -> tuple[float, list[str]]:
    from peers import save_float32

    from radixrt.jobs.prompt import Layout
    from radixrt.jobs.target import load_target
    from radixrt.model.source import resolve
    from radixrt.model.tokenizer import load_tokenizer

    weights = folder / "float32"
    if not weights.exists():
        save_float32(Path(resolve(None)), weights)
    tokenizer = load_tokenizer(str(resolve(None)))
    layout = Layout(load_target(schema=schema()))
    prompts = [tokenizer.render_chat(layout.document(text).messages) for text in texts]
    given = folder / "outlines.json"
    given.write_text(
        json.dumps(
            {
                "model": str(weights),
                "schema": schema(),
                "prompts": prompts,
                "max_tokens": args.max_tokens,
                "threads": args.threads,
            }
        )
    )
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    env.pop("PYTHONPATH", None)
    done = subprocess.run([python, "-c", OUTLINES, str(given)], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"outlines: {done.stderr[-2000:]}")
    *answers, last = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return last["seconds"], [answer["text"] for answer in answers]


async def over_http(texts: Sequence[str], address: str, max_tokens: int) -> tuple[float, list[str]]:
    """16 clients, the document before everything that documents share."""
    import aiohttp

    words = (
        "Extract what the JSON Schema describes from the document above. Answer with JSON.\n\nJSON Schema: "
        + json.dumps(schema())
    )
    waiting: Iterator[tuple[int, str]] = iter(enumerate(texts))
    answers = [""] * len(texts)

    async def client(session: aiohttp.ClientSession) -> None:
        for at, text in waiting:
            body: Mapping[str, Any] = {
                "messages": [{"role": "user", "content": f"{text}\n\n{words}"}],
                "max_tokens": max_tokens,
                "temperature": 0,
                "response_format": {"type": "json_schema", "json_schema": {"name": "row", "schema": schema()}},
            }
            async with session.post(f"{address}/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                answers[at] = (await response.json())["choices"][0]["message"]["content"]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        start = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(16)))
        return time.perf_counter() - start, answers


def valid(answers: Sequence[str]) -> int:
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    validator = Draft202012Validator(schema())

    def fits(text: str) -> bool:
        try:
            return validator.is_valid(json.loads(text))
        except ValueError:
            return False

    return sum(map(fits, answers))


def beside(args: argparse.Namespace, folder: Path) -> int:
    from peers import Program, started

    source = documents(folder, args.count)
    texts = [json.loads(line)["text"] for line in source.read_text("utf-8").splitlines()]
    found: dict[str, list[float]] = {}

    def say(name: str, seconds: float, good: int) -> None:
        found.setdefault(name, []).append(seconds)
        print(
            f"{name}: {len(texts) / seconds:.2f} documents/s ({seconds:.1f} s), {good} of {len(texts)} valid",
            flush=True,
        )

    for turn in range(args.rounds):
        output = folder / f"rows{turn}.jsonl"
        _, said = job(
            [*command(source, output, args.max_tokens, args.threads), "--report", str(folder / "report.html")]
        )
        say("radixrt extract", _seconds(said), valid([json.dumps(row["value"]) for row in rows_of(output)]))
        serve = Program("radixrt", (sys.executable, "-m", "radixrt", "serve", "--threads", str(args.threads), "--port"))
        with started(serve, args.threads, folder / "server.log") as address:
            asyncio.run(over_http(texts[:1], address, args.max_tokens))
            seconds, answers = asyncio.run(over_http(texts, address, args.max_tokens))
        say("our server, document first", seconds, valid(answers))
        if args.outlines_python:
            seconds, answers = with_outlines(args.outlines_python, texts, args, folder)
            say("transformers + outlines", seconds, valid(answers))
    middle = {name: sorted(times)[len(times) // 2] for name, times in found.items()}
    for name, seconds in middle.items():
        print(f"{name}: {seconds / middle['radixrt extract']:.2f}x the time of radixrt extract")
    return 0


def _seconds(said: str) -> float:
    """Of the job's own last line: loading the model is in nobody's time."""
    import re

    found = re.findall(r"([\d.,]+) s\b", said)
    if not found:
        raise SystemExit(f"the job did not say how long it took: {said[-500:]}")
    return float(found[-1].replace(",", ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("whole", "peers"))
    parser.add_argument("--count", type=int)
    parser.add_argument("--max-tokens", type=int, default=350)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outlines-python", metavar="PATH")
    parser.add_argument("--folder", type=Path, help="kept; nothing: one that is deleted")
    args = parser.parse_args()
    args.count = args.count or (2000 if args.what == "whole" else 48)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (args.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return whole(args, folder) if args.what == "whole" else beside(args, folder)


if __name__ == "__main__":
    sys.exit(main())
