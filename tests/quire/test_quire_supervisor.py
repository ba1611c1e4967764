"""Tests the supervisor on real processes: small fakes that end on SIGTERM and with their supervisor, as services do."""

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from quire import children
from quire import supervisor as supervisor_module
from quire.children import Child, StartFailed
from quire.service_log import ServiceLog
from quire.supervisor import INTERRUPTED, STOPPING, Supervisor
from quire.watch import Watch
from tests.waiting import PATIENCE, until, wait_until

SERVICE = """
import os, signal, sys, time
from pathlib import Path
from shared.startup import end_with_supervisor
end_with_supervisor(int(sys.argv[4]))
folder, name, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
with (folder / f"{name}.starts").open("a") as starts:
    starts.write("x")
if mode == "refuse":
    print("no such model", file=sys.stderr)
    sys.exit(1)
if mode == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
def stop(number, frame):
    with (folder / "stopped").open("a") as stopped:
        stopped.write(name + "\\n")
    time.sleep(0.5 if mode == "linger" else 0)
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else stop)
(folder / f"{name}.up").write_text("")
while mode != "follow" or not (folder / "stopped").exists() or "scheduler" not in (folder / "stopped").read_text():
    time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no child be killed because it gets no CPU to end."""
    monkeypatch.setattr(supervisor_module, "QUICK_STOP", PATIENCE)


class Fakes:
    """A supervisor of fake services in `folder`, each named after its role and behaving as `modes` say."""

    def __init__(self, folder: Path, modes: dict[str, str]) -> None:
        (folder / "fake_service.py").write_text(SERVICE)
        self.folder = folder
        self.names = list(modes)
        self.out = io.BytesIO()
        self.announced = 0
        self.said: list[str] = []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
        self.children = [
            Child(name, ["fake_service", str(folder), name, mode, str(os.getpid())], ServiceLog(self.out), environment)
            for name, mode in modes.items()
        ]

    def supervisor(self, *, ready_timeout: float = PATIENCE, drain_timeout: float = PATIENCE) -> Supervisor:
        return Supervisor(
            self.children,
            ready=self.ready,
            announce=self.announce,
            say=self.said.append,
            ready_timeout=ready_timeout,
            drain_timeout=drain_timeout,
        )

    async def ready(self) -> bool:
        return all((self.folder / f"{name}.up").exists() for name in self.names)

    def announce(self) -> None:
        self.announced += 1

    def starts(self, name: str) -> int:
        path = self.folder / f"{name}.starts"
        return len(path.read_text()) if path.exists() else 0

    def stopped(self) -> list[str]:
        return (self.folder / "stopped").read_text().split()

    @asynccontextmanager
    async def running(self, supervisor: Supervisor) -> AsyncIterator["asyncio.Task[int]"]:
        """Run the supervisor for the time of the block. Fail if children are left at the end."""
        task = asyncio.create_task(supervisor.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert own_children() == []


def own_children() -> Sequence[int]:
    """Return the pids of fake services that still run."""
    return [
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "fake_service" in child.cmdline()
    ]


async def test_a_signal_stops_the_children_in_order(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"gateway": "serve", "worker": "serve", "scheduler": "serve"})
    async with fakes.running(fakes.supervisor()) as run:
        await until(lambda: fakes.announced == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run == 0
        assert own_children() == []
    assert fakes.stopped() == ["gateway", "worker", "scheduler"]
    assert fakes.said == [STOPPING, "stopped"]


async def test_children_of_one_role_are_stopped_together(tmp_path: Path) -> None:
    """One that does not end in time delays none of its kind, and those behind it wait."""
    fakes = Fakes(tmp_path, {"gateway": "serve", "other": "deaf", "worker": "serve"})
    fakes.children[0].role = "other"
    fakes.children = [fakes.children[1], fakes.children[0], fakes.children[2]]
    async with fakes.running(fakes.supervisor(drain_timeout=1000.0)) as run:
        await until(lambda: fakes.announced == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: (tmp_path / "stopped").exists() and fakes.stopped() == ["gateway"])
        await asyncio.sleep(0.2)
        assert fakes.stopped() == ["gateway"]
        fakes.children[0].kill()
        assert await run == 0
    assert fakes.stopped() == ["gateway", "worker"]


async def test_a_second_signal_cuts_the_drain_short(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"gateway": "deaf", "worker": "serve"})
    async with fakes.running(fakes.supervisor(drain_timeout=1000.0)) as run:
        await until(lambda: fakes.announced == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert not run.done()
        os.kill(os.getpid(), signal.SIGINT)
        assert await run == INTERRUPTED + signal.SIGINT


async def test_a_signal_before_readiness_ends_the_start(tmp_path: Path) -> None:
    """PRC-05."""
    fakes = Fakes(tmp_path, {"gateway": "serve", "worker": "serve"})
    supervisor = fakes.supervisor()
    supervisor.ready = never
    async with fakes.running(supervisor) as run:
        await until(lambda: (tmp_path / "worker.up").exists())
        os.kill(os.getpid(), signal.SIGINT)
        assert await run == INTERRUPTED + signal.SIGINT
    assert fakes.announced == 0
    assert fakes.said == ["stopped"]


async def never() -> bool:
    return False


async def test_the_start_fails_when_readiness_takes_too_long(tmp_path: Path) -> None:
    """PRC-05."""
    fakes = Fakes(tmp_path, {"gateway": "serve"})
    supervisor = fakes.supervisor(ready_timeout=0.3)
    supervisor.ready = never
    async with fakes.running(supervisor) as run:
        with pytest.raises(StartFailed, match=r"not ready within 0\.3 s"):
            await run


async def test_a_refusal_ends_the_start_and_nothing_is_tried_again(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"gateway": "serve", "worker": "refuse"})
    async with fakes.running(fakes.supervisor()) as run:
        with pytest.raises(StartFailed, match=r"the worker ended before it was ready \(exit status 1\)"):
            await run
    assert fakes.starts("worker") == 1
    assert b"worker    | no such model\n" in fakes.out.getvalue()


async def test_a_child_that_is_killed_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "FIRST_PAUSE", 0.01)
    fakes = Fakes(tmp_path, {"worker": "crash"})
    async with fakes.running(fakes.supervisor()) as run:
        with pytest.raises(StartFailed, match=r"ended 3 times before it was ready \(signal SIGKILL\)"):
            await run
    assert fakes.starts("worker") == 3


async def test_a_killed_child_comes_back(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"gateway": "serve", "worker": "serve"})
    async with fakes.running(fakes.supervisor()) as run:
        await until(lambda: fakes.announced == 1)
        process = fakes.children[1].process
        assert process is not None
        (tmp_path / "worker.up").unlink()
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: (tmp_path / "worker.up").exists())
        assert not run.done()
    assert fakes.starts("worker") == 2
    assert fakes.starts("gateway") == 1
    assert b"ended (signal SIGKILL); starts again in 0.2 s" in fakes.out.getvalue()


async def test_a_child_is_not_brought_back_while_draining(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"gateway": "serve", "worker": "serve"})
    async with fakes.running(fakes.supervisor()) as run:
        await until(lambda: fakes.announced == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run == 0
    assert fakes.starts("worker") == 1


async def test_one_that_ends_with_another_is_not_brought_back(tmp_path: Path) -> None:
    """As a rank does. No request is left by then."""
    fakes = Fakes(tmp_path, {"gateway": "serve", "scheduler": "linger", "worker": "follow"})
    async with fakes.running(fakes.supervisor()) as run:
        await until(lambda: fakes.announced == 1)
        os.kill(os.getpid(), signal.SIGINT)
        assert await run == 0
    assert fakes.stopped() == ["gateway", "scheduler"]
    assert fakes.starts("worker") == 1
    assert b"starts again" not in fakes.out.getvalue()


def test_pauses_grow_up_to_a_bound_and_deaths_after_readiness_are_never_final() -> None:
    child = Child("worker", [], ServiceLog(io.BytesIO()), {})
    child.note_server_ready()
    pauses = [child.pause(1, deaths) for deaths in range(1, 9)]
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert child.pause(1, 10_000) == 10.0


async def test_the_log_labels_lines_and_keeps_progress_bars() -> None:
    source, out = asyncio.StreamReader(), io.BytesIO()
    source.feed_data(b"one\ntw")
    source.feed_data(b"o\n\r 10%\r 20%\r100%\nlast")
    source.feed_eof()
    await ServiceLog(out).copy("worker", source)
    label = b"worker    | "
    assert out.getvalue() == b"".join(
        label + line for line in (b"one\n", b"two\n", b" 10%\r", b" 20%\r", b"100%\n", b"last\n")
    )


async def test_as_json_each_line_of_the_log_is_an_object() -> None:
    """A record of a child keeps its fields; other output becomes a message. Errors are recognised in both."""
    source, out = asyncio.StreamReader(), io.BytesIO()
    record = (
        b'{"time": "now", "level": "critical", "service": "worker", "message": "worker: no model", "logger": "worker"}'
    )
    source.feed_data(b"Fatal \x1b[1merror\n{not json\n[1]\n" + record + b"\n")
    source.feed_eof()
    log = ServiceLog(out, as_json=True)
    await log.copy("worker 1", source)
    assert log.last_lines == {"worker 1": "worker: no model"}
    log.write("worker 1", "ended")
    *others, last, own = map(json.loads, out.getvalue().splitlines())
    assert last == json.loads(record) | {"service": "worker 1"}
    assert (own["level"], own["message"]) == ("warning", "ended")
    assert [one["message"] for one in others] == ["Fatal \x1b[1merror", "{not json", "[1]"]
    assert {one["service"] for one in [*others, own]} == {"worker 1"}


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    """PRC-01."""
    script = tmp_path / "supervise.py"
    script.write_text(
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from test_quire_supervisor import Fakes\n"
        f"fakes = Fakes(Path({str(tmp_path)!r}), {{'gateway': 'serve', 'worker': 'deaf'}})\n"
        "asyncio.run(fakes.supervisor().run())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with psutil.Popen([sys.executable, str(script)], env=environment) as supervisor:
        wait_until(lambda: all((tmp_path / f"{name}.up").exists() for name in ("gateway", "worker")))
        descendants = supervisor.children(recursive=True)
        supervisor.kill()
        supervisor.wait()
    assert len(descendants) == 2
    _, alive = psutil.wait_procs(descendants, timeout=PATIENCE)
    assert alive == []


class BrokenWatch(Watch):
    """A watch with a bug."""

    def __init__(self) -> None:
        """Watch nothing."""

    def find_hung(self, children: Sequence[Child], now: float) -> list[tuple[Child, str]]:
        """Fail."""
        raise LookupError("of mine")


async def test_a_watch_that_fails_is_told_and_serving_goes_on(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"gateway": "serve"})
    supervisor = fakes.supervisor()
    supervisor.watch = BrokenWatch()
    async with fakes.running(supervisor) as task:
        await until(lambda: fakes.announced == 1 and len(fakes.said) == 1)
        assert fakes.said == ["services that hang are no longer replaced, because of a bug: LookupError('of mine')"]
        os.kill(os.getpid(), signal.SIGTERM)
        assert await task == 0
