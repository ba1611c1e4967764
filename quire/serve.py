"""`quire serve`: one server on this machine. From settings to running services, and what the user is told of them."""

import asyncio
import errno
import os
import socket
import sys
import time
from pathlib import Path

import msgspec
import zmq

from quire.banner import banner
from quire.checks import check_files, check_model
from quire.children import Child, Log
from quire.instance import instance_folder
from quire.settings import Settings, service_arguments, service_environment
from quire.supervisor import Supervisor, is_healthy
from quire.watch import Patience, Watch
from services.gateway.config import GatewayConfig
from services.gateway.served_model import tokenizer_folder
from shared.errors import ConfigError
from shared.hub.checkpoint import locate
from shared.transport import listen

STILL = 4.0
"""Seconds for which a gateway or a scheduler may stand still; with its restart, it is back in less than ten."""


def serve(settings: Settings, began: float) -> int:
    """Serve until a signal; the exit status. `began` is the monotonic time to count the start from.

    Raises `QuireError` if the server cannot be started.
    """
    port = 0 if settings.gateway.uds else free_port(settings.gateway)  # before minutes are spent on a model
    check_files(settings.gateway)
    if settings.serve.hf_token:
        os.environ["HF_TOKEN"] = settings.serve.hf_token
    folder = locate(settings.worker.model, settings.worker.revision, settings.worker.download_dir)
    texts = tokenizer_folder(settings.gateway) or folder
    template = Path(settings.gateway.chat_template) if settings.gateway.chat_template else None
    check_model(folder, settings.worker.load_format, settings.worker.model_impl, texts, template)
    with (
        instance_folder() as sockets,
        zmq.Context() as context,
        listen(context, beats_address(sockets)) as beats,
    ):
        bound = bind_together(settings, port, sockets)
        supervisor = Supervisor(
            children(bound, Log(sys.stderr.buffer)),
            ready=lambda: is_healthy(reachable(bound.gateway.host), port, bound.gateway.uds),
            announce=lambda: print(banner(bound.gateway, texts, time.monotonic() - began), flush=True),
            say=lambda line: print(line, file=sys.stderr, flush=True),
            ready_timeout=settings.serve.ready_timeout,
            drain_timeout=settings.gateway.drain_timeout,
            watch=Watch(beats, patience(settings)),
        )
        return asyncio.run(supervisor.run())


def free_port(config: GatewayConfig) -> int:
    """The port to listen on: one that is free if it is left open. Raises `ConfigError` if there can be no listening."""
    host, port = config.host, config.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
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


def reachable(host: str) -> str:
    """An address of this machine at which a server that listens on `host` answers."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def bind_together(settings: Settings, port: int, folder: Path) -> Settings:
    """The settings with what connects the services: sockets in `folder`."""
    gateways, workers = f"ipc://{folder}/gateways.sock", f"ipc://{folder}/workers.sock"
    replace, me = msgspec.structs.replace, {"supervisor": os.getpid(), "supervisor_address": beats_address(folder)}
    return settings._replace(
        gateway=replace(settings.gateway, port=port, engines=[gateways], **me),
        scheduler=replace(settings.scheduler, gateways=gateways, workers=workers, **me),
        worker=replace(settings.worker, scheduler=workers, **me),
    )


def beats_address(folder: Path) -> str:
    """Return the address at which the supervisor awaits signs of life."""
    return f"ipc://{folder}/beats.sock"


def patience(settings: Settings) -> dict[str, Patience]:
    """Return how long each service may give no sign of life. A worker's scheduler judges its steps, and sooner."""
    return {
        "gateway": Patience(STILL, STILL),
        "scheduler": Patience(STILL, STILL),
        "worker": Patience(STILL + 2 * settings.scheduler.worker_timeout, None),
    }


def children(settings: Settings, log: Log) -> list[Child]:
    """The services in the order in which they are stopped."""
    environment = service_environment(settings)
    return [
        Child(name, [f"services.{name}", *service_arguments(config)], log, environment)
        for name, config in (
            ("gateway", settings.gateway),
            ("scheduler", settings.scheduler),
            ("worker", settings.worker),
        )
    ]
