"""`quire replay`: feeds a record of a scheduler to its core again, and tells what happened."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from quire.chrome_trace import chrome_trace
from quire.timeline import ENDED, ENGINE, PREEMPTED, REFUSED, SUBMITTED, TOKENS, WORKER_LOST, Event, Timeline
from services.scheduler.record import Ended, Entry, Planned, Record, read_record
from services.scheduler.replay import load_core, replay
from shared.errors import ConfigError, ReplayFailure

MAX_LISTED = 20
"""Maximum number of preemptions, or of worker losses, that a summary lists."""


class ReplayConfig(Struct, frozen=True, kw_only=True):
    """The flags of `quire replay`."""

    request: Annotated[
        str,
        Meta(
            description="Print the timeline of the request of this id: that of its response, its X-Request-Id, or its "
            "number in the summary."
        ),
    ] = ""
    trace: Annotated[str, Meta(description="File for a trace that chrome://tracing and Perfetto open.")] = ""


def replay_file(path: Path, config: ReplayConfig) -> Iterator[str]:
    """Yield the lines to print. Raise `ReplayFailure` after them if the replay goes another way than the record."""
    record = read_record(path)
    core = load_core(record)
    timeline = Timeline(record.head.now, core.request_ids)
    failure, num_inputs = None, 0
    try:
        for replayed in replay(record, core):
            timeline.see(replayed)
            num_inputs += 1
    except ReplayFailure as error:  # what came before it is worth seeing
        failure = error
    if config.trace:
        _write_trace(config.trace, chrome_trace(timeline, record.head.engine))
    yield from _describe(record)
    if not config.request:
        yield from _summary(record.entries[:num_inputs], timeline, len(core.unfinished))
        if failure is None:
            as_recorded = isinstance(record.entries[-1], Ended) if record.entries else False
            yield "the state at the end is " + ("the recorded one" if as_recorded else "not recorded")
    else:
        for number in _find_requests(timeline, config.request):
            yield from _request_lines(timeline, number)
    if failure is not None:
        raise failure


def _write_trace(path: str, trace: dict[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from error


def _describe(record: Record) -> Iterator[str]:
    head = record.head
    started = datetime.fromtimestamp(head.started, UTC)
    yield f"engine {head.engine}, model {head.model}, from {started:%Y-%m-%d %H:%M:%S.%f} UTC on"
    if head.continues:
        yield "an earlier file of the same process holds what came before"
    if record.torn_bytes:
        yield f"the last {record.torn_bytes} bytes are dropped: of an entry that was being written"


def _summary(entries: list[Entry], timeline: Timeline, num_unfinished: int) -> Iterator[str]:
    kinds = Counter(event.kind for event in timeline.events)
    ends = Counter(event.detail.partition(":")[0] for event in timeline.events if event.kind == ENDED)
    num_plans = sum(isinstance(entry, Planned) and entry.digest is not None for entry in entries)
    yield f"{len(entries)} inputs in {timeline.seconds:.3f} s, and {num_plans} plans, which are the recorded ones"
    yield f"requests: {kinds[SUBMITTED]} submitted, {kinds[REFUSED]} refused, {num_unfinished} unfinished at the end"
    yield f"samples ended: {', '.join(f'{count} {reason}' for reason, count in sorted(ends.items())) or 'none'}"
    yield f"tokens generated: {sum(event.num_tokens for event in timeline.events if event.kind == TOKENS)}"
    for kind, title in ((PREEMPTED, "preemptions"), (WORKER_LOST, "worker losses")):
        yield f"{title}: {kinds[kind]}"
        events = [event for event in timeline.events if event.kind == kind]
        yield from (_line(event, with_request=True) for event in events[:MAX_LISTED])
        if len(events) > MAX_LISTED:
            yield f"  ... and {len(events) - MAX_LISTED} more"


def _find_requests(timeline: Timeline, request_id: str) -> list[int]:
    """Return the engine's ids of a request: several if it had several prompts, or was submitted again.

    Raise `ConfigError` if there is none.
    """
    known = sorted({event.request for event in timeline.events} - {ENGINE})
    pattern = re.compile(rf"((chat)?cmpl-|resp_)?{re.escape(request_id)}(-\d+)?")  # the last are the numbers of prompts
    requests = [request for request in known if pattern.fullmatch(timeline.request_ids.get(request, ""))]
    requests = requests or [request for request in known if str(request) == request_id]
    if not requests:
        said = f"it has {len(known)} from {known[0]} to {known[-1]}" if known else "it has none"
        raise ConfigError(f"--request {request_id}: the record has no such request; {said}")
    return requests


def _request_lines(timeline: Timeline, request: int) -> Iterator[str]:
    events = timeline.events
    own = [index for index, event in enumerate(events) if event.request == request]
    name = f" ({request_id})" if (request_id := timeline.request_ids.get(request)) else ""
    yield f"request {request}{name}, in seconds since the record began; tokens are counted within the output"
    if events[own[0]].kind != SUBMITTED:
        yield "it was submitted before"
    life = (event for event in events[own[0] : own[-1] + 1] if event.request in (request, ENGINE))
    yield from (_line(event, with_request=False) for event in _merge_tokens(life))


def _merge_tokens(events: Iterable[Event]) -> list[Event]:
    """Return the events with the tokens of each sample that follow each other as one."""
    merged: list[Event] = []
    last: dict[int, int] = {}  # index of a sample's last event
    for event in events:
        index = last.get(event.sample)
        if index is not None and merged[index].kind == event.kind == TOKENS:
            first = merged[index].detail.partition(" ")[0]
            final = event.detail.rpartition(" ")[2]
            merged[index] = merged[index]._replace(detail=f"{first} to {final}, until {event.seconds:.6f}")
        else:
            last[event.sample] = len(merged)
            merged.append(event)
    return merged


def _line(event: Event, *, with_request: bool) -> str:
    sample = "" if event.sample < 0 else f".{event.sample}"
    who = "" if event.request == ENGINE else f"{event.request}{sample}" if with_request else sample
    return f"  {event.seconds:12.6f}  {who:<8} {event.kind:<12} {event.detail}".rstrip()
