"""``radixrt serve``: starts a server; its flags are those of ``ServerConfig`` and ``EngineConfig``, under the names of other servers too.

Invariants: everything on the command line is checked before a model is loaded; an alias is another name of one flag, never a setting.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from radixrt.cli import flags
from radixrt.config import EngineConfig
from radixrt.errors import InvalidRequest, shown
from radixrt.server.config import ServerConfig

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
    flags.add_engine_flags(parser)
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
    config, settings = read(args)
    from radixrt.server.app import serve

    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    return asyncio.run(serve(config, settings))


def read(args: argparse.Namespace) -> tuple[ServerConfig, dict[str, Any]]:
    """The settings of the server and of the engine.

    Raises:
        InvalidRequest: one of them is wrong, or the model is named twice.
    """
    settings = flags.engine_settings(args)
    given = getattr(args, "model_path", None)
    if isinstance(given, list):  # behind a "--"
        if len(given) != 1:
            raise InvalidRequest("MODEL", f"={shown(given)}: give one")
        given = given[0]
    if given is not None:
        if settings.get("model") not in (None, given):
            raise InvalidRequest("--model", f"={shown(settings['model'])}: the model is named already, {shown(given)}")
        settings["model"] = given
    server = flags.given_flags(args, _SERVER)
    if "api_key" not in server and os.environ.get(_KEY):
        server["api_key"] = [key.strip() for key in os.environ[_KEY].split(",")]
    EngineConfig.from_kwargs(**settings)
    return ServerConfig.from_kwargs(**server), settings


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
