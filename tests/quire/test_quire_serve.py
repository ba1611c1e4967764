"""`quire serve` as a user meets it: real processes, the tiny model, signals."""

import json
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.quire.serving import healthy, serving


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
