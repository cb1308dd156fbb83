"""Tiny models, saved once a session, and engines on them: with overlapping steps and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from radixrt import Engine
from tests.tiny import save_tiny

Tiny = tuple[Path, PreTrainedModel]
# Modules that are run in both ways.
BOTH = "engine async_engine posting constraints healing speculation scoring embeddings workloads".split()
# These look at what one step does, or read what a sequence that ended left in the pool, and not at answers.
IN_STEPS = {
    "test_a_second_thread_is_refused",
    "test_leaving_a_stream_aborts_it_and_keeps_its_kv",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "overlap" in metafunc.fixturenames:
        both = metafunc.module.__name__.rpartition("test_")[2] in BOTH and metafunc.function.__name__ not in IN_STEPS
        metafunc.parametrize("overlap", [False, True] if both else [False], ids=lambda on: "overlap" if on else "")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """``tiny(name)``: directory of the tiny model, and transformers' model of it."""
    made: dict[str, Tiny] = {}

    def get(name: str) -> Tiny:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            made[name] = (directory, save_tiny(name, directory))
        return made[name]

    return get


@pytest.fixture
def make_engine(tiny: Callable[[str], Tiny], overlap: bool) -> Iterator[Callable[..., Engine]]:
    """``make_engine(name="llama", **settings)``: an engine on a tiny model, or on a path, that checks itself after every step."""
    engines: list[Engine] = []

    def make(name: str = "llama", **settings: Any) -> Engine:
        engines.append(
            Engine(
                name if "/" in name else str(tiny(name)[0]),
                **{
                    "check_integrity": True,
                    "max_total_tokens": 4096,
                    "kv_dtype": "float32",
                    "overlap": overlap,
                    **settings,
                },
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_integrity()
        engine.close()
