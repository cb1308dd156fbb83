"""Tiny models, saved once a session, and engines on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from radixrt import Engine
from tests.tiny import save_tiny

Tiny = tuple[Path, PreTrainedModel]


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
def make_engine(tiny: Callable[[str], Tiny]) -> Iterator[Callable[..., Engine]]:
    """``make_engine(name="llama", **settings)``: an engine on a tiny model, or on a path, that checks itself after every step."""
    engines: list[Engine] = []

    def make(name: str = "llama", **settings: Any) -> Engine:
        engines.append(
            Engine(
                name if "/" in name else str(tiny(name)[0]),
                **{"check_integrity": True, "max_total_tokens": 4096, "kv_dtype": "float32", **settings},
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_integrity()
        engine.close()
