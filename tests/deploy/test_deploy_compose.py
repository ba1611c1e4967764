"""Tests docker-compose.yml and its images without a container engine; `make compose-test` uses one."""

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socket import create_connection, create_server
from typing import Any

import msgspec
import pytest
import yaml

from quire.settings import INTERNAL
from services.gateway import errors
from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.config import knobs, load

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
GPU: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())
HAPROXY = (ROOT / "deploy/haproxy.cfg").read_text()
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()

CONFIGS: dict[str, type[msgspec.Struct]] = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
}
FIXED = {"host", "port", "reuse_port", "uds", "metrics_port"}  # not configurable in a container


def service(name: str) -> dict[str, Any]:
    config: dict[str, Any] = COMPOSE["services"][name]
    return config


@pytest.mark.parametrize("name", CONFIGS)
def test_every_setting_of_a_service_can_be_given_by_environment_and_no_other(name: str) -> None:
    variables = [entry.partition("=")[0] for entry in service(name)["environment"]]
    settings = [variable for variable in variables if variable.startswith("QUIRE_")]
    expected = [knob.variable for knob in knobs(CONFIGS[name]) if knob.name not in INTERNAL | FIXED]
    assert sorted(settings) == sorted(expected)


def test_the_worker_computes_on_what_its_image_is_for() -> None:
    assert "QUIRE_DEVICE=cpu" in service("worker")["environment"]
    first, second = GPU["services"]["worker"], GPU["services"]["worker-2"]
    assert first["environment"] == second["environment"] == ["QUIRE_DEVICE=cuda"]
    assert first["deploy"] != second["deploy"]  # another GPU


@pytest.mark.parametrize("name", CONFIGS)
def test_the_services_take_their_commands(name: str) -> None:
    config = load(CONFIGS[name], service(name)["command"], {}, prog=name)
    assert config != CONFIGS[name]()


@pytest.mark.parametrize("suffix", ["", "-2"], ids=["first engine", "second engine"])
def test_the_services_address_each_other(suffix: str) -> None:
    scheduler = load(SchedulerConfig, service(f"scheduler{suffix}")["command"], {}, prog="scheduler")
    gateway = load(GatewayConfig, service("gateway")["command"], {}, prog="gateway")
    worker = load(WorkerConfig, service(f"worker{suffix}")["command"], {}, prog="worker")
    (name,) = service(f"scheduler{suffix}")["networks"]["engine"]["aliases"]
    assert gateway.engines == [scheduler.gateways.replace("tcp://0.0.0.0", f"dns://{name}")]
    assert worker.scheduler == scheduler.workers.replace("0.0.0.0", f"scheduler{suffix}")
    assert service(f"worker{suffix}")["healthcheck"]["test"][-1] == scheduler.workers.rpartition(":")[2]
    assert f":{scheduler.metrics_port}/health" in service(f"scheduler{suffix}")["healthcheck"]["test"][-1]
    assert HAPROXY.count(f"gateway:{gateway.port}\n") == 2
    assert f":{gateway.port}/health" in service("gateway")["healthcheck"]["test"][-1]


def test_the_engines_differ_in_names_alone() -> None:
    first, second = service("scheduler"), service("scheduler-2")
    names = [load(SchedulerConfig, one["command"], {}, prog="scheduler").engine for one in (first, second)]
    assert len(set(names)) == 2
    changed = {"command", "profiles"}
    for one, other in ((first, second), (service("worker"), service("worker-2"))):
        assert {key for key in other if one.get(key) != other[key]} == changed
    assert second["profiles"] == service("worker-2")["profiles"] == ["two-engines"]


def test_the_workers_container_starts_all_ranks_and_has_a_gpu_for_each() -> None:
    worker = load(WorkerConfig, service("worker")["command"], {"QUIRE_TENSOR_PARALLEL_SIZE": "2"}, prog="worker")
    assert (worker.rank, worker.parallel.world_size) == (None, 2)
    (gpus,) = GPU["services"]["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert gpus["count"] == "${QUIRE_TENSOR_PARALLEL_SIZE:-1}"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_service_has_its_own_keys_and_no_others(name: str) -> None:
    config = load(CONFIGS[name], service(name)["command"], {}, prog=name)
    assert (config.zmq_keys, config.insecure) == ("/keys", False)
    volumes = [volume for volume in service(name)["volumes"] if "keys" in volume]
    assert volumes == [f"{name}-keys:/keys/{name}:ro"]
    assert f"{name}-keys:/keys/{name}" in service("keys")["volumes"]
    made, _, owned = DOCKERFILE.partition("&& chown -R quire")  # since a volume takes the owner of the image's folder
    assert f"/keys/{name}" in made
    assert "/keys" in owned.partition("\n")[0].split()


def test_the_keys_are_made_by_the_command_that_makes_them(tmp_path: Path) -> None:
    *command, folder = service("keys")["entrypoint"]
    assert folder == "/keys"
    assert service("keys")["network_mode"] == "none"
    argv = [sys.executable, *command[1:], str(tmp_path)]
    subprocess.run(argv, check=True, cwd=ROOT, timeout=60, stdout=subprocess.DEVNULL)
    for name in CONFIGS:
        assert (tmp_path / name / f"{name}.key_secret").exists()


def test_only_the_balancer_is_published_and_the_services_network_is_internal() -> None:
    names = [name for name, config in COMPOSE["services"].items() if "profiles" not in config]
    assert [name for name in names if "ports" in service(name)] == ["balancer"]
    assert COMPOSE["networks"]["engine"] == {"internal": True}
    assert list(service("scheduler")["networks"]) == ["engine"]
    assert set(service("balancer")["networks"]) & set(service("gateway")["networks"]) == {"engine"}  # one address each


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_every_container_is_confined_and_comes_back(name: str) -> None:
    config = service(name)
    assert config["cap_drop"] == ["ALL"]
    assert config["security_opt"] == ["no-new-privileges:true"]
    assert config["pids_limit"] == 4096
    assert config["restart"] == ("on-failure" if name == "keys" else "unless-stopped")


def test_targets_and_volumes_exist() -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    built = [config["build"] for file in (COMPOSE, GPU) for config in file["services"].values() if "build" in config]
    assert {build["target"] for build in built} == {"balancer", "gateway", "scheduler", "worker-cpu", "worker-gpu"}
    assert {build["target"] for build in built} <= set(stages)
    for config in COMPOSE["services"].values():
        for volume in config.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or source.startswith("${MODEL_FOLDER") or (ROOT / source).exists()


def test_every_service_has_time_to_drain() -> None:
    (delay,) = re.findall(
        r"^QUIRE_SHUTDOWN_DELAY=\$\{QUIRE_SHUTDOWN_DELAY:-(\d+)\}$",
        "\n".join(service("gateway")["environment"]),
        re.MULTILINE,
    )
    drain = int(delay) + GatewayConfig().drain_timeout
    for name in ("balancer", *CONFIGS):
        (grace,) = re.findall(r"^\$\{STOP_GRACE_PERIOD:-(\d+)s\}$", service(name)["stop_grace_period"])
        assert int(grace) > drain + 10
    (hard,) = re.findall(r"hard-stop-after (\d+)s", HAPROXY)
    assert int(grace) > int(hard) > drain


def test_errors_of_the_balancer_are_the_apis() -> None:
    bodies = re.findall(r"(?:http-error|return) status (\d+) content-type application/json string '(.*?)'", HAPROXY)
    assert {int(status) for status, _ in bodies} == {400, 404, 408, 500, 502, 503, 504}
    for status, body in bodies:
        error = errors.ApiError(int(status), json.loads(body)["error"]["message"])
        assert json.loads(body) == json.loads(errors.error_body(error))


def probe(*argv: str) -> tuple[int, str]:
    process = subprocess.run(
        [sys.executable, str(ROOT / "deploy/probe.py"), *argv], capture_output=True, text=True, timeout=30, check=False
    )
    return process.returncode, process.stdout


class Answers(BaseHTTPRequestHandler):
    """Answers 200 at /well and 503 elsewhere."""

    def do_GET(self) -> None:
        self._answer(self.path == "/well")

    def do_POST(self) -> None:
        self._answer(self.path == "/drain")

    def _answer(self, well: bool) -> None:
        self.send_response(200 if well else 503)
        self.end_headers()
        self.wfile.write(b"no worker")

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_the_probe_asks_over_http() -> None:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert probe("http", f"{url}/well") == (0, "well\n")
            assert probe("http", f"{url}/ill") == (1, "status 503: no worker\n")
            assert probe("drain", str(server.server_port)) == (0, "well\n")
        finally:
            server.shutdown()
            thread.join()
    assert probe("http", url)[0] == 1


def test_the_probe_sees_a_connection_and_its_end() -> None:
    with create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert probe("connected", str(port)) == (1, f"there is no connection to port {port}\n")  # it only listens
        with create_connection(("127.0.0.1", port)), server.accept()[0]:
            assert probe("connected", str(port)) == (0, "well\n")
        assert probe("connected", str(port))[0] == 1


def test_the_probe_refuses_what_it_does_not_know() -> None:
    assert probe("ftp", "x")[0] == 1
