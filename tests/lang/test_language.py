"""What an author may write: appending, reading, roles, scopes, branches, search; on a scripted backend. And what is refused, with the author's line."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import lang as sgl
from lang import (
    Cancelled,
    GenerationFailed,
    MockBackend,
    assistant,
    function,
    gen,
    select,
    system,
    user,
)


def run(body: Any, backend: MockBackend | None = None, **options: Any) -> Any:
    return function(body).run(backend=backend or MockBackend(), **options)


# ---- appending and reading


def test_text_generations_and_selections_become_one_text() -> None:
    def body(s: Any) -> None:
        s += "Q: " + gen("a") + "; "
        s += select("b", ["yes", "no"])
        s.append("!")

    state = run(body, MockBackend({"a": "one", "b": "no"}))
    assert (state["a"], state["b"]) == ("one", "no")
    assert state.text() == "Q: one; no!"
    assert state.text("a") == "one"
    assert state.variables == {"a": "one", "b": "no"}
    assert state.get_var("a") == "one" and "a" in state and "c" not in state
    assert state.meta("b")["choices"] == ["yes", "no"] and state.get_meta_info("a")["finish_reason"] == "stop"


def test_values_come_back_as_their_type() -> None:
    def body(s: Any) -> None:
        s += "n=" + gen("n", type=int) + " f=" + gen("f", dtype=float) + " s=" + sgl.gen_string("s")
        s += gen("l", type=list[int])

    state = run(body, MockBackend({"n": "-12", "f": "1.5", "s": '"hi there"', "l": "[1,2]"}))
    assert (state["n"], state["f"], state["s"], state["l"]) == (-12, 1.5, "hi there", [1, 2])
    assert state.text() == 'n=-12 f=1.5 s="hi there"[1,2]'


@pytest.mark.parametrize("way", ["call", "begin", "with", "method"])
def test_roles_are_written_in_every_form(way: str) -> None:
    def body(s: Any) -> None:
        if way == "call":
            s += system("S") + user("U")
            s += assistant(gen("a"))
        elif way == "begin":
            s += sgl.system_begin() + "S" + sgl.system_end()
            s += sgl.user_begin()
            s += "U"
            s += sgl.user_end()
            s += sgl.assistant_begin() + gen("a") + sgl.assistant_end()
        elif way == "with":
            with s.system():
                s += "S"
            with s.user():
                s += "U"
            with s.assistant():
                s += gen("a")
        else:
            s.system("S")
            s.user("U")
            s.assistant(gen("a"))

    state = run(body, MockBackend({"a": "A"}))
    assert state.messages() == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    ]
    assert state.text().count("<|im_end|>") == 3


def test_samples_are_all_usable() -> None:
    def body(s: Any) -> None:
        s += "x"
        s += gen("a", n=3)
        branches = s.fork_samples("a")
        branches += "|"
        branches += gen("b")
        branches.join()
        s += " goes on with the first"

    state = run(body, MockBackend(lambda call: f"{call.name}{call.sample}" if call.name == "a" else call.text[-3:-1]))
    assert state["a"] == ["a0", "a1", "a2"]
    assert state["b"] == ["a0", "a1", "a2"]
    assert state.text() == "xa0 goes on with the first"
    assert [one["text"] for one in state.meta("a")["samples"]] == ["a0", "a1", "a2"]


def test_a_scope_is_a_variable() -> None:
    def body(s: Any) -> None:
        s += "before "
        with s.var_scope("part"):
            s += "in "
            s += gen("a")
        s += " after"

    assert run(body, MockBackend({"a": "A"}))["part"] == "in A"


def test_control_flow_is_pythons_own() -> None:
    def body(s: Any) -> str:
        for i in range(10):
            s += f"\n{i}:"
            s += gen(f"step{i}")
            try:
                if int(s[f"step{i}"]) >= 3:
                    return "enough"
            except ValueError:
                s += "(no number)"
        return "never"

    state = run(body, MockBackend({f"step{i}": str(i) if i != 1 else "?" for i in range(10)}))
    assert state.ret_value == "enough"
    assert state.text() == "\n0:0\n1:?(no number)\n2:2\n3:3"


# ---- branches


def test_branches_see_their_parent_and_not_each_other() -> None:
    def body(s: Any) -> None:
        s += "root "
        s += gen("top")
        branches = s.fork(3)
        branches += [" a", " b", " c"]
        branches += lambda i: str(i)
        for branch in branches:
            branch += gen("x")
            branch += branch["top"]
        results = branches.join()
        s += " end"
        assert results == [{"x": f"{i}"} for i in "abc"]

    backend = MockBackend(lambda call: "T" if call.name == "top" else call.text[-2])
    state = run(body, backend)
    assert state["x"] == ["a", "b", "c"]
    assert state.text() == "root T end"


def test_join_may_append_what_the_branches_said() -> None:
    def body(s: Any) -> None:
        s += "1"
        branches = s.fork(2)
        branches += ["2", "3"]
        branches.join("concate_and_append")
        s += "4"

    assert run(body).text() == "1234"


def test_a_copy_leaves_the_state_alone() -> None:
    def body(s: Any) -> None:
        s += "a"
        with s.copy() as other:
            other += "b" + gen("x")
            assert other["x"]
        s += "c"

    assert run(body).text() == "ac"


def test_an_error_stays_with_its_branch() -> None:
    def body(s: Any) -> None:
        s += "x"
        branches = s.fork(3)
        for i, branch in enumerate(branches):
            branch += gen("a", regex="[0-9]+") if i == 1 else gen("a")
            branch += gen("b")
        s.results = branches.join()
        s += "goes on"

    state = run(body, MockBackend({"a": ["1", "no number", "3"], "b": ["x", "y", "z"]}))
    assert state.text() == "xgoes on"
    first, second, third = state.results
    assert (first["a"], third["a"]) == ("1", "3")
    assert isinstance(second, GenerationFailed) and "test_language.py" in str(second)
    assert [type(value) for value in state["a"]] == [str, GenerationFailed, str]
    assert isinstance(state["b"][1], Cancelled)


def test_map_runs_bodies_side_by_side() -> None:
    seen: list[Any] = []

    def part(branch: Any, item: str) -> str | None:
        branch += item + gen("x")
        if item == "b":
            raise RuntimeError("a tool broke")
        seen.append(item)
        return branch["x"] + item if item != "c" else None

    async def other(branch: Any, item: str) -> str:
        branch += item + gen("y")
        return await branch.get("y")

    def body(s: Any) -> None:
        s += "root"
        s.first = s.map(["a", "b", "c"], part)
        s.second = s.map(["d", "e"], other)
        with pytest.raises(RuntimeError, match="a tool broke"):
            s.map(["b"], part, on_error="raise")

    state = run(body, MockBackend(lambda call: "X"))
    assert state.first[0] == "Xa" and isinstance(state.first[1], RuntimeError) and state.first[2]["x"] == "X"
    assert state.second == ["X", "X"]


def test_race_cancels_the_losers() -> None:
    def body(s: Any) -> None:
        s += "x"
        branches = s.fork(4)
        for i, branch in enumerate(branches):
            for step in range(1 if i < 2 else 500):
                branch += gen(f"v{step}")
        winners = branches.race(2)
        s.winners = [list(branches).index(w) for w in winners]
        s.lost = branches[3]
        with pytest.raises(Cancelled):
            s.lost["v499"]

    state = run(body, MockBackend(lambda call: call.name))
    assert state.winners == [0, 1]
    assert isinstance(state.lost.error(), Cancelled)


def test_race_with_bodies() -> None:
    async def turn(branch: Any, i: int) -> int:
        branch += gen("v")
        await branch.get("v")
        if i != 2:
            await asyncio.Event().wait()
        return i

    def body(s: Any) -> None:
        s.winner = s.fork(3).race(1, turn)[0]

    assert run(body).winner.ret_value == 2


def test_best_of_goes_on_with_the_best() -> None:
    def body(s: Any) -> None:
        s += "x="
        s.best_of(3, gen("v"), score=lambda branch: int(branch["v"]))
        s += "."

    state = run(body, MockBackend({"v": ["4", "9", "7"]}))
    assert state["v"] == "9" and state.scores == [4, 9, 7] and state.text() == "x=9."


def test_vote_takes_the_commonest() -> None:
    def body(s: Any) -> None:
        s += gen("v", n=5)
        s.winner = s.vote("v")
        branches = s.fork(3)
        branches += gen("w")
        s.other = branches.vote("w")

    state = run(body, MockBackend({"v": ["a", "b", "b", "c", "b"], "w": ["1", "2", "2"]}))
    assert (state.winner, state.other) == ("b", "2")


# ---- running


def test_programs_nest() -> None:
    @function
    def inner(s: Any, what: str) -> str:
        s += what + gen(f"in_{what}")
        return s[f"in_{what}"]

    @function
    def outer(s: Any) -> None:
        s += "o"
        s.first = inner(s, "a")  # goes on with this state
        s.second = inner.run("b", backend=backend)["in_b"]  # a program of its own

    backend = MockBackend(lambda call: call.text.upper())
    state = outer.run(backend=backend)
    assert (state.first, state.second) == ("OA", "B")
    assert state.text() == "oaOA"


def test_an_ordinary_body_may_call_an_async_program() -> None:
    @function
    async def inner(s: Any) -> str:
        s += gen("a")
        return await s.get("a")

    @function
    def outer(s: Any) -> str:
        return inner(s) + "!"

    @function
    async def both(s: Any) -> str:
        return await inner(s) + "?"

    assert outer.run(backend=MockBackend({"a": "x"})).ret_value == "x!"
    assert both.run(backend=MockBackend({"a": "x"})).ret_value == "x?"


async def test_async_bodies_and_callers() -> None:
    @function
    async def body(s: Any, n: int) -> int:
        s += gen("a")
        first = s["a"]
        await asyncio.sleep(0)
        s += gen("b")
        assert first == await s.get("a")
        return n

    backend = MockBackend()
    states = await asyncio.gather(*(body.arun(n, backend=backend) for n in range(5)))
    assert [state.ret_value for state in states] == list(range(5))
    assert body.run(7, backend=backend).ret_value == 7  # also where a loop is running
    found = [s.ret_value async for s in body.arun_batch([{"n": n} for n in range(20)], backend=backend, num_threads=4)]
    assert found == list(range(20))


async def test_streams_are_the_text() -> None:
    @function
    def body(s: Any) -> None:
        s += "Q:" + gen("a")
        s += " then " + gen("b")

    backend = MockBackend({"a": "one two three", "b": "four"})
    state = body.run(backend=backend, stream=True)
    assert "".join(state.text_iter()) == "Q:one two three then four"
    assert "".join(body.run(backend=MockBackend({"a": "one two", "b": "x"}), stream=True).text_iter("a")) == "one two"
    state = await body.arun(backend=MockBackend({"a": "one two", "b": "x"}), stream=True)
    assert "".join([piece async for piece in state.text_async_iter("b")]) == "x"


def test_a_batch_keeps_its_order_and_its_errors() -> None:
    @function
    def body(s: Any, n: int) -> int:
        s += f"{n}"
        s += gen("a")
        if n == 3:
            raise KeyError("three")
        return n * 2

    states = body.run_batch([{"n": n} for n in range(6)], backend=MockBackend(), num_threads=2)
    assert [s.ret_value for s in states] == [0, 2, 4, None, 8, 10]
    assert isinstance(states[3].error(), KeyError)
    assert sorted(
        s.ret_value or 0 for s in body.run_batch([{"n": n} for n in range(6)], backend=MockBackend(), ordered=False)
    ) == [0, 0, 2, 4, 8, 10]


def test_a_batch_takes_no_more_than_is_read() -> None:
    taken: list[int] = []

    def source() -> Any:
        for n in range(1_000_000):
            taken.append(n)
            yield {"n": n}

    @function
    def body(s: Any, n: int) -> int:
        s += gen("a")
        return n

    states = body.run_batch(source(), backend=MockBackend(), num_threads=8, generator_style=True)
    assert [next(states).ret_value for _ in range(20)] == list(range(20))
    assert len(taken) <= 20 + 8
    states.close()


def test_many_programs_need_no_threads() -> None:
    @function
    def body(s: Any, n: int) -> None:
        for i in range(3):
            s += gen(f"x{i}")
            s[f"x{i}"]
        threads.append(threading.active_count())

    threads: list[int] = []
    backend = MockBackend()
    body.run_batch([{"n": 0}], backend=backend)
    before = threads.pop()
    body.run_batch([{"n": n} for n in range(2000)], backend=backend, num_threads=2000)
    assert set(threads) == {before}


def test_a_seed_reproduces_a_run() -> None:
    @function
    def body(s: Any) -> None:
        branches = s.fork(2)
        branches += gen("a")
        s.seeds = [branch.graph.nodes[branch._vars["a"].node].params.seed for branch in branches]

    first, second, third = (body.run(backend=MockBackend(), seed=seed).seeds for seed in (5, 5, 6))
    assert first == second and first[0] != first[1] and set(first).isdisjoint(third)


def test_arguments_of_the_run_and_of_the_body() -> None:
    @function
    def body(s: Any, stop: str, k: int = 2, **rest: Any) -> None:
        s += gen("a", top_p=0.5)
        s += gen("b", temperature=0.0)
        s.got = (stop, k, rest)

    state = body.run("here", temperature=0.7, max_new_tokens=9, backend=MockBackend(), other=1)
    assert state.got == ("here", 2, {"other": 1})
    a, b = (state.graph.nodes[i].params for i in (0, 1))
    assert (a.temperature, a.top_p, a.max_tokens, b.temperature) == (0.7, 0.5, 9, 0.0)
    bound = body.bind(stop="fixed", k=4)
    assert bound.run(backend=MockBackend()).got == ("fixed", 4, {})


def test_tools_run_beside_other_programs() -> None:
    barrier = threading.Barrier(3, timeout=30)

    @function
    def body(s: Any, n: int) -> int:
        s += gen("a")
        return s.call(barrier.wait)

    states = body.run_batch([{"n": n} for n in range(3)], backend=MockBackend())
    assert sorted(s.ret_value for s in states) == [0, 1, 2]
