"""What ``/v1/responses`` refuses, each by the name of its field; what it keeps, within its bounds; and agents that speak it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.server.responses_store import Kept, ResponseStore
from tests.server.openai_serving import says
from tests.server.stand import KEY
from tests.server.test_clients import nothing_but_this_machine  # noqa: F401
from tests.server.test_responses import PATH, TOOLS, answer, asked, call, message, result
from tests.server.test_tools import TEMPLATE, scripted, tooled  # noqa: F401
from tests.server.threaded import on_a_thread


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def part(**fields: Any) -> dict[str, Any]:
    return {"input": [message("user", [fields])]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", **fields}]}


def format(**fields: Any) -> dict[str, Any]:
    return {"text": {"format": fields}}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "missing"),
    ({"input": 3}, "input", "list of items"),
    ({"input": []}, "input", "at least one"),
    ({"input": [3]}, "input[0]", "object"),
    ({"inputs": "x"}, "inputs", "'input'"),
    ({"max_tokens": 3}, "max_tokens", "max_output_tokens"),
    ({"messages": []}, "messages", "input"),
    ({"n": 2}, "n", "no such field"),
    ({"instructions": 3}, "instructions", "string"),
    ({"max_output_tokens": 0}, "max_output_tokens", "0"),
    ({"max_output_tokens": "many"}, "max_output_tokens", "'many'"),
    ({"max_output_tokens": 10**6}, "max_output_tokens", "context"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"top_p": 0}, "top_p", "0"),
    ({"stream": "yes"}, "stream", "'yes'"),
    ({"store": 1}, "store", "1"),
    ({"stream_options": 3}, "stream_options", "3"),
    ({"response_format": {"type": "text"}}, "response_format", "text.format"),
    ({"background": True}, "background", "stream=true"),
    ({"truncation": "auto"}, "truncation", "disabled"),
    ({"conversation": "c"}, "conversation", "not supported"),
    ({"prompt": {"id": "p"}}, "prompt", "not supported"),
    ({"max_tool_calls": 1}, "max_tool_calls", "not supported"),
    ({"include": "all"}, "include", "list"),
    ({"include": ["file_search_call.results"]}, "include[0]", "not supported"),
    ({"metadata": []}, "metadata", "object"),
    ({"metadata": {"a": 1}}, "metadata.a", "string"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "16"),
    ({"reasoning": "high"}, "reasoning", "object"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'huge'"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "auto"),
    ({"reasoning": {"efort": "low"}}, "reasoning.efort", "'effort'"),
    ({"text": 3}, "text", "object"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
    (format(type="xml"), "text.format.type", "json_schema"),
    (format(type="json_schema", name="n"), "text.format.schema", "missing"),
    (format(type="json_schema", name="n", schema="{}"), "text.format.schema", "object"),
    (format(type="json_schema", name="n", schema={"type": "strin"}), "text.format.schema", "'string'"),
    (format(type="json_schema", name="n", schema={}, strikt=True), "text.format.strikt", "'strict'"),
    ({**format(type="json_object"), "regex": "a"}, "text.format", "regex"),
    ({"previous_response_id": 3}, "previous_response_id", "string"),
    ({"tools": 3}, "tools", "list"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
    ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0].type", "file_search"),
    (tool(), "tools[0].name", "missing"),
    (tool(name="f", parameters={"properties": {"x": {"uniqueItems": True}}}), "tools[0].parameters", "uniqueItems"),
    (tool(name="f", parameter={}), "tools[0].parameter", "'parameters'"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name", "'add'"),
    ({"tool_choice": "required"}, "tool_choice", "required"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "ad"}}, "tool_choice.name", "'add'"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice.type", "'web_search'"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools", "at least one"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}}, "tool_choice.mode", "'x'"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "ad"}]}},
     "tool_choice.tools[0].name", "'add'"),
    ({"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 3}, "max_output_tokens", "shortest"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "1"),
    (item(), "input[0].type", "missing"),
    (item(type="web_search_call", id="w"), "input[0].type", "web_search_call"),
    (item(type="message", content="x"), "input[0].role", "missing"),
    (item(role="tool", content="x"), "input[0].role", "function_call_output"),
    (item(role="user"), "input[0].content", "missing"),
    (item(role="user", content="x", contents="y"), "input[0].contents", "'content'"),
    (item(role="user", content="x", id=3), "input[0].id", "3"),
    (part(type="input_image", image_url="x"), "input[0].content[0].type", "text only"),
    (part(type="input_text"), "input[0].content[0].text", "missing"),
    (part(type="input_text", text="x", txet="y"), "input[0].content[0].txet", "'text'"),
    (item(type="reasoning", summary=3), "input[0].summary", "list"),
    (item(type="reasoning", summary=[{"type": "x"}]), "input[0].summary[0].type", "summary_text"),
    (item(type="reasoning", summary=[], encrypted_content="gAAA"), "input[0].encrypted_content", "content"),
    (item(type="item_reference"), "input[0].id", "missing"),
    (item(type="item_reference", id="msg_1"), "input[0].id", "no such item"),
    (item(type="function_call", name="add", arguments="{}"), "input[0].call_id", "missing"),
    (item(type="function_call", call_id="c", arguments="{}"), "input[0].name", "missing"),
    ({"input": [call("c", arguments="{")]}, "input[0].arguments", "'{'"),
    ({"input": [call("c", arguments="[" * 100_000)]}, "input[0].arguments", "JSON text"),
    ({"input": [call("c"), call("c")]}, "input[1].call_id", "input[0]"),
    ({"input": [call("c")]}, "input", "'c'"),
    ({"input": [result("c")]}, "input[0].call_id", "'c'"),
    ({"input": [call("cat"), result("cut")]}, "input[1].call_id", "'cat'"),
    ({"input": [call("c"), result("c"), result("c")]}, "input[2].call_id", "'c'"),
    ({"input": [call("c"), result("c", 3)]}, "input[1].output", "3"),
    ({"input": [call("c"), result("c", [{"type": "input_file"}])]}, "input[1].output[0].type", "text only"),
    # one that only the chat's room finds: the call is no longer the last
    ({"input": [call("a"), message("user", "x"), call("b"), result("a"), result("b")]}, "input[3].call_id", "'a'"),
    ({"input": [call("a"), call("b"), message("user", "x"), call("c"), result("a"), result("b"), result("c")]},
     "input[4].call_id", "'a'"),
    ({"input": "\ud800"}, "input", "surrogate"),
]  # fmt: skip


async def test_what_is_refused(tooled: Any) -> None:  # noqa: F811
    wrong = []
    async with asked(tooled) as (http, _):
        for fields, param, said in REFUSED:
            for stream in (False, True):
                data = json.dumps({"input": "hello", "stream": stream, **fields})
                async with http.post(PATH, data=data, headers={"Content-Type": "application/json"}) as found:
                    said_so = found.content_type == "application/json"
                    error = (await found.json()).get("error") or {} if said_so else {}
                    if (found.status, error.get("param")) != (400, param) or said not in error.get("message", ""):
                        wrong.append((fields, param, said, found.status, error))
    assert not wrong, wrong
    assert (await tooled.stats())["running"] == 0


async def test_other_refusals(tooled: Any) -> None:  # noqa: F811
    async with asked(tooled) as (http, _):
        for body, status, code in (
            ({"input": "x", "model": "tinny"}, 404, "model_not_found"),
            ({"input": "x", "previous_response_id": "resp_1"}, 404, "previous_response_not_found"),
            ({"input": "x" * 10_000}, 400, "context_length_exceeded"),
            ({"input": "x", "stream_options": {"include_obfuscation": False}}, 400, "invalid_value"),
        ):
            error = (await answer(http, body, status))["error"]
            assert error["code"] == code, error
        async with http.post(PATH, data=b"{}", headers={"Content-Type": "text/plain"}) as found:
            assert found.status == 415
        async with http.get(f"{PATH}/nothing") as found:
            assert found.status == 404 and "nothing" in (await found.json())["error"]["message"]


async def test_unknown_fields_may_be_warned_about(local_client: Any) -> None:
    body = {"input": "hello", "temperatur": 1, "metadata": None}
    async with (
        asked(scripted(local_client, says("x")), unknown_fields="warn") as (http, _),
        http.post(PATH, json=body) as found,
    ):
        assert found.status == 200 and "temperatur" in found.headers["Warning"]


# ---- what is kept


def kept(owner: str, id: str, size: int, previous: Kept | None = None) -> Kept:
    return Kept(owner.encode(), id, b"x" * size, b"", previous)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("keep keep keep find forget".split()), st.integers(0, 30), st.integers(0, 3000)),
        max_size=60,
    )
)
def test_the_store_is_the_plain_one(steps: list[tuple[str, int, int]]) -> None:
    """Against a list in the order of use, whose bytes are counted from nothing each time."""
    store = ResponseStore(5, 12_000)
    plain: list[Kept] = []
    made: list[Kept] = []

    def held() -> int:
        alive: dict[int, Kept] = {}
        for one in plain:
            alive |= {id(link): link for link in one.chain()}
        return sum(one.size for one in alive.values())

    for what, at, size in steps:
        if what == "keep":
            previous = made[at] if at < len(made) else None
            made.append(kept("o", str(len(made)), size, previous))
            store.keep(made[-1])
            plain.append(made[-1])
            while plain and (len(plain) > 5 or held() > 12_000):
                plain.pop(0)
        else:
            there = next((one for one in plain if one.id == str(at)), None)
            if what == "find":
                assert store.find(b"o", str(at)) is there
                assert store.find(b"p", str(at)) is None
            else:
                assert store.forget(b"o", str(at)) == (there is not None)
            if there is not None:
                plain.remove(there)
                if what == "find":
                    plain.append(there)
        assert len(store) == len(plain) and store.bytes == held()
        assert all(store.find(b"o", one.id, used=False) is one for one in plain)


async def test_a_server_forgets_the_least_used(local_client: Any) -> None:
    async with asked(scripted(local_client, says("x")), max_stored_responses=2) as (http, _):
        first, second = [(await answer(http, {"input": "hello"}))["id"] for _ in range(2)]
        third = (await answer(http, {"input": "hello", "previous_response_id": first}))["id"]
        for id, status in ((first, 200), (second, 404), (third, 200)):
            async with http.get(f"{PATH}/{id}") as found:
                assert found.status == status


# ---- agents


@pytest.fixture(scope="module")
def address(tooled: Any) -> Iterator[str]:  # noqa: F811
    with on_a_thread(tooled, served_model_name=("tiny",), api_key=KEY) as address:
        yield address


def test_langchain(address: str) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

    def sky(city: Literal["Rome", "Oslo"]) -> str:
        """The sky over a city."""
        return city

    def chat(most: int) -> Any:
        return langchain.ChatOpenAI(
            model="tiny", base_url=f"{address}/v1", api_key=KEY, max_retries=0, use_responses_api=True, max_tokens=most
        )

    bound = chat(150).bind_tools([sky], tool_choice="required", parallel_tool_calls=False)
    first, *more = bound.stream("hello")
    for made in (bound.invoke("hello"), sum(more, start=first)):
        assert [called["name"] for called in made.tool_calls] == ["sky"]
        assert made.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")
        results = [{"role": "tool", "tool_call_id": called["id"], "content": "blue"} for called in made.tool_calls]
        assert chat(8).invoke([("user", "hello"), made, *results]).usage_metadata["output_tokens"] <= 8
    assert "".join(chunk.text for chunk in chat(8).stream("hello"))


def test_pydantic_ai(address: str) -> None:
    pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Sky(pydantic.BaseModel):
        color: Literal["blue", "grey"]

    model = OpenAIResponsesModel("tiny", provider=OpenAIProvider(base_url=f"{address}/v1", api_key=KEY))
    agent = Agent(model, output_type=Sky)
    found = asyncio.run(agent.run("the sky?", model_settings={"max_tokens": 200}))
    assert isinstance(found.output, Sky)
    again = asyncio.run(agent.run("and now?", message_history=found.all_messages(), model_settings={"max_tokens": 200}))
    assert isinstance(again.output, Sky)
