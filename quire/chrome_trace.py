"""`chrome_trace`: a timeline in the format that chrome://tracing and Perfetto open.

There is one track a slot, with the prefills and decodes that ran there, and the requests that waited are spans of a
second process, above one another. Preemptions and lost workers are instants.
"""

from typing import Any

from quire.timeline import (
    ADMITTED,
    ENDED,
    ENGINE,
    FORKED,
    LOST,
    PREEMPTED,
    REFUSED,
    RESUMED,
    SUBMITTED,
    TOKENS,
    Event,
    Timeline,
)

SLOTS, QUEUE = 1, 2
"""The trace's processes."""

Span = tuple[str, float, int]
"""Name, begin in seconds, and slot; in the queue the slot is -1."""


def chrome_trace(timeline: Timeline, engine: str) -> dict[str, Any]:
    """Return the trace as an object to be encoded as JSON."""
    trace = _Trace()
    for event in timeline.events:
        trace.add(event)
    trace.finish(timeline.seconds)
    names = ((SLOTS, f"engine {engine}: slots"), (QUEUE, f"engine {engine}: queue"))
    processes = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in names]
    slots = [
        {"ph": "M", "name": "thread_name", "pid": SLOTS, "tid": slot, "args": {"name": f"slot {slot}"}}
        for slot in sorted({event.slot for event in timeline.events} - {-1})
    ]
    return {"traceEvents": processes + slots + trace.events, "displayTimeUnit": "ms"}


class _Trace:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._submitted_at: dict[int, float] = {}  # by request
        self._untouched: dict[int, None] = {}  # requests of which no sample has run or ended
        self._open: dict[tuple[int, int], Span] = {}  # by request and sample

    def add(self, event: Event) -> None:
        """Add what an event begins and ends."""
        key = (event.request, event.sample)
        if event.request == ENGINE:
            self._instant(event, SLOTS, 0, "g")
        elif event.kind == SUBMITTED:
            self._submitted_at[event.request] = event.seconds
            self._untouched[event.request] = None
        elif event.kind == REFUSED:
            del self._untouched[event.request]
        elif event.kind in (ADMITTED, RESUMED, FORKED):
            self._close(key, event.seconds)
            self._open[key] = ("decode" if event.kind == FORKED else "prefill", event.seconds, event.slot)
        elif event.kind == TOKENS:
            name, _, slot = self._open.get(key, ("", 0.0, -1))
            if name == "prefill":
                self._close(key, event.seconds)
                self._open[key] = ("decode", event.seconds, slot)
        elif event.kind in (PREEMPTED, LOST):
            self._close(key, event.seconds)
            self._open[key] = ("queued", event.seconds, -1)
            self._instant(event, SLOTS, event.slot, "t")
        elif event.kind == ENDED:
            self._close(key, event.seconds)
            self._open.pop(key, None)

    def finish(self, seconds: float) -> None:
        """End the spans of all requests that are unfinished."""
        for request in list(self._untouched):
            self._close((request, 0), seconds)
        for key in list(self._open):
            self._close(key, seconds)

    def _close(self, key: tuple[int, int], seconds: float) -> None:
        """End the open span of a sample. One that has none has waited since its request was submitted."""
        request, sample = key
        self._untouched.pop(request, None)
        name, begin, slot = self._open.pop(key, ("queued", self._submitted_at.get(request, 0.0), -1))
        begin_us, end_us = begin * 1e6, seconds * 1e6
        span = {"name": f"{request}.{sample} {name}", "cat": name, "ts": begin_us}
        if slot >= 0:
            self.events.append(span | {"ph": "X", "dur": end_us - begin_us, "pid": SLOTS, "tid": slot})
        else:
            place = {"pid": QUEUE, "tid": 0, "id": f"{request}.{sample}"}
            self.events += [span | place | {"ph": "b"}, span | place | {"ph": "e", "ts": end_us}]

    def _instant(self, event: Event, pid: int, tid: int, scope: str) -> None:
        name = event.kind if event.request == ENGINE else f"{event.request}.{event.sample} {event.kind}"
        place = {"ph": "i", "ts": event.seconds * 1e6, "pid": pid, "tid": tid, "s": scope}
        self.events.append({"name": name, "args": {"detail": event.detail}} | place)
