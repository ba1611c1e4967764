"""The scheduler's HTTP endpoint, in threads of its own: `/metrics` for Prometheus, `/health` for an orchestrator.

It reads only values that the loop publishes, never sockets or the core. The scheduler is healthy if its loop
turns, with or without a worker, since a restart of the scheduler would not bring one. The gateways' `/health` reports
missing workers.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from shared.errors import ConfigError
from shared.metrics import DETECTION_BUCKETS, RECOVERY_BUCKETS, exposition
from shared.transport import DropReason, Listener

LABELS = ("engine",)

STALLED_AFTER = 5.0
"""Seconds after its last turn at which the loop counts as stuck. An idle loop turns four times a second."""


POLL_INTERVAL = 0.05
"""Seconds between two looks at whether the port is to be closed, for which a scheduler that ends waits."""


class PeerCollector(Collector):
    """Collects what `listeners`, by the roles of their peers, refused and dropped."""

    def __init__(self, engine: str, listeners: Mapping[str, Listener]) -> None:
        self._engine = engine
        self._listeners = listeners

    def collect(self) -> Iterator[CounterMetricFamily]:
        refused = CounterMetricFamily(
            "quire:refused_connections",
            "Connections that ended before a message came: of peers without an admitted key, or that are no peers.",
            labels=("engine", "role"),
        )
        dropped = CounterMetricFamily(
            "quire:dropped_messages",
            "Messages of peers that were dropped. A few of the reasons unknown_sender and unexpected are normal.",
            labels=("engine", "role", "reason"),
        )
        for role, listener in self._listeners.items():
            refused.add_metric((self._engine, role), listener.monitor.refused)
            for reason in DropReason:
                dropped.add_metric((self._engine, role, reason.value), listener.dropped[reason])
        yield refused
        yield dropped


class WorkerMetrics:
    """Metrics of the workers of one engine. The scheduler's loop writes them. Times are parameters, in seconds."""

    def __init__(self, engine: str) -> None:
        registered = Gauge(
            "quire:registered_workers",
            "Workers that have registered: the ranks that compute, and those that wait in line.",
            LABELS,
            registry=None,
        )
        epochs = Counter("quire:epochs", "Configurations of a worker, the first one included.", LABELS, registry=None)
        detection = Histogram(
            "quire:worker_detection_seconds",
            "Seconds from the last sign of life of the worker to its loss. A connection's end is one.",
            LABELS,
            buckets=DETECTION_BUCKETS,
            registry=None,
        )
        recovery = Histogram(
            "quire:worker_recovery_seconds",
            "Seconds from the loss of a worker to the next result, if there were requests.",
            LABELS,
            buckets=RECOVERY_BUCKETS,
            registry=None,
        )
        self.all: tuple[Collector, ...] = (registered, epochs, detection, recovery)
        self._registered = registered.labels(engine)
        self._epochs, self._detection, self._recovery = (
            epochs.labels(engine),
            detection.labels(engine),
            recovery.labels(engine),
        )
        self._lost: float | None = None  # when the worker was lost; None: nothing waits for another one

    def note_registered(self, count: int) -> None:
        """Note how many workers are registered."""
        self._registered.set(count)

    def note_epoch(self) -> None:
        """Note that a worker is configured."""
        self._epochs.inc()

    def note_loss(self, seconds: float, now: float, *, busy: bool) -> None:
        """Note that the worker is lost, `seconds` after its last sign of life. `busy`: there are requests."""
        self._detection.observe(seconds)
        if busy and self._lost is None:
            self._lost = now

    def note_result(self, now: float) -> None:
        """Note that a result was committed."""
        if self._lost is not None:
            self._recovery.observe(now - self._lost)
            self._lost = None

    def note_idle(self) -> None:
        """Note that no request is left: those that waited for a worker have ended otherwise."""
        self._lost = None


@contextmanager
def export(port: int, registry: CollectorRegistry, last_turn: Callable[[], float]) -> Iterator[None]:
    """Answer at `port` for the time of the block. `last_turn` returns the monotonic time of the loop's last turn.

    Raise `ConfigError` if the port cannot be bound.
    """

    def answer(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        return health(last_turn(), start) if environ["PATH_INFO"] == "/health" else metrics(registry, start)

    try:
        server = make_server("0.0.0.0", port, answer, ThreadingWSGIServer, _Handler)
    except OSError as error:
        raise ConfigError(f"--metrics-port {port}: {error.strerror}") from error
    threading.Thread(target=server.serve_forever, args=[POLL_INTERVAL], name="metrics port", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: scrapes are no news."""


def metrics(registry: CollectorRegistry, start: Any) -> Iterable[bytes]:
    """Answer with the metrics, at any path but /health."""
    data, content_type = exposition(registry)
    start("200 OK", [("Content-Type", content_type)])
    return [data]


def health(last_turn: float, start: Any) -> Iterable[bytes]:
    """Answer with 200, or with 503 and the seconds for which the loop has stood still."""
    standstill = time.monotonic() - last_turn
    if standstill < STALLED_AFTER:
        start("200 OK", [("Content-Type", "text/plain")])
        return []
    start("503 Service Unavailable", [("Content-Type", "text/plain")])
    return [f"the scheduler's loop has stood still for {standstill:.0f} s\n".encode()]
