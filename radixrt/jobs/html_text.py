"""HTML as plain text: what a reader sees, a line for each block.

Invariants: any text is taken, well-formed or not, in time linear in its length (which ``html.parser`` is not: an
unclosed comment makes it start over); what is in scripts, styles and templates is left out.
"""

from __future__ import annotations

import re
from html import unescape

_HIDDEN = frozenset({"template", "noscript", "svg"})
_APART = frozenset({"p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "dl", "table", "blockquote", "pre"})
_LINES = _APART | frozenset(
    "address article aside body caption center details dialog dd div dt fieldset figcaption figure footer form head"
    " header hgroup hr html legend li main menu nav option search section summary tbody tfoot thead title tr".split()
)
_CELLS = frozenset({"td", "th"})
_DEEPEST = 100  # levels of hidden elements in each other that are kept apart
_BLANKS = re.compile(r"[ \t\r\n\f\xa0]+")
# Each part ends where a browser ends it: without its own end, with the page. Possessive: nothing is ever read again.
_PART = re.compile(
    r"(?P<text>(?:[^<]++|<(?![a-zA-Z!?/]))++)"
    r"|<!--(?:-?>|(?:[^-]++|-(?!-!?>))*+(?:--!?>|\Z))"
    r"|<(?P<raw>script|style)\b[^>]*+(?:>|\Z)(?:[^<]++|<(?!/(?P=raw)[\s/>]))*+"
    r"|<(?P<close>/?)(?P<tag>[a-zA-Z][^\s/>]*+)(?:[^>=]++|=\s*+(?:\"[^\"]*+(?:\"|\Z)|'[^']*+(?:'|\Z))?+)*+(?:>|\Z)"
    r"|<[!?/][^>]*+(?:>|\Z)",
    re.IGNORECASE,
)


class _Reader:
    """What has been read of a page, and what stands between it and the next text."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._breaks = 0  # line breaks before the next text
        self._gap = ""  # what is before the next text where no line break is
        self._hidden: list[str] = []  # elements that are not shown, the innermost last
        self._pre = 0  # how many of them are open

    def start(self, tag: str) -> None:
        if tag in _HIDDEN:
            if len(self._hidden) < _DEEPEST:
                self._hidden.append(tag)
        elif tag == "br":
            self._breaks = min(2, self._breaks + 1)
        elif tag in _CELLS:
            self._gap = "\t"
        else:
            self._border(tag)
            self._pre += tag == "pre"

    def end(self, tag: str) -> None:
        if tag in _HIDDEN:
            while tag in self._hidden and self._hidden.pop() != tag:
                pass
        else:
            self._border(tag)
            self._pre = max(0, self._pre - (tag == "pre"))

    def text(self, data: str) -> None:
        if self._hidden:
            return
        if self._pre:
            core = data.strip("\n")
            before, after = data.startswith("\n"), data.endswith("\n")
            self._breaks = max(self._breaks, int(before))
        else:
            data = _BLANKS.sub(" ", data)
            core = data.strip(" ")
            before, after = data.startswith(" "), False
        if before:
            self._gap = self._gap or " "
        if not core:
            return
        if self.pieces:
            self.pieces.append("\n" * self._breaks or self._gap)
        self.pieces.append(core)
        self._breaks = int(after)
        self._gap = " " if data.endswith(" ") and not self._pre else ""

    def _border(self, tag: str) -> None:
        if tag in _LINES and not self._hidden:
            self._breaks = max(self._breaks, 2 if tag in _APART else 1)


def html_to_text(html: str) -> str:
    """The text of an HTML page. Blocks are lines, paragraphs and tables have an empty line around them, cells a tab
    between them; white space is one blank, except in ``pre``.
    """
    reader = _Reader()
    for part in _PART.finditer(html):
        if part["text"]:
            reader.text(unescape(part["text"]))
        elif part["tag"]:
            tag = part["tag"].lower()
            if part["close"]:
                reader.end(tag)
            elif not (tag in _HIDDEN and part[0].endswith("/>")):  # <svg/> holds nothing
                reader.start(tag)
    return "".join(reader.pieces)
