"""Owns ``radixrt bench``: its own arguments, and which engines run which workloads.

Invariants: engine settings are the caller's, in ``args.engine`` by the names of ``EngineConfig``'s fields; nothing heavy
is imported before ``run``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixrt.bench.report import Goal, check, line, show, to_json
from radixrt.bench.runner import Backend, Comparison, Result, compare
from radixrt.bench.workloads import WORKLOADS, Workload, build
from radixrt.errors import InvalidRequest, nearest

if TYPE_CHECKING:
    from rich.console import Console

PEERS = ("transformers",)
CACHE_GOAL = Goal("unshared", "wall_s", 0.99)  # time without the cache / time with it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``radixrt bench`` takes beside the engine's own settings."""
    parser.add_argument(
        "workload",
        nargs="*",
        help=f"{', '.join(WORKLOADS)}; nothing: all of them (with --cache-ab: unshared)",
    )
    parser.add_argument(
        "--peer", action="append", choices=PEERS, default=[], help="run this engine beside ours, A B A B"
    )
    parser.add_argument(
        "--peer-batch", type=int, metavar="N", help="the peer's batch size; nothing: the best, measured"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each engine (default 3)")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="size of the workloads (default 1.0)")
    parser.add_argument("--workload-seed", type=int, default=0, metavar="N", help="seed of the prompts (default 0)")
    parser.add_argument("--cache-ab", action="store_true", help="compare the prefix cache on and off, A B A B")
    parser.add_argument(
        "--limits",
        action="store_true",
        help="show what the machine can do and which share of it the native kernels reach",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every run to FILE as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0, or 1 where ``--cache-ab`` finds that the cache costs more than 1 % with nothing to share.

    Raises:
        InvalidRequest: an argument is out of range or names no workload.
        ModelError: the model cannot be loaded, or the peer is not installed.
    """
    from rich.console import Console

    names = list(dict.fromkeys(args.workload)) or (["unshared"] if args.cache_ab else list(WORKLOADS))
    for name in names:
        if name not in WORKLOADS:
            raise InvalidRequest("workload", f"={name!r}: no such workload{nearest(name, WORKLOADS)}")
    for field, low in (("repeats", 1), ("peer_batch", 1)):
        value = getattr(args, field)
        if value is not None and value < low:
            raise InvalidRequest(f"--{field.replace('_', '-')}", f"={value}: must be at least {low}")
    if not 0.0 < args.scale <= 100.0:
        raise InvalidRequest("--scale", f"={args.scale}: must be above 0 and at most 100")
    settings = dict(args.engine)
    if args.limits:
        from radixrt.bench.limits import show_limits

        figures = show_limits(settings, args.repeats, Console(soft_wrap=True))
        if args.json:
            args.json.write_text(json.dumps(figures, indent=1) + "\n")
        return 0
    _comparisons, judged = bench(
        names,
        settings,
        peers=args.peer,
        peer_batch=args.peer_batch,
        repeats=args.repeats,
        scale=args.scale,
        seed=args.workload_seed,
        cache_ab=args.cache_ab,
        goals=(CACHE_GOAL,) if args.cache_ab else (),
        console=Console(soft_wrap=True),
        json_file=args.json,
    )
    return 0 if all(met for _text, met in judged) else 1


def bench(
    names: Sequence[str],
    settings: dict[str, Any],
    *,
    peers: Sequence[str] = (),
    peer_batch: int | None = None,
    repeats: int = 3,
    scale: float = 1.0,
    seed: int = 0,
    cache_ab: bool = False,
    goals: Sequence[Goal] = (),
    console: Console,
    json_file: Path | None = None,
) -> tuple[list[Comparison], list[tuple[str, bool]]]:
    """Load the engines, run the workloads, print progress and the table; the runs and the judged goals."""
    from radixrt import Engine
    from radixrt.bench.backends import RadixBackend
    from radixrt.bench.machine import machine, watch

    def on_run(result: Result | None, text: str) -> None:
        console.print(line(result) if result else text, style="dim", markup=False, highlight=False)

    busy = watch()
    if busy:
        console.print(f"warning: {busy}", style="yellow", markup=False, highlight=False)
    console.print("loading the model", style="dim")
    backends: list[Backend] = []
    try:
        engine = Engine(**settings)
        backends.append(RadixBackend(engine, name="cache on" if cache_ab else "radixrt"))
        if cache_ab:
            off = Engine(**{**settings, "disable_radix_cache": True})
            backends.append(RadixBackend(off, name="cache off"))
        backends += [_peer(peer, settings, peer_batch, console) for peer in dict.fromkeys(peers)]
        here = machine()

        def encode(text: str) -> list[int]:
            return engine.tokenizer.encode(text, add_special=False)

        workloads: list[Workload] = [build(name, encode, scale=scale, seed=seed) for name in names]
        comparisons = [compare(workload, backends, repeats=repeats, on_run=on_run) for workload in workloads]
    finally:
        for backend in backends:
            backend.close()
    show(console, comparisons, here, goals=goals)
    if json_file is not None:
        calibration = {b.name: b.calibration for b in backends if hasattr(b, "calibration")}
        text = to_json(
            comparisons, here, scale=scale, seed=seed, settings=settings, peer_seconds_per_request=calibration
        )
        json_file.write_text(text + "\n", encoding="utf-8")
        console.print(f"written: {json_file}", markup=False, highlight=False)
    return comparisons, check(comparisons, goals)


def _peer(name: str, settings: dict[str, Any], batch: int | None, console: Console) -> Backend:
    from radixrt.bench.backends import TransformersBackend
    from radixrt.model.source import resolve

    console.print(f"loading the same weights into {name}", style="dim", markup=False, highlight=False)
    return TransformersBackend.from_checkpoint(
        resolve(settings.get("model")), threads=settings.get("threads"), batch_size=batch
    )
