"""Constrained by a pydantic model: the output is always a JSON text that the model class reads."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from radixrt import Constraint, Engine, SamplingParams


class Animal(BaseModel):
    name: str = Field(min_length=2, max_length=20)
    legs: int = Field(ge=0, le=8)
    lives_in: Literal["water", "forest", "house", "sky"]
    nicknames: list[str] = Field(max_length=2)


def main() -> None:
    constraint = Constraint.json_schema(Animal)
    with Engine() as engine:
        prompts = [f"Describe the {animal} in JSON: " for animal in ("cat", "eagle", "salmon")]
        # However the model is sampled and wherever the tokens run out: what comes back is complete and valid.
        for output in engine.generate(
            prompts, SamplingParams(max_tokens=80, temperature=1, seed=2, constraint=constraint)
        ):
            print(Animal.model_validate_json(output.text))


if __name__ == "__main__":
    main()
