"""``radixrt generate``: what is read, what is asked of the engine, and what is written."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from radixrt.cli import main, records
from radixrt.request import SamplingParams


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_one_prompt_prints_its_text_and_its_figures(cli: Any) -> None:
    result = cli("generate", "hello big world", "--temperature", "0", "--page-size", "4")
    assert (result.code, result.out) == (0, "HELLO BIG WORLD\n")
    assert "10 prompt tokens: 6 cached, 4 computed" in result.err
    assert "hit rate 50.0 % (optimal 75.0 %)" in result.err
    assert cli.engine.asked == [("hello big world", SamplingParams(temperature=0))]
    assert cli.engine.settings == {"model": None, "page_size": 4}


def test_quiet_leaves_stderr_empty(cli: Any) -> None:
    assert cli("generate", "--quiet", "a", "b").err == ""


def test_many_prompts_are_printed_in_input_order(cli: Any) -> None:
    result = cli("generate", "a long prompt first", "b", "c d")
    assert result.out == "[1] a long prompt first\nA LONG PROMPT FIRST\n\n[2] b\nB\n\n[3] c d\nC D\n\n"


def test_samples_are_numbered(cli: Any) -> None:
    assert cli("generate", "a", "--n", "2").out == "[1.1] a\nA\n\n[1.2] a\nA\n\n"


@pytest.mark.parametrize("from_stdin", [False, True])
def test_lines_of_text(cli: Any, tmp_path: Path, from_stdin: bool) -> None:
    data = "\ufeffone line\r\n\r\n  \nzwei größer\n"
    file = tmp_path / "prompts"
    file.write_text(data, encoding="utf-8", newline="")
    result = cli("generate", "--jsonl", stdin=data) if from_stdin else cli("generate", "--jsonl", "--file", str(file))
    assert [(row["index"], row["line"], row["text"]) for row in rows(result.out)] == [
        (0, 1, "ONE LINE"),
        (1, 4, "ZWEI GRÖSSER"),
    ]


def test_arguments_and_file_together(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("from file\n")
    result = cli("generate", "--jsonl", "from argument", "--file", str(tmp_path / "f"))
    assert [row["text"] for row in rows(result.out)] == ["FROM ARGUMENT", "FROM FILE"]


def test_json_lines(cli: Any) -> None:
    lines = [
        {"prompt": "plain", "id": "a", "max_tokens": 1, "logit_bias": {"5": 1}},
        {"messages": [{"role": "user", "content": "in a chat"}], "id": 7, "temperature": 0.5},
        {"token_ids": [1, 2, 3]},
    ]
    result = cli("generate", "--jsonl", "--top-k", "9", "--temperature", "0.9", stdin="\n".join(map(json.dumps, lines)))
    assert result.code == 0
    assert [(row["id"], row["text"]) for row in rows(result.out)] == [
        ("a", "PLAIN"),
        (7, "IN A CHAT"),
        (None, "T1 T2 T3"),
    ]
    assert cli.engine.asked == [
        ("plain", SamplingParams(max_tokens=1, top_k=9, temperature=0.9, logit_bias={5: 1})),
        ([{"role": "user", "content": "in a chat"}], SamplingParams(temperature=0.5, top_k=9)),
        ([1, 2, 3], SamplingParams(top_k=9, temperature=0.9)),
    ]


def test_a_row_has_every_figure(cli: Any) -> None:
    (row,) = rows(cli("generate", "--jsonl", "a b").out)
    assert row["prompt_tokens"] == row["cached_tokens"] + row["computed_tokens"] == 10
    assert (row["completion_tokens"], row["finish_reason"], row["error"]) == (2, "stop", None)
    assert {
        "queue_time",
        "prefill_time",
        "decode_time",
        "token_ids",
        "stop_reason",
        "preemptions",
        "forced_tokens",
    } <= set(row)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', "line: not JSON: "),
        ("[1]", "line: must be a JSON object, not list"),
        ("{}", "line: needs exactly one of prompt, messages, token_ids; it has none"),
        ('{"promt": "x"}', "promt?"),
        ('{"prompt": "x", "messages": []}', "it has prompt and messages"),
        ('{"prompt": 3}', "prompt: must be a string, not int"),
        ('{"messages": []}', "messages: must be a list of at least one element"),
        ('{"messages": ["x"]}', "messages[0]: must hold objects with role and content, not str"),
        ('{"token_ids": [1, true]}', "token_ids[1]: must hold integers, not bool"),
        ('{"token_ids": [1.5]}', "token_ids[0]: must hold integers, not float"),
        ('{"prompt": "x", "temprature": 1}', "temprature: the line has no such field; did you mean 'temperature'?"),
        ('{"prompt": "x", "temperature": NaN}', "temperature=nan: must be a finite number"),
        ('{"prompt": "x", "max_tokens": "9"}', "max_tokens='9': must be an integer"),
        ('{"prompt": "x", "max_tokens": null, "top_p": 2}', "top_p=2: must be"),
        ('{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias['a']: the key must be a token id"),
        ('{"prompt": "x", "logit_bias": {"1": 1, "01": 2}}', "logit_bias has the token 1 twice"),
        ('{"prompt": "x", "logit_bias": {"1": 1, "1": 2}}', "1: stands twice"),
        ('{"prompt": "x", "logit_bias": {"1_0": 1}}', "logit_bias['1_0']: the key must be a token id"),
        ('{"prompt": "x", "logit_bias": {"%s": 1}}' % ("9" * 5000), "the key must be a token id"),
        ('{"prompt": "x", "logit_bias": {"5": 1%s}}' % ("0" * 400), "logit_bias[5]=an integer of"),
        *(
            (f'{{"prompt": "x", "{name}": 1{"0" * zeros}}}', f"{name}=")
            for name in ("temperature", "top_p", "presence_penalty", "max_tokens", "seed", "n")
            for zeros in (400, 5000)
        ),
        ('{"token_ids": [1%s]}' % ("0" * 5000), "token_ids[0]: must hold integers"),
        ('{"prompt": "x", "id": 1%s}' % ("0" * 5000), "id=inf: must be"),
        ('{"prompt": "x", "logit_bias": [1]}', "logit_bias"),
        ('{"prompt": "x", "id": [1]}', "id=[1]: must be a string or an integer"),
        ('{"prompt": "x", "prompt": "y"}', "prompt: stands twice in one object"),
        ('{"prompt": "too long"}', "prompt: has 9999 tokens"),
        ('{"prompt": ""}', "prompt: is empty"),
        ('{"prompt": "a explode b"}', "it broke"),
        ("[" * 100_000, "line: "),
    ],
)
def test_a_bad_line_costs_only_itself(cli: Any, line: str, message: str) -> None:
    result = cli(
        "generate", "--jsonl", "--format", "jsonl", stdin=f'{{"prompt": "before"}}\n{line}\n{{"prompt": "after"}}\n'
    )
    first, bad, last = rows(result.out)
    assert result.code == 1
    assert (first["text"], last["text"]) == ("BEFORE", "AFTER")
    assert message in bad["error"]
    assert bad["line"] == 2
    assert bad["finish_reason"] == "error"
    assert "stdin, line 2: " in result.err
    assert message in result.err


def test_a_line_that_is_not_utf8(cli: Any) -> None:
    result = cli("generate", "--jsonl", stdin=b"good\n\xff\xfe\n")
    assert [row.get("error") for row in rows(result.out)] == [None, "is not UTF-8"]
    assert result.code == 1


def test_only_bad_lines_load_no_model(cli: Any) -> None:
    result = cli("generate", "--jsonl", "--format", "jsonl", stdin="[]")
    assert (result.code, len(rows(result.out)), cli.engine) == (1, 1, None)


def test_no_prompt_at_all(cli: Any) -> None:
    result = cli("generate", stdin="\n\n")
    assert (result.code, result.err) == (2, "radixrt: prompts: there are none\n")


def test_output_file(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = cli("generate", "a", "ö", "--output", str(out))
    assert [row["text"] for row in rows(out.read_text("utf-8"))] == ["A", "Ö"]
    assert "[2] ö" in result.out


def test_the_output_may_not_be_the_input(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "both.jsonl"
    file.write_text('{"prompt": "x"}\n')
    result = cli("generate", "--file", str(file), "--output", str(file))
    assert result.code == 2
    assert "is the file the prompts come from" in result.err
    assert file.read_text() == '{"prompt": "x"}\n'


def test_chat_wraps_plain_prompts_only(cli: Any) -> None:
    data = '{"prompt": "x"}\n{"token_ids": [1]}\n{"messages": [{"role": "user", "content": "y"}]}\n'
    cli("generate", "--chat", "--system", "S", stdin=data)
    assert [prompt for prompt, _ in cli.engine.asked] == [
        [{"role": "system", "content": "S"}, {"role": "user", "content": "x"}],
        [1],
        [{"role": "user", "content": "y"}],
    ]


def test_no_more_wait_in_the_engine_than_it_takes(cli: Any) -> None:
    result = cli("generate", "--quiet", "--max-waiting-requests", "5", "--n", "2", *(f"p {i}" for i in range(9)))
    assert result.code == 0
    assert result.out.count("P 8") == 2
    assert cli.engine.most_held == 4
    assert cli.engine.steps == 10  # two words each, two prompts at a time, to the end


def test_rows_that_are_done_survive_an_interruption(cli: Any, tmp_path: Path) -> None:
    def interrupt(engine: Any) -> None:
        if engine.generated >= 3:
            assert [row["text"] for row in rows(out.read_text())] == ["A"]  # written, not only buffered
            engine.running.clear()
            raise KeyboardInterrupt

    cli.on_step = interrupt
    out = tmp_path / "out.jsonl"
    result = cli("generate", "a", "b c d e", "f g h", "--output", str(out))
    assert result.code == 130
    assert [row["text"] for row in rows(out.read_text())] == ["A"]


def test_half_a_surrogate_pair_can_be_written(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    data = '{"id": "\\ud800", "prompt": "c"}\n{"\\ud801": 1, "prompt": "c"}\n{"prompt": "d"}\n'
    result = cli("generate", "--format", "jsonl", "--output", str(out), "--jsonl", stdin=data)
    for text in (out.read_text("utf-8"), result.out):
        first, second, third = rows(text)
        assert (first["id"], first["text"], third["text"]) == ("\ud800", "C", "D")
        assert "\ud801" in second["error"]


class Endless(io.RawIOBase):
    """As many zeros as one asks for, and a count of them."""

    given = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.given += len(buffer)
        buffer[:] = bytes(len(buffer))
        return len(buffer)


def test_a_line_without_end_is_given_up() -> None:
    source = Endless()
    found = list(records.bounded_lines(io.BufferedReader(source), 1000))
    assert found == [(1, None)]
    assert source.given < 50_000


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"123\n", [b"123\n"]),
        (b"1234\n", [b"1234\n"]),
        (b"1234", [b"1234"]),
        (b"12345\n67\n", [None, b"67\n"]),
        (b"123456789\n\n67", [None, b"\n", b"67"]),
        (b"12345", [None]),
    ],
)
def test_a_line_too_long_costs_only_itself(data: bytes, expected: list[bytes | None]) -> None:
    assert list(records.bounded_lines(io.BytesIO(data), 5)) == list(enumerate(expected, 1))
    text = [None if line is None else line.decode() for line in expected]
    assert list(records.bounded_lines(io.StringIO(data.decode()), 5)) == list(enumerate(text, 1))


def test_a_line_too_long_becomes_a_row(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records.bounded_lines, "__defaults__", (20,))
    result = cli("generate", "--jsonl", stdin="before\n" + "x" * 30 + "\nafter\n")
    assert [row.get("text") for row in rows(result.out)] == ["BEFORE", None, "AFTER"]
    assert result.code == 1
    assert "stdin, line 2: is longer than" in result.err


STREAMS = [
    ("--help > /dev/full", 2, "No space left on device"),
    ("generate --help > /dev/full", 2, "No space left on device"),
    ("models --json > /dev/full", 2, "No space left on device"),
    ("nothing 2> /dev/full", 2, ""),
    ("models 2> /dev/full > /dev/full", 2, ""),
    ("models >&-", 0, ""),
    ("models --json 2>&-", 0, ""),
    ("generate <&-", 2, "prompts: there are none"),
    ("generate <&- >&- 2>&-", 2, ""),
]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize(("line", "code", "message"), STREAMS)
def test_streams_that_are_full_or_closed(line: str, code: int, message: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m radixrt {line}', sys.executable], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") <= 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


class Full(io.RawIOBase):
    """A place where nothing has room."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_an_output_without_room(cli: Any) -> None:
    result = cli("generate", "--quiet", "a", "--output", "/dev/full")
    assert result.code == 2
    assert result.err == "radixrt: No space left on device\n"


@pytest.mark.parametrize("command", [["generate", "a"], ["generate", "--jsonl", "a", "b"], ["chat"]])
def test_a_stdout_without_room(command: list[str], cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    cli("generate", "a")  # the stand-in is in its place
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n"), "utf-8"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(Full()), "utf-8"))
    monkeypatch.setattr(sys, "stderr", err)
    assert main([*command, "--quiet"]) == 2
    assert err.getvalue() == "radixrt: No space left on device\n"
