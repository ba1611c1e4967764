"""`python -m services.scheduler`: one engine's scheduler as a process."""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import zmq

from services.scheduler.authentication import authentication
from services.scheduler.config import SchedulerConfig
from services.scheduler.exporter import PeerCollector, export
from services.scheduler.recorder import prepare_folder
from services.scheduler.service import Service
from shared.admin import Drain, admin_port
from shared.config import load
from shared.curve import load_listener_keys
from shared.errors import QuireError
from shared.metrics import EngineCollector, registry
from shared.startup import configure_logging, end_with_supervisor, report_error, start_logging
from shared.transport import listen

LINGER_MS = 1_000
"""Milliseconds that the last messages have to leave when the process ends."""


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT, and return the exit status."""
    start_logging()
    try:
        config = load(SchedulerConfig, argv, os.environ, prog="python -m services.scheduler")
        configure_logging("scheduler", config.log_level, config.log_format)
        end_with_supervisor(config.supervisor)
        run(config)
    except QuireError as error:
        return report_error("scheduler", error)
    return 0


def run(config: SchedulerConfig) -> None:
    """Bind, serve, drain. Raise `QuireError` if the settings cannot be used."""
    if config.record:
        prepare_folder(config.record)
    keys = load_listener_keys(config.zmq_keys)
    bind = partial(listen, keys=keys, insecure=config.insecure, linger_ms=LINGER_MS)
    with (
        zmq.Context() as context,
        authentication(context, keys),
        bind(context, config.gateways, role="gateway") as gateways,
        bind(context, config.workers, role="worker") as workers,
    ):
        service = Service(config, gateways, workers)
        signals = [signal.SIGTERM] if config.supervisor else [signal.SIGTERM, signal.SIGINT]
        for signal_number in signals:
            signal.signal(signal_number, lambda *_: service.stop())
        peers = PeerCollector(config.engine, {"gateway": gateways, "worker": workers})
        drain = Drain(service.drain, lambda: service.drain_state, config.drain_timeout)
        with _export(config, service, peers), admin_port(config.admin_port, drain):
            service.run()


def _export(config: SchedulerConfig, service: Service, peers: PeerCollector) -> AbstractContextManager[None]:
    if not config.metrics_port:
        return nullcontext()
    collector = EngineCollector(lambda: service.model, lambda: {config.engine: service.snapshot})
    return export(
        config.metrics_port, registry(collector, peers, *service.worker_metrics.all), lambda: service.last_turn
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
