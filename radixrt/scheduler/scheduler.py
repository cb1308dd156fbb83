"""Scheduler owns which sequences wait and which run, and moves pages between the pool, the tree and the sequences.

Invariants (``check_integrity``): every page is free, or in the tree, or owned by exactly one running sequence; the locks on
the roots are the running sequences and the leases; a waiting sequence holds nothing. The running sequence that came first is
never preempted, and any one sequence fits in the pool, so the loop always makes progress.

What requests say of their programs (``Sequence.hint``) changes the order of admission, the order of eviction and how many programs
are started at a time, never what is computed. Each has a switch. Policy ``fcfs`` uses none of it, ``priority`` only the eviction.

A decode whose sequence has a ``Drafter`` computes guessed tokens too, where there is room in the step and in the pool: never at the cost of
anyone's pages but evictable ones. What they were worth is known when the sampled tokens were appended (``Sequence.append``).

A step may be scheduled while the one before it has not ended (``schedule_ahead``): steps are computed in order, so it may build on all
that the earlier one writes. A sequence that ends meanwhile gives back what a step in flight writes when that step has ended.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import OrderedDict

from radixrt.cache.page_pool import IntArray, PagePool
from radixrt.cache.radix_tree import Hold, RadixTree
from radixrt.scheduler import policy
from radixrt.scheduler.batch import Batch, flatten
from radixrt.scheduler.counters import SchedulerCounters
from radixrt.scheduler.integrity import check_integrity
from radixrt.scheduler.leases import Leases
from radixrt.scheduler.programs import Programs
from radixrt.scheduler.sequence import Phase, Sequence

_RESERVE_CAP = 4096  # tokens of output held back for one running sequence at most
# On a CPU up to 4 rows take about as long as one, and each one more a fifth of that: a token drafted beside few others costs little.
_DRAFT_ROWS = 16  # decoded and drafted tokens of a step above which nothing is drafted
_ROW_COST = 0.2
_SHARES = (0.3, 0.8)  # of the drafts that must be right, at least and at most
_RETRY_STEPS = 16  # steps after which an admission that found no room is tried again though nothing ended
_RUN = 16  # slots a decode gets at once, so that its KV lies side by side,
_ROOMY = 8  # while so many times as much is free for each that runs


class Scheduler:
    """Builds the batch of each step.

    Args:
        pool: the pages.
        tree: the cached prefixes; ``None`` keeps nothing after a sequence ends.
        chunk: tokens of one step: every running decode, then prefill in what is left, at least 1.
        max_running: most sequences running at once.
        schedule_policy: see ``policy.order``.
        max_wait_steps: a sequence that waited this long goes first.
        program_order: a started program's next step goes before a new program's first, see ``policy.order_programs``.
        program_eviction: what a live program holds is evicted last, see ``hold``.
        program_admission: a program is started only when there is room for it and for what the started ones will need.
        program_floor: while fewer sequences run, programs are started whatever the pool holds.
        program_leases: what waits for a tool is not evicted for as long as that tool takes, see ``Leases``.
        program_pause: seconds that programs may think between two steps before others are started in their place.
    """

    def __init__(
        self,
        pool: PagePool,
        tree: RadixTree | None,
        *,
        chunk: int,
        max_running: int,
        schedule_policy: str = "lpm",
        max_wait_steps: int = 512,
        program_order: bool = True,
        program_eviction: bool = True,
        program_admission: bool = True,
        program_pause: float = 0.0,
        program_floor: int = 1,
        program_leases: bool = True,
    ) -> None:
        self.leases = Leases(tree, pool.capacity, program_leases)
        self.program_floor = program_floor
        self.pool = pool
        self.tree = tree
        self.chunk = chunk
        self.max_running = max_running
        self.policy = schedule_policy
        self.max_wait_steps = max_wait_steps
        self._ordered = program_order and schedule_policy in ("lpm", "dfs-weight")
        self._holding = program_eviction and schedule_policy != "fcfs" and tree is not None
        self._gated = program_admission and schedule_policy in ("lpm", "dfs-weight") and tree is not None
        self.programs = Programs(
            max_wait_steps, enabled=self._ordered or self._holding or self._gated, pause=program_pause
        )
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()  # by uid, in order of arrival
        self.preempted: list[Sequence] = []  # waiting again, in order of arrival
        self.suspects: list[Sequence] = []  # to run alone, one after the other, see ``fail``; the first may be running
        self.running: dict[int, Sequence] = {}
        self.counters = SchedulerCounters()
        self.step = 0
        self._new_token_ratio = 0.4  # share of a running sequence's remaining output held back for it
        self._blocked_until = 0  # no admission before this step, unless something ends
        self.flights: list[dict[int, int]] = []  # of each step that has not ended: uid -> computed after it
        self.retired: list[IntArray] = []  # given back by sequences in flight, and written until the steps end
        self._matched: dict[int, int] = {}  # uid -> what it found cached beyond the step in flight

    # ---- sequences come and go

    def add(self, sequence: Sequence) -> None:
        """Let ``sequence`` wait. It must fit in the pool alone: ``pages_for(limit) <= pool.pages``."""
        sequence.enqueued_step = self.step
        self.waiting[sequence.uid] = sequence
        self.programs.arrive(sequence)
        self._blocked_until = 0

    def finish(self, sequence: Sequence) -> None:
        """End ``sequence``, waiting or running, at any moment between steps; its KV stays in the tree."""
        if sequence.phase is Phase.RUNNING:
            self._release(sequence)
            del self.running[sequence.uid]
        self.waiting.pop(sequence.uid, None)
        self.programs.leave(sequence, self.step)
        for queue in (self.preempted, self.suspects):
            if sequence in queue:
                queue.remove(sequence)
        sequence.phase = Phase.FINISHED
        self._blocked_until = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.preempted or self.suspects)

    @property
    def waiting_count(self) -> int:
        return len(self.waiting) + len(self.preempted) + sum(s.phase is Phase.WAITING for s in self.suspects)

    # ---- programs

    def hold(self, tokens: IntArray, namespace: str = "", program: str = "") -> Hold | None:
        """A live program is going to continue ``tokens``: what is cached of them is evicted only when nothing else is left.

        The hold lasts until ``release``, the end of ``program`` where that is given, or until that has been idle for
        ``max_wait_steps`` steps. ``None`` where nothing is cached, or holds are off.
        """
        hold = self.tree.hold(tokens, namespace) if self._holding and self.tree is not None else None
        if hold is not None and program:
            self.programs.held(program, hold)
        return hold

    def release(self, hold: Hold, program: str = "") -> None:
        """Undo ``hold``; harmless when that happened already."""
        if self.tree is not None:
            self.tree.release(hold)
        self.programs.released(program, hold)

    def end_program(self, program: str) -> None:
        """No request of ``program`` follows: its holds are released, and its share of the pool is free for another one."""
        for hold in self.programs.end(program):
            self.release(hold)

    def figures(self) -> dict[str, int]:
        """What runs, waits and is leased."""
        return {"running": len(self.running), "waiting": self.waiting_count, **self.leases.figures()}

    # ---- one step: schedule, then commit or fail

    def schedule(self) -> Batch | None:
        """Build the next step: running decodes, then prefill under way, then waiting sequences in policy order.

        What a chunk will compute enters the tree at once, before it is computed, so that a later sequence of the same
        step that shares it takes it from there: within a layer, KV is written before it is read.
        Returns ``None`` when nothing waits or runs.
        """
        self._landed(len(self.flights))
        return self._schedule(ahead=False)

    def schedule_ahead(self, flight: Batch) -> Batch | None:
        """Build the step after ``flight``, which has not ended: a decode computes the token that ``flight`` is going to sample.

        Returns ``None`` where a sequence's next step depends on more than that token (drafts), or there is no room without preempting:
        then it is to be scheduled when ``flight`` has ended.
        """
        work = zip(flight.sequences, flight.starts, flight.ends, strict=True)
        live = [entry for entry in work if entry[0].phase is Phase.RUNNING]
        if self.suspects or any(s.drafter is not None for s in flight.sampled):
            return None
        try:
            for sequence, _, end in live:
                sequence.computed = end
            for row, sequence in enumerate(flight.sampled):
                if sequence.remaining > 1 and sequence.phase is Phase.RUNNING:
                    sequence.expect(row)
            if not self._make_room(len(self._decodes()[1])):
                return None
            return self._schedule(ahead=True)
        finally:
            for sequence, start, end in live:
                if sequence.computed > end:
                    self._matched[sequence.uid] = sequence.computed
                sequence.computed, sequence.source = start, -1

    def _schedule(self, *, ahead: bool) -> Batch | None:
        self.step += 1
        for hold in self.programs.expire(self.step):
            self.release(hold)
        self.leases.expire()
        if self.tree is not None:
            self.tree.begin_step(ahead)
        plan: dict[int, tuple[Sequence, int]] = {}  # uid -> (sequence, computed after the step)
        if self.suspects:
            self._schedule_suspect(plan)
        else:
            budget = max(1, self.chunk - self._schedule_decodes(plan, ahead))
            budget -= self._schedule_prefills(plan, budget, ahead)
            if budget > 0 or (self.tree is not None and self.waiting_count):
                self._admit(plan, budget)
        self.counters.steps += 1 if plan or not ahead else 0
        if not plan:
            return None
        batch = flatten(list(plan.values()))
        self.flights.append({uid: end for uid, (_, end) in plan.items()})
        return batch

    def commit(self, batch: Batch) -> None:
        """The oldest step in flight succeeded: its tokens have their KV."""
        for sequence, start, end in zip(batch.sequences, batch.starts, batch.ends, strict=True):
            if sequence.phase is not Phase.RUNNING:  # it ended meanwhile, and what was computed for it is nobody's
                continue
            self._count(sequence, start, end)
            self.counters.drafted += sequence.drafts
            sequence.computed = max(end, self._matched.pop(sequence.uid, 0))
            if self.suspects and self.suspects[0] is sequence and end >= sequence.suspect_until:
                self.suspects.pop(0)
        self.counters.forward_tokens += batch.tokens
        self._new_token_ratio = max(0.1, self._new_token_ratio - 0.001)
        if self.tree is not None:
            self.tree.end_step()
        self._landed(1)

    def _landed(self, steps: int) -> None:
        """The oldest steps in flight have ended: whatever was given back until now is written no more."""
        del self.flights[:steps]
        if self.retired:
            self._blocked_until = 0
        for slots in self.retired:
            self.pool.free(slots)
        self.retired.clear()
        if not self.flights:
            self._matched.clear()

    def fail(self, batch: Batch) -> list[Sequence]:
        """The step ``batch`` raised: nothing of it counts, nor of one that was scheduled ahead, and what they put into the tree leaves
        again. No step is in flight any more.

        A sequence that was alone in its batch, without drafts, is to blame and is returned, ended; the others wait again,
        each to run alone until it has passed what it was to compute in this step. Every running sequence gives up what it holds, because
        one that is not in the batch may have matched what the batch should have computed; so does a lease of that.
        """
        ends = dict(zip(batch.sequences, batch.ends, strict=True))
        first = batch.sequences[0]
        blamed = first if len(ends) == 1 and not first.drafts and first.phase is Phase.RUNNING else None
        self._landed(len(self.flights))
        self._blocked_until = 0
        for sequence in self.running.values():
            self._release(sequence)
            sequence.phase = Phase.WAITING
            sequence.suspect_until = max(sequence.suspect_until, ends.get(sequence, 0))
            if sequence in ends and blamed is None:
                insort(self.suspects, sequence, key=lambda s: s.uid)
            elif sequence not in ends and sequence not in self.suspects:
                insort(self.preempted, sequence, key=lambda s: s.uid)
        self.running.clear()
        self.leases.give_up_fresh()
        if self.tree is not None:
            for slots in self.tree.drop_fresh():
                self.pool.free(slots)
        if blamed is None:
            return []
        self.finish(blamed)
        return [blamed]

    # ---- decodes

    def _decodes(self) -> tuple[list[Sequence], list[Sequence]]:
        """The decodes of the next step, and those of them that need pages."""
        decodes = [s for s in self.running.values() if s.decoding]
        return decodes, [s for s in decodes if s.owned == s.computed]

    def _schedule_decodes(self, plan: dict[int, tuple[Sequence, int]], ahead: bool) -> int:
        while True:
            decodes, full = self._decodes()
            if self._make_room(len(full)):
                break
            if not self._reclaim() and not (len(self.running) == 1 and self.leases.give_up()):
                self._preempt(self._victim())
        if full:
            run = _RUN if self._available() > _ROOMY * _RUN * len(self.running) else 1
            pages = [self.pool.pages_for(min(run, s.limit - s.owned)) for s in full]
            if not self._make_room(sum(pages)):
                pages = [1] * len(full)
            for sequence, count in zip(full, pages, strict=True):
                sequence.extend(self.pool, count)
        for sequence in decodes:
            plan[sequence.uid] = (sequence, sequence.end)
        return len(decodes) + (self._draft(decodes) if not ahead else 0)

    def _reclaim(self) -> bool:
        """Take back the empty pages behind the running sequences; whether there were any."""
        before = self.pool.free_pages
        for sequence in self.running.values():
            keep = self.pool.pages_for(sequence.size) * self.pool.page_size
            if sequence.owned > keep:
                self.pool.free(sequence.slots[keep : sequence.owned])
                sequence.owned = keep
        return self.pool.free_pages > before

    def _draft(self, decodes: list[Sequence]) -> int:
        """Have decodes verify what may follow them, those first whose guesses were best; returns how many tokens."""
        size = self.pool.page_size
        drafting = [(s.drafter.rate, s.drafter, s) for s in decodes if s.drafter is not None]
        left = room = _DRAFT_ROWS - len(decodes)
        share = min(_SHARES[1], max(_SHARES[0], _ROW_COST * len(decodes)))
        for _, drafter, sequence in sorted(drafting, key=lambda entry: -entry[0]) if room > 0 else ():
            spare = max(0, self._available() // size - len(self.running))  # pages beyond the next step's
            most = min(left, sequence.remaining - 1, sequence.owned - sequence.size + spare * size)
            place = (self.tree, sequence.node, sequence.in_tree)
            tokens = drafter.propose(sequence.tokens[: sequence.size], sequence.accepted, most, share, *place)
            pages = self.pool.pages_for(sequence.size + len(tokens)) - sequence.owned // size
            if pages > 0 and self._make_room(pages):
                sequence.extend(self.pool, pages)
            sequence.draft(tokens[: sequence.owned - sequence.size])
            left -= sequence.drafts
        return room - left

    # ---- prefill

    def _schedule_prefills(self, plan: dict[int, tuple[Sequence, int]], budget: int, ahead: bool) -> int:
        used = 0
        # one that is computed whole is sampled by the step in flight, and ends there
        under_way = [s for s in self.running.values() if s.uid not in plan and not (ahead and s.computed == s.size)]
        for sequence in under_way:
            if sequence.phase is Phase.RUNNING and budget > used:
                used += self._prefill(plan, sequence, budget - used)
        while not plan and under_way and budget > 0 and not ahead:
            # every page is held by prefills under way: the first of them gets what the others hold
            first = min(under_way, key=self._rank)
            while len(self.running) == 1 and not self._make_room(1):
                if not self.leases.give_up():
                    raise RuntimeError("a sequence that fits alone in the pool found no room alone")
            if len(self.running) > 1:
                self._preempt(self._victim())
            used += self._prefill(plan, first, budget - used)
        return used

    def _prefill(self, plan: dict[int, tuple[Sequence, int]], sequence: Sequence, budget: int) -> int:
        """Give ``sequence`` its next chunk of at most ``budget`` tokens, as far as there is room; returns its tokens."""
        self._rematch(sequence)
        left = sequence.size - sequence.computed
        room = sequence.owned - sequence.computed + self._available() // self.pool.page_size * self.pool.page_size
        count = min(left, budget, room)
        if count <= 0 and left:
            return 0
        end = sequence.computed + count
        pages = self.pool.pages_for(end) - sequence.owned // self.pool.page_size
        if pages > 0:
            if not self._make_room(pages):
                raise RuntimeError("pages counted as available could not be freed")
            sequence.extend(self.pool, pages)
        self._grow_tree(sequence, end, fresh=True)
        plan[sequence.uid] = (sequence, end)
        return count

    def _rematch(self, sequence: Sequence) -> None:
        """Take from the tree what others computed of this sequence's tokens since it last looked.

        before  |-- in_tree --|------ own ------|
        after   |-- in_tree -------- match --|--|     (own pages that the tree has too are freed)
        """
        if self.tree is None or sequence.node is None or sequence.computed >= sequence.size:
            return
        match = self.tree.match_from(sequence.node, sequence.tokens[sequence.in_tree : sequence.size])
        sequence.node = match.node
        if match.length:
            end = sequence.in_tree + match.length
            self._give_back(sequence, sequence.in_tree, min(end, sequence.owned))
            sequence.put_slots(sequence.in_tree, match.slots)
            sequence.in_tree = end
            sequence.owned = max(sequence.owned, end)
            sequence.computed = max(sequence.computed, end)

    def _grow_tree(self, sequence: Sequence, end: int, *, fresh: bool) -> None:
        """Put the whole pages of ``tokens[in_tree:end]`` into the tree; ``fresh``: this step computes them."""
        if self.tree is None or sequence.node is None:
            return
        whole = end // self.pool.page_size * self.pool.page_size
        if whole > sequence.in_tree:
            part = slice(sequence.in_tree, whole)
            match = self.tree.extend(sequence.node, sequence.tokens[part], sequence.slots[part], fresh=fresh)
            sequence.node = match.node
            if match.length:  # computed by someone else meanwhile: theirs stays, ours is freed
                self._give_back(sequence, sequence.in_tree, sequence.in_tree + match.length)
                sequence.put_slots(sequence.in_tree, match.slots)
            sequence.in_tree = whole

    # ---- admission

    def _admit(self, plan: dict[int, tuple[Sequence, int]], budget: int) -> None:
        if self.step < self._blocked_until or len(self.running) >= self.max_running or not self.waiting_count:
            return
        if self.policy == "priority":
            candidates = policy.order(
                "priority", [*self.preempted, *self.waiting.values()], None, self.step, self.max_wait_steps
            )
        elif self._ordered:
            candidates = self.preempted + policy.order_programs(
                self.policy, self.programs, self.tree, self.step, self.max_wait_steps
            )
        else:
            candidates = self.preempted + policy.order(
                self.policy, self.waiting.values(), self.tree, self.step, self.max_wait_steps
            )
        open_to_new = True
        reserved = sum(self._reserve(s) for s in self.running.values())
        for sequence in candidates:
            if len(self.running) >= self.max_running:
                return
            if budget <= 0 and not self._cached_whole(sequence):
                continue  # a later one may be, and then it needs no budget
            if self._gated and self.programs.is_new(sequence):
                open_to_new = open_to_new and self._room_for_program(sequence)
                if not open_to_new and self.step - sequence.enqueued_step < self.max_wait_steps:
                    continue
            self._start(sequence)
            # pages: a last one may be filled in part
            need = self._reserve(sequence) + self.pool.page_size - 1
            while len(self.running) == 1 and self._available() < self.pool.page_size and self.leases.give_up():
                pass
            if len(self.running) > 1 and need + reserved > self._available():
                self._stop(sequence)
                self._blocked_until = self.step + _RETRY_STEPS
                return
            used = self._prefill(plan, sequence, budget)
            if sequence.uid not in plan:  # no room at all, alone: only while others hold everything
                self._stop(sequence)
                return
            budget -= used
            reserved += self._reserve(sequence) - used
            self._dequeue(sequence)

    def _room_for_program(self, sequence: Sequence) -> bool:
        """Whether the program that ``sequence`` starts fits beside those that have started.

            pool    |-- running, locked, held --|-- nobody wants it: free or evictable --|
                                                |-- growth of the started --|-- need --|

        The first one fits always, and so does the next one when all that have started have been idle for a moment: thinking blocks nobody. While few
        sequences run, a step costs nearly the same with one more, and computing something again is cheaper than leaving it empty.
        """
        if not self.programs.busy or self.tree is None or len(self.running) < self.program_floor:
            return True
        running = self.running.values()
        grown = sum(s.generated for s in running if s.hint is not None)  # in the pool, and not yet in the books
        to_come = sum(max(0, s.size - s.owned) for s in running)  # in the books, and not yet in the pool
        growth = max(0, self.programs.growth - grown) + to_come
        return growth + self.programs.need(sequence) <= self._available() - self.tree.held_tokens

    def _cached_whole(self, sequence: Sequence) -> bool:
        if self.tree is None or sequence.size % self.pool.page_size:
            return False
        return self.tree.peek(sequence.tokens[: sequence.size], sequence.namespace)[0] == sequence.size

    def _start(self, sequence: Sequence) -> None:
        """Lock the cached prefix of a waiting sequence; it now runs."""
        sequence.phase = Phase.RUNNING
        self.running[sequence.uid] = sequence
        if self.tree is not None:
            match = self.tree.match(sequence.tokens[: sequence.size], sequence.namespace)
            sequence.node = match.node
            sequence.put_slots(0, match.slots)
            sequence.in_tree = sequence.owned = sequence.computed = match.length

    def _stop(self, sequence: Sequence) -> None:
        """Undo ``_start``: the sequence was not given a chunk and waits where it waited."""
        self._release(sequence)
        del self.running[sequence.uid]
        sequence.phase = Phase.WAITING

    def _dequeue(self, sequence: Sequence) -> None:
        if self.waiting.pop(sequence.uid, None) is None:
            self.preempted.remove(sequence)
        else:
            self.programs.admit(sequence)
        if sequence.admitted_at is None:
            sequence.admitted_at = time.monotonic()

    def _reserve(self, sequence: Sequence) -> int:
        """Tokens held back for a running sequence: the rest of its prefill and a share of its output."""
        output = min(sequence.remaining, _RESERVE_CAP)
        return sequence.size - sequence.computed + int(output * self._new_token_ratio)

    def _schedule_suspect(self, plan: dict[int, tuple[Sequence, int]]) -> None:
        """A step of the first suspect alone."""
        sequence = self.suspects[0]
        if sequence.phase is Phase.WAITING:
            self._start(sequence)
        while True:
            self._prefill(plan, sequence, self.chunk)
            if plan:
                return
            others = [s for s in self.running.values() if s is not sequence]
            if others or not self.leases.give_up():
                self._preempt(min(others, key=self._loss))

    # ---- room

    def _available(self) -> int:
        """Tokens that could be allocated now."""
        evictable = self.tree.evictable_tokens if self.tree is not None else 0
        return self.pool.free_pages * self.pool.page_size + evictable

    def _make_room(self, pages: int) -> bool:
        """Evict until ``pages`` pages are free; False where the tree has not enough that nobody holds.

        Where pages lie in clusters more may go, see ``PagePool.shortage``, but nothing that is kept for a program.
        """
        size = self.pool.page_size
        missing, wanted = (pages - self.pool.free_pages) * size, self.pool.shortage(pages) * size
        if self.tree is not None and wanted > 0 and self.tree.evictable_tokens >= missing:
            spare = self.tree.evictable_tokens - self.tree.held_tokens
            for slots in self.tree.evict(max(missing, min(wanted, spare))):
                self.pool.free(slots)
        return self.pool.free_pages >= pages

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        return (sequence.priority if self.policy == "priority" else 0, sequence.uid)

    def _victim(self) -> Sequence:
        """The running sequence with the least to lose; never the first one."""
        leader = min(self.running.values(), key=self._rank)
        others = [s for s in self.running.values() if s is not leader]
        if not others:
            raise RuntimeError("a sequence that fits alone in the pool found no room alone")
        return min(others, key=self._loss)

    def _loss(self, sequence: Sequence) -> tuple[int, int, int]:
        """What preempting costs: tokens that only this sequence holds; equal ones: the last to come."""
        held = sequence.owned - sequence.in_tree
        node = sequence.node
        while node is not None and node.locks == 1:
            held += node.tokens
            node = node.parent
        return (-sequence.priority if self.policy == "priority" else 0, held, -sequence.uid)

    def _preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to wait; its KV goes to the tree and may be there still when it returns."""
        self._release(sequence)
        del self.running[sequence.uid]
        sequence.phase = Phase.WAITING
        sequence.enqueued_step = self.step
        sequence.preemptions += 1
        insort(self.preempted, sequence, key=lambda s: s.uid)
        self.counters.preemptions += 1
        self._new_token_ratio = min(1.0, self._new_token_ratio + 0.2)

    def _release(self, sequence: Sequence) -> None:
        """Give up everything ``sequence`` holds: computed whole pages to the tree, the rest to the pool.

        |-- in_tree --|-- computed, whole pages --|-- a part of a page, empty pages --|
          unlocked       into the tree, unlocked     freed
        """
        if self.tree is not None and sequence.node is not None:
            if sequence.computed > sequence.in_tree:
                self._grow_tree(sequence, sequence.computed, fresh=False)
            self.tree.unlock(sequence.node)
        self._give_back(sequence, sequence.in_tree, sequence.owned)
        sequence.node = None
        sequence.drafts = 0
        sequence.slots = sequence.slots[:0].copy()
        sequence.in_tree = sequence.owned = sequence.computed = 0

    def _give_back(self, sequence: Sequence, start: int, end: int) -> None:
        """Free pages of ``sequence`` that are not in the tree: when no step in flight writes them."""
        slots = sequence.slots[start:end]
        if any(sequence.uid in flight for flight in self.flights):
            self.retired.append(slots.copy())
        else:
            self.pool.free(slots)

    def _count(self, sequence: Sequence, start: int, end: int) -> None:
        """Book the tokens ``start..end``: first time or again, prompt or output."""
        again = max(0, min(end, sequence.high_water) - start)
        first = max(0, min(end, sequence.prompt_len) - max(start, sequence.high_water))
        sequence.recomputed += again
        sequence.computed_prompt += first
        sequence.high_water = max(sequence.high_water, end)
        self.counters.recomputed += again
        self.counters.computed_prompt += first

    def check_integrity(self) -> None:
        """Raises AssertionError where an invariant of this module, the tree or the pool does not hold. O(pool)."""
        check_integrity(self)
