"""Tests that a service ends with its supervisor, and that nobody can forge log lines."""

import subprocess
import sys

import psutil

from tests.waiting import PATIENCE

CHILD = """
import os, time
from shared.startup import end_with_supervisor
end_with_supervisor(os.getppid())
print(os.getpid(), flush=True)
time.sleep(60)
"""
SUPERVISOR = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_service_ends_with_its_supervisor() -> None:
    """PRC-01."""
    argv = [sys.executable, "-c", SUPERVISOR, CHILD]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        service = psutil.Process(int(supervisor.stdout.readline()))
        supervisor.kill()
    service.wait(timeout=PATIENCE)


def test_a_service_whose_supervisor_is_gone_does_not_start() -> None:
    argv = [sys.executable, "-c", "from shared.startup import end_with_supervisor; end_with_supervisor(1_000_000_000)"]
    assert subprocess.run(argv, check=False).returncode == 1
