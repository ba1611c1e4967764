"""`Queues`: every unfinished request, where each of its sequences is, and the moves between those places.

    enqueue ──> waiting ──admit──> running ──preempt, finish──> stopping ──> waiting again, or finished
                  ^                  └────── no plan in flight ─────┘
                  └───────────────────────────────────────────────────

It owns the queue, the slots, and which slots the worker has to be told are released. Its callers decide who moves. A
sequence keeps its slot and its blocks until no plan in flight names it.
"""

from array import array
from collections.abc import Collection

from services.scheduler.core.adapters import Adapter, Adapters
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.counters import Counters
from services.scheduler.core.limits import Limits
from services.scheduler.core.policy import SortedSequences
from services.scheduler.core.sequence import Request, Sequence, State
from shared.protocol import FinishReason, ProgressRow


class Queues:
    """The requests and sequences of one engine."""

    def __init__(self, limits: Limits, block_manager: BlockManager, adapters: Adapters, counters: Counters) -> None:
        self.requests: dict[int, Request] = {}  # by id
        self.num_unstarted = 0  # unstarted samples of `requests`
        self.waiting = SortedSequences()
        self.waiting_by_adapter: dict[Adapter | None, SortedSequences] = {}  # the same, without empty ones
        self.waiting_tokens = 0
        self.running = SortedSequences()
        self.stopping: dict[Sequence, None] = {}  # in the order in which they were stopped
        self._block_manager = block_manager
        self._adapters = adapters
        self._counters = counters
        self._max_num_seqs = limits.max_num_seqs
        self.free_slots = self._all_slots()
        self.released_slots: list[int] = []  # not yet named in a plan

    @property
    def num_waiting(self) -> int:
        """The samples that wait, including those that have not started."""
        return len(self.waiting) + self.num_unstarted

    def add(self, request: Request, tokens: "array[int]", samples: list[int]) -> Sequence:
        """Add a request. Its first sample, which is returned, waits; the others start when the prompt is computed."""
        self.requests[request.id] = request
        self._adapters.begin_request(request.adapter)
        request.unstarted_samples = samples[1:]
        self.num_unstarted += len(request.unstarted_samples)
        first = request.start(samples[0], tokens)
        if len(tokens) > first.prompt_len:
            first.stats.count_prompt_up_to(first.prompt_len)  # which was counted when its output began
        self.enqueue(first)
        return first

    def waiting_adapters(self) -> dict[Adapter, int]:
        """Return the adapters that waiting sequences use, and how many sequences use each."""
        return {adapter: len(users) for adapter, users in self.waiting_by_adapter.items() if adapter is not None}

    def first_waiting(self, passed: Collection[Adapter | None]) -> Sequence | None:
        """Return the first waiting sequence that uses none of the adapters that are `passed`."""
        firsts = [users.items[0] for adapter, users in self.waiting_by_adapter.items() if adapter not in passed]
        return min(firsts, key=lambda sequence: sequence.key, default=None)

    def enqueue(self, sequence: Sequence) -> None:
        """Put a waiting sequence into its place in the queue."""
        self.waiting.add(sequence)
        self.waiting_by_adapter.setdefault(sequence.request.adapter, SortedSequences()).add(sequence)
        self.waiting_tokens += len(sequence.tokens)

    def dequeue(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue."""
        adapter = sequence.request.adapter
        self.waiting.remove(sequence)
        self.waiting_by_adapter[adapter].remove(sequence)
        if not self.waiting_by_adapter[adapter]:
            del self.waiting_by_adapter[adapter]
        self.waiting_tokens -= len(sequence.tokens)

    def admit(self, sequence: Sequence) -> None:
        """Give a free slot to a waiting sequence that is not in the queue, and whose adapter is in a slot."""
        sequence.move(State.RUNNING)
        self._adapters.hold(sequence.request.adapter)
        sequence.slot = self.free_slots.pop()
        self.running.add(sequence)

    def start_samples(self, parent: Sequence) -> list[Sequence]:
        """Start the other samples of a sequence's request and return them. They wait, and are in no queue yet."""
        request = parent.request
        children = [request.start(sample, _prompt(parent)) for sample in request.unstarted_samples]
        self.drop_unstarted(request)
        for child in children:
            child.stats.note_cached(parent.stats.num_cached_tokens)
            child.stats.count_prompt_up_to(child.prompt_len)  # which is counted for the parent
        return children

    def drop_unstarted(self, request: Request, sample: int = -1) -> list[int]:
        """Forget the unstarted samples of a request, or only `sample`. Return those that were forgotten."""
        dropped = [other for other in request.unstarted_samples if sample in (-1, other)]
        request.unstarted_samples = [other for other in request.unstarted_samples if other not in dropped]
        self.num_unstarted -= len(dropped)
        return dropped

    def finish_unstarted(
        self, request: Request, finish_reason: FinishReason, sample: int = -1, detail: str = ""
    ) -> list[ProgressRow]:
        """End the unstarted samples of a request, or only `sample`. Return their last rows."""
        dropped = self.drop_unstarted(request, sample)
        for _ in dropped:
            self._counters.count_finish(finish_reason)
        return [ProgressRow(request.id, index, 0, [], finish_reason=finish_reason, detail=detail) for index in dropped]

    def preempt(self, sequence: Sequence) -> None:
        """Stop a running sequence. It goes back to the queue as soon as no plan in flight names it."""
        self._counters.count_preemption()
        sequence.stats.preempt()
        self._stop(sequence)

    def finish(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        """End a sequence. It keeps its slot and blocks until no plan in flight names it."""
        sequence.finish_reason = finish_reason
        self._counters.count_finish(finish_reason)
        self._remove_from_request(sequence)
        if sequence.state is State.RUNNING:
            self._stop(sequence)
        elif sequence.state is State.WAITING:
            self.dequeue(sequence)
            self._block_manager.drop_host_blocks(sequence)
            sequence.move(State.FINISHED)

    def finish_stopping(self, sequence: Sequence) -> None:
        """Release the slot and blocks of a stopping sequence, which no plan in flight names any more."""
        del self.stopping[sequence]
        self._release(sequence)

    def take_released_slots(self) -> list[int]:
        """Return the slots that were released since the last call. The next plan has to name them."""
        released, self.released_slots = self.released_slots, []
        return released

    def reset(self) -> None:
        """Take back all slots and blocks, since the worker is lost. Sequences go back to the queue, or are finished."""
        for sequence in self.waiting.items:
            self._block_manager.drop_host_blocks(sequence)
        holders = [*self.running.items, *self.stopping]
        self.running, self.stopping = SortedSequences(), {}
        for sequence in holders:
            self._release(sequence, may_swap=False)
        self.free_slots, self.released_slots = self._all_slots(), []  # the next worker has none of them in use

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if not sequence.progress.in_flight:
            self._release(sequence)
            return
        sequence.move(State.STOPPING)
        self.stopping[sequence] = None
        self._block_manager.expect_release(sequence)

    def _release(self, sequence: Sequence, *, may_swap: bool = True) -> None:
        if may_swap and sequence.finish_reason is None and self._block_manager.swap_out(sequence):
            self._counters.count_swapped_preemption()
        else:
            self._block_manager.release(sequence)
        self._adapters.release(sequence.request.adapter)
        self.free_slots.append(sequence.slot)
        self.released_slots.append(sequence.slot)
        sequence.rewind()
        if sequence.finish_reason is not None:
            sequence.move(State.FINISHED)
            return
        sequence.move(State.WAITING)
        self.enqueue(sequence)

    def _remove_from_request(self, sequence: Sequence) -> None:
        request = sequence.request
        del request.unfinished[sequence.sample]
        if request.unstarted_samples and not request.unfinished:  # another sample has to compute the prompt
            sample = request.unstarted_samples[0]
            self.drop_unstarted(request, sample)
            successor = request.start(sample, _prompt(sequence))
            successor.stats.count_prompt_up_to(sequence.stats.num_prompt_counted)  # which is counted already
            self.enqueue(successor)
        if not request.unfinished:
            del self.requests[request.id]
            self._adapters.end_request(request.adapter)

    def _all_slots(self) -> list[int]:
        return list(reversed(range(self._max_num_seqs)))  # the lowest is taken first

    def __repr__(self) -> str:
        return f"<Queues {len(self.running)} running, {len(self.stopping)} stopping, {len(self.waiting)} waiting>"


def _prompt(sequence: Sequence) -> "array[int]":
    return sequence.tokens[: sequence.prompt_len]
