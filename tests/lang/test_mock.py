"""The scripted backend: replies, what parameters do to them, streams and figures."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lang.backends.mock import MockBackend, MockCall
from radixrt.engine.nodes import (
    Delta,
    Done,
    Fork,
    Join,
    Ref,
    Role,
    Select,
)
from radixrt.errors import InvalidRequest
from radixrt.grammar.constraint import Constraint
from radixrt.request import FinishReason
from tests.lang.scripted import gen, run, text

# ---- replies


async def test_without_a_script_replies_are_made_from_names() -> None:
    program = await run(MockBackend(), gen(0, "city", n=3), gen(1), Select(id=2, choices=(("b",), ("a",)), name="s"))
    assert [output.text for output in program.done(0).outputs] == ["<city>", "<city:1>", "<city:2>"]
    assert (program.text(1), program.text(2)) == ("<gen>", "b")


async def test_a_list_is_consumed_in_order_and_then_used_up() -> None:
    program = await run(MockBackend(["one", "two"]), gen(0, "a"), gen(1, "b"), gen(2, "c", parent=1))
    assert (program.text(0), program.text(1)) == ("one", "two")
    assert program.failed(2).kind == "invalid"
    assert "all 2 replies are used up" in program.failed(2).error


async def test_a_mapping_goes_by_name() -> None:
    backend = MockBackend({"same": "x", "listed": ["1", "2", "3"]})
    program = await run(backend, gen(0, "listed", n=2), gen(1, "same", 0), gen(2, "same", 1), gen(3, "listed", 2))
    assert [output.text for output in program.done(0).outputs] == ["1", "2"]
    assert (program.text(1), program.text(2), program.text(3)) == ("x", "x", "3")
    program = await run(backend, gen(0, "listed"), gen(1, "lsited"), gen(2))
    assert "all 3 replies for 'listed' are used up" in program.failed(0).error
    assert "did you mean 'listed'?" in program.failed(1).error
    assert "this step has none" in program.failed(2).error


async def test_a_function_sees_what_a_model_would_see() -> None:
    def script(call: MockCall) -> str:
        assert call.program == "program"
        return {"c": "two words", "d": "no", "": "after"}[call.name]

    backend = MockBackend(script)
    await run(
        backend,
        Role(id=0, role="user", begin=True),
        text(1, "Say ", "it.", parent=0),
        Role(id=2, parent=1, role="user", begin=False),
        text(3, "\n", parent=2),
        Role(id=4, parent=3, role="assistant", begin=True),
        gen(5, "c", 4, n=2),
        text(6, " (", Ref(5), ")", parent=5, sample=1),
        Select(id=7, parent=6, name="d", choices=(("yes",), ("n", "o"))),
        gen(8, "", 7),
    )
    first, second, choice, last = backend.calls
    asked = "<|im_start|>user\nSay it.<|im_end|>\n\n<|im_start|>assistant\n"
    assert first.text == second.text == asked
    assert (first.sample, second.sample, first.node) == (0, 1, 5)
    assert choice.choices == ("yes", "no")
    assert choice.text == asked + "two words (two words)"
    assert last.text == asked + "two words (two words)no"
    user = {"role": "user", "content": "Say it."}
    assert first.messages == (user, {"role": "assistant", "content": ""})
    assert last.messages == (user, {"role": "assistant", "content": "two words (two words)no"})


async def test_a_function_that_raises_or_returns_no_text_fails_its_step_alone() -> None:
    async def later(call: MockCall) -> str:
        return ""

    def script(call: MockCall) -> Any:
        return {"a": lambda: 1 / 0, "b": lambda: 3, "c": lambda: later(call), "d": lambda: "fine"}[call.name]()

    program = await run(MockBackend(script), gen(0, "a"), gen(1, "b"), gen(2, "c"), gen(3, "d"))
    assert program.failed(0).kind == "error"
    assert "ZeroDivisionError: division by zero" in program.failed(0).error
    assert "=3: must be a string, not int" in program.failed(1).error
    assert "not coroutine" in program.failed(2).error
    assert program.text(3) == "fine"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"replies": "text"}, "replies"),
        ({"replies": 3}, "replies"),
        ({"replies": ["a", 1]}, r"replies\[1\]"),
        ({"replies": {"a": 1}}, r"replies\['a'\]"),
        ({"replies": {"a": ["b", None]}}, r"replies\['a'\]\[1\]"),
        ({"delay": -1}, "delay"),
        ({"delay": True}, "delay"),
        ({"tokens_per_delta": 0}, "tokens_per_delta"),
    ],
)
def test_a_script_that_is_none_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}"):
        MockBackend(**given)


# ---- parameters


@pytest.mark.parametrize(
    ("params", "text", "reason", "stop", "words"),
    [
        ({}, "a b\nc d", FinishReason.STOP, None, 4),
        ({"max_tokens": 4}, "a b\nc d", FinishReason.STOP, None, 4),
        ({"max_tokens": 3}, "a b\nc", FinishReason.LENGTH, None, 3),
        ({"max_tokens": 0}, "", FinishReason.LENGTH, None, 0),
        ({"stop": ["\n", "d"]}, "a b", FinishReason.STOP, "\n", 2),
        ({"stop": ["b\n", "b"]}, "a ", FinishReason.STOP, "b\n", 2),
        ({"stop": ["\n"], "include_stop": True}, "a b\n", FinishReason.STOP, "\n", 3),
        ({"stop": ["b", "c"], "min_tokens": 2}, "a b\n", FinishReason.STOP, "c", 3),
        ({"stop": ["d"], "max_tokens": 1}, "a", FinishReason.LENGTH, None, 1),
        ({"stop": ["x"]}, "a b\nc d", FinishReason.STOP, None, 4),
    ],
)
async def test_a_reply_is_cut_as_parameters_say(
    params: dict[str, Any], text: str, reason: FinishReason, stop: str | None, words: int
) -> None:
    done = (await run(MockBackend(["a b\nc d"]), gen(0, **params))).done(0)
    output = done.outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (text, reason, stop)
    assert done.usage.generated_tokens == words


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("constraint", "fits", "misfits"),
    [
        (Constraint.choice(["yes", "no"]), ["yes", "no"], ["", "Yes", "yes "]),
        (Constraint.literal("x"), ["x"], ["xx"]),
        (Constraint.substring("a cat"), ["a", "a cat"], ["", "dog"]),
        (Constraint.substring("a cat", empty=True), ["", "cat"], ["cats"]),
        (Constraint.regex(r"\d{2}(a|b)?"), ["12", "12b"], ["1", "12c", " 12"]),
        (Constraint.json_object(), ["{}", '{ "a": 1 }'], ["[]", "{", ""]),
        (Constraint.json_schema(SCHEMA), ['{"a": 1}'], ['{"a": "1"}', "{}", "{'a': 1}", ""]),
        (Constraint.alternatives("x", Constraint.regex("y+")), ["x", "yy"], ["", "xy"]),
        (Constraint.grammar('start: "a"'), ["a", "not judged"], []),
    ],
)
async def test_a_reply_must_meet_its_constraint(constraint: Constraint, fits: list[str], misfits: list[str]) -> None:
    replies = fits + misfits
    program = await run(MockBackend(replies), *(gen(i, constraint=constraint) for i in range(len(replies))))
    assert [program.text(i) for i in range(len(fits))] == fits
    for i, reply in enumerate(misfits, len(fits)):
        failed = program.failed(i)
        assert failed.kind == "invalid"
        assert repr(reply) in failed.error
        assert constraint.to_dict()["type"] in failed.error


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s, max_size=3)))
def test_json_is_judged_as_jsonschema_does(value: Any) -> None:
    schema = {"type": ["array", "integer"], "maxItems": 2, "minimum": 0, "items": {"type": ["string", "array"]}}

    async def judged() -> bool:
        program = await run(
            MockBackend([json.dumps(value)]), gen(0, max_tokens=None, constraint=Constraint.json_schema(schema))
        )
        return isinstance(program.events[-1], Done)

    assert asyncio.run(judged()) == jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (Constraint.choice(["yes", "no"]), "yes"),
        (Constraint.sequence("x", Constraint.choice(["yes", "no"])), "xyes"),
        (Constraint.alternatives(Constraint.regex("a"), "b"), "b"),
        (Constraint.json_object(), "{}"),
        (Constraint.substring(" a cat\n"), "a cat"),
        (Constraint.substring("a cat", max_length=1), None),
        (Constraint.substring("a cat", unit="characters", max_length=3), "a c"),
        (Constraint.regex("a+"), None),
        (Constraint.sequence("x", Constraint.regex("a+")), None),
        (Constraint.json_schema(SCHEMA), None),
    ],
)
async def test_without_a_script_a_constraint_is_met_or_a_reply_is_asked_for(
    constraint: Constraint, text: str | None
) -> None:
    program = await run(MockBackend(), gen(0, "a", constraint=constraint))
    if text is None:
        assert "give replies={'a': ...}" in program.failed(0).error
    else:
        assert program.text(0) == text


async def test_a_constrained_reply_that_is_too_long_is_no_shorter_reply() -> None:
    program = await run(MockBackend(["{ }"]), gen(0, max_tokens=1, constraint=Constraint.json_object()))
    assert "max_tokens=1" in program.failed(0).error


async def test_probabilities_of_tokens_are_refused() -> None:
    backend = MockBackend()
    assert backend.capabilities.params is not None
    assert "logprobs" not in backend.capabilities.params
    assert "top_k" in backend.capabilities.params
    assert (await run(backend, gen(0, logprobs=0))).failed(0).kind == "unsupported"


@pytest.mark.parametrize("method", ["token_length_normalized", "total_logprob"])
async def test_a_select_is_what_the_script_says_with_figures_that_agree(method: str) -> None:
    long = "several words are in this one, and then some more of them"
    choices = (("a",), ("b",), ("see ", Ref(0)))
    backend = MockBackend({"x": long, "s": f"see {long}", "t": "c"})
    program = await run(
        backend,
        gen(0, "x"),
        Select(id=1, choices=choices, name="s", method=method),
        Select(id=2, choices=choices, name="t"),
        Select(id=3, choices=(), name="s"),
    )
    done = program.done(1)
    choosing = done.choosing
    assert choosing is not None
    assert (done.outputs[0].text, choosing.index) == (f"see {long}", 2)
    assert choosing.scores.index(max(choosing.scores)) == 2
    assert choosing.probabilities[2] == choosing.confidence == max(choosing.probabilities)
    assert sum(choosing.probabilities) == pytest.approx(1)
    assert choosing.logprobs == pytest.approx([sum(values) for values in choosing.token_logprobs])
    assert [len(ids) for ids in choosing.tokens] == [1, 1, 13]
    assert "'c': must be one of the choices" in program.failed(2).error
    assert "at least one" in program.failed(3).error


# ---- streams, usage


async def test_deltas_are_the_reply_in_pieces() -> None:
    program = await run(
        MockBackend([" one two\nthree ", "x"], tokens_per_delta=2), gen(0), gen(1), text(2, "!", parent=1)
    )
    parts = [event for event in program.events if isinstance(event, Delta)]
    assert [(event.node, event.text) for event in parts] == [(0, " one two"), (1, "x"), (0, "\nthree ")]
    assert program.text(0) == " one two\nthree "


async def test_samples_stream_side_by_side_and_a_delay_changes_nothing_but_time() -> None:
    nodes = (
        gen(0, "a", n=2),
        Role(id=1, role="user", begin=True, parent=0),
        gen(2, "b", 1),
        gen(3, "", 2, max_tokens=0),
    )
    at_once, in_pieces, slowly = [
        await run(MockBackend({"a": "1 2 3", "b": "", "": "x"}, **how), *nodes)  # type: ignore[arg-type]
        for how in ({}, {"tokens_per_delta": 1}, {"tokens_per_delta": 1, "delay": 0.001})
    ]
    for program in (in_pieces, slowly):
        streamed: dict[int, str] = {0: "", 1: ""}
        for event in program.events:
            if isinstance(event, Delta):
                assert event.node == 0
                streamed[event.sample] += event.text
        assert streamed == {0: "1 2 3", 1: "1 2 3"}
        assert [program.done(i).outputs for i in range(4)] == [at_once.done(i).outputs for i in range(4)]
    assert sum(isinstance(event, Delta) for event in at_once.events) == 2
    assert slowly.done(0).usage.decode_time == 0.001
    assert in_pieces.done(2).usage == at_once.done(2).usage


async def test_usage_counts_words_once_where_they_are_shared() -> None:
    backend = MockBackend({"a": "x y", "b": "z"})
    program = await run(
        backend, text(0, "one two three"), gen(1, "a", 0), gen(2, "b", 0), text(3, "four", parent=1), gen(4, "b", 3)
    )
    usage = [
        (u.prompt_tokens, u.cached_tokens, u.computed_tokens, u.generated_tokens)
        for u in (program.done(i).usage for i in (1, 2, 4))
    ]
    assert usage == [(3, 0, 3, 2), (3, 3, 0, 1), (6, 5, 1, 1)]
    assert await backend.stats() == {"requests": 3, "prompt_tokens": 12, "cached_tokens": 8, "generated_tokens": 4}


async def test_the_same_program_gives_the_same_events() -> None:
    nodes = (text(0, "a"), Fork(id=1, parent=0, count=2), gen(2, "x", 1), gen(3, "y", 1), Join(id=4, parent=0, branches=(2, 3)),
             text(5, Ref(3), parent=4), Select(id=6, parent=5, choices=(("a",), ("b",))))  # fmt: skip
    first, second = [await run(MockBackend(), *nodes) for _ in range(2)]
    assert first.events == second.events
    assert [event.node for event in first.events if isinstance(event, Done)] == [2, 3, 6]
