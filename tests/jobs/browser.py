"""A headless Chromium, driven over its own protocol: what a page looks like where a person reads it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --hide-scrollbars --remote-debugging-port=0"
).split()


def find() -> str | None:
    """The browser to use: ``RADIXRT_TEST_BROWSER``, or the first that is installed."""
    return os.environ.get("RADIXRT_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page. ``said``: what it wrote to the console and what the browser held against it; ``asked``: addresses it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: str) -> None:
        self._socket, self._session, self._numbers = socket, session, itertools.count(1)
        self.said: list[str] = []
        self.asked: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params, "sessionId": self._session})
        while True:
            answer = await self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    async def _receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(await self._socket.receive_str())
        name, params = answer.get("method"), answer.get("params", {})
        if name == "Log.entryAdded":
            self.said.append(params["entry"]["text"])
        elif name in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.said.append(json.dumps(params))
        elif name == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        return answer

    async def look(self, width: int, dark: bool = False) -> None:
        """Set the window."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def open(self, address: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=address)
        while (await self._receive()).get("method") != "Page.loadEventFired":
            pass

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def picture(self) -> str:
        """The whole page as a PNG, in base64."""
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return str(answer["data"])


@asynccontextmanager
async def page(browser: str) -> AsyncIterator[Page]:
    """An empty page of a browser of its own."""
    # not in tmp_path: the profile is removed with the browser, which writes to it until it has ended
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        line = [browser, *QUIET, f"--user-data-dir={profile}", "about:blank"]
        with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:  # noqa: ASYNC220
            try:
                port, path = await _address(process, Path(profile) / "DevToolsActivePort")
                async with (
                    aiohttp.ClientSession() as http,
                    http.ws_connect(f"ws://127.0.0.1:{port}{path}", max_msg_size=0) as socket,
                ):
                    await socket.send_json({"id": 0, "method": "Target.createTarget", "params": {"url": "about:blank"}})
                    target = (await _answer(socket, 0))["targetId"]
                    attach = {"targetId": target, "flatten": True}
                    await socket.send_json({"id": 0, "method": "Target.attachToTarget", "params": attach})
                    yield Page(socket, (await _answer(socket, 0))["sessionId"])
            finally:
                process.kill()


async def _answer(socket: aiohttp.ClientWebSocketResponse, number: int) -> dict[str, Any]:
    while True:
        answer = json.loads(await socket.receive_str())
        if answer.get("id") == number:
            return dict(answer["result"])


async def _address(process: subprocess.Popen[bytes], file: Path) -> tuple[str, str]:
    """Where the browser listens, once it does."""
    async with asyncio.timeout(60):
        while True:
            assert process.poll() is None, "the browser ended"
            lines = file.read_text().split() if file.exists() else []
            if len(lines) == 2:
                return lines[0], lines[1]
            await asyncio.sleep(0.02)
