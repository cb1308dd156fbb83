"""Constrained by a regex: the whole output matches it, from the first token to the last."""

from __future__ import annotations

import re

from radixrt import Constraint, Engine, SamplingParams

DATE = r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"


def main() -> None:
    params = SamplingParams(max_tokens=24, temperature=1, seed=1, n=3, constraint=Constraint.regex(DATE))
    with Engine() as engine:
        (output,) = engine.generate("The first man walked on the moon on", params)
    for sample in output.samples:
        print(sample.text)
        assert re.fullmatch(DATE, sample.text)


if __name__ == "__main__":
    main()
