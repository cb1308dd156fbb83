"""Finds where one call ends, in text that comes in pieces: brackets are matched, strings skipped.

Invariants: what is decided depends on the text alone, not on how it was cut; the work is linear in the text. A few marks are read one by
one; a longer text is read in blocks, all marks of a block at once, each block at most twice as long as what the call has had so far.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import numpy as np

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

MOST_NESTED = 512
_FEW = 24  # marks that are read one by one before a block is worth it
_SHORT, _LONG = 512, 65_536  # characters of a block: the first, and the longest
_OPENS, _CLOSES = "{[(", "}])"
_CLOSER = str.maketrans(_OPENS, _CLOSES)
_MARK = {python: re.compile(rf"[\\\"{chars}]") for python, chars in ((False, r"\[\]{}"), (True, r"'\[\](){}"))}
_INSIDE = {quote: re.compile(rf"(?:[^{quote}\\]|\\.)*+", re.DOTALL) for quote in "\"'"}
_STRING = re.compile(r"""("(?:[^"\\]|\\.)*+"?|'(?:[^'\\]|\\.)*+'?)""", re.DOTALL)
_WHOLE = re.compile(r"""(["'])(?:(?!\1)[^\\]|\\.)*+\1""", re.DOTALL)
_CLOSING, _QUOTE, _APOSTROPHE, _BACKSLASH = 64, 8, 9, 10  # kinds of marks; brackets: 1 to 3, and the same with _CLOSING


def _kinds(python: bool) -> bytes:
    """The kind of every byte."""
    kinds = bytearray(256)
    for kind, (begin, end) in enumerate(zip(_OPENS, _CLOSES, strict=True), 1):
        if python or begin != "(":
            kinds[ord(begin)], kinds[ord(end)] = kind, kind | _CLOSING
    kinds[ord('"')], kinds[ord("\\")] = _QUOTE, _BACKSLASH
    if python:
        kinds[ord("'")] = _APOSTROPHE
    return bytes(kinds)


_KINDS = {python: _kinds(python) for python in (False, True)}
_BRACKETS = np.frombuffer(b"\0" + _CLOSES.encode(), np.uint8)  # the closing bracket of a kind


class Brackets:
    """Follows one bracketed text from its first bracket on.

    Fields:
        state: ``"open"``, ``"closed"`` (the text up to where ``feed`` stopped is whole) or ``"wrong"`` (what is there may not stand there:
            a bracket that closes another one or is too deep, a backslash outside of a string).
        depth: how many brackets are open, as long as nothing is wrong.
    """

    def __init__(self, python: bool = False) -> None:
        self.state = "open"
        self._python = python
        self._expected = ""  # brackets that close those which are open, the innermost last
        self._quote = ""
        self._seen, self._size = 0, _SHORT  # marks read one by one; characters of the next block

    @property
    def depth(self) -> int:
        return len(self._expected)

    def feed(self, text: str, at: int) -> int:
        """Read on from ``at``; gives where it stopped: the end, or before a lone backslash at the end that needs what follows."""
        end = len(text)
        mark = _MARK[self._python]
        while at < end and self.state == "open":
            if self._quote:
                at = _INSIDE[self._quote].match(text, at).end()  # type: ignore[union-attr]
                if at == end or text[at] == "\\":
                    return at
                self._quote = ""
                at += 1
            elif self._seen >= _FEW and 2 * (end - at) >= _SHORT:
                at = self._block(text[at : at + self._size], at)
                self._size = min(2 * self._size, _LONG)
            else:
                found = mark.search(text, at)
                if found is None:
                    return end
                self._seen += 1
                at = self._mark(found[0], found.start())
        return at

    def _mark(self, char: str, at: int) -> int:
        if char in "\"'":
            self._quote = char
        elif char in _OPENS and len(self._expected) < MOST_NESTED:
            self._expected += char.translate(_CLOSER)
        elif char == self._expected[-1]:
            self._expected = self._expected[:-1]
            if not self._expected:
                self.state = "closed"
        else:
            self.state = "wrong"
            return at
        return at + 1

    def _block(self, text: str, at: int) -> int:
        """As ``_mark`` for every mark of ``text``, which stands at ``at``."""
        codes = np.frombuffer(text.encode("latin-1", "replace").translate(_KINDS[self._python]), np.uint8)
        places = np.flatnonzero(codes)
        kinds = codes[places]
        inside, open = _inside(text, places, kinds)
        bare = places[~inside & (kinds == _BACKSLASH)]
        chosen = ~inside & ((kinds < _QUOTE) | (kinds > _CLOSING))
        places, kinds = places[chosen], kinds[chosen]
        stop = len(text)
        if open >= 0:
            stop = open + 1
        if len(bare):
            stop, open = int(bare[0]), -1
            kept = int(np.searchsorted(places, stop))
            places, kinds = places[:kept], kinds[:kept]
            self.state = "wrong"
        ends = kinds > _CLOSING
        depth = len(self._expected) + np.cumsum(np.where(ends, -1, 1), dtype=np.int32)
        over = np.flatnonzero((depth <= 0) | (depth > MOST_NESTED))
        if len(over):
            first = int(over[0])
            closed = bool(ends[first])
            self.state, open = ("closed" if closed else "wrong"), -1
            stop = int(places[first]) + closed
            kinds, depth = kinds[: first + closed], depth[: first + closed]
        before = _kinds_of(self._expected)
        kinds = np.concatenate([before, kinds])
        ends = kinds > _CLOSING
        level = (
            np.concatenate([np.arange(1, len(before) + 1), depth]) + ends
        )  # of a closing bracket: that of its opening one
        order = np.argsort(level.astype(np.int16), kind="stable")  # a level's brackets open and close in turn
        sorted_, opens = kinds[order], ~ends[order]
        wrong = np.flatnonzero(~opens[1:] & (sorted_[1:] != sorted_[:-1] | _CLOSING)) + 1
        if len(wrong):
            first = int(order[wrong].min())
            self.state, open = "wrong", -1
            stop = int(places[first - len(before)])
            return at + stop
        left = opens & np.append(opens[1:], True)
        self._expected = _BRACKETS[sorted_[left]].tobytes().decode()
        if open >= 0:
            self._quote = text[open]
        return at + stop


def _kinds_of(expected: str) -> _Array:
    return np.frombuffer(expected.encode().translate(_KINDS[True]), np.uint8) & (_CLOSING - 1)


def _inside(text: str, places: _Array, kinds: _Array) -> tuple[_Array, int]:
    """Which of the marks stand in strings (their closing quotes do not), and where a string begins that does not end; -1: nowhere."""
    quotes = (kinds == _QUOTE) | (kinds == _APOSTROPHE)
    if not quotes.any():
        return quotes, -1
    if (kinds == _QUOTE).any() and (kinds == _APOSTROPHE).any():  # one may stand in a string of the other
        parts = _STRING.split(text)
        edges = np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)))
        begins, ends, open = edges[:-1:2], edges[1::2] - 1, -1
        if not _WHOLE.fullmatch(parts[-2]):
            open, ends = int(begins[-1]), ends[:-1]
        turns = np.zeros(len(kinds), dtype=bool)
        turns[np.searchsorted(places, begins)] = True
        turns[np.searchsorted(places, ends)] = True
        return np.logical_xor.accumulate(turns), open
    slashes = np.flatnonzero(kinds == _BACKSLASH)
    if len(slashes):
        at = places[slashes]
        begins = np.flatnonzero(np.append(True, np.diff(at) != 1))
        lasts = np.append(begins[1:], len(at)) - 1
        lasts = lasts[(lasts - begins) % 2 == 0]  # runs of an odd length escape what follows
        after = slashes[lasts] + 1
        fits = after < len(places)
        after, at = after[fits], at[lasts[fits]]
        quotes[after[places[after] == at + 1]] = False
    inside = np.logical_xor.accumulate(quotes)
    return inside, int(places[np.flatnonzero(quotes)[-1]]) if inside[-1] else -1
