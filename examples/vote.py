"""Self-consistency: several samples of the reasoning, an answer to each, and the commonest answer wins."""

from __future__ import annotations

from lang import ProgramState, function, gen

QUESTION = "Tom has 3 boxes with 4 pens each. He gives away 2 pens. How many pens are left?"
EXAMPLE = """Question: Ann has 2 bags with 5 apples each. She eats 1 apple. How many apples are left?
Reasoning: 2 bags with 5 apples are 2 * 5 = 10 apples. She eats 1, so 10 - 1 = 9 are left.
Answer: 9

"""


@function
def consistent(s: ProgramState, question: str, samples: int = 7) -> int:
    s += EXAMPLE + f"Question: {question}\nReasoning: "
    s += gen("reasoning", n=samples, max_tokens=48, stop="\n", temperature=0.7)
    branches = s.fork_samples("reasoning")
    branches += "\nAnswer: "
    branches += gen("answer", type=int, max_tokens=4, temperature=0)
    branches.join()
    winner: int = s.vote("answer")
    return winner


def main() -> None:
    state = consistent.run(QUESTION, seed=6)
    for reasoning, answer in zip(state["reasoning"], state["answer"], strict=True):
        print(f"{answer}: {reasoning.strip()}")
    print(f"the vote: {state.ret_value}")


if __name__ == "__main__":
    main()
