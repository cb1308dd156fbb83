"""Turns what a caller may give as a prompt into token ids, and checks it against the model and the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from radixrt.cache.page_pool import IntArray
from radixrt.checks import items, length
from radixrt.config import EngineConfig
from radixrt.errors import InvalidRequest, shown
from radixrt.model.chat_template import MAX_SOURCE, ChatTemplate
from radixrt.model.tokenizer import Tokenizer
from radixrt.request import SamplingParams

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]

_CHARS_PER_TOKEN = 256  # no text of a context's length is longer than this a token


def read_template(path: str | None) -> str | None:
    """The chat template in ``path``, as text; ``None`` where none is given.

    Raises:
        InvalidRequest: there is no such file, or no text in it.
        ModelError: what is in it is no template.
    """
    if path is None:
        return None
    try:
        with Path(path).open("rb") as file:
            data = file.read(4 * MAX_SOURCE + 1)  # no more, whatever the file is
        source = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidRequest("chat_template", f"={shown(path)}: is not UTF-8") from None
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequest("chat_template", f"={shown(path)}: cannot be read ({reason})") from None
    ChatTemplate(source, name=f"chat_template={shown(path)}")
    return source


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt (text, ids or messages) as a list of one; a list of prompts as it is."""
    if isinstance(prompts, str):
        return [prompts]
    if not is_list(prompts):
        raise InvalidRequest(
            "prompts", f"must be text, token ids, chat messages or a list of these, not {type(prompts).__name__}"
        )
    if length("prompts", prompts) and isinstance(_first("prompts", prompts), (Mapping, Real)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts) if isinstance(prompts, np.ndarray) else list(items("prompts", prompts))


def to_tokens(prompt: Prompt, tokenizer: Tokenizer, context: int) -> IntArray:
    """Token ids of one prompt, int32; a copy.

    Raises:
        InvalidRequest: empty, of another type, or far too long to be worth tokenizing.
    """
    ids: Sequence[int]
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest("prompt", "is empty")
        if len(prompt) > context * _CHARS_PER_TOKEN:
            raise InvalidRequest(
                "prompt", f"has {len(prompt)} characters; context_length={context} tokens cannot hold it"
            )
        ids = tokenizer.encode(prompt)
    elif not is_list(prompt):
        raise InvalidRequest("prompt", f"must be text, token ids or chat messages, not {type(prompt).__name__}")
    elif length("prompt", prompt) and isinstance(_first("prompt", prompt), Mapping):
        ids = tokenizer.encode_chat(items("prompt", prompt))
    else:
        return _not_empty(to_ids("prompt", prompt, context))
    return _not_empty(np.array(ids, dtype=np.int32))


def to_ids(field: str, values: Sequence[Any], context: int) -> IntArray:
    """Token ids given as numbers, int32; a copy, because what the caller holds may change while the request runs.

    Raises:
        InvalidRequest: no list of ids, or longer than ``context``.
    """
    if not is_list(values):
        raise InvalidRequest(field, f"must be a list of token ids, not {type(values).__name__}")
    size = length(field, values)
    if size > context:
        raise InvalidRequest(field, f"has {size} tokens; context_length={context} must hold it and its output")
    ids = values if isinstance(values, np.ndarray) and values.ndim == 1 else items(field, values)
    known = _plain(ids)
    if known is not None:
        return known
    for at, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise InvalidRequest(f"{field}[{at}]", f"={shown(token)}: must be a token id")
        if not 0 <= int(token) < 2**31:
            raise InvalidRequest(f"{field}[{at}]", f"={shown(token)}: is not in the vocabulary")
    return np.array(ids, dtype=np.int32)


def _plain(ids: Any) -> IntArray | None:
    """``ids`` as int32 where they are the usual kind of list or array; ``None`` where each must be looked at."""
    if isinstance(ids, np.ndarray):
        if ids.dtype.kind not in "iu":
            return None
    elif not set(map(type, ids)) <= {int}:
        return None
    try:
        wide = np.array(ids, dtype=np.int64)
    except OverflowError:
        return None
    if len(wide) and not 0 <= int(wide.min()) <= int(wide.max()) < 2**31:
        return None
    return wide.astype(np.int32)


def _not_empty(ids: IntArray) -> IntArray:
    if len(ids) == 0:
        raise InvalidRequest("prompt", "is empty")
    return ids


def params_for(
    items: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """One ``SamplingParams`` for each of ``items``.

    Raises:
        InvalidRequest: neither one for all nor a list of one for each.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * len(items)
    if isinstance(params, Mapping) or not isinstance(params, Sequence):
        raise InvalidRequest("params", f"must be SamplingParams or a list of them, not {type(params).__name__}")
    if len(params) != len(items):
        raise InvalidRequest("params", f"has {len(params)} entries for {len(items)} prompts")
    return list(params)


def is_list(value: object) -> bool:
    """Whether it is a list of something, and no text."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _first(field: str, values: Any) -> Any:
    try:
        return values[0]
    except Exception as error:
        raise InvalidRequest(
            field, f": cannot be read as a list ({type(error).__name__}: {shown(str(error))})"
        ) from None


def check_ids(field: str, ids: IntArray, vocab: int) -> None:
    """Raises InvalidRequest where an id is outside the vocabulary."""
    wrong = np.flatnonzero(ids >= vocab)
    if len(wrong):
        raise InvalidRequest(f"{field}[{wrong[0]}]", f"={ids[wrong[0]]}: the vocabulary has ids 0 to {vocab - 1}")


def check_limits(params: SamplingParams, config: EngineConfig, vocab: int) -> None:
    """Raises InvalidRequest where parameters pass a limit of the engine or name ids outside the vocabulary."""
    for field, size, limit in (
        ("stop", len(params.stop), config.max_stop_strings),
        ("stop_token_ids", len(params.stop_token_ids), config.max_stop_strings),
        ("logit_bias", len(params.logit_bias), config.max_logit_bias),
        ("n", params.n, config.max_n),
        ("logprobs", params.logprobs or 0, config.max_logprobs),
        ("prompt_logprobs", params.prompt_logprobs or 0, config.max_logprobs),
    ):
        if size > limit:
            raise InvalidRequest(field, f" asks for {size}: at most {limit} are allowed")
    longest = max((len(stop) for stop in params.stop), default=0)
    if longest > config.max_stop_length:
        raise InvalidRequest(
            "stop", f" has a string of {longest} characters: at most {config.max_stop_length} are allowed"
        )
    for field, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token in ids:
            if token >= vocab:
                raise InvalidRequest(field, f" has {token}: the vocabulary has ids 0 to {vocab - 1}")
