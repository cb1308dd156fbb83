"""``radixrt chat`` with a pipe in place of a person."""

from __future__ import annotations

import signal
import sys
from typing import Any

import pytest

from radixrt.cli import main, records


def contents(messages: list[dict[str, str]]) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in messages]


def test_every_turn_sends_the_whole_conversation(cli: Any) -> None:
    result = cli("chat", "--system", "Be brief.", stdin="hello you\n\nand then\n")
    assert result.code == 0
    assert result.out == "HELLO YOU\nAND THEN\n"
    assert result.err.count("[10 prompt tokens: 6 cached, 4 computed · 2 generated") == 2
    first, second = (contents(prompt) for prompt, _ in cli.engine.asked)
    assert first == ["system: Be brief.", "user: hello you"]
    assert second == [*first, "assistant: HELLO YOU", "user: and then"]
    assert cli.engine.asked[0][1].max_tokens == 512


def test_reset_keeps_the_system_message(cli: Any) -> None:
    cli("chat", "--system", "S", stdin="one\n/reset\ntwo\n")
    assert contents(cli.engine.asked[1][0]) == ["system: S", "user: two"]


def test_commands(cli: Any) -> None:
    result = cli("chat", "--quiet", stdin="/stats\n/help\n/rest\n/etc/passwd is a file\n/exit\nnever\n")
    assert "optimal hit rate  75.0 %" in result.err
    assert "forget the conversation" in result.err
    assert "unknown command '/rest'; did you mean '/reset'?" in result.err
    assert result.out == "/ETC/PASSWD IS A FILE\n"
    assert len(cli.engine.asked) == 1


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(cli: Any) -> None:
    result = cli("chat", stdin="one\nthis is too long\nwill explode now\ntwo\n")
    assert result.code == 0
    assert "has 9999 tokens: the context holds 8192 (/reset starts anew)" in result.err
    assert "it broke" in result.err
    assert contents(cli.engine.asked[-1][0]) == ["user: one", "assistant: ONE", "user: two"]


def test_an_interrupt_stops_the_answer_and_not_the_chat(cli: Any) -> None:
    def interrupt(engine: Any) -> None:
        if engine.generated == 2:
            signal.raise_signal(signal.SIGINT)

    cli.on_step = interrupt
    before = signal.getsignal(signal.SIGINT)
    result = cli("chat", stdin="a b c d e f\nnext\n")
    assert result.code == 0
    assert result.out == "A B C\nNEXT\n"
    assert "(stopped)" in result.err
    assert cli.engine.aborted == ["request-1"]
    assert contents(cli.engine.asked[1][0]) == ["user: a b c d e f", "assistant: A B C", "user: next"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_ends_the_chat(cli: Any) -> None:
    def interrupt(engine: Any) -> None:
        if engine.generated == 2:
            engine.running.clear()
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    cli.on_step = interrupt
    result = cli("chat", stdin="a b c d\nnext\n")
    assert result.code == 130
    assert "NEXT" not in result.out


def test_bytes_that_are_no_text_are_replaced(cli: Any) -> None:
    result = cli("chat", "--quiet", stdin=b"a \xff b\nnext\n")
    assert result.code == 0
    assert contents(cli.engine.asked[0][0]) == ["user: a \ufffd b"]


def test_a_line_too_long_is_passed_over(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records.bounded_lines, "__defaults__", (20,))
    result = cli("chat", "--quiet", stdin="x" * 30 + "\nnext\n")
    assert (result.code, result.out) == (0, "NEXT\n")
    assert "stdin, line 1: is longer than" in result.err


def test_no_stdin_at_all(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("chat", stdin="")
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", "--quiet"]) == 0
