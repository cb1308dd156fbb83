"""A generation that starts inside a word begins with the bytes cut off its prompt, does not show them, and goes on as usual."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt import Constraint, Engine, FinishReason, InvalidRequest, RequestOutput, SamplingParams
from radixrt.engine.healing import MOST_BYTES, Healing, TokenTable
from radixrt.grammar.vocabulary import Vocabulary
from radixrt.model.tokenizer import byte_level_alphabet
from tests.engine.oracle import reference_greedy

# the tiny models' tokens are single bytes, in the order of GPT-2's alphabet, behind eight special ones
BYTES = {byte: 8 + at for at, (_, byte) in enumerate(sorted(byte_level_alphabet().items()))}

texts = st.binary(min_size=1, max_size=3).map(lambda b: bytes(b"a\xffb "[x % 4] for x in b))
vocabularies = st.lists(texts | st.just(b""), min_size=1, max_size=14)


def generate(engine: Engine, prompt: Any, heal: bytes, **params: Any) -> RequestOutput:
    params = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, **params}
    name = engine.submit(engine.prepare(prompt, SamplingParams(**params), heal=heal))
    text, output = "", None
    while engine.has_work:
        for delta in engine.step():
            if delta.request_id == name:
                text += delta.text if delta.index == 0 else ""
                output = delta.output or output
    assert output is not None and output.text == text
    return output


def spelled(engine: Engine, ids: Any) -> bytes:
    return b"".join(engine.tokenizer.token_bytes(id) for id in ids)


# ---- the table


@given(vocabularies, texts, st.integers(0, 16))
@settings(max_examples=300)
def test_the_table_finds_what_a_scan_finds(spellings: list[bytes], text: bytes, size: int) -> None:
    vocabulary = Vocabulary.of(spellings, ends=[0])
    table = TokenTable(vocabulary, size)
    known = {id: t for id, t in enumerate(spellings) if t and id and id < size}
    assert sorted(table.starting_with(text)) == [id for id, t in known.items() if t.startswith(text)]
    assert sorted(table.exactly(text)) == [id for id, t in known.items() if t == text]
    for id in range(-1, len(spellings) + 1):
        own = known.get(id, b"")
        further = any(t != own and t.startswith(own) for t in known.values())
        word = own and b"\xff" not in own and further
        assert table.healable(id) == (own if word else b"")


@given(vocabularies, st.lists(texts, min_size=1, max_size=3).map(b"".join), st.sets(st.integers(0, 13), max_size=2))
@settings(max_examples=300)
def test_only_what_leads_on_is_allowed(spellings: list[bytes], text: bytes, banned: set[int]) -> None:
    known = {id: t for id, t in enumerate(spellings) if t and id not in banned}

    def needs(rest: bytes) -> int:
        found = [0 if t.startswith(rest) else needs(rest[len(t) :]) for t in known.values() if _fits(t, rest)]
        return 1 + min(found, default=99)

    table = TokenTable(Vocabulary.of(spellings), len(spellings))
    if needs(text) > 99:
        with pytest.raises(InvalidRequest, match="heal=.*no tokens of the vocabulary spell it"):
            Healing(table, text, banned)
        return
    healing = Healing(table, text, banned)
    assert healing.min_tokens == needs(text)
    for at in range(len(text)):
        rest = text[at:]
        for room in range(1, len(rest) + 2):
            expected = [
                id
                for id, t in known.items()
                if t.startswith(rest) or (_fits(t, rest) and 1 + needs(rest[len(t) :]) <= room)
            ]
            assert sorted(healing.allowed(at, room)) == expected
            mask = healing.mask(at, room, 40)
            assert [id for id in range(64) if mask[id // 32] >> id % 32 & 1] == expected


def _fits(token: bytes, rest: bytes) -> bool:
    return token.startswith(rest) or rest.startswith(token)


def test_what_is_healable_in_a_real_vocabulary(default_engine: Engine) -> None:
    tokenizer = default_engine.tokenizer
    for text, healable in [(" ", True), (" the", True), ("http", True), ("1", False), (".", False), ("\n", False)]:
        (id,) = tokenizer.encode(text, add_special=False)
        assert bool(default_engine.healable(id)) is healable, text
        assert default_engine.healable(id) in (text.encode(), b"")
    for id in (*tokenizer.special_ids, -1, tokenizer.vocab_size, 2**31):
        assert default_engine.healable(id) == b""


# ---- without a constraint


@pytest.mark.parametrize(
    "cut", ["A story about a gi", "We went to the uni", "import num", "Hello, wor", "The UK and the US"]
)
def test_the_output_begins_with_what_was_cut(cut: str, default_engine: Engine) -> None:
    ids = default_engine.tokenizer.encode(cut)
    heal = default_engine.healable(ids[-1])
    assert heal and cut.encode().endswith(heal)
    output = generate(default_engine, ids[:-1], heal, max_tokens=6, logprobs=0)
    whole = spelled(default_engine, output.token_ids)
    assert whole.startswith(heal) and whole[len(heal) :].decode(errors="replace") == output.text
    assert len(output.token_ids) == 7 and output.prompt_tokens == len(ids) - 1
    # its first token is the likeliest of those that may come
    name = default_engine.submit(
        default_engine.prepare_score(ids[:-1], [[id] for id in range(49152) if fits(default_engine, id, heal)])
    )
    (scores,) = [d.output.scores for d in steps(default_engine) if d.request_id == name and d.output]
    assert output.logprobs is not None and output.logprobs[0].chosen.logprob == pytest.approx(
        max(s[0] for s in scores), abs=1e-3
    )
    sampled = generate(default_engine, ids[:-1], heal, temperature=1.5, n=4, seed=1, logit_bias={0: 100.0, 2: 100.0})
    assert all(spelled(default_engine, sample.token_ids).startswith(heal) for sample in sampled.samples)


def fits(engine: Engine, id: int, heal: bytes) -> bool:
    text = b"" if id in engine.tokenizer.special_ids else engine.tokenizer.token_bytes(id)
    return bool(text) and _fits(text, heal)


def steps(engine: Engine) -> Any:
    while engine.has_work:
        yield from engine.step()


def test_after_the_healed_bytes_it_goes_on_as_ever(make_engine: Any, tiny: Any) -> None:
    engine, model = make_engine(), tiny("llama")[1]
    prompt, heal = engine.tokenizer.encode("some text of a na"), b"me"
    ids = [BYTES[byte] for byte in heal]
    output = generate(engine, prompt, heal, max_tokens=9)
    assert list(output.token_ids) == ids + reference_greedy(model, prompt + ids, 8)
    assert output.text == engine.tokenizer.decode(output.token_ids[2:]) and output.finish_reason is FinishReason.LENGTH
    assert generate(engine, prompt, b"", max_tokens=9).token_ids == tuple(reference_greedy(model, prompt, 9))


def test_no_mask_is_made_any_more_once_it_is_healed(make_engine: Any, monkeypatch: Any) -> None:
    made: list[int] = []
    mask = Healing.mask

    def counting(self: Healing, at: int, room: int, size: int) -> Any:
        made.append(at)
        return mask(self, at, room, size)

    monkeypatch.setattr(Healing, "mask", counting)
    generate(make_engine(), "abc", b"de", max_tokens=20)
    assert made == [0, 1]


def test_an_end_does_not_come_before_the_bytes(make_engine: Any) -> None:
    engine = make_engine()
    output = generate(engine, "abc", b"de", ignore_eos=False, logit_bias={0: 100.0})
    assert spelled(engine, output.token_ids[:-1]) == b"de" and output.token_ids[-1] == 0
    assert output.text == "" and output.finish_reason is FinishReason.STOP


def test_stop_strings_are_looked_for_behind_the_bytes(make_engine: Any) -> None:
    engine = make_engine()
    bias = {BYTES[ord("x")]: 100.0}
    output = generate(engine, "abc", b"stop", stop=["top", "px", "xxx"], logit_bias=bias)
    assert (output.text, output.stop_reason) == ("", "xxx") and spelled(engine, output.token_ids) == b"stopxxx"
    shown = generate(engine, "abc", b"stop", stop=["xx"], include_stop=True, logit_bias=bias)
    assert shown.text == "xx"


def test_half_a_character_is_completed_and_shown_whole(make_engine: Any) -> None:
    engine = make_engine()
    first, second, third = "漢".encode()
    after = generate(engine, "abc", bytes((first,)), logit_bias={BYTES[second]: 100.0}, max_tokens=1)
    assert after.token_ids == (BYTES[first], BYTES[second]) and after.text == "\ufffd"
    whole = generate(engine, "abc", bytes((first, second)), logit_bias={BYTES[third]: 100.0}, max_tokens=2)
    assert whole.text == "漢" and spelled(engine, whole.token_ids) == "漢".encode()
    assert generate(engine, "abc", "é".encode(), logit_bias={BYTES[ord("x")]: 100.0}, max_tokens=3).text == "xx"


def test_aborted_inside_the_bytes_it_shows_nothing(make_engine: Any) -> None:
    engine = make_engine()
    name = engine.submit(engine.prepare("abc", SamplingParams(max_tokens=9), heal="漢字".encode()))
    engine.step()
    engine.abort(name)
    (delta,) = [delta for delta in engine.step() if delta.output is not None]
    assert (delta.output.text, len(delta.output.token_ids)) == ("", 1)


@pytest.mark.parametrize(
    "config", [{"disable_radix_cache": True}, {"max_total_tokens": 40}, {"chunked_prefill_size": 3}]
)
def test_the_same_under_pressure(config: dict[str, Any], make_engine: Any) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=3, n=2)
    expected, found = [], []
    for engine, results in ((make_engine(), expected), (make_engine(**config), found)):
        for at in range(4):
            engine.submit(engine.prepare(f"prompt {at % 3}", params, heal=b"heal me"), request_id=str(at))
        outputs = {d.request_id: d.output for d in steps(engine) if d.output}
        results.extend([s.token_ids for s in outputs[str(at)].samples] for at in range(4))
    assert found == expected
    assert all(list(ids[:7]) == [BYTES[byte] for byte in b"heal me"] for samples in found for ids in samples)


# ---- with a constraint


@pytest.mark.parametrize("jump", [True, False])
@pytest.mark.parametrize(
    ("prompt", "heal", "constraint", "pattern"),
    [
        ("The capital of France is", b" Par", Constraint.choice(["is", "ma", "is, France"]), "is|ma|is, France"),
        ("The answer is", b" ", Constraint.regex(r"(yes|no), [a-z]{3,9}\."), r"(yes|no), [a-z]{3,9}\."),
        ("Give JSON:", b" ", Constraint.json_schema({"const": {"a": "b"}}), r'\{"a":"b"\}'),
        ("The year is 19", b"9", Constraint.regex("[0-9] ?[a-z]*"), "[0-9] ?[a-z]*"),
        ("It is", b" a", Constraint.regex("n?t?(iqu)?e?"), "n?t?(iqu)?e?"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_constraint_holds_behind_the_bytes(
    prompt: str, heal: bytes, constraint: Constraint, pattern: str, jump: bool, healing_engines: dict[bool, Engine]
) -> None:
    engine = healing_engines[jump]
    for seed in range(3):
        output = generate(engine, prompt, heal, constraint=constraint, max_tokens=16, temperature=seed / 2, seed=seed)
        assert output.error is None and re.fullmatch(pattern, output.text), output.text
        kept = [id for id in output.token_ids if id not in engine.tokenizer.special_ids]
        assert spelled(engine, kept) == heal + output.text.encode()


@pytest.fixture(scope="module")
def healing_engines(default_engine: Engine) -> Any:
    with Engine(max_total_tokens=1024, jump_forward=False, check_integrity=True) as engine:
        yield {True: default_engine, False: engine}


@pytest.mark.parametrize("constraint", [None, Constraint.choice(["is"]), Constraint.choice(["is", "ma"])])
def test_a_stop_id_does_not_come_inside_the_bytes(constraint: Constraint | None, default_engine: Engine) -> None:
    prompt, (paris,) = "The capital of France is", default_engine.tokenizer.encode(" Paris")
    free = generate(default_engine, prompt, b" Par", constraint=constraint, max_tokens=4)
    assert free.token_ids[0] == paris
    stopped = generate(default_engine, prompt, b" Par", constraint=constraint, max_tokens=4, stop_token_ids=[paris])
    assert paris not in stopped.token_ids and spelled(default_engine, stopped.token_ids).startswith(b" Par")
    assert constraint is None or stopped.text in ("is", "ma")


# ---- limits and bad input


def test_the_request_gets_one_token_more(make_engine: Any) -> None:
    engine = make_engine(max_model_len=16)
    assert len(generate(engine, "abc", b"d", max_tokens=0).token_ids) == 1
    assert len(generate(engine, "abc", b"d", max_tokens=12).token_ids) == 13
    assert len(generate(engine, "abc", b"d", max_tokens=None).token_ids) == 13
    exact = generate(engine, "abc", b"d", max_tokens=3, constraint=Constraint.literal("xyz"))
    assert exact.text == "xyz" and exact.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("heal", "params", "message"),
    [
        ("text", {}, "heal: must be bytes, not str"),
        (b"a" * (MOST_BYTES + 1), {}, f"heal: has {MOST_BYTES + 1} bytes: at most {MOST_BYTES}"),
        (b"ab", {"stop_token_ids": [BYTES[ord("b")]]}, "heal=b'ab': no tokens of the vocabulary spell it without stop_token_ids"),
        (b"abc", {"max_tokens": 1}, "heal=b'abc': takes 3 tokens, and there is room for 2"),
        (b"\xe6", {"constraint": Constraint.regex("a+")}, "heal=b'\\xe6': must be whole UTF-8 characters"),
        (b"a", {"max_tokens": 1, "constraint": Constraint.literal("xy")}, "max_tokens=1: the shortest output"),
        (b"a", {"max_tokens": 13}, "max_tokens=13: with a prompt of 4 tokens that is 17, more than context_length=16"),
        (b"a" * 14, {"max_tokens": None}, "heal=b'aaaaaaaaaaaaaa': takes 14 tokens, and there is room for 13"),
    ],
    ids=lambda value: str(value)[:24],
)  # fmt: skip
def test_bad_input(heal: Any, params: dict[str, Any], message: str, make_engine: Any) -> None:
    engine = make_engine(max_model_len=16)
    with pytest.raises(InvalidRequest) as caught:
        engine.prepare("abc", SamplingParams(**{"max_tokens": 8, **params}), heal=heal)
    assert str(caught.value).startswith(message)
