"""``radixrt bench``: the seeded workloads of :mod:`radixrt.bench`, with the engine's own flags.

Invariants: nothing is measured here; this is only the door.
"""

from __future__ import annotations

import argparse

from radixrt.bench import cli
from radixrt.cli import flags
from radixrt.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cli.add_arguments(parser)
    flags.add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    EngineConfig.from_kwargs(**flags.engine_settings(args))
    args.engine = flags.engine_settings(args)
    return cli.run(args)
