"""The messages between the front and the engine's process, and their frames: four bytes of length, then a msgpack array.

Invariants: a message is one of the types below or an error, never code (nothing is unpickled); no frame is longer than ``MAX_FRAME``;
what a caller gave (prompt, parameters) travels packed inside its message, so that reading a message costs the same whatever is in it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, TypeAlias

import msgspec
import numpy as np

from radixrt.engine.nodes import params_to_dict
from radixrt.errors import EngineClosed, InvalidRequest, ModelError, RadixrtError
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.request import OutputDelta, SamplingParams
from radixrt.server.client import EngineInfo

log = logging.getLogger("radixrt")

MAX_FRAME = 2**28 + 2**16  # bytes: the longest program message in its widest characters, and what goes around it
_HEAD = 4
_ROOM = 2**14  # bytes of a frame around what a caller gave


class Start(msgspec.Struct, array_like=True, tag="start"):
    """The first message: load an engine with these settings."""

    settings: dict[str, Any]
    progress: bool


class Generate(msgspec.Struct, array_like=True, tag="generate"):
    """``body``: ``pack(prompt, params, priority, cache_salt)``. Answered by ``Deltas`` or ``Refused``."""

    number: int
    request_id: str
    deltas: bool
    body: bytes


class Score(msgspec.Struct, array_like=True, tag="score"):
    """``body``: ``pack(prefix, choices, cache_salt)``. Answered by one delta or ``Refused``."""

    number: int
    request_id: str
    body: bytes


class Embed(msgspec.Struct, array_like=True, tag="embed"):
    """``body``: ``pack(prompt, pooling, cache_salt)``. Answered by one delta or ``Refused``."""

    number: int
    request_id: str
    body: bytes


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """Nobody reads what ``number`` asked for any more."""

    number: int


class Call(msgspec.Struct, array_like=True, tag="call"):
    """``what``: ``ping``, ``stats``, ``tree`` (with a number of nodes), ``runs`` (with known numbers), ``flush`` or ``abort`` (with a request id). Answered by ``Reply`` or ``Refused``."""

    number: int
    what: str
    argument: str = ""


class ChannelOpen(msgspec.Struct, array_like=True, tag="open"):
    number: int
    peer: str


class ChannelSend(msgspec.Struct, array_like=True, tag="send"):
    """``raw``: the message where it holds halves of characters, which text on the wire cannot."""

    number: int
    message: str
    raw: bytes = b""


class ChannelClose(msgspec.Struct, array_like=True, tag="close"):
    number: int


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    info: EngineInfo


class Deltas(msgspec.Struct, array_like=True, tag="deltas"):
    """All that one step had to say, each with the number of its request."""

    items: list[tuple[int, OutputDelta]]


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """What ``number`` asked for (0: to start) raised an error; see ``refusal`` and ``error_of``."""

    number: int
    kind: str
    field: str
    message: str


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    number: int
    value: Any


class ChannelTexts(msgspec.Struct, array_like=True, tag="texts"):
    number: int
    messages: list[str]


class Fatal(msgspec.Struct, array_like=True, tag="fatal"):
    """The engine has stopped; its process ends."""

    message: str


ToWorker: TypeAlias = Start | Generate | Score | Embed | Abort | Call | ChannelOpen | ChannelSend | ChannelClose
ToFront: TypeAlias = Ready | Deltas | Refused | Reply | ChannelTexts | Fatal


# ---- frames


def frame(message: ToWorker | ToFront) -> bytearray:
    """A message as it goes over the socket.

    Raises:
        InvalidRequest: it is too long. UnicodeEncodeError, TypeError, OverflowError: it holds what cannot travel.
    """
    data = bytearray(_HEAD)
    _ENCODER.encode_into(message, data, _HEAD)
    size = len(data) - _HEAD
    if size > MAX_FRAME:
        raise InvalidRequest("message", f"has {size:,} bytes: at most {MAX_FRAME:,} are taken")
    data[:_HEAD] = size.to_bytes(_HEAD, "big")
    return data


class FrameReader:
    """Frames from a stream that comes in pieces. Every ``feed`` raises ValueError (as msgspec's errors are) at what is no message."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[ToFront]:
        """The messages that are whole now."""
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= _HEAD:
                end = at + _HEAD + _size(buffer[at : at + _HEAD])
                if len(buffer) < end:
                    break
                message = _FROM_WORKER.decode(buffer[at + _HEAD : end])
                at = end
                yield message
        finally:
            del buffer[:at]


def read_frames(stream: BinaryIO) -> Iterator[ToWorker]:
    """The messages to a worker, until its socket closes."""
    while len(head := stream.read(_HEAD)) == _HEAD:
        size = _size(head)
        data = stream.read(size)
        if len(data) < size:
            return
        yield _TO_WORKER.decode(data)


def _size(head: bytes | bytearray) -> int:
    size = int.from_bytes(head, "big")
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size:,} bytes: at most {MAX_FRAME:,} are taken")
    return size


# ---- what callers give


def _plain(value: Any) -> Any:
    """What other types than JSON's stand for, where they stand for one of these."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"must not hold a {type(value).__name__}")


def pack(field: str, *values: Any) -> bytes:
    """Values of a caller, unchecked, as bytes; msgpack, or JSON where msgpack cannot say it: lone surrogates, integers of any size.

    Raises:
        InvalidRequest: they hold what is neither text, number, list nor object, are nested too deeply or too long; it names ``field``.
    """
    try:
        try:
            body = _PACKER.encode(values)
        except (UnicodeEncodeError, OverflowError):
            body = json.dumps(values, default=_plain).encode()
    except RecursionError:
        raise InvalidRequest(field, "is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, f": {error}") from None
    if len(body) > MAX_FRAME - _ROOM:
        raise InvalidRequest(field, f"has {len(body):,} bytes: at most {MAX_FRAME - _ROOM:,} are taken")
    return body


def unpack(body: bytes) -> list[Any]:
    """What ``pack`` was given."""
    values: list[Any] = json.loads(body) if body[:1] == b"[" else _UNPACKER.decode(body)
    return values


def params_out(params: SamplingParams | None) -> dict[str, Any] | None:
    if params is None:
        return None
    if not isinstance(params, SamplingParams):
        raise InvalidRequest("params", f"must be SamplingParams, not {type(params).__name__}")
    return params_to_dict(params)


def params_in(values: dict[str, Any] | None) -> SamplingParams | None:
    """What ``params_out`` was given; raises what ``SamplingParams`` raises."""
    if values is None:
        return None
    if "logit_bias" in values:
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    return SamplingParams.from_dict(values)


# ---- errors

_KINDS: dict[str, type[RadixrtError]] = {
    kind.__name__: kind for kind in (UnsupportedConstraint, InvalidRequest, ModelError, EngineClosed, RadixrtError)
}


def refusal(number: int, error: BaseException) -> Refused:
    """An error as a message. One that nobody raised on purpose is logged here, where its traceback is."""
    kind = next((cls.__name__ for cls in type(error).__mro__ if _KINDS.get(cls.__name__) is cls), "")
    if isinstance(error, InvalidRequest):
        field, problem = error.__reduce__()[1]
        return Refused(number, kind, _clean(field), _clean(problem))
    if not kind:
        log.error("a request failed", exc_info=error)
        return Refused(number, "", "", _clean(f"{type(error).__name__}: {error}"))
    return Refused(number, kind, "", _clean(str(error)))


def error_of(refused: Refused) -> Exception:
    """The error that ``refusal`` was given, as far as its type is known here."""
    cls = _KINDS.get(refused.kind)
    if cls is None:
        return RuntimeError(refused.message)
    return cls(refused.field, refused.message) if issubclass(cls, InvalidRequest) else cls(refused.message)


def error_event(problem: str) -> str:
    """The program message for what concerns a whole channel."""
    return json.dumps({"event": "error", "program": None, "error": problem})


def _clean(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_FROM_WORKER = msgspec.msgpack.Decoder(ToFront)
_TO_WORKER = msgspec.msgpack.Decoder(ToWorker)
_PACKER = msgspec.msgpack.Encoder(enc_hook=_plain)
_UNPACKER = msgspec.msgpack.Decoder()
