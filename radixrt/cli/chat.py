"""``radixrt chat``: a conversation in the terminal. Every turn sends all messages; the radix cache makes that cheap.

Invariants: an interrupt ends the answer, never the conversation, and reaches the engine only between two steps; a turn
that fails leaves the conversation as it was before.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from radixrt.cli import figures, flags
from radixrt.cli.records import MAX_LINE, bounded_lines
from radixrt.config import EngineConfig
from radixrt.errors import RadixrtError, nearest, shown
from radixrt.request import FinishReason, RequestOutput, SamplingParams

_DEFAULTS = {"max_tokens": 512}
_NOT_SHOWN = ("n", "logprobs", "prompt_logprobs")  # what a conversation has no place for
_COMMANDS = {
    "/reset": "forget the conversation",
    "/stats": "show what the engine did so far",
    "/help": "show this list",
    "/exit": "leave (so does Ctrl-D)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system message the conversation starts with")
    parser.add_argument("--quiet", action="store_true", help="print no progress and no figures on stderr")
    flags.add_sampling_flags(parser, _DEFAULTS, omit=_NOT_SHOWN)
    flags.add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    EngineConfig.from_kwargs(**flags.engine_settings(args))
    params = SamplingParams(**flags.sampling_settings(args))
    from radixrt import Engine

    with Engine(progress=not args.quiet, **flags.engine_settings(args)) as engine:
        _converse(engine, params, args.system, quiet=args.quiet)
    return 0


def _converse(engine: Any, params: SamplingParams, system: str | None, *, quiet: bool) -> None:
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    interactive = sys.stdin.isatty()
    if interactive:
        print("Type a message; /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.", file=sys.stderr)
    for text in _input(interactive):
        if re.fullmatch(r"/[a-z]+", text):
            if text in ("/exit", "/quit"):
                return
            if text == "/reset":
                messages = list(opening)
                print("(the conversation starts anew)", file=sys.stderr)
            elif text == "/stats":
                print(figures.table(engine.stats()), file=sys.stderr)
            elif text == "/help":
                print("\n".join(f"{name:<8}{what}" for name, what in _COMMANDS.items()), file=sys.stderr)
            else:
                print(f"unknown command {shown(text)}{nearest(text, _COMMANDS)}", file=sys.stderr)
            continue
        asked = [*messages, {"role": "user", "content": text}]
        try:
            answer, output = _answer(engine, asked, params)
        except RadixrtError as error:
            print(f"radixrt: {error} (/reset starts anew)".replace("\n", " "), file=sys.stderr)
            continue
        if output.error is not None:
            print(f"radixrt: {output.error} (/reset starts anew)".replace("\n", " "), file=sys.stderr)
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]
        if output.finish_reason == FinishReason.ABORT:
            print("(stopped)", file=sys.stderr)
        if not quiet:
            print(figures.turn(output), file=sys.stderr)


def _input(interactive: bool) -> Iterator[str]:
    """Non-empty lines from the person or the pipe."""
    if not interactive:
        for number, line in bounded_lines(sys.stdin):
            if line is None:
                print(f"radixrt: stdin, line {number}: is longer than {MAX_LINE} characters", file=sys.stderr)
            elif line.strip():
                yield line.strip()
        return
    import readline  # noqa: F401  (gives input() its line editing and history)

    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)
            continue
        if text:
            yield text


def _answer(engine: Any, messages: list[dict[str, str]], params: SamplingParams) -> tuple[str, RequestOutput]:
    """Stream one answer to stdout; returns its text and its figures."""
    pieces: list[str] = []
    output: RequestOutput | None = None
    with _interrupt() as stop:
        request = engine.add(messages, params)
        while output is None:
            if stop.is_set():
                engine.abort(request)  # its last delta comes with the next step
            for delta in engine.step():
                pieces.append(delta.text)
                sys.stdout.write(figures.printable(delta.text, sys.stdout))
                sys.stdout.flush()
                output = delta.output
        print(flush=True)
    return "".join(pieces), output


@contextmanager
def _interrupt() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into an event: one that came in the middle of a step could leave it half done. A second
    one means it."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals belong to the main thread
        yield stop
        return

    def handle(_number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
