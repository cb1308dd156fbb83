"""JSON Schema coverage and cost: a benchmark of schemas with instances, and the official suite by keyword; peers beside it.

    python scripts/bench/schemas.py DATA [--peer llguidance] [--peer xgrammar] [--only dev|draft7|draft2020-12] [--spaced] [--verbose]

DATA holds ``jsonschemabench_dev.jsonl`` and ``json_schema_suite/``. A schema is *right* (in the suite: *perfect*) when it compiles
and every instance, tokenized by the model's own tokenizer, passes the masks and may end exactly if it is valid. Instances are
written compactly, or with ``--spaced`` as ``json.dumps`` does by default, white space being allowed then. The suite is read with
formats as annotations, as its required tests demand; the benchmark with known formats enforced.

Every engine, ours too, works in a process of its own, one schema at a time: one that takes longer than ``--limit`` seconds or
dies loses that schema, which counts as not compiled. Compile times are wall-clock, from the schema to the first matcher; mask
times are CPU time, of every mask on the way through the instances.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import radixrt
from radixrt.errors import RadixrtError
from radixrt.grammar.matcher import CompiledConstraint, compile_grammar
from radixrt.grammar.schema import compile_schema

LIMIT = 10.0  # seconds an engine may take for one schema
START_LIMIT = 120.0  # seconds a process may take to load an engine
MEMORY = 8 << 30  # bytes of address space a process may have


class Refused(Exception):
    """The engine does not compile the schema; the reason."""


class Steps(Protocol):
    """One sequence on its way through a grammar."""

    def fill(self) -> np.ndarray: ...
    def accept(self, token: int) -> bool: ...
    def can_end(self) -> bool: ...


@dataclass(frozen=True)
class Answer:
    """What an engine made of one schema."""

    compile_seconds: float
    refusal: str | None = None
    verdicts: tuple[bool, ...] = ()
    mask_ns: tuple[int, ...] = ()


@dataclass(frozen=True)
class Task:
    """A schema and its instances as text."""

    schema: Any
    texts: tuple[str, ...]
    spaced: bool
    options: dict[str, Any]


# ---- the engines; what they import is not installed everywhere


@cache
def tokenizer() -> Any:
    return radixrt.load_tokenizer()


@cache
def spelled() -> list[bytes]:
    known = tokenizer()
    return [known.token_bytes(token) for token in range(known.vocab_size)]


@cache
def mask() -> np.ndarray:
    return np.zeros((1, -(-tokenizer().vocab_size // 32)), dtype=np.int32)


class Ours:
    """This repository's compiler and automaton."""

    def compile(self, task: Task) -> Callable[[], Steps]:
        whitespace = "flexible" if task.spaced else "compact"
        try:
            compiled = compile_grammar(compile_schema(task.schema, whitespace=whitespace, **task.options), tokenizer())
        except RadixrtError as error:
            if "accepts nothing" in str(error):
                return OfNothing
            raise Refused(str(error)) from None
        return lambda: OurSteps(compiled)


class OurSteps:
    def __init__(self, compiled: CompiledConstraint) -> None:
        self._matcher = compiled.matcher()
        self.accept = self._matcher.accept

    def fill(self) -> np.ndarray:
        self._matcher.fill_mask(mask(), 0)
        return mask()[0]

    def can_end(self) -> bool:
        return self._matcher.can_end


class OfNothing:
    """Of a schema that was refused because no instance is valid: the right answer to every instance."""

    def fill(self) -> np.ndarray:
        return np.zeros_like(mask()[0])

    def accept(self, token: int) -> bool:
        return False

    def can_end(self) -> bool:
        return False


class Llguidance:
    """llguidance, strict."""

    def __init__(self) -> None:
        import llguidance

        known = tokenizer()

        class Wrapped:
            eos_token_id = min(known.eos_ids)
            bos_token_id = known.bos_id
            tokens = spelled()
            special_token_ids = sorted(known.special_ids)

            def __call__(self, text: bytes | str) -> list[int]:
                plain = text.decode() if isinstance(text, bytes) else text
                return list(known.encode(plain, add_special=False))

        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Wrapped()))

    def compile(self, task: Task) -> Callable[[], Steps]:
        from llguidance import LLMatcher

        compact = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
        overrides = {"whitespace_flexible": True} if task.spaced else compact
        try:
            grammar = LLMatcher.grammar_from_json_schema(task.schema, overrides=overrides)
        except Exception as error:
            raise Refused(str(error)) from None
        problem = LLMatcher.validate_grammar(grammar, self._tokenizer)
        if problem:
            raise Refused(problem)
        return lambda: LlguidanceSteps(LLMatcher(self._tokenizer, grammar))


class LlguidanceSteps:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.accept = matcher.consume_token
        self.can_end = matcher.is_accepting

    def fill(self) -> np.ndarray:
        row = mask()[0]
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return row


class Xgrammar:
    """xgrammar, additional properties as the schema says."""

    def __init__(self) -> None:
        import xgrammar

        known = tokenizer()
        info = xgrammar.TokenizerInfo(
            spelled(), xgrammar.VocabType.RAW, vocab_size=known.vocab_size, stop_token_ids=sorted(known.eos_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._stop = min(known.eos_ids)

    def compile(self, task: Task) -> Callable[[], Steps]:
        import xgrammar

        space = {"any_whitespace": True} if task.spaced else {"any_whitespace": False, "separators": (",", ":")}
        try:
            compiled = self._compiler.compile_json_schema(json.dumps(task.schema), strict_mode=False, **space)
        except Exception as error:
            raise Refused(str(error)) from None
        return lambda: XgrammarSteps(xgrammar.GrammarMatcher(compiled), self._stop)


class XgrammarSteps:
    def __init__(self, matcher: Any, stop: int) -> None:
        self._matcher, self._stop = matcher, stop
        self.accept = matcher.accept_token

    def fill(self) -> np.ndarray:
        self._matcher.fill_next_token_bitmask(mask())
        return mask()[0]

    def can_end(self) -> bool:
        return bool(self._matcher.accept_token(self._stop))


ENGINES: dict[str, Callable[[], Any]] = {"radixrt": Ours, "llguidance": Llguidance, "xgrammar": Xgrammar}


# ---- in the process of an engine


def answer(engine: Any, task: Task) -> Answer:
    begin = time.perf_counter()
    try:
        start = engine.compile(task)
        start()
    except Refused as error:
        return Answer(time.perf_counter() - begin, str(error))
    seconds = time.perf_counter() - begin
    times: list[int] = []
    verdicts = []
    for text in task.texts:
        steps = start()
        verdicts.append(
            all(step(steps, token, times) for token in tokenizer().encode(text, add_special=False)) and steps.can_end()
        )
    return Answer(seconds, None, tuple(verdicts), tuple(times))


def step(steps: Steps, token: int, times: list[int]) -> bool:
    begin = time.process_time_ns()
    row = steps.fill()
    times.append(time.process_time_ns() - begin)
    return bool(row[token // 32] >> token % 32 & 1) and bool(steps.accept(token))


def serve(name: str, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    engine = ENGINES[name]()
    answer(engine, Task({"type": "boolean"}, ("true",), False, {}))  # loads what is loaded at first use
    gc.freeze()
    gc.disable()  # not in the middle of a mask
    pipe.send(None)
    while True:
        task = pipe.recv()
        begin = time.perf_counter()
        try:
            found = answer(engine, task)
        except Exception as error:
            found = Answer(time.perf_counter() - begin, repr(error))
        pipe.send(found)
        del task, found
        gc.collect()


class Isolated:
    """An engine in a process of its own: where it hangs or crashes it loses that schema only."""

    def __init__(self, name: str, limit: float) -> None:
        self.name, self.limit = name, limit
        self._process: Any = None
        self._pipe: Any = None

    def __call__(self, task: Task) -> Answer:
        begin = time.perf_counter()
        try:
            if self._process is None:
                self._start()
                begin = time.perf_counter()
            self._pipe.send(task)
            if self._pipe.poll(self.limit):
                found: Answer = self._pipe.recv()
                return found
            reason = f"took longer than {self.limit:g} s"
        except (EOFError, OSError):
            reason = "the process died"
        self.close()
        return Answer(time.perf_counter() - begin, reason)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # nothing of this process, its threads least of all, goes along
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(self.name, other), daemon=True)
        self._process.start()
        other.close()
        try:
            if self._pipe.poll(START_LIMIT):
                self._pipe.recv()
                return
        except EOFError:
            pass
        self.close()
        raise SystemExit(f"{self.name} does not start: is it installed?")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


# ---- what is counted


@dataclass
class Tally:
    """What happened to a group of schemas."""

    schemas: int = 0
    compiled: int = 0
    right: int = 0
    invalid: int = 0  # instances
    accepted_invalid: int = 0
    refused_valid: int = 0
    over: int = 0  # schemas that accept an invalid instance
    seconds: list[float] = field(default_factory=list)
    mask_ns: list[int] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def run(
    engine: Isolated,
    schema: Any,
    tests: list[dict[str, Any]],
    spaced: bool,
    options: dict[str, Any],
    tell: Callable[[str], None],
) -> Tally:
    """One schema with its instances."""
    separators = None if spaced else (",", ":")
    texts = tuple(json.dumps(test["data"], separators=separators) for test in tests)
    found = engine(Task(schema, texts, spaced, options))
    tally = Tally(schemas=1, seconds=[found.compile_seconds], mask_ns=list(found.mask_ns))
    if found.refusal is not None:
        tell(f"refused: {found.refusal}")
        return tally
    tally.compiled = 1
    for test, accepted, text in zip(tests, found.verdicts, texts):
        tally.invalid += not test["valid"]
        tally.accepted_invalid += accepted and not test["valid"]
        tally.refused_valid += test["valid"] and not accepted
        if accepted != test["valid"]:
            tell(f"{'accepts invalid' if accepted else 'refuses valid'}: {text[:120]}")
    tally.right = int(all(accepted == test["valid"] for accepted, test in zip(found.verdicts, tests)))
    tally.over = int(tally.accepted_invalid > 0)
    return tally


def registry(suite: Path) -> dict[str, Any]:
    """The remote schemas of the suite, and the drafts' own meta-schemas where they are installed."""
    remotes = suite / "remotes"
    found = {
        f"http://localhost:1234/{path.relative_to(remotes).as_posix()}": json.loads(path.read_text())
        for path in remotes.rglob("*.json")
    }
    with contextlib.suppress(ImportError):
        from jsonschema_specifications import REGISTRY

        found.update({uri: REGISTRY[uri].contents for uri in REGISTRY})
    return found


def benchmark(data: Path) -> Iterator[tuple[str, str, Any, list[dict[str, Any]], dict[str, Any]]]:
    for line in (data / "jsonschemabench_dev.jsonl").open():
        row = json.loads(line)
        yield row["stratum"], row["id"], row["schema"], row["tests"], {}


def official(data: Path, draft: str) -> Iterator[tuple[str, str, Any, list[dict[str, Any]], dict[str, Any]]]:
    suite = data / "json_schema_suite"
    known = registry(suite)
    options = {"registry": known, "draft": draft.removeprefix("draft"), "formats": "annotation"}
    for path in sorted((suite / draft).glob("*.json")):
        for group in json.loads(path.read_text()):
            yield path.stem, group["description"], group["schema"], group["tests"], options


def quantiles(values: list[float], *shares: float) -> list[float]:
    ordered = sorted(values) or [0.0]
    return [ordered[min(int(len(ordered) * share), len(ordered) - 1)] for share in shares]


def report(title: str, groups: dict[str, Tally]) -> str:
    """Prints the groups where something is wrong; returns the line of the whole for the table at the end."""
    total = Tally()
    for tally in groups.values():
        total.add(tally)
    print(f"\n{title}")
    print(f"  {'group':<26}{'schemas':>8}{'compiled':>10}{'right':>8}{'invalid accepted':>18}{'valid refused':>15}")
    for name, tally in [*groups.items(), ("all", total)]:
        if name == "all" or tally.right < tally.schemas:
            print(
                f"  {name:<26}{tally.schemas:>8}{tally.compiled:>10}{tally.right:>8}"
                f"{tally.accepted_invalid:>10} of {tally.invalid:<5}{tally.refused_valid:>14}"
            )
    compiles = [second * 1000 for second in total.seconds]
    masks = [ns / 1000 for ns in total.mask_ns]
    c50, c99, most = quantiles(compiles, 0.5, 0.99, 1.0)
    m50, m99, longest = quantiles(masks, 0.5, 0.99, 1.0)
    return ROW.format(
        f"{total.compiled / total.schemas:.1%}",
        f"{total.right / total.schemas:.1%}",
        f"{total.over / total.schemas:.1%}",
        f"{total.accepted_invalid} of {total.invalid}",
        f"{c50:.1f} / {c99:.0f} / {most:.0f}",
        f"{m50:.1f} / {sum(masks) / max(len(masks), 1):.1f} / {m99:.0f} / {longest:.0f}",
        f"{len(masks):,}",
    )


ROW = "{:>10}{:>8}{:>8}{:>18}{:>25}{:>28}{:>10}"
TABLE = ROW.format(  # over: schemas that accept an invalid instance
    "compiled", "right", "over", "invalid accepted", "compile ms p50/p99/max", "mask us p50/mean/p99/max", "masks"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--peer", action="append", choices=sorted(set(ENGINES) - {"radixrt"}), default=[])
    parser.add_argument("--only", action="append", choices=("dev", "draft7", "draft2020-12"))
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds an engine may take for one schema")
    parser.add_argument(
        "--spaced", action="store_true", help="instances as json.dumps writes them, white space allowed"
    )
    parser.add_argument("--verbose", action="store_true", help="every refusal and every wrong answer")
    args = parser.parse_args()
    for part in args.only or ("dev", "draft2020-12", "draft7"):
        rows = list(benchmark(args.data) if part == "dev" else official(args.data, part))
        lines = []
        for name in ("radixrt", *args.peer):
            engine = Isolated(name, args.limit)
            groups: dict[str, Tally] = {}
            why: Counter[str] = Counter()
            for group, title, schema, tests, options in rows:

                def tell(what: str, group: str = group, title: str = title, why: Counter[str] = why) -> None:
                    kind, _, reason = what.partition(": ")
                    why[f"{kind} ({reason})" if reason.startswith(("took longer", "the process died")) else kind] += 1
                    if args.verbose:
                        print(f"    {group} | {title} | {what}"[:300])

                groups.setdefault(group, Tally()).add(run(engine, schema, tests, args.spaced, options, tell))
            engine.close()
            lines.append(f"{name:<12}{report(f'{name} on {part}', groups)}")
            print(f"  {dict(why)}", flush=True)
        print(f"\n{part}: {len(rows)} schemas\n{'':<12}{TABLE}")
        print("\n".join(lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
