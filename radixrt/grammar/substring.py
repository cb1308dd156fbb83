"""The substrings of one text as an automaton: the suffix automaton of Blumer et al. (1985), linear in the text, spelled in UTF-8.

An output may begin where a unit begins and end where one ends. Units are characters, or words: a run of letters, digits,
underscores and what combines with them; every other character that is no white space, and every one of a script written without
spaces, is a unit by itself. Whether there is a border between two characters depends on these two alone, so what a text holds
between its ends is cut alike wherever it stands. That is why one mark before each unit is enough::

    text     the cat, the         units     the|cat|,|the
    marked   |the |cat|, |the     outputs   what may follow the first mark, marks left out, up to where a mark, a space or the end may follow

The automaton is the suffix automaton of the marked text from its first mark on, with each mark skipped.

Invariants: native and reference make the same words; every state is on a way from the start to an end.
"""

from __future__ import annotations

import re
import unicodedata
from array import array

from radixrt.grammar import automaton, ir
from radixrt.grammar.built import native_module
from radixrt.grammar.constraint import Unit
from radixrt.grammar.errors import UnsupportedConstraint

MAX_STATES = 1_000_000
_MARK = 0x110000  # no character
# Written without spaces: Thai and Lao, Burmese, Khmer, Chinese and Japanese.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff66-\uff9f\U00020000-\U0003ffff]"
)
_UNITS = re.compile("o(?:m[wm]*)?|[wm]+")
_JOINERS = "\u200c\u200d"

_Edges = list[tuple[int, int]]  # (character, state), ascending
_Tails = list[tuple[bytes, int]]  # (bytes, state), in the order of bytes


def substring_to_ir(
    text: str,
    unit: Unit = "words",
    max_length: int | None = None,
    empty: bool = False,
    *,
    max_states: int = MAX_STATES,
    native: bool = True,
) -> ir.Grammar:
    """The grammar of all substrings of ``text`` that are whole units, at least one (``empty``: or none), at most ``max_length``.

    A text without a unit gives the empty language, or only the empty string.

    Raises:
        UnsupportedConstraint: more than ``max_states`` states. Without ``max_length`` there are at most about two for each byte
            of the text; with it up to ``max_length`` times as many.
    """
    marks: bytearray | None = None
    spaces = ""
    if unit == "words":
        text = text.strip()
        kinds = {char: _kind(char) for char in set(text)}
        marks = bytearray(len(text))
        for word in _UNITS.finditer(text.translate({ord(char): kind for char, kind in kinds.items()})):
            marks[word.start()] = 1
        spaces = "".join(char for char, kind in kinds.items() if kind == " ")
    most = -1 if max_length is None else min(max_length, len(text) + 1)
    module = native_module() if native else None
    try:
        if module is not None:
            states, words = module.substrings(_utf32(text), marks, _utf32(spaces), most, empty, max_states)
        else:
            states, words = _Reference(text, marks, spaces, most, empty, max_states).packed()
    except (module or automaton).TooLarge:
        counted = "" if max_length is None else f" and max_length={max_length:,}"
        raise UnsupportedConstraint(
            "substring",
            f"of {len(text):,} characters{counted} takes an automaton of more than {max_states:,} states: give a shorter "
            + ("text" if max_length is None else "text or leave max_length to max_tokens"),
        ) from None
    return ir.Grammar({"start": ir.PackedDfa(states, words)})


def _kind(char: str) -> str:
    """White space, a character of a word, one that joins what is before it, or one by itself (``o``)."""
    if char.isspace():
        return " "
    if char in _JOINERS or unicodedata.category(char)[0] == "M":
        return "m"
    return "w" if (char.isalnum() or char == "_") and not _UNSPACED.match(char) else "o"


def _utf32(text: str) -> bytes:
    return array("I", map(ord, text)).tobytes()


class _Reference:
    """What ``native/substring.hpp`` does, in the same order."""

    def __init__(
        self, text: str, marks: bytearray | None, spaces: str, most: int, empty: bool, max_states: int
    ) -> None:
        self.marked, self.most, self.empty, self.max_states = marks is not None, most, empty, max_states
        self.spaces = set(map(ord, spaces))
        self.links, self.lengths, self.symbols = [-1], [0], [_MARK]
        self.out: list[dict[int, int]] = [{}]
        last = 0
        for i, char in enumerate(text):
            if marks is not None and marks[i]:
                last = self._extend(last, _MARK)
            last = self._extend(last, ord(char))
        self.ends: set[int] = set()
        while last > 0:
            self.ends.add(last)
            last = self.links[last]
        self.heights = [0] * len(self.out)
        for state in sorted(range(len(self.out)), key=self.lengths.__getitem__, reverse=True) if most >= 0 else ():
            self.heights[state] = max(
                (self.heights[to] + (not self.marked or c == _MARK) for c, to in self.out[state].items()), default=0
            )
        self.items: list[tuple[int, int] | _Tails] = []  # (state, units left), or within a character
        self.numbers: dict[tuple[int, int], int] = {}

    def _state(self, link: int, length: int, symbol: int, out: dict[int, int]) -> int:
        self.links.append(link)
        self.lengths.append(length)
        self.symbols.append(symbol)
        self.out.append(out)
        return len(self.out) - 1

    def _extend(self, last: int, symbol: int) -> int:
        out, links, lengths = self.out, self.links, self.lengths
        now = self._state(0, lengths[last] + 1, symbol, {})
        while last >= 0 and symbol not in out[last]:
            out[last][symbol] = now
            last = links[last]
        if last < 0:
            return now
        after = out[last][symbol]
        if lengths[after] != lengths[last] + 1:
            copy = self._state(links[after], lengths[last] + 1, symbol, dict(out[after]))
            links[after] = copy
            old, after = after, copy
            while last >= 0 and out[last].get(symbol) == old:
                out[last][symbol] = copy
                last = links[last]
        links[now] = after
        return now

    def _add(self, item: tuple[int, int] | _Tails) -> int:
        if len(self.items) >= self.max_states:
            raise automaton.TooLarge
        self.items.append(item)
        return len(self.items) - 1

    def _number(self, state: int, left: int) -> int:
        key = (state, min(left, self.heights[state]) if left >= 0 else -1)
        known = self.numbers.get(key)
        if known is None:
            known = self.numbers[key] = self._add(key)
        return known

    def packed(self) -> tuple[int, bytes]:
        """The number of states, and their words."""
        words = array("i")
        first = self.out[0].get(_MARK) if self.marked else 0
        if first is None:
            return 1, array("i", (self.empty, 0)).tobytes()
        self._number(first, -1 if self.most < 0 else self.most - self.marked)
        done = 0
        while done < len(self.items):
            item = self.items[done]
            if isinstance(item, tuple):
                last, edges = self._leave(*item)
                tails = [(chr(char).encode("utf-8"), to) for char, to in edges]
            else:
                last, tails = False, item
            self._spell(words, self.empty if done == 0 else last, tails)
            done += 1
        return len(self.items), words.tobytes()

    def _leave(self, state: int, left: int) -> tuple[bool, _Edges]:
        """Whether the output may end here, and the characters that may follow."""
        full, less = left == 0, -1 if left < 0 else left - 1
        edges: _Edges = []
        ways = dict(sorted(self.out[state].items()))
        over = ways.pop(_MARK, None)
        gaps = self.marked and not self.spaces.isdisjoint(ways)
        if not full or self.marked:
            for char, to in ways.items():
                if not (self.marked and full and char in self.spaces):
                    edges.append((char, self._number(to, left if self.marked else less)))
        if over is not None and not full:
            edges += [(char, self._number(to, less)) for char, to in sorted(self.out[over].items())]
        border = over is not None or gaps or state in self.ends
        return not self.marked or (border and self.symbols[state] not in self.spaces), sorted(edges)

    def _spell(self, words: array[int], last: bool, tails: _Tails) -> None:
        """A state's words; characters that begin with the same byte go on in a state of their own."""
        edges: list[int] = []
        at = 0
        while at < len(tails):
            text, to = tails[at]
            byte, end = text[0], at + 1
            if len(text) > 1:
                while end < len(tails) and tails[end][0][0] == byte:
                    end += 1
                to = self._add([(rest[1:], number) for rest, number in tails[at:end]])
            edges += (byte, byte, to)
            at = end
        words.extend((int(last), len(edges) // 3, *edges))
