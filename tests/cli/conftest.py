"""A stand-in for the engine, so that what the command line does is seen without a model."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

import radixrt
from radixrt.cli import main
from radixrt.config import EngineConfig
from radixrt.errors import InvalidRequest
from radixrt.request import FinishReason, OutputDelta, RequestOutput, SampleOutput, SamplingParams


@dataclass(frozen=True)
class FakeStats:
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    hit_rate: float = 0.5
    optimal_hit_rate: float = 0.75
    forced_tokens: int = 0


@dataclass
class Running:
    prompt: Any
    params: SamplingParams
    words: list[str]
    said: int = 0


@dataclass
class FakeEngine:
    """Answers a prompt with its words in capitals, one word each step; what was asked before is cached."""

    settings: dict[str, Any]
    asked: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    running: dict[str, Running] = field(default_factory=dict)
    most_held: int = 0
    steps: int = 0
    generated: int = 0
    aborted: list[str] = field(default_factory=list)
    last: list[OutputDelta] = field(default_factory=list)
    on_step: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert not self.running

    def add(self, prompt: Any, params: SamplingParams) -> str:
        text = prompt if isinstance(prompt, str) else self._text(prompt)
        if not text:
            raise InvalidRequest("prompt", "is empty")
        if "too long" in text:
            raise InvalidRequest("prompt", "has 9999 tokens: the context holds 8192")
        self.asked.append((prompt, params))
        name = f"request-{len(self.asked)}"
        self.running[name] = Running(prompt, params, text.upper().split()[: params.max_tokens])
        self.most_held = max(self.most_held, sum(run.params.n for run in self.running.values()))
        return name

    @staticmethod
    def _text(prompt: list[Any]) -> str:
        if isinstance(prompt[0], int):
            return " ".join(f"t{token}" for token in prompt)
        return str(prompt[-1]["content"])

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.last)

    def step(self) -> list[OutputDelta]:
        self.steps += 1
        if self.on_step is not None:
            self.on_step(self)
        # The newest request moves first, so requests finish in another order than they came in.
        deltas, self.last = self.last, []
        return deltas + [self._advance(name) for name in reversed(list(self.running))]

    def _advance(self, name: str) -> OutputDelta:
        run = self.running[name]
        word = (" " if run.said else "") + run.words[run.said]
        run.said += 1
        self.generated += 1
        failed = "explode" in run.words[run.said - 1].lower()
        if run.said < len(run.words) and not failed:
            return OutputDelta(name, 0, word, (run.said,))
        del self.running[name]
        samples = tuple(
            SampleOutput(i, " ".join(run.words), tuple(range(run.said)), FinishReason.STOP) for i in range(run.params.n)
        )
        output = RequestOutput(
            name, tuple(range(10)), () if failed else samples, 6, 4, error="it broke" if failed else None
        )
        return OutputDelta(name, 0, word, (run.said,), finish_reason=FinishReason.STOP, output=output)

    def abort(self, name: str) -> bool:
        run = self.running.pop(name, None)
        if run is None:
            return False
        self.aborted.append(name)
        sample = SampleOutput(0, " ".join(run.words[: run.said]), tuple(range(run.said)), FinishReason.ABORT)
        output = RequestOutput(name, tuple(range(10)), (sample,), 6, 4)
        self.last.append(OutputDelta(name, 0, "", (), finish_reason=FinishReason.ABORT, output=output))
        return True

    def stats(self) -> FakeStats:
        return FakeStats(10 * len(self.asked), 6 * len(self.asked), 4 * len(self.asked), self.generated)


@dataclass
class Result:
    code: int
    out: str
    err: str


@dataclass
class Cli:
    """Runs the command line in this process. ``engine`` is the one that the last command made."""

    engine: FakeEngine | None = None
    on_step: Any = None

    def __call__(self, *arguments: str, stdin: str | bytes | None = None) -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin or b""
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
            code = main(arguments)
        texts = []
        for stream in (out, err):
            stream.flush()
            texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
        return Result(code, *texts)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line with a stand-in engine."""
    runner = Cli()

    def make(model: str | None = None, *, progress: bool = False, **settings: Any) -> FakeEngine:
        EngineConfig.from_kwargs(model=model, **settings)
        runner.engine = FakeEngine({"model": model, **settings}, on_step=runner.on_step)
        return runner.engine

    monkeypatch.setitem(vars(radixrt), "Engine", make)  # not setattr: it would first import the real one
    return runner
