"""An agent with two tools: typed Python functions, one of which the model has to call before it answers.

python examples/tools.py ["How warm is it in Oslo?"]
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from lang import function, gen, system, user


def weather(city: Literal["Oslo", "Rome", "Lima"]) -> dict[str, Any]:
    """How the weather in a city is.

    Args:
        city: where.
    """
    degrees = {"Oslo": 4, "Rome": 21, "Lima": 18}[city]
    return {"city": city, "degrees": degrees, "sky": "clear" if degrees > 10 else "grey"}


async def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


@function
def agent(s: Any, question: str) -> None:
    s += system("Answer in one sentence.")
    s += user(question)
    with s.assistant():
        s += gen(
            "answer",
            tools=[weather, add],
            tool_choice="required",
            parallel_tool_calls=False,
            max_rounds=1,
            max_tokens=80,
            temperature=0,
            regex=r"(It is|That makes) -?[0-9]{1,4}( degrees in (Oslo|Rome|Lima))?\.",
        )


def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else "How warm is it in Oslo?"
    state = agent.run(question)
    for call in state.calls("answer"):
        print(
            f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())}) -> {call.result}  [{call.seconds:.3f} s]"
        )
    print(state["answer"])


if __name__ == "__main__":
    main()
