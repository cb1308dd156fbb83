"""EngineConfig owns every setting of an engine; command-line flags are generated from its fields.

Invariants: frozen, validated on construction, no other module keeps a default of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

from radixrt.checks import flag, integer, number
from radixrt.errors import InvalidRequest, shown, unknown_field

POLICIES = ("lpm", "dfs-weight", "fcfs", "priority")
_MOST = 2**31 - 1  # slots, pages and positions are int32
_MOST_THREADS = 1024  # torch takes more, and every one of them costs memory and time
_MOST_DRAFTS = 64  # a sequence's share of one step
BACKENDS = ("auto", "native", "reference")
KERNELS = ("auto", "native", "torch")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int16", "int8", "fp8")


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
    chunked_prefill_size: int = _setting(
        512, "tokens of one step: every running decode, then prefill in what is left (at least 1)"
    )
    page_size: int = _setting(1, "tokens of one KV page; prefixes are shared in whole pages")
    disable_radix_cache: bool = _setting(False, "keep no KV after a request ends")
    schedule_policy: str = _setting("lpm", "order of waiting requests", choices=POLICIES)
    max_wait_steps: int = _setting(512, "a request passed over for this many steps goes first (no starvation)")
    program_order: bool = _setting(
        True, "a started program's next step goes before a new program's first (not with policies fcfs and priority)"
    )
    program_eviction: bool = _setting(True, "evict what a live program will use again last (not with policy fcfs)")
    program_admission: bool = _setting(
        True, "start a program only when the KV of all started ones fits (not with policies fcfs and priority)"
    )
    program_leases: bool = _setting(
        True, "keep the KV of a program that waits for a tool, for as long as that tool takes"
    )
    dtype: str = _setting(
        "auto",
        "computation dtype; auto: float32 on a CPU, the model's own elsewhere (in 16 bits, rounding can depend on the batch)",
        choices=DTYPES,
    )
    kv_dtype: str = _setting(
        "auto",
        "dtype of cached keys and values; auto: int16 with native kernels, else the computation dtype; "
        "int16: codes of 12 to 15 bits with a scale for each token and head, which attention multiplies as they are "
        "(native kernels only); int8: a scale likewise, nearly twice the tokens (native kernels only); "
        "fp8: e4m3 without a scale, twice the tokens of 16 bits (not with native kernels)",
        choices=KV_DTYPES,
    )
    kernels: str = _setting(
        "auto",
        "what computes the model; native: the CPU kernels on weights as stored; torch: the reference, on weights in dtype; "
        "auto: native on a CPU where it was built and dtype is auto or float32",
        choices=KERNELS,
    )
    kv_memory_fraction: float = _setting(
        0.3,
        "share of free memory (within the control group) of the KV pool when max_total_tokens is not given; "
        "on a GPU, of what the weights and the largest step leave free, as measured at start",
    )
    threads: int | None = _setting(None, "CPU threads of the forward pass; nothing: the physical cores")
    seed: int = _setting(0, "seeds requests that bring none; the same requests in the same order give the same samples")
    max_stop_strings: int = _setting(128, "most stop strings of one request")
    max_stop_length: int = _setting(1024, "most characters of one stop string")
    max_logprobs: int = _setting(64, "most alternatives listed per token")
    max_logit_bias: int = _setting(1024, "most logit_bias entries of one request")
    max_n: int = _setting(128, "most samples of one request")
    max_choices: int = _setting(4096, "most choices scored in one request")
    chat_template: str | None = _setting(None, "file with a jinja chat template to use instead of the model's own")
    jump_forward: bool = _setting(
        True, "append text that a constraint forces without sampling it, in the tokenizer's own tokens"
    )
    speculation: int = _setting(
        0,
        "most tokens guessed ahead for a sequence, by what the cache or its own text had there before, and verified in one step: "
        "the same output, sooner where text repeats; 0: none",
    )
    overlap: bool | None = _setting(
        None,
        "compute the next step while the tokens of the last one are taken in: the same output; nothing: on a GPU, "
        "where the host would hold it up",
    )
    cuda_graphs: bool = _setting(
        True, "record the decode steps of a GPU at start and replay them (where its kernels can be recorded)"
    )
    compile: bool = _setting(
        False, "have torch compile the model: slow at first, sometimes faster (not with the native CPU kernels)"
    )
    grammar_backend: str = _setting(
        "auto", "what runs constraints; auto: native where it was built, else the Python reference", choices=BACKENDS
    )
    check_integrity: bool = _setting(False, "verify tree, pool and locks after every step (slow; for tests)")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_total_tokens", 1, _MOST),
            ("max_model_len", 1, _MOST),
            ("threads", 1, _MOST_THREADS),
            ("max_running_requests", 1, _MOST),
            ("max_waiting_requests", 1, _MOST),
            ("chunked_prefill_size", 1, _MOST),
            ("page_size", 1, _MOST),
            ("max_wait_steps", 1, _MOST),
            ("max_stop_strings", 1, _MOST),
            ("max_stop_length", 1, _MOST),
            ("max_n", 1, _MOST),
            ("max_choices", 1, _MOST),
            ("max_logprobs", 0, _MOST),
            ("speculation", 0, _MOST_DRAFTS),
            ("max_logit_bias", 0, _MOST),
            ("seed", -(2**63), 2**64 - 1),
        ):
            optional = name in ("max_total_tokens", "max_model_len", "threads")
            object.__setattr__(self, name, integer(name, getattr(self, name), low, high, optional=optional))
        fraction = number("kv_memory_fraction", self.kv_memory_fraction, 0.0, 1.0, above=True)
        object.__setattr__(self, "kv_memory_fraction", fraction)
        for name in (
            "disable_radix_cache",
            "program_order",
            "program_eviction",
            "program_admission",
            "program_leases",
            "jump_forward",
            "cuda_graphs",
            "compile",
            "check_integrity",
        ):
            flag(name, getattr(self, name))
        if self.overlap is not None:
            flag("overlap", self.overlap)
        for name, valid in (
            ("schedule_policy", POLICIES),
            ("dtype", DTYPES),
            ("kv_dtype", KV_DTYPES),
            ("kernels", KERNELS),
            ("grammar_backend", BACKENDS),
        ):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in valid:
                raise InvalidRequest(name, f"={shown(value)}: must be one of {', '.join(valid)}")
        for name, what in (("model", "a directory, a .gguf file or a hub id"), ("chat_template", "the path of a file")):
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, (str, os.PathLike)) or not str(value).strip() or "\0" in str(value)
            ):
                raise InvalidRequest(name, f"={shown(value)}: must be {what}")

    @classmethod
    def from_kwargs(cls, **settings: Any) -> EngineConfig:
        """Build from keyword settings; an unknown one is an error naming the nearest valid one."""
        valid = {f.name for f in fields(cls)}
        for name in settings:
            if name not in valid:
                raise unknown_field("EngineConfig", name, valid)
        return cls(**settings)
