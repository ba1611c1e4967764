"""`quire serve`: start the services of one server on this machine, and tell the user about them."""

import asyncio
import errno
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from quire.banner import banner, summary
from quire.instance_folder import instance_folder
from quire.local_services import LocalServices, check_numbers, children, connect_services, heartbeat_address
from quire.service_log import ServiceLog
from quire.settings import Settings
from quire.startup_checks import check_adapters, check_files, check_model
from quire.supervisor import Supervisor, is_healthy
from quire.watch import SilenceLimit, Watch
from services.gateway.config import GatewayConfig
from services.gateway.served_model import tokenizer_folder
from shared.errors import ConfigError
from shared.hub.checkpoint import locate
from shared.startup import configure_logging, logs_json, start_logging
from shared.transport import listen

logger = logging.getLogger("quire")

MAX_STANDSTILL = 4.0
"""Seconds for which the loop of a gateway or scheduler may stand still. A restart takes less than ten."""


def serve(settings: Settings, began: float, notes: Sequence[str] = ()) -> int:
    """Serve until a signal; return the exit status. `began` is the monotonic time at which the command started.

    `notes` are lines about the settings for the user. Raise `QuireError` if the server cannot be started.
    """
    as_json = settings.gateway.log_format == "json"
    if as_json:
        start_logging()
        configure_logging("quire", "info", "json")
    for note in notes:
        say(f"quire: {note}")
    check_numbers(settings)
    port = (
        0 if settings.gateway.uds else free_port(settings.gateway)
    )  # before a model is downloaded, which may take minutes
    check_files(settings.gateway)
    check_adapters(settings)
    if settings.serve.hf_token:
        os.environ["HF_TOKEN"] = settings.serve.hf_token
    folder = locate(settings.worker.model, settings.worker.revision, settings.worker.download_dir)
    tokenizer = tokenizer_folder(settings.gateway) or folder
    check_model(folder, settings.worker, tokenizer, settings.gateway.chat_template)
    with (
        instance_folder() as sockets,
        zmq.Context() as context,
        listen(context, heartbeat_address(sockets)) as heartbeats,
    ):
        services = connect_services(settings, port, sockets)
        supervisor = Supervisor(
            children(settings, services, sockets, ServiceLog(sys.stderr.buffer, as_json=as_json)),
            ready=lambda: all_healthy(services),
            announce=lambda: announce(services, tokenizer, time.monotonic() - began),
            say=say,
            ready_timeout=settings.serve.ready_timeout,
            drain_timeout=settings.gateway.shutdown_delay + settings.gateway.drain_timeout,
            watch=Watch(heartbeats, silence_limits(settings)),
        )
        return asyncio.run(supervisor.run())


def announce(services: LocalServices, tokenizer: Path, seconds: float) -> None:
    """Tell the user that the server is ready after `seconds`."""
    config, num_engines = services.gateways[0], len(services.schedulers)
    num_ranks = len(services.workers) // num_engines
    if logs_json():
        logger.info("%s", summary(config, seconds, num_engines, num_ranks))
    else:
        print(banner(config, tokenizer, seconds, num_engines, num_ranks), flush=True)


def say(line: str) -> None:
    """Tell the user something about the server as a whole."""
    if logs_json():
        logger.info("%s", line)
    else:
        print(line, file=sys.stderr, flush=True)


def free_port(config: GatewayConfig) -> int:
    """Return the configured port, or a free one for port 0. Raise `ConfigError` if it cannot be listened on."""
    host, port = config.host, config.port
    try:
        family, socket_type, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket_type, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if config.reuse_port:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} is in use; choose another one with --port") from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error


async def all_healthy(services: LocalServices) -> bool:
    """Return whether every gateway reaches every engine, and all of these are ready."""
    num_engines = len(services.schedulers)
    paths = [gateway.probe_uds for gateway in services.gateways if gateway.probe_uds]
    return all(await asyncio.gather(*(is_healthy(path, num_engines) for path in paths)))


def silence_limits(settings: Settings) -> dict[str, SilenceLimit]:
    """Return each service's limit. The worker has none for its steps, which its scheduler judges, and judges sooner."""
    return {
        "gateway": SilenceLimit(MAX_STANDSTILL, MAX_STANDSTILL),
        "scheduler": SilenceLimit(MAX_STANDSTILL, MAX_STANDSTILL),
        "worker": SilenceLimit(MAX_STANDSTILL + 2 * settings.scheduler.worker_timeout, None),
    }
