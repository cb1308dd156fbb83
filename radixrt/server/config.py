"""ServerConfig owns every setting of the HTTP front; command-line flags are generated from its fields.

Invariants: frozen, validated on construction, no other module keeps a default of its own; an API key is in no text made of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from radixrt.checks import FrozenMapping, flag, integer, number, strings
from radixrt.engine.protocol import MAX_MESSAGE
from radixrt.errors import InvalidRequest, shown, unknown_field
from radixrt.server.hosts import named
from radixrt.tools import choose_reasoning_format, choose_tool_format

LOG_LEVELS = ("debug", "info", "warning", "error")
UNKNOWN_FIELDS = ("refuse", "warn")
_MOST = 2**31 - 1
_LONGEST = 10 * 365 * 86_400.0  # seconds


def _setting(default: Any, help: str, *, secret: bool = False, **extra: Any) -> Any:
    return field(default=default, repr=not secret, metadata={"help": help, "secret": secret, **extra})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of a server. Sizes are bytes and times seconds unless the name says otherwise."""

    host: str = _setting("127.0.0.1", "address to listen on; 0.0.0.0: every address of this machine")
    port: int = _setting(8000, "port to listen on; 0: any that is free")
    api_key: Sequence[str] = _setting(
        (), "key that every route but /health asks for; the variable RADIXRT_API_KEY sets keys too: A,B", secret=True
    )
    allowed_hosts: Sequence[str] = _setting(
        (),
        "name by which the server may be called, '*': any; nothing: where only this machine reaches it and no key is set, "
        "localhost and loopback addresses (what a page of another site makes of its own name is refused), else any",
    )
    served_model_name: Sequence[str] = _setting((), "name of the model in the API, nothing: its own")
    preload: Sequence[str] = _setting((), "name of a model to load at the start; nothing: the first of several")
    models_memory: float | None = _setting(
        None,
        "gigabytes that several models may take together; the least recently used one is unloaded for another; nothing: 80 % of free memory",
    )
    max_loaded_models: int | None = _setting(
        None, "most of several models that are loaded at once; nothing: as many as fit"
    )
    idle_unload: float | None = _setting(
        None, "a model that nobody has used for this long is unloaded; nothing: it stays until its room is needed"
    )
    model_timeout: float = _setting(
        300.0, "a request whose model is not loaded after this, or has no room, is ended with 503"
    )
    chat_template_kwargs: str = _setting("{}", "JSON object of values that every chat's template gets")
    tool_call_parser: str = _setting(
        "auto", "how the model writes calls of tools; auto: as its chat template says, none: calls stay text"
    )
    reasoning_parser: str = _setting(
        "auto", "how the model marks its thinking; auto: as its chat template says, none: thinking stays text"
    )
    embeddings: bool = _setting(True, "answer /v1/embeddings; off for a model whose hidden states are not fit for it")
    cors_origins: Sequence[str] = _setting((), "origin whose pages may call the server, '*': any; nothing: none may")
    unknown_fields: str = _setting(
        "refuse",
        "fields of a request that the server does not know: refuse the request, or warn in a header",
        choices=UNKNOWN_FIELDS,
    )
    max_body_bytes: int = _setting(32 * 2**20, "largest body of a request")
    max_batch: int = _setting(1024, "most prompts in one request")
    max_stored_responses: int = _setting(4096, "responses of /v1/responses that are kept to go on from")
    max_stored_bytes: int = _setting(256 * 2**20, "bytes of them")
    max_connections: int = _setting(16384, "most open connections; one more is answered 503")
    max_queue: int = _setting(4096, "most samples waiting behind those that can run; then 429")
    queue_timeout: float = _setting(600.0, "a request that has no token after this is ended with 503")
    receive_timeout: float = _setting(
        60.0, "a request whose head or body is not all there after this is ended with 408"
    )
    idle_timeout: float = _setting(
        75.0, "a connection is closed when the head of its next request is not there after this"
    )
    stream_keepalive: float = _setting(
        15.0, "a stream that has said nothing for this long sends a comment, so that no proxy takes it for dead"
    )
    max_websockets: int = _setting(1024, "most open WebSockets")
    max_message: int = _setting(MAX_MESSAGE, "most characters of a message on a WebSocket")
    max_unsent: int = _setting(
        MAX_MESSAGE, "most characters waiting for a slow reader of a WebSocket before it is closed"
    )
    websocket_idle: float = _setting(600.0, "a WebSocket without programs and messages is closed after this")
    health_timeout: float = _setting(20.0, "an engine that answers nothing for this long is not healthy")
    drain_seconds: float = _setting(30.0, "time that running work has to finish after SIGTERM")
    log_level: str = _setting("info", "least that is logged", choices=LOG_LEVELS)
    access_log: bool = _setting(True, "log a line for each request, without its content")
    in_process: bool = _setting(False, "run the engine in a thread of the server instead of a process of its own")

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name, low, high in (
            ("port", 0, 65535),
            ("max_body_bytes", 1024, _MOST),
            ("max_batch", 1, _MOST),
            ("max_stored_responses", 0, _MOST),
            ("max_stored_bytes", 0, _MOST),
            ("max_connections", 1, _MOST),
            ("max_queue", 0, _MOST),
            ("max_websockets", 0, _MOST),
            ("max_message", 1024, MAX_MESSAGE),
            ("max_unsent", 1024, _MOST),
        ):
            put(name, integer(name, getattr(self, name), low, high))
        for name in (
            "queue_timeout",
            "receive_timeout",
            "idle_timeout",
            "stream_keepalive",
            "websocket_idle",
            "health_timeout",
            "model_timeout",
        ):
            put(name, number(name, getattr(self, name), 0.0, _LONGEST, above=True))
        for name, above in (("models_memory", True), ("idle_unload", False)):
            if getattr(self, name) is not None:
                put(name, number(name, getattr(self, name), 0.0, _LONGEST, above=above))
        put("max_loaded_models", integer("max_loaded_models", self.max_loaded_models, 1, _MOST, optional=True))
        put("drain_seconds", number("drain_seconds", self.drain_seconds, 0.0, _LONGEST))
        for name in ("access_log", "embeddings", "in_process"):
            flag(name, getattr(self, name))
        for name, valid in (("unknown_fields", UNKNOWN_FIELDS), ("log_level", LOG_LEVELS)):
            if getattr(self, name) not in valid:
                raise InvalidRequest(name, f"={shown(getattr(self, name))}: must be one of {', '.join(valid)}")
        if not isinstance(self.host, str) or not self.host.strip() or "\0" in self.host:
            raise InvalidRequest("host", f"={shown(self.host)}: must be an address or a name of this machine")
        put("api_key", _keys(self.api_key))
        for name in ("allowed_hosts", "served_model_name", "cors_origins", "preload"):
            put(name, strings(name, getattr(self, name)))
        for host in self.allowed_hosts:
            if host != "*" and named(host) != host.lower():
                raise InvalidRequest(
                    "allowed_hosts", f" has {shown(host)}: must be a name or an address, without port, or *"
                )
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")) and origin != "null":
                raise InvalidRequest("cors_origins", f" has {shown(origin)}: must be https://host, http://host or *")
        choose_tool_format(None, (), self.tool_call_parser)
        choose_reasoning_format(None, (), self.reasoning_parser)
        put("_kwargs", FrozenMapping(_object("chat_template_kwargs", self.chat_template_kwargs)))

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The names given; none: the model's own is meant."""
        return tuple(self.served_model_name)

    @property
    def default_chat_template_kwargs(self) -> Mapping[str, Any]:
        kwargs: Mapping[str, Any] = vars(self)["_kwargs"]
        return kwargs

    def shown(self) -> dict[str, Any]:
        """Every setting but the secret ones, of which it says whether they are set."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        secret = {item.name for item in fields(self) if item.metadata["secret"]}
        return {name: bool(value) if name in secret else value for name, value in values.items()}

    @classmethod
    def from_kwargs(cls, **settings: Any) -> ServerConfig:
        """Build from keyword settings; an unknown one is an error naming the nearest valid one."""
        valid = {item.name for item in fields(cls)}
        for name in settings:
            if name not in valid:
                raise unknown_field("ServerConfig", name, valid)
        return cls(**settings)


def _keys(given: Any) -> tuple[str, ...]:
    """API keys, of which an error shows nothing."""
    keys = (given,) if isinstance(given, str) else given if isinstance(given, (list, tuple)) else (None,)
    for key in keys:
        if not isinstance(key, str) or not key.strip() or not key.isascii() or not key.isprintable():
            raise InvalidRequest("api_key", " must be one or more printable ASCII characters, or a list of such keys")
    return tuple(key.strip() for key in keys)  # as the header of a request is read


def _object(name: str, text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(name, f"={shown(text)}: must be a JSON object")
    return value
