"""Tests `quire serve` as users run it: real processes, a tiny model, and signals."""

import http.client
import json
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.instance_folder import remove_stale
from quire.supervisor import STOPPING
from tests.ports import free_ports
from tests.quire.quire_server import Server, health, healthy, serving, short_folder
from tests.waiting import PATIENCE, found_dead, wait_until

BODY = {"model": "tiny", "prompt": "The quick", "temperature": 0, "max_tokens": 8}
SOCKETS = {"gateways-0.sock", "workers-0.sock", "heartbeats.sock"}


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=2 * PATIENCE) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def continuation(url: str, **fields: Any) -> str:
    text: str = post(f"{url}/v1/completions", BODY | fields)["choices"][0]["text"]
    return text


def wait_for(holds: Callable[[], bool], server: Server) -> None:
    """Wait until `holds()`. Fail with what the server wrote to stderr after two minutes."""
    wait_until(holds, 2 * PATIENCE, server.err.read_text)


class OnSocket(http.client.HTTPConnection):
    """A connection to a server that listens at a path."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(self.host)


def test_a_start_line_of_vllm_serves_at_a_unix_socket(folder: Path, tmp_path: Path) -> None:
    """API-02: --uds and --uvicorn-log-level have their effect, and a line names the flags that have none."""
    with short_folder() as place:
        path = str(place / "q.sock")
        flags = [f"--uds={path}", "--uvicorn-log-level", "error", "--optimization-level=2", "--max_model_len", "1k"]
        with serving(folder, tmp_path, *flags, place=place) as server:
            wait_for(lambda: f"Quire serves tiny at the socket {path}" in server.out.read_text(), server)
            connection = OnSocket(path)
            connection.request("POST", "/v1/completions", json.dumps(BODY), {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                assert (response.status, json.load(response)["object"]) == (200, "text_completion")
            connection.close()
            command = next(line for line in server.out.read_text().splitlines() if line.startswith("  curl"))
            assert f"--unix-socket {path} http://localhost/v1/" in command
            assert server.stop(signal.SIGTERM) == 0
        said = server.err.read_text()
        assert said.startswith("quire: --optimization-level 2 is accepted without effect: ")
        assert " INFO " not in said


def kill_and_await_the_next(server: Server, name: str) -> None:
    victim = server.children()[name]
    victim.kill()
    wait_for(lambda: healthy(server.url) and server.children().get(name) not in (victim, None), server)


def test_it_serves_restarts_what_dies_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """PRC-01."""
    with serving(folder, tmp_path) as server:
        url = server.url
        assert server.files() >= SOCKETS
        command = next(line for line in server.out.read_text().splitlines() if line.startswith("  curl"))
        shown = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
        assert json.loads(shown)["choices"][0]["message"]["role"] == "assistant"
        before = continuation(url)
        for name in ("worker", "scheduler", "gateway"):
            kill_and_await_the_next(server, name)
            assert continuation(url) == before
        assert server.stop(signal.SIGTERM) == 0
        assert list(server.place.iterdir()) == []
    assert "Traceback" not in server.err.read_text()


def test_a_worker_that_is_told_to_end_under_steady_load_is_replaced(folder: Path, tmp_path: Path) -> None:
    """Requests wait for the next one, and none is a suspect."""
    with serving(folder, tmp_path) as server, ThreadPoolExecutor(4) as clients:
        url = server.url
        before, replaced = continuation(url), threading.Event()

        def ask_until_replaced() -> set[str]:
            texts = set()
            while not replaced.is_set():
                texts.add(continuation(url))
            return texts

        answers = [clients.submit(ask_until_replaced) for _ in range(4)]
        try:
            worker = server.children()["worker"]
            worker.terminate()
            wait_for(lambda: server.children().get("worker") not in (worker, None), server)
        finally:
            replaced.set()
        assert all(answer.result() == {before} for answer in answers)
        said = server.err.read_text()
        assert "worker    | ended (exit status 0); starts again" in said
        assert not any(word in said for word in ("suspect", "given up", "Traceback"))
        with urllib.request.urlopen(f"{url}/metrics") as response:
            losses = re.findall(r"^quire:worker_losses_total{.*} (.*)$", response.read().decode(), re.MULTILINE)
        assert losses == ["0.0"]
        assert server.stop(signal.SIGTERM) == 0


@pytest.mark.parametrize("name", ["scheduler", "gateway", "worker"])
def test_what_is_stopped_is_replaced(folder: Path, tmp_path: Path, name: str) -> None:
    """PRC-25."""
    with serving(folder, tmp_path) as server:
        url = server.url
        before = continuation(url)
        victim = server.children()[name]
        victim.suspend()
        wait_for(lambda: server.children().get(name) not in (victim, None) and healthy(url), server)
        assert continuation(url) == before
        said = server.err.read_text()
        if name == "worker":
            assert found_dead(said, "is given up: silent", 2)
        else:
            assert found_dead(said, rf"{name:<9} \| is killed: silent", 4)
        assert said.count("is killed") == (name != "worker")
        assert server.stop(signal.SIGTERM) == 0


def test_what_is_killed_leaves_nothing_and_hurts_no_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PRC-01, PRC-04.

    Servers are killed one after the other while their model loads: the supervisor alone, or all processes.
    """
    temporary, shared = tmp_path / "temporary", Path("/dev/shm")
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    port, before = f"--port={free_ports(1)[0]}", set(shared.iterdir())
    with short_folder() as place, serving(folder, tmp_path / "live", place=place) as live:
        for at in range(3):
            with serving(folder, tmp_path / f"killed{at}", port, place=place) as server:
                wait_for(lambda: server.files() >= SOCKETS and len(server.children()) == 3, server)
                server.end(signal.SIGKILL, whole_family=at % 2 == 1)
            wait_for(lambda: set(shared.iterdir()) <= before, server)
            assert len(list(place.iterdir())) == 2  # those of the last one and of the one that lives
            assert list(temporary.iterdir()) == []
        with serving(folder, tmp_path / "next", port, place=place) as server:
            wait_for(lambda: len(server.children()) == 3, server)
            for name in ("gateway", "scheduler"):  # these come back, in the time of the start too
                server.children()[name].kill()
            assert continuation(server.url) == continuation(live.url)
            server.end(signal.SIGKILL)
        assert len(remove_stale(place)) == 1
        assert live.files() >= SOCKETS
        assert live.stop(signal.SIGTERM) == 0
        assert list(place.iterdir()) == []


@pytest.mark.parametrize("flags", [[], ["--tensor-parallel-size=2"]], ids=["one worker", "two ranks"])
def test_services_that_are_told_to_end_warn_of_nothing(folder: Path, tmp_path: Path, flags: list[str]) -> None:
    with serving(folder, tmp_path, *flags, "--device=cpu") as server:
        continuation(server.url)
        assert server.stop(signal.SIGINT) == 0
    _, said, ending = server.err.read_text().partition(STOPPING)
    assert said
    assert not re.search("WARNING|ERROR|starts again|killed", ending), ending


@pytest.mark.parametrize("seconds", [0.2, 1.0, 3.0, 6.0])
def test_ctrl_c_at_any_moment_of_the_start_leaves_nothing(folder: Path, tmp_path: Path, seconds: float) -> None:
    """PRC-05."""
    with serving(folder, tmp_path) as server:
        time.sleep(seconds)
        began, announced = bool(server.files()), is_announced(server)
        status = server.stop(signal.SIGINT)
        allowed = {0} if announced else {0, 130} if is_announced(server) else {130}  # it may have become so just then
        assert status in allowed or (not began and status == -signal.SIGINT)  # modules were imported
    assert "Traceback" not in server.err.read_text()


def is_announced(server: Server) -> bool:
    return "ready in" in server.out.read_text()


def test_a_start_that_takes_too_long_is_given_up(folder: Path, tmp_path: Path) -> None:
    """PRC-05."""
    with serving(folder, tmp_path, "--ready-timeout=0.5") as server:
        assert server.process.wait(timeout=PATIENCE) == 1
        assert list(server.place.iterdir()) == []
    assert "quire: not ready within 0.5 s (--ready-timeout)" in server.err.read_text()


def test_a_broken_model_ends_the_start_with_the_reason(folder: Path, tmp_path: Path) -> None:
    """Only the worker can see that this model is broken."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in folder.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    config = json.loads((broken / "config.json").read_bytes()) | {"hidden_size": 36}
    (broken / "config.json").write_text(json.dumps(config))
    with serving(broken, tmp_path) as server:
        assert server.process.wait(timeout=2 * PATIENCE) == 1
        assert list(server.place.iterdir()) == []
    shown = server.err.read_text()
    last = shown.splitlines()[-1]
    assert last.startswith("quire: the worker ended before it was ready: ")
    assert "tensor model.decoder.project_in.weight is missing" in last
    assert "Traceback" not in shown


def test_two_servers_started_at_once_do_not_meet(folder: Path, tmp_path: Path) -> None:
    """PRC-08."""
    flags = [f"--port={port}" for port in free_ports(2)]
    with (
        short_folder() as place,
        serving(folder, tmp_path / "one", flags[0], place=place) as one,
        serving(folder, tmp_path / "two", flags[1], place=place) as two,
    ):
        assert continuation(one.url) == continuation(two.url)
        assert one.files() >= SOCKETS
        assert one.stop(signal.SIGTERM) == 0
        assert two.files() >= SOCKETS
        assert healthy(two.url)
        assert two.stop(signal.SIGTERM) == 0
        assert list(place.iterdir()) == []


def test_several_engines_and_gateways_serve_as_one(folder: Path, tmp_path: Path) -> None:
    """Streams go on with the same text when a scheduler is killed, whichever gateway they came by."""
    flags = ["--data-parallel-size=2", "--api-server-count=2"]
    long = {"max_tokens": 100, "ignore_eos": True}
    with serving(folder, tmp_path, *flags) as server, ThreadPoolExecutor(16) as threads:
        url = server.url
        names = {f"{role} {number}" for role in ("gateway", "scheduler", "worker") for number in (0, 1)}
        assert set(server.all_children()) == names
        undisturbed, resumed = continuation(url, **long), threading.Event()

        def ask_until_resumed() -> list[str]:
            answers = [continuation(url, **long)]
            while not resumed.is_set():
                answers.append(continuation(url, **long))
            return answers

        clients = [threads.submit(ask_until_resumed) for _ in range(16)]
        try:
            wait_for(lambda: running(url, "0") > 0 and running(url, "1") > 0, server)
            server.all_children()["scheduler 0"].kill()
            wait_for(lambda: figure(url, "quire:resumed_requests_total ") > 0, server)
        finally:
            resumed.set()
        answers = [answer for client in clients for answer in client.result()]
        assert set(answers) == {undisturbed}
        files = server.files()
        for name in sorted(names):
            victim = server.all_children()[name]
            victim.kill()
            wait_for(lambda name=name, old=victim: server.all_children().get(name) not in (old, None), server)
        wait_for(lambda: health(url, 2) == 200, server)
        assert figure(url, 'vllm:request_success_total{engine="', 'finished_reason="length"') == 1 + len(answers)
        assert server.files() == files
        assert server.stop(signal.SIGTERM) == 0
        said = server.err.read_text()
        assert "scheduler 0 | ended (signal SIGKILL); starts again in 0.2 s" in said
        assert "Traceback" not in said


def figure(url: str, *parts: str) -> float:
    """Return the sum of the values in /metrics whose lines have all `parts`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(part in line for part in parts))


def running(url: str, engine: str) -> float:
    return figure(url, f'vllm:num_requests_running{{engine="{engine}"')


def test_an_engine_that_cannot_start_is_named(folder: Path, tmp_path: Path) -> None:
    flags = ["--data-parallel-size=2", "--kv-cache-memory=0.0000001"]
    with serving(folder, tmp_path, *flags) as server:
        assert server.process.wait(timeout=2 * PATIENCE) == 1
    last = server.err.read_text().splitlines()[-1]
    assert re.match(r"quire: scheduler [01] ended before it was ready: the worker has \d+ bytes for KV", last)
