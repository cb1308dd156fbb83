"""Regular languages over Unicode code points, and their way into the grammar language as UTF-8 text or JSON strings.

    CharDfa.from_pattern(pattern, syntax="ecma" | "python", anchored=..., limits=...)   a pattern's language, minimal
    CharDfa.literal(s), .literals(words), .anything(), .nothing(), .length(low, high)
    a & b, a | b, a - b, ~a, a.concat(b), a.repeat(low, high), a == b, a <= b, a.disjoint(b)
    a.is_empty, .is_finite, .is_universal, .count, .words(limit), .shortest(), .accepts(text), .states
    a.min_length, .max_length (None: without end)
    to_bytes(dfa) -> ir.Expr                     the text itself, as UTF-8
    to_json(dfa, escapes="any" | "needed")       the inside of a JSON string (no quotes) whose decoded value is in the language
    regex_to_ir(pattern, syntax="python", anchored=True) -> ir.Expr
    json_regex_to_ir(pattern, low=0, high=None, escapes=...) -> ir.Expr     JSON Schema ``pattern`` + minLength / maxLength
    format_dfa(name) -> CharDfa | None           formats.INEXACT: names that have none, formats.KNOWN: those that have;
                                                 formats.SUBSETS: those whose complement is no complement of the format
    numbers.integer_range / number_range / multiple_of -> CharDfa           texts of JSON numbers

Every language is exact or refused: ``UnsupportedConstraint`` names the pattern and the limit or feature; ``InvalidRequest`` names
the pattern and the position of a syntax error. All values are immutable.
"""

from __future__ import annotations

from radixrt.grammar.regular.chardfa import CharDfa
from radixrt.grammar.regular.encode import to_bytes, to_json
from radixrt.grammar.regular.formats import format_dfa
from radixrt.grammar.regular.limits import RegularLimits
from radixrt.grammar.regular.to_ir import json_regex_to_ir, regex_to_ir

__all__ = ["CharDfa", "RegularLimits", "format_dfa", "json_regex_to_ir", "regex_to_ir", "to_bytes", "to_json"]
