"""`make compose-test`: tests docker-compose.yml on a real container engine.

It builds the images, starts three gateways, streams through the balancer, and while streams run kills the worker and
the scheduler with `kill -9`, then one of two engines, and restarts every part in turn. It expects every stream to end
as if nothing had happened. In any case it removes containers, networks and volumes. It needs docker with its compose
plugin, or podman with podman-compose.

Exit status 0: passed. 1: failed, and the containers' logs say more. 75: there is no container engine.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from container_testing import (
    MODEL,
    PROMPTS,
    STARTING,
    STREAMING,
    TOKENS,
    Failure,
    Streams,
    answers,
    build,
    check,
    execute,
    expect,
    free_port,
    step,
    until,
    works,
)

ROOT = Path(__file__).resolve().parents[1]
GATEWAYS = 3
STREAMS = 20
SERVICES = ("balancer", "gateway", "scheduler", "worker")
ENGINES = (("scheduler", "worker"), ("scheduler-2", "worker-2"))
ADMIN_PORT = 9101

NO_ENGINE = 75

STRANGER = """
import zmq
socket = zmq.Context().socket(zmq.DEALER)
monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
socket.connect("tcp://scheduler:5557")
socket.send(b"hello")
raise SystemExit(not monitor.poll(30_000) or socket.poll(1_000))
"""
METRICS = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:{}/metrics').read().decode())"
PORTS = {"gateway": 8000, "scheduler": 9100}  # at which their metrics are


class Project:
    """A compose project of docker-compose.yml with its own name, tag and port."""

    def __init__(self, engine: str, compose: Sequence[str]) -> None:
        self.engine = engine  # docker or podman
        self.name = f"quire-test-{os.getpid()}"
        self.port = free_port()
        self._compose = [*compose, "-p", self.name, "-f", str(ROOT / "docker-compose.yml")]
        others = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
        self._environment = {**others, "PORT": str(self.port), "TAG": "compose-test"}

    def compose(self, *argv: str, seconds: float) -> str:
        """Run a compose command and return its output. Raise `Failure` with the output if it fails."""
        return execute([*self._compose, *argv], seconds, self._environment)

    def run_engine(self, *argv: str) -> str:
        """Run a command of the container engine and return its output. Raise `Failure` with it if it fails."""
        return execute([self.engine, *argv], 60, self._environment).strip()

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's containers, including those that have ended."""
        labels = {"project": self.name, "service": service}
        filters = [f"--filter=label=com.docker.compose.{key}={value}" for key, value in labels.items()]
        return self.run_engine("ps", "--all", "--quiet", *filters).split()

    def container(self, service: str) -> str:
        """Return the id of a service's only container."""
        (container,) = self.containers(service)
        return container

    def succeeds(self, container: str, *argv: str) -> bool:
        """Return whether deploy/probe.py, in the container and with these arguments, ends well."""
        with suppress(Failure):
            self.run_engine("exec", container, "python", "/opt/probe.py", *argv)
            return True
        return False

    def state(self, container: str) -> dict[str, object]:
        """Return the state of a container: Pid, Status, ..."""
        state: dict[str, object] = json.loads(self.run_engine("inspect", "--format", "{{json .State}}", container))
        return state

    def healthy(self, containers: Sequence[str]) -> bool:
        """Return whether the health checks of all these containers pass."""
        return all(self._healthy(container) for container in containers)

    def _healthy(self, container: str) -> bool:
        if self.engine == "docker":
            health = self.state(container).get("Health")
            return isinstance(health, dict) and health.get("Status") == "healthy"
        with suppress(Failure):  # podman runs health checks by systemd, which may be absent
            self.run_engine("healthcheck", "run", container)
            return True
        return False


def main() -> int:
    """Run the test and return the exit status."""
    project = find_engine()
    if project is None:
        print("compose-test: no container engine works here (docker with compose, or podman with podman-compose)")
        return NO_ENGINE
    print(f"compose-test: {project.engine}, project {project.name}, port {project.port}")
    try:
        with step("images are built"):
            build(lambda seconds: project.compose("build", seconds=seconds))
        try:
            test(project)
        except BaseException:
            with suppress(Failure):
                print(project.compose("--profile", "two-engines", "logs", "--tail", "60", seconds=60))
            raise
        finally:
            with step("all is taken down"):
                project.compose(
                    "--profile", "two-engines", "down", "--volumes", "--remove-orphans", "--timeout", "5", seconds=120
                )
    except (Failure, TimeoutError) as failure:
        print(f"compose-test: FAILED: {str(failure) or f'the streams have not ended in {STREAMING:.0f} s'}")
        return 1
    print("compose-test: passed")
    return 0


def test(project: Project) -> None:
    """Test the images, which are built. Raise `Failure`."""
    with step(f"{GATEWAYS} gateways, scheduler, worker and balancer are started"):
        project.compose("up", "--detach", "--no-build", "--scale", f"gateway={GATEWAYS}", seconds=STARTING)
    with step("the balancer finds a gateway that is ready"):
        until(lambda: answers(f"http://127.0.0.1:{project.port}/health"), "no gateway is ready")
    with step("every container's health check passes"):
        for service in SERVICES:
            containers = project.containers(service)
            expect(len(containers) == (GATEWAYS if service == "gateway" else 1), f"{service} runs as {containers}")
            until(partial(project.healthy, containers), f"{service} is not healthy")
    with step(f"{len(PROMPTS)} prompts are streamed undisturbed"):
        expected = dict(asyncio.run(Streams(project.port, PROMPTS).run()))
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(STREAMS)]
    for victim in ("worker", "scheduler"):
        with step(f"{STREAMS} streams of {TOKENS} tokens end well, the {victim} killed in their midst"):
            check(asyncio.run(Streams(project.port, prompts).run(partial(kill, project, victim))), expected)
            until(lambda: answers(f"http://127.0.0.1:{project.port}/health"), "no gateway is ready")
    with step("requests that come while no engine is ready wait for one"):
        wait_for_engine(project, expected)
    with step("a connection without keys is refused, and a gateway has no keys but its own"):
        refuse(project)
    with step("a client that leaves before its answer begins takes its request with it"):
        leave(project)
    served = [requests_served(project, container) for container in project.containers("gateway")]
    with step(f"each gateway served some: {served}"):
        expect(all(served) and sum(served) == 2 * STREAMS + 2 * len(PROMPTS), f"the gateways served {served}")
    with step("a second engine is started, and every gateway reaches both"):
        up = ["up", "--detach", "--no-build", "--no-recreate", "--scale", f"gateway={GATEWAYS}"]
        project.compose("--profile", "two-engines", *up, seconds=STARTING)
        reach_engines(project, 2)
    with step(f"{STREAMS} streams end well, one of two engines killed in their midst"):
        check(asyncio.run(Streams(project.port, prompts).run(partial(kill, project, *ENGINES[1]))), expected)
        reach_engines(project, 2)
    with step("engines and gateways are restarted one after the other under streams, which all end well"):
        streamed = asyncio.run(Streams(project.port, PROMPTS, repeat=True).run(partial(restart_all, project)))
        check(streamed, expected)
    print(f"           ({len(streamed)} streams)")


def kill(project: Project, *services: str) -> None:
    """End containers of services as a crash would, and wait until they have come back."""
    victims = [project.container(service) for service in services]
    pids = [project.state(victim)["Pid"] for victim in victims]
    for service, victim, pid in zip(services, victims, pids, strict=True):
        expect(isinstance(pid, int) and pid > 1, f"the {service}'s process is {pid}")
        try:
            os.kill(int(str(pid)), signal.SIGKILL)  # the container's restart policy restarts it
        except (PermissionError, ProcessLookupError):  # not root, or the engine runs in a machine of its own
            project.run_engine("kill", victim)
            project.run_engine("start", victim)
    for service, victim, pid in zip(services, victims, pids, strict=True):
        came_back = partial(lambda victim, pid: project.state(victim)["Pid"] not in (0, pid), victim, pid)
        until(came_back, f"the {service}'s container has not come back")


def wait_for_engine(project: Project, expected: Mapping[str, str]) -> None:
    """Stream while the only scheduler is away. The balancer must not refuse what a gateway would keep."""
    scheduler = project.container("scheduler")
    project.run_engine("stop", "--time", "5", scheduler)
    until(lambda: not answers(f"http://127.0.0.1:{project.port}/health"), "gateways are ready without an engine")
    time.sleep(3)  # the balancer has noticed, too

    async def stream() -> list[tuple[str, str]]:
        streams = asyncio.create_task(Streams(project.port, PROMPTS).run())
        await asyncio.sleep(2)
        await asyncio.to_thread(project.run_engine, "start", scheduler)
        return await streams

    check(asyncio.run(stream()), expected)


def reach_engines(project: Project, count: int) -> None:
    """Wait until every gateway reaches that many engines that are ready."""
    url = f"http://127.0.0.1:{PORTS['gateway']}/health?engines={count}"
    for gateway in project.containers("gateway"):
        until(partial(project.succeeds, gateway, "http", url), f"a gateway does not reach {count} engines")


def restart_all(project: Project) -> None:
    """Restart each engine, once it has drained, and then each gateway."""
    for scheduler, worker in ENGINES:
        container = project.container(scheduler)
        expect(project.succeeds(container, "drain", str(ADMIN_PORT)), f"{scheduler} has not drained")
        for each in (project.container(worker), container):
            project.run_engine("restart", "--time", "45", each)
        reach_engines(project, 2)
    for gateway in project.containers("gateway"):
        project.run_engine("restart", "--time", "45", gateway)
        reach_engines(project, 2)


def leave(project: Project) -> None:
    """Send a request that would take minutes, and disconnect. The scheduler must soon be idle."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{project.port}/v1/completions", data, headers)
    try:
        urllib.request.urlopen(request, timeout=2)
    except TimeoutError:
        pass
    else:
        raise Failure("a request of 4000 tokens was answered in 2 s")
    scheduler = project.container("scheduler")
    until(lambda: metric(project, "scheduler", scheduler, "vllm:num_requests_running") == 0, "it still runs", 10)


def refuse(project: Project) -> None:
    """Connect to the scheduler without keys. It must end the handshake, not answer, and count the connection."""
    gateway, scheduler = project.containers("gateway")[0], project.container("scheduler")
    secrets = project.run_engine("exec", gateway, "find", "/keys", "-name", "*.key_secret").split()
    expect(secrets == ["/keys/gateway/gateway.key_secret"], f"a gateway's secrets are {secrets}")
    refused = partial(metric, project, "scheduler", scheduler, "quire:refused_connections_total", 'role="gateway"')
    before = refused()
    project.run_engine("exec", gateway, "python", "-c", STRANGER)
    until(lambda: refused() > before, "the connection was not counted", 10)


def requests_served(project: Project, gateway: str) -> int:
    """Return a gateway's number of samples that ended because of their length, from its /metrics."""
    return metric(project, "gateway", gateway, "vllm:request_success_total", 'finished_reason="length"')


def metric(project: Project, service: str, container: str, name: str, label: str = "") -> int:
    """Return the sum of a metric of one container, over its samples that have a label."""
    lines = project.run_engine("exec", container, "python", "-c", METRICS.format(PORTS[service])).splitlines()
    samples = [line for line in lines if line.startswith(f"{name}{{") and label in line]
    return sum(int(float(line.rpartition(" ")[2])) for line in samples)


def find_engine() -> Project | None:
    """Return a project on the engine that works here, docker before podman; None if none does."""
    if works("docker", "info") and works("docker", "compose", "version"):
        return Project("docker", ["docker", "compose"])
    places = os.pathsep.join([os.environ.get("PATH", ""), str(Path.home() / ".podman-compose/bin")])
    podman_compose = shutil.which("podman-compose", path=places)
    if podman_compose and works("podman", "info"):
        return Project("podman", [podman_compose])
    return None


if __name__ == "__main__":
    sys.exit(main())
