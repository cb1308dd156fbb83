"""A request while it is answered: its samples, their text so far and their times. Made and used by ``Engine`` only."""

from __future__ import annotations

import numpy as np

from radixrt.cache.page_pool import IntArray
from radixrt.engine.healing import Healing
from radixrt.grammar.matcher import CompiledConstraint, Matcher
from radixrt.model.detokenizer import Detokenizer
from radixrt.model.tokenizer import Tokenizer
from radixrt.request import (
    FinishReason,
    OutputDelta,
    PositionLogprobs,
    RequestOutput,
    SampleOutput,
    SamplingParams,
)
from radixrt.sampling.mask import Bitmask, clear
from radixrt.sampling.sampler import Sampled
from radixrt.sampling.spec import Row, SamplingSpec
from radixrt.sampling.stop import StopStrings
from radixrt.scheduler.drafts import Drafter
from radixrt.scheduler.sequence import Sequence


class LiveRequest:
    """One request and its samples. ``scoring``: its sequences are choices behind the prompt; ``pooling``: its hidden states become
    one vector. Nothing is generated then."""

    def __init__(
        self,
        request_id: str,
        prompt: IntArray,
        params: SamplingParams,
        namespace: str,
        arrived: float,
        *,
        scoring: bool = False,
        pooling: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.scoring = scoring
        self.pooling = pooling
        self.embedding: tuple[float, ...] | None = None
        self.prompt = prompt
        self.params = params
        self.namespace = namespace
        self.arrived = arrived
        self.samples: list[LiveSample] = []
        self.prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
        self.error: str | None = None
        self.output: RequestOutput | None = None
        self._admitted: float | None = None
        self._first: float | None = None

    def begun(self, sequence: Sequence, now: float) -> None:
        """A first token was sampled."""
        if self._first is None:
            self._first, self._admitted = now, sequence.admitted_at

    def complete(self, now: float) -> None:
        """Every sample has ended."""
        first = self.samples[0].sequence
        admitted = self._admitted if self._admitted is not None else first.admitted_at
        started = self._first if self._first is not None else now
        counted = [item.sequence for item in self.samples] if self.scoring else [first]
        computed = sum(min(sequence.computed_prompt, sequence.prompt_len) for sequence in counted)
        reached = sum(min(sequence.high_water, sequence.prompt_len) for sequence in counted)
        self.output = RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=tuple(self.prompt.tolist()),
            samples=tuple(item.output() for item in self.samples),
            cached_tokens=reached - computed,
            computed_tokens=computed,
            forced_tokens=sum(item.forced_tokens for item in self.samples),
            recomputed_tokens=sum(item.sequence.recomputed for item in self.samples),
            preemptions=sum(item.sequence.preemptions for item in self.samples),
            queue_time=(admitted if admitted is not None else now) - self.arrived,
            prefill_time=started - admitted if admitted is not None else 0.0,
            decode_time=now - started,
            prompt_logprobs=self.prompt_logprobs,
            error=self.error,
            scores=self._scores() if self.scoring else None,
            embedding=self.embedding if self.error is None else None,
        )

    def _scores(self) -> tuple[tuple[float, ...], ...] | None:
        """Those of every choice; some alone would be no answer."""
        found = tuple(item.scores for item in self.samples if item.scores is not None)
        return found if len(found) == len(self.samples) and self.error is None else None


class LiveSample:
    """One sample: its sequence, its text and why it ended."""

    def __init__(
        self,
        request: LiveRequest,
        index: int,
        sequence: Sequence,
        tokenizer: Tokenizer,
        seed: int,
        constraint: CompiledConstraint | None = None,
        healing: Healing | None = None,
        speculation: int = 0,
    ) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.sequence = sequence
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.matcher = constraint.matcher() if constraint is not None else None
        self.forced_tokens = 0
        self.scores: tuple[float, ...] | None = None  # of a choice: its tokens' log-probabilities
        self._healing = healing  # until its bytes are spelled
        self._spelled = 0  # of these bytes
        self._hidden = healing.characters if healing is not None else 0  # characters of the text not to show any more
        self._token_bytes = tokenizer.token_bytes
        self._vocab = tokenizer.vocab_size
        self._stop_ids = frozenset(params.stop_token_ids)
        ends = frozenset() if params.ignore_eos and constraint is None else tokenizer.eos_ids
        self._end_ids = self._stop_ids | ends
        # with a constraint, ids that end too early are taken out of its mask, unless ending is all that is left
        self._early = np.array(sorted(self._end_ids), dtype=np.int64)
        self._spec = SamplingSpec.of(params, seed, self._end_ids if constraint is None else ())
        shown = constraint.markers if constraint is not None else frozenset[int]()
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens, shown=shown)
        self._stops = StopStrings(params.stop, params.include_stop)
        self._text: list[str] = []
        self._logprobs: list[PositionLogprobs] = []
        self._new_text = ""
        self._new_tokens: tuple[int, ...] = ()
        self._new_logprobs: tuple[PositionLogprobs, ...] = ()
        self._speculation = speculation if not request.scoring else 0
        self._speculate()

    def row(self, ahead: int = 0) -> Row:
        """What the sampler needs now, or behind ``ahead`` of the drafts."""
        return Row(self._spec, self.sequence.tokens[: self.sequence.size + ahead], self.sequence.prompt_len)

    def masks(self, vocab: int) -> list[Bitmask | None]:
        """The tokens that may come now and that leave room to complete what must come, int32 ``[ceil(size / 32)]``: by its
        constraint, and where there is none, by the bytes to heal; ``None``: all. Then the same behind each of the drafts, up to
        one that the constraint does not allow."""
        size = max(vocab, self._vocab)  # a tokenizer may know more tokens than the model has logits for
        sequence = self.sequence
        if self.matcher is None:
            healing = self._healing
            if healing is not None:  # nothing is drafted yet
                return [healing.mask(self._spelled, sequence.remaining, size)]
            return [None] * (1 + sequence.drafts)
        masks: list[Bitmask | None] = [self._mask(self.matcher, 0, size)]
        if sequence.drafts:
            probe = self.matcher.copy()
            for ahead, token in enumerate(sequence.tokens[sequence.size : sequence.size + sequence.drafts].tolist(), 1):
                try:
                    if token in self._end_ids or not probe.accept(token):
                        break
                    masks.append(self._mask(probe, ahead, size))
                except Exception:  # a limit of the grammar: an error when it is this token's turn
                    break
        return masks

    def _mask(self, matcher: Matcher, ahead: int, size: int) -> Bitmask:
        mask = np.zeros((1, -(-size // 32)), dtype=np.int32)
        matcher.fill_mask_within(mask, 0, self.sequence.remaining - ahead)
        if self._healing is not None or self.sequence.generated + ahead < self.request.params.min_tokens:
            clear(mask[0], self._early)
        return mask[0]

    def _speculate(self) -> None:
        """Have what follows guessed, unless bytes are still to be healed."""
        if self._speculation and self._healing is None:
            self.sequence.drafter = Drafter(self._speculation)

    def forced(self) -> list[int]:
        """Tokens that the constraint leaves no choice about, as far as there is room to complete it after them."""
        if self.matcher is None:
            return []
        probe, room, tokens = self.matcher.copy(), self.sequence.remaining, []
        spelled = self._spelled
        for token in self.matcher.forced_tokens():
            room -= 1
            healed = self._healing is None or spelled >= len(self._healing.text)
            if room < 0 or not probe.allows_within(token, room) or (not healed and token in self._stop_ids):
                break
            spelled += len(self._token_bytes(token))
            probe.accept(token)
            tokens.append(token)
        return tokens

    def push(self, result: Sampled) -> FinishReason | None:
        """Take in a token that was appended to the sequence; why the sample ends with it, if it does."""
        self._new_tokens += (result.token,)
        if result.logprobs is not None:
            self._new_logprobs += (result.logprobs,)
            self._logprobs.append(result.logprobs)
        if self.matcher is not None and result.token not in self._stop_ids and not self.matcher.accept(result.token):
            raise RuntimeError(f"token {result.token} was sampled although the constraint does not allow it")
        if result.token in self._end_ids:
            self.stop_reason = result.token if result.token in self._stop_ids else None
            return FinishReason.STOP
        if self._healing is not None:
            self._spelled += len(self._token_bytes(result.token))
            if self._spelled >= len(self._healing.text):
                self._healing = None
                self._speculate()
        text = self._detokenizer.push((result.token,))
        if self._hidden:
            cut = min(self._hidden, len(text))
            self._hidden -= cut
            text = text[cut:]
        active = self.sequence.generated >= self.request.params.min_tokens
        shown, stop = self._stops.push(text, active)
        self._new_text += shown
        if stop is not None:
            self.stop_reason = stop
            return FinishReason.STOP
        if self.matcher is not None and not self.matcher.can_continue:
            return FinishReason.STOP  # complete, and nothing may follow
        return None

    def finish(self, reason: FinishReason) -> None:
        """The sample ends; text that was held back is shown unless a stop string or an error ended it."""
        self.finish_reason = reason
        if reason is not FinishReason.ERROR and not isinstance(self.stop_reason, str):
            # half a character of what was to be healed is not the output's
            tail, stop = self._stops.push(self._detokenizer.flush() if self._healing is None else "")
            self._new_text += tail
            if stop is None:
                self._new_text += self._stops.flush()

    def delta(self) -> OutputDelta:
        """What came since the last delta."""
        self._text.append(self._new_text)
        delta = OutputDelta(
            request_id=self.request.request_id,
            index=self.index,
            text=self._new_text,
            token_ids=self._new_tokens,
            logprobs=self._new_logprobs,
            finish_reason=self.finish_reason,
            output=self.request.output,
        )
        self._new_text, self._new_tokens, self._new_logprobs = "", (), ()
        return delta

    def output(self) -> SampleOutput:
        """The finished sample."""
        sequence = self.sequence
        return SampleOutput(
            index=self.index,
            text="".join(self._text) + self._new_text,
            token_ids=tuple(sequence.tokens[sequence.prompt_len : sequence.size].tolist()),
            finish_reason=self.finish_reason or FinishReason.ERROR,
            stop_reason=self.stop_reason,
            logprobs=tuple(self._logprobs) if self.request.params.logprobs is not None else None,
        )
