"""Tools in programs: what a function is to the model, rounds of calls and results, and the same text as the model's template writes."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field
from transformers.utils.chat_template_utils import render_jinja_template

from lang import (
    Cancelled,
    GenerationFailed,
    MockBackend,
    OpenAI,
    Replay,
    Runtime,
    UsageError,
    assistant,
    function,
    gen,
    system,
    tool,
    user,
)
from radixrt.engine.nodes import Gen, Read, Role, ToolResult, Wait, from_dict, to_dict
from radixrt.errors import InvalidRequest
from tests.lang.test_runtime import Pipe
from tests.tools.test_messages import PLAIN, QWEN, SHORT_IDS

Make = Callable[..., Runtime]


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def later(word: str) -> dict[str, str]:
    """Answer later."""
    await asyncio.sleep(0)
    return {"word": word}


def broken(word: str) -> str:
    """Fail."""
    raise KeyError(word)


@function
def ask(s: Any, tools: Any, **options: Any) -> None:
    s += user("Well?")
    s += assistant(gen("answer", tools=tools, **options))


# ---- what a function is to the model


class Point(BaseModel):
    x: float
    y: float = Field(ge=0)


@dataclass
class Person:
    name: str
    age: int


def sphinx(city: str, unit: Literal["C", "F"] = "C") -> str:
    """Weather.

    It is long.

    :param city: which one,
        with its country
    :param str unit: of degrees
    :returns: words
    """
    return city + unit


def google(city: str, people: list[Person] | None = None, *, at: Annotated[Point, "where"]) -> str:
    """Weather.

    Args:
        city (str): which one,
            with its country
        at: not this one
    Returns:
        words: many
    """
    return city


class Held:
    def method(self, a: int) -> int:
        """Of an object."""
        return a

    def __call__(self, a: int) -> int:
        """Called."""
        return -a


@pytest.mark.parametrize(
    "fn, name, description, about, required",
    [
        (add, "add", "Add two numbers.", {}, ["a"]),
        (
            sphinx,
            "sphinx",
            "Weather.\n\nIt is long.",
            {"city": "which one, with its country", "unit": "of degrees"},
            ["city"],
        ),
        (google, "google", "Weather.", {"city": "which one, with its country", "at": "where"}, ["city", "at"]),
        (later, "later", "Answer later.", {}, ["word"]),
        (Held().method, "method", "Of an object.", {}, ["a"]),
        (Held(), "Held", "Called.", {}, ["a"]),
        (partial(add, b=4), "add", "Add two numbers.", {}, ["a"]),
        (tool(add, name="plus", description="Sum."), "plus", "Sum.", {}, ["a"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_signature_and_docstring(
    fn: Any, name: str, description: str, about: dict[str, str], required: list[str]
) -> None:
    made = tool(fn).tool
    assert (made.name, made.description) == (name, description)
    schema = made.parameters
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["required"] == required and schema["additionalProperties"] is False
    said = {key: part["description"] for key, part in schema["properties"].items() if "description" in part}
    assert said == about


def test_arguments_come_as_the_types_that_the_function_has() -> None:
    values = tool(google).arguments('{"city": "Rome", "people": [{"name": "A", "age": 3}], "at": {"x": 1, "y": 2}}')
    assert values == {"city": "Rome", "people": [Person("A", 3)], "at": Point(x=1, y=2)}
    with pytest.raises(ValueError, match=r"at.y: Input should be greater"):
        tool(google).arguments('{"city": "Rome", "at": {"x": 1, "y": -2}}')


def untyped(a, b: int):  # type: ignore[no-untyped-def]
    return a


def spread(*words: str) -> str:
    return ""


def anything(a: Any) -> str:
    return ""


def positional(a: int, /) -> int:
    return a


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"tools": add}, "must be a list"),
        ({"tools": [3]}, "a tool is a function with typed parameters"),
        ({"tools": [untyped]}, "'untyped': parameter 'a' has no type"),
        ({"tools": [spread]}, r"'spread': \*words: 'str' cannot be given by name|'spread': \*words: str cannot be given"),
        ({"tools": [positional]}, "cannot be given by name"),
        ({"tools": [anything]}, "'anything': .*a may be anything"),
        ({"tools": [lambda: 1]}, "must be 1 to 128 letters"),
        ({"tools": [add, add]}, "another tool of the name 'add'"),
        ({"tools": [add], "tool_choice": "ad"}, "did you mean 'add'"),
        ({"tools": [add], "tool_choice": 3}, "tool_choice=3"),
        ({"tools": [add], "n": 2}, "n=2: with tools there is one sample"),
        ({"tools": [add], "max_rounds": 0}, "max_rounds=0: must be at least 1"),
        ({"tool_choice": "auto"}, "tool_choice needs tools"),
        ({"max_rounds": 2}, "max_rounds needs tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice='required'"),
        ({"separate_reasoning": 1}, "separate_reasoning=1: must be True or False"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as refused:
        gen("x", **options)
    assert __file__ in refused.value.location


# ---- rounds


def test_results_stand_in_the_order_of_the_calls_and_errors_are_results() -> None:
    said = "\n".join(
        [call("add", a=2), call("broken", word="x"), call("later", word="hm"), call("add", a="?"), call("none")]
    )
    backend = MockBackend([f"Let me see. {said}", call("add", a=40, b=2), "It is 42."])
    state = ask.run([add, later, broken], backend=backend)
    assert state["answer"] == "It is 42." == state.meta("answer")["content"]
    results = [
        "3",
        "error: KeyError: 'x'",
        '{"word":"hm"}',
        "error: ValueError: a: Input should be a valid integer, unable to parse string as an integer",
        "error: KeyError: 'none'",
    ]
    made = state.calls("answer")
    assert [one.result for one in made] == [*results, "42"]
    assert [one.arguments for one in made][::5] == [{"a": 2}, {"a": 40, "b": 2}]
    assert isinstance(made[1].error, KeyError) and made[0].value == 3 and all(one.seconds >= 0 for one in made)
    assert [m["content"] for m in backend.calls[1].messages if m["role"] == "tool"] == results
    assert [m["content"] for m in state.messages() if m["role"] == "tool"] == [*results, "42"]
    assert len({one.id for one in made}) == 6


def test_calls_run_side_by_side_in_threads_and_on_the_loop() -> None:
    met = threading.Barrier(3, timeout=20)

    def one(n: int) -> int:
        met.wait()
        return n

    async def two(n: int) -> int:
        await asyncio.to_thread(met.wait)
        return n

    said = call("one", n=1) + call("two", n=2) + call("one", n=3)
    state = ask.run([one, two], backend=MockBackend([said, "ok"]))
    assert [made.value for made in state.calls("answer")] == [1, 2, 3]


@pytest.mark.parametrize("most", [1, 3])
def test_after_max_rounds_the_model_must_answer(most: int) -> None:
    backend = MockBackend(lambda asked: call("add", a=1))
    state = ask.run([add], max_rounds=most, tool_choice=add, backend=backend)
    reads = [node.read for node in state.graph if isinstance(node, Gen)]
    assert reads == [Read("named", "add"), *[Read("auto")] * (most - 1), Read("none")]
    assert len(state.calls("answer")) == most and state["answer"] == call("add", a=1)


def test_a_program_goes_on_behind_its_answer_and_in_branches() -> None:
    @function
    def talk(s: Any) -> Any:
        s += system("Be brief.") + user("1 + 1?")
        s += assistant(gen("first"))
        s += user("And with a tool?")
        s += assistant("So: " + gen("second", tools=[add], type=int))

        def more(branch: Any, n: int) -> list[Any]:
            branch += user(f"And {n}?") + assistant(gen("third", tools=[add]))
            return [branch["first"], branch["second"], branch["third"], len(branch.calls("third"))]

        return s.map([1, 2], more)

    def reply(asked: Any) -> str:
        last = asked.messages[-2]
        return "2" if last["role"] == "tool" or asked.name == "first" else call("add", a=1)

    backend = MockBackend(reply)
    state = talk.run(backend=backend)
    assert state.ret_value == [["2", 2, "2", 1]] * 2
    roles = [message["role"] for message in state.messages()]
    assert roles == ["system", "user", "assistant", "user", "assistant", "tool", "assistant"]
    assert state.text().count("1 + 1?") == 1  # the chat was written anew with its tools, and is there once


@pytest.mark.parametrize(
    "body, problem",
    [
        (lambda s: s.append(gen("a", tools=[add])), "must stand in an assistant message"),
        (lambda s: s.append(user(gen("a", tools=[add]))), "must stand in an assistant message"),
        (lambda s: [s.append(user("x") + assistant(gen("a"))), s.calls("b")], "'b' was never set"),
        (lambda s: [s.append(user("x") + assistant(gen("a"))), s.reasoning("a")], "not kept apart"),
    ],
)
def test_misuse(body: Any, problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        function(lambda s: body(s) and None).run(backend=MockBackend())


@pytest.mark.parametrize("options, what", [({"tools": [add]}, "cannot run tools"), ({"separate_reasoning": True}, "cannot keep thinking apart")])  # fmt: skip
def test_a_backend_that_cannot_says_so(options: dict[str, Any], what: str) -> None:
    @function
    def body(s: Any) -> None:
        s += user("x") + assistant(gen("a", **options))

    with pytest.raises(UsageError, match=f"openai {what}"):
        body.run(backend=OpenAI("m", base_url="http://127.0.0.1:9", api_key="x"))


def test_cancelling_the_program_cancels_its_tools() -> None:
    started, ended = threading.Event(), threading.Event()

    async def endless() -> None:
        """Never."""
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    state = ask.run([endless], backend=MockBackend([call("endless")]), stream=True)
    assert started.wait(20)
    state.cancel()
    assert ended.wait(20)
    with pytest.raises(Cancelled):
        list(state.text_iter())


def test_a_step_by_hand() -> None:
    @function
    def body(s: Any) -> list[str]:
        s += "Sum: "
        one, two, three = s.tool(add, 1, b=2), s.tool(later, word="x"), s.tool(broken, "y")
        s += str(one)
        assert isinstance(three.error, KeyError) and one.value == 3 and one.arguments == {0: 1, "b": 2}
        return [one.result, two.result, three.result]

    state = body.run(backend=MockBackend())
    assert state.ret_value == ["3", '{"word":"x"}', "error: KeyError: 'y'"] and state.text() == "Sum: 3"
    assert [node.tools for node in state.graph if isinstance(node, Wait)] == [("add",), ("later",), ("broken",)]


def test_compiled_drawn_recorded_and_replayed(tmp_path: Path) -> None:
    backend = MockBackend([f"<think>hm</think>{call('add', a=1)}", "ok"])
    state = ask.compile().run([add], backend=backend)
    page = state.graph.to_html(tmp_path / "page.html").read_text()
    assert "results of tools" in page and "add" in page and state.reasoning("answer") == "hm"
    replay = Replay(state.graph.save(tmp_path / "record"))
    again = ask.run([add], backend=replay)
    assert again["answer"] == "ok" and again.text() == state.text() and replay.missed == 0
    assert [one.arguments for one in again.calls("answer")] == [{"a": 1}] and again.reasoning("answer") == "hm"

    def add_wrong(a: int) -> int:
        """Add two numbers."""
        return a

    with pytest.raises(GenerationFailed, match="not in the record"):
        ask.run([tool(add_wrong, name="add")], backend=Replay(state.graph))


# ---- thinking


@pytest.mark.parametrize("per_delta", [None, 1])
def test_streams_of_a_variable_are_its_value(per_delta: int | None) -> None:
    @function
    def think(s: Any) -> None:
        s += user("x") + assistant(gen("a", separate_reasoning=True))
        s += user("y") + assistant(gen("b"))

    for name, value in (("a", "so it is"), ("b", "<think>hm</think> b")):
        backend = MockBackend(["<think>a b c</think>so it is", "<think>hm</think> b"], tokens_per_delta=per_delta)
        state = think.run(backend=backend, stream=True)
        assert "".join(state.text_iter(name)) == value == state[name]
        assert "<think>a b c</think>so it is" in "".join(state.text_iter()) == state.text()
        assert state.reasoning("a") == "a b c"


# ---- on an engine


@pytest.fixture
def tiny_model(tiny_model: Path, tmp_path: Path) -> Path:
    """One whose context holds the description of tools, a byte a token."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return directory


def model_of(make: Make, tmp_path: Path, template: str, **settings: Any) -> Runtime:
    path = tmp_path / "t.jinja"
    path.write_text(template)
    return make(chat_template=str(path), max_total_tokens=8192, **settings)


LLAMA_LIKE = """{%- if tools %}<sys>{{ tools | tojson }}"parameters": <|python_tag|></sys>{% endif %}
{%- for m in messages %}{% if m.role == "tool" %}<ipython>{{ m.content | tojson }}</ipython>
{%- elif m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception("one call") }}{% endif %}<assistant>
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}{{ m.tool_calls[0].function.arguments | tojson }}}</assistant>
{%- else %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


QWEN_LIKE = QWEN.replace("<tool_call>", "{{ '\\n' }}<tool_call>", 1)  # where its generation prompt ends
MISTRAL_LIKE = SHORT_IDS.replace(
    "{%- else %}[", '{%- elif message.role == "assistant" %}{{ message.content }}</s>{%- else %}['
)


def shout(word: Literal["yes", "no"]) -> str:
    """Shout a word."""
    return f'{word.upper()} "!"\n'


@function
def forced(s: Any, choice: Any = shout, parallel: bool = False) -> None:
    s += user("Shout.")
    with s.assistant():
        s += gen(
            "answer",
            120,
            tools=[shout],
            tool_choice=choice,
            parallel_tool_calls=parallel,
            max_rounds=1,
            regex="[ab]{3}",
            temperature=1.0,
        )
    s += user("Again.") + assistant(gen("more", 3))


@pytest.mark.parametrize("template", [QWEN_LIKE, MISTRAL_LIKE, LLAMA_LIKE], ids=["qwen", "mistral", "llama"])
def test_the_text_is_what_transformers_renders(make_runtime: Make, tmp_path: Path, template: str) -> None:
    runtime = model_of(make_runtime, tmp_path, template)
    state = forced.run(backend=runtime, seed=3)
    assert re.fullmatch("[ab]{3}", state["answer"])
    (made,) = state.calls("answer")
    assert made.result == f'{made.arguments["word"].upper()} "!"\n'
    first = next(node for node in state.graph if isinstance(node, Gen))
    raw = state.graph.done[first.id].outputs[0].text
    sent = {"name": made.name, "arguments": made.arguments}
    messages = [
        {"role": "user", "content": "Shout."},
        {"role": "assistant", "content": "", "tool_calls": [{"id": made.id, "type": "function", "function": sent}]},
        {"role": "tool", "tool_call_id": made.id, "content": made.result},
        {"role": "assistant", "content": state["answer"]},
        {"role": "user", "content": "Again."},
        {"role": "assistant", "content": state["more"]},
    ]
    rendered, _ = render_jinja_template([messages], tools=[tool(shout).tool.to_openai()], chat_template=template)
    before, found, after = state.text().partition(
        raw
    )  # the call is the text that the model wrote, all else the template's
    assert found and made.name in rendered[0]
    assert (rendered[0][: len(before)], rendered[0][-len(after) :]) == (before, after)


@pytest.mark.parametrize("template", [QWEN, PLAIN], ids=["native", "in words"])
def test_the_same_tokens_in_process_and_over_messages(make_runtime: Make, tmp_path: Path, template: str) -> None:
    runtime = model_of(make_runtime, tmp_path, template)
    found = []
    for backend in (runtime, Pipe(runtime)):
        state = forced.run("required", True, backend=backend, seed=5)
        outputs = [state.graph.done[node.id].outputs[0].token_ids for node in state.graph if isinstance(node, Gen)]
        found.append((outputs, state.text(), state["answer"], [(c.id, c.arguments) for c in state.calls("answer")]))
    assert found[0] == found[1] and found[0][3]


def test_a_waiting_program_computes_nothing_twice_and_leaves_nothing_behind(make_runtime: Make, tmp_path: Path) -> None:
    runtime = model_of(make_runtime, tmp_path, QWEN)
    seen: list[dict[str, Any]] = []

    async def look() -> str:
        """Look at the leases."""
        seen.append(await runtime.stats())
        return "ok"

    @function
    def body(s: Any) -> None:
        s += user("Look.")
        s += assistant(gen("a", 60, tools=[look], tool_choice=look, max_rounds=1, temperature=0))
        s.tool(look)
        s += user("More.") + assistant(gen("b", 2, ignore_eos=True))

    state = body.run(backend=runtime)
    assert [(one["leases"], one["leased_tokens"] > 0) for one in seen] == [(1, True), (1, True)]
    stats = runtime.get_server_info()
    assert (stats["leases_granted"], stats["leases_resumed"], stats["leases"], stats["leased_tokens"]) == (2, 2, 0, 0)
    done = [state.graph.done[node.id].usage for node in state.graph if isinstance(node, Gen)]
    for before, after in pairwise(done):  # nobody computed the forced ones at its end; token healing may cut one
        assert after.cached_tokens >= before.prompt_tokens + before.generated_tokens - before.forced_tokens - 3
    off = model_of(make_runtime, tmp_path, QWEN, program_leases=False)
    state = forced.run(backend=off)
    assert state.calls("answer") and off.get_server_info()["leases_granted"] == 0


@pytest.mark.parametrize("opened", [True, False])
def test_thinking_is_apart_and_constraints_follow_it(make_runtime: Make, tmp_path: Path, opened: bool) -> None:
    begin = "<think>\n" if opened else ""
    runtime = model_of(
        make_runtime,
        tmp_path,
        PLAIN + "{# </think> #}{% if add_generation_prompt %}<assistant>" + begin + "{% endif %}",
    )

    @function
    def think(s: Any) -> None:
        s += user("x")
        s += assistant(gen("a", 60, regex="[ab]{4}", separate_reasoning=True, temperature=1.0))

    for seed in range(3):
        state = think.run(backend=runtime, seed=seed, stream=True)
        assert "".join(state.text_iter("a")) == state["a"] and re.fullmatch("[ab]{4}", state["a"])
        raw = state.meta("a")["text"]
        assert ("</think>" in raw) == (opened or raw.startswith("<think>"))
        assert state.reasoning("a") in raw and raw.endswith(state["a"]) and "</think>" not in state.reasoning("a")


# ---- messages


RESULT = ToolResult("id", "add", "{}", "3", 0.5)
TOOL = {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    "node",
    [
        Role(id=1, role="user", begin=True, tools=(TOOL,)),
        Role(id=1, role="assistant", begin=True, results=(RESULT,)),
        Gen(id=1, read=Read("named", "add", False, False)),
        Wait(id=1, tools=("a", "b")),
    ],
    ids=["tools", "results", "read", "wait"],
)
def test_nodes_go_out_and_come_back(node: Any) -> None:
    assert from_dict(json.loads(json.dumps(to_dict(node)))) == node


@pytest.mark.parametrize(
    "data, problem",
    [
        ({"kind": "role", "role": "user", "begin": True, "tools": [{"name": "a b"}]}, r"tools\[0\].function.name"),
        ({"kind": "role", "role": "user", "begin": True, "tools": 3}, r"tools=3: must be a list"),
        ({"kind": "role", "role": "x", "begin": True, "results": [{"id": "a"}]}, r"results\[0\].name: is missing"),
        ({"kind": "role", "role": "x", "begin": True, "results": [3]}, r"results\[0\]=3: must be an object"),
        ({"kind": "role", "role": "x", "begin": True, "results": [{"id": "a", "name": "b", "arguments": "{}", "content": "", "seconds": -1}]}, "seconds=-1: must be a number"),
        ({"kind": "role", "role": "x", "begin": True, "results": [{"id": "a", "name": "b", "arguments": "{}", "content": "", "seconds": float("nan")}]}, "seconds=nan: must be"),
        ({"kind": "gen", "read": {"choice": 3}}, "read.choice=3: must be a string"),
        ({"kind": "gen", "read": {"chioce": "auto"}}, "did you mean 'choice'"),
        ({"kind": "wait", "tools": [3]}, r"tools\[0\]=3: must be a string"),
    ],
)  # fmt: skip
def test_malformed_nodes_are_named(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        from_dict({"id": 1, **data})


@pytest.mark.parametrize(
    "nodes, problem",
    [
        ([{"kind": "text", "parts": ["x"]}, {"kind": "gen", "read": {"choice": "required"}}], "tool_choice"),
        ([{"kind": "text", "parts": ["x"]}, {"kind": "gen", "read": {"choice": "perhaps"}}], "tool_choice"),
        ([{"kind": "role", "role": "user", "begin": True}, {"kind": "role", "role": "user", "begin": False}, {"kind": "role", "role": "assistant", "begin": True, "tools": [TOOL]}], "first message of a chat"),
        ([{"kind": "role", "role": "assistant", "begin": True, "results": [{"id": "a", "name": "b", "arguments": "{}", "content": ""}]}], "must follow calls"),
        ([{"kind": "role", "role": "assistant", "begin": True, "tools": [TOOL]}, {"kind": "role", "role": "assistant", "begin": True, "results": [{"id": "a", "name": "b", "arguments": "[", "content": ""}]}], "arguments"),
    ],
)  # fmt: skip
def test_what_an_engine_refuses_fails_by_name(
    make_runtime: Make, tmp_path: Path, nodes: list[dict[str, Any]], problem: str
) -> None:
    runtime = model_of(make_runtime, tmp_path, QWEN)

    @function
    def body(s: Any) -> None:
        for node in nodes:
            made = from_dict({"id": 0, **node})
            s._add(lambda id, made=made: replace(made, id=id, parent=s._head), "here")

    with pytest.raises(GenerationFailed, match=problem):
        body.run(backend=runtime)
