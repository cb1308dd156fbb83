"""Programs owns what the scheduler knows of running programs: whose step waits, who has started, how far each will grow.

A program is *started* when one of its requests has been admitted, *idle* while none waits or runs (its Python is thinking), and
forgotten when it ends or has been idle for ``patience`` steps: a client that never says the end loses its claims and no more.

Invariants: a waiting sequence is in exactly one of ``following`` (a step of a started program), ``plain`` (no hint) and ``new``
(of a program that has not started). ``growth`` is the sum of ``Program.growth`` over the started programs. A program without a
sequence is in ``_idle``. Nothing here grows with what has ended: names are the ``_NAMES`` most recently used.

Sizes are counted in a program's *own* tokens: the unique tokens of all its sequences, less the prefix that the first
prompts of the last two programs of its name had in common. What a name needs is the running mean of the programs that ended.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from radixrt.cache.page_pool import IntArray
from radixrt.cache.radix_tree import Hold, RadixTree
from radixrt.scheduler.sequence import Sequence

_NAMES = 1024  # names whose needs are remembered
_FORGET = 1 / 16  # weight of the newest program in a name's mean, at least
_STEPS = 5  # that a program is taken to have while nothing is known of its name
_OUTPUT_CAP = 4096  # tokens that one output is taken for at most while nothing is known
_NO_SLOTS: IntArray = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class _Name:
    """What the programs of one name had in common."""

    prompt: IntArray  # the first one of the last program that came
    namespace: str
    shared: int = 0  # tokens of it that the program before it had too
    ended: int = 0
    own: float = 0.0  # mean of the own tokens of those that ended


class Program:
    """One running program."""

    __slots__ = (
        "first",
        "growth",
        "holds",
        "idle_since",
        "name",
        "own",
        "remaining",
        "started",
        "tokens",
        "uids",
    )

    def __init__(self, name: str, first: int, remaining: int | None, started: bool) -> None:
        self.name = name
        self.first = first  # prompt and output of its first step, the shared tokens too
        self.remaining = remaining  # steps behind the first one
        self.started = started
        self.uids: set[int] = set()  # its sequences, waiting and running
        self.tokens = RadixTree()  # every prefix it has computed, without slots: counts its unique tokens
        self.own = 0
        self.growth = 0  # own tokens still expected
        self.holds: set[Hold] = set()
        self.idle_since = 0


class Programs:
    """The running programs and the sequences that wait.

    Args:
        patience: steps for which an idle program keeps its claims.
        enabled: whether hints are looked at; every sequence is ``plain`` otherwise.
        pause: seconds that are left to the programs' Python between two steps before others take their place.
        clock: seconds, ascending.
    """

    def __init__(
        self, patience: int, *, enabled: bool, pause: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.patience = patience
        self.pause = pause
        self._clock = clock
        self.enabled = enabled
        self.following: OrderedDict[int, Sequence] = OrderedDict()  # all three by uid, in order of arrival
        self.plain: OrderedDict[int, Sequence] = OrderedDict()
        self.new: OrderedDict[int, Sequence] = OrderedDict()
        self.new_next = False  # a request without a program was the last that started: it is a new program's turn
        self.growth = 0
        self._programs: dict[str, Program] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # longest idle first
        self._busy = 0  # started programs that are not idle
        self._paused_at = -float("inf")  # when the last of those became idle, seconds
        self._names: OrderedDict[str, _Name] = OrderedDict()

    # ---- sequences come and go

    def arrive(self, sequence: Sequence) -> None:
        """``sequence`` waits."""
        hint = sequence.hint
        if hint is None or not self.enabled:
            self.plain[sequence.uid] = sequence
            return
        program = self._programs.get(hint.program)
        if program is None:
            program = self._programs[hint.program] = self._meet(sequence)
            self._expect(program)
            self._busy += program.started
        elif not program.uids:
            del self._idle[hint.program]
            self._busy += program.started
        program.uids.add(sequence.uid)
        (self.following if program.started else self.new)[sequence.uid] = sequence

    def admit(self, sequence: Sequence) -> None:
        """``sequence`` waited and runs now: its program has started, and its other sequences follow."""
        self._unqueue(sequence.uid)
        program = self._of(sequence)
        if program is None:
            self.new_next = True
            return
        if not program.started:
            self.new_next = False
            program.started = True
            self._busy += 1
            for uid in sorted(program.uids & self.new.keys()):
                self.following[uid] = self.new.pop(uid)
        self._grow(program, sequence)

    def leave(self, sequence: Sequence, step: int) -> None:
        """``sequence`` ended, wherever it was."""
        waited = self._unqueue(sequence.uid)
        program = self._of(sequence)
        if program is None:
            return
        program.uids.remove(sequence.uid)
        if not waited:
            self._grow(program, sequence)
        if not program.uids:
            assert sequence.hint is not None
            program.idle_since = step
            self._idle[sequence.hint.program] = None
            self._busy -= program.started
            self._paused_at = self._clock()

    # ---- programs end

    def end(self, id: str) -> set[Hold]:
        """A program is over; returns the holds it still had. Its sequences may end later."""
        program = self._programs.get(id)
        if program is None:
            return set()
        self._forget(id, program)
        for uid in program.uids & (self.following.keys() | self.new.keys()):  # without a program: like any other
            sequence = self.following.pop(uid, None) or self.new.pop(uid)
            self.plain[uid] = sequence
        if program.started and program.own:
            self._learn(program)
        return program.holds

    def expire(self, step: int) -> set[Hold]:
        """Forget the programs that have been idle for too long; returns the holds they had."""
        holds: set[Hold] = set()
        while self._idle:
            id = next(iter(self._idle))
            program = self._programs[id]
            if step - program.idle_since < self.patience:
                break
            self._forget(id, program)
            holds |= program.holds
        return holds

    # ---- holds

    def held(self, id: str, hold: Hold) -> None:
        program = self._programs.get(id)
        if program is not None:
            program.holds.add(hold)

    def released(self, id: str, hold: Hold) -> None:
        program = self._programs.get(id)
        if program is not None:
            program.holds.discard(hold)

    # ---- questions

    @property
    def busy(self) -> bool:
        """Whether a started program has a sequence that waits or runs, or had one until a moment ago: its next step may be on its way."""
        return self._busy > 0 or (bool(self._idle) and self._clock() - self._paused_at < self.pause)

    def is_new(self, sequence: Sequence) -> bool:
        """Whether admitting ``sequence`` starts a program."""
        return sequence.uid in self.new

    def need(self, sequence: Sequence) -> int:
        """Own tokens that the program of ``sequence`` is expected to need in all."""
        program = self._of(sequence)
        return 0 if program is None else self._need(program)

    def check_integrity(self, waiting: dict[int, Sequence] | OrderedDict[int, Sequence]) -> None:
        """Raises AssertionError where an invariant of this module does not hold."""
        queued = [*self.following, *self.plain, *self.new]
        assert len(queued) == len(waiting) and set(queued) == waiting.keys(), (
            "a waiting sequence is in no queue, or in two"
        )
        started = [p for p in self._programs.values() if p.started]
        assert self.growth == sum(p.growth for p in started) and self._busy == sum(bool(p.uids) for p in started)
        assert all(p.growth == 0 for p in self._programs.values() if not p.started)
        assert self._idle.keys() == {id for id, p in self._programs.items() if not p.uids}
        for uid, sequence in self.new.items():
            program = self._of(sequence)
            assert program is not None and not program.started and uid in program.uids
        for uid, sequence in self.following.items():
            program = self._of(sequence)
            assert program is not None and program.started and uid in program.uids

    # ---- inside

    def _of(self, sequence: Sequence) -> Program | None:
        """The program that has this sequence: not another one of the same id, after its own was ended."""
        program = None if sequence.hint is None else self._programs.get(sequence.hint.program)
        return program if program is not None and sequence.uid in program.uids else None

    def _unqueue(self, uid: int) -> bool:
        return any(queue.pop(uid, None) is not None for queue in (self.plain, self.following, self.new))

    def _meet(self, sequence: Sequence) -> Program:
        """A program that was not known, from the first of its sequences."""
        hint = sequence.hint
        assert hint is not None
        prompt = sequence.tokens[: sequence.prompt_len]
        name = self._names.get(hint.name)
        if name is None:
            self._names[hint.name] = _Name(prompt.copy(), sequence.namespace)
            if len(self._names) > _NAMES:
                self._names.popitem(last=False)
        else:
            self._names.move_to_end(hint.name)
            if hint.step == 0:
                name.shared = _common(name.prompt, prompt) if name.namespace == sequence.namespace else 0
                name.prompt, name.namespace = prompt.copy(), sequence.namespace
        output = min(sequence.limit - sequence.prompt_len, _OUTPUT_CAP)
        first = len(prompt) + output * max(1, hint.fanout)
        return Program(hint.name, first, hint.remaining, started=hint.step > 0)

    def _grow(self, program: Program, sequence: Sequence) -> None:
        program.tokens.insert(sequence.tokens[: sequence.size], _NO_SLOTS, sequence.namespace)
        name = self._names.get(program.name)
        program.own = max(0, program.tokens.evictable_tokens - (0 if name is None else name.shared))
        self._expect(program)

    def _need(self, program: Program) -> int:
        name = self._names.get(program.name)
        if name is not None and name.ended:
            return round(name.own)
        step = max(0, program.first - (0 if name is None else name.shared))
        if program.remaining is None:
            return max(step * _STEPS, program.own + step)
        return step * (1 + program.remaining)

    def _expect(self, program: Program) -> None:
        if program.started:
            before, program.growth = program.growth, max(0, self._need(program) - program.own)
            self.growth += program.growth - before

    def _learn(self, program: Program) -> None:
        name = self._names.get(program.name)
        if name is None:
            return
        name.ended += 1
        before = name.own
        name.own += (program.own - before) * max(1 / name.ended, _FORGET)
        if abs(name.own - before) * 10 > before:  # what is expected of those that run changed
            for other in self._programs.values():
                if other.name == program.name:
                    self._expect(other)

    def _forget(self, id: str, program: Program) -> None:
        del self._programs[id]
        self._idle.pop(id, None)
        self.growth -= program.growth
        self._busy -= program.started and bool(program.uids)


def _common(one: IntArray, other: IntArray) -> int:
    size = min(len(one), len(other))
    differ = (one[:size] != other[:size]).nonzero()[0]
    return int(differ[0]) if len(differ) else size
