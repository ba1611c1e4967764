"""`Scheduler`: the verbs of the core. Values in, values out; no sockets, clock, randomness, tensors or text.

The rules of this package, all of which the simulation checks after every step:

- Every accepted request ends in exactly one terminal row for each of its samples; rows of a sample come in order.
- Tokens once committed are never lost, sampled again or told twice, whatever happens to blocks and workers.
- A sequence with a plan in flight keeps its slot and its blocks until that plan is back (roster.py); what a block may
  be used for is said in memory.py.
- Results count only for the oldest plan in flight of the present epoch. Others change nothing.
- What happens depends on the inputs and their order only: no sets are iterated, no hashes ordered. The same inputs
  lead to the same state, plan by plan.

Why everything accepted comes to its end (no request starves, except by strict priority, which is meant to):

1. One static order (policy.py), in which a sequence's turn among its siblings is counted as so much later an arrival,
   so that only finitely many come before it. A running sequence takes blocks only from those behind it, so nobody
   takes them from the first, and two sequences cannot push each other out in turn. Whoever is skipped keeps what it
   has.
2. One sequence of the longest context fits the pool alone (limits.py), and admission takes it to have all known
   tokens placed at once. So the first in order, once running, always gets its next block, now or as soon as the plans
   that name its victims are back, and it ends after at most `limit` positions. Then another is the first.
3. A waiting sequence is not passed by others behind it, so the first in order is admitted at the latest when those
   before it have ended.
4. A plan has more positions than there are slots, and every admitted sequence gets at least one, so some stretch
   moves on in every step, however many streams there are.
5. A trial of suspects (quarantine.py) ends, since its members move on by 1 to 4 among themselves, and each death makes
   a group smaller or condemns its only member.

Where to look: sequence.py (numbers and states), blocks.py and prefix.py under memory.py (tables), roster.py (places),
planner.py (a step is planned), settlement.py (a step takes effect), admission.py, policy.py, quarantine.py.
"""

from collections import deque
from collections.abc import KeysView

import msgspec

from services.scheduler.core.admission import Load, accept
from services.scheduler.core.draft import Flight
from services.scheduler.core.limits import Limits, check_pool
from services.scheduler.core.memory import Memory
from services.scheduler.core.planner import Planner
from services.scheduler.core.policy import rank, spread
from services.scheduler.core.quarantine import Quarantine
from services.scheduler.core.roster import Counters, Roster
from services.scheduler.core.sequence import Request, Sequence
from services.scheduler.core.settlement import match, settle
from shared.protocol import Epoch, FinishReason, ProgressRow, Refusal, Refused, Snapshot, StepPlan, StepResult, Submit

RECENT = 32
"""Ends of sequences from which the rate of ends is estimated."""


class Scheduler:
    """One engine's requests, from submission to their last row."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._counters = Counters()
        self._memory = Memory(limits.num_blocks, limits.block_size, limits.prefix_caching)
        self._roster = Roster(limits, self._memory, self._counters)
        self._quarantine = Quarantine()
        self._planner = Planner(limits, self._memory, self._roster, self._quarantine, self._counters)
        self._flights: deque[Flight] = deque()
        self._epoch: Epoch | None = None
        self._step = 0
        self._serial = 0  # of the next request
        self._draining = False
        self._clock = 0.0  # the latest `now`
        self._ends: deque[float] = deque(maxlen=RECENT)

    @property
    def idle(self) -> bool:
        """No request is unfinished."""
        return not self._roster.requests

    @property
    def unfinished(self) -> KeysView[int]:
        """The ids of all requests that have not ended: a view, which changes with them."""
        return self._roster.requests.keys()

    @property
    def in_flight(self) -> int:
        """Plans whose result is not back."""
        return len(self._flights)

    def begin_epoch(self, epoch: Epoch, num_blocks: int) -> None:
        """A worker group is configured: its memory is empty, and steps count from 0.

        ConfigError if the pool is too small for the longest context that was promised.
        """
        check_pool(self.limits.max_model_len, num_blocks, self.limits.block_size)
        self._forget_worker(num_blocks)
        self._epoch = epoch
        self._step = 0

    def lose_worker(self, now: float) -> list[ProgressRow]:
        """The group died, hangs or is at fault: no plan before the next epoch, and no token that was told is lost.

        Returns the end of a request that killed a worker twice while it ran alone.
        """
        self._clock = now
        if self._epoch is None:
            return []
        self._counters.worker_losses += 1
        named = dict.fromkeys(sequence for flight in self._flights for sequence in flight.sequences)
        condemned = self._quarantine.accuse(list(named))
        self._forget_worker(self._memory.pool.num_blocks)
        if condemned is None:
            return []
        return self._end(
            condemned.request, condemned.sample, FinishReason.ERROR, "the worker died twice on this request alone"
        )

    def submit(self, request: Submit, now: float) -> Refused | None:
        """Accept a request, or say why not. `request.id` must be unique over the life of the core."""
        self._clock = now
        roster = self._roster
        load = Load(
            waiting=len(roster.waiting) + roster.unborn,
            waiting_tokens=roster.waiting_tokens,
            draining=self._draining,
            id_in_use=request.id in roster.requests,
            retry_after=self._retry_after(),
        )
        verdict = accept(request, self.limits, load)
        if isinstance(verdict, Refused):
            self._counters.refused += 1
            if verdict.reason is Refusal.QUEUE_FULL:
                self._counters.rejected(by_requests=load.has_too_many_requests(request.n, self.limits))
            return verdict
        place = rank(self.limits, request.priority, request.arrival or now, self._serial)
        self._serial += 1
        self._counters.accepted += 1
        made = Request(
            request.id,
            request.prompt_len,
            request.sampling,
            place,
            request.priority,
            now,
            request.samples_before,
            spread(self.limits),
        )
        roster.add(made, verdict, list(range(request.sample, request.sample + request.n)))
        return None

    def abort(self, id: int, sample: int = -1) -> list[ProgressRow]:
        """Stop a request, or one sample of it. Idempotent. Returns the last rows of those it ended.

        What they hold comes free when the plans in flight are back.
        """
        request = self._roster.requests.get(id)
        return [] if request is None else self._end(request, sample, FinishReason.ABORT)

    def plan(self, now: float) -> StepPlan | None:
        """The next step to send; None if there is nothing to do, or as many plans are in flight as may be."""
        self._clock = now
        if self._epoch is None or len(self._flights) >= self.limits.depth:
            return None
        if self._quarantine.due:
            if self._flights:  # a trial has the worker to itself
                return None
            self._begin_trial()
        draft = self._planner.draw(now)
        if not draft.rows:
            return None
        released, self._roster.released = self._roster.released, []
        plan = draft.plan(self._epoch, self._step, released)
        self._flights.append(draft.flight(self._step))
        self._step += 1
        return plan

    def commit(self, result: StepResult) -> list[ProgressRow]:
        """A step is done. Returns its news; nothing, and nothing changes, if it is not the oldest plan's result.

        ProtocolError, and nothing changes, if it lacks a token that was to be sampled: the worker is at fault.
        """
        if not self._flights or result.epoch != self._epoch or result.step != self._flights[0].step:
            return []
        answers = match(self._flights[0], result)
        news = settle(self._flights.popleft(), answers, self._roster, self._memory, self._counters)
        self._note_ends(news)
        return news

    def drain(self) -> None:
        """Accept no new requests from now on."""
        self._draining = True

    def snapshot(self) -> Snapshot:
        """The state in numbers."""
        roster, memory = self._roster, self._memory
        counters = msgspec.structs.asdict(self._counters)
        held_back = self._epoch is None or self._quarantine.active
        return Snapshot(
            running=len(roster.running) + len(roster.draining),
            waiting=len(roster.waiting) + roster.unborn,
            waiting_deferred=(len(roster.waiting) if held_back else 0) + roster.unborn,
            waiting_tokens=roster.waiting_tokens,
            blocks=memory.pool.num_blocks,
            blocks_free=memory.free,
            blocks_cached=len(memory.index),
            tokens_held=memory.stored,
            block_size=memory.block_size,
            in_flight=len(self._flights),
            prefix_caching=memory.prefix_caching,
            max_model_len=self.limits.max_model_len,
            **counters | {"step_tokens": list(self._counters.step_tokens)},  # which grows on
        )

    def _end(self, request: Request, sample: int, finish: FinishReason, detail: str = "") -> list[ProgressRow]:
        """End what is left of a request, or of one sample."""
        condemned = (
            finish is FinishReason.ERROR
        )  # nothing of it shall run again, and samples to come would run the same prompt
        unborn = self._roster.forget_unborn(request, -1 if condemned else sample)
        ended = [sequence for sequence in request.live.values() if sample in (-1, sequence.sample)]
        rows = [ProgressRow(request.id, index, 0, [], finish_reason=finish, detail=detail) for index in unborn]
        for _ in unborn:
            self._counters.finished(finish)
        for sequence in ended:
            rows.append(_last_row(sequence, finish, detail))
            self._roster.end(sequence, finish)
        self._note_ends(rows)
        return rows

    def _note_ends(self, news: list[ProgressRow]) -> None:
        self._ends.extend(self._clock for row in news if row.finish_reason is not None)
        if self._quarantine.active:
            self._quarantine.settle()

    def _begin_trial(self) -> None:
        while self._quarantine.due:
            trial = self._quarantine.begin()
        for sequence in list(self._roster.running.items):
            if self._quarantine.active and sequence not in trial:
                self._roster.preempt(sequence)

    def _forget_worker(self, num_blocks: int) -> None:
        self._epoch = None
        self._flights.clear()
        self._roster.evacuate()
        self._memory.reset(num_blocks)

    def _retry_after(self) -> float:
        """Seconds until a place comes free at the rate of the last ends: at least 1, at most 60."""
        if len(self._ends) < 2:
            return 1.0
        return min(max((self._clock - self._ends[0]) / len(self._ends), 1.0), 60.0)

    def __repr__(self) -> str:
        return f"<Scheduler step={self._step} in_flight={len(self._flights)} {self._roster!r} {self._memory!r}>"


def _last_row(sequence: Sequence, finish: FinishReason, detail: str) -> ProgressRow:
    cached = max(sequence.cached_tokens, 0)
    return ProgressRow(
        sequence.request.id,
        sequence.sample,
        sequence.output_len,
        [],
        finish_reason=finish,
        cached_tokens=cached,
        detail=detail,
        scheduling=sequence.scheduling,
    )
