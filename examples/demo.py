"""The main job on the default model: label reviews that share one long prompt, then talk; and what the cache saved."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from radixrt import Engine, SamplingParams
from radixrt.cli.figures import peak_memory, percent

INSTRUCTIONS = """Each review below is about a product, a meal or a film. Read it and decide how its author felt.
Write "positive" when the author was pleased and "negative" when the author was not.

"""
LABELLED = (
    ("The battery lasts two days and it charges in no time. Best phone I have owned.", "positive"),
    ("It stopped working after a week and nobody answers my emails.", "negative"),
    ("We waited an hour for cold soup. Never again.", "negative"),
    ("Warm bread, friendly people, and the view over the river was lovely.", "positive"),
    ("I laughed from the first scene to the last. Go and see it!", "positive"),
    ("Two hours of my life that I will not get back.", "negative"),
    ("The seams came apart the first time I wore it.", "negative"),
    ("Soft, light and exactly the colour in the picture. I ordered a second one.", "positive"),
    ("The instructions were clear and it took ten minutes to put together.", "positive"),
    ("Half of the screws were missing and the wood was cracked.", "negative"),
    ("My daughter reads it every night. A wonderful book.", "positive"),
    ("The plot makes no sense and the ending is an insult.", "negative"),
    ("Fast delivery, careful packing, and the cups are beautiful.", "positive"),
    ("The room smelled of smoke and the sheets were dirty.", "negative"),
)
REVIEWS = (
    ("The soup was delicious and the waiter made us smile.", "positive"),
    ("The screen broke on the second day.", "negative"),
    ("I fell asleep after twenty minutes. So boring.", "negative"),
    ("What a great little camera, I love it.", "positive"),
    ("The shoes hurt my feet and look cheap.", "negative"),
    ("An amazing film with a perfect cast.", "positive"),
    ("Terrible service, they lost our order twice.", "negative"),
    ("The best pizza in town, we come every week.", "positive"),
    ("It is loud, slow and far too expensive.", "negative"),
    ("My son is very happy with his new bike.", "positive"),
    ("The cake was dry and tasted of nothing.", "negative"),
    ("Excellent sound and easy to set up.", "positive"),
    ("The jacket arrived with a hole in the sleeve.", "negative"),
    ("A charming hotel with a wonderful garden.", "positive"),
    ("I want my money back. What a waste.", "negative"),
    ("A beautiful story, I cried at the end.", "positive"),
)
QUESTIONS = ("What is the capital of France?", "And what is it famous for? Answer in one sentence.")


@dataclass(frozen=True)
class Moment:
    """The engine's figures at one moment, and the seconds of work so far."""

    stats: Any
    seconds: float


def label(engine: Engine) -> None:
    """Label all reviews in one batch: their prompts differ only in the last line."""
    examples = "".join(f"Review: {text}\nFeeling: {feeling}\n\n" for text, feeling in LABELLED)
    prompts = [f"{INSTRUCTIONS}{examples}Review: {text}\nFeeling:" for text, _ in REVIEWS]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=4, temperature=0, stop=["\n"]))
    right = 0
    for (text, feeling), output in zip(REVIEWS, outputs, strict=True):
        answer = output.text.strip()
        right += answer == feeling
        print(f"  {answer:<9} {' ' if answer == feeling else '✗'} {text}")
    print(f"  {right} of {len(REVIEWS)} as a person would label them\n")


def talk(engine: Engine) -> None:
    """A short conversation. Every turn sends all of it; what was said before is still in the tree."""
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        print(f"  you:   {question}\n  model: ", end="", flush=True)
        text = ""
        for delta in engine.stream(messages, SamplingParams(max_tokens=48, temperature=0)):
            text += delta.text
            print(delta.text.replace("\n", "\n         "), end="", flush=True)
            if delta.output is not None:
                print(f"\n         [{delta.output.cached_tokens} cached, {delta.output.computed_tokens} computed]")
        messages.append({"role": "assistant", "content": text})
    print()


def show(first: Moment, everything: Moment) -> None:
    """Print the figures of the batch beside those of the whole run."""
    rows: list[tuple[str, ...]] = [("", "few-shot batch", "everything")]
    for name in ("prompt_tokens", "cached_tokens", "computed_tokens"):
        rows.append((name.replace("_", " "), *(f"{getattr(m.stats, name):,}" for m in (first, everything))))
    rows.append(("hit rate", *(percent(m.stats.hit_rate) for m in (first, everything))))
    rows.append(("optimal hit rate", *(percent(m.stats.optimal_hit_rate) for m in (first, everything))))
    for what, counted in (
        ("generated", ("generated_tokens",)),
        ("prompt + generated", ("prompt_tokens", "generated_tokens")),
    ):
        rates = (sum(getattr(m.stats, name) for name in counted) / m.seconds for m in (first, everything))
        rows.append((f"{what} tokens/s", *(f"{rate:,.1f}" for rate in rates)))
    rows.append(("seconds", *(f"{m.seconds:.1f}" for m in (first, everything))))
    rows.append(("peak memory", "", f"{peak_memory():,.0f} MB"))
    for name, *cells in rows:
        print(f"  {name:<28}" + "".join(f"{cell:>16}" for cell in cells))


def main() -> None:
    begun = time.perf_counter()
    with Engine(progress=True) as engine:
        info = engine.model_info
        print(f"{info.name}: {info.family}, {info.parameters / 1e6:.0f} million parameters, {info.dtype}")
        print(f"loaded in {time.perf_counter() - begun:.1f} s\n")

        print(f"{len(REVIEWS)} reviews under one shared prompt:")
        started = time.perf_counter()
        label(engine)
        first = Moment(engine.stats(), time.perf_counter() - started)

        print("A conversation with a follow-up:")
        talk(engine)
        show(first, Moment(engine.stats(), time.perf_counter() - started))


if __name__ == "__main__":
    main()
