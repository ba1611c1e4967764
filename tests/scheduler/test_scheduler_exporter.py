"""Tests that the scheduler serves /health, which is about its loop, beside /metrics."""

import time
import urllib.request
from urllib.error import HTTPError

from prometheus_client import CollectorRegistry, Gauge

from services.scheduler.exporter import STALLED_AFTER, export
from tests.ports import free_ports


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
