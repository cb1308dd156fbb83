"""Finds where one call ends, in text that comes in pieces: brackets are matched, strings skipped, nothing is read twice.

Invariants: what is decided depends on the text alone, not on how it was cut; the work is linear in the text: between two steps of the loop
stand some levels of brackets, a run of brackets or a whole string.
"""

from __future__ import annotations

import re

MOST_NESTED = 512
_LEVELS = 3  # of brackets that are skipped in one step
_CLOSES = {"{": "}", "[": "]", "(": ")"}


def _run(strings: str, brackets: str) -> re.Pattern[str]:
    """Text without an open bracket: flat text, whole strings, and brackets of up to ``_LEVELS`` levels that are closed again."""
    pairs = [(re.escape(brackets[i]), re.escape(brackets[i + 1])) for i in range(0, len(brackets), 2)]
    quotes = "".join(dict.fromkeys(char for char in strings))
    flat = f"[^{quotes}{re.escape(brackets)}]++"
    whole = "|".join(rf"{quote}(?:[^{quote}\\]|\\.)*+{quote}" for quote in quotes)
    level = f"(?:{flat}|{whole})*+"
    for _ in range(_LEVELS):
        inner = "|".join(f"{begin}{level}{end}" for begin, end in pairs)
        level = f"(?:{flat}|{whole}|{inner})*+"
    return re.compile(level, re.DOTALL)


_JSON = _run('"', "[]{}")
_PYTHON = _run("\"'", "[](){}")
_INSIDE = {quote: re.compile(rf"(?:[^{quote}\\]|\\.)*+", re.DOTALL) for quote in "\"'"}
_OPENING = re.compile(r"[\[{(]+(?=[\[{(])|[\[{(]")
_CLOSING = re.compile(r"[\]})]+")


class Brackets:
    """Follows one bracketed text from its first bracket on.

    Fields:
        state: ``"open"``, ``"closed"`` (the text up to where ``feed`` stopped is whole) or ``"wrong"`` (no bracket may stand there).
    """

    def __init__(self, python: bool = False, opened: str = "") -> None:
        """``opened``: brackets that are open already."""
        self.state = "open"
        self._run, self._brackets = (_PYTHON, "[](){}") if python else (_JSON, "[]{}")
        self._quotes = "\"'" if python else '"'
        self._expected = "".join(_CLOSES[char] for char in reversed(opened))  # the innermost first
        self._quote = ""

    def feed(self, text: str, at: int) -> int:
        """Read on from ``at``; gives where it stopped: the end, or before a lone backslash at the end that needs what follows."""
        end = len(text)
        while at < end:
            if self._quote:
                at = _INSIDE[self._quote].match(text, at).end()  # type: ignore[union-attr]
                if at == end or text[at] == "\\":
                    return at
                self._quote = ""
                at += 1
                continue
            at = self._run.match(text, at).end() if self._expected else at  # type: ignore[union-attr]
            if at == end:
                return at
            char = text[at]
            if char in self._quotes:
                self._quote = char
                at += 1
            elif char in self._brackets[::2]:
                run = _OPENING.match(text, at)[0]  # type: ignore[index]
                if self._quotes == '"':
                    run = run.partition("(")[0]
                self._expected = "".join(_CLOSES[one] for one in reversed(run)) + self._expected
                room = MOST_NESTED - len(self._expected)
                if room < 0:
                    self.state = "wrong"
                    return at + len(run) + room
                at += len(run)
            else:
                run = _CLOSING.match(text, at)[0][: len(self._expected)]  # type: ignore[index]
                fits = 0
                if self._expected.startswith(run):
                    fits = len(run)
                else:
                    while run[fits] == self._expected[fits]:
                        fits += 1
                self._expected = self._expected[fits:]
                at += fits
                if not self._expected:
                    self.state = "closed"
                    return at
                if fits < len(run):
                    self.state = "wrong"
                    return at
        return at
