"""Stop strings against a search over the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from radixrt.sampling.stop import StopStrings

TEXT = st.text("abc.", max_size=30)
STOPS = st.lists(st.text("abc.", min_size=1, max_size=4), min_size=1, max_size=4)


@given(st.lists(st.text("abc.", max_size=4), max_size=20), STOPS, st.booleans())
def test_pieces_give_what_the_whole_text_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopStrings(stops, include)
    shown, taken, stop = "", "", None
    for piece in pieces:
        more, stop = matcher.push(piece)
        shown += more
        taken += piece
        if stop is not None:
            break
        # what could still turn out to be a stop string, and only that, is held back
        begun = max(k for s in stops for k in range(len(s)) if taken.endswith(s[:k]))
        assert taken[: len(taken) - begun] == shown
    else:
        shown += matcher.flush()
    taken, whole = "", "".join(pieces)
    for piece in pieces:  # the first piece with which some stop string is complete
        taken += piece
        starts = [taken.find(s) for s in stops if s in taken]
        if starts:
            assert stop is not None and taken.find(stop) == min(starts)
            assert shown == taken[: min(starts) + (len(stop) if include else 0)]
            return
    assert stop is None and shown == whole


def test_not_active_yet_matches_and_holds_nothing() -> None:
    matcher = StopStrings(["ab"])
    assert matcher.push("xab", active=False) == ("xab", None)
    assert matcher.push("xa") == ("x", None)
    assert matcher.push("c") == ("ac", None)


def test_special_characters_are_text() -> None:
    assert StopStrings([".*", "\n\n"]).push("x.y.*z") == ("x.y", ".*")
