"""What once went wrong: samples and messages, errors that were lost or stood at the wrong line, traces, and what must not be left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lang import (
    BackendError,
    Cancelled,
    GenerationFailed,
    MockBackend,
    Runtime,
    UsageError,
    assistant,
    function,
    gen,
    user,
)
from lang.backends.remote import JsonBackend
from lang.loop import LOOP
from radixrt.engine.program_text import EMPTY, ProgramText
from radixrt.model.gguf_file import GGUFFile
from radixrt.model.gguf_tokenizer import tokenizer_from_gguf
from radixrt.model.hf_tokenizer import tokenizer_from_directory
from tests.lang.conftest import idle
from tests.model.model_files import add_sentencepiece, trained_sentencepiece, with_markup, write_gguf

MAKE = Callable[..., Runtime]


def promptly(work: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What ``work`` returns or raises; a failure where it does not end."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it did not end"
    value, error = found[0]
    if error is not None:
        raise error
    return value


# ---- samples and messages


def test_everything_about_a_sample_is_of_that_sample() -> None:
    @function
    def f(s: Any) -> Any:
        s += gen("before")
        with s.var_scope("scope"):
            s += gen("x", n=3)
        found = []
        for branch in s.fork_samples("x"):
            branch += "!"
            again = branch.fork_samples("x")[0]
            found.append(
                (branch["x"], branch.text("x"), branch.meta("x")["text"], branch["scope"], again.text(), again["x"])
            )
            assert branch.text("before") == "<before>"
        return found

    assert f.run(backend=MockBackend()).ret_value == [
        (x, x, x, x, f"<before>{x}", x) for x in ("<x>", "<x:1>", "<x:2>")
    ]


def test_samples_of_a_message_that_has_ended_go_on_behind_it(make_runtime: MAKE) -> None:
    @function
    def f(s: Any) -> Any:
        s += user("q")
        s += assistant(gen("x", n=2, max_tokens=4))
        chats = []
        for branch in s.fork_samples("x"):
            branch += user("again")
            branch += assistant(gen("y", max_tokens=3))
            chats.append((branch["x"], branch.messages()))
        return chats

    for backend in (make_runtime(), MockBackend()):
        for x, chat in f.run(backend=backend, seed=1, temperature=1.0).ret_value:
            assert [message["role"] for message in chat] == ["user", "assistant", "user", "assistant"]
            assert chat[1]["content"] == x


def test_samples_inside_of_a_message_stay_inside() -> None:
    @function
    def f(s: Any) -> None:
        with s.assistant():
            s += gen("x", n=2)
            for branch in s.fork_samples("x"):
                branch += user("no")

    with pytest.raises(UsageError, match="user begins inside of assistant"):
        f.run(backend=MockBackend())


def test_the_text_of_joined_values() -> None:
    @function
    def f(s: Any) -> str:
        branches = s.fork(2)
        branches += gen("x")
        branches.join()
        return s.text("x")

    assert f.run(backend=MockBackend()).ret_value == "['<x>', '<x>']"


def test_a_tool_that_raises_inside_of_a_message_or_a_scope_leaves_neither_open() -> None:
    @function
    def f(s: Any) -> list[dict[str, str]]:
        with s.var_scope("all"):
            try:
                with s.user(), s.var_scope("inner"):
                    s += "half"
                    raise ValueError("the tool")
            except ValueError:
                pass
            s += assistant(gen("x"))
        assert "half" in s["all"]
        return s.messages()

    assert f.run(backend=MockBackend()).ret_value == [
        {"role": "user", "content": "half"},
        {"role": "assistant", "content": "<x>"},
    ]


# ---- errors


def test_errors_inside_of_with_name_the_authors_line() -> None:
    @function
    def f(s: Any) -> None:
        with s.user(), s.assistant():
            pass

    with pytest.raises(UsageError) as caught:
        f.run(backend=MockBackend())
    assert __file__ in caught.value.location


def test_a_bodys_own_timeout_is_not_the_programs() -> None:
    @function
    def f(s: Any) -> None:
        raise TimeoutError("the socket")

    with pytest.raises(TimeoutError, match=r"^the socket$"):
        f.run(backend=MockBackend(), timeout=60)


@pytest.mark.parametrize("kind", [asyncio.CancelledError, ValueError])
def test_a_branch_that_cancels_itself_ends_alone(kind: type[BaseException]) -> None:
    @function
    def f(s: Any) -> Any:
        def work(branch: Any, i: int) -> int:
            if i == 0:
                raise kind()
            branch += gen("y")
            return i

        s += "q"
        mapped = s.map([0, 1], work)
        branches = s.fork(3)
        assert len(branches.race(2, work)) == 2
        return mapped, branches.vote("y")

    mapped, vote = f.run(backend=MockBackend()).ret_value
    assert isinstance(mapped[0], Cancelled if kind is asyncio.CancelledError else kind)
    assert mapped[1] == 1 and vote == "<y>"


def test_a_program_that_cancels_itself_does_not_end_its_batch() -> None:
    @function
    def f(s: Any, i: int) -> None:
        if i == 1:
            raise asyncio.CancelledError
        s += gen("y")

    states = f.run_batch([{"i": i} for i in range(3)], backend=MockBackend())
    assert [type(state.error()) for state in states] == [type(None), Cancelled, type(None)]
    with pytest.raises(Cancelled):
        f.run(1, backend=MockBackend())


def test_best_of_without_any_score() -> None:
    @function
    def f(s: Any) -> None:
        s.best_of(2, gen("y"), score=lambda branch: None)

    with pytest.raises(UsageError, match="no branch a value"):
        f.run(backend=MockBackend())


def test_a_tool_that_raises_stop_iteration() -> None:
    @function
    def f(s: Any) -> None:
        s.call(next, iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        promptly(lambda: f.run(backend=MockBackend()))


def test_a_body_that_reads_its_own_text_piece_by_piece_is_told() -> None:
    @function
    async def f(s: Any) -> None:
        s += gen("x")
        async for _ in s.text_async_iter():
            pass

    with pytest.raises(UsageError, match="own text"):
        promptly(lambda: f.run(backend=MockBackend()))


# ---- backends that go away


def test_what_is_appended_after_the_runtime_has_stopped_fails(make_runtime: MAKE) -> None:
    runtime = make_runtime()

    @function
    def f(s: Any) -> str:
        s += "hi"
        s.call(runtime.shutdown)
        s += gen("a", max_tokens=3)
        s.call(time.sleep, 0.01)  # the loop turns before anybody waits for it
        return s["a"]

    with pytest.raises(GenerationFailed, match="'a': the runtime has stopped"):
        promptly(lambda: f.run(backend=runtime))


def test_a_runtime_that_stops_while_a_constraint_is_compiled(
    make_runtime: MAKE, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = make_runtime()
    go_on, compiling = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        compiling.set()
        go_on.wait(20)
        raise ValueError("late")

    monkeypatch.setattr(runtime.engine._started()._compiler, "_compile", slow)

    @function
    def f(s: Any) -> None:
        s += "hi"
        s += gen("a", regex="[a-c]{2}", max_tokens=5)

    def stop() -> None:
        compiling.wait(20)
        threading.Timer(0.2, go_on.set).start()
        runtime.shutdown()

    stopping = threading.Thread(target=stop, daemon=True)
    stopping.start()
    with pytest.raises(GenerationFailed, match="engine is closed"):
        promptly(lambda: f.run(backend=runtime))
    stopping.join(20)  # it is closed, no longer closing, when the fixture asks


def test_a_lost_connection_is_what_the_program_reports() -> None:
    class Wire(JsonBackend):
        dead = False

        async def start(self) -> None: ...

        async def aclose(self) -> None: ...

        async def stats(self) -> dict[str, Any]:
            return {}

        def send(self, message: str) -> None:
            if self.dead:
                raise BackendError("is not connected")

        def die(self) -> None:
            self.dead = True
            self.lost("the connection was lost")

    wire = Wire()

    @function
    def f(s: Any) -> str:
        s += gen("a")
        asyncio.get_running_loop().call_later(0.01, wire.die)
        return s["a"]

    with pytest.raises(GenerationFailed, match="connection was lost"):
        promptly(lambda: f.run(backend=wire))
    assert not wire._sessions


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_runtime_that_was_started_before_a_fork_says_so(make_runtime: MAKE) -> None:
    runtime = make_runtime()

    @function
    def f(s: Any) -> None:
        s += gen("a", max_tokens=1)

    child = os.fork()
    if child == 0:
        code = 1
        try:
            f.run(backend=MockBackend())
            f.run(backend=runtime)
        except BackendError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    ends = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < ends:
        time.sleep(0.01)
    if done[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done == (child, 0)


# ---- traces


class Doc:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return "<Doc>"


def test_a_compiled_program_sees_what_its_arguments_are() -> None:
    @function
    def of_doc(s: Any, doc: Doc) -> None:
        s += doc.text
        s += gen("y")

    @function
    def of_many(s: Any, first: str, *others: str, mark: str = "-") -> None:
        s += first + mark + mark.join(others)
        s += gen("y")

    @function
    def by_position(s: Any, q: str, /, r: str = "r") -> None:
        s += q + r
        s += gen("y")

    @function
    def by_type(s: Any, q: str) -> None:
        s += ("text:" if isinstance(q, str) else "other:") + f"{q}"
        s += gen("y")

    backend = MockBackend()
    compiled = of_doc.compile()
    assert [compiled.run(doc=Doc(text), backend=backend).text() for text in "ab"] == ["a<y>", "b<y>"]
    assert of_many.compile().run("a", "b", "c", backend=backend).text() == "a-b-c<y>"
    assert by_position.run("q", backend=backend).text() == "qr<y>"
    assert by_position.compile().run("q", "s", backend=backend).text() == "qs<y>"
    assert by_type.compile().run("q", backend=backend).text() == "text:q<y>"
    traced = of_many.trace("a", "b", "c")
    assert traced.complete and traced.graph.text_of(0) == "a-b-c"


def test_branches_that_append_what_was_generated_are_traced() -> None:
    @function
    def f(s: Any) -> None:
        s += gen("a")
        branches = s.fork(2)
        branches += s["a"]
        branches += gen("b")
        branches.join()

    assert f.trace().complete


# ---- nothing is left behind


def test_leaving_an_asynchronous_batch_cancels_what_runs() -> None:
    slow = MockBackend(delay=60)

    @function
    def f(s: Any) -> None:
        s += gen("y")

    async def main() -> None:
        async def read() -> None:
            async for _ in f.arun_batch([{}] * 4, backend=slow):
                pass

        reader = asyncio.ensure_future(read())
        while len(slow._sessions) < 4:
            await asyncio.sleep(0.01)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert not slow._sessions

    promptly(lambda: asyncio.run(main()))


def test_requests_that_fail_leave_no_listener(make_runtime: MAKE, caplog: pytest.LogCaptureFixture) -> None:
    runtime = make_runtime(max_waiting_requests=2)

    @function
    def f(s: Any, n: int) -> None:
        s += "hi"
        s += gen("a", n=n, max_tokens=3)

    with pytest.raises(GenerationFailed, match="the queue is full"):
        f.run(3, backend=runtime)

    def broken(*_: Any) -> None:
        raise ValueError("the step")

    async def break_it() -> None:
        await runtime.engine.call(lambda engine: setattr(engine._runner, "forward", broken))

    LOOP.call(break_it)
    with caplog.at_level(logging.CRITICAL), pytest.raises(GenerationFailed, match="the step"):
        f.run(1, backend=runtime)
    idle(runtime)
    assert not runtime.engine._listeners


def test_a_long_chat_that_is_met_for_the_first_time(make_runtime: MAKE) -> None:
    text = ProgramText(make_runtime().tokenizer)
    roles = ("user", "assistant") * 600
    assert text._around(roles) == text._around(roles[:2])


def test_text_is_the_same_tokens_in_one_piece_or_many_where_control_tokens_are_followed_by_a_space(
    tmp_path: Path,
) -> None:
    """Llama's first tokenizers: behind ``<|im_end|>`` they write a space that is not in the text."""
    sentences = trained_sentencepiece()
    path = write_gguf(tmp_path / "m.gguf", lambda writer: add_sentencepiece(writer, sentences))
    backend = with_markup(tokenizer_from_gguf(GGUFFile(path))._backend)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true}')
    tokenizer = tokenizer_from_directory(tmp_path)
    text = ProgramText(tokenizer)
    pieces = ["<|im_start|>user\n" + "the dog jumps " * 20, "<|im_end|>\n<|im_start|>assistant\n", "yes<|im_end|>no"]
    state = EMPTY
    for piece in pieces:
        state = text.append(state, piece)
    assert text.settle(state).tokens().tolist() == tokenizer.encode("".join(pieces))
    behind = text.after("dog<|im_end|>no").tolist()
    assert tokenizer.token_bytes(behind[0])[:1] == b"d"  # no space in front, which nobody wrote


def test_texts_that_are_remembered_are_few(make_runtime: MAKE, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixrt.engine.program_text._CACHED_CHARS", 10_000)
    text = ProgramText(make_runtime().tokenizer)
    for i in range(1000):
        text.after(str(i))
    assert len(text._known) <= 100


def test_a_batch_that_is_collected_on_the_loops_thread_ends() -> None:
    backend = MockBackend()

    @function
    def f(s: Any, i: int) -> None:
        s += gen("a")
        if i:
            s.call(time.sleep, 0.5)

    states: list[Any] = [f.run_batch([{"i": i} for i in range(3)], backend=backend, generator_style=True)]
    next(states[0])
    assert backend._sessions
    LOOP.get().call_soon_threadsafe(states.clear)
    ends = time.monotonic() + 0.4
    while backend._sessions and time.monotonic() < ends:
        time.sleep(0.01)
    assert not backend._sessions
