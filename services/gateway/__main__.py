"""`python -m services.gateway --engines ADDRESS`: runs one gateway process until SIGTERM or Ctrl-C.

The first signal drains the gateway, unless a `POST /drain` at its admin port has begun that: `/health` is 503, after
`--shutdown-delay` seconds new requests get 503 too, and running ones have `--drain-timeout` seconds to finish. The
second signal ends those too, each with an error to its client. The exit status is 0 in both cases. A gateway that
cannot start writes one line to stderr and exits with status 2.

The process uses asyncio, because it serves thousands of connections that mostly wait, for clients or for engines. One
thread serves them all without locks; long work runs in other threads (`threads.py`). The loop is uvloop's: each chunk
of each stream passes through the loop, and uvloop does that part in C.
"""

import asyncio
import errno
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import uvloop
from aiohttp import web
from aiohttp.typedefs import Middleware

from services.gateway.app import make_app
from services.gateway.backend import Backend
from services.gateway.config import GatewayConfig
from services.gateway.gateway import Gateway
from services.gateway.http_server import HttpRunner
from services.gateway.lifecycle import Lifecycle
from services.gateway.metrics import Metrics, continue_shared_figures
from services.gateway.served_model import ServedModel
from services.gateway.tracing import tracing
from shared.admin import Drain, admin_port
from shared.config import load
from shared.curve import ConnectionKeys, load_connection_keys
from shared.errors import ConfigError, QuireError
from shared.startup import configure_logging, end_with_supervisor, report_error, start_logging

logger = logging.getLogger("services.gateway")

JOIN_TIMEOUT = 2.0  # seconds for an engine to answer before the gateway joins a port that it shares
SHUTDOWN_TIMEOUT = 5.0  # seconds for the last responses to reach their clients


def main(argv: Sequence[str]) -> int:
    """Run a gateway and return the exit status."""
    start_logging()
    try:
        config = load(GatewayConfig, argv, os.environ, prog="python -m services.gateway")
        configure_logging("gateway", config.log_level, config.log_format)
        end_with_supervisor(config.supervisor)
        keys = load_connection_keys(config.zmq_keys, "gateway")
        model = ServedModel.load(config)
        with tracing(config.otlp_traces_endpoint, os.environ) as outer:
            gc.collect()
            gc.freeze()  # a full collection stops the loop; it need not visit objects that live until the end
            uvloop.run(serve(config, model, keys, outer))
    except QuireError as error:
        return report_error("gateway", error)
    return 0


async def serve(
    config: GatewayConfig,
    model: ServedModel,
    keys: ConnectionKeys | None = None,
    outer: Sequence[Middleware] = (),
) -> None:
    """Serve until a signal comes and the running requests have ended. Raise `ConfigError` if it cannot listen.

    `outer` are the application's outermost middlewares.
    """
    if config.probe_uds is not None:
        continue_shared_figures(Path(config.probe_uds).stem)  # of all gateways here, it is this one's alone
    backend = Backend(
        config.engines,
        model.text_digest,
        config.supervisor_address,
        loss_timeout=config.engine_loss_timeout,
        routing_policy=config.routing_policy,
        keys=keys,
        protected=config.insecure or keys is not None,
    )
    lifecycle, stop = Lifecycle(config.shutdown_delay, config.drain_timeout), asyncio.Event()
    _handle_signals(lifecycle, stop, supervised=config.supervisor > 0)
    metrics = Metrics(
        model.name,
        lambda: {name: status.snapshot for name, status in backend.statuses().items()},
        backend.losses.all,
    )
    runner = HttpRunner(
        make_app(Gateway(config, model, backend, metrics, lifecycle), outer),
        handler_cancellation=True,  # without it, a client's disconnect would go unnoticed
        access_log=None,
        keepalive_timeout=config.keep_alive_timeout,
        shutdown_timeout=SHUTDOWN_TIMEOUT,
    )
    await runner.setup()
    try:
        with admin_port(config.admin_port, _remote_drain(lifecycle)):
            async with backend:
                if config.reuse_port:
                    await _await_engine(backend)
                site = await _listen(runner, config)
                model.log_choices()
                if config.probe_uds is not None:
                    await _listen_on_path(runner, "--probe-uds", config.probe_uds)
                await lifecycle.wait_draining()
                if config.reuse_port:
                    await site.stop()  # new connections go to the other gateways of the port
                await stop.wait()
                await _finish(lifecycle)
    finally:
        await runner.cleanup()


async def _await_engine(backend: Backend) -> None:
    """Wait until an engine has answered, but not for long: this gateway must be able to say that none has.

    On a port that it shares, a gateway gets requests as soon as it listens, and would refuse those that come before.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(JOIN_TIMEOUT):
            while backend.welcome is None:  # noqa: ASYNC110  (it takes some milliseconds)
                await asyncio.sleep(0.01)


async def _finish(lifecycle: Lifecycle) -> None:
    """Return when the running requests of a gateway that drains have ended, or were aborted because time is over."""
    if not await lifecycle.wait_drained(lifecycle.seconds_left):
        logger.warning("%d requests are aborted: the drain has taken its time", lifecycle.num_running)
        lifecycle.abort()
        await lifecycle.wait_drained(SHUTDOWN_TIMEOUT)


def _remote_drain(lifecycle: Lifecycle) -> Drain:
    """Return how threads of the admin port drain this gateway."""
    begin = partial(asyncio.get_running_loop().call_soon_threadsafe, lifecycle.drain)
    return Drain(begin, lambda: lifecycle.drain_state, lifecycle.drain_seconds)


def _handle_signals(lifecycle: Lifecycle, stop: asyncio.Event, *, supervised: bool) -> None:
    def on_signal() -> None:
        if stop.is_set():
            lifecycle.abort()
        lifecycle.drain()
        stop.set()

    # if there is a supervisor, it handles Ctrl-C
    for signal_number in (signal.SIGTERM,) if supervised else (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, on_signal)


async def _listen(runner: web.AppRunner, config: GatewayConfig) -> web.BaseSite:
    if config.uds is not None:
        unix_site = await _listen_on_path(runner, "--uds", config.uds)
        logger.info("listening on unix:%s", config.uds)
        return unix_site
    site = web.TCPSite(runner, config.host, config.port, reuse_port=config.reuse_port or None)
    try:
        await site.start()
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {error.strerror or error}"
        raise ConfigError(f"port {config.port} of {config.host} {reason}") from error
    for address in runner.addresses:
        logger.info("listening on http://%s:%d", *address[:2])
    return site


async def _listen_on_path(runner: web.AppRunner, flag: str, path: str) -> web.BaseSite:
    site = web.UnixSite(runner, path)
    try:
        await site.start()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be listened on: {error.strerror or error}") from error
    return site


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
