"""Named sets of characters: what ``\\d``, ``\\w``, ``\\s``, ``.`` and ``\\p{...}`` mean in either syntax, and case variants.

Python's own classes are asked of ``re``, Unicode properties of the ``regex`` module, so that they are of the Unicode version these
two know. Each is read off once, at first use: one scan over all characters.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
import regex

from radixrt.grammar.regular.charset import LAST, SURROGATES, CharSet, charset, union

DIGIT: CharSet = ((0x30, 0x39),)
WORD: CharSet = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
# ECMA-262 WhiteSpace and LineTerminator: tab to carriage return, Zs, BOM, line and paragraph separator
SPACE: CharSet = charset(
    [
        (code, code)
        for code in (
            0x20,
            0xA0,
            0x1680,
            0x2028,
            0x2029,
            0x202F,
            0x205F,
            0x3000,
            0xFEFF,
            *range(9, 14),
            *range(0x2000, 0x200B),
        )
    ]
)
LINE_ENDS: CharSet = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
NEWLINE: CharSet = ((0x0A, 0x0A),)

# ECMA-262 table "Binary Unicode property aliases": the only names allowed without a value besides general categories
_BINARY = frozenset(
    """ASCII ASCII_Hex_Digit AHex Alphabetic Alpha Any Assigned Bidi_Control Bidi_C Bidi_Mirrored Bidi_M Case_Ignorable CI Cased
    Changes_When_Casefolded CWCF Changes_When_Casemapped CWCM Changes_When_Lowercased CWL Changes_When_NFKC_Casefolded CWKCF
    Changes_When_Titlecased CWT Changes_When_Uppercased CWU Dash Default_Ignorable_Code_Point DI Deprecated Dep Diacritic Dia
    Emoji Emoji_Component EComp Emoji_Modifier EMod Emoji_Modifier_Base EBase Emoji_Presentation EPres Extended_Pictographic
    ExtPict Extender Ext Grapheme_Base Gr_Base Grapheme_Extend Gr_Ext Hex_Digit Hex IDS_Binary_Operator IDSB
    IDS_Trinary_Operator IDST ID_Continue IDC ID_Start IDS Ideographic Ideo Join_Control Join_C Logical_Order_Exception LOE
    Lowercase Lower Math Noncharacter_Code_Point NChar Pattern_Syntax Pat_Syn Pattern_White_Space Pat_WS Quotation_Mark QMark
    Radical Regional_Indicator RI Sentence_Terminal STerm Soft_Dotted SD Terminal_Punctuation Term Unified_Ideograph UIdeo
    Uppercase Upper Variation_Selector VS White_Space space XID_Continue XIDC XID_Start XIDS""".split()
)
_CATEGORIES = frozenset(
    """Cased_Letter LC Close_Punctuation Pe Connector_Punctuation Pc Control Cc cntrl Currency_Symbol Sc Dash_Punctuation Pd
    Decimal_Number Nd digit Enclosing_Mark Me Final_Punctuation Pf Format Cf Initial_Punctuation Pi Letter L Letter_Number Nl
    Line_Separator Zl Lowercase_Letter Ll Mark M Combining_Mark Math_Symbol Sm Modifier_Letter Lm Modifier_Symbol Sk
    Nonspacing_Mark Mn Number N Open_Punctuation Ps Other C Other_Letter Lo Other_Number No Other_Punctuation Po Other_Symbol So
    Paragraph_Separator Zp Private_Use Co Punctuation P punct Separator Z Space_Separator Zs Spacing_Mark Mc Surrogate Cs
    Symbol S Titlecase_Letter Lt Unassigned Cn Uppercase_Letter Lu""".split()
)
_KEYS = {
    "General_Category": "gc",
    "gc": "gc",
    "Script": "sc",
    "sc": "sc",
    "Script_Extensions": "scx",
    "scx": "scx",
}


@lru_cache(maxsize=1)
def _alphabet() -> str:
    """Every scalar value in order, with NUL where the surrogates would stand."""
    codes = np.arange(LAST + 1, dtype="<u4")
    codes[SURROGATES[0] : SURROGATES[1] + 1] = 0
    return codes.tobytes().decode("utf-32-le")


def _scan(pattern: re.Pattern[str] | regex.Pattern[str]) -> CharSet:
    return charset((m.start(), m.end() - 1) for m in pattern.finditer(_alphabet()))


@lru_cache(maxsize=8)
def python_class(letter: str) -> CharSet:
    """``d``, ``w`` or ``s`` as ``re`` reads them in a ``str`` pattern."""
    return _scan(re.compile(rf"\{letter}+"))


@lru_cache(maxsize=256)
def unicode_property(text: str) -> CharSet | None:
    """The set of ``\\p{text}``: a general category, a binary property, or ``key=value``; ``None``: there is none of that name."""
    key, has_value, value = text.partition("=")
    if has_value:
        if key not in _KEYS or not re.fullmatch(r"[A-Za-z0-9_]+", value) or not value[0].isupper():
            return None
        if _KEYS[key] == "gc" and value not in _CATEGORIES:
            return None
        name = f"{_KEYS[key]}={value}"
    elif text in _CATEGORIES:
        name = f"gc={text}"
    elif text in _BINARY:
        name = text
    else:
        return None
    try:
        compiled = regex.compile(rf"\p{{{name}}}+")
    except regex.error:
        return None
    return _scan(compiled)


@lru_cache(maxsize=1)
def _case_orbits() -> dict[int, tuple[int, ...]]:
    """For each cased character all characters ``re.IGNORECASE`` takes for it, itself included."""
    cased = [chr(code) for low, high in _scan(regex.compile(r"\p{CWCM}+")) for code in range(low, high + 1)]
    parent: dict[str, str] = {}

    def root(c: str) -> str:
        while parent.setdefault(c, c) != c:
            c = parent[c]
        return c

    for c in cased:
        for other in {c.lower(), c.upper(), c.title(), c.upper().lower()}:
            if len(other) == 1 and other != c and re.fullmatch(re.escape(c), other, re.IGNORECASE):
                parent[root(other)] = root(c)
    for a, b in (("i", "\u0131"), ("i", "\u0130"), ("s", "\u017f"), ("\u03b9", "\u0345"), ("\ufb05", "\ufb06")):
        if re.fullmatch(a, b, re.IGNORECASE):
            parent[root(b)] = root(a)
    groups: dict[str, list[int]] = {}
    for c in list(parent):
        groups.setdefault(root(c), []).append(ord(c))
    return {code: tuple(group) for group in groups.values() if len(group) > 1 for code in group}


def with_case_variants(chars: CharSet) -> CharSet:
    """The set with every case variant of its members, as ``re.IGNORECASE`` compares."""
    if all(high < 0x41 for _, high in chars):
        return chars
    extra = []
    for code, group in _case_orbits().items():
        if any(low <= code <= high for low, high in chars):
            extra += [(other, other) for other in group]
    return union(chars, tuple(extra))
