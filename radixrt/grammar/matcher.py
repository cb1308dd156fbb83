"""The public face of the automaton: a compiled constraint shared by many sequences, and one matcher for each of them.

Invariants: a mask allows exactly the tokens after which some completion that the vocabulary can spell is left, and end tokens
exactly where the output may end; the plan's length is always an achievable bound, and following the plan lowers it by one a
token. Engines (native, reference) give the same results; which one runs is decided once, when a constraint is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from radixrt.grammar import automaton
from radixrt.grammar.built import native_module
from radixrt.grammar.errors import UnsupportedConstraint
from radixrt.grammar.forced import ForcedTokens
from radixrt.grammar.ir import Grammar
from radixrt.grammar.program import FIELD, ProgramLimits, program
from radixrt.grammar.vocabulary import Vocabulary, vocabulary_of

if TYPE_CHECKING:
    import numpy as np

    from radixrt.model.tokenizer import Tokenizer

Engine = Literal["auto", "native", "reference"]

_FIXED_BYTES = 48 << 10  # of a compiled constraint with its source, automaton and Python objects, as measured


@dataclass(frozen=True)
class AutomatonLimits:
    """Bounds on one constraint. What does not fit is ``UnsupportedConstraint``; caches are dropped and filled anew.

    Fields:
        program: the size of the grammar; max_states: byte-automaton states it may become.
        max_items: places in the grammar at once (ambiguity); max_depth: nested rules during matching.
        max_shortest: bytes of the shortest output.
        memory_bytes: lazily found configurations and their masks; beyond it they are dropped and found again. One step may
        take four times that and 1 MiB.
    """

    program: ProgramLimits = field(default_factory=ProgramLimits)
    max_states: int = 2_000_000
    max_items: int = 50_000
    max_depth: int = 20_000
    max_shortest: int = 1 << 18
    memory_bytes: int = 64 << 20


def _module(engine: Engine) -> Any:
    if engine == "reference":
        return automaton
    module = native_module()
    if module is None:
        if engine == "native":
            raise UnsupportedConstraint(
                "engine", "'native' is not built here; install radixrt with a C++ compiler present"
            )
        return automaton
    return module


@contextmanager
def _too_large(module: Any) -> Iterator[None]:
    try:
        yield
    except module.TooLarge as error:
        raise UnsupportedConstraint(FIELD, str(error)) from None


def compile_grammar(
    grammar: Grammar,
    tokenizer: Tokenizer | None,
    *,
    vocabulary: Vocabulary | None = None,
    limits: AutomatonLimits | None = None,
    engine: Engine = "auto",
) -> CompiledConstraint:
    """A grammar, ready to mask the tokens of one tokenizer.

    ``vocabulary``: instead of the tokenizer's own; without a tokenizer nothing is known of how text becomes tokens, so
    ``forced_tokens`` is empty and texts are checked as bytes only.

    Raises:
        UnsupportedConstraint: the grammar accepts nothing, is too large, is left-recursive, or needs a byte
            the vocabulary cannot spell.
    """
    if vocabulary is None:
        if tokenizer is None:
            raise TypeError("compile_grammar needs a tokenizer or a vocabulary")
        vocabulary = vocabulary_of(tokenizer)
    limits = limits or AutomatonLimits()
    module = _module(engine)
    tables = program(grammar, limits.program, module)
    with _too_large(module):
        core = module.Automaton(
            vocabulary.for_engine(module),
            tables.code,
            tables.at,
            tables.roots,
            tables.blob,
            tables.nullable,
            tables.start,
            limits.max_states,
            limits.max_items,
            limits.max_depth,
            limits.memory_bytes,
        )
    if core.empty():
        raise UnsupportedConstraint(FIELD, "accepts nothing: no output (of fewer than 2**40 bytes) could satisfy it")
    constraint = CompiledConstraint(core, module, vocabulary, tokenizer)
    shortest = constraint.matcher().min_bytes_to_end
    if shortest >= 1 << 40:
        bytes_ = core.unspelled()
        named = ", ".join(f"0x{byte:02X}" for byte in bytes_[:8])
        raise UnsupportedConstraint(FIELD, f"needs a byte that no token of the vocabulary is: one of {named}")
    if shortest > limits.max_shortest:
        raise UnsupportedConstraint(
            FIELD, f"needs an output of at least {shortest:,} bytes; the limit is {limits.max_shortest:,}"
        )
    return constraint


class CompiledConstraint:
    """A grammar with a vocabulary, and the masks and configurations found so far: shared by all its matchers."""

    def __init__(self, core: Any, module: Any, vocabulary: Vocabulary, tokenizer: Tokenizer | None) -> None:
        self._core, self._module, self._vocabulary, self._tokenizer = core, module, vocabulary, tokenizer
        self.markers = frozenset(
            id
            for id in (tokenizer.special_ids if tokenizer is not None else ())
            if id < vocabulary.size and vocabulary.spelled[id]
        )  # special tokens that are text here, and are shown as such
        self._forced = ForcedTokens(tokenizer, self.markers) if tokenizer is not None else None
        self._min_tokens: int | None = None

    def __repr__(self) -> str:
        return f"CompiledConstraint({self.engine}, {self.figures()})"

    @property
    def engine(self) -> str:
        return "reference" if self._module is automaton else "native"

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def min_tokens(self) -> int:
        """Tokens of the plan from the start: no output is known to be shorter in bytes."""
        if self._min_tokens is None:
            self._min_tokens = self.matcher().min_tokens_to_end
        return self._min_tokens

    @property
    def memory_bytes(self) -> int:
        """About what it holds: its tables, and what every one has beside them."""
        return _FIXED_BYTES + int(self.figures()["memory_bytes"])

    def figures(self) -> dict[str, int]:
        """``memory_bytes``, ``states``, ``configurations``, ``masks``, ``classes`` (of bytes), as of now."""
        figures: dict[str, int] = self._core.figures()
        return figures

    def matcher(self) -> Matcher:
        return Matcher(self, self._core.matcher())

    def accepts(self, output: str | bytes | Sequence[int]) -> bool:
        """Whether an output is valid and complete. Text is checked byte by byte, and as the tokenizer's own tokens too."""
        if isinstance(output, str):
            data = output.encode("utf-8", errors="surrogatepass")
            tokens = self._forced.tokens(output) if self._forced else None
            return self.accepts(data) and (tokens is None or self.accepts(tokens))
        matcher = self.matcher()
        if isinstance(output, bytes | bytearray | memoryview):
            return matcher.advance_bytes(bytes(output)) and matcher.can_end
        return all(matcher.accept(token) for token in output) and (matcher.can_end or matcher.finished)


class Matcher:
    """Where one sequence stands in its constraint."""

    __slots__ = ("_constraint", "_raw", "_steps")

    def __init__(self, constraint: CompiledConstraint, raw: Any, steps: Sequence[bytes] = ()) -> None:
        self._constraint, self._raw = constraint, raw
        self._steps = list(steps)  # the text of each step since the start, for the tokenizer to see across the border

    @property
    def constraint(self) -> CompiledConstraint:
        return self._constraint

    @property
    def can_end(self) -> bool:
        """The output may end here."""
        return bool(self._raw.can_end)

    @property
    def finished(self) -> bool:
        """An end token was accepted; nothing is allowed any more."""
        return bool(self._raw.finished)

    @property
    def can_continue(self) -> bool:
        """Some text may still follow."""
        return bool(self._raw.can_continue)

    def copy(self) -> Matcher:
        return Matcher(self._constraint, self._raw.copy(), self._steps)

    # -- masks

    def fill_mask(self, mask: np.ndarray, row: int) -> None:
        """Writes row ``row`` of an int32 array ``[rows, words]``: bit ``t % 32`` of word ``t // 32`` is set if ``t`` may come
        next. Words beyond the vocabulary are zeroed; a finished sequence allows nothing.

        Raises:
            UnsupportedConstraint: the grammar turned out too ambiguous or too large for its limits.
        """
        with _too_large(self._constraint._module):
            self._raw.fill_mask(mask, row)

    def fill_mask_within(self, mask: np.ndarray, row: int, remaining: int) -> None:
        """``fill_mask`` with only those tokens after which the plan needs at most ``remaining - 1`` more (end tokens do not
        count)."""
        with _too_large(self._constraint._module):
            self._raw.fill_mask(mask, row, remaining)

    # -- moving

    def accept(self, token_id: int) -> bool:
        """Moves past a token. False, and nothing changes, if it is not allowed."""
        with _too_large(self._constraint._module):
            if not self._raw.accept(token_id):
                return False
        self._steps.append(self._constraint._vocabulary.spelled[token_id])
        return True

    def advance_bytes(self, data: bytes) -> bool:
        """Moves past bytes, as one step. False, and nothing changes, if no output goes on like that."""
        with _too_large(self._constraint._module):
            if not self._raw.advance_bytes(data):
                return False
        self._steps.append(data)
        return True

    def rollback(self, n: int) -> None:
        """Takes back the last ``n`` steps.

        Raises:
            ValueError: there were fewer.
        """
        if not 0 <= n <= len(self._steps):
            raise ValueError(f"n={n}: there are {len(self._steps)} steps to take back")
        self._raw.rollback(n)
        if n:
            del self._steps[-n:]

    # -- what is ahead

    def forced_bytes(self) -> bytes:
        """The longest string every valid completion begins with (at most 4,096 bytes of it)."""
        with _too_large(self._constraint._module):
            return bytes(self._raw.forced_bytes())

    def forced_tokens(self) -> list[int]:
        """The tokens of the forced text, as the tokenizer would cut it after what came before; those that what follows could
        change are kept back."""
        forced = self._constraint._forced
        text = self.forced_bytes() if forced else b""
        if forced is None or not text:
            return []
        end = self._raw.copy()
        if not end.advance_bytes(text):
            return []

        def follows(byte: bytes) -> bool:
            if not end.advance_bytes(byte):
                return False
            end.rollback(1)
            return True

        return forced.cut(self._steps, text, not end.can_continue, follows)

    def shortest_completion(self) -> bytes:
        """The first, in order of bytes, of the completions with the fewest bytes."""
        with _too_large(self._constraint._module):
            return bytes(self._raw.shortest_completion())

    def plan(self) -> list[int]:
        """The shortest completion cut into longest tokens, without an end token."""
        with _too_large(self._constraint._module):
            return list(self._raw.plan())

    @property
    def min_tokens_to_end(self) -> int:
        """The length of ``plan()``."""
        with _too_large(self._constraint._module):
            return int(self._raw.min_tokens_to_end)

    @property
    def min_bytes_to_end(self) -> int:
        return int(self._raw.min_bytes_to_end)

    def allows_within(self, token_id: int, remaining: int) -> bool:
        """Whether the token is allowed and leaves a plan of at most ``remaining`` more (end tokens do not count)."""
        with _too_large(self._constraint._module):
            return bool(self._raw.allows_within(token_id, remaining))


def fill_masks(matchers: Sequence[Matcher], mask: np.ndarray, rows: Sequence[int]) -> None:
    """``fill_mask`` for each matcher and its row; native ones in one call."""
    native = native_module() if any(m._constraint._module is not automaton for m in matchers) else None
    quick = [m._constraint._module is native and native is not None for m in matchers]
    if all(quick) and native is not None:
        with _too_large(native):
            native.fill_masks([m._raw for m in matchers], mask, rows)
        return
    for matcher, row in zip(matchers, rows):
        matcher.fill_mask(mask, row)
