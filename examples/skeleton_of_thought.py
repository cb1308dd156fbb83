"""Skeleton of thought: an outline first, then all of its points written side by side, then joined."""

from __future__ import annotations

import argparse
from typing import Annotated

from pydantic import Field

from lang import ProgramState, assistant, function, gen, user

Point = Annotated[str, Field(min_length=5, max_length=40, pattern="^[A-Z][a-z ]*$")]
Outline = Annotated[list[Point], Field(min_length=3, max_length=3)]


def expand(branch: ProgramState, point: str) -> str:
    branch += user(f"{point}: explain in one sentence how.")
    branch += assistant(gen("sentence", max_tokens=40, stop="\n"))
    sentence: str = branch["sentence"]
    return sentence


@function
def article(s: ProgramState, topic: str) -> str:
    s += user(f"Name three reasons {topic}, each in a few words, as a JSON list.")
    s += assistant(gen("outline", max_tokens=64, type=Outline))
    sentences = s.map(s["outline"], expand)
    return "\n".join(f"- {point}: {sentence}" for point, sentence in zip(s["outline"], sentences, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--html", metavar="FILE", help="draw the run")
    options, _ = parser.parse_known_args()

    state = article.run("why sleep is good for you", temperature=0)
    print(state.ret_value)
    if options.html:
        print(f"see {state.graph.to_html(options.html)}")


if __name__ == "__main__":
    main()
