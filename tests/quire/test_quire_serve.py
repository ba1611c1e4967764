"""`quire serve` as a user meets it: real processes, the tiny model, signals."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
GONE_WITHIN = 10.0  # seconds after a signal


class Server:
    """A running `quire serve`, its output in files of `folder`."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        self.place = folder / "run"
        self.place.mkdir(exist_ok=True)
        self.out, self.err = folder / "out", folder / "err"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_RUNTIME_DIR": str(self.place),
            "OMP_NUM_THREADS": "1",
        }
        argv = [sys.executable, "-m", "quire", "serve", str(model), "--host=127.0.0.1", "--port=0"]
        argv += ["--kv-cache-memory=0.05", "--num-threads=1", "--served-model-name=tiny", *flags]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = psutil.Popen(argv, stdout=out, stderr=err, env=environment)

    @property
    def url(self) -> str:
        """Once it is announced."""
        deadline = time.monotonic() + 90
        while not (found := re.search(r"at (http://\S+) \(ready", self.out.read_text())):
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.05)
        return found[1]

    def children(self) -> dict[str, psutil.Process]:
        """Services by name."""
        found = {}
        for child in self.process.children():
            with suppress(psutil.Error):  # it has just ended
                argv = child.cmdline()
                found |= {name: child for name in ("gateway", "scheduler", "worker") if f"services.{name}" in argv}
        return found

    def stop(self, number: signal.Signals) -> int:
        """Send a signal; the exit status. Everything must be gone in time, files included."""
        family = [self.process, *self.process.children(recursive=True)]
        self.process.send_signal(number)
        _, alive = psutil.wait_procs(family, timeout=GONE_WITHIN)
        assert alive == [], self.err.read_text()
        assert list(self.place.iterdir()) == []
        return int(self.process.returncode)


@contextmanager
def serving(model: Path, folder: Path, *flags: str) -> Iterator[Server]:
    server = Server(model, folder, *flags)
    try:
        yield server
    finally:
        if server.process.is_running():
            server.process.kill()  # its children follow
            server.process.wait()


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def test_it_serves_restarts_what_dies_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path) as server:
        url = server.url
        command = next(line for line in server.out.read_text().splitlines() if line.startswith("  curl"))
        shown = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
        assert json.loads(shown)["choices"][0]["message"]["role"] == "assistant"
        body = {"model": "tiny", "prompt": "The quick", "temperature": 0, "max_tokens": 8}
        before = post(f"{url}/v1/completions", body)["choices"][0]["text"]
        for name in ("worker", "scheduler", "gateway"):
            victim = server.children()[name]
            victim.kill()
            deadline = time.monotonic() + 60
            while not healthy(url) or server.children().get(name) in (victim, None):
                assert time.monotonic() < deadline, server.err.read_text()
                time.sleep(0.05)
            assert post(f"{url}/v1/completions", body)["choices"][0]["text"] == before
        assert server.stop(signal.SIGTERM) == 0
    assert "Traceback" not in server.err.read_text()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("seconds", [0.2, 1.0, 3.0, 6.0])
def test_ctrl_c_at_any_moment_of_the_start_leaves_nothing(folder: Path, tmp_path: Path, seconds: float) -> None:
    with serving(folder, tmp_path) as server:
        time.sleep(seconds)
        announced = "ready in" in server.out.read_text()
        status = server.stop(signal.SIGINT)
        assert status == (0 if announced else 130) or (seconds < 0.5 and status == -signal.SIGINT)
    assert "Traceback" not in server.err.read_text()


def test_a_start_that_takes_too_long_is_given_up(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, "--ready-timeout=0.5") as server:
        assert server.process.wait(timeout=30) == 1
        assert list(server.place.iterdir()) == []
    assert "quire: not ready within 0.5 s (--ready-timeout)" in server.err.read_text()


def test_a_broken_model_ends_the_start_with_the_reason(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in folder.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    config = json.loads((broken / "config.json").read_bytes()) | {"architectures": ["NoSuchForCausalLM"]}
    (broken / "config.json").write_text(json.dumps(config))
    with serving(broken, tmp_path) as server:
        assert server.process.wait(timeout=60) == 1
        assert list(server.place.iterdir()) == []
    shown = server.err.read_text()
    assert "NoSuchForCausalLM is not supported" in shown
    assert "Traceback" not in shown


def test_two_servers_at_once_do_not_meet(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    with serving(folder, tmp_path) as one, serving(folder, tmp_path / "two") as two:
        body = {"model": "tiny", "prompt": "The quick", "temperature": 0, "max_tokens": 8}
        assert len({post(f"{server.url}/v1/completions", body)["choices"][0]["text"] for server in (one, two)}) == 1
        assert one.url != two.url
        assert one.stop(signal.SIGTERM) == 0
        assert healthy(two.url)
        assert two.stop(signal.SIGTERM) == 0
