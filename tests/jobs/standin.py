"""A model that is none: answers at once, in an order that is shuffled, with a value made of the document and the seed.

Also a job to be killed: run as a program, it makes jobs that end themselves with SIGKILL between two bytes that they write.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from radixrt.errors import InvalidRequest
from radixrt.grammar.constraint import Constraint
from radixrt.jobs.backends import Answer, BackendDown
from radixrt.jobs.prompt import Prompt

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "first": {"type": "string"},
        "size": {"type": "integer"},
        "draw": {"type": "integer"},
    },
    "required": ["first", "size", "draw"],
    "additionalProperties": False,
}
_END = "\n\nEnd of the document"


def text_of(prompt: Prompt) -> str:
    """The document that a prompt is about."""
    content = prompt.turns[prompt.shared].content
    return content.removeprefix(prompt.before).rsplit(_END, 1)[0]


class StandIn:
    """See ``Backend``. A token is a character; every prompt shares what comes before its document, and nothing else.

    Args:
        wrong: (document, try) -> an answer in place of the right one, or ``None``. A "refuse" raises InvalidRequest, a "down" BackendDown.
        shuffle: seed of the order in which answers come.
    """

    name = "stand-in"
    min_tokens = 1

    def __init__(
        self,
        *,
        wrong: Callable[[str, int], str | None] | None = None,
        context_length: int = 100_000,
        pool_tokens: int | None = None,
        most: int = 8,
        shuffle: int = 0,
    ) -> None:
        self.context_length, self.pool_tokens = context_length, pool_tokens
        self.asked: list[str] = []  # the document of every request
        self.prompts: list[Prompt] = []
        self.seeds: list[int] = []
        self.running = self.most_running = self.running_tokens = self.most_running_tokens = 0
        self.started = self.closed = 0
        self._wrong, self._most = wrong, most
        self._tries: Counter[str] = Counter()
        self._random = random.Random(shuffle)

    async def start(self) -> None:
        self.started += 1

    async def close(self) -> None:
        self.closed += 1

    def count(self, text: str) -> int:
        return len(text)

    async def counter(self, text: str) -> Callable[[str], int]:
        return self.count

    async def prompt_tokens(self, prompt: Prompt) -> int:
        return sum(len(turn.content) for turn in prompt.turns)

    def inflight(self, longest: int) -> int:
        return self._most

    async def optimum(self) -> float | None:
        return None

    async def answer(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        seed: int,
        logprobs: bool = False,
        constraint: Constraint | None = None,
    ) -> Answer:
        text = text_of(prompt)
        tries = self._tries[text] if constraint is None else 0
        self._tries[text] += 1
        size = await self.prompt_tokens(prompt)
        self.asked.append(text)
        self.prompts.append(prompt)
        self.seeds.append(seed)
        self.running += 1
        self.running_tokens += len(text) + max_tokens
        self.most_running = max(self.most_running, self.running)
        self.most_running_tokens = max(self.most_running_tokens, self.running_tokens)
        try:
            for _ in range(self._random.randrange(8)):
                await asyncio.sleep(0)
        finally:
            self.running -= 1
            self.running_tokens -= len(text) + max_tokens
        said = None
        if constraint is not None:
            said = text.split()[0]
        elif self._wrong is not None:
            said = self._wrong(text, tries)
        if said == "refuse":
            raise InvalidRequest("document", "is refused")
        if said == "down":
            raise BackendDown("nobody answers any more")
        if said is None:
            value = {"first": (text.split() or [""])[0], "size": len(text), "draw": seed % 1000}
            said = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return Answer(
            said,
            complete=said != "cut",
            problem="cut off" if said == "cut" else "",
            prompt_tokens=size,
            cached_tokens=size - len(text) if len(self.asked) > 1 else 0,
            output_tokens=len(said),
            tokens=tuple((char.encode(), -0.5) for char in said) if logprobs else None,
        )


def documents(count: int) -> list[tuple[str, str]]:
    """Documents, some of which are no documents."""
    words = ["Zürich", "alpha", "漢字", "béta", "“q”", "x"]
    texts = [f"{words[i % len(words)]} number {i}\n" + "word " * (i % 7) for i in range(count)]
    return [(f"doc {i}", "" if i % 11 == 5 else text) for i, text in enumerate(texts)]


def wrong(text: str, tries: int) -> str | None:
    """Every fifth document is right only when asked again, every seventh never."""
    number = int(text.split()[2])
    if number % 7 == 3:
        return '{"first":'
    return "cut" if number % 5 == 2 and tries == 0 else None


def killed_after(left: int) -> Callable[[int, Any], int]:
    """``os.write`` that ends this process when so many bytes are written."""

    def write(descriptor: int, data: Any) -> int:
        nonlocal left
        if len(data) > left:
            os.write(descriptor, data[:left])
            os.kill(os.getpid(), signal.SIGKILL)
        left -= len(data)
        return os.write(descriptor, data)

    return write


def job(output: Path, count: int, backend: StandIn | None = None, **settings: Any) -> Any:
    """The job that the tests interrupt."""
    from radixrt.jobs import extract

    backend = StandIn(wrong=wrong) if backend is None else backend
    return extract(documents(count), schema=SCHEMA, output=output, backend=backend, **settings)


def _killed(folder: str, count: str, mode: str, after: str) -> None:
    """Jobs that are killed, each in a process of its own; prints how each of them ended, -9 or 0.

    Args:
        mode: "each": a job for each of the bytes ``after`` (``FIRST:LAST:STEP``); "same": one job, killed at random until it is finished.
    """
    from radixrt.jobs import derived
    from radixrt.jobs import job as imported  # here, not in every process

    assert imported
    draw = random.Random(0)
    first, last, step = map(int, after.split(":"))
    ended, at = -9, first
    while (mode == "each" and at < last) or (mode == "same" and ended):
        child = os.fork()
        if not child:
            derived._write = killed_after(at if mode == "each" else draw.randrange(first, last))
            place = Path(folder) / (str(at) if mode == "each" else "same")
            place.mkdir(exist_ok=True)
            job(place / "out.jsonl", int(count), StandIn(wrong=wrong, shuffle=at))
            os._exit(0)
        draw.random()
        _, status = os.waitpid(child, 0)
        ended = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        print(ended, flush=True)
        at += step


if __name__ == "__main__":
    _killed(*sys.argv[1:])
