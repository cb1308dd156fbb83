"""Plans: what the command line names as models, what each of them will take, and how the memory is shared out.

Invariants: nothing is loaded here, only headers are read; every pool is of the same number of bytes, whichever model is loaded first.

    limit   = models_memory, or ``SHARE`` of the memory that is free at the start
    a pool  = max_total_tokens, or kv_memory_fraction x limit / as many models as can be loaded at once
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from radixrt.config import EngineConfig
from radixrt.engine.inputs import read_template
from radixrt.errors import InvalidRequest, ModelError, nearest, shown
from radixrt.model.footprint import MOST_POOL, footprint
from radixrt.model.source import DEFAULT_FILE, resolve
from radixrt.model.tokenizer import Tokenizer, load_tokenizer
from radixrt.server.client import EngineInfo
from radixrt.server.config import ServerConfig
from radixrt.server.models import Models, Plan, Resident
from radixrt.server.process import ProcessClient

SHARE = 0.8  # of the free memory, for all models
_NAME = re.compile(r"[\w.:/@+-]{1,200}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Named:
    """A model of a server. ``model``: as ``EngineConfig.model``."""

    name: str
    model: str | None


def split(text: str) -> tuple[str, str]:
    """The name and the path of NAME=PATH; no name where there is none, or where the whole is a path."""
    name, mark, path = text.partition("=")
    try:
        whole = not mark or not _NAME.fullmatch(name) or Path(text).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # the model says what is wrong with it
        whole = True
    return ("", text) if whole else (name, path)


def read_models(given: Sequence[str], name: str | None = None) -> list[Named]:
    """The models that ``--model`` was given: NAME=PATH, or a path alone, whose name is that of its file; nothing: the embedded model.

    Args:
        name: of a model that is given without one.

    Raises:
        InvalidRequest: a name that cannot be, or stands twice.
    """
    if not given:
        return [Named(name or DEFAULT_FILE.removesuffix(".gguf"), None)]
    found: list[Named] = []
    for text in given:
        own, path = split(text)
        own = own or name or _own_name(text)
        if not _NAME.fullmatch(own):
            problem = (
                f"={shown(text)}: the name {shown(own)} must be letters, digits and . : / @ + - _, as in NAME=PATH"
            )
            raise InvalidRequest("model", problem)
        if any(own == other.name for other in found):
            raise InvalidRequest("model", f"={shown(text)}: the name {own} is taken; give another, as in NAME=PATH")
        found.append(Named(own, path or None))
    return found


def _own_name(text: str) -> str:
    path = Path(text).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else text


def check_preload(named: Sequence[Named], config: ServerConfig) -> None:
    names = [one.name for one in named]
    for name in config.preload:
        if name not in names:
            raise InvalidRequest("preload", f"={shown(name)}: is none of the models{nearest(name, names)}")


def make_models(named: Sequence[Named], config: ServerConfig, settings: Mapping[str, Any]) -> Models:
    """The models of a server; a model that is only a name of the hub is fetched.

    Raises:
        InvalidRequest: a wrong setting, or a model that does not fit into the limit. ModelError: one that cannot be read; names it.
    """
    check_preload(named, config)
    most = min(config.max_loaded_models or len(named), len(named))
    limit = round(config.models_memory * 1e9) if config.models_memory is not None else int(_free() * SHARE)
    keep = float("inf") if config.idle_unload is None else config.idle_unload
    residents = [Resident(one.name, _plan(one, settings, limit, most), keep) for one in named]
    return Models(residents, limit=limit, most=most, wait=config.model_timeout, preload=config.preload)


def _plan(one: Named, given: Mapping[str, Any], limit: int, most: int) -> Plan:
    config = EngineConfig.from_kwargs(**{**given, "model": one.model})
    try:
        path = resolve(one.model, progress=True)
        sizes = footprint(path, config)
    except ModelError as error:
        raise ModelError(f"the model {one.name}: {error}") from None
    tokens = config.max_total_tokens or min(MOST_POOL, int(limit * config.kv_memory_fraction / most) // sizes.per_token)
    tokens = tokens // config.page_size * config.page_size
    if tokens < 1:
        raise InvalidRequest("models_memory", f": leaves no room for a token of the model {one.name}")
    settings = {n: os.fspath(v) if isinstance(v, os.PathLike) else v for n, v in asdict(config).items()}
    settings["max_total_tokens"] = tokens
    info = EngineInfo(
        model=sizes.name,
        context_length=min(config.max_model_len or sizes.shape.max_position, tokens),
        vocab_size=sizes.shape.vocab_size,
        pool_tokens=tokens,
        dtype=sizes.dtype,
        device=sizes.device,
        settings=settings,
        kernels="native" if sizes.native else "torch",
        embedding_size=sizes.shape.hidden_size,
    )
    return Plan(
        info, sizes.total(tokens), partial(ProcessClient, settings, progress=True), partial(_tokenizer, settings)
    )


def _tokenizer(settings: Mapping[str, Any]) -> Tokenizer:
    return load_tokenizer(settings["model"], chat_template=read_template(settings["chat_template"]))


def _free() -> int:
    import torch

    from radixrt.ops.load import free_memory

    return free_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
