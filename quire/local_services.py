"""Configures the services of one server on this machine: which there are, and where they find each other.

Engine i is scheduler i and its workers: a rank for each part of the model. All workers share this machine: they divide
its CPUs, or each has a GPU of its own. The ranks of an engine find each other by files in the instance's folder. The
gateways share one port, whose connections the kernel distributes. So each has a Unix socket too, by which the
supervisor reaches it alone.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from quire.children import Child
from quire.service_log import ServiceLog
from quire.settings import MAX_LOCAL, Settings, service_arguments, service_environment
from services.gateway.config import SHARED_METRICS_VARIABLE, GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from services.worker.gpus import gpu_variables, list_gpus
from shared.errors import ConfigError


class LocalServices(NamedTuple):
    """The settings of each service of one server. The workers are the ranks of the first engine, then of the next."""

    gateways: list[GatewayConfig]
    schedulers: list[SchedulerConfig]
    workers: list[WorkerConfig]


def connect_services(settings: Settings, port: int, folder: Path) -> LocalServices:
    """Return the settings of all services, with the addresses of their sockets, which are in `folder`."""
    num_engines, num_gateways = settings.serve.data_parallel_size, settings.serve.api_server_count
    num_ranks = settings.worker.parallel.world_size
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
                rank=rank,
                rendezvous=str(folder) if num_ranks > 1 else "",
                local_rank=engine * num_ranks + rank,
                local_world_size=num_engines * num_ranks,
                **supervised,
            )
            for engine in range(num_engines)
            for rank in range(num_ranks)
        ],
    )


def check_numbers(settings: Settings) -> None:
    """Raise `ConfigError` if this machine cannot run as many engines, ranks and gateways as the settings say."""
    num_engines, num_gateways = settings.serve.data_parallel_size, settings.serve.api_server_count
    num_workers = num_engines * settings.worker.parallel.world_size
    if num_gateways > 1 and settings.gateway.uds:
        raise ConfigError(f"--api-server-count {num_gateways}: only one gateway can listen at a Unix socket (--uds)")
    if settings.scheduler.metrics_port + num_engines > 65536:
        raise ConfigError(
            f"--metrics-port {settings.scheduler.metrics_port}: each engine needs a port, and it is the first"
        )
    gpus = list_gpus(os.environ)
    if num_workers > len(gpus) > 0 and settings.worker.device != "cpu":
        raise ConfigError(
            f"{_sizes(settings)}: each rank of each engine needs a GPU of its own, which are {num_workers}, and there "
            f"are {len(gpus)}; with --device cpu, they share the CPUs"
        )
    if num_workers > MAX_LOCAL:
        raise ConfigError(f"{_sizes(settings)}: these are {num_workers} workers; one machine runs {MAX_LOCAL} at most")


def _sizes(settings: Settings) -> str:
    """Return the flags that say how many workers there are, without those that are 1."""
    worker = settings.worker
    sizes = {
        "--data-parallel-size": settings.serve.data_parallel_size,
        "--tensor-parallel-size": worker.tensor_parallel_size,
        "--pipeline-parallel-size": worker.pipeline_parallel_size,
    }
    return " ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)


def heartbeat_address(folder: Path) -> str:
    """Return the address at which the supervisor receives heartbeats."""
    return f"ipc://{folder}/heartbeats.sock"


def children(settings: Settings, services: LocalServices, folder: Path, log: ServiceLog) -> list[Child]:
    """Return the services' processes in the order in which they are stopped.

    Gateways that share a port share their figures too, by files in `folder`.
    """
    environment = service_environment(settings)
    shared_metrics = {SHARED_METRICS_VARIABLE: str(folder)} if len(services.gateways) > 1 else {}
    gateways, engines = _numbers(len(services.gateways)), _numbers(len(services.schedulers))
    num_ranks = len(services.workers) // len(services.schedulers)
    ranks = [f"rank {rank}" for rank in range(num_ranks)] if num_ranks > 1 else [""]
    workers = [f"{engine} {rank}".strip() for engine in engines for rank in ranks]
    return [
        *_children("gateway", services.gateways, gateways, log, [environment | shared_metrics] * len(gateways)),
        *_children("worker", services.workers, workers, log, _worker_environments(services.workers, environment)),
        *_children("scheduler", services.schedulers, engines, log, [environment] * len(engines)),
    ]


def _numbers(count: int) -> list[str]:
    """Return labels for services that do the same; one alone needs none."""
    return [str(number) for number in range(count)] if count > 1 else [""]


def _children(
    role: str,
    configs: Sequence[Struct],
    labels: Sequence[str],
    log: ServiceLog,
    environments: Sequence[dict[str, str]],
) -> list[Child]:
    return [
        Child(role, [f"services.{role}", *service_arguments(config)], log, environment, label)
        for config, label, environment in zip(configs, labels, environments, strict=True)
    ]


def _worker_environments(workers: Sequence[WorkerConfig], environment: dict[str, str]) -> list[dict[str, str]]:
    if len(workers) == 1:
        return [environment]
    return [environment | own for own in gpu_variables(workers[0].device, len(workers), environment)]


def _engine_name(base: str, number: int) -> str:
    """Return the name of one engine of several: its number, behind the name that the user chose."""
    return str(number) if base == SchedulerConfig().engine else f"{base}-{number}"
