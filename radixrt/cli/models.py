"""``radixrt models``: what is on this machine and could be given to ``--model``, as a table or as JSON; ``show``: one of them, closer.

Invariants: reads headers only, and the tokenizer of a model that is shown; a model that cannot be used is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING, Any

from radixrt.cli import figures
from radixrt.errors import InvalidRequest, ModelError, shown

if TYPE_CHECKING:
    from radixrt.model.source import LocalModel

_COLUMNS = ("name", "family", "size", "memory", "context", "quantization", "path")
_RIGHT = ("size", "memory", "context")
_THOUSAND = 1000  # tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="*", metavar="show MODEL", help="show one model: its name in the list, 'default', or its path"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    from radixrt.model.source import GET_DEFAULT, find_local, list_local

    what = list(args.what or [])
    if what[:1] == ["show"]:
        if len(what) != 2:
            raise InvalidRequest("show", f" has {len(what) - 1} names: give one, 'radixrt models' lists them")
        found = details(find_local(what[1]))
        print(json.dumps(found, indent=2) if args.json else figures.printable(described(found), sys.stdout))
        return 0
    if what:
        raise InvalidRequest("models", f": no such action {shown(what[0])}; 'radixrt models' lists, 'radixrt models show MODEL' shows one")  # fmt: skip
    models = list_local()
    if args.json:
        print(json.dumps([as_json(model) for model in models], indent=2))
        return 0
    if not models:
        print(f"no model is on this machine; the default one is got with: {GET_DEFAULT}", file=sys.stderr)
        return 0
    print(figures.printable(table(models), sys.stdout))
    return 0


# ---- all of them


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
        "memory": memory(model),
        "problem": problem(model),
    }


def memory(model: LocalModel) -> dict[str, int] | None:
    """Bytes that a model takes: its weights, and keys and values of a token, of 1,000 and of its whole context."""
    from radixrt.config import EngineConfig
    from radixrt.model.footprint import footprint

    try:
        sizes = footprint(model.path, EngineConfig(model=str(model.path)))
    except (ModelError, InvalidRequest, OSError):
        return None
    context = sizes.shape.max_position
    return {
        "weights": sizes.weights,
        "per_token": sizes.per_token,
        "per_thousand": _THOUSAND * sizes.per_token,
        "context": context * sizes.per_token,
        "total": sizes.weights + context * sizes.per_token,
    }


def problem(model: LocalModel) -> str | None:
    """Why a model cannot be used, as far as its header tells."""
    from radixrt.model.gguf_names import ARCHITECTURES
    from radixrt.model.registry import FAMILIES, HOOKED, PARTS, supported

    is_gguf = model.path.suffix == ".gguf"
    if model.problem is None and model.family not in (ARCHITECTURES if is_gguf else (*FAMILIES, *PARTS, *HOOKED)):
        names = f"{', '.join(ARCHITECTURES)} (as GGUF)" if is_gguf else supported()
        return f"the family {shown(model.family)} is not supported; supported are {names}"
    return model.problem


def table(models: list[LocalModel]) -> str:
    """One line a model, and one more where it cannot be used. Memory is that of the weights and a whole context."""
    sizes = [memory(model) for model in models]
    rows = [
        (
            model.name,
            model.family or "?",
            _megabytes(model.nbytes),
            _megabytes(size["total"]) if size else "?",
            f"{model.context:,}" if model.context else "?",
            model.quantization or "?",
            str(model.path),
        )
        for model, size in zip(models, sizes)
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


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


# ---- one of them


def details(model: LocalModel) -> dict[str, Any]:
    """All that is told of one model.

    Raises:
        ModelError: it cannot be used.
    """
    from radixrt.model.checkpoint import open_checkpoint
    from radixrt.model.footprint import shape_of
    from radixrt.model.source import license_of
    from radixrt.tools import choose_reasoning_format, choose_tool_format

    reason = problem(model)
    if reason is not None:
        raise ModelError(f"{model.path}: cannot be used: {reason}")
    checkpoint = open_checkpoint(model.path)
    try:
        shape = shape_of(checkpoint)
        template = checkpoint.tokenizer().chat_template
        names = checkpoint.names()
        parameters = sum(math.prod(checkpoint.shape(name)) for name in names)
    finally:
        checkpoint.close()
    tools, reasoning = choose_tool_format(template), choose_reasoning_format(template)
    return {
        **as_json(model),
        "parameters": parameters,
        "layers": shape.num_layers,
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_size": shape.hidden_size,
        "vocabulary": shape.vocab_size,
        "chat_template": template is not None,
        "tool_format": tools.name if tools is not None and template is not None else None,
        "reasoning_format": reasoning.name if reasoning is not None else None,
        "license": license_of(model.path),
    }


def described(found: dict[str, Any]) -> str:
    """Details for a person, one a line."""
    sizes = found["memory"]
    lines = {
        "name": found["name"],
        "path": found["path"],
        "family": f"{found['family']}, {found['parameters'] / 1e6:,.1f} million parameters",
        "size": f"{_megabytes(found['bytes'])}, {found['quantization'] or 'not quantized'}",
        "context": f"{found['context']:,} tokens" if found["context"] else "?",
        "layers": f"{found['layers']}, hidden size {found['hidden_size']:,}, vocabulary {found['vocabulary']:,}",
        "heads": f"{found['heads']} of {found['head_dim']} dimensions, {found['kv_heads']} for keys and values",
        "chat": "has a chat template" if found["chat_template"] else "has no chat template",
        "tools": found["tool_format"] or "none",
        "reasoning": found["reasoning_format"] or "none",
        "memory": "?" if sizes is None else f"{_megabytes(sizes['weights'])} of weights, {_megabytes(sizes['per_thousand'])} "
        f"for the keys and values of 1,000 tokens, {_megabytes(sizes['context'])} for its whole context",
        "license": found["license"] or "not told",
    }  # fmt: skip
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())
