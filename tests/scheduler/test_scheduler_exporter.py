"""Tests that the scheduler serves /health, which is about its loop, beside /metrics."""

import time
import urllib.request
from urllib.error import HTTPError

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import ThreadingWSGIServer

from services.scheduler.exporter import POLL_INTERVAL, STALLED_AFTER, WorkerMetrics, export
from shared.protocol import Abort, Leave, Sampling, Submit, pack_tokens
from tests.ports import free_ports
from tests.scheduler.scheduler_harness import GOOD, SPARE, WORKER, SchedulerHarness

EPOCHS, DETECTION, RECOVERY = "quire:epochs_total", "quire:worker_detection_seconds", "quire:worker_recovery_seconds"


def figures(metrics: WorkerMetrics) -> dict[str, float]:
    """Return the values of an engine's metrics by name, without buckets."""
    samples = [sample for metric in metrics.all for family in metric.collect() for sample in family.samples]
    assert all(sample.labels["engine"] == "east" for sample in samples)
    return {sample.name: sample.value for sample in samples if not sample.name.endswith(("_bucket", "_created"))}


def ask(url: str) -> tuple[int, str]:
    try:
        request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text;version=1.0.0"})
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_it_is_healthy_while_the_loop_turns() -> None:
    registry = CollectorRegistry()
    Gauge("quire:loops", "For the test.", registry=registry).set(3)
    last_turn = time.monotonic()
    (port,) = free_ports(1)
    with export(port, registry, lambda: last_turn):
        assert ask(f"http://127.0.0.1:{port}/health") == (200, "")
        assert "\nquire:loops 3.0\n" in ask(f"http://127.0.0.1:{port}/metrics")[1]
        last_turn -= STALLED_AFTER + 1
        status, text = ask(f"http://127.0.0.1:{port}/health")
        assert status == 503
        assert "has stood still for 6 s" in text
        assert ask(f"http://127.0.0.1:{port}/metrics")[0] == 200


def test_the_end_of_the_port_is_noticed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that ends waits for it, and the server looks only twice a second if it is not told otherwise."""
    intervals: list[float] = []
    serve_forever = ThreadingWSGIServer.serve_forever

    def note_interval(server: ThreadingWSGIServer, poll_interval: float = 0.5) -> None:
        intervals.append(poll_interval)
        serve_forever(server, poll_interval)

    monkeypatch.setattr(ThreadingWSGIServer, "serve_forever", note_interval)
    (port,) = free_ports(1)
    with export(port, CollectorRegistry(), time.monotonic):
        assert ask(f"http://127.0.0.1:{port}/health")[0] == 200
    assert intervals == [POLL_INTERVAL]
    assert POLL_INTERVAL < 0.1


def test_losses_are_measured_from_the_last_sign_of_life_and_to_the_next_result() -> None:
    metrics = WorkerMetrics("east")
    metrics.note_epoch()
    metrics.note_result(1.0)
    metrics.note_loss(2.25, 10.0, busy=True)
    metrics.note_epoch()
    metrics.note_loss(0.0, 12.0, busy=True)  # again, before there was a result
    metrics.note_epoch()
    metrics.note_result(13.5)
    metrics.note_result(14.0)
    result = figures(metrics)
    assert result[EPOCHS] == 3
    assert (result[f"{DETECTION}_count"], result[f"{DETECTION}_sum"]) == (2, 2.25)
    assert (result[f"{RECOVERY}_count"], result[f"{RECOVERY}_sum"]) == (1, 3.5)


def test_a_loss_that_nobody_waits_for_has_no_recovery() -> None:
    metrics = WorkerMetrics("east")
    metrics.note_loss(0.0, 10.0, busy=False)
    metrics.note_result(50.0)
    metrics.note_loss(0.0, 60.0, busy=True)
    metrics.note_idle()
    metrics.note_result(90.0)
    result = figures(metrics)
    assert (result[f"{DETECTION}_count"], result[f"{RECOVERY}_count"]) == (2, 0)


class RunningScheduler(SchedulerHarness):
    """A scheduler with a request of many tokens, and a worker that has computed the first."""

    def __init__(self) -> None:
        super().__init__(engine="east")
        self.gateway = self.connect(GOOD)
        self.worker = self.start(WORKER)
        self.gateways.hear(GOOD, Submit(7, pack_tokens([1]), 1, Sampling(100, 0)), self.gateway)
        self.turn()
        self.compute(WORKER, self.worker)

    def start(self, name: bytes) -> int:
        fd = self.register(name)
        self.configured(name, fd)
        self.turn()
        return fd

    def compute(self, name: bytes, fd: int) -> None:
        """Answer the plans that the worker was sent."""
        assert self.answer(name, fd), "there was a plan"
        self.turn()

    @property
    def figures(self) -> dict[str, float]:
        return figures(self.service.worker_metrics)


def test_the_loop_measures_a_worker_that_ends_under_a_request() -> None:
    scheduler = RunningScheduler()
    assert scheduler.figures[EPOCHS] == 1
    scheduler.workers.leave(scheduler.worker)
    scheduler.turn(1)
    lost = scheduler.now
    assert (scheduler.figures[f"{DETECTION}_count"], scheduler.figures[f"{DETECTION}_sum"]) == (1, 0.0)
    spare = scheduler.start(SPARE)
    assert (scheduler.figures[EPOCHS], scheduler.figures[f"{RECOVERY}_count"]) == (2, 0)
    began = scheduler.now
    scheduler.compute(SPARE, spare)
    result = scheduler.figures
    assert result[f"{RECOVERY}_count"] == 1
    assert began - lost < result[f"{RECOVERY}_sum"] <= scheduler.now - lost


def test_a_worker_that_leaves_is_no_loss() -> None:
    scheduler = RunningScheduler()
    spare = scheduler.start(SPARE)
    scheduler.workers.hear(WORKER, Leave(), scheduler.worker)
    scheduler.compute(WORKER, scheduler.worker)
    scheduler.configured(SPARE, spare)
    scheduler.turn()
    scheduler.compute(SPARE, spare)
    result = scheduler.figures
    assert (result[EPOCHS], result[f"{DETECTION}_count"], result[f"{RECOVERY}_count"]) == (2, 0, 0)
    assert scheduler.service.snapshot.worker_losses == 0


def test_the_loop_forgets_a_loss_when_its_requests_are_aborted() -> None:
    scheduler = RunningScheduler()
    scheduler.workers.leave(scheduler.worker)
    scheduler.turn()
    scheduler.gateways.hear(GOOD, Abort(7), scheduler.gateway)
    scheduler.turn()
    spare = scheduler.start(SPARE)
    scheduler.gateways.hear(GOOD, Submit(8, pack_tokens([1]), 1, Sampling(100, 0)), scheduler.gateway)
    scheduler.turn()
    scheduler.compute(SPARE, spare)
    assert (scheduler.figures[EPOCHS], scheduler.figures[f"{RECOVERY}_count"]) == (2, 0)
