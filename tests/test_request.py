"""Every parameter is refused outside its range, by its name."""

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from radixrt.config import EngineConfig
from radixrt.engine.inputs import split_prompts, to_tokens
from radixrt.errors import InvalidRequest, shown
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
    ("repetition_penalty", 0, "repetition_penalty=0: must be at least 0.01"),
    ("repetition_penalty", 1e-249, "repetition_penalty=1e-249"),
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
    ("max_total_tokens", 2**31 + 5, "max_total_tokens=2147483653: must be at most 2147483647"),
    ("kv_memory_fraction", "x", "kv_memory_fraction='x': must be a finite number"),
    ("kv_memory_fraction", None, "kv_memory_fraction=None"),
    ("kv_memory_fraction", True, "kv_memory_fraction=True"),
    ("chat_template", 5, "chat_template=5: must be the path of a file"),
    ("chat_template", "a\0b", "chat_template='a"),
    ("model", 5, "model=5: must be a directory"),
    ("threads", 2**31, "threads=2147483648: must be at most 1024"),
    ("dtype", np.array(["auto", "auto"]), "dtype=array"),
    ("page_sise", 1, "page_sise: EngineConfig has no such field; did you mean 'page_size'"),
]


@pytest.mark.parametrize(("name", "value", "message"), CONFIG)
def test_settings_refused_by_name(name: str, value: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        EngineConfig.from_kwargs(**{name: value})


SETTINGS = [field.name for field in dataclasses.fields(EngineConfig)]
PARAMS = [field.name for field in dataclasses.fields(SamplingParams)]


class Liar(Sequence[Any]):
    """A list that is wrong about its length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: Any) -> Any:
        raise KeyError(at)


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


HOSTILE: dict[str, Any] = {
    "huge": 10**400,
    "hugest": 10**5000,
    "minus hugest": -(10**5000),
    "nested": [[10**5000]],
    "bytes": b"x",
    "object": object(),
    "unshowable": Unshowable(),
    "complex": 1j,
    "array": np.array([[1.5, 2], [3, 4]]),
    "scalar": np.array(5),
    "text array": np.array([["a"]]),
    "nan": np.float32("nan"),
    "type": int,
    "range": range(2**70),
    "negative length": Liar(-1),
    "long liar": Liar(2**70),
    "liar": Liar(3),
    "nul": "a\0b",
}
HOSTILE["itself"] = []
HOSTILE["itself"].append(HOSTILE["itself"])


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_nothing_but_an_invalid_request_comes_of_a_hostile_value(value: Any) -> None:
    assert len(shown(value)) <= 80
    assert "\n" not in shown(value)
    for cls, names in ((SamplingParams, PARAMS), (EngineConfig, SETTINGS)):
        for name in names:
            try:
                cls(**{name: value})
            except InvalidRequest as error:
                assert str(error).startswith(name)
                assert len(str(error)) < 300
            else:  # what is taken all the same
                assert (name, value) == ("stop", "a\0b")
    if type(value).__hash__:
        with pytest.raises(InvalidRequest, match="logit_bias"):
            SamplingParams(logit_bias={value: 1})
    with pytest.raises(InvalidRequest, match=r"logit_bias\[5\]"):
        SamplingParams(logit_bias={5: value})
    for inner in (value, [1, value]):
        if isinstance(inner, str):
            continue
        with pytest.raises(InvalidRequest, match=r"prompt|messages"):
            for prompt in split_prompts(inner):
                to_tokens(prompt, None, 100)  # type: ignore[arg-type]


def test_a_hostile_field_name_is_cut_short() -> None:
    with pytest.raises(InvalidRequest) as info:
        SamplingParams.from_dict({"x" * 10**6: 1})
    assert len(str(info.value)) < 500


@pytest.mark.parametrize("values", [None, 3, "max_tokens", [("n", 1)], {3: 1}, {10**5000: 1}])
def test_from_dict_wants_an_object(values: Any) -> None:
    with pytest.raises(InvalidRequest, match="SamplingParams"):
        SamplingParams.from_dict(values)


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("max_tokens", np.int64(5), 5),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", np.int8(2), 2.0),
        ("top_p", Fraction(1, 2), 0.5),
        ("stop_token_ids", np.array([1, 2]), (1, 2)),
        ("stop_token_ids", range(3), (0, 1, 2)),
        ("logit_bias", {np.int64(5): np.float32(0.5)}, {5: 0.5}),
    ],
)
def test_other_libraries_numbers_become_plain_ones(name: str, value: Any, plain: Any) -> None:
    found = getattr(SamplingParams(**{name: value}), name)
    assert found == plain
    assert type(found) is type(plain) or isinstance(plain, dict)
    for part in (
        found if isinstance(found, tuple) else [*found, *found.values()] if isinstance(plain, dict) else [found]
    ):
        assert type(part) in (int, float)


def test_numbers_are_shown_as_numbers() -> None:
    with pytest.raises(InvalidRequest, match=r"^max_tokens=-3: must be at least 0$"):
        SamplingParams(max_tokens=np.int64(-3))


CHANGES: list[Callable[[Any], object]] = [
    lambda p: p.logit_bias.__setitem__(5, math.nan),
    lambda p: p.logit_bias.update({"a": 1}),
    lambda p: p.logit_bias.clear(),
    lambda p: setattr(p.logit_bias, "_items", {}),
    lambda p: delattr(p.logit_bias, "_items"),
    lambda p: setattr(p, "n", 0),
    lambda p: p.stop.append(""),
    lambda p: p.stop_token_ids.append("a"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_cannot_be_changed(change: Callable[[Any], object]) -> None:
    params = SamplingParams(logit_bias={5: 1}, stop=["a"], stop_token_ids=[3])
    with pytest.raises((AttributeError, TypeError)):
        change(params)
    assert params == SamplingParams(logit_bias={5: 1}, stop=["a"], stop_token_ids=[3])


def test_parameters_do_not_share_what_they_were_made_of() -> None:
    bias, stop, ids = {5: 1.0}, ["a"], np.array([3])
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=ids)
    bias[6], ids[0] = math.nan, -1
    stop.append("")
    assert params == SamplingParams(logit_bias={5: 1}, stop=("a",), stop_token_ids=(3,))


def test_parameters_are_values() -> None:
    params = SamplingParams(logit_bias={5: 1, 7: -2}, stop="a", temperature=0.5)
    same = SamplingParams(logit_bias={7: -2, 5: 1}, stop=["a"], temperature=0.5)
    assert {params: 1}[same] == 1
    for copied in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), copy.copy(params)):
        assert copied == params
        assert hash(copied) == hash(params)
    assert dataclasses.replace(params, n=2) == SamplingParams(logit_bias={5: 1, 7: -2}, stop="a", temperature=0.5, n=2)
    with pytest.raises(InvalidRequest, match="n=0"):
        dataclasses.replace(params, n=0)
    assert dataclasses.asdict(params)["logit_bias"] == {5: 1.0, 7: -2.0}
    assert eval(repr(params), {"SamplingParams": SamplingParams}) == params
    assert pickle.loads(pickle.dumps(EngineConfig(seed=3))) == EngineConfig(seed=3)


def test_errors_can_be_pickled() -> None:
    with pytest.raises(InvalidRequest) as info:
        SamplingParams(n=0)
    again = pickle.loads(pickle.dumps(info.value))
    assert (str(again), again.field) == (str(info.value), "n")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (np.array(5), "prompts: must be text"),
        (range(2**70), "prompts has far too many elements"),
        (Liar(-1), "prompts: has no length"),
        (Liar(3), "prompts: cannot be read as a list"),
        ([1.5, 2], r"prompt\[0\]=1.5: must be a token id"),
        ([np.float32(1.5)], r"prompt\[0\]=1.5: must be a token id"),
        ([True], r"prompt\[0\]=True"),
        ([1, "a"], r"prompt\[1\]='a'"),
        ([1, 10**5000], r"prompt\[1\]=an integer of 16610 bits: is not in the vocabulary"),
        ([np.int64(-1)], r"prompt\[0\]=-1: is not in the vocabulary"),
        (np.array([1.0]), r"prompt\[0\]=1.0: must be a token id"),
        (np.zeros((2, 2, 2)), r"prompt: must be a list, not an array of 2 dimensions"),
        ([], None),
    ],
)
def test_prompts_refused(prompt: Any, message: str | None) -> None:
    if message is None:
        assert split_prompts(prompt) == []
        return
    with pytest.raises(InvalidRequest, match=message):
        for each in split_prompts(prompt):
            to_tokens(each, None, 100)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt",
    [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), np.array([1, 2], dtype=np.int32), [np.int64(1), np.uint8(2)]],
)
def test_prompts_taken_are_copied(prompt: Any) -> None:
    (one,) = split_prompts(prompt)
    tokens = to_tokens(one, None, 100)  # type: ignore[arg-type]
    assert tokens.tolist() == [1, 2]
    assert tokens.dtype == np.int32
    assert not np.shares_memory(tokens, np.asarray(prompt))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "is not UTF-8"),
        (b"{% if %}", "chat template line 1"),
        (None, "No such file"),
    ],
)
def test_a_wrong_template_file(content: bytes | None, message: str, tmp_path: Any) -> None:
    from radixrt.engine.inputs import read_template
    from radixrt.errors import RadixrtError

    if content is not None:
        (tmp_path / "t").write_bytes(content)
    with pytest.raises(RadixrtError, match=message):
        read_template(str(tmp_path / "t"))
    (tmp_path / "t").write_bytes(b"\xef\xbb\xbf{{ messages }}")
    assert read_template(str(tmp_path / "t")) == "{{ messages }}"
