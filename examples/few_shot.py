"""Few-shot labels: every review is a program of its own, and the examples they all begin with are computed once."""

from __future__ import annotations

from lang import ProgramState, function, select

EXAMPLES = """Review: The battery lasts two days. Best phone I have owned.
Feeling: positive

Review: It stopped working after a week and nobody answers my emails.
Feeling: negative

Review: Two hours of my life that I will not get back. The plot makes no sense.
Feeling: negative

Review: I laughed from the first scene to the last. Go and see it!
Feeling: positive

Review: Warm bread, friendly people, and a lovely view over the river.
Feeling: positive

"""
REVIEWS = [
    "The soup was delicious and the waiter made us smile.",
    "The screen broke on the second day.",
    "I fell asleep after twenty minutes. So boring.",
    "What a great little camera, I love it.",
    "The cake was dry and tasted of nothing.",
    "A charming hotel with a wonderful garden.",
]


@function
def label(s: ProgramState, review: str) -> None:
    s += EXAMPLES
    s += f"Review: {review}\nFeeling: "
    s += select("feeling", ["positive", "negative"])


def main() -> None:
    states = label.run_batch([{"review": review} for review in REVIEWS])
    for review, state in zip(REVIEWS, states, strict=True):
        print(f"{state['feeling']} ({state.meta('feeling')['confidence']:.0%}): {review}")


if __name__ == "__main__":
    main()
