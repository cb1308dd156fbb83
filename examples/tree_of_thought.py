"""Tree of thought, for a story: 4 stages; at each, every kept state thinks in 2 ways, all are scored side by side and the best 2 are kept."""

from __future__ import annotations

import argparse

from lang import ProgramState, function, gen, select

EXAMPLE = """Story: a fox
Hero: A young fox who was afraid of water.
Problem: His sister was lost on the other side of the river.
Idea: He pushed a fallen tree across the river.
Ending: They walked home together, and he was never afraid again.

"""
STAGES = ["Hero", "Problem", "Idea", "Ending"]
KEPT = 2


@function
def plan(s: ProgramState, about: str, ways: int = 2) -> str:
    s += EXAMPLE + f"Story: {about}\n"
    kept = [s]
    s.scores = []
    for stage in STAGES:
        thoughts = [branch for state in kept for branch in state.fork(ways)]
        for branch in thoughts:  # appending does not wait: all of these run at once
            branch += f"{stage}: " + gen(stage, max_tokens=24, stop="\n", temperature=0.7) + "\n"
        judges = [branch.copy() for branch in thoughts]
        for judge in judges:
            judge += "Is this a good story? Answer yes or no: " + select("good", ["yes", "no"])
        scores = [judge.meta("good")["probabilities"][0] for judge in judges]
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[:KEPT]
        kept = [thoughts[i] for i in best]
        s.scores.append(scores)
    return kept[0].text().removeprefix(EXAMPLE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--html", metavar="FILE", help="draw the tree")
    options, _ = parser.parse_known_args()

    state = plan.run("a small bird", seed=2)
    for stage, scores in zip(STAGES, state.scores, strict=True):
        print(f"{stage}, chances of a good story by branch: {', '.join(f'{score:.0%}' for score in scores)}")
    print(f"\n{state.ret_value}")
    print(f"{state.graph.hit_rate:.0%} of {state.graph.totals()['prompt_tokens']} prompt tokens were cached")
    if options.html:
        print(f"see {state.graph.to_html(options.html)}")


if __name__ == "__main__":
    main()
