"""EngineConfig owns every setting of an engine; command-line flags are generated from its fields.

Invariants: frozen, validated on construction, no other module keeps a default of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from radixrt.errors import InvalidRequest, unknown_field

POLICIES = ("lpm", "dfs-weight", "fcfs", "priority")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def _setting(default: Any, help: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Token counts are tokens, sizes are bytes unless the name says otherwise."""

    model: str | None = _setting(
        None, "model directory, .gguf file or hub id; nothing: the embedded SmolLM2-135M-Instruct"
    )
    max_total_tokens: int | None = _setting(
        None, "tokens the KV pool holds; nothing: as many as fit kv_memory_fraction of free memory, at most 262144"
    )
    max_model_len: int | None = _setting(
        None,
        "longest prompt + output in tokens; nothing: what the model was trained for, or the pool where that is smaller",
    )
    max_running_requests: int = _setting(64, "most sequences that decode in one batch")
    max_waiting_requests: int = _setting(65536, "most sequences waiting; one more is refused")
    chunked_prefill_size: int = _setting(512, "most tokens of one step (decodes + prefill chunks)")
    page_size: int = _setting(1, "tokens of one KV page; prefixes are shared in whole pages")
    disable_radix_cache: bool = _setting(False, "keep no KV after a request ends")
    schedule_policy: str = _setting("lpm", "order of waiting requests", choices=POLICIES)
    max_wait_steps: int = _setting(512, "a request passed over for this many steps goes first (no starvation)")
    dtype: str = _setting(
        "auto", "computation dtype; auto: float32 on a CPU, the model's own elsewhere", choices=DTYPES
    )
    kv_dtype: str = _setting("auto", "dtype of cached keys and values; auto: the computation dtype", choices=DTYPES)
    kv_memory_fraction: float = _setting(
        0.3, "share of free memory the KV pool may take when max_total_tokens is not given"
    )
    threads: int | None = _setting(None, "CPU threads of the forward pass; nothing: the physical cores")
    seed: int = _setting(0, "seeds requests that bring none; the same requests in the same order give the same samples")
    max_stop_strings: int = _setting(128, "most stop strings of one request")
    max_stop_length: int = _setting(1024, "most characters of one stop string")
    max_logprobs: int = _setting(64, "most alternatives listed per token")
    max_logit_bias: int = _setting(1024, "most logit_bias entries of one request")
    max_n: int = _setting(128, "most samples of one request")
    chat_template: str | None = _setting(None, "file with a jinja chat template to use instead of the model's own")
    check_integrity: bool = _setting(False, "verify tree, pool and locks after every step (slow; for tests)")

    def __post_init__(self) -> None:
        for name in ("max_total_tokens", "max_model_len", "threads"):
            value = getattr(self, name)
            if value is not None:
                _require_int(name, value, 1)
        for name in (
            "max_running_requests",
            "max_waiting_requests",
            "chunked_prefill_size",
            "page_size",
            "max_wait_steps",
            "max_stop_strings",
            "max_stop_length",
            "max_n",
        ):
            _require_int(name, getattr(self, name), 1)
        for name in ("max_logprobs", "max_logit_bias"):
            _require_int(name, getattr(self, name), 0)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidRequest("seed", f"={self.seed!r}: must be an integer")
        for name in ("disable_radix_cache", "check_integrity"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(name, f"={getattr(self, name)!r}: must be true or false")
        for name, valid in (("schedule_policy", POLICIES), ("dtype", DTYPES), ("kv_dtype", DTYPES)):
            if getattr(self, name) not in valid:
                raise InvalidRequest(name, f"={getattr(self, name)!r}: must be one of {', '.join(valid)}")
        if not 0.0 < self.kv_memory_fraction <= 1.0:
            raise InvalidRequest("kv_memory_fraction", f"={self.kv_memory_fraction}: must be above 0 and at most 1")

    @classmethod
    def from_kwargs(cls, **settings: Any) -> EngineConfig:
        """Build from keyword settings; an unknown one is an error naming the nearest valid one."""
        valid = {f.name for f in fields(cls)}
        for name in settings:
            if name not in valid:
                raise unknown_field("EngineConfig", name, valid)
        return cls(**settings)


def _require_int(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InvalidRequest(name, f"={value!r}: must be an integer of at least {low}")
