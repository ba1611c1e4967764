"""`Roster`: every unfinished request, where each of its sequences is, and the moves between those places.

    enqueue ─▶ waiting ──seat──▶ running ──preempt, end──▶ draining ──▶ waiting again, or finished
                  ▲                 └──────── nothing in flight ────────────┘
                  └─────────────────────────────────────────────────────────

It owns the queue, the slots and what is to be said of them to the worker. Who moves is decided by its callers. A
sequence keeps slot and blocks until no plan in flight names it; `depart` is the only way to lose them.
"""

from array import array
from bisect import bisect_left

import msgspec
from msgspec import Struct

from services.scheduler.core.limits import Limits
from services.scheduler.core.memory import Memory
from services.scheduler.core.policy import Ordered
from services.scheduler.core.sequence import Request, Sequence, State
from shared.protocol import STEP_TOKEN_BUCKETS, FinishReason


class Counters(Struct):
    """What `Snapshot` counts since the start, under the same names."""

    steps: int = 0
    step_tokens: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_TOKEN_BUCKETS) + 1))
    step_tokens_sum: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    accepted: int = 0
    refused: int = 0
    rejected_by_requests: int = 0
    rejected_by_tokens: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    finished_abort: int = 0
    finished_error: int = 0
    worker_losses: int = 0

    def stepped(self, tokens: int) -> None:
        """Count a step that computed so many positions."""
        self.steps += 1
        self.step_tokens[bisect_left(STEP_TOKEN_BUCKETS, tokens)] += 1
        self.step_tokens_sum += tokens

    def rejected(self, *, by_requests: bool) -> None:
        """Count a request that found the queue full: of requests, or else of tokens."""
        if by_requests:
            self.rejected_by_requests += 1
        else:
            self.rejected_by_tokens += 1

    def finished(self, finish: FinishReason) -> None:
        """Count one sequence's end."""
        name = f"finished_{finish.value}"
        setattr(self, name, getattr(self, name) + 1)


class Roster:
    """Requests and sequences of one engine."""

    def __init__(self, limits: Limits, memory: Memory, counters: Counters) -> None:
        self.requests: dict[int, Request] = {}
        self.waiting = Ordered()
        self.waiting_tokens = 0
        self.unborn = 0  # samples of `requests` that are no sequences yet
        self.running = Ordered()
        self.draining: dict[Sequence, None] = {}
        self.coming = 0  # blocks that draining sequences will give back
        self.released: list[int] = []  # slots whose emptiness the worker was not told
        self._memory = memory
        self._counters = counters
        self._max_num_seqs = limits.max_num_seqs
        self.slots = self._all_slots()

    def enqueue(self, sequence: Sequence) -> None:
        """A waiting sequence takes its place in the queue."""
        self.waiting.add(sequence)
        self.waiting_tokens += len(sequence.tokens)

    def seat(self, sequence: Sequence) -> None:
        """A waiting sequence that is not, or no longer, in the queue gets a free slot."""
        sequence.move(State.RUNNING)
        sequence.slot = self.slots.pop()
        self.running.add(sequence)

    def dequeue(self, sequence: Sequence) -> None:
        """Out of the queue."""
        self.waiting.remove(sequence)
        self.waiting_tokens -= len(sequence.tokens)

    def add(self, request: Request, tokens: "array[int]", samples: list[int]) -> None:
        """A new request: its first sample waits, the others begin when the prompt has been computed."""
        self.requests[request.id] = request
        self.unborn += len(samples) - 1
        request.unborn = samples[1:]
        self.enqueue(request.spawn(samples[0], tokens))

    def forget_unborn(self, request: Request, sample: int = -1) -> list[int]:
        """Samples of it, or the one, will never begin. Returns those there were."""
        gone = [other for other in request.unborn if sample in (-1, other)]
        request.unborn = [other for other in request.unborn if other not in gone]
        self.unborn -= len(gone)
        return gone

    def preempt(self, sequence: Sequence) -> None:
        """A running sequence goes back to the queue, as soon as nothing in flight names it."""
        self._counters.preemptions += 1
        sequence.note_preemption()
        self._stop(sequence)

    def end(self, sequence: Sequence, finish: FinishReason) -> None:
        """No more news of it; it holds what it has until nothing in flight names it."""
        sequence.finish_reason = finish
        self._counters.finished(finish)
        self._strike_off(sequence)
        if sequence.state is State.RUNNING:
            self._stop(sequence)
        elif sequence.state is State.WAITING:
            self.dequeue(sequence)
            sequence.move(State.FINISHED)

    def depart(self, sequence: Sequence) -> None:
        """A draining sequence was named by no plan but the one that has just returned: it gives back all it has."""
        del self.draining[sequence]
        self.coming -= sequence.coming
        self._leave(sequence)

    def evacuate(self) -> None:
        """The worker is gone and its memory with it: whatever had a slot goes back to the queue, or is finished."""
        gone = [*self.running.items, *self.draining]
        self.running, self.draining, self.coming = Ordered(), {}, 0
        self.released, self.slots = [], self._all_slots()
        for sequence in gone:
            self._requeue(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if not sequence.in_flight:
            self._leave(sequence)
            return
        sequence.move(State.DRAINING)
        sequence.coming = self._memory.exclusive(sequence)
        self.coming += sequence.coming
        self.draining[sequence] = None

    def _leave(self, sequence: Sequence) -> None:
        self._memory.release(sequence)
        self.slots.append(sequence.slot)
        self.released.append(sequence.slot)
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        sequence.rewind()
        if sequence.finish_reason is not None:
            sequence.move(State.FINISHED)
            return
        sequence.move(State.WAITING)
        self.enqueue(sequence)

    def _strike_off(self, sequence: Sequence) -> None:
        request = sequence.request
        del request.live[sequence.sample]
        if request.unborn and not request.live:  # the one that computed the prompt is gone: another does it
            self.unborn -= 1
            heir = request.spawn(request.unborn.pop(0), sequence.tokens[: request.prompt_len])
            heir.prompt_seen = sequence.prompt_seen
            self.enqueue(heir)
        if not request.live:
            del self.requests[request.id]

    def _all_slots(self) -> list[int]:
        return list(reversed(range(self._max_num_seqs)))  # the lowest is taken first

    def __repr__(self) -> str:
        return f"<Roster {len(self.running)} running, {len(self.draining)} draining, {len(self.waiting)} waiting>"
