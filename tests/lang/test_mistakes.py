"""What an author gets wrong is answered with a typed error that names the line."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import lang as sgl
from lang import (
    GenerationFailed,
    MockBackend,
    ProgramTimeout,
    UnknownVariable,
    UsageError,
    function,
    gen,
    select,
    system,
    user,
)


def run(body: Any, backend: MockBackend | None = None, **options: Any) -> Any:
    return function(body).run(backend=backend or MockBackend(), **options)


def failing(body: Any, kind: type[BaseException], match: str, backend: Any = None) -> None:
    with pytest.raises(kind, match=match) as caught:
        run(body, backend)
    assert "test_mistakes.py:" in str(caught.value), "the author's line is missing"


def _unset(s: Any) -> None:
    s += gen("answer")
    s["anwser"]


def _role_in_role(s: Any) -> None:
    s += user("a" + system("b"))


def _role_not_begun(s: Any) -> None:
    s += sgl.user_end()


def _twice(s: Any) -> None:
    s += gen("a")
    s += gen("a")


def _twice_in_branch(s: Any) -> None:
    s += gen("a")
    s.fork(2)[0].__iadd__(select("a", ["x"]))


def _none(s: Any) -> None:
    s += None


def _number(s: Any) -> None:
    s += 3


def _surrogate(s: Any) -> None:
    s += "half of a pair: \ud83d"


def _negative(s: Any) -> None:
    s += gen("a", max_tokens=-3)


def _misspelt(s: Any) -> None:
    s += gen("a", temprature=1)


def _two_constraints(s: Any) -> None:
    s += gen("a", regex="a", type=int)


def _quoted_from_nothing(s: Any) -> None:
    s += gen("a", substring=" ")


def _no_choices(s: Any) -> None:
    s += select("a", [])


def _text_as_choices(s: Any) -> None:
    s += select("a", "yes")


def _equal_choices(s: Any) -> None:
    s += select("a", ["x", "x"])


def _no_branches(s: Any) -> None:
    s.fork(0)


def _too_few(s: Any) -> None:
    group = s.fork(2)
    group += ["one"]


def _image(s: Any) -> None:
    s += sgl.image("cat.png")


def _method(s: Any) -> None:
    s += select("a", ["x"], choices_method="total_logprobs")


def _nothing_to_vote(s: Any) -> None:
    s += gen("a")
    s.vote("a")


@pytest.mark.parametrize(
    ("body", "kind", "match"),
    [
        (_unset, UnknownVariable, r"'anwser' was never set \(set: 'answer'\); did you mean 'answer'"),
        (_role_in_role, UsageError, "system begins inside of user"),
        (_role_not_begun, UsageError, "user ends here but no message was begun"),
        (_twice, UsageError, r"'a' is set already, at .*test_mistakes.py:\d+"),
        (_twice_in_branch, UsageError, "'a' is set already"),
        (_none, UsageError, "None was appended"),
        (_number, UsageError, r"3 of type int was appended: make it text with str"),
        (_surrogate, UsageError, "lone surrogate at character 16"),
        (_negative, UsageError, r"max_tokens.*-3"),
        (_misspelt, UsageError, "temprature: no such parameter; did you mean 'temperature'"),
        (_two_constraints, UsageError, "regex and type cannot both"),
        (_quoted_from_nothing, UsageError, "substring: has nothing in it"),
        (_no_choices, UsageError, "at least one text"),
        (_text_as_choices, UsageError, "must be a list of texts"),
        (_equal_choices, UsageError, "'x' twice"),
        (_no_branches, UsageError, "at least 1"),
        (_too_few, UsageError, "1 entries were appended to 2 branches"),
        (_image, UsageError, "text-only"),
        (_method, UsageError, "did you mean 'total_logprob'"),
        (_nothing_to_vote, UsageError, "a vote needs several"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_mistakes_name_the_authors_line(body: Any, kind: type[BaseException], match: str) -> None:
    failing(body, kind, match)


def test_arguments_are_checked_before_anything_runs() -> None:
    @function
    def body(s: Any, question: str) -> None:
        s += question

    for kwargs, match in (
        ({"qestion": "x"}, "no argument 'qestion'; did you mean 'question'"),
        ({}, "missing a required argument: 'question'"),
        ({"question": "x", "temperatur": 1}, "did you mean 'temperature'"),
    ):
        with pytest.raises(UsageError, match=match):
            body.run(backend=MockBackend(), **kwargs)


def test_a_failure_that_nobody_read_is_raised_by_run() -> None:
    def body(s: Any) -> None:
        s += gen("a", regex="[0-9]")

    with pytest.raises(GenerationFailed, match=r"test_mistakes.py:\d+: 'a': "):
        run(body, MockBackend({"a": "x"}))


def test_a_body_that_raises_keeps_its_traceback() -> None:
    def deep() -> None:
        raise LookupError("deep")

    def body(s: Any) -> None:
        s += gen("a")
        s["a"]
        deep()

    with pytest.raises(LookupError) as caught:
        run(body)
    assert [entry.name for entry in caught.traceback][-2:] == ["body", "deep"]


def test_a_timeout_ends_the_program() -> None:
    async def body(s: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(ProgramTimeout, match=r"did not end within 0\.01 seconds"):
        run(body, timeout=0.01)


def test_a_finished_program_takes_nothing_more() -> None:
    state = run(lambda s: s.append("x"))
    with pytest.raises(UsageError, match="over"):
        state += "y"


def test_names_that_are_not_there_say_what_to_do() -> None:
    with pytest.raises(AttributeError, match="OpenAI"):
        sgl.Anthropic  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        sgl.nonsense  # noqa: B018
    for name in sgl.__all__:
        assert getattr(sgl, name) is not None
