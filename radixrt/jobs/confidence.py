"""How sure the model was of each value of an answer, from the log-probabilities of the tokens that spell it.

    text    {"total":12.5,"paid":true}
    tokens  {" total ": 12 . 5 , "paid ...
                        |-----| the tokens that have a byte of the value, quotes included

The confidence of a value is the geometric mean of its tokens' probabilities, exp(sum of logprobs / number of tokens):
1 is certain. They are the model's own, before the constraint takes away what may not come, so a value that the model
wanted to write otherwise has a low one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from radixrt.jobs.leaves import general, leaves

_DIGITS = 4  # more would be those of rounding


def confidences(text: str, tokens: Sequence[tuple[bytes, float]] | None, *, is_json: bool = True) -> dict[str, float]:
    """Path of each single value -> its confidence, from 0 to 1; empty where the tokens do not spell the text.

    Args:
        tokens: the bytes and the natural log-probability of each.
        is_json: else the whole text is one value, of the path ``value``.
    """
    if not tokens or b"".join(spelled for spelled, _ in tokens) != text.encode():
        return {}
    ends = list(accumulate(len(spelled) for spelled, _ in tokens))
    starts = [0, *ends[:-1]]
    ascii_only = text.isascii()
    at, byte = 0, 0
    found: dict[str, float] = {}
    for leaf in leaves(text, is_json=is_json):
        if ascii_only:
            first, last = leaf.start, leaf.end
        else:
            first = byte + len(text[at : leaf.start].encode())
            last = first + len(text[leaf.start : leaf.end].encode())
            at, byte = leaf.end, last
        # tokens that end behind the first byte and begin before the last one; empty tokens are of nothing
        own = [logprob for spelled, logprob in tokens[bisect_right(ends, first) : bisect_left(starts, last)] if spelled]
        if own:
            found[leaf.path] = round(math.exp(math.fsum(own) / len(own)), _DIGITS)
    return found


def merged_notes(merged: str, parts: Sequence[tuple[str, dict[str, Any]]], *, is_json: bool = True) -> dict[str, Any]:
    """What is noted of each value of a merged answer (a confidence, a quote): that of the first part that has this
    value in such a place.

    Args:
        merged: the JSON text of the merged value. parts: the JSON text of each part's, and what is noted of its
            values by path.
    """
    known: dict[tuple[str, str], Any] = {}
    for text, notes in parts:
        for leaf in leaves(text, is_json=is_json):
            if leaf.path in notes:
                known.setdefault((general(leaf.path), repr(leaf.value)), notes[leaf.path])
    found: dict[str, Any] = {}
    for leaf in leaves(merged, is_json=is_json):
        key = general(leaf.path), repr(leaf.value)
        if key in known:
            found[leaf.path] = known[key]
    return found
