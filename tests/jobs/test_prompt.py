"""What a job says to the model, and its tokens: those of the chat template's whole text, the shared part the same for all."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest
from radixrt.grammar.constraint import Constraint
from radixrt.jobs.backends import Answer
from radixrt.jobs.prompt import Layout, Prompt, Turn
from radixrt.jobs.tokens import PromptTokens
from radixrt.model.tokenizer import Tokenizer, load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"who": {"type": "string"}, "total": {"type": "number", "minimum": 0}},
    "required": ["who", "total"],
    "additionalProperties": False,
}
EXAMPLE = {"text": "Pay 3 to Bolt.", "value": {"who": "Bolt", "total": 3}}


def target(constraint: Constraint | None = None, schema: Any = None, check: Any = lambda value: None) -> Any:
    if constraint is None:
        constraint, schema = Constraint.json_schema(SCHEMA), SCHEMA
    parse = json.loads if schema is not None else str
    return SimpleNamespace(constraint=constraint, schema=schema, parse=parse, check=check)


def test_everything_shared_comes_first() -> None:
    layout = Layout(target(), prompt="Read the bill.", examples=[EXAMPLE])
    one, other = layout.document("A"), layout.document("B")
    assert one.turns[:-1] == other.turns[:-1] == layout.shared() and one.shared == 3
    system, question, answer = layout.shared()
    assert (
        system.content.startswith("Read the bill.\n\n") and json.dumps(SCHEMA, separators=(",", ":")) in system.content
    )
    assert "Pay 3 to Bolt." in question.content
    assert (answer.role, answer.content) == ("assistant", '{"who":"Bolt","total":3}')
    assert (
        one.turns[-1].content.startswith(one.before)
        and one.turns[-1].content.replace("A", "B", 1) != one.turns[-1].content
    )


def test_examples_are_written_as_answers_are() -> None:
    nested = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"items": {"$ref": "#/$defs/x"}}}}
    schema = {**nested, "$defs": {"x": {"properties": {"p": {}, "q": {}}}}}
    value = {"b": [{"q": 1, "p": 2}, {"q": "\u00e4"}], "a": {"z": 0, "q": [{"q": 1, "p": 2}]}}
    layout = Layout(target(Constraint.json_schema(schema), schema), examples=[{"text": "t", "value": value}])
    wanted = '{"a":{"q":[{"q":1,"p":2}],"z":0},"b":[{"p":2,"q":1},{"q":"\u00e4"}]}'  # keys as declared, no spaces
    assert layout.examples[0].answer == wanted


def test_a_retry_begins_with_what_was_asked_and_answered() -> None:
    layout = Layout(target())
    answer = Answer('{"who":"x","total":1}', token_ids=(5, 6))
    again = layout.retry("A", answer, "total: must be even")
    assert again.turns[:2] == layout.document("A").turns
    assert again.turns[2] == Turn("assistant", answer.text, (5, 6)) and "total: must be even" in again.turns[3].content
    assert layout.retry("A", answer.text, "e").turns[2].token_ids == ()
    assert len(layout.retry("A", answer, "x" * 10**6).turns[3].content) < 2000


def test_other_targets_say_what_is_wanted() -> None:
    assert "- a\n- b" in Layout(target(Constraint.choice(["a", "b"]))).shared()[0].content
    assert r"\d{4}" in Layout(target(Constraint.regex(r"\d{4}"))).shared()[0].content


def test_the_digest_changes_with_every_part() -> None:
    layouts = [
        Layout(target()),
        Layout(target(), prompt="Read."),
        Layout(target(), examples=[EXAMPLE]),
        Layout(target(Constraint.choice(["a"]))),
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert Layout(target()).digest == layouts[0].digest


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}'], r"examples line 1\.value: is missing"),
        (['{"value": {}}'], r"examples line 1\.text: is missing"),
        (["", "[1]"], r"examples line 2=\[1\]: must be an object"),
        (["{"], "examples line 1: is not JSON"),
        (['{"text": "a", "valeu": 1}'], "examples line 1.valeu: there is no such field; did you mean 'value'"),
        (['{"text": " ", "value": 1}'], "examples line 1.text=' ': must be the text of a document"),
        (
            [json.dumps(EXAMPLE), '{"text": "a", "value": {"who": "x", "total": -1}}'],
            r"line 2\.value: \$\.total: -1 is less",
        ),
        (['{"text": "a", "value": NaN}'], "is no"),
    ],
)
def test_examples_that_are_none(tmp_path: Path, lines: list[str], message: str) -> None:
    file = tmp_path / "examples.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(InvalidRequest, match=message):
        Layout(target(), examples=file)


def test_examples_meet_validators_too(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"examples\[0\]\.value: total: must be even"):
        Layout(target(check=lambda value: "total: must be even" if value["total"] % 2 else None), examples=[EXAMPLE])
    with pytest.raises(InvalidRequest, match="cannot be read"):
        Layout(target(), examples=tmp_path / "none.jsonl")
    (tmp_path / "bad").write_bytes(b"\xff")
    with pytest.raises(InvalidRequest, match="is not UTF-8"):
        Layout(target(), examples=str(tmp_path / "bad"))
    with pytest.raises(InvalidRequest, match="is none of the choices"):
        Layout(target(Constraint.choice(["a", "b"])), examples=[{"text": "t", "value": "c"}])
    with pytest.raises(InvalidRequest, match="prompt"):
        Layout(target(), prompt=" ")


# ---- tokens

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "trims": CHATML.replace("m.content", "m.content | trim"),
    "no marks": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    "no system": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}[{{ m.role }}] {{ m.content }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}",
    "drops system": "{% for m in messages if m.role != 'system' %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}[assistant]",
    "counts": "{{ messages | length }} messages\n" + CHATML,  # what it writes first depends on what comes later
    "rewrites answers": CHATML.replace("{{ m.content }}", "{{ m.content | upper if m.role == 'assistant' else m.content }}"),
}  # fmt: skip
LAYOUT = Layout(target(), examples=[EXAMPLE])


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer(chat_template=TEMPLATES[request.param])


@pytest.fixture(scope="module")
def made(tokenizer: Tokenizer) -> PromptTokens:
    return PromptTokens(tokenizer)


def rendered(tokenizer: Tokenizer, prompt: Prompt) -> str:
    """The oracle: the whole chat by the template, the system's text before the first user's where it takes no system."""
    messages = prompt.messages
    source = str(tokenizer.chat_template)
    if "system" in source:
        system = messages.pop(0)
        messages[0] = {"role": "user", "content": f"{system['content']}\n\n{messages[0]['content']}"}
    return tokenizer.render_chat(messages)


@pytest.mark.model
@given(text=st.text(max_size=300) | st.text("ab \n<|im_end>.12\u00e4", max_size=300))
def test_tokens_are_those_of_the_whole_text(tokenizer: Tokenizer, made: PromptTokens, text: str) -> None:
    prompt = LAYOUT.document(text)
    assert made.tokens(prompt).tolist() == tokenizer.encode(rendered(tokenizer, prompt))


@pytest.mark.model
def test_the_shared_part_is_the_same_tokens(tokenizer: Tokenizer, made: PromptTokens) -> None:
    prompts = [LAYOUT.document(text) for text in ("", "a", "\n\nb", " c", "\u00e4", "1")]
    shared = made.shared(prompts[0]).tolist()
    whole = made.tokens(prompts[0]).tolist()
    if "counts" not in str(tokenizer.chat_template) and "length" not in str(tokenizer.chat_template):
        assert len(shared) > len(whole) - 40  # all but the frame's last words and the start of the answer
    for prompt in prompts:
        assert made.tokens(prompt).tolist()[: len(shared)] == shared


@pytest.mark.model
@given(text=st.text(max_size=60), who=st.text(max_size=20))
def test_a_continuation_begins_with_the_prompt_and_its_answer(
    tokenizer: Tokenizer, made: PromptTokens, text: str, who: str
) -> None:
    content = json.dumps({"who": who, "total": 1}, ensure_ascii=False)
    ids = [i for char in content for i in tokenizer.encode(char, add_special=False)]  # not as a tokenizer would
    eos = min(tokenizer.eos_ids)
    asked = LAYOUT.document(text)
    again = LAYOUT.retry(text, Answer(content, token_ids=(*ids, eos)), "wrong")
    found = made.tokens(again).tolist()
    whole = rendered(tokenizer, again)
    begin = rendered(tokenizer, asked)
    if whole.startswith(begin):  # a space that a template writes before an answer was not generated
        whole = begin + whole[len(begin) :].lstrip()
    spelled = b"".join(map(tokenizer.token_bytes, tokenizer.encode(whole)))
    assume(spelled == whole.encode())  # this vocabulary lacks bytes of rare characters
    assert b"".join(map(tokenizer.token_bytes, found)) == spelled
    source = str(tokenizer.chat_template)
    if "length" in source or "upper" in source or who != who.strip():
        return  # it writes what was before otherwise: there is nothing to continue
    before = made.tokens(asked).tolist()
    assert found[: len(before) + len(ids)] == before + ids
    twice = again.then(Answer("{}", token_ids=tuple(tokenizer.encode("{}", add_special=False))), "and again")
    assert made.tokens(twice).tolist()[: len(found)] == found


@pytest.mark.model
def test_an_answer_of_other_tokens_is_tokenized(tokenizer: Tokenizer, made: PromptTokens) -> None:
    again = LAYOUT.retry("text", Answer("{}", token_ids=(1, 2, 3)), "wrong")
    assert made.tokens(again).tolist() == tokenizer.encode(rendered(tokenizer, again))
