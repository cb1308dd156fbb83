"""The embedded model on the native kernels: no way to run it changes a token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from radixrt import Engine, SamplingParams
from radixrt.ops.native import native
from tests.test_real_model import TOPICS

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(native is None, reason="radixrt was installed without a C++ compiler"),
]
PROMPTS = [f"Once upon a time there was a story about {topic}." for topic in TOPICS]
PREFIX = "The following is a list of questions and short, correct answers about geography. " * 12
ASKED = [*PROMPTS[:12], *(PREFIX + prompt for prompt in PROMPTS[:8])]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24)
    if index % 3
    else SamplingParams(temperature=1, seed=index, max_tokens=24)
    for index in range(len(ASKED))
]


def run(batched: bool = True, **settings: Any) -> list[list[int]]:
    with Engine(**{"max_total_tokens": 16384, "check_integrity": True, "kernels": "native", **settings}) as engine:
        assert engine.model_info.kernels.startswith("native")
        if batched:
            outputs = engine.generate(ASKED, PARAMS)
        else:
            outputs = [engine.generate(prompt, params)[0] for prompt, params in zip(ASKED, PARAMS, strict=True)]
        if settings.get("max_total_tokens") == 400:
            assert engine.stats().preemptions > 0
        return [list(output.token_ids) for output in outputs]


@pytest.fixture(scope="module")
def alone() -> Iterator[list[list[int]]]:
    """Each prompt by itself, without a cache."""
    yield run(batched=False, disable_radix_cache=True)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"threads": 1},
        {"disable_radix_cache": True},
        {"chunked_prefill_size": 16},
        {"max_total_tokens": 400, "max_model_len": 400},
        {"page_size": 16},
        {"speculation": 6},
    ],
    ids=str,
)
def test_tokens_depend_on_nothing_but_the_request(alone: list[list[int]], settings: dict[str, Any]) -> None:
    assert run(**settings) == alone


@pytest.mark.parametrize("kv_dtype", ["int8", "float16"])
def test_so_it_is_with_other_keys_and_values(kv_dtype: str) -> None:
    alone = run(batched=False, disable_radix_cache=True, kv_dtype=kv_dtype)
    assert run(kv_dtype=kv_dtype) == alone
    assert run(kv_dtype=kv_dtype, chunked_prefill_size=16) == alone


def test_dtypes_that_native_kernels_do_not_compute_are_refused() -> None:
    with pytest.raises(Exception, match="kernels=native: dtype=bfloat16 is computed by torch"):
        Engine(kernels="native", dtype="bfloat16")
    for kv_dtype in ("int8", "int16"):
        with pytest.raises(Exception, match=f"kv_dtype={kv_dtype}: only the native CPU kernels"):
            Engine(kernels="torch", kv_dtype=kv_dtype)
