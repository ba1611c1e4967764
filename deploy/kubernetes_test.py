"""`make kubernetes-test`: runs the overlay for CPUs on podman, which takes Kubernetes' pods, claims and maps.

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
    build,
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
NO_ENGINE = 75
IMAGES = {"quire-gateway": "gateway", "quire-scheduler": "scheduler", "quire-worker": "worker-cpu"}  # their targets
PLAYED = ("ConfigMap", "PersistentVolumeClaim", "Pod")

Object = dict[str, Any]


def pods(objects: Sequence[Object], prefix: str, keys: Path) -> list[Object]:
    """Return what podman plays of these objects: of each Deployment and StatefulSet its first pod, with its claims.

    Podman 4.3 mounts the base64 text of secrets, and no key below a folder, so folders in `keys` take their place.
    Volumes get names with the prefix: podman gives two pods one volume if they call it the same.
    """
    played = [one for one in objects if one["kind"] in PLAYED]
    for one in objects:
        if one["kind"] not in ("Deployment", "StatefulSet"):
            continue
        name = f"{one['metadata']['name']}-0"
        template = one["spec"]["template"]
        volumes = template["spec"]["volumes"]
        for claim in one["spec"].get("volumeClaimTemplates", []):
            volume = claim["metadata"]["name"]
            claimed = {"name": f"{prefix}-{volume}-{name}"}
            kind = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
            played.append({**kind, "metadata": claimed, "spec": claim["spec"]})
            volumes.append({"name": volume, "persistentVolumeClaim": {"claimName": claimed["name"]}})
        mounts = [mount for container in template["spec"]["containers"] for mount in container["volumeMounts"]]
        for volume in volumes:
            if secret := volume.pop("secret", None):
                volume["hostPath"] = {
                    "path": str(keys / secret["secretName"].partition("-keys")[0]),
                    "type": "Directory",
                }
        for named in [*volumes, *mounts]:
            named["name"] = f"{prefix}-{name}-{named['name']}"
        metadata = {"name": name, "labels": template["metadata"]["labels"]}
        played.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    return played


class Cluster:
    """The pods of one run on podman, in a network of their own."""

    def __init__(self, folder: Path) -> None:
        self.name = f"quire-test-{os.getpid()}"
        self.port = free_port()
        self.keys = folder / "kubernetes/keys"
        self._folder = folder
        self._pods: list[str] = []

    def podman(self, *argv: str, seconds: float = 60) -> str:
        """Run a command of podman and return its output. Raise `Failure` with it if it fails."""
        return execute(["podman", *argv], seconds, dict(os.environ)).strip()

    def build(self, seconds: float) -> None:
        """Build the images, each in so many seconds at most."""
        for image, target in IMAGES.items():
            argv = ["build", "-f", str(ROOT / "deploy/Dockerfile"), "--target", target]
            self.podman(*argv, "-t", f"localhost/{image}:latest", str(ROOT), seconds=seconds)

    def objects(self) -> list[Object]:
        """Return the objects of the overlay for CPUs, with keys made for them."""
        copy = self.keys.parent
        shutil.copytree(KUBERNETES, copy)
        make_keys(self.keys)
        for path in self.keys.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # containers run as another user
        text = execute(["kubectl", "kustomize", str(copy / "overlays/cpu")], 60, dict(os.environ))
        return [one for one in yaml.safe_load_all(text) if one]

    def play(self, objects: Sequence[Object]) -> None:
        """Start the pods."""
        self.podman("network", "create", self.name)
        for pod in (one for one in objects if one["kind"] == "Pod"):
            name = pod["metadata"]["name"]
            if name == "gateway-0":
                pod["spec"]["containers"][0]["ports"][0] |= {"hostIP": "127.0.0.1", "hostPort": self.port}
            claims = [volume.get("persistentVolumeClaim") for volume in pod["spec"]["volumes"]]
            claimed = [claim["claimName"] for claim in claims if claim]
            shared = [one for one in objects if one["kind"] == "ConfigMap" or one["metadata"]["name"] in claimed]
            file = self._folder / f"{name}.yaml"
            file.write_text(yaml.safe_dump_all([*shared, pod]))
            network = f"{self.name}:alias={name.removesuffix('-0')}"
            self._pods.append(name)
            self.podman("kube", "play", "--network", network, str(file), seconds=STARTING)

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
        with suppress(Failure):
            self.podman("pod", "rm", "--force", *self._pods, seconds=120)
            volumes = self.podman("volume", "ls", "--quiet").split()
            self.podman("volume", "rm", *(volume for volume in volumes if self.name in volume))
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
                build(cluster.build)
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
        cluster.play(pods(cluster.objects(), cluster.name, cluster.keys))
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
