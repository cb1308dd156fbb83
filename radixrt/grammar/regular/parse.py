"""Patterns to syntax trees: ECMA-262 with the u flag (as JSON Schema wants it) and Python's ``re`` for ``str``.

ECMA: ``\\d`` and ``\\w`` are ASCII, ``.`` excludes the four line terminators, look-behinds may be of any width. Beyond the letter of
the u flag, what cannot be misread is accepted as the web does: an escaped punctuation character, a lone ``]``, ``{`` or ``}``, and
a leading ``(?i)``-like flag group. Python: ``\\d``, ``\\w`` and ``\\s`` are Unicode, ``.`` excludes ``\\n``; the flags i, s, m, x, a, u.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Literal, NoReturn

from radixrt.errors import InvalidRequest
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.regular import unicode
from radixrt.grammar.regular.charset import ALL, LAST, CharSet, charset, complement
from radixrt.grammar.regular.limits import DEFAULT_LIMITS, RegularLimits
from radixrt.grammar.regular.nodes import AT_END, AT_START, EPSILON, Cat, Chars, Look, Node, Or, Rep, cat, either

Syntax = Literal["ecma", "python"]

_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_NAME = re.compile(r"[^\W\d]\w*|[$_][\w$]*")
_BRACES = re.compile(r"\{(\d*)(,?)(\d*)\}")
_PYTHON_FLAGS = "aimsux"


def parse(pattern: str, syntax: Syntax = "ecma", limits: RegularLimits = DEFAULT_LIMITS) -> Node:
    """The syntax tree of a pattern.

    Raises:
        InvalidRequest: a syntax error, with its position; too long or too deep.
        UnsupportedConstraint: a back-reference, or another feature that no regular language has.
    """
    if syntax not in ("ecma", "python"):
        raise InvalidRequest("syntax", f"={syntax!r}: must be 'ecma' or 'python'")
    if len(pattern) > limits.length:
        raise InvalidRequest("pattern", f"is {len(pattern):,} characters long; the limit is {limits.length:,}")
    return _Parser(pattern, syntax, limits).whole()


def shown(pattern: str) -> str:
    """A pattern as error messages quote it."""
    return repr(pattern if len(pattern) <= 80 else pattern[:77] + "...")


class _Parser:
    """One pass over one pattern, by recursive descent; ``at`` is the next character's index."""

    def __init__(self, pattern: str, syntax: Syntax, limits: RegularLimits) -> None:
        self.text, self.python, self.limits = pattern, syntax == "python", limits
        self.at = self.depth = 0
        self.flags: frozenset[str] = frozenset()
        self.groups: set[str] = set()

    def fail(self, problem: str, at: int | None = None) -> NoReturn:
        where = self.at if at is None else at
        raise InvalidRequest("pattern", f"={shown(self.text)}: {problem} at position {where}")

    def refuse(self, feature: str, at: int) -> NoReturn:
        raise UnsupportedConstraint("pattern", f"={shown(self.text)}: {feature} at position {at} is not supported")

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def whole(self) -> Node:
        self.global_flags()
        node = self.alternatives()
        if self.at < len(self.text):
            self.fail("unmatched ')'")
        return node

    def global_flags(self) -> None:
        while match := re.compile(r"\(\?([a-zA-Z]+)\)").match(self.text, self.at):
            self.set_flags(match[1], self.at)
            self.at = match.end()

    def set_flags(self, letters: str, at: int) -> None:
        for letter in letters:
            if letter in "L" or (not self.python and letter not in "ims"):
                self.refuse(f"the flag {letter!r}", at)
            if letter not in _PYTHON_FLAGS:
                self.fail(f"unknown flag {letter!r}", at)
        self.flags |= frozenset(letters)

    def alternatives(self) -> Node:
        if self.depth > self.limits.nesting:
            self.fail(f"groups are nested deeper than {self.limits.nesting}")
        branches = [self.sequence()]
        while self.take("|"):
            branches.append(self.sequence())
        return either(branches)

    def sequence(self) -> Node:
        items: list[Node] = []
        text, end = self.text, len(self.text)
        while self.at < end and text[self.at] not in "|)":
            if "x" in self.flags and self.skip_blank():
                continue
            start = self.at
            item = self.atom()
            if item is None:
                continue
            items.append(self.quantified(item, start))
        return cat(items) if items else EPSILON

    def skip_blank(self) -> bool:
        start = self.at
        while self.at < len(self.text):
            if self.text[self.at] in " \t\n\r\f\v":
                self.at += 1
            elif self.text[self.at] == "#":
                newline = self.text.find("\n", self.at)
                self.at = len(self.text) if newline < 0 else newline + 1
            else:
                break
        return self.at > start

    def quantified(self, item: Node, start: int) -> Node:
        at = self.at
        bounds = self.quantifier()
        if bounds is None:
            return item
        if self.text[start] in "^$" or self.text[start : start + 2] in ("\\b", "\\B", "\\A", "\\Z"):
            self.fail("nothing to repeat", at)
        if isinstance(item, Look) and not self.python and not item.ahead:
            self.fail("a look-behind cannot be repeated", at)
        low, high = bounds
        if high is not None and high < low:
            self.fail(f"the counter {{{low},{high}}} is out of order", at)
        if self.peek("+") and self.python:
            self.refuse("the possessive quantifier", at)
        self.take("?")  # lazy: the same language
        again = self.at
        if self.quantifier() is not None:
            self.fail("multiple repeat", again)
        self.at = again
        return _repeat(item, low, high)

    def quantifier(self) -> tuple[int, int | None] | None:
        if "x" in self.flags:
            self.skip_blank()
        c = self.text[self.at] if self.at < len(self.text) else ""
        if c in ("*", "+", "?") and c:
            self.at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[c]
        match = _BRACES.match(self.text, self.at) if c == "{" else None
        if match is None or not (match[1] or match[2]):
            return None
        if not match[1] and not self.python:
            self.fail("the counter has no lower bound")
        if len(match[1]) > 9 or len(match[3]) > 9:
            self.fail("the counter is too large")
        self.at = match.end()
        low = int(match[1] or 0)
        return low, (low if not match[2] else int(match[3]) if match[3] else None)

    def atom(self) -> Node | None:
        c = self.text[self.at]
        if c == "(":
            return self.group()
        if c == "[":
            return Chars(self.bracket())
        if c == "\\":
            return self.escape()
        at = self.at
        self.at += 1
        if c == ".":
            ends = unicode.NEWLINE if self.python else unicode.LINE_ENDS
            return Chars(ALL if "s" in self.flags else complement(ends))
        if c == "^":
            return self.line_start() if "m" in self.flags else AT_START
        if c == "$":
            return self.line_end()
        if c in "*+?":
            self.fail("nothing to repeat", at)
        if c == "{" and re.compile(r"\{\d+(,\d*)?\}").match(self.text, at):
            self.fail("nothing to repeat", at)
        return Chars(self.literal(ord(c), at))

    def literal(self, code: int, at: int) -> CharSet:
        if 0xD800 <= code <= 0xDFFF:
            self.refuse("a lone surrogate", at)
        one = ((code, code),)
        return unicode.with_case_variants(one) if "i" in self.flags else one

    def line_ends(self) -> CharSet:
        return unicode.NEWLINE if self.python else unicode.LINE_ENDS

    def line_start(self) -> Node:
        return Look(Chars(complement(self.line_ends())), ahead=False, negative=True)

    def line_end(self) -> Node:
        if "m" in self.flags:
            return Look(Chars(complement(self.line_ends())), ahead=True, negative=True)
        if self.python:  # also before a last newline
            return Look(Cat((Rep(Chars(unicode.NEWLINE), 0, 1), AT_END)), ahead=True, negative=False)
        return AT_END

    def boundary(self, inside: bool) -> Node:
        word = Chars(self.shorthand("w"))
        before, after = (Look(word, ahead=ahead, negative=False) for ahead in (False, True))
        not_before, not_after = (Look(word, ahead=ahead, negative=True) for ahead in (False, True))
        if inside:
            return Or((Cat((before, after)), Cat((not_before, not_after))))
        return Or((Cat((before, not_after)), Cat((not_before, after))))

    def group(self) -> Node | None:
        start, flags = self.at, self.flags
        self.at += 1
        self.depth += 1
        look: tuple[bool, bool] | None = None
        if self.take("?"):
            if self.take(":"):
                pass
            elif self.take("="):
                look = (True, False)
            elif self.take("!"):
                look = (True, True)
            elif self.take("<="):
                look = (False, False)
            elif self.take("<!"):
                look = (False, True)
            elif self.take("P<" if self.python else "<"):
                self.group_name(">", new=True)
            elif self.python and self.take("P="):
                self.refuse(f"the back-reference to {self.group_name(')', new=False)!r}", start)
            elif self.python and self.take("#"):
                end = self.text.find(")", self.at)
                if end < 0:
                    self.fail("the comment is not closed", start)
                self.at, self.depth = end + 1, self.depth - 1
                return None
            elif self.python and self.peek("("):
                self.refuse("the conditional group", start)
            elif self.python and self.peek(">"):
                self.refuse("the atomic group", start)
            else:
                self.local_flags(start)
        node = self.alternatives()
        if not self.take(")"):
            self.fail("the group is not closed", start)
        self.depth -= 1
        self.flags = flags
        return node if look is None else Look(node, *look)

    def local_flags(self, start: int) -> None:
        match = re.compile(r"([a-zA-Z]*)(?:-([a-zA-Z]+))?:").match(self.text, self.at)
        if match is None:
            if re.compile(r"[a-zA-Z]+\)").match(self.text, self.at):
                self.fail("flags for the whole pattern must come first", start)
            self.fail("unknown kind of group", start)
        self.set_flags(match[1], start)
        self.flags -= frozenset(match[2] or "")
        self.at = match.end()

    def group_name(self, end: str, *, new: bool) -> str:
        match = _NAME.match(self.text, self.at)
        if match is None or not self.text.startswith(end, match.end()):
            self.fail("a group name is expected")
        if new and match[0] in self.groups and self.python:
            self.fail(f"the group name {match[0]!r} is used twice")
        self.groups.add(match[0])
        self.at = match.end() + len(end)
        return match[0]

    def shorthand(self, letter: str) -> CharSet:
        """The set of ``\\d``, ``\\w``, ``\\s`` or, for a capital, of all other characters."""
        low = letter.lower()
        if self.python and "a" not in self.flags:
            chars = unicode.python_class(low)
        elif self.python and low == "s":
            chars = charset([(9, 13), (0x20, 0x20)])
        else:
            chars = {"d": unicode.DIGIT, "w": unicode.WORD, "s": unicode.SPACE}[low]
            if low == "w" and "i" in self.flags and not self.python:
                chars = unicode.with_case_variants(chars)
        return chars if letter == low else complement(chars)

    def escape(self) -> Node:
        """An escape outside brackets."""
        at, c = self.at, self.text[self.at + 1 : self.at + 2]
        if c in ("b", "B"):
            self.at += 2
            return self.boundary(inside=c == "B")
        if self.python and c in ("A", "Z") and c:
            self.at += 2
            return AT_START if c == "A" else AT_END
        if re.match("[1-7][0-7]{2}", self.text[at + 1 : at + 4]):  # three octal digits: a character, in Python
            return Chars(self.literal(self.octal(at), at))
        if c and c in "123456789":
            self.refuse(f"the back-reference \\{c}", at)
        if c == "k" and not self.python:
            self.refuse("the back-reference \\k", at)
        found = self.set_escape(inside=False)
        return Chars(self.literal(found, at) if isinstance(found, int) else found)

    def set_escape(self, *, inside: bool) -> CharSet | int:
        """An escape that stands for a set or a single code point, inside or outside brackets."""
        at = self.at
        c = self.text[at + 1 : at + 2]
        self.at += 2
        if not c:
            self.fail("the pattern ends in a backslash", at)
        if c in "dDwWsS":
            return self.shorthand(c)
        if c in _CONTROLS:
            return _CONTROLS[c]
        if c == "x":
            return self.hexadecimal(2, at)
        if c == "u":
            return self.unicode_escape(at)
        if c == "0" or (self.python and inside and c in "1234567"):
            return self.octal(at)
        return self.python_escape(c, at, inside) if self.python else self.ecma_escape(c, at, inside)

    def python_escape(self, c: str, at: int, inside: bool) -> int:
        if c == "a":
            return 7
        if c == "b" and inside:
            return 8
        if c == "U":
            return self.hexadecimal(8, at)
        if c == "N":
            match = re.compile(r"\{([^}]*)\}").match(self.text, self.at)
            try:
                code = ord(unicodedata.lookup(match[1] if match else ""))
            except KeyError:
                self.fail("unknown character name", at)
            self.at = match.end()  # type: ignore[union-attr]
            return code
        if c.isascii() and c.isalnum():
            self.fail(f"bad escape \\{c}", at)
        return ord(c)

    def ecma_escape(self, c: str, at: int, inside: bool) -> CharSet | int:
        if c == "b" and inside:
            return 8
        if c == "c":
            letter = self.text[self.at : self.at + 1]
            if not (letter.isascii() and letter.isalpha()):
                self.fail("\\c must be followed by a letter", at)
            self.at += 1
            return ord(letter) % 32
        if c in "pP":
            match = re.compile(r"\{([^}]*)\}").match(self.text, self.at)
            found = unicode.unicode_property(match[1]) if match else None
            if match is None or found is None:
                self.fail(f"unknown Unicode property \\{c}{match[0] if match else ''}", at)
            self.at = match.end()
            if "i" in self.flags:
                found = unicode.with_case_variants(found)
            return found if c == "p" else complement(found)
        if c.isascii() and c.isalnum():
            self.fail(f"bad escape \\{c}", at)
        return ord(c)

    def hexadecimal(self, digits: int, at: int) -> int:
        text = self.text[self.at : self.at + digits]
        if not re.fullmatch(rf"[0-9a-fA-F]{{{digits}}}", text):
            self.fail(f"{digits} hexadecimal digits are expected", at)
        self.at += digits
        if int(text, 16) > LAST:
            self.fail("the character is beyond U+10FFFF", at)
        return int(text, 16)

    def unicode_escape(self, at: int) -> int:
        if not self.python and self.peek("{"):
            match = re.compile(r"\{([0-9a-fA-F]{1,32})\}").match(self.text, self.at)
            if match is None or int(match[1], 16) > LAST:
                self.fail("\\u{...} must hold a code point in hexadecimal", at)
            self.at = match.end()
            return int(match[1], 16)
        code = self.hexadecimal(4, at)
        if not self.python and 0xD800 <= code <= 0xDBFF:
            low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.text, self.at)
            if low:
                self.at = low.end()
                return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        return code

    def octal(self, at: int) -> int:
        match = re.compile(r"[0-7]{1,3}").match(self.text, at + 1)
        assert match is not None
        if not self.python and (match[0] != "0" or self.text[at + 2 : at + 3].isdigit()):
            self.fail("octal escapes are not allowed", at)
        self.at = match.end()
        if int(match[0], 8) > 0o377:
            self.fail("the octal escape is beyond \\377", at)
        return int(match[0], 8)

    def bracket(self) -> CharSet:
        """A character class; the opening bracket is next."""
        start = self.at
        self.at += 1
        negative = self.take("^")
        parts: list[tuple[int, int]] = []
        first = True
        while True:
            if self.at >= len(self.text):
                self.fail("the character class is not closed", start)
            if self.peek("]") and not (first and self.python):
                self.at += 1
                break
            first = False
            at = self.at
            low = self.member()
            if self.peek("-") and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self.member()
                if not isinstance(low, int) or not isinstance(high, int):
                    if self.python:
                        self.fail("a class cannot bound a range", at)
                    for part in (low, high, 0x2D):  # as the web reads it: [\w-.] holds the three of them
                        parts += [(part, part)] if isinstance(part, int) else part
                    continue
                if high < low:
                    self.fail("the character range is out of order", at)
                parts.append((low, high))
            elif isinstance(low, int):
                if 0xD800 <= low <= 0xDFFF:
                    self.refuse("a lone surrogate", at)
                parts.append((low, low))
            else:
                parts += low
        chars = charset(parts)
        if "i" in self.flags:
            chars = unicode.with_case_variants(chars)
        return complement(chars) if negative else chars

    def member(self) -> CharSet | int:
        if self.peek("\\"):
            return self.set_escape(inside=True)
        self.at += 1
        return ord(self.text[self.at - 1])


def _repeat(item: Node, low: int, high: int | None) -> Node:
    if high == 0 or item == EPSILON:
        return EPSILON
    if low == high == 1:
        return item
    if isinstance(item, Rep) and low <= 1 and high is None and item.low <= 1 and item.high is None:  # (a+)*, (a*)+, ...
        return Rep(item.item, min(low, item.low), None)
    return Rep(item, low, high)
