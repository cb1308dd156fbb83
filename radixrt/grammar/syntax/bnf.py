"""GBNF (llama.cpp) and EBNF texts become rules.

Invariant: a rule ends where the next ``name ::=`` begins or the text ends; line breaks mean nothing else. In both, strings and
classes have C-like escapes; the W3C form adds ``#x20`` characters, ``'strings'`` and ``/* comments */``.
"""

from __future__ import annotations

import re

from radixrt.errors import nearest
from radixrt.grammar import ir
from radixrt.grammar.syntax.source import Source, SyntaxLimits, char_set, check_names, finish, scalar, string_escape

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_HEX = re.compile(r"#x([0-9A-Fa-f]{1,8})")
_COUNTS = re.compile(r"\{\s*(\d{1,12})\s*(?:(,)\s*(\d{1,12})?\s*)?\}")
_SPACE = re.compile(r"[ \t\r\n]+")
_LINE_COMMENT = re.compile(r"#[^\n]*")
_BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "'": "'", "[": "[", "]": "]", "-": "-", "^": "^"} | {
    c: chr(code) for c, code in (("a", 7), ("b", 8), ("f", 12), ("v", 11), ("0", 0), ("/", 47), ("?", 63))
}
_HEXES = {"x": 2, "u": 4, "U": 8}


def parse_bnf(text: str, limits: SyntaxLimits, *, w3c: bool) -> ir.Grammar:
    """The grammar of a text. Errors: see ``parse_grammar``."""
    return _Parser(Source(text, limits), w3c).parse()


class _Parser:
    def __init__(self, source: Source, w3c: bool) -> None:
        self.source, self.w3c = source, w3c
        self.rules: dict[str, ir.Expr] = {}
        self.used: dict[str, int] = {}

    def parse(self) -> ir.Grammar:
        source = self.source
        self.space()
        while not source.done:
            at = source.at
            name = self.head()
            if name is None:
                raise source.error(f"a rule, name ::= ..., should begin here, not {source.found()}")
            if name in self.rules:
                raise source.error(f"the rule {name!r} is defined twice", at)
            if len(self.rules) >= source.limits.rules:
                raise source.unsupported(f"the grammar has more than {source.limits.rules:,} rules", at)
            self.rules[name] = self.alternatives()
        if not self.rules:
            raise source.error("the grammar has no rules")
        start = "root"
        if start not in self.rules:
            if not self.w3c:
                raise source.error(
                    f"there is no rule called 'root', where a grammar starts{nearest(start, self.rules)}"
                )
            start = next(iter(self.rules))
        check_names(source, self.used, self.rules)
        return finish(self.rules, start)

    def space(self) -> None:
        """Step over white space and comments."""
        source = self.source
        while True:
            if source.match(_SPACE):
                continue
            if source.peek("#") and not (self.w3c and _HEX.match(source.text, source.at)):
                source.match(_LINE_COMMENT)
            elif self.w3c and source.peek("/*"):
                at = source.at
                if not source.match(_BLOCK_COMMENT):
                    raise source.error("this comment has no end", at)
            else:
                return

    def head(self) -> str | None:
        """Step over ``name ::=`` if it is here."""
        source, at = self.source, self.source.at
        name = source.match(_NAME)
        if name:
            self.space()
            if source.take("::="):
                self.space()
                return name[0]
        source.at = at
        return None

    def at_head(self) -> bool:
        at = self.source.at
        found = self.head() is not None
        self.source.at = at
        return found

    def alternatives(self) -> ir.Expr:
        with self.source.deeper():
            items = [self.sequence()]
            while self.source.take("|"):
                self.space()
                items.append(self.sequence())
        return items[0] if len(items) == 1 else ir.Alt(tuple(items))

    def sequence(self) -> ir.Expr:
        source = self.source
        items: list[ir.Expr] = []
        while not source.done and not source.peek("|") and not source.peek(")") and not self.at_head():
            if source.peek("-"):
                raise source.unsupported("A - B (anything of A but B) is not supported; write out what is left")
            items.append(self.repeated(self.term()))
        return items[0] if len(items) == 1 else ir.Seq(tuple(items))

    def repeated(self, item: ir.Expr) -> ir.Expr:
        """``item`` with the operators that follow it."""
        source = self.source
        while True:
            self.space()
            if source.take("*"):
                item = ir.Repeat(item, 0, None)
            elif source.take("+"):
                item = ir.Repeat(item, 1, None)
            elif source.take("?"):
                item = ir.Repeat(item, 0, 1)
            elif source.peek("{"):
                at = source.at
                counts = source.match(_COUNTS)
                if not counts:
                    raise source.error("counts are written {m}, {m,} or {m,n}", at)
                low = int(counts[1])
                high = low if not counts[2] else int(counts[3]) if counts[3] else None
                item = source.repeat(item, low, high, at)
            else:
                return item

    def term(self) -> ir.Expr:
        source, at = self.source, self.source.at
        source.count_term()
        if source.take('"') or (self.w3c and source.take("'")):
            return self.string(source.text[at], at)
        if source.take("["):
            return self.char_class(at)
        if source.take("."):
            return char_set((), negated=True)
        if source.peek("(="):
            raise source.unsupported("(= ...) is a look-ahead, which is not supported")
        if source.take("("):
            self.space()
            inner = self.alternatives()
            if not source.take(")"):
                raise source.error(f"a ')' is missing for the '(' of {source.place(at)}, before {source.found()}")
            return inner
        if self.w3c:
            code = source.match(_HEX)
            if code:
                return ir.Bytes(scalar(source, int(code[1], 16), at).encode())
        name = source.match(_NAME)
        if name:
            if source.peek("("):
                raise source.unsupported(f"{name[0]}(...) is an extension that is not supported", at)
            self.used.setdefault(name[0], at)
            return ir.Ref(name[0])
        if source.peek("<") or source.peek("!"):
            raise source.unsupported(
                "tokens in a grammar (<name>, <[id]>, !) are not supported; write their text in quotes"
            )
        if not self.w3c and source.peek("'"):
            raise source.error("strings are written in double quotes")
        raise source.error(f"a string, a class, a rule or a group should be here, not {source.found()}")

    def string(self, quote: str, at: int) -> ir.Expr:
        source, out = self.source, list[str]()
        while True:
            if source.done or source.peek("\n"):
                raise source.error("this string has no end on its line; a line break inside is written \\n", at)
            place, char = source.at, source.text[source.at]
            source.at += 1
            if char == quote:
                return ir.Bytes("".join(out).encode())
            out.append(string_escape(source, _ESCAPES, _HEXES, place) if char == "\\" else char)

    def char_class(self, at: int) -> ir.Expr:
        source = self.source
        negated = source.take("^")
        ranges: list[tuple[int, int]] = []
        while not source.take("]"):
            if source.done:
                raise source.error("this class has no ']'", at)
            place = source.at
            low = high = self.class_char()
            if source.peek("-") and not source.peek("-]"):
                source.at += 1
                if source.done:
                    raise source.error("this class has no ']'", at)
                high = self.class_char()
                if high < low:
                    raise source.error(f"the range {source.text[place : source.at]} runs backwards", place)
            ranges.append((low, high))
        if not ranges and not negated:
            raise source.error("an empty class [] matches nothing", at)
        return char_set(ranges, negated=negated)

    def class_char(self) -> int:
        source, at = self.source, self.source.at
        if self.w3c:
            code = source.match(_HEX)
            if code:
                return ord(scalar(source, int(code[1], 16), at))
        source.at += 1
        char = source.text[at]
        return ord(string_escape(source, _ESCAPES, _HEXES, at) if char == "\\" else char)
