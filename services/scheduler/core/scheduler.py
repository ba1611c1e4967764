"""`Scheduler`: the methods of the core. Values in, values out; no sockets, clock, randomness, tensors or text.

The rules of this package, all of which the simulation checks after every step:

- Every accepted request ends in exactly one terminal row for each of its samples; rows of a sample come in order.
- Committed tokens are never lost, sampled again or sent twice, whatever happens to blocks and workers.
- A sequence with a plan in flight keeps its slot and its blocks until that plan's result is back (queues.py);
  block_manager.py says what a block may be used for.
- A result counts only if it answers the oldest plan in flight of the present epoch. Others change nothing.
- The outcome depends on the inputs and their order alone: no sets are iterated, no hashes ordered. The same inputs
  lead to the same state, plan by plan.
- Each piece of state has one owner that changes it; the head of sequence.py lists the owners of a sequence's parts.

Why every accepted request comes to its end (none starves, except by strict priority, which is meant to starve):

1. There is one static order (policy.py). Each sample of a request counts as a little later an arrival than the one
   before, so only finitely many sequences come before any other. A running sequence takes blocks only from those behind
   it, so nobody takes them from the first, and two sequences cannot preempt each other in turn. A sequence that is
   skipped keeps what it has.
2. One sequence of the longest context fits the pool alone (limits.py), and admission allocates blocks for all its
   tokens at once. So the first in order, once running, always gets its next block, now or as soon as the plans that
   name its victims are committed, and it ends after at most `max_num_computed` positions. Then another is the first.
3. Sequences are admitted in order, so the first that waits is admitted at the latest when those before it have ended. A
   plan has room for its grammar, however long that is. Only one that lacks its adapter is passed. When it is the first
   that waits, and those before it have ended, it has the claim (adapters.py) in every plan. If all slots are held, one
   is drained: nobody is admitted to that adapter any more, since all who wait for it stand behind, and those that hold
   it end or are preempted by points 1 and 2. From then on one idle slot is kept for the claim. An idle adapter gives
   way to its adapter in host memory, and a load comes to an end. Then it lacks nothing, and nobody passes it. What
   operators add is loaded by draining a slot too; they add only so many.
   A swapped sequence waits until the plan that copies its blocks to host memory is back, which is in flight by then.
   Host memory is never waited for: if it is full, what is preempted is computed again.
4. A plan has more positions than there are slots, and however long it takes, some of them are for chunks. So the first
   chunk moves on in every step, however many streams there are. With pipeline stages, a plan goes on with a share of
   the streams only, the first in order first; the others have their turn in the next ones (planner.py).
5. A quarantine (quarantine.py) ends. The members of its group advance by points 1 to 4 above, and each death makes
   a group smaller, or is one of a few that its only member survives. Sequences that come from other schedulers cannot
   prolong it for ever: one is taken in at a time, and the others run between two of them.

Where to look: sequence.py (numbers and states), blocks.py, prefix.py and host_tier.py under block_manager.py (tables),
queues.py (places), adapters.py (which are where), planner.py and plan_builder.py (plan a step), commit.py (apply its
result), step_time.py (how long one takes), swap_policy.py (what goes to host memory), new_grammars.py, admission.py,
policy.py, quarantine.py, counters.py.
"""

from collections import deque
from collections.abc import KeysView

import msgspec

from services.scheduler.core.adapters import Adapter, Adapters
from services.scheduler.core.admission import Load, accept
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.commit import commit, match_sampled_rows
from services.scheduler.core.counters import Counters
from services.scheduler.core.limits import NO_RESOURCES, Limits, WorkerResources, check_pool
from services.scheduler.core.plan_builder import InFlightPlan
from services.scheduler.core.planner import Planner
from services.scheduler.core.policy import order_key, sample_spacing
from services.scheduler.core.quarantine import Quarantine
from services.scheduler.core.queues import Queues
from services.scheduler.core.sequence import Request, Sequence
from services.scheduler.core.step_time import StepTime
from services.scheduler.core.swap_policy import SwapPolicy
from shared.protocol import (
    AdapterInfo,
    Epoch,
    FinishReason,
    LoadAdapter,
    ProgressRow,
    Refusal,
    Refused,
    Snapshot,
    StepPlan,
    StepResult,
    Submit,
    UnloadAdapter,
)

MAX_RECENT_ENDS = 32
"""Number of samples that ended last, from which the rate of ends is estimated."""


class Scheduler:
    """The requests of one engine, from submission to their last row."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._counters = Counters()
        self._step_time = StepTime()
        self._swap_policy = SwapPolicy(limits.preemption_mode, limits.block_size, self._step_time)
        self._block_manager = BlockManager(
            limits.num_blocks, limits.block_size, limits.prefix_caching, self._swap_policy
        )
        self._adapters = Adapters()
        self._queues = Queues(limits, self._block_manager, self._adapters, self._counters)
        self._quarantine = Quarantine()
        self._planner = Planner(
            limits, self._block_manager, self._queues, self._adapters, self._quarantine, self._counters, self._step_time
        )
        self._in_flight: deque[InFlightPlan] = deque()
        self._epoch: Epoch | None = None
        self._step = 0
        self._next_serial = 0  # of the next request
        self._draining = False
        self._now = 0.0  # at the last call that told the time
        self._recent_ends: deque[float] = deque(maxlen=MAX_RECENT_ENDS)

    @property
    def idle(self) -> bool:
        """True if no request is unfinished."""
        return not self.unfinished

    @property
    def unfinished(self) -> KeysView[int]:
        """The ids of all requests that have not ended: a view, which changes with them."""
        return self._queues.requests.keys()

    @property
    def request_ids(self) -> dict[int, str]:
        """The ids that clients see of all requests that have not ended, by their ids here."""
        return {id: request.request_id for id, request in self._queues.requests.items()}

    @property
    def in_flight(self) -> int:
        """The number of plans whose result is not back."""
        return len(self._in_flight)

    @property
    def suspects(self) -> list[str]:
        """The ids that clients see of the sequences that are suspects if the worker dies now."""
        return [one.request.request_id for one in self._in_flight_sequences() if one.finish_reason is None]

    @property
    def last_plan(self) -> InFlightPlan | None:
        """The rows and sequences of the plan that was made last, unless its result is back."""
        return self._in_flight[-1] if self._in_flight else None

    @property
    def adapters(self) -> list[AdapterInfo]:
        """The adapters that requests can name."""
        return self._adapters.infos

    def begin_epoch(self, epoch: Epoch, num_blocks: int, worker: WorkerResources = NO_RESOURCES) -> None:
        """Begin an epoch with a worker that was just configured: its memory is empty, and steps count from 0.

        Raise ConfigError if the pool is too small for the longest context that was promised.
        """
        check_pool(self.limits.max_model_len, num_blocks, self.limits.block_size)
        self._forget_worker(num_blocks, worker.num_host_blocks)
        self._step_time.restart(worker.step_seconds, worker.token_seconds)
        self._swap_policy.restart(worker.swap_seconds)
        self._adapters.begin_epoch(worker.max_loras, worker.max_cpu_loras)
        self._epoch = epoch
        self._step = 0

    def lose_worker(self, now: float, *, out_of_memory: bool = False) -> list[ProgressRow]:
        """Give up the worker, which died, hangs or is at fault. There is no plan before the next epoch.

        No committed token is lost. Return a row without tokens for each sequence that is a suspect now, and the last
        rows of a request that killed workers while it ran alone, but not of one that was `out_of_memory`: whether a
        step fits is a matter of settings.
        """
        self._now = now
        if self._epoch is None:
            return []
        self._counters.count_worker_loss()
        in_flight = self._in_flight_sequences()
        culprit = self._quarantine.lose_worker(in_flight, is_evidence=not out_of_memory)
        self._forget_worker(*self._block_manager.sizes)
        rows: list[ProgressRow] = []
        if culprit is not None:
            detail = f"the worker died {culprit.suspicion.deaths_alone} times while it ran this request alone"
            rows = self._finish(culprit.request, culprit.sample, FinishReason.ERROR, detail)
        suspects = [one for one in in_flight if one.finish_reason is None and one.stats.scheduling_changed]
        return rows + [_row_without_tokens(suspect) for suspect in suspects]

    def end_epoch(self) -> None:
        """Let the worker go, which has answered every plan. There is no plan before the next epoch.

        Nothing is lost, and nobody is a suspect: sequences that run go back into the queue.
        """
        assert not self._in_flight, "a worker that owes results is lost, and does not end in order"
        self._forget_worker(*self._block_manager.sizes)

    def submit(self, request: Submit, now: float) -> Refused | None:
        """Accept a request, or return why not. `request.id` must be unique over the life of the core."""
        self._now = now
        adapter = self._adapters.find(request.adapter, request.adapter_digest) if request.adapter else None
        load = Load(
            waiting=self._queues.num_waiting,
            waiting_tokens=self._queues.waiting_tokens,
            draining=self._draining,
            id_in_use=request.id in self.unfinished,
            retry_after=self._retry_after(),
            has_adapter=adapter is not None or not request.adapter,
        )
        tokens = accept(request, self.limits, load)
        if isinstance(tokens, Refused):
            self._counters.count_refusal()
            if tokens.reason is Refusal.QUEUE_FULL:
                by_requests = load.has_too_many_requests(request.n, self.limits)
                self._counters.count_rejection(by_requests=by_requests)
            return tokens
        self._counters.count_acceptance()
        accepted = Request(
            request.id,
            request.prompt_len,
            request.sampling,
            order_key(self.limits, request.priority, request.arrival or now, self._next_serial),
            request.priority,
            now,
            request.samples_before,
            sample_spacing(self.limits),
            request.request_id,
            request.cache_salt,
            adapter,
        )
        self._next_serial += 1
        first = self._queues.add(accepted, tokens, list(range(request.sample, request.sample + request.n)))
        if request.resumed:
            self._quarantine.add_resubmitted(first, request.suspicion, now)
        return None

    def abort(self, id: int, sample: int = -1) -> list[ProgressRow]:
        """End a request, or one sample of it. Return the last rows of the samples that this ended. Idempotent.

        Their blocks become free when no plan in flight names them.
        """
        request = self._queues.requests.get(id)
        return [] if request is None else self._finish(request, sample, FinishReason.ABORT)

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step to send, or None if there is nothing to do or enough plans are in flight."""
        self._now = now
        if self._epoch is None or len(self._in_flight) >= self.limits.depth:
            return None
        if self._quarantine.group_due:
            if self._in_flight:  # a group of suspects runs alone
                return None
            self._start_group()
        builder = self._planner.schedule(now)
        if not builder.rows:
            return None
        builder.swap(*self._block_manager.host_tier.take_moves())
        self._counters.count_swaps(len(builder.swap_out), len(builder.swap_in))
        plan = builder.build(self._epoch, self._step, self._queues.take_released_slots())
        self._in_flight.append(builder.in_flight_plan(self._step))
        self._step += 1
        return plan

    def commit(self, result: StepResult) -> list[ProgressRow]:
        """Apply the result of a step and return the new output. Change nothing if it is not the oldest plan's result.

        Raise ProtocolError, and change nothing, if it lacks a token that was to be sampled: the worker is at fault.
        """
        if not self._in_flight or result.epoch != self._epoch or result.step != self._in_flight[0].step:
            return []
        sampled_rows = match_sampled_rows(self._in_flight[0], result)
        if self._quarantine.active:
            self._quarantine.note_computed(self._in_flight[0])
        plan = self._in_flight.popleft()
        seconds = result.seconds - self._swap_policy.seconds(len(plan.host_blocks))
        self._step_time.observe(plan.num_tokens - plan.num_chunked, plan.num_chunked, seconds)
        progress_rows = commit(plan, sampled_rows, self._queues, self._block_manager, self._counters)
        self._note_ends(progress_rows)
        return progress_rows

    def add_adapter(self, name: str, path: str, *, replaces: bool = False) -> int | str:
        """Have the worker load an adapter. Return its number, or why it cannot be loaded.

        Requests can name it when `adapter_loaded` was called for the number. If it `replaces` one of the same name,
        requests that use that one go on with it.
        """
        added = self._adapters.add(name, path, replaces=replaces)
        return added if isinstance(added, str) else added.number

    def remove_adapter(self, name: str) -> str:
        """Let no new request name an adapter; those that use it go on. Return why not, or '' if that was done."""
        return self._adapters.remove(name)

    def adapter_loaded(self, number: int, digest: str) -> list[ProgressRow]:
        """Note that the worker has loaded an adapter. Return the last rows of its requests if its files have changed.

        They cannot go on with other weights.
        """
        changed = self._adapters.note_loaded(number, digest)
        return self._fail_requests(changed, "its files have changed") if changed is not None else []

    def adapter_refused(self, number: int, detail: str) -> list[ProgressRow]:
        """Note that the worker cannot load an adapter. Return the last rows of the requests that use it."""
        refused = self._adapters.note_refused(number)
        return self._fail_requests(refused, detail) if refused is not None else []

    def take_adapter_messages(self) -> list[LoadAdapter | UnloadAdapter]:
        """Return what the worker has to be told about adapters, before the next plan and after those made so far."""
        return self._adapters.take_messages()

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks. Nothing that was computed before is found by a sequence admitted from now on."""
        self._counters.count_prefix_reset()
        queues = self._queues
        self._block_manager.reset_prefix_cache([*queues.running.items, *queues.stopping, *queues.waiting.items])

    def drain(self) -> None:
        """Accept no new requests from now on."""
        self._draining = True

    def snapshot(self) -> Snapshot:
        """Return the state in numbers."""
        queues, block_manager = self._queues, self._block_manager
        counters = msgspec.structs.asdict(self._counters)
        held_back = self._epoch is None or self._quarantine.active
        waiting_adapters = queues.waiting_adapters()
        num_lacking = sum(count for adapter, count in waiting_adapters.items() if adapter.slot < 0)
        return Snapshot(
            running=len(queues.running) + len(queues.stopping),
            waiting=queues.num_waiting,
            waiting_deferred=(len(queues.waiting) if held_back else num_lacking) + queues.num_unstarted,
            waiting_tokens=queues.waiting_tokens,
            blocks=block_manager.pool.num_blocks,
            blocks_free=block_manager.num_free,
            blocks_cached=len(block_manager.index),
            tokens_held=block_manager.tokens_held,
            block_size=block_manager.block_size,
            in_flight=len(self._in_flight),
            prefix_caching=block_manager.prefix_caching,
            max_model_len=self.limits.max_model_len,
            swapped=block_manager.num_swapped,
            host_blocks=block_manager.host_tier.pool.num_blocks,
            host_blocks_free=block_manager.host_tier.pool.num_blocks - block_manager.host_tier.num_held,
            host_blocks_cached=len(block_manager.host_tier.index),
            max_loras=self._adapters.max_loras,
            adapters_running=self._adapters.held_names,
            adapters_waiting=list(dict.fromkeys(adapter.name for adapter in waiting_adapters)),
            **counters | {"step_tokens": list(self._counters.step_tokens)},  # which grows on
        )

    def _in_flight_sequences(self) -> list[Sequence]:
        return list(dict.fromkeys(sequence for plan in self._in_flight for sequence in plan.sequences))

    def _finish(
        self, request: Request, sample: int, finish_reason: FinishReason, detail: str = ""
    ) -> list[ProgressRow]:
        """End the unfinished samples of a request, or one of them."""
        # After an error, nothing of the request may run again: samples that have not started would run the same prompt.
        failed = finish_reason is FinishReason.ERROR
        rows = self._queues.finish_unstarted(request, finish_reason, -1 if failed else sample, detail)
        ended = [sequence for sequence in request.unfinished.values() if sample in (-1, sequence.sample)]
        for sequence in ended:
            rows.append(_row_without_tokens(sequence, finish_reason, detail))
            self._queues.finish(sequence, finish_reason)
        self._note_ends(rows)
        return rows

    def _fail_requests(self, adapter: Adapter, detail: str) -> list[ProgressRow]:
        """End the requests that use an adapter."""
        detail = f"the adapter {adapter.name!r} cannot be loaded again: {detail}"
        requests = [request for request in self._queues.requests.values() if request.adapter is adapter]
        return [row for one in requests for row in self._finish(one, -1, FinishReason.ERROR, detail)]

    def _note_ends(self, progress_rows: list[ProgressRow]) -> None:
        self._recent_ends.extend(self._now for row in progress_rows if row.finish_reason is not None)
        self._quarantine.update(self._now)

    def _start_group(self) -> None:
        """Let the next group of suspects run, and nothing else."""
        while self._quarantine.group_due:  # all members of a group may have finished meanwhile
            group = self._quarantine.start_group(self._now)
        for sequence in list(self._queues.running.items):
            if self._quarantine.active and sequence not in group:
                self._queues.preempt(sequence)

    def _forget_worker(self, num_blocks: int, num_host_blocks: int) -> None:
        self._epoch = None
        self._in_flight.clear()
        self._queues.reset()
        self._block_manager.reset(num_blocks, num_host_blocks)
        self._adapters.reset()

    def _retry_after(self) -> float:
        """Return the seconds until the queue has room at the rate of the last ends: at least 1, at most 60."""
        if len(self._recent_ends) < 2:
            return 1.0
        return min(max((self._now - self._recent_ends[0]) / len(self._recent_ends), 1.0), 60.0)

    def __repr__(self) -> str:
        return (
            f"<Scheduler step={self._step} in_flight={len(self._in_flight)} {self._queues!r} {self._block_manager!r}>"
        )


def _row_without_tokens(sequence: Sequence, finish_reason: FinishReason | None = None, detail: str = "") -> ProgressRow:
    return ProgressRow(
        sequence.request.id,
        sequence.sample,
        sequence.output_len,
        [],
        finish_reason=finish_reason,
        cached_tokens=max(sequence.stats.num_cached_tokens, 0),
        detail=detail,
        scheduling=sequence.take_scheduling(),
    )
