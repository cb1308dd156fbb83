"""Constrained by a grammar: arithmetic that can always be computed; and free text with tool calls inside."""

from __future__ import annotations

import json

from radixrt import Constraint, Engine, SamplingParams

ARITHMETIC = r"""
start: sum
sum: sum ("+" | "-") product | product
product: product "*" atom | atom
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,2}/
"""

QUESTIONS = """\
Question: The weather in Oslo for 2 days? Answer: I will ask. <tool>{"city":"Oslo","days":2}</tool>
Question: The weather in Paris for 3 days? Answer:"""

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def main() -> None:
    with Engine() as engine:
        sums = SamplingParams(max_tokens=24, temperature=1, seed=3, constraint=Constraint.grammar(ARITHMETIC, "lark"))
        (output,) = engine.generate("An example of arithmetic: ", sums)
        print(output.text, "=", eval(output.text))

        # The model may write what it likes, but where it calls a tool, the call is well formed.
        tools = Constraint.structural_tags(
            [("<tool>", Constraint.json_schema(WEATHER), "</tool>")], at_least_one=True, stop_after_first=True
        )
        (output,) = engine.generate(
            QUESTIONS,
            SamplingParams(max_tokens=48, temperature=0, constraint=tools),
        )
        print(output.text)
        print(json.loads(output.text.partition("<tool>")[2].partition("</tool>")[0]))


if __name__ == "__main__":
    main()
