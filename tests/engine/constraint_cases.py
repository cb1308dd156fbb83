"""Constraints of every kind with a check that someone else wrote, requests drawn at random, and what must hold of their outputs;
and greedy decoding of transformers' logits under the mask that the ``regex`` package makes of a pattern."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import lark
import regex
import torch
from transformers import PreTrainedModel

from radixrt import Constraint, Engine, FinishReason, RequestOutput, SamplingParams
from radixrt.model.tokenizer import Tokenizer
from tests.engine.oracle import reference_logits

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


PROSE = "It was the best of times, it was the worst of times; it was the age of wisdom.\nFee: 12.50, naïve."

SPANS = [found.span() for found in regex.finditer(r"\w+|[^\w\s]", PROSE)]
QUOTATIONS = {PROSE[first:end] for i, (first, _) in enumerate(SPANS) for _, end in SPANS[i:]}
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
    "quotation": (Constraint.substring(PROSE), QUOTATIONS.__contains__),
    "cut": (
        Constraint.substring(PROSE, unit="characters", max_length=9),
        lambda text: text in PROSE and 0 < len(text) < 10,
    ),
    "sign": (Constraint.substring("é漢 🙂"), lambda text: text in ("é", "漢", "é漢", "🙂", "漢 🙂", "é漢 🙂")),
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


# ---- the masked reference

PATTERNS = [
    r"[a-z]{2,8}\.",
    r"(yes|no|yesterday|nobody)( [a-z]{1,4}){0,2}\.",
    r'\{"name":"[A-Za-z ]{1,8}","age":(1?[0-9]|20)\}\.',
    r"([01]{2} ){1,3}x\.",
    r"(foo|foobar|foobarbaz){1,3}\.?",
    r"[a-z]{41}\.",
]

# name -> a constraint, and a pattern of ASCII for the same language
EXACT: dict[str, tuple[Constraint, str]] = {
    name: (constraint, pattern)
    for name, constraint, pattern in [
        ("sentence", Constraint.regex(r"[A-Z][a-z]{2,8}( [a-z]{1,8}){1,3}\."), r"[A-Z][a-z]{2,8}( [a-z]{1,8}){1,3}\."),
        (
            "answer",
            Constraint.regex(r"(yes|no|yesterday|nobody)(, [a-z]{1,6}){0,2}!"),
            r"(yes|no|yesterday|nobody)(, [a-z]{1,6}){0,2}!",
        ),
        ("year", Constraint.regex(r"(19|20)[0-9]{2}(-(0[1-9]|1[0-2]))?"), r"(19|20)[0-9][0-9](-(0[1-9]|1[0-2]))?"),
        ("quotation", Constraint.regex(r'"[^"\\\x00-\x1f\x7f-\U0010ffff]{4,16}"'), r'"[ !#-\[\]-~]{4,16}"'),
        ("prefixes", Constraint.regex(r"(foo|foobar|foobarbaz){1,3}(\.|)"), r"(foo|foobar|foobarbaz){1,3}\.?"),
        (
            "choice",
            Constraint.choice(["sea", "season", "seasons", "the sea", "a", "the end"]),
            "sea|season|seasons|the sea|a|the end",
        ),
        (
            "object",
            Constraint.json_schema(
                {
                    "type": "object",
                    "properties": {
                        "mood": {"enum": ["good", "bad", "goodbye", None]},
                        "word": {"type": "string", "pattern": "^[a-z]{3,9}$"},
                        "sure": {"type": "boolean"},
                    },
                    "required": ["mood", "word", "sure"],
                    "additionalProperties": False,
                }
            ),
            r'\{"mood":("good"|"bad"|"goodbye"|null),"word":"[a-z]{3,9}","sure":(true|false)\}',
        ),
        (
            "array",
            Constraint.json_schema(
                {
                    "type": "array",
                    "items": {"type": "string", "pattern": "^[A-Za-z ]{2,9}$"},
                    "minItems": 1,
                    "maxItems": 3,
                }
            ),
            r'\["[A-Za-z ]{2,9}"(,"[A-Za-z ]{2,9}"){0,2}\]',
        ),
        (
            "list",
            Constraint.grammar(
                'root ::= line ("\\n" line)? ";"\nline ::= "- " word (" " word){0,2}\nword ::= [a-z]{2,8}', "gbnf"
            ),
            r"- [a-z]{2,8}( [a-z]{2,8}){0,2}(\n- [a-z]{2,8}( [a-z]{2,8}){0,2})?;",
        ),
        (
            "form",
            Constraint.sequence(
                "Name: ",
                Constraint.regex("[A-Z][a-z]{1,9}"),
                Constraint.alternatives(" (old)", Constraint.regex(r", [1-9][0-9]?")),
            ),
            r"Name: [A-Z][a-z]{1,9}( \(old\)|, [1-9][0-9]?)",
        ),
    ]
}  # fmt: skip
QUESTIONS = [
    f"{start} {what}"
    for start in ("Write of", "A few words on", "Tell me about", "What is known of", "My friend asked me about")
    for what in (
        "the sea:", "the moon:", "a city in the south:", "an old man:", "cooking rice:", "trains,", "winter and snow\n",
        "my work:",
        "music?", "a long way home.", "mathematics:", "the war:", "birds -", "tea and coffee:", "gold,", "a doctor:",
        "his mother:",
        "seven stories:", "computers:", "the law:",
    )
]  # fmt: skip


def spelled_by(tokenizer: Tokenizer, tokens: list[int]) -> str | None:
    try:
        return b"".join(map(tokenizer.token_bytes, tokens)).decode()
    except UnicodeDecodeError:
        return None


def reference_constrained(engine: Engine, model: PreTrainedModel, ids: list[int], pattern: str) -> list[int]:
    """Greedy tokens of transformers' logits, each the likeliest that ``regex`` says can still become a match (of ASCII)."""
    tokens: list[int] = []
    while True:
        logits = reference_logits(model, [*ids, *tokens])[-1]
        for token in torch.argsort(logits, descending=True, stable=True).tolist():
            text = spelled_by(engine.tokenizer, tokens)
            if token in engine.tokenizer.eos_ids:
                if text is not None and regex.fullmatch(pattern, text):
                    return [*tokens, token]
            elif token < engine.tokenizer.vocab_size and token not in engine.tokenizer.special_ids:
                text = spelled_by(engine.tokenizer, [*tokens, token])
                if text not in (None, spelled_by(engine.tokenizer, tokens)) and regex.fullmatch(
                    pattern, text, partial=True
                ):
                    tokens.append(token)
                    break
        else:
            return tokens
        text = spelled_by(engine.tokenizer, tokens)
        assert text is not None
        if regex.fullmatch(pattern, text) and text.endswith("."):  # every pattern ends with its only full stop
            return tokens


class Mask:
    """What ``regex`` says of a pattern of ASCII: which text can still become a match."""

    def __init__(self, pattern: str) -> None:
        self._pattern = regex.compile(pattern)
        self._letters: dict[tuple[str, str], bool] = {}

    def over(self, text: str) -> bool:
        return self._pattern.fullmatch(text) is not None

    def open(self, text: str) -> bool:
        return self._pattern.fullmatch(text, partial=True) is not None

    def may_follow(self, text: str, piece: str) -> bool:
        first = (text, piece[0])  # most tokens are ruled out by it
        if first not in self._letters:
            self._letters[first] = self.open(text + piece[0])
        return self._letters[first] and self.open(text + piece)

    def closed(self, text: str) -> bool:
        return not any(self.may_follow(text, chr(code)) for code in range(128))


def reference_constrained_batch(
    tokenizer: Tokenizer, model: PreTrainedModel, cases: list[tuple[list[int], str]]
) -> list[list[int]]:
    """``reference_constrained`` of many (prompt, pattern): prompts of one length go through the model together, with
    transformers' own KV cache. An output ends with an end token, or where nothing may follow."""
    special = tokenizer.special_ids | tokenizer.eos_ids
    spelled = ["" if t in special else spelled_by(tokenizer, [t]) or "" for t in range(tokenizer.vocab_size)]

    def allowed(token: int, mask: Mask, text: str) -> bool:
        if token in tokenizer.eos_ids:
            return mask.over(text)
        return spelled[token] != "" and mask.may_follow(text, spelled[token])

    def choose(logits: torch.Tensor, mask: Mask, text: str) -> int:
        for count in (100, len(spelled)):
            for token in logits[: len(spelled)].topk(count).indices.tolist():
                if allowed(token, mask, text):
                    return int(token)
        raise AssertionError(f"nothing follows {text!r}")

    outputs: list[list[int]] = [[] for _ in cases]
    for length in sorted({len(ids) for ids, _ in cases}):
        going = [i for i, (ids, _) in enumerate(cases) if len(ids) == length]
        masks, texts = {i: Mask(cases[i][1]) for i in going}, dict.fromkeys(going, "")
        feed, cache = [cases[i][0] for i in going], None
        while going:
            with torch.inference_mode():
                found = model(torch.tensor(feed), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, kept = found.past_key_values, []
            for row, i in enumerate(going):
                token = choose(found.logits[row, -1], masks[i], texts[i])
                outputs[i].append(token)
                texts[i] += spelled[token]
                if token not in tokenizer.eos_ids and not masks[i].closed(texts[i]):
                    kept.append(row)
            if len(kept) < len(going):
                cache.batch_select_indices(torch.tensor(kept, dtype=torch.long))
            going = [going[row] for row in kept]
            feed = [[outputs[i][-1]] for i in going]
    return outputs


# ---- grammars, and the parsers that judge their outputs

LISP = r"""
    start: list
    list: "(" [item (" " item)*] ")"
    ?item: /[a-z]{1,8}/ | SIGNED_INT | ESCAPED_STRING | list
    %import common (SIGNED_INT, ESCAPED_STRING)
"""
JSON = r"""
    root ::= value
    value ::= "{" (pair ("," " "? pair)*)? "}" | "[" (value ("," " "? value)*)? "]" | string | number | "true" | "false" | "null"
    pair ::= string ":" " "? value
    string ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
    number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
"""
SUM = r"""
    sum ::= product (' + ' product | ' - ' product)*
    product ::= atom (' * ' atom | ' / ' atom)*
    atom ::= [1-9] [0-9]* | [a-z] '_' [0-9]? | '-' atom | '(' sum ')'
"""
GRAMMARS: dict[str, tuple[Constraint, Callable[[str], object]]] = {
    "a list in Lisp": (Constraint.grammar(LISP, "lark"), lark.Lark(LISP, lexer="dynamic_complete").parse),
    "a JSON document": (Constraint.grammar(JSON, "gbnf"), json.loads),
    "a sum in Python": (Constraint.grammar(SUM, "ebnf"), lambda text: ast.parse(text, mode="eval")),
}
