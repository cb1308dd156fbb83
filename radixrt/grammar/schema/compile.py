"""``compile_schema``: a JSON Schema becomes the grammar of exactly the JSON texts it accepts, or an error that says why not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixrt.errors import InvalidRequest, nearest
from radixrt.grammar import ir
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.schema.drafts import draft_named
from radixrt.grammar.schema.emit import Emitter
from radixrt.grammar.schema.limits import Clock, SchemaLimits
from radixrt.grammar.schema.load import Documents, parse_text
from radixrt.grammar.schema.normalize import FORMATS, Normalizer
from radixrt.grammar.schema.prune import pruned

_WHITESPACE = ("compact", "flexible")
_KEY_ORDER = ("declared", "any")


def compile_schema(
    schema: dict[str, Any] | bool | str,
    *,
    registry: Mapping[str, object] | None = None,
    draft: str | None = None,
    whitespace: str = "compact",
    key_order: str = "declared",
    formats: str = "assert",
    limits: SchemaLimits | None = None,
) -> ir.Grammar:
    """The grammar of the JSON texts whose values a schema accepts.

    Args:
        schema: a schema, or its JSON text.
        registry: further schemas by URI, for ``$ref``. Nothing is ever fetched.
        draft: ``4``, ``6``, ``7``, ``2019-09`` or ``2020-12`` for schemas that do not name theirs with ``$schema``. By default
            such a schema is read as 2020-12, with the keywords of older drafts understood too.
        whitespace: ``compact`` (none between tokens), or ``flexible`` (after a comma or colon one space, or a line break with
            an indent where serializers put it; each may be left out).
        key_order: ``declared`` (keys in the order the schema names them, then others), or ``any`` (up to a limit of keys).
        formats: ``assert`` (known formats are enforced by their RFCs, unknown ones are annotations), ``annotation`` (none is
            enforced) or ``strict`` (unknown ones are errors).
        limits: what the compilation may cost.

    Raises:
        InvalidRequest: the schema is invalid, or accepts nothing.
        UnsupportedConstraint: the schema cannot be enforced exactly; ``field`` is the JSON pointer and names the keyword.
    """
    for field, value, valid in (
        ("whitespace", whitespace, _WHITESPACE),
        ("key_order", key_order, _KEY_ORDER),
        ("formats", formats, FORMATS),
    ):
        if value not in valid:
            raise InvalidRequest(field, f"={value!r}{nearest(str(value), valid)}")
    limits = limits or SchemaLimits()
    clock = Clock(limits)
    parsed = parse_text(schema, limits) if isinstance(schema, str) else schema
    if not isinstance(parsed, dict | bool):
        raise InvalidRequest("json_schema", f"is a {type(parsed).__name__}, not an object or a boolean")
    try:
        documents = Documents(parsed, registry, None if draft is None else draft_named(draft), limits)
        normalizer = Normalizer(documents, clock, formats)
        emitter = Emitter(normalizer, flexible=whitespace == "flexible", any_order=key_order == "any")
        written = emitter.grammar(normalizer.root())
        grammar = pruned(written, emitter.clean)
    except InvalidRequest as error:
        if "#" in error.field or error.field in ("json_schema", "draft"):
            raise
        raise type(error)(clock.pointer, str(error)) from None
    except RecursionError:
        raise UnsupportedConstraint(clock.pointer, "the schema nests its conditions too deeply") from None
    if grammar is None:
        raise InvalidRequest("json_schema", "accepts nothing: no value satisfies the schema")
    return grammar
