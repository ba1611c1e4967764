"""`Timeline`: what happened to each request of a record, as events, made while the record is replayed."""

from collections.abc import Mapping
from typing import NamedTuple

from services.scheduler.core import Scheduler
from services.scheduler.core.sequence import Sequence
from services.scheduler.record import (
    Aborted,
    AdapterAdded,
    AdapterAnswered,
    AdapterMessagesTaken,
    AdapterRemoved,
    Began,
    Committed,
    Drained,
    Left,
    Lost,
    Planned,
    Reset,
    Submitted,
)
from services.scheduler.replay import Replayed
from shared.protocol import AdapterLoaded, AdapterRefused, ProgressRow, Refused, StepPlan, Submit

SUBMITTED, REFUSED, ADMITTED, RESUMED, FORKED = "submitted", "refused", "admitted", "resumed", "forked"
CHUNK, TOKENS, PREEMPTED, LOST, ENDED = "chunk", "tokens", "preempted", "lost", "ended"
SUSPECTED = "suspected"
EPOCH, WORKER_LOST, WORKER_LEFT, DRAIN = "epoch", "worker lost", "worker left", "drain"
CACHE_RESET = "cache reset"
ADAPTER = "adapter"

ENGINE = -1
"""The request of events that concern the whole engine."""

ALL_SAMPLES = -1


class Event(NamedTuple):
    """Something that happened to a sample of a request."""

    seconds: float  # since the record began
    request: int
    sample: int
    kind: str
    detail: str = ""
    slot: int = -1  # where the sample runs from now on, or ran until now
    num_tokens: int = 0


class Timeline:
    """The events of a record in order.

    `started` is the core's time when the record began, and `request_ids` are those of the requests that it had then.
    """

    def __init__(self, started: float, request_ids: Mapping[int, str]) -> None:
        self.events: list[Event] = []
        self.request_ids = dict(request_ids)  # the ids that clients see, by the engine's
        self.seconds = 0.0  # of the last input
        self._started = started
        self._admitted: set[tuple[int, int]] = set()  # (request, sample)
        self._running: dict[Sequence, tuple[int, int]] = {}  # slot, and number of preemptions so far

    def see(self, replayed: Replayed) -> None:
        """Add the events of one input."""
        entry, outcome = replayed.input, replayed.outcome
        self.seconds = entry.now - self._started
        match entry:
            case Submitted(_, request):
                self._see_submit(request, outcome if isinstance(outcome, Refused) else None)
            case Planned():
                self._see_plan(outcome if isinstance(outcome, StepPlan) else None, replayed.core)
            case Began(_, epoch, num_blocks):
                self._add(ENGINE, ALL_SAMPLES, EPOCH, f"a worker with {num_blocks} blocks begins epoch {epoch.count}")
            case Lost(_, out_of_memory):
                self._see_end(WORKER_LOST, "out of memory" if out_of_memory else "it died, hung or failed")
            case Left():
                self._see_end(WORKER_LEFT, "it was told to end")
            case Reset():
                self._add(ENGINE, ALL_SAMPLES, CACHE_RESET, "all cached blocks are forgotten")
            case Drained():
                self._add(ENGINE, ALL_SAMPLES, DRAIN, "no new requests are accepted")
            case AdapterAdded(_, name, path, _):
                self._add(ENGINE, ALL_SAMPLES, ADAPTER, f"{name!r} is to be loaded from {path}")
            case AdapterRemoved(_, name):
                self._add(ENGINE, ALL_SAMPLES, ADAPTER, f"{name!r} is removed")
            case AdapterAnswered(_, AdapterLoaded(number, digest)):
                self._add(ENGINE, ALL_SAMPLES, ADAPTER, f"number {number} is loaded, with the digest {digest}")
            case AdapterAnswered(_, AdapterRefused(number, detail)):
                self._add(ENGINE, ALL_SAMPLES, ADAPTER, f"number {number} cannot be loaded: {detail}")
            case Aborted() | Committed() | AdapterMessagesTaken():
                pass  # their rows say it, or the plans
        if isinstance(outcome, list):
            self._see_rows(outcome)

    def _add(self, request: int, sample: int, kind: str, detail: str = "", slot: int = -1, num_tokens: int = 0) -> None:
        self.events.append(Event(self.seconds, request, sample, kind, detail, slot, num_tokens))

    def _see_submit(self, request: Submit, refused: Refused | None) -> None:
        self.request_ids[request.id] = request.request_id
        num_tokens = len(request.tokens) // 4
        detail = f"{request.prompt_len} tokens of prompt"
        if output_len := num_tokens - request.prompt_len:
            detail += f" and {output_len} of output"
        detail += f", n={request.n}, max_tokens={request.sampling.max_tokens}"
        detail += f", adapter {request.adapter!r}" if request.adapter else ""
        self._add(request.id, ALL_SAMPLES, SUBMITTED, detail + (", resumed" if request.resumed else ""))
        if refused is not None:
            self._add(request.id, ALL_SAMPLES, REFUSED, f"{refused.reason.value}: {refused.detail}")

    def _see_plan(self, plan: StepPlan | None, core: Scheduler) -> None:
        self._see_preemptions()
        in_flight = core.last_plan
        if plan is None or in_flight is None:
            return
        entered = {new.slot for new in plan.new_sequences}
        forked = {slot for fork in plan.forks for slot, _ in fork.children}
        for row, sequence in zip(in_flight.rows, in_flight.sequences, strict=True):
            id, sample, slot = sequence.request.id, sequence.sample, row.slot
            if slot in entered:
                kind = RESUMED if (id, sample) in self._admitted else ADMITTED
                self._add(id, sample, kind, f"slot {slot}, {row.start} positions are in its blocks already", slot)
            elif slot in forked:
                self._add(id, sample, FORKED, f"slot {slot}, from the sample that computed the prompt", slot)
            self._admitted.add((id, sample))
            self._running[sequence] = (slot, sequence.stats.num_preemptions)
            if row.count > 1 or (row.count and row.start < sequence.prompt_len):
                self._add(id, sample, CHUNK, f"positions {row.start} to {row.start + row.count - 1}")

    def _see_preemptions(self) -> None:
        for sequence, (slot, num_preemptions) in list(self._running.items()):
            if sequence.stats.num_preemptions > num_preemptions:
                del self._running[sequence]
                detail = f"slot {slot}, after {sequence.output_len} tokens of output"
                self._add(sequence.request.id, sequence.sample, PREEMPTED, detail, slot)
            elif sequence.finish_reason is not None:
                del self._running[sequence]

    def _see_end(self, kind: str, reason: str) -> None:
        """See the end of an epoch."""
        lost = [(sequence, slot) for sequence, (slot, _) in self._running.items() if sequence.finish_reason is None]
        self._add(ENGINE, ALL_SAMPLES, kind, f"{reason}, with {len(lost)} samples")
        self._running.clear()
        for sequence, slot in lost:
            self._add(sequence.request.id, sequence.sample, LOST, f"slot {slot}, with the worker", slot)

    def _see_rows(self, rows: list[ProgressRow]) -> None:
        for row in rows:
            if row.tokens:
                first, last = row.position + 1, row.position + len(row.tokens)
                detail = f"{first}" if first == last else f"{first} to {last}"
                self._add(row.id, row.sample, TOKENS, detail, num_tokens=len(row.tokens))
            elif row.scheduling is not None and row.scheduling.suspicion.cleared_at and row.finish_reason is None:
                suspicion = row.scheduling.suspicion
                detail = f"until {suspicion.cleared_at} positions are computed; deaths alone: {suspicion.deaths_alone}"
                self._add(row.id, row.sample, SUSPECTED, detail)
            if row.finish_reason is not None:
                detail = f": {row.detail}" if row.detail else ""
                self._add(row.id, row.sample, ENDED, row.finish_reason.value + detail)
