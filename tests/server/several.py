"""Several models for tests: on stand-ins that cost nothing, and tiny real ones on engines in this process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixrt import AsyncEngine
from radixrt.model.tokenizer import load_tokenizer
from radixrt.server.local import LocalClient
from radixrt.server.models import Models, Plan, Resident
from tests.server.stand import Stand, served
from tests.tiny import save_tiny

GIGABYTE = 10**9
TEMPLATE = "{% for m in messages %}<s1>{{ m.role }}\n{{ m.content }}<s0>\n{% endfor %}{% if add_generation_prompt %}<s1>assistant\n{% endif %}"


class Made:
    """The engines that were made for each model, in order. ``started``: what their start waits for; ``broken``: what it raises."""

    def __init__(self, *, held: bool = False) -> None:
        self.engines: list[tuple[str, Stand]] = []
        self.started = asyncio.Event()
        self.started.set()
        self.broken: dict[str, Exception] = {}
        self.held = held

    def make(self, name: str) -> Any:
        made = self

        class Engine(Stand):
            async def start(self) -> None:
                await made.started.wait()
                if name in made.broken:
                    raise made.broken[name]
                await super().start()

            async def close(self) -> None:
                assert not self.running, "its requests were cut"
                await super().close()

        engine = Engine(held=self.held)
        engine.tokenizer = TOKENIZER
        self.engines.append((name, engine))
        return engine

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.engines]

    def __getitem__(self, name: str) -> Stand:
        """The last engine of a model."""
        return next(engine for known, engine in reversed(self.engines) if known == name)


class _Tokenizer:
    chat_template = None
    eos_ids = frozenset({0})
    bos_id = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return [5, 6, 7, 8]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, ids))

    def render_chat(self, messages: Any, **_: Any) -> str:
        return "chat"

    def token_text(self, token: int) -> str:
        return str(token)


TOKENIZER: Any = _Tokenizer()


def some(made: Made, *names: str, keep: float = math.inf, size: int = GIGABYTE, **settings: Any) -> Models:
    """Models of a gigabyte each on stand-ins."""

    def resident(name: str) -> Resident:
        info = replace(Stand().info, model=name)
        return Resident(name, Plan(info, size, lambda: made.make(name), lambda: TOKENIZER), keep)

    settings = {"limit": 10 * GIGABYTE, "wait": 20.0, **settings}
    return Models([resident(name) for name in names], **settings)


@asynccontextmanager
async def board(models: Models, **settings: Any) -> AsyncIterator[Any]:
    await models.start()
    try:
        async with served(models, **settings) as client:
            yield client
    finally:
        await models.close()


async def say(client: Any, model: str | None, **more: Any) -> tuple[int, Any]:
    body = {"prompt": [1, 2], "max_tokens": 3, **({} if model is None else {"model": model}), **more}
    async with client.post("/v1/completions", json=body) as answer:
        return answer.status, await answer.json()


async def use(models: Models, name: str, held: asyncio.Event | None = None) -> None:
    async with models.using(models.residents[name]):
        if held is not None:
            await held.wait()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in ("llama", "qwen3", "mistral"):
        found[name] = tmp_path_factory.mktemp(name)
        save_tiny(name, found[name])
    (found["llama"].parent / "several.jinja").write_text(TEMPLATE)
    return found


def engine_settings(folders: dict[str, Path], name: str) -> dict[str, Any]:
    template = str(folders["llama"].parent / "several.jinja")
    return {"model": str(folders[name]), "max_total_tokens": 2048, "chat_template": template}


def real(folders: dict[str, Path], **settings: Any) -> Models:
    """Tiny models on engines in this process."""

    def resident(name: str) -> Resident:
        values = engine_settings(folders, name)
        info = replace(Stand().info, model=name, settings=values)
        return Resident(
            name,
            Plan(info, GIGABYTE, lambda: Sized(LocalClient(AsyncEngine(**values))), lambda: load_tokenizer(values["model"], chat_template=TEMPLATE)),
            math.inf,
        )  # fmt: skip

    return Models([resident(name) for name in folders], **{"limit": 10 * GIGABYTE, "wait": 60.0, **settings})


class Sized:
    """An engine in this process, whose size nobody can measure."""

    def __init__(self, real: LocalClient) -> None:
        self._real = real

    @property
    def info(self) -> Any:
        return replace(self._real.info, memory=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


GRAPH: list[dict[str, Any]] = [
    {"id": 0, "kind": "text", "parts": ["a"]},
    {"id": 1, "kind": "gen", "parent": 0, "params": {"max_tokens": 2}},
]
