"""Many prompts that begin alike: the beginning is computed once, and the figures show it."""

from __future__ import annotations

from radixrt import Engine, SamplingParams

INSTRUCTIONS = """Translate the word from English to French.

English: dog
French: chien

English: house
French: maison

English: water
French: eau

"""
WORDS = ["bread", "cat", "red", "book"]


def main() -> None:
    with Engine() as engine:
        prompts = [f"{INSTRUCTIONS}English: {word}\nFrench:" for word in WORDS]
        outputs = engine.generate(prompts, SamplingParams(max_tokens=6, temperature=0, stop=["\n"]))
        for word, output in zip(WORDS, outputs, strict=True):
            print(
                f"{word:<6} -> {output.text.strip():<10} {output.cached_tokens} cached, {output.computed_tokens} computed"
            )

        stats = engine.stats()
        print(f"hit rate {stats.hit_rate:.1%}, optimal {stats.optimal_hit_rate:.1%}")


if __name__ == "__main__":
    main()
