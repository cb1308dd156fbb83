"""EngineClient: what the HTTP front needs of an engine, wherever that runs (another process, a thread, a stand-in in tests).

Invariants: used on one event loop; a call that is refused raises what ``Engine`` raises (``InvalidRequest`` with its field, ``EngineClosed``), an engine
that died raises ``EngineDied``; closing or cancelling a stream aborts its request at once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from radixrt.engine.inputs import Prompt
from radixrt.errors import RadixrtError
from radixrt.model.tokenizer import Tokenizer
from radixrt.request import OutputDelta, RequestOutput, SamplingParams


class EngineDied(RadixrtError):
    """The engine's process ended or does not answer; requests it had are lost."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is known once an engine is ready.

    Fields:
        model: its name. context_length: longest prompt + output. pool_tokens: tokens the KV pool holds.
        settings: ``EngineConfig`` as a mapping. dtype, device, kernels: as decided. embedding_size: numbers of an embedding.
        memory: bytes that the engine takes, with its whole pool; 0: not measured.
    """

    model: str
    context_length: int
    vocab_size: int
    pool_tokens: int
    dtype: str
    device: str
    settings: Mapping[str, Any]
    kernels: str = "torch"
    embedding_size: int = 0
    memory: int = 0


class ProgramLink(Protocol):
    """A channel of program messages (``radixrt.engine.protocol``); closing it ends its programs."""

    def send(self, message: str) -> None:
        """A message to the engine, in order; never blocks. Raises EngineDied."""

    def close(self) -> None: ...


class EngineClient(Protocol):
    """An engine behind the front."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The front's own copy."""

    @property
    def healthy(self) -> bool:
        """The engine is alive and stepping (or idle and answering)."""

    async def start(self) -> None:
        """Make it ready; raises what loading raises."""

    async def close(self) -> None: ...

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        deltas: bool = True,
    ) -> AsyncGenerator[OutputDelta, None]:
        """The deltas of a request; the last one carries the whole output. Use it with ``aclosing``.

        Args:
            deltas: False: only the first one, which tells that the request waits no longer, and the last one.
        """

    async def score(
        self, prefix: Sequence[int], choices: Sequence[Sequence[int]], *, request_id: str, cache_salt: str = ""
    ) -> RequestOutput:
        """``Engine.prepare_score``: ``scores`` of the choices."""

    async def embed(
        self, prompt: Sequence[int], pooling: str, *, request_id: str, cache_salt: str = ""
    ) -> RequestOutput:
        """``Engine.prepare_embed``: ``embedding`` of the prompt, not normalized."""

    async def abort(self, request_id: str) -> bool: ...

    async def stats(self) -> dict[str, Any]:
        """``EngineStats`` as a mapping, and ``programs``: how many run."""

    async def tree(self, most: int) -> dict[str, Any]:
        """``Engine.snapshot``, and ``stats`` as they are at the same moment."""

    async def runs(self, known: Sequence[int]) -> dict[str, Any]:
        """The programs that run and the last that ended, but for those that ended and are known; see ``radixrt.engine.runs``."""

    async def flush_cache(self) -> int: ...

    def programs(self, peer: str, receive: Callable[[str], None]) -> ProgramLink:
        """Open a channel; ``receive`` is called on this loop with each message of the engine, and with an ``error`` event when it dies."""
