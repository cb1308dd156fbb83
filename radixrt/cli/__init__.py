"""The ``radixrt`` command: finds the command that was named, and turns every ending into one line and an exit code.

Invariants: ``radixrt --help`` imports neither torch nor an engine; exit code 0 is success, 1 means some rows failed,
2 a wrong argument, or a model or a file that cannot be used, 130 an interruption, 141 a reader that went away.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from radixrt import __version__
from radixrt.cli import figures
from radixrt.cli.flags import Parser
from radixrt.errors import RadixrtError, nearest, shown


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its module has ``add_arguments(parser)`` and ``run(args) -> int``."""

    name: str
    module: str
    summary: str


COMMANDS = (
    Command("generate", "radixrt.cli.generate", "answer prompts from arguments, a file or stdin"),
    Command("chat", "radixrt.cli.chat", "talk to a model in the terminal"),
    Command("extract", "radixrt.cli.extract", "read thousands of documents into rows of one schema"),
    Command("serve", "radixrt.cli.serve", "serve a model to OpenAI clients and to programs"),
    Command("bench", "radixrt.cli.bench", "measure throughput and hit rate on seeded workloads"),
    Command("models", "radixrt.cli.models", "list the models on this machine"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    _mend_streams()
    try:
        try:
            code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        except SystemExit as error:  # argparse: help, version, wrong usage
            code = error.code if isinstance(error.code, int) else 2
        sys.stdout.flush()
        return code
    except RadixrtError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _mute(sys.stdout)  # the reader went away (``| head``)
        return 141
    except OSError as error:
        where = "" if error.filename is None else f"{shown(error.filename)}: "
        return _fail(f"{where}{error.strerror or error}")


def _mend_streams() -> None:
    """Text that a stream cannot hold must not end the work, nor a stream that was closed before we came (``>&-``)."""
    # in this order: opening takes the lowest free descriptor, and that is the closed stream's own
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open to the end)
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


def _mute(stream: TextIO) -> None:
    """Let what a stream still holds go nowhere: it cannot be written, and Python would try once more at exit."""
    with contextlib.suppress(OSError, ValueError):  # it may not be a file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _fail(message: str) -> int:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _mute(sys.stdout)
    try:
        # a message may quote a file's name, or what stands in it
        print("radixrt: " + figures.printable(message.replace("\n", " "), sys.stderr), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        _mute(sys.stderr)
    return 2


def _dispatch(arguments: list[str]) -> int:
    top = Parser(
        prog="radixrt",
        usage="radixrt COMMAND [options]",
        description="A runtime for language-model programs that share prefixes.",
        epilog="'radixrt COMMAND --help' lists the options of a command.",
    )
    top.add_argument("--version", action="store_true", help="print the version and exit")
    listing = top.add_argument_group("commands")
    for command in COMMANDS:
        listing.add_argument(command.name, help=command.summary, nargs="?")

    if not arguments or arguments[0] in ("-h", "--help", "help"):
        top.print_help()
        return 0
    if arguments[0] in ("--version", "-V"):
        print(f"radixrt {__version__}")
        return 0
    known = {command.name: command for command in COMMANDS}
    name = arguments[0]
    if name not in known:
        kind, valid = ("option", ["--help", "--version"]) if name.startswith("-") else ("command", list(known))
        top.error(f"unknown {kind} {shown(name)}{nearest(name, valid)}")
    module = importlib.import_module(known[name].module)
    summary = known[name].summary
    parser = Parser(prog=f"radixrt {name}", description=summary[0].upper() + summary[1:] + ".")
    module.add_arguments(parser)
    parser.usage = f"radixrt {name} [options]" + "".join(f" [{word} ...]" for word in parser.positionals())
    code: int = module.run(parser.parse(arguments[1:]))
    return code
