"""The native API, what the server tells about itself, and its metrics."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import re
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixrt import SamplingParams
from radixrt.engine.program_text import ProgramText, TokenState
from radixrt.server.client import EngineDied
from radixrt.server.openapi import description
from tests.server.stand import Stand, error_of, served

# ---- the native API


async def test_generate_in_sglangs_form() -> None:
    async with served(Stand()) as client:
        body = {
            "text": "a",
            "sampling_params": {"max_new_tokens": 5, "temperature": 0, "no_stop_trim": True},
            "rid": "r1",
        }
        answer = await (await client.post("/generate", json=body)).json()
        assert answer["text"] == "one two three" and answer["output_ids"] == [0, 1, 2]
        meta = answer["meta_info"]
        assert meta["id"] == "r1" and meta["finish_reason"] == {"type": "stop", "matched": 0}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, 3, 3)
        many = await (await client.post("/generate", json={"text": ["a", "b"], "sampling_params": {"n": 2}})).json()
        assert len(many) == 4
        stream = await (await client.post("/generate", json={"text": "a", "stream": True})).text()
        events = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        texts = [json.loads(event)["text"] for event in events[:-1]]
        assert texts == ["one", "one two", "one two three", "one two three"]
        assert json.loads(events[-2])["meta_info"]["finish_reason"]["type"] == "stop"
        stream = await (await client.post("/generate", json={"text": ["a", "b"], "stream": True})).text()
        assert {json.loads(event[6:])["index"] for event in stream.split("\n\n")[:-2]} == {0, 1}


async def test_each_sample_of_a_stream_has_a_number_of_its_own() -> None:
    body = {"text": ["a", "b", "c"], "sampling_params": [{"n": 3}, {"n": 1}, {"n": 2}], "stream": True}
    async with served(Stand()) as client:
        stream = await (await client.post("/generate", json=body)).text()
        events = [json.loads(event[6:]) for event in stream.split("\n\n")[:-2]]
        ended = [event["index"] for event in events if event["meta_info"]["finish_reason"]]
        assert sorted(ended) == list(range(6))


async def test_unknown_fields_may_be_warned_about() -> None:
    async with served(Stand(), unknown_fields="warn") as client:
        body = {"text": "a", "flavour\r\nX-Evil: 1": 1, "sampling_params": {"colour": 2}}
        answer = await client.post("/generate", json=body)
        assert answer.status == 200 and "X-Evil" not in answer.headers
        assert any("colour" in value for value in answer.headers.getall("Warning"))


async def test_generate_gives_the_engines_tokens(local_client: Any) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    expected = None
    async for delta in local_client.stream("Hello", params, request_id="direct"):
        expected = delta.output or expected
    body = {
        "text": "Hello",
        "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": 0,
        "return_text_in_logprobs": True,
    }
    async with served(local_client) as client:
        answer = await (await client.post("/generate", json=body)).json()
        assert answer["output_ids"] == list(expected.token_ids) and answer["text"] == expected.text
        meta = answer["meta_info"]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
        assert [entry[0] for entry in meta["output_token_logprobs"]] == pytest.approx([at.chosen.logprob for at in expected.logprobs])  # fmt: skip
        assert [entry[1] for entry in meta["input_token_logprobs"]] == list(expected.prompt_token_ids)
        assert all(len(top) == 2 for top in meta["output_top_logprobs"])
        for more in ({"stream": True}, {"text": None, "input_ids": list(expected.prompt_token_ids)}):
            raw = await (await client.post("/generate", json={**body, **more})).text()
            data = json.loads(raw.split("\n\n")[-3][6:] if "stream" in more else raw)
            assert data["output_ids"] == answer["output_ids"] and data["meta_info"]["cached_tokens"] > 0
        for constraint in (
            {"regex": "[ab]{3}"},
            {"json_schema": {"const": "abc"}},
            {"ebnf": 'root ::= "ab" "c"'},
            {"substring": "abc"},
        ):
            answer = await (await client.post("/generate", json={"text": "x", "sampling_params": constraint})).json()
            assert re.fullmatch('[ab]{3}|"abc"|abc', answer["text"])
        refused = await client.post("/generate", json={"text": "x", "sampling_params": {"regex": "("}})
        assert refused.status == 400
        refused = await client.post("/generate", json={"text": "x" * 600})
        assert refused.status == 400 and (await error_of(refused))["code"] == "context_length_exceeded"
        refused = await client.post("/generate", json={"text": "x" * 600, "stream": True})
        assert refused.status == 400


async def test_tokens_and_text(local_client: Any) -> None:
    async with served(local_client) as client:
        answer = await (await client.post("/tokenize", json={"prompt": "héé", "return_token_strs": True})).json()
        assert answer["tokens"] == local_client.tokenizer.encode("héé") and answer["count"] == len(answer["tokens"])
        back = await (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()
        assert back == {"prompt": "héé", "text": "héé"}
        messages = [{"role": "user", "content": "Hi"}]
        answer = await (await client.post("/tokenize", json={"messages": messages})).json()
        assert answer["tokens"] == local_client.tokenizer.encode_chat(messages)
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": 3}),
            ("/tokenize", {"prompt": "\ud800"}),
            ("/tokenize", {"messages": []}),
            ("/tokenize", {"messages": [3]}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": [320]}),
            ("/detokenize", {"tokens": "a"}),
        ):
            assert (await client.post(path, json=body)).status == 400, body


async def test_scores_are_the_engines(local_client: Any) -> None:
    tokens = [local_client.tokenizer.encode(text) for text in ("ab", "c")]
    direct = await local_client.score(local_client.tokenizer.encode("Hello"), tokens, request_id="direct")
    async with served(local_client) as client:
        body: dict[str, Any] = {"prompt": "Hello", "choices": ["ab", "c"], "method": "total_logprob"}
        answer = await (await client.post("/score", json=body)).json()
        sums = [math.fsum(one) for one in direct.scores]
        assert answer["scores"] == pytest.approx(sums) and answer["tokens"] == tokens
        assert answer["index"] == sums.index(max(sums)) and answer["choice"] == ["ab", "c"][answer["index"]]
        body = {"input_ids": local_client.tokenizer.encode("Hello"), "choices": ["ab", "c"]}
        assert (await (await client.post("/score", json=body)).json())["token_logprobs"] == answer["token_logprobs"]
        for wrong in ({}, {"choices": ["a", "a"]}, {"choices": []}, {"choices": ["\ud800"]}, {"choices": ["a"], "method": "total"}, {"choices": ["a"], "prompt": ""}):  # fmt: skip
            assert (await client.post("/score", json={"prompt": "x", **wrong})).status == 400, wrong


async def test_a_score_that_fails_leaves_nothing_behind(
    local_client: Any, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    asked = {"prompt": "a", "choices": ["b"], "method": "unconditional_likelihood_normalized"}
    running: set[str] = set()

    async def score(prefix: list[int], choices: Any, *, request_id: str, **_: Any) -> Any:
        running.add(request_id)
        try:
            if len(running) == 2:
                raise EngineDied("gone")
            await asyncio.Event().wait()
        finally:
            running.discard(request_id)

    async with served(local_client) as client:
        answer = await client.post("/score", json=asked)
        assert answer.status == 400  # the model has no token that begins a text
        gc.collect()
        assert not [str(one.message) for one in recwarn if "never awaited" in str(one.message)]
        monkeypatch.setattr(local_client, "score", score)
        begin = TokenState(own=np.array([1], dtype=np.int32), size=1)
        monkeypatch.setattr(ProgramText, "begin", lambda self: begin)
        assert (await client.post("/score", json=asked)).status == 503
        assert not running


async def test_what_the_server_tells_about_itself(local_client: Any) -> None:
    async with served(local_client) as client:
        info = await (await client.get("/server_info")).json()
        assert (
            info["device"] == "cpu"
            and info["context_length"] == 512
            and info["running"] == 0
            and info["server"]["max_queue"] == 4096
        )
        assert (await (await client.post("/flush_cache")).json())["flushed_tokens"] >= 0
        shown = await (await client.get("/openapi.json")).json()
        assert shown == description()
        assert client.app is not None
        there = {(r.method.lower(), re.sub(r":[^}]*", "", r.resource.canonical)) for r in client.app.router.routes() if r.resource is not None and r.method != "HEAD"}  # fmt: skip
        assert {(method, path) for path, methods in shown["paths"].items() for method in methods} == there


# ---- metrics


async def test_generations_of_programs_are_measured_as_those_of_requests(local_client: Any) -> None:
    params = {"max_tokens": 5, "ignore_eos": True}
    nodes = [
        {"id": 0, "kind": "text", "parts": ["measured"]},
        {"id": 1, "kind": "gen", "parent": 0, "params": params},
        {"id": 2, "kind": "gen", "parent": 0, "params": {**params, "n": 2, "seed": 3}},
        {"id": 3, "kind": "gen", "parent": 0, "params": {"max_tokens": 0}},
        {"id": 4, "kind": "select", "parent": 0, "choices": ["a", "b"]},
    ]
    names = ("time_to_first_token", "request", "inter_token")
    async with served(local_client) as client:
        for stream in (False, True):
            answer = await client.post("/v1/programs", json={"version": 1, "nodes": nodes, "stream": stream})
            assert answer.status == 200 and (await answer.text()).count('"done"') == 4
        async with client.ws_connect("/v1/programs/ws") as socket:
            for message in ({"op": "open", "version": 1}, {"op": "add", "nodes": nodes[:2]}):
                await socket.send_json({"program": '"event": "done", ', **message})
            assert (await socket.receive_json(timeout=20))["event"] == "done"
        text = await (await client.get("/metrics")).text()
        found = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
        assert [found[f"radixrt_{name}_seconds_count"] for name in names] == [5, 5, 3 * 4 + 2 * 8]
        assert all(found[f"radixrt_{name}_seconds_sum"] > 0 for name in names)
        assert 'radixrt_requests_finished_total{model_name="' in text and 'reason="length"} 7.0' in text


async def test_metrics_under_every_name() -> None:
    stand = Stand()
    async with served(stand, served_model_name=["m"]) as client:
        for stream in (False, True):
            await (await client.post("/generate", json={"text": "a", "stream": stream})).read()
        text = await (await client.get("/metrics")).text()
        found = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
        assert all(s.labels.get("model_name", "m") == "m" for f in text_string_to_metric_families(text) for s in f.samples)  # fmt: skip
        for names, value in (
            (("vllm:num_requests_waiting", "sglang:num_queue_reqs", "radixrt_requests_waiting"), 7),
            (("vllm:kv_cache_usage_perc", "sglang:token_usage", "radixrt_kv_usage_ratio"), 0.25),
            (("vllm:prefix_cache_queries_total", "vllm:prompt_tokens_total", "sglang:prompt_tokens_total"), 40),
            (("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total", "radixrt_cached_tokens_total"), 30),
            (("vllm:generation_tokens_total", "sglang:generation_tokens_total"), 12),
            (("vllm:num_preemptions_total", "radixrt_preemptions_total"), 2),
            (("vllm:num_requests_running", "sglang:num_running_reqs"), 0),
            (("vllm:request_success_total", "radixrt_requests_finished_total"), 2),
            (("vllm:e2e_request_latency_seconds_count", "sglang:e2e_request_latency_seconds_count"), 2),
            (("vllm:time_to_first_token_seconds_count", "sglang:time_to_first_token_seconds_count"), 2),
            (("vllm:inter_token_latency_seconds_count", "radixrt_inter_token_seconds_count"), 4),
            (("radixrt_engine_up",), 1),
        ):
            assert {name: found[name] for name in names} == dict.fromkeys(names, value)
        stand.error = EngineDied("gone")
        text = await (await client.get("/metrics")).text()
        assert 'radixrt_engine_up{model_name="m"} 0.0' in text and "vllm:num_requests_running" not in text
