"""`make kubernetes-test`: runs the overlay for CPUs on podman, which takes Kubernetes' pods, claims, maps and secrets.

It builds the images, makes keys, and plays what `kubectl kustomize` prints: the engine's pod, and the gateway's, whose
port stands for the Service's. While streams run it kills the worker, then every container of the engine's pod, and
expects every stream to end as if nothing had happened. Podman keeps no Deployments or StatefulSets, so their pods are
played, one of each. It knows no Services, autoscalers, budgets or network policies: tests/deploy checks those against
Kubernetes' own schemas. It needs podman and kubectl.

Exit status 0: passed. 1: failed, and the containers' logs say more. 75: podman or kubectl is missing.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from container_testing import (
    PROMPTS,
    STARTING,
    STREAMING,
    Failure,
    Streams,
    answers,
    check,
    execute,
    expect,
    free_port,
    step,
    until,
    works,
)

from shared.curve import make_keys

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES = ROOT / "deploy/kubernetes"
STREAMS = 20
BUILDING = 1800.0  # seconds at most
NO_ENGINE = 75
IMAGES = {"quire-gateway": "gateway", "quire-scheduler": "scheduler", "quire-worker": "worker-cpu"}  # their targets
PLAYED = ("ConfigMap", "Secret", "PersistentVolumeClaim", "Pod")

Object = dict[str, Any]


def pods(objects: Sequence[Object]) -> list[Object]:
    """Return what podman plays of these objects: of each Deployment and StatefulSet its first pod, with its claims."""
    played: list[Object] = []
    for one in objects:
        if one["kind"] in PLAYED:
            played.append(one)
        if one["kind"] not in ("Deployment", "StatefulSet"):
            continue
        name = f"{one['metadata']['name']}-0"
        template = one["spec"]["template"]
        for claim in one["spec"].get("volumeClaimTemplates", []):
            volume = claim["metadata"]["name"]
            claimed = f"{volume}-{name}"
            played.append(
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": claimed},
                    "spec": claim["spec"],
                }
            )
            template["spec"]["volumes"].append({"name": volume, "persistentVolumeClaim": {"claimName": claimed}})
        labels = template["metadata"]["labels"]
        metadata = {"name": name, "labels": labels}
        played.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    return played


class Cluster:
    """The pods of one run on podman, in a network of their own."""

    def __init__(self, folder: Path) -> None:
        self.name = f"quire-test-{os.getpid()}"
        self.port = free_port()
        self._folder = folder
        self._files: list[Path] = []

    def podman(self, *argv: str, seconds: float = 60) -> str:
        """Run a command of podman and return its output. Raise `Failure` with it if it fails."""
        return execute(["podman", *argv], seconds, dict(os.environ)).strip()

    def objects(self) -> list[Object]:
        """Return the objects of the overlay for CPUs, with keys made for them."""
        copy = self._folder / "kubernetes"
        shutil.copytree(KUBERNETES, copy)
        make_keys(copy / "keys")
        text = execute(["kubectl", "kustomize", str(copy / "overlays/cpu")], 60, dict(os.environ))
        return [one for one in yaml.safe_load_all(text) if one]

    def play(self, objects: Sequence[Object]) -> None:
        """Start the pods."""
        self.podman("network", "create", self.name)
        shared = [one for one in objects if one["kind"] != "Pod"]
        for pod in (one for one in objects if one["kind"] == "Pod"):
            name = pod["metadata"]["name"]
            file = self._folder / f"{name}.yaml"
            file.write_text(yaml.safe_dump_all([*shared, pod]))
            service = name.removesuffix("-0")
            publish = ["--publish", f"127.0.0.1:{self.port}:8000"] if service == "gateway" else []
            network = f"{self.name}:alias={service}"
            self._files.append(file)
            self.podman("kube", "play", "--network", network, *publish, str(file), seconds=STARTING)

    def pid(self, pod: str, container: str) -> int:
        """Return the process of a container, 0 while it does not run."""
        states = self.podman("inspect", "--format", "{{json .State}}", f"{pod}-{container}")
        return int(json.loads(states)["Pid"])

    def kill(self, *containers: str) -> None:
        """End containers of the engine's pod as a crash would, and wait until they have come back."""
        before = {container: self.pid("engine-0", container) for container in containers}
        for container, pid in before.items():
            expect(pid > 1, f"the {container}'s process is {pid}")
            os.kill(pid, signal.SIGKILL)  # the pod's restart policy starts it again
        for container, pid in before.items():
            until(lambda c=container, p=pid: self.pid("engine-0", c) not in (0, p), f"{container} has not come back")

    def logs(self) -> str:
        """Return the ends of the containers' logs."""
        containers = ("engine-0-scheduler", "engine-0-worker", "gateway-0-gateway")
        texts = []
        for container in containers:
            with suppress(Failure):
                texts.append(f"{container}:\n" + self.podman("logs", "--tail", "40", container))
        return "\n".join(texts)

    def remove(self) -> None:
        """Take down what was played."""
        for file in self._files:
            with suppress(Failure):
                self.podman("kube", "down", "--force", str(file), seconds=120)
        with suppress(Failure):
            self.podman("network", "rm", "--force", self.name)


def main() -> int:
    """Run the test and return the exit status."""
    if not works("podman", "info") or not works("kubectl", "version", "--client"):
        print("kubernetes-test: it needs podman and kubectl")
        return NO_ENGINE
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        print(f"kubernetes-test: network {cluster.name}, port {cluster.port}")
        try:
            with step("images are built"):
                for image, target in IMAGES.items():
                    argv = ["build", "-f", str(ROOT / "deploy/Dockerfile"), "--target", target]
                    cluster.podman(*argv, "-t", f"localhost/{image}:latest", str(ROOT), seconds=BUILDING)
            try:
                test(cluster)
            except BaseException:
                print(cluster.logs())
                raise
            finally:
                with step("all is taken down"):
                    cluster.remove()
        except (Failure, TimeoutError) as failure:
            print(f"kubernetes-test: FAILED: {str(failure) or f'streams have not ended in {STREAMING:.0f} s'}")
            return 1
    print("kubernetes-test: passed")
    return 0


def test(cluster: Cluster) -> None:
    """Test the overlay for CPUs. Raise `Failure`."""
    with step("the engine's pod and a gateway's are played"):
        cluster.play(pods(cluster.objects()))
    health = f"http://127.0.0.1:{cluster.port}/health"
    with step("the gateway reaches an engine that is ready"):
        until(lambda: answers(health), "the gateway is not ready")
    with step("the worker's probe passes"):
        until(lambda: works("podman", "exec", "engine-0-worker", "python", "/opt/probe.py", "connected", "5558"), "no")
    with step(f"{len(PROMPTS)} prompts are streamed undisturbed"):
        expected = dict(asyncio.run(Streams(cluster.port, PROMPTS).run()))
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(STREAMS)]
    for victims in (("worker",), ("scheduler", "worker")):
        with step(f"{STREAMS} streams end well, with {' and '.join(victims)} killed in their midst"):
            check(asyncio.run(Streams(cluster.port, prompts).run(lambda v=victims: cluster.kill(*v))), expected)
            until(lambda: answers(health), "the gateway is not ready")


if __name__ == "__main__":
    sys.exit(main())
