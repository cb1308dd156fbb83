"""Sequence owns the state of one sample while it is scheduled: its tokens, and where their KV lies.

Invariants (positions in tokens; the right end of each range is exclusive):

    tokens  |---- prompt ----|---- generated ----|
            0            prompt_len            size
    KV      |-- in the tree, locked --|-- own pages: computed --|-- own pages: empty --|
            0                      in_tree                   computed                owned

``in_tree`` and ``owned`` are whole numbers of pages. During a step ``in_tree`` may lie beyond ``computed``: the step
writes what it put into the tree. A waiting sequence holds nothing: ``node is None`` and all three are 0.

During a step that verifies drafts, ``drafts`` guessed tokens lie behind ``size``, and the step computes them too:

    tokens  |---- prompt ----|---- generated ----|-- drafts --|
                                                size
    KV                  ... computed by this step -------|-- own pages, if any --|

They are nobody's output: ``append`` takes one in when it is what was sampled, and forgets all of them when it is not; their slots are
written again before they are read. Between steps there are none.

While the step after one that has not ended is scheduled, a token that nobody knows yet may lie behind ``size``: ``source`` says where
the step in flight samples it, see ``Scheduler.schedule_ahead``.

    tokens  |---- prompt ----|---- generated ----|- pending -|
                                                size
    KV                  ... computed by the step in flight --|-- this step computes it

"""

from __future__ import annotations

from enum import Enum

import numpy as np

from radixrt.cache.page_pool import IntArray, PagePool
from radixrt.cache.radix_tree import Node
from radixrt.scheduler.drafts import Drafter
from radixrt.scheduler.hints import ProgramHint


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One sample of a request.

    Args:
        uid: unique and ascending in order of arrival.
        prompt: token ids, int32, shape ``[prompt_len]``, at least one.
        limit: most tokens, prompt included.
        namespace: sequences share KV only within it.
        priority: smaller runs earlier (policy ``priority``).
        hint: where it stands in the program that it is a step of.
    """

    __slots__ = (
        "accepted",
        "admitted_at",
        "booked",
        "computed",
        "computed_prompt",
        "drafter",
        "drafts",
        "enqueued_step",
        "high_water",
        "hint",
        "in_tree",
        "limit",
        "matched",
        "matched_version",
        "namespace",
        "node",
        "owned",
        "phase",
        "preemptions",
        "priority",
        "prompt_len",
        "recomputed",
        "size",
        "slots",
        "source",
        "suspect_until",
        "tokens",
        "uid",
    )

    def __init__(
        self,
        uid: int,
        prompt: IntArray,
        limit: int,
        namespace: str = "",
        priority: int = 0,
        hint: ProgramHint | None = None,
    ) -> None:
        self.uid = uid
        self.namespace = namespace
        self.priority = priority
        self.hint = hint
        self.prompt_len = self.size = len(prompt)
        self.limit = limit
        self.tokens: IntArray = np.empty(min(limit, self.size + 64), dtype=np.int32)
        self.tokens[: self.size] = prompt
        self.slots: IntArray = np.empty(0, dtype=np.int32)
        self.node: Node | None = None
        self.in_tree = self.computed = self.owned = 0
        self.phase = Phase.WAITING
        self.booked = False  # its prompt is in the engine's figures
        self.suspect_until = 0  # was to be computed this far in a step that failed: runs alone until it is
        self.matched, self.matched_version = 0, -1  # cached prefix at that version of the tree, for the policy
        self.enqueued_step = 0
        self.admitted_at: float | None = None  # first admission, monotonic seconds
        self.high_water = 0  # most tokens ever computed or found in the cache
        self.computed_prompt = 0  # prompt tokens this sequence computed, each counted once
        self.recomputed = 0  # tokens computed again after a preemption
        self.preemptions = 0
        self.drafter: Drafter | None = None  # where its next tokens may be guessed
        self.drafts = 0  # guessed tokens that this step computes
        self.accepted = 0  # of those, ever, that turned out right
        self.source = -1  # row of the step in flight that samples its next token; -1: it awaits none

    @property
    def generated(self) -> int:
        return self.size - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.limit - self.size

    @property
    def end(self) -> int:
        """Its tokens, with one that is pending."""
        return self.size + (self.source >= 0)

    @property
    def decoding(self) -> bool:
        """Only the last sampled token has no KV yet."""
        return self.end - self.computed == 1 and self.end > self.prompt_len and self.phase is Phase.RUNNING

    def append(self, token: int) -> None:
        """Add a generated token. One that was drafted has its KV already, if the step did not fail; another one ends the drafts."""
        if self.drafts and self.tokens[self.size] == token:
            self.size += 1
            self.computed += 1
            self.high_water = max(self.high_water, self.computed)
            self.drafts -= 1
            self.accepted += 1
            return
        self.drafts = 0
        self._grow(self.size + 1)
        self.tokens[self.size] = token
        self.size += 1

    def draft(self, tokens: IntArray) -> None:
        """Have the next step compute ``tokens`` behind the generated ones; fewer than ``remaining``."""
        self.drafts = len(tokens)
        self._grow(self.size + self.drafts)
        self.tokens[self.size : self.size + self.drafts] = tokens

    def expect(self, row: int) -> None:
        """A step in flight samples its next token in ``row``."""
        self.source = row
        self._grow(self.size + 1)
        self.tokens[self.size] = 0

    def _grow(self, size: int) -> None:
        if size > len(self.tokens):
            grown = np.empty(min(self.limit, max(size, 2 * self.size)), dtype=np.int32)
            grown[: self.size] = self.tokens[: self.size]
            self.tokens = grown

    def extend(self, pool: PagePool, pages: int) -> None:
        """Take so many free pages behind those it has, near to them where that can be had."""
        behind = int(self.slots[self.owned - 1]) if self.owned else -1
        self.put_slots(self.owned, pool.alloc(pages, behind))
        self.owned += pages * pool.page_size

    def put_slots(self, at: int, slots: IntArray) -> None:
        """Name the slots of the tokens from position ``at`` on."""
        end = at + len(slots)
        if end > len(self.slots):
            grown = np.empty(max(end, min(2 * end, self.limit + len(slots))), dtype=np.int32)
            grown[: len(self.slots)] = self.slots
            self.slots = grown
        self.slots[at:end] = slots
