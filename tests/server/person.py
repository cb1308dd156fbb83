"""Somebody at the page: a headless browser with a keyboard before it, and an engine that waits and says what a test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from radixrt import SamplingParams
from radixrt.request import OutputDelta
from radixrt.server.local import LocalClient
from tests.jobs import browser
from tests.server.stand import reachable

FOUND = browser.find()
seen = pytest.mark.skipif(FOUND is None, reason="no browser is installed (RADIXRT_TEST_BROWSER names one)")
KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), "ArrowDown": (40, ""), "ArrowUp": (38, ""), "ArrowLeft": (37, ""), "ArrowRight": (39, ""), "Home": (36, "")}  # fmt: skip


class Person:
    """Somebody at the page."""

    def __init__(self, page: browser.Page) -> None:
        self.page = page

    async def sees(self, condition: str) -> None:
        """Wait until an expression is true in the page."""
        script = f"new Promise((done) => {{ const look = () => ({condition}) ? done(true) : setTimeout(look, 20); look(); }})"
        try:
            async with asyncio.timeout(30):
                await self.page.call("Runtime.evaluate", expression=script, awaitPromise=True)
        except TimeoutError:
            pytest.fail(f"never: {condition}; {self.page.said}")

    async def press(self, *names: str, shift: bool = False) -> None:
        for name in names:
            code, text = KEYS[name]
            key: dict[str, Any] = {
                "key": name,
                "code": name,
                "windowsVirtualKeyCode": code,
                "modifiers": 8 if shift else 0,
            }
            await self.page.call("Input.dispatchKeyEvent", type="keyDown", **key, **({"text": text} if text else {}))
            await self.page.call("Input.dispatchKeyEvent", type="keyUp", **key)

    async def write(self, text: str) -> None:
        await self.page.call("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        await self.page.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def says(self, text: str) -> None:
        await self.page.run("document.getElementById('say').focus()")
        await self.write(text)
        await self.press("Enter")

    async def text(self, selector: str) -> str:
        return str(
            await self.page.run(
                f"Array.from(document.querySelectorAll({json.dumps(selector)}), (one) => one.textContent).join('\\n')"
            )
        )

    async def focus(self) -> str:
        """What the keyboard is at."""
        return str(
            await self.page.run(
                "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
            )
        )


@asynccontextmanager
async def sat(client: Any, width: int = 1280, dark: bool = False, **settings: Any) -> AsyncIterator[Person]:
    """Somebody before the page of a server; at the end, nothing was held against the page, and nothing was asked of others."""
    assert FOUND is not None
    async with reachable(client, **settings) as address, browser.page(FOUND) as page:
        await page.look(width, dark)
        await page.open(address + "/")
        await page.run("document.getElementById('max_tokens').value = 12; document.getElementById('seed').value = 1")
        yield Person(page)
        complaints = [line for line in page.said if "Failed to load resource" not in line]
        assert not complaints, complaints
        assert all(asked.startswith((address, "data:")) for asked in page.asked)


class Steered:
    """The engine, whose streams wait for ``go`` behind their first delta, and say ``says`` there."""

    def __init__(self, real: LocalClient, *, held: bool = False, says: str | None = None) -> None:
        self._real, self._says = real, says
        self.go = asyncio.Event()
        self.ended = asyncio.Event()
        if not held:
            self.go.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def stream(self, prompt: Any, params: SamplingParams, **more: Any) -> AsyncIterator[OutputDelta]:
        try:
            async with aclosing(self._real.stream(prompt, params, **more)) as items:
                first = True
                async for delta in items:
                    if first and self._says is not None:
                        delta = replace(delta, text=self._says)
                    yield delta
                    if first:
                        first = False
                        await self.go.wait()
        finally:
            self.ended.set()
