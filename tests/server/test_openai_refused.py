"""What the OpenAI API refuses: every row is one field that is wrong, the field that the error names, and what it says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from aiohttp.test_utils import TestServer

from radixrt.errors import InvalidRequest
from radixrt.request import SamplingParams
from radixrt.server.errors import RequestFailed, failure_of
from radixrt.server.openai_requests import CHAT as CHAT_FIELDS
from radixrt.server.openai_requests import COMPLETION as COMPLETION_FIELDS
from radixrt.server.openai_requests import LATER, Rules, read_chat, read_completion
from tests.server.openai_serving import (
    CHAT,
    COMPLETIONS,
    HELLO,
    post,
    serving,
)


@pytest.fixture
async def server(local_client: Any) -> AsyncIterator[TestServer]:
    async with serving(local_client) as server:
        yield server


# ---- what is refused

IN_CHAT: list[tuple[dict[str, Any], str, str]] = [
    # fields, the param that the error names, and something that its message says
    ({"temperatur": 1}, "temperatur", "did you mean 'temperature'"),
    ({"temperature": "hot"}, "temperature", "'hot'"),
    ({"temperature": -1}, "temperature", "at least 0"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": True}, "top_p", "True"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 1.0}, "n", "integer"),
    ({"n": 100000}, "n", "100000"),
    ({"seed": 2**70}, "seed", "at most"),
    ({"seed": 10**400}, "seed", "bits"),
    ({"stop": [""]}, "stop", "at least one character"),
    ({"stop": 3}, "stop", "3"),
    ({"stop": ["x"] * 1000}, "stop", "1000"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    ({"stop_token_ids": [320]}, "stop_token_ids", "320"),
    ({"stop_token_ids": [2**63]}, "stop_token_ids", str(2**63)),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
    ({"logit_bias": {"320": 1}}, "logit_bias", "320"),
    ({"logit_bias": {str(2**63): 1}}, "logit_bias", str(2**63)),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
    ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias", "twice"),
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"logit_bias": {"1": 101}}, "logit_bias[1]", "at most 100"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -3}, "max_tokens", "=-3: must be at least 1"),
    ({"max_tokens": 1000}, "max_tokens", "context_length=512"),
    ({"max_completion_tokens": 1000}, "max_completion_tokens", "context_length=512"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "max_completion_tokens"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "at most"),
    ({"logprobs": 3}, "logprobs", "true or false"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs=true"),
    ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs", "1000"),
    ({"stream": "yes"}, "stream", "'yes'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge", "include_usage"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": None}, "messages", "missing"),
    ({"messages": "hi"}, "messages", "'hi'"),
    ({"messages": [3]}, "messages[0]", "object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "assistant"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "user"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "3"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "text"),
    ({"messages": [{"role": "user", "content": "x", "contnt": 1}]}, "messages[0].contnt", "content"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "context_length=512"),
    ({"messages": [{"role": "user", "content": "x" * 200_000}]}, "messages", "context_length=512"),
    ({"verbosity": "low"}, "verbosity", "later version"),
    ({"modalities": ["audio"]}, "modalities", "later version"),
    ({"audio": {"voice": "x"}}, "audio", "later version"),
    ({"prediction": {}}, "prediction", "later version"),
    ({"web_search_options": {}}, "web_search_options", "later version"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "cannot come with a request"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "not for a request"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs", "object"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt", "both"),
    ({"continue_final_message": True}, "continue_final_message", "assistant"),
    ({"echo": True}, "echo", "continue_final_message"),
    ({"user": 3}, "user", "string"),
    ({"metadata": "x"}, "metadata", "object"),
    ({"priority": "high"}, "priority", "'high'"),
    ({"cache_salt": 3}, "cache_salt", "3"),
    ({"model": 3}, "model", "string"),
    ({"regex": "a", "choice": ["b"]}, "choice", "and regex are both"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format", "regex are both given"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "structured_outputs.regex"),
    ({"structured_outputs": {}}, "structured_outputs", "regex"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "'regex'"),
    ({"regex": "("}, "regex", "("),
    ({"guided_regex": "("}, "guided_regex", "("),
    ({"regex": 3}, "regex", "string"),
    ({"regex": "a{1000}", "max_tokens": 3}, "max_tokens", "shortest"),
    ({"choice": []}, "choice", "at least one"),
    ({"substring": 3}, "substring", "must be a text, or an object"),
    ({"substring": " "}, "substring", "nothing in it"),
    ({"substring": {"unit": "words"}}, "substring.text", "is missing"),
    ({"substring": {"text": "a", "units": "words"}}, "substring.units", "'unit'"),
    ({"substring": {"text": "a", "unit": "word"}}, "substring.unit", "'words'"),
    ({"substring": {"text": 3}}, "substring.text", "must be a string, not int"),
    ({"substring": "a", "regex": "b"}, "substring", "and regex are both"),
    ({"structured_outputs": {"substring": " "}}, "structured_outputs.substring", "nothing in it"),
    ({"structured_outputs": {"substring": {"text": "a", "max_length": 0}}}, "structured_outputs.substring.max_length", "at least 1"),
    ({"guided_choice": "yes"}, "guided_choice", "list"),
    ({"json_schema": 3}, "json_schema", "3"),
    ({"json_schema": "{"}, "json_schema", "not JSON"),
    ({"guided_json": {"type": "strin"}}, "guided_json", "strin"),
    ({"guided_json": {"properties": {"a": {"pattern": "("}}}}, "guided_json", "/properties/a"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", "not"),
    ({"grammar": "root = 3"}, "grammar", ""),
    ({"constraint": {"type": "regx"}}, "constraint.type", "regex"),
    ({"response_format": "json"}, "response_format", "object"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema", "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}}, "response_format.json_schema.strict", "true or false"),
    ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema", "type=text"),
]  # fmt: skip

IN_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "[]"),
    ({"prompt": 3}, "prompt", "3"),
    ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
    ({"prompt": ["a", [1]]}, "prompt[1]", "all"),
    ({"prompt": [[1], []]}, "prompt[1]", "empty"),
    ({"prompt": [1, "a"]}, "prompt[1]", "'a'"),
    ({"prompt": [1, -1]}, "prompt[1]", "-1"),
    ({"prompt": [1, 2**63]}, "prompt[1]", str(2**63)),
    ({"prompt": [1, 10**30]}, "prompt[1]", "vocabulary"),
    ({"prompt": [1, 320]}, "prompt[1]", "320"),
    ({"prompt": [1.5]}, "prompt[0]", "1.5"),
    ({"prompt": [True]}, "prompt[0]", "True"),
    ({"prompt": HELLO}, "prompt", "/v1/chat/completions"),
    ({"prompt": [HELLO]}, "prompt[0]", "token ids"),
    ({"prompt": ["a"] * 3000}, "prompt", "2048"),
    ({"prompt": [9] * 512, "max_tokens": 1}, "max_tokens", "context_length=512"),
    ({"prompt": [9] * 513}, "prompt", "context_length=512"),
    ({"suffix": "x"}, "suffix", "'x'"),
    ({"best_of": 3}, "best_of", "n=1"),
    ({"best_of": "x"}, "best_of", "'x'"),
    ({"logprobs": True}, "logprobs", "True"),
    ({"logprobs": -1}, "logprobs", "at least 0"),
    ({"logprobs": 1, "echo": True, "stream": True}, "logprobs", "echo"),
    ({"max_tokens": -1}, "max_tokens", "at least 0"),
    ({"messages": HELLO}, "messages", "valid names"),
    ({"tools": [{}]}, "tools", "/v1/chat/completions"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "/v1/chat/completions"),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_is_refused(server: TestServer, local_client: Any, path: str) -> None:
    rows, good = (IN_CHAT, {"messages": HELLO}) if path == CHAT else (IN_COMPLETIONS, {"prompt": "a"})
    wrong = []
    for fields, param, said in rows:
        for stream in ({}, {"stream": True}):
            if stream and "stream_options" in fields:
                continue
            short = {} if "max_completion_tokens" in fields else {"max_tokens": 5}
            status, body, _ = await post(server, path, {**stream, **short, **good, **fields})
            error = body["error"] if isinstance(body, dict) and "error" in body else {}
            message = error.get("message", "")
            found = (status, error.get("param"), error.get("type"), message.startswith(param), said in message)
            if found != (400, param, "invalid_request_error", True, True):
                wrong.append((fields, param, said, status, body))
    assert not wrong
    assert (await local_client.stats())["running"] == 0
    assert (await post(server, path, {**good, "max_tokens": 2}))[0] == 200


SUBFIELDS = [
    "type",
    "role",
    "content",
    "json_schema",
    "schema",
    "name",
    "regex",
    "json",
    "choice",
    "include_usage",
    "1",
]
BODIES: list[tuple[bytes, str]] = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"[]", "object"),
    (b"null", "object"),
    (b'{"a": NaN}', "NaN"),
    (b'{"temperature": Infinity}', "Infinity"),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "finite"),
    (b'{"temperature": 1, "temperature": 2}', "twice"),
    (b'{"messages": [{"role": "user", "role": "user"}]}', "twice"),
    (b'{"messages": "\xff"}', "UTF-8"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "lone surrogate U+D800"),
    (b'{"\\udfff": 1}', "lone surrogate U+DFFF"),
    (b'{"regex": "\\ud83d"}', "lone surrogate"),
    (b"[" * 100_000, "nested"),
    (b'{"a":' * 500 + b"1" + b"}" * 500, "nested"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "JSON"),
]


@pytest.mark.parametrize(("body", "said"), BODIES, ids=lambda value: repr(value)[:30])
async def test_bodies_that_are_no_requests(server: TestServer, body: bytes, said: str) -> None:
    for path in (CHAT, COMPLETIONS):
        if path == COMPLETIONS and b"messages" in body and b"1e999" in body:
            continue
        status, answer, _ = await post(server, path, body)
        assert status == 400 and said in answer["error"]["message"], answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}


async def test_a_pair_of_surrogates_is_a_character(server: TestServer) -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}], "max_tokens": 1}'
    assert (await post(server, CHAT, body))[0] == 200


async def test_other_refusals(server: TestServer) -> None:
    _, body, _ = await post(server, CHAT, {"messages": HELLO, "max_tokens": 1000})
    assert body["error"]["code"] == "context_length_exceeded"
    _, body, _ = await post(server, CHAT, {"messages": HELLO, "temperatur": 1})
    assert body["error"]["code"] == "unknown_parameter"
    status, body, _ = await post(server, CHAT, {"model": "tinny", "messages": HELLO})
    assert status == 404 and body["error"]["code"] == "model_not_found" and "'tiny'" in body["error"]["message"]
    status, body, _ = await post(server, CHAT, b"{}", **{"Content-Type": "text/plain"})
    assert status == 415 and "application/json" in body["error"]["message"]
    status, body, _ = await post(server, CHAT, b'{"user": "' + b"x" * 2**21 + b'"}')
    assert status == 413 and body["error"]["type"] == "invalid_request_error"


async def test_unknown_fields_can_be_warned_about(local_client: Any) -> None:
    async with serving(local_client, unknown_fields="warn") as server:
        asked = {"messages": HELLO, "max_tokens": 1, "temperatur": 1, 'x"\r\né': 2}
        status, _, headers = await post(server, CHAT, asked)
        assert status == 200 and "did you mean 'temperature'" in headers["Warning"]
        assert headers["Warning"].count("299 - ") == 2
        _, _, headers = await post(server, CHAT, {**asked, "stream": True})
        assert "did you mean 'temperature'" in headers["Warning"]
        assert (await post(server, CHAT, {**asked, "tools": [{}]}))[0] == 400
        assert "Warning" not in (await post(server, CHAT, {"messages": HELLO, "max_tokens": 1}))[2]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["text", "user", "a", 1]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=6) | st.sampled_from(SUBFIELDS), inner, max_size=3)
    ),
    max_leaves=8,
)


@hypothesis.given(st.sampled_from([read_chat, read_completion]), st.data())
def test_whatever_comes_is_read_or_refused(read: Any, data: st.DataObject) -> None:
    names = CHAT_FIELDS if read is read_chat else COMPLETION_FIELDS
    fields = data.draw(st.dictionaries(st.sampled_from([*names, *LATER, "other"]), JSON, max_size=4))
    good = {"messages": HELLO} if read is read_chat else {"prompt": "a"}
    body = {**(good if data.draw(st.booleans()) else {}), **fields}
    try:
        job = read(body, Rules(("tiny",)))
        assert isinstance(job.params, SamplingParams) and job.characters >= 0
    except (InvalidRequest, RequestFailed) as error:
        failure = failure_of(error)
        assert 400 <= failure.status < 500 and failure.param
        assert len(failure.message) < 1500 and "\n" not in failure.message
