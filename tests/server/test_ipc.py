"""Frames and what travels in them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest
from radixrt.request import OutputDelta
from radixrt.server.ipc import ChannelTexts, Deltas, FrameReader, Refused, frame, pack, unpack
from radixrt.server.worker import frames


@given(
    texts=st.lists(st.text(max_size=20), max_size=9),
    cuts=st.lists(st.integers(0, 400), max_size=9),
)
def test_frames_survive_any_cutting(texts: list[str], cuts: list[int]) -> None:
    sent = [ChannelTexts(at, [text]) for at, text in enumerate(texts)]
    data = b"".join(map(frame, sent))
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    reader = FrameReader()
    assert [one for a, b in pairwise(edges) for one in reader.feed(data[a:b])] == sent


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(value=JSON)
def test_what_callers_give_arrives_unchanged(value: Any) -> None:
    assert unpack(pack("prompt", value, 7)) == [value, 7]


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\x01\xc0", b"\0\0\0\x02\x91\xa1"])
def test_what_is_no_frame_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        list(FrameReader().feed(data))


def test_what_is_too_long_for_one_frame_goes_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixrt.server.ipc.MAX_FRAME", 200)
    items = [
        (1, OutputDelta("r", 0, "short", ())),
        (2, OutputDelta("r", 0, "l" * 160, ())),
        (3, OutputDelta("r", 0, "", ())),
    ]
    read = list(FrameReader().feed(b"".join(frames(Deltas(items)))))
    assert [one.items[0] if isinstance(one, Deltas) else getattr(one, "number", 0) for one in read] == [
        items[0],
        2,
        items[2],
    ]
    assert isinstance(read[1], Refused) and "at most 200" in read[1].message


def test_what_is_too_long_to_be_asked_names_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixrt.server.ipc.MAX_FRAME", 20_000)
    assert pack("prompt", "x" * 3000)
    with pytest.raises(InvalidRequest, match="^prompt: has 4,00. bytes"):
        pack("prompt", "x" * 4000)
