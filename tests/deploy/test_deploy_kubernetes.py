"""Tests deploy/kubernetes without a cluster; `make kubernetes-test` runs its pods on podman."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.config import knobs, load
from shared.curve import make_keys

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
BASE = [one for file in sorted((KUBERNETES / "base").glob("*.yaml")) for one in yaml.safe_load_all(file.read_text())]
RESOURCES = [one for one in BASE if one["kind"] != "Kustomization"]
CONFIGS: dict[str, type[msgspec.Struct]] = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
}
KUBERNETES_VERSION = "1.30"  # the oldest whose schemas the manifests must fit


def resource(kind: str, name: str) -> dict[str, Any]:
    (found,) = (one for one in RESOURCES if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def pod(name: str) -> dict[str, Any]:
    kind = "Deployment" if name == "gateway" else "StatefulSet"
    spec: dict[str, Any] = resource(kind, name)["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    found = pod("gateway" if name == "gateway" else "engine")["containers"]
    (one,) = (each for each in found if each["name"] == name)
    return dict(one)


def config(name: str) -> Any:
    return load(CONFIGS[name], container(name)["args"], {}, prog=name)


@pytest.mark.parametrize("one", RESOURCES, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_kubernetes_would_take_each_resource(one: dict[str, Any]) -> None:
    kubernetes_validate.validate(one, KUBERNETES_VERSION, strict=True)


def test_a_resource_with_a_field_that_does_not_exist_is_refused() -> None:
    """Otherwise the test before would prove nothing."""
    wrong = resource("PodDisruptionBudget", "gateway") | {"spec": {"minReady": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES_VERSION, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_overlays_make_what_kubernetes_would_take(overlay: str, tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    base = tmp_path / "kubernetes/base/kustomization.yaml"
    base.write_text(base.read_text().replace("TP_SIZE=1", "TP_SIZE=2"))
    make_keys(tmp_path / "kubernetes/keys")
    argv = ["kubectl", "kustomize", str(tmp_path / "kubernetes/overlays" / overlay)]
    made = list(yaml.safe_load_all(subprocess.check_output(argv, text=True)))
    for one in made:
        kubernetes_validate.validate(one, KUBERNETES_VERSION, strict=True)
    (engine,) = (one for one in made if one["kind"] == "StatefulSet")
    worker = next(one for one in engine["spec"]["template"]["spec"]["containers"] if one["name"] == "worker")
    devices = {entry["name"]: entry.get("value") for entry in worker["env"]}
    assert devices["QUIRE_DEVICE"] == {"cpu": "cpu", "gpu": "cuda"}[overlay]
    (size,) = (one["data"]["TP_SIZE"] for one in made if one["kind"] == "ConfigMap" and "TP_SIZE" in one["data"])
    assert size == "2"
    for share in ("requests", "limits"):
        assert worker["resources"][share].get("nvidia.com/gpu") == {"cpu": None, "gpu": 2}[overlay]
    secrets = {one["metadata"]["name"]: set(one["data"]) for one in made if one["kind"] == "Secret"}
    for volume in engine["spec"]["template"]["spec"]["volumes"]:
        if "secret" in volume:
            wanted = {item["key"] for item in volume["secret"].get("items", [])}
            assert wanted <= secrets[volume["secret"]["secretName"]]


def test_the_keys_are_those_that_quire_makes(tmp_path: Path) -> None:
    make_keys(tmp_path)
    generators = yaml.safe_load((KUBERNETES / "keys/kustomization.yaml").read_text())["secretGenerator"]
    files = [entry.partition("=")[2] for one in generators for entry in one["files"]]
    assert files
    assert all((tmp_path / file).is_file() for file in files)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_services_take_their_arguments(name: str) -> None:
    assert config(name) != CONFIGS[name]()


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_are_those_of_the_service(name: str) -> None:
    names = [entry["name"] for entry in container(name).get("env", []) if entry["name"].startswith("QUIRE_")]
    assert set(names) <= {knob.variable for knob in knobs(CONFIGS[name])}


def test_the_services_address_each_other() -> None:
    scheduler, gateway, worker = (config(name) for name in ("scheduler", "gateway", "worker"))
    headless = resource("Service", "engine")
    ports = {port["name"]: port["port"] for port in headless["spec"]["ports"]}
    assert gateway.engines == [f"dns://{headless['metadata']['name']}:{ports['gateways']}"]
    assert scheduler.gateways.endswith(f":{ports['gateways']}")
    assert scheduler.metrics_port == ports["metrics"]
    assert worker.scheduler == scheduler.workers
    assert container("worker")["readinessProbe"]["exec"]["command"][-1] == scheduler.workers.rpartition(":")[2]
    assert resource("Service", "quire")["spec"]["ports"][0]["port"] == gateway.port


def test_a_pod_may_take_longer_to_end_than_its_drain() -> None:
    gateway, scheduler = config("gateway"), config("scheduler")
    assert pod("gateway")["terminationGracePeriodSeconds"] > gateway.shutdown_delay + gateway.drain_timeout
    assert pod("engine")["terminationGracePeriodSeconds"] > scheduler.drain_timeout


@pytest.mark.parametrize("name", CONFIGS)
def test_containers_are_confined(name: str) -> None:
    """The user is that of the images."""
    security = container(name)["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    owner = pod("gateway" if name == "gateway" else "engine")["securityContext"]
    (uid,) = re.findall(r"useradd --uid (\d+)", (ROOT / "deploy/Dockerfile").read_text())
    assert owner["runAsUser"] == int(uid)
    assert owner["runAsNonRoot"]


@pytest.mark.parametrize("kind", ["NetworkPolicy", "PodDisruptionBudget"])
@pytest.mark.parametrize("name", ["gateway", "engine"])
def test_policies_choose_the_pods(kind: str, name: str) -> None:
    spec = resource(kind, name)["spec"]
    selector = spec.get("podSelector") or spec["selector"]
    owner = resource("Deployment" if name == "gateway" else "StatefulSet", name)
    assert selector["matchLabels"].items() <= owner["spec"]["template"]["metadata"]["labels"].items()


def test_the_autoscaler_asks_for_a_figure_that_exists() -> None:
    (metric,) = resource("HorizontalPodAutoscaler", "engine")["spec"]["metrics"]
    sources = [*ROOT.glob("services/scheduler/*.py"), ROOT / "shared/metrics.py"]
    assert any(metric["pods"]["metric"]["name"] in source.read_text() for source in sources)


def test_the_autoscalers_alone_decide_how_many_there_are() -> None:
    """A number in a manifest would end engines at each `kubectl apply`, with the requests that they have."""
    targets = [one["spec"]["scaleTargetRef"] for one in RESOURCES if one["kind"] == "HorizontalPodAutoscaler"]
    assert len(targets) == 2
    assert not any("replicas" in resource(target["kind"], target["name"])["spec"] for target in targets)
