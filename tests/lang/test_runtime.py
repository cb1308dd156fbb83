"""Programs on an engine: the same tokens whichever way they run, tokens that are never made twice, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from lang import Cancelled, GenerationFailed, ProgramGraph, Runtime, assistant, function, gen, select, system, user
from lang.backends.remote import JsonBackend
from lang.loop import LOOP
from radixrt import Engine as CoreEngine
from radixrt import SamplingParams
from radixrt.engine.nodes import Gen, Select
from radixrt.engine.protocol import ProgramChannel
from tests.lang.conftest import idle

Make = Callable[..., Runtime]


def fixed(name: str, tokens: int = 6, **options: Any) -> Any:
    return gen(name, max_tokens=tokens, ignore_eos=True, **options)


@function
def workout(s: Any, topic: str) -> None:
    """A bit of everything; static, so that it can be compiled."""
    s += system("Be brief.") + user(f"Tell me about {topic} and then about something else that is not {topic} at all.")
    s += assistant(fixed("a"))
    branches = s.fork(3)
    for i, branch in enumerate(branches):
        branch += user(f"Point {i}?")
        with branch.assistant():
            branch += fixed("point", 5 + i)
            branch += " - " + fixed("more", 4)
    branches.join()
    s += user("Points: " + s["point"][0] + "; " + f"{s['point'][2]}.")
    with s.assistant():
        s += select("verdict", ["good", "goodness", "bad", ""], choices_method="total_logprob")
        s += fixed("samples", 5, n=3, temperature=0.9)


@function
def live(s: Any, topic: str) -> None:
    """Control flow on what was generated."""
    s += "Once upon a time there was " + topic + ". It said:"
    for i in range(4):
        s += fixed(f"x{i}", 5)
        s += "\nAnd then" if len(s[f"x{i}"]) % 2 else "\nBut"
    branches = s.fork(2)
    branches += [" left", " right"]
    s.map(["up", "down"], step)


def step(branch: Any, word: str) -> str:
    branch += f" {word}:"
    branch += fixed("way", 4)
    return branch["way"]


TOPICS = ["cats", "the sea", "Öl und Wasser", "日本"]


def tokens(state: Any) -> list[Any]:
    """Every generation's tokens, and every selection's, in order."""
    graph = state.graph
    return [
        [output.token_ids for output in graph.done[node.id].outputs]
        for node in graph
        if isinstance(node, (Gen, Select))
    ]


class Pipe(JsonBackend):
    """A runtime behind JSON messages, in this process."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime
        self.channel: ProgramChannel | None = None
        self.messages: list[str] = []

    async def start(self) -> None:
        await self.runtime.start()
        if self.channel is None:
            loop = asyncio.get_running_loop()
            assert self.runtime._programs is not None
            self.channel = ProgramChannel(
                self.runtime._programs, lambda text: loop.call_soon_threadsafe(self.receive, text), "pipe"
            )

    async def aclose(self) -> None:
        assert self.channel is not None
        channel = self.channel
        self.runtime.engine.post(lambda _: channel.close())

    async def stats(self) -> dict[str, Any]:
        return await self.runtime.stats()

    def send(self, message: str) -> None:
        assert self.channel is not None
        channel = self.channel
        self.messages.append(message)
        self.runtime.engine.post(lambda _: channel.receive(message))


@pytest.mark.parametrize("program", [workout, live], ids=lambda p: p.name)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_every_way_to_run_gives_the_same_tokens(make_runtime: Make, program: Any, options: dict[str, Any]) -> None:
    calm = make_runtime()
    alone = [tokens(program.run(topic, seed=7, backend=calm, **options)) for topic in TOPICS]
    batch = [{"topic": topic} for topic in TOPICS]

    def ran(backend: Any, how: Any = program) -> list[Any]:
        states = how.run_batch(batch, seed=7, backend=backend, **options)
        for state in states:
            assert state.error() is None
        return [tokens(state) for state in states]

    assert ran(calm) == alone, "in a batch"
    assert ran(calm, program.compile()) == alone, "compiled"
    assert ran(make_runtime(disable_radix_cache=True)) == alone, "cache off"
    assert ran(make_runtime(max_total_tokens=700, chunked_prefill_size=16, page_size=4)) == alone, "little room"
    assert ran(make_runtime(schedule_policy="fcfs", max_total_tokens=700)) == alone, "little room, first come"
    pipe = Pipe(make_runtime())
    assert ran(pipe) == alone and ran(pipe, program.compile()) == alone, "as JSON"
    assert all(isinstance(json.loads(message), dict) for message in pipe.messages)
    streamed = program.run(TOPICS[0], seed=7, backend=calm, stream=True, **options)
    pieces = "".join(streamed.text_iter())
    assert pieces == streamed.text() and tokens(streamed) == alone[0], "streamed"


def test_a_state_is_exactly_its_tokens(make_runtime: Make, tiny_model: Any) -> None:
    """What each generation sees is what the steps before generated, as tokens, and the text between as one piece."""

    @function
    def body(s: Any) -> None:
        s += "One "
        s += "piece of text that was "
        s += "appended in parts: "
        s += fixed("a", 9)
        s += "middle"
        s += " part,"
        s += fixed("b", 7)

    state = body.run(backend=make_runtime(), heal=False, temperature=0)
    with CoreEngine(str(tiny_model)) as engine:
        encode = engine.tokenizer.encode
        prompt = encode("One piece of text that was appended in parts: ")
        first = engine.generate(prompt, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))[0].token_ids
        prompt = [*prompt, *first, *encode("middle part,", add_special=False)]
        second = engine.generate(prompt, SamplingParams(max_tokens=7, temperature=0, ignore_eos=True))[0].token_ids
    assert tokens(state) == [[first], [second]]
    assert state.meta("b")["prompt_tokens"] == len(prompt)


def test_a_stop_string_inside_of_a_token_leaves_the_text_before_it(embedded: Runtime) -> None:
    @function
    def body(s: Any) -> None:
        s += "Apples, pears, plums, cherries, apples, pears, plums, cherries, apples,"
        s += gen("a", max_tokens=20, stop="pple", temperature=0)
        s += "X" + gen("b", max_tokens=1, temperature=0)

    state = body.run(backend=embedded)
    assert "pple" not in state["a"] and state.meta("a")["stop_reason"] == "pple"
    with CoreEngine(max_total_tokens=512) as engine:
        # tokens that spell only what stays are kept; the rest is tokenized with the text behind it
        kept = []
        spelled = b""
        for id in state.meta("a")["token_ids"]:
            if not state["a"].encode().startswith(spelled + engine.tokenizer.token_bytes(id)):
                break
            kept.append(id)
            spelled += engine.tokenizer.token_bytes(id)
        rest = state["a"].encode()[len(spelled) :].decode() + "X"
        text = "Apples, pears, plums, cherries, apples, pears, plums, cherries, apples,"
        prompt = [*engine.tokenizer.encode(text), *kept, *engine.tokenizer.encode(rest, add_special=False)]
    # the last token is backed over where the generation heals
    assert state.meta("b")["prompt_tokens"] in (len(prompt), len(prompt) - 1)


def test_no_step_computes_what_an_earlier_one_did(make_runtime: Make) -> None:
    runtime = make_runtime()
    states = workout.run_batch([{"topic": topic} for topic in TOPICS], backend=runtime, temperature=0)
    stats = runtime.get_server_info()
    assert stats["hit_rate"] >= 0.99 * stats["optimal_hit_rate"]
    for state in states:
        graph: ProgramGraph = state.graph
        for id in graph.generations():
            above = next(
                (n for n in reversed(graph.path(id)[:-1]) if n in graph.done and n in graph.generations()), None
            )
            if above is None or isinstance(graph.nodes[id], Select):
                continue
            before = graph.done[above].usage
            reached = before.prompt_tokens + len(graph.done[above].outputs[0].token_ids) - 1
            if isinstance(graph.nodes[above], Select):
                reached = 0
            assert graph.done[id].usage.cached_tokens >= reached - 1, (id, above)


def test_what_programs_share_is_computed_and_tokenized_once(make_runtime: Make) -> None:
    shared = "These are the rules of the house, which every guest has to read. " * 4

    @function
    def body(s: Any, n: int) -> None:
        s += shared
        s += f"Guest {n}: "
        s += fixed("a", 3)

    runtime = make_runtime()
    body.run_batch([{"n": n} for n in range(16)], backend=runtime, temperature=0)
    stats = runtime.get_server_info()
    assert stats["computed_tokens"] == stats["unique_tokens"] <= len(shared) + 16 * 12
    assert stats["tokenized"] <= len(shared) + 16 * 20


def test_select_computes_each_edge_once(make_runtime: Make) -> None:
    choices = ["apple", "apple pie", "apricot", "banana", "band", ""]

    @function
    def body(s: Any) -> None:
        s += "A fruit with a rather long introduction before it:"
        s += select("fruit", choices)

    runtime = make_runtime()
    state = body.run(backend=runtime)
    edges = {tuple(c.encode()[:n]) for c in choices for n in range(1, len(c) + 1)}
    prefix = len("A fruit with a rather long introduction before it:")
    assert state.meta("fruit")["computed_tokens"] == prefix + len(edges)
    assert state["fruit"] in choices
    again = body.run(backend=runtime)
    assert (
        again.meta("fruit")["computed_tokens"] == 0 and again.meta("fruit")["scores"] == state.meta("fruit")["scores"]
    )


# ---- ends


def test_cancelled_programs_leave_nothing(make_runtime: Make) -> None:
    runtime = make_runtime(max_total_tokens=2000, max_running_requests=16)
    rng = random.Random(5)

    @function
    async def body(s: Any, n: int) -> None:
        s += f"Program {n} begins" + fixed("a", 30)
        branches = s.fork(3)
        branches += " and" + fixed("b", 30)
        await s.get("a")
        branches[0].cancel()
        branches.race(1)

    async def storm() -> int:
        async def one(n: int) -> bool:
            task = asyncio.ensure_future(body.arun(n, backend=runtime))
            for _ in range(rng.randrange(0, 40)):
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                await asyncio.wait([task], timeout=rng.random() * 0.2)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                return True
            return False

        cancelled = 0
        for at in range(0, 1000, 50):
            cancelled += sum(await asyncio.gather(*(one(n) for n in range(at, at + 50))))
        return cancelled

    assert asyncio.run(storm()) > 500
    idle(runtime)
    state = body.run(1001, backend=runtime)
    assert state.error() is None


def test_a_cancelled_generation_frees_its_pages_within_a_step(make_runtime: Make) -> None:
    runtime = make_runtime(max_total_tokens=1000, disable_radix_cache=True)
    seen: list[tuple[int, int, int]] = []

    def look(engine: CoreEngine) -> None:
        stats = engine.stats()
        seen.append((stats.steps, stats.running, stats.pool_used))

    @function
    async def body(s: Any) -> None:
        s += "x" + fixed("a", 400)
        while not (await runtime.stats())["generated_tokens"]:
            pass
        runtime.engine.post(look)
        s._run.cancel([0])
        runtime.engine.post(look)
        with pytest.raises(Cancelled):
            await s.get("a")
        await runtime.stats()  # the engine's thread has come to both looks
        s._own.clear()  # the program is not to fail because of it

    body.run(backend=runtime)
    (before, running, used), (after, left, held) = seen
    assert running == 1 and used > 0
    assert after - before <= 1 and left == held == 0


def test_a_channel_that_goes_away_takes_its_programs_along(make_runtime: Make) -> None:
    runtime = make_runtime()
    pipe = Pipe(runtime)

    @function
    async def body(s: Any) -> None:
        s += "x" + fixed("a", 300)
        await asyncio.sleep(0)
        await pipe.aclose()
        pipe.lost("gone")
        await s.get("a")

    with pytest.raises(GenerationFailed, match="gone"):
        body.run(backend=pipe)
    idle(runtime)


def test_the_runtime_may_stop_while_programs_run(make_runtime: Make) -> None:
    runtime = make_runtime()

    @function
    async def body(s: Any) -> None:
        s += "x" + fixed("a", 400)
        await asyncio.sleep(0)
        await runtime.aclose()
        await s.get("a")

    with pytest.raises(GenerationFailed, match="closed"):
        body.run(backend=runtime)


@pytest.mark.parametrize(
    ("append", "match"),
    [
        (lambda s: s.append("x" * 600 + gen("a", max_tokens=4)), "context_length=512"),
        (lambda s: s.append("x" + gen("a", regex="(a)\\1")), "back-reference"),
        (lambda s: s.append("x" + gen("a", regex="[0-9]{40}", max_tokens=4)), "40"),
        (lambda s: s.append("x" + gen("a", json_schema={"type": "strin"})), "strin"),
        (lambda s: s.append(gen("a")), "is empty"),
        (lambda s: s.append("x" + gen("a", n=1000)), "n asks for 1000"),
        (lambda s: s.append("x" + gen("a", stop_token_ids=[9999])), "9999"),
    ],
)  # fmt: skip
def test_what_the_engine_refuses_names_the_authors_line(make_runtime: Make, append: Any, match: str) -> None:
    runtime = make_runtime()
    good = function(lambda s: s.append("fine" + fixed("a", 3)))
    expected = tokens(good.run(backend=runtime, temperature=0))

    @function
    def both(s: Any) -> None:
        branches = s.fork(2)
        append(branches[0])
        branches[1] += "fine" + fixed("ok", 3)
        s.results = branches.join()

    state = both.run(backend=runtime, temperature=0)
    with pytest.raises(GenerationFailed, match=match) as caught:
        raise state.results[0]
    assert "test_runtime.py:" in str(caught.value) and "'a'" in str(caught.value)
    assert [output.token_ids for output in state.graph.done[max(state.graph.done)].outputs] == expected[0]


def test_healing_goes_on_inside_a_word(embedded: Runtime) -> None:
    @function
    def body(s: Any) -> None:
        s += "Paris is the capital of Fran"
        s += gen("rest", max_tokens=3, temperature=0)

    healed = body.run(backend=embedded)
    assert healed["rest"].startswith("ce") and healed.text().startswith("Paris is the capital of France")
    plain = body.run(backend=embedded, heal=False)
    assert plain.meta("rest")["prompt_tokens"] == healed.meta("rest")["prompt_tokens"] + 1
    assert LOOP.inside is False


def test_healing_before_a_constraint(embedded: Runtime) -> None:
    @function
    def body(s: Any) -> None:
        s += "Q: two plus two? A: The answer is "
        s += gen("n", regex="[0-9]{1,2}", temperature=0)
        s += "."

    state = body.run(backend=embedded)
    assert state["n"].isdigit() and state.text().endswith(f"is {state['n']}.")


def test_select_scores_are_sequence_log_probabilities() -> None:
    """As transformers gives them, for the tokens that the state has; engine/test_scoring.py has a hundred prompts."""
    import torch

    from radixrt.bench.backends import load_transformers
    from radixrt.model.source import resolve

    choices = ["Paris", "Paris, France", "London", "the sea", "東京", ""]

    @function
    def body(s: Any, question: str) -> None:
        s += user(question)
        s += assistant("Answer: " + select("city", choices, choices_method="total_logprob"))

    questions = ["What is the capital of France?", "Where do fish live?", "日本の首都は?"]
    with Runtime(kernels="torch", max_total_tokens=4096) as embedded:
        states = body.run_batch([{"question": question} for question in questions], backend=embedded)
        encode_chat, encode = embedded.tokenizer.encode_chat, embedded.tokenizer.encode
    model = load_transformers(resolve(None), torch.float32)
    for question, state in zip(questions, states, strict=True):
        meta = state.meta("city")
        chat = encode_chat([{"role": "user", "content": question}])
        text = encode("Answer: ", add_special=False)
        prefix = [*chat, *text]
        if meta["choice_tokens"][-1]:  # healed: the space was backed over, and begins every choice, also the empty one
            prefix = prefix[:-1]
        with torch.inference_mode():
            for tokens, total in zip(meta["choice_tokens"], meta["logprobs"], strict=True):
                ids = torch.tensor([[*prefix, *tokens]])
                logprobs = model(ids).logits[0].log_softmax(-1)
                expected = sum(float(logprobs[at - 1, ids[0, at]]) for at in range(len(prefix), ids.shape[1]))
                assert abs(expected - total) < 1e-3
        assert meta["confidence"] == max(meta["probabilities"]) and state["city"] in choices


def test_a_method_that_the_model_cannot_serve_is_refused_by_name(make_runtime: Make) -> None:
    @function
    def body(s: Any) -> None:
        s += "x" + select("a", ["b", "c"], choices_method="unconditional_likelihood_normalized")

    with pytest.raises(GenerationFailed, match="choices_method='unconditional_likelihood_normalized': needs"):
        body.run(backend=make_runtime())  # this tokenizer has no beginning-of-sequence token
