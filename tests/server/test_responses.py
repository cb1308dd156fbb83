"""``/v1/responses``: with OpenAI's own client on a tiny model, and on an engine that says what a test wants; its types judge every answer and event."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList

from radixrt.errors import InvalidRequest
from radixrt.request import FinishReason, OutputDelta, SampleOutput, SamplingParams
from radixrt.server.errors import Failure, RequestFailed
from tests.server.openai_serving import Script, output, position, raises, says
from tests.server.stand import KEY, error_of, served
from tests.server.test_reasoning import _TURN
from tests.server.test_tools import ADD, CALLED, EXPECTED, SCHEMAS, SKY, TEMPLATE, pieces, scripted, tooled  # noqa: F401

PATH = "/v1/responses"
TOOLS: list[Any] = [
    {"type": "function", "name": "add", "description": "Add.", "parameters": ADD, "strict": True},
    {"type": "function", "name": "sky", "description": "The sky over a city.", "parameters": SKY, "strict": True},
]
# Calls as in TEMPLATE, and thinking that the model opens itself.
THINKING = TEMPLATE + "{# <think> </think> #}"
SAID = f"<think>\nSo many.\n</think>\n\n{CALLED}"
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


class Animal(pydantic.BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    legs: int = pydantic.Field(ge=2, le=4)


@asynccontextmanager
async def asked(client: Any, **settings: Any) -> AsyncIterator[tuple[Any, Any]]:
    """The server, to be asked by hand or by OpenAI's client."""
    async with served(client, served_model_name=("tiny",), **settings) as http:
        base = str(http.make_url("/v1"))
        async with openai.AsyncOpenAI(base_url=base, api_key=KEY, max_retries=0) as official:
            yield http, official


async def told(http: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream: each has its name and number, and is of a type that the client knows."""
    async with http.post(PATH, json={**body, "stream": True}) as answer:
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        blocks = (await answer.text()).split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENT.validate_python(events[-1], strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def answer(http: Any, body: dict[str, Any], status: int = 200) -> Any:
    async with http.post(PATH, json=body) as found:
        assert found.status == status, await found.text()
        data = await found.json()
    if status == 200:
        Response.model_validate(data)
    return data


def bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without what is another one in every response."""
    return [{name: item for name, item in one.items() if name not in ("id", "call_id")} for one in items]


def texts_of(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The joined deltas of each item."""
    found: dict[int, tuple[str, str]] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            kind, text = found.get(event["output_index"], (event["type"], ""))
            assert kind == event["type"]
            found[event["output_index"]] = (kind, text + event["delta"])
    return [found[at] for at in sorted(found)]


# ---- what comes back


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_thinking_text_and_calls_whole_and_streamed(local_client: Any, size: int) -> None:
    script = scripted(local_client, says(*pieces(SAID, size)), THINKING)
    body = {"input": "hello", "tools": TOOLS}
    async with asked(script) as (http, _):
        whole = await answer(http, body)
        events = await told(http, body)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    thought, said, *calls = whole["output"]
    assert thought["content"][0]["text"].strip() == "So many." and thought["summary"] == []
    assert said["content"][0]["text"].strip() == "I will."
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == EXPECTED
    assert len({call["call_id"] for call in calls}) == 2
    assert {item["status"] for item in whole["output"]} == {whole["status"]} == {"completed"}
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed" and kinds.count("completed") == 1
    assert bare(events[-1]["response"]["output"]) == bare(whole["output"])
    assert events[-1]["response"]["output"] == [e["item"] for e in events if e["type"].endswith("output_item.done")]
    assert texts_of(events) == [
        ("response.reasoning_text.delta", thought["content"][0]["text"]),
        ("response.output_text.delta", said["content"][0]["text"]),
        *(("response.function_call_arguments.delta", call["arguments"]) for call in calls),
    ]
    for at in range(4):
        own = [e["type"].removeprefix("response.") for e in events if e.get("output_index") == at]
        assert own[0] == "output_item.added" and own[-1] == "output_item.done"
        name = ("reasoning_text", "output_text", "function_call_arguments", "function_call_arguments")[at]
        expected = [f"{name}.done"] if at > 1 else ["content_part.added", f"{name}.done", "content_part.done"]
        assert [kind for kind in own[1:-1] if not kind.endswith(".delta")] == expected
    assert events[-1]["response"]["usage"] == whole["usage"] or size != 1000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [("message", "")]),
        (" \n", [("message", " \n")]),
        ("  x \n", [("message", "  x \n")]),
        ("<think>\nmore", [("reasoning", "more")]),
        ("<think>a</think>", [("reasoning", "a")]),
        ("<think>a</think>\n\nb", [("reasoning", "a"), ("message", "b")]),
    ],
)
async def test_white_space_and_nothing(local_client: Any, text: str, expected: list[tuple[str, str]]) -> None:
    script = scripted(local_client, says(*(pieces(text, 2) or [""])), _TURN + "{% endif %}{# <think> </think> #}")
    async with asked(script) as (http, _):
        body = await answer(http, {"input": "hello"})
        events = await told(http, {"input": "hello"})
    for output_items in (body["output"], events[-1]["response"]["output"]):
        found = [(item["type"], "".join(part["text"] for part in item["content"])) for item in output_items]
        assert [(kind, said.strip()) for kind, said in found] == [(kind, said.strip()) for kind, said in expected]
        if "think" not in text:
            assert found == expected


async def test_an_answer_that_is_cut_off(local_client: Any) -> None:
    script = scripted(local_client, says("one", " two", reason=FinishReason.LENGTH))
    async with asked(script) as (http, official):
        body = await answer(http, {"input": "hello", "max_output_tokens": 2})
        events = await told(http, {"input": "hello", "max_output_tokens": 2})
        again = await official.responses.retrieve(body["id"])
    for found in (body, events[-1]["response"]):
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [item["status"] for item in found["output"]] == ["incomplete"]
    assert (
        events[-1]["type"] == "response.incomplete" and again.status == "incomplete" and again.output_text == "one two"
    )


async def test_log_probabilities(local_client: Any) -> None:
    async def say(prompt: Any, params: SamplingParams) -> AsyncIterator[OutputDelta]:
        assert params.logprobs == 1
        spots = [position(token, top=(token,)) for token in (70, 71)]
        sample = SampleOutput(0, "ab", (70, 71), FinishReason.LENGTH, logprobs=tuple(spots))
        yield OutputDelta("r", 0, "a", (70,), (spots[0],))
        yield OutputDelta("r", 0, "b", (71,), (spots[1],), FinishReason.LENGTH, output(prompt, sample))

    body = {"input": "hello", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    async with asked(scripted(local_client, say)) as (http, _):
        whole = await answer(http, body)
        events = await told(http, body)
    entries = whole["output"][0]["content"][0]["logprobs"]
    deltas = [entry for e in events if e["type"].endswith("text.delta") for entry in e["logprobs"]]
    assert deltas == entries == events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert [entry["logprob"] for entry in entries] == [-0.5, -0.5] and len(entries[0]["top_logprobs"]) == 1


# ---- what goes wrong


@pytest.mark.parametrize(
    ("error", "status", "param", "message"),
    [
        (InvalidRequest("max_tokens", "=9: too many"), 400, "max_output_tokens", "max_output_tokens=9: too many"),
        (InvalidRequest("json_schema", ": no"), 400, "text.format.schema", "no"),
        (RequestFailed(Failure(503, "gone", None, "queue_timeout")), 503, None, "gone"),
        (RuntimeError("secret"), 500, None, "internal error"),
    ],
)
async def test_a_failure_before_the_first_event_is_an_answer(
    local_client: Any, error: Exception, status: int, param: str | None, message: str
) -> None:
    format = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    async with asked(scripted(local_client, raises(error))) as (http, _):
        for stream in (False, True):
            asking = {"input": "hello", "stream": stream, "text": {"format": format}}
            failure = (await answer(http, asking, status))["error"]
            assert failure["param"] == param and message in failure["message"]


async def test_a_failure_later_is_the_last_event(local_client: Any) -> None:
    script = scripted(local_client, raises(RuntimeError("secret"), after=2))
    async with asked(script) as (http, official):
        await answer(http, {"input": "hello"}, 500)
        events = await told(http, {"input": "hello"})
        response = events[-1]["response"]
        assert events[-1]["type"] == "response.failed" and response["status"] == "failed"
        assert response["error"] == {"code": "server_error", "message": "internal error"}
        assert "secret" not in json.dumps(events)
        with pytest.raises(openai.NotFoundError):
            await official.responses.retrieve(response["id"])


async def test_a_client_that_goes_ends_its_request(local_client: Any) -> None:
    async def say(prompt: Any, params: SamplingParams) -> AsyncIterator[OutputDelta]:
        while True:
            yield OutputDelta("r", 0, "word ", (10,))

    script = scripted(local_client, say)
    async with asked(script) as (_, official):
        stream = await official.responses.create(model="tiny", input="hello", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await script.ended.wait()


# ---- what the engine is asked


async def prompt_of(script: Script, http: Any, body: dict[str, Any]) -> str:
    await answer(http, body)
    return script.tokenizer.decode(script.asked[-1]["prompt"], skip_special_tokens=False)


def message(role: str, text: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def call(id: str, name: str = "add", arguments: str = '{"a": 1, "b": 2}') -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}


def result(id: str, text: Any = "3") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": text}


USER = "<s1>user\nhello<s0>\n"
END = "<s1>assistant\n"
ADDED = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
INPUTS: list[tuple[Any, dict[str, Any], str]] = [
    ("hello", {}, USER),
    ([message("user", "hello")], {}, USER),
    ([message("user", [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}], type="message")], {},
     "<s1>user\nhel\nlo<s0>\n"),
    ("hello", {"instructions": "Be."}, f"<s1>system\nBe.<s0>\n{USER}"),
    ([message("developer", "Do."), message("user", "hello")], {"instructions": "Be."}, f"<s1>system\nBe.\n\nDo.<s0>\n{USER}"),
    ([], {"instructions": "Be."}, "<s1>system\nBe.<s0>\n"),
    ([message("user", "hello"), message("assistant", "a"), message("assistant", "b")], {},
     f"{USER}<s1>assistant\na<s0>\n<s1>assistant\nb<s0>\n"),
    ([message("user", "hello"), message("assistant", "a"), call("1"), call("2"), result("2"), result("1", [{"type": "input_text", "text": "4"}])], {},
     f"{USER}<s1>assistant\na{ADDED}{ADDED}<s0>\n<s1>tool\n3<s0>\n<s1>tool\n4<s0>\n"),
    ([message("user", "hello"), call("1"), result("1"), call("2"), result("2")], {},
     f"{USER}<s1>assistant\n{ADDED}<s0>\n<s1>tool\n3<s0>\n<s1>assistant\n{ADDED}<s0>\n<s1>tool\n3<s0>\n"),
    ([message("user", "hello"), {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}, message("assistant", "a")], {},
     f"{USER}<s1>assistant\n[hm]a<s0>\n"),
    ([message("user", "hello"), {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]}, call("1"), result("1")], {},
     f"{USER}<s1>assistant\n[hm]{ADDED}<s0>\n<s1>tool\n3<s0>\n"),
    ([message("user", "hello"), message("assistant", [{"type": "refusal", "refusal": "no"}], id="msg_1", status="completed", phase=None)], {},
     f"{USER}<s1>assistant\nno<s0>\n"),
]  # fmt: skip


async def test_items_become_the_chat_that_the_template_knows(local_client: Any) -> None:
    template = TEMPLATE.replace(
        "{{ m.content }}", "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    )
    script = scripted(local_client, says("x"), template)
    async with asked(script) as (http, _):
        for given, more, expected in INPUTS:
            assert await prompt_of(script, http, {"input": given, **more}) == expected + END, given


async def test_fields_reach_the_engine(local_client: Any) -> None:
    script = scripted(local_client, says("x"))
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    body: dict[str, Any] = {
        "model": "tiny", "input": "hello", "temperature": 0.25, "top_p": 0.5, "max_output_tokens": 7, "seed": 3, "top_k": 4,
        "priority": 2, "cache_salt": "s", "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        "metadata": {"a": "b"}, "user": "me", "truncation": "disabled", "background": False, "include": [], "tool_choice": "auto",
    }  # fmt: skip
    async with asked(script) as (http, _):
        found = await answer(http, body)
        last = script.asked[-1]
        params = last["params"]
        assert (params.temperature, params.top_p, params.max_tokens, params.seed, params.top_k) == (0.25, 0.5, 7, 3, 4)
        assert params.constraint.to_dict()["schema"] == schema and (last["priority"], last["cache_salt"]) == (2, "s")
        for name in (
            "temperature",
            "top_p",
            "max_output_tokens",
            "metadata",
            "truncation",
            "tool_choice",
            "user",
            "model",
        ):
            assert found[name] == body[name], name
        assert found["text"]["format"] == body["text"]["format"]
        await answer(http, {"input": "hello", "text": {"format": {"type": "json_object"}}})
        assert script.asked[-1]["params"].constraint is not None
        await answer(http, {"input": "hello", "text": {"format": {"type": "text"}, "verbosity": "medium"}})
        assert script.asked[-1]["params"].constraint is None
        said = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
        add, sky = said % ("add", '{"a": 1, "b": 2}'), said % ("sky", '{"city": "Oslo"}')
        for choice, accepted in (
            ("auto", {"x", add, sky}),
            ("required", {add, sky}),
            ({"type": "function", "name": "sky"}, {sky}),
            ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}, {add}),
            ("none", None),
        ):
            found = await answer(http, {"input": "hello", "tools": TOOLS, "tool_choice": choice})
            constraint: Any = script.asked[-1]["params"].constraint
            assert found["tool_choice"] == choice and found["tools"] == TOOLS
            if accepted is None:
                assert constraint is None
            else:
                matcher = constraint.compile(script.tokenizer)
                assert {text for text in ("x", add, sky) if matcher.accepts(text)} == accepted, choice


async def test_effort_switches_and_bounds_the_thinking(local_client: Any) -> None:
    template = (
        _TURN + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
    )
    script = scripted(local_client, says("x"), template)
    async with asked(script) as (http, _):
        assert (await prompt_of(script, http, {"input": "a", "reasoning": {"effort": "none"}})).endswith("</think>")
        found = await answer(http, {"input": "a", "reasoning": {"effort": "low", "summary": "auto"}})
        assert found["reasoning"]["effort"] == "low"
        assert not (await prompt_of(script, http, {"input": "a", "reasoning": {"effort": "high"}})).endswith("</think>")


# ---- what is kept


async def test_one_goes_on_from_another(local_client: Any) -> None:
    """The prompt is that of all items sent at once, whichever way they were kept; instructions are those of the last."""
    script = scripted(local_client, says(*pieces(SAID, 5)), THINKING)
    async with asked(script) as (http, _):
        first = await answer(http, {"input": "hello", "tools": TOOLS, "instructions": "Be."})
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        results = [result(item["call_id"]) for item in calls]
        going_on = {"input": results, "tools": TOOLS, "previous_response_id": first["id"]}
        kept = await prompt_of(script, http, going_on)
        second = (await told(http, going_on))[-1]["response"]
        sent = await prompt_of(
            script, http, {"input": [message("user", "hello"), *first["output"], *results], "tools": TOOLS}
        )
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        named = await prompt_of(
            script, http, {"input": [message("user", "hello"), *references, *results], "tools": TOOLS}
        )
        assert kept == sent == named and "Be." not in kept and kept.count("<s1>tool") == 2
        assert second["previous_response_id"] == first["id"]
        third = [result(item["call_id"]) for item in second["output"] if item["type"] == "function_call"]
        long = await prompt_of(
            script,
            http,
            {"input": [*third, message("user", "more")], "tools": TOOLS, "previous_response_id": second["id"]},
        )
        assert long.startswith(kept.removesuffix(END)) and long.endswith("more<s0>\n" + END)
        error = (await answer(http, {"input": "x", "previous_response_id": first["id"]}, 400))["error"]
        assert error["param"] == "input" and calls[0]["call_id"] in error["message"]


async def test_kept_shown_listed_and_forgotten(local_client: Any) -> None:
    async with asked(scripted(local_client, says("one", " two"))) as (http, official):
        first = await official.responses.create(model="tiny", input="hello")
        again = await official.responses.retrieve(first.id)
        assert again.to_dict() == first.to_dict() and again.output_text == "one two"
        second = await official.responses.create(
            model="tiny",
            previous_response_id=first.id,
            input=[{"role": "user", "content": "x"}, {"role": "user", "content": "y"}],
        )
        data = [item async for item in official.responses.input_items.list(second.id, order="asc", limit=1)]
        assert [item.content[0].text for item in data] == ["hello", "one two", "x", "y"]
        page = await official.responses.input_items.list(second.id)
        assert [item.id for item in page.data] == [item.id for item in data][::-1]
        async with http.get(f"{PATH}/{second.id}/input_items", params={"limit": "3", "after": data[-1].id}) as found:
            listed = await found.json()
        ResponseItemList.model_validate(listed)
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (data[2].id, data[0].id, False)
        for query, param in (({"limit": "0"}, "limit"), ({"order": "up"}, "order"), ({"after": "x"}, "after")):
            async with http.get(f"{PATH}/{second.id}/input_items", params=query) as found:
                assert found.status == 400 and (await error_of(found))["param"] == param
        async with http.get(f"{PATH}/{second.id}", params={"stream": "true"}) as found:
            assert found.status == 400 and (await error_of(found))["param"] == "stream"
        async with http.delete(f"{PATH}/{first.id}") as found:
            assert await found.json() == {"id": first.id, "object": "response", "deleted": True}
        for ask in (official.responses.retrieve, official.responses.delete, official.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match=first.id):
                await ask(first.id)
        with pytest.raises(openai.NotFoundError, match="previous_response_id") as refused:
            await official.responses.create(model="tiny", input="x", previous_response_id=first.id)
        assert refused.value.code == "previous_response_not_found"
        third = await official.responses.create(model="tiny", input="z", previous_response_id=second.id)
        assert len((await official.responses.input_items.list(third.id)).data) == 6  # what it goes on from is there
        unkept = await official.responses.create(model="tiny", input="x", store=False)
        with pytest.raises(openai.NotFoundError):
            await official.responses.retrieve(unkept.id)


async def test_counted_before_it_is_asked(local_client: Any) -> None:
    script = scripted(local_client, says(SAID), THINKING)
    body = {"input": "hello", "tools": TOOLS, "instructions": "Be kind."}
    async with asked(script) as (http, official):
        await answer(http, body)
        counted = await official.responses.input_tokens.count(input="hello", tools=TOOLS, instructions="Be kind.")
        fewer = await official.responses.input_tokens.count(input="hello")
        with pytest.raises(openai.BadRequestError, match="input"):
            await official.responses.input_tokens.count(model="tiny")
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == len(script.asked[0]["prompt"]) > fewer.input_tokens > 0
    assert len(script.asked) == 1  # counting runs nothing


async def test_what_does_not_run_in_the_background_is_not_cancelled(local_client: Any) -> None:
    async with asked(scripted(local_client, says(SAID), THINKING)) as (http, official):
        made = await answer(http, {"input": "hello"})
        with pytest.raises(openai.BadRequestError, match="do not run in the background"):
            await official.responses.cancel(made["id"])
        with pytest.raises(openai.NotFoundError):
            await official.responses.cancel("resp_0")
        assert (await official.responses.retrieve(made["id"])).id == made["id"]


async def test_a_key_finds_its_own(local_client: Any) -> None:
    async with asked(scripted(local_client, says("x")), api_key=(KEY, "other")) as (_, official):
        other = official.with_options(api_key="other")
        made = await official.responses.create(model="tiny", input="hello")
        assert (await official.responses.retrieve(made.id)).id == made.id
        for ask in (other.responses.retrieve, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(made.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model="tiny", input="x", previous_response_id=made.id)
        reference: Any = [{"type": "item_reference", "id": made.output[0].id}]
        with pytest.raises(openai.BadRequestError, match=r"input\[0\].id"):
            await other.responses.create(model="tiny", input=reference)
        assert (await official.responses.create(model="tiny", input=reference)).output_text == "x"


# ---- OpenAI's client on a model


async def test_create_stream_and_go_on(tooled: Any) -> None:  # noqa: F811
    asking: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 8}
    salt = {"cache_salt": "responses"}
    async with asked(tooled) as (_, official):
        made = await official.responses.create(input="what is the sky over Rome?", extra_body=salt, **asking)
        assert made.output_text and made.usage and made.usage.output_tokens == 8 and made.status == "incomplete"
        deltas = ""
        async with official.responses.stream(input="what is the sky over Rome?", **asking) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    deltas += event.delta
                    assert event.snapshot == deltas
        assert deltas == made.output_text
        reached = made.usage.input_tokens
        for _ in range(3):
            made = await official.responses.create(
                input="more", previous_response_id=made.id, extra_body=salt, **asking
            )
            assert made.usage and made.usage.input_tokens_details.cached_tokens >= reached
            reached = made.usage.input_tokens


async def test_parse(tooled: Any) -> None:  # noqa: F811
    asking: dict[str, Any] = {"model": "tiny", "input": "hello", "text_format": Animal, "max_output_tokens": 100}
    async with asked(tooled) as (_, official):
        assert isinstance((await official.responses.parse(**asking)).output_parsed, Animal)
        async with official.responses.stream(**asking) as stream:
            assert isinstance((await stream.get_final_response()).output_parsed, Animal)


async def test_tools_and_their_results(tooled: Any) -> None:  # noqa: F811
    class Sum(pydantic.BaseModel):
        """Add two numbers."""

        a: int = pydantic.Field(ge=0, le=9)
        b: int = pydantic.Field(ge=0, le=9)

    async with asked(tooled) as (_, official):
        asking: dict[str, Any] = {
            "model": "tiny",
            "tools": TOOLS,
            "max_output_tokens": 150,
            "parallel_tool_calls": False,
        }
        named = {"type": "function", "name": "sky"}
        made = await official.responses.create(input="the sky?", tool_choice=named, **asking)
        (called,) = made.output
        assert called.type == "function_call"
        jsonschema.validate(json.loads(called.arguments), SCHEMAS["sky"])
        items: list[Any] = [{"role": "user", "content": "the sky?"}]
        items += made.output
        items.append({"type": "function_call_output", "call_id": called.call_id, "output": "blue"})
        sent = await official.responses.create(input=items, temperature=0, tool_choice="none", **asking)
        kept = await official.responses.create(
            input=items[-1:], previous_response_id=made.id, temperature=0, tool_choice="none", **asking
        )
        assert sent.output_text == kept.output_text and kept.usage and sent.usage
        assert kept.usage.input_tokens == sent.usage.input_tokens
        assert kept.usage.input_tokens_details.cached_tokens >= sent.usage.input_tokens - 1
        summed: Any = {**asking, "tools": [openai.pydantic_function_tool(Sum)], "tool_choice": "required"}
        parsed = await official.responses.parse(input="17?", **summed)
        assert isinstance(parsed.output[0].parsed_arguments, Sum)
        async with official.responses.stream(input="17?", tool_choice="required", **asking) as stream:
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["function_call"]
