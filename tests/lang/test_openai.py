"""The backend for OpenAI's API, through the real ``openai`` client: what is asked, and what is told."""

from __future__ import annotations

from typing import Any

import pytest

from radixrt.engine.nodes import Done, Failed, Ref, Role, Select
from radixrt.grammar.constraint import Constraint
from radixrt.request import FinishReason
from tests.lang.fake_openai import Fake, ask, backend, chat, fake, gen, message, text

__all__ = ["fake"]

# ---- what is asked, and what is told


async def test_a_chat_is_asked_as_its_messages_and_streamed(fake: Fake) -> None:
    nodes = [
        *message(0, None, "system", "Be kind."),
        text(3, 2, "\n"),  # white space between messages is no text of the chat
        *message(4, 3, "user", "Hi"),
        Role(id=7, parent=6, role="assistant", begin=True),
        gen(8, 7, max_tokens=9, temperature=0.5),
        Role(id=9, parent=8, role="assistant", begin=False),
        *message(10, 9, "user", "Again: ", Ref(8)),
        Role(id=13, parent=12, role="assistant", begin=True),
        gen(14, 13),
    ]
    program = await ask(backend(fake), *nodes)
    first, second = fake.asked
    start = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert first == {
        "model": "m",
        "messages": start,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 1.0,
        "max_completion_tokens": 9,
    }
    assert second["messages"] == [
        *start,
        {"role": "assistant", "content": "Hello world"},
        {"role": "user", "content": "Again: Hello world"},
    ]
    done = await program.done(8)
    (output,) = done.outputs
    assert (output.text, output.token_ids, output.finish_reason) == ("Hello world", (), FinishReason.STOP)
    assert program.deltas(8) == ["Hello", " world"]
    usage = done.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens, usage.generated_tokens) == (7, 4, 3, 2)
    assert min(usage.started, usage.queue_time, usage.prefill_time, usage.decode_time) >= 0
    assert (await program.done(0)).outputs[0].text == "<|im_start|>system\n"


async def test_stats_add_up(fake: Fake) -> None:
    asked = backend(fake)
    await ask(asked, *chat(gen(4, 3), gen(5, 3)))
    assert await asked.stats() == {"requests": 2, "prompt_tokens": 14, "cached_tokens": 8, "generated_tokens": 4}


async def test_a_completion_is_asked_as_its_text(fake: Fake) -> None:
    program = await ask(
        backend(fake, is_chat_model=False), text(0, None, "One,"), gen(1, 0), text(2, 1, ";"), gen(3, 2)
    )
    assert [asked["prompt"] for asked in fake.asked] == ["One,", "One,Hello world;"]
    assert fake.asked[0]["max_tokens"] == 128
    assert fake.paths == ["/v1/completions"] * 2
    assert (await program.done(3)).outputs[0].text == "Hello world"
    assert program.deltas(3) == ["Hello", " world"]


@pytest.mark.parametrize("is_chat", [True, False])
async def test_every_parameter_is_sent(fake: Fake, is_chat: bool) -> None:
    params: dict[str, Any] = {
        "max_tokens": 5,
        "temperature": 0.0,
        "top_p": 0.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -1.0,
        "logit_bias": {7: 2.0},
        "seed": 3,
        "n": 2,
        "stop": ["a", "b", "c", "d"],
        "logprobs": 2,
    }
    node = chat(gen(4, 3, **params)) if is_chat else [gen(4, None, **params)]
    await ask(backend(fake, is_chat_model=is_chat), *node)
    (asked,) = fake.asked
    names = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"} if is_chat else {}
    for name, value in params.items():
        assert asked[names.get(name, name)] == ({"7": 2.0} if name == "logit_bias" else value), name
    assert not is_chat or asked["logprobs"] is True


async def test_samples_are_told_apart(fake: Fake) -> None:
    fake.reply = lambda asked: [
        {"index": 1, "delta": {"content": "b"}},
        {"index": 0, "delta": {"content": "a"}},
        {"index": 1, "delta": {"content": "c"}, "finish_reason": "length"},
        {"index": 0, "delta": {"content": "d"}, "finish_reason": "stop", "stop_reason": "x"},
        {"choices": [], "usage": None},
    ]
    fake.finish = False
    program = await ask(backend(fake), *chat(gen(4, 3, n=2, stop=["x"])))
    first, second = (await program.done(4)).outputs
    assert (first.text, first.finish_reason, first.stop_reason) == ("ad", FinishReason.STOP, "x")
    assert (second.text, second.finish_reason) == ("bc", FinishReason.LENGTH)
    assert program.deltas(4, 1) == ["b", "c"]


async def test_logprobs_come_with_ranks(fake: Fake) -> None:
    top = [{"token": "A", "logprob": -0.5, "bytes": None}, {"token": "B", "logprob": -1.5, "bytes": None}]
    content = [
        {"token": "B", "logprob": -1.5, "bytes": None, "top_logprobs": top},
        {"token": "C", "logprob": -9.0, "bytes": None, "top_logprobs": []},
    ]
    completion = {
        "tokens": ["B", "C"],
        "token_logprobs": [-1.5, -9.0],
        "top_logprobs": [{"B": -1.5, "A": -0.5}, {}],
        "text_offset": [0, 1],
    }
    for is_chat, logprobs in ((True, {"content": content, "refusal": None}), (False, completion)):
        piece = {"delta": {"content": "BC"}} if is_chat else {"text": "BC"}
        fake.reply = lambda asked, p=piece, lp=logprobs: [{"index": 0, **p, "logprobs": lp}]  # type: ignore[misc]
        nodes = chat(gen(4, 3, logprobs=2)) if is_chat else [gen(4, None, logprobs=2)]
        found = (await (await ask(backend(fake, is_chat_model=is_chat), *nodes)).done(4)).outputs[0].logprobs
        assert found is not None
        assert [(at.chosen.logprob, at.chosen.rank) for at in found] == [(-1.5, 2), (-9.0, 0)]
        assert [(one.logprob, one.rank) for one in found[0].top] == [(-0.5, 1), (-1.5, 2)]


async def test_a_message_that_has_begun_is_continued_where_the_server_can(fake: Fake) -> None:
    options = {"continue_final_message": True}
    await ask(backend(fake, **options), *chat(text(4, 3, "So, "), gen(5, 4), text(6, 5, "!"), gen(7, 6)))
    assert [asked["messages"][1] for asked in fake.asked] == [
        {"role": "assistant", "content": "So, "},
        {"role": "assistant", "content": "So, Hello world!"},
    ]
    assert all(asked["continue_final_message"] and not asked["add_generation_prompt"] for asked in fake.asked)
    await ask(backend(fake, **options), *chat(gen(4, 3)))
    assert "continue_final_message" not in fake.asked[2]
    assert len(fake.asked[2]["messages"]) == 1


# ---- constraints

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CONSTRAINTS: dict[str, tuple[Constraint, str]] = {
    "json_schema": (Constraint.json_schema(SCHEMA), '{"a": 1}'),
    "json_object": (Constraint.json_object(), "{}"),
    "regex": (Constraint.regex("a+"), "aa"),
    "choice": (Constraint.choice(["x.y", "z"]), "x.y"),
    "literal": (Constraint.literal("(z)"), "(z)"),
    "substring": (Constraint.substring("(z)"), "z"),
    "grammar": (Constraint.grammar('root ::= "a"', "ebnf"), "a"),
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x_y", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("dialect", "is_chat", "kind", "fields"),
    [
        (None, True, "json_schema", {"response_format": FORMAT}),
        (None, True, "json_object", {"response_format": {"type": "json_object"}}),
        ("vllm", True, "json_schema", {"response_format": FORMAT}),
        ("vllm", True, "regex", {"structured_outputs": {"regex": "a+"}}),
        ("vllm", True, "choice", {"structured_outputs": {"choice": ["x.y", "z"]}}),
        ("vllm", True, "literal", {"structured_outputs": {"choice": ["(z)"]}}),
        ("vllm", True, "grammar", {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        ("vllm", False, "json_schema", {"structured_outputs": {"json": SCHEMA}}),
        ("vllm", False, "json_object", {"structured_outputs": {"json_object": True}}),
        ("sglang", True, "json_object", {"response_format": {"type": "json_object"}}),
        ("sglang", True, "regex", {"regex": "a+"}),
        ("sglang", True, "choice", {"regex": r"(x\.y|z)"}),
        ("sglang", True, "grammar", {"ebnf": 'root ::= "a"'}),
        ("sglang", False, "json_object", {"json_schema": '{"type":"object"}'}),
    ],
)
async def test_constraints_are_asked_for(
    fake: Fake, dialect: Any, is_chat: bool, kind: str, fields: dict[str, Any]
) -> None:
    constraint, reply = CONSTRAINTS[kind]
    fake.reply = lambda asked: [reply]
    asked = backend(fake, is_chat_model=is_chat, extra_body_constraints=dialect)
    assert asked.capabilities.constraints is not None
    assert kind in asked.capabilities.constraints
    node = gen(4, 3 if is_chat else None, "x y", constraint=constraint)
    program = await ask(asked, *(chat(node) if is_chat else [node]))
    assert (await program.done(4)).outputs[0].text == reply
    known = {"model", "messages", "prompt", "stream", "stream_options", "temperature", "top_p", "max_tokens"}
    assert {k: v for k, v in fake.asked[0].items() if k not in known | {"max_completion_tokens"}} == fields


@pytest.mark.parametrize("kind", sorted(CONSTRAINTS))
@pytest.mark.parametrize(("dialect", "is_chat"), [(None, True), (None, False), ("vllm", True), ("sglang", False)])
async def test_capabilities_say_what_is_refused(fake: Fake, kind: str, dialect: Any, is_chat: bool) -> None:
    constraint, reply = CONSTRAINTS[kind]
    fake.reply = lambda asked: [reply]
    asked = backend(fake, is_chat_model=is_chat, extra_body_constraints=dialect)
    node = gen(4, 3 if is_chat else None, constraint=constraint)
    outcome = await (await ask(asked, *(chat(node) if is_chat else [node]))).outcome(4)
    assert asked.capabilities.constraints is not None
    assert isinstance(outcome, Done) == (kind in asked.capabilities.constraints)
    if isinstance(outcome, Failed):
        assert (outcome.kind, fake.asked) == ("unsupported", [])
        assert kind in outcome.error


@pytest.mark.parametrize(
    ("reply", "reason", "error"),
    [
        (["aab"], "stop", "did not enforce the constraint: 'aab' does not match the regex 'a+'"),
        (["a"], "length", "max_tokens=4 was reached before its constraint was met: 'a'"),
    ],
)
async def test_what_does_not_meet_its_constraint_is_no_result(
    fake: Fake, reply: list[str], reason: str, error: str
) -> None:
    fake.reply = lambda asked: [*reply, {"index": 0, "finish_reason": reason}]
    fake.finish = False
    node = gen(4, 3, max_tokens=4, constraint=Constraint.regex("a+"))
    failed = await (await ask(backend(fake, extra_body_constraints="vllm"), *chat(node))).failed(4)
    assert failed.kind == "error"
    assert error in failed.error


# ---- select


async def test_a_select_is_a_generation_that_is_constrained_to_the_choices(fake: Fake) -> None:
    fake.reply = lambda asked: ["no", "pe"]
    node = Select(id=4, parent=3, name="s", choices=(("yes",), ("nope",)), method="greedy_token_selection")
    asked = backend(fake, extra_body_constraints="vllm")
    assert asked.capabilities.select_methods == {"greedy_token_selection"}
    assert not asked.capabilities.select_sampling
    program = await ask(asked, *chat(node))
    done = await program.done(4)
    assert (done.outputs[0].text, done.choosing) == ("nope", None)
    assert program.deltas(4) == []
    assert fake.asked[0]["temperature"] == 0
    assert fake.asked[0]["structured_outputs"] == {"choice": ["yes", "nope"]}
    fake.reply = lambda asked: ["maybe"]
    failed = await (await ask(backend(fake, extra_body_constraints="vllm"), *chat(node))).failed(4)
    assert "'maybe' is none of the choices" in failed.error


@pytest.mark.parametrize(
    ("dialect", "change", "error"),
    [
        (None, {}, "needs scores of the choices"),
        ("vllm", {"method": "token_length_normalized"}, "only 'greedy_token_selection'"),
        ("vllm", {"temperature": 1.0}, "temperature=1.0"),
        ("vllm", {"choices": (("a",), ("",))}, "empty choice"),
    ],
)
async def test_a_select_that_needs_scores_is_refused(
    fake: Fake, dialect: Any, change: dict[str, Any], error: str
) -> None:
    node = Select(**{"id": 4, "parent": 3, "choices": (("a",),), "method": "greedy_token_selection", **change})
    failed = await (await ask(backend(fake, extra_body_constraints=dialect), *chat(node))).failed(4)
    assert (failed.kind, fake.asked) == ("unsupported", [])
    assert error in failed.error
    if dialect is None:
        assert backend(fake).capabilities.select_methods == frozenset()
