"""Runs compiled schemas on texts, byte by byte."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np

from radixrt.grammar.matcher import CompiledConstraint, compile_grammar
from radixrt.grammar.schema import compile_schema
from radixrt.grammar.vocabulary import Vocabulary


@cache
def bytes_vocabulary() -> Vocabulary:
    """A token for each byte."""
    return Vocabulary.of([bytes((byte,)) for byte in range(256)])


def matcher_of(schema: Any, **options: Any) -> CompiledConstraint:
    """The schema's automaton over bytes."""
    return compile_grammar(compile_schema(schema, **options), None, vocabulary=bytes_vocabulary())


def accepts(compiled: CompiledConstraint, text: str) -> bool:
    """Whether the text is in the language."""
    return compiled.accepts(text.encode())


def sample(compiled: CompiledConstraint, random_: random.Random, length: int) -> str:
    """A random text of the language: random allowed bytes, then the shortest way to an end."""
    matcher = compiled.matcher()
    mask = np.zeros((1, 8), dtype=np.int32)
    written = bytearray()
    while len(written) < length:
        if matcher.can_end and random_.random() < 0.2:
            return written.decode()
        matcher.fill_mask(mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed):
            break
        plain = [byte for byte in allowed if byte < 0x7F and byte != 0x5C]
        byte = int(random_.choice(plain if plain and random_.random() < 0.9 else list(allowed)))
        assert matcher.accept(byte)
        written.append(byte)
    return (written + matcher.shortest_completion()).decode()
