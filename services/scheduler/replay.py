"""`replay`: feed a record to a core, and check that it makes the same plans and ends in the same state."""

from collections.abc import Iterator
from typing import NamedTuple

from services.scheduler.core import Scheduler
from services.scheduler.core.state import dump_state, load_state
from services.scheduler.record import (
    Aborted,
    AdapterAdded,
    AdapterAnswered,
    AdapterMessagesTaken,
    AdapterRemoved,
    Began,
    Committed,
    Drained,
    Ended,
    Input,
    Left,
    Lost,
    Planned,
    Record,
    Reset,
    Submitted,
    plan_digest,
    state_digest,
)
from shared.errors import ConfigError, ProtocolError, ReplayFailure
from shared.protocol import AdapterLoaded, AdapterRefused, ProgressRow, Refused, StepPlan

Outcome = StepPlan | Refused | list[ProgressRow] | None


class Replayed(NamedTuple):
    """An input of a record, and what the core made of it."""

    number: int  # of the input, from 0
    input: Input
    outcome: Outcome
    core: Scheduler  # as it is after this input: the next one changes it


def load_core(record: Record) -> Scheduler:
    """Return a core as it was at the beginning of a record. Raise `ConfigError` if another version has written it."""
    try:
        return load_state(record.head.state)
    except ProtocolError as error:
        raise ConfigError(f"{record.path}: {error}") from error


def replay(record: Record, core: Scheduler) -> Iterator[Replayed]:
    """Feed a record to the core that `load_core` made of it, and yield after each input.

    Raise `ReplayFailure` at the first plan that differs from the one that was made when the record was written, at an
    input of which the core raises, or at the end if the state differs.
    """
    num_plans = 0
    for number, entry in enumerate(record.entries):
        if isinstance(entry, Ended):
            if entry.digest != state_digest(dump_state(core)):
                raise ReplayFailure(f"{record.path}: the plans are the same, but the state at the end differs")
            return
        try:
            outcome = _apply(core, entry)
        except Exception as error:
            raise ReplayFailure(f"{record.path}: the core fails at input {number}, {entry!r}: {error!r}") from error
        if isinstance(entry, Planned):
            if plan_digest(outcome if isinstance(outcome, StepPlan) else None) != entry.digest:
                raise ReplayFailure(_difference(record, num_plans, number, entry, outcome))
            num_plans += entry.digest is not None
        yield Replayed(number, entry, outcome, core)


def _apply(core: Scheduler, entry: Input) -> Outcome:
    match entry:
        case Began(_, epoch, num_blocks, worker):
            core.begin_epoch(epoch, num_blocks, worker)
        case Submitted(now, request):
            return core.submit(request, now)
        case Aborted(_, id, sample):
            return core.abort(id, sample)
        case Planned(now, _):
            return core.plan(now)
        case Committed(_, result):
            try:
                return core.commit(result)
            except ProtocolError:  # the worker was at fault, and the core has changed nothing
                return []
        case Lost(now, out_of_memory):
            return core.lose_worker(now, out_of_memory=out_of_memory)
        case Left():
            core.end_epoch()
        case Reset():
            core.reset_prefix_cache()
        case Drained():
            core.drain()
        case AdapterAdded(_, name, path, replaces):
            core.add_adapter(name, path, replaces=replaces)
        case AdapterRemoved(_, name):
            core.remove_adapter(name)
        case AdapterAnswered(_, AdapterLoaded(number, digest)):
            return core.adapter_loaded(number, digest)
        case AdapterAnswered(_, AdapterRefused(number, detail)):
            return core.adapter_refused(number, detail)
        case AdapterMessagesTaken():
            core.take_adapter_messages()
    return None


def _difference(record: Record, num_plans: int, number: int, planned: Planned, outcome: Outcome) -> str:
    seconds = planned.now - record.head.now
    where = f"{record.path}: plan {num_plans} (input {number}, {seconds:+.6f} s) differs from the recorded one: "
    if not isinstance(outcome, StepPlan):
        return where + "now there is none"
    now = f"now it is step {outcome.step} with {len(outcome.rows)} rows"
    return where + (now if planned.digest is not None else f"there was none, {now}")
