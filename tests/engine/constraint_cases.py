"""Constraints of every kind with a check that someone else wrote, requests drawn at random, and what must hold of their outputs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import regex

from radixrt import Constraint, Engine, FinishReason, RequestOutput, SamplingParams

Check = Callable[[str], bool]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", 1, None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
PRICES = {"type": "array", "items": {"type": "number", "minimum": -1, "maximum": 2.5}, "minItems": 1, "maxItems": 4}


def by_regex(pattern: str) -> tuple[Constraint, Check]:
    return Constraint.regex(pattern), lambda text: regex.fullmatch(pattern, text) is not None


def by_schema(schema: Any) -> tuple[Constraint, Check]:
    def check(text: str) -> bool:
        return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))

    return Constraint.json_schema(schema), check


def nested(text: str) -> bool:
    half = len(text) // 2
    return text == "(" * half + "x" + ")" * half


TAGGED = r"(?s)(?:(?!<f>).)*(?:<f>[0-9]{1,3}</f>(?:(?!<f>).)*)+"
CASES: dict[str, tuple[Constraint, Check]] = {
    "number": by_regex(r"\d+(\.\d+)?"),
    "word": by_regex(r"[a-z]{3,12}"),
    "words": by_regex(r"(foo|foobar)+"),
    "unicode": by_regex(r"(é|漢|🙂){2,5}x?"),
    "any": by_regex(r"(?s).{1,10}"),
    "quoted": by_regex(r'"[^"\\]{0,8}"(, "[^"\\]{0,8}")*'),
    "date": by_regex(r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"),
    "person": by_schema(PERSON),
    "tree": by_schema(TREE),
    "prices": by_schema(PRICES),
    "object": (Constraint.json_object(), lambda text: isinstance(json.loads(text), dict)),
    "choice": (Constraint.choice(["foo", "foobar", "é", "no"]), lambda text: text in ("foo", "foobar", "é", "no")),
    "literal": (Constraint.literal("Exactly this, é."), lambda text: text == "Exactly this, é."),
    "nested": (Constraint.grammar('start: "(" start ")" | "x"'), nested),
    "sequence": (
        Constraint.sequence("Answer: ", Constraint.alternatives("yes", Constraint.regex("[0-9]{2}"))),
        lambda text: regex.fullmatch("Answer: (yes|[0-9]{2})", text) is not None,
    ),
    "tags": (
        Constraint.structural_tags([("<f>", Constraint.regex("[0-9]{1,3}"), "</f>")], at_least_one=True),
        lambda text: regex.fullmatch(TAGGED, text) is not None,
    ),
}
PROMPTS = ["hello", "a longer prompt, to be cut in chunks", "{", "1 + 1 = ", "hello, and then some more"]
Work = list[tuple[str, str, SamplingParams]]  # the name of a case, a prompt, parameters


def work(engine: Engine, count: int, seed: int, **more: Any) -> Work:
    """Requests drawn at random: constraint, prompt, temperature, filters, and ``max_tokens`` from the fewest possible to 60."""
    rng = random.Random(seed)
    names = list(CASES)
    drawn: Work = []
    for i in range(count):
        name = names[i % len(names)]
        least = engine.compile(CASES[name][0]).result().min_tokens
        params = SamplingParams(
            constraint=CASES[name][0],
            max_tokens=rng.randint(least, 60),
            temperature=rng.choice([0.0, 0.5, 1.0, 1.0, 4.0]),
            top_k=rng.choice([0, 0, 0, 3]),
            top_p=rng.choice([1.0, 1.0, 0.5]),
            seed=rng.randrange(2**40),
            **more,
        )
        drawn.append((name, rng.choice(PROMPTS), params))
    return drawn


def answer(engine: Engine, items: Work) -> list[RequestOutput]:
    return engine.generate([prompt for _, prompt, _ in items], [params for _, _, params in items])


def assert_valid(engine: Engine, items: Work, outputs: list[RequestOutput]) -> None:
    for (name, _, params), output in zip(items, outputs, strict=True):
        constraint, check = CASES[name]
        assert output.error is None, (name, params, output.error)
        assert len(output.samples) == params.n
        for sample in output.samples:
            assert sample.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert len(sample.token_ids) <= (params.max_tokens or 0)
            assert check(sample.text), (name, params, sample)
            ids = [token for token in sample.token_ids if token not in engine.tokenizer.eos_ids]
            assert engine.compile(constraint).result().accepts(ids), (name, params, sample)


def essence(outputs: list[RequestOutput]) -> list[Any]:
    return [(o.forced_tokens, [(s.text, s.token_ids, s.finish_reason) for s in o.samples]) for o in outputs]
