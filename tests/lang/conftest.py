"""Runtimes on a tiny model, which check themselves after every step, and one on the embedded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lang import Runtime
from lang.loop import LOOP
from radixrt.engine.core import Engine
from tests.tiny import save_tiny

TEMPLATE = "{% for m in messages %}<s1>{{ m.role }}\n{{ m.content }}<s0>\n{% endfor %}{% if add_generation_prompt %}<s1>assistant\n{% endif %}"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a byte-level tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", directory)
    (directory / "template.jinja").write_text(TEMPLATE)
    return directory


def idle(runtime: Runtime) -> None:
    """Nothing runs, waits, is locked or held."""

    async def check() -> None:
        for _ in range(100_000):  # what was cancelled by another thread has yet to hear of it
            if not await runtime.engine.call(lambda engine: bool(engine._requests) or runtime._programs.running):
                break

        def look(engine: Engine) -> None:
            engine.check_integrity()
            assert not engine._requests
            assert runtime._programs is not None and runtime._programs.running == 0
            tree = engine._scheduler.tree
            assert tree is None or tree.total_locks == 0

        await runtime.engine.call(look)

    LOOP.call(check)


@pytest.fixture
def make_runtime(tiny_model: Path) -> Iterator[Callable[..., Runtime]]:
    """``make_runtime(**settings)``."""
    made: list[Runtime] = []

    def make(**settings: Any) -> Runtime:
        defaults = {
            "check_integrity": True,
            "max_total_tokens": 4096,
            "chat_template": str(tiny_model / "template.jinja"),
        }
        made.append(Runtime(str(tiny_model), **{**defaults, **settings}).load())
        return made[-1]

    yield make
    for runtime in made:
        if not runtime.engine._started().closed:
            idle(runtime)
        runtime.shutdown()


@pytest.fixture(scope="session")
def embedded() -> Iterator[Runtime]:
    """The embedded model, loaded once."""
    with Runtime(max_total_tokens=24_000) as runtime:
        yield runtime
