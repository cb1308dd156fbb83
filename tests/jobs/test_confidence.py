"""Values in JSON texts and how sure the model was of each, against naive readings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.jobs.confidence import confidences, merged_notes
from radixrt.jobs.leaves import WHOLE, general, leaves

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def walked(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The oracle: the parsed value, recursively."""
    if isinstance(value, dict):
        for key, item in value.items():
            plain = key.isascii() and key.isidentifier()
            name = (f".{key}" if path else key) if plain else f"[{json.dumps(key, ensure_ascii=False)}]"
            yield from walked(item, path + name)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from walked(item, f"{path}[{i}]")
    else:
        yield path or WHOLE, value


@given(JSON, st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")]), st.booleans())
def test_leaves_are_those_of_the_parsed_value(value: Any, separators: tuple[str, str], escaped: bool) -> None:
    text = json.dumps(value, separators=separators, ensure_ascii=escaped)
    found = list(leaves(text))
    assert [(leaf.path, leaf.value) for leaf in found] == list(walked(value))
    for leaf in found:
        assert json.loads(text[leaf.start : leaf.end]) == leaf.value
        assert text[leaf.start : leaf.end].strip() == text[leaf.start : leaf.end]


@given(st.text(alphabet='{}[]",:0 -.eEtrufalsn\\x', max_size=30))
def test_text_that_is_no_json_ends_the_walk(text: str) -> None:
    for leaf in leaves(text):
        assert 0 <= leaf.start < leaf.end <= len(text)


def test_deep_nesting_needs_no_stack() -> None:
    depth = 100_000
    (leaf,) = leaves("[" * depth + "7" + "]" * depth)
    assert leaf.value == 7 and leaf.path == "[0]" * depth


@pytest.mark.parametrize(
    ("path", "wanted"),
    [("a.b", "a.b"), ("a[3].b[12]", "a[].b[]"), ('a["x[1]"]', 'a["x[]"]'), ("value", "value")],
)
def test_general(path: str, wanted: str) -> None:
    assert general(path) == wanted


def tokens(*pairs: tuple[str, float]) -> list[tuple[bytes, float]]:
    return [(text.encode(), math.log(probability)) for text, probability in pairs]


@pytest.mark.parametrize(
    ("text", "given", "wanted"),
    [
        # the key's tokens do not count; one that holds the end of a key and the start of a value does
        ('{"a":12}', tokens(('{"', 0.1), ("a", 0.1), ('":', 0.1), ("12", 0.5), ("}", 0.1)), {"a": 0.5}),
        ('{"a":12}', tokens(('{"a', 0.1), ('":1', 0.8), ("2", 0.2), ("}", 0.1)), {"a": 0.4}),
        # quotes are of the value, and the token that ends it may end more
        ('{"a":"x"}', tokens(('{"a":', 0.1), ('"', 0.5), ("x", 0.5), ('"}', 0.5)), {"a": 0.5}),
        # characters of more than one byte, cut inside
        ('["ä",1]', [(b'["\xc3', math.log(0.25)), (b'\xa4"', 0.0), (b",", -9.0), (b"1", 0.0), (b"]", -9.0)],
         {"[0]": 0.5, "[1]": 1.0}),
        # a token of nothing (the end of the sequence) is of no value
        ("[1]", [(b"[1", math.log(0.5)), (b"", -50.0), (b"]", 0.0), (b"", -50.0)], {"[0]": 0.5}),
        # what cannot be mapped is not guessed
        ("[1]", [(b"[2]", 0.0)], {}),
        ("[1]", [], {}),
    ],
)  # fmt: skip
def test_confidence_table(text: str, given: list[tuple[bytes, float]], wanted: dict[str, float]) -> None:
    assert confidences(text, given) == pytest.approx(wanted, abs=1e-4)


def test_an_answer_that_is_no_json_is_one_value() -> None:
    assert confidences("ab", tokens(("a", 0.9), ("b", 0.4)), is_json=False) == {WHOLE: 0.6}
    assert confidences("ab", None, is_json=False) == {}


@given(JSON, st.data())
def test_confidence_is_of_the_tokens_that_have_a_byte_of_the_value(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=False)
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)), max_size=12)))
    spans = list(zip([0, *cuts], [*cuts, len(raw)]))
    probabilities = data.draw(st.lists(st.floats(-5, 0), min_size=len(spans), max_size=len(spans)))
    found = confidences(text, [(raw[a:b], p) for (a, b), p in zip(spans, probabilities)])
    wanted = {}
    for leaf in leaves(text):
        first, last = len(text[: leaf.start].encode()), len(text[: leaf.end].encode())
        own = [p for (a, b), p in zip(spans, probabilities) if any(first <= at < last for at in range(a, b))]
        wanted[leaf.path] = round(math.exp(math.fsum(own) / len(own)), 4)
    assert found == wanted


def test_notes_of_parts_go_with_their_values() -> None:
    merged = '{"total": 5, "items": [{"n": 1}, {"n": 2}, {"n": 3}], "who": null}'
    first = '{"total":4,"items":[{"n":1},{"n":2}],"who":null}', {"total": 0.1, "items[0].n": 0.2, "items[1].n": 0.3}
    second = '{"total":5,"items":[{"n":2},{"n":3}],"who":null}', {"total": 0.4, "items[0].n": 0.5, "items[1].n": 0.6}
    assert merged_notes(merged, [first, second]) == {
        "total": 0.4, "items[0].n": 0.2, "items[1].n": 0.3, "items[2].n": 0.6,
    }  # fmt: skip
