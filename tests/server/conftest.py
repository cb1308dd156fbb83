"""An engine on a tiny model in this process, for every test of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixrt import AsyncEngine
from radixrt.server.local import LocalClient
from tests.tiny import save_tiny

TEMPLATE = "{% for m in messages %}<s1>{{ m.role }}\n{{ m.content }}<s0>\n{% endfor %}{% if add_generation_prompt %}<s1>assistant\n{% endif %}"


@pytest.fixture(scope="session")
def server_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a byte-level tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("tiny-served")
    save_tiny("llama", directory)
    (directory / "template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="session")
def server_settings(server_model: Path) -> dict[str, Any]:
    """Settings of an engine on it, which checks itself after every step."""
    return {
        "model": str(server_model),
        "max_total_tokens": 4096,
        "check_integrity": True,
        "chat_template": str(server_model / "template.jinja"),
    }


@pytest.fixture(scope="session")
def local_client(server_settings: dict[str, Any]) -> Iterator[LocalClient]:
    """A started client that any event loop may use: leave nothing running in it."""
    client = LocalClient(AsyncEngine(**server_settings))
    asyncio.run(client.start())
    yield client
    asyncio.run(client.close())


@pytest.fixture(scope="session")
def calling_client(server_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalClient]:
    """A started client as ``local_client``, of a model whose template knows tools."""
    from tests.server.test_tools import TEMPLATE as KNOWS_TOOLS

    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(KNOWS_TOOLS)
    client = LocalClient(AsyncEngine(**{**server_settings, "chat_template": str(template), "max_total_tokens": 8192}))
    asyncio.run(client.start())
    yield client
    asyncio.run(client.close())
