"""Thinking in ``/v1/chat/completions``: told apart from the answer, counted, switched, bounded, and out of the way of constraints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from radixrt import AsyncEngine
from radixrt.errors import InvalidRequest
from radixrt.model.tokenizer import load_tokenizer
from radixrt.request import FinishReason, OutputDelta, SampleOutput, SamplingParams
from radixrt.server.local import LocalClient
from radixrt.server.thinking import Thinking
from radixrt.tools.reasoning import THINK
from tests.server.openai_serving import CHAT, HELLO, Script, connected, output, post, serving
from tests.server.test_tools import EXPECTED, TOOLS, calls_of

THINK_OPEN = replace(THINK, starts_open=True)
_TURN = "{% for m in messages %}<s1>{{ m.role }}\n{{ m.content }}<s0>\n{% endfor %}{% if add_generation_prompt %}<s1>assistant\n"
# The template opens the thinking, or has it written by the model; with a switch, or without one.
OPENS = _TURN + "<think>\n{% endif %}{# </think> #}"
SWITCHED = (
    _TURN + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPEN_SWITCHED = (
    _TURN + "{% if enable_thinking is defined and not enable_thinking %}</think>{% else %}<think>{% endif %}{% endif %}"
)
CALL = "".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    for name, arguments in EXPECTED
)


class Thinker(Script):
    """Says a text, a character a token, and goes on from where the prompt left off; ends when it is aborted."""

    def __init__(
        self, local_client: Any, text: str, template: str = OPENS, reason: FinishReason = FinishReason.STOP
    ) -> None:
        super().__init__(local_client, self._speak)
        self.info = replace(self.info, context_length=8192)  # it says more than the tiny model could
        self.tokenizer = load_tokenizer(local_client.info.settings["model"], chat_template=template)
        self._text, self._reason = text, reason
        self._end = "</think>" if template is OPENS else "assistant\n"

    async def _speak(self, prompt: Any, params: SamplingParams) -> AsyncIterator[OutputDelta]:
        said = self.tokenizer.decode(prompt, skip_special_tokens=False)
        rest, count = self._text, len(self.aborted)
        if "</think>" in said:
            rest = rest.partition("</think>")[2].lstrip("\n")
        rest = rest[: params.max_tokens]
        reason = FinishReason.LENGTH if len(rest) == params.max_tokens else self._reason
        ids = tuple(self.tokenizer.encode(rest))
        told = 0
        for i, character in enumerate(rest[:-1]):
            if len(self.aborted) > count:
                reason = FinishReason.ABORT
                break
            yield OutputDelta("r", 0, character, (ids[i],))
            told = i + 1
        last = rest[told:] if reason is not FinishReason.ABORT else ""
        whole = output(
            prompt, *(SampleOutput(i, rest[: told + len(last)], ids, reason) for i in range(params.n)), cached_tokens=4
        )
        yield OutputDelta("r", 0, last, ids[told:], (), reason, whole)


def usage_of(body: Any) -> tuple[int, int]:
    usage = body["usage"]
    return usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]


def joined(text: str) -> tuple[str, str, Any, Any]:
    """Content, thinking, finish reason and usage of a stream."""
    content = thought = ""
    reason = usage = None
    for line in text.split("\n\n"):
        if line.startswith("data: {"):
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                content += choice["delta"].get("content") or ""
                thought += choice["delta"].get("reasoning_content") or ""
                reason = choice["finish_reason"] or reason
    return content, thought, reason, usage


# ---- told apart


@pytest.mark.parametrize(
    ("template", "text", "thinks"),
    [
        (OPENS, "so it is\n</think>\n\nYes.", True),
        (OPEN_SWITCHED, "so it is\n</think>\n\nYes.", True),
        (SWITCHED, "<think>\nso it is\n</think>\n\nYes.", True),
        (SWITCHED, "Yes.", False),
        (OPENS, "so it is", None),
        (SWITCHED, "<think>so it is", None),
    ],
    ids=["opened", "opened with a switch", "by the model", "not at all", "never closed", "never closed by the model"],
)
async def test_thinking_is_told_apart(local_client: Any, template: str, text: str, thinks: bool | None) -> None:
    async with serving(Thinker(local_client, text, template)) as server:
        _, body, _ = await post(server, CHAT, {"messages": HELLO})
        _, stream, _ = await post(
            server, CHAT, {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
        )
        _, raw, _ = await post(server, CHAT, {"messages": HELLO, "separate_reasoning": False})
    message = body["choices"][0]["message"]
    thought = message.get("reasoning_content", "")
    assert thought.strip() == ("" if thinks is False else "so it is")
    assert message["content"] == ("" if thinks is None else "Yes.")
    content, told, reason, usage = joined(stream)
    assert (content, told, reason) == (message["content"], thought, "stop")
    assert usage == body["usage"]
    assert raw["choices"][0]["message"]["content"] == text
    inside = text.index("</think>") + len("</think>") if thinks else 0 if thinks is False else len(text)
    assert usage_of(body) == (len(text), inside)


async def test_calls_behind_thinking(local_client: Any) -> None:
    text = "I could <tool_call> but wait\n</think>\n\n" + CALL
    async with serving(Thinker(local_client, text)) as server, connected(server) as client:
        asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": TOOLS}
        message = (await client.chat.completions.create(**asked)).choices[0].message
        async with client.chat.completions.stream(**asked) as events:
            async for _ in events:
                pass
            streamed = (await events.get_final_completion()).choices[0]
    assert calls_of(message) == calls_of(streamed.message) == EXPECTED and streamed.finish_reason == "tool_calls"
    assert message.reasoning_content.strip() == "I could <tool_call> but wait" and not (message.content or "").strip()


async def test_thinking_of_the_past_goes_back(local_client: Any) -> None:
    past = [*HELLO, {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}, *HELLO]
    thinker = Thinker(
        local_client,
        "a</think>b",
        _TURN.replace("{{ m.content }}", "{{ m.reasoning_content }}|{{ m.content }}") + "{% endif %}",
    )
    async with serving(thinker) as server:
        status, body, _ = await post(server, CHAT, {"messages": past})
        assert status == 200, body
        past[1] = {"role": "assistant", "content": "Yes.", "reasoning": "hm"}
        assert (await post(server, CHAT, {"messages": past}))[0] == 200
    first, second = (thinker.tokenizer.decode(asked["prompt"]) for asked in thinker.asked)
    assert "hm|Yes." in first and first == second


# ---- switched and bounded


@pytest.mark.parametrize("template", [OPENS, SWITCHED, OPEN_SWITCHED], ids=["opens", "switched", "open_switched"])
@pytest.mark.parametrize("off", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}])
async def test_thinking_is_switched_off(local_client: Any, template: str, off: dict[str, Any]) -> None:
    thinker = Thinker(local_client, "<think>x</think>Yes.", template)
    async with serving(thinker) as server:
        _, body, _ = await post(server, CHAT, {"messages": HELLO, **off})
    (asked,) = thinker.asked
    prompt = thinker.tokenizer.decode(asked["prompt"], skip_special_tokens=False)
    assert prompt.rstrip().endswith("</think>")
    message = body["choices"][0]["message"]
    assert message["content"] == "Yes." and "reasoning_content" not in message
    assert usage_of(body) == (4, 0)


@pytest.mark.parametrize("template", [OPENS, SWITCHED], ids=["opens", "switched"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_budget_ends_the_thinking(local_client: Any, template: str, stream: bool) -> None:
    long = "".join(chr(97 + i % 26) for i in range(400))
    opening = "" if template is OPENS else "<think>"
    thinker = Thinker(local_client, f"{opening}{long}</think>Yes.", template)
    body = {"messages": HELLO, "thinking_budget": 20 + len(opening), "max_tokens": 600}
    async with serving(thinker) as server:
        if stream:
            _, text, _ = await post(server, CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})
            content, thought, reason, usage = joined(text)
        else:
            _, answer, _ = await post(server, CHAT, body)
            message = answer["choices"][0]["message"]
            content, thought = message["content"], message["reasoning_content"]
            reason, usage = answer["choices"][0]["finish_reason"], answer["usage"]
    assert (content, thought.strip(), reason) == ("Yes.", long[:20], "stop")
    first, second = thinker.asked
    forced = "\n</think>\n\n"
    assert thinker.tokenizer.decode(second["prompt"][len(first["prompt"]) :]) == opening + long[:20] + forced
    assert len(thinker.aborted) == 1 and second["params"].max_tokens == 600 - 20 - len(opening) - len(forced)
    spent = len(opening) + 20 + len(forced)
    assert usage["prompt_tokens"] == len(first["prompt"]) and usage["prompt_tokens_details"]["cached_tokens"] == 4
    assert usage["completion_tokens"] == spent + len("Yes.")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == spent


@pytest.mark.parametrize("text", ["short</think>Yes.", "x" * 20])
async def test_a_budget_that_is_not_spent_changes_nothing(local_client: Any, text: str) -> None:
    thinker = Thinker(local_client, text)
    async with serving(thinker) as server:
        _, free, _ = await post(server, CHAT, {"messages": HELLO})
        _, bounded, _ = await post(server, CHAT, {"messages": HELLO, "thinking_budget": 20})
    for name in ("choices", "usage"):
        assert free[name] == bounded[name]
    assert not thinker.aborted and len(thinker.asked) == 2


async def test_efforts_are_budgets(local_client: Any) -> None:
    thinker = Thinker(local_client, "x" * 2000 + "</think>Yes.")
    async with serving(thinker) as server:
        for effort in ("minimal", "low", "high"):
            _, body, _ = await post(server, CHAT, {"messages": HELLO, "reasoning_effort": effort})
            assert body["choices"][0]["message"]["content"] == "Yes."
    spent = [len(asked["prompt"]) - len(thinker.asked[0]["prompt"]) for asked in thinker.asked]
    forced = len("\n</think>\n\n")
    assert spent == [0, 256 + forced, 0, 1024 + forced, 0]


class Refusing(Thinker):
    """Refuses what leaves a constraint fewer tokens than ``needs``."""

    needs = 0

    def stream(self, prompt: Any, params: SamplingParams, **how: Any) -> Any:
        if params.constraint is not None and params.max_tokens is not None and params.max_tokens < self.needs:
            raise InvalidRequest("max_tokens", f"={params.max_tokens}: the constraint needs {self.needs}")
        return super().stream(prompt, params, **how)


@pytest.mark.parametrize(
    ("needs", "forced", "reason"), [(9, "\n</think>\n\n", "stop"), (12, "</think>", "stop"), (13, "", "length")]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_end_that_leaves_too_little_for_a_constraint_is_a_shorter_one(
    local_client: Any, needs: int, forced: str, reason: str, stream: bool
) -> None:
    """The planned end takes 8 tokens, the forced one 11: of 40, 20 of them thinking, 12 are left, or 9."""
    thinker = Refusing(local_client, "x" * 30 + "</think>Yes.")
    thinker.needs = needs
    body = {"messages": HELLO, "thinking_budget": 20, "max_tokens": 40, "regex": "[A-Za-z]+\\."}
    async with serving(thinker) as server:
        if stream:
            _, text, _ = await post(server, CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})
            content, thought, told, usage = joined(text)
            assert '"error"' not in text
        else:
            status, answer, _ = await post(server, CHAT, body)
            assert status == 200, answer
            message = answer["choices"][0]["message"]
            content, thought = message["content"] or "", message["reasoning_content"]
            told, usage = answer["choices"][0]["finish_reason"], answer["usage"]
    assert (content, thought.strip(), told) == ("Yes." if forced else "", "x" * 20, reason)
    if forced:
        first, second = thinker.asked
        assert thinker.tokenizer.decode(second["prompt"][len(first["prompt"]) :]) == "x" * 20 + forced
    assert usage["completion_tokens"] == 20 + len(forced or "</think>") + len(content) <= 40


def test_thinking_costs_what_it_brings() -> None:
    """Characters that are copied: as many for the last token as for the first."""

    class Counting(str):
        copied = 0

        def __add__(self, other: str) -> Counting:
            Counting.copied += len(self) + len(other)
            return Counting(str(self) + other)

    class Echo:
        def push(self, ids: Any) -> str:
            return Counting("x" * len(ids))

    def cost(count: int) -> int:
        Counting.copied = 0
        thinking = Thinking(THINK_OPEN, Echo(), 10**6)  # type: ignore[arg-type]
        thinking._tail = Counting()
        for name, value in vars(thinking).items():
            if isinstance(value, str):
                setattr(thinking, name, Counting(value))
        for _ in range(count):
            assert not thinking.push(OutputDelta("r", 0, "x", (1,)))
        assert thinking.text == "x" * count
        return Counting.copied

    assert cost(2000) <= 2.1 * cost(1000)


async def test_a_budget_larger_than_the_answer(local_client: Any) -> None:
    """max_tokens ends what thinks, also where the end of the thinking has no room."""
    thinker = Thinker(local_client, "x" * 400 + "</think>Yes.")
    async with serving(thinker) as server:
        for most in (10, 21, 25, 31):
            _, body, _ = await post(server, CHAT, {"messages": HELLO, "thinking_budget": 20, "max_tokens": most})
            assert (
                body["choices"][0]["finish_reason"] == "length"
                and body["choices"][0]["message"]["content"].strip() == ""
            )
            assert usage_of(body)[0] == most


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "lots"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"thinking_budget": "x"}, "thinking_budget"),
        ({"separate_reasoning": "x"}, "separate_reasoning"),
        (
            {"messages": [{"role": "assistant", "content": "x", "reasoning_content": 3}]},
            "messages[0].reasoning_content",
        ),
        ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "messages[0].reasoning_content"),
    ],
)
async def test_what_is_refused(local_client: Any, fields: dict[str, Any], param: str) -> None:
    async with serving(Thinker(local_client, "x")) as server:
        status, body, _ = await post(server, CHAT, {"messages": HELLO, **fields})
    assert status == 400 and body["error"]["param"] == param, body


# ---- on a model


@pytest.fixture(scope="module")
def thinking(server_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalClient]:
    """An engine on the tiny model, whose template opens the thinking."""
    template = tmp_path_factory.mktemp("template") / "thinks.jinja"
    template.write_text(OPENS)
    client = LocalClient(AsyncEngine(**{**server_settings, "chat_template": str(template)}))
    asyncio.run(client.start())
    yield client
    asyncio.run(client.close())


@pytest.mark.parametrize("budget", [None, 16])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_constraint_begins_behind_the_thinking(thinking: LocalClient, budget: int | None, n: int) -> None:
    """A random model thinks for ever: it is ended in time for the constraint, by the budget or by max_tokens."""
    whole = ""
    async with serving(thinking) as server:
        for stream in (False, True):
            asked = {
                "messages": HELLO,
                "regex": "(yes|no) sir",
                "max_tokens": 60,
                "thinking_budget": budget,
                "n": n,
                "seed": 4,
            }
            status, body, _ = await post(server, CHAT, {**asked, "stream": stream})
            assert status == 200, body
            if stream and n == 1:
                content, thought, reason, _ = joined(body)
                assert content in ("yes sir", "no sir") and reason == "stop" and thought == whole
            elif not stream:
                assert [choice["message"]["content"] in ("yes sir", "no sir") for choice in body["choices"]] == [
                    True
                ] * n
                whole = body["choices"][0]["message"]["reasoning_content"]
                used, thought = usage_of(body)
                assert used <= 60 * n and n * 8 < thought <= (60 if budget is None else budget + 11) * n
    assert (await thinking.stats())["running"] == 0


async def test_a_budget_computes_no_token_twice(thinking: LocalClient) -> None:
    async with serving(thinking) as server, connected(server) as client:
        before = await thinking.stats()
        salt = {"thinking_budget": 32, "cache_salt": "budget"}
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=64, extra_body=salt)
        after = await thinking.stats()
    usage = answer.usage
    assert usage is not None and usage.completion_tokens_details.reasoning_tokens >= 32
    computed = (after["prompt_tokens"] - before["prompt_tokens"]) - (after["cached_tokens"] - before["cached_tokens"])
    assert computed <= usage.prompt_tokens + len("\n</think>\n\n") + 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("room", [1, 5, 11])
async def test_a_budget_that_fills_the_context_ends_with_it(thinking: LocalClient, room: int, stream: bool) -> None:
    """Behind the thinking there is no room for its end: the answer is cut, and not refused when it has begun."""
    asked: dict[str, Any] = {"messages": HELLO, "temperature": 0, "logit_bias": {"0": -100}}
    async with serving(thinking) as server:
        _, body, _ = await post(server, CHAT, {**asked, "max_tokens": 1})
        budget = thinking.info.context_length - body["usage"]["prompt_tokens"] - room
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        status, body, _ = await post(server, CHAT, {**asked, "thinking_budget": budget, **more})
    assert status == 200 and "error" not in body, body
    reason, usage = joined(body)[2:] if stream else (body["choices"][0]["finish_reason"], body["usage"])
    assert reason == "length" and usage["completion_tokens"] == budget + room


async def test_openai_reads_what_is_refused(thinking: LocalClient) -> None:
    async with serving(thinking) as server, connected(server) as client:
        with pytest.raises(openai.BadRequestError, match="regex"):
            await client.chat.completions.create(
                model="tiny", messages=HELLO, extra_body={"regex": "(", "thinking_budget": 4}
            )
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=5, extra_body={"regex": "a{9}"}
            )
