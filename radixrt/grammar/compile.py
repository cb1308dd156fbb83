"""From what a user asked to the one grammar of the whole output, and from there to the automaton of one vocabulary.

Invariant: the grammar accepts exactly the constraint's outputs, or an ``UnsupportedConstraint`` names what cannot be exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from radixrt.errors import InvalidRequest
from radixrt.grammar import constraint as asked
from radixrt.grammar import ir
from radixrt.grammar.constraint import Constraint
from radixrt.grammar.vocabulary import MARKERS, vocabulary_of

if TYPE_CHECKING:
    from radixrt.grammar.matcher import CompiledConstraint, Engine
    from radixrt.model.tokenizer import Tokenizer


def compile_constraint(constraint: Constraint, tokenizer: Tokenizer, backend: str = "auto") -> CompiledConstraint:
    """The automaton of a constraint for a vocabulary, run by ``backend``. Errors are those of ``Constraint.compile``."""
    from radixrt.grammar.matcher import compile_grammar

    vocabulary = vocabulary_of(
        tokenizer, markers=any(marker in text for text in _written(constraint) for marker in MARKERS)
    )
    return compile_grammar(to_grammar(constraint), tokenizer, vocabulary=vocabulary, engine=cast("Engine", backend))


def _written(constraint: Constraint) -> Iterator[str]:
    """What a constraint has the output hold word for word: its literals, and what begins and ends its tags."""
    match constraint.spec:
        case asked.LiteralText(text):
            yield text
        case asked.Sequence(parts) | asked.Alternatives(parts):
            for part in dict.fromkeys(parts):
                yield from _written(part)
        case asked.StructuralTags():
            yield from constraint.spec.triggers
            for tag in constraint.spec.tags:
                yield from (tag.begin, tag.end)
                yield from _written(tag.constraint)


def to_grammar(constraint: Constraint) -> ir.Grammar:
    """The bytes that a constraint allows.

    Raises:
        InvalidRequest: a syntax error, or a constraint that no output can meet.
        UnsupportedConstraint: a constraint that cannot be enforced exactly.
    """
    try:
        return _grammar(constraint)
    except RecursionError:
        raise InvalidRequest("constraint", "is nested too deeply") from None


def _grammar(constraint: Constraint) -> ir.Grammar:
    match constraint.spec:
        case asked.Regex(pattern):
            from radixrt.grammar.regular import regex_to_ir

            return ir.Grammar({"start": regex_to_ir(pattern, syntax="python", anchored=True)})
        case asked.JsonSchema():
            return _schema(constraint.spec)
        case asked.JsonObject(whitespace):
            return _schema(asked.JsonSchema('{"type":"object"}', whitespace))
        case asked.Choice(choices):
            from radixrt.grammar.choices import choices_to_ir

            return choices_to_ir(choices)
        case asked.GrammarText(text, syntax):
            from radixrt.grammar.syntax import parse_grammar

            return parse_grammar(text, syntax)
        case asked.LiteralText(text):
            return ir.Grammar({"start": ir.Bytes(text.encode())})
        case asked.Substring(text, unit, max_length, empty):
            from radixrt.grammar.substring import substring_to_ir

            return substring_to_ir(text, unit, max_length, empty)
        case asked.Sequence(parts):
            union = _Union()
            return union.grammar(ir.Seq(tuple(union.add(part) for part in parts)))
        case asked.Alternatives(parts):
            union = _Union()
            return union.grammar(ir.Alt(tuple(union.add(part) for part in dict.fromkeys(parts))))
        case asked.StructuralTags():
            from radixrt.grammar.tags import tags_to_ir

            union, spec = _Union(), constraint.spec
            tagged = tags_to_ir(
                [(tag.begin, union.add(tag.constraint).name, tag.end) for tag in spec.tags],
                spec.triggers,
                at_least_one=spec.at_least_one,
                stop_after_first=spec.stop_after_first,
            )
            return ir.Grammar({**union.rules, **tagged.rules}, tagged.start)


def _schema(spec: asked.JsonSchema) -> ir.Grammar:
    from radixrt.grammar.json_text import read_json
    from radixrt.grammar.schema import compile_schema

    limits = asked.DEFAULT_LIMITS
    return compile_schema(
        spec.schema,
        registry={
            uri: read_json(f"registry[{uri!r}]", text, max_bytes=len(text), max_nesting=limits.nesting)
            for uri, text in spec.registry
        },
        whitespace=spec.whitespace,
        key_order=spec.key_order,
        formats="strict" if spec.strict_formats else "assert",
    )


class _Union:
    """Rules of several grammars side by side: those of part ``i`` are named ``i/...``; equal parts share theirs."""

    def __init__(self) -> None:
        self.rules: dict[str, ir.Expr] = {}
        self._known: dict[Constraint, ir.Ref] = {}

    def add(self, part: Constraint) -> ir.Ref:
        known = self._known.get(part)
        if known is None:
            prefix = f"{len(self._known)}/"
            grammar = _grammar(part)
            done: dict[int, ir.Expr] = {}
            for name, expr in grammar.rules.items():
                self.rules[prefix + name] = _renamed(expr, prefix, done)
            known = self._known[part] = ir.Ref(prefix + grammar.start)
        return known

    def grammar(self, start: ir.Expr) -> ir.Grammar:
        return ir.Grammar({**self.rules, "start": start})


def _renamed(expr: ir.Expr, prefix: str, done: dict[int, ir.Expr]) -> ir.Expr:
    """``expr`` with every reference prefixed; ``done``: shared parts by identity, alive as long as their grammar is."""
    match expr:
        case ir.Ref(name):
            return ir.Ref(prefix + name)
        case ir.Seq(items) | ir.Alt(items):
            known = done.get(id(expr))
            if known is None:
                known = done[id(expr)] = type(expr)(tuple(_renamed(item, prefix, done) for item in items))
            return known
        case ir.Repeat(item, low, high):
            return ir.Repeat(_renamed(item, prefix, done), low, high)
        case _:
            return expr
