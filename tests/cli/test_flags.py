"""Every setting has a flag, every flag reaches its field, and a wrong one is answered with what would be right."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from radixrt.cli import flags, main
from radixrt.config import EngineConfig
from radixrt.request import SamplingParams


def parser(defaults: dict[str, Any] | None = None) -> flags.Parser:
    made = flags.Parser(prog="radixrt test")
    made.add_argument("prompts", nargs="*")
    flags.add_sampling_flags(made, defaults)
    flags.add_engine_flags(made)
    return made


def test_every_field_has_a_flag_with_help() -> None:
    actions = {action.dest: action for action in parser()._actions}
    for prefix, cls in (("engine.", EngineConfig), ("sampling.", SamplingParams)):
        for field in dataclasses.fields(cls):
            if field.name == "constraint":
                continue  # test_constraints.py: it has several flags
            assert len(actions[prefix + field.name].help or "") > 10, field.name


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--max-tokens 7", "max_tokens", 7),
        ("--max-tokens none", "max_tokens", None),
        ("--temperature 0.25", "temperature", 0.25),
        ("--presence-penalty -1.5", "presence_penalty", -1.5),
        ("--top-k -1", "top_k", -1),
        ("--seed 3", "seed", 3),
        ("--ignore-eos", "ignore_eos", True),
        ("--no-skip-special-tokens", "skip_special_tokens", False),
        ("--stop-token-ids 1,2 --stop-token-ids 3", "stop_token_ids", (1, 2, 3)),
        ("--stop a --stop b", "stop", ("a", "b")),
        ("--logit-bias 5=-100,7=2.5 --logit-bias 9=1", "logit_bias", {5: -100.0, 7: 2.5, 9: 1.0}),
        ("--logprobs 0", "logprobs", 0),
    ],
)
def test_a_sampling_flag_reaches_its_field(line: str, field: str, value: object) -> None:
    given = flags.sampling_settings(parser().parse(line.split()))
    assert list(given) == [field]
    assert getattr(SamplingParams(**given), field) == value


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--model /x.gguf", "model", "/x.gguf"),
        ("--max-total-tokens 4096", "max_total_tokens", 4096),
        ("--schedule-policy fcfs", "schedule_policy", "fcfs"),
        ("--disable-radix-cache", "disable_radix_cache", True),
        ("--kv-memory-fraction 0.5", "kv_memory_fraction", 0.5),
        ("--engine-seed 3", "seed", 3),
    ],
)
def test_an_engine_flag_reaches_its_field(line: str, field: str, value: object) -> None:
    given = flags.engine_settings(parser().parse(line.split()))
    assert given == {field: value}
    assert getattr(EngineConfig(**given), field) == value


def test_a_flag_that_was_not_given_is_left_to_the_dataclass() -> None:
    args = parser().parse([])
    assert flags.engine_settings(args) == {}
    assert flags.sampling_settings(args) == {}
    assert flags.sampling_settings(parser({"max_tokens": 512}).parse([])) == {"max_tokens": 512}


def test_engine_flags_alone_keep_their_short_names() -> None:
    alone = flags.Parser(prog="radixrt test")
    flags.add_engine_flags(alone)
    assert flags.engine_settings(alone.parse(["--seed", "3"])) == {"seed": 3}


def test_options_and_prompts_mix_and_text_after_a_double_dash_is_text() -> None:
    args = parser().parse(["one", "--top-k", "3", "two", "--", "--top-p", "x"])
    assert args.prompts == ["one", "two", "--top-p", "x"]
    assert flags.sampling_settings(args) == {"top_k": 3}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate --temprature 1 x", "unknown option '--temprature'; did you mean '--temperature'?"),
        ("generate --max-total-token=1 x", "unknown option '--max-total-token'; did you mean '--max-total-tokens'?"),
        ("generate --zzzzz x", "unknown option '--zzzzz' (radixrt generate --help lists them)"),
        ("generate --max-tok 1 x", "did you mean '--max-tokens'?"),
        ("generat x", "unknown command 'generat'; did you mean 'generate'?"),
        ("--verson", "unknown option '--verson'; did you mean '--version'?"),
        ("generate --max-tokens x y", "--max-tokens: 'x' is not an integer"),
        ("generate --temperature x y", "--temperature: 'x' is not a number"),
        ("generate --temperature nan y", "temperature=nan: must be a finite number"),
        ("generate --temperature -1 y", "temperature=-1.0: must be at least 0"),
        ("generate --stop-token-ids 1,a y", "'1,a' is not a list of integers"),
        ("generate --logit-bias 5=1,05=2 y", "the token 5 stands twice"),
        ("generate --logit-bias 5=1 --logit-bias 5=2 y", "the token 5 stands twice"),
        (f"generate --max-tokens {'9' * 5000} y", "is not an integer"),
        ("generate --threads 2147483648 y", "threads=2147483648: must be at most 1024"),
        ("generate --max-total-tokens 1000000000000 y", "max_total_tokens=1000000000000: must be at most 2147483647"),
        ("generate --logit-bias 5 y", "'5' is not a list of TOKEN_ID=VALUE"),
        ("generate --logit-bias 5=101 y", "logit_bias[5]=101.0: must be at least -100 and at most 100"),
        ("generate --schedule-policy lmp y", "invalid choice: 'lmp'"),
        ("generate --page-size 0 y", "page_size=0: must be at least 1"),
        ("generate --kv-memory-fraction nan y", "kv_memory_fraction=nan: must be a finite number"),
        ("generate --max-tokens", "--max-tokens: expected one argument"),
        ("generate --system hi y", "--system: needs --chat"),
        ("generate --file /no/such/file", "'/no/such/file': No such file"),
        ("generate --output /no/such/place.jsonl y", "there is no folder '/no/such'"),
        ("generate --output / y", "is a folder"),
        ("chat extra", "unexpected argument 'extra'"),
        ("chat --n 2", "unknown option '--n'"),
        ("models --jsn", "did you mean '--json'?"),
        ("bench --repeat 3", "did you mean '--repeats'?"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(line: str, message: str, cli: Any) -> None:
    result = cli(*line.split())
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""
    assert cli.engine is None  # found before a model is loaded


@pytest.mark.parametrize("line", ["", "--help", "-h", "help"])
def test_help_lists_the_commands(line: str, cli: Any) -> None:
    result = cli(*line.split())
    assert result.code == 0
    for command in ("generate", "chat", "bench", "models"):
        assert command in result.out


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "models"])
def test_every_command_has_help(command: str, cli: Any) -> None:
    result = cli(command, "--help")
    assert result.code == 0
    assert f"usage: radixrt {command}" in result.out


def test_version(cli: Any) -> None:
    assert cli("--version").out.startswith("radixrt ")


def test_help_and_a_wrong_flag_load_nothing_heavy() -> None:
    code = (
        "import sys; from radixrt.cli import main; main(['--help']); main(['generate', '--nope']); "
        "main(['chat', '--help']); main(['bench', '--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(KeyboardInterrupt(), 130, "interrupted"), (BrokenPipeError(), 141, "")],
)
def test_how_a_command_can_end(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_args: object) -> int:
        raise error

    monkeypatch.setattr("radixrt.cli.generate.run", fail)
    assert main(["generate", "x"]) == code
    assert capsys.readouterr().err.strip() == message
