"""Configures the services of one server on this machine: which there are, and where they find each other.

Engine i is scheduler i and worker i. The engines share this machine: the workers divide its CPUs, or each has a GPU of
its own. The gateways share one port, whose connections the kernel distributes. So each has a Unix socket too, by which
the supervisor reaches it alone.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from quire.children import Child
from quire.service_log import ServiceLog
from quire.settings import Settings, service_arguments, service_environment
from services.gateway.config import SHARED_METRICS_VARIABLE, GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.errors import ConfigError

DRIVER = Path("/proc/driver/nvidia/gpus")
"""NVIDIA's driver has a folder for each GPU here."""


class LocalServices(NamedTuple):
    """The settings of each service of one server. There are as many workers as schedulers."""

    gateways: list[GatewayConfig]
    schedulers: list[SchedulerConfig]
    workers: list[WorkerConfig]


def connect_services(settings: Settings, port: int, folder: Path) -> LocalServices:
    """Return the settings of all services, with the addresses of their sockets, which are in `folder`."""
    num_engines, num_gateways = settings.serve.data_parallel_size, settings.serve.api_server_count
    gateways = [f"ipc://{folder}/gateways-{engine}.sock" for engine in range(num_engines)]
    workers = [f"ipc://{folder}/workers-{engine}.sock" for engine in range(num_engines)]
    supervised = {"supervisor": os.getpid(), "supervisor_address": heartbeat_address(folder)}
    replace = msgspec.structs.replace
    first = settings.scheduler
    return LocalServices(
        gateways=[
            replace(
                settings.gateway,
                port=port,
                engines=gateways,
                probe_uds=f"{folder}/http-{number}.sock",
                reuse_port=settings.gateway.reuse_port or num_gateways > 1,
                **supervised,
            )
            for number in range(num_gateways)
        ],
        schedulers=[
            replace(
                first,
                gateways=gateways[engine],
                workers=workers[engine],
                engine=first.engine if num_engines == 1 else _engine_name(first.engine, engine),
                metrics_port=first.metrics_port and first.metrics_port + engine,
                **supervised,
            )
            for engine in range(num_engines)
        ],
        workers=[
            replace(
                settings.worker,
                scheduler=workers[engine],
                local_rank=engine,
                local_world_size=num_engines,
                **supervised,
            )
            for engine in range(num_engines)
        ],
    )


def check_numbers(settings: Settings) -> None:
    """Raise `ConfigError` if this machine cannot run as many engines and gateways as the settings say."""
    num_engines, num_gateways = settings.serve.data_parallel_size, settings.serve.api_server_count
    if num_gateways > 1 and settings.gateway.uds:
        raise ConfigError(f"--api-server-count {num_gateways}: only one gateway can listen at a Unix socket (--uds)")
    if settings.scheduler.metrics_port + num_engines > 65536:
        raise ConfigError(
            f"--metrics-port {settings.scheduler.metrics_port}: each engine needs a port, and it is the first"
        )
    gpus = list_gpus(os.environ)
    if num_engines > len(gpus) > 0 and settings.worker.device != "cpu":
        raise ConfigError(
            f"--data-parallel-size {num_engines}: each engine needs a GPU of its own, and there are {len(gpus)}; "
            "with --device cpu, engines share the CPUs"
        )


def list_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that workers may use, as CUDA_VISIBLE_DEVICES names them. Neither torch nor CUDA is needed."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(DRIVER.iterdir())] if DRIVER.exists() else []


def heartbeat_address(folder: Path) -> str:
    """Return the address at which the supervisor receives heartbeats."""
    return f"ipc://{folder}/heartbeats.sock"


def children(settings: Settings, services: LocalServices, folder: Path, log: ServiceLog) -> list[Child]:
    """Return the services' processes in the order in which they are stopped.

    Gateways that share a port share their figures too, by files in `folder`.
    """
    environment = service_environment(settings)
    shared_metrics = {SHARED_METRICS_VARIABLE: str(folder)} if len(services.gateways) > 1 else {}
    return [
        *_children("gateway", services.gateways, log, [environment | shared_metrics] * len(services.gateways)),
        *_children("scheduler", services.schedulers, log, [environment] * len(services.schedulers)),
        *_children("worker", services.workers, log, _worker_environments(services.workers, environment)),
    ]


def _children(
    role: str, configs: Sequence[Struct], log: ServiceLog, environments: Sequence[dict[str, str]]
) -> list[Child]:
    return [
        Child(
            role,
            [f"services.{role}", *service_arguments(config)],
            log,
            environment,
            number if len(configs) > 1 else None,
        )
        for number, (config, environment) in enumerate(zip(configs, environments, strict=True))
    ]


def _worker_environments(workers: Sequence[WorkerConfig], environment: dict[str, str]) -> list[dict[str, str]]:
    gpus = list_gpus(environment)
    if len(workers) == 1 or workers[0].device == "cpu" or not gpus:
        return [environment] * len(workers)
    return [environment | {"CUDA_VISIBLE_DEVICES": gpu} for _, gpu in zip(workers, gpus, strict=False)]


def _engine_name(base: str, number: int) -> str:
    """Return the name of one engine of several: its number, behind the name that the user chose."""
    return str(number) if base == SchedulerConfig().engine else f"{base}-{number}"
