"""Hostile and clumsy input: each ends in a typed error that names the author's line, or works; programs beside it go on, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import greenlet
import pytest

from lang import (
    Cancelled,
    GenerationFailed,
    MockBackend,
    ProgramTimeout,
    Runtime,
    UnknownVariable,
    UsageError,
    assistant,
    function,
    gen,
    select,
    user,
)
from lang.errors import ProgramError
from lang.loop import LOOP
from radixrt import Engine, RadixrtError
from radixrt.engine.nodes import Failed
from radixrt.engine.programs import Programs
from radixrt.engine.protocol import ProgramChannel, event_from_dict, event_to_dict, written
from tests.lang.conftest import idle

ODD: list[Any] = [
    float("nan"), -1, 10**400, b"x", "", [], {}, object(), 1.5, (), {1}, float("inf"), 0, ["a", 1], True,
]  # fmt: skip


def run(body: Any, backend: Any = None, **options: Any) -> Any:
    return function(body).run(backend=backend or MockBackend(), **options)


def good(s: Any, i: int = 0) -> str:
    s += f"item {i}: " + gen("a")
    return str(s["a"])


def healthy() -> None:
    """Eight good programs end as they should, soon."""
    states: list[Any] = []
    batch = function(good)
    thread = threading.Thread(target=lambda: states.extend(batch.run_batch([{}] * 8, backend=MockBackend())))
    thread.daemon = True
    thread.start()
    thread.join(10)
    assert [state.ret_value for state in states] == ["<a>"] * 8


def refused(body: Callable[..., Any], kind: Any = UsageError, **options: Any) -> Any:
    with pytest.raises(kind) as caught:
        run(body, **options)
    if isinstance(caught.value, ProgramError):
        assert "test_hostile.py:" in caught.value.location, caught.value
    return caught.value


# ---- values of the wrong type

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "append": lambda s, v: s.append(v),
    "fork": lambda s, v: s.fork(v),
    "race": lambda s, v: s.fork(2).race(v),
    "race_fn": lambda s, v: s.fork(2).race(1, v),
    "join": lambda s, v: s.fork(2).join(v),
    "map_fn": lambda s, v: s.map([1], v),
    "map_on_error": lambda s, v: s.map([1], lambda b, x: x, on_error=v),
    "best_of": lambda s, v: s.best_of(v, gen("q"), score=lambda b: 1),
    "best_of_score": lambda s, v: s.best_of(2, gen("q"), score=v),
    "set_var": lambda s, v: s.set_var(v, 1),
    "var_scope": lambda s, v: s.var_scope(v).__enter__(),
    "read": lambda s, v: s[v],
    "meta": lambda s, v: s.meta(v),
    "gen_name": lambda s, v: s.append(gen(v)),
    "gen_temperature": lambda s, v: s.append(gen("q", temperature=v)),
    "gen_constraint": lambda s, v: s.append(gen("q", constraint=v)),
    "gen_type": lambda s, v: s.append(gen("q", type=v)),
    "gen_heal": lambda s, v: s.append(gen("q", heal=v)),
    "select_choices": lambda s, v: s.append(select("q", v)),
    "select_temperature": lambda s, v: s.append(select("q", ["a", "b"], v)),
    "select_seed": lambda s, v: s.append(select("q", ["a", "b"], seed=v)),
    "select_method": lambda s, v: s.append(select("q", ["a", "b"], choices_method=v)),
}
FINE = {  # values that are right there
    "append": [""],
    "fork": [],
    "gen_heal": [True],
    "gen_temperature": [0, 1.5],
    "select_temperature": [0, 1.5],
    "select_seed": [-1, 0],
}


@pytest.mark.parametrize("what", CALLS)
def test_wrong_types_are_named_with_their_line(what: str) -> None:
    for value in ODD:
        if any(type(value) is type(fine) and value == fine for fine in FINE.get(what, [])):
            continue

        def body(s: Any, value: Any = value) -> None:
            CALLS[what](s, value)

        if what == "gen_temperature" and value == {1}:
            continue
        refused(body, (UsageError, UnknownVariable))
    healthy()


@pytest.mark.parametrize("option", ["backend", "stream", "seed", "timeout", "cache_salt", "heal"])
def test_wrong_options_of_a_run_are_named(option: str) -> None:
    fine: dict[str, list[Any]] = {
        "seed": [-1, 0], "timeout": [1.5, float("inf"), 0], "cache_salt": [""], "stream": [True], "heal": [True],
    }  # fmt: skip
    for value in ODD:
        if any(type(value) is type(one) and value == one for one in fine.get(option, [])):
            continue
        with pytest.raises(ProgramError) as caught:
            function(good).run(**{"backend": MockBackend(), option: value})
        assert "test_hostile.py:" in str(caught.value)
        with pytest.raises(ProgramError):
            function(good).run_batch([{option: value}], backend=MockBackend())
    assert function(good).run(backend=MockBackend(), timeout=None, seed=None, stream=None)["a"] == "<a>"
    with pytest.raises(ProgramTimeout):
        function(good).run(backend=MockBackend(delay=0.1), timeout=0)


@pytest.mark.parametrize("batch", [5, None, "abc", b"x", {"i": 1}, [1], ["ab"], [{1: 2}], [{"zz": 1}]], ids=repr)
def test_wrong_batches_are_named(batch: Any) -> None:
    with pytest.raises(UsageError):
        function(good).run_batch(batch, backend=MockBackend())
    healthy()


@pytest.mark.parametrize("score", [lambda b: float("nan"), lambda b: {}, lambda b: object(), lambda b: None])
def test_scores_must_have_an_order(score: Any) -> None:
    refused(lambda s: s.best_of(2, gen("q"), score=score))


def test_an_expression_is_not_formatted_into_a_text() -> None:
    error = refused(lambda s: s.append(f"Answer: {gen('x')}!"))
    assert "gen('x') was formatted into a text" in str(error)
    refused(lambda s: s.append("{}".format("a" + select("x", ["b"]))))


def test_many_choices_take_linear_time() -> None:
    names = [str(i) for i in range(50_000)]
    assert run(lambda s: s.append(select("x", names)) and s["x"], MockBackend({"x": "49999"})).ret_value == "49999"
    assert "twice" in str(refused(lambda s: s.append(select("x", [*names, "49999"]))))


# ---- functions of every kind


def test_what_cannot_be_a_program_is_refused_when_it_is_made() -> None:
    def yields(s: Any) -> Any:
        yield s

    async def ayields(s: Any) -> Any:
        yield s

    class Yields:
        def __call__(self, s: Any) -> Any:
            yield s

    for fn in (yields, ayields, Yields(), int, lambda: 1, lambda **all: 1, lambda *, s: 1, 5, "f"):
        with pytest.raises(UsageError, match=r"test_hostile\.py:"):
            function(fn)


def test_a_program_called_inside_another_says_what_is_wrong_with_its_arguments() -> None:
    def inner(s: Any, x: str) -> str:
        return x

    part = function(inner)
    assert run(lambda s: part(s, "x")).ret_value == "x"
    assert "missing a required argument: 'x'" in str(refused(lambda s: part(s)))
    refused(lambda s: part(s, "x", y=1))


# ---- what bodies raise


class Odd(BaseException):
    """No Exception."""


RAISED = [
    KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, StopAsyncIteration, asyncio.CancelledError, Odd,
    greenlet.GreenletExit, TimeoutError, MemoryError,
]  # fmt: skip


@pytest.mark.parametrize("kind", RAISED, ids=lambda kind: kind.__name__)
def test_whatever_a_body_raises_ends_its_program_alone(kind: type[BaseException]) -> None:
    def body(s: Any) -> None:
        s += "x" + gen("a")
        raise kind("the body's")

    async def abody(s: Any) -> None:
        s += "x" + gen("a")
        raise kind("the body's")

    def branch(s: Any, i: int) -> None:
        s += gen("b")
        raise kind("a branch's")

    def script(call: Any) -> str:
        raise kind("the script's")

    def tool() -> None:
        raise kind("the tool's")

    for each in (
        body,
        abody,
        lambda s: s.map([1, 2], branch, on_error="raise"),
        lambda s: s.fork(2).race(1, branch),
        lambda s: s.best_of(2, gen("q"), score=lambda b: branch(b, 0)),
        lambda s: s.call(tool),
    ):
        try:
            run(each)
        except BaseException as error:
            assert error is not None
        else:
            assert kind is greenlet.GreenletExit  # ends a greenlet without an error
        healthy()
    with pytest.raises(GenerationFailed, match="the script raised"):
        run(lambda s: s.append(gen("a")) and s["a"], MockBackend(script))
    healthy()


def test_a_body_that_is_cancelled_by_itself_does_not_stop_its_batch() -> None:
    def body(s: Any, i: int) -> int:
        if i == 1:
            raise asyncio.CancelledError
        return i

    first, second, third = function(body).run_batch([{"i": i} for i in range(3)], backend=MockBackend())
    assert (first.ret_value, third.ret_value) == (0, 2)
    assert isinstance(second.error(), Cancelled)


def test_a_swallowed_timeout_is_still_one() -> None:
    def body(s: Any) -> None:
        s += gen("a")
        with suppress(BaseException):
            s["a"]

    with pytest.raises(ProgramTimeout):
        run(body, MockBackend(delay=0.2), timeout=0.02)


def test_a_value_that_is_waited_for_in_a_task_says_how_to() -> None:
    async def body(s: Any) -> Any:
        s += gen("a")

        async def reads() -> Any:
            return s["a"]

        return await asyncio.create_task(reads())

    with pytest.raises(UsageError, match=r"await s\.get\(name\)"):
        run(body, MockBackend(delay=0.05))


# ---- shapes


def test_long_chains_and_wide_forks() -> None:
    def chain(s: Any) -> int:
        for i in range(10_000):
            s += "." if i % 5 else gen(f"g{i}")
        return len(s.text())

    expected = run(chain).ret_value
    assert function(chain).compile().run(backend=MockBackend()).ret_value == expected

    def wide(s: Any) -> int:
        s += "x"
        group = s.fork(500)
        inner = [branch.fork(4) for branch in group]
        for each in inner:
            each += gen("b")
            each.join()
        return sum(len(found["b"]) for found in group.join())

    assert run(wide).ret_value == 2000


def test_lines_are_the_authors_where_a_thread_or_a_task_asks() -> None:
    state = function(good).run(backend=MockBackend(), stream=True)
    with pytest.raises(UnknownVariable) as caught:
        list(state.text_iter("nothing"))
    assert "asyncio" not in caught.value.location and "concurrent" not in caught.value.location


# ---- messages


def test_messages_are_text_that_a_channel_can_encode() -> None:
    for text in ("plain", "é日本", "\ud800", "a\udfff日"):
        message = written({"text": text})
        assert json.loads(message.encode()) == {"text": text}
    assert "日本" in written({"a": "日本"})
    failed = Failed(3, "invalid", "\udc00")
    assert event_from_dict(json.loads(written(event_to_dict(failed)).encode())) == failed


JUNK: list[Any] = [
    None, True, 0, 1, -1, 3, 2**31, 2**53, 2**64, 10**30, 1.5, float("nan"), float("inf"), "", "a", "\ud800", [], {},
    [[]], ["a"], {"ref": 0}, {"ref": 1, "sample": 1}, {"arg": "x"}, [None], "gen", "x" * 500, list(range(50)),
    {"type": "regex", "pattern": "a+"}, {"type": "choice", "choices": ["a", "b"]}, {"5": 1.0},
]  # fmt: skip
FIELDS = "max_tokens temperature top_p top_k min_p seed n stop stop_token_ids logprobs logit_bias min_tokens constraint"


class Fuzzer:
    """Messages, right and wrong, to a channel of a tiny engine in this thread."""

    def __init__(self, model: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.engine = Engine(
            str(model), max_total_tokens=2048, check_integrity=True, chat_template=str(model / "template.jinja")
        )
        self.listeners: dict[str, Any] = {}
        self.posted: list[Any] = []
        self.programs = Programs(self.engine, self.listeners.__setitem__, self.posted.append)
        self.told: list[Any] = []
        self.channel = ProgramChannel(self.programs, lambda m: self.told.append(json.loads(m.encode())), "p")

    def parent(self, live: dict[int, Any], made: int) -> int | None:
        fine = [id for id, one in live.items() if one.failed is None][-6:]
        return self.random.choice(fine) if fine and self.random.random() < 0.95 else made - 1 if made else None

    def node(self, id: int, live: dict[int, Any]) -> dict[str, Any]:
        rnd = self.random
        kind = rnd.choice("text text gen gen select role fork join".split())
        node: dict[str, Any] = {"id": id, "kind": kind, "parent": self.parent(live, id)}
        if kind == "text":
            node["parts"] = [
                rnd.choice(["hi ", " there"]),
                *([{"ref": rnd.randrange(id)}] if id and id % 3 == 0 else []),
            ]
        elif kind == "gen":
            node |= {"name": "a", "params": {"max_tokens": rnd.randint(0, 3)}}
            if rnd.random() < 0.5:
                node["params"][rnd.choice(FIELDS.split())] = rnd.choice([*JUNK, 1, 2, 0.5])
        elif kind == "select":
            node |= {"choices": [["yes"], ["no"], [""]][: rnd.randint(1, 3)], "temperature": rnd.choice([0, 1.0])}
        elif kind == "role":
            node |= {"role": rnd.choice(["user", "assistant"]), "begin": rnd.random() < 0.5}
        elif kind == "fork":
            node["count"] = 2
        return node

    def message(self) -> dict[str, Any]:
        rnd, id = self.random, self.random.choice("abcd")
        program = self.programs._open.get(f"p:{id}")
        if program is None:
            return {"op": "open", "program": id, "version": 1, "name": "x", "order": 0, "stream": rnd.random() < 0.5}
        first = max(program.live, default=-1) + 1
        op = rnd.choice("add add add add add add cancel drop close".split() if first < 2**40 else ["close"])
        if op == "close":
            return {"op": op, "program": id}
        if op == "add":
            nodes = [self.node(first + i, program.live) for i in range(rnd.randint(1, 4))]
            return {"op": op, "program": id, "nodes": nodes}
        return {"op": op, "program": id, "nodes": [rnd.randrange(first + 1)]}

    def changed(self, value: Any) -> Any:
        rnd = self.random
        if isinstance(value, dict) and value and rnd.random() < 0.8:
            value, key = dict(value), rnd.choice(list(value))
            if rnd.random() < 0.1:
                del value[key]
            else:
                value[key if rnd.random() < 0.9 else rnd.choice(["x", "\ud800", "id"])] = self.changed(value[key])
            return value
        if isinstance(value, list) and value and rnd.random() < 0.8:
            value, at = list(value), rnd.randrange(len(value))
            value[at] = self.changed(value[at])
            return value
        return rnd.choice(JUNK)

    def step(self) -> None:
        for post in self.posted[:]:
            self.posted.remove(post)
            post(self.engine)
        if self.engine.has_work:
            for delta in self.engine.step():
                listener = self.listeners.get(delta.request_id)
                if listener is not None:
                    listener(delta)

    def round(self) -> None:
        rnd, message = self.random, self.message()
        for _ in range(rnd.choice([0, 0, 0, 1, 1, 2])):
            message = self.changed(message)
        text: str | bytes = json.dumps(message)
        if rnd.random() < 0.03:
            text = text[: rnd.randrange(len(text) + 1)].encode() + bytes([rnd.randrange(256)])  # type: ignore[union-attr]
        self.channel.receive(text)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_message_raises_or_leaves_anything(tiny_model: Path, seed: int) -> None:
    fuzz = Fuzzer(tiny_model, seed)
    for i in range(3000):
        fuzz.round()
        if i % 5 == 0:
            fuzz.step()
    kinds = Counter(one["event"] for one in fuzz.told)
    assert kinds["done"] > 50 and kinds["failed"] > 50 and kinds["error"] > 500
    assert not [one for one in fuzz.told if one.get("kind") == "error"]  # nothing that nobody thought of
    fuzz.channel.close()
    while fuzz.engine.has_work:
        fuzz.step()
    fuzz.engine.check_integrity()
    assert fuzz.programs.running == 0 and not fuzz.engine._requests
    tree = fuzz.engine._scheduler.tree
    assert tree is not None and tree.total_locks == 0


@pytest.mark.parametrize(
    "message",
    ["", "[" * 100_000, '{"a":' * 950 + "1" + "}" * 950, '{"op":1' + "0" * 5000 + "}", "\ufeff{}", b"\xff\xfe", "5"],
    ids=["empty", "deep", "deep objects", "huge number", "bom", "no utf-8", "number"],
)
def test_odd_json_is_answered(tiny_model: Path, message: Any) -> None:
    told: list[str] = []
    ProgramChannel(None, told.append, "p").receive(message)  # type: ignore[arg-type]
    assert json.loads(told[0])["event"] == "error"


# ---- on an engine


def test_good_programs_beside_bad_ones_keep_their_tokens(make_runtime: Callable[..., Runtime]) -> None:
    runtime = make_runtime()

    def fine(s: Any, i: int) -> list[int]:
        s += f"item {i}:"
        s += gen("a", max_tokens=5, ignore_eos=True)
        return list(s.meta("a")["token_ids"])

    def bad(s: Any, way: int) -> None:
        s += "\ud800" if way == 0 else "x"
        if way == 1:
            s += gen("a", n=100_000)
        elif way == 2:
            s += gen("a", regex="(")
        elif way == 3:
            s += select("a", ["\udfff", "b"])
        elif way == 4:
            s += select("a", [str(i) for i in range(10_000)])
        elif way == 5:
            s += "y" * 10_000
        elif way == 6:
            s += user("a")
            s += assistant(gen("b", max_tokens=2))
            s.fork(3).map(lambda branch, i: branch.append(gen("c", stop=["\ud800"], max_tokens=1)) and 1 // i)
            raise RuntimeError
        s += gen("z", max_tokens=2**60)

    program, wrong = function(fine), function(bad)
    expected = [program.run(i, backend=runtime, temperature=0).ret_value for i in range(8)]
    results: list[Any] = []
    batch = [{"i": i} for i in range(8)]
    thread = threading.Thread(
        target=lambda: results.extend(program.run_batch(batch, backend=runtime, temperature=0)), daemon=True
    )
    thread.start()
    states = list(wrong.run_batch([{"way": way} for way in range(8)], backend=runtime))
    thread.join(30)
    assert [state.ret_value for state in results] == expected
    for way, state in enumerate(states):
        error = state.error()
        assert isinstance(error, RuntimeError if way == 6 else (ProgramError, RadixrtError)), (way, error)
    idle(runtime)

    async def left() -> int:
        return len(asyncio.all_tasks()) - 1

    assert LOOP.call(left) == 0
