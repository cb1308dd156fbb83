"""``radixrt serve``: starts a server; its flags are those of ``ServerConfig`` and ``EngineConfig``, under the names of other servers too.

Invariants: everything on the command line is checked before a model is loaded; an alias is another name of one flag, never a setting; one model
without a name is served as it is, several, or one with a name, are loaded when they are asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from radixrt.cli import flags
from radixrt.config import EngineConfig
from radixrt.errors import InvalidRequest, shown
from radixrt.server.config import ServerConfig

if TYPE_CHECKING:
    from radixrt.server.plans import Named

_SERVER = "server."
_KEY = "RADIXRT_API_KEY"

# Our flag -> the names by which vLLM and SGLang call it.
ALIASES: dict[str, tuple[str, ...]] = {
    "--model": ("--model-path",),
    "--max-model-len": ("--context-length",),
    "--kv-memory-fraction": ("--gpu-memory-utilization", "--mem-fraction-static"),
    "--max-running-requests": ("--max-num-seqs",),
    "--chunked-prefill-size": ("--max-num-batched-tokens",),
    "--page-size": ("--block-size",),
    "--kv-dtype": ("--kv-cache-dtype",),
    "--schedule-policy": ("--scheduling-policy",),
    "--seed": ("--random-seed",),
    "--max-queue": ("--max-queued-requests",),
    "--cors-origins": ("--allowed-origins",),
    "--allowed-hosts": ("--allowed-host",),
    "--idle-timeout": ("--timeout-keep-alive",),
    "--log-level": ("--uvicorn-log-level",),
    "--chat-template-kwargs": ("--default-chat-template-kwargs",),
}
# Flags of other servers that mean what is not there yet: an error is better than a server that does something else.
LATER = {
    "--tensor-parallel-size": "several devices",
    "--tp-size": "several devices",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_path", nargs="?", metavar="MODEL", help="the model, as --model names it", default=argparse.SUPPRESS
    )
    group = parser.add_argument_group("server")
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(ServerConfig)}
    flags.add_flags(parser, group, ServerConfig, _SERVER, helps, {})
    group.add_argument(
        "--model",
        action="append",
        metavar="[NAME=]MODEL",
        default=argparse.SUPPRESS,
        help="model directory, .gguf file or hub id; nothing: the embedded SmolLM2-135M-Instruct; given several times, with names: each is "
        "loaded when a request names it",
    )
    flags.add_engine_flags(parser, omit=("model",))
    actions = parser._option_string_actions
    for flag, names in ALIASES.items():
        for name in names:
            actions[flag].option_strings = [*actions[flag].option_strings, name]
            actions[name] = actions[flag]
    actions["--max-model-len"].type = _or_auto(actions["--max-model-len"].type)  # type: ignore[arg-type]
    # --enable-prefix-caching is --disable-radix-cache the other way round
    parser.add_argument(
        "--enable-prefix-caching",
        action=_Inverted,
        dest="engine.disable_radix_cache",
        default=argparse.SUPPRESS,
        help="the opposite of --disable-radix-cache; it is the default",
    )
    parser.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        default=argparse.SUPPRESS,
        help="changes nothing: tools may be called wherever a request has some",
    )
    for flag, what in LATER.items():
        parser.add_argument(flag, action=_Later, what=what, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    config, settings, models = read(args)
    from radixrt.server.app import serve

    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    return asyncio.run(serve(config, settings, models))


def read(args: argparse.Namespace) -> tuple[ServerConfig, dict[str, Any], list[Named]]:
    """The settings of the server and of the engine, and the models where these are loaded and unloaded.

    Raises:
        InvalidRequest: one of them is wrong, or the model is named twice.
    """
    settings = flags.engine_settings(args)
    given = getattr(args, "model_path", None)
    if isinstance(given, list):  # behind a "--"
        if len(given) != 1:
            raise InvalidRequest("MODEL", f"={shown(given)}: give one")
        given = given[0]
    models: list[str] = getattr(args, "model", [])
    if given is not None:
        if any(one != given for one in models):
            raise InvalidRequest("--model", f"={shown(models[0])}: the model is named already, {shown(given)}")
        models = [given]
    server = flags.given_flags(args, _SERVER)
    if "api_key" not in server and os.environ.get(_KEY):
        server["api_key"] = [key.strip() for key in os.environ[_KEY].split(",")]
    config = ServerConfig.from_kwargs(**server)
    EngineConfig.from_kwargs(**settings, model=models[0] if models else None)
    named = _named(config, models)
    if models and not named:
        settings["model"] = models[0]
    return config, settings, named


def _named(config: ServerConfig, given: list[str]) -> list[Named]:
    """The models that are loaded and unloaded; none: the one model stays as long as the server does."""
    from radixrt.server.plans import check_preload, read_models, split

    bare = len(given) < 2 and not any(split(text)[0] for text in given)
    if bare and config.idle_unload is None:
        for name in ("preload", "models_memory", "max_loaded_models"):
            if getattr(config, name):
                flag = f"--{name.replace('_', '-')}"
                raise InvalidRequest(flag, ": is for several models: give them as --model NAME=MODEL")
        return []
    if config.in_process:
        raise InvalidRequest("--in-process", ": models that are loaded and unloaded have a process each; leave it out")
    if len(config.served_model_name) > bare:
        raise InvalidRequest("--served-model-name", ": the names of several models are given as --model NAME=MODEL")
    models = read_models(given, next(iter(config.served_model_name), None))
    check_preload(models, config)
    return models


def _or_auto(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Of vLLM's words for a context that fits: ``auto`` and -1."""
    return lambda text: None if text.lower() in ("auto", "-1") else convert(text)


class _Inverted(argparse.BooleanOptionalAction):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, str(option_string).startswith("--no-"))


class _Later(argparse.Action):
    def __init__(self, option_strings: Any, dest: str, what: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs="?", **settings)
        self._what = what

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if self._what == "several devices" and values == "1":
            return
        raise argparse.ArgumentError(self, f"{self._what} will come with a later version")
