"""Runs a peer: a server over HTTP, or a program of `inside/` that takes jobs on its stdin.

A peer is ready when it has answered a request of one token. It is ended with all its children.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.peers.environments import ROOT, SHOWN, Skipped
from benchmarks.peers.launch import Launch
from tests.ports import free_ports

READY = 600.0  # seconds
POLL = 0.02  # seconds
GRACE = 20.0  # seconds to end by itself
LOOK = 1.0  # seconds in which the CPUs' load is looked at


class Running(NamedTuple):
    """A peer that runs and has answered once."""

    process: "subprocess.Popen[str]"
    started: float  # seconds from the command to its first answer
    url: str = ""  # of a server

    def memory(self) -> float:
        """Return the MB of all its processes, shared pages counted once."""
        root = psutil.Process(self.process.pid)
        pages = [one.memory_full_info().pss for one in [root, *root.children(recursive=True)]]
        return float(sum(pages)) / 1e6

    def job(self, **job: Any) -> dict[str, Any]:
        """Send a job to a program; return its answer. Raise `Skipped` if it ends instead."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return _answer(self.process)


def busy() -> float:
    """Return the per cent of all CPUs in use, which nothing should use before a peer starts."""
    return float(psutil.cpu_percent(LOOK))


@contextlib.contextmanager
def serving(launch: Launch, name: str, log: Path) -> Iterator[Running]:
    """Run a server; yield it once it is ready. Raise `Skipped` with the end of its log if it fails."""
    port = free_ports(1)[0]
    argv = [part.replace("{port}", str(port)) for part in launch.argv]
    with _process(argv, launch, log, drives=False) as process:
        began, url = time.perf_counter(), f"http://127.0.0.1:{port}"
        while not _answers(url, name):
            if process.poll() is not None or time.perf_counter() - began > READY:
                raise Skipped(f"does not start: {_end(log)}")
            time.sleep(POLL)
        yield Running(process, time.perf_counter() - began, url)


@contextlib.contextmanager
def driving(launch: Launch, log: Path) -> Iterator[Running]:
    """Run a program of `inside/`; yield it once it is ready. Raise `Skipped` with the end of its log if it fails."""
    began = time.perf_counter()
    with _process(launch.argv, launch, log, drives=True) as process:
        try:
            _answer(process)
        except Skipped as error:
            raise Skipped(f"does not start: {_end(log)}") from error
        yield Running(process, time.perf_counter() - began)


@contextlib.contextmanager
def _process(argv: Sequence[str], launch: Launch, log: Path, *, drives: bool) -> Iterator["subprocess.Popen[str]"]:
    """Start a process with its output in `log`; stdout is a pipe for a program that takes jobs."""
    with log.open("w") as file:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if drives else file,
            stderr=file,
            text=True,
            cwd=ROOT,
            env=os.environ | dict(launch.env),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: "subprocess.Popen[str]") -> None:
    """End a process and all of its session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise Skipped(f"ended with status {process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _answers(url: str, name: str) -> bool:
    body = {"model": name, "prompt": "The capital of France is", "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=READY) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def _end(log: Path) -> str:
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return said[-1][:SHOWN] if said else "it says nothing"
