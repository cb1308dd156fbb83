"""Streaming from asyncio: two conversations at once, each printed as it comes."""

from __future__ import annotations

import asyncio

from radixrt import AsyncEngine, SamplingParams


async def ask(engine: AsyncEngine, name: str, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    async for delta in engine.stream(messages, SamplingParams(max_tokens=12, temperature=0)):
        print(f"{name}: {delta.text!r}")
        if delta.output is not None:
            print(f"{name}: done, {delta.output.completion_tokens} tokens, {delta.output.finish_reason}")


async def main() -> None:
    async with AsyncEngine() as engine:
        await asyncio.gather(
            ask(engine, "first", "What is the capital of France?"),
            ask(engine, "second", "What is the capital of Spain?"),
        )


if __name__ == "__main__":
    asyncio.run(main())
