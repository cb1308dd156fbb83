"""The whole application on a thread of its own, for clients that block theirs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp.test_utils import TestServer

from radixrt.server.app import make_app
from radixrt.server.config import ServerConfig


@contextmanager
def on_a_thread(client: Any, **settings: Any) -> Iterator[str]:
    """Gives the server's address; nobody is left running behind it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> TestServer:
        server = TestServer(make_app(client, ServerConfig(**settings)))
        await server.start_server()
        return server

    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
        try:
            yield str(server.make_url("")).rstrip("/")
        finally:
            asyncio.run_coroutine_threadsafe(server.close(), loop).result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
