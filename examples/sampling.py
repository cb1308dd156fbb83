"""How sampling is set: one set of parameters for all prompts, or one for each; several samples; log-probabilities."""

from __future__ import annotations

import math

from radixrt import Engine, SamplingParams


def main() -> None:
    with Engine() as engine:
        greedy = SamplingParams(max_tokens=8, temperature=0)
        warm = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, seed=1)
        for output in engine.generate(["The sky is", "The sea is"], [greedy, warm]):
            print(repr(output.text), output.finish_reason)

        # Three samples of one prompt; the prompt is computed once.
        (output,) = engine.generate("My favourite colour is", SamplingParams(max_tokens=6, n=3, seed=7))
        for sample in output.samples:
            print(sample.index, repr(sample.text))

        # What the model thought of each token it chose, and of the two likeliest.
        (output,) = engine.generate("Two plus two is", SamplingParams(max_tokens=2, temperature=0, logprobs=2))
        for position in output.logprobs or ():
            likeliest = ", ".join(
                f"{engine.tokenizer.decode([top.token_id])!r} {math.exp(top.logprob):.2f}" for top in position.top
            )
            print(f"{engine.tokenizer.decode([position.chosen.token_id])!r}: {likeliest}")


if __name__ == "__main__":
    main()
