"""Constrained to a list of choices: each document gets exactly one of the labels."""

from __future__ import annotations

from radixrt import Constraint, Engine, SamplingParams

LABELS = ["positive", "negative", "neutral"]
REVIEWS = ["What a wonderful film!", "I want my money back.", "It lasts two hours."]


def main() -> None:
    params = SamplingParams(max_tokens=16, temperature=0, constraint=Constraint.choice(LABELS))
    with Engine() as engine:
        prompts = [f"Review: {review}\nSentiment (positive, negative or neutral): " for review in REVIEWS]
        for review, output in zip(REVIEWS, engine.generate(prompts, params)):
            print(f"{review!r}: {output.text}")
            assert output.text in LABELS


if __name__ == "__main__":
    main()
