"""A document that is longer than the context, cut into parts on the borders of paragraphs and sentences.

Invariants: parts are slices of the text, in order, that together cover it; each begins after the one before and holds
at most ``limit`` tokens, counted as it is; every character is counted about twice, in its sentence and in its part, so
the time is linear.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator

from radixrt.errors import InvalidRequest

_LONGEST = 256  # characters of a piece that is cut out of a sentence too large for a part
_SHORTEST = 16  # characters of a sentence: what is shorter goes with the next one

# Where a sentence ends. Behind its stop and what closes quotes; blanks lead what comes next (as tokens have it), line
# breaks end what came before. A line break that a lower-case letter follows is one inside a sentence.
_ABBREVIATIONS = "Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|No|Nr|Fig|Eq|Ref|Sec|Vol|approx|ca|cf|pp|etc|al|Inc|Ltd|Co|Corp"
_BORDER = re.compile(
    r"(?P<paragraph>\n(?:[^\S\n]*+\n)++)"
    r"|(?<![.!?…])[.!?…]++[\"'”’»)\]]*+(?P<stop>(?=[^\S\n]))"
    r"|[。！？][”’」』）]*+(?P<wide>)"
    r"|(?P<line>\n)"
)
_ABBREVIATED = re.compile(rf"(?:\b(?:{_ABBREVIATIONS})|\b[^\W\d_]|\b\d{{1,3}})\.\Z")
_NEXT = re.compile(r"[^\S\n]*+(\S?)")


def split_text(text: str, count: Callable[[str], int], limit: int, overlap: int) -> list[str]:
    """The parts of a text, none of more than ``limit`` tokens; a text that fits is one part.

    A part ends with the last paragraph that fills at least half of it, or else with the last sentence (or line of a
    table) that fits; the next one repeats the sentences before that border which hold at most ``overlap`` tokens
    together. A sentence that no part can hold is cut between words, or inside a word that is too long, but never
    between a letter and its accents.

    Args:
        count: the tokens of a text; called for each sentence and each part. limit: tokens of a part. overlap: 0: none.

    Raises:
        InvalidRequest: a limit below 1, an overlap that leaves no room for anything new.
    """
    if limit < 1:
        raise InvalidRequest("limit", f"={limit}: must be at least 1")
    if not 0 <= overlap < limit:
        raise InvalidRequest("overlap", f"={overlap}: must be at least 0 and less than the {limit} tokens of a part")
    if 4 * len(text) <= limit:  # no token is less than a byte
        return [text]
    pieces = _pieces(text, count, limit)
    sizes = [size for _, _, size in pieces]
    budget = limit - limit // 64  # sentences alone are about as many tokens as together
    parts: list[str] = []
    first = fresh = 0  # the pieces of the next part, and the first of them that no part holds yet
    while fresh < len(pieces):
        end, total = fresh, sum(sizes[first:fresh])
        while end < len(pieces) and (total + sizes[end] <= budget or end == fresh):
            total += sizes[end]
            end += 1
        if end < len(pieces):
            end = _paragraph_end(pieces, fresh, end, total, budget)
        while end - first > 1 and count(text[_start(pieces, first) : pieces[end - 1][0]]) > limit:
            if end - 1 > fresh:
                end -= 1
            else:
                first += 1
        parts.append(text[_start(pieces, first) : pieces[end - 1][0]])
        # ..first......fresh.........end........      first: back over whole sentences while they fit the overlap and
        #                    ~~~~~~ overlap          leave room for one that is new; never back to this part's own first
        repeated, back = 0, end
        room = min(overlap, budget - sizes[end]) if end < len(pieces) else 0
        while back - 1 > first and repeated + sizes[back - 1] <= room:
            back -= 1
            repeated += sizes[back]
        first, fresh = back, end
    return parts


def _start(pieces: list[tuple[int, bool, int]], at: int) -> int:
    return pieces[at - 1][0] if at else 0


def _paragraph_end(pieces: list[tuple[int, bool, int]], fresh: int, end: int, total: int, limit: int) -> int:
    """The last end of a paragraph that leaves the part at least half full, or ``end``."""
    cut = end
    while cut > fresh + 1 and 2 * total >= limit:
        if pieces[cut - 1][1]:
            return cut
        cut -= 1
        total -= pieces[cut][2]
    return cut if 2 * total >= limit and pieces[cut - 1][1] else end


def _pieces(text: str, count: Callable[[str], int], limit: int) -> list[tuple[int, bool, int]]:
    """What is never cut: ``(end, whether a paragraph ends there, tokens)`` of each, in order, covering the text."""
    pieces: list[tuple[int, bool, int]] = []
    start = 0
    for end, paragraph in _borders(text):
        if end - start > 8 * max(limit, _LONGEST):  # surely too large: not worth counting
            size = limit + 1
        else:
            size = count(text[start:end])
        if size <= limit:
            pieces.append((end, paragraph, size))
        else:
            _cut(text, start, end, count, limit, pieces)
            last = pieces[-1]
            pieces[-1] = (last[0], paragraph, last[2])
        start = end
    return pieces


def _borders(text: str) -> Iterator[tuple[int, bool]]:
    """The ends of sentences, and whether each ends a paragraph; the end of the text is the last."""
    start = 0
    for match in _BORDER.finditer(text):
        kind, end = match.lastgroup, match.end()
        if kind != "paragraph" and end - start < _SHORTEST:
            continue
        if kind in ("line", "stop"):
            following = _NEXT.match(text, end)
            letter = following[1] if following else ""
            if not letter or letter.islower():  # the next border is at the line break, or it is no border
                continue
            if kind == "stop" and _ABBREVIATED.search(text, max(0, end - 12), end):
                continue
        if end < len(text):
            start = end
            yield end, kind == "paragraph"
    if text:
        yield len(text), True


def _cut(
    text: str, start: int, end: int, count: Callable[[str], int], limit: int, pieces: list[tuple[int, bool, int]]
) -> None:
    """Cut what is too large into pieces of bounded length, each between words where it can be."""
    longest = max(1, min(_LONGEST, limit))
    stack = [(start, end)]
    while stack:
        low, high = stack.pop()
        if high - low > longest:
            middle = _place(text, low, low + longest)
            stack += [(middle, high), (low, middle)]
            continue
        size = count(text[low:high])
        if size > limit and high - low > 1:
            middle = _place(text, low, (low + high + 1) // 2)
            if middle < high:
                stack += [(middle, high), (low, middle)]
                continue
        pieces.append((high, False, size))


def _place(text: str, low: int, high: int) -> int:
    """The best place to cut at most at ``high``: before a blank, or else not between what is one character."""
    for place in range(high, low + (high - low) // 2, -1):
        if text[place - 1 : place].isspace() != text[place : place + 1].isspace() and text[place].isspace():
            return place
    place = high
    while place > low + 1 and place > high - 32 and _joined(text[place - 1], text[place]):
        place -= 1
    return place


def _joined(before: str, after: str) -> bool:
    """Whether two code points are parts of one character: an accent, a joined or coloured emoji, a line break."""
    return (
        after == "\u200d"
        or before == "\u200d"
        or "\U0001f3fb" <= after <= "\U0001f3ff"
        or unicodedata.category(after)[0] == "M"
        or (before, after) == ("\r", "\n")
    )
