"""`Planner`: makes one step's plan out of what is known, the memory and the queue.

It decides who gets positions, who is admitted and who is pushed out; the moves themselves are the roster's and the
memory's. A plan is drawn in this order: rows that continue an output, since streams are waiting for them; admissions
from the head of the queue; longer stretches, which share what is left of the budget; forks.
"""

from collections import deque

from services.scheduler.core.draft import Draft
from services.scheduler.core.limits import Limits
from services.scheduler.core.memory import Claim, Memory
from services.scheduler.core.policy import may_displace, share
from services.scheduler.core.quarantine import Quarantine
from services.scheduler.core.roster import Counters, Roster
from services.scheduler.core.sequence import Sequence, State


class Planner:
    """Draws plans over a roster and a memory; keeps nothing from one plan to the next."""

    def __init__(
        self, limits: Limits, memory: Memory, roster: Roster, quarantine: Quarantine, counters: Counters
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._roster = roster
        self._quarantine = quarantine
        self._counters = counters
        self._owed = 0  # blocks that sequences skipped in this plan are waiting for

    def draw(self, now: float) -> Draft:
        """The next plan; without rows, there is nothing to do."""
        draft = Draft()
        stretches = self._continue(draft)
        budget = self._limits.max_num_batched_tokens - len(draft.rows)
        if not self._owed:
            self._admit(draft, stretches, budget, now)
        # some were displaced by what was admitted, and one of those may be back already
        running = dict.fromkeys(sequence for sequence in stretches if sequence.state is State.RUNNING)
        stretches = sorted(running, key=lambda sequence: sequence.key)
        wants = [sequence.left for sequence in stretches]
        for sequence, count in zip(stretches, share(budget, wants, self._memory.block_size), strict=True):
            if count:
                draft.add_row(sequence, count)
                if sequence.request.unborn and sequence.known > sequence.prompt_len:  # its first token is on the way
                    self._fork(draft, sequence)
        self._memory.stored += draft.tokens
        return draft

    def _continue(self, draft: Draft) -> list[Sequence]:
        """Rows of one position behind the prompt. Returns the other sequences that want positions."""
        self._owed = 0
        stretches: list[Sequence] = []
        for sequence in self._roster.running.items:  # a victim stands behind, so removing it does not skip anyone
            position = sequence.planned
            if sequence.known - position != 1 or position < sequence.prompt_len:
                if sequence.left:
                    stretches.append(sequence)
            elif position < sequence.end and (position < sequence.room or self._extend(draft, sequence)):
                draft.add_row(sequence, 1)
        return stretches

    def _extend(self, draft: Draft, sequence: Sequence) -> bool:
        """Room for the next position, now or not in this step. Those behind are preempted until a block is coming."""
        memory, roster = self._memory, self._roster
        while memory.must_take(sequence) and memory.free + roster.coming <= self._owed:
            if roster.running.items[-1] is sequence:
                break
            roster.preempt(roster.running.items[-1])  # which may have been the other holder of a shared block
        if memory.must_take(sequence) and memory.free <= self._owed:
            self._owed += 1
            return False
        memory.extend(sequence, draft)
        return True

    def _admit(self, draft: Draft, stretches: list[Sequence], budget: int, now: float) -> None:
        """Seat waiting sequences in order, none past another, while there are slots, blocks and positions for them."""
        least = self._memory.block_size
        running, ahead = deque(stretches), 0  # positions that those ahead in the order are sure of
        while (sequence := self._next_in_line()) is not None:
            while running and running[0].key < sequence.key:
                ahead += min(running.popleft().left, least)
            if ahead >= budget or not self._find_slot(sequence) or (claim := self._find_blocks(sequence)) is None:
                return
            self._roster.dequeue(sequence)
            self._roster.seat(sequence)
            sequence.note_admission(now)
            found = self._memory.place(sequence, claim, draft)
            self._count_hits(sequence, found)
            draft.admit(sequence)
            stretches.append(sequence)
            ahead += min(sequence.left, least)

    def _next_in_line(self) -> Sequence | None:
        if self._quarantine.active:
            trial = [sequence for sequence in self._quarantine.trial if sequence.state is State.WAITING]
            return min(trial, key=lambda sequence: sequence.key, default=None)
        if not self._roster.waiting.items:
            return None
        head = self._roster.waiting.items[0]
        returning = (sequence.key for sequence in self._roster.draining if sequence.finish_reason is None)
        return None if min(returning, default=head.key) < head.key else head

    def _find_slot(self, sequence: Sequence) -> bool:
        roster = self._roster
        if not roster.slots and not roster.draining:
            for other in reversed(roster.running.items):
                if may_displace(self._limits, sequence, other):
                    roster.preempt(other)
                    break
        return bool(roster.slots)

    def _find_blocks(self, sequence: Sequence) -> Claim | None:
        """What it takes, if that is free. One block more stays free for those that run, lest it be pushed out soon."""
        memory, running = self._memory, self._roster.running
        while sequence.tried != (state := (memory.gifts, len(running))):
            spare = 1 if running else 0
            claim = memory.survey(sequence, spare)
            if claim.need + spare <= memory.free:
                return claim
            if not self._displace(sequence, claim.need, spare):
                sequence.tried = state  # nothing better is to be found until blocks come free
        return None

    def _displace(self, sequence: Sequence, need: int, spare: int) -> bool:
        """Preempt less urgent sequences, if that makes as many blocks come free as it takes; whether any were."""
        short = need - self._memory.free - self._roster.coming
        victims: list[Sequence] = []
        for other in reversed(self._roster.running.items):
            if short <= -spare or other.key < sequence.key:
                break
            if may_displace(self._limits, sequence, other):
                victims.append(other)
                short -= self._memory.exclusive(other)
        if len(victims) < len(self._roster.running):  # else nobody is left to spare a block for
            short += spare
        if short > 0:
            return False
        for victim in victims:
            self._roster.preempt(victim)
        return bool(victims)

    def _count_hits(self, sequence: Sequence, found: int) -> None:
        prompt = min(found, sequence.prompt_len)
        if self._memory.may_hit(sequence):
            self._counters.prefix_queries += len(sequence.tokens)
            self._counters.prefix_hits += found
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = prompt
        if prompt > sequence.prompt_seen:
            self._counters.prompt_tokens += prompt - sequence.prompt_seen
            self._counters.prompt_tokens_cached += prompt - sequence.prompt_seen
            sequence.prompt_seen = prompt

    def _fork(self, draft: Draft, parent: Sequence) -> None:
        """The prompt will have been computed: the other samples begin, in free slots as far as there are any."""
        request, roster = parent.request, self._roster
        children: list[Sequence] = []
        for sample in request.unborn:
            child = request.spawn(sample, parent.tokens[: parent.prompt_len])
            child.cached_tokens, child.prompt_seen = parent.cached_tokens, parent.prompt_len
            if roster.slots and not self._quarantine.active:  # a trial runs its members only
                self._memory.fork(parent, child)
                roster.seat(child)
                child.note_admission_with(parent)
                child.in_flight = 1
                children.append(child)
            else:
                roster.enqueue(child)
        roster.unborn -= len(request.unborn)
        request.unborn = []
        if children:
            draft.fork(parent, children)
