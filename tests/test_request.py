"""Every parameter is refused outside its range, by its name."""

import math

import pytest

from radixrt.config import EngineConfig
from radixrt.errors import InvalidRequest
from radixrt.request import SamplingParams

REFUSED = [
    ("max_tokens", -3, "max_tokens=-3: must be at least 0"),
    ("max_tokens", 1.5, "max_tokens=1.5: must be an integer"),
    ("max_tokens", True, "max_tokens=True"),
    ("min_tokens", -1, "min_tokens=-1"),
    ("min_tokens", 200, "min_tokens=200: must be at most max_tokens=128"),
    ("temperature", -0.1, "temperature=-0.1: must be at least 0"),
    ("temperature", math.nan, "temperature=nan: must be a finite number"),
    ("temperature", math.inf, "temperature=inf"),
    ("temperature", "hot", "temperature='hot'"),
    ("top_k", -2, "top_k=-2"),
    ("top_p", 0.0, "top_p=0.0: must be above 0"),
    ("top_p", 1.01, "top_p=1.01"),
    ("top_p", math.nan, "top_p=nan"),
    ("min_p", -0.5, "min_p=-0.5"),
    ("min_p", 1.5, "min_p=1.5"),
    ("presence_penalty", 2.5, "presence_penalty=2.5"),
    ("frequency_penalty", -2.5, "frequency_penalty=-2.5"),
    ("repetition_penalty", 0, "repetition_penalty=0: must be above 0"),
    ("repetition_penalty", math.nan, "repetition_penalty=nan"),
    ("logit_bias", {5: math.nan}, r"logit_bias\[5\]=nan"),
    ("logit_bias", {5: 101}, r"logit_bias\[5\]=101"),
    ("logit_bias", {-1: 1}, "logit_bias=-1"),
    ("logit_bias", {"5": 1}, "logit_bias='5'"),
    ("logit_bias", [1], "logit_bias"),
    ("seed", 1.0, "seed=1.0"),
    ("seed", 2**64, "seed=18446744073709551616"),
    ("n", 0, "n=0"),
    ("stop", "", "stop"),
    ("stop", ["a", ""], "stop"),
    ("stop", ["a", 3], "stop has 3"),
    ("stop", 7, "stop=7"),
    ("stop_token_ids", [-1], "stop_token_ids=-1"),
    ("stop_token_ids", "ab", "stop_token_ids='ab': must be a list"),
    ("stop_token_ids", [2**63], "stop_token_ids"),
    ("ignore_eos", 1, "ignore_eos=1"),
    ("logprobs", -1, "logprobs=-1"),
    ("prompt_logprobs", "all", "prompt_logprobs='all'"),
    ("temprature", 1, "temprature: SamplingParams has no such field; did you mean 'temperature'"),
    ("zzz", 1, "zzz: SamplingParams has no such field; valid names are"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_refused_by_name(name: str, value: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as info:
        SamplingParams(**{name: value})
    assert len(str(info.value)) < 500 and "\n" not in str(info.value)


def test_accepted_at_the_ends_of_the_ranges() -> None:
    SamplingParams(max_tokens=0, temperature=0, top_k=-1, top_p=1, min_p=1, stop="a", n=1, seed=-(2**63))
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams.from_dict({"top_k": 4}).top_k == 4


CONFIG = [
    ("page_size", 0, "page_size=0"),
    ("max_running_requests", -1, "max_running_requests=-1"),
    ("chunked_prefill_size", 0, "chunked_prefill_size=0"),
    ("schedule_policy", "random", "schedule_policy='random': must be one of lpm"),
    ("dtype", "int8", "dtype='int8'"),
    ("kv_memory_fraction", 0.0, "kv_memory_fraction=0.0"),
    ("kv_memory_fraction", math.nan, "kv_memory_fraction=nan"),
    ("threads", 0, "threads=0"),
    ("max_total_tokens", 1.5, "max_total_tokens=1.5"),
    ("page_sise", 1, "page_sise: EngineConfig has no such field; did you mean 'page_size'"),
]


@pytest.mark.parametrize(("name", "value", "message"), CONFIG)
def test_settings_refused_by_name(name: str, value: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        EngineConfig.from_kwargs(**{name: value})
