"""The scheduler's HTTP endpoint, in threads of its own: `/metrics` for Prometheus, `/health` for an orchestrator.

It reads what the loop leaves behind and never touches sockets or the core. Healthy means that the loop turns. Whether
a worker is there is no part of it, for a restart of the scheduler would not bring one; the gateways' `/health` says so.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server

from shared.errors import ConfigError
from shared.metrics import exposition

STALLED = 5.0
"""Seconds since the last turn of the loop from which on it is taken for stuck; idle, it turns four times a second."""


@contextmanager
def export(port: int, registry: CollectorRegistry, turned: Callable[[], float]) -> Iterator[None]:
    """Answer at `port` for the time of the block. `turned` is the monotonic time of the loop's last turn.

    Raises `ConfigError` if the port cannot be had.
    """
    try:
        server, _ = start_http_server(port, registry=registry)
    except OSError as error:
        raise ConfigError(f"--metrics-port {port}: {error.strerror}") from error

    def answer(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        return health(turned(), start) if environ["PATH_INFO"] == "/health" else metrics(registry, start)

    server.set_app(answer)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def metrics(registry: CollectorRegistry, start: Any) -> Iterable[bytes]:
    """The figures, at any path but one."""
    data, content_type = exposition(registry)
    start("200 OK", [("Content-Type", content_type)])
    return [data]


def health(turned: float, start: Any) -> Iterable[bytes]:
    """200, or 503 and since when the loop stands still."""
    still = time.monotonic() - turned
    if still < STALLED:
        start("200 OK", [("Content-Type", "text/plain")])
        return []
    start("503 Service Unavailable", [("Content-Type", "text/plain")])
    return [f"the scheduler's loop has stood still for {still:.0f} s\n".encode()]
