"""Agents with two real tools on the embedded model, as LangChain's and pydantic-ai's users write them: every call is made, and is valid.

The model is small and follows no plan: the scripts say which tools it may call at a step, the grammar that it does, and rightly.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from radixrt import AsyncEngine
from radixrt.server.local import LocalClient
from tests.server.stand import KEY
from tests.server.test_clients import nothing_but_this_machine  # noqa: F401
from tests.server.threaded import on_a_thread

TASK = "What is 17 + 25, and how is the sky over Rome?"


@pytest.fixture(scope="module")
def embedded() -> Iterator[LocalClient]:
    client = LocalClient(AsyncEngine(max_total_tokens=16384, check_integrity=True))
    asyncio.run(client.start())
    yield client
    asyncio.run(client.close())


@pytest.fixture(scope="module")
def address(embedded: LocalClient) -> Iterator[str]:
    with on_a_thread(embedded, served_model_name=("small",), api_key=KEY) as address:
        yield address


class Diary:
    """The two tools, and what was asked of them."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.asked.append(("add", (a, b)))
        return a + b

    def sky(self, city: Literal["Rome", "Oslo"]) -> str:
        """How the sky over a city is."""
        assert city in ("Rome", "Oslo")
        self.asked.append(("sky", city))
        return {"Rome": "blue", "Oslo": "grey"}[city]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.asked]


class Report(pydantic.BaseModel):
    """What was found."""

    total: int = pydantic.Field(ge=0, le=999)
    sky: Literal["blue", "grey"]


@pytest.mark.parametrize("stream", [False, True])
def test_openai(address: str, stream: bool) -> None:
    """A loop of one's own."""
    diary = Diary()
    tools: list[Any] = [
        {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": {
            "type": "object", "required": ["a", "b"], "additionalProperties": False,
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "integer", "minimum": 0, "maximum": 99}}}}},
        {"type": "function", "function": {"name": "sky", "description": "How the sky over a city is.", "parameters": {
            "type": "object", "required": ["city"], "additionalProperties": False, "properties": {"city": {"enum": ["Rome", "Oslo"]}}}}},
    ]  # fmt: skip
    messages: list[Any] = [{"role": "user", "content": TASK}]
    cached = 0
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        for choice in ({"type": "function", "function": {"name": "add"}}, "required", "none"):
            asked: dict[str, Any] = {"model": "small", "messages": messages, "tools": tools, "tool_choice": choice}
            asked |= {"max_tokens": 120, "seed": 1, "parallel_tool_calls": False}
            if stream:
                with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
                    for _ in events:
                        pass
                    answer = events.get_final_completion()
            else:
                answer = client.chat.completions.create(**asked)
            message = answer.choices[0].message
            usage = answer.usage
            assert usage is not None and usage.prompt_tokens_details is not None
            if choice == "none":
                assert message.content and not message.tool_calls
                break
            assert answer.choices[0].finish_reason == "tool_calls"
            assert (usage.prompt_tokens_details.cached_tokens or 0) >= cached
            cached = usage.prompt_tokens - 1
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                result = getattr(diary, call.function.name)(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    assert diary.names[0] == "add" and len(diary.names) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_langchain(address: str, stream: bool) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import StructuredTool

    diary = Diary()
    tools = {tool.name: tool for tool in map(StructuredTool.from_function, (diary.add, diary.sky))}
    model = langchain.ChatOpenAI(
        model="small", base_url=f"{address}/v1", api_key=KEY, max_retries=0, max_tokens=120, seed=2, streaming=stream
    )
    messages: list[Any] = [HumanMessage(TASK)]
    waiting = list(tools)
    while waiting:
        bound = model.bind_tools([tools[name] for name in waiting], tool_choice="required", parallel_tool_calls=False)
        answer = bound.invoke(messages)
        assert answer.tool_calls and not answer.invalid_tool_calls
        messages.append(answer)
        for call in answer.tool_calls:
            result = tools[call["name"]].invoke(call)
            assert isinstance(result, ToolMessage) and result.status == "success"
            messages.append(result)
            waiting.remove(call["name"])
    assert sorted(diary.names) == ["add", "sky"]
    assert model.with_structured_output(Report, method="function_calling").invoke(messages).sky in ("blue", "grey")
    assert model.invoke(messages).content


async def test_pydantic_ai(address: str) -> None:
    pytest.importorskip("pydantic_ai", reason="pydantic-ai-slim is not installed")
    from pydantic_ai import Agent, RunContext
    from pydantic_ai.capabilities import PrepareOutputTools, PrepareTools
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.tools import ToolDefinition

    diary = Diary()

    def next_tools(context: RunContext[Any], tools: list[ToolDefinition]) -> list[ToolDefinition]:
        return [tool for tool in tools if tool.name not in diary.names]

    def at_the_end(context: RunContext[Any], tools: list[ToolDefinition]) -> list[ToolDefinition]:
        return tools if len(diary.names) == 2 else []

    model = OpenAIChatModel("small", provider=OpenAIProvider(base_url=f"{address}/v1", api_key=KEY))
    agent = Agent(
        model,
        output_type=Report,
        tools=[diary.add, diary.sky],
        capabilities=[PrepareTools(next_tools), PrepareOutputTools(at_the_end)],
        model_settings={"max_tokens": 160, "seed": 3, "parallel_tool_calls": False},
    )
    result = await agent.run(TASK)
    assert isinstance(result.output, Report)
    assert sorted(diary.names) == ["add", "sky"]
    async with agent.run_stream(TASK) as streamed:
        assert isinstance(await streamed.get_output(), Report)
