"""Tests the scheduler and the worker as programs: how they start and end when something is wrong."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.backend import Backend
from tests.ports import free_ports
from tests.scripted_worker import CHAIN, Script, ScriptedFailure, expected_chain
from tests.system.processes import ROOT, Child, complete, engine, snapshot
from tests.waiting import until

POISON = 666


@pytest.fixture
async def folder() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q") as system:
        yield Path(system)


def refusal(module: str, *flags: str) -> str:
    """Return the one line on stderr of a program that does not start."""
    argv = [sys.executable, "-m", module, *flags]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("module", "flag", "said"),
    [
        ("services.scheduler", "--gateways=udp://here", "scheduler: udp://here: must begin with ipc:// or tcp://"),
        ("services.scheduler", "--workers=tcp://0.0.0.0:1", "needs --zmq-keys, or --insecure"),
        (
            "services.scheduler",
            "--zmq-keys=/nowhere",
            "scheduler: --zmq-keys /nowhere: there is no /nowhere/",
        ),
        ("services.worker", "--zmq-keys=/nowhere", "worker: --zmq-keys /nowhere: there is no /nowhere/worker/"),
        ("services.worker", "--scheduler=tcp://scheduler:1", "needs --zmq-keys, or --insecure"),
        ("services.gateway", "--zmq-keys=/nowhere", "gateway: --zmq-keys /nowhere: there is no /nowhere/gateway/"),
        ("services.gateway", "--engines=tcp://scheduler:1", "needs --zmq-keys, or --insecure"),
        ("services.scheduler", "--max-num-seqs=0", "scheduler: --max-num-seqs '0'"),
        ("services.scheduler", "--nonsense", "scheduler: unrecognized arguments: --nonsense"),
        ("services.worker", "--scheduler=here", "worker: here: must begin with ipc:// or tcp://"),
        ("services.worker", "--gpu-memory-utilization=2", "worker: --gpu-memory-utilization '2'"),
        ("services.worker", "--model=/nowhere/at/all", "worker: there is no folder /nowhere/at/all"),
    ],
)
def test_wrong_settings_are_one_line(module: str, flag: str, said: str) -> None:
    assert said in refusal(module, flag)


async def test_a_metrics_port_that_is_taken_is_one_line(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        flags = [f"--gateways=ipc://{folder}/g.sock", f"--workers=ipc://{folder}/w.sock"]
        port = taken.getsockname()[1]
        line = await asyncio.to_thread(refusal, "services.scheduler", *flags, f"--metrics-port={port}")
        assert line == f"scheduler: --metrics-port {port}: Address already in use"


Figures = dict[str, tuple[dict[str, str], float]]


async def scheduler_figures(port: int) -> Figures:
    """Return the labels and values of a scheduler's own metrics by their names."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: (sample.labels, sample.value) for sample in samples if sample.labels.get("engine")}


async def test_the_scheduler_exports_its_own_figures() -> None:
    (port,) = free_ports(1)
    async with engine(None, f"--metrics-port={port}", "--engine=east") as system, Backend([system.address]) as backend:
        await until(backend.ready)
        await complete(backend, [CHAIN], 9)
        labels = {"engine": "east", "model_name": "scripted"}

        async def generated() -> bool:
            return (await scheduler_figures(port))["vllm:generation_tokens_total"] == (labels, 9.0)

        await until(generated)


async def test_the_scheduler_exports_how_soon_a_lost_worker_was_noticed_and_made_up_for() -> None:
    (port,) = free_ports(1)
    flags = (f"--metrics-port={port}", "--engine=east")
    async with engine(None, *flags) as system, Backend([system.address]) as backend:
        await until(backend.ready)
        with system.slowed():
            running = asyncio.create_task(complete(backend, [CHAIN], 200))
            await until(lambda: snapshot(backend).generation_tokens > 0)
            system.worker.signal(signal.SIGKILL)
            await until(lambda: snapshot(backend).worker_losses == 1)
        await running
        result, labels = await scheduler_figures(port), {"engine": "east"}
    assert result["quire:registered_workers"] == (labels, 1.0)
    assert result["quire:epochs_total"] == (labels, 2.0)
    assert result["quire:worker_detection_seconds_count"] == (labels, 1.0)
    assert result["quire:worker_detection_seconds_sum"][1] < 2.0, "its connection ended, so no timeout was awaited"
    assert result["quire:worker_recovery_seconds_count"] == (labels, 1.0)
    assert result["quire:worker_recovery_seconds_sum"][1] > 0.0


async def test_a_worker_without_a_scheduler_gives_up_after_its_time(folder: Path) -> None:
    flags = [f"--scheduler=ipc://{folder}/w.sock", "--scheduler-timeout=3", f"--supervisor={os.getpid()}"]
    child = Child("worker", folder, ["tests/scripted_worker.py", *flags])
    child.restart = False
    await child.start()
    assert await child.ended() == 1
    assert "no scheduler for 3 s" in child.log


async def test_a_worker_whose_scheduler_does_not_come_back_gives_up() -> None:
    async with engine(worker=False) as system:
        system.scheduler.restart = system.worker.restart = False
        system.worker.argv.append("--scheduler-timeout=3")
        await until(Path(system.workers.removeprefix("ipc://")).exists)  # the worker does not wait for long
        await system.worker.start()
        await until(lambda: "is ready" in system.scheduler.log)
        system.scheduler.signal(signal.SIGKILL)
        assert await system.worker.ended() == 1
        assert "no scheduler for 3 s" in system.worker.log


async def test_the_watchdog_ends_a_worker_whose_step_never_returns() -> None:
    """It is the first step, to which the scheduler gives half a minute; the worker's own limit is shorter here."""
    script = Script(failures=[ScriptedFailure(POISON, "hang", lives=1)])
    async with engine(script, worker=False) as system, Backend([system.address]) as backend:
        system.worker.argv.append("--scheduler-timeout=3")
        await until(Path(system.workers.removeprefix("ipc://")).exists)
        await system.worker.start()
        await until(backend.ready)
        assert (await complete(backend, [CHAIN, POISON], 9)).tokens == expected_chain([CHAIN, POISON], 9)
        assert "Timeout" in system.worker.log
        assert "_fail" in system.worker.log  # the watchdog shows where it hung
        assert system.worker.lives == 2


async def test_services_end_with_their_supervisor(folder: Path) -> None:
    """The supervisor may end in any way, here by SIGKILL."""
    (folder / "script.json").write_bytes(msgspec.json.encode(Script()))
    code = f"""
import os, subprocess, sys, time
me = f"--supervisor={{os.getpid()}}"
addresses = ["--gateways=ipc://{folder}/g.sock", "--workers=ipc://{folder}/w.sock"]
one = subprocess.Popen([sys.executable, "-m", "services.scheduler", *addresses, me])
two = subprocess.Popen([sys.executable, "tests/scripted_worker.py", "--scheduler=ipc://{folder}/w.sock", me])
print(one.pid, two.pid, flush=True)
time.sleep(60)
"""
    log = (folder / "log").open("w")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=ROOT, stdout=-1, stderr=log)
    assert process.stdout is not None
    pids = [int(pid) for pid in (await process.stdout.readline()).split()]
    await until(lambda: "is ready" in (folder / "log").read_text())
    process.kill()
    await process.wait()
    await until(lambda: not any(alive(pid) for pid in pids))
    log.close()


def alive(pid: int) -> bool:
    """Return whether the process lives. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
