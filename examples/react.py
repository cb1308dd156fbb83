"""ReAct: the model thinks, acts and sees what came of it, until it has an answer. A regex makes every action one that exists."""

from __future__ import annotations

import argparse
import ast
import operator
from collections.abc import Callable
from typing import Any

from lang import ProgramState, function, gen

POPULATION = {"France": "68 million", "Japan": "124 million", "Norway": "5.5 million"}
ACTION = (
    r"population\[(France|Japan|Norway|Spain)\]|calculate\[[0-9]{1,4} [-+*/] [0-9]{1,4}\]|finish\[[^\[\]\n]{1,40}\]"
)
EXAMPLES = """Answer the question in steps of Thought, Action and Observation.

Question: How many people live in Italy?
Thought: I need to look up the population of Italy.
Action: population[Italy]
Observation: 59 million
Thought: The result is 59 million.
Action: finish[59 million]

Question: What is 12 times 3?
Thought: I need to calculate 12 * 3.
Action: calculate[12 * 3]
Observation: 36
Thought: The result is 36.
Action: finish[36]

Question: What is 3 divided by 0?
Thought: I need to calculate 3 / 0.
Action: calculate[3 / 0]
Observation: ZeroDivisionError: division by zero
Thought: The result is not possible.
Action: finish[not possible]

Question: How many people live in Brazil?
Thought: I need to look up the population of Brazil.
Action: population[Brazil]
Observation: 212 million
Thought: The result is 212 million.
Action: finish[212 million]

"""
QUESTIONS = [
    "What is 48 times 7?",
    "How many people live in Japan?",
    "What is 100 divided by 0?",
    "How many people live in Spain?",
]


def population(country: str) -> str:
    return POPULATION[country]


def calculate(text: str) -> str:
    operators: dict[type, Callable[[Any, Any], Any]] = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
    }
    expression = ast.parse(text, mode="eval").body
    assert isinstance(expression, ast.BinOp)
    left, right = ast.literal_eval(expression.left), ast.literal_eval(expression.right)
    return f"{operators[type(expression.op)](left, right):g}"


TOOLS: dict[str, Callable[[str], str]] = {"population": population, "calculate": calculate}


@function
def react(s: ProgramState, question: str, steps: int = 4) -> str | None:
    s += EXAMPLES + f"Question: {question}\n"
    for step in range(steps):
        s += "Thought: " + gen(f"thought{step}", max_tokens=24, stop="\n") + "\n"
        s += "Action: " + gen(f"action{step}", max_tokens=32, regex=ACTION) + "\n"
        tool, _, argument = s[f"action{step}"].removesuffix("]").partition("[")
        if tool == "finish":
            return argument
        try:
            observation = s.call(TOOLS[tool], argument)  # in a thread: other programs go on
        except Exception as error:  # the model is told, and may try something else
            observation = f"{type(error).__name__}: {error}"
        s += f"Observation: {observation}\n"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--html", metavar="FILE", help="draw the first question's run")
    options, _ = parser.parse_known_args()

    states = list(react.run_batch([{"question": question} for question in QUESTIONS], temperature=0))
    for question, state in zip(QUESTIONS, states, strict=True):
        print(f"Question: {question}")
        print(state.text().removeprefix(EXAMPLES).partition("\n")[2].rstrip())
        print(f"Answer: {state.ret_value}\n")
    if options.html:
        print(f"see {states[0].graph.to_html(options.html)}")


if __name__ == "__main__":
    main()
