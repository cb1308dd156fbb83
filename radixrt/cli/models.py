"""``radixrt models``: what is on this machine and could be given to ``--model``, as a table or as JSON.

Invariants: reads headers only; a model that cannot be used is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from radixrt.cli import figures

if TYPE_CHECKING:
    from radixrt.model.source import LocalModel

_COLUMNS = ("name", "family", "size", "context", "quantization", "path")
_RIGHT = ("size", "context")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def run(args: argparse.Namespace) -> int:
    from radixrt.model.source import GET_DEFAULT, list_local

    models = list_local()
    if args.json:
        print(json.dumps([as_json(model) for model in models], indent=2))
        return 0
    if not models:
        print(f"no model is on this machine; the default one is got with: {GET_DEFAULT}", file=sys.stderr)
        return 0
    print(figures.printable(table(models), sys.stdout))
    return 0


def as_json(model: LocalModel) -> dict[str, Any]:
    """A model as JSON; what its header does not tell is null."""
    return {
        "name": model.name,
        "path": str(model.path),
        "origin": model.origin,
        "bytes": model.nbytes,
        "family": model.family or None,
        "supported": problem(model) is None,
        "context": model.context or None,
        "quantization": model.quantization or None,
        "problem": problem(model),
    }


def problem(model: LocalModel) -> str | None:
    """Why a model cannot be used, as far as its header tells."""
    from radixrt.model.gguf_names import ARCHITECTURES
    from radixrt.model.registry import FAMILIES, HOOKED, PARTS, supported

    is_gguf = model.path.suffix == ".gguf"
    if model.problem is None and model.family not in (ARCHITECTURES if is_gguf else (*FAMILIES, *PARTS, *HOOKED)):
        names = f"{', '.join(ARCHITECTURES)} (as GGUF)" if is_gguf else supported()
        return f"the family {model.family!r} is not supported; supported are {names}"
    return model.problem


def table(models: list[LocalModel]) -> str:
    """One line a model, and one more where it cannot be used."""
    rows = [
        (
            model.name,
            model.family or "?",
            f"{model.nbytes / 1e6:,.0f} MB",
            f"{model.context:,}" if model.context else "?",
            model.quantization or "?",
            str(model.path),
        )
        for model in models
    ]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows)]
    lines = [_line(_COLUMNS, widths)]
    for model, row in zip(models, rows):
        lines.append(_line(row, widths))
        reason = problem(model)
        if reason is not None:
            lines.append(f"  cannot be used: {reason}")
    return "\n".join(lines)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    aligned = (f"{cell:>{w}}" if name in _RIGHT else f"{cell:<{w}}" for name, cell, w in zip(_COLUMNS, cells, widths))
    return "  ".join(aligned).rstrip()
