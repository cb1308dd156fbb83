"""Branch, solve, merge: six judges look at one essay, each from another side, and a verdict is made of what they say."""

from __future__ import annotations

import argparse
from typing import Any

from lang import ProgramState, assistant, function, gen, select, system, user

ESSAY = """Bees are small, but we need them. When a bee looks for nectar it carries pollen from flower to flower, and without
pollen there are no apples, no almonds and no pumpkins. A farmer who poisons bees harms the harvest of the next year. We should
plant more wild flowers and use less poison: it costs little, and everybody eats."""
SIDES = ["clarity", "structure", "evidence", "style", "grammar", "originality"]


def expected(points: dict[str, Any]) -> float:
    """The mean of all choices by their probabilities: says more than the likeliest one."""
    return sum(int(choice) * share for choice, share in zip(points["choices"], points["probabilities"], strict=True))


@function
def judge(s: ProgramState, essay: str) -> list[float]:
    s += system("You judge essays. Be brief.")
    s += user(f"The essay:\n{essay}")
    s += assistant("I have read it.")
    branches = s.fork(len(SIDES))  # six, and the essay is computed once
    for side, branch in zip(SIDES, branches, strict=True):
        branch += user(f"Say in one sentence how good its {side} is.")
        branch += assistant(gen("view", max_tokens=32, stop="\n"))
        branch += user(f"How many points from 1 to 5 is its {side} worth?")
        branch += assistant(select("points", ["1", "2", "3", "4", "5"]))
    points = [expected(branch.meta("points")) for branch in branches]
    branches.join()  # s["view"] is now a list, in order
    s += user("The judges said:\n" + "\n".join(f"{side}: {view}" for side, view in zip(SIDES, s["view"], strict=True)))
    s += assistant("In one word, the essay is " + select("verdict", ["excellent", "good", "fair", "poor"]))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--html", metavar="FILE", help="draw the run")
    options, _ = parser.parse_known_args()

    state = judge.run(ESSAY, temperature=0)
    for side, points, view in zip(SIDES, state.ret_value, state["view"], strict=True):
        print(f"{side} ({points:.1f} of 5): {view}")
    print(f"verdict: {state['verdict']}")
    if options.html:
        print(f"see {state.graph.to_html(options.html)}")


if __name__ == "__main__":
    main()
