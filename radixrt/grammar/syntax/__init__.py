"""Grammar syntaxes: lark, gbnf and ebnf texts become rules over bytes.

What is accepted is the context-free language that the text describes, in UTF-8. There is no lexer: where lark first cuts a text into
terminals, each as long as it can be, here a terminal stands for every string it matches. Priorities and aliases, which choose
between readings of the same text, therefore change nothing; a lazy ``*?`` is the same language as ``*``; and a keyword is
also an identifier if the identifier's pattern matches it.

- **lark**: rules and terminals (start ``start``), strings and regexes with flags, ``"a".."z"``, ``? * + ~n ~n..m``, groups,
  ``[optional]``, ``|``, ``->`` aliases, priorities, ``%import common.X``, ``%ignore`` (the ignored text may stand before every
  terminal of a rule and at the end). Refused by name: templates, ``%declare``, ``%override``, ``%extend``, other imports.
- **gbnf** (llama.cpp): ``root ::= ...``, quoted strings and character classes with their escapes, ``.``, ``* + ? {m} {m,} {m,n}``.
- **ebnf**: the same, and what W3C grammars use: single quotes, ``#x20``, ``/* ... */``; it starts at ``root``, or at the first
  rule if there is none. Refused by name: ``A - B``, look-ahead assertions, token and tag extensions.

Left recursion is rewritten by ``radixrt.grammar.syntax.left_recursion``; rules that nothing uses are checked and left out.
"""

from __future__ import annotations

from radixrt.grammar.ir import Grammar
from radixrt.grammar.syntax.source import SyntaxLimits

__all__ = ["SyntaxLimits", "parse_grammar"]


def parse_grammar(text: str, syntax: str, *, limits: SyntaxLimits | None = None) -> Grammar:
    """The grammar that ``text`` describes.

    Raises:
        InvalidRequest: a syntax error (with line and column), an unknown rule (with the nearest name), no start rule.
        UnsupportedConstraint: a feature that cannot be exact here, by name, or a grammar beyond the limits.
    """
    limits = limits or SyntaxLimits()
    if syntax == "lark":
        from radixrt.grammar.syntax.lark import parse_lark

        return parse_lark(text, limits)
    from radixrt.grammar.syntax.bnf import parse_bnf

    return parse_bnf(text, limits, w3c=syntax == "ebnf")
