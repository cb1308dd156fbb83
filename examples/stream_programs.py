"""Programs that stream: their text piece by piece as it comes, in a plain loop and, two at once, from asyncio."""

from __future__ import annotations

import asyncio

from lang import ProgramState, assistant, function, gen, user


@function
def answer(s: ProgramState, question: str) -> None:
    s += user(question)
    s += assistant(gen("answer", max_tokens=24))


async def print_answer(name: str, question: str) -> None:
    state = await answer.arun(question, temperature=0, stream=True)
    async for piece in state.text_async_iter("answer"):
        print(f"{name}: {piece!r}")


async def both() -> None:
    await asyncio.gather(
        print_answer("France", "What is the capital of France?"),
        print_answer("Japan", "What is the capital of Japan?"),
    )


def main() -> None:
    state = answer.run("Why is the sky blue?", temperature=0, stream=True)
    for piece in state.text_iter("answer"):
        print(piece, end="", flush=True)
    print()
    asyncio.run(both())


if __name__ == "__main__":
    main()
