"""What passes between a caller and the engine: sampling parameters in, deltas and outputs out.

Invariants: everything here is immutable and validated on construction; nothing here holds a tensor.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from radixrt.checks import FrozenMapping, flag, integer, items, number, strings
from radixrt.errors import InvalidRequest, shown, unknown_field

if TYPE_CHECKING:
    from radixrt.grammar.constraint import Constraint

_INT64 = 2**63 - 1
_TOKEN = 2**31 - 1
T = TypeVar("T")


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # aborted by its caller
    ERROR = "error"  # the request failed; ``RequestOutput.error`` says why


def _named_fields(cls: type[T]) -> type[T]:
    """Give a dataclass an ``__init__`` that answers an unknown field with the nearest valid name."""
    plain = cls.__init__
    valid = {f.name: None for f in fields(cls)}  # type: ignore[arg-type]

    @functools.wraps(plain)
    def init(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in valid:
                raise unknown_field(cls.__name__, name, valid)
        plain(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[assignment, method-assign]
    return cls


@_named_fields
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Every value is checked here; ids are checked against the vocabulary by the engine.

    Nothing of it can change afterwards: what was given is copied. It can be hashed, compared and pickled.

    Fields:
        max_tokens: most tokens to generate, at least 0 (0: only compute the prompt); ``None``: up to the context.
        min_tokens: end-of-sequence ids, stop ids and stop strings do not count before this many tokens.
        temperature: 0 is greedy. Range [0, 100].
        top_k: keep the k likeliest tokens; 0 or -1: all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches this. Range (0, 1].
        min_p: drop tokens less likely than this share of the likeliest. Range [0, 1].
        presence_penalty, frequency_penalty: subtracted from the logit of generated tokens, once / per
            occurrence (OpenAI's definition). Range [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens of prompt and output
            (Keskar et al. 2019, CTRL). Range [0.01, 100]; 1 is off.
        logit_bias: token id -> value added to its logit. Range [-100, 100].
        seed: fixes this request's samples whatever else runs beside it; ``None``: drawn from the engine's seed.
        n: samples of the same prompt; the prompt is computed once.
        stop: strings that end the sample; the output ends before the first of them.
        include_stop: keep the matched stop string in the text.
        stop_token_ids: ids that end the sample (kept out of the text, present in ``token_ids``).
        ignore_eos: do not end at the model's end-of-sequence ids.
        logprobs: list the k likeliest alternatives of every generated token with log-probabilities of the
            model's own distribution (before bias, penalties and temperature); 0: only the token's own.
        prompt_logprobs: the same for every prompt token but the first, whether cached or not.
        skip_special_tokens: leave special tokens out of the text.
        constraint: what the whole output must be, a ``Constraint`` (or its ``to_dict`` form); enforced, complete within
            ``max_tokens``, or refused before anything is sampled.

    Raises:
        InvalidRequest: a value out of its range, or an unknown field (naming the nearest valid one).
    """

    max_tokens: int | None = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: FrozenMapping({}))
    seed: int | None = None
    n: int = 1
    stop: Sequence[str] = ()
    include_stop: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name, low, high, optional in (
            ("max_tokens", 0, _INT64, True),
            ("min_tokens", 0, _INT64, False),
            ("top_k", -1, _INT64, False),
            ("seed", -(2**63), 2**64 - 1, True),
            ("n", 1, _INT64, False),
            ("logprobs", 0, _INT64, True),
            ("prompt_logprobs", 0, _INT64, True),
        ):
            put(name, integer(name, getattr(self, name), low, high, optional=optional))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"={self.min_tokens}: must be at most max_tokens={self.max_tokens}")
        for name, least, most, above in (
            ("temperature", 0.0, 100.0, False),
            ("top_p", 0.0, 1.0, True),
            ("min_p", 0.0, 1.0, False),
            ("presence_penalty", -2.0, 2.0, False),
            ("frequency_penalty", -2.0, 2.0, False),
            ("repetition_penalty", 0.01, 100.0, False),
        ):
            put(name, number(name, getattr(self, name), least, most, above=above))
        for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
            flag(name, getattr(self, name))
        put("stop", strings("stop", self.stop))
        tokens = items("stop_token_ids", self.stop_token_ids)
        put("stop_token_ids", tuple(integer("stop_token_ids", token, 0, _TOKEN) for token in tokens))
        put("logit_bias", _biases(self.logit_bias))
        if self.constraint is not None:
            put("constraint", _constraint(self.constraint))

    def with_seed(self, seed: int) -> SamplingParams:
        """The same parameters with another seed; the others are not checked again."""
        seeded = copy.copy(self)
        object.__setattr__(seeded, "seed", integer("seed", seed, -(2**63), 2**64 - 1))
        return seeded

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping with field names as keys (a JSON object, say)."""
        if not isinstance(values, Mapping):
            raise InvalidRequest("SamplingParams", f"must be an object of fields, not {type(values).__name__}")
        for name in values:
            if not isinstance(name, str):
                raise InvalidRequest("SamplingParams", f"field names must be strings, not {shown(name)}")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token, its log-probability (natural log) and its rank (1 = likeliest) at its position."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one position: the token that stands there, and the k likeliest, likeliest first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One finished sample of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    logprobs: tuple[PositionLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. Times are seconds; ``text``, ``token_ids``, ``finish_reason`` are those of the first sample.

    ``cached_tokens`` and ``computed_tokens`` are of the first sample, and together the prompt as far as it was reached: all of it,
    unless the request was aborted or failed before. ``recomputed_tokens`` were computed again because a preempted request's KV had been evicted.

    Where choices were scored, ``scores`` has for each choice the natural log-probabilities of its tokens (``None`` if the request
    was aborted or failed), there is a sample without text for each choice, ``prompt_token_ids`` is the prefix, and the counts are sums over the
    choices, each of which is a prompt of its own: prefix and choice. Where an embedding was asked for, ``embedding`` is the vector.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    samples: tuple[SampleOutput, ...]
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    forced_tokens: int = 0
    preemptions: int = 0
    queue_time: float = 0.0
    prefill_time: float = 0.0
    decode_time: float = 0.0
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    error: str | None = None
    scores: tuple[tuple[float, ...], ...] | None = None
    embedding: tuple[float, ...] | None = None

    @property
    def text(self) -> str:
        return self.samples[0].text if self.samples else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids if self.samples else ()

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason if self.samples else FinishReason.ERROR

    @property
    def stop_reason(self) -> str | int | None:
        return self.samples[0].stop_reason if self.samples else None

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...] | None:
        return self.samples[0].logprobs if self.samples else None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def completion_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one step added to one sample. ``output`` is set once, on the last delta of the whole request."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None


def _constraint(value: Any) -> Constraint:
    from radixrt.grammar.constraint import Constraint

    if isinstance(value, Mapping):
        return Constraint.from_dict(value)
    if not isinstance(value, Constraint):
        raise InvalidRequest("constraint", f"={shown(value)}: must be a Constraint")
    return value


def _biases(value: Any) -> FrozenMapping[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidRequest("logit_bias", f"={shown(value)}: must map token ids to numbers")
    try:
        pairs = list(value.items())
    except Exception as error:
        raise InvalidRequest("logit_bias", f": cannot be read ({type(error).__name__}: {shown(str(error))})") from None
    biases: dict[int, float] = {}
    for key, bias in pairs:
        token = integer("logit_bias", key, 0, _TOKEN)
        if token in biases:
            raise InvalidRequest("logit_bias", f" has the token {token} twice")
        biases[token] = number(f"logit_bias[{token}]", bias, -100.0, 100.0)
    return FrozenMapping(biases)
