"""Constraints on the command line and in JSONL lines: what reaches the engine, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixrt import Constraint
from radixrt.cli import figures
from radixrt.request import FinishReason, RequestOutput, SampleOutput, SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
GRAMMARS = {"lark": 'start: "x"+\n', "gbnf": 'root ::= "x"+\n', "ebnf": 'root ::= "x"+\n'}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.json").write_text("\ufeff" + json.dumps(SCHEMA, indent=1), "utf-8")
    for syntax, text in GRAMMARS.items():
        Path(f"g.{syntax}").write_text(text)
        Path(f"{syntax}.txt").write_text(text)
    Path("broken.json").write_text("{")
    Path("wrong.json").write_text('{"type": "objct"}')
    Path("empty.json").write_text('{"type": "integer", "minimum": 3, "maximum": 2}')
    Path("latin.json").write_bytes(b'{"const": "\xff"}')
    Path("blank.txt").write_text(" \n")
    Path("broken.lark").write_text("start: nothing")


@pytest.mark.parametrize(
    ("flags", "constraint"),
    [
        (["--json-schema", "s.json"], Constraint.json_schema(SCHEMA)),
        (["--json-object"], Constraint.json_object()),
        (["--regex", r"\d{4}"], Constraint.regex(r"\d{4}")),
        (["--choices", "yes, no,maybe"], Constraint.choice(["yes", "no", "maybe"])),
        (["--choice", " a, b", "--choice", ""], Constraint.choice([" a, b", ""])),
        *((["--grammar", f"g.{name}"], Constraint.grammar(text, name)) for name, text in GRAMMARS.items()),  # type: ignore[arg-type]
        (["--grammar", "lark.txt"], Constraint.grammar(GRAMMARS["lark"])),
        (["--grammar", "gbnf.txt", "--grammar-syntax", "gbnf"], Constraint.grammar(GRAMMARS["gbnf"], "gbnf")),
        (["--substring", "gbnf.txt"], Constraint.substring(GRAMMARS["gbnf"])),
        (["--constraint", '{"type": "literal", "text": "hi"}'], Constraint.literal("hi")),
    ],
)
def test_a_flag_reaches_the_engine(cli: Any, flags: list[str], constraint: Constraint) -> None:
    result = cli("generate", "a", "b", *flags)
    assert result.code == 0, result.err
    assert cli.engine.asked == [(prompt, SamplingParams(constraint=constraint)) for prompt in "ab"]


def test_a_conversation_takes_one_too(cli: Any) -> None:
    assert cli("chat", "--choices", "yes,no", stdin="hello\n").code == 0
    assert cli.engine.asked[0][1].constraint == Constraint.choice(["yes", "no"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--regex", "a", "--json-object"], "argument --json-object: not allowed with argument --regex"),
        (["--choices", "a", "--choice", "b"], "argument --choice: not allowed with argument --choices"),
        (["--json-schema", "s.json", "--grammar", "g.lark"], "not allowed with argument --json-schema"),
        (["--constraint", "{}", "--regex", "a"], "not allowed with argument --constraint"),
        (["--grammar-syntax", "gbnf"], "--grammar-syntax: needs --grammar"),
        (["--grammar", "g.lark", "--grammar-syntax", "yacc"], "invalid choice: 'yacc'"),
        (["--regex", "(a"], "--regex: "),
        (["--regex", r"(a)\1"], "--regex: "),
        (["--choices", "a,,b"], "--choices='a,,b': holds an empty word"),
        (["--json-schema", "none.json"], "--json-schema='none.json': No such file or directory"),
        (["--json-schema", "."], "--json-schema='.': Is a directory"),
        (["--json-schema", "broken.json"], "--json-schema='broken.json': is not JSON: "),
        (["--json-schema", "wrong.json"], "--json-schema='wrong.json': "),
        (["--json-schema", "empty.json"], "--json-schema='empty.json': accepts nothing"),
        (["--json-schema", "latin.json"], "--json-schema='latin.json': is not UTF-8 (byte 11)"),
        (["--grammar", "broken.lark"], "--grammar='broken.lark': "),
        (["--substring", "none.txt"], "--substring='none.txt': No such file or directory"),
        (["--substring", "blank.txt"], "--substring='blank.txt': has nothing in it"),
        (["--grammar", "none.lark"], "--grammar='none.lark': No such file or directory"),
        (["--constraint", "{"], "--constraint: is not JSON: "),
        (["--constraint", "[]"], "--constraint: must be a JSON object, not list"),
        (["--constraint", '{"type": "regx"}'], "did you mean 'regex'?"),
        (["--constraint", '{"type": "regex"}'], "constraint.pattern: is missing"),
        (["--jsonschema", "x"], "unknown option '--jsonschema'; did you mean '--json-schema'?"),
    ],
)
def test_a_wrong_flag_is_one_line_before_a_model_is_loaded(cli: Any, flags: list[str], message: str) -> None:
    result = cli("generate", "x", *flags)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1
    assert cli.engine is None


def test_a_file_without_end_is_not_read_to_it(cli: Any) -> None:
    result = cli("generate", "x", "--json-schema", "/dev/zero")
    assert (result.code, cli.engine) == (2, None)
    assert "is larger than 16,000,000 bytes" in result.err


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps({"prompt": "x", **record}) + "\n" for record in records)


def test_every_line_may_have_its_own(cli: Any) -> None:
    data = lines(
        {"constraint": Constraint.json_object().to_dict()},
        {"json_schema": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
        {"regex": "a+"},
        {"choices": ["b", "a"]},
        {"substring": "a b"},
        {},
        {"constraint": None},
        {"regex": None},
    )
    result = cli("generate", "--format", "jsonl", "--jsonl", "--choices", "flag", stdin=data)
    assert result.code == 0, result.out
    assert [params.constraint for _, params in cli.engine.asked] == [
        Constraint.json_object(),
        Constraint.json_schema(SCHEMA),
        Constraint.json_schema(SCHEMA),
        Constraint.regex("a+"),
        Constraint.choice(["b", "a"]),
        Constraint.substring("a b"),
        Constraint.choice(["flag"]),
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"regex": "a", "choices": ["b"]}, "constraint: may be given once in a line; it has regex and choices"),
        ({"constraint": None, "regex": "a"}, "it has constraint and regex"),
        ({"regex": 3}, "regex: must be a string, not int"),
        ({"choices": []}, "choices=[]: must hold at least one string"),
        ({"substring": ["a"]}, "substring: must be a string, not list"),
        ({"choices": "a,b"}, "choices: must be a list of strings, not str"),
        ({"choices": ["a", 1]}, "choice[1]: must be a string, not int"),
        ({"json_schema": 1}, "json_schema: must be"),
        ({"json_schema": "{"}, "json_schema: is not JSON: "),
        ({"constraint": "regex"}, "constraint: must be a JSON object, not str"),
        ({"constraint": {"type": "choices"}}, "constraint.type='choices'; did you mean 'choice'?"),
        ({"constraint": {"type": "regex", "patern": "a"}}, "did you mean 'pattern'?"),
        ({"jsonschema": {}}, "did you mean 'json_schema'?"),
        ({"json_schema": {"const": float("inf")}}, "json_schema"),
    ],
)
def test_a_wrong_line_costs_only_itself(cli: Any, record: dict[str, Any], message: str) -> None:
    result = cli("generate", "--format", "jsonl", "--jsonl", stdin=lines({}, record, {}))
    first, bad, last = map(json.loads, result.out.splitlines())
    assert result.code == 1
    assert (first["text"], last["text"]) == ("X", "X")
    assert message in bad["error"]
    assert "stdin, line 2: " in result.err


def test_forced_tokens_are_shown() -> None:
    sample = SampleOutput(0, "ab", (1, 2), FinishReason.STOP)
    assert "2 generated (1 forced)" in figures.turn(RequestOutput("r", (1,), (sample,), 0, 1, forced_tokens=1))
    assert "2 generated ·" in figures.turn(RequestOutput("r", (1,), (sample,), 0, 1))
