"""JSON Schema coverage: a benchmark of schemas with instances, and the official suite by keyword; peers beside it where installed.

    python scripts/bench/schemas.py DATA [--peer llguidance] [--peer xgrammar] [--only dev|draft7|draft2020-12] [--verbose]

DATA holds ``jsonschemabench_dev.jsonl`` and ``json_schema_suite/``. A schema is *right* (in the suite: *perfect*) when it compiles
and every instance, written compactly and tokenized by the model's own tokenizer, is accepted exactly if it is valid. The suite
is read with formats as annotations, as its required tests demand; the benchmark with known formats enforced.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import radixrt
from radixrt.errors import RadixrtError
from radixrt.grammar.matcher import compile_grammar
from radixrt.grammar.schema import compile_schema

TIMEOUT = 30.0  # seconds a peer may take for one schema

Verdicts = list[bool]
Engine = Callable[
    [Any, list[str], dict[str, Any]], tuple[float, Verdicts]
]  # schema, texts, options -> compile seconds, accepted


class Refused(Exception):
    """The engine does not compile the schema; the reason."""


@cache
def tokenizer() -> Any:
    return radixrt.load_tokenizer()


def ours(schema: Any, texts: list[str], options: dict[str, Any]) -> tuple[float, Verdicts]:
    """This repository's compiler and automaton."""
    begin = time.perf_counter()
    try:
        grammar = compile_schema(schema, **options)
        seconds = time.perf_counter() - begin
        compiled = compile_grammar(grammar, tokenizer())
    except RadixrtError as error:
        if "accepts nothing" in str(error):
            return time.perf_counter() - begin, [False] * len(texts)
        raise Refused(str(error)) from None
    return seconds, [compiled.accepts(text) for text in texts]


@cache
def _spelled() -> list[bytes]:
    known = tokenizer()
    return [known.token_bytes(token) for token in range(known.vocab_size)]


@cache
def _llguidance_tokenizer() -> Any:
    import llguidance

    known = tokenizer()

    class Wrapped:
        eos_token_id = min(known.eos_ids)
        bos_token_id = known.bos_id
        tokens = _spelled()
        special_token_ids = sorted(known.special_ids)

        def __call__(self, text: bytes | str) -> list[int]:
            plain = text.decode() if isinstance(text, bytes) else text
            return list(known.encode(plain, add_special=False))

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Wrapped()))


def llguidance(schema: Any, texts: list[str], options: dict[str, Any]) -> tuple[float, Verdicts]:
    """llguidance, strict, compact."""
    from llguidance import LLMatcher

    guide = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    begin = time.perf_counter()
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides=guide)
    problem = LLMatcher.validate_grammar(grammar, _llguidance_tokenizer())
    if problem:
        raise Refused(problem)
    seconds = time.perf_counter() - begin
    verdicts = []
    for text in texts:
        matcher = LLMatcher(_llguidance_tokenizer(), grammar)
        accepted = all(matcher.consume_token(token) for token in tokenizer().encode(text, add_special=False))
        verdicts.append(accepted and matcher.is_accepting())
    return seconds, verdicts


@cache
def _xgrammar_compiler() -> Any:
    import xgrammar

    known = tokenizer()
    info = xgrammar.TokenizerInfo(
        _spelled(), xgrammar.VocabType.RAW, vocab_size=known.vocab_size, stop_token_ids=sorted(known.eos_ids)
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def xgrammar(schema: Any, texts: list[str], options: dict[str, Any]) -> tuple[float, Verdicts]:
    """xgrammar, compact, additional properties as the schema says."""
    import xgrammar as library

    compiler = _xgrammar_compiler()
    begin = time.perf_counter()
    try:
        compiled = compiler.compile_json_schema(
            json.dumps(schema), any_whitespace=False, separators=(",", ":"), strict_mode=False
        )
    except Exception as error:
        raise Refused(str(error)) from None
    seconds = time.perf_counter() - begin
    stop = min(tokenizer().eos_ids)
    verdicts = []
    for text in texts:
        matcher = library.GrammarMatcher(compiled)
        accepted = all(matcher.accept_token(token) for token in tokenizer().encode(text, add_special=False))
        verdicts.append(accepted and matcher.accept_token(stop))
    return seconds, verdicts


PEERS: dict[str, Engine] = {"llguidance": llguidance, "xgrammar": xgrammar}


def _serve(engine: Engine, pipe: Any) -> None:
    while True:
        request = pipe.recv()
        try:
            pipe.send(("done", engine(*request)))
        except Refused as error:
            pipe.send(("refused", str(error)))
        except Exception as error:
            pipe.send(("refused", repr(error)))


class Isolated:
    """A peer in a process of its own: one that hangs or crashes loses that schema only."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._process: Any = None
        self._pipe: Any = None

    def __call__(self, schema: Any, texts: list[str], options: dict[str, Any]) -> tuple[float, Verdicts]:
        if self._process is None:
            self._pipe, other = multiprocessing.Pipe()
            self._process = multiprocessing.Process(target=_serve, args=(self.engine, other), daemon=True)
            self._process.start()
            other.close()
        try:
            self._pipe.send((schema, texts, options))
            if not self._pipe.poll(TIMEOUT):
                self.close()
                raise Refused(f"took longer than {TIMEOUT:.0f} s")
            kind, answer = self._pipe.recv()
        except (EOFError, OSError):
            self.close()
            raise Refused("the process died") from None
        if kind == "refused":
            raise Refused(answer)
        return answer  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


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

    def add(self, other: Tally) -> None:
        for name in ("schemas", "compiled", "right", "invalid", "accepted_invalid", "refused_valid", "over"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.seconds += other.seconds


def run(
    engine: Engine, schema: Any, tests: list[dict[str, Any]], options: dict[str, Any], tell: Callable[[str], None]
) -> Tally:
    """One schema with its instances."""
    tally = Tally(schemas=1)
    texts = [json.dumps(test["data"], separators=(",", ":")) for test in tests]
    begin = time.perf_counter()
    try:
        seconds, verdicts = engine(schema, texts, options)
    except Refused as error:
        tally.seconds.append(time.perf_counter() - begin)
        tell(f"refused: {error}")
        return tally
    tally.seconds.append(seconds)
    tally.compiled = 1
    for test, accepted, text in zip(tests, verdicts, texts):
        tally.invalid += not test["valid"]
        tally.accepted_invalid += accepted and not test["valid"]
        tally.refused_valid += test["valid"] and not accepted
        if accepted != test["valid"]:
            tell(f"{'accepts invalid' if accepted else 'refuses valid'}: {text[:120]}")
    tally.right = int(all(accepted == test["valid"] for accepted, test in zip(verdicts, tests)))
    tally.over = int(tally.accepted_invalid > 0)
    return tally


def registry(suite: Path) -> dict[str, Any]:
    """The remote schemas of the suite, and the drafts' own meta-schemas where they are installed."""
    remotes = suite / "remotes"
    found = {
        f"http://localhost:1234/{path.relative_to(remotes).as_posix()}": json.loads(path.read_text())
        for path in remotes.rglob("*.json")
    }
    try:
        from jsonschema_specifications import REGISTRY

        found.update({uri: REGISTRY[uri].contents for uri in REGISTRY})
    except ImportError:
        pass
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


def report(title: str, groups: dict[str, Tally]) -> None:
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
    times = sorted(total.seconds)
    p50, p99 = (times[min(int(len(times) * q), len(times) - 1)] * 1000 for q in (0.5, 0.99))
    print(
        f"  compiled {total.compiled / total.schemas:.1%}, all instances right {total.right / total.schemas:.1%}, schemas that accept"
        f" an invalid instance {total.over / total.schemas:.1%}; compile ms p50 {p50:.2f} / p99 {p99:.1f} / max {times[-1] * 1000:.0f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--peer", action="append", choices=sorted(PEERS), default=[])
    parser.add_argument("--only", action="append", choices=("dev", "draft7", "draft2020-12"))
    parser.add_argument("--verbose", action="store_true", help="every refusal and every wrong answer")
    args = parser.parse_args()
    engines: dict[str, Engine] = {"radixrt": ours} | {name: Isolated(PEERS[name]) for name in args.peer}
    for part in args.only or ("dev", "draft2020-12", "draft7"):
        for name, engine in engines.items():
            groups: dict[str, Tally] = {}
            why: Counter[str] = Counter()
            for group, title, schema, tests, options in (
                benchmark(args.data) if part == "dev" else official(args.data, part)
            ):

                def tell(what: str, group: str = group, title: str = title, why: Counter[str] = why) -> None:
                    why[what.partition(":")[0]] += 1
                    if args.verbose:
                        print(f"    {group} | {title} | {what}"[:300])

                groups.setdefault(group, Tally()).add(run(engine, schema, tests, options, tell))
            report(f"{name} on {part}", groups)
            print(f"  {dict(why)}")
            sys.stdout.flush()
    for engine in engines.values():
        if isinstance(engine, Isolated):
            engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
