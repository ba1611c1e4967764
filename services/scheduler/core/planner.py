"""`Planner`: makes one step's plan from the running sequences, the free blocks and the queue.

It decides who gets positions, who is admitted and who is preempted; queues.py and block_manager.py carry that out. A
plan is made in this order: rows that continue an output, since streams are waiting for them; admissions from the head
of the queue; chunks of more than one position, which share the rest of the budget; forks.

With pipeline stages, each stage computes another plan at the same time. The first stage learns what the last one has
sampled from a later plan, so a sequence has its next row once its token is committed; and the rows that continue
outputs are spread over as many plans as there are stages, so that none is without work. The chunks of a prompt need no
such wait: plans in flight may have one each.
"""

from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

from services.scheduler.core.adapters import Adapter, Adapters
from services.scheduler.core.block_manager import Allocation, BlockManager
from services.scheduler.core.counters import Counters
from services.scheduler.core.limits import Limits
from services.scheduler.core.new_grammars import NewGrammars
from services.scheduler.core.plan_builder import PlanBuilder
from services.scheduler.core.policy import LEAST_CHUNK, budget_beside_streams, may_preempt, split_budget
from services.scheduler.core.quarantine import Quarantine
from services.scheduler.core.queues import Queues
from services.scheduler.core.sequence import Sequence, State
from services.scheduler.core.step_time import StepTime


class Budget(NamedTuple):
    """The positions of a step that chunks share."""

    positions: int
    least: int  # that each sequence gets before the first in order gets more
    fitting: int | None = None  # the time that the step should take; None: there is no such time

    def for_line(self, num_sequences: int) -> "Budget":
        """Return the budget of as many sequences."""
        if self.fitting is None:
            return self
        return self._replace(positions=min(self.positions, budget_beside_streams(self.fitting, num_sequences)))


class Planner:
    """Makes plans from the state of the queues and the block manager. It keeps nothing from one plan to the next."""

    def __init__(
        self,
        limits: Limits,
        block_manager: BlockManager,
        queues: Queues,
        adapters: Adapters,
        quarantine: Quarantine,
        counters: Counters,
        step_time: StepTime,
    ) -> None:
        self._limits = limits
        self._step_time = step_time
        self._block_manager = block_manager
        self._queues = queues
        self._adapters = adapters
        self._quarantine = quarantine
        self._counters = counters

    def schedule(self, now: float) -> PlanBuilder:
        """Return the next plan. If it has no rows, there is nothing to do."""
        self._adapters.load_added()
        builder = PlanBuilder()
        chunked = self._continue_outputs(builder)
        budget = self._budget(builder, len(chunked))
        if not builder.num_skipped:
            self._admit(builder, chunked, budget, now)
        if chunked:
            self._share_budget(builder, chunked, budget.for_line(len(chunked)))
        self._block_manager.count_scheduled(builder.num_tokens)
        return builder

    def _budget(self, builder: PlanBuilder, num_chunked: int) -> Budget:
        """Return what sequences share that do not continue their output, of which `num_chunked` run already."""
        rows, limits, block_size = len(builder.rows), self._limits, self._block_manager.block_size
        largest = limits.max_num_batched_tokens - rows
        streaming = rows + builder.num_skipped + builder.num_deferred > 0  # somebody waits for a next token
        fitting = None
        if streaming and limits.max_step_seconds:
            fitting = self._step_time.positions_within(limits.max_step_seconds, rows)
        if fitting is None:
            return Budget(largest, block_size)
        in_line = num_chunked + min(len(self._queues.waiting), len(self._queues.free_slots))
        return Budget(largest, min(block_size, LEAST_CHUNK), fitting).for_line(in_line)

    def _share_budget(self, builder: PlanBuilder, chunked: list[Sequence], budget: Budget) -> None:
        """Add rows of more than one position, and the forks of prompts that they complete."""
        # admissions may have preempted some of them, and one of those may have been admitted again
        running = dict.fromkeys(sequence for sequence in chunked if sequence.state is State.RUNNING)
        chunked = sorted(running, key=lambda sequence: sequence.key)
        demands = [sequence.progress.num_unscheduled for sequence in chunked]
        for sequence, count in zip(chunked, split_budget(budget.positions, demands, budget.least), strict=True):
            if count:
                builder.add_rows([sequence], count)
                if sequence.request.unstarted_samples and sequence.progress.num_tokens > sequence.prompt_len:
                    self._fork(builder, sequence)  # its first output token is being sampled

    def _continue_outputs(self, builder: PlanBuilder) -> list[Sequence]:
        """Add the rows of one position behind the prompt. Return the other sequences that need positions.

        With pipeline stages, some outputs go on in another plan.
        """
        ready: list[Sequence] = []
        chunked: list[Sequence] = []
        pipelined, share = self._limits.num_stages > 1, self._share_of_outputs()
        for sequence in self._queues.running.items:  # a victim stands behind, so removing it does not skip anyone
            progress = sequence.progress
            position = progress.num_scheduled
            if progress.num_tokens - position != 1 or position < sequence.prompt_len:
                if progress.num_unscheduled:
                    chunked.append(sequence)
            elif position >= progress.max_num_computed:
                continue  # its last token is being sampled
            elif pipelined and (position == len(sequence.tokens) or len(ready) == share):
                builder.defer()
            elif position < sequence.table.num_writable or self._extend(builder, sequence):
                ready.append(sequence)
        if pipelined:
            builder.send_sampled(ready)
        builder.add_rows(ready, 1)
        return chunked

    def _share_of_outputs(self) -> int:
        """Return how many outputs a plan goes on with, so that all stages of a pipeline have as many at a time.

        Nobody is passed for long, though the first in order come first: if one was passed by as many plans in a row as
        can be in flight, these would have had more rows of different sequences than there are.
        """
        limits, num_outputs = self._limits, 0
        if limits.num_stages > 1:
            for sequence in self._queues.running.items:
                progress = sequence.progress
                is_last = progress.num_tokens - progress.num_scheduled == 1
                num_outputs += is_last and sequence.prompt_len <= progress.num_scheduled < progress.max_num_computed
        return -(-num_outputs // min(limits.num_stages, limits.depth))

    def _extend(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Make the next position writable. Return False if it has to wait for plans in flight.

        Sequences behind it are preempted until there is a block for it, or will be when those plans are committed.
        """
        block_manager, queues = self._block_manager, self._queues
        while (
            block_manager.needs_block(sequence)
            and block_manager.num_free + block_manager.blocks_pending_free <= builder.num_skipped
        ):
            if queues.running.items[-1] is sequence:
                break
            queues.preempt(queues.running.items[-1])  # which may have been the other holder of a shared block
        if block_manager.needs_block(sequence) and block_manager.num_free <= builder.num_skipped:
            builder.skip()
            return False
        block_manager.extend(sequence, builder)
        return True

    def _admit(self, builder: PlanBuilder, chunked: list[Sequence], budget: Budget, now: float) -> None:
        """Admit waiting sequences in order while there are slots, blocks and positions, and room for their grammars.

        They pass those that lack their adapter, and no others.
        """
        ahead = deque(chunked)
        taken = 0  # positions that go to sequences ahead in the order
        passed: set[Adapter | None] = set()
        new_grammars = NewGrammars(self._queues.running.items)
        while (sequence := self._next_waiting(passed)) is not None:
            adapter = sequence.request.adapter
            if not self._adapters.is_available(adapter, claimed=bool(passed)):
                if not passed:
                    self._adapters.claim(adapter)
                passed.add(adapter)
                continue
            while ahead and ahead[0].key < sequence.key:
                taken += min(ahead.popleft().progress.num_unscheduled, budget.least)
            if taken >= budget.positions or not new_grammars.add(sequence) or not self._find_slot(sequence):
                return
            allocation = self._find_blocks(sequence)
            if allocation is None:
                return
            if adapter is not None and adapter.slot < 0:
                self._adapters.assign_slot(adapter)
                builder.put_adapter(adapter)
            self._queues.dequeue(sequence)
            self._queues.admit(sequence)
            sequence.stats.admit(now - sequence.request.accepted_at)
            self._block_manager.allocate(sequence, allocation, builder)
            sequence.progress.skip(allocation.num_cached)
            self._count_cached(sequence, allocation)
            builder.add_sequence(sequence)
            chunked.append(sequence)
            taken += min(sequence.progress.num_unscheduled, budget.least)

    def _next_waiting(self, passed: Collection[Adapter | None]) -> Sequence | None:
        """Return the sequence to admit next, the first one that uses none of the adapters that are `passed`.

        Return None if none waits, or if plans in flight still name it or one that comes before it.
        """
        stopping: Iterable[Sequence]
        if self._quarantine.active:
            group = [sequence for sequence in self._quarantine.group if sequence.state is State.WAITING]
            able = [sequence for sequence in group if sequence.request.adapter not in passed]
            first, stopping = min(able, key=lambda sequence: sequence.key, default=None), ()
        else:
            first, stopping = self._queues.first_waiting(passed), self._queues.stopping
        if first is None:
            return None
        returning = (sequence.key for sequence in stopping if sequence.finish_reason is None)
        comes_first = min(returning, default=first.key) >= first.key
        return first if comes_first and not self._block_manager.is_leaving(first) else None

    def _find_slot(self, sequence: Sequence) -> bool:
        """Return whether there is a free slot, after a preemption if that is allowed."""
        queues = self._queues
        if not queues.free_slots and not queues.stopping:
            for other in reversed(queues.running.items):
                if may_preempt(self._limits, sequence, other):
                    queues.preempt(other)
                    break
        return bool(queues.free_slots)

    def _find_blocks(self, sequence: Sequence) -> Allocation | None:
        """Return the allocation for a sequence, or None if its blocks are not free, even after allowed preemptions.

        One more block stays free for sequences that run, so that the new one is not preempted soon.
        """
        block_manager, running = self._block_manager, self._queues.running
        while sequence.checked_at_version != (version := (block_manager.free_version, len(running))):
            spare = 1 if running else 0
            allocation = block_manager.match_prefix(sequence, spare)
            if allocation.num_free_needed + spare <= block_manager.num_free:
                return allocation
            if not self._preempt_for(sequence, allocation.num_free_needed, spare):
                sequence.checked_at_version = version  # the answer stays the same until blocks come free
        return None

    def _preempt_for(self, sequence: Sequence, num_needed: int, spare: int) -> bool:
        """Preempt less urgent sequences, if that frees enough blocks. Return whether any were preempted."""
        num_missing = num_needed - self._block_manager.num_free - self._block_manager.blocks_pending_free
        victims: list[Sequence] = []
        for other in reversed(self._queues.running.items):
            if num_missing <= -spare or other.key < sequence.key:
                break
            if may_preempt(self._limits, sequence, other):
                victims.append(other)
                num_missing -= self._block_manager.num_exclusive(other)
        if len(victims) < len(self._queues.running):  # otherwise nobody is left that needs a spare block
            num_missing += spare
        if num_missing > 0:
            return False
        for victim in victims:
            self._queues.preempt(victim)
        return bool(victims)

    def _count_cached(self, sequence: Sequence, allocation: Allocation) -> None:
        if not allocation.resumes and self._block_manager.may_hit(sequence):
            num_from_host = allocation.num_from_host(self._block_manager.block_size)
            num_on_device = allocation.num_cached - num_from_host
            self._counters.count_prefix_query(len(sequence.tokens), num_on_device)
            if self._block_manager.host_tier.pool.num_blocks:
                self._counters.count_host_prefix_query(len(sequence.tokens) - num_on_device, num_from_host)
        in_prompt = min(allocation.num_cached, sequence.prompt_len)
        sequence.stats.note_cached(in_prompt)
        self._counters.count_prompt_tokens(sequence.stats.count_prompt_up_to(in_prompt), cached=True)

    def _fork(self, builder: PlanBuilder, parent: Sequence) -> None:
        """Start the other samples, since this plan completes their prompt. Those that find no free slot wait."""
        queues = self._queues
        children: list[Sequence] = []
        for child in queues.start_samples(parent):
            if queues.free_slots and not self._quarantine.active:  # in quarantine, only members of the group may run
                self._block_manager.fork(parent, child)
                queues.admit(child)
                child.stats.fork_from(parent.stats)
                children.append(child)
            else:
                queues.enqueue(child)
        if children:
            builder.fork(parent, children)
