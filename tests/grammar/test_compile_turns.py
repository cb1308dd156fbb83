"""Slow compilations hold up no quick ones: they are interrupted when their turn is over, and begun again behind the others."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from radixrt.errors import EngineClosed, InvalidRequest
from radixrt.grammar.compile_cache import CompileCache
from radixrt.grammar.constraint import Constraint

T: Any = "a tokenizer"


def lit(text: str) -> Constraint:
    return Constraint.literal(text)


def result(future: Future[Any]) -> Any:
    return future.result(timeout=60)


class Busy:
    """Compiles what begins with "slow" until it is told to end; counts how often each text was begun."""

    memory_bytes = 100

    def __init__(self) -> None:
        self.end = threading.Event()
        self.begun: list[str] = []

    def __call__(self, constraint: Constraint, tokenizer: Any) -> Any:
        text = constraint.spec.text  # type: ignore[union-attr]
        self.begun.append(text)
        while text.startswith("slow") and not self.end.is_set():
            pass
        return self


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_quick_one_ends_beside_many_slow_ones(workers: int) -> None:
    busy = Busy()
    cache = CompileCache(compile=busy, workers=workers, turns_s=(0.001, 0.002), time_limit_s=300)
    slow = [cache.get(lit(f"slow {i}"), T) for i in range(8 if workers > 1 else 1)]
    if workers > 1:  # a single thread has to end its last turn first
        for i in range(20):
            assert result(cache.get(lit(f"quick {i}"), T)) is busy
    assert not any(future.done() for future in slow)
    busy.end.set()
    assert all(result(future) is busy for future in slow)
    assert cache.stats().turns == len(busy.begun) - cache.stats().misses
    if workers > 1:
        assert cache.stats().turns >= 8
    cache.close()


def test_a_compilation_is_ended_at_its_limit_and_may_be_asked_for_again() -> None:
    busy = Busy()
    cache = CompileCache(compile=busy, workers=1, turns_s=(0.001,), time_limit_s=0.005)
    for _ in range(5):
        with pytest.raises(InvalidRequest, match="takes longer than"):
            result(cache.get(lit("slow"), T))
        assert result(cache.get(lit("quick"), T)) is busy
        while cache.stats().stuck:
            pass
    busy.end.set()
    assert result(cache.get(lit("slow"), T)) is busy
    assert cache.stats().timeouts == 5
    cache.close()


def test_closing_ends_what_runs() -> None:
    busy = Busy()
    cache = CompileCache(compile=busy, workers=2, turns_s=(0.001,), time_limit_s=300)
    slow = [cache.get(lit(f"slow {i}"), T) for i in range(3)]
    while not busy.begun:
        pass
    cache.close()
    for future in slow:
        with pytest.raises(EngineClosed):
            result(future)
    while cache.stats().running:
        pass


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns after microseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_interrupted_at_any_moment_every_request_is_answered_and_no_thread_is_lost() -> None:
    class Sized:
        memory_bytes = 1

    def compile(constraint: Constraint, tokenizer: Any) -> Any:
        text: str = constraint.spec.text  # type: ignore[union-attr]
        until = time.perf_counter() + int(text) / 50_000  # around the length of the turns
        while time.perf_counter() < until:
            pass
        if int(text) % 7 == 0:
            raise InvalidRequest("text", text)
        return Sized()

    cache = CompileCache(compile=compile, workers=3, turns_s=(0.0005, 0.001), time_limit_s=60, max_bytes=10)
    rng = random.Random(5)
    for _ in range(20):
        texts = [rng.randrange(150) for _ in range(30)]
        futures = [cache.get(lit(str(text)), T) for text in texts]
        for text, future in zip(texts, futures, strict=True):
            if text % 7 == 0:
                with pytest.raises(InvalidRequest):
                    result(future)
            else:
                assert isinstance(result(future), Sized)
    stats = cache.stats()
    assert stats.turns > 20 and stats.waiting == stats.stuck == 0
    cache.close()


PROFILED = """
import sys, time
from radixrt.grammar.compile_cache import CompileCache
from radixrt.grammar.constraint import Constraint

class Late:
    memory_bytes = 1
    def __call__(self, constraint, tokenizer):
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            try:
                while time.monotonic() < end:
                    pass
            except BaseException:  # what came before the result counts no more
                pass
        return self

cache = CompileCache(compile=Late(), turns_s=(0.001, 0.002), time_limit_s=0.01)
for i in range(5):
    cache.get(Constraint.literal(str(i)), "t").exception(timeout=60)
cache.close()
calls = []
sys.setprofile(lambda *event: calls.append(event[1]))
(lambda: None)()
sys.setprofile(None)
assert "call" in calls
"""


def test_an_interpreter_that_has_interrupted_can_still_be_profiled() -> None:
    """CPython 3.11 hangs under a profiler when an interrupt was taken back and not delivered."""
    subprocess.run([sys.executable, "-c", PROFILED], check=True, timeout=120)
