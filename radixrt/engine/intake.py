"""Intake turns what a caller asks for into a ``Ready`` request: tokenized, checked against the model and the limits, compiled.

Invariants: any thread may use it, at any time; it touches nothing of a running engine; a ``Ready`` holds nothing of the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property

from radixrt.cache.page_pool import IntArray
from radixrt.config import EngineConfig
from radixrt.engine.embedding import check_pooling
from radixrt.engine.healing import Healing, TokenTable, healed
from radixrt.engine.inputs import Prompt, check_ids, check_limits, is_list, to_ids, to_tokens
from radixrt.engine.scoring import joined
from radixrt.errors import InvalidRequest, shown
from radixrt.grammar.constraint import Constraint
from radixrt.grammar.matcher import CompiledConstraint
from radixrt.model.runner import ModelInfo
from radixrt.model.tokenizer import Tokenizer
from radixrt.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that was checked.

    Fields:
        tokens: of its prompt, int32; of its prefix, where choices are scored.
        healing: the bytes that the output begins with and does not show. constraint: of the whole output, these bytes included.
        choices: the token ids to score behind the prefix; nothing is generated then.
        pooling: how the prompt's hidden states become one vector, where that is asked for; nothing is generated then.
    """

    tokens: IntArray
    params: SamplingParams
    constraint: CompiledConstraint | None = None
    healing: Healing | None = None
    choices: tuple[IntArray, ...] | None = None
    pooling: str | None = None

    def prompts(self) -> list[IntArray]:
        """The prompt of each of its sequences."""
        return [self.tokens] * self.params.n if self.choices is None else joined(self.tokens, self.choices)

    def limit(self, prompt: IntArray, context: int) -> int:
        """Most tokens of a sequence. A healed prompt was one token longer before, and has that one to generate again."""
        if self.params.max_tokens is None:
            return context
        return len(prompt) + self.params.max_tokens + (self.healing is not None)


class Intake:
    """Checks requests for one engine.

    Args:
        compile: ``Engine.compile``.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        tokenizer: Tokenizer,
        compile: Callable[[Constraint], Future[CompiledConstraint]],
    ) -> None:
        self._config, self._info, self._tokenizer, self._compile = config, info, tokenizer, compile

    @cached_property
    def table(self) -> TokenTable:
        """The ordinary tokens by their bytes: made when a generation is healed for the first time."""
        return TokenTable.of(self._tokenizer, self._info.vocab_size)

    def generation(self, prompt: Prompt, params: SamplingParams, heal: bytes = b"") -> Ready:
        """See ``Engine.prepare``."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest("params", f"must be SamplingParams, not {type(params).__name__}")
        if not isinstance(heal, bytes):
            raise InvalidRequest("heal", f"must be bytes, not {type(heal).__name__}")
        context, vocab = self._info.context_length, self._info.vocab_size
        check_limits(params, self._config, vocab)
        tokens = to_tokens(prompt, self._tokenizer, context)
        check_ids("prompt", tokens, vocab)
        if len(tokens) > context or (params.max_tokens is None and len(tokens) == context):
            raise InvalidRequest(
                "prompt", f"has {len(tokens)} tokens; context_length={context} must hold it and its output"
            )
        healing = Healing(self.table, heal, params.stop_token_ids) if heal else None
        extra = int(healing is not None)
        longest = len(tokens) + (params.max_tokens or 0) + extra
        if longest > context:
            raise InvalidRequest(
                "max_tokens",
                f"={params.max_tokens}: with a prompt of {len(tokens) + extra} tokens that is {longest}, "
                f"more than context_length={context}",
            )
        room = context - len(tokens) if params.max_tokens is None else params.max_tokens + extra
        if healing is not None and healing.min_tokens > room:
            problem = f"={shown(heal)}: takes {healing.min_tokens} tokens, and there is room for {room}"
            raise InvalidRequest("heal", problem)
        return Ready(tokens, params, self._compiled(params.constraint, room, heal), healing)

    def _compiled(self, constraint: Constraint | None, room: int, heal: bytes) -> CompiledConstraint | None:
        """The constraint, compiled, where there is one; refused where it cannot be completed in the tokens there are."""
        if constraint is None:
            return None
        compiled = self._compile(healed(constraint, heal) if heal else constraint).result()
        if compiled.min_tokens > room:
            behind = f", {shown(heal)} before it included," if heal else ""
            raise InvalidRequest(
                "max_tokens",
                f"={room - bool(heal)}: the shortest output that the constraint allows{behind} "
                f"has {compiled.min_tokens} tokens",
            )
        return compiled

    def scoring(self, prefix: Seq[int], choices: Seq[Seq[int]]) -> Ready:
        """See ``Engine.prepare_score``."""
        context, vocab = self._info.context_length, self._info.vocab_size
        before = to_ids("prefix", prefix, context)
        check_ids("prefix", before, vocab)
        if not len(before):
            raise InvalidRequest("prefix", "is empty: the first token of a choice needs one before it")
        if not is_list(choices):
            raise InvalidRequest("choices", f"must be a list of lists of token ids, not {type(choices).__name__}")
        if not len(choices):
            raise InvalidRequest("choices", "is empty: there must be at least one choice to score")
        if len(choices) > self._config.max_choices:
            raise InvalidRequest("choices", f" has {len(choices)}: at most {self._config.max_choices} are allowed")
        ids = tuple(to_ids(f"choices[{at}]", choice, context) for at, choice in enumerate(choices))
        for at, choice in enumerate(ids):
            check_ids(f"choices[{at}]", choice, vocab)
            longest = len(before) + len(choice)
            if longest > context:
                raise InvalidRequest(
                    f"choices[{at}]",
                    f" has {len(choice)} tokens: with a prefix of {len(before)} that is {longest}, "
                    f"more than context_length={context}",
                )
        return Ready(before, SamplingParams(max_tokens=0), choices=ids)

    def embedding(self, prompt: Prompt, pooling: str) -> Ready:
        """See ``Engine.prepare_embed``."""
        context, vocab = self._info.context_length, self._info.vocab_size
        check_pooling(pooling)
        tokens = to_tokens(prompt, self._tokenizer, context)
        check_ids("prompt", tokens, vocab)
        if len(tokens) > context:
            raise InvalidRequest("prompt", f"has {len(tokens)} tokens; context_length={context} must hold it")
        return Ready(tokens, SamplingParams(max_tokens=0), pooling=pooling)
