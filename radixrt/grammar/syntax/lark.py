"""Lark grammars become rules.

Invariants: a terminal is its regular language, inlined by reference, and never recursive; with ``%ignore``, every terminal that
stands in a rule is preceded by any number of ignored texts, and so is the end of the output. A definition ends where a line
begins with the next one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from radixrt.errors import InvalidRequest, nearest
from radixrt.grammar import ir
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.regular import regex_to_ir
from radixrt.grammar.syntax.source import FIELD, Source, SyntaxLimits, char_set, check_names, finish, scalar

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DEFINITION = re.compile(r"([?!]*)(_*[A-Za-z][A-Za-z0-9_]*)[ \t]*(\{[^}\n]*\})?[ \t]*(\.[ \t]*[+-]?\d+)?[ \t]*:(?!:=)")
_SPACE = re.compile(r"(?:[ \t\f]+|//[^\n]*|#[^\n]*)+")
_LINES = re.compile(r"(?:[ \t\f\r\n]+|//[^\n]*|#[^\n]*)+")
_STRING = re.compile(r'"((?:[^"\\\n]|\\[^\n])*)"(i?)(?![A-Za-z0-9_])')
_REGEX = re.compile(r"/(?!/)((?:[^/\\]|\\.)*)/([a-z]*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(x(?:[0-9A-Fa-f]{2})?|u(?:[0-9A-Fa-f]{4})?|U(?:[0-9A-Fa-f]{8})?|.)")
_COUNTS = re.compile(r"~[ \t]*(-?\d{1,12})(?:[ \t]*\.\.[ \t]*(-?\d{1,12}))?")
_RANGE = re.compile(r"[ \t]*\.\.[ \t]*")
_ALIAS = re.compile(r"->[ \t]*_*[A-Za-z][A-Za-z0-9_]*")
_IMPORT = re.compile(r"%import[ \t]+(\.?[\w.]+)[ \t]*(\([^)]*\))?(?:[ \t]*->[ \t]*(\w+))?")
_SHORT_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "\\": "\\", '"': '"'}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_IGNORE = "%ignore"

# The terminals of lark's module ``common``, by the regexes of their languages.
COMMON: dict[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "_EXP": "[eE][+-]?[0-9]+",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "SIGNED_FLOAT": r"[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*(?:[^*]|\*+[^*/])*\*+/",
    "SQL_COMMENT": r"--[^\n]*",
}


def parse_lark(text: str, limits: SyntaxLimits) -> ir.Grammar:
    """The grammar of a text, from ``start``. Errors: see ``parse_grammar``."""
    return _Parser(Source(text, limits)).parse()


@dataclass
class _Definition:
    """A rule or terminal: where it stands, what it uses and where, and its expression."""

    at: int
    terminal: bool
    uses: dict[str, int]
    expr: ir.Expr = ir.NOTHING


class _Parser:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.defined: dict[str, _Definition] = {}
        self.ignored: list[ir.Expr] = []
        self.now = _Definition(0, True, {})  # what is being read
        self.ignores = re.search(r"^[ \t]*%ignore\b", source.text, re.MULTILINE) is not None

    def parse(self) -> ir.Grammar:
        source = self.source
        self.next_line()
        while not source.done:
            if source.peek("%"):
                self.directive()
            else:
                self.definition()
            self.next_line()
        if not self.defined:
            raise source.error("the grammar has no rules")
        if "start" not in self.defined:
            known = [name for name, d in self.defined.items() if not d.terminal]
            raise source.error(f"there is no rule called 'start', where a grammar starts{nearest('start', known)}")
        for definition in self.defined.values():
            check_names(source, definition.uses, self.defined)
            for name, at in definition.uses.items():
                if definition.terminal and not self.defined[name].terminal:
                    raise source.error(f"a terminal cannot use the rule {name!r}; terminals use terminals only", at)
        self.check_terminals()
        rules = {name: definition.expr for name, definition in self.defined.items()}
        if self.ignores:
            rules[_IGNORE] = ir.Repeat(ir.Alt(tuple(self.ignored)), 0, None)
            rules["%start"] = ir.Seq((ir.Ref("start"), ir.Ref(_IGNORE)))
            return finish(rules, "%start")
        return finish(rules, "start")

    def check_terminals(self) -> None:
        """No terminal uses itself."""
        done: set[str] = set()
        for root in self.defined:
            path: dict[str, None] = {}
            stack = [(root, False)]
            while stack:
                name, leaving = stack.pop()
                if leaving:
                    del path[name]
                    done.add(name)
                elif name in path:
                    cycle = [*list(path)[list(path).index(name) :], name]
                    raise self.source.error(
                        f"the terminal {name!r} uses itself ({' -> '.join(cycle)}); only rules may",
                        self.defined[name].at,
                    )
                elif name not in done and self.defined[name].terminal:
                    path[name] = None
                    stack.append((name, True))
                    stack += [(use, False) for use in self.defined[name].uses]

    # -- statements

    def next_line(self) -> None:
        self.source.match(_LINES)

    def define(self, name: str, definition: _Definition) -> None:
        source = self.source
        if name in self.defined:
            kind = "terminal" if definition.terminal else "rule"
            raise source.error(f"the {kind} {name!r} is defined twice", definition.at)
        if len(self.defined) >= source.limits.rules:
            raise source.unsupported(f"the grammar has more than {source.limits.rules:,} rules", definition.at)
        self.defined[name] = definition

    def definition(self) -> None:
        source, at = self.source, self.source.at
        head = source.match(_DEFINITION)
        if head is None:
            word = _NAME.match(source.text, at)
            if word and source.text.startswith("[", word.end()):
                raise source.unsupported(f"attributes of the rule {word[0]!r} in [...] are not supported", at)
            other = "; '::=' is gbnf or ebnf, not lark" if re.match(r"[\w-]+\s*::=", source.text[at : at + 200]) else ""
            raise source.error(f"a definition, name: ..., should begin here, not {source.found()}{other}", at)
        modifiers, name, parameters, _ = head.groups()
        if parameters:
            raise source.unsupported(f"the template {name}{parameters} is not supported; write a rule for each use", at)
        if name != name.lower() and name != name.upper():
            raise source.error(f"{name!r} must be all lower case (a rule) or all upper case (a terminal)", at)
        terminal = name == name.upper()
        if terminal and modifiers:
            raise source.error(f"{modifiers!r} before the terminal {name!r}: only rules have such marks", at)
        self.now = _Definition(at, terminal, {})
        self.define(name, self.now)
        self.now.expr = self.alternatives(0)
        if not self.line_ends():
            raise source.error(f"unexpected {source.found()} in {name!r}")

    def directive(self) -> None:
        source, at = self.source, self.source.at
        word = re.compile(r"%\w*").match(source.text, at)
        assert word is not None
        if word[0] == "%ignore":
            source.at = word.end()
            self.now = _Definition(at, True, {})
            self.ignored.append(self.alternatives(0))
            if self.ignored[-1] == ir.EMPTY:
                raise source.error("%ignore needs a terminal", at)
            self.define(f"{_IGNORE} {len(self.ignored)}", self.now)  # for the checks of what it uses
            if not self.line_ends():
                raise source.error(f"unexpected {source.found()} in %ignore")
        elif word[0] == "%import":
            self.imports()
        elif word[0] in ("%declare", "%override", "%extend"):
            raise source.unsupported(f"{word[0]} is not supported", at)
        else:
            valid = ("%ignore", "%import", "%declare", "%override", "%extend")
            raise source.unsupported(f"{word[0]} is not supported{nearest(word[0], valid)}", at)

    def imports(self) -> None:
        source, at = self.source, self.source.at
        match = source.match(_IMPORT)
        if match is None:
            raise source.error("imports are written %import common.NAME, with -> OTHER or (A, B) after it", at)
        path, several, alias = match.groups()
        module, _, name = path.rpartition(".") if several is None else (path, "", "")
        if module != "common":
            raise source.unsupported(f"%import {path}: only the module 'common' can be imported", at)
        names = [name] if several is None else [n.strip() for n in several[1:-1].split(",")]
        for name in names:
            if name not in COMMON:
                raise source.error(f"common has no terminal {name!r}{nearest(name, COMMON)}", at)
            own = alias or name
            if own in self.defined and self.defined[own].expr == regex_to_ir(COMMON[name], syntax="python"):
                continue  # imported twice
            self.define(
                own, _Definition(at, own == own.upper(), {}, self.leaf(regex_to_ir(COMMON[name]), own == own.upper()))
            )

    def line_ends(self) -> bool:
        self.source.match(_SPACE)
        return self.source.done or self.source.text[self.source.at] in "\r\n"

    # -- expressions

    def space(self) -> None:
        """Step over white space; also over line breaks, unless the next definition or statement follows them."""
        source = self.source
        source.match(_SPACE)
        if source.peek("\n") or source.peek("\r"):
            at = source.at
            source.match(_LINES)
            if source.done or source.peek("%") or _DEFINITION.match(source.text, source.at):
                source.at = at

    def alternatives(self, closing: int) -> ir.Expr:
        with self.source.deeper():
            items = [self.sequence(closing)]
            while self.source.take("|"):
                items.append(self.sequence(closing))
        return items[0] if len(items) == 1 else ir.Alt(tuple(items))

    def sequence(self, closing: int) -> ir.Expr:
        source = self.source
        items: list[ir.Expr] = []
        self.space()
        while not source.done and source.text[source.at] not in "|)]\r\n":
            if source.peek("->"):
                if closing or self.now.terminal:
                    raise source.error("an alias (->) may only stand at the end of an alternative of a rule")
                if not source.match(_ALIAS):
                    raise source.error("a name should follow ->")
                self.space()
                if not source.done and source.text[source.at] not in "|\r\n":
                    raise source.error(f"an alternative ends with its alias, but {source.found()} follows")
                break
            items.append(self.repeated(self.term()))
            self.space()
        return items[0] if len(items) == 1 else ir.Seq(tuple(items))

    def repeated(self, item: ir.Expr) -> ir.Expr:
        source = self.source
        source.match(_SPACE)
        at = source.at
        if source.take("*"):
            return ir.Repeat(item, 0, None)
        if source.take("+"):
            return ir.Repeat(item, 1, None)
        if source.take("?"):
            return ir.Repeat(item, 0, 1)
        if source.peek("~"):
            counts = source.match(_COUNTS)
            if counts is None:
                raise source.error("counts are written ~n or ~n..m", at)
            low = int(counts[1])
            high = int(counts[2]) if counts[2] else low
            if low < 0:
                raise source.error(f"~{low}: a count cannot be negative", at)
            return source.repeat(item, low, high, at)
        return item

    def leaf(self, expr: ir.Expr, terminal: bool | None = None) -> ir.Expr:
        """A terminal's text where it stands: in a rule, ignored texts may precede it."""
        if self.ignores and not (self.now.terminal if terminal is None else terminal):
            return ir.Seq((ir.Ref(_IGNORE), expr))
        return expr

    def term(self) -> ir.Expr:
        source, at = self.source, self.source.at
        source.count_term()
        for opening, closing in (("(", ")"), ("[", "]")):
            if source.take(opening):
                inner = self.alternatives(1)
                if not source.take(closing):
                    raise source.error(
                        f"a {closing!r} is missing for the {opening!r} of {source.place(at)}, before {source.found()}"
                    )
                return ir.Repeat(inner, 0, 1) if opening == "[" else inner
        if source.peek('"'):
            return self.leaf(self.string())
        if source.peek("/"):
            return self.leaf(self.regex())
        name = source.match(_NAME)
        if name:
            if source.peek("{"):
                raise source.unsupported(
                    f"the template {name[0]}{{...}} is not supported; write a rule for each use", at
                )
            if name[0] != name[0].lower() and name[0] != name[0].upper():
                raise source.error(f"{name[0]!r} must be all lower case (a rule) or all upper case (a terminal)", at)
            self.now.uses.setdefault(name[0], at)
            return self.leaf(ir.Ref(name[0])) if name[0] == name[0].upper() else ir.Ref(name[0])
        if source.peek("%"):
            raise source.unsupported(f"{source.text[at : at + 12].split()[0]} inside a rule is not supported", at)
        if source.peek("<"):
            raise source.unsupported(
                "tokens in a grammar (<name>, <[id]>) are not supported; write their text in quotes"
            )
        raise source.error(f"a name, a string, a regex or a group should be here, not {source.found()}")

    def string(self) -> ir.Expr:
        """A string, perhaps without case, or the range of two."""
        source, at = self.source, self.source.at
        first, fold = self.quoted()
        if not _RANGE.match(source.text, source.at) or fold:
            return self.regex_ir(f"(?i:{re.escape(first)})", at) if fold else ir.Bytes(first.encode())
        source.match(_RANGE)
        if not source.peek('"'):
            raise source.error(f"a range has a string on both sides, not {source.found()}")
        last, fold = self.quoted()
        if len(first) != 1 or len(last) != 1 or fold:
            raise source.error(f"a range is of one character each, not {first!r} and {last!r}", at)
        if last < first:
            raise source.error(f'the range "{first}".."{last}" runs backwards', at)
        return char_set([(ord(first), ord(last))])

    def quoted(self) -> tuple[str, bool]:
        """The text of a string, and whether its case does not matter. An escape lark does not know keeps its backslash."""
        source, at = self.source, self.source.at
        match = source.match(_STRING)
        if match is None:
            if re.compile(r'"(?:[^"\\\n]|\\[^\n])*"').match(source.text, at):
                raise source.error("after a string only the flag i may stand", at)
            raise source.error("this string has no end on its line", at)
        body, flag = match.groups()

        def character(escape: re.Match[str]) -> str:
            kind, digits = escape[1][0], escape[1][1:]
            if kind not in _HEX_ESCAPES:
                return _SHORT_ESCAPES.get(kind, f"\\{kind}")
            place = at + 1 + escape.start()
            if not digits:
                raise source.error(f"\\{kind} needs {_HEX_ESCAPES[kind]} hexadecimal digits", place)
            return scalar(source, int(digits, 16), place)

        return _ESCAPE.sub(character, body), bool(flag)

    def regex(self) -> ir.Expr:
        source, at = self.source, self.source.at
        match = source.match(_REGEX)
        if match is None:
            raise source.error("this regex has no closing /", at)
        body, flags = match.groups()
        for flag in flags:
            if flag not in "imsxul":
                raise source.error(f"unknown regex flag {flag!r}; known are i m s x u", at)
        if "l" in flags:
            raise source.unsupported("the regex flag 'l' (locale) is not supported", at)
        if "\n" in body and "x" not in flags:
            raise source.error("a regex may span lines only with the flag x", at)
        inline = "".join(sorted(set(flags) - {"u"}))
        pattern = re.sub(r"\\(.)", lambda m: "/" if m[1] == "/" else m[0], body, flags=re.DOTALL)
        return self.regex_ir(
            f"(?{inline}:{pattern}\n)" if "x" in inline else f"(?{inline}:{pattern})" if inline else pattern, at
        )

    def regex_ir(self, pattern: str, at: int) -> ir.Expr:
        """The language of a regex, its errors with the place in the grammar."""
        try:
            return regex_to_ir(pattern, syntax="python", anchored=True)
        except UnsupportedConstraint as error:
            raise UnsupportedConstraint(FIELD, f"{self.source.place(at)}: {error}") from None
        except InvalidRequest as error:
            raise InvalidRequest(FIELD, f"{self.source.place(at)}: {error}") from None
