"""Markers of calls and of thinking that are special tokens of the model: it can write them under a constraint, and they are read and shown."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from radixrt import AsyncEngine, SamplingParams
from radixrt.grammar.constraint import Constraint
from radixrt.grammar.vocabulary import MARKERS, vocabulary_of
from radixrt.server.local import LocalClient
from radixrt.tools.formats import TOOL_FORMATS
from radixrt.tools.reasoning import REASONING_FORMATS
from tests.server.openai_serving import CHAT, HELLO, post, serving
from tests.server.test_tools import TOOLS

_CALLS, _TAG, _THINK, _THOUGHT = 2, 3, 4, 5
_NAMES = {_CALLS: "[TOOL_CALLS]", _TAG: "<|python_tag|>", _THINK: "[THINK]", _THOUGHT: "[/THINK]"}
_TURN = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | length if tools else '' }}"
MISTRAL = _TURN + "{# [TOOL_CALLS] #}"
LLAMA = _TURN + '{# <|python_tag|> "parameters":  #}'


@pytest.fixture(scope="module")
def marked(server_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalClient]:
    """An engine on the tiny model, some of whose special tokens are markers."""
    directory = tmp_path_factory.mktemp("marked") / "model"
    shutil.copytree(server_model, directory)
    text = (directory / "tokenizer.json").read_text()
    for id, name in _NAMES.items():
        text = text.replace(f'"<s{id}>"', json.dumps(name))
    (directory / "tokenizer.json").write_text(text)
    (directory / "template.jinja").write_text(MISTRAL)
    client = LocalClient(
        AsyncEngine(
            model=str(directory),
            max_total_tokens=4096,
            check_integrity=True,
            chat_template=str(directory / "template.jinja"),
        )
    )
    asyncio.run(client.start())
    assert {id: client.tokenizer.token_id(name) for id, name in _NAMES.items()} == {id: id for id in _NAMES}
    assert client.tokenizer.special_ids >= set(_NAMES)
    yield client
    asyncio.run(client.close())


def test_every_format_is_known() -> None:
    used = {mark for item in TOOL_FORMATS.values() for mark in item.markers if not mark.startswith("{")}
    used |= {mark for item in REASONING_FORMATS.values() for mark in (item.start, item.end)}
    assert used <= MARKERS


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(("parser", "marker"), [("mistral", _CALLS), ("mistral_v11", _CALLS), ("llama3_json", _TAG)])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_behind_a_special_token(
    marked: LocalClient, choice: str, parser: str, marker: int, stream: bool
) -> None:
    """The model, which wants nothing more than the special token, writes it, and a call behind it."""
    if parser == "llama3_json" and choice == "required":
        pytest.skip("its calls need no marker")
    async with serving(marked, tool_call_parser=parser) as server:
        status, body, _ = await post(
            server,
            CHAT,
            {
                "messages": HELLO,
                "tools": TOOLS,
                "tool_choice": choice,
                "logit_bias": {str(marker): 100, "0": 50},
                "parallel_tool_calls": False,
                "max_tokens": 200,
                "logprobs": True,
                "temperature": 0,
                "stream": stream,
            },
        )
    assert status == 200, body
    if stream:
        choices = [json.loads(line[6:])["choices"][0] for line in body.split("\n\n") if line.startswith("data: {")]
        tokens = [one["token"] for each in choices for one in (each["logprobs"] or {"content": []})["content"]]
        calls = [call for each in choices for call in each["delta"].get("tool_calls", [])]
        content = "".join(each["delta"].get("content") or "" for each in choices)
        reason = choices[-1]["finish_reason"]
    else:
        (found,) = body["choices"]
        tokens = [one["token"] for one in found["logprobs"]["content"]]
        calls, content, reason = (
            found["message"].get("tool_calls", []),
            found["message"]["content"],
            found["finish_reason"],
        )
    assert tokens[0] == _NAMES[marker] and reason == "tool_calls" and not content
    assert [call["function"]["name"] in ("add", "sky") for call in calls] == [True]
    assert isinstance(json.loads(calls[0]["function"]["arguments"]), dict)


async def test_a_constraint_behind_thinking_between_special_tokens(marked: LocalClient) -> None:
    asked = {"messages": HELLO, "regex": "(yes|no) sir", "max_tokens": 60, "temperature": 0}
    async with serving(marked, reasoning_parser="mistral") as server:
        bias = {str(_THINK): 50, str(_THOUGHT): 100}
        _, body, _ = await post(server, CHAT, {**asked, "logit_bias": bias})
        _, plain, _ = await post(server, CHAT, {**asked, "logit_bias": {str(_THINK): -100}})
    usage = body["usage"]
    assert body["choices"][0]["message"]["content"] in ("yes sir", "no sir")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 2  # the marks, a token each
    assert plain["choices"][0]["message"]["content"] in ("yes sir", "no sir")


async def test_a_budget_ends_thinking_between_special_tokens(marked: LocalClient) -> None:
    async with serving(marked, reasoning_parser="mistral") as server:
        _, body, _ = await post(
            server,
            CHAT,
            {
                "messages": HELLO,
                "regex": "(yes|no) sir",
                "max_tokens": 60,
                "thinking_budget": 9,
                "logit_bias": {str(_THINK): 30, str(_THOUGHT): -100},
                "temperature": 0,
            },
        )
    assert body["choices"][0]["message"]["content"] in ("yes sir", "no sir")
    # [THINK] and eight more, then the end: a line, the mark, two lines
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 9 + 4


@pytest.mark.parametrize("skip", [False, True])
async def test_what_a_constraint_spells_is_shown(marked: LocalClient, skip: bool) -> None:
    params = SamplingParams(
        constraint=Constraint.sequence("[THINK]", Constraint.regex("[ab]{3}")),
        logit_bias={_THINK: 100},
        skip_special_tokens=skip,
        max_tokens=40,
        temperature=0.0,
    )
    async with aclosing(marked.stream([20, 21], params, request_id=f"s{skip}")) as items:
        deltas = [item async for item in items]
    sample = deltas[-1].output.samples[0]  # type: ignore[union-attr]
    assert sample.token_ids[0] == _THINK and len(sample.token_ids) == 4
    assert sample.text == "".join(delta.text for delta in deltas) and sample.text.startswith("[THINK]")


def test_other_constraints_spell_no_special_token(marked: LocalClient) -> None:
    plain, with_markers = vocabulary_of(marked.tokenizer), vocabulary_of(marked.tokenizer, markers=True)
    assert [id for id in marked.tokenizer.special_ids if plain.spelled[id]] == []
    assert {id for id in marked.tokenizer.special_ids if with_markers.spelled[id]} == set(_NAMES)
    for constraint, markers in (
        (Constraint.json_schema({"enum": ["[THINK]"]}), False),
        (Constraint.regex(r"\[THINK\]"), False),
        (Constraint.alternatives("a", Constraint.sequence("b", Constraint.literal("x[THINK]y"))), True),
        (Constraint.structural_tags([("<t>", Constraint.regex("a"), "[/THINK]")]), True),
        (Constraint.structural_tags([("<t>", Constraint.regex("a"), "</t>")]), False),
    ):
        compiled = constraint.compile(marked.tokenizer)
        assert compiled.vocabulary is (with_markers if markers else plain)
        assert compiled.markers == (frozenset(_NAMES) if markers else frozenset())


def test_forced_text_stops_before_what_may_become_a_marker(marked: LocalClient) -> None:
    compiled = Constraint.alternatives("say: [THINK]a", "say: [TOOL_CALLS]b").compile(marked.tokenizer)
    matcher = compiled.matcher()
    assert matcher.forced_bytes() == b"say: [T"
    assert marked.tokenizer.decode(matcher.forced_tokens(), skip_special_tokens=False) in ("", "say:", "say: ")
    assert matcher.advance_bytes(b"say: ") and matcher.copy().accept(_THINK) and matcher.copy().accept(_CALLS)
