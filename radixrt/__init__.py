"""radixrt: a radix-tree prefix-caching runtime for language models.

from radixrt import Engine, SamplingParams

with Engine() as engine:
    print(engine.generate("The capital of France is", SamplingParams(temperature=0))[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixrt.config import EngineConfig
    from radixrt.engine.async_engine import AsyncEngine
    from radixrt.engine.core import Engine
    from radixrt.engine.stats import EngineStats
    from radixrt.errors import EngineClosed, InvalidRequest, ModelError, RadixrtError
    from radixrt.grammar.constraint import Constraint, Tag
    from radixrt.grammar.errors import UnsupportedConstraint
    from radixrt.model.tokenizer import Tokenizer, load_tokenizer
    from radixrt.request import (
        FinishReason,
        OutputDelta,
        PositionLogprobs,
        RequestOutput,
        SampleOutput,
        SamplingParams,
        TokenLogprob,
    )

__version__ = "0.1.0"

_HOME = {
    "EngineConfig": "radixrt.config",
    "AsyncEngine": "radixrt.engine.async_engine",
    "Engine": "radixrt.engine.core",
    "EngineStats": "radixrt.engine.stats",
    "Constraint": "radixrt.grammar.constraint",
    "Tag": "radixrt.grammar.constraint",
    "UnsupportedConstraint": "radixrt.grammar.errors",
    "EngineClosed": "radixrt.errors",
    "InvalidRequest": "radixrt.errors",
    "ModelError": "radixrt.errors",
    "RadixrtError": "radixrt.errors",
    "Tokenizer": "radixrt.model.tokenizer",
    "load_tokenizer": "radixrt.model.tokenizer",
    "FinishReason": "radixrt.request",
    "OutputDelta": "radixrt.request",
    "PositionLogprobs": "radixrt.request",
    "RequestOutput": "radixrt.request",
    "SampleOutput": "radixrt.request",
    "SamplingParams": "radixrt.request",
    "TokenLogprob": "radixrt.request",
}

__all__ = [
    "AsyncEngine",
    "Constraint",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "InvalidRequest",
    "ModelError",
    "OutputDelta",
    "PositionLogprobs",
    "RadixrtError",
    "RequestOutput",
    "SampleOutput",
    "SamplingParams",
    "Tag",
    "TokenLogprob",
    "Tokenizer",
    "UnsupportedConstraint",
    "__version__",
    "load_tokenizer",
]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: ``import radixrt`` alone loads neither torch nor a model."""
    if name not in _HOME:
        raise AttributeError(f"module 'radixrt' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
