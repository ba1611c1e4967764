"""`python -m services.gateway --engines ADDRESS`: one gateway process, until SIGTERM or Ctrl-C.

The first signal drains: new requests get 503, running ones have `--drain-timeout` to finish. The second ends those
too; their clients are told. Exits with 0 then; if it cannot start, with
one line on stderr and status 2.
"""

import asyncio
import errno
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence

import uvloop
from aiohttp import web

from services.gateway.app import make_app
from services.gateway.backend import Backend
from services.gateway.config import GatewayConfig
from services.gateway.lifecycle import Lifecycle
from services.gateway.listener import Runner
from services.gateway.metrics import Metrics
from services.gateway.model import ServedModel
from services.gateway.serving import Gateway
from shared.config import load
from shared.errors import ConfigError, QuireError
from shared.process import end_with_supervisor, report_error, set_log_level, start_logging

logger = logging.getLogger("services.gateway")

PARTING = 5.0  # seconds for the last answers to reach their clients


def main(argv: Sequence[str]) -> int:
    """Runs a gateway; returns the exit status."""
    start_logging()
    try:
        config = load(GatewayConfig, argv, os.environ, prog="python -m services.gateway")
        set_log_level(config.log_level)
        end_with_supervisor(config.supervisor)
        model = ServedModel.load(config)
        gc.collect()
        gc.freeze()  # a full collection, which stops the loop, need not look at what stays until the end
        uvloop.run(serve(config, model))
    except QuireError as error:
        return report_error("gateway", error)
    return 0


async def serve(config: GatewayConfig, model: ServedModel) -> None:
    """Listens until a signal comes and the requests have ended. Raises `ConfigError` if it cannot listen."""
    backend = Backend(config.engines, model.digest, config.supervisor_address)
    lifecycle, stop = Lifecycle(), asyncio.Event()
    _on_signals(lifecycle, stop, supervised=config.supervisor > 0)
    metrics = Metrics(model.name, lambda: {name: status.snapshot for name, status in backend.statuses().items()})
    runner = Runner(
        make_app(Gateway(config, model, backend, metrics, lifecycle)),
        handler_cancellation=True,  # or a client that leaves would never be noticed
        access_log=None,
        keepalive_timeout=config.keep_alive_timeout,
        shutdown_timeout=PARTING,
    )
    await runner.setup()
    try:
        await _listen(runner, config)
        async with backend:
            await stop.wait()
            if not await lifecycle.finished(config.drain_timeout):
                logger.warning("%d requests were cut off after %.0f s", lifecycle.count, config.drain_timeout)
                lifecycle.cut()
                await lifecycle.finished(PARTING)
    finally:
        await runner.cleanup()


def _on_signals(lifecycle: Lifecycle, stop: asyncio.Event, *, supervised: bool) -> None:
    def on_signal() -> None:
        if lifecycle.draining:
            lifecycle.cut()
        lifecycle.drain()
        stop.set()

    for number in (signal.SIGTERM,) if supervised else (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


async def _listen(runner: web.AppRunner, config: GatewayConfig) -> None:
    if config.uds is not None:
        await _listen_on_path(runner, config.uds)
        return
    site = web.TCPSite(runner, config.host, config.port, reuse_port=config.reuse_port or None)
    try:
        await site.start()
    except OSError as error:
        what = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {error.strerror or error}"
        raise ConfigError(f"port {config.port} of {config.host} {what}") from error
    for address in runner.addresses:
        logger.info("listening on http://%s:%d", *address[:2])


async def _listen_on_path(runner: web.AppRunner, path: str) -> None:
    try:
        await web.UnixSite(runner, path).start()
    except OSError as error:
        raise ConfigError(f"--uds {path} cannot be listened on: {error.strerror or error}") from error
    logger.info("listening on unix:%s", path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
