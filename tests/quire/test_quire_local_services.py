"""Tests which services `quire serve` starts on this machine, and with which settings. None is started here."""

import asyncio
import io
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire import settings
from quire.children import Child
from quire.local_services import check_numbers, children, connect_services
from quire.serve import all_healthy
from quire.service_log import ServiceLog
from services.worker import gpus
from services.worker.gpus import list_gpus
from shared.errors import ConfigError
from tests.quire.quire_server import short_folder

FOLDER = Path("/run/q")


def read(**flags: Any) -> settings.Settings:
    return settings.read({name: str(value) for name, value in flags.items()}, {})


def processes(result: settings.Settings) -> list[Child]:
    return children(result, connect_services(result, 8000, FOLDER), FOLDER, ServiceLog(io.BytesIO()))


@pytest.fixture(autouse=True)
def _gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the machine have three GPUs."""
    for number in range(3):
        (tmp_path / f"gpus/0000:0{number}:00.0").mkdir(parents=True)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_each_engine_has_a_name_and_sockets_of_its_own_and_each_gateway_knows_all() -> None:
    services = connect_services(read(data_parallel_size=2, api_server_count=3, metrics_port=9100), 8000, FOLDER)
    assert [one.engine for one in services.schedulers] == ["0", "1"]
    assert [one.metrics_port for one in services.schedulers] == [9100, 9101]
    assert [(one.local_rank, one.local_world_size) for one in services.workers] == [(0, 2), (1, 2)]
    addresses = {one.gateways for one in services.schedulers} | {one.workers for one in services.schedulers}
    assert len(addresses) == 4
    assert [one.workers for one in services.schedulers] == [one.scheduler for one in services.workers]
    assert len({one.probe_uds for one in services.gateways}) == 3
    for one in services.gateways:
        assert one.engines == [scheduler.gateways for scheduler in services.schedulers]
        assert (one.port, one.reuse_port) == (8000, True)


def test_one_of_each_is_the_default() -> None:
    services = connect_services(read(engine="east", metrics_port=0), 8000, FOLDER)
    assert [len(configs) for configs in services] == [1, 1, 1]
    assert (services.schedulers[0].engine, services.schedulers[0].metrics_port) == ("east", 0)
    assert not services.gateways[0].reuse_port
    several = connect_services(read(engine="east", data_parallel_size=2), 8000, FOLDER)
    assert [one.engine for one in several.schedulers] == ["east-0", "east-1"]


def test_processes_are_in_the_order_of_stopping_and_have_names() -> None:
    assert [child.name for child in processes(read())] == ["gateway", "worker", "scheduler"]
    several = processes(read(data_parallel_size=2, api_server_count=2))
    assert [child.name for child in several] == [
        f"{role} {number}" for role in ("gateway", "worker", "scheduler") for number in range(2)
    ]


def test_an_engine_has_as_many_workers_as_ranks() -> None:
    result = read(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2, device="cpu")
    workers = connect_services(result, 8000, FOLDER).workers
    assert [one.rank for one in workers] == [0, 1, 2, 3] * 2
    assert [one.scheduler.removesuffix(".sock")[-1] for one in workers] == ["0"] * 4 + ["1"] * 4
    assert [one.local_rank for one in workers] == list(range(8))
    assert {one.local_world_size for one in workers} == {8}
    assert {one.rendezvous for one in workers} == {str(FOLDER)}
    names = [child.name for child in processes(result) if child.role == "worker"]
    assert names == [f"worker {engine} rank {rank}" for engine in range(2) for rank in range(4)]
    one_engine = processes(read(tensor_parallel_size=2))
    assert [child.name for child in one_engine[1:3]] == ["worker rank 0", "worker rank 1"]
    assert connect_services(read(), 8000, FOLDER).workers[0].rendezvous == ""


def test_only_gateways_of_one_port_share_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/of/another")
    several = processes(read(data_parallel_size=2, api_server_count=2))
    folders = [child.environment.get("PROMETHEUS_MULTIPROC_DIR") for child in several]
    assert folders == [str(FOLDER)] * 2 + [None] * 4
    assert "PROMETHEUS_MULTIPROC_DIR" not in processes(read())[0].environment


def visible(**flags: Any) -> list[str | None]:
    """Return the GPUs that each worker sees; None: all."""
    return [
        child.environment.get("CUDA_VISIBLE_DEVICES") for child in processes(read(**flags)) if child.role == "worker"
    ]


def test_each_worker_gets_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible(data_parallel_size=2) == ["0", "1"]
    assert visible(tensor_parallel_size=3) == ["0", "1", "2"]
    assert visible() == [None]
    assert visible(data_parallel_size=2, device="cpu") == [None, None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5, 7")
    assert visible(data_parallel_size=2, device="cuda") == ["GPU-5", "7"]
    monkeypatch.setattr(gpus, "DRIVER", Path("/no/driver"))
    assert list_gpus({}) == list_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible(data_parallel_size=2) == [None, None]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"data_parallel_size": 4},
            "--data-parallel-size 4: each rank of each engine needs a GPU of its own, which are 4, and there are 3",
        ),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "--tensor-parallel-size 2 --pipeline-parallel-size 2: each rank of .* which are 4, and there are 3",
        ),
        ({"data_parallel_size": 2, "tensor_parallel_size": 200, "device": "cpu"}, "these are 400 workers; one machine"),
        ({"api_server_count": 2, "uds": "/tmp/q.sock"}, "--api-server-count 2: only one gateway can listen at a Unix"),
        ({"data_parallel_size": 2, "metrics_port": 65535, "device": "cpu"}, "--metrics-port 65535: each engine needs"),
    ],
)
def test_what_this_machine_cannot_run_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_numbers(read(**flags))


def test_what_it_can_run_is_taken() -> None:
    check_numbers(read(data_parallel_size=3))
    check_numbers(read(data_parallel_size=4, tensor_parallel_size=2, device="cpu"))
    check_numbers(read(tensor_parallel_size=3))
    check_numbers(read(uds="/tmp/q.sock", metrics_port=65535))


async def test_the_server_is_ready_once_every_gateway_reaches_every_engine() -> None:
    with short_folder() as folder:
        services = connect_services(read(data_parallel_size=3, api_server_count=2), 8000, folder)
        num_ready = dict.fromkeys((one.probe_uds for one in services.gateways), 0)  # engines that a gateway reaches

        async def answer(path: str | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            wanted = (await reader.readline()).decode().split()[1].removeprefix("/health?engines=")
            status = "200 OK" if int(wanted) <= num_ready[path] else "503 Service Unavailable"
            writer.write(f"HTTP/1.1 {status}\r\n\r\n".encode())
            writer.close()

        async with AsyncExitStack() as stack:
            first, second = num_ready
            await stack.enter_async_context(await asyncio.start_unix_server(partial(answer, first), first))
            num_ready = {first: 3, second: 2}
            assert not await all_healthy(services), "the second gateway does not listen yet"
            await stack.enter_async_context(await asyncio.start_unix_server(partial(answer, second), second))
            assert not await all_healthy(services)
            num_ready[second] = 3
            assert await all_healthy(services)


def test_variables_of_settings_that_it_chooses_itself_are_ignored() -> None:
    """They are for services on several hosts; ipc needs no keys, and each process needs a port of its own."""
    variables = {"QUIRE_ZMQ_KEYS": "/keys", "QUIRE_ADMIN_PORT": "9101", "QUIRE_LOCAL_RANK": "x", "QUIRE_PORT": "8001"}
    result = settings.read({}, variables)
    assert result == settings.read({}, {"QUIRE_PORT": "8001"})
    assert result.gateway.port == 8001
    assert not any(flag.startswith(("--zmq-keys", "--admin")) for child in processes(result) for flag in child.argv)
